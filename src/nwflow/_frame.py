r"""The linear frame in which metric and smoothing are both diagonal, and where its numbers are kept.

With M = W^T W and W Sigma W^T = U diag(Lambda) U^T, the frame z = A (x - c), A = U^T W, has isotropic noise sigma^2 I
(t = 0 noise, t = 1 data) and smoothing diag(Lambda): one pass in z serves every combination. Back in data coordinates

    D = c + A^-1 D_z,   eps = A^-1 eps_z,   u = A^-1 u_z,   score = A^T score_z,   log p = log p_z + log|det A|.

The centre c (the support's mean) and the unit (a power of two near its scale) only condition the numbers: every result
is the same for any other choice, so they are constants for derivatives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from nwflow.kernel.autograd import stamp, transforming, unwrapped
from nwflow.metric import Metric, Smoothing
from nwflow.paths import is_vmapped, working_dtype

ROWS = 4096  # rows of one block wherever a float64 copy of the support would be too much


@dataclass(frozen=True)
class Frame:
    """The engine's coordinates: z = A (x - c) / unit, with smoothing variances ``spread`` in units of A.

    ``centre`` ``(T or 1, 1, d)``; ``unit`` a power of two near the support's scale, so that dividing is exact; one of
    ``diagonal`` ``(1,)`` or ``(d,)`` (A = diag), ``metric`` (A = W) and ``dense`` (A and its inverse) is set;
    ``spread`` ``(1,)`` or ``(d,)``; ``log_det`` = log|det A|, 0-d.
    """

    centre: Tensor
    unit: float
    spread: Tensor
    log_det: Tensor
    diagonal: Tensor | None = None
    metric: Metric | None = None
    dense: tuple[Tensor, Tensor] | None = None

    def into(self, v: Tensor) -> Tensor:
        """A v / unit."""
        if self.diagonal is not None:
            return v * (self.diagonal / self.unit)
        if self.metric is not None:
            return self.metric.whiten(v) / self.unit
        assert self.dense is not None
        return v @ self.dense[0].mT / self.unit

    def back(self, z: Tensor) -> Tensor:
        """A^-1 z unit."""
        if self.diagonal is not None:
            return z * (self.unit / self.diagonal)
        if self.metric is not None:
            return self.metric.unwhiten(z) * self.unit
        assert self.dense is not None
        return z @ self.dense[1].mT * self.unit

    def pull(self, g: Tensor) -> Tensor:
        """A^T g: no unit, for gradients with respect to A x."""
        if self.diagonal is not None:
            return g * self.diagonal
        if self.metric is not None:
            return self.metric.pull(g)
        assert self.dense is not None
        return g @ self.dense[0]


def build_frame(centre: Tensor, metric: Metric | None, smoothing: Smoothing | None, points: Tensor) -> Frame:
    """The frame of a metric and a smoothing about ``centre``; ``points`` ``(T, m, d)`` set its unit."""
    d, wide, device = centre.shape[-1], centre.dtype, centre.device
    one = torch.ones(1, dtype=wide, device=device)
    scale = one if metric is None else metric.scale
    variances = one * 0.0 if smoothing is None else smoothing.variances
    frame: Frame
    if scale is not None and variances is not None:
        scale = scale.to(wide)
        spread, log_det = variances.to(wide) * scale.square(), scale.log().expand(d).sum()
        frame = Frame(centre, 1.0, spread, log_det, diagonal=scale)
    elif metric is not None and smoothing is None:
        frame = Frame(centre, 1.0, one * 0.0, metric.log_det(d).to(wide), metric=metric)
    else:
        frame = _dense_frame(centre, metric, smoothing, d)
    square = sum(float(frame.into(p.to(wide) - centre).square().sum()) for p in points.split(ROWS, 1))
    rms = math.sqrt(square / max(1, points.shape[0] * points.shape[1] * d))
    unit = 2.0 ** round(math.log2(rms)) if 0.0 < rms < math.inf else 1.0
    return replace(frame, unit=unit)


def _dense_frame(centre: Tensor, metric: Metric | None, smoothing: Smoothing | None, d: int) -> Frame:
    assert smoothing is not None
    wide, device = centre.dtype, centre.device
    eye = torch.eye(d, dtype=wide, device=device)
    w, inverse = (eye, eye) if metric is None else (metric.whiten(eye).mT, metric.unwhiten(eye).mT)
    spread, u = torch.linalg.eigh(w @ smoothing.matrix(d).to(wide) @ w.mT)
    a, back = (u.mT @ w).contiguous(), (inverse @ u).contiguous()
    log_det = centre.new_zeros(()) if metric is None else metric.log_det(d).to(wide)
    spread = torch.where(spread > d * torch.finfo(wide).eps * spread.amax(), spread, 0.0)  # rank, not rounding
    return Frame(centre, 1.0, spread, log_det, dense=(a, back))


class FrameCache:
    """The frame of a field's points, metric and smoothing, and the points in it, until one of them changes."""

    def __init__(self) -> None:
        self._stamp: Any = None
        self._held: Any = None
        self._frame: Frame | None = None
        self._engine: Any = None
        self.slots: Tensor | None = None

    def frame(
        self, points: Tensor, log_prior: Tensor, d: int, metric: Metric | None, smooth: Smoothing | None
    ) -> Frame:
        """``points`` ``(*T, m, *event)`` and ``log_prior`` ``(*T, m)``, also where functorch has wrapped them."""
        tasks = 1 if log_prior.ndim == 1 else log_prior.shape[0]
        plain, prior = unwrapped(points), unwrapped(log_prior)
        parts = [b for module in (metric, smooth) if module is not None for b in module.buffers()]
        now = stamp(plain, prior, *parts)
        if self._frame is None or now != self._stamp:
            with torch.no_grad(), temporarily_clear_interpreter_stack():
                p = plain.detach().reshape(-1, log_prior.shape[-1], d)
                w = prior.detach().reshape(-1, log_prior.shape[-1]).to(working_dtype(p.device)).softmax(-1)
                if bool((w == 0).any()):  # what a masked slot holds is nobody's business
                    p = torch.where((w > 0).expand(p.shape[:2])[..., None], p, 0.0)
                centre = _weighted_mean(p, w if w.shape[0] == p.shape[0] else w[:1].expand(p.shape[0], -1))
                if p.shape[0] != tasks:  # batched by vmap: one centre serves all
                    centre = centre.mean(0, keepdim=True)
                self._frame = build_frame(centre, metric, smooth, p)
            self._stamp, self._held = now, (plain, prior, parts)
        return self._frame

    def engine(self, frame: Frame, points: Tensor, log_prior: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Points ``(T, m, d)`` and log prior ``(T, m)`` as the engine takes them, shift, and scale: z = scale (points -
        shift). The same tensors every time, so that what the engine derives from them can be kept."""
        centre = frame.centre
        fixed = not (points.requires_grad or log_prior.requires_grad or transforming())
        if fixed and self._engine is not None and self._engine[0] is frame:
            return self._engine[1]
        prior = log_prior.reshape(points.shape[0], -1).to(centre.dtype).log_softmax(-1)  # normalised past float32
        self.slots = None
        if log_prior.ndim == 1 and not is_vmapped(prior) and bool((gone := prior[0] == -torch.inf).any()):
            self.slots = (~gone).nonzero().squeeze(-1)
            points, prior = points.index_select(1, self.slots), prior.index_select(1, self.slots)
        if frame.diagonal is not None:
            found = points, prior, centre, (frame.diagonal / frame.unit).expand(1, 1, -1)
        else:
            moved = [frame.into(p.to(centre.dtype) - centre) for p in points.split(ROWS, 1)]
            found = torch.cat(moved, 1), prior, torch.zeros_like(centre), centre.new_ones(1, 1, 1)
        if fixed:
            self._engine = (frame, found)
        return found


def _weighted_mean(p: Tensor, w: Tensor) -> Tensor:
    """``(T, 1, d)`` in the dtype of ``w``."""
    total = torch.zeros(p.shape[0], 1, p.shape[-1], dtype=w.dtype, device=p.device)
    for rows, weights in zip(p.split(ROWS, 1), w[:, None].split(ROWS, 2), strict=True):
        total += weights @ rows.to(w.dtype)
    return total


def length_scales(frame: Frame, points: Tensor, log_prior: Tensor, shift: Tensor, scale: Tensor, quantile: float,
                  probes: int) -> tuple[float, float]:  # fmt: skip
    """See :meth:`nwflow.NWField.length_scales`."""
    d, spread, total, count, near = points.shape[-1], float(frame.spread.mean()), 0.0, 0, []
    for i, p in enumerate(points):
        p = p[log_prior[i] > -torch.inf]
        step = max(1, p.shape[0] * points.shape[0] // probes)
        square, close = _distances(p, shift[min(i, shift.shape[0] - 1), 0], scale[0, 0], step)
        total, count = total + square, count + p.shape[0]
        near.append(close)
    found = torch.cat(near)
    found = found[torch.isfinite(found)]
    if not found.numel() and math.isfinite(total):  # equal points; rounding of their mean is no scale
        return math.sqrt(spread), math.sqrt(spread)
    data = math.sqrt(total / (count * d)) * frame.unit
    close_scale = float(found.quantile(quantile)) / math.sqrt(d) * frame.unit if found.numel() else data
    return math.hypot(data, math.sqrt(spread)), math.hypot(close_scale, math.sqrt(spread))


def _distances(p: Tensor, shift: Tensor, scale: Tensor, step: int) -> tuple[float, Tensor]:
    """sum |z|^2 over all points, and for every ``step``-th its distance to the nearest different point."""
    q = (p[::step].to(shift.dtype) - shift) * scale
    near, square = torch.full((q.shape[0],), torch.inf, dtype=q.dtype, device=q.device), 0.0
    how = "donot_use_mm_for_euclid_dist" if q.shape[-1] < 32 else "use_mm_for_euclid_dist"
    for block in p.split(ROWS):
        z = (block.to(shift.dtype) - shift) * scale
        square += float(z.square().sum())
        distance = torch.cdist(q, z, compute_mode=how)
        same = distance <= 1e-7 * (1.0 + q.norm(dim=-1, keepdim=True))
        near = torch.minimum(near, distance.masked_fill(same, torch.inf).amin(-1))
    return square, near
