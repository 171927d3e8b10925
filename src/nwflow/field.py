r"""The exact field of a support: velocity, denoiser, score, density, divergence and attribution.

X_t = alpha X_1 + sigma X_0 with X_1 drawn from the support and X_0 ~ N(0, I) or, with a metric, N(0, M^-1); t = 0 is
noise, t = 1 is data. The weights of the points given X_t = x are a softmax and everything is a moment of them:

    l_i = log pi_i - |x - alpha s_i|^2 / (2 sigma^2),    w = softmax(l),    D = sum_i w_i s_i,
    u = alpha' D + sigma' eps,    eps = (x - alpha D) / sigma

which is a Nadaraya-Watson smoother of bandwidth h = sigma / alpha (Smola 2026, arXiv 2605.13386). All formulas, with
metrics and smoothed supports, are in :mod:`nwflow._moments`, the coordinates in :mod:`nwflow._frame`. Times,
x - alpha c and all differences are formed in float64 (where the device has it), and results are cast to the dtype of
``x`` last.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nwflow._frame import Frame, FrameCache, length_scales
from nwflow._moments import (  # fmt: skip
    FORMULAS,
    MOMENTS,
    NEEDS_SIGMA,
    VECTORS,
    Attribution,
    Posterior,
    State,
    at_limit,
    wanted,
)
from nwflow.kernel.autograd import KeyCache, eager, engine_keys, run, solve, transforming
from nwflow.kernel.posterior import Moments, Want, stacked
from nwflow.kernel.rescore import nearest
from nwflow.metric import Metric, Smoothing, as_smoothing
from nwflow.paths import CondOT, Path, Schedule, broadcast_schedule, is_vmapped
from nwflow.support import Support

_FURTHER = ("n_eff", "covariance_trace")


class NWField(nn.Module):
    """The field that a support induces under a Gaussian path: a Nadaraya-Watson smoother of its points.

    Args:
        support: a :class:`~nwflow.Support`, or points ``(m, *event)`` to make one of.
        path: a Gaussian path; ``CondOT()`` when None.
        metric: None (Euclidean), or a :class:`~nwflow.metric.Metric` over the flattened event: the exact field of the
            path whose noise is N(0, M^-1).
        smoothing: None, a standard deviation h0, or a :class:`~nwflow.metric.Smoothing` that replaces every point by a
            Gaussian.
        accuracy: tolerance on the weights in total variation (for bandwidths from 10^3 to 10^-3 data scales, data
            anywhere); None is the float32 pass on centred data alone.

    ``x`` is ``(*batch, *event)``, with tasks exactly ``(T, n, *event)``; ``t`` is a float, 0-d, or broadcasts against
    the batch shape (with tasks: ``(T, 1)`` or ``(T, n)``). Derivatives of first and second order exist in ``x``, ``t``,
    points and weights, also through ``torch.func``; points that are an ``nn.Parameter`` are a parameter of the field.

    Memory: one float32 centred copy of the points, made at the first call; beyond that below 256 MiB for any m. A
    metric or smoothing that is not diagonal also keeps a float64 copy in its own frame.

    Raises:
        ValueError, TypeError: shapes, dtypes and times that do not fit; sigma = 0 where a quantity does not exist.

    Example:
        >>> field = NWField(torch.tensor([[-1.0], [1.0]], dtype=torch.float64))
        >>> x = torch.tensor([[0.5]], dtype=torch.float64)
        >>> field(x, 0.5)
        tensor([[0.5232]], dtype=torch.float64)
        >>> field.denoise(x, 0.5), field.n_eff(x, 0.5)
        (tensor([[0.7616]], dtype=torch.float64), tensor([1.2658], dtype=torch.float64))
    """

    points: Tensor
    log_weights: Tensor
    rows: Tensor

    def __init__(self, support: Support | Any, path: Path | None = None, metric: Metric | None = None,
                 smoothing: Smoothing | float | None = None, accuracy: float | None = 1e-5) -> None:  # fmt: skip
        super().__init__()
        support = support if isinstance(support, Support) else Support(support)
        self.path = CondOT() if path is None else path
        if not isinstance(self.path, Path):
            raise TypeError(f"path: expected a nwflow Path such as CondOT(), got {type(path).__name__}")
        self.accuracy = _tolerance(accuracy)
        self.metric, self.smoothing = metric, as_smoothing(smoothing)
        self._describe(support)
        for name, part in (("metric", metric), ("smoothing", self.smoothing)):
            if part is not None and part.d not in (None, self.d):
                raise ValueError(f"{name}: expected one over d = {self.d} coordinates, got d = {part.d}")
        self._cache, self._frames = KeyCache(), FrameCache()

    def _describe(self, support: Support) -> None:
        """Take the support's tensors over as buffers; of one set only the points with mass are kept."""
        self._source, self.is_batch, self.event_shape = support, support.is_batch, support.event_shape
        self.d, self.m = support.d, support.m
        self.slots: Tensor | None = None
        points, log_weights, rows = support.points, support.log_weights, support.rows
        if not self.is_batch and not bool(support.valid.all()):
            self.slots = support.valid.nonzero().squeeze(-1)
            points, log_weights, rows = points[self.slots], log_weights[self.slots], rows[self.slots]
        if isinstance(points, nn.Parameter):
            self.points = points
        else:
            self.register_buffer("points", points)
        self.register_buffer("log_weights", log_weights)
        self.register_buffer("rows", rows)

    @property
    def support(self) -> Support:
        """The support, on the device and in the dtype of the field."""
        s = self._source
        return s if s.points.device == self.points.device and s.dtype == self.points.dtype else s.to(
            self.points.device, self.points.dtype
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self._source!r}, {self.path!r}, accuracy={self.accuracy}"

    def given(self, labels: Iterable[Any]) -> NWField:
        """The field of the part of the support with these labels, prior weights renormalised."""
        return NWField(self.support.given(labels), self.path, self.metric, self.smoothing, self.accuracy)

    def with_accuracy(self, accuracy: float | None) -> NWField:
        """The same field (shared tensors) at another tolerance."""
        other = copy.copy(self)
        other.accuracy = _tolerance(accuracy)
        return other

    def forward(self, x: Tensor, t: float | Tensor) -> Tensor:
        """The velocity u(x, t), shape and dtype of ``x``."""
        return self.velocity(x, t)

    def velocity(self, x: Tensor, t: float | Tensor) -> Tensor:
        """u = alpha' D + sigma' eps, shape and dtype of ``x``; raises at sigma = 0 unless smoothed."""
        return self._one(x, t, "velocity")

    def denoise(self, x: Tensor, t: float | Tensor) -> Tensor:
        """D = E[X_1 | X_t = x]; at sigma = 0 the nearest point, ties shared by prior."""
        return self._one(x, t, "denoiser")

    def score(self, x: Tensor, t: float | Tensor) -> Tensor:
        """grad log p_t(x), shape and dtype of ``x``; raises at sigma = 0 unless smoothed."""
        return self._one(x, t, "score")

    def noise(self, x: Tensor, t: float | Tensor) -> Tensor:
        """eps = E[X_0 | X_t = x] = (x - alpha D) / sigma; raises at sigma = 0 unless smoothed."""
        return self._one(x, t, "noise")

    def log_density(self, x: Tensor, t: float | Tensor) -> Tensor:
        """log p_t(x) in nats, batch shape: exact in one pass, no ODE; raises at sigma = 0 unless smoothed."""
        return self._one(x, t, "log_density")

    def divergence(self, x: Tensor, t: float | Tensor) -> Tensor:
        """div u(x, t), batch shape, exact; raises at sigma = 0 unless smoothed."""
        return self._one(x, t, "divergence")

    def n_eff(self, x: Tensor, t: float | Tensor) -> Tensor:
        """Effective number of references 1 / sum w^2, from 1 to m, batch shape."""
        return self._one(x, t, "n_eff")

    def entropy(self, x: Tensor, t: float | Tensor) -> Tensor:
        """Entropy -sum w log w of the weights in nats, batch shape."""
        return self._one(x, t, "entropy")

    def covariance_trace(self, x: Tensor, t: float | Tensor) -> Tensor:
        """tr C of the weights' covariance sum w (s - D)(s - D)^T in data units, batch shape."""
        return self._one(x, t, "covariance_trace")

    def velocity_and_divergence(self, x: Tensor, t: float | Tensor) -> tuple[Tensor, Tensor]:
        """Both in one pass, for likelihoods."""
        p = self.posterior(x, t, ("velocity", "divergence"))
        assert p.velocity is not None and p.divergence is not None
        return p.velocity, p.divergence

    def _one(self, x: Tensor, t: float | Tensor, name: str) -> Tensor:
        return getattr(self.posterior(x, t, (name,)), name)

    def posterior(self, x: Tensor, t: float | Tensor, moments: Iterable[str] = ("denoiser",)) -> Posterior:
        """Several moments in one pass.

        Args:
            x: ``(*batch, *event)``. t: times, see the class.
            moments: names out of ``nwflow.field.MOMENTS``.

        Returns:
            :class:`Posterior` with those fields, ``error_bound`` and ``proven`` (units: total variation).
        """
        names = (moments,) if isinstance(moments, str) else tuple(moments)
        if unknown := [n for n in names if n not in MOMENTS]:
            raise ValueError(f"moments: expected names out of {MOMENTS}, got {unknown}")
        if not names:
            raise ValueError(f"moments: expected at least one name out of {MOMENTS}, got none")
        return self._posterior(x, t, names)

    @eager
    def _posterior(self, x: Tensor, t: float | Tensor, names: tuple[str, ...]) -> Posterior:
        refuse = [n for n in names if n in NEEDS_SIGMA]
        s = self._solve(x, t, wanted(names), refuse, each="covariance_trace" in names)
        event = tuple(x.shape[len(s.batch) :])
        out: dict[str, Any] = {}
        for name in names:
            value = self._further(name, s, x) if name in _FURTHER else FORMULAS[name](s)
            vector = name in VECTORS
            dtype = x.dtype if vector else torch.promote_types(x.dtype, torch.float32)
            out[name] = value.reshape(s.batch + event if vector else s.batch).to(dtype)
        if s.found.error is not None and s.found.proven is not None:
            out["error_bound"], out["proven"] = s.found.error.reshape(s.batch), s.found.proven.reshape(s.batch)
        return Posterior(**out)

    def _further(self, name: str, s: State, x: Tensor) -> Tensor:
        """The two scalars that may need more than the moments of one pass."""
        if name == "n_eff":
            if s.found.n_eff is not None:
                return s.found.n_eff
            points, log_prior, shift, scale = self._engine(s.frame)
            squared = (2.0 * s.y, 2.0 * s.b, points, 2.0 * log_prior, shift, scale)
            twice, _ = solve(KeyCache(), *squared, self._compute(x), self.accuracy)
            return torch.exp(2.0 * s.found.lse - twice)
        if s.frame.diagonal is not None:
            return s.trace(s.frame.diagonal.square().reciprocal())
        mean = s.frame.back(s.found.mean)  # type: ignore[arg-type]
        second = self._weights(s) @ (self._stacked().to(mean.dtype) - s.frame.centre).square().sum(-1, keepdim=True)
        return second.squeeze(-1) - mean.square().sum(-1)

    @eager
    def weights(self, x: Tensor, t: float | Tensor) -> Tensor:
        """All weights w_i(x, t), ``(*batch, m)``, 0 for masked points; the output alone takes n m numbers."""
        s = self._solve(x, t, Want(), refuse=())
        w = self._weights(s)
        if self.slots is not None:
            w = w.new_zeros(*w.shape[:-1], self.m).index_copy(-1, self.slots.to(w.device), w)
        return w.reshape(*s.batch, self.m).to(torch.promote_types(x.dtype, torch.float32))

    def _weights(self, s: State) -> Tensor:
        """``(T, n, m)`` in the working dtype, as plain differentiable operations; rows at sigma = 0 are their limit."""
        points, log_prior, shift, scale = self._engine(s.frame)
        z = (points.to(shift.dtype) - shift) * scale
        f = z.square() if s.b.shape[-1] > 1 else z.square().sum(-1, keepdim=True)
        w = torch.softmax(s.y @ z.mT - 0.5 * (s.b @ f.mT) + log_prior[:, None], -1)
        if s.nearest is None or s.nearest.index is None or s.nearest.weights is None:
            return w
        tied = s.nearest.weights.masked_fill(s.nearest.index < 0, 0.0)
        limit = torch.zeros_like(w).scatter_add(-1, s.nearest.index.clamp(min=0), tied)
        return torch.where(s.ends, limit, w)  # type: ignore[arg-type]

    @eager
    def attribute(self, x: Tensor, t: float | Tensor, k: int = 10) -> Attribution:
        """The ``k`` references with the largest weights, their weights and the mass they capture together."""
        if not isinstance(k, int) or k < 1:
            raise ValueError(f"k: expected an integer of at least 1, got {k!r}")
        with torch.no_grad():
            s = self._solve(x, t, Want(mean=False, top=min(k, self._stacked().shape[-2])), refuse=())
        assert s.found.index is not None and s.found.weights is not None
        index, w = s.found.index, s.found.weights.clamp(max=1.0)
        rows = self.rows if self.is_batch else self.rows[None]
        rows = torch.gather(rows[:, None].expand(-1, index.shape[1], -1), 2, index.clamp(min=0))
        rows = rows.masked_fill(index < 0, -1)
        dtype = torch.promote_types(x.dtype, torch.float32)
        shape = (*s.batch, index.shape[-1])
        return Attribution(rows.view(shape), w.to(dtype).view(shape), w.sum(-1).clamp(max=1.0).to(dtype).view(s.batch))

    def prior(self, z: Tensor, t: float = 0.0) -> Tensor:
        """Standard normal ``z`` ``(n, *event)`` (tasks ``(T, n, *event)``) as draws of the start N(alpha mean, sigma^2
        M^-1 + alpha^2 Sigma) at time ``t``; the mean is the support's own, so that VP and VE start where data are."""
        flat, _ = self._flat(z)
        frame, at = self._frame(), self.path(t)
        sd = (at.sigma.to(flat.device).square() + at.alpha.to(flat.device).square() * frame.spread).sqrt()
        x = at.alpha.to(flat.device) * frame.centre + frame.back(sd * flat.to(frame.centre.dtype) / frame.unit)
        return x.reshape(z.shape).to(z.dtype)

    def colour(self, z: Tensor) -> Tensor:
        """Standard normal ``z`` as draws of the path's noise N(0, M^-1), same shape."""
        if self.metric is None:
            return z
        flat, _ = self._flat(z)
        return self.metric.unwhiten(flat.to(self._frame().centre.dtype)).reshape(z.shape).to(z.dtype)

    def length_scales(self, quantile: float = 0.05, probes: int = 256) -> tuple[float, float]:
        """(data scale, nearest scale) in the units of h: sqrt(tr Cov / d), and a low quantile over ``probes`` points of
        the distance to the nearest *different* point over sqrt(d). Smoothing widens both; one point has (h0, h0)."""
        with torch.no_grad():
            frame = self._frame()
            return length_scales(frame, *self._engine(frame), quantile, probes)

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
                values.append(v if self.is_batch else v.expand(*batch, 1).reshape(1, -1, 1))
        return Schedule(*values)

    def _compute(self, x: Tensor) -> torch.dtype:
        """Dtype of the cheap pass: float64 for float64 queries, else float32."""
        return torch.float64 if x.dtype == torch.float64 else torch.float32

    def _stacked(self) -> Tensor:
        """Points as ``(T or 1, m, d)``."""
        p = self.points if self.is_batch else self.points[None]
        return p.reshape(p.shape[0], p.shape[1], self.d)

    def _frame(self) -> Frame:
        return self._frames.frame(self.points, self.log_weights, self.d, self.metric, self.smoothing)

    def _engine(self, frame: Frame) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self._frames.engine(frame, self._stacked(), self.log_weights)

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


def _tolerance(accuracy: float | None) -> float | None:
    if accuracy is not None and not (isinstance(accuracy, (int, float)) and 0.0 < accuracy < 1.0):
        raise ValueError(f"accuracy: expected None or a tolerance in (0, 1), got {accuracy!r}")
    return accuracy
