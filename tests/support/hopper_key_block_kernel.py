"""`locate_key_block` and `locate_tile` of the Hopper kernels, on many configurations at once, and of each program."""

from __future__ import annotations

from typing import Any

import hopper_gluon  # noqa: F401
import torch
from simulators.gluon import InterpretedKernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from diyfa.backends.cuda.attention.tile_io import EQUAL
from diyfa.backends.cuda.gluon.block_mask import BlockMask
from diyfa.backends.cuda.hopper.bwd_common import Sm90BwdConstants
from diyfa.backends.cuda.hopper.bwd_tiles import Sizes, locate_key_block
from diyfa.backends.cuda.hopper.tiles import KeyCache, Problem, block_order, locate_tile

MANY = 8192


@gluon.jit
def _case(cases_ptr, count, MANY: gl.constexpr):
    """Return (number, whether it exists, first row or column, queries, keys, left, right) of MANY configurations."""
    at = gl.program_id(0) * MANY + gl.arange(0, MANY, layout=gl.BlockedLayout([1], [32], [4], [0]))
    exists = at < count
    values = ()
    for i in gl.static_range(5):
        values += (gl.load(cases_ptr + at * 5 + i, mask=exists, other=1),)
    first, seqlen_q, seqlen_k, left, right = values
    return at, exists, first, seqlen_q, seqlen_k, left, right


@gluon.jit
def _store(out_ptr, at, exists, begin, full_begin, full_end, end):
    values = (begin, full_begin, full_end, end)
    for i in gl.static_range(4):
        gl.store(out_ptr + at * 4 + i, values[i] + at * 0, mask=exists)


@gluon.jit
def _key_blocks_kernel(cases_ptr, out_ptr, count, MANY: gl.constexpr, config: gl.constexpr):
    at, exists, first, seqlen_q, seqlen_k, left, right = _case(cases_ptr, count, MANY)
    sizes = Sizes(1, 1, 1, seqlen_q, seqlen_k, 0, 0, left, right, None, None, 1, None)
    block_n = first // config.BLOCK_N
    if config.DETERMINISTIC:
        block_n = gl.cdiv(seqlen_k, config.BLOCK_N) - 1 - block_n
    keys = locate_key_block(block_n, sizes, config)
    _store(out_ptr, at, exists, keys.begin, keys.full_begin, keys.full_end, keys.end)


@gluon.jit
def _tiles_kernel(cases_ptr, out_ptr, count, MANY: gl.constexpr, config: gl.constexpr):
    at, exists, first, seqlen_q, seqlen_k, left, right = _case(cases_ptr, count, MANY)
    problem = Problem(
        left, right, 1, seqlen_q, seqlen_k, 0, 0, 1, 1, 1, None, None,
        KeyCache(None, None, None, None, None, None, None, 0),
        BlockMask(None, None, None, None, 0, 0),
        config.LENGTHS, config.LENGTHS, False, config.HAS_LEFT, config.HAS_RIGHT, not config.HAS_RIGHT,
    )  # fmt: skip
    index = first // config.BLOCK_M
    if config.HAS_RIGHT:
        index = gl.cdiv(seqlen_q, config.BLOCK_M) - 1 - index
    _, tile = locate_tile(index, problem, config.BLOCK_M, config.BLOCK_N)
    order = block_order(tile, problem, config.BLOCK_M, config.BLOCK_N)
    full_begin = tile.first_block + (order.n_left if config.HAS_LEFT else 0)
    _store(out_ptr, at, exists, tile.first_block, full_begin, tile.end_block - order.n_right, tile.end_block)


@gluon.jit
def _order_kernel(
    out_ptr, heads_q, group_size, batch, seqlen_k, interleaved_heads, count, MANY: gl.constexpr, config: gl.constexpr
):
    at = gl.program_id(0) * MANY + gl.arange(0, MANY, layout=gl.BlockedLayout([1], [32], [4], [0]))
    sizes = Sizes(heads_q, group_size, batch, 1, seqlen_k, 0, 0, -1, -1, None, None, interleaved_heads, None)
    keys = locate_key_block(gl.minimum(at, count - 1), sizes, config)
    exists = at < count
    gl.store(out_ptr + at * 3, keys.b, mask=exists)
    gl.store(out_ptr + at * 3 + 1, keys.hk, mask=exists)
    gl.store(out_ptr + at * 3 + 2, keys.col0, mask=exists)


def constants(block_m: int, block_n: int, has_left: bool, has_right: bool, deterministic: bool) -> Sm90BwdConstants:
    return Sm90BwdConstants(
        block_m=block_m, block_n=block_n, boxes=1, boxes_v=1, used_boxes=1, used_boxes_v=1, stages=2,
        has_left=has_left, has_right=has_right, lengths=EQUAL.value, softcap=False, alibi=False,
        deterministic=deterministic, store_from_registers=False, consumer_registers=240, producer_registers=24,
    )  # fmt: skip


def order(
    batch: int, heads_kv: int, group_size: int, seqlen_k: int, interleaved_heads: int, block_n: int, deterministic: bool
) -> list[tuple[int, int, int]]:
    """(sample, head of K, first key) of each program."""
    count = batch * heads_kv * -(-seqlen_k // block_n)
    out = torch.full((count, 3), -1, dtype=torch.int32)
    config = constants(block_n, block_n, False, False, deterministic)
    InterpretedKernel(_order_kernel)[(-(-count // MANY),)](
        out, heads_kv * group_size, group_size, batch, seqlen_k, interleaved_heads, count, MANY=MANY, config=config
    )
    return [tuple(row) for row in out.tolist()]


def run(
    cases: torch.Tensor, block_m: int, block_n: int, has_left: bool, has_right: bool, deterministic: bool,
    kernel: Any = _key_blocks_kernel,
) -> torch.Tensor:  # fmt: skip
    """(begin, full_begin, full_end, end) of each row (first row or column, queries, keys, left, right)."""
    config = constants(block_m, block_n, has_left, has_right, deterministic)
    out = torch.full((len(cases), 4), -1, dtype=torch.int32)
    grid = (-(-len(cases) // MANY),)
    InterpretedKernel(kernel)[grid](cases, out, len(cases), MANY=MANY, config=config)
    return out


def run_tiles(cases: torch.Tensor, block_m: int, block_n: int, has_left: bool, has_right: bool) -> torch.Tensor:
    """The same of tiles of queries."""
    return run(cases, block_m, block_n, has_left, has_right, False, _tiles_kernel)
