"""Data sets by name: scikit-learn's digits, and Fashion-MNIST where it is installed. Nothing is downloaded."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from nwflow.data.idx import images_file, load_idx
from nwflow.data.source import Loaded, MissingDataError, Options

NAMES = ("digits", "fashion-mnist")
FASHION_MNIST_VARIABLE = "NWFLOW_FASHION_MNIST"
_FASHION_MNIST_FOLDERS = ("/usr/share/datasets/fashion-mnist",)  # where Debian's package dataset-fashion-mnist puts it


def load_bundled(name: str, options: Options) -> Loaded:
    """A bundled data set; ``key`` is the split of ``fashion-mnist`` (``train`` or ``t10k``)."""
    options.refuse(name, "a bundled set", "label", "weights", "columns", "encoder", "size")
    if name == "digits":
        options.refuse(name, "a set without splits", "key")
        return _digits(options)
    assert name == "fashion-mnist"
    return load_idx(fashion_mnist(options.key), Options(limit=options.limit))


def _digits(options: Options) -> Loaded:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = pixels.astype(np.float32).reshape(-1, 8, 8) / np.float32(16)
    return Loaded(options.first_rows(images), labels=options.first_rows(labels), notes=("pixels: 0..16 / 16",))


def fashion_mnist(split: str | None = None) -> Path:
    """The file of Fashion-MNIST's images.

    Raises:
        MissingDataError: it is not installed (a FileNotFoundError and a ValueError).
    """
    named = os.environ.get(FASHION_MNIST_VARIABLE)
    for folder in [named] if named else _FASHION_MNIST_FOLDERS:
        if Path(folder).is_dir() and (path := images_file(Path(folder), split)):
            return path
    where = f"in {named} ({FASHION_MNIST_VARIABLE})" if named else "installed"
    raise MissingDataError(
        f"fashion-mnist: not {where}; install Debian's package dataset-fashion-mnist, or set {FASHION_MNIST_VARIABLE} "
        "to the folder that holds train-images-idx3-ubyte.gz"
    )
