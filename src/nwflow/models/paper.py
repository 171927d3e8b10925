r"""The ``paper`` preset: the velocity by cross-attention from the query to the support, in data units.

t = 0 is noise, t = 1 is data. A token of x with a sinusoidal embedding of t passes pre-norm blocks whose keys and
values are tokens of the support, and an MLP gives the velocity (Smola 2026, arXiv 2605.13386). The frozen exact head
gives the denoiser D of the support: as a further input, or, as the velocity u of D, as a term of the output.

    D = (sigma v - sigma' x) / w,    eps = (alpha' x - alpha v) / w,    w = alpha' sigma - sigma' alpha

are regular on the default path also at its ends. Keys and values depend on neither x nor t: one encoding of a support
serves all queries and steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nwflow.models.config import ModelConfig
from nwflow.models.heads import denoise_exactly
from nwflow.models.layers import Fourier, Keys, Tower
from nwflow.models.schedule import Times, centred

__all__ = ["Paper"]


class _Encoded(NamedTuple):
    mean: Tensor
    points: Tensor
    mask: Tensor | None
    keys: Keys

    def task_count(self) -> int:
        return self.points.shape[0]


class Paper(nn.Module):
    """Network of the ``paper`` preset: :meth:`encode` a support, then ask for :meth:`predict`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.width is not None
        width, self.exact = config.width, config.exact_head
        half = width // 2
        wave = Fourier(half, 1000.0)
        self.time = nn.Sequential(wave, nn.Linear(2 * half, width), nn.SiLU(), nn.Linear(width, width))
        fused = self.exact in ("input", "both")
        self.query = nn.Linear(config.dim * (2 if fused else 1), width)
        self.reference = nn.Linear(config.dim, width)
        self.tower = Tower(config)
        self.out = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(approximate="tanh"), nn.Linear(width, config.dim)
        )

    def encode(self, points: Tensor, mask: Tensor | None) -> _Encoded:
        """``points`` ``(T, m, d)`` in the working dtype, zeros where masked."""
        tokens = self.reference(points.to(self.reference.weight.dtype))
        mean, z = centred(points, mask)
        return _Encoded(mean, z, mask, self.tower.keys(tokens, mask))

    def velocity(self, x: Tensor, at: Times, encoded: _Encoded) -> Tensor:
        """``(T, n, d)`` in the dtype of the parameters; x in the working dtype."""
        dtype = self.reference.weight.dtype
        inputs, u = x.to(dtype), None
        if self.exact != "none":
            local = denoise_exactly(x - at.alpha * encoded.mean, encoded.points, encoded.mask, at, dtype)
            denoised = encoded.mean + local
            u = at.d_alpha * denoised + at.d_sigma / at.sigma.clamp(min=1e-12) * (x - at.alpha * denoised)
            if self.exact in ("input", "both"):
                inputs = torch.cat([inputs, denoised.to(dtype)], -1)
        token = self.query(inputs) + self.time(at.t.to(dtype))
        token = self.tower(token, encoded.keys, encoded.mask)
        v = self.out(token)
        return v + u.to(dtype) if u is not None and self.exact in ("add", "both") else v

    def predict(self, x: Tensor, at: Times, encoded: _Encoded) -> tuple[Tensor, Tensor]:
        """Denoiser and noise ``(T, n, d)`` in the working dtype."""
        v = self.velocity(x, at, encoded).to(x.dtype)
        determinant = at.d_alpha * at.sigma - at.d_sigma * at.alpha
        return (at.sigma * v - at.d_sigma * x) / determinant, (at.d_alpha * x - at.alpha * v) / determinant

    def loss(self, x: Tensor, x0: Tensor, x1: Tensor, at: Times, encoded: _Encoded, target: Tensor | None) -> Tensor:
        """Mean square error of the velocity, ``(T, n)``; of the velocity of ``target`` where given."""
        wanted = at.d_alpha * x1 + at.d_sigma * x0
        if target is not None:
            wanted = at.d_alpha * target + at.d_sigma / at.sigma * (x - at.alpha * target)
        v = self.velocity(x, at, encoded)
        return F.mse_loss(v, wanted.to(v.dtype), reduction="none").mean(-1)
