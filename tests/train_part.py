"""What a process of its own does for tests/test_train.py: a run that may be killed, or the gradients of one rank."""

import sys
from pathlib import Path

import torch

from nwflow.train import CheckOptions, NetworkOptions, OptimizerOptions, TaskOptions, TrainConfig, Trainer, train


def config(**optimizer):
    """A run small enough for a test; every step is logged."""
    return TrainConfig(
        TaskOptions("rings", support="3-8", targets=8, batch=4),
        NetworkOptions(width=8, heads=2, layers=1, smoothers=1),
        OptimizerOptions(**{"steps": 30, "warmup": 5, **optimizer}),
        check=CheckOptions(validate_every=12, validation_tasks=4, checkpoint_steps=5, log_every=1, tensorboard=False),
        device="cpu",
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, folder = sys.argv[1], Path(sys.argv[2])
    if what == "train":
        train(config(), folder, resume="resume" in sys.argv)
    else:
        trainer = Trainer(config(accumulate=int(sys.argv[3])))
        trainer.backward(0)
        if trainer.accelerator.is_main_process:
            from safetensors.torch import save_file

            gradients = {name: p.grad for name, p in trainer.named.items() if p.grad is not None}
            save_file(gradients, folder / f"{what}.safetensors")
        trainer.accelerator.end_training()
