r"""Intrinsic dimension of a set of points by several estimators, and how concentrated its distances are.

With r_1 <= r_2 <= ... the distances from a point to the others,

- ``TwoNN``: mu = r_2 / r_1 has P(mu > y) = y^-d; slope of -log(1 - F(mu)) on log mu through the origin, the largest
  tenth left out (Facco et al. 2017, Scientific Reports 7:12140);
- ``MLE``: 1 / d is the mean of log(r_k / r_j) over j < k and over points, k = 20 (Levina & Bickel 2004 with the average
  of inverses of MacKay & Ghahramani 2005);
- ``correlation``: slope of the log of the share of pairs within r against log r, between the medians of r_10 and r_20
  (Grassberger & Procaccia 1983).

scikit-dimension adds others where it is installed: ``lPCA`` (eigenvalues above 5 % of the largest; Fukunaga & Olsen
1971), ``MOM`` (Amsaleg et al. 2018) and ``TLE`` (Amsaleg et al. 2019). All but lPCA look at neighbourhoods, take the
points as a sample from a smooth density on a manifold, and fall short of a dimension that is not small against log n.

Concentration. Relative contrast is (mean - nearest) / nearest, the ratio of means over points: the mean distance to the
others and the distance to the nearest one that is not equal (He, Kumar & Chang 2012, less 1; Beyer et al. 1999). All of
it is at the data end, t = 1.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from nwflow._pointset import first_equal
from nwflow.diagnose.geometry import centred
from nwflow.metrics._points import as_rows, squared_distances

_POINTS = 2_000
_FURTHER = ("lPCA", "MOM", "TLE")  # of scikit-dimension: none of them takes more than seconds
_FURTHER_NUMBERS = 1_500_000  # in the points given to them: lPCA decomposes them all
_NEIGHBOURS = 20
_KEPT = 0.9  # of TwoNN's ratios


def intrinsic_dimension(points: Float[Tensor, "n d"], seed: int = 0) -> dict[str, float | None]:
    """Every estimator's dimension, by name; None where it has none.

    Points equal to an earlier one are left out first; 2,000 of the others, drawn with ``seed``, are looked at.
    ``TwoNN``, ``MLE`` and ``correlation`` are always there; :func:`missing_estimators` says whether others could be.

    Raises
    ------
    TypeError, ValueError
        Points that are no floating tensor with finite entries.

    Examples
    --------
    >>> a = torch.rand(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> circle = torch.stack([(6.28 * a).cos(), (6.28 * a).sin(), 0 * a], 1)
    >>> round(intrinsic_dimension(circle)["MLE"], 1)
    1.0
    """
    x = _unique(centred(as_rows(points, "points")))
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:_POINTS].sort().values]
    r = _sorted_distances(x)
    found = {"TwoNN": _two_nn(r), "MLE": _mle(r), "correlation": _correlation(r)}
    if missing_estimators() is None:
        found |= {name: _further(name, x[: max(100, _FURTHER_NUMBERS // x.shape[1])]) for name in _FURTHER}
    return found


def missing_estimators() -> str | None:
    """One sentence on how to get the estimators that are not installed; None when all are."""
    if importlib.util.find_spec("skdim") is not None:
        return None
    return f"{', '.join(_FURTHER)} need scikit-dimension: pip install 'nwflow[dimension]'"


def concentration(points: Float[Tensor, "n d"], seed: int = 0) -> tuple[float | None, float | None]:
    """(relative contrast, standard deviation over mean) of the distances between two points.

    Of 2,000 points drawn with ``seed``, all pairs. Equal points count as pairs at distance 0, never as nearest; both
    are None where all points are equal.

    Examples
    --------
    >>> concentration(torch.tensor([[0.0], [1.0], [3.0]]))
    (0.5, 0.4082)
    """
    x = centred(as_rows(points, "points"))
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:_POINTS].sort().values]
    r = _sorted_distances(x)
    if not bool((r > 0).any()):
        return None, None
    nearest = float(torch.where(r > 0, r, torch.inf).amin(1).mean())
    mean = float(r.mean())
    return (mean - nearest) / nearest, float(r.std(correction=0)) / mean


def _unique(x: Tensor) -> Tensor:
    return x[first_equal(x, None) == torch.arange(len(x), device=x.device)]


def _sorted_distances(x: Tensor) -> Tensor:
    """Distances (n, n - 1) of every row to the others, ascending."""
    if len(x) == 1:
        return x.new_zeros(1, 0)
    d2 = torch.cat([squared_distances(block, x, x.new_zeros(x.shape[1])) for block in x.split(500)])
    return d2.fill_diagonal_(-1.0).sort(1).values[:, 1:].sqrt()


def _two_nn(r: Tensor) -> float | None:
    if r.shape[1] < 2:
        return None
    logs = (r[:, 1] / r[:, 0]).log().sort().values[: max(2, int(_KEPT * len(r)))]
    ranks = torch.arange(1, len(logs) + 1, dtype=r.dtype, device=r.device)
    rise = -torch.log1p(-ranks / (len(r) + 1))
    return _quotient(float(logs @ rise), float(logs @ logs))


def _mle(r: Tensor) -> float | None:
    k = min(_NEIGHBOURS, r.shape[1])
    if k < 2:
        return None
    return _quotient(1.0, float((r[:, k - 1 : k] / r[:, : k - 1]).log().mean()))


def _correlation(r: Tensor) -> float | None:
    k = min(_NEIGHBOURS, r.shape[1])
    if k < 2:
        return None
    near, far = float(r[:, k // 2 - 1].median()), float(r[:, k - 1].median())
    pairs = math.log(float((r <= far).double().mean()) / float((r <= near).double().mean()))
    return _quotient(pairs, math.log(far / near))


def _quotient(a: float, b: float) -> float | None:
    return a / b if b > 0 and math.isfinite(a / b) else None


def _further(name: str, x: Tensor) -> float | None:
    """An estimator of scikit-dimension; None where it fails on these points."""
    import skdim  # type: ignore[import-not-found]

    estimator: Callable = getattr(skdim.id, name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = float(estimator().fit(x.cpu().numpy()).dimension_)
    except Exception:  # whatever they raise on few or degenerate points, the other estimators still count
        return None
    return value if math.isfinite(value) and value >= 0 else None
