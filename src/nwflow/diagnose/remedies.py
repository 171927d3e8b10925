r"""The remedies without training: each fits a support once and gives a field; its held-out skill is measured elsewhere.

    smoothing   every point becomes a Gaussian N(target + a (s - centre), h0^2 C), :mod:`nwflow.diagnose.shape`
    metric      the path's noise gets the shape of the data, N(0, M^-1), scaled to the data scale
    subspace    smoothers in blocks of principal directions or in image patches, :mod:`nwflow.subspace`
    pool        few references of a class, and a labelled pool of others: C = (kappa W + m S) / (kappa + m) between the
                pool's within-class covariance W and the class's own S, and a mean shrunk towards the classes' mean

kappa maximises the pool classes' marginal likelihood under C_c ~ inverse Wishart(kappa W, kappa + d + 1), over the
directions that hold most of W. C is full in the leading HEAD directions of W; the others keep W's axes. The mean is the
posterior mean under mu_c ~ N(mu_0, B), B by moments. As m grows both go to the class's own, for few references to the
pool's (empirical Bayes; Efron and Morris).
Time runs from t = 0, noise, to t = 1, data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nwflow.diagnose.shape import FLOOR, Shape, fit_bandwidth, fit_shape
from nwflow.field import NWField
from nwflow.metric import DiagonalMetric, FullMetric, Metric, Smoothing
from nwflow.paths import Path
from nwflow.support import Support

HEAD = 256
_RULES = {"silverman": (4.0, 2.0), "scott": (1.0, 0.0)}  # h0 = (c / (d + e))^(1 / (d + 4)) n^(-1 / (d + 4)), c or 1


@dataclass(frozen=True)
class Gaussians:
    """A fitted smoothed support: references become N(target + a (s - centre), basis diag(variances) basis^T).

    ``centre``, ``target`` and ``variances`` ``(d,)``, ``basis`` ``(d, d)`` or None, all float64.
    """

    name: str
    centre: Tensor
    target: Tensor
    a: float
    variances: Tensor
    basis: Tensor | None
    settings: dict[str, Any]

    def points(self, s: Tensor) -> Tensor:
        """Where references ``(m, d)`` go."""
        return self.target + self.a * (s - self.centre)

    def field(self, support: Support, path: Path | None = None, accuracy: float | None = 1e-5) -> NWField:
        """The exact field of ``support`` with this remedy; attribution still names the rows of ``support``."""
        lead = support.points.shape[: support.points.ndim - len(support.event_shape)]
        flat = support.points.reshape(*lead, -1).double()
        moved = self.points(flat).reshape(support.points.shape).to(support.points.dtype)
        if self.basis is None:
            smooth = Smoothing.diagonal(self.variances)
        else:
            smooth = Smoothing.full((self.basis * self.variances) @ self.basis.mT)
        return NWField(
            support.rebuilt(moved, support.raw_weights, support.labels, support.mask, support.rows),
            path,
            smoothing=smooth,
            accuracy=accuracy,
        )


@dataclass(frozen=True)
class Stretched:
    """A fitted metric, of the path with noise N(0, sigma^2 M^-1): M^-1 = basis diag(variances) basis^T."""

    name: str
    centre: Tensor
    variances: Tensor
    basis: Tensor | None
    settings: dict[str, Any]

    def metric(self) -> Metric:
        if self.basis is None:
            return DiagonalMetric(1.0 / self.variances)
        return FullMetric((self.basis / self.variances) @ self.basis.mT)

    def field(self, support: Support, path: Path | None = None, accuracy: float | None = 1e-5) -> NWField:
        return NWField(support, path, metric=self.metric(), accuracy=accuracy)


def smoothing(x: Tensor, kind: str = "full", contracted: bool = True, equal: Tensor | None = None) -> Gaussians:
    """Gaussian smoothing of shape ``kind`` with h0 of largest leave-one-out likelihood.

    Args:
        x: ``(n, d)`` references. kind: isotropic, diagonal, low_rank or full. contracted: keep the total covariance.
        equal: ids of equal points.

    Example:
        >>> x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> fitted = smoothing(x, "isotropic")
        >>> 0.2 < fitted.settings["h0"] < 1
        True
    """
    x = _rows(x)
    return smooth_shape(x, fit_shape(x, kind), equal, contracted)


def smooth_shape(x: Tensor, shape: Shape, equal: Tensor | None = None, contracted: bool = True) -> Gaussians:
    """:func:`smoothing` with a shape that is there already."""
    h0 = fit_bandwidth(x, lambda v: fit_shape(v, shape.kind), contracted, equal)
    return _smoothed(f"smoothing-{shape.kind.replace('_', '-')}", shape, h0, contracted)


def rule_of_thumb(x: Tensor, rule: str) -> Gaussians:
    """Isotropic smoothing by Silverman's or Scott's factor, for comparison."""
    if rule not in _RULES:
        raise ValueError(f"rule: expected one of {sorted(_RULES)}, got {rule!r}")
    x = _rows(x)
    n, d = x.shape
    factor = (4.0 / (d + 2.0)) ** (1.0 / (d + 4.0)) if rule == "silverman" else 1.0
    h0 = min(1.0, factor * n ** (-1.0 / (d + 4.0)))
    return _smoothed(rule, fit_shape(x, "isotropic"), h0, contracted=False)


def linear(x: Tensor, shape: Shape | None = None) -> Gaussians:
    """The Wiener denoiser as the smoothing that forgets all but mean and covariance."""
    return _smoothed("linear", shape or fit_shape(_rows(x), "full"), 1.0, contracted=True)


def metric(x: Tensor, kind: str = "full", shape: Shape | None = None) -> Stretched:
    """The metric whose inverse has the shape of the data, with the data's mean variance.

    Args:
        x: ``(n, d)`` references. kind: diagonal, low_rank, full, or a name for a given ``shape`` (within-class, say).
    """
    shape = shape or fit_shape(_rows(x), kind)
    mean = float(shape.variances.mean())
    if mean == 0.0:
        raise ValueError("x: expected points that differ to fit a metric, got zero variance")
    return Stretched(
        f"metric-{kind.replace('_', '-')}", shape.centre, shape.variances, shape.basis, dict(shape.settings)
    )


@dataclass(frozen=True)
class Pool:
    """What a labelled pool says about classes: ``within`` covariance, ``mean`` of the classes' means, their variance
    ``between`` in the axes of ``within``, and the pseudo-count ``kappa`` of the pool's covariance."""

    within: Shape
    mean: Tensor
    between: Tensor
    kappa: float
    classes: int


def fit_pool(classes: Sequence[Tensor], without: int | None = None) -> Pool:
    """Pool of ``classes``, rows ``(n_c, d)`` each; ``without``: this one's mean does not count among the means."""
    residuals = [c - c.mean(0) for c in classes if len(c) > 1]
    if not residuals:
        raise ValueError("pool: expected a class of at least two points, got none")
    freedom = sum(len(r) - 1 for r in residuals) / sum(len(r) for r in residuals)
    within = fit_shape(torch.cat(residuals), "full").scaled(1.0 / freedom)
    held = within.variances.cumsum(0) < 0.95 * within.variances.sum()
    head = min(HEAD, int(held.sum()) + 1)
    spread = []
    for r in residuals:
        z = within.into(r)[:, :head] / within.variances[:head].clamp(min=1e-300).sqrt()
        spread.append((torch.linalg.svdvals(z).square(), len(r) - 1))
    return _with_means(Pool(within, within.centre, within.variances, _kappa(spread, head), 0), classes, without)


def _with_means(pool: Pool, classes: Sequence[Tensor], without: int | None) -> Pool:
    """The moments of the classes' means, one class left out."""
    others = [c for i, c in enumerate(classes) if i != without and len(c)]
    if len(others) < 2:
        return replace(pool, between=torch.full_like(pool.within.variances, torch.inf), classes=len(others))
    means = torch.stack([c.mean(0) for c in others])
    mean = means.mean(0)
    noise = pool.within.variances * sum(1.0 / len(c) for c in others) / len(others)
    seen = pool.within.into(means - mean).square().sum(0) / (len(others) - 1)
    return replace(pool, mean=mean, between=(seen - noise).clamp(min=0.0), classes=len(others))


def _kappa(spread: Sequence[tuple[Tensor, int]], d: int) -> float:
    """The pseudo-count of largest marginal likelihood on a grid; ``spread``: eigenvalues of whitened scatters."""
    best = (-math.inf, 1.0)
    for kappa in torch.logspace(0, 5, 31, dtype=torch.float64).tolist():
        nu, total = kappa + d + 1.0, 0.0
        half = torch.tensor(nu / 2, dtype=torch.float64)
        for values, m in spread:
            gain = torch.mvlgamma(half + m / 2, d) - torch.mvlgamma(half, d)
            total += float(gain - 0.5 * m * d * math.log(kappa) - 0.5 * (nu + m) * torch.log1p(values / kappa).sum())
        best = max(best, (total, kappa))
    return best[1]


def pool(x: Tensor, info: Pool, equal: Tensor | None = None) -> Gaussians:
    """References ``(m, d)`` of one class, mean and covariance shrunk between the class and the pool."""
    x = _rows(x)
    mean, shape = x.mean(0), _shrunk(x, info)
    gain = info.between / (info.between + info.within.variances / len(x))
    gain = torch.where(torch.isnan(gain), 1.0, gain)
    target = info.mean + info.within.back(gain * info.within.into(mean - info.mean))
    h0 = fit_bandwidth(x, lambda v: _shrunk(v, info), True, equal)
    return replace(_smoothed("pool", shape, h0, contracted=True), target=target)


def _shrunk(x: Tensor, info: Pool) -> Shape:
    """(kappa W + sum z z^T) / (kappa + m - 1) in the leading directions of W, its diagonal in the others."""
    within, mean = info.within, x.mean(0)
    z = within.into(x - mean)
    head, total = min(HEAD, x.shape[1]), info.kappa + max(0, len(x) - 1)
    mixed = info.kappa * torch.diag(within.variances[:head]) + z[:, :head].mT @ z[:, :head]
    values, turn = torch.linalg.eigh(mixed / total)
    tail = (info.kappa * within.variances[head:] + z[:, head:].square().sum(0)) / total
    basis = torch.eye(x.shape[1], dtype=x.dtype, device=x.device) if within.basis is None else within.basis.clone()
    basis[:, :head] = basis[:, :head] @ turn
    variances = torch.cat([values, tail])
    variances = variances.clamp(min=FLOOR**2 * float(variances.max()))
    return Shape("pool", mean, variances, basis, {"kappa": info.kappa})


def _smoothed(name: str, shape: Shape, h0: float, contracted: bool) -> Gaussians:
    a = math.sqrt(max(0.0, 1.0 - h0 * h0)) if contracted else 1.0
    settings = dict(shape.settings) | {"h0": h0, "contraction": a}
    return Gaussians(name, shape.centre, shape.centre, a, h0 * h0 * shape.variances, shape.basis, settings)


def _rows(x: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or x.ndim != 2 or not len(x):
        raise ValueError(f"x: expected points (n, d), got {getattr(x, 'shape', type(x).__name__)}")
    return x.double()
