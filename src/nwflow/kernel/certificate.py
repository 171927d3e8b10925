r"""The collapse certificate: when the rest of a flow is one exact step, and how far that can be from the truth.

With rho = alpha / sqrt(v), v = sigma^2 + alpha^2 h0^2 the variance of noise and isotropic smoothing together (t = 0
noise, t = 1 data), the scaled state y = x / sqrt(v) obeys dy/drho = m, the local mean sum_j w_j s_j. Seen from one
point s_i, e = y - rho s_i obeys de/drho = m - s_i, and were w_i = 1 it would be constant: the *exact step*

    x_s = alpha_s s_i + sqrt(v_s / v_t) (x_t - alpha_t s_i).

Let G_j = l_i - l_j be the leads, g_j = G_j - log(pi_i / pi_j) = (rho^2 D_j^2 + 2 rho <s_i - s_j, e>) / 2 the leads
without priors, D_j = |s_j - s_i|, and with the weights at t

    q = sum_{j != i} exp(-G_j) = (1 - w_i) / w_i,    beta = rho sum_j exp(-G_j) D_j,    lambda = min_j g_j.

**Theorem.** If lambda > 1 + beta^2 / 2, then at every later time |x_s - exact step| <= sqrt(v_s) q / (sqrt(2 lambda) -
beta), and all leads only grow.

*Proof.* Along the flow |de/drho| <= F = sum_j exp(-G_j) D_j, since w_j <= exp(-G_j). Hence

    dG_j/drho = rho D_j^2 + <s_i - s_j, e> + rho <s_i - s_j, de/drho> >= g_j / rho + rho D_j^2 / 2 - rho D_j F,

which is at least D_j (sqrt(2 g_j) - rho F) by the inequality of the means. With u = rho D_j, rho dG_j/drho >= g_j +
u^2/2 - u rho F >= g_j - (rho F)^2 / 2. While rho F <= beta and g_j >= lambda this exceeds 1, so g_j grows and every
term rho exp(-G_j) D_j of rho F falls: both stay true for ever. The way of e is then at most

    sum_j int exp(-G_j) D_j drho <= sum_j int exp(-G_j) dG_j / (sqrt(2 lambda) - beta) <= q / (sqrt(2 lambda) - beta).

No single lead is needed: exp(-G_j) <= q gives lambda >= -log q - log(pi_i / min pi), and D_j <= 2 R, R the radius of
the support, gives beta <= 2 rho R q. Under a metric all lengths are its own. Anisotropic smoothing has a rho for every
coordinate, and then a lead can fall: nothing is certified there. Noise that is renewed can lead anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["drift_bound", "left_over"]

LEAST = 1e-15  # of q: what float64 weights near 1 do not resolve


def left_over(weight: Tensor, error: Tensor | float, missing: Tensor | float) -> Tensor:
    """An upper bound of q = (1 - w) / w, ``(n,)``.

    Args:
        weight: ``(n,)``, the largest weight as computed, float64 where the device has it.
        error: how far each logit may be off.
        missing: weight that was left out of the computation at most.
    """
    error = torch.as_tensor(error, dtype=weight.dtype, device=weight.device)
    q = ((1.0 - weight).clamp(min=0.0) / weight) * torch.exp(2.0 * error) + missing / weight
    return q + max(LEAST, 4.0 * torch.finfo(weight.dtype).eps)


def drift_bound(q: Tensor, reach: Tensor | float, prior_lead: Tensor | float = 0.0) -> Tensor:
    """The theorem's bound of |x_s - exact step| / sqrt(v_s), ``(n,)``; inf where it does not apply.

    Args:
        q: ``(n,)``, an upper bound of (1 - w_i) / w_i. reach: rho R, with R the largest norm of the centred support.
        prior_lead: log(pi_i / min pi), 0 for uniform priors.

    Example:
        >>> drift_bound(torch.tensor([1e-1, 1e-4]), reach=10.0)
        tensor([       inf, 2.3310e-05])
    """
    beta, lead = 2.0 * reach * q, -q.log() - prior_lead
    bound = q / ((2.0 * lead).clamp(min=0.0).sqrt() - beta)
    return torch.where(lead > 1.0 + 0.5 * beta.square(), bound, torch.inf)
