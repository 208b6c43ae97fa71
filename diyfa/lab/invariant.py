"""`diyfa validate --invariant`: whether training and generation compute the same log-probabilities, bit for bit.

A small model of Llama's shape computes the log-probability of every next token in the training forward pass, with all
sequences packed. Then it computes them as a sampler does: from a cache, in prompts and chunks, token by token, from
pages, behind a shared prefix. Inside `diyfa.batch_invariant()` no bit may differ. Outside, sums in another order do.

Only attention sees how many tokens there are. PyTorch's matrix products, too, may sum in another order for another
number of rows, so everything else is computed for groups of equally many tokens, the last one padded (`group_size`). So
a difference is attention's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import diyfa
from diyfa.cli.devices import device_for
from diyfa.cli.output import out, print_json, progress_bar
from diyfa.cli.table import figure, table
from diyfa.lab.bench.record import environment
from diyfa.layers.rotary import apply_rotary_emb

HEADS, HEADS_KV, HEAD_DIM, VOCABULARY = 4, 2, 64, 256
HIDDEN = HEADS * HEAD_DIM
# Tokens of the longest sequence. On a GPU its keys fill one chunk of 1024, and a part of the next.
DEFAULT_TOKENS, DEFAULT_GPU_TOKENS = 96, 1100
GROUP = 64  # tokens
# attend(layer, q, k, v): q (T, HEADS, HEAD_DIM), k and v (T, HEADS_KV, HEAD_DIM), not rotated -> (T, HEADS, HEAD_DIM)
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Generation:
    """One way in which a sampler reads sequences into a cache.

    A sequence is read in chunks of `chunk` tokens (0: whole) and all sequences side by side, or one after another if
    `alone`. With `page_size` the cache has pages in random order, and with `shares_prefix` the sequences have their
    common beginning in the same pages. With `rotary_in_call` the attention call rotates queries and keys.
    """

    name: str
    chunk: int
    page_size: int = 0
    alone: bool = False
    shares_prefix: bool = False
    rotary_in_call: bool = False
    num_splits: int = 0


GENERATIONS = (
    Generation("prompt in one call", 0),
    Generation("token by token", 1),
    Generation("token by token, sequences alone", 1, alone=True),
    Generation("token by token, three splits", 1, num_splits=3),
    Generation("token by token, pages of 16", 1, page_size=16),
    Generation("token by token, shared pages of 16", 1, page_size=16, shares_prefix=True),
    Generation("chunks of 7, pages of 1", 7, page_size=1),
    Generation("chunks of 64, pages of 64", 64, page_size=64),
    Generation("chunks of 5, rotary in the call", 5, rotary_in_call=True),
)


def in_groups(size: int, function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """Return the results (T, ...) of `function` for rows of tensors (T, ...), of which it gets `size` at a time."""
    padding = -len(rows[0]) % size
    padded = [torch.cat([x, x[-1:].expand(padding, *x.shape[1:])]) for x in rows] if padding else rows
    groups = zip(*(x.split(size) for x in padded), strict=True)
    return torch.cat([function(*group) for group in groups])[: len(rows[0])]


def group_size(weights: Sequence[Tensor]) -> int:
    """Return how many tokens a group has: GROUP on a GPU, where calls cost most of the time, if a row's product with
    each of the weights has the same bits wherever it stands in a group. Else 1."""
    if not weights[0].is_cuda:
        return 1
    for weight in weights:
        x = torch.randn(GROUP, weight.shape[1], device=weight.device, dtype=weight.dtype)
        product = F.linear(x, weight)
        if any(not torch.equal(F.linear(x.roll(n, 0), weight), product.roll(n, 0)) for n in range(1, GROUP)):
            return 1
    return GROUP


class Model:
    """Llama's block with random weights. Of three causal layers one has a window and sinks, another a softcap."""

    def __init__(self, layers: int, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def weight(rows: int, columns: int) -> Tensor:
            return (torch.randn((rows, columns), generator=generator, device="cpu") * columns**-0.5).to(device, dtype)

        self.embedding = weight(VOCABULARY, HIDDEN) * HIDDEN**0.5
        self.layers = [
            {
                "qkv": weight((HEADS + 2 * HEADS_KV) * HEAD_DIM, HIDDEN),
                "o": weight(HIDDEN, HIDDEN),
                "up": weight(2 * HIDDEN, HIDDEN),
                "down": weight(HIDDEN, 2 * HIDDEN),
            }
            for _ in range(layers)
        ]
        self.head = weight(VOCABULARY, HIDDEN)
        self.group = group_size([*self.layers[0].values(), self.head])
        sinks = torch.randn(HEADS, generator=generator, device="cpu").to(device)
        features: list[dict[str, Any]] = [{}, {"window": (max(1, tokens // 3), 0), "sinks": sinks}, {"softcap": 5.0}]
        self.features = [features[layer % len(features)] for layer in range(layers)]
        frequency = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device="cpu") / HEAD_DIM)
        angle = torch.outer(torch.arange(tokens, device="cpu"), frequency)
        self.cos, self.sin = (x.to(device, dtype) for x in (angle.cos(), angle.sin()))

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return heads (T, heads, HEAD_DIM) rotated to their positions (T,)."""

        def rotate(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return apply_rotary_emb(rows[None], cos, sin)[0]

        return in_groups(self.group, rotate, x, self.cos[positions], self.sin[positions])

    def __call__(self, tokens: Tensor, attend: Attend) -> Tensor:
        """Return the log-probabilities (T, VOCABULARY), float32, of what follows each of the tokens (T,)."""
        x = self.embedding[tokens]
        for layer, w in enumerate(self.layers):
            qkv = in_groups(self.group, lambda rows, w=w: F.linear(F.rms_norm(rows, (HIDDEN,)), w["qkv"]), x)
            q, k, v = qkv.unflatten(-1, (-1, HEAD_DIM)).split((HEADS, HEADS_KV, HEADS_KV), dim=1)
            attended = attend(layer, q, k, v).flatten(1)

            def rest(rows: Tensor, heads: Tensor, w: dict[str, Tensor] = w) -> Tensor:
                rows = rows + F.linear(heads, w["o"])
                return rows + F.linear(F.silu(F.linear(F.rms_norm(rows, (HIDDEN,)), w["up"])), w["down"])

            x = in_groups(self.group, rest, x, attended)

        def log_probabilities(rows: Tensor) -> Tensor:
            return F.linear(F.rms_norm(rows, (HIDDEN,)), self.head).float().log_softmax(-1)

        return in_groups(self.group, log_probabilities, x)


def train(model: Model, sequences: list[Tensor]) -> list[Tensor]:
    """Return the log-probabilities of each sequence from the training forward pass, the sequences packed."""
    lengths = [len(tokens) for tokens in sequences]
    device = sequences[0].device
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = model.rotated(q, positions), model.rotated(k, positions)
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        with torch.enable_grad():
            attended = diyfa.flash_attention_varlen(
                q, k, v, ends, ends, max(lengths), max(lengths), causal=True, **model.features[layer]
            )
        return attended.detach()

    return list(model(torch.cat(sequences), attend).split(lengths))


def generate(model: Model, sequences: list[Tensor], prefix: int, way: Generation) -> list[Tensor]:
    """Return the log-probabilities of each sequence, read into a cache in the given way.

    All sequences have the same first `prefix` tokens.
    """
    if way.alone:
        single = Generation(**{**asdict(way), "alone": False})
        return [generate(model, [tokens], prefix, single)[0] for tokens in sequences]
    n, longest, like = len(sequences), max(len(tokens) for tokens in sequences), model.embedding
    table, lengths = None, [0] * n
    shape: tuple[int, ...] = (n, longest)
    results: list[list[Tensor]] = [[] for _ in sequences]
    if way.page_size:
        pages = -(-longest // way.page_size)
        order = torch.randperm(n * pages, generator=torch.Generator().manual_seed(1), device="cpu")
        table = order.view(n, pages).to(like.device, torch.int32)
        shape = (n * pages, way.page_size)
    caches = [[like.new_zeros((*shape, HEADS_KV, HEAD_DIM)) for _ in "kv"] for _ in model.layers]

    def step(members: list[int], count: int) -> None:
        """Read `count` more tokens of each of the sequences `members`."""
        at = [lengths[i] for i in members]
        tokens = torch.cat([sequences[i][t : t + count] for i, t in zip(members, at, strict=True)])
        positions = torch.cat([torch.arange(t, t + count, device=like.device) for t in at])
        rows = torch.tensor(members, dtype=torch.int32, device=like.device)
        cached = torch.tensor(at, dtype=torch.int32, device=like.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            options: dict[str, Any] = dict(model.features[layer])
            window = options.pop("window", (-1, -1))
            if way.rotary_in_call:
                options |= {"rotary_cos": model.cos, "rotary_sin": model.sin, "rotary_interleaved": False}
            else:
                q, k = model.rotated(q, positions), model.rotated(k, positions)
            options |= {"cache_batch_idx": rows} if table is None else {"block_table": table[rows.long()]}
            q, k, v = (x.unflatten(0, (len(members), count)) for x in (q, k, v))
            k_cache, v_cache = caches[layer]
            attended: Tensor = diyfa.flash_attn_with_kvcache(
                q, k_cache, v_cache, k, v, cache_seqlens=cached, causal=True, window_size=window,
                num_splits=way.num_splits, **options,
            )  # fmt: skip
            return attended.flatten(0, 1)

        for i, rows_of_sequence in zip(members, model(tokens, attend).split(count), strict=True):
            results[i].append(rows_of_sequence)
            lengths[i] += count

    if way.shares_prefix:
        assert table is not None
        whole = prefix // way.page_size  # pages that hold tokens of the prefix only
        table[:, :whole] = table[0, :whole]
        if whole:
            step([0], whole * way.page_size)
            results = [list(results[0]) for _ in sequences]
            lengths[:] = [whole * way.page_size] * n
    while by_count := _steps(sequences, lengths, way.chunk):
        for count, members in by_count.items():
            step(members, count)
    return [torch.cat(rows) for rows in results]


def _steps(sequences: list[Tensor], lengths: list[int], chunk: int) -> dict[int, list[int]]:
    """Return the next step: the number of tokens to read -> the sequences that read as many."""
    steps: dict[int, list[int]] = {}
    for i, tokens in enumerate(sequences):
        rest = len(tokens) - lengths[i]
        if rest:
            steps.setdefault(min(chunk or rest, rest), []).append(i)
    return steps


@dataclass(frozen=True)
class Comparison:
    """How many log-probabilities of next tokens differ between generation and training, inside the mode and outside."""

    generation: str
    compared: int
    differing: int
    differing_outside: int
    largest_outside: float  # largest difference outside, nats


def _next_token(rows: list[Tensor], sequences: list[Tensor]) -> Tensor:
    """Return the log-probability of each next token, of all sequences one after another."""
    pairs = zip(rows, sequences, strict=True)
    return torch.cat([x[:-1].gather(1, tokens[1:, None])[:, 0] for x, tokens in pairs]).cpu()


def compare(
    layers: int, tokens: int, device: torch.device, backend: str, generations: Sequence[Generation]
) -> Iterator[Comparison]:
    """Yield a comparison for each of `generations`, of sequences of `tokens`, tokens - 1 and tokens // 2 + 1 tokens."""
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(VOCABULARY, (3, tokens), generator=generator, device="cpu")
    prefix = tokens // 2
    text[:, :prefix] = text[0, :prefix]
    sequences = [row[:length].to(device) for row, length in zip(text, (tokens, tokens - 1, prefix + 1), strict=True)]
    with torch.no_grad(), diyfa.use_backend(backend):
        model = Model(layers, tokens, device, torch.float16)
        outside = _next_token(train(model, sequences), sequences)
        with diyfa.batch_invariant():
            inside = _next_token(train(model, sequences), sequences)
        for way in generations:
            generated_outside = _next_token(generate(model, sequences, prefix, way), sequences)
            with diyfa.batch_invariant():
                generated = _next_token(generate(model, sequences, prefix, way), sequences)
            differing, differing_outside = (
                int((~torch.eq(a, b)).sum()) for a, b in ((generated, inside), (generated_outside, outside))
            )  # a NaN differs, too
            largest = float((generated_outside - outside).abs().max())
            yield Comparison(way.name, inside.numel(), differing, differing_outside, largest)


def run(backend: str | None, layers: int, tokens: int | None, json: bool) -> int:
    """Print how generation differs from training. Return 0 if inside the mode no log-probability does, else 1."""
    device, name = device_for(backend)
    tokens = tokens or (DEFAULT_GPU_TOKENS if device.type == "cuda" else DEFAULT_TOKENS)
    comparisons = []
    with progress_bar(not json) as progress:
        task = progress.add_task(f"{layers} layers, {tokens} tokens on {name}", total=len(GENERATIONS), note="")
        for comparison in compare(layers, tokens, device, name, GENERATIONS):
            comparisons.append(comparison)
            progress.update(task, advance=1, note=comparison.generation)
    differing = sum(x.differing for x in comparisons)
    if json:
        document = {"backend": name, **environment(device), "layers": layers, "tokens": tokens, "ok": not differing}
        print_json({**document, "comparisons": [asdict(x) for x in comparisons]})
        return int(differing > 0)
    rows = [
        [x.generation, str(x.compared), f"[bold red]{x.differing}[/]" if x.differing else "0",
         str(x.differing_outside), figure(x.largest_outside)]
        for x in comparisons
    ]  # fmt: skip
    headings = ["generation", "compared", "differ inside", "outside", "by at most"]
    out.print(f"backend {name} on {environment(device)['device']}, {layers} layers, {tokens} tokens", highlight=False)
    out.print(table("log-probabilities of generation and of the training forward pass", headings, rows))
    out.print(f"{differing} log-probabilities differ inside diyfa.batch_invariant()", highlight=False)
    return int(differing > 0)
