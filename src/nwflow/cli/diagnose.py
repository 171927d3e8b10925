"""``nwflow diagnose``: why conditioning on these references fails, and which remedy helps, measured on held-out points.

The field runs from noise at t = 0 to data at t = 1. What is measured, and what a verdict rests on, is in
:mod:`nwflow.diagnose`; here files become its arguments, and its result becomes a page, a record and a few lines.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from tyro.conf import Positional, arg

from nwflow.cli.files import output_folder, write_text
from nwflow.cli.findings import comparison, read_report, report_file, say_findings
from nwflow.cli.options import Flag, PathOptions, Source, Talk, optional, say
from nwflow.cli.remedy import PoolOptions, progress_bars
from nwflow.data import check_same_scale, check_widths
from nwflow.support import Support

if TYPE_CHECKING:
    from nwflow.diagnose.result import Diagnosis

EXAMPLES = """Say why conditioning on these references fails, and which remedy helps: a verdict and an HTML report.

examples:
  nwflow diagnose digits
  nwflow diagnose features.parquet --label class
  nwflow diagnose references.npy --held-out held_out.npy --normalize
  nwflow diagnose digits --given 3 --out threes
  nwflow diagnose --compare encoder_a.npy encoder_b.npy
"""


@dataclass(frozen=True)
class Features(Source):
    """What the references are."""

    support: Annotated[Positional[str], arg(metavar="FEATURES", help_behavior_hint="")] = ""
    """File (.npy .npz .safetensors .pt .parquet .csv .arrow idx), folder of images, "digits" or "fashion-mnist"."""


@dataclass(frozen=True)
class Measurement:
    """What is measured, and on what."""

    held_out: Annotated[str | None, optional("FILE")] = None
    """Measure on these points; without them, on references that are left out in turn."""
    held_out_label: Annotated[str | None, optional("NAME")] = None
    """Array or column with the labels of the held-out points (that of --label)."""
    unit: Literal["auto", "raw", "relative"] = "auto"
    """Error that decides: raw, per coordinate; relative, per principal direction; auto: raw for images alone."""
    image: Literal["auto", "yes", "no"] = "auto"
    """Whether the points are images; auto: by their shape."""
    queries: int = 400
    """Held-out points that are measured, at most."""
    references: int = 20_000
    """References that are used, at most."""
    seed: int = 0
    """Seed of the choice of queries and of their noise."""

    def check(self) -> None:
        for name, least in (("queries", 1), ("references", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name}: expected at least {least}, got {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"--seed: expected a number from 0, got {self.seed}")
        if self.held_out is None and self.held_out_label is not None:
            raise ValueError("--held-out-label: expected --held-out FILE with it")

    def load_held_out(self, source: Source, support: Support) -> Support | None:
        """The held-out points, read and normalised as the references are."""
        if self.held_out is None:
            return None
        held = source.other(self.held_out, self.held_out_label).load()
        check_widths(held, support, f"--held-out {self.held_out}", f"references {source.support}")
        return held


@dataclass(frozen=True)
class Loaded:
    """What is measured: references of a file, points beside them, what to note of these, and names of columns."""

    file: str
    support: Support
    pool: Support | None
    held_out: Support | None
    notes: tuple[str, ...]
    names: list[str] | None


@dataclass(frozen=True)
class Report:
    """What is written, and where."""

    out: Annotated[str | None, arg(aliases=("-o",), metavar="FOLDER", help_behavior_hint="")] = None
    """Folder for report.html and report.json (diagnosis; comparison with --compare)."""
    force: Flag = False
    """Replace files that are there."""
    json: Flag = False
    """Print report.json in place of the verdict."""
    progress: Flag = False
    """Show progress even where standard error is no terminal."""


@dataclass(frozen=True)
class Diagnose:
    """The command; ``run`` writes the report and prints the verdict."""

    source: Features
    measurement: Measurement
    pool: PoolOptions
    path: PathOptions
    report: Report
    talk: Talk
    compare: Annotated[tuple[str, str] | None, optional("A B")] = None
    """Two files of features, or two reports, side by side (two encoders of the same images, say)."""

    def run(self, command: Sequence[str], console: Console) -> None:
        """Check what can be checked, measure, write, say."""
        self.measurement.check()
        self.path.build_path()
        if self.compare is not None:
            self._compare(command, console, *self.compare)
            return
        if not self.source.support:
            raise ValueError("expected FEATURES, or --compare A B (see nwflow diagnose --help)")
        folder = Path(self.report.out or "diagnosis").expanduser()
        with output_folder(folder, ("report.html", "report.json"), self.report.force) as (page, record):
            found = self._measure(self._load(self.source.support), command)
            write_diagnosis(found, page, record, self.report.force)
        if self.report.json:
            console.file.write(found.to_json())
            return
        say_findings(console, found, self.talk.verbose)
        if found.verdict.remedy is not None:
            again = shlex.join(["--remedy", "auto", "--report", str(record)])
            say(console, f"\nSample with the remedy: nwflow sample {shlex.quote(self.source.support)} ... {again}")
        say(console, f"wrote {page}, {record}")

    def _load(self, file: str) -> Loaded:
        """Everything that the measurement of one file reads, checked."""
        source, m = replace(self.source, support=file), self.measurement
        everything = source.load()
        support = source.chosen(everything)
        pool = self.pool.load_pool(source, everything, support)
        held = m.load_held_out(source, support)
        notes = _norms(support, file, {"--held-out": (held, m.held_out), "--pool": (pool, self.pool.pool)})
        return Loaded(file, support, pool, held, notes, source.column_names())

    def _measure(self, loaded: Loaded, command: Sequence[str], prefix: str = "") -> Diagnosis:
        """The diagnosis of what was loaded."""
        from nwflow.diagnose import diagnose

        m = self.measurement
        with progress_bars(self.talk.quiet, prefix, self.report.progress) as advance:
            found = diagnose(
                loaded.support,
                path=self.path.build_path(),
                held_out=loaded.held_out,
                pool=loaded.pool,
                unit=None if m.unit == "auto" else m.unit,
                seed=m.seed,
                queries=m.queries,
                references=m.references,
                image={"auto": None, "yes": True, "no": False}[m.image],
                names=loaded.names,
                normalize=self.source.normalize,
                progress=advance,
                source=loaded.file,
                command=shlex.join(["nwflow", *command]),
                held_out_name=m.held_out,
            )
        return replace(found, data=replace(found.data, notes=(*found.data.notes, *loaded.notes)))

    def _compare(self, command: Sequence[str], console: Console, *files: str) -> None:
        from nwflow.report import write_comparison

        if self.source.support:
            raise ValueError(f"--compare: names both files; expected no FEATURES beside it, got {self.source.support}")
        reports = [report_file(Path(file).expanduser()) for file in files]
        if all(reports):
            self._refuse_measuring()
        folder, names = Path(self.report.out or "comparison").expanduser(), ("report-a.json", "report-b.json")
        with output_folder(folder, ("comparison.html", *names), self.report.force) as (page, *records):
            known = [self._load(f) if r is None else read_report(r) for r, f in zip(reports, files, strict=True)]
            a, b = (
                self._measure(one, command, f"{letter}: ") if isinstance(one, Loaded) else one
                for letter, one in zip("AB", known, strict=True)
            )
            for found, record in zip((a, b), records, strict=True):
                write_text(record, found.to_json(), self.report.force)
            write_comparison(a, b, page, self.report.force)
        if self.report.json:
            both = {"a": a.to_dict(), "b": b.to_dict()}
            console.file.write(json.dumps(both, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
            return
        console.print(comparison(a, b))
        say(console, f"wrote {', '.join(map(str, (page, *records)))}")

    def _refuse_measuring(self) -> None:
        """Nothing is measured where both are reports: options of the measurement have no meaning."""
        for part in (self.source, self.measurement, self.pool, self.path):
            for f in fields(part):
                if getattr(part, f.name) != f.default:
                    option = f.name.replace("_", "-")
                    raise ValueError(f"--{option}: no meaning for --compare of two reports, which are measured already")


def write_diagnosis(found: Diagnosis, page: Path, record: Path, force: bool) -> None:
    """The page and the record, each whole or not at all; the page is made before either is written."""
    from nwflow.report import render

    html = render(found)
    write_text(record, found.to_json(), force)
    write_text(page, html, force)


def _norms(support: Support, name: str, others: dict[str, tuple[Support | None, Any]]) -> tuple[str, ...]:
    """What to note of other points whose mean norm is not that of the references; warns above a factor of 2."""
    notes = []
    for option, (points, file) in others.items():
        if points is None or file is None:
            continue
        ratio = check_same_scale(points, support, f"{option} {file}", f"references {name}")
        if ratio > 2 and math.isfinite(ratio):
            notes.append(f"{option} {file}: mean norm differs from that of the references by a factor of {ratio:.3g}")
    return tuple(notes)
