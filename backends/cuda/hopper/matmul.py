"""Matrix product for Hopper (sm_90): c = activation((a @ b) * a_descale * b_descale + bias), in Gluon.

A persistent program computes tiles [BLOCK_M, BLOCK_N] of c one after another. Its warps are specialised:

* A producer warp copies operand tiles to shared memory by TMA. It is up to STAGES steps of BLOCK_K ahead of the
  products, also across the end of a tile.
* Two consumer warpgroups multiply by wgmma, each one half of the tile's rows. The result leaves through shared memory
  by TMA stores, which run on during the products of the next tile. A tile of 64 rows has one consumer.
* PINGPONG: each consumer computes every second tile alone. They take turns at multiplying, so one multiplies during the
  other's epilogue.

Tiles are numbered in groups of GROUP_M rows of tiles. Inside a group, numbers go down a column of tiles first. So
programs that run at the same time use the same operand tiles in the L2 cache. SPLIT_K: SPLIT_K programs divide K of a
tile and write float32 sums. A second kernel adds these up and applies the epilogue (`matmul/kernel.py`).

Read `_matmul_sm90_kernel` first, then `_producer`, `_consumer`, `_accumulate` and `_store_tile`.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from diyfa.backends.cuda.attention.launch import forced_config, launching, repeating
from diyfa.backends.cuda.gluon.barriers import WARPS, idle_warps, prefetch_tensor_maps, turn, wait_for_previous_kernels
from diyfa.backends.cuda.gluon.channel import Channel, allocate_channel
from diyfa.backends.cuda.gluon.compat import aggregate, async_load, async_store
from diyfa.backends.cuda.gluon.tma import smem_box
from diyfa.backends.cuda.hopper.matmul_configs import (
    Sm90MatmulConfig,
    compile_options,
    config_refusal,
    copied_rows,
    select_config,
    store_columns,
)
from diyfa.backends.cuda.hopper.mma import accumulator_layout
from diyfa.backends.cuda.matmul.epilogue import finish
from diyfa.backends.cuda.matmul.kernel import epilogue_arguments, make_sum, partials_of
from diyfa.backends.cuda.runtime.constants import Constants
from diyfa.backends.cuda.runtime.launch import multiprocessors
from diyfa.backends.cuda.runtime.passes import Pass
from diyfa.backends.cuda.runtime.signature import Tiles
from diyfa.problem import Launch, MatmulProblem, MatmulTensors


@dataclass(frozen=True, eq=False)
class MatmulSm90Constants(Constants):
    """The kernel's compile-time constants. `Sm90MatmulConfig` explains the tile."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    consumers: int
    pingpong: bool
    group_m: int
    split_k: int
    rows: int  # rows of c that a consumer computes of a tile
    a_rows: int  # rows of a that are copied of these; the others are not initialised, and their products not stored
    a_transposed: bool  # a is contiguous along M, not along K
    b_transposed: bool  # b is contiguous along K, not along N
    store_columns: int  # columns of a TMA store
    activation: str | None


CONSUMER_REGISTERS = gl.constexpr(232)
PRODUCER_REGISTERS = gl.constexpr(40)


@constexpr_function
def _store_buffers(config):
    """Return the number of store buffers of a consumer: two, or one if one store has all columns of its tile."""
    return min(2, config.BLOCK_N // config.STORE_COLUMNS)


@aggregate
class WorkTile:
    """A tile of c, from [row0, column0] on, and its split of K: steps [first_step, end_step) of BLOCK_K."""

    row0: gl.tensor
    column0: gl.tensor
    split: gl.tensor
    first_step: gl.tensor
    end_step: gl.tensor


@aggregate
class TileOrder:
    """The numbering of all tiles. Programs take tiles program_id, program_id + num_programs, ..."""

    tiles_m: gl.tensor
    tiles_n: gl.tensor
    steps: gl.tensor  # steps of BLOCK_K in K
    config: gl.constexpr

    @gluon.jit
    def count(self):
        """Return the number of work tiles: tiles of c times splits of K."""
        return self.tiles_m * self.tiles_n * self.config.SPLIT_K

    @gluon.jit
    def locate(self, index):
        """Return the `WorkTile` of a number. All tiles of c of one split follow each other."""
        config: gl.constexpr = self.config
        tiles = self.tiles_m * self.tiles_n
        split = index // tiles
        index = index % tiles
        first_m = index // (config.GROUP_M * self.tiles_n) * config.GROUP_M
        group_m = gl.minimum(self.tiles_m - first_m, config.GROUP_M)
        index = index - first_m * self.tiles_n
        steps = gl.cdiv(self.steps, config.SPLIT_K)
        first_step = split * steps
        end_step = gl.minimum(first_step + steps, self.steps)
        row0 = (first_m + index % group_m) * config.BLOCK_M
        return WorkTile(row0, index // group_m * config.BLOCK_N, split, first_step, end_step)


@aggregate
class Operands:
    """Stages of operand tiles in shared memory, and the channel that hands them to the consumers."""

    a_tensor: tma.tensor_descriptor
    b_tensor: tma.tensor_descriptor
    a_buffers: gl.shared_memory_descriptor  # BLOCK_M / ROWS boxes for each stage
    b_buffers: gl.shared_memory_descriptor  # one box for each stage
    channel: Channel
    config: gl.constexpr

    @gluon.jit
    def start_load(self, item, tile, step):
        """Start the TMA copies of a step's operand tiles to the stage of `item`. Beyond a and b they get zeros."""
        config: gl.constexpr = self.config
        BOXES: gl.constexpr = config.BLOCK_M // config.ROWS
        stage = self.channel.stage(item)
        full = self.channel.full_barrier(item)
        k = step * config.BLOCK_K
        mbarrier.expect(full, BOXES * self.a_tensor.block_type.nbytes + self.b_tensor.block_type.nbytes)
        for i in gl.static_range(BOXES):
            row = tile.row0 + i * config.ROWS
            a_at = [k, row] if config.A_TRANSPOSED else [row, k]
            a_buffer = self.a_buffers.index(stage * BOXES + i)
            if config.A_ROWS < config.ROWS:
                a_buffer = a_buffer.slice(0, config.A_ROWS, 0)
            async_load(self.a_tensor, a_at, full, a_buffer)
        b_at = [tile.column0, k] if config.B_TRANSPOSED else [k, tile.column0]
        async_load(self.b_tensor, b_at, full, self.b_buffers.index(stage))

    @gluon.jit
    def start_product(self, item, BOX: gl.constexpr, acc, USE_ACC: gl.constexpr):
        """Start acc += a @ b of a step, [ROWS, BLOCK_K] @ [BLOCK_K, BLOCK_N]. Without USE_ACC, acc is overwritten.

        BOX: the consumer's box of a. Operands of float32 are multiplied as tf32, Triton's default.
        """
        config: gl.constexpr = self.config
        stage = self.channel.stage(item)
        a = self.a_buffers.index(stage * (config.BLOCK_M // config.ROWS) + BOX)
        b = self.b_buffers.index(stage)
        if config.A_TRANSPOSED:
            a = a.permute((1, 0))
        if config.B_TRANSPOSED:
            b = b.permute((1, 0))
        return warpgroup_mma(a, b, acc, use_acc=USE_ACC, is_async=True)


@aggregate
class Output:
    """The result, and buffers of [ROWS, STORE_COLUMNS] that it leaves through: one or two for each consumer."""

    c_tensor: tma.tensor_descriptor  # (splits, M, N)
    bias_ptr: gl.tensor | gl.constexpr
    a_descale_ptr: gl.tensor | gl.constexpr
    b_descale_ptr: gl.tensor | gl.constexpr
    stride_bias: gl.tensor | gl.constexpr
    stride_a_descale: gl.tensor | gl.constexpr
    stride_b_descale: gl.tensor | gl.constexpr
    buffers: gl.shared_memory_descriptor
    config: gl.constexpr

    @gluon.jit
    def finish(self, x, row0, column0):
        """Return sums x of c[row0:, column0:] after the epilogue: descales, bias, activation."""
        vectors = (
            self.bias_ptr, self.stride_bias, self.a_descale_ptr, self.stride_a_descale,
            self.b_descale_ptr, self.stride_b_descale,
        )  # fmt: skip
        M, N = self.c_tensor.shape[1], self.c_tensor.shape[2]
        offs_m = row0 + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, x.type.layout))
        offs_n = column0 + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
        return finish(x, vectors, offs_m, offs_n, M, N, self.config.ACTIVATION)


@gluon.jit
def _start_first_loads(order, operands):
    """Start the loads of the first tile that all stages have room for, and return their number.

    The warps of the launch do it before they start the others, which takes half a microsecond.
    """
    tile = order.locate(gl.program_id(0))
    count = gl.minimum(tile.end_step - tile.first_step, operands.config.STAGES)
    for item in range(count):
        operands.start_load(item, tile, tile.first_step + item)
    return count


@gluon.jit
def _producer(order, operands, started):
    """Run the producer warp: load the operand tiles of all tiles, each as soon as its stage is free.

    The first `started` loads are under way already.
    """
    item = 0
    for index in range(gl.program_id(0), order.count(), gl.num_programs(0)):
        tile = order.locate(index)
        for step in range(tile.first_step, tile.end_step):
            if item >= started:
                operands.channel.acquire(item)
                operands.start_load(item, tile, step)
            item += 1


@gluon.jit
def _accumulate(operands, BOX: gl.constexpr, item, end):
    """Return the sum [ROWS, BLOCK_N] of the products of items [item, end), of which there is at least one.

    The next product is issued before the one before it is complete, so the tensor cores do not idle.
    """
    config: gl.constexpr = operands.config
    LAYOUT: gl.constexpr = accumulator_layout(config.BLOCK_N, operands.a_buffers.dtype.primitive_bitwidth)
    channel = operands.channel
    acc = gl.zeros([config.ROWS, config.BLOCK_N], gl.float32, LAYOUT)
    if operands.a_buffers.dtype.primitive_bitwidth == 8:
        # Tensor cores add products of float8 with about 14 bits, so a long sum is made of short ones. The other
        # consumer multiplies meanwhile. The loop carries the item: of `for i in range(item, end)` Triton 3.6 makes a
        # loop from 0 on, in every tile (docs/log/eight-bits.md).
        product = acc
        for _ in range(item, end):
            channel.wait(item)
            product = operands.start_product(item, BOX, product, False)
            product = warpgroup_mma_wait(0, deps=[product])
            channel.release(item)
            acc += product
            item += 1
        return acc
    channel.wait(item)
    acc = operands.start_product(item, BOX, acc, False)
    acc = warpgroup_mma_wait(1, deps=[acc])  # waits for nothing, but makes acc a tensor, which the loop can carry
    for i in range(item + 1, end):
        channel.wait(i)
        acc = operands.start_product(i, BOX, acc, True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        channel.release(i - 1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    channel.release(end - 1)
    return acc


@gluon.jit
def _column_chunks(acc, COLUMNS: gl.constexpr):
    """Return acc [ROWS, BLOCK_N] as a tuple of tiles of COLUMNS columns, without moving data between threads."""
    chunks = (acc,)
    for _ in gl.static_range(16):
        if chunks[0].shape[1] > COLUMNS:
            halves = ()
            for i in gl.static_range(len(chunks)):
                x = chunks[i]
                halves += gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)))
            chunks = halves
    return chunks


@gluon.jit
def _store_tile(output, CONSUMER: gl.constexpr, BOX: gl.constexpr, tile, acc):
    """Apply the epilogue to a consumer's rows of a tile and start their TMA stores, which clip at the edges of c.

    With BUFFERS = 2, a buffer is written again once the store before the last has read it; with 1, once the last store
    has. Nothing waits for the stores of this tile, which run on behind its end.
    """
    config: gl.constexpr = output.config
    COLUMNS: gl.constexpr = config.STORE_COLUMNS
    BUFFERS: gl.constexpr = _store_buffers(config)
    DTYPE: gl.constexpr = output.c_tensor.dtype
    row = tile.row0 + BOX * config.ROWS
    chunks = _column_chunks(acc, COLUMNS)
    for i in gl.static_range(len(chunks)):
        column = tile.column0 + i * COLUMNS
        x = output.finish(chunks[i], row, column)
        buffer = output.buffers.index(CONSUMER * BUFFERS + i % BUFFERS)
        tma.store_wait(BUFFERS - 1)
        buffer.reshape([config.ROWS, COLUMNS]).store(x.to(DTYPE))
        fence_async_shared()  # TMA must see what threads have stored
        async_store(output.c_tensor, [tile.split, row, column], buffer)


@gluon.jit
def _consumer(INDEX: gl.constexpr, order, operands, output):
    """Run a consumer warpgroup: its rows of each tile, or with PINGPONG every second tile."""
    config: gl.constexpr = operands.config
    BOX: gl.constexpr = 0 if config.PINGPONG else INDEX
    FIRST: gl.constexpr = INDEX if config.PINGPONG else 0
    EVERY: gl.constexpr = config.CONSUMERS if config.PINGPONG else 1
    item = FIRST * order.steps
    if config.PINGPONG and INDEX == 1:
        turn("arrive", 0)  # consumer 0 has the first turn
    programs = gl.num_programs(0)
    for index in range(gl.program_id(0) + FIRST * programs, order.count(), EVERY * programs):
        tile = order.locate(index)
        end = item + tile.end_step - tile.first_step
        # A consumer may wait for a stage only once the other has waited for all earlier items: else an older phase of
        # the same parity would answer.
        if config.PINGPONG:
            turn("sync", INDEX)
        acc = _accumulate(operands, BOX, item, end)
        if config.PINGPONG:
            turn("arrive", 1 - INDEX)
        _store_tile(output, INDEX, BOX, tile, acc)
        # With PINGPONG skip the items of the other consumer's tile. It has order.steps of them, because PINGPONG
        # excludes SPLIT_K > 1.
        item = end + (EVERY - 1) * order.steps
    tma.store_wait(0)


@gluon.jit
def _buffers(tensor, COUNT: gl.constexpr):
    """Allocate buffers for COUNT boxes of a tensor."""
    return gl.allocate_shared_memory(tensor.dtype, [COUNT] + tensor.block_shape, tensor.layout)  # noqa: RUF005 (Gluon)


@gluon.jit
def _matmul_sm90_kernel(
    a_tensor,  # (M, K), boxes of [A_ROWS, BLOCK_K]; A_TRANSPOSED: (K, M), [BLOCK_K, ROWS]
    b_tensor,  # (K, N), boxes of [BLOCK_K, BLOCK_N]; B_TRANSPOSED: (N, K), [BLOCK_N, BLOCK_K]
    bias_ptr,  # (N,)
    a_descale_ptr,  # one number or (M,)
    b_descale_ptr,  # one number or (N,)
    c_tensor,  # (SPLIT_K, M, N), boxes of [1, ROWS, STORE_COLUMNS]
    stride_bias, stride_a_descale, stride_b_descale,
    config: gl.constexpr,  # `MatmulSm90Constants`
):  # fmt: skip
    """Compute all tiles of c.

    1. Allocate operand stages, store buffers and barriers, and wait for previous kernels on the stream.
    2. Start the first loads.
    3. Run the producer and the consumers until all tiles of the program are done.
    """
    CONSUMERS: gl.constexpr = config.CONSUMERS
    BOXES: gl.constexpr = config.BLOCK_M // config.ROWS
    prefetch_tensor_maps()
    # Consumers that read a stage: with PINGPONG the one whose tile it belongs to, else all.
    READERS: gl.constexpr = 1 if config.PINGPONG else CONSUMERS
    STORES: gl.constexpr = CONSUMERS * _store_buffers(config)
    if config.A_ROWS < config.ROWS:
        A_SHAPE: gl.constexpr = [config.STAGES * BOXES, config.ROWS, config.BLOCK_K]
        a_buffers = gl.allocate_shared_memory(a_tensor.dtype, A_SHAPE, a_tensor.layout)
    else:
        a_buffers = _buffers(a_tensor, config.STAGES * BOXES)
    b_buffers = _buffers(b_tensor, config.STAGES)
    c_buffers = _buffers(c_tensor, STORES)
    channel = allocate_channel(config.STAGES, 1, WARPS * READERS)
    fence_async_shared()  # TMA must see the barriers
    wait_for_previous_kernels()

    K_DIM: gl.constexpr = 0 if config.A_TRANSPOSED else 1
    order = TileOrder(
        gl.cdiv(c_tensor.shape[1], config.BLOCK_M),
        gl.cdiv(c_tensor.shape[2], config.BLOCK_N),
        gl.cdiv(a_tensor.shape[K_DIM], config.BLOCK_K),
        config,
    )
    operands = Operands(a_tensor, b_tensor, a_buffers, b_buffers, channel, config)
    output = Output(
        c_tensor, bias_ptr, a_descale_ptr, b_descale_ptr, stride_bias, stride_a_descale, stride_b_descale, c_buffers,
        config,
    )  # fmt: skip
    started = _start_first_loads(order, operands)
    # The first consumer runs on the warps of the launch. Registers are allocated by warpgroups, so idle warps fill up
    # the producer's. Beside a single consumer all threads have as many as they can use.
    OTHERS: gl.constexpr = CONSUMERS - 1
    PRODUCERS: gl.constexpr = 3 if OTHERS else 1  # partitions of the producer's warpgroup
    gl.warp_specialize(
        [(_consumer, (i, order, operands, output)) for i in (0, 1)[: OTHERS + 1]]
        + [(_producer, (order, operands, started)), (idle_warps, ()), (idle_warps, ())][:PRODUCERS],
        [4][:OTHERS] + [1, 1, 2][:PRODUCERS],
        [CONSUMER_REGISTERS][:OTHERS] + [PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS][:PRODUCERS],
    )  # fmt: skip


def constants(problem: MatmulProblem, config: Sm90MatmulConfig) -> MatmulSm90Constants:
    """Return the constants that the kernel is compiled with."""
    return MatmulSm90Constants.read_from(
        config, rows=config.rows, a_rows=copied_rows(problem, config), a_transposed=not problem.k_major[0],
        b_transposed=problem.k_major[1], store_columns=store_columns(problem, config),
        activation=problem.activation if config.split_k == 1 else None,
    )  # fmt: skip


def _matrix(x: torch.Tensor, is_row_major: bool, box: tuple[int, int]) -> Tiles:
    """Return the descriptor of a matrix, whose box is [rows, columns]. The dimension of stride 1 comes last."""
    step = 1 if is_row_major else -1
    return Tiles(x, x.shape[::step], x.stride()[::step], smem_box(*box[::step], 2, x.dtype))


def make_launches(
    problem: MatmulProblem, tensors: MatmulTensors, c: torch.Tensor, config: Sm90MatmulConfig
) -> list[Launch]:
    """Return the launches that write the product with its epilogue to c."""
    values, (a_by_k, b_by_k) = constants(problem, config), problem.k_major
    operands = {
        "a_tensor": _matrix(tensors.a, a_by_k, (values.a_rows, config.block_k)),
        "b_tensor": _matrix(tensors.b, not b_by_k, (config.block_k, config.block_n)),
    }
    count = triton.cdiv(problem.m, config.block_m) * triton.cdiv(problem.n, config.block_n) * config.split_k
    grid = min(count, multiprocessors(c.device) or 132)

    def launch(x: torch.Tensor, epilogue: MatmulTensors | None) -> Launch:
        splits, rows, columns = x.shape
        shape, strides = (splits, rows, columns), (x.stride(0), x.stride(1), 1)
        arguments: dict[str, Any] = {
            **operands,
            **epilogue_arguments(epilogue),
            "c_tensor": Tiles(x, shape, strides, smem_box(config.rows, values.store_columns, 3, x.dtype)),
        }
        return Launch(_matmul_sm90_kernel, grid, arguments, {"config": values}, compile_options(config))

    if config.split_k == 1:
        return [launch(c.unsqueeze(0), tensors)]
    partials = c.new_empty((config.split_k, problem.m, problem.n), dtype=torch.float32)
    return [launch(partials, None), make_sum(problem, partials, tensors, c)]


def matmul_pass(problem: MatmulProblem, tensors: MatmulTensors, c: torch.Tensor) -> Pass:
    """Return the pass that writes the product with its epilogue to c."""
    config = forced_config("sm90_matmul", problem)
    if config is None:
        config = select_config(problem)
    elif reason := config_refusal(config, problem):
        raise ValueError(reason)
    launches = make_launches(problem, tensors, c, config)
    return Pass(launches, partials_of(launches))


matmul, repeat = launching(matmul_pass), repeating(matmul_pass)
