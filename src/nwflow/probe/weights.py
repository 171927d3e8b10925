r"""Recorded attention as weights, beside the kernel's weights on the same queries and keys.

Of a query q with keys k_j, logit scale s and h^2 = 1 / s (sqrt(d) by default),

    a   = softmax(s q . k_j + b_j)                                      what the model computes (b: a bias, if any)
    nw  = softmax(-|q - k_j|^2 / (2 h^2))                               kernel smoothing, equal masses
    nw' = softmax(-|q - k_j|^2 / (2 h^2) + |k_j|^2 / (2 h^2) + b_j)     the same with the masses that make it a

(Smola 2026, arXiv 2605.13386). nw' is formed from distances, a from products: their agreement is the identity. Logits
are formed in float64 where the device has it, whatever the model computes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nwflow.probe.call import Call

__all__ = ["Block", "Weights", "attention_weights", "split_branches", "weigh", "working_dtype"]

SMALLEST_BIAS = -9.9e3  # models write a mask as a bias of -10000 or as the smallest number of a dtype

Block = Sequence[tuple[Call, int]]
"""Heads that are worked on at once, each as (call, head): calls of equal shapes and references."""


@dataclass(frozen=True)
class Weights:
    """Logarithms of weights ``(H, B, n, m)`` over the keys that count, and where they stand.

    ``valid`` ``(H, B, n, m)`` or None for everywhere; ``some`` ``(H, B, n)``: rows with a key; ``distance`` |q - k|^2;
    ``mass`` ``(H, B, n)`` of the reference keys and ``joint`` the weights over all keys, with which values are summed.
    """

    log_a: Tensor
    log_nw: Tensor
    log_prior: Tensor
    distance: Tensor
    valid: Tensor | None
    some: Tensor
    mass: Tensor
    joint: Tensor


def attention_weights(call: Call) -> Tensor:
    """What the call's softmax gives, ``(B, H, n, m)`` in float64 (float32 where there is none); NaN in empty rows."""
    dtype = working_dtype(call.q)
    q, k = call.q.to(dtype), call.k.to(dtype)
    logits = call.logit_scale * (q @ k.mT)
    if call.kernel == "gaussian":
        logits = logits - 0.5 * call.logit_scale * k.square().sum(-1)[..., None, :]
    bias, valid = bias_and_mask(call)
    logits = logits if bias is None else logits + bias
    return torch.softmax(logits if valid is None else logits.masked_fill(~valid, -torch.inf), -1)


def split_branches(call: Call) -> list[tuple[str, Call]]:
    """The call once for each branch of its batch: guidance halves are different inputs and are never averaged."""
    names = call.branches or ("",)
    size = call.q.shape[0] // len(names)
    return [(name, _rows_of_batch(call, slice(i * size, (i + 1) * size))) for i, name in enumerate(names)]


def _rows_of_batch(call: Call, rows: slice) -> Call:
    total, own = call.q.shape[0], {}
    for name in ("q", "k", "v", "mask", "bias", "output"):
        value = getattr(call, name)
        own[name] = value if value is None or value.shape[0] != total else value[rows]
    if call.features is not None:
        own["features"] = tuple(u if u.shape[0] != total else u[rows] for u in call.features)
    return replace(call, **own, branches=None)


def working_dtype(like: Tensor) -> torch.dtype:
    """float64, or float32 on devices without it."""
    return torch.float32 if like.device.type == "mps" else torch.float64


def bias_and_mask(call: Call, rows: slice = slice(None)) -> tuple[Tensor | None, Tensor | None]:
    """Finite bias and validity, broadcastable to ``(B, H, n, m)``."""

    def some(value: Tensor | None) -> Tensor | None:
        return value if value is None or value.shape[2] == 1 else value[:, :, rows]

    bias, valid = some(call.bias), some(call.mask)
    if call.causal:
        n, m = call.q.shape[2], call.k.shape[2]
        below = torch.ones(n, m, dtype=torch.bool, device=call.q.device).tril()[None, None, rows]
        valid = below if valid is None else valid & below
    if bias is not None:
        bias = bias.to(working_dtype(bias))
        allowed = bias > SMALLEST_BIAS
        if not bool(allowed.all()):
            valid, bias = allowed if valid is None else valid & allowed, torch.where(allowed, bias, 0.0)
    return bias, valid


def weigh(block: Block, rows: slice = slice(None)) -> Weights:
    """The three kinds of weights of a block of heads, over reference keys alone, and the mass of those."""
    dtype, first = working_dtype(block[0][0].q), block[0][0]
    q = torch.stack([c.q[:, h, rows] for c, h in block]).to(dtype)
    k = torch.stack([c.k[:, h] for c, h in block]).to(dtype)
    scale = torch.tensor([c.logit_scale for c, _ in block], dtype=dtype, device=q.device)[:, None, None, None]
    bias, valid = _common(block, rows, (len(block), *q.shape[1:-1], k.shape[2]))
    if valid is not None:  # what stands in padding moves no centre, NaN included
        k = torch.where(valid.any(-2)[..., None], k, 0.0)
    distance = _distances(q, k)
    near = -0.5 * scale * distance
    if first.kernel == "gaussian":
        logits = prior = near
    else:
        logits, prior = scale * (q @ k.mT), near + 0.5 * scale * k.square().sum(-1)[:, :, None]
    logits, prior = (u if bias is None else u + bias for u in (logits, prior))
    return _over_references(logits, near, prior, distance, valid, first.references)


def _distances(q: Tensor, k: Tensor) -> Tensor:
    """|q - k|^2 about the keys' mean."""
    centre = k.mean(-2, keepdim=True)
    y, z = q - centre, k - centre
    squares = y.square().sum(-1, keepdim=True) - 2.0 * (y @ z.mT) + z.square().sum(-1)[..., None, :]
    return squares.clamp(min=0.0)


def _over_references(
    logits: Tensor, near: Tensor, prior: Tensor, distance: Tensor, valid: Tensor | None, references: Any
) -> Weights:
    some = torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device) if valid is None else valid.any(-1)
    joint = torch.log_softmax(_hidden(logits, valid, some), -1).masked_fill(~some[..., None], -torch.inf)
    mass = some.to(logits.dtype)
    if references is not None and min(references) < 0:
        keep = torch.tensor([j for j, r in enumerate(references) if r >= 0], device=logits.device)
        logits, near, prior, distance = (u.index_select(-1, keep) for u in (logits, near, prior, distance))
        valid = None if valid is None else valid.index_select(-1, keep)
        some = some if valid is None else valid.any(-1)
        mass = joint.index_select(-1, keep).exp().sum(-1) * some
    log_a, log_nw, log_prior = (torch.log_softmax(_hidden(u, valid, some), -1) for u in (logits, near, prior))
    return Weights(log_a, log_nw, log_prior, distance, valid, some, mass, joint)


def _common(block: Block, rows: slice, shape: tuple[int, ...]) -> tuple[Tensor | None, Tensor | None]:
    """Bias and validity of all heads of the block, ``(H, B, n, m)`` each, or None where no head has one."""
    seen = {id(c): bias_and_mask(c, rows) for c, _ in block}
    pairs = [seen[id(c)] for c, _ in block]
    bias = _gather([p[0] for p in pairs], block, shape, 0.0)
    valid = _gather([p[1] for p in pairs], block, shape, True)
    return bias, valid


def _gather(values: list[Tensor | None], block: Block, shape: tuple[int, ...], empty: Any) -> Tensor | None:
    """``(H, B, n, m)`` of what every head has; ``empty`` for heads without."""
    if all(v is None for v in values):
        return None
    full = []
    for value, (call, head) in zip(values, block, strict=True):
        if value is None:
            kind = torch.bool if empty is True else working_dtype(call.q)
            value = torch.full((1, 1, 1, 1), empty, dtype=kind, device=call.q.device)
        full.append(value[:, head if value.shape[1] > 1 else 0].expand(shape[1:]))
    return torch.stack(full)


def _hidden(logits: Tensor, valid: Tensor | None, some: Tensor | None = None) -> Tensor:
    """Logits with -inf where a query may not look; rows without a key stay finite, and are left out later."""
    if valid is None:
        return logits
    hidden = logits.masked_fill(~valid, -torch.inf)
    return hidden if some is None else torch.where(some[..., None], hidden, 0.0)
