"""The page at the end of `diyfa first-run`: correctness, tiles, speed, a comparison with others, files to send."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from diyfa.cli.table import figure, table
from diyfa.lab.first_run.cases import STAGES

# Published TFLOP/s of the forward pass, float16 or bfloat16, D = 128, no mask: (software and chip, {sequence length:
# TFLOP/s}); length 0: not stated. docs/npu.md has the sources.
PUBLISHED: tuple[tuple[str, dict[int, float]], ...] = (
    ("torch_npu, 910B2", {8192: 97.0, 16384: 123.0, 32768: 151.0}),
    ("PTO, 910B2", {16384: 151.0}),
    ("AscendC, A3", {0: 176.0}),
    ("PTO, normalised from 1 or 2 cores", {0: 183.0}),
)
SLOW = 1.5  # least ratio of bfloat16's time to float16's that is reported
FLOAT16_MAX = 65504  # the largest float16

Row = dict[str, Any]


def _numerics(document: dict[str, Any]) -> Iterator[str]:
    yield "[bold]Is it right?[/bold]"
    rows = document["rows"]
    for stage in STAGES:
        mine = [row for row in rows if row["stage"] == stage and "status" in row]
        if mine:
            bad = [row for row in mine if row["status"] != "pass"]
            verdict = f"[red]{len(bad)} of {len(mine)} wrong or failed[/red]" if bad else f"all {len(mine)} right"
            yield f"  {stage}: {verdict}"
            for row in bad[:5]:
                excess = f"{figure(row['share'])} times the allowed error of {row['result']} " if "share" in row else ""
                yield f"    {escape(row['case'])}: {excess}{escape(row['reason'])}"
    errors = [row for row in rows if row.get("table") == "equivalence"]
    answered = [row for row in errors if "max_error" in row]
    if errors:
        worst: dict[str, float] = {}
        for row in answered:
            who = row["implementation"]
            worst[who] = max(worst.get(who, 0.0), *row["max_error"].values())
        text = ", ".join(f"{who} {error:.1e}" for who, error in worst.items()) or "nobody answered"
        refused = len(errors) - len(answered)
        text += f"; {refused} of {len(errors)} calls refused" if refused else ""
        yield f"  npu_fusion_attention beside float64, largest error: {text}"


def _multibuffer(document: dict[str, Any]) -> Iterator[str]:
    """Yield what was wrong with multibuffering and right without it, and how calls are compiled now."""
    cured = [row for row in document["rows"] if "with_multibuffer" in row]
    if cured:
        yield f"[red]{len(cured)} of the cases above are right only without multibuffering.[/red] With it:"
        yield from (f"    {escape(row['case'])}: {escape(row['with_multibuffer'])}" for row in cured[:5])
    if state := document.get("without_multibuffer"):
        yield f"  Calls are compiled {escape(state)}."
        yield "  DIYFA_NPU_MULTIBUFFER=1 diyfa first-run --again checks them with it; removing the file brings it back."


def _tiles(document: dict[str, Any]) -> Iterator[str]:
    rows = [row for row in document["rows"] if row.get("table") == "tiles"]
    replaced = document["replaced"]
    if not rows and not replaced:
        return
    yield "[bold]Tiles[/bold]"
    if replaced:
        yield f"  The compiler refused the table's tile in {len(replaced)} cases, which ran with smaller ones:"
        yield from (f"    {escape(text.split('. ')[0])}" for text in replaced[:5])
    timed = [row for row in rows if "ms" in row]
    if timed:
        yield f"  {len(timed)} tiles timed; calls now use the fastest (diyfa tune --list)."
    for row in [row for row in rows if "unavailable" in row and row.get("kernel") == "all"][:3]:
        yield f"  Nothing was measured: {escape(row['unavailable'])}"
    refused = [row for row in rows if "unavailable" in row and row.get("kernel") != "all"]
    if refused:
        yield f"  {len(refused)} tiles did not run, such as:"
        for row in refused[:3]:
            yield f"    {row['kernel']} {row['block_m']}x{row['block_n']}, D = {row['D']}: {escape(row['unavailable'])}"


def dtype_times(document: dict[str, Any]) -> dict[str, float]:
    """Return the milliseconds of the forward pass by dtype, and by route, such as "bfloat16 through float32"."""
    rows = [row for row in document["rows"] if row.get("table") == "dtypes" and row.get("pass") == "forward"]
    return {row["implementation"].removeprefix("diyfa, "): row["ms"] for row in rows if "ms" in row}


def _dtypes(document: dict[str, Any]) -> Iterator[str]:
    times = dtype_times(document)
    if not times:
        return
    yield "[bold]Dtypes[/bold] (forward pass, the same size)"
    yield "  " + ", ".join(f"{name} {figure(ms)} ms" for name, ms in times.items())
    half, bfloat = times.get("float16"), times.get("bfloat16")
    if half is None or bfloat is None or bfloat < SLOW * half:
        return
    yield f"  [red]bfloat16 takes {figure(bfloat / half)} times as long as float16 here.[/red] Until that is mended:"
    ways = (
        ("float32", "exact, as it holds every bfloat16", "float"),
        ("float16", f"where no value exceeds {FLOAT16_MAX}", "half"),
    )
    faster = [way for way in ways if times.get(f"bfloat16 through {way[0]}", bfloat) < bfloat]
    for name, exact, method in faster:
        gain = bfloat / times[f"bfloat16 through {name}"]
        yield f"    through {name}, {exact}: {figure(gain)} times as fast, conversions included:"
        named = ", ".join(f"{x}.{method}()" for x in "qkv")
        yield f"      out = diyfa.flash_attention({named}, ...).to(torch.bfloat16)"
    if not faster:
        yield "    nothing: through float32 or float16, conversions included, it is no faster"


def _not_timed(document: dict[str, Any]) -> Iterator[str]:
    rows = [row for row in document["rows"] if row.get("table") in ("dtypes", "attention") and "unavailable" in row]
    if rows:
        yield f"[bold]Not timed[/bold]: {len(rows)} calls, such as"
    for row in rows[:3]:
        who = row.get("implementation", row["dtype"])
        yield f"  {who}, D = {row['D']}, S = {row['S']}: {escape(row['unavailable'])}"


def _standing(document: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the last table: forward, D = 128, no mask, by length, the faster 16-bit dtype."""
    times: dict[str, dict[int, float]] = {}
    for row in document["rows"]:
        mine = row.get("table") == "attention" and row.get("D") == 128 and row.get("causal") is False
        if mine and row.get("pass") == "forward" and row.get("dtype") != "float32" and "tflops" in row:
            who = f"{row['implementation']}, here"
            by_length = times.setdefault(who, {})
            by_length[row["S"]] = max(by_length.get(row["S"], 0.0), row["tflops"])
    if not times:
        return []
    lengths = sorted({n for by_length in times.values() for n in by_length})
    every = [*times.items(), *PUBLISHED]
    return [["", *(f"{n // 1024}K" for n in lengths), "length not said"]] + [
        [who, *(figure(by_length[n]) if n in by_length else "" for n in (*lengths, 0))] for who, by_length in every
    ]


def _to_send(document: dict[str, Any], files: Sequence[Path]) -> Iterator[str]:
    yield "[bold]What to send[/bold]"
    named = " and ".join(str(path) for path in files)
    yield f"  {escape(named)}: attach both to an issue of diyfa. They hold versions, times and error messages, no data."
    failed = [row for row in document["rows"] if row.get("status") in ("FAIL", "error")]
    if failed:
        yield "  Results are wrong or missing: say so in the title, and try DIYFA_NPU_ALWAYS_MASK=1 diyfa first-run"
        yield "  --again --output always-mask.json, which leaves out what is most likely to blame."


def print_page(console: Console, document: dict[str, Any], files: Sequence[Path]) -> None:
    """Print the page. `files`: the paths of the JSON file and of the page."""
    chip = document["chip"]
    console.print(
        f"[bold]diyfa first-run[/bold] on {escape(str(document['device']))}: {chip['cube_cores']} cube and "
        f"{chip['vector_cores']} vector cores, {document['date']}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    console.print(f"  {escape(versions)}", highlight=False, soft_wrap=True)
    if document["switches"]:
        switches = ", ".join(f"{name}={value}" for name, value in document["switches"].items())
        console.print(f"  with {escape(switches)}", highlight=False, soft_wrap=True)
    sections = (_numerics, _multibuffer, _tiles, _dtypes, _not_timed)
    for section in (each(document) for each in sections):
        lines = list(section)
        if lines:
            console.print("\n" + "\n".join(lines), highlight=False, soft_wrap=True)
    rows = _standing(document)
    if rows:
        title = "Where this machine stands: TFLOP/s, forward, D = 128, no mask, 16 bits"
        console.print()
        console.print(table(title, rows[0], [[escape(cell) for cell in row] for row in rows[1:]]))
    console.print("\n" + "\n".join(_to_send(document, files)), highlight=False, soft_wrap=True)


def page(document: dict[str, Any], files: Sequence[Path]) -> str:
    """Return the page as text."""
    console = Console(file=io.StringIO(), width=120, color_system=None)
    print_page(console, document, files)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
