r"""A multi-head attention module as H triples of linear maps: the one form that recording and decomposition share.

Of head i: q = W_q x + b_q, k = W_k y + b_k, v = W_v z + b_v (norms of q and k included), weights softmax(scale q . k),
and its part of the output is W_o,i (a v); the layer's output is the sum over heads plus b_o. Known are
``nn.MultiheadAttention``, :class:`~nwflow.GaussianAttention`, the attention of :mod:`nwflow.models` and ``Attention``
of diffusers, by what they hold and not by import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["Projections", "projections"]


@dataclass(frozen=True, eq=False)
class Projections:
    """The linear maps of every head, and what stands around them.

    ``extra_k``, ``extra_v`` are learned or zero keys that every query sees beside the given ones (``add_bias_kv``,
    ``add_zero_attn``). ``scale`` ``(H,)``: of q . k, or with ``kernel`` ``"gaussian"`` of -|q - k|^2 / 2.
    ``q_norm``, ``k_norm`` act on ``(B, H, n, d)``. ``before`` maps queries and keys as the module normalises them
    (None for keys: self attention), ``after`` maps (sum of heads + bias, queries as given) to the module's output.
    """

    q_weight: Float[Tensor, "H d e"]
    k_weight: Float[Tensor, "H d f"]
    v_weight: Float[Tensor, "H c g"]
    out_weight: Float[Tensor, "H o c"]
    scale: Float[Tensor, " H"]
    q_bias: Float[Tensor, "H d"] | None = None
    k_bias: Float[Tensor, "H d"] | None = None
    v_bias: Float[Tensor, "H c"] | None = None
    out_bias: Float[Tensor, " o"] | None = None
    kernel: str = "dot"
    extra_k: Float[Tensor, "H x d"] | None = None
    extra_v: Float[Tensor, "H x c"] | None = None
    q_norm: Callable[[Tensor], Tensor] | None = None
    k_norm: Callable[[Tensor], Tensor] | None = None
    before: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]] | None = None
    after: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def num_heads(self) -> int:
        return self.q_weight.shape[0]

    @property
    def extra(self) -> int:
        """Number of keys that belong to no input."""
        return 0 if self.extra_k is None else self.extra_k.shape[1]

    def queries(self, x: Float[Tensor, "B n e"]) -> Float[Tensor, "B H n d"]:
        """q of every head."""
        q = _linear(x, self.q_weight, self.q_bias)
        return q if self.q_norm is None else self.q_norm(q)

    def keys(self, y: Float[Tensor, "B m f"]) -> Float[Tensor, "B H m d"]:
        """k of every head, with the extra ones at the end."""
        k = _linear(y, self.k_weight, self.k_bias)
        return _appended(k if self.k_norm is None else self.k_norm(k), self.extra_k)

    def values(self, z: Float[Tensor, "B m g"]) -> Float[Tensor, "B H m c"]:
        """v of every head, with the extra ones at the end."""
        return _appended(_linear(z, self.v_weight, self.v_bias), self.extra_v)

    def shares(self, heads: Float[Tensor, "B H n c"]) -> Float[Tensor, "B H n o"]:
        """What every head adds to the output: W_o,i of its smoothed values."""
        return torch.einsum("bhnc,hoc->bhno", heads, self.out_weight.to(heads.dtype))

    def output(self, heads: Float[Tensor, "B H n c"], x: Float[Tensor, "B n e"]) -> Float[Tensor, "B n o"]:
        """The module's output from the smoothed values of its heads; ``x`` are the queries as given."""
        out = self.shares(heads).sum(1)
        out = out if self.out_bias is None else out + self.out_bias.to(out.dtype)
        return out if self.after is None else self.after(out, x)


def projections(module: nn.Module) -> Projections:
    """The linear maps of an attention module.

    Raises:
        TypeError: a module of another kind. ValueError: one whose arithmetic is not that of the module docstring.

    Example:
        >>> maps = projections(nn.MultiheadAttention(8, 2, kdim=6, vdim=4))
        >>> maps.q_weight.shape, maps.k_weight.shape, maps.v_weight.shape
        (torch.Size([2, 4, 8]), torch.Size([2, 4, 6]), torch.Size([2, 4, 4]))
    """
    if isinstance(module, nn.MultiheadAttention):
        return of_multihead(
            module.num_heads,
            module.in_proj_weight,
            (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight),
            module.in_proj_bias,
            (module.bias_k, module.bias_v),
            module.add_zero_attn,
            (module.out_proj.weight, module.out_proj.bias),
        )
    if all(hasattr(module, a) for a in ("to_q", "to_k", "to_v", "to_out", "heads")):
        return _of_diffusers(module)
    if all(hasattr(module, a) for a in ("q_proj", "k_proj", "v_proj", "out_proj", "log_bandwidth")):
        return _of_gaussian(module)
    if all(hasattr(module, a) for a in ("kv", "q_rms", "k_rms", "heads", "key_norm", "out")):
        return _of_model(module)
    raise TypeError(
        "module: expected nn.MultiheadAttention, GaussianAttention, an attention of nwflow.models or diffusers' "
        f"Attention, got {type(module).__name__}"
    )


def of_multihead(
    heads: int,
    packed: Tensor | None,
    separate: tuple[Tensor | None, Tensor | None, Tensor | None],
    bias: Tensor | None,
    extra: tuple[Tensor | None, Tensor | None],
    zero: bool,
    out: tuple[Tensor, Tensor | None],
) -> Projections:
    """From what ``torch.nn.functional.multi_head_attention_forward`` is given."""
    q, k, v = separate if packed is None else packed.chunk(3)
    assert q is not None and k is not None and v is not None
    biases = (None, None, None) if bias is None else bias.chunk(3)
    d = q.shape[0] // heads
    ends = [[], []]
    for list_, learned in zip(ends, extra, strict=True):
        if learned is not None:
            list_.append(learned.reshape(heads, 1, d))
        if zero:
            list_.append(q.new_zeros(heads, 1, d))
    extras = [torch.cat(e, 1) if e else None for e in ends]
    return Projections(
        **_inputs((q, k, v), biases, heads),
        out_weight=_joined(out[0], heads),
        scale=torch.full((heads,), d**-0.5, dtype=q.dtype, device=q.device),
        out_bias=out[1],
        extra_k=extras[0],
        extra_v=extras[1],
    )


def _of_gaussian(module: Any) -> Projections:
    """:class:`~nwflow.GaussianAttention`; with the key-norm prior it is dot-product attention at scale 1 / h^2."""
    heads = module.num_heads
    linears = (module.q_proj, module.k_proj, module.v_proj)
    return Projections(
        **_inputs([u.weight for u in linears], [u.bias for u in linears], heads),
        out_weight=_joined(module.out_proj.weight, heads),
        scale=module.bandwidth.detach().square().reciprocal(),
        out_bias=module.out_proj.bias,
        kernel="gaussian" if module.prior is None else "dot",
        q_norm=module.q_norm,
        k_norm=module.k_norm,
    )


def _of_model(module: Any) -> Projections:
    """``nwflow.models.layers.Attention``: pre-norm, residual; keys are given as tokens."""
    heads, (k, v) = module.heads, module.kv.weight.chunk(2)
    biases = (None, None) if module.kv.bias is None else module.kv.bias.chunk(2)
    return Projections(
        **_inputs((module.q.weight, k, v), (module.q.bias, *biases), heads),
        out_weight=_joined(module.out.weight, heads),
        scale=torch.full((heads,), (k.shape[0] // heads) ** -0.5, dtype=k.dtype, device=k.device),
        out_bias=module.out.bias,
        kernel="gaussian" if module.gaussian else "dot",
        q_norm=module.q_rms,
        k_norm=module.k_rms,
        before=lambda x, y: (module.norm(x), module.key_norm(x if y is None else y)),
        after=lambda out, x: x + out,
    )


def _of_diffusers(module: Any) -> Projections:
    """``Attention`` of diffusers with the arithmetic of ``AttnProcessor2_0``; an adapter's keys are other softmaxes."""
    _refuse(module)
    heads, linears = module.heads, (module.to_q, module.to_k, module.to_v)

    def before(x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        x = x if module.group_norm is None else module.group_norm(x.mT).mT
        if y is None:
            return x, x
        return x, module.norm_encoder_hidden_states(y) if module.norm_cross else y

    def after(out: Tensor, x: Tensor) -> Tensor:
        return (out + x if module.residual_connection else out) / module.rescale_output_factor

    return Projections(
        **_inputs([u.weight for u in linears], [u.bias for u in linears], heads),
        out_weight=_joined(module.to_out[0].weight, heads),
        scale=torch.full(
            (heads,), float(module.scale), dtype=module.to_q.weight.dtype, device=module.to_q.weight.device
        ),
        out_bias=module.to_out[0].bias,
        q_norm=module.norm_q,
        k_norm=module.norm_k,
        before=before,
        after=after,
    )


def _refuse(module: Any) -> None:
    for name, why in (
        ("spatial_norm", "its queries depend on a further input"),
        ("add_k_proj", "it has keys of a second stream"),
        ("fused_projections", "its projections are fused; call unfuse_projections() first"),
    ):
        if getattr(module, name, None):
            raise ValueError(f"module: expected plain cross-attention, got {name} in {type(module).__name__}: {why}")
    if module.to_k is None or module.to_out is None:
        raise ValueError(f"module: expected projections of its own, got none in {type(module).__name__}")
    inner, width = module.to_q.out_features, module.to_q.out_features // module.heads
    if module.to_k.out_features != inner:
        raise ValueError(
            f"module: expected as many heads of keys as of queries, got widths {module.to_k.out_features} and {inner}"
        )
    for norm in (module.norm_q, module.norm_k):
        shape = getattr(norm, "normalized_shape", None) or tuple(getattr(getattr(norm, "weight", None), "shape", ()))
        if shape and tuple(shape) != (width,):
            raise ValueError(f"module: expected norms of one head ({width}), got one over {tuple(shape)} of {inner}")


def _split(weight: Tensor, heads: int) -> Tensor:
    return weight.unflatten(0, (heads, -1))


def _joined(weight: Tensor, heads: int) -> Tensor:
    """``(o, H c)`` as ``(H, o, c)``."""
    return weight.unflatten(1, (heads, -1)).transpose(0, 1)


def _inputs(weights: Sequence[Tensor], biases: Sequence[Tensor | None], heads: int) -> dict[str, Any]:
    """The six fields of q, k and v from packed matrices."""
    found: dict[str, Any] = {}
    for name, weight, bias in zip("qkv", weights, biases, strict=True):
        found[f"{name}_weight"] = _split(weight, heads)
        found[f"{name}_bias"] = None if bias is None else bias.reshape(heads, -1)
    return found


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``(B, n, e)`` to ``(B, H, n, d)`` by one product."""
    heads = nn.functional.linear(
        x, weight.flatten(0, 1).to(x.dtype), None if bias is None else bias.flatten().to(x.dtype)
    )
    return heads.unflatten(-1, weight.shape[:2]).transpose(1, 2)


def _appended(k: Tensor, extra: Tensor | None) -> Tensor:
    return k if extra is None else torch.cat([k, extra.to(k.dtype)[None].expand(k.shape[0], -1, -1, -1)], 2)
