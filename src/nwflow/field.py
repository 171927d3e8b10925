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
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from nwflow._evaluation import Evaluation
from nwflow._frame import length_scales
from nwflow._moments import FORMULAS, MOMENTS, NEEDS_SIGMA, VECTORS, Attribution, Posterior, State, wanted
from nwflow.kernel.autograd import KeyCache, eager, solve
from nwflow.kernel.posterior import Want
from nwflow.metric import Metric, Smoothing, as_smoothing
from nwflow.paths import CondOT, Path
from nwflow.support import Support

_FURTHER = ("n_eff", "covariance_trace")


class NWField(Evaluation):
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

    def __init__(self, support: Support | Any, path: Path | None = None, metric: Metric | None = None,
                 smoothing: Smoothing | float | None = None, accuracy: float | None = 1e-5) -> None:  # fmt: skip
        if path is not None and not isinstance(path, Path):
            raise TypeError(f"path: expected a nwflow Path such as CondOT(), got {type(path).__name__}")
        support = support if isinstance(support, Support) else Support(support)
        super().__init__(support, CondOT() if path is None else path, metric, as_smoothing(smoothing))
        self.accuracy = _tolerance(accuracy)

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
        points, _, shift, scale = self._engine(s.frame)
        square = s.frame.back((points.to(mean.dtype) - shift) * scale).square().sum(-1, keepdim=True)
        return (self._weights(s) @ square).squeeze(-1) - mean.square().sum(-1)

    @eager
    def weights(self, x: Tensor, t: float | Tensor) -> Tensor:
        """All weights w_i(x, t), ``(*batch, m)``, 0 for masked points; the output alone takes n m numbers."""
        s = self._solve(x, t, Want(), refuse=())
        w = self._weights(s)
        if (slots := self._frames.slots) is not None:
            w = w.new_zeros(*w.shape[:-1], self.m).index_copy(-1, slots, w)
        return w.reshape(*s.batch, self.m).to(torch.promote_types(x.dtype, torch.float32))

    def _weights(self, s: State) -> Tensor:
        """``(T, n, m)`` in the working dtype, as plain differentiable operations; rows at sigma = 0 are their limit."""
        points, log_prior, shift, scale = self._engine(s.frame)
        z = (points.to(shift.dtype) - shift) * scale
        f = z.square() if s.b.shape[-1] > 1 else z.square().sum(-1, keepdim=True)
        w = torch.softmax(s.y @ z.mT - 0.5 * (s.b @ f.mT) + log_prior[:, None], -1)
        if s.nearest is None or s.nearest.index is None or s.nearest.weights is None:
            return w
        limit = torch.zeros_like(w).scatter_add(-1, s.nearest.index.clamp(min=0), s.nearest.weights)
        return torch.where(s.ends, limit, w)  # type: ignore[arg-type]

    @eager
    def attribute(self, x: Tensor, t: float | Tensor, k: int = 10) -> Attribution:
        """The ``k`` references with the largest weights, their weights and the mass they capture together."""
        if not isinstance(k, int) or k < 1:
            raise ValueError(f"k: expected an integer of at least 1, got {k!r}")
        with torch.no_grad():
            s = self._solve(x, t, Want(mean=False, top=min(k, self.m)), refuse=())
            prior = self._engine(s.frame)[1]
        assert s.found.index is not None and s.found.weights is not None
        index, w = s.found.index, s.found.weights.clamp(max=1.0)
        rows = self.rows if self.is_batch else self.rows[None]
        rows = rows if self._frames.slots is None else rows[:, self._frames.slots]
        at = index.clamp(min=0)
        rows, prior = (v[:, None].expand(-1, at.shape[1], -1).gather(2, at) for v in (rows, prior))
        rows = rows.masked_fill((index < 0) | (prior == -torch.inf), -1)
        dtype, shape = torch.promote_types(x.dtype, torch.float32), (*s.batch, index.shape[-1])
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


def _tolerance(accuracy: float | None) -> float | None:
    if accuracy is not None and not (isinstance(accuracy, (int, float)) and 0.0 < accuracy < 1.0):
        raise ValueError(f"accuracy: expected None or a tolerance in (0, 1), got {accuracy!r}")
    return accuracy
