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

__all__ = ["Family", "Running", "Term", "family_of"]


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
    """``watch`` names the modules whose outputs matter, ``terms`` reads the call, ``grid`` the queries' shape."""

    name: str
    watch: Callable[[nn.Module, Any], dict[str, nn.Module]]
    terms: Callable[[Running], Iterator[Term]]
    grid: Callable[[nn.Module, dict[str, Any]], tuple[int, int] | None]


class Running:
    """One running call of an attention layer: outputs of the watched modules, in order. :meth:`close` unhooks them."""

    def __init__(self, name: str, module: nn.Module, family: Family, args: tuple, kwargs: dict[str, Any]) -> None:
        self.name, self.module, self.family, self.kwargs = name, module, family, kwargs
        self.processor: Any = module.processor
        self.hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        # The strengths of this moment: callers may change them between calls.
        self.strengths = [s if not isinstance(s, list) else list(s) for s in _as_list(self.processor.scale)]
        self.seen: dict[str, list[Tensor]] = {}
        self._handles = [
            part.register_forward_hook(self._keep(label))
            for label, part in family.watch(module, self.processor).items()
        ]

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
        return x.reshape(x.shape[0], -1, heads, x.shape[-1] // heads).transpose(1, 2)  # type: ignore[operator]

    def _keep(self, label: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, output: Tensor) -> None:
            self.seen.setdefault(label, []).append(output)

        return hook


def family_of(processor: Any) -> Family | None:
    """The family of an IP-Adapter processor; None of any other."""
    names = {base.__name__ for base in type(processor).__mro__}
    return next((family for classes, family in _FAMILIES if classes & names), None)


# ------------------------------------------------------------------------------------------------------------- UNet


def _watch_unet(attn: nn.Module, processor: Any) -> dict[str, nn.Module]:
    return {"q": attn.to_q, **_adapters(processor)}  # type: ignore[dict-item]


def _terms_unet(call: Running) -> Iterator[Term]:
    if "q" not in call.seen:
        return
    q = call.heads(call.seen["q"][0])
    plain = type(call.processor).__name__ == "IPAdapterAttnProcessor"  # its logits carry the layer's own scale
    scale = float(call.module.scale) if plain else q.shape[-1] ** -0.5  # type: ignore[arg-type]
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
        each = strength if isinstance(strength, list) else [strength] * len(keys)
        for i, (k, v) in enumerate(zip(keys, values, strict=True)):
            region = _region(masks[a][:, i], q)
            owner = (i,) * k.shape[-2]
            yield Term(q, call.heads(k), call.heads(v), scale, owner, "separate", a, float(each[i]), region)


def _region(mask: Tensor, q: Tensor) -> Tensor:
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


# ------------------------------------------------------------------------------------------------------------- Flux


def _watch_flux(attn: nn.Module, processor: Any) -> dict[str, nn.Module]:
    return {"q": attn.norm_q, **_adapters(processor)}  # type: ignore[dict-item]


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


def _watch_sd3(attn: nn.Module, processor: Any) -> dict[str, nn.Module]:
    return {
        "q": processor.norm_q,
        "own_k": processor.norm_k,
        "own_v": attn.to_v,  # type: ignore[dict-item]
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


def _adapters(processor: Any) -> dict[str, nn.Module]:
    keys, values = enumerate(processor.to_k_ip), enumerate(processor.to_v_ip)
    return {f"k{a}": part for a, part in keys} | {f"v{a}": part for a, part in values}


def _as_list(scale: Any) -> list[Any]:
    return list(scale) if isinstance(scale, list | tuple) else [scale]


_FAMILIES = (
    (
        {"IPAdapterAttnProcessor", "IPAdapterAttnProcessor2_0", "IPAdapterXFormersAttnProcessor"},
        Family("UNet", _watch_unet, _terms_unet, _grid_unet),
    ),
    (
        {"FluxIPAdapterAttnProcessor", "FluxIPAdapterJointAttnProcessor2_0"},
        Family("Flux", _watch_flux, _terms_flux, _grid_flux),
    ),
    ({"SD3IPAdapterJointAttnProcessor2_0"}, Family("SD3", _watch_sd3, _terms_sd3, _grid_sd3)),
)
