"""What a program of the Hopper kernel does when its tiles are done and one was spoiled: Gluon helpers of `fwd_sm90.py`.

Two things spoil a tile. NaN and infinities in V reach all rows that are multiplied with them, also those that a mask
hides them from (EXACT); why there is something to do, and why rows that come out finite are right, is said in
`exact.py`. Here only V can leak: scores are selected before they are summed, keys beyond an end are read as zeros, and
there is no dropout. And only under a mask: without one all rows of a tile see all its keys. And a row's scores may rise
so far above the maximum that it is measured from that its sum is beyond float32's range (ANCHORED, `anchored_step` in
`sm90_softmax.py`).

So consumers look at each finished accumulator (`look`), which costs them a multiply-add for every second element, and
at each row's sum (`look_at_sums`), and remember. At its end a program that has seen something not finite goes through
its tiles once more, from the notices of all its turns (`sm90_notices.py`). Log-sum-exps that are infinite although
their row sees a key are computed again, with a running maximum, then from the log-sum-exps the outputs of these rows
and those that are not finite for no reason of their own. That happens next to never, so all of it is small: four warps,
16 keys at a time, 64 columns of out. Operands come from global memory straight to the registers in which the
instructions want them (mma.sync: wgmma would need shared memory). It stands behind the partitions, where no loop shares
registers with it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from diyfa.backends.cuda.exact import SIGN as _SIGN
from diyfa.backends.cuda.sm90_notices import kept_notice
from diyfa.backends.cuda.sm90_products import ROWS, run_count
from diyfa.backends.cuda.sm90_rows import here_wide, offset_of
from diyfa.backends.cuda.sm90_softmax import HEADROOM, LN2, LOG2E, scores_log2, softmax_step
from diyfa.backends.cuda.sm90_tiles import here
from diyfa.backends.cuda.tiles import EQUAL, PACKED

WARPS = gl.constexpr(4)
KEYS = gl.constexpr(16)  # of a block that is computed again: the K of one instruction
FEATURES = gl.constexpr(64)  # of q and k that are multiplied at once
COLUMNS = gl.constexpr(64)  # of out that are computed at once
SIGN = gl.constexpr(_SIGN.value)
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))
OWN = gl.constexpr(gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0]))  # of [32, 4], one for each thread


@gluon.jit
def _indices(COUNT: gl.constexpr, LAYOUT: gl.constexpr, OWN: gl.constexpr):
    """0 to COUNT - 1 -> (the bits OWN, which tell threads apart, the others, which are constants of the program)."""
    index = gl.arange(0, COUNT, layout=LAYOUT)
    return index & OWN, index & ~OWN


@gluon.jit
def _row_addresses(base, stride, row, rows, end):
    """Addresses of rows (`_indices` from `row` on), those from `end` on of the last one before."""
    own_row, next_row = rows
    at = gl.minimum(row + own_row + next_row, here(end) - 1)
    return base + at.to(gl.int64) * here_wide(stride)


@gluon.jit
def _load_values(base, stride, row, rows, end, column, columns, width):
    """[rows, columns] of V. What lies beyond its end or width is some other value of V: a row that nobody sees, or a
    column that is not written. The width is a multiple of 8."""
    own_column, next_column = columns
    at = _row_addresses(base, stride, row, rows, end)[:, None]
    inside = gl.minimum(next_column & ~7, here(width) - column - 8) + (next_column & 7)
    return gl.load(at + (column + own_column)[None, :] + inside[None, :])


@gluon.jit
def allocate_votes(CONSUMERS: gl.constexpr):
    """A word for each warp of each consumer."""
    return gl.allocate_shared_memory(gl.int32, [CONSUMERS, WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def nothing_found():
    """What `look` begins with."""
    return gl.zeros([ROWS // 2, 4], gl.float32, OWN)


@gluon.jit
def look(o, found, PIECES_V: gl.constexpr, JOINED: gl.constexpr):
    """found, a number for each thread, becomes NaN where a finished accumulator o holds one or an infinity that came
    with V.

    One row knows: what V holds reaches all rows of a product. So each thread looks at one of its two rows. A finite
    number times 0 is 0 and anything else NaN.
    """
    for run in gl.static_range(run_count(PIECES_V, JOINED)):
        # A row is 16 * warp + 8 * half + lane / 4, a column 8 * n + 2 * (lane % 4) + bit.
        rows, _ = gl.split(o[run].reshape([WARPS, 2, 8, o[run].shape[1]]).permute(0, 2, 3, 1))
        rows = rows.reshape([WARPS, 8, rows.shape[2] // 8, 4, 2]).permute(0, 1, 3, 2, 4)
        rows = rows.reshape([ROWS // 2, 4, rows.shape[3] * 2])
        found += gl.convert_layout(gl.sum(rows * 0.0, 2), OWN, assert_trivial=True)
    return found


@gluon.jit
def look_at_sums(l_i, found):
    """found becomes NaN where a row's sum of weights l_i [64] is one or has grown beyond HEADROOM."""
    infinite = (l_i * (2.0**127 / HEADROOM)) * 0.0  # finite for what is allowed
    first, second = gl.split(infinite.reshape([WARPS, 2, 8]).permute(0, 2, 1))
    rows = gl.convert_layout((first + second).reshape([ROWS // 2]), gl.SliceLayout(1, OWN), assert_trivial=True)
    return found + rows[:, None]


@gluon.jit
def vote(found, votes):
    """Each warp leaves a word at `votes`, 0 if its threads found nothing."""
    flags = (found != 0.0).to(gl.int32).reshape([WARPS, ROWS // 2 // WARPS * 4])
    votes.store(gl.max(flags, 1))


@gluon.jit
def any_vote(votes):
    """Whether one of the warps has voted for it -> int32, once all have."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([WARPS], [32], [WARPS], [0])  # every thread reads all of them
    return gl.max(votes.load(LAYOUT), 0)


@gluon.jit
def is_spoiled(votes, CONSUMERS: gl.constexpr):
    """Whether one of the consumers found something -> int32."""
    spoiled = 0
    for c in gl.static_range(CONSUMERS):
        spoiled |= any_vote(votes.index(c))
    return spoiled


@gluon.jit
def _any_row(flags, votes):
    """Whether one of `flags` [64] is set -> int32."""
    votes.store(gl.max(flags.to(gl.int32).reshape([WARPS, ROWS // WARPS]), 1))
    return any_vote(votes)


@gluon.jit
def _scores(q_base, k_base, stride_q, stride_k, row0, n_queries, start, n_keys, head_dim):
    """q kᵀ of 64 queries from row0 on and KEYS keys from `start` on, [64, KEYS]; beyond an end, of others."""
    rows = _indices(ROWS, gl.SliceLayout(1, LEFT), 55)
    keys = _indices(KEYS, gl.SliceLayout(0, RIGHT), 7)
    own_q, next_q = _indices(FEATURES, gl.SliceLayout(0, LEFT), 6)
    own_k, next_k = _indices(FEATURES, gl.SliceLayout(1, RIGHT), 6)
    s = gl.zeros([ROWS, KEYS], gl.float32, MMA)
    for column in range(0, head_dim, FEATURES):
        left = here(head_dim) - column
        at_q = _row_addresses(q_base, stride_q, row0, rows, n_queries)[:, None] + (column + own_q)[None, :]
        at_k = _row_addresses(k_base, stride_k, start, keys, n_keys)[None, :] + (column + own_k)[:, None]
        q = gl.load(at_q + next_q[None, :], mask=(next_q < left - own_q)[None, :], other=0.0)
        k = gl.load(at_k + next_k[:, None], mask=(next_k < left - own_k)[:, None], other=0.0)
        s = mma_v2(q, k, s)
    return s


@gluon.jit
def _exact_add(weights, seen, v, acc):
    """acc + weights v over the pairs that are `seen`; as `exact_dot_add` in `exact.py`, weights are not negative."""
    DTYPE: gl.constexpr = v.dtype
    x = v.to(gl.float32)
    acc = mma_v2(gl.convert_layout(weights.to(DTYPE), LEFT), gl.where(gl.abs(x) < float("inf"), x, 0.0).to(DTYPE), acc)
    # Each time the same comparisons: their results are too many to be kept.
    x = here(x)
    found = gl.zeros(acc.shape, gl.float32, MMA)
    pair = gl.convert_layout(gl.where(seen, 1.0, 0.0).to(DTYPE), LEFT)
    found = mma_v2(pair, gl.where(gl.abs(x) < float("inf"), 0.0, 1.0).to(DTYPE), found)
    x = here(x)
    sign = gl.where(x == float("inf"), 1.0, gl.where(x == float("-inf"), -1.0, 0.0))
    weighs = gl.convert_layout(gl.where(weights > 0.0, SIGN, 0.0).to(DTYPE), LEFT)
    found = mma_v2(weighs, sign.to(DTYPE), found)  # pairs + SIGN * (those of sign + less those of sign -)
    pairs = gl.floor(found + 0.5)
    infinity = gl.where(found == pairs * (1.0 - SIGN), float("-inf"), float("nan"))
    infinity = gl.where(found == pairs * (1.0 + SIGN), float("inf"), infinity)
    return acc + gl.where(found == 0.0, 0.0, infinity)


@gluon.jit
def _values(
    q_base, k_base, v_base, stride_q, stride_k, stride_v, head_dim, column, head_dim_v,
    lse_log2, position, row0, n_queries, start, end, n_keys, window_left, window_right, scale, cap,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr, NEGATE: gl.constexpr,
):  # fmt: skip
    """COLUMNS columns of out from `column` on, [64, COLUMNS], from the keys [start, end)."""
    own_key, next_key = _indices(KEYS, gl.SliceLayout(0, MMA), 6)
    rows_v = _indices(KEYS, gl.SliceLayout(1, RIGHT), 6)
    columns = _indices(COLUMNS, gl.SliceLayout(0, RIGHT), 7)
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
    for key in range(start, end, KEYS):
        s = _scores(q_base, k_base, stride_q, stride_k, row0, n_queries, key, n_keys, head_dim)
        s, unit = scores_log2(s, scale, cap, SOFTCAP, NEGATE)
        at = (key + own_key)[None, :] + next_key[None, :]
        seen = at < (gl.zeros_like(position) + n_keys)[:, None]
        if CAUSAL:
            seen = seen & (at <= position[:, None])
        elif HAS_RIGHT:
            seen = seen & (at <= position[:, None] + window_right)
        if HAS_LEFT:
            seen = seen & (at >= position[:, None] - window_left)
        weights = gl.where(seen, gl.exp2(s * unit - lse_log2[:, None]), 0.0)
        v = _load_values(v_base, stride_v, key, rows_v, n_keys, column, columns, head_dim_v)
        acc = _exact_add(weights, seen, v, acc)
    return acc


@gluon.jit
def _log_sums(
    q_base, k_base, stride_q, stride_k, head_dim, position, row0, n_queries, start, end, n_keys,
    window_left, window_right, scale, cap,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr, NEGATE: gl.constexpr,
):  # fmt: skip
    """Log-sum-exps [64], in units of log2, of 64 queries over the keys [start, end); -inf where all scores are."""
    m_i = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
    l_i = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, MMA))
    for key in range(start, end, KEYS):
        s = _scores(q_base, k_base, stride_q, stride_k, row0, n_queries, key, n_keys, head_dim)
        _, m_i, l_i, _ = softmax_step(
            s, m_i, l_i, key, position, n_keys, window_left, window_right, scale, cap,
            True, CAUSAL, HAS_LEFT, HAS_RIGHT, SOFTCAP, NEGATE, False,
        )  # fmt: skip
    return m_i + gl.log2(l_i)


@gluon.jit
def _rewrite_rows(
    q, k, v, o,  # `matrix` of each
    lse_ptr, votes, group_size, b, h, row0, first_block, end_block, first_q, first_k, n_queries, n_keys,
    heads_q, seqlen_q, total_q, window_left, window_right, scale, cap,
    BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    LENGTHS: gl.constexpr, SOFTCAP: gl.constexpr, NEGATE: gl.constexpr, ANCHORED: gl.constexpr,
):  # fmt: skip
    """Compute what is not finite for no reason of its own in out and lse of 64 queries, from row0 on, again."""
    hk = h // group_size
    q_base = q[0] + offset_of(q, b, h, first_q, LENGTHS)
    k_base = k[0] + offset_of(k, b, hk, first_k, LENGTHS)
    v_base = v[0] + offset_of(v, b, hk, first_k, LENGTHS)
    # Out has no ragged box of samples.
    o_base = o[0] + offset_of(o, b, h, first_q, PACKED if LENGTHS == PACKED else EQUAL)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA)) + here(row0)
    if LENGTHS == PACKED:
        first_lse = h.to(gl.int64) * total_q + first_q
    else:
        first_lse = (b * heads_q + h).to(gl.int64) * seqlen_q
    lse = gl.load(lse_ptr + first_lse + row, mask=row < n_queries, other=float("inf"))
    position = row + (n_keys - n_queries)
    start, end = first_block * BLOCK_N, gl.minimum(end_block * BLOCK_N, n_keys)
    lost = row < 0
    if ANCHORED:  # a sum that float32 could not hold is an infinity, and after a mask's left edge maybe a NaN
        last_key = gl.zeros_like(row) + (n_keys - 1)
        first_key = gl.zeros_like(row)
        if CAUSAL:
            last_key = gl.minimum(position, last_key)
        elif HAS_RIGHT:
            last_key = gl.minimum(position + window_right, last_key)
        if HAS_LEFT:
            first_key = gl.maximum(position - window_left, 0)
        lost = (row < n_queries) & (first_key <= last_key) & (lse == float("inf"))
        if HAS_LEFT:
            lost = lost | (lse != lse)
        if _any_row(lost, votes) != 0:
            lse_log2 = _log_sums(
                q_base, k_base, q[3], k[3], q[4], position, row0, n_queries, start, end, n_keys,
                window_left, window_right, scale, cap, CAUSAL, HAS_LEFT, HAS_RIGHT, SOFTCAP, NEGATE,
            )  # fmt: skip
            lost = lost & (lse_log2 != float("-inf"))
            lse = gl.where(lost, lse_log2 * LN2, lse)
            gl.store(lse_ptr + first_lse + row, lse, mask=lost)
    # Where the log-sum-exp is not finite either, a score is to blame, which reaches its own row only.
    own = ((gl.abs(lse) < float("inf")) | lost)[:, None]
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, MMA))
    for first in range(0, o[4], COLUMNS):
        places = o_base + row[:, None].to(gl.int64) * o[3].to(gl.int64) + (first + column)[None, :]
        old = gl.load(places, mask=own & (first + column < o[4])[None, :], other=0.0)
        leaked = ~(gl.abs(old.to(gl.float32)) < float("inf")) | (lost[:, None] & (first + column < o[4])[None, :])
        if _any_row(gl.max(leaked.to(gl.int32), 1), votes) != 0:
            exact = _values(
                q_base, k_base, v_base, q[3], k[3], v[3], q[4], first, v[4],
                lse * LOG2E, position, row0, n_queries, start, end, n_keys, window_left, window_right, scale, cap,
                CAUSAL, HAS_LEFT, HAS_RIGHT, SOFTCAP, NEGATE,
            )  # fmt: skip
            gl.store(places, exact.to(old.dtype), mask=leaked)


@gluon.jit
def rewrite_tiles(
    q, k, v, o, lse_ptr, votes, notices, group_size,
    heads_q, seqlen_q, seqlen_k, total_q, window_left, window_right, scale, cap,
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    LENGTHS: gl.constexpr, SOFTCAP: gl.constexpr, NEGATE: gl.constexpr, ANCHORED: gl.constexpr,
):  # fmt: skip
    """Go through all tiles of the program, which are written."""
    turn = 0
    b, h, row0, first_block, end_block, first_q, first_k, n_queries, n_keys = kept_notice(
        turn, notices, seqlen_q, seqlen_k, LENGTHS, HAS_LEFT
    )  # fmt: skip
    while end_block > 0:
        for consumer in range(CONSUMERS):
            _rewrite_rows(
                q, k, v, o, lse_ptr, votes.index(0), group_size, b, h, row0 + consumer * ROWS, first_block, end_block,
                first_q, first_k, n_queries, n_keys, heads_q, seqlen_q, total_q, window_left, window_right, scale, cap,
                BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, LENGTHS, SOFTCAP, NEGATE, ANCHORED,
            )  # fmt: skip
        turn += 1
        b, h, row0, first_block, end_block, first_q, first_k, n_queries, n_keys = kept_notice(
            turn, notices, seqlen_q, seqlen_k, LENGTHS, HAS_LEFT
        )  # fmt: skip
