"""The inline assembly of diyfa's kernels: named barriers, markers, tile counter, packed numbers, float functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime.interpreter import TensorHandle

from diyfa.backends.cuda.gluon.inline_ptx import PREFETCH_MARKER

from .atomics import OfFirstLane, add_scalar, wait_for_value
from .errors import BarrierMisuse, InvalidOperand, location
from .markers import MARKERS, leave_marker
from .numerics import flush, narrow
from .scheduler import current

_BARRIER = re.compile(r"bar(?:rier)?\.(sync|arrive)(?:\.aligned)?\s+(\d+)\s*,\s*(\d+)\s*;")
_NUMBERS = 16
# float32 functions of one argument: `name $0, $1;`. Those with `.ftz` in their names flush subnormal numbers.
FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"rcp.approx.ftz.f32": np.reciprocal}
_FUNCTION = re.compile(r"^\s*([\w.]+)\s+\$0\s*,\s*\$1\s*;\s*$")


def _named_barrier(action: str, number: int, count: int) -> None:
    task = current()
    reserved = task.program.reserved_barriers
    if not reserved <= number < _NUMBERS:
        raise BarrierMisuse(
            f"named barrier {number} at {location()}: of {_NUMBERS}, the compiler itself uses those below {reserved}"
        )
    if count % 32:
        raise BarrierMisuse(f"named barrier {number} at {location()} of {count} threads, which are no whole warps")
    barrier = task.program.named_barrier(number)
    task.program.scheduler.pause()
    (barrier.sync if action == "sync" else barrier.arrive)(count)


def _await_kernels_before() -> None:
    current().program.is_alone = True


def _await_stores() -> None:
    task = current()
    task.program.stores(task).wait_written()


# Texts that appear with `mov.b32 $0, 0;`, which gives inline assembly a result.
_RESULT = "mov.b32 $0, 0;"
_SAID: dict[str, Callable[[], None]] = {
    "griddepcontrol.wait;": _await_kernels_before,
    "cp.async.bulk.wait_group 0;": _await_stores,
    "bar.warp.sync 0xffffffff;": lambda: None,  # lanes of a warp run in step here
    PREFETCH_MARKER: lambda: None,
    **{text: partial(leave_marker, text) for text in MARKERS},
}


# The tile counter: the first lane adds 1 to the number at an address, and later broadcasts the old value to all lanes.
_DRAW = re.compile(
    r"\{ \.reg \.pred (\w+); \.reg \.b32 (\w+); mov\.u32 \2, %laneid; setp\.eq\.u32 \1, \2, 0; mov\.b32 \$0, 0; "
    r"@\1 atom\.global\.relaxed\.gpu\.add\.u32 \$0, \[\$1\], 1; \}"
)
_SHARE = re.compile(r"shfl\.sync\.idx\.b32 \$0, \$1, 0, 31, 0xffffffff;")


def _draw(pointer: TensorHandle) -> TensorHandle:
    task = current()
    if task.num_warps != 1:
        raise InvalidOperand(f"{task.name} draws a number at {location()} in each of its {task.num_warps} warps")
    return OfFirstLane(add_scalar(pointer, TensorHandle(np.array([1], np.int32), tl.int32), ir.MEM_SEMANTIC.RELAXED))


# Semaphores: a warp waits until a number has a value, and its first lane adds 1 to it.
_WAIT_FOR_VALUE = re.compile(
    r"\{ \.reg \.pred (\w+); \.reg \.b32 (\w+); (\w+): ld\.acquire\.gpu\.global\.b32 \2, \[\$1\]; "
    r"setp\.ne\.b32 \1, \2, \$2; @\1 bra \3; fence\.proxy\.async\.global; mov\.b32 \$0, 0; \}"
)
_COUNT = re.compile(
    r"\{ \.reg \.pred (\w+); \.reg \.b32 (\w+); bar\.warp\.sync 0xffffffff; mov\.u32 \2, %laneid; "
    r"setp\.eq\.u32 \1, \2, 0; @\1 red\.release\.gpu\.global\.add\.u32 \[\$1\], 1; mov\.b32 \$0, 0; \}"
)


def _count(pointer: TensorHandle) -> TensorHandle:
    task = current()
    if task.num_warps != 1:
        raise InvalidOperand(f"{task.name} counts itself at {location()} in each of its {task.num_warps} warps")
    return add_scalar(pointer, TensorHandle(np.array([1], np.int32), tl.int32), ir.MEM_SEMANTIC.RELEASE)


# The identity: it keeps the compiler from moving computations with the value ahead of it.
_ITSELF = re.compile(r"mov\.b(32|64) \$0, \$1;")


def _itself(value: TensorHandle, bits: int) -> TensorHandle:
    if value.dtype.primitive_bitwidth != bits:
        raise InvalidOperand(f"mov.b{bits} at {location()} of {value.dtype}")
    return value


_PAIR = re.compile(r"cvt\.rn\.(bf16|f16)x2\.f32 \$0, \$1, \$2;")
_HALVES = re.compile(r"mov\.b32 \{\$0, \$1\}, \$2;")


def _pair(dtype: tl.dtype, high: np.ndarray, low: np.ndarray) -> TensorHandle:
    high, low = (narrow(x, dtype).view(np.uint16).astype(np.uint32) for x in (high, low))
    return TensorHandle((high << 16 | low).view(np.int32), tl.int32)


def _halves(pairs: np.ndarray) -> list[TensorHandle]:
    bits = np.ascontiguousarray(pairs).view(np.uint32)
    return [TensorHandle(x.astype(np.uint16).view(np.int16), tl.int16) for x in (bits & 0xFFFF, bits >> 16)]


# Four weights of 8 bits in a register.
_FOUR = re.compile(
    r"\{ \.reg \.b16 low, high; cvt\.rn\.satfinite\.(e4m3|e5m2)x2\.f32 low, \$2, \$1; "
    r"cvt\.rn\.satfinite\.\1x2\.f32 high, \$4, \$3; mov\.b32 \$0, \{low, high\}; \}"
)


def _four(dtype: tl.dtype, values: list[np.ndarray]) -> TensorHandle:
    return TensorHandle(
        np.ascontiguousarray(np.stack([narrow(x, dtype) for x in values], -1)).view(np.int32)[..., 0], tl.int32
    )


# 1 if any row of the warp has a factor other than 1. Of 64 rows a warp has 16.
_ANY_IN_WARP = re.compile(
    r"\{ \.reg \.pred p, q; setp\.neu\.f32 p, \$2, 0f3F800000; setp\.neu\.f32 q, \$3, 0f3F800000; or\.pred p, p, q; "
    r"vote\.sync\.any\.pred p, p, 0xffffffff; selp\.b32 \$0, 1, 0, p; mov\.b32 \$1, \$0; \}"
)
_UNLESS_ZERO = re.compile(
    r"\{ \.reg \.pred p; setp\.eq\.s32 p, \$\d+, 0; @p bra\.uni on; (mul\.f32 \$\d+, \$\d+, \$\d+; )+on: \}"
)


def _any_in_warp(factors: np.ndarray) -> TensorHandle:
    per_warp_arrive = (factors.reshape(-1, 16) != 1).any(axis=1)
    return TensorHandle(np.repeat(per_warp_arrive, 16).astype(np.int32), tl.int32)


def _unless_zero(x: np.ndarray, factor: np.ndarray, changed: np.ndarray) -> TensorHandle:
    with np.errstate(all="ignore"):
        return TensorHandle(np.where(changed == 0, x, x * factor).astype(np.float32), tl.float32)


# A score, or -inf if a word lacks its bit.
_KEPT = re.compile(
    r"\{ \.reg \.pred p; \.reg \.b32 b; and\.b32 b, \$2, \$3; setp\.ne\.s32 p, b, 0; "
    r"selp\.f32 \$0, \$1, 0fFF800000, p; \}"
)


def _kept(scores: np.ndarray, words: np.ndarray, bits: np.ndarray) -> TensorHandle:
    return TensorHandle(np.where(words & bits, scores, -np.inf).astype(np.float32), tl.float32)


# Adds four numbers to consecutive addresses of global memory.
_ADD_FOUR = re.compile(r"mov\.b32 \$0, 0; red\.relaxed\.gpu\.global\.add\.v4\.f32 \[\$1\], \{\$2, \$3, \$4, \$5\};")


def _add_four(addresses: np.ndarray, values: list[np.ndarray]) -> TensorHandle:
    if (addresses % 16).any():
        raise InvalidOperand(f"red.v4.f32 at {location()}: an address is not a multiple of 16")
    task = current()
    program = task.program
    program.touch_global("atomic addition")
    writer, known = program.writer_of(task), task.clock.known
    program.memory.written[writer] = task, task.step()
    for i, value in enumerate(values):
        places = addresses.astype(np.uint64) + np.uint64(4 * i)
        value = np.broadcast_to(value, places.shape)
        program.memory.reduce(places, np.ones(places.shape, bool), value, np.add, writer, known, location())
    return TensorHandle(np.zeros(addresses.shape, np.int32), tl.int32)


def run(asm: str, values: list[Any], dtype: tl.dtype) -> TensorHandle | list[TensorHandle]:
    """Return the result, or the results, of one inline assembly on the handles `values`."""
    barriers = _BARRIER.findall(asm)
    if barriers:
        for action, number, count in barriers:
            _named_barrier(action, int(number), int(count))
        return TensorHandle(np.zeros(1, np.int32), tl.int32)
    if said := _SAID.get(asm.replace(_RESULT, "").strip()):
        said()
        return TensorHandle(np.zeros(1, np.int32), tl.int32)
    if _DRAW.fullmatch(asm):
        return _draw(values[0])
    if _SHARE.fullmatch(asm):
        return values[0].value if isinstance(values[0], OfFirstLane) else values[0]
    if _WAIT_FOR_VALUE.fullmatch(asm):
        wait_for_value(*values)
        return TensorHandle(np.zeros(1, np.int32), tl.int32)
    if _COUNT.fullmatch(asm):
        return _count(values[0])
    if found := _ITSELF.fullmatch(asm):
        return _itself(values[0], int(found[1]))
    if found := _PAIR.fullmatch(asm):
        return _pair(tl.bfloat16 if found[1] == "bf16" else tl.float16, values[0].data, values[1].data)
    if found := _FOUR.fullmatch(asm):
        return _four(tl.float8e4nv if found[1] == "e4m3" else tl.float8e5, [x.data for x in values])
    if _ADD_FOUR.fullmatch(asm):
        return _add_four(values[0].data, [x.data for x in values[1:]])
    if _HALVES.fullmatch(asm):
        return _halves(values[0].data)
    if _ANY_IN_WARP.fullmatch(asm):
        return _any_in_warp(values[0].data)
    if _KEPT.fullmatch(asm):
        return _kept(*(value.data for value in values))
    if _UNLESS_ZERO.fullmatch(asm):
        return _unless_zero(*(value.data for value in values))
    found = _FUNCTION.match(asm)
    if found and found[1] in FUNCTIONS and dtype == tl.float32:
        change = flush if ".ftz" in found[1] else np.asarray
        with np.errstate(all="ignore"):
            return TensorHandle(change(FUNCTIONS[found[1]](change(values[0].data)).astype(np.float32)), dtype)
    raise NotImplementedError(f"inline assembly at {location()} that the interpreter does not know: {asm!r}")
