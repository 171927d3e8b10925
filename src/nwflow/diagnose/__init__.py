"""Diagnosis: does conditioning on these references work, which regime of failure holds, and what repairs it.

:func:`diagnose` measures on held-out points (t = 0 noise, t = 1 data) and returns a
:class:`~nwflow.diagnose.result.Diagnosis`; :func:`fit_remedy` fits one remedy and gives its field.
"""

from nwflow.diagnose.choose import REMEDIES, fit_remedy
from nwflow.diagnose.remedies import Gaussians, Stretched, fit_pool, linear, metric, pool, rule_of_thumb, smoothing
from nwflow.diagnose.result import Diagnosis
from nwflow.diagnose.run import diagnose

__all__ = [
    "REMEDIES",
    "Diagnosis",
    "Gaussians",
    "Stretched",
    "diagnose",
    "fit_pool",
    "fit_remedy",
    "linear",
    "metric",
    "pool",
    "rule_of_thumb",
    "smoothing",
]
