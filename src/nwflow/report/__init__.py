"""Diagnoses and probes as HTML: one file that needs no network, no server and no other file.

>>> import nwflow.report
>>> nwflow.report.write_report(None, "report.html")
Traceback (most recent call last):
TypeError: diagnosis: expected a Diagnosis, got NoneType
"""

from __future__ import annotations

from pathlib import Path

from nwflow.data.save import replace
from nwflow.diagnose.result import Diagnosis
from nwflow.probe.result import ProbeResult
from nwflow.report import _page
from nwflow.report._probe import probe_page

__all__ = ["render", "render_comparison", "render_probe", "write_comparison", "write_probe_report", "write_report"]


def render(diagnosis: Diagnosis) -> str:
    """The report as one self-contained HTML page.

    Raises:
        TypeError: not a :class:`~nwflow.diagnose.result.Diagnosis`.
    """
    return _page.report(_page.checked(diagnosis))


def render_comparison(a: Diagnosis, b: Diagnosis) -> str:
    """Two diagnoses side by side (two encoders of the same files, say) as one self-contained HTML page.

    Raises:
        TypeError: one is not a :class:`~nwflow.diagnose.result.Diagnosis`.
    """
    return _page.comparison(_page.checked(a, "a"), _page.checked(b, "b"))


def write_report(diagnosis: Diagnosis, path: str | Path, force: bool = False) -> Path:
    """Write :func:`render` to ``path`` (``.html``), whole or not at all; its path.

    Raises:
        FileExistsError: the file is there and ``force`` is False. FileNotFoundError: its folder is not.
        ValueError: another extension. TypeError: not a :class:`~nwflow.diagnose.result.Diagnosis`.
    """
    return _write(render(diagnosis), path, force)


def write_comparison(a: Diagnosis, b: Diagnosis, path: str | Path, force: bool = False) -> Path:
    """Write :func:`render_comparison` to ``path`` as :func:`write_report` does."""
    return _write(render_comparison(a, b), path, force)


def render_probe(result: ProbeResult) -> str:
    """A probe as one self-contained HTML page.

    Raises:
        TypeError: not a :class:`~nwflow.probe.ProbeResult`.
    """
    if not isinstance(result, ProbeResult):
        raise TypeError(f"result: expected a ProbeResult, got {type(result).__name__}")
    return probe_page(ProbeResult.from_dict(result.to_dict()))


def write_probe_report(result: ProbeResult, path: str | Path, force: bool = False) -> Path:
    """Write :func:`render_probe` to ``path`` as :func:`write_report` does."""
    return _write(render_probe(result), path, force)


def _write(html: str, path: str | Path, force: bool) -> Path:
    path = Path(path).expanduser()
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"path: expected the extension .html, got {path.name!r}")

    def write(temporary: Path) -> None:
        temporary.write_text(html, encoding="utf-8", newline="\n")

    return replace(path, write, force)
