"""NWField: every quantity on every path against a float64 oracle, a Gaussian mixture of torch, and identities."""

import copy
import pickle
import sys

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

from nwflow import Support
from nwflow.field import MOMENTS, NWField
from nwflow.metric import DiagonalMetric, FullMetric, IsotropicMetric, LowRankMetric, Smoothing
from nwflow.paths import CondOT, Cosine, DiscretePath, VarianceExploding, VariancePreserving
from oracle import NAMES, Watch
from oracle import field as oracle

F64 = torch.float64
D = 3
PATHS = [
    CondOT(),
    CondOT(0.01),
    VariancePreserving(),
    Cosine(),
    VarianceExploding(),
    DiscretePath.from_alphas_cumprod(torch.linspace(0.999, 0.01, 20, dtype=F64)),
    DiscretePath.from_flow_sigmas([1.0, 0.7, 0.2, 0.0]),
]
every_path = pytest.mark.parametrize("path", PATHS, ids=repr)


def spd(seed: int, low: float = 0.3) -> torch.Tensor:
    a = torch.randn(D, D, dtype=F64, generator=torch.Generator().manual_seed(seed))
    return a @ a.T + low * torch.eye(D, dtype=F64)


FACTOR = torch.tensor([[1.0, 0.2], [-0.4, 0.6], [0.3, 0.9]], dtype=F64)
METRICS = {
    "euclidean": None,
    "isotropic": IsotropicMetric(2.5),
    "diagonal": DiagonalMetric(torch.tensor([0.5, 4.0, 1.3], dtype=F64)),
    "full": FullMetric(spd(1)),
    "low-rank precision": LowRankMetric(torch.tensor([0.7, 1.0, 2.0], dtype=F64), FACTOR),
    "low-rank covariance": LowRankMetric(torch.tensor([0.7, 1.0, 2.0], dtype=F64), FACTOR, of="covariance"),
}
SMOOTHINGS = {
    "points": None,
    "number": 0.25,
    "isotropic": Smoothing.isotropic(0.5),
    "diagonal": Smoothing.diagonal(torch.tensor([0.2, 0.0, 0.7], dtype=F64)),
    "low-rank": Smoothing.low_rank(torch.tensor([0.1, 0.0, 0.2], dtype=F64), FACTOR[:, :1]),
    "full": Smoothing.full(spd(2, 0.0)),
    "singular": Smoothing.full(FACTOR[:, :1] @ FACTOR[:, :1].T),
}
every_metric = pytest.mark.parametrize("metric", METRICS, ids=str)
every_smoothing = pytest.mark.parametrize("smoothing", SMOOTHINGS, ids=str)

# what the oracle is told: the matrices written out by hand, never through the library
PRECISIONS = {
    "euclidean": None,
    "isotropic": 2.5 * torch.eye(D, dtype=F64),
    "diagonal": torch.diag(torch.tensor([0.5, 4.0, 1.3], dtype=F64)),
    "full": spd(1),
    "low-rank precision": torch.diag(torch.tensor([0.7, 1.0, 2.0], dtype=F64)) + FACTOR @ FACTOR.T,
    "low-rank covariance": torch.linalg.inv(torch.diag(torch.tensor([0.7, 1.0, 2.0], dtype=F64)) + FACTOR @ FACTOR.T),
}
COVARIANCES = {
    "points": None,
    "number": 0.0625 * torch.eye(D, dtype=F64),
    "isotropic": 0.25 * torch.eye(D, dtype=F64),
    "diagonal": torch.diag(torch.tensor([0.2, 0.0, 0.7], dtype=F64)),
    "low-rank": torch.diag(torch.tensor([0.1, 0.0, 0.2], dtype=F64)) + FACTOR[:, :1] @ FACTOR[:, :1].T,
    "full": spd(2, 0.0),
    "singular": FACTOR[:, :1] @ FACTOR[:, :1].T,
}


def data(m: int = 7, n: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    points = 2.0 * torch.randn(m, D, dtype=F64, generator=g) + 1.5
    x = 1.5 * torch.randn(n, D, dtype=F64, generator=g) + 0.5
    return points, x, torch.rand(m, dtype=F64, generator=g) + 0.1


def assert_all(field: NWField, x, t, expected, rtol=1e-9, names=NAMES):
    atol = rtol * 10.0  # quantities are of order one; the divergence and the score cancel to that order
    together = field.posterior(x, t, names)
    for name in names:
        value = getattr(field, {"denoiser": "denoise"}.get(name, name))(x, t)
        reference = getattr(expected, name)
        torch.testing.assert_close(value.double(), reference, rtol=rtol, atol=atol, msg=lambda s, n=name: f"{n}: {s}")
        torch.testing.assert_close(getattr(together, name), value, rtol=rtol, atol=atol)
    torch.testing.assert_close(field.weights(x, t).double(), expected.weights, rtol=0, atol=rtol)


# --- every quantity against the oracle --------------------------------------------------------------------------------


@every_path
@pytest.mark.parametrize("t", [0.04, 0.5, 0.9])
def test_every_quantity_on_every_path(path, t):
    points, x, prior = data()
    assert_all(NWField(Support(points, prior), path), x, t, oracle(x, t, points, path, prior))


@every_metric
@every_smoothing
@pytest.mark.parametrize("path", [CondOT(0.01), VariancePreserving()], ids=repr)
def test_every_quantity_with_every_metric_and_smoothing(metric, smoothing, path):
    points, x, prior = data()
    t = torch.tensor([0.1, 0.4, 0.6, 0.8], dtype=F64)
    field = NWField(Support(points, prior), path, METRICS[metric], SMOOTHINGS[smoothing])
    assert_all(field, x, t, oracle(x, t, points, path, prior, PRECISIONS[metric], COVARIANCES[smoothing]))


@pytest.mark.parametrize("metric", ["euclidean", "diagonal", "full"])
@pytest.mark.parametrize("smoothing", ["points", "isotropic", "full"])
@pytest.mark.parametrize("times", ["float", "per task", "per query"])
def test_tasks_equal_their_sets_one_by_one(metric, smoothing, times):
    points, x, prior = data(12, 8)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[0, 2:] = mask[2, 0] = False
    weights = prior.view(3, 4).clone()
    weights[1, 3] = 0.0
    tasks = Support.batch(points.view(3, 4, D), weights=weights, mask=mask)
    q = torch.stack([x[:4], x[4:], x[2:6]])
    t = {"float": 0.4, "per task": torch.tensor([[0.2], [0.5], [0.8]], dtype=F64), "per query": torch.rand(3, 4) * 0.9}
    t = t[times]
    field = NWField(tasks, CondOT(0.01), METRICS[metric], SMOOTHINGS[smoothing])
    for i in range(3):
        ti = t if isinstance(t, float) else t[i].expand(4)
        expected = oracle(
            q[i], ti, points.view(3, 4, D)[i], CondOT(0.01), weights[i] * mask[i], PRECISIONS[metric],
            COVARIANCES[smoothing],
        )  # fmt: skip
        together = field.posterior(q, t, MOMENTS)
        for name in NAMES:
            one = getattr(field, {"denoiser": "denoise"}.get(name, name))(q, t)[i]
            torch.testing.assert_close(one, getattr(expected, name), rtol=1e-9, atol=1e-8)
            torch.testing.assert_close(getattr(together, name)[i], one, rtol=1e-9, atol=1e-8)
        torch.testing.assert_close(field.weights(q, t)[i], expected.weights, rtol=0, atol=1e-9)
        found = field.attribute(q, t, k=4)
        real = int((weights[i] * mask[i] > 0).sum())
        assert (found.indices[i, :, real:] == -1).all() and (found.weights[i, :, real:] == 0).all()
        torch.testing.assert_close(
            torch.gather(expected.weights, 1, found.indices[i, :, :real]), found.weights[i, :, :real], rtol=0, atol=1e-9
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("support_dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_dtypes_of_queries_and_points(dtype, support_dtype):
    points, x, _ = data()
    points, x = points.to(support_dtype), x.to(dtype)
    field, expected = NWField(points), oracle(x, 0.6, points, CondOT())
    eps = torch.finfo(dtype).eps
    for name in NAMES:
        value = getattr(field, {"denoiser": "denoise"}.get(name, name))(x, 0.6)
        vector = name in ("denoiser", "velocity", "score", "noise")
        assert value.dtype == (dtype if vector else torch.promote_types(dtype, torch.float32))
        tol = max(1e-13, eps if vector else min(eps, 1e-6))  # 1e-13: float64 sums in another order
        torch.testing.assert_close(value.double(), getattr(expected, name), rtol=4 * tol, atol=40 * tol)
    assert field.weights(x, 0.6).dtype == torch.promote_types(dtype, torch.float32)


def test_attribution_indexes_the_callers_rows_and_adds_up():
    points, x, prior = data(9, 5)
    prior[4] = 0.0
    mask = torch.ones(9, dtype=torch.bool)
    mask[0] = False
    field = NWField(Support(points, prior, mask=mask))
    w = field.weights(x, 0.4)
    assert (w[:, [0, 4]] == 0).all()
    found = field.attribute(x, 0.4, k=3)
    best = w.topk(3, -1)
    assert (found.indices == best.indices).all()
    torch.testing.assert_close(found.weights, best.values)
    torch.testing.assert_close(found.captured, best.values.sum(-1))
    everything = field.attribute(x, 0.4, k=100)
    assert everything.indices.shape == (5, 7)
    torch.testing.assert_close(everything.captured, torch.ones(5, dtype=F64))
    rows = NWField(Support(points, rows=torch.arange(9) + 100)).attribute(x, 0.4, k=1).indices
    assert (rows >= 100).all()


# --- identities -------------------------------------------------------------------------------------------------------


def mixture(points, prior, alpha, sigma, metric, smoothing):
    """p_t as torch's own Gaussian mixture."""
    noise = torch.eye(D, dtype=F64) if PRECISIONS[metric] is None else torch.linalg.inv(PRECISIONS[metric])
    cov = sigma**2 * noise
    if COVARIANCES[smoothing] is not None:
        cov = cov + alpha**2 * COVARIANCES[smoothing]
    components = MultivariateNormal(alpha * points, covariance_matrix=cov.expand(len(points), D, D))
    return MixtureSameFamily(Categorical(probs=prior), components)


@every_path
@every_metric
@every_smoothing
def test_density_and_score_are_those_of_a_gaussian_mixture(path, metric, smoothing):
    points, x, prior = data(5, 3)
    field = NWField(Support(points, prior), path, METRICS[metric], SMOOTHINGS[smoothing])
    at = path(0.45)
    p = mixture(points, prior, at.alpha, at.sigma, metric, smoothing)
    x.requires_grad_()
    log_p = p.log_prob(x)
    (score,) = torch.autograd.grad(log_p.sum(), x)
    torch.testing.assert_close(field.log_density(x, 0.45), log_p, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(field.score(x, 0.45), score, rtol=1e-9, atol=1e-9)


@every_path
@pytest.mark.parametrize(
    ("metric", "smoothing"),
    [
        ("euclidean", "points"),
        ("full", "points"),
        ("euclidean", "full"),
        ("low-rank precision", "diagonal"),
        ("diagonal", "diagonal"),
    ],
)
def test_score_and_divergence_are_derivatives_of_density_and_velocity(path, metric, smoothing):
    points, x, prior = data(5, 3)
    field = NWField(Support(points, prior), path, METRICS[metric], SMOOTHINGS[smoothing])
    x.requires_grad_()
    (score,) = torch.autograd.grad(field.log_density(x, 0.55).sum(), x)
    torch.testing.assert_close(field.score(x, 0.55), score, rtol=1e-9, atol=1e-9)
    for q, divergence in zip(x.detach(), field.divergence(x.detach(), 0.55)):
        jacobian = torch.autograd.functional.jacobian(lambda v: field(v, 0.55), q)
        assert float(divergence) == pytest.approx(float(jacobian.trace()), rel=1e-9, abs=1e-9)
    u, div = field.velocity_and_divergence(x.detach(), 0.55)
    torch.testing.assert_close(u, field(x.detach(), 0.55), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(div, field.divergence(x.detach(), 0.55), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("metric", ["euclidean", "diagonal", "full", "low-rank covariance"])
def test_jacobian_of_the_denoiser_is_the_covariance_of_the_weights(metric):
    """dD/dx = (alpha / sigma^2) C M."""
    points, x, prior = data(6, 1)
    field = NWField(Support(points, prior), CondOT(0.01), METRICS[metric])
    at, q = CondOT(0.01)(0.5), x[0]
    w = field.weights(q, 0.5)
    r = points - w @ points
    m = torch.eye(D, dtype=F64) if PRECISIONS[metric] is None else PRECISIONS[metric]
    jacobian = torch.autograd.functional.jacobian(lambda v: field.denoise(v, 0.5), q)
    expected = at.alpha / at.sigma**2 * (r.T * w) @ r @ m
    torch.testing.assert_close(jacobian, expected, rtol=1e-10, atol=1e-10)


def test_one_smoothed_point_is_the_wiener_filter():
    cov, centre = spd(3), torch.tensor([[1.0, -2.0, 0.5]], dtype=F64)
    field, at = NWField(centre, CondOT(), smoothing=Smoothing.full(cov)), CondOT()(0.3)
    x = data()[1]
    gain = at.alpha * cov @ torch.linalg.inv(at.alpha**2 * cov + at.sigma**2 * torch.eye(D, dtype=F64))
    expected = centre + (x - at.alpha * centre) @ gain.T
    torch.testing.assert_close(field.denoise(x, 0.3), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(field.divergence(x, 0.3), at.alpha * 0 + _wiener_divergence(gain, at).expand(4))


def _wiener_divergence(gain, at):
    d_eps = (torch.eye(D, dtype=F64) - at.alpha * gain) / at.sigma
    return at.d_alpha * gain.trace() + at.d_sigma * d_eps.trace()


def test_no_smoothing_is_the_limit_of_little_smoothing():
    points, x, _ = data()
    plain = NWField(points, CondOT(0.01))
    zero = NWField(points, CondOT(0.01), smoothing=0.0)
    small = NWField(points, CondOT(0.01), smoothing=1e-7)
    for name in ("velocity", "denoise", "score", "noise", "log_density", "divergence"):
        torch.testing.assert_close(getattr(zero, name)(x, 0.7), getattr(plain, name)(x, 0.7), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(getattr(small, name)(x, 0.7), getattr(plain, name)(x, 0.7), rtol=1e-9, atol=1e-9)


def test_isotropic_smoothing_is_the_path_of_a_larger_noise_up_to_the_residual():
    """Weights under h0 at sigma equal those of plain points at sqrt(sigma^2 + alpha^2 h0^2)."""
    points, x, _ = data()
    at = VarianceExploding(0.1, 10.0)(0.4)
    wide = torch.sqrt(at.sigma**2 + 0.5**2)
    other = VarianceExploding(0.1, 10.0).time_at(float(wide))
    smoothed = NWField(points, VarianceExploding(0.1, 10.0), smoothing=0.5)
    plain = NWField(points, VarianceExploding(0.1, 10.0))
    torch.testing.assert_close(smoothed.weights(x, 0.4), plain.weights(x, other), rtol=0, atol=1e-9)
    torch.testing.assert_close(smoothed.log_density(x, 0.4), plain.log_density(x, other), rtol=1e-9, atol=1e-9)


def test_isotropic_metric_is_a_rescaled_bandwidth():
    points, x, _ = data()
    path = VarianceExploding(0.1, 10.0)
    sigma = float(path(0.5).sigma)
    with_metric = NWField(points, path, IsotropicMetric(4.0))
    plain = NWField(points, path)
    torch.testing.assert_close(
        with_metric.weights(x, 0.5), plain.weights(x, path.time_at(sigma / 2)), rtol=0, atol=1e-9
    )


# --- invariances ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["velocity", "denoise", "score", "log_density", "divergence", "n_eff", "entropy"])
def test_results_do_not_depend_on_order_padding_batch_or_shift(name, randn):
    points, x, prior = randn(50, 4, dtype=torch.float32), randn(6, 4, dtype=torch.float32), torch.rand(50) + 0.1
    points, x = (points * 1024).round() / 1024, (x * 1024).round() / 1024  # sums below are exact in float32
    t = 0.75
    base = getattr(NWField(Support(points, prior)), name)(x, t)
    scale = float(base.abs().max())

    def same(value, tol=1e-5):
        torch.testing.assert_close(value, base, rtol=0, atol=tol * scale)

    order = torch.randperm(50)
    same(getattr(NWField(Support(points[order], prior[order])), name)(x, t))
    padded = Support(torch.cat([points, torch.full((30, 4), 7.0)]), torch.cat([prior, torch.ones(30)]),
                     mask=torch.arange(80) < 50)  # fmt: skip
    same(getattr(NWField(padded), name)(x, t))
    tasks = Support.batch([Support(points, prior), Support(torch.cat([points, points + 1]))])
    same(getattr(NWField(tasks), name)(torch.stack([x, x + 1]), t)[0])
    same(torch.stack([getattr(NWField(Support(points, prior)), name)(q, t) for q in x]))
    same(getattr(NWField(Support(points, prior)), name)(torch.cat([x, 100 * x]), t)[:6])
    shift = 64.0  # x_t moves by alpha shift: 48, exact
    moved = getattr(NWField(Support(points + shift, prior)), name)(x + t * shift, t)
    if name == "denoise":
        moved = moved - shift
        same(moved, 2e-5)
    elif name == "velocity":
        same(moved - shift, 2e-5)
    else:
        same(moved)


@pytest.mark.parametrize("power", [-100, -20, 20, 100])
def test_a_power_of_two_changes_units_and_nothing_else(power, randn):
    path, unit = VarianceExploding(0.1, 10.0), 2.0**power
    points, x = randn(20, 3, dtype=torch.float32), randn(5, 3, dtype=torch.float32)
    base = NWField(points, path)
    field = NWField(points * unit, VarianceExploding(0.1 * unit, 10.0 * unit))
    torch.testing.assert_close(field.denoise(x * unit, 0.5) / unit, base.denoise(x, 0.5), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(field.n_eff(x * unit, 0.5), base.n_eff(x, 0.5), rtol=1e-6, atol=0)
    torch.testing.assert_close(field.score(x * unit, 0.5) * unit, base.score(x, 0.5), rtol=1e-6, atol=1e-6)


def test_duplicates_carry_their_own_mass():
    points, x, prior = data()
    doubled = NWField(Support(torch.cat([points, points[:2]]), torch.cat([prior, prior[:2]])))
    once = NWField(Support(points, prior * torch.tensor([2, 2, 1, 1, 1, 1, 1])))
    for name in ("velocity", "log_density", "divergence", "covariance_trace"):
        torch.testing.assert_close(getattr(doubled, name)(x, 0.6), getattr(once, name)(x, 0.6), rtol=1e-11, atol=1e-11)


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [(), (1,), (5,), (2, 3), (1, 4, 4)])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (2, 1, 3), (0,), (2, 0)])
@pytest.mark.parametrize("accuracy", [1e-5, None])
def test_shapes_of_events_and_batches(event, batch, accuracy, randn):
    points, x = torch.randn(4, *event, dtype=F64), torch.randn(batch + event, dtype=F64)
    field = NWField(points, CondOT(0.01), accuracy=accuracy)
    t = torch.rand(batch[-1:]) * 0.9 if batch else 0.3
    expected = oracle(x, t, points, CondOT(0.01)) if x.numel() else None
    for name in NAMES:
        value = getattr(field, {"denoiser": "denoise"}.get(name, name))(x, t)
        assert value.shape == (batch + event if name in ("denoiser", "velocity", "score", "noise") else batch)
        if expected is not None:
            torch.testing.assert_close(value, getattr(expected, name), rtol=1e-9, atol=1e-8)
    assert field.weights(x, t).shape == (*batch, 4)
    found = field.attribute(x, t, k=3)
    assert found.indices.shape == (*batch, 3) and found.captured.shape == batch
    p = field.posterior(x, t, MOMENTS)
    assert p.error_bound is not None and p.error_bound.shape == batch and p.proven.shape == batch


@pytest.mark.parametrize("n", [0, 1, 3])
def test_tasks_of_any_number_of_queries(n, randn):
    field = NWField(Support.batch([randn(4, 2), randn(2, 2)]))
    x = randn(2, n, 2)
    p = field.posterior(x, 0.4, MOMENTS)
    assert p.velocity.shape == (2, n, 2) and p.n_eff.shape == (2, n)
    assert field.weights(x, 0.4).shape == (2, n, 4)
    assert field.attribute(x, 0.4, k=2).indices.shape == (2, n, 2)


def test_strided_expanded_and_permuted_queries(randn):
    points, x = randn(6, 4), randn(5, 4)
    field = NWField(points)
    expected = field(x, 0.4)
    big = torch.zeros(10, 8, dtype=F64)
    big[::2, ::2] = x
    same = {"rtol": 1e-12, "atol": 1e-12}  # products sum in another order for other strides
    torch.testing.assert_close(field(big[::2, ::2], 0.4), expected, **same)
    torch.testing.assert_close(field(x.T.contiguous().T, 0.4), expected, **same)
    torch.testing.assert_close(field(x[:1].expand(5, 4), 0.4), expected[:1].expand(5, 4), **same)
    torch.testing.assert_close(NWField(points.T.contiguous().T)(x, 0.4), expected, **same)


def test_a_vector_of_times_as_long_as_the_event_is_read_along_the_batch(randn):
    field, x = NWField(randn(6, 4)), randn(4, 4)
    t = torch.tensor([0.1, 0.3, 0.5, 0.7])
    torch.testing.assert_close(field(x, t), torch.stack([field(q, float(s)) for q, s in zip(x, t)]))


@pytest.mark.parametrize("shape", [(4, 1, 1, 1), (3,), (4, 1), (2, 4), (1, 4)])
def test_times_that_do_not_fit_the_batch_are_refused(shape, randn):
    with pytest.raises(ValueError, match=r"t: expected.*batch shape \(4,\)"):
        NWField(randn(6, 3))(randn(4, 3), torch.full(shape, 0.5))


@pytest.mark.parametrize("shape", [(2,), (1,), (3, 1), (1, 3), (2, 3, 1), (2, 2)])
def test_times_of_tasks_need_both_axes(shape, randn):
    field = NWField(Support.batch([randn(4, 3), randn(4, 3)]))
    good = shape == (1, 3)
    if good:
        field(randn(2, 3, 3), torch.full(shape, 0.5))
        return
    with pytest.raises(ValueError, match="t: expected"):
        field(randn(2, 3, 3), torch.full(shape, 0.5))


@pytest.mark.parametrize("t", [-0.1, 1.1, float("nan"), float("inf")])
def test_times_outside_the_unit_interval_are_refused(t, randn):
    with pytest.raises(ValueError, match=r"t: expected times in \[0, 1\]"):
        NWField(randn(6, 3))(randn(4, 3), t)


def test_wrong_arguments_are_named(randn):
    field = NWField(randn(6, 3))
    with pytest.raises(TypeError, match="x: expected a floating dtype, got torch.int64"):
        field(torch.zeros(2, 3, dtype=torch.long), 0.5)
    with pytest.raises(TypeError, match="x: expected a torch.Tensor, got list"):
        field([[0.0, 0.0, 0.0]], 0.5)
    with pytest.raises(TypeError, match="t: expected a float"):
        field(randn(2, 3), "0.5")
    with pytest.raises(TypeError, match="t: expected a float"):
        field(randn(2, 3), torch.tensor(0))
    with pytest.raises(ValueError, match="moments: expected names"):
        field.posterior(randn(2, 3), 0.5, ("denoise",))
    with pytest.raises(ValueError, match="moments: expected at least one"):
        field.posterior(randn(2, 3), 0.5, ())
    with pytest.raises(ValueError, match="k: expected an integer"):
        field.attribute(randn(2, 3), 0.5, k=0)
    for bad in (0, -1e-5, 1.0, float("nan"), "high"):
        with pytest.raises(ValueError, match="accuracy"):
            NWField(randn(6, 3), accuracy=bad)
    with pytest.raises(TypeError, match="path: expected a nwflow Path"):
        NWField(randn(6, 3), path=0.01)
    with pytest.raises(TypeError, match="smoothing: expected"):
        NWField(randn(6, 3), smoothing="0.1")
    with pytest.raises(ValueError, match="metric: expected one over d = 3 coordinates, got d = 2"):
        NWField(randn(6, 3), metric=DiagonalMetric([1.0, 2.0]))
    with pytest.raises(ValueError, match="smoothing: expected one over d = 3 coordinates, got d = 2"):
        NWField(randn(6, 3), smoothing=Smoothing.diagonal([1.0, 2.0]))
    tasks = NWField(Support.batch([randn(4, 3), randn(4, 3)]))
    for shape in ((4, 3), (3, 4, 3), (2, 1, 4, 3), (3,)):
        with pytest.raises(ValueError, match=r"x: expected \(T, n, \*event\) with T = 2"):
            tasks(randn(*shape), 0.5)
    with pytest.raises((TypeError, ValueError), match="metric"):
        NWField(randn(6, 3), metric=torch.eye(3))


# --- both ends of time ------------------------------------------------------------------------------------------------


@every_path
@every_smoothing
def test_the_noise_end_is_regular(path, smoothing):
    points, x, prior = data()
    field = NWField(Support(points, prior), path, smoothing=SMOOTHINGS[smoothing])
    expected = oracle(x, 0.0, points, path, prior, None, COVARIANCES[smoothing])
    assert_all(field, x, 0.0, expected)
    if path.starts_at_noise:
        share = prior / prior.sum()
        torch.testing.assert_close(field.denoise(x, 0.0), (share @ points).expand(4, D), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(field.weights(x, 0.0), share.expand(4, 7), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("path", [CondOT(), VariancePreserving(), Cosine(), PATHS[-1]], ids=repr)
def test_at_the_data_end_the_denoiser_is_the_nearest_point(path):
    points, x, prior = data()
    points = torch.cat([points, points[:1]])
    prior = torch.cat([prior, torch.tensor([0.9], dtype=F64)])
    field = NWField(Support(points, prior), path)
    nearest = torch.cdist(x, points).argmin(-1)
    torch.testing.assert_close(field.denoise(x, 1.0), points[nearest], rtol=1e-14, atol=1e-14)
    w = field.weights(points[:1], 1.0)[0]
    shared = prior[[0, 7]] / prior[[0, 7]].sum()
    torch.testing.assert_close(w[[0, 7]], shared, rtol=1e-12, atol=0)
    assert float(w.sum()) == pytest.approx(1.0)
    assert float(field.n_eff(points[:1], 1.0)) == pytest.approx(1 / float(shared.square().sum()))
    found = field.attribute(points[:1], 1.0, k=3)
    assert set(found.indices[0, :2].tolist()) == {0, 7} and float(found.captured) == pytest.approx(1.0)
    for name in ("velocity", "score", "noise", "log_density", "divergence"):
        with pytest.raises(ValueError, match=f"t: {name} do(es)? not exist at sigma = 0"):
            getattr(field, name)(x, 1.0)
    assert torch.isfinite(field.entropy(x, 1.0)).all() and torch.isfinite(field.covariance_trace(x, 1.0)).all()


def test_some_queries_at_the_data_end_leave_the_others_as_they_are():
    points, x, _ = data()
    field = NWField(points)
    t = torch.tensor([0.3, 1.0, 0.8, 1.0], dtype=F64)
    for name in ("denoise", "n_eff", "entropy", "covariance_trace", "weights"):
        value = getattr(field, name)(x, t)
        for i in (0, 2):
            torch.testing.assert_close(value[i], getattr(field, name)(x[i], float(t[i])), rtol=1e-11, atol=1e-11)
        for i in (1, 3):
            torch.testing.assert_close(value[i], getattr(field, name)(x[i], 1.0), rtol=1e-11, atol=1e-11)
    found, alone = field.attribute(x, t, k=2), field.attribute(x[2], 0.8, k=2)
    assert found.indices[2].tolist() == alone.indices.tolist()
    with pytest.raises(ValueError, match="sigma = 0"):
        field(x, t)


@pytest.mark.parametrize("smoothing", ["isotropic", "full", "diagonal", "singular"])
@every_metric
def test_smoothed_supports_at_the_data_end(metric, smoothing):
    points, x, prior = data()
    field = NWField(Support(points, prior), CondOT(), METRICS[metric], SMOOTHINGS[smoothing])
    if smoothing in ("diagonal", "singular"):
        with pytest.raises(ValueError, match="smoothing covariance is singular"):
            field(x, 1.0)
        return
    expected = oracle(x, 1.0, points, CondOT(), prior, PRECISIONS[metric], COVARIANCES[smoothing])
    assert_all(field, x, 1.0, expected)
    torch.testing.assert_close(field.denoise(x, 1.0), x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("path", [CondOT(), VariancePreserving(), Cosine()], ids=repr)
def test_times_whose_variance_underflows(path):
    points, x, _ = data()
    field = NWField(points, path)
    t = 1 - 2.0**-53
    nearest = points[torch.cdist(x, points).argmin(-1)]
    torch.testing.assert_close(field.denoise(x, t), nearest, rtol=1e-12, atol=1e-12)
    assert torch.isfinite(field.score(x, t)).all() and torch.isfinite(field(x, t)).all()
    sharp = NWField(points, CondOT(1e-200))
    torch.testing.assert_close(sharp.denoise(x, 1.0), nearest, rtol=1e-12, atol=1e-12)


# --- extreme inputs ---------------------------------------------------------------------------------------------------


def test_one_point_and_identical_points(randn):
    x, s = randn(5, 3), randn(1, 3)
    for points in (s, s.repeat(6, 1)):
        field = NWField(points)
        torch.testing.assert_close(field.denoise(x, 0.4), s.expand(5, 3), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(field(x, 0.4), (s - x) / 0.6, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(field.n_eff(x, 0.4), torch.full((5,), float(len(points)), dtype=F64))
        torch.testing.assert_close(field.covariance_trace(x, 0.4), torch.zeros(5, dtype=F64), rtol=0, atol=1e-13)
        torch.testing.assert_close(field.divergence(x, 0.4), torch.full((5,), -3 / 0.6, dtype=F64))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("far", [1e6, 1e12, 1e18])
def test_queries_far_away_take_the_extreme_point(far, dtype, randn):
    points = randn(20, 3, dtype=dtype)
    direction = torch.tensor([1.0, 0.5, -0.2], dtype=dtype)
    field = NWField(points)
    best = points[(points.double() @ direction.double()).argmax()]
    torch.testing.assert_close(field.denoise(far * direction, 0.5), best, rtol=1e-6, atol=1e-6)
    assert torch.isfinite(field(far * direction, 0.5)).all()
    assert torch.isfinite(field.log_density(far * direction, 0.5)).all()
    assert float(field.n_eff(far * direction, 0.5)) == pytest.approx(1.0)


@pytest.mark.parametrize("size", [1e-30, 1e-18, 1e18, 1e30])
@pytest.mark.parametrize("accuracy", [1e-5, None])
def test_tiny_and_huge_points(size, accuracy, randn):
    """Between 1e-30 and 1e30 float32 squares over- and underflow; the bandwidth is in units of the data."""
    points, x = randn(20, 3, dtype=torch.float32) * size, randn(4, 3, dtype=torch.float32) * size
    path = VarianceExploding(0.1 * size, 10 * size)
    field, expected = (
        NWField(points, path, accuracy=accuracy),
        oracle(x / size, 0.5, points / size, VarianceExploding(0.1, 10)),
    )
    tol = 1e-5 if accuracy else 1e-4
    torch.testing.assert_close(field.denoise(x, 0.5).double() / size, expected.denoiser, rtol=tol, atol=tol)
    torch.testing.assert_close(field.n_eff(x, 0.5).double(), expected.n_eff, rtol=tol, atol=0)
    torch.testing.assert_close(field.noise(x, 0.5).double(), expected.noise, rtol=tol, atol=tol)


@pytest.mark.parametrize("m", [20, 3000])
@pytest.mark.parametrize("accuracy", [1e-5, None])
def test_a_bad_query_leaves_the_others_alone(m, accuracy, randn):
    points, x = randn(m, 8, dtype=torch.float32), randn(300, 8, dtype=torch.float32)
    field = NWField(points, accuracy=accuracy)
    good = field(x, 0.95)
    x = x.clone()
    x[3, 2], x[7, 0] = float("nan"), float("inf")
    x[299] = float("nan")
    value = field(x, 0.95)
    rest = torch.ones(300, dtype=torch.bool)
    rest[[3, 7, 299]] = False
    torch.testing.assert_close(value[rest], good[rest], rtol=1e-5, atol=1e-5)
    assert torch.isnan(value[[3, 7, 299]]).any(-1).all()
    assert torch.isnan(field.n_eff(x, 0.95)[[3, 299]]).all()
    field.attribute(x[:10], 0.95, k=3)


@pytest.mark.parametrize("accuracy", [1e-5, None])
def test_a_bad_query_leaves_the_others_alone_at_the_data_end(accuracy, randn):
    points, x = randn(5, 3, dtype=torch.float32), randn(4, 3, dtype=torch.float32)
    field = NWField(points, accuracy=accuracy)
    good = field.denoise(x, 1.0)
    x[1, 2] = float("nan")
    assert torch.equal(field.denoise(x, 1.0)[[0, 2, 3]], good[[0, 2, 3]])
    assert torch.isnan(field.denoise(x, 1.0)[1]).any() and torch.isnan(field.n_eff(x, 1.0)[1])
    assert torch.isnan(field.weights(x, 1.0)[1]).any() and torch.isfinite(field.weights(x, 1.0)[[0, 2, 3]]).all()


@pytest.mark.parametrize("h", [1e-6, 1e-8, 1e-12])
@pytest.mark.parametrize("accuracy", [1e-5, None])
def test_vanishing_bandwidths_find_each_point_itself(h, accuracy, randn):
    path = CondOT(h)
    points = randn(200, 16, dtype=torch.float32)
    field = NWField(points, path, accuracy=accuracy)
    torch.testing.assert_close(field.denoise(points, 1.0), points, rtol=1e-6, atol=1e-6)  # alpha = 1, sigma = h
    torch.testing.assert_close(field.n_eff(points, 1.0), torch.ones(200))
    if accuracy is not None:
        torch.testing.assert_close(field(points, 1.0).double(), points.double(), rtol=1e-6, atol=1e-6)  # eps = 0


# --- state, copies, precision -----------------------------------------------------------------------------------------


def test_an_optimiser_step_in_place_is_seen(randn):
    points = nn.Parameter(randn(6, 3))
    field, x = NWField(points), randn(4, 3)
    assert [name for name, _ in field.named_parameters()] == ["points"]
    optimiser = torch.optim.SGD(field.parameters(), lr=0.5)
    for _ in range(3):
        with torch.no_grad():
            before = field(x, 0.6)
        field(x, 0.6).square().sum().backward()
        optimiser.step()
        optimiser.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(field(x, 0.6), oracle(x, 0.6, points, CondOT()).velocity, rtol=1e-9, atol=1e-9)
            assert not torch.equal(field(x, 0.6), before)


MASK = torch.tensor([True, True, False, True, True, True])


@pytest.mark.parametrize("make", [
    lambda p, w: Support(p, w),
    lambda p, w: Support(p, w, mask=MASK),
    lambda p, w: Support(p, torch.tensor([1.0, 1.0, 0.0, 1.0, 2.0, 1.0])),
    lambda p, w: Support.batch(p[None], weights=w[None]),
], ids=["set", "masked", "zero weight", "tasks"])  # fmt: skip
def test_learned_points_and_weights_take_many_steps(make, randn):
    """Each call has a graph of its own, so that backward can run again and again on one field."""
    points, weights = nn.Parameter(randn(6, 3)), nn.Parameter(torch.rand(6, dtype=F64) + 0.5)
    x = randn(4, 3)
    if make(points, weights).is_batch:
        points, weights = nn.Parameter(points.data[None]), nn.Parameter(weights.data[None])
        x = x[None]
        support = Support.batch(points, weights=weights)
    else:
        support = make(points, weights)
    field = NWField(support)
    names = {name for name, _ in field.named_parameters()}
    assert "points" in names and (support.raw_weights is not weights or "raw_weights" in names)
    optimiser = torch.optim.SGD(field.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        optimiser.zero_grad()
        loss = -field.log_density(x, 0.6).sum()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    fresh = NWField(field.support)
    torch.testing.assert_close(fresh(x, 0.6), field(x, 0.6), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(copy.deepcopy(field)(x, 0.6), field(x, 0.6), rtol=1e-12, atol=1e-12)


def test_points_changed_in_place_are_seen_by_every_cache(randn):
    points, x = randn(30, 3, dtype=torch.float32), randn(4, 3, dtype=torch.float32)
    for metric in (None, FullMetric(spd(1))):
        field = NWField(points.clone(), CondOT(), metric)
        field(x, 0.9)
        with torch.no_grad():
            field.points.mul_(2.0).add_(1.0)
        torch.testing.assert_close(field(x, 0.9), NWField(points * 2 + 1, CondOT(), metric)(x, 0.9))
        field.points.copy_(points)
        torch.testing.assert_close(field(x, 0.9), NWField(points, CondOT(), metric)(x, 0.9))


@pytest.mark.parametrize("metric", METRICS, ids=str)
@pytest.mark.parametrize("smoothing", ["points", "isotropic", "full"])
def test_state_dict_copies_and_pickles_give_identical_numbers(metric, smoothing):
    points, x, prior = data()
    field = NWField(Support(points, prior), CondOT(0.01), METRICS[metric], SMOOTHINGS[smoothing])
    expected = field(x, 0.7)
    assert torch.equal(copy.deepcopy(field)(x, 0.7), expected)
    assert torch.equal(pickle.loads(pickle.dumps(field))(x, 0.7), expected)
    other = NWField(Support(points.flip(0) + 5, prior.flip(0)), CondOT(0.01), copy.deepcopy(METRICS[metric]),
                    copy.deepcopy(SMOOTHINGS[smoothing]))  # fmt: skip
    other(x, 0.7)
    other.load_state_dict(field.state_dict())
    assert torch.equal(other(x, 0.7), expected)
    assert torch.equal(other.support.points, points)
    torch.testing.assert_close(other.support.weights, prior / prior.sum())


def test_a_deep_copy_is_independent(randn):
    field, x = NWField(randn(6, 3)), randn(4, 3)
    before = field(x, 0.5)
    other = copy.deepcopy(field)
    other.points.add_(1.0)
    assert not torch.equal(other(x, 0.5), before)
    assert torch.equal(field(x, 0.5), before)


def test_to_float64_and_back(randn):
    points, x = randn(6, 3, dtype=torch.float32), randn(4, 3, dtype=torch.float32)
    field = NWField(points)
    low = field(x, 0.5)
    field.to(F64)
    assert field.points.dtype == field.support.dtype == F64
    torch.testing.assert_close(field(x.double(), 0.5), oracle(x, 0.5, points, CondOT()).velocity, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(field.float()(x, 0.5), low)
    metric = NWField(points, metric=FullMetric(spd(1)), smoothing=0.2)
    low = metric(x, 0.5)
    torch.testing.assert_close(metric.to(F64).float()(x, 0.5), low, rtol=1e-5, atol=1e-5)


def test_half_of_a_field_keeps_its_prior_usable(randn):
    points, x = randn(6, 3, dtype=torch.float32).half(), randn(4, 3).half()
    field = NWField(points.float()).half()
    expected = oracle(x, 0.5, points, CondOT()).velocity
    torch.testing.assert_close(field(x, 0.5).double(), expected, rtol=4e-3, atol=4e-3)


def test_given_is_the_field_of_the_labelled_part():
    points, x, prior = data()
    labels = ["a", "b", "a", "c", "b", "a", "c"]
    field = NWField(Support(points, prior, labels), CondOT(0.01), METRICS["full"], 0.125, accuracy=1e-4)
    part = field.given(["a", "c"])
    keep = torch.tensor([v in "ac" for v in labels])
    expected = oracle(x, 0.6, points[keep], CondOT(0.01), prior[keep], PRECISIONS["full"], torch.eye(D) / 64)
    torch.testing.assert_close(part(x, 0.6), expected.velocity, rtol=1e-9, atol=1e-9)
    assert part.accuracy == 1e-4 and part.path == field.path
    assert set(part.attribute(x, 0.6, k=9).indices.unique().tolist()) == set(keep.nonzero().squeeze(1).tolist())
    with pytest.raises(ValueError, match="unknown"):
        field.given(["z"])
    with pytest.raises(ValueError, match="no labels"):
        NWField(points).given([1])


def test_given_on_tasks_masks_and_refuses_an_empty_task(randn):
    points = randn(2, 4, 3)
    support = Support.batch(points, labels=[[0, 1, 1, 0], [1, 1, 1, 2]])
    field, x = NWField(support), randn(2, 5, 3)
    part = field.given([1])
    torch.testing.assert_close(part(x, 0.5)[0], NWField(points[0, 1:3])(x[0], 0.5), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(part(x, 0.5)[1], NWField(points[1, :3])(x[1], 0.5), rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="task 1"):
        field.given([0])


def test_with_accuracy_shares_tensors_and_changes_the_tolerance(randn):
    field, x = NWField(randn(6, 3)), randn(4, 3)
    other = field.with_accuracy(None)
    assert field.accuracy == 1e-5 and other.accuracy is None
    assert other.points is field.points
    torch.testing.assert_close(other(x, 0.5), field(x, 0.5), rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="accuracy"):
        field.with_accuracy(2.0)


def test_no_float64_tensor_where_the_device_lacks_it(monkeypatch, randn):
    for module in [m for name, m in sys.modules.items() if name.startswith("nwflow") and hasattr(m, "working_dtype")]:
        monkeypatch.setattr(module, "working_dtype", lambda device: torch.float32)
    points, x, t = randn(40, 3, dtype=torch.float32), randn(4, 3, dtype=torch.float32), torch.tensor(0.6)
    variants = [(None, None), (DiagonalMetric([1.0, 2.0, 3.0]), 0.1), (FullMetric(spd(1).float()), None),
                (LowRankMetric([1.0, 1.0, 1.0], FACTOR.float()), Smoothing.full(spd(2).float()))]  # fmt: skip
    for metric, smoothing in variants:
        field = NWField(points, CondOT(0.01), metric, smoothing)
        with Watch() as seen:
            p = field.posterior(x, t, MOMENTS)
            field.weights(x, t)
            field.attribute(x, t)
            field(x.clone().requires_grad_(), t).sum().backward()
        assert not seen.wide
        assert not p.proven.any()
