r"""Evaluating a support's field at (x, t): what a field holds, and how queries and times reach the engine.

Here x ``(*batch, *event)`` becomes ``(T or 1, n, d)`` in the frame of :mod:`nwflow._frame`, t (0 noise, 1 data) becomes
``(T or 1, n or 1, 1)``, and with P the precision of noise and smoothing together the engine gets its natural parameters

    y = alpha z_x P,    b = alpha^2 P.

The limit sigma = 0, where P is infinite, is the nearest point.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nwflow._frame import Frame, FrameCache
from nwflow._moments import State, at_limit
from nwflow._pointset import prior
from nwflow.kernel.autograd import KeyCache, engine_keys, run, solve, stamp, transforming
from nwflow.kernel.nearest import nearest
from nwflow.kernel.posterior import Moments, Want, stacked
from nwflow.metric import Metric, Smoothing
from nwflow.paths import Path, Schedule, broadcast_schedule, is_vmapped
from nwflow.support import Support


class Evaluation(nn.Module):
    """State of a field and one evaluation of it; abstract, see :class:`nwflow.NWField`.

    Points and weights that are an ``nn.Parameter`` are parameters, all other tensors of the support buffers.
    """

    points: Tensor
    raw_weights: Tensor | None
    log_weights: Tensor
    rows: Tensor
    mask: Tensor | None
    labels: Tensor | None
    accuracy: float | None

    def __init__(self, support: Support, path: Path, metric: Metric | None, smoothing: Smoothing | None) -> None:
        super().__init__()
        if metric is not None and not isinstance(metric, Metric):
            raise TypeError(f"metric: expected None or a nwflow.Metric such as FullMetric, got {type(metric).__name__}")
        for name, part in (("metric", metric), ("smoothing", smoothing)):
            if part is not None and part.d not in (None, support.d):
                raise ValueError(f"{name}: expected one over d = {support.d} coordinates, got d = {part.d}")
        self.path, self.metric, self.smoothing = path, metric, smoothing
        self._source, self.is_batch, self.event_shape = support, support.is_batch, support.event_shape
        self.d, self.m = support.d, support.m
        tensors = {"points": support.points, "raw_weights": support.raw_weights, "log_weights": support.log_weights}
        tensors |= {"rows": support.rows, "mask": support.mask, "labels": support.labels}
        for name, value in tensors.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value.detach() if name == "log_weights" and value is not None else value)
        self._cache, self._frames = KeyCache(), FrameCache()
        self._source_stamp = self._support_stamp()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: no caches, and no graph in the support kept (it is rebuilt from the buffers)."""
        s, raw = self._source, self._source.raw_weights
        bare = s.rebuilt(s.points.detach(), None if raw is None else raw.detach(), s.labels, s.mask, s.rows)
        return {**self.__dict__, "_source": bare, "_cache": KeyCache(), "_frames": FrameCache()}

    def _support_stamp(self) -> tuple[Any, ...]:
        tensors = (self.points, self.raw_weights, self.log_weights, self.labels, self.mask)
        return stamp(*(v for v in tensors if v is not None))

    @property
    def support(self) -> Support:
        """The support as the field has it now: on its device, in its dtype, with its learned or loaded numbers."""
        if (now := self._support_stamp()) != self._source_stamp:
            raw = self.raw_weights
            self._source = self._source.rebuilt(self.points, raw, self.labels, self.mask, self.rows)
            self._source_stamp = now
        return self._source

    def _flat(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """``(T or 1, n, d)`` and the batch shape; refuses what does not fit."""
        if not isinstance(x, Tensor):
            raise TypeError(f"x: expected a torch.Tensor, got {type(x).__name__}")
        if not x.is_floating_point():
            raise TypeError(f"x: expected a floating dtype, got {x.dtype}; convert integers with x.float()")
        k = len(self.event_shape)
        if x.ndim < k or tuple(x.shape[x.ndim - k :]) != self.event_shape:
            raise ValueError(
                f"x: expected shape (*batch, *event) with event {self.event_shape}, got {tuple(x.shape)}: "
                f"queries and support must have the same width"
            )
        batch = tuple(x.shape[: x.ndim - k])
        tasks = self.points.shape[0] if self.is_batch else None
        if tasks is not None and (len(batch) != 2 or batch[0] != tasks):
            raise ValueError(f"x: expected (T, n, *event) with T = {tasks} tasks, got {tuple(x.shape)}")
        if x.device != self.points.device:
            raise ValueError(f"x: expected a tensor on {self.points.device} as the support, got {x.device}")
        return x.reshape(tasks or 1, -1 if x.numel() else math.prod(batch[1:] if tasks else batch), self.d), batch

    def _schedule(self, t: float | Tensor, batch: tuple[int, ...]) -> Schedule:
        """alpha, sigma and derivatives as ``(T or 1, n or 1, 1)`` on the field's device."""
        at = broadcast_schedule(self.path, t, batch, 1, tasks=self.is_batch)
        values = []
        for v in (at.alpha, at.sigma, at.d_alpha, at.d_sigma):
            v = v.to(self.points.device)
            if v.ndim == 0:
                values.append(v.view(1, 1, 1))
            else:
                values.append(v.expand(batch[0], -1, 1) if self.is_batch else v.expand(*batch, 1).reshape(1, -1, 1))
        return Schedule(*values)

    def _compute(self, x: Tensor) -> torch.dtype:
        """Dtype of the cheap pass: float64 for float64 queries, else float32."""
        return torch.float64 if x.dtype == torch.float64 else torch.float32

    def _stacked(self) -> Tensor:
        """Points as ``(T or 1, m, d)``."""
        p = self.points if self.is_batch else self.points[None]
        return p.reshape(p.shape[0], p.shape[1], self.d)

    def _frame(self) -> Frame:
        return self._frames.frame(self.points, self._log_prior(), self.d, self.metric, self.smoothing)

    def _log_prior(self) -> Tensor:
        """log pi ``(*T, m)``; from the weights as given where they are learned, so that each call has its own graph."""
        if self.raw_weights is None or not (self.raw_weights.requires_grad or transforming()):
            return self.log_weights
        real = torch.ones_like(self.rows, dtype=torch.bool) if self.mask is None else self.mask
        return prior(self.raw_weights, real)[2]

    def _engine(self, frame: Frame) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self._frames.engine(frame, self._stacked(), self._log_prior())

    def _solve(self, x: Tensor, t: float | Tensor, want: Want, refuse: Iterable[str], each: bool = False) -> State:
        """Evaluate the engine at ``(x, t)``; ``refuse`` names what does not exist at sigma = 0."""
        flat, batch = self._flat(x)
        frame, at = self._frame(), self._schedule(t, batch)
        z = frame.into(flat.to(frame.centre.dtype) - at.alpha * frame.centre)
        variance = at.sigma.square() + at.alpha.square() * frame.spread
        ends = self._ends(variance, tuple(refuse), t)
        safe = variance if ends is None else torch.where(ends, 1.0, variance)
        engine_variance = safe / frame.unit**2
        y, b = at.alpha * z / engine_variance, at.alpha.square() / engine_variance
        if each and frame.diagonal is not None and max(frame.diagonal.numel(), b.shape[-1]) > 1:
            b = b.expand(*b.shape[:-1], self.d)
        found = self._moments(y, b, frame, want, x)
        near = None
        if ends is not None:
            near = self._nearest(z / at.alpha, frame, x)
            found = at_limit(found, near, ends, want)
        return State(at, frame, batch, z, variance, y, b, found, self.smoothing is not None, near, ends)

    def _ends(self, variance: Tensor, refuse: tuple[str, ...], t: Any) -> Tensor | None:
        """Where the noise vanishes, ``(T or 1, n or 1, 1)``, or None; raises if something asked for does not exist."""
        if is_vmapped(variance):
            return None
        ends = (variance == 0.0).any(-1, keepdim=True)
        if not bool(ends.any()):
            return None
        if self.smoothing is not None and not bool((variance == 0.0).all(-1, keepdim=True)[ends].all()):
            raise ValueError(
                "t: sigma = 0 and the smoothing covariance is singular; expected a positive definite one there"
            )
        if refuse:
            raise ValueError(
                f"t: {', '.join(refuse)} do not exist at sigma = 0 (t = 1 on {self.path!r}); expected a smaller time, "
                f"a path with sigma_min > 0 or a smoothed support. denoise() gives the nearest point there"
            )
        return ends

    def _moments(self, y: Tensor, b: Tensor, frame: Frame, want: Want, x: Tensor) -> Moments:
        points, log_prior, shift, scale = self._engine(frame)
        compute, tracked = (
            self._compute(x),
            torch.is_grad_enabled() and any(v.requires_grad for v in (y, b, points, log_prior)),
        )
        if not tracked and not transforming():
            return run(self._cache, y, b, points, log_prior, shift, scale, compute, self.accuracy, want)
        cache = KeyCache() if points.requires_grad or transforming() else self._cache
        lse, o = solve(cache, y, b, points, log_prior, shift, scale, compute, self.accuracy)
        return Moments(lse, o[..., : self.d], -2.0 * o[..., self.d : -1], o[..., -1])

    def _nearest(self, c: Tensor, frame: Frame, x: Tensor) -> Moments:
        """Nearest points to ``c`` ``(T, n, d)``, which is the limit of vanishing sigma."""
        with torch.no_grad():
            keys = engine_keys(self._cache, *self._engine(frame), self._compute(x))
            if keys.points.ndim == 3:
                return nearest(c, keys, Want(top=keys.m))
            return stacked(nearest(c[0], keys, Want(top=keys.m)))
