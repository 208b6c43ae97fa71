"""Triton's launcher for CUDA without a GPU: around a recorder in place of its function in C.

Importable only with a Triton that `replay` knows.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import triton.backends.nvidia.driver as nvidia

from diyfa.backends.cuda.runtime.versions import TRITON

OF_LAUNCH = 13 if TRITON < (3, 7) else 15  # arguments of the function in C ahead of the kernel's


class Recorder:
    """What the function in C was called with: arguments of the launch, then the kernel's, one by one."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> None:
        if TRITON >= (3, 7):  # the kernel's come as a list
            *of_launch, of_kernel = args
            assert len(of_launch) == OF_LAUNCH and of_launch[-2:] == ["annotations", b"kinds"]
            args = (*of_launch, *of_kernel)
        self.calls.append(args)


def launcher_around(
    function: Recorder, signature: dict[Any, str], metadata: list[dict[str, Any]] | None, launch_pdl: bool = False
) -> Any:
    """A launcher of kernels with `signature`, whose descriptors are encoded as `metadata` says."""
    launcher = object.__new__(nvidia.CudaLauncher)
    launcher.num_ctas = launcher.global_scratch_align = launcher.profile_scratch_align = 1
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.launch_cooperative_grid, launcher.launch_pdl = False, launch_pdl
    launcher.gsan_enabled = False
    launcher.arg_annotations, launcher.kernel_signature = "annotations", b"kinds"
    launcher.launch = nvidia.wrap_handle_tensordesc(function, signature, metadata)
    return launcher


def utils(encode: Callable[..., Any]) -> SimpleNamespace:
    """The driver's functions: `encode` makes descriptors, from an address first."""
    return SimpleNamespace(fill_tma_descriptor=encode, fill_tma_descriptor_tiled=encode)
