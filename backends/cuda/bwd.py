"""FlashAttention-2 backward (Dao 2023, arXiv:2307.08691, algorithm 2) without atomics.

Three kernels. `_bwd_preprocess_kernel` reduces delta = rowsum(dO * O) - dLSE, the part of dS that is the same for a
whole row (the gradient of the log-sum-exp enters here, so it costs nothing later). `_bwd_dkdv_kernel` gives each
program a block of keys and walks over the queries of every head in the group; `_bwd_dq_kernel` gives each program a
block of queries and walks over the keys. The paper computes all three gradients in one walk and adds dQ atomically;
two walks cost two more products out of seven, and are bitwise reproducible.

    P = exp(S - LSE),  dV = Pᵀ dO,  dP = dO Vᵀ,  dS = P * (dP - delta),  dQ = dS K * scale,  dK = dSᵀ Q * scale
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from diyfa.backends.cuda.attention_launch import tuned_config
from diyfa.backends.cuda.configs import AttentionConfig, form_of, schedule
from diyfa.backends.cuda.dots import dot, dot_add, round_to
from diyfa.backends.cuda.launch import Box, Launch, Launches, on_device
from diyfa.backends.cuda.tiles import (
    LOG2E,
    PORTABLE_FORM,
    box,
    cdiv,
    head_base,
    load_tile,
    padded_head_dim,
    sequence_bounds,
    store_tile,
)
from diyfa.problem import AttentionGradients, AttentionProblem, AttentionTensors, bhsd_strides

PREPROCESS_BLOCK_M = 32
PREPROCESS_WARPS = 4


@triton.jit
def _bwd_preprocess_kernel(
    o_ptr,
    do_ptr,
    dlse_ptr,
    seq_lens_ptr,
    delta_ptr,
    stride_ob,
    stride_oh,
    stride_om,
    stride_dob,
    stride_doh,
    stride_dom,
    stride_dlb,
    stride_dlh,
    stride_dlm,
    heads_q,
    seqlen_q,
    seqlen_k,
    HAS_SEQ_LENS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    FORM: tl.constexpr,
):
    blocks_m = tl.cdiv(seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    row0 = (pid % blocks_m) * BLOCK_M
    b = (pid // blocks_m) // heads_q
    h = (pid // blocks_m) % heads_q
    n_queries, _ = sequence_bounds(seq_lens_ptr, b, seqlen_q, seqlen_k, HAS_SEQ_LENS)
    o_base = head_base(o_ptr, b, h, stride_ob, stride_oh, FORM)
    do_base = head_base(do_ptr, b, h, stride_dob, stride_doh, FORM)
    o = load_tile(o_base, b, h, row0, n_queries, stride_om, HEAD_DIM_V, BLOCK_M, BLOCK_DV, True, FORM)
    do = load_tile(do_base, b, h, row0, n_queries, stride_dom, HEAD_DIM_V, BLOCK_M, BLOCK_DV, True, FORM)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)  # [BLOCK_M]
    offs_m = row0 + tl.arange(0, BLOCK_M)
    if HAS_DLSE:
        dlse_row = dlse_ptr + b.to(tl.int64) * stride_dlb + h.to(tl.int64) * stride_dlh
        delta -= tl.load(dlse_row + offs_m.to(tl.int64) * stride_dlm, mask=offs_m < n_queries, other=0.0)
    delta_row = delta_ptr + (b.to(tl.int64) * heads_q + h) * seqlen_q
    tl.store(delta_row + offs_m, delta, mask=offs_m < seqlen_q)


@triton.jit
def _dkdv_blocks(
    dk,  # [BLOCK_N, BLOCK_D] fp32
    dv,  # [BLOCK_N, BLOCK_DV] fp32
    k,  # [BLOCK_N, BLOCK_D]
    v,  # [BLOCK_N, BLOCK_DV]
    q_ref,
    do_ref,
    lse_row,
    delta_row,
    b,
    h,
    start,
    end,
    offs_n,
    offset,
    n_queries,
    stride_qm,
    stride_dom,
    scale_log2,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
    FORM: tl.constexpr,
):
    """Query blocks [start, end) of one head, transposed: scores are [BLOCK_N, BLOCK_M], so P and dS are
    left operands.

    MASKED compares positions. Queries beyond the end weigh exp(s - inf) = 0: the last block needs no loop of its own.
    """
    for start_m in tl.range(start, end, BLOCK_M):
        start_m = tl.multiple_of(start_m, BLOCK_M)
        offs_m = start_m + tl.arange(0, BLOCK_M)
        q = load_tile(q_ref, b, h, start_m, n_queries, stride_qm, HEAD_DIM, BLOCK_M, BLOCK_D, True, FORM)
        do = load_tile(do_ref, b, h, start_m, n_queries, stride_dom, HEAD_DIM_V, BLOCK_M, BLOCK_DV, True, FORM)
        lse = tl.load(lse_row + offs_m, mask=offs_m < n_queries, other=float("inf"))
        delta = tl.load(delta_row + offs_m, mask=offs_m < n_queries, other=0.0)
        s_t = dot(k, tl.trans(q), PRECISION)  # [BLOCK_N, BLOCK_M]
        p_t = tl.math.exp2(s_t * scale_log2 - (lse * LOG2E)[None, :])
        if MASKED:
            p_t = tl.where(offs_m[None, :] + offset >= offs_n[:, None], p_t, 0.0)
        dv = dot_add(round_to(p_t, do.dtype), do, dv, PRECISION)
        dp_t = dot(v, tl.trans(do), PRECISION)  # [BLOCK_N, BLOCK_M]
        ds_t = p_t * (dp_t - delta[None, :])
        dk = dot_add(round_to(ds_t, q.dtype), q, dk, PRECISION)
    return dk, dv


@triton.jit
def _bwd_dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    seq_lens_ptr,
    dk_ptr,
    dv_ptr,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_dob,
    stride_doh,
    stride_dom,
    stride_dkb,
    stride_dkh,
    stride_dkn,
    stride_dvb,
    stride_dvh,
    stride_dvn,
    heads_q,
    group,
    seqlen_q,
    seqlen_k,
    scale,  # signed: no maximum is taken here
    CAUSAL: tl.constexpr,
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
    blocks_n = tl.cdiv(seqlen_k, BLOCK_N)
    pid = tl.program_id(0)
    col0 = (pid % blocks_n) * BLOCK_N  # under a causal mask the first key blocks have the most queries: longest first
    heads_kv = heads_q // group
    b = (pid // blocks_n) // heads_kv
    hk = (pid // blocks_n) % heads_kv
    n_queries, n_keys = sequence_bounds(seq_lens_ptr, b, seqlen_q, seqlen_k, HAS_SEQ_LENS)
    offset = n_keys - n_queries
    # At 256 features the two accumulators fill the registers; a second copy of the loop would push them out.
    ONE_LOOP: tl.constexpr = CAUSAL and BLOCK_D > 128

    offs_n = col0 + tl.arange(0, BLOCK_N)
    k_ref = head_base(k_ptr, b, hk, stride_kb, stride_kh, FORM)
    v_ref = head_base(v_ptr, b, hk, stride_vb, stride_vh, FORM)
    k = load_tile(k_ref, b, hk, col0, n_keys, stride_kn, HEAD_DIM, BLOCK_N, BLOCK_D, True, FORM)
    v = load_tile(v_ref, b, hk, col0, n_keys, stride_vn, HEAD_DIM_V, BLOCK_N, BLOCK_DV, True, FORM)

    # Queries [begin, cut) are masked by the diagonal, [cut, end) see the whole block.
    end = n_queries
    if HAS_SEQ_LENS:
        end = tl.where(col0 < n_keys, n_queries, 0)
    begin = 0
    cut = 0
    if CAUSAL:
        begin = tl.maximum(col0 - offset, 0) // BLOCK_M * BLOCK_M
        if ONE_LOOP:
            cut = tl.maximum(end, begin)
        else:
            cut = tl.cdiv(tl.maximum(col0 + BLOCK_N - 1 - offset, 0), BLOCK_M) * BLOCK_M
            cut = tl.maximum(tl.minimum(cut, tl.cdiv(end, BLOCK_M) * BLOCK_M), begin)

    scale_log2 = scale * LOG2E
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for g in tl.range(0, group):
        h = hk * group + g
        q_ref = head_base(q_ptr, b, h, stride_qb, stride_qh, FORM)
        do_ref = head_base(do_ptr, b, h, stride_dob, stride_doh, FORM)
        row = (b.to(tl.int64) * heads_q + h) * seqlen_q
        if CAUSAL:
            dk, dv = _dkdv_blocks(
                dk, dv, k, v, q_ref, do_ref, lse_ptr + row, delta_ptr + row, b, h, begin, cut, offs_n, offset,
                n_queries, stride_qm, stride_dom, scale_log2, True, HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_D,
                BLOCK_DV, PRECISION, FORM,
            )  # fmt: skip
        if not ONE_LOOP:
            dk, dv = _dkdv_blocks(
                dk, dv, k, v, q_ref, do_ref, lse_ptr + row, delta_ptr + row, b, h, cut, end, offs_n, offset,
                n_queries, stride_qm, stride_dom, scale_log2, False, HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_D,
                BLOCK_DV, PRECISION, FORM,
            )  # fmt: skip

    # Keys beyond the end were read as zeros but still collected dV; they get exact zeros.
    live = offs_n < n_keys
    dk = tl.where(live[:, None], dk * scale, 0.0)
    dv = tl.where(live[:, None], dv, 0.0)
    dk_base = dk_ptr + b.to(tl.int64) * stride_dkb + hk.to(tl.int64) * stride_dkh
    dv_base = dv_ptr + b.to(tl.int64) * stride_dvb + hk.to(tl.int64) * stride_dvh
    store_tile(dk_base, dk, col0, seqlen_k, stride_dkn, HEAD_DIM, BLOCK_N, BLOCK_D, FORM)
    store_tile(dv_base, dv, col0, seqlen_k, stride_dvn, HEAD_DIM_V, BLOCK_N, BLOCK_DV, FORM)


@triton.jit
def _dq_blocks(
    dq,  # [BLOCK_M, BLOCK_D] fp32
    q,  # [BLOCK_M, BLOCK_D]
    do,  # [BLOCK_M, BLOCK_DV]
    lse_log2,  # [BLOCK_M]
    delta,  # [BLOCK_M]
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
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
    FORM: tl.constexpr,
):
    """Key blocks [start, end); MASKED as in the forward pass."""
    for start_n in tl.range(start, end, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        k = load_tile(k_ref, b, hk, start_n, n_keys, stride_kn, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED, FORM)
        v = load_tile(v_ref, b, hk, start_n, n_keys, stride_vn, HEAD_DIM_V, BLOCK_N, BLOCK_DV, MASKED, FORM)
        s = dot(q, tl.trans(k), PRECISION)  # [BLOCK_M, BLOCK_N]
        p = tl.math.exp2(s * scale_log2 - lse_log2[:, None])
        if MASKED:
            offs_n = start_n + tl.arange(0, BLOCK_N)
            visible = offs_n[None, :] < n_keys
            if CAUSAL:
                visible = visible & (offs_m[:, None] + offset >= offs_n[None, :])
            p = tl.where(visible, p, 0.0)
        dp = dot(do, tl.trans(v), PRECISION)  # [BLOCK_M, BLOCK_N]
        ds = p * (dp - delta[:, None])
        dq = dot_add(round_to(ds, k.dtype), k, dq, PRECISION)
    return dq


@triton.jit
def _bwd_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    seq_lens_ptr,
    dq_ptr,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_dob,
    stride_doh,
    stride_dom,
    stride_dqb,
    stride_dqh,
    stride_dqm,
    heads_q,
    group,
    seqlen_q,
    seqlen_k,
    scale,
    CAUSAL: tl.constexpr,
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
    blocks_m = tl.cdiv(seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    block_m = pid % blocks_m
    if CAUSAL:  # longest first
        block_m = blocks_m - 1 - block_m
    b = (pid // blocks_m) // heads_q
    h = (pid // blocks_m) % heads_q
    hk = h // group
    n_queries, n_keys = sequence_bounds(seq_lens_ptr, b, seqlen_q, seqlen_k, HAS_SEQ_LENS)
    offset = n_keys - n_queries

    row0 = block_m * BLOCK_M
    offs_m = row0 + tl.arange(0, BLOCK_M)
    q_ref = head_base(q_ptr, b, h, stride_qb, stride_qh, FORM)
    do_ref = head_base(do_ptr, b, h, stride_dob, stride_doh, FORM)
    k_ref = head_base(k_ptr, b, hk, stride_kb, stride_kh, FORM)
    v_ref = head_base(v_ptr, b, hk, stride_vb, stride_vh, FORM)
    q = load_tile(q_ref, b, h, row0, n_queries, stride_qm, HEAD_DIM, BLOCK_M, BLOCK_D, True, FORM)
    do = load_tile(do_ref, b, h, row0, n_queries, stride_dom, HEAD_DIM_V, BLOCK_M, BLOCK_DV, True, FORM)
    row = (b.to(tl.int64) * heads_q + h) * seqlen_q
    lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < n_queries, other=float("inf"))
    delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < n_queries, other=0.0)

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
    lse_log2 = lse * LOG2E
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dq = _dq_blocks(
        dq, q, do, lse_log2, delta, k_ref, v_ref, b, hk, 0, full, offs_m, offset, n_keys, stride_kn, stride_vn,
        scale_log2, CAUSAL, False, HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, FORM,
    )  # fmt: skip
    dq = _dq_blocks(
        dq, q, do, lse_log2, delta, k_ref, v_ref, b, hk, full, end, offs_m, offset, n_keys, stride_kn, stride_vn,
        scale_log2, CAUSAL, True, HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, FORM,
    )  # fmt: skip
    dq_base = dq_ptr + b.to(tl.int64) * stride_dqb + h.to(tl.int64) * stride_dqh
    store_tile(dq_base, dq * scale, row0, seqlen_q, stride_dqm, HEAD_DIM, BLOCK_M, BLOCK_D, FORM)


def preprocess_constants(problem: AttentionProblem, has_dlse: bool) -> dict[str, object]:
    """Constexprs of `_bwd_preprocess_kernel`."""
    return {
        "HAS_SEQ_LENS": problem.seq_lens,
        "HAS_DLSE": has_dlse,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_M": PREPROCESS_BLOCK_M,
        "BLOCK_DV": padded_head_dim(problem.head_dim_v),
        "FORM": PORTABLE_FORM,
    }


def constants(problem: AttentionProblem, config: AttentionConfig) -> dict[str, object]:
    """Constexprs of `_bwd_dkdv_kernel` and `_bwd_dq_kernel`."""
    return {
        "CAUSAL": problem.causal,
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


def _boxes(
    problem: AttentionProblem, config: AttentionConfig, tensors: AttentionTensors, dout: torch.Tensor
) -> tuple[Box | None, ...]:
    """How q, k, v and dout are read."""
    q, k, v = tensors.q, tensors.k, tensors.v
    if config.form != "tma":
        return (None,) * 4
    d, dv = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
    m, n, layout = config.block_m, config.block_n, problem.layout
    return box(q, layout, m, d), box(k, layout, n, d), box(v, layout, n, dv), box(dout, layout, m, dv)


class _Backward:
    """The three launches of one backward pass; what they share is worked out once."""

    def __init__(
        self,
        problem: AttentionProblem,
        tensors: AttentionTensors,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
    ) -> None:
        if dout.data_ptr() % 16 or any(s * dout.element_size() % 16 for s in dout.stride()[:-1]):
            problem = problem.replace(aligned=False)  # an unaligned gradient keeps TMA out
        self.problem, self.tensors = problem, tensors
        self.out, self.lse, self.dout, self.dlse = out, lse, dout, dlse
        self.delta = torch.empty_like(lse)
        q, k, v = tensors.q, tensors.k, tensors.v
        self.key = (problem, tensors.sm_scale, q.stride(), k.stride(), v.stride(), dout.stride(), q.device)
        self.fixed = problem.aligned and not problem.seq_lens

    def preprocess(self) -> None:
        """delta (B, H, Sq) fp32."""
        problem, layout, dlse = self.problem, self.problem.layout, self.dlse

        def make() -> Launch:
            scalars = (
                *bhsd_strides(self.out, layout)[:3],
                *bhsd_strides(self.dout, layout)[:3],
                *(dlse.stride() if dlse is not None else (0, 0, 0)),
                problem.heads_q,
                problem.seqlen_q,
                problem.seqlen_k,
            )
            grid = cdiv(problem.seqlen_q, PREPROCESS_BLOCK_M) * problem.batch * problem.heads_q
            values = preprocess_constants(problem, dlse is not None)
            warps = {"num_warps": PREPROCESS_WARPS}
            return Launch(
                _bwd_preprocess_kernel, grid, (None,) * 5, scalars, values, warps, self.fixed and dlse is None
            )

        key = ("preprocess", *self.key, self.out.stride(), None if dlse is None else dlse.stride())
        _launches.get(key, make)(self.out, self.dout, dlse, self.tensors.seq_lens, self.delta)

    def _gradient(
        self, kind: str, fn: Any, config: AttentionConfig, blocks: int, results: tuple[torch.Tensor, ...]
    ) -> None:
        problem, tensors = self.problem, self.tensors
        q, k, v = tensors.q, tensors.k, tensors.v

        def make() -> Launch:
            scalars = (
                *(s for x in (q, k, v, self.dout, *results) for s in bhsd_strides(x, problem.layout)[:3]),
                problem.heads_q,
                problem.heads_q // problem.heads_kv,
                problem.seqlen_q,
                problem.seqlen_k,
                tensors.sm_scale,
            )
            boxes = (*_boxes(problem, config, tensors, self.dout), *(None,) * (3 + len(results)))
            return Launch(fn, blocks, boxes, scalars, constants(problem, config), schedule(config), fixed)

        # Packed gradients are slices: their strides, and whether they begin at 16 bytes, are the caller's.
        fixed = self.fixed and all(x.data_ptr() % 16 == 0 for x in results)
        launch = _launches.get((kind, config, fixed, *(x.stride() for x in results), *self.key), make)
        launch(q, k, v, self.dout, self.lse, self.delta, tensors.seq_lens, *results)

    def dkdv(self, config: AttentionConfig, dk: torch.Tensor, dv: torch.Tensor) -> None:
        problem = self.problem
        blocks = cdiv(problem.seqlen_k, config.block_n) * problem.batch * problem.heads_kv
        self._gradient("dkdv", _bwd_dkdv_kernel, config, blocks, (dk, dv))

    def dq(self, config: AttentionConfig, dq: torch.Tensor) -> None:
        problem = self.problem
        blocks = cdiv(problem.seqlen_q, config.block_m) * problem.batch * problem.heads_q
        self._gradient("dq", _bwd_dq_kernel, config, blocks, (dq,))


def attention_backward(
    problem: AttentionProblem,
    tensors: AttentionTensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    gradients: AttentionGradients,
) -> None:
    """Launch the three kernels, which fill dq, dk, dv."""
    backward = _Backward(problem, tensors, out, lse, dout, dlse)
    with on_device(tensors.q):
        backward.preprocess()

        def run_dkdv(config: AttentionConfig) -> None:
            backward.dkdv(config, gradients.dk, gradients.dv)

        def run_dq(config: AttentionConfig) -> None:
            backward.dq(config, gradients.dq)

        run_dkdv(tuned_config("dkdv", backward.problem, run_dkdv))
        run_dq(tuned_config("dq", backward.problem, run_dq))
