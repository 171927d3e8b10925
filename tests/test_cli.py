"""The command line: what it writes is what the library computes, and what goes wrong is one line and exit code 2."""

import csv
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor

import nwflow
from nwflow import CondOT, NWField, Smoothing, Support, VariancePreserving
from nwflow.cli import attribution, main, picture
from nwflow.cli import sample as sample_command
from nwflow.cli.describe import follow
from nwflow.cli.files import EXTENSIONS
from nwflow.cli.options import FieldOptions, within_class
from nwflow.data import load_support, read_metadata, save_points
from nwflow.sample import sample

SRC = Path(__file__).parents[1] / "src"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands run in an empty folder, on a terminal of 80 columns, without the environment of the caller."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NWFLOW_DEBUG", raising=False)
    return tmp_path


@pytest.fixture
def line(folder: Path) -> Tensor:
    """Six references on a line, in line.npy."""
    points = torch.tensor([[-4.0], [-2.5], [-1.0], [0.5], [2.0], [4.0]], dtype=torch.float64)
    np.save("line.npy", points.numpy())
    return points


@pytest.fixture
def faces(folder: Path) -> Path:
    """Colour images of 6 x 5 pixels in two class folders."""
    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (folder / "faces" / label).mkdir(parents=True)
        for i in range(3):
            pixels = rng.integers(0, 256, (6, 5, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "faces" / label / f"{i}.png")
    return folder / "faces"


def run(*argv: str) -> None:
    """A command that has to succeed."""
    assert main(argv) == 0


def rows(path: str) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line of a command that has to fail."""
    capsys.readouterr()
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("nwflow: error: ")
    return err


# --- help and versions ----------------------------------------------------------------------------------------------


def test_help_lists_the_commands_and_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    run()
    alone = capsys.readouterr().out
    run("--help")
    assert capsys.readouterr().out == alone
    for command in ("sample", "describe", "diagnose", "demo"):
        assert command in alone
        run(command, "--help")
        shown = capsys.readouterr().out
        assert f"nwflow {command}" in shown and "examples:" in shown and "default: None" not in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    run("--version")
    assert capsys.readouterr().out == f"nwflow {nwflow.__version__} (torch {torch.__version__})\n"


def test_choices_are_those_of_the_sampler() -> None:
    offered, accepted = get_type_hints(sample_command.Sampler), get_type_hints(sample)
    assert get_args(offered["method"]) == get_args(accepted["method"])
    assert get_args(get_args(offered["grid"])[0]) == get_args(get_args(accepted["grid"])[0])


# --- sample: files --------------------------------------------------------------------------------------------------


def test_samples_land_on_references_and_say_which(line: Tensor) -> None:
    run("sample", "line.npy", "--n", "20", "--out", "out.safetensors")
    points = load_support("out.safetensors").points
    table = rows("out.attribution.csv")
    assert len(table) == 20
    for point, row in zip(points, table):
        left = 1 - float(row["weight_1"])  # weight of all other references, which are at most 8 away
        assert float((point - line[int(row["row_1"])]).abs()) <= 8 * (left + 1e-3)  # accuracy of the weights
        assert row["row_1"] == row["nearest"] and row["copy"] == "1" and left < 0.02
        assert 1 <= float(row["n_eff"]) < 1.05 and 0 <= float(row["ratio"]) < 0.05


def test_denoised_samples_are_the_weighted_mean_that_the_table_tells(line: Tensor) -> None:
    run("sample", "line.npy", "--n", "9", "--stop-at", "2.5", "--denoise", "--top", "6", "--out", "out.npz")
    with np.load("out.npz") as stored:
        points, index, weights, n_eff = (
            torch.from_numpy(stored[k]) for k in ("points", "references", "reference_weights", "n_eff")
        )
    torch.testing.assert_close(
        (weights[..., None] * line[index]).sum(1), points, atol=2e-3 * 8, rtol=0
    )  # accuracy * range
    torch.testing.assert_close(weights.sum(1), torch.ones(9, dtype=weights.dtype), atol=1e-6, rtol=0)
    torch.testing.assert_close(1 / weights.square().sum(1), n_eff, atol=0, rtol=1e-2)
    table = rows("out.attribution.csv")
    assert [[int(row[f"row_{j}"]) for j in range(1, 7)] for row in table] == index.tolist()


def test_runs_agree_with_the_library(line: Tensor) -> None:
    argv = "sample line.npy --n 5 --seed 7 --steps 12 --method 2m --path vp --beta-max 12 --smoothing 0.3 --out out.npy"
    run(*argv.split(), "--accuracy", "1e-4")
    field = NWField(line, VariancePreserving(beta_max=12.0), smoothing=0.3)
    expected = sample(field, 5, steps=12, method="2m", seed=7, accuracy=1e-4).points
    torch.testing.assert_close(load_support("out.npy").points, expected, atol=1e-9, rtol=0)


def test_seeds_reproduce_and_do_not_depend_on_the_number(line: Tensor) -> None:
    options = ("line.npy", "--smoothing", "0.5", "--quiet")
    for out, more in (("a", ()), ("b", ()), ("c", ("--seed", "1")), ("d", ("--n", "70", "--batch-size", "9"))):
        run("sample", *options, "--out", f"{out}.npy", *more)
    a, b, c, d = (load_support(f"{name}.npy").points for name in "abcd")
    assert torch.equal(a, b) and not torch.equal(a, c)
    torch.testing.assert_close(d[:64], a, atol=1e-4, rtol=0)


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".parquet"])
def test_metadata_tells_what_made_the_file(line: Tensor, suffix: str) -> None:
    argv = ["sample", "line.npy", "--n", "3", "--seed", "5", "--sigma-min", "0.01", "--out", f"out{suffix}"]
    run(*argv)
    told = read_metadata(f"out{suffix}")
    assert told["command"] == " ".join(["nwflow", *argv])
    assert told["convention"] == "t=0 noise, t=1 data"
    assert told["path"] == "CondOT(sigma_min=0.01)"
    assert json.loads(told["seed"]) == 5 and json.loads(told["accuracy"]) == 1e-3
    assert json.loads(told["versions"])["nwflow"] == nwflow.__version__
    assert json.loads(told["times"])[-1] == 1
    with open("out.attribution.json", encoding="utf-8") as file:
        record = json.load(file)
    assert {k: v if isinstance(v, str) else json.dumps(v) for k, v in record["run"].items()} == told
    assert record["summary"]["n"] == len(record["samples"]) == 3


def test_normalised_supports_are_said_in_the_file(folder: Path) -> None:
    np.save("wide.npy", np.random.default_rng(0).normal(size=(8, 3)) * 5)
    run("sample", "wide.npy", "--n", "4", "--normalize", "--out", "copies.npz")
    assert "normalized" in " ".join(load_support("copies.npz").notes)  # copies of unit vectors are unit vectors
    run("sample", "wide.npy", "--n", "4", "--normalize", "--smoothing", "1", "--out", "around.npz")
    assert json.loads(read_metadata("around.npz")["normalize"]) is True
    assert not load_support("around.npz").notes


def test_extensions_are_those_that_can_be_written(folder: Path) -> None:
    for suffix in EXTENSIONS:
        save_points(f"points{suffix}", torch.zeros(2, 3))
    with pytest.raises(ValueError, match=re.escape(", ".join(EXTENSIONS))):
        save_points("points.foo", torch.zeros(2, 3))


def test_tables_of_an_image_folder_name_files_and_labels(faces: Path) -> None:
    run("sample", "faces", "--given", "dog", "--n", "5", "--out", "out.npz")
    names = [f"{c}/{i}.png" for c in ("cat", "dog") for i in range(3)]
    for row in rows("out.attribution.csv"):
        assert row["label_1"] == "dog" and row["name_1"] == names[int(row["row_1"])]


def test_given_compares_labels_as_text(folder: Path) -> None:
    run("sample", "digits", "--given", "3", "8", "--n", "6", "--quiet")
    labels = load_support("digits").labels
    for row in rows("samples.attribution.csv"):
        assert row["label_1"] in ("3", "8") and int(labels[int(row["row_1"])]) == int(row["label_1"])


def test_full_guidance_is_the_condition_alone(folder: Path) -> None:
    common = ("sample", "digits", "--given", "2", "--n", "4", "--steps", "10", "--stop-at", "0.6")
    run(*common, "--out", "alone.npy")
    run(*common, "--guidance", "1", "--out", "guided.npy")
    torch.testing.assert_close(load_support("guided.npy").points, load_support("alone.npy").points, atol=2e-3, rtol=0)


def test_samples_start_where_x0_says(line: Tensor) -> None:
    run("sample", "line.npy", "--x0", "line.npy", "--times", "0.5", "1", "--method", "exact", "--out", "out.npy")
    expected = NWField(line, CondOT()).denoise(line, 0.5)  # one exact step to sigma = 0 lands on the denoiser
    torch.testing.assert_close(load_support("out.npy").points, expected, atol=1e-2, rtol=0)


def test_quiet_says_nothing_and_names_in_brackets_are_no_markup(
    line: Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    run("sample", "line.npy", "--n", "2", "--quiet", "--out", "[red].npy")
    assert capsys.readouterr() == ("", "")
    run("sample", "line.npy", "--n", "2", "--out", "[red].npy", "--force")
    assert "[red].npy" in capsys.readouterr().out


def test_what_is_printed_names_the_convention_and_counts_copies(
    line: Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    run("sample", "line.npy", "--n", "11", "--verbose")
    shown = capsys.readouterr().out
    assert "t=0 noise, t=1 data" in shown and "seed 0" in shown and "40 evaluations" in shown
    assert "11 of 11 samples are copies of a reference" in shown and "--stop-at" in shown


# --- sample: fields from options ------------------------------------------------------------------------------------


def labelled(randn: Any) -> Support:
    labels = torch.arange(30) % 3
    points = randn(30, 4) + 10 * labels[:, None]
    return Support(points, weights=torch.arange(1, 31, dtype=torch.float64), labels=labels)


def test_points_about_their_class_means(randn: Any) -> None:
    pool = labelled(randn)
    centred = within_class(pool)
    for c in range(3):
        own = pool.labels == c
        x, w = pool.points[own], pool.weights[own]
        mean = (w[:, None] * x).sum(0) / w.sum()
        torch.testing.assert_close(centred.points[own], x - mean)


@pytest.mark.parametrize("shape", ["covariance", "within-class"])
def test_smoothing_has_the_covariance_of_the_pool(randn: Any, shape: Any) -> None:
    pool = labelled(randn)
    field = FieldOptions(smoothing=0.5, smoothing_shape=shape, device="cpu").build(pool, pool.given([0]))
    points = within_class(pool).points if shape == "within-class" else pool.points
    covariance = np.cov(points.numpy().T, aweights=pool.weights.numpy(), ddof=0)
    assert isinstance(field.smoothing, Smoothing)
    found = field.smoothing.matrix(4).numpy() / 0.25
    assert np.trace(found) == pytest.approx(np.trace(covariance))  # shrinkage keeps the trace
    across = np.linalg.eigvalsh(covariance)[-1] > 10
    assert (np.linalg.eigvalsh(found)[-1] > 10) == across == (shape == "covariance")


@pytest.mark.parametrize("metric", ["diagonal", "full", "low-rank"])
def test_metrics_are_fitted_to_everything_that_was_read(randn: Any, metric: Any) -> None:
    pool = labelled(randn)
    rank = 2 if metric == "low-rank" else None
    one = FieldOptions(metric=metric, rank=rank, device="cpu").build(pool, pool.given([0]))
    other = FieldOptions(metric=metric, rank=rank, device="cpu").build(pool, pool.given([1]))
    assert one.metric is not None and other.metric is not None
    torch.testing.assert_close(one.metric.matrix(4), other.metric.matrix(4))
    assert one.m == 10 and one.accuracy == 1e-3


# --- pictures -------------------------------------------------------------------------------------------------------


def test_pictures_of_samples_have_the_size_of_their_grid(folder: Path) -> None:
    run("sample", "digits", "--n", "12", "--quiet", "--stop-at", "0.5", "--denoise")
    images = [Image.new("RGB", (8, 8))] * 12
    with Image.open("samples.png") as sheet, Image.open("samples.attribution.png") as beside:
        assert sheet.size == picture.grid(images).size == (4 * 86 + 6, 3 * 86 + 6)
        assert beside.mode == "RGB" and beside.width > 1000
        assert sheet.text["nwflow:seed"] == "0" and sheet.text["nwflow:convention"] == "t=0 noise, t=1 data"


def test_pixels_are_enlarged_without_interpolation() -> None:
    points = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0))
    brush = picture.Brush.of(points)
    assert brush is not None and (brush.low, brush.high) == (0, 1)
    sheet = np.asarray(picture.grid(brush.paint(points), columns=3, side=40, gap=6))
    for i in range(3):
        cell = sheet[6:46, 6 + i * 46 : 46 + i * 46, 0]
        np.testing.assert_array_equal(cell, np.rint(points[i].numpy() * 255).repeat(5, 0).repeat(5, 1))


@pytest.mark.parametrize(
    ("axes", "shape"), [("chw", (3, 6, 5)), ("hwc", (6, 5, 3)), ("hw", (6, 5)), ("chw", (1, 6, 5))]
)
def test_layouts_paint_the_same_picture(axes: str, shape: tuple[int, ...]) -> None:
    points = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0)) * 255
    brush = picture.Brush.of(points)
    assert brush is not None and brush.axes == axes and brush.high == 255
    expected = points.movedim(1, -1) if axes == "chw" else points
    expected = expected if len(shape) == 3 else expected[..., None]
    for image, pixels in zip(brush.paint(points), expected):
        np.testing.assert_array_equal(np.asarray(image), np.rint(pixels.expand(6, 5, 3).numpy()))


def test_what_is_no_image_is_not_drawn(line: Tensor) -> None:
    assert picture.Brush.of(torch.zeros(4, 2, 100)) is None
    run("sample", "line.npy", "--n", "2", "--quiet")
    assert not list(Path().glob("*.png"))
    run("sample", "digits", "--n", "2", "--quiet", "--no-picture", "--out", "digits.npz")
    assert not list(Path().glob("*.png"))


def test_ranges_are_named_and_left_numbers_counted() -> None:
    brush = picture.Brush.of(torch.tensor([[[-1.0, 0.5, 0.0, 0.0]] * 4]))
    assert brush is not None and (brush.low, brush.high) == (-1, 1)
    assert brush.outside(torch.tensor([-2.0, 0.0, 0.5, 1.0])) == 0.25
    odd = picture.Brush.of(torch.linspace(-3, 7, 16).reshape(1, 4, 4))
    assert odd is not None and (odd.low, odd.high) == (-3, 7)


# --- describe -------------------------------------------------------------------------------------------------------


def described(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    run("describe", *argv, "--json")
    return json.loads(capsys.readouterr().out)


def test_describe_counts_what_a_support_holds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = np.array([[1.0, 7, 0], [1, 7, 0], [np.nan, 7, 0], [4, 7, 0], [0, 7, np.inf]])
    np.savez("mixed.npz", points=points, kind=np.array([0, 0, 1, 1, 1]))
    told = described(capsys, "mixed.npz", "--label", "kind")["summary"]
    assert (told["n"], told["d"], told["event_shape"], told["dtype"]) == (3, 3, [3], "float64")
    assert (told["n_dropped"], told["first_dropped"], told["duplicates"]) == (2, 2, 1)
    assert told["constant_columns"] == 2 and told["labels"] == {"0": 2, "1": 1}
    assert told["data_scale"] == pytest.approx(math.sqrt(2 / 3))  # variances (2, 0, 0)
    assert told["near_distance"] == pytest.approx(3)
    run("describe", "mixed.npz", "--key", "points")
    shown = capsys.readouterr().out
    assert "2 dropped, first at row 2; nwflow sample needs --drop-nonfinite" in " ".join(shown.split())


def test_describe_follows_the_weights_to_their_collapse(line: Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    told = described(capsys, "line.npy", "--dtype", "float64")
    n_eff, h = ([row[k] for row in told["n_eff"]] for k in ("n_eff", "bandwidth"))
    assert n_eff == sorted(n_eff, reverse=True) and h == sorted(h, reverse=True)
    assert n_eff[0] > 0.9 * 6 and n_eff[-1] < 2
    assert told["collapse"]["n_eff"] == pytest.approx(2, abs=1e-2)
    for row in told["n_eff"]:
        assert row["t"] == pytest.approx(1 / (1 + row["bandwidth"]))  # CondOT: h = (1 - t) / t


@pytest.mark.parametrize(("factor", "shift"), [(1.0, 100.0), (8.0, 0.0)])
def test_collapse_moves_with_scale_and_not_with_shift(line: Tensor, factor: float, shift: float) -> None:
    rows_of, collapse = follow(NWField(line), line, 64, 0)
    moved_rows, moved = follow(NWField(factor * line + shift), factor * line + shift, 64, 0)
    assert collapse is not None and moved is not None
    assert moved.bandwidth == pytest.approx(factor * collapse.bandwidth, rel=1e-3)  # found by halving, to 1e-4
    for a, b in zip(rows_of, moved_rows):
        assert b.n_eff == pytest.approx(a.n_eff, rel=1e-2)


@pytest.mark.parametrize(("points", "collapses"), [([[1.0]], None), ([[2.0], [2.0]], None), ([[0.0], [1.0]], True)])
def test_degenerate_supports_are_described(
    folder: Path, capsys: pytest.CaptureFixture[str], points: Any, collapses: bool | None
) -> None:
    np.save("few.npy", np.array(points))
    told = described(capsys, "few.npy")
    assert (told["collapse"] is None) == (collapses is None)
    if collapses:
        assert told["collapse"]["n_eff"] == pytest.approx(1.5, abs=1e-2)
    run("describe", "few.npy")
    assert ("at one place" in capsys.readouterr().out) == (collapses is None)


def test_queries_of_another_scale_are_warned_of(line: Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("far.npy", 45 * line.numpy())
    told = described(capsys, "line.npy", "--queries", "far.npy")
    assert told["mean_norm_ratio"] == pytest.approx(45)
    run("describe", "line.npy", "--queries", "far.npy", "--quiet")
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("nwflow: warning: ") and "--normalize" in err


# --- demo -----------------------------------------------------------------------------------------------------------


def test_demo_draws_every_digit_and_says_what_to_look_at(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("demo", "--per-class", "2", "--no-diagnosis")
    shown = capsys.readouterr().out
    assert "nwflow-demo/demo.png" in shown.replace("\\", "/") and "nwflow describe digits" in shown
    support, table = (
        load_support("nwflow-demo/samples.safetensors", label="labels"),
        rows("nwflow-demo/attribution.csv"),
    )
    assert support.points.shape == (20, 8, 8) and [row["class"] for row in table] == [str(i // 2) for i in range(20)]
    assert all(row[f"label_{j}"] == row["class"] for row in table for j in range(1, 6))
    with Image.open("nwflow-demo/demo.png") as image:
        image.load()
        assert image.width > image.height / 2 and image.text["nwflow:path"] == "CondOT(sigma_min=0.0)"
    run("demo", "--per-class", "1", "--bandwidth", "0", "--quiet", "--no-diagnosis")
    with open("nwflow-demo-2/attribution.json", encoding="utf-8") as file:
        counted = json.load(file)["summary"]
    assert counted["copies"] == counted["n"] == 10


def test_demo_replaces_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").mkdir()
    Path("mine/demo.png").write_text("keep")
    assert "--force" in fails(capsys, "demo", "--out", "mine")
    assert Path("mine/demo.png").read_text() == "keep" and len(list(Path("mine").iterdir())) == 1
    assert "per-class" in fails(capsys, "demo", "--per-class", "0", "--out", "new") and not Path("new").exists()


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def bad(folder: Path, line: Tensor) -> None:
    Path("empty.npy").touch()
    np.savez("two.npz", a=np.zeros((3, 2)), b=np.ones((3, 2)))
    np.save("nan.npy", np.array([[-1.0], [1.0], [np.nan]]))
    np.save("encoder_a.npy", np.zeros((4, 1664), np.float32))
    np.save("encoder_b.npy", np.random.default_rng(0).normal(size=(10, 1280)).astype(np.float32))


@pytest.mark.usefixtures("bad")
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("sample missing.npy", "missing.npy: no such file"),
        ("sample empty.npy", "empty.npy: file is empty"),
        ("sample two.npz", "choose one with --key: a, b"),
        ("sample two.npz --key c", "no 'c'"),
        ("sample nan.npy", r"1 bad row .*first at index 2; --drop-nonfinite"),
        ("sample digits --given 12", r"12.*known|known.*12|12.*0, 1"),
        ("sample line.npy --given a", "no labels"),
        ("sample line.npy --method foo", "'foo'.*3m.*dopri5.*nwflow sample --help"),
        ("sample line.npy --grid foo", "foo.*log_bandwidth"),
        ("sample line.npy --stps 3", "did you mean --steps"),
        ("sample line.npy --smoothing abc", "--smoothing: expected FLOAT, got 'abc'"),
        ("sample line.npy --smoothing -1", "non-negative"),
        ("sample line.npy --smoothing", "--smoothing"),
        ("sample line.npy --smoothing-shape covariance", "--smoothing H0"),
        ("sample line.npy --smoothing 1 --smoothing-shape within-class", "labels"),
        ("sample line.npy --n 0", "n: expected a positive integer"),
        ("sample line.npy --steps 0", "steps: expected"),
        ("sample line.npy --seed -1", "seed: expected"),
        ("sample line.npy --eta 2", "eta: expected"),
        ("sample line.npy --top 0", "--top: expected at least 1"),
        ("sample line.npy --accuracy 3", "accuracy: expected"),
        ("sample line.npy --times 0 0.5 0.5 1", "increasing"),
        ("sample line.npy --times 0 1 --steps 3", "--times: replaces"),
        ("sample line.npy --beta-min 1", "--beta-min: no meaning for --path condot, which takes --sigma-min"),
        ("sample line.npy --path cosine --sigma-min 1", "takes no option"),
        ("sample line.npy --rank 2", "expected --metric low-rank"),
        ("sample line.npy --guidance 2", "expected --given"),
        ("sample line.npy --device nowhere", "--device"),
        ("sample line.npy --size 1 2 3", r"expected one number \(side\) or two \(height width\), got 3"),
        ("sample line.npy --encoder nowhere", "nowhere"),
        ("sample line.npy --x0 line.npy --n 9", "expected at most 6"),
        ("sample line.npy --out a.foo", r"\.safetensors, \.npz, \.npy, \.parquet, \.csv, got \.foo"),
        ("sample line.npy --out a", "got none"),
        ("sample line.npy --out nowhere/a.npy", "the folder nowhere does not exist"),
        ("sample digits --out a.csv", r"a \.csv holds vectors, got events of shape \(8, 8\)"),
        ("sample encoder_b.npy --x0 encoder_a.npy", "encoder_a.npy has width 1664 but .*encoder_b.npy has width 1280"),
        ("describe encoder_b.npy --queries encoder_a.npy", "1664.*1280"),
        ("describe empty.npy", "file is empty"),
        ("describe line.npy --probes 0", "--probes"),
        ("sample", r"expected SUPPORT \(see nwflow sample --help\)"),
        ("smaple line.npy", "smaple"),
    ],
)  # fmt: skip
def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], argv: str, said: str) -> None:
    before = sorted(p.name for p in Path().iterdir())
    assert re.search(said, fails(capsys, *argv.split()))
    assert sorted(p.name for p in Path().iterdir()) == before


def test_nothing_is_replaced_without_force(line: Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    run("sample", "line.npy", "--n", "2")
    before = Path("samples.safetensors").read_bytes()
    assert "--force replaces" in fails(capsys, "sample", "line.npy", "--n", "3")
    assert Path("samples.safetensors").read_bytes() == before
    run("sample", "line.npy", "--n", "3", "--force")
    with safe_open("samples.safetensors", "pt") as file:
        assert file.get_tensor("points").shape == (3, 1)


def test_a_picture_in_the_way_is_seen_before_anything_is_computed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("samples.png").write_text("keep")
    monkeypatch.setattr(sample_command, "sample", lambda *_, **__: pytest.fail("computed"))
    assert "samples.png" in fails(capsys, "sample", "digits", "--n", "2")


def test_debugging_shows_where_an_error_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no such file"):
        main(["sample", "missing.npy", "--debug"])
    monkeypatch.setenv("NWFLOW_DEBUG", "1")
    with pytest.raises(ValueError, match="no such file"):
        main(["sample", "missing.npy"])


def test_interrupts_leave_no_half_written_file(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: Image.Image, file: Any, *__: Any, **___: Any) -> None:
        Path(file).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Image.Image, "save", interrupted)
    assert main(["sample", "digits", "--n", "2", "--quiet"]) == 130
    assert capsys.readouterr().err.count("\n") == 1
    whole = {"samples.safetensors", "samples.attribution.csv", "samples.attribution.json"}
    assert {p.name for p in Path().iterdir()} == whole


def test_attribution_without_a_second_place_judges_no_copy(folder: Path) -> None:
    points = torch.ones(3, 2)
    samples = sample(NWField(points), 2)
    made = attribution.who_made(samples.points, samples, Support(points))
    assert [(m.copy, m.ratio) for m in made] == [(None, None)] * 2
    assert attribution.summary(made)["copies"] is None and "one place" in attribution.sentence(made)
    out = io.StringIO()
    attribution.table(made)
    assert out.getvalue() == ""


def test_scalar_events_are_sampled(folder: Path) -> None:
    np.save("scalars.npy", np.array([-1.0, 0.5, 3.0]))
    run("sample", "scalars.npy", "--n", "5", "--out", "out.npy", "--quiet")
    away = np.abs(np.load("out.npy")[:, None] - [-1.0, 0.5, 3.0]).min(1)
    assert away.shape == (5,) and (away < 1e-3).all()  # the accuracy of the weights


def test_equal_references_are_sampled(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("same.npy", np.ones((30, 4)))
    run("sample", "same.npy", "--n", "3", "--out", "out.npy")
    assert (np.load("out.npy") == 1.0).all()
    assert "All references are at one place" in capsys.readouterr().out


def test_errors_name_options(line: Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("huge.npy", line.numpy() * 1e200)
    for option, value in (("--n", "0"), ("--steps", "0"), ("--seed", "-1"), ("--stop-at", "0"), ("--smoothing", "-1")):
        assert f"error: {option}: expected" in fails(capsys, "sample", "line.npy", option, value)
    assert "--label NAME says where" in fails(capsys, "sample", "line.npy", "--given", "cat")
    assert "squares do not overflow" in fails(capsys, "describe", "huge.npy")


def test_folder_without_permission_is_refused_first(
    line: Tensor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert fails(capsys, "sample", "line.npy", "--out", "out.npy").endswith("may be written in the folder .\n")


# --- as a process ---------------------------------------------------------------------------------------------------


def start(*argv: str) -> subprocess.Popen[str]:
    code = "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); runpy.run_module('nwflow', run_name='__main__')"
    command = [sys.executable, "-c", code, str(SRC), *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_module_is_a_command(line: Tensor) -> None:
    good, wrong = start("sample", "line.npy", "--n", "2", "--out", "out.csv"), start("sample", "missing.npy")
    (out, err), (nothing, complaint) = good.communicate(), wrong.communicate()
    assert good.returncode == 0 and err == ""
    assert "wrote out.csv, out.attribution.csv, out.attribution.json" in out
    assert len(Path("out.csv").read_text().splitlines()) == 3
    assert wrong.returncode == 2 and nothing == ""
    assert (
        complaint == "nwflow: error: missing.npy: no such file or folder, and no bundled set (digits, fashion-mnist)\n"
    )


def test_who_reads_our_output_may_stop(line: Tensor) -> None:
    process = start("sample", "line.npy", "--n", "2", "--out", "out.csv")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert (process.stderr.read(), process.wait()) == ("", 0)
    assert len(Path("out.csv").read_text().splitlines()) == 3
    process.stderr.close()
