"""What IP-Adapters of diffusers attend to, recorded by hooks alone: no processor is replaced, no output changes.

Text and image tokens are smoothed apart and added, out = text + strength * softmax(q k^T / sqrt d) v over the image's
tokens (Ye et al. 2023, arXiv 2308.06721). Every number in the second term leaves a module, so forward hooks on the
projections (``to_q``, ``to_k_ip``, ``to_v_ip``, and the norms of Flux and SD3) see it, whichever kernel multiplies it.
The hooks on projections live for one call of their layer and are looked up anew in each, so loading, unloading and
setting of processors, scales, offloading and slicing go on as without them. What ``torch.compile`` compiled runs
eagerly meanwhile: the numbers of an uncompiled run.

Times are the scheduler's: alpha and sigma belong to the timestep that the model was called with
(:func:`nwflow.paths.from_diffusers`; t = 0 noise, t = 1 data).
"""

from __future__ import annotations

import contextlib
import fnmatch
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nwflow.paths import from_diffusers
from nwflow.probe.capture import Capture
from nwflow.probe.families import Family, Running, family_of
from nwflow.probe.found import bound_arguments, eager, find_model, one_timestep, processors_of, shortened
from nwflow.probe.recorder import Recorder, record
from nwflow.probe.result import ProbeResult

__all__ = ["AdapterProbe", "record_adapter"]

Half = Literal["cond", "uncond", "both"]
Place = tuple[float | None, float | None, float | None, float | None]  # the scheduler's timestep, t, alpha, sigma


@contextlib.contextmanager
def record_adapter(
    pipeline: Any,
    *,
    layers: str | Iterable[str] = "*",
    steps: Iterable[int] | None = None,
    half: Half = "cond",
    guided: bool | None = None,
    scheduler: Any = None,
    check: bool = True,
    keep: str = "tensors",
    queries: int | str = "all",
    **options: Any,
) -> Iterator[AdapterProbe]:
    """Record the image attention of everything that runs inside ``with``; outputs are those without it, bit for bit.

    Args:
        pipeline: a diffusers pipeline with an IP-Adapter loaded, or its UNet or transformer alone.
        layers: names of attention layers to keep, as globs; "*" for all.
        steps: denoising steps to keep, counted from 0; None for all.
        half: with classifier-free guidance rows are [uncond, cond]: which of them to keep, never their average.
        guided: whether rows are such halves; None asks the pipeline, which remembers its last call (a model alone: no).
        scheduler: for alpha and sigma; the pipeline's when None.
        check: recompute the output of the first call of every layer from what was captured and compare.
        keep: "tensors" keeps the captures, within ``limit``; "statistics" their numbers alone, in flat memory.
        queries: how many queries of a call to keep, "all" or "auto"; this, ``limit``, ``heads``, ``seed`` and ``draws``
            are those of :func:`nwflow.probe.record`.

    Raises:
        ValueError: no IP-Adapter is loaded, ``layers`` match none, or, on leaving, nothing was captured, or what was
            captured does not reproduce the layer's output; the message says what was found.

    Warns:
        UserWarning: layers that had an adapter at the beginning and were never captured.

    Example::

        with record_adapter(pipeline) as probe:
            pipeline(prompt, ip_adapter_image=image)
        probe.captures[0].weights()  # (rows, heads, queries, tokens)
        result = probe.compare()  # every head against kernel smoothing
    """
    globs = [layers] if isinstance(layers, str) else list(layers)
    recorder = record(find_model(pipeline), globs, keep=keep, queries=queries, **options)
    probe = AdapterProbe(pipeline, globs, steps, half, guided, scheduler, check, recorder)
    with probe.running():
        yield probe
    probe.check_complete()


class AdapterProbe:
    """What :func:`record_adapter` hands over. ``errors``: of each layer's first call, by how much of its largest value
    the layer's output differs from what the captures give; ``notes``: what a reader must know."""

    def __init__(
        self,
        pipeline: Any,
        layers: str | Iterable[str] = "*",
        steps: Iterable[int] | None = None,
        half: Half = "cond",
        guided: bool | None = None,
        scheduler: Any = None,
        check: bool = True,
        recorder: Recorder | None = None,
    ) -> None:
        if half not in ("cond", "uncond", "both"):
            raise ValueError(f'half: expected "cond", "uncond" or "both", got {half!r}')
        self.pipeline, self.half, self.guided, self.check = pipeline, half, guided, check
        self.model = find_model(pipeline)
        self.globs = [layers] if isinstance(layers, str) else list(layers)
        self.steps = None if steps is None else frozenset(steps)
        self.scheduler = getattr(pipeline, "scheduler", None) if scheduler is None else scheduler
        self.recorder = recorder
        self.count, self.model_calls, self.step = 0, 0, -1
        self.captured: Counter[str] = Counter()
        self.switched_off: Counter[str] = Counter()
        self.errors: dict[str, float] = {}
        self.notes: dict[str, None] = {}  # in order, each once
        self.failures: dict[str, None] = {}
        self.expected = [name for name, _ in self._adapted() if self._wanted(name)]
        self._check_found()
        self._handles: list[Any] = []
        self._open: list[Running | None] = []
        self._grids: dict[str, tuple[int, int]] = {}
        self._inputs: dict[str, Any] = {}
        self._timestep: float | None = None
        self._at: Place = (None, None, None, None)
        self._second = False

    @property
    def captures(self) -> tuple[Capture, ...]:
        """What is kept as tensors, in the order of the run."""
        calls = () if self.recorder is None else self.recorder.calls
        return tuple(c for c in calls if isinstance(c, Capture))

    def compare(self, branch: str | None = None) -> ProbeResult:
        """Every head against kernel smoothing, as :meth:`nwflow.probe.Recorder.compare`; of the last half when None."""
        self._check_captured()
        assert self.recorder is not None
        result = self.recorder.compare(branch)
        return replace(
            result, notes=(*self.notes, *result.notes), found=result.found | {"model calls": self.model_calls}
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Hooks are in place inside; compiled parts run eagerly, because compiled code calls no new hooks."""
        try:
            self._attach()
            with eager(self.model):
                yield
        finally:
            for call in self._open:
                if call is not None:
                    call.close()
            self._open.clear()
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def _attach(self) -> None:
        add = self._handles.append
        add(self.model.register_forward_pre_hook(self._on_model, with_kwargs=True))
        for name, module in self.model.named_modules():
            if hasattr(module, "transformer_blocks") and module is not self.model:
                add(module.register_forward_pre_hook(self._on_grid(name), with_kwargs=True))
            if hasattr(module, "processor") and self._wanted(name):
                add(module.register_forward_pre_hook(self._on_enter(name), with_kwargs=True))
                add(module.register_forward_hook(self._on_leave, with_kwargs=True, always_call=True))

    def _on_model(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._inputs = bound = bound_arguments(module, args, kwargs)
        timestep = one_timestep(bound.get("timestep"))
        if timestep is not None and type(module).__name__.startswith("Flux"):  # these models take sigma
            timestep = timestep * self._train_timesteps()
        # Pipelines without halves in one batch (Flux) call the model twice at one timestep: cond, then uncond.
        again = self._halves_in_turn() and self.model_calls > 0 and timestep == self._timestep and not self._second
        self._second, self._timestep, self._at = again, timestep, self._place(timestep)
        self.model_calls += 1
        self.step += not again

    def _on_grid(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs.get("hidden_states")
            if isinstance(x, Tensor) and x.ndim == 4:
                self._grids[name] = (x.shape[-2], x.shape[-1])

        return hook

    def _on_enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            family = family_of(module.processor)
            if family is None or (self.steps is not None and self.step not in self.steps):
                self._open.append(None)
                return
            check = self.check and name not in self.errors
            self._open.append(Running(name, module, family, args, kwargs, check))

        return hook

    def _on_leave(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if not self._open:  # entered before the hooks were there
            return
        call = self._open.pop()
        if call is None:
            return
        call.close()
        if output is not None:
            self._emit(call, output)

    def _emit(self, call: Running, output: Any) -> None:
        found = list(call.family.terms(call))
        if not found:
            self.switched_off[call.name] += 1
            return
        if call.check:
            self.errors[call.name] = call.error(found, output)
        branches = self._branches(call.rows)
        kept = branches if self.half == "both" else tuple(b for b in branches if b == self.half)
        if not kept:
            return
        each = call.rows // len(branches)
        rows = (
            slice(None)
            if kept == branches
            else slice(branches.index(kept[0]) * each, (branches.index(kept[0]) + 1) * each)
        )
        for term in found:
            q, k, v = (u.detach()[rows] for u in (term.q, term.k, term.v))
            image = f", image {term.references[0]}" if term.semantics == "separate" else ""
            capture = Capture(
                layer=call.name,
                q=q,
                k=k,
                v=v,
                kind=type(call.processor).__name__,
                part=f"adapter {term.adapter}{image}",
                scale=term.scale,
                output_scale=term.strength,
                references=term.references,
                names=tuple(f"image {i}" for i in range(max(term.references) + 1)),
                grid=self._grid(call, q.shape[-2]),
                branches=kept,
                step=self.step,
                adapter=term.adapter,
                strength=term.strength,
                semantics=term.semantics,
                region=None if term.region is None else term.region.detach()[rows],
                time=self._at[0],
                t=self._at[1],
                alpha=self._at[2],
                sigma=self._at[3],
            )
            self.count += 1
            self.captured[call.name] += 1
            self._note_semantics(capture)
            if self.recorder is not None:
                self.recorder.step = self.step
                self.recorder.add(capture)

    def _note_semantics(self, c: Capture) -> None:
        """How several references enter: never averaged, and whether they share a softmax."""
        assert c.references is not None
        images = len({r for r in c.references if r >= 0})
        if c.semantics == "separate":
            note = "With masks each image has its own softmax and the results are added, each in its region."
        elif c.semantics == "with_own":
            note = "References share a softmax with the image's own tokens: their mass is below 1."
        else:
            note = f"Images of an adapter that share one softmax, concatenated and not averaged: {images}."
        self.notes[note] = None

    def _branches(self, rows: int) -> tuple[str, ...]:
        if self._halves_in_turn():
            return ("uncond" if self._second else "cond",)
        guided = self.guided
        if guided is None:
            guided = bool(getattr(self.pipeline, "do_classifier_free_guidance", False))
        if not guided:
            return ("cond",)
        parts = 3 if getattr(self.pipeline, "do_perturbed_attention_guidance", False) else 2
        if rows % parts:
            raise ValueError(
                f"guided: expected a batch of {parts} equal parts, [uncond, cond], got {rows} rows; "
                "guided=False when the model is called by itself"
            )
        return ("uncond", "cond", "perturbed")[:parts]

    def _halves_in_turn(self) -> bool:
        is_pipeline = self.pipeline is not self.model and hasattr(self.pipeline, "scheduler")
        return is_pipeline and self.guided is None and not hasattr(self.pipeline, "do_classifier_free_guidance")

    def _place(self, timestep: float | None) -> Place:
        if timestep is None or self.scheduler is None:
            return timestep, None, None, None
        try:
            path = from_diffusers(self.scheduler)
            t = float(path.time_of_timestep(timestep))
            if -1e-6 < t < 1 + 1e-6:  # the rounding of a float32 timestep
                t = min(max(t, 0.0), 1.0)
            at = path(t)
        except (TypeError, ValueError) as error:  # a run must not end because its scheduler has no Gaussian path
            self.failures[f"no alpha and sigma: {type(self.scheduler).__name__}: {error}"] = None
            return timestep, None, None, None
        return timestep, t, float(at.alpha), float(at.sigma)

    @property
    def _tolerance(self) -> float:
        """Rounding of the model's dtype, over sums of some hundred terms."""
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        return 500.0 * torch.finfo(dtype).eps if dtype == torch.float32 else 8.0 * torch.finfo(dtype).eps ** 0.75

    def _train_timesteps(self) -> int:
        return int(getattr(getattr(self.scheduler, "config", None), "num_train_timesteps", 1000))

    def _grid(self, call: Running, n: int) -> tuple[int, int] | None:
        """Rows and columns of the n queries, where the model says; None where it does not or they are no grid."""
        grid = call.grid or next((g for name, g in self._grids.items() if call.name.startswith(f"{name}.")), None)
        grid = grid or call.family.grid(self.model, self._inputs)
        return grid if grid is not None and grid[0] * grid[1] == n else None

    def _adapted(self) -> Iterator[tuple[str, Family]]:
        for name, module in self.model.named_modules():
            family = family_of(getattr(module, "processor", None))
            if family is not None:
                yield name, family

    def _wanted(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, glob) for glob in self.globs)

    def _check_found(self) -> None:
        if self.expected:
            return
        adapted = [name for name, _ in self._adapted()]
        if adapted:
            raise ValueError(
                f"layers: {self.globs} match none of the {len(adapted)} adapted layers: {shortened(adapted)}"
            )
        raise ValueError(f"pipeline: expected a loaded IP-Adapter, found {processors_of(self.model)}")

    def _check_captured(self) -> None:
        """Raise if nothing was captured, saying what was found."""
        now = [name for name, _ in self._adapted()]
        if not self.count:
            if not self.model_calls:
                reason = "the model was never called"
            elif self.steps is not None and not self.steps & set(range(self.step + 1)):
                reason = f"steps {sorted(self.steps)} were asked for and there were {self.step + 1}"
            elif self.switched_off:
                reason = "in every call the adapter was off: its scale is 0, or no image was given"
            elif not now:
                reason = "the adapter's processors were replaced or unloaded while recording"
            else:
                reason = f'no rows of the half "{self.half}", or the adapted layers were never called'
            raise ValueError(
                f"recorded 0 captures in {self.model_calls} model calls: {reason}. IP-Adapter processors: "
                f"{len(self.expected)} expected, {len(now)} found now ({processors_of(self.model)})"
            )

    def check_complete(self) -> None:
        """Raise if nothing was captured or it is not what the layers computed; warn of layers that never were."""
        self._check_captured()
        wrong = {name: error for name, error in self.errors.items() if not error <= self._tolerance}
        if wrong:
            name, error = max(wrong.items(), key=lambda pair: pair[1])
            raise ValueError(
                f"the captured queries, keys and values of {len(wrong)} layers do not give the layer's output: {name} "
                f"differs by {error:.2g} of its largest value (check=False records anyway)"
            )
        missing = [name for name in self.expected if not self.captured[name] and not self.switched_off[name]]
        self.notes |= self.failures
        for failure in self.failures:
            warnings.warn(failure, stacklevel=4)
        if missing:
            warnings.warn(
                f"{len(missing)} of {len(self.expected)} adapted layers were never captured: {shortened(missing)}; "
                f"processors now: {processors_of(self.model)}",
                stacklevel=4,
            )
