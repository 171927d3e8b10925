r"""Attention with Gaussian logits: learned projections around a Nadaraya-Watson smoother of each head's own bandwidth.

    a_ij = softmax_j(-|q_i - k_j|^2 / (2 h^2)),      out_i = W_o [sum_j a_ij v_j]_heads,      h = exp(theta) c_i

with q, k, v linear in the inputs, theta learned for every head and c a factor of the call, so that a flow's bandwidth
h(t) = sigma / alpha (t = 0 noise, t = 1 data) can enter. Dropping what is the same for all keys, the logits are

    [q / h^2, 1 / h^2] . [k, -|k|^2 / 2],

one more column of an ordinary dot product: fused kernels apply, and the n m weights are never stored. With the prior
exp(|k|^2 / (2 h^2)) that column vanishes, and at h = d^(1/4) what remains is scaled dot-product attention exactly
(Smola 2026, arXiv 2605.13386; Vaswani et al. 2017, arXiv 1706.03762; QK norm: Henry et al. 2020, arXiv 2010.04245).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from nwflow.attention.lift import attend, check_mask, effective_bandwidth, key_centre, nw_weights

__all__ = ["GaussianAttention"]


class GaussianAttention(nn.Module):
    """Multi-head attention whose heads smooth by distance, each with a learned positive bandwidth.

    Args:
        embed_dim: width of queries and output.
        num_heads: number of heads H.
        kdim, vdim: widths of keys and values; ``embed_dim`` and ``kdim`` when None.
        head_dim: width d of one head; ``embed_dim / num_heads`` when None.
        bias: whether the four projections have one.
        dropout: probability that a weight is dropped in training.
        qk_norm: normalise queries and keys of every head by a learned RMS norm. Keys then have nearly one length, and
            Gaussian and dot-product logits nearly agree.
        prior: None, or ``"key_norm"`` for prior masses exp(|k|^2 / (2 h^2)): plain dot-product attention, exactly that
            of ``nn.MultiheadAttention`` as long as the bandwidths are the initial ones.
        bandwidth: initial h of all heads in units of q and k; d^(1/4) when None, where logits have the scale of
            dot-product attention, whose initialisation (Xavier) the projections share.

    Shapes: ``query`` ``(B, n, embed_dim)``, ``key`` ``(B, m, kdim)``, ``value`` ``(B, m, vdim)`` (``key`` when None),
    ``mask`` ``(B, m)`` booleans with True = real; ``bandwidth_scale`` a positive float, 0-d, ``(B, 1)`` or ``(B, n)``,
    by which every h is multiplied. Returns ``(B, n, embed_dim)``, with ``return_weights`` also the weights
    ``(B, H, n, m)`` before dropout, which do take n m numbers.

    What masked slots hold, NaN included, has no influence. Second derivatives and forward mode need
    ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``: PyTorch's fused kernels have only first ones, by reverse mode.

    Raises:
        ValueError: widths that do not fit; a row whose keys are all masked, named by its batch index.

    Example:
        >>> attention = GaussianAttention(embed_dim=32, num_heads=4, kdim=16)
        >>> out, weights = attention(torch.randn(2, 5, 32), torch.randn(2, 7, 16), return_weights=True)
        >>> out.shape, weights.shape, attention.bandwidth.shape
        (torch.Size([2, 5, 32]), torch.Size([2, 4, 5, 7]), torch.Size([4]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        qk_norm: bool = False,
        prior: Literal["key_norm"] | None = None,
        bandwidth: float | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(f"embed_dim: expected a multiple of num_heads = {num_heads}, got {embed_dim}")
        if prior not in (None, "key_norm"):
            raise ValueError(f'prior: expected None or "key_norm", got {prior!r}')
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout: expected a probability in [0, 1), got {dropout}")
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = self.kdim if vdim is None else vdim
        self.dropout, self.qk_norm = dropout, qk_norm
        self.prior: Literal["key_norm"] | None = prior
        self.initial_bandwidth = effective_bandwidth(self.head_dim) if bandwidth is None else float(bandwidth)
        if not 0.0 < self.initial_bandwidth < math.inf:
            raise ValueError(f"bandwidth: expected a positive number, got {bandwidth}")
        inner, to = num_heads * self.head_dim, {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, inner, bias, **to)
        self.k_proj = nn.Linear(self.kdim, inner, bias, **to)
        self.v_proj = nn.Linear(self.vdim, inner, bias, **to)
        self.out_proj = nn.Linear(inner, embed_dim, bias, **to)
        self.q_norm = nn.RMSNorm(self.head_dim, **to) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, **to) if qk_norm else nn.Identity()
        self.log_bandwidth = nn.Parameter(torch.empty(num_heads, **to))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform projections without bias, unit norms, and the initial bandwidth in every head."""
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        for norm in (self.q_norm, self.k_norm):
            if isinstance(norm, nn.RMSNorm):
                norm.reset_parameters()
        nn.init.constant_(self.log_bandwidth, math.log(self.initial_bandwidth))

    @property
    def bandwidth(self) -> Float[Tensor, " H"]:
        """h of every head, in units of q and k."""
        return self.log_bandwidth.exp()

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, head_dim={self.head_dim}, "
            f"qk_norm={self.qk_norm}, prior={self.prior!r}, dropout={self.dropout}"
        )

    def forward(
        self,
        query: Float[Tensor, "B n e"],
        key: Float[Tensor, "B m k"],
        value: Float[Tensor, "B m v"] | None = None,
        mask: Bool[Tensor, "B m"] | None = None,
        bandwidth_scale: float | Tensor = 1.0,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See the class."""
        value = key if value is None else value
        self._check(query, key, value)
        if mask is not None:
            check_mask(mask, key.shape[:2])
            key, value = (torch.where(mask[..., None], v, 0) for v in (key, value))
        q, k = self.q_norm(self._heads(self.q_proj(query))), self.k_norm(self._heads(self.k_proj(key)))
        v, h = self._heads(self.v_proj(value)), self._bandwidth(bandwidth_scale, query)
        lifted = self._lift(q, k, h, None if mask is None else mask[:, None])
        bias = None if mask is None else mask[:, None, None]
        out = attend(*lifted, v, bias, self.dropout if self.training else 0.0)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if not return_weights:
            return out
        return out, nw_weights(q, k, h, self.prior, None if mask is None else mask[:, None])

    def _lift(self, q: Tensor, k: Tensor, h: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """q and k ``(B, H, n or m, d or d + 1)`` whose dot products are the logits, up to a constant of each query."""
        precision = h.square().reciprocal()[..., None]
        if self.prior == "key_norm":
            return (q * precision).to(q.dtype), k
        real = k if mask is None else torch.where(mask[..., None], k, 0)
        centre = key_centre(real, mask)  # a common shift changes no distance, but long vectors cost digits
        q, k = q - centre, k - centre
        half = -0.5 * k.to(torch.promote_types(k.dtype, torch.float32)).square().sum(-1, keepdim=True)
        precision = precision.expand(*q.shape[:-1], 1)
        return torch.cat([q * precision, precision], -1).to(q.dtype), torch.cat([k, half.to(k.dtype)], -1)

    def _heads(self, u: Tensor) -> Tensor:
        """``(B, n, H d)`` as ``(B, H, n, d)``."""
        return u.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _bandwidth(self, scale: float | Tensor, query: Tensor) -> Tensor:
        """h ``(1 or B, H, 1 or n)``."""
        h = self.bandwidth[None, :, None]
        if not isinstance(scale, Tensor) or scale.ndim == 0:
            if not isinstance(scale, Tensor) and not 0.0 < scale < math.inf:
                raise ValueError(f"bandwidth_scale: expected a positive number, got {scale}")
            return h * scale
        batch = tuple(query.shape[:2])
        if scale.ndim != 2 or any(a not in (1, b) for a, b in zip(scale.shape, batch, strict=True)):
            raise ValueError(
                f"bandwidth_scale: expected a float, a 0-d tensor or one that broadcasts to {batch} with both axes, "
                f"as in (B, 1), got shape {tuple(scale.shape)}"
            )
        return h * scale[:, None].to(h.dtype)

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        for name, u, width in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if u.ndim != 3 or u.shape[-1] != width:
                raise ValueError(f"{name}: expected (B, length, {width}), got {tuple(u.shape)}")
        if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1] or not key.shape[1]:
            raise ValueError(
                "query, key, value: expected one batch size and as many values as keys, at least one, "
                f"got {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
            )
