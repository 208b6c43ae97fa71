"""Which program of a persistent grid gets which blocks, and how evenly the work is spread over the cores.

The loops here are those of the attention kernels, made of the same functions. What a block costs is counted in the
tiles of scores that its loop runs over.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in Triton's interpreter", allow_module_level=True)

import triton.language as tl

from diyfa.backends.npu.attention.primitives import (
    count_tasks,
    key_range,
    locate_task,
    rounds_before,
    row_range,
    sequence_info,
    task_in_round,
)
from diyfa.backends.npu.runtime.compat import Constants, kernel
from diyfa.backends.npu.runtime.launch import heads_per_group
from diyfa.backends.npu.tables.configs import attention_tile
from diyfa.problem import AttentionProblem


@dataclass(frozen=True)
class ScheduleConstants(Constants):
    block_m: int
    block_n: int
    keys: bool  # a task is a block of keys, as for dk and dv, else one of query rows
    causal: bool
    has_left: bool
    has_right: bool
    seq_lens: bool
    varlen: bool
    max_rounds: int  # of a sample, at most


@kernel
def schedule_kernel(
    seq_lens_ptr, cu_seqlens_ptr, taken_ptr, steps_ptr,
    batch, heads, seqlen_q, seqlen_k, total, heads_in_parallel, max_blocks, window_left, window_right,
    c: tl.constexpr,
):  # fmt: skip
    """taken[program, b, h, block] counts how often a program takes a block, steps[b, h, block] the tiles of scores that
    its loop runs over. All turns of a sample at once: the interpreter is slow one by one. Packed sequences have as
    many queries as keys.
    """
    BY_SAMPLE: tl.constexpr = c.VARLEN or c.SEQ_LENS
    BLOCK: tl.constexpr = c.BLOCK_N if c.KEYS else c.BLOCK_M
    BLOCK_STEP: tl.constexpr = c.BLOCK_M if c.KEYS else c.BLOCK_N
    program = tl.program_id(0)
    first_task = 0
    for sample in range(batch if BY_SAMPLE else 1):
        seqlen = seqlen_k if c.KEYS else seqlen_q
        blocks, tasks = count_tasks(cu_seqlens_ptr, sample, total, seqlen, batch, heads, BLOCK, c.VARLEN, BY_SAMPLE)
        round_index = rounds_before(first_task) + tl.arange(0, c.MAX_ROUNDS)
        is_mine = round_index < rounds_before(first_task + tasks)
        task = tl.where(is_mine, task_in_round(round_index) - first_task, 0)
        if blocks > 0:
            b, h, block = locate_task(task, sample, blocks, batch, heads, heads_in_parallel, BY_SAMPLE, not c.KEYS)
            _, _, sq, sk = sequence_info(
                seq_lens_ptr, cu_seqlens_ptr, cu_seqlens_ptr, sample, seqlen_q, seqlen_k, total, total, c
            )
            if c.KEYS:
                lo, hi = row_range(block * BLOCK, sq, sk, window_left, window_right, c)
            else:
                lo, hi = key_range(block * BLOCK, sq, sk, window_left, window_right, c)
            position = (b * heads + h) * max_blocks + block
            tl.atomic_add(taken_ptr + program * batch * heads * max_blocks + position, 1, mask=is_mine)
            tl.store(steps_ptr + position, (tl.maximum(hi - lo, 0) + BLOCK_STEP - 1) // BLOCK_STEP, mask=is_mine)
        first_task += tasks


@dataclass(frozen=True)
class Shape:
    """Sizes of a call; `lengths` are seq_lens, or of packed sequences."""

    batch: int = 2
    heads: int = 8
    heads_kv: int = 8
    seqlen_q: int = 4096
    seqlen_k: int = 4096
    left: int = -1
    right: int = -1
    lengths: tuple[int, ...] = ()
    packed: bool = False
    allowed: float = 1.05


CAUSAL = {"right": 0}
SHAPES = {
    "dense": Shape(),
    "causal": Shape(**CAUSAL),
    "causal, blocks a multiple of the cores": Shape(seqlen_q=5120, seqlen_k=5120, **CAUSAL),
    "causal, one head": Shape(batch=1, heads=1, heads_kv=1, seqlen_q=16384, seqlen_k=16384, **CAUSAL),
    "causal, grouped heads": Shape(batch=1, heads=32, heads_kv=4, allowed=1.08, **CAUSAL),
    "causal, as many heads as cores": Shape(batch=1, heads=20, heads_kv=20, seqlen_q=2048, seqlen_k=2048, **CAUSAL),
    "causal, long, in parts": Shape(batch=1, heads=16, heads_kv=16, seqlen_q=16384, seqlen_k=16384, **CAUSAL),
    "causal, more keys": Shape(seqlen_q=1024, seqlen_k=8192, allowed=1.08, **CAUSAL),
    "causal window": Shape(left=1024, **CAUSAL),
    "window": Shape(left=500, right=900),
    "window to the left": Shape(left=1000),
    "seq_lens": Shape(batch=6, lengths=(4096, 300, 1700, 0, 2500, 64)),
    "seq_lens, causal": Shape(batch=6, lengths=(4096, 300, 1700, 0, 2500, 64), **CAUSAL),
    "seq_lens, causal, each a round": Shape(batch=4, heads=5, heads_kv=5, lengths=(4096, 64, 64, 4096), **CAUSAL),
    "packed": Shape(batch=7, lengths=(4096, 100, 3000, 0, 777, 2048, 1), packed=True),
    "packed, causal": Shape(batch=7, lengths=(4096, 100, 3000, 0, 777, 2048, 1), packed=True, **CAUSAL),
    "packed, many short": Shape(
        batch=16, lengths=tuple(64 + 97 * i % 700 for i in range(16)), packed=True, allowed=1.15, **CAUSAL
    ),
}


CASES = [("fwd", 20), ("dq", 24), ("dkdv", 20), ("dkdv", 32)]


def schedule(shape: Shape, name: str, programs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> (taken, which blocks exist (batch, blocks), tiles of scores of each task (batch, heads, blocks))."""
    lengths = torch.tensor(shape.lengths, dtype=torch.int32)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)])
    total = int(cu_seqlens[-1]) if shape.packed else 0
    problem = AttentionProblem(
        "npu", "Ascend910B3", "float16", "thd" if shape.packed else "bhsd", shape.batch, shape.heads, shape.heads_kv,
        shape.seqlen_q, shape.seqlen_k, 128, 128, shape.left, shape.right,
        seq_lens=bool(shape.lengths) and not shape.packed, total_q=total, total_k=total,
    )  # fmt: skip
    tile = attention_tile(problem, name)
    keys = name == "dkdv"
    block, heads = (tile.block_n, shape.heads_kv) if keys else (tile.block_m, shape.heads)
    sizes = lengths if shape.packed else torch.full((shape.batch,), shape.seqlen_k if keys else shape.seqlen_q)
    exists = torch.arange(-(-int(sizes.max()) // block)) < ((sizes + block - 1) // block)[:, None]
    max_blocks = exists.shape[1]
    taken = torch.zeros(programs, shape.batch, heads, max_blocks, dtype=torch.int32)
    steps = torch.zeros(shape.batch, heads, max_blocks, dtype=torch.int32)
    max_rounds = -(-shape.batch * heads * max_blocks // programs) + 1
    schedule_kernel[(programs,)](
        lengths, cu_seqlens, taken, steps,
        shape.batch, heads, shape.seqlen_q, shape.seqlen_k, total, heads_per_group(problem, name), max_blocks,
        shape.left, shape.right,
        ScheduleConstants(
            tile.block_m, tile.block_n, keys,
            causal=shape.right == 0, has_left=shape.left >= 0, has_right=shape.right >= 0,
            seq_lens=problem.seq_lens, varlen=shape.packed, max_rounds=1 << (max_rounds - 1).bit_length(),
        ),
    )  # fmt: skip
    return taken, exists, steps


def imbalance(taken: torch.Tensor, steps: torch.Tensor) -> float:
    """The busiest program's work over the least that any schedule could give it: the mean, the largest task, or the
    cheapest tasks of as many as some program must take."""
    shares = (taken * steps).sum((1, 2, 3))
    costs = steps[taken.sum(0) > 0].sort().values
    max_rounds = -(-costs.numel() // taken.shape[0])
    min_work = max(shares.float().mean().item(), costs.max().item(), costs[:max_rounds].sum().item())
    return shares.max().item() / min_work


@pytest.mark.parametrize(("name", "programs"), CASES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_work_is_spread_evenly(shape: Shape, name: str, programs: int) -> None:
    taken, exists, steps = schedule(shape, name, programs)
    assert torch.equal(taken.sum(0), exists[:, None].expand_as(taken[0]).int())  # every block once
    counts = taken.sum((1, 2, 3))
    assert counts.max() - counts.min() <= 1
    assert steps.sum() > 0
    assert imbalance(taken, steps) <= shape.allowed
