"""The builder behind Triton's own front end. It performs operations instead of emitting them.

Triton's `GluonSemantic` checks types and layouts. Triton's interpreter does the arithmetic on NumPy arrays, corrected
for bfloat16, where it is not exact. Everything about Hopper is here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as _mbarrier
from triton.runtime.interpreter import InterpreterBuilder, InterpreterOptions, TensorHandle

from . import barriers, inline_asm
from .atomics import add_scalar
from .errors import InvalidOperand, Overflow, assigned_name, location
from .layouts import inference, num_warps_of
from .markers import ARRIVE_MARKER, RELEASE_MARKER, WAIT_MARKER, take_marker
from .numerics import FLOAT8, flush, narrow, poison, stored, widen
from .program import Program
from .scheduler import current
from .shared_memory import Allocation, SharedView
from .tma import Landing


@dataclass(frozen=True)
class _Options(InterpreterOptions):
    enable_iisan: bool = False  # whether copies emit their own checks; Triton reads it since 3.7


def _scalar(handle: TensorHandle) -> int:
    return int(handle.data.reshape(-1)[0])


def _need_one_cta(*routing: Any) -> None:
    """Refuse `routing` to other programs of a cluster. Its arguments differ between versions of Triton."""
    if any(routing):
        raise NotImplementedError(f"other programs of a cluster at {location()}: {routing}")


MOST_SWIZZLED = 128  # bytes of the widest swizzle, so enough elements of any dtype


class Builder(InterpreterBuilder):
    def __init__(self, program: Program) -> None:
        super().__init__()
        # `binary_op` checks overflow for all operations.
        self.options = _Options(sanitize_overflow=False)
        self.program = program
        self.set_grid_dim(*program.grid)
        self.set_grid_idx(*program.index)

    # ---- types and layouts

    def get_distributed_ty(self, dtype: tl.dtype, shape: list[int], layout: Any) -> Any:
        wanted, have = num_warps_of(layout), current().num_warps
        if wanted not in (None, have):
            raise InvalidOperand(f"at {location()} a layout for {wanted} warps, {have} run there: {layout}")
        return gl.distributed_type(dtype, list(shape), layout)

    def get_shared_mem_desc_ty(self, dtype: tl.dtype, shape: list[int], layout: Any, alloc_shape: list[int]) -> Any:
        return gl.shared_memory_descriptor_type(dtype, list(shape), layout, list(alloc_shape))

    def get_auto_layout(self) -> Any:
        return gl.AutoLayout()

    def get_coalesced_layout(self) -> Any:
        return gl.CoalescedLayout()

    def get_blocked_layout(self, size: Any, threads: Any, warps: Any, order: Any, cga: Any) -> Any:
        return gl.BlockedLayout(size, threads, warps, order, cga)

    def get_slice_layout(self, dim: int, parent: Any) -> Any:
        return gl.SliceLayout(dim, parent)

    def get_dot_operand_layout(self, index: int, parent: Any, k_width: int) -> Any:
        return gl.DotOperandLayout(index, parent, k_width)

    def get_mma_layout(self, version: Any, warps: Any, cga: Any, shape: Any) -> Any:
        return gl.NVMMADistributedLayout(version, warps, shape, cga)

    def get_distributed_linear_layout(self, reg: Any, lane: Any, warp: Any, block: Any, shape: Any) -> Any:
        return gl.DistributedLinearLayout(reg, lane, warp, block, shape)

    def get_nvmma_shared_layout(self, swizzle: int, bits: int, transposed: bool, padded: bool, cga: Any, rank: int):
        return gl.NVMMASharedLayout(swizzle, bits, rank, transposed, padded, cga)

    def get_swizzled_shared_layout(self, vec: int, per_phase: int, max_phase: int, order: Any, cga: Any) -> Any:
        return gl.SwizzledSharedLayout(vec, per_phase, max_phase, order, cga)

    def get_gluon_layout_from_memdesc(self, view: SharedView) -> Any:
        return view.layout

    # ---- arithmetic

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Any) -> TensorHandle:
        dtype = lhs.dtype.scalar
        if dtype == tl.bfloat16:
            result = op(widen(lhs.data, dtype), widen(rhs.data, rhs.dtype.scalar))
            return TensorHandle(result if result.dtype == bool else narrow(result, dtype), dtype)
        with np.errstate(all="ignore"):
            result = op(lhs.data, rhs.data)
        if op in (np.add, np.subtract, np.multiply) and dtype in (tl.int32, tl.int64):
            exact = op(lhs.data.astype(object), rhs.data.astype(object)) if dtype == tl.int64 else None
            exact = op(lhs.data.astype(np.int64), rhs.data.astype(np.int64)) if exact is None else exact
            if (exact != result).any():
                raise Overflow(f"{op.__name__} of {dtype} at {location()} overflows")
        if result.dtype != bool:
            result = result.astype(stored(dtype), copy=False)
        return TensorHandle(result, dtype)

    def unary_op(self, arg: TensorHandle, op: Any) -> TensorHandle:
        with np.errstate(all="ignore"):
            if arg.dtype.scalar == tl.bfloat16:
                return TensorHandle(narrow(op(widen(arg.data, tl.bfloat16)), tl.bfloat16), tl.bfloat16)
            return TensorHandle(op(arg.data), arg.dtype.scalar)

    # max.f32 and min.f32 return the operand that is not NaN.

    def create_maxnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_minnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        return self.binary_op(lhs, rhs, np.fmin)

    def cast_impl(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        source, target = src.dtype.scalar, dst_type.scalar
        data = src.data
        if source.is_floating():
            data = widen(data, source)
        if target.is_floating():
            return TensorHandle(narrow(data, target), target)
        with np.errstate(invalid="ignore"):
            return TensorHandle(data.astype(stored(target)), target)

    def create_fp_to_fp(self, src: TensorHandle, dst_type: Any, rounding_mode: Any) -> TensorHandle:
        if src.dtype.scalar in FLOAT8 and dst_type.scalar == tl.float32:  # exact
            return self.cast_impl(src, dst_type)
        raise NotImplementedError(f"conversion of {src.dtype} to {dst_type} at {location()}")

    def create_splat(self, ret_ty: Any, arg: TensorHandle) -> TensorHandle:
        return TensorHandle(np.full(ret_ty.shape, arg.data.reshape(-1)[0], dtype=arg.data.dtype), arg.dtype.scalar)

    def create_broadcast(self, arg: TensorHandle, ret_ty: Any) -> TensorHandle:
        return TensorHandle(np.broadcast_to(arg.data, ret_ty.shape), arg.dtype.scalar)

    def create_convert_layout(self, ret_ty: Any, arg: TensorHandle) -> TensorHandle:
        return TensorHandle(arg.data, arg.dtype)

    def create_set_auto_layout(self, layout: Any, arg: TensorHandle) -> TensorHandle:
        return TensorHandle(arg.data, arg.dtype)

    def create_inline_asm(
        self, asm: str, constraints: str, values: list[TensorHandle], types: list[Any], is_pure: bool, pack: int
    ) -> Any:
        results = inline_asm.run(asm, values, types[0].scalar)
        return _Results(results if isinstance(results, list) else [results])

    # ---- global memory

    # Cache hints are two arguments, or one since Triton 3.9. They change no value.

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *caches_and_volatile: Any) -> Any:
        dtype = ptrs.get_element_ty()
        np_dtype = stored(dtype)
        reader, mask_data = self.program.writer_of(current()), np.broadcast_to(mask.data, ptrs.data.shape)
        # A masked element without `other` is undefined.
        fallback = np.full((), _undefined(np_dtype, dtype), np_dtype) if other is None else other.data
        self.program.touch_global("load")
        self.program.memory.atomics.plain(ptrs.data[mask_data], "load")
        known = current().clock.known
        return TensorHandle(self.program.memory.load(ptrs.data, mask_data, fallback, np_dtype, reader, known), dtype)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *caches: Any) -> None:
        writer = self.program.new_writer()
        mask_data = np.broadcast_to(mask.data, ptrs.data.shape)
        self.program.touch_global("store")
        self.program.memory.atomics.plain(ptrs.data[mask_data], "store")
        task = current()
        self.program.memory.store(ptrs.data, mask_data, value.data, writer, task.clock.known)
        self.program.memory.written[writer] = task, task.step()

    def create_atomic_rmw(self, op: Any, ptr: Any, value: Any, mask: Any, semantics: Any, scope: Any) -> TensorHandle:
        if op != ir.ATOMIC_OP.ADD or scope != ir.MEM_SYNC_SCOPE.GPU or not mask.data.all():
            raise NotImplementedError(f"atomic operation at {location()}: {op}, {scope}, perhaps masked")
        return add_scalar(ptr, value, semantics)

    # ---- shared memory

    def create_local_alloc(self, ty: Any, value: TensorHandle | None = None) -> SharedView:
        allocation = Allocation(ty.element_ty, ty.shape, assigned_name())
        self.program.add_allocation(allocation)
        view = SharedView(allocation, allocation.array, ty.layout)
        if value is not None:
            self.create_local_store(view, value)
        return view

    def create_local_load(self, ret_ty: Any, view: SharedView) -> TensorHandle:
        self.program.scheduler.pause()
        task = current()
        view.access(f"load at {location()}", task.clock, task, task.step(), write=False)
        return TensorHandle(view.values().copy(), view.dtype)

    def create_local_store(self, view: SharedView, value: TensorHandle) -> None:
        self.program.scheduler.pause()
        task = current()
        view.access(f"store at {location()}", task.clock, task, task.step(), write=True)
        view.store(value.data)

    def create_local_dealloc(self, view: SharedView) -> None:
        pass

    def create_memdesc_index(self, ty: Any, view: SharedView, index: TensorHandle) -> SharedView:
        return view.index(_scalar(index), ty.layout)

    def create_memdesc_subslice(self, ty: Any, view: SharedView, offsets: list[int]) -> SharedView:
        bounds = zip(offsets, ty.shape, view.array.shape, strict=True)
        if any(start < 0 or start + size > whole for start, size, whole in bounds):
            raise InvalidOperand(f"slice {offsets} + {ty.shape} of shared memory {view.array.shape}, at {location()}")
        part = tuple(slice(start, start + size) for start, size in zip(offsets, ty.shape, strict=True))
        return SharedView(view.allocation, view.array[part], ty.layout, view.dtype)

    def create_memdesc_trans(self, view: SharedView, order: list[int]) -> SharedView:
        # The layout does not depend on sizes, and a slice may be narrower than Triton 3.9 allows for an allocation.
        shape = [max(size, MOST_SWIZZLED) for size in view.array.shape]
        layout = inference().of_view("memdesc_trans", view.dtype, shape, view.layout, list(order))
        return SharedView(view.allocation, view.array.transpose(order), layout)

    def create_memdesc_reshape(self, view: SharedView, shape: list[int]) -> SharedView:
        layout = inference().of_view("memdesc_reshape", view.dtype, view.array.shape, view.layout, list(shape))
        return view.reshape(shape, layout)

    def create_memdesc_reinterpret(self, ty: Any, view: SharedView) -> SharedView:
        is_plain = isinstance(ty.layout, gl.SwizzledSharedLayout) and ty.layout.max_phase == 1
        if not isinstance(ty.layout, gl.NVMMASharedLayout) and not (is_plain and ty.element_ty != view.dtype):
            raise NotImplementedError(f"shared memory at {location()} reinterpreted as {ty.element_ty} in {ty.layout}")
        shape = [int(n) for n in ty.shape]
        if ty.element_ty != view.dtype:
            return view.of_another_type(ty.element_ty, shape, ty.layout)
        return view.reinterpreted(shape, ty.layout)

    def create_fence_async_shared(self, cluster: bool) -> None:
        current().clock.fence()

    # ---- mbarriers

    def create_mbarrier_init(self, view: SharedView, count: int) -> None:
        if not isinstance(view.layout, (_mbarrier.MBarrierLayout, gl.SwizzledSharedLayout)) or view.dtype != tl.int64:
            raise InvalidOperand(f"mbarrier.init at {location()} of {view.dtype} in {view.layout}")
        barriers.init(view, count)

    def create_mbarrier_inval(self, view: SharedView) -> None:
        barriers.invalidate(view)

    def create_mbarrier_expect(self, view: SharedView, size: int, pred: TensorHandle, *routing: Any) -> None:
        _need_one_cta(*routing)
        take_marker("mbarrier.expect")
        self.program.scheduler.pause()
        if _scalar(pred):
            barriers.barrier_at(view).expect(size)

    def create_mbarrier_arrive(self, view: SharedView, count: int, *pred_and_routing: Any) -> None:
        # Triton 3.8 puts the predicate after the routing, all other versions before it.
        (pred,) = (x for x in pred_and_routing if isinstance(x, TensorHandle))
        _need_one_cta(*(x for x in pred_and_routing if x is not pred))
        marker = take_marker("mbarrier.arrive", RELEASE_MARKER, ARRIVE_MARKER)
        if marker == ARRIVE_MARKER:
            if count != barriers.WARP or current().num_warps != 1:
                raise InvalidOperand(f"{location()}: an arrival per lane is one of each of a warp, not {count}")
        elif marker is not None and not count == current().num_warps == 4:
            raise InvalidOperand(f"{location()}: an arrival per warp is one of each of 4, not {count}")
        self.program.scheduler.pause()
        if _scalar(pred):
            barriers.barrier_at(view).arrive(count)

    def create_mbarrier_wait(self, view: SharedView, phase: TensorHandle, pred: TensorHandle, deps: list[Any]) -> None:
        take_marker(
            "mbarrier.wait", WAIT_MARKER
        )  # it frees warps of a partition from each other, which run in step here
        if _scalar(pred):
            barriers.barrier_at(view).wait(_scalar(phase))

    # ---- TMA

    def create_async_tma_copy_global_to_local(
        self,
        descriptor: Any,
        coordinates: list[TensorHandle],
        barrier: SharedView,
        view: SharedView,
        pred: Any,
        multicast: bool = False,
        im2col_offsets: Any = None,
        cache_policy: Any = None,
    ) -> None:
        _need_one_cta(multicast)
        if im2col_offsets is not None:
            raise NotImplementedError(f"im2col copy at {location()}")
        self.program.scheduler.pause()
        self.program.touch_global("copy")
        if _scalar(pred):
            Landing(descriptor, [_scalar(c) for c in coordinates], barriers.barrier_at(barrier), view)

    def create_async_tma_copy_local_to_global(
        self, descriptor: Any, coordinates: list[TensorHandle], view: SharedView, cache_policy: Any = None
    ) -> None:
        self.program.scheduler.pause()
        self.program.touch_global("copy")
        self.program.stores(current()).issue(descriptor, [_scalar(c) for c in coordinates], view)

    def create_async_tma_reduce(
        self, kind: Any, descriptor: Any, coordinates: list[TensorHandle], view: SharedView
    ) -> None:
        self.program.scheduler.pause()
        self.program.touch_global("copy")
        self.program.stores(current()).issue(descriptor, [_scalar(c) for c in coordinates], view, kind)

    def create_async_tma_store_wait(self, pending: int, read_only: bool = True) -> None:
        if not read_only:
            raise NotImplementedError(f"a wait at {location()} until stores are written")
        self.program.stores(current()).wait(pending)

    # ---- wgmma

    def create_warpgroup_mma(
        self, a: Any, b: SharedView, acc: Any, use_acc: TensorHandle, precision: Any, imprecise: int, is_async: bool
    ) -> TensorHandle:
        self.program.scheduler.pause()
        products = self.program.products(current())
        result = products.issue(a, b, acc, bool(_scalar(use_acc)))
        if not is_async:
            products.wait(0)
        return result

    def create_warpgroup_mma_wait(self, deps: list[TensorHandle], pending: int) -> list[TensorHandle]:
        self.program.products(current()).wait(pending)
        return deps

    # ---- partitions

    def create_barrier(self) -> None:
        self.program.scheduler.pause()


def _flushing(create: Any) -> Any:
    """Return a function of Triton's interpreter that flushes float32 operands and results, like `.ftz`."""

    def flushing(self: Builder, arg: TensorHandle) -> TensorHandle:
        if arg.dtype.scalar != tl.float32:
            return create(self, arg)
        with np.errstate(all="ignore"):
            result = create(self, TensorHandle(flush(arg.data), tl.float32))
        return TensorHandle(flush(result.data), tl.float32)

    return flushing


# These compile to instructions that flush subnormal numbers: ex2.approx.ftz, sqrt.approx.ftz, rsqrt.approx.ftz,
# cvt.rmi.ftz, cvt.rpi.ftz, and multiplications with .ftz. All others keep them, also exp and log.
for _name in ("exp2", "sqrt", "rsqrt", "floor", "ceil", "sin", "cos", "erf"):
    setattr(Builder, f"create_{_name}", _flushing(getattr(InterpreterBuilder, f"create_{_name}")))


class _Results:
    """The handle of an operation with several results, as the front end expects it."""

    def __init__(self, results: list[TensorHandle]) -> None:
        self._results = results

    def get_result(self, i: int) -> TensorHandle:
        return self._results[i]


def _undefined(np_dtype: np.dtype[Any], dtype: tl.dtype) -> Any:
    if dtype == tl.int1:
        return True
    array = np.empty(1, np_dtype)
    poison(array, dtype)
    return array[0]
