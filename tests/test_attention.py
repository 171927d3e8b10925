"""Attention as kernel smoothing against the field, against softmax written out, and against nn.MultiheadAttention."""

import io
import math

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nwflow import (
    CondOT,
    Cosine,
    DiagonalMetric,
    FullMetric,
    NWField,
    Smoothing,
    Support,
    VarianceExploding,
    VariancePreserving,
)
from nwflow.attention import (
    GaussianAttention,
    NWHead,
    effective_bandwidth,
    leave_one_out,
    lift_keys,
    lift_queries,
    lifted_attention,
    nw_weights,
)
from nwflow.attention import head as head_module
from nwflow.attention import influence as influence_module
from nwflow.field import MOMENTS

F64 = torch.float64
PATHS = [CondOT(), CondOT(0.01), VariancePreserving(), Cosine(), VarianceExploding()]


def float64(*values):
    return torch.tensor(values, dtype=F64)


def lengths_mask(sizes, m):
    return torch.arange(m)[None] < torch.tensor(sizes)[:, None]


def exact_weights(x, s, alpha, sigma, log_prior=0.0):
    """Softmax over differences, float64, every pair written out."""
    square = (x[..., :, None, :] - alpha * s[..., None, :, :]).square().sum(-1)
    return torch.softmax(log_prior - square / (2 * sigma**2), -1)


@pytest.fixture
def tasks(randn):
    """x (3, 5, 4), points (3, 7, 4), mask of sizes 7, 2, 4, weights, and a time per query."""
    x, s = randn(3, 5, 4), 2.0 + randn(3, 7, 4)
    return x, s, lengths_mask([7, 2, 4], 7), randn(3, 7).exp(), 0.05 + 0.9 * torch.rand(3, 5, dtype=F64)


# --- the exact head -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS, ids=repr)
def test_head_equals_the_field_in_every_moment(tasks, path):
    x, s, mask, weights, t = tasks
    names = tuple(MOMENTS)
    head = NWHead(path).posterior(x, s, t, names, mask, weights)
    field = NWField(Support.batch(s, weights=weights, mask=mask), path).posterior(x, t, names)
    for name in names:
        mine, theirs = getattr(head, name), getattr(field, name)
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        # trace of a covariance and divergence are differences of second moments: a few digits fewer
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("t", [0.0, 0.5, torch.tensor(0.3), torch.tensor([[0.1], [0.5], [0.9]]), 0.999])
def test_head_equals_the_field_at_every_form_of_time(tasks, t):
    x, s, mask, _, _ = (v.float() if v.is_floating_point() else v for v in tasks)
    out = NWHead()(x, s, t, mask)
    assert out.dtype == torch.float32
    # both are within 1e-5 of the exact weights, and the points spread over about 5
    torch.testing.assert_close(out, NWField(Support.batch(s, mask=mask)).denoise(x, t), rtol=0, atol=5e-5)


def test_head_of_two_points_is_a_hyperbolic_tangent():
    x, s = float64([[0.5]]), float64([[-1.0], [1.0]])
    found = NWHead().posterior(x, s, 0.5, ("denoiser", "velocity", "score", "n_eff", "log_density"))
    values = [v.item() for v in (found.denoiser, found.velocity, found.score, found.n_eff, found.log_density)]
    assert values == pytest.approx([math.tanh(1.0), 0.5231883119, -0.4768116881, 1.2658022288, -0.7920105222], abs=1e-9)


def test_concatenating_references_is_not_averaging_them():
    x, both, mean = float64([[0.5]]), float64([[-1.0], [1.0]]), float64([[0.0]])
    velocity = [NWHead().posterior(x, s, 0.5, "velocity").velocity.item() for s in (both, mean)]
    assert velocity == pytest.approx([0.5231883119, -1.0], abs=1e-9)


def test_head_at_the_ends_of_time(randn):
    x, s = randn(2, 3, 4), randn(2, 5, 4)
    torch.testing.assert_close(NWHead()(x, s, 0.0), s.mean(1, keepdim=True).expand_as(x))
    nearest = torch.cdist(x, s).argmin(-1)
    torch.testing.assert_close(NWHead()(x, s, 1.0), torch.gather(s, 1, nearest[..., None].expand_as(x)))
    with pytest.raises(ValueError, match="velocity do not exist at sigma = 0"):
        NWHead().posterior(x, s, 1.0, ("velocity",))


@pytest.mark.parametrize("h", [1e3, 1.0, 1e-1, 1e-2, 1e-3])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_float32_head_keeps_the_accuracy_of_the_field(randn, h, offset):
    s = (randn(2, 64, 16) + offset).float()
    s[:, 1::2] = s[:, ::2] + h * torch.nn.functional.normalize(randn(2, 32, 16).float(), dim=-1)  # near-duplicate pairs
    path = CondOT()
    t = path.time_at(h)
    at = path(t)
    x = (at.alpha * s.double() + at.sigma * randn(2, 64, 16)).float()
    exact = exact_weights(x.double(), s.double(), at.alpha, at.sigma)
    found = NWHead(path).posterior(x, s, t, ("denoiser", "noise"))
    mean = exact @ s.double()
    noise = (x.double() - at.alpha * mean) / at.sigma
    # weights within 1e-5 move the mean by at most 1e-5 of the distance between the points that share them
    assert (found.noise.double() - noise).norm(dim=-1).max() <= 1e-4 * noise.norm(dim=-1).max()
    torch.testing.assert_close(found.denoiser.double(), mean, rtol=2e-7, atol=2e-5)


def test_head_without_contract_is_a_float32_pass(randn):
    x, s = randn(2, 8, 16).float(), randn(2, 12, 16).float()
    torch.testing.assert_close(NWHead(accuracy=None)(x, s, 0.5), NWHead()(x, s, 0.5), rtol=0, atol=1e-5)


def test_head_hands_more_pairs_than_memory_should_hold_to_the_field(tasks, monkeypatch):
    x, s, mask, weights, t = tasks
    expected = NWHead()(x, s, t, mask, weights)
    monkeypatch.setattr(head_module, "PAIRS", 10)
    torch.testing.assert_close(NWHead()(x, s, t, mask, weights), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("accuracy", [1e-5, None])
def test_what_masked_slots_hold_has_no_influence(accuracy):
    head, mask = NWHead(accuracy=accuracy), torch.tensor([[True, True, False, False]])
    s = torch.tensor([[[-1.0], [1.0], [math.nan], [1e30]]], requires_grad=True)
    out = head(torch.tensor([[[0.5]]]), s, 0.5, mask)
    assert out.item() == pytest.approx(math.tanh(1.0), abs=1e-6)
    (gradient,) = torch.autograd.grad(out.sum(), s)
    assert gradient[0, 2:].tolist() == [[0.0], [0.0]] and gradient.isfinite().all()


def test_head_ignores_padding_order_and_company(tasks):
    x, s, mask, weights, t = tasks
    head = NWHead(CondOT(0.01))
    out = head(x, s, t, mask, weights)
    shuffle = torch.randperm(7)
    padded = torch.cat([s, torch.full((3, 4, 4), math.inf, dtype=F64)], 1)
    more = torch.cat([mask, torch.zeros(3, 4, dtype=torch.bool)], 1)
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(head(x, s[:, shuffle], t, mask[:, shuffle], weights[:, shuffle]), out, **close)
    torch.testing.assert_close(head(x, padded, t, more, torch.cat([weights, weights[:, :4]], 1)), out, **close)
    for i, size in enumerate((7, 2, 4)):
        alone = head(x[i : i + 1], s[i : i + 1, :size], t[i : i + 1], weights=weights[i : i + 1, :size])
        torch.testing.assert_close(alone, out[i : i + 1], **close)


def test_head_takes_events_of_any_shape(randn):
    x, s = randn(2, 3, 2, 2), randn(2, 5, 2, 2)
    torch.testing.assert_close(NWHead()(x, s, 0.4).flatten(2), NWHead()(x.flatten(2), s.flatten(2), 0.4))
    torch.testing.assert_close(
        NWHead()(x[..., 0, 0], s[..., 0, 0], 0.4)[..., None], NWHead()(x[..., :1, 0], s[..., :1, 0], 0.4)
    )


def test_head_without_queries(randn):
    found = NWHead().posterior(randn(2, 0, 4), randn(2, 5, 4), 0.5, ("denoiser", "n_eff"))
    assert found.denoiser.shape == (2, 0, 4) and found.n_eff.shape == (2, 0)


def test_head_of_half_precision_is_computed_in_float32(randn):
    x, s = torch.zeros(1, 1, 768, dtype=torch.float16), torch.full((1, 2, 768), 20.0, dtype=torch.float16)
    s[:, 1] = 21.0
    found = NWHead().posterior(x, s, 0.5, ("denoiser", "n_eff"))  # squared distances overflow in float16
    assert found.denoiser.dtype == torch.float16 and (found.denoiser == 20.0).all()
    assert found.n_eff.dtype == torch.float32 and found.n_eff.item() == 1.0


def test_head_derivatives(tasks):
    x, s, mask, weights, t = tasks
    head = NWHead(CondOT(0.1))
    inputs = tuple(v.clone().requires_grad_() for v in (x[:, :2], s, t[:, :2], weights))

    def outputs(x, s, t, weights):
        found = head.posterior(x, s, t, ("denoiser", "velocity", "n_eff", "log_density"), mask, weights)
        return found.denoiser, found.velocity, found.n_eff, found.log_density

    assert torch.autograd.gradcheck(outputs, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(outputs, inputs, fast_mode=True)


def test_head_score_is_the_gradient_of_its_log_density(tasks):
    x, s, mask, weights, t = tasks
    x = x.requires_grad_()
    found = NWHead().posterior(x, s, t, ("score", "log_density"), mask, weights)
    (gradient,) = torch.autograd.grad(found.log_density.sum(), x)
    torch.testing.assert_close(gradient, found.score, rtol=1e-9, atol=1e-9)


def test_head_under_transforms(tasks):
    x, s, mask, _, _ = tasks
    head = NWHead(CondOT(0.1))
    out = head(x, s, 0.5, mask)
    each = torch.vmap(lambda x, s: head(x[None], s[None], 0.5)[0])(x, s)
    torch.testing.assert_close(each, head(x, s, 0.5))
    _, tangent = torch.func.jvp(lambda x: head(x, s, 0.5, mask), (x,), (torch.ones_like(x),))
    step = 1e-6
    numeric = (head(x + step, s, 0.5, mask) - head(x - step, s, 0.5, mask)) / (2 * step)
    torch.testing.assert_close(tangent, numeric, rtol=1e-6, atol=1e-7)  # central differences: step^2 and eps / step
    compiled = torch.compile(lambda x: 2 * head(x, s, 0.5, mask), backend="aot_eager")
    torch.testing.assert_close(compiled(x), 2 * out, rtol=0, atol=0)


@pytest.mark.parametrize("weighted", [False, True])
def test_head_names_the_row_without_a_point(randn, weighted):
    mask = lengths_mask([2, 0, 3], 3)
    weights = torch.ones(3, 3, dtype=F64) if weighted else None
    with pytest.raises(ValueError, match=r"batch index 1\b"):
        NWHead()(randn(3, 2, 4), randn(3, 3, 4), 0.5, mask, weights)


def test_head_says_what_does_not_fit(randn):
    head, x, s = NWHead(), randn(2, 3, 4), randn(2, 5, 4)
    broken = s.clone()
    broken[1, 2, 0] = math.nan
    with pytest.raises(ValueError, match="1 bad row .* index 2 of task 1"):
        head(x, broken, 0.5)
    with pytest.raises(ValueError, match=r"\(1664,\) for x and \(1280,\) for points: .* same width"):
        head(randn(1, 4, 1664), randn(1, 10, 1280), 0.5)
    with pytest.raises(ValueError, match=r"x, points: .* got \(3, 3, 4\) and \(2, 5, 4\)"):
        head(randn(3, 3, 4), s, 0.5)
    with pytest.raises(ValueError, match="mask: expected booleans"):
        head(x, s, 0.5, torch.ones(2, 5))
    with pytest.raises(ValueError, match="weights: expected shape"):
        head(x, s, 0.5, weights=torch.ones(5))
    with pytest.raises(ValueError, match="time per task"):
        head(randn(2, 2, 4), s, torch.rand(2))
    with pytest.raises(ValueError, match="moments"):
        head.posterior(x, s, 0.5, ("mean",))
    with pytest.raises(TypeError, match="x: expected a tensor of floats"):
        head(torch.ones(2, 3, 4, dtype=torch.long), s, 0.5)
    with pytest.raises(TypeError, match="path"):
        NWHead(path=0.01)
    with pytest.raises(ValueError, match="accuracy"):
        NWHead(accuracy=2.0)
    assert list(head.parameters()) == [] and "CondOT" in repr(head)


# --- the feature lift -----------------------------------------------------------------------------------------------


def test_lifted_products_are_gaussian_logits(randn):
    x, s = randn(2, 3, 4), randn(2, 5, 4)
    alpha, sigma = torch.rand(2, 3, dtype=F64), 0.5 + torch.rand(2, 1, dtype=F64)
    logits = lift_queries(x, alpha, sigma) @ lift_keys(s).mT
    square = (x[:, :, None] - alpha[..., None, None] * s[:, None]).square().sum(-1)
    torch.testing.assert_close(logits, -square / (2 * sigma[..., None] ** 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("path", PATHS, ids=repr)
@pytest.mark.parametrize("h", [10.0, 1.0, 0.3])
def test_lifted_attention_equals_field_and_head(tasks, path, h):
    x, s, mask, weights, _ = tasks
    t = path.time_at(h)
    at, support = path(t), Support.batch(s, weights=weights, mask=mask)
    lifted = lifted_attention(at.alpha * s[:, :5] + at.sigma * x, s, at.alpha, at.sigma, mask, weights.log())
    field = NWField(support, path).denoise(at.alpha * s[:, :5] + at.sigma * x, t)
    torch.testing.assert_close(lifted, field, rtol=0, atol=1e-10)


def test_lifted_attention_is_regular_at_pure_noise(randn):
    x, s, log_prior = randn(3, 2), randn(4, 2), randn(4)
    expected = (torch.softmax(log_prior, 0) @ s).expand(3, 2)
    torch.testing.assert_close(lifted_attention(x, s, 0.0, 1.0, log_prior=log_prior), expected)


def test_lifted_attention_ignores_masked_slots():
    mask, s = torch.tensor([True, True, False, False]), torch.tensor([[-1.0], [1.0], [math.nan], [1e30]])
    for log_prior in (None, torch.zeros(4)):
        out = lifted_attention(torch.tensor([[0.5]]), s, 0.5, 0.5, mask, log_prior)
        assert out.item() == pytest.approx(math.tanh(1.0), abs=1e-6)


def test_lifted_attention_takes_any_number_of_leading_axes(randn):
    x, s, mask = randn(1, 2, 3, 4), randn(1, 2, 5, 4), lengths_mask([3, 5], 5)[None]
    out = lifted_attention(x, s, 0.5, 0.5, mask)
    for squeezed in (out[0], lifted_attention(x[0], s[0], 0.5, 0.5, mask[0])):
        torch.testing.assert_close(squeezed, lifted_attention(x[None], s[None], 0.5, 0.5, mask[None])[0, 0])
    torch.testing.assert_close(out[0, 0], lifted_attention(x[0, 0], s[0, 0], 0.5, 0.5, mask[0, 0]))


def test_lifted_attention_says_what_does_not_fit(randn):
    with pytest.raises(ValueError, match=r"batch index 1\b"):
        lifted_attention(randn(3, 2, 4), randn(3, 3, 4), 0.5, 0.5, lengths_mask([2, 0, 3], 3))
    with pytest.raises(ValueError, match=r"x, s: .* \(2, 4\) and \(3, 5\)"):
        lifted_attention(randn(2, 4), randn(3, 5), 0.5, 0.5)
    with pytest.raises(ValueError, match="alpha: expected"):
        lift_queries(randn(2, 3, 4), torch.ones(3), 0.5)


# --- weights of queries and keys ------------------------------------------------------------------------------------


def test_weights_use_half_the_squared_distance():
    q, k = torch.zeros(1, 2, dtype=F64), float64([1.0, 0.0], [0.0, 2.0])
    assert nw_weights(q, k, 1.0)[0].tolist() == pytest.approx([0.8175744762, 0.1824255238], abs=1e-9)


@pytest.mark.parametrize("d", [1, 8, 64])
def test_dot_product_attention_is_smoothing_with_the_prior_of_the_keys(randn, d):
    q, k = randn(2, 3, 5, d), randn(2, 3, 7, d)
    attention = torch.softmax(q @ k.mT / math.sqrt(d), -1)
    torch.testing.assert_close(nw_weights(q, k, prior="key_norm"), attention, rtol=1e-12, atol=1e-15)
    h = effective_bandwidth(d)
    masses = torch.exp(k.square().sum(-1) / (2 * h**2))
    torch.testing.assert_close(nw_weights(q, k, prior=masses), attention, rtol=1e-10, atol=1e-15)
    unit = torch.nn.functional.normalize(k, dim=-1)  # keys of one length: the prior says nothing
    torch.testing.assert_close(nw_weights(q, unit), nw_weights(q, unit, prior="key_norm"), rtol=1e-12, atol=1e-15)


def test_weights_take_a_bandwidth_per_head_and_per_query(randn):
    q, k = randn(2, 3, 5, 4), randn(2, 3, 7, 4)
    h = 0.5 + torch.rand(2, 3, 5, dtype=F64)
    square = (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)
    for bandwidth in (h, h[0, :, :1], h[:1, :, :1], h[0, 0, 0]):
        expected = torch.softmax(-square / (2 * torch.as_tensor(bandwidth)[..., None] ** 2), -1)
        torch.testing.assert_close(nw_weights(q, k, bandwidth), expected, rtol=1e-11, atol=1e-15)
    with pytest.raises(ValueError, match=r"as in \(H, 1\)"):
        nw_weights(q, k, h[0, :, 0])


def test_weights_lose_no_digits_to_a_common_shift():
    q, k = torch.tensor([[50000.5]]), torch.tensor([[50000.0], [50001.0]])
    assert nw_weights(q, k, 0.5).tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("prior", [None, "key_norm", "masses"])
def test_weights_of_masked_keys_are_zero(randn, prior):
    q, k, mask = randn(2, 3, 4), randn(2, 5, 4), lengths_mask([3, 2], 5)
    masses = randn(2, 5).exp() if prior == "masses" else prior
    k[~mask] = math.nan
    w = nw_weights(q, k, prior=masses, mask=mask)
    assert (w.masked_select(~mask[:, None]) == 0).all()
    for i, size in enumerate((3, 2)):
        part = masses[i, :size] if isinstance(masses, torch.Tensor) else masses
        torch.testing.assert_close(w[i, :, :size], nw_weights(q[i], k[i, :size], prior=part))
    with pytest.raises(ValueError, match=r"batch index 1\b"):
        nw_weights(q, k, mask=lengths_mask([3, 0], 5))


def test_weights_underflow_to_the_right_limit():
    q, k = torch.zeros(1, 1, dtype=F64), float64([math.sqrt(4000.0)], [math.sqrt(4002.0)])  # logits -2000 and -2001
    assert nw_weights(q, k, 1.0)[0].tolist() == pytest.approx([0.7310585786, 0.2689414214], abs=1e-9)


def test_weights_of_half_precision_and_by_request_of_float64(randn):
    q, k = randn(3, 8).half(), randn(4, 8).half()
    assert nw_weights(q, k).dtype == torch.float32
    w = nw_weights(q, k, dtype=F64)
    torch.testing.assert_close(w, nw_weights(q.double(), k.double()), rtol=0, atol=0)
    torch.testing.assert_close(nw_weights(q, k).double(), w, rtol=0, atol=1e-6)


def test_weights_say_what_does_not_fit(randn):
    q, k = randn(3, 4), randn(5, 4)
    with pytest.raises(ValueError, match="q, k: expected"):
        nw_weights(q, randn(5, 6))
    with pytest.raises(ValueError, match="bandwidth: expected positive"):
        nw_weights(q, k, 0.0)
    with pytest.raises(ValueError, match="prior: expected"):
        nw_weights(q, k, prior="norm")
    with pytest.raises(ValueError, match="d_k"):
        effective_bandwidth(0)


# --- the layer with Gaussian logits ---------------------------------------------------------------------------------


def layer(**options):
    return GaussianAttention(8, 2, **{"kdim": 6, "dtype": F64, **options})


def spelled_out(attention, query, key, value=None, mask=None, scale=1.0):
    """The layer head by head and pair by pair."""
    value, d, outs = key if value is None else value, attention.head_dim, []
    for i, h in enumerate(attention.bandwidth):
        part = slice(i * d, (i + 1) * d)
        q, k = attention.q_norm(attention.q_proj(query)[..., part]), attention.k_norm(attention.k_proj(key)[..., part])
        h = h * scale if not isinstance(scale, torch.Tensor) else (h * scale)[..., None]
        square = (q[:, :, None] - k[:, None]).square().sum(-1)
        if attention.prior == "key_norm":
            square = square - k.square().sum(-1)[:, None]
        logits = -square / (2 * h**2)
        logits = logits if mask is None else logits.masked_fill(~mask[:, None], -torch.inf)
        outs.append(torch.softmax(logits, -1) @ attention.v_proj(value)[..., part])
    return attention.out_proj(torch.cat(outs, -1))


@pytest.mark.parametrize("prior", [None, "key_norm"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_layer_smooths_by_distance(randn, prior, qk_norm):
    attention = layer(prior=prior, qk_norm=qk_norm, head_dim=5)
    with torch.no_grad():
        attention.log_bandwidth.copy_(float64(-0.3, 0.4))
    query, key, mask = randn(3, 4, 8), randn(3, 7, 6), lengths_mask([7, 2, 4], 7)
    for scale in (1.0, 0.5, 0.5 + torch.rand(3, 1, dtype=F64), 0.5 + torch.rand(3, 4, dtype=F64)):
        out, weights = attention(query, key, mask=mask, bandwidth_scale=scale, return_weights=True)
        torch.testing.assert_close(out, spelled_out(attention, query, key, mask=mask, scale=scale))
        values = attention.v_proj(key).unflatten(-1, (2, 5)).transpose(1, 2)
        torch.testing.assert_close(attention.out_proj((weights @ values).transpose(1, 2).flatten(2)), out)
        torch.testing.assert_close(weights.sum(-1), torch.ones(3, 2, 4, dtype=F64))


def test_layer_takes_values_of_their_own(randn):
    attention = layer(vdim=3)
    query, key, value = randn(2, 4, 8), randn(2, 7, 6), randn(2, 7, 3)
    torch.testing.assert_close(attention(query, key, value), spelled_out(attention, query, key, value))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_with_the_prior_of_the_keys_is_multihead_attention(randn, masked, bias):
    theirs = nn.MultiheadAttention(8, 2, bias=bias, batch_first=True, dtype=F64)
    mine = GaussianAttention(8, 2, bias=bias, prior="key_norm", dtype=F64)
    with torch.no_grad():
        if bias:
            theirs.in_proj_bias.normal_()
        for i, linear in enumerate((mine.q_proj, mine.k_proj, mine.v_proj)):
            linear.weight.copy_(theirs.in_proj_weight[8 * i : 8 * (i + 1)])
            if bias:
                linear.bias.copy_(theirs.in_proj_bias[8 * i : 8 * (i + 1)])
        mine.out_proj.load_state_dict(theirs.out_proj.state_dict())
    query, key = randn(3, 4, 8), randn(3, 7, 8)
    mask = lengths_mask([7, 2, 4], 7) if masked else None
    out, weights = theirs(query, key, key, key_padding_mask=None if mask is None else ~mask, average_attn_weights=False)
    mine_out, mine_weights = mine(query, key, mask=mask, return_weights=True)
    torch.testing.assert_close(mine_out, out, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(mine_weights, weights, rtol=1e-10, atol=1e-12)


def test_layer_ignores_padding_order_and_company(randn):
    attention = layer()
    query, key, mask = randn(3, 4, 8), randn(3, 7, 6), lengths_mask([7, 2, 4], 7)
    out = attention(query, key, mask=mask)
    shuffle, more = torch.randperm(7), lengths_mask([7, 2, 4], 9)
    torch.testing.assert_close(attention(query, key[:, shuffle], mask=mask[:, shuffle]), out)
    torch.testing.assert_close(attention(query, torch.cat([key, key[:, :2]], 1), mask=more), out)
    torch.testing.assert_close(attention(query[:, [2, 0]], key, mask=mask), out[:, [2, 0]])
    for i, size in enumerate((7, 2, 4)):
        torch.testing.assert_close(attention(query[i : i + 1], key[i : i + 1, :size]), out[i : i + 1])


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
@pytest.mark.parametrize("prior", [None, "key_norm"])
def test_layer_is_not_poisoned_by_masked_slots(randn, value, prior):
    attention = layer(prior=prior)
    query, key, mask = randn(2, 4, 8), randn(2, 5, 6), lengths_mask([3, 5], 5)
    expected = attention(query, key, mask=mask)
    poisoned = key.masked_fill(~mask[..., None], value).requires_grad_()
    out = attention(query, poisoned, mask=mask)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    out.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in attention.parameters())
    assert (poisoned.grad[~mask] == 0).all()


def test_layer_keeps_its_digits_when_keys_and_queries_share_a_large_bias(randn):
    attention = layer()
    query, key = randn(2, 4, 8), randn(2, 7, 6)
    expected = attention(query, key)
    shift = 1e4 * randn(8)
    with torch.no_grad():
        attention.q_proj.bias.add_(shift)
        attention.k_proj.bias.add_(shift)
    # rounding of q and k themselves at 1e4: eps * 1e4 * |q - k| / h^2
    torch.testing.assert_close(attention(query, key), expected, rtol=0, atol=1e-10)


def test_layer_derivatives(randn):
    attention = layer(qk_norm=True)
    mask, scale = lengths_mask([3, 2], 3), 0.5 + torch.rand(2, 1, dtype=F64)
    inputs = [randn(2, 2, 8).requires_grad_(), randn(2, 3, 6).requires_grad_(), scale.requires_grad_()]
    names = [name for name, _ in attention.named_parameters()]

    def outputs(query, key, scale, *parameters):
        call = (query, key, None, mask, scale)
        return torch.func.functional_call(attention, dict(zip(names, parameters)), call)

    inputs += [p.detach().clone().requires_grad_() for p in attention.parameters()]
    assert torch.autograd.gradcheck(outputs, tuple(inputs), fast_mode=True)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(outputs, tuple(inputs), fast_mode=True)


def test_layer_starts_at_the_scale_of_dot_products():
    torch.manual_seed(1)
    attention = GaussianAttention(64, 4, dropout=0.5)
    assert attention.bandwidth.tolist() == pytest.approx([2.0] * 4)
    assert GaussianAttention(64, 4, bandwidth=0.7).bandwidth.tolist() == pytest.approx([0.7] * 4)
    assert attention.q_proj.bias.eq(0).all()
    x = torch.randn(2, 30, 64)
    _, weights = attention.eval()(x, x, return_weights=True)
    n_eff = weights.square().sum(-1).reciprocal()
    assert 3 < n_eff.mean() < 29  # neither a copy of one key nor a plain average
    torch.testing.assert_close(attention(x, x), attention(x, x), rtol=0, atol=0)
    assert not torch.equal(attention.train()(x, x), attention(x, x))


def test_layer_goes_to_a_file_and_back(randn):
    attention = layer(qk_norm=True)
    with torch.no_grad():
        for p in attention.parameters():
            p.add_(0.1 * torch.randn_like(p))
    file = io.BytesIO()
    torch.save(attention.state_dict(), file)
    file.seek(0)
    other = layer(qk_norm=True)
    other.load_state_dict(torch.load(file, weights_only=True))
    query, key = randn(2, 4, 8), randn(2, 7, 6)
    torch.testing.assert_close(other(query, key), attention(query, key), rtol=0, atol=0)
    other.reset_parameters()
    assert other.bandwidth.tolist() == pytest.approx([math.sqrt(2.0)] * 2)
    assert other.q_norm.weight.eq(1).all()
    assert "num_heads=2, head_dim=4, qk_norm=True, prior=None" in repr(attention)


def test_layer_compiles_to_the_eager_numbers(randn):
    attention = layer()
    query, key, mask = randn(2, 4, 8), randn(2, 7, 6), lengths_mask([7, 3], 7)
    compiled = torch.compile(attention, backend="aot_eager")
    for m in (None, mask):
        torch.testing.assert_close(compiled(query, key, mask=m), attention(query, key, mask=m), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layer_in_half_precision(randn, dtype):
    attention = GaussianAttention(64, 4)
    query, key = randn(2, 16, 64).float(), randn(2, 32, 64).float()
    expected = attention(query, key)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(attention(query, key).float(), expected, rtol=0, atol=0.05)
    half = attention.to(dtype)(query.to(dtype), key.to(dtype))
    assert half.dtype == dtype
    # products of width 64 of numbers near 1, each rounded to 2^-8 or finer
    torch.testing.assert_close(half.float(), expected, rtol=0, atol=0.05)


def test_layer_says_what_does_not_fit(randn):
    attention, query, key = layer(), randn(2, 4, 8), randn(2, 7, 6)
    with pytest.raises(ValueError, match=r"key: expected \(B, length, 6\), got \(2, 10, 9\)"):
        attention(query, randn(2, 10, 9))
    with pytest.raises(ValueError, match="one batch size"):
        attention(query, randn(3, 7, 6))
    with pytest.raises(ValueError, match=r"batch index 1\b"):
        attention(query, key, mask=lengths_mask([3, 0], 7))
    with pytest.raises(ValueError, match="bandwidth_scale: expected a positive"):
        attention(query, key, bandwidth_scale=0.0)
    with pytest.raises(ValueError, match=r"as in \(B, 1\)"):
        attention(query, key, bandwidth_scale=torch.ones(2))
    with pytest.raises(ValueError, match="embed_dim"):
        GaussianAttention(9, 2)
    with pytest.raises(ValueError, match="prior"):
        GaussianAttention(8, 2, prior="uniform")
    with pytest.raises(ValueError, match="dropout"):
        GaussianAttention(8, 2, dropout=1.0)
    with pytest.raises(ValueError, match="bandwidth"):
        GaussianAttention(8, 2, bandwidth=-1.0)


# --- leaving one reference out --------------------------------------------------------------------------------------


def test_dropping_one_of_two_references():
    field = NWField(float64([-1.0], [1.0]))
    found = leave_one_out(field, float64([0.5]), 0.5)
    assert found.distance[0].tolist() == pytest.approx([0.2384058440, 1.7615941560], abs=1e-9)
    assert found.unused.tolist() == [False, False]


def smoothings():
    full = torch.tensor([[0.3, 0.1], [0.1, 0.2]], dtype=F64)
    metric = FullMetric(torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=F64))
    return [
        (None, None),
        (DiagonalMetric(float64(1.0, 4.0)), None),
        (metric, None),
        (None, 0.3),
        (None, Smoothing.full(full)),
        (metric, Smoothing.full(full)),
    ]


@pytest.mark.parametrize(("metric", "smoothing"), smoothings())
@pytest.mark.parametrize("t", [0.2, 0.7, 0.97])
def test_influence_is_the_distance_to_the_field_without_the_point(randn, metric, smoothing, t):
    points, weights, x = randn(6, 2) + 3.0, randn(6).exp(), t * (randn(4, 2) + 3.0)
    keep = torch.ones(6, dtype=torch.bool)
    keep[2] = False
    support = Support(points, weights=weights, mask=keep)
    field = NWField(support, metric=metric, smoothing=smoothing)
    found = leave_one_out(field, x, t).distance
    times = torch.full((4,), t, dtype=F64)
    torch.testing.assert_close(leave_one_out(field, x, times).distance, found)
    full = field.denoise(x, t)
    for i in range(6):
        if not keep[i]:
            assert (found[:, i] == 0).all()
            continue
        rest = [j for j in range(6) if keep[j] and j != i]
        without = NWField(support.select(torch.tensor(rest)), metric=metric, smoothing=smoothing).denoise(x, t)
        torch.testing.assert_close(found[:, i], (full - without).norm(dim=-1), rtol=1e-9, atol=1e-11)


def test_influence_of_a_copied_reference_is_exact(randn):
    points = randn(20, 3)
    found = leave_one_out(NWField(points), 0.99 * points, 0.99).distance  # weights are 1 to all digits
    for i in range(20):
        rest = torch.cat([points[:i], points[i + 1 :]])
        without = NWField(rest).denoise(0.99 * points[i : i + 1], 0.99)
        torch.testing.assert_close(found[i, i], (points[i] - without[0]).norm(), rtol=1e-9, atol=0)


def test_references_without_influence_are_flagged(randn):
    points = torch.cat([randn(3, 2), randn(2, 2) + 500.0])
    assert leave_one_out(NWField(points), 0.5 * randn(10, 2), 0.5).unused.tolist() == [False] * 3 + [True] * 2
    copies = NWField(float64([2.0, -1.0]).expand(5, 2))
    assert leave_one_out(copies, randn(4, 2), 0.5).unused.all()  # dropping one of five copies moves nothing


def test_influence_of_tasks_is_that_of_each(tasks, monkeypatch):
    x, s, mask, weights, t = tasks
    head = NWHead()
    found = leave_one_out(head.field(s, mask, weights), x, t)
    assert found.distance.shape == (3, 5, 7) and found.unused.shape == (3, 7)
    monkeypatch.setattr(influence_module, "BLOCK", 8)
    torch.testing.assert_close(leave_one_out(head.field(s, mask, weights), x, t).distance, found.distance)
    for i, size in enumerate((7, 2, 4)):
        alone = leave_one_out(NWField(Support(s[i, :size], weights=weights[i, :size])), x[i], t[i])
        torch.testing.assert_close(found.distance[i, :, :size], alone.distance, rtol=1e-9, atol=1e-11)
        assert (found.distance[i, :, size:] == 0).all() and not found.unused[i, size:].any()


def test_leave_one_out_says_what_does_not_fit(randn):
    with pytest.raises(ValueError, match="at least two points"):
        leave_one_out(NWField(randn(1, 2)), randn(3, 2), 0.5)
    with pytest.raises(ValueError, match="in task 1"):
        leave_one_out(NWHead().field(randn(2, 3, 2), lengths_mask([3, 1], 3)), randn(2, 3, 2), 0.5)
    with pytest.raises(ValueError, match="sigma = 0"):
        leave_one_out(NWField(randn(4, 2)), randn(3, 2), 1.0)
    with pytest.raises(TypeError, match=r"head\.field"):
        leave_one_out(NWHead(), randn(3, 2), 0.5)
