"""FlashAttention-2 forward (Dao 2023, arXiv:2307.08691, algorithm 1) with block pointers or TMA descriptors.

Each program owns BLOCK_M queries of one head and walks over the keys in blocks of BLOCK_N: scores stay on chip, the
softmax is kept up to date by rescaling (online softmax), the normalisation comes once at the end. What differs from
the paper: the walk is split into blocks that every query sees (no mask at all) and blocks that the causal diagonal or
the end of the sequence cuts; exponentials are base 2, with the scale folded into one multiply-add; heads that share
keys (GQA) are neighbours in the grid, so they meet in L2; causal grids start with the longest rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diyfa.backends.cuda.attention_launch import softmax_scale, tuned_config
from diyfa.backends.cuda.configs import AttentionConfig, form_of, schedule
from diyfa.backends.cuda.dots import dot, dot_add, round_to
from diyfa.backends.cuda.launch import Box, Launch, Launches, on_device
from diyfa.backends.cuda.tiles import (
    LN2,
    LOG2E,
    box,
    cdiv,
    head_base,
    load_tile,
    padded_head_dim,
    sequence_bounds,
    store_tile,
)
from diyfa.problem import AttentionProblem, AttentionTensors, bhsd_strides


@triton.jit
def online_softmax_update(s, m_i, l_i, acc, scale_log2, MASKED: tl.constexpr):
    """Bring running maximum, sum and output to the new block of raw scores s [BLOCK_M, BLOCK_N].

    Returns (p, m_i, l_i, acc): p are the block's weights relative to the new maximum; m_i is in units of log2.
    """
    m_new = tl.maximum(m_i, tl.max(s, 1) * scale_log2)  # [BLOCK_M]
    if MASKED:  # a row that has seen no key yet stays at -inf: measure from 0 to avoid inf - inf
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
    else:
        m_ref = m_new
    p = tl.math.exp2(s * scale_log2 - m_ref[:, None])  # [BLOCK_M, BLOCK_N]
    alpha = tl.math.exp2(m_i - m_ref)  # [BLOCK_M]
    return p, m_new, l_i * alpha + tl.sum(p, 1), acc * alpha[:, None]


@triton.jit
def _attend_blocks(
    acc,  # [BLOCK_M, BLOCK_DV] fp32
    l_i,  # [BLOCK_M]
    m_i,  # [BLOCK_M]
    q,  # [BLOCK_M, BLOCK_D]
    k_ref,
    v_ref,
    b,
    hk,
    start,
    end,
    offs_m,
    offset,
    n_keys,
    stride_kn,
    stride_vn,
    scale_log2,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    NEGATE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
    FORM: tl.constexpr,
):
    """Key blocks [start, end); MASKED compares positions, otherwise every query sees every key of the blocks."""
    for start_n in tl.range(start, end, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        k = load_tile(k_ref, b, hk, start_n, n_keys, stride_kn, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED, FORM)
        s = dot(q, tl.trans(k), PRECISION)  # [BLOCK_M, BLOCK_N]
        if NEGATE:
            s = -s
        if MASKED:
            offs_n = start_n + tl.arange(0, BLOCK_N)
            visible = offs_n[None, :] < n_keys
            if CAUSAL:
                visible = visible & (offs_m[:, None] + offset >= offs_n[None, :])
            s = tl.where(visible, s, float("-inf"))
        p, m_i, l_i, acc = online_softmax_update(s, m_i, l_i, acc, scale_log2, MASKED)
        v = load_tile(v_ref, b, hk, start_n, n_keys, stride_vn, HEAD_DIM_V, BLOCK_N, BLOCK_DV, MASKED, FORM)
        acc = dot_add(round_to(p, v.dtype), v, acc, PRECISION)
    return acc, l_i, m_i


@triton.jit
def _fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    seq_lens_ptr,
    o_ptr,
    lse_ptr,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_ob,
    stride_oh,
    stride_om,
    heads_q,
    group,  # query heads that share one key head
    seqlen_q,
    seqlen_k,
    scale,
    CAUSAL: tl.constexpr,
    NEGATE: tl.constexpr,
    HAS_SEQ_LENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
    FORM: tl.constexpr,
):
    # One-dimensional grid, query blocks of one head next to each other: they read the same keys from L2.
    blocks_m = tl.cdiv(seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    block_m = pid % blocks_m
    if CAUSAL:  # longest first: the last programs to start are short ones
        block_m = blocks_m - 1 - block_m
    b = (pid // blocks_m) // heads_q
    h = (pid // blocks_m) % heads_q
    hk = h // group
    n_queries, n_keys = sequence_bounds(seq_lens_ptr, b, seqlen_q, seqlen_k, HAS_SEQ_LENS)
    offset = n_keys - n_queries  # query i is aligned with key i + offset

    row0 = block_m * BLOCK_M
    offs_m = row0 + tl.arange(0, BLOCK_M)
    q_ref = head_base(q_ptr, b, h, stride_qb, stride_qh, FORM)
    k_ref = head_base(k_ptr, b, hk, stride_kb, stride_kh, FORM)
    v_ref = head_base(v_ptr, b, hk, stride_vb, stride_vh, FORM)
    q = load_tile(q_ref, b, h, row0, n_queries, stride_qm, HEAD_DIM, BLOCK_M, BLOCK_D, True, FORM)

    # Keys [0, full) are seen by every query of the block, [full, end) by some.
    end = n_keys
    full = n_keys
    if CAUSAL:
        end = tl.minimum(n_keys, tl.maximum(row0 + BLOCK_M + offset, 0))
        full = tl.minimum(n_keys, tl.maximum(row0 + offset + 1, 0))
    if HAS_SEQ_LENS:
        end = tl.where(row0 < n_queries, end, 0)
        full = tl.where(row0 < n_queries, full, 0)
    full = full // BLOCK_N * BLOCK_N

    scale_log2 = scale * LOG2E
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    acc, l_i, m_i = _attend_blocks(
        acc, l_i, m_i, q, k_ref, v_ref, b, hk, 0, full, offs_m, offset, n_keys, stride_kn, stride_vn, scale_log2,
        CAUSAL, False, NEGATE, HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, FORM,
    )  # fmt: skip
    acc, l_i, m_i = _attend_blocks(
        acc, l_i, m_i, q, k_ref, v_ref, b, hk, full, end, offs_m, offset, n_keys, stride_kn, stride_vn, scale_log2,
        CAUSAL, True, NEGATE, HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, FORM,
    )  # fmt: skip

    # A row that saw no key, or lies beyond its sequence: out 0, lse +inf.
    live = (l_i != 0.0) & (offs_m < n_queries)
    out = tl.where(live[:, None], acc / tl.where(live, l_i, 1.0)[:, None], 0.0)
    lse = tl.where(live, (m_i + tl.math.log2(tl.where(live, l_i, 1.0))) * LN2, float("inf"))
    lse_row = lse_ptr + (b.to(tl.int64) * heads_q + h) * seqlen_q
    tl.store(lse_row + offs_m, lse, mask=offs_m < seqlen_q)
    o_base = o_ptr + b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh
    store_tile(o_base, out, row0, seqlen_q, stride_om, HEAD_DIM_V, BLOCK_M, BLOCK_DV, FORM)


def constants(problem: AttentionProblem, config: AttentionConfig, negate: bool) -> dict[str, object]:
    """The kernel's constexprs."""
    return {
        "CAUSAL": problem.causal,
        "NEGATE": negate,
        "HAS_SEQ_LENS": problem.seq_lens,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": padded_head_dim(problem.head_dim),
        "BLOCK_DV": padded_head_dim(problem.head_dim_v),
        "PRECISION": "ieee",
        "FORM": form_of(config),
    }


_launches = Launches()


def _launch(problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, config: AttentionConfig) -> Launch:
    q, k, v = tensors.q, tensors.k, tensors.v
    key = (problem, config, tensors.sm_scale, q.stride(), k.stride(), v.stride(), q.device)

    def make() -> Launch:
        scale, negate = softmax_scale(tensors.sm_scale)
        values = constants(problem, config, negate)
        boxes: tuple[Box | None, ...] = (None,) * 6
        if config.form == "tma":
            rows = (config.block_m, config.block_n, config.block_n)
            widths = (values["BLOCK_D"], values["BLOCK_D"], values["BLOCK_DV"])
            boxes = (
                *(box(x, problem.layout, *tile) for x, *tile in zip((q, k, v), rows, widths, strict=True)),
                *boxes[3:],
            )
        scalars = (
            *(s for x in (q, k, v, out) for s in bhsd_strides(x, problem.layout)[:3]),
            problem.heads_q,
            problem.heads_q // problem.heads_kv,
            problem.seqlen_q,
            problem.seqlen_k,
            scale,
        )
        grid = cdiv(problem.seqlen_q, config.block_m) * problem.batch * problem.heads_q
        fixed = problem.aligned and not problem.seq_lens
        return Launch(_fwd_kernel, grid, boxes, scalars, values, schedule(config), fixed)

    return _launches.get(key, make)


def attention_forward(
    problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Launch the forward kernel, which fills out and lse."""
    q = tensors.q

    def run(config: AttentionConfig) -> None:
        _launch(problem, tensors, out, config)(q, tensors.k, tensors.v, tensors.seq_lens, out, lse)

    with on_device(q):
        run(tuned_config("fwd", problem, run))
