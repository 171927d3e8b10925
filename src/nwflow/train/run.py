"""A whole run: train, validate, write checkpoints and the log, stop, and go on after any kind of end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nwflow
from nwflow.models import ICFM
from nwflow.train import checkpoints
from nwflow.train.config import TrainConfig
from nwflow.train.evaluate import compare, denoising_errors
from nwflow.train.log import Log, progress_bar
from nwflow.train.loop import VALIDATION, Clock, Trainer
from nwflow.train.schedule import seeded

CHANGEABLE = ("steps", "budget", "patience", "checkpoint_every", "checkpoint_steps", "tensorboard", "device")


@dataclass(frozen=True, eq=False)
class TrainResult:
    """What a run ended with: ``model`` has the averaged parameters; ``checkpoint`` is None where nothing was written.

    ``loss`` is the mean of the last steps of the log, ``validation`` the last record of it, ``seconds`` the time of
    the run, restarts included.
    """

    model: ICFM
    steps: int
    seconds: float
    loss: float
    validation: dict[str, Any]
    stopped_early: bool
    checkpoint: Path | None


def train(
    config: TrainConfig | None = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    progress: bool = False,
    model: ICFM | None = None,
) -> TrainResult:
    """Train a network as ``config`` says.

    Args:
        config: the run; with ``resume`` it may be None, and may only differ from that of the run in how long it goes on
            and what it writes.
        out: folder of the run (checkpoints, log); None writes nothing.
        resume: go on from the newest checkpoint in ``out``. A run by steps then takes the same steps, bit for bit on
            one process, as if it had never stopped.
        progress: show a progress bar on standard error.
        model: start from this network in place of a new one; it is trained in place.

    Raises:
        FileExistsError: ``out`` holds a run and ``resume`` is False. FileNotFoundError: nothing to resume.
        ImportError: accelerate (or TensorBoard) is missing. ValueError: settings that do not fit, a loss that is not
            finite.
    """
    run = None if out is None else Path(out).expanduser()
    config = _settled(config, run, resume)
    return _Run(Trainer(config, model), run, resume, progress)()


def _settled(config: TrainConfig | None, run: Path | None, resume: bool) -> TrainConfig:
    """The configuration of a run, after checks against what its folder holds."""
    if run is None or not resume:
        if resume:
            raise ValueError("resume: expected the folder of the run, got none")
        if run is not None and checkpoints.checkpoints(run):
            raise FileExistsError(f"{run}: holds a run already; resume=True (--resume) goes on with it")
        return TrainConfig() if config is None else config
    if not checkpoints.checkpoints(run):
        raise checkpoints.MissingDataError(f"{run}: no checkpoint there to resume from")
    stored = TrainConfig.from_json((run / "config.json").read_text(encoding="utf-8"))
    if config is None:
        return stored
    was, now = stored.flat(), config.flat()
    for name, value in now.items():
        if value != was[name] and name not in CHANGEABLE:
            raise ValueError(f"{name}: the run in {run} has {was[name]!r}, got {value!r}; only a new run may change it")
    return config


class _Run:
    """The loop around the steps; called, it runs to the end."""

    def __init__(self, trainer: Trainer, run: Path | None, resume: bool, progress: bool) -> None:
        self.trainer, self.config = trainer, trainer.config
        main = trainer.accelerator.is_main_process
        self.run, self.progress = run if main else None, progress and main
        self.losses: list[Tensor] = []
        self.mean, self.validation = math.nan, {}
        self.best, self.best_step, self.worse, self.stopped = math.inf, None, 0, False
        options, before = self.config.optimizer, 0.0
        if resume and run is not None:
            before = self._restore(run)
        elif self.run is not None:
            self.run.mkdir(parents=True, exist_ok=True)
        if self.run is not None:
            (self.run / "config.json").write_text(self.config.to_json() + "\n", encoding="utf-8")
        self.log = Log(self.run, self.config.check.tensorboard, trainer.step)
        self.clock = Clock(options.last_step, options.seconds, before)
        self.saved_at, self.saved_step = self.clock.seconds, trainer.step if resume else -1

    def __call__(self) -> TrainResult:
        trainer, check, accelerator = self.trainer, self.config.check, self.trainer.accelerator
        by_steps = self.clock.budget is None
        total = float(self.clock.last_step or 0) if by_steps else float(self.clock.budget or 0)
        try:
            with progress_bar(total, trainer.step if by_steps else self.clock.before, self.progress) as bar:
                while not self.stopped and (share := self.clock.share(trainer.step, accelerator)) < 1:
                    self._step(share)
                    if check.validate_every and trainer.step % check.validate_every == 0:
                        self._validate()
                    if trainer.step % check.log_every == 0:
                        bar(trainer.step if by_steps else self.clock.seconds, self._text())
                    if self._due():
                        self._save()
        except KeyboardInterrupt:
            self._save()
            raise
        else:
            if self.validation.get("step") != trainer.step:
                self._validate()
            self._save()
        finally:
            self.log.close()
        return self._result()

    def _step(self, share: float) -> None:
        trainer = self.trainer
        self.losses.append(trainer.backward(trainer.step))
        rate, norm = trainer.update(trainer.step, share)
        trainer.step += 1
        if trainer.step % self.config.check.log_every == 0:
            losses = torch.stack(self.losses).double().mean()
            self.mean, self.losses = float(trainer.accelerator.reduce(losses, "mean")), []
            if not math.isfinite(self.mean):
                raise ValueError(f"lr: the loss is not finite at step {trainer.step}; a smaller rate may help")
            self.log.write(
                "train", trainer.step, loss=self.mean, lr=rate, gradient_norm=float(norm), seconds=self.clock.seconds
            )

    def _validate(self) -> None:
        """Errors on held-out tasks, the same at every validation; samples where they are asked for."""
        trainer, config = self.trainer, self.config
        model, generator = trainer.averaged(), seeded(config.seed, VALIDATION)
        tasks = trainer.held_out.sample(config.check.validation_tasks, config.task.support, 16, generator)
        errors = denoising_errors(model, tasks.to(trainer.accelerator.device), trainer.scale, seed=config.seed)
        found: dict[str, Any] = {"score": errors.score}
        found |= {f"error_log_snr_{snr:.1f}": e for snr, e in zip(errors.log_snr, errors.errors, strict=True)}
        if config.check.mmd_tasks:
            drawn = compare(
                model, trainer.held_out, config.task.support, tasks=config.check.mmd_tasks, samples=200, steps=50,
                seed=config.seed, baseline="none",
            )  # fmt: skip
            found |= dict(zip(("mmd2", "mmd2_low", "mmd2_high"), drawn.mmd2, strict=True))
        self.validation = {"step": trainer.step, **found}
        self.log.write("validation", trainer.step, **found, seconds=self.clock.seconds)
        self._judge(errors.score)

    def _judge(self, score: float) -> None:
        """Early stopping: count validations that are no better than the best, and keep that one's checkpoint."""
        if score < self.best:
            self.best, self.best_step, self.worse = score, self.trainer.step, 0
            if self.config.check.patience:
                self._save()
            return
        self.worse += 1
        self.stopped = 0 < self.config.check.patience <= self.worse

    def _due(self) -> bool:
        check = self.config.check
        by_step = check.checkpoint_steps and self.trainer.step % check.checkpoint_steps == 0
        return bool(by_step) or self.clock.seconds - self.saved_at >= check.checkpoint_every

    def _chosen(self) -> int | None:
        return self.best_step if self.stopped else None

    def _save(self) -> None:
        step = self.trainer.step
        if self.run is None:
            return
        model, state = self.trainer.tensors()
        if self.losses:
            state["losses"] = torch.stack(self.losses)
        facts = {
            "step": step, "seconds": self.clock.seconds, "mean": None if math.isnan(self.mean) else self.mean,
            "validation": self.validation, "best": None if math.isinf(self.best) else self.best,
            "best_step": self.best_step, "worse": self.worse, "stopped": self.stopped, "chosen_step": self._chosen(),
            "scale": self.trainer.scale, "versions": {"nwflow": nwflow.__version__, "torch": torch.__version__},
        }  # fmt: skip
        config = {"model": self.trainer.model.config.to_dict(), "train": self.config.to_dict()}
        checkpoints.save(self.run, step, model, state, config, facts)
        patient = self.config.check.patience > 0
        checkpoints.prune(self.run, (step, self.best_step if patient else None))
        self.saved_at, self.saved_step = self.clock.seconds, step

    def _restore(self, run: Path) -> float:
        found = checkpoints.checkpoints(run)
        model, state, facts = checkpoints.read_state(found[max(found)])
        if "losses" in state:
            self.losses = list(state.pop("losses").to(self.trainer.accelerator.device))
        self.trainer.restore(model, state, facts["step"])
        self.mean = math.nan if facts["mean"] is None else facts["mean"]
        self.best = math.inf if facts["best"] is None else facts["best"]
        self.best_step, self.worse, self.stopped = facts["best_step"], facts["worse"], facts["stopped"]
        self.validation = facts["validation"]
        return facts["seconds"]

    def _text(self) -> str:
        score = self.validation.get("score")
        return f"step {self.trainer.step}  loss {self.mean:.4f}" + ("" if score is None else f"  error {score:.4f}")

    def _result(self) -> TrainResult:
        found = {} if self.run is None else checkpoints.checkpoints(self.run)
        best = self._chosen()
        chosen = best if best is not None and best in found else self.trainer.step
        model = self.trainer.averaged()
        if chosen != self.trainer.step:
            model.load_state_dict(checkpoints.read_state(found[chosen])[0])
        return TrainResult(
            model, self.trainer.step, self.clock.seconds, self.mean, self.validation, self.stopped, found.get(chosen)
        )
