r"""Attention as kernel smoothing: the exact head, the feature lift, and a trainable layer with Gaussian logits.

A softmax over -|x - alpha s_i|^2 / (2 sigma^2) is the exact denoiser of a support (t = 0 noise, t = 1 data), and
scaled dot-product attention is that smoother at h^2 = sqrt(d) with prior masses exp(|k|^2 / (2 sqrt d)) (Smola 2026,
arXiv 2605.13386).

- :class:`NWHead`: no parameters; equals :class:`~nwflow.NWField` for supports that are new at every call.
- :func:`lifted_attention`, :func:`lift_queries`, :func:`lift_keys`: the same through a fused attention kernel.
- :func:`nw_weights`, :func:`effective_bandwidth`: the weights of given queries and keys, with or without that prior.
- :class:`GaussianAttention`: learned projections, Gaussian logits, a bandwidth per head.
- :func:`leave_one_out`: how far the denoiser moves when each reference is dropped.
- :func:`decompose`: a multi-head layer as H smoothers with their priors, which together give its output.
"""

from nwflow.attention.decompose import Decomposition, HeadSmoother, decompose, n_eff_over_time, principal_angles
from nwflow.attention.gaussian import GaussianAttention
from nwflow.attention.head import NWHead
from nwflow.attention.influence import Influence, leave_one_out
from nwflow.attention.lift import effective_bandwidth, lift_keys, lift_queries, lifted_attention, nw_weights
from nwflow.attention.projections import Projections, projections

__all__ = [
    "Decomposition",
    "GaussianAttention",
    "HeadSmoother",
    "Influence",
    "NWHead",
    "Projections",
    "decompose",
    "effective_bandwidth",
    "leave_one_out",
    "lift_keys",
    "lift_queries",
    "lifted_attention",
    "n_eff_over_time",
    "nw_weights",
    "principal_angles",
    "projections",
]
