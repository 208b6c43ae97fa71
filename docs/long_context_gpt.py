"""A small GPT trained on sequences that no process holds whole: context parallel attention from the first line on.

    torchrun --nproc-per-node 4 docs/long_context_gpt.py --device cpu
    python docs/long_context_gpt.py --device cpu

Both print the same losses. With four processes each holds two of eight chunks of every sequence (zigzag): embeddings,
projections, normalisation, the loss and all activations exist for these alone. What differs from a model for one
process is marked with (1) to (4).
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import diyfa
from diyfa.distributed import context_parallel_attention, shard_positions, shard_sequence

VOCABULARY, WIDTH, HEADS, HEADS_KV, LAYERS = 64, 64, 8, 4, 2
HEAD_DIM = WIDTH // HEADS


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x (B, S, H, D)."""
    frequencies = 10000.0 ** (-torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1])
    angles = (positions[:, None] * frequencies)[:, None]  # (S, 1, D / 2)
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_KV) * HEAD_DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).split([HEADS, HEADS_KV, HEADS_KV], 2)
        q, k = rotated(q, positions), rotated(k, positions)
        if dist.is_initialized():
            attended = context_parallel_attention(q, k, v, causal=True, layout="bshd")  # (1)
        else:
            attended = diyfa.flash_attention_v2(q, k, v, causal=True)
        return self.out(attended.flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norms = Attention(), nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x), positions)
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(x)


def train(tokens: int, steps: int, device: str = "cpu") -> list[float]:
    """The loss of each step, on a sequence that repeats its first eighth."""
    torch.manual_seed(0)  # the same weights and data on every process
    model = GPT().to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sequence = torch.randint(VOCABULARY, (1, tokens // 8)).repeat(1, 8).to(device)
    inputs, labels, positions = sequence, sequence.roll(-1, 1), torch.arange(tokens, device=device)
    if dist.is_initialized():  # (2) labels are shifted before they are cut: the next token may lie elsewhere
        inputs, labels = shard_sequence(inputs, dim=1), shard_sequence(labels, dim=1)
        positions = shard_positions(tokens, device=device)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(inputs, positions).flatten(0, 1), labels.flatten(), reduction="sum") / tokens
        optimiser.zero_grad()
        loss.backward()
        loss = loss.detach()
        if dist.is_initialized():  # (3) each process has the gradients of its own tokens' loss
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            dist.all_reduce(loss)  # (4)
        optimiser.step()
        losses.append(float(loss))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "npu", "cpu"])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    device = arguments.device
    if "RANK" in os.environ:  # torchrun's
        if device != "cpu":
            getattr(torch, device).set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group({"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}[device])
    with diyfa.use_backend(device):
        losses = train(arguments.tokens, arguments.steps, device)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("\n".join(f"step {n}: loss {loss:.6f}" for n, loss in enumerate(losses)))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
