"""The commands and their options. Each command's work is in a module of its own, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import diyfa
from diyfa.cli.output import err, print_json, writable


def _is_refusal(error: Exception) -> bool:
    """Whether diyfa, PyTorch or the file system cannot do what was asked; all else is a bug."""
    import torch  # not at the top: --help and --version need none of it

    from diyfa.problem import ToolMissing

    return isinstance(error, (ValueError, TypeError, ImportError, OSError, ToolMissing, torch.OutOfMemoryError))


class Commands(TyperGroup):
    """Says in one line, without a traceback, what a command refuses; with --json in a document. Exit status 2."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["json"] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except Exception as error:
            format_message = getattr(error, "format_message", None)  # typer's own have it, such as BadParameter
            if format_message is None and not _is_refusal(error):
                raise
            message = " ".join((format_message() if format_message else str(error) or type(error).__name__).split())
            command = " ".join(filter(None, ["diyfa", ctx.invoked_subcommand]))
            err.print(f"{command}: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
            if ctx.meta["json"]:
                print_json({"ok": False, "error": message})
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
    help="Exact, fast attention for PyTorch on NVIDIA GPUs and Ascend NPUs.",
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
BackendName = Annotated[str | None, typer.Option("--backend", help="Backend to run on; default: by device.")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(diyfa.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def info(
    everything: Annotated[
        bool, typer.Option("--all", help="Also every kernel, the features that it runs, and why not.")
    ] = False,
    json: Json = False,
) -> None:
    """Devices, versions, what each enables, what is missing and how to get it."""
    from diyfa.cli.info import run

    run(json, everything)


@app.command()
def demo(
    steps: Annotated[int | None, typer.Option(min=2, help="Training steps; default: by device.")] = None,
    backend: BackendName = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and text.")] = 0,
    prompt: Annotated[str, typer.Option(help="What the trained model continues.")] = "def ",
    length: Annotated[int, typer.Option(min=0, help="Bytes of text to generate.")] = 300,
    plot: Annotated[
        Path | None, typer.Option(callback=writable, help="Write both loss curves to this PNG (diyfa\\[plot]).")
    ] = None,
    json: Json = False,
) -> None:
    """Train a small GPT with diyfa's attention beside PyTorch's, compare the losses, write text and sort letters."""
    from diyfa.lab.demo.command import run

    raise typer.Exit(run(backend, steps, seed, prompt, length, plot, json))


@app.command()
def validate(
    backend: BackendName = None,
    invariant: Annotated[
        bool, typer.Option("--invariant", help="Compare a small model's training and generation bit for bit instead.")
    ] = False,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model of --invariant.")] = 3,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of its longest sequence; default: 1100 on a GPU, else 96.")
    ] = None,
    json: Json = False,
) -> None:
    """Compare every kernel of this device with the reference under the error budget; exit status 1 when one fails."""
    if invariant:
        from diyfa.lab.invariant import run as run_invariant

        raise typer.Exit(run_invariant(backend, layers, tokens, json))
    from diyfa.lab.validate import run

    raise typer.Exit(run(backend, json))


@app.command()
def bench(
    op: Annotated[str, typer.Option(help="attention, matmul, ceilings or all.")] = "all",
    seq_len: Annotated[list[int] | None, typer.Option(min=1, help="Sequence length; may be repeated.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 4,
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 8,
    head_dim: Annotated[
        int, typer.Option(min=1, max=576, help="Features of a head of Q and K; of V 512 at most.")
    ] = 64,
    causal: Annotated[bool, typer.Option("--causal/--full", help="Whether queries see earlier keys only.")] = False,
    size: Annotated[list[int] | None, typer.Option(min=1, help="Square matmul size; may be repeated.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float16, bfloat16 or float32; default: by device.")] = None,
    warmup: Annotated[
        int | None, typer.Option(min=0, help="Calls before each measurement; default: by device.")
    ] = None,
    rep: Annotated[int | None, typer.Option(min=1, help="Calls measured; default: by device.")] = None,
    backend: BackendName = None,
    spread_limit: Annotated[
        float, typer.Option(min=0, help="Mark figures whose calls spread by more than this, relative to the median.")
    ] = 0.1,
    again: Annotated[bool, typer.Option(help="Measure what the output file already has, too.")] = False,
    output: Annotated[
        Path | None, typer.Option(callback=writable, help="Also write a result file; one that is there is continued.")
    ] = None,
    json: Json = False,
) -> None:
    """Time diyfa beside PyTorch's own implementations on this device, after a check of each result."""
    from diyfa.lab.bench.command import Request, run

    request = Request(
        op, seq_len, batch, heads, head_dim, causal, size, dtype, warmup, rep, backend, spread_limit, again
    )
    raise typer.Exit(run(request, output, json))


@app.command()
def tune(
    seq_len: Annotated[list[int] | None, typer.Option(min=1, help="Sequence length; may be repeated.")] = None,
    head_dim: Annotated[
        list[int] | None,
        typer.Option(min=1, max=576, help="Features of a head of Q and K, of V 512 at most; may be repeated."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 4,
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 16,
    heads_kv: Annotated[int | None, typer.Option(min=1, help="Heads of keys and values; default: as many.")] = None,
    causal: Annotated[
        bool | None,
        typer.Option("--causal/--full", help="Whether queries see earlier keys only; default: both."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "bfloat16",
    backward: Annotated[bool, typer.Option("--backward/--forward", help="Tune the backward kernels, too.")] = True,
    size: Annotated[list[int] | None, typer.Option(min=1, help="Square matmul size; may be repeated.")] = None,
    page_size: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Tune decoding over a cache with such pages, too (0: without); may be repeated."),
    ] = None,
    show: Annotated[
        bool, typer.Option("--list", help="Show what was tuned on this device and measure nothing.")
    ] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Forget what was tuned on this device.")] = False,
    backend: BackendName = None,
    json: Json = False,
) -> None:
    """Measure the tiles of the kernels for problems to come, so that no later call has to."""
    from diyfa.cli.tune import Request, run
    from diyfa.cli.tune import clear as clear_tiles
    from diyfa.cli.tune import show as show_tiles

    if show and clear:
        raise typer.BadParameter("--list and --clear exclude each other")
    request = Request(
        seq_len or [1024, 4096], head_dim or [64, 128], batch, heads, heads_kv, [False, True] if causal is None
        else [causal], dtype, backward, size or [], page_size or [], backend,
    )  # fmt: skip
    raise typer.Exit((show_tiles if show else clear_tiles if clear else run)(request, json))


@app.command("first-run")
def first_run(
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this stage, may be repeated: small tiles, float16, bfloat16, float32, dtypes, operator, tiles, "
            "speed."
        ),
    ] = None,
    smoke: Annotated[bool, typer.Option(help="Tiny sizes, one repetition: does it run?")] = False,
    again: Annotated[bool, typer.Option(help="Forget what an earlier run found.")] = False,
    limit: Annotated[float, typer.Option(min=1, help="Seconds for one step, or one tile.")] = 600,
    output: Annotated[
        Path | None, typer.Option(callback=writable, help="The JSON file; the page stands beside it as text.")
    ] = None,
    json: Json = False,
) -> None:
    """Ascend: check, tune and time everything on this machine; say where it stands; go on where it was cut off."""
    from diyfa.lab.first_run.command import Request, run

    raise typer.Exit(run(Request(output, only or (), smoke, again, limit), json))


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="JSON files that benchmarks have written.")],
    output: Annotated[
        Path | None,
        typer.Option(callback=writable, help="Write one HTML page with plots and tables (diyfa\\[report])."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, for an issue tracker.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Ablations, trials, tile searches and earlier code too, as a table.")
    ] = False,
    json: Json = False,
) -> None:
    """Say where diyfa stands on any number of devices: a summary here, and one HTML page to send."""
    from diyfa.lab.report.command import run

    raise typer.Exit(run(files, output, markdown, everything, json))


@app.command()
def compile(
    target: Annotated[str | None, typer.Argument(help="sm_90, Ascend910B3, 910B3 or another of --list.")] = None,
    only: Annotated[str | None, typer.Option(help="Only kernels or cases whose name contains this.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Of each kernel one in so many cases.")] = 1,
    chip: Annotated[str | None, typer.Option(help="The same as TARGET.")] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="Ascend: fwd, dq, dkdv or dbias; may be repeated.")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Ascend: float16, bfloat16, float32; may be repeated.")
    ] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="Ascend: features of a head; may be repeated.")] = None,
    mode: Annotated[
        list[str] | None, typer.Option(help="Ascend: even, tail, causal, biased, featured or crowded; may be repeated.")
    ] = None,
    tile: Annotated[
        list[str] | None,
        typer.Option(help="Ascend: query rows x keys, not the table's: 128x256; may be repeated."),
    ] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="List the targets, or of TARGET kernels and cases, and compile nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Compile every kernel for a chip without having it; exit status 1 when one does not pass the gate.

    With --kernel, --dtype, --head-dim, --mode or --tile (Ascend) only what they name, else all that is shipped.
    """
    from diyfa.lab.compile import list_cases, list_known, run
    from diyfa.lab.compile_npu import parse_tile

    if listing and target is None and chip is None:
        list_known(json)
        return
    if target is not None and chip is not None:
        raise typer.BadParameter("name the chip once, as TARGET or with --chip", param_hint="--chip")
    name = chip if target is None else target
    if name is None:
        raise typer.BadParameter("name a target, or --list to see them", param_hint="TARGET")
    filters = {"kernel": kernel, "dtype": dtype, "head_dim": head_dim, "mode": mode}
    select: dict[str, object] = {field: tuple(values) for field, values in filters.items() if values}
    if tile:
        select["tile"] = tuple(parse_tile(text) for text in tile)
    raise typer.Exit((list_cases if listing else run)(name, only, json, select or None, every))


@app.command()
def pack(
    arch: Annotated[str, typer.Argument(help="sm_90 or another CUDA architecture; it need not be here.")],
    out: Annotated[Path, typer.Option(help="Folder that the wheel is written to.")] = Path("."),
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes that compile; default: one for each core.")] = None,
    only: Annotated[str | None, typer.Option(help="Only calls whose name contains this.")] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="List the calls that the pack serves, and compile nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Compile the kernels of many calls for a GPU, which need not be here, into a wheel that needs no compiler.

    A second run goes on where the first one was cut off. Exit status 1 when a kernel does not compile.
    """
    from diyfa.cli.pack import parse_arch, run

    raise typer.Exit(run(parse_arch(arch), out, jobs, only, listing, json))


@app.command()
def warmup(
    model: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="config.json of a Hugging Face model: its training and serving."
        ),
    ] = None,
    purpose: Annotated[list[str] | None, typer.Option(help="Of --model: training or serving; default: both.")] = None,
    page_size: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Of --model: keys of a page, 0: none; default: 0, 16 and 256 (on an NPU 128)."),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(help="A call in words: 'attention bfloat16 D=128 H=32/8 B=4 S=2048 causal'; may be repeated."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All that `diyfa pack` compiles.")] = False,
    arch: Annotated[str | None, typer.Option(help="sm_90: for a GPU that is not here; default: this one.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes that compile; default: one for each core.")] = None,
    json: Json = False,
) -> None:
    """Compile what a model or a list of calls will launch into the cache folder, so that no call waits for it."""
    from diyfa.cli.warmup import PURPOSES, Request, run

    if wrong := [each for each in purpose or () if each not in PURPOSES]:
        raise typer.BadParameter(f"must be {' or '.join(PURPOSES)}, got {wrong[0]!r}", param_hint="--purpose")
    pages = None if page_size is None else tuple(page_size)
    request = Request(model, tuple(purpose or PURPOSES), pages, tuple(shapes or ()), every, arch, jobs)
    raise typer.Exit(run(request, json))
