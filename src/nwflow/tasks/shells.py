r"""Spherical shells: data whose geometry no isotropic kernel matches.

A task has K ~ U{2..5} equally likely concentric shells about the origin, of radii R_k ~ U(0, a), a = 5. A point is
(R_k + 0.3 z) u with u uniform on the unit sphere and z standard normal. Points are data (t = 1).
"""

from __future__ import annotations

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
)


@dataclass(frozen=True)
class SphericalShells(Family):
    """Concentric shells about the origin.

    Args:
        dim: coordinates of a point.
        min_shells, max_shells: shells of a task, each number equally likely.
        radius_scale: radii are uniform on (0, radius_scale), in data units.
        noise: standard deviation of the radius of a point, in data units.
    """

    dim: int = 8
    min_shells: int = 2
    max_shells: int = 5
    radius_scale: float = 5.0
    noise: float = 0.3

    name: ClassVar[str] = "spherical_shells"

    def __post_init__(self) -> None:
        check_dim(self.dim, 1, self.name)
        check_range(self.min_shells, self.max_shells, "shells")
        check_scales(self, "radius_scale", "noise")

    @property
    def event_shape(self) -> tuple[int, ...]:
        return (self.dim,)

    def draw(self, n_tasks: int, count: int, generator: torch.Generator, dtype: torch.dtype) -> Drawn:
        where: dict = {"generator": generator, "device": generator.device, "dtype": dtype}
        counts = draw_counts(self.min_shells, self.max_shells, n_tasks, generator)
        radii = self.radius_scale * torch.rand(n_tasks, self.max_shells, **where)
        radius = radii.gather(1, draw_components(counts, count, generator))
        radius = radius + self.noise * torch.randn(n_tasks, count, **where)
        z = torch.randn(n_tasks, count, self.dim, **where)
        return Drawn(z * (radius / z.norm(dim=-1))[..., None])
