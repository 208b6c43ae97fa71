"""`diyfa warmup`: compile the kernels of a model, or of described calls, before the calls come."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import typer

from diyfa.cli.output import err, out, print_json
from diyfa.cli.pack import compile_missing
from diyfa.ready import calls, models
from diyfa.ready.calls import Call
from diyfa.ready.recording import backend_for_arch, backend_here, record
from diyfa.ready.words import parse

PURPOSES = ("training", "serving")
PAGES = {"cuda": (0, 16, 256), "npu": (0, 16, 128)}  # keys of a page that serving engines use


@dataclass(frozen=True)
class Request:
    """The options of the command."""

    model: Path | None
    purposes: tuple[str, ...]
    pages: tuple[int, ...] | None  # None: `PAGES`
    shapes: tuple[str, ...]
    every: bool
    arch: str | None
    jobs: int | None


def _backend(request: Request) -> str:
    return backend_for_arch(request.arch) if request.arch else backend_here()


def _calls(request: Request) -> list[Call]:
    if request.every:
        return calls.everything()
    listed = [parse(text) for text in request.shapes]
    if request.model is not None:
        model = models.read_model(request.model)
        if "training" in request.purposes:
            listed += models.training(model)
        if "serving" in request.purposes:
            pages = PAGES[_backend(request)] if request.pages is None else request.pages
            listed += [*models.serving(model, pages), *models.serving_more(model, pages)]
    if not listed:
        raise typer.BadParameter("say what for: --model CONFIG.JSON, --shapes WORDS, or --all")
    return listed


def run(request: Request, json: bool) -> int:
    """Compile. Return the exit status: 1 if a kernel does not compile, 2 if no call can run."""
    start = time.monotonic()
    calls = _calls(request)
    name = _backend(request)
    recording = record(name, request.arch, calls)
    kernels = list(recording.kernels.values())
    warmed = compile_missing(kernels, request.jobs, f"compiling for {request.arch or name}", json)
    warmed = warmed._replace(refused=tuple(recording.refused), seconds=round(time.monotonic() - start, 1))
    if json:
        print_json({"backend": name, "calls": [call.name for call in calls], **warmed._asdict()})
    else:
        for reason in recording.refused if not request.every else ():
            err.print(f"cannot run {reason}", markup=False, highlight=False, soft_wrap=True)
        out.print(
            f"{len(calls) - len(recording.refused)} calls: {warmed.kernels} kernels, of which {warmed.compiled} were "
            f"compiled in {warmed.seconds} s",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    return 2 if not kernels else 1 if warmed.failures else 0
