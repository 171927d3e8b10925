r"""The streaming pass of many heads that share one set of references.

Head a sees K of the d coordinates of an event, its window V_a, and writes V of them, its cell B_a. In centred
coordinates z_i = s_i - c its log-weights are, up to a term that does not depend on i,

    l_i = y[V_a] . z_i[V_a] - 1/2 b |z_i[V_a]|^2 + log pi_i,     y = alpha (x - alpha c) / v,    b = alpha^2 / v,

with v the variance of the noise (t = 0 noise, t = 1 data): regular at alpha = 0. A window is one row of indices, so a
block of heads is a gather of rows and one batched matrix product, which is faster than sliding sums of squared
differences while K is small (below about a thousand). Everything is float64 (where the device has it): on centred data
the product loses d eps (scale / h)^2, below 1e-8 in the weights down to bandwidths of 1e-3 data scales.

References and heads are taken in blocks with an online maximum for each head and query, as in
:mod:`nwflow.kernel.posterior`. The derivative needs no graph: dl_i = dy . z_i - 1/2 db |z_i|^2 and, for m = sum w v,
dm = sum_i w_i (v_i - m) dl_i, in a second pass over the same blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwflow.kernel.posterior import CLAMP

KEY_BLOCK = 512  # references
QUERY_BLOCK = 64
LOGITS = 2**18  # of one block: three or four tensors of this size stay in the cache
ROWS = 2**20  # elements of the gathered windows
POINTS = 2**22  # elements of the centred references of one block, and of the sums kept for one block of queries


@dataclass(frozen=True)
class Heads:
    """``window`` ``(A, K)`` and ``cell`` ``(A, V)``, long, into the d coordinates (d itself: outside, always 0);
    ``points`` ``(m, d)`` as given, ``centre`` ``(d,)`` and ``log_prior`` ``(m,)`` (finite) in the working dtype."""

    window: Tensor
    cell: Tensor
    points: Tensor
    centre: Tensor
    log_prior: Tensor


@dataclass(frozen=True)
class Block:
    """Some heads and references: ``z`` ``(A, K, B)``, ``square`` |z|^2 ``(A, 1, B)``, ``values`` ``(A, V, B)`` and
    ``logits`` ``(A, n, B)``; ``heads`` and ``points`` say which."""

    heads: slice
    points: slice
    z: Tensor
    square: Tensor
    values: Tensor
    logits: Tensor


def rows_of(v: Tensor) -> Tensor:
    """``(n, d)`` as ``(d + 1, n)``: coordinates in rows, the last one for what lies outside."""
    return torch.nn.functional.pad(v, (0, 1)).mT.contiguous()


def blocks(h: Heads, y: Tensor, b: Tensor) -> Iterator[Block]:
    """All blocks for queries ``y`` ``(n, d)`` and ``b`` ``(n or 1, 1)``, references outermost."""
    (total, k), n, d = h.window.shape, y.shape[0], y.shape[1]
    key_block = max(1, min(KEY_BLOCK, POINTS // (d + 1), ROWS // k))
    head_block = max(1, min(LOGITS // (max(1, n) * key_block), ROWS // (k * key_block)))
    queries = rows_of(y)
    for j in range(0, h.points.shape[0], key_block):
        points = slice(j, min(j + key_block, h.points.shape[0]))
        z = rows_of(h.points[points].to(h.centre.dtype) - h.centre)
        for a in range(0, total, head_block):
            heads = slice(a, min(a + head_block, total))
            seen = z[h.window[heads]]
            square = seen.square().sum(1, keepdim=True)
            bias = torch.addcmul(h.log_prior[points], b, square, value=-0.5)
            logits = torch.baddbmm(bias, queries[h.window[heads]].mT, seen)
            yield Block(heads, points, seen, square, z[h.cell[heads]], logits)


def attend(h: Heads, y: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log sum exp l ``(A, n)``, weighted means of the cells ``(A, n, V)`` in centred coordinates, n_eff ``(A, n)``."""
    total, size = h.cell.shape
    step = max(1, min(QUERY_BLOCK, POINTS // (total * (size + 3))))
    parts = [_attend(h, y[i : i + step], b if b.shape[0] == 1 else b[i : i + step]) for i in range(0, len(y), step)]
    if not parts:
        return y.new_empty(total, 0), y.new_empty(total, 0, size), y.new_empty(total, 0)
    lse, mean, n_eff = (torch.cat(v, 1) for v in zip(*parts, strict=True))
    return lse, mean, n_eff


def _attend(h: Heads, y: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    (total, size), n = h.cell.shape, y.shape[0]
    maximum = y.new_full((total, n, 1), -torch.inf)
    mass, mass2, first = (y.new_zeros(total, n, k) for k in (1, 1, size))
    for block in blocks(h, y, b):
        at, logits = block.heads, block.logits
        higher = torch.maximum(maximum[at], logits.amax(-1, keepdim=True))
        c = torch.exp(maximum[at] - higher)
        maximum[at] = higher
        e = logits.sub_(higher).clamp_(min=CLAMP).exp_()
        mass[at] = mass[at] * c + e.sum(-1, keepdim=True)
        mass2[at] = mass2[at] * c.square() + torch.linalg.vector_norm(e, dim=-1, keepdim=True).square()
        first[at] = first[at] * c + e @ block.values.mT
    return (maximum + mass.log()).squeeze(-1), first / mass, (mass.square() / mass2).squeeze(-1)


def weights(h: Heads, y: Tensor, b: Tensor, lse: Tensor) -> Iterator[tuple[Block, Tensor]]:
    """The blocks again, with their normalised weights ``(A, n, B)``."""
    for block in blocks(h, y, b):
        yield block, block.logits.sub_(lse[block.heads, :, None]).clamp_(min=2 * CLAMP).exp_()


class Mean(torch.autograd.Function):
    """Weighted means ``(A, n, V)`` of the cells, differentiable once in ``y`` ``(n, d)`` and ``b`` ``(n or 1, 1)``."""

    @staticmethod
    def forward(y: Tensor, b: Tensor, h: Heads) -> tuple[Tensor, Tensor, Tensor]:
        lse, mean, n_eff = attend(h, y, b)
        return mean, lse, n_eff

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        y, b, ctx.heads = inputs
        mean, lse, n_eff = output
        ctx.mark_non_differentiable(lse, n_eff)
        ctx.save_for_backward(y, b, mean, lse)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (y, b, mean, lse), h = ctx.saved_tensors, ctx.heads
        grad_y, grad_b = torch.zeros_like(y), torch.zeros_like(b)
        step = QUERY_BLOCK
        for i in range(0, len(y), step):
            rows = slice(i, i + step)
            part = b if b.shape[0] == 1 else b[rows]
            gy, gb = _backward(h, y[rows], part, mean[:, rows], lse[:, rows], grad[:, rows])
            grad_y[rows] = gy
            if b.shape[0] == 1:
                grad_b += gb.sum(0)
            else:
                grad_b[rows] = gb
        return grad_y, grad_b, None


def _backward(h: Heads, y: Tensor, b: Tensor, mean: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients with respect to ``y`` ``(n, d)`` and, for each query, to ``b`` ``(n, 1)``."""
    rows, to_b = y.new_zeros(y.shape[1] + 1, y.shape[0]), y.new_zeros(y.shape[0], 1)
    for block, w in weights(h, y, b, lse):
        g = grad[block.heads]
        c = w * (g @ block.values - (g * mean[block.heads]).sum(-1, keepdim=True))
        window = h.window[block.heads]
        rows.index_add_(0, window.reshape(-1), (block.z @ c.mT).reshape(window.numel(), -1))
        to_b -= 0.5 * (c @ block.square.mT).sum(0)
    return rows[:-1].mT, to_b
