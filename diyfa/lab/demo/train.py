"""Training of the demo: two copies of one model, with equal batches and different attention."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from diyfa.attention import flash_attention
from diyfa.lab.demo.data import Batches, standard_library_text
from diyfa.lab.demo.model import GPT, GPTConfig


@dataclass(frozen=True)
class Preset:
    """Sizes that fit a device, and bounds within which two loss curves agree.

    Two correct attention kernels round differently, and training amplifies that from step to step. So there are two
    bounds on the relative difference of the losses. `early_bound` holds for the first `EARLY_STEPS`, where hardly
    anything is amplified yet and a wrong gradient shows at once; `bound` holds for all steps.
    """

    model: GPTConfig
    batch: int
    steps: int
    learning_rate: float
    early_bound: float
    bound: float
    autocast: torch.dtype | None = None


EARLY_STEPS = 50
ACCELERATOR = Preset(GPTConfig(6, 6, 64, 512), 32, 500, 1e-3, 5e-3, 2e-2, torch.bfloat16)
PRESETS: dict[str, Preset] = {
    "cuda": ACCELERATOR,
    "npu": ACCELERATOR,
    "cpu": Preset(GPTConfig(3, 4, 32, 128), 8, 300, 2e-3, 1e-4, 2e-2),
}


@dataclass
class Comparison:
    """Losses by step (nats per byte) of the two models, their held-out losses, and diyfa's model."""

    diyfa: list[float] = field(default_factory=list)
    sdpa: list[float] = field(default_factory=list)
    held_out: dict[str, float] = field(default_factory=dict)
    model: GPT | None = None

    def max_relative_difference(self, steps: int | None = None) -> float:
        """Return the largest |a - b| / b over the first `steps` (default: all), or inf if a loss is not finite."""
        pairs = list(zip(self.diyfa, self.sdpa, strict=True))[:steps]
        if not all(math.isfinite(a) and math.isfinite(b) for a, b in pairs):
            return math.inf
        return max(abs(a - b) / b for a, b in pairs)

    def agrees(self, preset: Preset) -> bool:
        """Return whether the curves are within both bounds of `preset`."""
        early = self.max_relative_difference(EARLY_STEPS) <= preset.early_bound
        return early and self.max_relative_difference() <= preset.bound


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def learning_rate(step: int, preset: Preset, steps: int) -> float:
    """Return the rate of a step: linear warm-up over a tenth of the steps, then a half cosine down to a tenth."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return preset.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return preset.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


class Trainer:
    """One model and its optimiser."""

    def __init__(self, model: GPT, preset: Preset, device: torch.device) -> None:
        self.model, self.preset, self.device = model, preset, device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=preset.learning_rate, weight_decay=0.1)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        dtype = self.preset.autocast
        with torch.autocast(self.device.type, dtype) if dtype else contextlib.nullcontext():
            logits = self.model(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def step(self, tokens: torch.Tensor, targets: torch.Tensor, learning_rate: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        loss = self.loss(tokens, targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        return sum(self.loss(*batch).item() for batch in batches) / len(batches)


def compare(
    device: torch.device,
    preset: Preset,
    steps: int,
    seed: int,
    backend: str | None = None,
    attention: Callable[..., Any] = flash_attention,
) -> Iterator[Comparison]:
    """Train both models step by step. Yield the comparison so far after every step; the last has held-out losses."""
    batches = Batches(standard_library_text(), preset.model.context, preset.batch, seed, device)
    torch.manual_seed(seed)
    reference = GPT(preset.model, _sdpa).to(device)
    mine = GPT(preset.model, partial(attention, causal=True, backend=backend)).to(device)
    mine.load_state_dict(reference.state_dict())
    trainers = {"diyfa": Trainer(mine, preset, device), "sdpa": Trainer(reference, preset, device)}
    result = Comparison(model=mine)
    for step in range(steps):
        tokens, targets = batches.next()
        rate = learning_rate(step, preset, steps)
        result.diyfa.append(trainers["diyfa"].step(tokens, targets, rate))
        result.sdpa.append(trainers["sdpa"].step(tokens, targets, rate))
        if step == steps - 1:
            held_out = [batches.next("held-out") for _ in range(8)]
            result.held_out = {name: trainer.evaluate(held_out) for name, trainer in trainers.items()}
        yield result
