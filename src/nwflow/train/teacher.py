r"""What the network regresses on: the point itself, or a posterior mean with the same expectation and less variance.

The usual loss pairs X_t = alpha X_1 + sigma X_0 (noise at t = 0, data at t = 1) with the target X_1, whose mean given
X_t is the denoiser that is learned and whose variance is noise of the gradient.

*Sample.* Let X_1 be a uniformly chosen one of N points Z of the task. Given Z and X_t its mean is the exact
Nadaraya-Watson denoiser D_Z(X_t), so by Rao and Blackwell D_Z(X_t) has the same mean given X_t as X_1 and at most its
variance. It is unbiased for every N only because X_1 is one of the Z; what it removes is large where many points share
the weight (large bandwidth) and nothing once one has it all.

*Oracle.* E[X_1 | X_t] itself, where the law is known: no variance at all given the task.
"""

from __future__ import annotations

from torch import Tensor

from nwflow.field import NWField
from nwflow.paths import Path
from nwflow.support import Support
from nwflow.tasks import TaskBatch
from nwflow.train.config import TimeOptions


def points_needed(options: TimeOptions, targets: int) -> int:
    """How many target points a task of a batch needs: those that are learned, and those that teach."""
    return max(targets, options.teacher_points) if options.teacher == "sample" else targets


def denoiser_target(options: TimeOptions, tasks: TaskBatch, x: Tensor, t: Tensor, path: Path) -> Tensor | None:
    """The target in place of the points themselves at ``x`` ``(T, n, *event)``, ``t`` ``(T, n)``; None for those.

    Args:
        tasks: as drawn with :func:`points_needed` targets, the first n of which made ``x``.

    Raises:
        ValueError: teacher "oracle" for tasks whose posterior mean is not known.
    """
    if options.teacher == "oracle":
        return tasks.oracle(x, t, path)
    if options.teacher == "sample":
        return NWField(Support.batch(tasks.target), path, accuracy=None).denoise(x, t)
    return None
