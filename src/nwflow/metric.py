r"""Metrics and smoothing covariances.

A metric M (positive definite) replaces |x - alpha s|^2 by (x - alpha s)^T M (x - alpha s): it is the exact field of the
path X_t = alpha X_1 + sigma X_0 whose noise is X_0 ~ N(0, M^-1) (t = 0 noise, t = 1 data). With M = W^T W distances
are Euclidean after W, and W^-1 colours standard normal noise. A smoothing covariance Sigma (positive semi-definite)
replaces every point s_i by N(s_i, Sigma).

Shapes: everything acts on the last axis, ``(..., d)``, of flattened events. References: Smola 2026, arXiv 2605.13386
(anisotropic realisation); Ledoit and Wolf 2004 (shrinkage); Tipping and Bishop 1999 (low-rank covariance).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nwflow.paths import working_dtype


def _exact(value: Any) -> Tensor:
    """A tensor in the working dtype; Python numbers are float64, tensors and arrays are taken as given."""
    v = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    return v.to(working_dtype(v.device))


def _matrix(value: Any, name: str) -> Tensor:
    m = _exact(value)
    if m.ndim != 2 or m.shape[0] != m.shape[1]:
        raise ValueError(f"{name}: expected a square matrix (d, d), got shape {tuple(m.shape)}")
    if not torch.isfinite(m).all():
        raise ValueError(f"{name}: expected finite numbers, got NaN or infinity")
    if not torch.allclose(m, m.mT, rtol=1e-5, atol=1e-8 * float(m.abs().max())):
        raise ValueError(
            f"{name}: expected a symmetric matrix, got an asymmetry of {float((m - m.mT).abs().max()):.3g}"
        )
    return 0.5 * (m + m.mT)


def _vector(value: Any, name: str, least: float, inclusive: bool) -> Tensor:
    v = _exact(value).reshape(-1)
    bad = ~torch.isfinite(v) | ((v < least) if inclusive else (v <= least))
    if v.numel() == 0 or bool(bad.any()):
        kind = "non-negative" if inclusive else "positive"
        found = f"{float(v[bad][0])} at index {int(bad.nonzero()[0])}" if v.numel() else "nothing"
        raise ValueError(f"{name}: expected finite {kind} numbers, got {found}")
    return v


def _factor(value: Any, diagonal: Tensor, name: str) -> Tensor:
    f = _exact(value)
    if f.ndim != 2 or f.shape[0] != diagonal.numel() or not bool(torch.isfinite(f).all()):
        raise ValueError(f"{name}: expected a finite matrix ({diagonal.numel()}, rank), got shape {tuple(f.shape)}")
    return f


class Metric(nn.Module):
    """Positive-definite M on flattened events; abstract. ``M = W^T W`` with W one of its roots.

    ``d`` is the event dimension it fits (None fits any), ``scale`` the diagonal of W where W is diagonal.
    """

    d: int | None = None

    @property
    def scale(self) -> Tensor | None:
        """Diagonal of W, ``(d,)`` or ``(1,)``, or None where W is not diagonal."""
        return None

    def whiten(self, x: Tensor) -> Tensor:
        """W x, ``(..., d)``."""
        raise TypeError(f"{type(self).__name__} is abstract: use IsotropicMetric, DiagonalMetric, FullMetric, ...")

    def unwhiten(self, z: Tensor) -> Tensor:
        """W^-1 z, ``(..., d)``; for standard normal z it has the covariance M^-1 of the path's noise."""
        raise TypeError(f"{type(self).__name__} is abstract")

    def pull(self, g: Tensor) -> Tensor:
        """W^T g, ``(..., d)``: gradients with respect to z as gradients with respect to x."""
        raise TypeError(f"{type(self).__name__} is abstract")

    def log_det(self, d: int) -> Tensor:
        """log det W = 1/2 log det M in ``d`` dimensions, 0-d."""
        raise TypeError(f"{type(self).__name__} is abstract")

    def matrix(self, d: int) -> Tensor:
        """M, ``(d, d)``, float64 where the device has it."""
        eye = torch.eye(d, dtype=next(self.buffers()).dtype, device=next(self.buffers()).device)
        return self.pull(self.whiten(eye)).mT


class DiagonalMetric(Metric):
    """M = diag(precision), ``precision`` ``(*event,)`` positive: one bandwidth per coordinate.

    Example:
        >>> DiagonalMetric([0.25, 4.0]).whiten(torch.tensor([2.0, 0.5], dtype=torch.float64))
        tensor([1., 1.], dtype=torch.float64)
    """

    precision: Tensor

    def __init__(self, precision: Any) -> None:
        super().__init__()
        self.register_buffer("precision", _vector(precision, "precision", 0.0, inclusive=False))
        self.d = self.precision.numel()

    @classmethod
    def fit(cls, support: Any, floor: float = 1e-3) -> DiagonalMetric:
        """Inverse variances of a support's columns; standard deviations below ``floor`` times the largest are raised to
        that (constant columns have none of their own)."""
        x, w = _moments_input(support)
        var = (w * (x - (w * x).sum(0)).square()).sum(0)
        return cls(1.0 / var.clamp(min=_least(var, floor)))

    @property
    def scale(self) -> Tensor:
        return self.precision.sqrt()

    def whiten(self, x: Tensor) -> Tensor:
        return x * self.scale.to(x)

    def unwhiten(self, z: Tensor) -> Tensor:
        return z / self.scale.to(z)

    def pull(self, g: Tensor) -> Tensor:
        return g * self.scale.to(g)

    def log_det(self, d: int) -> Tensor:
        return 0.5 * self.precision.log().expand(d).sum()

    def extra_repr(self) -> str:
        return f"d={self.d}"


class IsotropicMetric(DiagonalMetric):
    """M = precision I in any dimension: the plain field at bandwidth h / sqrt(precision)."""

    def __init__(self, precision: float = 1.0) -> None:
        super().__init__([precision])
        self.d = None

    @classmethod
    def fit(cls, support: Any, floor: float = 0.0) -> IsotropicMetric:
        """The inverse of the mean variance tr Cov / d."""
        x, w = _moments_input(support)
        var = float((w * (x - (w * x).sum(0)).square()).sum(0).mean())
        if var == 0.0:
            raise ValueError("support: expected points that differ, got zero variance")
        return cls(1.0 / var)


class FullMetric(Metric):
    """M = ``matrix`` ``(d, d)``, symmetric positive definite.

    Raises:
        ValueError: M is not symmetric, or not positive definite to working precision: a rank-deficient metric has no
            density of noise. Use :class:`LowRankMetric` (low rank + diagonal) for few directions.
    """

    root: Tensor
    inverse_root: Tensor

    def __init__(self, matrix: Any) -> None:
        super().__init__()
        m = _matrix(matrix, "matrix")
        values, vectors = torch.linalg.eigh(m)
        self.d = m.shape[0]
        if not float(values[0]) > self.d * torch.finfo(m.dtype).eps * float(values[-1].clamp(min=0.0)):
            raise ValueError(
                f"matrix: expected a positive definite metric, got eigenvalues from {float(values[0]):.3g} to "
                f"{float(values[-1]):.3g}; for few directions use LowRankMetric (low rank + diagonal)"
            )
        self.register_buffer("root", (vectors * values.sqrt()).mT.contiguous())
        self.register_buffer("inverse_root", (vectors / values.sqrt()).contiguous())

    @classmethod
    def fit(cls, support: Any, shrinkage: float | str = "ledoit_wolf") -> FullMetric:
        """Inverse of the Ledoit-Wolf shrunk covariance (or of a given shrinkage in (0, 1] towards the isotropic)."""
        return cls(torch.linalg.inv(shrunk_covariance(support, shrinkage)))

    def whiten(self, x: Tensor) -> Tensor:
        return x @ self.root.mT.to(x)

    def unwhiten(self, z: Tensor) -> Tensor:
        return z @ self.inverse_root.mT.to(z)

    def pull(self, g: Tensor) -> Tensor:
        return g @ self.root.to(g)

    def log_det(self, d: int) -> Tensor:
        return torch.linalg.slogdet(self.root).logabsdet

    def extra_repr(self) -> str:
        return f"d={self.d}"


class LowRankMetric(Metric):
    """Low rank + diagonal, at O(d r) a query: ``of="precision"`` M = diag(diagonal) + F F^T, or ``of="covariance"``
    M^-1 = diag(diagonal) + F F^T; ``diagonal`` ``(d,)`` positive, ``factor`` F ``(d, r)``."""

    outer: Tensor
    directions: Tensor
    gain: Tensor

    def __init__(self, diagonal: Any, factor: Any, of: str = "precision") -> None:
        super().__init__()
        if of not in ("precision", "covariance"):
            raise ValueError(f'of: expected "precision" or "covariance", got {of!r}')
        a = _vector(diagonal, "diagonal", 0.0, inclusive=False)
        f = _factor(factor, a, "factor")
        u, s, _ = torch.linalg.svd(f / a.sqrt()[:, None], full_matrices=False)
        grown = (1.0 + s.square()).sqrt()  # symmetric root of I + V s^2 V^T along V
        self.d, self.of = a.numel(), of
        self.register_buffer("outer", a.sqrt() if of == "precision" else a.rsqrt())
        self.register_buffer("directions", u.contiguous())
        self.register_buffer("gain", grown if of == "precision" else 1.0 / grown)

    @classmethod
    def fit(cls, support: Any, rank: int) -> LowRankMetric:
        """Maximum-likelihood low rank + isotropic covariance (probabilistic PCA) of a support, inverted."""
        x, w = _moments_input(support)
        d = x.shape[1]
        if not 1 <= rank < d:
            raise ValueError(f"rank: expected 1 <= rank < d = {d}, got {rank}")
        _, s, vh = torch.linalg.svd((x - (w * x).sum(0)) * w.sqrt(), full_matrices=False)
        values = s.square()
        rest = float(values[rank:].sum()) / (d - rank)
        least = d * torch.finfo(x.dtype).eps * float(values[0])
        if rest <= least:
            spans = int((values > least).sum())
            raise ValueError(f"rank: expected less than the {spans} directions that the support spans, got {rank}")
        f = vh[:rank].mT * (values[:rank] - rest).clamp(min=0.0).sqrt()
        return cls(torch.full((d,), rest, dtype=x.dtype), f, of="covariance")

    def _stretch(self, x: Tensor, gain: Tensor) -> Tensor:
        v = self.directions.to(x)
        return x + ((x @ v) * (gain.to(x) - 1.0)) @ v.mT

    def whiten(self, x: Tensor) -> Tensor:
        return self._stretch(x * self.outer.to(x), self.gain)

    def unwhiten(self, z: Tensor) -> Tensor:
        return self._stretch(z, 1.0 / self.gain) / self.outer.to(z)

    def pull(self, g: Tensor) -> Tensor:
        return self._stretch(g, self.gain) * self.outer.to(g)

    def log_det(self, d: int) -> Tensor:
        return self.outer.log().sum() + self.gain.log().sum()

    def extra_repr(self) -> str:
        return f"d={self.d}, rank={self.gain.numel()}, of={self.of!r}"


class Smoothing(nn.Module):
    """Covariance Sigma of the Gaussian that replaces every point; made by the four constructors below.

    ``variances`` is ``(1,)`` or ``(d,)`` where Sigma is diagonal, else None; ``matrix(d)`` is always dense.

    Example:
        >>> Smoothing.isotropic(0.5).variances
        tensor([0.2500], dtype=torch.float64)
    """

    variances: Tensor | None
    dense: Tensor | None

    def __init__(self, variances: Tensor | None, dense: Tensor | None, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("variances", variances)
        self.register_buffer("dense", dense)
        self.d = None if kind == "isotropic" else (variances if variances is not None else dense).shape[0]  # type: ignore[union-attr]

    @classmethod
    def isotropic(cls, h0: float) -> Smoothing:
        """Sigma = h0^2 I; ``h0`` a standard deviation in data units, >= 0."""
        return cls(_vector([h0], "h0", 0.0, inclusive=True).square(), None, "isotropic")

    @classmethod
    def diagonal(cls, variances: Any) -> Smoothing:
        """Sigma = diag(variances), ``(*event,)``, >= 0."""
        return cls(_vector(variances, "variances", 0.0, inclusive=True), None, "diagonal")

    @classmethod
    def low_rank(cls, diagonal: Any, factor: Any) -> Smoothing:
        """Sigma = diag(diagonal) + F F^T, ``diagonal`` ``(d,)`` >= 0, ``factor`` ``(d, r)``."""
        a = _vector(diagonal, "diagonal", 0.0, inclusive=True)
        f = _factor(factor, a, "factor")
        return cls(None, torch.diag(a) + f @ f.mT, "low_rank")

    @classmethod
    def full(cls, covariance: Any) -> Smoothing:
        """Sigma = covariance ``(d, d)``, symmetric positive semi-definite."""
        c = _matrix(covariance, "covariance")
        values = torch.linalg.eigvalsh(c)
        if float(values[0]) < -1e-8 * float(values[-1].abs()):
            raise ValueError(
                f"covariance: expected a positive semi-definite matrix, got eigenvalue {float(values[0]):.3g}"
            )
        return cls(None, c, "full")

    def matrix(self, d: int) -> Tensor:
        """Sigma, ``(d, d)``."""
        if self.dense is not None:
            return self.dense
        assert self.variances is not None
        return torch.diag(self.variances.expand(d))

    def extra_repr(self) -> str:
        return f"{self.kind}" + ("" if self.d is None else f", d={self.d}")


def as_smoothing(value: Any) -> Smoothing | None:
    """None, a :class:`Smoothing`, or a number h0 (isotropic standard deviation)."""
    if value is None or isinstance(value, Smoothing):
        return value
    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0):
        return Smoothing.isotropic(float(value))
    raise TypeError(
        f"smoothing: expected None, a number h0 or a Smoothing (isotropic, diagonal, low_rank, full), "
        f"got {type(value).__name__}"
    )


def _moments_input(support: Any) -> tuple[Tensor, Tensor]:
    """Rows ``(n, d)`` in float64 and their weights ``(n, 1)`` from a support or a tensor; tasks are pooled."""
    if hasattr(support, "points"):
        keep = support.valid
        x, w = support.points[keep].detach(), support.weights[keep].detach()
    else:
        x = _exact(support)
        w = torch.ones(x.shape[0], device=x.device)
    wide = working_dtype(x.device)
    x, w = x.to(wide).flatten(1) if x.ndim > 1 else x.to(wide)[:, None], w.to(wide)
    if x.shape[0] < 2:
        raise ValueError(f"support: expected at least 2 points to fit a metric, got {x.shape[0]}")
    return x, (w / w.sum())[:, None]


def _least(var: Tensor, floor: float) -> float:
    if not floor > 0:
        raise ValueError(f"floor: expected a positive share of the largest standard deviation, got {floor}")
    least = float(var.max()) * floor**2
    if least == 0.0:
        raise ValueError("support: expected points that differ, got zero variance in every column")
    return least


def shrunk_covariance(support: Any, shrinkage: float | str = "ledoit_wolf") -> Tensor:
    """Covariance ``(d, d)`` shrunk towards its mean variance, by Ledoit and Wolf's optimum or a given share."""
    from sklearn.covariance import ledoit_wolf

    x, w = _moments_input(support)
    x = x - (w * x).sum(0)
    cov = (x * w).mT @ x
    if shrinkage == "ledoit_wolf":
        shrinkage = float(ledoit_wolf(x.cpu().numpy(), assume_centered=True)[1])
    if isinstance(shrinkage, str) or not 0.0 <= shrinkage <= 1.0:
        raise ValueError(f'shrinkage: expected "ledoit_wolf" or a share in [0, 1], got {shrinkage!r}')
    mean = cov.diagonal().mean()
    return (1.0 - shrinkage) * cov + shrinkage * mean * torch.eye(cov.shape[0], dtype=cov.dtype, device=cov.device)
