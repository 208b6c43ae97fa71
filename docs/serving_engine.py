"""A small serving engine on diyfa's paged KV cache: continuous batching, prefix sharing, greedy decoding.

    python docs/serving_engine.py

The model has Llama's shape and random weights. Prompts come and go: at every step one waiting prompt is read (only the
part that no other sequence has in the cache) while all running sequences get their next token in one call. Pages of
equal prompt beginnings are shared and counted. `generate` without a cache is what the engine must agree with, token by
token.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

import diyfa
from diyfa.device import present_device
from diyfa.layers.rotary import apply_rotary_emb


@dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    vocabulary: int = 256
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    heads_kv: int = 2
    head_dim: int = 16
    intermediate: int = 128
    positions: int = 256


class Cache:
    """Keys and values of all layers in pages, who uses each page, and which beginnings of prompts lie in full pages."""

    def __init__(self, config: Config, pages: int, page_size: int, like: Tensor) -> None:
        shape = (config.layers, pages, page_size, config.heads_kv, config.head_dim)
        self.k, self.v = like.new_zeros(shape), like.new_zeros(shape)
        self.page_size = page_size
        self.free = deque(range(pages))
        self.users = [0] * pages
        self.page_of: dict[tuple[int, ...], int] = {}  # all tokens up to a page's end -> the page
        self.prefix_of: dict[int, tuple[int, ...]] = {}

    def take(self, prompt: list[int], tokens: int) -> tuple[list[int], int] | None:
        """Pages for `tokens` tokens that begin with `prompt`, and how many of them are in the cache already; None
        while there are too few pages. At least the prompt's last token is to be computed."""
        shared: list[int] = []
        while (end := (len(shared) + 1) * self.page_size) < len(prompt) and tuple(prompt[:end]) in self.page_of:
            shared.append(self.page_of[tuple(prompt[:end])])
        count = -(-tokens // self.page_size) - len(shared)
        if count > len(self.free):
            return None
        pages = shared + [self.free.popleft() for _ in range(count)]
        for page in pages:
            self.users[page] += 1
        return pages, len(shared) * self.page_size

    def publish(self, prompt: list[int], pages: list[int]) -> None:
        """From now on others may share the full pages of this prompt."""
        for index in range(len(prompt) // self.page_size):
            prefix = tuple(prompt[: (index + 1) * self.page_size])
            if self.page_of.setdefault(prefix, pages[index]) == pages[index]:
                self.prefix_of[pages[index]] = prefix

    def give_back(self, pages: list[int]) -> None:
        for page in pages:
            self.users[page] -= 1
            if not self.users[page]:
                self.page_of.pop(self.prefix_of.pop(page, ()), None)
                self.free.append(page)


class Model:
    """Llama's block with random weights: RMSNorm, grouped-query attention with rotary embedding, SwiGLU."""

    def __init__(self, config: Config, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.config = c = config
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int) -> Tensor:
            return (torch.randn((rows, columns), generator=generator) * columns**-0.5).to(device, dtype)

        self.embedding = weight(c.vocabulary, c.hidden) * c.hidden**0.5
        self.blocks = [
            {
                "qkv": weight((c.heads + 2 * c.heads_kv) * c.head_dim, c.hidden),
                "o": weight(c.hidden, c.heads * c.head_dim),
                "gate": weight(c.intermediate, c.hidden),
                "up": weight(c.intermediate, c.hidden),
                "down": weight(c.hidden, c.intermediate),
            }
            for _ in range(c.layers)
        ]
        self.head = weight(c.vocabulary, c.hidden)
        frequency = 10000.0 ** (-torch.arange(0, c.head_dim, 2) / c.head_dim)
        angle = torch.outer(torch.arange(c.positions), frequency)
        self.cos, self.sin = angle.cos().to(device, dtype), angle.sin().to(device, dtype)

    def __call__(
        self, tokens: Tensor, cache: Cache | None = None, table: Tensor | None = None, lens: Tensor | None = None
    ):
        """Logits (B, vocabulary) after the last of `tokens` (B, S).

        With a cache these are new tokens of sequences that have `lens` (B,) tokens in the pages of `table`; keys and
        values are appended there. Without one they are all tokens there are.
        """
        c = self.config
        x = self.embedding[tokens]
        for layer, w in enumerate(self.blocks):
            qkv = F.linear(F.rms_norm(x, (c.hidden,)), w["qkv"]).unflatten(-1, (-1, c.head_dim))
            q, k, v = qkv.split((c.heads, c.heads_kv, c.heads_kv), dim=2)
            if cache is None:
                q, k = (apply_rotary_emb(y, self.cos, self.sin) for y in (q, k))
                attended = diyfa.flash_attn_func(q, k, v, causal=True)
            else:
                attended = diyfa.flash_attn_with_kvcache(
                    q, cache.k[layer], cache.v[layer], k, v, self.cos, self.sin, cache_seqlens=lens,
                    block_table=table, causal=True, rotary_interleaved=False,
                )  # fmt: skip
            x = x + F.linear(attended.flatten(2), w["o"])
            y = F.rms_norm(x, (c.hidden,))
            x = x + F.linear(F.silu(F.linear(y, w["gate"])) * F.linear(y, w["up"]), w["down"])
        return F.linear(F.rms_norm(x[:, -1], (c.hidden,)), self.head)


@dataclass(eq=False)
class Request:
    """A prompt, and the tokens that follow it."""

    prompt: list[int]
    new_tokens: int
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0  # tokens whose keys are in the cache
    shared: int = 0  # of these, found there

    @property
    def done(self) -> bool:
        return len(self.tokens) == self.new_tokens


class Engine:
    """Continuous batching: sequences join and leave the batch between two steps."""

    def __init__(self, model: Model, pages: int = 64, page_size: int = 16, chunk: int = 64) -> None:
        self.model, self.chunk = model, chunk
        self.cache = Cache(model.config, pages, page_size, model.embedding)
        self.columns = (
            model.config.positions // page_size
        )  # of a page table: there is a row of cos and sin for each key
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, prompt: list[int], new_tokens: int) -> Request:
        request = Request(prompt, new_tokens)
        pages = -(-(len(prompt) + new_tokens) // self.cache.page_size)
        if not prompt or new_tokens < 1 or pages > min(self.columns, len(self.cache.users)):
            raise ValueError(f"a prompt of {len(prompt)} and {new_tokens} new tokens do not fit the engine")
        self.waiting.append(request)
        return request

    def _forward(self, requests: list[Request], tokens: list[list[int]]) -> None:
        """Append equally many tokens to each sequence; those whose prompt is read get their next token."""
        device = self.model.embedding.device
        table = torch.full((len(requests), self.columns), -1, dtype=torch.int32)
        for row, request in zip(table, requests, strict=True):
            row[: len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32)
        lens = torch.tensor([request.cached for request in requests], dtype=torch.int32)
        logits = self.model(torch.tensor(tokens, device=device), self.cache, table.to(device), lens.to(device))
        for request, given, following in zip(requests, tokens, logits.argmax(-1).tolist(), strict=True):
            request.cached += len(given)
            if request.cached >= len(request.prompt):
                request.tokens.append(following)

    def step(self) -> None:
        """One token for each running sequence, and a chunk of the prompt that waits longest."""
        if self.running:
            self._forward(self.running, [[request.tokens[-1]] for request in self.running])
        if self.waiting:
            first = self.waiting[0]
            if not first.pages:
                taken = self.cache.take(first.prompt, len(first.prompt) + first.new_tokens)
                if taken is not None:
                    first.pages, first.cached = taken
                    first.shared = first.cached
            if first.pages:
                self._forward([first], [first.prompt[first.cached : first.cached + self.chunk]])
                if first.tokens:  # the whole prompt is read
                    self.cache.publish(first.prompt, first.pages)
                    self.running.append(self.waiting.popleft())
        for request in [request for request in self.running if request.done]:
            self.cache.give_back(request.pages)
            self.running.remove(request)

    def run(self) -> None:
        with torch.inference_mode():
            while self.waiting or self.running:
                self.step()


def generate(model: Model, prompt: list[int], new_tokens: int) -> list[int]:
    """The same greedy tokens without a cache: everything is computed anew for each."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(new_tokens):
            logits = model(torch.tensor([tokens], device=model.embedding.device))
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def main() -> None:
    device = present_device().type
    with diyfa.use_backend(device):
        model = Model(Config(), device)
        engine = Engine(model, pages=24, page_size=8, chunk=16)
        system = [(7 * i) % 256 for i in range(40)]  # what all prompts begin with
        requests = [engine.add([*system, *range(i, 2 * i + 3)], 5 + 3 * i) for i in range(6)]
        engine.run()
        for request in requests:
            print(f"{len(request.prompt)} tokens, {request.shared} of them shared -> {request.tokens}")
            if request.tokens != generate(model, request.prompt, request.new_tokens):
                raise SystemExit("without a cache the tokens are others")


if __name__ == "__main__":
    main()
