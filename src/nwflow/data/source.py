"""What a file turns out to be before anything in it is trusted, and the one record that every reader returns.

Readers look at the first bytes, never at the name alone: an HTML page or a pointer that stands in for the data, a
pickle, an empty or a cut file are each one sentence that names the path. No reader unpickles, imports or follows a path
that it found in a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PICKLE_ADVICE = "refused, because reading one can run code; save plain numbers (.npy, .safetensors)"


class MissingDataError(FileNotFoundError, ValueError):
    """A path or a bundled data set that is not there."""


@dataclass(frozen=True)
class Loaded:
    """Points ``(m, *event)`` (tensor or array) with what came beside them."""

    points: Any
    labels: Any = None
    weights: Any = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Options:
    """What the caller of :func:`~nwflow.data.load_support` asked of a reader; None where nothing was said."""

    key: str | None = None
    label: str | None = None
    weights: str | None = None
    columns: Sequence[str] | None = None
    limit: int | None = None
    encoder: Callable[[Any], Any] | None = None
    size: int | tuple[int, int] | None = None

    def refuse(self, source: Path | str, kind: str, *names: str) -> None:
        """ValueError for those of the named options that were given: nothing is ignored silently."""
        given = [name for name in names if getattr(self, name) is not None]
        if given:
            raise ValueError(f"{source}: {', '.join(given)}: no meaning for {kind}")

    def first_rows(self, values: Any) -> Any:
        """The first ``limit`` rows of a tensor or an array (None stays None)."""
        return values if values is None or values.ndim == 0 else values[: self.limit]


def check_present(path: Path, what: str) -> bytes:
    """The first bytes of a file that is there, not empty, and not a stand-in for the data."""
    if path.is_symlink() and not path.exists():
        annex = "annex/objects" in str(path.readlink())
        hint = "a git-annex link whose content is not here (git annex get)" if annex else "a link to nothing"
        raise MissingDataError(f"{path}: is {hint}, not {what}")
    if not path.is_file():
        raise MissingDataError(f"{path}: no such file")
    with path.open("rb") as file:
        head = file.read(1024)
    if not head:
        raise ValueError(f"{path}: file is empty")
    if impostor := _impostor(head):
        raise ValueError(f"{path}: is {impostor}, not {what}")
    return head


def _impostor(head: bytes) -> str | None:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<!-- ", b"<?xml")):
        return "an HTML page"
    if text.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer (git lfs pull)"
    if text.startswith((b"/annex/objects/", b"../.git/annex/", b".git/annex/")):
        return "a git-annex pointer (git annex get)"
    return None


def is_pickle(head: bytes) -> bool:
    """True for a pickle of protocol 2 or later."""
    return len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5


def not_a(path: Path, head: bytes, what: str) -> ValueError:
    """The error for a file whose first bytes do not belong to its format."""
    if is_pickle(head):
        return ValueError(f"{path}: is a Python pickle, not {what}: {PICKLE_ADVICE}")
    return ValueError(f"{path}: is not {what} (it starts with {head[:8]!r})")


def truncated(path: Path, expected: int | None = None, got: int | None = None) -> ValueError:
    """The error for a file that ends early."""
    sizes = "" if expected is None else f": expected {expected} bytes, got {got}"
    return ValueError(f"{path}: file is truncated{sizes}")


def choose(path: Path, names: Iterable[str], key: str | None, argument: str = "key") -> str:
    """The array to read: the one asked for, the only one, or the one called ``points``."""
    names = list(names)
    if key is not None:
        if key not in names:
            raise ValueError(f"{path}: {argument}: no {key!r}; the file holds {first(names, 20) or 'nothing'}")
        return key
    if len(names) == 1 or "points" in names:
        return names[0] if len(names) == 1 else "points"
    if not names:
        raise ValueError(f"{path}: no references (the file holds no array)")
    raise ValueError(f"{path}: holds several arrays, choose one with {argument}=: {first(names, 20)}")


def plural(n: int, word: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{n} {word}{'' if n == 1 else 's'}"


def first(values: Sequence[str], n: int = 5) -> str:
    """The first names of a list."""
    return ", ".join(values[:n]) + (f", ... ({len(values)} in all)" if len(values) > n else "")
