"""FlashAttention-2 backward (Dao 2023, arXiv:2307.08691, algorithm 2) without atomics.

Sequences that one tile holds have a kernel of their own (`bwd_short.py`). All others take up to five kernels:

1. `_bwd_preprocess_kernel` computes delta = rowsum(dO * O) - dLSE, the term of dS that is equal for a whole row. The
   gradient of the log-sum-exp enters here, so it costs nothing later.
2. `_bwd_dkdv_kernel` gives each program a block of keys and loops over the queries of every head in the group. Groups
   are divided if key blocks are few (`bwd_partials.py`).
3. `_bwd_dq_kernel` gives each program a block of queries and loops over the keys.
4. `_bwd_dbias_kernel` runs if the bias needs a gradient, `_bwd_captured_kernel` if captured tensors of a score function
   do.

The paper computes dQ, dK and dV in one loop and adds dQ atomically. Two loops cost two more products, of seven, and are
bitwise reproducible.

    P = exp(S - LSE),  dV = Pᵀ dO,  dP = dO Vᵀ,  dS = P * (dP - delta),  dQ = dS K * scale,  dK = dSᵀ Q * scale

A softcap multiplies dS by 1 - tanh² before dQ and dK; dBias is dS before that. A sink is a key without a value: its
dP is 0, so its gradient is the sum of -exp(sink - LSE) * delta over all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import triton
import triton.language as tl

from diyfa.backends.cuda.attention import bwd_captured, bwd_dbias, bwd_partials
from diyfa.backends.cuda.attention.bwd_dkdv import _bwd_dkdv_kernel
from diyfa.backends.cuda.attention.bwd_dq import _bwd_dq_kernel
from diyfa.backends.cuda.attention.bwd_short import _bwd_short_kernel
from diyfa.backends.cuda.attention.clear import backward_launches
from diyfa.backends.cuda.attention.configs import SPLIT, AttentionConfig, schedule
from diyfa.backends.cuda.attention.launch import (
    RUNTIME_SIZES,
    UNALIGNED_POINTERS,
    TileConstants,
    bind_launch,
    dlse_strides,
    feature_arguments,
    input_arguments,
    interleaved_heads,
    is_settled,
    pointers,
    programs_at_once,
    strides,
    tile_constants,
    tuned_launches,
)
from diyfa.backends.cuda.attention.score_functions import SPELLING
from diyfa.backends.cuda.attention.scores import first_row, row_delta
from diyfa.backends.cuda.attention.seq_info import seq_info
from diyfa.backends.cuda.attention.tile_io import (
    PACKED,
    PORTABLE,
    cdiv,
    head_view,
    lengths_constant,
    load_tile,
    padded_head_dim,
)
from diyfa.backends.cuda.runtime.constants import Constants
from diyfa.backends.cuda.runtime.passes import Pass
from diyfa.problem import AttentionGradients, AttentionProblem, AttentionTensors, Launch, cached_per_kind, is_aligned
from diyfa.score_code import slope_source

PREPROCESS_BLOCK_M = 32
PREPROCESS_WARPS = 4


@dataclass(frozen=True, eq=False)
class PreprocessConstants(Constants):
    """Constants of `_bwd_preprocess_kernel`."""

    lengths: int
    head_dim_v: int
    block_m: int
    block_dv: int
    form: int


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
    c: tl.constexpr,
):  # fmt: skip
    """Write delta of BLOCK_M queries of a head."""
    blocks_m = tl.cdiv(seqlen_q, c.BLOCK_M)
    pid = tl.program_id(0)
    row0 = (pid % blocks_m) * c.BLOCK_M
    b = (pid // blocks_m) // heads_q
    h = (pid // blocks_m) % heads_q
    lengths = (cu_seqlens_q_ptr, cu_seqlens_k_ptr, seq_lens_ptr, seqlen_q, seqlen_k, total_q, total_k)
    first_q, _, n_queries, _ = seq_info(b, lengths, c.LENGTHS)
    q_position = (b, h, first_q, n_queries)
    outputs = head_view(o_ptr, (stride_ob, stride_oh, stride_om), q_position, c.FORM, c)
    gradients = head_view(do_ptr, (stride_dob, stride_doh, stride_dom), q_position, c.FORM, c)
    o = load_tile(outputs, row0, c.BLOCK_M, c.HEAD_DIM_V, c.BLOCK_DV, True, c.FORM, c)
    do = load_tile(gradients, row0, c.BLOCK_M, c.HEAD_DIM_V, c.BLOCK_DV, True, c.FORM, c)
    offs_m = row0 + tl.arange(0, c.BLOCK_M)
    delta = row_delta(o, do, (dlse_ptr, stride_dlb, stride_dlh, stride_dlm), q_position, offs_m, c)
    n_rows = n_queries if c.LENGTHS == PACKED else seqlen_q
    delta_row = delta_ptr + first_row(b, h, first_q, heads_q, seqlen_q, total_q, c)
    tl.store(delta_row + offs_m, delta, mask=offs_m < n_rows)


_GRADIENT_KERNELS = {"dkdv": _bwd_dkdv_kernel, "dq": _bwd_dq_kernel, "short": _bwd_short_kernel}


@cached_per_kind
def _preprocess_constants(problem: AttentionProblem) -> PreprocessConstants:
    block_dv = padded_head_dim(problem.head_dim_v)
    return PreprocessConstants(
        lengths_constant(problem), problem.head_dim_v, PREPROCESS_BLOCK_M, block_dv, PORTABLE.value
    )


@cached_per_kind
def _constants(problem: AttentionProblem, config: AttentionConfig) -> TileConstants:
    slope = {"score_slope": slope_source(problem.score_fn, SPELLING)}
    return TileConstants.read_from(problem, config, **{**tile_constants(problem, config), **slope})


class Backward:
    """The launches of one backward pass."""

    def __init__(
        self, problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor,
        dout: torch.Tensor, dlse: torch.Tensor | None, delta: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        if problem.aligned and not is_aligned(dout):
            problem = problem.replace(aligned=False)  # TMA cannot read an unaligned gradient
        self.problem, self.tensors = problem, tensors
        self.out, self.lse, self.dout, self.dlse = out, lse.contiguous(), dout, dlse
        self.delta = torch.empty_like(self.lse) if delta is None else delta
        self.scale = tensors.sm_scale / (problem.softcap or 1.0)  # may be negative: the backward takes no maximum

    @cached_property
    def shared_arguments(self) -> dict[str, Any]:
        """Arguments, by name, that the kernels have in common: results of the forward, gradients, strides, features."""
        problem, (q, k, v) = self.problem, self.tensors[:3]
        return {
            **pointers(o=self.out, lse=self.lse, dlse=self.dlse, delta=self.delta),
            **strides(problem.layout, q=q, k=k, v=v, o=self.out, do=self.dout),
            **dlse_strides(self.dlse),
            **feature_arguments(problem, self.tensors, self.scale),
        }

    def pointer_arguments(self) -> dict[str, Any]:
        """Return the arguments of kernels that read all inputs through pointers, as those behind the gradients do."""
        q, k, v = self.tensors[:3]
        return {**pointers(q=q, k=k, v=v, do=self.dout), **self.shared_arguments}

    def preprocess(self) -> Launch:
        """Return the launch that fills delta."""
        problem = self.problem
        values = {"do_ptr": self.dout, **self.shared_arguments}
        grid = cdiv(problem.seqlen_q, PREPROCESS_BLOCK_M) * problem.batch * problem.heads_q
        constants = _preprocess_constants(problem)
        return bind_launch(_bwd_preprocess_kernel, grid, values, constants, {"num_warps": PREPROCESS_WARPS})

    def gradient(
        self, kind: str, config: AttentionConfig, results: dict[str, torch.Tensor], subgroups: int = 1
    ) -> Launch:
        """Return the launch of the kernel `kind`, which fills `results`. "dkdv" has `subgroups` per KV head."""
        problem, tensors = self.problem, self.tensors
        q, k, v, dout = tensors.q, tensors.k, tensors.v, self.dout
        m, n = config.block_m, config.block_n
        d, dv = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
        values = {
            **input_arguments(problem, config, q=(q, m, d), k=(k, n, d), v=(v, n, dv), do=(dout, m, dv)),
            **self.shared_arguments,
            **pointers(**results),
            **strides(problem.layout, **results),
            "group": problem.heads_q // problem.heads_kv // subgroups,
            "sm_scale": tensors.sm_scale,
            "subgroups": subgroups,
        }
        if kind == "dq":
            blocks, heads = cdiv(problem.seqlen_q, m), problem.batch * problem.heads_q
        else:
            blocks, heads = cdiv(problem.seqlen_k, n), problem.batch * problem.heads_kv * subgroups
        values["interleaved_heads"] = interleaved_heads(problem, config, blocks, heads, q.device)
        kernel, constants = _GRADIENT_KERNELS[kind], _constants(problem, config)
        return bind_launch(kernel, blocks * heads, values, constants, schedule(config))

    def launches(
        self, kind: str, config: AttentionConfig, gradients: AttentionGradients
    ) -> tuple[list[Launch], list[torch.Tensor]]:
        """Return (launches that fill the gradients of `kind`, their memory for partial sums)."""
        problem, (dq, dk, dv) = self.problem, gradients[:3]
        if kind != "dkdv":
            return [self.gradient(kind, config, {"dq": dq} if kind == "dq" else {"dq": dq, "dk": dk, "dv": dv})], []
        subgroups = bwd_partials.count_subgroups(problem, config.block_n, programs_at_once(config, dk.device))
        if subgroups == 1:
            return [self.gradient("dkdv", config, {"dk": dk, "dv": dv})], []
        sizes = bwd_partials.partial_sizes(problem, subgroups)
        memory = self.lse.new_empty(sum(sizes))
        buffers = memory.split(sizes)
        partials = dict(zip(("dk", "dv"), bwd_partials.partials_in_layout(problem, buffers, subgroups), strict=True))
        main = self.gradient("dkdv", config, partials, subgroups)
        return [main, bwd_partials.make_launch(problem, self.tensors, buffers, subgroups, dk, dv)], [memory]


def _call_each(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()


def backward_pass(
    problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
    dlse: torch.Tensor | None, gradients: AttentionGradients, kinds: Sequence[str] = SPLIT,
) -> Pass:  # fmt: skip
    """Return the pass that fills all gradients but that of sinks, by kernels of these kinds and their auxiliaries."""
    backward = Backward(problem, tensors, out, lse, dout, dlse, gradients.delta)
    problem, delta = backward.problem, backward.delta
    launches = backward_launches(problem, tensors, gradients, delta)
    memory = [] if gradients.delta is delta else [delta]
    if kinds == SPLIT:
        launches.append(backward.preprocess())
    for kind in kinds:
        workspace: list[torch.Tensor] = []

        def make_launches(config: AttentionConfig) -> list[Launch]:
            new_launches, workspace[:] = backward.launches(kind, config, gradients)  # noqa: B023 (called before the next kind)
            return new_launches

        launches += tuned_launches(kind, problem, make_launches, launches)
        memory += workspace
    finish: list[Callable[[], None]] = []
    if gradients.dbias is not None:
        launch, sums = bwd_dbias.make_launch(problem, backward.pointer_arguments(), gradients.dbias)
        launches.append(launch)
        finish.append(partial(bwd_dbias.add_up, sums, gradients.dbias))
    captured = gradients.captured()
    if captured:
        launch, totals = bwd_captured.make_launch(problem, backward.pointer_arguments(), captured)
        launches.append(launch)
        finish.append(partial(bwd_captured.round_totals, totals, captured))
    finish_all = partial(_call_each, finish) if finish else None
    return Pass(launches, memory, finish=finish_all, is_settled=partial(is_settled, problem, *kinds))
