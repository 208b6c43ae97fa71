"""How many kernels a training run of many lengths would compile, printed as JSON by running this file.

Needs Triton without its interpreter, and no GPU: calls of the public functions are recorded. For each run and kernel:
`tiles`, the sets of constants and options (what the tables choose); `keys`, the most kernels that one tile is compiled
to; `causes`, the arguments that tell those apart.
"""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from functools import partial
from typing import Any

import torch

import diyfa
from diyfa.backends.cuda.hopper import configs as hopper_configs
from diyfa.backends.cuda.runtime import launcher
from diyfa.backends.cuda.runtime.signature import launch_signature, runtime_names
from diyfa.problem import LAYOUTS, Launch
from diyfa.ready.calls import empty
from diyfa.ready.recording import recording

CALLS = 200
HEADS, HEADS_KV = 4, 2
ONE_TILE = 64  # tokens
# kernel -> (constants and options) -> what else binaries are kept under
Keys = dict[str, dict[str, set[tuple[Any, ...]]]]
keys: Keys = defaultdict(lambda: defaultdict(set))
names: dict[str, tuple[str, ...]] = {}  # of what tells binaries apart


def record(launch: Launch) -> None:
    name = launch.kernel.fn.__name__
    signature = launch_signature(launch)
    names[name] = (*runtime_names(launch.kernel), "pointers", "strides", "declared")
    rest = (*map(str, signature.kinds), signature.aligned_pointers, signature.aligned_strides, launch.aligned)
    keys[name][f"{launch.constants} {launch.options}"].add(rest)


def summary() -> dict[str, dict[str, Any]]:
    counts = {}
    for name, tiles in keys.items():
        causes = {
            cause
            for sets in tiles.values()
            for cause, values in zip(names[name], zip(*sets, strict=True), strict=True)
            if len(set(values)) > 1
        }
        counts[name] = {"tiles": len(tiles), "keys": max(map(len, tiles.values())), "causes": sorted(causes)}
    return counts


def train(attend: Any, *tensors: Any, dlse: bool = False, **options: Any) -> None:
    """One forward and backward pass; nothing is computed."""
    out, lse = attend(*tensors, return_lse=True, **options)
    results = [out, lse] if dlse else [out]
    torch.autograd.backward(results, [torch.empty_like(x) for x in results])


def varlen(lengths: tuple[int, int, int, int, int], head_dim: int, heads_kv: int, **options: Any) -> None:
    """`lengths`: the number of sequences, all queries and keys, and those of the longest sequence."""
    batch, total_q, total_k, longest_q, longest_k = lengths
    rows = ((total_q, HEADS), (total_k, heads_kv), (total_k, heads_kv))
    q, k, v = (empty(*each, head_dim, dtype=torch.float16, grad=True) for each in rows)
    offsets = empty(batch + 1)
    train(diyfa.flash_attention_varlen, q, k, v, offsets, offsets, longest_q, longest_k, **options)


def packed(rng: random.Random, head_dim: int = 128, is_cross: bool = False, **options: Any) -> None:
    """Packed sequences: totals, longest lengths and the number of sequences differ from call to call."""
    batch = rng.randint(1, 64)
    total_q = rng.randint(2 * batch, 8192)
    total_k = rng.randint(2 * batch, 8192) if is_cross else total_q
    longest_q = rng.randint(2, total_q)
    longest_k = rng.randint(2, total_k) if is_cross else longest_q
    if options.pop("window", False):
        options["window"] = (rng.randint(0, 9), 0)  # a longer one may exclude nothing
    dropout_p = rng.choice((0.1, 0.125, 0.5))
    lengths = batch, total_q, total_k, longest_q, longest_k
    varlen(lengths, head_dim, HEADS_KV, causal=True, dropout_p=dropout_p, variant="v2", **options)


def dense(
    rng: random.Random, head_dim: int = 64, layout: str = "bhsd", is_cross: bool = False, bias: str = "", **options: Any
) -> None:
    """Dense batches: lengths and the batch size differ from call to call."""
    batch, seqlen_q, seqlen_k = rng.randint(1, 8), rng.randint(2, 1500), rng.randint(2, 1500)
    if not is_cross:
        seqlen_k = seqlen_q
    shapes = [(batch, h, n, head_dim) for h, n in ((HEADS, seqlen_q), (HEADS_KV, seqlen_k), (HEADS_KV, seqlen_k))]
    q, k, v = (empty(*[x[i] for i in LAYOUTS[layout]], dtype=torch.float16, grad=True) for x in shapes)
    if bias:
        of_bias = {
            "full": (HEADS, seqlen_q, seqlen_k),
            "keys": (batch, 1, 1, seqlen_k),
            "queries": (HEADS, seqlen_q, 1),
        }
        options["attn_bias"] = empty(*of_bias[bias], dtype=torch.float16, grad=True)
    attend = diyfa.flash_attention if layout == "bhsd" else diyfa.flash_attention_v2
    train(attend, q, k, v, causal=True, variant="v2", **options)


def short(rng: random.Random, packs: bool = False, **options: Any) -> None:
    """Sequences that one tile holds, such as windows: their number and lengths differ, heads are not grouped."""
    batch, longest_q, longest_k = rng.randint(2, 64), rng.randint(33, ONE_TILE), rng.randint(33, ONE_TILE)
    if packs:
        total = batch * ONE_TILE - rng.randint(0, 40)
        varlen((batch, total, total, longest_q, longest_k), 32, HEADS, causal=True, **options)
        return
    rows = (longest_q, longest_k, longest_k)
    q, k, v = (empty(batch, n, HEADS, 32, dtype=torch.float16, grad=True) for n in rows)
    train(diyfa.flash_attention_v2, q, k, v, causal=True, **options)


def hopper(rng: random.Random) -> None:
    """The Hopper kernel's forward pass, of lengths that it takes."""
    shape = 8, 2 * HEADS, rng.randint(1024, 4000), 128
    q, k, v = (empty(*shape, dtype=torch.float16, grad=True) for _ in range(3))
    diyfa.flash_attention(q, k, v, causal=True, variant="sm90")


RUNS: dict[str, Any] = {
    "packed": packed,
    "packed, window": partial(packed, head_dim=64, window=True),
    "packed, cross": partial(packed, is_cross=True),
    "packed, dlse": partial(packed, dlse=True),
    "packed, D=40": partial(packed, head_dim=40),
    "bshd": partial(dense, layout="bshd", head_dim=128),
    "bhsd": dense,
    "bhsd, cross": partial(dense, is_cross=True),
    "bhsd, dlse": partial(dense, dlse=True),
    "bhsd, D=40": partial(dense, head_dim=40),
    "short": short,
    "short, dlse": partial(short, dlse=True),
    "short packed": partial(short, dlse=True, packs=True),
    "bias": partial(dense, bias="full"),
    "bias of keys": partial(dense, bias="keys"),
    "bias of queries": partial(dense, bias="queries"),
}


def main() -> None:
    counts = {}
    with recording("cuda", "sm_90"):
        launcher.recorder = record
        for name, call in (RUNS if hopper_configs.environment_refusal() else {**RUNS, "Hopper": hopper}).items():
            keys.clear()
            rng = random.Random(name)
            for _ in range(CALLS):
                call(rng)
            counts[name] = summary()
    json.dump(counts, sys.stdout)


if __name__ == "__main__":
    main()
