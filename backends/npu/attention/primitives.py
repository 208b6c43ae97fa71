"""Steps that the forward and the backward kernels share, as small jit functions.

Positions are compared in fp32, because integer compares run on Ascend's scalar unit. Positions inside a tile are small,
and int32 arithmetic subtracts the tile's distance from the diagonal first. So the compare is exact where it decides.

**Tasks and rounds.** A kernel launches at most one program per core, and each program loops over tasks. A task is one
block of one head. In each round every program takes one task: program i the i-th one in even rounds, the i-th one from
the end in odd rounds (`task_in_round`). Work falls (or rises) steadily with the task number, so this evens it out.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_at(
    base_ptr, rows, stride, row0, COLUMN0: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return a block pointer to [BLOCK_ROWS, BLOCK_COLUMNS] from (row0, COLUMN0) on.

    The matrix has `rows` contiguous rows of COLUMNS columns, `stride` elements apart."""
    return tl.make_block_ptr(
        base_ptr, (rows, COLUMNS), (stride, 1), (row0, COLUMN0), (BLOCK_ROWS, BLOCK_COLUMNS), (1, 0)
    )


@triton.jit
def load_tile(block_ptr, PADDED: tl.constexpr):
    """Load [rows, columns], zero beyond the tensor. Rows may overrun; with PADDED, columns may too."""
    if PADDED:
        tile = tl.load(block_ptr, boundary_check=(0, 1), padding_option="zero")
    else:
        tile = tl.load(block_ptr, boundary_check=(0,), padding_option="zero")
    return tile


@triton.jit
def store_tile(block_ptr, tile, PADDED: tl.constexpr):
    """Store [rows, columns], except beyond the tensor. Rows may overrun; with PADDED, columns may too."""
    if PADDED:
        tl.store(block_ptr, tile, boundary_check=(0, 1))
    else:
        tl.store(block_ptr, tile, boundary_check=(0,))


@triton.jit
def load_row(base_ptr, row0, rows, BLOCK: tl.constexpr):
    """Load [BLOCK] values of a vector of length `rows` from `row0` on; zero beyond its end."""
    ptr = tl.make_block_ptr(base_ptr, (rows,), (1,), (row0,), (BLOCK,), (0,))
    return tl.load(ptr, boundary_check=(0,), padding_option="zero")


@triton.jit
def load_lse(base_ptr, row0, rows, BLOCK: tl.constexpr):
    """Load [BLOCK] log-sum-exps. Beyond the rows they are inf, so that a weight exp(s - lse) of a finite s is 0."""
    offs = tl.arange(0, BLOCK) + row0
    return tl.load(base_ptr + offs, mask=offs < rows, other=float("inf"))


@triton.jit
def store_row(base_ptr, values, row0, rows, BLOCK: tl.constexpr):
    """Store [BLOCK] values of a vector of length `rows` from `row0` on."""
    ptr = tl.make_block_ptr(base_ptr, (rows,), (1,), (row0,), (BLOCK,), (0,))
    tl.store(ptr, values, boundary_check=(0,))


@triton.jit
def dot(a, b, INTERPRET: tl.constexpr):
    """Return a @ b in fp32. The cube unit multiplies fp16, bf16 and fp32 exactly; only the interpreter widens bf16."""
    if INTERPRET:
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        c = tl.dot(a, b, input_precision="ieee")
    return c


@triton.jit
def dot_add(a, b, acc, INTERPRET: tl.constexpr):
    """Return acc + a @ b in fp32. The cube unit adds the product to its accumulator."""
    if INTERPRET:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def narrow(x, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """Round fp32 x to DTYPE, to nearest even.

    The interpreter truncates to bfloat16, so there the low 16 bits are rounded away first (NaN keeps its bits)."""
    if INTERPRET and tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


@triton.jit
def running_max(m_i, row_max, INTERPRET: tl.constexpr):
    """Return max(m_i, row_max). NaN propagates: that is one vector operation, while filtering NaN takes seven."""
    if INTERPRET:  # its maximum always filters NaN
        m_new = tl.where((m_i == m_i) & (row_max == row_max), tl.maximum(m_i, row_max), m_i + row_max)
    else:
        m_new = tl.maximum(m_i, row_max, propagate_nan=tl.PropagateNan.ALL)
    return m_new


@triton.jit
def position_in_round(round_index):
    """Return this program's position in round `round_index`: upwards in even rounds, downwards in odd ones."""
    return tl.program_id(0) + round_index % 2 * (tl.num_programs(0) - 1 - 2 * tl.program_id(0))


@triton.jit
def rounds_before(task):
    """Return how many of the first `task` tasks this program takes: the number of its rounds before task `task`."""
    round_index = task // tl.num_programs(0)
    return round_index + (position_in_round(round_index) < task % tl.num_programs(0)).to(tl.int32)


@triton.jit
def task_in_round(round_index):
    """Return the number of the task that this program takes in round `round_index`, counted over all samples."""
    return round_index * tl.num_programs(0) + position_in_round(round_index)


@triton.jit
def count_tasks(cu_seqlens_ptr, sample, total, seqlen, batch, heads, BLOCK: tl.constexpr, VARLEN: tl.constexpr,
             BY_SAMPLE: tl.constexpr):  # fmt: skip
    """Return (blocks of the sequence of `sample`, tasks of `sample`: one for each block of each head).

    BY_SAMPLE: sequences differ in length, and the tasks of one sample follow those of the one before. Packed sequences
    have only the blocks that exist. Else there is one sample, which holds the tasks of the whole batch.
    """
    if VARLEN:
        _, length = packed_rows(cu_seqlens_ptr, sample, total)
        blocks = tl.cdiv(length, BLOCK)
    else:
        blocks = tl.cdiv(seqlen, BLOCK)
    tasks = blocks * heads
    if not BY_SAMPLE:
        tasks = tasks * batch
    return blocks, tasks


@triton.jit
def locate_task(
    task, sample, blocks, batch, heads, heads_in_parallel, BY_SAMPLE: tl.constexpr, LAST_FIRST: tl.constexpr
):
    """Return (b, head, block of the sequence) of task number `task` of `sample`.

    Heads go in groups of `heads_in_parallel`. A group's tasks are the first block of each head, then the second block
    of each, and so on (LAST_FIRST: from the last block down). So programs that run at once have equal work, and the
    keys of the group stay in the cache until all its blocks are done.
    """
    pairs = heads
    if not BY_SAMPLE:
        pairs = heads * batch
    head_group = task // (heads_in_parallel * blocks)
    index_in_group = task % (heads_in_parallel * blocks)
    group_heads = tl.minimum(heads_in_parallel, pairs - head_group * heads_in_parallel)
    pair = head_group * heads_in_parallel + index_in_group % group_heads
    block = index_in_group // group_heads
    if LAST_FIRST:
        block = blocks - 1 - block
    if BY_SAMPLE:
        b = sample
        h = pair
    else:
        b = pair // heads
        h = pair % heads
    return b, h, block


@triton.jit
def effective_lengths(seq_lens_ptr, b, seqlen_q, seqlen_k, SEQ_LENS: tl.constexpr):
    """Return (query rows, keys) of sample `b` that take part, never more than the tensors have."""
    sq = seqlen_q
    sk = seqlen_k
    if SEQ_LENS:
        sk = tl.minimum(tl.load(seq_lens_ptr + b), seqlen_k)
        sq = tl.minimum(sk, seqlen_q)
    return sq, sk


@triton.jit
def packed_rows(cu_seqlens_ptr, b, total):
    """Return (first row, rows) of sequence `b` of a packed tensor of `total` rows, clamped to the tensor."""
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + b), 0), total)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + b + 1), start), total)
    return start, end - start


@triton.jit
def sequence_info(
    seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, b, seqlen_q, seqlen_k, total_q, total_k, c: tl.constexpr
):
    """Return (first row in q, first row in k, query rows, keys) of sample `b`. First rows are 0 unless VARLEN."""
    start_q = 0
    start_k = 0
    sq, sk = effective_lengths(seq_lens_ptr, b, seqlen_q, seqlen_k, c.SEQ_LENS)
    if c.VARLEN:
        start_q, sq = packed_rows(cu_seqlens_q_ptr, b, total_q)
        start_k, sk = packed_rows(cu_seqlens_k_ptr, b, total_k)
    return start_q, start_k, sq, sk


@triton.jit
def head_base(ptr, b, h, start, stride_b, stride_h, stride_m, VARLEN: tl.constexpr):
    """Return the address of the first row of sample b, head h. Packed sequences: row `start`, no batch stride."""
    base = ptr + h.to(tl.int64) * stride_h
    if VARLEN:
        base += start.to(tl.int64) * stride_m
    else:
        base += b.to(tl.int64) * stride_b
    return base


@triton.jit
def dense_head_base(ptr, b, h, start, heads, seqlen, total, VARLEN: tl.constexpr):
    """Return the address of the first value of sample b, head h in a dense (B, H, Sq), or with VARLEN (H, Tq)."""
    if VARLEN:
        base = ptr + h.to(tl.int64) * total + start
    else:
        base = ptr + (b * heads + h).to(tl.int64) * seqlen
    return base


@triton.jit
def key_range(row0, sq, sk, window_left, window_right, c: tl.constexpr):
    """Return the keys [lo, hi) that the query tile from `row0` on can see. lo is a multiple of BLOCK_N."""
    offset = sk - sq
    lo = 0
    hi = sk
    if c.CAUSAL:
        hi = tl.minimum(sk, row0 + c.BLOCK_M + offset)
    elif c.HAS_RIGHT:
        hi = tl.minimum(sk, row0 + c.BLOCK_M + offset + window_right)
    if c.HAS_LEFT:
        lo = tl.maximum(0, row0 + offset - window_left) // c.BLOCK_N * c.BLOCK_N
    if c.SEQ_LENS:
        hi = tl.where(row0 < sq, hi, lo)
    return lo, hi


@triton.jit
def row_range(n0, sq, sk, window_left, window_right, c: tl.constexpr):
    """Return the query rows [lo, hi) that can see a key of the tile from `n0` on. lo is a multiple of BLOCK_M."""
    offset = sk - sq
    lo = 0
    hi = sq
    if c.CAUSAL:
        lo = tl.maximum(0, n0 - offset) // c.BLOCK_M * c.BLOCK_M
    elif c.HAS_RIGHT:
        lo = tl.maximum(0, n0 - offset - window_right) // c.BLOCK_M * c.BLOCK_M
    if c.HAS_LEFT:
        hi = tl.minimum(sq, n0 + c.BLOCK_N - offset + window_left)
    if c.SEQ_LENS:
        hi = tl.where(n0 < sk, hi, lo)
    return lo, hi


@triton.jit
def tile_needs_mask(row0, n0, sq, sk, window_left, window_right, c: tl.constexpr):
    """Return whether the tile of scores at (row0, n0) has a query and a key that must not see each other."""
    offset = sk - sq
    if c.CAUSAL:  # the last row sees up to key sk - 1, so the diagonal also hides keys beyond sk
        needs_mask = n0 + c.BLOCK_N > row0 + offset
    else:
        needs_mask = n0 + c.BLOCK_N > sk
        if c.HAS_RIGHT:
            needs_mask = needs_mask | (n0 + c.BLOCK_N > row0 + offset + window_right)
    if c.HAS_LEFT:
        needs_mask = needs_mask | (n0 < row0 + c.BLOCK_M + offset - window_left)
    return needs_mask


@triton.jit
def mask_tile(x, rel, rows, fill, row0, n0, sq, sk, window_left, window_right, c: tl.constexpr):
    """Return x where query and key see each other, else `fill`.

    `rel`: row minus column inside the tile, of x's shape. `rows`: row inside the tile, broadcastable to it. Both fp32.
    """
    distance = n0 - row0 - (sk - sq)
    if c.CAUSAL:
        x = tl.where(rel >= distance.to(tl.float32), x, fill)
    else:
        # Means column < sk - n0. Written with columns alone, AscendNPU IR 1.1.0 leaves square tiles to one vector core.
        x = tl.where(rel > rows - (sk - n0).to(tl.float32), x, fill)
        if c.HAS_RIGHT:
            x = tl.where(rel >= (distance - window_right).to(tl.float32), x, fill)
    if c.HAS_LEFT:
        x = tl.where(rel <= (distance + window_left).to(tl.float32), x, fill)
    return x


@triton.jit
def masked(x, fill, row0, n0, sq, sk, window_left, window_right, TRANSPOSED: tl.constexpr, c: tl.constexpr):
    """Return x where query and key see each other, else `fill`. x: [BLOCK_M, BLOCK_N], or TRANSPOSED its transpose.

    The mask is under a run-time `if`, so a tile in which all see each other pays nothing. ALWAYS_MASK drops the `if`.
    """
    if c.ALWAYS_MASK:
        x = apply_mask(x, fill, row0, n0, sq, sk, window_left, window_right, TRANSPOSED, c)
    else:
        if tile_needs_mask(row0, n0, sq, sk, window_left, window_right, c):
            x = apply_mask(x, fill, row0, n0, sq, sk, window_left, window_right, TRANSPOSED, c)
    return x


@triton.jit
def apply_mask(x, fill, row0, n0, sq, sk, window_left, window_right, TRANSPOSED: tl.constexpr, c: tl.constexpr):
    """Form the positions inside the tile and apply `mask_tile`."""
    rows = tl.arange(0, c.BLOCK_M).to(tl.float32)
    cols = tl.arange(0, c.BLOCK_N).to(tl.float32)
    rows = rows[None, :] if TRANSPOSED else rows[:, None]
    cols = cols[:, None] if TRANSPOSED else cols[None, :]
    rel = rows - cols
    return mask_tile(x, rel, rows, fill, row0, n0, sq, sk, window_left, window_right, c)


@triton.jit
def capped_scores(s, softcap, softcap_minus, softcap_rate, SOFTCAP: tl.constexpr):
    """Return softcap · tanh(x) for raw products s of any shape, where x = s · sm_scale / softcap.

    The host computes softcap_rate = 2 sm_scale / softcap, so that s · softcap_rate = 2x, and softcap_minus = -2 softcap
    (`configs.attention_scalars`).

    "plain" is softcap - 2 softcap / (exp(2x) + 1): one division, with a rounding error relative to the cap. float32
    inputs would notice that error where scores are small. So "precise" uses the odd polynomial of the Cephes library
    (tanhf), in powers of 2x, for small x. It is computed first, so that fewer tiles live at a time.
    """
    twice = s * softcap_rate
    if SOFTCAP == "precise":
        square = twice * twice
        series = square * -2.78563902708e-06 + 4.03107203035e-05
        series = series * square - 0.000419841527759
        series = series * square + 0.00416607568862
        series = series * square - 0.0416666024277
        series = (series * square + 0.5) * twice
    capped = softcap_minus / (tl.exp(twice) + 1.0) + softcap
    if SOFTCAP == "precise":
        capped = tl.where(tl.abs(capped) * 1.8 < softcap, softcap * series, capped)  # |x| < 0.626
    return capped


@triton.jit
def score_tile(
    s, b, h, row0, n0, sq, sk, sm_scale, softcap, softcap_minus, softcap_rate, per_head_ptr, stride_per_head_b,
    bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, TRANSPOSED: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Turn raw products into scores: scale or cap, then ALiBi, then a bias. Returns (s, capped).

    `capped` is s before ALiBi and bias; the backward kernels need it. A bias that is the same for all keys is not added
    here: kernels add it once per row, or subtract it from the row's LSE. The head's ALiBi slope is read here."""
    if c.SOFTCAP != "":
        s = capped_scores(s, softcap, softcap_minus, softcap_rate, c.SOFTCAP)
    else:
        s = s * sm_scale
    capped = s
    if c.ALIBI != "":
        slope = tl.load(per_head_ptr + b * stride_per_head_b + h)
        s = add_alibi(s, slope, row0, n0, sq, sk, TRANSPOSED, c)
    if c.BIAS == "qk" or c.BIAS == "k":
        s = add_bias(s, bias_ptr, b, h, stride_bias_b, stride_bias_h, stride_bias_m, row0, n0, sq, sk, TRANSPOSED, c)
    return s, capped


@triton.jit
def product_gradient(ds, capped, softcap_inverse, c: tl.constexpr):
    """Turn the gradient of scores into that of products, up to `grad_scale`. `capped`: the result of `score_tile`.

    With a softcap, the factor is minus the softcap's derivative 1 - tanh², because grad_scale is negative.
    """
    if c.SOFTCAP != "":
        t = capped * softcap_inverse
        ds = ds * (t * t - 1.0)
    return ds


@triton.jit
def add_alibi(s, slope, row0, n0, sq, sk, TRANSPOSED: tl.constexpr, c: tl.constexpr):
    """Subtract slope · |query position - key position| from s, [BLOCK_M, BLOCK_N], or TRANSPOSED [BLOCK_N, BLOCK_M].

    "by_pair" forms the distance of each pair. "by_axis", for causal masks, needs no absolute value: it adds one vector
    of columns and subtracts one of rows. Each vector is rounded at its own magnitude, which can exceed that of
    distances inside the tile, so float32 does not use it.
    """
    distance = (n0 - row0 - (sk - sq)).to(tl.float32)
    rows = tl.arange(0, c.BLOCK_M).to(tl.float32)
    cols = tl.arange(0, c.BLOCK_N).to(tl.float32)
    if c.ALIBI == "by_axis":
        row_terms = rows * slope
        col_terms = (cols + distance) * slope
        if TRANSPOSED:
            s = s + col_terms[:, None] - row_terms[None, :]
        else:
            s = s + col_terms[None, :] - row_terms[:, None]
    else:
        if TRANSPOSED:
            rel = rows[None, :] - cols[:, None]
        else:
            rel = rows[:, None] - cols[None, :]
        s = s - slope * tl.abs(rel - distance)
    return s


@triton.jit
def drop_columns(x, start, length, BLOCK: tl.constexpr):
    """Return x [rows, BLOCK] with 0 in the columns at or beyond `length`. Column 0 of the tile is column `start`.

    A product with fewer columns than its tile does not write the remaining columns of the accumulator, however its
    operands are padded. They may hold anything, NaN included, so only a select drops them.
    """
    if start + BLOCK > length:
        cols = tl.arange(0, BLOCK)[None, :].to(tl.float32)
        x = tl.where(cols < (length - start).to(tl.float32), x, 0.0)
    return x


@triton.jit
def keep_first_rows(acc, count, BLOCK: tl.constexpr):
    """Return acc [BLOCK, columns] with 0 in the rows from `count` on.

    The compiler does not clear an accumulator whose loop runs no iteration; `count` 0 drops what it holds. The select
    goes by rows even then, because AscendNPU IR 1.1.0 does not compile one with a scalar condition."""
    rows = tl.arange(0, BLOCK).to(tl.float32)
    return tl.where((rows < count.to(tl.float32))[:, None], acc, 0.0)


@triton.jit
def row_bias(bias_ptr, b, h, stride_b, stride_h, row0, sq, c: tl.constexpr):
    """Load the bias of each row, fp32 [BLOCK_M]. It is the same for all keys: BIAS is "q" or "1" (see bias.py)."""
    base = bias_ptr + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    if c.BIAS == "q":
        bias = load_row(base, row0, sq, c.BLOCK_M).to(tl.float32)
    else:
        bias = tl.zeros([c.BLOCK_M], tl.float32) + tl.load(base).to(tl.float32)
    return bias


@triton.jit
def add_bias(
    s, bias_ptr, b, h, stride_b, stride_h, stride_m, row0, n0, sq, sk, TRANSPOSED: tl.constexpr, c: tl.constexpr
):
    """Add a bias that differs from key to key to s, [BLOCK_M, BLOCK_N], or TRANSPOSED [BLOCK_N, BLOCK_M].

    BIAS is "qk", or "k" for a bias that is the same for all rows. Its keys are contiguous. It is 0 beyond rows, keys.
    """
    base = bias_ptr + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    if c.BIAS == "qk":
        block = tl.make_block_ptr(base, (sq, sk), (stride_m, 1), (row0, n0), (c.BLOCK_M, c.BLOCK_N), (1, 0))
        bias = tl.load(block, boundary_check=(0, 1), padding_option="zero").to(tl.float32)
        if TRANSPOSED:
            bias = tl.trans(bias)
    else:
        bias = load_row(base, n0, sk, c.BLOCK_N).to(tl.float32)
        bias = bias[:, None] if TRANSPOSED else bias[None, :]
    return s + bias
