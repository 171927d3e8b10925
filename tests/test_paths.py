"""Gaussian paths against high-precision formulas, their own derivatives, their inverses and their conversions."""

import math
from types import SimpleNamespace

import mpmath
import numpy as np
import pytest
import torch

from nwflow.paths import (
    CondOT,
    Cosine,
    DiscretePath,
    Schedule,
    VarianceExploding,
    VariancePreserving,
    broadcast_schedule,
    convert,
    from_denoiser,
    from_diffusers,
    reverse_time,
    to_denoiser,
)

# PyTorch's own forward-mode rules load torch.jit.script, which warns that it is deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

EPS = torch.finfo(torch.float64).eps
KINDS = ("denoiser", "noise", "score", "velocity")


def ddpm_scheduler(steps: int = 1000) -> SimpleNamespace:
    """Scaled-linear betas in float32, as Stable Diffusion 1 has them."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, steps) ** 2
    return SimpleNamespace(alphas_cumprod=torch.cumprod(1 - betas, 0), config={"num_train_timesteps": steps})


def flow_scheduler(shift: float = 3.0, steps: int = 1000) -> SimpleNamespace:
    s = torch.linspace(1, 1 / steps, steps, dtype=torch.float64)
    sigmas = torch.cat([shift * s / (1 + (shift - 1) * s), torch.zeros(1, dtype=torch.float64)])
    return SimpleNamespace(sigmas=sigmas, config=SimpleNamespace(num_train_timesteps=steps, shift=shift))


CONTINUOUS = [CondOT(), CondOT(0.01), VariancePreserving(), Cosine(), VarianceExploding()]
PATHS = [*CONTINUOUS, from_diffusers(ddpm_scheduler()), from_diffusers(flow_scheduler())]
every_path = pytest.mark.parametrize("path", PATHS, ids=repr)


def interior_times(n: int = 7) -> torch.Tensor:
    return 0.03 + 0.94 * torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def tensors(at: Schedule) -> tuple[torch.Tensor, ...]:
    return at.alpha, at.sigma, at.d_alpha, at.d_sigma


# --- values ---------------------------------------------------------------------------------------------------------


def exact(path, t: float):
    """alpha and sigma as mpmath functions of time, from the definitions."""
    if isinstance(path, CondOT):
        return (lambda u: u), (lambda u: (1 - u) + mpmath.mpf(path.sigma_min) * u)
    if isinstance(path, Cosine):
        return (lambda u: mpmath.sin(mpmath.pi * u / 2)), (lambda u: mpmath.cos(mpmath.pi * u / 2))
    if isinstance(path, VarianceExploding):
        low, high = mpmath.mpf(path.sigma_min), mpmath.mpf(path.sigma_max)
        return (lambda u: mpmath.mpf(1)), (lambda u: high ** (1 - u) * low**u)
    low, high = mpmath.mpf(path.beta_min), mpmath.mpf(path.beta_max)

    def integral(u):
        return low * (1 - u) + (high - low) * (1 - u) ** 2 / 2

    return (lambda u: mpmath.exp(-integral(u) / 2)), (lambda u: mpmath.sqrt(1 - mpmath.exp(-integral(u))))


@pytest.mark.parametrize("path", CONTINUOUS, ids=repr)
@pytest.mark.parametrize("t", [1e-12, 1e-3, 0.3, 0.5, 0.9, 1 - 1e-6, 1 - 1e-12])
def test_schedule_equals_its_formula_at_50_digits(path, t):
    at = path(t)
    with mpmath.workdps(50):
        alpha, sigma = exact(path, t)
        want = alpha(mpmath.mpf(t)), sigma(mpmath.mpf(t)), mpmath.diff(alpha, t), mpmath.diff(sigma, t)
    # 16 roundings: exp and pow pass the rounding of their argument on, multiplied by arguments up to 10
    for got, value in zip(tensors(at), want, strict=True):
        assert got.item() == pytest.approx(float(value), rel=16 * EPS, abs=1e-300)


@every_path
def test_derivatives_are_those_of_autograd(path):
    t = interior_times().requires_grad_()
    at = path(t)
    (d_sigma,) = torch.autograd.grad(at.sigma.sum(), t, retain_graph=True)
    torch.testing.assert_close(at.d_sigma, d_sigma, rtol=1e-12, atol=0)
    if at.alpha.requires_grad:
        (d_alpha,) = torch.autograd.grad(at.alpha.sum(), t)
        torch.testing.assert_close(at.d_alpha, d_alpha, rtol=1e-12, atol=0)
    else:
        assert (at.d_alpha == 0).all()


@every_path
def test_schedule_is_twice_differentiable_in_time(path):
    t = interior_times(3).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: tuple(v for v in tensors(path(t)) if v.requires_grad), t)
    assert torch.autograd.gradgradcheck(lambda t: path(t).sigma, t)


@every_path
@pytest.mark.parametrize("end", [0.0, 1.0])
def test_ends_are_finite_and_not_negative(path, end):
    near = torch.tensor([end, abs(end - 1e-16), abs(end - 1e-9)], dtype=torch.float64)
    for t in (end, near, near.float()):
        at = path(t)
        assert (at.alpha >= 0).all() and (at.sigma >= 0).all()
        assert at.alpha.isfinite().all() and at.sigma.isfinite().all() and at.d_alpha.isfinite().all()
        vanishing = isinstance(path, VariancePreserving) & (at.sigma == 0)  # there sigma falls like a square root
        assert torch.equal(at.d_sigma.isinf(), torch.as_tensor(vanishing).expand_as(at.d_sigma))


@pytest.mark.parametrize(
    ("path", "t", "alpha", "sigma"),
    [
        (CondOT(), 0.0, 0.0, 1.0),
        (CondOT(), 1.0, 1.0, 0.0),
        (Cosine(), 0.0, 0.0, 1.0),
        (Cosine(), 1.0, 1.0, 0.0),
        (VariancePreserving(), 1.0, 1.0, 0.0),
        (VarianceExploding(0.017, 81.3), 0.0, 1.0, 81.3),
        (VarianceExploding(0.017, 81.3), 1.0, 1.0, 0.017),
        (from_diffusers(flow_scheduler()), 0.0, 0.0, 1.0),
        (from_diffusers(flow_scheduler()), 1.0, 1.0, 0.0),
    ],
    ids=repr,
)
def test_ends_are_exact(path, t, alpha, sigma):
    for time in (t, int(t), torch.tensor(t), torch.full((5, 3), t, dtype=torch.float64)):
        at = path(time)
        assert (at.alpha == alpha).all() and (at.sigma == sigma).all()


@pytest.mark.parametrize("sigma_min", [0.0, 1e-8, 1e-3, 0.01, 0.1, 1 / 3, 0.7])
def test_straight_path_ends_at_sigma_min_exactly(sigma_min):
    assert CondOT(sigma_min)(1.0).sigma.item() == sigma_min
    assert CondOT(sigma_min)(torch.ones(9)).sigma.eq(sigma_min).all()


def test_negative_zero_is_the_noise_end():
    assert CondOT()(-0.0).bandwidth.item() == math.inf


@every_path
def test_bandwidth_decreases_strictly_and_log_snr_follows(path):
    at = path(torch.linspace(0, 1, 3001, dtype=torch.float64))
    assert (at.bandwidth.diff()[1:] < 0).all() and at.bandwidth[0] > at.bandwidth[1]
    torch.testing.assert_close(at.log_snr, -2 * at.bandwidth.log(), rtol=1e-12, atol=1e-12)
    assert path.bandwidth_range == (at.bandwidth[-1].item(), at.bandwidth[0].item())
    assert path.starts_at_noise == (at.alpha[0].item() == 0) == math.isinf(path.bandwidth_range[1])


@pytest.mark.parametrize("path", CONTINUOUS, ids=repr)
def test_paths_are_values(path):
    assert eval(repr(path)) == path and hash(eval(repr(path))) == hash(path)
    assert repr(CondOT(sigma_min=0.01)) == "CondOT(sigma_min=0.01)"


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: CondOT(-0.1), "sigma_min"),
        (lambda: CondOT(1.0), "sigma_min"),
        (lambda: CondOT(math.nan), "sigma_min"),
        (lambda: VariancePreserving(0.0, 20.0), "beta_min"),
        (lambda: VariancePreserving(3.0, 2.0), "beta_max"),
        (lambda: VarianceExploding(0.0, 1.0), "sigma_min"),
        (lambda: VarianceExploding(2.0, 1.0), "sigma_max"),
    ],
)
def test_parameters_outside_their_range_are_refused(make, name):
    with pytest.raises(ValueError, match=f"{name}.*expected.*got"):
        make()


# --- time -----------------------------------------------------------------------------------------------------------


@every_path
@pytest.mark.parametrize("t", [-1e-9, 1.0134, math.nan, math.inf])
def test_times_outside_the_unit_interval_are_refused(path, t):
    for time in (t, torch.tensor([0.5, t], dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"t: expected .*\[0, 1\].*, got " + str(t)):
            path(time)


@pytest.mark.parametrize("t", [torch.tensor(1), torch.tensor([True]), torch.tensor(0.5 + 0j), "0.5", True, [0.5]])
def test_times_that_are_not_floats_are_refused(t):
    with pytest.raises(TypeError, match="t: expected a float"):
        CondOT()(t)


@every_path
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_times_are_taken_as_given(path, dtype):
    t = interior_times().to(dtype).reshape(7, 1)
    for got, want in zip(tensors(path(t)), tensors(path(t.double())), strict=True):
        assert got.dtype == torch.float64 and torch.equal(got, want)


@every_path
def test_function_transforms_over_time_give_the_eager_numbers(path):
    t = interior_times()
    one = torch.ones_like(t)
    for pick in range(4):
        value = lambda t, pick=pick: tensors(path(t))[pick]  # noqa: E731
        # vmap may use another vectorised kernel of exp or pow than eager does: a few roundings, not equal bits
        close = {"rtol": 8 * EPS, "atol": 0}
        torch.testing.assert_close(torch.func.vmap(value)(t), value(t), **close)
        _, tangent = torch.func.jvp(value, (t,), (one,))
        gradient = torch.func.vmap(torch.func.grad(value))(t)
        torch.testing.assert_close(tangent, gradient, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(torch.func.jacfwd(value)(t).diagonal(), gradient, rtol=1e-12, atol=1e-15)
        twice = torch.func.vmap(torch.func.grad(torch.func.grad(value)))(t)
        forward_over_reverse = torch.func.jvp(torch.func.vmap(torch.func.grad(value)), (t,), (one,))[1]
        torch.testing.assert_close(twice, forward_over_reverse, rtol=1e-10, atol=1e-12)


def test_range_checks_are_skipped_only_where_numbers_cannot_be_read():
    outside = torch.tensor([0.5, 1.5], dtype=torch.float64)
    assert torch.func.vmap(lambda t: CondOT()(t).alpha)(outside).tolist() == [0.5, 1.5]
    torch.func.vmap(torch.func.grad(lambda t: CondOT()(t).sigma))(outside)
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        with pytest.raises(ValueError, match="t: expected"):
            transform(lambda t: CondOT()(t).sigma.sum())(outside)


@every_path
def test_compiled_paths_give_the_eager_numbers(path):
    compiled = torch.compile(lambda t: tensors(path(t)), backend="aot_eager")
    for t in (interior_times(), 0.25, 0.75):
        for got, want in zip(compiled(t), tensors(path(t)), strict=True):
            torch.testing.assert_close(got, want, rtol=8 * EPS, atol=0)
    with pytest.raises(ValueError, match="t: expected"):
        compiled(torch.tensor([2.0]))


# --- the inverse of the bandwidth -----------------------------------------------------------------------------------


@every_path
def test_time_at_inverts_the_bandwidth(path):
    low, high = path.bandwidth_range
    h = torch.logspace(-6, 6, 241, dtype=torch.float64)
    h = h[(h >= low) & (h <= high)]
    t = path.time_at(h)
    at = path(t)
    d_log_h = at.d_sigma / at.sigma - at.d_alpha / at.alpha
    # 1e-12, and no better than one spacing of float64 times, which is coarse against h as t goes to 1
    tolerance = 1e-12 + EPS * d_log_h.abs()
    assert (((at.bandwidth - h) / h).abs() <= tolerance).all()
    assert all(path.time_at(value) == pytest.approx(time, rel=4 * EPS) for value, time in zip(h.tolist(), t.tolist()))


@every_path
def test_time_at_inverts_the_time(path):
    # past t = 1 - 1e-6 every path still moves h by more than its rounding
    t = torch.cat([torch.linspace(0, 1, 101, dtype=torch.float64), 1 - torch.logspace(-6, -2, 9, dtype=torch.float64)])
    torch.testing.assert_close(path.time_at(path(t).bandwidth), t, rtol=0, atol=1e-13)


@every_path
def test_time_at_reaches_both_ends(path):
    low, high = path.bandwidth_range
    assert path.time_at(low) == pytest.approx(1, abs=EPS) and path.time_at(high) == pytest.approx(0, abs=4 * EPS)
    assert path.time_at(torch.tensor([low, high], dtype=torch.float64)).shape == (2,)


@every_path
def test_bandwidths_out_of_reach_are_refused_with_the_range(path):
    low, high = path.bandwidth_range
    unreachable = [-1.0, math.nan] + [low / 2] * (low > 0) + [high * 2] * (high < math.inf)
    for h in unreachable:
        for value in (h, torch.tensor([(low + 1) / 2, h], dtype=torch.float64)):
            with pytest.raises(ValueError) as error:
                path.time_at(value)
            assert all(part in str(error.value) for part in ("bandwidth: expected", str(low), str(high), str(h)))
    with pytest.raises(TypeError, match="bandwidth"):
        path.time_at(torch.tensor(1))


@every_path
def test_time_at_is_twice_differentiable(path):
    h = torch.tensor([0.3, 0.9, 1.7, 9.1], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(path.time_at, h)
    assert torch.autograd.gradgradcheck(path.time_at, h)


# --- broadcasting ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "batch", "event_ndim", "tasks", "want"),
    [
        ((), (4,), 3, False, ()),
        ((4,), (4,), 3, False, (4, 1, 1, 1)),
        ((4,), (4,), 0, False, (4,)),
        ((1,), (4,), 1, False, (1, 1)),
        ((4,), (5, 4), 1, False, (4, 1)),
        ((5, 1), (5, 4), 2, False, (5, 1, 1, 1)),
        ((), (3, 4), 1, True, ()),
        ((3, 1), (3, 4), 1, True, (3, 1, 1)),
        ((1, 4), (3, 4), 1, True, (1, 4, 1)),
        ((3, 4), (3, 4), 2, True, (3, 4, 1, 1)),
    ],
)
def test_time_is_aligned_with_the_batch(shape, batch, event_ndim, tasks, want):
    t = torch.rand(shape)
    at = broadcast_schedule(VariancePreserving(), t, batch, event_ndim, tasks=tasks)
    for got, value in zip(tensors(at), tensors(VariancePreserving()(t)), strict=True):
        assert got.shape == want and torch.equal(got.flatten(), value.flatten())


@pytest.mark.parametrize(
    ("shape", "batch", "tasks"),
    [
        ((4, 1, 1, 1), (4,), False),
        ((4, 1), (4,), False),
        ((3,), (4,), False),
        ((4,), (1,), False),
        ((4,), (), False),
        ((1,), (), False),
        ((5,), (5, 4), False),
        ((4,), (4, 4), True),
        ((1,), (4, 4), True),
        ((4, 3), (3, 4), True),
        ((1, 3, 4), (3, 4), True),
    ],
)
def test_time_shapes_that_do_not_fit_the_batch_are_refused(shape, batch, tasks):
    with pytest.raises(ValueError) as error:
        broadcast_schedule(CondOT(), torch.rand(shape), batch, 3, tasks=tasks)
    assert all(part in str(error.value) for part in ("t: expected", f"batch shape {batch}", f"got shape {shape}"))


def test_python_time_keeps_its_digits_when_broadcast():
    assert broadcast_schedule(CondOT(), 0.1, (4,), 1).alpha.item() == 0.1
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        broadcast_schedule(CondOT(), 1.5, (4,), 1)


# --- conversions ----------------------------------------------------------------------------------------------------


def predictions(path, t: torch.Tensor) -> tuple[torch.Tensor, Schedule, dict[str, torch.Tensor]]:
    """x and all four predictions from D and eps alone; the velocity is the autograd derivative of the line in t."""
    generator = torch.Generator().manual_seed(1)
    denoiser, noise = torch.randn(2, len(t), 3, dtype=torch.float64, generator=generator)
    at = broadcast_schedule(path, t, (len(t),), 1)

    def line(time):
        moving = path(time).expand(1)
        return moving.alpha * denoiser + moving.sigma * noise

    x, velocity = torch.func.jvp(line, (t,), (torch.ones_like(t),))
    return x, at, {"denoiser": denoiser, "noise": noise, "score": -noise / at.sigma, "velocity": velocity}


@every_path
@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_conversions_agree_with_the_definition_of_the_path(path, source, target):
    x, at, known = predictions(path, interior_times())
    got = convert(known[source], x, at, source=source, target=target)
    # a difference such as x - alpha D loses the ratio of its terms: at most 5000 on these paths and times
    torch.testing.assert_close(got, known[target], rtol=1e-11, atol=1e-11)
    there = to_denoiser(known[source], x, at, source)
    torch.testing.assert_close(from_denoiser(there, x, at, source), known[source], rtol=1e-11, atol=1e-11)


def two_references(x: torch.Tensor, at: Schedule) -> torch.Tensor:
    """D of the references -1 and +1: tanh(alpha x / sigma^2)."""
    return torch.tanh(at.alpha * x / at.sigma**2)


def test_two_references_have_their_closed_form_values():
    x, at = torch.tensor([0.5], dtype=torch.float64), CondOT()(0.5)
    denoiser = two_references(x, at)
    assert denoiser.item() == pytest.approx(0.7615941560, abs=1e-10)
    assert from_denoiser(denoiser, x, at, "velocity").item() == pytest.approx(0.5231883119, abs=1e-10)
    assert from_denoiser(denoiser, x, at, "score").item() == pytest.approx(-0.4768116881, abs=1e-10)
    smoothed = CondOT(0.01)(0.5)
    denoiser = two_references(x, smoothed)
    want = (denoiser - 0.99 * x) / smoothed.sigma
    torch.testing.assert_close(from_denoiser(denoiser, x, smoothed, "velocity"), want, rtol=1e-14, atol=0)


def test_reversed_time_flips_the_clock_and_the_sign_of_velocities():
    def velocity(x, t):
        at = CondOT()(t)
        return from_denoiser(two_references(x, at), x, at, "velocity")

    x = torch.tensor([0.5], dtype=torch.float64)
    assert reverse_time(velocity)(x, 0.5).item() == pytest.approx(-0.5231883119, abs=1e-10)
    assert torch.equal(reverse_time(velocity)(x, 0.75), -velocity(x, 0.25))
    assert torch.equal(reverse_time(reverse_time(velocity))(x, 0.75), velocity(x, 0.75))

    def denoise(x, t):
        return two_references(x, CondOT()(t))

    assert torch.equal(reverse_time(denoise, "denoiser")(x, 0.75), denoise(x, 0.25))
    with pytest.raises(ValueError, match="kind: expected one of"):
        reverse_time(velocity, "flow")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "t", "source", "target", "reason"),
    [(CondOT(), 1.0, source, kind, "sigma = 0") for source in KINDS for kind in KINDS[1:] if source != kind]
    + [(VariancePreserving(), 1.0, "denoiser", "velocity", "sigma = 0")]
    + [(Cosine(), 0.0, source, kind, "alpha = 0") for source in KINDS[1:3] for kind in ("denoiser", "velocity")]
    + [(VariancePreserving(), 1.0, "velocity", "denoiser", "infinite")],
)
def test_conversions_that_do_not_exist_are_refused(path, t, source, target, reason):
    x = torch.ones(3, dtype=torch.float64)
    with pytest.raises(ValueError, match=reason):
        convert(x, x, path(t), source=source, target=target)
    some = path(torch.tensor([0.5, t, 0.5], dtype=torch.float64))
    with pytest.raises(ValueError, match=reason):
        convert(x, x, some, source=source, target=target)


def test_velocity_without_information_is_refused():
    still = Schedule(*torch.tensor([0.5, 0.5, 1.0, 1.0], dtype=torch.float64))  # h' = 0
    x = torch.ones(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="does not determine"):
        to_denoiser(x, x, still, "velocity")


def test_conversions_that_exist_at_the_ends_are_finite():
    x, value = torch.tensor([[0.3, -2.0], [1.2, 0.4]], dtype=torch.float64)
    start, end = CondOT()(0.0), CondOT()(1.0)
    assert torch.equal(from_denoiser(value, x, start, "velocity"), value - x)
    assert torch.equal(to_denoiser(value, x, start, "velocity"), value + x)
    assert torch.equal(convert(value, x, start, source="noise", target="score"), -value)
    assert torch.equal(convert(value, x, start, source="score", target="noise"), -value)
    assert torch.equal(to_denoiser(value, x, end, "velocity"), x)
    assert torch.equal(to_denoiser(value, x, end, "noise"), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_conversions_round_once_and_keep_the_dtype_of_x(dtype):
    x, at, known = predictions(CondOT(), torch.tensor([0.5, 0.99], dtype=torch.float64))
    x, denoiser = x.to(dtype), known["denoiser"].to(dtype)
    got = from_denoiser(denoiser, x, at, "noise")
    assert got.dtype == dtype
    assert torch.equal(got, ((x.double() - at.alpha * denoiser.double()) / at.sigma).to(dtype))


def test_conversions_work_under_function_transforms():
    x, at, known = predictions(CondOT(0.01), interior_times())
    t = interior_times()

    def noise(x, denoiser, t):
        return from_denoiser(denoiser, x, CondOT(0.01)(t), "noise")

    got = torch.func.vmap(noise)(x, known["denoiser"], t)
    torch.testing.assert_close(got, known["noise"], rtol=1e-11, atol=1e-11)
    jacobian = torch.func.vmap(torch.func.jacrev(noise))(x, known["denoiser"], t)
    want = torch.eye(3, dtype=torch.float64) / at.sigma[..., None]
    torch.testing.assert_close(jacobian, want, rtol=1e-14, atol=0)
    # at sigma = 0 nothing can be checked under vmap; the formula is left to say so
    assert torch.func.vmap(noise)(x, known["denoiser"], torch.ones_like(t)).isfinite().all()


def test_wrong_names_and_shapes_are_refused():
    x, at = torch.ones(3), CondOT()(0.5)
    with pytest.raises(ValueError, match="source: expected one of"):
        convert(x, x, at, source="epsilon", target="score")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind|target: expected one of"):
        from_denoiser(x, x, at, "v")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"value: expected the shape of x, \(3,\), got \(2, 3\)"):
        to_denoiser(x.expand(2, 3), x, at, "noise")


# --- schedulers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("give", [lambda v: v, lambda v: v.tolist(), lambda v: v.numpy()])
def test_ddpm_table_is_met_at_its_timesteps(give):
    table = ddpm_scheduler().alphas_cumprod
    path = from_diffusers(SimpleNamespace(alphas_cumprod=give(table)))
    timesteps = torch.arange(1000, dtype=torch.float64)
    t = path.time_of_timestep(timesteps)
    assert t[0] == 1 and t[-1] == 0  # timestep 0 is the cleanest
    at = path(t)
    # k is recovered from t within 1000 eps, times a slope of log h below 0.4 per step
    torch.testing.assert_close(at.alpha**2, table.double(), rtol=1e-12, atol=0)
    torch.testing.assert_close(at.sigma**2, 1 - table.double(), rtol=1e-12, atol=0)
    torch.testing.assert_close(path.timestep_at(t), timesteps, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.tensor(path.times, dtype=torch.float64), t.flip(0), rtol=0, atol=0)
    low, high = path.bandwidth_range
    assert low == pytest.approx(math.sqrt(1 / table[0].double() - 1), rel=1e-12)
    assert high == pytest.approx(math.sqrt(1 / table[-1].double() - 1), rel=1e-12) and not path.starts_at_noise


def test_ddpm_derivatives_are_continuous_across_the_table():
    path = from_diffusers(ddpm_scheduler())
    knots = path.time_of_timestep(torch.arange(1, 999, dtype=torch.float64))
    left, right = path(knots - 1e-9), path(knots + 1e-9)
    # 2e-9 in time at curvatures below 1e5 (the first steps bend most) moves a derivative by less than 1e-3 of it
    torch.testing.assert_close(left.d_sigma, right.d_sigma, rtol=1e-3, atol=0)
    torch.testing.assert_close(left.d_alpha, right.d_alpha, rtol=1e-3, atol=0)


def test_table_interpolation_converges_at_third_order():
    def error(entries: int) -> float:
        smooth = VariancePreserving(2.0, 10.0)
        time = torch.linspace(0.9, 0, entries, dtype=torch.float64)  # timestep 0 at t = 0.9, the last at 0
        path = DiscretePath.from_alphas_cumprod(smooth(time).alpha ** 2)
        inner = torch.linspace(0.1, 0.9, 501, dtype=torch.float64)
        return (path(inner).log_snr - smooth(0.9 * inner).log_snr).abs().max().item()

    orders = [math.log2(error(n) / error(2 * n)) for n in (20, 40, 80)]
    assert all(order == pytest.approx(3, abs=0.3) for order in orders)


def test_ddpm_converges_to_the_continuous_path():
    def error(steps: int) -> float:
        s = torch.arange(1, steps + 1, dtype=torch.float64) / steps
        table = torch.cumprod(1 - (0.1 + 19.9 * s) / steps, 0)
        return (table.sqrt() - VariancePreserving()(1 - s).alpha).abs().max().item()

    assert error(500) / error(1000) == pytest.approx(2, rel=0.05)  # DDPM is Euler's rule: first order


def test_smallest_table_is_one_line_in_log_bandwidth():
    path = DiscretePath.from_alphas_cumprod([0.9, 0.1])
    t = torch.linspace(0, 1, 5, dtype=torch.float64)
    torch.testing.assert_close(path(t).log_snr, math.log(9) * (2 * t - 1), rtol=1e-14, atol=1e-14)


def test_flow_scheduler_is_the_straight_path_turned_round():
    scheduler = flow_scheduler(shift=3.0)
    path = from_diffusers(scheduler)
    assert path.starts_at_noise and path.bandwidth_range == (0.0, math.inf)
    sigmas = scheduler.sigmas
    at = path(torch.tensor(path.times, dtype=torch.float64))
    torch.testing.assert_close(at.sigma, sigmas, rtol=0, atol=EPS)
    torch.testing.assert_close(at.alpha, 1 - sigmas, rtol=0, atol=EPS)
    assert path.times[0] == 0 and path.times[-1] == 1
    assert path.time_of_timestep(250.0) == 0.75 and path.timestep_at(0.75) == 250.0
    # a flow model predicts noise - data: minus the velocity, and no factor of the shift
    data, noise = torch.randn(2, len(sigmas), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    at = at.expand(1)
    x = at.alpha * data + at.sigma * noise
    inner = slice(1, -1)
    middle = Schedule(*(v[inner] for v in tensors(at)))
    got = to_denoiser(-(noise - data)[inner], x[inner], middle, "velocity")
    torch.testing.assert_close(got, data[inner], rtol=1e-12, atol=1e-12)


def test_schedulers_are_recognised_by_what_they_hold():
    flow = flow_scheduler()
    both = SimpleNamespace(alphas_cumprod=ddpm_scheduler().alphas_cumprod, sigmas=flow.sigmas)
    assert from_diffusers(both).kind == "alphas_cumprod"
    assert from_diffusers(SimpleNamespace(**vars(both), config={"use_flow_sigmas": True})).kind == "flow_sigmas"
    assert from_diffusers(SimpleNamespace(sigmas=flow.sigmas)).last_timestep == 1000
    with pytest.raises(TypeError, match="scheduler: expected.*alphas_cumprod.*got SimpleNamespace"):
        from_diffusers(SimpleNamespace(betas=[0.1]))
    assert hash(from_diffusers(flow)) == hash(from_diffusers(flow)) and from_diffusers(flow) == from_diffusers(flow)


@pytest.mark.parametrize(
    ("build", "table", "message"),
    [
        (DiscretePath.from_alphas_cumprod, [0.5], "at least 2 entries, got 1"),
        (DiscretePath.from_alphas_cumprod, [], "at least 2 entries, got 0"),
        (DiscretePath.from_alphas_cumprod, [[0.9, 0.5]], r"one axis, got shape \(1, 2\)"),
        (DiscretePath.from_alphas_cumprod, [0.9, math.nan], "got nan at index 1"),
        (DiscretePath.from_alphas_cumprod, [0.9, 0.5, 0.0], "got 0.0 at index 2; a zero terminal SNR"),
        (DiscretePath.from_alphas_cumprod, [1.0, 0.5], "got 1.0 at index 0"),
        (DiscretePath.from_alphas_cumprod, [0.1, 0.5, 0.9], "strictly decreasing values, got 0.1 then 0.5 at index 0"),
        (DiscretePath.from_alphas_cumprod, [0.9, 0.5, 0.5], "got 0.5 then 0.5 at index 1"),
        (DiscretePath.from_flow_sigmas, [14.6, 1.0, 0.0], "got 14.6 at index 0"),
        (DiscretePath.from_flow_sigmas, [0.0, 1.0], "strictly decreasing"),
    ],
)
def test_tables_that_are_no_path_are_refused(build, table, message):
    with pytest.raises(ValueError, match=message):
        build(np.asarray(table, dtype=np.float64))
