"""What belongs beside every measured number: device, date and versions; and the file that holds both."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import diyfa
from diyfa.npu_environment import Machine, findings
from diyfa.npu_stacks import installed_version

VERSIONED = ("torch", "triton", "triton-ascend", "torch_npu", "ascendnpu-ir")


def versions() -> dict[str, str]:
    """Installed versions of diyfa and of what its figures depend on; what is absent is left out."""
    found = {"diyfa": diyfa.__version__, "python": platform.python_version()}
    found |= {name: there for name in VERSIONED if (there := installed_version(name)) is not None}
    found["torch"] = torch.__version__  # with the build's suffix
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def device_name(device: torch.device) -> str:
    """Name of the device as its maker gives it."""
    if device.type == "cpu":
        return cpu_name()
    return getattr(torch, device.type).get_device_name(device)


def cpu_name() -> str:
    """Model name of the processor, with the number of threads that PyTorch uses."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return f"{name} ({torch.get_num_threads()} threads)"


def environment(device: torch.device) -> dict[str, Any]:
    """Device, UTC date and versions; for an NPU what it is driven with, too."""
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    facts = {"device": device_name(device), "device_type": device.type, "date": date, "versions": versions()}
    return {**facts, "ascend": _ascend()} if device.type == "npu" else facts


def _ascend() -> list[dict[str, str]]:
    """CANN, its compiler, driver and firmware, as `diyfa info` judges them."""
    return [asdict(finding) for finding in findings(Machine.here())]


def write_json(path: Path, benchmark: str, device: torch.device, rows: Sequence[dict[str, Any]], **facts: Any) -> None:
    """Write `rows` with their environment, and whatever `facts` hold for all of them, to `path`, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"benchmark": benchmark, **environment(device), **facts, "rows": list(rows)}
    path.write_text(json.dumps(document, indent=1) + "\n")


def default_path(benchmark: str, device: torch.device, folder: Path) -> Path:
    """`folder/2026-01-31-NVIDIA-H200-attention.json`: one file for each benchmark, device and day."""
    name = device_name(device).split(" (")[0].replace(" ", "-").replace("/", "-").replace("(R)", "").replace("@", "")
    return folder / f"{datetime.now(timezone.utc):%Y-%m-%d}-{name}-{benchmark}.json"
