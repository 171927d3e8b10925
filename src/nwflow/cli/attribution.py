r"""Which references made each sample: the weights at the last evaluation (sigma > 0, t near 1 = data), and whether the
sample is a copy.

A sample is a copy when its distance to the nearest reference is below a third of that to the second nearest
(:func:`nwflow.metrics.memorisation`). ``n_eff`` = 1 / sum w^2 counts the references that share the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from PIL.Image import Image
from rich.table import Table
from rich.text import Text
from torch import Tensor

from nwflow.cli.picture import Brush, Unit
from nwflow.metrics import MemorisationResult, memorisation
from nwflow.support import Support


@dataclass(frozen=True)
class Reference:
    """A row of the source with its weight, label and, for image folders, name."""

    row: int
    weight: float
    label: str | None = None
    name: str | None = None

    def __str__(self) -> str:
        what = self.name or f"#{self.row}" + (f" ({self.label})" if self.label is not None else "")
        return f"{what} {percent(self.weight)}"


def percent(weight: float) -> str:
    """A weight as people read it.

    >>> percent(0.372), percent(0.0001)
    ('37%', '<1%')
    """
    return "<1%" if weight < 0.005 else f"{100 * weight:.0f}%"


@dataclass(frozen=True)
class Made:
    """One sample: the references with the largest weights, which hold ``captured`` of it, and the nearest one.

    ``ratio`` is the distance to the nearest over that to the second nearest; ratio and copy are None where the
    references are all at one place.
    """

    sample: int
    n_eff: float
    captured: float
    references: tuple[Reference, ...]
    nearest: int
    distance: float
    ratio: float | None
    copy: bool | None

    def flat(self, k: int) -> dict[str, Any]:
        """The row of a CSV file, with ``k`` references."""
        row: dict[str, Any] = asdict(self)
        del row["references"]
        row["copy"] = None if self.copy is None else int(self.copy)
        for j in range(k):
            ref = self.references[j] if j < len(self.references) else None
            for key in ("row", "weight", "label", "name"):
                row[f"{key}_{j + 1}"] = None if ref is None else getattr(ref, key)
        return row


def label_of_rows(support: Support) -> dict[int, str]:
    """Label of each original row, as text; empty without labels."""
    if support.labels is None or support.label_names is None:
        return {}
    return {r: str(support.label_names[c]) for r, c in zip(support.rows.tolist(), support.labels.tolist(), strict=True)}


def who_made(points: Tensor, samples: Any, support: Support, names: list[str] | None = None) -> list[Made]:
    """Attribution and memorisation of ``points`` ``(n, *event)``, made by a run of ``nwflow.sample`` on ``support``;
    ``names`` are those of the original rows."""
    found, labels = _copies(points, support), label_of_rows(support)
    rows = support.rows[support.valid].tolist()
    who, n_eff = samples.attribution, samples.n_eff.tolist()
    lists = zip(who.indices.tolist(), who.weights.tolist(), who.captured.tolist(), n_eff, strict=True)
    made = []
    for i, (indices, weights, captured, effective) in enumerate(lists):
        references = tuple(
            Reference(row, weight, labels.get(row), None if names is None else names[row])
            for row, weight in zip(indices, weights, strict=True)
            if row >= 0
        )
        ratio = None if found is None else found.ratio[i]
        nearest = rows[0 if found is None else found.nearest[i]]
        distance = _distance(points[i], support) if found is None else found.distance[i]
        copy = None if found is None or ratio is None else ratio < found.threshold
        made.append(Made(i, effective, captured, references, nearest, distance, ratio, copy))
    return made


def _copies(points: Tensor, support: Support) -> MemorisationResult | None:
    references = support.points[support.valid]
    if bool((references == references[:1]).all()):
        return None
    return memorisation(points.to(references.dtype), references)


def _distance(point: Tensor, support: Support) -> float:
    return float((point - support.points[support.valid][0]).flatten().double().norm())


def summary(made: Sequence[Made]) -> dict[str, Any]:
    """Counts over all samples."""
    judged = [m.copy for m in made if m.copy is not None]
    ordered = sorted(m.n_eff for m in made)
    return {
        "n": len(made),
        "copies": sum(judged) if judged else None,
        "median_n_eff": ordered[len(ordered) // 2],
        "references_used": len({ref.row for m in made for ref in m.references[:1]}),
    }


def sentence(made: Sequence[Made]) -> str:
    """The counts in words."""
    counted = summary(made)
    blends = f"the median sample blends {counted['median_n_eff']:.1f} references"
    if counted["copies"] is None:
        return f"All references are at one place; {blends}."
    return f"{counted['copies']} of {counted['n']} samples are copies of a reference; {blends}."


def units(images: Sequence[Image], made: Sequence[Made], pool: Support, brush: Brush, k: int) -> list[Unit]:
    """Pictures of samples beside those of the ``k`` references with the largest weights, which are in ``pool``."""
    slots = {row: slot for slot, row in enumerate(pool.rows.tolist())}
    out = []
    for image, m in zip(images, made, strict=False):
        references = m.references[:k]
        at = torch.tensor([slots[ref.row] for ref in references], device=pool.device)
        out.append(Unit(image, brush.paint(pool.points[at]), [ref.weight for ref in references], bool(m.copy)))
    return out


def table(made: Sequence[Made], top: int = 3, first: str = "sample", heads: Sequence[str] | None = None) -> Table:
    """The table that is printed, ``top`` references a row."""
    out = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    out.add_column(first, justify="right")
    out.add_column("references, with their weights")
    for name in ("n_eff", "ratio"):
        out.add_column(name, justify="right")
    out.add_column("copy")
    for i, m in enumerate(made):
        named = [ref for ref in m.references[:top] if ref.weight >= 0.005] or m.references[:1]
        references = "  ".join(map(str, named))
        ratio = "-" if m.ratio is None else f"{m.ratio:.2f}"
        copy = "-" if m.copy is None else Text(f"of #{m.nearest}", style="red") if m.copy else "no"
        out.add_row(str(m.sample) if heads is None else heads[i], references, f"{m.n_eff:.1f}", ratio, copy)
    return out
