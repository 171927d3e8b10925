"""One door for every source of points: files, folders and bundled data sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nwflow._convert import as_points
from nwflow.data.arrays import load_npy, load_npz, load_pt, load_safetensors
from nwflow.data.bundled import NAMES, load_bundled
from nwflow.data.checks import unit_norm
from nwflow.data.encoders import load_encoder
from nwflow.data.idx import images_file, is_idx, load_idx
from nwflow.data.images import Encoder, list_images, load_images, stack_images
from nwflow.data.save import read_metadata
from nwflow.data.source import Loaded, MissingDataError, Options, choose
from nwflow.data.tables import (
    TABLES,
    class_labels,
    from_table,
    is_dataset_folder,
    labels_and_weights,
    load_table,
    read_dataset_folder,
)
from nwflow.support import Support

_ARRAYS = {".npz": load_npz, ".safetensors": load_safetensors, ".pt": load_pt, ".pth": load_pt}
_KNOWN = (".npy", *_ARRAYS, *TABLES, ".idx", "-ubyte(.gz)")
NORMALIZED = "normalized"  # the key under which a file says that its points have unit norm


def load_support(
    source: str | Path,
    *,
    key: str | None = None,
    label: str | None = None,
    weights: str | None = None,
    columns: Sequence[str] | None = None,
    limit: int | None = None,
    drop_nonfinite: bool = False,
    encoder: Encoder | str | Path | None = None,
    size: int | tuple[int, int] | None = None,
    normalize: bool = False,
) -> Support:
    """The support in a file or a folder, or a bundled one by name.

    ======================================  ==========================================================================
    source                                  points, labels
    ======================================  ==========================================================================
    ``"digits"``                            scikit-learn's digits ``(1797, 8, 8)`` in [0, 1], labelled
    ``"fashion-mnist"``                     ``(60000, 28, 28)`` in [0, 1], labelled, where it is installed
    ``.npy``, ``.npz``                      one array (``key``); never a pickle; ``.npy`` is memory-mapped
    ``.safetensors``, ``.pt``, ``.pth``     one tensor (``key``), bfloat16 included; ``.pt`` holds tensors only
    ``.parquet``, ``.csv``, ``.tsv``,       one column of vectors (``key``), or numeric columns side by side
    ``.feather``, ``.arrow``                (``columns``)
    idx, plain or gzipped                   ``-images-idx3-ubyte`` with the labels beside it, or a folder of such files
    folder of Hugging Face datasets         as a table; ``key`` is the split; images are decoded
    folder of images                        ``(m, C, H, W)`` in [0, 1]; class subfolders are labels
    ======================================  ==========================================================================

    Args:
        source: a path, or the name of a bundled set (a file of that name is reached as ``./digits``).
        key: which array, column or split.
        label, weights: the array or column with labels and prior weights (for ``.npy`` and idx: the path of a file).
        columns: which columns of a table are coordinates.
        limit: read the first ``limit`` rows only.
        drop_nonfinite: drop rows with NaN or infinity in place of raising.
        encoder: maps pixels ``(B, C, H, W)`` to features ``(B, d)``; a callable or a local transformers folder.
        size: resize images to ``size`` or ``(height, width)``.
        normalize: divide each point by its Euclidean norm.

    Raises:
        ValueError: the file is not what its name says, empty, truncated, or would need code to be read; several arrays
            and no ``key``; an option without meaning for this source; points that :class:`Support` refuses.
        FileNotFoundError: nothing is there (also a ValueError).

    Example:
        >>> load_support("digits", limit=100)
        Support(100 points of (8, 8), float32, 10 labels)
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit: expected at least 1, got {limit}")
    path = source if isinstance(source, str) and source in NAMES else _existing(source)
    if isinstance(encoder, (str, Path)):
        encoder = load_encoder(encoder)
    options = Options(key, label, weights, columns, limit, encoder, size)
    loaded = load_bundled(path, options) if isinstance(path, str) else _load(path, options)
    try:
        return _support(loaded, _stored_notes(path), drop_nonfinite, normalize)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{source}: {error}") from None


def _support(loaded: Loaded, stored: tuple[str, ...], drop_nonfinite: bool, normalize: bool) -> Support:
    points, notes = as_points(loaded.points)
    notes = [*loaded.notes, *notes, *stored]
    if points.ndim == 0:
        raise ValueError("expected points of shape (m, *event), got a single number")
    if normalize:
        points, notes = unit_norm(points), [*notes, "normalized: each point divided by its Euclidean norm"]
    return Support(points, loaded.weights, loaded.labels, drop_nonfinite=drop_nonfinite, notes=notes)


def _stored_notes(path: str | Path) -> tuple[str, ...]:
    if isinstance(path, str) or path.is_dir():
        return ()
    said = read_metadata(path).get(NORMALIZED, "false").lower()
    return ("normalized: the file says that its points have unit norm",) if said in ("true", "1") else ()


def _existing(source: str | Path) -> Path:
    if not isinstance(source, (str, Path)):
        raise TypeError(f"source: expected a path or one of {', '.join(NAMES)}, got {type(source).__name__}")
    if "://" in str(source):
        raise ValueError(f"{source}: expected a local path, got a URL; nothing is downloaded")
    path = Path(source).expanduser()
    if not path.exists() and not path.is_symlink():
        raise MissingDataError(f"{source}: no such file or folder, and no bundled set ({', '.join(NAMES)})")
    return path


def _load(path: Path, options: Options) -> Loaded:
    if path.is_dir():
        return _load_folder(path, options)
    suffix = path.suffix.lower()
    if suffix in TABLES:
        return load_table(path, options)
    if is_idx(path):
        return load_idx(path, options)
    options.refuse(path, f"a {suffix} file", "columns", "encoder", "size")
    if suffix in _ARRAYS:
        return _ARRAYS[suffix](path, options)
    if suffix == ".npy":
        options.refuse(path, "a .npy file, which holds one array", "key")
        return load_npy(path, options)
    raise ValueError(f"{path}: expected one of the extensions {', '.join(_KNOWN)}, got {suffix or 'none'!r}")


def _load_folder(path: Path, options: Options) -> Loaded:
    if is_dataset_folder(path):
        return _load_dataset(path, options)
    if images := images_file(path, options.key) if any(path.glob("*-images-idx3-ubyte*")) else None:
        return load_idx(images, replace(options, key=None))
    if list_images(path)[0]:
        return load_images(path, options)
    raise ValueError(
        f"{path}: no references: neither images, nor class subfolders of images, nor idx files, nor a saved data set"
    )


def _load_dataset(folder: Path, options: Options) -> Loaded:
    split, table, features = read_dataset_folder(folder, options.key)
    classes = class_labels(features)
    if options.label is None and len(classes) == 1:
        options = replace(options, label=next(iter(classes)))
    names = classes.get(options.label or "")
    images = [k for k, v in features.items() if isinstance(v, dict) and v.get("_type") == "Image"]
    asked = list(options.columns or images)
    if not (asked and set(asked) <= set(images)):
        options.refuse(split, "a data set without images", "encoder", "size")
        return from_table(split, table, options, names)
    image = choose(split, asked, None, "columns")
    table, labels, weights = labels_and_weights(split, table, options, names)
    encoded: list[Any] = [(row or {}).get("bytes") for row in table.column(image).to_pylist()]
    if missing := [i for i, b in enumerate(encoded) if not b]:
        raise ValueError(f"{split}: {len(missing)} images are not in column {image!r}, first at index {missing[0]}")
    points, notes = stack_images(split, encoded, options)
    return Loaded(points, labels, weights, (f"columns: {image}", *notes))
