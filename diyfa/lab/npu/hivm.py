"""Read the Ascend compiler's last intermediate form (`module.hivm.opt.mlir`): the work of each kind of core.

The form is text. It has one function for the cube core and one for the vector cores. Their loops call the compiler's
library (`mma_tile_*`, `nd2nz_*`, `v*_1d_float`, ...) on buffers with planned addresses. `read` extracts

* the peak use of each on-chip memory, whether both vector cores share the work, and the depth of the pipeline;
* for each loop over tiles of scores (or over k, in a matrix product) the `Work` of one tile: first the part that always
  runs, then what a run-time `if` (the mask) adds;
* the work around that loop, once for each task of the persistent grid.

Shapes are those of buffers, so a partial last tile counts as a whole one. L0A and L0B do not appear; l0.py computes
their use. On the 950 loops are branches between blocks, and vector code is outlined into functions of register
instructions; this module follows both.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from diyfa.lab.npu.hivm_ops import CONSTANT, ELEMENT_BITS, Frame, Op, Reader, functions

MEMORY_NAMES = {"ub": "ub", "cbuf": "l1", "ca": "l0a", "cb": "l0b", "cc": "l0c"}

_BUFFER = re.compile(
    r"pointer_cast\(([^)]*)\).*?memref<((?:\d+x)*)([a-z]\w*)(?:, strided<[^>]*>)?, #hivm\.address_space<(\w+)>"
)


def peak_memory(hivm: str) -> dict[str, int]:
    """Return the peak bytes of each on-chip memory: the end of its furthest planned buffer."""
    constants: dict[str, int] = {}  # names are local to a function and defined before their use
    peak: dict[str, int] = {}
    for line in hivm.splitlines():
        if constant := CONSTANT.search(line):
            constants[constant[1]] = int(constant[2])
        buffer = _BUFFER.search(line)
        if buffer is None or buffer[3] not in ELEMENT_BITS or buffer[4] not in MEMORY_NAMES:
            continue
        elements = math.prod(int(size) for size in buffer[2].split("x") if size)
        size = (elements * ELEMENT_BITS[buffer[3]] + 7) // 8
        memory = MEMORY_NAMES[buffer[4]]
        starts = [constants[name.strip()] for name in buffer[1].split(",") if name.strip() in constants]
        peak[memory] = max([peak.get(memory, 0), *(start + size for start in starts)])
    return peak


def is_bound(hivm: str) -> bool:
    """Return whether both vector cores of an AI core share the work."""
    return "to_be_bubbled_slice" in hivm


def pipeline_depth(hivm: str) -> int:
    """Return the number of buffers of the deepest cube-to-vector workspace; 0 without a pipeline."""
    depths = [int(n) for n in re.findall(r"memref\.view [^\n]* to memref<(\d)x\d+x\d+x(?:f|bf)", hivm)]
    return max((n for n in depths if n > 1), default=0)


@dataclass(frozen=True)
class VectorCall:
    """A vector operation on `elements` elements of `bits` each, run `times` times.

    It is a call of the library, for a whole buffer, or on the 950 one register instruction."""

    name: str
    elements: int
    bits: int
    times: float = 1.0
    library: bool = True
    row: int = 1  # elements that a reduction combines into one


@dataclass(frozen=True)
class Product:
    """A matrix product [m, k] @ [k, n] with elements of `bits` each, run `times` times."""

    m: int
    n: int
    k: int
    bits: int
    times: float = 1.0

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.times


@dataclass
class Work:
    """Work of one AI core (a cube core and its two vector cores). Bytes count at global memory, except `direct`."""

    products: list[Product] = field(default_factory=list)
    vector: list[VectorCall] = field(default_factory=list)  # operations of one vector core
    loaded: float = 0.0  # bytes of tensors read from global memory, by either kind of core
    stored: float = 0.0  # bytes of results written to it
    workspace_read: float = 0.0  # bytes between cube and vector cores through global memory
    workspace_written: float = 0.0
    direct: float = 0.0  # bytes between cube and vector cores on the chip (950)
    written_out: float = 0.0  # bytes among these that the cube core writes out of L0C
    cube_bytes: float = 0.0  # bytes that the cube core moves
    vector_bytes: float = 0.0  # bytes that the vector cores move
    scalar_accesses: float = 0.0  # single elements that the scalar unit reads or writes

    @property
    def flops(self) -> float:
        return sum(product.flops for product in self.products)

    @property
    def vector_elements(self) -> float:
        """Elements that the operations of one vector core process."""
        return sum(call.elements * call.times for call in self.vector)


@dataclass
class Loop:
    """A loop over tiles of scores: the work of one tile, and what a run-time `if` adds to it."""

    tile: Work = field(default_factory=Work)
    masked: Work = field(default_factory=Work)


@dataclass
class Module:
    """A compiled kernel, as `read` returns it."""

    memory: dict[str, int]
    bound: bool  # both vector cores share the work
    pipelined: int
    mixed: bool  # uses cube and vector cores
    workspace: int  # bytes of workspace for each program
    loops: list[Loop]
    task: Work  # work around the loop, once for each task
    score_elements: int  # elements of the first product's result; in attention the tile of scores

    @property
    def vector_cores(self) -> int:
        """Vector cores of an AI core that work on a tile."""
        return 2 if self.bound else 1

    def passes(self, work: Work) -> float:
        """Return the elements that vector operations touch, per score."""
        return work.vector_elements * self.vector_cores / self.score_elements if self.score_elements else 0.0


def _is_dynamic(frame: Frame) -> bool:
    return frame.kind == "loop" and frame.trips is None and not frame.unroll


def _dynamic(op: Op) -> list[Frame]:
    return [frame for frame in op.frames if _is_dynamic(frame)]


def _add(work: Work, op: Op, times: float) -> None:
    """Add `op`, which runs `times` times, to `work`."""
    if op.kind == "cube":
        a, b, c = (buffer.elements for buffer in op.buffers[:3])
        if not a * b * c:
            raise ValueError(f"the shape of an operand of {op.name} is not known")
        m, n, k = (math.isqrt(x) for x in (a * c // b, b * c // a, a * b // c))
        work.products.append(Product(m, n, k, ELEMENT_BITS[op.buffers[0].dtype], times))
    elif op.kind == "vector":
        elements = op.elements or max((buffer.elements for buffer in op.buffers), default=0)
        widest = [ELEMENT_BITS.get(buffer.dtype, 0) for buffer in op.buffers if buffer.elements == elements]
        if elements:
            bits, library = op.bits or max(widest, default=0), not op.bits
            results = op.buffers[1].elements if library and "reduce" in op.name and len(op.buffers) > 1 else 0
            row = elements // results if results else 1
            work.vector.append(VectorCall(op.name, elements, bits, times, library, row))
    elif op.kind == "scalar":
        work.scalar_accesses += times
    elif op.kind == "direct":
        work.direct += op.buffers[0].bytes * times
    elif op.kind == "move":
        far = next(i for i, buffer in enumerate(op.buffers) if buffer.space == "gm")
        near = next((buffer for buffer in op.buffers if buffer.space != "gm"), op.buffers[0])
        outside = op.buffers[far]
        size = (outside.bytes or near.bytes) * times
        reads = far == 0  # sources come first
        name = ("workspace_read", "workspace_written") if outside.workspace else ("loaded", "stored")
        setattr(work, name[not reads], getattr(work, name[not reads]) + size)
        by = "vector_bytes" if near.space == "ub" else "cube_bytes"
        setattr(work, by, getattr(work, by) + size)
        if by == "cube_bytes" and not reads:
            work.written_out += size


def _times(op: Op, depth: int, unrolled: dict[int, int]) -> float:
    """Return how often `op` runs per iteration of its `depth`-th run-time loop.

    A pipeline inside that loop steps through iterations of the loop, so its steps do not multiply. A pipeline without
    such a loop around it, because the compiler folded away a loop that ran once, counts all its steps.
    """
    times, level, stepped = op.times, 0, False
    walked: Frame | None = None
    for frame in op.frames:
        if _is_dynamic(frame):
            level += 1
            walked = frame if level == depth else walked
        elif level >= depth and frame.kind == "loop":
            if frame.unroll and walked is not None and id(walked) in unrolled:
                stepped = True
            else:
                times *= frame.unroll if frame.trips is None else frame.trips
    if walked is not None and not stepped:
        times /= unrolled.get(id(walked), 1)
    return times


def read(hivm: str) -> Module:
    """Read a module. Raises ValueError if it has no kernel function, or one that this reader cannot follow."""
    vector_functions: dict[str, list[Op]] = {}
    kernels: list[list[Op]] = []  # the cube core's function comes first
    for name, lines in functions(hivm):
        if "hacc.function_kind = #hacc.function_kind<HOST>" in lines[0]:
            continue
        ops = Reader(lines, vector_functions).ops
        if "hivm.vector_function" in lines[0]:
            vector_functions[name] = ops
        else:
            kernels.append(ops)
    if not kernels:
        raise ValueError("no kernel function in this module")
    bound = is_bound(hivm)
    everything = [op for ops in kernels for op in ops]
    deciding = [op for op in everything if op.kind == "cube"] or [op for op in everything if op.kind == "vector"]
    depth = max((len(_dynamic(op)) for op in deciding), default=0)
    unrolled = {
        id(outer[depth - 1]): frame.unroll
        for op in everything
        if len(outer := _dynamic(op)) >= depth > 0
        for frame in op.frames
        if frame.unroll
    }
    loops: list[Loop] = []
    task = Work()
    for ops in kernels:
        cores = 2 if bound and ops is not kernels[0] else 1
        order: dict[int, int] = {}
        for op in ops:
            if any(frame.kind == "never" for frame in op.frames) or op.kind == "fill":
                continue
            outer = _dynamic(op)
            conditional = any(frame.kind == "if" for frame in op.frames)
            scale = cores if op.kind in ("move", "direct") else 1
            if len(outer) >= depth > 0:
                index = order.setdefault(id(outer[depth - 1]), len(order))
                if index == len(loops):
                    loops.append(Loop())
                work = loops[index].masked if conditional else loops[index].tile
                _add(work, op, _times(op, depth, unrolled) * scale)
            elif len(outer) == depth - 1 and not conditional:
                _add(task, op, _times(op, depth - 1, {}) * scale)
    first = next((product for loop in loops for product in loop.tile.products), None)
    workspace = re.search(r"infer_workspace_shape_function\(\)[^\n]*\n\s*%\w+ = arith\.constant (\d+)", hivm)
    return Module(
        memory=peak_memory(hivm),
        bound=bound,
        pipelined=pipeline_depth(hivm),
        mixed=len(kernels) > 1,
        workspace=int(workspace[1]) if workspace else 0,
        loops=loops,
        task=task,
        score_elements=round(first.m * first.n * first.times) if first else 0,  # `times` > 1 if its rows are cut
    )
