"""Labelled points as tasks: every class is a task, and some classes are seen in the validation or the test alone.

The support and the targets of a task are rows of its class, drawn without replacement: no row is in both. Classes are
divided by a seed into those of training, validation and test, so that a test task is a class that no training step has
seen. Points are data (t = 1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from nwflow.data import load_support
from nwflow.support import Support
from nwflow.tasks.batch import TaskBatch
from nwflow.tasks.family import PARTS, Drawn, Family, Part, check_part, padded


@dataclass(frozen=True, eq=False)
class LabelledFeatures(Family):
    """Tasks from the classes of a labelled support.

    Args:
        support: labelled points; see :meth:`load` for those of a file.
        validation, test: shares of the classes, each at least one class unless 0.
        seed: divides the classes.
        min_rows: classes with fewer rows are left out of all parts.
        split: the part that tasks are drawn from; :meth:`part` changes it.

    Raises:
        ValueError: no labels, weights, shares that leave no class to train on; in :meth:`sample`, a class with fewer
            rows than support and targets need.

    Example:
        >>> digits = LabelledFeatures.load("digits")
        >>> [len(digits.part(part).classes) for part in ("train", "validation", "test")]
        [6, 2, 2]
        >>> digits.sample(4, 10, 20, torch.Generator().manual_seed(0))
        TaskBatch(4 tasks of 10 + 20 points of (8, 8), features)
    """

    support: Support
    validation: float = 0.2
    test: float = 0.2
    seed: int = 0
    min_rows: int = 0
    split: Part = "train"

    name: ClassVar[str] = "features"

    def __post_init__(self) -> None:
        check_part(self.split)
        if not isinstance(self.support, Support):
            raise TypeError(f"support: expected a Support, got {type(self.support).__name__}")
        if self.support.is_batch or self.support.labels is None:
            raise ValueError("support: expected one labelled set, whose classes are the tasks; labels are missing")
        if not self.support.is_uniform:
            raise ValueError("support: expected points without prior weights: rows of a class are drawn equally likely")
        for name in ("validation", "test"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a share of the classes in [0, 1), got {getattr(self, name)}")
        if not self.classes:
            raise ValueError(
                f"{self.split}: expected at least one class in this part, got {self._sizes()} in all parts"
            )

    @classmethod
    def load(cls, source: Any, *, validation: float = 0.2, test: float = 0.2, seed: int = 0, min_rows: int = 0,
             **options: Any) -> LabelledFeatures:  # fmt: skip
        """The tasks of a file, folder or bundled set; ``options`` are those of :func:`nwflow.data.load_support`."""
        return cls(load_support(source, **options), validation, test, seed, min_rows)

    @property
    def event_shape(self) -> tuple[int, ...]:
        return self.support.event_shape

    def part(self, part: Part) -> LabelledFeatures:
        check_part(part)
        return self if part == self.split else replace(self, split=part)

    @cached_property
    def _codes(self) -> dict[str, list[int]]:
        """The class codes of each part."""
        labels = self.support.labels
        assert labels is not None and self.support.label_names is not None
        counts = torch.bincount(labels[self.support.valid].cpu(), minlength=len(self.support.label_names))
        known = ((counts > 0) & (counts >= self.min_rows)).nonzero().squeeze(1)
        order = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(self.seed))].tolist()
        n_test, n_validation = (max(1, round(s * len(order))) if s else 0 for s in (self.test, self.validation))
        held = n_test + n_validation
        parts = order[held:], order[n_test:held], order[:n_test]
        return dict(zip(PARTS, map(sorted, parts), strict=True))

    def _sizes(self) -> str:
        return " + ".join(str(len(codes)) for codes in self._codes.values())

    @property
    def classes(self) -> tuple[Any, ...]:
        """Labels of the classes of this part."""
        assert self.support.label_names is not None
        return tuple(self.support.label_names[code] for code in self._codes[self.split])

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor]:
        """Slots of the rows of each class of this part ``(C, L)``, and their numbers ``(C,)``."""
        labels = self.support.labels
        assert labels is not None
        rows = [((labels == c) & self.support.valid).nonzero().squeeze(1) for c in self._codes[self.split]]
        sizes = torch.tensor([len(r) for r in rows], device=labels.device)
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), sizes

    def draw(self, n_tasks: int, count: int, generator: torch.Generator, dtype: torch.dtype) -> Drawn:
        needed = torch.full((n_tasks,), count, device=generator.device)
        return Drawn(self._rows(needed, generator, dtype))

    def _sample(self, sizes: Tensor, n: int, generator: torch.Generator, dtype: torch.dtype) -> TaskBatch:
        points = self._rows(sizes + n, generator, dtype)
        support, mask = padded(points[:, n:], sizes)
        family = torch.zeros(len(sizes), dtype=torch.long, device=points.device)
        return TaskBatch(support, points[:, :n], mask, (self.name,), family)

    def _rows(self, needed: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Points of rows in random order, at least ``needed`` different ones a task; what follows is padding."""
        table, sizes = (v.to(generator.device) for v in self._table)
        which = torch.randint(len(sizes), needed.shape, generator=generator, device=generator.device)
        sizes, most = sizes[which], int(needed.max())
        if bool((short := sizes < needed).any()):
            i = int(short.nonzero()[0])
            name, has, most = self.classes[int(which[i])], int(sizes[i]), int(needed[i])
            raise ValueError(
                f"m, n: class {name!r} has {has} rows, fewer than the {most} of a support and its targets; expected "
                f"fewer of them, or min_rows={most} to leave such classes out"
            )
        keys = torch.rand(len(which), table.shape[1], generator=generator, device=generator.device, dtype=torch.float64)
        keys.masked_fill_(torch.arange(table.shape[1], device=keys.device) >= sizes[:, None], 2.0)
        first = keys.topk(min(most, table.shape[1]), largest=False, sorted=True).indices
        slots = table[which].gather(1, first).to(self.support.device)
        return self.support.points[slots].detach().to(generator.device, dtype)
