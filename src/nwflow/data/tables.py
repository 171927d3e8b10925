"""Tables as supports: Parquet, CSV, Arrow/Feather files and folders saved by Hugging Face ``datasets``.

Points are one column of vectors (lists of one length, nested for images), or all numeric columns side by side. Which
columns were taken is said in the notes. Everything is read by pyarrow alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nwflow.data.source import Loaded, Options, check_present, choose, first, not_a, truncated

TABLES = (".parquet", ".csv", ".tsv", ".feather", ".arrow")
_MAGIC = {".parquet": (b"PAR1",), ".feather": (b"ARROW1", b"FEA1"), ".arrow": (b"ARROW1",)}


def read_table(path: Path) -> Any:
    """A file as a ``pyarrow.Table``; ValueError in one sentence where it is not what its name says."""
    import pyarrow as pa

    suffix = path.suffix.lower()
    head = check_present(path, f"a {suffix} file")
    try:
        if suffix in (".csv", ".tsv"):
            return _read_csv(path, "," if suffix == ".csv" else "\t")
        _check_ends(path, head, suffix)
        if suffix == ".parquet":
            from pyarrow import parquet

            return parquet.ParquetFile(path, memory_map=True).read()
        return _read_arrow(path, head)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError, EOFError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path}: is not a readable {suffix} file ({_line(error)})") from None


def _check_ends(path: Path, head: bytes, suffix: str) -> None:
    """Parquet and Arrow files carry their magic at both ends, so a cut file shows."""
    magic = next((m for m in _MAGIC[suffix] if head.startswith(m)), None)
    if magic is None:
        if suffix == ".arrow" and head.startswith(b"\xff\xff\xff\xff"):  # an Arrow stream: it ends where it ends
            return
        raise not_a(path, head, f"a {suffix} file")
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - len(magic)))
        if path.stat().st_size < 2 * len(magic) or file.read() != magic:
            raise truncated(path)


def _read_csv(path: Path, delimiter: str) -> Any:
    from pyarrow import csv

    parse = csv.ParseOptions(delimiter=delimiter)
    table = csv.read_csv(path, parse_options=parse)
    if table.column_names and all(_is_number(name) for name in table.column_names):  # the first row is no header
        table = csv.read_csv(path, csv.ReadOptions(autogenerate_column_names=True), parse)
    return table


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _read_arrow(path: Path, head: bytes) -> Any:
    import pyarrow as pa
    from pyarrow import feather, ipc

    if head.startswith(b"FEA1"):
        return feather.read_table(path)
    source = pa.memory_map(str(path))
    opened = ipc.open_file(source) if head.startswith(b"ARROW1") else ipc.open_stream(source)
    return opened.read_all()


def load_table(path: Path, options: Options) -> Loaded:
    """Points of a table file; ``key`` or ``columns`` choose columns, ``label`` and ``weights`` name one each."""
    options.refuse(path, "a file that is no image folder", "encoder", "size")
    if options.key is not None and options.columns is not None:
        raise ValueError(f"{path}: key, columns: expected one of the two, got both")
    if options.key is not None:
        options = replace(options, columns=[options.key])
    return from_table(path, read_table(path), options)


def from_table(path: Path, table: Any, options: Options, classes: Sequence[str] | None = None) -> Loaded:
    """Points of a ``pyarrow.Table``; ``classes`` are the names of integer labels."""
    for column in options.columns or ():
        choose(path, table.column_names, column, "columns")
    table, labels, weights = labels_and_weights(path, table, options, classes)
    chosen = options.columns or point_columns(path, table, {options.label, options.weights})
    left = [n for n in table.column_names if n not in (*chosen, options.label, options.weights)]
    notes = (f"columns: {first(chosen)}", *([f"columns left out: {first(left)}"] if left else []))
    return Loaded(_stack(path, table, chosen), labels, weights, notes)


def labels_and_weights(path: Path, table: Any, options: Options, classes: Sequence[str] | None) -> tuple[Any, Any, Any]:
    """The first ``limit`` rows of a table, and their labels and weights."""
    names, label, weights = table.column_names, options.label, options.weights
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise ValueError(f"{path}: has several columns called {first(twice)}")
    table = table.slice(0, options.limit)
    if table.num_rows == 0:
        raise ValueError(f"{path}: no references (zero rows, columns {first(names)})")
    if label is not None:
        label = _labels(path, table.column(choose(path, names, label, "label")), label, classes)
    if weights is not None:
        weights = _numbers(path, table.column(choose(path, names, weights, "weights")), weights)
    return table, label, weights


def point_columns(path: Path, table: Any, taken: set[str | None]) -> list[str]:
    """The only column of vectors, else every numeric column."""
    kinds = {f.name: _kind(f.type) for f in table.schema if f.name not in taken and f.name != "__index_level_0__"}
    vectors = [name for name, kind in kinds.items() if kind == "vector"]
    if len(vectors) > 1:
        raise ValueError(f"{path}: has several columns of vectors, choose one with key=: {first(vectors)}")
    numeric = vectors or [name for name, kind in kinds.items() if kind == "number"]
    if not numeric and any(f.type == "null" for f in table.schema):
        raise ValueError(f"{path}: no references (every number is missing or NaN; columns {first(table.column_names)})")
    if not numeric:
        raise ValueError(f"{path}: no numeric column and no column of vectors (columns: {first(table.column_names)})")
    return numeric


def _kind(dtype: Any) -> str:
    from pyarrow import types

    if types.is_integer(dtype) or types.is_floating(dtype) or types.is_boolean(dtype) or types.is_decimal(dtype):
        return "number"
    inner = getattr(dtype, "storage_type", dtype)
    depth = 0
    while types.is_list(inner) or types.is_large_list(inner) or types.is_fixed_size_list(inner):
        inner, depth = inner.value_type, depth + 1
    return "vector" if depth and _kind(inner) == "number" else "other"


def _stack(path: Path, table: Any, columns: Sequence[str]) -> np.ndarray:
    arrays = [_numbers(path, table.column(name), name) for name in columns]
    if len(arrays) == 1 and arrays[0].ndim > 1:
        return arrays[0]
    vectors = [name for name, a in zip(columns, arrays, strict=True) if a.ndim > 1]
    if vectors:
        raise ValueError(
            f"{path}: columns: expected numbers or one column of vectors, got {vectors[0]!r} beside others"
        )
    return np.stack(arrays, axis=1)


def _numbers(path: Path, column: Any, name: str) -> np.ndarray:
    """A column as ``(m,)`` or ``(m, *event)``; a missing number or vector is NaN."""
    kind = _kind(column.type)
    if kind == "other":
        raise ValueError(f"{path}: column {name!r}: expected numbers or vectors, got {column.type}")
    array = column.combine_chunks()
    array = array.chunk(0) if hasattr(array, "chunk") else array
    return _flat(array) if kind == "number" else _nested(path, getattr(array, "storage", array), name)


def _flat(array: Any) -> np.ndarray:
    import pyarrow as pa

    if pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    if array.null_count and not pa.types.is_floating(array.type):
        array = array.cast(pa.float64())
    return array.to_numpy(zero_copy_only=False)


def _nested(path: Path, array: Any, name: str) -> np.ndarray:
    """Lists of lists of one shape as an array; rows that are missing become NaN."""
    import pyarrow as pa

    if _kind(array.type) == "number":
        return _flat(array)
    present = array.is_valid().to_numpy(zero_copy_only=False)
    kept = array if present.all() else array.filter(pa.array(present))
    lengths = _lengths(kept)
    if len(lengths) > 1:
        raise ValueError(f"{path}: column {name!r}: ragged vectors, of lengths {lengths[0]} to {lengths[-1]}")
    if not lengths or lengths[0] == 0:
        raise ValueError(f"{path}: column {name!r}: no references (every vector is empty or missing)")
    inner = _nested(path, kept.flatten(), name)
    rows = inner.reshape(len(kept), lengths[0], *inner.shape[1:])
    if present.all():
        return rows
    full = np.full((len(array), *rows.shape[1:]), np.nan, dtype=np.result_type(rows.dtype, np.float32))
    full[present] = rows
    return full


def _lengths(array: Any) -> list[int]:
    """The distinct lengths of the lists of an array, sorted."""
    from pyarrow import types

    if types.is_fixed_size_list(array.type):
        return [array.type.list_size] if len(array) else []
    return np.unique(array.value_lengths().to_numpy(zero_copy_only=False)).tolist()


def _labels(path: Path, column: Any, name: str, classes: Sequence[str] | None) -> list[Any]:
    values = column.to_pylist()
    missing = [i for i, v in enumerate(values) if v is None]
    if missing:
        raise ValueError(f"{path}: column {name!r}: {len(missing)} labels missing, first at index {missing[0]}")
    return values if classes is None else [classes[v] for v in values]


def _line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


# -- folders saved by Hugging Face datasets ---------------------------------------------------------------------------


def is_dataset_folder(folder: Path) -> bool:
    """True for what ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk`` writes."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def read_dataset_folder(folder: Path, key: str | None) -> tuple[Path, Any, dict[str, Any]]:
    """The split's folder, its ``pyarrow.Table`` and its features; ``key`` names the split where there are several."""
    if (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json").get("splits", [])
        folder = folder / _local(folder, choose(folder, splits, key))
    elif key is not None:
        raise ValueError(f"{folder}: key: this data set has no splits, got {key!r} (columns are chosen with columns=)")
    state = _json(folder / "state.json")
    table = _arrow_files(folder, state.get("_data_files") or [])
    if state.get("_indices_files"):
        table = table.take(_arrow_files(folder, state["_indices_files"]).column(0))
    info = folder / "dataset_info.json"
    return folder, table, (_json(info).get("features") or {}) if info.is_file() else {}


def class_labels(features: dict[str, Any]) -> dict[str, list[str]]:
    """Names of the classes of every ``ClassLabel`` column."""
    labels = {k: v for k, v in features.items() if isinstance(v, dict) and v.get("_type") == "ClassLabel"}
    return {k: v["names"] for k, v in labels.items() if isinstance(v.get("names"), list)}


def _arrow_files(folder: Path, entries: list[dict[str, str]]) -> Any:
    import pyarrow as pa

    tables = []
    for entry in entries:
        path = folder / _local(folder, entry["filename"])
        head = check_present(path, "an Arrow file")
        try:
            tables.append(_read_arrow(path, head))
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path}: file is truncated or not an Arrow file ({_line(error)})") from None
    if not tables:
        raise ValueError(f"{folder}: no references (the data set lists no files)")
    return pa.concat_tables(tables)


def _local(folder: Path, name: str) -> str:
    if Path(name).name != name or name in ("", ".", ".."):
        raise ValueError(f"{folder}: names {name!r}, which lies outside of the folder; refused")
    return name


def _json(path: Path) -> dict[str, Any]:
    check_present(path, "a data set description")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ValueError(f"{path}: is not readable JSON") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
