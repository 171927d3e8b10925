r"""A trained network on a support of its own: a field like any other.

The support is encoded once, by the parameters as they are, and serves all queries and steps; t = 0 is noise, t = 1 is
data. The ``preconditioned`` preset sees alpha and sigma alone and takes any Gaussian path; the ``paper`` preset sees t.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nwflow.field import NWField
from nwflow.kernel.autograd import stamp
from nwflow.models.icfm import ICFM
from nwflow.models.schedule import Times
from nwflow.paths import Path, working_dtype
from nwflow.support import Support

__all__ = ["ICFMField"]

PAIRS = 2**23  # pairs of queries and references that are evaluated together


class ICFMField(nn.Module):
    """The field that a network gives a support, for :func:`~nwflow.sample`, metrics and diagnoses.

    Args:
        model: a trained :class:`~nwflow.models.ICFM`, shared and not copied.
        support: a :class:`~nwflow.Support` of one set or of tasks, or points to make one of. Points of weight 0 are as
            masked; all other weights have to be equal, as the network has no input for them.
        path: a Gaussian path; that of the model when None. Only the ``preconditioned`` preset takes another.

    ``x`` is ``(*batch, *event)``, with tasks exactly ``(T, n, *event)``; times as for :class:`~nwflow.NWField`.

    Raises:
        ValueError, TypeError: what does not fit, each named.

    Example:
        >>> from nwflow.models import ModelConfig
        >>> model = ICFM(ModelConfig(dim=1))
        >>> field = ICFMField(model, torch.tensor([[-1.0], [1.0]]))
        >>> field.denoise(torch.tensor([[0.5]]), 0.0)
        tensor([[0.]], ...)
    """

    def __init__(self, model: ICFM, support: Support | Any, path: Path | None = None) -> None:
        super().__init__()
        if not isinstance(model, ICFM):
            raise TypeError(f"model: expected an ICFM, got {type(model).__name__}")
        support = support if isinstance(support, Support) else Support(support)
        if support.d != model.config.dim:
            raise ValueError(f"support: expected events of {model.config.dim} numbers, got {support.event_shape}")
        own = support.log_weights.masked_fill(~support.valid, -torch.inf).detach()
        top, low = own.amax(-1), own.masked_fill(~support.valid, torch.inf).amin(-1)
        if bool((top - low > 1e-6).any()):
            raise ValueError("support: expected equal prior weights, which are all that the network takes, got others")
        if path is not None and path != model.path and model.config.preset == "paper":
            raise ValueError(f"path: expected {model.path!r}, on which the network is trained, got {path!r}")
        self.model, self.path, self.event_shape = model, model.path if path is None else path, support.event_shape
        self._reference = NWField(support, self.path)
        self.is_batch, self.d, self.m = support.is_batch, support.d, support.m
        self._encoded: tuple[Any, ...] | None = None

    def extra_repr(self) -> str:
        return f"{self.support!r}, {self.path!r}"

    @property
    def support(self) -> Support:
        """The support, on the device of the field."""
        return self._reference.support

    def prior(self, z: Tensor, t: float = 0.0) -> Tensor:
        """As :meth:`nwflow.NWField.prior`: draws of the start from standard normal ``z``."""
        return self._reference.prior(z, t)

    def length_scales(self, quantile: float = 0.05, probes: int = 256) -> tuple[float, float]:
        """As :meth:`nwflow.NWField.length_scales`, of the support."""
        return self._reference.length_scales(quantile, probes)

    def given(self, labels: Any) -> ICFMField:
        """The field of the part of the support with these labels."""
        return ICFMField(self.model, self.support.given(labels), self.path)

    def forward(self, x: Tensor, t: float | Tensor) -> Tensor:
        """The velocity u(x, t), shape and dtype of ``x``."""
        return self.velocity(x, t)

    def velocity(self, x: Tensor, t: float | Tensor) -> Tensor:
        """u = alpha' D + sigma' eps, shape and dtype of ``x``; regular at sigma = 0 wherever the path is."""
        return self._evaluate(x, t, "velocity")

    def denoise(self, x: Tensor, t: float | Tensor) -> Tensor:
        """D = E[X_1 | X_t = x, support], shape and dtype of ``x``."""
        return self._evaluate(x, t, "denoiser")

    def noise(self, x: Tensor, t: float | Tensor) -> Tensor:
        """eps = E[X_0 | X_t = x, support], shape and dtype of ``x``."""
        return self._evaluate(x, t, "noise")

    def score(self, x: Tensor, t: float | Tensor) -> Tensor:
        """-eps / sigma, shape and dtype of ``x``; raises ValueError at sigma = 0."""
        return self._evaluate(x, t, "score")

    def _evaluate(self, x: Tensor, t: float | Tensor, name: str) -> Tensor:
        flat, batch = self._reference._flat(x)
        at = self._times(t, batch)
        if name == "score" and bool((at.sigma == 0).any()):
            raise ValueError("t: the score does not exist at sigma = 0; expected a smaller time")
        encoded, wide = self._encode(), flat.to(working_dtype(x.device))
        size = max(1, PAIRS // (self.m * wide.shape[0]))
        parts = []
        for start in range(0, max(1, wide.shape[1]), size):
            rows = slice(start, start + size)
            here = Times(*(v if v.shape[1] == 1 else v[:, rows] for v in at))
            parts.append(_stated(name, *self.model.network.predict(wide[:, rows], here, encoded), here))
        return torch.cat(parts, 1).reshape(x.shape).to(x.dtype)

    def _times(self, t: float | Tensor, batch: tuple[int, ...]) -> Times:
        """t and its schedule, ``(T or 1, n or 1, 1)`` each."""
        at, points = self._reference._schedule(t, batch), self._reference.points
        dtype = working_dtype(points.device)
        value = torch.as_tensor(t, dtype=dtype, device=points.device)
        if value.ndim == 0:
            value = value.reshape(1, 1, 1)
        else:
            value = value.expand(batch[0], -1)[..., None] if self.is_batch else value.expand(batch).reshape(1, -1, 1)
        return Times(value, at.alpha, at.sigma, at.d_alpha, at.d_sigma)

    def _encode(self) -> Any:
        """The support as the network keeps it; anew at each call where a graph is wanted."""
        field = self._reference
        valid = field.support.valid.reshape(-1, self.m)
        mask = None if bool(valid.all()) else valid
        parameters = list(self.model.parameters())
        tracked = any(v.requires_grad for v in (*parameters, field.points))
        if torch.is_grad_enabled() and tracked:
            return self.model.encode(field._stacked(), mask)
        now = (stamp(*parameters, field.points, field.log_weights), parameters)
        if self._encoded is None or self._encoded[0] != now[0]:
            with torch.no_grad():
                self._encoded = (now[0], self.model.encode(field._stacked(), mask), now[1])
        return self._encoded[1]

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: without what is kept of the support."""
        return {**self.__dict__, "_encoded": None}


def _stated(name: str, denoised: Tensor, noise: Tensor, at: Times) -> Tensor:
    if name == "velocity":
        return at.d_alpha * denoised + at.d_sigma * noise
    if name == "score":
        return -noise / at.sigma
    return denoised if name == "denoiser" else noise
