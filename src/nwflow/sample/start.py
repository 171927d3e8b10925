"""Where samples come from: their number, shape, device and noise, from the arguments of `sample`.

Without ``x0`` sample i starts at ``field.prior(z)`` (t = 0, noise), z the stream of sample i at step 0.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwflow.paths import Path
from nwflow.sample.noise import standard_normal

__all__ = ["Start"]


@dataclass(frozen=True)
class Start:
    """Where samples come from: their number, shape and noise. ``path`` is None for a bare callable."""

    field: Any
    path: Path | None
    event_shape: tuple[int, ...]
    n: int
    n_tasks: int | None
    seed: int
    x0: Tensor | None
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, field: Any, n: int | None, x0: Tensor | None, seed: int, dtype: Any, device: Any) -> "Start":
        bare = not hasattr(field, "denoise")
        if bare and not callable(field):
            raise TypeError(f"field: expected a field or a callable v(x, t), got {type(field).__name__}")
        if bare and x0 is None:
            raise ValueError("x0: expected where to start, as a bare callable has no prior; got None")
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
            raise ValueError(f"n: expected a positive integer, got {n!r}")
        support = getattr(field, "support", None)
        n_tasks = None if bare else getattr(support, "n_tasks", None)
        if x0 is not None:
            n, event = _checked(x0, n, None if bare else tuple(field.event_shape), n_tasks)
            dtype, device = dtype or x0.dtype, device or x0.device
        elif n is None:
            raise ValueError("n: expected a number of samples, or x0=; got neither")
        else:
            event = tuple(field.event_shape)
        dtype = dtype or getattr(support, "dtype", torch.get_default_dtype())
        if not dtype.is_floating_point:
            raise TypeError(f"dtype: expected a floating dtype, got {dtype}")
        device = torch.device(device or getattr(support, "device", "cpu"))
        return cls(field, None if bare else field.path, event, n, n_tasks, seed, x0, dtype, device)

    def state(self, samples: range) -> Tensor:
        """x at the first time, in the dtype of the computation."""
        wide = torch.promote_types(self.dtype, torch.float32)
        if self.x0 is None:
            return self.field.prior(self._normal(samples, 0))
        axis = 0 if self.n_tasks is None else 1
        return self.x0.narrow(axis, samples.start, len(samples)).to(device=self.device, dtype=wide)

    def noise(self, samples: range, step: int) -> Tensor:
        """Noise of the path for step 1, 2, ...: standard normal, coloured by the field's metric."""
        z = self._normal(samples, step)
        return self.field.colour(z) if hasattr(self.field, "colour") else z

    def _normal(self, samples: range, step: int) -> Tensor:
        wide = torch.promote_types(self.dtype, torch.float32)
        tasks = self.n_tasks
        return standard_normal(
            self.event_shape, samples, seed=self.seed, step=step, n_tasks=tasks, dtype=wide, device=self.device
        )


def _checked(
    x0: Tensor, n: int | None, event: tuple[int, ...] | None, n_tasks: int | None
) -> tuple[int, tuple[int, ...]]:
    """Number of samples and event shape of ``x0``."""
    if not isinstance(x0, Tensor) or not x0.is_floating_point():
        raise TypeError(f"x0: expected a floating tensor, got {getattr(x0, 'dtype', type(x0).__name__)}")
    lead = 1 if n_tasks is None else 2
    shape = tuple(x0.shape)
    event = shape[1:] if event is None else event
    if len(shape) != lead + len(event) or shape[lead:] != event or (n_tasks is not None and shape[0] != n_tasks):
        raise ValueError(f"x0: expected shape {'(n, ' if lead == 1 else f'({n_tasks}, n, '}*{event}), got {shape}")
    if shape[lead - 1] == 0 or n not in (None, shape[lead - 1]):
        raise ValueError(f"n: expected the number of states in x0, {shape[lead - 1]} (at least 1), got {n}")
    return shape[lead - 1], event
