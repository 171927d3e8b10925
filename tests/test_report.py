"""The HTML report: every number and reason is on the page, no name acts, nothing is loaded, a real browser agrees."""

import dataclasses
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
from plotly.offline import get_plotlyjs

import diagnoses
from nwflow.diagnose.result import Diagnosis
from nwflow.report import render, render_comparison, write_comparison, write_report
from nwflow.report._page import _json
from nwflow.report._series import Line, line_traces
from nwflow.report._values import fixed, inert, number

LIMIT = 6_000_000
KINDS = {
    "complete": diagnoses.complete,
    "minimal": diagnoses.minimal,
    "empty": diagnoses.empty_parts,
    "hostile": diagnoses.hostile,
}
PLOTS = ("skill", "error-raw", "error-relative", "n-eff", "largest-weight", "entropy")
PLOTS += ("n-eff-by-m", "n-eff-by-d", "spectrum", "learning", "mmd")


class Page(HTMLParser):
    """The elements of a page with their attributes, what a reader sees, and the text of each script."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.scripts, self._inside = "", [], ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style", "title"):
            self._inside = tag
            self.scripts += [""] * (tag == "script")

    def handle_endtag(self, tag: str) -> None:
        self._inside = "" if tag == self._inside else self._inside

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif not self._inside:
            self.text += data

    @property
    def plots(self) -> list[dict[str, Any]]:
        return json.loads(self.scripts[0])


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    one = diagnoses.complete()
    both = render_comparison(one, diagnoses.minimal())
    return {**{k: render(make()) for k, make in KINDS.items()}, "comparison": both}


def test_every_number_of_the_verdict_is_there(pages: dict[str, str]) -> None:
    text = Page(pages["complete"]).text
    one = diagnoses.complete()
    assert one.verdict.text in text and "Nearest-neighbour collapse" in text
    for share in ("62\xa0%", "55\xa0% to 69\xa0%", "21\xa0%", "−3\xa0%", "−10\xa0% to 4\xa0%"):
        assert share in text
    assert "skill 0.42" in text and "0.31 [0.27,\xa00.36] of the plug-in's" in text
    assert "nwflow diagnose photos --seed 7" in text and "1 min 15 s" in text and "2.13.0" in text
    for regime in one.regimes.values():
        assert regime.text in text and regime.intervention in text


def test_remedies_stand_by_skill_and_the_unmeasured_last(pages: dict[str, str]) -> None:
    table = pages["complete"].split('<table class="remedies">')[1].split("</table>")[0]
    names = [name.strip() for name in re.findall(r'<th scope="row">([^<]+)<?', table)]
    assert names == ["smoothing", "metric", "plug-in", "pooling"]
    assert "h0 = 0.3, rank = 8" in table and "not defined" in table.split("pooling")[1]


def test_numbers_are_words_of_the_definitions(pages: dict[str, str]) -> None:
    text = Page(pages["complete"]).text
    for term in ("Data scale", "log-SNR", "Skill", "Deciding window", "n_eff", "Raw:", "Relative:", "Minimax exponent"):
        assert term in text


@pytest.mark.parametrize("kind", [*KINDS, "comparison"])
def test_what_does_not_exist_is_said_in_words(pages: dict[str, str], kind: str) -> None:
    text = Page(pages[kind]).text
    assert not re.search(r"\b(NaN|nan|None|null|inf|Infinity|Undefined)\b", text)
    assert "not defined" in text


def test_one_point_says_why(pages: dict[str, str]) -> None:
    page = Page(pages["minimal"])
    assert "one point alone: nothing can be held out" in page.text and page.plots == []
    assert "No remedy helps here" in page.text


def optional_fields() -> Iterator[tuple[str, str]]:
    """Every field of the parts of a diagnosis that may be None."""
    for part in ("verdict", "collapse", "geometry", "scarcity", "data", ""):
        record = getattr(diagnoses.complete(), part) if part else diagnoses.complete()
        for name, hint in get_type_hints(type(record)).items():
            if type(None) in get_args(hint):
                yield part, name


@pytest.mark.parametrize(("part", "name"), list(optional_fields()))
def test_any_number_may_be_missing(part: str, name: str) -> None:
    one = diagnoses.complete()
    without = dataclasses.replace(getattr(one, part) if part else one, **{name: None})
    text = Page(render(dataclasses.replace(one, **{part: without}) if part else without)).text
    assert not re.search(r"\b(NaN|nan|None|null)\b", text)


def test_nan_is_not_defined() -> None:
    one, nan = diagnoses.complete(), math.nan
    remedy = dataclasses.replace(one.remedies[2], skill=nan, error=(nan, nan, nan))
    curves = one.curves
    assert curves is not None
    first = dataclasses.replace(curves.denoisers[0], raw=((nan, nan, nan), *curves.denoisers[0].raw[1:]))
    changed = dataclasses.replace(
        one, remedies=(remedy,), curves=dataclasses.replace(curves, denoisers=(first, *curves.denoisers[1:]))
    )
    page = Page(render(changed))
    raw = next(p for p in page.plots if p["id"] == "plot-error-raw")
    line = next(t for t in raw["data"] if t.get("name") == "plug-in")
    assert line["y"][0] is None and line["y"][1] == curves.denoisers[0].raw[1][0]
    assert "skill not defined" in page.text and not re.search(r"\bnan\b", page.text, re.IGNORECASE)


def test_ends_of_the_path_and_short_curves() -> None:
    one = diagnoses.complete()
    curves = one.curves
    assert curves is not None
    ends = dataclasses.replace(curves, log_snr=(-math.inf, *curves.log_snr[1:-1], math.inf))
    for plot in Page(render(dataclasses.replace(one, curves=ends))).plots[:6]:
        line = plot["data"][-1]
        assert line["x"] == list(curves.log_snr[1:-1]) and len(line["y"]) == len(line["x"])
    for count in (0, 1):
        cut = [
            dataclasses.replace(c, raw=c.raw[:count], relative=c.relative[:count], skill=c.skill[:count])
            for c in curves.denoisers
        ]
        along = {f.name: getattr(curves, f.name)[:count] for f in dataclasses.fields(curves)}
        short = dataclasses.replace(curves, **{**along, "denoisers": tuple(cut)})
        assert len(Page(render(dataclasses.replace(one, curves=short))).plots[0]["data"][-1]["x"]) == count
    nowhere = dataclasses.replace(curves, window=(False,) * len(curves.window))
    skill = Page(render(dataclasses.replace(one, curves=nowhere))).plots[0]
    assert skill["layout"]["shapes"] == [] and "Deciding window: log-SNR −6.0 to 2.0." in render(one)


@pytest.mark.parametrize("kind", KINDS)
def test_the_record_that_went_to_json_and_back_gives_the_same_page(pages: dict[str, str], kind: str) -> None:
    assert render(Diagnosis.from_json(KINDS[kind]().to_json())) == pages[kind]


@pytest.mark.parametrize("kind", [*KINDS, "comparison"])
def test_nothing_is_loaded_and_plotly_stands_once(pages: dict[str, str], kind: str) -> None:
    html = pages[kind]
    assert len(html.encode("utf-8")) < LIMIT
    assert html.count(get_plotlyjs().strip()[:2000]) == 1
    page = Page(html)
    loading = ("src", "href", "srcset", "data", "poster", "action")
    addresses = [v or "" for _, attrs in page.elements for k, v in attrs.items() if k in loading]
    assert all(a.startswith(("#", "data:")) for a in addresses)
    assert not any(tag in ("iframe", "object", "embed", "base", "form") for tag, _ in page.elements)
    rest = html.replace(get_plotlyjs().strip(), "")
    assert not re.search(r"@import|url\((?!data:)|\bfetch\(|XMLHttpRequest|sendBeacon|\bimport\(", code_of(rest))
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and "default-src 'none'" in policy and "script-src 'sha256-" in policy


def code_of(html: str) -> str:
    """What a browser would run or style with."""
    return "\n".join(re.findall(r"<(?:script|style)[^>]*>(.*?)</(?:script|style)>", html, re.DOTALL))


@pytest.mark.parametrize("number_of", [1, 2])
def test_names_are_text_wherever_they_stand(number_of: int) -> None:
    one = diagnoses.hostile()
    page = Page(render(one) if number_of == 1 else render_comparison(one, one))
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 3 and len(page.scripts) == 3
    assert not any(k.startswith("on") for _, attrs in page.elements for k in attrs)
    assert not any((attrs.get("href") or "").startswith("javascript:") for _, attrs in page.elements)
    for name in diagnoses.HOSTILE:
        assert name in page.text
    labels = [t["name"] for p in page.plots for t in p["data"] if "name" in t]
    assert labels and not any("<" in label or "%{" in label for label in labels)
    assert inert(diagnoses.HOSTILE[2]) in labels or f"A: {inert(diagnoses.HOSTILE[2])}" in labels


def test_data_cannot_end_its_script_element() -> None:
    value = [{"name": "</script><!--<script>&\u2028"}]
    text = _json(value)
    assert not set("<>&\u2028") & set(text) and json.loads(text) == value


def test_extrapolated_points_are_drawn_apart_and_start_where_measuring_ends() -> None:
    line = Line("a", [1, 2, 4, 8], [(1.0, 0.5, 2.0)] * 4, open=[False, False, True, True])
    band, solid, dotted, marks = line_traces(line, log=True)
    assert band["fill"] == "toself" and solid["y"] == [1.0, 1.0, None, None]
    assert dotted["y"] == [None, 1.0, 1.0, 1.0] and dotted["line"]["dash"] == "dot" != solid["line"]["dash"]
    assert marks["marker"]["symbol"] == ["circle", "circle", "circle-open", "circle-open"]
    assert [text.endswith("(extrapolated)") for text in marks["customdata"]] == [False, False, True, True]
    assert solid["hoverinfo"] == dotted["hoverinfo"] == "skip" and "hoverinfo" not in marks


def test_a_logarithmic_axis_leaves_out_what_is_not_positive() -> None:
    points = [(1.0, -1.0, 2.0), (0.0, 0.0, 0.0), (-1.0, -2.0, 3.0), None]
    band, line = line_traces(Line("a", [1, 2, 3, 4], points), log=True)
    assert line["y"] == [1.0, None, None, None]
    assert all(v is None or v > 0 for v in band["y"])
    text = Page(render(diagnoses.complete())).text
    assert "1 value at or below 0 is not on the logarithmic axis" in text  # of the spectrum, and of MMD^2


def test_numbers_read_as_written() -> None:
    written = {0: "0", 2.0: "2", 1234.5: "1,234", 0.000123: "1.23×10⁻⁴", -1e-9: "−1×10⁻⁹", 3e10: "3×10¹⁰"}
    assert [number(v) for v in written] == list(written.values())
    assert [fixed(v) for v in (0.005, -0.004, 999.999, math.inf)] == ["0.01", "0.00", "1000.00", "not defined"]


def test_a_comparison_has_both(pages: dict[str, str]) -> None:
    one = diagnoses.complete()
    other = dataclasses.replace(one, data=dataclasses.replace(one.data, source="paintings"))
    page = Page(render_comparison(one, other))
    assert page.text.count(one.verdict.text) == 2 and "photos of fish" in page.text and "paintings" in page.text
    skill = next(p for p in page.plots if p["id"] == "plot-skill")
    names = [t["name"] for t in skill["data"] if "name" in t]
    assert names == ["A: plug-in", "A: smoothing", "B: plug-in", "B: smoothing"]
    looks = {(t["line"]["color"], t["line"]["dash"], t["marker"]["symbol"]) for t in skill["data"] if "name" in t}
    assert len(looks) == 4
    assert "not defined" in Page(pages["comparison"]).text


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    mask = os.umask(0o027)
    try:
        assert write_report(diagnoses.complete(), path) == path
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.read_text(encoding="utf-8") == render(diagnoses.complete())
    with pytest.raises(FileExistsError, match="force"):
        write_report(diagnoses.minimal(), path)
    assert path.read_text(encoding="utf-8") == render(diagnoses.complete())
    write_comparison(diagnoses.complete(), diagnoses.minimal(), str(path), force=True)
    assert "comparison of two" in path.read_text(encoding="utf-8")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="diagnosis: expected a Diagnosis, got dict"):
        render(diagnoses.complete().to_dict())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="b: expected a Diagnosis, got None"):
        render_comparison(diagnoses.complete(), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"path: expected the extension \.html, got 'report\.txt'"):
        write_report(diagnoses.complete(), tmp_path / "report.txt")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        write_report(diagnoses.complete(), tmp_path / "missing" / "report.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium, one for all tests of this file."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no browser: chromium, chromium-browser or google-chrome is not on the path")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as p:
        started = p.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield started
        finally:
            started.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, pages: dict[str, str]) -> dict[str, str]:
    """Addresses of the pages on disk."""
    folder = tmp_path_factory.mktemp("pages")
    for name, html in pages.items():
        (folder / f"{name}.html").write_text(html, encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in pages}


@pytest.fixture(scope="module")
def visit(browser: Any, files: dict[str, str]) -> Iterator[Callable[[str], Any]]:
    """``visit(name)``: an open page with all that it said and asked for; each is opened once, 390 pixels wide."""
    opened: dict[str, Any] = {}

    def go(name: str) -> Any:
        if name not in opened:
            page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="light")
            opened[name] = seen = SimpleNamespace(page=page, said=[], asked=[])
            page.on("console", lambda message: seen.said.append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error: seen.said.append(str(error)))
            page.on("request", lambda request: seen.asked.append(request.url))
            page.goto(files[name])
            page.wait_for_selector("html[data-drawn=true]", timeout=60_000)
        return opened[name]

    yield go
    for seen in opened.values():
        seen.page.close()


def settled(page: Any) -> None:
    """Wait until the page has answered what happened to it."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.mark.parametrize("name", [*KINDS, "comparison"])
def test_in_a_browser_it_loads_alone_and_fits(visit: Any, files: dict[str, str], name: str) -> None:
    seen = visit(name)
    assert [address for address in seen.asked if not address.startswith("data:")] == [files[name]]
    width = "document.documentElement.scrollWidth"
    assert seen.page.evaluate(width) <= 390
    assert seen.page.locator(".verdict .lead").first.is_visible()
    first = seen.page.locator("#plot-skill .main-svg").first
    narrow = first.get_attribute("width") if name not in ("minimal", "empty") else None
    seen.page.set_viewport_size({"width": 1440, "height": 900})
    if narrow:
        seen.page.wait_for_selector(f"#plot-skill .main-svg:not([width='{narrow}'])")  # it was drawn again
        assert float(first.get_attribute("width")) > 2 * float(narrow)
    assert seen.page.evaluate(width) <= 1440
    assert seen.said == [] and seen.page.evaluate("window.hacked") is None
    assert seen.page.locator(".plot a, .plot b, .plot img").count() == 0


def test_in_a_browser_the_keyboard_gets_everywhere(visit: Any) -> None:
    page = visit("minimal").page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.parentElement.open") is True
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "PRE"  # scrolls by keys where the command is long


def test_in_a_browser_every_plot_draws(visit: Any) -> None:
    page = visit("complete").page
    for name in PLOTS:
        assert page.locator(f"#plot-{name} .scatterlayer .js-line").count() >= 1, name
    assert page.locator("#plot-skill .scatterlayer .trace").count() == 8  # four denoisers and their bands
    assert page.locator("#plot-skill .shapelayer path").count() == 3  # the window and its two ends


def test_in_a_browser_names_in_plots_are_shown_as_they_are(visit: Any) -> None:
    legend = visit("hostile").page.locator("#plot-skill .legendtext").all_text_contents()
    assert [name.replace("\u200b", "") for name in legend] == ["plug-in", "linear", *diagnoses.HOSTILE]


@pytest.mark.parametrize(
    ("plot", "text"),
    [("skill", "plug-in : −0.80 [−0.90,\xa0−0.70]"), ("learning", "plug-in : 0.946 [0.757,\xa01.14] (extrapolated)")],
)
def test_in_a_browser_hover_tells_values(visit: Any, plot: str, text: str) -> None:
    seen = visit("complete")
    box = seen.page.locator(f"#plot-{plot} .nsewdrag").first
    box.scroll_into_view_if_needed()
    size = box.bounding_box()
    box.hover(position={"x": 0.97 * size["width"], "y": size["height"] / 3})
    seen.page.wait_for_selector(f"#plot-{plot} .hoverlayer .legendtext", timeout=10_000)
    assert text in seen.page.locator(f"#plot-{plot} .hoverlayer .legendtext").all_text_contents()
    assert seen.said == []


def test_in_a_browser_colours_follow_the_scheme(visit: Any) -> None:
    page = visit("complete").page
    colours = """() => [
        getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.querySelector("#plot-skill .xtick text")).fill,
        getComputedStyle(document.querySelector("#plot-skill .js-line[style*='stroke-width: 2px']")).stroke,
    ]"""
    light = page.evaluate(colours)
    page.emulate_media(color_scheme="dark")
    settled(page)
    dark = page.evaluate(colours)
    page.emulate_media(color_scheme="light")
    settled(page)
    assert all(a != b for a, b in zip(light, dark))
    assert page.evaluate(colours) == light


def test_in_a_browser_print_is_light_and_complete(visit: Any) -> None:
    page = visit("complete").page
    page.emulate_media(color_scheme="dark")
    page.evaluate("""() => addEventListener("beforeprint", () => {
        window.printed = [getComputedStyle(document.body).backgroundColor, document.querySelector(".words").open];
    })""")
    assert page.pdf(format="A4").startswith(b"%PDF-")
    assert page.evaluate("window.printed") == ["rgb(255, 255, 255)", True]
    assert page.evaluate("document.documentElement.className") == ""
    assert page.evaluate("document.querySelector('.words').open") is False


def test_every_plot_has_words_and_a_table(pages: dict[str, str]) -> None:
    page = Page(pages["complete"])
    drawn = {a["id"]: a for _, a in page.elements if (a.get("id") or "").startswith("plot-")}
    assert [p["id"] for p in page.plots] == list(drawn) == [f"plot-{name}" for name in PLOTS]
    assert all(len(a["aria-label"] or "") > 40 for a in drawn.values())
    assert pages["complete"].count('<details class="numbers">') == len(PLOTS)
    headings = [tag for tag, _ in page.elements if tag in ("h1", "h2", "h3", "h4")]
    assert headings.count("h1") == 1 and headings[0] == "h1" and "h4" not in headings
    assert all(a.get("scope") in ("col", "row") for tag, a in page.elements if tag == "th")


def test_why_numbers_of_classes_are_missing_is_said_where_some_are() -> None:
    why = "the class has too few unique points"
    assert why in render(diagnoses.empty_parts()) and why not in render(diagnoses.complete())
