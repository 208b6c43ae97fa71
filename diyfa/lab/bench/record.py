"""The facts recorded with every measured number (device, date, versions), and the file that holds both."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from diyfa.lab.results import write_results
from diyfa.npu_environment import Machine, findings
from diyfa.versions import device_name, versions

# Names in the JSON document, with the names that nvidia-smi has for them.
CLOCKS = {
    "sm_mhz": "clocks.sm", "sm_max_mhz": "clocks.max.sm", "memory_mhz": "clocks.mem", "power_limit_w": "power.limit",
}  # fmt: skip


def environment(device: torch.device) -> dict[str, Any]:
    """Return device, UTC date, versions and clocks, and for an NPU also its CANN, driver and firmware."""
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    facts = {"device": device_name(device), "device_type": device.type, "date": date, "versions": versions()}
    if readings := clocks(device):
        facts["clocks"] = readings
    return {**facts, "ascend": _ascend()} if device.type == "npu" else facts


def clocks(device: torch.device) -> dict[str, float]:
    """Return the present clocks and the power limit of a GPU, as far as nvidia-smi says them; of others nothing."""
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        return {}
    uuid = torch.cuda.get_device_properties(device).uuid
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(CLOCKS.values())}",
        "--format=csv,noheader,nounits",
        f"--id=GPU-{uuid}",
    ]
    try:
        values = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split(",")
    except (OSError, subprocess.SubprocessError):
        return {}
    readings = {}
    for name, value in zip(CLOCKS, values, strict=False):
        try:
            readings[name] = float(value)
        except ValueError:  # "[N/A]"
            continue
    return readings


def clock(device: torch.device) -> dict[str, float]:
    """Return the entry of a row for the present clock of the multiprocessors: at the end of a timing, that of it."""
    readings = clocks(device)
    return {"clock_mhz": readings["sm_mhz"]} if "sm_mhz" in readings else {}


def _ascend() -> list[dict[str, str]]:
    """Return the findings of `diyfa info` on CANN, its compiler, driver and firmware."""
    return [asdict(finding) for finding in findings(Machine.here())]


def write_json(
    path: Path,
    benchmark: str,
    device: torch.device,
    rows: Sequence[dict[str, Any]],
    purpose: str = "comparison",
    **facts: Any,
) -> None:
    """Write a result file: `rows`, their environment and the `facts` that hold for all of them. Create its folder.

    Raises ValueError if a row breaks the schema of `diyfa.lab.results`.
    """
    head = {"benchmark": benchmark, "purpose": purpose, **environment(device)}
    write_results(path, {**head, **facts, "rows": list(rows)})


def default_path(benchmark: str, device: torch.device, folder: Path) -> Path:
    """Return the file of a benchmark, device and day, such as `folder/2026-01-31-NVIDIA-H200-attention.json`."""
    name = device_name(device).split(" (")[0].replace(" ", "-").replace("/", "-").replace("(R)", "").replace("@", "")
    return folder / f"{datetime.now(timezone.utc):%Y-%m-%d}-{name}-{benchmark}.json"
