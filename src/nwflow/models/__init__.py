"""Networks for in-context flow matching: v(x, t, S) for supports S that were never seen, and as a field of one support.

- :class:`ModelConfig`: sizes and parts, a frozen dataclass that goes to JSON.
- :class:`ICFM`: the network; ``forward`` is the velocity, ``denoise`` the posterior mean, ``loss`` that of each sample.
- :class:`ICFMField`: the network on one support (or tasks), a field that every sampler, metric and diagnosis takes.
"""

from nwflow.models.config import ModelConfig
from nwflow.models.field import ICFMField
from nwflow.models.icfm import ICFM

__all__ = ["ICFM", "ICFMField", "ModelConfig"]
