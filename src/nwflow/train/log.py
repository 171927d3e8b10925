"""What a run says on its way: a line of JSON for every record, TensorBoard, and a progress bar with the time left."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nwflow.data.save import replace


class Log:
    """Records of a run in ``RUN/log.jsonl`` and TensorBoard; nothing where ``run`` is None."""

    def __init__(self, run: Path | None, tensorboard: bool, step: int) -> None:
        self._file = self._writer = None
        if run is None:
            return
        path = run / "log.jsonl"
        _forget_after(path, step)
        self._file = path.open("a", encoding="utf-8")
        if tensorboard:
            self._writer = _summary_writer(run / "tensorboard", step)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """A record; numbers go to TensorBoard too, as ``kind/name``."""
        if self._file is None:
            return
        self._file.write(json.dumps({"kind": kind, "step": step, **values}, allow_nan=False) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Flush and close the files."""
        for file in (self._file, self._writer):
            if file is not None:
                file.close()
        self._file = self._writer = None


def read_log(run: str | Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The records of a run, all or of one kind (``train``, ``validation``)."""
    lines = (Path(run) / "log.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [record for record in records if kind in (None, record["kind"])]


def _forget_after(path: Path, step: int) -> None:
    """Drop records of steps that a resumed run takes again, and a last line that was cut off."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")

    def write(temporary: Path) -> None:
        temporary.write_text("".join(kept), encoding="utf-8")

    replace(path, write, force=True)


def _summary_writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        raise ImportError(
            "tensorboard: needs the package tensorboard: pip install 'nwflow[train]', or tensorboard=False "
            "(--no-tensorboard)"
        ) from None
    return SummaryWriter(str(folder), purge_step=step + 1)


class Bar:
    """A progress bar; ``bar(done, text)`` moves it to ``done``."""

    def __init__(self, progress: Any, task: Any) -> None:
        self._progress, self._task = progress, task

    def __call__(self, done: float, text: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=done, description=text)


@contextlib.contextmanager
def progress_bar(total: float, done: float, shown: bool) -> Iterator[Bar]:
    """A bar on standard error with the share done, the time spent and the time left."""
    if not shown:
        yield Bar(None, None)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as progress:
        task = progress.add_task("training", total=total)
        progress.update(task, completed=done)
        yield Bar(progress, task)
