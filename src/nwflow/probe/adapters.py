"""Which IP-Adapter a file holds, told by its keys, and whether it fits a pipeline, before anything is multiplied.

An adapter is an image projection (image features -> tokens) and, for each cross-attention layer, two matrices
``to_k_ip`` and ``to_v_ip`` (Ye et al. 2023, arXiv 2308.06721). Nothing in the files says which kind they are; the keys
of the projection do:

    base            proj.weight, norm.weight            4 tokens from the projected image embedding (Flux: 4 or 16)
    full            proj.0, proj.2, proj.3              a token for each patch and one for the class
    plus            latents, proj_in, proj_out          a resampler's latents, from the last hidden state but one
    FaceID          proj.0, proj.2, norm                4 tokens from an identity embedding
    FaceID-plus     perceiver_resampler.*, proj.*       the same, refined by hidden states
    SD3             latents, proj_in, time_embedding.*  a resampler that knows the time

and a FaceID adapter may carry ``*_lora.*`` weights for the attention of the base model. Files come in four layouts:
nested (``image_proj``, ``ip_adapter``), flat with those as prefixes, the training checkpoints (``image_proj_model.``,
``adapter_modules.``) and that of Flux (``ip_adapter_proj_model.``, ``double_blocks.``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = ["Adapter", "check_adapter", "image_width", "read_adapter", "recognise"]

StateDict = dict[str, dict[str, Tensor]]

_PREFIXES = {
    "image_proj.": "image_proj",
    "image_proj_model.": "image_proj",
    "ip_adapter_proj_model.": "image_proj",
    "ip_adapter.": "ip_adapter",
    "adapter_modules.": "ip_adapter",
    "double_blocks.": "ip_adapter",
}
_RENAMED = {
    "ip_adapter_double_stream_k_proj": "to_k_ip",
    "ip_adapter_double_stream_v_proj": "to_v_ip",
    "processor.": "",
}
_SHOWN = 12  # keys that an error lists


@dataclass(frozen=True)
class Adapter:
    """What :func:`recognise` finds. Widths and numbers are None where the keys that tell them are absent.

    ``kind`` is "base", "full", "plus", "faceid", "faceid_plus" or "sd3"; ``lora`` says whether weights for the base
    model's attention come with it. ``tokens`` for each image, ``image_width`` of the image features that the projection
    takes (``image_source`` says which: "image_embeds", "hidden_states", or "identity" for a face embedding),
    ``identity_width`` of the face embedding, ``cross_width`` of the tokens that come out, ``layers`` adapted.
    """

    kind: str
    lora: bool
    tokens: int | None
    image_width: int | None
    image_source: str
    identity_width: int | None
    cross_width: int | None
    layers: int

    @property
    def name(self) -> str:
        """The kind in the words of those who publish adapters."""
        names = {"faceid": "FaceID", "faceid_plus": "FaceID-plus", "sd3": "SD3"}
        return names.get(self.kind, self.kind) + (" with LoRA" if self.lora else "")


def recognise(state: Mapping[str, Any]) -> Adapter:
    """The kind of adapter that a state dict in any of the published layouts holds.

    Args:
        state: names to tensors, or the nested form ``{"image_proj": {...}, "ip_adapter": {...}}``. The keys of an image
            projection alone are enough.

    Raises:
        ValueError: keys that are of no known adapter; the message lists the keys seen.

    >>> import torch
    >>> recognise({"image_proj.proj.weight": torch.zeros(24, 16), "image_proj.norm.weight": torch.zeros(6)}).name
    'base'
    """
    parts = split(state)
    projection, attention = parts["image_proj"], parts["ip_adapter"]
    lora = any("_lora." in key for key in attention)
    kind = _kind(projection) or ("faceid" if lora and not projection else None)
    if kind is None:
        raise ValueError(
            "state: expected the keys of an IP-Adapter (an image projection with proj.weight + norm.weight, "
            "proj.0/2/3, latents + proj_in, proj.0/2 + norm, or perceiver_resampler.*), "
            f"got {_keys(state)}"
        )
    size = _Shapes(projection)
    cross = {"faceid_plus": ("perceiver_resampler.norm_out.weight", 0), "full": ("proj.3.weight", 0)}
    width = size(*cross.get(kind, ("norm_out.weight" if kind in ("plus", "sd3") else "norm.weight", 0)))
    features = {
        "base": ("proj.weight", 1),
        "full": ("proj.0.weight", 1),
        "plus": ("proj_in.weight", 1),
        "sd3": ("proj_in.weight", 1),
        "faceid_plus": ("perceiver_resampler.proj_in.weight", 1),
    }
    return Adapter(
        kind,
        lora,
        _tokens(kind, size, width),
        size(*features[kind]) if kind in features else None,
        {"base": "image_embeds", "faceid": "identity"}.get(kind, "hidden_states"),
        size("proj.0.weight", 1) if kind.startswith("faceid") else None,
        width,
        sum(key.endswith("to_k_ip.weight") for key in attention),
    )


def split(state: Mapping[str, Any]) -> StateDict:
    """The nested form ``{"image_proj": ..., "ip_adapter": ...}`` of any layout; keys of neither part are left out."""
    if set(state) & {"image_proj", "ip_adapter"}:
        return {part: dict(state.get(part) or {}) for part in ("image_proj", "ip_adapter")}
    parts: StateDict = {"image_proj": {}, "ip_adapter": {}}
    for key, value in state.items():
        prefix = next((p for p in _PREFIXES if key.startswith(p)), None)
        if prefix is None:
            part = "ip_adapter" if re.search(r"_lora\.|to_[kv]_ip\.", key) else "image_proj"
            if key.startswith(("unet.", "transformer.")):
                continue
        else:
            part, key = _PREFIXES[prefix], key[len(prefix) :]
        for old, new in _RENAMED.items():
            key = key.replace(old, new)
        parts[part][key] = value
    return parts


def read_adapter(path: str | Path) -> StateDict:
    """An adapter's tensors from a ``.safetensors`` file, in the nested form that ``load_ip_adapter`` takes.

    Raises:
        ValueError: another kind of file (pickled ones can run code), or keys of no known adapter.
    """
    from safetensors import safe_open

    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"{path}: expected a .safetensors file (other formats can run code when they are read)")
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  a file is no mapping
    except Exception as error:
        raise ValueError(f"{path}: not a readable .safetensors file: {error}") from None
    try:
        recognise(state)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return split(state)


def image_width(encoder: Any, source: str) -> int | None:
    """Width of what a vision encoder of transformers gives: "image_embeds" or "hidden_states"."""
    config = getattr(encoder, "config", None)
    config = getattr(config, "vision_config", None) or config
    name = "projection_dim" if source == "image_embeds" else "hidden_size"
    return getattr(config, name, None)


def check_adapter(
    state: Mapping[str, Any],
    pipeline: Any,
    *,
    adapter_name: str = "the adapter",
    encoder_name: str = "the image encoder",
    pipeline_name: str = "the pipeline",
) -> Adapter:
    """Raise where an adapter does not fit a pipeline, in terms of the two files rather than of a matrix product.

    Args:
        state: the adapter, in any layout.
        pipeline: a diffusers pipeline; its ``image_encoder`` may be None (embeddings are given), then the first
            comparison is left out.
        adapter_name, encoder_name, pipeline_name: what messages call them: files, or arguments.

    Raises:
        ValueError: the encoder's width is not what the image projection takes, or the tokens' width is not that of the
            model's cross-attention; both widths and both names are in the message.
    """
    found = recognise(state)
    encoder = getattr(pipeline, "image_encoder", None)
    given = None if encoder is None or found.image_source == "identity" else image_width(encoder, found.image_source)
    if given is not None and found.image_width is not None and given != found.image_width:
        raise ValueError(
            f"{adapter_name} takes image features of width {found.image_width} ({found.image_source}), "
            f"but {encoder_name} gives width {given}: they were not trained together"
        )
    model = next((m for m in (getattr(pipeline, n, None) for n in ("unet", "transformer")) if m is not None), pipeline)
    config = getattr(model, "config", None)
    wanted = getattr(config, "cross_attention_dim", None) or getattr(config, "joint_attention_dim", None)
    if found.kind == "sd3" and config is not None:
        wanted = config.attention_head_dim * config.num_attention_heads
    for width in (found.cross_width, _adapted_width(split(state)["ip_adapter"], found.kind)):
        if isinstance(wanted, int) and width is not None and width != wanted:
            raise ValueError(
                f"{adapter_name} gives tokens of width {width}, but the cross-attention of {pipeline_name} takes "
                f"width {wanted}: it was made for another model"
            )
    return found


class _Shapes:
    """Axis sizes of named tensors; None where a name is absent or holds no tensor."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = tensors

    def __call__(self, key: str, axis: int) -> int | None:
        shape = getattr(self.tensors.get(key), "shape", ())
        return int(shape[axis]) if len(shape) > axis else None


def _kind(keys: Mapping[str, Any]) -> str | None:
    starts = {re.sub(r"\.(weight|bias)$", "", key) for key in keys}
    if any(key.startswith("perceiver_resampler.") for key in keys):
        return "faceid_plus"
    if "latents" in starts and "proj_in" in starts:
        return "sd3" if any(key.startswith("time_embedding.") for key in keys) else "plus"
    if "proj" in starts and "norm" in starts:
        return "base"
    if {"proj.0", "proj.2", "proj.3"} <= starts:
        return "full"
    return "faceid" if {"proj.0", "proj.2", "norm"} <= starts else None


def _tokens(kind: str, size: _Shapes, cross: int | None) -> int | None:
    if kind in ("plus", "sd3"):
        return size("latents", 1)
    if kind == "faceid_plus":
        inner = size("norm.weight", 0)
        return size("proj.2.weight", 0) // inner if inner and size("proj.2.weight", 0) else None  # type: ignore[operator]
    out = size({"base": "proj.weight", "faceid": "proj.2.weight"}.get(kind, ""), 0)
    return out // cross if out and cross else None


def _adapted_width(attention: Mapping[str, Any], kind: str) -> int | None:
    first = next((value for key, value in attention.items() if key.endswith("to_k_ip.weight")), None)
    shape = getattr(first, "shape", ())
    return int(shape[1]) if len(shape) == 2 and kind != "sd3" else None


def _keys(state: Mapping[str, Any]) -> str:
    keys = [f"{part}.{key}" for part, inner in state.items() if isinstance(inner, Mapping) for key in inner]
    keys += [key for key, value in state.items() if not isinstance(value, Mapping)]
    if not keys:
        return f"no keys at all ({', '.join(map(repr, state)) or 'an empty dict'})"
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"the keys {', '.join(sorted(keys)[:_SHOWN])}{more}"
