r"""The continuous Gaussian paths; t = 0 is noise, t = 1 is data, and h = sigma / alpha decreases.

    CondOT               alpha = t                sigma = (1 - t) + sigma_min t
    VariancePreserving   alpha = exp(-B/2)        sigma = sqrt(1 - exp(-B)),  s = 1 - t,
                         B = beta_min s + (beta_max - beta_min) s^2 / 2
    Cosine               alpha = sin(pi t / 2)    sigma = cos(pi t / 2)
    VarianceExploding    alpha = 1                sigma = sigma_max^(1-t) sigma_min^t

References: Lipman et al. 2023 (arXiv 2210.02747), Song et al. 2021 (arXiv 2011.13456), Albergo & Vanden-Eijnden
2023 (arXiv 2209.15571; the trigonometric path).
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from nwflow.paths.schedule import Path, Schedule

__all__ = ["CondOT", "Cosine", "VarianceExploding", "VariancePreserving"]


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
