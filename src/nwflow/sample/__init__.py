"""Sampling: the flow from noise (t = 0) to data (t = 1), its stochastic variant, guidance and likelihoods.

A sampler is a list of nodes of a path (``grids``), a rule for the step between two of them (``steps``, ``adaptive``)
and the one loop (``sampler``) that runs it on noise which depends on the sample alone (``noise``, ``start``).
``guidance`` joins two fields, ``likelihood`` runs the flow backwards.
"""

from nwflow.sample.guidance import Guided, guide
from nwflow.sample.likelihood import log_prob
from nwflow.sample.sampler import Samples, sample

__all__ = ["Guided", "Samples", "guide", "log_prob", "sample"]
