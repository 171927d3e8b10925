"""The probe: it changes nothing, what it records is what the model computed, and its numbers are right."""

import itertools
import json
import math
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from torch import nn
from torch.nn import functional as F

import nwflow
from nwflow.cli import main
from nwflow.probe import Call, ProbeResult, measure, record
from nwflow.probe.meaning import Tally
from nwflow.probe.statistics import nulls
from nwflow.probe.weights import attention_weights, weigh
from nwflow.report import render_probe, write_probe_report


class Sdpa(nn.Module):
    def forward(self, q, k, v, **options):
        return F.scaled_dot_product_attention(q, k, v, **options)


class Outer(nn.Module):
    """Two cross-attention layers, as a model has them."""

    def __init__(self, make) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make(), make()])

    def forward(self, x, y):
        for block in self.blocks:
            x = x + block(x, y, y)[0]
        return x


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def probed(model: nn.Module, run, grad: bool = False, **options):
    """The recorder of a run that is checked to be bit-identical with and without it, before and after."""
    with torch.set_grad_enabled(grad):
        before = run()
        state = torch.get_rng_state()
        with record(model, **options) as recorder:
            during = run()
        assert torch.equal(torch.get_rng_state(), state), "the recorder drew from the global generator"
        after = run()
    assert torch.equal(before, during) and torch.equal(before, after)
    assert not any("forward" in m.__dict__ or m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return recorder


def multihead(**options) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(16, 4, **({"batch_first": True} | options)).eval()


X, Y, PADDING = drawn(2, 7, 16), drawn(2, 5, 16, seed=1), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
CAUSAL = torch.full((7, 7), -torch.inf).triu(1)
MULTIHEAD = {
    "fused self attention": lambda m: m(X, X, X)[0],
    "fused without weights": lambda m: m(X, X, X, need_weights=False)[0],
    "fused with padding": lambda m: m(X, X, X, key_padding_mask=F.pad(PADDING, (0, 2), value=False))[0],
    "weights of every head": lambda m: m(X, Y, Y, average_attn_weights=False)[0],
    "cross with padding": lambda m: m(X, Y, Y, key_padding_mask=PADDING)[0],
    "causal": lambda m: m(X, X, X, attn_mask=CAUSAL, is_causal=True, need_weights=False)[0],
    "boolean mask": lambda m: m(X, Y, Y, attn_mask=drawn(7, 5, seed=2) > 1.0)[0],
    "mask of every head": lambda m: m(X, Y, Y, attn_mask=drawn(8, 7, 5, seed=2))[0],
    "unbatched": lambda m: m(X[0], Y[0], Y[0])[0],
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", MULTIHEAD)
def test_multihead_attention(name: str, grad: bool) -> None:
    module = multihead()
    result = probed(module, lambda: MULTIHEAD[name](module), grad).compare()
    assert len(result.heads) == 4
    for h in result.heads:
        assert h.identity_error < 1e-12 and h.total_variation_with_prior < 1e-12
        assert h.reproduction_error is not None and h.reproduction_error < 1e-6


@pytest.mark.parametrize(
    "options", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}]
)
def test_keys_of_no_reference_keep_their_mass(options: dict) -> None:
    module = multihead(kdim=6, vdim=3, **options)
    y, z = drawn(2, 5, 6, seed=3), drawn(2, 5, 3, seed=4)
    recorder = probed(module, lambda: module(X, y, z)[0], keep="tensors")
    weights = attention_weights(recorder.calls[0])
    for h in recorder.compare().heads:
        assert h.n_keys == 5 and h.reproduction_error < 1e-6  # type: ignore[operator]
        assert h.reference_mass == pytest.approx(float(weights[:, h.head, :, :5].sum(-1).mean()), abs=1e-12)
        assert sum(h.listens) == pytest.approx(1.0), "shares are of the references alone"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # of torch's own fused path with padding
@pytest.mark.parametrize("norm_first", [False, True])
def test_fused_encoder_never_calls_its_attention_and_is_recorded(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    padding = torch.tensor([[False] * 7, [False] * 5 + [True] * 2])
    for run in (lambda: encoder(X), lambda: encoder(X, src_key_padding_mask=padding)):
        result = probed(encoder, run).compare()
        assert {h.layer for h in result.heads} == {"layers.0.self_attn", "layers.1.self_attn"}
        assert all(h.reproduction_error < 1e-6 for h in result.heads)  # type: ignore[operator]


SDPA = {
    "plain": {},
    "scale": {"scale": 0.7},
    "causal": {"is_causal": True},
    "boolean": {"attn_mask": drawn(2, 1, 7, 5, seed=5) > 0.3},
    "additive": {"attn_mask": drawn(7, 5, seed=6)},
    "minus ten thousand": {"attn_mask": torch.where(drawn(1, 1, 1, 5, seed=7) > 0.5, -10000.0, 0.0)},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SDPA)
def test_scaled_dot_product_attention(name: str, dtype: torch.dtype) -> None:
    module, kv_heads = Sdpa(), 2 if name == "grouped" else 4
    q, k, v = (drawn(2, h, n, 8, seed=s).to(dtype) for h, n, s in ((4, 7, 0), (kv_heads, 5, 1), (kv_heads, 5, 2)))
    options = {
        key: v.to(dtype) if torch.is_tensor(v) and v.dtype == torch.float32 else v for key, v in SDPA[name].items()
    }
    result = probed(module, lambda: torch.nan_to_num(module(q, k, v, **options))).compare()
    assert len(result.heads) == 4
    for h in result.heads:
        assert h.identity_error < 1e-12
        assert h.bandwidth == pytest.approx(0.7**-0.5 if name == "scale" else 8**0.25)


def test_batch_times_heads_is_told_apart_by_the_module() -> None:
    class Old(nn.Module):
        heads = 4

        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k)

    module = Old()
    result = probed(module, lambda: module(drawn(8, 5, 4), drawn(8, 3, 4))).compare()
    assert [h.head for h in result.heads] == [0, 1, 2, 3] and result.heads[0].n_queries == 10


def test_gaussian_logits_are_recognised_as_the_kernel_itself() -> None:
    torch.manual_seed(0)
    module = nwflow.GaussianAttention(32, 4, kdim=16)
    for h in probed(module, lambda: module(drawn(2, 5, 32), drawn(2, 7, 16))).compare().heads:
        assert (
            h.spearman == pytest.approx(1.0)
            and h.total_variation < 1e-12
            and h.best_bandwidth == pytest.approx(h.bandwidth)
        )


def test_numbers_are_those_of_scipy() -> None:
    """Every figure of a head against a slow oracle, with a key that occurs twice (ties)."""
    q, k, v = (drawn(1, 1, n, 3, seed=s, dtype=torch.float64) for n, s in ((6, 0), (5, 1), (5, 2)))
    k[0, 0, 4] = k[0, 0, 3]
    (h,) = measure([Call("layer", q, k, v)])
    a = torch.softmax(q[0, 0] @ k[0, 0].T / 3**0.5, -1).numpy()
    distance = torch.cdist(q[0, 0], k[0, 0]).square().numpy()
    w = torch.softmax(-torch.from_numpy(distance) / (2 * 3**0.5), -1).numpy()
    ranks = [spearmanr(np.round(x, 12), np.round(y, 12)).statistic for x, y in zip(a, w)]
    assert h.spearman == pytest.approx(np.mean(ranks), abs=1e-12)
    assert h.pearson == pytest.approx(pearsonr(a.ravel(), w.ravel()).statistic, abs=1e-12)
    assert h.total_variation == pytest.approx(0.5 * np.abs(a - w).sum(-1).mean(), abs=1e-12)
    assert h.kl == pytest.approx((a * np.log(a / w)).sum(-1).mean(), abs=1e-12)
    assert h.n_eff == pytest.approx((1 / (a**2).sum(-1)).mean(), abs=1e-12)
    assert h.n_eff_nw == pytest.approx((1 / (w**2).sum(-1)).mean(), abs=1e-12)
    near = np.isclose(distance, distance.min(-1, keepdims=True), rtol=0, atol=1e-12)
    assert h.same_nearest == pytest.approx(np.mean([row[i] for row, i in zip(near, a.argmax(-1))]))
    share = near / near.sum(-1, keepdims=True)
    assert h.pearson_nearest == pytest.approx(pearsonr(a.ravel(), share.ravel()).statistic, abs=1e-12)

    def divergence(bandwidth: float) -> float:
        u = torch.log_softmax(-torch.from_numpy(distance) / (2 * bandwidth**2), -1).numpy()
        return float((a * (np.log(a) - u)).sum(-1).mean())

    assert h.best_bandwidth is not None and h.best_kl == pytest.approx(divergence(h.best_bandwidth), abs=1e-12)
    assert all(divergence(h.best_bandwidth * f) > h.best_kl for f in (0.99, 1.01))


def test_row_blocks_and_masks_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = drawn(2, 3, 40, 4, dtype=torch.float64), drawn(2, 3, 9, 4, seed=1, dtype=torch.float64)
    call = Call("layer", q, k, k, causal=True)
    whole = measure([call])
    monkeypatch.setattr("nwflow.probe.compare.BLOCK", 64)
    for a, b in zip(whole, measure([call]), strict=True):
        for name in ("spearman", "pearson", "total_variation", "kl", "n_eff", "pearson_nearest", "prior_spread"):
            assert getattr(a, name) == pytest.approx(getattr(b, name), abs=1e-12)
    # a masked key is one that is not there
    few = measure([Call("layer", q, k[:, :, :6], k[:, :, :6])])
    mask = (torch.arange(9) < 6)[None, None, None].expand(1, 1, 40, 9)
    huge = k.clone()
    huge[:, :, 6:] = 1e6
    for a, b in zip(few, measure([Call("layer", q, huge, huge, mask=mask)]), strict=True):
        assert a.spearman == pytest.approx(b.spearman, abs=1e-9) and a.kl == pytest.approx(b.kl, abs=1e-6)


def test_equal_key_norms_are_kernel_smoothing_exactly() -> None:
    """Identity projections and keys of one length: attention is the Gaussian smoother, whatever the queries."""
    module = nn.MultiheadAttention(4, 1, batch_first=True, bias=False).double()
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.eye(4).repeat(3, 1))
        module.out_proj.weight.copy_(torch.eye(4))
    keys = F.normalize(drawn(1, 8, 4, dtype=torch.float64), dim=-1) * 3.0
    (h,) = probed(module, lambda: module(drawn(1, 9, 4, seed=1).double(), keys, keys)[0]).compare().heads
    assert h.spearman == pytest.approx(1.0) and h.pearson == pytest.approx(1.0)
    assert h.total_variation < 1e-14 and h.same_nearest == 1.0 and h.prior_spread < 1e-14
    assert h.best_bandwidth == pytest.approx(h.bandwidth) and h.bandwidth == pytest.approx(math.sqrt(2.0))
    assert h.p_value == pytest.approx(1 / 41) and h.spearman_null < 0.9  # type: ignore[operator]


def test_long_keys_break_the_likeness_and_the_prior_restores_it() -> None:
    q, k = drawn(1, 1, 64, 8), drawn(1, 1, 12, 8, seed=1)
    k[..., :3, :] *= 6.0
    (h,) = measure([Call("layer", q, k)])
    assert h.total_variation > 0.3 and h.total_variation_with_prior < 1e-12 and h.prior_spread > 1.0


def test_unrelated_weights_stay_within_their_null() -> None:
    """Keys whose norms decide everything: the rank correlation with distance is not above what permutations give."""
    inside = 0
    for seed in range(20):
        q, k = drawn(1, 1, 50, 16, seed=seed), drawn(1, 1, 10, 16, seed=100 + seed)
        fake = Call("layer", q, k, bias=50.0 * drawn(1, 1, 1, 10, seed=200 + seed))
        (h,) = measure([fake], seed=seed)
        inside += h.p_value > 0.05  # type: ignore[operator]
    assert inside >= 15, "5 % of 20 exceed the 95 % quantile by chance: more than 5 of them would not be chance"


def test_normal_limit_of_the_null_has_the_variance_of_permutations(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = drawn(1, 1, 5, 6, dtype=torch.float64), drawn(1, 1, 80, 6, seed=1, dtype=torch.float64)
    weights = weigh([(Call("layer", q, k), 0)])
    limit = nulls(weights, 400, 0)
    monkeypatch.setattr("nwflow.probe.statistics.MANY", 100)
    sampled = nulls(weights, 4000, 0)
    assert float(limit["spearman_draws"].std()) == pytest.approx(float(sampled["spearman_draws"].std()), rel=0.05)
    assert float(limit["spearman_null"]) == pytest.approx(float(sampled["spearman_null"]), rel=0.1)
    assert float(limit["pearson_null"]) == pytest.approx(float(sampled["pearson_null"]), rel=0.2)  # heavier tails


def test_schedule_bandwidth_in_feature_space_is_the_exact_posterior() -> None:
    s, x = drawn(1, 6, 5, dtype=torch.float64), drawn(1, 4, 5, seed=1, dtype=torch.float64)
    alpha, sigma = 0.4, 0.6
    lifted = Call(
        "layer",
        x[:, None],
        alpha * s[:, None],
        scale=sigma**-2,
        kernel="gaussian",
        features=(x, s),
        alpha=alpha,
        sigma=sigma,
        t=0.4,
    )
    (h,) = measure([lifted])
    assert h.schedule is not None and h.schedule.total_variation < 1e-12
    assert h.schedule.bandwidth == pytest.approx(1.5) and h.schedule.spearman == pytest.approx(1.0)


# ------------------------------------------------------------------------------------------------- cases from real use


def test_n02_zero_captures_is_an_error_that_says_what_was_found() -> None:
    model = Outer(multihead)
    with torch.no_grad():
        with record(model, layers="*.attn2") as recorder:
            model(X, Y)
        with pytest.raises(
            ValueError, match=r"captured 0 .*0 modules match layers \*.attn2.*2 MultiheadAttention.*2 calls"
        ):
            recorder.compare()
        with record(nn.Linear(2, 2)) as recorder:
            pass
        with pytest.raises(ValueError, match="captured 0 in Linear"):
            recorder.compare()


def test_n03_halves_of_guidance_are_never_averaged() -> None:
    """Unconditional half uniform, conditional one-hot: n_eff is 1, not the 2.29 of the mean of both weights."""
    module, k = Sdpa(), 400.0 * torch.eye(4)[None, None].expand(2, 1, 4, 4)
    q = torch.zeros(2, 1, 3, 4)
    q[1, :, :, 0] = 1.0
    with record(module, branches=("uncond", "cond")) as recorder:
        module(q, k, k)
    (h,) = recorder.compare().heads
    assert h.branch == "cond" and h.n_eff == pytest.approx(1.0) and h.n_queries == 3
    assert [x.n_eff for x in recorder.compare("all").select(branch="uncond")] == [pytest.approx(4.0)]
    with pytest.raises(ValueError, match="branch"):
        recorder.compare("middle")


def test_n08_what_the_model_returns_is_passed_through() -> None:
    states = (drawn(1, 2, 4), drawn(1, 3, 4), drawn(1, 1, 4))

    class Joint(nn.Module):
        def forward(self, count):
            F.scaled_dot_product_attention(states[0], states[1], states[1])
            return states[:count] if count > 1 else states[0]

    module = Joint()
    for count in (1, 2, 3):
        with record(module) as recorder:
            got = module(count)
        want = states[:count] if count > 1 else states[0]
        assert type(got) is type(want)
        assert got is want if count == 1 else all(a is b for a, b in zip(got, want, strict=True))
        assert recorder.compare().heads


def base_case(*values: float) -> Call:
    """References of the one-dimensional case at x = 0.5, t = 0.5: logits -(x - s / 2)^2 / 0.5."""
    s = torch.tensor(values, dtype=torch.float64).reshape(1, 1, -1, 1)
    return Call("layer", torch.full((1, 1, 1, 1), 0.5, dtype=torch.float64), 0.5 * s, s, scale=4.0, kernel="gaussian")


def tallied(*calls: Call):
    tally = Tally.of(calls[0], "")
    for call in calls:
        tally.add(call, None)
    return tally.result()


def test_n10_references_are_concatenated_and_never_averaged() -> None:
    call = base_case(-1.0, 1.0)
    assert float(attention_weights(call)[0, 0] @ call.v[0, 0]) == pytest.approx(0.7615941560, abs=1e-9)  # type: ignore[index]
    found = tallied(call)
    assert found.listens == pytest.approx((0.1192029220, 0.8807970780), abs=1e-9)


def test_n12_influence_and_ignored_references() -> None:
    found = tallied(base_case(-1.0, 1.0))
    assert found.influence == pytest.approx((0.2384058440, 1.7615941560), abs=1e-9)
    assert found.ignored == () and found.output_size == pytest.approx(math.tanh(1.0))
    third = tallied(base_case(-1.0, 1.0, 900.0))
    assert third.ignored == (2,) and "Ignored everywhere: reference 2" in third.text
    tokens = base_case(-1.0, 1.0, 1.0, -1.0)
    grouped = Call(**{**tokens.__dict__, "references": (0, 1, 1, 0), "names": ("left", "right")})
    assert tallied(grouped).influence == pytest.approx((0.2384058440, 1.7615941560), abs=1e-9)
    assert tallied(grouped).references == ("left", "right")


def test_n20_distance_weights() -> None:
    q, k = torch.zeros(1, 1, 1, 2), torch.tensor([[1.0, 0.0], [0.0, 2.0]])[None, None]
    weights = attention_weights(Call("layer", q, k, scale=1.0, kernel="gaussian"))
    torch.testing.assert_close(
        weights.flatten(), torch.tensor([0.8175744762, 0.1824255238], dtype=torch.float64), atol=1e-9, rtol=0
    )
    dot = measure([Call("layer", q, k, scale=1.0)])[0]
    assert dot.n_eff == pytest.approx(2.0) and dot.n_eff_nw == pytest.approx(1 / (0.8175744762**2 + 0.1824255238**2))


def test_n28_n_eff_is_of_normalised_weights_and_survives_extreme_logits() -> None:
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    (h,) = measure([Call("layer", q, torch.tensor([-1000.0, -1001.0]).double().reshape(1, 1, 2, 1), scale=1.0)])
    assert h.n_eff == pytest.approx(1.6480542737, abs=1e-9)
    (one,) = measure(
        [Call("layer", q, torch.zeros(1, 1, 2, 1).double(), mask=torch.tensor([True, False])[None, None, None])]
    )
    assert one.n_eff == 1.0 and one.spearman is None
    assert measure([Call("layer", q, q, mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool))]) == []


def test_collapse_verdict_of_the_models_own_attention() -> None:
    eye = torch.eye(6)[None, None]
    assert tallied(Call("layer", 200.0 * eye, eye, eye)).verdict == "collapse"
    assert tallied(Call("layer", 0.0 * eye, eye, eye)).verdict == "uniform"
    assert tallied(Call("layer", 5.0 * eye, eye, eye)).verdict == "selective"


# ------------------------------------------------------------------------------------------------------ the recorder


def test_layers_steps_heads_and_time() -> None:
    model = Outer(multihead).eval()
    times = itertools.count(1)
    options = {"layers": "blocks.1", "steps": range(1, 3), "heads": [0, 2]}
    with torch.no_grad(), record(model, clock=lambda *_: {"t": next(times) / 10}, **options) as recorder:
        for _ in range(4):
            model(X, Y)
    result = recorder.compare()
    assert {(h.layer, h.step, h.head, h.t) for h in result.heads} == {
        ("blocks.1", s, h, (s + 1) / 10) for s in (1, 2) for h in (0, 2)
    }
    assert ProbeResult.from_json(result.to_json()) == result
    with pytest.raises(ValueError, match="format"):
        ProbeResult.from_dict({"format": 0})


def test_errors_and_nesting_restore_the_model() -> None:
    model = Outer(multihead)
    with pytest.raises(RuntimeError), record(model):
        model(X, Y[..., :3])
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert (
        torch.overrides._len_torch_function_stack() == 0
        if hasattr(torch.overrides, "_len_torch_function_stack")
        else True
    )
    with torch.no_grad(), record(model) as outer, record(model, layers="blocks.0") as inner:
        model(X, Y)
    assert len(outer.compare().heads) == 8 and len(inner.compare().heads) == 4
    with torch.no_grad(), torch.device("cpu"), record(model) as recorder:
        model(X, Y)
    assert len(recorder.compare().heads) == 8


def test_dropout_is_said_and_draws_are_the_models_own() -> None:
    module = Sdpa()
    q, k = drawn(1, 2, 5, 4), drawn(1, 2, 3, 4, seed=1)
    torch.manual_seed(3)
    want = module(q, k, k, dropout_p=0.5)
    torch.manual_seed(3)
    with record(module) as recorder:
        assert torch.equal(module(q, k, k, dropout_p=0.5), want)
    result = recorder.compare()
    assert result.heads[0].reproduction_error is None and any("dropout" in note for note in result.notes)


def test_a_record_that_is_not_what_the_model_did_is_refused() -> None:
    class Wrong(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k)

    module = Wrong()

    def spoil(call: Call) -> Call:
        return Call(**{**call.__dict__, "scale": 3.0})

    with record(module, annotate=spoil) as recorder:
        module(drawn(1, 2, 5, 4), drawn(1, 2, 3, 4, seed=1))
    with pytest.raises(ValueError, match="do not reproduce"):
        recorder.compare()
    assert any("against its own output" in n for n in recorder.compare(strict=False).notes)


def test_memory_is_bounded_and_said() -> None:
    """Fifty steps of a layer whose tensors are ten times the limit: statistics hold it, kept tensors are thinned."""
    module, limit = Sdpa(), 2**19
    q, k = drawn(1, 2, 256, 8), drawn(1, 2, 64, 8, seed=1)
    for keep in ("statistics", "tensors"):
        with record(module, keep=keep, limit=limit, queries="all") as recorder:
            for _ in range(50):
                module(q, k, k)
        one = q.numel() * 4 * 2 + k.numel() * 4 * 2
        assert recorder.store.peak <= limit + one and recorder.store.bytes <= limit
        result = recorder.compare()
        assert len(result.heads) == 100 and {h.step for h in result.heads} == set(range(50))
        if keep == "tensors":
            assert len(recorder.calls) < 50 or recorder.calls[0].q.shape[2] < 256
            assert any("queries were recorded" in note for note in result.notes)


def test_queries_are_drawn_by_seed_the_same_at_every_step() -> None:
    module, q, k = Sdpa(), drawn(1, 2, 200, 8), drawn(1, 2, 6, 8, seed=1)
    rows = []
    for seed in (0, 0, 1):
        with record(module, queries=20, seed=seed, keep="tensors") as recorder:
            module(q, k, k)
            module(2 * q, k, k)
        rows.append(recorder.calls[0].rows)
        assert recorder.calls[0].rows == recorder.calls[1].rows and recorder.calls[0].n_total == 200
        assert recorder.compare().heads[0].n_queries == 20
    assert rows[0] == rows[1] != rows[2]


def test_maps_lie_on_the_grid_that_is_given() -> None:
    module, k = Sdpa(), 50.0 * torch.eye(2)[None, None]
    q = torch.zeros(1, 1, 6, 2)
    q[..., :3, 0], q[..., 3:, 1] = 1.0, 1.0
    with record(module, references=(0, 1), names=("a", "b"), grid=(2, 3)) as recorder:
        module(q, k, k)
    (layer,) = recorder.compare().layers
    first, second = layer.maps
    assert (first.rows, first.columns) == (2, 3) and first.values == pytest.approx((1, 1, 1, 0, 0, 0), abs=1e-5)
    assert second.values == pytest.approx((0, 0, 0, 1, 1, 1), abs=1e-5) and layer.references == ("a", "b")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"keep": "all"}, "keep"), ({"queries": 0}, "queries"), ({"limit": 0}, "limit"), ({"draws": 0}, "draws"),
        ({"layers": ()}, "layers"),
    ],
)  # fmt: skip
def test_arguments_are_checked(options: dict, match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        record(nn.Linear(1, 1), **options)
    with pytest.raises(TypeError, match="model"):
        record("unet")  # type: ignore[arg-type]


def test_what_cannot_be_recorded_is_said_and_does_not_stop_the_model() -> None:
    model = nn.ModuleDict({"a": Sdpa(), "b": Sdpa()})
    q = drawn(2, 2, 3, 4)
    with record(model, branches=("x", "y")) as recorder:
        model["a"](q, q, q)
        model["b"](q[:1], q[:1], q[:1])  # a batch of one has no two halves
    with pytest.warns(UserWarning, match="b .*branches"):
        result = recorder.compare()
    assert any("b was not recorded" in note for note in result.notes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert {h.layer for h in recorder.compare().heads} == {"a"}


# --------------------------------------------------------------------------------------------- the page and the command


MODULE = """
import torch
from torch import nn

def cross():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True).eval()
    x, y = torch.randn(2, 6, 8), torch.randn(2, 4, 6)
    return layer, (x, y, y)

def several():
    layer, given = cross()
    return {"unet": layer}, lambda: [layer(*given) for _ in range(3)]

def nothing():
    return nn.Linear(2, 2), torch.zeros(1, 2)

def wrong():
    return 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "made_for_probing.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "made_for_probing", raising=False)
    return "made_for_probing"


def test_command_writes_the_record_and_a_page_that_stands_alone(module: str, capsys: pytest.CaptureFixture) -> None:
    options = ["--branches", "uncond", "cond", "--references", "0", "0", "1", "1", "--grid", "2", "3", "--out", "here"]
    assert main(["probe", "--module", f"{module}:cross", *options]) == 0
    result = ProbeResult.from_json(Path("here/result.json").read_text(encoding="utf-8"))
    assert {h.branch for h in result.heads} == {"cond"} and len(result.layers[0].maps) == 2
    page = Path("here/report.html").read_text(encoding="utf-8")
    assert len(page.encode()) <= 6e6 and page == render_probe(result)
    text = re.sub(r"<script>.*?</script>", "", page, flags=re.S)  # plotly.js names addresses that it never loads
    assert not re.search(r"""(src|href)=["']?https?:""", text)
    plots = json.loads(re.search(r'id="plots">(.*?)</script>', page, flags=re.S)[1])  # type: ignore[index]
    drawn = [p["data"][0]["z"] for p in plots if p["data"][0]["type"] == "heatmap"]
    assert [len(z) for z in drawn] == [2, 2] and np.allclose(np.add(*drawn), 1.0, atol=1e-4)
    assert "wrote here/report.html" in capsys.readouterr().out.replace("\n", "")
    assert main(["probe", "--module", f"{module}:several", "--out", "steps", "--json"]) == 0
    printed = ProbeResult.from_json(capsys.readouterr().out)
    assert {(h.layer, h.step) for h in printed.heads} == {("unet", s) for s in range(3)}


@pytest.mark.parametrize(
    ("name", "match"),
    [("nothing", "captured 0 in Linear"), ("wrong", "expected the function to return"), ("absent", "has no absent")],
)
def test_command_fails_in_one_line(module: str, name: str, match: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["probe", "--module", f"{module}:{name}"]) == 2
    said = capsys.readouterr().err
    assert match in said and said.count("\n") == 1 and not Path("probe").exists()


def test_page_shows_names_as_text_and_refuses_other_records(tmp_path: Path) -> None:
    k = torch.eye(4)[None, None]
    with record(Sdpa(), references=(0, 0, 1, 1), names=("<script>x", "b"), grid=(2, 2)) as recorder:
        recorder.add(Call("<img src=x>", k, k, k))
    result = recorder.compare()
    page = write_probe_report(result, tmp_path / "a.html").read_text(encoding="utf-8")
    assert "<img src=x>" not in page and "<script>x" not in page and "&lt;img src=x&gt;" in page
    with pytest.raises(TypeError, match="ProbeResult"):
        render_probe(3)  # type: ignore[arg-type]
