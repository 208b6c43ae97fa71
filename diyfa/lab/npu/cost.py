"""Predict the cycles of a compiled NPU kernel: a model for ranking tiles, never a measurement.

docs/npu-cost-model.md has the assumptions, the source of each figure, and the distance to published timings. In short:

* The work of a tile (`hivm.Work`) becomes cycles of the cube core, of the vector cores and of the port to L2.
* The cube core either multiplies or writes out: a product has one buffer in L0C, so the next tile's product waits until
  it is empty.
* Without a pipeline the three add up. With one a tile takes the longest of the three; the shorter of cube and vector is
  added once for each batch of `pipelined` tiles.
* A task adds its prologue and epilogue. The time is that of the program with the most work, or of the bytes that must
  pass through device memory, if longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from diyfa.arch import NPUArch, NPUSpec, npu_spec
from diyfa.lab.npu.hivm import Module, Product, VectorCall, Work
from diyfa.problem import AttentionProblem

KIB = 1024
CUBE_SIDE = 16  # a cube core multiplies [16, 16] by [16, 16] 16-bit floats in a cycle, int8 [16, 32] by [32, 16]
FP32_PRODUCT_CYCLES = 4  # float32 takes four times as long
VECTOR_BYTES = 256  # bytes a cycle of a vector core: 128 16-bit or 64 32-bit elements
SLOW_OPERATIONS = ("vexp", "vln", "vdiv", "vrec", "vsqrt", "vrsqrt")
SLOW_CYCLES = 2  # cycles of these operations for 256 bytes: assumed
CALL_CYCLES = 16  # overhead from one dependent library operation to the next: assumed
SCALAR_CYCLES = 20  # for one element that the scalar unit reads or writes: assumed
LAUNCH_CYCLES = 10905  # before the first task: pto-isa's model of its kernel, fitted to boards


@dataclass(frozen=True)
class Rates:
    """Speeds of one chip. The names of CANN's platform files are in brackets."""

    hertz: float  # [cube_freq]
    l2_read: float  # bytes a cycle and AI core [l2_read_rate]
    l2_write: float  # [l2_write_rate]
    memory: float  # bytes a cycle and AI core to device memory [ddr_rate]
    l0a: float  # bytes a cycle from L1 [l1_to_l0_a_rate]
    l0b: float  # [l1_to_l0_b_rate]
    l2_bytes: int  # [l2_size]
    source: str


_A2_INI = "CANN platform_config Ascend910B2C.ini (published with CANN's runtime)"
_A2 = (110, 86, 32, 512, 256, 192 * KIB * KIB)
RATES: dict[str, Rates] = {
    "Ascend910B1": Rates(1.85e9, *_A2, f"{_A2_INI}; cube_freq of Ascend910B1.ini"),
    "Ascend910B2": Rates(1.8e9, *_A2, f"{_A2_INI}; cube_freq of Ascend910B2.ini"),
    "Ascend910B2C": Rates(1.8e9, *_A2, _A2_INI),
    "Ascend910B3": Rates(1.8e9, *_A2, f"{_A2_INI}; the same cube_freq assumed"),
    "Ascend910B4": Rates(1.5e9, *_A2, f"{_A2_INI}; cube_freq of Ascend910B4.ini"),
    "Ascend910_9362": Rates(1.85e9, *_A2, f"{_A2_INI}; cube_freq as published for one die of the 910C"),
    "Ascend910_9372": Rates(1.85e9, *_A2, f"{_A2_INI}; cube_freq as published for one die of the 910C"),
    "Ascend910_9381": Rates(1.85e9, *_A2, f"{_A2_INI}; cube_freq as published for one die of the 910C"),
    "Ascend950PR_9589": Rates(
        1.65e9, 100, 100, 27, 256, 256, 128 * KIB * KIB, "CANN Ascend950PR_957b.ini; l2_size of 9589"
    ),
    "Ascend950PR_9599": Rates(
        1.65e9, 100, 100, 27, 256, 256, 128 * KIB * KIB, "CANN Ascend950PR_957b.ini; l2_size of 9589"
    ),
}
_FAMILY_RATES = {NPUArch.A2: "Ascend910B3", NPUArch.A3: "Ascend910_9362", NPUArch.A5: "Ascend950PR_9589"}

# Matrix products per [queries, keys] tile in each kernel. Only these count as useful floating-point operations.
PRODUCTS = {"fwd": 2, "dq": 3, "dkdv": 4, "dbias": 2}


def rates(chip: str) -> Rates:
    """Return the speeds of `chip`. Raises ValueError for a chip that `diyfa.arch` does not know."""
    if chip in RATES:
        return RATES[chip]
    return RATES[_FAMILY_RATES[_spec(chip).arch]]


def _spec(chip: str) -> NPUSpec:
    spec = npu_spec(chip)
    if spec is None:
        raise ValueError(f"unknown Ascend chip {chip!r}")
    return spec


def peak_flops(chip: str, bits: int = 16) -> float:
    """Return the peak floating-point operations a second of all cube cores, on operands of 32 or 16 bits."""
    per_cycle = 2 * CUBE_SIDE**3 / (FP32_PRODUCT_CYCLES if bits == 32 else 1)
    return _spec(chip).cube_cores * per_cycle * rates(chip).hertz


@dataclass(frozen=True)
class Stages:
    """Cycles that one AI core needs for some work, by busy unit."""

    cube: float = 0.0  # multiplying, and writing out of L0C
    vector: float = 0.0
    memory: float = 0.0  # port between AI core and L2; reads and writes overlap
    shared: float = 0.0  # cycles in both `cube` and `memory`: the cube core writes out

    def add(self, other: Stages) -> Stages:
        return Stages(
            self.cube + other.cube, self.vector + other.vector, self.memory + other.memory, self.shared + other.shared
        )

    @property
    def total(self) -> float:
        """Cycles when nothing overlaps."""
        return self.cube - self.shared + self.vector + self.memory

    @property
    def longest(self) -> float:
        """Cycles when everything overlaps."""
        return max(self.cube, self.vector, self.memory)

    @property
    def bottleneck(self) -> str:
        return max(("cube", "vector", "memory"), key=lambda name: getattr(self, name))


def cube_cycles(product: Product, speed: Rates) -> float:
    """Return the cycles of one matrix product: of multiplying, or of moving its operands from L1 if longer."""
    depth = CUBE_SIDE * 2 if product.bits == 8 else CUBE_SIDE
    blocks = -(-product.m // CUBE_SIDE) * -(-product.n // CUBE_SIDE) * -(-product.k // depth)
    cycles = blocks * (1 if product.bits <= 16 else FP32_PRODUCT_CYCLES)
    width = product.bits / 8
    moved = max(product.m * product.k * width / speed.l0a, product.k * product.n * width / speed.l0b)
    return max(cycles, moved) * product.times


def dependent_calls(call: VectorCall) -> int:
    """Return the number of operations in a library call that wait for one another.

    A reduction halves its rows until 256 bytes, one operation's width, are left, and then reduces across those.
    Together its operations touch about as many elements as the rows have."""
    lanes = 8 * VECTOR_BYTES // call.bits if call.bits else 1
    return 1 + max(0, (-(-call.row // lanes) - 1).bit_length())


def stages(work: Work, chip: str) -> Stages:
    """Return the cycles of `work` on `chip`, by busy unit."""
    speed = rates(chip)
    vector = work.scalar_accesses * SCALAR_CYCLES
    for call in work.vector:
        repeats = -(-call.elements * call.bits // (8 * VECTOR_BYTES))
        slow = SLOW_CYCLES if call.name.startswith(SLOW_OPERATIONS) else 1
        vector += call.times * (repeats * slow + (CALL_CYCLES * dependent_calls(call) if call.library else 0))
    written_out = work.written_out / speed.l2_write
    return Stages(
        cube=sum(cube_cycles(product, speed) for product in work.products) + written_out,
        vector=vector,
        memory=max(
            (work.loaded + work.workspace_read) / speed.l2_read, (work.stored + work.workspace_written) / speed.l2_write
        ),
        shared=written_out,
    )


def tile_cycles(tile: Stages, pipelined: int) -> float:
    """Return the cycles from one tile to the next; the module docstring has the rule."""
    if pipelined < 2:
        return tile.total
    return tile.longest + min(tile.cube, tile.vector) / pipelined


@dataclass(frozen=True)
class Task:
    """A task of a kernel. `tiles`: tiles of scores that it loops over. `masked`: how many of them need a mask."""

    tiles: int
    masked: int


def attention_tasks(problem: AttentionProblem, kernel: str, block_m: int, block_n: int) -> Iterator[Task]:
    """Yield the tasks of one head, from the first block on. Windows other than causal count as full attention.

    For "dbias" the bias is [queries, keys], broadcast over samples and heads, and a row of its tiles counts as a task.
    """
    rows, keys = problem.seqlen_q, problem.seqlen_k
    offset = keys - rows
    if kernel == "dkdv":
        group = problem.heads_q // problem.heads_kv
        for n0 in range(0, keys, block_n):
            low = max(0, n0 - offset) // block_m * block_m if problem.causal else 0
            tiles = -(-max(0, rows - low) // block_m)
            cut = sum(n0 + block_n > row0 + offset for row0 in range(low, rows, block_m)) if problem.causal else 0
            yield Task(tiles * group, cut * group)
        return
    heads = problem.batch * problem.heads_q if kernel == "dbias" else 1
    for row0 in range(0, rows, block_m):
        seen = range(0, min(keys, row0 + block_m + offset) if problem.causal else keys, block_n)
        cut = sum(n0 + block_n > row0 + offset for n0 in seen) if problem.causal else 0
        yield Task(heads * len(seen), heads * cut)


def scheduled(costs: list[float], programs: int, zigzag: bool = True) -> list[float]:
    """Return the work of each program if tasks are dealt in rounds, with zigzag odd rounds from the last program on."""
    load = [0.0] * programs
    for i, cost in enumerate(costs):
        wave, position = divmod(i, programs)
        load[programs - 1 - position if zigzag and wave % 2 else position] += cost
    return load


@dataclass(frozen=True)
class Prediction:
    """The model's result for one kernel and problem. Every figure is predicted."""

    seconds: float
    tflops: float
    share: float  # of the cube cores' peak, useful operations only
    bottleneck: str  # of a tile: "cube", "vector", "memory"; or "device memory", if that limits the kernel
    balance: float  # mean work of a program / the most work of a program
    tile: Stages
    tile_cycles: float

    def numbers(self) -> dict[str, Any]:
        """Return the figures for JSON, rounded."""
        return {
            "predicted_us": round(self.seconds * 1e6, 1),
            "predicted_tflops": round(self.tflops, 1),
            "predicted_share_of_cube_peak": round(self.share, 4),
            "bottleneck": self.bottleneck,
            "balance": round(self.balance, 4),
            "tile_cycles": round(self.tile_cycles),
            "cube_cycles": round(self.tile.cube),
            "vector_cycles": round(self.tile.vector),
            "memory_cycles": round(self.tile.memory),
        }


def useful_flops(problem: AttentionProblem, kernel: str) -> float:
    """Return the operations of the kernel's products without masked pairs (causal: half of all)."""
    pairs = problem.seqlen_q * problem.seqlen_k * (0.5 if problem.causal else 1.0)
    width = (problem.head_dim + problem.head_dim_v) / 2
    return 2.0 * PRODUCTS[kernel] * pairs * width * problem.batch * problem.heads_q


def _tensor_bytes(problem: AttentionProblem, kernel: str, width: int) -> float:
    """Return the bytes of a call's tensors, each counted once."""
    q = problem.batch * problem.heads_q * problem.seqlen_q * width
    k = problem.batch * problem.heads_kv * problem.seqlen_k * width
    d, dv = problem.head_dim, problem.head_dim_v
    bias = 4 * problem.seqlen_q * problem.seqlen_k  # the gradient in fp32; no kernel's figure includes the bias
    extra = {"fwd": q * dv, "dq": q * (d + dv), "dkdv": q * dv + k * (d + dv), "dbias": q * dv + bias}
    return q * d + k * (d + dv) + extra[kernel]


def predict(
    module: Module,
    problem: AttentionProblem,
    kernel: str,
    block_m: int,
    block_n: int,
    zigzag: bool = True,
) -> Prediction:
    """Predict the time of `kernel` ("fwd", "dq", "dkdv", "dbias"), compiled as `module`, for `problem`.

    If the kernel has two loops, the first is over full tiles and the second over masked ones. If the compiler folded
    the second loop away, the work of masked tiles is in `module.task`.
    """
    chip = problem.arch
    spec, speed = _spec(chip), rates(chip)
    full = module.loops[0]
    masked = module.loops[1] if len(module.loops) > 1 else full
    plain = stages(full.tile, chip)
    cut = stages(masked.tile, chip).add(stages(masked.masked, chip))
    per_tile, per_cut = tile_cycles(plain, module.pipelined), tile_cycles(cut, module.pipelined)
    around = stages(module.task, chip).total
    if module.task.products:
        per_cut = 0.0
    costs = [
        (task.tiles - task.masked) * per_tile + task.masked * per_cut + around
        for task in attention_tasks(problem, kernel, block_m, block_n)
    ]
    heads = problem.batch * (problem.heads_kv if kernel == "dkdv" else problem.heads_q)
    programs = spec.cube_cores
    if kernel == "dbias":  # its many small tasks balance out
        heads = 1
        around *= -(-problem.seqlen_k // block_n) - 1
        order = [(sum(costs) + around * len(costs)) / programs] * programs
    else:
        order = [cost for cost in reversed(costs) for _ in range(heads)] if zigzag else costs * heads
    programs = min(programs, len(order))
    load = scheduled(order, programs, zigzag)
    seconds = (max(load) + LAUNCH_CYCLES) / speed.hertz
    bits = max((product.bits for product in full.tile.products), default=16)  # v's, if q and k are int8
    compulsory = _tensor_bytes(problem, kernel, bits // 8)
    if programs * module.workspace > speed.l2_bytes:  # data between the cores then goes through device memory
        tiles = sum(task.tiles for task in attention_tasks(problem, kernel, block_m, block_n)) * heads
        compulsory += tiles * (full.tile.workspace_read + full.tile.workspace_written)
    device = compulsory / (speed.memory * spec.cube_cores * speed.hertz)
    flops = useful_flops(problem, kernel)
    bottleneck = "device memory" if device > seconds else plain.bottleneck
    seconds = max(seconds, device)
    return Prediction(
        seconds=seconds,
        tflops=flops / seconds / 1e12,
        share=flops / seconds / peak_flops(chip, bits),
        bottleneck=bottleneck,
        balance=sum(load) / len(load) / max(load),
        tile=plain,
        tile_cycles=per_tile,
    )
