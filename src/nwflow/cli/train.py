"""``nwflow train``: fit a network v(x, t, S) to a family of tasks; noise at t = 0, data at t = 1."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from rich.console import Console
from tyro.conf import arg

from nwflow.cli.options import Flag, Talk, say
from nwflow.train import TrainConfig, train

EXAMPLES = """Train a network that samples from supports it has never seen, without a further parameter update.

examples:
  nwflow train --tasks spherical_shells --dim 8 --support 50 --budget 30s --out run
  nwflow train --tasks rings+moons+spirals --leave-out moons --support 10-100 --steps 5000 --out run
  nwflow train --tasks features.npz --key points --label labels --support 20 --out run
  nwflow train --out run --resume --steps 10000
"""


@dataclass(frozen=True)
class Train:
    """The command; ``run`` trains, writes checkpoints and the log, and says what came out."""

    out: Annotated[str, arg(aliases=("-o",), metavar="FOLDER")]
    """Folder of the run: checkpoints, log.jsonl, config.json, tensorboard."""
    talk: Talk
    config: TrainConfig = field(default_factory=TrainConfig)
    resume: Flag = False
    """Go on with the run in that folder; its settings hold, and --steps or --budget may be longer."""
    progress: Flag = False
    """Show a progress bar even where standard error is no terminal."""

    def run(self, command: Sequence[str], console: Console) -> None:
        folder, config = Path(self.out).expanduser(), self.config
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"--out {folder}: is a file, expected a folder")
        if self.resume and (folder / "config.json").is_file():
            stored, usual = TrainConfig.from_json((folder / "config.json").read_text(encoding="utf-8")), TrainConfig()
            given = {k: v for k, v in config.flat().items() if v != usual.flat()[k]}
            config = stored.changed(**given)
        shown = self.progress or (sys.stderr.isatty() and not self.talk.quiet)
        result = train(config, folder, resume=self.resume, progress=shown)
        count = sum(p.numel() for p in result.model.parameters())
        ended = " (no better for --patience validations)" if result.stopped_early else ""
        say(console, f"{result.model.config.preset}, {count:,} parameters: {result.steps} steps{ended}")
        say(console, f"loss {result.loss:.4f}, error of the held-out denoiser {result.validation['score']:.4f}")
        say(console, f"of the linear one; {result.seconds:.0f} s")
        say(console, f"How good its samples are: nwflow evaluate {self.out}")
        say(console, f"wrote {result.checkpoint}")
