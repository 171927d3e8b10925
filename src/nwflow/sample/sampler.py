r"""Sampling as it is called: from noise at t = 0 to data at t = 1, or to the bandwidth at which to stop.

A run is a list of nodes t_0 < ... < t_N and a rule that takes x from each to the next (:mod:`nwflow.sample.steps`); the
loop is in :mod:`nwflow.sample.run`. Arguments, blocks, progress and results are here.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from nwflow.field import Attribution
from nwflow.sample.grids import Grid, Node, Scales, check_resolved, given_times, nodes, scales_of, time_grid
from nwflow.sample.noise import as_seed
from nwflow.sample.run import Callback, Certificate, Outcome, Run, why_off
from nwflow.sample.start import Start
from nwflow.sample.steps import EULER, HEUN, MIDPOINT, RK4, Exponential, Rule, RungeKutta

__all__ = ["Method", "Samples", "sample"]

Method: TypeAlias = Literal["3m", "2m", "exact", "euler", "midpoint", "heun", "rk4", "dopri5"]
_EXPONENTIAL = {"exact": (1, False), "2m": (2, True), "3m": (3, True)}  # order of the predictor, corrected
_RUNGE_KUTTA = {"euler": EULER, "midpoint": MIDPOINT, "heun": HEUN, "rk4": RK4}


@dataclass(frozen=True, eq=False)
class Samples:
    """What :func:`sample` returns; with tasks every ``n`` is ``T, n``.

    Attributes:
        points: ``(n, *event)`` at the last of ``times``.
        denoised: ``(n, *event)``, the denoiser at the last evaluation (for a bare callable its velocity); of a sample
            that was finished early, what it is where the others were evaluated last.
        attribution: the references with the largest weights at each sample's last evaluation, where sigma > 0:
            ``indices`` (original rows) and ``weights`` ``(n, k)``, ``captured`` ``(n,)``; None where the field has
            none or it was not wanted.
        n_eff: ``(n,)``, effective number of references there, or None; a field of several heads gives one for each.
        trajectory: ``(len(times), n, *event)`` or None.
        times: the times visited, from noise (0) towards data (1).
        bandwidths: sigma / alpha at each of them, inf at pure noise; None for a bare callable.
        evaluations: evaluations of the field for the sample that took the most; attribution and n_eff are not counted.
        field_evaluations: evaluations of all samples together.
        certificate: which samples were finished early by one exact step, when, and how far they can be off.
        method: the name of the step rule. seed: the seed of the noise.
    """

    points: Float[Tensor, "*n_event"]
    denoised: Float[Tensor, "*n_event"]
    attribution: Attribution | None
    n_eff: Float[Tensor, "*n"] | None
    trajectory: Float[Tensor, "*times_n_event"] | None
    times: tuple[float, ...]
    bandwidths: tuple[float, ...] | None
    evaluations: int
    field_evaluations: int
    certificate: Certificate
    method: str
    seed: int

    def __repr__(self) -> str:
        return (
            f"Samples(points {tuple(self.points.shape)}, method={self.method!r}, evaluations={self.evaluations}, "
            f"seed={self.seed}, t={self.times[0]:g} to {self.times[-1]:g})"
        )


def sample(
    field: Any,
    n: int | None = None,
    *,
    steps: int = 40,
    method: Method = "3m",
    grid: Grid | Sequence[float] | Tensor = "log_bandwidth",
    seed: int = 0,
    x0: Tensor | None = None,
    accuracy: float | None = 1e-3,
    eta: float = 0.0,
    stop_at: float | None = None,
    attribution: int = 5,
    trajectory: bool = False,
    certificate: bool | Literal["require"] = True,
    batch_size: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    tolerance: float = 1e-5,
    progress: bool = False,
    callback: Callback | None = None,
) -> Samples:
    """Draw ``n`` samples of a field (with tasks ``n`` of each), or carry ``x0`` along its flow.

    Args:
        field: an :class:`~nwflow.NWField`, or anything with ``event_shape``, ``path``, ``prior(z)`` and
            ``denoise(x, t)``; used where present: ``attribute``, ``n_eff``, ``colour``, ``length_scales``,
            ``with_accuracy`` and ``support``. Or a bare callable v(x, t), with ``x0=`` and a Runge-Kutta method or
            dopri5 on a uniform or given grid.
        steps: budget of evaluations of the field. A step takes 1 of them with 3m, 2m, exact and euler, 2 with midpoint
            and heun, 4 with rk4, so these take ``steps // 2`` and ``steps // 4`` steps. dopri5 takes what it needs.
        method: the rule for a step; see :mod:`nwflow.sample.steps`. ``3m`` is the default.
        grid: where to evaluate: ``log_bandwidth`` (from noise to the support's own scales, see
            :mod:`nwflow.sample.grids`), ``log_snr``, ``uniform`` in t, or increasing times in [0, 1]; then ``steps`` is
            not used. dopri5 has its own steps and only reports at these times. Runge-Kutta rules step over t: where
            sigma falls exponentially with it (VarianceExploding) they need the uniform grid, the others do not.
        seed: integer in [0, 2^64). The noise of a sample is bitwise the same for every ``n`` and ``batch_size``.
        x0: ``(n, *event)`` (tasks ``(T, n, *event)``), the state at the first time of the grid in place of the prior.
            Where it requires grad, the samples are differentiable.
        accuracy: tolerance of the field's weights, as in :class:`~nwflow.NWField`; None is its fastest pass.
        eta: share of the noise that each step renews, in [0, 1], for exact, 2m and 3m; 0 is the ODE.
        stop_at: bandwidth sigma / alpha at which to end, in data units; points are then the noisy x there.
        attribution: how many references to name per sample; 0 for none (neither is n_eff computed then).
        trajectory: keep x at every time.
        certificate: finish samples by one exact step as soon as it is certain where they end, with a bound of the error
            (:mod:`nwflow.kernel.certificate`). It holds for an :class:`~nwflow.NWField` of one support, with priors,
            duplicates, metrics and isotropic smoothing, and eta = 0; elsewhere it is off, and
            ``Samples.certificate.off`` says why. ``"require"`` raises there instead. False switches it off.
        batch_size: samples that run together; all when None. The field bounds its own memory, so this bounds the
            states.
        dtype, device: of the samples; those of ``x0``, else of the support. Half precision is computed as float32.
        tolerance: of dopri5, absolute and relative.
        progress: show a progress bar.
        callback: called as ``callback(k, t, x, D)`` once D (for a bare callable u) at the k-th time is known; the run
            ends there when it returns True. x and D must not be changed. Not with ``batch_size`` or dopri5.

    Raises:
        ValueError, TypeError: arguments that do not fit each other or the field, each named.
        ImportError: dopri5 without torchdiffeq.

    Example:
        >>> from nwflow import CondOT, NWField
        >>> field = NWField(torch.tensor([[-1.0], [1.0]]), CondOT())
        >>> samples = sample(field, 3, steps=10)
        >>> samples
        Samples(points (3, 1), method='3m', evaluations=8, seed=0, t=0 to 1)
        >>> samples.points.abs().flatten()
        tensor([1., 1., 1.])
    """
    if hasattr(field, "with_accuracy"):
        field = field.with_accuracy(accuracy)
    start = Start.of(field, n, x0, as_seed(seed), dtype, device)
    size = max(1, torch.Size(start.event_shape).numel())
    scales = Scales(1.0, 1.0) if start.path is None else scales_of(field, size)
    times = _times(start, steps, method, grid, scales, stop_at)
    at = [Node(t, 1.0, 1.0, 0.0, 0.0) for t in times] if start.path is None else nodes(start.path, times)
    if start.path is not None:
        check_resolved(start.path, at, scales)
    rule = _rule(method, eta, scales.c, start.path is None)
    if callback is not None and (rule is None or (batch_size is not None and batch_size < start.n)):
        raise ValueError("callback: expected a method with steps and all samples at once: no dopri5, no batch_size")
    if not isinstance(attribution, int) or attribution < 0:
        raise ValueError(f"attribution: expected a number of references, 0 for none, got {attribution!r}")
    if certificate not in (True, False, "require"):
        raise ValueError(f"certificate: expected True, False or 'require', got {certificate!r}")
    differentiable = torch.is_grad_enabled() and x0 is not None and x0.requires_grad
    off, required = why_off(bool(certificate), field, rule, eta, differentiable), certificate == "require"
    run = Run(start, at, rule, scales.c, tolerance, trajectory, attribution, callback, off, required)
    blocks = _blocks(start.n, batch_size)
    with torch.set_grad_enabled(differentiable), _bar(len(blocks) * (len(at) - 1), progress) as advance:
        parts = [run(block, advance) for block in blocks]
    return _samples(parts, at, start, method)


def _times(start: Start, steps: int, method: str, grid: Any, scales: Scales, stop_at: float | None) -> list[float]:
    """The times of a run, after checks on what depends on the method."""
    if method not in get_args(Method):
        raise ValueError(f"method: expected one of {get_args(Method)}, got {method!r}")
    cost = len(_RUNGE_KUTTA[method].c) if method in _RUNGE_KUTTA else 1
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < cost:
        raise ValueError(f"steps: expected an integer of at least {cost} evaluations for {method!r}, got {steps!r}")
    if start.path is None:
        if stop_at is not None or (isinstance(grid, str) and grid != "uniform"):
            raise ValueError(
                f"grid: expected 'uniform' or times, and no stop_at: a bare callable has no bandwidth; got {grid!r}"
            )
        count = steps // cost
        return [k / count for k in range(count)] + [1.0] if isinstance(grid, str) else given_times(grid)
    times = time_grid(start.path, steps // cost, grid, scales, stop_at)
    if start.x0 is None and times[0] != 0:
        raise ValueError(f"grid: expected times from 0 (noise), got {times[0]}; pass the state there as x0=")
    if method == "dopri5" and times[-1] == 1:  # ends where all have collapsed, whatever the grid
        low, high = start.path.bandwidth_range
        ends = float(start.path.time_at(min(max(scales.end, low), high)))
        times = times if ends <= times[-2] else [*times[:-1], ends, *times[-1:]] if ends < 1 else times
    return times


def _rule(method: str, eta: float, c: float, bare: bool) -> Callable[[], Rule] | None:
    """What makes the rule of a block of samples; None for dopri5."""
    if not 0 <= eta <= 1:
        raise ValueError(f"eta: expected a share in [0, 1], got {eta}")
    if eta and method not in _EXPONENTIAL:
        raise ValueError(f"eta: expected 0 with {method!r}; noise along the way needs one of {tuple(_EXPONENTIAL)}")
    if method in _EXPONENTIAL:
        if bare:
            raise ValueError(f"method: {method!r} needs a denoiser; a bare callable takes {(*_RUNGE_KUTTA, 'dopri5')}")
        order, correct = _EXPONENTIAL[method]
        return lambda: Exponential(order, correct, c, eta)
    return None if method == "dopri5" else lambda: RungeKutta(_RUNGE_KUTTA[method])


def _blocks(n: int, batch_size: int | None) -> list[range]:
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(f"batch_size: expected a positive integer or None, got {batch_size!r}")
    size = batch_size or n
    return [range(i, min(i + size, n)) for i in range(0, n, size)]


def _samples(parts: list[Outcome], at: list[Node], start: Start, method: str) -> Samples:
    """Blocks of samples as one."""
    axis, dtype, at = 0 if start.n_tasks is None else 1, start.dtype, at[: parts[0].reached]

    def joined(values: list[Any], axis: int = axis) -> Any:
        return values[0] if values[0] is None or len(values) == 1 else torch.cat(values, axis)

    def each(name: str, names: tuple[str, ...]) -> list[Any]:
        return [joined([getattr(getattr(part, name), field) for part in parts]) for field in names]

    named = parts[0].attribution
    if named is not None:
        named = Attribution(*each("attribution", ("indices", "weights", "captured")))
    certificate = Certificate(*each("certificate", ("time", "bound", "reference")), off=parts[0].certificate.off)
    whole = len(parts[0].states) == len(at)
    return Samples(
        points=joined([part.states[-1] for part in parts]).to(dtype),
        denoised=joined([part.denoised for part in parts]).to(dtype),
        attribution=named,
        n_eff=joined([part.n_eff for part in parts]),
        trajectory=joined([torch.stack(part.states) for part in parts], axis + 1).to(dtype) if whole else None,
        times=tuple(node.t for node in at),
        bandwidths=None if start.path is None else tuple(node.bandwidth for node in at),
        evaluations=max(part.evaluations for part in parts),
        field_evaluations=sum(part.field_evaluations for part in parts),
        certificate=certificate,
        method=method,
        seed=start.seed,
    )


@contextlib.contextmanager
def _bar(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar of ``total`` steps; gives what advances it."""
    if not shown:
        yield lambda steps: None
        return
    from rich.progress import Progress

    with Progress() as bar:
        task = bar.add_task("sampling", total=total)
        yield lambda steps: bar.advance(task, steps)
