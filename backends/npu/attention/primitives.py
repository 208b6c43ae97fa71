"""Steps that the forward and the backward kernels share, as small jit functions.

Positions are compared in fp32 (integer compares run on Ascend's scalar unit): inside a tile they are small, and the
tile's own distance from the diagonal is subtracted in int32 first, so the comparison is exact wherever it decides.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_at(
    base_ptr, rows, stride, row0, COLUMN0: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Block pointer to [BLOCK_ROWS, BLOCK_COLUMNS] of a matrix of `rows` rows and COLUMNS columns, from (row0, COLUMN0)
    on; its rows are contiguous and lie `stride` apart."""
    return tl.make_block_ptr(
        base_ptr, (rows, COLUMNS), (stride, 1), (row0, COLUMN0), (BLOCK_ROWS, BLOCK_COLUMNS), (1, 0)
    )


@triton.jit
def load_tile(block_ptr, PADDED: tl.constexpr):
    """Load [rows, columns]; what lies beyond the tensor reads as zero. PADDED: the columns can overrun too."""
    if PADDED:
        tile = tl.load(block_ptr, boundary_check=(0, 1), padding_option="zero")
    else:
        tile = tl.load(block_ptr, boundary_check=(0,), padding_option="zero")
    return tile


@triton.jit
def store_tile(block_ptr, tile, PADDED: tl.constexpr):
    """Store [rows, columns], leaving out what lies beyond the tensor."""
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
    """Load [BLOCK] log-sum-exps; inf beyond the rows, where every weight exp(s - lse) is 0 then, whatever the score."""
    offs = tl.arange(0, BLOCK) + row0
    return tl.load(base_ptr + offs, mask=offs < rows, other=float("inf"))


@triton.jit
def store_row(base_ptr, values, row0, rows, BLOCK: tl.constexpr):
    """Store [BLOCK] values of a vector of length `rows` from `row0` on."""
    ptr = tl.make_block_ptr(base_ptr, (rows,), (1,), (row0,), (BLOCK,), (0,))
    tl.store(ptr, values, boundary_check=(0,))


@triton.jit
def dot(a, b, INTERPRET: tl.constexpr):
    """a @ b in fp32. The cube unit multiplies fp16, bf16 and fp32 exactly; only the interpreter needs bf16 widened."""
    if INTERPRET:
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        c = tl.dot(a, b, input_precision="ieee")
    return c


@triton.jit
def dot_add(a, b, acc, INTERPRET: tl.constexpr):
    """acc + a @ b in fp32, accumulated where the product is formed."""
    if INTERPRET:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def narrow(x, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """fp32 x rounded to DTYPE, nearest even. The interpreter cuts bfloat16 off instead, so there its low 16 bits are
    rounded away first (NaN keeps its bits)."""
    if INTERPRET and tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


@triton.jit
def running_max(m_i, row_max, INTERPRET: tl.constexpr):
    """max(m_i, row_max). One vector operation when NaN may propagate, seven when the compiler must filter it."""
    if INTERPRET:  # its maximum filters NaN whatever it is asked for
        m_new = tl.where((m_i == m_i) & (row_max == row_max), tl.maximum(m_i, row_max), m_i + row_max)
    else:
        m_new = tl.maximum(m_i, row_max, propagate_nan=tl.PropagateNan.ALL)
    return m_new


@triton.jit
def place_of(turn):
    """Where in `turn` a program takes its task: even turns run upwards, odd ones back down."""
    return tl.program_id(0) + turn % 2 * (tl.num_programs(0) - 1 - 2 * tl.program_id(0))


@triton.jit
def turns_before(task):
    """How many turns a program has had when `task` tasks have been taken.

    Tasks come in an order in which their work falls (or rises) steadily, so going back and forth evens it out.
    """
    turn = task // tl.num_programs(0)
    return turn + (place_of(turn) < task % tl.num_programs(0)).to(tl.int32)


@triton.jit
def task_in(turn):
    """The task that a program takes in `turn`, counted over all samples."""
    return turn * tl.num_programs(0) + place_of(turn)


@triton.jit
def tasks_of(cu_seqlens_ptr, sample, total, seqlen, batch, heads, BLOCK: tl.constexpr, VARLEN: tl.constexpr,
             BY_SAMPLE: tl.constexpr):  # fmt: skip
    """Work of `sample` -> (blocks of its sequence, tasks: a block of a head each).

    Sequences of different lengths (BY_SAMPLE) come one after another, packed ones with the blocks that they have;
    otherwise there is one sample of the whole batch's tasks.
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
def task_of(task, sample, blocks, batch, heads, together, BY_SAMPLE: tl.constexpr, LAST_FIRST: tl.constexpr):
    """One of the tasks of `sample` -> (b, head, block of the sequence).

    `together` heads at a time, the first block of each, then the second of each (LAST_FIRST: from the last block on):
    programs that work at the same time have as much to do, on keys that stay in the cache until all are through.
    """
    pairs = heads
    if not BY_SAMPLE:
        pairs = heads * batch
    part = task // (together * blocks)
    inside = task % (together * blocks)
    width = tl.minimum(together, pairs - part * together)
    pair = part * together + inside % width
    block = inside // width
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
    """Query rows and keys of sample `b` that take part, never more than the tensors have."""
    sq = seqlen_q
    sk = seqlen_k
    if SEQ_LENS:
        sk = tl.minimum(tl.load(seq_lens_ptr + b), seqlen_k)
        sq = tl.minimum(sk, seqlen_q)
    return sq, sk


@triton.jit
def packed_rows(cu_seqlens_ptr, b, total):
    """Sequence `b` of a packed tensor of `total` rows -> (first row, rows), never outside the tensor."""
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + b), 0), total)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + b + 1), start), total)
    return start, end - start


@triton.jit
def sequence(
    seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, b, seqlen_q, seqlen_k, total_q, total_k, c: tl.constexpr
):
    """What takes part in sample `b` -> (its first row of q, its first row of k, query rows, keys)."""
    start_q = 0
    start_k = 0
    sq, sk = effective_lengths(seq_lens_ptr, b, seqlen_q, seqlen_k, c.SEQ_LENS)
    if c.VARLEN:
        start_q, sq = packed_rows(cu_seqlens_q_ptr, b, total_q)
        start_k, sk = packed_rows(cu_seqlens_k_ptr, b, total_k)
    return start_q, start_k, sq, sk


@triton.jit
def base_of(ptr, b, h, start, stride_b, stride_h, stride_m, VARLEN: tl.constexpr):
    """Address of the first row of sample b and head h; packed sequences have a start and no batch stride."""
    base = ptr + h.to(tl.int64) * stride_h
    if VARLEN:
        base += start.to(tl.int64) * stride_m
    else:
        base += b.to(tl.int64) * stride_b
    return base


@triton.jit
def row_base_of(ptr, b, h, start, heads, seqlen, total, VARLEN: tl.constexpr):
    """Address of the first value of sample b and head h in a dense (B, H, Sq) or (H, Tq)."""
    if VARLEN:
        base = ptr + h.to(tl.int64) * total + start
    else:
        base = ptr + (b * heads + h).to(tl.int64) * seqlen
    return base


@triton.jit
def key_range(row0, sq, sk, window_left, window_right, c: tl.constexpr):
    """Keys [lo, hi) that a tile of query rows can see; lo is a multiple of BLOCK_N."""
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
    """Query rows [lo, hi) that can see a key of a tile; lo is a multiple of BLOCK_M."""
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
def sees_nothing(first, count, below, above, ROWS: tl.constexpr, HAS_BELOW: tl.constexpr, HAS_ABOVE: tl.constexpr):
    """Which of the rows at position `first` and the next see nothing, 1.0 or 0.0 [ROWS]: one sees what of 0 to `count`
    is as far as `below` below it and `above` above it."""
    position = (tl.arange(0, ROWS) + first).to(tl.float32)
    lo = tl.zeros([ROWS], tl.float32)
    hi = lo + count.to(tl.float32)
    if HAS_BELOW:
        lo = tl.maximum(lo, position - below.to(tl.float32))
    if HAS_ABOVE:
        hi = tl.minimum(hi, position + (above + 1).to(tl.float32))
    return tl.where(lo < hi, 0.0, 1.0)


@triton.jit
def tile_needs_mask(row0, n0, sq, sk, window_left, window_right, c: tl.constexpr):
    """Whether a tile of scores holds a pair that must not see each other (asked only of MASKED kernels)."""
    offset = sk - sq
    if c.CAUSAL:  # the last real row sees up to key sk - 1, so the diagonal also cuts what lies beyond the keys
        needed = n0 + c.BLOCK_N > row0 + offset
    else:
        needed = n0 + c.BLOCK_N > sk
        if c.HAS_RIGHT:
            needed = needed | (n0 + c.BLOCK_N > row0 + offset + window_right)
    if c.HAS_LEFT:
        needed = needed | (n0 < row0 + c.BLOCK_M + offset - window_left)
    return needed


@triton.jit
def mask_tile(x, rel, rows, fill, row0, n0, sq, sk, window_left, window_right, c: tl.constexpr):
    """x where query and key see each other, else `fill`.

    `rel` is row minus column inside the tile, of x's shape, `rows` the row, shaped to broadcast with it, both fp32.
    """
    distance = n0 - row0 - (sk - sq)
    if c.CAUSAL:
        x = tl.where(rel >= distance.to(tl.float32), x, fill)
    else:
        # column < sk - n0; asked of columns alone, AscendNPU IR 1.1.0 leaves square tiles to one vector core
        x = tl.where(rel > rows - (sk - n0).to(tl.float32), x, fill)
        if c.HAS_RIGHT:
            x = tl.where(rel >= (distance - window_right).to(tl.float32), x, fill)
    if c.HAS_LEFT:
        x = tl.where(rel <= (distance + window_left).to(tl.float32), x, fill)
    return x


@triton.jit
def masked(x, fill, row0, n0, sq, sk, window_left, window_right, TRANSPOSED: tl.constexpr, c: tl.constexpr):
    """x [BLOCK_M, BLOCK_N], or TRANSPOSED [BLOCK_N, BLOCK_M], where query and key see each other, else `fill`.

    Under a run-time `if`, so that a tile in which all see each other pays nothing; ALWAYS_MASK does without the `if`.
    """
    if c.ALWAYS_MASK:
        x = mask_whole(x, fill, row0, n0, sq, sk, window_left, window_right, TRANSPOSED, c)
    else:
        if tile_needs_mask(row0, n0, sq, sk, window_left, window_right, c):
            x = mask_whole(x, fill, row0, n0, sq, sk, window_left, window_right, TRANSPOSED, c)
    return x


@triton.jit
def mask_whole(x, fill, row0, n0, sq, sk, window_left, window_right, TRANSPOSED: tl.constexpr, c: tl.constexpr):
    """`mask_tile` with the positions inside the tile."""
    rows = tl.arange(0, c.BLOCK_M).to(tl.float32)
    cols = tl.arange(0, c.BLOCK_N).to(tl.float32)
    rows = rows[None, :] if TRANSPOSED else rows[:, None]
    cols = cols[:, None] if TRANSPOSED else cols[None, :]
    rel = rows - cols
    return mask_tile(x, rel, rows, fill, row0, n0, sq, sk, window_left, window_right, c)


@triton.jit
def capped_scores(s, softcap, softcap_minus, softcap_rate, SOFTCAP: tl.constexpr):
    """softcap · tanh(x) of raw products s = x · softcap / sm_scale, of any shape; softcap_rate makes 2x of them.

    "plain": softcap - 2 softcap / (exp(2x) + 1), one division, with an error at the size of the cap. "precise", for
    float32 inputs, which would notice it where scores are small: there the odd polynomial of the Cephes library (tanhf)
    in powers of 2x. It comes first, so that fewer tiles live at a time.
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
def cap_derivative(capped, softcap_inverse):
    """tanh² - 1 from what `capped_scores` returned: the cap's derivative with the opposite sign, for which grad_scale
    has one."""
    t = capped * softcap_inverse
    return t * t - 1.0


@triton.jit
def score_tile(
    s, b, h, row0, n0, sq, sk, sm_scale, softcap, softcap_minus, softcap_rate, per_head_ptr, stride_per_head_b,
    bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, TRANSPOSED: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Scores from raw products -> (s, capped); `capped`, for the backward pass, is s before anything is added. A bias
    that is the same for all keys is left to the kernels, which know better places for it. Numbers of the head are read
    here, through one pointer, so that kernels name none of them."""
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
def add_alibi(s, slope, row0, n0, sq, sk, TRANSPOSED: tl.constexpr, c: tl.constexpr):
    """s [BLOCK_M, BLOCK_N], or TRANSPOSED [BLOCK_N, BLOCK_M], less slope · |query position - key position|.

    ALIBI is "by_pair", or "by_axis" where no query sees a later key: then the distance is a difference, and a row and a
    column come off instead of a tile. Each is rounded at its own size, more than a tile's width, so not for float32.
    """
    distance = (n0 - row0 - (sk - sq)).to(tl.float32)
    rows = tl.arange(0, c.BLOCK_M).to(tl.float32)
    cols = tl.arange(0, c.BLOCK_N).to(tl.float32)
    if c.ALIBI == "by_axis":
        of_row = rows * slope
        of_col = (cols + distance) * slope
        if TRANSPOSED:
            s = s + of_col[:, None] - of_row[None, :]
        else:
            s = s + of_col[None, :] - of_row[:, None]
    else:
        if TRANSPOSED:
            rel = rows[None, :] - cols[:, None]
        else:
            rel = rows[:, None] - cols[None, :]
        s = s - slope * tl.abs(rel - distance)
    return s


@triton.jit
def drop_columns(x, start, length, BLOCK: tl.constexpr):
    """x [rows, BLOCK] with 0 in the columns that lie at or beyond `length`, where the first one is `start`.

    A product with fewer columns than its tile has leaves the others of the accumulator as they were, whatever the
    padding of its operands: what comes from there may be anything, NaN included, and only a select drops it.
    """
    if start + BLOCK > length:
        cols = tl.arange(0, BLOCK)[None, :].to(tl.float32)
        x = tl.where(cols < (length - start).to(tl.float32), x, 0.0)
    return x


@triton.jit
def first_rows(acc, count, BLOCK: tl.constexpr):
    """acc [BLOCK, columns] with 0 in the rows from `count` on: in all of them for a count of 0, the way to drop what an
    accumulator holds that no iteration of its loop wrote, which is not cleared then. By rows even so: a select with a
    scalar condition is more than AscendNPU IR 1.1.0 compiles."""
    rows = tl.arange(0, BLOCK).to(tl.float32)
    return tl.where((rows < count.to(tl.float32))[:, None], acc, 0.0)


@triton.jit
def row_bias(bias_ptr, b, h, stride_b, stride_h, row0, sq, c: tl.constexpr):
    """The bias of each row, fp32 [BLOCK_M], where it is the same for all keys: BIAS is "q" or "1" (see bias.py)."""
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
    """s [BLOCK_M, BLOCK_N], or TRANSPOSED [BLOCK_N, BLOCK_M], plus a bias that differs from key to key; 0 beyond rows
    and keys. BIAS is "qk", or "k" where it is the same for all rows; its keys are contiguous."""
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
