r"""Shapes of covariance fitted to few points, and the bandwidth floor h0 of largest leave-one-out likelihood.

A shape is a covariance C = B diag(v) B^T. Full shapes are shrunk by Ledoit and Wolf (2004), towards the mean variance
or, where columns have scales of their own, towards their variances: whichever predicts left-out points better. A
smoothed support replaces each point s by N(mu + a (s - mu), h0^2 C) with a = 1 or, *contracted*, a = sqrt(1 - h0^2):
then the mixture keeps the covariance C (West 1993), h0 = 0 is the plug-in and h0 = 1 the linear (Wiener) denoiser.
h0 maximises

    sum_i log 1/(n-1) sum_{j != i} N(s_i; mu + a (s_j - mu), h0^2 C).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

KINDS = ("isotropic", "diagonal", "low_rank", "full")
FLOOR = 1e-4  # standard deviations below this share of the largest are raised to it
_BOTH = 256  # dimensions up to which both targets of the shrinkage are tried
_HELD = 0.9  # share of the variance whose directions decide on h0: the smallest ones fit worst and matter least
_PROBES = 1000  # points whose likelihood is averaged


@dataclass(frozen=True)
class Shape:
    """Covariance ``basis diag(variances) basis^T`` around ``centre``; ``basis`` ``(d, d)`` or None (the axes).

    ``settings`` are the numbers that were fitted.
    """

    kind: str
    centre: Tensor
    variances: Tensor
    basis: Tensor | None
    settings: dict[str, float]

    def into(self, x: Tensor) -> Tensor:
        """Coordinates of ``(..., d)`` in the basis."""
        return x if self.basis is None else x @ self.basis

    def back(self, z: Tensor) -> Tensor:
        return z if self.basis is None else z @ self.basis.mT

    @property
    def covariance(self) -> Tensor:
        """C, ``(d, d)``."""
        if self.basis is None:
            return torch.diag(self.variances)
        return (self.basis * self.variances) @ self.basis.mT

    def scaled(self, factor: float) -> Shape:
        return replace(self, variances=self.variances * factor)


def fit_shape(x: Tensor, kind: str, weights: Tensor | None = None) -> Shape:
    """The covariance of ``x`` ``(n, d)`` float64 in one of KINDS. One point, or equal ones, have variances 0."""
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {KINDS}, got {kind!r}")
    centre = x.mean(0)
    z = x - centre
    columns = z.square().mean(0)
    mean = float(columns.mean())
    if mean == 0.0 or len(x) < 2:
        return Shape(kind, centre, torch.zeros_like(centre), None, {})
    if kind == "isotropic":
        return Shape(kind, centre, torch.full_like(centre, mean), None, {})
    if kind == "diagonal":
        return Shape(kind, centre, columns.clamp(min=FLOOR**2 * float(columns.max())), None, {})
    return _low_rank(z, centre) if kind == "low_rank" else _full(z, centre, columns)


def eigen(z: Tensor) -> tuple[Tensor, Tensor]:
    """Principal directions ``(d, d)``, complete, and variances ``(d,)``, largest first, of centred rows."""
    n, d = z.shape
    if n >= d:
        values, vectors = torch.linalg.eigh(z.mT @ z / n)
        return vectors.flip(1), values.flip(0).clamp(min=0.0)
    _, s, vh = torch.linalg.svd(z, full_matrices=False)
    values = torch.cat([s.square() / n, s.new_zeros(d - n)])
    q, r = torch.linalg.qr(vh.mT, mode="complete")
    q[:, :n] *= torch.where(r.diagonal() < 0, -1.0, 1.0)
    return q, values


def ledoit_wolf_share(z: Tensor) -> float:
    """The optimal weight of the isotropic target for centred rows."""
    n, d = z.shape
    gram = z @ z.mT if n <= d else z.mT @ z
    trace = float(gram.diagonal().sum()) / n
    norm = float(gram.square().sum()) / n**2
    spread = norm - trace**2 / d
    noise = (float(z.square().sum(-1).square().sum()) / n - norm) / n
    return 1.0 if spread <= 0 else min(1.0, max(0.0, noise) / spread)


def _full(z: Tensor, centre: Tensor, columns: Tensor) -> Shape:
    sd = _deviations(z, columns)
    by_column = z.shape[1] <= _BOTH and len(z) > 4 and _predicts_better(z, columns)
    share = ledoit_wolf_share(z / sd if by_column else z)
    if by_column:
        c = (z / sd).mT @ (z / sd) / len(z)
        c = (1 - share) * c + share * c.diagonal().mean() * torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
        values, basis = torch.linalg.eigh(sd[:, None] * c * sd)
        values, basis = values.flip(0), basis.flip(1)
    else:
        basis, values = eigen(z)
        values = (1 - share) * values + share * values.mean()
    values = values.clamp(min=FLOOR**2 * float(values.max()))
    return Shape("full", centre, values, basis, {"shrinkage": share, "by_column": float(by_column)})


def _deviations(z: Tensor, columns: Tensor) -> Tensor:
    """Standard deviations of columns, at least FLOOR of the largest of ``columns``' variances."""
    return z.square().mean(0).sqrt().clamp(min=FLOOR * float(columns.max().sqrt()))


def _predicts_better(z: Tensor, columns: Tensor) -> bool:
    """Whether shrinking towards the columns' variances gives left-out points a larger Gaussian likelihood."""
    fold = torch.arange(len(z), device=z.device) % 3
    eye, gain = torch.eye(z.shape[1], dtype=z.dtype, device=z.device), 0.0
    for f in range(3):
        train, left = z[fold != f], z[fold == f]
        for scale, sign in ((_deviations(train, columns), 1.0), (torch.ones_like(columns), -1.0)):
            w, v = train / scale, left / scale
            share = ledoit_wolf_share(w)
            c = w.mT @ w / len(w)
            least = 1e-8 * (z / scale).square().mean()  # a third may have no spread at all
            c = (1 - share) * c + (share * c.diagonal().mean() + least) * eye
            root = torch.linalg.cholesky(c)
            fit = torch.linalg.solve_triangular(root, v.mT, upper=False).square().sum(0)
            gain -= sign * float((0.5 * fit + root.diagonal().log().sum() + scale.log().sum()).sum())
    return gain > 0.0


def _low_rank(z: Tensor, centre: Tensor) -> Shape:
    """Probabilistic PCA; the rank explains 90 % of the variance, the rest is isotropic."""
    basis, values = eigen(z)
    rank = int((values.cumsum(0) < 0.9 * values.sum()).sum()) + 1
    if rank < len(values):
        rest = float(values[rank:].mean())
        values = values.clone()
        values[rank:] = rest
    values = values.clamp(min=FLOOR**2 * float(values.max()))
    return Shape("low_rank", centre, values, basis, {"rank": float(rank)})


def fit_bandwidth(x: Tensor, fit: Callable[[Tensor], Shape], contracted: bool, equal: Tensor | None = None) -> float:
    """h0 of largest left-out likelihood in units of the shape, in [0.01, 1] (contracted: < 1).

    A shape that has seen a point makes it look close, so few points (against dimensions) are left out of shape and
    mixture alike, in thirds; many only of the mixture, one by one. Where nothing can be left out h0 is 1.

    Args:
        x: ``(n, d)`` float64. fit: from references ``(k, d)`` to their shape.
        equal: ``(n,)`` ids of equal points, which never count for one another.
    """
    ids = torch.arange(len(x), device=x.device) if equal is None else equal
    if len(x) >= 20 * x.shape[1]:
        rows = torch.arange(min(_PROBES, len(x)), device=x.device)
        cases = [_Case.of(x[rows], x, fit(x), ids[rows, None] == ids)]
    else:
        fold = torch.unique(ids, return_inverse=True)[1] % min(3, max(2, int(torch.unique(ids).numel())))
        cases = []
        for f in fold.unique():
            left, train = (fold == f).nonzero().squeeze(-1)[:_PROBES], x[fold != f]
            if len(train):
                cases.append(_Case.of(x[left], train, fit(train), None))
    if not cases or any(c is None for c in cases):
        return 1.0

    def loss(log_h: float) -> float:
        return sum(c.loss(math.exp(log_h), contracted) for c in cases if c is not None)

    low, high = math.log(0.01), math.log(0.999 if contracted else 1.0)
    grid = torch.linspace(low, high, 13).tolist()
    values = [loss(v) for v in grid]
    best = min(range(len(grid)), key=values.__getitem__)
    return math.exp(_golden(loss, grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]))


@dataclass(frozen=True)
class _Case:
    """Left-out points against references of one shape: products of whitened coordinates."""

    cross: Tensor
    left: Tensor
    refs: Tensor
    own: Tensor | None
    d: int

    @classmethod
    def of(cls, left: Tensor, refs: Tensor, shape: Shape, own: Tensor | None) -> _Case | None:
        if float(shape.variances.max()) == 0.0 or (own is not None and bool(own.all(-1).any())):
            return None
        order = shape.variances.argsort(descending=True)
        held = shape.variances[order].cumsum(0) < _HELD * shape.variances.sum()
        keep = order[: int(held.sum()) + 1]
        sd = shape.variances[keep].sqrt()
        u, v = (shape.into(w - shape.centre)[:, keep] / sd for w in (left, refs))
        return cls(u @ v.mT, u.square().sum(-1, keepdim=True), v.square().sum(-1), own, len(keep))

    def loss(self, h: float, contracted: bool) -> float:
        """Minus the log-likelihood, up to what does not depend on h."""
        a = math.sqrt(max(0.0, 1.0 - h * h)) if contracted else 1.0
        logits = (self.left + a * a * self.refs - 2.0 * a * self.cross) / (-2.0 * h * h)
        if self.own is not None:
            logits = logits.masked_fill(self.own, -torch.inf)
        return len(self.left) * self.d * math.log(h) - float(torch.logsumexp(logits, -1).sum())


def _golden(f: Callable[[float], float], low: float, high: float, steps: int = 10) -> float:
    """Minimiser of a unimodal function by golden sections."""
    g = (math.sqrt(5.0) - 1.0) / 2.0
    a, b = high - g * (high - low), low + g * (high - low)
    fa, fb = f(a), f(b)
    for _ in range(steps):
        if fa <= fb:
            high, b, fb = b, a, fa
            a = high - g * (high - low)
            fa = f(a)
        else:
            low, a, fa = a, b, fb
            b = low + g * (high - low)
            fb = f(b)
    return a if fa <= fb else b
