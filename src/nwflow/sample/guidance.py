"""Classifier-free guidance: the field u0 + w (u1 - u0) between an unconditional u0 and a conditional u1.

On one path (t = 0 noise, t = 1 data) the velocity is alpha' D + sigma' (x - alpha D) / sigma, linear in D, so guidance
of velocities is guidance of denoisers: D = D0 + w (D1 - D0). w = 0 is u0, w = 1 is u1, w > 1 exaggerates the condition.

Reference: Ho & Salimans 2022 (arXiv 2207.12598).
"""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from nwflow.paths import Path

__all__ = ["Guided", "guide"]

# What speaks of the samples' noise, scales and references, and is taken from the conditional field as it is.
_OF_CONDITION = ("attribute", "colour", "device", "dtype", "length_scales", "n_eff", "support")


@final
@dataclass(frozen=True, eq=False)
class Guided:
    """What :func:`guide` returns: a field that :func:`nwflow.sample.sample` takes.

    Prior, noise, scales, attribution and n_eff are those of ``field1``. There is no density and no divergence.
    """

    field0: Any
    field1: Any
    weight: float

    @property
    def event_shape(self) -> tuple[int, ...]:
        """Shape of one point."""
        return tuple(self.field1.event_shape)

    @property
    def path(self) -> Path:
        """The path of both fields."""
        return self.field1.path

    def prior(self, z: Tensor, t: float = 0.0) -> Tensor:
        """Standard normal ``z`` to the start of the conditional field."""
        return self.field1.prior(z, t)

    def denoise(self, x: Tensor, t: float | Tensor) -> Tensor:
        """D0 + w (D1 - D0), exact at w = 0 and w = 1."""
        return torch.lerp(self.field0.denoise(x, t), self.field1.denoise(x, t), self.weight)

    def velocity(self, x: Tensor, t: float | Tensor) -> Tensor:
        """u0 + w (u1 - u0)."""
        return torch.lerp(self.field0.velocity(x, t), self.field1.velocity(x, t), self.weight)

    def __call__(self, x: Tensor, t: float | Tensor) -> Tensor:
        return self.velocity(x, t)

    def __getattr__(self, name: str) -> Any:
        if name == "with_accuracy" and all(hasattr(f, name) for f in (self.field0, self.field1)):
            return lambda accuracy: Guided(
                self.field0.with_accuracy(accuracy), self.field1.with_accuracy(accuracy), self.weight
            )
        if name in _OF_CONDITION:
            return getattr(self.field1, name)
        raise AttributeError(f"a guided field has no {name!r}")


def guide(field0: Any, field1: Any, weight: float) -> Guided:
    """Guidance from ``field0`` (unconditional) towards ``field1`` (conditional), as a field to sample from.

    Raises:
        ValueError: the fields differ in path or event shape.

    >>> from nwflow import CondOT, NWField, Support
    >>> points = torch.tensor([[-1.0], [1.0]])
    >>> both, right = NWField(Support(points), CondOT()), NWField(Support(points[1:]), CondOT())
    >>> guide(both, right, 2.0).denoise(torch.zeros(1, 1), 0.5)
    tensor([[2.]])
    """
    if field0.path != field1.path:
        raise ValueError(f"field1: expected the path of field0, {field0.path!r}, got {field1.path!r}")
    if tuple(field0.event_shape) != tuple(field1.event_shape):
        raise ValueError(
            f"field1: expected the event shape of field0, {tuple(field0.event_shape)}, got {tuple(field1.event_shape)}"
        )
    return Guided(field0, field1, float(weight))
