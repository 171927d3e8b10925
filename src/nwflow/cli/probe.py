r"""``nwflow probe``: record the attention of a model and say how close each head is to kernel smoothing.

The model comes from Python code of the caller's own: ``--module pkg:factory`` names a function without arguments that
returns ``(model, inputs)``, inputs being a tuple for ``model(*inputs)``, a mapping for ``model(**inputs)``, or a
function that runs it. Or it is a diffusers pipeline with an IP-Adapter, ``--pipeline``, from local files. Times are
those of the model's calls, t = 0 noise to t = 1 data where it says them.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from nwflow.cli.files import output_folder, write_text
from nwflow.cli.options import Flag, Talk, optional, say
from nwflow.cli.probe_pipeline import PipelineOptions, probe_pipeline
from nwflow.probe import ProbeResult, record

EXAMPLES = """Record the attention of a running model and compare every head with kernel smoothing.

examples:
  nwflow probe --module my_models:tiny --out probe
  nwflow probe --pipeline sd15/ --ip-adapter ip-adapter.safetensors --image a.png b.png --prompt "a cat" --out probe
  nwflow probe --module my_models:tiny --layers "*attn2" --branches uncond cond --references 0 0 1 1
"""
FILES = ("report.html", "result.json")


@dataclass(frozen=True)
class Probe:
    """The command; ``run`` records, writes ``report.html`` and ``result.json``, and prints a table."""

    talk: Talk
    diffusers: PipelineOptions
    module: Annotated[str | None, optional("PKG:FACTORY")] = None
    """A function that returns (model, inputs) or (model, function that runs it)."""
    out: Annotated[str | None, optional("FOLDER")] = None
    """Where report.html and result.json go (default: probe)."""
    layers: Annotated[tuple[str, ...], optional("GLOB [GLOB ...]")] = ("*",)
    """Which modules."""
    heads: Annotated[tuple[int, ...] | None, optional("N [N ...]")] = None
    """Which heads."""
    steps: Annotated[tuple[int, ...] | None, optional("N [N ...]")] = None
    """Which calls of the model, from 0."""
    queries: Annotated[str, optional("N")] = "auto"
    """Queries to keep of each call: a number, "all" or "auto"."""
    branches: Annotated[tuple[str, ...] | None, optional("NAME [NAME ...]")] = None
    """Names of equal parts of the batch, as "uncond cond"; the last is reported."""
    references: Annotated[tuple[int, ...] | None, optional("N [N ...]")] = None
    """For every key the reference it belongs to, -1 for none."""
    grid: Annotated[tuple[int, int] | None, optional("ROWS COLUMNS")] = None
    """Grid of the queries, for maps."""
    limit: int = 1024
    """Memory for what is held, in MiB."""
    seed: int = 0
    """Seed of the queries and permutations that are drawn."""
    force: Flag = False
    """Replace files that are there."""
    json: Flag = False
    """Print the result as JSON."""

    def run(self, command: Sequence[str], console: Console) -> None:
        with_pipeline = self.diffusers.pipeline is not None
        if with_pipeline == bool(self.module):
            raise ValueError(
                "--module, --pipeline: expected one, PKG:FACTORY (a function that returns (model, inputs)) or the "
                f"folder of a diffusers pipeline, got {'both' if with_pipeline else 'neither'}"
            )
        if not with_pipeline and (extra := self.diffusers.given()):
            raise ValueError(f"{extra[0]}: has a meaning with --pipeline only")
        options = self._options()
        folder = Path(self.out or "probe").expanduser()
        with output_folder(folder, FILES, self.force) as (page, record_file):
            if with_pipeline:
                result = probe_pipeline(self.diffusers, options)
            else:
                assert self.module is not None
                model, run = load_factory(self.module)
                with torch.no_grad(), record(model, **options) as recorder:
                    run()
                result = recorder.compare()
            write_probe(result, page, record_file, self.force)
        if self.json:
            console.file.write(result.to_json())
            return
        say_probe(console, result)
        say(console, f"wrote {page}, {record_file}")

    def _options(self) -> dict[str, Any]:
        queries: int | str = int(self.queries) if self.queries.isdecimal() else self.queries
        return {
            "layers": self.layers, "heads": self.heads, "steps": self.steps, "queries": queries,
            "branches": self.branches, "references": self.references, "grid": self.grid,
            "limit": self.limit * 2**20, "seed": self.seed,
        }  # fmt: skip


def load_factory(name: str) -> tuple[Any, Callable[[], Any]]:
    """The model and a function that runs it, of ``pkg:factory``; the current folder counts as a place for packages.

    Raises:
        ValueError: a name of another form, or a function that returns something else. ImportError: no such module.
    """
    package, _, function = name.partition(":")
    if not package or not function:
        raise ValueError(f"--module: expected PKG:FACTORY, got {name!r}")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        factory = getattr(importlib.import_module(package), function)
    except AttributeError:
        raise ValueError(f"--module {name}: {package} has no {function}") from None
    made = factory()
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module | Mapping):
        got = tuple(type(m).__name__ for m in made) if isinstance(made, tuple) else type(made).__name__
        raise ValueError(f"--module {name}: expected the function to return (model, inputs), got {got}")
    model, inputs = made
    if callable(inputs):
        return model, inputs
    if not isinstance(model, nn.Module):
        raise ValueError(f"--module {name}: expected a function that runs the models beside a mapping of them")
    if isinstance(inputs, Mapping):
        return model, lambda: model(**inputs)
    return model, lambda: model(*(inputs if isinstance(inputs, tuple | list) else (inputs,)))


def write_probe(result: ProbeResult, page: Path, record_file: Path, force: bool) -> None:
    """The page and the record, each whole or not at all; the page is made before either is written."""
    from nwflow.report import render_probe

    html = render_probe(result)
    write_text(record_file, result.to_json(), force)
    write_text(page, html, force)


def say_probe(console: Console, result: ProbeResult) -> None:
    """One line a layer, and what is worth a sentence."""
    layers: dict[tuple[str, str], list[Any]] = {}
    for h in result.heads:
        layers.setdefault((h.layer, h.part), []).append(h)
    out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("layer", "heads", "keys", "spearman", "null", "TV", "n_eff", "n_eff NW", "with prior"):
        out.add_column(name, justify="left" if name == "layer" else "right", overflow="fold")
    for (layer, part), heads in layers.items():
        numbers = [_mean(heads, f) for f in ("spearman", "spearman_null", "total_variation", "n_eff", "n_eff_nw")]
        label = f"{layer} [{part}]" if part else layer
        out.add_row(
            label, str(len({h.head for h in heads})), str(heads[0].n_keys), *numbers,
            f"{max(h.identity_error for h in heads):.1e}",
        )  # fmt: skip
    console.print(out)
    say(console, f"{100 * result.fraction_above(0.9):.0f} % of the records have a rank correlation above 0.9")
    for layer in result.layers:
        if layer.verdict == "collapse" or layer.ignored:
            say(console, f"{layer.layer}: {layer.text}")
    for note in result.notes:
        say(console, note)


def _mean(heads: Sequence[Any], field: str) -> str:
    known = [v for h in heads if (v := getattr(h, field)) is not None]
    return f"{sum(known) / len(known):.3f}" if known else "-"
