r"""Gaussian mixtures with their exact denoiser.

A task has K ~ U{2..8} equally likely components N(mu_k, S_k): mu_k ~ N(0, a^2 I) with a = 5, and
S_k = c^2 A A^T / d with A a d x d matrix of standard normal entries and c = 1, so that E S_k = c^2 I while one
covariance is far from isotropic (its eigenvalues spread over two to three decades). On a path X_t = alpha X_1 + sigma
X_0 from noise (t = 0) to data (t = 1)

.. math::
    E[X_1 | X_t = x] = \sum_k r_k \bigl(\mu_k + \alpha S_k P_k (x - \alpha \mu_k)\bigr), \qquad
    P_k = (\alpha^2 S_k + \sigma^2 I)^{-1}, \qquad r_k \propto \mathcal N(x; \alpha \mu_k, P_k^{-1}),

computed in the eigenbasis of each S_k, in float64 where the device has it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from nwflow.paths import Path
from nwflow.paths.schedule import broadcast_schedule, working_dtype
from nwflow.tasks.family import (
    Drawn,
    Family,
    check_dim,
    check_range,
    check_scales,
    draw_components,
    draw_counts,
)


@dataclass(frozen=True)
class GaussianMixtures(Family):
    """Mixtures of anisotropic Gaussians; their posterior mean is known.

    Args:
        dim: coordinates of a point.
        min_components, max_components: components of a task, each number equally likely.
        mean_scale: standard deviation of each coordinate of a mean, in data units.
        covariance_scale: root mean square standard deviation of a component, in data units.
    """

    dim: int = 8
    min_components: int = 2
    max_components: int = 8
    mean_scale: float = 5.0
    covariance_scale: float = 1.0

    name: ClassVar[str] = "gaussian_mixtures"

    def __post_init__(self) -> None:
        check_dim(self.dim, 1, self.name)
        check_range(self.min_components, self.max_components, "components")
        check_scales(self, "mean_scale", "covariance_scale")

    @property
    def event_shape(self) -> tuple[int, ...]:
        return (self.dim,)

    def draw(self, n_tasks: int, count: int, generator: torch.Generator, dtype: torch.dtype) -> Drawn:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)

        k, d = self.max_components, self.dim
        counts = draw_counts(self.min_components, k, n_tasks, generator)
        means = self.mean_scale * randn(n_tasks, k, d)
        factors = self.covariance_scale * d**-0.5 * randn(n_tasks, k, d, d)
        component = draw_components(counts, count, generator)[:, None, :, None]
        points = means[:, :, None] + randn(n_tasks, 1, count, d) @ factors.mT  # (T, K, count, d): every component's
        points = points.gather(1, component.expand(-1, 1, -1, d)).squeeze(1)
        return Drawn(points, Mixture(means, factors, counts))


@dataclass(frozen=True, eq=False)
class Mixture:
    """T mixtures: ``means`` ``(T, K, d)``, ``factors`` A of the covariances A A^T ``(T, K, d, d)``, ``counts`` ``(T,)``
    of components that are real (the first of each task), equally likely."""

    means: Float[Tensor, "T K d"]
    factors: Float[Tensor, "T K d d"]
    counts: Tensor

    def denoise(self, x: Tensor, t: float | Tensor, path: Path) -> Tensor:
        if x.ndim != 3 or x.shape[0] != len(self.means) or x.shape[2] != self.means.shape[2]:
            shape = (len(self.means), "n", self.means.shape[2])
            raise ValueError(f"x: expected shape {shape}, got {tuple(x.shape)}")
        wide = working_dtype(x.device)
        at = broadcast_schedule(path, t, x.shape[:2], 1, tasks=True)
        alpha, sigma = (v.to(x.device, wide) for v in (at.alpha, at.sigma))
        if alpha.ndim:  # (T|1, n|1, 1): an axis for the components
            alpha, sigma = alpha[:, None], sigma[:, None]
        means = self.means.to(wide)[:, :, None]
        axes, roots, _ = torch.linalg.svd(self.factors.to(wide))  # S = U diag(roots^2) U^T
        variances = roots.square()[:, :, None]
        y = (x.to(wide)[:, None] - alpha * means) @ axes  # (T, K, n, d), in the eigenbasis of each component
        total = alpha.square() * variances + sigma.square()
        logits = -0.5 * (y.square() / total + total.log()).sum(-1)
        absent = torch.arange(means.shape[1], device=x.device) >= self.counts[:, None]
        r = torch.softmax(logits.masked_fill(absent[..., None], -torch.inf), dim=1)[..., None]
        posterior = means + (alpha * variances / total * y) @ axes.mT
        return (r * posterior).sum(1).to(x.dtype)

    def select(self, index: Tensor) -> Mixture:
        return replace(self, means=self.means[index], factors=self.factors[index], counts=self.counts[index])

    def to(self, device: Any) -> Mixture:
        return Mixture(self.means.to(device), self.factors.to(device), self.counts.to(device))
