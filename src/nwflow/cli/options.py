"""The options that commands share, as dataclasses, and what they turn into: a support, a path and a field.

Paths run from noise at t = 0 to data at t = 1. Fields without a value mean "not given"; an option that has no meaning
beside the others is refused, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path as File
from typing import Annotated, Any, Literal

import torch
from rich.console import Console
from torch import Tensor
from tyro.conf import FlagCreatePairsOff, Positional, arg

from nwflow.data import check_same_scale, check_widths, list_images, load_support
from nwflow.data.files import is_dataset_folder
from nwflow.data.tables import TABLES, point_columns, read_table
from nwflow.field import NWField
from nwflow.metric import DiagonalMetric, FullMetric, LowRankMetric, Metric, Smoothing, shrunk_covariance
from nwflow.paths import CondOT, Cosine, Path, VarianceExploding, VariancePreserving
from nwflow.support import Support

LARGEST_MATRIX = 5000  # coordinates; a d x d matrix beyond takes too long to decompose
_PATHS: dict[str, tuple[type[Path], tuple[str, ...]]] = {
    "condot": (CondOT, ("sigma_min",)),
    "vp": (VariancePreserving, ("beta_min", "beta_max")),
    "cosine": (Cosine, ()),
    "ve": (VarianceExploding, ("sigma_min", "sigma_max")),
}
_DTYPES = {
    "float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16
}  # fmt: skip

Flag = Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")]


def optional(metavar: str) -> Any:
    """An option that may be left out: what its value is called, and no "(default: None)" in the help."""
    return arg(metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True)
class Source:
    """What the references are."""

    support: Annotated[Positional[str], arg(metavar="SUPPORT")]
    """File (.npy .npz .safetensors .pt .parquet .csv .arrow idx), folder of images, "digits" or "fashion-mnist"."""
    key: Annotated[str | None, optional("NAME")] = None
    """Array, column of vectors, or split, where there are several."""
    columns: Annotated[tuple[str, ...] | None, optional("NAME [NAME ...]")] = None
    """Columns of a table that are the coordinates."""
    label: Annotated[str | None, optional("NAME")] = None
    """Array or column with labels (for .npy and idx: a file)."""
    weights_column: Annotated[str | None, optional("NAME")] = None
    """Array or column with prior weights (for .npy and idx: a file)."""
    given: Annotated[tuple[str, ...] | None, optional("LABEL [LABEL ...]")] = None
    """Only the references with these labels."""
    limit: Annotated[int | None, optional("ROWS")] = None
    """Read the first rows only."""
    drop_nonfinite: Flag = False
    """Leave out rows with NaN or infinity; without it they are an error."""
    normalize: Flag = False
    """Divide each point by its norm."""
    size: Annotated[tuple[int, ...] | None, optional("PIXELS [PIXELS]")] = None
    """Resize images: side, or height and width."""
    encoder: Annotated[str | None, optional("FOLDER")] = None
    """Turn images into features with the vision transformer in a local folder."""

    def load(self, drop_nonfinite: bool = False) -> Support:
        """Everything that is read, before ``--given``."""
        return load_support(
            self.support,
            key=self.key,
            label=self.label,
            weights=self.weights_column,
            columns=self.columns,
            limit=self.limit,
            drop_nonfinite=self.drop_nonfinite or drop_nonfinite,
            encoder=self.encoder,
            size=self._side_or_sides(),
            normalize=self.normalize,
        )

    def _side_or_sides(self) -> int | tuple[int, int] | None:
        match self.size:
            case None:
                return None
            case (side,):
                return side
            case (height, width):
                return height, width
            case other:
                raise ValueError(f"--size: expected one number (side) or two (height width), got {len(other)}: {other}")

    def chosen(self, support: Support) -> Support:
        """The part of a support that ``--given`` asks for; labels are compared as text, all that a command line has."""
        if self.given is None:
            return support
        known = {str(name): name for name in support.label_names or ()}
        return support.given([known.get(label, label) for label in self.given])

    def names(self) -> list[str] | None:
        """Names of the rows, where they are image files."""
        folder = File(self.support).expanduser()
        if self.support in ("digits", "fashion-mnist") or not folder.is_dir() or is_dataset_folder(folder):
            return None
        return [path.relative_to(folder).as_posix() for path in list_images(folder)[0]] or None

    def column_names(self) -> list[str] | None:
        """Names of the coordinates, where they are columns of a table."""
        file = File(self.support).expanduser()
        if self.columns is not None or file.suffix.lower() not in TABLES or not file.is_file():
            return None if self.columns is None else list(self.columns)
        if self.key is not None:
            return None
        columns = point_columns(file, read_table(file), {self.label, self.weights_column})
        return columns if len(columns) > 1 else None

    def other(self, file: str, label: str | None = None) -> Source:
        """The same way of reading for a second file: all of its rows, without weights; names of arrays and columns,
        that of the labels included, where such a file has names."""
        kind = File(file).suffix.lower()
        named = kind in (*TABLES, ".npz", ".safetensors", ".pt", ".pth")
        key, columns = (self.key, self.columns) if named else (None, None)
        label = label or (self.label if named else None)
        return replace(
            self, support=file, key=key, columns=columns, label=label, given=None, limit=None, weights_column=None
        )


@dataclass(frozen=True)
class PathOptions:
    """The path from noise to data."""

    path: Literal["condot", "vp", "cosine", "ve"] = "condot"
    """condot: straight lines; vp: variance preserving, linear beta; cosine; ve: variance exploding."""
    sigma_min: Annotated[float | None, optional("SIGMA")] = None
    """Noise left at t = 1, in data units: condot (0) and ve (0.01)."""
    sigma_max: Annotated[float | None, optional("SIGMA")] = None
    """Noise at t = 0, in data units: ve (100)."""
    beta_min: Annotated[float | None, optional("BETA")] = None
    """Rate of noise at t = 1: vp (0.1)."""
    beta_max: Annotated[float | None, optional("BETA")] = None
    """Rate of noise at t = 0: vp (20)."""

    def build_path(self) -> Path:
        kind, takes = _PATHS[self.path]
        values = {name: getattr(self, name) for name in ("sigma_min", "sigma_max", "beta_min", "beta_max")}
        values = {name: value for name, value in values.items() if value is not None}
        if alien := [name for name in values if name not in takes]:
            options = " and ".join(_option(name) for name in takes) or "no option"
            raise ValueError(f"{_option(alien[0])}: no meaning for --path {self.path}, which takes {options}")
        return kind(**values)


@dataclass(frozen=True)
class FieldOptions(PathOptions):
    """The path from noise to data, and the field on it."""

    smoothing: Annotated[float | None, optional("H0")] = None
    """Replace every reference by a Gaussian of this width, so that samples lie between references, not on them."""
    smoothing_shape: Literal["isotropic", "covariance", "within-class"] = "isotropic"
    """Covariance of these Gaussians: H0^2 times I, the covariance of all rows, or that about the mean of each label."""
    metric: Literal["none", "diagonal", "full", "low-rank"] = "none"
    """Distances (and noise) by the covariance of all rows: their variances, all of it (shrunk), RANK components."""
    rank: Annotated[int | None, optional("RANK")] = None
    """Components of the low-rank metric (8)."""
    accuracy: Annotated[float | None, arg(metavar="TOLERANCE")] = 1e-3
    """Of the weights, in total variation; None: the fast float32 pass alone."""
    dtype: Annotated[Literal["float32", "float64", "float16", "bfloat16"] | None, optional("DTYPE")] = None
    """Convert the references to float32, float64, float16 or bfloat16."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps; auto: cuda where there is one."""

    def build(self, pool: Support, support: Support) -> NWField:
        """The field of ``support``; metric and covariance are fitted to ``pool``, everything that was read."""
        metric, smoothing = self._metric(pool), self._smoothing(pool)
        support = self.place(support)
        return NWField(support, self.build_path(), metric, smoothing, self.accuracy).to(support.device)

    def place(self, support: Support) -> Support:
        """The support on the device and in the dtype that are asked for."""
        return support.to(pick_device(self.device), None if self.dtype is None else _DTYPES[self.dtype])

    def _metric(self, pool: Support) -> Metric | None:
        if self.rank is not None and self.metric != "low-rank":
            raise ValueError(f"--rank: no meaning for --metric {self.metric}; expected --metric low-rank")
        if self.metric == "diagonal":
            return DiagonalMetric.fit(pool)
        if self.metric == "low-rank":
            return LowRankMetric.fit(pool, 8 if self.rank is None else self.rank)
        return FullMetric.fit(_fits(pool, "--metric full")) if self.metric == "full" else None

    def _smoothing(self, pool: Support) -> Smoothing | float | None:
        if self.smoothing is None:
            if self.smoothing_shape != "isotropic":
                raise ValueError("--smoothing-shape: expected --smoothing H0 with it")
            return None
        if self.smoothing_shape == "isotropic":
            return Smoothing.isotropic(self.smoothing)
        if not self.smoothing > 0:
            raise ValueError(f"--smoothing: expected a positive number, got {self.smoothing:g}")
        pool = _fits(pool, f"--smoothing-shape {self.smoothing_shape}")
        pool = within_class(pool) if self.smoothing_shape == "within-class" else pool
        return Smoothing.full(self.smoothing**2 * shrunk_covariance(pool))


def within_class(pool: Support) -> Support:
    """Every point minus the mean of its class."""
    if pool.labels is None:
        raise ValueError("--smoothing-shape within-class: expected references with labels (--label)")
    points = pool.points.to(torch.float64).reshape(pool.m, -1)
    means = torch.zeros(int(pool.labels.max()) + 1, points.shape[1], dtype=points.dtype)
    mass = torch.zeros(len(means), dtype=points.dtype).index_add_(0, pool.labels, pool.weights.to(points.dtype))
    means.index_add_(0, pool.labels, points * pool.weights.to(points.dtype)[:, None])
    return Support(points - (means / mass.clamp(min=torch.finfo(mass.dtype).tiny)[:, None])[pool.labels], pool.weights)


def _fits(pool: Support, option: str) -> Support:
    if pool.d > LARGEST_MATRIX:
        raise ValueError(
            f"{option}: needs a d x d matrix; expected d <= {LARGEST_MATRIX}, got {pool.d} (use --metric low-rank or "
            "--smoothing-shape isotropic, or features of an encoder)"
        )
    return pool


def pick_device(name: str) -> torch.device:
    """The device called ``name``, after a look whether it is there; auto is cuda where there is one, else cpu."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"--device: expected a device that torch has here, such as cpu, got {name!r}") from None
    return device


def load_queries(path: str, name: str, source: Source, support: Support) -> Tensor:
    """Points of a second file, normalised as the references are; refused unless they have their shape."""
    queries = load_support(path, normalize=source.normalize).points
    check_widths(queries, support, f"{name} {path}", f"support {source.support}")
    return queries.to(support.device, support.dtype)


def warn_of_scale(queries: Tensor, name: str, support: Support, source: Source) -> float:
    """Ratio of the mean norms, with a warning where only one side seems to be normalised."""
    return check_same_scale(queries, support, name, f"support {source.support}")


def say(console: Console, text: str) -> None:
    """A line that the terminal may wrap, so that paths stay whole."""
    console.print(text, soft_wrap=True)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Talk:
    """What is printed."""

    quiet: Annotated[FlagCreatePairsOff[bool], arg(aliases=("-q",), help_behavior_hint="")] = False
    """Say nothing on standard output; warnings and errors remain."""
    verbose: Annotated[FlagCreatePairsOff[bool], arg(aliases=("-v",), help_behavior_hint="")] = False
    """Say more: notes, times, every row of a table."""
    debug: Flag = False
    """Show the traceback of an error (also NWFLOW_DEBUG=1)."""
