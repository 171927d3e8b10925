"""What a probe costs: the run of attention layers with a streaming recording over the run without, and its memory.

A layer projects, attends and projects back, as those of image models do; plain and probed runs take turns, and CPU time
counts, the comparison of all heads included. The bar is twice the attention's own time.

    python benchmarks/probe.py --rounds 5
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F

from nwflow.probe import record

SIZES = {  # queries, keys, heads, width of a head
    "cross, 77 text tokens": (4096, 77, 8, 40),
    "adapter, 4 image tokens": (4096, 4, 8, 40),
    "adapter, 16 image tokens": (1024, 16, 8, 80),
    "self, 1024 pixels": (1024, 1024, 8, 80),
    "self, 4096 pixels": (4096, 4096, 8, 40),
}


class Attention(nn.Module):
    def __init__(self, heads: int, width: int, inputs: int) -> None:
        super().__init__()
        self.heads, inner = heads, heads * width
        self.q, self.k, self.v = nn.Linear(inner, inner), nn.Linear(inputs, inner), nn.Linear(inputs, inner)
        self.out = nn.Linear(inner, inner)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q, k, v = (u.unflatten(-1, (self.heads, -1)).transpose(1, 2) for u in (self.q(x), self.k(y), self.v(y)))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@torch.no_grad()
def measure(n: int, m: int, heads: int, width: int, steps: int, rounds: int) -> dict[str, float]:
    torch.manual_seed(0)
    layer = Attention(heads, width, 768 if m < n else heads * width).eval()
    x = torch.randn(2, n, heads * width)
    y = x if m == n else torch.randn(2, m, 768)
    ratios, whole, peak = [], [], 0
    layer(x, y)
    for turn in range(rounds + 1):
        begin = time.process_time()
        for _ in range(steps):
            layer(x, y)
        plain = time.process_time() - begin
        begin = time.process_time()
        with record(layer) as recorder:
            for _ in range(steps):
                layer(x, y)
        probed = time.process_time() - begin
        recorder.compare()
        both = time.process_time() - begin
        if turn:  # the first one warms up
            ratios.append(probed / plain)
            whole.append(both / plain)
        peak = max(peak, recorder.store.peak)
    ms, run, everything = 1e3 * plain / steps, median(ratios), median(whole)
    return {"ms_per_step": ms, "run": run, "run_and_compare": everything, "held_mib": peak / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)  # waiting threads would count as work
    found = {name: measure(*SIZES[name], args.steps, args.rounds) for name in args.sizes}
    print(f"{'layer':28s}{'ms/step':>10s}{'run':>8s}{'all':>8s}{'held MiB':>10s}   (bar: 2.00)")
    for name, r in found.items():
        print(f"{name:28s}{r['ms_per_step']:10.1f}{r['run']:8.2f}{r['run_and_compare']:8.2f}{r['held_mib']:10.1f}")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
