"""Operations of a function in the Ascend compiler's last intermediate form, with the loops and conditions around them.

The reader does not fully parse the text. It tracks the buffers of names (through casts, views and selections),
constants, and the nesting of regions (`scf.for`, `scf.if`). On the 950 control flow is branches between blocks: a
branch back is a loop, a branch forward a condition. hivm.py adds the operations up to work.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

ELEMENT_BITS = {"f32": 32, "f16": 16, "bf16": 16, "i64": 64, "i32": 32, "i16": 16, "i8": 8, "i1": 1}

CONSTANT = re.compile(r"(%[\w-]+) = (?:arith\.constant|llvm\.mlir\.constant\()\s*\(?(-?\d+) : (?:i\d+|index)")
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


@dataclass(frozen=True)
class Buffer:
    """The buffer of a name: largest number of elements, element type, memory ("ub", "cbuf", "cc", "gm").

    `workspace`: whether it is in the workspace that cube and vector cores share."""

    elements: int
    dtype: str
    space: str
    workspace: bool = False

    @property
    def bytes(self) -> float:
        return self.elements * ELEMENT_BITS.get(self.dtype, 0) / 8


@dataclass(eq=False)
class Frame:
    """A loop or a condition around an operation. `trips`: iterations, None if known only at run time."""

    kind: str  # "loop", "if", "always" (an if for one of two vector cores), "never" (an unlikely if)
    trips: int | None = None
    unroll: int = 0  # steps of a pipeline: a loop over the tiles whose workspace is in flight together


@dataclass(frozen=True)
class Op:
    """An operation. A register instruction has `elements` of `bits` each instead of buffers.

    `kind`: "cube", "vector", "move" (to or from global memory), "direct" (between on-chip memories), "fill" (of L1),
    "scalar"."""

    kind: str
    name: str
    frames: tuple[Frame, ...]
    buffers: tuple[Buffer, ...] = ()
    times: float = 1.0
    elements: int = 0
    bits: int = 0


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    pieces, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += character in "<([{"
        depth -= character in ">)]}" and text[i - 1] != "-"
        if character == "," and depth == 0:
            pieces.append(text[start:i].strip())
            start = i + 1
    return [*pieces, text[start:].strip()] if text.strip() else pieces


def functions(hivm: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, lines) of every function with a body."""
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


class Reader:
    """Reader of one function. `ops`: its operations in order, each with the loops and conditions around it."""

    def __init__(self, lines: list[str], vector_functions: dict[str, list[Op]]) -> None:
        self.lines = lines
        self.vector_functions = vector_functions
        self.buffers: dict[str, Buffer] = {}
        self.constants: dict[str, int] = {}
        self.sub_block: set[str] = set()  # values that tell the two vector cores apart
        self.ops: list[Op] = []
        self.frames: list[Frame] = []
        self.blocks = _block_frames(lines)
        for argument in _split(lines[0][lines[0].index("(") + 1 : lines[0].rindex(")")]):
            name, _, type_ = argument.partition(": ")
            self._define(name, type_, workspace="arg_type<workspace>" in type_)
        for number, line in enumerate(lines[1:], 1):
            self._line(number, line)

    def _define(self, name: str, type_: str, source: Buffer | None = None, workspace: bool = False) -> None:
        match = _MEMREF.search(type_)
        if match is None:
            return
        sizes = [size for size in match[1].split("x") if size]
        if sizes and "?" not in sizes:
            elements = math.prod(int(size) for size in sizes)
        else:
            elements = source.elements if source else 0
        if not elements and (stride := re.search(r"strided<\[(\d+),", match[0])) and sizes[0] != "?":
            elements = int(sizes[0]) * int(stride[1])
        workspace |= source is not None and source.workspace
        self.buffers[name] = Buffer(elements, match[2], match[3] or "", workspace)

    def _line(self, number: int, line: str) -> None:
        text = line.strip()
        if text.startswith("}"):
            self._close(text)
        if text.startswith("^") and "(" in text:
            for argument in _split(text[text.index("(") + 1 : text.rindex(")")]):
                name, _, type_ = argument.partition(": ")
                self._define(name, type_)
        if constant := CONSTANT.search(line):
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
            self.ops.append(Op("scalar", "memref", frames))

    def _result(self, name: str, operation: str) -> None:
        if _depends_on_core(operation, self.sub_block):
            self.sub_block.add(name)
        types = _MEMREF.findall(operation)
        if not types or operation.startswith("scf."):
            return
        source = _SOURCE.search(operation)
        last = list(_MEMREF.finditer(operation))[-1]
        self._define(name, last[0], self.buffers.get(source[1]) if source else None)

    def _open(self, text: str, result: re.Match[str] | None) -> None:
        """Enter a region: push its frame, and define the buffers that it names."""
        types = _split(text[text.rindex("-> (") + 4 : text.rindex(")")]) if "-> (" in text else []
        names = [pair.split(" = ")[0] for pair in _split(match[1])] if (match := _ITER_ARGS.search(text)) else []
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
            self.frames.append(Frame("loop", trips))
        elif "scf.while" in text or text.startswith("} do"):
            self.frames.append(Frame("loop"))
        elif "scf.if" in text:
            condition = re.search(r"scf\.if (%[\w#-]+)", text)
            on_one_core = condition is not None and condition[1] in self.sub_block
            self.frames.append(Frame("always" if on_one_core else "if"))
        else:  # the other branch
            self.frames.append(Frame("if"))

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

    def _call(self, name: str, arguments: str, frames: tuple[Frame, ...]) -> None:
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
        self.ops.append(Op(kind, name, frames, buffers))

    def _instruction(self, match: re.Match[str], frames: tuple[Frame, ...]) -> None:
        """Add a register instruction of the 950. Loads, stores and masks do not count by themselves."""
        name, types = match[1], f"{match[3]} {match[4]}"
        vectors = [(int(n), dtype) for n, dtype in _VECTOR.findall(types) if dtype not in ("i1", "i8")]
        if vectors and not name.startswith(_BOOKKEEPING):
            elements, dtype = vectors[0]
            self.ops.append(Op("vector", name, frames, elements=elements, bits=ELEMENT_BITS[dtype]))


def _block_frames(lines: list[str]) -> dict[int, tuple[Frame, ...]]:
    """Return the frames of each line, by number, for a function whose control flow is branches between blocks.

    Blocks are in source order. So a branch to an earlier block ends a loop, and lines between the two targets of a
    forward branch are conditional.
    """
    starts = {"bb0": 0}
    starts |= {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"\s*\^(bb\d+)", line))}
    if len(starts) == 1:
        return {}
    constants = {m[1]: int(m[2]) for line in lines if (m := CONSTANT.search(line))}
    defined = {m[1]: m[3] for line in lines if (m := _RESULT.match(line))}
    on_one_core: set[str] = set()
    for name, operation in defined.items():
        if _depends_on_core(operation, on_one_core):
            on_one_core.add(name)
    spans: list[tuple[int, int, Frame]] = []
    headers = set()
    for i, line in enumerate(lines):
        if "cf.br" in line and (m := _BRANCH.search(line)) and starts[m[1]] <= i:
            headers.add(m[1])
            spans.append((starts[m[1]], i, Frame("loop", _trips(lines, m[1], m[2] or "", i, defined, constants))))
    block = "bb0"
    for line in lines:
        block = m[1] if (m := re.match(r"\s*\^(bb\d+)", line)) else block
        if "cf.cond_br" in line and block not in headers:
            condition = re.search(r"cf\.cond_br (%[\w#-]+)", line)
            targets = sorted(starts[m[1]] for m in _BRANCH.finditer(line))
            kind = "always" if condition is not None and condition[1] in on_one_core else "if"
            spans.append((targets[0], targets[-1] - 1, Frame(kind)))
    spans.sort(key=lambda span: (span[0], -span[1]))
    return {i: tuple(frame for low, high, frame in spans if low <= i <= high) for i in range(len(lines))}


def _depends_on_core(operation: str, dependent: set[str]) -> bool:
    """Return whether a value is the vector core's number, or computed from one of the `dependent` values."""
    if "get_sub_block_idx" in operation:
        return True
    return operation.startswith(("arith.", "llvm.")) and any(
        name in dependent for name in re.findall(r"%[\w#-]+", operation)
    )


def _trips(
    lines: list[str], header: str, back: str, last_line: int, defined: dict[str, str], constants: dict[str, int]
) -> int | None:
    """Return the iterations of the loop that begins at block `header`, or None if bounds or step are not constant."""
    number, first = next((i, line) for i, line in enumerate(lines) if re.match(rf"\s*\^{header}\b", line))
    declared = _split(first[first.index("(") + 1 : first.rindex(")")]) if "(" in first else []
    arguments = [argument.partition(":")[0].strip() for argument in declared]
    test = next((line for line in lines[number:last_line] if "cf.cond_br" in line), "")
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
