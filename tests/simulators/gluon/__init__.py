"""Runs Gluon kernels for Hopper on CPU tensors, and reports what the hardware would punish or leave undefined.

    kernel = InterpretedKernel(_fwd_sm90_kernel, seed=7)
    kernel[(grid,)](*args, **constexprs, num_warps=4)      # as Triton launches it

or, through a launcher that calls the kernel by a name of its module: `monkeypatch.setattr(module, "_kernel", kernel)`.
Every seed is another interleaving of partitions, copies and products; the same seed is always the same one. A bug is
raised as a subclass of `KernelBug` with the places in the kernel's source.
"""

from __future__ import annotations

from .errors import BarrierMisuse, Deadlock, InvalidOperand, KernelBug, OutOfBounds, Overflow, Race, Uninitialised
from .kernel import InterpretedKernel

__all__ = [
    "BarrierMisuse",
    "Deadlock",
    "InterpretedKernel",
    "InvalidOperand",
    "KernelBug",
    "OutOfBounds",
    "Overflow",
    "Race",
    "Uninitialised",
]
