r"""How close recorded attention is to kernel smoothing: one record for every head of every call.

Against the Nadaraya-Watson weights at h^2 = 1 / scale in the head's own space, without and with the key-norm prior
that makes them the model's (:mod:`nwflow.probe.weights`), and, where the inputs' features are given, at the bandwidth
h(t) = sigma / alpha of the flow (t = 0 noise, t = 1 data) in feature space:
softmax(-|x - alpha s|^2 / (2 sigma^2)) (Smola 2026, arXiv 2605.13386). That a v gives the model's own output
shows that q, k, masks and scale are the model's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nwflow.probe.call import Call
from nwflow.probe.result import Agreement, HeadResult
from nwflow.probe.statistics import best_bandwidth, means, nulls, row_sums
from nwflow.probe.weights import Block, Weights, weigh, working_dtype

__all__ = ["MANY", "measure"]

BLOCK = 2**20  # weights that are worked on at once
SUBSET = 2**16  # weights on which permutations and the search for a bandwidth are run, at least 2 queries
CHECKED = 128  # queries of a head whose output is checked
MANY = 16  # with more keys than this, and no references named, what single keys do is not listed


@torch.no_grad()
def measure(
    calls: Sequence[Call],
    *,
    branch: str = "",
    numbers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    draws: int = 40,
    seed: int = 0,
) -> list[HeadResult]:
    """The record of every head of calls of one shape (several steps of one layer, say); none of heads without a key.

    Args:
        calls: with equal shapes of q, k and v, equal references and kernel, of one branch.
        branch: its name. numbers: which call of its step each one is; 0 when None.
        heads: which heads; all when None. draws: permutations of the null, seed: theirs.

    Example:
        >>> k = torch.eye(4).expand(1, 2, 4, 4)
        >>> head = measure([Call("layer", q=2.0 * k, k=k)])[0]  # keys of one length: attention is the kernel smoother
        >>> head.spearman, round(head.total_variation, 12)
        (1.0, 0.0)
    """
    first = calls[0]
    picked = [h for h in range(first.q.shape[1]) if heads is None or h in heads]
    per = max(1, BLOCK // max(1, first.q.shape[0] * first.q.shape[2] * first.k.shape[2]))
    pairs = [(c, h) for c in range(len(calls)) for h in picked]
    found: list[HeadResult] = []
    for start in range(0, len(pairs), per):
        part = pairs[start : start + per]
        for (c, h), values in zip(part, _columns([(calls[c], h) for c, h in part], draws, seed), strict=True):
            if values["n_queries"]:
                found.append(_head(calls[c], h, branch, numbers[c] if numbers else 0, values))
    return found


def _head(call: Call, head: int, branch: str, number: int, values: dict[str, Any]) -> HeadResult:
    total = call.q.shape[2] if call.n_total is None else call.n_total
    return HeadResult(
        layer=call.layer,
        head=head,
        step=call.step or 0,
        call=number,
        part=call.part,
        branch=branch,
        kind=call.kind,
        n_total=total * call.q.shape[0],
        d_k=call.width,
        time=call.time,
        t=call.t,
        alpha=call.alpha,
        sigma=call.sigma,
        bandwidth=call.logit_scale**-0.5,
        schedule=_schedule(call, head),
        **values,
    )


def _columns(block: Block, draws: int, seed: int) -> list[dict[str, Any]]:
    """Everything that is computed, of heads of one shape at once; rows in blocks where one head is too much."""
    first = block[0][0]
    n, row = first.q.shape[2], len(block) * first.q.shape[0] * first.k.shape[2]
    step, sums = max(1, BLOCK // max(1, row)), {}
    for start in range(0, n, step):
        rows = slice(start, start + step)
        w = weigh(block, rows)
        part = {**row_sums(w), "reproduction_error": _output_error(block, rows, w, math.ceil(n / CHECKED))}
        for name, value in part.items():
            join = torch.fmax if name.endswith("_error") else torch.add
            sums[name] = value if name not in sums else join(sums[name], value)
    stride = max(1, min(math.ceil(n * row / SUBSET), n // 2))
    some = weigh(block, slice(0, n, stride)) if stride > 1 or step < n else w
    columns = {**means(sums), **nulls(some, draws, seed), **best_bandwidth(some)}
    columns["reproduction_error"] = sums["reproduction_error"]
    lists = {name: value.tolist() for name, value in columns.items()}
    return [_row(call, {name: value[i] for name, value in lists.items()}) for i, (call, _) in enumerate(block)]


def _row(call: Call, values: dict[str, Any]) -> dict[str, Any]:
    """One head's numbers as fields of its record: NaN becomes None, counts integers."""
    observed, draws = values.pop("observed_spearman"), values.pop("spearman_draws")
    masses = values.pop("key_mass")
    row = {name: None if math.isnan(value) else value for name, value in values.items()}
    at_least = sum(x >= observed - 1e-12 for x in draws)
    row["p_value"] = None if math.isnan(observed) else (1 + at_least) / (1 + len(draws))
    row["n_queries"], row["n_keys"] = int(values["n_queries"]), len(masses)
    if row["best_bandwidth"] is not None:
        row["best_bandwidth"] *= call.logit_scale**-0.5
    if call.checked is not None:
        row["reproduction_error"] = float(call.checked)
    row["listens"] = _listens(call, masses)
    return row


def _listens(call: Call, masses: list[float]) -> tuple[float, ...]:
    if call.references is None:
        return tuple(masses) if len(masses) <= MANY else ()
    found = [0.0] * (max(call.references) + 1)
    for reference, mass in zip([r for r in call.references if r >= 0], masses, strict=True):
        found[reference] += mass
    return tuple(found)


def _output_error(block: Block, rows: slice, w: Weights, stride: int) -> Tensor:
    """max |a v - output| over max |v|, of each head; NaN where there is nothing to check."""
    calls = [c for c, _ in block]
    if any(c.v is None or c.output is None or c.dropout for c in calls):
        return torch.full((len(block),), torch.nan, dtype=w.log_a.dtype, device=w.log_a.device)
    dtype = working_dtype(calls[0].q)
    v = torch.stack([c.v[:, h] for c, h in block]).to(dtype)  # type: ignore[index]
    output = torch.stack([c.output[:, h, rows][:, ::stride] for c, h in block]).to(dtype)  # type: ignore[index]
    factor = torch.tensor([c.output_scale for c in calls], dtype=dtype, device=v.device)[:, None, None, None]
    joint = w.joint[:, :, ::stride]
    error = (joint.exp() @ v * factor - output).abs()
    error = torch.where(output.isnan() & (joint == -torch.inf).all(-1, keepdim=True), 0.0, error)  # no key: no output
    size = (v.abs().amax((1, 2, 3)) * factor[:, 0, 0, 0].abs()).clamp(min=1e-30)
    return error.amax((1, 2, 3)) / size


def _schedule(call: Call, head: int) -> Agreement | None:
    """The same head against the exact posterior weights of its inputs' features at alpha and sigma."""
    if call.features is None or call.alpha is None or call.sigma is None or call.sigma <= 0:
        return None
    w = weigh([(call, head)])
    x, s = (u.to(w.log_a.dtype) for u in call.features)
    distance = torch.cdist(x, call.alpha * s, compute_mode="donot_use_mm_for_euclid_dist").square()
    if call.references is not None:
        distance = distance[..., [j for j, r in enumerate(call.references) if r >= 0]]
    distance = distance.expand(w.log_a.shape[1:])[None]
    logits = -distance / (2.0 * call.sigma**2)
    logits = logits if w.valid is None else logits.masked_fill(~w.valid, -torch.inf)
    logs = torch.log_softmax(torch.where(w.some[..., None], logits, 0.0), -1)
    found = means(row_sums(replace(w, log_nw=logs, distance=distance)))
    row = {name: float(value[0]) for name, value in found.items() if name != "key_mass"}
    return Agreement(
        bandwidth=call.sigma / call.alpha if call.alpha else None,
        spearman=_number(row["spearman"]),
        pearson=_number(row["pearson"]),
        total_variation=row["total_variation"],
        kl=row["kl"],
        same_nearest=row["same_nearest"],
        n_eff=row["n_eff_nw"],
    )


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
