"""float8 in the Hopper forward: factors, means, packed weights, and the kernel that transposes V.

wgmma takes operands of 8 bits only if both are contiguous along the dimension that it sums over. K and Q are. V (keys,
features) is not, so a kernel before the attention writes it transposed to a workspace (B, Hk, Dv, keys):
`transpose_launch`.

Weights are computed in the register layout of an accumulator: of each 8 keys, a thread has two consecutive ones. The
left operand of a product of 8 bits has another layout: of each 16 keys, a thread has four consecutive ones. The order
of keys in a sum does not matter. So weights stay where they are, and the transposed V has its keys, in each group of
16, in the order in which threads have the weights (`key_in_group`).

Factors are applied as in the portable kernel (`attention/eight_bits.py`). One factor multiplies the scale of a tile's
scores. If each block of 64 keys has a descale, each 64 columns of products have a factor of their own as well, which
`softmax_step` applies. The factor and the mean of v are applied to finished rows. The mean of k adds a number to each
row's log-sum-exp.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from diyfa import eight_bits as definition
from diyfa.backends.cuda.attention.seq_info import load_clamped, packed_info
from diyfa.backends.cuda.attention.tile_io import EQUAL, PACKED, cdiv, lengths_constant
from diyfa.backends.cuda.gluon.compat import aggregate
from diyfa.backends.cuda.hopper.mma import ROWS, accumulator_layout
from diyfa.backends.cuda.runtime.constants import Constants
from diyfa.problem import AttentionProblem, AttentionTensors, Launch, bhsd_strides, cached_per_kind

BLOCK_Q, BLOCK_K = gl.constexpr(definition.BLOCK_Q), gl.constexpr(definition.BLOCK_K)
# Kinds of descales. 0: none, the factor is 1.
PER_TENSOR, PER_HEAD = gl.constexpr(definition.PER_TENSOR), gl.constexpr(definition.PER_HEAD)
PER_BLOCK = gl.constexpr(definition.PER_BLOCK)
# Packed sequences begin at multiples of so many columns in the transposed V. It is the longest key block of a config.
PADDED_KEYS = 256
PADDED = gl.constexpr(PADDED_KEYS)
GROUP = 16  # the transposed V reorders keys inside of groups of this many
TRANSPOSED_KEYS, TRANSPOSED_FEATURES = 128, 128  # tile of `_transpose_kernel`


# ---- Factors and means ---------------------------------------------------------------------------------------------


@aggregate
class Factors:
    """Descales and means of a call, float32. An unused pointer is None."""

    q_descale_ptr: gl.tensor | gl.constexpr
    k_descale_ptr: gl.tensor | gl.constexpr
    v_descale_ptr: gl.tensor | gl.constexpr
    k_mean_ptr: gl.tensor | gl.constexpr
    v_mean_ptr: gl.tensor | gl.constexpr
    group_size: gl.tensor  # query heads per KV head

    @gluon.jit
    def kv_head(self, tile, problem):
        """Return the index of a tile's KV head among those of all samples."""
        return tile.b * (problem.heads_q // self.group_size) + tile.h // self.group_size

    @gluon.jit
    def query_factor(self, tile, row0, problem, config):
        """Return the descale of q of a consumer's 64 rows, which begin at row0."""
        factor = 1.0
        if config.Q_DESCALE == PER_TENSOR:
            factor = gl.load(self.q_descale_ptr)
        elif config.Q_DESCALE == PER_BLOCK:
            head = (tile.b * problem.heads_q + tile.h).to(gl.int64)
            blocks = gl.cdiv(problem.seqlen_q, BLOCK_Q)
            factor = gl.load(self.q_descale_ptr + head * blocks + gl.minimum(row0 // BLOCK_Q, blocks - 1))
        elif config.Q_DESCALE == PER_HEAD:  # of KV heads
            factor = gl.load(self.q_descale_ptr + self.kv_head(tile, problem))
        return factor

    @gluon.jit
    def key_factor(self, tile, problem, config):
        """Return the descale of k of a tile's KV head; 1 without one, and with PER_BLOCK (`block_factors`)."""
        factor = 1.0
        if config.K_DESCALE == PER_TENSOR:
            factor = gl.load(self.k_descale_ptr)
        elif config.K_DESCALE == PER_HEAD:
            factor = gl.load(self.k_descale_ptr + self.kv_head(tile, problem))
        return factor

    @gluon.jit
    def block_factors_ptr(self, tile, problem, config):
        """Return the address of the descales of the blocks of 64 keys of a tile's KV head.

        Without PER_BLOCK the result has no meaning, and `block_factors` does not read it.
        """
        pointer = self.k_descale_ptr
        if config.K_DESCALE == PER_BLOCK:
            pointer += self.kv_head(tile, problem).to(gl.int64) * gl.cdiv(problem.seqlen_k, BLOCK_K)
        return pointer

    @gluon.jit
    def key_mean_products(self, tile, problem, queries, CONSUMER: gl.constexpr, LAYOUT: gl.constexpr, config):
        """Return the products [64] of a consumer's queries with the mean of k. The queries are in shared memory."""
        WIDTH: gl.constexpr = queries.buffers.shape[len(queries.buffers.shape) - 1]
        Q_LAYOUT: gl.constexpr = accumulator_layout(WIDTH, 8)
        mean_ptr = self.k_mean_ptr + self.kv_head(tile, problem).to(gl.int64) * config.HEAD_DIM
        total = gl.zeros([ROWS], gl.float32, LAYOUT)
        for j in gl.static_range(config.BOXES):
            offs_d = j * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, Q_LAYOUT))
            mean = gl.load(mean_ptr + offs_d, mask=offs_d < config.HEAD_DIM, other=0.0)
            q = queries.box(CONSUMER, j).load(Q_LAYOUT).to(gl.float32)
            total += gl.convert_layout(gl.sum(q * mean[None, :], 1), LAYOUT)
        fence_async_shared()  # TMA may overwrite the queries after their release
        return total

    @gluon.jit
    def dequantised(self, out, first_d, tile, problem, config):
        """Return rows of out [64, columns], weighted means of quantised values, times v's descale plus v's mean.

        The columns are those from first_d on.
        """
        head = self.kv_head(tile, problem)
        if config.V_DESCALE == PER_TENSOR:
            out *= gl.load(self.v_descale_ptr)
        elif config.V_DESCALE == PER_HEAD:
            out *= gl.load(self.v_descale_ptr + head)
        if config.V_MEAN:
            offs_d = first_d + gl.arange(0, out.shape[1], layout=gl.SliceLayout(0, out.type.layout))
            mean_ptr = self.v_mean_ptr + head.to(gl.int64) * config.HEAD_DIM_V
            out += gl.load(mean_ptr + offs_d, mask=offs_d < config.HEAD_DIM_V, other=0.0)[None, :]
        return out


@gluon.jit
def block_factors(block_factors_ptr, start_n, seqlen_k, config):
    """Return the factors of the key block at key start_n: one for each 64 keys with PER_BLOCK, else ().

    `block_factors_ptr`: `Factors.block_factors_ptr`. Beyond the last key, the last factor is repeated.
    """
    factors = ()
    if config.K_DESCALE == PER_BLOCK:
        last = gl.cdiv(seqlen_k, BLOCK_K) - 1
        for i in gl.static_range(config.BLOCK_N // BLOCK_K):
            factors += (gl.load(block_factors_ptr + gl.minimum(start_n // BLOCK_K + i, last)),)
    return factors


# ---- Weights as operands of 8 bits ---------------------------------------------------------------------------------


@constexpr_function
def _packing(dtype):
    """Return PTX that rounds float32 numbers $1 to $4 to 8 bits and packs them into $0, $1 in the lowest byte."""
    name = {"fp8e4nv": "e4m3", "fp8e5": "e5m2"}[str(dtype)]
    return (
        "{ .reg .b16 low, high; "
        f"cvt.rn.satfinite.{name}x2.f32 low, $2, $1; cvt.rn.satfinite.{name}x2.f32 high, $4, $3; "
        "mov.b32 $0, {low, high}; }"
    )


@gluon.jit
def packed_weights(weights, DTYPE: gl.constexpr):
    """Return weights [64, BLOCK_N] fp32 in 8 bits, four in an int32: [64, BLOCK_N / 4]. No data moves between threads.

    Of each group of 16 columns, column 8 * half + 2 * lane + bit becomes byte 2 * half + bit of the group's element
    `lane`, 0 to 3.
    """
    N: gl.constexpr = weights.shape[1]
    by_lane = weights.reshape([ROWS, N // 16, 2, 4, 2]).permute(0, 1, 3, 2, 4)  # [64, groups, lane, half, bit]
    even, odd = gl.split(by_lane)
    w0, w2 = gl.split(even)
    w1, w3 = gl.split(odd)
    packed = gl.inline_asm_elementwise(
        _packing(DTYPE), "=r,f,f,f,f", [w0, w1, w2, w3], dtype=gl.int32, is_pure=True, pack=1
    )
    return packed.reshape([ROWS, N // 4])


@gluon.jit
def unpacked_weights(p, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return `packed_weights` [64, BLOCK_N / 4] as an operand [64, BLOCK_N]. The product packs it again: no cost."""
    w0, w1, w2, w3 = p.to(gl.int8), (p >> 8).to(gl.int8), (p >> 16).to(gl.int8), (p >> 24).to(gl.int8)
    p = gl.join(gl.join(w0, w2), gl.join(w1, w3)).reshape([ROWS, p.shape[1] * 4])
    return gl.convert_layout(p, LAYOUT, assert_trivial=True).to(DTYPE, bitcast=True)


# ---- V, transposed -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TransposeConstants(Constants):
    """Constants of `_transpose_kernel`."""

    head_dim: int
    block_n: int
    block_d: int
    lengths: int


@triton.jit
def first_transposed(first, b):
    """Return the column of the transposed V at which packed sequence b begins: a multiple of PADDED_KEYS.

    `first`: the sequence's first row in V. In units of PADDED_KEYS columns, a sequence that begins at row x and has n
    keys gets floor(x + n) - floor(x) + 1 columns, which is at least ceil(n): there is room for all of its keys.
    """
    return (first // PADDED + b) * PADDED


@triton.jit
def key_in_group(position):
    """Return the key in column `position` of the transposed V. Both count from the beginning of the sequence."""
    return (position & -16) | ((position & 2) << 2) | ((position & 12) >> 1) | (position & 1)


@triton.jit
def _words(size):
    """Return a number of bytes in words of 4 bytes. It is a multiple of 16, as TMA needs all strides to be."""
    return tl.multiple_of(size // 4, 4)


@triton.jit
def _load_words(source, keys, row_words, n_keys, in_row):
    """Return the words of keys of V, 4 features each: [keys, BLOCK_D / 4]. Beyond the last key they are zeros."""
    inside = (keys < n_keys)[:, None] & in_row[None, :]
    return tl.load(source + keys.to(tl.int64)[:, None] * row_words, mask=inside, other=0)


@triton.jit
def _alternating(a, b):
    """Return two words: bytes 0 of a, 0 of b, 2 of a and 2 of b, and bytes 1 and 3 likewise."""
    return (a & 0x00FF00FF) | ((b << 8) & 0xFF00FF00), ((a >> 8) & 0x00FF00FF) | (b & 0xFF00FF00)


@triton.jit
def _by_feature(w0, w1, w2, w3):
    """Transpose blocks of 4 keys and 4 features: from words of 4 features to words of 4 keys.

    w0 to w3 [groups, BLOCK_D / 4] are the first to fourth key of each group of 4 keys. The result is [groups, BLOCK_D].
    """
    d0, d1 = _alternating((w0 & 0xFFFF) | (w2 << 16), (w1 & 0xFFFF) | (w3 << 16))
    d2, d3 = _alternating((w0 >> 16) | (w2 & 0xFFFF0000), (w1 >> 16) | (w3 & 0xFFFF0000))
    return tl.join(tl.join(d0, d2), tl.join(d1, d3)).reshape([d0.shape[0], d0.shape[1] * 4])


@triton.jit(do_not_specialize=("heads", "seqlen", "total", "blocks", "columns"))
def _transpose_kernel(
    v_ptr, lengths_ptr, out_ptr, stride_vb, stride_vh, stride_vn,
    heads,  # KV heads
    seqlen, total,  # keys of the longest sequence, and of all packed sequences
    blocks,  # programs for the keys of a sequence and head
    columns,  # `transposed_keys`: the length of a row of out
    c: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_N keys of BLOCK_D features of a head of V to out (B, Hk, Dv, columns), packed (Hk, Dv, columns).

    Zeros follow a sequence's last key up to the end of its row; packed, up to the next multiple of PADDED_KEYS.

    A thread loads 16 features of 4 keys and transposes them in its registers. Then only words of 4 keys move between
    threads. If bytes did, the compiler would write V to memory one byte at a time.
    """
    pid = tl.program_id(0)
    head, block = pid // blocks, pid % blocks
    b, h = head // heads, head % heads
    out_head = head  # index of the head in out, all samples counted
    column = 0  # column of out at which the sequence begins
    n_keys = seqlen
    end = columns  # columns of the sequence that are written: its keys, then zeros
    # Addresses of V and out count words of 4 bytes.
    row_words = _words(stride_vn)
    base = h.to(tl.int64) * _words(stride_vh)
    if c.LENGTHS == PACKED:
        first, n_keys = packed_info(lengths_ptr, b, total)
        base += first.to(tl.int64) * row_words
        out_head, column = h, first_transposed(first, b)
        end = tl.cdiv(n_keys, PADDED) * PADDED
    else:
        base += b.to(tl.int64) * _words(stride_vb)
        if c.LENGTHS != EQUAL:
            n_keys = load_clamped(lengths_ptr + b, seqlen)
    WORD: tl.constexpr = tl.pointer_type(tl.uint32)
    first_d = tl.program_id(1) * c.BLOCK_D
    words_d = first_d // 4 + tl.arange(0, c.BLOCK_D // 4)
    offs_d = first_d + tl.arange(0, c.BLOCK_D)
    in_row = words_d < c.HEAD_DIM // 4
    source = v_ptr.to(WORD) + base + words_d[None, :]  # [1, BLOCK_D / 4]: of the sequence's key 0
    out_rows = out_head.to(tl.int64) * c.HEAD_DIM + offs_d[:, None]  # a row of out is one feature of a head
    target = out_ptr.to(WORD) + out_rows * _words(columns) + _words(column)  # [BLOCK_D, 1]: of the sequence's column 0
    # One iteration, unless a packed sequence is longer than the call's max_seqlen_k.
    for start in range(block * c.BLOCK_N, end, blocks * c.BLOCK_N):
        word = start // 4 + tl.arange(0, c.BLOCK_N // 4)  # words of a row of out, 4 columns each
        keys = key_in_group(word * 4)  # of a word's first byte; its others are 1, 8 and 9 keys later
        w0 = _load_words(source, keys, row_words, n_keys, in_row)
        w1 = _load_words(source, keys + 1, row_words, n_keys, in_row)
        w2 = _load_words(source, keys + 8, row_words, n_keys, in_row)
        w3 = _load_words(source, keys + 9, row_words, n_keys, in_row)
        inside = (offs_d < c.HEAD_DIM)[:, None] & (word < _words(end))[None, :]
        tl.store(target + word[None, :], tl.trans(_by_feature(w0, w1, w2, w3)), mask=inside)


def transposed_keys(problem: AttentionProblem) -> int:
    """Return the number of keys in a row of the transposed V."""
    if problem.varlen:
        return (problem.total_k // PADDED_KEYS + problem.batch) * PADDED_KEYS
    return cdiv(problem.seqlen_k, GROUP) * GROUP


def transposed_values(problem: AttentionProblem, v: torch.Tensor) -> torch.Tensor:
    """Return memory for V transposed: (B, Hk, Dv, keys); packed sequences are one sample."""
    batch = 1 if problem.varlen else problem.batch
    return v.new_empty((batch, problem.heads_kv, problem.head_dim_v, transposed_keys(problem)))


@cached_per_kind
def _transpose_constants(problem: AttentionProblem) -> TransposeConstants:
    return TransposeConstants(
        head_dim=problem.head_dim_v, block_n=TRANSPOSED_KEYS, block_d=TRANSPOSED_FEATURES,
        lengths=lengths_constant(problem),
    )  # fmt: skip


def transpose_launch(problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor) -> Launch:
    """Return the launch that fills `out`, memory of `transposed_values`, with V transposed."""
    constants = _transpose_constants(problem)
    b, h, n, _ = bhsd_strides(tensors.v, problem.layout)
    blocks = cdiv(problem.seqlen_k, TRANSPOSED_KEYS)
    arguments: dict[str, Any] = {
        "v_ptr": tensors.v,
        "lengths_ptr": tensors.cu_seqlens_k if problem.varlen else tensors.seq_lens,
        "out_ptr": out,
        "stride_vb": b,
        "stride_vh": h,
        "stride_vn": n,
        "heads": problem.heads_kv,
        "seqlen": problem.seqlen_k,
        "total": problem.total_k,
        "blocks": blocks,
        "columns": out.shape[-1],
    }
    grid = blocks * problem.batch * problem.heads_kv, cdiv(problem.head_dim_v, TRANSPOSED_FEATURES)
    return Launch(_transpose_kernel, grid, arguments, {"c": constants}, {"num_warps": 4, "num_stages": 1})
