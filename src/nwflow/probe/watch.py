r"""Seeing attention functions run: a torch function mode that reads and never interferes.

PyTorch's fused attention paths are taken only where no function mode is active, whatever it does. So ours is put aside
while a module with such a path runs, and brought back for modules inside it that have none. Modes of the caller's own,
``torch.device`` as a context for one, are left where they are: they decide the path with and without a recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

__all__ = ["FUSED", "Watch", "is_leaf", "named", "watching"]

FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
WATCHED = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


class Watch(TorchFunctionMode):
    """Hands attention functions on, after they have run: (function, args, kwargs, output)."""

    def __init__(self, seen: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func in WATCHED:
            self.seen(func, args, kwargs, output)
        return output


@contextmanager
def watching(mode: Watch, on: bool) -> Iterator[None]:
    """The mode on or off for a while. It is put aside only from the top: below another mode it changes nothing."""
    size = torch._C._len_torch_function_stack()
    top = _get_current_function_mode() is mode
    there = any(torch._C._get_function_stack_at(i) is mode for i in range(size))
    if (on and there) or (not on and not top):
        yield
        return
    if on:
        _push_mode(mode)
    else:
        _pop_mode()
    try:
        yield
    finally:
        if on:
            _pop_mode()
        else:
            _push_mode(mode)


def named(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """All modules below the roots, each once under its first name."""
    for prefix, root in roots.items():
        for name, module in root.named_modules():
            yield ".".join(p for p in (prefix, name) if p), module


def is_leaf(module: nn.Module) -> bool:
    """PyTorch's own layers without parts: none of them attends, and there are many."""
    inside = type(module).__module__.startswith("torch.nn.") and not isinstance(module, FUSED)
    return inside and not any(True for _ in module.children())
