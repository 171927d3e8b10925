"""``nwflow probe --pipeline``: the options, and a recorded run of a diffusers pipeline with an IP-Adapter."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from tyro.conf import arg

from nwflow.cli.options import optional
from nwflow.probe import ProbeResult, record_adapter, set_scale
from nwflow.probe.pipelines import load_adapter, load_pipeline, require_diffusers, run_pipeline

__all__ = ["PipelineOptions", "probe_pipeline"]


@dataclass(frozen=True)
class PipelineOptions:
    """A diffusers pipeline with an IP-Adapter, from local files; no network."""

    pipeline: Annotated[str | None, optional("FOLDER")] = None
    """Folder of a diffusers pipeline (model_index.json, weights in safetensors)."""
    ip_adapter: Annotated[str | None, optional("FILE")] = None
    """The adapter, a .safetensors file in any of the published layouts."""
    image_encoder: Annotated[str | None, optional("FOLDER")] = None
    """Its vision encoder (default: the pipeline's, or image_encoder/ beside the adapter)."""
    image: Annotated[tuple[str, ...], arg(metavar="FILE [FILE ...]", help_behavior_hint="")] = ()
    """Reference images; several are concatenated, never averaged."""
    prompt: Annotated[str, arg(metavar="TEXT", help_behavior_hint="")] = ""
    """The prompt."""
    negative_prompt: Annotated[str | None, optional("TEXT")] = None
    """The negative prompt."""
    inference_steps: int = 30
    """Denoising steps of the run."""
    guidance_scale: Annotated[float | None, optional("W")] = None
    """Classifier-free guidance (the pipeline's default when left out)."""
    scale: Annotated[tuple[float, ...] | None, optional("S [S ...]")] = None
    """Strength of the adapter; for Flux also one for each block."""
    half: Literal["cond", "uncond", "both"] = "cond"
    """Which half of the batch of guidance; they are never averaged."""
    image_size: Annotated[tuple[int, int] | None, optional("HEIGHT WIDTH")] = None
    """Size of the image to make (the pipeline's default when left out)."""

    def given(self) -> list[str]:
        """Options that were set, but for ``--pipeline``: they mean nothing without it."""
        plain = PipelineOptions()
        names = [f.name for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)]
        return [f"--{name.replace('_', '-')}" for name in names if name != "pipeline"]


def probe_pipeline(options: PipelineOptions, recorded: dict[str, Any]) -> ProbeResult:
    """Load, check, run and compare; ``recorded`` are the options of :func:`nwflow.probe.record`."""
    for name in ("pipeline", "ip_adapter", "image"):
        if not getattr(options, name):
            raise ValueError(f"--{name.replace('_', '-')}: expected a value with --pipeline, got none")
    for name in ("branches", "references", "grid"):
        if recorded.get(name) is not None:
            raise ValueError(f"--{name}: the pipeline says that itself; leave it out with --pipeline")
    _no_bars()
    pipeline = load_pipeline(options.pipeline)  # type: ignore[arg-type]
    pipeline.set_progress_bar_config(disable=True)
    adapter = load_adapter(pipeline, options.ip_adapter, options.image_encoder)  # type: ignore[arg-type]
    values: Any = None if options.scale is None else list(options.scale)
    values = values[0] if values is not None and len(values) == 1 else values
    scales = None if values is None else set_scale(pipeline, values, images=[len(options.image)])
    names = ("heads", "queries", "limit", "seed")
    with record_adapter(
        pipeline, layers=recorded["layers"], steps=recorded["steps"], half=options.half, keep="statistics",
        **{name: recorded[name] for name in names},
    ) as probe:  # fmt: skip
        run_pipeline(
            pipeline, options.image, options.prompt, negative_prompt=options.negative_prompt,
            steps=options.inference_steps, guidance=options.guidance_scale, seed=recorded["seed"],
            size=options.image_size,
        )  # fmt: skip
    result = probe.compare("all" if options.half == "both" else None)
    said = f"Adapter: {adapter.name}, {len(options.image)} reference images"
    said += "." if scales is None else f"; scale {scales.meaning}."
    return replace(result, notes=(said, *result.notes))


def _no_bars() -> None:
    """Loading is quick and has nothing to say."""
    require_diffusers().utils.logging.disable_progress_bar()
    import transformers

    transformers.utils.logging.disable_progress_bar()
