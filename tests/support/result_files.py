"""A small set of result files with rows of every plot, for the tests of `diyfa report`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diyfa.lab.results import write_results

GPU, CHIP = "NVIDIA H200", "Ascend910B3"


def attention(
    name: str, tflops: float, direction: str = "forward", length: int = 1024, **changes: Any
) -> dict[str, Any]:
    sizes = {"D": 64, "causal": False, "S": length, "B": 16384 // length, "H": 32, "group": 1, "dtype": "bfloat16"}
    row = {"kind": "attention", "implementation": name, "pass": direction, **sizes, "ms": 1.0, "tflops": tflops}
    return {**row, **changes}


def speeds(scale: float = 1.0) -> list[dict[str, Any]]:
    """Return rows of three implementations at two lengths, two head dims and both passes."""
    rows = []
    for direction in ("forward", "backward"):
        for width, causal in ((64, False), (128, True)):
            for length in (1024, 4096):
                for name, tflops in (("diyfa", 500.0), ("cudnn", 400.0), ("FlashAttention-3", 550.0)):
                    speed = scale * tflops * (1 + length / 16384)
                    rows.append(attention(name, speed, direction, length, D=width, causal=causal))
    return rows


def write_gpu(folder: Path, name: str = "gpu.json", date: str = "2026-11-20", rows: Any = None, **changes: Any) -> Path:
    head = {"benchmark": "speed", "purpose": "comparison", "device": GPU, "device_type": "cuda", "date": date}
    path = folder / name
    write_results(path, {**head, "versions": {"torch": "2.11", "triton": "3.6"}, "rows": rows or speeds(), **changes})
    return path


def write_all(folder: Path) -> list[Path]:
    """Write files of a GPU with every kind of row, of another GPU, and of a chip with predictions only."""
    cache = [
        {"kind": "decode", "table": table, "case": case, "implementation": name, "ms": 0.1, "GB/s": speed,
         "TFLOP/s": 9.0}
        for table in ("decode", "paged") for case in ("B=1", "B=8")
        for name, speed in (("diyfa", 4000.0), ("FA3", 3500.0))
    ]  # fmt: skip
    memory = [
        {"kind": "memory", "implementation": name, "pass": "forward", "S": length, "peak_mib": length / 1024 * times}
        for length in (8192, 16384) for name, times in (("diyfa", 1), ("SDPA math", 900))
    ]  # fmt: skip
    ceilings = [
        {"kind": "ceiling", "implementation": "cuBLAS", "case": "matrix product", "tflops": 800.0},
        {"kind": "ceiling", "implementation": "plain reads", "case": "read", "GB/s": 4400.0},
    ]
    others = [
        {"kind": "host", "implementation": "diyfa", "pass": "forward", "host_us": 20.0},
        attention("a trial", 999.0, purpose="trial"),
        attention("diyfa", 450.0, length=512, B=8, H=12, spread=0.4),
        attention("cuDNN", 300.0, length=512, B=8, H=12),
        {"kind": "memory", "implementation": "FA3", "S": 8192, "unavailable": "no <such> wheel"},
    ]
    predicted = [
        {"kind": "compiled", "source": "predicted", "device": CHIP, "implementation": "diyfa", "pass": "forward",
         "D": width, "mask": mask, "tile": "128x256", "dtype": "float16", "predicted_tflops": 86.0,
         "predicted_share_of_cube_peak": share}
        for width, mask, share in ((64, "full", 0.29), (128, "causal", 0.36))
    ]  # fmt: skip
    clocks = {"sm_mhz": 1980.0, "power_limit_w": 700.0}
    return [
        write_gpu(folder, rows=[*speeds(), *cache, *memory, *ceilings, *others], clocks=clocks),
        write_gpu(folder, "other.json", rows=speeds(0.8), device="NVIDIA H100 80GB HBM3"),
        write_gpu(folder, "npu.json", rows=predicted, device="Ascend, not run", device_type="npu"),
    ]
