"""IP-Adapters of diffusers, recorded: outputs bit for bit those without a probe, weights those of the model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

# transformers tells that its image processors run without torchvision; diffusers that some of its names are old.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

attention_processor = pytest.importorskip("diffusers.models.attention_processor")
import pipelines as tiny  # noqa: E402  it imports diffusers
from nwflow.attention import nw_weights  # noqa: E402
from nwflow.probe.capture import Capture  # noqa: E402
from nwflow.probe.diffusers import record_adapter  # noqa: E402
from nwflow.probe.scales import check_scale, set_scale  # noqa: E402

KINDS = ("IPAdapterAttnProcessor", "IPAdapterAttnProcessor2_0", "IPAdapterXFormersAttnProcessor")


class Layers(nn.Module):
    """Attention layers in a row, each with a processor; called as UNets call theirs."""

    def __init__(self, *processors: Any) -> None:
        super().__init__()
        build = attention_processor.Attention
        self.layers = nn.ModuleList(build(8, 6, heads=2, dim_head=4, bias=False) for _ in processors)
        for layer, processor in zip(self.layers, processors):
            layer.set_processor(processor)

    def forward(self, h: Tensor, states: Any, **options: Any) -> Tensor:
        for layer in self.layers:
            h = layer(h, encoder_hidden_states=states, **options)
        return h

    def set_attn_processor(self, processor: Any) -> None:
        for layer in self.layers:
            layer.set_processor(processor)


def adapter(kind: str = KINDS[1], tokens: tuple[int, ...] = (4,), scale: Any = 1.0, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    processor = getattr(attention_processor, kind)(8, 6, num_tokens=tokens, scale=scale)
    for p in processor.parameters():
        nn.init.normal_(p)  # attention that is far from uniform
    return processor


def states(*images: int, tokens: int = 4, rows: int = 2) -> tuple[Tensor, Tensor, list[Tensor]]:
    draw = torch.Generator().manual_seed(1)
    ip = [torch.randn(rows, n, tokens, 6, generator=draw) for n in images]
    return torch.randn(rows, 5, 8, generator=draw), torch.randn(rows, 3, 6, generator=draw), ip


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """xformers is for GPUs; its one function that is called, in plain operations (its scale is always 1 / sqrt(d))."""

    def attend(q: Tensor, k: Tensor, v: Tensor, attn_bias: Any = None, op: Any = None) -> Tensor:
        logits = q @ k.mT * q.shape[-1] ** -0.5
        return torch.softmax(logits if attn_bias is None else logits + attn_bias, -1) @ v

    monkeypatch.setattr(
        attention_processor, "xformers", SimpleNamespace(ops=SimpleNamespace(memory_efficient_attention=attend))
    )


@contextlib.contextmanager
def spied(module: nn.Module) -> Iterator[list[Tensor]]:
    """The weights that ``get_attention_scores`` returns, in order: what the plain processor really applied."""
    seen: list[Tensor] = []
    original = attention_processor.Attention.get_attention_scores

    def spy(self: Any, *args: Any) -> Tensor:
        seen.append(original(self, *args))
        return seen[-1]

    attention_processor.Attention.get_attention_scores = spy
    try:
        yield seen
    finally:
        attention_processor.Attention.get_attention_scores = original


# ---------------------------------------------------------------------------------------- transparency, every processor


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_output_is_that_of_a_run_without_probe_bit_for_bit(kind: str, masked: bool) -> None:
    model = Layers(adapter(kind, (4, 4), [0.7, 1.3]), adapter(kind, (4, 4), [0.2, 0.5], seed=1))
    h, text, ip = states(2, 3)
    options = {"ip_adapter_masks": [torch.rand(1, 2, 5, 1), torch.rand(1, 3, 5, 1)]} if masked else {}
    options["attention_mask"] = torch.randn(2, 1, 3)
    before = dict(model.state_dict())
    plain = model(h, (text, ip), **options)
    with record_adapter(model) as probe:
        probed = model(h, (text, ip), **options)
        assert list(model.state_dict()) == list(before)
    assert torch.equal(plain, probed)
    assert all(
        value is model.state_dict()[name] or torch.equal(value, model.state_dict()[name])
        for name, value in before.items()
    )
    assert max(probe.errors.values()) < 1e-6
    assert len(probe.captures) == 2 * (5 if masked else 2)


def test_no_hook_is_left_after_success_or_error() -> None:
    model = Layers(adapter(), adapter(seed=1))
    h, text, ip = states(1)
    count: Callable[[], int] = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())  # noqa: E731
    with record_adapter(model):
        model(h, (text, ip))
        assert count() > 0
    assert count() == 0
    with pytest.raises(RuntimeError), record_adapter(model):
        model(h, (text, [torch.zeros(2, 1, 4, 7)]))  # the wrong width: the matrix product inside fails
    assert count() == 0
    with record_adapter(model) as probe:  # and nothing of the failed call is left over
        model(h, (text, ip))
    assert len(probe.captures) == 2


@pytest.mark.parametrize("images", [1, 3])
def test_recorded_weights_are_those_that_the_processor_applied(images: int) -> None:
    model = Layers(adapter(KINDS[0]))
    h, text, ip = states(images)
    with record_adapter(model) as probe, spied(model) as seen:
        model(h, (text, ip))
    applied = seen[1].unflatten(0, (2, 2))  # text first
    torch.testing.assert_close(probe.captures[0].weights(), applied, rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------------------- cases from use


@pytest.mark.parametrize("legacy", [False, True])
def test_n01_tuples_and_the_legacy_tensor(legacy: bool) -> None:
    model = Layers(adapter())
    h, text, ip = states(1 if legacy else 2)
    given = torch.cat([text, ip[0][:, 0]], 1) if legacy else (text, ip)
    plain = model(h, given)
    with record_adapter(model) as probe:
        assert torch.equal(plain, model(h, given))
    weights = probe.captures[0].weights()
    assert weights.shape == (2, 2, 5, 4 if legacy else 8)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 5))


def test_n02_replaced_processors_and_models_without_any() -> None:
    h, text, ip = states(1)
    model = Layers(adapter(), adapter(seed=1))

    def replaced() -> None:
        with record_adapter(model):
            model.set_attn_processor(attention_processor.AttnProcessor2_0())
            model(h, text)

    found = r"0 captures in 1 model calls: .*replaced.* 2 expected, 0 found now \(2 AttnProcessor2_0\)"
    with pytest.raises(ValueError, match=found):
        replaced()
    with (
        pytest.raises(ValueError, match="expected a loaded IP-Adapter, found 2 AttnProcessor2_0"),
        record_adapter(model),
    ):
        pass
    with pytest.raises(ValueError, match="never called"), record_adapter(Layers(adapter())):
        pass
    off = Layers(adapter(scale=0.0))
    with pytest.raises(ValueError, match="its scale is 0"), record_adapter(off):
        off(h, (text, ip))
    with pytest.raises(ValueError, match=r"none of the 1 adapted layers: layers\.0"), record_adapter(off, layers="x.*"):
        pass


def test_n02_a_layer_that_was_replaced_on_the_way_is_named() -> None:
    h, text, ip = states(1)
    model = Layers(adapter(), adapter(seed=1))
    model.forward = lambda: model.layers[0](h, encoder_hidden_states=(text, ip))  # type: ignore[method-assign]
    message = r"1 of 2 adapted layers were never captured: layers\.1"
    with pytest.warns(UserWarning, match=message), record_adapter(model):
        model()


def test_n03_guidance_halves_are_kept_apart() -> None:
    model = Layers(adapter())
    h, text, ip = states(1)
    ip[0][0] = ip[0][0, :, :1]  # uncond: four equal tokens
    ip[0][1, 0, 0] = 1e3 * ip[0][1, 0, 0]
    k = model.layers[0].processor.to_k_ip[0].weight
    with torch.no_grad():  # cond: the first token's key is along every query and very long
        model.layers[0].to_q.weight[:] = 0.0
        model.layers[0].to_q.weight[:, 0] = k @ ip[0][1, 0, 0]
    h[..., 0] = 1.0
    with record_adapter(model, guided=True, check=False) as probe:
        model(h, (text, ip))
    n_eff = lambda w: w.square().sum(-1).reciprocal()  # noqa: E731
    assert [c.branches for c in probe.captures] == [("cond",)]
    torch.testing.assert_close(n_eff(probe.captures[0].weights()), torch.ones(1, 2, 5))
    with record_adapter(model, guided=True, half="both", check=False) as probe:
        model(h, (text, ip))
    weights = probe.captures[0].weights()
    assert probe.captures[0].branches == ("uncond", "cond")
    torch.testing.assert_close(weights[0], torch.full((2, 5, 4), 0.25), rtol=0, atol=1e-3)  # very long queries
    assert n_eff(weights.mean(0))[0, 0].item() == pytest.approx(2.2857142857, abs=1e-3)  # what averaging would give
    with (
        pytest.raises(ValueError, match=r"batch of 2 equal parts, \[uncond, cond\], got 3 rows"),
        record_adapter(model, guided=True),
    ):
        model(torch.zeros(3, 5, 8), (torch.zeros(3, 3, 6), [torch.zeros(3, 1, 4, 6)]))


@pytest.mark.parametrize(
    ("shape", "owners"),
    [((2, 1, 4, 6), (0,) * 4), ((2, 3, 4, 6), (0,) * 4 + (1,) * 4 + (2,) * 4), ((2, 4, 6), (0,) * 4)],
)
def test_n04_image_states_of_three_and_four_axes(shape: tuple[int, ...], owners: tuple[int, ...]) -> None:
    model = Layers(adapter())
    h, text, _ = states(1)
    ip = torch.randn(shape)
    with record_adapter(model) as probe:
        model(h, (text, [ip]))
    (capture,) = probe.captures
    assert capture.references == owners and capture.weights().shape[-1] == len(owners)
    by_image = capture.by_reference()
    torch.testing.assert_close(by_image, capture.weights().unflatten(-1, (-1, 4)).sum(-1))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("kind", KINDS)
def test_n05_masks_give_each_image_its_own_softmax(kind: str) -> None:
    model = Layers(adapter(kind))
    h, text, ip = states(1)
    twice, ones = [ip[0].repeat(1, 2, 1, 1)], [torch.ones(1, 2, 5, 1)]
    single = model(h, (text, ip))
    with record_adapter(model) as joint:
        torch.testing.assert_close(model(h, (text, twice)), single, rtol=0, atol=1e-6)
    with record_adapter(model) as separate:
        masked = model(h, (text, twice), ip_adapter_masks=ones)
    model.layers[0].processor.scale = [2.0]
    torch.testing.assert_close(masked, model(h, (text, ip)), rtol=0, atol=1e-5)

    assert [c.semantics for c in joint.captures] == ["joint"]
    torch.testing.assert_close(joint.captures[0].weights().sum(-1), torch.ones(2, 2, 5))
    torch.testing.assert_close(joint.captures[0].by_reference(), torch.full((2, 2, 5, 2), 0.5))
    assert [(c.semantics, c.part, set(c.references)) for c in separate.captures] == [
        ("separate", "adapter 0, image 0", {0}), ("separate", "adapter 0, image 1", {1})
    ]  # fmt: skip
    total = sum(c.weights().sum(-1) * c.region[:, None] for c in separate.captures)
    torch.testing.assert_close(total, torch.full((2, 2, 5), 2.0))  # the number of images


def test_masks_are_recorded_at_the_queries_resolution() -> None:
    model = Layers(adapter())
    text, ip = states(1)[1], [torch.randn(2, 2, 4, 6)]
    h = torch.randn(2, 16, 8)
    masks = torch.zeros(1, 2, 8, 8)
    masks[0, 0, :, :4], masks[0, 1, :4] = 1.0, 1.0  # the left half; the upper half
    with record_adapter(model) as probe:
        out = model(h, (text, ip), ip_adapter_masks=[masks])
    left, upper = (c.region[0].reshape(4, 4) for c in probe.captures)
    assert torch.equal(left.round(), torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 4))  # diffusers reduces by bicubic filters
    assert torch.equal(upper, left.mT)
    model.layers[0].processor.scale = [0.0]
    text_only = model(h, (text, ip))
    to_out = model.layers[0].to_out[0]
    image = sum(c.added() for c in probe.captures)
    torch.testing.assert_close(out - text_only, image @ to_out.weight.mT, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_n08_tuples_of_joint_processors_pass_as_they_are(length: int) -> None:
    made: list[tuple[Tensor, ...]] = []

    class Dummy(attention_processor.IPAdapterAttnProcessor2_0):
        def __call__(self, attn: Any, hidden_states: Tensor, **options: Any) -> Any:
            super().__call__(attn, hidden_states, **options)
            made.append(tuple(torch.zeros(1) for _ in range(length)))
            return made[-1] if length > 1 else made[-1][0]

    model = Layers(adapter())
    model.layers[0].set_processor(Dummy(8, 6))
    h, text, ip = states(1)
    with record_adapter(model, check=False):
        out = model(h, (text, ip))
    assert out is (made[0] if length > 1 else made[0][0])


def test_n10_references_are_concatenated_and_never_averaged() -> None:
    x, two = torch.tensor([[[[0.5]]]], dtype=torch.float64), torch.tensor([[[[-1.0], [1.0]]]], dtype=torch.float64)
    both = Capture("layer", x, two, two, scale=2.0, references=(0, 1))  # h^2 = 1 / 2 at x / t with t = 1 / 2
    assert both.added().item() == pytest.approx(math.tanh(1.0), abs=1e-12)
    torch.testing.assert_close(both.weights()[0, 0, 0], torch.tensor([0.1192029220, 0.8807970780], dtype=torch.float64))
    mean = Capture("layer", x, two.mean(2, keepdim=True), two.mean(2, keepdim=True), scale=2.0, references=(0,))
    assert mean.added().item() == 0.0
    model = Layers(adapter())
    h, text, ip = states(2)
    with record_adapter(model) as probe:
        out = model(h, (text, ip))
    assert set(probe.captures[0].references) == {0, 1}
    assert not torch.allclose(out, model(h, (text, [ip[0].mean(1, keepdim=True)])), atol=1e-2)


def test_n13_what_a_list_of_scales_means() -> None:
    model = Layers(adapter())
    message = r"expected 1 entry, one for each loaded adapter, got 2.*nested, \[\[0\.4, 0\.4\]\], and need masks"
    with pytest.raises(ValueError, match=message):
        check_scale(model, [0.4, 0.4], images=[2])
    assert check_scale(model, [[0.4, 0.4]], images=[2]).meaning == "[0.4, 0.4] for the images of adapter 0, with masks"
    assert check_scale(model, 0.4, images=[2]).meaning == "0.4 for every adapter, layer and image"
    assert check_scale(Layers(adapter(tokens=(4, 4))), [0.4, 0.6]).values == [0.4, 0.6]
    with pytest.raises(ValueError, match="expected 2 numbers for adapter 0, one for each of its images, got 3"):
        check_scale(model, [[0.4, 0.4, 0.4]], images=[2])
    with pytest.raises(ValueError, match="without masks all images share one softmax"):
        check_scale(model, [[0.4, 0.4]], images=[2], masked=False)
    with pytest.raises(ValueError, match="found none"):
        check_scale(Layers(attention_processor.AttnProcessor2_0()), 0.4)


# ----------------------------------------------------------------------------------------------------- whole pipelines


@pytest.fixture(scope="module")
def sd() -> Any:
    return tiny.load(tiny.unet_pipeline())


@pytest.fixture(scope="module")
def sdxl() -> Any:
    return tiny.load(tiny.unet_pipeline(sdxl=True))


@pytest.fixture(scope="module")
def flux() -> Any:
    return tiny.flux_pipeline()


@pytest.fixture(scope="module")
def sd3() -> Any:
    return tiny.sd3_pipeline()


def check_identity(captures: list[Capture]) -> None:
    """Softmax of the model's logits = NW weights at h^2 = 1 / scale with the key-norm prior, every head and query."""
    for c in captures:
        columns = torch.tensor([r >= 0 for r in c.references])
        everything = nw_weights(c.q, c.k, c.bandwidth, "key_norm")
        torch.testing.assert_close(everything[..., columns], c.weights(normalised=False), rtol=0, atol=1e-5)
        among = nw_weights(c.q, c.k[..., columns, :], c.bandwidth, "key_norm")
        torch.testing.assert_close(among, c.weights(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["sd", "sdxl", "flux", "sd3"])
def test_pipelines_run_unchanged_and_every_head_obeys_the_identity(name: str, request: pytest.FixtureRequest) -> None:
    pipe = request.getfixturevalue(name)
    run = {"flux": tiny.run_flux, "sd3": tiny.run_sd3}.get(name, tiny.run)
    plain = run(pipe)
    with record_adapter(pipe) as probe:
        assert torch.equal(plain, run(pipe))
    assert max(probe.errors.values()) < 2e-6
    check_identity(probe.captures)
    assert {c.step for c in probe.captures} == {0, 1}
    assert all(c.branches == ("cond",) and c.q.shape[0] == 1 for c in probe.captures)
    assert all(c.grid is not None and math.prod(c.grid) == c.q.shape[2] for c in probe.captures)
    spread = torch.stack([c.weights().amax(-1).mean() for c in probe.captures])
    assert bool((spread > 1.2 / probe.captures[0].weights().shape[-1]).all())  # no test on uniform weights
    for c in probe.captures:
        assert c.t is not None and c.alpha is not None and c.sigma is not None and c.time is not None
        if name in ("sd", "sdxl"):
            cumulative = float(pipe.scheduler.alphas_cumprod[int(c.time)])
            assert (c.alpha, c.sigma) == pytest.approx((cumulative**0.5, (1 - cumulative) ** 0.5), abs=1e-6)
        else:
            assert (c.alpha, c.sigma) == pytest.approx((1 - c.time / 1000, c.time / 1000), abs=1e-6)


def test_flux_keeps_the_two_runs_of_true_guidance_apart(flux: Any) -> None:
    plain = tiny.run_flux(flux, true_cfg=2.0, images=2)
    with record_adapter(flux, half="both") as probe:
        assert torch.equal(plain, tiny.run_flux(flux, true_cfg=2.0, images=2))
    assert [(c.step, c.branches) for c in probe.captures] == [
        (0, ("cond",)), (0, ("uncond",)), (1, ("cond",)), (1, ("uncond",))
    ]  # fmt: skip
    assert probe.captures[0].references == (0,) * 4 + (1,) * 4 and probe.captures[0].grid == (4, 3)
    with record_adapter(flux) as probe:
        tiny.run_flux(flux, true_cfg=2.0)
    assert [c.branches for c in probe.captures] == [("cond",)] * 2


def test_sd3_references_share_the_softmax_with_the_image(sd3: Any) -> None:
    with record_adapter(sd3, half="both") as probe:
        tiny.run_sd3(sd3)
    for c in probe.captures:
        assert c.semantics == "with_own" and c.references.count(-1) == c.q.shape[2]
        mass = c.mass()
        assert bool((mass > 0).all() and (mass < 1).all())
        torch.testing.assert_close(c.weights(normalised=False), c.weights() * mass[..., None])


@pytest.mark.parametrize(
    ("kind", "tokens", "width"),
    [("base", 4, (24,)), ("full", 3, (3, 16)), ("plus", 7, (5, 16)), ("faceid", 4, (12,))],
)
def test_token_counts_of_the_adapter_kinds(kind: str, tokens: int, width: tuple[int, ...]) -> None:
    pipe = tiny.unet_pipeline(encoder=False)
    tiny.load(pipe, tiny.unet_adapter(pipe.unet, kind, tokens))
    embeds = torch.randn(2, 2, *width)
    plain = tiny.run(pipe, [embeds], steps=1)
    with record_adapter(pipe) as probe:
        assert torch.equal(plain, tiny.run(pipe, [embeds], steps=1))
    assert {c.references for c in probe.captures} == {(0,) * tokens + (1,) * tokens}
    check_identity(probe.captures)


def test_several_adapters_scale_zero_masks_and_layer_choice(sdxl: Any) -> None:
    pipe = tiny.unet_pipeline()
    tiny.load(pipe, tiny.unet_adapter(pipe.unet), tiny.unet_adapter(pipe.unet, "plus", 6, seed=8))
    set_scale(pipe, [0.8, 0.0])
    embeds = [tiny.image_embeds(2), torch.randn(2, 1, 5, 16)]
    plain = tiny.run(pipe, embeds)
    with record_adapter(pipe, layers="up_blocks*", steps=[1]) as probe:
        assert torch.equal(plain, tiny.run(pipe, embeds))
    assert {(c.adapter, c.strength, c.step) for c in probe.captures} == {(0, 0.8, 1)}
    assert all(c.layer.startswith("up_blocks") for c in probe.captures)
    set_scale(pipe, [[0.5, 0.25], 1.0])
    masks = [torch.rand(1, 2, 16, 16).round(), torch.ones(1, 1, 16, 16)]
    options = {"cross_attention_kwargs": {"ip_adapter_masks": masks}}
    plain = tiny.run(pipe, embeds, **options)
    with record_adapter(pipe) as probe:
        assert torch.equal(plain, tiny.run(pipe, embeds, **options))
    assert {(c.part, c.strength) for c in probe.captures} == {
        ("adapter 0, image 0", 0.5), ("adapter 0, image 1", 0.25), ("adapter 1, image 0", 1.0)
    }  # fmt: skip
    assert max(probe.errors.values()) < 2e-6


def test_scales_unloading_and_processors_keep_working_while_recorded() -> None:
    pipe = tiny.load(tiny.unet_pipeline())
    with record_adapter(pipe) as probe:
        pipe.set_ip_adapter_scale(0.3)
        tiny.run(pipe, steps=1)
        first = len(probe.captures)
        pipe.unet.set_attn_processor(pipe.unet.attn_processors)
        tiny.run(pipe, steps=1)
        pipe.unload_ip_adapter()
        assert all(type(p).__name__ == "AttnProcessor2_0" for p in pipe.unet.attn_processors.values())
        tiny.load(pipe)
        tiny.run(pipe, steps=1)
    assert {c.strength for c in probe.captures[:first]} == {0.3} and {
        c.strength for c in probe.captures[2 * first :]
    } == {1.0}
    assert len(probe.captures) == 3 * first


def test_slicing_that_drops_the_adapter_is_reported(sd: Any) -> None:
    """diffusers replaces every processor when attention is sliced; the adapter then fails or is silent."""
    pipe = tiny.load(tiny.unet_pipeline())
    pipe.enable_attention_slicing(1)
    with (
        pytest.raises(ValueError, match=r"expected a loaded IP-Adapter, found \d+ SlicedAttnProcessor"),
        record_adapter(pipe),
    ):
        pass


def test_offloading_keeps_its_numbers() -> None:
    from accelerate import cpu_offload

    pipe = tiny.load(tiny.unet_pipeline())
    plain = tiny.run(pipe, steps=1)
    cpu_offload(pipe.unet, torch.device("cpu"))
    offloaded = tiny.run(pipe, steps=1)
    with record_adapter(pipe) as probe:
        assert torch.equal(offloaded, tiny.run(pipe, steps=1))
    assert torch.equal(plain, offloaded) and max(probe.errors.values()) < 2e-6


def test_compiled_models_run_eagerly_while_recorded() -> None:
    model = Layers(adapter())
    h, text, ip = states(1)
    eager = model(h, (text, ip))
    compiled = torch.compile(model, backend="eager")
    compiled(h, (text, ip))
    with record_adapter(compiled) as probe:
        assert torch.equal(eager, compiled(h, (text, ip)))
    assert len(probe.captures) == 1
    torch.testing.assert_close(compiled(h, (text, ip)), eager)


def test_half_precision_is_recorded_within_its_rounding(sd: Any) -> None:
    model = Layers(adapter()).to(torch.bfloat16)
    h, text, ip = (
        u.to(torch.bfloat16) if isinstance(u, Tensor) else [v.to(torch.bfloat16) for v in u] for u in states(2)
    )
    plain = model(h, (text, ip))
    with record_adapter(model) as probe:
        assert torch.equal(plain, model(h, (text, ip)))
    (capture,) = probe.captures
    assert capture.weights().dtype == torch.float32 and max(probe.errors.values()) < 0.02
    check_identity([capture])
