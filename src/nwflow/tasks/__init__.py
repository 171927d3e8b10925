"""Tasks: meta-distributions of laws, each with a support to condition on and targets to generate.

One family a file, one way to draw: ``family.sample(n_tasks, m, n, generator) -> TaskBatch``.
"""

from nwflow.tasks.batch import TaskBatch
from nwflow.tasks.family import Family, SupportSize, parse_sizes
from nwflow.tasks.features import LabelledFeatures
from nwflow.tasks.mixed import Mixed
from nwflow.tasks.mixtures import GaussianMixtures
from nwflow.tasks.moons import Moons
from nwflow.tasks.registry import FAMILIES, make_family
from nwflow.tasks.rings import Rings
from nwflow.tasks.shells import SphericalShells
from nwflow.tasks.spirals import Spirals

__all__ = [
    "FAMILIES",
    "Family",
    "GaussianMixtures",
    "LabelledFeatures",
    "Mixed",
    "Moons",
    "Rings",
    "SphericalShells",
    "Spirals",
    "SupportSize",
    "TaskBatch",
    "make_family",
    "parse_sizes",
]
