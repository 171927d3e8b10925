r"""Kernel two-sample statistics: MMD^2 and the energy distance, in one pass over tiles of the pooled Gram matrix.

.. math::
    \mathrm{MMD}^2 = \mathbb E\,k(X, X') + \mathbb E\,k(Y, Y') - 2\,\mathbb E\,k(X, Y), \qquad
    k(a, b) = \exp\Bigl(-\frac{|a - b|^2}{2 h^2}\Bigr),

(Gretton et al. 2012, JMLR 13). The *biased* estimator takes the means over all pairs (a V-statistic: a squared norm,
never negative); the *unbiased* one leaves out the pairs (i, i) (a U-statistic: it is negative about half of the time
when both laws are equal). The energy distance is the same with :math:`k(a, b) = -|a - b|` (Szekely & Rizzo 2013).

Uncertainty. Row sums of the Gram matrix give the statistic without any one point, hence the delete-one jackknife,
exactly and at no extra cost. By the Efron-Stein inequality its variance is not below the true one on average: right
when the laws differ, up to twice too large when they are equal and the statistic degenerates.

Permutations. With s the 0/1 indicator of a relabelled first sample, :math:`s^T K s` and :math:`s^T K 1` determine the
statistic, so all permutations are products of one tile with their indicators: the Gram matrix is neither stored nor
formed twice. :math:`p = (1 + \#\{\text{permuted} \ge \text{observed}\})/(1 + \text{permutations})` is exact and never
0.

Both compare generated points with data at the data end, ``t = 1``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from nwflow.metrics._points import Cloud, as_pair, relative_rounding
from nwflow.metrics._result import (
    Result,
    check_count,
    check_level,
    jackknife_variance,
    normal_interval,
    permutation_p_value,
)
from nwflow.metrics.bandwidth import median_bandwidth

Estimator = Literal["unbiased", "biased"]
Kernel = Callable[[Tensor], Tensor]  # squared distances, which it may overwrite, to kernel values
_INDICATORS = 1 << 26  # bytes of permuted labels held together
_ROUNDING = 64.0  # in units of eps: sums of kernel values that differ by less are taken as equal
_FLOOR = -700.0  # exp is twenty times slower on results below 1e-304, which no sum here can tell from 1e-304


@dataclass(frozen=True, kw_only=True)
class TwoSampleResult(Result):
    """An estimate of a squared distance between two laws.

    ``value`` is the ``estimator`` ("unbiased" or "biased") from ``n`` and ``m`` points. ``standard_error`` and
    ``interval`` (level ``ci``) come from ``uncertainty``; both are None when a sample is too small for it.
    ``p_value`` tests that the laws are equal, by ``permutations`` relabellings drawn with ``seed``; None without any.
    """

    value: float
    estimator: str
    n: int
    m: int
    standard_error: float | None
    interval: tuple[float, float] | None
    ci: float
    uncertainty: str
    p_value: float | None
    permutations: int
    seed: int

    def root(self) -> float:
        """The distance itself, the square root of ``value``. Raises ValueError when ``value`` is negative."""
        if self.value < 0:
            raise ValueError(
                f"value: expected a non-negative {self.estimator} estimate to take the root of, got {self.value:.6g}; "
                "the unbiased estimator is negative about half of the time when the laws are equal: "
                "report it as it is, or use estimator='biased'"
            )
        return math.sqrt(self.value)


@dataclass(frozen=True, kw_only=True)
class MMDResult(TwoSampleResult):
    """MMD^2 with the mean of the ``kernel`` over ``bandwidths``; other fields as in :class:`TwoSampleResult`."""

    kernel: str
    bandwidths: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class EnergyResult(TwoSampleResult):
    """The energy distance 2 E|X - Y| - E|X - X'| - E|Y - Y'|; fields as in :class:`TwoSampleResult`."""


def mmd2(
    x: Float[Tensor, "n ..."],
    y: Float[Tensor, "m ..."],
    bandwidth: float | Sequence[float] | Literal["median"] = "median",
    kernel: Literal["gaussian", "laplace"] = "gaussian",
    estimator: Estimator = "unbiased",
    *,
    permutations: int = 0,
    ci: float = 0.95,
    seed: int = 0,
    block_size: int | None = None,
) -> MMDResult:
    """Squared maximum mean discrepancy between the laws of two samples.

    Parameters
    ----------
    x, y
        Samples of shapes (n, *event) and (m, *event), one event shape and device, any floating dtype.
    bandwidth
        A length h > 0 in the units of the data (the Gaussian kernel is exp(-d^2 / (2 h^2)), the Laplace kernel
        exp(-d / h)), several (the kernel is their mean), or "median" for :func:`median_bandwidth`.
    estimator
        "unbiased" (can be negative) or "biased" (never negative; a rounding error below 0 is returned as 0).
    permutations
        Relabellings for the p-value; 0 for none.
    ci
        Level of the interval.
    block_size
        Rows of a tile; by default chosen so that extra memory stays near 100 MiB whatever n and m are.

    Raises
    ------
    TypeError, ValueError
        For bad points, bandwidths that are not positive, fewer points than the estimator needs (unbiased: 2).

    Examples
    --------
    >>> x = torch.tensor([0.0, 1.0])
    >>> mmd2(x, x, bandwidth=1.0).value, mmd2(x, x, bandwidth=1.0, estimator="biased").value
    (-0.3934693403, 0.0)
    """
    rows = _pair(x, y, estimator)
    bandwidths = _bandwidths(bandwidth, x, y, seed)
    if kernel not in (names := ("gaussian", "laplace")):
        raise ValueError(f"kernel: expected one of {names}, got {kernel!r}")

    def gram(d2: Tensor) -> Tensor:
        return _mean_kernel(d2, bandwidths, kernel)

    common = _compare(rows, gram, 1.0, estimator, permutations, ci, seed, block_size)
    return MMDResult(kernel=kernel, bandwidths=bandwidths, **common)


def energy_distance(
    x: Float[Tensor, "n ..."],
    y: Float[Tensor, "m ..."],
    estimator: Estimator = "unbiased",
    *,
    permutations: int = 0,
    ci: float = 0.95,
    seed: int = 0,
    block_size: int | None = None,
) -> EnergyResult:
    """Energy distance 2 E|X - Y| - E|X - X'| - E|Y - Y'|, in the units of the data: no bandwidth to choose.

    Parameters and errors as in :func:`mmd2`. ``.root()`` of the biased estimate is what SciPy calls the energy
    distance.

    Examples
    --------
    >>> energy_distance(torch.tensor([0.0, 1.0]), torch.tensor([3.0, 4.0]), estimator="biased").value
    5.0
    """
    rows = _pair(x, y, estimator)
    return EnergyResult(**_compare(rows, _negative_distance, 0.0, estimator, permutations, ci, seed, block_size))


def _pair(x: Tensor, y: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    if estimator not in ("unbiased", "biased"):
        raise ValueError(f"estimator: expected 'unbiased' or 'biased', got {estimator!r}")
    unbiased = estimator == "unbiased"
    return as_pair(x, y, minimum=1 + unbiased, reason="the unbiased estimator needs pairs" if unbiased else "")


def _bandwidths(bandwidth: Any, x: Tensor, y: Tensor, seed: int) -> tuple[float, ...]:
    if isinstance(bandwidth, str):
        if bandwidth != "median":
            raise ValueError(f"bandwidth: expected a length, several or 'median', got {bandwidth!r}")
        return (median_bandwidth(x, y, seed=seed),)
    if isinstance(bandwidth, Tensor):
        bandwidth = bandwidth.tolist()
    values = tuple(bandwidth) if isinstance(bandwidth, Sequence) else (bandwidth,)
    if not values:
        raise ValueError("bandwidth: expected at least one length, got an empty sequence")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"bandwidth: expected numbers, got {type(value).__name__}")
        if not 0 < value < math.inf:
            raise ValueError(f"bandwidth: expected finite lengths above 0, got {value}")
    return tuple(float(v) for v in values)


def _mean_kernel(d2: Tensor, bandwidths: tuple[float, ...], kernel: str) -> Tensor:
    base = d2 if kernel == "gaussian" else d2.sqrt_()
    total: Tensor | None = None
    for h in bandwidths:
        rate = -1 / h if kernel == "laplace" else -0.5 / h / h
        k = (base * rate).clamp_(min=_FLOOR).exp_()
        total = k if total is None else total.add_(k)
    assert total is not None
    return total if len(bandwidths) == 1 else total.div_(len(bandwidths))


def _negative_distance(d2: Tensor) -> Tensor:
    return d2.sqrt_().neg_()


def _compare(
    rows: tuple[Tensor, Tensor],
    gram: Kernel,
    diagonal: float,
    estimator: str,
    permutations: int,
    ci: float,
    seed: int,
    block_size: int | None,
) -> dict[str, Any]:
    """The fields of a :class:`TwoSampleResult`, for a kernel whose value at distance 0 is ``diagonal``."""
    check_count(permutations, "permutations", 0)
    check_count(seed, "seed", 0)
    check_level(ci)
    n, m = len(rows[0]), len(rows[1])
    cloud = Cloud.of(*rows, block_size=block_size)
    to_x, to_y, magnitude = _row_sums(cloud, gram)
    statistic = _Statistic(n, m, diagonal, estimator)
    value = float(statistic(to_x[:n].sum(), to_y[n:].sum(), to_y[:n].sum()))
    rounding = _ROUNDING * torch.finfo(to_x.dtype).eps * magnitude
    if estimator == "biased" and -relative_rounding(to_x.dtype) * magnitude < value < 0:
        value = 0.0  # a squared norm: what is below 0 is rounding
    error = _jackknife_error(statistic, to_x, to_y)
    count = 0
    for permuted in _permuted(cloud, gram, statistic, to_x + to_y, permutations, seed):
        count += int((permuted >= value - rounding).sum())
    return {
        "value": value,
        "estimator": estimator,
        "n": n,
        "m": m,
        "standard_error": error,
        "interval": normal_interval(value, error, ci),
        "ci": ci,
        "uncertainty": "delete-one jackknife of both samples (conservative), normal interval",
        "p_value": permutation_p_value(count, permutations),
        "permutations": permutations,
        "seed": seed,
    }


def _row_sums(cloud: Cloud, gram: Kernel) -> tuple[Tensor, Tensor, float]:
    """Sums of every row of the pooled Gram matrix over the first and the second sample, and its largest |entry|."""
    n, total = cloud.sets[0][-1].pooled.stop, cloud.sets[-1][-1].pooled.stop
    sums = cloud.centre.new_zeros(2, total)
    magnitude = cloud.centre.new_zeros(())
    for p, q, d2 in cloud.pairs():
        k = gram(d2)
        magnitude = torch.maximum(magnitude, torch.maximum(k.max(), -k.min()))
        sums[int(q.pooled.start >= n), p.pooled] += k.sum(1)
        if p is not q:
            sums[int(p.pooled.start >= n), q.pooled] += k.sum(0)
    return sums[0], sums[1], float(magnitude)


@dataclass(frozen=True)
class _Statistic:
    """The estimate from the three sums of kernel values (diagonals included), elementwise over tensors of sums."""

    n: int
    m: int
    diagonal: float
    estimator: str

    def __call__(self, sxx: Tensor, syy: Tensor, sxy: Tensor, left_out: tuple[int, int] = (0, 0)) -> Tensor:
        n, m = self.n - left_out[0], self.m - left_out[1]
        if self.estimator == "biased":
            return sxx / n**2 + syy / m**2 - 2 * sxy / (n * m)
        within = (sxx - n * self.diagonal) / (n * (n - 1)) + (syy - m * self.diagonal) / (m * (m - 1))
        return within - 2 * sxy / (n * m)


def _jackknife_error(statistic: _Statistic, to_x: Tensor, to_y: Tensor) -> float | None:
    n, m, k0 = statistic.n, statistic.m, statistic.diagonal
    if min(n, m) < (3 if statistic.estimator == "unbiased" else 2):
        return None
    sxx, syy, sxy = to_x[:n].sum(), to_y[n:].sum(), to_y[:n].sum()
    without_x = statistic(sxx - 2 * to_x[:n] + k0, syy, sxy - to_y[:n], (1, 0))
    without_y = statistic(sxx, syy - 2 * to_y[n:] + k0, sxy - to_x[n:], (0, 1))
    return math.sqrt(jackknife_variance(without_x) + jackknife_variance(without_y))


def _permuted(
    cloud: Cloud, gram: Kernel, statistic: _Statistic, row_sums: Tensor, permutations: int, seed: int
) -> Iterator[Tensor]:
    """The statistic under random relabellings, in batches. Relabelling number i depends on the seed and i alone."""
    n, total = statistic.n, statistic.n + statistic.m
    generator = torch.Generator().manual_seed(seed)
    batch = max(1, _INDICATORS // total)
    for start in range(0, permutations, batch):
        labels = torch.zeros(total, min(batch, permutations - start), dtype=torch.bool)
        for i in range(labels.shape[1]):
            labels[torch.randperm(total, generator=generator)[:n], i] = True
        labels = labels.to(row_sums.device)
        sxx = _within(cloud, gram, labels)
        to_all = torch.cat(
            [row_sums[None, p.pooled] @ labels[p.pooled].to(row_sums.dtype) for s in cloud.sets for p in s]
        )
        sxy = to_all.sum(0) - sxx
        yield statistic(sxx, row_sums.sum() - sxx - 2 * sxy, sxy)


def _within(cloud: Cloud, gram: Kernel, labels: Tensor) -> Tensor:
    """s^T K s for every column s of ``labels``, from the upper triangle of tiles."""
    out = cloud.centre.new_zeros(labels.shape[1])
    width = max(1, _INDICATORS // 64 // max(len(p.rows) for s in cloud.sets for p in s))
    for p, q, d2 in cloud.pairs():
        k = gram(d2)
        times = 1 if p is q else 2
        for i in range(0, labels.shape[1], width):
            left, right = (labels[t.pooled, i : i + width].to(k.dtype) for t in (p, q))
            out[i : i + width] += times * (left * (k @ right)).sum(0)
    return out
