"""The plots of a report, for one diagnosis or two laid over each other.

Every function takes ``named``: pairs of a name (empty for one diagnosis alone) and a diagnosis. It gives None where no
diagnosis has the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nwflow.diagnose.result import Curve, Curves, Diagnosis, Predicted
from nwflow.report._series import COLOURS, Figure, Line, axis, line_traces, marked, spread, table, window_shapes
from nwflow.report._values import defined, fixed, number

Named = Sequence[tuple[str, Diagnosis]]
_LOWEST_SKILL = -1.5  # what the first view of the skill plot reaches down to


def label(name: str, what: str) -> str:
    """The name of a line: of two diagnoses, whose it is."""
    return f"{name}: {what}" if name else what


def styles(diagnosis: Diagnosis) -> dict[str, int]:
    """One colour, dash and marker for each denoiser, the same in every plot."""
    names = [c.name for c in diagnosis.curves.denoisers] if diagnosis.curves else ["plug-in", "linear"]
    names += [r.name for r in diagnosis.remedies]
    return {name: i for i, name in enumerate(dict.fromkeys(names))}


def skill(named: Named) -> Figure | None:
    """Skill along the path."""
    lines = _denoisers(named, lambda c: c.skill, fixed)
    if not lines:
        return None
    values = [p[0] for line in lines for p in line.points if p is not None and defined(p)]
    lowest = min((v for v in values if v is not None), default=0.0)
    span = [max(_LOWEST_SKILL, min(lowest - 0.1, -0.2)), 1.08]
    notes = ("0 is the linear denoiser, 1 is no error.", *_windows(named))
    if lowest < span[0]:
        notes += (f"Values down to {fixed(lowest)} lie below the first view; the table below has them.",)
    layout = {"xaxis": _log_snr(), "yaxis": axis("skill", range=span, zeroline=True), **_window(named)}
    return _along("skill", "Skill along the path", lines, layout, notes)


def errors(named: Named, unit: str) -> Figure | None:
    """Held-out error along the path in one unit."""
    lines = _denoisers(named, lambda c: c.raw if unit == "raw" else c.relative)
    if not lines:
        return None
    said = (
        "Squared error per coordinate over the data scale squared; 1 is the error of the mean."
        if unit == "raw"
        else "Mean over principal directions of the error over that direction's own variance."
    )
    layout = {"xaxis": _log_snr(), "yaxis": axis(f"{unit} error", spread(lines), log=True), **_window(named)}
    return _along(f"error-{unit}", f"Held-out error, {unit}", lines, layout, (said, *_not_drawn(lines)))


def weights(named: Named, what: str) -> Figure | None:
    """n_eff, largest weight or entropy of the weights along the path."""
    title, log, note = {
        "n_eff": ("Effective references, n_eff", True, "1: a copy of the nearest reference."),
        "largest_weight": ("Largest weight", False, "1: one reference has it all."),
        "entropy": ("Entropy of the weights (nats)", False, "0: one reference has it all."),
    }[what]
    lines = [
        Line(label(name, "median"), d.curves.log_snr, getattr(d.curves, what), 2 + k, dash=k)
        for k, (name, d) in enumerate(named)
        if d.curves
    ]
    if not lines:
        return None
    layout = {
        "xaxis": _log_snr(),
        "yaxis": axis(title, spread(lines), log=log, rangemode="tozero"),
        **_window(named),
    }
    if len(named) == 1 and what == "n_eff" and (collapse := named[0][1].collapse):
        layout = marked(layout, collapse.log_snr, "median n_eff below 2")
    notes = (note, "The band holds the middle 80 % of the queries.", *(_not_drawn(lines) if log else ()))
    return _along(what.replace("_", "-"), title, lines, layout, notes)


def n_eff_at(named: Named, which: str) -> Figure | None:
    """n_eff at other numbers of references (``m``) or dimensions (``d``)."""
    lines = []
    for k, (name, d) in enumerate(named):
        if d.collapse and (points := getattr(d.collapse, f"n_eff_by_{which}")):
            lines.append(_predicted(label(name, "n_eff"), points, 2 + k, k))
    if not lines:
        return None
    what = "references, m" if which == "m" else "dimensions, d"
    layout = _log_log(what, "n_eff", lines)
    places = {number(d.collapse.n_eff_log_snr) for _, d in named if d.collapse and defined(d.collapse.n_eff_log_snr)}
    notes = (f"Read at log-SNR {' and '.join(sorted(places))}.",) if places else ()
    return _sizes(f"n-eff-by-{which}", f"n_eff over {what}", lines, layout, notes)


def spectrum(named: Named) -> Figure | None:
    """Variances along principal directions."""
    lines = []
    for k, (name, d) in enumerate(named):
        if d.geometry and d.geometry.spectrum:
            places = [float(i + 1) for i in range(len(d.geometry.spectrum))]
            points = [(v, None, None) for v in d.geometry.spectrum]
            lines.append(Line(label(name, "share of the variance"), places, points, 2 + k, dash=k))
    if not lines:
        return None
    places = [x for line in lines for x in line.x]
    layout = {
        "xaxis": axis(
            "principal direction", places, log=max(places) > 32, unifiedhovertitle={"text": "direction %{x}"}
        ),
        "yaxis": axis("share of the variance", spread(lines), log=True),
    }
    return Figure(
        "spectrum",
        "Spectrum",
        _summary("variance along each principal direction over the sum, largest first, logarithmic", lines),
        [t for line in lines for t in line_traces(line, log=True)],
        layout,
        ("direction", *(line.name for line in lines)),
        table(lines),
        ("Variances along principal directions over their sum, largest first.", *_not_drawn(lines)),
    )


def learning(named: Named) -> Figure | None:
    """Errors of the plug-in and of the best remedy over the number of references."""
    lines = []
    for k, (name, d) in enumerate(named):
        if d.scarcity is None:
            continue
        best = d.scarcity.remedy or "best remedy"
        palette = styles(d)
        if d.scarcity.plug_in:
            lines.append(_predicted(label(name, "plug-in"), d.scarcity.plug_in, 4 * k + palette.get("plug-in", 0)))
        if d.scarcity.best and not (best == "plug-in" and d.scarcity.plug_in):
            lines.append(_predicted(label(name, best), d.scarcity.best, 4 * k + palette.get(best, 2)))
    if not lines:
        return None
    layout = _log_log("references, m", "error / linear denoiser's", lines)
    notes = ("1 is the error of the linear denoiser at full size.",)
    return _sizes("learning", "Learning curves: error", lines, layout, notes)


def mmd(named: Named) -> Figure | None:
    """MMD^2 of plug-in samples over the number of references."""
    lines = [
        _predicted(label(name, "MMD²"), d.scarcity.mmd2, 5 + 2 * k, k)
        for k, (name, d) in enumerate(named)
        if d.scarcity and d.scarcity.mmd2
    ]
    if not lines:
        return None
    layout = _log_log("references, m", "MMD²", lines)
    notes = ("Plug-in samples against held-out points; 0 where the two agree.",)
    return _sizes("mmd", "Learning curve: MMD²", lines, layout, notes)


def _denoisers(
    named: Named, part: Callable[[Curve], Sequence], form: Callable[[float | None], str] = number
) -> list[Line]:
    """A line for each denoiser; of two diagnoses, the plug-in and the remedy that the verdict names."""
    lines = []
    for k, (name, d) in enumerate(named):
        if d.curves is None:
            continue
        palette = styles(d)
        for curve in d.curves.denoisers:
            if len(named) > 1 and curve.name not in ("plug-in", d.verdict.remedy):
                continue
            style = palette[curve.name] if len(named) == 1 else 4 * k + 2 * (curve.name != "plug-in")
            lines.append(Line(label(name, curve.name), d.curves.log_snr, part(curve), style, form=form))
    return lines


def _window(named: Named) -> dict:
    """The window of one diagnosis; two are named in their own tables, not shaded over each other."""
    curves: Curves | None = named[0][1].curves
    return window_shapes(curves.log_snr, curves.window) if len(named) == 1 and curves else {}


def _windows(named: Named) -> tuple[str, ...]:
    """Where the deciding window lies, in words."""
    told = []
    for name, d in named:
        if d.curves and (inside := [x for x, w in zip(d.curves.log_snr, d.curves.window, strict=True) if w]):
            whose = f" of {name}" if name else ""
            told.append(f"Deciding window{whose}: log-SNR {fixed(min(inside), 1)} to {fixed(max(inside), 1)}.")
    return tuple(told)


def _log_snr() -> dict:
    return axis("← noise    log-SNR    data →", unifiedhovertitle={"text": "log-SNR %{x:.2f}"})


def _log_log(x: str, y: str, lines: Sequence[Line]) -> dict:
    sizes = [v for line in lines for v in line.x]
    told = {"text": f"{x.rpartition(', ')[2]} = %{{x:,}}"}
    return {"xaxis": axis(x, sizes, log=True, unifiedhovertitle=told), "yaxis": axis(y, spread(lines), log=True)}


def _predicted(name: str, points: Sequence[Predicted], style: int, dash: int | None = None) -> Line:
    points = sorted((p for p in points if defined(p.at)), key=lambda p: (p.at, p.extrapolated))
    values = [(p.value, p.low, p.high) for p in points]
    return Line(name, [p.at for p in points], values, style, [p.extrapolated for p in points], dash=dash)


def _along(name: str, title: str, lines: list[Line], layout: dict, notes: tuple[str, ...]) -> Figure:
    log = layout["yaxis"]["type"] == "log"
    band = 0.18 if len(lines) <= 4 else 0.09
    return Figure(
        name,
        title,
        _summary(f"{title.lower()} over log-SNR", lines),
        [t for line in lines for t in line_traces(line, log, band)],
        layout,
        ("log-SNR", *(line.name for line in lines)),
        table(lines, fixed),
        notes,
    )


def _sizes(name: str, title: str, lines: list[Line], layout: dict, notes: tuple[str, ...] = ()) -> Figure:
    if any(any(line.open) for line in lines):
        notes = (*notes, "Dotted with open markers: extrapolated, not measured.")
    return Figure(
        name,
        title,
        _summary(f"{title}, both axes logarithmic", lines),
        [t for line in lines for t in line_traces(line, log=True)],
        layout,
        (layout["xaxis"]["title"]["text"], *(line.name for line in lines)),
        table(lines),
        (*notes, *_not_drawn(lines)),
    )


def _summary(what: str, lines: Sequence[Line]) -> str:
    """The plot in words, with where each line starts and ends."""
    ends = []
    for line in lines[:COLOURS]:
        known = [(x, p[0]) for x, p in zip(line.x, line.points, strict=True) if p is not None and defined(p)]
        if known:
            (first, start), (last, end) = known[0], known[-1]
            ends.append(f"{line.name}: {number(start)} at {number(first)}, {number(end)} at {number(last)}")
    return f"Plot of {what}. " + "; ".join(ends) + (". The numbers are in the table below." if ends else ".")


def _not_drawn(lines: Sequence[Line]) -> tuple[str, ...]:
    count = sum(1 for line in lines for p in line.points if p is not None and defined(p) and not p[0] > 0)  # type: ignore[operator]
    one = "1 value at or below 0 is" if count == 1 else f"{count} values at or below 0 are"
    return (f"{one} not on the logarithmic axis; the table has all.",) if count else ()
