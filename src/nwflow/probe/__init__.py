"""Record the attention of a running model, without changing its output, and say how close it is to kernel smoothing."""

from nwflow.probe.call import Call
from nwflow.probe.compare import measure
from nwflow.probe.recorder import Recorder, record
from nwflow.probe.result import Agreement, HeadResult, LayerResult, Map, ProbeResult

__all__ = ["Agreement", "Call", "HeadResult", "LayerResult", "Map", "ProbeResult", "Recorder", "measure", "record"]
