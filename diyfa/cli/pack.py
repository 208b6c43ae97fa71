"""`diyfa pack`: a wheel of compiled kernels for one architecture, built on any machine."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import typer

import diyfa
from diyfa.cli.output import err, out, print_json, progress_bar
from diyfa.ready import calls
from diyfa.ready.building import Built, cores
from diyfa.ready.recording import Recorded, record
from diyfa.ready.warming import Warmed, warm
from diyfa.ready.wheel import write_wheel
from diyfa.registry import load_backend

MEGABYTE = 1 << 20


def compile_missing(kernels: list[Recorded], jobs: int | None, progress_text: str, json: bool) -> Warmed:
    """Compile the kernels that are not compiled yet, with a progress bar."""
    with progress_bar(not json) as progress:
        task = progress.add_task(progress_text, total=None, note="")
        failed = 0

        def watch(count: int, total: int, built: Built) -> None:
            nonlocal failed
            failed += bool(built.error)
            note = built.name + (f", {failed} failed" if failed else "")
            progress.update(task, completed=count, total=total, note=note)

        warmed = warm(kernels, jobs or cores(), watch)
    for failure in warmed.failures:
        err.print(f"FAILED {failure}", markup=False, highlight=False, soft_wrap=True)
    return warmed


def run(arch: str, folder: Path, jobs: int | None, only: str | None, listing: bool, json: bool) -> int:
    """Compile what is not compiled yet and write the wheel. Return the exit status."""
    backend: Any = load_backend("cuda")
    start = time.monotonic()
    every = [call for call in calls.everything() if only is None or only in call.name]
    recording = record("cuda", arch, every)
    if listing:
        return _list(arch, every, recording.refused, json)
    if not recording.kernels:
        err.print(f"Nothing is compiled: no call that {arch} runs matches {only!r}. --list shows them.")
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    warmed = compile_missing(list(recording.kernels.values()), jobs, f"compiling for {arch}", json)
    if warmed.failures:
        return 1
    with tempfile.TemporaryDirectory() as temporary:
        module = backend.write_pack(arch, recording.kernels.values(), Path(temporary))
        files = {f"{module.name}/{file.name}": file.read_bytes() for file in sorted(module.iterdir())}
    summary, local = f"Compiled kernels of diyfa for {arch}", "" if only is None else "some"
    wheel = write_wheel(folder, module.name, diyfa.__version__, summary, files, local=local)
    size = wheel.stat().st_size
    report = {
        "arch": arch, "wheel": str(wheel), "bytes": size, "calls": len(every) - len(recording.refused),
        "kernels": len(recording.kernels), "compiled": warmed.compiled, "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip
    if json:
        print_json(report)
    else:
        out.print(
            f"{wheel}: {report['kernels']} kernels for {report['calls']} calls, {size / MEGABYTE:.1f} MB; "
            f"{report['compiled']} were compiled, in {report['seconds']} s",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    return 0


def _list(arch: str, every: list[calls.Call], refused: list[str], json: bool) -> int:
    """Print the calls that the pack serves. Return the exit status 0."""
    names = [call.name for call in every]
    if json:
        print_json({"arch": arch, "calls": names, "refused": refused})
        return 0
    without = {reason.partition(":")[0] for reason in refused}
    for name in names:
        if name not in without:
            out.print(name, markup=False, highlight=False, soft_wrap=True)
    return 0


def parse_arch(arch: str) -> str:
    """Return the architecture's name: `"90"` -> `"sm_90"`. Raises typer.BadParameter for other names."""
    name = arch if arch.startswith("sm_") else f"sm_{arch}"
    if not name[3:].isdigit():
        raise typer.BadParameter(f"name a CUDA architecture such as sm_90, got {arch!r}", param_hint="ARCH")
    return name
