r"""The limit of vanishing bandwidth (sigma = 0, the data end t = 1): the nearest point, ties shared by prior.

Points with -|c - z_i|^2 / 2 within rounding of the largest are equally near; a shortlist by float64 products is decided
by differences from one candidate (:func:`nwflow.kernel.rescore.direct_logits`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nwflow.kernel.posterior import Keys, Moments, Want
from nwflow.kernel.rescore import direct_logits, logit_error, one_by_one, shortlist


def nearest(c: Tensor, keys: Keys, want: Want) -> Moments:
    """The limit of vanishing bandwidth: points nearest to ``c`` ``(*T, n, d)``, equally near ones sharing by prior.

    A shortlist by float64 products is decided by direct differences; ``lse`` and the error fields are not defined.
    """
    one = torch.ones(1, 1, dtype=keys.work, device=c.device)
    if c.ndim == 3:
        return one_by_one(c, one[None], keys, lambda yi, bi, ki: nearest(yi, ki, want))
    bare = replace(keys, log_prior=torch.zeros_like(keys.log_prior), prior_spread=torch.zeros_like(keys.prior_spread))
    margin = 2.0 * logit_error(c, one, bare, keys.work).proven
    rows = []
    for i in range(c.shape[0]):
        q = c[i : i + 1]
        found = shortlist(q, one, bare, keys.work, margin[i : i + 1], margin.new_full((1,), -torch.inf), keys.m)
        if bool(found.overflow[0]):  # not a number
            nan = torch.full_like(q[0], torch.nan)
            rows.append((nan, nan, nan[0], nan[:1], torch.zeros(1, dtype=torch.long, device=q.device)))
            continue
        index = found.index[0][found.real[0]]
        z = keys.gather(index)[None]
        far, _, size = direct_logits(q, one, z, z[:, 0], torch.zeros_like(margin[:1]))
        equal = far[0] >= far.amax() - size[0]
        index = index[equal]
        w = torch.softmax(keys.log_prior[index], 0)
        z = keys.gather(index)
        top, order = w.topk(min(max(want.top, 1), index.numel()))
        rows.append((w @ z, w @ z.square(), 1.0 / w.square().sum(), top, index[order]))
    k = max([r[3].numel() for r in rows], default=1)
    empty = c.new_zeros(0, c.shape[-1]), c.new_zeros(0, c.shape[-1]), c.new_zeros(0)
    mean, square, n_eff = (torch.stack(v) for v in list(zip(*rows, strict=True))[:3]) if rows else empty
    pad = torch.nn.functional.pad
    weights = torch.stack([pad(r[3], (0, k - r[3].numel())) for r in rows]) if rows else c.new_zeros(0, k)
    index = torch.stack([pad(r[4], (0, k - r[4].numel()), value=-1) for r in rows]) if rows else weights.long()
    return Moments(torch.full_like(n_eff, torch.nan), mean, square, None, n_eff, weights, index)
