"""Single numbers of a diagnosis with their names, what they mean, and why one is missing."""

from __future__ import annotations

from dataclasses import dataclass

from nwflow.diagnose.result import Collapse, Data, Diagnosis, Geometry, Run, Scarcity
from nwflow.report._values import UNDEFINED, bounds, defined, duration, fixed, interval, number, percent, why_undefined


@dataclass(frozen=True)
class Fact:
    """A term, its value as text, and one phrase on it; ``why`` is the reason where the value is not defined."""

    term: str
    value: str
    meaning: str = ""
    why: str = ""

    @property
    def missing(self) -> bool:
        return self.value == UNDEFINED


@dataclass(frozen=True)
class Gauge:
    """One regime: the share of the plug-in's error that its intervention removes, clipped to [0, 1] for the drawing."""

    regime: str
    title: str
    value: str
    bounds: str
    at: float | None
    low: float | None
    high: float | None
    text: str
    intervention: str
    decides: bool
    why: str


def collapse_facts(part: Collapse, diagnosis: Diagnosis) -> list[Fact]:
    nowhere = "the median n_eff stays at 2 or more along the path" if diagnosis.curves else why_undefined(diagnosis)
    no_samples = "no samples were drawn or none could be judged"
    dimensions = [
        Fact(
            f"intrinsic dimension, {name}", number(v), f"of {number(diagnosis.data.d)}", "the estimator found no answer"
        )
        for name, v in part.intrinsic_dimension.items()
    ]
    return [
        Fact("collapse at t", number(part.t), "where the median n_eff falls below 2", nowhere),
        Fact("collapse at bandwidth", number(part.bandwidth), "h = σ / α, in units of the data", nowhere),
        Fact("collapse at log-SNR", fixed(part.log_snr), "0: noise and data of one size", nowhere),
        Fact("collapsed share", interval(part.share, percent), "of the window, with n_eff below 3", "no window"),
        *dimensions,
        Fact("relative contrast", number(part.contrast), "(mean − nearest) / nearest distance", "no distances"),
        Fact("variation of distances", number(part.distance_variation), "standard deviation over mean", "no distances"),
        Fact("copies", interval(part.copies, percent), "of plug-in samples that are a reference", no_samples),
        Fact(
            "copies, held out",
            interval(part.copies_held_out, percent),
            "the same criterion on real held-out points",
            "no held-out points could be judged",
        ),
    ]


def geometry_facts(part: Geometry) -> list[Fact]:
    none = "no variance in any direction"
    return [
        Fact("participation ratio", number(part.participation_ratio), "directions that carry the variance", none),
        Fact("condition", number(part.condition), "largest over smallest non-zero variance", none),
        Fact("anisotropy", fixed(part.anisotropy), "of all points; 0 round, 1 a line", none),
        Fact("local anisotropy", fixed(part.local_anisotropy), "of neighbourhoods", "too few neighbours"),
        Fact("radial variation", number(part.radial), "of norms, relative", "the points have no radius"),
        Fact("tangential variation", number(part.tangential), "of directions, relative", "the points have no radius"),
        Fact(
            "imbalance of scales",
            number(part.scale_imbalance),
            "largest over smallest standard deviation of a column",
            "no column varies",
        ),
        Fact("constant columns", number(part.constant_columns), "no variance at all"),
    ]


def scarcity_facts(part: Scarcity) -> list[Fact]:
    unfitted = "too few sizes to fit a rate"
    reached = [
        Fact(
            f"references for skill {fixed(skill)}",
            number(m) if defined(m) else "out of reach",
            "" if defined(m) else "more references alone do not get there",
        )
        for skill, m in part.needed
    ]
    return [
        Fact("best remedy", part.remedy or "none", "whose learning curve is fitted"),
        Fact("exponent", interval(part.exponent, fixed), "how fast error − floor falls with m", unfitted),
        Fact("minimax exponent", fixed(part.minimax), "4 / (4 + d), d intrinsic", "no intrinsic dimension"),
        *reached,
    ]


def data_facts(data: Data) -> list[Fact]:
    shape = " × ".join(str(size) for size in data.event_shape) or "a number"
    classes = "none" if data.classes is None else number(len(data.classes))
    return [
        Fact("points, n", number(data.n), f"{number(data.unique)} of them unique"),
        Fact("numbers each, d", number(data.d), f"shape {shape}"),
        Fact("classes", classes, "labels were given" if data.classes else "no labels were given"),
        Fact("queries", number(data.queries), f"held-out points: {data.held_out or 'left out in turn'}"),
        Fact("references", number(data.references), "that a query sees (median)"),
        Fact("data scale, s", number(data.scale), "√(tr Cov / d)", "the points have no variance"),
        Fact("mean norm", number(data.mean_norm), "length of the mean", "no points"),
        Fact("normalised", "yes" if data.normalize else "no", "points to length 1"),
        Fact("constant columns", number(data.constant_columns), "without variance"),
        Fact("dropped", number(data.dropped), "rows left out when reading"),
    ]


def run_facts(run: Run) -> list[Fact]:
    versions = [Fact(name, version, "version") for name, version in run.versions.items()]
    return [
        Fact("seed", str(run.seed)),
        Fact("path", run.path),
        Fact("time taken", duration(run.seconds), "", "not recorded"),
        Fact("machine", run.machine),
        *versions,
    ]


def gauges(diagnosis: Diagnosis, titles: dict[str, str]) -> list[Gauge]:
    """The regimes in their fixed order, then any that is new."""
    order = [name for name in titles if name in diagnosis.regimes]
    names = [*order, *(name for name in diagnosis.regimes if name not in order)]
    return [_gauge(name, titles.get(name, name), diagnosis) for name in names]


def _gauge(name: str, title: str, diagnosis: Diagnosis) -> Gauge:
    regime, lost = diagnosis.regimes[name], diagnosis.regimes[name].skill_lost
    known = lost is not None and defined(lost)
    at, low, high = (_clipped(v) for v in lost) if known and lost else (None, None, None)
    ends = bounds(lost, percent) if known else ""
    return Gauge(
        regime=name,
        title=title,
        value=percent(lost[0]) if known and lost else UNDEFINED,
        bounds=f"95 %: {ends}" if ends else "interval not defined" if known else "",
        at=at,
        low=low,
        high=high,
        text=regime.text,
        intervention=regime.intervention,
        decides=name == diagnosis.verdict.regime,
        why="" if known else why_undefined(diagnosis),
    )


def _clipped(value: float | None) -> float | None:
    return min(1.0, max(0.0, value)) if value is not None and defined(value) else None
