r"""In-context flow matching: one network v(x, t, S) for the fields of all supports S of a family.

t = 0 is noise, t = 1 is data. A task is a support S and points x1 of the same law. With x_t = alpha x1 + sigma x0 the
minimiser of the loss is the field whose denoiser is E[x1 | x_t, S]: not the support's own, which copies it, but that of
the laws that are likely behind it (Smola 2026, arXiv 2605.13386; Lipman et al. 2023, arXiv 2210.02747).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from nwflow.models.config import ModelConfig
from nwflow.models.paper import Paper
from nwflow.models.preconditioned import Preconditioned
from nwflow.models.schedule import times
from nwflow.paths import working_dtype

__all__ = ["ICFM"]


class ICFM(nn.Module):
    """A network for the velocity and the denoiser of any support, without a parameter update for a new one.

    Args:
        config: a :class:`~nwflow.models.ModelConfig`.
        generator: of the initial parameters; torch's global one when None.

    Shapes: ``x`` ``(T, n, *event)`` with ``dim`` numbers an event, ``t`` a float, 0-d or ``(T or 1, n or 1)``,
    ``support`` ``(T, m, *event)``, ``mask`` ``(T, m)`` booleans with True = real. m >= 1 is free, and what masked slots
    hold, NaN included, has no influence. Results have the shape and dtype of ``x``; the network computes in the dtype
    of its parameters, the schedule, the centring and distances to the support in float64 where the device has it.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices and times that do not fit; a task whose points are all masked, by
            its batch index.

    Example:
        >>> model = ICFM(ModelConfig(dim=2), torch.Generator().manual_seed(0))
        >>> support = torch.tensor([[[-1.0, 0.0], [1.0, 0.0]]])
        >>> x = torch.tensor([[[0.5, 0.0]]])
        >>> model.denoise(x, 0.5, support)  # before training: the Wiener denoiser of the support
        tensor([[[0.5000, 0.0000]]], ...)
    """

    def __init__(self, config: ModelConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config, self.path = config, config.make_path()
        self.network: Paper | Preconditioned = (Paper if config.preset == "paper" else Preconditioned)(config)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Uniform weights of variance 1 / (3 width of the input), biases 0, and the output layer of the preset at 0."""
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    bound = 1.0 / math.sqrt(module.in_features)
                    module.weight.uniform_(-bound, bound, generator=generator)
                    nn.init.zeros_(module.bias)
        if isinstance(self.network, Preconditioned):
            self.network.zero_output()

    def extra_repr(self) -> str:
        return repr(self.config)

    def forward(
        self,
        x: Float[Tensor, "T n *event"],
        t: float | Tensor,
        support: Float[Tensor, "T m *event"],
        mask: Bool[Tensor, "T m"] | None = None,
    ) -> Float[Tensor, "T n *event"]:
        """The velocity u(x, t; support)."""
        return self.predict(x, t, self.encode(support, mask))["velocity"]

    def denoise(self, x: Tensor, t: float | Tensor, support: Tensor, mask: Tensor | None = None) -> Tensor:
        """The denoiser E[x1 | x_t = x, support]."""
        return self.predict(x, t, self.encode(support, mask))["denoiser"]

    def encode(self, support: Tensor, mask: Tensor | None = None) -> Any:
        """What the network keeps of the supports, once for all queries and times: an argument of :meth:`predict`."""
        self._check_support(support, mask)
        points = support.flatten(2) if support.ndim > 2 else support[..., None]
        points = points.to(working_dtype(points.device))
        if mask is not None:
            points = torch.where(mask[..., None], points, 0.0)
        return self.network.encode(points, mask)

    def predict(self, x: Tensor, t: float | Tensor, encoded: Any) -> dict[str, Tensor]:
        """``denoiser``, ``noise`` and ``velocity`` at ``x`` ``(T, n, *event)``, from one evaluation."""
        flat = self._flat(x, "x", encoded.task_count())
        at = times(self.path, t, flat)
        denoised, noise = self.network.predict(flat, at, encoded)
        velocity = at.d_alpha * denoised + at.d_sigma * noise
        found = {"denoiser": denoised, "noise": noise, "velocity": velocity}
        return {name: value.reshape(x.shape).to(x.dtype) for name, value in found.items()}

    def loss(
        self,
        x0: Float[Tensor, "T n *event"],
        x1: Float[Tensor, "T n *event"],
        t: float | Tensor,
        support: Float[Tensor, "T m *event"],
        mask: Bool[Tensor, "T m"] | None = None,
        target: Float[Tensor, "T n *event"] | None = None,
    ) -> Float[Tensor, "T n"]:
        """The loss of each sample at x_t = alpha x1 + sigma x0, with the weight of the preset.

        Args:
            x0: standard normal noise. x1: points of the task's law. target: the denoiser to learn in place of ``x1``,
                such as that of a larger set at x_t; it has the same minimiser and less variance.
        """
        encoded = self.encode(support, mask)
        noise, data = (self._flat(v, name, encoded.task_count()) for v, name in ((x0, "x0"), (x1, "x1")))
        if noise.shape != data.shape:
            raise ValueError(f"x0, x1: expected one shape, got {tuple(x0.shape)} and {tuple(x1.shape)}")
        at = times(self.path, t, data)
        teacher = None if target is None else self._flat(target, "target", encoded.task_count())
        return self.network.loss(at.alpha * data + at.sigma * noise, noise, data, at, encoded, teacher)

    def _flat(self, x: Tensor, name: str, tasks: int) -> Tensor:
        """``(T, n, d)`` in the working dtype."""
        if not x.is_floating_point():
            raise TypeError(f"{name}: expected a floating dtype, got {x.dtype}")
        if x.ndim < 2 or x.shape[2:].numel() != self.config.dim or x.shape[0] != tasks:
            raise ValueError(
                f"{name}: expected (T, n, *event) with T = {tasks} tasks and {self.config.dim} numbers an event, "
                f"got {tuple(x.shape)}"
            )
        return (x.flatten(2) if x.ndim > 2 else x[..., None]).to(working_dtype(x.device))

    def _check_support(self, support: Tensor, mask: Tensor | None) -> None:
        if not support.is_floating_point():
            raise TypeError(f"support: expected a floating dtype, got {support.dtype}")
        if support.ndim < 2 or support.shape[2:].numel() != self.config.dim or support.shape[1] == 0:
            raise ValueError(
                f"support: expected (T, m, *event) with {self.config.dim} numbers an event and at least one point, "
                f"got {tuple(support.shape)}"
            )
        if mask is None:
            return
        if mask.dtype != torch.bool or mask.shape != support.shape[:2]:
            raise ValueError(
                f"mask: expected booleans of shape {tuple(support.shape[:2])}, True = real point, "
                f"got {mask.dtype} of shape {tuple(mask.shape)}"
            )
        if not torch.compiler.is_compiling() and not bool((some := mask.any(1)).all()):
            i = int((~some).nonzero()[0])
            raise ValueError(f"mask: expected a real point in each task, got none in task {i} (batch index {i})")
