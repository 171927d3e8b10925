"""Tiny diffusers pipelines with an IP-Adapter, built offline from random weights through the real loaders.

UNets of Stable Diffusion 1 and XL, Flux and SD3. Weights of adapters are large enough that their attention is far from
uniform. Prompts come as embeddings: no tokenizer is needed.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from diffusers.models.embeddings import IPAdapterTimeImageProjection
from diffusers.utils import logging
from torch import Tensor
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

logging.set_verbosity_error()  # "no image encoder is loaded", which is what these tests want
logging.disable_progress_bar()

CROSS, CLIP = 32, 24  # width of the text's states; of the image embedding


def draws(seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape, gain=1.0: gain * torch.randn(*shape, generator=generator)


def image_encoder(projection: int = CLIP, hidden: int = 16) -> CLIPVisionModelWithProjection:
    torch.manual_seed(3)
    config = CLIPVisionConfig(
        hidden_size=hidden, intermediate_size=32, projection_dim=projection, num_hidden_layers=2, num_attention_heads=2,
        image_size=32, patch_size=16,
    )  # fmt: skip
    return CLIPVisionModelWithProjection(config).eval()


def vae() -> AutoencoderKL:
    torch.manual_seed(4)
    model = AutoencoderKL(
        block_out_channels=(4, 4), in_channels=3, out_channels=3, latent_channels=4, norm_num_groups=2,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    return model.eval()


def unet(sdxl: bool = False) -> UNet2DConditionModel:
    torch.manual_seed(1)
    extra = {
        "addition_embed_type": "text_time", "addition_time_embed_dim": 8, "transformer_layers_per_block": (1, 2),
        "projection_class_embeddings_input_dim": 8 * 6 + CROSS, "use_linear_projection": True,
    }  # fmt: skip
    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    model = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=down if not sdxl else down[::-1], up_block_types=up if not sdxl else up[::-1],
        cross_attention_dim=CROSS, attention_head_dim=2, **(extra if sdxl else {}),
    )  # fmt: skip
    return model.eval()


def unet_pipeline(sdxl: bool = False, encoder: bool = True) -> Any:
    scheduler = DDIMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, clip_sample=False, steps_offset=1
    )
    parts = {
        "vae": vae(), "text_encoder": None, "tokenizer": None, "unet": unet(sdxl), "scheduler": scheduler,
        "image_encoder": image_encoder() if encoder else None,
        "feature_extractor": CLIPImageProcessor(size=32, crop_size=32),
    }  # fmt: skip
    if sdxl:
        pipe = StableDiffusionXLPipeline(**parts, text_encoder_2=None, tokenizer_2=None, add_watermarker=False)
    else:
        pipe = StableDiffusionPipeline(**parts, safety_checker=None, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def projection(kind: str, tokens: int = 4, hidden: int = 16, seed: int = 5) -> dict[str, Tensor]:
    """The image projection of an adapter, in the keys in which such adapters are published."""
    randn = draws(seed)
    if kind == "base":
        return {
            "proj.weight": randn(tokens * CROSS, CLIP, gain=0.5), "proj.bias": randn(tokens * CROSS),
            "norm.weight": torch.ones(CROSS), "norm.bias": torch.zeros(CROSS),
        }  # fmt: skip
    if kind == "full":
        return {
            "proj.0.weight": randn(hidden, hidden, gain=0.5), "proj.0.bias": randn(hidden),
            "proj.2.weight": randn(CROSS, hidden, gain=0.5), "proj.2.bias": randn(CROSS),
            "proj.3.weight": torch.ones(CROSS), "proj.3.bias": torch.zeros(CROSS),
        }  # fmt: skip
    if kind == "faceid":
        width = 12
        return {
            "proj.0.weight": randn(2 * width, width, gain=0.5), "proj.0.bias": randn(2 * width),
            "proj.2.weight": randn(tokens * CROSS, 2 * width, gain=0.5), "proj.2.bias": randn(tokens * CROSS),
            "norm.weight": torch.ones(CROSS), "norm.bias": torch.zeros(CROSS),
        }  # fmt: skip
    if kind == "plus":
        inner, out = 64, {}
        for i in range(4):
            out |= {f"layers.{i}.0.{n}.{w}": torch.ones(inner) if w == "weight" else torch.zeros(inner)
                    for n in ("norm1", "norm2") for w in ("weight", "bias")}  # fmt: skip
            out |= {
                f"layers.{i}.0.to_q.weight": randn(64, inner, gain=0.2),
                f"layers.{i}.0.to_kv.weight": randn(128, inner, gain=0.2),
                f"layers.{i}.0.to_out.weight": randn(inner, 64, gain=0.2),
                f"layers.{i}.1.0.weight": torch.ones(inner), f"layers.{i}.1.0.bias": torch.zeros(inner),
                f"layers.{i}.1.1.weight": randn(4 * inner, inner, gain=0.2),
                f"layers.{i}.1.3.weight": randn(inner, 4 * inner, gain=0.2),
            }  # fmt: skip
        return out | {
            "latents": randn(1, tokens, inner), "proj_in.weight": randn(inner, hidden), "proj_in.bias": randn(inner),
            "proj_out.weight": randn(CROSS, inner, gain=0.2), "proj_out.bias": randn(CROSS),
            "norm_out.weight": torch.ones(CROSS), "norm_out.bias": torch.zeros(CROSS),
        }  # fmt: skip
    raise AssertionError(kind)


def unet_adapter(model: UNet2DConditionModel, kind: str = "base", tokens: int = 4, seed: int = 6) -> dict[str, Any]:
    """A state dict that ``load_ip_adapter`` takes."""
    randn, attention, i = draws(seed), {}, 1
    for name in model.attn_processors:
        if name.endswith("attn2.processor"):
            module = model.get_submodule(name.removesuffix(".processor"))
            for part in ("k", "v"):
                attention[f"{i}.to_{part}_ip.weight"] = randn(module.inner_dim, CROSS, gain=0.8)
            i += 2
    return {"image_proj": projection(kind, tokens), "ip_adapter": attention}


def load(pipe: Any, *states: dict[str, Any]) -> Any:
    states = states or (unet_adapter(pipe.unet),)
    pipe.load_ip_adapter(list(states), subfolder="", weight_name=[""] * len(states), image_encoder_folder=None)
    return pipe


def run(pipe: Any, embeds: list[Tensor] | None = None, steps: int = 2, guidance: float = 3.0, **options: Any) -> Tensor:
    """Final latents of a short run; always the same noise, prompt and images."""
    randn = draws(7)
    prompt = {"prompt_embeds": randn(1, 5, CROSS), "negative_prompt_embeds": randn(1, 5, CROSS)}
    if hasattr(pipe, "text_encoder_2"):
        prompt |= {"pooled_prompt_embeds": randn(1, CROSS), "negative_pooled_prompt_embeds": randn(1, CROSS)}
    if embeds is None:
        embeds = [image_embeds(1)]
    out = pipe(
        **prompt, ip_adapter_image_embeds=embeds, num_inference_steps=steps, guidance_scale=guidance,
        latents=draws(8)(1, 4, 8, 8), output_type="latent", **options,
    )  # fmt: skip
    return out.images


def image_embeds(images: int, width: int = CLIP, seed: int = 9) -> Tensor:
    """[uncond, cond] embeddings of some images: ``(2, images, width)``; the first half is zero, as in pipelines."""
    cond = draws(seed)(1, images, width)
    return torch.cat([torch.zeros_like(cond), cond])


# ------------------------------------------------------------------------------------------------------- transformers

FLUX_HEADS, FLUX_DIM, FLUX_JOINT = 2, 16, 32


def flux_pipeline() -> Any:
    torch.manual_seed(11)
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=FLUX_DIM,
        num_attention_heads=FLUX_HEADS, joint_attention_dim=FLUX_JOINT, pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    ).eval()  # fmt: skip
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), vae=None, text_encoder=None, tokenizer=None, text_encoder_2=None,
        tokenizer_2=None, transformer=model, image_encoder=image_encoder(),
        feature_extractor=CLIPImageProcessor(size=32, crop_size=32),
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    randn, inner = draws(12), FLUX_HEADS * FLUX_DIM
    attention = {}
    for part in ("k", "v"):
        attention |= {
            f"0.to_{part}_ip.weight": randn(inner, FLUX_JOINT, gain=0.8), f"0.to_{part}_ip.bias": randn(inner)
        }  # fmt: skip
    proj = {
        "proj.weight": randn(4 * FLUX_JOINT, CLIP, gain=0.5), "proj.bias": randn(4 * FLUX_JOINT),
        "norm.weight": torch.ones(FLUX_JOINT), "norm.bias": torch.zeros(FLUX_JOINT),
    }  # fmt: skip
    pipe.load_ip_adapter({"image_proj": proj, "ip_adapter": attention}, weight_name="", subfolder="")
    return pipe


def run_flux(pipe: Any, true_cfg: float = 1.0, steps: int = 2, images: int = 1) -> Tensor:
    randn = draws(13)
    given = {"prompt_embeds": randn(1, 5, FLUX_JOINT), "pooled_prompt_embeds": randn(1, 8)}
    negative = {f"negative_{name}": randn(*value.shape) for name, value in given.items()}
    embeds = {"ip_adapter_image_embeds": [draws(9)(1, images, CLIP)]}
    if true_cfg > 1.0:
        given |= negative
        embeds["negative_ip_adapter_image_embeds"] = [torch.zeros(1, images, CLIP)]
    out = pipe(
        **given, **embeds, true_cfg_scale=true_cfg, num_inference_steps=steps, height=64, width=48,
        latents=draws(8)(1, 12, 4), output_type="latent",
    )  # fmt: skip
    return out.images


def sd3_pipeline() -> Any:
    torch.manual_seed(21)
    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=32, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
        pos_embed_max_size=8, qk_norm="rms_norm",
    ).eval()  # fmt: skip
    pipe = StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=None, text_encoder=None, tokenizer=None,
        transformer=model, text_encoder_2=None, tokenizer_2=None, text_encoder_3=None, tokenizer_3=None,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    pipe.vae_scale_factor = 8
    torch.manual_seed(22)
    proj = IPAdapterTimeImageProjection(
        embed_dim=12, output_dim=16, hidden_dim=64, depth=4, dim_head=64, heads=1, num_queries=3, timestep_in_dim=16
    )
    randn, inner, attention = draws(23), 16, {}
    for i in range(len(model.attn_processors)):
        attention |= {
            f"{i}.norm_ip.linear.weight": randn(32, 64, gain=0.1), f"{i}.norm_ip.linear.bias": torch.zeros(32),
            f"{i}.to_k_ip.weight": randn(inner, inner), f"{i}.to_v_ip.weight": randn(inner, inner),
        }  # fmt: skip
        attention |= {f"{i}.{name}.weight": 1.5 * torch.ones(8) for name in ("norm_q", "norm_k", "norm_ip_k")}
    pipe.load_ip_adapter(
        {"image_proj": proj.state_dict(), "ip_adapter": attention}, image_encoder_folder=None, low_cpu_mem_usage=False
    )
    pipe.set_ip_adapter_scale(0.6)
    return pipe


def run_sd3(pipe: Any, guidance: float = 3.0, steps: int = 2) -> Tensor:
    randn = draws(24)
    given = {"prompt_embeds": randn(1, 5, 32), "pooled_prompt_embeds": randn(1, 16)}
    given |= {f"negative_{name}": randn(*value.shape) for name, value in given.items()}
    embeds = randn(1, 6, 12)
    out = pipe(
        **given, ip_adapter_image_embeds=torch.cat([torch.zeros_like(embeds), embeds]), guidance_scale=guidance,
        num_inference_steps=steps, height=64, width=48, latents=randn(1, 4, 8, 6), output_type="latent",
    )  # fmt: skip
    return out.images
