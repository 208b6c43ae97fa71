"""The accelerators of this machine and their capabilities.

The detectors ask the runtime first and take only what it does not tell from the tables of `diyfa.arch`. The kernels
size their tiles by the same tables, so users never read other limits here. Importing this module touches no device.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from diyfa.arch import GPUArch, NPUArch, gpu_arch_name, gpu_spec, npu_spec
from diyfa.npu_stacks import installed_version
from diyfa.terminal import printable

GIB = 1024**3
CANN_REMEDY = (
    "install CANN (toolkit and operators of your chip) and run `source /usr/local/Ascend/cann/set_env.sh` (before CANN "
    "8.5.0 `source /usr/local/Ascend/ascend-toolkit/set_env.sh`); to use PyTorch without the NPU, set "
    "TORCH_DEVICE_BACKEND_AUTOLOAD=0 or uninstall torch_npu"
)
TORCH_NPU_REMEDY = "install CANN, and the torch_npu that belongs to it and to your torch (docs/npu.md has the table)"


@dataclass(frozen=True)
class GPUCapabilities:
    """One NVIDIA GPU."""

    name: str
    arch: GPUArch
    compute_capability: tuple[int, int]
    has_tma: bool  # Tensor Memory Accelerator (Hopper and later)
    has_fp8: bool  # FP8 tensor cores (Ada, Hopper and later)
    has_warpgroup_mma: bool  # wgmma: Hopper only; Blackwell replaced it by tcgen05
    sram_per_sm: int  # shared memory of one SM, bytes
    num_sms: int
    total_memory_gb: float  # in units of 2**30 bytes


@dataclass(frozen=True)
class NPUCapabilities:
    """One Ascend NPU. Buffer sizes are bytes for each core, 0 if the chip is unknown."""

    name: str
    arch: NPUArch
    cube_cores: int
    vector_cores: int
    ub: int
    l1: int
    l0a: int
    l0b: int
    l0c: int
    total_memory_gb: float  # in units of 2**30 bytes


@dataclass(frozen=True)
class NPUStatus:
    """The state of torch_npu. `problem` is None if an NPU can be used, else `remedy` says what to do."""

    installed: bool
    available: bool
    version: str | None = None
    problem: str | None = None
    remedy: str | None = None


def _cuda_problem() -> str | None:
    if torch.version.hip is not None:
        return "this PyTorch is built for ROCm, not for CUDA"
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    if not torch.cuda.is_available():
        return "PyTorch finds no usable NVIDIA GPU or driver"
    return None


def detect_gpu(device_id: int = 0) -> GPUCapabilities:
    """Return the capabilities of CUDA device `device_id`.

    Raises RuntimeError when CUDA is not available, ValueError when there is no such device.
    """
    if not _cuda_usable():
        raise RuntimeError(f"CUDA is not available: {_cuda_problem()}")
    count = torch.cuda.device_count()
    if not 0 <= device_id < count:
        raise ValueError(f"device_id must be below the number of GPUs, {count}; got {device_id}")
    properties = torch.cuda.get_device_properties(device_id)
    spec = gpu_spec(gpu_arch_name(properties.major, properties.minor))
    table_sram = spec.shared_per_sm if spec else 0
    return GPUCapabilities(
        name=properties.name,
        arch=spec.arch if spec else GPUArch.UNKNOWN,
        compute_capability=(properties.major, properties.minor),
        has_tma=bool(spec and spec.has_tma),
        has_fp8=bool(spec and spec.has_fp8),
        has_warpgroup_mma=bool(spec and spec.has_wgmma),
        sram_per_sm=getattr(properties, "shared_memory_per_multiprocessor", 0) or table_sram,
        num_sms=properties.multi_processor_count,
        total_memory_gb=properties.total_memory / GIB,
    )


@lru_cache(maxsize=1)
def npu_status() -> NPUStatus:
    """Return the state of torch_npu: absent, unable to load (no CANN), loaded without a device, or usable.

    This imports torch_npu, once. If the import fails, the state says so; nothing is raised.
    """
    if importlib.util.find_spec("torch_npu") is None:
        return NPUStatus(False, False, None, "torch_npu is not installed", TORCH_NPU_REMEDY)
    version = installed_version("torch_npu")
    try:
        importlib.import_module("torch_npu")
    except Exception as error:  # a broken installation may raise anything
        return NPUStatus(True, False, version, f"torch_npu {version} does not load: {error}", CANN_REMEDY)
    if not _npu().is_available():
        remedy = "check the driver with `npu-smi info`, the device's permissions, and ASCEND_RT_VISIBLE_DEVICES"
        return NPUStatus(True, False, version, f"torch_npu {version} loads but finds no NPU", remedy)
    return NPUStatus(True, True, version)


def _npu() -> Any:
    return torch.npu  # type: ignore[attr-defined]  # added by torch_npu


def detect_npu(device_id: int = 0) -> NPUCapabilities:
    """Return the capabilities of NPU `device_id`.

    Raises RuntimeError with a remedy when no NPU can be used, ValueError when there is no such device.
    """
    status = npu_status()
    if not status.available:
        raise RuntimeError(f"no NPU is available: {status.problem}. To mend it: {status.remedy}")
    count = _npu().device_count()
    if not 0 <= device_id < count:
        raise ValueError(f"device_id must be below the number of NPUs, {count}; got {device_id}")
    name = _npu().get_device_name(device_id)
    properties = _npu().get_device_properties(device_id)
    spec = npu_spec(name)
    return NPUCapabilities(
        name=name,
        arch=spec.arch if spec else NPUArch.UNKNOWN,
        cube_cores=getattr(properties, "cube_core_num", 0) or (spec.cube_cores if spec else 0),
        vector_cores=getattr(properties, "vector_core_num", 0) or (spec.vector_cores if spec else 0),
        **{buffer: getattr(spec, buffer, 0) for buffer in ("ub", "l1", "l0a", "l0b", "l0c")},
        total_memory_gb=properties.total_memory / GIB,
    )


def _cuda_usable() -> bool:
    return torch.version.hip is None and torch.cuda.is_available()


def detect() -> list[GPUCapabilities | NPUCapabilities]:
    """Return every accelerator that PyTorch can use here, GPUs first."""
    capabilities: list[GPUCapabilities | NPUCapabilities] = []
    if _cuda_usable():
        capabilities += [detect_gpu(i) for i in range(torch.cuda.device_count())]
    if npu_status().available:
        capabilities += [detect_npu(i) for i in range(_npu().device_count())]
    return capabilities


def default_backend() -> str:
    """Return the backend for this process: "cuda" or "npu", whichever PyTorch can use, else "cpu"."""
    if _cuda_usable():
        return "cuda"
    # This does not import torch_npu: a process that has not imported it may have decided so.
    if hasattr(torch, "npu") and _npu().is_available():
        return "npu"
    return "cpu"


def present_device() -> torch.device:
    """Return this machine's accelerator, else the CPU."""
    npu_status()  # imports torch_npu if it works
    return torch.device(default_backend())


def check_hopper_features() -> dict[str, Any]:
    """Return which features that came with Hopper the current GPU has. All are False without an NVIDIA GPU.

    Keys: tma_available, fp8_available, wgmma_available (bool), arch (such as "sm_90"), compute_capability.
    """
    gpu = detect_gpu(torch.cuda.current_device()) if _cuda_usable() else None
    return {
        "tma_available": gpu is not None and gpu.has_tma,
        "fp8_available": gpu is not None and gpu.has_fp8,
        "wgmma_available": gpu is not None and gpu.has_warpgroup_mma,
        "arch": GPUArch.UNKNOWN.value if gpu is None else gpu.arch.value,
        "compute_capability": (0, 0) if gpu is None else gpu.compute_capability,
    }


def supports_fp8() -> bool:
    """Return whether the current GPU's tensor cores multiply FP8; False without an NVIDIA GPU."""
    return bool(check_hopper_features()["fp8_available"])


def describe(device: GPUCapabilities | NPUCapabilities) -> list[tuple[str, str]]:
    """Return readable (label, value) pairs of one device."""
    pairs = [
        ("name", device.name),
        ("architecture", f"{device.arch.name} ({device.arch.value})"),
        ("memory", f"{device.total_memory_gb:.1f} GiB"),
    ]
    if isinstance(device, GPUCapabilities):
        major, minor = device.compute_capability
        return [
            *pairs,
            ("compute capability", f"{major}.{minor}"),
            ("SMs", str(device.num_sms)),
            ("shared memory per SM", f"{device.sram_per_sm // 1024} KiB"),
            ("TMA", "yes" if device.has_tma else "no"),
            ("FP8", "yes" if device.has_fp8 else "no"),
            ("warpgroup MMA", "yes" if device.has_warpgroup_mma else "no"),
        ]
    return [
        *pairs,
        ("cube / vector cores", f"{device.cube_cores} / {device.vector_cores}"),
        ("UB / L1", f"{device.ub // 1024} / {device.l1 // 1024} KiB"),
        ("L0A / L0B / L0C", f"{device.l0a // 1024} / {device.l0b // 1024} / {device.l0c // 1024} KiB"),
    ]


def print_gpu_info() -> None:
    """Print the capabilities of every accelerator here, as a table if rich is installed, else as plain text."""
    with printable():
        _print_devices(detect())


def _print_devices(devices: list[GPUCapabilities | NPUCapabilities]) -> None:
    if not devices:
        print(f"No accelerator: {_cuda_problem()}; {npu_status().problem}.")
        return
    if importlib.util.find_spec("rich") is None:
        for device in devices:
            print("\n".join(f"{label:22} {value}" for label, value in describe(device)), end="\n\n")
        return
    from rich.console import Console
    from rich.table import Table

    for device in devices:
        table = Table(title=device.name, show_header=False, title_justify="left")
        for label, value in describe(device):
            table.add_row(label, value)
        Console().print(table)
