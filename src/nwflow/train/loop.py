r"""Training: one step, and the loop around it.

A step draws tasks, points X_t = alpha X_1 + sigma X_0 (noise at t = 0, data at t = 1) and takes a step of AdamW on the
mean of the network's loss. All data of step k come from generators seeded by (seed, k, part), so that a run that
resumes at step k takes the same steps as one that was never stopped. Part j of rank r of R processes with accumulation
draws stream j R + r: R processes make the same gradient as one process that accumulates R batches.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nwflow.models import ICFM
from nwflow.paths import broadcast_schedule, working_dtype
from nwflow.tasks import Family, TaskBatch
from nwflow.train.checkpoints import PARAMETER
from nwflow.train.config import TrainConfig
from nwflow.train.schedule import average_decay, draw_times, learning_rate, seeded, update_average
from nwflow.train.teacher import denoiser_target, points_needed

INIT, DATA, SCALE, VALIDATION = 0, 1, 2, 3  # uses of a seed, each with a stream of its own


class _Loss(nn.Module):
    """The mean loss as a module's forward, which is what data parallelism and mixed precision wrap."""

    def __init__(self, model: ICFM) -> None:
        super().__init__()
        self.model = model

    def forward(self, x0: Tensor, x1: Tensor, t: Tensor, support: Tensor, mask: Tensor | None, target: Tensor | None):
        return self.model.loss(x0, x1, t, support, mask, target).mean()


def typical_scale(family: Family, support: str, seed: int) -> float:
    """Root mean square over tasks of sqrt(tr Cov / d) of their points, in data units."""
    tasks = family.sample(256, support, 2, seeded(seed, SCALE))
    points = tasks.target.double().flatten(2)
    return math.sqrt(max(float((points[:, 0] - points[:, 1]).square().mean()) / 2, 1e-30))


class Trainer:
    """What a run holds: network, average, optimiser, and how a step is taken.

    Args:
        config: the run. model: the network to fit; made from the configuration and its seed when None.

    Raises:
        ImportError: accelerate is not installed. ValueError: settings that do not fit each other.
    """

    def __init__(self, config: TrainConfig, model: ICFM | None = None) -> None:
        self.config, self.accelerator = config, _accelerator(config)
        whole = config.task.build()
        self.family, self.held_out = whole.part("train"), whole.part("validation")
        scale, options = typical_scale(self.family, config.task.support, config.seed), config.optimizer
        dim = math.prod(self.family.event_shape)
        if model is None:
            model = ICFM(config.network.build(dim, scale), seeded(config.seed, INIT))
        torch.manual_seed(config.seed)  # of layers that draw, if any
        self.model = model.to(self.accelerator.device)
        self.scale = scale if config.network.scale is None else config.network.scale
        self.named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = list(self.named.values())
        optimizer = torch.optim.AdamW(
            self.parameters,
            lr=options.lr,
            betas=(0.9, options.beta2),
            weight_decay=options.weight_decay,
            fused=self.accelerator.device.type in ("cpu", "cuda"),
        )
        self.wrapped, self.optimizer = self.accelerator.prepare(_Loss(self.model), optimizer)
        self.average = {name: p.detach().clone() for name, p in self.named.items()}
        self.step = 0

    def draw(self, step: int, part: int) -> tuple[Tensor, Tensor, Tensor, TaskBatch, Tensor | None]:
        """x0, x1, t, tasks and the target in place of x1, of part ``part`` of step ``step``."""
        task, times, device = self.config.task, self.config.time, self.accelerator.device
        generator = seeded(self.config.seed, DATA, step, part)
        tasks = self.family.sample(task.batch, task.support, points_needed(times, task.targets), generator)
        x1 = tasks.target[:, : task.targets]
        x0 = torch.randn(x1.shape, generator=generator)
        t = draw_times(times, self.model.path, self.scale, (task.batch, task.targets), generator)
        tasks, x1, x0, t = tasks.to(device), x1.to(device), x0.to(device), t.to(device, working_dtype(device))
        if times.teacher == "none":
            return x0, x1, t, tasks, None
        at = broadcast_schedule(self.model.path, t, x1.shape[:2], x1.ndim - 2, tasks=True)
        x = at.alpha * x1 + at.sigma * x0
        return x0, x1, t, tasks, denoiser_target(times, tasks, x, t, self.model.path)

    def backward(self, step: int) -> Tensor:
        """Gradients of the mean loss of step ``step``, and this process's share of that loss."""
        parts, total = self.config.optimizer.accumulate, torch.zeros((), device=self.accelerator.device)
        for j in range(parts):
            number = j * self.accelerator.num_processes + self.accelerator.process_index
            x0, x1, t, tasks, target = self.draw(step, number)
            last = j == parts - 1
            with nullcontext() if last else self.accelerator.no_sync(self.wrapped):
                loss = self.wrapped(x0, x1, t, tasks.support, tasks.mask, target) / parts
                self.accelerator.backward(loss)
            total = total + loss.detach()
        return total

    def update(self, step: int, share: float) -> tuple[float, Tensor]:
        """Take the step that the gradients say; the rate that was used and the norm of the gradient."""
        options = self.config.optimizer
        rate = learning_rate(options, step, share)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = self.accelerator.clip_grad_norm_(self.parameters, options.clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()
        update_average(list(self.average.values()), self.parameters, average_decay(options.ema, step))
        return rate, torch.as_tensor(norm)

    def averaged(self) -> ICFM:
        """A copy of the network with the averaged parameters, in evaluation mode."""
        model = ICFM(self.model.config).to(self.accelerator.device).eval()
        model.load_state_dict(self.model.state_dict() | self.average)
        return model.requires_grad_(False)

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What a checkpoint holds: averaged parameters, and what a resumed run needs beside them."""
        state = {PARAMETER + name: value for name, value in self.model.state_dict().items()}
        for name, parameter in self.named.items():
            for key, value in self.optimizer.optimizer.state.get(parameter, {}).items():
                state[f"adamw.{key}.{name}"] = value
        state["generator.cpu"] = torch.get_rng_state()
        if self.accelerator.device.type == "cuda":
            state["generator.cuda"] = torch.cuda.get_rng_state(self.accelerator.device)
        if self.accelerator.scaler is not None:
            state["scaler.scale"] = torch.tensor(self.accelerator.scaler.get_scale(), dtype=torch.float64)
        return self.model.state_dict() | self.average, state

    def restore(self, model: dict[str, Tensor], state: dict[str, Tensor], step: int) -> None:
        """The inverse of :meth:`tensors`."""
        device = self.accelerator.device
        self.model.load_state_dict({k.removeprefix(PARAMETER): v for k, v in state.items() if k.startswith(PARAMETER)})
        for name, value in self.average.items():
            value.copy_(model[name])
        for name, parameter in self.named.items():
            moments = {key: state.get(f"adamw.{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
            if moments["step"] is not None:
                self.optimizer.optimizer.state[parameter] = {
                    k: v.to(device) for k, v in moments.items() if v is not None
                }
        torch.set_rng_state(state["generator.cpu"])
        if device.type == "cuda" and "generator.cuda" in state:
            torch.cuda.set_rng_state(state["generator.cuda"], device)
        if self.accelerator.scaler is not None and "scaler.scale" in state:
            self.accelerator.scaler.update(float(state["scaler.scale"]))
        self.step = step


@dataclass
class Clock:
    """How much of a run is done: by steps, or by seconds where there is a budget; seconds outlive a restart."""

    last_step: int | None
    budget: float | None
    before: float = 0.0

    def __post_init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Time of the run so far, restarts included."""
        return self.before + time.perf_counter() - self._start

    def share(self, step: int, accelerator: Any) -> float:
        """Share of the run that is done before step ``step``; at least 1 once it is over. Equal on all processes."""
        by_step = 0.0 if self.last_step is None else step / self.last_step
        if self.budget is None:
            return by_step
        by_time = self.seconds / self.budget
        if accelerator.num_processes > 1:
            from accelerate.utils import broadcast

            by_time = float(torch.as_tensor(broadcast(torch.tensor(by_time, device=accelerator.device))))
        return max(by_step, by_time)


def _accelerator(config: TrainConfig) -> Any:
    try:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, PartialState
    except ImportError:
        raise ImportError("training needs the package accelerate: pip install 'nwflow[train]'") from None
    if AcceleratorState._shared_state and PartialState().num_processes == 1:
        AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier run of this process
    return Accelerator(cpu=config.device == "cpu", mixed_precision=config.optimizer.precision)
