"""FlashAttention-2 backward (Dao 2023, arXiv:2307.08691, algorithm 2) without atomics.

Up to four kernels. `_bwd_preprocess_kernel` reduces delta = rowsum(dO * O) - dLSE, the part of dS that is the same for
a whole row (the gradient of the log-sum-exp enters here, so it costs nothing later). `_bwd_dkdv_kernel` gives each
program a block of keys and loops over the queries of every head in the group; `_bwd_dq_kernel` gives each program a
block of queries and loops over the keys; `_bwd_dbias_kernel` runs when the bias wants a gradient. The paper computes
dQ, dK and dV in one loop and adds dQ atomically; two loops cost two more products out of seven, and are bitwise
reproducible.

    P = exp(S - LSE),  dV = Pᵀ dO,  dP = dO Vᵀ,  dS = P * (dP - delta),  dQ = dS K * scale,  dK = dSᵀ Q * scale

A softcap multiplies dS by 1 - tanh² before dQ and dK; dBias is dS before that. A sink is a key without a value: its
dP is 0, so its gradient is the sum of -exp(sink - LSE) * delta over all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from diyfa.backends.cuda.attention.bwd_dbias import fill_bias_gradient
from diyfa.backends.cuda.attention.bwd_dkdv import _bwd_dkdv_kernel
from diyfa.backends.cuda.attention.bwd_dq import _bwd_dq_kernel
from diyfa.backends.cuda.attention.configs import (
    AttentionConfig,
    edge_form_of,
    form_of,
    reads_rows,
    schedule,
)
from diyfa.backends.cuda.attention.launch import (
    RUNTIME_SIZES,
    UNALIGNED_POINTERS,
    feature_constants,
    feature_pointers,
    feature_scalars,
    is_settled,
    launch_key,
    tuned_config,
)
from diyfa.backends.cuda.attention.scores import first_row, sequence_of
from diyfa.backends.cuda.attention.tile_io import (
    PACKED,
    PORTABLE_FORM,
    box,
    cdiv,
    head_base,
    lengths_of,
    load_tile,
    padded_head_dim,
)
from diyfa.backends.cuda.runtime.launch import Launch, Launches, on_device
from diyfa.backends.cuda.runtime.repeat import Allocate, allocator_of, current_device_of, holds_as_now, like
from diyfa.backends.cuda.runtime.tensor_maps import Box
from diyfa.problem import AttentionGradients, AttentionProblem, AttentionTensors, bhsd_strides

PREPROCESS_BLOCK_M = 32
PREPROCESS_WARPS = 4


@triton.jit(
    do_not_specialize=(*RUNTIME_SIZES, "seqlen_k", "stride_dlb", "stride_dlh"),
    do_not_specialize_on_alignment=UNALIGNED_POINTERS,
)
def _bwd_preprocess_kernel(
    o_ptr, do_ptr, dlse_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, seq_lens_ptr,
    delta_ptr,
    stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom, stride_dlb, stride_dlh, stride_dlm,
    heads_q, seqlen_q, seqlen_k, total_q, total_k,
    LENGTHS: tl.constexpr, HAS_DLSE: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    blocks_m = tl.cdiv(seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    row0 = (pid % blocks_m) * BLOCK_M
    b = (pid // blocks_m) // heads_q
    h = (pid // blocks_m) % heads_q
    first_q, _, n_queries, _ = sequence_of(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, seq_lens_ptr, b, seqlen_q, seqlen_k, total_q, total_k, LENGTHS
    )
    o_base = head_base(o_ptr, b, h, first_q, stride_ob, stride_oh, stride_om, LENGTHS, FORM)
    do_base = head_base(do_ptr, b, h, first_q, stride_dob, stride_doh, stride_dom, LENGTHS, FORM)
    o = load_tile(o_base, b, h, first_q, row0, n_queries, stride_om, HEAD_DIM_V, BLOCK_M, BLOCK_DV, True, LENGTHS, FORM)
    do = load_tile(
        do_base, b, h, first_q, row0, n_queries, stride_dom, HEAD_DIM_V, BLOCK_M, BLOCK_DV, True, LENGTHS, FORM
    )
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)  # [BLOCK_M]
    offs_m = row0 + tl.arange(0, BLOCK_M)
    if HAS_DLSE:
        dlse_row = dlse_ptr + b.to(tl.int64) * stride_dlb + h.to(tl.int64) * stride_dlh
        if LENGTHS == PACKED:
            dlse_row = dlse_row + first_q.to(tl.int64) * stride_dlm
        delta -= tl.load(dlse_row + offs_m.to(tl.int64) * stride_dlm, mask=offs_m < n_queries, other=0.0)
    n_rows = n_queries if LENGTHS == PACKED else seqlen_q
    delta_row = delta_ptr + first_row(b, h, first_q, heads_q, seqlen_q, total_q, LENGTHS)
    tl.store(delta_row + offs_m, delta, mask=offs_m < n_rows)


def preprocess_constants(problem: AttentionProblem, has_dlse: bool) -> dict[str, object]:
    """Constexprs of `_bwd_preprocess_kernel`."""
    return {
        "LENGTHS": lengths_of(problem),
        "HAS_DLSE": has_dlse,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_M": PREPROCESS_BLOCK_M,
        "BLOCK_DV": padded_head_dim(problem.head_dim_v),
        "FORM": PORTABLE_FORM,
    }


def constants(problem: AttentionProblem, config: AttentionConfig) -> dict[str, object]:
    """Constexprs of `_bwd_dkdv_kernel` and `_bwd_dq_kernel`."""
    return {
        **feature_constants(problem),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "FORM": form_of(config),
        "EDGE_FORM": edge_form_of(problem, config),
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


def _is_aligned(x: torch.Tensor) -> bool:
    """Address and all strides but the last are multiples of 16 bytes."""
    size = x.element_size()
    return x.data_ptr() % 16 == 0 and not any(s * size % 16 for s in x.stride()[:-1])


Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v, out, lse
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]  # what owns dq, dk, dv
NO_ROWS = (None, None)
_GRADIENT_KERNELS = {"dkdv": _bwd_dkdv_kernel, "dq": _bwd_dq_kernel}


class _Backward:
    """The launches of one backward pass; what they share is worked out once."""

    def __init__(
        self,
        problem: AttentionProblem,
        tensors: AttentionTensors,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        sums_rows: bool = False,
    ) -> None:
        if problem.aligned and not _is_aligned(dout):
            problem = problem.replace(aligned=False)  # an unaligned gradient keeps TMA out
        self.problem, self.tensors = problem, tensors
        self.out, self.lse, self.dout, self.dlse = out, lse.contiguous(), dout, dlse
        # Rows that no sequence covers are written by no kernel and read by the sinks' gradient, which sums over all.
        self.delta = torch.zeros_like(self.lse) if sums_rows and problem.varlen else torch.empty_like(self.lse)
        self.scale = tensors.sm_scale / (problem.softcap or 1.0)  # signed: no maximum is taken here
        self.key = (*launch_key(problem, tensors), dout.stride())
        self.aligned = problem.aligned and self.lse.data_ptr() % 16 == 0  # delta is allocated here

    def preprocess_launch(self) -> Launch:
        problem, layout, dlse = self.problem, self.problem.layout, self.dlse
        fixed = self.aligned and dlse is None and _is_aligned(self.out)

        def make() -> Launch:
            dlse_strides = (0, 0, 0) if dlse is None else dlse.stride()
            scalars = (
                *bhsd_strides(self.out, layout)[:3],
                *bhsd_strides(self.dout, layout)[:3],
                *((0, *dlse_strides) if len(dlse_strides) == 2 else dlse_strides),
                problem.heads_q,
                problem.seqlen_q,
                problem.seqlen_k,
                problem.total_q,
                problem.total_k,
            )
            grid = cdiv(problem.seqlen_q, PREPROCESS_BLOCK_M) * problem.batch * problem.heads_q
            values = preprocess_constants(problem, dlse is not None)
            warps = {"num_warps": PREPROCESS_WARPS}
            return Launch(_bwd_preprocess_kernel, grid, (None,) * 7, scalars, values, warps, fixed)

        key = ("preprocess", fixed, *self.key, self.out.stride(), None if dlse is None else dlse.stride())
        return _launches.get(key, make)

    def preprocess(self) -> None:
        """delta, shaped like lse, fp32."""
        lengths = feature_pointers(self.tensors)[:3]
        self.preprocess_launch()(self.out, self.dout, self.dlse, *lengths, self.delta)

    def gradient_launch(self, kind: str, config: AttentionConfig, results: tuple[torch.Tensor, ...]) -> Launch:
        """The launch of the kernel `kind` ("dkdv", "dq"), which fills `results`."""
        problem, tensors = self.problem, self.tensors
        q, k, v = tensors.q, tensors.k, tensors.v

        def make() -> Launch:
            scalars = (
                *(s for x in (q, k, v, self.dout, *results) for s in bhsd_strides(x, problem.layout)[:3]),
                *feature_scalars(problem, tensors, self.scale),
                tensors.sm_scale,
            )
            boxes = (*_boxes(problem, config, tensors, self.dout), *(None,) * (10 + len(results)))
            grid = problem.batch * (
                cdiv(problem.seqlen_k, config.block_n) * problem.heads_kv
                if kind == "dkdv"
                else cdiv(problem.seqlen_q, config.block_m) * problem.heads_q
            )
            fn = _GRADIENT_KERNELS[kind]
            return Launch(fn, grid, boxes, scalars, constants(problem, config), schedule(config), fixed)

        # Packed gradients are slices: their strides, and whether they begin at 16 bytes, are the caller's.
        fixed = self.aligned and not problem.bias and all(x.data_ptr() % 16 == 0 for x in results)
        return _launches.get((kind, config, fixed, *(x.stride() for x in results), *self.key), make)

    def gradient(self, kind: str, config: AttentionConfig, results: tuple[torch.Tensor, ...]) -> None:
        problem, tensors = self.problem, self.tensors
        inputs = (tensors.q, tensors.k, tensors.v, self.dout)
        edges = (tensors.q, self.dout) if kind == "dkdv" else (tensors.k, tensors.v)
        rows = edges if reads_rows(problem, config) else NO_ROWS
        launch = self.gradient_launch(kind, config, results)
        launch(*inputs, *rows, self.lse, self.delta, *feature_pointers(tensors), *results)

    def dsinks(self, dsinks: torch.Tensor) -> None:
        assert self.tensors.sinks is not None, "dsinks are asked for where there are sinks"
        sinks = self.tensors.sinks[:, None]  # against lse (B, H, Sq) or (H, Tq)
        weights = torch.exp(sinks - self.lse).masked_fill_(self.lse == float("inf"), 0.0).mul_(self.delta)
        dsinks.copy_(-weights.sum((0, 2) if weights.dim() == 3 else (1,)))


def attention_backward(
    problem: AttentionProblem,
    tensors: AttentionTensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    gradients: AttentionGradients,
) -> None:
    """Launch the kernels, which fill the gradients."""
    backward = _Backward(problem, tensors, out, lse, dout, dlse, gradients.dsinks is not None)
    if gradients.delta is not None:
        backward.delta = gradients.delta
    with on_device(tensors.q):
        backward.preprocess()

        def run_dkdv(config: AttentionConfig) -> None:
            backward.gradient("dkdv", config, (gradients.dk, gradients.dv))

        def run_dq(config: AttentionConfig) -> None:
            backward.gradient("dq", config, (gradients.dq,))

        run_dkdv(tuned_config("dkdv", backward.problem, run_dkdv))
        run_dq(tuned_config("dq", backward.problem, run_dq))
        if gradients.dbias is not None:
            fill_bias_gradient(
                backward.problem, tensors, dout, backward.lse, backward.delta, backward.scale, gradients.dbias
            )
        if gradients.dsinks is not None:
            backward.dsinks(gradients.dsinks)


def _settled_config(kind: str, problem: AttentionProblem) -> AttentionConfig | None:
    """The tile that `tuned_config` answers without measuring; None where it has still to be measured."""
    return tuned_config(kind, problem, lambda config: None) if is_settled(kind, problem) else None


def _allocates(
    gradients: AttentionGradients, owners: Sequence[torch.Tensor], allocate: Allocate
) -> Callable[[], tuple[Gradients, int, int, int]]:
    """Allocates gradients as they lie now -> (what owns them, addresses of dq, dk, dv)."""
    if len(owners) == 3:
        like_dq, like_dk, like_dv = map(like, owners)

        def separate() -> tuple[Gradients, int, int, int]:
            dq, dk, dv = allocate(*like_dq), allocate(*like_dk), allocate(*like_dv)
            return (dq, dk, dv), dq.data_ptr(), dk.data_ptr(), dv.data_ptr()

        return separate
    like_owners = [like(x) for x in owners]
    where = []  # number of the owner, bytes from its beginning
    for x in gradients[:3]:
        (i,) = (i for i, y in enumerate(owners) if x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr())
        where.append((i, x.data_ptr() - owners[i].data_ptr()))

    def packed() -> tuple[Gradients, int, int, int]:
        new = [allocate(*like_owner) for like_owner in like_owners]
        at_dq, at_dk, at_dv = [new[i].data_ptr() + offset for i, offset in where]
        return (new[0], new[1] if len(new) == 2 else None, None), at_dq, at_dk, at_dv

    return packed


def repeat(
    problem: AttentionProblem,
    tensors: AttentionTensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    gradients: AttentionGradients,
    owners: Sequence[torch.Tensor],
) -> Callable[..., Gradients | None] | None:
    """`Kernel.repeat`: for calls without optional tensors whose launches are settled and compiled."""
    dq, dk, dv = gradients[:3]
    backward = _Backward(problem, tensors, out, lse, dout, None)
    problem = backward.problem
    dkdv_config, dq_config = _settled_config("dkdv", problem), _settled_config("dq", problem)
    if dkdv_config is None or dq_config is None:
        return None
    launch_preprocess = backward.preprocess_launch().again
    launch_dkdv = backward.gradient_launch("dkdv", dkdv_config, (dk, dv)).again
    launch_dq = backward.gradient_launch("dq", dq_config, (dq,)).again
    if launch_preprocess is None or launch_dkdv is None or launch_dq is None:
        return None
    rows_dkdv, rows_dq = reads_rows(problem, dkdv_config), reads_rows(problem, dq_config)
    allocate, index, current = allocator_of(out.device.type), out.get_device(), current_device_of(out)
    like_delta, new_gradients = like(backward.delta), _allocates(gradients, owners, allocate)
    strides = tuple(x.stride() for x in (tensors.q, tensors.k, tensors.v, out, lse, dout))
    dtype = dout.dtype
    holds, stream_of = holds_as_now(), driver.active.get_current_stream

    def run(saved: Saved, addresses: Sequence[int], dout: torch.Tensor) -> Gradients | None:
        q, k, v, out, lse = saved
        at_q, at_k, at_v, at_out, at_lse = addresses
        at_dout = dout.data_ptr()
        if (
            (at_q | at_k | at_v | at_out | at_lse | at_dout) & 15
            or dout.dtype is not dtype
            or (q.stride(), k.stride(), v.stride(), out.stride(), lse.stride(), dout.stride()) != strides
            or not holds()
        ):
            return None
        if current() != index:
            with torch.cuda.device(index):
                return run(saved, addresses, dout)
        grads, at_dq, at_dk, at_dv = new_gradients()
        delta = allocate(*like_delta)
        at_delta, stream = delta.data_ptr(), stream_of(index)
        launch_preprocess(stream, (at_out, at_dout, None, None, None, None, at_delta))
        inputs = (at_q, at_k, at_v, at_dout)
        rest = (at_lse, at_delta, None, None, None, None, None, None)
        rows = (at_q, at_dout) if rows_dkdv else NO_ROWS
        launch_dkdv(stream, (*inputs, *rows, *rest, at_dk, at_dv))
        rows = (at_k, at_v) if rows_dq else NO_ROWS
        launch_dq(stream, (*inputs, *rows, *rest, at_dq))
        return grads

    return run
