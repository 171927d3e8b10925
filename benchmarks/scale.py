r"""What samples cost as supports grow, and what that buys: ``python benchmarks/scale.py [SECTION ...]``.

Time runs from t = 0 (noise) to t = 1 (data). Sections, each written to ``results/scale.json`` as soon as it is done:

accuracy     seconds until a share of samples ends where a Heun run of 400 steps ends (Fashion-MNIST, seeds pooled)
certificate  what the collapse certificate saves at 50 uniform Euler steps, and that results stay
truncation   what certified truncation saves at the steps of t in (0.6, 1), without the certificate
support      seconds of a step against m, early and after collapse
dimension    the same against d
error        every method's error against float64, along the path

Rivals are in ``_rivals.py``. Times of one section come from one run on one machine; ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _common import Bar, interleave, machine, write_json
from _rivals import Broadcast, DeepInverse, Floor, Query, Skipped, TopK
from sampling import nearest, reference, wilson
from torch import Tensor

from nwflow import CondOT, NWField, load_support
from nwflow.sample import Samples, sample
from nwflow.sample.noise import standard_normal

HERE = Path(__file__).parent
PATH = CondOT(sigma_min=0.01)
SIZES, FEW = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000), (1_000, 10_000)
HEURISTICS = {"deepinv": DeepInverse, "top 1024": TopK}
DIMENSIONS = (16, 64, 256, 784, 3072)
BROADCAST = 2**31  # elements of differences above which broadcasting is timed on fewer queries


class Dense:
    """The products of the dense denoiser as a research script writes them: expanded squares, float32, not centred."""

    def __init__(self, points: Tensor) -> None:
        self.s, self.square = points, points.square().sum(-1)

    def __call__(self, q: Query) -> Tensor:
        cross = q.x @ self.s.T
        square = q.x.square().sum(-1, keepdim=True) - 2 * q.alpha * cross + q.alpha**2 * self.square
        return torch.softmax(square / (-2 * q.sigma**2), -1) @ self.s


def query(x: Tensor, t: float) -> Query:
    at = PATH(t)
    return Query(x, t, float(at.alpha), float(at.sigma))


def on_path(points: Tensor, n: int, t: float, seed: int = 0) -> Query:
    """Queries alpha s + sigma z with s drawn from the support."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(points), (n,), generator=generator)
    at = PATH(t)
    z = torch.randn(n, points.shape[1], generator=generator)
    return query(float(at.alpha) * points[rows] + float(at.sigma) * z, t)


def clustered(m: int, d: int, seed: int = 0) -> Tensor:
    """A support of 64 clusters whose spectrum falls as 1/k: as features of images, most variance in few directions."""
    generator = torch.Generator().manual_seed(seed)
    sd = torch.arange(1, d + 1).rsqrt()
    sd = sd / sd.square().mean().sqrt()
    centres = torch.randn(64, d, generator=generator) * sd
    points = torch.randn(m, d, generator=generator).mul_(sd).mul_(0.5)
    return points.add_(centres[torch.randint(64, (m,), generator=generator)], alpha=0.87)


def built_on(points: Tensor, rivals: dict[str, Any]) -> dict[str, Callable[[Query], Tensor]]:
    """Those of the rivals that run here."""
    built = {}
    for name, rival in rivals.items():
        try:
            built[name] = rival(points)
        except Skipped as why:  # noqa: PERF203
            print(f"{name} skipped: {why}")
    return built


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    value = call()
    return value, time.perf_counter() - start


def euler(denoise: Callable[[Query], Tensor], x: Tensor, steps: int) -> Tensor:
    """The loop of a research script: Euler, uniform in t, velocity from the denoiser of the linear path."""
    for k in range(steps):
        q = query(x, k / steps)
        x = x + (denoise(q) - (1 - PATH.sigma_min) * x) / q.sigma / steps
    return x


# ----------------------------------------------------------------------------------------------------------- sections


def accuracy(points: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Share of samples that end where the reference ends, and the seconds that it took, for each way."""
    n, seeds, field = 64, range(options.seeds), NWField(points, PATH)
    ends = reference(field.with_accuracy(1e-3), seeds, n, options.reference)
    starts = [standard_normal((points.shape[1],), range(n), seed=seed) for seed in seeds]
    dense = Dense(points)
    ways: dict[str, Callable[[int], Tensor]] = {
        f"nwflow 3m, {steps} evaluations": lambda i, steps=steps: (
            sample(field, n, steps=steps, seed=seeds[i], attribution=0).points
        )
        for steps in (10, 12, 15, 20, 40)
    }
    ways["dense Euler, 100 steps"] = lambda i: euler(dense, starts[i], 100)
    sample(field, 2, steps=4, attribution=0)  # what is prepared once is outside the clock, as for the rivals
    rows = []
    for name, way in ways.items():
        found = [timed(lambda i=i, way=way: way(i)) for i in range(len(seeds))]
        hits = sum(int((nearest(x, points) == end).sum()) for (x, _), end in zip(found, ends, strict=True))
        total = n * len(seeds)
        low, high = wilson(hits / total, total)
        seconds = median(s for _, s in found)
        rows.append({"way": name, "agree": hits / total, "low": low, "high": high, "seconds": seconds})
        print(f"{name:28} {hits / total:.4f} [{low:.4f}, {high:.4f}]  {seconds:.3f} s for {n} samples", flush=True)
    record: dict[str, Any] = {"samples": n * len(seeds), "rows": rows}
    try:
        rival = DeepInverse(points)
        calls = [timed(lambda t=t: rival(on_path(points, n, t)))[1] for t in (0.1, 0.3, 0.5, 0.7, 0.9)]
        record["deepinv_seconds_per_call"] = median(calls)
        record["deepinv_loop_seconds"] = 100 * median(calls)
        print(f"deepinv: {median(calls):.3f} s a call, {100 * median(calls):.1f} s for the loop of 100", flush=True)
    except Skipped as why:
        print(why)
    good = min((r for r in rows[:-1] if r["agree"] >= 0.97), key=lambda r: r["seconds"], default=None)
    if good:
        record["to_dense_euler"] = rows[-1]["seconds"] / good["seconds"]
        record["to_deepinv"] = record.get("deepinv_loop_seconds", math.nan) / good["seconds"]
        record["reached_by"] = good["way"]
    return record


def certificate(points: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """50 uniform Euler steps of 64 samples, dense, with and without the certificate."""
    field = NWField(points, PATH)

    def run(on: bool) -> Samples:
        return sample(field, 64, steps=50, method="euler", grid="uniform", attribution=0, engine="dense",
                      certificate=on, accuracy=1e-5)  # fmt: skip

    sample(field, 2, steps=4, attribution=0)
    with_it, without = run(True), run(False)
    times = interleave({"on": lambda: run(True), "off": lambda: run(False)}, options.rounds, {}, {})
    return {
        "evaluations_with": with_it.field_evaluations,
        "evaluations_without": without.field_evaluations,
        "largest_difference": float((with_it.points - without.points).abs().max()),
        "scale": float(points.abs().max()),
        "saves": times["off"].over(times["on"]),
    }


def step_seconds(field: NWField, n: int, engine: str, **options: Any) -> list[tuple[float, float]]:
    """(t, seconds) of every step of a run without the certificate."""
    clock: list[tuple[float, float]] = []

    def note(k: int, t: float, x: Tensor, denoised: Tensor) -> None:
        clock.append((t, time.perf_counter()))

    start = time.perf_counter()
    sample(field, n, attribution=0, engine=engine, certificate=False, callback=note, **options)
    before = [start, *(s for _, s in clock)]
    return [(t, now - then) for (t, now), then in zip(clock, before, strict=False)]


def truncation(points: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Mean seconds of the steps at t in (0.6, 1) over those of the dense engine, on two grids."""
    field, record = NWField(points, PATH), {}
    grids = {"euler, 50 uniform": {"steps": 50, "method": "euler", "grid": "uniform"}, "3m, 40": {"steps": 40}}
    sample(field, 2, steps=4, attribution=0, engine="truncated", certificate=False)
    for name, grid in grids.items():
        rounds: dict[str, list[list[tuple[float, float]]]] = {"dense": [], "truncated": [], "auto": []}
        for i in range(options.rounds):
            for engine in list(rounds) if i % 2 == 0 else reversed(list(rounds)):
                rounds[engine].append(step_seconds(field, 64, engine, **grid))
        late = {k: [sum(s for t, s in run if 0.6 < t < 1) for run in runs] for k, runs in rounds.items()}
        whole = {k: [sum(s for _, s in run) for run in runs] for k, runs in rounds.items()}
        record[name] = {
            f"{k}_{part}": median(a / b for a, b in zip(v[k], v["dense"], strict=True))
            for part, v in (("late", late), ("whole", whole))
            for k in ("truncated", "auto")
            if all(x > 0 for x in v["dense"])
        }
        record[name]["steps"] = {
            k: [(run[0][0], median(s for _, s in run)) for run in zip(*runs, strict=True)] for k, runs in rounds.items()
        }
        print(name, {k: v for k, v in record[name].items() if k != "steps"}, flush=True)
    return record


def cost(points: Tensor, n: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a call of each method early and after collapse, and of a default run without the certificate."""
    field, record = NWField(points, PATH, accuracy=1e-3), {}
    scale = float(field.length_scales(probes=64)[0])
    rivals = {
        "two products": Floor,
        "dense": Dense,
        "broadcasting": Broadcast,
        "deepinv": DeepInverse,
        "top 1024": TopK,
    }
    built = built_on(points, rivals)
    for when, h in (("early", 3.0), ("late", 0.1)):
        q = on_path(points, n, 1 / (1 + h * scale))
        few = q.first(max(1, min(n, BROADCAST // points.numel())))
        calls: dict[str, Callable[[], Any]] = {"nwflow": lambda q=q: field.denoise(q.x, q.t)}
        shares = {}
        for name, method in built.items():
            mine = few if name in ("broadcasting", "deepinv") else q
            calls[name] = lambda method=method, mine=mine: method(mine)
            shares[name] = len(mine.x) / n
        times = interleave(calls, options.rounds, dict.fromkeys(("broadcasting", "deepinv"), 1), shares)
        record[when] = {name: t.seconds for name, t in times.items()}
    for engine in ("dense", "auto"):
        runs = [step_seconds(field, n, engine, steps=20) for _ in range(options.rounds)]
        record[f"steps_{engine}"] = [(run[0][0], median(s for _, s in run)) for run in zip(*runs, strict=True)]
    return record


def support(_: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    record = {}
    for m in FEW if options.quick else SIZES:
        record[str(m)] = cost(clustered(m, 64), 64, options)
        print(m, record[str(m)]["early"], record[str(m)]["late"], flush=True)
    return record


def dimension(_: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    record = {}
    for d in DIMENSIONS[:2] if options.quick else DIMENSIONS:
        record[str(d)] = cost(clustered(20_000, d), 64, options)
        print(d, record[str(d)]["early"], record[str(d)]["late"], flush=True)
    return record


def error(points: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Worst relative error of the denoiser over 8 queries of the path, against float64 differences."""
    field, n = NWField(points, PATH), 8
    methods: dict[str, Callable[[Query], Tensor]] = {
        "nwflow 1e-5": lambda q: field.denoise(q.x, q.t),
        "nwflow 1e-3": lambda q: field.with_accuracy(1e-3).denoise(q.x, q.t),
        "dense": Dense(points),
        "broadcasting": Broadcast(points),
    }
    methods |= built_on(points, HEURISTICS)
    rows = []
    for t in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 0.95, 0.99):
        q = on_path(points, n, t, seed=1)
        right = exact(points, q)
        found = {
            k: float(((f(q).double() - right).norm(dim=-1) / right.norm(dim=-1)).max()) for k, f in methods.items()
        }
        rows.append({"t": t, **found})
        print({k: f"{v:.1e}" for k, v in rows[-1].items()}, flush=True)
    return {"rows": rows}


def exact(points: Tensor, q: Query) -> Tensor:
    """The denoiser in float64, by differences."""
    x, step = q.x.double(), max(1, 2**24 // (len(q.x) * points.shape[1]))
    square = [(x[:, None] - q.alpha * s.double()).square().sum(-1) for s in points.split(step)]
    w = torch.softmax(torch.cat(square, -1) / (-2 * q.sigma**2), -1)
    return torch.stack([wi @ s.double() for wi, s in zip(w.split(step, -1), points.split(step), strict=True)]).sum(0)


SECTIONS = {f.__name__: f for f in (accuracy, certificate, truncation, support, dimension, error)}


def bars(record: dict[str, Any]) -> list[Bar]:
    found = []
    if "to_dense_euler" in record.get("accuracy", {}):
        found.append(Bar("97 % faster than 100 dense Euler steps", record["accuracy"]["to_dense_euler"], 8, True))
        found.append(Bar("97 % faster than deepinv in that loop", record["accuracy"]["to_deepinv"], 12, True))
    if "certificate" in record:
        found.append(Bar("certificate saves", record["certificate"]["saves"], 1.5, True))
        found.append(Bar("largest difference", record["certificate"]["largest_difference"], 1e-4))
    for name, row in record.get("truncation", {}).items():
        if "truncated_late" in row:
            found.append(Bar(f"truncation, t in (0.6, 1), {name}", row["truncated_late"], 0.2))
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="What samples cost as supports grow.")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; all when left out")
    parser.add_argument("--quick", action="store_true", help="10,000 images, small sizes, one round")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--reference", type=Path, default=Path(tempfile.gettempdir()) / "nwflow-heun400-60k.npz")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "scale.json")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"expected sections out of {', '.join(SECTIONS)}, got {', '.join(unknown)}")
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.quick:
        options.seeds, options.rounds = 1, 1
        options.reference = options.reference.with_name("nwflow-heun400-10k.npz")
    points = load_support("fashion-mnist", limit=10_000 if options.quick else None).points.flatten(1)
    record = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.sections or SECTIONS:
        print(f"--- {name}", flush=True)
        started = machine()
        record[name] = SECTIONS[name](points, options) | {"machine": started}
        record["bars"] = [vars(b) | {"passed": b.passed} for b in bars(record)]
        write_json(options.out, record)
    print(*bars(record), sep="\n")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(torchvision|deepinv)\b")
    main()
