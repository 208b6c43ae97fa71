"""A small byte-level GPT. Its attention is a function of (q, k, v), so that two models can differ in that alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; the width is heads · head_dim."""

    layers: int
    heads: int
    head_dim: int
    context: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


class Block(nn.Module):
    """A pre-norm transformer block: attention, then a GELU feed-forward of four times the width."""

    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        width = config.width
        self.heads, self.attention = config.heads, attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block to x (B, S, width) -> (B, S, width)."""
        # (B, S, 3·H·D) -> three (B, H, S, D) views
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.project(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A model from bytes to logits of the next byte. The output layer shares the embedding's weight."""

    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, S, 256) of tokens (B, S) int64."""
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, seed: int, temperature: float = 0.8, top_k: int = 40) -> bytes:
        """Continue `prompt` by `length` bytes, each drawn from the `top_k` likeliest at `temperature`."""
        generator = torch.Generator().manual_seed(seed)
        tokens = list(prompt or b"\n")
        for _ in range(length):
            window = torch.tensor([tokens[-self.config.context :]], device=self.embed.weight.device)
            logits, candidates = (self(window)[0, -1].float().cpu() / temperature).topk(top_k)
            chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            tokens.append(int(candidates[chosen]))
        return bytes(tokens)
