"""Metrics and smoothings as linear algebra: roots, inverses, determinants, fits, and what they refuse."""

import copy

import pytest
import torch

from nwflow import Support
from nwflow.metric import (
    DiagonalMetric,
    FullMetric,
    IsotropicMetric,
    LowRankMetric,
    Metric,
    Smoothing,
    as_smoothing,
    shrunk_covariance,
)

F64 = torch.float64
D = 5


def spd(seed: int = 0) -> torch.Tensor:
    a = torch.randn(D, D, dtype=F64, generator=torch.Generator().manual_seed(seed))
    return a @ a.T + 0.2 * torch.eye(D, dtype=F64)


PRECISION = torch.tensor([0.25, 1.0, 4.0, 9.0, 0.1], dtype=F64)
FACTOR = torch.randn(D, 2, dtype=F64, generator=torch.Generator().manual_seed(3))
METRICS = {
    "isotropic": (IsotropicMetric(2.5), 2.5 * torch.eye(D, dtype=F64)),
    "diagonal": (DiagonalMetric(PRECISION), torch.diag(PRECISION)),
    "full": (FullMetric(spd()), spd()),
    "low-rank precision": (LowRankMetric(PRECISION, FACTOR), torch.diag(PRECISION) + FACTOR @ FACTOR.T),
    "low-rank covariance": (
        LowRankMetric(PRECISION, FACTOR, of="covariance"),
        torch.linalg.inv(torch.diag(PRECISION) + FACTOR @ FACTOR.T),
    ),
    "more factors than coordinates": (
        LowRankMetric(PRECISION, torch.cat([FACTOR] * 4, 1)), torch.diag(PRECISION) + 4 * FACTOR @ FACTOR.T,
    ),
    "no factor": (LowRankMetric(PRECISION, torch.zeros(D, 1, dtype=F64)), torch.diag(PRECISION)),
}  # fmt: skip
every_metric = pytest.mark.parametrize(("metric", "m"), METRICS.values(), ids=METRICS)


def close(a, b, tol=1e-11):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@every_metric
def test_whitened_distances_are_those_of_the_metric(metric, m, randn):
    x = randn(7, 3, D)
    close(metric.whiten(x).square().sum(-1), torch.einsum("abi,ij,abj->ab", x, m, x))
    close(metric.matrix(D), m)


@every_metric
def test_unwhitening_is_the_inverse_and_colours_noise(metric, m, randn):
    x = randn(4, D)
    close(metric.unwhiten(metric.whiten(x)), x)
    close(metric.whiten(metric.unwhiten(x)), x)
    root = metric.unwhiten(torch.eye(D, dtype=F64))  # row k is W^-1 e_k
    close(root.T @ root, torch.linalg.inv(m))


@every_metric
def test_pull_is_the_transpose_of_whitening(metric, m, randn):
    x, g = randn(4, D), randn(4, D)
    close((metric.whiten(x) * g).sum(), (x * metric.pull(g)).sum())


@every_metric
def test_the_log_determinant_is_half_that_of_the_matrix(metric, m):
    close(metric.log_det(D), 0.5 * torch.linalg.slogdet(m).logabsdet)
    assert metric.log_det(D).ndim == 0


@every_metric
def test_a_diagonal_root_is_named(metric, m):
    diagonal = isinstance(metric, DiagonalMetric)
    assert (metric.scale is not None) == diagonal
    if diagonal:
        close(metric.scale.expand(D).square(), m.diagonal())


@every_metric
def test_copies_and_state(metric, m, randn):
    x = randn(3, D)
    other = copy.deepcopy(metric)
    assert torch.equal(other.whiten(x), metric.whiten(x))
    other.load_state_dict(metric.state_dict())
    assert not list(metric.parameters()) and len(list(metric.buffers())) >= 1


def test_python_numbers_are_taken_exactly():
    assert float(IsotropicMetric(0.1).precision) == 0.1
    assert DiagonalMetric([0.1, 0.3]).precision.tolist() == [0.1, 0.3]
    assert Smoothing.isotropic(0.3).variances.tolist() == [0.3**2]
    assert Smoothing.diagonal([0.1, 0.3]).variances.tolist() == [0.1, 0.3]
    close(FullMetric([[0.3, 0.1], [0.1, 0.7]]).matrix(2), torch.tensor([[0.3, 0.1], [0.1, 0.7]], dtype=F64), 1e-15)
    close(Smoothing.full([[0.3, 0.1], [0.1, 0.7]]).matrix(2), torch.tensor([[0.3, 0.1], [0.1, 0.7]], dtype=F64), 1e-15)
    close(Smoothing.low_rank([0.1, 0.0], [[0.3], [0.2]]).matrix(2),
          torch.tensor([[0.19, 0.06], [0.06, 0.04]], dtype=F64), 1e-15)  # fmt: skip
    assert as_smoothing(0.3).variances.tolist() == [0.3**2]
    assert as_smoothing(torch.tensor(0.3, dtype=F64)).variances.tolist() == [0.3**2]


# --- fits -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sample(randn):
    """5000 draws with covariance ``spd()`` about (10, ..., 10)."""
    return randn(5000, D) @ torch.linalg.cholesky(spd()).T + 10.0


def covariance(x):
    c = x - x.mean(0)
    return c.T @ c / len(x)


def test_fits_are_inverse_covariances(sample):
    c = covariance(sample)
    close(DiagonalMetric.fit(sample).matrix(D), torch.diag(1 / c.diagonal()))
    close(IsotropicMetric.fit(sample).matrix(D), torch.eye(D, dtype=F64) / c.diagonal().mean())
    shrunk = 0.7 * c + 0.3 * c.diagonal().mean() * torch.eye(D, dtype=F64)
    close(FullMetric.fit(sample, shrinkage=0.3).matrix(D), torch.linalg.inv(shrunk), 1e-9)
    values, vectors = torch.linalg.eigh(c)
    rest = values[:3].mean()
    expected = (vectors * torch.cat([rest.expand(3), values[3:]])) @ vectors.T
    close(LowRankMetric.fit(sample, rank=2).matrix(D), torch.linalg.inv(expected), 1e-9)


def test_the_ledoit_wolf_share_is_scikit_learns(sample):
    from sklearn.covariance import LedoitWolf

    x = sample[:40]
    expected = torch.from_numpy(LedoitWolf().fit(x.numpy()).covariance_)
    close(shrunk_covariance(x), expected, 1e-10)


def test_fits_weigh_points_by_their_prior_and_ignore_masked_ones(sample):
    x = sample[:6]
    weights, mask = torch.tensor([1.0, 2.0, 3.0, 0.0, 1.0, 7.0]), torch.tensor([1, 1, 1, 1, 1, 0]).bool()
    repeated = torch.cat([x[[0]], x[[1]], x[[1]], x[[2]], x[[2]], x[[2]], x[[4]]])
    fitted = DiagonalMetric.fit(Support(x, weights, mask=mask))
    close(fitted.precision, DiagonalMetric.fit(repeated).precision, 1e-6)  # weights are float32
    tasks = Support.batch([x[:3], x[3:]])
    close(DiagonalMetric.fit(tasks).precision, DiagonalMetric.fit(x).precision, 1e-9)
    close(DiagonalMetric.fit(x.reshape(6, 5, 1)).precision, DiagonalMetric.fit(x).precision)


def test_constant_columns_get_a_floor_and_constant_data_is_refused(sample):
    x = sample.clone()
    x[:, 2] = 3.0
    fitted = DiagonalMetric.fit(x, floor=1e-2)
    largest = covariance(x).diagonal().max()
    assert float(fitted.precision[2]) == pytest.approx(1 / float(largest * 1e-4))
    assert torch.isfinite(FullMetric.fit(x).matrix(D)).all()
    for fit in (DiagonalMetric.fit, IsotropicMetric.fit):
        with pytest.raises(ValueError, match="support: expected points that differ"):
            fit(torch.ones(4, 3))
    with pytest.raises(ValueError, match="floor"):
        DiagonalMetric.fit(x, floor=0.0)


def test_fits_refuse_what_has_no_answer(sample):
    with pytest.raises(ValueError, match="at least 2 points"):
        FullMetric.fit(sample[:1])
    for rank in (0, D, D + 1):
        with pytest.raises(ValueError, match="rank: expected"):
            LowRankMetric.fit(sample, rank)
    with pytest.raises(ValueError, match="rank: expected less than the 1 directions that the support spans, got 3"):
        LowRankMetric.fit(torch.cat([sample[:2]] * 3), 3)
    for share in (-0.1, 1.5, "oracle"):
        with pytest.raises(ValueError, match="shrinkage"):
            FullMetric.fit(sample, shrinkage=share)
    with pytest.raises(ValueError, match="matrix: expected"):
        FullMetric.fit(sample[:3], shrinkage=0.0)  # three points span two directions


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_metric_without_full_rank_is_refused():
    singular = FACTOR @ FACTOR.T
    with pytest.raises(ValueError, match=r"matrix: expected a positive definite metric.*LowRankMetric"):
        FullMetric(singular)
    with pytest.raises(ValueError, match="positive definite"):
        FullMetric(torch.diag(torch.tensor([1.0, -1.0])))
    with pytest.raises(ValueError, match="positive definite"):
        FullMetric(torch.zeros(2, 2))
    FullMetric(singular + 1e-6 * torch.eye(D, dtype=F64))


def test_malformed_metrics_are_refused():
    with pytest.raises(ValueError, match=r"matrix: expected a square matrix \(d, d\), got shape \(2, 3\)"):
        FullMetric(torch.ones(2, 3))
    with pytest.raises(ValueError, match="symmetric matrix, got an asymmetry of 1"):
        FullMetric([[1.0, 0.0], [1.0, 1.0]])
    with pytest.raises(ValueError, match="finite"):
        FullMetric([[float("nan"), 0.0], [0.0, 1.0]])
    for bad in ([1.0, 0.0], [1.0, -2.0], [1.0, float("inf")], [1.0, float("nan")], []):
        with pytest.raises(ValueError, match="precision: expected finite positive numbers"):
            DiagonalMetric(bad)
    with pytest.raises(ValueError, match="precision"):
        IsotropicMetric(0.0)
    with pytest.raises(ValueError, match="diagonal"):
        LowRankMetric([1.0, 0.0], torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"factor: expected a finite matrix \(2, rank\), got shape \(3, 1\)"):
        LowRankMetric([1.0, 1.0], torch.ones(3, 1))
    with pytest.raises(ValueError, match="of: expected"):
        LowRankMetric([1.0, 1.0], torch.ones(2, 1), of="noise")
    for call in (lambda m: m.whiten, lambda m: m.unwhiten, lambda m: m.pull):
        with pytest.raises(TypeError, match="abstract"):
            call(Metric())(torch.ones(2))


def test_malformed_smoothings_are_refused():
    with pytest.raises(ValueError, match="h0: expected finite non-negative"):
        Smoothing.isotropic(-0.1)
    with pytest.raises(ValueError, match="variances: expected finite non-negative numbers, got -1.0 at index 1"):
        Smoothing.diagonal([1.0, -1.0])
    with pytest.raises(ValueError, match="positive semi-definite"):
        Smoothing.full([[1.0, 0.0], [0.0, -1.0]])
    with pytest.raises(ValueError, match="symmetric"):
        Smoothing.full([[1.0, 0.5], [0.0, 1.0]])
    with pytest.raises(ValueError, match="factor"):
        Smoothing.low_rank([1.0, 1.0], torch.ones(3, 1))
    for bad in ("0.1", [0.1], torch.ones(2)):
        with pytest.raises(TypeError, match="smoothing: expected None, a number h0 or a Smoothing"):
            as_smoothing(bad)
    assert as_smoothing(None) is None


@pytest.mark.parametrize(("smoothing", "matrix"), [
    (Smoothing.isotropic(0.5), 0.25 * torch.eye(D, dtype=F64)),
    (Smoothing.diagonal(PRECISION), torch.diag(PRECISION)),
    (Smoothing.low_rank(PRECISION, FACTOR), torch.diag(PRECISION) + FACTOR @ FACTOR.T),
    (Smoothing.full(FACTOR @ FACTOR.T), FACTOR @ FACTOR.T),
], ids=["isotropic", "diagonal", "low-rank", "full"])  # fmt: skip
def test_smoothings_know_their_covariance(smoothing, matrix):
    close(smoothing.matrix(D), matrix)
    assert (smoothing.variances is not None) == (smoothing.kind in ("isotropic", "diagonal"))
    assert smoothing.d == (None if smoothing.kind == "isotropic" else D)


# --- noise and starts of samplers -------------------------------------------------------------------------------------


@every_metric
def test_coloured_noise_has_the_covariance_of_the_path(metric, m, randn):
    from nwflow.field import NWField

    field = NWField(randn(6, D), metric=metric)
    root = field.colour(torch.eye(D, dtype=F64))
    close(root.T @ root, torch.linalg.inv(m))
    assert field.colour(randn(3, D, dtype=torch.float32)).dtype == torch.float32


@every_metric
@pytest.mark.parametrize("smoothed", [False, True])
def test_the_prior_has_the_mean_and_covariance_of_the_start(metric, m, smoothed, randn):
    """x_0 ~ N(alpha_0 mean(S), sigma_0^2 M^-1 + alpha_0^2 Sigma): linear in z, so its matrix is exact."""
    from nwflow.field import NWField
    from nwflow.paths import CondOT, VarianceExploding, VariancePreserving

    points = randn(6, D) + 20.0
    weights = torch.tensor([1.0, 2.0, 1.0, 1.0, 3.0, 1.0], dtype=F64)
    cov = spd(5) if smoothed else torch.zeros(D, D, dtype=F64)
    smoothing = Smoothing.full(cov) if smoothed else None
    for path in (CondOT(), VariancePreserving(), VarianceExploding(0.1, 10.0)):
        for t in (0.0, 0.3):
            field, at = NWField(Support(points, weights), path, metric, smoothing), path(t)
            mean = field.prior(torch.zeros(1, D, dtype=F64), t)
            close(mean[0], at.alpha * (weights / weights.sum()) @ points, 1e-10)
            root = field.prior(torch.eye(D, dtype=F64), t) - mean
            close(root.T @ root, at.sigma**2 * torch.linalg.inv(m) + at.alpha**2 * cov, 1e-9)


def test_the_prior_of_tasks_starts_each_where_its_data_are(randn):
    from nwflow.field import NWField
    from nwflow.paths import VariancePreserving

    points = randn(2, 4, 3) + torch.tensor([10.0, -10.0], dtype=F64).view(2, 1, 1)
    path = VariancePreserving()
    field = NWField(Support.batch(points), path)
    mean = field.prior(torch.zeros(2, 5, 3, dtype=F64))
    close(mean, path(0.0).alpha * points.mean(1, keepdim=True).expand(2, 5, 3), 1e-12)


def test_length_scales_measure_spread_and_gaps():
    from nwflow.field import NWField

    grid = torch.stack(torch.meshgrid(torch.arange(10.0), torch.arange(10.0), indexing="ij"), -1).reshape(-1, 2)
    data, near = NWField(grid).length_scales()
    assert data == pytest.approx(float(Support(grid).data_scale), rel=1e-9)
    assert near == pytest.approx(1 / 2**0.5, rel=1e-6)
    doubled = NWField(torch.cat([grid, grid]) + 100.0).length_scales()
    assert doubled == pytest.approx((data, near), rel=1e-5)  # duplicates are no gap
    wide = NWField(grid, smoothing=0.5).length_scales()
    assert wide == pytest.approx((float(torch.tensor(data).hypot(torch.tensor(0.5))), (0.5 + 0.25) ** 0.5), rel=1e-5)
    one = NWField(torch.zeros(1, 2), smoothing=0.25).length_scales()
    assert one == pytest.approx((0.25, 0.25))
    metric = NWField(grid, metric=IsotropicMetric(4.0)).length_scales()
    assert metric == pytest.approx((2 * data, 2 * near), rel=1e-6)
