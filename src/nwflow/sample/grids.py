r"""Where a sampler evaluates: nodes of a path, and grids of times from t = 0 (noise) to t = 1 (data).

With r = alpha / sigma = 1/h, the scaled state y = x / sigma obeys dy/dr = D: nothing is singular at noise (r = 0), and
beyond the collapse D is constant. Both the default grid and the multistep integrators use the clock

    s = log(r + c),    c = 1 / (standard deviation of the data),

which is linear in r while the noise still hides the data (h >> 1/c) and becomes -log h below: uniform in log-bandwidth
over the window where the field is stiff, and regular at the very start. The default grid is uniform in s from t = 0 to
the bandwidth where every sample has collapsed,

    h_end = (distance of near neighbours in the support) / 6,    never below 1e-3 standard deviations of the data,

at which the logits of two such neighbours typically differ by 6^2 / 2; one step from there lands on the end of the
path. A step that would be longer than 0.35 (bandwidths in the ratio 1.4) misplaces samples among far references, so
with few steps the grid ends earlier and lands on blends of near references. Standard deviation and distance are
Euclidean norms of the whole event, sqrt(d) times what ``field.length_scales`` says.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from nwflow.paths import Path

__all__ = ["Grid", "Node", "Scales", "check_resolved", "nodes", "scales_of", "time_grid"]

LONGEST = 0.35  # of the clock, for a step of the default grid; trials on six data sets with 6 to 40 evaluations

Grid: TypeAlias = Literal["log_bandwidth", "log_snr", "uniform"]


@dataclass(frozen=True)
class Node:
    """A time of a path as Python floats, so that no float64 tensor reaches a device."""

    t: float
    alpha: float
    sigma: float
    d_alpha: float
    d_sigma: float

    @property
    def r(self) -> float:
        """alpha / sigma = 1/h; inf where sigma = 0."""
        return self.alpha / self.sigma if self.sigma > 0 else math.inf

    @property
    def bandwidth(self) -> float:
        """h = sigma / alpha; inf where alpha = 0."""
        return self.sigma / self.alpha if self.alpha > 0 else math.inf

    def clock(self, c: float) -> float:
        """s = log(r + c)."""
        return math.log(self.r + c)


def nodes(path: Path, times: Sequence[float]) -> list[Node]:
    """The path at each of ``times``, computed in float64 on the CPU."""
    at = path(torch.tensor(times, dtype=torch.float64))
    columns = (v.tolist() for v in (at.alpha, at.sigma, at.d_alpha, at.d_sigma))
    return [Node(*row) for row in zip(times, *columns, strict=True)]


@dataclass(frozen=True)
class Scales:
    """Euclidean lengths in data units: standard deviation of the data, and bandwidth at which all have collapsed."""

    data: float
    end: float

    @property
    def c(self) -> float:
        """Offset of the clock s = log(r + c)."""
        return 1 / self.data


def scales_of(field: Any, event_size: int) -> Scales:
    """The scales of a field's support; of data with unit variance, down to h = 0.002 each, where it has no support.

    A smoothed support is resolved down to a sixth of its smallest standard deviation, or the last step would remove the
    smoothing. A support of equal points has no scale: its denoiser is constant, and every grid is exact.
    """
    data, end = math.sqrt(event_size), 0.002 * math.sqrt(event_size)
    if hasattr(field, "length_scales"):
        spread, nearest = (float(v) * math.sqrt(event_size) for v in field.length_scales())
        if not math.isfinite(spread):
            raise ValueError("support: expected references whose squares do not overflow, got a spread that does")
        if spread > 0:
            data, end = spread, max(min(nearest, _smallest_deviation(field, event_size)) / 6, 1e-3 * spread)
    return Scales(data, min(end, data / 5))


def check_resolved(path: Path, at: Sequence[Node], scales: Scales) -> None:
    """ValueError where float64 cannot tell the nodes apart: near t = 1, times end at 1e-16, and so do bandwidths."""
    clocks = [node.clock(scales.c) for node in at]
    if all(a < b for a, b in pairwise(clocks)) and math.isfinite(clocks[-2]):
        return
    raise ValueError(
        f"support: expected references of a scale that times in float64 resolve on {path!r}, got a standard deviation "
        f"of {scales.data:.2g}; multiply the references by a constant"
    )


def _smallest_deviation(field: Any, d: int) -> float:
    """Smallest positive standard deviation of a field's smoothing, in the units of its noise; inf without smoothing."""
    smoothing, metric = getattr(field, "smoothing", None), getattr(field, "metric", None)
    if smoothing is None:
        return math.inf
    if metric is None and smoothing.variances is not None:
        variances = smoothing.variances
    else:
        covariance = smoothing.matrix(d)
        w = torch.eye(d, dtype=covariance.dtype, device=covariance.device)
        w = w if metric is None else metric.whiten(w)
        variances = torch.linalg.eigvalsh(w.mT @ covariance @ w)
    positive = variances[variances > 1e-12 * variances.max()]
    return float(positive.min().sqrt()) if len(positive) else math.inf


def time_grid(
    path: Path,
    intervals: int,
    grid: Grid | Sequence[float] | Tensor,
    scales: Scales,
    stop_at: float | None = None,
) -> list[float]:
    """Increasing times of ``intervals`` steps from 0 to 1, or to the time of bandwidth ``stop_at``; see `sample`.

    >>> from nwflow.paths import CondOT
    >>> [round(t, 2) for t in time_grid(CondOT(), 5, "log_bandwidth", Scales(data=2.0, end=0.8))]
    [0.0, 0.16, 0.3, 0.44, 0.56, 1.0]
    """
    if not isinstance(grid, str):
        if stop_at is not None:
            raise ValueError("stop_at: a given grid ends where its last time says; leave stop_at out")
        return given_times(grid)
    if grid not in get_args(Grid):
        raise ValueError(f"grid: expected one of {get_args(Grid)} or increasing times in [0, 1], got {grid!r}")
    low, high = path.bandwidth_range
    if stop_at is not None and not (0 < stop_at < high and stop_at >= low):
        raise ValueError(f"stop_at: expected a bandwidth above 0, in [{low}, {high}) on {path!r}, got {stop_at}")
    last = 1.0 if stop_at is None else float(path.time_at(float(stop_at)))
    if grid == "uniform":
        return [last * k / intervals for k in range(intervals)] + [last]
    end = max(scales.end, low) if stop_at is None else float(stop_at)
    lands = stop_at is None and end > low  # the last step goes from h_end to the end of the path
    inner = intervals - 1 if lands else intervals
    if inner == 0:
        return [0.0, last]
    if grid == "log_bandwidth":
        rates = _uniform_clock(1 / high, 1 / end, scales.c, inner, LONGEST if lands else math.inf)
    else:  # log_snr: straight to h of ten standard deviations, where noise still hides all
        rates = _log_snr(1 / high, 1 / end, 0.1 / scales.data, inner)
    times = [0.0] + [float(path.time_at(1 / r)) for r in rates[1:]]
    if not lands:
        times[-1] = last
    return times + [last] * lands


def _uniform_clock(first: float, last: float, c: float, intervals: int, longest: float) -> list[float]:
    a = math.log(first + c)
    step = min((math.log(last + c) - a) / intervals, longest)
    end = last if step < longest else math.exp(a + step * intervals) - c
    return [math.exp(a + step * k) - c for k in range(intervals)] + [end]


def _log_snr(first: float, last: float, start: float, intervals: int) -> list[float]:
    """From noise straight to r = ``start``, then uniform in log r; from noise itself where that is above ``start``."""
    start = max(first, min(start, last / 2))
    jump = first < start and intervals > 1
    a, b, n = math.log(start), math.log(last), intervals - jump
    return [first] * jump + [math.exp(a + (b - a) * k / n) for k in range(n)] + [last]


def given_times(grid: Sequence[float] | Tensor) -> list[float]:
    """Times as the caller gave them, checked: one axis, at least two, increasing, in [0, 1]."""
    values = grid.detach().cpu().double() if isinstance(grid, Tensor) else torch.tensor(grid, dtype=torch.float64)
    if values.ndim != 1 or len(values) < 2:
        raise ValueError(f"grid: expected at least two times on one axis, got shape {tuple(values.shape)}")
    times = values.tolist()
    if not all(0 <= t <= 1 for t in times):
        raise ValueError(f"grid: expected times in [0, 1] (0 is noise, 1 is data), got {times[0]} to {times[-1]}")
    for a, b in pairwise(times):
        if not a < b:
            raise ValueError(f"grid: expected increasing times (0 is noise, 1 is data), got {a} before {b}")
    return times
