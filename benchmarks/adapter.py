r"""Is a trained adapter a kernel smoother? A small diffusers UNet with an IP-Adapter, trained here and probed.

    python benchmarks/adapter.py --budget 600      # trains for 600 s in all; run again with more to go on

Task: an image of Fashion-MNIST from four references of its class, x_t = alpha x + sigma eps (t = 0 noise, t = 1 data),
noise predicted, no labels and no text (one constant token). Pixels are stacked 2 x 2 into channels (4 x 14 x 14). The
image encoder is fixed: principal components of the training images. The adapter's projection of an image to tokens, its
keys and values, and the UNet are trained together from random weights, through diffusers' own classes. References and
targets of the probe are images that training never saw.

Reported for every denoising step: each head's attention over the references' tokens against Nadaraya-Watson weights at
h^2 = sqrt(d) (Spearman by row, Pearson, total variation), the same with the key-norm prior (rounding), the null of
permuted keys, what agreement on the nearest key alone would give, and n_eff; the same for the untrained network. And
whether references matter at all: the loss with the right ones, with those of another class, and with the adapter off.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from _common import machine, write_json
from diffusers import DDIMScheduler, UNet2DConditionModel
from diffusers.utils import logging
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nwflow import load_support
from nwflow.probe import ProbeResult, record_adapter

HERE = Path(__file__).parent
FIELDS = (
    "spearman", "spearman_null", "pearson", "pearson_null", "pearson_nearest", "total_variation", "same_nearest",
    "n_eff", "n_eff_nw", "total_variation_with_prior", "prior_spread",
)  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """Sizes of the experiment; everything drawn comes from ``seed``."""

    widths: tuple[int, ...] = (32, 64)
    cross: int = 64  # width of the tokens
    features: int = 64  # principal components
    references: int = 4
    batch: int = 32
    lr: float = 1e-3
    held_out: float = 0.1
    seed: int = 0


class Data:
    """Images in [-1, 1] with features; references and targets of one class, from the training or the held-out part."""

    def __init__(self, setup: Setup, limit: int | None = None) -> None:
        support = load_support("fashion-mnist", limit=limit)
        assert support.labels is not None
        pixels = 2.0 * support.points[:, None].float() - 1.0
        self.images = nn.functional.pixel_unshuffle(pixels, 2)
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(setup.seed))
        cut = int(len(order) * setup.held_out)
        flat = pixels.flatten(1)
        train = flat[order[cut:]]
        centre = train.mean(0)
        _, scale, axes = torch.pca_lowrank(train[:10_000] - centre, q=setup.features, niter=4)
        self.features = (flat - centre) @ axes / (scale / min(len(train), 10_000) ** 0.5)  # unit variance
        self.rows = {
            part: [rows[support.labels[rows] == c] for c in range(10)]
            for part, rows in (("train", order[cut:]), ("test", order[:cut]))
        }

    def draw(self, part: str, n: int, r: int, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Targets ``(n, 4, 14, 14)``, features of their references ``(n, r, f)`` and of references of other classes."""
        classes = torch.randint(10, (n,), generator=g).tolist()
        others = [(c + int(torch.randint(1, 10, (), generator=g))) % 10 for c in classes]
        right, wrong = [], []
        for c, other in zip(classes, others, strict=True):
            rows = self.rows[part][c]
            right.append(rows[torch.randperm(len(rows), generator=g)[: r + 1]])
            rows = self.rows[part][other]
            wrong.append(rows[torch.randint(len(rows), (r,), generator=g)])
        picked = torch.stack(right)
        return self.images[picked[:, 0]], self.features[picked[:, 1:]], self.features[torch.stack(wrong)]


def build(setup: Setup) -> UNet2DConditionModel:
    torch.manual_seed(setup.seed)
    blocks = len(setup.widths)
    unet = UNet2DConditionModel(
        sample_size=14, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=setup.widths,
        down_block_types=("CrossAttnDownBlock2D",) * blocks, up_block_types=("CrossAttnUpBlock2D",) * blocks,
        norm_num_groups=8, cross_attention_dim=setup.cross, attention_head_dim=4,
    )  # fmt: skip
    attention, i = {}, 1
    for name in unet.attn_processors:
        if name.endswith("attn2.processor"):
            inner = unet.get_submodule(name.removesuffix(".processor")).inner_dim
            attention |= {f"{i}.to_{p}_ip.weight": nn.Linear(setup.cross, inner).weight.data for p in ("k", "v")}
            i += 2
    first = nn.Linear(setup.features, 4 * setup.cross)
    projection = {"proj.weight": first.weight.data, "proj.bias": first.bias.data}
    projection |= {"norm.weight": torch.ones(setup.cross), "norm.bias": torch.zeros(setup.cross)}
    unet._load_ip_adapter_weights([{"image_proj": projection, "ip_adapter": attention}], low_cpu_mem_usage=False)
    return unet


def predict(unet: UNet2DConditionModel, x: Tensor, timestep: Tensor, features: Tensor) -> Tensor:
    text = x.new_zeros(len(x), 1, unet.config.cross_attention_dim)
    return unet(x, timestep, text, added_cond_kwargs={"image_embeds": [features]}).sample


def scheduler() -> DDIMScheduler:
    return DDIMScheduler(beta_schedule="squaredcos_cap_v2", clip_sample=True)


def noisy(images: Tensor, timestep: Tensor, noise: Tensor) -> Tensor:
    return scheduler().add_noise(images, noise, timestep)  # type: ignore[arg-type]


def train(
    unet: UNet2DConditionModel, data: Data, setup: Setup, budget: float, folder: Path, every: float = 60.0
) -> Any:
    """Train until ``budget`` seconds in all were spent, this call and those before it; weights and state are kept."""
    state_file, weights_file, adam_file = (folder / n for n in ("state.json", "weights.safetensors", "adam.pt"))
    state: dict[str, Any] = {"setup": json.loads(json.dumps(asdict(setup))), "seconds": 0.0, "steps": 0, "loss": []}
    optimizer = torch.optim.Adam(unet.parameters(), lr=setup.lr)
    if state_file.exists():
        found = json.loads(state_file.read_text())
        if found["setup"] != state["setup"]:
            raise ValueError(f"{folder}: expected a run of {state['setup']}, got {found['setup']}; name another folder")
        state = found
        unet.load_state_dict(load_file(weights_file))
        optimizer.load_state_dict(torch.load(adam_file, weights_only=True))
    unet.train()
    begin, before, saved, recent = time.monotonic(), state["seconds"], time.monotonic(), []

    def save() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        state["seconds"] = before + time.monotonic() - begin
        if recent:
            state["loss"].append([state["steps"], mean(recent)])
            recent.clear()
        save_file({k: v.contiguous() for k, v in unet.state_dict().items()}, weights_file)
        torch.save(optimizer.state_dict(), adam_file)
        state_file.write_text(json.dumps(state, indent=1) + "\n")

    while before + time.monotonic() - begin < budget:
        g = torch.Generator().manual_seed(setup.seed * 1_000_003 + state["steps"])  # the same batches after a restart
        images, features, _ = data.draw("train", setup.batch, setup.references, g)
        timestep = torch.randint(1000, (setup.batch,), generator=g)
        noise = torch.randn(images.shape, generator=g)
        loss = (predict(unet, noisy(images, timestep, noise), timestep, features) - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        state["steps"] += 1
        recent.append(loss.item())
        if time.monotonic() - saved > every:
            save()
            saved = time.monotonic()
            print(f"{state['seconds']:.0f} s, step {state['steps']}, loss {state['loss'][-1][1]:.4f}", flush=True)
    if recent or not state_file.exists():
        save()
    return state


@torch.no_grad()
def use_of_references(
    unet: UNet2DConditionModel, data: Data, setup: Setup, n: int, repeats: int = 8
) -> dict[str, float]:
    """Held-out loss with references of the right class, of another class, and with the adapter off; equal noise."""
    unet.eval()
    sums = {"right": 0.0, "another class": 0.0, "adapter off": 0.0}
    for i in range(repeats):
        g = torch.Generator().manual_seed(10_000 + i)
        images, right, wrong = data.draw("test", n, setup.references, g)
        timestep, noise = torch.randint(1000, (n,), generator=g), torch.randn(images.shape, generator=g)
        x = noisy(images, timestep, noise)
        for name, features, scale in (
            ("right", right, 1.0),
            ("another class", wrong, 1.0),
            ("adapter off", right, 0.0),
        ):
            set_scale_of_unet(unet, scale)
            sums[name] += float((predict(unet, x, timestep, features) - noise).square().mean()) / repeats
    set_scale_of_unet(unet, 1.0)
    return sums


def set_scale_of_unet(unet: UNet2DConditionModel, scale: float) -> None:
    for processor in unet.attn_processors.values():
        if hasattr(processor, "to_k_ip"):
            processor.scale = [scale]


@torch.no_grad()
def probe(unet: UNet2DConditionModel, data: Data, setup: Setup, n: int, steps: int) -> ProbeResult:
    """Denoise n held-out tasks from noise, recorded."""
    unet.eval()
    ddim, g = scheduler(), torch.Generator().manual_seed(77)
    ddim.set_timesteps(steps)
    _, features, _ = data.draw("test", n, setup.references, g)
    x = torch.randn(n, 4, 14, 14, generator=g)
    with record_adapter(unet, scheduler=ddim, keep="statistics", queries="auto") as recording:
        for timestep in ddim.timesteps:
            x = ddim.step(predict(unet, x, timestep, features), timestep, x).prev_sample  # type: ignore[union-attr, arg-type]
    return recording.compare()


def by_step(result: ProbeResult) -> list[dict[str, Any]]:
    """Means over heads and layers for every step; the share of heads above 0.9."""
    rows = []
    for step in sorted({h.step for h in result.heads}):
        heads = result.select(step=step)
        row: dict[str, Any] = {"step": step, "t": heads[0].t, "alpha": heads[0].alpha, "sigma": heads[0].sigma}
        for name in FIELDS:
            known = [v for h in heads if (v := getattr(h, name)) is not None]
            row[name] = mean(known) if known else None
        row["identity_error"] = max(h.identity_error for h in heads)
        row["above_0.9"] = mean(h.spearman is not None and h.spearman > 0.9 for h in heads)
        rows.append(row)
    return rows


def plot(record: dict[str, Any], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), dpi=150, layout="constrained")
    for name, style in (("trained", "-"), ("untrained", ":")):
        rows = record[name]
        t = [r["t"] for r in rows]
        left.plot(t, [r["spearman"] for r in rows], style, color="#0b6e99", label=f"Spearman, {name}")
        left.plot(t, [r["pearson"] for r in rows], style, color="#c2571a", label=f"Pearson, {name}")
        right.plot(t, [r["n_eff"] for r in rows], style, color="#0b6e99", label=f"attention, {name}")
        right.plot(t, [r["n_eff_nw"] for r in rows], style, color="#7a5195", label=f"NW, {name}")
    rows = record["trained"]
    t = [r["t"] for r in rows]
    left.plot(t, [r["spearman_null"] for r in rows], "--", color="#999999", label="null, 95 % (Spearman)")
    left.plot(t, [r["pearson_nearest"] for r in rows], "-.", color="#58855c", label="nearest key alone (Pearson)")
    left.set(xlabel="t (0 noise, 1 data)", ylabel="correlation with NW weights", ylim=(-0.4, 1.05))
    right.set(xlabel="t (0 noise, 1 data)", ylabel="effective number of tokens")
    for ax in (left, right):
        ax.legend(fontsize=6, frameon=False)
        ax.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    plt.close(figure)


def experiment(
    setup: Setup, budget: float, folder: Path, *, n: int = 16, steps: int = 50, limit: int | None = None
) -> dict[str, Any]:
    data = Data(setup, limit)
    untrained = by_step(probe(build(setup), data, setup, n, steps))
    unet = build(setup)
    state = train(unet, data, setup, budget, folder)
    result = probe(unet, data, setup, n, steps)
    (folder / "probe.json").write_text(result.to_json())
    return {
        "machine": machine(),
        "setup": asdict(setup),
        "parameters": sum(p.numel() for p in unet.parameters()),
        "training": {k: state[k] for k in ("seconds", "steps", "loss")},
        "loss": use_of_references(unet, data, setup, 4 * n),
        "trained": by_step(result),
        "untrained": untrained,
        "heads_above_0.9": result.fraction_above(0.9),
        "layers": [{"layer": x.layer, "n_eff": x.n_eff, "verdict": x.verdict, "text": x.text} for x in result.layers],
        "notes": result.notes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds of training in all, earlier runs included")
    parser.add_argument(
        "--folder", type=Path, default=HERE / "runs" / "adapter", help="weights and state, to go on from"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results" / "adapter.json")
    parser.add_argument("--image", type=Path, default=HERE.parent / "docs" / "images" / "probe-adapter.png")
    parser.add_argument("--n", type=int, default=16, help="held-out tasks that are probed")
    parser.add_argument("--steps", type=int, default=50, help="denoising steps")
    parser.add_argument("--limit", type=int, default=None, help="first images of the data only")
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    logging.set_verbosity_error()
    if args.threads:
        torch.set_num_threads(args.threads)
    record = experiment(Setup(), args.budget, args.folder, n=args.n, steps=args.steps, limit=args.limit)
    write_json(args.out, record)
    plot(record, args.image)
    rows, loss = record["trained"], record["loss"]
    print(f"{record['training']['steps']} steps; held-out loss {loss}")
    for row in rows[:: max(1, len(rows) // 10)]:
        print(
            "  ".join(
                f"{k} {row[k]:.3f}" for k in ("t", "spearman", "spearman_null", "pearson", "pearson_nearest", "n_eff")
            )
        )


if __name__ == "__main__":
    main()
