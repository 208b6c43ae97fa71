"""Read the Ascend compiler's last intermediate form (`module.hivm.opt.mlir`): what each kind of core does, how often.

The form is text: one function for the cube core and one for the vector cores, whose loops hold calls of the compiler's
library (`mma_tile_*`, `nd2nz_*`, `v*_1d_float`, ...) on buffers with planned addresses. `read` turns that into

* the peak use of each on-chip memory, whether both vector cores share the work, the depth of the pipeline;
* for each loop over tiles of scores (or over k, in a matrix product) the `Work` of one tile, split into what always
  runs and what a run-time `if` (the mask) adds;
* the work around that loop, once for each task of the persistent grid.

Shapes are those of the buffers, so a partial last tile counts as a whole one. L0A and L0B do not appear: the library's
`mma_tile` streams its operands through them in pieces of its own choice. On the 950 loops are branches between blocks
and vector code is outlined into functions of register instructions; both are followed here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

ELEMENT_BITS = {"f32": 32, "f16": 16, "bf16": 16, "i64": 64, "i32": 32, "i16": 16, "i8": 8, "i1": 1}
MEMORY_NAMES = {"ub": "ub", "cbuf": "l1", "ca": "l0a", "cb": "l0b", "cc": "l0c"}

_CONSTANT = re.compile(r"(%[\w-]+) = (?:arith\.constant|llvm\.mlir\.constant\()\s*\(?(-?\d+) : (?:i\d+|index)")
_BUFFER = re.compile(
    r"pointer_cast\(([^)]*)\).*?memref<((?:\d+x)*)([a-z]\w*)(?:, strided<[^>]*>)?, #hivm\.address_space<(\w+)>"
)
_MEMREF = re.compile(r"memref<((?:[\d?]+x)*)(\w+)(?:, (?:strided<[^>]*>|#map\d*))?(?:, #hivm\.address_space<(\w+)>)?>")
_RESULT = re.compile(r"^\s*(%[\w-]+)(?::(\d+))? = (.*)$")
_METADATA = re.compile(r"\s*(%\w+), .* = memref\.extract_strided_metadata (%[\w#-]+) : (memref<[^>]*(?:>[^>]*)*>) -> ")
_SOURCE = re.compile(r"(?:memref\.\w+|arith\.select %[\w#-]+,) (%[\w#-]+)")
_CALL = re.compile(r"\bcall @(\w+)\(([^)]*)\)")
_FOR = re.compile(r"scf\.for (%\w+) = (%[\w-]+) to (%[\w#-]+) step (%[\w-]+)")
_ITER_ARGS = re.compile(r"iter_args\(([^)]*)\)")
_UNROLL = re.compile(r"multibuffer_unroll_factor = (\d+)")
_INTRINSIC = re.compile(r'"hivm_regbaseintrins\.intr\.hivm\.([\w.]+)"\(([^)]*)\).*? : \((.*)\) -> (.*)$')
_VECTOR = re.compile(r"vector<(\d+)x(\w+)>")
_BRANCH = re.compile(r"\^(bb\d+)(?:\(([^:)]*)(?: :[^)]*)?\))?")
_BOOKKEEPING = ("pge", "plt", "pset", "init.", "vlds", "vsts", "vldus", "vldas", "vstus", "vstas", "pstu", "movvp")


def peak_memory(hivm: str) -> dict[str, int]:
    """Peak bytes of each on-chip memory: the furthest end of a planned buffer."""
    constants: dict[str, int] = {}  # names are local to a function, and defined above their use
    peak: dict[str, int] = {}
    for line in hivm.splitlines():
        if constant := _CONSTANT.search(line):
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
    """Whether both vector cores of an AI core share the work."""
    return "to_be_bubbled_slice" in hivm


def pipeline_depth(hivm: str) -> int:
    """Buffers of the deepest cube-to-vector workspace; 0 when nothing is pipelined."""
    depths = [int(n) for n in re.findall(r"memref\.view [^\n]* to memref<(\d)x\d+x\d+x(?:f|bf)", hivm)]
    return max((n for n in depths if n > 1), default=0)


@dataclass(frozen=True)
class VectorCall:
    """One vector operation on `elements` of `bits` each, `times` over: a call of the library, which works through a
    whole buffer, or on the 950 one register instruction."""

    name: str
    elements: int
    bits: int
    times: float = 1.0
    library: bool = True


@dataclass(frozen=True)
class Product:
    """One matrix product [m, k] @ [k, n] of operands of `bits` each, `times` over."""

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
    """What one AI core (a cube core and its two vector cores) does. Bytes are counted where global memory sees them."""

    products: list[Product] = field(default_factory=list)
    vector: list[VectorCall] = field(default_factory=list)  # of one vector core
    loaded: float = 0.0  # bytes of tensors read from global memory, by either kind of core
    stored: float = 0.0  # bytes of results written to it
    workspace_read: float = 0.0  # bytes between cube and vector cores through global memory
    workspace_written: float = 0.0
    direct: float = 0.0  # bytes between cube and vector cores on the chip (950)
    cube_bytes: float = 0.0  # of the bytes above, what the cube core moves
    vector_bytes: float = 0.0  # and what the vector cores move
    scalar_accesses: float = 0.0  # single elements that the scalar unit reads or writes

    @property
    def flops(self) -> float:
        return sum(product.flops for product in self.products)

    @property
    def global_bytes(self) -> float:
        """All bytes that pass through global memory (or its cache)."""
        return self.loaded + self.stored + self.workspace_read + self.workspace_written

    @property
    def vector_elements(self) -> float:
        """Elements that one vector core's operations work on."""
        return sum(call.elements * call.times for call in self.vector)


@dataclass
class Loop:
    """A loop over tiles of scores: the work of one tile, and what a run-time `if` adds to it."""

    tile: Work = field(default_factory=Work)
    masked: Work = field(default_factory=Work)


@dataclass
class Module:
    """What `read` found."""

    memory: dict[str, int]
    bound: bool  # both vector cores share the work
    pipelined: int
    mixed: bool  # cube and vector cores
    workspace: int  # bytes of workspace for each program
    loops: list[Loop]
    task: Work  # around the loop, once for each task
    score_elements: int  # of the first product's result: the tile of scores in attention

    @property
    def vector_cores(self) -> int:
        """Vector cores of an AI core that work on a tile."""
        return 2 if self.bound else 1

    def passes(self, work: Work) -> float:
        """Elements that vector operations touch, for each score."""
        return work.vector_elements * self.vector_cores / self.score_elements if self.score_elements else 0.0


@dataclass(frozen=True)
class _Buffer:
    elements: int
    dtype: str
    space: str
    workspace: bool = False

    @property
    def bytes(self) -> float:
        return self.elements * ELEMENT_BITS.get(self.dtype, 0) / 8


@dataclass(eq=False)
class _Frame:
    """A loop or a condition around an operation. `trips` is None where it is known only at run time."""

    kind: str  # "loop", "if", "always" (an if that one of two vector cores enters), "never" (an unlikely if)
    trips: int | None = None
    unroll: int = 0  # steps of a pipeline: a loop over the tiles whose workspace is in flight together


@dataclass(frozen=True)
class _Op:
    kind: str
    name: str
    frames: tuple[_Frame, ...]
    buffers: tuple[_Buffer, ...] = ()
    times: float = 1.0
    elements: int = 0
    bits: int = 0


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += character in "<([{"
        depth -= character in ">)]}" and text[i - 1] != "-"
        if character == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()] if text.strip() else parts


def _functions(hivm: str) -> Iterator[tuple[str, list[str]]]:
    """(name, lines) of every function with a body."""
    lines: list[str] = []
    for line in hivm.splitlines():
        if line.startswith("  func.func ") and line.rstrip().endswith("{"):
            lines = [line]
        elif lines:
            lines.append(line)
            if line.rstrip() == "  }":
                name = re.search(r"@(\w+)", lines[0])
                assert name is not None
                yield name[1], lines
                lines = []


class _Reader:
    """One function: its operations in order, each with the loops and conditions around it."""

    def __init__(self, lines: list[str], vector_functions: dict[str, list[_Op]]) -> None:
        self.lines = lines
        self.vector_functions = vector_functions
        self.buffers: dict[str, _Buffer] = {}
        self.constants: dict[str, int] = {}
        self.sub_block: set[str] = set()  # values that tell the two vector cores apart
        self.ops: list[_Op] = []
        self.frames: list[_Frame] = []
        self.blocks = _block_frames(lines)
        for argument in _split(lines[0][lines[0].index("(") + 1 : lines[0].rindex(")")]):
            name, _, type_ = argument.partition(": ")
            self._define(name, type_, workspace="arg_type<workspace>" in type_)
        for number, line in enumerate(lines[1:], 1):
            self._line(number, line)

    def _define(self, name: str, type_: str, source: _Buffer | None = None, workspace: bool = False) -> None:
        found = _MEMREF.search(type_)
        if found is None:
            return
        sizes = [size for size in found[1].split("x") if size]
        if sizes and "?" not in sizes:
            elements = math.prod(int(size) for size in sizes)
        else:
            elements = source.elements if source else 0
        if not elements and (stride := re.search(r"strided<\[(\d+),", found[0])) and sizes[0] != "?":
            elements = int(sizes[0]) * int(stride[1])
        workspace |= source is not None and source.workspace
        self.buffers[name] = _Buffer(elements, found[2], found[3] or "", workspace)

    def _line(self, number: int, line: str) -> None:
        text = line.strip()
        if text.startswith("}"):
            self._close(text)
        if text.startswith("^") and "(" in text:
            for argument in _split(text[text.index("(") + 1 : text.rindex(")")]):
                name, _, type_ = argument.partition(": ")
                self._define(name, type_)
        if constant := _CONSTANT.search(line):
            self.constants[constant[1]] = int(constant[2])
        if metadata := _METADATA.match(line):
            self._define(metadata[1], metadata[3], self.buffers.get(metadata[2]))
        result = _RESULT.match(line)
        if result is not None:
            self._result(result[1], result[3])
        if text.endswith("{"):
            self._open(text, result)
            return
        frames = (*self.frames, *self.blocks.get(number, ()))
        if call := _CALL.search(text):
            self._call(call[1], call[2], frames)
        elif intrinsic := _INTRINSIC.search(text):
            self._instruction(intrinsic, frames)
        elif re.search(r"memref\.(load|store) ", text):
            self.ops.append(_Op("scalar", "memref", frames))

    def _result(self, name: str, operation: str) -> None:
        if "get_sub_block_idx" in operation or (
            operation.startswith("arith.")
            and any(value in self.sub_block for value in re.findall(r"%[\w#-]+", operation))
        ):
            self.sub_block.add(name)
        types = _MEMREF.findall(operation)
        if not types or operation.startswith("scf."):
            return
        source = _SOURCE.search(operation)
        last = list(_MEMREF.finditer(operation))[-1]
        self._define(name, last[0], self.buffers.get(source[1]) if source else None)

    def _open(self, text: str, result: re.Match[str] | None) -> None:
        """A region begins: remember what it is, and what the names it defines stand for."""
        types = _split(text[text.rindex("-> (") + 4 : text.rindex(")")]) if "-> (" in text else []
        names = [pair.split(" = ")[0] for pair in _split(found[1])] if (found := _ITER_ARGS.search(text)) else []
        for i, type_ in enumerate(types):
            if i < len(names):
                self._define(names[i], type_)
            if result is not None:
                self._define(f"{result[1]}#{i}" if result[2] else result[1], type_)
        if loop := _FOR.search(text):
            bounds = [self.constants.get(name) for name in loop.groups()[1:]]
            trips = None
            if None not in bounds:
                low, high, step = (int(bound or 0) for bound in bounds)
                trips = max(0, -(-(high - low) // step))
            self.frames.append(_Frame("loop", trips))
        elif "scf.while" in text or text.startswith("} do"):
            self.frames.append(_Frame("loop"))
        elif "scf.if" in text:
            condition = re.search(r"scf\.if (%[\w#-]+)", text)
            alone = condition is not None and condition[1] in self.sub_block
            self.frames.append(_Frame("always" if alone else "if"))
        else:  # the other branch
            self.frames.append(_Frame("if"))

    def _close(self, text: str) -> None:
        if not self.frames:
            return
        frame = self.frames.pop()
        if unroll := _UNROLL.search(text):
            frame.unroll = int(unroll[1])
        if "unlikely_condition" in text:
            frame.kind = "never"
        if "limit_sub_block_id0" in text:
            frame.kind = "always"

    def _call(self, name: str, arguments: str, frames: tuple[_Frame, ...]) -> None:
        for op in self.vector_functions.get(name, ()):
            self.ops.append(replace(op, frames=(*frames, *op.frames)))
        if name in self.vector_functions:
            return
        buffers = tuple(self.buffers[a] for a in _split(arguments) if a in self.buffers)
        spaces = {buffer.space for buffer in buffers}
        if name.startswith("mma_"):
            kind = "cube"
        elif "gm" in spaces:
            kind = "move"
        elif spaces & {"cbuf", "cc"}:
            kind = "fill" if len(spaces) == 1 else "direct"
        elif spaces == {"ub"}:
            kind = "vector"
        else:
            return
        self.ops.append(_Op(kind, name, frames, buffers))

    def _instruction(self, found: re.Match[str], frames: tuple[_Frame, ...]) -> None:
        """A register instruction of the 950; loads, stores and masks go with those that compute."""
        name, types = found[1], f"{found[3]} {found[4]}"
        vectors = [(int(n), dtype) for n, dtype in _VECTOR.findall(types) if dtype not in ("i1", "i8")]
        if vectors and not name.startswith(_BOOKKEEPING):
            elements, dtype = vectors[0]
            self.ops.append(_Op("vector", name, frames, elements=elements, bits=ELEMENT_BITS[dtype]))


def _block_frames(lines: list[str]) -> dict[int, tuple[_Frame, ...]]:
    """Loops and conditions of a function whose control flow is branches between blocks: frames by line number.

    Blocks are in the order of the source, so a branch to an earlier block ends a loop, and what lies between the two
    targets of a forward branch is conditional.
    """
    starts = {"bb0": 0}
    starts |= {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"\s*\^(bb\d+)", line))}
    if len(starts) == 1:
        return {}
    constants = {m[1]: int(m[2]) for line in lines if (m := _CONSTANT.search(line))}
    defined = {m[1]: m[3] for line in lines if (m := _RESULT.match(line))}
    alone: set[str] = set()
    for name, operation in defined.items():
        if _tells_cores_apart(operation, alone):
            alone.add(name)
    spans: list[tuple[int, int, _Frame]] = []
    headers = set()
    for i, line in enumerate(lines):
        if "cf.br" in line and (m := _BRANCH.search(line)) and starts[m[1]] <= i:
            headers.add(m[1])
            spans.append((starts[m[1]], i, _Frame("loop", _trips(lines, m[1], m[2] or "", i, defined, constants))))
    block = "bb0"
    for line in lines:
        block = m[1] if (m := re.match(r"\s*\^(bb\d+)", line)) else block
        if "cf.cond_br" in line and block not in headers:
            condition = re.search(r"cf\.cond_br (%[\w#-]+)", line)
            targets = sorted(starts[m[1]] for m in _BRANCH.finditer(line))
            kind = "always" if condition is not None and condition[1] in alone else "if"
            spans.append((targets[0], targets[-1] - 1, _Frame(kind)))
    spans.sort(key=lambda span: (span[0], -span[1]))
    return {i: tuple(frame for low, high, frame in spans if low <= i <= high) for i in range(len(lines))}


def _tells_cores_apart(operation: str, known: set[str]) -> bool:
    """Whether a value is the number of the vector core, or computed from one of the `known` values that are."""
    if "get_sub_block_idx" in operation:
        return True
    return operation.startswith(("arith.", "llvm.")) and any(
        name in known for name in re.findall(r"%[\w#-]+", operation)
    )


def _trips(
    lines: list[str], header: str, back: str, back_line: int, defined: dict[str, str], constants: dict[str, int]
) -> int | None:
    """Iterations of the loop of blocks that begins at `header`, where bounds and step are constants."""
    number, first = next((i, line) for i, line in enumerate(lines) if re.match(rf"\s*\^{header}\b", line))
    declared = _split(first[first.index("(") + 1 : first.rindex(")")]) if "(" in first else []
    arguments = [argument.partition(":")[0].strip() for argument in declared]
    test = next((line for line in lines[number:back_line] if "cf.cond_br" in line), "")
    condition = re.search(r"cf\.cond_br (%[\w#-]+)", test)
    compared = re.search(r"[su]lt\"?,? (%[\w-]+), (%[\w-]+)", defined.get(condition[1], "")) if condition else None
    entry = next((m for line in lines[:number] if (m := re.search(rf"\^{header}\(([^:)]*)", line))), None)
    if compared is None or entry is None or compared[1] not in arguments:
        return None
    index = arguments.index(compared[1])
    start = constants.get(_split(entry[1])[index])
    limit = constants.get(compared[2])
    added = re.findall(r"%[\w-]+", defined.get(_split(back)[index], ""))
    step = next((constants[name] for name in added if name in constants), None)
    if start is None or limit is None or not step:
        return None
    return max(0, -(-(limit - start) // step))


def _is_dynamic(frame: _Frame) -> bool:
    return frame.kind == "loop" and frame.trips is None and not frame.unroll


def _dynamic(op: _Op) -> list[_Frame]:
    return [frame for frame in op.frames if _is_dynamic(frame)]


def _add(work: Work, op: _Op, times: float) -> None:
    """Add `op`, which runs `times` over, to `work`."""
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
            work.vector.append(VectorCall(op.name, elements, op.bits or max(widest, default=0), times, not op.bits))
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


def _times(op: _Op, depth: int, unrolled: dict[int, int]) -> float:
    """How often `op` runs for each iteration of its `depth`-th run-time loop.

    The steps of a pipeline inside that loop are its iterations; one that has no such loop around it, because that ran
    once and was folded away, counts all its steps.
    """
    times, level, stepped = op.times, 0, False
    walked: _Frame | None = None
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
    """What the module says. Raises ValueError when it holds no function of a kernel, or one that cannot be followed."""
    vector_functions: dict[str, list[_Op]] = {}
    kernels: list[list[_Op]] = []  # the cube core's function comes first
    for name, lines in _functions(hivm):
        if "hacc.function_kind = #hacc.function_kind<HOST>" in lines[0]:
            continue
        ops = _Reader(lines, vector_functions).ops
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
        score_elements=first.m * first.n if first else 0,
    )
