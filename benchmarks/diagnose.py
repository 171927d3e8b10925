r"""Diagnoses of data whose truth is known, at several seeds: the table of docs/diagnose.md.

Each row is what ``nwflow.diagnose.diagnose`` says (t = 0 noise, t = 1 data): the verdict, the share of error lost to
each regime, and the best remedy. Writes ``results/diagnose.json`` and prints the table in Markdown.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import machine, write_json
from torch import Tensor

from nwflow import Support, load_support
from nwflow.diagnose import diagnose


def mixture(d: int, m: int, seed: int) -> Support:
    """Eight unit Gaussians with means of scale 5."""
    g = torch.Generator().manual_seed(seed)
    means = 5 * torch.randn(8, d, generator=g)
    return Support(means[torch.randint(8, (m,), generator=g)] + torch.randn(m, d, generator=g))


def gaussian(d: int, m: int, seed: int, scales: tuple[float, ...] = (1.0,)) -> Support:
    noise = torch.randn(m, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Support(noise * torch.tensor(scales, dtype=torch.float64))


def shells(d: int, m: int, seed: int) -> Support:
    """Two to five spherical shells of radii uniform in (0, 5), radial noise 0.3."""
    g = torch.Generator().manual_seed(seed)
    k = int(torch.randint(2, 6, (1,), generator=g))
    radius = 5 * torch.rand(k, generator=g)
    u = torch.nn.functional.normalize(torch.randn(m, d, generator=g), dim=1)
    return Support(u * (radius[torch.randint(k, (m,), generator=g)] + 0.3 * torch.randn(m, generator=g))[:, None])


def ring(seed: int) -> Support:
    a = 2 * math.pi * torch.arange(1, 201, dtype=torch.float64) / 200
    return Support(torch.stack([100 * a.cos(), 0.1 * a.sin()], 1))


def digits(per_class: int, seed: int) -> Support:
    """So many of each class, with labels."""
    s = load_support("digits")
    g, rows = torch.Generator().manual_seed(seed), []
    for code in s.labels.unique().tolist():
        mine = (s.labels == code).nonzero().squeeze(-1)
        rows.append(mine[torch.randperm(len(mine), generator=g)[:per_class]])
    return s.select(torch.cat(rows))


def unlabelled(s: Support, m: int, seed: int) -> Support:
    rows = torch.randperm(s.m, generator=torch.Generator().manual_seed(seed))[:m]
    return Support(s.points[rows])


CASES: dict[str, tuple[str, Callable[[int], Support]]] = {
    "mixture of 8, d = 2, m = 500": ("healthy", lambda seed: mixture(2, 500, seed)),
    "mixture of 8, d = 64, m = 500": ("collapse", lambda seed: mixture(64, 500, seed)),
    "Gaussian, d = 96, m = 500": ("collapse", lambda seed: gaussian(96, 500, seed)),
    "shells, d = 8, m = 50": ("geometry", lambda seed: shells(8, 50, seed)),
    "ring, columns 100 and 0.1": ("geometry", ring),
    "columns of scale 80, 1, 0.05": ("geometry", lambda seed: gaussian(3, 300, seed, (80.0, 1.0, 0.05))),
    "digits, 3 a class": ("scarcity", lambda seed: digits(3, seed)),
    "digits, 50 a class": ("", lambda seed: digits(50, seed)),
    "digits, 1,000 without labels": ("", lambda seed: unlabelled(load_support("digits"), 1000, seed)),
    "Fashion-MNIST, 2,000 without labels": ("", lambda seed: unlabelled(load_support("fashion-mnist"), 2000, seed)),
}


def row(name: str, seed: int, queries: int) -> dict[str, Any]:
    truth, make = CASES[name]
    found = diagnose(make(seed), seed=seed, queries=queries)
    best = found.remedy(found.verdict.remedy) if found.verdict.remedy else None
    return {
        "case": name, "seed": seed, "truth": truth, "regime": found.verdict.regime, "unit": found.verdict.unit,
        "lost": {k: v.skill_lost for k, v in found.regimes.items()},
        "remedy": None if best is None else best.name, "error": None if best is None else best.error,
        "remedies": {r.name: (r.skill, r.skill_low, r.skill_high) for r in found.remedies},
        "seconds": found.run.seconds,
    }  # fmt: skip


def main() -> None:
    about = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    about.add_argument("--seeds", type=int, default=3)
    about.add_argument("--queries", type=int, default=300)
    about.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    about.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "diagnose.json")
    options = about.parse_args()
    rows = []
    print("| data | seed | verdict | collapse | geometry | scarcity | best remedy | error left |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.cases:
        for seed in range(1 if name.startswith("ring") else options.seeds):
            try:
                r = row(name, seed, options.queries)
            except OSError as error:
                print(f"{name}: skipped: {error}")
                break
            rows.append(r)
            lost = [_interval(v) for v in r["lost"].values()]
            mark = "" if not r["truth"] or r["truth"] == r["regime"] else f" (expected {r['truth']})"
            left = _interval(r["error"])
            print(
                f"| {name} | {seed} | {r['regime']}{mark} | {' | '.join(lost)} | {r['remedy'] or 'none'} | {left} |",
                flush=True,
            )
    write_json(options.out, {"machine": machine(), "rows": rows})


def _interval(v: Tensor | tuple[float, float, float] | None) -> str:
    return "" if v is None else f"{v[0]:.2f} [{v[1]:.2f}, {v[2]:.2f}]"


if __name__ == "__main__":
    main()
