"""Arguments and constants of the attention kernels' launches, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diyfa.backends.npu.attention.bias import as_read
from diyfa.backends.npu.attention.block_mask import mask_strides
from diyfa.backends.npu.attention.score_functions import captured_values, spelling
from diyfa.backends.npu.runtime.compat import INTERPRETED, Constants, padded_head_dim, split_columns
from diyfa.backends.npu.runtime.launch import bind_launch, cube_programs, heads_per_group, tensor_arguments
from diyfa.backends.npu.tables import configs
from diyfa.backends.npu.tables.configs import (
    AttentionTile,
    alibi_form,
    attention_key,
    attention_scalars,
    attention_sizes,
    softcap_form,
    widest_product,
)
from diyfa.features import TENSORS
from diyfa.problem import AttentionProblem, AttentionTensors, Launch, per_head_stride
from diyfa.score_code import JitSource, slope_source, value_source

# A fractal of the cube unit has 32 bytes in each row. Columns of int8 that fill half of one would leave it undefined.
INT8_COLUMNS = 32


@dataclass(frozen=True)
class AttentionConstants(Constants):
    """Constants of all kernels with matrix products.

    A constant named like a field of the problem has that field's value, except strings that say how a feature is
    computed: `softcap` (`softcap_form`), `alibi` (`alibi_form`), `bias` (bias.py)."""

    head_dim: int
    head_dim_v: int
    block_d: int
    block_dv: int
    block_m: int
    block_n: int
    causal: bool
    has_left: bool
    has_right: bool  # also if causal
    always_mask: bool
    softcap: str
    seq_lens: bool
    varlen: bool
    alibi: str
    bias: str  # dimensions of attn_bias (see bias.py)
    mask_q: int  # queries and keys of a block of the block mask, 0 without one
    mask_k: int
    dropout: bool
    dropout_origins: bool
    score_fn: JitSource | None
    score_slope: JitSource | None  # derivative of score_fn by the score; None in the forward pass
    interpret: bool


def bias_keys(problem: AttentionProblem) -> int:
    """Return the number of keys that a bias must have in kernels (`bias.as_read`), 0 for any."""
    return problem.seqlen_k if problem.score_fn else 0


def call_values(problem: AttentionProblem, tensors: AttentionTensors, step: str) -> dict[str, Any]:
    """Return the kernels' arguments and constants of a call by name, except results.

    Tensors that kernels cannot read are copied. `step`: the kernel, "fwd" or "dq" in the tile table, for which MASKED
    says whether a tile needs a mask."""
    bias = as_read(tensors.attn_bias, bias_keys(problem))
    mask_q, mask_k = problem.mask or (0, 0)
    is_int8 = problem.dtype == "int8"
    return {
        **tensor_arguments(problem.layout, q=tensors.q, k=tensors.k, v=tensors.v),
        **{f"{x.name}_ptr": getattr(tensors, x.name) for x in TENSORS},
        **captured_values(tensors),
        "per_head_ptr": tensors.alibi_slopes,
        "stride_per_head_b": per_head_stride(tensors.alibi_slopes),
        **bias.values("bias"),
        **mask_strides(tensors),
        **attention_scalars(problem, tensors.sm_scale, tensors.dropout_p),
        **attention_sizes(problem),
        **{name.upper(): value for name, value in vars(problem).items()},
        "BLOCK_D": padded_head_dim(problem.head_dim, INT8_COLUMNS if is_int8 else 16),
        "BLOCK_DV": padded_head_dim(problem.head_dim_v),
        "MASKED": attention_key(problem, step).mode != "even",
        "ALWAYS_MASK": configs.ALWAYS_MASK,
        "CAUSAL": problem.causal,
        "HAS_LEFT": problem.window_left >= 0,
        "HAS_RIGHT": problem.window_right >= 0,  # CAUSAL is the case of 0
        "VARLEN": problem.varlen,
        "SOFTCAP": softcap_form(problem),
        "ALIBI": alibi_form(problem),
        "BIAS": bias.dims,
        "INT8": is_int8,
        "MASK_Q": mask_q,
        "MASK_K": mask_k,
        "SCORE_FN": value_source(problem.score_fn, spelling(problem)),
        "SCORE_SLOPE": None if step == "fwd" else slope_source(problem.score_fn, spelling(problem)),
        "INTERPRET": INTERPRETED,
    }


def attention_launch(
    kernel: Any,
    constants: type[Constants],
    step: str,
    problem: AttentionProblem,
    values: dict[str, Any],
    tile: AttentionTile,
    tasks: int,
) -> Launch:
    """Return the launch of a kernel with matrix products. `step`: its name in the tile table. `tasks`: its tasks."""
    values = values | {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "heads_in_parallel": heads_per_group(problem, step),
    }
    if problem.seqlen_k % tile.block_n:  # MASKED is False for the table's "even" tile; this tile may need a mask
        values["MASKED"] = True
    if problem.mask:  # its bits also hide what is beyond the keys of the tensors
        values["MASKED"] = problem.seq_lens
    if step in ("dq", "dkdv"):  # their results have as many columns as q
        values |= split_columns(problem.head_dim, widest_product(problem.dtype))
    grid = cube_programs(problem.arch, values["q_ptr"].device, tasks)
    return bind_launch(kernel, constants, grid, values, tile.compile_options(problem.arch))
