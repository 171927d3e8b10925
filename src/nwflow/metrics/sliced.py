r"""Sliced Wasserstein distance between two samples.

.. math:: SW_p^p = \mathbb E_\theta\, W_p^p(\theta^T X, \theta^T Y), \qquad \theta \text{ uniform on the sphere},

the mean over random directions of exact one-dimensional transport costs (Bonneel et al. 2015), which POT computes. The
estimate is biased upwards: two samples of one law are not at distance 0. Both live at the data end, ``t = 1``.

Uncertainty. The costs of different directions give the Monte-Carlo error of the mean, a bootstrap of the rows (same
directions) that of the samples; their variances add. Both pass to the p-th root by the delta method.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from nwflow.metrics._points import as_pair, working_dtype
from nwflow.metrics._result import Result, check_count, check_level, normal_interval

_CHUNK = 1 << 20  # projected numbers, or entries of directions, held together: POT makes about ten copies


@dataclass(frozen=True, kw_only=True)
class SlicedWassersteinResult(Result):
    """SW_p of ``n`` and ``m`` points from ``projections`` directions.

    ``standard_error`` holds the error of the samples (``bootstrap`` resamplings) and ``projection_standard_error``,
    that of the directions alone. ``interval`` of level ``ci`` is normal around ``value`` and can begin below 0.
    """

    value: float
    estimator: str
    p: float
    projections: int
    standard_error: float
    projection_standard_error: float
    interval: tuple[float, float]
    ci: float
    uncertainty: str
    bootstrap: int
    n: int
    m: int
    seed: int


def sliced_wasserstein(
    x: Float[Tensor, "n ..."],
    y: Float[Tensor, "m ..."],
    *,
    p: float = 2.0,
    projections: int = 128,
    bootstrap: int = 100,
    ci: float = 0.95,
    seed: int = 0,
) -> SlicedWassersteinResult:
    """Sliced Wasserstein distance, in the units of the data. Needs POT: ``pip install 'nwflow[ot]'``.

    Parameters
    ----------
    x, y
        Samples of shapes (n, *event) and (m, *event), one event shape and device, any floating dtype; 2 points each.
    p
        Order of the transport cost, at least 1.
    projections
        Random directions, at least 2, drawn with ``seed``: direction i depends on the seed and i alone. Scalar events
        have only one.
    bootstrap
        Resamplings for the error, at least 2. They take nearly all of the time.
    ci
        Level of the interval.

    Raises
    ------
    ImportError
        When POT is not installed.
    TypeError, ValueError
        For bad points or settings.

    Examples
    --------
    >>> sliced_wasserstein(torch.tensor([0.0, 1.0]), torch.tensor([3.0, 4.0])).value
    3.0
    """
    check_count(projections, "projections", 2)
    check_count(bootstrap, "bootstrap", 2)
    check_count(seed, "seed", 0)
    check_level(ci)
    if isinstance(p, bool) or not isinstance(p, int | float):
        raise TypeError(f"p: expected a float, got {type(p).__name__}")
    if not 1 <= p < math.inf:
        raise ValueError(f"p: expected a finite order of at least 1, got {p}")
    rows = as_pair(x, y, minimum=2, reason="a bootstrap of the rows")
    directions = 1 if rows[0].shape[1] == 1 else projections
    costs, resampled = _costs(rows, p, directions, bootstrap, seed)
    mean, root = float(costs.mean()), float(costs.mean()) ** (1 / p)
    slope = root / (p * mean) if mean > 0 else 0.0
    of_directions = slope * float(costs.std()) / math.sqrt(directions) if directions > 1 else 0.0
    error = math.hypot(of_directions, slope * float(resampled.std()))
    return SlicedWassersteinResult(
        value=root,
        estimator="plug-in mean over random directions (biased upwards)",
        p=p,
        projections=directions,
        standard_error=error,
        projection_standard_error=of_directions,
        interval=normal_interval(root, error, ci) or (root, root),
        ci=ci,
        uncertainty="bootstrap of the rows and Monte-Carlo error of the directions, delta method, normal interval",
        bootstrap=bootstrap,
        n=len(rows[0]),
        m=len(rows[1]),
        seed=seed,
    )


def _costs(rows: tuple[Tensor, Tensor], p: float, directions: int, bootstrap: int, seed: int) -> tuple[Tensor, Tensor]:
    """W_p^p along every direction, and its mean over directions for every resampling of the rows."""
    ot = _pot()
    generator = torch.Generator().manual_seed(seed)
    picks = [
        [torch.randint(len(r), (len(r),), generator=generator).to(r.device) for r in rows] for _ in range(bootstrap)
    ]
    costs, resampled = [], rows[0].new_zeros(bootstrap, dtype=working_dtype(rows[0].device))
    for u, v in _projected(rows, directions, seed):
        costs.append(ot.wasserstein_1d(u, v, p=p))
        resampled += torch.stack([ot.wasserstein_1d(u[i], v[j], p=p).sum() for i, j in picks])
    return torch.cat(costs), resampled / directions


def _projected(rows: tuple[Tensor, Tensor], directions: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Both samples (n, c) and (m, c) along c directions at a time, centred on the mean of the first sample."""
    d, dtype = rows[0].shape[1], working_dtype(rows[0].device)
    step = max(1, _CHUNK // d)
    centre = torch.stack([block.to(dtype).sum(0) for block in rows[0].split(step)]).sum(0) / len(rows[0])
    generator = torch.Generator().manual_seed(seed + 1)
    width = max(1, _CHUNK // max(d, len(rows[0]) + len(rows[1])))
    for start in range(0, directions, width):
        count = min(width, directions - start)
        theta = torch.stack([torch.randn(d, generator=generator, dtype=torch.float64) for _ in range(count)], dim=1)
        theta = (theta / theta.norm(dim=0)).to(rows[0].device, dtype)
        u, v = (torch.cat([(block.to(dtype) - centre) @ theta for block in r.split(step)]) for r in rows)
        yield u, v


def _pot() -> Any:
    try:
        import ot
    except ImportError as error:
        raise ImportError("sliced_wasserstein needs POT, which is not installed: pip install 'nwflow[ot]'") from error
    return ot
