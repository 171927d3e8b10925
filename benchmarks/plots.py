"""Pictures of ``results/scale.json`` for the documentation: ``python benchmarks/plots.py`` (needs matplotlib)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
IMAGES = HERE.parent / "docs" / "images"
COLOURS = {
    "nwflow": "#0b6e99", "nwflow 1e-5": "#0b6e99", "nwflow 1e-3": "#5aa7c7", "two products": "#999999",
    "dense": "#c2571a",
    "broadcasting": "#7a5195", "deepinv": "#bc5090", "top 1024": "#58855c",
}  # fmt: skip


def axes(title: str, x: str, y: str, width: float = 5.0) -> tuple[Any, Any]:
    figure, ax = plt.subplots(figsize=(width, 3.6), dpi=150, layout="constrained")
    ax.set(title=title, xlabel=x, ylabel=y, xscale="log", yscale="log")
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    return figure, ax


def save(figure: Any, name: str) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGES / f"{name}.png")
    plt.close(figure)


def growth(rows: dict[str, Any], axis: str, name: str) -> None:
    """Seconds of a call against m or d: early, and after collapse."""
    sizes = [int(k) for k in rows if k.isdigit()]
    for when, title in (("early", "before collapse (h = 3 data scales)"), ("late", "after collapse (h = 0.1)")):
        figure, ax = axes(title, axis, "seconds, 64 queries")
        for method in rows[str(sizes[0])][when]:
            values = [(k, rows[str(k)][when][method]) for k in sizes if method in rows[str(k)][when]]
            ax.plot(*zip(*values, strict=True), "o-", ms=3, color=COLOURS.get(method), label=method)
        ax.legend(fontsize=7, frameon=False)
        save(figure, f"scale-{name}-{when}")


def steps(rows: dict[str, Any]) -> None:
    """Seconds of a step against m, first and last steps of a default run, dense and truncated."""
    sizes = [int(k) for k in rows if k.isdigit()]
    figure, ax = axes("one step of a default run", "support size m", "seconds, 64 samples")
    for engine, style in (("dense", "--"), ("auto", "-")):
        for k, label, colour in ((2, "third step", "#c2571a"), (-2, "last but one", "#0b6e99")):
            values = [rows[str(m)][f"steps_{engine}"][k][1] for m in sizes]
            ax.plot(sizes, values, "o" + style, ms=3, color=colour, label=f"{label}, {engine}")
    first = rows[str(sizes[0])]["steps_auto"][2][1]
    ax.plot(sizes, [first * m / sizes[0] for m in sizes], ":", color="#999999", label="linear in m")
    ax.legend(fontsize=7, frameon=False)
    save(figure, "scale-steps")


def errors(rows: list[dict[str, float]]) -> None:
    figure, ax = axes("error of the denoiser against float64", "t (0 noise, 1 data)", "relative error, worst of 8")
    ax.set_xscale("linear")
    for method in (k for k in rows[0] if k != "t"):
        values = [max(row[method], 1e-9) for row in rows]
        ax.plot([row["t"] for row in rows], values, "o-", ms=3, color=COLOURS.get(method), label=method)
    ax.legend(fontsize=7, frameon=False)
    save(figure, "scale-error")


def truncated(record: dict[str, Any]) -> None:
    """Seconds of each step along the path."""
    rows = record["euler, 50 uniform"]["steps"]
    figure, ax = axes("steps of 50 on a uniform grid, Fashion-MNIST", "t (0 noise, 1 data)", "seconds, 64 samples")
    ax.set_xscale("linear")
    for engine, colour in (("dense", "#c2571a"), ("truncated", "#0b6e99"), ("auto", "#58855c")):
        ax.plot(*zip(*rows[engine], strict=True), "-", color=colour, label=engine)
    ax.legend(fontsize=7, frameon=False)
    save(figure, "scale-truncation")


def main() -> None:
    record = json.loads((HERE / "results" / "scale.json").read_text())
    if "support" in record:
        growth(record["support"], "support size m", "support")
        steps(record["support"])
    if "dimension" in record:
        growth(record["dimension"], "dimension d", "dimension")
    if "error" in record:
        errors(record["error"]["rows"])
    if "truncation" in record:
        truncated(record["truncation"])


if __name__ == "__main__":
    main()
