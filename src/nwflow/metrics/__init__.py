"""Two-sample, memorisation and coverage metrics of generated points against references.

Samples are tensors of shape (n, *event), compared as vectors of the flattened event. Every metric returns a frozen
record that names its estimator, carries an uncertainty and goes to JSON and back (``to_dict``, ``from_dict``).
Distances are computed in float64 from tiles, so memory stays bounded and no offset of the data costs digits. All
compare points at the data end of the flow, ``t = 1``; each module opens with its formulas.

- `mmd2`, `energy_distance`: are both samples from one law? Kernel statistics with a permutation test.
- `sliced_wasserstein`: how far is one from the other, in the units of the data? (extra `ot`)
- `c2st`: can a classifier tell them apart?
- `memorisation`: which samples are copies of a reference?
- `coverage`: precision, recall, density and coverage of nearest-neighbour balls.
- `effective_sample_size`: how many of the weights count?
- `median_bandwidth`, `silverman_bandwidth`: bandwidths from data.
"""

from nwflow.metrics.bandwidth import median_bandwidth, silverman_bandwidth
from nwflow.metrics.classifier import C2STResult, c2st
from nwflow.metrics.copies import MemorisationResult, memorisation
from nwflow.metrics.coverage import CoverageResult, coverage
from nwflow.metrics.sliced import SlicedWassersteinResult, sliced_wasserstein
from nwflow.metrics.two_sample import EnergyResult, MMDResult, TwoSampleResult, energy_distance, mmd2
from nwflow.metrics.weights import effective_sample_size

__all__ = [
    "C2STResult",
    "CoverageResult",
    "EnergyResult",
    "MMDResult",
    "MemorisationResult",
    "SlicedWassersteinResult",
    "TwoSampleResult",
    "c2st",
    "coverage",
    "effective_sample_size",
    "energy_distance",
    "median_bandwidth",
    "memorisation",
    "mmd2",
    "silverman_bandwidth",
    "sliced_wasserstein",
]
