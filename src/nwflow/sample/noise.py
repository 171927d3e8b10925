"""Standard normal numbers that depend on who asks, not on how many ask.

Every (seed, task, sample, step) owns a stream of the counter-based generator Philox4x64: the seed is its key, and task,
sample and step are words of its 256-bit counter, so each stream holds 2^64 blocks. The noise of sample i is therefore
the same bits for every number of samples, batch and block. Step 0 is the start at t = 0 (noise); step k >= 1 is the
noise that a stochastic sampler adds in its k-th step towards t = 1 (data).

Numbers are drawn in float64 on the CPU and cast there, so that no float64 tensor reaches a device without float64.

Reference: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3.
"""

import operator

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["as_seed", "standard_normal"]


def as_seed(seed: int) -> int:
    """``seed`` as a Python int; raises unless it is an integer in [0, 2^64)."""
    try:
        value = operator.index(seed)
    except TypeError:
        raise TypeError(f"seed: expected an integer, got {type(seed).__name__}") from None
    if not 0 <= value < 2**64:
        raise ValueError(f"seed: expected an integer in [0, 2^64), got {value}")
    return value


def standard_normal(
    event_shape: tuple[int, ...],
    samples: range,
    *,
    seed: int,
    step: int = 0,
    n_tasks: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Float[Tensor, "*tasks_samples_event"]:
    """Noise of the samples numbered ``samples`` at ``step``: ``(len(samples), *event)``, or ``(n_tasks, ...)`` of that.

    The noise of task 0 is the noise drawn without tasks.

    >>> one = standard_normal((3,), range(4, 5), seed=7)
    >>> torch.equal(standard_normal((3,), range(8), seed=7)[4:5], one)
    True
    """
    philox = np.random.Philox(key=np.array([as_seed(seed), 0], dtype=np.uint64))
    generator, state = np.random.Generator(philox), philox.state
    drawn = np.empty((n_tasks or 1, len(samples), *event_shape))
    for task in range(drawn.shape[0]):
        for row, sample in enumerate(samples):
            state["state"]["counter"][:] = (0, sample, step, task)
            philox.state = state
            drawn[task, row] = generator.standard_normal(event_shape)
    noise = torch.from_numpy(drawn if n_tasks is not None else drawn[0])
    return noise.to(dtype).to(device)
