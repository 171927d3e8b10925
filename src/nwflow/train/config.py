"""What a training run is: frozen dataclasses that are the flags of the command line and the JSON of a checkpoint alike.

Times run from noise (t = 0) to data (t = 1); bandwidths are h = sigma / alpha in units of the tasks' typical scale.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, cast, get_type_hints

from nwflow.models import ModelConfig
from nwflow.tasks import Family, make_family, parse_sizes

C = TypeVar("C")
DEFAULT_STEPS = 2000


@dataclass(frozen=True)
class TaskOptions:
    """What is learned from."""

    tasks: str = "spherical_shells"
    """Family of tasks, several joined by +, or a labelled file whose classes are tasks."""
    dim: int | None = None
    """Coordinates of a point, for families that have a choice."""
    support: str = "50"
    """Size of a support: N, a range LOW-HIGH, or a list A,B,..."""
    targets: int = 64
    """Points of each task that a step learns to generate."""
    batch: int = 32
    """Tasks of a step, on each process and in each part of an accumulated step."""
    leave_out: tuple[str, ...] = ()
    """Families that only the test sees, of several that are joined by +."""
    parameters: tuple[str, ...] = ()
    """Further parameters of the family, as NAME=VALUE."""
    label: str | None = None
    """Array or column with labels, of a file."""
    key: str | None = None
    """Array, column of vectors, or split, of a file."""

    def build(self) -> Family:
        """The family; ValueError for what does not fit."""
        parse_sizes(self.support)
        for name in ("targets", "batch"):
            _at_least(self, name, 1)
        options = {name: getattr(self, name) for name in ("label", "key") if getattr(self, name) is not None}
        values = dict(_assigned(text) for text in self.parameters)
        return make_family(self.tasks, dim=self.dim, leave_out=self.leave_out, parameters=values, options=options)


@dataclass(frozen=True)
class NetworkOptions:
    """The network; what is left out is what the preset says."""

    preset: Literal["preconditioned", "paper"] = "preconditioned"
    """preconditioned: the posterior mean in units of the support; paper: plain cross-attention to the velocity."""
    width: int | None = None
    """Width of a token."""
    heads: int = 4
    """Attention heads."""
    layers: int | None = None
    """Cross-attention layers."""
    mlp_ratio: float | None = None
    """Width of a feed-forward layer over that of a token."""
    self_layers: int = 0
    """Self-attention layers among the references."""
    exact_head: Literal["none", "input", "add", "both"] = "none"
    """The frozen exact field, for the preset paper."""
    smoothers: int = 4
    """Kernel smoothers of the support, for the preset preconditioned."""
    qk_norm: bool = False
    """Normalise queries and keys."""
    gaussian_logits: bool = False
    """Attention by distance in place of dot products."""
    scale: float | None = None
    """Typical scale of a task in data units; measured on a batch when left out."""
    path: Literal["condot", "cosine", "variance_preserving", "variance_exploding"] = "condot"
    """The Gaussian path."""
    sigma_min: float = 0.0
    """Noise left at t = 1, of condot."""

    def build(self, dim: int, scale: float) -> ModelConfig:
        """The model of points with ``dim`` numbers, from tasks of typical scale ``scale``."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return ModelConfig(**{**values, "dim": dim, "scale": scale if self.scale is None else self.scale})


@dataclass(frozen=True)
class OptimizerOptions:
    """How it is fitted: AdamW with warm-up, a constant rate and a decay to 0."""

    steps: int | None = None
    """Steps of the run (2000 without a budget)."""
    budget: str | None = None
    """Time of the run, as 30s, 2m or 1h; the decay follows it, and it ends by whichever of the two is first."""
    lr: float = 2e-3
    """Learning rate after warm-up."""
    warmup: int = 50
    """Steps of linear warm-up."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay to 0 over what follows the constant part."""
    hold: float = 0.3
    """Share of the run before the decay starts."""
    weight_decay: float = 0.01
    """Of AdamW, decoupled."""
    beta2: float = 0.99
    """Of AdamW's second moment."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 for any."""
    ema: float = 0.995
    """Decay of the average of the parameters that the model is; 0 for the last ones."""
    accumulate: int = 1
    """Batches whose gradients make one step."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Mixed precision."""

    def __post_init__(self) -> None:
        for name, least in {"warmup": 0, "accumulate": 1}.items():
            _at_least(self, name, least)
        if self.steps is not None:
            _at_least(self, "steps", 1)
        for name in ("hold", "ema", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a number in [0, 1), got {getattr(self, name)}")
        for name in ("lr", "weight_decay", "clip"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: expected a finite number of at least 0, got {getattr(self, name)}")
        _ = self.seconds

    @property
    def seconds(self) -> float | None:
        """The budget in seconds, None without."""
        return None if self.budget is None else parse_duration(self.budget)

    @property
    def last_step(self) -> int | None:
        """The number of steps, None where time alone ends the run."""
        return DEFAULT_STEPS if self.steps is None and self.budget is None else self.steps


@dataclass(frozen=True)
class TimeOptions:
    """Which times are learned, and what is regressed on."""

    times: Literal["log_bandwidth", "uniform"] = "log_bandwidth"
    """log_bandwidth: log-uniform in h = sigma / alpha between lowest and highest; uniform: in t."""
    lowest: float = 0.02
    """Smallest bandwidth, in scales of the tasks."""
    highest: float = 20.0
    """Largest bandwidth, in scales of the tasks."""
    teacher: Literal["none", "sample", "oracle"] = "none"
    """What is learned: the points themselves, the exact field of many points of a task, or its posterior mean."""
    teacher_points: int = 512
    """Points of a task for the teacher "sample"."""

    def __post_init__(self) -> None:
        if not 0 < self.lowest < self.highest < float("inf"):
            raise ValueError(f"lowest, highest: expected 0 < lowest < highest, got {self.lowest}, {self.highest}")
        _at_least(self, "teacher_points", 1)


@dataclass(frozen=True)
class CheckOptions:
    """What is measured and kept on the way."""

    validate_every: int = 500
    """Steps between validations; 0 for one at the end alone."""
    validation_tasks: int = 64
    """Tasks of a validation."""
    patience: int = 0
    """Validations without improvement before the run ends early, with the best model; 0 for never."""
    mmd_tasks: int = 0
    """Tasks whose samples are compared at each validation; 0 for none."""
    checkpoint_every: float = 120.0
    """Seconds between checkpoints."""
    checkpoint_steps: int = 0
    """Steps between checkpoints; 0 for by time alone."""
    log_every: int = 20
    """Steps between lines of the log."""
    tensorboard: bool = True
    """Write TensorBoard files."""

    def __post_init__(self) -> None:
        least = {"validate_every": 0, "validation_tasks": 1, "patience": 0, "mmd_tasks": 0}
        for name, value in {**least, "log_every": 1, "checkpoint_steps": 0}.items():
            _at_least(self, name, value)
        if not self.checkpoint_every > 0:
            raise ValueError(f"checkpoint_every: expected a positive number of seconds, got {self.checkpoint_every}")


@dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Example:
        >>> config = TrainConfig(TaskOptions("rings", support="5-20"))
        >>> TrainConfig.from_json(config.to_json()) == config
        True
    """

    task: TaskOptions = field(default_factory=TaskOptions)
    network: NetworkOptions = field(default_factory=NetworkOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    time: TimeOptions = field(default_factory=TimeOptions)
    check: CheckOptions = field(default_factory=CheckOptions)
    seed: int = 0
    """Seed of the parameters and of all data: those of a step depend on it and the step's number alone."""
    device: str = "auto"
    """auto, or cpu where there is an accelerator too."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed: expected an integer in [0, 2^63), got {self.seed}")
        if self.device not in ("auto", "cpu"):
            raise ValueError(f"device: expected 'auto' or 'cpu', got {self.device!r}")

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of JSON types."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """The inverse of :meth:`to_dict`; ValueError that names a setting that is unknown."""
        return _from_dict(cls, values, "")

    def to_json(self) -> str:
        """Indented JSON."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        """The inverse of :meth:`to_json`."""
        return cls.from_dict(json.loads(text))

    def flat(self) -> dict[str, Any]:
        """Every setting by its own name."""
        out: dict[str, Any] = {}
        for name, value in ((f.name, getattr(self, f.name)) for f in fields(self)):
            out |= {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else {name: value}
        return out

    def changed(self, **settings: Any) -> TrainConfig:
        """The same run with these settings, each by its own name, in place of its own."""
        parts: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            names = {g.name for g in fields(value)} if is_dataclass(value) else set()
            parts[f.name] = (
                replace(cast(Any, value), **{k: v for k, v in settings.items() if k in names}) if names
                else settings.get(f.name, value)
            )  # fmt: skip
        if unknown := set(settings) - set(self.flat()):
            raise ValueError(f"settings: expected names out of {', '.join(self.flat())}, got {', '.join(unknown)}")
        return TrainConfig(**parts)


def _from_dict(cls: type[C], values: dict[str, Any], where: str) -> C:
    hints, out = get_type_hints(cls), {}
    if not isinstance(values, dict) or (unknown := set(values) - set(hints)):
        got = sorted(unknown) if isinstance(values, dict) else values  # pyright: ignore[reportPossiblyUnbound]
        raise ValueError(f"{where or 'config'}: expected settings out of {', '.join(hints)}, got {got}")
    for name, value in values.items():
        if is_dataclass(hints[name]):
            value = _from_dict(hints[name], value, name)  # type: ignore[arg-type]
        out[name] = tuple(value) if isinstance(value, list) else value
    return cls(**out)


def parse_duration(text: str) -> float:
    """Seconds of 30s, 2m, 1.5h or a plain number of seconds.

    >>> parse_duration("90s"), parse_duration("2m"), parse_duration("5")
    (90.0, 120.0, 5.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?", text.strip())
    seconds = float(match[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600}[match[2] or "s"] if match else 0.0
    if not seconds > 0:
        raise ValueError(f"budget: expected a time such as 30s, 2m or 1h, got {text!r}")
    return seconds


def _assigned(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"parameters: expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        raise ValueError(f"parameters: expected a number after {name}=, got {value!r}") from None


def _at_least(options: Any, name: str, least: int) -> None:
    value = getattr(options, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
