r"""How good a model is on tasks that it has not seen: errors of its denoiser, and how far its samples are from the law.

*Denoising.* At bandwidths h = sigma / alpha evenly spaced in log over the tasks' scales, x_t = alpha x1 + sigma x0 with
x1 of the task's targets: the mean of |D(x_t) - x1|^2 / d, for the model and for the plug-in, the exact field of the
support. Its infimum is the posterior variance; the linear denoiser of a Gaussian of the tasks' scale s has s^2 h^2 /
(s^2 + h^2), and ``score`` is the mean over bandwidths of the model's error in units of it.

*Samples.* Euler steps on a uniform grid from noise (t = 0) to data (t = 1) for model and baseline from the same noise,
and for each task the unbiased MMD^2 between its samples and fresh points, Gaussian kernel, bandwidth the median
distance of the fresh points. Intervals are percentiles of a bootstrap over tasks; that of the ratio is paired: a task
counts in numerator and denominator alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nwflow.field import NWField
from nwflow.metrics import median_bandwidth, mmd2
from nwflow.models import ICFM, ICFMField
from nwflow.sample import sample
from nwflow.tasks import Family, TaskBatch
from nwflow.train.schedule import seeded

RESAMPLES = 2000
Interval = tuple[float, float, float]  # value, low, high


@dataclass(frozen=True)
class DenoisingErrors:
    """Errors |D - x1|^2 / d in squared data units, one a bandwidth (data units; ``log_snr`` = -2 log h)."""

    bandwidths: tuple[float, ...]
    log_snr: tuple[float, ...]
    errors: tuple[float, ...]
    plugin: tuple[float, ...] | None
    score: float

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of JSON types."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


@dataclass(frozen=True)
class Comparison:
    """MMD^2 of a model's samples to the law, beside a baseline's, averaged over tasks: [value, low, high] each.

    ``ratio`` is baseline over model: how many times smaller the model's is; None where resampled means of the unbiased
    estimate are not all positive. ``per_task`` and ``baseline_per_task`` are what the means are of.
    """

    mmd2: Interval
    baseline_mmd2: Interval | None
    ratio: Interval | None
    tasks: int
    samples: int
    steps: int
    seed: int
    ci: float
    baseline: str
    per_task: tuple[float, ...]
    baseline_per_task: tuple[float, ...] | None

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of JSON types."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


def denoising_errors(
    model: ICFM, tasks: TaskBatch, scale: float, *, bins: int = 9, seed: int = 0, plugin: bool = False,
    span: tuple[float, float] = (0.05, 10.0),
) -> DenoisingErrors:  # fmt: skip
    """Errors of a model's denoiser on ``tasks``, at ``bins`` bandwidths over ``span`` scales."""
    path, d = model.path, math.prod(tasks.event_shape)
    low, high = path.bandwidth_range
    ends = [math.log(min(max(scale * v, low), high)) for v in span]
    bandwidths = tuple(math.exp(ends[0] + (ends[1] - ends[0]) * k / (bins - 1)) for k in range(bins))
    field = NWField(tasks.supports(), path, accuracy=1e-3) if plugin else None
    x0 = torch.randn(tasks.target.shape, generator=seeded(seed, 0)).to(tasks.target)
    errors, others = [], []
    for h in bandwidths:
        t = path.time_at(h)
        at = path(t)
        x = at.alpha.item() * tasks.target + at.sigma.item() * x0

        def error(denoised: Tensor) -> float:
            return float((denoised - tasks.target).double().square().sum() / (len(tasks) * tasks.target.shape[1] * d))

        with torch.no_grad():
            errors.append(error(model.denoise(x, t, tasks.support, tasks.mask)))
            if field is not None:
                others.append(error(field.denoise(x, t)))
    linear = [scale**2 * h**2 / (scale**2 + h**2) for h in bandwidths]
    score = sum(e / v for e, v in zip(errors, linear, strict=True)) / bins
    log_snr = tuple(-2 * math.log(h) for h in bandwidths)
    return DenoisingErrors(bandwidths, log_snr, tuple(errors), tuple(others) if plugin else None, score)


def compare(
    model: ICFM,
    family: Family,
    support: Any,
    *,
    tasks: int = 100,
    samples: int = 500,
    steps: int = 100,
    seed: int = 0,
    baseline: Literal["plugin", "none"] = "plugin",
    ci: float = 0.95,
    batch: int = 10,
    advance: Callable[[int], None] | None = None,
) -> Comparison:
    """Sample ``tasks`` fresh tasks of a family with the model and with a baseline, and compare both with the law.

    Args:
        family: the part to draw from. support: size of supports, as for :meth:`nwflow.tasks.Family.sample`.
        samples: points of each task, generated and fresh.
        steps: Euler steps on the uniform grid, the same for both.
        baseline: ``plugin``, the exact field of the support.
        batch: tasks that are sampled together. advance: called with the number of tasks that are done.
    """
    for name, value, least in (("tasks", tasks, 1), ("samples", samples, 2), ("steps", steps, 1), ("batch", batch, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
    if baseline not in ("plugin", "none"):
        raise ValueError(f"baseline: expected 'plugin' or 'none', got {baseline!r}")
    if not 0 < ci < 1:
        raise ValueError(f"ci: expected a level between 0 and 1, got {ci}")
    device = next(model.parameters()).device
    mine: list[float] = []
    theirs: list[float] = []
    for start in range(0, tasks, batch):
        size = min(batch, tasks - start)
        drawn = family.sample(size, support, samples, seeded(seed, start)).to(device)
        found, other = _distances(model, drawn, steps, seed + start, baseline == "plugin")
        mine, theirs = mine + found, theirs + other
        if advance is not None:
            advance(size)
    own, their = torch.tensor(mine, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
    return Comparison(
        mmd2=_mean(own, seed, ci),
        baseline_mmd2=_mean(their, seed, ci) if theirs else None,
        ratio=paired_ratio(their, own, seed, ci) if theirs else None,
        tasks=tasks, samples=samples, steps=steps, seed=seed, ci=ci, baseline=baseline,
        per_task=tuple(mine), baseline_per_task=tuple(theirs) if theirs else None,
    )  # fmt: skip


def _distances(model: ICFM, tasks: TaskBatch, steps: int, seed: int, plugin: bool) -> tuple[list[float], list[float]]:
    supports, n = tasks.supports(), tasks.target.shape[1]
    bandwidths = [median_bandwidth(points) for points in tasks.target]

    def distances(field: Any) -> list[float]:
        with torch.no_grad():
            points = sample(field, n, steps=steps, method="euler", grid="uniform", seed=seed, attribution=0).points
        rows = zip(points, tasks.target, bandwidths, strict=True)
        return [mmd2(x, y, h).value for x, y, h in rows]

    return distances(ICFMField(model, supports)), distances(NWField(supports, model.path)) if plugin else []


def bootstrap(values: Tensor, seed: int) -> Tensor:
    """Means ``(RESAMPLES, ...)`` over tasks drawn with replacement from ``values`` ``(tasks, ...)``."""
    index = torch.randint(len(values), (RESAMPLES, len(values)), generator=torch.Generator().manual_seed(seed))
    return values[index].mean(1)


def _interval(value: float, resampled: Tensor, ci: float) -> Interval:
    level = torch.tensor([0.5 - ci / 2, 0.5 + ci / 2], dtype=torch.float64)
    low, high = resampled.quantile(level).tolist()
    return value, low, high


def _mean(values: Tensor, seed: int, ci: float) -> Interval:
    return _interval(float(values.mean()), bootstrap(values, seed), ci)


def paired_ratio(over: Tensor, under: Tensor, seed: int = 0, ci: float = 0.95) -> Interval | None:
    """mean(over) / mean(under) with its paired bootstrap interval over tasks; None unless all means below are positive.

    >>> paired_ratio(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 2.0]))
    (2.0, 2.0, 2.0)
    """
    means = bootstrap(torch.stack([over, under], 1).double(), seed)
    if not bool((means[:, 1] > 0).all()) or not float(under.mean()) > 0:
        return None
    return _interval(float(over.double().mean() / under.double().mean()), means[:, 0] / means[:, 1], ci)
