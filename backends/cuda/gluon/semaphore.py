"""Semaphores: programs change the same memory in a fixed order, by a count of the programs that have done so.

A program waits until the count is its number, changes the memory through TMA, waits until that is written, and adds one
to the count. It may wait only for programs that already run, those that have drawn lower numbers: otherwise it could
wait for one that gets no multiprocessor.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# The acquire orders this thread's loads and stores behind it. The fence orders its TMA copies behind it.
_WAIT = gl.constexpr(
    "{ .reg .pred other; .reg .b32 count; again: ld.acquire.gpu.global.b32 count, [$1]; "
    "setp.ne.b32 other, count, $2; @other bra again; fence.proxy.async.global; mov.b32 $0, 0; }"
)
_COUNT = gl.constexpr(
    "{ .reg .pred first; .reg .b32 lane; bar.warp.sync 0xffffffff; mov.u32 lane, %laneid; "
    "setp.eq.u32 first, lane, 0; @first red.release.gpu.global.add.u32 [$1], 1; mov.b32 $0, 0; }"
)


@gluon.jit
def wait_until_equal(semaphore_ptr, count):
    """Wait until the semaphore is `count`. Only for partitions of one warp."""
    gl.inline_asm_elementwise(_WAIT, "=r,l,r", [semaphore_ptr, count], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def increment_semaphore(semaphore_ptr):
    """Add one to the semaphore. The program's copies must be written before (`wait_for_stores`)."""
    gl.inline_asm_elementwise(_COUNT, "=r,l", [semaphore_ptr], dtype=gl.int32, is_pure=False, pack=1)
