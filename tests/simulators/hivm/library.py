"""Vector and copy functions of the compiler's library: {name: pipe, roles of the arguments, computation}.

Roles: r read, w written, t scratch memory (poisoned, so that a scratch buffer over live data shows), s scalar. A
function that is not in the table is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from simulators.hivm.memory import BITS, POISON, Ref

BLOCK = 32  # bytes; the unit of copies on chip


@dataclass(frozen=True)
class Function:
    """A library function. `compute` gets the read arguments and scalars, in order, and returns the written values. With
    `whole` it gets all arguments and writes by itself."""

    pipe: str
    roles: str
    compute: Callable[..., Any]
    whole: bool = False

    def accesses(self, arguments: list[Any]) -> tuple[list[Ref], list[Ref]]:
        if len(arguments) != len(self.roles):
            raise NotImplementedError(f"{len(arguments)} arguments instead of {len(self.roles)}")
        refs = [(role, x) for role, x in zip(self.roles, arguments, strict=True) if isinstance(x, Ref) and x.count > 0]
        return [x for role, x in refs if role == "r"], [x for role, x in refs if role in "wt"]

    def run(self, arguments: list[Any]) -> None:
        if self.whole:
            self.compute(*arguments)
            return
        inputs, targets = [], []
        for role, x in zip(self.roles, arguments, strict=True):
            if role == "r":
                inputs.append(x.read())
            elif role == "s":
                inputs.append(x)
            elif role == "w":
                targets.append(x)
        for role, x in zip(self.roles, arguments, strict=True):
            if role == "t" and x.count > 0:
                poison(x)
        (target,) = targets
        kind = next((x.dtype for x in inputs if isinstance(x, np.ndarray) and x.dtype != bool), None)
        if kind is not None:
            inputs = [x if isinstance(x, np.ndarray) else kind.type(x) for x in inputs]
        with np.errstate(all="ignore"):
            target.write(self.compute(*inputs))


def poison(x: Ref) -> None:
    """Fill the bytes of a dense buffer with NaN."""
    start = x.base + x.offset * BITS[x.dtype] // 8
    x.memory.data[start : start + (x.count * BITS[x.dtype] + 7) // 8] = POISON


def _reduce(combine: Any, axis: int) -> Callable[..., Any]:
    def compute(x: np.ndarray, start: Any) -> Any:
        return combine.reduce(x, axis=axis, keepdims=True)

    return compute


_ROUND = {0: np.rint, 1: lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x), 2: np.floor, 3: np.ceil, 4: np.trunc}


def _to_integer(x: np.ndarray, mode: Any) -> Any:
    return _ROUND[int(mode)](x.astype(np.float64))


def _to_narrower(x: np.ndarray, mode: Any) -> Any:
    """Return fp32 values unchanged: the write rounds them to the nearest."""
    if int(mode) != 0:
        raise NotImplementedError(f"a conversion that rounds in mode {mode}")
    return x


def _load(source: Ref, target: Ref, pad_mode: Any, pad: Any, left: Any) -> None:
    """Copy global memory to UB. The hardware fills the rest of each row's first and last 32 bytes with the padding.

    `left`: elements of the first 32 bytes before the target.
    """
    if int(pad_mode) not in (0, 2):
        raise NotImplementedError(f"padding mode {pad_mode}")
    if source.count <= 0:
        return
    target.write(source.read())
    size, per_block = target.sizes[-1], BLOCK * 8 // BITS[target.dtype]
    if (target.base * 8 // BITS[target.dtype] + target.offset - int(left)) % per_block and left:
        raise NotImplementedError(f"a padding of {left} elements that does not begin with 32 bytes")
    for offset, count in ((-int(left), int(left)), (size, -(int(left) + size) % per_block)):
        if target.strides[-1] == 1 and count:
            beyond = target.with_layout(offset=target.offset + offset, sizes=(*target.sizes[:-1], count))
            beyond.write(np.asarray(0 if int(pad_mode) == 0 else pad, target.read().dtype))


def _copy(source: Ref, target: Ref, pad_mode: Any, pad: Any) -> None:
    """Copy inside UB, in whole blocks of 32 bytes. Data after the last element in its block are lost."""
    if source.count <= 0:
        return
    values = source.read()
    size, per_block = target.sizes[-1], BLOCK * 8 // BITS[target.dtype]
    if target.strides[-1] == 1 and size % per_block:
        rest = target.with_layout(offset=target.offset + size, sizes=(*target.sizes[:-1], per_block - size % per_block))
        rest.view()[...] = -1 if rest.dtype.startswith(("i", "b")) else np.nan
    target.write(values)


ATOMIC_ADD = 1


def store(source: Ref, target: Ref, atomic: Any) -> None:
    """Copy UB to global memory, exactly the elements."""
    if source.count <= 0:
        return
    if int(atomic) == ATOMIC_ADD:
        target.write(target.read() + source.read())
    elif int(atomic) == 0:
        target.write(source.read())
    else:
        raise NotImplementedError(f"atomic operation {atomic}")


def _arange(target: Ref, start: Any, *steps: Any) -> None:
    values = np.full(target.sizes, start, np.int64)
    for axis, step in enumerate(steps):
        shape = [1] * len(target.sizes)
        shape[axis] = -1
        values += (np.arange(target.sizes[axis]) * step).reshape(shape)
    target.write(values.astype(np.int32) if target.dtype.startswith("i") else values)


def _fill(value: Any, target: Ref) -> None:
    if target.count > 0:
        target.write(np.asarray(value))


def _same(x: Any, *_: Any) -> Any:
    return x


_V = "PIPE_V"
_BINARY: dict[str, Any] = {
    "vadd": np.add, "vsub": np.subtract, "vmul": np.multiply, "vdiv": np.divide, "vmax": np.maximum,
    "vmin": np.minimum, "vand": np.bitwise_and, "vor": np.bitwise_or,
}  # fmt: skip
_COMPARE: dict[str, Any] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_UNARY: dict[str, Any] = {
    "vexp": np.exp, "vln": np.log, "vabs": np.abs, "vsqrt": np.sqrt, "vnot": np.invert,
    "vrec": lambda x: np.divide(x.dtype.type(1), x), "vrsqrt": lambda x: np.divide(x.dtype.type(1), np.sqrt(x)),
}  # fmt: skip

TABLE: dict[str, Function] = {
    **{name: Function(_V, "rrwt", compute) for name, compute in _BINARY.items()},
    **{f"{name}s_vs": Function(_V, "rswt", compute) for name, compute in _BINARY.items()},
    **{f"{name}s_sv": Function(_V, "srwt", compute) for name, compute in _BINARY.items()},
    "vdiv_vs": Function(_V, "rswt", np.divide),
    **{f"vcmp_{name}": Function(_V, "rrw", compute) for name, compute in _COMPARE.items()},
    **{f"vcmps_{name}": Function(_V, "rsw", compute) for name, compute in _COMPARE.items()},
    **{name: Function(_V, "rwt", compute) for name, compute in _UNARY.items()},
    "vshrs_vs": Function(_V, "rsw", np.right_shift),
    "vshls_vs": Function(_V, "rsw", np.left_shift),
    "vsel_vv": Function(_V, "rrrwt", np.where),
    "vsel_vs": Function(_V, "rrswt", np.where),
    "vsel_sv": Function(_V, "rsrwt", np.where),
    "vsel_ss": Function(_V, "rsswt", np.where),
    "vcast_bool_to_half": Function(_V, "rwts", _same),
    "vcast_half_to_float": Function(_V, "rws", _same),
    "vcast_bfloat16_t_to_float": Function(_V, "rws", _same),
    "vcast_int32_t_to_float": Function(_V, "rws", _same),
    "vcast_int8_t_to_half": Function(_V, "rws", _same),
    "vcast_uint8_t_to_half": Function(_V, "rws", _same),  # of booleans: 0 and 1
    "vcast_float_to_float": Function(_V, "rws", lambda x, mode: _ROUND[int(mode)](x)),
    "vcast_float_to_half": Function(_V, "rws", _to_narrower),
    "vcast_float_to_bfloat16_t": Function(_V, "rws", _to_narrower),
    "vcast_float_to_int32_t": Function(_V, "rws", _to_integer),
    "vcast_half_to_int32_t": Function(_V, "rws", _to_integer),  # from int8: the chip has no such cast
    # ar: along the last axis; ra: along the first; r: of a vector. "enablevc" names the instructions that it may use.
    **{
        f"{prefix}reduce_{name}_{axes}": Function(_V, "rwts", _reduce(combine, -1 if axes == "ar" else 0))
        for prefix in ("", "enablevc_")
        for name, combine in (("sum", np.add), ("max", np.maximum))
        for axes in ("ar", "ra", "r")
    },
    **{f"deinterleave_channel_{i}_from_2_channels_1d": Function(_V, "rw", lambda x, i=i: x[i::2]) for i in (0, 1)},
    "deinterleave_channel_0_from_n_channels_1d": Function(_V, "rw", _same),  # the stride of what it reads says n
    "interleave_1d": Function(_V, "rrwt", lambda x, y: np.stack((x, y), -1).ravel()),
    "transpose_2d_with_last_axis": Function(_V, "rw", np.transpose),
    "broadcast_scalar": Function(_V, "sw", _fill, whole=True),
    "broadcast_1d": Function(_V, "rw", _same),
    "broadcast_last_axis_align": Function(_V, "rwt", _same),
    "broadcast_first_axis_align": Function(_V, "rw", _same),
    "arange_1d": Function(_V, "wss", _arange, whole=True),
    "arange_2d": Function(_V, "wsss", _arange, whole=True),
    "copy_ubuf_to_ubuf": Function(_V, "rwss", _copy, whole=True),
    "load_gm_to_ubuf": Function("PIPE_MTE2", "rwsss", _load, whole=True),
    "store_ubuf_to_gm": Function("PIPE_MTE3", "rws", store, whole=True),
}


def lookup(name: str) -> Function:
    """Return the function `name` of the library: the longest entry that is a prefix of it."""
    parts = name.split("_")
    for end in range(len(parts), 0, -1):
        if found := TABLE.get("_".join(parts[:end])):
            return found
    raise NotImplementedError(f"the library function {name} is not in the table")
