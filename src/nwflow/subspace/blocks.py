r"""Independent heads in blocks of an orthonormal basis: the exact field of a product of empirical marginals.

With Q orthonormal and its columns cut into blocks, z_g = Q_g^T x, the product over g of the blocks' marginals
sum_i pi_i N(alpha Q_g^T s_i, sigma^2 I) (t = 0 noise, t = 1 data) has

    D = sum_g Q_g D_g(z_g)     log p = sum_g log p_g(z_g)     div u = sum_g div u_g     score = sum_g Q_g score_g(z_g)

with D_g, p_g, ... those of one :class:`~nwflow.NWField` of the projected references: accuracy, derivatives, tasks and
limits are theirs. With uniform weights it has m^G equally likely atoms in place of m.

Projections are formed in float64 (where the device has it) and the projected references kept so, or rounding x would
cost more than the tolerance; columns are only selected, and keep their dtype.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nwflow._moments import VECTORS, Attribution, Posterior
from nwflow.field import NWField
from nwflow.metric import Smoothing, _moments_input
from nwflow.paths import Path, broadcast_schedule, working_dtype
from nwflow.subspace.base import CHUNK, SubspaceField, at_least_one, isotropic, joined, largest
from nwflow.support import Support


class BlockField(SubspaceField):
    """One :class:`~nwflow.NWField` for each block of coordinates; see :meth:`SubspaceField.columns` and ``pca``.

    Args:
        groups: disjoint lists of directions that together hold all d of them.
        basis: ``(d, d)`` orthonormal, directions in its columns; None for the columns of the data.
        support, path, smoothing, accuracy: as in :meth:`SubspaceField.columns`.

    ``heads`` are the fields; ``n_eff`` and ``weights`` have one entry for each.

    Example:
        >>> field = SubspaceField.columns([[0.0, 0.0], [1.0, 1.0]], groups=[[0], [1]])
        >>> field.n_eff(torch.tensor([[0.1, 0.45]]), 0.9)
        tensor([[1.0000, 2.0000]])
    """

    basis: Tensor | None
    order: Tensor
    inverse: Tensor

    def __init__(
        self,
        support: Support | Any,
        path: Path | None = None,
        *,
        groups: Sequence[Sequence[int]],
        basis: Tensor | None = None,
        smoothing: Any = None,
        accuracy: float | None = 1e-5,
    ) -> None:
        support = support if isinstance(support, Support) else Support(support)
        self_groups = _partition(groups, support.d)
        each = _each(smoothing, len(self_groups))
        super().__init__(support, path, None)
        self.groups, self.accuracy = self_groups, accuracy
        order = torch.tensor([c for group in self_groups for c in group], device=support.device)
        self.register_buffer("basis", None if basis is None else _orthonormal(basis, support))
        self.register_buffer("order", order)
        self.register_buffer("inverse", torch.argsort(order))
        self.smoothing = self._in_data_coordinates(each)
        raw, rest = support.raw_weights, (support.labels, support.mask, support.rows)
        parts = self._split(support.points.flatten(2 if self.is_batch else 1) if support.event_shape
                            else support.points[..., None], exact=True)  # fmt: skip
        self.heads = nn.ModuleList(
            NWField(support.rebuilt(part, raw, *rest), self.path, None, smooth, accuracy)
            for part, smooth in zip(parts, each, strict=True)
        )

    def extra_repr(self) -> str:
        kind = "columns" if self.basis is None else "directions"
        return f"{len(self.groups)} heads of {kind}, {self.m} references, {self.path!r}, accuracy={self.accuracy}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def given(self, labels: Iterable[Any]) -> BlockField:
        """The field of the part of the support with these labels, in the same blocks of the same basis."""
        return BlockField(
            self.support.given(labels), self.path, groups=self.groups, basis=self.basis,
            smoothing=[head.smoothing for head in self._fields], accuracy=self.accuracy,
        )  # fmt: skip

    def with_accuracy(self, accuracy: float | None) -> BlockField:
        """The same field (shared tensors) at another tolerance."""
        other = copy.copy(self)
        other.__dict__["_modules"] = dict(self._modules)
        other.heads = nn.ModuleList(head.with_accuracy(accuracy) for head in self._fields)
        other.accuracy = accuracy
        return other

    @property
    def _fields(self) -> list[NWField]:
        return list(self.heads)  # type: ignore[arg-type]  # pyright: ignore[reportReturnType]

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """What each head sees of ``x`` ``(*batch, *event)``: its coordinates ``(*batch, size of its block)``."""
        batch = self._batch(x)
        return self._split(x.reshape(*batch, self.d), exact=self.accuracy is not None)

    def join(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        """The inverse of :meth:`split`, with the shape and dtype of ``like``."""
        flat = torch.cat(list(parts), -1).index_select(-1, self.inverse)
        if self.basis is not None:
            flat = flat.to(self.basis.dtype) @ self.basis.mT
        return flat.reshape(like.shape).to(like.dtype)

    def _split(self, flat: Tensor, exact: bool) -> tuple[Tensor, ...]:
        if self.basis is not None:
            z = flat.to(self.basis.dtype) @ self.basis
            flat = z if exact else z.to(torch.promote_types(flat.dtype, torch.float32))
        return flat.index_select(-1, self.order).split([len(group) for group in self.groups], -1)

    def _vector(self, x: Tensor, t: float | Tensor, name: str) -> Tensor:
        return getattr(self.posterior(x, t, (name,)), name)

    def log_density(self, x: Tensor, t: float | Tensor) -> Tensor:
        """log p_t(x) of the product in nats, batch shape; raises at sigma = 0 unless smoothed."""
        return self._vector(x, t, "log_density")

    def divergence(self, x: Tensor, t: float | Tensor) -> Tensor:
        """div u(x, t), batch shape, exact; raises at sigma = 0 unless smoothed."""
        return self._vector(x, t, "divergence")

    def entropy(self, x: Tensor, t: float | Tensor) -> Tensor:
        """Entropy in nats of the joint weights, the sum of the heads', batch shape."""
        return self._vector(x, t, "entropy")

    def covariance_trace(self, x: Tensor, t: float | Tensor) -> Tensor:
        """tr C of the joint weights in data units, the sum of the heads', batch shape."""
        return self._vector(x, t, "covariance_trace")

    def n_eff(self, x: Tensor, t: float | Tensor) -> Tensor:
        """Effective number of references of each head, ``(*batch, G)``, from 1 to m."""
        return self._vector(x, t, "n_eff")

    def velocity_and_divergence(self, x: Tensor, t: float | Tensor) -> tuple[Tensor, Tensor]:
        """Both in one pass, for likelihoods."""
        p = self.posterior(x, t, ("velocity", "divergence"))
        assert p.velocity is not None and p.divergence is not None
        return p.velocity, p.divergence

    def posterior(self, x: Tensor, t: float | Tensor, moments: Iterable[str] = ("denoiser",)) -> Posterior:
        """Several moments in one pass, as :meth:`nwflow.NWField.posterior`.

        ``n_eff`` is ``(*batch, G)``; ``error_bound`` bounds the joint weights: the sum of the heads' bounds.
        """
        names = (moments,) if isinstance(moments, str) else tuple(moments)
        found = [head.posterior(z, t, names) for head, z in zip(self._fields, self.split(x), strict=True)]
        wide, out = torch.promote_types(x.dtype, torch.float32), {}
        for name in names:
            values = [getattr(p, name) for p in found]
            if name in VECTORS:
                out[name] = self.join(values, x)
            else:
                together = torch.stack(values, -1)
                out[name] = (together if name == "n_eff" else together.sum(-1)).to(wide)
        bounds, proven = zip(*((p.error_bound, p.proven) for p in found), strict=True)
        if all(b is not None for b in (*bounds, *proven)):
            out |= {"error_bound": torch.stack(bounds).sum(0), "proven": torch.stack(proven).all(0)}
        return Posterior(**out)

    def weights(self, x: Tensor, t: float | Tensor) -> Tensor:
        """The weights of every head, ``(*batch, G, m)``, 0 for masked points."""
        w = [head.weights(z, t) for head, z in zip(self._fields, self.split(x), strict=True)]
        return torch.stack(w, -2).to(torch.promote_types(x.dtype, torch.float32))

    @torch.no_grad()
    def attribute(self, x: Tensor, t: float | Tensor, k: int = 10) -> Attribution:
        """The ``k`` references that make the largest share of D: weights averaged over coordinates."""
        k, batch = at_least_one(k), self._batch(x)
        broadcast_schedule(self.path, t, batch, 1, tasks=self.is_batch)  # refuses what does not fit
        lead = batch if self.is_batch else (math.prod(batch),)
        x = x.reshape(*lead, *self.event_shape)
        times = t.expand(batch).reshape(lead) if isinstance(t, Tensor) and t.ndim else None
        rows = self.support.rows.masked_fill(~self.support.valid, -1)
        axis, rows = len(lead) - 1, rows[:, None] if self.is_batch else rows
        step, parts = max(1, CHUNK // (self.m * math.prod(lead[:-1]))), []
        for i in range(0, lead[-1], step):
            count = min(step, lead[-1] - i)
            at = t if times is None else times.narrow(axis, i, count)
            parts.append(largest(self._shares(x.narrow(axis, i, count), at), rows, k))
        return joined(parts, batch, axis)

    def _shares(self, x: Tensor, t: float | Tensor) -> Tensor:
        """sum_g (|B_g| / d) w^g, ``(*batch, m)``."""
        wide = torch.promote_types(x.dtype, torch.float32)
        parts = zip(self._fields, self.split(x), self.groups, strict=True)
        total = sum(len(group) / self.d * head.weights(z, t) for head, z, group in parts)
        assert isinstance(total, Tensor)
        return total.to(wide)

    def prior(self, z: Tensor, t: float = 0.0) -> Tensor:
        """Standard normal ``z`` ``(n, *event)`` as draws of the start, that of :meth:`nwflow.NWField.prior`."""
        return self.join([head.prior(part, t) for head, part in zip(self._fields, self.split(z), strict=True)], z)

    def length_scales(self, quantile: float = 0.05, probes: int = 256) -> tuple[float, float]:
        """(data scale, nearest scale) of the widest and of the finest head that has any variance, as Euclidean lengths
        over sqrt(d): what spaces the sampler's grid, so that every head is resolved."""
        own = [head.length_scales(quantile, probes) for head in self._fields]
        lengths = [(a * math.sqrt(h.d), b * math.sqrt(h.d)) for (a, b), h in zip(own, self._fields, strict=True) if a]
        if not lengths:
            return 0.0, 0.0
        return max(a for a, _ in lengths) / math.sqrt(self.d), min(b for _, b in lengths) / math.sqrt(self.d)

    def _in_data_coordinates(self, each: list[Smoothing | None]) -> Smoothing | None:
        """The heads' smoothings as one of the whole event."""
        if all(s is None for s in each):
            return None
        if all(s is each[0] for s in each):
            return each[0]
        per = [0.0 if s is None or s.variances is None else float(s.variances) for s in each]
        variances = torch.tensor([v for v, group in zip(per, self.groups, strict=True) for _ in group])
        variances = variances.to(self.order.device, working_dtype(self.order.device))[self.inverse]
        if self.basis is None:
            return Smoothing.diagonal(variances)
        return Smoothing.full((self.basis * variances) @ self.basis.mT)


def principal_basis(support: Support) -> Tensor:
    """Principal directions of a support in its columns, ``(d, d)``, by decreasing variance; float64."""
    x, w = _moments_input(support)
    x = (x - (w * x).sum(0)) * w.sqrt()
    return torch.linalg.eigh(x.mT @ x)[1].flip(-1)


def sizes(d: int, block: int | None, blocks: int | None) -> list[int]:
    """Sizes of consecutive blocks that cover d directions."""
    if (block is None) == (blocks is None):
        raise ValueError(f"block, blocks: expected exactly one of them, got {block!r} and {blocks!r}")
    name, value = ("block", block) if blocks is None else ("blocks", blocks)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= d:
        raise ValueError(f"{name}: expected an integer from 1 to d = {d}, got {value!r}")
    if name == "block":
        return [value] * (d // value) + [d % value] * (d % value > 0)
    return [d // value + (i < d % value) for i in range(value)]


def _partition(groups: Any, d: int) -> list[list[int]]:
    """Groups as lists of ints; raises unless they partition 0 to d - 1."""
    try:
        found = [[int(c) for c in group] for group in groups]
    except (TypeError, ValueError):
        raise TypeError(f"groups: expected lists of columns such as [[0, 1], [2]], got {groups!r}") from None
    if empty := [i for i, group in enumerate(found) if not group]:
        raise ValueError(f"groups: expected columns in every group, got none in group {empty[0]}")
    flat = [c for group in found for c in group]
    if outside := [c for c in flat if not 0 <= c < d]:
        raise ValueError(f"groups: expected columns from 0 to {d - 1}, got {_some(outside)}")
    seen = set(flat)
    missing = [c for c in range(d) if c not in seen]
    repeated = [c for c in sorted(seen) if flat.count(c) > 1] if len(flat) > len(seen) else []
    if missing or repeated:
        what = [f"{name} {_some(v)}" for name, v in (("missing", missing), ("repeated", repeated)) if v]
        raise ValueError(f"groups: expected every one of the {d} columns once, got {' and '.join(what)}")
    return found


def _some(columns: list[int]) -> str:
    return ", ".join(map(str, columns[:8])) + (f" and {len(columns) - 8} more" if len(columns) > 8 else "")


def _each(smoothing: Any, count: int) -> list[Smoothing | None]:
    """One smoothing for each head."""
    if not isinstance(smoothing, list | tuple):
        return [isotropic(smoothing)] * count
    if len(smoothing) != count:
        raise ValueError(f"smoothing: expected one for each of {count} heads, got {len(smoothing)}")
    return [isotropic(s) for s in smoothing]


def _orthonormal(basis: Tensor, support: Support) -> Tensor:
    d = support.d
    q = torch.as_tensor(basis, device=support.device).detach().to(working_dtype(support.device))
    if tuple(q.shape) != (d, d):
        raise ValueError(f"basis: expected shape ({d}, {d}), got {tuple(q.shape)}")
    off = float((q.mT @ q - torch.eye(d, dtype=q.dtype, device=q.device)).abs().max())
    if not off < 1e-5:
        raise ValueError(f"basis: expected orthonormal columns, got Q^T Q that differs from the identity by {off:.3g}")
    return q
