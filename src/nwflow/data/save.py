"""Points to files: safetensors, npy, npz, Parquet or CSV by the extension, complete or not at all.

A file is written under a temporary name in the same folder and renamed. What made the points (path, seed, versions,
whether they are normalised) goes with them where the format has room: safetensors, npz and Parquet.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nwflow.data.arrays import METADATA, read_npz, safetensors_header
from nwflow.data.source import check_present


def save_points(
    path: str | Path,
    points: Any,
    metadata: Mapping[str, Any] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    force: bool = False,
) -> Path:
    """Write points ``(m, *event)``; :func:`~nwflow.data.load_support` reads them back with the same values and shape.

    Args:
        path: ``.safetensors``, ``.npz``, ``.npy``, ``.parquet`` or ``.csv``.
        metadata: what made the points; values that are no strings are stored as JSON. Dropped by ``.npy`` and ``.csv``.
        extra: further arrays by name (attribution, labels), for ``.safetensors`` and ``.npz``.
        force: replace a file that is there.

    Raises:
        FileExistsError: the file is there and ``force`` is False. FileNotFoundError: its folder is not.
        ValueError: an unknown extension, or a dtype, shape or extra array that the format cannot hold.
    """
    path = Path(path).expanduser()
    writers = {".safetensors": _safetensors, ".npz": _npz, ".npy": _npy, ".parquet": _parquet, ".csv": _csv}
    if path.suffix.lower() not in writers:
        raise ValueError(f"{path}: expected one of the extensions {', '.join(writers)}, got {path.suffix!r}")
    points = torch.as_tensor(points).detach().cpu()
    if points.ndim == 0:
        raise ValueError(f"{path}: points: expected shape (m, *event), got a scalar")
    arrays = {"points": points, **{k: torch.as_tensor(v).detach().cpu() for k, v in (extra or {}).items()}}
    if extra and path.suffix.lower() not in (".safetensors", ".npz"):
        raise ValueError(
            f"{path}: extra: {path.suffix} holds one array; use .safetensors or .npz for {', '.join(extra)}"
        )
    text = {str(k): v if isinstance(v, str) else json.dumps(v) for k, v in (metadata or {}).items()}
    return replace(path, lambda file: writers[path.suffix.lower()](file, arrays, text), force)


def replace(path: Path, write: Callable[[Path], None], force: bool = False) -> Path:
    """Let ``write`` fill a temporary file beside ``path``, then give it its name in one step."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise IsADirectoryError(f"{path}: is a folder, expected the name of a file")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}{path.suffix}")
    try:
        _refuse_existing(path, force)
        temporary.touch()  # with the permissions that the user's mask gives: some writers make private files
        mode = temporary.stat().st_mode & 0o777
        write(temporary)
        temporary.chmod(mode)
        _refuse_existing(path, force)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _refuse_existing(path: Path, force: bool) -> None:
    if not force and (path.exists() or path.is_symlink()):
        raise FileExistsError(f"{path}: is there already; force=True (--force) replaces it")


def _safetensors(path: Path, arrays: dict[str, Tensor], metadata: dict[str, str]) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous().clone() for name, tensor in arrays.items()}, path, metadata or None)


def _npz(path: Path, arrays: dict[str, Tensor], metadata: dict[str, str]) -> None:
    if METADATA in arrays:
        raise ValueError(f"extra: the name {METADATA!r} is taken in .npz files")
    plain: dict[str, Any] = {k: _numpy(v) for k, v in arrays.items()}
    plain[METADATA] = np.array(json.dumps(metadata))
    with path.open("wb") as file:
        np.savez(file, **plain)


def _npy(path: Path, arrays: dict[str, Tensor], metadata: dict[str, str]) -> None:
    np.save(path, _numpy(arrays["points"]), allow_pickle=False)


def _parquet(path: Path, arrays: dict[str, Tensor], metadata: dict[str, str]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    points = _numpy(arrays["points"])
    column = pa.array(points.reshape(-1))
    for width in points.shape[:0:-1]:
        column = pa.FixedSizeListArray.from_arrays(column, width)
    table = pa.table({"points": column})
    parquet.write_table(table.replace_schema_metadata({METADATA: json.dumps(metadata)}), path)


def _csv(path: Path, arrays: dict[str, Tensor], metadata: dict[str, str]) -> None:
    import pyarrow as pa
    from pyarrow import csv

    points = _numpy(arrays["points"])
    if points.ndim > 2:
        raise ValueError(f"points: a .csv holds vectors (m, d), got shape {points.shape}")
    columns = points.reshape(len(points), -1).T
    csv.write_csv(pa.table({f"x{i}": np.ascontiguousarray(c) for i, c in enumerate(columns)}), path)


def _numpy(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        raise ValueError("points: this format has no bfloat16; use .safetensors or convert to float32")
    return np.ascontiguousarray(tensor.numpy())


def read_metadata(path: str | Path) -> dict[str, str]:
    """What :func:`save_points` stored beside the points; empty for formats without room and for other files."""
    path = Path(path).expanduser()
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        return dict(safetensors_header(path).get("__metadata__") or {})
    if suffix == ".npz":
        (stored,) = read_npz(path, lambda names: [METADATA if METADATA in names else None])
        return {} if stored is None else _decoded(str(stored))
    if suffix == ".parquet":
        from pyarrow import parquet

        check_present(path, "a .parquet file")
        stored = (parquet.read_schema(path).metadata or {}).get(METADATA.encode())
        return _decoded(stored.decode()) if stored else {}
    return {}


def _decoded(text: str) -> dict[str, str]:
    try:
        values = json.loads(text)
    except ValueError:
        return {}
    return {str(k): str(v) for k, v in values.items()} if isinstance(values, dict) else {}
