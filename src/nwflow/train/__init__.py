"""Training of in-context flow matching: configuration, loop, checkpoints and evaluation.

Needs the extra ``train``: ``pip install 'nwflow[train]'``.
"""

from nwflow.train.checkpoints import find_checkpoint, load_model, read_config
from nwflow.train.config import (
    CheckOptions,
    NetworkOptions,
    OptimizerOptions,
    TaskOptions,
    TimeOptions,
    TrainConfig,
)
from nwflow.train.evaluate import Comparison, DenoisingErrors, compare, denoising_errors
from nwflow.train.log import read_log
from nwflow.train.loop import Trainer
from nwflow.train.run import TrainResult, train

__all__ = [
    "CheckOptions",
    "Comparison",
    "DenoisingErrors",
    "NetworkOptions",
    "OptimizerOptions",
    "TaskOptions",
    "TimeOptions",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "compare",
    "denoising_errors",
    "find_checkpoint",
    "load_model",
    "read_config",
    "read_log",
    "train",
]
