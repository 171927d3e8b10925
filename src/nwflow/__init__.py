"""nwflow: the exact field of a support set, what it says about conditioning on references, and samplers for it."""

from nwflow.attention import GaussianAttention, NWHead, lifted_attention, nw_weights
from nwflow.field import Attribution, NWField, Posterior
from nwflow.metric import DiagonalMetric, FullMetric, IsotropicMetric, LowRankMetric, Metric, Smoothing
from nwflow.paths import CondOT, Cosine, DiscretePath, Path, VarianceExploding, VariancePreserving, from_diffusers
from nwflow.support import Support

__all__ = [
    "Attribution",
    "CondOT",
    "Cosine",
    "DiagonalMetric",
    "DiscretePath",
    "FullMetric",
    "GaussianAttention",
    "IsotropicMetric",
    "LowRankMetric",
    "Metric",
    "NWField",
    "NWHead",
    "Path",
    "Posterior",
    "Smoothing",
    "Support",
    "VarianceExploding",
    "VariancePreserving",
    "from_diffusers",
    "lifted_attention",
    "nw_weights",
]

__version__ = "0.1.0"
