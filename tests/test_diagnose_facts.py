"""The descriptive facts of a diagnosis against closed forms, laws of Gaussian data, identities and golden values."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import asdict

import pytest
import torch

from nwflow.diagnose import collapse, dimension
from nwflow.diagnose.collapse import (
    at_log_snr,
    concentration,
    crossing,
    intrinsic_dimension,
    log_weights,
    n_eff_by_d,
    n_eff_by_m,
)
from nwflow.diagnose.geometry import geometry, round_participation
from nwflow.metrics import effective_sample_size

F64 = torch.float64
TIGHT = 1e-9  # a few hundred float64 numbers summed, through an eigenvalue decomposition
SEEDS = (0, 1, 2)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def ellipse():
    a = 2 * math.pi * torch.arange(200, dtype=F64) / 200
    return torch.stack([100 * a.cos(), 0.1 * a.sin()], 1)


def slow_n_eff(queries, noise, references, h):
    """Median of 1 / sum w^2 over references unlike the query, one query at a time with Python floats."""
    found = []
    for q, e in zip(queries, noise):
        x = q + h * e
        logs = [-float((x - s).square().sum()) / (2 * h * h) for s in references if not torch.equal(s, q)]
        w = [math.exp(v - max(logs)) for v in logs]
        found.append(sum(w) ** 2 / sum(v * v for v in w))
    return float(torch.tensor(found, dtype=F64).quantile(0.5))


# geometry


def test_ellipse():
    g = geometry(ellipse(), ["wide", "flat"])
    assert g.spectrum == pytest.approx((1 - 1 / 1000001, 1 / 1000001), rel=TIGHT)
    assert g.participation_ratio == pytest.approx(1.000002, rel=TIGHT)
    assert g.condition == pytest.approx(1e6, rel=1e-8)  # singular values 1e3 apart: 1e3 eps, squared, and some margin
    assert g.scale_imbalance == pytest.approx(1000, rel=TIGHT)
    assert [name for name, _ in g.columns] == ["wide", "flat"]
    assert [value for _, value in g.columns] == pytest.approx([math.sqrt(5000), math.sqrt(0.005)], rel=TIGHT)
    assert g.anisotropy == pytest.approx(1, abs=3e-6)  # 1 - (PR - 1) / (R - 1), R = 1.98
    assert g.local_anisotropy > 0.9  # a curve in the plane: every neighbourhood but those at the two tips is a line


def test_what_equal_points_do_not_determine_is_none():
    for n in (1, 5):
        g = asdict(geometry(torch.tensor([[2.0, -1.0]], dtype=F64).repeat(n, 1)))
        assert g.pop("constant_columns") == 2
        assert g.pop("spectrum") == () and g.pop("columns") == ()
        assert set(g.values()) == {None}


def test_two_points_are_a_line_that_no_cloud_of_two_could_help_being():
    g = geometry(torch.tensor([[0.0, 0.0, 7.0], [3.0, 4.0, 7.0]], dtype=F64))
    assert g.spectrum == (1.0,) and g.participation_ratio == pytest.approx(1) and g.condition == 1
    assert g.anisotropy is None and g.local_anisotropy is None
    assert g.radial == pytest.approx(0, abs=1e-15) and g.tangential == pytest.approx(
        1
    )  # seen from the middle: opposite
    assert g.constant_columns == 1 and g.scale_imbalance == pytest.approx(4 / 3)


def test_a_line_is_1_and_a_regular_simplex_0():
    line = torch.arange(50, dtype=F64)[:, None] * torch.tensor([1.0, 2.0, 2.0], dtype=F64)
    g = geometry(line)
    assert g.anisotropy == pytest.approx(1, abs=1e-12) and g.local_anisotropy == pytest.approx(1, abs=1e-12)
    assert g.condition == 1  # the other two eigenvalues are rounding
    g = geometry(torch.eye(40, 300, dtype=F64))
    assert g.spectrum == pytest.approx([1 / 39] * 39) and g.participation_ratio == pytest.approx(39)
    assert g.anisotropy == 0 and g.constant_columns == 260 and g.radial == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("n", "d"), [(2000, 2), (2000, 20), (300, 100), (200, 500)])
def test_round_clouds_are_round_however_few_the_points(n, d, seed):
    g = geometry(normal(n, d, seed=seed), seed=seed)
    # the participation ratio of 200 points or more varies by under 1 %; neighbourhoods at the edge are lopsided
    assert g.anisotropy < 0.01 and g.local_anisotropy < 0.05
    assert g.radial / g.tangential == pytest.approx(math.sqrt(0.5), rel=0.1)  # 1 / sqrt(2 n) = 5 % for n = 200


def test_expected_participation_of_a_gaussian_sample():
    nu, d, draws = 7, 5, 20_000
    x = normal(draws, nu + 1, d)
    x = x - x.mean(1, keepdim=True)
    gram = x.mT @ x
    purity = gram.square().sum((1, 2)) / gram.diagonal(dim1=1, dim2=2).sum(1).square()
    # exact in expectation; 4 standard errors
    error = 4 * float(purity.std()) / math.sqrt(draws)
    assert float(purity.mean()) == pytest.approx(1 / round_participation(nu, d, 1 + 2 / d), abs=error)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bent_sheet_is_rounder_than_its_neighbourhoods(seed):
    u = normal(2000, 3, seed=seed)
    sphere = u / torch.linalg.vector_norm(u, dim=1, keepdim=True)
    g = geometry(sphere, seed=seed)
    assert g.anisotropy < 0.02
    assert 0.35 < g.local_anisotropy < 0.65  # a disc in space has PR 2 of 3: one half


@pytest.mark.parametrize("seed", SEEDS)
def test_radial_against_tangential_tells_shells_from_gaussians(seed):
    x = normal(2000, 30, seed=seed)
    sphere = x / torch.linalg.vector_norm(x, dim=1, keepdim=True)
    shells = sphere * (1 + torch.arange(2000) % 2)[:, None]
    stretched = x * torch.logspace(0, -2, 30, dtype=F64)
    one, two, gauss = (geometry(p, seed=seed) for p in (sphere, shells, stretched))
    assert one.tangential == pytest.approx(1 / math.sqrt(30), rel=0.02)
    assert one.radial < 0.1 * one.tangential  # only the sampled mean is off the centre
    assert two.radial == pytest.approx(1 / 3, rel=0.02)  # radii 1 and 2: sd 1/2 over mean 3/2
    # a Gaussian of any shape: sqrt(1/2), to the next order in 1 / PR = 1 / 8
    assert gauss.radial / gauss.tangential == pytest.approx(math.sqrt(0.5), rel=0.1)


def test_scale_shift_and_rotation():
    x = normal(300, 6) * torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=F64)
    g = geometry(x)
    q = torch.linalg.qr(normal(6, 6, seed=1)).Q
    for factor in (1e30, 1e-30, 1e-150):
        other = geometry(factor * x)
        for name in ("participation_ratio", "condition", "anisotropy", "local_anisotropy", "radial", "tangential"):
            assert getattr(other, name) == pytest.approx(getattr(g, name), rel=TIGHT), name
        assert other.columns[0][1] == pytest.approx(factor * g.columns[0][1], rel=TIGHT)
    turned = geometry(x @ q + 100)  # the shift costs two of sixteen digits
    assert turned.spectrum == pytest.approx(g.spectrum, rel=TIGHT)
    assert turned.local_anisotropy == pytest.approx(g.local_anisotropy, rel=TIGHT)
    assert turned.radial == pytest.approx(g.radial, rel=TIGHT)


def test_fewer_points_than_dimensions_and_a_set_too_large_for_an_svd():
    x = normal(30, 400)
    s = torch.linalg.svdvals(x - x.mean(0))[:29].square()
    assert geometry(x).spectrum == pytest.approx((s / s.sum()).tolist(), rel=TIGHT)
    small, large = geometry(x), None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nwflow.diagnose.geometry._EXACT", 0)
        large = geometry(x)
    assert large.spectrum == pytest.approx(small.spectrum, rel=TIGHT)
    assert large.condition == pytest.approx(small.condition, rel=TIGHT)
    assert len(geometry(normal(600, 300)).spectrum) == 256


def test_constant_and_extreme_columns():
    scales = torch.tensor([3.0, 0, 1e-20, 5e8, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11], dtype=F64)
    signs = torch.cat([torch.ones(25, 1, dtype=F64), -torch.ones(25, 1, dtype=F64)])
    x = 0.1 + signs * scales
    x[:, 2] = 1e-20 * signs[:, 0]  # 0.1 + 1e-20 is 0.1
    g = geometry(x)
    assert g.constant_columns == 1
    assert [c for c, _ in g.columns] == ["3", "13", "12", "11", "10", "6", "0", "5", "4", "2"]
    assert g.scale_imbalance == pytest.approx(5e28, rel=1e-9)
    with pytest.raises(ValueError, match="names: expected 14"):
        geometry(x, ["a"])
    with pytest.raises(ValueError, match="finite"):
        geometry(x / 0)


# intrinsic dimension and concentration


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_intrinsic_dimension_of_a_linear_image(k, seed):
    x = normal(1000, k, seed=seed) @ normal(k, 12, seed=seed + 10)
    found = intrinsic_dimension(torch.cat([x, x[:700]]), seed)  # duplicates would be nearest at distance 0
    assert {"TwoNN", "MLE", "correlation"} <= set(found)
    for name, value in found.items():
        assert value == pytest.approx(k, rel=0.2), name  # edges and curvature of the density: the worst is TLE
    assert found == intrinsic_dimension(torch.cat([x, x[:700]]), seed)


def test_estimators_from_their_definitions():
    x = normal(60, 3)
    r = [[float((a - b).norm()) for j, b in enumerate(x) if j != i] for i, a in enumerate(x)]
    r = [sorted(row) for row in r]
    inverse = sum(math.log(row[19] / row[j]) for row in r for j in range(19)) / (60 * 19)
    found = intrinsic_dimension(x)
    assert found["MLE"] == pytest.approx(1 / inverse, rel=TIGHT)
    logs = sorted(math.log(row[1] / row[0]) for row in r)[:54]
    rise = [-math.log(1 - i / 61) for i in range(1, 55)]
    slope = sum(a * b for a, b in zip(logs, rise)) / sum(a * a for a in logs)
    assert found["TwoNN"] == pytest.approx(slope, rel=TIGHT)


def test_dimension_of_degenerate_sets_is_none():
    for x in (normal(1, 3), normal(1, 3).repeat(4, 1)):
        assert {v for k, v in intrinsic_dimension(x).items() if k != "lPCA"} == {None}
        assert concentration(x) == (None, None)
    simplex = intrinsic_dimension(torch.eye(30, dtype=F64))  # all distances equal: no ratio to learn from
    assert [simplex[k] for k in ("TwoNN", "MLE", "correlation")] == [None] * 3


def test_estimators_that_are_not_installed(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "skdim" else find(name, *a))
    assert "pip install 'nwflow[dimension]'" in dimension.missing_estimators()
    assert set(intrinsic_dimension(normal(100, 2))) == {"TwoNN", "MLE", "correlation"}


def test_a_failing_estimator_is_none(monkeypatch):
    pytest.importorskip("skdim")

    def fail():
        raise RuntimeError("no")

    monkeypatch.setattr("skdim.id.MOM", fail)
    found = intrinsic_dimension(normal(100, 2))
    assert found["MOM"] is None and found["lPCA"] == 2


def test_concentration():
    square = torch.tensor([[0.0, 0], [1, 0], [0, 1], [1, 1]], dtype=F64)
    mean = (2 + math.sqrt(2)) / 3
    deviation = math.sqrt(4 / 3 - mean**2)
    assert concentration(square) == pytest.approx((mean - 1, deviation / mean), rel=TIGHT)
    twice = square.repeat(2, 1)  # equal points count as pairs, 1 of 7, but not as nearest
    mean, square_mean = 6 / 7 * mean, 8 / 7
    assert concentration(twice) == pytest.approx((mean - 1, math.sqrt(square_mean - mean**2) / mean), rel=TIGHT)
    contrast, variation = concentration(normal(1000, 1000))
    assert contrast < 0.1
    assert variation == pytest.approx(1 / math.sqrt(2000), rel=0.05)  # |x - y|^2 / 2 is chi^2_d


# effective number of references


def test_n_eff_of_orthogonal_references():
    # a logit gap of c^2 (t / (1 - t))^2 between one reference and n - 1 others
    for c2, first, expected in ((16.0, 0.9999996624, 1.0000006752), (1.0, 0.4753668864, 3.1474223219)):
        s = math.sqrt(c2) * torch.eye(4, dtype=F64)
        h = at_log_snr(0.0, 1.0)[1]  # t = 0.5
        logs = log_weights(s[:1], torch.zeros(1, 4, dtype=F64), s, h)
        assert float(logs.softmax(1)[0, 0]) == pytest.approx(first, abs=1e-10)
        assert float(effective_sample_size(log_weights=logs)[0]) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("log_snr", [-8.0, 0.0, 8.0])
@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_log_weights_against_differences(log_snr, shift):
    q, s, eps = normal(5, 40) + shift, normal(30, 40, seed=1) + shift, normal(5, 40, seed=2)
    h = at_log_snr(log_snr, 1.0)[1]
    direct = -(q[:, None] - s + h * eps[:, None]).square().sum(2) / (2 * h * h) + eps.square().sum(1, keepdim=True) / 2
    # the noise meets the shift in one product of size shift * sqrt(d) / h
    assert log_weights(q, eps, s, h) == pytest.approx(direct, rel=1e-11, abs=1e-13 * (1 + shift / h))


def test_measured_n_eff_is_the_median_of_a_slow_loop():
    x = normal(40, 3) * 5 + 7
    x[10] = x[20]  # not among each other's references
    generator = torch.Generator().manual_seed(4)
    torch.randperm(40, generator=generator), torch.randperm(40, generator=generator)  # references, queries: all of them
    eps = torch.randn(40, 3, generator=generator, dtype=F64)
    h = float(x.var(0, correction=0).mean().sqrt()) * math.exp(-1.0 / 2)
    expected = slow_n_eff(x, eps, x, h)
    by_m, by_d = n_eff_by_m(x, 1.0, seed=4), n_eff_by_d(x, 1.0, seed=4)
    assert [v.at for v in by_m.values] == [9, 19, 39, 78, 156, 624, 2496]
    assert by_m.values[2].value == pytest.approx(expected, rel=1e-9)
    assert [v.at for v in by_d.values] == [1, 2, 3, 6]
    assert by_d.values[2].value == pytest.approx(expected, rel=1e-9)


def test_subsets_of_interchangeable_references():
    # a regular simplex and no noise to speak of at log-SNR -> -inf: every subset of m' has n_eff = m'
    found = n_eff_by_m(torch.eye(64, dtype=F64), -40.0)
    assert [v.value for v in found.values] == pytest.approx([v.at for v in found.values], rel=1e-6)
    assert found.slope == pytest.approx((1, 1, 1), rel=1e-6)
    assert [v.extrapolated for v in found.values] == [False] * 3 + [True] * 4


@pytest.mark.parametrize("seed", SEEDS)
def test_laws_of_gaussian_data(seed):
    d, m, log_snr = 8, 2000, -1.0
    rho = math.exp(log_snr)
    rate = math.log1p(rho) - math.log1p(2 * rho) / 2 + rho / (1 + 2 * rho)
    x = normal(m, d, seed=seed)
    by_m, by_d = n_eff_by_m(x, log_snr, seed), n_eff_by_d(x, log_snr, seed)
    assert by_m.slope[0] == pytest.approx(1, abs=0.08)  # n_eff is in the hundreds; it nears 1 from below
    assert by_m.slope[1] < by_m.slope[0] < by_m.slope[2]
    # the law holds at the mean of |x|^2; its median and the fit over 4 to 8 dimensions differ by a tenth
    assert by_d.slope[0] == pytest.approx(-rate, rel=0.15)
    full = next(v for v in by_d.values if v.at == d)
    assert math.log(full.value / m) == pytest.approx(-rate * d, abs=0.35)
    assert full.low < full.value < full.high


@pytest.mark.parametrize("seed", SEEDS)
def test_extrapolation_finds_what_more_data_shows(seed):
    x = normal(4200, 6, seed=seed)
    few, many = n_eff_by_m(x[:250], -1.0, seed, x[4000:]), n_eff_by_m(x[:4000], -1.0, seed, x[4000:])
    predicted = next(v for v in few.values if v.at == 4000)
    measured = next(v for v in many.values if v.at == 4000)
    assert predicted.extrapolated and not measured.extrapolated
    # 16 times as many: slopes measured at 62 to 250 are short of 1 by 0.03 to 0.1, 16^-0.1 = 0.76
    assert 0.65 < predicted.value / measured.value < 1.2


def test_n_eff_does_not_depend_on_scale_or_shift_and_can_be_had_again():
    x = normal(300, 5)
    a = n_eff_by_m(x, 0.5, seed=3)
    assert a == n_eff_by_m(x, 0.5, seed=3) and a != n_eff_by_m(x, 0.5, seed=4)
    for y in (1e30 * x, 1e-30 * x, x + 100):
        other = n_eff_by_m(y, 0.5, seed=3)
        assert [v.value for v in other.values] == pytest.approx([v.value for v in a.values], rel=1e-9)


def test_copies_of_the_query_are_not_among_the_others():
    x = normal(100, 4)
    high = 12.0  # every copy would share the weight
    assert n_eff_by_m(x.repeat(3, 1), high).values[-5].value < 3.5  # the nearest other point is there three times
    assert n_eff_by_m(x, high, held_out=x[:20]).values[-5].at == 99
    nothing = n_eff_by_m(x[:1].repeat(5, 1), 0.0)
    assert nothing == ((), None) == n_eff_by_d(x[:1], 0.0)


def test_two_points_and_one_dimension():
    found = n_eff_by_m(normal(2, 3), 0.0)
    assert [(v.at, v.value) for v in found.values] == [(1, 1)] and found.slope is None
    assert len(n_eff_by_d(normal(50, 1), 0.0).values) == 1
    with pytest.raises(ValueError, match="log_snr: expected a number"):
        n_eff_by_m(normal(5, 3), math.nan)


def test_crossing():
    assert crossing([0.0, 1.0, 2.0, 3.0], [8.0, 2.0, 3.0, 1.0], 2.0) == pytest.approx(2 + math.log(1.5) / math.log(3))
    assert crossing([0.0, 1.0], [1.9, 1.0], 2.0) is None  # below from the start
    assert crossing([0.0, 1.0], [9.0, 3.0], 2.0) is None
    assert crossing([0.0, 1.0], [2.0, 1.0], 2.0) == 0
    grid = torch.linspace(-3, 3, 13, dtype=F64)
    curve = (5 * (0.3 - grid)).exp()  # log-linear: exact between the grid's points
    assert crossing(grid.tolist(), curve.tolist(), 1.0) == pytest.approx(0.3, rel=TIGHT)
    with pytest.raises(ValueError, match="ascending"):
        crossing([1.0, 0.0], [2.0, 1.0], 2.0)


def test_time_and_bandwidth_of_a_log_snr():
    for log_snr in (-4.0, 0.0, 3.0):
        t, h = at_log_snr(log_snr, 2.5)
        assert 2 * math.log(t * 2.5 / (1 - t)) == pytest.approx(log_snr, abs=1e-12)
        assert (1 - t) / t == pytest.approx(h)
    assert collapse.missing_estimators is dimension.missing_estimators
