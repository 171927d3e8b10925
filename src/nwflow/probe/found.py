"""What there is to record in a pipeline of diffusers, in objects and in words."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["bound_arguments", "eager", "find_model", "one_timestep", "processors_of", "shortened"]


def find_model(pipeline: Any) -> nn.Module:
    """The UNet or transformer of a pipeline, not its compiled wrapper; a module is its own model."""
    found = next((m for m in (getattr(pipeline, n, None) for n in ("unet", "transformer")) if m is not None), pipeline)
    found = getattr(found, "_orig_mod", found)
    if not isinstance(found, nn.Module):
        raise TypeError(
            "pipeline: expected a diffusers pipeline with a unet or transformer, or such a model, "
            f"got {type(pipeline).__name__}"
        )
    return found


def bound_arguments(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs).arguments)
    except TypeError:  # the call itself will fail and say so
        return dict(kwargs)


def one_timestep(timestep: Any) -> float | None:
    """The timestep of all rows; None where they differ."""
    if timestep is None:
        return None
    values = timestep.detach().flatten().tolist() if isinstance(timestep, Tensor) else [float(timestep)]
    return float(values[0]) if len(set(values)) == 1 else None


@contextlib.contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Compiled code runs as if it had not been compiled: it calls no hooks that are newer than itself."""
    stance = getattr(torch.compiler, "set_stance", None)
    if stance is None:
        if any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules()):
            raise ValueError("pipeline: a compiled model needs PyTorch 2.6 or later here, or the uncompiled model")
        yield
        return
    with stance("force_eager"):
        yield


def processors_of(model: nn.Module) -> str:
    found = Counter(type(m.processor).__name__ for m in model.modules() if hasattr(m, "processor"))
    return ", ".join(f"{n} {name}" for name, n in found.most_common()) or "no attention layer with a processor"


def shortened(names: list[str], shown: int = 4) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
