"""Lines with bands as plotly traces: plain dictionaries that go to JSON.

A colour is the name of a CSS variable, ``--c0``, with an opacity after a slash where it has one; the page's script puts
in what the colour scheme says. Dashes and markers differ with the colour, so that no line is known by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nwflow.report._values import UNDEFINED, defined, inert, interval, number, plain

Point = Sequence[float | None] | None
Trace = dict[str, Any]
COLOURS = 8
_DASHES = ("solid", "dash", "dashdot", "longdash", "longdashdot", "8px 3px 2px 3px 2px 3px")
_EXTRAPOLATED = "dot"  # of no other line
_CROWDED = 64  # points from which a line has no markers
_MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "triangle-down", "cross", "star")


@dataclass(frozen=True)
class Figure:
    """One plot: its traces and layout, what it shows in words, and its numbers as a table."""

    name: str
    title: str
    summary: str
    traces: list[Trace]
    layout: dict[str, Any]
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: tuple[str, ...] = ()

    def spec(self) -> dict[str, Any]:
        """What the page's script needs to draw it."""
        return {"id": f"plot-{self.name}", "data": self.traces, "layout": self.layout}


@dataclass(frozen=True)
class Line:
    """A curve of intervals over ``x``. ``style`` numbers colour and marker, and the dash unless ``dash`` does; ``open``
    marks points that were not measured."""

    name: str
    x: Sequence[float]
    points: Sequence[Point]
    style: int = 0
    open: Sequence[bool] = field(default=())
    form: Callable[[float | None], str] = number
    dash: int | None = None


def line_traces(line: Line, log: bool = False, band: float = 0.16) -> list[Trace]:
    """The band, then the line; on a logarithmic axis what is not positive is left out.

    Where there are points that were not measured, two lines show and a third trace, of markers, answers the pointer.
    """
    traces = [_band(line, log, band)] if any(p is not None and defined(p[1:]) for p in line.points) else []
    y = [p[0] if p is not None and _drawn(p, log) else None for p in line.points]
    curve = {**_look(line), "x": list(line.x), "y": y, **_hover(line)}
    if not any(line.open):
        return [*traces, curve]
    silent = {"hoverinfo": "skip", "hovertemplate": None, "customdata": None}
    last = max((i for i, o in enumerate(line.open) if not o), default=-1)
    # the dotted part starts at the last measured point, so that the curve does not break there
    measured = {**curve, **silent, "y": [None if o else v for o, v in zip(line.open, y, strict=True)]}
    ahead = [v if o or i == last else None for i, (o, v) in enumerate(zip(line.open, y, strict=True))]
    dotted = {**curve, **silent, "mode": "lines", "y": ahead, "showlegend": False}
    dotted["line"] = {**curve["line"], "dash": _EXTRAPOLATED}
    marks = {**curve, "mode": "markers", "showlegend": False}
    symbol = curve["marker"]["symbol"]
    marks["marker"] = {**curve["marker"], "symbol": [f"{symbol}-open" if o else symbol for o in line.open]}
    return [*traces, *({k: v for k, v in t.items() if v is not None} for t in (measured, dotted, marks))]


def _look(line: Line) -> Trace:
    """Name, colour, dash and marker."""
    colour, name = f"--c{line.style % COLOURS}", inert(line.name)
    place = line.style + line.style // COLOURS if line.dash is None else line.dash
    return {
        "type": "scatter",
        "mode": "lines" if len(line.x) > _CROWDED else "lines+markers",
        "name": name,
        "legendgroup": name,
        "line": {"color": colour, "width": 2, "dash": _DASHES[place % len(_DASHES)]},
        "marker": {"color": colour, "size": 7, "symbol": _MARKERS[line.style % len(_MARKERS)]},
    }


def _hover(line: Line) -> Trace:
    """What a point says: its interval, and whether it was measured."""
    open = line.open or [False] * len(line.x)
    texts = [interval(p, line.form) + " (extrapolated)" * o for p, o in zip(line.points, open, strict=True)]
    return {"customdata": texts, "hovertemplate": "%{customdata}"}


def _drawn(point: Point, log: bool) -> bool:
    return point is not None and defined(point) and (not log or point[0] > 0)  # type: ignore[operator]


def _band(line: Line, log: bool, opacity: float) -> Trace:
    """One closed outline for each run of points that have an interval."""
    x: list[float | None] = []
    y: list[float | None] = []
    for run in _runs([_banded(p, log) for p in line.points]):
        lows = [_above(line.points[i][1], line.points[i][0], log) for i in run]  # type: ignore[index]
        highs = [line.points[i][2] for i in run]  # type: ignore[index]
        places = [line.x[i] for i in run]
        x += [*places, *reversed(places), places[0], None]
        y += [*highs, *reversed(lows), highs[0], None]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": y,
        "fill": "toself",
        "fillcolor": f"--c{line.style % COLOURS}/{opacity}",
        "line": {"width": 0, "color": f"--c{line.style % COLOURS}/0"},
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": inert(line.name),
    }


def _banded(point: Point, log: bool) -> bool:
    return point is not None and all(defined(v) for v in point) and _drawn(point, log)


def _above(low: float | None, value: float | None, log: bool) -> float:
    """The lower end, kept on a logarithmic axis."""
    assert low is not None and value is not None
    return max(low, value / 100) if log else low


def _runs(marks: Sequence[bool]) -> Iterator[list[int]]:
    run: list[int] = []
    for i, mark in enumerate(marks):
        if mark:
            run.append(i)
        elif run:
            yield run
            run = []
    if run:
        yield run


def axis(title: str, values: Iterable[float | None] = (), log: bool = False, **others: Any) -> dict[str, Any]:
    """An axis; ``title`` is ours, never from a file. A logarithmic one has its ticks where ``values`` lie."""
    scale = {"type": "log", **_ticks(values)} if log else {"type": "linear"}
    return {"title": {"text": title}, **scale, **others}


def _ticks(values: Iterable[float | None]) -> dict[str, Any]:
    """Decades, thinned where there are many, with 2 and 5 between where there are few."""
    known = [math.log10(v) for v in values if v is not None and defined(v) and v > 0]
    if not known or (span := max(known) - min(known)) < 0.25:
        return {}
    step = max(1, math.ceil(span / 6))
    digits = (1,) if span > 2 else (1, 2, 5) if span > 0.6 else (1, 1.5, 2, 3, 4, 5, 6, 8)
    decades = range(math.floor(min(known)) - step, math.ceil(max(known)) + step + 1, step)
    places = [float(f"{digit}e{decade}") for decade in decades for digit in digits]
    return {"tickmode": "array", "tickvals": places, "ticktext": [plain(v) for v in places]}


def window_shapes(log_snr: Sequence[float], window: Sequence[bool]) -> dict[str, Any]:
    """The deciding window, shaded, bounded by lines and named."""
    shapes, notes = [], []
    for run in _runs(window):
        left, right = log_snr[run[0]], log_snr[run[-1]]
        edge = {"color": "--muted", "width": 1, "dash": "dot"}
        rect = {"type": "rect", "xref": "x", "yref": "paper", "x0": left, "x1": right, "y0": 0, "y1": 1}
        shapes.append({**rect, "fillcolor": "--window", "line": {"width": 0}, "layer": "below"})
        sides = {"type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "line": edge, "layer": "below"}
        shapes += [{**sides, "x0": x, "x1": x} for x in (left, right)]
        anchor = {"x": left, "xref": "x", "y": 1, "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
        notes.append(
            {**anchor, "text": "deciding window", "showarrow": False, "font": {"size": 11, "color": "--muted"}}
        )
    return {"shapes": shapes, "annotations": notes[:1]}


def spread(lines: Iterable[Line]) -> Iterator[float | None]:
    """Every value and end of an interval, for the ticks."""
    return (v for line in lines for p in line.points if p is not None for v in p)


def marked(layout: dict[str, Any], x: float | None, text: str) -> dict[str, Any]:
    """``layout`` with a vertical line at ``x`` and its name."""
    if x is None:
        return layout
    edge = {"color": "--text", "width": 1.5, "dash": "dash"}
    shape = {"type": "line", "xref": "x", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1, "line": edge}
    anchor = {"x": x, "xref": "x", "y": 0.96, "yref": "paper", "xanchor": "left", "xshift": 5, "yanchor": "top"}
    note = {**anchor, "text": text, "showarrow": False, "font": {"size": 11, "color": "--text"}}
    shapes, notes = layout.get("shapes", []), layout.get("annotations", [])
    return {**layout, "shapes": [*shapes, shape], "annotations": [*notes, note]}


def table(lines: Sequence[Line], x_form: Callable[[float | None], str] = number) -> list[tuple[str, ...]]:
    """Rows over the places of all lines; a cell is ``value [low, high]``."""
    cells: dict[float, dict[int, str]] = {}
    for k, line in enumerate(lines):
        marks = line.open or [False] * len(line.x)
        for x, point, mark in zip(line.x, line.points, marks, strict=True):
            text = interval(point, line.form)
            cells.setdefault(x, {})[k] = f"{text} (extrapolated)" if mark and text != UNDEFINED else text
    return [(x_form(x), *(cells[x].get(k, "–") for k in range(len(lines)))) for x in sorted(cells)]
