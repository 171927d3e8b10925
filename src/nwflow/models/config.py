"""What an in-context flow matching network is built from: a frozen dataclass that goes to JSON and back."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from nwflow.paths import CondOT, Cosine, Path, VarianceExploding, VariancePreserving

__all__ = ["ModelConfig"]

Preset = Literal["preconditioned", "paper"]
ExactHead = Literal["none", "input", "add", "both"]
PathName = Literal["condot", "cosine", "variance_preserving", "variance_exploding"]

_PAPER = {"width": 128, "layers": 3, "mlp_ratio": 4.0}
_PATHS = {"cosine": Cosine, "variance_preserving": VariancePreserving, "variance_exploding": VarianceExploding}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and parts of an :class:`~nwflow.models.ICFM` network.

    Attributes:
        dim: number of coordinates of an event (the product of its shape).
        preset: ``preconditioned`` predicts the posterior mean in units of the support's own scale; ``paper`` predicts
            the velocity with plain cross-attention (Smola 2026, arXiv 2605.13386).
        width: width of a token; 64 (``paper``: 128) when None.
        heads: attention heads; ``width`` is a multiple of it.
        layers: cross-attention layers; 2 (``paper``: 3) when None.
        mlp_ratio: width of a feed-forward layer over ``width``; 2 (``paper``: 4) when None.
        self_layers: self-attention layers among the references, before the queries meet them.
        exact_head: only ``paper``: the frozen exact denoiser of the support as a further ``input`` of each query, its
            velocity as a term to ``add`` to the output, ``both`` or ``none``.
        smoothers: only ``preconditioned``: kernel smoothers of the support whose denoisers are inputs and terms of the
            output; the first is the exact one, the others have learned smoothing. 0 for none.
        qk_norm: RMS-normalise queries and keys of every attention head.
        gaussian_logits: attention by distance in place of dot products.
        scale: only ``preconditioned``: what stands for the scale of a support that has none (one point, or equal
            ones), in data units; the typical scale of the training tasks.
        path: the Gaussian path that the network is trained on. sigma_min: of ``condot``.
    """

    dim: int
    preset: Preset = "preconditioned"
    width: int | None = None
    heads: int = 4
    layers: int | None = None
    mlp_ratio: float | None = None
    self_layers: int = 0
    exact_head: ExactHead = "none"
    smoothers: int = 4
    qk_norm: bool = False
    gaussian_logits: bool = False
    scale: float = 1.0
    path: PathName = "condot"
    sigma_min: float = 0.0

    def __post_init__(self) -> None:
        paper = self.preset == "paper"
        for name, value in {"width": 64, "layers": 2, "mlp_ratio": 2.0}.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, _PAPER[name] if paper else value)
        self._check()

    def _check(self) -> None:
        choices = {
            "preset": ("preconditioned", "paper"),
            "exact_head": ("none", "input", "add", "both"),
            "path": ("condot", *_PATHS),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {known}, got {getattr(self, name)!r}")
        for name, least in {"dim": 1, "width": 1, "heads": 1, "layers": 1, "self_layers": 0, "smoothers": 0}.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
        assert self.width is not None and self.mlp_ratio is not None
        if self.width % self.heads:
            raise ValueError(f"width: expected a multiple of heads = {self.heads}, got {self.width}")
        for name in ("mlp_ratio", "scale"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: expected a positive number, got {getattr(self, name)!r}")
        if self.preset == "preconditioned" and self.exact_head != "none":
            raise ValueError(f"exact_head: expected 'none' (smoothers= has the exact one), got {self.exact_head!r}")
        if self.sigma_min and self.path != "condot":
            raise ValueError(f"sigma_min: expected 0 for the path {self.path!r}, got {self.sigma_min}")

    def make_path(self) -> Path:
        """The path named by ``path`` and ``sigma_min``."""
        return CondOT(self.sigma_min) if self.path == "condot" else _PATHS[self.path]()

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """The inverse of :meth:`to_dict`; raises ValueError for names that are none of its fields."""
        if unknown := set(values) - {f.name for f in fields(cls)}:
            raise ValueError(f"values: unknown settings {sorted(unknown)} of a ModelConfig")
        return cls(**values)

    def to_json(self) -> str:
        """One line of JSON.

        >>> ModelConfig.from_json(ModelConfig(dim=2).to_json()) == ModelConfig(dim=2)
        True
        """
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        """The inverse of :meth:`to_json`."""
        return cls.from_dict(json.loads(text))
