r"""What every Gaussian path shares: alpha, sigma and their derivatives as one value, and times that fit a batch.

X_t = alpha_t X_1 + sigma_t X_0 with **t = 0 noise and t = 1 data**; h = sigma / alpha is the bandwidth and
2 log(alpha / sigma) the log-SNR. Times are checked and cast to float64 here, and broadcast here alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, final, overload

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["Path", "Schedule", "broadcast_schedule", "is_vmapped", "working_dtype"]


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
    if isinstance(t, float) and 0.0 <= t <= 1.0:  # what samplers ask at every step: no tensor operations
        return torch.tensor(t + 0.0, dtype=torch.float64)
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


@final
@dataclass(frozen=True, eq=False)
class Schedule:
    """alpha, sigma and their derivatives with respect to t, all of one shape and device.

    >>> from nwflow.paths import CondOT
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

        >>> from nwflow.paths import CondOT
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

        >>> from nwflow.paths import CondOT, Cosine, VarianceExploding
        >>> CondOT().time_at(1.0), Cosine().time_at(float("inf")), VarianceExploding(0.01, 100.0).time_at(1.0)
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


def broadcast_schedule(
    path: Path, t: float | Tensor, batch_shape: Sequence[int], event_ndim: int, *, tasks: bool = False
) -> Schedule:
    """``path(t)`` shaped to multiply ``(*batch, *event)``: t is aligned with the batch, never with the event.

    t is a float, a 0-d tensor, or a tensor that broadcasts to ``batch_shape`` from the right. With ``tasks`` the batch
    is (T, n) and t is 0-d or has both axes: a time per task is (T, 1). The schedule keeps t's own batch axes and gains
    ``event_ndim`` axes of size 1; a 0-d time stays 0-d. Raises ``ValueError`` for other shapes.

    >>> from nwflow.paths import CondOT
    >>> broadcast_schedule(CondOT(), torch.rand(8), batch_shape=(8,), event_ndim=3).alpha.shape
    torch.Size([8, 1, 1, 1])
    """
    time = _as_time(t)
    if time.ndim == 0:
        return path._schedule(time)
    batch, shape = tuple(batch_shape), tuple(time.shape)
    fits = len(shape) == 2 if tasks else len(shape) <= len(batch)
    if not fits or any(n not in (1, size) for n, size in zip(shape[::-1], batch[::-1], strict=False)):
        raise ValueError(
            f"t: expected a float, a 0-d tensor or a tensor that broadcasts to the batch shape {batch}"
            + (" with both axes, as in (T, 1) for a time per task" if tasks else "")
            + f" and never to the event, got shape {shape}"
        )
    return path._schedule(time).expand(event_ndim)
