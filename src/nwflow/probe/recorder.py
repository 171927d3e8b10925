r"""Watching a model attend, without changing one bit of what it computes.

``with record(model) as recorder: model(...)`` sees, in every named module that runs,

- ``nn.MultiheadAttention``, also inside its fused path and inside a fused ``nn.TransformerEncoderLayer``;
- every ``scaled_dot_product_attention`` and ``multi_head_attention_forward``, by a torch function mode;
- what a caller's own ``observers`` make of a module (others call :meth:`Recorder.add`).

PyTorch takes its fused paths only where no hook and no function mode is at work. So modules carry no hooks: their
``forward`` is wrapped for the time of the recording, and the mode is put aside while such a module runs. Inputs and
outputs are read, never written, and random numbers come from a generator of the recorder's own.
"""

from __future__ import annotations

import functools
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nwflow.probe import observe
from nwflow.probe.call import Call
from nwflow.probe.result import ProbeResult
from nwflow.probe.store import Options, Store
from nwflow.probe.watch import FUSED, Watch, is_leaf, named, watching

__all__ = ["Recorder", "record"]

OUTSIDE = "(no module)"

Observer = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], "Iterable[Call] | Call | None"]


def record(
    model: nn.Module | Mapping[str, nn.Module],
    layers: str | Sequence[str] = "*",
    *,
    heads: Iterable[int] | None = None,
    steps: Iterable[int] | Callable[[int], bool] | None = None,
    keep: str = "statistics",
    limit: int = 2**30,
    queries: int | str = "auto",
    seed: int = 0,
    branches: Sequence[str] | None = None,
    references: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    grid: tuple[int, int] | None = None,
    clock: Callable[[tuple[Any, ...], dict[str, Any]], Mapping[str, float]] | None = None,
    annotate: Callable[[Call], Call | None] | None = None,
    observers: Mapping[str, Observer] | None = None,
    draws: int = 40,
) -> Recorder:
    """Record the attention of ``model`` while the ``with`` block runs.

    Args:
        model: the module, or several by name. One *step* is one call of it (of one of them).
        layers: globs over module names, ``"*attn2"``; a name selects all that runs inside it.
        heads: numbers of heads to report. steps: numbers of steps to record, or a function that says.
        keep: ``"statistics"``: numbers are computed during the run and tensors dropped, so that memory is flat.
            ``"tensors"``: ``recorder.calls`` keeps them, within ``limit``.
        limit: bytes that may be held. Beyond it recorded queries are halved, by ``seed``, and at last tensors are
            replaced by their numbers; the result says so.
        queries: how many queries of a call to keep: a number, ``"all"``, or ``"auto"``, as many as make 8,192 weights
            a head, at least 8, at most 256 without a ``grid``. They are drawn by ``seed``, the same at every step.
        branches: names of equal consecutive parts of the batch, ``("uncond", "cond")`` under guidance. They are
            measured apart; :meth:`Recorder.compare` reports the last unless told.
        references: for every key of a layer that has as many keys, its reference, -1 for none. names: of references.
        grid: rows and columns of the queries of layers that have as many.
        clock: from the arguments of the model's call to ``{"t": ..., "alpha": ..., "sigma": ..., "time": ...}``.
        annotate: may complete a record, or drop it by None.
        observers: by glob, functions of (module, args, kwargs, output) that return calls, for other kinds of attention.
        draws: permutations of the null.

    Raises:
        ValueError, TypeError: arguments that name nothing; a recording inside another of the same modules.

    Example:
        >>> attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> x, y = torch.randn(1, 5, 8), torch.randn(1, 6, 8)
        >>> with record(attention) as recorder:
        ...     out, _ = attention(x, y, y)
        >>> result = recorder.compare()
        >>> len(result.heads), max(h.identity_error for h in result.heads) < 1e-9
        (2, True)
    """
    globs = (layers,) if isinstance(layers, str) else tuple(layers)
    if not globs or not all(isinstance(g, str) for g in globs):
        raise TypeError(f"layers: expected a glob or several, got {layers!r}")
    options = Options(
        layers=globs,
        heads=None if heads is None else tuple(sorted(set(heads))),
        keep=keep,
        limit=limit,
        queries=queries,
        seed=seed,
        branches=None if branches is None else tuple(branches),
        references=None if references is None else tuple(references),
        names=None if names is None else tuple(names),
        grid=grid,
        draws=draws,
    )
    if steps is not None and not callable(steps):
        steps = set(steps).__contains__
    return Recorder(model, options, steps, clock, annotate, observers or {})


class Recorder:
    """A recording, made by :func:`record`: a context manager, and afterwards :meth:`compare`.

    ``calls``: the records that are kept as tensors. ``step``: the current number of calls of the model, less one.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        options: Options,
        steps: Callable[[int], bool] | None,
        clock: Callable[..., Mapping[str, float]] | None,
        annotate: Callable[[Call], Call | None] | None,
        observers: Mapping[str, Observer],
    ) -> None:
        roots = {"": model} if isinstance(model, nn.Module) else model
        if not isinstance(roots, Mapping) or not roots or not all(isinstance(m, nn.Module) for m in roots.values()):
            raise TypeError(f"model: expected a torch.nn.Module or a mapping of them, got {type(model).__name__}")
        self.roots = dict(roots)
        self.options, self.steps, self.clock, self.annotate = options, steps, clock, annotate
        self.observers = dict(observers)
        self.store = Store(options)
        self.modules = {id(m): (name, m) for name, m in named(self.roots)}
        self.found: Counter[str] = Counter()
        self.troubles: dict[str, str] = {}
        self.step, self.now = -1, {}
        self._stack: list[tuple[str, nn.Module]] = []
        self._wrapped: list[tuple[nn.Module, bool, Any, Any]] = []
        self._entered: Counter[int] = Counter()
        self._per_layer: defaultdict[str, int] = defaultdict(int)
        self._mode, self._active = Watch(self._function), False

    # ------------------------------------------------------------------------------------------ entering and leaving

    def __enter__(self) -> Recorder:
        if self._active:
            raise ValueError("record: expected a recording that is not running, got one that is")
        self._active = True
        try:
            for name, module in self.modules.values():
                root = any(module is r for r in self.roots.values())
                if (root or not is_leaf(module)) and not isinstance(module, torch.jit.ScriptModule):
                    self._wrap(name, module)
            self._mode.__enter__()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._mode.__exit__(*error)
        finally:
            self._restore()

    def _restore(self) -> None:
        self._active = False
        self._stack.clear()
        while self._wrapped:
            module, had, old, mine = self._wrapped.pop()
            if module.__dict__.get("forward") is not mine:
                continue  # someone else has put another in its place: ours only passes calls on from here
            if had:
                module.forward = old
            else:
                del module.__dict__["forward"]

    def _wrap(self, name: str, module: nn.Module) -> None:
        had, inner = "forward" in module.__dict__, module.forward

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._active or torch.compiler.is_compiling():
                return inner(*args, **kwargs)
            return self._run(name, module, inner, args, kwargs)

        module.forward = forward
        self._wrapped.append((module, had, inner, forward))

    # ---------------------------------------------------------------------------------------------- while it is running

    def _run(self, name: str, module: nn.Module, inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's own forward, and after it what there is to record."""
        is_root = any(module is root for root in self.roots.values())
        if is_root and not any(m is root for _, m in self._stack for root in self.roots.values()):
            self.step += 1
            self.now = dict(self.clock(args, kwargs)) if self.clock else self.now
        fused = isinstance(module, FUSED)
        inside = isinstance(module, nn.TransformerEncoderLayer) and self._entered[id(module.self_attn)]
        self._entered[id(module)] += 1
        self._stack.append((name, module))
        try:
            with watching(self._mode, not fused):
                output = inner(*args, **kwargs)
            with watching(self._mode, False), torch.no_grad():
                self._after(name, module, args, kwargs, output, inside)
            return output
        finally:
            self._stack.pop()

    def _after(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, inside: int
    ) -> None:
        if type(module) is nn.MultiheadAttention:
            self._observe(
                name, "MultiheadAttention", observe.of_multihead_module, module, args, kwargs, output, self._pick
            )
        elif isinstance(module, nn.MultiheadAttention):
            self.found["subclasses of MultiheadAttention, not recorded"] += 1
        elif isinstance(module, nn.TransformerEncoderLayer) and self._entered[id(module.self_attn)] == inside:
            at = f"{name}.self_attn" if name else "self_attn"
            if type(module) is nn.TransformerEncoderLayer:
                self._observe(
                    at, "MultiheadAttention", observe.of_encoder_layer, module, args, kwargs, output, self._pick
                )
        for glob, observer in self.observers.items():
            if fnmatchcase(name, glob):
                self._observe(name, "observed", lambda *_, o=observer: o(module, args, kwargs, output))

    def _function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A function that the mode saw, already run."""
        name, module = self._stack[-1] if self._stack else (OUTSIDE, None)
        if function is F.scaled_dot_product_attention:
            heads = next(
                (h for a in ("heads", "num_heads", "n_heads") if isinstance(h := getattr(module, a, None), int)), None
            )
            self._observe(name, "scaled_dot_product_attention", observe.of_sdpa, args, kwargs, output, heads)
        else:
            self._observe(
                name, "multi_head_attention_forward", observe.of_multihead_function, args, kwargs, output, self._pick
            )

    def _observe(self, name: str, kind: str, make: Callable[..., Any], *given: Any) -> None:
        """Record a call; what cannot be recorded is noted, and the model runs on."""
        self.found[kind] += 1
        if not self._selected(name):
            return
        self.found[f"{kind}, selected"] += 1
        if self.steps is not None and not self.steps(max(0, self.step)):
            return
        try:
            with torch.no_grad():
                calls = make(self._shown(name), *given)
                for call in [calls] if isinstance(calls, Call) else calls or ():
                    self.add(call)
        except (ValueError, TypeError, RuntimeError, KeyError, IndexError, AttributeError) as error:
            self.troubles.setdefault(self._shown(name), f"{type(error).__name__}: {error}")

    def add(self, call: Call) -> None:
        """Take a record; the step and the time are filled in where it has none, and queries are thinned as asked."""
        if call.step is None:
            own = self._per_layer[f"{call.layer}\0{call.part}"]
            call = replace(call, step=max(0, self.step) if self.step >= 0 else own)
        self._per_layer[f"{call.layer}\0{call.part}"] += 1
        for field, value in self.now.items():
            if getattr(call, field) is None:
                call = replace(call, **{field: value})
        call = self.options.described(call)
        annotated = call if self.annotate is None else self.annotate(call)
        if annotated is None:
            return
        rows = None
        if annotated.n_total is None:
            rows = self._pick(call.layer, annotated.q.shape[2], annotated.k.shape[2])
        self.store.add(annotated if rows is None else annotated.take(rows))

    def mark(self, **at: float) -> None:
        """Say where the following calls are: ``t``, ``alpha``, ``sigma``, ``time``."""
        unknown = set(at) - {"t", "alpha", "sigma", "time"}
        if unknown:
            raise ValueError(f"at: expected t, alpha, sigma or time, got {sorted(unknown)}")
        self.now = {**self.now, **at}

    def _pick(self, layer: str, n: int, m: int) -> Tensor | None:
        """The queries of a layer that are kept: a function of its name and the seed, so that steps can be compared."""
        count = self.options.count(n, m)
        if count >= n:
            return None
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.options.seed} {layer}".encode()))
        return torch.randperm(n, generator=generator)[:count].sort().values

    def _shown(self, name: str) -> str:
        return name or type(next(iter(self.roots.values()))).__name__

    def _selected(self, name: str) -> bool:
        names = [name, *(n for n, _ in self._stack if n)]
        return any(fnmatchcase(n, g) for n in names for g in self.options.layers)

    # ------------------------------------------------------------------------------------------------------- afterwards

    @property
    def calls(self) -> tuple[Call, ...]:
        """Records that are kept as tensors, in the order of the run."""
        return tuple(self.store.calls)

    def compare(self, branch: str | None = None, strict: bool = True) -> ProbeResult:
        """The numbers of every head of every recorded call.

        Args:
            branch: of the batch; the last when None (the conditional half of guidance), ``"all"`` for all.
            strict: raise where the record does not reproduce what the model computed.

        Raises:
            ValueError: nothing was recorded (it says what was found); an unknown branch; a layer that is not
                reproduced.
        """
        if self.store.empty:
            raise ValueError(self._nothing())
        result = self.store.result(self._shown(""), self._counts(), self.troubles, branch)
        wrong = self.store.wrong()
        if wrong and strict:
            layer, error, allowed = wrong[0]
            raise ValueError(
                f"record: the recorded weights of {layer} do not reproduce its output (relative error {error:.2g}, "
                f"expected at most {allowed:.2g}), nor those of {len(wrong) - 1} others; strict=False compares anyway"
            )
        if self.troubles:
            layer, why = next(iter(self.troubles.items()))
            warnings.warn(f"record: {len(self.troubles)} layers were not recorded, as {layer} ({why})", stacklevel=2)
        return result

    def _counts(self) -> dict[str, int]:
        kinds = Counter(type(m).__name__ for _, m in self.modules.values())
        attention = {k: n for k, n in kinds.items() if "attention" in k.lower() or "attn" in k.lower()}
        return {"modules": len(self.modules), "forward calls": self.step + 1, **attention, **self._calls_by_kind()}

    def _calls_by_kind(self) -> dict[str, int]:
        return {f"calls of {kind}" if "," not in kind else kind: count for kind, count in self.found.items()}

    def _nothing(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in self._counts().items())
        globs = ", ".join(self.options.layers)
        matched = sum(any(fnmatchcase(n, g) for g in self.options.layers) for n, _ in self.modules.values())
        why = "".join(f"; {layer}: {text}" for layer, text in list(self.troubles.items())[:3])
        return (
            f"record: expected at least one attention call, captured 0 in {self._shown('')} "
            f"({matched} modules match layers {globs}; found: {counts}){why}"
        )
