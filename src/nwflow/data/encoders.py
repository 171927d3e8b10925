"""Image encoders in local transformers folders, as callables from pixels (B, C, H, W) in [0, 1] to features (B, d).

The feature of an image is the CLS token after the last layer norm. Patch and register tokens are never mixed into it.
Weights are read from safetensors only, and no code that lies beside them is run.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nwflow.data.source import MissingDataError

# Where each family keeps its CLS token after layer norm.
_LAST_STATE = ("dinov2", "dinov2_with_registers", "dinov3_vit", "vit", "deit")
_POOLED = ("clip_vision_model",)
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class PatchWarning(UserWarning):
    """An image size that the patches of an encoder do not cover: its border is cut off."""


@dataclass(frozen=True)
class TransformersEncoder:
    """A frozen vision transformer; call it with pixels in [0, 1]."""

    model: Any
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str

    def __call__(self, pixels: Tensor) -> Tensor:
        """CLS features ``(B, d)`` of pixels ``(B, C, H, W)``; :class:`PatchWarning` where patches do not cover them."""
        patch = getattr(self.model.config, "patch_size", None)
        height, width = pixels.shape[-2:]
        if isinstance(patch, int) and (height % patch or width % patch):
            warnings.warn(
                f"{self.name}: {height}x{width} pixels are not divisible by the patch size {patch}; "
                f"{height % patch} rows and {width % patch} columns are cut off (pass size=)",
                PatchWarning,
                stacklevel=2,
            )
        mean, std = (torch.tensor(v).reshape(-1, 1, 1) for v in (self.mean, self.std))
        pixels = pixels.expand(-1, len(self.mean), -1, -1) if pixels.shape[1] == 1 else pixels
        with torch.no_grad():
            output = self.model(pixel_values=(pixels - mean) / std)
        return output.pooler_output if self.model.config.model_type in _POOLED else output.last_hidden_state[:, 0]


def load_encoder(folder: str | Path) -> TransformersEncoder:
    """The encoder in a folder written by ``save_pretrained``.

    Raises:
        FileNotFoundError: no such folder. ValueError: a model whose CLS token is not known here (pass a callable).
        ImportError: transformers is not installed.
    """
    folder = Path(folder).expanduser()
    if not (folder / "config.json").is_file():
        raise MissingDataError(f"{folder}: encoder: no folder with a config.json")
    kind = json.loads((folder / "config.json").read_bytes()).get("model_type")
    if kind not in (*_LAST_STATE, *_POOLED):
        known = ", ".join((*_LAST_STATE, *_POOLED))
        raise ValueError(f"{folder}: encoder: expected a model of type {known}, got {kind!r}; pass a callable instead")
    try:
        from transformers import AutoModel, CLIPVisionModel  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError("encoder: needs transformers, which is not installed: pip install 'nwflow[probe]'") from None
    loader = CLIPVisionModel if kind in _POOLED else AutoModel
    model = loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False, use_safetensors=True)
    mean, std = _normalisation(folder)
    return TransformersEncoder(model.eval(), mean, std, f"{kind} in {folder.name}")


def _normalisation(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    file = folder / "preprocessor_config.json"
    if not file.is_file():
        warnings.warn(f"{folder}: no preprocessor_config.json; pixels get ImageNet's mean and std", stacklevel=3)
        return _IMAGENET
    values = json.loads(file.read_bytes())
    return tuple(values.get("image_mean", _IMAGENET[0])), tuple(values.get("image_std", _IMAGENET[1]))
