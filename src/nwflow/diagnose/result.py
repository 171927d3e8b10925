r"""What a diagnosis says: frozen records that go to JSON and back (``report.json``), read by the report alone.

Times run from t = 0, noise, to t = 1, data; log-SNR is log(alpha^2 s^2 / sigma^2) with s the data scale
sqrt(tr Cov / d), so that 0 is where noise and data are of one size. Errors are E|D - x_1|^2 of held-out points, in two
units: ``raw``, per coordinate over s^2 (1 is the error of the mean), and ``relative``, the mean over principal
directions of the error over that direction's own variance. Skill is 1 - error / error of the linear denoiser.
An interval is ``(value, low, high)`` at 95 %. What does not exist is None (null), never NaN.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

Interval = tuple[float, float, float]
FORMAT = 1
REGIMES = ("collapse", "geometry", "scarcity")


@dataclass(frozen=True)
class Verdict:
    """The answer: ``regime`` is healthy, collapse, geometry or scarcity; ``text`` two sentences; ``remedy`` the name of
    the remedy that helps most (None: none helps); ``unit`` the error unit that decided, ``raw`` or ``relative``."""

    regime: str
    text: str
    remedy: str | None
    unit: str


@dataclass(frozen=True)
class Regime:
    """One way to fail: share of the plug-in's error that its intervention removes, what that is, and one sentence."""

    skill_lost: Interval | None
    intervention: str
    text: str


@dataclass(frozen=True)
class Remedy:
    """One remedy on held-out points: mean ``skill`` over the window (0 the linear denoiser, 1 no error) with interval,
    ``error`` over the plug-in's own (below 1: better), what was fitted, and one sentence on what it does.

    ``own_path``: measured on the path whose noise has its metric, where skill is against the linear denoiser there.
    """

    name: str
    skill: float | None
    skill_low: float | None
    skill_high: float | None
    error: Interval | None
    settings: dict[str, Any]
    text: str
    own_path: bool = False


@dataclass(frozen=True)
class Curve:
    """Held-out errors of one denoiser at each log-SNR, both units, with intervals; ``skill`` in the verdict's unit."""

    name: str
    raw: tuple[Interval, ...]
    relative: tuple[Interval, ...]
    skill: tuple[Interval | None, ...]


@dataclass(frozen=True)
class Curves:
    """Everything along the path. ``window`` marks where the linear denoiser leaves more than 5 % of the variance: the
    part that decides. The weights' ``n_eff``, ``largest_weight`` and ``entropy`` (nats) are (median, 10 %, 90 %) over
    queries. ``denoisers`` starts with ``plug-in`` and ``linear``."""

    log_snr: tuple[float, ...]
    t: tuple[float, ...]
    bandwidth: tuple[float, ...]
    window: tuple[bool, ...]
    n_eff: tuple[Interval, ...]
    largest_weight: tuple[Interval, ...]
    entropy: tuple[Interval, ...]
    denoisers: tuple[Curve, ...]


@dataclass(frozen=True)
class Predicted:
    """A number at another size: ``at`` is m or d; ``extrapolated`` where it was not measured."""

    at: float
    value: float
    low: float
    high: float
    extrapolated: bool


@dataclass(frozen=True)
class Collapse:
    """``t``, ``bandwidth`` (data units) and ``log_snr`` where the median n_eff falls below 2 (None: nowhere);
    ``share`` of the window with n_eff < 3; intrinsic dimension by several estimators; ``contrast`` is the relative
    contrast (mean - nearest) / nearest of distances, ``distance_variation`` their standard deviation over mean;
    ``n_eff_log_snr`` is where n_eff by m and by d are read; ``copies`` the share of plug-in samples that are a
    reference, ``copies_held_out`` the same criterion on real held-out points."""

    t: float | None
    bandwidth: float | None
    log_snr: float | None
    share: Interval | None
    intrinsic_dimension: dict[str, float | None]
    contrast: float | None
    distance_variation: float | None
    n_eff_log_snr: float | None
    n_eff_by_m: tuple[Predicted, ...]
    n_eff_by_d: tuple[Predicted, ...]
    copies: Interval | None
    copies_held_out: Interval | None


@dataclass(frozen=True)
class Geometry:
    """``spectrum``: variances along principal directions over their sum, largest first (at most 256);
    ``participation_ratio`` (sum)^2 / sum of squares; ``condition`` largest / smallest non-zero; ``anisotropy`` (R -
    participation) / (R - 1) with R that of a round cloud of as many points, of all points and of neighbourhoods (0
    round, 1 a line; None: undefined); ``radial`` and ``tangential`` relative variation; ``scale_imbalance`` largest /
    smallest standard deviation of a column; ``columns``: the most extreme ones as (name, standard deviation)."""

    spectrum: tuple[float, ...]
    participation_ratio: float | None
    condition: float | None
    anisotropy: float | None
    local_anisotropy: float | None
    radial: float | None
    tangential: float | None
    scale_imbalance: float | None
    constant_columns: int
    columns: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Scarcity:
    """Learning curves over the number of references: error of the plug-in and of the best remedy over that of the
    linear denoiser at full size, and MMD^2 of plug-in samples to held-out points; ``exponent`` of error - floor ~
    m^-exponent of the best remedy beside ``minimax`` 4 / (4 + d) at the intrinsic dimension; ``needed`` references for
    a skill (None: not reachable by more of them)."""

    plug_in: tuple[Predicted, ...]
    best: tuple[Predicted, ...]
    mmd2: tuple[Predicted, ...]
    remedy: str | None
    exponent: Interval | None
    minimax: float | None
    needed: tuple[tuple[float, float | None], ...]


@dataclass(frozen=True)
class ClassRow:
    """One class as its own set of references: size, unique points, errors over the window, best remedy."""

    name: str
    n: int
    unique: int
    n_eff: float | None
    plug_in: float | None
    linear: float | None
    best: float | None
    remedy: str | None


@dataclass(frozen=True)
class Picture:
    """A small image: ``png`` in base64, a caption, and, for samples, the references that made it as (index into the
    gallery's references or -1, row, weight), and the ratio of its nearest distances (a copy below 1/3)."""

    png: str
    caption: str
    made_of: tuple[tuple[int, int, float], ...] = ()
    ratio: float | None = None


@dataclass(frozen=True)
class Gallery:
    """References beside samples of the plug-in and of the best remedy."""

    references: tuple[Picture, ...]
    plug_in: tuple[Picture, ...]
    remedy: tuple[Picture, ...]
    remedy_name: str | None


@dataclass(frozen=True)
class Data:
    """What was measured: ``n`` points of ``d`` numbers, ``unique`` of them; ``classes`` (name, size); ``queries``
    points were left out or held out in turn, each beside ``references`` others (median); ``scale`` sqrt(tr Cov / d)."""

    source: str
    n: int
    d: int
    event_shape: tuple[int, ...]
    unique: int
    classes: tuple[tuple[str, int], ...] | None
    constant_columns: int
    dropped: int
    queries: int
    references: int
    held_out: str | None
    image: bool
    scale: float
    mean_norm: float
    normalize: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """How to get this again."""

    command: str
    seed: int
    path: str
    versions: dict[str, str]
    seconds: float
    machine: str


@dataclass(frozen=True)
class Diagnosis:
    """A whole diagnosis; ``report.json`` is :meth:`to_json`, a stable contract with number ``format``."""

    format: int
    verdict: Verdict
    regimes: dict[str, Regime]
    remedies: tuple[Remedy, ...]
    curves: Curves | None
    data: Data
    run: Run
    collapse: Collapse | None
    geometry: Geometry | None
    scarcity: Scarcity | None
    classes: tuple[ClassRow, ...]
    gallery: Gallery | None = None

    def remedy(self, name: str) -> Remedy:
        """The remedy of that name."""
        for r in self.remedies:
            if r.name == name:
                return r
        raise ValueError(f"name: expected one of {[r.name for r in self.remedies]}, got {name!r}")

    def to_dict(self) -> dict[str, Any]:
        """Types of JSON alone; numbers that do not exist are None."""
        return _plain(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Diagnosis:
        """The record that :meth:`to_dict` wrote; ValueError for anything else."""
        if not isinstance(values, Mapping) or values.get("format") != FORMAT:
            found = values.get("format") if isinstance(values, Mapping) else type(values).__name__
            raise ValueError(f"values: expected a diagnosis of format {FORMAT}, got {found!r}")
        return _built(cls, values)

    @classmethod
    def from_json(cls, text: str) -> Diagnosis:
        return cls.from_dict(json.loads(text))


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _built(kind: Any, value: Any) -> Any:
    """``value`` as the annotation ``kind`` says, records and tuples inside included."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _built(next(k for k in inner if k is not type(None)), value)
    if origin is tuple:
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(_built(k, v) for k, v in zip(kinds, value, strict=True))
    if origin is dict:
        return {k: _built(inner[1], v) for k, v in value.items()}
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        names = {f.name for f in fields(kind)}
        if not isinstance(value, Mapping) or set(value) != names:
            found = sorted(value) if isinstance(value, Mapping) else value
            raise ValueError(
                f"values: expected the fields {sorted(names)} of {getattr(kind, '__name__', kind)}, got {found}"
            )
        return kind(**{k: _built(hints[k], v) for k, v in value.items()})  # type: ignore[operator]
    return value
