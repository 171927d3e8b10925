r"""Samples of the plug-in and of the best remedy: how many are copies, how far they are from held-out points, pictures.

Sampled from t = 0 (noise) to t = 1 (data) with the default sampler; the share of copies is that of
:func:`nwflow.metrics.memorisation`, beside the same on held-out points.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from nwflow.diagnose.choose import fit_remedy, rows_of
from nwflow.diagnose.result import Gallery, Interval, Picture, Predicted
from nwflow.field import NWField
from nwflow.metrics import memorisation, mmd2
from nwflow.metrics._result import wilson_interval
from nwflow.metrics.bandwidth import median_bandwidth
from nwflow.paths import Path
from nwflow.sample import sample
from nwflow.support import Support

MOST = 2000  # references that samples are drawn from
N, SHOWN, STEPS = 64, 8, 20


@dataclass(frozen=True)
class Drawn:
    """What :func:`copies_and_gallery` finds."""

    copies: Interval | None
    copies_held_out: Interval | None
    mmd2: tuple[Predicted, ...]
    gallery: Gallery | None


def is_image(support: Support) -> bool:
    """Whether events can be images: (H, W), (C, H, W) or (H, W, C) with 1 or 3 channels and sides of at least 4."""
    s = tuple(support.event_shape)
    if len(s) == 2:
        return min(s) >= 4
    return len(s) == 3 and ((s[0] in (1, 3) and min(s[1:]) >= 4) or (s[2] in (1, 3) and min(s[:2]) >= 4))


def copies_and_gallery(support: Support, queries: Tensor, path: Path, best: str | None, pool: Support | None,
                       image: bool, seed: int, progress: Callable[[str, float], None], *,
                       left_out: bool) -> Drawn:  # fmt: skip
    """Samples of one set: of the largest class where there are labels, of at most MOST references.

    ``left_out``: the queries are references, which are no references to themselves.
    """
    part, others = _one_set(support, pool, seed)
    flat = rows_of(part)
    plain = sample(NWField(part, path), N, steps=STEPS, seed=seed)
    found = memorisation(_flat(plain.points), flat) if _distinct(flat) > 1 else None
    held = _copies(queries, flat, left_out) if len(queries) else None
    progress("samples", 0.4)
    mmd = _mmd(part, queries, path, seed, left_out)
    progress("samples", 0.8)
    gallery = _gallery(part, plain, path, best, others, seed) if image else None
    return Drawn(_share(found), held, mmd, gallery)


def _one_set(support: Support, pool: Support | None, seed: int) -> tuple[Support, Support | None]:
    others, part = pool, support
    if support.labels is not None and pool is None:
        labels = support.labels[support.valid]
        codes, counts = labels.unique(return_counts=True)
        code = int(codes[counts.argmax()])
        keep = support.valid & (support.labels == code)
        rest = (support.valid & (support.labels != code)).nonzero().squeeze(-1)
        others = support.select(rest) if len(rest) else None
        part = support.select(keep)
    rows = part.valid.nonzero().squeeze(-1)
    if len(rows) > MOST:
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:MOST]]
    return part.select(rows.sort().values), others


def _flat(x: Tensor) -> Tensor:
    return x.reshape(len(x), -1).double()


def _distinct(x: Tensor) -> int:
    return len(torch.unique(x, dim=0))


def _share(found: Any) -> Interval | None:
    return None if found is None else (found.share, *found.interval)


def _copies(queries: Tensor, refs: Tensor, left_out: bool) -> Interval | None:
    """Share of real points that would count as copies of one of ``refs``, with Wilson's interval."""
    places = torch.unique(refs, dim=0)
    if len(places) < 2 + left_out:
        return None
    near = torch.cdist(queries, places, compute_mode="donot_use_mm_for_euclid_dist")
    near = near.topk(2 + left_out, largest=False).values[:, int(left_out) :]
    n, found = len(near), int((near[:, 0] * 3.0 < near[:, 1]).sum())
    return (found / n, *wilson_interval(found, n, 0.95))


def _mmd(part: Support, queries: Tensor, path: Path, seed: int, left_out: bool) -> tuple[Predicted, ...]:
    """MMD^2 of plug-in samples of m / 8 ... m references to held-out points, one bandwidth for all. Where the queries
    are references at most half of these are left out for it."""
    held = queries[: min(200, int(part.valid.sum()) // 2) if left_out else 200]
    if len(held) < 4 or _distinct(held) < 2:
        return ()
    width, out = median_bandwidth(held), []
    rows = part.valid.nonzero().squeeze(-1)
    if left_out:
        seen = (torch.cdist(rows_of(part), held, compute_mode="donot_use_mm_for_euclid_dist") == 0.0).any(-1)
        rows = rows[~seen]
    order = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed + 4))]
    for k in (3, 2, 1, 0):
        m = len(order) >> k
        if m < 1:
            continue
        drawn = sample(NWField(part.select(order[:m]), path), 2 * N, steps=STEPS, seed=seed + k).points
        d = mmd2(_flat(drawn), held, bandwidth=width)
        low, high = d.interval if d.interval is not None else (d.value, d.value)
        out.append(Predicted(float(m), d.value, low, high, extrapolated=False))
    return tuple(out)


def _gallery(part: Support, plain: Any, path: Path, best: str | None, pool: Support | None, seed: int) -> Gallery:
    """Pictures of samples with the references that made them."""
    remedied = None
    if best is not None:
        field = fit_remedy(best, part, pool).field(part, path, 1e-3)
        remedied = sample(field, SHOWN, steps=STEPS, seed=seed)
    low, high = (float(v) for v in torch.aminmax(part.points.double()))
    shown: dict[int, int] = {}
    references: list[Picture] = []
    place = {int(r): i for i, r in enumerate(part.rows.tolist())}

    def add(row: int) -> int:
        if row not in shown:
            shown[row] = len(references)
            references.append(Picture(_png(part.points[place[row]], low, high), f"row {row}"))
        return shown[row]

    flat = rows_of(part)

    def pictures(drawn: Any) -> tuple[Picture, ...]:
        ratio = memorisation(_flat(drawn.points[:SHOWN]), flat).ratio if _distinct(flat) > 1 else None
        out = []
        for i in range(min(SHOWN, len(drawn.points))):
            made = []
            if drawn.attribution is not None:
                pairs = zip(drawn.attribution.indices[i].tolist(), drawn.attribution.weights[i].tolist(), strict=True)
                made = [(add(r), r, w) for r, w in list(pairs)[:3] if r >= 0 and w > 0.01]
            made_of = tuple(made)
            out.append(
                Picture(_png(drawn.points[i], low, high), f"sample {i}", made_of, None if ratio is None else ratio[i])
            )
        return tuple(out)

    first = pictures(plain)
    second = () if remedied is None else pictures(remedied)
    return Gallery(tuple(references), first, second, best)


def _png(x: Tensor, low: float, high: float) -> str:
    """One event as a PNG in base64, dark to bright over the references' range."""
    v = ((x.double() - low) / max(high - low, 1e-300)).clamp(0, 1)
    if v.ndim == 3 and v.shape[0] in (1, 3):
        v = v.permute(1, 2, 0)
    if v.ndim == 3 and v.shape[2] == 1:
        v = v[..., 0]
    picture = Image.fromarray((v * 255).round().to(torch.uint8).numpy())
    while max(picture.size) > 96:
        picture = picture.reduce(2)
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode()
