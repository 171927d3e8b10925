r"""Kernel smoothers of a support as parts of a network: the exact head, and others with learned smoothing.

t = 0 is noise, t = 1 is data. In coordinates z = (s - mean) / scale of each support, with a query x in the same units,
the posterior of a support whose points are widened to N(z_i, h_k^2 I) has the weights

    w_i = softmax_i(A_i / v_k),    A_i = alpha x . z_i - alpha^2 |z_i|^2 / 2,    v_k = sigma^2 + alpha^2 h_k^2,

and, with the local mean m_k = sum_i w_i z_i and the residual r_k = x - alpha m_k, the denoiser

    D_k = m_k + (alpha h_k^2 / v_k) r_k.

h_0 = 0 is the exact Nadaraya-Watson denoiser (Smola 2026, arXiv 2605.13386). A is formed in float64 and is the same for
all heads. The local covariance C_k = sum_i w_i (z_i - m_k)(z_i - m_k)^T enters through C_k r_k, the direction in which
a Gaussian fitted around the query would move it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nwflow.models.schedule import Times

__all__ = ["Smoothed", "Smoothers", "denoise_exactly", "smoother_weights"]

INITIAL = (0.2, 0.4, 0.8, 0.1, 1.6)  # smoothing of the learned heads before training, in units of the support's scale


class Smoothed(NamedTuple):
    """What K smoothers say of every query, in the units of the support.

    ``denoised``, ``mean``, ``along`` (alpha C r over the local variance) ``(T, K, n, d)``; ``spread`` (tr C / d),
    ``residual`` (mean square of r over its variance) and ``n_eff`` ``(T, K, n, 1)``.
    """

    denoised: Tensor
    mean: Tensor
    along: Tensor
    spread: Tensor
    residual: Tensor
    n_eff: Tensor


def smoother_weights(x: Tensor, z: Tensor, mask: Tensor | None, alpha: Tensor, variance: Tensor) -> Tensor:
    """Weights ``(T, K, n, m)`` in the dtype of ``variance``; at variance 0 the nearest points share them.

    x ``(T, n, d)`` and z ``(T, m, d)`` in float64, alpha ``(T or 1, n or 1, 1)``, variance ``(T or 1, K, n or 1, 1)``.
    """
    a = alpha * (x @ z.mT) - 0.5 * alpha.square() * z.square().sum(-1)[:, None]
    top = a if mask is None else a.masked_fill(~mask[:, None], -torch.inf)
    a = (a - top.amax(-1, keepdim=True).detach()).to(variance.dtype)[:, None]
    logits = a / variance.clamp(min=torch.finfo(variance.dtype).tiny * 2**40)
    return torch.softmax(logits if mask is None else logits.masked_fill(~mask[:, None, None], -torch.inf), -1)


def denoise_exactly(x: Tensor, z: Tensor, mask: Tensor | None, at: Times, dtype: torch.dtype) -> Tensor:
    """The exact denoiser ``(T, n, d)`` of centred points ``z``, in ``dtype``; arguments as for the weights."""
    w = smoother_weights(x, z, mask, at.alpha, at.sigma.square().to(dtype)[:, None])
    return w.squeeze(1) @ z.to(dtype)


class Smoothers(nn.Module):
    """``count`` smoothers; the first is exact, the smoothing of the others is learned."""

    def __init__(self, count: int) -> None:
        super().__init__()
        initial = [INITIAL[i % len(INITIAL)] * 2.0 ** (i // len(INITIAL)) for i in range(count - 1)]
        self.log_smoothing = nn.Parameter(torch.tensor(initial).log())

    def forward(self, x: Tensor, z: Tensor, mask: Tensor | None, alpha: Tensor, sigma: Tensor) -> Smoothed:
        """x, z, alpha and sigma in float64 and the units of the support; shapes as for :func:`smoother_weights`."""
        dtype = self.log_smoothing.dtype
        h2 = F.pad((2.0 * self.log_smoothing).exp(), (1, 0))[:, None, None]
        a, noise = alpha.to(dtype)[:, None], sigma.square().to(dtype)[:, None]
        variance = noise + a.square() * h2
        w = smoother_weights(x, z, mask, alpha, variance)
        keys, query, tiny = z.to(dtype)[:, None], x.to(dtype)[:, None], torch.finfo(dtype).tiny * 2**40
        mean = w @ keys
        r = query - a * mean
        safe = variance.clamp(min=tiny)
        spread = ((w @ keys.square().mean(-1, keepdim=True)) - mean.square().mean(-1, keepdim=True)).clamp(min=0.0)
        turned = (w * (r @ keys.mT)) @ keys - mean * (mean * r).sum(-1, keepdim=True)
        along = a * turned / (noise + a.square() * spread).clamp(min=tiny)
        return Smoothed(
            mean + a * h2 / safe * r, mean, along, spread, r.square().mean(-1, keepdim=True) / safe,
            w.square().sum(-1, keepdim=True).reciprocal(),
        )  # fmt: skip
