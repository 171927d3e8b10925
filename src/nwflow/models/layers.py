r"""Pre-norm attention blocks whose keys and values are computed once per support, however many queries there are.

    u <- u + W_o softmax(q k^T / sqrt(d_k)) v,     q = W_q norm(u),     [k, v] = W_kv norm(s)
    u <- u + W_2 gelu(W_1 norm(u))

With ``gaussian_logits`` the logits are -|q - k|^2 / (2 sqrt(d_k)), one more column of the same product.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nwflow.models.config import ModelConfig

__all__ = ["Attention", "Block", "Feedforward", "Fourier", "Keys", "Tower"]

Keys: TypeAlias = tuple[tuple[Tensor, Tensor], ...]  # k and v of every layer


class Fourier(nn.Module):
    """sin and cos of each feature at ``count`` geometrically spaced frequencies up to ``highest``, radians a unit."""

    frequencies: Tensor

    def __init__(self, count: int, highest: float, lowest: float = 1.0) -> None:
        super().__init__()
        steps = torch.linspace(math.log(lowest), math.log(highest), count, dtype=torch.float64)
        self.register_buffer("frequencies", steps.exp().float(), persistent=False)

    def forward(self, u: Tensor) -> Tensor:
        """``(..., k)`` to ``(..., 2 count k)``."""
        angle = (u[..., None] * self.frequencies.to(u.dtype)).flatten(-2)
        return torch.cat([angle.sin(), angle.cos()], -1)


class Feedforward(nn.Module):
    """Two linear layers around a GELU, pre-norm and residual."""

    def __init__(self, width: int, ratio: float) -> None:
        super().__init__()
        inner = max(1, round(width * ratio))
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, u: Tensor) -> Tensor:
        return u + self.down(F.gelu(self.up(self.norm(u)), approximate="tanh"))


class Attention(nn.Module):
    """Multi-head attention of tokens ``(T, n, width)`` to what :meth:`keys` made of tokens ``(T, m, width)``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.width is not None
        width, self.heads, self.gaussian = config.width, config.heads, config.gaussian_logits
        self.norm, self.key_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        head = width // config.heads
        self.q_rms = nn.RMSNorm(head) if config.qk_norm else nn.Identity()
        self.k_rms = nn.RMSNorm(head) if config.qk_norm else nn.Identity()

    def keys(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """k and v, ``(T, heads, m, head width)`` each."""
        kv = self.kv(self.key_norm(tokens)).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        k, v = kv[0], kv[1]
        k = self.k_rms(k)
        if self.gaussian:
            k = torch.cat([k, -0.5 * k.square().sum(-1, keepdim=True)], -1)
        return k, v

    def forward(self, u: Tensor, keys: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """mask ``(T, 1, 1, m)``, True = real."""
        q = self.q_rms(self.q(self.norm(u)).unflatten(-1, (self.heads, -1)).transpose(1, 2))
        scale = q.shape[-1] ** -0.5
        if self.gaussian:
            q = F.pad(q, (0, 1), value=1.0)
        found = F.scaled_dot_product_attention(q, *keys, attn_mask=mask, scale=scale)
        return u + self.out(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.width is not None and config.mlp_ratio is not None
        self.attention, self.feedforward = Attention(config), Feedforward(config.width, config.mlp_ratio)

    def forward(self, u: Tensor, keys: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        return self.feedforward(self.attention(u, keys, mask))


class Tower(nn.Module):
    """``self_layers`` blocks among the references, then ``layers`` blocks in which queries attend to them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.layers is not None
        self.among = nn.ModuleList(Block(config) for _ in range(config.self_layers))
        self.across = nn.ModuleList(Block(config) for _ in range(config.layers))

    def keys(self, tokens: Tensor, mask: Tensor | None) -> Keys:
        """What queries need of the reference tokens ``(T, m, width)``; mask ``(T, m)``."""
        attend = None if mask is None else mask[:, None, None]
        for block in self.among:
            assert isinstance(block, Block)
            tokens = block(tokens, block.attention.keys(tokens), attend)
        return tuple(block.attention.keys(tokens) for block in self.across if isinstance(block, Block))

    def forward(self, u: Tensor, keys: Keys, mask: Tensor | None) -> Tensor:
        """Query tokens ``(T, n, width)`` after all layers."""
        attend = None if mask is None else mask[:, None, None]
        for block, own in zip(self.across, keys, strict=True):
            u = block(u, own, attend)
        return u
