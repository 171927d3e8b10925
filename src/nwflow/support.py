r"""Support sets: the finite set of points that a Nadaraya-Watson field smooths.

A support is the measure :math:`\sum_i \pi_i \delta_{s_i}`, the distribution of the data end ``t = 1`` (``t = 0`` is
noise). Everything in nwflow is a functional of it: points :math:`s_i`, prior weights :math:`\pi_i` that are
normalised over the real points, and a mask. A masked point and a point of weight 0 are the same thing, absent:

.. math:: \log \pi_i = \log r_i - \log \sum_{j\ \mathrm{real}} r_j, \qquad \log \pi_i = -\infty
          \ \text{if masked or}\ r_i = 0,

with :math:`r` the weights as given, and the gradient with respect to them is exactly 0 there. What a masked slot holds
(padding, NaN) is replaced by zeros. Duplicates are counted, never merged: they carry their own mass.

One set has points ``(m, *event)``; tasks have ``(T, m, *event)`` with a boolean mask ``(T, m)``, True = real point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nwflow._convert import FLOATS, Label, as_labels, as_mask, as_points, as_weights, to_tensor

_BLOCK = 1 << 23  # elements looked at together: bounds the memory of validation whatever the size of the support


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


class Support:
    r"""A weighted, optionally labelled set of points, or a batch of such sets (:meth:`Support.batch`).

    Args:
        points: ``(m, *event)``; tensor, numpy array or nested lists. float16, bfloat16, float32 and float64 are kept,
            integers and booleans are promoted to float32 (float64 where needed to be exact) with a note. A tensor is
            not copied, and one that requires grad stays differentiable.
        weights: ``(m,)`` non-negative prior weights, any scale; uniform when None.
        labels: ``(m,)`` integers or strings.
        mask: ``(m,)`` booleans, True = real point. What masked slots hold is ignored and zeroed.
        drop_nonfinite: drop rows with NaN or infinity (counted in ``n_dropped``) in place of raising.
        rows: ``(m,)`` the caller's own index of each point, for attribution; ``0 .. m-1`` when None.

    Raises:
        ValueError: no points, no positive weight, NaN or infinite rows (with their count and first index), negative
            weights, wrong shapes.
        TypeError: complex numbers, objects, float masks.

    Under ``torch.vmap`` over points or weights checks that depend on values are skipped.

    Example:
        >>> support = Support([[-1.0], [1.0], [1.0]], weights=[1, 1, 2], labels=["a", "b", "b"])
        >>> support
        Support(3 points of (1,), float32, weighted, 2 labels)
        >>> support.weights.tolist(), support.duplicates
        ([0.25, 0.25, 0.5], 1)
        >>> support.given(labels="b").rows.tolist()
        [1, 2]
    """

    points: Tensor
    weights: Tensor
    log_weights: Tensor
    valid: Tensor
    mask: Tensor | None
    labels: Tensor | None
    label_names: tuple[Label, ...] | None
    rows: Tensor
    is_batch: bool
    n_dropped: int
    notes: tuple[str, ...]

    def __init__(
        self,
        points: Any,
        weights: Any = None,
        labels: Any = None,
        mask: Any = None,
        *,
        drop_nonfinite: bool = False,
        rows: Any = None,
    ) -> None:
        tensor, notes = as_points(points)
        if tensor.ndim == 0:
            raise ValueError("points: expected shape (m, *event), got a scalar")
        if isinstance(mask, (Tensor, list, tuple)) and to_tensor(mask, "mask").ndim == 2:
            raise ValueError("mask: expected shape (m,) for one set; tasks are made by Support.batch(points, mask=mask)")
        self._build(tensor, weights, labels, mask, rows, notes=notes, drop_nonfinite=drop_nonfinite)

    @classmethod
    def batch(
        cls,
        sets: Iterable[Any] | Tensor,
        *,
        weights: Any = None,
        labels: Any = None,
        mask: Any = None,
        drop_nonfinite: bool = False,
    ) -> Support:
        """Tasks ``(T, m, *event)`` from several sets, padded with zeros to the largest of them.

        Args:
            sets: supports, tensors, arrays or lists, one a task; or one tensor or array ``(T, m, *event)``, padded
                already, which is the only form that takes ``weights``, ``labels`` and ``mask``, each ``(T, m)``.
            drop_nonfinite: mask rows with NaN or infinity in place of raising.

        Raises:
            ValueError: as for one set, and for a task without a real point; both name the index of the task.

        Example:
            >>> tasks = Support.batch([[[0.0], [1.0]], [[5.0]]])
            >>> tasks.mask.tolist(), tasks.sizes
            ([[True, True], [True, False]], (2, 1))
        """
        if hasattr(sets, "shape"):
            tensor, notes = as_points(sets)
            if tensor.ndim < 2:
                raise ValueError(f"points: expected tasks of shape (T, m, *event), got {tuple(tensor.shape)}")
            mask = torch.ones(tensor.shape[:2], dtype=torch.bool) if mask is None else mask
            self = cls.__new__(cls)
            self._build(tensor, weights, labels, mask, None, notes=notes, drop_nonfinite=drop_nonfinite, lead=2)
            return self
        if not (weights is None and labels is None and mask is None):
            raise TypeError("weights, labels, mask: belong to each Support where tasks are given as separate sets")
        return _pad([_task(i, s, drop_nonfinite) for i, s in enumerate(sets)])

    def _build(
        self,
        points: Tensor,
        weights: Any,
        labels: Any,
        mask: Any,
        rows: Any,
        *,
        notes: Iterable[str] = (),
        drop_nonfinite: bool = False,
        lead: int = 1,
        label_names: tuple[Label, ...] | None = None,
        n_dropped: int = 0,
    ) -> None:
        shape, device = tuple(points.shape[:lead]), points.device
        if 0 in shape:
            raise ValueError(f"points: no references (shape {tuple(points.shape)})")
        if 0 in points.shape:
            raise ValueError(f"points: expected a non-empty event, got shape {tuple(points.shape)}")
        mask = None if mask is None else as_mask(mask, shape, device)
        raw = None if weights is None else as_weights(weights, shape, points)
        if labels is not None and label_names is None:
            labels, label_names = as_labels(labels)
        labels = _as_index(labels, shape, device, "labels")
        rows = torch.arange(shape[-1]).expand(shape) if rows is None else rows
        rows = _as_index(rows, shape, device, "rows")
        assert rows is not None
        bad = _bad_rows(points, mask, lead, drop_nonfinite)
        if bad is not None:
            n_dropped += int(bad.sum())
            if lead == 1:
                keep = (~bad).nonzero().squeeze(1)
                points, rows = points[keep], rows[keep]
                raw, labels, mask = (None if v is None else v[keep] for v in (raw, labels, mask))
                shape = tuple(points.shape[:1])
            else:
                mask = ~bad if mask is None else mask & ~bad
        if mask is not None:
            points = torch.where(mask.reshape(mask.shape + (1,) * (points.ndim - lead)), points, 0)
        self.points, self.mask, self.rows = points, mask, rows
        self.labels, self.label_names = labels, label_names
        self.is_batch, self.n_dropped, self.notes = lead == 2, n_dropped, tuple(notes)
        self.is_uniform = raw is None
        self._raw = raw
        self.valid, self.weights, self.log_weights = _prior(raw, mask, shape, points, n_dropped)

    # -- shape ------------------------------------------------------------------------------------------------------

    @property
    def event_shape(self) -> tuple[int, ...]:
        """Shape of one point; ``()`` for scalar events."""
        return tuple(self.points.shape[2 if self.is_batch else 1 :])

    @property
    def d(self) -> int:
        """Number of coordinates of one point (1 for scalar events)."""
        return int(torch.Size(self.event_shape).numel())

    @property
    def m(self) -> int:
        """Number of slots of a set, padding included."""
        return self.points.shape[1 if self.is_batch else 0]

    @property
    def n_tasks(self) -> int | None:
        """Number of tasks ``T``, or None for one set."""
        return self.points.shape[0] if self.is_batch else None

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the points."""
        return self.points.dtype

    @property
    def device(self) -> torch.device:
        """Device of every tensor of the support."""
        return self.points.device

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of real points of each task; of one set, a tuple of length 1."""
        if self.mask is None:
            return (self.m,)
        return tuple(self.mask.reshape(-1, self.m).sum(1).tolist())

    @property
    def n_used(self) -> int:
        """How many points have mass: real and of positive weight (all tasks together)."""
        return int(self.valid.sum())

    def __len__(self) -> int:
        return self.points.shape[0] if self.is_batch else self.sizes[0]

    # -- content ----------------------------------------------------------------------------------------------------

    @cached_property
    def first_equal(self) -> Tensor:
        """``(m,)`` or ``(T, m)``, long: slot of the first real point of the same set that equals this one."""
        points = self.points.detach()
        if not self.is_batch:
            return _first_equal(points, self.mask)
        assert self.mask is not None
        return torch.stack([_first_equal(p, k) for p, k in zip(points, self.mask, strict=True)])

    @property
    def duplicates(self) -> int:
        """Number of real points that equal an earlier one of their set; they are kept, each with its own mass."""
        return int((self.first_equal != torch.arange(self.m, device=self.device)).sum())

    @property
    def unique(self) -> int:
        """Number of distinct real points (summed over tasks)."""
        return sum(self.sizes) - self.duplicates

    @cached_property
    def data_scale(self) -> Tensor:
        """sqrt(tr Cov / d) under the prior, float64 where the device has it; 0-d for one set, ``(T,)`` for tasks."""
        return _moments(self)[0]

    def describe(self) -> SupportSummary:
        """Counts and scales of the support, as a record that goes to JSON and back."""
        scale, norm, constant = _moments(self)
        names, counts = self.label_names, None
        if self.labels is not None and names is not None:
            real = self.labels if self.mask is None else self.labels[self.mask]
            tally = Counter(real.flatten().tolist())
            counts = {str(name): tally[code] for code, name in enumerate(names) if tally[code]}
        return SupportSummary(
            n=sum(self.sizes),
            d=self.d,
            event_shape=self.event_shape,
            dtype=_name(self.dtype),
            n_tasks=self.n_tasks,
            n_used=self.n_used,
            n_dropped=self.n_dropped,
            duplicates=self.duplicates,
            unique=self.unique,
            constant_columns=constant,
            data_scale=float(scale.square().mean().sqrt()),
            mean_norm=norm,
            labels=counts,
            notes=self.notes,
        )

    def __repr__(self) -> str:
        sizes = self.sizes
        low, high = min(sizes), max(sizes)
        count = f"{low}" if low == high else f"{low}-{high}"
        parts = [f"{self.n_tasks} tasks of {count} points" if self.is_batch else f"{count} points"]
        parts[0] += f" of {self.event_shape}"
        parts.append(_name(self.dtype))
        if self.device.type != "cpu":
            parts.append(str(self.device))
        if not self.is_uniform:
            parts.append("weighted")
        if self.label_names is not None:
            parts.append(f"{len(self.label_names)} labels")
        if self.n_dropped:
            parts.append(f"{self.n_dropped} dropped")
        return f"Support({', '.join(parts)})"

    # -- change -----------------------------------------------------------------------------------------------------

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Support:
        """The same support elsewhere or in another precision; weights stay at least float32.

        Raises:
            TypeError: ``dtype`` is not a floating type. ValueError: a point overflows in ``dtype``.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        if dtype is not None and dtype not in FLOATS:
            raise TypeError(f"dtype: expected one of float16, bfloat16, float32, float64, got {dtype}")
        points = self.points.to(device=device, dtype=dtype)
        raw = self._raw
        if raw is not None and dtype is not None:
            raw = raw.to(torch.promote_types(dtype, torch.float32))
        return self._copy(points, raw, self.labels, self.mask, self.rows)

    def select(self, index: Any) -> Support:
        """The points of one set at ``index`` (long indices or a boolean mask over slots), ``rows`` kept.

        Prior weights are renormalised. Raises ValueError for tasks, and where nothing with mass is left.
        """
        if self.is_batch:
            raise ValueError("select: expected one set, got tasks; take one with .task(i)")
        index = to_tensor(index, "index").to(self.device)
        raw, labels, mask = (None if v is None else v[index] for v in (self._raw, self.labels, self.mask))
        return self._copy(self.points[index], raw, labels, mask, self.rows[index])

    def task(self, i: int) -> Support:
        """One task as a set of its own, without its padding."""
        if not self.is_batch or self.mask is None:
            raise ValueError("task: expected tasks, made by Support.batch")
        real = self.mask[i].nonzero().squeeze(1)
        raw, labels = (None if v is None else v[i][real] for v in (self._raw, self.labels))
        return self._copy(self.points[i][real], raw, labels, None, self.rows[i][real], lead=1)

    def given(self, labels: Any) -> Support:
        """The part of the support that carries one of ``labels`` (original values), prior weights renormalised.

        One set is cut down, ``rows`` still indexing the original points; tasks keep their shape and are masked.

        Raises:
            ValueError: the support has no labels, a label is unknown (the known ones are listed), or a task is left
                without a point (its index is named).
        """
        if self.labels is None or self.label_names is None:
            raise ValueError("given: this support has no labels")
        wanted = [labels] if isinstance(labels, (str, int)) else list(getattr(labels, "tolist", lambda: labels)())
        unknown = [w for w in wanted if w not in self.label_names]
        if unknown or not wanted:
            known = ", ".join(map(repr, self.label_names[:20])) + (", ..." if len(self.label_names) > 20 else "")
            raise ValueError(f"labels: unknown {', '.join(map(repr, unknown)) or '(none given)'}; this support has {known}")
        codes = torch.tensor([self.label_names.index(w) for w in wanted], device=self.device)
        chosen = torch.isin(self.labels, codes)
        if not self.is_batch:
            return self.select(chosen if self.mask is None else chosen & self.mask)
        return self._copy(self.points, self._raw, self.labels, self.mask & chosen, self.rows)

    def _copy(
        self, points: Tensor, raw: Any, labels: Any, mask: Any, rows: Tensor, lead: int | None = None
    ) -> Support:
        new = Support.__new__(Support)
        lead = lead or (2 if self.is_batch else 1)
        new._build(
            points, raw, labels, mask, rows,
            notes=self.notes, lead=lead, label_names=self.label_names, n_dropped=self.n_dropped,
        )  # fmt: skip
        return new


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _as_index(values: Any, shape: tuple[int, ...], device: torch.device, name: str) -> Tensor | None:
    if values is None:
        return None
    tensor = to_tensor(values, name)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, one a point, got {tuple(tensor.shape)}")
    if tensor.is_floating_point() or tensor.is_complex():
        raise TypeError(f"{name}: expected integers, got {tensor.dtype}")
    return tensor.to(device=device, dtype=torch.int64)


def _known(flag: Tensor) -> bool:
    """The truth of a 0-d tensor; False under vmap, where it has no single value."""
    try:
        return bool(flag)
    except RuntimeError as error:
        if "vmap" in str(error):
            return False
        raise


def _bad_rows(points: Tensor, mask: Tensor | None, lead: int, drop: bool) -> Tensor | None:
    """Real rows with NaN or infinity as a boolean tensor, None when there are none; raises unless ``drop``."""
    rows = points.detach().flatten(0, lead - 1).reshape(points.shape[:lead].numel(), -1)
    block = max(1, _BLOCK // rows.shape[1])
    bad = torch.cat([~torch.isfinite(part).all(1) for part in rows.split(block)]).reshape(points.shape[:lead])
    bad = bad if mask is None else bad & mask
    if not _known(bad.any()):
        return None
    if not drop:
        where = bad.nonzero()
        first = where[0].tolist()
        place = f"index {first[0]}" if lead == 1 else f"index {first[1]} of task {first[0]}"
        rows_ = "row" if len(where) == 1 else "rows"
        raise ValueError(
            f"points: {len(where)} bad {rows_} (NaN or infinity), first at {place}; drop_nonfinite=True drops such rows"
        )
    return bad


def _prior(
    raw: Tensor | None, mask: Tensor | None, shape: tuple[int, ...], points: Tensor, n_dropped: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Which points have mass, the normalised weights, and their logarithms; gradients of the rest are exactly 0."""
    dropped = f" ({n_dropped} rows with NaN or infinity dropped)" if n_dropped else ""
    if shape[0] == 0:
        raise ValueError(f"points: no references{dropped}")
    dtype = torch.promote_types(points.dtype, torch.float32)
    real = torch.ones(shape, dtype=torch.bool, device=points.device) if mask is None else mask
    values = torch.ones(shape, dtype=dtype, device=points.device) if raw is None else raw
    if _known((real & ~torch.isfinite(values)).any()):
        raise ValueError("weights: expected finite numbers, got NaN or infinity")
    if _known((real & (values < 0)).any()):
        raise ValueError(f"weights: expected non-negative numbers, got {float(values[real].min()):g}")
    valid = real & (values > 0)
    _refuse_empty(valid, real, dropped)
    inside = torch.where(valid, values, 1)  # the inner where of two: log never sees a zero, so no NaN in its gradient
    logs = torch.where(valid, inside.log(), -torch.inf)
    log_weights = torch.where(valid, inside.log() - torch.logsumexp(logs, -1, keepdim=True), -torch.inf)
    scaled = torch.where(valid, values, 0) / torch.where(valid, values, 0).detach().amax(-1, keepdim=True)
    return valid, scaled / scaled.sum(-1, keepdim=True), log_weights


def _refuse_empty(valid: Tensor, real: Tensor, dropped: str) -> None:
    empty = ~valid.any(-1)
    if not _known(empty.any()):
        return
    if valid.ndim == 1:
        raise ValueError(f"points: no references, {'every weight is 0' if bool(real.any()) else 'every point is masked'}")
    i = int(empty.nonzero()[0])
    why = "every weight is 0" if bool(real[i].any()) else "every point is masked"
    raise ValueError(f"points: no references in task {i} (batch index {i}): {why}{dropped}")


def _task(i: int, value: Any, drop_nonfinite: bool) -> Support:
    if isinstance(value, Support):
        if value.is_batch:
            raise ValueError(f"sets: expected one set a task, got tasks at batch index {i}")
        return value
    try:
        return Support(value, drop_nonfinite=drop_nonfinite)
    except (ValueError, TypeError) as error:
        raise type(error)(f"task {i} (batch index {i}): {error}") from None


def _pad(sets: list[Support]) -> Support:
    if not sets:
        raise ValueError("sets: expected at least one task, got none")
    shapes = {s.event_shape for s in sets}
    if len(shapes) > 1:
        raise ValueError(f"sets: expected one event shape for all tasks, got {', '.join(map(str, sorted(shapes)))}")
    labelled = [s.labels is not None for s in sets]
    if any(labelled) != all(labelled):
        raise ValueError(f"sets: expected labels in all tasks or in none, missing at batch index {labelled.index(False)}")
    dtype = sets[0].dtype
    for s in sets:
        dtype = torch.promote_types(dtype, s.dtype)

    def pad(parts: list[Tensor], value: float) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=value)

    m = [s.mask if s.mask is not None else torch.ones(s.m, dtype=torch.bool, device=s.device) for s in sets]
    names = _merged_names(sets) if all(labelled) else None
    labels = pad([_recode(s, names) for s in sets], -1) if names is not None else None
    raw = None if all(s.is_uniform for s in sets) else pad([s.weights for s in sets], 0.0)
    new = Support.__new__(Support)
    new._build(
        pad([s.points.to(dtype) for s in sets], 0.0), raw, labels, pad(m, False), pad([s.rows for s in sets], -1),
        notes=dict.fromkeys(n for s in sets for n in s.notes), lead=2, label_names=names,
        n_dropped=sum(s.n_dropped for s in sets),
    )  # fmt: skip
    return new


def _merged_names(sets: list[Support]) -> tuple[Label, ...]:
    names = {name for s in sets for name in s.label_names or ()}
    return tuple(sorted(names, key=lambda v: (isinstance(v, str), v)))


def _recode(s: Support, names: tuple[Label, ...]) -> Tensor:
    assert s.labels is not None and s.label_names is not None
    table = torch.tensor([names.index(n) for n in s.label_names], device=s.device)
    return table[s.labels]


def _first_equal(points: Tensor, mask: Tensor | None) -> Tensor:
    """Index of the first real row that equals each row: rows with equal 64-bit hashes are compared exactly."""
    m = points.shape[0]
    index = torch.arange(m, device=points.device)
    rows = points.reshape(m, -1)
    keys = _hashes(rows)
    if mask is not None:
        keys = torch.where(mask, keys, index)  # a hash that meets an index is told apart by the comparison below
    order = torch.argsort(keys, stable=True)
    new_run = torch.ones(m, dtype=torch.bool, device=points.device)
    new_run[1:] = keys[order][1:] != keys[order][:-1]
    first = torch.empty_like(index)
    first[order] = order[new_run][new_run.cumsum(0) - 1]
    check = (first != index).nonzero().squeeze(1)
    for part in check.split(max(1, _BLOCK // rows.shape[1])):
        same = (rows[part] == rows[first[part]]).all(1)
        if mask is not None:
            same &= mask[part] & mask[first[part]]
        for i in part[~same].tolist():  # a collision of hashes: look at every earlier row of the run
            run = [j for j in range(i) if keys[j] == keys[i] and (mask is None or bool(mask[j] & mask[i]))]
            first[i] = next((j for j in run if bool((rows[j] == rows[i]).all())), i)
    return first


def _hashes(rows: Tensor) -> Tensor:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (rows.shape[1],), generator=generator).to(rows.device) * 2 + 1
    blocks = rows.split(max(1, _BLOCK // rows.shape[1]))
    return torch.cat([((b + 0.0).view(bits).to(torch.int64) * factors).sum(1) for b in blocks])


def _moments(support: Support) -> tuple[Tensor, float, int]:
    """Data scale of each set, mean norm of all real points, number of constant columns; float64, block by block."""
    wide = torch.float32 if support.device.type == "mps" else torch.float64
    scales, norms, lows, highs = [], [], [], []
    for i in range(support.n_tasks or 1):
        points, weights, mask = support.points.detach(), support.weights.detach(), support.mask
        if support.is_batch:
            points, weights, mask = points[i], weights[i], None if mask is None else mask[i]
        if mask is not None:
            points, weights = points[mask], weights[mask]
        rows = points.reshape(points.shape[0], -1)
        size = max(1, _BLOCK // rows.shape[1])
        parts = list(zip(rows.split(size), weights.to(wide).split(size), strict=True))
        mean = torch.stack([w @ r.to(wide) for r, w in parts]).sum(0)
        spread = torch.stack([w @ (r.to(wide) - mean).square() for r, w in parts]).sum()
        scales.append((spread / rows.shape[1]).sqrt())
        norms += [torch.linalg.vector_norm(r.to(wide), dim=1) for r, _ in parts]
        lows.append(rows.amin(0))
        highs.append(rows.amax(0))
    constant = int((torch.stack(lows).amin(0) == torch.stack(highs).amax(0)).sum())
    return (torch.stack(scales) if support.is_batch else scales[0]), float(torch.cat(norms).mean()), constant
