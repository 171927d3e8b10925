"""What a caller may hand in as points, weights, labels or mask, turned into tensors without rounding or surprises.

Nothing is wrapped, clamped or reinterpreted: unsigned and signed integers are promoted before any subtraction can wrap
round (and to float64 where float32 could not hold them), big-endian arrays are byte-swapped, and what has no place on a
real line (complex numbers, objects, dates) is refused. Memory maps stay maps: a read-only one is mapped again
copy-on-write, so that in-place arithmetic works and the file is never written.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FLOAT32_EXACT = 2**24  # every integer up to here is a float32
Label = int | str | bool


def as_points(points: Any, name: str = "points") -> tuple[Tensor, list[str]]:
    """Points as a floating tensor (same memory where possible) and notes on what had to be converted."""
    tensor = to_tensor(points, name)
    if tensor.dtype in FLOATS:
        return tensor, []
    if tensor.is_floating_point() or tensor.is_complex():
        raise TypeError(f"{name}: expected real numbers (float16, bfloat16, float32, float64), got {tensor.dtype}")
    return _promote_integers(tensor, name)


def _promote_integers(tensor: Tensor, name: str) -> tuple[Tensor, list[str]]:
    exact = tensor.dtype == torch.bool or tensor.numel() == 0
    if not exact:
        wide = tensor.to(torch.float64) if tensor.dtype == torch.uint64 else tensor.to(torch.int64)
        exact = max(abs(int(wide.min())), abs(int(wide.max()))) <= _FLOAT32_EXACT
    dtype = torch.float32 if exact else torch.float64
    kind = str(tensor.dtype).removeprefix("torch.")
    return tensor.to(dtype), [f"{name}: {kind} promoted to {str(dtype).removeprefix('torch.')}"]


def to_tensor(value: Any, name: str) -> Tensor:
    """A tensor over the caller's memory where that is safe, a copy otherwise."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise TypeError(f"{name}: expected a dense tensor, got layout {value.layout}")
        return value
    if isinstance(value, np.ndarray):
        return _from_numpy(value, name)
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, (Tensor, np.ndarray)) for v in value):
        return _stack([to_tensor(v, name) for v in value], name)
    if isinstance(value, (str, bytes, dict, set)) or not isinstance(value, (Sequence, int, float, np.generic)):
        raise TypeError(f"{name}: expected a tensor, an array or nested lists of numbers, got {type(value).__name__}")
    try:
        return torch.tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: expected nested lists of numbers of equal lengths ({error})") from None


def _stack(tensors: list[Tensor], name: str) -> Tensor:
    shapes = sorted({tuple(t.shape) for t in tensors})
    if len(shapes) > 1:
        raise ValueError(f"{name}: expected points of one shape, got shapes {', '.join(map(str, shapes[:4]))}")
    return torch.stack(tensors)


def _from_numpy(array: np.ndarray, name: str) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{name}: expected real numbers, got a numpy array of dtype {array.dtype}{_dims_seen(array)}")
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        raise TypeError(f"{name}: expected at most float64, got {array.dtype}")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable:
        array = writable(array)
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)


def _dims_seen(array: np.ndarray) -> str:
    if array.dtype.kind != "O":
        return ""
    dims = sorted({np.shape(v) for v in array.ravel()[:1000]})
    return f" (objects of shapes {', '.join(map(str, dims[:4]))})"


def writable(array: np.ndarray) -> np.ndarray:
    """The same values in memory that may be written: a second, copy-on-write map of a mapped file, else a copy."""
    root = array
    while isinstance(root, np.ndarray) and not isinstance(root.base, mmap.mmap):
        root = root.base
    filename = getattr(root, "filename", None)
    if not isinstance(root, np.memmap) or filename is None or not Path(filename).is_file():
        return array.copy()
    start = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    private = np.memmap(filename, dtype=np.uint8, mode="c", offset=root.offset, shape=(root.nbytes,))
    return np.ndarray(array.shape, array.dtype, buffer=private, offset=start, strides=array.strides)


def as_labels(labels: Any, name: str = "labels") -> tuple[Tensor, tuple[Label, ...]]:
    """Codes ``0 .. k-1`` (long) and the sorted original values they stand for."""
    if isinstance(labels, Tensor):
        labels = labels.detach().cpu().numpy()
    if not isinstance(labels, np.ndarray):
        labels = list(labels)
        if len({isinstance(v, (str, np.str_)) for v in labels}) > 1:
            raise TypeError(f"{name}: expected all strings or all integers, got a mixture (or missing values)")
    values = np.asarray(labels)
    if values.dtype.kind == "O" and all(isinstance(v, str) for v in values.ravel()):
        values = values.astype(str)
    if values.dtype.kind == "f" and np.isfinite(values).all() and (values == np.round(values)).all():
        values = values.astype(np.int64)
    if values.dtype.kind not in "iubU":
        raise TypeError(f"{name}: expected integers or strings, got {values.dtype} (is a label missing?)")
    names, codes = np.unique(values, return_inverse=True)
    return torch.from_numpy(codes.reshape(values.shape).astype(np.int64)), tuple(names.tolist())


def merge_labels(sets: Sequence[tuple[Tensor, tuple[Label, ...]]]) -> tuple[list[Tensor], tuple[Label, ...]]:
    """Codes of several label sets over the union of their names, and that union (integers before strings)."""
    names = tuple(sorted({n for _, own in sets for n in own}, key=lambda v: (isinstance(v, str), v)))
    place = {name: code for code, name in enumerate(names)}
    return [torch.tensor([place[n] for n in own], device=codes.device)[codes] for codes, own in sets], names


def known_codes(labels: Any, names: tuple[Label, ...]) -> tuple[list[int], str]:
    """Codes of one label or several, and how a message calls them; ValueError lists the names that exist."""
    labels = labels.tolist() if hasattr(labels, "tolist") else labels
    wanted = [labels] if isinstance(labels, (str, int)) else list(labels)
    unknown = [w for w in wanted if w not in names]
    if unknown or not wanted:
        have = ", ".join(map(repr, names[:20])) + (", ..." if len(names) > 20 else "")
        what = f"unknown {', '.join(map(repr, unknown))}" if unknown else "expected at least one"
        raise ValueError(f"labels: {what}; this support has {have}")
    return [names.index(w) for w in wanted], " or ".join(map(repr, wanted))


def as_mask(mask: Any, shape: tuple[int, ...], device: torch.device, name: str = "mask") -> Tensor:
    """A boolean tensor of exactly ``shape``, True for real points; 0/1 integers are accepted, floats are not."""
    tensor = to_tensor(mask, name)
    if tensor.is_floating_point() or tensor.is_complex():
        raise TypeError(f"{name}: expected booleans (True = real point), got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
    if tensor.dtype != torch.bool and bool(((tensor != 0) & (tensor != 1)).any()):
        raise ValueError(f"{name}: expected booleans or 0/1, got other integers")
    return tensor.to(device=device, dtype=torch.bool)


def as_weights(weights: Any, shape: tuple[int, ...], points: Tensor, name: str = "weights") -> Tensor:
    """Prior weights as given, in at least float32 and at least the dtype of the points."""
    tensor = to_tensor(weights, name)
    if tensor.is_complex():
        raise TypeError(f"{name}: expected real numbers, got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, one weight a point, got {tuple(tensor.shape)}")
    dtype = torch.promote_types(torch.promote_types(tensor.dtype, points.dtype), torch.float32)
    return tensor.to(device=points.device, dtype=dtype)


def as_index(values: Any, shape: tuple[int, ...], device: torch.device, name: str) -> Tensor:
    """Integers, one a point, as int64."""
    tensor = to_tensor(values, name)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, one a point, got {tuple(tensor.shape)}")
    if tensor.is_floating_point() or tensor.is_complex():
        raise TypeError(f"{name}: expected integers, got {tensor.dtype}")
    return tensor.to(device=device, dtype=torch.int64)
