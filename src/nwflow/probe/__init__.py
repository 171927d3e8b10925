"""Record the attention of a running model, without changing its output, and say how close it is to kernel smoothing."""

from nwflow.probe.adapters import Adapter, check_adapter, read_adapter, recognise
from nwflow.probe.call import Call
from nwflow.probe.capture import Capture
from nwflow.probe.compare import measure
from nwflow.probe.diffusers import AdapterProbe, record_adapter
from nwflow.probe.exact import exact_adapter, layer_features
from nwflow.probe.recorder import Recorder, record
from nwflow.probe.result import Agreement, HeadResult, LayerResult, Map, ProbeResult
from nwflow.probe.scales import check_scale, set_scale

__all__ = [
    "Adapter",
    "AdapterProbe",
    "Agreement",
    "Call",
    "Capture",
    "HeadResult",
    "LayerResult",
    "Map",
    "ProbeResult",
    "Recorder",
    "check_adapter",
    "check_scale",
    "exact_adapter",
    "layer_features",
    "measure",
    "read_adapter",
    "recognise",
    "record",
    "record_adapter",
    "set_scale",
]
