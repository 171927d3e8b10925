r"""``nwflow describe``: what a support holds, and how many references share the weight along the path.

Queries are draws of X_t = alpha X_1 + sigma X_0 with X_1 from the support (or from held-out points) and fixed X_0, from
noise at t = 0 to data at t = 1. n_eff = 1 / sum w^2 falls from the number of references to 1; *collapse* is where the
median query has n_eff < 2 (for two references, < 1.5): from there on one reference decides.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nwflow.cli.files import CONVENTION, versions
from nwflow.cli.options import FieldOptions, Flag, Source, Talk, load_queries, optional, say, warn_of_scale
from nwflow.field import NWField
from nwflow.support import Support

EXAMPLES = """Say what a support holds, and how many references share the weight along the path.

examples:
  nwflow describe digits
  nwflow describe features.parquet --label class
  nwflow describe references.npy --queries held_out.npy
"""
_ROWS, _HALVINGS = 9, 8


@dataclass(frozen=True)
class Along:
    """n_eff of the queries at one time: bandwidth h in data units, median, and the 10 % and 90 % quantiles."""

    t: float
    bandwidth: float
    n_eff: float
    low: float
    high: float


@dataclass(frozen=True)
class Describe:
    """The command; ``run`` prints a table or JSON."""

    source: Source
    field: FieldOptions
    talk: Talk
    queries: Annotated[str | None, optional("FILE")] = None
    """Follow these held-out points in place of the references themselves."""
    probes: int = 64
    """Queries that are followed along the path."""
    seed: int = 0
    """Seed of their noise."""
    json: Flag = False
    """Print JSON."""

    def run(self, command: Sequence[str], console: Console) -> None:
        if self.probes < 1:
            raise ValueError(f"--probes: expected at least 1, got {self.probes}")
        pool = self.source.load(drop_nonfinite=True)  # they are counted and reported, which is what this command is for
        support = self.source.chosen(pool)
        field = self.field.build(pool, support)
        queries, ratio = field.support.points[field.support.valid], None
        if self.queries is not None:
            queries = load_queries(self.queries, "--queries", self.source, field.support)
            ratio = warn_of_scale(queries, f"--queries {self.queries}", field.support, self.source)
        facts = support.describe().to_dict()
        facts["first_dropped"] = _first_missing(pool)
        facts["near_distance"] = field.length_scales()[1] * math.sqrt(field.d) if support.unique > 1 else None
        along, collapse = follow(field, queries, self.probes, self.seed)
        result = {
            "support": self.source.support,
            "summary": facts,
            "path": repr(field.path),
            "convention": CONVENTION,
            "queries": self.queries,
            "mean_norm_ratio": ratio if ratio is not None and math.isfinite(ratio) else None,
            "probes": self.probes,
            "n_eff": [asdict(row) for row in along],
            "collapse": None if collapse is None else asdict(collapse),
            "versions": versions(),
        }
        if self.json:
            console.file.write(json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
            return
        self._say(console, result, along, collapse)

    def _say(self, console: Console, result: dict[str, Any], along: Sequence[Along], collapse: Along | None) -> None:
        facts = result["summary"]
        out = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
        out.add_column(style="bold")
        out.add_column(overflow="fold")
        for name, value in _facts(facts, self.source.drop_nonfinite):
            out.add_row(name, value)
        say(console, result["support"])
        console.print(out)
        if not along:
            say(console, "\nAll references are at one place: the denoiser is that point at every time.")
            return
        whose = f"points of {self.queries}" if self.queries else "the references"
        say(console, f"\nEffective references n_eff of noisy draws of {whose}: {result['path']}, {CONVENTION}")
        console.print(_path_table(along, facts["data_scale"], facts["n_used"]))
        say(console, _verdict(collapse, facts["data_scale"]))


def _facts(facts: dict[str, Any], dropped_on_request: bool) -> list[tuple[str, str]]:
    used = "" if facts["n_used"] == facts["n"] else f", {facts['n_used']} of positive weight"
    rows = [
        ("references", f"{facts['n']:,}{used}"),
        ("event", f"{tuple(facts['event_shape'])}, d = {facts['d']:,}, {facts['dtype']}"),
        ("duplicates", f"{facts['duplicates']:,}"),
        ("constant columns", f"{facts['constant_columns']:,} of {facts['d']:,}"),
        ("data scale", f"{facts['data_scale']:.4g}  (sqrt(tr Cov / d))"),
        ("mean norm", f"{facts['mean_norm']:.4g}"),
    ]
    if facts["near_distance"] is not None:
        rows.append(("near neighbours", f"{facts['near_distance']:.4g} apart  (5% quantile of nearest distances)"))
    if facts["labels"] is not None:
        labels = [f"{name} ({count:,})" for name, count in facts["labels"].items()]
        rows.append(("labels", ", ".join(labels[:12]) + (f", ... {len(labels)} in all" if len(labels) > 12 else "")))
    if facts["n_dropped"]:
        first = f", first at row {facts['first_dropped']}" if facts["first_dropped"] is not None else ""
        needs = "" if dropped_on_request else "; nwflow sample needs --drop-nonfinite"
        rows.append(("NaN or infinity", f"{facts['n_dropped']:,} dropped{first}{needs}"))
    return rows + [("note", note) for note in facts["notes"]]


def _path_table(along: Sequence[Along], scale: float, m: int) -> Table:
    out = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("t", "bandwidth h", "h / data scale", "n_eff (median)", "10% .. 90%"):
        out.add_column(name, justify="right")
    for row in along:
        h, median, spread = row.bandwidth, f"{row.n_eff:,.1f} of {m:,}", f"{row.low:,.1f} .. {row.high:,.1f}"
        out.add_row(f"{row.t:.3f}", f"{h:.3g}", f"{h / scale:.3g}", median, spread)
    return out


def _verdict(collapse: Along | None, scale: float) -> str:
    if collapse is None:
        return "No collapse: on this path the weight stays with several references."
    h = f"{collapse.bandwidth:.3g} = {collapse.bandwidth / scale:.2g} data scales"
    return f"Collapse at t = {collapse.t:.3f} (h = {h}): from there on, one reference has most of the weight."


def _first_missing(support: Support) -> int | None:
    """The first row of the source that is not in the support, where rows were dropped."""
    if not support.n_dropped:
        return None
    kept = set(support.rows.tolist())
    return next((i for i in range(support.m + support.n_dropped) if i not in kept), None)


def follow(field: NWField, points: Tensor, probes: int, seed: int) -> tuple[list[Along], Along | None]:
    """n_eff along the path around its fall, and where it collapses (None: nowhere).

    Args:
        points: ``(k, *event)``, where queries come from; a random part of ``probes`` of them (with return if fewer).
    """
    scale = float(field.support.data_scale)
    if not math.isfinite(scale):
        raise ValueError("support: expected references whose squares do not overflow, got a spread that does")
    if scale == 0.0:
        return [], None
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(points), generator=generator)
    chosen = order[torch.arange(probes) % len(order)].to(points.device)
    dtype = torch.promote_types(points.dtype, torch.float32)
    x1 = points[chosen].to(dtype)
    z = torch.randn(x1.shape, generator=generator, dtype=torch.float32).to(x1)

    def at(h: float) -> Along:
        t = float(field.path.time_at(h))
        alpha = float(field.path(t).alpha)
        x = alpha * x1 + (field.prior(z, t) - field.prior(torch.zeros_like(z), t))  # noise, and smoothing if any
        n_eff = field.n_eff(x, t).double().cpu()
        low, median, high = n_eff.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
        return Along(t, h, median, low, high)

    least, most = field.path.bandwidth_range
    bottom, top = max(least, 1e-3 * scale), min(most, 30 * scale * math.sqrt(field.d))
    m = float(1 / field.support.weights.double().square().sum())  # n_eff where nothing is known
    ends = at(bottom), at(top)
    collapse = None if m < 1.5 else _crossing(at, *ends, min(2.0, (1 + m) / 2))
    wide = _crossing(at, *ends, 0.9 * m)
    upper = min(top, 1.5 * wide.bandwidth) if wide else top
    lower = max(bottom, collapse.bandwidth / 2) if collapse and collapse.bandwidth < upper else bottom
    return [at(upper * (lower / upper) ** (k / (_ROWS - 1))) for k in range(_ROWS)], collapse


def _crossing(at: Callable[[float], Along], low: Along, high: Along, level: float) -> Along | None:
    """Where the median n_eff falls below ``level``: halving in log h, then log n_eff linear in log h; None: nowhere."""
    if low.n_eff >= level:
        return None
    if high.n_eff < level:
        return high
    for _ in range(_HALVINGS):
        middle = at(math.sqrt(low.bandwidth * high.bandwidth))
        low, high = (middle, high) if middle.n_eff < level else (low, middle)
    part = math.log(level / low.n_eff) / math.log(high.n_eff / low.n_eff)
    return at(low.bandwidth * (high.bandwidth / low.bandwidth) ** part)
