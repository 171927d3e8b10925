r"""Adaptive Dormand-Prince 5(4) through torchdiffeq, wrapped so that the field is never asked outside its range.

For a field with a path it runs in the clock s = log(r + c) on y = x / sigma, where dy/ds = (r + c) D and nothing is
singular from t = 0 (noise) on; it ends at a node with sigma > 0, and one exact step goes from there to t = 1 (data)
where sigma = 0. A bare callable is integrated in t up to 1 - 1e-4, and one Euler step goes on from there. The solver
steps exactly onto its end and times are clipped to the interval, since trial steps may reach past it.

The error is controlled for all samples together, so that results depend (within the tolerance) on who else is in the
batch.

Reference: Chen 2018, torchdiffeq.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nwflow.paths import Path, working_dtype
from nwflow.sample.grids import Node, nodes
from nwflow.sample.steps import Model, exact_step

__all__ = ["dopri5", "flow", "node_at_clock"]

LAST = 1 - 1e-4  # the last time at which a bare callable is asked


def flow(f: Callable[[Tensor, float], Tensor], x: Tensor, times: Sequence[float], tolerance: float) -> list[Tensor]:
    """Solve dx/dt = f(x, t); x at each of ``times``, which increase, and outside of which f is never asked.

    Raises:
        ImportError: torchdiffeq is not installed.
    """
    try:
        from torchdiffeq import odeint
    except ImportError:
        raise ImportError("method 'dopri5' needs torchdiffeq: pip install 'nwflow[ode]'") from None
    grid = torch.tensor(times, dtype=working_dtype(x.device), device=x.device)
    low, high = times[0], times[-1]

    def inside(t: Tensor, x: Tensor) -> Tensor:
        return f(x, min(max(float(t), low), high))

    options = {"dtype": grid.dtype, "step_t": grid[1:]}
    found: Any = odeint(inside, x, grid, rtol=tolerance, atol=tolerance, method="dopri5", options=options)
    return list(found)


def node_at_clock(path: Path, s: float, c: float, within: tuple[Node, Node]) -> Node:
    """The node at clock s, inside the times of ``within``."""
    low, high = within
    if s <= low.clock(c):
        return low
    if s >= high.clock(c):
        return high
    r = math.exp(s) - c
    if r <= low.r:  # by rounding, next to the start
        return low
    return nodes(path, [min(max(float(path.time_at(1 / r)), low.t), high.t)])[0]


def dopri5(model: Model, x: Tensor, grid: Sequence[Node], c: float, tolerance: float) -> list[Tensor]:
    """x at every node of ``grid`` (with a path: at most the last of them has sigma = 0)."""
    if model.path is None:
        return _bare(model, x, [at.t for at in grid], tolerance)
    path, start = model.path, grid[0]
    inner = [at for at in grid if at.sigma > 0]
    last = inner[-1]

    def slope(y: Tensor, s: float) -> Tensor:
        at = node_at_clock(path, s, c, (start, last))
        return (at.r + c) * model.denoise(at.sigma * y, at)

    found = [x]
    if len(inner) > 1:
        states = flow(slope, x / start.sigma, [at.clock(c) for at in inner], tolerance)
        found = [x] + [at.sigma * y for at, y in zip(inner[1:], states[1:], strict=True)]
    denoised = model.denoise(found[-1], last)
    return found if len(inner) == len(grid) else [*found, exact_step(found[-1], denoised, last, grid[-1])]


def _bare(model: Model, x: Tensor, times: list[float], tolerance: float) -> list[Tensor]:
    if times[-1] < 1:
        return flow(model.velocity, x, times, tolerance)
    last = max(LAST, times[-2])
    states = flow(model.velocity, x, times[:-1] + [last] * (times[-2] < last), tolerance)
    return [*states[: len(times) - 1], states[-1] + (1 - last) * model.velocity(states[-1], last)]
