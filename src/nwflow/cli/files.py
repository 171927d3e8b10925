"""What a command writes: which files, whether they may be written, and what each says of its origin.

All names are checked before anything is computed, every file is written under a temporary name and renamed, and each
carries the run that made it: command, path, seed, accuracy, versions and the convention t = 0 noise, t = 1 data.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, PngImagePlugin

import nwflow
from nwflow.data.save import replace

CONVENTION = "t=0 noise, t=1 data"
EXTENSIONS = (".safetensors", ".npz", ".npy", ".parquet", ".csv")
CARRIES_ARRAYS, CARRIES_METADATA = (".safetensors", ".npz"), (".safetensors", ".npz", ".parquet")


def check_outputs(paths: Sequence[Path], force: bool, event_shape: Sequence[int] = ()) -> None:
    """Refuse what could not be written, before time is spent on it; ``paths[0]`` is that of the points."""
    points = paths[0]
    suffix = points.suffix.lower()
    if suffix not in EXTENSIONS:
        known, got = ", ".join(EXTENSIONS), points.suffix or "none"
        raise ValueError(f"--out {points}: expected one of the extensions {known}, got {got}")
    if suffix == ".csv" and len(event_shape) > 1:
        shape, others = tuple(event_shape), ", ".join(e for e in EXTENSIONS if e != ".csv")
        raise ValueError(f"--out {points}: a .csv holds vectors, got events of shape {shape}; expected one of {others}")
    if not points.parent.is_dir():
        raise FileNotFoundError(f"--out {points}: the folder {points.parent} does not exist")
    if points.is_dir():
        raise IsADirectoryError(f"--out {points}: is a folder, expected the name of a file")
    refuse_existing(paths, force)
    if not os.access(points.parent, os.W_OK | os.X_OK):
        raise PermissionError(f"--out {points}: no file may be written in the folder {points.parent}")


def refuse_existing(paths: Sequence[Path], force: bool) -> None:
    """FileExistsError that names those that are there, unless they may be replaced."""
    there = [str(path) for path in paths if path.exists() or path.is_symlink()]
    if there and not force:
        raise FileExistsError(f"--out: {', '.join(there)}: there already; --force replaces")


@contextlib.contextmanager
def output_folder(folder: Path, names: Sequence[str], force: bool) -> Iterator[list[Path]]:
    """The paths of files in a folder that is made where it is missing, and taken away again if nothing was written."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"--out {folder}: is a file, expected a folder")
    paths, made = [folder / name for name in names], not folder.exists()
    refuse_existing(paths, force)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"--out {folder}: no file may be written there")
        yield paths
    except BaseException:
        if made and not any(folder.iterdir()):
            folder.rmdir()
        raise


def versions() -> dict[str, str]:
    """Versions that results depend on."""
    libraries = {"nwflow": nwflow.__version__, "torch": torch.__version__, "numpy": np.__version__}
    return {**libraries, "python": platform.python_version()}


def run_record(command: Sequence[str], **facts: Any) -> dict[str, Any]:
    """What made a file, as JSON values; nothing that changes when the same command runs again."""
    return {"command": shlex.join(["nwflow", *command]), "convention": CONVENTION, **facts, "versions": versions()}


def write_text(path: Path, text: str, force: bool) -> Path:
    """A text file, whole or not at all."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    return replace(path, write, force)


def write_json(path: Path, value: Any, force: bool) -> Path:
    """Strict JSON (no NaN), whole or not at all."""
    return write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n", force)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], force: bool) -> Path:
    """Rows with equal keys as a table; None is an empty cell."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return write_text(path, text.getvalue(), force)


def write_png(path: Path, image: Image.Image, record: Mapping[str, Any], force: bool) -> Path:
    """A picture with the run's record in its text chunks."""
    info = PngImagePlugin.PngInfo()
    for key, value in record.items():
        info.add_itxt(f"nwflow:{key}", value if isinstance(value, str) else json.dumps(value))
    return replace(path, lambda temporary: image.save(temporary, "PNG", pnginfo=info, optimize=True), force)
