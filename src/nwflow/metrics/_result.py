"""What every metric returns: a frozen record that goes to JSON and back, with its uncertainty and its origin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Any, TypeVar

import torch
from torch import Tensor

R = TypeVar("R", bound="Result")


@dataclass(frozen=True, kw_only=True)
class Result:
    """Base of the records: numbers, strings, None and tuples of them, nothing else."""

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of JSON types; ``metric`` names the record."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"metric": type(self).__name__} | {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls: type[R], values: dict[str, Any]) -> R:
        """The record that :meth:`to_dict` wrote; ValueError when ``values`` is another record or misses fields."""
        values = dict(values)
        if (metric := values.pop("metric", cls.__name__)) != cls.__name__:
            raise ValueError(f"values: expected a {cls.__name__}, got a {metric}")
        names = {f.name for f in fields(cls)}
        if names != set(values):
            missing, unknown = sorted(names - set(values)), sorted(set(values) - names)
            raise ValueError(
                f"values: expected the fields of {cls.__name__}, got missing {missing} and unknown {unknown}"
            )
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def check_level(ci: float) -> float:
    """A confidence level strictly between 0 and 1."""
    if isinstance(ci, bool) or not isinstance(ci, int | float):
        raise TypeError(f"ci: expected a float, got {type(ci).__name__}")
    if not 0 < ci < 1:
        raise ValueError(f"ci: expected a confidence level between 0 and 1, got {ci}")
    return float(ci)


def check_count(value: int, name: str, minimum: int) -> int:
    """An int that is at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name}: expected at least {minimum}, got {value}")
    return value


def quantile_of_normal(ci: float) -> float:
    """z such that a standard normal lies within (-z, z) with probability ``ci``."""
    return NormalDist().inv_cdf(0.5 + ci / 2)


def normal_interval(value: float, standard_error: float | None, ci: float) -> tuple[float, float] | None:
    """value -+ z standard errors; None without a standard error."""
    if standard_error is None:
        return None
    z = quantile_of_normal(ci)
    return value - z * standard_error, value + z * standard_error


def wilson_interval(successes: int, n: int, ci: float) -> tuple[float, float]:
    r"""Wilson's score interval of a binomial share: the p with :math:`|\hat p - p| \le z \sqrt{p (1 - p) / n}`.

    Within [0, 1], and of positive width when no or every trial succeeds (Wilson 1927, JASA 22:209).
    """
    z2, p = quantile_of_normal(ci) ** 2, successes / n
    half = math.sqrt(z2 * (p * (1 - p) / n + z2 / (4 * n * n)))
    low, high = (p + z2 / (2 * n) - half) / (1 + z2 / n), (p + z2 / (2 * n) + half) / (1 + z2 / n)
    return (0.0 if successes == 0 else low), (1.0 if successes == n else high)


def permutation_p_value(as_extreme: int, permutations: int) -> float | None:
    """(1 + count) / (1 + permutations): the given labelling is one of them, so it is never 0 (Phipson & Smyth 2010)."""
    return (1 + as_extreme) / (1 + permutations) if permutations else None


def jackknife_variance(left_out: Tensor) -> float:
    """(g - 1)/g sum (theta_(-i) - mean)^2 over the g values with one point, or one group of points, left out."""
    g = len(left_out)
    return float((left_out - left_out.mean()).square().sum()) * (g - 1) / g


def random_groups(n: int, groups: int, generator: torch.Generator) -> Tensor:
    """Group numbers (n,) in random order, of sizes that differ by one at most."""
    return (torch.arange(n) % groups)[torch.randperm(n, generator=generator)]


def as_floats(values: Tensor | Sequence[float]) -> tuple[float, ...]:
    """A tuple of Python floats."""
    return tuple(float(v) for v in (values.tolist() if isinstance(values, Tensor) else values))
