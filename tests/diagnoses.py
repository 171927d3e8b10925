"""Diagnoses by hand: a complete one, one in which nothing could be measured, and one with hostile names."""

import base64
import dataclasses
import io
import math

from PIL import Image

from nwflow.diagnose.result import (
    FORMAT,
    ClassRow,
    Collapse,
    Curve,
    Curves,
    Data,
    Diagnosis,
    Gallery,
    Geometry,
    Picture,
    Predicted,
    Regime,
    Remedy,
    Run,
    Scarcity,
    Verdict,
)

HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    '"><img src=x onerror="window.hacked = 2">',
    "<b>bold</b><a href='javascript:window.hacked=3'>link</a>",
    "<!--<script>",
    "{{ 7 * 7 }}{% raw %}%{x}${y} &lt;i&gt;",
    "' onmouseover='window.hacked=4",
)


def png(shade: int, size: int = 8) -> str:
    """A grey square as base64."""
    buffer = io.BytesIO()
    Image.new("L", (size, size), shade).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def curve(name: str, factor: float, log_snr: tuple[float, ...]) -> Curve:
    """Errors that fall with the log-SNR, ``factor`` times those of the linear denoiser."""
    errors = [factor / (1 + math.exp(0.5 * x)) for x in log_snr]
    bands = tuple((e, 0.9 * e, 1.1 * e) for e in errors)
    skill = tuple((1 - factor, 0.9 - factor, 1.1 - factor) for _ in log_snr)
    return Curve(name, bands, tuple((2 * v, 2 * low, 2 * high) for v, low, high in bands), (*skill[:-1], None))


def curves(names: tuple[str, ...]) -> Curves:
    log_snr = tuple(float(x) for x in range(-6, 7))
    n_eff = [1 + 50 / (1 + math.exp(2 * x)) for x in log_snr]
    return Curves(
        log_snr=log_snr,
        t=tuple(1 / (1 + math.exp(-x / 2)) for x in log_snr),
        bandwidth=tuple(math.exp(-x / 2) for x in log_snr),
        window=tuple(x < 3 for x in log_snr),
        n_eff=tuple((v, max(1.0, v / 2), 2 * v) for v in n_eff),
        largest_weight=tuple((1 / v, 0.5 / v, min(1.0, 2 / v)) for v in n_eff),
        entropy=tuple((math.log(v), 0.0, math.log(2 * v)) for v in n_eff),
        denoisers=tuple(curve(name, 1.8 if k == 0 else 1 - 0.08 * (k - 1), log_snr) for k, name in enumerate(names)),
    )


def sizes(start: float, power: float) -> tuple[Predicted, ...]:
    """Four measured sizes and two extrapolated ones."""
    at = [10.0 * 2**k for k in range(6)]
    values = [start * m**power for m in at]
    return tuple(Predicted(m, v, 0.8 * v, 1.2 * v, k > 3) for k, (m, v) in enumerate(zip(at, values)))


def gallery() -> Gallery:
    references = tuple(Picture(png(40 * k), f"reference {k}") for k in range(4))
    copy = Picture(png(0), "sample a", ((0, 17, 0.97), (-1, 23, 0.02)), 0.1)
    blend = Picture(png(60), "sample b", ((1, 4, 0.5), (2, 9, 0.4)), 0.8)
    return Gallery(references, (copy,), (blend, Picture(png(9), "sample c")), "smoothing")


def complete(classes: int = 3) -> Diagnosis:
    """Everything there is."""
    names = ("plug-in", "linear", "smoothing", "metric")
    remedies = (
        Remedy("plug-in", -0.8, -0.9, -0.7, (1.0, 1.0, 1.0), {}, "The references as they are."),
        Remedy("metric", 0.05, -0.01, 0.1, (0.6, 0.5, 0.7), {"shrinkage": 0.25}, "Other distances.", own_path=True),
        Remedy("smoothing", 0.42, 0.35, 0.49, (0.31, 0.27, 0.36), {"h0": 0.3, "rank": 8}, "Gaussians for points."),
        Remedy("pooling", None, None, None, None, {}, "No pool was given."),
    )
    return Diagnosis(
        format=FORMAT,
        verdict=Verdict("collapse", "The weights collapse early. Smoothing brings most back.", "smoothing", "raw"),
        regimes={
            "collapse": Regime((0.62, 0.55, 0.69), "points become Gaussians", "Copies from half of the path on."),
            "geometry": Regime((0.21, 0.15, 0.27), "distances in the data's metric", "Some directions are wide."),
            "scarcity": Regime((-0.03, -0.1, 0.04), "twice the references", "More would not help."),
        },
        remedies=remedies,
        curves=curves(names),
        data=Data(
            source="photos of fish",
            n=120,
            d=16,
            event_shape=(4, 4),
            unique=118,
            classes=tuple((f"class {k}", 40) for k in range(classes)) or None,
            constant_columns=1,
            dropped=2,
            queries=60,
            references=119,
            held_out=None,
            image=True,
            scale=0.37,
            mean_norm=2.5,
            normalize=False,
            notes=("One column is constant.",),
        ),
        run=Run("nwflow diagnose photos --seed 7", 7, "CondOT(sigma_min=0.01)", {"torch": "2.13.0"}, 75.0, "2 cores"),
        collapse=Collapse(
            t=0.4,
            bandwidth=0.9,
            log_snr=1.5,
            share=(0.3, 0.25, 0.35),
            intrinsic_dimension={"TwoNN": 6.5, "correlation": None},
            contrast=0.8,
            distance_variation=0.2,
            n_eff_log_snr=0.0,
            n_eff_by_m=sizes(1.0, 0.3),
            n_eff_by_d=sizes(90.0, -0.4),
            copies=(0.7, 0.6, 0.8),
            copies_held_out=(0.0, 0.0, 0.03),
        ),
        geometry=Geometry(
            spectrum=(0.5, 0.3, 0.15, 0.05, 0.0),
            participation_ratio=2.74,
            condition=10.0,
            anisotropy=0.6,
            local_anisotropy=0.7,
            radial=0.1,
            tangential=0.9,
            scale_imbalance=12.0,
            constant_columns=1,
            columns=(("width", 3.2), ("height", 0.0)),
        ),
        scarcity=Scarcity(
            plug_in=sizes(3.0, -0.2),
            best=sizes(2.0, -0.5),
            mmd2=(*sizes(0.1, -0.5)[:4], Predicted(160.0, -0.001, -0.002, 0.001, False)),
            remedy="smoothing",
            exponent=(0.5, 0.4, 0.6),
            minimax=0.38,
            needed=((0.3, 480.0), (0.5, None)),
        ),
        classes=tuple(ClassRow(f"class {k}", 40, 39, 2.5, 1.7, 1.0, 0.6, "smoothing") for k in range(classes)),
        gallery=gallery(),
    )


def minimal() -> Diagnosis:
    """One point: nothing can be held out, so nothing is measured."""
    data = dataclasses.replace(
        complete().data, n=1, unique=1, queries=0, references=0, classes=None, image=False, notes=(), scale=0.0
    )
    return Diagnosis(
        format=FORMAT,
        verdict=Verdict("scarcity", "There is one point. Nothing can be held out.", None, "raw"),
        regimes={name: Regime(None, "none", "Not measured.") for name in ("collapse", "geometry", "scarcity")},
        remedies=(),
        curves=None,
        data=data,
        run=Run("nwflow diagnose one.npy", 0, "CondOT()", {}, 0.1, "one core"),
        collapse=None,
        geometry=None,
        scarcity=None,
        classes=(),
    )


def empty_parts() -> Diagnosis:
    """Every part is there, and every number in it that may be None is."""
    one = complete()
    return dataclasses.replace(
        one,
        verdict=dataclasses.replace(one.verdict, remedy=None),
        regimes=minimal().regimes,
        remedies=(Remedy("plug-in", None, None, None, None, {}, "Not measured."),),
        curves=None,
        collapse=Collapse(None, None, None, None, {"TwoNN": None}, None, None, None, (), (), None, None),
        geometry=Geometry((), None, None, None, None, None, None, None, 0, ()),
        scarcity=Scarcity((), (), (), None, None, None, ((0.5, None),)),
        classes=(ClassRow("lonely", 1, 1, None, None, None, None, None),),
        gallery=Gallery((), (Picture("no base64", "broken"),), (), None),
    )


def hostile() -> Diagnosis:
    """Names out of files that try to be markup, script or template."""
    script, image, bold, comment, _, quote = HOSTILE
    one = complete()
    names = ("plug-in", "linear", *HOSTILE)
    remedies = tuple(dataclasses.replace(one.remedies[2], name=name, text=name) for name in HOSTILE)
    odd = dataclasses.replace(one.remedies[2], settings={script: image, bold: [quote]})
    return dataclasses.replace(
        one,
        verdict=Verdict(script, quote, bold, image),
        regimes={**one.regimes, "collapse": Regime((0.5, 0.4, 0.6), script, image), comment: Regime(None, bold, quote)},
        remedies=(*one.remedies, *remedies, odd),
        curves=curves(names),
        data=dataclasses.replace(
            one.data, source=script + "\udcff", notes=HOSTILE, held_out=image, classes=tuple((h, 2) for h in HOSTILE)
        ),
        run=dataclasses.replace(one.run, command=script, machine=image, versions={bold: comment}, path=quote),
        collapse=dataclasses.replace(one.collapse, intrinsic_dimension={script: 2.0, image: None}),
        geometry=dataclasses.replace(one.geometry, columns=tuple((name, 1.0) for name in HOSTILE)),
        scarcity=dataclasses.replace(one.scarcity, remedy=bold),
        classes=tuple(ClassRow(name, 2, 2, None, 1.0, 1.0, 1.0, name) for name in HOSTILE),
        gallery=Gallery(
            (Picture(png(3), script), Picture('"><script>window.hacked = 5</script>', bold)),
            (Picture("iVBOR);} body{background:url(http://x.invalid/)", image, ((0, 1, 0.5), (1, 2, 0.5)), 0.2),),
            (Picture(png(5), quote),),
            comment,
        ),
    )
