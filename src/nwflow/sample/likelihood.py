r"""Log-densities by the reversed flow, from t = 1 (data) back to t = 0 (noise), with the exact divergence.

With y = x / sigma, the clock s = log(r + c), r = alpha / sigma (:mod:`nwflow.sample.grids`) and J = dD/dx, the flow and
the density along it are

    dy/ds = (r + c) D,      d/ds log q(y) = -(r + c) sigma tr J,      log p_t(x) = log q(x / sigma_t) - d log sigma_t

where the linear part of the flow, -d log sigma, is integrated by hand. It starts from the exact p_0 of the field. The
field gives u and div u, and both are linear: with w = alpha' sigma - sigma' alpha,

    D = (sigma u - sigma' x) / w,      tr J = (sigma div u - d sigma') / w.

Where sigma_1 = 0 (only smoothed supports have a density there) the last stretch is integrated over t on x itself.
The grid is uniform in s, so that the collapse is resolved. Reference: Chen et al. 2018 (arXiv 1806.07366).
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from nwflow.sample.adaptive import flow, node_at_clock
from nwflow.sample.grids import Node, nodes, scales_of
from nwflow.sample.steps import RK4, integrate_step

__all__ = ["log_prob"]

Solver: TypeAlias = Literal["rk4", "dopri5"]


def log_prob(
    field: Any,
    x: Float[Tensor, "*n_event"],
    *,
    t: float = 1.0,
    steps: int = 200,
    method: Solver = "rk4",
    tolerance: float = 1e-6,
) -> Float[Tensor, "*n"]:
    """log p_t(x) in nats by the probability-flow ODE.

    ``field.log_density`` gives the same number in one pass; this is the check of it, and the likelihood under a field
    whose density at t = 0 alone is known.

    Args:
        field: with ``event_shape``, ``path``, ``velocity_and_divergence(x, t)`` and ``log_density(x, 0.0)``.
        x: ``(n, *event)``; with tasks ``(T, n, *event)``.
        t: the time of the density; 1 is the data.
        steps: budget of evaluations of rk4, 4 a step.
        method: ``rk4``, or ``dopri5`` with ``tolerance`` (absolute and relative; extra ``ode``).

    Returns:
        The batch shape of ``x``, at least float32.

    Raises:
        ValueError: no density at this t (sigma = 0 without smoothing), or arguments out of range.

    Example:
        >>> from nwflow import CondOT, NWField
        >>> field = NWField(torch.tensor([[-1.0], [1.0]], dtype=torch.float64), CondOT(0.1))
        >>> x = torch.tensor([[0.9]], dtype=torch.float64)
        >>> log_prob(field, x), field.log_density(x, 1.0)
        (tensor([0.1905], dtype=torch.float64), tensor([0.1905], dtype=torch.float64))
    """
    if method not in get_args(Solver):
        raise ValueError(f"method: expected one of {get_args(Solver)}, got {method!r}")
    if steps < 8:
        raise ValueError(f"steps: expected at least 8 evaluations, got {steps}")
    if not 0 < t <= 1:
        raise ValueError(f"t: expected a time in (0, 1], got {t}")
    d = max(1, torch.Size(field.event_shape).numel())
    batch = x.shape[: x.ndim - len(field.event_shape)]
    scales = scales_of(field, d)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    state = torch.cat([x.reshape(*batch, d), x.new_zeros(*batch, 1)], -1)  # x and the change of the log-density
    start, end = nodes(field.path, [0.0, float(t)])
    if end.sigma == 0:
        low = max(scales.end, field.path.bandwidth_range[0])
        (before,) = nodes(field.path, [float(field.path.time_at(low))])
        state, end = _over_time(field, state, end.t, before.t), before
    intervals = steps // 4 if method == "rk4" else None
    x_0, change = _over_clock(field, state, start, end, scales.c, intervals, tolerance).split([d, 1], -1)
    rescaled = d * (math.log(start.sigma) - math.log(end.sigma))
    return field.log_density(x_0.reshape(x.shape), 0.0) + change.squeeze(-1) + rescaled


def _evaluate(field: Any, x: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """u ``(*batch, d)`` and div u ``(*batch, 1)`` at x ``(*batch, d)``."""
    u, div = field.velocity_and_divergence(x.reshape(*x.shape[:-1], *field.event_shape), t)
    return u.reshape(x.shape), div[..., None]


def _over_time(field: Any, state: Tensor, t: float, before: float, intervals: int = 4) -> Tensor:
    """The state taken from ``t``, where sigma may be 0, back to ``before`` by RK4 over time."""

    def slope(state: Tensor, t: float) -> Tensor:
        return torch.cat(_evaluate(field, state[..., :-1], t), -1)

    return _rk4(slope, state, t, before, intervals)


def _over_clock(
    field: Any, state: Tensor, start: Node, end: Node, c: float, intervals: int | None, tolerance: float
) -> Tensor:
    """The state taken from ``end`` back to ``start`` over the clock s on y = x / sigma; None for dopri5."""
    d = state.shape[-1] - 1

    def slope(state: Tensor, s: float) -> Tensor:
        at = node_at_clock(field.path, s, c, (start, end))
        x = at.sigma * state[..., :-1]
        u, div = _evaluate(field, x, at.t)
        rate = (at.r + c) / (at.d_alpha * at.sigma - at.d_sigma * at.alpha)
        trace = at.sigma * (at.sigma * div - d * at.d_sigma)
        return rate * torch.cat([at.sigma * u - at.d_sigma * x, trace], -1)

    scaled = torch.cat([state[..., :-1] / end.sigma, state[..., -1:]], -1)
    a, b = end.clock(c), start.clock(c)
    if intervals is None:  # time runs forwards in the solver
        scaled = flow(lambda state, back: -slope(state, -back), scaled, [-a, -b], tolerance)[-1]
    else:
        scaled = _rk4(slope, scaled, a, b, intervals)
    return torch.cat([start.sigma * scaled[..., :-1], scaled[..., -1:]], -1)


def _rk4(slope: Callable[[Tensor, float], Tensor], state: Tensor, a: float, b: float, intervals: int) -> Tensor:
    """``intervals`` equal steps of the classical method from ``a`` to ``b``."""
    grid = [a + (b - a) * k / intervals for k in range(intervals)] + [b]
    for s, following in pairwise(grid):
        state, _ = integrate_step(RK4, slope, state, s, following)
    return state
