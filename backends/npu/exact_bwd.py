"""The end of the backward pass for Ascend where a mask or dropout takes pairs out: the launches of exact_dq.py and
exact_dkdv.py. The gradients of bias and sinks need nothing: no product sums over what a mask hides.
"""

from __future__ import annotations

import torch
import triton

from diyfa.backends.npu.bias import Bias
from diyfa.backends.npu.configs import exact_flags, exact_rows, may_leak
from diyfa.backends.npu.exact_dkdv import _exact_dkdv_kernel
from diyfa.backends.npu.exact_dq import _exact_dq_kernel
from diyfa.backends.npu.launch import vector_programs
from diyfa.problem import AttentionGradients, AttentionProblem, AttentionTensors


def exact_gradients(
    problem: AttentionProblem,
    tensors: AttentionTensors,
    bias: Bias,
    lse: torch.Tensor,
    dout: torch.Tensor,
    delta: torch.Tensor,
    gradients: AttentionGradients,
    stride: dict[str, tuple[int, int, int]],
    slope_stride: int,
    sizes: tuple[float, ...],
    shared: dict[str, object],
) -> None:
    """Launch the kernels after those that filled dq, dk and dv, where they can have anything to do.

    `tensors` and `dout` as kernels address them; `sizes` are their common numbers, `shared` their common constants.
    """
    if not may_leak(problem):
        return
    rows, lines = exact_rows(problem)
    inputs = (
        tensors.q, tensors.k, tensors.v, dout, lse, delta,
        tensors.seq_lens, tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.alibi_slopes, bias.tensor,
        tensors.rng_state,
    )  # fmt: skip
    input_strides = (*stride["q"], *stride["k"], *stride["v"], *stride["dout"])
    features = (slope_stride, *bias.strides)
    constants = {**shared, **exact_flags(problem), "BIAS": bias.dims, "LINES": lines}
    tasks = triton.cdiv(problem.seqlen_k, rows) * problem.batch * problem.heads_kv
    _exact_dkdv_kernel[(vector_programs(problem.arch, dout.device, tasks),)](
        *inputs, gradients.dk, gradients.dv,
        *input_strides, *stride["dk"], *stride["dv"], *features, *sizes,
        BLOCK_N=rows, **constants,
    )  # fmt: skip
    if problem.masked:
        tasks = triton.cdiv(problem.seqlen_q, rows) * problem.batch * problem.heads_q
        _exact_dq_kernel[(vector_programs(problem.arch, dout.device, tasks),)](
            *inputs, gradients.dq,
            *input_strides, *stride["dq"], *features, *sizes,
            BLOCK_M=rows, **constants,
        )  # fmt: skip
