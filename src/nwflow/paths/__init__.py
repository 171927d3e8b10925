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

from nwflow.paths.conversions import Prediction, convert, from_denoiser, reverse_time, to_denoiser
from nwflow.paths.discrete import DiscretePath, from_diffusers
from nwflow.paths.gaussian import CondOT, Cosine, VarianceExploding, VariancePreserving
from nwflow.paths.schedule import Path, Schedule, broadcast_schedule, is_vmapped, working_dtype

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
