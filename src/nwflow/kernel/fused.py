r"""The float32 pass as one call: PyTorch's fused attention kernel on lifted keys, with its log-sum-exp.

With lifted queries Q = [y, b, 1] and lifted keys K_i = [z_i, -f_i / 2, log pi_i] a log-weight is l_i = Q . K_i, so that
attention with K as keys *and* values (equal widths are what the kernel asks for) returns L = log sum_i exp l_i and
O = sum_i w_i K_i, whose first d columns are the mean. No block of logits is ever written to memory; its exponential is
a vectorised one that is correct to ULPS. Time does not enter here (t = 0 noise, t = 1 data in the field).

The kernel shares its work out over blocks of queries; where these are fewer than threads, the support is split too and
its parts are merged as those of several processes are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nwflow.kernel.posterior import Keys, Partial, Want, merge

ULPS = 20.0  # of the kernel's exponential, beyond those of a plain one
_KERNEL = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def applies(y: Tensor, b: Tensor, keys: Keys, want: Want, dtype: torch.dtype) -> bool:
    """Whether the kernel exists and serves this: float32, one support, one bandwidth per query, mean and L alone."""
    bare = want.mean and not (want.square or want.prior or want.mass2 or want.top)
    single = b.ndim == 2 and b.shape[-1] == 1 and keys.valid is None and y.shape[-2] > 0
    lifted = keys.lifted is not None and keys.lifted.dtype == dtype == torch.float32
    return _KERNEL is not None and bare and single and lifted and y.device.type == "cpu"


def fused(y: Tensor, b: Tensor, keys: Keys) -> Partial:
    """Partial sums of all keys for ``y`` ``(n, d)``, ``b`` ``(n or 1, 1)``."""
    assert keys.lifted is not None and _KERNEL is not None
    n, d = y.shape
    q = torch.cat([y, b.expand(n, 1), torch.ones_like(y[:, :1])], -1).to(keys.lifted.dtype)
    parts = min(keys.m, max(1, torch.get_num_threads() // -(-n // _query_block(n))))
    even = keys.m // parts * parts
    total: Partial | None = None
    for rows, heads in ((keys.lifted[:even], parts), (keys.lifted[even:], 1)):
        if not rows.shape[0]:
            continue
        k = rows.view(1, heads, rows.shape[0] // heads, d + 2)
        o, lse = _KERNEL(q.expand(1, heads, n, d + 2), k, k, scale=1.0)
        o, lse = o[0, :, :, :d].to(keys.work), lse[0, :, :, None].to(keys.work)
        for i in range(heads):
            part = Partial(lse[i], torch.ones_like(lse[i]), first=o[i])
            total = part if total is None else merge(total, part)
    assert total is not None
    return total


def _query_block(n: int) -> int:
    """Queries that one thread takes at a time."""
    return 256 if n >= 768 else 64 if n >= 192 else 32
