"""The accelerators diyfa knows, as data: the limits that detectors report and kernels size their tiles by.

There is one table for each vendor. `diyfa.device` reads it to tell the user, and the backends' config tables read it to
decide what fits, so the two cannot disagree. Nothing here touches a device.

Sources: NVIDIA CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"; Ascend
platform descriptions of the 910B, 910_93 and 950 families.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

KIB = 1024
ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}  # dtypes that kernels multiply


class GPUArch(Enum):
    """NVIDIA architectures by compute capability; `value` is the compiler's name."""

    VOLTA = "sm_70"
    TURING = "sm_75"
    AMPERE = "sm_80"
    AMPERE_CONSUMER = "sm_86"
    ADA = "sm_89"
    HOPPER = "sm_90"
    BLACKWELL = "sm_100"
    BLACKWELL_ULTRA = "sm_103"
    BLACKWELL_CONSUMER = "sm_120"
    UNKNOWN = "unknown"


class NPUArch(Enum):
    """Ascend families; `value` is the family's product name."""

    A2 = "Ascend910B"
    A3 = "Ascend910_93"
    A5 = "Ascend950"
    UNKNOWN = "unknown"


class GPUSpec(NamedTuple):
    """Limits of one NVIDIA architecture. Sizes in bytes."""

    arch: GPUArch
    shared_per_sm: int
    shared_per_block: int  # the largest size that one block may ask for (opt-in)
    has_bf16: bool  # bf16 tensor cores
    has_tma: bool
    has_wgmma: bool
    has_fp8: bool


class NPUSpec(NamedTuple):
    """Limits of one Ascend chip. Sizes in bytes for each core."""

    arch: NPUArch
    cube_cores: int
    vector_cores: int
    ub: int
    l1: int
    l0a: int
    l0b: int
    l0c: int


GPU_SPECS: dict[str, GPUSpec] = {
    s.arch.value: s
    for s in (
        #        arch                        shared/SM    shared/block  bf16   TMA    wgmma  fp8
        GPUSpec(GPUArch.VOLTA, 96 * KIB, 96 * KIB, False, False, False, False),
        GPUSpec(GPUArch.TURING, 64 * KIB, 64 * KIB, False, False, False, False),
        GPUSpec(GPUArch.AMPERE, 164 * KIB, 163 * KIB, True, False, False, False),
        GPUSpec(GPUArch.AMPERE_CONSUMER, 100 * KIB, 99 * KIB, True, False, False, False),
        GPUSpec(GPUArch.ADA, 100 * KIB, 99 * KIB, True, False, False, True),
        GPUSpec(GPUArch.HOPPER, 228 * KIB, 227 * KIB, True, True, True, True),
        GPUSpec(GPUArch.BLACKWELL, 228 * KIB, 227 * KIB, True, True, False, True),
        GPUSpec(GPUArch.BLACKWELL_ULTRA, 228 * KIB, 227 * KIB, True, True, False, True),
        GPUSpec(GPUArch.BLACKWELL_CONSUMER, 100 * KIB, 99 * KIB, True, True, False, True),
    )
}


def _a2_a3(arch: NPUArch, cube: int) -> NPUSpec:
    return NPUSpec(arch, cube, 2 * cube, 192 * KIB, 512 * KIB, 64 * KIB, 64 * KIB, 128 * KIB)


def _a5(cube: int) -> NPUSpec:
    return NPUSpec(NPUArch.A5, cube, 2 * cube, 248 * KIB, 512 * KIB, 64 * KIB, 64 * KIB, 256 * KIB)


NPU_SPECS: dict[str, NPUSpec] = {
    **dict.fromkeys(("Ascend910B1", "Ascend910B2", "Ascend910B2C"), _a2_a3(NPUArch.A2, 24)),
    **dict.fromkeys(("Ascend910B3", "Ascend910B4"), _a2_a3(NPUArch.A2, 20)),
    **dict.fromkeys(("Ascend910_9362", "Ascend910_9372"), _a2_a3(NPUArch.A3, 20)),
    "Ascend910_9381": _a2_a3(NPUArch.A3, 24),
    "Ascend950PR_9589": _a5(32),
    "Ascend950PR_9599": _a5(36),
}


def gpu_arch_name(major: int, minor: int) -> str:
    """Return the name of a compute capability in every table: `(9, 0)` -> `"sm_90"`."""
    return f"sm_{major}{minor}"


def gpu_spec(arch: str) -> GPUSpec | None:
    """Return the limits of `arch` (such as "sm_90"), or of the nearest older minor version of its generation."""
    if arch in GPU_SPECS:
        return GPU_SPECS[arch]
    if not arch.startswith("sm_") or not arch[3:].isdigit():
        return None
    number = int(arch[3:])
    older = [n for n in (int(name[3:]) for name in GPU_SPECS) if n < number and n // 10 == number // 10]
    return GPU_SPECS[f"sm_{max(older)}"] if older else None


# Not members of the family whose name they have: for torch_npu "Ascend910B" is a chip of the first generation, like
# 910A and 910ProB.
OTHER_NPUS = frozenset({"Ascend910B"})


def npu_spec(arch: str) -> NPUSpec | None:
    """Return the limits of the Ascend chip `arch` (such as "Ascend910B3"), or None.

    An unlisted member of a family gets the limits of the family's smallest chip.
    """
    if arch in NPU_SPECS:
        return NPU_SPECS[arch]
    if arch in OTHER_NPUS:
        return None
    for family in (NPUArch.A3, NPUArch.A2, NPUArch.A5):
        if arch.startswith(family.value):
            return min((s for s in NPU_SPECS.values() if s.arch is family), key=lambda s: s.cube_cores)
    return None
