r"""Which reference does what: how far the denoiser moves when one of them is left out.

With weights w and denoiser D = sum_i w_i s_i at (x, t), t = 0 noise and t = 1 data, leaving point i out gives

    D_{-i} = (D - w_i s_i) / (1 - w_i),        |D - D_{-i}| = w_i |s_i - D| / (1 - w_i),

in closed form. It loses all digits where w_i is near 1, which only the point of largest weight can be: for that one
the softmax over the others is taken anew, and |D - D_{-i}| = w_i |s_i - D_{-i}|. With metric and smoothing the same
holds in the coordinates z of :mod:`nwflow._frame`, where D = (1 - alpha^2 Lambda P) m + const for the local mean m.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nwflow._moments import State
from nwflow.field import NWField
from nwflow.kernel.posterior import Want
from nwflow.support import Support

__all__ = ["Influence", "leave_one_out"]

BLOCK = 2**22  # elements of one block of differences


@dataclass(frozen=True)
class Influence:
    """What :func:`leave_one_out` finds.

    ``distance`` ``(*batch, m)``: |D - D_{-i}| in units of the data, 0 for masked points. ``unused`` ``(m,)``, of tasks
    ``(T, m)``: True for real points whose distance is negligible for every query.
    """

    distance: Float[Tensor, "*batch m"]
    unused: Bool[Tensor, "*T m"]


@torch.no_grad()
def leave_one_out(field: NWField, x: Tensor, t: float | Tensor, tol: float = 1e-9) -> Influence:
    """How far D(x, t) moves when each reference is dropped and the other prior weights are renormalised.

    Args:
        field: the field; that of an :class:`NWHead` is ``head.field(points, mask)``.
        x: ``(*batch, *event)``. t: times, as for the field.
        tol: distances up to ``tol`` times the spread of the data, sqrt(tr Cov), count as none.

    Raises:
        ValueError: fewer than two points of positive mass; sigma = 0 without smoothing.

    Example:
        >>> field = NWField(torch.tensor([[-1.0], [1.0], [900.0]], dtype=torch.float64))
        >>> found = leave_one_out(field, torch.tensor([[0.5]], dtype=torch.float64), 0.5)
        >>> found.distance, found.unused
        (tensor([[0.2384, 1.7616, 0.0000]], dtype=torch.float64), tensor([False, False,  True]))
    """
    if not isinstance(field, NWField):
        raise TypeError(f"field: expected an NWField (of a head: head.field(points, mask)), got {type(field).__name__}")
    s = field._solve(x, t, Want(mean=False), refuse=("leave-one-out differences",))
    support = field.support
    log_prior = support.log_weights.reshape(-1, field.m).to(s.y.dtype)
    real = log_prior > -torch.inf
    if bool((count := real.sum(-1)).lt(2).any()):
        where = f" in task {int(count.lt(2).nonzero()[0])}" if field.is_batch else ""
        raise ValueError(f"field: expected at least two points of positive mass to leave one out, got 1{where}")
    points = support.points.reshape(-1, field.m, field.d).to(s.y.dtype)
    z = torch.where(real[..., None], s.frame.into(points - s.frame.centre), 0.0)
    step = max(1, BLOCK // z.shape[-2])
    parts = [_distances(s, z, log_prior, slice(i, i + step)) for i in range(0, s.y.shape[-2], step)]
    distance = torch.cat(parts, 1) if parts else s.y.new_zeros(*s.y.shape[:2], z.shape[-2])
    unused = real & (distance.amax(1) <= _negligible(support, tol)) if distance.shape[1] else torch.zeros_like(real)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return Influence(distance.reshape(*s.batch, field.m).to(dtype), unused if field.is_batch else unused[0])


def _negligible(support: Support, tol: float) -> Tensor:
    """Distances that count as none, ``(T or 1, 1)``: relative to the spread, and to what rounding leaves of points."""
    rounding = 8.0 * torch.finfo(torch.float64).eps * float(support.points.detach().abs().amax())
    return (tol * support.data_scale * support.d**0.5 + rounding).reshape(-1, 1)


def _distances(s: State, z: Tensor, log_prior: Tensor, rows: slice) -> Tensor:
    """|D - D_{-i}| of a block of queries, ``(T, n, m)``; ``z`` ``(T, m, d)``."""
    y, b, alpha, variance = (v if v.shape[1] == 1 else v[:, rows] for v in (s.y, s.b, s.at.alpha, s.variance))
    square = z.square() if b.shape[-1] > 1 else z.square().sum(-1, keepdim=True)
    logits = y @ z.mT - 0.5 * (b @ square.mT) + log_prior[:, None]
    first = logits.argmax(-1, keepdim=True)
    w, others = torch.softmax(logits, -1), torch.softmax(logits.scatter(-1, first, -torch.inf), -1)
    gain = 1.0 - alpha.square() * s.frame.spread / variance
    share = w.scatter(-1, first, 0.0)
    moved = share / (1.0 - share) * _norms(s, gain, w @ z, z)
    top = torch.gather(z, 1, first.expand(-1, -1, z.shape[-1])) - others @ z
    most = torch.linalg.vector_norm(s.frame.back(gain * top), dim=-1, keepdim=True)
    return moved.scatter(-1, first, w.gather(-1, first) * most)


def _norms(s: State, gain: Tensor, mean: Tensor, z: Tensor) -> Tensor:
    """|A^-1 gain (z_i - mean)| by differences, ``(T, n, m)``, in blocks of points and of queries."""
    tasks, n, d = mean.shape
    keys = max(1, min(z.shape[1], BLOCK // (tasks * d)))
    step = max(1, BLOCK // (tasks * d * keys))
    across = []
    for i in range(0, n, step):
        g = (gain if gain.shape[1] == 1 else gain[:, i : i + step])[:, :, None]
        centre = mean[:, i : i + step, None]
        parts = (s.frame.back(g * (z[:, None, j : j + keys] - centre)) for j in range(0, z.shape[1], keys))
        across.append(torch.cat([torch.linalg.vector_norm(p, dim=-1) for p in parts], -1))
    return torch.cat(across, 1)
