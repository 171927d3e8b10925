"""``nwflow evaluate``: samples of a trained network on unseen tasks, against the exact field of their supports (t = 0
noise, t = 1 data)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from rich.console import Console
from tyro.conf import Positional, arg

from nwflow.cli.files import CONVENTION, versions
from nwflow.cli.options import Flag, Talk, optional, pick_device, say
from nwflow.train import compare, find_checkpoint, load_model, read_config
from nwflow.train.log import progress_bar

EXAMPLES = """Compare the samples of a trained network with fresh points of tasks that it has not seen.

examples:
  nwflow evaluate run --tasks 100
  nwflow evaluate run --tasks 100 --baseline plugin --json
"""


@dataclass(frozen=True)
class Evaluate:
    """The command; ``run`` prints a table or JSON."""

    run_folder: Annotated[Positional[str], arg(metavar="FOLDER")]
    """What nwflow train wrote, or one of its checkpoints."""
    talk: Talk
    tasks: int = 100
    """Tasks, drawn from the test part of what the network was trained on."""
    support: Annotated[str | None, optional("SIZE")] = None
    """Size of the supports: N, LOW-HIGH or A,B,...; that of training when left out."""
    samples: int = 500
    """Samples, and fresh points, of each task."""
    steps: int = 100
    """Euler steps on a uniform grid."""
    baseline: Literal["plugin", "none"] = "plugin"
    """plugin: the exact field of each support."""
    seed: int = 1
    """Seed of tasks, noise and bootstrap."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps; auto: cuda where there is one."""
    json: Flag = False
    """Print JSON."""

    def run(self, command: Sequence[str], console: Console) -> None:
        checkpoint = find_checkpoint(self.run_folder)
        model, config = load_model(checkpoint, pick_device(self.device)), read_config(checkpoint)
        family, size = config.task.build().part("test"), self.support or config.task.support
        done = 0
        with progress_bar(self.tasks, 0, sys.stderr.isatty() and not self.talk.quiet) as bar:

            def advance(count: int) -> None:
                nonlocal done
                done += count
                bar(done, f"task {done}")

            found = compare(
                model, family, size, tasks=self.tasks, samples=self.samples, steps=self.steps, seed=self.seed,
                baseline=self.baseline, advance=advance,
            )  # fmt: skip
        if self.json:
            facts = {"checkpoint": str(checkpoint), "family": config.task.tasks, "support": size}
            whole = found.to_dict() | facts | {"convention": CONVENTION, "versions": versions()}
            console.file.write(json.dumps(whole, indent=1, allow_nan=False) + "\n")
            return
        say(console, f"{self.tasks} unseen tasks of {config.task.tasks}, support {size}, {self.steps} Euler steps,")
        say(console, f"{self.samples} samples each; unbiased MMD^2, mean over tasks with its 95% interval")
        for name, value in (("model", found.mmd2), ("exact field", found.baseline_mmd2), ("ratio", found.ratio)):
            if value is not None:
                say(console, f"{name:<12}{value[0]:>10.4g}   {value[1]:.4g} .. {value[2]:.4g}")
