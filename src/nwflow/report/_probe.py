"""A probe as one HTML page: what its heads are against kernel smoothing along the run, and what layers listen to.

Time runs from t = 0, noise, to t = 1, data, where a record has it; else the axis is the step. Bands hold the middle
80 % of the heads. The page reads the record alone and computes nothing but such quantiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nwflow.probe.result import HeadResult, LayerResult, Map, ProbeResult
from nwflow.report._series import Figure, Line, axis, line_traces, spread, table
from nwflow.report._values import fixed, inert, number

__all__ = ["probe_page"]

MOST_LINES = 6  # layers that have lines of their own
MOST_CELLS = 60_000  # of all maps together
MOST_ROWS = 300  # of the table of heads
_SCALE = [[0.0, "#f4f7fb"], [0.5, "#5b8fd0"], [1.0, "#0b2f66"]]

DEFINITIONS = (
    (
        "Recorded weights",
        "softmax of the head's own logits, recomputed from its queries and keys and checked to give the "
        "model's own output.",
    ),
    (
        "Kernel smoothing (NW)",
        "weights exp(-|q - k|² / 2h²) at the head's own bandwidth h² = 1/scale, the square root of its width "
        "by default.",
    ),
    (
        "Key-norm prior",
        "masses exp(|k|² / 2h²): with them NW is the recorded attention exactly, so that the error shown "
        "proves the record.",
    ),
    (
        "Spearman",
        "rank correlation of a query's weights over the keys, mean over queries. With few keys it is coarse: "
        "read its null.",
    ),
    (
        "Null",
        "95 % quantile of the same number when keys are permuted, one permutation for all queries.",
    ),
    (
        "Nearest alone",
        "Pearson's correlation that agreement on the nearest key alone would give: only what exceeds it is "
        "likeness of kernels.",
    ),
    (
        "n_eff",
        "1 / sum of squared weights: how many keys a query uses. 1 is nearest-neighbour collapse.",
    ),
    (
        "Best bandwidth",
        "the h at which NW without prior is closest to the head in KL divergence, over the head's own.",
    ),
    (
        "Influence",
        "how far the attention output moves when a reference is left out, over the size of the output.",
    ),
)


def probe_page(result: ProbeResult) -> str:
    """The page."""
    from nwflow.report._page import page

    plots = [*_curves(result), *_maps(result)]
    layers = _by_layer(result.heads)
    return page(
        "probe.html",
        f"Probe of {result.model}",
        plots,
        r=result,
        plots_of_heads=[f.name for f in plots if f is not None and not f.name.startswith("map-")],
        plots_of_maps=[f.name for f in plots if f is not None and f.name.startswith("map-")],
        lead=_lead(result),
        terms=DEFINITIONS,
        rows=[_row(name, heads) for name, heads in layers.items()],
        heads=_head_rows(result.heads),
        listening=[(layer, _listening(layer)) for layer in result.layers if layer.references],
    )


def _lead(result: ProbeResult) -> str:
    above = result.fraction_above(0.9)
    identity = max(h.identity_error for h in result.heads)
    shown = len({(h.layer, h.part, h.head) for h in result.heads})
    return (
        f"{shown} heads in {len({h.layer for h in result.heads})} layers over {len({h.step for h in result.heads})} "
        f"steps. Rank correlation with kernel smoothing exceeds 0.9 in {100 * above:.0f} % of the records "
        f"(mean {fixed(_mean(h.spearman for h in result.heads))}, "
        f"null {fixed(_mean(h.spearman_null for h in result.heads))}); "
        f"with the key-norm prior every recorded weight is reproduced to {number(identity, 2)}."
    )


def _name(h: HeadResult | LayerResult) -> str:
    return " ".join(p for p in (h.layer, h.part and f"[{h.part}]", h.branch and f"({h.branch})") if p)


def _by_layer(heads: Iterable[HeadResult]) -> dict[str, list[HeadResult]]:
    found: dict[str, list[HeadResult]] = {}
    for h in heads:
        found.setdefault(_name(h), []).append(h)
    return found


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _row(name: str, heads: Sequence[HeadResult]) -> tuple[str, ...]:
    def mean(field: str) -> str:
        return fixed(_mean(getattr(h, field) for h in heads))

    ratio = _mean(h.best_bandwidth / h.bandwidth if h.best_bandwidth else None for h in heads)
    numbers = ("spearman", "spearman_null", "pearson", "pearson_nearest", "total_variation", "same_nearest")
    return (
        name, number(len({h.head for h in heads})), number(heads[0].n_keys), *(mean(f) for f in numbers),
        number(_mean(h.n_eff for h in heads)), number(_mean(h.n_eff_nw for h in heads)), number(ratio),
        mean("reference_mass"), number(max(h.identity_error for h in heads), 2),
        number(max((h.reproduction_error for h in heads if h.reproduction_error is not None), default=None), 2),
    )  # fmt: skip


def _head_rows(heads: Sequence[HeadResult]) -> list[tuple[str, ...]]:
    """One row a head, means over its steps."""
    groups: dict[tuple[str, int], list[HeadResult]] = {}
    for h in heads:
        groups.setdefault((_name(h), h.head), []).append(h)
    return [(f"{name}, head {i}", *_row(name, members)[2:]) for (name, i), members in list(groups.items())[:MOST_ROWS]]


def _listening(layer: LayerResult) -> list[tuple[str, str, str, str]]:
    rows = []
    size = layer.output_size or None
    for i, name in enumerate(layer.references):
        share = layer.listens[i] if i < len(layer.listens) else None
        moved = None if layer.influence is None or size is None else layer.influence[i] / size
        rows.append((name, fixed(share, 3), fixed(moved, 3), "ignored" if i in layer.ignored else ""))
    return rows


# ------------------------------------------------------------------------------------------------------------ the plots


def _curves(result: ProbeResult) -> list[Figure | None]:
    heads = result.heads
    own = _lines(heads, lambda h: h.spearman)
    null = _line("null (95 % of permutations)", heads, lambda h: h.spearman_null, 7)
    few = len({h.step for h in heads}) < 2
    return [
        _figure("spearman", "Rank correlation with kernel smoothing", [*own, null], heads, "Spearman", few),
        _figure("n-eff", "Keys in use", [
            _line("recorded", heads, lambda h: h.n_eff, 0), _line("kernel smoothing", heads, lambda h: h.n_eff_nw, 1),
        ], heads, "n_eff", few, log=True),
        _figure("total-variation", "Distance from kernel smoothing", [
            _line("without prior", heads, lambda h: h.total_variation, 0),
            _line("with the key-norm prior", heads, lambda h: h.total_variation_with_prior, 1),
            _line("at the best bandwidth", heads, lambda h: h.best_total_variation, 2),
        ], heads, "total variation", few),
        _figure("bandwidth", "Best bandwidth over the head's own", [
            _line("best / own", heads, lambda h: h.best_bandwidth / h.bandwidth if h.best_bandwidth else None, 0),
        ], heads, "ratio", few, log=True),
        _figure("mass", "Weight on references", [
            _line("mass", heads, lambda h: h.reference_mass, 0),
        ], heads, "mass", few) if any(h.reference_mass < 1 - 1e-9 for h in heads) else None,
        _figure("schedule", "Against the flow's own bandwidth in feature space", [
            _line("Spearman", heads, lambda h: h.schedule.spearman if h.schedule else None, 0),
            _line("total variation", heads, lambda h: h.schedule.total_variation if h.schedule else None, 1),
        ], heads, "value", few) if any(h.schedule for h in heads) else None,
    ]  # fmt: skip


def _place(h: HeadResult, timed: bool) -> float:
    return float(h.t) if timed and h.t is not None else float(h.step)


def _lines(heads: Sequence[HeadResult], value: Callable[[HeadResult], float | None]) -> list[Line]:
    """A line for each layer, or one for all where there are many."""
    layers = _by_layer(heads)
    if len(layers) > MOST_LINES:
        return [_line("all heads", heads, value, 0)]
    timed = all(h.t is not None for h in heads)
    return [_line(name, members, value, i, timed) for i, (name, members) in enumerate(layers.items())]


def _line(
    name: str,
    heads: Sequence[HeadResult],
    value: Callable[[HeadResult], float | None],
    style: int,
    timed: bool | None = None,
) -> Line:
    timed = all(h.t is not None for h in heads) if timed is None else timed
    places: dict[float, list[float]] = {}
    for h in heads:
        if (v := value(h)) is not None:
            places.setdefault(_place(h, timed), []).append(v)
    x = sorted(places)
    return Line(name, x, [_interval(places[p]) for p in x], style)


def _interval(values: list[float]) -> tuple[float, float, float]:
    """Mean, and the ends of the middle 80 %."""
    ordered, last = sorted(values), len(values) - 1
    return sum(values) / len(values), ordered[round(0.1 * last)], ordered[round(0.9 * last)]


def _figure(
    name: str, title: str, lines: list[Line], heads: Sequence[HeadResult], unit: str, few: bool, log: bool = False
) -> Figure | None:
    lines = [line for line in lines if line.x]
    if not lines:
        return None
    where = "← noise    t    data →" if all(h.t is not None for h in heads) else "step"
    notes = ("Mean over heads; the band holds the middle 80 % of them.", *(("One step was recorded.",) if few else ()))
    return Figure(
        name,
        title,
        f"{title} over {'time' if where != 'step' else 'steps'}, for {', '.join(line.name for line in lines)}",
        [t for line in lines for t in line_traces(line, log=log)],
        {"xaxis": axis(where), "yaxis": axis(unit, spread(lines), log=log)},
        (where.strip("← →"), *(line.name for line in lines)),
        table(lines),
        notes,
    )


def _maps(result: ProbeResult) -> list[Figure]:
    """Heat maps on the true grid, as many as fit."""
    found, cells = [], 0
    for layer in result.layers:
        for m in layer.maps:
            cells += len(m.values)
            if cells > MOST_CELLS:
                return found
            found.append(_map(layer, m, len(found)))
    return found


def _map(layer: LayerResult, m: Map, number_of: int) -> Figure:
    reference = layer.references[m.reference] if m.reference < len(layer.references) else str(m.reference)
    z = [list(m.values[i * m.columns : (i + 1) * m.columns]) for i in range(m.rows)]
    trace: dict[str, Any] = {
        "type": "heatmap", "z": z, "zmin": 0.0, "zmax": 1.0, "colorscale": _SCALE, "name": inert(reference),
        "showlegend": False, "hovertemplate": "row %{y}, column %{x}: %{z:.3f}<extra></extra>",
    }  # fmt: skip
    layout = {
        "xaxis": axis("column", constrain="domain"),
        "yaxis": axis("row", autorange="reversed", scaleanchor="x", constrain="domain"),
    }
    known = [v for v in m.values if v is not None]
    title = f"{_name(layer)}: reference {reference}"
    ends = f"from {fixed(min(known))} to {fixed(max(known))}" if known else "not recorded"
    rows = [("mean", fixed(_mean(known))), ("largest", fixed(max(known, default=None)))]
    notes = (f"Mean weight at each of {m.rows} x {m.columns} queries, over heads and steps.",)
    return Figure(f"map-{number_of}", title, f"{title}, weight {ends}", [trace], layout, ("", "weight"), rows, notes)
