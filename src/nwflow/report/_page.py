"""A diagnosis as one HTML page: templates filled, styles, data and plotly.js inlined, nothing else loaded, ever.

The page's own policy (Content-Security-Policy) forbids every request and runs the two scripts whose hashes it names, so
that a name out of a file can neither load nor run anything even where escaping failed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from nwflow.diagnose.result import Curves, Diagnosis, Gallery, Picture, Remedy
from nwflow.report import _facts, _figures, _values
from nwflow.report._definitions import DEFINITIONS, REGIMES, UNITS
from nwflow.report._series import Figure

_PNG = re.compile(r"iVBOR[A-Za-z0-9+/]*={0,2}")
_COPY = 1 / 3  # the ratio of nearest distances below which a sample is a copy


def checked(diagnosis: Any, argument: str = "diagnosis") -> Diagnosis:
    """The diagnosis with None for every number that does not exist."""
    if not isinstance(diagnosis, Diagnosis):
        raise TypeError(f"{argument}: expected a Diagnosis, got {type(diagnosis).__name__}")
    clean = Diagnosis.from_dict(diagnosis.to_dict())
    return replace(clean, curves=_placed(clean.curves)) if clean.curves else clean


def _placed(curves: Curves) -> Curves:
    """Curves without the ends of the path where the log-SNR is infinite: they have no place on its axis."""
    kept = [i for i, x in enumerate(curves.log_snr) if _values.defined(x)]

    def pick(record: Any) -> dict[str, Any]:
        values = {f.name: getattr(record, f.name) for f in fields(record)}
        return {k: tuple(v[i] for i in kept) for k, v in values.items() if isinstance(v, tuple) and k != "denoisers"}

    return replace(curves, **pick(curves), denoisers=tuple(replace(c, **pick(c)) for c in curves.denoisers))


def page(template: str, title: str, plots: Iterable[Figure | None], **values: Any) -> str:
    """The template with everything that makes it stand alone."""
    drawn = [figure for figure in plots if figure is not None]
    scripts = (_plotly(), _text("report.js"))
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    html = (
        _environment()
        .get_template(template)
        .render(
            page_title=title,
            policy=f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
            "base-uri 'none'; form-action 'none'",
            style=_text("report.css"),
            plotly=scripts[0],
            script=scripts[1],
            plots=_json([figure.spec() for figure in drawn]),
            figures={figure.name: figure for figure in drawn},
            definitions=DEFINITIONS,
            **values,
        )
    )
    return html.encode("utf-8", "backslashreplace").decode("utf-8")  # names of files may hold bytes that are no text


def report(diagnosis: Diagnosis) -> str:
    """The page of one diagnosis."""
    d, named = diagnosis, [("", diagnosis)]
    plots = all_figures(named)
    pictures = d.gallery.references if d.gallery else ()
    return page("report.html", f"Diagnosis of {d.data.source}", plots, **side(d), thumbnails=_thumbnails(pictures))


def comparison(a: Diagnosis, b: Diagnosis) -> str:
    """The page of two diagnoses side by side."""
    plots = all_figures([("A", a), ("B", b)])
    remedies = dict.fromkeys(r.name for d in (a, b) for r in ranked(d))
    sides = [{"letter": letter, **side(d)} for letter, d in (("A", a), ("B", b))]
    title = f"Comparison of {a.data.source} with {b.data.source}"
    return page("comparison.html", title, plots, sides=sides, remedies=list(remedies), pairs=_paired)


def side(d: Diagnosis) -> dict[str, Any]:
    """What the templates show of one diagnosis."""
    best = next((r for r in d.remedies if r.name == d.verdict.remedy), None)
    return {
        "d": d,
        "verdict_title": REGIMES.get(d.verdict.regime, d.verdict.regime),
        "unit": UNITS.get(d.verdict.unit, d.verdict.unit),
        "gauges": _facts.gauges(d, REGIMES),
        "best": best,
        "ranked": ranked(d),
        "scale": _scale(d.remedies),
        "why": _values.why_undefined(d),
        "facts": {
            "collapse": _facts.collapse_facts(d.collapse, d) if d.collapse else None,
            "geometry": _facts.geometry_facts(d.geometry) if d.geometry else None,
            "scarcity": _facts.scarcity_facts(d.scarcity) if d.scarcity else None,
            "data": _facts.data_facts(d.data),
            "run": _facts.run_facts(d.run),
        },
        "groups": _groups(d.gallery),
    }


def all_figures(named: _figures.Named) -> list[Figure | None]:
    """Every plot, in the order of the page."""
    return [
        _figures.skill(named),
        _figures.errors(named, "raw"),
        _figures.errors(named, "relative"),
        *(_figures.weights(named, what) for what in ("n_eff", "largest_weight", "entropy")),
        *(_figures.n_eff_at(named, which) for which in ("m", "d")),
        _figures.spectrum(named),
        _figures.learning(named),
        _figures.mmd(named),
    ]


def ranked(d: Diagnosis) -> list[Remedy]:
    """Remedies by skill, best first, those without one last."""
    return sorted(d.remedies, key=lambda r: (r.skill is None, -(r.skill or 0.0)))


def _paired(sides: Sequence[Mapping[str, Any]], part: str) -> list[tuple[str, str, str]]:
    """The facts of both sides by term."""
    both = [{f.term: f for f in s["facts"][part] or ()} for s in sides]
    terms = dict.fromkeys(term for facts in both for term in facts)

    def cell(fact: _facts.Fact | None) -> str:
        if fact is None:
            return "–"
        return f"{fact.value}: {fact.why}" if fact.missing and fact.why else fact.value

    return [(term, cell(both[0].get(term)), cell(both[1].get(term))) for term in terms]


def _scale(remedies: Sequence[Remedy]) -> Any:
    """From a skill to percent of the width of its cell; 1 is the right end, the lowest one (at least -1) the left."""
    lows = [v for r in remedies for v in (r.skill, r.skill_low) if v is not None]
    left = max(-1.0, min([-0.1, *lows]))

    def place(skill: float | None) -> float:
        return round(100 * (min(1.0, max(left, skill or 0.0)) - left) / (1 - left), 2)

    return place


def _groups(gallery: Gallery | None) -> list[tuple[str, Sequence[Picture]]]:
    if gallery is None:
        return []
    remedy = f"Samples of {gallery.remedy_name}" if gallery.remedy_name else "Samples of the best remedy"
    groups = [("Samples of the plug-in", gallery.plug_in), (remedy, gallery.remedy)]
    return [(title, pictures) for title, pictures in groups if pictures]


def _thumbnails(pictures: Sequence[Picture]) -> str:
    """One rule for each reference, so that its bytes stand in the page once however often it is shown."""
    rules = [f".ref-{i}{{background-image:url({uri})}}" for i, p in enumerate(pictures) if (uri := data_uri(p.png))]
    return "\n".join(rules)


def data_uri(png: str) -> str | None:
    """The picture as an address; None for what is not a PNG in base64."""
    return f"data:image/png;base64,{png}" if _PNG.fullmatch(png) else None


def _json(value: list[dict[str, Any]]) -> str:
    """JSON that cannot end the script element that it stands in, nor begin one."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


@cache
def _plotly() -> str:
    text = get_plotlyjs().replace("\r\n", "\n").strip()
    assert "</script" not in text.lower() and "<!--" not in text, "plotly.js would end its own script element"
    return text


def _text(name: str) -> str:
    return (files("nwflow.report") / "templates" / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("nwflow.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("number", "fixed", "percent", "interval", "bounds", "setting", "defined"):
        environment.globals[name] = getattr(_values, name)
    environment.globals.update(
        data_uri=data_uri, is_copy=lambda ratio: ratio is not None and ratio < _COPY, missing=_values.UNDEFINED
    )
    return environment
