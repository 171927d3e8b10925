"""Several families at once, some of them kept for the test: does a model learn to condition, or does it learn shapes?

Every task is of a family that is drawn uniformly. With families left out, training and validation never see them, and
the test part consists of them alone (leave-one-family-out). Points are data (t = 1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from nwflow.tasks.batch import TaskBatch
from nwflow.tasks.family import Drawn, Family, Part, check_part


@dataclass(frozen=True)
class Mixed(Family):
    """A family of families.

    Args:
        families: families of one event shape, with different names.
        leave_out: names of those that only the test part draws from.

    Example:
        >>> from nwflow.tasks import Moons, Rings, Spirals
        >>> mixed = Mixed((Rings(), Moons(), Spirals()), leave_out=("moons",))
        >>> [family.name for family in mixed.part("train").families]
        ['rings', 'spirals']
        >>> mixed.part("test").names
        ('moons',)
    """

    families: tuple[Family, ...]
    leave_out: tuple[str, ...] = ()

    name: ClassVar[str] = "mixed"

    def __post_init__(self) -> None:
        if not self.families:
            raise ValueError("families: expected at least one family, got none")
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"families: expected different names, got {', '.join(self.names)}")
        if len(shapes := {f.event_shape for f in self.families}) > 1:
            raise ValueError(f"families: expected one event shape, got {', '.join(map(str, sorted(shapes)))}")
        if unknown := set(self.leave_out) - set(self.names):
            raise ValueError(f"leave_out: expected names out of {', '.join(self.names)}, got {', '.join(unknown)}")
        if set(self.names) == set(self.leave_out):
            raise ValueError("leave_out: expected at least one family to train on, got all of them")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the families."""
        return tuple(family.name for family in self.families)

    @property
    def event_shape(self) -> tuple[int, ...]:
        return self.families[0].event_shape

    def part(self, part: Part) -> Mixed:
        check_part(part)
        kept = [f for f in self.families if not self.leave_out or (f.name in self.leave_out) == (part == "test")]
        return Mixed(tuple(family.part(part) for family in kept))

    def draw(self, n_tasks: int, count: int, generator: torch.Generator, dtype: torch.dtype) -> Drawn:
        sizes = torch.full((n_tasks,), count - 1, device=generator.device)
        tasks = self._sample(sizes, 1, generator, dtype)
        return Drawn(torch.cat([tasks.target, tasks.support], dim=1), tasks.law)

    def _sample(self, sizes: Tensor, n: int, generator: torch.Generator, dtype: torch.dtype) -> TaskBatch:
        which = torch.randint(len(self.families), sizes.shape, generator=generator, device=sizes.device)
        parts: list[tuple[Tensor, TaskBatch]] = []
        for i, family in enumerate(self.families):
            if len(index := (which == i).nonzero().squeeze(1)):
                parts.append((index, family._sample(sizes[index], n, generator, dtype)))
        if len(parts) == 1:
            return replace(parts[0][1], names=self.names, family=which)
        first = parts[0][1].support
        support = first.new_zeros(len(sizes), int(sizes.max()), *self.event_shape)
        target = first.new_zeros(len(sizes), n, *self.event_shape)
        for index, tasks in parts:
            support[index, : tasks.support.shape[1]] = tasks.support
            target[index] = tasks.target
        mask = torch.arange(support.shape[1], device=sizes.device) < sizes[:, None]
        return TaskBatch(support, target, None if bool(mask.all()) else mask, self.names, which)
