r"""The shape of a set of points: spectrum, anisotropy, shells and scales of columns; plain numbers, no judgement.

With mu the mean, S the covariance (divided by n: the points are the whole set) and lambda its eigenvalues,

.. math:: \mathrm{PR} = \frac{(\sum \lambda)^2}{\sum \lambda^2} = \frac{(\mathrm{tr}\, S)^2}{\mathrm{tr}\, S^2},
          \qquad \text{anisotropy} = \max\Bigl(0, \frac{R - \mathrm{PR}}{R - 1}\Bigr)

where R is the participation ratio that a random *round* cloud of as many points has: 0 is round (or rounder than such
a cloud), 1 is a line. R is d for many points, but few points in many dimensions are never round. For n points x = mu +
r u of a round law with kappa = E r^4 / (E r^2)^2, the means of (tr S)^2 and tr S^2 are in the ratio

.. math:: R = \frac{\kappa + \nu - 1}{\kappa + (\nu - 1) / d}, \qquad \nu = n - 1,

exact for a Gaussian (kappa = 1 + 2/d, R = (nu d + 2) / (nu + d + 1)), whose S / tr S and tr S are independent. Local
anisotropy is the same of the k nearest points around a centre, with kappa = (d + 2)^2 / (d (d + 4)) of the uniform law
in a ball, and the mean of 1 / PR over centres.

Shells. With r = |x - mu|, ``radial`` is sd(r) / mean(r), and ``tangential`` the root mean square cosine between two
points seen from mu, 1 / sqrt(d) for a round law and 1 / sqrt(PR) for a Gaussian of any shape. A Gaussian of any shape
has radial about tangential / sqrt(2); a thin shell has radial near 0; several shells, or heavy tails, have more than a
Gaussian of the same tangential variation. All of it is at the data end, t = 1.

References: Gao et al. 2017 (participation ratio); Ledoit & Wolf 2002, Annals of Statistics 30 (moments of tr S^2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from nwflow._pointset import first_equal
from nwflow.diagnose.result import Geometry
from nwflow.metrics._points import as_rows, squared_distances

_ROWS = 20_000  # more points than these are drawn without replacement before the spectrum
_SPECTRUM = 256
_EXACT = 1e10  # multiplications of a singular value decomposition; beyond, eigenvalues of the smaller Gram matrix
_CENTRES = 200
_NEIGHBOURS = (10, 50)
_PAIRED = 2_048  # points whose pairwise cosines are taken
_COLUMNS = 5  # named at each end


def geometry(points: Float[Tensor, "n d"], names: Sequence[str] | None = None, seed: int = 0) -> Geometry:
    """Describe the points. What a set does not determine is None, and no number is NaN.

    Parameters
    ----------
    points:
        Shape (n, d), any floating dtype; computed in float64.
    names:
        Names of the d columns; their indices by default.
    seed:
        Which points are looked at where there are more than enough: 20,000 for the spectrum, 200 centres of
        neighbourhoods, 2,048 for cosines.

    Returns
    -------
    Geometry
        ``condition`` is over the eigenvalues that rounding allows to tell from 0, those of singular values above
        eps max(n, d) of the largest (of eigenvalues, for sets too large for an SVD). ``scale_imbalance`` and
        ``columns``, the five largest and the five smallest, are of columns that are not constant; ``columns`` descends.

    Raises
    ------
    TypeError, ValueError
        Points that are no floating tensor with finite entries, or names that are not d.

    Examples
    --------
    >>> a = 2 * math.pi * torch.arange(200, dtype=torch.float64) / 200
    >>> g = geometry(torch.stack([100 * a.cos(), 0.1 * a.sin()], 1), ["x", "y"])
    >>> g.participation_ratio, g.condition, g.scale_imbalance
    (1.000002, 1000000.0, 1000.0)
    >>> g.columns
    (('x', 70.7106781), ('y', 0.0707106781))
    """
    rows = as_rows(points, "points")
    d = rows.shape[1]
    labels = _names(names, d)
    generator = torch.Generator().manual_seed(seed)
    deviations = column_deviations(rows)
    moving = (deviations > 0).nonzero().squeeze(1)
    x = centred(_drawn(rows, _ROWS, generator))
    values = _eigenvalues(x)
    total = float(values.sum())
    ratio = total**2 / float(values.square().sum()) if total > 0 else None
    radial, tangential = _variation(x, generator)
    order = moving[deviations[moving].argsort(descending=True, stable=True)].tolist()
    extreme = order if len(order) <= 2 * _COLUMNS else order[:_COLUMNS] + order[-_COLUMNS:]
    return Geometry(
        spectrum=tuple((values[:_SPECTRUM] / total).tolist()) if total > 0 else (),
        participation_ratio=ratio,
        condition=_ratio(float(values[0]), float(values[-1])) if total > 0 else None,
        anisotropy=None if ratio is None else _anisotropy(1 / ratio, len(x) - 1, d, 1 + 2 / d),
        local_anisotropy=_local_anisotropy(x, generator),
        radial=radial,
        tangential=tangential,
        scale_imbalance=_ratio(float(deviations[order[0]]), float(deviations[order[-1]])) if order else None,
        constant_columns=d - len(order),
        columns=tuple((labels[j], float(deviations[j])) for j in extreme),
    )


def round_participation(nu: float, d: int, kappa: float) -> float:
    """Participation ratio of nu + 1 points of a round law in d dimensions with E r^4 / (E r^2)^2 = kappa.

    >>> round_participation(9, 1, 3.0), round_participation(1e12, 7, 1 + 2 / 7)
    (1.0, 7.0)
    """
    return (kappa + nu - 1) / (kappa + (nu - 1) / d)


def centred(rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Differences from the mean in float64 over the largest of them: no square overflows, and where all rows are
    equal, or a column is constant, they are exactly 0."""
    x = rows.double() - rows[0].double()
    x -= x.mean(0)
    top = x.abs().max()
    return x.div_(top) if float(top) > 0 else x


def column_deviations(rows: Float[Tensor, "n d"]) -> Float[Tensor, " d"]:
    """Population standard deviation of every column, float64: 0 for constant columns only."""
    parts = []
    for column in rows.split(max(1, (1 << 24) // len(rows)), dim=1):
        x = column.double() - column[0].double()
        x -= x.mean(0)
        top = x.abs().amax(0)
        deviation = top * (x / top.clamp_min(torch.finfo(top.dtype).tiny)).square().mean(0).sqrt()
        parts.append(torch.where((column == column[0]).all(0), 0.0, deviation))
    return torch.cat(parts)


def _names(names: Sequence[str] | None, d: int) -> list[str]:
    if names is None:
        return [str(j) for j in range(d)]
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"names: expected a sequence of {d} strings, got {names!r:.60}")
    if len(names) != d:
        raise ValueError(f"names: expected {d}, one for each column, got {len(names)}")
    return list(names)


def _drawn(rows: Tensor, most: int, generator: torch.Generator) -> Tensor:
    if len(rows) <= most:
        return rows
    return rows[torch.randperm(len(rows), generator=generator)[:most].sort().values.to(rows.device)]


def _ratio(a: float, b: float) -> float | None:
    """a / b, or None where it overflows."""
    return a / b if b > 0 and math.isfinite(a / b) else None


def _eigenvalues(x: Tensor) -> Tensor:
    """Eigenvalues of the covariance of centred rows that are not 0 in working precision, largest first."""
    n, d = x.shape
    eps = torch.finfo(x.dtype).eps * max(n, d)
    if n * d * min(n, d) <= _EXACT:
        s = torch.linalg.svdvals(x)
        return s[s > eps * s[0]].square() / n
    values = torch.linalg.eigvalsh(x.T @ x if d <= n else x @ x.T).flip(0)
    return values[values > eps * values[0]] / n


def _anisotropy(purity: float, nu: int, d: int, kappa: float) -> float | None:
    """From purity = 1 / PR; None where every cloud of nu + 1 points in d dimensions is a line."""
    reference = round_participation(nu, d, kappa)
    return max(0.0, (reference - 1 / purity) / (reference - 1)) if min(nu, d) > 1 else None


def _local_anisotropy(x: Tensor, generator: torch.Generator) -> float | None:
    """Over neighbourhoods of distinct points: k = n / 20 within 10 to 50, all others where there are fewer."""
    first = first_equal(x, None)
    x = x[first == torch.arange(len(x), device=x.device)]
    n, d = x.shape
    k = min(n - 1, max(_NEIGHBOURS[0], min(_NEIGHBOURS[1], n // 20)))
    if k < 3 or d < 2:
        return None
    centres = torch.randperm(n, generator=generator)[:_CENTRES].sort().values.to(x.device)
    d2 = squared_distances(x[centres], x, x.mean(0))
    d2[torch.arange(len(centres), device=x.device), centres] = torch.inf  # the centre is not its own neighbour
    near = d2.topk(k, largest=False).indices
    purities = [_purity(x[i]) for i in near]
    found = [p for p in purities if p is not None]
    return _anisotropy(sum(found) / len(found), k - 1, d, (d + 2) ** 2 / (d * (d + 4))) if found else None


def _purity(rows: Tensor) -> float | None:
    """tr S^2 / (tr S)^2 of a few rows."""
    x = centred(rows)
    gram = x @ x.T if len(x) < x.shape[1] else x.T @ x
    trace = float(gram.trace())
    return float(gram.square().sum()) / trace**2 if trace > 0 else None


def _variation(x: Tensor, generator: torch.Generator) -> tuple[float | None, float | None]:
    """Radial and tangential relative variation of centred rows; points at the mean have no direction."""
    r = torch.linalg.vector_norm(x, dim=1)
    if not float(r.sum()) > 0:
        return None, None
    radial = float(r.std(correction=0) / r.mean())
    u = _drawn(x[r > 0], _PAIRED, generator)
    u = u / torch.linalg.vector_norm(u, dim=1, keepdim=True)
    cosines = (u @ u.T).square()
    pairs = len(u) * (len(u) - 1)
    return radial, math.sqrt(float(cosines.sum() - cosines.trace()) / pairs) if pairs else None
