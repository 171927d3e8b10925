r"""A multi-head attention layer taken apart into its H generalised Nadaraya-Watson smoothers, and put together again.

Head i projects queries and keys, q = W_q x + b_q and k = W_k y + b_k, and smooths v = W_v z + b_v:

    m_i(x) = sum_j w_ij v_ij,    w_ij ~ exp(-|q - k_j|^2 / (2 h_i^2)) pi_ij,    pi_ij = exp(|k_j|^2 / (2 h_i^2)),

h_i^2 = 1 / scale, sqrt(d_k) by default (Smola 2026, arXiv 2605.13386); without the key-norm prior pi it would be a
plain smoother in its own subspace, the row space of W_q (of W_k for keys). The layer is sum_i W_o,i m_i + b_o. Here the
weights are formed from distances and prior, and the sum is compared with what the module itself returns.

How a subspace lies is measured by principal angles: cos theta_l are the singular values of Q_i^T E, for orthonormal
bases Q_i of the head's row space and E of the data's leading directions; alignment is the mean of cos^2 (1: inside).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from nwflow.attention.projections import Projections, projections

__all__ = ["Decomposition", "HeadSmoother", "decompose", "n_eff_over_time", "principal_angles"]


@dataclass(frozen=True, eq=False)
class HeadSmoother:
    """One head as a smoother.

    ``bandwidth`` h in units of q and k; ``bandwidth_input``: h over the largest singular value of W_q: the shortest
    distance of inputs that moves q by h. ``rank`` of W_q up to 1e-6; ``q_basis`` ``(e, rank)`` and ``k_basis`` are
    orthonormal bases of the subspaces in which it sees queries and keys. ``n_eff`` and ``n_eff_without_prior``
    ``(B, n)``, ``total_variation`` ``(B, n)`` between the two, ``prior_spread``: standard deviation over keys of the
    log prior |k|^2 / (2 h^2), in nats. ``angles`` (radians, ascending) and ``alignment`` of ``k_basis`` with the
    leading directions of the keys' inputs; None where there is one key. ``share``: |its part of the output|^2 over the
    sum of those of all heads.
    """

    head: int
    d_k: int
    bandwidth: float
    bandwidth_input: float
    rank: int
    q_basis: Float[Tensor, "e r"]
    k_basis: Float[Tensor, "f r"]
    weights: Float[Tensor, "B n m"]
    n_eff: Float[Tensor, "B n"]
    n_eff_without_prior: Float[Tensor, "B n"]
    total_variation: Float[Tensor, "B n"]
    prior_spread: float
    angles: Float[Tensor, " r"] | None
    alignment: float | None
    share: float


@dataclass(frozen=True, eq=False)
class Decomposition:
    """All heads, the output that they make together, ``(B, n, o)``, and ``error``: the largest difference from the
    module's own output over its largest entry (None where only matrices were given)."""

    heads: tuple[HeadSmoother, ...]
    parts: Float[Tensor, "B H n o"]
    output: Float[Tensor, "B n o"]
    error: float | None
    kernel: str
    maps: Projections

    def summary(self) -> list[dict[str, Any]]:
        """One row of plain numbers for each head."""
        return [
            {
                "head": h.head,
                "d_k": h.d_k,
                "rank": h.rank,
                "bandwidth": h.bandwidth,
                "n_eff": float(h.n_eff.nanmean()),
                "n_eff_without_prior": float(h.n_eff_without_prior.nanmean()),
                "prior_spread": h.prior_spread,
                "alignment": h.alignment,
                "share": h.share,
            }
            for h in self.heads
        ]


@torch.no_grad()
def decompose(
    module: nn.Module | Projections,
    queries: Float[Tensor, "B n e"],
    keys: Float[Tensor, "B m f"] | None = None,
    values: Float[Tensor, "B m g"] | None = None,
    mask: Bool[Tensor, "B m"] | None = None,
    *,
    directions: int | Float[Tensor, "f r"] | None = None,
) -> Decomposition:
    """Take a cross-attention (or self-attention) layer apart.

    Args:
        module: ``nn.MultiheadAttention``, :class:`~nwflow.GaussianAttention`, an attention layer of ``nwflow.models``,
            ``Attention`` of diffusers, or :class:`Projections`. Separate key and value widths, biases, learned and zero
            keys (``add_bias_kv``, ``add_zero_attn``), QK norms and residuals are all understood.
        queries: ``(B, n, e)``, whatever ``batch_first`` says. keys: ``(B, m, f)``; the queries when None. values: the
            keys when None.
        mask: ``(B, m)``, True = real key.
        directions: the data's informative directions: how many leading principal directions of the real keys' inputs,
            d_k when None, or an orthonormal basis ``(f, r)``.

    Returns:
        The smoothers. Computed in the dtype of the module, at least float32.

    Raises:
        TypeError: a module of another kind, or one in training with dropout. ValueError: shapes that do not fit; a
            module with arithmetic of its own.

    Example:
        >>> layer = nn.MultiheadAttention(16, 4, kdim=6, vdim=6)
        >>> found = decompose(layer, torch.randn(2, 5, 16), torch.randn(2, 7, 6))
        >>> found.error < 1e-5, len(found.heads), found.heads[0].bandwidth
        (True, 4, 1.4142)
    """
    maps = module if isinstance(module, Projections) else projections(module)
    _check(module, queries, keys, values, mask)
    dtype = torch.promote_types(maps.q_weight.dtype, torch.float32)
    x, y = queries.to(dtype), None if keys is None else keys.to(dtype)
    seen, source = (x, x if y is None else y) if maps.before is None else maps.before(x, y)
    z = source if values is None else values.to(dtype)
    if mask is not None:
        source, z = (torch.where(mask[..., None], u, 0) for u in (source, z))
    q, k, v = maps.queries(seen), maps.keys(source), maps.values(z)
    real = _real(mask, maps.extra, k)
    h = maps.scale.to(dtype).rsqrt()[:, None]
    log_prior = k.square().sum(-1) / (2 * h**2) if maps.kernel == "dot" else torch.zeros_like(k[..., 0])
    plain = _weights(q, k, h, False, real)
    weights = plain if maps.kernel == "gaussian" else _weights(q, k, h, True, real)
    parts = maps.shares(weights @ v)
    output = maps.output(weights @ v, x)
    square = parts.square().sum((0, 2, 3))
    shares = (square / square.sum().clamp(min=torch.finfo(dtype).tiny)).tolist()
    basis = _directions(source, mask, maps.k_weight.shape[1], directions)
    heads = [
        _head(maps, i, weights[:, i], plain[:, i], log_prior[:, i], real, basis, shares[i])
        for i in range(maps.num_heads)
    ]
    error = None
    if not isinstance(module, Projections):
        own = _own(module, queries, keys, values, mask).to(dtype)
        error = float((own - output).abs().amax() / own.abs().amax().clamp(min=torch.finfo(dtype).tiny))
    return Decomposition(tuple(heads), parts, output, error, maps.kernel, maps)


@torch.no_grad()
def n_eff_over_time(found: Mapping[float, Decomposition]) -> dict[str, Tensor]:
    """n_eff of heads along the flow, from decompositions at several t (0 noise, 1 data): ``t`` ``(k,)``, ``n_eff`` and
    ``n_eff_without_prior`` ``(k, H)``, means over queries.

    >>> layer = nn.MultiheadAttention(8, 2)
    >>> s = torch.randn(1, 6, 8)
    >>> along = n_eff_over_time({t: decompose(layer, torch.randn(1, 5, 8), s) for t in (0.1, 0.5, 0.9)})
    >>> along["t"].tolist(), along["n_eff"].shape
    ([0.1, 0.5, 0.9], torch.Size([3, 2]))
    """
    t = sorted(found)
    rows = {name: [[float(getattr(h, name).nanmean()) for h in found[u].heads] for u in t] for name in _ALONG}
    return {"t": torch.tensor(t, dtype=torch.float64)} | {name: torch.tensor(r) for name, r in rows.items()}


_ALONG = ("n_eff", "n_eff_without_prior")


def principal_angles(a: Float[Tensor, "e r"], b: Float[Tensor, "e s"]) -> Float[Tensor, " k"]:
    """Angles between two subspaces with orthonormal bases, min(r, s) of them in radians, ascending.

    Small ones from sines, large ones from cosines, so that neither loses digits (Björck and Golub 1973).

    >>> principal_angles(torch.eye(3)[:, :2], torch.eye(3)[:, 1:])
    tensor([0.0000, 1.5708])
    """
    a, b = (a, b) if a.shape[1] >= b.shape[1] else (b, a)
    cross = a.mT @ b
    cosine = torch.linalg.svdvals(cross).clamp(max=1.0)
    sine = torch.linalg.svdvals(b - a @ cross).clamp(max=1.0).flip(0)
    return torch.where(cosine > 0.5**0.5, torch.asin(sine), torch.acos(cosine))


def _head(
    maps: Projections,
    i: int,
    weights: Tensor,
    plain: Tensor,
    log_prior: Tensor,
    real: Tensor | None,
    directions: Tensor | None,
    share: float,
) -> HeadSmoother:
    h = float(maps.scale[i]) ** -0.5
    q_basis, largest = _row_space(maps.q_weight[i].to(weights.dtype))
    k_basis, _ = _row_space(maps.k_weight[i].to(weights.dtype))
    angles = None if directions is None else principal_angles(k_basis, directions)
    kept = log_prior if real is None else log_prior[real[:, i]]
    return HeadSmoother(
        head=i,
        d_k=maps.q_weight.shape[1],
        bandwidth=h,
        bandwidth_input=h / largest if largest > 0 else float("inf"),
        rank=q_basis.shape[1],
        q_basis=q_basis,
        k_basis=k_basis,
        weights=weights,
        n_eff=weights.square().sum(-1).reciprocal(),
        n_eff_without_prior=plain.square().sum(-1).reciprocal(),
        total_variation=0.5 * (weights - plain).abs().sum(-1),
        prior_spread=float(kept.std(correction=0)),
        angles=angles,
        alignment=None if angles is None else float(angles.cos().square().mean()),
        share=share,
    )


def _row_space(weight: Tensor) -> tuple[Tensor, float]:
    """Orthonormal basis ``(e, rank)`` of the row space, and the largest singular value."""
    _, s, vh = torch.linalg.svd(weight, full_matrices=False)
    rank = int((s > 1e-6 * s[0]).sum())
    return vh[:rank].mT, float(s[0])


def _weights(q: Tensor, k: Tensor, h: Tensor, prior: bool, real: Tensor | None) -> Tensor:
    """softmax(-|q - k|^2 / (2 h^2) + |k|^2 / (2 h^2)), or without the last; in float64 where there is one:

    distance and prior nearly cancel.
    """
    dtype, wide = q.dtype, torch.float32 if q.device.type == "mps" else torch.float64
    q, k = q.to(wide), k.to(wide)
    centre = k.mean(-2, keepdim=True)
    y, z = q - centre, k - centre
    square = y.square().sum(-1, keepdim=True) - 2.0 * (y @ z.mT) + z.square().sum(-1)[..., None, :]
    if prior:
        square = square - k.square().sum(-1)[..., None, :]
    logits = -square / (2.0 * h.to(wide)[..., None] ** 2)
    logits = logits if real is None else logits.masked_fill(~real[..., None, :], -torch.inf)
    return torch.softmax(logits, -1).to(dtype)


def _real(mask: Tensor | None, extra: int, k: Tensor) -> Tensor | None:
    if mask is None:
        return None
    ends = mask.new_ones(mask.shape[0], extra)
    return torch.cat([mask, ends], 1)[:, None].expand(-1, k.shape[1], -1)


def _directions(source: Tensor, mask: Tensor | None, d_k: int, given: int | Tensor | None) -> Tensor | None:
    """Orthonormal leading directions ``(f, r)`` of the real keys' inputs; None where they do not vary."""
    if isinstance(given, Tensor):
        if given.ndim != 2 or given.shape[0] != source.shape[-1]:
            raise ValueError(f"directions: expected ({source.shape[-1]}, r), got {tuple(given.shape)}")
        return torch.linalg.qr(given.to(source.dtype)).Q
    rows = source.flatten(0, 1) if mask is None else source[mask]
    _, s, vh = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    rank = int((s > 1e-6 * s[:1].clamp(min=1e-30)).sum())
    count = min(rank, d_k if given is None else given)
    return vh[:count].mT if count else None


def _own(module: Any, x: Tensor, y: Tensor | None, z: Tensor | None, mask: Tensor | None) -> Tensor:
    """What the module itself returns, ``(B, n, o)``."""
    if isinstance(module, nn.MultiheadAttention):
        y = x if y is None else y
        z = y if z is None else z
        inputs = (x, y, z) if module.batch_first else tuple(u.transpose(0, 1) for u in (x, y, z))
        out = module(*inputs, key_padding_mask=None if mask is None else ~mask, need_weights=False)[0]
        return out if module.batch_first else out.transpose(0, 1)
    if hasattr(module, "log_bandwidth"):
        return module(x, x if y is None else y, z, mask)
    if hasattr(module, "to_q"):
        return module(x, encoder_hidden_states=y, attention_mask=_bias(mask, x, module.heads))
    return module(x, module.keys(x if y is None else y), None if mask is None else mask[:, None, None])


def _bias(mask: Tensor | None, x: Tensor, heads: int) -> Tensor | None:
    if mask is None:
        return None
    return torch.where(mask, 0.0, -10000.0).to(x.dtype)[:, None]


def _check(module: Any, queries: Tensor, keys: Tensor | None, values: Any, mask: Tensor | None) -> None:
    dropout = getattr(module, "dropout", 0.0)
    if getattr(module, "training", False) and isinstance(dropout, float) and dropout > 0.0:
        raise TypeError(f"module: expected one without dropout (call .eval()), got {type(module).__name__} in training")
    shape = (queries if keys is None else keys).shape
    if values is not None and any(hasattr(module, a) for a in ("to_q", "key_norm")):
        raise ValueError(f"values: expected None, as {type(module).__name__} takes them from its keys")
    if queries.ndim != 3 or len(shape) != 3 or queries.shape[0] != shape[0]:
        raise ValueError(
            f"queries, keys: expected (B, n, e) and (B, m, f), got {tuple(queries.shape)} and {tuple(shape)}"
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != shape[:2]):
        raise ValueError(
            f"mask: expected booleans of shape {tuple(shape[:2])}, True = real key, got {mask.dtype} of shape "
            f"{tuple(mask.shape)}"
        )
