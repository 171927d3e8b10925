"""Record the attention of a running model, without changing its output, and say how close it is to kernel smoothing."""

from nwflow.probe.call import Call
from nwflow.probe.result import Agreement, HeadResult, LayerResult, Map, ProbeResult

__all__ = ["Agreement", "Call", "HeadResult", "LayerResult", "Map", "ProbeResult"]
