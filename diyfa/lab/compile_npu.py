"""`diyfa compile` for Ascend chips: names of chips and tiles, and the table of results."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from diyfa.arch import NPU_SPECS, OTHER_NPUS, npu_spec
from diyfa.cli.table import fits, table
from diyfa.lab.compile_report import CompileReport

FAMILY = "Ascend"
NOTE = (
    "Per tile of scores and AI core, from the compiler's last intermediate form. Cycles and shares of the peak are "
    "predicted by a model (docs/npu-cost-model.md), not measured. L0A and L0B are not in that form: their use follows "
    "from the products and from how the compiler's library cuts them (on the 950 that is not known)."
)
HEADINGS = (
    "UB\nKiB", "L1\nKiB", "L0A\nKiB", "L0B\nKiB", "L0C\nKiB", "bound", "pipe", "passes\n+mask",
    "cube\nMFLOP", "vector\nKi el.", "cycles\ncube/vec/mem", "GM KiB\ntensors+ws", "predicted\nof peak",
)  # fmt: skip


def chip_name(name: str) -> str | None:
    """Return the full name of the chip `name`, written in any case and with or without "Ascend", or None.

    The name of a family gives its first chip. "910B" gives None: it is the name of another chip
    (`diyfa.arch.OTHER_NPUS`).
    """
    lower = name.lower()
    for chip in NPU_SPECS:
        if lower in (chip.lower(), chip.lower().removeprefix(FAMILY.lower())):
            return chip
    for chip, spec in NPU_SPECS.items():
        family = spec.arch.value
        if family not in OTHER_NPUS and lower in (family.lower(), family.lower().removeprefix(FAMILY.lower())):
            return chip
    for full in (name, FAMILY + name):
        if npu_spec(full) is not None:
            return full
    return None


def parse_tile(text: str) -> tuple[int, int]:
    """Return rows and keys of a tile: "128x256" -> (128, 256). Raises typer.BadParameter for other forms."""
    rows, _, keys = text.lower().partition("x")
    if not (rows.isdigit() and keys.isdigit()):
        raise typer.BadParameter(f"{text!r} is not a tile: write query rows x keys, as in 128x256", param_hint="--tile")
    return int(rows), int(keys)


def _kib(size: float) -> str:
    return f"{size / 1024:.0f}"


def _count_text(always: str, masked: str) -> str:
    return always if masked in ("0", "0.0") else f"{always}+{masked}"


def _memory_text(report: CompileReport, memory: str) -> str:
    """Return used / available KiB of a memory, such as "180/192", or "?/192" if the use is not known."""
    bytes_used = report.memory.get(memory, None if memory in ("l0a", "l0b") else 0)
    return f"{'?' if bytes_used is None else _kib(bytes_used)}/{_kib(report.limits[memory])}"


def cases(reports: list[CompileReport]) -> list[str]:
    """Return the case of each report, with the compiler if there are several."""
    several = len({report.compiler for report in reports}) > 1
    return [f"{report.case} [{report.compiler}]" if several else report.case for report in reports]


def _row(report: CompileReport) -> list[str]:
    """Return the cells of one kernel, for its loop over tiles, or the first of two."""
    if not report.memory:  # it did not compile
        return [""] * len(HEADINGS)
    memory = [_memory_text(report, name) for name in ("ub", "l1", "l0a", "l0b", "l0c")]
    metrics = report.metrics
    if not metrics:
        return [*memory, *[""] * 8]
    tile: dict[str, Any] = metrics["loops"][0]["tile"] if metrics["loops"] else {}
    mask: dict[str, Any] = metrics["loops"][0]["mask_adds"] if metrics["loops"] else {}
    if not tile:
        return [*memory, "", "", *[""] * 6]
    bound = "yes" if metrics["bound"] else "no"
    passes = _count_text(f"{tile['vector_passes_per_score']:.1f}", f"{mask['vector_passes_per_score']:.1f}")
    cycles = "/".join(str(tile[f"{name}_cycles"]) for name in ("cube", "vector", "memory"))
    tensors = _kib(tile["loaded_bytes"] + tile["stored_bytes"])
    workspace = _kib(tile["workspace_read_bytes"] + tile["workspace_written_bytes"])
    fraction = metrics.get("prediction", {}).get("predicted_share_of_cube_peak")
    return [
        *memory,
        bound,
        str(metrics["pipelined"]),
        passes,
        f"{tile['cube_flops'] / 1e6:.1f}",
        _count_text(f"{tile['vector_elements'] / 1024:.0f}", f"{mask['vector_elements'] / 1024:.0f}"),
        cycles,
        f"{tensors}+{workspace}",
        "" if fraction is None else f"{100 * fraction:.0f} %",
    ]


def shown(target: str, reports: list[CompileReport], console: Console) -> RenderableType:
    """Return the table, or a paragraph for each kernel if the table does not fit `console`."""
    full_table = _table(target, reports)
    return full_table if fits(full_table, console) else paragraphs(target, reports)


def paragraphs(target: str, reports: list[CompileReport]) -> RenderableType:
    """Return the cells of the table with their headings as text, for narrow terminals and files."""
    lines = [f"{target}: {len(reports)} compilations", NOTE]
    for report, case in zip(reports, cases(reports), strict=True):
        cells = zip(HEADINGS, _row(report), strict=True)
        named = [f"{heading.replace(chr(10), ' ')} {cell}" for heading, cell in cells if cell]
        lines.append(f"\n{report.kernel} {case}: {'ok' if report.ok else 'FAILED'}, {report.seconds:.1f} s")
        lines.append("  " + ", ".join(named))
    return Text("\n".join(lines))


def _table(target: str, reports: list[CompileReport]) -> Table:
    """Return a table with one row for each kernel; units are in the headings."""
    rows = [
        [escape(r.kernel), escape(case), *_row(r), f"{r.seconds:.1f}", "ok" if r.ok else "FAILED"]
        for r, case in zip(reports, cases(reports), strict=True)
    ]
    styles = [None if r.ok else "bold red" for r in reports]
    title = f"{target}: {len(reports)} compilations"
    return table(title, ["kernel", "case", *HEADINGS, "s", "result"], rows, styles, caption=NOTE)
