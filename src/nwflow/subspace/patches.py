r"""Heads that see patches of an image: every pixel is a weighted mean of the same pixel of the references.

At pixel a with the patch V_a around it (all channels) and v = sigma^2 + alpha^2 h0^2 (t = 0 noise, t = 1 data)

    l_i^a = log pi_i - |x[V_a] - alpha s_i[V_a]|^2 / (2 v),     w^a = softmax(l^a),     m[a] = sum_i w_i^a s_i[a]
    D = m + (alpha h0^2 / v)(x - alpha m)      eps = (sigma / v)(x - alpha m)      u = alpha' D + sigma' eps

and the score is -(x - alpha m) / v. With h0 = 0, the default, m = D. Where patches overlap, no density has this
gradient: dD[a]/dx[b] and dD[b]/dx[a] have different weights. One patch that covers the image is
:class:`~nwflow.NWField`, one pixel a product of one-dimensional smoothers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from nwflow._moments import Attribution
from nwflow.kernel.autograd import eager, stamp
from nwflow.paths import Path, Schedule, broadcast_schedule, working_dtype
from nwflow.subspace.base import CHUNK, SubspaceField, at_least_one, isotropic, joined, largest
from nwflow.subspace.windows import Heads, Mean, weights
from nwflow.support import Support

NO_DENSITY = (
    "a field of patches has no {}: overlapping heads are in general the gradient of no density; "
    "use SubspaceField.columns or SubspaceField.pca, whose blocks are independent"
)


class PatchField(SubspaceField):
    """One head for each pixel of an image, weighted by the patch around it; see :meth:`SubspaceField.patches`.

    ``n_eff`` is ``(*batch, H, W)`` (divided by ``stride``). Weights are formed in float64 and correct to 1e-8 in total
    variation down to bandwidths of 1e-3 data scales. Derivatives of first order exist in ``x`` and ``t``. At sigma = 0
    all quantities raise unless smoothed. Memory: below 256 MiB beyond inputs and outputs.
    """

    window: Tensor
    cell: Tensor
    inverse: Tensor

    def __init__(
        self,
        support: Support | Any,
        path: Path | None = None,
        *,
        size: int = 5,
        boundary: str = "wrap",
        stride: int = 1,
        smoothing: Any = None,
    ) -> None:
        super().__init__(support, path, isotropic(smoothing))
        if self.is_batch:
            raise ValueError("support: expected one set of images, got tasks; make a field of each support.task(i)")
        if len(self.event_shape) not in (2, 3):
            raise ValueError(f"support: expected images (H, W) or (C, H, W), got events {self.event_shape}")
        self.size, self.boundary, self.stride = size, boundary, stride
        window, cell, self.grid = windows(self.event_shape, size, stride, boundary)
        device = self.points.device
        self.register_buffer("window", window.to(device))
        self.register_buffer("cell", cell.to(device))
        self.register_buffer("inverse", torch.argsort(self.cell.reshape(-1)))
        self._made: tuple[Any, Heads] | None = None

    def extra_repr(self) -> str:
        return (
            f"heads {self.grid} of {self.size} x {self.size} pixels, boundary={self.boundary}, "
            f"{self.m} references, {self.path!r}"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}

    def given(self, labels: Iterable[Any]) -> PatchField:
        """The field of the part of the support with these labels, prior weights renormalised."""
        return PatchField(
            self.support.given(labels), self.path, size=self.size, boundary=self.boundary, stride=self.stride,
            smoothing=copy.copy(self.smoothing),
        )  # fmt: skip

    def n_eff(self, x: Tensor, t: float | Tensor) -> Tensor:
        """Effective number of references of each head, ``(*batch, H, W)`` divided by ``stride``, from 1 to m."""
        batch = self._batch(x)
        with torch.no_grad():
            y, b, _, _, _ = self._natural(x, t, batch)
            n_eff = Mean.apply(y, b, self._heads())[2]
        return n_eff.mT.reshape(*batch, *self.grid).to(torch.promote_types(x.dtype, torch.float32))

    def log_density(self, x: Tensor, t: float | Tensor) -> NoReturn:
        """Does not exist: raises TypeError."""
        raise TypeError(f"log_density: {NO_DENSITY.format('density')}")

    def divergence(self, x: Tensor, t: float | Tensor) -> NoReturn:
        """Raises TypeError: it would be of no use without a density."""
        raise TypeError(f"divergence: {NO_DENSITY.format('density for it to change')}")

    velocity_and_divergence = divergence

    @eager
    def _vector(self, x: Tensor, t: float | Tensor, name: str) -> Tensor:
        batch = self._batch(x)
        y, b, z, at, v = self._natural(x, t, batch)
        mean = Mean.apply(y, b, self._heads())[0]  # (A, n, V)
        local = mean.transpose(0, 1).flatten(1).index_select(1, self.inverse)
        residual, spread = z - at.alpha * local, self._spread()
        if name == "score":
            out = -residual / v
        else:
            denoised = self._heads().centre + local + at.alpha * spread / v * residual
            eps = at.sigma / v * residual
            out = {"denoiser": denoised, "noise": eps, "velocity": at.d_alpha * denoised + at.d_sigma * eps}[name]
        return out.reshape(x.shape).to(x.dtype)

    @torch.no_grad()
    def weights(self, x: Tensor, t: float | Tensor) -> Tensor:
        """The weights of every head, ``(*batch, H, W, m)`` with H and W divided by ``stride``: n H W m numbers."""
        batch = self._batch(x)
        y, b, _, _, _ = self._natural(x, t, batch)
        h = self._heads()
        lse, slots = Mean.apply(y, b, h)[1], self._slots()
        out = y.new_zeros(len(h.cell), len(y), self.m)
        for block, w in weights(h, y, b, lse):
            out[block.heads, :, slots[block.points]] = w
        out = out.transpose(0, 1).reshape(*batch, *self.grid, self.m)
        return out.to(torch.promote_types(x.dtype, torch.float32))

    @torch.no_grad()
    def attribute(self, x: Tensor, t: float | Tensor, k: int = 10) -> Attribution:
        """The ``k`` references that make the largest share of D: weights averaged over pixels."""
        k, batch = at_least_one(k), self._batch(x)
        y, b, _, _, _ = self._natural(x, t, batch)
        h, parts = self._heads(), []
        rows = self.support.rows[self._slots()]
        step = max(1, CHUNK // len(rows))
        for i in range(0, len(y), step):
            some, own = y[i : i + step], b if b.shape[0] == 1 else b[i : i + step]
            share = some.new_zeros(len(some), len(rows))
            lse = Mean.apply(some, own, h)[1]
            for block, w in weights(h, some, own, lse):
                share[:, block.points] += w.sum(0) / len(h.cell)
            parts.append(largest(share.to(torch.promote_types(x.dtype, torch.float32)), rows, k))
        return joined(parts, batch, 0)

    def prior(self, z: Tensor, t: float = 0.0) -> Tensor:
        """Standard normal ``z`` ``(n, *event)`` as draws of the start N(alpha mean, (sigma^2 + alpha^2 h0^2) I)."""
        self._batch(z)
        at, centre = self.path(t), self._heads().centre
        alpha, sigma = at.alpha.to(centre), at.sigma.to(centre)
        sd = (sigma.square() + alpha.square() * self._spread()).sqrt()
        return (alpha * centre.reshape(self.event_shape) + sd * z.to(centre.dtype)).to(z.dtype)

    def length_scales(self, quantile: float = 0.05, probes: int = 64) -> tuple[float, float]:
        """(data scale, nearest scale) of patches, as Euclidean lengths over sqrt(d): the standard deviation of the most
        variable patch, and a low quantile of the distance of a patch to the nearest different one at its place."""
        h = self._heads()
        z = h.points.to(h.centre.dtype) - h.centre
        variance = torch.nn.functional.pad((h.log_prior.exp() @ z.square()), (0, 1))[h.window].sum(-1)
        alive = (variance > 1e-12 * variance.max()).nonzero().squeeze(-1)
        if not len(alive) or not float(variance.max()) > 0:
            return math.sqrt(self._spread()), math.sqrt(self._spread())
        near = []
        for a in alive[:: max(1, len(alive) // 16)]:
            patch = torch.nn.functional.pad(z, (0, 1))[:, h.window[a]]
            distance = torch.cdist(patch[:: max(1, len(patch) // probes)], patch)
            same = distance <= 1e-7 * variance.max().sqrt()
            near.append(distance.masked_fill(same, torch.inf).amin(-1))
        found = torch.cat(near)
        found = found[torch.isfinite(found)]
        if not len(found):  # equal images: their distances from a mean that is rounded are no scale
            return math.sqrt(self._spread()), math.sqrt(self._spread())
        data, close = float(variance.max().sqrt()), float(found.quantile(quantile))
        return (
            math.hypot(data / math.sqrt(self.d), math.sqrt(self._spread())),
            math.hypot(close / math.sqrt(self.d), math.sqrt(self._spread())),
        )

    def _spread(self) -> float:
        """h0^2."""
        return 0.0 if self.smoothing is None or self.smoothing.variances is None else float(self.smoothing.variances)

    def _slots(self) -> Tensor:
        return self.support.valid.nonzero().squeeze(-1)

    def _heads(self) -> Heads:
        """The references that count, in the coordinates of the pass; kept until the points change."""
        now = stamp(self.points, self.window)
        if self._made is None or now != self._made[0]:
            wide, support = working_dtype(self.points.device), self.support
            points = self.points.reshape(self.m, self.d)
            if not bool(support.valid.all()):
                points = points[support.valid]
            log_prior = support.log_weights[support.valid].to(wide).log_softmax(-1)
            weight, centre = log_prior.exp(), torch.zeros(self.d, dtype=wide, device=points.device)
            for w, p in zip(weight.split(4096), points.split(4096), strict=True):
                centre += w @ p.to(wide)
            self._made = (now, Heads(self.window, self.cell, points, centre, log_prior))
        return self._made[1]

    def _natural(
        self, x: Tensor, t: float | Tensor, batch: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor, Schedule, Tensor]:
        """y ``(n, d)``, b, z = x - alpha c, the schedule and v = sigma^2 + alpha^2 h0^2, ``(n or 1, 1)`` each."""
        at = broadcast_schedule(self.path, t, batch, 1)
        values = (v.to(x.device) for v in (at.alpha, at.sigma, at.d_alpha, at.d_sigma))
        at = Schedule(*(v.reshape(1, 1) if v.ndim == 0 else v.expand(*batch, 1).reshape(-1, 1) for v in values))
        v = at.sigma.square() + at.alpha.square() * self._spread()
        if bool((v == 0).any()):
            raise ValueError(
                f"t: patches have no weights at sigma = 0 (t = 1 on {self.path!r}); expected a smaller time, a path "
                f"with sigma_min > 0 or a smoothed support"
            )
        centre = self._heads().centre
        z = x.reshape(math.prod(batch), self.d).to(centre.dtype) - at.alpha * centre
        return at.alpha / v * z, at.alpha.square() / v, z, at, v


def windows(event: tuple[int, ...], size: int, stride: int, boundary: str) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Coordinates that each head sees ``(A, K)`` and writes ``(A, V)``, and the heads on each axis of the image.

    Coordinates are those of the flattened event; its size stands for a pixel outside.
    """
    channels, (height, width) = (event[0] if len(event) == 3 else 1), event[-2:]
    for name, value in (("size", size), ("stride", stride)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}: expected an integer of at least 1, got {value!r}")
    if height % stride or width % stride:
        raise ValueError(f"stride: expected one that divides the image of {height} x {width}, got {stride}")
    if size < stride or (size - stride) % 2:
        raise ValueError(f"size: expected stride + 2 k pixels with stride = {stride}, got {size}")
    if boundary not in ("wrap", "zero"):
        raise ValueError(f'boundary: expected "wrap" or "zero", got {boundary!r}')
    margin = (size - stride) // 2
    seen = [_axis(length, stride, margin, boundary) for length in (height, width)]
    written = [_axis(length, stride, 0, "wrap") for length in (height, width)]
    grid = height // stride, width // stride
    window, cell = (_planes(r, c, channels, height, width) for r, c in (seen, written))
    return window, cell, grid


def _axis(length: int, stride: int, margin: int, boundary: str) -> Tensor:
    """Positions on one axis that each head sees, ``(heads, k)``; -1 outside."""
    start = torch.arange(0, length, stride)[:, None]
    if boundary == "wrap":
        return (start + torch.arange(min(stride + 2 * margin, length)) - margin) % length
    margin = min(margin, length - stride)  # further out there is nothing for any head
    at = start + torch.arange(-margin, stride + margin)
    return at.masked_fill((at < 0) | (at >= length), -1)


def _planes(rows: Tensor, columns: Tensor, channels: int, height: int, width: int) -> Tensor:
    """Positions on both axes as coordinates of all channels, ``(heads, k)``; the number of coordinates outside."""
    r, c = rows[:, None, None, :, None], columns[None, :, None, None, :]
    plane = torch.arange(channels)[:, None, None] * (height * width)
    at = plane + r * width + c
    at = at.masked_fill((r < 0) | (c < 0), channels * height * width)
    return at.reshape(len(rows) * len(columns), -1)
