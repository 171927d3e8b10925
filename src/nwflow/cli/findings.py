"""What a diagnosis says, on a terminal: the verdict, three gauges, the best remedies; and two diagnoses side by side.

Skill is 1 - error / error of the linear denoiser on held-out points between noise (t = 0) and data (t = 1).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from nwflow.cli.options import say

if TYPE_CHECKING:
    from nwflow.diagnose.result import Diagnosis, Regime, Remedy

SHOWN = 6  # remedies that are printed
_BAR = 16


def read_report(path: Path) -> Diagnosis:
    """The diagnosis in a ``report.json``, or in the folder that holds one; ValueError for any other file."""
    from nwflow.diagnose.result import Diagnosis

    path = report_file(path) or path
    try:
        return Diagnosis.from_json(path.read_text(encoding="utf-8"))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: is no report of nwflow diagnose ({error})") from None


def report_file(path: Path) -> Path | None:
    """The file of a diagnosis that ``path`` names, itself or its folder; None for what must be features."""
    if path.is_dir():
        return path / "report.json" if (path / "report.json").is_file() else None
    return path if path.suffix.lower() == ".json" else None


def say_findings(console: Console, diagnosis: Diagnosis, verbose: bool = False) -> None:
    """All of it, in the order in which it is read."""
    d, data = diagnosis, diagnosis.data
    classes = f" in {_count(len(data.classes), 'class', 'classes')}" if data.classes else ""
    queries = _count(data.queries, "query", "queries") + (
        f" from {data.held_out}" if data.held_out else ", left out in turn"
    )
    what = f"{_count(data.n, 'reference')} of {_count(data.d, 'number')}{classes}"
    say(console, f"{data.source}: {what}; {queries}; seed {d.run.seed}")
    if verbose:
        for note in data.notes:
            say(console, f"note: {note}")
    say(console, f"\n{d.verdict.text}\n")
    console.print(gauges(d, console))
    if verbose:
        for name, regime in d.regimes.items():
            say(console, f"{name}: {regime.text}")
    if d.remedies:
        say(console, "")
        console.print(remedies(d, None if verbose else SHOWN))


def gauges(d: Diagnosis, console: Console) -> Table:
    """Share of the error that each regime's intervention removes, as a bar and a number."""
    out = _table("", "share of the error", "", "95% interval", "removed by")
    full, empty = ("█", "░") if console.encoding.lower().startswith("utf") else ("#", "-")
    for name, regime in d.regimes.items():
        at = 0 if regime.skill_lost is None else round(_BAR * min(1.0, max(0.0, regime.skill_lost[0])))
        head = _marked(name, name == d.verdict.regime)
        out.add_row(head, full * at + empty * (_BAR - at), *_share(regime), regime.intervention)
    return out


def remedies(d: Diagnosis, most: int | None = None) -> Table:
    """Remedies by skill, beside the field without one."""
    out = _table("  remedy", "skill", "95% interval", "error / plug-in", right=(1, 2, 3))
    ranked = sorted(d.remedies, key=lambda r: -math.inf if r.skill is None else -r.skill)
    ranked = [r for r in ranked if r.skill is not None]
    for r in ranked[:most]:
        out.add_row(_marked(r.name, r.name == d.verdict.remedy), *_skill(r))
    out.add_row("  none (the exact field)", _two(plug_in_skill(d)), "", "1.00")
    if len(ranked) > len(ranked[:most]):
        out.caption = f"... and {len(ranked) - len(ranked[:most])} more in the report"
        out.caption_justify = "left"
    return out


def comparison(a: Diagnosis, b: Diagnosis) -> Table:
    """Both verdicts, gauges and best remedies, a column each."""
    out = _table("", f"A: {a.data.source}", f"B: {b.data.source}")
    for column in out.columns[1:]:
        column.overflow = "fold"
    both = (a, b)
    out.add_row("verdict", *(d.verdict.regime for d in both))
    for name in a.regimes:
        values = ["{}  ({})".format(*_share(d.regimes[name])) if name in d.regimes else "-" for d in both]
        out.add_row(name, *values)
    out.add_row("skill without remedy", *(_two(plug_in_skill(d)) for d in both))
    out.add_row("best remedy", *(d.verdict.remedy or "none helps" for d in both))
    out.add_row(
        "its skill", *(" ".join(_skill(d.remedy(d.verdict.remedy))[:2]) if d.verdict.remedy else "-" for d in both)
    )
    out.add_row("references", *(f"{d.data.n:,} of {_count(d.data.d, 'number')}" for d in both))
    out.add_row("error unit", *(d.verdict.unit for d in both))
    out.add_row("", *(d.verdict.text for d in both))
    return out


def plug_in_skill(d: Diagnosis) -> float | None:
    """Mean skill of the exact field over the window, on the scale of the remedies' skill."""
    if d.curves is None:
        return None
    curve = next((c for c in d.curves.denoisers if c.name == "plug-in"), None)
    found = [] if curve is None else [s[0] for s, w in zip(curve.skill, d.curves.window, strict=True) if w and s]
    return sum(found) / len(found) if found else None


def _share(regime: Regime) -> tuple[str, str]:
    if regime.skill_lost is None:
        return "-", "not measured"
    value, low, high = regime.skill_lost
    return f"{100 * value:.0f}%", f"{100 * low:.0f} .. {100 * high:.0f}%"


def _skill(r: Remedy) -> tuple[str, str, str]:
    spread = "" if r.skill_low is None or r.skill_high is None else f"{r.skill_low:.2f} .. {r.skill_high:.2f}"
    return _two(r.skill), spread, _two(None if r.error is None else r.error[0])


def _count(n: int, one: str, many: str | None = None) -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def _marked(name: str, decides: bool) -> str:
    return f"> {name}" if decides else f"  {name}"


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(*heads: str, right: tuple[int, ...] = (2, 3)) -> Table:
    out = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, head in enumerate(heads):
        out.add_column(head, justify="right" if i in right and len(heads) > 3 else "left")
    return out
