r"""What a draw of tasks is: supports to condition on, targets to generate, and where there is one the exact answer.

A task is a law p drawn from a meta-distribution; its support (m points) and its targets (n points) are drawn from p
independently, or from the rows of a file without a row in common. Both lie at the data end t = 1 of a path
X_t = alpha X_1 + sigma X_0 (t = 0 is noise). A law that knows E[X_1 | X_t] is an oracle: no learned or
plug-in denoiser can have a smaller mean squared error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from nwflow.paths import Path
from nwflow.support import Support


class Law(Protocol):
    """The laws of T tasks, known in closed form."""

    def denoise(self, x: Tensor, t: float | Tensor, path: Path) -> Tensor:
        """E[X_1 | X_t = x] of each task, shape and dtype of ``x`` ``(T, n, *event)``; t as for a field of tasks."""
        ...

    def select(self, index: Tensor) -> Law:
        """The laws of the tasks at ``index`` (long)."""
        ...

    def to(self, device: Any) -> Law:
        """The same laws on another device."""
        ...


@dataclass(frozen=True, eq=False)
class TaskBatch:
    """T tasks.

    Attributes:
        support: ``(T, m, *event)``, zero where masked. mask: ``(T, m)``, True = real point, or None where all are.
        target: ``(T, n, *event)``, fresh points of the same laws.
        names: names of the families. family: ``(T,)`` long, index into ``names`` of each task's family.
        law: the laws in closed form, or None where they are not known.

    Example:
        >>> from nwflow import CondOT
        >>> from nwflow.tasks import GaussianMixtures
        >>> tasks = GaussianMixtures(dim=2).sample(3, "4-8", 16, torch.Generator().manual_seed(0))
        >>> tasks
        TaskBatch(3 tasks of 7-8 + 16 points of (2,), gaussian_mixtures, with oracle)
        >>> tasks.oracle(tasks.target, 0.5, CondOT()).shape
        torch.Size([3, 16, 2])
    """

    support: Float[Tensor, "T m *event"]
    target: Float[Tensor, "T n *event"]
    mask: Bool[Tensor, "T m"] | None
    names: tuple[str, ...]
    family: Int64[Tensor, " T"]
    law: Law | None = None

    def __len__(self) -> int:
        return len(self.support)

    @property
    def event_shape(self) -> tuple[int, ...]:
        """Shape of one point."""
        return tuple(self.support.shape[2:])

    @property
    def sizes(self) -> Int64[Tensor, " T"]:
        """Number of real support points of each task."""
        if self.mask is None:
            return torch.full((len(self),), self.support.shape[1], device=self.support.device)
        return self.mask.sum(1)

    def supports(self) -> Support:
        """The supports as :meth:`nwflow.Support.batch`."""
        return Support.batch(self.support, mask=self.mask)

    def oracle(self, x: Float[Tensor, "T n *event"], t: float | Tensor, path: Path) -> Float[Tensor, "T n *event"]:
        """E[X_1 | X_t = x] under each task's law, shape and dtype of ``x``; ``t`` as for a field of tasks.

        Raises:
            ValueError: the laws of these tasks are not known in closed form; t or x of a wrong shape.
        """
        if self.law is None:
            raise ValueError(f"oracle: expected tasks with a known posterior mean, got {', '.join(self.names)}")
        return self.law.denoise(x, t, path)

    def select(self, index: Any) -> TaskBatch:
        """The tasks at ``index``: a slice, long indices or booleans."""
        index = torch.arange(len(self), device=self.support.device)[index]
        return replace(
            self,
            support=self.support[index],
            target=self.target[index],
            mask=None if self.mask is None else self.mask[index],
            family=self.family[index],
            law=None if self.law is None else self.law.select(index),
        )

    def to(self, device: Any) -> TaskBatch:
        """The same tasks on another device."""
        return replace(
            self,
            support=self.support.to(device),
            target=self.target.to(device),
            mask=None if self.mask is None else self.mask.to(device),
            family=self.family.to(device),
            law=None if self.law is None else self.law.to(device),
        )

    def __repr__(self) -> str:
        sizes = "-".join(str(n) for n in sorted({int(self.sizes.min()), int(self.sizes.max())}))
        law = "" if self.law is None else ", with oracle"
        count = f"{len(self)} tasks of {sizes} + {self.target.shape[1]} points of {self.event_shape}"
        return f"TaskBatch({count}, {', '.join(self.names)}{law})"
