r"""How many samples end where the exact flow ends, per evaluation of the field.

20,000 training images of Fashion-MNIST in [0, 1], CondOT(sigma_min=0.01), 8 seeds of 128 samples each. The reference
end of a sample is the point that a Heun run of 400 steps, uniform in t (t = 0 noise, t = 1 data), leads to from the
same start. A method agrees on a sample if its end is nearest to the same point. What it costs is counted in evaluations
of the field, not in seconds: those are the same for all methods.

The reference takes up to 800 evaluations a sample. Once a single point holds all but 1e-6 of the weight at eight times
in a row the sample's end is known, and it is no longer evaluated. The ends are kept in ``--reference`` for the next
run. The default method is also run with 100 evaluations: what then is missing to 1 are samples so near a separatrix
that the reference itself is in doubt.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import Bar, machine, write_json
from torch import Tensor

from nwflow import CondOT, NWField, load_support
from nwflow.sample import sample
from nwflow.sample.noise import standard_normal

HERE = Path(__file__).parent
RUNS = [  # method, grid, evaluations
    *(("3m", "log_bandwidth", n) for n in (10, 15, 20, 40, 100)),
    *(("2m", "log_bandwidth", n) for n in (20, 40)),
    *(("exact", "log_bandwidth", n) for n in (20, 40)),
    *(("euler", "uniform", n) for n in (20, 40)),
    *(("heun", "uniform", n) for n in (20, 40)),
]
BARS = {("3m", 20): 0.97, ("3m", 40): 0.985}


def heun_ends(field: NWField, x: Tensor, steps: int = 400) -> Tensor:
    """Index of the reference at which a Heun run from ``x`` ends, ``(n,)``; -1 never occurs."""
    ends = torch.full((len(x),), -1)
    live, calm = torch.arange(len(x)), torch.zeros(len(x), dtype=torch.long)
    times = torch.linspace(0, 1, steps + 1, dtype=torch.float64).tolist()
    for t, following in pairwise(times):
        here = field.posterior(x, t, ("velocity", "n_eff"))
        calm = torch.where(here.n_eff < 1 + 2e-6, calm + 1, 0)
        u, done = here.velocity, calm >= 8
        if done.any():
            ends[live[done]] = field.attribute(x[done], t, 1).indices[:, 0]
            x, u, live, calm = x[~done], u[~done], live[~done], calm[~done]
        if len(x) == 0:
            return ends
        h = following - t
        x = x + h / 2 * (u + field(x + h * u, following))
    ends[live] = field.attribute(x, 1.0, 1).indices[:, 0]
    return ends


def reference(field: NWField, seeds: range, n: int, path: Path) -> Tensor:
    """``(len(seeds), n)`` ends of the reference run, from ``path`` where they are there."""
    known = dict(np.load(path)) if path.exists() else {}
    for seed in seeds:
        if f"{seed}_{n}" not in known:
            start = standard_normal(field.event_shape, range(n), seed=seed)
            known[f"{seed}_{n}"] = heun_ends(field, start).numpy()
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, **known)
            print(f"reference of seed {seed} done", flush=True)
    return torch.from_numpy(np.stack([known[f"{seed}_{n}"] for seed in seeds]))


def nearest(points: Tensor, support: Tensor) -> Tensor:
    """Index of the nearest support point of each of ``points``, by centred differences in blocks."""
    centre = support.mean(0)
    rows, queries = (support - centre).flatten(1), (points - centre).flatten(1)
    return torch.cat([torch.cdist(block, rows).argmin(1) for block in queries.split(128)])


def wilson(share: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share by Wilson's score."""
    middle, half = share + z**2 / (2 * n), z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return (middle - half) / (1 + z**2 / n), (middle + half) / (1 + z**2 / n)


def measure(field: NWField, run: tuple[str, Any, int], seeds: range, n: int, ends: Tensor) -> dict[str, Any]:
    """One row of the table: the share of samples that end at the reference's point."""
    method, grid, steps = run
    hits, used, started = 0, 0, time.perf_counter()
    for seed, end in zip(seeds, ends, strict=True):
        found = sample(field, n, steps=steps, method=method, grid=grid, seed=seed, attribution=0)  # type: ignore[arg-type]
        hits += int((nearest(found.points, field.points) == end).sum())
        used = found.evaluations
    total = len(seeds) * n
    low, high = wilson(hits / total, total)
    seconds = (time.perf_counter() - started) / used / len(seeds)
    row = {"method": method, "grid": grid, "steps": steps, "evaluations": used, "samples": total, "agree": hits / total}
    print(f"{method:9} {grid:14} {used:4} evaluations  {hits / total:.4f}  [{low:.4f}, {high:.4f}]", flush=True)
    return {**row, "low": low, "high": high, "seconds_per_evaluation": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description="Agreement with a 400-step Heun run, per evaluation of the field.")
    parser.add_argument("--support", default="fashion-mnist", help="what load_support takes")
    parser.add_argument("--limit", type=int, default=20_000, help="how many references")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--n", type=int, default=128, help="samples of a seed")
    parser.add_argument("--reference", type=Path, default=Path(tempfile.gettempdir()) / "nwflow-heun400.npz")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "sampling.json")
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    field = NWField(load_support(options.support, limit=options.limit), CondOT(sigma_min=0.01))
    seeds = range(options.seeds)
    ends = reference(field.with_accuracy(1e-3), seeds, options.n, options.reference)
    rows = [measure(field, run, seeds, options.n, ends) for run in RUNS]
    bars = [
        Bar(f"{row['method']}, {row['evaluations']} evaluations", row["agree"], BARS[key], at_least=True)
        for row in rows
        if (key := (row["method"], row["steps"])) in BARS
    ]
    print(*bars, sep="\n")
    record = {
        "machine": machine(),
        "support": options.support,
        "references": len(field.points),
        "length_scales": field.length_scales(),
        "rows": rows,
        "bars": [{"what": b.what, "measured": b.measured, "limit": b.limit, "passed": b.passed} for b in bars],
    }
    write_json(options.out, record)


if __name__ == "__main__":
    main()
