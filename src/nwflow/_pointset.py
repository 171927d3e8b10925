r"""What a set of points is, as pure functions: which rows are bad, the normalised prior, equal rows, spread.

With raw weights :math:`r_i`, validity :math:`v_i = [\text{real}][r_i > 0]`:

.. math:: \log \pi_i = \log r_i - \log\textstyle\sum_j v_j r_j \ (v_i = 1), \qquad \pi_i = 0,\ \log \pi_i = -\infty
          \ (v_i = 0), \qquad \text{scale}^2 = \frac1d \sum_i \pi_i |s_i - \bar s|^2 .

Every function works block by block: its memory does not grow with the size of the support.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK = 1 << 20  # elements looked at together; larger blocks leave the cache and are slower


@dataclass(frozen=True)
class SupportSummary:
    """What a support holds, in numbers that go to JSON and back.

    ``data_scale`` is sqrt(tr Cov / d) under the prior (population covariance), ``mean_norm`` the mean Euclidean norm of
    the real points, ``constant_columns`` how many of the ``d`` coordinates never change. For tasks all are pooled.
    """

    n: int
    d: int
    event_shape: tuple[int, ...]
    dtype: str
    n_tasks: int | None
    n_used: int
    n_dropped: int
    duplicates: int
    unique: int
    constant_columns: int
    data_scale: float
    mean_norm: float
    labels: dict[str, int] | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of JSON types."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SupportSummary:
        """The inverse of :meth:`to_dict`."""
        return cls(**{**values, "event_shape": tuple(values["event_shape"]), "notes": tuple(values["notes"])})


def known(flag: Tensor) -> bool:
    """The truth of a 0-d tensor; False under vmap, where it has no single value and checks are skipped."""
    try:
        return bool(flag)
    except RuntimeError as error:
        if "vmap" in str(error):
            return False
        raise


def blocks(rows: Tensor) -> tuple[Tensor, ...]:
    """The rows ``(m, d)`` in blocks of about ``BLOCK`` elements."""
    return rows.split(max(1, BLOCK // rows.shape[1]))


def bad_rows(points: Tensor, mask: Tensor | None, lead: int, drop: bool) -> Tensor | None:
    """Real rows with NaN or infinity as booleans over the ``lead`` axes, None when there are none.

    Raises ValueError with their count and the first of them unless ``drop``.
    """
    rows = points.detach().reshape(points.shape[:lead].numel(), -1)
    sums = torch.cat(
        [(block * 0).sum(1) for block in blocks(rows)]
    )  # 0 * NaN and 0 * inf are NaN; faster than isfinite
    bad = (sums != 0).reshape(points.shape[:lead])
    bad = bad if mask is None else bad & mask
    if not known(bad.any()):
        return None
    if drop:
        return bad
    where = bad.nonzero()
    first = where[0].tolist()
    place = f"index {first[0]}" if lead == 1 else f"index {first[1]} of task {first[0]}"
    raise ValueError(
        f"points: {len(where)} bad row{'s' if len(where) > 1 else ''} (NaN or infinity), first at {place}; "
        "drop_nonfinite=True drops such rows"
    )


def prior(raw: Tensor, real: Tensor, why_fewer: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """Which points have mass, the normalised weights, and their logarithms; gradients of the rest are exactly 0.

    Args:
        raw: ``(*T, m)`` weights of any positive scale; what they hold where ``real`` is False is ignored.
        real: ``(*T, m)`` booleans.
        why_fewer: said at the end of the message when nothing is left.

    Raises:
        ValueError: negative, NaN or infinite weights; a set without a point of positive weight.
    """
    if known((real & ~torch.isfinite(raw)).any()):
        raise ValueError("weights: expected finite numbers, got NaN or infinity")
    if known((real & (raw < 0)).any()):
        raise ValueError(f"weights: expected non-negative numbers, got {float(raw[real].min()):g}")
    valid = real & (raw > 0)
    _refuse_empty(valid, real, why_fewer)
    # The inner where of two: log and the division never see a zero, so none of their gradients is 0 * inf = NaN.
    largest = torch.where(valid, raw, 0).detach().amax(-1, keepdim=True)  # a sum of huge weights would overflow
    scaled = torch.where(valid, raw, 0) / largest
    total = scaled.sum(-1, keepdim=True)
    weights = scaled / total
    normal = valid & (weights.detach() > torch.finfo(weights.dtype).tiny)
    log_weights = torch.where(normal, torch.where(normal, weights, 1).log(), -torch.inf)
    tiny = valid & ~normal  # underflows as a weight, not as a logarithm
    apart = torch.where(tiny, torch.where(tiny, raw, 1).log() - largest.log() - total.log(), -torch.inf)
    return valid, weights, torch.where(tiny, apart, log_weights)


def _refuse_empty(valid: Tensor, real: Tensor, why_fewer: str) -> None:
    empty = ~valid.any(-1)
    if not known(empty.any()):
        return
    i = None if valid.ndim == 1 else int(empty.nonzero()[0])
    why = "every weight is 0" if bool(real.any() if i is None else real[i].any()) else "every point is masked"
    where = "" if i is None else f" in task {i} (batch index {i})"
    raise ValueError(f"points: no references{where}, {why}{why_fewer}")


def first_equal(points: Tensor, mask: Tensor | None) -> Tensor:
    """Index of the first real row that equals each row ``(m, *event)``: equal hashes, then an exact comparison.

    A row that is masked is its own first. -0.0 equals 0.0.
    """
    m = points.shape[0]
    index = torch.arange(m, device=points.device)
    rows = points.reshape(m, -1)
    keys = hashes(rows)
    real = torch.ones_like(index, dtype=torch.bool) if mask is None else mask
    keys = torch.where(real, keys, index)  # a hash that happens to equal an index is told apart below
    order = torch.argsort(keys, stable=True)
    new_run = torch.ones_like(real)
    new_run[1:] = keys[order][1:] != keys[order][:-1]
    first = torch.empty_like(index)
    first[order] = order[new_run][new_run.cumsum(0) - 1]
    for part in (first != index).nonzero().squeeze(1).split(max(1, BLOCK // rows.shape[1])):
        same = (rows[part] == rows[first[part]]).all(1) & real[part] & real[first[part]]
        for i in part[~same].tolist():
            first[i] = _first_of_run(rows, keys, real, i)
    return first


def _first_of_run(rows: Tensor, keys: Tensor, real: Tensor, i: int) -> int:
    """What ``first_equal`` says of row ``i`` whose hash collided with that of another row."""
    if not bool(real[i]):
        return i
    run = ((keys[:i] == keys[i]) & real[:i]).nonzero().squeeze(1).tolist()
    return next((j for j in run if bool((rows[j] == rows[i]).all())), i)


def hashes(rows: Tensor) -> Tensor:
    """A 64-bit hash of each row ``(m, d)``: a random odd-weighted sum of its bit patterns, modulo 2^64."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (rows.shape[1],), generator=generator).to(rows.device) * 2 + 1
    zero = torch.zeros((), dtype=rows.dtype, device=rows.device)  # -0.0 + 0.0 = 0.0: equal numbers, equal bits
    return torch.cat([((b + zero).view(bits).to(torch.int64) * factors).sum(1) for b in blocks(rows)])


def scale(points: Tensor, weights: Tensor) -> Tensor:
    """sqrt(tr Cov / d) of points ``(m, *event)`` under weights ``(m,)``; 0-d float64 (float32 on mps)."""
    rows, dtype = points.detach().reshape(points.shape[0], -1), wide(points)
    shares = weights.detach().to(dtype)
    pairs = list(zip(blocks(rows), (shares / shares.sum()).split(len(blocks(rows)[0])), strict=True))
    origin = rows[0].to(dtype)  # differences from a point of the set: exactly 0 where all points are equal
    mean = torch.stack([w @ (b.to(dtype) - origin) for b, w in pairs]).sum(0)
    square = [w @ (b.to(dtype) - origin - mean).square().sum(1) for b, w in pairs]
    return (torch.stack(square).sum() / rows.shape[1]).sqrt()


def norms(points: Tensor) -> Tensor:
    """Euclidean norms ``(m,)`` of points ``(m, *event)``, in float64 (float32 on mps)."""
    rows = points.detach().reshape(points.shape[0], -1)
    return torch.cat([torch.linalg.vector_norm(b.to(wide(points)), dim=1) for b in blocks(rows)])


def wide(points: Tensor) -> torch.dtype:
    """float64 on every device that has it."""
    return torch.float32 if points.device.type == "mps" else torch.float64


def pad_rows(parts: list[Tensor], value: float) -> Tensor:
    """Tensors ``(m_i, *event)`` as one ``(T, max m, *event)`` in their common dtype, filled up with ``value``."""
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    return torch.nn.utils.rnn.pad_sequence([p.to(dtype) for p in parts], batch_first=True, padding_value=value)
