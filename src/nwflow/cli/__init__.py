"""The command line: ``nwflow sample``, ``describe``, ``diagnose``, ``probe``, ``demo``; it knows all others.

Exit codes: 0, 2 for what the caller can put right (one line on standard error), 130 after Ctrl-C. Fields run from noise
at t = 0 to data at t = 1.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from tyro.conf import OmitArgPrefixes, subcommand

import nwflow
from nwflow.cli import demo, describe, diagnose, evaluate, probe, sample, train

__all__ = ["main"]

DESCRIPTION = """The exact flow field of a set of references: samples, attribution, diagnosis. t=0 noise, t=1 data.

nwflow COMMAND --help says more; nwflow --version prints the version.
"""
_CALLERS = (ValueError, TypeError, OSError, ImportError, MemoryError, torch.cuda.OutOfMemoryError)
# How the library's messages name what is an option here.
_OPTIONS = {
    r"drop_nonfinite=True": "--drop-nonfinite",
    r"normalize=True": "--normalize",
    r"force=True \(--force\)": "--force",
    r"\b(key|columns|size)=": r"--\1",
    r"\blabel=": "--label",
    r"\bweights=": "--weights-column",
    r"\bx0=": "--x0",
    r"^(n|steps|seed|eta|grid|pool): ": r"--\1: ",
    r"^stop_at: ": "--stop-at: ",
    r"resume=True \(--resume\)": "--resume",
    r"tensorboard=False \(--no-tensorboard\)": "--no-tensorboard",
    r"^(tasks|dim|support|targets|batch|budget|width|heads|layers|lr|samples|baseline|parameters|path): ": r"--\1: ",
    r"^leave_out: ": "--leave-out: ",
    r"^h0: ": "--smoothing: ",
    r"^held_out: ": "--held-out: ",
    r"^given: this support has no labels$": "--given: these references have no labels; --label NAME says where",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (``sys.argv[1:]`` when None) and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] in (["--version"], ["-V"]):
        sys.stdout.write(f"nwflow {nwflow.__version__} (torch {torch.__version__})\n")
        return 0
    debug = "--debug" in argv or os.environ.get("NWFLOW_DEBUG", "") not in ("", "0")
    try:
        with _warnings_in_one_line():
            command = _parse(argv or ["--help"])
            if command is not None:
                command.run(argv, _console(command.talk.quiet))
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has enough of it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  the interpreter flushes it once more at its end
        return 0
    except KeyboardInterrupt:
        return _complain("interrupted; no file is half-written", 130)
    except _CALLERS as error:
        if debug:
            raise
        return _complain(f"error: {_sentence(error)}", 2)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    return 0


def _parse(argv: Sequence[str]) -> Any:
    """The command with its options; None after help was printed. tyro's boxes of errors become one line."""
    complaints = io.StringIO()
    commands: Any = (
        Annotated[sample.Sample, subcommand("sample", description=sample.EXAMPLES)]
        | Annotated[describe.Describe, subcommand("describe", description=describe.EXAMPLES)]
        | Annotated[diagnose.Diagnose, subcommand("diagnose", description=diagnose.EXAMPLES)]
        | Annotated[probe.Probe, subcommand("probe", description=probe.EXAMPLES)]
        | Annotated[train.Train, subcommand("train", description=train.EXAMPLES)]
        | Annotated[evaluate.Evaluate, subcommand("evaluate", description=evaluate.EXAMPLES)]
        | Annotated[demo.Demo, subcommand("demo", description=demo.EXAMPLES)]
    )
    try:
        with contextlib.redirect_stderr(complaints):
            return tyro.cli(commands, prog="nwflow", description=DESCRIPTION, args=argv, config=(OmitArgPrefixes,))
    except SystemExit as stop:
        if stop.code in (0, None):
            return None
        raise ValueError(_parse_error(complaints.getvalue(), argv)) from None


def _parse_error(box: str, argv: Sequence[str]) -> str:
    """What a box of tyro says, in one line."""
    framed = [line.strip().strip("│").strip() for line in box.strip().splitlines()[1:]]  # the first is a title
    lines = ["" if re.fullmatch(r"[─╰╯-]*", line) else line for line in framed]
    words = " ".join(itertools.takewhile(bool, itertools.dropwhile(lambda line: not line, lines)))
    first = words.replace(" .", ".").rstrip(".")
    expected = r"Error parsing (\S+): no type matching \{None\}\|(.+) could be instantiated from \[(.*)\]$"
    if match := re.match(expected, first):
        first = f"{match[1]}: expected {match[2]}, got {match[3]}"
    first = re.sub(r"^Missing from [^:]+: (\S+) .*", r"expected \1", first)
    first = re.sub(r"^Error parsing (\S+): ", r"\1: ", first)
    first = re.sub(r"^__tyro-dummy-inner__\S*: (\w+):", lambda m: "--" + m[1].replace("_", "-") + ":", first)
    if near := re.search(r"Perhaps you meant: (?:-\w \S+, )?(--[\w-]+)", " ".join(lines)):
        first += f"; did you mean {near[1]}?"
    command = next(
        (a for a in argv[:1] if a in ("sample", "describe", "diagnose", "probe", "train", "evaluate", "demo")), ""
    )
    return f"{first[:1].lower()}{first[1:]} (see nwflow {command + ' ' if command else ''}--help)"


def _console(quiet: bool) -> Console:
    return _Console(quiet=quiet, highlight=False, markup=False, file=sys.stdout)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end with exit code 1, in the middle of a command: the error that it handles is for ``main``."""
        raise


def _sentence(error: BaseException) -> str:
    """The message of an error in one line, in terms of options."""
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return "out of memory; a smaller --batch-size or --limit may fit"
    text = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.filename}: {error.strerror}"
    text = " ".join(text.split()) or type(error).__name__
    for pattern, option in _OPTIONS.items():
        text = re.sub(pattern, option, text)
    return text


def _complain(text: str, code: int) -> int:
    sys.stderr.write(f"nwflow: {text}\n")
    return code


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Warnings meant for users as one line each on standard error."""

    def show(message: Warning | str, category: type[Warning], *_: Any) -> None:
        sys.stderr.write(f"nwflow: warning: {_sentence(message) if isinstance(message, Warning) else message}\n")

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.showwarning = show  # type: ignore[assignment]
        yield
