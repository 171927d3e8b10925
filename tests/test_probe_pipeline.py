"""``nwflow probe --pipeline``: a pipeline, an adapter and images from local files, and what goes wrong, in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

pytest.importorskip("diffusers")
from PIL import Image  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer  # noqa: E402

import pipelines as tiny  # noqa: E402  it imports diffusers
from nwflow.cli import main  # noqa: E402
from nwflow.probe import ProbeResult, record_adapter  # noqa: E402
from nwflow.probe.pipelines import load_adapter, load_pipeline, run_pipeline  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``pipe/`` (no image encoder), ``adapter.safetensors``, ``image_encoder/`` beside it, and two pictures."""
    root = tmp_path_factory.mktemp("local")
    letters = [chr(i) for i in range(97, 123)]
    words = [*letters, *(f"{c}</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    pipe = tiny.unet_pipeline(encoder=False)
    torch.manual_seed(30)
    config = CLIPTextConfig(
        vocab_size=len(words), hidden_size=tiny.CROSS, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, bos_token_id=52, eos_token_id=53, pad_token_id=53,
    )  # fmt: skip
    tokenizer = CLIPTokenizer(vocab={w: i for i, w in enumerate(words)}, merges=[], model_max_length=16)
    pipe.register_modules(text_encoder=CLIPTextModel(config).eval(), tokenizer=tokenizer)
    pipe.save_pretrained(root / "pipe", safe_serialization=True)
    state = tiny.unet_adapter(pipe.unet)
    save_file(
        {f"{part}.{k}": v for part, inner in state.items() for k, v in inner.items()}, root / "adapter.safetensors"
    )
    tiny.image_encoder().save_pretrained(root / "image_encoder")
    for i, name in enumerate(("a.png", "b.png")):
        pixels = torch.randint(0, 256, (40, 40, 3), generator=torch.Generator().manual_seed(i), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(root / name)
    return root


def command(folder: Path, *more: str, images: Sequence[str] = ("a.png", "b.png")) -> list[str]:
    return [
        "probe", "--pipeline", str(folder / "pipe"), "--ip-adapter", str(folder / "adapter.safetensors"),
        "--image", *(str(folder / name) for name in images), "--prompt", "a cat", "--inference-steps", "2",
        "--image-size", "16", "16", *more,
    ]  # fmt: skip


def test_a_run_from_local_files(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(folder, "--out", str(tmp_path / "out"), "--scale", "0.7")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "concatenated and not averaged: 2" in said and "scale 0.7 for every adapter, layer and image" in said
    result = ProbeResult.from_json((tmp_path / "out" / "result.json").read_text())
    assert {h.n_keys for h in result.heads} == {8} and {h.step for h in result.heads} == {0, 1}
    assert {h.branch for h in result.heads} == {"cond"} and max(h.identity_error for h in result.heads) < 1e-5
    assert {layer.references for layer in result.layers} == {("image 0", "image 1")}
    assert (tmp_path / "out" / "report.html").stat().st_size > 1000


def test_the_same_through_python_and_the_probe_changes_nothing(folder: Path) -> None:
    pipe = load_pipeline(folder / "pipe")
    assert load_adapter(pipe, folder / "adapter.safetensors").name == "base"
    images = [folder / "a.png", folder / "b.png"]
    plain = run_pipeline(pipe, images, "a cat", steps=1, size=(16, 16)).images
    with record_adapter(pipe) as probe:
        probed = run_pipeline(pipe, images, "a cat", steps=1, size=(16, 16)).images
    assert (
        torch.equal(torch.as_tensor(plain), torch.as_tensor(probed))
        and probe.captures[0].references == (0,) * 4 + (1,) * 4
    )


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    text = capsys.readouterr().err
    assert len(text.strip().splitlines()) == 1 and "Traceback" not in text
    return text


def test_n15_n13_n16_and_missing_files_are_one_line(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = ("--out", str(tmp_path / "out"))
    tiny.image_encoder(projection=40).save_pretrained(tmp_path / "other_encoder")
    capsys.readouterr()  # the bar of saving
    text = complaint(command(folder, *out, "--image-encoder", str(tmp_path / "other_encoder")), capsys)
    assert "takes image features of width 24" in text and "other_encoder gives width 40" in text
    text = complaint(command(folder, *out, "--scale", "0.4", "0.4"), capsys)
    assert "expected 1 entry, one for each loaded adapter, got 2" in text
    save_file({"conv.weight": torch.zeros(1)}, tmp_path / "odd.safetensors")
    text = complaint(command(folder, *out, "--ip-adapter", str(tmp_path / "odd.safetensors")), capsys)
    assert "odd.safetensors: state: expected the keys of an IP-Adapter" in text and "conv.weight" in text
    assert "no model_index.json" in complaint(["probe", "--pipeline", str(tmp_path), *command(folder)[3:]], capsys)
    assert "--grid: the pipeline says that itself" in complaint(command(folder, *out, "--grid", "2", "2"), capsys)
    text = complaint(["probe", "--module", "x:y", "--prompt", "a cat"], capsys)
    assert "--prompt: has a meaning with --pipeline only" in text
    assert "got both" in complaint(command(folder, "--module", "x:y"), capsys)
    assert "expected a value with --pipeline" in complaint(["probe", "--pipeline", str(folder / "pipe")], capsys)
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_pickled_weights_and_code_are_refused(folder: Path, tmp_path: Path, capsys: Any) -> None:
    copy = tmp_path / "pipe"
    shutil.copytree(folder / "pipe", copy)
    weights = next((copy / "unet").glob("*.safetensors"))
    torch.save({}, copy / "unet" / "diffusion_pytorch_model.bin")
    weights.unlink()
    arguments = command(folder, "--out", str(tmp_path / "out"))
    arguments[2] = str(copy)
    assert "safetensors" in complaint(arguments, capsys)
    index = json.loads((copy / "model_index.json").read_text())
    (copy / "model_index.json").write_text(json.dumps(index | {"_class_name": ["pipeline", "Mine"]}))
    assert "expected the name of a class of diffusers" in complaint(arguments, capsys)
