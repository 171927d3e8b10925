r"""Exact moments over lists of candidates: each query weighs only the points in its own list.

The weights are those of :mod:`nwflow.kernel.posterior` (no time enters) restricted to the list and normalised there, so
a list that holds all but a share eps of the weight is within eps in total variation. Three ways, by cost: long lists
that overlap are one small support for all queries, under the whole accuracy contract; other long lists are products in
the working dtype, one query after another; short ones, and all where such products cancel, direct differences.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from nwflow.kernel.posterior import Keys, Moments, Want, finish, stream
from nwflow.kernel.rescore import PAIRS, Shortlist, assemble, logit_error, posterior, rescored

OVERLAP = 4  # lists whose union is this many times shorter than their sum are scored as one support
FEW = 24  # a shorter list is cheaper by differences: a pair costs three times more, but queries share one call


def subset(keys: Keys, index: Tensor) -> Keys:
    """The support of the points at ``index``, one set; radius and prior spread stay upper bounds."""
    parts = {name: getattr(keys, name)[index] for name in ("points", "square", "log_prior")}
    cheap = None if keys.cheap is None else keys.cheap[index]
    return replace(keys, cheap=cheap, lifted=None, valid=None if keys.valid is None else keys.valid[index], **parts)


def over_lists(y: Tensor, b: Tensor, keys: Keys, want: Want, row: Tensor, col: Tensor,
               tol: float) -> tuple[Moments, int]:  # fmt: skip
    """Moments of ``y`` ``(n, d)``, ``b`` ``(n, 1)`` over the pairs (``row``, ``col``), at least one per query, to
    tolerance ``tol``; and how many pairs were scored."""
    n, order = y.shape[0], torch.sort(row, stable=True).indices
    row, col = row[order], col[order]
    count = torch.bincount(row, minlength=n)
    if row.numel() > OVERLAP * FEW * n and OVERLAP * (union := torch.unique(col)).numel() < row.numel():
        moments = posterior(y, b, subset(keys, union), want, tol)
        if (index := moments.index) is not None:
            moments = replace(moments, index=torch.where(index < 0, -1, union[index.clamp(min=0)]))
        return moments, n * union.numel()
    error = logit_error(y, b, keys, keys.work).proven.expand(n)
    short = (count <= FEW) | ~(error <= tol)
    groups, which = [], []
    if bool(short.any()):
        mine = short[row]
        at = short.nonzero().squeeze(-1)
        found = _padded_lists((torch.cumsum(short, 0) - 1)[row[mine]], col[mine], count[at])
        groups.append(rescored(y[at], b[at], keys, want, found, 0.0))
        which.append(at)
    lists = col.split(count.tolist())
    for i in (~short).nonzero().squeeze(-1).tolist():
        groups.append(_one(y[i : i + 1], b[i : i + 1], keys, want, lists[i], error[i : i + 1]))
        which.append(row.new_tensor([i]))
    return assemble(groups, torch.cat(which)), row.numel()


def _padded_lists(row: Tensor, col: Tensor, count: Tensor) -> Shortlist:
    """Lists sorted by row as a padded matrix."""
    place = torch.arange(row.numel(), device=row.device) - (torch.cumsum(count, 0) - count)[row]
    index = torch.zeros(count.numel(), int(count.max()), dtype=torch.long, device=row.device)
    real = torch.zeros_like(index, dtype=torch.bool)
    index[row, place], real[row, place] = col, True
    return Shortlist(index, real, torch.zeros_like(count, dtype=torch.bool))


def _one(y: Tensor, b: Tensor, keys: Keys, want: Want, index: Tensor, error: Tensor) -> Moments:
    """One query over its list, by products in the working dtype."""
    bare = subset(replace(keys, cheap=keys.cheap[:, :0], lifted=None), index)  # its points are all that is read
    moments = finish(stream(y, b, bare, want, keys.work, keys.work, key_block=max(64, PAIRS // y.shape[1])))
    if moments.index is not None:
        moments = replace(moments, index=index[moments.index])
    rounding = torch.finfo(keys.work).eps / 2 * (math.log(keys.m) + 4.0)
    return replace(moments, error=error + rounding, proven=torch.ones_like(error, dtype=torch.bool))
