r"""The accuracy contract: which precision a query needs, and exact re-scoring where the cheap pass does not suffice.

A logit of the float32 pass on centred data is off by at most

    delta = gamma u E,    E = |y| R + 1/2 max(b) R^2 + max|log pi|,    R = max_i |z_i|,

u the unit round-off: gamma = d + 8 is proven for any order of summation (Higham, Accuracy and Stability, section 3.1),
gamma = 2 sqrt(d) + 8 is the estimate that decides (rounding errors of a long product are close to independent: Higham
and Mary, 2019). Weights whose logits are within delta of the exact ones are within delta in total variation, so

1. delta(float32) <= tol: the float32 pass is good enough.
2. Otherwise the points that can matter, l_i >= max l - log(m / tol) - 2 delta with the *proven* delta, are
   found by a float32 pass without values. All others together weigh less than tol / 2. A list of at most m / 64 is
   re-scored by float64 differences from one of them (:func:`direct_logits`), which do not cancel.
3. A longer list costs more than a float64 product (measured: a difference costs 30 to 60 times its product), so these
   queries take the streaming pass with float64 logits. A probe of some hundred points predicts which list is long.
4. Where even delta(float64) > tol (tight clusters at the smallest bandwidths) every point of the float64 list is
   re-scored by differences, however long it is.

On devices without float64 only the float32 pass exists, and the returned bound says what that is worth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from nwflow.kernel.fused import ULPS, applies, fused
from nwflow.kernel.posterior import (
    CLAMP,
    KEY_BLOCK,
    QUERY_BLOCK,
    Keys,
    Moments,
    Partial,
    Want,
    finish,
    full_precision,
    logits,
    merge,
    stream,
)

PROBE = 512
SHORT = 64  # a list longer than m / SHORT is left to a product
SMALL = 2**21  # below this many n m d the float64 pass is cheaper than deciding
CONVERTED = 2**20  # float64 numbers of one block of keys that is formed for a product
PAIRS = 2**21  # elements of one block of direct differences


@dataclass(frozen=True)
class ErrorBound:
    """delta of a pass per query, ``(*T, n)``: ``estimate`` decides, ``proven`` holds for any order of summation."""

    estimate: Tensor
    proven: Tensor


def logit_error(y: Tensor, b: Tensor, keys: Keys, dtype: torch.dtype) -> ErrorBound:
    """The bound on the error of a logit of a pass in ``dtype`` (module docstring)."""
    d, u = y.shape[-1], torch.finfo(dtype).eps / 2
    radius = keys.radius[..., None]
    size = torch.linalg.vector_norm(y, dim=-1) * radius + 0.5 * b.amax(-1) * radius**2
    size = u * (size + keys.prior_spread[..., None])
    return ErrorBound((2.0 * math.sqrt(d) + 8.0) * size, (d + 8.0) * size)


def posterior(y: Tensor, b: Tensor, keys: Keys, want: Want, tol: float | None) -> Moments:
    """Moments of every query to tolerance ``tol`` (None: the cheap pass alone); shapes as in :func:`stream`.

    The largest weights are always min(top, m) columns, filled up with weight 0 and index -1.
    """
    with full_precision():
        return _padded(_solved(y, b, keys, want, tol), min(want.top, keys.m))


def _solved(y: Tensor, b: Tensor, keys: Keys, want: Want, tol: float | None) -> Moments:
    cheap = keys.cheap.dtype
    if tol is None or torch.finfo(keys.work).eps > 1e-10:
        return _bounded(y, b, keys, want, cheap, cheap)
    if y.ndim == 3:
        return _tasks(y, b, keys, want, tol)
    if y.shape[-2] * keys.m * y.shape[-1] <= SMALL:
        return _dense(y, b, keys, want, tol)
    blocks = []
    for i in range(0, max(1, y.shape[-2]), QUERY_BLOCK):
        rows = slice(i, i + QUERY_BLOCK)
        blocks.append(_routed(y[rows], b if b.shape[0] == 1 else b[rows], keys, want, tol))
    return blocks[0] if len(blocks) == 1 else assemble(blocks, None)


def _padded(p: Moments, k: int) -> Moments:
    """Lists of the largest weights filled up to ``k`` columns."""
    if p.weights is None or p.index is None or p.weights.shape[-1] >= k:
        return p
    more, pad = (0, k - p.weights.shape[-1]), torch.nn.functional.pad
    return replace(p, weights=pad(p.weights, more), index=pad(p.index, more, value=-1))


def _bounded(y: Tensor, b: Tensor, keys: Keys, want: Want, dtype: torch.dtype, values: torch.dtype) -> Moments:
    """A streaming pass with the bound that its precision gives."""
    bound = logit_error(y, b, keys, dtype)
    one_call = dtype == values and applies(y, b, keys, want, dtype)
    moments = finish(fused(y, b, keys) if one_call else stream(y, b, keys, want, dtype, values, fast=True))
    extra = _rounding(values, keys.m) + (ULPS * torch.finfo(values).eps if one_call else 0.0)
    error = bound.estimate.expand(moments.lse.shape) + extra
    return replace(moments, error=error, proven=torch.zeros_like(moments.lse).bool())


def _dense(y: Tensor, b: Tensor, keys: Keys, want: Want, tol: float) -> Moments:
    """Float64 throughout, for problems too small to decide about."""
    wide = keys.work
    bound = logit_error(y, b, keys, wide)
    if bool((bound.estimate > tol).any()):
        return _direct_all(y, b, keys, want)
    moments = finish(stream(y, b, keys, want, wide, wide))
    return _labelled(moments, bound, tol, _rounding(wide, keys.m))


def _rounding(values: torch.dtype, m: int) -> float:
    """What float exponentials and their sums add to the error: half an ulp of the exponent, exp and mass of each."""
    return torch.finfo(values).eps / 2 * (math.log(m) + 4.0)


def _labelled(moments: Moments, bound: ErrorBound, tol: float, extra: float) -> Moments:
    """Attach the proven bound where it meets ``tol`` and the estimate elsewhere, each with ``extra``."""
    proven = (bound.proven + extra <= tol).expand(moments.lse.shape)
    error = torch.where(proven, bound.proven.expand(moments.lse.shape), bound.estimate.expand(moments.lse.shape))
    return replace(moments, error=error + extra, proven=proven)


def _tasks(y: Tensor, b: Tensor, keys: Keys, want: Want, tol: float) -> Moments:
    """Many small supports in one product; large ones one after another, each on its own real points."""
    if y.shape[-2] * keys.m * y.shape[-1] > SMALL:
        return one_by_one(y, b, keys, lambda yi, bi, ki: posterior(yi, bi, ki, want, tol))
    bound = logit_error(y, b, keys, keys.cheap.dtype)
    extra = _rounding(keys.cheap.dtype, keys.m)
    if bool((bound.estimate + extra <= tol).all()):
        return _labelled(finish(stream(y, b, keys, want, keys.cheap.dtype, keys.cheap.dtype)), bound, tol, extra)
    return _dense(y, b, keys, want, tol)


def one_by_one(y: Tensor, b: Tensor, keys: Keys, solve: Callable[[Tensor, Tensor, Keys], Moments]) -> Moments:
    """``solve`` for every task on its real points; indices are slots of the task again afterwards."""
    parts = []
    for i in range(y.shape[0]):
        p = solve(y[i], b[i if b.shape[0] > 1 else 0], keys.task(i))
        if p.index is not None and keys.valid is not None:
            slots = keys.valid[i].nonzero().squeeze(-1)
            p = replace(p, index=torch.where(p.index < 0, -1, slots[p.index]))
        parts.append(p)
    return assemble(parts, None, stack=True)


def _routed(y: Tensor, b: Tensor, keys: Keys, want: Want, tol: float) -> Moments:
    """One block of queries on one support: group them by what they need, and put the answers back in order."""
    cheap, wide, n = keys.cheap.dtype, keys.work, y.shape[0]
    bound, bound64 = logit_error(y, b, keys, cheap), logit_error(y, b, keys, wide)
    extra = _rounding(cheap, keys.m)
    easy = bound.estimate.expand(n) + extra <= tol
    groups: list[tuple[Tensor, Moments]] = []
    if bool(easy.any()):
        rows = easy.nonzero().squeeze(-1)
        yr, br = _take(y, b, rows)
        groups.append(
            (rows, _labelled(finish(stream(yr, br, keys, want, cheap, cheap)), _rows(bound, rows), tol, extra))
        )
    rows = (~easy).nonzero().squeeze(-1)
    if rows.numel():
        margin = 2.0 * bound.proven.expand(n) + math.log(keys.m / _rest(want, tol))
        limit = max(1, keys.m // SHORT)
        floor, share = _probe(*_take(y, b, rows), keys, margin[rows])
        few = (share * keys.m <= limit) & (want.top <= 1)
        rows, floor, long = rows[few], floor[few], rows[~few]
        if rows.numel():
            found = shortlist(*_take(y, b, rows), keys, cheap, margin[rows], floor, limit)
            long = torch.cat([long, rows[found.overflow]]).sort().values  # _take knows ascending rows only
            rows = rows[~found.overflow]
            if rows.numel():
                groups.append((rows, rescored(*_take(y, b, rows), keys, want, found, tol)))
        size = bound64.estimate.expand(n)[long]
        hard = (size > tol) & torch.isfinite(size)  # what is not a number stays so at once
        for part, route in ((long[~hard], _product), (long[hard], _differences)):
            if part.numel():
                groups.append((part, route(*_take(y, b, part), keys, want, tol)))
    if len(groups) == 1:
        order = groups[0][0]
        if order.numel() < 2 or bool((order[1:] > order[:-1]).all()):
            return groups[0][1]
    return assemble([g for _, g in groups], torch.cat([r for r, _ in groups]))


def _rest(want: Want, tol: float) -> float:
    """Weight that a list may leave out."""
    return 0.5 * tol if want.rest is None else min(want.rest, 0.5 * tol)


def _take(y: Tensor, b: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    return (y, b) if rows.numel() == y.shape[0] else (y[rows], b if b.shape[0] == 1 else b[rows])


def _rows(bound: ErrorBound, rows: Tensor) -> ErrorBound:
    return ErrorBound(*(v if v.numel() == 1 else v[rows] for v in (bound.estimate, bound.proven)))


def assemble(parts: list[Moments], order: Tensor | None, stack: bool = False) -> Moments:
    """Concatenate (or stack tasks of) moments and undo the grouping by ``order``."""
    k = max([0] + [p.weights.shape[-1] for p in parts if p.weights is not None])
    parts, out = [_padded(p, k) for p in parts], {}
    for f in fields(Moments):
        values = [getattr(p, f.name) for p in parts]
        if all(v is None for v in values):
            continue
        joined = torch.stack(values) if stack else torch.cat(values)
        out[f.name] = joined if order is None else torch.empty_like(joined).index_copy_(0, order, joined)
    return Moments(**out)


def _probe(y: Tensor, b: Tensor, keys: Keys, margin: Tensor) -> tuple[Tensor, Tensor]:
    """A lower bound of the largest logit, and the share of points within ``margin`` of it, from a strided sample."""
    step = max(1, keys.m // PROBE)
    index = torch.arange(0, keys.m, step, device=y.device)
    lg = logits(y, b, keys.gather(index), keys.square[index], keys.log_prior[index])
    floor = lg.amax(-1)
    return floor, (lg >= (floor - margin)[:, None]).sum(-1) / index.numel()


@dataclass(frozen=True)
class Shortlist:
    """Candidates per query, padded: ``index`` and ``real`` ``(n, k)``; ``overflow`` ``(n,)`` marks lists cut off."""

    index: Tensor
    real: Tensor
    overflow: Tensor


def shortlist(y: Tensor, b: Tensor, keys: Keys, dtype: torch.dtype, margin: Tensor, floor: Tensor,
              limit: int) -> Shortlist:  # fmt: skip
    """All points whose logit in ``dtype`` is within ``margin`` of the largest, unless there are more than ``limit``."""
    bound = logit_error(y, b, keys, dtype).proven / (torch.finfo(dtype).eps / 2)
    unit = max(1.0, float(bound.max()) / 1e30)  # one common scale, so that float32 never overflows
    y, b = (y / unit).to(dtype), (b / unit).to(dtype)
    square, log_prior = keys.square.to(dtype), (keys.log_prior / unit).to(dtype)
    margin, highest = (margin / unit)[:, None], (floor / unit)[:, None]
    n, found, count = y.shape[0], [], torch.zeros(y.shape[0], dtype=torch.long, device=y.device)
    buffer = y.new_empty(n * min(KEY_BLOCK, keys.m))
    for j in range(0, keys.m, KEY_BLOCK):
        k = min(KEY_BLOCK, keys.m - j)
        at = slice(j, j + k)
        z = keys.cheap[at] if keys.cheap.dtype == dtype else keys.exact(j, j + k)
        lg = logits(y, b, z, square[at], log_prior[at], buffer[: n * k].view(n, k))
        highest = torch.maximum(highest, lg.amax(-1, keepdim=True).to(highest.dtype))
        least = torch.where(count[:, None] > 4 * limit, torch.inf, highest - margin)
        row, col = (lg >= least.to(dtype)).nonzero(as_tuple=True)
        if row.numel():
            found.append((row, col + j, lg[row, col]))
            count += torch.bincount(row, minlength=n)
    if not found:  # nothing is above NaN
        empty = torch.zeros(0, 1, dtype=torch.long, device=y.device)
        return Shortlist(empty, empty.bool(), torch.ones_like(count, dtype=torch.bool))
    return _pad_lists(found, highest - margin, limit, count > 4 * limit)


def _pad_lists(found: list[tuple[Tensor, Tensor, Tensor]], least: Tensor, limit: int, cut: Tensor) -> Shortlist:
    """Drop what the final maximum excludes and lay the lists out as a padded matrix."""
    row, col, value = (torch.cat(parts) for parts in zip(*found, strict=True))
    keep = value >= least.squeeze(-1).to(value.dtype)[row]
    count = torch.bincount(row[keep], minlength=least.shape[0])
    overflow = cut | (count > limit) | (count == 0)
    keep &= ~overflow[row]
    rank = torch.cumsum(~overflow, 0) - 1
    row, order = torch.sort(rank[row[keep]], stable=True)
    count = count[~overflow]
    if not count.numel():
        empty = torch.zeros(0, 1, dtype=torch.long, device=row.device)
        return Shortlist(empty, empty.bool(), overflow)
    start = torch.cumsum(count, 0) - count
    place = torch.arange(row.numel(), device=row.device) - start[row]
    index = torch.zeros(count.numel(), int(count.max()), dtype=torch.long, device=row.device)
    real = torch.zeros_like(index, dtype=torch.bool)
    index[row, place], real[row, place] = col[keep][order], True
    return Shortlist(index, real, overflow)


def direct_logits(y: Tensor, b: Tensor, z: Tensor, anchor: Tensor, log_prior: Tensor) -> tuple[Tensor, ...]:
    """Logits of ``z`` ``(n, k, d)`` by differences from one point z_0, ``anchor`` ``(n, d)``:

        l_i - l_0 = log pi_i + delta . (b e - b delta / 2),    delta = z_i - z_0,    e = y / b - z_0.

    Nothing large cancels: near the support e is small, far from it delta is. Returns ``(n, k)`` logits, l_0 ``(n,)``,
    and a proven bound of each logit's error, ``(n, k)``.
    """
    pull, delta, wide = y - b * anchor, z - anchor[..., None, :], b[..., None, :]
    half = pull[..., None, :] - 0.5 * wide * delta
    lg = log_prior + (delta * half).sum(-1)
    far, across = (delta.square() * wide).sum(-1).sqrt(), (half.square() / wide).sum(-1).sqrt()  # in the norm of b
    size = 4.0 * far * ((pull.square() / b).sum(-1).sqrt()[..., None] + far) + (y.shape[-1] + 8.0) * far * across
    constant = (anchor * (y - 0.5 * b * anchor)).sum(-1)
    return lg, constant, 0.5 * torch.finfo(y.dtype).eps * size


def _listed(y: Tensor, b: Tensor, z: Tensor, anchor: Tensor, log_prior: Tensor, index: Tensor, real: Tensor,
            want: Want) -> tuple[Partial, Tensor]:  # fmt: skip
    """Partial sums over one list per query by differences, and their error; padding is zeroed, not only its logits."""
    lg, constant, size = direct_logits(y, b, z, anchor, log_prior)
    lg = lg.masked_fill(~real, -torch.inf)
    maximum = lg.amax(-1, keepdim=True)
    error = size.masked_fill(~real | (lg < maximum + CLAMP), 0.0).amax(-1)
    e = torch.exp(lg - maximum).masked_fill(~real, 0.0)
    k = min(want.top, e.shape[-1])
    top, order = (lg + constant[:, None]).topk(k, -1) if k else (None, None)
    f = z.square() if b.shape[-1] > 1 else z.square().sum(-1, keepdim=True)
    return Partial(
        maximum + constant[:, None],
        e.sum(-1, keepdim=True),
        first=torch.bmm(e[:, None], z).squeeze(1) if want.mean else None,
        square=torch.bmm(e[:, None], f).squeeze(1) if want.square else None,
        prior=(e * log_prior.masked_fill(~real, 0.0)).sum(-1, keepdim=True) if want.prior else None,
        mass2=e.square().sum(-1, keepdim=True) if want.mass2 else None,
        top=top, index=None if order is None else index.gather(-1, order), keep=want.top,
    ), error  # fmt: skip


def rescored(y: Tensor, b: Tensor, keys: Keys, want: Want, found: Shortlist, tol: float) -> Moments:
    """Exact moments over the lists of :func:`shortlist`, blocks of queries of similar length at a time."""
    # rows that overflowed are gone from y and from the lists alike
    length = found.real.sum(-1)
    order = torch.argsort(length)
    parts, i = [], 0
    while i < order.numel():
        j = i + 1  # grow the block while its padded differences fit
        while j < order.numel() and (j + 1 - i) * int(length[order[j]]) * y.shape[-1] <= PAIRS:
            j += 1
        rows = order[i:j]
        k = int(length[rows[-1]])
        index, real = found.index[rows, :k], found.real[rows, :k]
        yr, br = y[rows], b if b.shape[0] == 1 else b[rows]
        z = keys.gather(index)
        sums, error = _listed(yr, br, z, z[:, 0], keys.log_prior[index], index, real, want)
        parts.append(
            replace(finish(sums), error=error + _rest(want, tol), proven=torch.ones_like(error, dtype=torch.bool))
        )
        i = j
    return assemble(parts, order)


def _product(y: Tensor, b: Tensor, keys: Keys, want: Want, tol: float) -> Moments:
    """Float64 logits; values in the cheap dtype unless the bandwidth is so small that x - alpha D would show it."""
    wide, d = keys.work, y.shape[-1]
    block = min(KEY_BLOCK, max(256, CONVERTED // d))
    reach = float(b.amax().sqrt() * keys.radius) / math.sqrt(d)
    values = keys.cheap.dtype if reach < (20.0 if want.square else 80.0) and not want.prior else wide
    return _labelled(
        finish(stream(y, b, keys, want, wide, values, key_block=block)),
        logit_error(y, b, keys, wide), tol, _rounding(values, keys.m),
    )  # fmt: skip


def _differences(y: Tensor, b: Tensor, keys: Keys, want: Want, tol: float) -> Moments:
    """Where even float64 products cancel: direct differences over the whole list, however long."""
    margin = 2.0 * logit_error(y, b, keys, keys.work).proven.expand(y.shape[0]) + math.log(keys.m / _rest(want, tol))
    floor, _ = _probe(y, b, keys, margin)
    found = shortlist(y, b, keys, keys.work, margin, floor, keys.m)
    parts = [
        _direct_all(y[i : i + 1], b if b.shape[0] == 1 else b[i : i + 1], keys, want, found.index[i][found.real[i]])
        for i in range(y.shape[0])
    ]
    moments = assemble(parts, None)
    assert moments.error is not None
    return replace(moments, error=moments.error + _rest(want, tol))


def _direct_all(y: Tensor, b: Tensor, keys: Keys, want: Want, index: Tensor | None = None) -> Moments:
    """Differences of every query to every point (or to ``index``), tasks one by one, memory bounded."""
    if y.ndim == 3:
        return one_by_one(y, b, keys, lambda yi, bi, ki: _direct_all(yi, bi, ki, want))
    index = torch.arange(keys.m, device=y.device) if index is None else index
    start = finish(stream(y, b, keys, Want(mean=False, top=1), keys.work, keys.work)).index
    assert start is not None
    anchor, n = keys.gather(start[:, 0]), y.shape[0]
    step = max(1, PAIRS // (y.shape[-1] * max(1, n)))
    total, worst = None, y.new_zeros(n)
    for j in range(0, index.numel(), step):
        at = index[j : j + step]
        z, wide = keys.gather(at)[None].expand(n, -1, -1), at[None].expand(n, -1)
        part, error = _listed(y, b, z, anchor, keys.log_prior[at][None], wide, torch.ones_like(wide).bool(), want)
        total, worst = part if total is None else merge(total, part), torch.maximum(worst, error)
    assert total is not None
    return replace(finish(total), error=worst, proven=torch.ones_like(worst, dtype=torch.bool))
