r"""Held-out denoising errors along the path: the measurement that everything else reads.

A query is a point x_1 that no denoiser has seen, noised to X_t = alpha x_1 + sigma eps (t = 0 noise, t = 1 data) at a
grid of log-SNR = log(alpha^2 s^2 / sigma^2), s the data scale. Where nothing is held out the query leaves its own set:
neither it nor a point equal to it is a reference, and what is fitted (means, covariances, bandwidths) is fitted without
its whole fold. With labels every class is a set of references of its own, for its own queries.

Every denoiser here is a Gaussian-smoothed, possibly contracted support (DESIGN's smoothed support) in the eigenbasis of
its covariance, where P = 1 / (alpha^2 lambda + sigma^2) is diagonal:

    y = alpha P x,  b = alpha^2 P,  l_i = y . z_i - b . z_i^2 / 2,  m = w . z,  D = m + alpha lambda P (x - alpha m).

lambda = 0 is the plug-in, one point the linear denoiser. Everything is float64 on centred data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nwflow.diagnose.shape import FLOOR, Shape, fit_shape
from nwflow.paths import Path

PAIRS = 2**22  # rows x references of one block
NOISE = 2**26  # numbers of noise kept
WORK = 4e10  # times x queries x references x dimensions of one denoiser: fewer queries beyond
LEAST, MOST = 0.05, 0.97  # the window: shares of the variance that the linear denoiser leaves


@dataclass(frozen=True)
class Grid:
    """Times of the measurement; all ``(T,)`` float64."""

    log_snr: Tensor
    t: Tensor
    alpha: Tensor
    sigma: Tensor

    @property
    def bandwidth(self) -> Tensor:
        return self.sigma / self.alpha


@dataclass(frozen=True)
class Part:
    """One set of references, ``refs`` rows, and the rows that are its queries."""

    name: str
    refs: Tensor
    queries: Tensor


@dataclass(frozen=True)
class Fold:
    """Queries of a part that are left out together: where they stand among all, and the rows that may be fitted."""

    part: int
    number: int
    at: Tensor
    queries: Tensor
    refs: Tensor
    train: Tensor


@dataclass(frozen=True)
class Units:
    """Both units of an error: raw over ``scale``^2 a coordinate, and by principal direction over its variance."""

    scale: float
    weights: Tensor
    basis: Tensor | None

    def __call__(self, error: Tensor, basis: Tensor | None = None) -> Tensor:
        """``(..., d)``, coordinates in ``basis``, to ``(2, ...)``: raw, relative."""
        turned = error
        if basis is not self.basis:  # by way of the axes: two thin products cost less than a square one
            turned = turned if basis is None else turned @ basis.mT
            turned = turned if self.basis is None else turned @ self.basis
        raw = error.square().mean(-1) / self.scale**2
        return torch.stack([raw, (turned.square() @ self.weights) / (self.weights > 0).sum()])

    def of_variances(self, variance: Tensor, basis: Tensor | None) -> Tensor:
        """Both units of the expected square error with these variances ``(..., d)`` in ``basis``."""
        raw = variance.mean(-1) / self.scale**2
        if (basis is None) != (self.basis is None) or (basis is not None and basis is not self.basis):
            turn = self.basis if basis is None else basis.mT @ self.basis if self.basis is not None else basis.mT
            assert turn is not None
            variance = variance @ turn.square()
        return torch.stack([raw, (variance @ self.weights) / (self.weights > 0).sum()])


@dataclass
class Problem:
    """Points, who may see whom, times, noise and units; errors of every denoiser are ``(2, T, Q)``."""

    points: Tensor
    equal: Tensor
    parts: tuple[Part, ...]
    folds: tuple[Fold, ...]
    grid: Grid
    units: Units
    window: Tensor
    seed: int
    noise: Tensor = field(repr=False)

    @property
    def n_queries(self) -> int:
        return self.noise.shape[1]

    @property
    def d(self) -> int:
        return self.points.shape[1]

    def noised(self, fold: Fold, centre: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Centred queries ``(q, d)``, their noise and x - alpha centre, both ``(T, q, d)``."""
        x1 = self.points[fold.queries] - centre
        eps = self.noise[:, fold.at].to(x1.dtype)
        return x1, eps, self.grid.alpha[:, None, None] * x1 + self.grid.sigma[:, None, None] * eps

    def own(self, fold: Fold, refs: Tensor) -> Tensor:
        """``(q, m)``: references that equal the query and do not count."""
        return self.equal[fold.queries, None] == self.equal[refs]


@dataclass(frozen=True)
class Answer:
    """``denoised`` ``(T, q, d)`` in the coordinates given; of the weights n_eff, the largest and entropy ``(T, q)``."""

    denoised: Tensor
    n_eff: Tensor
    largest: Tensor
    entropy: Tensor


def denoise(x: Tensor, alpha: Tensor, sigma: Tensor, z: Tensor, variances: Tensor, own: Tensor | None,
            log_count: Tensor | None = None) -> Answer:  # fmt: skip
    """The formulas above for ``x`` ``(T, q, d)``, references ``z`` ``(m, d)``, smoothing ``variances`` ``(d,)``.

    ``log_count`` ``(m,)``: of equal references that stand as one, so that n_eff counts places.
    """
    found, shape = torch.empty_like(x), x.shape[:2]  # made first: what stays between large blocks splits the heap
    n_eff, largest, entropy = (x.new_empty(shape) for _ in range(3))
    step = max(1, PAIRS // max(1, x.shape[1] * len(z)))
    square = z.square()
    for i in range(0, len(x), step):
        at = slice(i, i + step)
        a, s, xi = alpha[at, None, None], sigma[at, None, None], x[at]
        p = 1.0 / (a * a * variances + s * s)
        logits = torch.einsum("tqd,md->tqm", a * p * xi, z) - 0.5 * ((a * a * p).expand(-1, 1, z.shape[1]) @ square.mT)
        if log_count is not None:
            logits += log_count
        if own is not None:
            logits.masked_fill_(own, -torch.inf)
        w = torch.softmax(logits, -1)
        m = w @ z
        found[at] = m + a * variances * p * (xi - a * m)
        n_eff[at], largest[at], entropy[at] = 1.0 / w.square().sum(-1), w.amax(-1), torch.special.entr(w).sum(-1)
    return Answer(found, n_eff, largest, entropy)


def mean_error(alpha: Tensor, sigma: Tensor, variances: Tensor) -> Tensor:
    """Expected square error of the linear denoiser by direction, ``(T, d)``."""
    a, s = alpha[:, None], sigma[:, None]
    return variances * s**2 / (a**2 * variances + s**2)


def pooled(points: Tensor, parts: Sequence[Part]) -> Tensor:
    """Rows of all parts, each centred at its own mean."""
    return torch.cat([points[p.refs] - points[p.refs].mean(0) for p in parts])


def make_units(residuals: Tensor) -> tuple[Units, Shape]:
    """Units from centred rows: the data scale, and the shrunk covariance's directions, constant ones left out."""
    scale = math.sqrt(float(residuals.square().sum()) / residuals.numel())
    shape = fit_shape(residuals, "full")
    values = shape.variances
    moving = shape.into(residuals).square().mean(0) > 1e-12 * values.max()
    weights = torch.where(moving, 1.0 / values.clamp(min=FLOOR**2 * float(values.max())), 0.0)
    return Units(scale, weights, shape.basis), shape


def make_grid(path: Path, units: Units, shape: Shape, step: float, most: int) -> tuple[Grid, Tensor]:
    """Times over all log-SNR at which the linear denoiser leaves between LEAST and MOST of the variance in either unit,
    one step beyond; and for each unit which of them it is, ``(2, T)``."""
    s = units.scale
    least, top = path.bandwidth_range
    wide = torch.arange(-14.0, 32.0, 0.25, dtype=torch.float64)
    h = s * torch.exp(-0.5 * wide)
    fits = (h > least) & (h < top)
    left = units.of_variances(mean_error(torch.ones_like(h), h, shape.variances), shape.basis)
    left = left / left[:, :1]
    inside = ((left > LEAST) & (left < MOST)).any(0) & fits
    if not bool(inside.any()):
        inside = fits
    low, high = float(wide[inside][0]) - step, float(wide[inside][-1]) + step
    low, high = max(low, float(wide[fits][0])), min(high, float(wide[fits][-1]))
    count = min(most, max(3, math.ceil((high - low) / step) + 1))
    log_snr = torch.linspace(low, high, count, dtype=torch.float64)
    h = s * torch.exp(-0.5 * log_snr)
    t = torch.tensor([float(path.time_at(float(v))) for v in h], dtype=torch.float64)
    at = [path(float(v)) for v in t]
    alpha, sigma = (torch.tensor([float(getattr(v, k)) for v in at], dtype=torch.float64) for k in ("alpha", "sigma"))
    left = units.of_variances(mean_error(torch.ones_like(h), h, shape.variances), shape.basis)
    first = units.of_variances(shape.variances[None], shape.basis)
    left = left / first
    return Grid(log_snr, t, alpha, sigma), (left > LEAST) & (left < MOST)


def make_problem(points: Tensor, equal: Tensor, parts: Sequence[Part], path: Path, seed: int, *, held_out: bool,
                 queries: int, folds: int, step: float = 0.5, most: int = 32) -> Problem:  # fmt: skip
    """Choose queries, folds and times.

    Args:
        points: ``(n, d)`` float64, held-out rows included. equal: ``(n,)`` ids of equal points.
        parts: sets with candidate queries. queries: at most so many in all;
            folds: what is left out of a fit is about 1 / folds of a part at most.
    """
    generator = torch.Generator().manual_seed(seed)
    units, shape = make_units(pooled(points, parts))
    grid, window = make_grid(path, units, shape, step, most)
    numbers, seen = (
        len(grid.t) * points.shape[1],
        sum(len(p.refs) ** 2 for p in parts) / sum(len(p.refs) for p in parts),
    )
    queries = min(queries, max(8, NOISE // numbers), max(64, int(WORK / (numbers * seen))))
    total = sum(len(p.queries) for p in parts)
    made, start = [], 0
    for i, part in enumerate(parts):
        mine = part.queries[torch.randperm(len(part.queries), generator=generator)]
        share = len(mine) if total <= queries else min(len(mine), max(2, round(queries * len(mine) / total)))
        mine = mine[:share]
        count = 1 if held_out else min(folds, share, math.ceil(folds * share / max(1, len(part.refs))))
        for f in range(count):
            at = torch.arange(f, share, count)
            left = torch.isin(equal[part.refs], equal[mine[at]])
            train = part.refs if held_out else part.refs[~left]
            if len(train):
                made.append(Fold(i, f, start + at, mine[at], part.refs, train))
        start += share
    noise = torch.randn(len(grid.t), start, points.shape[1], generator=generator, dtype=torch.float32)
    return Problem(points, equal, tuple(parts), tuple(made), grid, units, window, seed, noise)
