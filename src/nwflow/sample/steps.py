r"""Step rules: from x at a node to x at the next, t = 0 (noise) to t = 1 (data).

**Runge-Kutta** rules integrate the velocity dx/dt = u = alpha' D + sigma' (x - alpha D) / sigma over t.

**Exponential** rules integrate the denoiser. With y = x / sigma, r = alpha / sigma and the clock s = log(r + c) (see
:mod:`nwflow.sample.grids`), the flow is dy/dr = D. Renewing the noise at rate theta per unit of s leaves all marginals:

    dy = D dr + theta (r D - y) ds + sqrt(2 theta) dW,      dr = (r + c) ds = e^s ds

From a to b, with h = s_b - s_a, kappa = exp(-theta h) and D a polynomial in s, this has the exact solution

    x_b = kappa (sigma_b / sigma_a) x_a + sum_i c_i D(s_i) + sigma_b sqrt(1 - kappa^2) z
    c_i = sigma_b int_0^h [(1 + theta) e^(s_b) e^(-(1 + theta)(h - v)) - theta c e^(-theta (h - v))] l_i(v) dv

where l_i are the Lagrange polynomials of the knots s_i. For constant D it is the exact step, or with kappa^2 = 1 -
eta^2 (1 - h_b^2 / h_a^2), in bandwidths, the step of DDIM. The integrals are taken by Gauss-Legendre to rounding.

``2m`` and ``3m`` predict with D at the last 2 or 3 nodes and, once D at b is known for the next step, correct x_b with
it as one more knot: no evaluation is added, and the order rises to 3 and 4 (a predictor-corrector pair in PEC mode).

References: Lu et al. 2022 (arXiv 2211.01095, multistep in log-SNR), Zhao et al. 2023 (arXiv 2302.04867, correction by
the next evaluation), Xue et al. 2023 (arXiv 2309.05019, the stochastic form), Song et al. 2021 (arXiv 2010.02502, eta).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from nwflow.paths import Path
from nwflow.sample.grids import Node, nodes

__all__ = ["EULER", "HEUN", "MIDPOINT", "RK4", "Exponential", "Model", "RungeKutta", "Tableau", "exponential_weights"]

REACH = 3.0  # a step longer than this many last steps extrapolates too far: it takes D as constant


class Model:
    """A field as the rules see it: counts evaluations and keeps the last. ``path`` is None for a bare callable.

    ``denoiser`` gives D(x, t), or u; ``asked`` counts the rows of x over all evaluations.
    """

    def __init__(self, field: Any, path: Path | None) -> None:
        self.field, self.path, self.evaluations, self.asked = field, path, 0, 0
        self.denoiser: Callable[[Tensor, float], Tensor] = field if path is None else field.denoise
        self.last: tuple[Tensor, float, Tensor] | None = None  # x, t, and D or u there

    def __call__(self, x: Tensor, at: Node) -> Tensor:
        """D at a node, or u of a bare callable."""
        return self._ask(x, at.t) if self.path is None else self.denoise(x, at)

    def denoise(self, x: Tensor, at: Node) -> Tensor:
        assert at.sigma > 0
        return self._ask(x, at.t)

    def velocity(self, x: Tensor, t: float) -> Tensor:
        if self.path is None:
            return self._ask(x, t)
        at = nodes(self.path, [t])[0]
        return velocity(x, self.denoise(x, at), at)

    def _ask(self, x: Tensor, t: float) -> Tensor:
        value = self.denoiser(x, t)
        self.evaluations += 1
        self.asked += x.shape[0]
        if value.shape != x.shape:
            raise ValueError(f"field: expected a value of the shape of x, {tuple(x.shape)}, got {tuple(value.shape)}")
        self.last = (x.detach(), t, value.detach())
        return value


def velocity(x: Tensor, denoised: Tensor, at: Node) -> Tensor:
    """u = alpha' D + sigma' (x - alpha D) / sigma."""
    rate = at.d_sigma / at.sigma
    return (at.d_alpha - rate * at.alpha) * denoised + rate * x


def exact_step(x: Tensor, denoised: Tensor, a: Node, b: Node) -> Tensor:
    """x_b = alpha_b D + (sigma_b / sigma_a)(x_a - alpha_a D): exact for constant D, and D itself where sigma_b = 0."""
    keep = b.sigma / a.sigma
    return (b.alpha - keep * a.alpha) * denoised + keep * x if keep > 0 else b.alpha * denoised


@runtime_checkable
class Rule(Protocol):
    """One step from ``a`` to ``b``, in three parts, so that samples can leave between them."""

    def settled(self, x: Tensor, known: Tensor, a: Node) -> Tensor:
        """x at a as it is once D (or u) there is ``known``: corrected by it, or as it was."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Forget the samples that are not in ``rows``."""
        ...

    def step(self, model: Model, x: Tensor, known: Tensor, a: Node, b: Node, noise: Callable[[], Tensor]) -> Tensor:
        """x at b."""
        ...


# --- Runge-Kutta in t -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tableau:
    """An explicit Runge-Kutta method; ``open_end`` is the one for a last step that must not ask at its end."""

    c: tuple[float, ...]
    a: tuple[tuple[float, ...], ...]
    b: tuple[float, ...]
    open_end: "Tableau | None" = None


EULER = Tableau((0,), ((),), (1,))
MIDPOINT = Tableau((0, 1 / 2), ((), (1 / 2,)), (0, 1))
RALSTON = Tableau((0, 1 / 2, 3 / 4), ((), (1 / 2,), (0, 3 / 4)), (2 / 9, 1 / 3, 4 / 9))
HEUN = Tableau((0, 1), ((), (1,)), (1 / 2, 1 / 2), open_end=EULER)
RK4 = Tableau(
    (0, 1 / 2, 1 / 2, 1), ((), (1 / 2,), (0, 1 / 2), (0, 0, 1)), (1 / 6, 1 / 3, 1 / 3, 1 / 6), open_end=RALSTON
)


def integrate_step(
    tableau: Tableau, f: Callable[[Any, float], Any], x: Any, t: float, end: float, first: Any = None
) -> tuple[Any, Any]:
    """One step of dx/dt = f(x, t), and the first slope, which may be given: orders of a whole run survive one step of
    order less by one."""
    h, slopes = end - t, [] if first is None else [first]
    for c, row in list(zip(tableau.c, tableau.a, strict=True))[len(slopes) :]:
        state = x
        for weight, slope in zip(row, slopes, strict=True):
            state = state + (h * weight) * slope if weight else state
        slopes.append(f(state, end if c == 1 else t + c * h))
    total = x
    for weight, slope in zip(tableau.b, slopes, strict=True):
        total = total + (h * weight) * slope if weight else total
    return total, slopes[0]


@dataclass(frozen=True)
class RungeKutta:
    """A tableau on the velocity; where sigma_b = 0, the exact step. A bare callable is never asked at t = 1."""

    tableau: Tableau

    @property
    def evaluations(self) -> int:
        """Evaluations of one step."""
        return len(self.tableau.c)

    def settled(self, x: Tensor, known: Tensor, a: Node) -> Tensor:
        return x

    def keep(self, rows: Tensor) -> None:
        pass

    def step(self, model: Model, x: Tensor, known: Tensor, a: Node, b: Node, noise: Callable[[], Tensor]) -> Tensor:
        if model.path is not None and b.sigma == 0:
            return exact_step(x, known, a, b)
        barred = model.path is None and b.t == 1
        tableau = self.tableau.open_end if barred and self.tableau.open_end else self.tableau
        slope = known if model.path is None else velocity(x, known, a)
        return integrate_step(tableau, model.velocity, x, a.t, b.t, slope)[0]


# --- exponential integrators in the clock s -------------------------------------------------------------------------


@cache
def _gauss_legendre(n: int) -> tuple[np.ndarray, np.ndarray]:
    points, weights = np.polynomial.legendre.leggauss(n)
    return (points + 1) / 2, weights / 2


def exponential_weights(a: Node, b: Node, knots: Sequence[float], c: float, kappa: float = 1.0) -> list[float]:
    """The c_i of the module's formula for D known at the clock values ``knots``; they add up to the exact step."""
    total = b.alpha - kappa * (b.sigma / a.sigma) * a.alpha
    if len(knots) == 1:
        return [total]
    start, h = a.clock(c), b.clock(c) - a.clock(c)
    theta = -math.log(kappa) / h
    unit, weights = _gauss_legendre(32)
    v = h * unit
    lift = b.alpha + c * b.sigma  # sigma_b e^(s_b)
    grow = (1 + theta) * lift * np.exp(-(1 + theta) * (h - v))
    density = h * weights * (grow - theta * c * b.sigma * np.exp(-theta * (h - v)))
    where = np.asarray(knots) - start
    result = [
        float(density @ np.prod([(v - q) / (p - q) for j, q in enumerate(where) if j != i], axis=0))
        for i, p in enumerate(where)
    ]
    return [result[0] + (total - sum(result)), *result[1:]]  # a rounding error, so that constant D stays exact


@dataclass
class _Step:
    """What the correction of a step needs: x_b less all of D, and the D that were known."""

    b: Node
    a: Node
    base: Tensor
    kappa: float
    known: list[tuple[float, Tensor]]


@dataclass
class Exponential:
    """Multistep exponential integrator of ``order`` nodes, corrected or not, stochastic for ``eta`` > 0.

    The history is used where the step is regular: not where sigma_b = 0 (the step lands on D), where all noise is
    renewed (kappa = 0), or where the step exceeds ``REACH`` last steps.
    """

    order: int
    correct: bool
    c: float
    eta: float = 0.0
    history: list[tuple[float, Tensor]] = field(default_factory=list)
    taken: _Step | None = None
    evaluations: int = 1

    def settled(self, x: Tensor, known: Tensor, a: Node) -> Tensor:
        return self._corrected(self.taken, known) if self.correct and self.taken is not None else x

    def keep(self, rows: Tensor) -> None:
        self.history = [(s, d[rows]) for s, d in self.history]
        self.taken = None  # of the step before, which is settled

    def step(self, model: Model, x: Tensor, known: Tensor, a: Node, b: Node, noise: Callable[[], Tensor]) -> Tensor:
        self.history = [(a.clock(self.c), known), *self.history][: self.order]
        fresh = math.sqrt(max(0.0, 1 - (b.bandwidth / a.bandwidth) ** 2)) if self.eta else 0.0
        kappa = math.sqrt(1 - (self.eta * fresh) ** 2)
        keep = kappa * b.sigma / a.sigma
        base = keep * x if keep > 0 else 0.0 * x
        if self.eta and b.sigma > 0:
            base = base + (self.eta * b.sigma * fresh) * noise()
        regular = b.sigma > 0 and kappa > 1e-6
        used = self._within_reach(b) if regular else self.history[:1]
        self.taken = _Step(b, a, base, kappa, used) if regular else None
        weights = exponential_weights(a, b, [s for s, _ in used], self.c, kappa)
        return _combine(base, weights, [d for _, d in used])

    def _within_reach(self, b: Node) -> list[tuple[float, Tensor]]:
        if len(self.history) > 1:
            now, before = self.history[0][0], self.history[1][0]
            if b.clock(self.c) - now > REACH * (now - before):
                return self.history[:1]
        return self.history

    def _corrected(self, step: _Step, denoised: Tensor) -> Tensor:
        known = [(step.b.clock(self.c), denoised), *step.known]
        weights = exponential_weights(step.a, step.b, [s for s, _ in known], self.c, step.kappa)
        return _combine(step.base, weights, [d for _, d in known])


def _combine(base: Tensor, weights: Sequence[float], denoised: Sequence[Tensor]) -> Tensor:
    for weight, d in zip(weights, denoised, strict=True):
        base = base + weight * d
    return base
