"""``benchmarks/adapter.py`` at a tiny scale: it learns, goes on where it stopped, and its records obey the identity."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

pytest.importorskip("diffusers")
FILE = Path(__file__).parents[1] / "benchmarks" / "adapter.py"


@pytest.fixture(scope="module")
def module() -> Any:
    sys.path.insert(0, str(FILE.parent))  # benchmarks import one another
    try:
        spec = importlib.util.spec_from_file_location("adapter_experiment", FILE)
        assert spec is not None and spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        sys.modules["adapter_experiment"] = found
        spec.loader.exec_module(found)
    finally:
        sys.path.remove(str(FILE.parent))
    return found


@pytest.fixture(scope="module")
def data(module: Any) -> Any:
    try:
        return module.Data(tiny(module), limit=600)
    except (ValueError, OSError) as error:
        pytest.skip(f"Fashion-MNIST is not installed: {error}")


def tiny(module: Any) -> Any:
    return module.Setup(widths=(8, 16), cross=16, features=16, references=2, batch=4)


def test_references_are_of_the_target_class_and_held_out(module: Any, data: Any) -> None:
    images, right, wrong = data.draw("test", 6, 2, torch.Generator().manual_seed(0))
    assert images.shape == (6, 4, 14, 14)
    train = torch.cat(data.rows["train"])
    held_out = torch.cat(data.rows["test"])
    assert not set(train.tolist()) & set(held_out.tolist()) and len(train) + len(held_out) == 600

    def classes(features: torch.Tensor) -> list[int]:
        where = [int((data.features == f).all(-1).nonzero()[0]) for f in features.flatten(0, 1)]
        assert set(where) <= set(held_out.tolist())
        return [next(c for c, rows in enumerate(data.rows["test"]) if i in rows) for i in where]

    first, other = classes(right), classes(wrong)
    assert first[::2] == first[1::2] and all(a != b for a, b in zip(first, other))
    assert data.features[train].var(0).mean().item() == pytest.approx(1.0, rel=0.05)


def test_training_goes_on_where_it_stopped(module: Any, data: Any, tmp_path: Path, monkeypatch: Any) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))  # a second a look: steps are counted
    setup, whole, parts = tiny(module), tmp_path / "whole", tmp_path / "parts"
    once = module.build(setup)
    steps = module.train(once, data, setup, 16.0, whole, every=1e9)["steps"]
    first = module.build(setup)
    done = module.train(first, data, setup, 8.0, parts, every=1e9)["steps"]
    again = module.build(setup)
    budget, at = 8.0, done
    while at < steps:
        budget += 1.0
        at = module.train(again, data, setup, budget, parts, every=1e9)["steps"]
    assert 0 < done < steps == at
    for (name, a), b in zip(once.state_dict().items(), again.state_dict().values()):
        torch.testing.assert_close(a, b, msg=name)
    with pytest.raises(ValueError, match="name another folder"):
        module.train(again, data, module.Setup(), 1.0, parts)


def test_the_record_of_an_experiment(module: Any, data: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "Data", lambda setup, limit: data)
    record = module.experiment(tiny(module), 0.5, tmp_path / "run", n=2, steps=3)
    rows = record["trained"]
    assert [r["step"] for r in rows] == [0, 1, 2] and rows[0]["t"] < rows[1]["t"] < rows[2]["t"]
    assert max(r["identity_error"] for r in rows) < 1e-5
    assert all(1.0 <= r["n_eff"] <= 8.0 + 1e-6 and r["above_0.9"] <= 1.0 for r in rows)
    assert record["training"]["steps"] > 0 and set(record["loss"]) == {"right", "another class", "adapter off"}
    assert any("concatenated and not averaged: 2" in note for note in record["notes"])
    module.write_json(tmp_path / "out.json", record)
    pytest.importorskip("matplotlib")
    module.plot(record, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 1000
