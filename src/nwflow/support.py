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

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from nwflow import _convert as convert
from nwflow._convert import Label
from nwflow._pointset import SupportSummary, bad_rows, first_equal, known, norms, pad_rows, prior, scale


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
        rows: ``(m,)`` the caller's own index of each point, for attribution; ``0 .. m-1`` when None, -1 where masked.
        notes: what a reader should know of where the points come from; shown by :meth:`describe`.

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

    points: Float[Tensor, "*set_event"]
    weights: Float[Tensor, "*set"]
    log_weights: Float[Tensor, "*set"]
    valid: Bool[Tensor, "*set"]
    mask: Bool[Tensor, "*set"] | None
    labels: Int64[Tensor, "*set"] | None
    label_names: tuple[Label, ...] | None
    rows: Int64[Tensor, "*set"]
    raw_weights: Tensor | None  # as given, before they are normalised
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
        notes: Iterable[str] = (),
    ) -> None:
        tensor, converted = convert.as_points(points)
        if tensor.ndim == 0:
            raise ValueError("points: expected shape (m, *event), got a scalar")
        if mask is not None and convert.to_tensor(mask, "mask").ndim == 2:
            raise ValueError("mask: expected shape (m,) for one set; tasks are made by Support.batch(points, mask=...)")
        notes = (*notes, *converted)
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
            tensor, notes = convert.as_points(sets)
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
        if 0 in points.shape:
            what = "no references" if 0 in shape else "expected a non-empty event"
            raise ValueError(f"points: {what}, got shape {tuple(points.shape)}")
        mask = None if mask is None else convert.as_mask(mask, shape, device)
        raw = None if weights is None else convert.as_weights(weights, shape, points)
        if labels is not None:
            labels, label_names = convert.as_labels(labels) if label_names is None else (labels, label_names)
            labels = convert.as_index(labels, shape, device, "labels")
        rows = convert.as_index(torch.arange(shape[-1]).expand(shape) if rows is None else rows, shape, device, "rows")
        bad = bad_rows(points, mask, lead, drop_nonfinite)
        if bad is not None:
            n_dropped += int(bad.sum())
            if lead == 2:
                assert mask is not None
                mask = mask & ~bad
            else:
                keep = (~bad).nonzero().squeeze(1)
                points, rows = points[keep], rows[keep]
                raw, labels, mask = (None if v is None else v[keep] for v in (raw, labels, mask))
        fewer = f" ({n_dropped} rows with NaN or infinity dropped)" if n_dropped else ""
        if points.shape[0] == 0:
            raise ValueError(f"points: no references{fewer}")
        if mask is not None:
            rows = torch.where(mask, rows, -1)
            if not isinstance(points, torch.nn.Parameter):  # the field zeroes these at each evaluation
                points = torch.where(mask.reshape(mask.shape + (1,) * (points.ndim - lead)), points, 0)
        self.points, self.mask, self.rows, self.labels, self.label_names = points, mask, rows, labels, label_names
        self.is_batch, self.n_dropped, self.notes, self.raw_weights = lead == 2, n_dropped, tuple(notes), raw
        real = torch.ones_like(rows, dtype=torch.bool) if mask is None else mask
        ones = torch.ones_like(rows, dtype=torch.promote_types(points.dtype, torch.float32))
        self.valid, self.weights, self.log_weights = prior(ones if raw is None else raw, real, fewer)

    @property
    def is_uniform(self) -> bool:
        """True where no weights were given."""
        return self.raw_weights is None

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

    @cached_property
    def first_equal(self) -> Int64[Tensor, "*set"]:
        """``(m,)`` or ``(T, m)``, long: slot of the first real point of the same set that equals this one."""
        points = self.points.detach()
        if not self.is_batch or self.mask is None:
            return first_equal(points, self.mask)
        return torch.stack([first_equal(p, k) for p, k in zip(points, self.mask, strict=True)])

    @property
    def duplicates(self) -> int:
        """Number of real points that equal an earlier one of their set; they are kept, each with its own mass."""
        return int((self.first_equal != torch.arange(self.m, device=self.device)).sum())

    @property
    def unique(self) -> int:
        """Number of distinct real points (summed over tasks)."""
        return sum(self.sizes) - self.duplicates

    @cached_property
    def data_scale(self) -> Float[Tensor, "*T"]:
        """sqrt(tr Cov / d) under the prior, float64 where the device has it; 0-d for one set, ``(T,)`` for tasks."""
        if not self.is_batch:
            return scale(self.points, self.weights)
        return torch.stack([scale(p, w) for p, w in zip(self.points, self.weights, strict=True)])

    def describe(self) -> SupportSummary:
        """Counts and scales of the support, as a record that goes to JSON and back."""
        real = self.points.detach() if self.mask is None else self.points.detach()[self.mask]
        constant = real.amin(0) == real.amax(0)
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
            constant_columns=int(constant.sum()),
            data_scale=float(self.data_scale.square().mean().sqrt()),
            mean_norm=float(norms(real).mean()),
            labels=self._label_counts(),
            notes=self.notes,
        )

    def _label_counts(self) -> dict[str, int] | None:
        if self.labels is None or self.label_names is None:
            return None
        real = self.labels if self.mask is None else self.labels[self.mask]
        counts = torch.bincount(real.flatten(), minlength=len(self.label_names)).tolist()
        return {str(name): n for name, n in zip(self.label_names, counts, strict=True) if n}

    def __repr__(self) -> str:
        count = "-".join(str(n) for n in sorted({min(self.sizes), max(self.sizes)}))
        tasks = f"{self.n_tasks} tasks of " if self.is_batch else ""
        parts = [f"{tasks}{count} points of {self.event_shape}", _name(self.dtype)]
        parts += [str(self.device)] * (self.device.type != "cpu") + ["weighted"] * (not self.is_uniform)
        parts += [] if self.label_names is None else [f"{len(self.label_names)} labels"]
        parts += [f"{self.n_dropped} dropped"] * (self.n_dropped > 0)
        return f"Support({', '.join(parts)})"

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Support:
        """The same support elsewhere or in another precision; weights stay at least float32.

        Raises:
            TypeError: ``dtype`` is not a floating type. ValueError: a point overflows in ``dtype``.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        if dtype is not None and dtype not in convert.FLOATS:
            raise TypeError(f"dtype: expected one of float16, bfloat16, float32, float64, got {dtype}")
        points = self.points.to(device=device, dtype=dtype)
        if dtype is not None and known(~torch.isfinite(points).all()):
            largest = float(self.points.detach().abs().amax())
            raise ValueError(f"dtype: points up to {largest:g} overflow in {_name(dtype)}")
        raw = self.raw_weights
        if raw is not None and dtype is not None:
            raw = raw.to(torch.promote_types(dtype, torch.float32))
        return self.rebuilt(points, raw, self.labels, self.mask, self.rows)

    def select(self, index: Any) -> Support:
        """The points of one set at ``index`` (long indices or a boolean mask over slots), ``rows`` kept.

        Prior weights are renormalised. Raises ValueError for tasks, and where nothing with mass is left.
        """
        if self.is_batch:
            raise ValueError("select: expected one set, got tasks; take one with .task(i)")
        index = convert.to_tensor(index, "index").to(self.device)
        raw, labels, mask = (None if v is None else v[index] for v in (self.raw_weights, self.labels, self.mask))
        return self.rebuilt(self.points[index], raw, labels, mask, self.rows[index])

    def task(self, i: int) -> Support:
        """One task as a set of its own, without its padding."""
        if not self.is_batch or self.mask is None:
            raise ValueError("task: expected tasks, made by Support.batch")
        real = self.mask[i].nonzero().squeeze(1)
        raw, labels = (None if v is None else v[i][real] for v in (self.raw_weights, self.labels))
        return self.rebuilt(self.points[i][real], raw, labels, None, self.rows[i][real], lead=1)

    def given(self, labels: Any) -> Support:
        """The part of the support that carries one of ``labels`` (original values), prior weights renormalised.

        One set is cut down, ``rows`` still indexing the original points; tasks keep their shape and are masked.

        Raises:
            ValueError: the support has no labels, a label is unknown (the known ones are listed), or a task is left
                without a point (its index is named).
        """
        if self.labels is None or self.label_names is None:
            raise ValueError("given: this support has no labels")
        codes, wanted = convert.known_codes(labels, self.label_names)
        codes = torch.tensor(codes, device=self.device)
        chosen = torch.isin(self.labels, codes) if self.mask is None else torch.isin(self.labels, codes) & self.mask
        if not bool((left := chosen.any(-1)).all()):
            where = f"task {int((~left).nonzero()[0])}" if self.is_batch else "this support"
            raise ValueError(f"labels: {where} has no point labelled {wanted}")
        if not self.is_batch:
            return self.select(chosen)
        return self.rebuilt(self.points, self.raw_weights, self.labels, chosen, self.rows)

    def rebuilt(
        self, points: Tensor, raw: Any, labels: Any, mask: Any, rows: Tensor, lead: int | None = None
    ) -> Support:
        """A support of these tensors with the names, notes and counts of this one."""
        new, lead = Support.__new__(Support), lead or (2 if self.is_batch else 1)
        new._build(
            points, raw, labels, mask, rows,
            notes=self.notes, lead=lead, label_names=self.label_names, n_dropped=self.n_dropped,
        )  # fmt: skip
        return new


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
        raise ValueError(f"sets: expected labels in all tasks or in none, task {labelled.index(False)} has none")
    masks = [torch.ones_like(s.valid) if s.mask is None else s.mask for s in sets]
    own = [(s.labels, s.label_names) for s in sets if s.labels is not None and s.label_names]
    codes, names = convert.merge_labels(own)
    new = Support.__new__(Support)
    new._build(
        pad_rows([s.points for s in sets], 0),
        None if all(s.is_uniform for s in sets) else pad_rows([s.weights for s in sets], 0),
        pad_rows(codes, -1) if codes else None,
        pad_rows(masks, False),
        pad_rows([s.rows for s in sets], -1),
        notes=dict.fromkeys(n for s in sets for n in s.notes),
        lead=2,
        label_names=names or None,
        n_dropped=sum(s.n_dropped for s in sets),
    )
    return new
