"""The idx format of MNIST and its relatives: big-endian arrays, plain or gzipped.

A file is two zero bytes, a type code, the number of dimensions, the dimensions (unsigned 32-bit), the numbers. Images
(unsigned bytes with at least two event dimensions) become float32 in [0, 1].
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from nwflow.data.source import Loaded, MissingDataError, Options, check_present, not_a, truncated

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_SPLITS = ("train", "t10k")
_PIECE = 1 << 24
_SUFFIXES = (".idx", "-ubyte", ".idx.gz", "-ubyte.gz")


def is_idx(path: Path) -> bool:
    """True for the usual names of idx files."""
    return path.name.endswith(_SUFFIXES)


def read_idx(path: Path, limit: int | None = None) -> np.ndarray:
    """The array of an idx file in native byte order, at most ``limit`` rows of it."""
    head = check_present(path, "an idx file")
    with gzip.open(path) if head.startswith(b"\x1f\x8b") else path.open("rb") as file:
        try:
            return _read(path, file, limit)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            raise truncated(path) from None


def _read(path: Path, file: IO[bytes] | gzip.GzipFile, limit: int | None) -> np.ndarray:
    magic = file.read(4)
    if len(magic) < 4:
        raise truncated(path)
    if magic[:2] != b"\0\0" or magic[2] not in _TYPES or magic[3] == 0:
        raise not_a(path, magic, "an idx file")
    dims = file.read(4 * magic[3])
    if len(dims) < 4 * magic[3]:
        raise truncated(path)
    shape, dtype = tuple(np.frombuffer(dims, ">u4").tolist()), np.dtype(_TYPES[magic[2]])
    if 0 in shape:
        raise ValueError(f"{path}: no references (shape {shape})")
    shape = shape if limit is None else (min(limit, shape[0]), *shape[1:])
    expected = math.prod(shape) * dtype.itemsize
    data = bytearray()
    while len(data) < expected:  # in pieces: a false header must not make us allocate what it claims
        piece = file.read(min(_PIECE, expected - len(data)))
        if not piece:
            raise truncated(path, expected, len(data))
        data += piece
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def load_idx(path: Path, options: Options) -> Loaded:
    """Points of an idx file; labels from ``label``, or from the ``labels-idx1`` file beside an ``images-idx3``."""
    options.refuse(path, "an idx file", "key", "weights", "columns", "encoder", "size")
    array, notes = read_idx(path, options.limit), ()
    if array.dtype == np.uint8 and array.ndim >= 3:
        array, notes = array.astype(np.float32) / np.float32(255), ("pixels: uint8 / 255",)
    beside = path.with_name(path.name.replace("images-idx3", "labels-idx1"))
    label = options.label
    if label is None and beside != path and beside.is_file():
        label = str(beside)
    return Loaded(array, labels=None if label is None else read_idx(Path(label), options.limit), notes=notes)


def images_file(folder: Path, split: str | None = None) -> Path | None:
    """The images of a split (``train`` by default, ``t10k`` or ``test``) in a folder as MNIST's, or None."""
    split = "t10k" if split == "test" else split
    if split is not None and split not in _SPLITS:
        raise ValueError(f"{folder}: key: expected 'train' or 't10k', got {split!r}")
    names = [f"{s}-images-idx3-ubyte{gz}" for s in ([split] if split else ["train"]) for gz in ("", ".gz")]
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found and split and any(folder.glob("*-images-idx3-ubyte*")):
        raise MissingDataError(f"{folder}: has no {names[0]}(.gz)")
    return found[0] if found else None
