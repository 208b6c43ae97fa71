"""`key_block_of` of the Hopper backward: on many configurations at once, and of each program of one."""

from __future__ import annotations

import torch
from simulators.gluon import InterpretedKernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from diyfa.backends.cuda.attention.tile_io import EQUAL
from diyfa.backends.cuda.hopper.bwd_common import Sm90BwdConstants
from diyfa.backends.cuda.hopper.bwd_tiles import Sizes, key_block_of

MANY = 8192


@gluon.jit
def _key_blocks_kernel(cases_ptr, out_ptr, count, MANY: gl.constexpr, config: gl.constexpr):
    at = gl.program_id(0) * MANY + gl.arange(0, MANY, layout=gl.BlockedLayout([1], [32], [4], [0]))
    exists = at < count
    first_key = gl.load(cases_ptr + at * 5, mask=exists, other=0)
    seqlen_q = gl.load(cases_ptr + at * 5 + 1, mask=exists, other=1)
    seqlen_k = gl.load(cases_ptr + at * 5 + 2, mask=exists, other=1)
    left = gl.load(cases_ptr + at * 5 + 3, mask=exists, other=0)
    right = gl.load(cases_ptr + at * 5 + 4, mask=exists, other=0)
    sizes = Sizes(1, 1, 1, seqlen_q, seqlen_k, 0, 0, left, right, None, None, 1)
    block_n = first_key // config.BLOCK_N
    if config.DETERMINISTIC:
        block_n = gl.cdiv(seqlen_k, config.BLOCK_N) - 1 - block_n
    keys = key_block_of(block_n, sizes, config)
    out = out_ptr + at * 4
    gl.store(out, keys.begin + at * 0, mask=exists)
    gl.store(out + 1, keys.full_begin + at * 0, mask=exists)
    gl.store(out + 2, keys.full_end + at * 0, mask=exists)
    gl.store(out + 3, keys.end + at * 0, mask=exists)


@gluon.jit
def _order_kernel(
    out_ptr, heads_q, group_size, batch, seqlen_k, heads_in_turns, count, MANY: gl.constexpr, config: gl.constexpr
):
    at = gl.program_id(0) * MANY + gl.arange(0, MANY, layout=gl.BlockedLayout([1], [32], [4], [0]))
    sizes = Sizes(heads_q, group_size, batch, 1, seqlen_k, 0, 0, -1, -1, None, None, heads_in_turns)
    keys = key_block_of(gl.minimum(at, count - 1), sizes, config)
    exists = at < count
    gl.store(out_ptr + at * 3, keys.b, mask=exists)
    gl.store(out_ptr + at * 3 + 1, keys.hk, mask=exists)
    gl.store(out_ptr + at * 3 + 2, keys.col0, mask=exists)


def constants(block_m: int, block_n: int, has_left: bool, has_right: bool, deterministic: bool) -> Sm90BwdConstants:
    return Sm90BwdConstants(
        block_m=block_m, block_n=block_n, boxes=1, boxes_v=1, used_boxes=1, used_boxes_v=1, stages=2,
        has_left=has_left, has_right=has_right, lengths=EQUAL.value, softcap=False, deterministic=deterministic,
        direct=False, consumer_registers=240, producer_registers=24,
    )  # fmt: skip


def order(
    batch: int, heads_kv: int, group_size: int, seqlen_k: int, heads_in_turns: int, block_n: int, deterministic: bool
) -> list[tuple[int, int, int]]:
    """(sample, head of K, first key) of each program."""
    count = batch * heads_kv * -(-seqlen_k // block_n)
    out = torch.full((count, 3), -1, dtype=torch.int32)
    config = constants(block_n, block_n, False, False, deterministic)
    InterpretedKernel(_order_kernel)[(-(-count // MANY),)](
        out, heads_kv * group_size, group_size, batch, seqlen_k, heads_in_turns, count, MANY=MANY, config=config
    )
    return [tuple(row) for row in out.tolist()]


def run(
    cases: torch.Tensor, block_m: int, block_n: int, has_left: bool, has_right: bool, deterministic: bool
) -> torch.Tensor:
    """(begin, full_begin, full_end, end) of each row (first key, queries, keys, left, right)."""
    config = constants(block_m, block_n, has_left, has_right, deterministic)
    out = torch.full((len(cases), 4), -1, dtype=torch.int32)
    kernel = InterpretedKernel(_key_blocks_kernel)
    kernel[(-(-len(cases) // MANY),)](cases, out, len(cases), MANY=MANY, config=config)
    return out
