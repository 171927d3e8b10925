r"""What a probe says: frozen records that go to JSON and back (``result.json``); the report reads only these.

Of every softmax of every layer, head and step (t = 0 noise, t = 1 data): its weights a against the Nadaraya-Watson
weights w_j ~ exp(-|q - k_j|^2 / (2 h^2)) at the head's own h^2 = 1 / scale, sqrt(d) by default, and against those with
the prior masses exp(|k_j|^2 / (2 h^2)), which are a itself (Smola 2026, arXiv 2605.13386). Means are over the recorded
queries of one branch of the batch. What does not exist is None (null), never NaN.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nwflow.diagnose.result import _built, _plain

__all__ = ["Agreement", "HeadResult", "LayerResult", "ProbeResult"]

FORMAT = 1


@dataclass(frozen=True)
class Agreement:
    """Recorded weights against one kernel: Spearman's rank correlation row by row (mean), Pearson's of all weights at
    once, total variation and KL(a || w) in nats (means), the share of queries whose largest weight is on the same key,
    and ``n_eff`` of the kernel's weights (mean); ``bandwidth`` its h."""

    bandwidth: float | None
    spearman: float | None
    pearson: float | None
    total_variation: float
    kl: float
    same_nearest: float
    n_eff: float


@dataclass(frozen=True)
class HeadResult:
    """One head in one softmax (``part``) of one call of a layer at one step, one branch of the batch.

    ``n_queries`` rows (over the batch) of ``n_total`` were compared, over ``n_keys`` keys. ``spearman``, ``pearson``,
    ``total_variation``, ``kl``, ``same_nearest``: against NW at h = ``bandwidth`` without prior.
    ``total_variation_with_prior``: mean with the key-norm prior; ``identity_error``: the largest difference of one
    weight there. ``n_eff`` of the recorded weights and ``n_eff_nw`` of NW's (means).
    ``best_bandwidth``: the h whose NW weights have the least KL (None: none in a factor 100 about ``bandwidth``), with
    ``best_kl`` and ``best_total_variation``.
    ``reference_mass``: weight on reference keys before they are renormalised, 1 where all keys are references.
    ``spearman_null``, ``pearson_null``: 95 % quantiles when keys are permuted, ``p_value`` of the Spearman by the same
    permutations. ``pearson_nearest``: Pearson's correlation of the recorded weights with 1 on the nearest key and 0
    elsewhere: what agreement on the nearest neighbour alone would give.
    ``reproduction_error``: largest difference of a v and the model's own output, over the largest |v|.
    ``prior_spread``: standard deviation over keys of |k|^2 / (2 h^2), the log prior, in nats.
    ``schedule``: against the bandwidth h(t) = sigma / alpha of the flow itself in feature space, where that was given.
    ``listens``: mean weight of each reference.
    """

    layer: str
    head: int
    step: int
    call: int
    part: str
    branch: str
    kind: str
    n_queries: int
    n_total: int
    n_keys: int
    d_k: int
    time: float | None
    t: float | None
    alpha: float | None
    sigma: float | None
    bandwidth: float
    spearman: float | None
    pearson: float | None
    total_variation: float
    kl: float
    same_nearest: float
    total_variation_with_prior: float
    identity_error: float
    n_eff: float
    n_eff_nw: float
    best_bandwidth: float | None
    best_kl: float | None
    best_total_variation: float | None
    reference_mass: float
    spearman_null: float | None
    pearson_null: float | None
    p_value: float | None
    pearson_nearest: float | None
    reproduction_error: float | None
    prior_spread: float
    schedule: Agreement | None
    listens: tuple[float, ...]


@dataclass(frozen=True)
class Map:
    """Mean weight of one reference at each query, ``values`` row by row on the grid ``rows`` x ``columns`` of queries;
    None where that query was not recorded."""

    reference: int
    rows: int
    columns: int
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class LayerResult:
    """What a layer does with its references, over heads, steps and recorded queries of one branch.

    ``listens``: mean weight of each reference (they sum to 1); ``influence``: mean length by which the attention output
    (all heads) moves when that reference is left out and the others are renormalised, beside the output's own root mean
    square length ``output_size``; ``ignored``: references that move it by less than a thousandth of that at every
    step, at up to 64 queries each. ``n_eff``: (median, 10 %, 90 %) of the number of keys in use, over heads, queries
    and steps, within 1 %; ``verdict``: ``collapse`` (the median below 2 of at least 4 keys), ``uniform`` (above 95 % of
    the keys), ``selective`` or ``few`` (fewer than 4 keys), in one sentence ``text``.
    """

    layer: str
    part: str
    branch: str
    kind: str
    n_heads: int
    steps: tuple[int, ...]
    references: tuple[str, ...]
    listens: tuple[float, ...]
    influence: tuple[float, ...] | None
    output_size: float | None
    ignored: tuple[int, ...]
    n_eff: tuple[float, float, float]
    n_keys: int
    verdict: str
    text: str
    maps: tuple[Map, ...] = ()


@dataclass(frozen=True)
class ProbeResult:
    """A whole probe; ``result.json`` is :meth:`to_json`. ``found``: how many modules and calls of each kind were there;
    ``settings``: how the recording was asked for; ``notes``: what a reader must know, subsampled queries first."""

    format: int
    model: str
    heads: tuple[HeadResult, ...]
    layers: tuple[LayerResult, ...]
    found: dict[str, int]
    settings: dict[str, Any]
    notes: tuple[str, ...]
    versions: dict[str, str]

    def fraction_above(self, level: float = 0.9, field: str = "spearman") -> float:
        """Share of the records whose ``field`` exceeds ``level``; those where it is undefined count as not above."""
        values = [getattr(h, field) for h in self.heads]
        return sum(v is not None and v > level for v in values) / len(values)

    def select(self, **where: Any) -> tuple[HeadResult, ...]:
        """The heads whose fields have these values: ``select(layer="blocks.0.attn", step=3, branch="cond")``."""
        return tuple(h for h in self.heads if all(getattr(h, k) == v for k, v in where.items()))

    def to_dict(self) -> dict[str, Any]:
        """Types of JSON alone; numbers that do not exist are None."""
        return _plain(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ProbeResult:
        """The record that :meth:`to_dict` wrote; ValueError for anything else."""
        if not isinstance(values, Mapping) or values.get("format") != FORMAT:
            found = values.get("format") if isinstance(values, Mapping) else type(values).__name__
            raise ValueError(f"values: expected a probe of format {FORMAT}, got {found!r}")
        return _built(cls, values)

    @classmethod
    def from_json(cls, text: str) -> ProbeResult:
        return cls.from_dict(json.loads(text))
