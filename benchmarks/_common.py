"""What every benchmark needs: interleaved timing, the memory of a call, a description of the machine, bars.

Times are wall clock. Competitors take turns, once each per round and in reversed order every second round, so that
whatever else the machine does meets all of them; a ratio is the median over rounds of the ratio within a round.

Memory is what the kernel says: the high-water mark of the resident set (VmHWM of /proc/self/status), reset before the
call, less the resident set at that moment. It sees everything that a call touches, also scratch that PyTorch's own
allocator does not count, and exists on Linux only; elsewhere the column stays empty.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

PACKAGES = ("nwflow", "torch", "numpy", "deepinv", "torchvision", "pykeops")


# ------------------------------------------------------------------------------------------------------------- time


@dataclass(frozen=True)
class Timing:
    """Seconds per round, None for a round that was left out; of ``share`` of the work, to be divided by it."""

    rounds: tuple[float | None, ...]
    share: float = 1.0

    @property
    def seconds(self) -> float:
        return median(v for v in self.rounds if v is not None) / self.share

    @property
    def spread(self) -> float | None:
        """Interquartile range over median; None for fewer than three rounds."""
        taken = [v for v in self.rounds if v is not None]
        if len(taken) < 3:
            return None
        low, _, high = quantiles(taken, n=4, method="inclusive")
        return (high - low) / median(taken)

    def over(self, other: Timing) -> float:
        """The median over common rounds of the ratio of this to ``other``."""
        pairs = [(a, b) for a, b in zip(self.rounds, other.rounds, strict=True) if a is not None and b is not None]
        return median((a / self.share) / (b / other.share) for a, b in pairs)


def interleave(calls: Mapping[str, Callable[[], Any]], rounds: int, fewer: Mapping[str, int],
               shares: Mapping[str, float]) -> dict[str, Timing]:  # fmt: skip
    """Time every call once a round; a name in ``fewer`` only in the first so many rounds."""
    taken: dict[str, list[float | None]] = {name: [] for name in calls}
    for i in range(rounds):
        for name in calls if i % 2 == 0 else reversed(list(calls)):
            if i >= fewer.get(name, rounds):
                taken[name].append(None)
                continue
            start = time.perf_counter()
            calls[name]()
            taken[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(v), shares.get(name, 1.0)) for name, v in taken.items()}


# ----------------------------------------------------------------------------------------------------------- memory


def resident() -> tuple[float, float] | None:
    """(resident set, its high-water mark) in MiB; None where the kernel does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return found["VmRSS"], found["VmHWM"]


def settle() -> None:
    """Give freed memory back to the kernel, as far as the C library can."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return


@dataclass
class Memory:
    """MiB of a call: ``peak`` above the start while it ran, ``kept`` after it returned; None where unknown."""

    peak: float | None = None
    kept: float | None = None


def measured(call: Callable[[], Any]) -> tuple[Any, float, Memory]:
    """The value of one call, its seconds, and its memory."""
    settle()
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = resident()
    except OSError:
        before = None
    start = time.perf_counter()
    value = call()
    seconds = time.perf_counter() - start
    after = resident()
    if before is None or after is None:
        return value, seconds, Memory()
    settle()
    now = resident()
    assert now is not None
    return value, seconds, Memory(max(0.0, after[1] - before[0]), max(0.0, now[0] - before[0]))


# ---------------------------------------------------------------------------------------------- where it was measured


def machine() -> dict[str, Any]:
    """Processor, cores, threads, versions, load and date of a run; nothing that names the host."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "load": [round(v, 2) for v in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "versions": {name: v for name in PACKAGES if (v := _version(name)) is not None},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# -------------------------------------------------------------------------------------------------------------- bars


@dataclass(frozen=True)
class Bar:
    """What a figure has to be: ``measured`` at most (or at least) ``limit``."""

    what: str
    measured: float
    limit: float
    at_least: bool = False

    @property
    def passed(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def __str__(self) -> str:
        sign = "at least" if self.at_least else "at most"
        return f"{'pass' if self.passed else 'FAIL'}  {self.what}: {self.measured:.3g} ({sign} {self.limit:g})"


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, allow_nan=True) + "\n")
