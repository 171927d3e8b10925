"""Fitted shapes, bandwidths, pools and the fields of remedies against closed forms and slow computations."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import invwishart
from sklearn.covariance import ledoit_wolf_shrinkage

from nwflow import NWField, Support
from nwflow.data import load_support
from nwflow.diagnose import REMEDIES, fit_pool, fit_remedy, linear, metric, pool, rule_of_thumb, smoothing
from nwflow.diagnose.choose import TEXTS
from nwflow.diagnose.remedies import Gaussians
from nwflow.diagnose.shape import eigen, fit_bandwidth, fit_shape, ledoit_wolf_share
from nwflow.paths import CondOT

F64 = torch.float64
PATH = CondOT(sigma_min=0.0)
TIGHT = 1e-9  # float64, through an eigenvalue decomposition


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def skewed(n, d, seed=0):
    """Correlated points with scales of their own, away from the origin."""
    return normal(n, d, seed=seed) @ normal(d, d, seed=seed + 100) + 3.0


# covariances


@pytest.mark.parametrize(("n", "d"), [(40, 6), (6, 40), (7, 7)])
def test_principal_directions_are_a_complete_orthonormal_basis(n, d):
    z = skewed(n, d)
    z = z - z.mean(0)
    basis, values = eigen(z)
    assert torch.allclose(basis.mT @ basis, torch.eye(d, dtype=F64), atol=1e-12)
    assert torch.allclose((basis * values) @ basis.mT, z.mT @ z / n, rtol=TIGHT, atol=1e-10)
    assert bool((values.diff() <= 1e-12).all()) and values.shape == (d,)


@pytest.mark.parametrize(("n", "d"), [(50, 5), (12, 30), (500, 40)])
def test_shrinkage_is_that_of_ledoit_and_wolf(n, d):
    z = normal(n, d) * torch.linspace(0.5, 2.0, d, dtype=F64)
    z = z - z.mean(0)
    expected = ledoit_wolf_shrinkage(z.numpy(), assume_centered=True)
    assert ledoit_wolf_share(z) == pytest.approx(expected, rel=TIGHT)


def test_shapes_from_their_definitions():
    x = skewed(300, 5)
    z = x - x.mean(0)
    c = z.mT @ z / 300
    eye = torch.eye(5, dtype=F64)
    assert torch.allclose(fit_shape(x, "isotropic").covariance, c.diagonal().mean() * eye)
    assert torch.allclose(fit_shape(x, "diagonal").covariance, torch.diag(c.diagonal()))
    low = fit_shape(x, "low_rank")
    values = torch.linalg.eigvalsh(c).flip(0)
    rank = int(low.settings["rank"])
    assert float(values[: rank - 1].sum() / values.sum()) < 0.9 <= float(values[:rank].sum() / values.sum())
    assert torch.allclose(low.covariance.trace(), c.trace())
    assert torch.allclose(torch.linalg.eigvalsh(low.covariance).flip(0)[:rank], values[:rank])
    assert torch.allclose(torch.linalg.eigvalsh(low.covariance)[:-rank], values[rank:].mean())
    full = fit_shape(x, "full")
    sd = c.diagonal().sqrt() if full.settings["by_column"] else torch.ones(5, dtype=F64)
    share, r = full.settings["shrinkage"], c / sd[:, None] / sd
    expected = ((1 - share) * r + share * r.diagonal().mean() * eye) * sd[:, None] * sd
    assert torch.allclose(full.covariance, expected)


def test_columns_of_their_own_scales_are_shrunk_towards_their_variances():
    x = normal(60, 6) * torch.logspace(-2, 2, 6, dtype=F64)
    shape = fit_shape(x, "full")
    assert shape.settings["by_column"] == 1.0
    few = fit_shape(normal(12, 40), "full")  # round: the variances of its columns are noise
    assert few.settings["by_column"] == 0.0


def test_shrinkage_where_a_third_of_the_points_has_no_spread():
    shape = fit_shape(torch.tensor([[1.0], [0.0], [0.0], [-1.0], [0.0], [0.0]], dtype=F64), "full")
    assert float(shape.covariance) == pytest.approx(1 / 3, rel=TIGHT)


# bandwidths


def naive_loss(h, cases, covariance, contracted):
    """Minus the log-likelihood of left-out points, one by one; ``cases`` are (point, references)."""
    a = math.sqrt(1 - h * h) if contracted else 1.0
    root, total = torch.linalg.cholesky(h * h * covariance), 0.0
    for s, refs, mu in cases:
        z = torch.linalg.solve_triangular(root, (s - mu - a * (refs - mu)).mT, upper=False)
        logs = -0.5 * z.square().sum(0) - root.diagonal().log().sum() - 0.5 * len(s) * math.log(2 * math.pi)
        total -= float(logs.logsumexp(0)) - math.log(len(refs))
    return total


@pytest.mark.parametrize("contracted", [True, False])
def test_bandwidth_is_the_best_of_a_brute_force_search(contracted):
    """Many points: each leaves the mixture alone, for the shape has seen all. Equal ones never count."""
    x = torch.cat([normal(30, 2) * 0.3, normal(30, 2, seed=1) * 0.3 + 2.0])
    x = torch.cat([x, x[:3]])
    ids = torch.unique(x, dim=0, return_inverse=True)[1]
    shape = fit_shape(x, "isotropic")
    cases = [(s, x[ids != i], shape.centre) for s, i in zip(x, ids)]
    found = fit_bandwidth(x, lambda v: fit_shape(v, "isotropic"), contracted, ids)
    grid = torch.linspace(math.log(0.1), math.log(0.9), 25, dtype=F64).exp().tolist()
    values = [naive_loss(h, cases, shape.covariance, contracted) for h in grid]
    assert naive_loss(found, cases, shape.covariance, contracted) <= min(values) + 1e-3
    assert found == pytest.approx(grid[values.index(min(values))], rel=0.1)  # a step of the grid


def test_bandwidth_of_few_points_leaves_them_out_of_the_shape_too():
    x = normal(24, 4) * 0.4 + torch.arange(24)[:, None] % 2
    cases, losses = [], []
    for f in range(3):
        rows = torch.arange(24) % 3 == f
        shape = fit_shape(x[~rows], "isotropic")
        cases.append(([(s, x[~rows], shape.centre) for s in x[rows]], shape.covariance))
    grid = torch.linspace(math.log(0.1), math.log(0.9), 25, dtype=F64).exp().tolist()
    losses = [sum(naive_loss(h, c, cov, True) for c, cov in cases) for h in grid]
    found = fit_bandwidth(x, lambda v: fit_shape(v, "isotropic"), True)
    assert found == pytest.approx(grid[losses.index(min(losses))], rel=0.1)


def test_bandwidth_of_what_cannot_be_left_out_is_one():
    for x in (torch.ones(1, 2, dtype=F64), torch.ones(5, 2, dtype=F64), torch.tensor([[0.0, 1.0], [1.0, 0.0]])):
        x = x.double()
        assert (
            fit_bandwidth(x, lambda v: fit_shape(v, "isotropic"), True, torch.unique(x, dim=0, return_inverse=True)[1])
            == 1.0
        )


@pytest.mark.parametrize("rule", ["silverman", "scott"])
def test_rules_of_thumb(rule):
    """[1, 1, 1, 1, 2] has no interquartile range; its standard deviation is 0.4."""
    x = torch.tensor([[1.0], [1.0], [1.0], [1.0], [2.0]], dtype=F64)
    factor = (4 / 3) ** 0.2 if rule == "silverman" else 1.0
    fitted = rule_of_thumb(x, rule)
    assert math.sqrt(float(fitted.variances)) == pytest.approx(factor * 5**-0.2 * 0.4, rel=TIGHT)
    assert fitted.a == 1.0
    with pytest.raises(ValueError, match="rule: expected one of"):
        rule_of_thumb(x, "median")


# fields


def wiener(x, s, shape, alpha, sigma):
    """mu + alpha C (alpha^2 C + sigma^2 I)^-1 (x - alpha mu)."""
    c = shape.covariance
    noisy = alpha**2 * c + sigma**2 * torch.eye(len(c), dtype=F64)
    mu = s.mean(0)
    return mu + (x - alpha * mu) @ torch.linalg.solve(noisy, alpha * c)


@pytest.mark.parametrize("t", [0.1, 0.5, 0.9])
def test_the_linear_remedy_is_the_wiener_denoiser(t):
    s, x = skewed(50, 4), normal(6, 4, seed=3)
    found = linear(s).field(Support(s), PATH).denoise(x, t)
    assert torch.allclose(found, wiener(x, s, fit_shape(s, "full"), t, 1 - t), rtol=TIGHT, atol=TIGHT)


@pytest.mark.parametrize("kind", ["isotropic", "diagonal", "low_rank", "full"])
def test_contracted_smoothing_lies_between_the_plug_in_and_the_linear_denoiser(kind):
    s, x, t = skewed(50, 4), 2 * normal(6, 4, seed=3), 0.6
    shape = fit_shape(s, kind)

    def at(h0):
        a = math.sqrt(1 - h0 * h0)
        g = Gaussians("", shape.centre, shape.centre, a, h0 * h0 * shape.variances, shape.basis, {})
        return g.field(Support(s), PATH).denoise(x, t)

    plug = NWField(s, PATH).denoise(x, t)
    straight = wiener(x, s, shape, t, 1 - t)
    assert torch.allclose(at(1e-6), plug, atol=1e-8)  # h0^2 of variances of order 10
    assert torch.allclose(at(1.0), straight, rtol=TIGHT, atol=TIGHT)
    assert not torch.allclose(at(0.5), plug, atol=1e-2)
    assert not torch.allclose(at(0.5), straight, atol=1e-2)


@pytest.mark.parametrize("kind", ["isotropic", "diagonal", "low_rank", "full"])
def test_contraction_keeps_mean_and_covariance(kind):
    """a^2 S + h0^2 C is C where C is the data's own covariance, and keeps its trace for the other shapes."""
    s = skewed(400, 3)
    g = smoothing(s, kind)
    moved = g.points(s)
    basis = torch.eye(3, dtype=F64) if g.basis is None else g.basis
    total = moved.mT.cov(correction=0) + (basis * g.variances) @ basis.mT
    assert torch.allclose(moved.mean(0), s.mean(0), atol=1e-9)
    assert float(total.trace()) == pytest.approx(float(s.mT.cov(correction=0).trace()), rel=1e-6)
    assert g.settings["contraction"] == pytest.approx(math.sqrt(1 - g.settings["h0"] ** 2))


@pytest.mark.parametrize("kind", ["diagonal", "low_rank", "full"])
def test_metrics_whiten(kind):
    """With M^-1 = V the field of x is V^1/2 times the plain field of V^-1/2 x."""
    s, x = skewed(80, 4), normal(5, 4, seed=5) + 1.0
    fitted = metric(s, kind)
    basis = torch.eye(4, dtype=F64) if fitted.basis is None else fitted.basis
    half = (basis * fitted.variances.sqrt()) @ basis.mT
    inverse = torch.linalg.inv(half)
    assert torch.allclose(fitted.metric().matrix(4).inverse(), half @ half, rtol=1e-8)
    found = fitted.field(Support(s), PATH).denoise(x, 0.7)
    assert torch.allclose(found, NWField(s @ inverse, PATH).denoise(x @ inverse, 0.7) @ half, rtol=1e-8, atol=1e-8)


def test_remedies_of_scalar_events_are_those_of_one_column():
    s, x = normal(30), normal(4, seed=1)
    for name in ("smoothing-isotropic", "smoothing-full", "scott", "metric-full"):
        flat = fit_remedy(name, Support(s)).field(Support(s), PATH).denoise(x, 0.5)
        column = fit_remedy(name, Support(s[:, None])).field(Support(s[:, None]), PATH).denoise(x[:, None], 0.5)
        assert torch.allclose(flat, column[:, 0], atol=1e-12)


def test_one_reference_is_the_answer_of_every_smoothing():
    """D = X_1 and u = (X_1 - x) / (1 - t), with no division by n - 1."""
    s, x, t = torch.tensor([[2.0, -1.0]], dtype=F64), normal(4, 2), 0.1
    for field in (NWField(s, PATH), *(fit_remedy(k, Support(s)).field(Support(s), PATH)
                                      for k in ("smoothing-isotropic", "smoothing-full", "silverman"))):  # fmt: skip
        assert torch.allclose(field.denoise(x, t), s.expand(4, 2))
        assert torch.allclose(field(x, t), (s - x) / 0.9)
        assert torch.allclose(field.n_eff(x, t), torch.ones(4, dtype=F64))
    with pytest.raises(ValueError, match="points that differ"):
        fit_remedy("metric-full", Support(s))


def test_names():
    assert tuple(TEXTS) == REMEDIES
    s = Support(normal(10, 3))
    with pytest.raises(ValueError, match="name: expected one of smoothing-isotropic"):
        fit_remedy("smoothing", s)
    for name in ("pool", "metric-within-class"):
        with pytest.raises(ValueError, match="pool: expected a labelled pool"):
            fit_remedy(name, s)
        with pytest.raises(ValueError, match="pool: expected a labelled support, got one without labels"):
            fit_remedy(name, s, s)
    with pytest.raises(ValueError, match="support: expected one set of references, got 2 tasks"):
        fit_remedy("scott", Support.batch([normal(4, 3), normal(5, 3)]))


# pools


def made_classes(kappa, n=60, m=30, d=4):
    """Classes whose covariances are inverse Wishart around W with ``kappa`` pseudo-counts."""
    w = torch.diag(torch.tensor([4.0, 2.0, 1.0, 0.5], dtype=F64))
    covariances = torch.as_tensor(invwishart(kappa + d + 1, kappa * w.numpy()).rvs(n, random_state=0))
    roots = torch.linalg.cholesky(covariances)
    means = 3 * normal(n, d, seed=7)
    return [means[i] + normal(m, d, seed=10 + i) @ roots[i].mT for i in range(n)]


@pytest.mark.parametrize("kappa", [10.0, 40.0, 200.0])
def test_pseudo_count_of_inverse_wishart_classes(kappa):
    """60 classes of 30 points tell it within a factor of two."""
    assert 0.5 < fit_pool(made_classes(kappa)).kappa / kappa < 2.0


def test_pseudo_count_has_the_largest_marginal_likelihood():
    """Against the normalising constants of the inverse Wishart law, in all directions and with determinants."""
    classes = made_classes(20.0, n=12)
    info = fit_pool(classes)
    w = info.within.covariance
    head = int((info.within.variances.cumsum(0) < 0.95 * info.within.variances.sum()).sum()) + 1
    basis = info.within.basis[:, :head]
    w = basis.mT @ w @ basis

    def evidence(kappa):
        nu, total = kappa + head + 1, 0.0
        for c in classes:
            z = (c - c.mean(0)) @ basis
            n = len(z) - 1
            a, b = torch.tensor(nu / 2, dtype=F64), torch.tensor((nu + n) / 2, dtype=F64)
            total += float(torch.mvlgamma(b, head) - torch.mvlgamma(a, head))
            total += nu / 2 * float(torch.logdet(kappa * w)) - (nu + n) / 2 * float(torch.logdet(kappa * w + z.mT @ z))
        return total

    grid = torch.logspace(0, 5, 31, dtype=F64).tolist()
    assert info.kappa == pytest.approx(max(grid, key=evidence))


def test_mean_and_covariance_are_posterior_means():
    classes = made_classes(20.0)
    x, others = classes[0][:6], classes[1:]
    info = fit_pool(classes, without=0)
    fitted = pool(x, info)
    mean = torch.stack([c.mean(0) for c in others]).mean(0)
    assert torch.allclose(info.mean, mean)
    basis = info.within.basis
    between = (basis * info.between) @ basis.mT
    noise = info.within.covariance / len(x)
    expected = mean + between @ torch.linalg.solve(between + noise, x.mean(0) - mean)
    assert torch.allclose(fitted.target, expected, rtol=1e-8)
    z = x - x.mean(0)
    c = (info.kappa * info.within.covariance + z.mT @ z) / (info.kappa + len(x) - 1)
    h2 = fitted.settings["h0"] ** 2
    assert torch.allclose((fitted.basis * fitted.variances / h2) @ fitted.basis.mT, c, rtol=1e-8)


def test_moments_of_the_pool():
    """Within-class covariance without the bias of the means, and between them without the noise of the means."""
    classes = made_classes(400.0, n=400, m=8)
    info = fit_pool(classes)
    w = torch.tensor([4.0, 2.0, 1.0, 0.5], dtype=F64)
    assert torch.allclose(info.within.covariance.diagonal(), w, rtol=0.1)  # 2,800 degrees of freedom, and shrinkage
    assert torch.allclose(info.between, torch.full((4,), 9.0, dtype=F64), rtol=0.2)  # 400 means: 7 % each


def test_many_references_keep_their_own_mean_and_covariance_and_few_take_the_pools():
    classes = made_classes(20.0)
    info = fit_pool(classes)
    many = skewed(4000, 4, seed=3)
    fitted = pool(many, info)
    h2 = fitted.settings["h0"] ** 2
    covariance = (fitted.basis * fitted.variances / h2) @ fitted.basis.mT
    own = many.mT.cov(correction=0)
    assert float((covariance - own).norm() / own.norm()) < 0.02  # kappa / m is 0.005
    assert torch.allclose(fitted.target, many.mean(0), atol=0.01)
    one = pool(classes[0][:1], info)
    assert torch.allclose((one.basis * one.variances) @ one.basis.mT, info.within.covariance, rtol=1e-8)
    away = info.mean + 5 * info.within.covariance.diagonal().sqrt()
    shrunk = pool(away[None], info).target - info.mean
    assert bool((shrunk.abs() < (away - info.mean).abs() + 1e-9).all())


def test_one_class_as_a_pool_says_nothing_about_means():
    x = normal(5, 3)
    assert torch.allclose(pool(x, fit_pool([normal(30, 3, seed=1)])).target, x.mean(0))
    with pytest.raises(ValueError, match="pool: expected a class of at least two points"):
        fit_pool([x[:1], x[1:2]])


@pytest.mark.parametrize("seed", [0, 1])
def test_a_pool_of_other_digits_halves_the_error_of_five_references(seed):
    """At log-SNR 1, other members of the class as queries; a fifth of the error remains."""
    digits = load_support("digits")
    x, labels = digits.points.double(), digits.labels
    errors = torch.zeros(2, dtype=F64)
    for c in (0, 3, 8):
        rows = (labels == c).nonzero().squeeze(-1)
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
        refs, queries = Support(x[rows[:5]]), x[rows[5:85]]
        others = Support(x[labels != c], labels=labels[labels != c])
        scale = float(x[rows].var(0, correction=0).mean().sqrt())
        t = 1 / (1 + scale * math.exp(-0.5))
        noisy = t * queries + (1 - t) * normal(*queries.shape, seed=seed)
        for i, field in enumerate((NWField(refs, PATH), fit_remedy("pool", refs, others).field(refs, PATH))):
            errors[i] += float((field.denoise(noisy, t) - queries).square().mean()) / scale**2
    assert float(errors[1] / errors[0]) < 0.5
