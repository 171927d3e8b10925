"""Remedies by name: what ``nwflow sample --remedy`` and a diagnosis call them, fitted to a whole support.

Time runs from t = 0, noise, to t = 1, data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwflow.diagnose import remedies
from nwflow.paths import Path
from nwflow.subspace import SubspaceField
from nwflow.support import Support

TEXTS = {
    "smoothing-isotropic": "Every reference becomes a round Gaussian; the bandwidth cannot fall below its width.",
    "smoothing-diagonal": "Every reference becomes a Gaussian with a width of its own in each column.",
    "smoothing-low-rank": "Every reference becomes a Gaussian along the leading principal directions.",
    "smoothing-full": "Every reference becomes a Gaussian with the shrunk covariance of the data.",
    "silverman": "Isotropic smoothing by Silverman's rule, for comparison.",
    "scott": "Isotropic smoothing by Scott's rule, for comparison.",
    "metric-diagonal": "Distances and the path's noise take the scale of each column.",
    "metric-low-rank": "Distances and the path's noise take the shape of the leading principal directions.",
    "metric-full": "Distances and the path's noise take the shrunk covariance of the data.",
    "metric-within-class": "Distances and the path's noise take the covariance within classes.",
    "subspace-1": "Every principal direction is smoothed by itself: samples recombine directions of references.",
    "subspace-4": "Blocks of four principal directions are smoothed by themselves and recombined.",
    "subspace-16": "Blocks of sixteen principal directions are smoothed by themselves and recombined.",
    "subspace-64": "Blocks of 64 principal directions are smoothed by themselves and recombined.",
    "patches-5": "Every pixel is smoothed by the 5 x 5 patch around it: samples recombine parts of references.",
    "pool": "Mean and covariance are shrunk between the class and a labelled pool of other classes.",
}
REMEDIES = tuple(TEXTS)


@dataclass(frozen=True)
class Fitted:
    """A remedy fitted to a support: ``field`` gives its field of that support (or of another of the same shape)."""

    name: str
    settings: dict[str, Any]
    make: Callable[[Support, Path | None, float | None], Any]

    def field(self, support: Support, path: Path | None = None, accuracy: float | None = 1e-5) -> Any:
        return self.make(support, path, accuracy)


def rows_of(support: Support) -> Tensor:
    """Points that count, ``(n, d)`` float64."""
    if support.is_batch:
        raise ValueError(f"support: expected one set of references, got {support.n_tasks} tasks; give one at a time")
    x = support.points[support.valid].detach()
    return x.reshape(len(x), -1).double()


def classes_of(support: Support) -> list[Tensor]:
    """Rows of every label."""
    if support.labels is None:
        raise ValueError("pool: expected a labelled support, got one without labels")
    x, labels = rows_of(support), support.labels[support.valid]
    return [x[labels == v] for v in labels.unique()]


def equal_ids(x: Tensor) -> Tensor:
    """Ids of equal rows, ``(n,)``."""
    return torch.unique(x, dim=0, return_inverse=True)[1]


def fit_remedy(name: str, support: Support, pool: Support | None = None) -> Fitted:
    """Fit one of REMEDIES to a support.

    Args:
        support: one set of references. pool: a labelled support of other classes, for ``pool`` and
            ``metric-within-class`` (a labelled ``support`` is its own pool for the latter).

    Raises:
        ValueError: an unknown name; a remedy that needs a pool, images, or points that differ.

    Example:
        >>> from nwflow import Support, sample
        >>> points = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> remedy = fit_remedy("smoothing-full", Support(points))
        >>> sample(remedy.field(Support(points)), 5, steps=10).points.shape
        torch.Size([5, 3])
    """
    if name not in TEXTS:
        raise ValueError(f"name: expected one of {', '.join(REMEDIES)}, got {name!r}")
    x = rows_of(support)
    family, _, kind = name.partition("-")
    kind = kind.replace("-", "_")
    if family == "smoothing":
        return _of(name, remedies.smoothing(x, kind, equal=equal_ids(x)))
    if family in ("silverman", "scott"):
        return _of(name, remedies.rule_of_thumb(x, family))
    if name == "metric-within-class":
        if pool is None and support.labels is None:
            raise ValueError("pool: expected a labelled pool for metric-within-class, got none")
        within = remedies.fit_pool(classes_of(support if pool is None else pool)).within
        return _of(name, remedies.metric(x, kind, within))
    if family == "metric":
        return _of(name, remedies.metric(x, kind))
    if family == "pool":
        if pool is None:
            raise ValueError("pool: expected a labelled pool of other classes, got none")
        classes = [*classes_of(pool), x]
        info = remedies.fit_pool(classes, without=len(classes) - 1)
        return _of(name, remedies.pool(x, info, equal_ids(x)))
    size = int(kind)
    if family == "patches":
        return Fitted(name, {"size": size}, lambda s, p, _a: SubspaceField.patches(s, p, size=size))
    return Fitted(name, {"block": size}, lambda s, p, a: SubspaceField.pca(s, p, block=min(size, s.d), accuracy=a))


def _of(name: str, fitted: Any) -> Fitted:
    return Fitted(name, fitted.settings, fitted.field)
