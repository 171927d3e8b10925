r"""Spirals: arms of an Archimedean spiral, of random size, winding, place and orientation, in a random plane.

A task has K ~ U{1..3} arms, equally likely and evenly turned: a point at share u of its arm has radius R (0.1 + 0.9 u)
and angle 2 pi (w u + k/K), with u^2 uniform on (0, 1) (so that points are about evenly spaced along an arm), w ~ U(0.5,
1.5) turns of a random sense, and R ~ U(s/2, s), s = 5. The centre is N(0, (s/2)^2 I), the plane uniformly random, and
N(0, 0.1^2 I) is added. Points are data (t = 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from nwflow.tasks.family import (
    Drawn,
    Family,
    check_dim,
    check_range,
    check_scales,
    draw_components,
    draw_counts,
    embedded,
)


@dataclass(frozen=True)
class Spirals(Family):
    """Arms of a spiral in a random plane.

    Args:
        dim: coordinates of a point, at least 2.
        min_arms, max_arms: arms of a task, each number equally likely.
        scale: largest radius, and twice the standard deviation of centres, in data units.
        noise: standard deviation of isotropic noise, in data units.
    """

    dim: int = 2
    min_arms: int = 1
    max_arms: int = 3
    scale: float = 5.0
    noise: float = 0.1

    name: ClassVar[str] = "spirals"

    def __post_init__(self) -> None:
        check_dim(self.dim, 2, self.name)
        check_range(self.min_arms, self.max_arms, "arms")
        check_scales(self, "scale", "noise")

    @property
    def event_shape(self) -> tuple[int, ...]:
        return (self.dim,)

    def draw(self, n_tasks: int, count: int, generator: torch.Generator, dtype: torch.dtype) -> Drawn:
        where: dict = {"generator": generator, "device": generator.device, "dtype": dtype}
        counts = draw_counts(self.min_arms, self.max_arms, n_tasks, generator)
        arm = draw_components(counts, count, generator) / counts[:, None]
        u = torch.rand(n_tasks, count, **where).sqrt()
        sense = torch.where(torch.rand(n_tasks, 1, **where) < 0.5, -1.0, 1.0).to(dtype)
        turns = sense * (0.5 + torch.rand(n_tasks, 1, **where))
        angle = 2 * math.pi * (turns * u + arm.to(dtype))
        radius = self.scale * (0.5 + 0.5 * torch.rand(n_tasks, 1, **where)) * (0.1 + 0.9 * u)
        centre = 0.5 * self.scale * torch.randn(n_tasks, 1, 2, **where)
        flat = radius[..., None] * torch.stack([angle.cos(), angle.sin()], dim=-1) + centre
        points = embedded(flat, self.dim, generator)
        return Drawn(points + self.noise * torch.randn(points.shape, **where))
