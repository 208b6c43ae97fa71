"""Launches of the Hopper backward (`hopper/bwd*.py`), and the workspace that they share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from diyfa.backends.cuda.attention import bwd_partials
from diyfa.backends.cuda.attention.block_mask import mask_arguments
from diyfa.backends.cuda.attention.clear import backward_launches
from diyfa.backends.cuda.attention.launch import forced_config, strides
from diyfa.backends.cuda.attention.long_blocks import long_blocks_launch
from diyfa.backends.cuda.attention.tile_io import cdiv, lengths_constant
from diyfa.backends.cuda.gluon.compat import ptxas_options
from diyfa.backends.cuda.gluon.tma import dense_descriptor, descriptor_steps, ragged_descriptor, rows_box
from diyfa.backends.cuda.hopper.bwd import _bwd_sm90_kernel
from diyfa.backends.cuda.hopper.bwd_common import Sm90BwdConstants
from diyfa.backends.cuda.hopper.bwd_configs import (
    BOX_COLUMNS,
    CONSUMERS,
    Sm90BwdConfig,
    dq_stages,
    last_columns,
    select_config,
)
from diyfa.backends.cuda.hopper.bwd_dq import (
    DQ_COLUMNS,
    DQ_ROWS,
    HALF_DQ,
    QueryConstants,
    _convert_kernel,
    _prepare_kernel,
)
from diyfa.backends.cuda.hopper.bwd_mla import BOXES, BOXES_V
from diyfa.backends.cuda.hopper.bwd_tiles import LENGTH_POINTERS
from diyfa.backends.cuda.hopper.bwd_wide_dq import BLOCK_M, Sm90BwdDqConstants, _bwd_wide_dq_kernel
from diyfa.backends.cuda.hopper.configs import FULL_GPU, heads_in_parallel
from diyfa.backends.cuda.hopper.mma import ROWS
from diyfa.backends.cuda.runtime.launch import multiprocessors
from diyfa.backends.cuda.runtime.launcher import Tiles
from diyfa.backends.cuda.runtime.passes import Pass
from diyfa.problem import (
    AttentionGradients,
    AttentionProblem,
    AttentionTensors,
    Launch,
    cached_per_kind,
    has_few_steps,
    is_aligned,
    per_head_stride,
)


def count_blocks(problem: AttentionProblem, block_m: int) -> int:
    """Number of blocks of queries of all heads. Each sequence has blocks of its own."""
    if problem.varlen:
        return problem.heads_q * (problem.total_q // block_m + problem.batch)
    return problem.batch * problem.heads_q * cdiv(problem.seqlen_q, block_m)


# For each input: argument names of its descriptor, its steps between samples, and its steps between rows.
_INPUTS = [(f"{x}_tensor", f"steps_{x}b", f"steps_{x}{'n' if x in ('k', 'v') else 'm'}") for x in ("q", "k", "v", "do")]
_SIZES = ("heads_q", "batch", "seqlen_q", "seqlen_k", "total_q", "total_k")


class _Form(NamedTuple):
    """Facts that decide the constants of the kernels, beside the problem's kind."""

    config: Sm90BwdConfig
    boxes: int
    boxes_v: int
    in_order: bool
    rolling: bool


@cached_per_kind
def _query_constants(problem: AttentionProblem, form: _Form) -> QueryConstants:
    return QueryConstants(
        block_m=form.config.block_m,
        block_d=form.boxes * BOX_COLUMNS,
        block_dv=BOX_COLUMNS << (form.boxes_v - 1).bit_length(),
        lengths=lengths_constant(problem),
    )


def _box_constants(problem: AttentionProblem, form: _Form, store_from_registers: bool) -> dict[str, Any]:
    """Return the fields of `BoxConstants` that are no fields of the problem or the config."""
    return {
        "boxes": form.boxes,
        "boxes_v": form.boxes_v,
        "used_boxes": cdiv(problem.head_dim, BOX_COLUMNS),
        "used_boxes_v": cdiv(problem.head_dim_v, BOX_COLUMNS),
        "has_left": problem.window_left >= 0,
        "has_right": problem.window_right >= 0,
        "lengths": lengths_constant(problem),
        "store_from_registers": store_from_registers,
    }


@cached_per_kind
def _constants(problem: AttentionProblem, form: _Form, store_from_registers: bool) -> Sm90BwdConstants:
    columns = last_columns(problem) if form.config.form == "keys" else BOX_COLUMNS
    return Sm90BwdConstants.read_from(
        problem, form.config, **_box_constants(problem, form, store_from_registers), deterministic=form.in_order,
        rolling=form.rolling, last_columns=columns, mask_q=problem.mask[0] if problem.mask else 0,
    )  # fmt: skip


@cached_per_kind
def _dq_constants(problem: AttentionProblem, form: _Form, store_from_registers: bool) -> Sm90BwdDqConstants:
    shared = _box_constants(problem, form, store_from_registers)
    stages = dq_stages(form.boxes, form.boxes_v)
    return Sm90BwdDqConstants.read_from(problem, form.config, **shared, stages=stages, causal=problem.causal)


class Sm90Backward:
    """The launches of one backward pass, and their workspace."""

    def __init__(
        self,
        problem: AttentionProblem,
        tensors: AttentionTensors,
        config: Sm90BwdConfig,
        lse: torch.Tensor,
        dq: torch.Tensor,
    ) -> None:
        self.problem, self.tensors, self.config, self.lse, self.out = problem, tensors, config, lse, dq
        self.boxes, self.boxes_v = (self._boxes(d) for d in (problem.head_dim, problem.head_dim_v))
        if config.form == "mla":
            self.boxes, self.boxes_v = BOXES.value, BOXES_V.value
        blocks = count_blocks(problem, config.block_m)
        self.multiprocessors = multiprocessors(dq.device) or FULL_GPU
        self.subgroups = bwd_partials.count_subgroups(problem, config.block_n, self.multiprocessors)
        self.heads_kv = problem.heads_kv * self.subgroups  # each with a subgroup of query heads
        self.programs = n_key_blocks = cdiv(problem.seqlen_k, config.block_n) * problem.batch * self.heads_kv
        if config.form == "keys":
            self.programs = min(self.programs, self.multiprocessors)
        self.in_order = problem.deterministic and config.form == "keys"
        self.dq_blocks, self.rolling, counts = blocks, _can_roll(problem, config, dq), 0
        if config.form == "columns":  # adds dQ up in registers
            self.dq_blocks = 0
        self.form = _Form(config, self.boxes, self.boxes_v, self.in_order, self.rolling)
        lengths = (tensors.cu_seqlens_q, tensors.cu_seqlens_k) if problem.varlen else (tensors.seq_lens,) * 2
        self.sizes: dict[str, Any] = {name: getattr(problem, name) for name in _SIZES}
        self.sizes |= dict(zip(LENGTH_POINTERS, lengths, strict=True))
        self.interleaved_heads, self.delay, self.slots = self._window()
        if self.rolling:
            self.dq_blocks = self.slots * (problem.heads_q // self.heads_kv) * cdiv(problem.seqlen_q, config.block_m)
            counts = cdiv(2 * problem.batch * problem.heads_q, 4) * 4
        # One allocation. All its parts begin at multiples of 16 bytes.
        semaphores = cdiv(blocks * CONSUMERS, 4) * 4 if self.in_order else 0
        statistics_at = self.dq_blocks * config.block_m * self.boxes * BOX_COLUMNS
        counter_at = statistics_at + blocks * config.block_m * 2
        long_blocks = cdiv(1 + 2 * n_key_blocks, 4) * 4 if problem.mask else 0
        long_blocks_at = counter_at + 4 + counts
        semaphores_at = long_blocks_at + long_blocks
        parts_at = semaphores_at + semaphores
        sizes = bwd_partials.partial_sizes(problem, self.subgroups)
        self.workspace = memory = lse.new_empty(parts_at + sum(sizes))
        words = memory.view(torch.int32)
        columns, m = DQ_COLUMNS.value, config.block_m
        self.dq = memory.as_strided((statistics_at // columns, columns), (columns, 1)) if statistics_at else None
        self.statistics = memory.as_strided((blocks * 2, m), (m, 1), statistics_at)
        self.counter = words.as_strided((4,), (1,), counter_at)
        self.counts = words.as_strided((counts,), (1,), counter_at + 4) if self.rolling else None
        self.long_blocks = words.as_strided((long_blocks,), (1,), long_blocks_at) if long_blocks else None
        self.semaphores = words.as_strided((semaphores,), (1,), semaphores_at) if self.in_order else None
        self.dk_dv_partials = memory[parts_at:].split(sizes) if self.subgroups > 1 else ()

    def _window(self) -> tuple[int, int, int]:
        """Return how many heads of K are interleaved (`locate_key_block`), and the `delay` and `slots` of `RollingDq`.

        `delay` is the number of heads between adding dQ and converting it, `slots` the number of heads that the fp32 dQ
        has room for. While a program works at a block of keys, about as many other blocks are drawn as there are
        programs. Under a causal mask the first block of a head takes twice the average, and twice as many are drawn.
        The heads of those blocks are at work at the same time.
        """
        problem = self.problem
        heads, blocks = problem.batch * self.heads_kv, cdiv(problem.seqlen_k, self.config.block_n)
        programs = min(self.programs, self.multiprocessors)
        is_uneven = problem.window_right >= 0 or bool(problem.mask)
        n_active = min(1 + cdiv(programs * (2 if is_uneven else 1), blocks), heads)
        half = cdiv(n_active, 2)
        if self.in_order and problem.window_left < 0 and problem.window_right < 0:
            delay = min(n_active + cdiv(half, 2), heads)  # interleaved heads finish later
            return half, delay, min(2 * delay, heads)
        blocks_differ = bool(problem.mask) or (problem.causal and problem.window_left < 0 and not self.in_order)
        return half if blocks_differ else 1, n_active, min(2 * n_active, heads)

    def _boxes(self, head_dim: int) -> int:
        """Number of TMA boxes of a tile: at least one for each consumer that has columns of its own."""
        return max(cdiv(head_dim, BOX_COLUMNS), 1 if self.config.form == "keys" else CONSUMERS)

    def prepare(
        self, out: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None, delta: torch.Tensor | None
    ) -> Launch:
        """Launch that writes the statistics, `delta` if it is given, and zeros to the fp32 dQ."""
        problem = self.problem
        dlse_strides = (0, 0, 0) if dlse is None else dlse.stride()
        arguments = {
            "o_ptr": out,
            "do_ptr": dout,
            "lse_ptr": self.lse,
            "dlse_ptr": dlse,
            "statistics_ptr": self.statistics,
            "dq_ptr": self.dq,
            "semaphores_ptr": self.semaphores,
            "counter_ptr": self.counter,
            "counts_ptr": self.counts,
            "n_long_ptr": self.long_blocks,
            "delta_ptr": delta,
            **strides(problem.layout, o=out, do=dout),
            **dict(zip(("stride_dlb", "stride_dlh", "stride_dlm"), (0, *dlse_strides)[-3:], strict=True)),
            **self.sizes,
            "head_dim_v": problem.head_dim_v,
            "dq_blocks": self.dq_blocks,
        }
        grid = cdiv(problem.seqlen_q, self.config.block_m) * problem.batch * problem.heads_q
        return Launch(_prepare_kernel, grid, arguments, {"config": _query_constants(problem, self.form)}, OPTIONS)

    def _rolling(self) -> dict[str, Any]:
        """Arguments of `RollingDq`."""
        values: tuple[Any, ...] = (None, None, None, 0, 0)
        if self.rolling:
            out = dense_descriptor(self.out, self.problem.layout, ROWS.value, BOX_COLUMNS)
            values = (self.dq, self.counts, out, self.slots, self.delay)
        names = ("dq_ptr", "counts_ptr", "dq_out_tensor", "dq_slots", "dq_delay")
        return dict(zip(names, values, strict=True))

    def _inputs(self, dout: torch.Tensor, rows: int) -> dict[str, Any]:
        """Arguments that all main kernels have: inputs, in boxes of `rows` queries, sizes and scales."""
        problem, layout = self.problem, self.problem.layout
        sm_scale = self.tensors.sm_scale
        ragged = problem.seq_lens or problem.varlen
        make_descriptor = ragged_descriptor if ragged else dense_descriptor
        arguments = {
            **self.sizes,
            "group_size": problem.heads_q // problem.heads_kv,
            "window_left": problem.window_left,
            "window_right": problem.window_right,
            "sm_scale": sm_scale,
            "scale": sm_scale / (problem.softcap or 1.0),
            "softcap": problem.softcap,
            # Without slopes the kernels have no such arguments.
            "slopes_ptr": self.tensors.alibi_slopes,
            "stride_slopeb": per_head_stride(self.tensors.alibi_slopes) if problem.alibi else None,
        }
        for (pointer, sample_steps, row_steps), x in zip(_INPUTS, (*self.tensors[:3], dout), strict=True):
            box_rows = ROWS.value if row_steps[-1] == "n" else rows
            arguments[pointer] = make_descriptor(x, layout, box_rows, BOX_COLUMNS)
            arguments[sample_steps], arguments[row_steps] = descriptor_steps(x, layout) if ragged else (0, 0)
        return arguments

    def _output(self, name: str, x: torch.Tensor) -> dict[str, Any]:
        """Arguments of a gradient: its descriptor, and its address if it is stored in float32."""
        store_from_registers = x.dtype == torch.float32
        # Rows beyond a sample's end are written, with zeros. Rows beyond a packed sequence belong to another one.
        make_descriptor = ragged_descriptor if self.problem.varlen else dense_descriptor
        # Boxes have 128 bytes. Direct stores use no more of the descriptor than its shape and strides.
        box = make_descriptor(
            x, self.problem.layout, ROWS.value, BOX_COLUMNS // 2 if store_from_registers else BOX_COLUMNS
        )
        return {f"{name}_tensor": box, f"{name}_ptr": x if store_from_registers else None}

    def gradient(self, dout: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Launch:
        """Launch that writes dk and dv, or partial sums of both that `bwd_partials` adds up.

        Except for "columns" it adds up the fp32 dQ, too; if `rolling` it also writes dq.
        """
        problem, config = self.problem, self.config
        if self.subgroups > 1:
            dk, dv = bwd_partials.partials_in_layout(problem, self.dk_dv_partials, self.subgroups)
        names = _bwd_sm90_kernel.arg_names[:-1]
        arguments: dict[str, Any] = {**dict.fromkeys(names), **self._rolling()}  # None: of other forms
        if config.form == "mla":
            arguments["dq_ptr"] = self.dq
        if config.form == "keys":
            assert self.dq is not None, "it is added up in memory"
            arguments |= {
                "dq_tensor": _rows_descriptor(self.dq, DQ_ROWS.value * last_columns(problem) // BOX_COLUMNS),
                **mask_arguments(self.tensors),
                "semaphores_ptr": self.semaphores,
                "counter_ptr": self.counter,
                "long_blocks_ptr": self.long_blocks,
            }
        arguments |= {
            **self._inputs(dout, config.block_m),
            **self._output("dk", dk),
            **self._output("dv", dv),
            "statistics_tensor": _rows_descriptor(self.statistics, 1),
            "interleaved_heads": self.interleaved_heads,
            "group_size": problem.heads_q // self.heads_kv,
        }
        values = _constants(problem, self.form, dk.dtype == torch.float32)
        return Launch(_bwd_sm90_kernel, self.programs, arguments, {"config": values}, OPTIONS)

    def query_gradient(self, dout: torch.Tensor, dq: torch.Tensor) -> Launch:
        """Launch that writes dq, for "columns"."""
        problem = self.problem
        arguments = {
            **self._inputs(dout, ROWS.value),
            **self._output("dq", dq),
            "statistics_ptr": self.statistics,
            "heads": problem.batch * problem.heads_q,
            "heads_in_parallel": heads_in_parallel(problem),
        }
        values = _dq_constants(problem, self.form, dq.dtype == torch.float32)
        grid = count_blocks(problem, BLOCK_M.value)
        return Launch(_bwd_wide_dq_kernel, grid, arguments, {"config": values}, OPTIONS)

    def convert(self) -> tuple[Launch, ...]:
        """Launch that writes dq from the fp32 dQ, unless the main kernel does."""
        problem = self.problem
        if self.rolling:
            return ()
        arguments = {
            "dq_ptr": self.dq,
            "out_ptr": self.out,
            **strides(problem.layout, dq=self.out),
            **self.sizes,
            "head_dim": problem.head_dim,
            "sm_scale": self.tensors.sm_scale,
        }
        halves = self.config.block_m * self.boxes * BOX_COLUMNS // HALF_DQ.value
        grid = halves * cdiv(problem.seqlen_q, self.config.block_m) * problem.batch * problem.heads_q
        return (Launch(_convert_kernel, grid, arguments, {"config": _query_constants(problem, self.form)}, OPTIONS),)

    def launches(
        self,
        out: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        delta: torch.Tensor | None,
        gradients: AttentionGradients,
    ) -> tuple[Launch, ...]:
        """All launches of a backward pass."""
        first, main = self.prepare(out, dout, dlse, delta), self.gradient(dout, gradients.dk, gradients.dv)
        find_long: tuple[Launch, ...] = ()
        if self.long_blocks is not None:
            find_long = (long_blocks_launch(self.problem, self.tensors, self.long_blocks, main.arguments),)
        dq_launches = (self.query_gradient(dout, gradients.dq),) if self.config.form == "columns" else self.convert()
        sum_launches = bwd_partials.make_launches(
            self.problem, self.tensors, self.dk_dv_partials, self.subgroups, gradients.dk, gradients.dv
        )
        return first, *find_long, main, *dq_launches, *sum_launches


def _rows_descriptor(x: torch.Tensor, rows: int) -> Tiles:
    """A matrix of float32, in tiles of whole rows."""
    return Tiles(x, x.shape, x.stride(), rows_box(rows, x.shape[1]))


def _can_roll(problem: AttentionProblem, config: Sm90BwdConfig, dq: torch.Tensor) -> bool:
    """Return whether the main kernel converts dQ (`RollingDq`)."""
    # With a softcap no registers are left for it: it would spill 600 bytes. With a block mask, a key block that most
    # queries see would make all programs wait for its head.
    if problem.seq_lens or problem.varlen or problem.softcap or problem.mask:
        return False
    return config.form == "keys" and dq.dtype != torch.float32


def _config(problem: AttentionProblem) -> Sm90BwdConfig:
    return forced_config("sm90_bwd", problem) or select_config(problem)


def _readable(problem: AttentionProblem, dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return dout, or a copy with the strides of `out` if TMA cannot read it.

    dout comes from whatever follows the attention. How it lies in memory is only known when the backward pass begins,
    after the kernel has been chosen.
    """
    if is_aligned(dout) and (not problem.seq_lens or has_few_steps(problem.layout, dout)):
        return dout
    return torch.empty_like(out, dtype=dout.dtype).copy_(dout)


def backward_pass(
    problem: AttentionProblem,
    tensors: AttentionTensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    gradients: AttentionGradients,
) -> Pass:
    """Describe the pass that writes all gradients except that of sinks."""
    if not is_aligned(out):  # a caller's, if the operator is called by itself
        out = torch.empty_like(out).copy_(out)
    lse, dout = lse.contiguous(), _readable(problem, dout, out)
    backward, delta = Sm90Backward(problem, tensors, _config(problem), lse, gradients.dq), gradients.delta
    clearing = backward_launches(problem, tensors, gradients, delta)
    return Pass([*clearing, *backward.launches(out, dout, dlse, delta, gradients)], [backward.workspace])


OPTIONS = {"num_warps": 4, "launch_pdl": True, **ptxas_options()}
