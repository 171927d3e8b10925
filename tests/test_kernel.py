"""The engine: every route, block and shard against direct differences in float64, and the accuracy it promises."""

import itertools
import math
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

import oracle
from nwflow import Support
from nwflow.field import NWField
from nwflow.kernel import fused, rescore
from nwflow.kernel import posterior as engine
from nwflow.kernel.nearest import nearest
from nwflow.kernel.posterior import Keys, Moments, Partial, Want, finish, merge, prepare, stream
from nwflow.paths import CondOT

F64 = torch.float64
EVERYTHING = Want(mean=True, square=True, prior=True, mass2=True)


def cloud(kind: str, m: int, d: int, offset: float = 0.0) -> Tensor:
    """Float32 points: Gaussian, near-duplicate pairs, or two tight clusters of m / 2, around ``offset``."""
    g = torch.Generator().manual_seed(0)
    s = torch.randn(m, d, generator=g, dtype=F64)
    if kind == "pairs":
        s[1::2] = s[::2][: m // 2] + 1e-4 * s[1::2]
    elif kind == "clusters":
        s = 1e-3 * s + 2.0 * (torch.arange(m) >= m // 2)[:, None]
    return (s + offset).float()


def queries(s: Tensor, alpha: float, sigma: float, n: int = 6) -> Tensor:
    """Draws of the path, a midpoint of two points, the mean, and a point itself, in float32."""
    g = torch.Generator().manual_seed(1)
    i = torch.randint(len(s), (n,), generator=g)
    x = alpha * s[i].double() + sigma * torch.randn(n, s.shape[1], generator=g, dtype=F64)
    x[-3] = alpha * (s[0].double() + s[1].double()) / 2
    x[-2] = alpha * s.double().mean(0)
    x[-1] = alpha * s[i[0]].double()
    return x.float()


def lifted(x: Tensor, s: Tensor, alpha: float, sigma, log_prior: Tensor | None = None, each: bool = False):
    """y, b and keys of the engine for one set, compute dtype that of ``x``; ``each``: one b a coordinate."""
    lp = torch.full((len(s),), -math.log(len(s)), dtype=F64) if log_prior is None else log_prior.double()
    shift = s.double().mean(0, keepdim=True)
    v = torch.as_tensor(sigma, dtype=F64).reshape(-1, 1) ** 2
    y = alpha * (x.double() - alpha * shift) / v
    b = alpha**2 / v
    if each:
        b = b.expand(-1, s.shape[1])
    return y, b, prepare(s, shift, torch.ones(1, 1, dtype=F64), lp, x.dtype)


def exact(x: Tensor, s: Tensor, alpha: float, sigma, log_prior: Tensor | None = None, each: bool = False) -> dict:
    """The moments by direct differences."""
    lp = torch.full((len(s),), -math.log(len(s)), dtype=F64) if log_prior is None else log_prior.double()
    v = torch.as_tensor(sigma, dtype=F64).expand(len(x)) ** 2
    z, c = s.double() - s.double().mean(0), x.double() - alpha * s.double().mean(0)
    lg = torch.stack([lp - (x[i].double() - alpha * s.double()).square().sum(1) / (2 * v[i]) for i in range(len(x))])
    w = torch.softmax(lg, -1)
    f = z.square() if each else z.square().sum(1, keepdim=True)
    return {
        "w": w,
        "lse": torch.logsumexp(lg, -1) + c.square().sum(-1) / (2 * v),
        "mean": w @ z,
        "square": w @ f,
        "prior": w @ lp.masked_fill(lp == -math.inf, 0.0),
        "n_eff": 1 / w.square().sum(-1),
    }


def dense(found: Moments, m: int) -> Tensor:
    """The weights that a pass with ``top=m`` used, ``(n, m)``."""
    index = found.index.clamp(min=0)
    return torch.zeros(*index.shape[:-1], m, dtype=F64).scatter_add(-1, index, found.weights.double())


def assert_moments(found: Moments, true: dict, tol: float, radius: float):
    """Weights within ``tol`` in total variation put every moment within what that moves it."""
    slack = tol + 5e-7  # float32 weights and values carry a few units of 6e-8 of their own
    torch.testing.assert_close(found.mean.double(), true["mean"], rtol=0, atol=2 * slack * radius)
    torch.testing.assert_close(found.square.double(), true["square"], rtol=0, atol=2 * slack * radius**2)
    torch.testing.assert_close(found.prior.double(), true["prior"], rtol=slack, atol=10 * slack)
    torch.testing.assert_close(found.n_eff.double(), true["n_eff"], rtol=4 * slack, atol=0)
    error = (found.lse - true["lse"]).abs()
    assert (error <= slack + 1e-14 * true["lse"].abs()).all(), error


# --- streaming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("d", [2, 40])
@pytest.mark.parametrize(("key_block", "query_block"), [(1, 4), (7, 3), (64, 1000), (1000, 1), (150, 256)])
def test_any_blocks_give_the_sums_of_one_block(key_block, query_block, d, each):
    s = cloud("gauss", 150, d)
    x = queries(s, 0.6, 0.5, 9).double()
    lp = torch.log_softmax(torch.randn(150, dtype=F64), 0)
    y, b, keys = lifted(x, s, 0.6, 0.5, lp, each)
    found = finish(
        stream(y, b, keys, replace(EVERYTHING, top=150), F64, F64, key_block=key_block, query_block=query_block)
    )
    true = exact(x, s, 0.6, 0.5, lp, each)
    assert_close = torch.testing.assert_close
    for name in ("lse", "mean", "square", "prior", "n_eff"):
        assert_close(getattr(found, name), true[name], rtol=1e-11, atol=1e-11)
    assert_close(dense(found, 150), true["w"], rtol=0, atol=1e-12)
    some = finish(stream(y, b, keys, Want(top=5), F64, F64, key_block=key_block, query_block=query_block))
    assert torch.equal(some.index, found.index[:, :5])


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_shards_merge_in_any_order_to_the_whole(order, dtype):
    s = cloud("clusters", 90, 3)
    lp = torch.log_softmax(torch.randn(90, dtype=F64), 0)
    x = queries(s, 0.5, 0.5, 7).to(dtype)
    y, b, keys = lifted(x, s, 0.5, 0.5, lp)
    want = replace(EVERYTHING, top=20)
    shards = []
    for start, stop in ((0, 10), (10, 80), (80, 90)):  # the first and last are smaller than top
        part = prepare(s[start:stop], keys.shift, keys.scale, lp[start:stop], dtype)
        p = stream(y, b, part, want, dtype, dtype)
        shards.append(replace(p, index=p.index + start))
    i, j, k = order
    left = finish(merge(merge(shards[i], shards[j]), shards[k]))
    right = finish(merge(shards[i], merge(shards[j], shards[k])))
    whole = finish(stream(y, b, keys, want, dtype, dtype))
    tol = 1e-11 if dtype == F64 else 1e-5
    for f in fields(Moments):
        one = getattr(whole, f.name)
        if one is None:
            continue
        for other in (left, right):
            value = getattr(other, f.name)
            assert value.shape == one.shape, f.name
            if f.name == "index":
                assert dtype != F64 or torch.equal(value, one)
            else:
                torch.testing.assert_close(value, one, rtol=tol, atol=tol)


def test_merging_a_part_of_far_smaller_weight_changes_nothing():
    near = Partial(torch.tensor([[0.0]]), torch.tensor([[2.0]]), first=torch.tensor([[4.0]]))
    far = Partial(torch.tensor([[-1e30]]), torch.tensor([[7.0]]), first=torch.tensor([[9.0]]))
    for a, b in ((near, far), (far, near)):
        joined = merge(a, b)
        assert float(joined.mass) == 2.0 and float(joined.first) == 4.0 and float(joined.maximum) == 0.0


def test_merging_two_empty_parts_stays_empty():
    empty = Partial(torch.tensor([[-math.inf]]), torch.tensor([[0.0]]))
    joined = merge(empty, empty)
    assert float(joined.mass) == 0.0 and float(joined.maximum) == -math.inf


@pytest.mark.parametrize("extreme", [0.0, 1e-12, 1e9])
def test_bandwidths_without_scale(extreme):
    """b = 0 is the prior; a huge b is one point."""
    s = cloud("gauss", 40, 3)
    lp = torch.log_softmax(torch.randn(40, dtype=F64), 0)
    keys = prepare(s, s.double().mean(0, keepdim=True), torch.ones(1, 1, dtype=F64), lp, F64)
    z = s.double() - s.double().mean(0)
    b = torch.full((1, 1), extreme, dtype=F64)
    found = finish(stream(b * z[:3], b, keys, EVERYTHING, F64, F64))
    expected = lp.exp() @ z if extreme < 1 else z[:3]
    torch.testing.assert_close(found.mean, expected.expand(3, 3), rtol=1e-9, atol=1e-9)


# --- every route ------------------------------------------------------------------------------------------------------

# name: (bandwidth, tolerance, constants, the function that must do the work)
ROUTES = {
    "small": (0.5, 1e-5, {}, "_dense"),
    "small by differences": (0.02, 1e-14, {}, "_direct_all"),
    "float32": (3.0, 1e-3, {"SMALL": 0}, "stream"),
    "short list": (0.02, 1e-5, {"SMALL": 0, "SHORT": 1}, "rescored"),
    "product": (0.5, 1e-5, {"SMALL": 0}, "_product"),
    "product in float64": (0.01, 1e-5, {"SMALL": 0}, "_product"),  # top > 1 leaves no short lists
    "differences": (0.3, 1e-14, {"SMALL": 0}, "_differences"),
}


@pytest.mark.parametrize("blocks", [None, (7, 2)])
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("kind", ["gauss", "pairs", "clusters"])
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_agrees_with_direct_differences(route, kind, each, blocks, monkeypatch):
    h, tol, constants, name = ROUTES[route]
    for constant, value in constants.items():
        monkeypatch.setattr(rescore, constant, value)
    if blocks is not None:
        monkeypatch.setattr(rescore, "KEY_BLOCK", blocks[0])
        monkeypatch.setattr(rescore, "QUERY_BLOCK", blocks[1])
        monkeypatch.setattr(rescore, "PAIRS", 64)
        monkeypatch.setattr(rescore, "PROBE", 16)
    called, work = [], getattr(rescore, name)
    monkeypatch.setattr(rescore, name, lambda *a, **k: called.append(1) or work(*a, **k))
    s = cloud(kind, 300, 5)
    lp = torch.log_softmax(torch.rand(300, dtype=F64), 0)
    alpha = 1 / (1 + h)
    x = queries(s, alpha, h * alpha, 9)
    y, b, keys = lifted(x, s, alpha, h * alpha, lp, each)
    true = exact(x, s, alpha, h * alpha, lp, each)
    radius = float((s.double() - s.double().mean(0)).norm(dim=1).max())
    found = rescore.posterior(y, b, keys, replace(EVERYTHING, top=2 if "in float64" in route else 0), tol)
    assert called, f"{route} was not taken"
    assert_moments(found, true, tol, radius)
    assert found.error.shape == found.proven.shape == (9,)
    one = rescore.posterior(y, b, keys, replace(EVERYTHING, top=1), tol)
    torch.testing.assert_close(one.weights[:, 0].double(), true["w"].amax(-1), rtol=0, atol=tol + 5e-7)


@pytest.mark.parametrize("top", [2, 10, 300])
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_returns_the_largest_weights(route, top, monkeypatch):
    h, tol, constants, _ = ROUTES[route]
    for constant, value in constants.items():
        monkeypatch.setattr(rescore, constant, value)
    monkeypatch.setattr(rescore, "PAIRS", 64)
    s = cloud("gauss", 300, 5)
    alpha = 1 / (1 + h)
    x = queries(s, alpha, h * alpha, 9)
    y, b, keys = lifted(x, s, alpha, h * alpha)
    found = rescore.posterior(y, b, keys, Want(mean=False, top=top), tol)
    true = exact(x, s, alpha, h * alpha)["w"]
    assert found.weights.shape == found.index.shape == (9, top)
    torch.testing.assert_close(found.weights.double(), true.topk(top).values, rtol=0, atol=tol + 5e-7)
    seen = torch.where(found.index >= 0, torch.gather(true, 1, found.index.clamp(min=0)), 0.0)
    torch.testing.assert_close(found.weights.double(), seen, rtol=0, atol=tol + 5e-7)


@pytest.mark.parametrize("times", ["one", "per task", "per query"])
@pytest.mark.parametrize("small", [0, 2**21])
@pytest.mark.parametrize("h", [0.05, 0.5, 5.0])
@pytest.mark.parametrize("tol", [1e-5, 1e-3, None])
def test_tasks_equal_their_supports(tol, h, small, times, monkeypatch):
    monkeypatch.setattr(rescore, "SMALL", small)
    torch.manual_seed(1)
    points = torch.randn(3, 40, 4)
    mask = torch.rand(3, 40) > 0.3
    lp = torch.log_softmax(torch.rand(3, 40, dtype=F64).masked_fill(~mask, -math.inf), -1)
    points[~mask] = 0.0
    scale = {"one": torch.ones(1, 1, 1), "per task": torch.rand(3, 1, 1) + 0.5, "per query": torch.rand(3, 6, 1) + 0.5}
    sigma = h * scale[times].double()
    x = (0.7 * points[:, :6] + 0.7 * h * torch.randn(3, 6, 4)).float()
    shift = points.double().mean(1, keepdim=True)
    y = 0.7 * (x.double() - 0.7 * shift) / sigma**2
    b = 0.49 / sigma**2
    keys = prepare(points, shift, torch.ones(1, 1, 1, dtype=F64), lp, torch.float32)
    found = rescore.posterior(y, b, keys, replace(EVERYTHING, top=40), tol)
    slack = 2e-6 if tol is not None else 1e-3
    for i in range(3):
        own = sigma.expand(3, 6, 1)[i, :, 0]
        real = mask[i]
        centre = shift[i, 0]
        z, c = points[i].double() - centre, x[i].double() - 0.7 * centre
        lg = lp[i] - (x[i, :, None].double() - 0.7 * points[i].double()).square().sum(-1) / (2 * own[:, None] ** 2)
        w = torch.softmax(lg, -1)
        lse = torch.logsumexp(lg, -1) + c.square().sum(-1) / (2 * own**2)
        torch.testing.assert_close(found.lse[i], lse, rtol=1e-6, atol=slack + (tol or 1e-4))
        torch.testing.assert_close(found.mean[i], w @ z, rtol=0, atol=20 * (slack + (tol or 0)))
        mine = torch.zeros(6, 40, dtype=F64).scatter_add(1, found.index[i].clamp(min=0), found.weights[i].double())
        assert (oracle.variation(mine, w) <= slack + (tol or 0)).all()
        assert (mine[:, ~real] == 0).all()


def test_masked_points_may_hold_anything_finite_weights_stay_zero():
    s = torch.randn(1, 5, 2)
    s[0, 3:] = 1e30
    lp = torch.tensor([[0.0, 0.0, 0.0, -math.inf, -math.inf]], dtype=F64)
    shift = torch.zeros(1, 1, 2, dtype=F64)
    keys = prepare(s, shift, torch.ones(1, 1, 1, dtype=F64), lp, torch.float32)
    assert float(keys.radius) < 10
    found = rescore.posterior(torch.randn(1, 4, 2, dtype=F64), torch.ones(1, 1, 1, dtype=F64), keys, EVERYTHING, 1e-5)
    for f in ("lse", "mean", "square", "prior", "n_eff"):
        assert torch.isfinite(getattr(found, f)).all(), f
    assert (found.n_eff <= 3 + 1e-6).all()


def test_queries_whose_short_lists_overflow_keep_their_places(monkeypatch):
    """The strided probe sees even points alone: it takes the first query for an easy one, whose list then overflows."""
    monkeypatch.setattr(rescore, "SMALL", 0)
    g = torch.Generator().manual_seed(0)
    s = torch.empty(1024, 2)
    s[1::2] = torch.tensor([8.0, 0.0]) + 0.01 * torch.randn(512, 2, generator=g)  # seen by no probe
    s[0::4] = torch.tensor([0.0, 8.0]) + 0.01 * torch.randn(256, 2, generator=g)
    s[2::4] = torch.stack([torch.linspace(-400.0, -40.0, 256), torch.zeros(256)], 1)
    s[2] = torch.tensor([7.0, 0.0])
    x = torch.tensor([[8.0, 0.0], [0.0, 8.0], [8.0, 0.01]])
    true = exact(x, s, 1.0, 0.1)
    for order in ([0, 1, 2], [1, 0, 2], [0, 2, 1], [0, 1], [1, 0], [0, 2]):
        y, b, keys = lifted(x[order], s, 1.0, 0.1)
        found = rescore.posterior(y, b, keys, EVERYTHING, 1e-5)
        for name in ("lse", "mean", "n_eff"):
            value, reference = getattr(found, name).double(), true[name][order]
            torch.testing.assert_close(
                value, reference, rtol=1e-4, atol=1e-3, msg=lambda m, o=order, k=name: f"{o} {k}: {m}"
            )


def test_no_queries_give_empty_moments():
    s = cloud("gauss", 20, 3)
    y, b, keys = lifted(torch.zeros(0, 3), s, 0.5, 0.5)
    for small in (0, 2**21):
        for tol in (None, 1e-5):
            rescore.SMALL, before = small, rescore.SMALL
            try:
                found = rescore.posterior(y, b, keys, replace(EVERYTHING, top=3), tol)
            finally:
                rescore.SMALL = before
            assert found.lse.shape == (0,) and found.mean.shape == (0, 3) and found.weights.shape == (0, 3)


# --- the accuracy contract --------------------------------------------------------------------------------------------


def assert_contract(field: NWField, h: float, n: int = 6) -> Tensor:
    """Weights, effective numbers, denoiser and noise of a field by the routes it takes itself; the exact n_eff."""
    s, accuracy, t = field.points, field.accuracy, CondOT().time_at(h)
    alpha, sigma = float(CondOT()(t).alpha), float(CondOT()(t).sigma)
    x = queries(s, alpha, sigma, n)
    lg = oracle.logits(x, alpha, sigma, s)
    true = torch.softmax(lg, -1)
    best, one = field.attribute(x, t, k=min(len(s), 500)), field.attribute(x, t, k=1)
    p = field.posterior(x, t, ("denoiser", "noise", "n_eff", "entropy", "covariance_trace", "log_density"))
    # the largest weights one by one, and what the others hold together
    mine = torch.gather(true, 1, best.indices)
    variation = 0.5 * ((best.weights - mine).abs().sum(1) + (best.captured.double() - mine.sum(1)).abs())
    assert (variation <= accuracy).all(), (h, variation)
    assert ((one.weights[:, 0] - true.amax(1)).abs() <= accuracy).all(), h
    assert (p.error_bound <= accuracy).all(), (h, p.error_bound)
    torch.testing.assert_close(p.n_eff.double(), 1 / true.square().sum(1), rtol=4 * accuracy, atol=0)
    density = torch.logsumexp(lg, 1) - math.log(len(s)) - s.shape[1] / 2 * math.log(2 * math.pi * sigma**2)
    torch.testing.assert_close(p.log_density.double(), density, rtol=2e-7, atol=1e-5)
    assert_moments_of_the_field(p, x, s.double(), true, alpha, sigma, accuracy)
    return 1 / true.square().sum(1)


def assert_moments_of_the_field(p, x: Tensor, s: Tensor, true: Tensor, alpha: float, sigma: float, accuracy: float):
    """D, eps, entropy and the trace of the covariance, each within what a variation of ``accuracy`` can do to it."""
    centre = s.mean(0)
    z = s - centre
    mean, square = true @ z, z.square().sum(1)
    radius = float(square.max().sqrt())
    # D is rounded to float32 at the end
    error = (p.denoiser.double() - mean - centre).norm(dim=1)
    assert (error <= 2 * accuracy * radius + 1e-7 * float(s.norm(dim=1).max())).all(), error
    # eps is relative to itself, or to a tenth of a typical noise where two points leave next to none
    noise = (x.double() - alpha * centre - alpha * mean) / sigma
    error = (p.noise.double() - noise).norm(dim=1)
    assert (error <= 1e-4 * noise.norm(dim=1).clamp(min=0.1 * math.sqrt(s.shape[1]))).all(), error
    entropy = -(true * true.clamp(min=1e-300).log()).sum(1)
    assert ((p.entropy - entropy).abs() <= 2 * accuracy * math.log(len(s) / accuracy)).all(), p.entropy - entropy
    trace = true @ square - mean.square().sum(1)
    assert ((p.covariance_trace - trace).abs() <= 4 * accuracy * radius**2).all(), p.covariance_trace - trace


@pytest.mark.parametrize("kind", ["gauss", "pairs", "clusters"])
@pytest.mark.parametrize("offset", [0.0, 10.0, 100.0])
@pytest.mark.parametrize("d", [2, 64, 784])
def test_weights_keep_the_tolerance_at_every_bandwidth(d, offset, kind, monkeypatch):
    monkeypatch.setattr(rescore, "SMALL", 0)  # decide query by query even where that does not pay
    s = cloud(kind, 1000, d, offset)
    scale = float(Support(s).data_scale)
    field = NWField(s)
    spread = [assert_contract(field, 10.0**k * scale) for k in range(-3, 4)]
    if kind == "gauss":
        assert float(spread[0].min()) < 1.01 and float(spread[-1].max()) > 999  # from 1 to m


@pytest.mark.parametrize("tolerance", [1e-3, 1e-4, 1e-6])
@pytest.mark.parametrize("kind", ["gauss", "clusters"])
def test_other_tolerances_are_kept_too(kind, tolerance, monkeypatch):
    monkeypatch.setattr(rescore, "SMALL", 0)
    s = cloud(kind, 1000, 64, 10.0)
    scale = float(Support(s).data_scale)
    field = NWField(s, accuracy=tolerance)
    for k in range(-3, 4):
        t = CondOT().time_at(10.0**k * scale)
        at = CondOT()(t)
        x = queries(s, float(at.alpha), float(at.sigma))
        true = oracle.weights(x, float(at.alpha), float(at.sigma), s)
        found = field.attribute(x, t, k=1000)
        mine = torch.zeros_like(true).scatter(1, found.indices, found.weights.double())
        assert (oracle.variation(mine, true) <= tolerance).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gauss", "pairs", "clusters"])
@pytest.mark.parametrize("d", [2, 64, 784])
def test_weights_keep_the_tolerance_over_twenty_thousand_points(d, kind):
    s = cloud(kind, 20_000, d, 10.0)
    scale = float(Support(s).data_scale)
    field = NWField(s)
    for k in range(-3, 4):
        assert_contract(field, 10.0**k * scale, n=4)


@pytest.mark.parametrize("kind", ["gauss", "clusters"])
@pytest.mark.parametrize("d", [2, 64])
@pytest.mark.parametrize("tol", [None, 1e-5, 1e-3])
def test_the_error_bound_bounds_the_variation(tol, d, kind, monkeypatch):
    monkeypatch.setattr(rescore, "SMALL", 0)
    s = cloud(kind, 1000, d, 10.0)
    for h in (1e-3, 1e-2, 0.1, 1.0, 10.0):
        alpha = 1 / (1 + h)
        x = queries(s, alpha, h * alpha, 30)
        y, b, keys = lifted(x, s, alpha, h * alpha)
        found = rescore.posterior(y, b, keys, Want(top=1000), tol)
        true = exact(x, s, alpha, h * alpha)
        tv = oracle.variation(dense(found, 1000), true["w"])
        assert (tv <= found.error.clamp(max=1.0)).all(), (h, tv.max(), found.error.max())
        if tol is None:
            assert not found.proven.any()
        else:
            assert (found.error <= tol * 1.001).all()
        # the mean is a mean of weights within that bound of the exact ones
        radius = float((s.double() - s.double().mean(0)).norm(dim=1).max())
        moved = (found.mean - true["mean"]).norm(dim=1)
        assert (moved <= (2 * found.error.clamp(max=1.0) + 2e-7) * radius).all(), (h, moved.max())


def test_far_queries_keep_the_bound(monkeypatch):
    """x at many data scales, bandwidth small: y z is large beside the differences that decide."""
    monkeypatch.setattr(rescore, "SMALL", 0)
    s = cloud("gauss", 400, 2)
    for far in (1e2, 1e4, 1e6):
        for h in (1e-3, 1e-2, 0.1):
            # two points that share the weight 1 : 3 seen from there; the log-ratio is exact in differences of points
            pair, v = s.double().clone(), h * h
            pair[0], pair[1] = torch.tensor([5.0, 0.5]), torch.tensor([5.0, -0.25])
            x = torch.tensor([[far, 0.125 + v * math.log(3.0) / 0.75]], dtype=F64)
            z = pair - pair.mean(0)
            c = x - pair.mean(0)  # alpha = 1
            lg = ((z - z[0]) * (c - (z + z[0]) / 2)).sum(1) / v  # l_i - l_0 without |c|^2
            true = torch.softmax(lg, 0)[None]
            assert float(true[0, :2].min()) > 0.2 and float(true[0, :2].sum()) > 0.999
            y, b, keys = lifted(x, pair, 1.0, h)
            found = rescore.posterior(y, b, keys, Want(top=1), 1e-5)
            tv = (found.weights[:, 0] - true.amax(1)).abs()
            assert (tv <= found.error + 1e-12).all(), (far, h, float(tv), float(found.error), bool(found.proven))


@pytest.mark.parametrize("d", [2, 30])
def test_a_bandwidth_of_its_own_for_each_of_many_queries(d):
    """Every route in one call, in several blocks of queries, alone and as a task."""
    g = torch.Generator().manual_seed(0)
    s, t = torch.randn(2000, d, generator=g), CondOT().time_at(10 ** (6 * torch.rand(300, generator=g).double() - 3))
    x = t[:, None] * s[:300] + (1 - t[:, None]) * torch.randn(300, d, generator=g, dtype=F64)
    x = x.float()
    true = oracle.weights(x, t, 1 - t, s)
    field, tasks = NWField(s), NWField(Support.batch([s, s[:500]]))
    p = field.posterior(x, t, ("denoiser", "n_eff"))
    torch.testing.assert_close(p.denoiser.double(), true @ s.double(), rtol=0, atol=1e-4)
    torch.testing.assert_close(p.n_eff, 1 / true.square().sum(1), rtol=4e-5, atol=0, check_dtype=False)
    found = field.attribute(x, t, k=5)
    assert ((found.weights - true.topk(5).values).abs() <= 1e-5).all()
    both = tasks.denoise(torch.stack([x, x]), torch.stack([t, t]))
    torch.testing.assert_close(both[0], p.denoiser, rtol=0, atol=1e-4)
    torch.testing.assert_close(
        both[1].double(), oracle.weights(x, t, 1 - t, s[:500]) @ s[:500].double(), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_reduced_matmul_precision_changes_nothing_and_is_restored(precision):
    s = cloud("gauss", 2000, 64)
    before = torch.get_float32_matmul_precision()
    for accuracy, t in ((None, 0.6), (1e-5, 0.1), (1e-5, 0.6), (1e-5, 0.97)):
        x = queries(s, t, 1 - t, 20)
        field = NWField(s, accuracy=accuracy)

        def results(field=field, x=x, t=t):
            q = x[:3].clone().requires_grad_()
            value = field.denoise(q, t)
            return field(x, t), *torch.autograd.grad(value.sum(), q)

        expected = results()
        torch.set_float32_matmul_precision(precision)
        try:
            found = results()
            assert torch.get_float32_matmul_precision() == precision
            with pytest.raises(ValueError, match="t: expected"):
                field(x, 2.0)
            assert torch.get_float32_matmul_precision() == precision
        finally:
            torch.set_float32_matmul_precision(before)
        for value, reference in zip(found, expected):
            torch.testing.assert_close(value, reference, rtol=1e-6, atol=1e-6)


def test_the_plain_pass_is_good_at_moderate_bandwidths():
    """accuracy=None: float32 products on centred data; an offset of 100 costs nothing."""
    for offset in (0.0, 100.0):
        s = cloud("gauss", 1000, 64, offset)
        x = queries(s, 0.5, 0.5)
        true = oracle.weights(x, 0.5, 0.5, s)
        found = NWField(s, accuracy=None).attribute(x, 0.5, k=1000)
        mine = torch.zeros_like(true).scatter(1, found.indices, found.weights.double())
        assert (oracle.variation(mine, true) < 1e-4).all()


# --- vanishing bandwidth ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_nearest_points_are_exact_and_ties_share_by_prior(offset):
    s = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 0.0]]) + offset
    lp = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=F64).log()
    shift = s.double().mean(0, keepdim=True)
    keys = prepare(s, shift, torch.ones(1, 1, dtype=F64), lp, torch.float32)
    c = torch.tensor([[0.1, 0.0], [1.9, 0.1], [1.0, 0.0], [1.0, 1.0]], dtype=F64) + offset - shift
    found = nearest(c, keys, Want(top=4))
    expected = torch.tensor([[1, 0, 0, 0], [0, 1 / 3, 0, 2 / 3], [1 / 7, 2 / 7, 0, 4 / 7], [0, 2 / 9, 3 / 9, 4 / 9]],
                            dtype=F64)  # fmt: skip
    # a midpoint of three: (1, 1) is sqrt(2) from all four
    expected[3] = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=F64)
    w = torch.zeros(4, 4, dtype=F64).scatter_add(1, found.index.clamp(min=0), found.weights)
    torch.testing.assert_close(w, expected, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found.mean, expected @ (s.double() - shift), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.n_eff, 1 / expected.square().sum(1))


def test_nearest_in_tasks_marks_missing_ties_with_minus_one():
    field = NWField(Support.batch([torch.tensor([[0.0], [2.0], [4.0]]), torch.tensor([[0.0], [1.0]])]))
    x = torch.tensor([[[1.0], [3.9]], [[0.5], [-3.0]]])
    w = field.weights(x, 1.0)
    torch.testing.assert_close(w[0], torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]))
    torch.testing.assert_close(w[1], torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]))
    found = field.attribute(x, 1.0, k=2)
    assert found.indices[0, 1].tolist() == [2, -1] and found.indices[1, 1].tolist() == [0, -1]
    assert sorted(found.indices[0, 0].tolist()) == [0, 1] and sorted(found.indices[1, 0].tolist()) == [0, 1]


def test_keys_follow_their_points():
    """The cached copy is rebuilt when the points, the shift, the scale or the prior change, and only then."""
    from nwflow.kernel.autograd import KeyCache

    s, lp = torch.randn(1, 5, 2), torch.zeros(1, 5, dtype=F64)
    shift, scale = torch.zeros(1, 1, 2, dtype=F64), torch.ones(1, 1, 1, dtype=F64)
    cache = KeyCache()
    first = cache.keys(s, lp, shift, scale, torch.float32)
    assert cache.keys(s, lp, shift, scale, torch.float32) is first
    assert cache.keys(s, lp, shift, scale, F64).cheap.dtype == F64
    assert cache.keys(s, lp, shift, scale, torch.float32) is first
    s.mul_(2)
    second = cache.keys(s, lp, shift, scale, torch.float32)
    assert isinstance(second, Keys) and second is not first
    torch.testing.assert_close(second.cheap, s)
    assert cache.keys(s, lp.clone(), shift, scale, torch.float32) is not second


def test_clamped_logits_carry_no_visible_weight():
    s = torch.tensor([[0.0], [1.0], [30.0]])
    x = torch.tensor([[0.5]])
    y, b, keys = lifted(x.double(), s, 1.0, 0.5)
    found = finish(stream(y, b, keys, Want(top=3), F64, F64))
    assert float(found.mean + keys.shift) == pytest.approx(0.5, abs=1e-12)
    assert engine.CLAMP == -50.0
    true = exact(x.double(), s, 1.0, 0.5)["w"]
    torch.testing.assert_close(dense(found, 3), true, rtol=1e-12, atol=1e-21)


@pytest.mark.skipif(fused._KERNEL is None, reason="this PyTorch has no such kernel: the streaming pass serves instead")
@pytest.mark.parametrize("d", [1, 2, 64, 256])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 5), (3, 301), (300, 40), (33, 4097)])
def test_the_fused_pass_gives_the_sums_of_the_stream(n, m, d):
    s = cloud("clusters", m, d)
    lp = torch.log_softmax(torch.randn(m, generator=torch.Generator().manual_seed(1), dtype=F64), 0)
    x = queries(s[[0, *range(m)]], 0.5, 0.4, max(n, 3))[-n:]
    for each in (False, True):
        sigma = torch.linspace(0.2, 0.6, n, dtype=F64)[:, None] if each else 0.4
        y, b, keys = lifted(x, s, 0.5, sigma, lp, False)
        assert fused.applies(y, b, keys, Want(), torch.float32)
        found = finish(fused.fused(y, b, keys))
        right = finish(stream(y, b, keys, Want(), F64, F64))
        delta = rescore.logit_error(y, b, keys, torch.float32).proven + fused.ULPS * torch.finfo(torch.float32).eps
        assert ((found.lse - right.lse).abs() <= delta).all()
        assert ((found.mean - right.mean).norm(dim=-1) <= 2 * keys.radius * delta + 1e-6 * keys.radius).all()


def test_masked_supports_are_left_to_the_stream():
    s = cloud("gauss", 20, 3)
    lp = torch.zeros(20, dtype=F64)
    lp[3] = -torch.inf
    y, b, keys = lifted(queries(s, 0.5, 0.4), s, 0.5, 0.4, lp)
    assert not fused.applies(y, b, keys, Want(), torch.float32)
    assert not fused.applies(y, b, keys, Want(mass2=True), torch.float32)


@pytest.mark.parametrize("h", [1e-3, 0.1, 1.0, 30.0])
def test_points_without_weight_may_be_left_out_of_the_second_product(h):
    """Blocks in which few points weigh anything take those alone: all moments stay those of every point."""
    s = torch.randn(3000, 300, generator=torch.Generator().manual_seed(0))
    x = queries(s, 0.5, 0.5 * h, 5)
    y, b, keys = lifted(x, s, 0.5, 0.5 * h)
    want = Want(square=True, prior=True, mass2=True, top=3)
    found = finish(stream(y, b, keys, want, torch.float32, torch.float32, fast=True))
    plain = finish(stream(y.float().double(), b.float().double(), replace(keys, cheap=keys.cheap.double()), want,
                          F64, F64, key_block=3000))  # fmt: skip
    delta = rescore.logit_error(y, b, keys, torch.float32).estimate[:, None] + 1e-6
    assert ((found.mean - plain.mean).norm(dim=-1, keepdim=True) <= 2 * keys.radius * delta).all()
    assert ((found.n_eff - plain.n_eff).abs()[:, None] <= 4 * delta * plain.n_eff[:, None] ** 1.5).all()
    assert ((found.square - plain.square).abs() <= 2 * keys.radius**2 * delta).all()


def test_no_number_stays_no_number_where_points_are_left_out():
    s = torch.randn(3000, 300, generator=torch.Generator().manual_seed(0))
    field = NWField(s, CondOT(), accuracy=None)
    x = 0.9 * s[:2].clone()
    x[1, 0] = torch.nan
    found = field.denoise(x, 0.9)
    assert found[0].isfinite().all() and found[1].isnan().all()
