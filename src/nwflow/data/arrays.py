"""Arrays of numbers in files: ``.npy``, ``.npz``, ``.safetensors`` and ``.pt``.

The sizes that a header promises are compared with the file before anything is read. ``.npy`` is mapped copy-on-write:
a file larger than memory can be a support, arithmetic in place works, and the file is never written.
"""

from __future__ import annotations

import json
import math
import pickle
import pickletools
import warnings
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from nwflow.data.source import PICKLE_ADVICE, Loaded, Options, check_present, choose, is_pickle, not_a, truncated

METADATA = "metadata"  # the array of an .npz that holds no points but what made them
_NPY = b"\x93NUMPY"
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_npy(path: Path) -> np.ndarray:
    """A ``.npy`` array as a copy-on-write memory map."""
    head = check_present(path, "a .npy file")
    if not head.startswith(_NPY):
        raise truncated(path) if _NPY.startswith(head) else not_a(path, head, "a .npy file")
    with path.open("rb") as file:
        shape, fortran, dtype = _npy_header(path, file)
        offset = file.tell()
    expected, size = offset + math.prod(shape) * dtype.itemsize, path.stat().st_size
    if size < expected:
        raise truncated(path, expected, size)
    if 0 in shape:
        raise ValueError(f"{path}: no references (shape {shape})")
    if not shape:
        raise ValueError(f"{path}: expected rows, got a single number")
    return np.memmap(path, dtype, "c", offset, shape, "F" if fortran else "C")


def _npy_header(path: Path | str, file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    try:
        version = np.lib.format.read_magic(file)
        shape, fortran, dtype = _HEADERS.get(version, np.lib.format.read_array_header_2_0)(file)
    except ValueError as error:
        if "EOF" in str(error):
            raise truncated(Path(path)) from None
        raise ValueError(f"{path}: has no readable .npy header") from None
    if dtype.hasobject:
        raise ValueError(f"{path}: object array of shape {shape} (ragged rows?), stored as a pickle: {PICKLE_ADVICE}")
    if dtype.names:
        raise ValueError(f"{path}: structured array with fields {', '.join(dtype.names)}; expected plain numbers")
    return shape, fortran, dtype


def load_npy(path: Path, options: Options) -> Loaded:
    """Points from one ``.npy`` file; labels and weights may be two more."""
    labels, weights = (None if n is None else read_npy(Path(n)) for n in (options.label, options.weights))
    return _loaded(options, read_npy(path), labels, weights)


def _loaded(options: Options, points: Any, labels: Any, weights: Any) -> Loaded:
    return Loaded(options.first_rows(points), options.first_rows(labels), options.first_rows(weights))


def _names(path: Path, names: Iterable[str], options: Options) -> tuple[str, str | None, str | None]:
    """The names of the points, of the labels and of the weights among those in a file."""
    names, beside = list(names), (options.label, options.weights)
    points = choose(path, [n for n in names if n not in beside], options.key)
    label, weights = (n and choose(path, names, n, a) for n, a in zip(beside, ("label", "weights"), strict=True))
    return points, label, weights


def load_npz(path: Path, options: Options) -> Loaded:
    """Points from one array of a ``.npz`` archive; labels and weights by the names of two more."""
    arrays = read_npz(path, lambda names: _names(path, (n for n in names if n != METADATA), options))
    return _loaded(options, *arrays)


def read_npz(path: Path, pick: Callable[[list[str]], Sequence[str | None]]) -> list[np.ndarray | None]:
    """The arrays of a ``.npz`` archive whose names ``pick`` chooses among those in it."""
    head = check_present(path, "a .npz file")
    if not head.startswith(b"PK"):
        raise not_a(path, head, "a .npz file")
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name.removesuffix(".npy"): name for name in archive.namelist() if name.endswith(".npy")}
            picked = pick(list(members))
            return [None if n is None else _npz_member(path, archive, members[n]) for n in picked]
    except (zipfile.BadZipFile, zlib.error, EOFError):
        raise truncated(path) from None


def _npz_member(path: Path, archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(name) as file:
        _npy_header(f"{path}[{name.removesuffix('.npy')}]", file)
    with archive.open(name) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def safetensors_header(path: Path) -> dict[str, Any]:
    """The JSON header of a ``.safetensors`` file, its extent checked against the size of the file."""
    head = check_present(path, "a .safetensors file")
    size = path.stat().st_size
    length = int.from_bytes(head[:8], "little")
    if len(head) > 8 and head[8:9] != b"{":
        raise not_a(path, head, "a .safetensors file")
    if len(head) <= 8 or 8 + length > size:
        raise truncated(path)
    with path.open("rb") as file:
        file.seek(8)
        try:
            header = json.loads(file.read(length))
            end = max((v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"), default=0)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ValueError(f"{path}: is not a .safetensors file (its header is not readable)") from None
    if 8 + length + end > size:
        raise truncated(path, 8 + length + end, size)
    return header


def load_safetensors(path: Path, options: Options) -> Loaded:
    """Points from one tensor of a ``.safetensors`` file, in its own dtype; labels and weights by name."""
    from safetensors import SafetensorError, safe_open

    names = _names(path, sorted(set(safetensors_header(path)) - {"__metadata__"}), options)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = [None if n is None else file.get_tensor(n) for n in names]
    except SafetensorError as error:
        raise ValueError(f"{path}: is not a readable .safetensors file ({error})") from None
    return _loaded(options, *tensors)


def load_pt(path: Path, options: Options) -> Loaded:
    """Points from a tensor, a list of tensors or a dictionary of tensors written by ``torch.save``."""
    value = _unpickle_weights(path, check_present(path, "a .pt file"))
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, Tensor) for v in value):
        value = _stacked(path, value)
    if isinstance(value, Tensor):
        value = {"points": value}
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a tensor or a dictionary of tensors, got {type(value).__name__}")
    tensors = {str(k): v.detach() for k, v in value.items() if isinstance(v, Tensor)}
    return _loaded(options, *(None if n is None else tensors[n] for n in _names(path, tensors, options)))


def _stacked(path: Path, tensors: Any) -> Tensor:
    shapes = sorted({tuple(t.shape) for t in tensors})
    if len(shapes) > 1:
        raise ValueError(
            f"{path}: a list of {len(tensors)} tensors of different shapes {', '.join(map(str, shapes[:4]))}"
        )
    return torch.stack([t.detach() for t in tensors])


def _unpickle_weights(path: Path, head: bytes) -> Any:
    """``torch.load`` restricted to tensors and containers; archives are mapped copy-on-write."""
    is_zip = head.startswith(b"PK")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns about the protocol of pickles that it then refuses
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError:
        if not is_zip and not is_pickle(head):
            raise not_a(path, head, "a .pt file") from None
        if not is_zip and _ends_inside_a_pickle(path):
            raise truncated(path) from None
        raise ValueError(f"{path}: holds Python objects, not only tensors: {PICKLE_ADVICE}") from None
    except (RuntimeError, EOFError, OSError) as error:
        if is_zip or "EOF" in str(error) or isinstance(error, EOFError):
            raise truncated(path) from None
        raise ValueError(f"{path}: is not a readable .pt file ({str(error).splitlines()[0]})") from None


def _ends_inside_a_pickle(path: Path) -> bool:
    """Whether one of the pickles that open a ``.pt`` file without an archive is cut; they are scanned, never run."""
    with path.open("rb") as file:
        for _ in range(5):
            if not file.read(1):
                return False
            file.seek(-1, 1)
            try:
                deque(pickletools.genops(file), maxlen=0)
            except (ValueError, MemoryError):
                return True
    return False
