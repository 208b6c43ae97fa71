"""The facts recorded with every measured number (device, date, versions), and the file that holds both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from diyfa.npu_environment import Machine, findings
from diyfa.versions import device_name, versions


def environment(device: torch.device) -> dict[str, Any]:
    """Return device, UTC date and versions, and for an NPU also its CANN, driver and firmware."""
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    facts = {"device": device_name(device), "device_type": device.type, "date": date, "versions": versions()}
    return {**facts, "ascend": _ascend()} if device.type == "npu" else facts


def _ascend() -> list[dict[str, str]]:
    """Return the findings of `diyfa info` on CANN, its compiler, driver and firmware."""
    return [asdict(finding) for finding in findings(Machine.here())]


def write_json(path: Path, benchmark: str, device: torch.device, rows: Sequence[dict[str, Any]], **facts: Any) -> None:
    """Write `rows`, their environment and the `facts` that hold for all of them to `path`. Create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"benchmark": benchmark, **environment(device), **facts, "rows": list(rows)}
    path.write_text(json.dumps(document, indent=1) + "\n")


def default_path(benchmark: str, device: torch.device, folder: Path) -> Path:
    """Return the file of a benchmark, device and day, such as `folder/2026-01-31-NVIDIA-H200-attention.json`."""
    name = device_name(device).split(" (")[0].replace(" ", "-").replace("/", "-").replace("(R)", "").replace("@", "")
    return folder / f"{datetime.now(timezone.utc):%Y-%m-%d}-{name}-{benchmark}.json"
