"""Whether queries and a support can meet at all: the same width, and the same scale.

A field compares x with alpha s coordinate by coordinate. Features of two encoders have two widths; features of one
encoder, normalised on one side only, have two scales, and every weight is then decided by the norm.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from nwflow._pointset import norms
from nwflow.support import Support


class ScaleWarning(UserWarning):
    """Queries and support differ in scale as they do when only one of them is normalised."""


def check_widths(
    query: Tensor | Support, support: Tensor | Support, query_name: str = "query", support_name: str = "support"
) -> None:
    """ValueError that names both widths and both arguments (or files) unless the events of the two have one shape.

    Example:
        >>> check_widths(torch.zeros(4, 1664), torch.zeros(10, 1280), "q.npy", "refs.npy")
        Traceback (most recent call last):
        ValueError: q.npy has width 1664 but refs.npy has width 1280; expected one width (were two encoders used?)
    """
    q, s = _event_shape(query), _event_shape(support)
    if q == s:
        return
    kind = "width" if len(q) == len(s) == 1 else "event shape"
    left, right = (q[0], s[0]) if kind == "width" else (q, s)
    raise ValueError(
        f"{query_name} has {kind} {left} but {support_name} has {kind} {right}; expected one {kind} "
        "(were two encoders used?)"
    )


def check_same_scale(
    query: Tensor | Support,
    support: Tensor | Support,
    query_name: str = "query",
    support_name: str = "support",
    factor: float = 2.0,
) -> float:
    """The ratio of the mean norms of the points, larger over smaller; a :class:`ScaleWarning` above ``factor``.

    Example:
        >>> check_same_scale(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 4.0]]))
        1.25
    """
    q, s = _mean_norm(query), _mean_norm(support)
    ratio = 1.0 if q == s else max(q, s) / min(q, s) if min(q, s) > 0 else float("inf")
    if ratio > factor:
        warnings.warn(
            f"{query_name} has mean norm {q:.4g} but {support_name} has mean norm {s:.4g}: is only one of them "
            "normalised? normalize=True does it for both",
            ScaleWarning,
            stacklevel=2,
        )
    return ratio


def unit_norm(points: Tensor, name: str = "points") -> Tensor:
    """Each point ``(m, *event)`` divided by its Euclidean norm, in the dtype of ``points``.

    Raises:
        ValueError: a point is zero and has no direction (their count and the first index).
    """
    wide = torch.float32 if points.device.type == "mps" else torch.float64  # squares of float32 overflow
    length = torch.linalg.vector_norm(points.reshape(len(points), -1), dim=1, dtype=wide)
    length = length.to(torch.promote_types(points.dtype, torch.float32))
    zero = (length == 0).nonzero().squeeze(1)
    if len(zero):
        raise ValueError(f"{name}: {len(zero)} zero rows cannot be normalised, first at index {int(zero[0])}")
    return (points / length.reshape(-1, *(1,) * (points.ndim - 1))).to(points.dtype)


def _event_shape(points: Tensor | Support) -> tuple[int, ...]:
    return points.event_shape if isinstance(points, Support) else tuple(points.shape[1:])


def _mean_norm(points: Tensor | Support) -> float:
    if isinstance(points, Support):
        points = points.points[points.valid]
    return float(norms(points).mean())
