"""What every family of tasks shares: the sizes of supports, the split into support and target, and the checks.

A family is a frozen dataclass whose fields are its parameters. It only says how points of T fresh laws are drawn;
sizes, masks, dtypes and held-out parts are here, once. Points lie at the data end t = 1. All that is random comes from
the generator that is passed, so a draw depends on its seed alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from nwflow.tasks.batch import Law, TaskBatch

SupportSize: TypeAlias = int | tuple[int, int] | list[int] | str
Part: TypeAlias = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")


class Drawn(NamedTuple):
    """Points ``(T, count, *event)`` of T laws, and the laws where they are known."""

    points: Tensor
    law: Law | None = None


@dataclass(frozen=True)
class Family(ABC):
    """A meta-distribution of tasks. ``name`` is what the command line calls it."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def event_shape(self) -> tuple[int, ...]:
        """Shape of one point."""

    @abstractmethod
    def draw(self, n_tasks: int, count: int, generator: torch.Generator, dtype: torch.dtype) -> Drawn:
        """``count`` independent points of each of ``n_tasks`` fresh laws, on the generator's device."""

    def part(self, part: Part) -> Family:
        """The family that training, validation or test draws from: itself, where tasks never run out."""
        check_part(part)
        return self

    def sample(
        self,
        n_tasks: int,
        m: SupportSize,
        n: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
    ) -> TaskBatch:
        """``n_tasks`` fresh tasks with ``n`` targets each, on the generator's device.

        Args:
            m: points of a support: a number, a range ``(low, high)`` or ``"low-high"`` (each size in it equally
                likely), a list ``[a, b, ...]`` or ``"a,b,..."`` of sizes to choose from. Tasks of several sizes are
                padded with zeros to the largest of the batch, and masked.

        Raises:
            ValueError, TypeError: numbers below 1, or more points than a task has.
        """
        check_positive(n_tasks, "n_tasks")
        check_positive(n, "n")
        sizes = draw_sizes(parse_sizes(m), n_tasks, generator)
        return self._sample(sizes, n, generator, dtype)

    def _sample(self, sizes: Tensor, n: int, generator: torch.Generator, dtype: torch.dtype) -> TaskBatch:
        m = int(sizes.max())
        points, law = self.draw(len(sizes), n + m, generator, dtype)
        support, mask = padded(points[:, n:], sizes)
        family = torch.zeros(len(sizes), dtype=torch.long, device=points.device)
        return TaskBatch(support, points[:, :n], mask, (self.name,), family, law)


def padded(points: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor | None]:
    """The first ``sizes`` points of each task, zeros behind them, and their mask; None where all are real."""
    mask = torch.arange(points.shape[1], device=points.device) < sizes[:, None]
    if bool(mask.all()):
        return points, None
    return torch.where(mask.reshape(mask.shape + (1,) * (points.ndim - 2)), points, 0), mask


def parse_sizes(m: SupportSize) -> tuple[int, int] | list[int]:
    """A range or a list of support sizes from any form that :meth:`Family.sample` takes.

    >>> parse_sizes(50), parse_sizes("10-100"), parse_sizes("5,10,20")
    ((50, 50), (10, 100), [5, 10, 20])
    """
    given = m
    if isinstance(m, str):
        try:
            m = [int(v) for v in m.split(",")] if "-" not in m else tuple(int(v) for v in m.split("-"))  # type: ignore
        except ValueError:
            raise ValueError(f"support: expected a number, LOW-HIGH or A,B,..., got {given!r}") from None
        m = m[0] if isinstance(m, list) and len(m) == 1 else m
    if isinstance(m, int) and not isinstance(m, bool):
        m = (m, m)
    if not isinstance(m, (tuple, list)):
        raise TypeError(f"support: expected a number, a range (low, high) or a list of sizes, got {given!r}")
    if not m or any(isinstance(v, bool) or not isinstance(v, int) or v < 1 for v in m):
        raise ValueError(f"support: expected sizes of at least 1, got {given!r}")
    if isinstance(m, tuple) and (len(m) != 2 or m[0] > m[1]):
        raise ValueError(f"support: expected a range (low, high) with low <= high, got {given!r}")
    return m


def draw_sizes(sizes: tuple[int, int] | list[int], n_tasks: int, generator: torch.Generator) -> Tensor:
    """``(n_tasks,)`` long, on the generator's device."""
    where: dict = {"generator": generator, "device": generator.device}
    if isinstance(sizes, tuple):
        return torch.randint(sizes[0], sizes[1] + 1, (n_tasks,), **where)
    return torch.tensor(sizes, device=generator.device)[torch.randint(len(sizes), (n_tasks,), **where)]


def draw_counts(low: int, high: int, n_tasks: int, generator: torch.Generator) -> Tensor:
    """How many components each task has: ``(n_tasks,)`` long, uniform on low..high."""
    return draw_sizes((low, high), n_tasks, generator)


def draw_components(counts: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """``(T, n)`` long: the component of each point, all ``counts[i]`` of task i equally likely."""
    u = torch.rand(len(counts), n, generator=generator, device=counts.device)
    return torch.minimum((u * counts[:, None]).long(), counts[:, None] - 1)  # u k can round up to k


def embedded(points: Tensor, dim: int, generator: torch.Generator) -> Tensor:
    """Points ``(T, n, 2)`` in a uniformly random plane of ``dim`` dimensions, one a task; in 2, a random rotation."""
    frames = torch.randn(len(points), dim, 2, generator=generator, device=points.device, dtype=points.dtype)
    e1 = frames[..., 0] / frames[..., 0].norm(dim=-1, keepdim=True)
    e2 = frames[..., 1] - (frames[..., 1] * e1).sum(-1, keepdim=True) * e1
    e2 = e2 / e2.norm(dim=-1, keepdim=True)
    return points @ torch.stack([e1, e2], dim=1)


def check_range(low: int, high: int, what: str) -> None:
    """ValueError unless 1 <= low <= high."""
    if not 1 <= low <= high:
        raise ValueError(f"min_{what}, max_{what}: expected 1 <= min <= max, got {low}, {high}")


def check_positive(value: int, name: str) -> None:
    """TypeError or ValueError unless ``value`` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")


def check_scales(family: Family, *names: str) -> None:
    """ValueError unless the named parameters are finite and not negative."""
    for name in names:
        if not 0 <= getattr(family, name) < float("inf"):
            raise ValueError(f"{name}: expected a finite number of at least 0, got {getattr(family, name)}")


def check_dim(dim: int, least: int, name: str) -> None:
    """ValueError unless ``dim`` is an int of at least ``least``."""
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < least:
        raise ValueError(f"dim: expected at least {least} for {name}, got {dim!r}")


def check_part(part: str, known: Sequence[str] = PARTS) -> None:
    """ValueError unless ``part`` is one of train, validation and test."""
    if part not in known:
        raise ValueError(f"part: expected one of {', '.join(known)}, got {part!r}")
