"""Metrics against double loops in float64, identities, invariances and the levels that intervals and tests claim."""

from __future__ import annotations

import json
import math
import os
import sys

import numpy as np
import pytest
import scipy.stats
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nwflow import metrics
from nwflow.metrics import (
    c2st,
    coverage,
    effective_sample_size,
    energy_distance,
    median_bandwidth,
    memorisation,
    mmd2,
    silverman_bandwidth,
    sliced_wasserstein,
)
from nwflow.metrics._points import Cloud

F64 = torch.float64
WRONG_TYPES = pytest.mark.skipif(
    os.environ.get("NWFLOW_TYPECHECK") == "1", reason="the check of annotations at run time refuses these calls first"
)
TIGHT = 1e-12  # sums of fewer than 1e4 float64 numbers of order 1


def normal(*shape, seed=0, dtype=F64, shift=0.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).add(shift).to(dtype)


def distance(a, b):
    return math.sqrt(sum((p - q) ** 2 for p, q in zip(a, b, strict=True)))


def distances(x, y):
    """Double loop over rows, with Python floats."""
    left, right = (t.double().reshape(len(t), -1).tolist() for t in (x, y))
    return np.array([[distance(a, b) for b in right] for a in left])


def slow_statistic(kernel, x, y, estimator):
    kxx, kyy, kxy = kernel(distances(x, x)), kernel(distances(y, y)), kernel(distances(x, y))
    if estimator == "biased":
        return kxx.mean() + kyy.mean() - 2 * kxy.mean()
    off = [(k.sum() - np.trace(k)) / (len(k) * (len(k) - 1)) for k in (kxx, kyy)]
    return off[0] + off[1] - 2 * kxy.mean()


def gaussian(*bandwidths):
    return lambda d: np.mean([np.exp(-(d**2) / (2 * h * h)) for h in bandwidths], axis=0)


class LargestTensor(TorchDispatchMode):
    """The most numbers in any tensor that an operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, torch.Tensor):
                self.numel = max(self.numel, t.numel())
        return out


# Distances ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 3, 40, 200])
@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("block_size", [None, 1, 7])
def test_distances_match_a_double_loop_and_are_exact_zeros_on_identical_rows(d, offset, block_size):
    x = normal(23, d, dtype=torch.float32, shift=offset)
    x[5], x[9] = x[3], x[3] + 1e-3  # a duplicate and a neighbour, which the expanded square would lose
    slow = distances(x, x)
    for p, q, d2 in Cloud.of(x, block_size=block_size).cross(0, 0):
        # eps^(2/3) = 4e-11 is what pairs that are just not repaired may have lost
        np.testing.assert_allclose(d2.sqrt().numpy(), slow[p.local, q.local], rtol=2e-10, atol=0)


def test_self_distances_of_offset_data_are_never_negative():
    x = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) + 1000
    (_, _, d2) = next(Cloud.of(x).pairs())
    assert (d2 >= 0).all()
    assert (d2.diagonal() == 0).all()
    assert (d2.sqrt().fill_diagonal_(1) > 0).all()


def test_two_tight_clusters_keep_their_small_distances():
    x = torch.cat([normal(40, 64) * 1e-6 + 1, normal(40, 64, seed=1) * 1e-6 - 1])
    (_, _, d2) = next(Cloud.of(x).pairs())
    np.testing.assert_allclose(d2.sqrt().numpy(), distances(x, x), rtol=1e-9, atol=0)


def test_half_precision_does_not_overflow():
    x = torch.zeros(2, 768, dtype=torch.float16)
    y = torch.stack([torch.full((768,), 20.0), torch.full((768,), 21.0)]).half()  # squares sum to 307200 > 65504
    r = memorisation(x, y)
    assert r.distance[0] == pytest.approx(20 * 768**0.5, rel=TIGHT)
    assert r.second_distance[0] == pytest.approx(21 * 768**0.5, rel=TIGHT)
    assert energy_distance(x, y, "biased").value == energy_distance(x.float(), y.float(), "biased").value


@pytest.mark.parametrize("metric", [mmd2, energy_distance, memorisation, coverage])
def test_no_tensor_grows_with_the_product_of_the_sizes(metric):
    x, y = normal(1700, 3), normal(2000, 3, seed=1)  # 3.4e6 pairs
    options = {"bandwidth": 1.0} if metric is mmd2 else {}
    with LargestTensor() as largest:
        metric(x, y, **options)
    assert largest.numel <= 1 << 21


# MMD and energy distance ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["biased", "unbiased"])
@pytest.mark.parametrize("event", [(), (2,), (3, 5), (48,)])
def test_mmd_matches_double_loops(estimator, event):
    x, y = normal(9, *event), normal(13, *event, seed=1, shift=0.3)
    for bandwidth in (0.7, (0.5, 1.0, 4.0)):
        hs = bandwidth if isinstance(bandwidth, tuple) else (bandwidth,)
        r = mmd2(x, y, bandwidth, estimator=estimator)
        assert r.value == pytest.approx(slow_statistic(gaussian(*hs), x, y, estimator), abs=TIGHT)
        assert (r.bandwidths, r.n, r.m, r.estimator) == (hs, 9, 13, estimator)
    laplace = mmd2(x, y, 0.7, kernel="laplace", estimator=estimator).value
    assert laplace == pytest.approx(slow_statistic(lambda d: np.exp(-d / 0.7), x, y, estimator), abs=TIGHT)


def test_gaussian_kernel_is_of_the_bandwidth_and_not_of_its_square():
    x, y = torch.zeros(1, 4), torch.ones(1, 4)  # d^2 = 4, biased MMD^2 = 2 - 2 k
    assert 1 - mmd2(x, y, 2.0, estimator="biased").value / 2 == pytest.approx(0.6065306597, abs=1e-10)


def test_unbiased_may_be_negative_and_its_root_is_refused():
    x = torch.tensor([0.0, 1.0], dtype=F64)
    r = mmd2(x, x, 1.0)
    assert r.value == pytest.approx(-0.3934693403, abs=1e-10)
    with pytest.raises(ValueError, match=r"non-negative unbiased estimate.*-0\.393469"):
        r.root()
    biased = mmd2(x, x, 1.0, estimator="biased")
    assert biased.value == 0
    assert biased.root() == 0


@pytest.mark.parametrize("d", [3, 48])
def test_rounding_never_makes_biased_mmd_negative(d):
    x = normal(50, d, dtype=torch.float32)
    values = [mmd2(x, x.roll(s, 0), 1.0, estimator="biased", block_size=8).value for s in range(20)]
    assert min(values) >= 0
    assert max(values) < TIGHT


def test_biased_mmd_is_the_v_statistic_of_one_gram_matrix():
    x, y = normal(20, 3), normal(30, 3, seed=1)
    k = gaussian(1.3)(distances(torch.cat([x, y]), torch.cat([x, y])))
    c = np.concatenate([np.full(20, 1 / 20), np.full(30, -1 / 30)])
    assert mmd2(x, y, 1.3, estimator="biased").value == pytest.approx(c @ k @ c, abs=TIGHT)


@pytest.mark.parametrize("estimator", ["biased", "unbiased"])
def test_energy_distance_is_mmd_with_the_distance_kernel(estimator):
    x, y = normal(11, 4), normal(17, 4, seed=1, shift=0.5)
    r = energy_distance(x, y, estimator)
    assert r.value == pytest.approx(slow_statistic(lambda d: -d, x, y, estimator), abs=TIGHT)


def test_root_of_the_biased_energy_distance_is_scipys():
    x, y = normal(40), normal(25, seed=1, shift=1.0)
    ours = energy_distance(x, y, "biased").root()
    assert ours == pytest.approx(scipy.stats.energy_distance(x.numpy(), y.numpy()), rel=1e-10)


def test_wide_gaussian_kernel_tends_to_the_squared_distance_of_means():
    x, y = normal(30, 2), normal(20, 2, seed=1, shift=1.0)
    h = 1e4  # k = 1 - d^2 / 2 h^2 + O(h^-4)
    gap = float((x.mean(0) - y.mean(0)).square().sum())
    assert mmd2(x, y, h, estimator="biased").value * h**2 == pytest.approx(gap, rel=1e-5)


@pytest.mark.parametrize("statistic", [lambda x, y, **k: mmd2(x, y, 1.5, **k), energy_distance])
def test_two_sample_statistics_do_not_depend_on_order_shift_swap_or_blocks(statistic):
    x, y = normal(37, 40), normal(29, 40, seed=1, shift=0.2)
    base = statistic(x, y)
    same = [
        statistic(x.flip(0), y.roll(3, 0)),
        statistic(x + 1024, y + 1024),
        statistic(y, x),
        statistic(x.reshape(37, 5, 8), y.reshape(29, 5, 8)),
        *(statistic(x, y, block_size=b) for b in (1, 5, 1000)),
    ]
    for other in same:
        assert other.value == pytest.approx(base.value, abs=1e-11)  # the shift rounds x at 1e-13
        assert other.standard_error == pytest.approx(base.standard_error, rel=1e-8)
    float32 = statistic(x.float() + 1024, y.float() + 1024).value
    assert float32 == statistic((x.float() + 1024).double(), (y.float() + 1024).double()).value


@pytest.mark.parametrize("estimator", ["biased", "unbiased"])
def test_jackknife_is_that_of_leaving_each_point_out(estimator):
    x, y = normal(7, 2), normal(9, 2, seed=1, shift=1.0)

    def without(i, j):
        rest = [t[[k for k in range(len(t)) if k != drop]] for t, drop in ((x, i), (y, j))]
        return slow_statistic(gaussian(1.0), *rest, estimator)

    left = [np.array([without(i, None) for i in range(7)]), np.array([without(None, j) for j in range(9)])]
    variance = sum((len(v) - 1) / len(v) * ((v - v.mean()) ** 2).sum() for v in left)
    r = mmd2(x, y, 1.0, estimator=estimator, ci=0.9)
    assert r.standard_error == pytest.approx(variance**0.5, rel=1e-9)
    assert r.interval == pytest.approx([r.value + s * 1.6448536270 * variance**0.5 for s in (-1, 1)])


@pytest.mark.parametrize(("shift", "low", "high"), [(1.0, 0.85, 1.25), (0.0, 1.1, 1.8)])
def test_standard_error_is_right_for_different_laws_and_conservative_for_equal_ones(shift, low, high):
    # 150 trials know a standard deviation within 6 %; degenerate U-statistics have a jackknife ratio of sqrt 2
    results = [mmd2(normal(40, 2, seed=2 * s), normal(60, 2, seed=2 * s + 1, shift=shift), 1.0) for s in range(150)]
    spread = np.std([r.value for r in results])
    errors = [r.standard_error for r in results]
    assert None not in errors
    assert low < np.sqrt(np.mean(np.square(errors))) / spread < high


def test_too_few_points_for_a_jackknife_leave_no_error_bar():
    r = mmd2(normal(2, 3), normal(5, 3, seed=1), 1.0)
    assert (r.standard_error, r.interval) == (None, None)
    assert mmd2(normal(1, 3), normal(1, 3, seed=1), 1.0, estimator="biased").value > 0


@pytest.mark.parametrize("statistic", [lambda *a, **k: mmd2(*a, 1.0, **k), energy_distance])
def test_p_value_is_never_zero(statistic):
    r = statistic(normal(20, 2), normal(20, 2, seed=1, shift=10.0), permutations=100)
    assert r.p_value == pytest.approx(1 / 101, abs=1e-15)
    assert r.permutations == 100


def test_p_value_is_that_of_recomputing_every_relabelling(monkeypatch):
    x, y = normal(8, 2), normal(11, 2, seed=1, shift=0.4)
    pooled, generator = torch.cat([x, y]), torch.Generator().manual_seed(7)
    observed = mmd2(x, y, 1.0).value
    count = 0
    for _ in range(50):
        first = torch.zeros(19, dtype=torch.bool)
        first[torch.randperm(19, generator=generator)[:8]] = True
        count += slow_statistic(gaussian(1.0), pooled[first], pooled[~first], "unbiased") >= observed
    assert 0 < count < 50
    p = (1 + count) / 51
    assert mmd2(x, y, 1.0, permutations=50, seed=7).p_value == pytest.approx(p)
    assert mmd2(x, y, 1.0, permutations=50, seed=7, block_size=3).p_value == pytest.approx(p)
    monkeypatch.setattr(metrics.two_sample, "_INDICATORS", 19 * 3)  # three relabellings at a time
    assert mmd2(x, y, 1.0, permutations=50, seed=7).p_value == pytest.approx(p)


def test_relabellings_that_tie_count_as_extreme():
    x = torch.tensor([0.0, 1.0] * 5)
    assert mmd2(x, x, 1.0, permutations=200).p_value == 1  # the observed statistic is the smallest possible
    ones, zeros = torch.ones(2), torch.zeros(2)  # 2 of 6 labellings reach the observed value
    r = mmd2(ones, zeros, 1.0, permutations=3000)
    assert r.p_value == pytest.approx(1 / 3, abs=0.03)  # 3.5 binomial standard deviations


def test_p_values_are_uniform_when_the_laws_are_equal():
    p = [
        mmd2(normal(15, 2, seed=2 * s), normal(20, 2, seed=2 * s + 1), permutations=99, seed=s).p_value
        for s in range(200)
    ]
    assert scipy.stats.kstest(p, "uniform").pvalue > 0.01
    assert np.mean(np.array(p) <= 0.05) < 0.05 + 3 * (0.05 * 0.95 / 200) ** 0.5


def test_permutations_detect_what_the_mean_cannot():
    x, y = normal(100, 2), 2 * normal(80, 2, seed=1)
    assert mmd2(x, y, permutations=99).p_value == pytest.approx(0.01)
    assert energy_distance(x, y, permutations=99).p_value == pytest.approx(0.01)


# Bandwidths -----------------------------------------------------------------------------------------------------------


def test_median_bandwidth_is_the_median_of_all_pairs():
    x, y = normal(12, 40), normal(15, 40, seed=1)
    pooled = torch.cat([x, y])
    slow = np.median(distances(pooled, pooled)[np.triu_indices(27, 1)])
    assert median_bandwidth(x, y) == pytest.approx(slow, rel=TIGHT)
    assert median_bandwidth(pooled) == pytest.approx(slow, rel=TIGHT)
    assert mmd2(x, y).bandwidths == (median_bandwidth(x, y),)


def test_median_bandwidth_of_mostly_equal_points_warns_and_is_not_zero():
    x = torch.tensor([0.0] * 6 + [1.0] * 2)  # 16 of 28 pairs coincide
    with pytest.warns(UserWarning, match="16 of 28 pairs coincide"):
        assert median_bandwidth(x) == 1.0
    with pytest.warns(UserWarning, match="16 of 28 pairs coincide"):
        r = mmd2(x[:4], x[4:])
    assert r.bandwidths == (1.0,)
    assert math.isfinite(r.value)


def test_median_bandwidth_from_a_subset_is_near_and_seeded():
    x, y = normal(900, 5), normal(500, 5, seed=1)
    exact = median_bandwidth(x, y)
    some = median_bandwidth(x, y, max_points=300)
    assert some == pytest.approx(exact, rel=0.05)
    assert some != exact
    assert some == median_bandwidth(x, y, max_points=300, seed=0) != median_bandwidth(x, y, max_points=300, seed=1)


def test_points_that_all_coincide_have_no_bandwidth():
    x = torch.tensor([[2.0, -1.0]]).expand(5, 2)
    for attempt in (median_bandwidth, silverman_bandwidth, lambda x: mmd2(x, x)):
        with pytest.raises(ValueError, match="expected at least two different points, got (5|10) identical"):
            attempt(x)
    rare = torch.cat([torch.zeros(999), torch.ones(1)])
    with pytest.raises(ValueError, match="max_points: expected a subset"):
        median_bandwidth(rare, max_points=10)


def test_silverman_bandwidth_is_the_rule():
    x = normal(201, seed=3)
    iqr = np.subtract(*np.percentile(x.numpy(), [75, 25]))
    expected = 0.9 * min(float(x.std()), iqr / 1.34) * 201**-0.2
    assert silverman_bandwidth(x) == pytest.approx(expected, rel=TIGHT)
    assert silverman_bandwidth(x[:, None] * 3 + 100) == pytest.approx(3 * expected, rel=1e-11)
    y = normal(50, 2, 3)
    expected = (4 / (8 * 50)) ** 0.1 * float(y.reshape(50, 6).var(0).mean().sqrt())
    assert silverman_bandwidth(y) == pytest.approx(expected, rel=TIGHT)


def test_silverman_bandwidth_survives_a_quartile_range_of_zero():
    assert silverman_bandwidth(torch.tensor([1.0, 1, 1, 1, 2])) == pytest.approx(0.2917181872, abs=1e-9)


# Sliced Wasserstein ---------------------------------------------------------------------------------------------------


def test_sliced_wasserstein_of_scalars_is_the_wasserstein_distance():
    x, y = normal(40), normal(25, seed=1, shift=0.5)
    r = sliced_wasserstein(x, y, p=1.0)
    assert r.value == pytest.approx(scipy.stats.wasserstein_distance(x.numpy(), y.numpy()), rel=1e-10)
    assert (r.projections, r.projection_standard_error) == (1, 0.0)


def test_sliced_wasserstein_of_a_translation():
    x, delta = normal(30, 4), torch.tensor([3.0, 0.0, -4.0, 0.0], dtype=F64)
    r = sliced_wasserstein(x, x + delta, projections=400, bootstrap=2)  # E (theta . delta)^2 = |delta|^2 / d
    assert abs(r.value - 2.5) < 4 * r.projection_standard_error < 0.5
    far = sliced_wasserstein(x + 1024, x + delta + 1024, projections=400, bootstrap=2)
    assert far.value == pytest.approx(r.value, rel=1e-10)
    assert sliced_wasserstein(x, x).value == 0


def test_sliced_wasserstein_does_not_depend_on_chunks(monkeypatch):
    x, y = normal(20, 3), normal(15, 3, seed=1)
    whole = sliced_wasserstein(x, y, projections=10)
    monkeypatch.setattr(metrics.sliced, "_CHUNK", 70)  # two directions at a time
    parts = sliced_wasserstein(x, y, projections=10)
    assert parts.value == pytest.approx(whole.value, rel=TIGHT)
    assert parts.standard_error == pytest.approx(whole.standard_error, rel=1e-10)


def test_sliced_wasserstein_error_is_that_of_the_means_for_distant_scalars():
    x, y = normal(200), normal(300, seed=1, shift=20.0)  # W_1 is the difference of the means
    exact = float((x.var() / 200 + y.var() / 300).sqrt())
    assert sliced_wasserstein(x, y, p=1.0, bootstrap=400).standard_error == pytest.approx(exact, rel=0.15)


def test_missing_pot_is_one_clear_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(ImportError, match=r"needs POT, which is not installed: pip install 'nwflow\[ot\]'"):
        sliced_wasserstein(normal(4), normal(4))


# Classifier -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classifier", ["mlp", "logistic", "neighbours"])
def test_c2st_is_half_for_equal_laws_and_one_for_separated_ones(classifier):
    x = normal(300, 3, dtype=torch.float32)
    null = c2st(x, normal(300, 3, seed=1, dtype=torch.float32), classifier, folds=3)
    assert null.accuracy == pytest.approx(0.5, abs=0.07)  # 3.5 binomial standard deviations
    apart = c2st(x, x + 10, classifier, folds=3)
    assert apart.accuracy > 0.99
    assert apart.interval[1] == pytest.approx(1.0, abs=1e-2)
    assert null.interval[0] < 0.5 < null.interval[1] + 0.05
    assert np.mean(apart.fold_accuracies) == pytest.approx(apart.accuracy)


def test_c2st_reaches_the_bayes_accuracy():
    x, y = normal(1000, 1), normal(1000, 1, seed=1, shift=1.5)
    r = c2st(x, y, "logistic")
    low, high = c2st(x, y, "logistic", ci=0.999).interval
    assert low < scipy.stats.norm.cdf(0.75) < high
    p = r.accuracy
    assert r.standard_error == pytest.approx((p * (1 - p) / 2000) ** 0.5)


def test_c2st_balances_unequal_sizes():
    r = c2st(normal(40, 2), normal(400, 2, seed=1), "logistic")  # always answering the larger would score 0.91
    assert (r.n, r.m, r.n_used) == (40, 400, 40)
    assert r.accuracy < 0.72


def test_c2st_takes_any_scikit_learn_classifier_and_is_seeded():
    from sklearn.tree import DecisionTreeClassifier

    x, y = normal(60, 2), normal(60, 2, seed=1, shift=0.5)
    tree = DecisionTreeClassifier(max_depth=2, random_state=0)
    r = c2st(x, y, tree)
    assert r.classifier == "DecisionTreeClassifier"
    assert r == c2st(x, y, tree)
    assert not hasattr(tree, "tree_")  # a clone was fitted
    with pytest.raises(TypeError, match="classifier: expected one of"):
        c2st(x, y, DecisionTreeClassifier)
    with pytest.raises(ValueError, match="classifier: expected one of"):
        c2st(x, y, "forest")


def test_c2st_permutation_p_value():
    x, y = normal(30, 2), normal(30, 2, seed=1)
    assert c2st(x, y + 5, "logistic", permutations=19).p_value == pytest.approx(1 / 20)
    assert c2st(x, y, "logistic", permutations=19).p_value > 0.05
    assert c2st(x, y, "logistic").p_value is None


# Memorisation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [2, 48])
@pytest.mark.parametrize("block_size", [None, 4])
def test_memorisation_matches_sorted_distances(d, block_size):
    x, refs = normal(15, d), normal(22, d, seed=1)
    x[:4] = refs[[3, 3, 20, 7]] + 1e-4
    slow = np.sort(distances(x, refs), axis=1)
    r = memorisation(x, refs, block_size=block_size)
    np.testing.assert_allclose(r.distance, slow[:, 0], rtol=1e-9)
    np.testing.assert_allclose(r.second_distance, slow[:, 1], rtol=1e-9)
    np.testing.assert_allclose(r.ratio, slow[:, 0] / slow[:, 1], rtol=1e-9)
    assert list(r.nearest) == distances(x, refs).argmin(1).tolist()
    assert r.copies == (slow[:, 0] / slow[:, 1] < 1 / 3).sum()
    assert r.share == r.copies / 15


@pytest.mark.parametrize("d", [2, 48])
@pytest.mark.parametrize("block_size", [None, 3])
def test_duplicated_references_do_not_hide_copies(d, block_size):
    refs = normal(10, d)
    x = refs[[0, 4]].clone()
    x[1, 0] += 0.01
    plain, doubled = memorisation(x, refs), memorisation(x, torch.cat([refs, refs.flip(0)]), block_size=block_size)
    assert doubled.ratio == pytest.approx(plain.ratio, rel=1e-9)
    assert (doubled.copies, doubled.nearest) == (2, (0, 4))
    nearly = torch.cat([refs, refs + 1e-3])
    assert memorisation(x, nearly).copies == 1  # the second sample is as near to the neighbour as to its source
    assert memorisation(x, nearly, duplicate_tolerance=0.1).copies == 2


def test_equidistant_references_give_a_ratio_of_one():
    refs = torch.tensor([[-1.0], [1.0]])
    r = memorisation(torch.tensor([[0.0], [0.9], [1.0]]), refs)
    assert r.ratio == pytest.approx((1.0, 0.1 / 1.9, 0.0), rel=1e-6)
    assert r.nearest == (0, 1, 1)


def test_collapsed_samples_are_copies_and_smoothed_ones_are_not():
    refs = 4 * torch.eye(4, dtype=F64)
    logits = -(0.5 * refs[0] - 0.5 * refs).square().sum(1) / (2 * 0.25)  # x = refs[0] / 2 at t = 0.5
    weights = logits.softmax(0)
    assert float(weights[0]) == pytest.approx(0.9999996624, abs=1e-9)
    assert float(effective_sample_size(weights)) == pytest.approx(1.0000006752, abs=1e-9)
    assert memorisation((weights @ refs)[None], refs).share == 1
    assert memorisation(refs.mean(0)[None], refs).ratio[0] == pytest.approx(1.0)
    assert memorisation(refs, refs).distance == (0.0,) * 4


def test_share_of_copies_has_wilsons_interval():
    refs = torch.tensor([[0.0], [1.0]], dtype=F64)
    x = torch.tensor([[0.0]] * 3 + [[0.5]] * 7, dtype=F64)
    r = memorisation(x, refs)
    expected = scipy.stats.binomtest(3, 10).proportion_ci(0.95, method="wilson")
    assert r.interval == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert r.share == 0.3
    assert memorisation(x[:3], refs).interval[0] < 1 == memorisation(x[:3], refs).interval[1]
    assert memorisation(x, refs, threshold=0.01).threshold == 0.01


def test_memorisation_needs_two_places():
    with pytest.raises(ValueError, match=r"references: expected two further apart.*got 3 that all coincide"):
        memorisation(normal(2, 3), torch.ones(3, 3, dtype=F64))
    with pytest.raises(ValueError, match="threshold"):
        memorisation(normal(2, 3), normal(4, 3), threshold=0.0)
    with pytest.raises(ValueError, match="duplicate_tolerance"):
        memorisation(normal(2, 3), normal(4, 3), duplicate_tolerance=-1.0)


# Coverage -------------------------------------------------------------------------------------------------------------


def slow_coverage(x, refs, k, radii=None):
    d = distances(x, refs)
    if radii is None:
        radii = [np.sort(distances(t, t), axis=1)[:, k] for t in (x, refs)]
    in_ref, in_sample = d <= radii[1] * (1 + 1e-9), d <= radii[0][:, None] * (1 + 1e-9)
    return [in_ref.any(1).mean(), in_sample.any(0).mean(), in_ref.sum() / (k * len(x)), in_ref.any(0).mean()]


def four(r):
    return [r.precision, r.recall, r.density, r.coverage]


@pytest.mark.parametrize("d", [2, 40])
@pytest.mark.parametrize("block_size", [None, 6])
def test_coverage_matches_double_loops(d, block_size):
    x, refs = 0.8 * normal(19, d), normal(27, d, seed=1)
    for k in (1, 3, 8):
        assert four(coverage(x, refs, k, block_size=block_size)) == pytest.approx(slow_coverage(x, refs, k), abs=TIGHT)


def test_coverage_errors_are_those_of_leaving_each_point_out():
    n, m, k = 9, 12, 2
    x, refs = 0.7 * normal(n, 2), normal(m, 2, seed=1)
    rx, rr = (np.sort(distances(t, t), axis=1)[:, k] for t in (x, refs))
    variance = np.zeros(4)
    without_x, without_r = [], []
    for i in range(n):
        rest = np.arange(n) != i
        without_x.append(slow_coverage(x[rest], refs, k, (rx[rest], rr)))
    for j in range(m):
        rest = np.arange(m) != j
        without_r.append(np.array(slow_coverage(x, refs[rest], k, (rx, rr[rest]))) * [1, 1, m / (m - 1), 1])
    for values in (np.array(without_x), np.array(without_r)):
        variance += (len(values) - 1) / len(values) * ((values - values.mean(0)) ** 2).sum(0)
    r = coverage(x, refs, k, groups=100)
    assert r.standard_errors == pytest.approx(variance**0.5, rel=1e-9)
    assert r.density_interval[1] == pytest.approx(r.density + 1.959963985 * r.standard_errors[2], rel=1e-8)


@pytest.mark.parametrize("d", [3, 60])
def test_coverage_of_a_set_by_itself(d):
    x = normal(40, d)
    r = coverage(x, x.flip(0), k=4)
    assert four(r) == pytest.approx([1, 1, 5 / 4, 1])  # each ball holds its centre and its k neighbours


def test_coverage_of_equal_laws_is_what_counting_predicts():
    results = [coverage(normal(60, 2, seed=2 * s), normal(40, 2, seed=2 * s + 1), k=2) for s in range(60)]
    values = np.array([r.coverage for r in results])
    assert results[0].coverage_if_equal == pytest.approx(1 - 39 * 38 / (99 * 98))
    assert values.mean() == pytest.approx(results[0].coverage_if_equal, abs=4 * values.std() / 60**0.5)
    errors = np.array([r.standard_errors for r in results])
    spread = np.std([four(r) for r in results], axis=0)
    assert (np.sqrt((errors**2).mean(0)) > 0.85 * spread).all()  # conservative; 60 trials know a spread within 9 %


def test_coverage_sees_a_lost_mode_and_invented_points():
    refs = torch.cat([normal(50, 2), normal(50, 2, seed=1, shift=20.0)])
    lost, invented = normal(100, 2, seed=2), torch.cat([normal(50, 2, seed=3), normal(50, 2, seed=4, shift=-20.0)])
    assert coverage(lost, refs).coverage < 0.55
    assert coverage(lost, refs).recall < 0.55
    assert coverage(invented, refs).precision < 0.55
    with pytest.raises(ValueError, match="references: expected at least 6 points"):
        coverage(lost, refs[:5])


# Effective sample size ------------------------------------------------------------------------------------------------


def test_effective_sample_size_golden_values():
    logs = torch.tensor([[-1000.0, -1001.0], [-torch.inf, 0.0]], dtype=F64)
    np.testing.assert_allclose(effective_sample_size(log_weights=logs), [1.6480542737, 1.0], atol=1e-10)
    assert float(effective_sample_size(torch.tensor([2.0, 2.0]))) == 2.0
    tiny = torch.tensor([1e-30, 1e-30, 0.0])  # the square underflows
    assert float(effective_sample_size(tiny)) == 2.0
    assert effective_sample_size(torch.ones(3, 5, dtype=torch.float16)).tolist() == [5.0] * 3
    assert effective_sample_size(torch.ones(5, dtype=torch.bfloat16)).dtype == torch.float32


def test_effective_sample_size_is_one_over_the_sum_of_squares():
    logs = 5 * normal(4, 3, 50)
    w = logs.softmax(-1)
    torch.testing.assert_close(effective_sample_size(log_weights=logs - 1e4), 1 / w.square().sum(-1), rtol=1e-9, atol=0)
    torch.testing.assert_close(effective_sample_size(7 * w), 1 / w.square().sum(-1), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"log_weights": torch.full((2,), -torch.inf)}, "got only -inf"),
        ({"weights": torch.tensor([[1.0, 1.0], [0.0, 0.0]])}, r"got only 0 in 1 rows, the first at index \(1,\)"),
        ({"weights": torch.tensor([1.0, -1.0])}, "non-negative"),
        ({"weights": torch.tensor([1.0, torch.nan])}, r"got 1, the first at index \(1,\)"),
        ({"log_weights": torch.tensor([0.0, torch.inf])}, r"no \+inf"),
        ({"weights": torch.zeros(0)}, "m >= 1"),
        ({}, "exactly one of them, got none"),
        ({"weights": torch.ones(2), "log_weights": torch.ones(2)}, "got both"),
    ],
)
def test_effective_sample_size_refuses(kwargs, message):
    with pytest.raises(ValueError, match=message):
        effective_sample_size(**kwargs)


# Input and output -----------------------------------------------------------------------------------------------------

PAIRED = [
    lambda x, y: mmd2(x, y, 1.0),
    energy_distance,
    sliced_wasserstein,
    lambda x, y: c2st(x, y, "logistic", folds=2),
    memorisation,
    lambda x, y: coverage(x, y, k=2),
]


@pytest.mark.parametrize("metric", PAIRED)
def test_bad_points_are_named(metric):
    good = normal(6, 2)
    bad = good.clone()
    bad[2, 1], bad[4, 0] = torch.nan, torch.inf
    name = "samples" if metric in (memorisation, PAIRED[-1]) else "x"
    with pytest.raises(ValueError, match=f"{name}: expected finite numbers, got 2 of 6 rows.*first at index 2"):
        metric(bad, good)
    with pytest.raises(ValueError, match=rf"{name} and \w+: expected one event shape, got \(2,\) and \(3,\)"):
        metric(good, normal(6, 3))
    with pytest.raises(ValueError, match=rf"{name}: expected at least \d point.*got 0"):
        metric(good[:0], good)
    with pytest.raises(ValueError, match="at least one number"):
        metric(good[:, :0], good[:, :0])
    with pytest.raises(ValueError, match="squares do not overflow"):
        metric(good * 1e200, good)


@WRONG_TYPES
@pytest.mark.parametrize("metric", PAIRED)
def test_what_is_no_tensor_of_floats_is_named(metric):
    good = normal(6, 2)
    with pytest.raises(TypeError, match=r"(x|samples): expected a floating dtype.*int64"):
        metric(good.long(), good)
    with pytest.raises(TypeError, match=r"(x|samples): expected a torch.Tensor.*list"):
        metric(good.tolist(), good)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: mmd2(x[:1], x, 1.0), ValueError, r"x: expected at least 2 points \(the unbiased estimator"),
        (lambda x: mmd2(x, x, 0.0), ValueError, "bandwidth: expected finite lengths above 0, got 0"),
        (lambda x: mmd2(x, x, [1.0, math.inf]), ValueError, "bandwidth: expected finite lengths"),
        (lambda x: mmd2(x, x, []), ValueError, "bandwidth: expected at least one"),
        (lambda x: mmd2(x, x, 1.0, permutations=-1), ValueError, "permutations: expected at least 0"),
        (lambda x: mmd2(x, x, 1.0, ci=95.0), ValueError, "ci: expected a confidence level between 0 and 1"),
        (lambda x: mmd2(x, x, 1.0, block_size=0), ValueError, "block_size: expected at least 1 row"),
        (lambda x: sliced_wasserstein(x, x, p=0.5), ValueError, "p: expected a finite order"),
        (lambda x: coverage(x, x, k=0), ValueError, "k: expected at least 1"),
        (lambda x: c2st(x, x, folds=9), ValueError, "x: expected at least 9 points"),
        (lambda x: silverman_bandwidth(x[:1]), ValueError, "x: expected at least 2 points"),
    ],
)
def test_bad_settings_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(normal(6, 2))


@WRONG_TYPES
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: mmd2(x, x, "auto"), ValueError, "bandwidth: expected a length, several or 'median', got 'auto'"),
        (lambda x: mmd2(x, x, None), TypeError, "bandwidth: expected numbers, got NoneType"),
        (lambda x: mmd2(x, x, 1.0, kernel="cubic"), ValueError, "kernel: expected one of"),
        (lambda x: mmd2(x, x, 1.0, estimator="exact"), ValueError, "estimator: expected 'unbiased' or 'biased'"),
        (lambda x: mmd2(x, x, 1.0, permutations=1.5), TypeError, "permutations: expected an int"),
    ],
)
def test_settings_of_the_wrong_type_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(normal(6, 2))


@pytest.mark.parametrize("metric", [*PAIRED, lambda x, y: mmd2(x, y, [1.0, 2.0], permutations=9)])
def test_results_go_to_json_and_back(metric):
    r = metric(normal(8, 2, dtype=torch.float32), normal(9, 2, seed=1, shift=0.5))
    text = json.dumps(r.to_dict(), allow_nan=False)
    assert type(r).from_dict(json.loads(text)) == r
    assert r.estimator
    assert r.uncertainty
    with pytest.raises(ValueError, match="missing.*'n'"):
        type(r).from_dict({k: v for k, v in r.to_dict().items() if k != "n"})
    with pytest.raises(ValueError, match="got a Other"):
        type(r).from_dict(r.to_dict() | {"metric": "Other"})
    with pytest.raises(AttributeError):
        r.n = 3
