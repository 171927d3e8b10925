"""Times and supports as the networks take them: every value in the working dtype (float64 where the device has it)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nwflow.paths import Path, broadcast_schedule

__all__ = ["Times", "centred", "times"]


class Times(NamedTuple):
    """t (0 noise, 1 data) and its schedule, each ``(T or 1, n or 1, 1)``."""

    t: Tensor
    alpha: Tensor
    sigma: Tensor
    d_alpha: Tensor
    d_sigma: Tensor


def times(path: Path, t: float | Tensor, x: Tensor) -> Times:
    """The path at ``t`` for queries ``(T, n, d)`` in the working dtype; raises as ``broadcast_schedule`` does."""
    value = t.to(x) if isinstance(t, Tensor) else torch.full((1, 1), float(t), dtype=x.dtype, device=x.device)
    if torch.compiler.is_compiling():  # a graph holds no check on numbers
        at = path._schedule(value.reshape(1, 1) if value.ndim == 0 else value).expand(1)
    else:
        at = broadcast_schedule(path, t if isinstance(t, Tensor) else float(t), x.shape[:2], 1, tasks=True)
    value = value.reshape(1, 1, 1) if value.ndim == 0 else value[..., None]
    parts = (v.reshape(1, 1, 1) if v.ndim == 0 else v for v in (at.alpha, at.sigma, at.d_alpha, at.d_sigma))
    return Times(value, *(v.to(x) for v in parts))


def centred(points: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean ``(T, 1, d)`` and points about it ``(T, m, d)``: 0 where masked, and exactly 0 where all are equal."""
    if mask is None:
        origin = points[:, :1]
        rest = points - origin
        mean = rest.mean(1, keepdim=True)
        return origin + mean, rest - mean
    first = mask.to(torch.uint8).argmax(1)[:, None, None]
    origin = points.gather(1, first.expand(-1, 1, points.shape[-1]))
    real = mask[..., None]
    rest = torch.where(real, points - origin, 0.0)
    mean = rest.sum(1, keepdim=True) / real.sum(1, keepdim=True).to(rest.dtype)
    return origin + mean, torch.where(real, rest - mean, 0.0)
