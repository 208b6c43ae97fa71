"""Training of the demo: two copies of one model, with equal batches and different attention."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, cast

import torch
import torch.nn.functional as F

from diyfa.attention import flash_attention
from diyfa.lab.bench.timing import peak_memory_mb
from diyfa.lab.demo.data import Batches, standard_library_text
from diyfa.lab.demo.model import GPT, Attention, GPTConfig


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
    long_context: int = 8192  # tokens over which the memory of attention alone is measured


EARLY_STEPS = 50
WARM_UP_STEPS = 5  # whose times do not count: kernels are compiled in them
ACCELERATOR = Preset(GPTConfig(6, 6, 64, 512), 32, 500, 1e-3, 5e-3, 2e-2, torch.bfloat16)
PRESETS: dict[str, Preset] = {
    "cuda": ACCELERATOR,
    "npu": ACCELERATOR,
    "cpu": Preset(GPTConfig(3, 4, 32, 128), 8, 300, 2e-3, 1e-4, 2e-2, long_context=2048),
}


@dataclass
class Comparison:
    """Losses by step (nats per byte) of the two models, their held-out losses, and diyfa's model.

    `seconds` are the times of each model's steps, and `step_mib` the peak memory of one forward and backward pass of
    each model, by "diyfa" and "sdpa".
    """

    diyfa: list[float] = field(default_factory=list)
    sdpa: list[float] = field(default_factory=list)
    held_out: dict[str, float] = field(default_factory=dict)
    model: GPT | None = None
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"diyfa": [], "sdpa": []})
    step_mib: dict[str, float] = field(default_factory=dict)

    def tokens_per_second(self, preset: Preset) -> dict[str, float]:
        """Return the speed of each model's training, from its median step after the warm-up."""
        tokens = preset.batch * preset.model.context
        return {name: tokens / median(times[WARM_UP_STEPS:] or times) for name, times in self.seconds.items()}

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
        loss = self.backward(tokens, targets)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Run the forward and the backward pass -> the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(tokens, targets)
        loss.backward()
        return loss

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
        for name, losses in (("diyfa", result.diyfa), ("sdpa", result.sdpa)):
            start = time.perf_counter()
            losses.append(trainers[name].step(tokens, targets, rate))  # a number: the device has finished
            result.seconds[name].append(time.perf_counter() - start)
        if step == steps - 1:
            for name, trainer in trainers.items():
                trainer.optimizer.zero_grad(set_to_none=True)
                result.step_mib[name] = peak_memory_mb(partial(trainer.backward, tokens, targets), device)
            held_out = [batches.next("held-out") for _ in range(8)]
            result.held_out = {name: trainer.evaluate(held_out) for name, trainer in trainers.items()}
        yield result


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention that stores every score: softmax(q kᵀ · scale) v."""
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v


def attention_memory(device: torch.device, preset: Preset, backend: str | None = None) -> dict[str, float]:
    """Return the peak MiB of a forward and backward pass of attention alone over `preset.long_context` tokens."""
    sizes = preset.model
    shape = (1, sizes.heads, preset.long_context, sizes.head_dim)

    def peak(attention: Attention) -> float:
        dtype = preset.autocast or torch.float32
        q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        return peak_memory_mb(lambda: attention(q, k, v).sum().backward(), device)

    def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, flash_attention(q, k, v, causal=True, backend=backend))

    return {name: peak(each) for name, each in (("diyfa", fused), ("sdpa", _sdpa), ("plain", _plain))}
