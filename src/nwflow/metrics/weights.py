r"""Effective sample size of importance or attention weights.

.. math:: n_{\mathrm{eff}} = \frac{(\sum_i w_i)^2}{\sum_i w_i^2} = e^{2\,\mathrm{LSE}(l) - \mathrm{LSE}(2 l)},
          \qquad l_i = \log w_i,

which does not change when all weights are multiplied by a constant (Kish 1965). For normalised weights it is 1 / sum
w^2. It is a property of the weights, not an estimate: there is no uncertainty to report.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def effective_sample_size(
    weights: Float[Tensor, "... m"] | None = None, *, log_weights: Float[Tensor, "... m"] | None = None
) -> Tensor:
    """Effective sample size over the last dimension, between 1 and m.

    Give exactly one of the two: non-negative ``weights`` or their logarithms. Neither needs to be normalised, and
    -inf is the logarithm of an absent weight.

    Returns
    -------
    Tensor
        Shape (*batch,), in the dtype of the input (float32 for half precision).

    Raises
    ------
    ValueError
        For no weights, NaN, a negative or infinite weight, and rows whose weights are all 0 (the first is named).

    Examples
    --------
    >>> float(effective_sample_size(torch.tensor([2.0, 2.0])))
    2.0
    >>> float(effective_sample_size(log_weights=torch.tensor([-1000.0, -1001.0], dtype=torch.float64)))
    1.6480542737
    """
    if (weights is None) == (log_weights is None):
        raise ValueError(
            "weights, log_weights: expected exactly one of them, got " + ("none" if weights is None else "both")
        )
    if weights is not None:
        w = _checked(weights, "weights")
        if bool((w < 0).any()):
            raise ValueError(f"weights: expected non-negative numbers, got {int((w < 0).sum())} below 0")
        top = w.amax(-1, keepdim=True)
        _check_mass(top > 0, "weights", "0")
        w = w / top  # neither overflows nor underflows when squared
        return w.sum(-1).square() / w.square().sum(-1)
    assert log_weights is not None
    logs = _checked(log_weights, "log_weights")
    _check_mass(logs.amax(-1, keepdim=True) > -torch.inf, "log_weights", "-inf")
    w = (logs - logs.amax(-1, keepdim=True)).exp()
    return w.sum(-1).square() / w.square().sum(-1)


def _checked(values: Tensor, name: str) -> Tensor:
    if not isinstance(values, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor of shape (*batch, m), got {type(values).__name__}")
    if values.dtype not in _FLOATS:
        raise TypeError(f"{name}: expected a floating dtype (convert with .float()), got {values.dtype}")
    if values.ndim == 0 or values.shape[-1] == 0:
        raise ValueError(f"{name}: expected shape (*batch, m) with m >= 1, got {tuple(values.shape)}")
    values = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    bad = values.isnan() | (values == torch.inf)
    if bool(bad.any()):
        first = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"{name}: expected no NaN and no +inf, got {int(bad.sum())}, the first at index {first}")
    return values


def _check_mass(has_mass: Tensor, name: str, absent: str) -> None:
    if bool(has_mass.all()):
        return
    rows = (~has_mass[..., 0]).nonzero()
    where = f" in {len(rows)} rows, the first at index {tuple(rows[0].tolist())}" if has_mass.ndim > 1 else ""
    raise ValueError(f"{name}: expected some weight in every row, got only {absent}{where}")
