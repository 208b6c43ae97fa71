"""Turns: programs that change the same memory do so in a fixed order, by a number that counts those before.

A program waits until the number is its turn, changes the memory through TMA, waits until that is written, and counts
itself. It must wait only for what programs do that have a multiprocessor already: those that have drawn lower numbers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# What is acquired is ordered with loads and stores of this thread; the fence does it with its copies through TMA.
_WAIT = gl.constexpr(
    "{ .reg .pred other; .reg .b32 count; again: ld.acquire.gpu.global.b32 count, [$1]; "
    "setp.ne.b32 other, count, $2; @other bra again; fence.proxy.async.global; mov.b32 $0, 0; }"
)
_COUNT = gl.constexpr(
    "{ .reg .pred first; .reg .b32 lane; bar.warp.sync 0xffffffff; mov.u32 lane, %laneid; "
    "setp.eq.u32 first, lane, 0; @first red.release.gpu.global.add.u32 [$1], 1; mov.b32 $0, 0; }"
)


@gluon.jit
def wait_for_turn(semaphore_ptr, turn):
    """Wait until `turn` programs have counted themselves. Only for partitions of one warp."""
    gl.inline_asm_elementwise(_WAIT, "=r,l,r", [semaphore_ptr, turn], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def end_turn(semaphore_ptr):
    """Count this program. What it copied must be written (`wait_for_stores`)."""
    gl.inline_asm_elementwise(_COUNT, "=r,l", [semaphore_ptr], dtype=gl.int32, is_pure=False, pack=1)
