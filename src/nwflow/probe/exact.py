r"""Training-free conditioning: the exact Nadaraya-Watson head in the place of an IP-Adapter's learned attention.

    out = text + strength * sum_j w_j v_j,      w = softmax_j(-|q - k_j|^2 / (2 h^2))

Two baselines. With ``features`` the head has no parameter at all: q is the layer's own input, k = v are features of the
references at that layer, and h is the schedule's h(t) = sigma / alpha (t = 0 noise, t = 1 data) unless given. Without,
q, k and v are those of the adapter and only the kernel changes: distance alone, without the prior exp(|k|^2 / (2 h^2))
that a dot product implies (Smola 2026, arXiv 2605.13386), at the h^2 = sqrt(d) of its own logits unless given.

No processor is replaced. During a call the adapter's scale is 0, so that the processor computes exactly the text's
part; what the head gives is added in front of the layer's output projection. Compiled models run eagerly meanwhile.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nwflow.attention import nw_weights
from nwflow.probe.diffusers import AdapterProbe
from nwflow.probe.families import Running, family_of, region_of
from nwflow.probe.found import eager, find_model

__all__ = ["exact_adapter", "layer_features"]

Bandwidth = float | Callable[[str, float | None], float] | None


@contextlib.contextmanager
def exact_adapter(
    pipeline: Any,
    *,
    layers: str | Iterable[str] = "*",
    features: Mapping[str, Tensor] | None = None,
    bandwidth: Bandwidth = None,
    guided: bool | None = None,
    scheduler: Any = None,
) -> Iterator[list[str]]:
    """Inside ``with`` the image attention of the chosen layers is the exact NW head; the others stay as they are.

    Args:
        pipeline: a UNet pipeline with an IP-Adapter loaded, or its UNet.
        layers: names of attention layers, as globs.
        features: for each layer ``(m, C)`` features of the references in the space of the layer's input, as
            :func:`layer_features` gives them; the uncond half of guidance then has no image attention. None: the
            adapter's own projections.
        bandwidth: h, or a function of the layer's name and the scheduler's timestep; None as above.
        guided: whether rows are [uncond, cond]; None asks the pipeline.
        scheduler: for h(t); the pipeline's when None.

    Yields the names of the layers that are exact.

    Raises:
        ValueError: no adapter, another model than a UNet, layers without features, features of the wrong width (both
            widths are named), several adapters or masks together with ``features``, no bandwidth.
    """
    exact = _Exact(pipeline, layers, features, bandwidth, guided, scheduler)
    try:
        exact.attach()
        with eager(exact.model):
            yield exact.names
    finally:
        exact.detach()


@torch.no_grad()
def layer_features(pipeline: Any, *args: Any, layers: str | Iterable[str] = "*", **kwargs: Any) -> dict[str, Tensor]:
    """Inputs of the adapted layers, ``(B n, C)`` for each, in one call ``model(*args, **kwargs)`` on the references.

    The arguments are those of the UNet: latents of the references at the noise level that is wanted, the timestep, the
    prompt's states, and ``added_cond_kwargs``.
    """
    model, found, handles = find_model(pipeline), {}, []
    globs = [layers] if isinstance(layers, str) else list(layers)

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple, kwargs: dict[str, Any]) -> None:
            x = inputs[0] if inputs else kwargs["hidden_states"]
            x = x.flatten(2).transpose(1, 2) if x.ndim == 4 else x
            found[name] = x.detach().flatten(0, 1).clone()

        return hook

    try:
        for name, module in model.named_modules():
            if family_of(getattr(module, "processor", None)) and any(fnmatch.fnmatchcase(name, g) for g in globs):
                handles.append(module.register_forward_pre_hook(keep(name), with_kwargs=True))
        model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found


class _Exact:
    """The hooks of :func:`exact_adapter` and what they need to know."""

    def __init__(
        self,
        pipeline: Any,
        layers: str | Iterable[str],
        features: Mapping[str, Tensor] | None,
        bandwidth: Bandwidth,
        guided: bool | None,
        scheduler: Any,
    ) -> None:
        self.probe = AdapterProbe(pipeline, layers, guided=guided, scheduler=scheduler, check=False)  # finds and places
        self.model, self.names = self.probe.model, self.probe.expected
        self.features, self.bandwidth = features, bandwidth
        self.handles: list[Any] = []
        self.open: list[tuple[Running, Any, list[Any]]] = []
        for name in self.names:
            self._check(name, self.model.get_submodule(name))

    def _check(self, name: str, module: Any) -> None:
        family = family_of(module.processor)
        if family is None or family.name != "UNet":
            raise ValueError(f"pipeline: expected a UNet with an IP-Adapter, {name} is of {family and family.name}")
        if self.features is None:
            return
        if name not in self.features:
            raise ValueError(f"features: expected features for every layer of layers=, none for {name}")
        width, wanted = self.features[name].shape[-1], module.to_q.in_features
        if self.features[name].ndim != 2 or width != wanted or module.inner_dim != wanted:
            raise ValueError(
                f"features: expected (m, {wanted}), the width of the input of {name} (whose heads are "
                f"{module.inner_dim} wide together), got {tuple(self.features[name].shape)}"
            )
        if len(_scales(module.processor)) > 1:
            raise ValueError("features: expected one adapter to replace, got several")
        if self.bandwidth is None and self.probe.scheduler is None:
            raise ValueError("bandwidth: expected a number or a function, or scheduler= for h(t) = sigma / alpha")

    def attach(self) -> None:
        self.handles.append(self.model.register_forward_pre_hook(self.probe._on_model, with_kwargs=True))
        for name in self.names:
            module = self.model.get_submodule(name)
            self.handles.append(module.register_forward_pre_hook(self._enter(name), with_kwargs=True))
            self.handles.append(module.register_forward_hook(self._leave, always_call=True))

    def detach(self) -> None:
        while self.open:
            self._close()
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
            family = family_of(module.processor)
            if family is None:  # unloaded or replaced meanwhile
                return
            call = Running(name, module, family, args, kwargs)
            added = module.to_out[0].register_forward_pre_hook(lambda part, inputs: (self._mix(call, inputs[0]),))
            self.open.append((call, call.processor.scale, [added]))
            call.processor.scale = [[0.0] * len(s) if isinstance(s, list) else 0.0 for s in call.strengths]

        return hook

    def _leave(self, module: Any, args: tuple, output: Any) -> None:
        if self.open and self.open[-1][0].module is module:
            self._close()

    def _close(self) -> None:
        call, scale, handles = self.open.pop()
        call.processor.scale = scale
        call.close()
        for handle in handles:
            handle.remove()

    def _mix(self, call: Running, text: Tensor) -> Tensor:
        image = self._learned_space(call) if self.features is None else self._feature_space(call)
        return text if image is None else text + image.to(text.dtype)

    def _feature_space(self, call: Running) -> Tensor | None:
        assert self.features is not None
        if call.kwargs.get("ip_adapter_masks") is not None:
            raise ValueError("features: masks on the images have no meaning for features of the references")
        x, strength = call.hidden, call.strengths[0]
        x = x.flatten(2).transpose(1, 2) if x.ndim == 4 else x
        s = self.features[call.name].to(x)[None]
        out = strength * (nw_weights(x, s, self._h(call.name, None)).to(s.dtype) @ s)
        branches = self.probe._branches(call.rows)
        given = torch.tensor([float(name != "uncond") for name in branches], dtype=out.dtype, device=out.device)
        return out * given.repeat_interleave(call.rows // len(branches))[:, None, None]

    def _learned_space(self, call: Running) -> Tensor | None:
        states = _image_states(call)
        q, total = call.heads(call.seen["q"][0]), None
        masks = call.kwargs.get("ip_adapter_masks")
        masks = masks if masks is None or isinstance(masks, list) else list(masks.unsqueeze(1))
        for a, strength in enumerate(call.strengths):
            mask = None if masks is None else masks[a]
            count = 1 if mask is None else mask.shape[1]
            each: list[Any] = strength if isinstance(strength, list) else [strength] * count
            for i in range(count):
                if each[i] == 0:
                    continue
                state = states[a] if mask is None else states[a][:, i]
                k, v = (call.heads(part[a](state)) for part in (call.processor.to_k_ip, call.processor.to_v_ip))
                w = nw_weights(q, k, self._h(call.name, q.shape[-1] ** 0.25)).to(v.dtype)
                out = each[i] * (w @ v).transpose(1, 2).flatten(2)
                out = out if mask is None else out * region_of(mask[:, i], q)[..., None]
                total = out if total is None else total + out
        return total

    def _h(self, name: str, own: float | None) -> float:
        time, _, alpha, sigma = self.probe._at
        if callable(self.bandwidth):
            return float(self.bandwidth(name, time))
        if self.bandwidth is not None:
            return float(self.bandwidth)
        if own is not None:
            return own
        if not alpha or not sigma:
            raise ValueError(f"bandwidth: the schedule has no h = sigma / alpha at timestep {time}; give a number")
        return sigma / alpha


def _scales(processor: Any) -> list[Any]:
    return processor.scale if isinstance(processor.scale, list) else [processor.scale]


def _image_states(call: Running) -> list[Tensor]:
    """The image states that the processor was given: a tuple's second part, or the last tokens of the old form."""
    states = call.kwargs.get("encoder_hidden_states")
    if isinstance(states, tuple):
        return states[1]
    assert isinstance(states, Tensor)
    return [states[:, states.shape[1] - call.processor.num_tokens[0] :]]
