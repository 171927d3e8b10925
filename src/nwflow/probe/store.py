r"""What a recording holds: tensors within a limit, and the numbers of those that are no longer held.

Memory stays flat (t = 0 noise to t = 1 data, however many steps): tensors wait until they fill a buffer, are measured
together, many steps of one layer at once, and are dropped. Who keeps tensors keeps them within the limit: beyond it
their queries are halved, the same half for all calls of a layer, and where keys fill it, numbers are left.
"""

from __future__ import annotations

import platform
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch

from nwflow.diagnose.result import _plain
from nwflow.probe.call import Call
from nwflow.probe.compare import measure
from nwflow.probe.meaning import Tally
from nwflow.probe.result import FORMAT, HeadResult, ProbeResult
from nwflow.probe.weights import split_branches

__all__ = ["Options", "Store"]

AUTO = 2**13  # weights of a head that a call contributes
MOST = 256  # queries, unless they are all drawn on a grid
FEWEST = 8  # queries, whatever the number of keys
BUFFER = 2**28  # bytes that wait to be measured
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Options:
    """How a recording was asked for; see :func:`nwflow.probe.record`."""

    layers: tuple[str, ...] = ("*",)
    heads: tuple[int, ...] | None = None
    keep: str = "statistics"
    limit: int = 2**30
    queries: int | str = "auto"
    seed: int = 0
    branches: tuple[str, ...] | None = None
    references: tuple[int, ...] | None = None
    names: tuple[str, ...] | None = None
    grid: tuple[int, int] | None = None
    draws: int = 40

    def __post_init__(self) -> None:
        if self.keep not in ("statistics", "tensors"):
            raise ValueError(f'keep: expected "statistics" or "tensors", got {self.keep!r}')
        whole = isinstance(self.queries, int) and not isinstance(self.queries, bool)
        if self.queries not in ("auto", "all") and not (whole and int(self.queries) >= 1):
            raise ValueError(f'queries: expected a number of at least 1, "auto" or "all", got {self.queries!r}')
        if self.limit < 1:
            raise ValueError(f"limit: expected a number of bytes, got {self.limit}")
        if self.draws < 1:
            raise ValueError(f"draws: expected at least 1 permutation, got {self.draws}")

    def count(self, n: int, m: int) -> int:
        """How many of n queries over m keys are kept."""
        if self.queries == "all":
            return n
        most = n if self.grid is not None and self.grid[0] * self.grid[1] == n else MOST
        return min(n, max(FEWEST, min(most, AUTO // m)) if self.queries == "auto" else int(self.queries))

    def described(self, call: Call) -> Call:
        """The record with references, grid and branches where they fit and it has none."""
        own: dict[str, Any] = {}
        if call.references is None and self.references is not None and len(self.references) == call.k.shape[2]:
            own |= {"references": self.references, "names": self.names}
        n = call.q.shape[2] if call.n_total is None else call.n_total
        if call.grid is None and self.grid is not None and self.grid[0] * self.grid[1] == n:
            own["grid"] = self.grid
        if call.branches is None and self.branches is not None:
            own["branches"] = self.branches
        return replace(call, **own) if own else call


class Store:
    """Calls that are held, numbers of those that were, and running sums of what layers do with references."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.calls: list[Call] = []
        self.heads: list[HeadResult] = []
        self.tallies: dict[tuple[str, str, str], Tally] = {}
        self.bytes = self.peak = self.thinned = self.measured = self.number = 0
        self.total = self.kept = self.dropout = 0
        self.empty = True
        self._numbers: defaultdict[tuple[str, str, int], int] = defaultdict(int)
        self._number_of: dict[int, int] = {}
        self._tolerance: dict[str, float] = {}
        self._branches: list[str] = []
        self._reported: list[HeadResult] = []

    def add(self, call: Call) -> None:
        """Take a copy of a record, and keep within the limit."""
        self.empty = False
        for _ in range(self.thinned):
            call = _halved(call)
        call = call.detached()
        key = (call.layer, call.part, call.step or 0)
        self._number_of[id(call)] = self._numbers[key]
        self._numbers[key] += 1
        self._note(call)
        self.calls.append(call)
        self.bytes += call.bytes
        self.peak = max(self.peak, self.bytes)
        if self.options.keep == "statistics":
            if self.bytes > min(self.options.limit // 2, BUFFER):
                self.flush()
            return
        while self.bytes > self.options.limit and any(c.q.shape[2] > FEWEST for c in self.calls):
            self.thinned += 1
            self._replace([_halved(c) for c in self.calls])
        if self.bytes > self.options.limit:
            self.measured += len(self.calls)
            self.flush()

    def _note(self, call: Call) -> None:
        self.total += call.q.shape[2] if call.n_total is None else call.n_total
        self.kept += call.q.shape[2]
        self.dropout += call.dropout
        self._tolerance[call.layer] = max(self._tolerance.get(call.layer, 0.0), _tolerance(call))
        for name in call.branches or ("",):
            if name not in self._branches:
                self._branches.append(name)

    def _replace(self, calls: list[Call]) -> None:
        for old, new in zip(self.calls, calls, strict=True):
            self._number_of[id(new)] = self._number_of.pop(id(old)) if new is not old else self._number_of[id(old)]
        self.calls, self.bytes = calls, sum(c.bytes for c in calls)

    def flush(self) -> None:
        """Measure what is held and drop it."""
        self._measure(self.calls, self.heads, self.tallies)
        self.calls, self.bytes = [], 0
        self._number_of.clear()

    def _measure(self, calls: list[Call], heads: list[HeadResult], tallies: dict[Any, Tally]) -> None:
        groups: defaultdict[Any, list[tuple[Call, int]]] = defaultdict(list)
        for call in calls:
            for branch, part in split_branches(call):
                groups[_alike(part, branch)].append((part, self._number_of[id(call)]))
                key = (part.layer, part.part, branch)
                if key not in tallies:
                    tallies[key] = Tally.of(part, branch)
                tallies[key].add(part, self.options.heads)
        for key, members in groups.items():
            heads += measure(
                [c for c, _ in members],
                branch=key[0],
                numbers=[i for _, i in members],
                heads=self.options.heads,
                draws=self.options.draws,
                seed=self.options.seed,
            )

    def result(self, model: str, found: dict[str, int], troubles: dict[str, str], branch: str | None) -> ProbeResult:
        """Numbers of all calls, held or not, of one branch (the last when None) or ``"all"``."""
        if branch not in (None, "all") and branch not in self._branches:
            raise ValueError(f"branch: expected all or one of {self._branches}, got {branch!r}")
        if self.options.keep == "statistics":
            self.flush()
        heads, tallies = list(self.heads), self.tallies
        if self.calls:
            tallies = {} if not self.heads else dict(self.tallies)
            self._measure(self.calls, heads, tallies)
        chosen = self._branches if branch == "all" else [branch if branch is not None else self._branches[-1]]
        heads = sorted(
            (h for h in heads if h.branch in chosen or (h.branch == "" and branch is None)),
            key=lambda h: (h.step, h.call),
        )
        self._reported = heads
        if not heads:
            raise ValueError("record: expected at least one query that sees a key in the selected heads, got none")
        layers = [t.result() for t in tallies.values() if t.rows and (t.branch in chosen or t.branch == "")]
        return ProbeResult(
            format=FORMAT,
            model=model,
            heads=tuple(heads),
            layers=tuple(layers),
            found=found,
            settings=_plain(self.options) | {"branch": branch or chosen[0]},
            notes=tuple(self._notes(troubles)),
            versions={"torch": torch.__version__, "python": platform.python_version()},
        )

    def _notes(self, troubles: dict[str, str]) -> list[str]:
        notes = []
        if self.kept < self.total or self.thinned:
            how = f", halved {self.thinned} times to hold {self.options.limit} bytes" if self.thinned else ""
            notes.append(
                f"{self.kept} of {self.total} queries were recorded, drawn with seed {self.options.seed}{how}; "
                "heads are means over those."
            )
        if self.measured:
            notes.append(
                f"The tensors of {self.measured} calls did not fit into {self.options.limit} bytes: numbers alone."
            )
        if self.dropout:
            notes.append(
                f"{self.dropout} calls dropped weights: weights are those before dropout, and are not checked."
            )
        if len(self._branches) > 1:
            notes.append(f"Branches of the batch, {', '.join(self._branches)}, were measured apart and never averaged.")
        notes += [f"{layer} was not recorded: {why}" for layer, why in troubles.items()]
        return notes + [f"{layer}: error {e:.2g} against its own output" for layer, e, _ in self.wrong()]

    def wrong(self) -> list[tuple[str, float, float]]:
        """Layers whose record does not give what the model computed: (layer, error, what rounding allows)."""
        worst: defaultdict[str, float] = defaultdict(float)
        for h in self._reported:
            worst[h.layer] = max(worst[h.layer], h.reproduction_error or 0.0)
        return [(k, e, self._tolerance[k]) for k, e in worst.items() if e > self._tolerance[k]]


def _alike(call: Call, branch: str) -> tuple[Any, ...]:
    """What calls must share to be measured together, the branch first."""
    none = tuple(u is None for u in (call.v, call.output, call.checked, call.features))
    shape = None if call.v is None else tuple(call.v.shape)
    return (
        branch, call.layer, call.part, call.kind, call.kernel, tuple(call.q.shape), tuple(call.k.shape), shape,
        call.causal, call.dropout, call.references, none, call.q.device,
    )  # fmt: skip


def _halved(call: Call) -> Call:
    """Every other query; a call of few stays."""
    n = call.q.shape[2]
    return call if n <= FEWEST else call.take(torch.arange(0, n, 2)).detached()


def _tolerance(call: Call) -> float:
    dtypes = {u.dtype for u in (call.q, call.v, call.output) if u is not None}
    if torch.is_autocast_enabled(call.q.device.type):
        dtypes.add(torch.bfloat16)
    return max(TOLERANCE.get(d, 1e-4) for d in dtypes)
