"""``nwflow sample --remedy``: a remedy fitted to the references, and the pool of other classes that it may need.

``auto`` is the remedy of the verdict: of a report, or of a diagnosis made here. Fields run from noise at t = 0 to data
at t = 1.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.console import Console

from nwflow.cli.findings import read_report
from nwflow.cli.options import FieldOptions, Source, optional
from nwflow.data import check_widths
from nwflow.data.source import plural
from nwflow.support import Support

AUTO = "auto"
TAKE_POOL = ("pool", "metric-within-class")
Advance = Callable[[str, float], None]


@dataclass(frozen=True)
class PoolOptions:
    """Other classes, whose shape helps where a class has few references."""

    pool: Annotated[str | None, optional("FILE")] = None
    """Labelled points of other classes, for references of one class (with --given: the other labels of SUPPORT)."""
    pool_label: Annotated[str | None, optional("NAME")] = None
    """Array or column with the labels of the pool (that of --label)."""

    def load_pool(self, source: Source, everything: Support, support: Support) -> Support | None:
        """The pool that was named, else what ``--given`` left of the same file; None where there is neither."""
        if self.pool is None:
            if self.pool_label is not None:
                raise ValueError("--pool-label: expected --pool FILE with it")
            return rest(everything, support)
        pool = source.other(self.pool, self.pool_label).load()
        check_widths(pool, support, f"--pool {self.pool}", f"references {source.support}")
        if pool.labels is None:
            raise ValueError(f"--pool {self.pool}: expected labels, one class each (--pool-label NAME), got none")
        return pool


def rest(everything: Support, support: Support) -> Support | None:
    """The classes of a labelled support that are not in ``support``, a part of it; None where nothing is left."""
    if everything.labels is None or support.labels is None:
        return None
    left = ~torch.isin(everything.labels, support.labels)
    return everything.select(left) if bool(left.any()) else None


@dataclass(frozen=True)
class RemedyOptions(PoolOptions):
    """What repairs the field."""

    remedy: Annotated[str | None, optional("NAME|auto")] = None
    """Repair the field by this remedy of nwflow diagnose (smoothing-full, say); auto: the one that helps most."""
    report: Annotated[str | None, optional("FILE")] = None
    """report.json that auto reads the remedy from, in place of measuring it."""

    def check(self, field: FieldOptions, guidance: float | None) -> None:
        """Refuse options that have no meaning beside the others."""
        if self.remedy is None:
            given = [name for name in ("pool", "pool_label", "report") if getattr(self, name) is not None]
            if given:
                raise ValueError(f"--{given[0].replace('_', '-')}: expected --remedy NAME or --remedy auto with it")
            return
        if self.report is not None and self.remedy != AUTO:
            raise ValueError(f"--report: no meaning for --remedy {self.remedy}; expected --remedy auto")
        if self.pool is not None and self.remedy not in (AUTO, *TAKE_POOL):
            raise ValueError(f"--pool: no meaning for --remedy {self.remedy}; expected auto, {' or '.join(TAKE_POOL)}")
        plain = FieldOptions()
        for name in ("smoothing", "smoothing_shape", "metric", "rank"):
            if getattr(field, name) != getattr(plain, name):
                raise ValueError(f"--{name.replace('_', '-')}: no meaning beside --remedy, which brings its own")
        if guidance is not None:
            raise ValueError("--guidance: no meaning beside --remedy")

    def fit(self, source: Source, everything: Support, support: Support, seed: int, advance: Advance | None) -> Any:
        """The fitted remedy; None where none is asked for, or none helps."""
        if self.remedy is None:
            return None
        from nwflow.diagnose import REMEDIES, fit_remedy

        if self.remedy not in (AUTO, *REMEDIES):
            raise ValueError(
                f"--remedy: expected auto, {' or '.join((', '.join(REMEDIES[:-1]), REMEDIES[-1]))}, got {self.remedy!r}"
            )
        pool, name = self.load_pool(source, everything, support), self.remedy
        if name == AUTO:
            name = self._best(source, support, pool, seed, advance)
        return None if name is None else fit_remedy(name, support, pool)

    def record(self, fitted: Any) -> dict[str, Any]:
        """What a file of samples says of the remedy; nothing where none was asked for."""
        if self.remedy is None:
            return {}
        if fitted is None:
            return {"remedy": "none"}
        pool = {"pool": self.pool or "the other labels"} if fitted.name in TAKE_POOL else {}
        return {"remedy": fitted.name, "remedy_settings": _plain(fitted.settings), **pool}

    def sentence(self, fitted: Any) -> str | None:
        """What is printed of the remedy."""
        if self.remedy is None:
            return None
        if fitted is None:
            return "No remedy helps on these references: the exact field itself."
        settings = ", ".join(f"{k} = {_text(v)}" for k, v in _plain(fitted.settings).items())
        return f"Remedy {fitted.name}" + (f": {settings}" if settings else "")

    def _best(
        self, source: Source, support: Support, pool: Support | None, seed: int, advance: Advance | None
    ) -> str | None:
        if self.report is not None:
            told = read_report(Path(self.report).expanduser())
            if told.data.d != support.d:
                size = plural(support.d, "number")
                raise ValueError(f"--report {self.report}: is of points of {told.data.d}, expected {size} each")
            return told.verdict.remedy
        from nwflow.diagnose import diagnose

        # sampled as one set, so diagnosed as one: labels would make a set of each class
        one = Support(support.points, support.raw_weights, mask=support.mask, rows=support.rows)
        return diagnose(one, pool=pool, seed=seed, source=source.support, progress=advance).verdict.remedy


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON values; what is no finite number, text or list is text."""
    values = {str(k): v.tolist() if hasattr(v, "tolist") else v for k, v in settings.items()}
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return {k: v if v is None or isinstance(v, bool | int | float | str | list) else str(v) for k, v in finite.items()}


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextlib.contextmanager
def progress_bars(quiet: bool, prefix: str = "", always: bool = False) -> Iterator[Advance | None]:
    """Bars on standard error, one a stage, gone at the end; None where nobody would see them."""
    if not (always or (sys.stderr.isatty() and not quiet)):
        yield None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=console.is_terminal) as bar:  # a log keeps the last state
        stages: dict[str, Any] = {}

        def advance(stage: str, share: float) -> None:
            if stage not in stages:  # what came before is over, whatever it said of itself
                for earlier in stages.values():
                    bar.update(earlier, completed=1.0)
                stages[stage] = bar.add_task(prefix + stage, total=1.0, visible=stage != "done")
            bar.update(stages[stage], completed=share)

        yield advance
