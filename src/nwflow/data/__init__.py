"""Data: files, folders and bundled sets become a :class:`~nwflow.support.Support`, the data end t = 1 of a path.

Nothing that is loaded can run code, nothing is downloaded, and a file that is not what its name says is one sentence.
"""

from nwflow.data.bundled import NAMES as BUNDLED
from nwflow.data.checks import ScaleWarning, check_same_scale, check_widths, unit_norm
from nwflow.data.encoders import PatchWarning, TransformersEncoder, load_encoder
from nwflow.data.files import load_support
from nwflow.data.images import list_images
from nwflow.data.save import read_metadata, save_points
from nwflow.data.source import MissingDataError

__all__ = [
    "BUNDLED",
    "MissingDataError",
    "PatchWarning",
    "ScaleWarning",
    "TransformersEncoder",
    "check_same_scale",
    "check_widths",
    "list_images",
    "load_encoder",
    "load_support",
    "read_metadata",
    "save_points",
    "unit_norm",
]
