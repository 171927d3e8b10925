"""Families of tasks: closed-form posterior means against quadrature, moments, splits, masks and seeds."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from nwflow import CondOT, Cosine, NWField, Support, VarianceExploding, VariancePreserving
from nwflow.data import save_points
from nwflow.tasks import (
    FAMILIES,
    GaussianMixtures,
    LabelledFeatures,
    Mixed,
    Moons,
    Rings,
    SphericalShells,
    Spirals,
    make_family,
    parse_sizes,
)
from nwflow.tasks.mixtures import Mixture

PATHS = [CondOT(), CondOT(0.1), VariancePreserving(), Cosine(), VarianceExploding(0.05, 20.0)]
SYNTHETIC = [GaussianMixtures(dim=3), SphericalShells(dim=3), Rings(), Rings(dim=4), Moons(), Moons(dim=3), Spirals()]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def identity(family):
    return f"{family.name}-{math.prod(family.event_shape)}"


def labelled(n_classes=10, rows=20, seed=0):
    """Points whose only coordinate is their row number, so that every draw can be traced."""
    labels = torch.arange(n_classes).repeat_interleave(rows)[torch.randperm(n_classes * rows, generator=seeded(seed))]
    return Support(torch.arange(n_classes * rows, dtype=torch.float64)[:, None], labels=labels)


# --- the posterior mean of mixtures


@pytest.mark.parametrize("path", PATHS, ids=repr)
def test_mixture_oracle_is_the_integral_of_bayes_rule_in_one_dimension(path):
    tasks = GaussianMixtures(dim=1, max_components=4).sample(2, 2, 3, seeded(1), torch.float64)
    law, t = tasks.law, 0.6
    at = path(t)
    alpha, sigma = at.alpha.item(), at.sigma.item()
    x = alpha * tasks.target + sigma
    found = tasks.oracle(x, t, path)
    for i in range(2):
        k = int(law.counts[i])
        means, sds = law.means[i, :k, 0].numpy(), law.factors[i, :k, 0, 0].abs().numpy()

        def density(s, means=means, sds=sds, k=k):
            return sum(stats.norm.pdf(s, a, b) for a, b in zip(means, sds)) / k

        ends = means.min() - 12 * sds.max(), means.max() + 12 * sds.max()
        for xj, dj in zip(x[i, :, 0].tolist(), found[i, :, 0].tolist()):
            breaks = sorted([*means, min(max(xj / alpha, ends[0]), ends[1])])

            def integral(power, xj=xj, density=density, ends=ends, breaks=breaks):
                def f(s):
                    return s**power * density(s) * stats.norm.pdf(xj, alpha * s, sigma)

                nodes = np.unique([ends[0], *breaks, ends[1]])
                return sum(integrate.quad(f, a, b, epsabs=1e-15, epsrel=1e-10)[0] for a, b in pairwise(nodes))

            assert dj == pytest.approx(integral(1) / integral(0), rel=1e-7, abs=1e-7)


def test_mixture_oracle_is_the_limit_of_the_exact_field_of_many_points():
    tasks = GaussianMixtures(dim=2, max_components=3).sample(2, 1, 40_000, seeded(2), torch.float64)
    path, t = CondOT(), 0.4
    x1 = tasks.target[:, :200]
    x = t * x1 + (1 - t) * torch.randn(x1.shape, generator=seeded(3), dtype=torch.float64)
    exact = tasks.oracle(x, t, path)
    plug_in = NWField(Support.batch(tasks.target), path).denoise(x, t)
    error = (plug_in - exact).square().mean().sqrt()
    assert error < 0.05  # 40,000 points at h = 1.5 leave an error of order 1/sqrt(1e3 effective ones) in units of h


def test_mixture_oracle_takes_a_time_for_every_task_and_point_and_ends_at_the_data():
    tasks = GaussianMixtures(dim=3).sample(4, 2, 6, seeded(4), torch.float64)
    t = torch.rand(4, 6, generator=seeded(5), dtype=torch.float64)
    whole = tasks.oracle(tasks.target, t, CondOT())
    for i, j in ((0, 0), (2, 5), (3, 1)):
        one = tasks.select([i]).oracle(tasks.target[i : i + 1, j : j + 1], t[i, j].item(), CondOT())
        torch.testing.assert_close(whole[i, j], one[0, 0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(tasks.oracle(tasks.target, 1.0, CondOT()), tasks.target, rtol=1e-6, atol=1e-6)
    means = torch.stack([m[: int(k)].mean(0) for m, k in zip(tasks.law.means, tasks.law.counts)])
    torch.testing.assert_close(tasks.oracle(tasks.target, 0.0, CondOT()), means[:, None].expand(-1, 6, -1))
    with pytest.raises(ValueError, match=r"t: expected"):
        tasks.oracle(tasks.target, t[:, 0], CondOT())
    with pytest.raises(ValueError, match=r"x: expected shape"):
        tasks.oracle(tasks.target[:2], 0.5, CondOT())


def test_oracle_of_a_single_gaussian_is_the_wiener_filter():
    factor = torch.randn(3, 3, generator=seeded(6), dtype=torch.float64)
    mean = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    law = Mixture(mean[None, None], factor[None, None], torch.tensor([1]))
    x, at = torch.randn(1, 7, 3, generator=seeded(7), dtype=torch.float64), Cosine()(0.3)
    gain = (
        at.alpha
        * factor
        @ factor.T
        @ torch.linalg.inv(at.alpha**2 * factor @ factor.T + at.sigma**2 * torch.eye(3, dtype=torch.float64))
    )
    torch.testing.assert_close(law.denoise(x, 0.3, Cosine()), mean + (x - at.alpha * mean) @ gain.T)


def test_families_without_a_closed_form_say_so():
    tasks = Rings().sample(1, 2, 2, seeded())
    with pytest.raises(ValueError, match=r"oracle: .* got rings"):
        tasks.oracle(tasks.target, 0.5, CondOT())


# --- moments


def test_moments_of_mixtures():
    tasks = GaussianMixtures(dim=4, mean_scale=5.0, covariance_scale=1.0).sample(4000, 1, 8, seeded(), torch.float64)
    law, x = tasks.law, tasks.target
    counts = torch.bincount(law.counts, minlength=9)[2:] / 4000
    assert (counts - 1 / 7).abs().max() < 4 * math.sqrt(1 / 7 / 4000)  # four standard errors
    variance = x.square().mean()  # over tasks the means have mean 0: 25 + 1
    assert variance == pytest.approx(26, abs=4 * 26 / math.sqrt(4000))
    spectra = torch.linalg.eigvalsh(law.factors @ law.factors.mT)
    assert spectra.mean() == pytest.approx(1.0, abs=0.01)
    assert (spectra[..., -1] / spectra[..., 0]).median() > 20  # far from isotropic


def test_points_of_a_mixture_have_its_covariance():
    tasks = GaussianMixtures(dim=3, min_components=1, max_components=1).sample(2, 1, 20_000, seeded(), torch.float64)
    for law_factor, mean, x in zip(tasks.law.factors[:, 0], tasks.law.means[:, 0], tasks.target):
        covariance = law_factor @ law_factor.T
        assert (x.mean(0) - mean).abs().max() < 5 * math.sqrt(covariance.diagonal().max() / 20_000)
        assert (torch.cov(x.T) - covariance).abs().max() < 0.05 * covariance.diagonal().max()


def test_shells_are_as_thick_as_said_and_uniform_in_direction():
    family = SphericalShells(dim=5, min_shells=1, max_shells=1, radius_scale=5.0, noise=0.3)
    x = family.sample(400, 1, 200, seeded(), torch.float64).target
    radius = x.norm(dim=-1)
    large = radius.mean(1) > 1.5  # the radius is |R + 0.3 z|, which folds at the origin
    assert radius[large].var(1).mean().sqrt() == pytest.approx(0.3, rel=0.02)
    assert radius.mean(1).mean() == pytest.approx(
        2.5, abs=0.2
    )  # 400 radii uniform on (0, 5): four standard errors 0.29
    directions = torch.nn.functional.normalize(x, dim=-1).reshape(-1, 5)
    assert (directions.T @ directions / len(directions) - torch.eye(5) / 5).abs().max() < 0.01


@pytest.mark.parametrize("family", [Rings(noise=0.0), Rings(dim=4, noise=0.0)], ids=identity)
def test_a_ring_is_a_circle_in_a_plane(family):
    one = Rings(dim=family.dim, min_rings=1, max_rings=1, noise=0.0)
    x = one.sample(20, 1, 400, seeded(), torch.float64).target
    assert torch.linalg.matrix_rank(x - x.mean(1, keepdim=True), rtol=1e-9).max() == 2
    design = torch.cat([2 * x, torch.ones(20, 400, 1, dtype=torch.float64)], -1)  # |x - c|^2 = r^2, linear in c
    rows = x.square().sum(-1, keepdim=True)
    fit = torch.linalg.lstsq(design, rows, driver="gelsd").solution
    torch.testing.assert_close(design @ fit, rows, rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize("family", [Moons(dim=4), Spirals(dim=4), Rings(dim=4)], ids=identity)
def test_planar_families_lie_in_a_plane_up_to_their_noise(family):
    x = family.sample(6, 1, 3000, seeded(), torch.float64).target
    spectrum = torch.linalg.eigvalsh(torch.stack([torch.cov(task.T) for task in x]))
    torch.testing.assert_close(spectrum[:, :2], torch.full((6, 2), 0.01, dtype=torch.float64), rtol=0.1, atol=0)
    assert spectrum[:, 2].min() > 0.1


def test_spiral_arms_are_evenly_turned_copies():
    x = Spirals(min_arms=3, max_arms=3, noise=0.0, scale=1.0).sample(1, 1, 3000, seeded(), torch.float64).target[0]
    centred = x - x.mean(0)  # three arms balance: the mean is the centre
    turn = torch.tensor([[-0.5, -math.sqrt(0.75)], [math.sqrt(0.75), -0.5]], dtype=torch.float64)
    nearest = torch.cdist(centred @ turn.T, centred).min(1).values
    assert nearest.median() < 0.03


# --- sizes, masks, seeds


@pytest.mark.parametrize("family", [*SYNTHETIC, Mixed((Rings(), Moons()))], ids=identity)
def test_a_draw_depends_on_its_seed_alone(family):
    a, b, c = (family.sample(5, (3, 9), 4, seeded(s)) for s in (1, 1, 2))
    assert torch.equal(a.support, b.support) and torch.equal(a.target, b.target)
    assert not torch.equal(a.target, c.target)


@pytest.mark.parametrize("family", [*SYNTHETIC, Mixed((Rings(), Moons())), LabelledFeatures(labelled())], ids=identity)
@pytest.mark.parametrize("m", [(2, 7), [2, 5, 7], "2-7", "2,5,7"], ids=str)
def test_supports_of_several_sizes_are_masked_and_zero_behind(family, m):
    tasks = family.sample(64, m, 3, seeded())
    assert set(tasks.sizes.tolist()) == ({2, 3, 4, 5, 6, 7} if m in ((2, 7), "2-7") else {2, 5, 7})
    assert tasks.support.shape[1] == tasks.mask.shape[1] == 7
    assert tasks.support[~tasks.mask].abs().max() == 0
    prefix = tasks.mask.long().cumsum(1) == torch.arange(1, 8)  # real points first
    assert torch.equal(tasks.mask, prefix)
    assert tasks.supports().sizes == tuple(tasks.sizes.tolist())


def test_one_size_needs_no_mask_and_parts_of_a_batch_are_its_tasks():
    tasks = GaussianMixtures(dim=2).sample(6, 4, 3, seeded())
    assert tasks.mask is None and tasks.sizes.tolist() == [4] * 6
    part = tasks.select(slice(2, 4))
    assert torch.equal(part.target, tasks.target[2:4])
    x = tasks.target
    torch.testing.assert_close(part.oracle(x[2:4], 0.5, CondOT()), tasks.oracle(x, 0.5, CondOT())[2:4])


def test_support_and_target_are_independent_draws_of_one_law():
    tasks = SphericalShells(dim=2, min_shells=1, max_shells=1, noise=0.01).sample(200, 5, 5, seeded(), torch.float64)
    support, target = tasks.support.norm(dim=-1).mean(1), tasks.target.norm(dim=-1).mean(1)
    torch.testing.assert_close(support, target, rtol=0, atol=0.05)  # the same shell
    flat = torch.cat([tasks.support, tasks.target], 1).reshape(-1, 2)
    assert len(torch.unique(flat, dim=0)) == 2000


@pytest.mark.parametrize("wrong", [0, (0, 3), (5, 3), [], [3, -1], "a", "3-2", (1, 2, 3)], ids=str)
def test_support_sizes_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="support: expected"):
        parse_sizes(wrong)
    with pytest.raises(TypeError, match="support: expected"):
        parse_sizes(2.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GaussianMixtures(dim=0), "dim: expected at least 1"),
        (lambda: Rings(dim=1), "dim: expected at least 2"),
        (lambda: SphericalShells(min_shells=4, max_shells=3), "min_shells, max_shells"),
        (lambda: Moons(noise=-1.0), "noise: expected"),
        (lambda: Rings().sample(0, 3, 3, seeded()), "n_tasks: expected at least 1, got 0"),
        (lambda: Rings().sample(1, 3, 0, seeded()), "n: expected at least 1, got 0"),
        (lambda: Rings().part("tests"), "part: expected one of"),
        (lambda: Mixed((Rings(), Rings())), "families: expected different names"),
        (lambda: Mixed((Rings(), Moons(dim=3))), "families: expected one event shape"),
        (lambda: Mixed((Rings(),), leave_out=("rings",)), "leave_out: expected at least one family to train on"),
        (lambda: make_family("ring"), "tasks: expected one of gaussian_mixtures, .*got 'ring'"),
        (lambda: make_family("rings", parameters={"radius": 1}), "radius: no parameter of rings"),
        (lambda: make_family("rings", leave_out=("rings",)), "leave_out: expected several families"),
        (lambda: make_family("digits", dim=3), "dim: expected 64"),
        (lambda: LabelledFeatures(Support([[1.0], [2.0]])), "labels are missing"),
        (lambda: LabelledFeatures(labelled(), test=1.0), "test: expected a share"),
        (lambda: LabelledFeatures(labelled(2)), "train: expected at least one class"),
        (lambda: LabelledFeatures(labelled()).sample(2, 18, 3, seeded()), "class .* has 20 rows, fewer than the 21"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_errors_name_the_argument(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- classes as tasks, and mixtures of families


@pytest.mark.parametrize("seed", [0, 1])
def test_classes_are_divided_by_seed_and_no_part_shares_one(seed):
    family = LabelledFeatures(labelled(12), validation=0.25, test=0.25, seed=seed)
    parts = {part: set(family.part(part).classes) for part in ("train", "validation", "test")}
    assert {k: len(v) for k, v in parts.items()} == {"train": 6, "validation": 3, "test": 3}
    assert set.union(*parts.values()) == set(range(12))
    again = LabelledFeatures(labelled(12), validation=0.25, test=0.25, seed=seed)
    assert parts["test"] == set(again.part("test").classes)
    assert parts["test"] != set(LabelledFeatures(labelled(12), 0.25, 0.25, seed + 1).part("test").classes)


@pytest.mark.parametrize("part", ["train", "validation", "test"])
def test_rows_of_a_task_are_of_one_class_of_its_part_and_never_in_both_sets(part):
    support = labelled()
    family = LabelledFeatures(support).part(part)
    tasks = family.sample(100, (1, 12), 8, seeded(), torch.float64)
    seen = set()
    for s, mask, x in zip(tasks.support, tasks.mask, tasks.target):
        rows = torch.cat([s[mask], x]).squeeze(1).long()
        assert len(rows.unique()) == len(rows)  # disjoint, and no row twice
        classes = support.labels[rows].unique()
        assert len(classes) == 1
        seen.add(support.label_names[int(classes)])
    assert seen == set(family.classes)


def test_every_row_of_a_class_is_equally_likely():
    family = LabelledFeatures(labelled(3, rows=10), validation=0.3, test=0.3)
    tasks = family.sample(3000, 2, 3, seeded(), torch.float64)
    counts = torch.bincount(tasks.target.flatten().long()).double()
    counts = counts[counts > 0]
    assert len(counts) == 10 and (counts - 900).abs().max() < 4 * math.sqrt(3000 * 0.3 * 0.7)


def test_small_classes_can_be_left_out():
    labels = torch.cat([torch.arange(5).repeat_interleave(20), torch.tensor([5, 5, 5])])
    support = Support(torch.arange(103.0)[:, None], labels=labels)
    family = LabelledFeatures(support, min_rows=20)
    assert 5 not in set.union(*(set(family.part(p).classes) for p in ("train", "validation", "test")))


def test_a_file_with_labels_is_a_family(tmp_path):
    support = labelled()
    save_points(tmp_path / "f.npz", support.points, extra={"labels": support.labels})
    family = make_family(str(tmp_path / "f.npz"), options={"key": "points", "label": "labels"}, parameters={"seed": 3})
    assert family.name == "features" and len(family.classes) == 6 and family.seed == 3


def test_a_family_left_out_is_seen_in_the_test_alone():
    mixed = make_family("rings+moons+spirals", dim=3, leave_out=("moons",))
    train, test = (mixed.part(p).sample(300, 4, 2, seeded()) for p in ("train", "test"))
    assert train.names == ("rings", "spirals") and test.names == ("moons",)
    share = (train.family == 0).double().mean()
    assert share == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / 300))


def test_tasks_of_a_mixture_of_families_are_those_of_the_family_they_name():
    mixed = Mixed((SphericalShells(dim=3, noise=0.0, min_shells=1, max_shells=1), Moons(dim=3, noise=0.0)))
    tasks = mixed.sample(40, (2, 6), 30, seeded(), torch.float64)
    for family, s, mask, x in zip(tasks.family, tasks.support, tasks.mask, tasks.target):
        points = torch.cat([s[mask], x])
        radius = points.norm(dim=1)
        on_shell = bool((radius - radius[0]).abs().max() < 1e-9)
        assert on_shell == (tasks.names[family] == "spherical_shells")


def test_names_of_the_registry_are_those_of_the_families():
    assert all(name == cls.name == make_family(name).name for name, cls in FAMILIES.items())
