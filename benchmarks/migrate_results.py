"""Give the files of benchmarks/results the schema of diyfa/lab/results.py. Run once; it is not kept."""

from __future__ import annotations

import json
import re
from pathlib import Path

from diyfa.lab.results import check, write_results

RESULTS = Path(__file__).parent / "results"
PURPOSE = {
    "before and after": (
        "h100-2026-11-27-public-calls", "h100-2026-11-27-triton-3.9", "h100-2026-11-28-host-launcher",
        "h200-2026-11-23-before-and-after", "h200-2026-11-23-features-before", "h200-2026-11-24-before-and-after",
        "h200-2026-11-24-decode-before", "h200-2026-11-24-triton-3.9", "h200-2026-11-25-packed-rows",
        "h200-2026-11-28-backward-room", "h200-2026-11-28-first-call", "h200-2026-11-28-first-call-pack",
        "h200-2026-11-28-forward-dominant",
    ),
    "ablation": (
        "h100-2026-11-25-prefill", "h100-2026-11-27-decode-combine", "h200-2026-11-21-hopper-power",
        "h200-2026-11-22-hopper-features", "h200-2026-11-23-hopper-ablation", "h200-2026-11-23-hopper-features",
        "h200-2026-11-23-statistics", "h200-2026-11-24-decode-latent", "h200-2026-11-28-hopper-tutorial",
    ),
    "trial": (
        "h100-2026-11-28-rounded-sums", "h200-2026-11-22-hopper-notices", "h200-2026-11-22-hopper-small",
        "h200-2026-11-22-hopper-trials", "h200-2026-11-22-hopper-wide", "h200-2026-11-28-slow-points",
        "h200-2026-11-28-forward-packed",
    ),
    "tile search": (
        "h100-2026-11-27-portable-order", "h200-2026-11-21-tiles", "h200-2026-11-23-kernel-tiles",
        "h200-2026-11-24-decode-tiles",
    ),
}  # fmt: skip
# The commits that a comparison measured as diyfa; other commits in it are of before.
CURRENT = {"h100-2026-11-28-forward-mixture": "fe53b69", "h200-2026-11-28-forward-points": "1c12785"}
# Beside diyfa and its peers: kernels by other names, shown on request.
WHOLE = re.compile(
    r"diyfa|cudnn|fa[234]|flash|sdpa|pytorch|cublas|ring|ulysses|empty (operator|Function)|torch_npu", re.IGNORECASE
)


def kind(row: dict, purpose: str) -> str:
    if row.get("table") == "compiled":
        return "compiled"
    if "peak_mib" in row or (row.get("implementation") == "SDPA math" and "pass" not in row):
        return "memory"
    if "host_us" in row:
        return "host"
    if "work" in row:
        return "model"
    if "M" in row and purpose != "tile search":
        return "matmul"
    if "block_m" in row or ("tile" in row and "M" not in row):
        return "tile"
    if "GB/s" in row:
        return "decode"
    if "ratio" in row:
        return "feature"
    return "attention" if "causal" in row and "implementation" in row and "case" not in row else "packed"


for path in sorted(RESULTS.glob("*.json")):
    document = json.loads(path.read_text())
    if "schema" in document:
        continue
    purpose = next((p for p, names in PURPOSE.items() if path.stem in names), "comparison")
    note = " ".join(x for x in (document.pop("what", ""), document.pop("note", "")) if x)
    rows = []
    for old in document.pop("rows"):
        row = {"kind": kind(old, purpose), **{name: x for name, x in old.items() if x is not None}}
        name = str(row.get("implementation", ""))
        if row["kind"] == "compiled":
            chip, kernel = row.pop("chip"), row.pop("kernel")
            row = {"kind": "compiled", "source": "predicted", "device": chip, "implementation": kernel, **row}
            row["pass"] = {"fwd": "forward"}.get(row["pass"], row["pass"])
        if row["kind"] == "matmul" and name != "cuBLAS":
            row["purpose"] = "tile search"
        if "predicted" in path.stem:
            row["source"] = "predicted"
        if row["kind"] == "host":
            row.setdefault("pass", "one token over a cache")
        if "ms_p20" in row:
            row["spread"] = round((row["ms_p80"] - row["ms_p20"]) / row["ms"], 4)
        if "rounds" in row and isinstance(row["rounds"], list) and "spread" not in row:
            middle = sorted(row["rounds"])[len(row["rounds"]) // 2]
            row["spread"] = round((max(row["rounds"]) - min(row["rounds"])) / middle, 4)
        if match := re.fullmatch(r"diyfa ([0-9a-f]{7})", name):
            row["commit"] = match[1]
            if path.stem in CURRENT:
                row["implementation"] = "diyfa"
                if match[1] != CURRENT[path.stem]:
                    row["purpose"] = "before and after"
        elif purpose == "comparison" and name and name != "two loops" and not WHOLE.match(name):
            row["purpose"] = "trial"
        if row.get("implementation") == "two loops":
            row["purpose"] = "ablation"
        if str(row.get("pass", "")).endswith("not in the tables"):
            row["purpose"] = "trial"
        if purpose == "comparison" and row["kind"] == "host" and "code" in row:
            row["purpose"] = "before and after" if row["code"] in ("before", "87dd3c4") else "comparison"
        if path.stem == "h200-2026-11-26-host" and row["run"] != 5:
            row["purpose"] = "before and after"
        rows.append(row)
    if document["device"].startswith("none"):
        document["device"] = "Ascend, compiled ahead of time and not run"
    if path.stem == "h200-2026-11-24-decode-latent":
        case = {"kind": "ceiling", "purpose": "comparison"}
        rows.insert(0, {**case, "implementation": "cuBLAS", "case": "matrix product", "tflops": document["cublas_tflops"]})
        rows.insert(1, {**case, "implementation": "plain reads", "case": "read", "GB/s": 4445,
                        "note": "docs/log/decode.md, the same session"})
    fields = ("benchmark", "device", "device_type", "date", "versions")
    head = {name: document.pop(name) for name in fields}
    head = {"benchmark": head.pop("benchmark"), "purpose": purpose, **head}
    if note:
        head["note"] = note
    new = {**head, **document, "rows": rows}
    for fault in check({"schema": 1, **new})[:3]:
        print(path.name, fault)
    path.chmod(0o644)
    if check({"schema": 1, **new}):
        continue
    write_results(path, new)
