r"""The pieces of an update as pure functions: learning rate, average of the parameters, times, and seeds.

Rate at step k and share s of the run: lr min(1, (k + 1)/warmup) f(s), f = 1 up to the share ``hold`` and then falling
to 0. Average: theta_bar <- theta_bar + (1 - beta_k)(theta - theta_bar), beta_k = min(beta, (1 + k)/(10 + k)), which
forgets the start quickly. Times: t in (0, 1) uniform, or h = sigma / alpha log-uniform, from noise (t = 0) to data
(t = 1). The n times of a task are stratified, one in each n-th of the range: every time is as likely as without, and
the mean over a task varies less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from nwflow.paths import Path
from nwflow.train.config import OptimizerOptions, TimeOptions

LEAST = 1e-3  # distance of uniform times to both ends, where sigma or alpha may vanish


def learning_rate(options: OptimizerOptions, step: int, share: float) -> float:
    """The rate of step ``step`` (from 0) at a share of the run in [0, 1].

    >>> options = OptimizerOptions(lr=1.0, warmup=4, schedule="linear", hold=0.5)
    >>> [learning_rate(options, 10 * k, k / 4) for k in range(5)]
    [0.25, 1.0, 1.0, 0.5, 0.0]
    """
    warm = min(1.0, (step + 1) / options.warmup) if options.warmup else 1.0
    u = min(1.0, max(0.0, (share - options.hold) / (1.0 - options.hold)))
    decay = {"constant": 1.0, "linear": 1.0 - u, "cosine": 0.5 * (1.0 + math.cos(math.pi * u))}[options.schedule]
    return options.lr * warm * decay


def average_decay(ema: float, step: int) -> float:
    """beta of the average after step ``step`` (from 0)."""
    return min(ema, (1 + step) / (10 + step))


def update_average(average: Sequence[Tensor], values: Sequence[Tensor], decay: float) -> None:
    """Move every average towards its value by ``1 - decay``, in place."""
    with torch.no_grad():
        torch._foreach_lerp_(list(average), list(values), 1.0 - decay)  # pyright: ignore[reportPrivateImportUsage]


def draw_times(
    options: TimeOptions, path: Path, scale: float, shape: tuple[int, int], generator: torch.Generator
) -> Float[Tensor, "T n"]:
    """Times ``(T, n)`` in float64 on the generator's device; ``scale`` is that of the tasks, in data units.

    A bandwidth that the path does not reach is an error of :meth:`nwflow.paths.Path.time_at`, which names its range.
    """
    tasks, n = shape
    u = torch.rand(tasks, n, generator=generator, device=generator.device, dtype=torch.float64)
    u = (u + torch.arange(n, device=u.device)) / n
    if options.times == "uniform":
        return LEAST + (1.0 - 2.0 * LEAST) * u
    low, high = math.log(options.lowest * scale), math.log(options.highest * scale)
    return path.time_at(torch.exp(low + (high - low) * u))


def seeded(*numbers: int) -> torch.Generator:
    """A generator on the CPU whose stream belongs to these numbers (of at least 0), such as (seed, use, step, part)."""
    state = np.random.SeedSequence(list(numbers)).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state) >> 1)
