"""How many kernels a training run of many lengths would compile, printed as JSON by running this file.

Needs Triton without its interpreter, and no GPU: the launchers run, and a launch is replaced by the key under which its
binary would be looked up. For each run and kernel: `tiles`, the sets of constants and options (what the
tables choose); `keys`, the most kernels that one tile is compiled to; `causes`, the arguments that tell those apart.
"""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from typing import Any

import torch

from diyfa.backends.cuda import backend as cuda
from diyfa.backends.cuda.attention import bwd, configs, fwd
from diyfa.backends.cuda.runtime import launcher, passes, tune
from diyfa.ops import describe_attention
from diyfa.options import NO_LENGTHS, AttentionOptions, Lengths, bind
from diyfa.problem import LAYOUTS, VARLEN, AttentionGradients, Launch

CALLS = 200
HEADS, HEADS_KV = 4, 2
ONE_TILE = 64  # tokens
# kernel -> (constants and options) -> what else binaries are kept under
Keys = dict[str, dict[str, set[tuple[Any, ...]]]]
keys: Keys = defaultdict(lambda: defaultdict(set))
names: dict[str, tuple[str, ...]] = {}  # of what tells binaries apart


def record(launch: Launch) -> None:
    name = launch.kernel.fn.__name__
    signature = launcher.launch_signature(launch)
    names[name] = (*launcher.runtime_names(launch.kernel), "pointers", "strides", "declared")
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


def train(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lengths: Lengths,
    wants_dlse: bool,
    kinds: tuple[str, ...] = configs.SPLIT,
    **options: Any,
) -> None:
    """One forward and backward pass; nothing is computed."""
    q, k, v = qkv
    checked = AttentionOptions(sm_scale=0.1, needs_grad=True, **{"window_right": 0, **options})
    problem, tensors = describe_attention(cuda, q, k, v, lengths, checked), bind(q, k, v, lengths, checked)
    bias = tensors.attn_bias
    out, lse = torch.empty_like(q), torch.empty(problem.lse_shape)
    passes.launch_each(fwd.forward_pass(problem, tensors, out, lse).launches)
    dbias = torch.empty_like(bias) if bias is not None else None
    gradients = AttentionGradients(torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dbias)
    dlse = torch.empty_like(lse) if wants_dlse else None
    backward = bwd.backward_pass(problem, tensors, out, lse, torch.empty_like(out), dlse, gradients, kinds)
    passes.launch_each(backward.launches)


def packed(rng: random.Random, head_dim: int, wants_dlse: bool, self_attention: bool, **features: Any) -> None:
    """Packed sequences: totals, longest lengths and the number of sequences differ from call to call."""
    batch = rng.randint(1, 64)
    total_q = rng.randint(2 * batch, 8192)
    total_k = total_q if self_attention else rng.randint(2 * batch, 8192)
    q = torch.empty(total_q, HEADS, head_dim, dtype=torch.float16)
    k, v = (torch.empty(total_k, HEADS_KV, head_dim, dtype=torch.float16) for _ in range(2))
    offsets = torch.zeros(batch + 1, dtype=torch.int32)
    longest_q = rng.randint(2, total_q)
    longest_k = longest_q if self_attention else rng.randint(2, total_k)
    lengths = Lengths(offsets, offsets, None, longest_q, longest_k)
    dropout = {"rng_state": torch.zeros(2, dtype=torch.int64), "dropout_p": rng.choice((0.1, 0.125, 0.5))}
    train((q, k, v), lengths, wants_dlse, layout=VARLEN, **dropout, **features)


def dense(
    rng: random.Random, head_dim: int, wants_dlse: bool, self_attention: bool, layout: str, bias: str = ""
) -> None:
    """Dense batches: lengths and the batch size differ from call to call."""
    batch, seqlen_q, seqlen_k = rng.randint(1, 8), rng.randint(2, 1500), rng.randint(2, 1500)
    if self_attention:
        seqlen_k = seqlen_q

    def tensor(heads: int, seqlen: int) -> torch.Tensor:
        shape = (batch, heads, seqlen, head_dim)
        return torch.empty([shape[i] for i in LAYOUTS[layout]], dtype=torch.float16)

    q, k, v = tensor(HEADS, seqlen_q), tensor(HEADS_KV, seqlen_k), tensor(HEADS_KV, seqlen_k)
    shapes = {"full": (HEADS, seqlen_q, seqlen_k), "keys": (batch, 1, 1, seqlen_k), "queries": (HEADS, seqlen_q, 1)}
    attn_bias = torch.empty(shapes[bias], dtype=torch.float16) if bias else None
    train((q, k, v), NO_LENGTHS, wants_dlse, layout=layout, attn_bias=attn_bias, bias_grad=bool(bias))


def short(rng: random.Random, wants_dlse: bool, packs: bool) -> None:
    """Sequences that one tile holds, such as windows: their number and lengths differ, heads are not grouped."""
    batch, longest_q, longest_k = rng.randint(2, 64), rng.randint(33, ONE_TILE), rng.randint(33, ONE_TILE)
    leading = (batch * ONE_TILE - rng.randint(0, 40),) if packs else (batch,)
    rows = ((), (), ()) if packs else ((longest_q,), (longest_k,), (longest_k,))
    q, k, v = (torch.empty(*leading, *row, HEADS, 32, dtype=torch.float16) for row in rows)
    offsets = torch.zeros(batch + 1, dtype=torch.int32)
    lengths = Lengths(offsets, offsets, None, longest_q, longest_k) if packs else NO_LENGTHS
    train((q, k, v), lengths, wants_dlse, configs.SHORT, layout=VARLEN if packs else "bshd")


def hopper(rng: random.Random) -> None:
    """The Hopper kernel's forward pass, of lengths that it takes."""
    from diyfa.backends.cuda.hopper import configs as hopper_configs
    from diyfa.backends.cuda.hopper import fwd_launch as hopper_fwd_launch

    hopper_configs.multiprocessors = lambda device: 132
    shape = (8, 2 * HEADS, rng.randint(1024, 4000), 128)
    q, k, v = (torch.empty(shape, dtype=torch.float16) for _ in range(3))
    options = AttentionOptions("bhsd", 0.1, window_right=0, needs_grad=True)
    problem = describe_attention(cuda, q, k, v, NO_LENGTHS, options)
    assert hopper_configs.refuses(problem) is None
    tensors = bind(q, k, v, NO_LENGTHS, options)
    forward = hopper_fwd_launch.forward_pass(problem, tensors, torch.empty_like(q), torch.empty(problem.lse_shape))
    passes.launch_each(forward.launches)


def windowed(rng: random.Random, **arguments: Any) -> None:
    packed(rng, window_left=rng.randint(0, 9), **arguments)  # a longer one may exclude nothing


RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "packed": (packed, {"head_dim": 128, "wants_dlse": False, "self_attention": True}),
    "packed, window": (windowed, {"head_dim": 64, "wants_dlse": False, "self_attention": True}),
    "packed, cross": (packed, {"head_dim": 128, "wants_dlse": False, "self_attention": False}),
    "packed, dlse": (packed, {"head_dim": 128, "wants_dlse": True, "self_attention": True}),
    "packed, D=40": (packed, {"head_dim": 40, "wants_dlse": False, "self_attention": True}),
    "bshd": (dense, {"head_dim": 128, "wants_dlse": False, "self_attention": True, "layout": "bshd"}),
    "bhsd": (dense, {"head_dim": 64, "wants_dlse": False, "self_attention": True, "layout": "bhsd"}),
    "bhsd, cross": (dense, {"head_dim": 64, "wants_dlse": False, "self_attention": False, "layout": "bhsd"}),
    "bhsd, dlse": (dense, {"head_dim": 64, "wants_dlse": True, "self_attention": True, "layout": "bhsd"}),
    "bhsd, D=40": (dense, {"head_dim": 40, "wants_dlse": False, "self_attention": True, "layout": "bhsd"}),
    "short": (short, {"wants_dlse": False, "packs": False}),
    "short, dlse": (short, {"wants_dlse": True, "packs": False}),
    "short, packed": (short, {"wants_dlse": True, "packs": True}),
    "bias": (dense, {"head_dim": 64, "wants_dlse": False, "self_attention": True, "layout": "bhsd", "bias": "full"}),
    "bias of keys": (dense,
        {"head_dim": 64, "wants_dlse": False, "self_attention": True, "layout": "bhsd", "bias": "keys"}),
    "bias of queries": (dense,
        {"head_dim": 64, "wants_dlse": False, "self_attention": True, "layout": "bhsd", "bias": "queries"}),
}  # fmt: skip


def main() -> None:
    from diyfa.backends.cuda.hopper import configs as hopper_configs

    launcher.recorder = record
    tune.set_enabled(False)
    counts = {}
    runs = RUNS if hopper_configs.environment_refusal() else {**RUNS, "Hopper": (hopper, {})}
    for name, (call, arguments) in runs.items():
        keys.clear()
        rng = random.Random(name)
        for _ in range(CALLS):
            call(rng, **arguments)
        counts[name] = summary()
    json.dump(counts, sys.stdout)


if __name__ == "__main__":
    main()
