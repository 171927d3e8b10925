r"""Certified truncation: the points that cannot matter are found cheaply, skipped, and their weight is bounded.

In the coordinates of :mod:`nwflow.kernel.posterior` (no time enters; bandwidths shrink from noise to data, so the share
of points that matter does too) a logit is l_j = y . z_j - b f_j / 2 + log pi_j, f_j = |z_j|^2. Split space by an
orthonormal basis V of k leading directions of the support. The product over them is exact and costs k / d of the whole;
Cauchy-Schwarz bounds the rest. Applied to y itself that is loose, since most of y is noise, whose norm is large and
which is nearly orthogonal to the data. But along a flow every state is a multiple of an earlier one plus a combination
of the support's points. So with an *anchor*, an earlier query y_a whose logits l_j^a are kept, and w = y - c y_a,

    l_j = c l_j^a + (c b_a - b) f_j / 2 + (1 - c) log pi_j + (V^T w) . (V^T z_j) + r_j,
    |r_j| <= |w - V V^T w| |z_j - V V^T z_j|,

for every number c; least squares on the part outside V takes the one with the shortest remainder. Nothing about the
sampler is assumed: a query that its anchor does not explain has a long remainder, and its points survive.

The bounds are one product of [V^T z_j, f_j, log pi_j, |rest of z_j|] with a row per query, added to c l_j^a. Further
leading directions refine the columns that are left. With F a lower bound of the largest logit (the exact one of a
candidate) a point whose upper bound U_j is below F - log(10 m / tol) is dropped at once; then points are dropped from
the smallest up while the sum of exp(U_j - F) stays within the tolerance. What is left is scored exactly under the
accuracy contract of :mod:`nwflow.kernel.rescore`; the weight left out is at most sum exp(U_j - lse of what was kept).

Float32 rounding of products, of the kept logits and of the leading coordinates is part of U_j (gamma = terms + 8, as
proven there for any order of summation). All of this is for one set and an isotropic kernel.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from nwflow.kernel.candidates import over_lists
from nwflow.kernel.posterior import QUERY_BLOCK, Keys, Moments, Want, full_precision, logits
from nwflow.kernel.rescore import PROBE, assemble, logit_error

WIDTHS = (16, 64)  # leading directions of the two levels; the first alone suffices near an anchor
SAMPLE = 1024  # rows that the leading directions are fitted to: any basis is valid, a good one leaves short rests
SHORT = 64  # a list longer than m / SHORT costs more than a dense pass
LOOSE = 8  # so do more than m / LOOSE points that the bounds cannot drop
HELD = 2**22  # pairs of one block of queries that are held at a time
BLOCK = 2**18  # pairs whose bounds are formed at a time
WIDTH = 0.25  # of a bin of upper bounds, in nats
REFINE = 16  # a block with more than 1 / REFINE of its pairs left is refined by the next level
UNIT = 2.0**-24  # unit round-off of float32
LARGEST = 1e37  # logits above it are not for float32


@dataclass(frozen=True)
class Leading:
    """Leading coordinates of a support, and what is left of every point.

    ``basis`` ``(d, k)`` in the working dtype, orthonormal; ``widths`` the directions up to each level, the last is k;
    ``blocks`` one contiguous float32 matrix per level: ``(m, k_1 + 3)`` of [V^T z, f, log pi, rest] and then
    ``(m, k_i - k_{i-1} + 2)`` of [rest before, V^T z, rest after], each rest an upper bound of |z - V V^T z|.
    ``slip`` bounds |(V^T z) as stored - V^T z| / |z|.
    """

    basis: Tensor
    widths: tuple[int, ...]
    blocks: tuple[Tensor, ...]
    slip: float

    @property
    def lead(self) -> Tensor:
        """V^T z, ``(m, k)`` float32."""
        first = self.blocks[0][:, : self.widths[0]]
        return torch.cat([first, *(b[:, 1:-1] for b in self.blocks[1:])], 1)


@dataclass(frozen=True)
class Anchor:
    """Queries whose logits are kept: ``y`` ``(n, d)``, ``b`` ``(n, 1)``, ``logits`` ``(n, m)`` float32 off by at most
    ``error`` ``(n,)``, and ``best`` ``(n,)``, the index of the largest. Memory: 4 n m bytes."""

    y: Tensor
    b: Tensor
    logits: Tensor
    error: Tensor
    best: Tensor

    def take(self, rows: Tensor | slice) -> Anchor:
        """Some of the queries."""
        return Anchor(*(getattr(self, name)[rows] for name in ("y", "b", "logits", "error", "best")))


class Truncated(NamedTuple):
    """What :func:`truncated` could do: ``rows`` ``(r,)`` of the queries that are done, ascending, and for each of them
    ``moments``, ``skipped`` (proven bound of the weight left out), ``above`` (proven upper bound of the largest logit
    left out; -inf if none was) and ``best`` (index of the largest logit found). ``gap`` ``(n,)`` of all queries is the
    usual distance in nats between bounds and logits: where it is large, a new anchor would help. ``scored`` counts
    exactly scored pairs and ``loose`` the pairs that the bounds did not drop at once, both over all queries."""

    rows: Tensor
    moments: Moments | None
    skipped: Tensor
    above: Tensor
    best: Tensor
    gap: Tensor
    scored: int
    loose: int


def leading(keys: Keys, widths: tuple[int, ...] = WIDTHS) -> Leading:
    """The leading coordinates of a support: principal directions of a strided sample, and one pass over the points."""
    d, m, wide = keys.points.shape[-1], keys.m, keys.work
    widths = tuple(sorted({min(k, d) for k in widths}))
    basis = _directions(keys, widths[-1])
    slip = math.sqrt(widths[-1]) * (d + 10.0) * UNIT
    sizes = [widths[0] + 3, *(b - a + 2 for a, b in itertools.pairwise(widths))]
    blocks = tuple(torch.empty(m, size, dtype=torch.float32, device=keys.points.device) for size in sizes)
    step, cheap = max(1, 2**22 // d), basis.to(torch.float32)
    for j in range(0, m, step):
        at = slice(j, min(j + step, m))
        lead = (
            keys.exact(j, at.stop).to(torch.float32) @ cheap if keys.cheap is None else keys.cheap[at].float() @ cheap
        )
        f, before, rest = keys.square[at], 0, None
        squares = lead.to(wide).square().cumsum(-1)
        for block, k in zip(blocks, widths, strict=True):
            inner = (squares[:, k - 1].sqrt() - slip * f.sqrt()).clamp_(min=0.0)
            left = (f * (1.0 + (d + 8.0) * torch.finfo(wide).eps) - inner.square()).clamp_(min=0.0).sqrt_()
            left = (left * (1.0 + 4.0 * UNIT)).to(torch.float32)
            columns = [lead[:, before:k], *((f.float(), keys.log_prior[at].float()) if rest is None else ()), left]
            torch.cat([c if c.ndim == 2 else c[:, None] for c in ([] if rest is None else [rest]) + columns], 1,
                      out=block[at])  # fmt: skip
            before, rest = k, left
    return Leading(basis, widths, blocks, slip)


def _directions(keys: Keys, k: int) -> Tensor:
    """``(d, k)`` orthonormal: principal directions of at most SAMPLE points, completed where these have lower rank."""
    index = torch.arange(0, keys.m, max(1, -(-keys.m // SAMPLE)), device=keys.points.device)
    z = keys.gather(index)
    if z.shape[0] < z.shape[1]:
        vectors = z.mT @ torch.linalg.eigh(z @ z.mT).eigenvectors.flip(-1)[:, :k]
        vectors = torch.nn.functional.pad(vectors, (0, k - vectors.shape[1]))
    else:
        vectors = torch.linalg.eigh(z.mT @ z).eigenvectors.flip(-1)[:, :k]
    scale = torch.linalg.vector_norm(vectors, dim=0)
    return torch.linalg.qr(vectors / torch.where(scale > 0, scale, 1.0)).Q


def anchored(y: Tensor, b: Tensor, keys: Keys) -> Anchor:
    """Keep the logits of ``y`` ``(n, d)``, ``b`` ``(n or 1, 1)``: one dense product, without the one for values."""
    n, m, cheap = y.shape[0], keys.m, keys.cheap.dtype
    kept = torch.empty(n, m, dtype=torch.float32, device=y.device)
    bound = logit_error(y, b, keys, cheap).proven + 2.0 * UNIT * _size(y, b, keys)
    yc, bc, square, log_prior = (v.to(cheap) for v in (y, b, keys.square, keys.log_prior))
    step = max(1024, 2**20 // max(1, n))
    with full_precision():
        for j in range(0, m, step):
            at = slice(j, min(j + step, m))
            kept[:, at] = logits(yc, bc, keys.cheap[at], square[at], log_prior[at])
    return Anchor(y, b.expand(n, 1), kept, bound.expand(n), kept.argmax(-1))


def _size(y: Tensor, b: Tensor, keys: Keys) -> Tensor:
    """An upper bound of every |l_j|, ``(n,)``."""
    return torch.linalg.vector_norm(y, dim=-1) * keys.radius + 0.5 * b[..., 0] * keys.radius**2 + keys.prior_spread


def truncated(y: Tensor, b: Tensor, keys: Keys, leads: Leading, want: Want, tol: float, accuracy: float,
              anchor: Anchor | None = None, best: Tensor | None = None) -> Truncated:  # fmt: skip
    """Moments of the queries for which few points matter, each with a proven bound of the weight left out.

    Args:
        y, b: natural parameters ``(n, d)`` and ``(n or 1, 1)`` in the working dtype.
        keys: one set, points of weight 0 removed. leads: its :func:`leading` coordinates.
        want: moments. tol: largest weight that may be left out. accuracy: of what is scored, in total variation; the
            error of the moments is that of the scored points plus the weight left out.
        anchor: earlier queries, row by row those of ``y``. best: a guess of the nearest point of each query.

    Returns:
        :class:`Truncated`; queries that are missing in its ``rows`` need a dense pass.
    """
    assert keys.valid is None and y.ndim == 2 and b.shape[-1] == 1
    parts, step = [], QUERY_BLOCK
    with full_precision():
        for i in range(0, y.shape[0], step):
            rows = slice(i, i + step)
            bi = b.expand(y.shape[0], 1)[rows]
            near = None if anchor is None else anchor.take(rows)
            part = _block(y[rows], bi, keys, leads, want, tol, accuracy, near, None if best is None else best[rows])
            parts.append(part._replace(rows=part.rows + i))
    if len(parts) == 1:
        return parts[0]
    some = [p.moments for p in parts if p.moments is not None]
    rows, skipped, above, best, gap = (
        torch.cat([getattr(p, name) for p in parts]) for name in ("rows", "skipped", "above", "best", "gap")
    )
    scored, loose = sum(p.scored for p in parts), sum(p.loose for p in parts)
    return Truncated(rows, assemble(some, None) if some else None, skipped, above, best, gap, scored, loose)


class _Bounds(NamedTuple):
    """Rows of the products that give upper bounds, per level ``(n, .)`` float32; c ``(n, 1)`` float32; what rounding
    adds, ``slack`` ``(n,)``; the size of the numbers, and the usual distance between bound and logit, ``(n,)``."""

    levels: list[Tensor]
    c: Tensor
    slack: Tensor
    size: Tensor
    gap: Tensor


def _bounds(y: Tensor, b: Tensor, keys: Keys, leads: Leading, anchor: Anchor | None) -> _Bounds:
    """The row of each query (module docstring) and what rounding adds."""
    basis, widths, radius = leads.basis, leads.widths, keys.radius
    c, w, ba, size, error = y.new_zeros(y.shape[0], 1), y, 0.0 * b, y.new_zeros(y.shape[0]), 0.0
    if anchor is not None:
        first = basis[:, : widths[0]]
        mine, its = (v - (v @ first) @ first.mT for v in (y, anchor.y))
        c = ((mine * its).sum(-1) / its.square().sum(-1)).nan_to_num(0.0, 0.0, 0.0)[:, None]
        w, ba, size, error = (
            y - c * anchor.y,
            c * anchor.b,
            c.abs()[:, 0] * _size(anchor.y, anchor.b, keys),
            anchor.error,
        )
    lead = w @ basis
    length = torch.linalg.vector_norm(w, dim=-1, keepdim=True)
    tail = (w - lead @ basis.mT).square().sum(-1, keepdim=True)
    rests = [(tail + lead[:, k:].square().sum(-1, keepdim=True)).sqrt() for k in widths]
    spare = (y.shape[-1] + 8.0) * torch.finfo(w.dtype).eps * length
    rests = [(r + spare) * (1.0 + 2.0 * UNIT) for r in rests]
    levels = [torch.cat([lead[:, : widths[0]], 0.5 * (ba - b), 1.0 - c, rests[0]], 1)]
    for (i, j), (before, after) in zip(itertools.pairwise(widths), itertools.pairwise(rests), strict=True):
        levels.append(torch.cat([-before, lead[:, i:j], after], 1))
    gap = rests[0][:, 0] * leads.blocks[0][:, -1].mean()
    length = length[:, 0]
    size = size + 0.5 * (ba - b)[:, 0].abs() * radius**2 + (1.0 - c[:, 0]).abs() * keys.prior_spread
    terms = widths[-1] + 3.0 * len(widths) + 8.0
    slack = c.abs()[:, 0] * error + terms * UNIT * (size + 4.0 * length * radius) + leads.slip * length * radius
    levels = [v.to(torch.float32) for v in levels]
    return _Bounds(levels, c.to(torch.float32), slack, size + length * radius, gap + 2.0 * slack)


def _block(y: Tensor, b: Tensor, keys: Keys, leads: Leading, want: Want, tol: float, accuracy: float,
           anchor: Anchor | None, best: Tensor | None) -> Truncated:  # fmt: skip
    """One block of queries."""
    n, m, bounds = y.shape[0], keys.m, _bounds(y, b, keys, leads, anchor)
    error = logit_error(y, b, keys, keys.work).proven.expand(n)
    small = m <= LOOSE * SHORT  # then nothing is too much
    first, best = _floor(y, b, keys, anchor, best)
    reach = math.log(10.0 * m / tol)
    slack = bounds.slack + 4.0 * UNIT * (first.abs() + error + reach)
    least = (first - error - reach - slack).to(torch.float32)
    limit = m if small else max(1, min(m // LOOSE, HELD // max(1, n)))
    row, col, upper, cut = _survivors(bounds, keys, leads, anchor, least, limit)
    upper = upper.to(keys.work) + slack[row]
    cut |= ~(bounds.size < LARGEST) | ~torch.isfinite(first)
    best = _highest(row, col, upper, best)
    floor = torch.maximum(first, _candidates(y, b, keys, best[:, None])[:, 0]) - error
    count = torch.bincount(row, minlength=n)
    loose = int(count.sum())
    gone = (m - count) * torch.exp(first - error - reach - floor)  # weight dropped at once, in units of exp(floor)
    keep, dropped, above = _lightest(row, upper, floor, gone, reach, tol)
    row, col = row[keep], col[keep]
    count = torch.bincount(row, minlength=n)
    above = torch.where(count == m, -torch.inf, torch.maximum(above, first - error - reach))
    done = ~cut & (count > 0) & (count <= (m if small else m // SHORT))
    rows = done.nonzero().squeeze(-1)
    if not rows.numel():
        return Truncated(rows, None, floor[rows], above[rows], best[rows], bounds.gap, 0, loose)
    mine = done[row]
    row, col = (torch.cumsum(done, 0) - 1)[row[mine]], col[mine]
    more = replace(want, top=max(1, want.top), share=0.0)
    moments, scored = over_lists(y[rows], b[rows], keys, more, row, col, accuracy)
    assert moments.error is not None and moments.index is not None and moments.lse is not None
    skipped = dropped[rows] * torch.exp(floor[rows] - moments.lse) * (1.0 + 4.0 * moments.error)
    moments = replace(moments, error=moments.error + skipped)
    assert moments.index is not None
    return Truncated(rows, moments, skipped, above[rows], moments.index[:, 0], bounds.gap, scored, loose)


def _floor(y: Tensor, b: Tensor, keys: Keys, anchor: Anchor | None, best: Tensor | None) -> tuple[Tensor, Tensor]:
    """The largest logit among some candidates, and which of them has it; up to rounding in the working dtype."""
    given = [v for v in (best, None if anchor is None else anchor.best) if v is not None]
    if not given:
        index = torch.arange(0, keys.m, max(1, keys.m // PROBE), device=y.device)
        lg = logits(y, b, keys.gather(index), keys.square[index], keys.log_prior[index])
        value, place = lg.max(-1)
        return value, index[place]
    index = torch.stack(given, 1)
    value, place = _candidates(y, b, keys, index).max(-1)
    return value, index.gather(1, place[:, None]).squeeze(1)


def _candidates(y: Tensor, b: Tensor, keys: Keys, index: Tensor) -> Tensor:
    """Logits of some points ``(n, k)`` of each query, by products in the working dtype."""
    products = torch.einsum("nd,nkd->nk", y, keys.gather(index))
    return products - 0.5 * b * keys.square[index] + keys.log_prior[index]


def _highest(row: Tensor, col: Tensor, upper: Tensor, best: Tensor) -> Tensor:
    """The point with the largest bound of each query that has one, else ``best``."""
    largest = upper.new_full(best.shape, -torch.inf).scatter_reduce(0, row, upper, "amax")
    at = upper == largest[row]
    return best.clone().scatter_(0, row[at], col[at])


def _survivors(bounds: _Bounds, keys: Keys, leads: Leading, anchor: Anchor | None, least: Tensor,
               limit: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Pairs whose upper bound (without slack) reaches ``least`` ``(n,)``: rows, columns, bounds; and the queries with
    more than ``limit`` of them, whose lists are incomplete."""
    n, m = least.shape[0], keys.m
    step = min(m, max(1024, BLOCK // max(1, n)))
    buffer = torch.empty(n * step, dtype=torch.float32, device=least.device)
    count, found = torch.zeros(n, dtype=torch.long, device=least.device), []
    least = least[:, None].clone()
    for j in range(0, m, step):
        k = min(step, m - j)
        upper = buffer[: n * k].view(n, k)
        if anchor is None:
            torch.mm(bounds.levels[0], leads.blocks[0][j : j + k].mT, out=upper)
        else:
            torch.mul(anchor.logits[:, j : j + k], bounds.c, out=upper)
            upper.addmm_(bounds.levels[0], leads.blocks[0][j : j + k].mT)
        near = upper >= least
        at: Tensor | None = None
        for level, block in zip(bounds.levels[1:], leads.blocks[1:], strict=True):
            if int(near.sum()) * REFINE <= near.numel():
                break
            inside = near.any(0).nonzero().squeeze(-1)
            upper, at = upper[:, inside], inside if at is None else at[inside]
            upper.addmm_(level, block[j + at].mT)
            near = upper >= least
        row, col = near.nonzero(as_tuple=True)
        if row.numel():
            found.append((row, (col if at is None else at[col]) + j, upper[row, col]))
            count += torch.bincount(row, minlength=n)
            least[count > limit] = torch.inf
    cut = count > limit
    if not found:
        none = torch.zeros(0, dtype=torch.long, device=least.device)
        return none, none, buffer[:0], cut
    row, col, upper = (torch.cat(parts) for parts in zip(*found, strict=True))
    if bool(cut.any()):
        keep = ~cut[row]
        row, col, upper = row[keep], col[keep], upper[keep]
    return row, col, upper, cut


def _lightest(row: Tensor, upper: Tensor, floor: Tensor, gone: Tensor, reach: float,
              tol: float) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Which pairs to keep; per query the bound of all weight dropped (``gone`` before), in units of exp(floor), and an
    upper bound of the largest logit dropped. Bounds are sorted into bins, whole bins are dropped from below."""
    n, bins = floor.shape[0], math.ceil(reach / WIDTH) + 1
    height = upper - floor[row]
    bin_ = ((height + reach) / WIDTH).floor().clamp_(0, bins - 1).long()
    mass = torch.bincount(row * bins + bin_, weights=height.clamp(max=0.0).exp(), minlength=n * bins).view(n, bins)
    total = mass.cumsum(-1) + gone[:, None]
    drop = total <= tol
    drop[:, -1] = False
    first = drop.sum(-1)  # bins below it are dropped
    dropped = torch.where(first > 0, total.gather(1, (first - 1).clamp(min=0)[:, None]).squeeze(1), gone)
    return bin_ >= first[row], dropped * (1.0 + 1e-9), floor - reach + WIDTH * first
