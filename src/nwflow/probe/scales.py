"""Strengths of IP-Adapters: what a list of them means for a pipeline of diffusers, checked before it is set.

UNet   one entry for each adapter: a number, a dictionary by blocks, or, where masks are on the images, a list with
       one number for each image
Flux   one entry for each adapter: a number, or a list with one for each block; with one adapter that list alone
SD3    one number
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nwflow.probe.families import family_of
from nwflow.probe.found import find_model

__all__ = ["Scales", "check_scale", "set_scale"]


@dataclass(frozen=True)
class Scales:
    """``values`` as ``set_ip_adapter_scale`` takes them, and what they mean in words."""

    values: Any
    meaning: str


def check_scale(pipeline: Any, scale: Any, images: Sequence[int] | None = None, masked: bool | None = None) -> Scales:
    """What ``scale`` means for the adapters that are loaded.

    Args:
        pipeline: a diffusers pipeline with an IP-Adapter, or its model.
        scale: a number or a list.
        images: number of images given to each adapter, where known.
        masked: whether masks are on the images; None where that is not known yet.

    Raises:
        ValueError: no adapter, or a list of the wrong length; the message says how many entries were expected and what
            each of them means.
    """
    found = (getattr(m, "processor", None) for m in find_model(pipeline).modules())
    processors: list[Any] = [p for p in found if family_of(p)]
    if not processors:
        raise ValueError("pipeline: expected a loaded IP-Adapter, found none")
    family = family_of(processors[0])
    assert family is not None
    if _is_number(scale):
        return Scales(scale, f"{scale} for every adapter, layer and image")
    if family.name == "SD3":
        raise ValueError(f"scale: expected one number for the one adapter of SD3, got {scale!r}")
    if isinstance(scale, dict) and family.name == "UNet":
        return Scales([scale], "by blocks of the UNet")
    if not isinstance(scale, list | tuple):
        raise TypeError(f"scale: expected a number or a list, got {type(scale).__name__}")
    adapters = len(processors[0].to_k_ip)
    if family.name == "Flux":
        return _flux(list(scale), adapters, len(processors))
    return _unet(list(scale), adapters, images, masked)


def set_scale(pipeline: Any, scale: Any, images: Sequence[int] | None = None, masked: bool | None = None) -> Scales:
    """:func:`check_scale`, then ``pipeline.set_ip_adapter_scale``."""
    found = check_scale(pipeline, scale, images, masked)
    pipeline.set_ip_adapter_scale(found.values)
    return found


def _unet(scale: list[Any], adapters: int, images: Sequence[int] | None, masked: bool | None) -> Scales:
    if len(scale) != adapters:
        nested = [[float(s) for s in scale]] if all(map(_is_number, scale)) else "[[...]]"
        raise ValueError(
            f"scale: expected {adapters} {'entry' if adapters == 1 else 'entries'}, one for each loaded adapter, "
            f"got {len(scale)}; numbers for the images of one adapter are nested, {nested}, and need masks"
        )
    parts = []
    for a, entry in enumerate(scale):
        if not isinstance(entry, list | tuple):
            if not _is_number(entry) and not isinstance(entry, dict):
                raise TypeError(f"scale: expected numbers, dictionaries or lists, got {entry!r} for adapter {a}")
            parts.append(f"{entry} for all images of adapter {a}")
            continue
        if images is not None and len(entry) != images[a]:
            raise ValueError(
                f"scale: expected {images[a]} numbers for adapter {a}, one for each of its images, got {len(entry)}"
            )
        if masked is False:
            raise ValueError(
                f"scale: expected one number for adapter {a}, got one for each image, {list(entry)}: without masks all "
                "images share one softmax and one scale"
            )
        parts.append(f"{list(entry)} for the images of adapter {a}, with masks")
    return Scales([list(s) if isinstance(s, tuple) else s for s in scale], "; ".join(parts))


def _flux(scale: list[Any], adapters: int, blocks: int) -> Scales:
    if adapters == 1 and all(map(_is_number, scale)) and len(scale) == blocks:
        return Scales(scale, f"one for each of the {blocks} blocks")
    if len(scale) != adapters or any(isinstance(s, list | tuple) and len(s) != blocks for s in scale):
        alone = f", or {blocks} numbers, one for each block" if adapters == 1 else ""
        raise ValueError(
            f"scale: expected {adapters} {'entry' if adapters == 1 else 'entries'}, one for each loaded adapter (a "
            f"number or a list of {blocks}, one for each block){alone}, got {scale!r}"
        )
    return Scales([list(s) if isinstance(s, tuple) else s for s in scale], "one for each adapter")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
