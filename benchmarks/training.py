"""Benchmark of training a GPT with diyfa, cuDNN and FlashAttention-2: each has the same weights, batches and steps.

    PYTHONPATH=. python benchmarks/training.py [--head-dim 64] [--steps 300] [--layers 12] [--context 4096]

The model and the data are those of `diyfa demo`, in bfloat16 autocast. Implementations alternate in blocks of steps, so
that none has a cooler GPU to itself. Prints tokens/s, losses and the largest relative difference of two loss curves;
writes a result file with the curves if OUT is set: $OUT/training-D.json.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from diyfa.attention import flash_attention
from diyfa.lab.bench.record import write_json
from diyfa.lab.demo.data import Batches, standard_library_text
from diyfa.lab.demo.model import GPT, GPTConfig
from diyfa.lab.demo.train import ACCELERATOR, Preset, Trainer, learning_rate

BLOCK = 25  # steps of one implementation before the next one runs


def of_pytorch(which: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(which):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


ATTENTION: dict[str, Callable[..., torch.Tensor]] = {
    "diyfa": partial(flash_attention, causal=True),
    "cuDNN": partial(of_pytorch, SDPBackend.CUDNN_ATTENTION),
    "FlashAttention-2": partial(of_pytorch, SDPBackend.FLASH_ATTENTION),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=120, help="no block of steps is begun after that")
    options = parser.parse_args()
    begin = time.time()
    model = GPTConfig(options.layers, options.width // options.head_dim, options.head_dim, options.context)
    preset = Preset(model, options.batch, options.steps, 6e-4, 0, 0, ACCELERATOR.autocast)
    device = torch.device("cuda")
    batches = Batches(standard_library_text(), model.context, preset.batch, 0, device)
    drawn = [batches.next() for _ in range(preset.steps)]

    trainers = {}
    for name, attention in ATTENTION.items():
        torch.manual_seed(0)
        trainers[name] = Trainer(GPT(model, attention).to(device), preset, device)
    losses: dict[str, list[float]] = {name: [] for name in trainers}
    speeds: dict[str, list[float]] = {name: [] for name in trainers}
    for first in range(0, preset.steps, BLOCK):
        if time.time() - begin > options.seconds:
            print(f"out of time after {first} steps")
            break
        for name, trainer in trainers.items():
            start = time.perf_counter()
            for step in range(first, min(first + BLOCK, preset.steps)):
                losses[name].append(trainer.step(*drawn[step], learning_rate(step, preset, preset.steps)))
            if first:  # the first block compiles
                speeds[name].append(BLOCK * preset.batch * model.context / (time.perf_counter() - start))

    curve = losses["diyfa"]
    summary = {}
    for name in trainers:
        apart = max(abs(a - b) / b for a, b in zip(curve, losses[name], strict=True))
        summary[name] = {"tokens_per_second": round(median(speeds[name])), "difference_from_diyfa": apart}
        print(
            f"{name:18} {median(speeds[name]) / 1e3:8.1f} thousand tokens/s, loss {curve[0]:.3f} -> "
            f"{losses[name][-1]:.4f}, largest difference from diyfa {apart:.1e}"
        )
    if "OUT" in os.environ:
        tokens = preset.batch * model.context
        work = f"training step, GPT of {options.layers} layers and {options.width} features"
        sizes = {"B": preset.batch, "S": model.context, "D": options.head_dim, "dtype": "bfloat16"}
        rows = [
            {"kind": "model", "implementation": name, "work": work, **sizes,
             "ms": 1e3 * tokens / found["tokens_per_second"], **found}
            for name, found in summary.items()
        ]  # fmt: skip
        path = Path(os.environ["OUT"], f"training-{options.head_dim}.json")
        write_json(path, "training", device, rows, options=vars(options), losses=losses)


if __name__ == "__main__":
    main()
