"""``nwflow demo``: digits drawn class by class, from noise (t = 0) to data (t = 1), beside the references behind them,
and the diagnosis of these references.

The field of a class is ``field.given(labels=[c])``. Followed to the end it lands on its references, one each: every
sample is a copy. Stopped at a bandwidth h where a few references still share the weight, the denoiser D = sum_i w_i s_i
is a blend of them, and w says of which.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from PIL.Image import Image
from rich.console import Console
from tyro.conf import arg

from nwflow.cli import attribution, picture
from nwflow.cli.diagnose import write_diagnosis
from nwflow.cli.files import CONVENTION, output_folder, run_record, write_csv, write_json, write_png
from nwflow.cli.findings import gauges
from nwflow.cli.options import Flag, Talk, say
from nwflow.cli.remedy import progress_bars
from nwflow.data import load_support, save_points
from nwflow.field import NWField
from nwflow.paths import CondOT
from nwflow.sample import sample
from nwflow.support import Support

EXAMPLES = """Draw handwritten digits class by class, show which references made each, and diagnose them. Half a minute.

examples:
  nwflow demo
  nwflow demo --bandwidth 0 --no-diagnosis
  nwflow demo --per-class 8 --seed 1 --out more-digits
"""
_FOLDER = "nwflow-demo"
_QUERIES = 100  # of the diagnosis: enough for the verdict, and quick


@dataclass(frozen=True)
class Demo:
    """The command; ``run`` writes a folder and prints what to look at."""

    talk: Talk
    out: Annotated[str | None, arg(aliases=("-o",), metavar="FOLDER", help_behavior_hint="")] = None
    """Folder to write (the first free one of nwflow-demo, nwflow-demo-2, ...)."""
    per_class: int = 4
    """Samples of each digit."""
    bandwidth: float = 0.5
    """Where to stop and take the denoiser, in units of the pixels (0 to 1); 0 follows the field to the end."""
    seed: int = 0
    """Seed of the noise of digit 0; digit c has SEED + c."""
    diagnosis: bool = True
    """Diagnose the references, each digit as a set of its own."""
    force: Flag = False
    """Replace files that are there."""

    def run(self, command: Sequence[str], console: Console) -> None:
        if self.per_class < 1:
            raise ValueError(f"--per-class: expected at least 1, got {self.per_class}")
        folder = _free_folder() if self.out is None else Path(self.out).expanduser()
        names = ["samples.safetensors", "demo.png", "attribution.csv", "attribution.json"]
        names += ["report.html", "report.json"] if self.diagnosis else []
        with output_folder(folder, names, self.force) as paths:
            self._run(command, console, paths)

    def _run(self, command: Sequence[str], console: Console, paths: Sequence[Path]) -> None:
        start = time.perf_counter()
        support = load_support("digits")
        field = NWField(support, CondOT())
        drawn, made = [], []
        for c, label in enumerate(support.label_names or ()):
            part = field.given(labels=[label])
            samples = sample(part, self.per_class, seed=self.seed + c, stop_at=self.bandwidth or None)
            points = samples.denoised if self.bandwidth else samples.points
            drawn.append((samples, points))
            made.append(attribution.who_made(points, samples, part.support))
        seconds = time.perf_counter() - start
        self._write(command, paths, support, field, drawn, made)
        self._say(console, paths, support, made, seconds)
        if self.diagnosis:
            self._diagnose(command, console, support, paths[4], paths[5])

    def _write(self, command: Any, paths: Sequence[Path], support: Support, field: Any, drawn: Any, made: Any) -> None:
        first = drawn[0][0]
        record = run_record(
            command,
            support="digits",
            references=support.m,
            path=repr(field.path),
            accuracy=1e-3,
            method=first.method,
            grid="log_bandwidth",
            stop_at=self.bandwidth or None,
            denoise=bool(self.bandwidth),
            seed=self.seed,
            evaluations=first.evaluations,
        )
        points = torch.cat([p for _, p in drawn])
        classes = list(support.label_names or ())
        extra = {
            "labels": torch.tensor(classes).repeat_interleave(self.per_class),
            "references": torch.cat([s.attribution.indices for s, _ in drawn]),
            "reference_weights": torch.cat([s.attribution.weights for s, _ in drawn]),
        }
        save_points(paths[0], points, record, extra=extra, force=self.force)
        write_png(paths[1], self._picture(support, drawn, made), record, self.force)
        pairs = [(label, m) for label, of_class in zip(classes, made, strict=True) for m in of_class]
        write_csv(paths[2], [{"class": label, **m.flat(5)} for label, m in pairs], self.force)
        rows = [{"class": label, **asdict(m)} for label, m in pairs]
        counted = attribution.summary([m for _, m in pairs])
        write_json(paths[3], {"run": record, "summary": counted, "samples": rows}, self.force)

    def _picture(self, support: Support, drawn: Any, made: Any) -> Image:
        brush = picture.Brush.of(support.points, invert=True)
        assert brush is not None
        pairs = zip(drawn, made, strict=True)
        rows = [attribution.units(brush.paint(points), of_class, support, brush, 3) for (_, points), of_class in pairs]
        labels = [str(name) for name in support.label_names or ()]
        title, subtitle = (
            "Digits from the exact field",
            "framed: a sample; beside it: the nearest references; red: a copy",
        )
        if self.bandwidth:
            title = "Digits blended from references of their class"
            subtitle = "framed: a sample; beside it: its three main references and their weights; red: a copy"
        return picture.attribution(rows, labels, title, subtitle)

    def _say(self, console: Console, paths: Sequence[Path], support: Support, made: Any, seconds: float) -> None:
        flat = [m for of_class in made for m in of_class]
        shown = flat if self.talk.verbose else [of_class[0] for of_class in made]
        heads = [str(label) for label in support.label_names or () for _ in range(len(shown) // len(made))]
        each = f"{self.per_class} of each digit, from {support.m:,} references in {seconds:.1f} s ({CONVENTION})"
        say(console, f"{len(flat)} samples, {each}")
        say(console, "Which references made them" + (":" if self.talk.verbose else ", the first of each digit:"))
        console.print(attribution.table(shown, first="digit", heads=heads))
        say(console, attribution.sentence(flat) + "\n")
        for text in (
            f"Look at   {paths[1]}",
            f"Read      {paths[2]}, {paths[3].name}, {paths[0].name}",
            "Then try  nwflow demo --bandwidth 0      followed to the end, every sample is a copy",
            "          nwflow describe digits         why: from some bandwidth on, one reference decides",
            "          nwflow sample digits --given 3 8 --n 16 --stop-at 0.5 --denoise",
        ):
            say(console, text)

    def _diagnose(self, command: Sequence[str], console: Console, support: Support, page: Path, record: Path) -> None:
        from nwflow.diagnose import diagnose

        say(
            console, "\nDoes conditioning on these references work? Each digit is measured on digits that are left out:"
        )
        line = shlex.join(["nwflow", *command])
        with progress_bars(self.talk.quiet) as advance:
            found = diagnose(support, queries=_QUERIES, seed=self.seed, progress=advance, source="digits", command=line)
        write_diagnosis(found, page, record, self.force)
        say(console, found.verdict.text)
        console.print(gauges(found, console))
        for text in (
            f"Look at   {page}",
            "Then try  nwflow diagnose YOUR-FEATURES --label COLUMN",
            f"          nwflow sample digits --given 3 --remedy auto --report {record}",
        ):
            say(console, text)


def _free_folder() -> Path:
    folder, k = Path(_FOLDER), 2
    while folder.exists():
        folder, k = Path(f"{_FOLDER}-{k}"), k + 1
    return folder
