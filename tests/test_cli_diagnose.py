"""``nwflow diagnose`` and ``nwflow sample --remedy``: files in, page, record and verdict out; errors in one line."""

import json
import math
import os
import pty
import re
import shlex
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nwflow import CondOT
from nwflow.cli import demo, main
from nwflow.cli.findings import plug_in_skill
from nwflow.data import load_support, read_metadata
from nwflow.diagnose import REMEDIES, diagnose, fit_remedy
from nwflow.diagnose.result import Diagnosis
from nwflow.sample import sample

QUICK = ("--queries", "12")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands run in an empty folder, on a terminal of 80 columns, without the environment of the caller."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NWFLOW_DEBUG", raising=False)
    return tmp_path


@pytest.fixture
def points(folder: Path) -> Tensor:
    """Three classes of twelve points with unequal columns: x.npy, and with the classes table.csv and sets.npz."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(36, 3, generator=g, dtype=torch.float64) * torch.tensor([3.0, 1.0, 0.3], dtype=torch.float64)
    kind = ["a", "b", "c"]
    x += torch.arange(3, dtype=torch.float64).repeat_interleave(12)[:, None] * 4
    np.save("x.npy", x.numpy())
    np.savez("sets.npz", points=x.numpy(), kind=np.repeat(kind, 12))
    lines = [",".join(map(repr, row)) + f",{kind[i // 12]}" for i, row in enumerate(x.tolist())]
    Path("table.csv").write_text("\n".join(["wide,middle,narrow,kind", *lines]) + "\n")
    return x


def run(*argv: str) -> None:
    """A command that has to succeed."""
    assert main(argv) == 0


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line of a command that has to fail."""
    capsys.readouterr()
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("nwflow: error: ")
    return err


def report(path: str = "diagnosis/report.json") -> Diagnosis:
    return Diagnosis.from_json(Path(path).read_text(encoding="utf-8"))


def timeless(d: Diagnosis) -> dict[str, Any]:
    """Everything but the run."""
    return {k: v for k, v in d.to_dict().items() if k != "run"}


# --- the report -----------------------------------------------------------------------------------------------------


def test_the_report_is_what_the_library_measures(points: Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["diagnose", "table.csv", "--label", "kind", *QUICK, "--seed", "3"]
    run(*argv)
    told, shown = report(), capsys.readouterr().out
    support = load_support("table.csv", label="kind")
    names = ["wide", "middle", "narrow"]
    assert timeless(told) == timeless(diagnose(support, queries=12, seed=3, names=names, source="table.csv"))
    assert told.run.command == shlex.join(["nwflow", *argv]) and told.run.path == repr(CondOT(sigma_min=0.0))
    assert told.data.classes == (("a", 12), ("b", 12), ("c", 12)) and told.geometry is not None
    assert {name for name, _ in told.geometry.columns} == set(names)
    page = Path("diagnosis/report.html").read_text(encoding="utf-8")
    assert told.verdict.text.split(".")[0] in page and "table.csv" in page
    assert " ".join(told.verdict.text.split()) in " ".join(shown.split())
    for name, regime in told.regimes.items():
        assert regime.skill_lost is not None
        line = next(line for line in shown.splitlines() if re.match(rf"[> ] {name} ", line))
        assert f" {100 * regime.skill_lost[0]:.0f}%" in line and line.startswith(">") == (name == told.verdict.regime)
    best = max((r for r in told.remedies if r.skill is not None), key=lambda r: r.skill or 0)
    assert f"{best.skill:.2f}" in next(line for line in shown.splitlines() if f" {best.name} " in line)
    assert "wrote diagnosis/report.html, diagnosis/report.json" in shown.replace("\\", "/")


def test_json_alone_goes_to_standard_output(points: Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    run("diagnose", "x.npy", *QUICK, "--json", "--out", "out")
    out, err = capsys.readouterr()
    assert err == "" and out == Path("out/report.json").read_text(encoding="utf-8")
    told = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert Diagnosis.from_dict(told) == report("out/report.json")


def test_the_field_without_remedy_has_the_skill_that_relates_errors(points: Tensor) -> None:
    run("diagnose", "x.npy", "--queries", "20", "--quiet")
    told, plain = report(), plug_in_skill(report())
    assert plain is not None
    for r in told.remedies:
        if not r.own_path and r.skill is not None and r.error is not None:
            assert r.error[0] == pytest.approx((1 - r.skill) / (1 - plain), rel=1e-6)


def test_given_leaves_the_other_labels_as_a_pool(points: Tensor) -> None:
    run("diagnose", "sets.npz", "--key", "points", "--label", "kind", "--given", "a", *QUICK, "--quiet")
    everything = load_support("sets.npz", key="points", label="kind")
    expected = diagnose(everything.given(["a"]), pool=everything.given(["b", "c"]), queries=12, source="sets.npz")
    told = report()
    assert timeless(told) == timeless(expected)
    assert told.remedy("pool").skill is not None and told.data.n == 12
    np.savez("others.npz", points=points[12:].numpy(), kind=np.repeat(["b", "c"], 12))
    np.save("a.npy", points[:12].numpy())
    run("diagnose", "a.npy", "--pool", "others.npz", "--pool-label", "kind", *QUICK, "--quiet", "--out", "named")
    assert report("named/report.json").remedies == told.remedies


def test_held_out_points_are_normalised_as_the_references_are(
    points: Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = points / points.norm(dim=1, keepdim=True) / 4  # normalised once, in some other unit
    np.save("unit.npy", unit.numpy())
    run("diagnose", "x.npy", "--held-out", "unit.npy", *QUICK, "--quiet")
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "mean norm" in err and "--normalize" in err
    ratio = float(points.norm(dim=1).mean()) * 4
    assert [n for n in report().data.notes if "factor" in n] == [
        f"--held-out unit.npy: mean norm differs from that of the references by a factor of {ratio:.3g}"
    ]
    run("diagnose", "x.npy", "--held-out", "unit.npy", "--normalize", *QUICK, "--quiet", "--out", "both")
    told = report("both/report.json")
    assert capsys.readouterr() == ("", "") and told.data.normalize and told.data.held_out == "unit.npy"
    assert told.data.mean_norm == pytest.approx(1) and not [n for n in told.data.notes if "factor" in n]


def test_rows_with_nan_are_dropped_on_request_and_counted(points: Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    points[5, 1] = math.nan
    np.save("gaps.npy", points.numpy())
    assert "--drop-nonfinite" in fails(capsys, "diagnose", "gaps.npy")
    run("diagnose", "gaps.npy", "--drop-nonfinite", *QUICK, "--quiet")
    assert (report().data.n, report().data.dropped) == (35, 1)


def test_two_references_are_too_few_and_said_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("two.npy", np.eye(2))
    run("diagnose", "two.npy")
    shown = capsys.readouterr().out
    assert report().verdict.remedy is None and "scarcity" in shown and "--remedy" not in shown
    assert report().verdict.text in shown


# --- what is written ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["report.html", "report.json"])
def test_nothing_is_replaced_and_that_is_seen_before_the_measurement(
    points: Tensor, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("diagnosis").mkdir()
    Path("diagnosis", name).write_text("keep")
    # the file of features is not even read: it does not exist
    assert f"{name}: there already; --force replaces" in fails(capsys, "diagnose", "missing.npy").replace("\\", "/")
    assert Path("diagnosis", name).read_text() == "keep" and len(list(Path("diagnosis").iterdir())) == 1
    run("diagnose", "x.npy", *QUICK, "--force", "--quiet")
    assert {p.name for p in Path("diagnosis").iterdir()} == {"report.html", "report.json"} and report().data.n == 36


def test_an_interrupted_measurement_leaves_nothing(
    points: Tensor, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(p.name for p in Path().iterdir())

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nwflow.diagnose.diagnose", interrupted)
    assert main(["diagnose", "x.npy"]) == 130
    assert capsys.readouterr() == ("", "nwflow: interrupted; no file is half-written\n")
    assert sorted(p.name for p in Path().iterdir()) == before


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_progress_is_shown_on_a_terminal_alone(
    points: Tensor, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("diagnose", "x.npy", *QUICK)
    assert capsys.readouterr().err == ""
    master, slave = pty.openpty()
    seen: list[bytes] = []
    reader = threading.Thread(target=lambda: seen.extend(iter(lambda: _read(master), b"")))
    reader.start()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        run("diagnose", "x.npy", *QUICK, "--json", "--force")
    reader.join()
    os.close(master)
    assert json.loads(capsys.readouterr().out)["data"]["n"] == 36
    assert "held-out errors" in b"".join(seen).decode()


def _read(file: int) -> bytes:
    try:
        return os.read(file, 4096)
    except OSError:  # the other end is closed
        return b""


# --- two side by side -----------------------------------------------------------------------------------------------


def test_two_files_are_compared(points: Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("other.npy", (points[:, :2] * torch.tensor([1.0, 100.0])).numpy())
    run("diagnose", "--compare", "x.npy", "other.npy", *QUICK)
    shown = capsys.readouterr().out
    a, b = report("comparison/report-a.json"), report("comparison/report-b.json")
    assert (a.data.source, a.data.d) == ("x.npy", 3) and (b.data.source, b.data.d) == ("other.npy", 2)
    run("diagnose", "x.npy", *QUICK, "--quiet")
    assert timeless(report()) == timeless(a)
    page = Path("comparison/comparison.html").read_text(encoding="utf-8")
    assert "x.npy" in page and "other.npy" in page and "A: x.npy" in shown and "B: other.npy" in shown
    verdict = next(line for line in shown.splitlines() if line.startswith("verdict")).split()
    assert verdict == ["verdict", a.verdict.regime, b.verdict.regime]
    assert "there already" in fails(capsys, "diagnose", "--compare", "x.npy", "other.npy")
    # reports, by file and by folder, give the same without measuring; numbers survive the way
    run("diagnose", "--compare", "diagnosis", "comparison/report-b.json", "--json", "--out", "again")
    told = json.loads(capsys.readouterr().out)
    assert Diagnosis.from_dict(told["a"]) == report() and Diagnosis.from_dict(told["b"]) == b
    assert report("again/report-b.json") == b


# --- sample --remedy ------------------------------------------------------------------------------------------------


def test_samples_of_a_remedy_are_those_of_its_field(points: Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    run("sample", "x.npy", "--remedy", "smoothing-full", "--n", "6", "--out", "out.npz")
    support = load_support("x.npy")
    fitted = fit_remedy("smoothing-full", support)
    expected = sample(fitted.field(support, CondOT(), 1e-3), 6, seed=0, accuracy=1e-3).points
    torch.testing.assert_close(load_support("out.npz", key="points").points, expected, atol=1e-9, rtol=0)
    told = read_metadata("out.npz")
    assert told["remedy"] == "smoothing-full"
    assert json.loads(told["remedy_settings"]) == pytest.approx(fitted.settings)
    assert "Remedy smoothing-full: " in capsys.readouterr().out
    nearest = torch.cdist(expected, support.points).amin(1)
    with np.load("out.npz") as stored:
        assert stored["n_eff"].shape == (6,)
    record = json.loads(Path("out.attribution.json").read_text())
    assert [m["distance"] for m in record["samples"]] == pytest.approx(nearest.tolist())  # to what was given, not moved


@pytest.mark.parametrize("name", sorted(set(REMEDIES) - {"patches-5"}))
def test_every_remedy_can_be_sampled(points: Tensor, name: str) -> None:
    source = ("sets.npz", "--key", "points", "--label", "kind", "--given", "a")
    run("sample", *source, "--remedy", name, "--n", "3", "--steps", "8", "--quiet", "--out", "out.npz")
    told, drawn = read_metadata("out.npz"), load_support("out.npz", key="points").points
    assert told["remedy"] == name and drawn.shape == (3, 3)
    assert (told.get("pool") == "the other labels") == (name in ("pool", "metric-within-class"))


def test_pools_change_what_is_fitted(points: Tensor) -> None:
    everything = load_support("sets.npz", key="points", label="kind")
    np.save("a.npy", points[:12].numpy())
    np.savez("others.npz", points=points[12:].numpy(), kind=np.repeat(["b", "c"], 12))
    common = ("--remedy", "pool", "--n", "4", "--quiet")
    run("sample", "sets.npz", "--key", "points", "--label", "kind", "--given", "a", *common, "--out", "rest.npy")
    run("sample", "a.npy", "--pool", "others.npz", "--pool-label", "kind", *common, "--out", "file.npy")
    own = everything.given(["a"])
    field = fit_remedy("pool", own, everything.given(["b", "c"])).field(own, CondOT(), 1e-3)
    expected = sample(field, 4, seed=0, accuracy=1e-3).points
    for name in ("rest.npy", "file.npy"):
        torch.testing.assert_close(load_support(name).points, expected, atol=1e-9, rtol=0)


def test_auto_takes_the_remedy_of_the_verdict(points: Tensor) -> None:
    run("sample", "x.npy", "--remedy", "auto", "--n", "5", "--quiet", "--out", "auto.npz")
    best = diagnose(load_support("x.npy")).verdict.remedy
    assert best is not None and read_metadata("auto.npz")["remedy"] == best
    run("sample", "x.npy", "--remedy", best, "--n", "5", "--quiet", "--out", "named.npz")
    a, b = (load_support(f"{name}.npz", key="points").points for name in ("auto", "named"))
    assert torch.equal(a, b)


def test_auto_reads_a_report(points: Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    run("diagnose", "x.npy", *QUICK, "--quiet")
    values = json.loads(Path("diagnosis/report.json").read_text())
    common = ("sample", "x.npy", "--remedy", "auto", "--n", "5", "--report")
    for remedy in ("smoothing-isotropic", None):
        values["verdict"]["remedy"] = remedy
        Path(f"{remedy}.json").write_text(json.dumps(values))
        run(*common, f"{remedy}.json", "--out", f"{remedy}.npz")
        assert read_metadata(f"{remedy}.npz")["remedy"] == (remedy or "none")
    assert capsys.readouterr().out.count("No remedy helps on these references: the exact field itself.") == 1
    run("sample", "x.npy", "--n", "5", "--quiet", "--out", "plain.npz")
    a, b = (load_support(f"{name}.npz", key="points").points for name in ("None", "plain"))
    assert torch.equal(a, b) and "remedy" not in read_metadata("plain.npz")
    np.save("flat.npy", points[:, :2].numpy())
    assert "is of points of 3" in fails(capsys, "sample", "flat.npy", *common[2:], "None.json", "--out", "no.npz")


# --- demo -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_demo_diagnoses_the_digits(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_QUERIES", 8)
    run("demo", "--per-class", "1", "--out", "out")
    told, shown = report("out/report.json"), capsys.readouterr().out
    assert told.verdict.text in shown and "out/report.html" in shown.replace("\\", "/")
    assert told.data.classes is not None and sum(n for _, n in told.data.classes) == told.data.n == 1797


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def bad(points: Tensor) -> None:
    Path("empty.npy").touch()
    Path("nan.csv").write_text("u,v\nnan,nan\n,nan\n")
    Path("header.csv").write_text("u,v\n")
    np.save("nan.npy", np.full((4, 2), np.nan))
    np.save("narrow.npy", points[:, :2].numpy())
    Path("other.json").write_text('{"a": 1}')
    Path("cut.json").write_text('{"a": ')
    Path("file").touch()


@pytest.mark.usefixtures("bad")
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("diagnose", "expected FEATURES, or --compare A B"),
        ("diagnose missing.npy", "missing.npy: no such file"),
        ("diagnose empty.npy", "empty.npy: file is empty"),
        ("diagnose header.csv", "header.csv: no references"),
        ("diagnose nan.csv", "every number is missing or NaN; columns u, v"),
        ("diagnose nan.npy", r"4 bad rows .*first at index 0; --drop-nonfinite"),
        ("diagnose nan.npy --drop-nonfinite", "no references .*4 rows with NaN or infinity dropped"),
        ("diagnose table.csv --label klass", "no 'klass'; the file holds wide, middle, narrow, kind"),
        ("diagnose table.csv --label kind --given d", "d.*a, b, c|known"),
        ("diagnose x.npy --held-out narrow.npy", "narrow.npy has width 2 but references x.npy has width 3"),
        ("diagnose table.csv --label kind --held-out x.npy", "--held-out: expected labels"),
        ("diagnose x.npy --pool narrow.npy", "narrow.npy has width 2"),
        ("diagnose x.npy --pool x.npy", "--pool x.npy: expected labels"),
        ("diagnose x.npy --pool-label kind", "expected --pool FILE"),
        ("diagnose x.npy --held-out-label kind", "expected --held-out FILE"),
        ("diagnose x.npy --queries 0", "--queries: expected at least 1, got 0"),
        ("diagnose x.npy --references 1", "--references: expected at least 2, got 1"),
        ("diagnose x.npy --seed -1", "--seed: expected"),
        ("diagnose x.npy --unit foo", "invalid choice 'foo' for argument '--unit'"),
        ("diagnose x.npy --path cosine --sigma-min 1", "takes no option"),
        ("diagnose x.npy --out file", "--out file: is a file, expected a folder"),
        ("diagnose x.npy --compare x.npy x.npy", "expected no FEATURES beside it"),
        ("diagnose --compare x.npy", "--compare"),
        ("diagnose --compare x.npy missing.npy", "missing.npy: no such file"),
        ("diagnose --compare missing.json x.npy", "missing.json"),
        ("diagnose --compare other.json x.npy", "other.json: is no report of nwflow diagnose"),
        ("diagnose --compare cut.json x.npy", "cut.json: is no report of nwflow diagnose"),
        ("diagnose --compare other.json cut.json --label kind", "--label: no meaning for --compare of two reports"),
        ("sample x.npy --remedy foo", "--remedy: expected auto, .*smoothing-full.*, got 'foo'"),
        ("sample x.npy --remedy pool", "--pool: expected a labelled pool of other classes"),
        ("sample x.npy --remedy patches-5", "patches-5|image|event"),
        ("sample x.npy --pool x.npy", "--pool: expected --remedy"),
        ("sample x.npy --report other.json", "--report: expected --remedy"),
        ("sample x.npy --remedy auto --report other.json", "is no report of nwflow diagnose"),
        ("sample x.npy --remedy smoothing-full --report other.json", "expected --remedy auto"),
        ("sample x.npy --remedy smoothing-full --pool x.npy", "--pool: no meaning for --remedy smoothing-full"),
        ("sample x.npy --remedy smoothing-full --smoothing 1", "--smoothing: no meaning beside --remedy"),
        ("sample x.npy --remedy smoothing-full --metric full", "--metric: no meaning beside --remedy"),
        ("sample sets.npz --key points --label kind --given a --guidance 2 --remedy pool", "--guidance: no meaning"),
    ],
)  # fmt: skip
def test_errors_are_one_line_and_write_nothing(capsys: pytest.CaptureFixture[str], argv: str, said: str) -> None:
    before = sorted(p.name for p in Path().iterdir())
    assert re.search(said, fails(capsys, *argv.split()))
    assert sorted(p.name for p in Path().iterdir()) == before
