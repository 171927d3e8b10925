r"""The numbers of a head from its weights: sums over rows, so that blocks of rows add up.

Spearman's correlation is that of mean ranks row by row: ranks of logits, which have an order even where weights
underflow, ties closer than rounding sharing their mean. Pearson's is of all weights at once, about their mean.
KL(a || nw_h) is convex in beta = 1 / h^2, with the derivative E_nw x - E_a x for x = -|q - k|^2 / 2:
the best bandwidth is one root.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nwflow.probe.weights import Weights

__all__ = ["best_bandwidth", "means", "nulls", "row_sums"]

MANY = 64  # keys from which the null is its normal limit
REACH = 100.0  # the best bandwidth is searched within this factor
TINY = 1e-24
AVERAGED = (
    "total_variation", "total_variation_with_prior", "kl", "same_nearest", "n_eff", "n_eff_nw", "reference_mass"
)  # fmt: skip


def row_sums(w: Weights) -> dict[str, Tensor]:
    """Sums over rows, ``(H,)`` each, that :func:`means` divides; ``_error`` ends those of which the maximum counts."""
    a, b, c = (u.exp() for u in (w.log_a, w.log_nw, w.log_prior))
    kl = torch.where(a > 0, a * (w.log_a - w.log_nw), 0.0).sum(-1)
    nearest = _nearest(w)
    sums = {
        "n_queries": torch.ones_like(kl),
        "total_variation": 0.5 * (a - b).abs().sum(-1),
        "total_variation_with_prior": 0.5 * (a - c).abs().sum(-1),
        "kl": kl,
        "same_nearest": torch.gather(nearest, -1, w.log_a.argmax(-1, keepdim=True)).squeeze(-1),
        "n_eff": a.square().sum(-1).reciprocal(),
        "n_eff_nw": b.square().sum(-1).reciprocal(),
        "reference_mass": w.mass,
    }
    row, defined = _spearman(*_ranks(w))
    sums |= {"spearman": torch.where(defined, row, 0.0), "spearman_defined": defined.to(row.dtype)}
    share = nearest / nearest.sum(-1, keepdim=True)
    found = {name: (value * w.some).sum((1, 2)) for name, value in sums.items()}
    found |= _squares(a, b, share, w)
    found["prior_square"], found["prior_sum"], found["prior_count"] = _prior(w)
    found["key_mass"] = (a * w.some[..., None]).sum((1, 2))
    found["identity_error"] = ((a - c).abs().amax(-1) * w.some).amax((1, 2))
    return found


def _nearest(w: Weights) -> Tensor:
    """1 on the nearest keys of every row (ties within rounding), 0 elsewhere."""
    top = w.log_nw.amax(-1, keepdim=True)
    return (w.log_nw >= top - 1e-9 * (1.0 + top.abs())).to(w.log_a.dtype)


def _squares(a: Tensor, b: Tensor, c: Tensor, w: Weights) -> dict[str, Tensor]:
    """Raveled second moments about 1 / m, and what moves them to the mean: every row of weights sums to 1."""
    m = a.shape[-1]
    inside = w.some[..., None].to(a.dtype) if w.valid is None else (w.valid & w.some[..., None]).to(a.dtype)
    a, b, c = ((u - 1.0 / m) * inside for u in (a, b, c))
    pairs = {"aa": (a, a), "bb": (b, b), "cc": (c, c), "ab": (a, b), "ac": (a, c)}
    found = {name: (u * v).sum((1, 2, 3)) for name, (u, v) in pairs.items()}
    count = (inside.expand_as(a)).sum((1, 2, 3))
    rows = w.some.sum((1, 2)).to(a.dtype)
    return found | {"count": count, "shift": rows - count / m}


def _prior(w: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of the log prior, centred in every row: log prior - log nw up to a constant."""
    finite = w.log_prior - torch.where(w.log_nw == -torch.inf, 0.0, w.log_nw)
    inside = torch.isfinite(finite) & w.some[..., None]
    finite = torch.where(inside, finite, 0.0)
    count = inside.sum(-1)
    finite = torch.where(inside, finite - (finite.sum(-1) / count.clamp(min=1))[..., None], 0.0)
    return finite.square().sum((1, 2, 3)), finite.sum((1, 2, 3)), count.sum((1, 2)).to(finite.dtype)


def means(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fields of the record from :func:`row_sums`; NaN where there is none."""
    n = sums["n_queries"]
    names = (
        "total_variation",
        "total_variation_with_prior",
        "kl",
        "same_nearest",
        "n_eff",
        "n_eff_nw",
        "reference_mass",
    )
    found = {name: sums[name] / n for name in names}
    found["n_queries"], found["identity_error"] = n, sums["identity_error"]
    found["key_mass"] = sums["key_mass"] / n[:, None]
    found["spearman"] = sums["spearman"] / sums["spearman_defined"]
    shift = sums["shift"].square() / sums["count"]
    aa, bb, cc, ab, ac = (sums[p] - shift for p in ("aa", "bb", "cc", "ab", "ac"))
    found["pearson"], found["pearson_nearest"] = _ratio(ab, aa, bb), _ratio(ac, aa, cc)
    found["prior_spread"] = (sums["prior_square"] / sums["prior_count"].clamp(min=1.0)).sqrt()
    return found


def _ratio(ab: Tensor, aa: Tensor, bb: Tensor) -> Tensor:
    """A correlation; NaN (None in the record) where one of the two does not vary."""
    return torch.where((aa > TINY) & (bb > TINY), ab / (aa * bb).clamp(min=TINY * TINY).sqrt(), torch.nan)


def _ranks(w: Weights) -> tuple[Tensor, Tensor]:
    """Centred ranks of the recorded and of the kernel's weights, 0 where a query may not look."""
    return _centred_ranks(w.log_a, w.valid), _centred_ranks(-w.distance, w.valid)


def _centred_ranks(values: Tensor, valid: Tensor | None) -> Tensor:
    """Mean ranks within rows less their mean; values closer than rounding are ties."""
    values = values if valid is None else values.masked_fill(~valid, torch.inf)  # to the end of every row
    ordered, order = values.sort(-1)
    last = ordered[..., 1:]
    size = torch.where(last.isfinite(), last.abs(), 1.0)
    new = torch.nn.functional.pad(last - ordered[..., :-1] > 1e-9 * (1.0 + size), (1, 0), value=True)
    place = torch.arange(values.shape[-1], device=values.device).expand_as(order)
    start = torch.where(new, place, 0).cummax(-1).values
    ends = torch.nn.functional.pad(new[..., 1:], (0, 1), value=True)
    end = torch.where(ends, place, values.shape[-1]).flip(-1).cummin(-1).values.flip(-1)
    ranks = torch.empty_like(values).scatter(-1, order, 0.5 * (start + end).to(values.dtype))
    if valid is None:
        return ranks - ranks.mean(-1, keepdim=True)
    ranks = torch.where(valid, ranks, 0.0)
    return torch.where(valid, ranks - ranks.sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp(min=1), 0.0)


def _spearman(ra: Tensor, rb: Tensor) -> tuple[Tensor, Tensor]:
    """Correlation of centred ranks row by row, and where it is defined."""
    aa, bb = ra.square().sum(-1), rb.square().sum(-1)
    defined = (aa > 0) & (bb > 0)
    return (ra * rb).sum(-1) / torch.where(defined, (aa * bb).sqrt(), 1.0), defined


def nulls(w: Weights, draws: int, seed: int) -> dict[str, Any]:
    """Spearman and Pearson with the keys of the kernel's weights permuted, the same permutation for every row.

    For more than ``MANY`` keys without a mask, the quantiles of its normal limit take the place of draws.
    Rows share what makes a key popular, so that permuting each row alone would call chance too small. Fields are 95 %
    quantiles, and ``spearman_draws`` ``(H, draws)`` with ``observed_spearman`` on the same rows for the p-value.
    """
    ra, rb = _ranks(w)
    norms = (ra.square().sum(-1) * rb.square().sum(-1)).sqrt()
    ra = ra * torch.where(norms > 0, 1.0 / norms.clamp(min=TINY), 0.0)[..., None]
    count = (norms > 0).sum((1, 2))
    m = ra.shape[-1]
    inside = w.some[..., None] if w.valid is None else w.valid & w.some[..., None]
    a, b = (torch.where(inside, u.exp() - 1.0 / m, 0.0) for u in (w.log_a, w.log_nw))
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(draws, m, generator=generator).to(ra.device)
    rank, weight = _permuted(ra, rb, order, w.valid), _permuted(a, b, order, w.valid)
    spearman = rank / count[:, None]
    moments = row_moments(a, b, inside)
    pearson = _ratio(weight - moments[2][:, None], moments[0][:, None], moments[1][:, None])
    return {
        "spearman_null": _quantile(spearman),
        "pearson_null": _quantile(pearson),
        "spearman_draws": spearman,
        "observed_spearman": (ra * rb).sum((1, 2, 3)) / count,
    }


def row_moments(a: Tensor, b: Tensor, inside: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Raveled variances of both and the shift of a product, all times the number of weights."""
    count = inside.expand_as(a).sum((1, 2, 3)).to(a.dtype)
    shift = a.sum((1, 2, 3)) * b.sum((1, 2, 3)) / count
    aa = a.square().sum((1, 2, 3)) - a.sum((1, 2, 3)).square() / count
    bb = b.square().sum((1, 2, 3)) - b.sum((1, 2, 3)).square() / count
    return aa, bb, shift


def _permuted(a: Tensor, b: Tensor, order: Tensor, valid: Tensor | None) -> Tensor:
    """Sums of a_j b_perm(j) over rows and keys for every permutation, ``(H, draws)``; keys stay among valid ones."""
    m = a.shape[-1]
    if valid is None and m > MANY:
        return _normal(a.flatten(1, 2), b.flatten(1, 2), len(order))
    if valid is None:
        product = torch.einsum("hbnj,hbnl->hjl", a, b)
        index = order.argsort(-1)
        return torch.stack([product[:, torch.arange(m, device=a.device), p].sum(-1) for p in index], -1)
    found = []
    base = (~valid).to(torch.int8).argsort(dim=-1, stable=True)
    for u in order:
        other = (u.expand_as(b) + 2.0 * (~valid)).argsort(-1)
        moved = torch.gather(b, -1, torch.empty_like(base).scatter(-1, base, other))
        found.append((a * moved).sum((1, 2, 3)))
    return torch.stack(found, -1)


def _normal(a: Tensor, b: Tensor, draws: int) -> Tensor:
    """Quantiles of the limit for many keys: normal, mean 0, the exact variance |sum_r a_r b_r^T|^2 / (m - 1) over all
    permutations of rows that sum to 0 (Hoeffding 1951)."""
    variance = ((a @ a.mT) * (b @ b.mT)).sum((1, 2)) / (a.shape[-1] - 1)
    p = (torch.arange(draws, dtype=a.dtype, device=a.device) + 0.5) / draws
    return variance.clamp(min=0.0).sqrt()[:, None] * torch.special.ndtri(p)


def _quantile(values: Tensor) -> Tensor:
    return values.sort(-1).values[..., min(values.shape[-1] - 1, math.ceil(0.95 * values.shape[-1]) - 1)]


def best_bandwidth(w: Weights) -> dict[str, Tensor]:
    """The factor on h that has the least mean KL (``best_bandwidth`` still as a factor), with its KL and distance."""
    a = w.log_a.exp() * w.some[..., None]
    inside = torch.isfinite(w.log_nw)
    x = torch.where(inside, w.log_nw, 0.0)
    goal = (a * x).sum((1, 2, 3))

    def at(log_beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = (log_beta.exp()[:, None, None, None] * x).masked_fill(~inside, -torch.inf)
        log_w = torch.log_softmax(logits, -1)
        p = log_w.exp() * w.some[..., None]
        first = (p * x).sum(-1)
        slope = (p * x.square()).sum((1, 2, 3)) - first.square().sum((1, 2))
        return log_w, first.sum((1, 2)) - goal, slope

    high = torch.full_like(goal, 2.0 * math.log(REACH))
    low, u = -high, torch.zeros_like(goal)
    exists = (at(low)[1] < 0) & (at(high)[1] > 0)
    for _ in range(14):
        _, value, slope = at(u)
        low, high = torch.where(value < 0, u, low), torch.where(value < 0, high, u)
        step = u - value / (slope * u.exp()).clamp(min=TINY)
        u = torch.where((step >= low) & (step <= high), step, 0.5 * (low + high))
    log_w = at(u)[0]
    n = w.some.sum((1, 2)).to(a.dtype)
    kl = torch.where(a > 0, a * (w.log_a - log_w), 0.0).sum((1, 2, 3)) / n
    tv = 0.5 * ((a - log_w.exp() * w.some[..., None]).abs()).sum((1, 2, 3)) / n
    fields = {"best_bandwidth": (-0.5 * u).exp(), "best_kl": kl, "best_total_variation": tv}
    return {name: torch.where(exists, value, torch.nan) for name, value in fields.items()}
