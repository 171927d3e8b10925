"""How each kind of IP-Adapter processor of diffusers forms its image attention, read from what its modules put out.

    UNet   out = text + sum_a strength_a softmax(to_q(x) to_k_ip_a(c)^T / sqrt d) to_v_ip_a(c); with masks on the image
           one softmax for each image, each times its region (IPAdapterAttnProcessor, ...2_0, ...XFormers)
    Flux   the same on q after its RMS norm and before the rotation; keys are neither normed nor rotated
    SD3    one softmax over [the image's own keys, the adapter's keys], all RMS-normed; references weigh less than 1

Processors are told apart by class names along their inheritance, so nothing is imported before it is used and
subclasses count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nwflow.probe.capture import owners

__all__ = ["Family", "Running", "Term", "family_of", "region_of"]


@dataclass(frozen=True)
class Term:
    """One softmax over reference tokens inside a call; the fields are those of a capture, for all rows."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    references: tuple[int, ...]
    semantics: str
    adapter: int
    strength: float
    region: Tensor | None = None


@dataclass(frozen=True)
class Family:
    """``watch`` names the modules whose outputs matter, ``terms`` reads the call, ``grid`` the queries' shape.

    To check a call, ``watch_more`` names further modules and ``rest`` ``(B, n, H d)`` recomputes what the layer adds to
    the image attention before its output projection; None where the layer returns its image attention by itself.
    """

    name: str
    watch: Callable[[Any, Any], dict[str, nn.Module]]
    terms: Callable[[Running], Iterator[Term]]
    grid: Callable[[nn.Module, dict[str, Any]], tuple[int, int] | None]
    watch_more: Callable[[Any], dict[str, nn.Module]]
    rest: Callable[[Running], Tensor] | None


class Running:
    """One running call of an attention layer: outputs of the watched modules, in order. :meth:`close` unhooks them."""

    def __init__(
        self, name: str, module: Any, family: Family, args: tuple, kwargs: dict[str, Any], check: bool = False
    ) -> None:
        self.name, self.module, self.family, self.kwargs, self.check = name, module, family, kwargs, check
        self.processor: Any = module.processor
        self.hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        self.strengths = _as_list(self.processor.scale)  # those of this moment: callers may change them between calls
        self.seen: dict[str, list[Tensor]] = {}
        watched = family.watch(module, self.processor) | (family.watch_more(module) if check else {})
        self._handles = [part.register_forward_hook(self._keep(label)) for label, part in watched.items()]
        if check and family.rest is not None:
            self._handles.append(module.to_out[0].register_forward_pre_hook(self._keep_input))

    @property
    def rows(self) -> int:
        return self.hidden.shape[0]

    @property
    def grid(self) -> tuple[int, int] | None:
        return (self.hidden.shape[-2], self.hidden.shape[-1]) if self.hidden.ndim == 4 else None

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def heads(self, x: Tensor) -> Tensor:
        """``(B, ..., H d)`` to ``(B, H, n, d)``; the axes between are those of images and tokens."""
        heads = self.module.heads
        return x.reshape(x.shape[0], -1, heads, x.shape[-1] // heads).transpose(1, 2)

    @torch.no_grad()
    def error(self, terms: list[Term], output: Any) -> float:
        """Largest difference of what the layer computed and the recomputed terms, over the largest of it."""
        own = output[2] if self.family.rest is None else self.seen["mixed"][0]
        wide = torch.promote_types(own.dtype, torch.float32)
        found = torch.zeros_like(own, dtype=wide) if self.family.rest is None else self.family.rest(self)
        for term in terms:
            part = self.flat(term.q, term.k, term.v, term.scale)
            found = found + term.strength * (part if term.region is None else part * term.region[..., None].to(wide))
        return float((own.to(wide) - found).abs().amax() / own.abs().amax().clamp(min=torch.finfo(wide).tiny))

    def flat(self, q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
        """softmax(scale q k^T + bias) v with heads joined, at least in float32."""
        wide = torch.promote_types(q.dtype, torch.float32)
        logits = (q.to(wide) * scale) @ k.to(wide).mT
        logits = logits if bias is None else logits + bias.to(wide)
        return (torch.softmax(logits, -1) @ v.to(wide)).transpose(1, 2).flatten(2)

    def _keep(self, label: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, output: Tensor) -> None:
            self.seen.setdefault(label, []).append(output.detach())

        return hook

    def _keep_input(self, module: nn.Module, args: tuple) -> None:
        self.seen.setdefault("mixed", []).append(args[0].detach())


def family_of(processor: Any) -> Family | None:
    """The family of an IP-Adapter processor; None of any other."""
    names = {base.__name__ for base in type(processor).__mro__}
    return next((family for classes, family in _FAMILIES if classes & names), None)


# ------------------------------------------------------------------------------------------------------------- UNet


def _watch_unet(attn: Any, processor: Any) -> dict[str, nn.Module]:
    return {"q": attn.to_q, **_adapters(processor)}


def _terms_unet(call: Running) -> Iterator[Term]:
    if "q" not in call.seen:
        return
    q = call.heads(call.seen["q"][0])
    scale = _unet_scale(call, q)
    masks = _masks(call.kwargs.get("ip_adapter_masks"), len(call.strengths))
    for a, strength in enumerate(call.strengths):
        keys, values = call.seen.get(f"k{a}", []), call.seen.get(f"v{a}", [])
        if not keys:  # strength 0: the processor leaves it out
            continue
        if masks[a] is None:
            k, v = keys[0], values[0]
            tokens = call.processor.num_tokens[a] if a < len(call.processor.num_tokens) else None
            yield Term(q, call.heads(k), call.heads(v), scale, owners(k.shape, tokens), "joint", a, float(strength))
            continue
        each: list[Any] = strength if isinstance(strength, list) else [strength] * len(keys)
        for i, (k, v) in enumerate(zip(keys, values, strict=True)):
            region = region_of(_rounded(masks[a], call.processor)[:, i], q)
            owner = (i,) * k.shape[-2]
            yield Term(q, call.heads(k), call.heads(v), scale, owner, "separate", a, float(each[i]), region)


def _rounded(mask: Tensor, processor: Any) -> Tensor:
    """The processor for xformers takes masks in half precision."""
    names = {base.__name__ for base in type(processor).__mro__}
    return mask.to(torch.float16) if "IPAdapterXFormersAttnProcessor" in names else mask


def region_of(mask: Tensor, q: Tensor) -> Tensor:
    """The mask of one image at the queries' resolution, ``(B, n)``, as the processor itself reduces it."""
    from diffusers.image_processor import IPAdapterMaskProcessor

    found = IPAdapterMaskProcessor.downsample(mask, q.shape[0], q.shape[-2], 1)
    return found[..., 0].to(dtype=q.dtype, device=q.device)


def _masks(masks: Any, adapters: int) -> list[Any]:
    if masks is None:
        return [None] * adapters
    return masks if isinstance(masks, list) else list(masks.unsqueeze(1))


def _grid_unet(model: nn.Module, inputs: dict[str, Any]) -> tuple[int, int] | None:
    return None  # blocks say it themselves


def _watch_text(attn: Any) -> dict[str, nn.Module]:
    return {"text_k": attn.to_k, "text_v": attn.to_v}


def _text(call: Running) -> Tensor:
    """The attention to the text, recomputed."""
    q, k, v = (call.heads(call.seen[name][0]) for name in ("q", "text_k", "text_v"))
    bias = call.kwargs.get("attention_mask")
    if bias is not None:
        bias = call.module.prepare_attention_mask(bias, k.shape[2], q.shape[0])
        bias = bias.view(q.shape[0], q.shape[1], -1, bias.shape[-1])
    return call.flat(q, k, v, _unet_scale(call, q), bias)


def _unet_scale(call: Running, q: Tensor) -> float:
    """The first processor class applies the layer's own scale, the other two always 1 / sqrt(d)."""
    names = {base.__name__ for base in type(call.processor).__mro__}
    return float(call.module.scale) if "IPAdapterAttnProcessor" in names else q.shape[-1] ** -0.5


# ------------------------------------------------------------------------------------------------------------- Flux


def _watch_flux(attn: Any, processor: Any) -> dict[str, nn.Module]:
    return {"q": attn.norm_q, **_adapters(processor)}


def _terms_flux(call: Running) -> Iterator[Term]:
    if "q" not in call.seen:
        return
    q = call.seen["q"][0].transpose(1, 2)
    for a, strength in enumerate(call.strengths):
        for k, v in zip(call.seen.get(f"k{a}", []), call.seen.get(f"v{a}", []), strict=True):
            scale = q.shape[-1] ** -0.5
            yield Term(q, call.heads(k), call.heads(v), scale, owners(k.shape, None), "joint", a, float(strength))


def _grid_flux(model: nn.Module, inputs: dict[str, Any]) -> tuple[int, int] | None:
    """Flux says where each token is: ids hold (., row, column)."""
    ids = inputs.get("img_ids")
    if not isinstance(ids, Tensor) or ids.shape[-1] != 3:
        return None
    ids = ids.reshape(-1, 3)
    return int(ids[:, 1].max()) + 1, int(ids[:, 2].max()) + 1


# -------------------------------------------------------------------------------------------------------------- SD3


def _watch_sd3(attn: Any, processor: Any) -> dict[str, nn.Module]:
    return {
        "q": processor.norm_q,
        "own_k": processor.norm_k,
        "own_v": attn.to_v,
        "k": processor.norm_ip_k,
        "v": processor.to_v_ip,
    }


def _terms_sd3(call: Running) -> Iterator[Term]:
    if "k" not in call.seen:  # strength 0, or no image
        return
    q, own, k = (call.seen[name][0] for name in ("q", "own_k", "k"))
    v = torch.cat([call.heads(call.seen["own_v"][0]), call.heads(call.seen["v"][0])], 2)
    references = (-1,) * own.shape[2] + (0,) * k.shape[2]
    scale = q.shape[-1] ** -0.5
    yield Term(q, torch.cat([own, k], 2), v, scale, references, "with_own", 0, float(call.strengths[0]))


def _grid_sd3(model: nn.Module, inputs: dict[str, Any]) -> tuple[int, int] | None:
    x, patch = inputs.get("hidden_states"), getattr(getattr(model, "config", None), "patch_size", None)
    return (x.shape[-2] // patch, x.shape[-1] // patch) if isinstance(x, Tensor) and x.ndim == 4 and patch else None


def _watch_joint(attn: Any) -> dict[str, nn.Module]:
    names = (
        "to_q",
        "to_k",
        "norm_q",
        "norm_k",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "norm_added_q",
        "norm_added_k",
    )
    parts = {name: getattr(attn, name, None) for name in names}
    return {f"joint_{name}": part for name, part in parts.items() if part is not None}


def _joint(call: Running) -> Tensor:
    """SD3's attention over image and text, recomputed; the rows of the image."""

    def after(norm: str, projection: str) -> Tensor | None:
        if f"joint_{norm}" in call.seen:
            return call.seen[f"joint_{norm}"][0]
        found = call.seen.get(f"joint_{projection}")
        return None if found is None else call.heads(found[0])

    pairs = [
        (after("norm_q", "to_q"), after("norm_added_q", "add_q_proj")),
        (after("norm_k", "to_k"), after("norm_added_k", "add_k_proj")),
        (call.heads(call.seen["own_v"][0]), after("", "add_v_proj")),
    ]
    q, k, v = (torch.cat([u for u in pair if u is not None], 2) for pair in pairs)
    return call.flat(q, k, v, q.shape[-1] ** -0.5)[:, : call.hidden.shape[1]]


def _adapters(processor: Any) -> dict[str, nn.Module]:
    keys, values = enumerate(processor.to_k_ip), enumerate(processor.to_v_ip)
    return {f"k{a}": part for a, part in keys} | {f"v{a}": part for a, part in values}


def _as_list(scale: Any) -> list[Any]:
    return list(scale) if isinstance(scale, list | tuple) else [scale]


_FAMILIES = (
    (
        {"IPAdapterAttnProcessor", "IPAdapterAttnProcessor2_0", "IPAdapterXFormersAttnProcessor"},
        Family("UNet", _watch_unet, _terms_unet, _grid_unet, _watch_text, _text),
    ),
    (
        {"FluxIPAdapterAttnProcessor", "FluxIPAdapterJointAttnProcessor2_0"},
        Family("Flux", _watch_flux, _terms_flux, _grid_flux, lambda attn: {}, None),
    ),
    ({"SD3IPAdapterJointAttnProcessor2_0"}, Family("SD3", _watch_sd3, _terms_sd3, _grid_sd3, _watch_joint, _joint)),
)
