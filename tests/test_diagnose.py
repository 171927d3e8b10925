"""Held-out errors against the fields themselves, verdicts on data of known truth, degenerate sets, and arguments."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from nwflow import NWField, Support
from nwflow.data import load_support
from nwflow.diagnose import Diagnosis, diagnose, fit_pool, linear, metric, pool, rule_of_thumb, scarcity, smoothing
from nwflow.diagnose import collapse as facts
from nwflow.diagnose import run as running
from nwflow.diagnose.heldout import LEAST, MOST, Part, denoise, make_problem, make_units, mean_error
from nwflow.diagnose.measure import measure, names
from nwflow.diagnose.samples import is_image
from nwflow.metric import Smoothing
from nwflow.metrics import effective_sample_size
from nwflow.paths import CondOT, VariancePreserving
from nwflow.subspace import SubspaceField

F64 = torch.float64
PATH = CondOT(sigma_min=0.0)
TIGHT = 1e-9  # float64, through an eigenvalue decomposition
ROUND = 1e-7  # the same where noise was kept as float32 and covariances were inverted


def silent(_stage, _share):
    pass


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def skewed(n, d, seed=0):
    """Correlated points with scales of their own, away from the origin."""
    return normal(n, d, seed=seed) @ normal(d, d, seed=seed + 100) + 3.0


def equal_ids(x):
    return torch.unique(x, dim=0, return_inverse=True)[1]


def problem_of(x, parts, held_out=False, queries=20, folds=3, most=6):
    return make_problem(x, equal_ids(x), parts, PATH, 0, held_out=held_out, queries=queries, folds=folds, step=1.0,
                        most=most)  # fmt: skip


# the denoiser of the measurement


@pytest.mark.parametrize("kind", ["none", "isotropic", "diagonal", "full"])
def test_the_measured_denoiser_is_the_field_of_the_others(kind):
    """Leaving a point out by a mask is leaving it out of the support; n_eff, largest weight and entropy too."""
    s, t = skewed(12, 3), torch.tensor([0.2, 0.6, 0.9], dtype=F64)
    eps = normal(3, 12, 3, seed=4)
    x = t[:, None, None] * s + (1 - t)[:, None, None] * eps
    c = s.mT.cov() / 4
    values, basis = torch.linalg.eigh(c)
    variances, turn, smooth = {
        "none": (torch.zeros(3, dtype=F64), torch.eye(3, dtype=F64), None),
        "isotropic": (torch.full((3,), 0.49, dtype=F64), torch.eye(3, dtype=F64), Smoothing.isotropic(0.7)),
        "diagonal": (c.diagonal(), torch.eye(3, dtype=F64), Smoothing.diagonal(c.diagonal())),
        "full": (values, basis, Smoothing.full(c)),
    }[kind]
    centre = s.mean(0)
    own = torch.eye(12, dtype=torch.bool)
    found = denoise((x - t[:, None, None] * centre) @ turn, t, 1 - t, (s - centre) @ turn, variances, own)
    for q in range(12):
        field = NWField(s[~own[q]], PATH, smoothing=smooth)
        for k, time in enumerate(t.tolist()):
            w = field.weights(x[k, q : q + 1], time)[0]
            expected = field.denoise(x[k, q : q + 1], time)[0]
            assert torch.allclose(found.denoised[k, q] @ turn.mT + centre, expected, rtol=TIGHT, atol=TIGHT)
            assert float(found.n_eff[k, q]) == pytest.approx(float(1 / w.square().sum()), rel=TIGHT)
            assert float(found.largest[k, q]) == pytest.approx(float(w.max()), rel=TIGHT)
            entropy = float(torch.special.entr(w).sum())
            assert float(found.entropy[k, q]) == pytest.approx(entropy, rel=TIGHT, abs=TIGHT)


def test_blocks_of_times_change_nothing(monkeypatch):
    t, s = torch.linspace(0.1, 0.9, 7, dtype=F64), normal(9, 2)
    x = normal(7, 5, 2, seed=1)
    whole = denoise(x, t, 1 - t, s, torch.zeros(2, dtype=F64), None)
    monkeypatch.setattr("nwflow.diagnose.heldout.PAIRS", 100)
    parts = denoise(x, t, 1 - t, s, torch.zeros(2, dtype=F64), None)
    for name in ("denoised", "n_eff", "largest", "entropy"):  # a product of another batch may round differently
        assert torch.allclose(getattr(whole, name), getattr(parts, name), rtol=1e-12, atol=1e-12)


def test_expected_error_of_the_linear_denoiser_by_simulation():
    v, a, s = torch.tensor([4.0, 1.0, 0.01], dtype=F64), torch.tensor([0.6], dtype=F64), torch.tensor([0.4], dtype=F64)
    x1, eps = normal(200_000, 3) * v.sqrt(), normal(200_000, 3, seed=1)
    gain = a * v / (a * a * v + s * s)
    seen = (gain * (a * x1 + s * eps) - x1).square().mean(0)
    assert torch.allclose(mean_error(a, s, v)[0], seen, rtol=0.015)  # four standard errors of 0.3 %


# units


def test_units_from_their_definitions_in_any_coordinates():
    """Raw is the square per coordinate over s^2; relative is Mahalanobis' distance over d."""
    x = skewed(80, 4)
    z = x - x.mean(0)
    units, shape = make_units(z)
    error = normal(5, 4, seed=2)
    raw, relative = units(error)
    assert torch.allclose(raw, error.square().mean(-1) / z.square().mean())
    expected = (error * torch.linalg.solve(shape.covariance, error.mT).mT).sum(-1) / 4
    assert torch.allclose(relative, expected, rtol=1e-8)
    turn = torch.linalg.qr(normal(4, 4, seed=3)).Q
    assert torch.allclose(units(error @ turn, turn), units(error), rtol=1e-8)
    variances = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64)
    draws = normal(200_000, 4, seed=6) * variances.sqrt()
    mean = units(draws, turn).mean(-1)  # five standard errors of less than 0.3 %
    assert torch.allclose(units.of_variances(variances, turn), mean, rtol=0.02)


def test_raw_errors_do_not_see_rotations_and_relative_ones_no_scales_of_columns():
    z = normal(5000, 4) * torch.tensor([1.0, 3.0, 0.5, 2.0], dtype=F64)
    z, error = z - z.mean(0), normal(6, 4, seed=1)
    turn = torch.linalg.qr(normal(4, 4, seed=2)).Q
    scale = torch.tensor([5.0, 0.2, 1.0, 0.01], dtype=F64)
    units = make_units(z)[0](error)
    turned = make_units(z @ turn)[0](error @ turn)
    scaled = make_units(z * scale)[0](error * scale)
    assert torch.allclose(turned[0], units[0], rtol=TIGHT)
    assert torch.allclose(turned[1], units[1], rtol=0.05)  # shrinkage, which is of the order of 1 / n
    assert torch.allclose(scaled[1], units[1], rtol=0.05)
    assert not torch.allclose(scaled[0], units[0], rtol=0.5)


def test_a_column_that_never_moves_has_no_part_in_the_relative_error():
    z = normal(50, 3)
    z = torch.cat([z - z.mean(0), torch.zeros(50, 1, dtype=F64)], 1)
    units = make_units(z)[0]
    assert int((units.weights > 0).sum()) == 3
    assert float(units(torch.tensor([[0.0, 0.0, 0.0, 1.0]], dtype=F64))[1]) < 1e-12


def test_the_window_is_where_the_linear_denoiser_leaves_some_of_the_variance():
    x = normal(300, 3)
    problem = make_problem(x, equal_ids(x), [Part("all", torch.arange(300), torch.arange(300))], PATH, 0,
                           held_out=False, queries=20, folds=2)  # fmt: skip
    grid = problem.grid
    left = 1 / (1 + torch.exp(grid.log_snr))  # of round data: sigma^2 / (alpha^2 s^2 + sigma^2)
    assert torch.allclose(torch.log(grid.alpha**2 * problem.units.scale**2 / grid.sigma**2), grid.log_snr)
    clear = ((left - LEAST).abs() > 0.01) & ((left - MOST).abs() > 0.01)  # the sample is round up to a few per cent
    assert torch.equal(problem.window[0][clear], ((left > LEAST) & (left < MOST))[clear])
    assert not bool(problem.window[:, 0].any()) and not bool(problem.window[:, -1].any())


# held-out errors


def slow_errors(problem, fold, name, info):
    """Errors ``(2, T, q)``, query by query: fitted to what may be seen, the field is that of the others."""
    train = problem.points[fold.train]
    ids, (family, _, kind) = problem.equal[fold.train], name.partition("-")
    kind = kind.replace("-", "_")
    out = []
    for row, at in zip(fold.queries, fold.at):
        x1, keep = problem.points[row], problem.equal[fold.refs] != problem.equal[row]
        refs = Support(problem.points[fold.refs][keep])
        per_time = []
        for k, (t, log_snr) in enumerate(zip(problem.grid.t.tolist(), problem.grid.log_snr)):
            eps = problem.noise[k, at].double()
            if family == "plug":
                field = NWField(refs, PATH)
            elif family == "linear":
                field = linear(train).field(refs, PATH)
            elif family == "smoothing":
                field = smoothing(train, kind, equal=ids).field(refs, PATH)
            elif family in ("silverman", "scott"):
                field = rule_of_thumb(train, family).field(refs, PATH)
            elif family == "subspace":
                field = SubspaceField.pca(refs, PATH, block=int(kind))
            elif family == "pool":
                field = pool(train, info, ids).field(refs, PATH)
            else:
                fitted = metric(train, kind, info.within if kind == "within_class" else None)
                field = fitted.field(refs, PATH)
                h = float(torch.exp(-0.5 * log_snr))
                basis = torch.eye(problem.d, dtype=F64) if fitted.basis is None else fitted.basis
                eps, t = basis @ (fitted.variances.sqrt() * (basis.mT @ eps)), 1 / (1 + h)
            noisy = t * x1 + (1 - t) * eps
            per_time.append(problem.units(field.denoise(noisy[None], t)[0] - x1))
        out.append(torch.stack(per_time, -1))
    return torch.stack(out, -1)


def test_every_error_is_that_of_the_remedys_field_without_the_query():
    """Two classes, one with copies: references equal to the query do not count, fits do not see the query's fold."""
    one, two = skewed(24, 3), skewed(15, 3, seed=1) + 4.0
    x = torch.cat([one, one[:3], one[:1], two])
    parts = [Part("one", torch.arange(28), torch.arange(28)), Part("two", torch.arange(28, 43), torch.arange(28, 43))]
    problem = problem_of(x, parts, queries=43, most=4)
    assert sum(len(f.queries) for f in problem.folds) == 43
    pools = {}
    for n in {f.number for f in problem.folds}:
        left = torch.cat([f.queries for f in problem.folds if f.number == n])
        seen = ~torch.isin(problem.equal, problem.equal[left])
        pools[n] = [x[p.refs[seen[p.refs]]] for p in parts]
    found = measure(problem, pools, silent)
    some = ("plug-in", "linear", "smoothing-isotropic", "smoothing-low-rank", "smoothing-full", "silverman",
            "metric-diagonal", "metric-full", "metric-within-class", "pool")  # fmt: skip
    for fold in (problem.folds[0], problem.folds[-1]):
        assert not bool(torch.isin(problem.equal[fold.train], problem.equal[fold.queries]).any())
        info = fit_pool(pools[fold.number], without=fold.part)
        for name in some:
            slow = slow_errors(problem, fold, name, info)
            assert torch.allclose(found.errors[name][:, :, fold.at], slow, rtol=ROUND, atol=ROUND), name


def test_held_out_points_see_all_references():
    x, asked = skewed(30, 5), skewed(8, 5, seed=0) + 0.1
    rows = torch.arange(38)
    problem = problem_of(torch.cat([x, asked]), [Part("all", rows[:30], rows[30:])], held_out=True, most=4)
    (fold,) = problem.folds
    assert torch.equal(fold.train, rows[:30])
    found = measure(problem, None, silent)
    assert {*names(problem, False), "plug-in", "linear"} <= set(found.errors)
    for name in ("plug-in", "smoothing-diagonal", "subspace-1", "subspace-4", "metric-low-rank"):
        slow = slow_errors(problem, fold, name, None)
        assert torch.allclose(found.errors[name][:, :, fold.at], slow, rtol=ROUND, atol=ROUND), name


def test_copies_of_references_change_no_query_but_through_their_mass():
    """All points twice: every other place weighs double, which changes no weight, and n_eff counts places."""
    x = skewed(25, 3)
    rows, twice = torch.arange(25), torch.cat([x, x])
    once = problem_of(x, [Part("all", rows, rows)], queries=25)
    both = problem_of(twice, [Part("all", torch.arange(50), rows)], queries=25)
    both = dataclasses.replace(both, grid=once.grid, units=once.units, noise=once.noise)
    a, b = measure(once, None, silent, only=[]), measure(both, None, silent, only=["smoothing-full"])
    assert torch.allclose(a.errors["plug-in"], b.errors["plug-in"], rtol=TIGHT)
    assert torch.allclose(a.n_eff, b.n_eff, rtol=TIGHT)


def test_nothing_that_is_fitted_sees_its_fold():
    """Moving the queries of fold 0 of every class leaves all settings of fold 0 as they were, and no others."""
    x = torch.cat([skewed(20, 3), skewed(20, 3, seed=1)])
    labels = torch.arange(40) // 20
    moved, settings = x.clone(), []
    for _ in range(2):
        work = running._Work.of(Support(moved, labels=labels), None, None)
        problem = problem_of(moved, work.parts, queries=40)
        found = measure(problem, running._pools(problem, work, None), silent)
        settings.append(found.settings)
        first = torch.cat([f.queries for f in problem.folds if f.number == 0])
        moved = moved.clone()
        moved[first] += 2 * normal(len(first), 3, seed=9)
    at_zero = [i for i, f in enumerate(problem.folds) if f.number == 0]
    others = [i for i, f in enumerate(problem.folds) if f.number != 0]
    assert len(at_zero) == 2
    for name in ("smoothing-full", "smoothing-isotropic", "metric-full", "metric-within-class", "pool"):
        before, after = (s[name] for s in settings)
        assert [before[i] for i in at_zero] == [after[i] for i in at_zero], name
        assert [before[i] for i in others] != [after[i] for i in others], name


# verdicts on data of known truth


def mixture(d, seed, m=500):
    """Eight round Gaussians of unit variance, means of scale 5."""
    g = torch.Generator().manual_seed(seed)
    means = 5 * torch.randn(8, d, generator=g, dtype=F64)
    return means[torch.randint(8, (m,), generator=g)] + torch.randn(m, d, generator=g, dtype=F64)


def shells(seed, m=50, d=8):
    """Two to five spheres of radii in (0, 5), radial noise 0.3."""
    g = torch.Generator().manual_seed(seed)
    n = int(torch.randint(2, 6, (1,), generator=g))
    radii = 5 * torch.rand(n, generator=g, dtype=F64)
    u = torch.randn(m, d, generator=g, dtype=F64)
    r = radii[torch.randint(n, (m,), generator=g)] + 0.3 * torch.randn(m, generator=g, dtype=F64)
    return u / u.norm(dim=-1, keepdim=True) * r[:, None]


def ellipse():
    a = 2 * math.pi * torch.arange(1, 201, dtype=F64) / 200
    return torch.stack([100 * a.cos(), 0.1 * a.sin()], 1)


def few_digits(per_class, seed):
    digits = load_support("digits")
    labels = digits.labels
    g = torch.Generator().manual_seed(seed)
    rows = [(labels == c).nonzero().squeeze(-1) for c in range(10)]
    rows = torch.cat([r[torch.randperm(len(r), generator=g)[:per_class]] for r in rows])
    return Support(digits.points[rows].double(), labels=labels[rows])


def checked(d: Diagnosis) -> Diagnosis:
    """What holds for every diagnosis: it goes to JSON and back, no number is NaN, the verdict is two sentences."""
    text = d.to_json()
    assert Diagnosis.from_json(text) == d
    assert "NaN" not in text and "Infinity" not in text
    assert d.verdict.text.count(". ") == 1 and d.verdict.text.endswith(".")
    names_of = {r.name for r in d.remedies}
    assert d.verdict.remedy is None or d.verdict.remedy in names_of
    return d


@pytest.fixture
def quick(monkeypatch):
    """The gauge of scarcity reads m and m / 2 alone: the rest of the curve is left out."""
    monkeypatch.setattr(scarcity, "_HALVINGS", 1)
    monkeypatch.setattr(scarcity, "_REPEATS", 1)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_mixture_in_the_plane_is_healthy(seed, quick):
    assert checked(diagnose(Support(mixture(2, seed)), seed=seed, queries=100)).verdict.regime == "healthy"


def test_a_mixture_in_64_dimensions_collapses(quick):
    d = checked(diagnose(Support(mixture(64, 0)), queries=40, folds=2))
    assert d.verdict.regime == "collapse"
    assert d.regimes["collapse"].skill_lost[1] > d.regimes["geometry"].skill_lost[2]
    assert d.collapse.share[0] > 0.4 and d.collapse.t < 0.5  # before half of the path


def test_one_gaussian_in_96_dimensions_collapses(quick):
    d = checked(diagnose(Support(normal(500, 96)), queries=40, folds=2))
    assert d.verdict.regime == "collapse"
    linear_is_best = max(r.skill for r in d.remedies)
    assert linear_is_best < 0.03  # the linear denoiser is the posterior mean of a Gaussian
    assert d.verdict.remedy == "smoothing-isotropic"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_spherical_shells_are_a_geometry_mismatch(seed):
    """Several references share the weight where the isotropic kernel errs."""
    d = checked(diagnose(Support(shells(seed)), seed=seed))
    assert d.verdict.regime == "geometry"
    assert "where several references share the weight" in d.regimes["geometry"].text
    assert max(v[0] for v in d.curves.n_eff) > 3
    assert d.geometry.radial > d.geometry.tangential / math.sqrt(2)  # of a Gaussian they are equal


def test_an_ellipse_of_condition_a_million_is_a_geometry_mismatch_that_a_metric_repairs():
    d = checked(diagnose(Support(ellipse()), names=["wide", "flat"]))
    assert d.verdict.regime == "geometry"
    assert d.geometry.condition == pytest.approx(1e6, rel=1e-6)
    assert d.geometry.participation_ratio == pytest.approx(1.000002, rel=TIGHT)
    assert d.geometry.columns[0][0] == "wide"
    assert d.verdict.remedy.startswith("metric-") and d.remedy(d.verdict.remedy).own_path
    ranked = [r.name for r in d.remedies]
    assert ranked.index("metric-diagonal") < 3
    plug = {c.name: c for c in d.curves.denoisers}["plug-in"]
    window = [v[0] for v, w in zip(plug.skill, d.curves.window) if w]
    plain = sum(window) / len(window)
    assert d.remedy("metric-diagonal").skill - plain > 1.0  # against -4 of the plug-in on the Euclidean path
    assert d.remedy("metric-diagonal").error[2] < 0.5


def test_three_references_of_each_digit_are_too_few(quick):
    d = checked(diagnose(few_digits(3, 0)))
    assert d.verdict.regime == "scarcity" and d.verdict.unit == "raw" and d.data.image
    assert [(c.name, c.n, c.unique) for c in d.classes] == [(str(i), 3, 3) for i in range(10)]
    assert d.verdict.remedy == "pool"
    assert d.gallery is not None and d.gallery.remedy_name == "pool"


def test_the_best_remedy_for_fifty_of_a_digit_is_near_the_best_at_every_noise(quick):
    """Within 5 % of the best denoiser on the same path at every log-SNR of the window (1.4 % at most, over classes)."""
    digits = load_support("digits")
    x, labels = digits.points.double(), digits.labels
    rows = (labels == 8).nonzero().squeeze(-1)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    d = checked(diagnose(Support(x[rows[:50]]), held_out=x[rows[50:150]],
                         pool=Support(x[labels != 8], labels=labels[labels != 8])))  # fmt: skip
    curves = {c.name: c for c in d.curves.denoisers if not c.name.startswith(("metric", "patches"))}
    chosen = curves[d.verdict.remedy]
    for k, inside in enumerate(d.curves.window):
        best = min(c.raw[k][0] for c in curves.values())
        assert not inside or chosen.raw[k][0] <= 1.05 * best


# what is too small, or too poor


@pytest.mark.parametrize(
    ("points", "unique"),
    [
        ([[0.5, 2.0]], 1),
        ([[0.5, 2.0], [1.0, -1.0]], 2),
        ([[2.0, -1.0]] * 5, 1),
        ([[1.0], [1.0], [1.0], [1.0], [2.0]], 2),
        ([1.0, 1.0, 1.0, 1.0, 2.0], 2),
    ],
)
def test_fewer_than_three_distinct_references_are_scarcity(points, unique):
    d = checked(diagnose(Support(torch.tensor(points, dtype=F64))))
    assert d.verdict.regime == "scarcity" and d.verdict.remedy is None
    assert (d.data.n, d.data.unique) == (len(points), unique)
    assert all(r.skill_lost is None for r in d.regimes.values())
    if unique == 1:
        assert d.geometry.anisotropy is None and d.geometry.participation_ratio is None


def test_a_pool_cannot_help_one_reference_that_nothing_is_known_of():
    others = Support(normal(20, 3), labels=torch.arange(20) % 2)
    assert checked(diagnose(Support(normal(1, 3)), pool=others)).verdict.regime == "scarcity"
    d = checked(diagnose(Support(normal(2, 3)), pool=others))
    assert d.verdict.regime == "scarcity" and d.remedy("pool").skill > 0


@pytest.mark.parametrize(
    "points",
    [
        normal(3, 1),
        normal(8, 20),
        torch.tensor([[1.0], [0.0], [0.0], [-1.0], [0.0], [0.0]], dtype=F64),
        torch.cat([normal(30, 2), torch.full((30, 2), 7.0, dtype=F64)], 1),
        torch.cat([normal(10, 2), normal(10, 2)]),
        normal(20),
        1e6 + normal(20, 2),
        1e-6 * normal(20, 2),
    ],
    ids=["three", "n<d", "ties", "constant", "twice", "scalars", "far", "small"],
)
def test_poor_sets_are_measured_without_a_nan(points):
    d = checked(diagnose(Support(points)))
    assert d.curves is not None and all(math.isfinite(v[0]) for v in d.curves.n_eff if v[0] is not None)
    assert d.data.unique == len(torch.unique(points, dim=0))
    if points.ndim == 2 and points.shape[1] == 4:
        assert d.data.constant_columns == d.geometry.constant_columns == 2
    if len(points) != d.data.unique:
        assert any("equal another one" in note for note in d.data.notes)


def test_one_label_is_no_label():
    x = normal(30, 3)
    plain, labelled = diagnose(Support(x)), diagnose(Support(x, labels=torch.zeros(30, dtype=torch.long)))
    checked(labelled)
    assert labelled.data.classes is None and labelled.classes == ()
    assert labelled.curves == plain.curves and labelled.verdict == plain.verdict


def test_a_class_of_one_is_listed_but_not_measured():
    x = torch.cat([normal(15, 3), normal(15, 3, seed=1) + 3, normal(1, 3, seed=2)])
    d = checked(diagnose(Support(x, labels=["a"] * 15 + ["b"] * 15 + ["c"])))
    assert [(c.name, c.n, c.plug_in is None) for c in d.classes] == [("a", 15, False), ("b", 15, False), ("c", 1, True)]


def test_real_points_are_rarely_copies_and_samples_of_few_always():
    """The criterion must leave the point itself out: it is a reference of its own."""
    d = diagnose(Support(normal(50, 8)))
    assert d.collapse.copies[0] > 0.9 and d.collapse.copies_held_out[0] < 0.1
    assert max(p.at for p in d.scarcity.mmd2) == 25  # half of them are held out


def test_orthogonal_references_collapse_within_the_path():
    """1,000 references c e_i, c^2 = 768: all of them count at t = 0.03, one alone at t = 0.5."""
    s = math.sqrt(768.0) * torch.eye(1000, dtype=F64)
    n_eff = [float(effective_sample_size(log_weights=facts.log_weights(s[:1], 0 * s[:1], s, (1 - t) / t))[0])
             for t in (0.03, 0.5)]  # fmt: skip
    assert n_eff == pytest.approx([998.8285634, 1.0], rel=1e-9)
    scale = math.sqrt(768 / 1000 * (1 - 1 / 1000))
    log_snr = [2 * math.log(scale * t / (1 - t)) for t in (0.03, 0.5)]
    at = facts.crossing(log_snr, n_eff, 2.0)
    assert 0.03 < facts.at_log_snr(at, scale)[0] < 0.5


# arguments


def plain(d: Diagnosis) -> Diagnosis:
    return dataclasses.replace(d, run=dataclasses.replace(d.run, seconds=0.0))


def test_a_seed_gives_the_same_again_and_shares_of_progress_grow_to_one():
    x, seen = Support(skewed(40, 3)), []
    first = diagnose(x, seed=5, progress=lambda stage, share: seen.append((stage, share)))
    assert plain(first) == plain(diagnose(x, seed=5))
    assert plain(first) != plain(diagnose(x, seed=6))
    assert all(0.0 <= share <= 1.0 for _, share in seen) and seen[-1] == ("done", 1.0)
    for stage in {s for s, _ in seen}:
        shares = [v for s, v in seen if s == stage]
        assert shares == sorted(shares)


def test_units_decide_and_images_are_raw():
    x = Support(skewed(30, 3))
    by_default, raw = diagnose(x), diagnose(x, unit="raw")
    assert (by_default.verdict.unit, raw.verdict.unit) == ("relative", "raw")
    for a, b in zip(by_default.curves.denoisers, raw.curves.denoisers):
        assert (a.raw, a.relative) == (b.raw, b.relative)
    assert by_default.curves.window != raw.curves.window
    assert is_image(Support(normal(3, 8, 8))) and is_image(Support(normal(3, 1, 4, 4)))
    assert not is_image(Support(normal(3, 5))) and not is_image(Support(normal(3, 2, 30)))


def test_held_out_points_are_the_queries():
    x, asked = normal(40, 3), normal(12, 3, seed=1)
    d = checked(diagnose(Support(x), held_out=asked))
    assert (d.data.queries, d.data.references) == (12, 40)
    assert plain(d) == plain(diagnose(Support(x), held_out=Support(asked)))


def test_labels_of_held_out_points_are_matched_by_name():
    """The codes of the two supports number the names in different orders."""
    a, b = normal(20, 3), normal(20, 3, seed=1) + 8.0
    asked = torch.cat([normal(6, 3, seed=2), normal(6, 3, seed=3) + 8.0])
    support = Support(torch.cat([a, b]), labels=["a"] * 20 + ["b"] * 20)
    d = checked(diagnose(support, held_out=Support(asked, labels=["a"] * 6 + ["b"] * 6)))
    further = Support(torch.cat([normal(3, 3), asked]), labels=["0"] * 3 + ["a"] * 6 + ["b"] * 6)
    assert plain(diagnose(support, held_out=further)).classes == d.classes
    assert all(c.plug_in < 2.0 for c in d.classes)  # points of another class are 8 / 1 away: an error of more than 60
    with pytest.raises(ValueError, match="held_out: expected labels that the support has, got none of them"):
        diagnose(support, held_out=Support(asked, labels=["c"] * 12))


def test_the_cap_on_references_is_noted():
    d = diagnose(Support(normal(60, 2)), references=40)
    assert d.data.n == 40 and "measured on 40 of 60 references, drawn at random" in d.data.notes
    assert d.data.queries == 40


def test_prior_weights_are_noted():
    d = diagnose(Support(normal(20, 2), weights=torch.arange(1, 21)))
    assert any("prior weights are not used" in note for note in d.data.notes)


@pytest.mark.parametrize(
    ("kwargs", "error", "said"),
    [
        ({"unit": "absolute"}, ValueError, 'unit: expected "raw", "relative" or None, got \'absolute\''),
        ({"queries": 0}, ValueError, "queries, references, folds: expected at least 1, 2 and 2, got 0, 20000 and 5"),
        ({"folds": 1}, ValueError, "got 400, 20000 and 1"),
        ({"references": 1}, ValueError, "got 400, 1 and 5"),
        ({"held_out": normal(5, 4)}, ValueError, r"held_out: expected events \(3,\) as the support has, got \(4,\)"),
        ({"pool": Support(normal(5, 4), labels=[0, 0, 1, 1, 1])}, ValueError, r"pool: expected events \(3,\)"),
        ({"pool": Support(normal(5, 3))}, ValueError, "pool: expected a labelled support, got one without labels"),
        ({"names": ["a"]}, ValueError, "names: expected"),
    ],
)
def test_wrong_arguments(kwargs, error, said):
    with pytest.raises(error, match=said):
        diagnose(Support(normal(20, 3)), **kwargs)


def test_one_set_at_a_time_and_labels_on_both_sides():
    for references in (5, 20_000):
        with pytest.raises(ValueError, match="support: expected one set of references, got 2 tasks"):
            diagnose(Support.batch([normal(9, 3), normal(5, 3)]), references=references)
    labelled = Support(normal(20, 3), labels=torch.arange(20) % 2)
    for held_out in (normal(5, 3), Support(normal(5, 3))):
        with pytest.raises(ValueError, match="held_out: expected labels, as the support has, got none"):
            diagnose(labelled, held_out=held_out)


def test_a_metric_is_no_remedy_where_its_own_linear_denoiser_errs_without_bound():
    g = torch.Generator().manual_seed(0)
    points = torch.randn(120, 4, generator=g, dtype=torch.float64)
    found = diagnose(Support(points, labels=torch.arange(40).repeat_interleave(3)), queries=80)
    assert not (found.verdict.remedy or "").startswith("metric")
    for r in found.remedies:
        assert r.skill is None or r.skill < 0.9


def test_collapse_and_samples_are_those_of_the_path_that_was_asked_for():
    points = torch.randn(60, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    path = VariancePreserving()
    found = diagnose(Support(points), path=path, queries=30)
    assert found.collapse is not None and found.collapse.t is not None and found.collapse.bandwidth is not None
    at = path(found.collapse.t)
    assert float(at.sigma / at.alpha) == pytest.approx(found.collapse.bandwidth, rel=1e-6)


def test_equal_references_are_one_place_of_more_weight():
    """Every point twice: the same errors and n_eff as every point once, since a query sees neither of its two."""
    points = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    half, answers = points[:20], []
    x, t = (
        torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1), dtype=F64),
        torch.tensor([0.3, 0.6], dtype=F64),
    )
    for z, log_count in (
        (torch.cat([points, half]), None),
        (points, torch.tensor([2.0] * 20 + [1.0] * 20).double().log()),
    ):
        answers.append(denoise(x, t, 1 - t, z, torch.zeros(3, dtype=F64), None, log_count))
    torch.testing.assert_close(answers[0].denoised, answers[1].denoised, rtol=1e-12, atol=1e-12)
    assert (answers[0].n_eff > answers[1].n_eff).all()
    once, twice = (diagnose(Support(p), queries=40) for p in (points, points.repeat(2, 1)))
    assert twice.curves is not None and once.curves is not None
    assert max(v[0] for v in twice.curves.n_eff) <= 39.0 + 1e-9
    assert twice.verdict.regime == once.verdict.regime
