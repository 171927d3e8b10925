r"""Time, memory and error of the exact field against other ways to compute it: ``python benchmarks/field.py``.

At every size (queries n, support m, dimension d) and bandwidth h, all methods compute the denoiser (t = 0 noise, t = 1
data, h = sigma / alpha) of the same queries x = alpha s + sigma eps, s drawn from the support, in one process and in
turns. Errors are against float64 direct differences on the first few queries. README.md says what each column means.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _common import Bar, Memory, Timing, interleave, machine, measured, write_json
from _rivals import RIVALS, Query, Skipped
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nwflow import NWField
from nwflow.data import load_support
from nwflow.paths import CondOT

SIZES = ("256x10000x2", "256x50000x64", "256x50000x768", "fashion-mnist", "64x50000x3072")
QUICK_SIZES = ("256x10000x2", "256x10000x64", "64x5000x784")
BANDWIDTHS, QUICK_BANDWIDTHS = (10.0, 1.0, 0.1, 0.01), (1.0, 0.01)
OURS = {"nwflow None": None, "nwflow 1e-3": 1e-3, "nwflow 1e-5": 1e-5}
FLOOR, FAST, EXACT = "two products", "nwflow None", "nwflow 1e-5"
CHECKED = 4  # queries whose error is measured
SLOW_PAIRS = 2**27  # n m d of a call of a slow rival: it gets the first so many queries, and its time is scaled up
SMALL = 2**21  # n m d from which nwflow chooses between precisions; errors are measured above it
ROUNDED = torch.finfo(torch.float32).eps / 4  # total variation that returning weights as float32 may add
PATH = CondOT(sigma_min=0.0)


class Ours:
    """NWField.denoise at one accuracy; all three share one support and its cached centred copy."""

    def __init__(self, field_: NWField) -> None:
        self.field = field_

    def __call__(self, q: Query) -> Tensor:
        return self.field.denoise(q.x, q.t)

    def weights(self, q: Query) -> Tensor:
        """The weights of the pass itself, as the m largest that it reports."""
        top = self.field.attribute(q.x, q.t, k=self.field.m)
        return torch.zeros_like(top.weights).scatter_(-1, top.indices, top.weights)


@dataclass
class Problem:
    """A support with its scale, and how often each call is repeated."""

    name: str
    points: Tensor
    n: int
    scale: float
    methods: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    prepared: dict[str, float | None] = field(default_factory=dict)

    @property
    def m(self) -> int:
        return self.points.shape[0]

    @property
    def d(self) -> int:
        return self.points.shape[1]

    def queries(self, h: float, seed: int = 0) -> Query:
        """n queries on the path where the bandwidth is ``h`` data scales: t = 1 / (1 + h) on the linear path."""
        generator = torch.Generator().manual_seed(seed)
        t = 1.0 / (1.0 + h * self.scale)
        at = PATH(t)
        rows = torch.randint(self.m, (self.n,), generator=generator)
        noise = torch.randn(self.n, self.d, generator=generator, dtype=torch.float64)
        x = at.alpha * self.points[rows].double() + at.sigma * noise
        return Query(x.float(), t, float(at.alpha), float(at.sigma))

    def share(self, name: str, q: Query) -> Query:
        """The queries that a method is timed on."""
        slow = getattr(self.methods[name], "slow", False)
        return q.first(max(CHECKED, min(self.n, SLOW_PAIRS // (self.m * self.d)))) if slow else q


def problems(sizes: Iterable[str], say: Callable[[str], None]) -> Iterator[Problem]:
    """The supports named by ``sizes``: ``QxMxD`` is Gaussian with spectrum k^-1 and scale 1, the rest a data set."""
    for size in sizes:
        if size == "fashion-mnist":
            try:
                points, n = load_support(size).points.flatten(1), 64
            except (OSError, ValueError) as error:
                say(f"{size}: skipped: {error}")
                continue
        else:
            n, m, d = (int(v) for v in size.split("x"))
            sd = torch.arange(1, d + 1).rsqrt()
            points = torch.randn(m, d, generator=torch.Generator().manual_seed(d)) * (sd / sd.square().mean().sqrt())
        scale = float(points.var(0, correction=0).mean().sqrt())
        yield Problem(size, points, n, scale)


def prepare(p: Problem, without: Iterable[str], say: Callable[[str], None]) -> None:
    """Build every method and call it on few queries: what it compiles, caches and keeps is not part of the times."""
    q = p.queries(1.0).first(CHECKED)
    fields: list[NWField] = []

    def ours(accuracy: float | None) -> Ours:
        fields.append(fields[0].with_accuracy(accuracy) if fields else NWField(p.points, PATH, accuracy=accuracy))
        return Ours(fields[-1])

    makers = {name: (lambda a=a: ours(a)) for name, a in OURS.items()}
    makers |= {name: (lambda r=rival: r(p.points)) for name, rival in RIVALS.items()}
    for name in sorted(makers, key=lambda k: k != FLOOR):
        try:
            if name in without:
                raise Skipped("left out on request")
            p.methods[name], _, built = measured(makers[name])
            _, _, first = measured(lambda name=name: p.methods[name](q))
        except Exception as error:  # whatever a rival raises concerns that rival alone
            if name in OURS or name == FLOOR:
                raise
            p.methods.pop(name, None)
            p.skipped[name] = str(error) if isinstance(error, Skipped) else f"{type(error).__name__}: {error}"
            say(f"{p.name}: {name} skipped: {p.skipped[name].splitlines()[0]}")
            continue
        p.prepared[name] = None if built.kept is None or first.kept is None else built.kept + first.kept


@dataclass
class Exact:
    """The float64 answer for the first queries, by direct differences."""

    weights: Tensor
    denoiser: Tensor
    noise: Tensor

    @property
    def n_eff(self) -> float:
        return float((1.0 / self.weights.square().sum(-1)).median())


def exact(p: Problem, q: Query) -> Exact:
    x, step = q.x[:CHECKED].double(), max(1, 2**23 // (CHECKED * p.d))
    square = [(x[:, None] - q.alpha * s.double()).square().sum(-1) for s in p.points.split(step)]
    w = torch.softmax(torch.cat(square, -1) / (-2.0 * q.sigma**2), -1)
    mean = sum(wi @ s.double() for wi, s in zip(w.split(step, -1), p.points.split(step), strict=True))
    assert isinstance(mean, Tensor)
    return Exact(w, mean, (x - q.alpha * mean) / q.sigma)


def errors(p: Problem, name: str, q: Query, out: Tensor, right: Exact) -> dict[str, float | None]:
    """Worst over the checked queries: total variation of weights, relative error of denoiser and noise."""
    method = p.methods[name]
    if name == FLOOR:
        return {}
    mean = out[:CHECKED].double()
    if isinstance(method, Ours):
        found = method.field.posterior(q.x, q.t, ("noise",))
        assert found.noise is not None and found.error_bound is not None
        noise, bound = found.noise[:CHECKED].double(), float(found.error_bound.max())
        w = method.weights(q.first(max(CHECKED, min(p.n, SMALL // (p.m * p.d) + 1))))
    else:
        noise, bound = (q.x[:CHECKED].double() - q.alpha * mean) / q.sigma, None
        w = method.weights(q.first(CHECKED)) if hasattr(method, "weights") else None
    tv = None if w is None else float(0.5 * (w[:CHECKED].double() - right.weights).abs().sum(-1).max())
    pairs = {"denoiser": (mean, right.denoiser), "noise": (noise, right.noise)}
    relative = {k: float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max()) for k, (a, b) in pairs.items()}
    return {"total_variation": tv, **relative, "error_bound": bound}


def run(p: Problem, h: float, rounds: int) -> dict[str, Any]:
    """All methods at one bandwidth: first once each for memory and error, then in turns for time."""
    q = p.queries(h)
    right = exact(p, q)
    calls, shares, memory, found, total = {}, {}, {}, {}, 0.0
    for name, method in p.methods.items():
        mine = p.share(name, q)
        calls[name], shares[name] = (lambda method=method, mine=mine: method(mine)), mine.x.shape[0] / p.n
        out, seconds, memory[name] = measured(calls[name])
        found[name] = errors(p, name, q, out, right)
        total += 0.0 if getattr(method, "slow", False) else seconds
    rounds = max(rounds, min(25, int(2.0 / total)))
    slow = {name: 1 for name, method in p.methods.items() if getattr(method, "slow", False)}
    times = interleave(calls, rounds, slow, shares)
    methods = {n: _row(times, n, memory[n], p.prepared[n], found[n], p.share(n, q)) for n in p.methods}
    return {"h": h, "t": q.t, "n_eff": right.n_eff, "rounds": rounds, "methods": methods}


def _row(times: dict[str, Timing], name: str, memory: Memory, prepared: float | None, found: dict[str, float | None],
         timed: Query) -> dict[str, Any]:  # fmt: skip
    mine = times[name]
    return {
        "seconds": mine.seconds, "spread": mine.spread, "timed_queries": timed.x.shape[0],
        "to_floor": mine.over(times[FLOOR]), "to_ours": mine.over(times[FAST]),
        "peak_mib": memory.peak, "prepared_mib": prepared, **found,
    }  # fmt: skip


def bars(results: list[dict[str, Any]]) -> Iterator[Bar]:
    """What the field promises, each at its worst over bandwidths; speed against others at the sizes of SIZES alone."""
    faster = {2: (2.5, 2.0), 768: (1.5, 1.3), 3072: (1.8, 1.4)}
    for r in results:
        d, name = r["dimension"], r["name"]

        def each(method: str, key: str, rows: list[dict[str, Any]] = r["bandwidths"]) -> list[float]:
            found = [row["methods"][method].get(key) for row in rows if method in row["methods"]]
            return [math.nan if v is None else v for v in found]

        if d >= 64 and name in SIZES:
            yield Bar(f"{name}: accuracy=None over the two products", max(each(FAST, "to_floor")), 1.2)
        for rival, least in zip(("cdist", "SDPA"), faster.get(d, ()) if name in SIZES else (), strict=False):
            if ratios := each(rival, "to_ours"):
                yield Bar(f"{name}: {rival} over accuracy=None", min(ratios), least, at_least=True)
        yield Bar(f"{name}: accuracy=1e-5 over None", max(each(EXACT, "to_ours")), 2.5)
        yield Bar(f"{name}: total variation at 1e-5", max(each(EXACT, "total_variation")), 1e-5)
        pairs = [(each(method, "total_variation"), each(method, "error_bound")) for method in OURS]
        worst = max(max(0.0, v - ROUNDED) / b for tv, bound in pairs for v, b in zip(tv, bound, strict=True))
        yield Bar(f"{name}: total variation over the bound returned with it, at any accuracy", worst, 1.0)
        yield Bar(f"{name}: relative error of noise at 1e-5", max(each(EXACT, "noise")), 1e-4)
        if not any(math.isnan(v) for v in each(FAST, "peak_mib")):
            peak = max(v for method in OURS for v in each(method, "peak_mib"))
            yield Bar(f"{name}: MiB beyond the centred copy, at any accuracy", peak, 256.0)


def table(p: Problem, rows: list[dict[str, Any]]) -> Table:
    """One problem as people read it."""
    title = f"{p.name}: {p.n} queries, {p.m:,} points, d = {p.d}, data scale {p.scale:.3g}"
    out = Table(title=title, title_justify="left")
    out.add_column("method", no_wrap=True)
    heads = ("ms", "±%", "/floor", "/ours", "peak MiB", "kept MiB", "weights TV", "D", "eps")
    for head in heads:
        out.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        out.add_section()
        out.add_row(f"[bold]h = {row['h']:g}, n_eff {row['n_eff']:.3g}[/bold]")
        for name, v in row["methods"].items():
            star = "" if v["timed_queries"] == p.n else "*"
            spread = "" if v["spread"] is None else f"{50 * v['spread']:.0f}"
            numbers = [f"{v[k]:.2f}" for k in ("to_floor", "to_ours")]
            numbers += ["" if v[k] is None else f"{v[k]:.0f}" for k in ("peak_mib", "prepared_mib")]
            numbers += [_small(v.get(k)) for k in ("total_variation", "denoiser", "noise")]
            out.add_row(name + star, f"{1e3 * v['seconds']:.3g}", spread, *numbers)
    return out


def _small(v: float | None) -> str:
    return "" if v is None else "0" if v < 1e-16 else f"{v:.0e}"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    about = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    about.add_argument("--quick", action="store_true", help="small supports, two bandwidths, under a minute")
    about.add_argument("--sizes", nargs="+", metavar="QxMxD", help=f"queries x support x dimension; {' '.join(SIZES)}")
    about.add_argument("--bandwidths", nargs="+", type=float, help="in data scales; 10 1 0.1 0.01")
    about.add_argument("--rounds", type=int, help="repeats of each call (more where calls are short); 4, quick 2")
    about.add_argument("--threads", type=int, help="threads of PyTorch; as many as it takes by itself")
    about.add_argument("--without", nargs="+", default=[], metavar="METHOD", choices=list(RIVALS)[1:])
    about.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "field.json")
    options = about.parse_args(argv)
    options.sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    options.bandwidths = options.bandwidths or (QUICK_BANDWIDTHS if options.quick else BANDWIDTHS)
    options.rounds = options.rounds or (2 if options.quick else 4)
    return options


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    options, console = parse(argv), Console(width=120)
    if options.threads:
        torch.set_num_threads(options.threads)
    record: dict[str, Any] = {"machine": machine(), "quick": options.quick, "problems": [], "bars": []}
    console.print(record["machine"])
    for p in problems(options.sizes, console.print):
        prepare(p, options.without, console.print)
        rows = [run(p, h, options.rounds) for h in options.bandwidths]
        console.print(table(p, rows))
        sizes = {"name": p.name, "queries": p.n, "support": p.m, "dimension": p.d, "data_scale": p.scale}
        record["problems"].append({**sizes, "skipped": p.skipped, "bandwidths": rows})
    console.print("* timed on fewer queries and scaled up; ±% is half the interquartile range")
    found = list(bars(record["problems"]))
    record["bars"] = [vars(bar) | {"passed": bar.passed} for bar in found]
    record["load_after"] = machine()["load"]
    for bar in found:
        console.print(str(bar), style=None if bar.passed else "bold red")
    write_json(options.out, record)
    console.print(f"written: {options.out}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(torchvision|deepinv)\b")
    main()
