"""Checkpoints: numbers in safetensors, all else in JSON, one folder each, complete or not there at all.

    RUN/config.json                        the run as it was asked for
    RUN/log.jsonl, RUN/tensorboard/
    RUN/checkpoints/step-00001000/
        model.safetensors                  averaged parameters: the model to use
        config.json                        sizes of the network, and the run
        state.safetensors                  last parameters, moments of AdamW, states of random generators
        state.json                         step, seconds, validations, versions

A folder is filled under a temporary name, flushed to the disk and renamed, so a run that is killed leaves whole
checkpoints alone. Nothing is pickled: nothing that is loaded can run code, and a checkpoint of a GPU loads on a CPU.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from nwflow.data import MissingDataError
from nwflow.models import ICFM, ModelConfig
from nwflow.train.config import TrainConfig

FOLDER, MODEL, STATE = "checkpoints", "model.safetensors", "state.safetensors"
PARAMETER = "parameter."
_NAME = re.compile(r"step-(\d{8,})$")


def save(run: Path, step: int, model: Mapping[str, Tensor], state: Mapping[str, Tensor],
         config: Mapping[str, Any], facts: Mapping[str, Any]) -> Path:  # fmt: skip
    """Write the checkpoint of a step and return its folder; one of that step that is there is replaced."""
    from safetensors.torch import save_file

    final = run / FOLDER / f"step-{step:08d}"
    temporary = final.with_name(f".{final.name}.{secrets.token_hex(6)}")
    temporary.mkdir(parents=True)
    try:
        for name, tensors in ((MODEL, model), (STATE, state)):
            save_file({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, temporary / name)
        for name, values in (("config.json", config), ("state.json", facts)):
            (temporary / name).write_text(json.dumps(values, indent=1, allow_nan=False), encoding="utf-8")
        _flush(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _flush(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError:  # some file systems do not sync folders
            if path is not folder:
                raise
        finally:
            os.close(handle)


def checkpoints(run: Path) -> dict[int, Path]:
    """The complete checkpoints of a run by step, in order."""
    folder = run / FOLDER
    found = [(m, p) for p in (folder.iterdir() if folder.is_dir() else ()) if (m := _NAME.match(p.name))]
    return dict(sorted((int(m[1]), p) for m, p in found))


def prune(run: Path, keep: Iterable[int | None]) -> None:
    """Delete all checkpoints but those of the steps ``keep``, and what a killed run left half-written."""
    kept = set(keep)
    for step, path in checkpoints(run).items():
        if step not in kept:
            shutil.rmtree(path)
    for path in (run / FOLDER).glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def read_state(checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Averaged parameters, state tensors and facts of a checkpoint, on the CPU."""
    from safetensors.torch import load_file

    facts = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    return load_file(checkpoint / MODEL), load_file(checkpoint / STATE), facts


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint at ``path``: itself, or of a run the best one that early stopping chose, else the newest.

    Raises:
        FileNotFoundError (also a ValueError): there is none.
    """
    path = Path(path).expanduser()
    if (path / MODEL).is_file():
        return path
    found = checkpoints(path)
    if not found:
        what = "no checkpoint there" if path.exists() else "no such folder"
        raise MissingDataError(f"{path}: {what}; expected the folder of a run or of one of its checkpoints")
    last = found[max(found)]
    chosen = json.loads((last / "state.json").read_text(encoding="utf-8")).get("chosen_step")
    return found.get(chosen, last)


def read_config(path: str | Path) -> TrainConfig:
    """The run that made the checkpoint at ``path`` (or the one of a run)."""
    return TrainConfig.from_dict(
        json.loads((find_checkpoint(path) / "config.json").read_text(encoding="utf-8"))["train"]
    )


def load_model(
    path: str | Path, device: torch.device | str = "cpu", parameters: Literal["average", "last"] = "average"
) -> ICFM:
    """The model of a run or a checkpoint, on any device whatever it was trained on, in evaluation mode.

    Args:
        path: the folder that ``nwflow train`` wrote, or one of its checkpoints.
        parameters: the average over the last steps (what validation measures), or the last step's.

    Raises:
        FileNotFoundError (also a ValueError): no checkpoint. ValueError: one that is damaged or of another network.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if parameters not in ("average", "last"):
        raise ValueError(f"parameters: expected 'average' or 'last', got {parameters!r}")
    folder = find_checkpoint(path)
    try:
        config = ModelConfig.from_dict(json.loads((folder / "config.json").read_text(encoding="utf-8"))["model"])
        tensors = load_file(folder / (MODEL if parameters == "average" else STATE))
        if parameters == "last":
            tensors = {k.removeprefix(PARAMETER): v for k, v in tensors.items() if k.startswith(PARAMETER)}
        model = ICFM(config)
        model.load_state_dict(tensors)
    except (SafetensorError, RuntimeError, KeyError, ValueError) as error:
        raise ValueError(f"{folder}: expected a checkpoint of nwflow train, got one that is damaged: {error}") from None
    return model.to(device).eval()
