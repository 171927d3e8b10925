r"""The four ways to state a prediction, and the other direction of time; t = 0 is noise, t = 1 is data.

With D = E[X_1 | X_t = x], every conversion follows from x = alpha D + sigma eps:

    velocity u = alpha' D + sigma' eps       noise eps = (x - alpha D) / sigma       score = -eps / sigma
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

from jaxtyping import Float
from torch import Tensor

from nwflow.paths.schedule import Schedule, is_vmapped, working_dtype

__all__ = ["Prediction", "convert", "from_denoiser", "reverse_time", "to_denoiser"]

Prediction: TypeAlias = Literal["denoiser", "noise", "score", "velocity"]


def convert(
    value: Float[Tensor, "*batch_event"],
    x: Float[Tensor, "*batch_event"],
    schedule: Schedule,
    *,
    source: Prediction,
    target: Prediction,
) -> Float[Tensor, "*batch_event"]:
    """A prediction at x stated in another way; computed in the schedule's float64, returned in the dtype of ``x``.

    ``schedule`` must multiply x: see :func:`broadcast_schedule`. Raises ``ValueError`` where the result does not exist:
    noise, score and velocity at sigma = 0; anything that needs D from noise or score at alpha = 0; a velocity that
    does not determine D because alpha' sigma - sigma' alpha is 0 or infinite.

    >>> import torch
    >>> from nwflow.paths import CondOT
    >>> x, at = torch.tensor([0.5], dtype=torch.float64), CondOT()(0.5)
    >>> convert(torch.tanh(2 * x), x, at, source="denoiser", target="velocity")
    tensor([0.5232], dtype=torch.float64)
    """
    for name, kind in (("source", source), ("target", target)):
        if kind not in get_args(Prediction):
            raise ValueError(f"{name}: expected one of {get_args(Prediction)}, got {kind!r}")
    if value.shape != x.shape:
        raise ValueError(f"value: expected the shape of x, {tuple(x.shape)}, got {tuple(value.shape)}")
    if source == target:
        return value
    _refuse_singular(schedule, source, target)
    at, work = schedule, working_dtype(x.device)
    value, wide = value.to(work), x.to(work)
    if target == "denoiser":
        result = _denoiser(value, wide, at, source)
    elif target == "noise":
        result = _noise(value, wide, at, source)
    elif target == "score":
        result = -_noise(value, wide, at, source) / at.sigma
    else:
        result = at.d_alpha * _denoiser(value, wide, at, source) + at.d_sigma * _noise(value, wide, at, source)
    return result.to(x.dtype)


def to_denoiser(value: Tensor, x: Tensor, schedule: Schedule, kind: Prediction) -> Tensor:
    """D = E[X_1 | X_t = x] from a prediction of the given kind; see :func:`convert`."""
    return convert(value, x, schedule, source=kind, target="denoiser")


def from_denoiser(denoiser: Tensor, x: Tensor, schedule: Schedule, kind: Prediction) -> Tensor:
    """The given kind of prediction from D = E[X_1 | X_t = x]; see :func:`convert`."""
    return convert(denoiser, x, schedule, source="denoiser", target=kind)


def _determinant(at: Schedule) -> Tensor:
    return at.d_alpha * at.sigma - at.d_sigma * at.alpha


def _denoiser(value: Tensor, x: Tensor, at: Schedule, source: Prediction) -> Tensor:
    if source == "noise":
        return (x - at.sigma * value) / at.alpha
    if source == "score":
        return (x + at.sigma.square() * value) / at.alpha
    if source == "velocity":
        return (at.sigma * value - at.d_sigma * x) / _determinant(at)
    return value


def _noise(value: Tensor, x: Tensor, at: Schedule, source: Prediction) -> Tensor:
    if source == "denoiser":
        return (x - at.alpha * value) / at.sigma
    if source == "score":
        return -at.sigma * value
    if source == "velocity":
        return (at.d_alpha * x - at.alpha * value) / _determinant(at)
    return value


def _refuse_singular(at: Schedule, source: Prediction, target: Prediction) -> None:
    def anywhere(condition: Tensor) -> bool:
        return not is_vmapped(condition) and bool(condition.any())

    if target != "denoiser" and anywhere(at.sigma == 0):
        raise ValueError(f"schedule: the {target} does not exist at sigma = 0; evaluate before t = 1")
    if target in ("denoiser", "velocity") and source in ("noise", "score") and anywhere(at.alpha == 0):
        raise ValueError(f"schedule: the {source} says nothing of the {target} at alpha = 0; evaluate after t = 0")
    if source == "velocity":
        determinant = _determinant(at)
        if anywhere((determinant == 0) | ~determinant.isfinite()):
            raise ValueError(
                f"schedule: the velocity does not determine the {target} where alpha' sigma - sigma' alpha is 0 or "
                "infinite"
            )


def reverse_time(
    field: Callable[[Tensor, Any], Tensor], kind: Prediction = "velocity"
) -> Callable[[Tensor, Any], Tensor]:
    """A field in the other time direction, s = 1 - t: many code bases have s = 1 as noise and s = 0 as data.

    The time is flipped, and a velocity changes its sign (dx/ds = -dx/dt); denoiser, noise and score do not.
    Applied twice it gives the field back.

    >>> import torch
    >>> towards_noise = lambda x, s: x / s
    >>> reverse_time(towards_noise)(torch.tensor([1.0]), 0.75)
    tensor([-4.])
    """
    if kind not in get_args(Prediction):
        raise ValueError(f"kind: expected one of {get_args(Prediction)}, got {kind!r}")
    sign = -1 if kind == "velocity" else 1

    def reversed_field(x: Tensor, t: Any) -> Tensor:
        return sign * field(x, 1 - t)

    return reversed_field
