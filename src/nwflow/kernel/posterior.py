r"""The streaming pass: log-sum-exp and moments of kernel weights, over blocks of queries and of support.

Mathematics (time runs from t = 0, noise, to t = 1, data; it enters here only through ``y`` and ``b``).
In centred coordinates z_i = scale (s_i - shift) the log-weights of a query are, up to a term that does not depend on i,

    l_i = y . z_i - 1/2 b . f_i + log pi_i ,     f_i = |z_i|^2  (one b)   or   z_i^2 elementwise  (d of them),

with the natural parameters y = alpha x' / v and b = alpha^2 / v, where x' = scale (x - alpha shift) and v is the noise
variance in these coordinates. At alpha = 0 both vanish and the weights are the prior: nothing is singular there.
One pass keeps per query the maximum M and, relative to it, the partial sums

    mass = sum e_i,   first = sum e_i z_i,   square = sum e_i f_i,   prior = sum e_i log pi_i,   mass2 = sum e_i^2,

e_i = exp(max(l_i - M, -50)). Two partial results over disjoint parts of a support combine by :func:`merge`, which is
associative: blocks, processes and machines are the same operation. The online maximum is that of Milakov and
Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867.

Logits are clamped at -50 below the maximum since exp of numbers below about -87 is ten times slower on CPUs; what the
clamp adds is below m exp(-50) = 2e-22 m of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

QUERY_BLOCK = 256
KEY_BLOCK = 1024
CLAMP = -50.0
LIFTED = 256  # wider products dominate a pass, which the fused kernel does not shorten (1.0x at 512, 1.07x at 768)
NARROW = 32  # products with fewer columns may be summed one term after another by BLAS: float64 there unless fast


@dataclass(frozen=True)
class Keys:
    """A support as the engine reads it: ``z = scale * (points - shift)``, whole tasks first where there are tasks.

    ``points`` is ``(*T, m, d)`` in its own dtype and is never rounded; ``cheap`` is one cached centred copy in the
    compute dtype (the only memory that grows with m); ``square`` is |z|^2 and ``log_prior`` log pi, both ``(*T, m)`` in
    the working dtype (float64 where the device has it); ``valid`` is ``(*T, m)``, or None when every point counts.
    ``lifted`` is [z, -|z|^2 / 2, log pi] in the compute dtype up to LIFTED columns, and then ``cheap`` is a view of it:
    keys of the fused kernel.
    ``radius`` is the largest |z| of each task, ``(*T,)``.
    """

    points: Tensor
    shift: Tensor
    scale: Tensor
    cheap: Tensor
    square: Tensor
    log_prior: Tensor
    valid: Tensor | None
    radius: Tensor
    prior_spread: Tensor
    lifted: Tensor | None = None

    @property
    def m(self) -> int:
        return self.points.shape[-2]

    @property
    def work(self) -> torch.dtype:
        return self.square.dtype

    def exact(self, start: int, stop: int) -> Tensor:
        """Rows ``start:stop`` of z in the working dtype, formed from the points as given."""
        return centred(self.points[..., start:stop, :], self.shift, self.scale)

    def gather(self, index: Tensor) -> Tensor:
        """z at ``index`` (any shape, single set only) in the working dtype: ``(*index.shape, d)``."""
        rows = self.points.index_select(0, index.reshape(-1))
        return centred(rows, self.shift, self.scale).view(*index.shape, -1)

    def task(self, i: int) -> Keys:
        """Task ``i`` alone, its masked points left out."""
        keep = slice(None) if self.valid is None else self.valid[i].nonzero().squeeze(-1)
        shift, scale = (v if v.ndim < 3 else v[min(i, v.shape[0] - 1), 0] for v in (self.shift, self.scale))
        parts = {k: getattr(self, k)[i][keep] for k in ("points", "square", "log_prior")}
        parts |= {k: getattr(self, k)[i] for k in ("radius", "prior_spread")}
        if self.lifted is None:
            parts["cheap"] = self.cheap[i][keep]
        else:
            lifted = self.lifted[i][keep]
            parts |= {"lifted": lifted, "cheap": lifted[:, :-2]}
        return replace(self, shift=shift, scale=scale, valid=None, **parts)


def centred(points: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """``scale * (points - shift)`` in the dtype of ``shift``; the difference is formed before anything is rounded."""
    return points.to(shift.dtype).sub(shift).mul_(scale)


def prepare(points: Tensor, shift: Tensor, scale: Tensor, log_prior: Tensor, compute: torch.dtype) -> Keys:
    """Build :class:`Keys` block by block: the cached centred copy, norms, and which points count."""
    valid = log_prior > -torch.inf
    every = bool(valid.all())
    d = points.shape[-1]
    copy = torch.empty(*points.shape[:-1], d + 2 if d <= LIFTED else d, dtype=compute, device=points.device)
    cheap = copy[..., :d]
    square = torch.empty(points.shape[:-1], dtype=shift.dtype, device=points.device)
    lead = points.shape[:-2].numel()
    step = max(1, 2**22 // max(1, points.shape[-1] * lead))
    for j in range(0, points.shape[-2], step):
        z = centred(points[..., j : j + step, :], shift, scale)
        if not every:
            z.masked_fill_(~valid[..., j : j + step, None], 0.0)
        cheap[..., j : j + step, :] = z
        torch.sum(z.square_(), -1, out=square[..., j : j + step])
    real = log_prior.masked_fill(~valid, 0.0)
    if d <= LIFTED:
        copy[..., d], copy[..., d + 1] = -0.5 * square, log_prior
    return Keys(
        points, shift, scale, cheap, square, log_prior, None if every else valid,
        radius=square.amax(-1).sqrt(), prior_spread=real.abs().amax(-1), lifted=copy if d <= LIFTED else None,
    )  # fmt: skip


@dataclass(frozen=True)
class Want:
    """Which moments a pass returns beside the log-normaliser and the mean.

    ``square``: E[f]; ``prior``: E[log pi]; ``mass2``: sum w^2; ``top``: the k largest weights; ``mean`` off saves the
    second product. With ``share`` and ``top`` = 1 the largest weight is still that, but it has an index only where it
    exceeds ``share`` (at least 1/2), else -1: a pass then keeps no indices, which would cost as much as exponentials.
    ``rest``: the largest weight that a short list may leave out; half the tolerance when None.
    """

    mean: bool = True
    square: bool = False
    prior: bool = False
    mass2: bool = False
    top: int = 0
    share: float = 0.0
    rest: float | None = None


@dataclass(frozen=True)
class Partial:
    """Sums over a part of the support, relative to ``maximum``; all ``(*T, n, k)`` with k = 1, d or the top k.

    ``keep`` is how many of the largest to keep in a merge; a part smaller than that has fewer.
    """

    maximum: Tensor
    mass: Tensor
    first: Tensor | None = None
    square: Tensor | None = None
    prior: Tensor | None = None
    mass2: Tensor | None = None
    top: Tensor | None = None
    index: Tensor | None = None
    keep: int = 0

    def rescaled(self, maximum: Tensor) -> Partial:
        """The same sums relative to a larger ``maximum``."""
        c = torch.exp(self.maximum - maximum)
        c = torch.where(self.maximum == maximum, 1.0, c)
        scaled = {k: None if (v := getattr(self, k)) is None else v * c for k in ("mass", "first", "square", "prior")}
        return replace(self, maximum=maximum, mass2=None if self.mass2 is None else self.mass2 * c * c, **scaled)


def merge(a: Partial, b: Partial) -> Partial:
    """Combine the sums of two disjoint parts of a support (associative and commutative up to rounding)."""
    maximum = torch.maximum(a.maximum, b.maximum)
    a, b = a.rescaled(maximum), b.rescaled(maximum)
    out = {}
    for name in ("mass", "first", "square", "prior", "mass2"):
        u, v = getattr(a, name), getattr(b, name)
        out[name] = None if u is None else u + v
    if a.top is not None:
        assert a.index is not None and b.top is not None and b.index is not None
        k = max(a.keep, b.keep)
        both, index = torch.cat([a.top, b.top], -1), torch.cat([a.index, b.index], -1)
        out["top"], order = both.topk(min(k, both.shape[-1]), -1)
        out["index"] = index.gather(-1, order)
    return Partial(maximum, **out, keep=max(a.keep, b.keep))


@dataclass(frozen=True)
class Moments:
    """Normalised moments per query, in engine coordinates: what a pass means.

    ``lse`` ``(*T, n)`` log sum exp l; ``mean`` ``(*T, n, d)``; ``square`` E[f] ``(*T, n, r)``; ``prior`` E[log pi],
    ``n_eff`` and the error fields ``(*T, n)``; ``weights`` and ``index`` ``(*T, n, k)``.
    """

    lse: Tensor
    mean: Tensor | None = None
    square: Tensor | None = None
    prior: Tensor | None = None
    n_eff: Tensor | None = None
    weights: Tensor | None = None
    index: Tensor | None = None
    error: Tensor | None = None
    proven: Tensor | None = None


def stacked(moments: Moments) -> Moments:
    """Moments of one set as those of a stack of one task."""
    given = {f.name: getattr(moments, f.name) for f in fields(Moments)}
    return replace(moments, **{k: v[None] for k, v in given.items() if v is not None})


def finish(p: Partial) -> Moments:
    """Normalise partial sums."""
    lse = (p.maximum + p.mass.log()).squeeze(-1)
    return Moments(
        lse,
        mean=None if p.first is None else p.first / p.mass,
        square=None if p.square is None else p.square / p.mass,
        prior=None if p.prior is None else (p.prior / p.mass).squeeze(-1),
        n_eff=None if p.mass2 is None else (p.mass * p.mass / p.mass2).squeeze(-1),
        weights=None if p.top is None else torch.exp(p.top - lse[..., None]),
        index=p.index,
    )


@contextmanager
def full_precision() -> Iterator[None]:
    """Switch reduced-precision products (TF32 on CUDA, bfloat16 on CPUs) off for the length of a pass."""
    before = torch.get_float32_matmul_precision()
    if before != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if before != "highest":
            torch.set_float32_matmul_precision(before)


def add_products(out: Tensor, bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``out = bias + a @ b`` for matrices or stacks of them."""
    return (torch.addmm if a.ndim == 2 else torch.baddbmm)(bias, a, b, out=out)


def logits(y: Tensor, b: Tensor, z: Tensor, square: Tensor, log_prior: Tensor, out: Tensor | None = None) -> Tensor:
    """l = y . z - b . f / 2 + log pi for one block, ``(*T, n, B)``; all in the dtype of ``y``."""
    if out is None:
        out = y.new_empty(*y.shape[:-1], z.shape[-2])
    if b.shape[-1] == 1 and b.shape[-2] == 1:
        bias = torch.addcmul(log_prior[..., None, :], b, square[..., None, :], value=-0.5)
        return add_products(out, bias, y, z.mT)
    f = square[..., None] if b.shape[-1] == 1 else z.square()
    bias = log_prior[..., None, :]
    if b.shape[-2] == 1:
        return add_products(out, bias - 0.5 * (b @ f.mT), y, z.mT)
    add_products(out, bias, y, z.mT)
    return out.addmm_(b, f.mT, alpha=-0.5) if out.ndim == 2 else out.baddbmm_(b, f.mT, alpha=-0.5)


def stream(y: Tensor, b: Tensor, keys: Keys, want: Want, dtype: torch.dtype, values: torch.dtype, *,
           fast: bool = False, key_block: int = KEY_BLOCK, query_block: int = QUERY_BLOCK) -> Partial:  # fmt: skip
    """The pass. ``y`` ``(*T, n, d)``, ``b`` ``(*T, n or 1, 1 or d)`` in the working dtype.

    ``dtype`` is that of logits, ``values`` that of the second product, whose blocks are summed in the working dtype
    unless ``fast``; memory beyond inputs and outputs is one block of each, whatever n and m are.
    """
    n = y.shape[-2]
    if n == 0:
        return _block_rows(y, b, keys, want, dtype, values, fast, key_block)
    parts = []
    for i in range(0, n, query_block):
        rows = slice(i, i + query_block)
        bi = b if b.shape[-2] == 1 else b[..., rows, :]
        parts.append(_block_rows(y[..., rows, :], bi, keys, want, dtype, values, fast, key_block))
    if len(parts) == 1:
        return parts[0]
    names = [f.name for f in fields(Partial) if isinstance(getattr(parts[0], f.name), Tensor)]
    return replace(parts[0], **{k: torch.cat([getattr(p, k) for p in parts], -2) for k in names})


def _block_rows(y: Tensor, b: Tensor, keys: Keys, want: Want, dtype: torch.dtype, values: torch.dtype,
                fast: bool, key_block: int) -> Partial:  # fmt: skip
    """One block of queries against all keys, block after block, sums kept in place."""
    shape, wide = y.shape[:-1], keys.work
    y, b = y.to(dtype), b.to(dtype)
    log_prior, square = keys.log_prior.to(dtype), keys.square.to(dtype)
    maximum = y.new_full((*shape, 1), -torch.inf)
    mass, mass2, prior = (torch.zeros(*shape, 1, dtype=wide, device=y.device) for _ in range(3))
    r, narrow = b.shape[-1], y.shape[-1] < NARROW
    total = torch.zeros(y.shape, dtype=values if fast and not narrow else wide, device=y.device)
    second = torch.zeros(*shape, r, dtype=wide, device=y.device)
    top: Tensor | None = None
    index: Tensor | None = None
    found_at = torch.zeros(*shape, 1, dtype=torch.long, device=y.device)
    buffer = y.new_empty(shape.numel() * min(key_block, keys.m))
    sparse = not narrow and keys.cheap.dtype == dtype == values and y.ndim == 2 and y.device.type == "cpu"
    least = math.log(torch.finfo(dtype).eps / (2 * keys.m))  # all weights below e^least together are half an ulp
    for j in range(0, keys.m, key_block):
        k = min(key_block, keys.m - j)
        at: slice | Tensor = slice(j, j + k)
        z = keys.cheap[..., at, :] if keys.cheap.dtype == dtype else keys.exact(j, j + k)
        lg = logits(y, b, z, square[..., at], log_prior[..., at], buffer[: shape.numel() * k].view(*shape, k))
        if want.top and not want.share:
            top, index = _keep_top(top, index, lg, j, want.top)
        higher = torch.maximum(maximum, lg.amax(-1, keepdim=True))
        if want.share:
            found_at.masked_fill_(higher > maximum, j)
        c = torch.exp(maximum - higher)
        maximum = higher
        lg.sub_(maximum)
        if sparse and (near := _near(lg, least)) is not None:
            if not near.numel():
                continue  # no maximum rose here
            at, lg = near + j, lg[:, near]
            z = keys.cheap[at]
        e = lg.clamp_(min=CLAMP).to(values).exp_()
        if keys.valid is not None:
            e.mul_(keys.valid[..., None, at])
        mass.mul_(c).add_(e.sum(-1, keepdim=True))
        v = z if z.dtype == values else keys.cheap[..., at, :] if keys.cheap.dtype == values else keys.exact(j, j + k)
        if want.mean:
            _accumulate(total, c, e.to(wide) if narrow and not fast else e, v, narrow)
        if want.square and r > 1:
            second.mul_(c).add_(e @ v.square())
        elif want.square:
            second.mul_(c).add_(e.to(wide) @ keys.square[..., at, None])
        if want.prior:
            lp = keys.log_prior[..., at, None]
            lp = lp if keys.valid is None else lp.masked_fill(lp == -torch.inf, 0.0)
            prior.mul_(c).add_(e.to(wide) @ lp)
        if want.mass2:
            mass2.mul_(c * c).add_(torch.linalg.vector_norm(e, dim=-1, keepdim=True).square_())
    if want.share:
        top, index = maximum, _leaders(y, b, keys, found_at, mass < 1.0 / want.share, key_block)
    return Partial(
        maximum.to(wide), mass, total.to(wide) if want.mean else None, second if want.square else None,
        prior if want.prior else None, mass2 if want.mass2 else None,
        None if top is None else top.to(wide), index, keep=want.top,
    )  # fmt: skip


def _near(lg: Tensor, least: float) -> Tensor | None:
    """Columns of a block in which any query has a logit above ``least``; None where they are not few.

    After collapse these are a handful, and the second product of the others adds nothing.
    """
    near = (~(lg.amax(-2) <= least)).nonzero().squeeze(-1)  # NaN stays
    return near if near.numel() <= lg.shape[-1] // 4 else None


def _accumulate(total: Tensor, c: Tensor, e: Tensor, v: Tensor, narrow: bool) -> None:
    """total = c total + e @ v, in place; a narrower product is added to a wider total."""
    total.mul_(c)
    if narrow:  # rows of v^T side by side: a product of few columns is ten times faster so
        total.add_(e @ v.to(e.dtype).mT.contiguous().mT)
    elif total.dtype != e.dtype:
        total.add_(e @ v)
    elif total.ndim == 2:
        total.addmm_(e, v)
    else:
        total.baddbmm_(e, v)


def _leaders(y: Tensor, b: Tensor, keys: Keys, found_at: Tensor, sure: Tensor, key_block: int) -> Tensor:
    """Index of the largest logit, which lies in the block that starts at ``found_at``, where ``sure``; else -1.

    All are ``(*T, n, 1)``. Rows that are sure are few before collapse, and after it each needs one block.
    """
    index = torch.full_like(found_at, -1)
    for j in found_at[sure].unique().tolist():
        mine, at = (sure & (found_at == j)).squeeze(-1), slice(j, min(j + key_block, keys.m))
        z = keys.cheap[..., at, :] if keys.cheap.dtype == y.dtype else keys.exact(j, at.stop)
        square, log_prior = keys.square[..., at].to(y.dtype), keys.log_prior[..., at].to(y.dtype)
        if y.ndim == 2:
            yj, bj = y[mine], b if b.shape[0] == 1 else b[mine]
            index[mine] = logits(yj, bj, z, square, log_prior).argmax(-1, keepdim=True) + j
        else:
            index = torch.where(mine[..., None], logits(y, b, z, square, log_prior).argmax(-1, keepdim=True) + j, index)
    return index


def _keep_top(top: Tensor | None, index: Tensor | None, lg: Tensor, offset: int, k: int) -> tuple[Tensor, Tensor]:
    """Merge the k largest logits so far with those of a block."""
    values, order = lg.topk(min(k, lg.shape[-1]), -1)
    order = order + offset
    if top is None or index is None:
        return values, order
    both, which = torch.cat([top, values], -1).topk(min(k, top.shape[-1] + values.shape[-1]), -1)
    return both, torch.cat([index, order], -1).gather(-1, which)
