"""Adapters told apart by their keys, widths that do not fit, the exact head in an adapter's place, and the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

pytest.importorskip("diffusers")
from safetensors.torch import save_file  # noqa: E402

import pipelines as tiny  # noqa: E402  it imports diffusers
from nwflow.attention import nw_weights  # noqa: E402
from nwflow.probe import (  # noqa: E402
    check_adapter,
    exact_adapter,
    layer_features,
    read_adapter,
    recognise,
    record_adapter,
)

# ------------------------------------------------------------------------------------------------------------ the keys

EXPECTED = {
    "base": ("base", 4, 24, "image_embeds"),
    "full": ("full", None, 16, "hidden_states"),
    "plus": ("plus", 4, 16, "hidden_states"),
    "faceid": ("FaceID", 4, None, "identity"),
}


def layouts(projection: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    attention = {"1.to_k_ip.weight": torch.zeros(8, 32), "1.to_v_ip.weight": torch.zeros(8, 32)}

    def flat(image: str, ip: str) -> dict[str, Any]:
        return {f"{image}{k}": v for k, v in projection.items()} | {f"{ip}{k}": v for k, v in attention.items()}

    return {
        "nested": {"image_proj": projection, "ip_adapter": attention},
        "prefixes": flat("image_proj.", "ip_adapter."),
        "training": flat("image_proj_model.", "adapter_modules.") | {"unet.conv_in.weight": torch.zeros(1)},
        "projection alone": projection,
    }


@pytest.mark.parametrize("layout", ["nested", "prefixes", "training", "projection alone"])
@pytest.mark.parametrize("kind", EXPECTED)
def test_n16_adapters_are_told_by_their_keys(kind: str, layout: str) -> None:
    found = recognise(layouts(tiny.projection(kind))[layout])
    name, tokens, width, source = EXPECTED[kind]
    assert (found.name, found.tokens, found.image_width, found.image_source) == (name, tokens, width, source)
    assert found.cross_width == tiny.CROSS and found.layers == (0 if layout == "projection alone" else 1)


def test_n16_faceid_plus_lora_flux_sd3_and_what_is_none_of_them() -> None:
    plus = {f"perceiver_resampler.{n}.weight": torch.zeros(6, 9) for n in ("proj_in", "proj_out", "norm_out")}
    plus |= {"proj.0.weight": torch.zeros(20, 10), "proj.2.weight": torch.zeros(24, 20), "norm.weight": torch.zeros(6)}
    found = recognise(plus)
    assert (found.name, found.tokens, found.image_width, found.identity_width) == ("FaceID-plus", 4, 9, 10)
    lora = {"0.to_q_lora.down.weight": torch.zeros(4, 8), "0.to_q_lora.up.weight": torch.zeros(8, 4)}
    assert recognise({"image_proj": tiny.projection("faceid"), "ip_adapter": lora}).name == "FaceID with LoRA"
    assert recognise({"image_proj": plus, "ip_adapter": lora}).name == "FaceID-plus with LoRA"
    assert recognise(lora).name == "FaceID with LoRA"
    flux = {
        "ip_adapter_proj_model.proj.weight": torch.zeros(64, 24),
        "ip_adapter_proj_model.norm.weight": torch.ones(16),
    }
    flux["double_blocks.0.processor.ip_adapter_double_stream_k_proj.weight"] = torch.zeros(8, 16)
    assert (recognise(flux).name, recognise(flux).layers, recognise(flux).tokens) == ("base", 1, 4)
    time = {
        "latents": torch.zeros(1, 3, 64),
        "proj_in.weight": torch.zeros(64, 12),
        "time_embedding.linear_1.weight": 0,
    }
    assert (recognise(time).name, recognise(time).tokens) == ("SD3", 3)
    with pytest.raises(ValueError, match="got no keys at all"):
        recognise({})
    with pytest.raises(ValueError, match="got the keys conv.weight, norm.weight"):
        recognise({"conv.weight": torch.zeros(1), "norm.weight": torch.zeros(1)})


def test_files_are_safetensors_and_fit_the_loader(tmp_path: Path) -> None:
    pipe = tiny.unet_pipeline()
    state = tiny.unet_adapter(pipe.unet)
    path = tmp_path / "adapter.safetensors"
    save_file(layouts(state["image_proj"])["projection alone"], tmp_path / "alone.safetensors")
    save_file({f"{part}.{k}": v for part, inner in state.items() for k, v in inner.items()}, path)
    read = read_adapter(path)
    assert all(torch.equal(value, read[part][k]) for part, inner in state.items() for k, value in inner.items())
    embeds = tiny.run(tiny.load(pipe, read), steps=1)
    assert torch.equal(embeds, tiny.run(tiny.load(tiny.unet_pipeline(), state), steps=1))
    save_file({"conv.weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"other\.safetensors: .*got the keys conv\.weight"):
        read_adapter(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"expected a \.safetensors file"):
        read_adapter(tmp_path / "adapter.bin")


def test_n15_widths_that_do_not_fit_are_named_up_front() -> None:
    pipe = tiny.unet_pipeline()
    state = tiny.unet_adapter(pipe.unet)
    assert check_adapter(state, pipe).kind == "base"
    pipe.image_encoder = tiny.image_encoder(projection=40)
    message = r"a\.safetensors takes image features of width 24 \(image_embeds\), but encoder/ gives width 40"
    with pytest.raises(ValueError, match=message):
        check_adapter(state, pipe, adapter_name="a.safetensors", encoder_name="encoder/")
    pipe.image_encoder = tiny.image_encoder(hidden=20)
    with pytest.raises(ValueError, match="width 16 .hidden_states., but the image encoder gives width 20"):
        check_adapter(tiny.unet_adapter(pipe.unet, "plus"), pipe)
    pipe.image_encoder = None
    state["ip_adapter"] = {k: v[:, :20] for k, v in state["ip_adapter"].items()}
    with pytest.raises(ValueError, match="tokens of width 20, but the cross-attention of the pipeline takes width 32"):
        check_adapter(state, pipe)


# ------------------------------------------------------------------------------------------------- numbers of a probe


@pytest.fixture(scope="module")
def sd() -> Any:
    return tiny.load(tiny.unet_pipeline())


def test_compare_gives_every_head_and_the_identity_holds(sd: Any) -> None:
    with record_adapter(sd) as probe:
        tiny.run(sd, [tiny.image_embeds(2)])
    result = probe.compare()
    assert len(result.heads) == 2 * len(probe.captures)  # heads of 2
    assert max(h.identity_error for h in result.heads) < 1e-5
    assert {h.branch for h in result.heads} == {"cond"} and all(h.alpha is not None for h in result.heads)
    assert any("concatenated and not averaged: 2" in note for note in result.notes)
    capture = probe.captures[0]
    ours = nw_weights(capture.q, capture.k)  # h = d^(1/4), no prior
    tv = 0.5 * (ours - capture.weights()).abs().sum(-1).mean((0, 2))
    heads = list(result.select(layer=capture.layer, step=0))
    assert [h.total_variation for h in heads] == pytest.approx(tv.tolist(), abs=1e-5)
    assert [h.n_eff for h in heads] == pytest.approx(
        capture.weights().square().sum(-1).reciprocal().mean((0, 2)).tolist(), rel=1e-5
    )
    with record_adapter(sd, keep="statistics") as flat:
        tiny.run(sd, [tiny.image_embeds(2)])
    assert flat.compare().heads == result.heads


def test_n12_a_reference_without_influence_is_flagged(sd: Any) -> None:
    """Tokens of the second image far along -q: their weights vanish for every query."""
    module = sd.unet.get_submodule("mid_block.attentions.0.transformer_blocks.0.attn2")
    with torch.no_grad():
        module.processor.to_k_ip[0].weight[:, 0] *= 1e4
    states = torch.randn(1, 2, 4, tiny.CROSS)
    states[0, 0, :, 0], states[0, 1, :, 0] = 0.0, -1.0
    key = module.processor.to_k_ip[0].weight[:, 0]
    along = torch.linalg.lstsq(module.to_q.weight, key[:, None]).solution.T  # its query is the key
    h, text = along * (0.5 + torch.rand(1, 16, 1)), torch.randn(1, 5, tiny.CROSS)
    with record_adapter(sd, layers="mid_block*", guided=False) as probe:
        module(h, encoder_hidden_states=(text, [states]))  # the layer alone: no call of the UNet
    layer = probe.compare().layers[0]
    assert layer.ignored == (1,) and layer.listens[1] == 0.0
    with torch.no_grad():
        module.processor.to_k_ip[0].weight[:, 0] /= 1e4


# ------------------------------------------------------------------------------------------------------- the exact head


def test_exact_head_replaces_the_kernel_and_nothing_else() -> None:
    pipe = tiny.load(tiny.unet_pipeline())
    name = "mid_block.attentions.0.transformer_blocks.0.attn2"
    module = pipe.unet.get_submodule(name)
    before = dict(pipe.unet.state_dict())
    learned = tiny.run(pipe, steps=1)
    mixed: list[Tensor] = []
    handle = module.to_out[0].register_forward_pre_hook(lambda m, args: mixed.append(args[0]))
    with record_adapter(pipe, layers=name, half="both") as probe:
        tiny.run(pipe, steps=1)
    (capture,) = probe.captures
    with exact_adapter(pipe, layers="mid_block*") as names:
        exact = tiny.run(pipe, steps=1)
        assert list(pipe.unet.state_dict()) == list(before)
    handle.remove()
    assert names == [name] and not torch.allclose(learned, exact)
    assert torch.equal(tiny.run(pipe, steps=1), learned)  # everything is as before, to the bit
    text = mixed[0] - capture.added()  # mixed: before the exact head's hook in the first run, after it in the second
    w = nw_weights(capture.q, capture.k)
    image = (w @ capture.v).transpose(1, 2).flatten(2)
    assert len(mixed) == 2
    torch.testing.assert_close(mixed[1] - text, 0.0 * image, rtol=0, atol=1e-5)  # hooks run in order: text alone so far
    after: list[Tensor] = []
    with exact_adapter(pipe, layers="mid_block*"):
        handle = module.to_out[0].register_forward_hook(lambda m, args, out: after.append(args[0]))
        tiny.run(pipe, steps=1)
    handle.remove()
    torch.testing.assert_close(after[0] - text, image, rtol=0, atol=1e-5)


def test_exact_head_over_features_of_the_references() -> None:
    pipe = tiny.load(tiny.unet_pipeline())
    latents, text = torch.randn(3, 4, 8, 8), torch.randn(3, 5, tiny.CROSS)
    states = {"image_embeds": [torch.zeros(3, 1, tiny.CLIP)]}
    layers = "*attentions*"
    features = layer_features(pipe, latents, 100, text, added_cond_kwargs=states)
    assert {f.shape[-1] for f in features.values()} == {8, 16} and len(features) == 4
    name = "mid_block.attentions.0.transformer_blocks.0.attn2"
    module, seen = pipe.unet.get_submodule(name), []
    with exact_adapter(pipe, layers=layers, features=features, bandwidth=0.7, guided=False):
        handle = module.to_out[0].register_forward_hook(lambda m, args, out: seen.append(args[0]))
        inner = module.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
        pipe.unet(latents, 100, text, added_cond_kwargs=states)
        first = list(seen)
        seen.clear()
        pipe.set_ip_adapter_scale(0.0)
        pipe.unet(latents, 100, text, added_cond_kwargs=states)
    handle.remove(), inner.remove()
    x, s = first[0], features[name][None]
    logits = -(x[:, :, None].double() - s[:, None].double()).square().sum(-1) / (2 * 0.7**2)
    image = torch.softmax(logits, -1) @ s.double()
    pipe.set_ip_adapter_scale(0.0)
    again: list[Tensor] = []
    handle = module.to_out[0].register_forward_hook(lambda m, args, out: again.append(args[0]))
    module(x, encoder_hidden_states=(text, [torch.zeros(3, 1, 4, tiny.CROSS)]))
    handle.remove()
    torch.testing.assert_close(first[1].double() - again[0].double(), image, rtol=0, atol=1e-5)
    torch.testing.assert_close(module_text(module, seen[0], text), seen[1])  # strength 0: the text's part alone
    with (
        pytest.raises(ValueError, match=r"expected \(m, 16\), .*got \(4, 9\)"),
        exact_adapter(pipe, layers="mid*", features={name: torch.zeros(4, 9)}),
    ):
        pass
    with pytest.raises(ValueError, match="expected a UNet with an IP-Adapter"), exact_adapter(tiny.flux_pipeline()):
        pass


def module_text(module: Any, x: Tensor, text: Tensor) -> Tensor:
    """What goes into the output projection when the adapter is off."""
    kept: list[Tensor] = []
    handle = module.to_out[0].register_forward_hook(lambda m, args, out: kept.append(args[0]))
    module(x, encoder_hidden_states=(text, [torch.zeros(len(x), 1, 4, tiny.CROSS)]))
    handle.remove()
    return kept[0]
