"""Names and versions of the software and the device that measured figures depend on."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

import diyfa
from diyfa.npu_stacks import installed_version

VERSIONED = ("torch", "triton", "triton-ascend", "torch_npu", "ascendnpu-ir")


def versions() -> dict[str, str]:
    """Return the installed versions of diyfa and of the packages its figures depend on, without absent ones."""
    version_by_name = {"diyfa": diyfa.__version__, "python": platform.python_version()}
    version_by_name |= {name: version for name in VERSIONED if (version := installed_version(name)) is not None}
    version_by_name["torch"] = torch.__version__  # has the build's suffix, such as +cpu
    if torch.version.cuda:
        version_by_name["cuda"] = torch.version.cuda
    return version_by_name


def device_name(device: torch.device) -> str:
    """Return the device's product name."""
    if device.type == "cpu":
        return cpu_name()
    return getattr(torch, device.type).get_device_name(device)


def cpu_name() -> str:
    """Return the model name of the processor, with the number of threads that PyTorch uses."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return f"{name} ({torch.get_num_threads()} threads)"
