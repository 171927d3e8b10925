"""Sampling against exact transport, closed forms, orders of convergence and invariances, in float64.

In one dimension the flow is monotone, so it carries the q-quantile of the noise to the q-quantile of p_t: an exact
solution for every path, found here by bisection, that owes nothing to the code under test.
"""

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from scipy import integrate
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nwflow.field import NWField
from nwflow.metric import FullMetric, Smoothing
from nwflow.paths import CondOT, Cosine, Path, VarianceExploding, VariancePreserving, reverse_time
from nwflow.sample import Guided, guide, log_prob, sample
from nwflow.sample.grids import LONGEST, Scales, nodes, time_grid
from nwflow.sample.noise import standard_normal
from nwflow.sample.steps import exponential_weights
from nwflow.subspace import SubspaceField
from nwflow.support import Support

PATHS = [CondOT(), CondOT(0.05), Cosine(), VariancePreserving(), VarianceExploding(0.01, 50.0)]
WRONG_TYPES = pytest.mark.skipif(
    os.environ.get("NWFLOW_TYPECHECK") == "1", reason="the check of annotations at run time refuses these calls first"
)
RUNGE_KUTTA = ["euler", "midpoint", "heun", "rk4"]
METHODS = ["3m", "2m", "exact", "euler", "midpoint", "heun", "rk4", "dopri5"]
PAIR = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)


@dataclass
class Dense:
    """The field of points ``(m, *event)`` by broadcasting, with only what a field must have; it records its times."""

    points: Tensor
    path: Path
    asked: list[float] = field(default_factory=list)

    @property
    def event_shape(self) -> tuple[int, ...]:
        return tuple(self.points.shape[1:])

    def prior(self, z: Tensor) -> Tensor:
        at = self.path(0.0)
        return float(at.alpha) * self.points.mean(0).to(z) + float(at.sigma) * z

    def denoise(self, x: Tensor, t: float) -> Tensor:
        self.asked.append(t)
        at = self.path(t)
        alpha, sigma = float(at.alpha), float(at.sigma)
        assert sigma > 0
        s = self.points.flatten(1).to(x)
        gaps = (x.reshape(len(x), 1, -1) - alpha * s).square().sum(-1)
        return (torch.softmax(-gaps / (2 * sigma**2), 1) @ s).reshape(x.shape)


def transported(points: Tensor, path: Path, x0: Tensor, t: float) -> Tensor:
    """x_t of the flow from x0 (``(n, 1)``) for equal weights on 1-D points, by bisection on distribution functions."""
    normal = torch.distributions.Normal(0.0, 1.0)

    def cdf(x: Tensor, t: float) -> Tensor:
        at = path(t)
        return normal.cdf((x - at.alpha * points.T) / at.sigma).mean(1, keepdim=True)

    q = cdf(x0, 0.0)
    low, high = torch.full_like(x0, -1e3), torch.full_like(x0, 1e3)
    for _ in range(80):
        middle = (low + high) / 2
        below = cdf(middle, t) < q
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def error(method: str, steps: int, grid: Any = "uniform", path: Path = CondOT(0.3)) -> float:  # noqa: B008
    x0 = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    points = torch.tensor([[-1.0], [0.2], [1.5]], dtype=torch.float64)
    found = sample(Dense(points, path), x0=x0, steps=steps, method=method, grid=grid, attribution=0)
    return float((found.points - transported(points, path, x0, found.times[-1])).abs().max())


# --- step rules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "cost", "order"),
    [("euler", 1, 1), ("exact", 1, 1), ("midpoint", 2, 2), ("heun", 2, 2), ("2m", 1, 3), ("3m", 1, 4), ("rk4", 4, 4)],
)
def test_rules_converge_with_their_order(method: str, cost: int, order: int) -> None:
    counts = [16, 32] if cost == 4 else [32, 64, 128]
    errors = [error(method, cost * k) for k in counts]
    slopes = [math.log2(a / b) for a, b in pairwise(errors)]
    assert slopes[-1] > order - 0.3, (errors, slopes)  # the next order's term still shows at these steps
    assert slopes[-1] < order + 0.8, (errors, slopes)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("3m", path) for path in PATHS),
        ("2m", PATHS[0]),
        ("2m", PATHS[4]),
        ("rk4", PATHS[0]),
        ("rk4", PATHS[3]),
        ("dopri5", PATHS[0]),
        ("dopri5", PATHS[4]),
    ],
    ids=repr,
)
def test_the_flow_carries_quantiles_to_quantiles(method: str, path: Path) -> None:
    if method == "dopri5":
        pytest.importorskip("torchdiffeq")
    x0 = torch.linspace(-1.5, 1.5, 7, dtype=torch.float64)[:, None] * path(0.0).sigma
    points = torch.tensor([[-1.0], [0.2], [1.5]], dtype=torch.float64)
    found = sample(Dense(points, path), x0=x0, steps=160, method=method, stop_at=0.3, tolerance=1e-8, attribution=0)
    exact = transported(points, path, x0, found.times[-1])
    assert torch.allclose(found.points, exact, atol=2e-5)  # rk4 on the variance-preserving path: 1e-5; the others 2e-6


@pytest.mark.parametrize("method", METHODS)
def test_samples_end_at_the_reference_that_owns_their_quantile(method: str) -> None:
    if method == "dopri5":
        pytest.importorskip("torchdiffeq")
    points = torch.tensor([[-2.0], [-1.0], [0.5], [3.0]], dtype=torch.float64)
    q = torch.tensor([0.05, 0.2, 0.3, 0.45, 0.55, 0.7, 0.8, 0.95], dtype=torch.float64)[:, None]
    x0 = torch.distributions.Normal(0.0, 1.0).icdf(q)
    found = sample(Dense(points, CondOT()), x0=x0, steps=80, method=method, attribution=0)
    assert torch.allclose(found.points, points[(q * 4).long().squeeze()], atol=1e-6)


@pytest.mark.parametrize(("steps", "end"), [(1, 0.0), (2, 0.2913126125), (10, 1.0)])
def test_the_last_uniform_euler_step_lands_on_the_denoiser(steps: int, end: float) -> None:
    x0 = torch.tensor([[0.3]], dtype=torch.float64)
    for target in (Dense(PAIR, CondOT()), NWField(PAIR, CondOT())):
        found = sample(target, x0=x0, steps=steps, method="euler", grid="uniform")
        assert found.points.item() == pytest.approx(end, abs=1e-9)
        assert torch.equal(found.points, found.denoised)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", [CondOT(), VariancePreserving(), VarianceExploding(0.01, 50.0)], ids=repr)
@pytest.mark.parametrize("grid", ["log_bandwidth", "log_snr", "uniform"])
def test_fields_are_asked_inside_the_path_alone(method: str, path: Path, grid: Any) -> None:
    if method == "dopri5":
        pytest.importorskip("torchdiffeq")
    asked = Dense(PAIR, path)
    found = sample(asked, x0=torch.full((1, 1), 0.3 * float(path(0.0).sigma)), steps=40, method=method, grid=grid)
    assert all(0 <= t <= 1 and float(path(t).sigma) > 0 for t in asked.asked)
    if grid == "uniform" or not isinstance(path, VarianceExploding) or method not in RUNGE_KUTTA:  # see `sample`
        assert found.points.item() == pytest.approx(1.0, abs=0.1 if float(path(1.0).sigma) else 1e-3)
    assert found.evaluations == len(asked.asked)
    if method != "dopri5":
        assert found.evaluations <= 40


def test_constant_denoisers_are_integrated_exactly() -> None:
    point = torch.tensor([[2.0, -1.0]], dtype=torch.float64)
    x0 = torch.tensor([[0.3, 0.7]], dtype=torch.float64)
    for path in PATHS:
        for method in ("exact", "2m", "3m"):
            found = sample(Dense(point, path), x0=x0, steps=7, method=method, stop_at=0.2)
            a, b = nodes(path, [0.0, found.times[-1]])
            exact = b.alpha * point + (b.sigma / a.sigma) * (x0 - a.alpha * point)
            assert torch.allclose(found.points, exact, atol=1e-12)


@pytest.mark.parametrize("kappa", [1.0, 0.7])
@pytest.mark.parametrize("path", [CondOT(), VariancePreserving()], ids=repr)
def test_weights_integrate_polynomials_of_the_clock(path: Path, kappa: float) -> None:
    a, b = nodes(path, [0.4, 0.55])
    c, knots = 0.7, [nodes(path, [t])[0].clock(0.7) for t in (0.4, 0.3, 0.15)]
    start, h = a.clock(c), b.clock(c) - a.clock(c)
    theta = -math.log(kappa) / h
    weights = exponential_weights(a, b, knots, c, kappa)
    for power in range(3):

        def integrand(v: float, power: int = power) -> float:
            r = math.exp(start + v) - c  # dy = D dr + theta r D ds, decayed over what is left of the step
            return b.sigma * math.exp(-theta * (h - v)) * ((r + c) + theta * r) * (start + v) ** power

        exact = integrate.quad(integrand, 0, h, epsabs=1e-13)[0]
        assert sum(w * s**power for w, s in zip(weights, knots)) == pytest.approx(exact, abs=1e-11)


def test_a_bare_callable_is_not_asked_at_the_end() -> None:
    asked: list[float] = []

    def v(x: Tensor, t: float) -> Tensor:  # dx/dt = cos t x, so x_1 = exp(sin 1) x_0
        asked.append(t)
        return math.cos(t) * x

    x0 = torch.ones(2, 3, dtype=torch.float64)
    bounds = {"euler": 0.02, "midpoint": 2e-4, "heun": 5e-4, "rk4": 2e-5, "dopri5": 1e-4}  # dopri5: its last Euler step
    for method, bound in bounds.items():
        if method == "dopri5":
            pytest.importorskip("torchdiffeq")
        found = sample(v, x0=x0, method=method, grid="uniform", steps=64)
        assert float((found.points - math.exp(math.sin(1.0))).abs().max()) < bound
        assert found.bandwidths is None
        assert found.attribution is None
    assert max(asked) < 1
    assert min(asked) == 0


def test_times_that_run_the_other_way_are_turned_round() -> None:
    here = NWField(PAIR, CondOT())
    x = torch.tensor([[0.5]], dtype=torch.float64)

    def theirs(x: Tensor, s: float) -> Tensor:  # s = 1 is noise
        return -here(x, 1 - s)

    assert theirs(x, 0.5).item() == pytest.approx(-0.5231883119, abs=1e-9)
    ours = reverse_time(theirs)
    turned = sample(ours, x0=x, method="heun", grid="uniform", steps=20)
    straight = sample(here, x0=x, method="heun", grid="uniform", steps=20, accuracy=1e-5)
    assert torch.allclose(turned.points, straight.points, atol=1e-9)


# --- grids ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS, ids=repr)
@pytest.mark.parametrize("steps", [1, 2, 3, 20])
@pytest.mark.parametrize("grid", ["log_bandwidth", "log_snr", "uniform"])
@pytest.mark.parametrize("stop_at", [None, 0.5])
def test_grids_run_from_noise_to_the_end(path: Path, steps: int, grid: Any, stop_at: float | None) -> None:
    times = time_grid(path, steps, grid, Scales(data=3.0, end=0.1), stop_at)
    assert len(times) == steps + 1
    assert times[0] == 0
    assert all(a < b for a, b in pairwise(times))
    assert times[-1] == (1 if stop_at is None else path.time_at(stop_at))


def test_the_default_grid_is_uniform_in_its_clock() -> None:
    scales = Scales(data=3.0, end=0.1)
    at = nodes(CondOT(), time_grid(CondOT(), 20, "log_bandwidth", scales))
    clock = torch.tensor([node.clock(scales.c) for node in at[:-1]], dtype=torch.float64)
    assert torch.allclose(clock.diff(), clock.diff()[0].expand(19), rtol=1e-9)
    assert at[-2].bandwidth == pytest.approx(0.1, rel=1e-9)
    few = nodes(CondOT(), time_grid(CondOT(), 5, "log_bandwidth", scales))  # ends early: no step is longer than this
    assert few[2].clock(scales.c) - few[1].clock(scales.c) == pytest.approx(LONGEST, rel=1e-9)
    # below the scale of the data it is uniform in log h: there r >> c
    fine = [node.bandwidth for node in nodes(CondOT(), time_grid(CondOT(), 400, "log_bandwidth", Scales(3.0, 1e-3)))]
    assert fine[-2] / fine[-3] == pytest.approx(fine[-3] / fine[-4], rel=1e-3)


def test_the_default_grid_follows_the_units_of_the_data(randn: Callable[..., Tensor]) -> None:
    points = randn(50, 4)
    one, thousand = (sample(NWField(s * points), 1, steps=10).bandwidths for s in (1.0, 1000.0))
    assert one is not None and thousand is not None
    assert torch.allclose(1000 * torch.tensor(one[1:]), torch.tensor(thousand[1:]), rtol=1e-6)


def test_log_snr_is_uniform_after_the_first_jump() -> None:
    at = nodes(CondOT(), time_grid(CondOT(), 20, "log_snr", Scales(data=3.0, end=0.1)))
    logs = torch.tensor([math.log(node.r) for node in at[1:-1]], dtype=torch.float64)
    assert torch.allclose(logs.diff(), logs.diff()[0].expand(18), rtol=1e-9)


def test_given_times_are_taken_as_they_are() -> None:
    times = [0.0, 0.2, 0.7, 1.0]
    for grid in (times, tuple(times), torch.tensor(times, dtype=torch.float64)):
        assert sample(Dense(PAIR, CondOT()), 2, grid=grid).times == tuple(times)
    late = sample(Dense(PAIR, CondOT()), x0=torch.zeros(1, 1), grid=[0.5, 0.9])
    assert late.times == (0.5, 0.9)


def test_smoothing_survives_the_last_step() -> None:
    h0 = 0.05  # at 16 dimensions far below the distance of the points, which alone would end the grid too early
    points = torch.stack([torch.zeros(16, dtype=torch.float64), torch.full((16,), 4.0, dtype=torch.float64)])
    found = sample(NWField(points, CondOT(), smoothing=h0), 400, steps=60)
    nearest = points[(found.points.mean(1) > 2).long()]
    spread = (found.points - nearest).square().mean().sqrt().item()
    assert spread == pytest.approx(h0, rel=0.05)  # 6400 draws: 0.9 % at one standard error, and 2 % are left at h0/5


# --- noise ----------------------------------------------------------------------------------------------------------


def test_noise_depends_on_seed_task_sample_and_step_alone() -> None:
    whole = standard_normal((2, 3), range(6), seed=5, step=2, n_tasks=3)
    for task in range(3):
        for i in range(6):
            assert torch.equal(
                standard_normal((2, 3), range(i, i + 1), seed=5, step=2, n_tasks=task + 1)[task, 0], whole[task, i]
            )
    assert torch.equal(standard_normal((2, 3), range(6), seed=5, step=2), whole[0])
    streams = [whole, standard_normal((2, 3), range(6), seed=6, step=2, n_tasks=3)]
    streams.append(standard_normal((2, 3), range(6), seed=5, step=3, n_tasks=3))
    assert torch.cat([s.flatten() for s in streams]).unique().numel() == 3 * whole.numel()


def test_noise_is_standard_normal_within_and_across_samples() -> None:
    n = 4000
    z = standard_normal((4,), range(n), seed=1, dtype=torch.float64)
    assert float(z.mean(0).abs().max()) < 4 / math.sqrt(n)  # four standard errors
    assert float((z.T @ z / n - torch.eye(4)).abs().max()) < 4 * math.sqrt(2 / n)
    neighbours = (z[1:] * z[:-1]).mean(0)
    assert float(neighbours.abs().max()) < 4 / math.sqrt(n)


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_samples_do_not_depend_on_their_number_or_on_blocks(eta: float, randn: Callable[..., Tensor]) -> None:
    target = NWField(randn(30, 3), CondOT())
    many = sample(target, 9, steps=12, seed=3, eta=eta, trajectory=True)
    few = sample(target, 4, steps=12, seed=3, eta=eta, trajectory=True)
    blocks = sample(target, 9, steps=12, seed=3, eta=eta, trajectory=True, batch_size=2)
    assert many.trajectory is not None and few.trajectory is not None and blocks.trajectory is not None
    assert torch.equal(many.trajectory[0, :4], few.trajectory[0])
    assert torch.equal(many.trajectory[0], blocks.trajectory[0])
    assert torch.allclose(many.points[:4], few.points, atol=1e-6)
    assert torch.allclose(many.trajectory, blocks.trajectory, atol=1e-6)
    assert blocks.attribution is not None and many.attribution is not None and blocks.n_eff is not None
    assert torch.equal(blocks.attribution.indices, many.attribution.indices)
    assert blocks.n_eff.shape == (9,)
    assert blocks.evaluations == many.evaluations <= 12
    assert blocks.field_evaluations == many.field_evaluations <= 9 * 12
    assert not torch.equal(sample(target, 4, steps=12, seed=4).points, few.points)


def test_one_stochastic_step_is_the_formula() -> None:
    target, eta, (a, b) = Dense(PAIR, CondOT()), 0.6, nodes(CondOT(), [0.3, 0.5])
    x = torch.tensor([[0.4], [-0.2]], dtype=torch.float64)
    found = sample(target, x0=x, grid=[0.3, 0.5], method="exact", eta=eta, seed=9)
    d, z = target.denoise(x, 0.3), standard_normal((1,), range(2), seed=9, step=1, dtype=torch.float64)
    nu = eta * b.sigma * math.sqrt(1 - (b.bandwidth / a.bandwidth) ** 2)
    eps = (x - a.alpha * d) / a.sigma
    assert torch.allclose(found.points, b.alpha * d + math.sqrt(b.sigma**2 - nu**2) * eps + nu * z, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "eta", "path"),
    [
        ("exact", 0.5, CondOT(0.3)),
        ("2m", 1.0, VariancePreserving()),
        ("3m", 0.5, VariancePreserving()),
        ("3m", 1.0, CondOT(0.3)),
    ],
    ids=repr,
)
def test_renewed_noise_keeps_the_marginal(method: str, eta: float, path: Path) -> None:
    points, n, h = torch.tensor([[-1.0], [0.2], [1.5]], dtype=torch.float64), 2000, 0.4
    target = Dense(points, path)
    found = sample(
        target, n, steps=120 if method == "exact" else 40, method=method, eta=eta, stop_at=h, dtype=torch.float64
    )
    at = path(found.times[-1])
    centred = (found.points.sort(0).values - at.alpha * points.T) / at.sigma
    cdf = torch.distributions.Normal(0.0, 1.0).cdf(centred).mean(1)
    gap = float((cdf - (torch.arange(n, dtype=torch.float64) + 0.5) / n).abs().max())
    assert gap < 1.63 / math.sqrt(n)  # Kolmogorov-Smirnov at the 1 % level; seeds are fixed


def test_noise_has_the_colour_of_the_metric() -> None:
    precision = torch.tensor([[2.0, 0.6], [0.6, 0.5]], dtype=torch.float64)
    target = NWField(torch.zeros(1, 2, dtype=torch.float64), CondOT(0.5), metric=FullMetric(precision))
    n = 4000
    for eta in (0.0, 1.0):  # one point at 0: x_1 ~ N(0, sigma_1^2 M^-1), from the prior alone or renewed on the way
        x = sample(target, n, steps=6, eta=eta).points / 0.5
        assert torch.allclose(x.T @ x / n, precision.inverse(), atol=4 * math.sqrt(2 / n) * 3.2)  # its largest entry


# --- prior ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [VariancePreserving(), VarianceExploding(0.01, 30.0), CondOT()], ids=repr)
def test_shifted_data_keep_their_shares(path: Path) -> None:
    n = 1500
    points = torch.tensor([[99.0], [101.0]], dtype=torch.float64)
    found = sample(NWField(points, path), n, steps=40)
    assert float((found.points - 100).abs().sub(1).abs().max()) < 0.06  # sigma_1 = 0.01 of VE, at six deviations
    share = float((found.points > 100).double().mean())
    assert abs(share - 0.5) < 4 * 0.5 / math.sqrt(n)  # a zero-mean start gives 0.74 for VP and 1.0 or 0.0 for VE


# --- what is returned -----------------------------------------------------------------------------------------------


def test_attribution_names_original_rows_before_the_end(randn: Callable[..., Tensor]) -> None:
    support = Support(randn(20, 2), labels=[i % 2 for i in range(20)])
    target = NWField(support, CondOT()).given(labels=[1])
    found = sample(target, 8, steps=40, attribution=3)
    assert found.attribution is not None and found.n_eff is not None
    assert found.attribution.indices.shape == found.attribution.weights.shape == (8, 3)
    assert (found.attribution.indices % 2 == 1).all()
    assert torch.allclose(support.points[found.attribution.indices[:, 0]], found.points, atol=1e-3)
    assert torch.allclose(found.n_eff, torch.ones(8, dtype=torch.float64), atol=1e-3)
    coarse = sample(target, 8, steps=1, attribution=3)  # evaluated at pure noise, where all weights are equal
    assert coarse.n_eff is not None
    assert torch.allclose(coarse.n_eff, torch.full((8,), 10.0, dtype=torch.float64), rtol=1e-3)
    assert sample(target, 2, steps=5, attribution=0).n_eff is None


def test_trajectories_start_at_the_prior_and_end_at_the_points() -> None:
    found = sample(Dense(PAIR, CondOT()), 5, steps=8, trajectory=True, dtype=torch.float64)
    assert found.trajectory is not None and found.bandwidths is not None
    assert found.trajectory.shape == (9, 5, 1)
    assert len(found.times) == len(found.bandwidths) == 9
    assert torch.equal(found.trajectory[0], standard_normal((1,), range(5), seed=0, dtype=torch.float64))
    assert torch.equal(found.trajectory[-1], found.points)
    again = sample(Dense(PAIR, CondOT()), 5, steps=8, dtype=torch.float64)
    assert torch.equal(again.points, found.points)
    assert again.trajectory is None


def test_dopri5_reports_at_the_times_of_the_grid() -> None:
    pytest.importorskip("torchdiffeq")
    x0 = torch.linspace(-1, 1, 6, dtype=torch.float64)[:, None]  # not 0, where the flow stays
    found = sample(Dense(PAIR, CondOT()), x0=x0, method="dopri5", steps=6, trajectory=True, tolerance=1e-9)
    assert found.trajectory is not None
    assert len(found.trajectory) == len(found.times)
    for t, x in zip(found.times[:-1], found.trajectory):
        assert torch.allclose(x, transported(PAIR, CondOT(), x0, t), atol=1e-6)


def test_early_stop_gives_the_state_at_that_bandwidth() -> None:
    x0 = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    found = sample(Dense(PAIR, CondOT()), x0=x0, stop_at=0.7)
    assert found.bandwidths is not None
    assert found.bandwidths[-1] == pytest.approx(0.7)
    assert torch.allclose(found.points, transported(PAIR, CondOT(), x0, found.times[-1]), atol=1e-5)


def test_a_callback_sees_every_step_and_may_stop() -> None:
    seen = []

    def watch(k: int, t: float, x: Tensor, d: Tensor) -> bool:
        seen.append((k, t, x, d))
        return k == 3

    found = sample(Dense(PAIR, CondOT()), 4, steps=10, callback=watch, trajectory=True)
    assert [k for k, *_ in seen] == [0, 1, 2, 3]
    assert tuple(t for _, t, *_ in seen) == found.times
    assert torch.equal(found.points, seen[-1][2])
    assert torch.equal(found.denoised, seen[-1][3])
    assert found.trajectory is not None
    assert len(found.trajectory) == 4


def test_an_interrupted_run_leaves_gradients_and_screen_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(Dense(PAIR, CondOT()), 4, steps=10, callback=interrupt, progress=True)
    assert torch.is_grad_enabled()
    sample(Dense(PAIR, CondOT()), 4, steps=10, progress=True)
    assert "100%" in capsys.readouterr().out


def test_tasks_are_sampled_as_each_alone(randn: Callable[..., Tensor]) -> None:
    sets = [randn(5, 2), randn(9, 2) + 3, randn(2, 2) - 3]
    together = sample(
        NWField(Support.batch(sets), CondOT(0.1)), 6, grid="uniform", eta=0.3, trajectory=True, batch_size=4
    )
    assert together.points.shape == (3, 6, 2)
    assert together.trajectory is not None and together.attribution is not None and together.n_eff is not None
    assert together.trajectory.shape == (41, 3, 6, 2)
    assert together.attribution.indices.shape == (3, 6, 5)
    assert together.n_eff.shape == (3, 6)
    assert together.certificate.off is not None and together.field_evaluations == 3 * 6 * 40
    alone = sample(NWField(sets[0], CondOT(0.1)), 6, grid="uniform", eta=0.3)
    assert torch.allclose(together.points[0], alone.points, atol=1e-6)
    x0 = randn(3, 2, 2)
    given = sample(NWField(Support.batch(sets), CondOT(0.1)), x0=x0, grid="uniform")
    for i, s in enumerate(sets):
        one = sample(NWField(s, CondOT(0.1)), x0=x0[i], grid="uniform", certificate=False)
        assert torch.allclose(given.points[i], one.points, atol=1e-6)


@pytest.mark.parametrize("event", [(), (3,), (2, 3, 1)])
def test_events_of_any_shape(event: tuple[int, ...], randn: Callable[..., Tensor]) -> None:
    points = randn(6, *event)
    found = sample(NWField(points), 4)
    assert found.points.shape == (4, *event)
    assert found.attribution is not None
    assert torch.allclose(found.points, points[found.attribution.indices[:, 0]], atol=1e-3)  # weights within 1e-3


# --- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_samples_have_the_dtype_of_the_support(dtype: torch.dtype) -> None:
    found = sample(NWField(PAIR.to(dtype), CondOT()), 4)
    assert found.points.dtype == dtype
    assert torch.equal(found.points.abs(), torch.ones(4, 1, dtype=dtype))
    reference = sample(NWField(PAIR, CondOT()), 4)
    assert torch.equal(found.points.double(), reference.points)
    assert sample(NWField(PAIR.to(dtype)), 2, dtype=torch.float32).points.dtype == torch.float32


class Recorder(TorchDispatchMode):
    """Fails on any float64 tensor that is not on the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(value, Tensor) and value.device.type != "cpu":
                assert value.dtype != torch.float64, func
        return out


@pytest.mark.parametrize("method", METHODS[:-1])
def test_no_float64_reaches_a_device(method: str) -> None:
    asked = []

    class Elsewhere(Dense):
        def denoise(self, x: Tensor, t: float) -> Tensor:
            asked.append((x.dtype, x.device.type, type(t)))
            return 0.5 * x

    with Recorder():
        eta = 0.5 if method in ("exact", "2m", "3m") else 0.0
        found = sample(Elsewhere(torch.zeros(3, 2), CondOT()), 4, steps=8, method=method, device="meta", eta=eta)
    assert set(asked) == {(torch.float32, "meta", float)}
    assert found.points.dtype == torch.float32


def test_samples_are_differentiable_in_their_start() -> None:
    points = torch.tensor([[-1.0], [0.2], [1.5]], dtype=torch.float64)
    x0 = torch.tensor([[0.3]], dtype=torch.float64, requires_grad=True)

    def end(x: Tensor) -> Tensor:
        return sample(NWField(points, CondOT(0.3)), x0=x, steps=30, accuracy=1e-5, attribution=0).points

    (slope,) = torch.autograd.grad(end(x0).sum(), x0)
    step = 1e-4
    numeric = (end(x0.detach() + step) - end(x0.detach() - step)) / (2 * step)
    assert torch.allclose(slope, numeric, rtol=1e-5)
    assert not end(x0.detach()).requires_grad


# --- guidance -------------------------------------------------------------------------------------------------------


def test_guidance_joins_velocities(randn: Callable[..., Tensor]) -> None:
    u0, u1 = NWField(randn(8, 2), CondOT(0.1)), NWField(randn(5, 2), CondOT(0.1))
    x, t = randn(4, 2), 0.6
    for w in (0.0, 0.4, 1.0, 3.0):
        joined = guide(u0, u1, w)
        exact = u0(x, t) + w * (u1(x, t) - u0(x, t))
        assert torch.allclose(joined(x, t), exact, atol=1e-12)
        assert torch.allclose(joined.denoise(x, t), u0.denoise(x, t).lerp(u1.denoise(x, t), w), atol=1e-12)
    assert torch.equal(guide(u0, u1, 0.0).denoise(x, t), u0.denoise(x, t))
    assert torch.equal(guide(u0, u1, 1.0).denoise(x, t), u1.denoise(x, t))


def test_guided_samples_at_the_ends_of_the_weight(randn: Callable[..., Tensor]) -> None:
    u0, u1 = NWField(randn(8, 2), CondOT(0.1)), NWField(randn(5, 2), CondOT(0.1))
    grid = sample(u1, 1, steps=20).times
    only0, only1 = sample(u0, 5, grid=grid), sample(u1, 5, grid=grid)
    assert torch.allclose(sample(guide(u0, u1, 1.0), 5, steps=20).points, only1.points, atol=1e-9)
    guided = sample(guide(u0, u1, 0.0), 5, grid=grid)
    assert torch.allclose(guided.points, only0.points, atol=2e-2)  # the clocks differ: those of the step's own error
    assert guided.attribution is not None  # of the conditional field


def test_guidance_refuses_fields_that_do_not_fit(randn: Callable[..., Tensor]) -> None:
    one = NWField(randn(3, 2), CondOT(0.1))
    with pytest.raises(ValueError, match="path of field0"):
        guide(one, NWField(randn(3, 2), CondOT(0.2)), 1.0)
    with pytest.raises(ValueError, match="event shape of field0"):
        guide(one, NWField(randn(3, 3), CondOT(0.1)), 1.0)
    with pytest.raises(AttributeError, match="divergence"):
        guide(one, one, 2.0).divergence  # noqa: B018
    assert isinstance(guide(one, one, 2.0).with_accuracy(None), Guided)


# --- likelihood -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", [CondOT(0.05), Cosine(), VariancePreserving(), VarianceExploding(0.05, 20.0)], ids=repr
)
def test_log_prob_converges_to_the_exact_density(path: Path, randn: Callable[..., Tensor]) -> None:
    target = NWField(randn(12, 3) + 5, path)
    t = 1.0 if float(path(1.0).sigma) else path.time_at(0.1)
    clean = target.points[:5]
    at = path(t)
    x = at.alpha * clean + at.sigma * randn(5, 3)
    exact = target.log_density(x, t)
    coarse, fine = (float((log_prob(target, x, t=t, steps=k) - exact).abs().max()) for k in (160, 320))
    assert fine < 2e-3
    assert math.log2(coarse / fine) > 3.3  # fourth order; the collapse is barely resolved by the coarser one


def test_log_prob_by_dopri5() -> None:
    pytest.importorskip("torchdiffeq")
    target = NWField(PAIR, CondOT(0.1))
    x = torch.tensor([[0.9], [-1.2], [0.1]], dtype=torch.float64)
    found = log_prob(target, x, method="dopri5", tolerance=1e-7)
    assert torch.allclose(found, target.log_density(x, 1.0), atol=1e-5)


@pytest.mark.parametrize("path", [CondOT(), Cosine()], ids=repr)
def test_log_prob_of_smoothed_supports_reaches_the_data(path: Path, randn: Callable[..., Tensor]) -> None:
    target = NWField(randn(6, 2), path, smoothing=Smoothing.diagonal(torch.tensor([0.09, 0.25])))
    x = randn(5, 2)
    assert torch.allclose(log_prob(target, x), target.log_density(x, 1.0), atol=1e-4)


def test_log_prob_with_a_metric_tasks_and_float32(randn: Callable[..., Tensor]) -> None:
    metric = FullMetric(torch.tensor([[2.0, 0.3], [0.3, 1.0]], dtype=torch.float64))
    target, x = NWField(randn(6, 2), CondOT(0.2), metric=metric), randn(5, 2)
    assert torch.allclose(log_prob(target, x), target.log_density(x, 1.0), atol=1e-4)
    tasks, x = NWField(Support.batch([randn(6, 2), randn(3, 2)]), CondOT(0.2)), randn(2, 5, 2)
    assert torch.allclose(log_prob(tasks, x), tasks.log_density(x, 1.0), atol=1e-4)
    half = NWField(PAIR.half(), CondOT(0.2))
    found = log_prob(half, torch.tensor([[0.9]]).half())
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(half.log_density(torch.tensor([[0.9]]).half(), 1.0).item(), abs=1e-3)


@WRONG_TYPES
def test_log_prob_refuses_where_there_is_no_density() -> None:
    with pytest.raises(ValueError, match="sigma = 0"):
        log_prob(NWField(PAIR, CondOT()), PAIR)
    with pytest.raises(ValueError, match="t: expected a time in"):
        log_prob(NWField(PAIR, CondOT(0.1)), PAIR, t=0.0)
    with pytest.raises(ValueError, match="steps: expected at least"):
        log_prob(NWField(PAIR, CondOT(0.1)), PAIR, steps=3)
    with pytest.raises(ValueError, match="method: expected one of"):
        log_prob(NWField(PAIR, CondOT(0.1)), PAIR, method="euler")  # pyright: ignore[reportArgumentType]


# --- refusals -------------------------------------------------------------------------------------------------------


def linear(x: Tensor, t: float) -> Tensor:
    return x


@WRONG_TYPES
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": None}, "n: expected a number of samples, or x0="),
        ({"n": 0}, "n: expected a positive integer, got 0"),
        ({"n": 2.5}, "n: expected a positive integer, got 2.5"),
        ({"n": 3, "x0": torch.zeros(2, 1)}, "n: expected the number of states in x0, 2"),
        ({"n": None, "x0": torch.zeros(2, 2)}, r"x0: expected shape \(n, \*\(1,\)\), got \(2, 2\)"),
        ({"steps": 0}, "steps: expected an integer of at least 1"),
        ({"steps": 3, "method": "rk4"}, "steps: expected an integer of at least 4 evaluations for 'rk4', got 3"),
        ({"method": "ddim"}, "method: expected one of .*got 'ddim'"),
        ({"grid": "karras"}, "grid: expected one of .*got 'karras'"),
        ({"grid": [0.0]}, "grid: expected at least two times"),
        ({"grid": [0.0, 0.5, 0.5]}, "grid: expected increasing times .*got 0.5 before 0.5"),
        ({"grid": [0.0, 1.5]}, r"grid: expected times in \[0, 1\]"),
        ({"grid": [0.0, float("nan")]}, r"grid: expected times in \[0, 1\]"),
        ({"grid": [0.1, 1.0]}, "grid: expected times from 0"),
        ({"grid": [0.0, 1.0], "stop_at": 0.1}, "stop_at: a given grid ends"),
        ({"stop_at": 0.0}, "stop_at: expected a bandwidth above 0"),
        ({"stop_at": math.inf}, "stop_at: expected a bandwidth above 0"),
        ({"stop_at": -1.0}, "stop_at: expected a bandwidth above 0"),
        ({"seed": -1}, r"seed: expected an integer in \[0, 2\^64\), got -1"),
        ({"seed": 2**64}, "seed: expected an integer in"),
        ({"eta": 1.5}, r"eta: expected a share in \[0, 1\], got 1.5"),
        ({"eta": 0.5, "method": "heun"}, "eta: expected 0 with 'heun'"),
        ({"batch_size": 0}, "batch_size: expected a positive integer or None, got 0"),
        ({"attribution": -1}, "attribution: expected a number of references"),
        ({"batch_size": 1, "callback": print}, "callback: expected a method with steps and all samples at once"),
        ({"accuracy": 2.0}, "accuracy: expected None or a tolerance"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample(NWField(PAIR, CondOT()), **{"n": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x0": None, "n": 3}, "x0: expected where to start, as a bare callable has no prior"),
        ({"method": "3m"}, "method: '3m' needs a denoiser; a bare callable takes"),
        ({"grid": "log_bandwidth"}, "grid: expected 'uniform' or times"),
        ({"stop_at": 0.5}, "no stop_at: a bare callable has no bandwidth"),
    ],
)
def test_what_a_bare_callable_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"x0": torch.zeros(2, 1), "method": "heun", "grid": "uniform"}
    with pytest.raises(ValueError, match=message):
        sample(linear, **{**settings, **changes})


@WRONG_TYPES
def test_wrong_kinds_are_refused() -> None:
    with pytest.raises(TypeError, match="field: expected a field or a callable"):
        sample(3, 2)
    with pytest.raises(TypeError, match="x0: expected a floating tensor, got torch.int64"):
        sample(linear, x0=torch.zeros(2, 1, dtype=torch.long), method="heun", grid="uniform")
    with pytest.raises(TypeError, match="seed: expected an integer, got float"):
        sample(NWField(PAIR), 2, seed=0.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="dtype: expected a floating dtype"):
        sample(NWField(PAIR), 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"field: expected a value of the shape of x, \(2, 1\), got \(2,\)"):
        sample(lambda x, t: x[:, 0], x0=torch.zeros(2, 1), method="euler", grid="uniform")


def test_a_missing_solver_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(ImportError, match=r"method 'dopri5' needs torchdiffeq: pip install 'nwflow\[ode\]'"):
        sample(NWField(PAIR), 2, method="dopri5")


@pytest.mark.parametrize("value", [1.0, 0.1, 1e8])
@pytest.mark.parametrize("method", ["3m", "heun", "dopri5"])
def test_equal_references_have_no_scale_and_all_samples_land_on_them(value: float, method: Any) -> None:
    points = torch.full((30, 4, 4), value, dtype=torch.float64)  # the mean of 30 equal numbers is rounded
    for model in (NWField(points, CondOT()), SubspaceField.patches(Support(points), CondOT(), size=3)):
        assert model.length_scales() == (0.0, 0.0)
        torch.testing.assert_close(sample(model, 2, steps=8, method=method).points, points[:2])


@pytest.mark.parametrize("method", ["3m", "euler", "heun", "dopri5"])
def test_references_of_a_scale_that_times_do_not_resolve_are_refused(method: Any) -> None:
    references = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    assert (
        sample(NWField(references * 1e-12, CondOT()), 3, method=method)
        .points.abs()
        .mul(1e12)
        .allclose(torch.ones(3, 1, dtype=torch.float64))
    )
    for tiny in (1e-16, 1e-30):
        with pytest.raises(ValueError, match="support: expected references of a scale that times in float64 resolve"):
            sample(NWField(references * tiny, CondOT()), 3, method=method)
    with pytest.raises(ValueError, match="support: expected references whose squares do not overflow"):
        sample(NWField(references * 1e200, CondOT()), 3, method=method)
