"""nwflow: the exact field of a support set, what it says about conditioning on references, and samplers for it."""

from nwflow.attention import GaussianAttention, NWHead, lifted_attention, nw_weights
from nwflow.data import load_support
from nwflow.field import Attribution, NWField, Posterior
from nwflow.metric import DiagonalMetric, FullMetric, IsotropicMetric, LowRankMetric, Metric, Smoothing
from nwflow.paths import CondOT, Cosine, DiscretePath, Path, VarianceExploding, VariancePreserving, from_diffusers
from nwflow.sample import Samples, guide, log_prob, sample
from nwflow.subspace import SubspaceField
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
    "Samples",
    "Smoothing",
    "SubspaceField",
    "Support",
    "VarianceExploding",
    "VariancePreserving",
    "from_diffusers",
    "guide",
    "lifted_attention",
    "load_support",
    "log_prob",
    "nw_weights",
    "sample",
]

__version__ = "0.1.0"
