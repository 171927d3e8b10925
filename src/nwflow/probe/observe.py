r"""From what a model computes to the record of it: arguments and output of an attention in, a :class:`Call` out.

Nothing here runs before the model has its output, and nothing writes into what it was given. Projections of
``nn.MultiheadAttention`` are computed anew for the queries that are kept: q = W_q x + b_q and so on, and the check is
that sum_h W_o,h (a_h v_h) + b_o is what the module returned.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nwflow.attention.projections import Projections, of_multihead, projections
from nwflow.probe.call import Call
from nwflow.probe.weights import attention_weights

__all__ = ["of_encoder_layer", "of_multihead_function", "of_multihead_module", "of_sdpa"]

Pick = Callable[[str, int, int], Tensor | None]
"""(layer, number of queries, of keys) to the numbers of the queries that are kept, None for all."""


def of_sdpa(layer: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor, heads: int | None) -> Call:
    """One ``scaled_dot_product_attention``; ``heads``: those of the module, for inputs ``(B heads, n, d)``.

    Keys that carry -|k|^2 / 2 in a further column, the lift by which Gaussian logits become products, are recognised:
    the record is then of that Gaussian kernel, in units of its bandwidth.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    q, k, v = given["query"], given["key"], given["value"]
    if q.is_nested or k.is_nested:
        raise ValueError("nested tensors are not recorded")
    mask = given.get("attn_mask")
    if given.get("enable_gqa"):
        k, v = (u.repeat_interleave(q.shape[-3] // u.shape[-3], -3) for u in (k, v))
    lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q, k, v, out = (_four(u.expand(*lead, *u.shape[-2:]), heads) for u in (q, k, v, output))
    if mask is not None:
        mask = _four_mask(mask, lead, heads)
    is_bool = mask is not None and mask.dtype == torch.bool
    call = Call(
        layer,
        q,
        k,
        v,
        scale=given.get("scale"),
        mask=mask if is_bool else None,
        bias=None if is_bool else mask,
        causal=bool(given.get("is_causal", False)),
        output=out,
        dropout=float(given.get("dropout_p") or 0.0) > 0.0,
    )
    return _without_lift(call)


def _four(u: Tensor, heads: int | None) -> Tensor:
    """``(B, H, n, d)``: three axes are a batch of ``heads`` where that divides it, else one head each."""
    if u.ndim == 3 and heads and u.shape[0] % heads == 0:
        return u.unflatten(0, (-1, heads))
    if u.ndim < 4:
        return u[(None,) * (4 - u.ndim)] if u.ndim == 2 else u[:, None]
    return u.flatten(0, u.ndim - 4)


def _four_mask(mask: Tensor, lead: tuple[int, ...], heads: int | None) -> Tensor:
    mask = mask[(None,) * max(0, 2 - mask.ndim)]
    if mask.ndim == 2 or all(size == 1 for size in mask.shape[:-2]):
        return mask.reshape(1, 1, *mask.shape[-2:])
    if len(lead) == 2 and mask.ndim == 4:
        return mask
    return _four(mask.expand(*lead, *mask.shape[-2:]), heads)


def _without_lift(call: Call) -> Call:
    """Gaussian logits as such: q = [c q', c, 0..], k = [k', -|k'|^2 / 2, 0..] gives -s c |q' - k'|^2 / 2 + const."""
    q, k = call.q[0, :, :4], call.k[0, :, :4]
    used = (q.abs().sum((0, 1)) + k.abs().sum((0, 1)) > 0).nonzero()
    if call.bias is not None or not len(used) or (j := int(used[-1])) < 1:
        return call
    half, c = -0.5 * k[..., :j].square().sum(-1), q[..., j]
    close = torch.allclose(k[..., j], half, rtol=1e-3, atol=1e-3 * float(half.abs().amax()) + 1e-12)
    if not close or not bool((half < 0).any()) or not bool((c > 0).all() & (c == c[:, :1]).all()):
        return call
    width = call.q[..., j : j + 1]
    return replace(
        call,
        q=call.q[..., :j] / width.sqrt(),
        k=call.k[..., :j] * width[:, :, :1].sqrt(),
        scale=call.logit_scale,
        kernel="gaussian",
    )


# ------------------------------------------------------------------------------------------------ MultiheadAttention


@cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def of_multihead_module(
    layer: str, module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, pick: Pick
) -> Call:
    """One call of ``nn.MultiheadAttention``, by its fused path or not."""
    given = _signature(nn.MultiheadAttention.forward).bind(module, *args, **kwargs)
    given.apply_defaults()
    a = given.arguments
    q, k, v, out = a["query"], a["key"], a["value"], output[0]
    inputs = [_padded(u) for u in (q, k, v)]
    if q.dim() == 2:
        inputs, out = [u[None] for u in inputs], out[None]
    elif not module.batch_first:
        inputs, out = [u.transpose(0, 1) for u in inputs], out.transpose(0, 1)
    lengths = _lengths(k)
    padding = a["key_padding_mask"] if lengths is None else lengths
    if padding is not None and q.dim() == 2:
        padding = padding[None]
    dropout = module.training and module.dropout > 0.0
    weights = output[1] if output[1] is None or q.dim() == 3 else output[1][None]
    return _multihead(layer, projections(module), inputs, a["attn_mask"], padding, _padded(out), weights, dropout, pick)


def of_multihead_function(
    layer: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, pick: Pick
) -> Call:
    """One call of ``torch.nn.functional.multi_head_attention_forward`` outside the module."""
    given = _signature(F.multi_head_attention_forward).bind(*args, **kwargs)
    given.apply_defaults()
    a = given.arguments
    if a["static_k"] is not None or a["static_v"] is not None:
        raise ValueError("static keys and values are not recorded")
    maps = of_multihead(
        a["num_heads"],
        None if a["use_separate_proj_weight"] else a["in_proj_weight"],
        (a["q_proj_weight"], a["k_proj_weight"], a["v_proj_weight"]),
        a["in_proj_bias"],
        (a["bias_k"], a["bias_v"]),
        a["add_zero_attn"],
        (a["out_proj_weight"], a["out_proj_bias"]),
    )
    inputs, out = [a[name] for name in ("query", "key", "value")], output[0]
    inputs, out = [u[:, None] if u.dim() == 2 else u for u in inputs], out[:, None] if out.dim() == 2 else out
    inputs, out = [u.transpose(0, 1) for u in inputs], out.transpose(0, 1)
    padding = a["key_padding_mask"]
    padding = padding[None] if padding is not None and padding.dim() == 1 else padding
    dropout = a["training"] and a["dropout_p"] > 0.0
    weights = output[1] if output[1] is None or a["query"].dim() == 3 else output[1][None]
    return _multihead(layer, maps, inputs, a["attn_mask"], padding, out, weights, dropout, pick)


def of_encoder_layer(
    layer: str,
    module: nn.TransformerEncoderLayer,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    output: Tensor,
    pick: Pick,
) -> Call:
    """The self attention inside a fused ``nn.TransformerEncoderLayer``, which never calls its own attention module."""
    given = _signature(nn.TransformerEncoderLayer.forward).bind(module, *args, **kwargs)
    given.apply_defaults()
    a = given.arguments
    x, lengths = _padded(a["src"]), _lengths(a["src"])
    padding = a["src_key_padding_mask"] if lengths is None else lengths
    inside = module.norm1(x) if module.norm_first else x
    rows = pick(layer, x.shape[1], x.shape[1])
    keep: Pick = lambda *_: rows  # noqa: E731
    call = _multihead(
        layer, projections(module.self_attn), [inside] * 3, a["src_mask"], padding, None, None, False, keep
    )
    if lengths is not None:  # what stands behind a sequence's end is no query
        inside_rows = ~lengths[:, None, :, None] if rows is None else ~lengths[:, None, rows, None]
        call = replace(call, mask=inside_rows if call.mask is None else call.mask & inside_rows)
    if rows is not None:
        x, output = x[:, rows], _padded(output)[:, rows]
    mine = _reassembled(projections(module.self_attn), call).to(x.dtype)
    if module.norm_first:
        mine = x + mine
        mine = mine + module._ff_block(module.norm2(mine))
    else:
        mine = module.norm1(x + mine)
        mine = module.norm2(mine + module._ff_block(mine))
    return replace(call, kind="MultiheadAttention", checked=_error(mine, _padded(output), call))


def _multihead(
    layer: str,
    maps: Projections,
    inputs: list[Tensor],
    attn_mask: Tensor | None,
    padding: Tensor | None,
    output: Tensor | None,
    weights: Tensor | None,
    dropout: bool,
    pick: Pick,
) -> Call:
    """From batch-first inputs ``(B, n, e)``; masks are the module's own, whose booleans say where *not* to look."""
    x, y, z = inputs
    n, m = x.shape[1], y.shape[1] + maps.extra
    rows = pick(layer, n, m)
    kept = x if rows is None else x[:, rows]
    mask, bias = _masks(attn_mask, padding, (x.shape[0], maps.num_heads, n, y.shape[1]), maps.extra, rows)
    call = Call(
        layer,
        maps.queries(kept),
        maps.keys(y),
        maps.values(z),
        kind="MultiheadAttention",
        mask=mask,
        bias=bias,
        dropout=dropout,
        references=None if not maps.extra else (*range(y.shape[1]), *(-1,) * maps.extra),
        rows=None if rows is None else tuple(rows.tolist()),
        n_total=n,
    )
    if dropout or output is None:
        return call
    out = output if rows is None else output[:, rows]
    error = _error(_reassembled(maps, call), out, call)
    if weights is not None:
        seen = weights if rows is None else weights[..., rows, :]
        mine = attention_weights(call)
        difference = (seen - (mine if seen.dim() == 4 else mine.mean(1)).to(seen.dtype)).abs()
        error = torch.maximum(error, torch.nan_to_num(difference).amax().to(error.dtype))
    return replace(call, checked=error)


def _masks(
    attn_mask: Tensor | None, padding: Tensor | None, shape: tuple[int, int, int, int], extra: int, rows: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Where to look and finite bias, for both masks of the module; the extra keys are always seen."""
    batch, heads, n, m = shape
    allowed, bias = None, None
    if attn_mask is not None:
        attn_mask = attn_mask.reshape(batch, heads, n, m) if attn_mask.dim() == 3 else attn_mask[None, None]
        attn_mask = attn_mask if rows is None else attn_mask[:, :, rows]
    for mask in (attn_mask, None if padding is None else padding[:, None, None]):
        if mask is None:
            continue
        mask = F.pad(mask, (0, extra)) if extra else mask
        if mask.dtype == torch.bool:
            allowed = ~mask if allowed is None else allowed & ~mask
        else:
            bias = mask if bias is None else bias + mask
    return allowed, bias


def _reassembled(maps: Projections, call: Call) -> Tensor:
    """The layer's output from the record, float64 where there is one."""
    assert call.v is not None
    weights = attention_weights(call)
    return maps.output(weights @ call.v.to(weights.dtype), call.q)


def _error(mine: Tensor, output: Tensor, call: Call) -> Tensor:
    """Largest difference over the largest output; rows without a key have none."""
    output = output.to(mine.dtype)
    error = (mine - output).abs()
    return torch.where(error.isnan(), 0.0, error).amax() / torch.nan_to_num(output).abs().amax().clamp(min=1e-30)


def _padded(u: Tensor) -> Tensor:
    return torch.nested.to_padded_tensor(u, 0.0) if u.is_nested else u


def _lengths(u: Tensor) -> Tensor | None:
    """True where a nested tensor has no token, as ``key_padding_mask`` says it."""
    if not u.is_nested:
        return None
    sizes = torch.tensor([part.shape[0] for part in u.unbind()], device=u.device)
    return torch.arange(int(sizes.max()), device=u.device)[None] >= sizes[:, None]
