"""Derivatives of the field in queries, time, points and weights: both modes and orders, every torch.func transform."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from nwflow import Support
from nwflow.field import NWField
from nwflow.kernel import autograd, rescore
from nwflow.metric import DiagonalMetric, FullMetric, Smoothing
from nwflow.paths import CondOT, Cosine, DiscretePath, VarianceExploding, VariancePreserving
from oracle import Watch

F64 = torch.float64
VECTORS = ("velocity", "denoise", "score", "noise")
SCALARS = ("log_density", "divergence", "n_eff", "entropy", "covariance_trace")
PATHS = [CondOT(), VariancePreserving(), Cosine(), VarianceExploding(0.1, 10.0),
         DiscretePath.from_alphas_cumprod(torch.linspace(0.999, 0.01, 20, dtype=F64))]  # fmt: skip
SPD = torch.tensor([[2.0, 0.4], [0.4, 0.7]], dtype=F64)
VARIANTS = {
    "plain": (None, None),
    "diagonal": (DiagonalMetric(torch.tensor([0.5, 2.0], dtype=F64)), None),
    "full": (FullMetric(SPD), None),
    "smoothed": (None, Smoothing.diagonal(torch.tensor([0.3, 0.1], dtype=F64))),
    "both": (FullMetric(SPD), Smoothing.full(SPD / 4)),
}


@pytest.fixture
def tiny(randn):
    """x (3, 2), t (3,), points (4, 2) and weights (4,), all float64 leaves that require grad."""
    x, points = randn(3, 2), 1.5 * randn(4, 2) + 0.5
    t = torch.tensor([0.3, 0.45, 0.6], dtype=F64)
    weights = torch.tensor([0.5, 1.0, 0.8, 0.3], dtype=F64)
    return tuple(v.requires_grad_() for v in (x, t, points, weights))


def evaluate(name: str, path=None, variant: str = "plain", **how):
    """A pure function of (x, t, points, weights)."""
    metric, smoothing = VARIANTS[variant]
    return lambda x, t, p, w: getattr(NWField(Support(p, w), path, metric, smoothing, **how), name)(x, t)


def plain(x: Tensor, t: Tensor, points: Tensor, weights: Tensor | None = None) -> Tensor:
    """The velocity of the straight path by differences, as ordinary operations of torch."""
    t = torch.as_tensor(t, dtype=points.dtype)
    sigma = 1 - t
    square = (x[..., None, :] - t[..., None, None] * points).square().sum(-1)
    lg = -0.5 * square / sigma[..., None] ** 2
    w = torch.softmax(lg if weights is None else lg + weights.log(), -1)
    return (w @ points - x) / sigma[..., None]


# --- finite differences -----------------------------------------------------------------------------------------------


# fast_mode compares random projections of the Jacobians, not every entry; the velocity is compared entry by entry


@pytest.mark.parametrize("name", [*VECTORS, *SCALARS, "weights"])
def test_first_derivatives_of_every_quantity(name, tiny):
    how = {"check_forward_ad": True, "check_batched_grad": True, "check_undefined_grad": True}
    assert gradcheck(evaluate(name), tiny, **how, fast_mode=name != "velocity")


@pytest.mark.parametrize("name", ["velocity", "log_density", "divergence", "n_eff", "entropy", "covariance_trace"])
def test_second_derivatives(name, tiny):
    args = tuple(v.detach()[: 2 if i < 2 else 3].requires_grad_() for i, v in enumerate(tiny))
    how = {"check_fwd_over_rev": True, "check_rev_over_rev": True, "fast_mode": name != "velocity"}
    assert gradgradcheck(evaluate(name), args, **how)


@pytest.mark.parametrize("path", PATHS[1:], ids=repr)
def test_derivatives_on_every_path(path, tiny):
    assert gradcheck(evaluate("velocity", path), tiny, check_forward_ad=True, fast_mode=True)


@pytest.mark.parametrize("variant", ["diagonal", "full", "smoothed", "both"])
def test_derivatives_with_metric_and_smoothing(variant, tiny):
    f = evaluate("velocity", CondOT(0.01), variant)
    assert gradcheck(f, tiny, check_forward_ad=True, fast_mode=True)
    args = tuple(v.detach()[:2].requires_grad_() for v in tiny)
    assert gradgradcheck(f, args, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("variant", ["smoothed", "diagonal"])
@pytest.mark.parametrize("name", ["divergence", "covariance_trace", "log_density"])
def test_derivatives_of_scalars_with_one_bandwidth_a_coordinate(name, variant, tiny):
    args = tuple(v.detach()[:2].requires_grad_() for v in tiny)
    f = evaluate(name, CondOT(0.01), variant)
    assert gradcheck(f, args, check_forward_ad=True, fast_mode=True)
    if name == "divergence":
        assert gradgradcheck(f, args, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("name", ["velocity", "log_density", "divergence"])
@pytest.mark.parametrize("times", [(2, 1), (2, 2), (1, 2)])
def test_derivatives_of_tasks(name, times, randn):
    points, x = randn(2, 3, 2), randn(2, 2, 2)
    weights, mask = torch.rand(2, 3, dtype=F64) + 0.2, torch.tensor([[True, True, False], [True, True, True]])
    t = torch.rand(times, dtype=F64) * 0.5 + 0.2
    args = tuple(v.clone().requires_grad_() for v in (x, t, points, weights))

    def f(x, t, p, w):
        return getattr(NWField(Support.batch(p, weights=w, mask=mask)), name)(x, t)

    assert gradcheck(f, args, check_forward_ad=True, fast_mode=True)
    if name == "velocity" and times != (2, 2):
        assert gradgradcheck(f, args, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 3)])
def test_derivatives_do_not_depend_on_blocks(sizes, tiny, monkeypatch):
    x, t, p, w = tiny
    f = evaluate("velocity")

    def both():
        first = torch.autograd.grad(f(x, t, p, w).sin().sum(), tiny, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), tiny)]

    expected = both()
    tangent = torch.ones_like(p)
    forward = jvp(lambda q: f(x.detach(), t.detach(), q, w.detach()), (p.detach(),), (tangent,))[1]
    rows, pairs = sizes
    monkeypatch.setattr(autograd, "ROWS", rows * 4)
    monkeypatch.setattr(autograd, "PAIRS", pairs)
    for a, b in zip(both(), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    again = jvp(lambda q: f(x.detach(), t.detach(), q, w.detach()), (p.detach(),), (tangent,))[1]
    torch.testing.assert_close(again, forward, rtol=1e-12, atol=1e-12)


# --- identities -------------------------------------------------------------------------------------------------------


def test_derivatives_equal_those_of_plain_operations(tiny):
    x, t, p, w = tiny
    ours, theirs = evaluate("velocity"), plain
    for order in (1, 2):
        grads = []
        for f in (ours, theirs):
            out = torch.autograd.grad(f(x, t, p, w).sin().sum(), tiny, create_graph=True)
            if order == 2:
                out = torch.autograd.grad(sum(g.cos().sum() for g in out), tiny)
            grads.append(out)
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_the_hessian_of_the_density_is_the_jacobian_of_the_score(tiny):
    x, _, p, w = (v.detach() for v in tiny)
    field = NWField(Support(p, w))
    h = hessian(lambda q: field.log_density(q, 0.4))(x[0])
    torch.testing.assert_close(h, jacrev(lambda q: field.score(q, 0.4))(x[0]), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(h, h.T, rtol=1e-12, atol=1e-12)


def test_the_density_satisfies_the_continuity_equation(tiny):
    """d/dt log p + u . grad log p + div u = 0."""
    x, _, p, w = (v.detach() for v in tiny)
    for path in PATHS:
        field = NWField(Support(p, w), path)
        rate = grad(field.log_density, argnums=1)(x[0], torch.tensor(0.4, dtype=F64))
        u = field(x[0], 0.4)
        assert float(rate + u @ field.score(x[0], 0.4) + field.divergence(x[0], 0.4)) == pytest.approx(0, abs=1e-9)


# --- torch.func -------------------------------------------------------------------------------------------------------


def test_jacobians_in_both_modes_agree(tiny):
    x, t, p, w = (v.detach() for v in tiny)
    f = evaluate("velocity")
    for i, args in enumerate([x, t, p, w]):
        back, forward = jacrev(f, argnums=i)(x, t, p, w), jacfwd(f, argnums=i)(x, t, p, w)
        reference = jacrev(plain, argnums=i)(x, t, p, w)
        assert back.shape == (3, 2, *args.shape)
        torch.testing.assert_close(back, reference, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(forward, reference, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("outer", [jacrev, jacfwd])
@pytest.mark.parametrize("argnum", [0, 1, 2, 3])
def test_second_derivatives_by_mixed_modes(outer, argnum, tiny):
    x, t, p, w = (v.detach() for v in tiny)
    f = evaluate("velocity")
    reference = jacrev(jacrev(plain, argnums=argnum), argnums=argnum)(x, t, p, w)
    inner = jacrev if outer is jacfwd else jacfwd
    value = outer(inner(f, argnums=argnum), argnums=argnum)(x, t, p, w)
    torch.testing.assert_close(value, reference, rtol=1e-8, atol=1e-8)
    twice = jacrev(jacrev(f, argnums=argnum), argnums=argnum)(x, t, p, w)
    torch.testing.assert_close(twice, reference, rtol=1e-8, atol=1e-8)


def test_mixed_second_derivatives_across_arguments(tiny):
    x, t, p, w = (v.detach() for v in tiny)
    f = evaluate("velocity")
    for i, j in ((0, 2), (2, 0), (1, 2), (0, 1), (3, 2), (2, 3)):
        reference = jacrev(jacrev(plain, argnums=i), argnums=j)(x, t, p, w)
        torch.testing.assert_close(jacfwd(jacrev(f, argnums=i), argnums=j)(x, t, p, w), reference, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(jacrev(jacfwd(f, argnums=i), argnums=j)(x, t, p, w), reference, rtol=1e-8, atol=1e-8)


def test_hessian_of_a_scalar(tiny):
    x, t, p, w = (v.detach() for v in tiny)
    ours = hessian(lambda q: NWField(Support(q, w))(x, t).square().sum())(p)
    theirs = hessian(lambda q: plain(x, t, q, w).square().sum())(p)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", [*VECTORS, *SCALARS, "weights"])
def test_vmap_over_queries_times_and_points(name, tiny):
    x, t, p, w = (v.detach() for v in tiny)
    field = NWField(Support(p, w))
    call = getattr(field, name)
    torch.testing.assert_close(vmap(lambda q: call(q, 0.4))(x), call(x, 0.4), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(vmap(call)(x, t), call(x, t), rtol=1e-11, atol=1e-11)
    over_t = vmap(lambda s: call(x[0], s))(t)
    torch.testing.assert_close(over_t, torch.stack([call(x[0], float(s)) for s in t]), rtol=1e-11, atol=1e-11)
    nested = vmap(vmap(call, in_dims=(None, 0)), in_dims=(0, None))(x, t)
    expected = torch.stack([torch.stack([call(q, float(s)) for s in t]) for q in x])
    torch.testing.assert_close(nested, expected, rtol=1e-11, atol=1e-11)
    sets = torch.stack([p, p + 1.0, p * 2.0])
    over_p = vmap(lambda q: getattr(NWField(q), name)(x, 0.4))(sets)
    expected = torch.stack([getattr(NWField(q), name)(x, 0.4) for q in sets])
    torch.testing.assert_close(over_p, expected, rtol=1e-10, atol=1e-10)
    by_pairs = vmap(lambda q, v: getattr(NWField(q), name)(v, 0.4))(sets, x)
    expected = torch.stack([getattr(NWField(q), name)(v, 0.4) for q, v in zip(sets, x)])
    torch.testing.assert_close(by_pairs, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("variant", ["diagonal", "full", "smoothed", "both"])
def test_vmap_with_metric_and_smoothing(variant, tiny):
    x, t, p, w = (v.detach() for v in tiny)
    metric, smoothing = VARIANTS[variant]
    for name in ("velocity", "divergence"):
        call = getattr(NWField(Support(p, w), CondOT(), metric, smoothing), name)
        torch.testing.assert_close(vmap(call)(x, t), call(x, t), rtol=1e-11, atol=1e-11)
        sets = torch.stack([p, p + 1.0, p * 2.0])
        over = vmap(lambda q, n=name: getattr(NWField(q, CondOT(), metric, smoothing), n)(x, 0.4))(sets)
        expected = torch.stack([getattr(NWField(q, CondOT(), metric, smoothing), name)(x, 0.4) for q in sets])
        torch.testing.assert_close(over, expected, rtol=1e-10, atol=1e-10)


def test_vmap_over_tasks_of_a_batched_support(randn):
    points, x = randn(2, 4, 3), randn(5, 2, 2, 3)
    field = NWField(Support.batch(points))
    expected = torch.stack([field(q, 0.4) for q in x])
    torch.testing.assert_close(vmap(lambda q: field(q, 0.4))(x), expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(
        vmap(lambda q, s: field(q, s))(x, torch.rand(5) * 0.5 + 0.2).shape, torch.empty(5, 2, 2, 3).shape
    )


def test_gradients_through_vmap_and_vmap_of_gradients(tiny):
    x, t, p, w = (v.detach() for v in tiny)
    ours = grad(lambda q: vmap(lambda v, s: NWField(Support(q, w))(v, s))(x, t).square().sum())(p)
    theirs = grad(lambda q: plain(x, t, q, w).square().sum())(p)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    per_sample = vmap(grad(lambda v, s: NWField(Support(p, w)).log_density(v, s)))(x, t)
    torch.testing.assert_close(per_sample, NWField(Support(p, w)).score(x, t), rtol=1e-9, atol=1e-9)
    jacobians = vmap(jacrev(lambda v, s: NWField(Support(p, w))(v, s)))(x, t)
    forward = vmap(jacfwd(lambda v, s: NWField(Support(p, w))(v, s)))(x, t)
    torch.testing.assert_close(forward, jacobians, rtol=1e-9, atol=1e-9)
    trace = jacobians.diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(trace, NWField(Support(p, w)).divergence(x, t), rtol=1e-9, atol=1e-9)
    per_set = vmap(grad(lambda q: NWField(q)(x, 0.4).square().sum()))(torch.stack([p, p + 1]))
    expected = [grad(lambda q: plain(x, torch.full((3,), 0.4, dtype=F64), q).square().sum())(q) for q in (p, p + 1)]
    torch.testing.assert_close(per_set, torch.stack(expected), rtol=1e-9, atol=1e-9)
    hessians = vmap(hessian(lambda v: NWField(Support(p, w)).log_density(v, 0.4)))(x)
    torch.testing.assert_close(
        hessians, vmap(jacrev(lambda v: NWField(Support(p, w)).score(v, 0.4)))(x), rtol=1e-9, atol=1e-9
    )


def test_transforms_leave_nothing_behind_in_a_field(tiny):
    """What a first call inside a transform caches must serve later calls of every kind."""
    x, t, p, w = (v.detach() for v in tiny)
    for transform in (vmap, jacrev, jacfwd, hessian):
        field = NWField(Support(p, w))
        transform(lambda q, f=field: f.log_density(q, 0.4))(x if transform is vmap else x[0])
        torch.testing.assert_close(field(x, t), plain(x, t, p, w), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(vmap(field)(x, t), plain(x, t, p, w), rtol=1e-9, atol=1e-9)
        jacrev(lambda q, f=field: f(q, 0.4))(x[0])
        copy.deepcopy(field)(x, t)


def test_vmap_over_weights(tiny):
    x, t, p, w = (v.detach() for v in tiny)
    many = torch.stack([w, w.flip(0), w**2])
    value = vmap(lambda v: NWField(Support(p, v))(x, t))(many)
    torch.testing.assert_close(value, torch.stack([plain(x, t, p, v) for v in many]), rtol=1e-9, atol=1e-9)


def test_vectorised_jacobians_of_autograd(tiny):
    x, t, p, w = (v.detach() for v in tiny)
    field = NWField(Support(p, w))
    for strategy in ("reverse-mode", "forward-mode"):
        jacobian = torch.autograd.functional.jacobian(lambda q: field(q, t), x, vectorize=True, strategy=strategy)
        torch.testing.assert_close(jacobian, jacrev(lambda q: plain(q, t, p, w))(x), rtol=1e-9, atol=1e-9)


def test_functional_call_with_points_as_a_parameter(tiny):
    x, t, p, w = (v.detach() for v in tiny)
    field = NWField(Support(nn.Parameter(p.clone()), w))
    other = p + 0.5
    torch.testing.assert_close(
        functional_call(field, {"points": other}, (x, t)), plain(x, t, other, w), rtol=1e-9, atol=1e-9
    )
    torch.testing.assert_close(field(x, t).detach(), plain(x, t, p, w), rtol=1e-9, atol=1e-9)
    g = grad(lambda q: functional_call(field, {"points": q}, (x, t)).square().sum())(other)
    torch.testing.assert_close(g, grad(lambda q: plain(x, t, q, w).square().sum())(other), rtol=1e-9, atol=1e-9)
    sets = torch.stack([p, other])
    ensemble = vmap(lambda q: functional_call(field, {"points": q}, (x, t)))(sets)
    torch.testing.assert_close(ensemble, torch.stack([plain(x, t, q, w) for q in sets]), rtol=1e-9, atol=1e-9)
    tangent = torch.ones_like(p)
    forward = jvp(lambda q: functional_call(field, {"points": q}, (x, t)), (other,), (tangent,))[1]
    reference = jvp(lambda q: plain(x, t, q, w), (other,), (tangent,))[1]
    torch.testing.assert_close(forward, reference, rtol=1e-9, atol=1e-9)


def test_jvp_and_vjp_are_transposed(tiny):
    x, t, p, w = (v.detach() for v in tiny)
    f = evaluate("velocity")
    tangents = tuple(torch.randn_like(v) for v in (x, t, p, w))
    _, forward = jvp(f, (x, t, p, w), tangents)
    _, pull = vjp(f, x, t, p, w)
    cotangent = torch.randn_like(forward)
    back = pull(cotangent)
    total = sum(float((g * v).sum()) for g, v in zip(back, tangents))
    assert float((cotangent * forward).sum()) == pytest.approx(total, rel=1e-10)


def test_nested_forward_mode_is_refused(tiny):
    x, t, p, w = (v.detach() for v in tiny)
    field = NWField(Support(p, w))
    for f, v in ((lambda q: field(q, 0.4), x[0]), (lambda s: field(x[0], s), t[0]), (lambda q: NWField(q)(x, 0.4), p)):
        with pytest.raises(RuntimeError, match="nested forward mode"):
            jacfwd(jacfwd(f))(v)
        with pytest.raises(RuntimeError, match="nested forward mode"):
            jvp(lambda q, f=f: jvp(f, (q,), (torch.ones_like(q),))[1], (v,), (torch.ones_like(v),))


def test_forward_mode_of_autograd_itself(tiny):
    x, _, p, w = (v.detach() for v in tiny)
    field = NWField(Support(p, w))
    with forward_ad.dual_level():
        out = field(forward_ad.make_dual(x, torch.ones_like(x)), 0.4)
        primal, tangent = forward_ad.unpack_dual(out)
    reference = jvp(lambda q: plain(q, torch.full((3,), 0.4, dtype=F64), p, w), (x,), (torch.ones_like(x),))
    torch.testing.assert_close(primal, reference[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(tangent, reference[1], rtol=1e-9, atol=1e-9)


# --- what must vanish, what must stay finite --------------------------------------------------------------------------


@pytest.mark.parametrize("tasks", [False, True])
@pytest.mark.parametrize("offset", [0.0, 50.0])
def test_gradients_of_absent_points_are_exactly_zero(offset, tasks, randn):
    points = (randn(6, 2) + offset).requires_grad_()
    weights = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.5, 0.0], dtype=F64, requires_grad=True)
    mask = torch.tensor([True, True, True, False, True, True])
    x = randn(3, 2) + offset / 2
    if tasks:
        x, field = x[None], NWField(Support.batch(points[None], weights=weights[None], mask=mask[None]))
    else:
        field = NWField(Support(points, weights, mask=mask))
    for name in ("velocity", "log_density", "divergence", "entropy"):
        value = getattr(field, name)(x, 0.5)
        g_points, g_weights = torch.autograd.grad(value.sin().sum(), (points, weights), retain_graph=True)
        assert torch.isfinite(g_points).all() and torch.isfinite(g_weights).all()
        assert (g_points[[1, 3, 5]] == 0).all() and (g_weights[[1, 3, 5]] == 0).all(), name
        assert (g_points[[0, 2, 4]] != 0).any()


def test_gradients_are_finite_on_a_reference_and_at_both_ends(randn):
    points = randn(5, 2).requires_grad_()
    x = (0.5 * points[0]).detach()[None].requires_grad_()
    for t in (0.0, 0.5, 1 - 1e-12):
        for name in ("denoise", "velocity", "log_density"):
            grads = torch.autograd.grad(getattr(NWField(points), name)(x, t).sum(), (x, points))
            assert all(torch.isfinite(g).all() for g in grads), (t, name)
    # at sigma = 0 the denoiser is constant around almost every x, and is the nearest point itself
    value = NWField(points).denoise(randn(2, 2).requires_grad_(), 1.0)
    assert torch.isfinite(value).all()


def test_the_gradient_in_time_is_finite_at_the_noise_end(randn):
    points, x = randn(5, 2), randn(3, 2)
    t = torch.zeros((), dtype=F64, requires_grad=True)
    (g,) = torch.autograd.grad(NWField(points).denoise(x, t).sum(), t)
    # dD/dt at 0: l = x.s t + ..., so dD/dt = Cov(s) x
    centred = points - points.mean(0)
    torch.testing.assert_close(g, (x @ (centred.T @ centred / 5)).sum(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("h", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_float32_gradients_agree_with_float64(h, offset, randn):
    """Centred covariances: no digits lost where weights concentrate or data lie far from 0."""
    points = (randn(200, 16) + offset).float()
    t = CondOT().time_at(h)
    x = (t * (points[:8] + points[8:16]) / 2 + (1 - t) * 0.3 * randn(8, 16)).float()
    grads = {}
    for dtype in (torch.float32, F64):
        q, p = x.to(dtype).requires_grad_(), points.to(dtype).requires_grad_()
        value = NWField(p).denoise(q, t)
        grads[dtype] = torch.autograd.grad((value * torch.linspace(-1, 1, 16, dtype=dtype)).sum(), (q, p))
    for low, high in zip(grads[torch.float32], grads[F64]):
        assert low.dtype == torch.float32
        torch.testing.assert_close(low.double(), high, rtol=1e-4, atol=1e-5 * float(high.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_have_the_dtype_of_what_they_are_of(dtype, randn):
    points, x = randn(5, 3).to(dtype).requires_grad_(), randn(4, 3).to(dtype).requires_grad_()
    t = torch.tensor(0.5, requires_grad=True)
    g_x, g_p, g_t = torch.autograd.grad(NWField(points)(x, t).sum(), (x, points, t))
    assert (g_x.dtype, g_p.dtype, g_t.dtype) == (dtype, dtype, torch.float32)
    q, p, s = (v.detach().double().requires_grad_() for v in (x, points, t))
    for low, high in zip((g_x, g_p, g_t), torch.autograd.grad(plain(q, s, p).sum(), (q, p, s))):
        tol = 8 * torch.finfo(low.dtype).eps
        torch.testing.assert_close(low.double(), high, rtol=tol, atol=4 * tol)


def test_values_are_the_same_with_and_without_gradients(randn):
    for m in (20, 2000):
        points, x = randn(m, 8, dtype=torch.float32), randn(50, 8, dtype=torch.float32)
        field = NWField(points)
        for name in (*VECTORS, *SCALARS):
            value = getattr(field, name)(x, 0.9)
            tracked = getattr(field, name)(x.clone().requires_grad_(), 0.9).detach()
            torch.testing.assert_close(tracked, value, rtol=2e-5, atol=2e-5 * float(value.abs().max()))


def test_no_error_bound_is_claimed_while_derivatives_are_recorded(randn):
    field = NWField(randn(5, 3))
    assert field.posterior(randn(2, 3), 0.5).error_bound is not None
    assert field.posterior(randn(2, 3).requires_grad_(), 0.5).error_bound is None


def test_no_gradient_is_recorded_without_need(randn):
    field = NWField(randn(5, 3))
    assert not field(randn(2, 3), 0.5).requires_grad
    with torch.no_grad():
        assert not NWField(randn(5, 3).requires_grad_())(randn(2, 3), 0.5).requires_grad
    with torch.inference_mode():
        field(randn(2, 3), 0.5)
    field(randn(2, 3), 0.5)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["backward", "second", "forward"])
def test_derivatives_hold_one_block_of_pairs(order, randn, monkeypatch):
    """n m = 640,000 pairs; with blocks of 4096 pairs nothing near that is ever made."""
    monkeypatch.setattr(autograd, "PAIRS", 4096)
    monkeypatch.setattr(autograd, "ROWS", 4096)
    points, x = randn(8000, 2, dtype=torch.float32), randn(80, 2, dtype=torch.float32)
    field = NWField(points.requires_grad_(order != "forward"))
    with Watch() as seen:
        if order == "forward":
            jvp(lambda q: field(q, 0.5), (x,), (torch.ones_like(x),))
        else:
            q = x.requires_grad_()
            (g,) = torch.autograd.grad(field(q, 0.5).square().sum(), q, create_graph=order == "second")
            if order == "second":
                g.square().sum().backward()
            else:
                field(q, 0.5).square().sum().backward()
    assert seen.numel <= max(80 * 1024, 8000 * 4), seen.numel  # a forward block, or the lifted keys


# --- compilation ------------------------------------------------------------------------------------------------------


def test_compiled_fields_give_the_eager_numbers(randn):
    field = NWField(randn(6, 3, dtype=torch.float32), CondOT(0.01))
    x = randn(4, 3, dtype=torch.float32)
    compiled = torch.compile(field, backend="aot_eager")
    for t in (0.5, torch.tensor([0.1, 0.2, 0.3, 0.4])):
        torch.testing.assert_close(compiled(x, t), field(x, t), rtol=1e-6, atol=1e-6)
    q, p = x.clone().requires_grad_(), x.clone().requires_grad_()
    (g,) = torch.autograd.grad(compiled(q, 0.5).sum(), q)
    (e,) = torch.autograd.grad(field(p, 0.5).sum(), p)
    torch.testing.assert_close(g, e, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_functions_around_a_field_give_the_eager_numbers(backend, randn):
    field = NWField(randn(6, 3, dtype=torch.float32), CondOT(0.01))
    x = randn(4, 3, dtype=torch.float32)
    step = torch.compile(lambda q, t: q + 0.1 * field(q, t).tanh(), backend=backend)
    torch.testing.assert_close(step(x, 0.5), x + 0.1 * field(x, 0.5).tanh(), rtol=1e-6, atol=1e-6)
    q, p = x.clone().requires_grad_(), x.clone().requires_grad_()
    (g,) = torch.autograd.grad(step(q, 0.5).sum(), q)
    (e,) = torch.autograd.grad((p + 0.1 * field(p, 0.5).tanh()).sum(), p)
    torch.testing.assert_close(g, e, rtol=1e-6, atol=1e-6)
    for name in ("denoise", "log_density", "divergence"):
        call = torch.compile(getattr(field, name), backend=backend)
        torch.testing.assert_close(call(x, 0.5), getattr(field, name)(x, 0.5), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("t", [0.3, 0.9, 0.999])
def test_derivatives_where_the_engine_routes_by_query(t, randn, monkeypatch):
    monkeypatch.setattr(rescore, "SMALL", 0)
    points, x = randn(600, 4, dtype=torch.float32), randn(10, 4, dtype=torch.float32)
    jacobian = vmap(jacrev(lambda q: NWField(points).denoise(q, t)))(x)
    wide = vmap(jacrev(lambda q: NWField(points.double()).denoise(q, t)))(x.double())
    torch.testing.assert_close(jacobian.double(), wide, rtol=1e-3, atol=1e-4 * float(wide.abs().max()))
