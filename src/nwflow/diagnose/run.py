r""":func:`diagnose`: from a support to a verdict, with all that was measured on the way (t = 0 noise, t = 1 data)."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version

import torch
from torch import Tensor

from nwflow.diagnose import collapse as facts
from nwflow.diagnose.choose import TEXTS, classes_of, equal_ids, rows_of
from nwflow.diagnose.geometry import geometry
from nwflow.diagnose.heldout import Part, Problem, make_problem
from nwflow.diagnose.measure import Measured, measure
from nwflow.diagnose.result import FORMAT, ClassRow, Collapse, Curve, Curves, Data, Diagnosis, Geometry, Interval, Run
from nwflow.diagnose.samples import copies_and_gallery, is_image
from nwflow.diagnose.scarcity import learning_curve, scarcity
from nwflow.diagnose.verdict import Gauges, decide, interval, regimes, remedy_rows
from nwflow.paths import CondOT, Path
from nwflow.support import Support

UNITS = ("raw", "relative")
Progress = Callable[[str, float], None]


@torch.no_grad()
def diagnose(
    support: Support,
    *,
    path: Path | None = None,
    held_out: Support | Tensor | None = None,
    pool: Support | None = None,
    unit: str | None = None,
    image: bool | None = None,
    seed: int = 0,
    queries: int = 400,
    references: int = 20_000,
    folds: int = 5,
    names: Sequence[str] | None = None,
    normalize: bool = False,
    progress: Progress | None = None,
    source: str = "",
    command: str = "",
    held_out_name: str | None = None,
) -> Diagnosis:
    """Measure whether exact conditioning on ``support`` works, on points that it has not seen.

    Args:
        support: references ``(n, *event)``. With labels every class is a set of references of its own.
        path: a Gaussian path; CondOT without floor when None. held_out: points (labelled where the support is) that
            are queries; without them the references leave themselves out in turn.
        pool: labelled support of other classes, beside one class. unit: ``"raw"``, ``"relative"`` or None (images raw,
            everything else relative). image: whether events are images (None: by their shape).
        seed: of queries, noise and resampling. queries, references: at most so many are used; folds: of what is fitted.
        names: of the columns. progress: called with a stage and the share of it that is done.
        source, command, held_out_name, normalize: are written down.

    Raises:
        ValueError, TypeError: what does not fit, with what was expected.

    Example:
        >>> points = torch.randn(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> diagnose(Support(points), queries=20).verdict.unit
        'relative'
    """
    if unit not in (None, *UNITS):
        raise ValueError(f'unit: expected "raw", "relative" or None, got {unit!r}')
    if queries < 1 or references < 2 or folds < 2:
        raise ValueError(
            f"queries, references, folds: expected at least 1, 2 and 2, got {queries}, {references} and {folds}"
        )
    started, say = time.monotonic(), progress or (lambda _stage, _share: None)
    path = CondOT(sigma_min=0.0) if path is None else path
    rows_of(support)  # one set
    support, notes = _capped(support, references, seed)
    picture = is_image(support) if image is None else image
    which = UNITS.index(unit or ("raw" if picture else "relative"))
    work = _Work.of(support, held_out, pool)
    run = _run(command, seed, path)
    data = _data(support, work, picture, normalize, source, held_out_name, notes)
    x = work.points[: work.n]
    say("geometry", 0.0)
    shape = geometry(x, names, seed)
    if work.smallest < (3 if pool is None else 2):
        return _too_few(data, run, shape, which, started)
    problem = make_problem(
        work.points, work.equal, work.parts, path, seed,
        held_out=held_out is not None, queries=queries, folds=folds,
    )  # fmt: skip
    pools = _pools(problem, work, pool)
    measured = measure(problem, pools, say, images=support.event_shape if picture else None)
    gauges = Gauges.of(problem, measured, which)
    best = gauges.best()
    dimension = facts.intrinsic_dimension(x, seed)
    found = [v for v in dimension.values() if v is not None]
    middle = float(torch.tensor(found).median()) if found else None
    chosen = next((r for r in _learnable(gauges) if not r.startswith("patches")), "linear")
    curves = learning_curve(problem, pools, measured, chosen, which, say)
    base = measured.errors["linear"][which][problem.window[which]].mean(0)
    say("samples", 0.0)
    drawn = copies_and_gallery(
        support, work.queries_left(problem), path, best, pool, picture, seed, say, left_out=held_out is None
    )
    record, lost = scarcity(curves, base, chosen, middle, seed, drawn.mmd2)
    found_regimes = regimes(gauges, lost, few_points=False)
    gain = None if best is None else float((1 - (1 - gauges.skill(best)) / (1 - gauges.skill("plug-in")))[0])
    data = _measured_data(data, problem)
    say("done", 1.0)
    return Diagnosis(
        FORMAT,
        decide(found_regimes, best, gain, UNITS[which], few_points=False),
        found_regimes,
        remedy_rows(gauges, measured, TEXTS),
        _curves(problem, measured, which),
        data,
        _finished(run, started),
        _collapse(problem, path, measured, gauges, x, dimension, drawn.copies, drawn.copies_held_out, seed),
        shape,
        record,
        _class_rows(problem, measured, gauges, which) if work.labelled else (),
        drawn.gallery,
    )


class _Work:
    """Points of references and of queries as one matrix, and who may see whom."""

    def __init__(self, points: Tensor, n: int, parts: list[Part], labelled: bool) -> None:
        self.points, self.n, self.parts, self.labelled = points, n, parts, labelled
        self.equal = equal_ids(points)

    @property
    def smallest(self) -> int:
        """Distinct references of the largest part: with fewer than three nothing can be left out and fitted."""
        return max(int(self.equal[p.refs].unique().numel()) for p in self.parts)

    @classmethod
    def of(cls, support: Support, held_out: Support | Tensor | None, pool: Support | None) -> _Work:
        x = rows_of(support)
        labels = None if support.labels is None else support.labels[support.valid]
        if labels is not None and labels.unique().numel() < 2:
            labels = None
        if pool is not None and pool.event_shape != support.event_shape:
            raise ValueError(
                f"pool: expected events {tuple(support.event_shape)} as the support has, got {tuple(pool.event_shape)}"
            )
        rows, queries = torch.arange(len(x)), None
        if held_out is not None:
            held = held_out if isinstance(held_out, Support) else Support(held_out)
            if held.event_shape != support.event_shape:
                raise ValueError(
                    f"held_out: expected events {tuple(support.event_shape)} as the support has, "
                    f"got {tuple(held.event_shape)}"
                )
            queries = rows_of(held)
            x = torch.cat([x, queries])
        if labels is None:
            last = rows if queries is None else torch.arange(len(rows), len(x))
            return cls(x, len(rows), [Part("all", rows, last)], False)
        parts = []
        names = support.label_names
        theirs = None
        if held_out is not None:
            if not isinstance(held_out, Support) or held_out.labels is None:
                raise ValueError("held_out: expected labels, as the support has, got none")
            theirs = _labels_as(held_out, support)
            if not bool(torch.isin(theirs, labels).any()):
                raise ValueError("held_out: expected labels that the support has, got none of them")
        for code in labels.unique().tolist():
            mine = (labels == code).nonzero().squeeze(-1)
            asked = mine if theirs is None else len(rows) + (theirs == code).nonzero().squeeze(-1)
            parts.append(Part(str(names[code]) if names is not None else str(code), mine, asked))
        return cls(x, len(rows), parts, True)

    def queries_left(self, problem: Problem) -> Tensor:
        """Queries of the largest set, ``(k, d)``; the first of equals, as samples are drawn from."""
        largest = max(range(len(self.parts)), key=lambda i: len(self.parts[i].refs))
        rows = [f.queries for f in problem.folds if f.part == largest]
        return self.points[torch.cat(rows)] if rows else self.points[:0]


def _labels_as(held: Support, support: Support) -> Tensor:
    """Codes of the held-out points in the support's numbering; -1 for labels that it lacks."""
    assert held.labels is not None
    codes = held.labels[held.valid]
    if held.label_names is None or support.label_names is None:
        return codes
    known = {str(v): i for i, v in enumerate(support.label_names)}
    table = torch.tensor([known.get(str(v), -1) for v in held.label_names])
    return table[codes]


def _capped(support: Support, most: int, seed: int) -> tuple[Support, list[str]]:
    """At most ``most`` references, by chance."""
    used = support.valid.nonzero().squeeze(-1)
    if len(used) <= most:
        return support, []
    keep = used[torch.randperm(len(used), generator=torch.Generator().manual_seed(seed))[:most].sort().values]
    return support.select(keep), [f"measured on {most:,} of {len(used):,} references, drawn at random"]


def _pools(problem: Problem, work: _Work, pool: Support | None) -> dict[int, list[Tensor]] | None:
    """By fold, the rows of every class that may be fitted; the class at stake stands at its own place."""
    other = [] if pool is None else classes_of(pool)
    if not work.labelled and not other:
        return None
    out = {}
    for number in {f.number for f in problem.folds}:
        left = torch.cat([f.queries for f in problem.folds if f.number == number])
        gone = torch.isin(work.equal, work.equal[left])
        out[number] = [work.points[p.refs[~gone[p.refs]]] for p in work.parts] + other
    return out if max(len(c) for v in out.values() for c in v) > 1 else None


def _learnable(g: Gauges) -> list[str]:
    """Remedies on the plain path, most skilful first."""
    names = [k for k in g.remedies() if k in g.same_path()]
    return sorted(names, key=lambda k: -float(g.skill(k)[0]))


def _curves(problem: Problem, measured: Measured, unit: int) -> Curves:
    grid = problem.grid
    bands = [Gauges.of(problem, measured, u) for u in (0, 1)]
    order = ["plug-in", "linear", *(k for k in measured.errors if k not in ("plug-in", "linear"))]
    rows = []
    for name in order:
        if name.endswith(" linear"):
            continue
        both = [[interval(v) or (0.0, 0.0, 0.0) for v in b.mean[name].mT] for b in bands]
        skill = [interval(v) for v in (1.0 - bands[unit].mean[name] / bands[unit].base(name)).mT]
        rows.append(Curve(name, tuple(both[0]), tuple(both[1]), tuple(skill)))
    spread = [_spread(v) for v in (measured.n_eff, measured.largest, measured.entropy)]
    times = (grid.log_snr, grid.t, grid.bandwidth)
    window = tuple(bool(v) for v in problem.window[unit])
    log_snr, t, h = (tuple(v.tolist()) for v in times)
    return Curves(log_snr, t, h, window, spread[0], spread[1], spread[2], tuple(rows))


def _spread(values: Tensor) -> tuple[Interval, ...]:
    q = torch.nanquantile(values, torch.tensor([0.5, 0.1, 0.9], dtype=values.dtype), dim=1)
    return tuple((float(a), float(b), float(c)) for a, b, c in q.mT)


def _collapse(problem: Problem, path: Path, measured: Measured, g: Gauges, x: Tensor,
              dimension: dict[str, float | None], copies: Interval | None, held_out: Interval | None,
              seed: int) -> Collapse:  # fmt: skip
    grid = problem.grid
    at = facts.crossing(grid.log_snr.tolist(), measured.n_eff.nanmedian(1).values.tolist(), 2.0)
    h = None if at is None else problem.units.scale * math.exp(-0.5 * at)
    t = None if h is None else float(path.time_at(h))
    contrast, variation = facts.concentration(x, seed)
    share = None
    if bool(g.window.any()):
        share = interval((g.n_eff < g.few)[:, g.window].double().mean(-1))
    middle = float(grid.log_snr[g.window].mean()) if bool(g.window.any()) else None
    by_m = () if middle is None else facts.n_eff_by_m(x, middle, seed).values
    by_d = () if middle is None else facts.n_eff_by_d(x, middle, seed).values
    return Collapse(
        t, h, at, share, dimension, contrast, variation, middle, by_m, by_d, copies, held_out
    )  # fmt: skip


def _class_rows(problem: Problem, measured: Measured, g: Gauges, unit: int) -> tuple[ClassRow, ...]:
    """Each class's errors over the window, and its own best remedy."""
    window = problem.window[unit]
    out = []
    candidates = _learnable(g)
    for i, part in enumerate(problem.parts):
        at = [f.at for f in problem.folds if f.part == i]
        sizes = len(part.refs), int(problem.equal[part.refs].unique().numel())
        if not at or not bool(window.any()):
            out.append(ClassRow(part.name, *sizes, None, None, None, None, None))
            continue
        rows = torch.cat(at)

        def mean(name: str, rows: Tensor = rows) -> float | None:
            value = float(measured.errors[name][unit][window][:, rows].nanmean()) if name in measured.errors else None
            return None if value is None or value != value else value

        errors = {k: v for k in candidates if (v := mean(k)) is not None}
        best = min(errors, key=errors.__getitem__) if errors else None
        n_eff = float(measured.n_eff[window][:, rows].nanmean())
        out.append(
            ClassRow(
                part.name, *sizes, None if n_eff != n_eff else n_eff, mean("plug-in"), mean("linear"),
                None if best is None else errors[best], best,
            )
        )  # fmt: skip
    return tuple(out)


def _data(support: Support, work: _Work, image: bool, normalize: bool, source: str, held_out: str | None,
          notes: list[str]) -> Data:  # fmt: skip
    x = work.points[: work.n]
    sd = x - x.mean(0)
    constant = int((x == x[:1]).all(0).sum())
    unique = int(work.equal[: work.n].unique().numel())
    if missing := facts.missing_estimators():
        notes = [*notes, missing]
    if work.n - unique:
        notes = [*notes, f"{work.n - unique:,} references equal another one: a query never sees its equals"]
    if bool((support.weights[support.valid] != support.weights[support.valid][0]).any()):
        notes = [*notes, "prior weights are not used: every reference counts alike"]
    classes = tuple((p.name, len(p.refs)) for p in work.parts) if work.labelled else None
    return Data(
        source, work.n, x.shape[1], tuple(support.event_shape), unique, classes, constant, support.n_dropped, 0, 0,
        held_out, image, float(sd.square().mean().sqrt()), float(x.norm(dim=-1).mean()), normalize,
        (*support.notes, *notes),
    )  # fmt: skip


def _measured_data(data: Data, problem: Problem) -> Data:
    sizes = torch.tensor([len(f.refs) for f in problem.folds], dtype=torch.float64)
    return replace(data, queries=problem.n_queries, references=int(sizes.median()) if len(sizes) else 0)


def _run(command: str, seed: int, path: Path) -> Run:
    versions = {k: version(k) for k in ("nwflow", "torch", "numpy", "scikit-learn")} | {
        "python": platform.python_version()
    }
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return Run(command, seed, repr(path), versions, 0.0, machine)


def _finished(run: Run, started: float) -> Run:
    return replace(run, seconds=round(time.monotonic() - started, 2))


def _too_few(data: Data, run: Run, shape: Geometry, unit: int, started: float) -> Diagnosis:
    found = regimes(None, None, few_points=True)
    verdict = decide(found, None, None, UNITS[unit], few_points=True)
    return Diagnosis(FORMAT, verdict, found, (), None, data, _finished(run, started), None, shape, None, ())
