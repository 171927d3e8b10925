r"""The path of a diffusers scheduler: a table of a discrete process made continuous; t = 0 is noise, t = 1 is data.

    log h = (log(1 - alpha^2) - log alpha^2) / 2  at the entries, a monotone cubic between them;
    alpha = sigmoid(-2 log h)^(1/2),  sigma = sigmoid(2 log h)^(1/2)

Reference: Fritsch & Butland 1984 (monotone cubic interpolation).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from nwflow.paths.gaussian import CondOT
from nwflow.paths.schedule import Path, Schedule

__all__ = ["DiscretePath", "from_diffusers"]

_Number = TypeVar("_Number", float, Tensor)


@final
@dataclass(frozen=True, repr=False)
class DiscretePath(Path):
    """The path of a diffusers scheduler; build it with :func:`from_diffusers` or the two class methods.

    ``kind="alphas_cumprod"``: alpha^2 is the table, at timestep k = 0 .. K-1 and time t = 1 - k / (K - 1). Between the
    entries log h is a monotone cubic of k with continuous slope (Fritsch-Butland), so that alpha, sigma and their
    derivatives are continuous; at the entries the table is met exactly. Such a table reaches neither alpha = 0 nor
    sigma = 0: both ends of ``bandwidth_range`` are finite and positive.

    ``kind="flow_sigmas"``: the scheduler's x = (1 - sigma) data + sigma noise is the straight path at t = 1 - sigma,
    whatever its shift, so nothing is interpolated: alpha = t, sigma = 1 - t, and a flow model's prediction
    noise - data is minus the velocity. The table only says which times the scheduler visits (``times``). Timesteps
    run from 0 (data) to ``num_train_timesteps`` (noise). Outside the table the straight path is continued to its ends.
    """

    table: tuple[float, ...]
    kind: Literal["alphas_cumprod", "flow_sigmas"]
    num_train_timesteps: int

    def __post_init__(self) -> None:
        values = np.asarray(self.table)
        flow = self.kind == "flow_sigmas"
        inside = (values >= 0) & (values <= 1) if flow else (values > 0) & (values < 1)
        if len(values) < 2:
            raise ValueError(f"{self.kind}: expected at least 2 entries, got {len(values)}")
        if not inside.all():
            k = int(np.argmin(inside))
            hint = "; a zero terminal SNR has no finite log-SNR: set that entry to 2**-24" if values[k] == 0 else ""
            raise ValueError(
                f"{self.kind}: expected finite values in {'[0, 1]' if flow else '(0, 1)'}, "
                f"got {values[k]} at index {k}{hint}"
            )
        rising = np.diff(values) >= 0
        if rising.any():
            k = int(np.argmax(rising))
            raise ValueError(
                f"{self.kind}: expected strictly decreasing values, got {values[k]} then {values[k + 1]} at index {k}"
            )

    @property
    def last_timestep(self) -> int:
        """The timestep at t = 0, the noisiest; timestep 0 is at t = 1."""
        return self.num_train_timesteps if self.kind == "flow_sigmas" else len(self.table) - 1

    @cached_property
    def _cubics(self) -> np.ndarray:
        return _monotone_cubics(_log_h(np.asarray(self.table)))

    @classmethod
    def from_alphas_cumprod(cls, alphas_cumprod: Sequence[float] | np.ndarray | Tensor) -> "DiscretePath":
        """The path of a DDPM-like table: alpha^2 per timestep, decreasing, inside (0, 1).

        >>> DiscretePath.from_alphas_cumprod([0.9, 0.5, 0.1])(0.5).bandwidth.item()
        1.0
        """
        table = _as_table(alphas_cumprod, "alphas_cumprod")
        return cls(table, "alphas_cumprod", len(table))

    @classmethod
    def from_flow_sigmas(
        cls, sigmas: Sequence[float] | np.ndarray | Tensor, num_train_timesteps: int = 1000
    ) -> "DiscretePath":
        """The straight path with the times of a flow-matching scheduler: sigma decreasing, inside [0, 1].

        >>> DiscretePath.from_flow_sigmas([1.0, 0.75, 0.0]).times
        (0.0, 0.25, 1.0)
        """
        if not num_train_timesteps >= 1:
            raise ValueError(f"num_train_timesteps: expected at least 1, got {num_train_timesteps}")
        return cls(_as_table(sigmas, "flow_sigmas"), "flow_sigmas", num_train_timesteps)

    @property
    def times(self) -> tuple[float, ...]:
        """The increasing times of the table's entries: a grid for a sampler."""
        if self.kind == "flow_sigmas":
            return tuple(1 - sigma for sigma in self.table)
        return tuple(1 - k / self.last_timestep for k in reversed(range(len(self.table))))

    def time_of_timestep(self, timestep: _Number) -> _Number:
        """The time 1 - timestep / last_timestep; a timestep is the number that the scheduler's model is called with."""
        return 1 - timestep / self.last_timestep

    def timestep_at(self, t: _Number) -> _Number:
        """The inverse of :meth:`time_of_timestep`; between entries it is fractional."""
        return (1 - t) * self.last_timestep

    def __repr__(self) -> str:
        low, high = self.bandwidth_range
        return f"DiscretePath({self.kind}, {len(self.table)} entries, bandwidth {low:.4g} to {high:.4g})"

    def _schedule(self, t: Tensor) -> Schedule:
        if self.kind == "flow_sigmas":
            return CondOT()._schedule(t)
        k = (1 - t) * self.last_timestep
        left = k.detach().floor().clamp(max=len(self.table) - 2)
        log_h, slope = _evaluate(_rows(torch.from_numpy(self._cubics).to(t), left.long()), k - left)
        d_log_h = -self.last_timestep * slope
        alpha, sigma = torch.sigmoid(-2 * log_h).sqrt(), torch.sigmoid(2 * log_h).sqrt()
        return Schedule(alpha, sigma, -alpha * sigma.square() * d_log_h, sigma * alpha.square() * d_log_h)

    def _time_at(self, h: Tensor) -> Tensor:
        if self.kind == "flow_sigmas":
            return CondOT()._time_at(h)
        cubics, target = torch.from_numpy(self._cubics).to(h), h.log()
        index = torch.searchsorted(cubics[:, 0].contiguous(), target.detach(), right=True) - 1
        index = index.clamp(0, len(cubics) - 1)
        cubic = _rows(cubics, index)
        f = _solve_cubic(cubic, target.detach())
        for _ in range(2):  # these Newton steps carry the first and second derivative in h
            value, slope = _evaluate(cubic, f)
            f = f + (target - value) / slope
        return 1 - (index + f) / self.last_timestep


def from_diffusers(scheduler: Any) -> DiscretePath:
    """The path of a diffusers scheduler, its time turned so that t = 0 is noise; diffusers itself is not needed.

    A scheduler with ``alphas_cumprod`` (DDPM, DDIM, Euler, DPM-Solver, ...) gives its variance-preserving path, one
    with flow-matching ``sigmas`` the straight path; one with ``use_flow_sigmas`` has those once ``set_timesteps`` was
    called. Raises ``TypeError`` for an object with neither and ``ValueError`` for a table that no Gaussian path has.

    >>> from types import SimpleNamespace
    >>> from_diffusers(SimpleNamespace(alphas_cumprod=torch.linspace(0.99, 0.01, 1000)))
    DiscretePath(alphas_cumprod, 1000 entries, bandwidth 0.1005 to 9.95)
    """
    config = getattr(scheduler, "config", None)

    def setting(name: str, default: Any) -> Any:
        return config.get(name, default) if isinstance(config, dict) else getattr(config, name, default)

    alphas_cumprod, sigmas = getattr(scheduler, "alphas_cumprod", None), getattr(scheduler, "sigmas", None)
    if alphas_cumprod is not None and not setting("use_flow_sigmas", False):
        return DiscretePath.from_alphas_cumprod(alphas_cumprod)
    if sigmas is not None:
        return DiscretePath.from_flow_sigmas(sigmas, setting("num_train_timesteps", 1000))
    raise TypeError(
        f"scheduler: expected an object with alphas_cumprod or flow-matching sigmas, got {type(scheduler).__name__}"
    )


def _as_table(values: Sequence[float] | np.ndarray | Tensor, name: str) -> tuple[float, ...]:
    array = np.asarray(values.detach().cpu().double() if isinstance(values, Tensor) else values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name}: expected one axis, got shape {array.shape}")
    return tuple(array.tolist())


def _log_h(alphas_cumprod: np.ndarray) -> np.ndarray:
    return (np.log1p(-alphas_cumprod) - np.log(alphas_cumprod)) / 2


def _monotone_cubics(y: np.ndarray) -> np.ndarray:
    """Coefficients (K - 1, 4) of the cubics through increasing ``y`` at 0 .. K - 1; every slope is positive."""
    secant = np.diff(y)
    inner = 2 * secant[:-1] * secant[1:] / (secant[:-1] + secant[1:])  # at most twice the smaller secant: monotone
    if len(secant) == 1:
        slope = np.repeat(secant, 2)
    else:  # one-sided at the ends, kept between half and 1.5 times the secant
        first = max(1.5 * secant[0] - secant[1] / 2, secant[0] / 2)
        last = max(1.5 * secant[-1] - secant[-2] / 2, secant[-1] / 2)
        slope = np.concatenate([[first], inner, [last]])
    left, right = slope[:-1], slope[1:]
    return np.stack([y[:-1], left, 3 * secant - 2 * left - right, left + right - 2 * secant], axis=-1)


def _rows(cubics: Tensor, index: Tensor) -> Tensor:
    return cubics.index_select(0, index.reshape(-1)).reshape((*index.shape, 4))  # cubics[index] fails in grad in vmap


def _evaluate(cubic: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """Value and slope of cubics (..., 4) at f (...)."""
    c0, c1, c2, c3 = cubic.unbind(-1)
    return c0 + f * (c1 + f * (c2 + f * c3)), c1 + f * (2 * c2 + f * (3 * c3))


def _solve_cubic(cubic: Tensor, target: Tensor) -> Tensor:
    """Where increasing cubics (..., 4) on [0, 1] meet the target (...): Newton steps inside a shrinking bracket."""
    low, high = torch.zeros_like(target), torch.ones_like(target)
    f = 0.5 * torch.ones_like(target)
    for _ in range(40):
        value, slope = _evaluate(cubic, f)
        low, high = torch.where(value <= target, f, low), torch.where(value >= target, f, high)
        newton = f - (value - target) / slope
        f = torch.where((newton >= low) & (newton <= high), newton, (low + high) / 2)
    return f
