"""SubspaceField: float64 loops, one head = NWField, products of densities, equivariances, and fewer copies."""

import copy
import math
import pickle

import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

import nwflow.subspace.windows as engine
from nwflow import (
    CondOT,
    NWField,
    Smoothing,
    SubspaceField,
    Support,
    VariancePreserving,
    load_support,
    log_prob,
    sample,
)
from nwflow.metrics import memorisation
from oracle import Watch
from oracle import field as oracle

F64 = torch.float64
PATHS = [CondOT(), CondOT(0.02), VariancePreserving()]
GROUPS = [[3, 0], [1], [5, 2, 4]]
VECTORS = ("velocity", "denoise", "noise", "score")
SCALARS = ("log_density", "divergence", "entropy", "covariance_trace")
close = torch.testing.assert_close


def orthonormal(randn, d):
    return torch.linalg.qr(randn(d, d))[0]


def patch_field(x, t, points, path, size, boundary, prior=None, h0=0.0, stride=1):
    """D, velocity, noise, score ``(n, C, H, W)`` and weights ``(n, H', W', m)`` of images, by loops."""
    at = path(t)
    alpha, sigma, d_alpha, d_sigma = (float(v) for v in (at.alpha, at.sigma, at.d_alpha, at.d_sigma))
    (n, _, height, width), m = x.shape, len(points)
    log_prior = torch.zeros(m, dtype=F64) if prior is None else (prior / prior.sum()).log()
    margin, v = (size - stride) // 2, sigma**2 + alpha**2 * h0**2
    mean, weights = torch.zeros_like(x), torch.zeros(n, height // stride, width // stride, m, dtype=F64)
    for a in range(0, height, stride):
        for b in range(0, width, stride):
            rows, columns = range(a - margin, a + stride + margin), range(b - margin, b + stride + margin)
            if boundary == "wrap":
                rows, columns = {r % height for r in rows}, {c % width for c in columns}
            seen = [(r, c) for r in rows for c in columns if 0 <= r < height and 0 <= c < width]
            r, c = (torch.tensor(v) for v in zip(*seen))
            square = (x[:, None, :, r, c] - alpha * points[None, :, :, r, c]).square().sum((-1, -2))
            w = torch.softmax(log_prior - square / (2 * v), -1)
            weights[:, a // stride, b // stride] = w
            cell = (..., slice(a, a + stride), slice(b, b + stride))
            mean[cell] = torch.einsum("nm,mcij->ncij", w, points[cell])
    e = x - alpha * mean
    denoised, eps = mean + alpha * h0**2 / v * e, sigma / v * e
    return {
        "denoise": denoised,
        "noise": eps,
        "score": -e / v,
        "velocity": d_alpha * denoised + d_sigma * eps,
        "weights": weights,
    }


# --- blocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS, ids=repr)
@pytest.mark.parametrize("smoothing", [None, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_one_group_of_all_columns_is_the_plain_field(path, smoothing, dtype, randn):
    support = Support(randn(9, 2, 3, dtype=dtype) + 3, weights=torch.arange(9.0))
    field = SubspaceField.columns(support, path, groups=[range(6)], smoothing=smoothing)
    plain, x = NWField(support, path, smoothing=smoothing), randn(5, 2, 3, dtype=dtype)
    for name in (*VECTORS, *SCALARS, "prior"):
        assert torch.equal(getattr(field, name)(x, 0.6), getattr(plain, name)(x, 0.6)), name
    assert torch.equal(field.n_eff(x, 0.6)[:, 0], plain.n_eff(x, 0.6))
    assert torch.equal(field.weights(x, 0.6)[:, 0], plain.weights(x, 0.6))
    assert field.length_scales() == pytest.approx(plain.length_scales(), rel=1e-12)
    mine, theirs = field.attribute(x, 0.6, 3), plain.attribute(x, 0.6, 3)
    assert torch.equal(mine.indices, theirs.indices)
    close(mine.weights, theirs.weights, rtol=1e-6, atol=1e-7)  # a sum of float32 weights here, of float64 ones there
    whole_way = sample(plain, 4, steps=12, certificate=False)  # groups certify nothing
    assert torch.equal(sample(field, 4, steps=12).points, whole_way.points)


@pytest.mark.parametrize("path", PATHS, ids=repr)
def test_groups_are_the_product_of_their_oracles(path, randn):
    points, x, prior = randn(8, 6) + 1, randn(4, 6), torch.rand(8, dtype=F64) + 0.1
    t = torch.tensor([0.1, 0.4, 0.7, 0.9], dtype=F64)
    field = SubspaceField.columns(Support(points, prior), path, groups=GROUPS)
    own = [oracle(x[:, g], t, points[:, g], path, prior) for g in GROUPS]
    order = torch.tensor([c for g in GROUPS for c in g])
    for name in VECTORS:
        expected = torch.empty_like(x)
        expected[:, order] = torch.cat([getattr(o, {"denoise": "denoiser"}.get(name, name)) for o in own], -1)
        close(getattr(field, name)(x, t), expected, rtol=1e-9, atol=1e-9)
    for name in SCALARS:
        close(getattr(field, name)(x, t), sum(getattr(o, name) for o in own), rtol=1e-9, atol=1e-8)
    close(field.n_eff(x, t), torch.stack([o.n_eff for o in own], -1), rtol=1e-9, atol=0)
    shares = sum(len(g) / 6 * o.weights for g, o in zip(GROUPS, own))
    named = field.attribute(x, t, 8)
    close(named.weights, shares.sort(-1, descending=True).values, rtol=1e-9, atol=1e-12)
    close(shares.gather(-1, named.indices), named.weights, rtol=1e-9, atol=1e-12)
    close(named.captured, torch.ones(4, dtype=F64))


def test_density_is_that_of_every_recombination(randn):
    """Two groups of m references are m^2 references of all pairs of parts."""
    points, x, prior = randn(5, 3), randn(6, 3), torch.rand(5, dtype=F64) + 0.1
    field = SubspaceField.columns(Support(points, prior), groups=[[0, 2], [1]])
    pairs = points[:, None].repeat(1, 5, 1)
    pairs[..., 1] = points[None, :, 1]
    weights = (prior[:, None] * prior).reshape(-1)
    at = CondOT()(0.7)
    normals = MultivariateNormal(at.alpha * pairs.reshape(-1, 3), at.sigma**2 * torch.eye(3, dtype=F64))
    close(
        field.log_density(x, 0.7), MixtureSameFamily(Categorical(weights), normals).log_prob(x), rtol=1e-10, atol=1e-10
    )
    joint = NWField(Support(pairs.reshape(-1, 3), weights))
    for name in (*VECTORS, *SCALARS):
        close(getattr(field, name)(x, 0.7), getattr(joint, name)(x, 0.7), rtol=1e-8, atol=1e-8)
    close(field.n_eff(x, 0.7).prod(-1), joint.n_eff(x, 0.7), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("smoothing", [None, [0.2, None, 0.4]])
def test_score_is_the_gradient_and_divergence_the_trace(smoothing, randn):
    support, x = Support(randn(7, 6)), randn(3, 6)
    field = SubspaceField.pca(support, CondOT(0.05), blocks=3, smoothing=smoothing)
    gradient = torch.func.grad(lambda x: field.log_density(x, 0.6).sum())(x)
    close(field.score(x, 0.6), gradient, rtol=1e-9, atol=1e-9)
    jacobian = torch.stack([torch.func.jacrev(lambda x: field(x, 0.6))(xi) for xi in x])
    close(field.divergence(x, 0.6), jacobian.diagonal(dim1=-2, dim2=-1).sum(-1), rtol=1e-9, atol=1e-9)
    together = field.posterior(x, 0.6, ("velocity", "divergence", "n_eff"))
    close(together.velocity, field(x, 0.6))
    assert together.error_bound is not None and bool((together.error_bound < 3e-5).all())


def test_density_by_the_flow_is_the_closed_form(randn):
    field = SubspaceField.columns(Support(randn(6, 3)), CondOT(0.1), groups=[[0], [1, 2]])
    x = randn(4, 3)
    close(log_prob(field, x, steps=800), field.log_density(x, 1.0), rtol=1e-3, atol=1e-3)


def test_columns_apart_are_one_dimensional_smoothers(randn):
    points, x = randn(10, 4), randn(3, 4)
    field = SubspaceField.columns(points, groups=[[c] for c in range(4)])
    own = [NWField(points[:, c : c + 1]).denoise(x[:, c : c + 1], 0.8) for c in range(4)]
    close(field.denoise(x, 0.8), torch.cat(own, -1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", [{"block": 2}, {"block": 4}, {"blocks": 3}, {"blocks": 6}, {"block": 6}])
def test_principal_blocks_turn_with_the_data(how, randn):
    """PCA of rotated and shifted data gives the rotated and shifted field."""
    points = randn(12, 6) * torch.tensor([4.0, 3.0, 2.0, 1.0, 0.5, 0.2], dtype=F64)
    x, turn, shift = randn(5, 6), orthonormal(randn, 6), randn(6)
    field, t = SubspaceField.pca(points, **how), 0.7
    turned = SubspaceField.pca(points @ turn.T + shift, **how)
    close(turned.denoise(x @ turn.T + t * shift, t), field.denoise(x, t) @ turn.T + shift, rtol=1e-8, atol=1e-8)
    close(turned.log_density(x @ turn.T + t * shift, t), field.log_density(x, t), rtol=1e-8, atol=1e-8)
    close(turned.n_eff(x @ turn.T + t * shift, t), field.n_eff(x, t), rtol=1e-8, atol=1e-8)
    if how == {"block": 6}:
        close(field.denoise(x, t), NWField(points).denoise(x, t), rtol=1e-9, atol=1e-9)


def test_blocks_of_a_basis_are_those_of_its_columns(randn):
    points, x, basis = randn(9, 6), randn(4, 6), orthonormal(randn, 6)
    field = type(SubspaceField.columns(points, groups=GROUPS))(points, groups=GROUPS, basis=basis)
    plain = SubspaceField.columns(points @ basis, groups=GROUPS)
    close(field(x, 0.5), plain(x @ basis, 0.5) @ basis.T, rtol=1e-10, atol=1e-10)
    close(field.prior(x, 0.2), plain.prior(x @ basis, 0.2) @ basis.T, rtol=1e-10, atol=1e-10)
    close(field.join(field.split(x), x), x, rtol=1e-12, atol=1e-12)


def test_more_directions_than_points_all_belong_to_a_block(randn):
    points, x = randn(4, 9), randn(3, 9)
    field = SubspaceField.pca(points, block=2)
    assert [len(g) for g in field.groups] == [2, 2, 2, 2, 1]
    close(field.denoise(x, 0.0), points.mean(0).expand(3, 9), rtol=1e-12, atol=1e-12)
    close(field.log_density(x, 0.0), MultivariateNormal(torch.zeros(9, dtype=F64), torch.eye(9, dtype=F64)).log_prob(x))


def test_float32_queries_far_from_the_origin_keep_their_weights(randn):
    points = (randn(30, 8) + 300).float()
    field, t = SubspaceField.pca(points, block=4), 0.99
    exact = SubspaceField.pca(points.double(), block=4)
    x = (t * points[:5] + 0.01 * randn(5, 8).float()).float()
    variation = 0.5 * (field.weights(x, t).double() - exact.weights(x.double(), t)).abs().sum(-1)
    assert float(variation.max()) < 1e-5
    assert field.denoise(x, t).dtype == torch.float32


def test_tasks_equal_their_sets_one_by_one(randn):
    sets = [randn(5, 6), randn(3, 6)]
    tasks, x = Support.batch(sets), randn(2, 4, 6)
    field = SubspaceField.columns(tasks, groups=GROUPS)
    t = torch.tensor([[0.3], [0.8]], dtype=F64)
    drawn = sample(field, 3, steps=10)
    for i, own in enumerate(sets):
        alone = SubspaceField.columns(own, groups=GROUPS)
        close(field(x, t)[i], alone(x[i], t[i, 0]), rtol=1e-10, atol=1e-10)
        close(field.log_density(x, t)[i], alone.log_density(x[i], t[i, 0]), rtol=1e-10, atol=1e-10)
        assert torch.equal(field.attribute(x, t, 2).indices[i], alone.attribute(x[i], t[i, 0], 2).indices)
    assert drawn.points.shape == (2, 3, 6) and drawn.n_eff.shape == (2, 3, 3)
    assert bool((field.attribute(x, t, 5).indices[1, :, 3:] == -1).all())  # padding


def test_points_without_weight_do_not_count(randn):
    points, x = randn(6, 4), randn(3, 4)
    weights = torch.tensor([1.0, 0, 2, 0, 1, 1])
    keep = weights > 0
    for make in (lambda s: SubspaceField.columns(s, groups=[[0, 1], [2, 3]]), lambda s: SubspaceField.pca(s, block=2)):
        field, less = make(Support(points, weights)), make(Support(points[keep], weights[keep]))
        close(field(x, 0.6), less(x, 0.6), rtol=1e-10, atol=1e-10)
        named = field.attribute(x, 0.6, 6)
        assert set(named.indices.unique().tolist()) == {-1, 0, 2, 4, 5}


def test_smoothing_of_each_head(randn):
    points, x = randn(6, 6), randn(3, 6)
    field = SubspaceField.columns(points, CondOT(), groups=GROUPS, smoothing=[0.1, Smoothing.isotropic(0.5), None])
    variances = torch.tensor([0.01, 0.25, 0, 0.01, 0, 0], dtype=F64)
    close(field.smoothing.variances, variances)
    own = [oracle(x[:, g], 0.7, points[:, g], CondOT(), None, None, torch.diag(variances[g])) for g in GROUPS]
    close(field.log_density(x, 0.7), sum(o.log_density for o in own), rtol=1e-9, atol=1e-9)
    basis = orthonormal(randn, 6)
    turned = type(field)(points, groups=GROUPS, basis=basis, smoothing=[0.1, 0.5, None])
    close(turned.smoothing.matrix(6), basis[:, field.order] * variances[field.order] @ basis[:, field.order].T)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[0, 1], [3]], r"missing 2"),
        ([[0, 1], [1, 2, 3]], r"repeated 1"),
        ([[0], [0, 1, 1]], r"missing 2, 3 and repeated 0, 1"),
        ([[0, 1, 2, 3, 4]], r"from 0 to 3, got 4"),
        ([[0, 1, 2, 3], []], r"none in group 1"),
    ],
)
def test_groups_that_are_no_partition_are_named(groups, message, randn):
    with pytest.raises(ValueError, match=message):
        SubspaceField.columns(randn(3, 4), groups=groups)


def test_what_blocks_refuse(randn):
    points = randn(5, 4)
    with pytest.raises(ValueError, match="exactly one"):
        SubspaceField.pca(points)
    with pytest.raises(ValueError, match="block: expected an integer from 1 to d = 4, got 5"):
        SubspaceField.pca(points, block=5)
    with pytest.raises(ValueError, match="isotropic"):
        SubspaceField.columns(points, groups=[range(4)], smoothing=Smoothing.full(torch.eye(4)))
    with pytest.raises(ValueError, match="one for each of 1 heads, got 2"):
        SubspaceField.columns(points, groups=[range(4)], smoothing=[0.1, 0.2])
    with pytest.raises(ValueError, match="points: expected a fixed support"):
        SubspaceField.columns(points.requires_grad_(), groups=[range(4)])
    with pytest.raises(TypeError, match="groups"):
        SubspaceField.columns(points.detach(), groups=4)
    field = SubspaceField.columns(points.detach(), groups=[range(4)])
    with pytest.raises(ValueError, match=r"event \(4,\)"):
        field(randn(3, 5), 0.5)
    with pytest.raises(TypeError, match="floating"):
        field(torch.zeros(3, 4, dtype=torch.long), 0.5)
    with pytest.raises(ValueError, match="sigma = 0"):
        field(randn(3, 4), 1.0)
    with pytest.raises(ValueError, match="orthonormal"):
        type(field)(points.detach(), groups=[range(4)], basis=2 * torch.eye(4))


# --- patches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS, ids=repr)
@pytest.mark.parametrize("boundary", ["wrap", "zero"])
@pytest.mark.parametrize(("size", "stride"), [(1, 1), (3, 1), (7, 1), (2, 2), (4, 2)])
def test_patches_are_their_loops(path, boundary, size, stride, randn):
    points, x, prior = randn(7, 2, 4, 6) + 1, randn(3, 2, 4, 6), torch.rand(7, dtype=F64) + 0.1
    for t, h0 in ((0.1, 0.0), (0.6, 0.0), (0.9, 0.2)):
        field = SubspaceField.patches(
            Support(points, prior), path, size=size, boundary=boundary, stride=stride, smoothing=h0 or None
        )
        expected = patch_field(x, t, points, path, size, boundary, prior, h0, stride)
        for name in (*VECTORS, "weights"):
            close(getattr(field, name)(x, t), expected[name], rtol=1e-9, atol=1e-9, msg=lambda s, n=name: f"{n}: {s}")
        close(field.n_eff(x, t), 1 / expected["weights"].square().sum(-1), rtol=1e-9, atol=0)
        shares = expected["weights"].mean((1, 2))
        named = field.attribute(x, t, 7)
        close(named.weights, shares.sort(-1, descending=True).values, rtol=1e-9, atol=1e-12)
        close(shares.gather(-1, named.indices), named.weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("boundary", "size"), [("wrap", 5), ("wrap", 9), ("zero", 9)])
@pytest.mark.parametrize("t", [0.0, 0.5, 0.97])
def test_a_patch_of_the_whole_image_is_the_plain_field(boundary, size, t, randn):
    support, x = Support(randn(9, 5, 4)), randn(4, 5, 4)
    field, plain = SubspaceField.patches(support, CondOT(), size=size, boundary=boundary), NWField(support, CondOT())
    for name in VECTORS:
        close(getattr(field, name)(x, t), getattr(plain, name)(x, t), rtol=1e-9, atol=1e-9)
    close(field.n_eff(x, t), plain.n_eff(x, t)[:, None, None].expand(4, 5, 4), rtol=1e-9, atol=1e-9)
    close(field.prior(x, t), plain.prior(x, t), rtol=1e-12, atol=1e-12)


def test_patches_of_one_pixel_are_one_dimensional_smoothers(randn):
    points, x = randn(9, 3, 4), randn(4, 3, 4)
    heads = SubspaceField.columns(points, groups=[[c] for c in range(12)])
    close(SubspaceField.patches(points, size=1)(x, 0.8), heads(x, 0.8), rtol=1e-9, atol=1e-9)


def test_disjoint_patches_are_blocks_of_columns(randn):
    points, x = randn(9, 4, 6), randn(4, 4, 6)
    tile = torch.arange(24).reshape(2, 2, 3, 2).transpose(1, 2).reshape(6, 4)
    blocks = SubspaceField.columns(points, groups=tile.tolist())
    tiles = SubspaceField.patches(points, size=2, stride=2)
    close(tiles(x, 0.8), blocks(x, 0.8), rtol=1e-9, atol=1e-9)
    close(tiles.n_eff(x, 0.8).flatten(1), blocks.n_eff(x, 0.8), rtol=1e-9, atol=1e-9)


def test_wrapped_patches_commute_with_shifts(randn):
    points, x = randn(8, 5, 6), randn(3, 5, 6)
    field = SubspaceField.patches(points, size=3)
    moved = SubspaceField.patches(points.roll((2, 3), (1, 2)), size=3)
    close(moved(x.roll((2, 3), (1, 2)), 0.7), field(x, 0.7).roll((2, 3), (1, 2)), rtol=1e-10, atol=1e-10)


def test_order_of_references_and_a_common_shift_do_not_matter(randn):
    points, x, t = randn(8, 5, 6), randn(3, 5, 6), 0.7
    field = SubspaceField.patches(points, size=3)
    close(SubspaceField.patches(points.flip(0), size=3)(x, t), field(x, t), rtol=1e-10, atol=1e-10)
    moved = SubspaceField.patches(points + 1024.0, size=3)
    close(moved.denoise(x + t * 1024.0, t), field.denoise(x, t) + 1024.0, rtol=1e-9, atol=1e-9)


def test_block_sizes_do_not_matter(randn, monkeypatch):
    support, x = Support(randn(23, 2, 4, 5), weights=torch.rand(23)), randn(9, 2, 4, 5)
    field, t = SubspaceField.patches(support, size=3), torch.linspace(0.1, 0.9, 9, dtype=F64)
    whole = field(x, t), field.n_eff(x, t), field.weights(x, t), field.attribute(x, t, 4).weights
    alone = torch.cat([field(x[i : i + 1], t[i]) for i in range(9)])
    for name, value in {"KEY_BLOCK": 4, "QUERY_BLOCK": 2, "LOGITS": 40, "ROWS": 300, "POINTS": 500}.items():
        monkeypatch.setattr(engine, name, value)
    monkeypatch.setattr("nwflow.subspace.patches.CHUNK", 50)
    parts = field(x, t), field.n_eff(x, t), field.weights(x, t), field.attribute(x, t, 4).weights
    for a, b in zip((*parts, alone), (*whole, whole[0])):
        close(a, b, rtol=1e-10, atol=1e-11)


def test_weights_of_float32_images_at_small_bandwidths(randn):
    """Inputs as given: the loops in float64 on the same float32 numbers, at h from 1 to 1e-3 data scales."""
    points = (randn(20, 1, 5, 5) + 5).float()
    field = SubspaceField.patches(points, size=3)
    for h in (1.0, 1e-1, 1e-2, 1e-3):
        t = CondOT().time_at(h)
        x = (t * points[:6].double() + (1 - t) * randn(6, 1, 5, 5)).float()
        expected = patch_field(x.double(), t, points.double(), CondOT(), 3, "wrap")["weights"]
        found = field.weights(x.double(), t)
        assert 0.5 * float((found - expected).abs().sum(-1).max()) < 1e-8
        close(field.weights(x, t).double(), expected, rtol=0, atol=1e-7)  # float32 output


def test_derivatives_of_patches_are_those_of_the_loops(randn):
    points, x = randn(7, 1, 4, 4), randn(3, 1, 4, 4).requires_grad_()
    t = torch.tensor([0.2, 0.5, 0.8], dtype=F64, requires_grad=True)
    field = SubspaceField.patches(points, size=3, smoothing=0.1)
    assert torch.autograd.gradcheck(lambda x, t: field(x, t), (x, t))
    one = torch.tensor(0.6, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, t: field.denoise(x, t), (x, one))


def test_patches_are_no_gradient_and_have_no_density(randn):
    points, x = randn(6, 4, 4), randn(1, 4, 4)
    field = SubspaceField.patches(points, size=3)
    jacobian = torch.autograd.functional.jacobian(lambda x: field.score(x, 0.8), x).reshape(16, 16)
    assert float((jacobian - jacobian.T).abs().max()) > 1e-2 * float(jacobian.abs().max())
    for name in ("log_density", "divergence", "velocity_and_divergence"):
        with pytest.raises(TypeError, match="no density"):
            getattr(field, name)(x, 0.5)


def test_masked_images_and_original_rows(randn):
    points, x = randn(6, 4, 4), randn(3, 4, 4)
    mask = torch.tensor([True, False, True, True, False, True])
    field, less = SubspaceField.patches(Support(points, mask=mask), size=3), SubspaceField.patches(points[mask], size=3)
    close(field(x, 0.7), less(x, 0.7), rtol=1e-12, atol=1e-12)
    weights = field.weights(x, 0.7)
    assert bool((weights[..., ~mask] == 0).all())
    close(weights[..., mask], less.weights(x, 0.7))
    slots = mask.nonzero().squeeze(-1)
    assert torch.equal(field.attribute(x, 0.7, 4).indices, slots[less.attribute(x, 0.7, 4).indices])


def test_smoothed_patches_exist_at_the_end(randn):
    points, x = randn(6, 1, 4, 4), randn(2, 1, 4, 4)
    field = SubspaceField.patches(points, CondOT(), size=3, smoothing=0.3)
    expected = patch_field(x, 1.0, points, CondOT(), 3, "wrap", h0=0.3)
    for name in VECTORS:
        close(getattr(field, name)(x, 1.0), expected[name], rtol=1e-9, atol=1e-9)


def test_memory_of_patches_is_bounded():
    support = Support(torch.rand(3000, 10, 10))
    field, x = SubspaceField.patches(support, size=3), torch.rand(64, 10, 10)
    with Watch() as watch, torch.no_grad():
        field.denoise(x, 0.5)
    assert watch.bytes <= 2**24  # 64 queries, 100 heads and 3000 references are 154 MB of logits


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size: expected an integer"),
        ({"size": 2}, "size: expected stride"),
        ({"size": 3, "stride": 3}, "stride: expected one that divides"),
        ({"size": 3, "boundary": "mirror"}, "boundary"),
    ],
)
def test_what_patches_refuse(arguments, message):
    with pytest.raises(ValueError, match=message):
        SubspaceField.patches(torch.rand(3, 4, 4), **arguments)


def test_patches_refuse_tasks_vectors_and_the_end():
    with pytest.raises(ValueError, match="tasks"):
        SubspaceField.patches(Support.batch([torch.rand(3, 4, 4)]))
    with pytest.raises(ValueError, match="images"):
        SubspaceField.patches(torch.rand(3, 16))
    field = SubspaceField.patches(torch.rand(3, 4, 4))
    with pytest.raises(ValueError, match="sigma = 0"):
        field.denoise(torch.rand(2, 4, 4), 1.0)
    with pytest.raises(ValueError, match="t: expected"):
        field.denoise(torch.rand(2, 4, 4), torch.tensor([0.1, 0.2, 0.3]))


# --- both -------------------------------------------------------------------------------------------------------------


def make(kind, support):
    if kind == "patches":
        return SubspaceField.patches(support, CondOT(), size=3)
    return SubspaceField.pca(support, CondOT(), block=5)


@pytest.mark.parametrize("kind", ["patches", "pca"])
def test_copies_files_labels_and_dtypes(kind, randn):
    points, x = randn(8, 4, 4), randn(3, 4, 4)
    field = make(kind, Support(points, labels=[0, 1] * 4))
    for other in (copy.deepcopy(field), pickle.loads(pickle.dumps(field))):
        assert torch.equal(other(x, 0.5), field(x, 0.5))
    blank = make(kind, Support(torch.rand(8, 4, 4, dtype=F64), labels=[1, 0] * 4))
    blank.load_state_dict(field.state_dict())
    close(blank(x, 0.5), field(x, 0.5))
    part = field.given(labels=[1])
    if kind == "patches":
        close(part(x, 0.5), make(kind, Support(points[1::2]))(x, 0.5))
    assert set(part.attribute(x, 0.9, 4).indices.unique().tolist()) == {1, 3, 5, 7}
    single = copy.deepcopy(field).to(torch.float32)
    assert single.support.dtype == torch.float32
    close(single(x.float(), 0.5).double(), field(x, 0.5), rtol=1e-5, atol=1e-5)
    assert field(x.half(), 0.5).dtype == torch.float16 and field.n_eff(x.half(), 0.5).dtype == torch.float32


@pytest.mark.parametrize("kind", ["patches", "pca"])
def test_shape_of_the_batch_does_not_matter(kind, randn):
    field, x, t = make(kind, randn(8, 4, 4)), randn(2, 3, 4, 4), torch.rand(2, 1, dtype=F64)
    flat, times = x.reshape(6, 4, 4), t.expand(2, 3).reshape(6)
    close(field(x, t).reshape(6, 4, 4), field(flat, times))
    assert torch.equal(field.attribute(x, t, 2).indices.reshape(6, 2), field.attribute(flat, times, 2).indices)
    close(field(x[0, 0], 0.4), field(x, 0.4)[0, 0])
    assert field(x[:, :0], 0.4).shape == (2, 0, 4, 4)


def shares(support, **fields):
    """Share of copies among samples of each field, and of samples that a reference made almost alone."""
    found = {}
    for name, field in fields.items():
        drawn = sample(field, 12, steps=20, seed=1)
        assert drawn.points.isfinite().all()
        found[name] = memorisation(drawn.points, support.points).share, float(drawn.attribution.captured.mean())
    return found


def test_patches_of_digits_are_no_copies():
    support = load_support("digits", limit=200)
    path = CondOT()
    found = shares(
        support,
        plain=NWField(support, path),
        patches=SubspaceField.patches(support, path, size=3),
        blocks=SubspaceField.pca(support, path, block=8),
    )
    assert found["plain"][0] > 0.9 and found["plain"][1] > 0.99
    assert found["patches"][0] < 0.2 and found["patches"][1] < 0.8
    assert found["blocks"][0] < 0.2 and found["blocks"][1] < 0.8


def test_patches_of_clothes_are_no_copies():
    try:
        support = load_support("fashion-mnist", limit=60)
    except FileNotFoundError:
        pytest.skip("Fashion-MNIST is not installed")
    path = CondOT()
    found = shares(support, plain=NWField(support, path), patches=SubspaceField.patches(support, path, size=5))
    assert found["plain"][0] > 0.9
    assert found["patches"][0] < 0.2


def test_length_scales_of_patches(randn):
    """Of a whole-image patch those of the plain field; of patches of noise, shorter by the share of pixels seen."""
    points = randn(60, 6, 6)
    whole, plain = SubspaceField.patches(points, size=11, boundary="zero"), NWField(points)
    assert whole.length_scales(probes=60) == pytest.approx(plain.length_scales(), rel=1e-6)
    data, near = SubspaceField.patches(points, size=3).length_scales()
    assert data == pytest.approx(math.sqrt(9 / 36), rel=0.3) and near < data
