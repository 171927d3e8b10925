r"""Fidelity and diversity by nearest-neighbour balls: precision, recall, density and coverage.

With references :math:`r_1..r_m`, samples :math:`s_1..s_n`, :math:`B(r_i)` the closed ball around :math:`r_i` that
reaches its k-th nearest other reference, and :math:`B(s_j)` likewise among the samples,

.. math::
    \mathrm{precision} = \tfrac1n \textstyle\sum_j 1[\exists i: s_j \in B(r_i)], \qquad
    \mathrm{recall} = \tfrac1m \textstyle\sum_i 1[\exists j: r_i \in B(s_j)], \\
    \mathrm{density} = \tfrac1{k n} \textstyle\sum_{j, i} 1[s_j \in B(r_i)], \qquad
    \mathrm{coverage} = \tfrac1m \textstyle\sum_i 1[\exists j: s_j \in B(r_i)]

(Kynkaanniemi et al. 2019, arXiv 1904.06991; Naeem et al. 2020, arXiv 2002.09797). Density can exceed 1. When both laws
are equal and continuous, a reference is not covered exactly when its k nearest points of all others are references, so
that

.. math:: \mathbb E[\mathrm{coverage}] = 1 - \prod_{i=1}^{k} \frac{m - i}{m + n - i} \qquad (\approx 1 - 2^{-k}, n = m):

the value to compare with, not 1. Equal up to rounding counts as inside. Both sets live at the data end, ``t = 1``.

Uncertainty. Both sets are cut into random groups and each group is left out once (delete-a-group jackknife,
conservative); counts per ball and group make that a single pass over tiles. The radii stay those of the whole sets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import one_hot

from nwflow.metrics._points import Cloud, as_pair, relative_rounding
from nwflow.metrics._result import Result, check_count, check_level, jackknife_variance, normal_interval, random_groups


@dataclass(frozen=True, kw_only=True)
class CoverageResult(Result):
    """Precision, recall, density and coverage of ``n`` samples against ``m`` references.

    Each has an interval of level ``ci``, cut to the range it can take ([0, 1]; density from 0 up). ``standard_errors``
    are in the order precision, recall, density, coverage. ``coverage_if_equal`` is what coverage is on average when
    the samples follow the law of the references.
    """

    precision: float
    recall: float
    density: float
    coverage: float
    precision_interval: tuple[float, float]
    recall_interval: tuple[float, float]
    density_interval: tuple[float, float]
    coverage_interval: tuple[float, float]
    standard_errors: tuple[float, ...]
    coverage_if_equal: float
    estimator: str
    uncertainty: str
    ci: float
    k: int
    n: int
    m: int
    groups: int
    seed: int


class _Counts(NamedTuple):
    """How many balls hold a point, by the group of the ball's or of the point's own set that is left out."""

    balls: Tensor  # (n, G): reference balls around sample j, by group of references
    hits: Tensor  # (m, G): samples in the ball of reference i, by group of samples
    reached: Tensor  # (m, G): sample balls around reference i, by group of samples


def coverage(
    samples: Float[Tensor, "n ..."],
    references: Float[Tensor, "m ..."],
    k: int = 5,
    *,
    groups: int = 20,
    ci: float = 0.95,
    seed: int = 0,
    block_size: int | None = None,
) -> CoverageResult:
    """Precision, recall, density and coverage with k nearest neighbours.

    Parameters
    ----------
    samples, references
        Shapes (n, *event) and (m, *event), one event shape and device, any floating dtype; more than ``k`` points each.
    k
        The neighbour that a ball reaches.
    groups
        Groups of the jackknife in each set (a smaller set is left out point by point), drawn with ``seed``.
    ci
        Level of the intervals.
    block_size
        Rows of a tile; by default chosen so that extra memory stays near 100 MiB whatever n and m are.

    Raises
    ------
    TypeError, ValueError
        For bad points and for sets of ``k`` points or fewer.

    Examples
    --------
    >>> line = torch.arange(8.0)
    >>> result = coverage(line[:4], line, k=1)
    >>> result.precision, result.recall, result.coverage
    (1.0, 0.625, 0.625)
    """
    check_count(k, "k", 1)
    check_count(groups, "groups", 2)
    check_count(seed, "seed", 0)
    check_level(ci)
    rows = as_pair(samples, references, ("samples", "references"), k + 1, f"k = {k} neighbours within the set")
    n, m = len(rows[0]), len(rows[1])
    cloud = Cloud.of(*rows, block_size=block_size)
    generator = torch.Generator().manual_seed(seed)
    parts = [_groups(size, groups, generator, cloud.centre) for size in (n, m)]
    counts = _count(cloud, k, *parts)
    values = [float(v) for v in _statistics(counts, k, 1.0)]
    errors = _errors(counts, k, *parts)
    ends = [normal_interval(v, e, ci) or (v, v) for v, e in zip(values, errors, strict=True)]
    tops = (1.0, 1.0, math.inf, 1.0)
    intervals = [(max(low, 0.0), min(high, top)) for (low, high), top in zip(ends, tops, strict=True)]
    return CoverageResult(
        **dict(zip(("precision", "recall", "density", "coverage"), values, strict=True)),
        precision_interval=intervals[0],
        recall_interval=intervals[1],
        density_interval=intervals[2],
        coverage_interval=intervals[3],
        standard_errors=tuple(errors),
        coverage_if_equal=1 - math.prod((m - i) / (m + n - i) for i in range(1, k + 1)),
        estimator="shares of points in closed k-nearest-neighbour balls",
        uncertainty="delete-a-group jackknife of both sets with fixed radii (conservative), normal interval",
        ci=ci,
        k=k,
        n=n,
        m=m,
        groups=groups,
        seed=seed,
    )


def _groups(n: int, groups: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """One-hot group membership (n, G) with G = min(groups, n)."""
    return one_hot(random_groups(n, min(groups, n), generator)).to(like)


def _count(cloud: Cloud, k: int, sample_groups: Tensor, reference_groups: Tensor) -> _Counts:
    slack = 1 + relative_rounding(cloud.centre.dtype)
    sample_reach, reach = (_neighbour(cloud, which, k) * slack for which in (0, 1))
    hits = cloud.centre.new_zeros(len(reach), sample_groups.shape[1])
    counts = _Counts(cloud.centre.new_zeros(len(sample_reach), reference_groups.shape[1]), hits, hits.clone())
    for p, q, d2 in cloud.cross(0, 1):
        inside = (d2 <= reach[q.local]).to(d2.dtype)
        counts.balls[p.local] += inside @ reference_groups[q.local]
        counts.hits[q.local] += inside.T @ sample_groups[p.local]
        inside = (d2 <= sample_reach[p.local, None]).to(d2.dtype)
        counts.reached[q.local] += inside.T @ sample_groups[p.local]
    return counts


def _neighbour(cloud: Cloud, which: int, k: int) -> Tensor:
    """Squared distance from every point of a set to its k-th nearest other point of that set."""
    total = cloud.sets[which][-1].local.stop
    best = cloud.centre.new_full((total, k), torch.inf)
    for p, q, d2 in cloud.cross(which, which):
        if p is q:
            d2.fill_diagonal_(torch.inf)
        near = d2.topk(min(k, d2.shape[1]), largest=False).values
        best[p.local] = torch.cat([best[p.local], near], dim=1).topk(k, largest=False).values
    return best[:, -1]


def _statistics(counts: _Counts, k: int, rescale: float) -> Tensor:
    """(precision, recall, density, coverage); ``rescale`` makes up for references that are left out of the density."""
    balls = counts.balls.sum(1)
    shares = [(c > 0).to(balls.dtype).mean() for c in (balls, counts.reached.sum(1), counts.hits.sum(1))]
    return torch.stack([shares[0], shares[1], balls.mean() / k * rescale, shares[2]])


def _errors(counts: _Counts, k: int, sample_groups: Tensor, reference_groups: Tensor) -> list[float]:
    without_samples, without_references = [], []
    for g in range(sample_groups.shape[1]):
        rest = torch.arange(sample_groups.shape[1], device=sample_groups.device) != g
        kept = counts.balls[sample_groups[:, g] == 0]
        without_samples.append(_statistics(_Counts(kept, counts.hits[:, rest], counts.reached[:, rest]), k, 1.0))
    for g in range(reference_groups.shape[1]):
        rest = torch.arange(reference_groups.shape[1], device=reference_groups.device) != g
        kept = reference_groups[:, g] == 0
        left = _Counts(counts.balls[:, rest], counts.hits[kept], counts.reached[kept])
        without_references.append(_statistics(left, k, len(kept) / int(kept.sum())))
    pairs = zip(torch.stack(without_samples).T, torch.stack(without_references).T, strict=True)
    return [math.sqrt(jackknife_variance(a) + jackknife_variance(b)) for a, b in pairs]
