r"""What one pass of the engine means: the quantities of a field as formulas over its moments.

In the frame z of :mod:`nwflow.metric` (t = 0 noise, t = 1 data) every point is N(z_i, diag(Lambda)), the noise is
sigma^2 I, P = 1 / (sigma^2 + alpha^2 Lambda) and, with w the weights, m = sum_i w_i z_i, e = z_x - alpha m, C their
covariance,

    denoiser  D = m + alpha Lambda P e             noise  eps = sigma P e        score = -P e
    velocity  u = alpha' D + sigma' eps            log p = logsumexp l - 1/2 sum log(2 pi / P) + log|det A|
    tr dD/dx   = alpha sum_k P_k (Lambda_k + sigma^2 P_k C_kk)
    tr deps/dx = sigma sum_k P_k (1 - alpha^2 P_k C_kk)                div u = alpha' tr dD/dx + sigma' tr deps/dx

which are regular at sigma = 0 where Lambda > 0, and at alpha = 0 always.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nwflow._frame import Frame
from nwflow.kernel.posterior import Moments, Want
from nwflow.paths import Schedule

VECTORS = ("denoiser", "velocity", "score", "noise")
MOMENTS = (*VECTORS, "log_density", "divergence", "n_eff", "entropy", "covariance_trace")
NEEDS_SIGMA = ("velocity", "score", "noise", "log_density", "divergence")
_NEEDS_SQUARE = ("divergence", "entropy", "covariance_trace")


@dataclass(frozen=True)
class Posterior:
    """Moments of X_1 given X_t = x, each only where asked for; see :meth:`NWField.posterior`.

    Vectors have the shape and dtype of ``x``; scalars have the batch shape, at least float32. ``error_bound`` bounds
    the total variation between the weights used and the exact ones, per query; where ``proven`` is False it is an
    estimate. Both are None while derivatives are recorded.
    """

    denoiser: Tensor | None = None
    velocity: Tensor | None = None
    score: Tensor | None = None
    noise: Tensor | None = None
    log_density: Tensor | None = None
    divergence: Tensor | None = None
    n_eff: Tensor | None = None
    entropy: Tensor | None = None
    covariance_trace: Tensor | None = None
    error_bound: Tensor | None = None
    proven: Tensor | None = None


@dataclass(frozen=True)
class Attribution:
    """The k references with the largest weights: ``indices`` (original rows, -1 where there are fewer than k) and
    ``weights`` ``(*batch, k)``, and the mass they capture, ``captured`` ``(*batch,)``."""

    indices: Tensor
    weights: Tensor
    captured: Tensor


@dataclass(frozen=True)
class State:
    """One evaluation in frame units: queries ``(T, n, d)``, schedule ``(T or 1, n or 1, 1)``, moments ``(T, n, ...)``;
    ``nearest`` and ``ends`` where sigma = 0."""

    at: Schedule
    frame: Frame
    batch: tuple[int, ...]
    z: Tensor
    variance: Tensor
    y: Tensor
    b: Tensor
    found: Moments
    smoothed: bool
    nearest: Moments | None
    ends: Tensor | None

    @property
    def residual(self) -> Tensor:
        """z_x - alpha m."""
        assert self.found.mean is not None
        return self.z - self.at.alpha * self.found.mean

    def trace(self, weight: Tensor) -> Tensor:
        """sum_k weight_k C_kk of the weights' covariance in units of A, ``(T, n)``; weight ends in 1 or d."""
        assert self.found.square is not None and self.found.mean is not None
        square, mean = self.found.square, self.found.mean.square()
        c = square - (mean.sum(-1, keepdim=True) if square.shape[-1] == 1 else mean)
        return (weight * c).sum(-1) * self.frame.unit**2


def wanted(names: Iterable[str]) -> Want:
    """What the engine must return for these quantities."""
    names = set(names)
    square = not names.isdisjoint(_NEEDS_SQUARE)
    mean = square or not names.isdisjoint(MOMENTS[:6])
    return Want(mean=mean, square=square, prior="entropy" in names, mass2="n_eff" in names)


def at_limit(found: Moments, near: Moments, ends: Tensor, want: Want) -> Moments:
    """Replace the rows at ``ends`` by the nearest points."""
    rows = ends.squeeze(-1)
    out: dict[str, Tensor] = {"lse": found.lse}
    if found.square is not None and found.square.shape[-1] == 1 and near.square is not None:
        near = replace(near, square=near.square.sum(-1, keepdim=True))
    for name in ("mean", "n_eff", "square"):
        mine, theirs = getattr(found, name), getattr(near, name)
        if mine is not None:
            out[name] = torch.where(ends if mine.ndim == 3 else rows, theirs.to(mine.dtype), mine)
    if want.top and near.weights is not None and near.index is not None:
        k = want.top
        weights, index = (torch.nn.functional.pad(v, (0, max(0, k - v.shape[-1])), value=fill)[..., :k]
                          for v, fill in ((near.weights, 0), (near.index, -1)))  # fmt: skip
        same = found.weights is not None and found.index is not None and found.weights.shape == weights.shape
        out["weights"] = torch.where(ends, weights, found.weights) if same else weights  # type: ignore[arg-type]
        out["index"] = torch.where(ends, index, found.index) if same else index  # type: ignore[arg-type]
    return Moments(**out, prior=found.prior)


def denoiser(s: State) -> Tensor:
    assert s.found.mean is not None
    local = s.found.mean
    if s.smoothed:
        local = local + s.at.alpha * s.frame.spread / s.variance * s.residual
    return s.frame.centre + s.frame.back(local)


def noise(s: State) -> Tensor:
    return s.frame.back(s.at.sigma / s.variance * s.residual)


def score(s: State) -> Tensor:
    return s.frame.pull(-s.residual * s.frame.unit / s.variance)


def velocity(s: State) -> Tensor:
    return s.at.d_alpha * denoiser(s) + s.at.d_sigma * noise(s)


def log_density(s: State) -> Tensor:
    d = s.z.shape[-1]
    quadratic = (s.z.square() * (s.frame.unit**2 / s.variance)).sum(-1)
    normaliser = (2.0 * math.pi * s.variance).log().expand(*s.variance.shape[:-1], d).sum(-1)
    return s.found.lse - 0.5 * (quadratic + normaliser) + s.frame.log_det


def divergence(s: State) -> Tensor:
    alpha, sigma, p = s.at.alpha, s.at.sigma, 1.0 / s.variance
    per = s.z.shape[-1] if p.shape[-1] == 1 else 1
    d_denoiser = alpha.squeeze(-1) * ((per * p * s.frame.spread).sum(-1) + s.trace((sigma * p).square()))
    d_noise = sigma.squeeze(-1) * ((per * p).sum(-1) - s.trace((alpha * p).square()))
    return s.at.d_alpha.squeeze(-1) * d_denoiser + s.at.d_sigma.squeeze(-1) * d_noise


def entropy(s: State) -> Tensor:
    assert s.found.mean is not None and s.found.square is not None and s.found.prior is not None
    mean_logit = (s.y * s.found.mean).sum(-1) - 0.5 * (s.b * s.found.square).sum(-1) + s.found.prior
    value = s.found.lse - mean_logit
    if s.nearest is None or s.nearest.weights is None or s.ends is None:
        return value
    tied = s.nearest.weights
    return torch.where(s.ends.squeeze(-1), -torch.xlogy(tied, tied).sum(-1), value)


FORMULAS: dict[str, Callable[[State], Tensor]] = {
    f.__name__: f for f in (denoiser, velocity, score, noise, log_density, divergence, entropy)
}
