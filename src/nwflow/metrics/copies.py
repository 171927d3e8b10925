r"""Memorisation: which samples are copies of a reference.

A sample s is a copy when it is much closer to one reference than to any other,

.. math:: \rho(s) = \frac{|s - r_{(1)}|}{|s - r_{(2)}|} < \frac13,

with :math:`r_{(1)}` the nearest reference and :math:`r_{(2)}` the nearest one *at another place* (the criterion and its
threshold: Yoon et al. 2023, ICML workshop on structured probabilistic inference; Gu et al. 2023, arXiv 2310.02664). A
duplicate of :math:`r_{(1)}` is no second reference: with it the ratio of a perfect copy would be 0/0, and that of a
near-copy 1. The ratio has no unit, is 0 for an exact copy and 1 half-way between two references.

In high dimensions independent points are nearly equidistant (ratio near 1); in one dimension half of the segment
between two references counts as copy: compare the share with that of held-out data. Samples and references live at the
data end, ``t = 1``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from nwflow.metrics._points import Cloud, as_pair, relative_rounding, squared_distances
from nwflow.metrics._result import Result, as_floats, check_level, wilson_interval


@dataclass(frozen=True, kw_only=True)
class MemorisationResult(Result):
    """Share of copies among ``n`` samples of ``m`` references, and the evidence for every sample.

    ``share`` = ``copies`` / n are the samples whose ratio is below ``threshold``, with its ``standard_error`` and
    interval of level ``ci``. Per sample: ``nearest`` (row of the nearest reference; the first of equals), ``distance``
    to it, ``second_distance`` (to the nearest reference elsewhere) and ``ratio`` of the two.
    """

    share: float
    copies: int
    interval: tuple[float, float]
    standard_error: float
    ci: float
    threshold: float
    duplicate_tolerance: float
    median_ratio: float
    nearest: tuple[int, ...]
    distance: tuple[float, ...]
    second_distance: tuple[float, ...]
    ratio: tuple[float, ...]
    estimator: str
    uncertainty: str
    n: int
    m: int


def memorisation(
    samples: Float[Tensor, "n ..."],
    references: Float[Tensor, "m ..."],
    threshold: float = 1 / 3,
    *,
    duplicate_tolerance: float = 0.0,
    ci: float = 0.95,
    block_size: int | None = None,
) -> MemorisationResult:
    """Nearest to second-nearest distance ratio of every sample, and the share of copies.

    Parameters
    ----------
    samples, references
        Shapes (n, *event) and (m, *event), one event shape and device, any floating dtype.
    threshold
        A sample is a copy when its ratio is below this, in (0, 1].
    duplicate_tolerance
        References within this distance of the nearest one are duplicates of it and not the second nearest. At 0, only
        identical ones are.
    ci
        Level of Wilson's interval of the share.
    block_size
        Rows of a tile; by default chosen so that extra memory stays near 100 MiB whatever n and m are.

    Raises
    ------
    TypeError, ValueError
        For bad points, and when the references hold no two places, so that there is no second nearest.

    Examples
    --------
    >>> references = torch.tensor([[0.0, 0.0], [0.0, 0.0], [4.0, 0.0]])
    >>> result = memorisation(torch.tensor([[1.0, 0.0], [2.0, 0.0], [4.0, 0.0]]), references, threshold=0.4)
    >>> result.ratio, result.nearest, result.copies
    ((0.333, 1.0, 0.0), (0, 0, 2), 2)
    """
    rows = as_pair(samples, references, ("samples", "references"))
    _check(threshold, duplicate_tolerance)
    check_level(ci)
    cloud = Cloud.of(*rows, block_size=block_size)
    nearest, first = _nearest(cloud)
    second = _nearest_elsewhere(cloud, rows[1], nearest, duplicate_tolerance)
    if bool(torch.isinf(second).any()):
        j = int(torch.isinf(second).nonzero()[0])
        raise ValueError(
            f"references: expected two further apart than duplicate_tolerance = {duplicate_tolerance}, "
            f"got {len(rows[1])} that all coincide with reference {int(nearest[j])}, the nearest of sample {j}"
        )
    ratio = first / second
    n, found = len(ratio), int((ratio < threshold).sum())
    return MemorisationResult(
        share=found / n,
        copies=found,
        interval=wilson_interval(found, n, ci),
        standard_error=math.sqrt(found / n * (1 - found / n) / n),
        ci=ci,
        threshold=threshold,
        duplicate_tolerance=duplicate_tolerance,
        median_ratio=float(ratio.double().cpu().quantile(0.5)) if n < 1 << 24 else float(ratio.median()),
        nearest=tuple(int(i) for i in nearest.tolist()),
        distance=as_floats(first),
        second_distance=as_floats(second),
        ratio=as_floats(ratio),
        estimator="share of samples with nearest / second-nearest distance below the threshold",
        uncertainty="Wilson score interval over samples, the references held fixed",
        n=n,
        m=len(rows[1]),
    )


def _check(threshold: float, duplicate_tolerance: float) -> None:
    for value, name in ((threshold, "threshold"), (duplicate_tolerance, "duplicate_tolerance")):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name}: expected a float, got {type(value).__name__}")
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold: expected a ratio above 0 and at most 1, got {threshold}")
    if not 0 <= duplicate_tolerance < math.inf:
        raise ValueError(f"duplicate_tolerance: expected a finite length, at least 0, got {duplicate_tolerance}")


def _nearest(cloud: Cloud) -> tuple[Tensor, Tensor]:
    """Row of, and distance to, the nearest reference of every sample; the first row of those equal up to rounding."""
    n = cloud.sets[0][-1].local.stop
    best = cloud.centre.new_full((n,), torch.inf)
    index = torch.zeros(n, dtype=torch.long, device=best.device)
    slack = relative_rounding(best.dtype)
    for p, q, d2 in cloud.cross(0, 1):
        low = d2.amin(1)
        at = (d2 <= low[:, None] * (1 + slack)).to(torch.uint8).argmax(1) + q.local.start
        index[p.local] = torch.where(low < best[p.local] * (1 - slack), at, index[p.local])
        best[p.local] = torch.minimum(best[p.local], low)
    return index, best.sqrt()


def _nearest_elsewhere(cloud: Cloud, references: Tensor, nearest: Tensor, tolerance: float) -> Tensor:
    """Distance to the nearest reference that is no duplicate of the nearest one; inf where there is none."""
    best = cloud.centre.new_full((len(nearest),), torch.inf)
    for p, q, d2 in cloud.cross(0, 1):
        owners, back = nearest[p.local].unique(return_inverse=True)
        apart = squared_distances(references[owners].to(d2.dtype), q.rows.to(d2.dtype), cloud.centre)
        d2.masked_fill_((apart <= tolerance**2)[back], torch.inf)
        best[p.local] = torch.minimum(best[p.local], d2.amin(1))
    return best.sqrt()
