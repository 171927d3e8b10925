r"""Bandwidths chosen from the data, with their degenerate cases.

Median heuristic, for kernels of distances: :math:`\mathrm{median}\{|z_i - z_j| > 0,\ i < j\}` over the pooled points
(the usual one, see Gretton et al. 2012, JMLR 13, section 8).

Normal reference, for kernel density estimates of a normal-like law (Silverman 1986, eqs 3.31 and 4.14):

.. math:: h = 0.9 \min(s,\ \mathrm{IQR}/1.34)\, n^{-1/5} \quad (d = 1), \qquad
          h = \Bigl(\tfrac{4}{(d + 2)\, n}\Bigr)^{1/(d + 4)} \sqrt{\tfrac1d \textstyle\sum_k s_k^2} \quad (d > 1).

Neither returns 0: zero distances do not enter the first, a quartile range of 0 does not enter the second, and points
that all coincide have no scale, which is an error. Time has no part here: points are data (``t = 1``).
"""

from __future__ import annotations

import warnings

import torch
from jaxtyping import Float
from torch import Tensor

from nwflow.metrics._points import Cloud, as_pair, as_rows, working_dtype
from nwflow.metrics._result import check_count


def median_bandwidth(
    x: Float[Tensor, "n ..."],
    y: Float[Tensor, "m ..."] | None = None,
    *,
    max_points: int = 2000,
    seed: int = 0,
) -> float:
    """Median of the non-zero pairwise distances of ``x`` and ``y`` pooled: a bandwidth (a length, not its square).

    Parameters
    ----------
    x, y
        Points, shapes (n, *event) and (m, *event), in any floating dtype; distances are float64.
    max_points
        When there are more points than this, the median is that of a random subset of this size.
    seed
        Draws the subset.

    Raises
    ------
    ValueError
        When all points coincide, or all of the subset do.

    Warns
    -----
    UserWarning
        When more than half of the pairs coincide, so that the plain median is 0.

    Examples
    --------
    >>> median_bandwidth(torch.tensor([0.0, 1.0, 3.0]))
    2.0
    """
    sets = (as_rows(x, "x"),) if y is None else as_pair(x, y)
    check_count(max_points, "max_points", 2)
    check_count(seed, "seed", 0)
    subset = _subset(sets, max_points, seed)
    used = sum(len(s) for s in subset)
    pairs = torch.cat([_above_diagonal(d2, p is q) for p, q, d2 in Cloud.of(*subset).pairs()]).sqrt()
    apart = pairs[pairs > 0].sort().values
    if not len(apart):
        raise ValueError(_no_scale(sets, used))
    if 2 * len(apart) < len(pairs):
        warnings.warn(
            f"{len(pairs) - len(apart)} of {len(pairs)} pairs coincide and the plain median distance is 0; "
            "using the median of the non-zero distances",
            stacklevel=2,
        )
    return float((apart[(len(apart) - 1) // 2] + apart[len(apart) // 2]) / 2)


def _above_diagonal(d2: Tensor, square: bool) -> Tensor:
    if not square:
        return d2.flatten()
    i, j = torch.triu_indices(len(d2), len(d2), offset=1, device=d2.device)
    return d2[i, j]


def _subset(sets: tuple[Tensor, ...], max_points: int, seed: int) -> list[Tensor]:
    total = sum(len(s) for s in sets)
    if total <= max_points:
        return list(sets)
    keep = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:max_points].sort().values
    parts = []
    for s in sets:
        parts.append(s[keep[(keep >= 0) & (keep < len(s))].to(s.device)])
        keep = keep - len(s)
    return [part for part in parts if len(part)]


def _no_scale(sets: tuple[Tensor, ...], used: int) -> str:
    total = sum(len(s) for s in sets)
    if all(bool((s == sets[0][:1]).all()) for s in sets):
        return f"x, y: expected at least two different points, got {total} identical ones: give a bandwidth"
    return f"max_points: expected a subset with two different points, got {used} identical ones of {total}; raise it"


def silverman_bandwidth(x: Float[Tensor, "n ..."]) -> float:
    """Bandwidth of a Gaussian kernel density estimate by the normal reference rule (formulas in the module's text).

    For scalar events the robust rule: the smaller of the standard deviation (n - 1 in the denominator) and the
    interquartile range / 1.34; a range of 0, with more than half of the points equal, is left out of the comparison.
    For longer events one isotropic bandwidth from the average variance of the coordinates.

    Raises
    ------
    ValueError
        When there are fewer than 2 points or all coincide.

    Examples
    --------
    >>> silverman_bandwidth(torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0]))
    0.29171819
    """
    rows = as_rows(x, "x", 2, "a standard deviation")
    if bool((rows == rows[:1]).all()):
        raise ValueError(
            f"x: expected at least two different points, got {len(rows)} identical ones; they have no bandwidth"
        )
    n, d = rows.shape
    if d > 1:
        return (4 / (d + 2) / n) ** (1 / (d + 4)) * float(_variances(rows).mean().sqrt())
    scale = float(_variances(rows).sqrt())
    q25, q75 = _quartiles(rows[:, 0])
    if q75 > q25:
        scale = min(scale, (q75 - q25) / 1.34)
    return 0.9 * scale * n**-0.2


def _variances(rows: Tensor) -> Tensor:
    dtype = working_dtype(rows.device)
    return torch.cat([block.to(dtype).var(dim=0) for block in rows.split(max(1, (1 << 21) // len(rows)), dim=1)])


def _quartiles(values: Tensor) -> tuple[float, float]:
    """Linear interpolation between order statistics, for any number of values (torch.quantile stops at 2^24)."""
    ordered = values.to(working_dtype(values.device)).sort().values
    out = []
    for q in (0.25, 0.75):
        position = q * (len(ordered) - 1)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        out.append(float(torch.lerp(ordered[low], ordered[high], position - low)))
    return out[0], out[1]
