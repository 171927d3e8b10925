r"""Checked point sets and their squared distances, tile by tile.

.. math:: |a - b|^2 = |a - c|^2 + |b - c|^2 - 2 \langle a - c, b - c \rangle, \qquad c = \text{the pooled mean}

is one matrix product and fast, but its absolute error is about eps (|a - c|^2 + |b - c|^2): it can be negative, and it
has no correct digit for points that nearly coincide. So it is taken in float64 on centred data, and pairs closer than
eps^(1/3) of their norms are formed again from direct differences. In few dimensions all pairs are. Hence no distance is
negative and identical rows are at exactly 0. A device without float64 does the same in float32.

Rows are converted, centred and compared a tile at a time, so the extra memory does not grow with the number of points.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

_TILE = 1 << 21  # numbers in a tile of distances, and in the rows that make one: a few of these are alive together
_DIRECT_DIM = 32  # up to here direct differences cost no more than the matrix product with its repairs
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def working_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device that has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def relative_rounding(dtype: torch.dtype) -> float:
    """A relative size that bounds how much a squared distance can change with the tile it is computed in."""
    return 16 * torch.finfo(dtype).eps ** (2 / 3)  # eps of the norms, over the eps^(1/3) below which pairs are repaired


def as_rows(points: Tensor, name: str, minimum: int = 1, reason: str = "") -> Tensor:
    """``points`` (n, *event) as rows (n, d), checked: a floating tensor, n >= minimum, every entry finite."""
    if not isinstance(points, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor of shape (n, *event), got {type(points).__name__}")
    if points.dtype not in _FLOATS:
        raise TypeError(f"{name}: expected a floating dtype (convert with .float()), got {points.dtype}")
    if points.ndim == 0:
        raise ValueError(f"{name}: expected shape (n, *event), got a 0-d tensor")
    n = len(points)
    if n < minimum:
        why = f" ({reason})" if reason else ""
        raise ValueError(f"{name}: expected at least {minimum} point{'s' * (minimum > 1)}{why}, got {n}")
    rows = points.detach().reshape(n, -1) if points.numel() else points.detach().reshape(n, 0)
    if rows.shape[1] == 0:
        raise ValueError(f"{name}: expected events with at least one number, got shape {tuple(points.shape)}")
    _check_range(rows, name)
    return rows


def _check_range(rows: Tensor, name: str) -> None:
    low, high = (float(v) for v in torch.aminmax(rows))
    limit = torch.finfo(working_dtype(rows.device)).max ** 0.5 / (4 * rows.shape[1])
    if max(-low, high) <= limit:  # false for NaN
        return
    bad = ~torch.isfinite(rows).all(dim=1)
    if bool(bad.any()):
        raise ValueError(
            f"{name}: expected finite numbers, got {int(bad.sum())} of {len(rows)} rows with NaN or inf, "
            f"the first at index {int(bad.nonzero()[0])}"
        )
    raise ValueError(
        f"{name}: expected magnitudes below {limit:.1e}, whose squares do not overflow, got {max(-low, high):.1e}"
    )


def as_pair(
    x: Tensor, y: Tensor, names: tuple[str, str] = ("x", "y"), minimum: int = 1, reason: str = ""
) -> tuple[Tensor, Tensor]:
    """Two checked point sets of one event shape on one device, as rows."""
    rows = as_rows(x, names[0], minimum, reason), as_rows(y, names[1], minimum, reason)
    if x.shape[1:] != y.shape[1:]:
        raise ValueError(
            f"{names[0]} and {names[1]}: expected one event shape, got {tuple(x.shape[1:])} and {tuple(y.shape[1:])}"
        )
    if x.device != y.device:
        raise ValueError(f"{names[0]} and {names[1]}: expected one device, got {x.device} and {y.device}")
    return rows


def check_block_size(block_size: int | None) -> int | None:
    """None, or a positive number of rows."""
    if block_size is None:
        return None
    if isinstance(block_size, bool) or not isinstance(block_size, int):
        raise TypeError(f"block_size: expected an int or None, got {type(block_size).__name__}")
    if block_size < 1:
        raise ValueError(f"block_size: expected at least 1 row, got {block_size}")
    return block_size


class Tile(NamedTuple):
    """Some rows of a point set (a view, in its own dtype), where they are in that set and where in the pooled sets."""

    rows: Tensor
    local: slice
    pooled: slice


@dataclass(frozen=True)
class Cloud:
    """Point sets of one event, cut into tiles (none spans two sets), and the mean of them all."""

    sets: tuple[tuple[Tile, ...], ...]
    centre: Tensor

    @classmethod
    def of(cls, *sets: Tensor, block_size: int | None = None) -> Cloud:
        """A cloud of checked rows; ``block_size`` rows make a tile, by default as many as keep it near 16 MiB."""
        d, total = sets[0].shape[1], sum(len(s) for s in sets)
        step = check_block_size(block_size) or max(1, min(int(_TILE**0.5), _TILE // d))
        starts = accumulate((len(s) for s in sets), initial=0)
        cut = tuple(_cut(s, start, step) for s, start in zip(sets, starts, strict=False))
        dtype = working_dtype(sets[0].device)
        sums = torch.stack([tile.rows.to(dtype).sum(0) for tiles in cut for tile in tiles])
        return cls(cut, sums.sum(0) / total)

    def pairs(self) -> Iterator[tuple[Tile, Tile, Tensor]]:
        """Every unordered pair of tiles of the pooled sets once, with its squared distances."""
        tiles = [tile for tiles in self.sets for tile in tiles]
        for i, p in enumerate(tiles):
            a = self._wide(p)
            for q in tiles[i:]:
                yield p, q, squared_distances(a, a if q is p else self._wide(q), self.centre)

    def cross(self, left: int, right: int) -> Iterator[tuple[Tile, Tile, Tensor]]:
        """Every pair of a tile of one set and a tile of another (or of the same), with its squared distances."""
        for p in self.sets[left]:
            a = self._wide(p)
            for q in self.sets[right]:
                yield p, q, squared_distances(a, a if q is p else self._wide(q), self.centre)

    def _wide(self, tile: Tile) -> Tensor:
        return tile.rows.to(self.centre.dtype)


def _cut(rows: Tensor, start: int, step: int) -> tuple[Tile, ...]:
    bounds = ((i, min(i + step, len(rows))) for i in range(0, len(rows), step))
    return tuple(Tile(rows[i:j], slice(i, j), slice(start + i, start + j)) for i, j in bounds)


def squared_distances(a: Tensor, b: Tensor, centre: Tensor) -> Tensor:
    """Squared distances (p, q) of float64 rows (p, d) and (q, d): never negative, exactly 0 for identical rows."""
    if a.shape[1] <= _DIRECT_DIM:
        return _direct(a, b)
    u, v = a - centre, b - centre
    norms = u.square().sum(1)[:, None] + v.square().sum(1)
    d2 = torch.addmm(norms, u, v.T, alpha=-2)
    near = d2 <= torch.finfo(d2.dtype).eps ** (1 / 3) * norms
    i, j = near.nonzero(as_tuple=True)
    if len(i) > d2.numel() // 16:
        return _direct(a, b)
    step = max(1, _TILE // (4 * a.shape[1]))
    for p, q in zip(i.split(step), j.split(step), strict=True):
        d2[p, q] = (a[p] - b[q]).square().sum(1)
    return d2


def _direct(a: Tensor, b: Tensor) -> Tensor:
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square_()
