"""Pipelines of diffusers and IP-Adapters from local weights alone: nothing is downloaded, no file can run code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nwflow.probe.adapters import Adapter, check_adapter, read_adapter, recognise
from nwflow.probe.found import find_model

__all__ = ["load_adapter", "load_pipeline", "require_diffusers", "run_pipeline"]


def load_pipeline(folder: str | Path) -> Any:
    """The pipeline in a local folder, as ``save_pretrained`` writes it; weights in safetensors only.

    Raises:
        ValueError: no such folder, or no pipeline in it. ImportError: diffusers or transformers is not installed.
        OSError: weights that are missing or in a format that can run code.
    """
    folder = Path(folder).expanduser()
    index = folder / "model_index.json"
    if not index.is_file():
        raise ValueError(f"{folder}: expected the folder of a diffusers pipeline, found no model_index.json")
    try:
        name = json.loads(index.read_text()).get("_class_name")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{index}: expected a JSON object: {error}") from None
    if not isinstance(name, str):
        raise ValueError(f"{index}: expected the name of a class of diffusers, got {name!r}")
    diffusers = require_diffusers()
    if not hasattr(diffusers, name):
        raise ValueError(f"{index}: diffusers {diffusers.__version__} has no pipeline {name}")
    return getattr(diffusers, name).from_pretrained(folder, local_files_only=True, use_safetensors=True)


def load_adapter(pipeline: Any, path: str | Path, encoder: str | Path | None = None) -> Adapter:
    """Load an adapter's ``.safetensors`` file into a pipeline, after a check that both, and the encoder, fit.

    Args:
        pipeline: from :func:`load_pipeline`.
        path: the adapter, in any of its layouts.
        encoder: folder of the vision encoder; None: the pipeline's own, or ``image_encoder`` beside the file.

    Raises:
        ValueError: as :func:`read_adapter` and :func:`check_adapter`; no encoder; a FaceID adapter, which takes
            embeddings of faces that no part of a pipeline can make.
    """
    path = Path(path).expanduser()
    if not hasattr(pipeline, "load_ip_adapter"):
        raise ValueError(f"{type(pipeline).__name__}: this pipeline takes no IP-Adapter")
    state = read_adapter(path)
    found = recognise(state)
    if found.image_source == "identity" or found.kind == "faceid_plus":
        raise ValueError(f"{path}: {found.name} adapters take embeddings of faces, not images")
    name = _load_encoder(pipeline, found, path, encoder)
    check_adapter(state, pipeline, adapter_name=str(path), encoder_name=name)
    if found.kind == "sd3":
        pipeline.load_ip_adapter(state, image_encoder_folder=None, low_cpu_mem_usage=False)
    elif hasattr(pipeline, "unet"):
        pipeline.load_ip_adapter(state, subfolder="", weight_name="", image_encoder_folder=None)
    else:
        pipeline.load_ip_adapter(state, subfolder="", weight_name="")
    return found


def run_pipeline(
    pipeline: Any,
    images: Sequence[str | Path],
    prompt: str,
    *,
    negative_prompt: str | None = None,
    steps: int = 30,
    guidance: float | None = None,
    seed: int = 0,
    size: tuple[int, int] | None = None,
) -> Any:
    """One run with the images as references of the adapter: the pipeline's output, in latents.

    All images go to one adapter together: they are concatenated, never averaged.
    """
    import torch
    from PIL import Image

    if not images:
        raise ValueError("images: expected at least one reference image, got none")
    pictures = []
    for path in images:
        with Image.open(Path(path).expanduser()) as picture:
            pictures.append(picture.convert("RGB"))
    if type(pipeline).__name__.startswith("StableDiffusion3") and len(pictures) > 1:
        raise ValueError(f"images: expected one image, which is what adapters of SD3 take, got {len(pictures)}")
    options: dict[str, Any] = {} if guidance is None else {"guidance_scale": guidance}
    if negative_prompt is not None:
        options["negative_prompt"] = negative_prompt
    if size is not None:
        options |= {"height": size[0], "width": size[1]}
    given = pictures[0] if len(pictures) == 1 else [pictures]
    device = next(find_model(pipeline).parameters()).device
    generator = torch.Generator(device if device.type == "cuda" else "cpu").manual_seed(seed)
    return pipeline(
        prompt=prompt, ip_adapter_image=given, num_inference_steps=steps, generator=generator, output_type="latent",
        **options,
    )  # fmt: skip


def _load_encoder(pipeline: Any, adapter: Adapter, path: Path, folder: str | Path | None) -> str:
    """Give the pipeline its vision encoder, and say what it is called."""
    beside = path.parent / "image_encoder"
    own = getattr(pipeline, "image_encoder", None)
    if folder is None and own is None and beside.is_dir():
        folder = beside
    if folder is None:
        if own is None:
            raise ValueError(
                f"encoder: the pipeline has no image_encoder and there is none beside {path}; name a folder"
            )
        return "the pipeline's image_encoder"
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    require_diffusers()
    import transformers

    name = "SiglipVisionModel" if adapter.kind == "sd3" else "CLIPVisionModelWithProjection"
    model = getattr(transformers, name).from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
    size = model.config.image_size
    kind = "SiglipImageProcessor" if adapter.kind == "sd3" else "CLIPImageProcessor"
    shape = {"height": size, "width": size} if adapter.kind == "sd3" else {"shortest_edge": size}
    more = {} if adapter.kind == "sd3" else {"crop_size": {"height": size, "width": size}}
    pipeline.register_modules(image_encoder=model, feature_extractor=getattr(transformers, kind)(size=shape, **more))
    return str(folder)


def require_diffusers() -> Any:
    """The package, or ImportError with the command that installs it."""
    try:
        import diffusers
        import transformers  # noqa: F401  diffusers needs it for every pipeline with text
    except ImportError as error:
        raise ImportError(f'{error.name} is not installed: pip install "nwflow[probe]"') from None
    return diffusers
