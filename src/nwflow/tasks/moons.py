r"""Two moons: interleaved half circles, of random size, distance, place and orientation, in a random plane.

In units of the radius the moons are (cos a, sin a) and (1 - cos a, g - sin a), a uniform on (0, pi), each equally
likely, with the gap g ~ U(0, 1) (0.5 is the usual figure). The radius is U(s/4, s), s = 5, the centre N(0, (s/2)^2 I),
the plane uniformly random, and N(0, 0.1^2 I) is added. Points are data (t = 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from nwflow.tasks.family import Drawn, Family, check_dim, check_scales, embedded


@dataclass(frozen=True)
class Moons(Family):
    """Two interleaved half circles in a random plane.

    Args:
        dim: coordinates of a point, at least 2.
        scale: largest radius, and twice the standard deviation of centres, in data units.
        noise: standard deviation of isotropic noise, in data units.
    """

    dim: int = 2
    scale: float = 5.0
    noise: float = 0.1

    name: ClassVar[str] = "moons"

    def __post_init__(self) -> None:
        check_dim(self.dim, 2, self.name)
        check_scales(self, "scale", "noise")

    @property
    def event_shape(self) -> tuple[int, ...]:
        return (self.dim,)

    def draw(self, n_tasks: int, count: int, generator: torch.Generator, dtype: torch.dtype) -> Drawn:
        where: dict = {"generator": generator, "device": generator.device, "dtype": dtype}
        angle = math.pi * torch.rand(n_tasks, count, **where)
        gap = torch.rand(n_tasks, 1, **where).expand(-1, count)
        upper = torch.stack([angle.cos(), angle.sin()], dim=-1)
        lower = torch.stack([1 - angle.cos(), gap - angle.sin()], dim=-1)
        moon = torch.where(torch.rand(n_tasks, count, 1, **where) < 0.5, upper, lower)
        radius = self.scale * (0.25 + 0.75 * torch.rand(n_tasks, 1, 1, **where))
        centre = 0.5 * self.scale * torch.randn(n_tasks, 1, 2, **where)
        points = embedded(radius * moon + centre, self.dim, generator)
        return Drawn(points + self.noise * torch.randn(points.shape, **where))
