r"""Nearest-neighbour collapse: where the effective number of references falls, how it grows with m and falls with d.

A reference s_q is noised to x = alpha s_q + sigma eps and looks at the others alone:

.. math:: l_i = -\frac{|x - \alpha s_i|^2}{2 \sigma^2} = -\frac{|s_q + h\,\varepsilon - s_i|^2}{2 h^2}, \qquad
          h = \frac{\sigma}{\alpha} = s\, e^{-\text{log-SNR} / 2}, \qquad n_\text{eff} = \frac{1}{\sum_i w_i^2},

with t = 0 noise, t = 1 data, s = sqrt(tr Cov / d) the scale of the data and log-SNR = log(alpha^2 s^2 / sigma^2). Only
h enters, so this is the same on every Gaussian path; times are those of CondOT, h = (1 - t) / t. Points equal to s_q
are not among the others.

Law. At a fixed log-SNR n_eff is proportional to m while it is far above 1, and for independent coordinates its
logarithm is linear in d. For s_i ~ N(0, I_d), rho = e^log-SNR and |x / alpha|^2 at its mean d (1 + 1 / rho), from
n_eff = m (E e^l)^2 / E e^(2 l),

.. math:: \log \frac{n_\text{eff}}{m} = -d\,\Bigl(\log(1 + \rho) - \tfrac12 \log(1 + 2 \rho)
          + \frac{\rho}{1 + 2 \rho}\Bigr).

Other sizes. m' of m references are random subsets, d' of d dimensions random orthogonal projections, at the log-SNR of
the projected points: they keep the shape of the spectrum and of the distances, as more dimensions of the same kind
would (leading principal directions would change the spectrum with d'). Beyond m or d the line through the three
largest sizes is continued, log n_eff against log m or against d, kept within what is possible, 1 to m. Growth with m
steepens towards proportional, so that line errs low, the more so the nearer n_eff is to 1; its interval is that of
sampling alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nwflow.diagnose.dimension import concentration, intrinsic_dimension, missing_estimators
from nwflow.diagnose.geometry import centred
from nwflow.diagnose.result import Interval, Predicted
from nwflow.metrics._points import as_pair, as_rows, squared_distances
from nwflow.metrics.weights import effective_sample_size

__all__ = [
    "BySize",
    "at_log_snr",
    "concentration",
    "crossing",
    "intrinsic_dimension",
    "log_weights",
    "missing_estimators",
    "n_eff_by_d",
    "n_eff_by_m",
]

_REFERENCES = 10_000
_QUERIES = 256
_BOOTSTRAP = 200
_DRAWS = 8  # random subsets of each size
_SMALLEST = 8  # references in the smallest subset
_PROJECTIONS = 4
_PROJECTED = 2e10  # multiplications of all projections: fewer of them beyond
_FITTED = 3  # largest sizes that the continued line goes through
_FURTHER_M = (2, 4, 16, 64)
_SHARES_OF_D = (0.125, 0.25, 0.5, 0.75, 1.0)
_LARGEST_LOG_SNR = 600.0  # its exponential and those of the distances stay finite


class BySize(NamedTuple):
    """Median n_eff at several sizes, ascending, and the ``slope`` that continues it: d log n_eff / d log m (1 where
    n_eff is proportional to m) or d log n_eff / d d. Intervals are bootstraps over queries. Empty where there is
    nothing to measure: all points equal, or no other point."""

    values: tuple[Predicted, ...]
    slope: Interval | None


def at_log_snr(log_snr: float, scale: float) -> tuple[float, float]:
    """(t, bandwidth in data units) of CondOT at a log-SNR, for data of that scale.

    >>> at_log_snr(0.0, 3.0)
    (0.25, 3.0)
    """
    h = scale * math.exp(-log_snr / 2)
    return 1 / (1 + h), h


def crossing(log_snr: Sequence[float], n_eff: Sequence[float], level: float) -> float | None:
    """Log-SNR where n_eff first falls below ``level``, log n_eff interpolated linearly; None where it never does, or
    is below from the start.

    Raises
    ------
    ValueError
        For log-SNRs that do not ascend, as many n_eff, or numbers that are not positive.

    Examples
    --------
    >>> crossing([-2.0, 0.0, 2.0], [16.0, 4.0, 1.0], 2.0)
    1.0
    """
    if len(log_snr) != len(n_eff):
        raise ValueError(f"n_eff: expected one for each of the {len(log_snr)} log-SNRs, got {len(n_eff)}")
    if any(not b > a for a, b in pairwise(log_snr)):
        raise ValueError(f"log_snr: expected ascending numbers, got {list(log_snr)}")
    if not level > 0 or any(not v > 0 for v in n_eff):
        raise ValueError(f"n_eff, level: expected positive numbers, got {list(n_eff)} and {level}")
    for i in range(1, len(n_eff)):
        before, after = n_eff[i - 1], n_eff[i]
        if before >= level > after:
            share = math.log(before / level) / math.log(before / after)
            return log_snr[i - 1] + share * (log_snr[i] - log_snr[i - 1])
    return None


def log_weights(
    queries: Float[Tensor, "q d"], noise: Float[Tensor, "q d"], references: Float[Tensor, "m d"], bandwidth: float
) -> Float[Tensor, "q m"]:
    """Unnormalised log-weights of references seen from queries + bandwidth * noise, in float64.

    They differ from -|x - alpha s_i|^2 / (2 sigma^2) by |noise|^2 / 2: the differences s_q - s_i are taken first, so no
    digit is lost at small bandwidths.

    Examples
    --------
    >>> e = 4 * torch.eye(4, dtype=torch.float64)
    >>> float(effective_sample_size(log_weights=log_weights(e[:1], 0 * e[:1], e, 1.0))[0])
    1.0000006752
    """
    d2 = squared_distances(queries, references, references.mean(0))
    return _logits(queries, noise, references, d2, bandwidth)


def n_eff_by_m(
    points: Float[Tensor, "n d"], log_snr: float, seed: int = 0, held_out: Float[Tensor, "q d"] | None = None
) -> BySize:
    """Median n_eff against the number of other references at one log-SNR, and at 2, 4, 16 and 64 times as many.

    Parameters
    ----------
    points:
        Shape (n, d): references, of which at most 10,000 are drawn. Up to 256 of them are noised and left out in turn.
    log_snr:
        log(alpha^2 s^2 / sigma^2), s the scale of ``points``.
    seed:
        Of queries, noise, subsets and bootstrap.
    held_out:
        Points to noise instead; references equal to one are left out for it.

    Raises
    ------
    TypeError, ValueError
        Points that are no floating tensors with finite entries and one d, or a log-SNR outside -600 to 600.
    """
    seen = _seen(points, held_out, log_snr, seed)
    if seen is None:
        return BySize((), None)
    logits = _logits(seen.queries, seen.noise, seen.references, seen.d2, seen.bandwidth)
    full = int(seen.others.sum(1).double().median())
    sizes = [full]
    while sizes[-1] // 2 >= _SMALLEST:
        sizes.append(sizes[-1] // 2)
    sizes.reverse()
    tables = _over_subsets(logits, seen.others, sizes, seen.generator)
    predicted = [full * k for k in _FURTHER_M]
    return _by_size(sizes, tables, predicted, math.log, math.log, seen.generator)


def n_eff_by_d(
    points: Float[Tensor, "n d"], log_snr: float, seed: int = 0, held_out: Float[Tensor, "q d"] | None = None
) -> BySize:
    """Median n_eff against the number of dimensions at one log-SNR, and at 2 d. Parameters as in :func:`n_eff_by_m`."""
    seen = _seen(points, held_out, log_snr, seed)
    if seen is None:
        return BySize((), None)
    m, d = seen.references.shape
    sizes = sorted({max(1, round(share * d)) for share in _SHARES_OF_D})
    tables: list[list[Tensor]] = [[] for _ in sizes]
    tables[-1].append(_n_eff(seen, seen.references, seen.queries, seen.noise, seen.d2))
    for _ in range(max(1, min(_PROJECTIONS, int(_PROJECTED / (m * d * d)))) if len(sizes) > 1 else 0):
        basis = torch.randn(d, sizes[-2], generator=seen.generator, dtype=torch.float64).to(seen.references.device)
        basis = torch.linalg.qr(basis).Q
        s, q, eps = seen.references @ basis, seen.queries @ basis, seen.noise @ basis
        for size, table in zip(sizes[:-1], tables[:-1], strict=True):
            table.append(_n_eff(seen, s[:, :size], q[:, :size], eps[:, :size]))
    ceiling = math.log(int(seen.others.sum(1).max()))
    stacked = [torch.stack(table) for table in tables]
    return _by_size(sizes, stacked, [2 * d], float, lambda _: ceiling, seen.generator)


class _Seen(NamedTuple):
    """References and queries in units of the data's scale, and which references are others to each query."""

    references: Float[Tensor, "m d"]
    queries: Float[Tensor, "q d"]
    noise: Float[Tensor, "q d"]
    d2: Float[Tensor, "q m"]
    others: Bool[Tensor, "q m"]
    bandwidth: float
    generator: torch.Generator


def _seen(points: Tensor, held_out: Tensor | None, log_snr: float, seed: int) -> _Seen | None:
    if not -_LARGEST_LOG_SNR <= log_snr <= _LARGEST_LOG_SNR:  # false for NaN
        raise ValueError(f"log_snr: expected a number within +-{_LARGEST_LOG_SNR:.0f}, got {log_snr}")
    generator = torch.Generator().manual_seed(seed)
    if held_out is None:
        rows = as_rows(points, "points")
        x = centred(rows)
    else:
        rows, further = as_pair(points, held_out, ("points", "held_out"))
        x = centred(torch.cat([rows.double(), further.double()]))
    references, queries = x[: len(rows)], x[len(rows) :]
    scale = float(references.var(0, correction=0).mean().sqrt())
    if scale == 0:
        return None
    references = _some(references / scale, _REFERENCES, generator)
    queries = _some(references if held_out is None else queries / scale, _QUERIES, generator)
    noise = torch.randn(queries.shape, generator=generator, dtype=torch.float64).to(queries.device)
    d2 = squared_distances(queries, references, references.mean(0))
    others = d2 > 0
    able = others.any(1)
    if not bool(able.any()):
        return None
    return _Seen(references, queries[able], noise[able], d2[able], others[able], math.exp(-log_snr / 2), generator)


def _some(rows: Tensor, most: int, generator: torch.Generator) -> Tensor:
    return rows[torch.randperm(len(rows), generator=generator)[:most].sort().values.to(rows.device)]


def _logits(queries: Tensor, noise: Tensor, references: Tensor, d2: Tensor, h: float) -> Tensor:
    # -|s_q - s_i + h eps|^2 / (2 h^2) + |eps|^2 / 2, without the difference of large terms that the square would be
    cross = (noise * queries).sum(1, keepdim=True) - noise @ references.T
    return -(d2 / h + 2 * cross) / (2 * h)


def _n_eff(seen: _Seen, s: Tensor, q: Tensor, eps: Tensor, d2: Tensor | None = None) -> Tensor:
    """n_eff (q,) of projected references and queries, at the same log-SNR by their own scale."""
    h = seen.bandwidth * float(s.var(0, correction=0).mean().sqrt())
    d2 = squared_distances(q, s, s.mean(0)) if d2 is None else d2
    logits = _logits(q, eps, s, d2, h).masked_fill_(~seen.others, -torch.inf)
    return effective_sample_size(log_weights=logits)


def _over_subsets(logits: Tensor, others: Tensor, sizes: list[int], generator: torch.Generator) -> list[Tensor]:
    """For every size n_eff (draws, q) over that many other references: the first ones in a random order."""
    tables: list[list[Tensor]] = [[] for _ in sizes]
    for draw in range(_DRAWS):
        order = torch.randperm(logits.shape[1], generator=generator).to(logits.device)
        logs, other = logits[:, order], others[:, order]
        rank = other.cumsum(1)
        for size, table in zip(sizes, tables, strict=True):
            if draw > 0 and size == sizes[-1]:
                continue  # all that there are, but for the rare query with many equal points
            seen = min(logs.shape[1], int((rank.amin(0) < size).sum()) + 1)
            kept = other[:, :seen] & (rank[:, :seen] <= size)
            table.append(effective_sample_size(log_weights=logs[:, :seen].masked_fill(~kept, -torch.inf)))
    return [torch.stack(table) for table in tables]


def _by_size(
    sizes: list[int],
    tables: list[Tensor],
    further: list[int],
    coordinate: Callable[[float], float],
    ceiling: Callable[[float], float],
    generator: torch.Generator,
) -> BySize:
    """Medians over queries (their geometric mean over draws) with bootstrap intervals, and the line of log n_eff on the
    coordinate of a size, continued to ``further``; ``ceiling`` is the largest log n_eff that a size can have."""
    q = tables[0].shape[1]
    again = torch.randint(q, (_BOOTSTRAP, q), generator=generator).to(tables[0].device)
    logs = torch.stack([t.quantile(0.5, 1).log().mean() for t in tables])
    boot = torch.stack([t[:, again].quantile(0.5, 2).log().mean(0) for t in tables], 1)  # (bootstrap, sizes)
    values = [_predicted(size, logs[k], boot[:, k], ceiling(size), False) for k, size in enumerate(sizes)]
    if len(sizes) < 2:
        return BySize(tuple(values), None)
    u = torch.tensor([coordinate(size) for size in sizes[-_FITTED:]], dtype=torch.float64, device=logs.device)
    lines = torch.cat([logs[None], boot])[:, -_FITTED:]
    slope = (lines - lines.mean(1, keepdim=True)) @ (u - u.mean()) / (u - u.mean()).square().sum()
    for size in further:
        line = lines.mean(1) + slope * (coordinate(size) - u.mean())
        values.append(_predicted(size, line[0], line[1:], ceiling(size), True))
    low, high = slope[1:].quantile(0.025), slope[1:].quantile(0.975)
    return BySize(tuple(values), (float(slope[0]), float(low), float(high)))


def _predicted(size: float, log: Tensor, boot: Tensor, ceiling: float, extrapolated: bool) -> Predicted:
    low, high = boot.quantile(0.025), boot.quantile(0.975)
    value, low, high = (math.exp(min(max(float(v), 0.0), ceiling)) for v in (log, low, high))
    return Predicted(float(size), value, min(low, value), max(high, value), extrapolated)
