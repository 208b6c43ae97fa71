"""Context parallel attention of an `AttentionCase`: what the workers run, and cases for it."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from diyfa.distributed import context_parallel_attention, shard_sequence, unshard_sequence
from diyfa.testing import AttentionCase, Results, make_inputs, poisoned_allocations

METHODS = ("ring", "ulysses", "both")
Case = AttentionCase


class How(NamedTuple):
    """How a case is divided between the ranks."""

    method: str
    load_balance: str = "zigzag"
    deterministic: bool = False


@lru_cache(maxsize=1)
def mesh() -> DeviceMesh:
    """All ranks, two in each team of Ulysses."""
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2))


def run_sharded(case: AttentionCase, how: How) -> Results | None:
    """All results of a case, whole, on rank 0."""
    inputs = make_inputs(case)
    options = dict(inputs.options)
    group = mesh() if how.method == "both" else None
    packed = case.lens_q is not None
    cu_seqlens = options.pop("cu_seqlens_q", None)
    for name in ("cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"):
        options.pop(name, None)
    dim = 0 if packed else 1 if case.layout == "bshd" else 2
    cut: dict[str, Any] = {"load_balance": how.load_balance, "cu_seqlens": cu_seqlens}

    def shard(x: torch.Tensor, dim: int = dim) -> torch.Tensor:
        return shard_sequence(x.detach(), group, dim, **cut)

    q, k, v = (shard(x).requires_grad_() for x in inputs[:3])
    learned = [options["sinks"]] if "sinks" in options else []
    with poisoned_allocations():
        out, lse = context_parallel_attention(
            q, k, v, group, method=how.method, deterministic=how.deterministic, return_lse=True, backend="cpu",
            layout="bhsd" if packed else case.layout, **cut, **options,
        )  # fmt: skip
        gradients = torch.autograd.grad(
            (out, lse), (q, k, v, *learned), (shard(inputs.dout), shard(inputs.dlse, inputs.dlse.dim() - 1))
        )
    dsinks = gradients[3].clone() if learned else None
    if dsinks is not None:
        dist.all_reduce(dsinks)
    whole = [unshard_sequence(x.detach(), group, dim, **cut) for x in (out, *gradients[:3])]
    lse = unshard_sequence(lse.detach(), group, lse.dim() - 1, **cut)
    return Results(whole[0], lse, *whole[1:], None, dsinks) if dist.get_rank() == 0 else None


# Lengths are multiples of eight ranks.
MATRIX = [
    Case("full", batch=2, heads=8, seqlen_q=72),
    Case("causal", batch=2, heads=8, seqlen_q=72, causal=True, dtype="bfloat16"),
    Case("causal_fp32", heads=8, seqlen_q=64, causal=True, dtype="float32", layout="bshd"),
    Case("causal_gqa", heads=8, heads_kv=2, seqlen_q=128, causal=True),
    Case("gqa_odd", heads=24, heads_kv=3, seqlen_q=64, causal=True, layout="bshd"),
    Case("mqa", heads=8, heads_kv=1, seqlen_q=64, dtype="bfloat16"),
    Case("dv", heads=8, seqlen_q=64, head_dim=48, head_dim_v=32, causal=True),
    Case("softcap", heads=8, heads_kv=4, seqlen_q=64, softcap=5.0, causal=True),
    Case("sinks", heads=8, seqlen_q=64, sinks=True, causal=True),
    Case("sinks_full_large", heads=8, seqlen_q=64, sinks=True, sink_offset=10, dtype="bfloat16"),
    Case("sinks_window", heads=8, seqlen_q=80, sinks=True, window=(25, 0), dtype="float32"),
    Case("window_left", heads=8, heads_kv=2, seqlen_q=128, window=(20, 0)),
    Case("window_both", heads=8, seqlen_q=96, window=(7, 30), layout="bshd", dtype="bfloat16"),
    Case("window_open", heads=8, seqlen_q=96, window=(-1, 5)),
    Case("window_one_key", heads=8, seqlen_q=64, window=(0, 0), sm_scale=1.5),
    Case("one_row_each", heads=8, seqlen_q=8, causal=True),
    Case("peaked", heads=8, seqlen_q=96, causal=True, sm_scale=1.5, dtype="bfloat16"),
    Case("rise", heads=8, seqlen_q=96, head_dim=64, rise=60.0, dtype="bfloat16"),
    Case("rise_back", heads=8, seqlen_q=96, head_dim=64, rise=-60.0, causal=True),
    Case("negative_scale", heads=8, seqlen_q=64, sm_scale=-0.5, causal=True, view="sliced"),
    Case("everything", batch=2, heads=8, heads_kv=2, seqlen_q=96, head_dim=48, head_dim_v=32, window=(40, 3),
         softcap=5.0, sinks=True, layout="bshd", view="transposed"),
    Case("packed", heads=8, layout="thd", lens_q=(40, 56), causal=True),
    Case("packed_odd", heads=8, heads_kv=2, layout="thd", lens_q=(1, 50, 0, 3, 19, 7), causal=True, slack=8,
         dtype="bfloat16"),
    Case("packed_full", heads=8, layout="thd", lens_q=(33, 9, 22), dtype="float32"),
    Case("packed_window_sinks", heads=8, layout="thd", lens_q=(33, 1, 46), window=(9, 4), sinks=True),
    Case("packed_causal_sinks", heads=8, layout="thd", lens_q=(3, 17, 30), causal=True, sinks=True, slack=14),
    Case("packed_nothing", heads=8, layout="thd", lens_q=(0, 0), slack=16),
]  # fmt: skip


def drawn(seed: int, ranks: int) -> tuple[AttentionCase, How]:
    """A case and how it is divided, any that there can be."""
    rng = random.Random(seed)
    heads_kv, group = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 4])
    method = rng.choice(METHODS)
    heads = heads_kv * group
    if method != "ring":  # a multiple of those that share them
        size = ranks if method == "ulysses" else 2
        heads = heads * size // 2 if heads * size // 2 % size == 0 else heads * size
    head_dim = rng.choice([8, 16, 24, 32])
    common: dict[str, Any] = {
        "name": f"drawn_{seed}",
        "heads": heads,
        "heads_kv": heads_kv if heads % heads_kv == 0 else heads,
        "head_dim": head_dim,
        "head_dim_v": rng.choice([head_dim, 16, 40]),
        "dtype": rng.choice(["float16", "bfloat16", "float32"]),
        "causal": rng.random() < 0.5,
        "sm_scale": rng.choice([None, None, 0.3, 1.0, -0.2]),
        "window": rng.choice([(-1, -1), (-1, -1), (rng.randint(-1, 60), rng.randint(-1, 60))]),
        "softcap": rng.choice([0.0, 0.0, 3.0]),
        "sinks": rng.random() < 0.3,
        "view": rng.choice(["contiguous", "transposed", "sliced"]),
        "seed": seed,
    }
    rows = ranks * rng.randint(1, 24)
    if rng.random() < 0.4:
        lens = []
        while sum(lens) < rows and len(lens) < 6:
            lens.append(min(rows - sum(lens), rng.choice([0, 1, rng.randint(0, rows)])))
        case = Case(layout="thd", lens_q=tuple(lens), slack=rows - sum(lens), **common)
    else:
        case = Case(batch=rng.choice([1, 1, 2]), layout=rng.choice(["bhsd", "bshd"]), seqlen_q=rows, **common)
    return case, How(method, rng.choice(["zigzag", "zigzag", "none"]), rng.random() < 0.2)
