"""Parts of a group: query heads that share a head of K, divided among programs.

A block of keys is a program's work, with the queries of all heads that see it. One head of K for many of Q leaves fewer
blocks of keys than there are multiprocessors. So the query heads of a group may be divided into parts of the same size:
to the main kernel each part is a group with a head of K of its own, whose K and V are those of the group. What they
find for dK and dV, in float32, `_sum_parts_kernel` adds up, always in the same order.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from diyfa.backends.cuda.attention.tile_io import PACKED
from diyfa.backends.cuda.gluon.barriers import wait_for_previous_kernels
from diyfa.backends.cuda.hopper.bwd_tiles import LENGTH_POINTERS, SIZES, Sizes, _sequence
from diyfa.backends.cuda.runtime.constants import Constants

# What a program adds up, and of how many parts at once: small, so that enough of it is on its way.
SUM_ROWS = gl.constexpr(32)
COLUMNS = gl.constexpr(64)
AT_ONCE = gl.constexpr(4)
SUM_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))


@dataclass(frozen=True)
class PartsConstants(Constants):
    """What `_sum_parts_kernel` is compiled for."""

    lengths: int


@gluon.jit
def _sum_tile(parts_ptr, out, row0, column0, end, at, stride_row, heads, first, parts, head_dim):
    """Add up SUM_ROWS x COLUMNS numbers: of `parts_ptr`, [rows, heads, head_dim], `parts` heads from `first` on."""
    rows = row0 + gl.arange(0, SUM_ROWS, layout=gl.SliceLayout(1, SUM_LAYOUT))
    columns = column0 + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SUM_LAYOUT))
    inside = (rows < end)[:, None] & (columns < head_dim)[None, :]
    places = ((at + rows.to(gl.int64)) * heads + first)[:, None] * head_dim + columns[None, :]
    total = gl.zeros([SUM_ROWS, COLUMNS], gl.float32, SUM_LAYOUT)
    for part in range(0, parts, AT_ONCE):
        found = ()
        for i in gl.static_range(AT_ONCE):
            there = inside & (part + i < parts)
            found += (gl.load(parts_ptr + places + (part + i) * head_dim, mask=there, other=0.0),)
        for i in gl.static_range(AT_ONCE):
            total += found[i]
    place = out + rows.to(gl.int64)[:, None] * stride_row + columns[None, :]
    gl.store(place, total.to(out.dtype.element_ty), mask=inside)


@gluon.jit(
    do_not_specialize=(*SIZES, "parts", "head_dim", "head_dim_v"), do_not_specialize_on_alignment=LENGTH_POINTERS
)
def _sum_parts_kernel(
    dk_parts_ptr, dv_parts_ptr,  # (B, Sk, Hk * parts, D) or (Tk, Hk * parts, D) fp32
    lengths_q_ptr, lengths_k_ptr,
    dk_ptr, dv_ptr,
    stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    heads_q, group_size, batch, seqlen_q, seqlen_k, total_q, total_k, parts, head_dim, head_dim_v,
    config: gl.constexpr,  # `PartsConstants`
):  # fmt: skip
    """A tile of dK and one of dV of a head."""
    wait_for_previous_kernels()
    sizes = Sizes(
        heads_q, group_size, batch, seqlen_q, seqlen_k, total_q, total_k, -1, -1, lengths_q_ptr, lengths_k_ptr, 1
    )
    heads_kv = heads_q // group_size
    blocks = gl.cdiv(seqlen_k, SUM_ROWS)
    pid = gl.program_id(0)
    column0 = gl.program_id(1) * COLUMNS
    row0 = pid % blocks * SUM_ROWS
    hk = pid // blocks % heads_kv
    b = pid // blocks // heads_kv
    at = b.to(gl.int64) * seqlen_k
    end = seqlen_k
    dk = dk_ptr + hk.to(gl.int64) * stride_dkh
    dv = dv_ptr + hk.to(gl.int64) * stride_dvh
    if config.LENGTHS == PACKED:
        _, first_k, _, end = _sequence(b, sizes, config.LENGTHS)
        at = first_k.to(gl.int64)
        dk += at * stride_dkn
        dv += at * stride_dvn
    else:
        dk += b.to(gl.int64) * stride_dkb
        dv += b.to(gl.int64) * stride_dvb
    if row0 < end:
        heads = heads_kv * parts
        first = hk * parts
        if column0 < head_dim:
            _sum_tile(dk_parts_ptr, dk, row0, column0, end, at, stride_dkn, heads, first, parts, head_dim)
        if column0 < head_dim_v:
            _sum_tile(dv_parts_ptr, dv, row0, column0, end, at, stride_dvn, heads, first, parts, head_dim_v)
