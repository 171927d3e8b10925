r"""Rings: circles with centres of their own, in a random plane.

A task has K ~ U{1..3} equally likely circles: centres N(0, (a/2)^2 I) with a = 5, radii U(a/4, a). A point is at a
uniform angle, in a uniformly random plane of the space, and N(0, s^2 I), s = 0.1, is added. Points are data (t = 1).
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
class Rings(Family):
    """Circles in a random plane.

    Args:
        dim: coordinates of a point, at least 2.
        min_rings, max_rings: circles of a task, each number equally likely.
        scale: largest radius, and twice the standard deviation of centres, in data units.
        noise: standard deviation of isotropic noise, in data units.
    """

    dim: int = 2
    min_rings: int = 1
    max_rings: int = 3
    scale: float = 5.0
    noise: float = 0.1

    name: ClassVar[str] = "rings"

    def __post_init__(self) -> None:
        check_dim(self.dim, 2, self.name)
        check_range(self.min_rings, self.max_rings, "rings")
        check_scales(self, "scale", "noise")

    @property
    def event_shape(self) -> tuple[int, ...]:
        return (self.dim,)

    def draw(self, n_tasks: int, count: int, generator: torch.Generator, dtype: torch.dtype) -> Drawn:
        where: dict = {"generator": generator, "device": generator.device, "dtype": dtype}
        ring = draw_components(draw_counts(self.min_rings, self.max_rings, n_tasks, generator), count, generator)
        radii = self.scale * (0.25 + 0.75 * torch.rand(n_tasks, self.max_rings, **where))
        centres = 0.5 * self.scale * torch.randn(n_tasks, self.max_rings, 2, **where)
        angle = 2 * math.pi * torch.rand(n_tasks, count, **where)
        circle = torch.stack([angle.cos(), angle.sin()], dim=-1) * radii.gather(1, ring)[..., None]
        flat = circle + centres.gather(1, ring[..., None].expand(-1, -1, 2))
        points = embedded(flat, self.dim, generator)
        return Drawn(points + self.noise * torch.randn(points.shape, **where))
