"""An interpreter of the compiled programs of one block: a cube core and two vector cores, or a single core.

Each core runs its program in the order in which its scalar unit issues instructions, until it waits for another core.
That is one schedule of the hardware. `order` checks that all others compute the same result.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Generator
from itertools import combinations, pairwise
from typing import Any

import numpy as np
from simulators.hivm import cube, library
from simulators.hivm.ir import DYNAMIC, Block, Operation, affine, groups, integers, memref, name_in
from simulators.hivm.memory import ON_CHIP_GRANULE, Memory, Ref, contiguous
from simulators.hivm.order import Blocks, Order

MEMORIES = {"ub": 192 << 10, "cbuf": 512 << 10, "cc": 128 << 10}  # bytes of a 910B's on-chip memories
MOST_SET = 15  # a flag between cores has a counter of four bits
_PRODUCT = re.compile(r"^mma_tile_(?:(?:half|bfloat16_t|float)_to_float|int8_t_to_int32_t)(_ta)?(_tb)?$")

_INTEGER = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "index": 64}


class Deadlock(Exception):
    """Every core waits for another."""


class FlagError(Exception):
    """A flag that is set twice, waited for although nothing sets it, or left over."""


def wrap(value: int, kind: str) -> int:
    """Return `value` as a signed integer of type `kind` (i1: 0 or 1)."""
    bits = _INTEGER[kind]
    value &= (1 << bits) - 1
    return value - (1 << bits) if bits > 1 and value >> (bits - 1) else value


def _unsigned(value: int, kind: str) -> int:
    return value & ((1 << _INTEGER[kind]) - 1)


def _divide(a: int, b: int) -> int:
    """Return a / b, rounded toward zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_ARITHMETIC: dict[str, Any] = {
    "arith.addi": lambda a, b: a + b,
    "arith.subi": lambda a, b: a - b,
    "arith.muli": lambda a, b: a * b,
    "arith.divsi": _divide,
    "arith.remsi": lambda a, b: a - b * _divide(a, b),
    "arith.floordivsi": lambda a, b: a // b,
    "arith.ceildivsi": lambda a, b: -(-a // b),
    "arith.minsi": min,
    "arith.maxsi": max,
    "arith.andi": lambda a, b: a & b,
    "arith.ori": lambda a, b: a | b,
    "arith.xori": lambda a, b: a ^ b,
    "arith.shli": lambda a, b: a << b,
    "arith.shrsi": lambda a, b: a >> b,
}
_FLOAT: dict[str, Any] = {
    "arith.addf": np.add, "arith.subf": np.subtract, "arith.mulf": np.multiply, "arith.divf": np.divide,
    "arith.maximumf": np.maximum, "arith.minimumf": np.minimum, "arith.maxnumf": np.fmax, "arith.minnumf": np.fmin,
    "arith.negf": np.negative,
}  # fmt: skip
_FLOATS = {"f32": np.float32, "f16": np.float16, "bf16": np.float32}  # arithmetic on bf16 is in float32
_SIGNED = (
    lambda a, b: a == b, lambda a, b: a != b, lambda a, b: a < b, lambda a, b: a <= b, lambda a, b: a > b,
    lambda a, b: a >= b,
)  # fmt: skip
_ORDERED = {1: "eq", 2: "gt", 3: "ge", 4: "lt", 5: "le", 6: "ne", 13: "ne"}


def _constant(text: str) -> Any:
    if text in ("true", "false"):
        return int(text == "true")
    value, _, kind = text.rpartition(" : ")
    if kind in _FLOATS:
        if not value.startswith("0x"):
            return _FLOATS[kind](float(value))
        bits = int(value, 16)
        if kind == "f16":
            return np.uint16(bits).view(np.float16)
        return np.uint32(bits << 16 if kind == "bf16" else bits).view(np.float32)
    return wrap(int(value), kind)


class Cluster:
    """The cores of one block, their flags, and the block's number in the grid."""

    def __init__(
        self, names: list[str], block: int, grid: int, blocks: Blocks | None = None, stale: float | None = None
    ) -> None:
        self.order = Order([f"block {block} {name}" for name in names], block, blocks or Blocks())
        self.block, self.grid = block, grid
        self.flags: dict[tuple[int, int], deque[np.ndarray]] = {}  # (flag, vector core, to the cube core?)
        self.instructions = 0
        self.stale = stale  # the accumulators' initial value; None: NaN

    def flag(self, number: int, vector: int, to_cube: bool) -> deque[np.ndarray]:
        return self.flags.setdefault((number, vector * 2 + to_cube), deque())


class Core:
    """One core: its memories and flags, and an interpreter of its program."""

    def __init__(self, cluster: Cluster, index: int, is_cube: bool, vector: int, name: str) -> None:
        self.cluster, self.index, self.is_cube, self.vector = cluster, index, is_cube, vector
        self.order = cluster.order
        self.memories = {
            space: Memory(f"{name} {space.upper()}", size, ON_CHIP_GRANULE) for space, size in MEMORIES.items()
        }
        if cluster.stale is not None:
            self.memories["cc"].data.view(np.float32)[:] = cluster.stale
        self.events: dict[tuple[str, str, int], np.ndarray] = {}
        self.values: dict[str, Any] = {}

    # ---- control -----------------------------------------------------------------------------------------------

    def run(self, function: Operation, arguments: list[Any]) -> Generator[None, None, None]:
        """Run the program. Yield while it waits for another core."""
        (body,) = function.regions
        self.values = dict(zip(body.arguments, arguments, strict=True))
        yield from self._block(body)
        if self.events:
            raise FlagError(f"set and never waited for: {sorted(self.events)}")

    def _block(self, block: Block) -> Generator[None, None, list[Any]]:
        values = self.values
        for operation in block.operations:
            name = operation.name
            if name in ("scf.yield", "scf.condition", "func.return"):
                return [values[x] for x in operation.operands]
            if name == "scf.for":
                results = yield from self._for(operation)
            elif name == "scf.while":
                results = yield from self._while(operation)
            elif name == "scf.if":
                results = yield from self._if(operation)
            elif name == "hivm.hir.sync_block_wait":
                results = yield from self._sync_block_wait(operation)
            else:
                try:
                    results = self._operation(operation, [values[x] for x in operation.operands])
                except (FlagError, NotImplementedError, KeyError, ValueError) as error:
                    raise type(error)(f"line {operation.line}: {name} {operation.attributes}: {error}") from error
            values.update(zip(operation.results, results, strict=True))
        return []

    def _for(self, operation: Operation) -> Generator[None, None, list[Any]]:
        low, high, step, *carried = (self.values[x] for x in operation.operands)
        (body,) = operation.regions
        for i in range(low, high, step):
            self.values.update(zip(body.arguments, [i, *carried], strict=True))
            carried = yield from self._block(body)
        return carried

    def _while(self, operation: Operation) -> Generator[None, None, list[Any]]:
        carried = [self.values[x] for x in operation.operands]
        before, after = operation.regions
        while True:
            self.values.update(zip(before.arguments, carried, strict=True))
            goes_on, *carried = yield from self._block(before)
            if not goes_on:
                return carried
            self.values.update(zip(after.arguments, carried, strict=True))
            carried = yield from self._block(after)

    def _if(self, operation: Operation) -> Generator[None, None, list[Any]]:
        chosen = operation.regions[0 if self.values[operation.operands[0]] else 1]
        return (yield from self._block(chosen))

    def _sync_block_wait(self, operation: Operation) -> Generator[None, None, list[Any]]:
        """Wait until the other side has set the flag. The cube core waits for both vector cores."""
        number = self._flag(operation)
        if name_in(operation.attributes["pipe"]) != "PIPE_S":
            raise NotImplementedError(f"line {operation.line}: a pipe waits for another core")
        vectors = range(2) if self.is_cube else [self.vector]
        for vector in vectors:
            queue = self.cluster.flag(number, vector, to_cube=self.is_cube)
            while not queue:
                yield
            self.order.receive(self.index, "PIPE_S", queue.popleft())
        return []

    def _flag(self, operation: Operation) -> int:
        static = operation.attributes.get("static_flag_id")
        return int(static.partition(" ")[0]) if static else self.values[operation.operands[0]]

    # ---- operations --------------------------------------------------------------------------------------------

    def _operation(self, operation: Operation, operands: list[Any]) -> list[Any]:
        name = operation.name
        if name in _ARITHMETIC:
            return [wrap(_ARITHMETIC[name](*operands), operation.result_types[0])]
        if name in _FLOAT:
            with np.errstate(all="ignore"):
                return [_FLOATS[operation.result_types[0]](_FLOAT[name](*operands))]
        method = getattr(self, "_" + name.replace(".", "_"), None)
        if method is None:
            raise NotImplementedError("no such operation here")
        result = method(operation, *operands)
        return [] if result is None else result if isinstance(result, list) else [result]

    def _arith_constant(self, operation: Operation) -> Any:
        if operation.cache is None:
            operation.cache = _constant(operation.attributes["value"])
        return operation.cache

    def _llvm_mlir_constant(self, operation: Operation) -> Any:
        return self._arith_constant(operation)

    def _cast(self, operation: Operation, value: int) -> int:
        return wrap(value, operation.result_types[0])

    _arith_extsi = _arith_trunci = _cast

    def _arith_index_cast(self, operation: Operation, value: int) -> int:
        if operation.operand_types[0] == "i1":
            value = -value  # sign-extended
        return wrap(value, operation.result_types[0])

    def _arith_extui(self, operation: Operation, value: int) -> int:
        return _unsigned(value, operation.operand_types[0])

    _arith_index_castui = _arith_extui

    def _arith_sitofp(self, operation: Operation, value: int) -> Any:
        return _FLOATS[operation.result_types[0]](value)

    def _arith_extf(self, operation: Operation, value: Any) -> Any:
        return _FLOATS[operation.result_types[0]](value)

    _arith_truncf = _arith_extf

    def _arith_cmpi(self, operation: Operation, a: int, b: int) -> int:
        predicate = int(operation.attributes["predicate"].partition(" ")[0])
        if predicate > 5:
            predicate -= 4
            a, b = (_unsigned(x, operation.operand_types[0]) for x in (a, b))
        return int(_SIGNED[predicate](a, b))

    def _arith_cmpf(self, operation: Operation, a: Any, b: Any) -> int:
        predicate = int(operation.attributes["predicate"].partition(" ")[0])
        return int(library.TABLE["vcmp_" + _ORDERED[predicate]].compute(a, b))

    def _arith_select(self, operation: Operation, condition: int, a: Any, b: Any) -> Any:
        return a if condition else b

    def _affine_apply(self, operation: Operation, *operands: int) -> int:
        return affine(operation.attributes["map"])(*operands)[0]

    def _affine_min(self, operation: Operation, *operands: int) -> int:
        return min(affine(operation.attributes["map"])(*operands))

    def _affine_max(self, operation: Operation, *operands: int) -> int:
        return max(affine(operation.attributes["map"])(*operands))

    # ---- references --------------------------------------------------------------------------------------------

    def _hivm_hir_pointer_cast(self, operation: Operation, address: int, *sizes: int) -> Ref:
        static, dtype, space = memref(operation.result_types[0])
        given = iter(sizes)
        shape = tuple(next(given) if size == DYNAMIC else size for size in static)
        return Ref(self.memories[space], dtype, address, 0, shape, contiguous(shape))

    def _memref_view(self, operation: Operation, source: Ref, shift: int, *sizes: int) -> Ref:
        static, dtype, _ = memref(operation.result_types[0])
        given = iter(sizes)
        shape = tuple(next(given) if size == DYNAMIC else size for size in static)
        return Ref(source.memory, dtype, source.base + source.offset + shift, 0, shape, contiguous(shape))

    def _layout(self, operation: Operation, operands: tuple[int, ...]) -> list[list[int]]:
        given = iter(operands)
        return [
            [next(given) if x == DYNAMIC else x for x in integers(operation.attributes[f"static_{what}"])]
            for what in ("offsets", "sizes", "strides")
        ]

    def _memref_reinterpret_cast(self, operation: Operation, source: Ref, *operands: int) -> Ref:
        (offset,), sizes, strides = self._layout(operation, operands)
        return source.with_layout(offset=offset, sizes=tuple(sizes), strides=tuple(strides))

    def _memref_subview(self, operation: Operation, source: Ref, *operands: int) -> Ref:
        offsets, sizes, strides = self._layout(operation, operands)
        offset = source.offset + sum(o * s for o, s in zip(offsets, source.strides, strict=True))
        strides = [a * b for a, b in zip(strides, source.strides, strict=True)]
        kept = memref(operation.result_types[0])[0]
        if len(kept) < len(sizes):  # dimensions of size 1 are dropped
            choices = [
                each
                for each in combinations(range(len(sizes)), len(kept))
                if all(size == 1 or i in each for i, size in enumerate(sizes))
                and all(wanted in (sizes[i], DYNAMIC) for i, wanted in zip(each, kept, strict=True))
            ]
            if not choices:
                raise NotImplementedError(f"dimensions {sizes} to {kept}")
            keep = choices[-1]
            sizes, strides = [sizes[i] for i in keep], [strides[i] for i in keep]
        return source.with_layout(offset=offset, sizes=tuple(sizes), strides=tuple(strides))

    def _memref_cast(self, operation: Operation, source: Ref) -> Ref:
        return source

    def _memref_extract_strided_metadata(self, operation: Operation, source: Ref) -> list[Any]:
        """Return the whole buffer, and the offset, sizes and strides of `source` in it."""
        return [source.with_layout(offset=0, sizes=(), strides=()), source.offset, *source.sizes, *source.strides]

    def _memref_collapse_shape(self, operation: Operation, source: Ref) -> Ref:
        sizes, strides = [], []
        for group in groups(operation.attributes["reassociation"]):
            wide = [i for i in group if source.sizes[i] != 1] or group[-1:]
            for i, j in pairwise(wide):
                if source.strides[i] != source.strides[j] * source.sizes[j]:
                    raise NotImplementedError(f"collapsing {source} strides {source.strides}")
            sizes.append(int(np.prod([source.sizes[i] for i in group])))
            strides.append(source.strides[wide[-1]])
        return source.with_layout(sizes=tuple(sizes), strides=tuple(strides))

    def _memref_expand_shape(self, operation: Operation, source: Ref, *operands: int) -> Ref:
        given = iter(operands)
        shape = [next(given) if x == DYNAMIC else x for x in integers(operation.attributes["static_output_shape"])]
        strides = [0] * len(shape)
        for group, stride in zip(groups(operation.attributes["reassociation"]), source.strides, strict=True):
            for i in reversed(group):
                strides[i] = stride
                stride *= shape[i]
        return source.with_layout(sizes=tuple(shape), strides=tuple(strides))

    def _element(self, source: Ref, indices: tuple[int, ...]) -> Ref:
        offset = source.offset + sum(i * s for i, s in zip(indices, source.strides, strict=True))
        return source.with_layout(offset=offset, sizes=(1,), strides=(1,))

    def _memref_load(self, operation: Operation, source: Ref, *indices: int) -> Any:
        element = self._element(source, indices)
        self.order.instruction(self.index, "PIPE_S", [element], [], operation.line, "load")
        self.order.done()
        value = element.read()[0]
        return value if element.dtype in _FLOATS else int(value)

    def _memref_store(self, operation: Operation, value: Any, target: Ref, *indices: int) -> None:
        element = self._element(target, indices)
        self.order.instruction(self.index, "PIPE_S", [], [element], operation.line, "store")
        element.write(np.asarray([value]))
        self.order.done()

    # ---- the core ----------------------------------------------------------------------------------------------

    def _hivm_hir_get_block_idx(self, operation: Operation) -> int:
        return self.cluster.block

    def _hivm_hir_get_block_num(self, operation: Operation) -> int:
        return self.cluster.grid

    def _hivm_hir_get_sub_block_idx(self, operation: Operation) -> int:
        return self.vector

    def _nothing(self, operation: Operation, *operands: Any) -> None:
        return None

    _hivm_hir_set_mask_norm = _hivm_hir_set_ffts_base_addr = _annotation_mark = _nothing

    def _hivm_hir_pipe_barrier(self, operation: Operation) -> None:
        self.order.barrier(self.index, name_in(operation.attributes["pipe"]))

    def _event(self, operation: Operation, operands: tuple[int, ...]) -> tuple[str, str, int]:
        static = operation.attributes.get("static_event_id")
        number = int(name_in(static).removeprefix("EVENT_ID")) if static else operands[0]
        return name_in(operation.attributes["set_pipe"]), name_in(operation.attributes["wait_pipe"]), number

    def _hivm_hir_set_flag(self, operation: Operation, *operands: int) -> None:
        self._set(*self._event(operation, operands))

    def _hivm_hir_wait_flag(self, operation: Operation, *operands: int) -> None:
        self._wait(*self._event(operation, operands))

    def _set(self, source: str, target: str, number: int) -> None:
        if (source, target, number) in self.events:
            raise FlagError(f"{source} sets event {number} for {target} a second time")
        self.events[source, target, number] = self.order.message(self.index, source)

    def _wait(self, source: str, target: str, number: int) -> None:
        message = self.events.pop((source, target, number), None)
        if message is None:
            raise FlagError(f"{target} waits for event {number} of {source}, which is not set")
        self.order.receive(self.index, target, message)

    def _hivm_hir_sync_block_set(self, operation: Operation, *operands: int) -> None:
        number = self._flag(operation)
        message = self.order.message(self.index, name_in(operation.attributes["tpipe"]))
        for vector in range(2) if self.is_cube else [self.vector]:
            queue = self.cluster.flag(number, vector, to_cube=not self.is_cube)
            queue.append(message)
            if len(queue) > MOST_SET:
                raise FlagError(f"flag {number} between cores is set {len(queue)} times before it is waited for")

    # ---- the library -------------------------------------------------------------------------------------------

    def _func_call(self, operation: Operation, *operands: Any) -> None:
        name = operation.attributes["callee"].removeprefix("@")
        self.cluster.instructions += 1
        if name.startswith("mma_tile_"):
            self._multiply(operation, name, *operands)
            return
        if operation.cache is None:
            prefix = next((prefix for prefix in cube.FUNCTIONS if name.startswith(prefix + "_")), None)
            operation.cache = cube.FUNCTIONS[prefix] if prefix else library.lookup(name)
        function, arguments = operation.cache, list(operands)
        reads, writes = function.accesses(arguments)
        atomic = function.compute is library.store and int(arguments[2]) == library.ATOMIC_ADD
        self.order.instruction(self.index, function.pipe, reads, writes, operation.line, name, atomic)
        function.run(arguments)
        self.order.done()

    def _multiply(
        self, operation: Operation, name: str, a: Ref, b: Ref, init: int, m: int, k: int, n: int, c: Ref,
        a_ready: int, b_ready: int, a_free: int, b_free: int, *rest: int,
    ) -> None:  # fmt: skip
        """Multiply. The function itself waits for its operands in L1 (flags `a_ready`, `b_ready`), and sets flags that
        they may be overwritten (`a_free`, `b_free`); -1 is none."""
        *_, unit_flag = rest
        if unit_flag:
            raise NotImplementedError("unit flags")
        kind = _PRODUCT.match(name)
        if kind is None:
            raise NotImplementedError(f"a product of the kind {name}")
        some = m > 0 and k > 0 and n > 0
        for ready, ref in ((a_ready, a), (b_ready, b)):
            if ready != -1:
                self._wait("PIPE_MTE2", "PIPE_MTE1", ready)
            if some:
                self.order.instruction(self.index, "PIPE_MTE1", [ref], [], operation.line, name)
        for free in (a_free, b_free):
            if free != -1:
                self._set("PIPE_MTE1", "PIPE_MTE2", free)
        if not some:
            return
        self.order.receive(self.index, "PIPE_M", self.order.message(self.index, "PIPE_MTE1"))
        self.order.instruction(self.index, "PIPE_M", [] if init else [c], [c], operation.line, name)
        cube.multiply(a, b, bool(kind[1]), bool(kind[2]), bool(init), k, n, c)
        self.order.done()
