"""Launches of the Hopper backward (`hopper/bwd*.py`), and the workspace that they share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from diyfa.backends.cuda.attention import bwd_partials
from diyfa.backends.cuda.attention.block_mask import mask_arguments
from diyfa.backends.cuda.attention.clear import backward_launches
from diyfa.backends.cuda.attention.launch import dlse_strides, fields_of, forced_config, pointers, strides
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
from diyfa.backends.cuda.runtime.passes import Pass
from diyfa.backends.cuda.runtime.signature import Tiles
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

OPTIONS = {"num_warps": 4, "launch_pdl": True, **ptxas_options()}


def count_blocks(problem: AttentionProblem, block_m: int) -> int:
    """Return the number of blocks of queries of all heads. Each sequence has blocks of its own."""
    if problem.varlen:
        return problem.heads_q * (problem.total_q // block_m + problem.batch)
    return problem.batch * problem.heads_q * cdiv(problem.seqlen_q, block_m)


class _Variant(NamedTuple):
    """Facts that decide the constants of the kernels, beside the problem's kind."""

    config: Sm90BwdConfig
    boxes: int  # TMA boxes in a tile of Q or K
    boxes_v: int  # boxes in a tile of V or dO
    in_order: bool  # dQ is added up in a fixed order
    rolling: bool  # the main kernel converts dQ (`RollingDq`)


@cached_per_kind
def _query_constants(problem: AttentionProblem, variant: _Variant) -> QueryConstants:
    block_dv = BOX_COLUMNS << (variant.boxes_v - 1).bit_length()
    return QueryConstants(variant.config.block_m, variant.boxes * BOX_COLUMNS, block_dv, lengths_constant(problem))


def _box_constants(problem: AttentionProblem, variant: _Variant, store_from_registers: bool) -> dict[str, Any]:
    """Return the fields of `BoxConstants` that are no fields of the problem or the config."""
    return {
        "boxes": variant.boxes,
        "boxes_v": variant.boxes_v,
        "used_boxes": cdiv(problem.head_dim, BOX_COLUMNS),
        "used_boxes_v": cdiv(problem.head_dim_v, BOX_COLUMNS),
        "has_left": problem.window_left >= 0,
        "has_right": problem.window_right >= 0,
        "lengths": lengths_constant(problem),
        "store_from_registers": store_from_registers,
    }


@cached_per_kind
def _constants(problem: AttentionProblem, variant: _Variant, store_from_registers: bool) -> Sm90BwdConstants:
    return Sm90BwdConstants.read_from(
        problem, variant.config, **_box_constants(problem, variant, store_from_registers),
        deterministic=variant.in_order, rolling=variant.rolling, mask_q=problem.mask[0] if problem.mask else 0,
        last_columns=last_columns(problem) if variant.config.form == "keys" else BOX_COLUMNS,
    )  # fmt: skip


@cached_per_kind
def _dq_constants(problem: AttentionProblem, variant: _Variant, store_from_registers: bool) -> Sm90BwdDqConstants:
    shared = _box_constants(problem, variant, store_from_registers)
    stages = dq_stages(variant.boxes, variant.boxes_v)
    return Sm90BwdDqConstants.read_from(problem, variant.config, **shared, stages=stages, causal=problem.causal)


class Sm90Backward:
    """The launches of one backward pass, and their workspace.

    `config.form` decides which launches there are:

    * "keys": `prepare`, the main kernel, and `convert` unless the main kernel converts dQ itself.
    * "mla": `prepare`, the main kernel and `convert`.
    * "columns": `prepare`, the main kernel for dK and dV, and one for dQ.

    `dq`: the result. `dq_acc`: the fp32 dQ to which programs add, None for "columns". `heads_kv`: KV heads, or if
    groups of query heads are divided, their subgroups (`bwd_partials.py`).
    """

    def __init__(
        self, problem: AttentionProblem, tensors: AttentionTensors, config: Sm90BwdConfig, lse: torch.Tensor,
        dq: torch.Tensor,
    ) -> None:  # fmt: skip
        self.problem, self.tensors, self.config, self.lse, self.dq = problem, tensors, config, lse, dq
        if config.form == "mla":
            boxes, boxes_v = BOXES.value, BOXES_V.value
        else:  # at least one box for each consumer that has columns of its own
            fewest = 1 if config.form == "keys" else CONSUMERS
            boxes, boxes_v = (max(cdiv(d, BOX_COLUMNS), fewest) for d in (problem.head_dim, problem.head_dim_v))
        in_order = problem.deterministic and config.form == "keys"
        self.variant = _Variant(config, boxes, boxes_v, in_order, _can_roll(problem, config, dq))
        self.multiprocessors = multiprocessors(dq.device) or FULL_GPU
        self.subgroups = bwd_partials.count_subgroups(problem, config.block_n, self.multiprocessors)
        self.heads_kv = problem.heads_kv * self.subgroups
        key_blocks = cdiv(problem.seqlen_k, config.block_n) * problem.batch * self.heads_kv
        self.programs = min(key_blocks, self.multiprocessors) if config.form == "keys" else key_blocks
        lengths = (tensors.cu_seqlens_q, tensors.cu_seqlens_k) if problem.varlen else (tensors.seq_lens,) * 2
        self.sizes = fields_of(problem, "heads_q", "batch", "seqlen_q", "seqlen_k", "total_q", "total_k")
        self.sizes |= dict(zip(LENGTH_POINTERS, lengths, strict=True))
        self.interleaved_heads, self.delay, self.slots = self._window()
        self._allocate(key_blocks)

    def _allocate(self, key_blocks: int) -> None:
        """Allocate the workspace. Each part has a multiple of 4 numbers, so that all begin at multiples of 16 bytes."""
        problem, m, rolling = self.problem, self.config.block_m, self.variant.rolling
        blocks = self.dq_blocks = count_blocks(problem, m)
        if self.config.form == "columns":
            self.dq_blocks = 0
        elif rolling:
            self.dq_blocks = self.slots * (problem.heads_q // self.heads_kv) * cdiv(problem.seqlen_q, m)
        numbers = {  # of 4 bytes: float32, then int32 from the counter on
            "dq_acc": self.dq_blocks * m * self.variant.boxes * BOX_COLUMNS,
            "statistics": blocks * m * 2,
            "counter": 4,
            "counts": 2 * problem.batch * problem.heads_q if rolling else 0,  # of `RollingDq`
            "long_blocks": 1 + 2 * key_blocks if problem.mask else 0,
            "semaphores": blocks * CONSUMERS if self.variant.in_order else 0,
        }
        sizes, partial_sizes = (
            [cdiv(n, 4) * 4 for n in numbers.values()],
            bwd_partials.partial_sizes(problem, self.subgroups),
        )
        self.workspace = self.lse.new_empty(sum(sizes) + sum(partial_sizes))
        dq_acc, statistics, *words, partials = self.workspace.split([*sizes, sum(partial_sizes)])
        self.dq_acc = dq_acc.view(-1, DQ_COLUMNS.value) if self.dq_blocks else None
        self.statistics = statistics.view(-1, m)
        self.counter, self.counts, self.long_blocks, self.semaphores = (
            x.view(torch.int32) if x.numel() else None for x in words
        )
        self.dk_dv_partials = partials.split(partial_sizes) if self.subgroups > 1 else ()

    def _window(self) -> tuple[int, int, int]:
        """Return how many heads of K are interleaved (`locate_key_block`), and the `delay` and `slots` of `RollingDq`.

        All three follow from `n_active`, how many heads programs work at simultaneously. While a program works at a
        block of keys, the others draw about as many blocks as there are programs. These are blocks of n_active heads,
        the first and the last of which are not complete. If blocks differ in length (`is_uneven`), a program may work
        at one for twice the average time, and twice as many blocks are drawn meanwhile.

        * interleaved heads: half of n_active, where blocks of a head differ in length or wait for each other; else 1.
        * delay, heads between adding dQ and converting it: n_active, so that few wait for a head's last blocks.
        * slots, heads that the fp32 dQ has room for: twice the delay, so that few wait for a slot to be clear.
        """
        problem = self.problem
        heads, blocks = problem.batch * self.heads_kv, cdiv(problem.seqlen_k, self.config.block_n)
        programs = min(self.programs, self.multiprocessors)
        is_uneven = problem.window_right >= 0 or bool(problem.mask)
        n_active = min(1 + cdiv(programs * (2 if is_uneven else 1), blocks), heads)
        half = cdiv(n_active, 2)
        # In order and without a mask, blocks of one head would wait for each other: interleave all heads, `half` at a
        # time.
        in_order = self.variant.in_order
        if in_order and problem.window_left < 0 and problem.window_right < 0:
            delay = min(n_active + cdiv(half, 2), heads)  # interleaved heads finish later
            return half, delay, min(2 * delay, heads)
        blocks_differ = bool(problem.mask) or (problem.causal and problem.window_left < 0 and not in_order)
        return half if blocks_differ else 1, n_active, min(2 * n_active, heads)

    def prepare(
        self, out: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None, delta: torch.Tensor | None
    ) -> Launch:
        """Return the launch that writes the statistics, `delta` if it is given, and zeros to `dq_acc`."""
        problem = self.problem
        arguments = {
            **pointers(
                o=out, do=dout, lse=self.lse, dlse=dlse, statistics=self.statistics, dq=self.dq_acc, delta=delta
            ),
            **pointers(semaphores=self.semaphores, counter=self.counter, counts=self.counts, n_long=self.long_blocks),
            **strides(problem.layout, o=out, do=dout),
            **dlse_strides(dlse),
            **self.sizes,
            "head_dim_v": problem.head_dim_v,
            "dq_blocks": self.dq_blocks,
        }
        grid = cdiv(problem.seqlen_q, self.config.block_m) * problem.batch * problem.heads_q
        return Launch(_prepare_kernel, grid, arguments, {"config": _query_constants(problem, self.variant)}, OPTIONS)

    def _inputs(self, dout: torch.Tensor, rows: int) -> dict[str, Any]:
        """Return the arguments that all main kernels have: inputs, sizes and scales. `rows`: queries of a TMA box."""
        problem, layout, tensors = self.problem, self.problem.layout, self.tensors
        ragged = problem.seq_lens or problem.varlen
        make_descriptor = ragged_descriptor if ragged else dense_descriptor
        arguments = {
            **self.sizes,
            **fields_of(problem, "window_left", "window_right", "softcap"),
            "group_size": problem.heads_q // problem.heads_kv,
            "sm_scale": tensors.sm_scale,
            "scale": tensors.sm_scale / (problem.softcap or 1.0),
            # Without slopes the kernels have no such arguments.
            "slopes_ptr": tensors.alibi_slopes,
            "stride_slopeb": per_head_stride(tensors.alibi_slopes) if problem.alibi else None,
        }
        q, k, v = tensors[:3]
        for name, x, box_rows, dim in (
            ("q", q, rows, "m"),
            ("k", k, ROWS.value, "n"),
            ("v", v, ROWS.value, "n"),
            ("do", dout, rows, "m"),
        ):
            arguments[f"{name}_tensor"] = make_descriptor(x, layout, box_rows, BOX_COLUMNS)
            steps = descriptor_steps(x, layout) if ragged else (0, 0)
            arguments[f"steps_{name}b"], arguments[f"steps_{name}{dim}"] = steps
        return arguments

    def _output(self, name: str, x: torch.Tensor) -> dict[str, Any]:
        """Return the arguments of a gradient: its descriptor, and its address if it is stored in float32."""
        store_from_registers = x.dtype == torch.float32
        # Rows beyond a sample's end are written, with zeros. Rows beyond a packed sequence belong to another one.
        make_descriptor = ragged_descriptor if self.problem.varlen else dense_descriptor
        # Boxes have 128 bytes. Direct stores use no more of the descriptor than its shape and strides.
        columns = BOX_COLUMNS // 2 if store_from_registers else BOX_COLUMNS
        box = make_descriptor(x, self.problem.layout, ROWS.value, columns)
        return {f"{name}_tensor": box, f"{name}_ptr": x if store_from_registers else None}

    def gradient(self, dout: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Launch:
        """Return the launch that writes dk and dv, or partial sums of both that `bwd_partials` adds up.

        Except for "columns" it adds to `dq_acc`, too; if `rolling` it also writes dq.
        """
        problem, config = self.problem, self.config
        if self.subgroups > 1:
            dk, dv = bwd_partials.partials_in_layout(problem, self.dk_dv_partials, self.subgroups)
        arguments: dict[str, Any] = dict.fromkeys(_bwd_sm90_kernel.arg_names[:-1])  # None: those of other forms
        arguments |= {"dq_slots": 0, "dq_delay": 0}
        if config.form == "mla" or self.variant.rolling:
            arguments["dq_ptr"] = self.dq_acc
        if self.variant.rolling:
            dq_tensor = dense_descriptor(self.dq, problem.layout, ROWS.value, BOX_COLUMNS)
            arguments |= {"counts_ptr": self.counts, "dq_out_tensor": dq_tensor}
            arguments |= {"dq_slots": self.slots, "dq_delay": self.delay}
        if config.form == "keys":
            assert self.dq_acc is not None, "dQ is added up in memory"
            arguments |= {
                "dq_tensor": _rows_descriptor(self.dq_acc, DQ_ROWS.value * last_columns(problem) // BOX_COLUMNS),
                **mask_arguments(self.tensors),
                **pointers(semaphores=self.semaphores, counter=self.counter, long_blocks=self.long_blocks),
            }
        arguments |= {
            **self._inputs(dout, config.block_m),
            **self._output("dk", dk),
            **self._output("dv", dv),
            "statistics_tensor": _rows_descriptor(self.statistics, 1),
            "interleaved_heads": self.interleaved_heads,
            "group_size": problem.heads_q // self.heads_kv,
        }
        values = _constants(problem, self.variant, dk.dtype == torch.float32)
        return Launch(_bwd_sm90_kernel, self.programs, arguments, {"config": values}, OPTIONS)

    def query_gradient(self, dout: torch.Tensor) -> Launch:
        """Return the launch that writes dq, for "columns"."""
        problem = self.problem
        arguments = {
            **self._inputs(dout, ROWS.value),
            **self._output("dq", self.dq),
            "statistics_ptr": self.statistics,
            "heads": problem.batch * problem.heads_q,
            "heads_in_parallel": heads_in_parallel(problem),
        }
        values = _dq_constants(problem, self.variant, self.dq.dtype == torch.float32)
        return Launch(_bwd_wide_dq_kernel, count_blocks(problem, BLOCK_M.value), arguments, {"config": values}, OPTIONS)

    def convert(self) -> Launch:
        """Return the launch that writes dq from `dq_acc`."""
        problem, constants = self.problem, {"config": _query_constants(self.problem, self.variant)}
        arguments = {
            **pointers(dq=self.dq_acc, out=self.dq),
            **strides(problem.layout, dq=self.dq),
            **self.sizes,
            "head_dim": problem.head_dim,
            "sm_scale": self.tensors.sm_scale,
        }
        halves = self.config.block_m * self.variant.boxes * BOX_COLUMNS // HALF_DQ.value
        grid = halves * cdiv(problem.seqlen_q, self.config.block_m) * problem.batch * problem.heads_q
        return Launch(_convert_kernel, grid, arguments, constants, OPTIONS)

    def launches(
        self, out: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None, delta: torch.Tensor | None,
        gradients: AttentionGradients,
    ) -> list[Launch]:  # fmt: skip
        """Return all launches of the backward pass."""
        main = self.gradient(dout, gradients.dk, gradients.dv)
        launches = [self.prepare(out, dout, dlse, delta), main]
        if self.long_blocks is not None:
            launches.insert(1, long_blocks_launch(self.problem, self.tensors, self.long_blocks, main.arguments))
        if self.config.form == "columns":
            launches.append(self.query_gradient(dout))
        elif not self.variant.rolling:
            launches.append(self.convert())
        if self.subgroups > 1:
            partials, dk, dv = self.dk_dv_partials, gradients.dk, gradients.dv
            launches.append(bwd_partials.make_launch(self.problem, self.tensors, partials, self.subgroups, dk, dv))
        return launches


def _rows_descriptor(x: torch.Tensor, rows: int) -> Tiles:
    """Return the description of a float32 matrix that TMA reads in tiles of `rows` whole rows."""
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
    problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
    dlse: torch.Tensor | None, gradients: AttentionGradients,
) -> Pass:  # fmt: skip
    """Return the pass that writes all gradients except that of sinks."""
    if not is_aligned(out):  # a caller's, if the operator is called by itself
        out = torch.empty_like(out).copy_(out)
    lse, dout = lse.contiguous(), _readable(problem, dout, out)
    backward, delta = Sm90Backward(problem, tensors, _config(problem), lse, gradients.dq), gradients.delta
    clearing = backward_launches(problem, tensors, gradients, delta)
    return Pass([*clearing, *backward.launches(out, dout, dlse, delta, gradients)], [backward.workspace])
