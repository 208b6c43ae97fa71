"""An interpreter of Gluon kernels for Hopper on CPU tensors, which reports undefined behaviour. See README.md.

    kernel = InterpretedKernel(_fwd_sm90_kernel, seed=7)
    kernel[(grid,)](*args, **constexprs, num_warps=4)      # as Triton launches it

To run it through a launcher, replace the kernel in its module: `monkeypatch.setattr(module, "_kernel", kernel)`. A seed
is one interleaving of partitions, copies and products; equal seeds give equal interleavings. A bug raises a subclass of
`KernelBug` with source lines of the kernel.
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
