r"""What attention does with its references: whom it listens to, whose absence would matter, and whether it collapses.

With weights a over reference keys (t = 0 noise, t = 1 data), o = sum_j a_j v_j and J_r the keys of reference r,

    listens_r   = mean of sum_{j in J_r} a_j
    influence_r = mean of |o - o_{-r}|,     o_{-r} = softmax over the keys outside J_r of the same logits, times v,

the leave-one-out difference of :func:`nwflow.attention.leave_one_out` for a head's own weights, its length taken over
all heads. The softmax is taken anew and never by subtraction, which would lose all digits where a reference has nearly
all weight. Sums over rows are all that is held, so that memory does not grow with a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nwflow.probe.call import Call
from nwflow.probe.compare import MANY
from nwflow.probe.result import LayerResult, Map
from nwflow.probe.weights import Weights, attention_weights, weigh

__all__ = ["IGNORED", "Tally"]

IGNORED = 1e-3  # of the output's size: a reference that never moves the output by more is ignored
MEASURED = 64  # queries of a call at which references are left out
BINS = 1024  # of the histogram of log n_eff


@dataclass
class Tally:
    """Running sums of one softmax of one layer, one branch of the batch."""

    layer: str
    part: str
    branch: str
    kind: str
    n_heads: int
    n_keys: int
    names: tuple[str, ...]
    rows: float = 0.0
    size: float = 0.0
    measured: float = 0.0
    steps: set[int] = field(default_factory=set)
    listens: Tensor | None = None
    moved: Tensor | None = None
    most: Tensor | None = None
    histogram: Tensor = field(default_factory=lambda: torch.zeros(BINS))
    seen: Tensor | None = None
    maps: Tensor | None = None
    grid: tuple[int, int] | None = None

    @classmethod
    def of(cls, call: Call, branch: str) -> Tally:
        """An empty one for calls like this."""
        groups = _groups(call)
        count = 0 if groups is None else max(groups) + 1
        names = call.names if call.names and len(call.names) == count else tuple(str(r) for r in range(count))
        keys = call.k.shape[2] if call.references is None else sum(r >= 0 for r in call.references)
        return cls(call.layer, call.part, branch, call.kind, call.q.shape[1], keys, names)

    @torch.no_grad()
    def add(self, call: Call, heads: Sequence[int] | None) -> None:
        """Take one call of one branch."""
        picked = [h for h in range(call.q.shape[1]) if heads is None or h in heads]
        if not picked:
            return
        self.steps.add(call.step or 0)
        groups = _groups(call)
        if groups is None:
            a = attention_weights(call)[:, picked]
            self._count(a, ~a.isnan().any(-1))
            return
        w = weigh([(call, h) for h in picked])
        a = w.log_a.exp() * w.some[..., None]
        self._count(a, w.some)
        group = torch.tensor(groups, device=a.device)
        shares = a.new_zeros(*a.shape[:-1], len(self.names)).index_add_(-1, group, a)
        total = shares.sum((0, 1, 2)).cpu()
        self.listens = total if self.listens is None else self.listens + total
        self._draw(call, shares)
        if call.v is not None and len(self.names) > 1:
            rows = slice(0, call.q.shape[2], max(1, math.ceil(call.q.shape[2] * call.q.shape[0] / MEASURED)))
            self._leave_out(call, weigh([(call, h) for h in picked], rows), group, picked)

    def _count(self, a: Tensor, some: Tensor) -> None:
        n_eff = a.square().sum(-1)[some].reciprocal()
        place = (n_eff.log() / math.log(max(2, self.n_keys)) * BINS).long().clamp(0, BINS - 1)
        self.histogram += torch.bincount(place.flatten(), minlength=BINS).cpu()
        self.rows += float(some.sum())

    def _draw(self, call: Call, shares: Tensor) -> None:
        """Add to the map of every reference, over the queries of the whole layer."""
        n = call.q.shape[2] if call.n_total is None else call.n_total
        if call.grid is None or call.grid[0] * call.grid[1] != n:
            return
        if self.maps is None:
            self.grid, self.maps, self.seen = call.grid, torch.zeros(n, len(self.names)), torch.zeros(n)
        if self.grid != call.grid or self.seen is None:
            return
        rows = torch.arange(n) if call.rows is None else torch.tensor(call.rows)
        self.maps.index_add_(0, rows, shares.mean((0, 1)).float().cpu())
        self.seen.index_add_(0, rows, torch.ones(len(rows)))

    def _leave_out(self, call: Call, w: Weights, group: Tensor, picked: list[int]) -> None:
        assert call.v is not None
        v = call.v[:, picked].transpose(0, 1).to(w.log_a.dtype)
        if call.references is not None:
            v = v[..., [j for j, r in enumerate(call.references) if r >= 0], :]
        v = v * call.output_scale
        o = (w.log_a.exp() * w.some[..., None]) @ v
        self.measured += float(w.some[0].sum())
        lengths = [_difference(w, v, o, group == r) for r in range(len(self.names))]
        moved = torch.stack(lengths, -1)  # (B, n, R)
        total, most = moved.sum((0, 1)).cpu(), moved.amax((0, 1)).cpu()
        self.moved = total if self.moved is None else self.moved + total
        self.most = most if self.most is None else torch.maximum(self.most, most)
        self.size += float(o.square().sum())

    def result(self) -> LayerResult:
        """What was found."""
        size = math.sqrt(self.size / max(1.0, self.measured))
        known = self.moved is not None and self.most is not None
        ignored = tuple((self.most <= IGNORED * size).nonzero().flatten().tolist()) if known else ()  # type: ignore[operator]
        n_eff = (self._quantile(0.5), self._quantile(0.1), self._quantile(0.9))
        verdict, text = _verdict(n_eff[0], self.n_keys, [self.names[i] for i in ignored])
        return LayerResult(
            layer=self.layer,
            part=self.part,
            branch=self.branch,
            kind=self.kind,
            n_heads=self.n_heads,
            steps=tuple(sorted(self.steps)),
            references=self.names,
            listens=() if self.listens is None else tuple((self.listens / max(1.0, self.rows)).tolist()),
            influence=tuple((self.moved / self.measured).tolist()) if known else None,  # type: ignore[operator]
            output_size=size if known else None,
            ignored=ignored,
            n_eff=n_eff,
            n_keys=self.n_keys,
            verdict=verdict,
            text=text,
            maps=self._maps(),
        )

    def _quantile(self, q: float) -> float:
        """Of n_eff, from the histogram: within the width of a bin, log(m) / 1024."""
        place = int((self.histogram.cumsum(0) >= q * float(self.histogram.sum())).nonzero()[0])
        return 1.0 if place == 0 else max(2, self.n_keys) ** ((place + 0.5) / BINS)

    def _maps(self) -> tuple[Map, ...]:
        if self.maps is None or self.seen is None or self.grid is None:
            return ()
        mean = self.maps / self.seen.clamp(min=1.0)[:, None]
        columns = [
            [round(x, 5) if s else None for x, s in zip(mean[:, r].tolist(), self.seen.tolist(), strict=True)]
            for r in range(mean.shape[1])
        ]
        return tuple(Map(r, *self.grid, tuple(values)) for r, values in enumerate(columns))


def _groups(call: Call) -> list[int] | None:
    """The reference of every reference key; None where single keys are too many to be told apart."""
    if call.references is not None:
        groups = [r for r in call.references if r >= 0]
        return groups if call.references != tuple(range(call.k.shape[2])) or len(groups) <= MANY else None
    return list(range(call.k.shape[2])) if call.k.shape[2] <= MANY else None


def _difference(w: Weights, v: Tensor, o: Tensor, left: Tensor) -> Tensor:
    """|o - o_{-r}| over all heads, ``(B, n)``; 0 where no key remains or none was there."""
    logs = w.log_a.masked_fill(left, -torch.inf)
    remains = (logs > -torch.inf).any(-1, keepdim=True)
    others = torch.softmax(torch.where(remains, logs, 0.0), -1) @ v
    return torch.where(remains & w.some[..., None], o - others, 0.0).square().sum((0, -1)).sqrt()


def _verdict(n_eff: float, keys: int, ignored: list[str]) -> tuple[str, str]:
    if keys < 4:
        verdict, text = "few", f"{keys} keys are too few to speak of collapse: n_eff is {n_eff:.2f} in the median."
    elif n_eff < 2.0:
        verdict = "collapse"
        text = f"Half of the queries look at one of {keys} keys alone: collapse (median n_eff {n_eff:.2f})."
    elif n_eff > 0.95 * keys:
        verdict, text = (
            "uniform",
            f"Nearly all {keys} keys weigh the same (median n_eff {n_eff:.1f}): an average, not a choice.",
        )
    else:
        verdict, text = "selective", f"In the median {n_eff:.1f} of {keys} keys carry the weight."
    if ignored:
        text += f" Ignored everywhere: reference {', '.join(ignored)}."
    return verdict, text
