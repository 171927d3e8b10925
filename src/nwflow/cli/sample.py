"""``nwflow sample``: points of the exact field at t = 1 (data), pictures of them, and the references that made each."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from torch import Tensor
from tyro.conf import arg

from nwflow.cli import attribution, picture
from nwflow.cli.attribution import Made
from nwflow.cli.files import (
    CARRIES_ARRAYS,
    CARRIES_METADATA,
    CONVENTION,
    check_outputs,
    run_record,
    write_csv,
    write_json,
    write_png,
)
from nwflow.cli.options import FieldOptions, Flag, Source, Talk, load_queries, optional, say
from nwflow.cli.remedy import RemedyOptions, progress_bars
from nwflow.data import save_points
from nwflow.data.files import NORMALIZED
from nwflow.field import NWField
from nwflow.sample import guide, sample
from nwflow.support import Support

EXAMPLES = """Draw samples of the exact field of a support, and say which references made each of them.

examples:
  nwflow sample digits --given 3 8 --n 16
  nwflow sample digits --given 3 8 --n 16 --stop-at 0.5 --denoise
  nwflow sample features.parquet --label class --smoothing 0.1
  nwflow sample digits --given 3 --n 16 --remedy auto
  nwflow sample photos/ --size 64 --n 9 --out photos.npz
  nwflow sample points.npy --model run
"""
_SHOWN = 8  # rows of the table that are printed
_UNITS = 24  # samples in the picture of attribution


@dataclass(frozen=True)
class Sampler:
    """How samples are drawn."""

    n: Annotated[int | None, optional("N")] = None
    """Number of samples (64, or as many as --x0 has)."""
    steps: Annotated[int | None, optional("STEPS")] = None
    """Evaluations of the field for each sample (40)."""
    method: Literal["3m", "2m", "exact", "euler", "midpoint", "heun", "rk4", "dopri5"] = "3m"
    """Rule for a step: multistep exponential of order 3 or 2, exact for a constant denoiser, Runge-Kutta, adaptive."""
    grid: Annotated[
        Literal["log_bandwidth", "log_snr", "uniform"] | None, optional("{log_bandwidth,log_snr,uniform}")
    ] = None
    """Where to evaluate; log_bandwidth (the default) goes from noise to the scales of the support."""
    times: Annotated[tuple[float, ...] | None, optional("T T [T ...]")] = None
    """Increasing times from 0 (noise) to at most 1 (data), in place of --grid and --steps."""
    seed: int = 0
    """Seed of the noise; the noise of sample i is the same for every --n and --batch-size."""
    eta: float = 0.0
    """Share of the noise that each step renews: 0 is the ODE, 1 the SDE (methods exact, 2m, 3m)."""
    stop_at: Annotated[float | None, optional("H")] = None
    """Stop at this bandwidth sigma / alpha, in data units; the samples are then still noisy."""
    denoise: Flag = False
    """Write the denoiser, the weighted mean of the references, in place of x: with --stop-at a blend of them."""
    x0: Annotated[str | None, optional("FILE")] = None
    """Start from these points in place of noise."""
    guidance: Annotated[float | None, optional("W")] = None
    """Guide from the whole support towards --given: 1 is --given alone, more exaggerates it."""
    batch_size: Annotated[int | None, optional("N")] = None
    """Samples that run together; all of them when left out. Changes memory, not results."""

    def grid_and_steps(self) -> tuple[Any, int]:
        """What ``nwflow.sample`` takes as ``grid`` and ``steps``."""
        if self.times is not None and (self.grid is not None or self.steps is not None):
            raise ValueError("--times: replaces --grid and --steps; expected one or the other, got both")
        steps = 40 if self.steps is None else self.steps
        return (self.grid or "log_bandwidth") if self.times is None else list(self.times), steps


@dataclass(frozen=True)
class Output:
    """What is written, and where."""

    out: Annotated[str, arg(aliases=("-o",), metavar="FILE")] = "samples.safetensors"
    """Samples: .safetensors .npz .npy .parquet .csv; tables and pictures stand beside it, under its name."""
    top: int = 5
    """References that are named for each sample."""
    picture: bool = True
    """Draw samples that are images."""
    invert: Flag = False
    """Draw grey images as ink on paper."""
    force: Flag = False
    """Replace files that are there."""
    progress: Flag = False
    """Show a progress bar even where standard error is no terminal."""

    @property
    def path(self) -> Path:
        return Path(self.out).expanduser()

    @property
    def tables(self) -> tuple[Path, Path]:
        """Of attribution: CSV and JSON."""
        return self.path.with_suffix(".attribution.csv"), self.path.with_suffix(".attribution.json")

    @property
    def pictures(self) -> tuple[Path, Path]:
        """A grid, and samples beside their references."""
        return self.path.with_suffix(".png"), self.path.with_suffix(".attribution.png")


class LearnedField:
    """The field of a trained network, with the exact field's weights at its states as attribution."""

    def __init__(self, model: str, support: Support, exact: Any) -> None:
        from nwflow.models import ICFMField
        from nwflow.train import load_model

        learned = ICFMField(load_model(model, support.device), support)
        self.event_shape, self.path, self.support = learned.event_shape, learned.path, learned.support
        self.prior, self.denoise, self.length_scales = learned.prior, learned.denoise, learned.length_scales
        self.attribute, self.n_eff = exact.attribute, exact.n_eff


@dataclass(frozen=True)
class Sample:
    """The command; ``run`` writes the files and prints the table."""

    source: Source
    sampler: Sampler
    field: FieldOptions
    remedy: RemedyOptions
    output: Output
    talk: Talk
    model: Annotated[str | None, optional("CHECKPOINT")] = None
    """Sample the field of this trained network (a folder of nwflow train) in place of the exact one."""

    def run(self, command: Sequence[str], console: Console) -> None:
        """Check what can be checked, compute, write, say."""
        out = self.output.path
        check_outputs([out, *self.output.tables], self.output.force)
        if self.output.top < 1:
            raise ValueError(f"--top: expected at least 1, got {self.output.top}")
        self.remedy.check(self.field, self.sampler.guidance)
        self._check_model()
        grid, steps = self.sampler.grid_and_steps()
        pool = self.source.load()
        support = self.source.chosen(pool)
        brush = picture.Brush.of(support.points, self.output.invert) if self.output.picture else None
        check_outputs([out, *(self.output.pictures if brush else ())], self.output.force, support.event_shape)
        start = time.perf_counter()
        with progress_bars(self.talk.quiet, always=self.output.progress) as advance:
            remedy = self.remedy.fit(self.source, pool, support, self.sampler.seed, advance)
        field, target = self._field(pool, support, remedy)
        references = self.field.place(support)  # a remedy may move those of its field
        samples = self._draw(field, references, grid, steps)
        seconds = time.perf_counter() - start
        points = samples.denoised if self.sampler.denoise else samples.points
        made = attribution.who_made(points, samples, references, self.source.names())
        record = self._record(command, pool, target, samples, points) | self.remedy.record(remedy)
        written = self._write(points, samples, made, record)
        if brush:
            written += self._paint(brush, points, made, pool, record)
        self._say(console, target, samples, made, seconds, remedy)
        if brush and (share := brush.outside(points)) > 0:
            say(console, f"pictures show {brush.low:g} to {brush.high:g}; {100 * share:.2g}% of the pixels lie beyond")
        say(console, f"wrote {', '.join(map(str, written))}")

    def _check_model(self) -> None:
        """Refuse what has no meaning for a trained network: its path is its own, and so is its smoothing."""
        if self.model is None:
            return
        usual = FieldOptions(device=self.field.device, dtype=self.field.dtype, accuracy=self.field.accuracy)
        if self.field != usual or self.remedy.remedy is not None or self.sampler.guidance is not None:
            raise ValueError(
                "--model: expected no path, smoothing, metric, remedy or guidance beside it: it has its own"
            )

    def _field(self, pool: Support, support: Support, remedy: Any) -> tuple[Any, Any]:
        """The field to sample, and the one that samples are attributed to."""
        if self.model is not None:
            placed = self.field.place(support)
            exact = self.field.build(pool, support)
            learned = LearnedField(self.model, placed, exact)
            if learned.path != exact.path:
                exact = NWField(placed, learned.path, accuracy=self.field.accuracy)
                learned = LearnedField(self.model, placed, exact)
            return learned, exact
        if remedy is not None:
            support = self.field.place(support)
            target = remedy.field(support, self.field.build_path(), self.field.accuracy).to(support.device)
            return target, target
        target = self.field.build(pool, support)
        if self.sampler.guidance is None:
            return target, target
        if self.source.given is None:
            raise ValueError("--guidance: expected --given LABEL, towards which to guide")
        return guide(self.field.build(pool, pool), target, self.sampler.guidance), target

    def _draw(self, field: Any, support: Support, grid: Any, steps: int) -> Any:
        s, x0, n = self.sampler, None, self.sampler.n
        if s.x0 is not None:
            x0 = load_queries(s.x0, "--x0", self.source, support)[:n]
            if n is not None and n > len(x0):
                raise ValueError(f"--n: expected at most {len(x0)}, the points in {s.x0}, got {n}")
        drawn = sample(
            field,
            len(x0) if x0 is not None else 64 if n is None else n,
            steps=steps,
            method=s.method,
            grid=grid,
            seed=s.seed,
            x0=x0,
            accuracy=self.field.accuracy,
            eta=s.eta,
            stop_at=s.stop_at,
            attribution=self.output.top,
            batch_size=s.batch_size,
            progress=self.output.progress or (sys.stderr.isatty() and not self.talk.quiet),
        )
        if drawn.n_eff is None or drawn.n_eff.ndim == 1:
            return drawn
        return replace(drawn, n_eff=drawn.n_eff.flatten(1).mean(1))  # of fields with several heads, their mean

    def _record(self, command: Sequence[str], pool: Support, target: Any, samples: Any, points: Tensor) -> dict:
        """What made the samples; option values as given, results as computed."""
        options = {
            name: value for part in (self.source, self.field, self.sampler) for name, value in vars(part).items()
        }
        record = run_record(
            command,
            **{name: list(value) if isinstance(value, tuple) else value for name, value in options.items()},
        )
        record |= {
            "path": repr(target.path),
            "model": self.model,
            "grid": options["times"] or options["grid"] or "log_bandwidth",
            "n": len(points),
            "references": target.support.n_used,
            "rows_read": pool.m,
            "event_shape": list(pool.event_shape),
            "notes": list(pool.notes),
            "times": list(samples.times),
            "evaluations": samples.evaluations,
            "dtype": str(points.dtype).removeprefix("torch."),
            "device": str(points.device),
        }
        del record["steps"], record["columns"], record["key"]
        norms = points.reshape(len(points), -1).double().norm(dim=1)
        if self.source.normalize and bool(((norms - 1).abs() < 1e-3).all()):
            record[NORMALIZED] = "true"
        return record

    def _write(self, points: Tensor, samples: Any, made: Sequence[Made], record: dict[str, Any]) -> list[Path]:
        out, force, who = self.output.path, self.output.force, samples.attribution
        extra = {"references": who.indices, "reference_weights": who.weights, "n_eff": samples.n_eff}
        written = [
            save_points(out, points, record, extra=extra if out.suffix.lower() in CARRIES_ARRAYS else None, force=force)
        ]
        written.append(write_csv(self.output.tables[0], [m.flat(self.output.top) for m in made], force))
        whole = {"run": record, "summary": attribution.summary(made), "samples": [asdict(m) for m in made]}
        return [*written, write_json(self.output.tables[1], whole, force)]

    def _paint(
        self, brush: picture.Brush, points: Tensor, made: Sequence[Made], pool: Support, record: dict[str, Any]
    ) -> list[Path]:
        paths, force = self.output.pictures, self.output.force
        images = brush.paint(points)
        units = attribution.units(images[:_UNITS], made, pool, brush, min(3, self.output.top))
        sheet = picture.attribution(picture.in_rows(units))
        return [
            write_png(paths[0], picture.grid(images), record, force),
            write_png(paths[1], sheet, record, force),
        ]

    def _say(
        self, console: Console, target: Any, samples: Any, made: Sequence[Made], seconds: float, remedy: Any
    ) -> None:
        n, verbose, seed = len(made), self.talk.verbose, self.sampler.seed
        say(console, f"{n} samples of {target.support} on {target.path}, {CONVENTION}, seed {seed}")
        if said := self.remedy.sentence(remedy):
            say(console, said)
        if verbose:
            for note in target.support.notes:
                say(console, f"note: {note}")
            reach = f"t = {samples.times[0]:g} to {samples.times[-1]:g}"
            work = f"{samples.evaluations} evaluations a sample by {samples.method}"
            say(console, f"{work}, {reach}, accuracy {self.field.accuracy}, {seconds:.1f} s")
        made_by = "Which references made each sample:"
        learned = (
            f"Samples of the network {self.model}; the references that the exact field weighs most where each ended:"
        )
        say(console, made_by if self.model is None else learned)
        console.print(attribution.table(made if verbose else made[:_SHOWN]))
        if n > _SHOWN and not verbose:
            say(console, f"... and {n - _SHOWN} more in {self.output.tables[0]}")
        say(console, attribution.sentence(made))
        copies = attribution.summary(made)["copies"] or 0
        if copies > n / 2 and self.field.smoothing is None and remedy is None and samples.times[-1] == 1:
            for text in (
                "The exact field ends on its references. To blend them: --stop-at H --denoise, with H above the",
                "collapse that nwflow describe shows. To draw around them: --smoothing H0, or --remedy auto, which",
                "measures what helps.",
            ):
                say(console, text)
        if self.output.path.suffix.lower() not in CARRIES_METADATA:
            say(console, "This format has no room for metadata: seed, path and versions are in the .json file.")
