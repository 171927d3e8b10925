"""Training: closed forms of its pieces, checkpoints that survive a kill, data parallelism, teachers, and errors."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scipy import stats

import train_part
from nwflow import CondOT, Cosine, NWField, Support, VarianceExploding, sample
from nwflow.cli import main
from nwflow.models import ICFM, ICFMField, ModelConfig
from nwflow.tasks import GaussianMixtures, Rings
from nwflow.train import (
    NetworkOptions,
    OptimizerOptions,
    TaskOptions,
    TimeOptions,
    TrainConfig,
    Trainer,
    checkpoints,
    compare,
    denoising_errors,
    load_model,
    read_log,
    train,
)
from nwflow.train.evaluate import bootstrap, paired_ratio
from nwflow.train.schedule import average_decay, draw_times, learning_rate, seeded, update_average
from nwflow.train.teacher import denoiser_target, points_needed

PART = Path(train_part.__file__)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join(["src", *filter(None, [os.environ.get("PYTHONPATH")])])
ROOT = PART.parents[1]


def part(*arguments, **environment):
    command = [sys.executable, str(PART), *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT | environment, stderr=subprocess.PIPE, text=True)


def curve(run):
    """The records of a log without the seconds, which differ from run to run."""
    return [{k: v for k, v in record.items() if k != "seconds"} for record in read_log(run)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was never stopped, and its folder."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes that are compared with it: sums depend on the number of threads
    result = train(train_part.config(), folder)
    torch.set_num_threads(threads)
    return result, folder


# --- the pieces


def test_average_is_the_sum_of_its_closed_form():
    values = [torch.randn(3, dtype=torch.float64) for _ in range(40)]
    average, decays = values[0].clone(), [average_decay(0.9, k) for k in range(40)]
    for value, decay in zip(values, decays):
        update_average([average], [value], decay)
    weights = [(1 - decays[k]) * math.prod(decays[k + 1 :]) for k in range(40)]
    expected = sum(w * v for w, v in zip(weights, values)) + math.prod(decays) * values[0]
    torch.testing.assert_close(average, expected, rtol=1e-13, atol=1e-13)
    assert average_decay(0.0, 5) == 0.0 and average_decay(0.9, 0) == 0.1 and average_decay(0.9, 10**6) == 0.9


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_learning_rate_warms_up_holds_and_decays(schedule):
    options = OptimizerOptions(lr=0.5, warmup=10, schedule=schedule, hold=0.4)
    rates = [learning_rate(options, k, k / 1000) for k in range(1001)]
    assert rates[:10] == pytest.approx([0.05 * (k + 1) for k in range(10)])
    assert set(rates[10:400]) == {0.5}
    halfway = {"cosine": 0.25, "linear": 0.25, "constant": 0.5}[schedule]
    assert rates[700] == pytest.approx(halfway) and rates[1000] == pytest.approx(0.5 * (schedule == "constant"))
    assert learning_rate(options, 2000, 1.3) == rates[1000]  # a budget may be overrun by part of a step
    if schedule == "cosine":
        assert rates[550] == pytest.approx(0.25 * (1 + math.sqrt(0.5)))


@pytest.mark.parametrize("path", [CondOT(), Cosine(), VarianceExploding(0.01, 100.0)], ids=repr)
def test_bandwidths_are_log_uniform(path):
    options = TimeOptions(lowest=0.02, highest=10.0)
    t = draw_times(options, path, 2.0, (500, 8), torch.Generator().manual_seed(0))
    u = torch.log(path(t).bandwidth / 0.04) / math.log(500.0)
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 0.01
    strata = (u * 8).floor().sort(1).values
    assert torch.equal(strata, torch.arange(8.0, dtype=torch.float64).expand(500, 8))  # one in each eighth


def test_uniform_times_are_uniform_inside_both_ends():
    t = draw_times(TimeOptions(times="uniform"), CondOT(), 1.0, (500, 4), torch.Generator().manual_seed(0))
    assert stats.kstest(t.flatten().numpy(), "uniform", args=(1e-3, 0.998)).pvalue > 0.01


def test_bandwidths_that_the_path_lacks_are_refused():
    with pytest.raises(ValueError, match="bandwidth: expected values in"):
        draw_times(TimeOptions(), VarianceExploding(0.5, 2.0), 1.0, (2, 2), torch.Generator().manual_seed(0))


def test_generators_of_different_uses_are_different_and_repeat():
    draws = {n: torch.rand(2, generator=seeded(*n)) for n in [(0, 1, 5, 0), (0, 1, 5, 1), (0, 1, 6, 0), (1, 1, 5, 0)]}
    assert len({tuple(v.tolist()) for v in draws.values()}) == 4
    assert torch.equal(torch.rand(2, generator=seeded(0, 1, 5, 1)), draws[0, 1, 5, 1])


def test_configurations_go_to_json_and_back():
    config = TrainConfig(
        TaskOptions("rings+moons", dim=3, leave_out=("moons",), parameters=("noise=0.2",)),
        NetworkOptions(preset="paper", exact_head="input", width=32),
        OptimizerOptions(budget="2m", lr=1e-4),
        seed=5,
    )
    assert TrainConfig.from_json(config.to_json()) == config
    assert config.changed(lr=0.1, seed=7) == replace(config, optimizer=replace(config.optimizer, lr=0.1), seed=7)
    assert config.task.build().families[0] == Rings(dim=3, noise=0.2)
    with pytest.raises(ValueError, match=r"optimizer: expected settings out of .* got \['rate'\]"):
        TrainConfig.from_dict({"optimizer": {"rate": 1}})


# --- checkpoints and resuming


def test_a_killed_run_resumes_with_the_same_curve_bit_for_bit(whole, tmp_path):
    expected, reference = curve(whole[1]), whole[0]
    folder = tmp_path / "run"
    process = part("train", folder)
    log, deadline = folder / "log.jsonl", time.monotonic() + 60
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") > 8):
        assert time.monotonic() < deadline, "the run wrote no log"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    left = checkpoints.checkpoints(folder)
    assert left and max(left) < 30, "killed too late to prove anything"
    resumed = part("train", folder, "resume")
    assert resumed.communicate()[1] == "" and resumed.returncode == 0
    assert curve(folder) == expected
    mine, theirs = (load_file(checkpoints.find_checkpoint(f) / "state.safetensors") for f in (folder, whole[1]))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert load_model(folder).state_dict().keys() == reference.model.state_dict().keys()


def test_a_run_without_a_folder_is_the_run_with_one(whole):
    torch.set_num_threads(1)
    other = train(train_part.config())
    assert other.checkpoint is None
    for a, b in zip(other.model.state_dict().values(), whole[0].model.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_longer_run_goes_on_and_other_settings_are_refused(whole, tmp_path):
    config, folder = train_part.config(steps=6), tmp_path / "run"
    train(config, folder)
    with pytest.raises(FileExistsError, match="holds a run already"):
        train(config, folder)
    with pytest.raises(ValueError, match=r"lr: the run in .* has 0.002, got 0.1"):
        train(config.changed(lr=0.1), folder, resume=True)
    with pytest.raises(FileNotFoundError, match="no checkpoint there"):
        train(config, tmp_path / "none", resume=True)
    assert train(config.changed(steps=9), folder, resume=True).steps == 9
    assert [r["step"] for r in read_log(folder, "train")] == list(range(1, 10))


def test_loaded_models_are_the_averaged_ones_and_only_newest_checkpoints_stay(whole):
    result, folder = whole
    assert list(checkpoints.checkpoints(folder)) == [30]
    average, last = load_model(folder), load_model(folder, parameters="last")
    for name, value in result.model.state_dict().items():
        assert torch.equal(average.state_dict()[name], value)
    assert any(not torch.equal(a, b) for a, b in zip(average.state_dict().values(), last.state_dict().values()))
    assert not any(p.suffix not in (".safetensors", ".json") for p in result.checkpoint.iterdir())


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(whole, tmp_path, monkeypatch):
    tensors = {"a": torch.ones(2)}
    checkpoints.save(tmp_path, 1, tensors, tensors, {}, {"step": 1})
    monkeypatch.setattr(checkpoints, "_flush", lambda folder: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(tmp_path, 2, tensors, tensors, {}, {"step": 2})
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    (tmp_path / "checkpoints" / ".step-00000003.abc").mkdir()  # what a kill leaves
    assert list(checkpoints.checkpoints(tmp_path)) == [1]
    checkpoints.prune(tmp_path, (1,))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_damaged_checkpoints_are_one_sentence(whole, tmp_path):
    import shutil

    folder = shutil.copytree(whole[0].checkpoint, tmp_path / "step-00000030")
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="expected a checkpoint of nwflow train, got one that is damaged"):
        load_model(folder)


def test_early_stopping_keeps_the_best_model(tmp_path):
    config = train_part.config(steps=200, lr=0.5, warmup=0, clip=0.0).changed(
        validate_every=4, patience=2, checkpoint_steps=0
    )
    result = train(config, tmp_path / "run")
    scores = [(r["score"], r["step"]) for r in read_log(tmp_path / "run", "validation")]
    assert result.stopped_early and result.steps < 200
    assert result.checkpoint.name == f"step-{min(scores)[1]:08d}"
    chosen = load_model(tmp_path / "run").state_dict()
    assert all(torch.equal(chosen[name], value) for name, value in result.model.state_dict().items())


# --- gradients


def test_two_processes_make_the_gradients_of_one(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    ranks = [part("two", tmp_path, 1, RANK=str(r), LOCAL_RANK=str(r), **common) for r in range(2)]
    one = part("one", tmp_path, 2)
    for process in (*ranks, one):
        complaint = process.communicate()[1]
        assert process.returncode == 0, complaint
    a, b = (load_file(tmp_path / f"{name}.safetensors") for name in ("one", "two"))
    assert a.keys() == b.keys() and len(a) > 5
    a = {name: g for name, g in a.items() if g.numel()}  # one smoother has no mixture to choose from
    largest = max(float(v.abs().max()) for v in a.values())
    for name in a:
        assert float((a[name] - b[name]).abs().max()) <= 1e-6 * largest, name


def test_accumulated_batches_are_the_mean_of_their_gradients():
    whole = Trainer(train_part.config(accumulate=2))
    whole.backward(3)
    expected = [torch.zeros_like(p) for p in whole.parameters]
    for j in range(2):
        x0, x1, t, tasks, _ = whole.draw(3, j)
        loss = whole.model.loss(x0, x1, t, tasks.support, tasks.mask).mean() / 2
        for total, g in zip(expected, torch.autograd.grad(loss, whole.parameters, allow_unused=True)):
            total += 0 if g is None else g
    for p, g in zip(whole.parameters, expected):
        torch.testing.assert_close(torch.zeros_like(p) if p.grad is None else p.grad, g, rtol=1e-4, atol=1e-7)


# --- teachers


@pytest.mark.parametrize("h", [0.3, 1.0, 4.0])
def test_the_sample_teacher_is_unbiased_for_the_oracle_with_less_variance(h):
    options, path = TimeOptions(teacher="sample", teacher_points=40), CondOT()
    law = GaussianMixtures(dim=1, min_components=2, max_components=2).sample(1, 1, 1, seeded(3), torch.float64).law
    index, t = torch.zeros(8000, dtype=torch.long), path.time_at(h)
    laws, generator = law.select(index), seeded(4)
    k = torch.randint(2, (8000, 40), generator=generator)
    means, factors = laws.means.gather(1, k[..., None]), laws.factors[..., 0].gather(1, k[..., None])
    points = means + factors * torch.randn(8000, 40, 1, generator=generator, dtype=torch.float64)
    tasks = GaussianMixtures(dim=1).sample(8000, 1, 1, seeded(5), torch.float64)
    tasks = replace(tasks, target=points, law=laws)
    x1 = points[:, :1]
    at = path(t)
    x = at.alpha * x1 + at.sigma * torch.randn(x1.shape, generator=generator, dtype=torch.float64)
    times = torch.full((8000, 1), t, dtype=torch.float64)
    taught = denoiser_target(options, tasks, x, times, path)
    exact = denoiser_target(TimeOptions(teacher="oracle"), tasks, x, times, path)
    for probe in (torch.ones_like(x), x, x.square(), (x > x.mean()).double()):
        error = ((taught - exact) * probe).flatten()
        assert abs(error.mean()) < 4 * error.std() / math.sqrt(8000)  # E[target | x] is the oracle, not only on average
    assert (taught - exact).square().mean() < (x1 - exact).square().mean()


def test_teachers_are_what_their_names_say():
    assert points_needed(TimeOptions(teacher="sample", teacher_points=9), 4) == 9
    assert points_needed(TimeOptions(), 4) == 4
    tasks = Rings().sample(2, 3, 9, seeded(1), torch.float64)
    x, t = tasks.target[:, :4], torch.full((2, 4), 0.5, dtype=torch.float64)
    sampled = denoiser_target(TimeOptions(teacher="sample"), tasks, x, t, CondOT())
    expected = NWField(Support.batch(tasks.target), CondOT()).denoise(x, 0.5)
    torch.testing.assert_close(sampled, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="oracle: expected tasks with a known posterior mean"):
        train(train_part.config().changed(teacher="oracle"))


# --- evaluation


def test_the_ratio_is_paired_and_its_interval_narrower_than_that_of_its_parts():
    generator = torch.Generator().manual_seed(0)
    under = 1 + 3 * torch.rand(100, generator=generator, dtype=torch.float64)
    value, low, high = paired_ratio(2 * under + 0.01 * torch.rand(100, generator=generator), under)
    assert low < value < high and value == pytest.approx(2, abs=0.01) and high - low < 0.01
    means = bootstrap(under, 0)
    assert means.std() == pytest.approx(float(under.std()) / 10, rel=0.05)  # the standard error of a mean
    assert paired_ratio(under, under - under.mean() + 0.001) is None


class Oracle(ICFM):
    """The posterior mean of known tasks in the place of a network."""

    def __init__(self, tasks):
        super().__init__(ModelConfig(dim=tasks.event_shape[0]))
        self.tasks = tasks

    def denoise(self, x, t, support, mask=None):
        return self.tasks.oracle(x, t, self.path)


def test_the_oracle_has_the_smallest_error_and_the_linear_denoiser_a_score_of_one():
    tasks = GaussianMixtures(dim=2, min_components=1, max_components=1, mean_scale=0.0).sample(
        200, 500, 32, seeded(0), torch.float64
    )
    oracle, untrained = (denoising_errors(m, tasks, 1.0, bins=4, plugin=True) for m in (Oracle(tasks), Oracle(tasks)))
    assert oracle == untrained
    assert all(e <= p * 1.001 for e, p in zip(oracle.errors, oracle.plugin)) and oracle.score < 0.95
    linear = ICFM(ModelConfig(dim=2))  # before training: the Wiener denoiser of each support
    assert denoising_errors(linear, tasks, 1.0, bins=4).score == pytest.approx(1.0, abs=0.06)


def test_models_are_fields_and_comparison_counts_tasks(whole):
    model = whole[0].model
    found = compare(model, Rings(), "3-8", tasks=5, samples=20, steps=3, batch=2)
    assert len(found.per_task) == len(found.baseline_per_task) == 5
    assert found.mmd2[0] == pytest.approx(sum(found.per_task) / 5)
    again = compare(model, Rings(), "3-8", tasks=5, samples=20, steps=3, batch=2)
    assert found == again and json.loads(json.dumps(found.to_dict()))["mmd2"] == list(found.mmd2)
    points = torch.randn(6, 2)
    field = ICFMField(model, points)
    assert sample(field, 4, steps=6).points.isfinite().all()


# --- command line


def test_command_line_trains_evaluates_and_samples(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = ["--width", "8", "--heads", "2", "--layers", "1", "--batch", "2", "--targets", "4"]
    command = ["train", "--tasks", "spherical_shells", "--dim", "3", "--support", "5", "--out", "run", "--quiet"]
    assert main([*command, *sizes, "--steps", "3"]) == 0
    config = TrainConfig.from_json(Path("run/config.json").read_text())
    assert (config.task.dim, config.task.support, config.network.width) == (3, "5", 8)
    assert list(Path("run/tensorboard").iterdir())
    assert main(["train", "--out", "run", "--resume", "--steps", "5", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["evaluate", "run", "--tasks", "3", "--samples", "8", "--steps", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["mmd2"]) == len(found["baseline_mmd2"]) == 3 and "ratio" in found
    torch.save(torch.randn(5, 3), "points.pt")
    assert main(["sample", "points.pt", "--model", "run", "--n", "3", "--out", "s.npz", "--quiet"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "expected -o"),
        (["train", "--out", "r", "--tasks", "ring"], "--tasks: expected one of gaussian_mixtures"),
        (["train", "--out", "r", "--support", "5-2"], "support: expected a range"),
        (["train", "--out", "r", "--budget", "soon"], "budget: expected a time such as 30s"),
        (["train", "--out", "r", "--parameters", "noise"], "--parameters: expected NAME=VALUE"),
        (["train", "--out", "r", "--preset", "own"], "--preset"),
        (["train", "--out", "r", "--lr", "-1"], "--lr: expected a finite number"),
        (["train", "--out", "r", "--resume"], "r: no checkpoint there"),
        (["evaluate", "nothing"], "nothing: no such folder"),
        (["sample", "digits", "--model", "nothing"], "nothing: no such folder"),
        (["sample", "digits", "--model", "nothing", "--smoothing", "0.1"], "--model: expected no path, smoothing"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_command_line_errors_are_one_line(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
