r"""Gaussian paths between noise and data, and the four ways to state a prediction.

Time runs from **t = 0 (noise) to t = 1 (data)**:

    X_t = alpha_t X_1 + sigma_t X_0,    X_0 ~ N(0, I)            h_t = sigma_t / alpha_t  (bandwidth, decreasing)

    CondOT               alpha = t                sigma = (1 - t) + sigma_min t
    VariancePreserving   alpha = exp(-B/2)        sigma = sqrt(1 - exp(-B)),  s = 1 - t,
                         B = beta_min s + (beta_max - beta_min) s^2 / 2
    Cosine               alpha = sin(pi t / 2)    sigma = cos(pi t / 2)
    VarianceExploding    alpha = 1                sigma = sigma_max^(1-t) sigma_min^t
    DiscretePath         the table of a diffusers scheduler

With D = E[X_1 | X_t = x], every conversion follows from x = alpha D + sigma eps:

    velocity u = alpha' D + sigma' eps       noise eps = (x - alpha D) / sigma       score = -eps / sigma

References: Lipman et al. 2023 (arXiv 2210.02747), Song et al. 2021 (arXiv 2011.13456), Albergo & Vanden-Eijnden
2023 (arXiv 2209.15571; the trigonometric path), Fritsch & Butland 1984 (monotone cubic interpolation).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, Literal, TypeAlias, TypeVar, final, get_args, overload

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

__all__ = [
    "CondOT",
    "Cosine",
    "DiscretePath",
    "Path",
    "Prediction",
    "Schedule",
    "VarianceExploding",
    "VariancePreserving",
    "broadcast_schedule",
    "convert",
    "from_denoiser",
    "from_diffusers",
    "is_vmapped",
    "reverse_time",
    "to_denoiser",
    "working_dtype",
]

_Number = TypeVar("_Number", float, Tensor)
Prediction: TypeAlias = Literal["denoiser", "noise", "score", "velocity"]


def working_dtype(device: torch.device | str) -> torch.dtype:
    """float64, or float32 on a device that lacks float64 (MPS)."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


def is_vmapped(value: Tensor) -> bool:
    """True under ``torch.func.vmap`` over ``value``: its numbers cannot be read, so checks on them are skipped."""
    if torch.compiler.is_compiling():
        return False  # reading a number breaks the graph, and what is left of it runs eagerly, where vmap shows
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    while functorch.is_functorch_wrapped_tensor(value):
        if functorch.is_batchedtensor(value):
            return True
        value = functorch.get_unwrapped(value)
    return False


def _as_tensor(value: float | Tensor, name: str) -> Tensor:
    """``value`` in the working dtype, exactly as given: a Python number is float64, a tensor is upcast."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise TypeError(f"{name}: expected a float or a tensor of floats, got a tensor of {value.dtype}")
        return value.to(working_dtype(value.device))
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a float or a tensor of floats, got {type(value).__name__}")
    return torch.tensor(float(value), dtype=torch.float64)


def _as_time(t: float | Tensor) -> Tensor:
    time = _as_tensor(t, "t") + 0.0  # -0.0 becomes 0.0, so that h is inf and not -inf there; never the caller's tensor
    if not is_vmapped(time):
        inside = (time >= 0) & (time <= 1)  # False for NaN
        if not inside.all():
            outside = time.detach()[~inside]
            raise ValueError(
                f"t: expected times in [0, 1] (0 is noise, 1 is data), got {outside[0].item()}"
                + (f" and {outside.numel() - 1} more outside" if outside.numel() > 1 else "")
            )
    return time


# --- one value for alpha, sigma and their derivatives ---------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class Schedule:
    """alpha, sigma and their derivatives with respect to t, all of one shape and device.

    >>> at = CondOT(sigma_min=0.01)(0.5)
    >>> at.alpha.item(), at.sigma.item(), at.d_alpha.item(), at.d_sigma.item()
    (0.5, 0.505, 1.0, -0.99)
    >>> at.bandwidth.item()
    1.01
    """

    alpha: Float[Tensor, "*t"]
    sigma: Float[Tensor, "*t"]
    d_alpha: Float[Tensor, "*t"]
    d_sigma: Float[Tensor, "*t"]

    @property
    def bandwidth(self) -> Float[Tensor, "*t"]:
        """h = sigma / alpha, in units of the data; inf where alpha = 0."""
        return self.sigma / self.alpha

    @property
    def log_snr(self) -> Float[Tensor, "*t"]:
        """2 log(alpha / sigma); -inf where alpha = 0, inf where sigma = 0."""
        return 2 * (self.alpha.log() - self.sigma.log())

    def expand(self, ndim: int) -> "Schedule":
        """Append ``ndim`` axes of size 1 to every tensor, to multiply events of ``ndim`` axes."""
        return Schedule(
            *(v.reshape(v.shape + (1,) * ndim) for v in (self.alpha, self.sigma, self.d_alpha, self.d_sigma))
        )


class Path(ABC):
    """A Gaussian path. Concrete paths are frozen dataclasses: hashable, comparable, with a repr that rebuilds them.

    ``path(t)`` takes a float or a floating tensor of any shape, computes in float64 (float32 on MPS) from t exactly as
    given, and is differentiable in t, twice, also under ``torch.func``. Raises ``ValueError`` for t outside [0, 1] or
    NaN (not checked under ``vmap`` over t) and ``TypeError`` for integer tensors.
    """

    @abstractmethod
    def _schedule(self, t: Tensor) -> Schedule: ...

    @abstractmethod
    def _time_at(self, h: Tensor) -> Tensor: ...

    def __call__(self, t: float | Float[Tensor, "*t"]) -> Schedule:
        return self._schedule(_as_time(t))

    @property
    def bandwidth_range(self) -> tuple[float, float]:
        """(h at t = 1, h at t = 0): the smallest and the largest bandwidth.

        >>> CondOT(sigma_min=0.01).bandwidth_range
        (0.01, inf)
        """
        return self(1.0).bandwidth.item(), self(0.0).bandwidth.item()

    @property
    def starts_at_noise(self) -> bool:
        """Whether alpha_0 = 0, so that X_0 holds nothing of the data."""
        return self(0.0).alpha.item() == 0

    @overload
    def time_at(self, bandwidth: float) -> float: ...
    @overload
    def time_at(self, bandwidth: Tensor) -> Tensor: ...
    def time_at(self, bandwidth: float | Tensor) -> float | Tensor:
        """The time at which sigma / alpha = ``bandwidth``: a float for a float, a float64 tensor for a tensor.

        Correct to the spacing of float64 times. Near t = 1 that spacing (1.1e-16) is coarser than relative rounding
        of h wherever h falls to 0: at h = 1e-6 no float64 t is nearer to h than 1e-10 relative for CondOT() and 2e-6
        for VariancePreserving(), whose h falls like a square root. At h >= 1e-3 all come back within 3e-12.
        Raises ``ValueError``, naming the range, for bandwidths that the path does not reach.

        >>> CondOT().time_at(1.0), Cosine().time_at(math.inf), VarianceExploding(0.01, 100.0).time_at(1.0)
        (0.5, 0.0, 0.5)
        """
        h = _as_tensor(bandwidth, "bandwidth")
        low, high = self.bandwidth_range
        if not is_vmapped(h):
            slack = 64 * torch.finfo(h.dtype).eps  # rounding of bandwidth(t) itself at the two ends
            inside = (h >= low * (1 - slack)) & (h <= high * (1 + slack))
            if not inside.all():
                raise ValueError(
                    f"bandwidth: expected values in [{low}, {high}], the range of {self!r}, "
                    f"got {h.detach()[~inside][0].item()}"
                )
        t = self._time_at(h).clamp(0, 1)  # moves t by rounding only: h is inside the range
        return t if isinstance(bandwidth, Tensor) else t.item()


@final
@dataclass(frozen=True)
class CondOT(Path):
    """Straight lines: alpha = t, sigma = (1 - t) + sigma_min t, so that sigma(1) is sigma_min exactly.

    >>> CondOT(0.01)(1.0).sigma.item()
    0.01
    """

    sigma_min: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.sigma_min < 1:
            raise ValueError(f"sigma_min: expected a number in [0, 1), got {self.sigma_min}")

    def _schedule(self, t: Tensor) -> Schedule:
        one = torch.ones_like(t)
        return Schedule(t, (1 - t) + self.sigma_min * t, one, (self.sigma_min - 1) * one)

    def _time_at(self, h: Tensor) -> Tensor:
        return 1 / (1 + (h - self.sigma_min))


@final
@dataclass(frozen=True)
class VariancePreserving(Path):
    """alpha^2 + sigma^2 = 1 with beta(s) linear in the noise time s = 1 - t (DDPM in continuous time).

    At t = 1 sigma is 0 and sigma' is -inf: sigma falls like sqrt(beta_min s). alpha(0) is small but not 0.

    >>> VariancePreserving()(1.0).d_sigma.item()
    -inf
    """

    beta_min: float = 0.1
    beta_max: float = 20.0

    def __post_init__(self) -> None:
        if not 0 < self.beta_min <= self.beta_max < math.inf:
            raise ValueError(
                f"beta_min, beta_max: expected 0 < beta_min <= beta_max < inf, got {self.beta_min}, {self.beta_max}"
            )

    def _schedule(self, t: Tensor) -> Schedule:
        s = 1 - t
        slope = self.beta_max - self.beta_min
        beta, integral = self.beta_min + slope * s, s * (self.beta_min + slope / 2 * s)
        alpha, sigma = torch.exp(-integral / 2), torch.sqrt(-torch.expm1(-integral))
        return Schedule(alpha, sigma, alpha * beta / 2, -beta * alpha.square() / (2 * sigma))

    def _time_at(self, h: Tensor) -> Tensor:
        big = h.clamp(min=1)  # log(1 + h^2) without overflow
        integral = torch.where(h > 1, 2 * big.log() + big.pow(-2).log1p(), h.clamp(max=1).square().log1p())
        slope = self.beta_max - self.beta_min
        return 1 - 2 * integral / (self.beta_min + torch.sqrt(self.beta_min**2 + 2 * slope * integral))


@final
@dataclass(frozen=True)
class Cosine(Path):
    """alpha = sin(pi t / 2), sigma = cos(pi t / 2), exactly 0 at the ends.

    >>> Cosine()(1.0).sigma.item(), Cosine()(0.0).alpha.item()
    (0.0, 0.0)
    """

    def _schedule(self, t: Tensor) -> Schedule:
        quarter = math.pi / 2
        alpha, sigma = torch.sin(quarter * t), torch.sin(quarter * (1 - t))  # cos(pi/2) is 6e-17 in float64
        return Schedule(alpha, sigma, quarter * sigma, -quarter * alpha)

    def _time_at(self, h: Tensor) -> Tensor:
        return torch.atan2(torch.ones_like(h), h) / (math.pi / 2)


@final
@dataclass(frozen=True)
class VarianceExploding(Path):
    """alpha = 1, sigma geometric from sigma_max at t = 0 to sigma_min at t = 1 (in units of the data).

    >>> VarianceExploding().bandwidth_range
    (0.01, 100.0)
    """

    sigma_min: float = 0.01
    sigma_max: float = 100.0

    def __post_init__(self) -> None:
        if not 0 < self.sigma_min < self.sigma_max < math.inf:
            raise ValueError(
                "sigma_min, sigma_max: expected 0 < sigma_min < sigma_max < inf, "
                f"got {self.sigma_min}, {self.sigma_max}"
            )

    def _schedule(self, t: Tensor) -> Schedule:
        sigma = self.sigma_max ** (1 - t) * self.sigma_min**t  # exact at both ends
        return Schedule(torch.ones_like(t), sigma, torch.zeros_like(t), -self._log_ratio * sigma)

    @property
    def _log_ratio(self) -> float:
        return math.log(self.sigma_max / self.sigma_min)

    def _time_at(self, h: Tensor) -> Tensor:
        return torch.log(self.sigma_max / h) / self._log_ratio


# --- schedulers of diffusers ----------------------------------------------------------------------------------------


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


# --- the one place where time is broadcast --------------------------------------------------------------------------


def broadcast_schedule(
    path: Path, t: float | Tensor, batch_shape: Sequence[int], event_ndim: int, *, tasks: bool = False
) -> Schedule:
    """``path(t)`` shaped to multiply ``(*batch, *event)``: t is aligned with the batch, never with the event.

    t is a float, a 0-d tensor, or a tensor that broadcasts to ``batch_shape`` from the right. With ``tasks`` the batch
    is (T, n) and t is 0-d or has both axes: a time per task is (T, 1). The schedule keeps t's own batch axes and gains
    ``event_ndim`` axes of size 1; a 0-d time stays 0-d. Raises ``ValueError`` for other shapes.

    >>> broadcast_schedule(CondOT(), torch.rand(8), batch_shape=(8,), event_ndim=3).alpha.shape
    torch.Size([8, 1, 1, 1])
    """
    time = _as_time(t)
    if time.ndim == 0:
        return path(time)
    batch, shape = tuple(batch_shape), tuple(time.shape)
    fits = len(shape) == 2 if tasks else len(shape) <= len(batch)
    if not fits or any(n not in (1, size) for n, size in zip(shape[::-1], batch[::-1], strict=False)):
        raise ValueError(
            f"t: expected a float, a 0-d tensor or a tensor that broadcasts to the batch shape {batch}"
            + (" with both axes, as in (T, 1) for a time per task" if tasks else "")
            + f" and never to the event, got shape {shape}"
        )
    return path(time).expand(event_ndim)


# --- conversions ----------------------------------------------------------------------------------------------------


def convert(
    value: Float[Tensor, "*batch_event"],
    x: Float[Tensor, "*batch_event"],
    schedule: Schedule,
    *,
    source: Prediction,
    target: Prediction,
) -> Float[Tensor, "*batch_event"]:
    """A prediction at x stated in another way; computed in the schedule's float64, returned in the dtype of ``x``.

    ``schedule`` must multiply x: see :func:`broadcast_schedule`. Raises ``ValueError`` where the result does not exist:
    noise, score and velocity at sigma = 0; anything that needs D from noise or score at alpha = 0; a velocity that
    does not determine D because alpha' sigma - sigma' alpha is 0 or infinite.

    >>> x, at = torch.tensor([0.5], dtype=torch.float64), CondOT()(0.5)
    >>> convert(torch.tanh(2 * x), x, at, source="denoiser", target="velocity")
    tensor([0.5232], dtype=torch.float64)
    """
    for name, kind in (("source", source), ("target", target)):
        if kind not in get_args(Prediction):
            raise ValueError(f"{name}: expected one of {get_args(Prediction)}, got {kind!r}")
    if value.shape != x.shape:
        raise ValueError(f"value: expected the shape of x, {tuple(x.shape)}, got {tuple(value.shape)}")
    if source == target:
        return value
    _refuse_singular(schedule, source, target)
    at, work = schedule, working_dtype(x.device)
    value, wide = value.to(work), x.to(work)
    if target == "denoiser":
        result = _denoiser(value, wide, at, source)
    elif target == "noise":
        result = _noise(value, wide, at, source)
    elif target == "score":
        result = -_noise(value, wide, at, source) / at.sigma
    else:
        result = at.d_alpha * _denoiser(value, wide, at, source) + at.d_sigma * _noise(value, wide, at, source)
    return result.to(x.dtype)


def to_denoiser(value: Tensor, x: Tensor, schedule: Schedule, kind: Prediction) -> Tensor:
    """D = E[X_1 | X_t = x] from a prediction of the given kind; see :func:`convert`."""
    return convert(value, x, schedule, source=kind, target="denoiser")


def from_denoiser(denoiser: Tensor, x: Tensor, schedule: Schedule, kind: Prediction) -> Tensor:
    """The given kind of prediction from D = E[X_1 | X_t = x]; see :func:`convert`."""
    return convert(denoiser, x, schedule, source="denoiser", target=kind)


def _determinant(at: Schedule) -> Tensor:
    return at.d_alpha * at.sigma - at.d_sigma * at.alpha


def _denoiser(value: Tensor, x: Tensor, at: Schedule, source: Prediction) -> Tensor:
    if source == "noise":
        return (x - at.sigma * value) / at.alpha
    if source == "score":
        return (x + at.sigma.square() * value) / at.alpha
    if source == "velocity":
        return (at.sigma * value - at.d_sigma * x) / _determinant(at)
    return value


def _noise(value: Tensor, x: Tensor, at: Schedule, source: Prediction) -> Tensor:
    if source == "denoiser":
        return (x - at.alpha * value) / at.sigma
    if source == "score":
        return -at.sigma * value
    if source == "velocity":
        return (at.d_alpha * x - at.alpha * value) / _determinant(at)
    return value


def _refuse_singular(at: Schedule, source: Prediction, target: Prediction) -> None:
    def anywhere(condition: Tensor) -> bool:
        return not is_vmapped(condition) and bool(condition.any())

    if target != "denoiser" and anywhere(at.sigma == 0):
        raise ValueError(f"schedule: the {target} does not exist at sigma = 0; evaluate before t = 1")
    if target in ("denoiser", "velocity") and source in ("noise", "score") and anywhere(at.alpha == 0):
        raise ValueError(f"schedule: the {source} says nothing of the {target} at alpha = 0; evaluate after t = 0")
    if source == "velocity":
        determinant = _determinant(at)
        if anywhere((determinant == 0) | ~determinant.isfinite()):
            raise ValueError(
                f"schedule: the velocity does not determine the {target} where alpha' sigma - sigma' alpha is 0 or "
                "infinite"
            )


def reverse_time(
    field: Callable[[Tensor, Any], Tensor], kind: Prediction = "velocity"
) -> Callable[[Tensor, Any], Tensor]:
    """A field in the other time direction, s = 1 - t: many code bases have s = 1 as noise and s = 0 as data.

    The time is flipped, and a velocity changes its sign (dx/ds = -dx/dt); denoiser, noise and score do not.
    Applied twice it gives the field back.

    >>> towards_noise = lambda x, s: x / s
    >>> reverse_time(towards_noise)(torch.tensor([1.0]), 0.75)
    tensor([-4.])
    """
    if kind not in get_args(Prediction):
        raise ValueError(f"kind: expected one of {get_args(Prediction)}, got {kind!r}")
    sign = -1 if kind == "velocity" else 1

    def reversed_field(x: Tensor, t: Any) -> Tensor:
        return sign * field(x, 1 - t)

    return reversed_field
