r"""Gaussian logits as dot products, and dot products as Gaussian logits.

**The feature lift.** With X_t = alpha X_1 + sigma X_0 (t = 0 noise, t = 1 data),

    q = [alpha x / sigma^2,  -|x|^2 / (2 sigma^2),  alpha^2 / sigma^2]        k_i = [s_i,  1,  -|s_i|^2 / 2]

    q . k_i = -|x - alpha s_i|^2 / (2 sigma^2)

so a fused attention kernel evaluates the exact denoiser D = softmax(q k^T + log pi) s. The keys do not depend on t, and
nothing is singular at alpha = 0, where all logits of a query are equal (Smola 2026, arXiv 2605.13386).

**The identity.** Read backwards, q . k / sqrt(d) = -|q - k|^2 / (2 sqrt d) + |k|^2 / (2 sqrt d) + const(q): scaled
dot-product attention *is* Nadaraya-Watson smoothing of the values at bandwidth h = d^(1/4) with prior masses
exp(|k|^2 / (2 h^2)): long keys count more, and without that prior attention would smooth by distance alone.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

__all__ = ["effective_bandwidth", "lift_keys", "lift_queries", "lifted_attention", "nw_weights"]

ALIGN = 8  # fused CUDA kernels want widths in multiples of 8; columns of zeros change no dot product


def effective_bandwidth(d_k: int) -> float:
    """The bandwidth h = d_k^(1/4), in units of q and k, of dot-product attention with scale 1 / sqrt(d_k).

    >>> effective_bandwidth(16)
    2.0
    """
    if not d_k >= 1:
        raise ValueError(f"d_k: expected a width of at least 1, got {d_k}")
    return float(d_k) ** 0.25


def lift_queries(
    x: Float[Tensor, "*batch d"], alpha: float | Tensor, sigma: float | Tensor
) -> Float[Tensor, "*batch d+2"]:
    """[alpha x / sigma^2, -|x|^2 / (2 sigma^2), alpha^2 / sigma^2] in the dtype of ``x``.

    ``alpha`` and ``sigma`` are floats, 0-d, or have one axis for each axis of the batch: ``(B, 1)`` or ``(B, n)`` for x
    ``(B, n, d)``. Raises ``ValueError`` for other shapes; sigma must not be 0.

    >>> lift_queries(torch.tensor([[2.0, 1.0]]), alpha=0.5, sigma=0.5)
    tensor([[  4.,   2., -10.,   1.]])
    """
    alpha, sigma = _per_query(alpha, x, "alpha"), _per_query(sigma, x, "sigma")
    variance = sigma**2
    norm = -x.square().sum(-1, keepdim=True) / (2 * variance)
    return torch.cat([alpha * x / variance, norm, (alpha**2 / variance).expand_as(norm)], -1).to(x.dtype)


def lift_keys(s: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d+2"]:
    """[s, 1, -|s|^2 / 2], the same at every time.

    >>> lift_keys(torch.tensor([[2.0, 4.0]]))
    tensor([[  2.,   4.,   1., -10.]])
    """
    square = s.square().sum(-1, keepdim=True)
    return torch.cat([s, torch.ones_like(square), -square / 2], -1)


def lifted_attention(
    x: Float[Tensor, "*batch n d"],
    s: Float[Tensor, "*batch m d"],
    alpha: float | Tensor,
    sigma: float | Tensor,
    mask: Bool[Tensor, "*batch m"] | None = None,
    log_prior: Float[Tensor, "*batch m"] | None = None,
) -> Float[Tensor, "*batch n d"]:
    """The denoiser D(x) of the points ``s`` through ``scaled_dot_product_attention`` on lifted features.

    A demonstration and a fast path, no oracle: |x|^2, alpha x . s and alpha^2 |s|^2 are rounded one by one before they
    cancel, so weights err by about eps |x|^2 / sigma^2. In float64 that is below 1e-10 down to bandwidths of a tenth of
    the data scale. In float32 (eps = 1.2e-7) it is not small: measured in d = 64 on standard normal points whose
    neighbours are h apart, the total variation is 8e-6 at h = 1, 7e-4 at h = 0.1 and 0.09 at h = 0.01, and a hundred
    times that with the data shifted by 10. :class:`NWHead` and :class:`~nwflow.NWField` stay within 1e-5.

    Args:
        x: queries ``(*batch, n, d)``.
        s: points ``(*batch, m, d)``, keys and values alike.
        alpha, sigma: as for :func:`lift_queries`; sigma > 0.
        mask: ``(*batch, m)`` booleans, True = real point. What masked slots hold, NaN included, has no influence.
        log_prior: ``(*batch, m)`` logarithms of prior masses of any scale; it is added to the logits.

    Raises:
        ValueError: widths that differ; a row without a real point, named by its batch index.

    Example:
        >>> lifted_attention(torch.tensor([[0.5]]), torch.tensor([[-1.0], [1.0]]), alpha=0.5, sigma=0.5)
        tensor([[0.7616]])
    """
    _check_widths(x, s, "x", "s")
    shape, dtype = s.shape[:-1], torch.promote_types(torch.promote_types(x.dtype, s.dtype), torch.float32)
    q, s = lift_queries(x.to(dtype), alpha, sigma), s.to(dtype)
    if mask is not None:
        check_mask(mask, shape)
        s = torch.where(mask[..., None], s, 0)
    if log_prior is not None:
        bias = log_prior.to(dtype)[..., None, :]
        bias = bias if mask is None else torch.where(mask[..., None, :], bias, -torch.inf)
    else:
        bias = None if mask is None else mask[..., None, :]
    return attend(q, lift_keys(s), s, bias).to(x.dtype)


def nw_weights(
    q: Float[Tensor, "*batch n d"],
    k: Float[Tensor, "*batch m d"],
    bandwidth: float | Tensor | None = None,
    prior: Literal["key_norm"] | Tensor | None = None,
    mask: Bool[Tensor, "*#batch m"] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "*batch n m"]:
    """Nadaraya-Watson weights w_i = softmax_i(log pi_i - |q - k_i|^2 / (2 h^2)), summing to 1 over the last axis.

    Distances are formed about the mean of the real keys: a common shift of q and k costs no digits.

    Args:
        q: queries ``(*batch, n, d)``; k: keys ``(*batch, m, d)``.
        bandwidth: h in the units of q and k; :func:`effective_bandwidth` of d when None. A tensor broadcasts against
            ``(*batch, n)`` from the right: one a head is ``(H, 1)``, and ``(H,)`` is refused.
        prior: None for equal masses; ``"key_norm"`` for the masses exp(|k|^2 / (2 h^2)) which make this softmax
            (q k^T / h^2), plain attention at the default bandwidth; or masses ``(*batch, m)`` >= 0 of any scale.
        mask: ``(*batch, m)``, True = real key. Masked keys have weight exactly 0, whatever they hold.
        dtype: of computation and result; by default that of the arguments, at least float32.

    Raises:
        ValueError: widths that differ, a bandwidth that is not positive, a row without a key of positive mass.

    Example:
        >>> nw_weights(torch.zeros(1, 2), torch.tensor([[1.0, 0.0], [0.0, 2.0]]), bandwidth=1.0)
        tensor([[0.8176, 0.1824]])
    """
    _check_widths(q, k, "q", "k")
    dtype = dtype or torch.promote_types(torch.promote_types(q.dtype, k.dtype), torch.float32)
    q, k = q.to(dtype), k.to(dtype)
    h = _bandwidth(effective_bandwidth(q.shape[-1]) if bandwidth is None else bandwidth, q)
    log_prior = None
    if isinstance(prior, Tensor):
        mask = prior > 0 if mask is None else mask & (prior > 0)
        log_prior = torch.where(mask, prior.to(dtype), 1).log()[..., None, :]
    elif prior is not None and prior != "key_norm":
        raise ValueError(f'prior: expected None, "key_norm" or a tensor of masses, got {prior!r}')
    if mask is not None:
        check_mask(mask)
        k = torch.where(mask[..., None], k, 0)
    centre = key_centre(k, mask)
    k = k - centre if mask is None else torch.where(mask[..., None], k - centre, 0)
    if isinstance(prior, str):  # q . k / h^2, shifted by q . centre
        logits = (q / h**2) @ k.mT
    else:
        logits = ((q - centre) / h**2) @ k.mT - k.square().sum(-1)[..., None, :] / (2 * h**2)
    logits = logits if log_prior is None else logits + log_prior
    return torch.softmax(logits if mask is None else logits.masked_fill(~mask[..., None, :], -torch.inf), -1)


# ------------------------------------------------------------------------------------------------- shared by the heads


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float = 0.0) -> Tensor:
    """softmax(q k^T + bias) v by a fused kernel; columns of zeros bring all widths to one multiple of ``ALIGN``."""
    width = -(-max(q.shape[-1], v.shape[-1]) // ALIGN) * ALIGN
    lead = (None,) * (4 - q.ndim)  # the kernels take four axes, and anything less falls back to storing n m weights
    wide = (pad(u, (0, width - u.shape[-1]))[lead] for u in (q, k, v))
    bias = None if bias is None else bias[lead]
    out = scaled_dot_product_attention(*wide, attn_mask=bias, dropout_p=dropout, scale=1.0)
    return out[(0,) * len(lead)][..., : v.shape[-1]]


def key_centre(k: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of the real keys ``(..., 1, d)``, a constant for derivatives: results do not depend on it."""
    k = k.detach()
    if mask is None:
        return k.mean(-2, keepdim=True)
    return k.sum(-2, keepdim=True) / mask.sum(-1)[..., None, None].to(k.dtype)  # masked keys are zeros


def check_mask(mask: Tensor, shape: tuple[int, ...] | None = None) -> None:
    """Booleans of the expected shape with a real key in every row."""
    if mask.dtype != torch.bool or (shape is not None and tuple(mask.shape) != tuple(shape)):
        where = "" if shape is None else f" of shape {tuple(shape)}"
        raise ValueError(
            f"mask: expected booleans{where}, True = real point, got {mask.dtype} of shape {tuple(mask.shape)}"
        )
    empty = ~mask.any(-1)
    if bool(empty.any()):
        index = empty.nonzero()[0].tolist()
        at = "" if not index else f" in batch index {index[0] if len(index) == 1 else tuple(index)}"
        raise ValueError(f"mask: expected at least one real point in every row, got none{at}")


def _check_widths(q: Tensor, k: Tensor, name_q: str, name_k: str) -> None:
    if q.ndim < 2 or k.ndim < 2 or q.shape[-1] != k.shape[-1] or 0 in k.shape:
        raise ValueError(
            f"{name_q}, {name_k}: expected (*batch, n, d) and (*batch, m, d) of one width d with at least one key, "
            f"got {tuple(q.shape)} and {tuple(k.shape)}"
        )


def _per_query(value: float | Tensor, x: Tensor, name: str) -> Tensor:
    """``value`` so that it multiplies ``x`` ``(*batch, d)``; a number stays float64 until it meets ``x``."""
    if not isinstance(value, Tensor):
        return torch.tensor(float(value), dtype=torch.float64)
    if value.ndim == 0:
        return value
    batch = x.shape[:-1]
    if value.ndim != len(batch) or any(a not in (1, b) for a, b in zip(value.shape, batch, strict=True)):
        raise ValueError(
            f"{name}: expected a float, a 0-d tensor or one with the axes of the batch {tuple(batch)}, "
            f"got shape {tuple(value.shape)}"
        )
    return value[..., None]


def _bandwidth(h: float | Tensor, q: Tensor) -> Tensor:
    """h as a tensor ``(..., n or 1, 1)`` that multiplies ``q`` ``(*batch, n, d)``."""
    value = torch.as_tensor(h, dtype=q.dtype, device=q.device)
    if not bool((value > 0).all()):
        raise ValueError("bandwidth: expected positive numbers, got 0, a negative number or NaN")
    batch = tuple(q.shape[:-1])
    fits = value.ndim <= len(batch) and (value.ndim != 1 or len(batch) == 1)
    if not fits or any(a not in (1, b) for a, b in zip(value.shape[::-1], batch[::-1], strict=False)):
        raise ValueError(
            f"bandwidth: expected a float, a 0-d tensor or one that broadcasts against {batch}, with an axis for the "
            f"queries as in (H, 1) for one a head, got shape {tuple(value.shape)}"
        )
    return value[..., None]
