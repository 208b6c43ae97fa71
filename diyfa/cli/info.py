"""`diyfa info`: the installed components, what they enable, and how to get the missing ones.

By default it is a summary of at most `SCREEN` lines; `--all` prints every kernel, feature and reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.util import find_spec
from itertools import product
from textwrap import shorten
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from diyfa import integrations
from diyfa.cli.devices import present_device
from diyfa.cli.output import out, print_json
from diyfa.cli.table import table
from diyfa.device import CANN_REMEDY, TORCH_NPU_REMEDY, describe, detect, npu_status
from diyfa.features import FEATURES as OPTION_FEATURES
from diyfa.features import SHAPE_FEATURES
from diyfa.npu_environment import FINE, WRONG, Machine, cann_version, findings
from diyfa.npu_stacks import GET_TRITON_ASCEND
from diyfa.problem import AttentionProblem, Backend, KVCacheProblem, MatmulProblem
from diyfa.registry import BATCH_INVARIANT_KERNEL, EXPLICIT_ONLY, backend_names, load_backend, refusal
from diyfa.versions import cpu_name, versions

# The architecture for which a backend's refusals are shown if its device is not here.
TYPICAL_ARCH = {"cuda": "sm_90", "npu": "Ascend910B3", "cpu": "cpu"}

ATTENTION = {"attention_fwd": "forward", "attention_bwd": "backward"}
NO_DEVICE = 'No accelerator that PyTorch can use; the CPU runs what names it: backend="cpu".'
SCREEN = 40  # lines of the summary, in 80 columns
TEXT = 54  # letters of a row's text in a line of 80 columns

# A feature's name in the documentation -> its changes to the typical problem.
FEATURES: dict[str, dict[str, Any]] = {
    "float16": {},
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "D = 256": {"head_dim": 256, "head_dim_v": 256},
    "D = 512": {"head_dim": 512, "head_dim_v": 512},
    "int8, v in 16 bits": {"dtype": "int8", "value_dtype": "bfloat16", "out_dtype": "bfloat16"},
    **{feature.label: feature.example for feature in (*SHAPE_FEATURES, *OPTION_FEATURES) if feature.label},
}


@dataclass(frozen=True)
class Requirement:
    """A component, what it enables, how to get it, and a test of the installed versions for it."""

    what: str
    enables: str
    how: str
    present: Callable[[dict[str, str]], bool]


REQUIREMENTS = (
    Requirement("rich, typer", "this command line", "pip install 'diyfa[cli]'", lambda v: True),
    Requirement(
        "triton", "kernels on NVIDIA GPUs, and `diyfa compile sm_90`",
        "pip install triton (in an environment without triton-ascend)",
        lambda v: "triton" in v and "triton-ascend" not in v,
    ),
    Requirement(
        "an NVIDIA GPU", "the cuda backend",
        "a GPU of compute capability 7.5 or later, its driver, and a CUDA build of PyTorch",
        lambda v: torch.cuda.is_available(),
    ),
    Requirement("torch_npu", "PyTorch on Ascend NPUs", TORCH_NPU_REMEDY, lambda v: "torch_npu" in v),
    Requirement(
        "triton-ascend", "kernels on Ascend NPUs", f"{GET_TRITON_ASCEND}, in an environment without NVIDIA's Triton",
        lambda v: "triton-ascend" in v,
    ),
    Requirement("CANN", "running anything on an Ascend NPU", CANN_REMEDY, lambda v: bool(cann_version(Machine()))),
    Requirement(
        "ascendnpu-ir", "`diyfa compile 910B3` without CANN", "pip install 'diyfa[npu-compile]'",
        lambda v: "ascendnpu-ir" in v,
    ),
    Requirement(
        "matplotlib", "`diyfa demo --plot`", "pip install 'diyfa[plot]'", lambda v: bool(find_spec("matplotlib"))
    ),
)  # fmt: skip


def _typical(backend: Backend, arch: str, op: str, **changes: Any) -> AttentionProblem | KVCacheProblem | MatmulProblem:
    if op == "matmul":
        return MatmulProblem(backend.device_type, arch, "float16", "float16", "float16", 1024, 1024, 1024, aligned=True)
    if op.startswith("kvcache"):
        return KVCacheProblem(backend.device_type, arch, "float16", "float16", "bshd", 4, 8, 8, 1, 1024, 64, 64)
    problem = AttentionProblem(backend.device_type, arch, "float16", "bhsd", 4, 8, 8, 1024, 1024, 64, 64)
    return problem.replace(needs_grad=op == "attention_bwd", **changes)


def _support(backend: Backend, arch: str) -> list[dict[str, Any]]:
    """Return why each kernel refuses each feature, or None. `registry.choose` decides by the same reasons."""
    rows = []
    for kernel in backend.kernels:
        features = FEATURES if kernel.op in ATTENTION else {"float16": {}}
        runs_in_mode = (kernel.op, kernel.name) == ("attention_fwd", BATCH_INVARIANT_KERNEL)
        mode = {"batch_invariant": True} if runs_in_mode else {}
        for feature, changes in features.items():
            reason = refusal(backend, kernel, _typical(backend, arch, kernel.op, **changes, **mode))
            rows.append({"op": kernel.op, "kernel": kernel.name, "feature": feature, "reason": reason})
    return rows


def _refusals(support: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the features that no kernel runs outside of `batch_invariant`, with every kernel's reason."""
    refused = []
    support = [s for s in support if s["kernel"] != BATCH_INVARIANT_KERNEL]
    for op, feature in [*product(ATTENTION, FEATURES), ("matmul", "float16")]:
        reasons = [s["reason"] for s in support if (s["op"], s["feature"]) == (op, feature)]
        if all(reasons):
            reason = "; ".join(dict.fromkeys(reasons)) or f"no {op} kernel"
            refused.append({"op": op, "feature": feature, "reason": reason})
    return refused


def _arch(name: str, backend: Backend, device: torch.device) -> str:
    if device.type == backend.device_type and backend.accepts(device) is None:
        return backend.arch(device)
    return TYPICAL_ARCH.get(name, name)


def _backend(name: str, device: torch.device) -> dict[str, Any]:
    try:
        backend = load_backend(name)
        arch = _arch(name, backend, device)
        support = _support(backend, arch)
    except Exception as error:  # a broken plug-in may raise anything
        return {"name": name, "loads": False, "reason": str(error) or type(error).__name__}
    return {
        "name": name,
        "loads": True,
        "arch": arch,
        "usable_here": name in EXPLICIT_ONLY or (device.type == backend.device_type and not backend.accepts(device)),
        "only_when_named": name in EXPLICIT_ONLY,
        "binaries": backend.binaries(arch) if hasattr(backend, "binaries") else None,
        "kernels": [{"op": k.op, "name": k.name, "summary": k.summary} for k in backend.kernels],
        "features": support,
        "refusals": _refusals(support),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


def collect() -> dict[str, Any]:
    """Return everything that `diyfa info` shows, as plain data."""
    device = present_device()
    installed = versions()
    return {
        "versions": installed,
        "cpu": cpu_name(),
        "cann": cann_version(Machine()),
        "default_backend": device.type,
        "devices": [{"kind": type(d).__name__.removesuffix("Capabilities"), **_plain(asdict(d))} for d in detect()],
        "npu": asdict(npu_status()),
        "ascend": [asdict(finding) for finding in findings(Machine.here())],
        "requirements": [
            {"what": r.what, "present": r.present(installed), "enables": r.enables, "how": r.how} for r in REQUIREMENTS
        ],
        "backends": [_backend(name, device) for name in backend_names()],
        "integrations": [asdict(row) for row in integrations.status()],
    }


def _print_devices() -> None:
    devices = detect()
    for index, device in enumerate(devices):
        out.print(table(f"device {index}", ["", ""], [list(pair) for pair in describe(device)], show_header=False))
    if not devices:
        out.print(NO_DEVICE, highlight=False)


def _print_ascend(rows: list[dict[str, str]], longest: int | None = None) -> None:
    """Print a row for each component of an Ascend machine: verdict, version, and a remedy unless it is fine.

    Rows are shortened to `longest` letters.
    """
    colours, lines = {FINE: "green", WRONG: "red"}, []
    for f in rows:
        text = f"{f['found']}: {f['remedy']}" if f["remedy"] else f["found"]
        text = text if longest is None else shorten(text, longest, placeholder=" ...")
        lines.append((f"[{colours.get(f['verdict'], 'yellow')}]{f['verdict']}[/]", f["part"], escape(text)))
    out.print("Ascend: what is here, and whether it will do", style="italic")
    out.print(_grid(lines))


def _print_requirements(requirements: list[dict[str, Any]]) -> None:
    rows = [[_mark(r["present"]), r["what"], r["enables"]] for r in requirements]
    out.print(table("what enables what", ["here", "what", "enables"], rows))
    out.print("how to get what is missing", style="italic")
    out.print(_list([(r["what"], r["how"]) for r in requirements if not r["present"]]))


def _print_summary(report: dict[str, Any]) -> None:
    """Print what this machine has, which backends run on it, and what is missing, one row each."""
    groups = Counter(", ".join(value for _, value in describe(device)[:3]) for device in detect())
    for text, count in groups.items():
        out.print(f"{count} x {text}", highlight=False)
    if not groups:
        out.print(NO_DEVICE, highlight=False)
    if report["ascend"]:
        _print_ascend(report["ascend"], 2 * TEXT)
    out.print("\nbackends", style="italic")
    out.print(_list(line for backend in report["backends"] for line in _summary_of(backend)))
    out.print("\ncomponents", style="italic")
    texts = [(r, r["enables"] if r["present"] else r["how"]) for r in report["requirements"]]
    rows = [(_mark(r["present"]), r["what"], escape(shorten(text, TEXT, placeholder=" ..."))) for r, text in texts]
    out.print(_grid(rows))
    clients = [f"{r['client']} {'on' if r['on'] else 'off'}" for r in report["integrations"] if r["installed"]]
    if clients:
        out.print(f"\nInside other software, in this process: {', '.join(clients)}", highlight=False)
    out.print("`diyfa info --all` prints every kernel, which features it runs, and why not.", highlight=False)


def _summary_of(info: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows (name, text) of one backend: where it runs, its kernels and the features that no kernel runs."""
    if not info["loads"]:
        return [(info["name"], f"not available: {info['reason']}")]
    names = {op: [k["name"] for k in info["kernels"] if k["op"] == op] for op in ATTENTION}
    passes = {op for op in ATTENTION if names[op]}
    kernels = "; ".join(f"{ATTENTION[op]} {', '.join(names[op])}" for op in ATTENTION if names[op])
    rows = [(info["name"], f"{_state(info)}; {kernels} ({info['arch']})")]
    refusing: dict[str, set[str]] = {}  # feature -> operations that no kernel runs with it
    for each in info["refusals"]:
        refusing.setdefault(each["feature"], set()).add(each["op"])
    refused = [
        feature if ops >= passes else f"{feature} ({', '.join(ATTENTION[op] for op in ATTENTION if op in ops)})"
        for feature, ops in refusing.items()
        if ops & passes
    ]
    if refused and info["usable_here"]:
        named = ", ".join(refused) if len(refused) <= 4 else f"{len(refused)} features"
        rows.append(("", f"refuses {named}"))
    if info["binaries"] and info["usable_here"]:
        rows.append(("", f"compiled kernels: {info['binaries']}"))
    return rows


def _print_integrations(clients: list[dict[str, Any]]) -> None:
    """Print one row for each integration with other software, with a line for each route that its calls took."""
    rows = []
    for row in clients:
        on = "on" if row["on"] else "off"
        calls = "\n".join(f"{count} {route}" for route, count in row["calls"].items())
        rows.append([row["client"], row["installed"] or "-", f"{row['switched_on_by']}()", on, escape(calls) or "-"])
    headings = ["client", "installed", "diyfa.integrations.", "here", "calls"]
    out.print(table("inside other software, in this process", headings, rows))


def _grid(rows: Iterable[tuple[str, ...]]) -> Table:
    """Return a table of cells with markup, without a frame."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        grid.add_row(*row)
    return grid


def _list(pairs: Iterable[tuple[str, str]]) -> Table:
    """Return a table of two columns of text without a frame."""
    return _grid((escape(first), escape(second)) for first, second in pairs)


def _state(info: dict[str, Any]) -> str:
    here = "usable here" if info["usable_here"] else "no device here"
    return f"{here}, only when named" if info["only_when_named"] else here


def _mark(is_present: bool) -> str:
    return "[green]yes[/]" if is_present else "[red]no[/]"


def _print_backend(info: dict[str, Any]) -> None:
    """Print a backend's kernels, the features of each, and every reason of a "no" once."""
    if not info["loads"]:
        out.print(f"[bold]{escape(info['name'])}[/bold]: not available: ", end="")
        out.print(info["reason"], markup=False, highlight=False)
        return
    rows = [[kernel["op"], kernel["name"], escape(kernel["summary"])] for kernel in info["kernels"]]
    out.print(table(f"backend {info['name']} ({_state(info)})", ["operation", "kernel", "summary"], rows))
    if info["binaries"]:
        out.print(_list([("compiled kernels", info["binaries"])]))
    attention = [s for s in info["features"] if s["op"] in ATTENTION]
    kernels = list(dict.fromkeys((s["op"], s["kernel"]) for s in attention))
    reasons = {(s["op"], s["kernel"], s["feature"]): s["reason"] for s in attention}
    for op, direction in ATTENTION.items():  # a table each: the kernels of both are too many columns for a terminal
        names = [kernel for of, kernel in kernels if of == op]
        if not names:
            out.print(f"no {direction} kernel")
            continue
        rows = [[name, *(_mark(reasons[op, kernel, name] is None) for kernel in names)] for name in FEATURES]
        title = f"{direction}: {info['name']} on {info['arch']}"
        out.print(table(title, ["feature", *names], rows))
    refused: dict[tuple[str, str, str], list[str]] = {}
    for s in info["features"]:
        if s["reason"]:
            refused.setdefault((s["op"], s["kernel"], s["reason"]), []).append(s["feature"])
    lines = []
    for (op, kernel, reason), features in refused.items():
        named = ", ".join(features) if len(features) < len(FEATURES) else "everything"
        lines.append((f"{ATTENTION.get(op, op)} {kernel}: {named}", reason))
    out.print(_list(lines))


def run(json: bool, everything: bool = False) -> None:
    """Print the report, or its summary."""
    report = collect()
    if json:
        print_json(report)
        return
    out.print(", ".join(f"{name} {version}" for name, version in report["versions"].items()), highlight=False)
    out.print(f"CPU: {report['cpu']}; CANN: {report['cann'] or 'not found'}", highlight=False)
    if not everything:
        _print_summary(report)
        return
    _print_devices()
    if report["ascend"]:
        _print_ascend(report["ascend"])
    _print_requirements(report["requirements"])
    _print_integrations(report["integrations"])
    for backend in report["backends"]:
        _print_backend(backend)
