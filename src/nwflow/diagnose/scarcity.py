r"""Too few references: how the error falls as their number m grows, and what more of them would bring.

Random subsets of m / 2^k references answer the same held-out queries (t = 0 noise, t = 1 data); remedies are fitted to
the subset alone. Over the window the error is averaged and given over that of the linear denoiser at full size. A power
law e(m) = c m^-r through the three largest sizes extrapolates; the minimax exponent of smoothing in D dimensions,
4 / (4 + D), stands beside r (Stone 1982).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nwflow.diagnose.heldout import Problem
from nwflow.diagnose.measure import Measured, measure
from nwflow.diagnose.result import Interval, Predicted, Scarcity
from nwflow.diagnose.verdict import interval

SKILLS = (0.0, 0.25, 0.5, 0.75)  # of which the references needed are reported
_HALVINGS, _DRAWS, _REPEATS, _FOLDS = 5, 300, 3, 24


def learning_curve(problem: Problem, pools: dict[int, list[Tensor]] | None, full: Measured, remedy: str, unit: int,
                   progress: Callable[[str, float], None]) -> dict[str, list[tuple[float, Tensor]]]:  # fmt: skip
    """For the plug-in and ``remedy``: (median m, mean errors over the window of every query ``(Q,)``), m falling."""
    names = ["plug-in", remedy]
    sizes = [len(f.refs) for f in problem.folds]
    every = -(-len(sizes) // _FOLDS)
    out = {n: [(_median_size(problem), _per_query(problem, full, n, unit))] for n in names}
    generator = torch.Generator().manual_seed(problem.seed + 2)
    for k in range(1, _HALVINGS + 1):
        if max(sizes) // 2**k < 1:
            break
        per = {n: [] for n in names}
        repeats = _REPEATS if max(sizes) <= 2000 and len(problem.folds) <= 10 else 1
        for repeat in range(repeats):
            refs = {i: _subset(problem, i, k, generator) for i in range(0, len(problem.folds), every)}
            only = [] if remedy == "linear" else [remedy]
            fewer = None if pools is None else {f: [_halved(c, k, generator) for c in v] for f, v in pools.items()}
            part = measure(problem, fewer, lambda _stage, _share: None, only=only, refs=refs)
            if "plug-in" not in part.errors:
                break
            for n in names:
                per[n].append(_per_query(problem, part, n, unit))
            progress("learning curve", (k - 1 + (repeat + 1) / repeats) / _HALVINGS)
        if not per["plug-in"]:
            break
        for n in names:
            out[n].append((max(1.0, out[n][0][0] / 2**k), torch.stack(per[n]).mean(0)))
    return out


def _median_size(problem: Problem) -> float:
    return float(torch.tensor([len(f.train) for f in problem.folds], dtype=torch.float64).median())


def _subset(problem: Problem, i: int, k: int, generator: torch.Generator) -> Tensor:
    """A part of the references that may be fitted: what is left out stays left out."""
    rows = problem.folds[i].train
    return rows[torch.randperm(len(rows), generator=generator)[: max(1, len(rows) // 2**k)]]


def _halved(rows: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """A class of the pool at the same share; two of it stay, since one says nothing about its spread."""
    return rows[torch.randperm(len(rows), generator=generator)[: max(2, len(rows) // 2**k)]]


def _per_query(problem: Problem, measured: Measured, name: str, unit: int) -> Tensor:
    return measured.errors[name][unit][problem.window[unit]].mean(0)


def scarcity(curves: dict[str, list[tuple[float, Tensor]]], base: Tensor, remedy: str, dimension: float | None,
             seed: int, mmd: tuple[Predicted, ...] = ()) -> tuple[Scarcity, Interval | None]:  # fmt: skip
    """The record and the gauge.

    Args:
        curves: of :func:`learning_curve`. base: the linear denoiser's error of the queries at full size, ``(Q,)``.
        dimension: intrinsic. mmd: what was measured of samples.
    """
    done = torch.isfinite(base)
    for rows in curves.values():
        for _, values in rows:
            done = done & torch.isfinite(values)
    q = int(done.sum())
    if q == 0:
        return Scarcity((), (), (), remedy, None, _minimax(dimension), ()), None
    generator = torch.Generator().manual_seed(seed + 3)
    picks = torch.randint(q, (_DRAWS, q), generator=generator)
    counts = torch.cat([torch.ones(1, q), torch.stack([torch.bincount(p, minlength=q) for p in picks])]).double() / q
    mean = {n: [(m, counts @ v[done]) for m, v in rows] for n, rows in curves.items()}
    over = counts @ base[done]
    best = mean[remedy]
    lost, slope = None, None
    if len(best) > 1:
        lost = interval((1.0 - (best[0][1] / best[1][1]).square()).clamp(min=0.0))
        slope = _slope(best)
    needed = tuple((s, _needed(best, over, s, slope)) for s in SKILLS)
    record = Scarcity(
        _points(mean["plug-in"], over), _points(best, over), mmd, remedy,
        None if slope is None else interval(slope), _minimax(dimension), needed,
    )  # fmt: skip
    return record, lost


def _minimax(dimension: float | None) -> float | None:
    return None if dimension is None else 4.0 / (4.0 + dimension)


def _slope(rows: list[tuple[float, Tensor]]) -> Tensor:
    """Exponent r of e = c m^-r through up to three largest sizes, per draw."""
    some = rows[:3]
    x = torch.tensor([math.log(m) for m, _ in some], dtype=torch.float64)
    y = torch.stack([v.log() for _, v in some])
    x = x - x.mean()
    if float(x.square().sum()) == 0.0:
        return torch.zeros_like(y[0])
    return -(x[:, None] * (y - y.mean(0))).sum(0) / x.square().sum()


def _points(rows: list[tuple[float, Tensor]], over: Tensor) -> tuple[Predicted, ...]:
    """Measured sizes, smallest first, and four and sixteen times the largest."""
    out = []
    for m, v in reversed(rows):
        found = interval(v / over)
        if found is not None:
            out.append(Predicted(m, *found, extrapolated=False))
    if len(rows) > 1:
        slope = _slope(rows).clamp(min=0.0)
        for factor in (4.0, 16.0):
            found = interval(rows[0][1] / over * factor**-slope)
            if found is not None:
                out.append(Predicted(rows[0][0] * factor, *found, extrapolated=True))
    return tuple(out)


def _needed(rows: list[tuple[float, Tensor]], over: Tensor, skill: float, slope: Tensor | None) -> float | None:
    """References at which the error is 1 - skill of the linear denoiser's: the smallest size measured, or the power law
    up to a million times as many."""
    for m, v in reversed(rows):
        if float(v[0] / over[0]) <= 1.0 - skill:
            return m
    if slope is None or float(slope[0]) <= 0.0:
        return None
    log_factor = math.log(float(rows[0][1][0] / over[0]) / (1.0 - skill)) / float(slope[0])
    return rows[0][0] * math.exp(log_factor) if log_factor < math.log(1e6) else None
