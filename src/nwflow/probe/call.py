r"""One attention call as the recorder keeps it: tensors with heads apart, before anything is computed from them.

    a = softmax_j(scale q . k_j + bias_j)     over the keys that the mask allows,      output = a v

Every way to observe attention (``nn.MultiheadAttention``, ``scaled_dot_product_attention``, a processor of diffusers)
ends in this record, and every comparison starts from it. Whoever observes attention in another way builds a
:class:`Call` and hands it to :meth:`nwflow.probe.Recorder.add`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = ["Call"]


@dataclass(frozen=True, eq=False)
class Call:
    """One softmax of one layer: B batch rows, H heads, n queries, m keys, width d of a head.

    ``layer`` is the module's name, ``kind`` what was observed (``"MultiheadAttention"``, ``"sdpa"``, ...), ``part``
    which softmax of the layer when it has several (``"text"``, ``"image 0"``; their outputs are added). ``q``, ``k``,
    ``v`` are the projected tensors that enter the logits and the sum: with rotary embeddings and QK norms applied.

    ``scale`` multiplies q . k; None: 1 / sqrt(d). ``mask`` has True where a query may look, ``bias`` is added to the
    logits; both broadcast against ``(B, H, n, m)``. ``causal``: query i sees keys j <= i. ``kernel`` is ``"dot"`` or
    ``"gaussian"``: logits -scale |q - k|^2 / 2. ``output`` ``(B, H, n, e)``: what the model itself made of the rows, to
    check a v against; times ``output_scale`` when the model scales it (the scale of an adapter). ``dropout``: the model
    dropped weights, so that nothing can be checked. ``checked``: the relative error of such a check already made.

    ``references`` ``(m,)`` says to which reference a key belongs, -1 for none (text, the image itself): the comparison
    is over reference keys alone, renormalised, beside their mass. None: every key is its own reference. ``names`` are
    those of the references. ``grid``: rows and columns of the queries. ``rows`` ``(n,)``: their original numbers when
    only some of ``n_total`` were kept.

    ``branches`` names equal consecutive parts of the batch, ``("uncond", "cond")`` under guidance; they are never
    averaged. ``step``, ``time`` (the scheduler's own), ``t`` (0 noise, 1 data), ``alpha``, ``sigma``: where it was.
    ``features``: (x ``(B or 1, n, f)``, s ``(B or 1, m, f)``) for the comparison at the schedule's bandwidth.
    """

    layer: str
    q: Float[Tensor, "B H n d"]
    k: Float[Tensor, "B H m d"]
    v: Float[Tensor, "B H m e"] | None = None
    kind: str = "sdpa"
    part: str = ""
    scale: float | None = None
    mask: Bool[Tensor, "#B #H #n m"] | None = None
    bias: Float[Tensor, "#B #H #n m"] | None = None
    causal: bool = False
    kernel: str = "dot"
    output: Float[Tensor, "B H n e"] | None = None
    output_scale: float = 1.0
    dropout: bool = False
    references: tuple[int, ...] | None = None
    names: tuple[str, ...] | None = None
    grid: tuple[int, int] | None = None
    rows: tuple[int, ...] | None = None
    n_total: int | None = None
    branches: tuple[str, ...] | None = None
    step: int | None = None
    time: float | None = None
    t: float | None = None
    alpha: float | None = None
    sigma: float | None = None
    features: tuple[Tensor, Tensor] | None = None
    checked: Tensor | float | None = None

    def __post_init__(self) -> None:
        q, k, v = self.q, self.k, self.v
        fits = q.ndim == k.ndim == 4 and q.shape[:2] == k.shape[:2] and q.shape[-1] == k.shape[-1] and k.shape[2] > 0
        if not fits or (v is not None and (v.ndim != 4 or v.shape[:3] != k.shape[:3])):
            got = ", ".join(str(tuple(u.shape)) for u in (q, k, v) if u is not None)
            raise ValueError(f"{self.layer}: expected q (B, H, n, d), k (B, H, m, d) and v (B, H, m, e), got {got}")
        if self.kernel not in ("dot", "gaussian"):
            raise ValueError(f'kernel: expected "dot" or "gaussian", got {self.kernel!r}')
        if self.references is not None:
            self._check_references(self.references)
        if self.branches is not None and q.shape[0] % len(self.branches):
            raise ValueError(
                f"branches: expected a batch that splits into {len(self.branches)} equal parts {self.branches}, "
                f"got {q.shape[0]} rows in {self.layer}"
            )

    def _check_references(self, references: tuple[int, ...]) -> None:
        if len(references) != self.k.shape[2]:
            raise ValueError(
                f"references: expected one number for each of the {self.k.shape[2]} keys of {self.layer}, "
                f"got {len(references)}"
            )
        if max(references) < 0:
            raise ValueError(f"references: expected at least one key of {self.layer} that belongs to one, got only -1")

    @property
    def width(self) -> int:
        """d, the width of one head."""
        return self.q.shape[-1]

    @property
    def logit_scale(self) -> float:
        """What multiplies q . k."""
        return self.width**-0.5 if self.scale is None else float(self.scale)

    @property
    def bytes(self) -> int:
        """Memory of all tensors of the record."""
        return sum(u.numel() * u.element_size() for u in self._tensors())

    def _tensors(self) -> list[Tensor]:
        values: list[Any] = [getattr(self, f.name) for f in fields(self)]
        return [u for value in values for u in (value if isinstance(value, tuple) else (value,)) if torch.is_tensor(u)]

    def take(self, rows: Tensor) -> Call:
        """The record of some of its queries, ``rows`` being their positions."""
        old, index = self.rows, rows.tolist()

        def some(value: Tensor | None, axis: int = 2) -> Tensor | None:
            if value is None or value.shape[axis] == 1:
                return value
            return value.index_select(axis, rows.to(value.device))

        mask = self.mask
        if self.causal:  # which keys a query sees depends on its number
            n, m = self.q.shape[2], self.k.shape[2]
            below = torch.ones(n, m, dtype=torch.bool, device=self.q.device).tril()[None, None]
            mask = below if mask is None else mask & below
        return replace(
            self,
            q=self.q.index_select(2, rows.to(self.q.device)),
            mask=some(mask),
            bias=some(self.bias),
            causal=False,
            output=some(self.output),
            features=None if self.features is None else (some(self.features[0], 1), self.features[1]),
            rows=tuple(index if old is None else (old[i] for i in index)),
            n_total=self.q.shape[2] if self.n_total is None else self.n_total,
        )

    def detached(self) -> Call:
        """The same with its own copies of all tensors: later in-place changes and autograd do not reach it."""
        own: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if torch.is_tensor(value):
                own[f.name] = value.detach().clone()
            elif f.name == "features" and value is not None:
                own[f.name] = tuple(u.detach().clone() for u in value)
        return replace(self, **own)
