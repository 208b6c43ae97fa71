"""The first run on an Ascend NPU: is everything right, which tiles are fastest, how fast is it beside the vendor's?

    python benchmarks/ascend_first_run.py                  # on the device; minutes for each part, all in one JSON file
    python benchmarks/ascend_first_run.py --only numerics  # one part
    python benchmarks/ascend_first_run.py --smoke          # tiny sizes, one repetition: does the script run?

Needs torch_npu with CANN, and triton-ascend. Four parts:

numerics     every feature in float16, bfloat16 and float32, forward and gradients, against float64 on the CPU; allowed
             is twice the error of PyTorch's own attention in that dtype. And gradients equal from run to run.
equivalence  torch_npu.npu_fusion_attention and diyfa's own on the same calls, both against float64: whether
             docs/npu-fusion-attention.md is right.
tiles        milliseconds of the table's tile and of its neighbours (`configs.candidates`), for the forward, dq and
             dk/dv kernels.
attention    forward and backward of diyfa, with the table's tiles and with the best found, beside the operator, in
             TFLOP/s.

What does not compile or is refused is reported, and the rest goes on. The file is written anew after every line of it,
so a crash of the device costs what came after. `diyfa report FILE`
shows it. Exit status 1 when any numerics fail.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from ascend_cases import FULL, OPERATOR_CASES, SMOKE, OperatorCase, Sizes, numerics_cases

import diyfa
from diyfa.backends.npu.tables import configs
from diyfa.bench.record import default_path, device_name, write_json
from diyfa.bench.timing import quantiles_of, time_calls
from diyfa.bench.work import BACKWARD_FACTOR, attention_flops, tflops
from diyfa.integrations.npu_fusion_arguments import compressed_mask, fusion_attention_arguments
from diyfa.integrations.npu_fusion_attention import npu_fusion_attention
from diyfa.testing import attention_function, check_budget, make_inputs, measure_error, run_case

RESULTS = Path(__file__).parent / "results"
PARTS = ("numerics", "equivalence", "tiles", "attention")
KERNELS = {"fwd": "forward", "dq": "backward", "dkdv": "backward"}  # and the pass whose time a tile of it changes
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

Row = dict[str, Any]
# The best tile found for (kernel, D, causal, dtype), to be used by the attention part.
Tuned = dict[tuple[str, int, bool, str], configs.AttentionTile]


def first_line(error: BaseException) -> str:
    """What went wrong, in one line."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


# ---- numerics ----------------------------------------------------------------------------------------------------


def numerics(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Each case's largest error as a share of what is allowed."""
    for variant, case in numerics_cases(sizes):
        row = {"table": "numerics", "case": case.name, "variant": variant, "dtype": case.dtype}
        try:
            results = run_case(attention_function(case, variant=variant), make_inputs(case, device))
        except Exception as error:  # a kernel that does not compile or crashes is a result of this run
            yield {**row, "status": "error", "reason": first_line(error)}
            continue
        name, check = max(check_budget(results, case).items(), key=lambda item: item[1].share)
        status = "pass" if check.share <= 1 else "FAIL"
        yield {**row, "status": status, "result": name, "share": check.share, "reason": check.problem}
    yield determinism(device, sizes)


def determinism(device: torch.device, sizes: Sizes) -> Row:
    """Outputs and gradients of the same call twice, compared bit by bit."""
    row = {"table": "numerics", "case": "equal from run to run", "variant": "auto", "dtype": "bfloat16"}
    _, case = numerics_cases(replace(sizes, head_dims=()))[1]
    case = replace(case, dtype="bfloat16")
    try:
        first, second = (run_case(attention_function(case), make_inputs(case, device)) for _ in range(2))
    except Exception as error:
        return {**row, "status": "error", "reason": first_line(error)}
    pairs = zip(first._fields, first, second, strict=True)
    differ = [name for name, a, b in pairs if a is not None and not torch.equal(a, b)]
    return {**row, "status": "FAIL" if differ else "pass", "reason": f"differ: {differ}" if differ else ""}


# ---- equivalence -------------------------------------------------------------------------------------------------


def vendors_operator(**arguments: Any) -> Any:
    """`torch_npu.npu_fusion_attention`."""
    import torch_npu

    return torch_npu.npu_fusion_attention(**arguments)


def operator_arguments(case: OperatorCase, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The call of `case`, with leaves that want gradients; the same values for every device and dtype."""
    generator = torch.Generator().manual_seed(0)
    heads, head_dim, seqlen_k = sizes.heads, sizes.head_dim, sizes.seqlen_k
    seqlen_q = {0: seqlen_k, -1: sizes.seqlen_q}[case.seqlen_q]
    heads_kv = case.heads_kv or heads

    def leaf(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).half().to(dtype).to(device).requires_grad_()

    def arranged(s: int, n: int) -> torch.Tensor:
        shapes = {"BSH": (2, s, n * head_dim), "SBH": (s, 2, n * head_dim), "BSND": (2, s, n, head_dim)}
        return leaf(*shapes.get(case.layout, (2 * s, n, head_dim) if case.layout == "TND" else (2, n, s, head_dim)))

    arguments: dict[str, Any] = {
        "query": arranged(seqlen_q, heads), "key": arranged(seqlen_k, heads_kv), "value": arranged(seqlen_k, heads_kv),
        "head_num": heads, "input_layout": case.layout, "scale": head_dim**-0.5, "sparse_mode": case.sparse_mode,
        "pre_tockens": case.tokens[0], "next_tockens": case.tokens[1],
    }  # fmt: skip
    if case.layout == "TND":
        arguments["actual_seq_qlen"] = [seqlen_q // 3, 2 * seqlen_q]
        arguments["actual_seq_kvlen"] = [seqlen_k // 3, 2 * seqlen_k]
    if case.mask == "compressed":
        arguments["atten_mask"] = compressed_mask(device)
    elif case.mask == "dense":
        mask = torch.rand(2, 1, seqlen_q, seqlen_k, generator=generator) < 0.3
        mask[..., 0] = False  # no row without keys: the operator leaves those open
        arguments["atten_mask"] = mask.to(device)
    if case.pse:
        arguments["pse"] = leaf(2, heads, seqlen_q, seqlen_k)
    if case.sink:
        arguments["sink"] = leaf(heads, dtype=torch.float32)
    return arguments


def operator_results(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """out, lse and gradients of q, k, v on the CPU in float64."""
    result = function(**arguments)
    out = result[0]
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype).to(out.device)
    leaves = [arguments[name] for name in ("query", "key", "value")]
    gradients = torch.autograd.grad(out, leaves, dout)
    maximum, total = (x[..., 0].detach().cpu().double() for x in result[1:3])
    named = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    return {"lse": maximum + total.log(), **{name: x.cpu().double() for name, x in named.items()}}


def equivalence(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """The largest error of diyfa and of the operator on each call; `theirs` far above `ours` says the page is wrong."""

    def on_the_cpu(**arguments: Any) -> Any:
        return npu_fusion_attention(**arguments, backend="cpu")

    for case in OPERATOR_CASES:
        truth = operator_results(on_the_cpu, operator_arguments(case, sizes, torch.device("cpu"), torch.float64))
        for who, function in (("diyfa", npu_fusion_attention), ("torch_npu", vendors_operator)):
            row = {"table": "equivalence", "case": case.name, "dtype": "float16", "implementation": who}
            try:
                arguments = operator_arguments(case, sizes, device, torch.float16)
                found = operator_results(function, arguments)
            except Exception as error:
                yield {**row, "unavailable": f"refused: {first_line(error)}"}
                continue
            # TND statistics lie heads first in the operator's memory unless it is told otherwise.
            names = [name for name in truth if not (name == "lse" and case.layout == "TND")]
            errors = {name: measure_error(found[name], truth[name]).max_abs for name in names}
            yield {**row, "max_error": errors}


# ---- tiles -------------------------------------------------------------------------------------------------------


@contextmanager
def tiles(chosen: dict[configs.TileKey, configs.AttentionTile]) -> Iterator[None]:
    """The table with these rows in place of its own."""
    previous = {key: configs.ATTENTION_TILES[key] for key in chosen}
    configs.ATTENTION_TILES.update(chosen)
    try:
        yield
    finally:
        configs.ATTENTION_TILES.update(previous)


def attention_passes(
    size: tuple[int, int, int, int], causal: bool, dtype: torch.dtype, device: torch.device
) -> tuple[list[torch.Tensor], dict[str, Callable[[], Any]]]:
    """q, k, v (B, H, S, D) and the two passes of diyfa on them, ready to be timed. Nothing is launched before."""
    q, k, v, dout = (torch.randn(size).to(dtype).to(device) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def forward() -> None:
        with torch.no_grad():
            diyfa.flash_attention(*leaves, causal)

    @cache
    def output() -> torch.Tensor:
        return diyfa.flash_attention(*leaves, causal)

    return leaves, {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(output(), leaves, dout, retain_graph=True),
    }


def time_tiles(grid: Grid, device: torch.device, tuned: Tuned) -> Iterator[Row]:
    """Every candidate of every kernel at the grid's middle length; the fastest goes to `tuned`."""
    for dtype_, head_dim, causal in grid.cases():
        seq_len = grid.seq_lens[len(grid.seq_lens) // 2]
        size = grid.size(seq_len, head_dim)
        torch.manual_seed(0)
        leaves, passes = attention_passes(size, causal, DTYPES[dtype_], device)
        problem = diyfa.explain(*leaves, causal).problem
        flops = attention_flops(size[0], size[1], seq_len, seq_len, head_dim, causal)
        for kernel, direction in KERNELS.items():
            work = flops * (BACKWARD_FACTOR if direction == "backward" else 1)
            key, best = configs.attention_key(problem, kernel), float("inf")
            found = {
                configs.attention_key(problem, other): tuned[other, head_dim, causal, dtype_]
                for other in KERNELS
                if (other, head_dim, causal, dtype_) in tuned
            }
            for tile in configs.candidates(problem, kernel):
                row = {"table": "tiles", "kernel": kernel, "D": head_dim, "S": seq_len, "causal": causal}
                row |= {"dtype": dtype_, "default": tile == configs.ATTENTION_TILES[key], "pass": direction}
                row |= {name: x for name, x in asdict(tile).items() if name != "measured"}
                try:
                    with tiles({**found, key: tile}):  # a pass needs the other kernels too
                        ms, *_ = quantiles_of(time_calls(passes[direction], device, grid.warmup, grid.rep))
                except Exception as error:  # most likely a tile that the compiler does not take
                    yield {**row, "unavailable": first_line(error)}
                    continue
                if ms < best:
                    best, tuned[kernel, head_dim, causal, dtype_] = ms, tile
                yield {**row, "ms": ms, "tflops": tflops(work, ms)}


# ---- attention ---------------------------------------------------------------------------------------------------


class Grid:
    """What is timed: B·S tokens and H = hidden / D, as in the FlashAttention papers."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.head_dims, self.seq_lens, self.dtypes = options.head_dims, options.seq_lens, options.dtypes
        self.tokens, self.hidden = options.tokens, options.hidden
        self.warmup, self.rep = options.warmup, options.rep

    def cases(self) -> Iterator[tuple[str, int, bool]]:
        """(dtype, D, causal)."""
        return ((t, d, c) for t in self.dtypes for d in self.head_dims for c in (False, True))

    def size(self, seq_len: int, head_dim: int) -> tuple[int, int, int, int]:
        return max(1, self.tokens // seq_len), max(1, self.hidden // head_dim), seq_len, head_dim


def vendors_passes(leaves: list[torch.Tensor], causal: bool) -> dict[str, Callable[[], Any]]:
    """The two passes of `torch_npu.npu_fusion_attention` on the same tensors."""
    arguments = fusion_attention_arguments(*leaves, causal)
    out = vendors_operator(**arguments)[0]
    dout = torch.randn(out.shape).to(out.dtype).to(out.device)

    def forward() -> None:
        with torch.no_grad():
            vendors_operator(**arguments)

    return {"forward": forward, "backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)}


def time_attention(grid: Grid, device: torch.device, tuned: Tuned) -> Iterator[Row]:
    """Both passes of each implementation at every size."""
    for dtype_, head_dim, causal in grid.cases():
        for seq_len in grid.seq_lens:
            size = grid.size(seq_len, head_dim)
            torch.manual_seed(0)
            leaves, passes = attention_passes(size, causal, DTYPES[dtype_], device)
            problem = diyfa.explain(*leaves, causal).problem
            best = {
                configs.attention_key(problem, kernel): tuned[kernel, head_dim, causal, dtype_]
                for kernel in KERNELS
                if (kernel, head_dim, causal, dtype_) in tuned
            }
            candidates: list[tuple[str, dict, Callable[[], dict[str, Callable[[], Any]]]]] = [
                ("diyfa", {}, lambda passes=passes: passes),
                *([("diyfa tuned", best, lambda passes=passes: passes)] if best else []),
                ("torch_npu", {}, lambda leaves=leaves, causal=causal: vendors_passes(leaves, causal)),
            ]
            flops = attention_flops(size[0], size[1], seq_len, seq_len, head_dim, causal)
            case = {"table": "attention", "B": size[0], "H": size[1], "S": seq_len, "D": head_dim, "causal": causal}
            for name, chosen, make in candidates:
                row = {**case, "dtype": dtype_, "implementation": name}
                with tiles(chosen):
                    try:
                        timed = make()
                    except Exception as error:
                        yield {**row, "unavailable": f"refused: {first_line(error)}"}
                        continue
                    for direction, fn in timed.items():
                        work = flops * (BACKWARD_FACTOR if direction == "backward" else 1)
                        try:
                            ms, p20, p80 = quantiles_of(time_calls(fn, device, grid.warmup, grid.rep))
                        except Exception as error:
                            yield {**row, "pass": direction, "unavailable": f"refused: {first_line(error)}"}
                            continue
                        found = {"ms": ms, "ms_p20": p20, "ms_p80": p80, "tflops": tflops(work, ms)}
                        yield {**row, "pass": direction, **found}


# ---- the run -----------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one repetition")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["float16", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=16384, help="B·S")
    parser.add_argument("--hidden", type=int, default=2048, help="H·D")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--rep", type=int, default=20)
    parser.add_argument("--device", default="npu:0")
    parser.add_argument("--output", type=Path, default=None, help="JSON file; default: benchmarks/results/…")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.head_dims, options.seq_lens, options.dtypes = [16], [32], ["float16"]
        options.tokens, options.hidden, options.warmup, options.rep = 32, 16, 0, 1
    return options


def describe(row: Row) -> str:
    """One line for people."""
    what = " ".join(str(row[name]) for name in ("case", "kernel", "implementation") if name in row)
    sizes = " ".join(
        f"{name}={row[name]}" for name in ("dtype", "D", "S", "causal", "block_m", "block_n") if name in row
    )
    if "status" in row:
        share = f"{row['share']:.2f} of what is allowed ({row['result']})" if "share" in row else ""
        return f"{row['status']:5} {what} {share} {row['reason']}"
    if "unavailable" in row:
        return f"{what} {sizes}: {row['unavailable']}"
    if "max_error" in row:
        return f"{what}: " + ", ".join(f"{name} {error:.1e}" for name, error in row["max_error"].items())
    return f"{what} {row['pass']} {sizes}: {row['ms']:.3f} ms, {row['tflops']:.1f} TFLOP/s"


def main(arguments: list[str] | None = None) -> int:
    """Run the parts asked for; 1 when numerics fail."""
    options = parse(arguments)
    import torch_npu  # noqa: F401  # registers the device where autoloading is off

    device, sizes, grid = torch.device(options.device), SMOKE if options.smoke else FULL, Grid(options)
    torch.npu.set_device(device)
    path = options.output or default_path("ascend-first-run", device, RESULTS)
    chip = asdict(diyfa.detect_npu(device.index or 0))
    chip["arch"] = chip["arch"].value
    print(f"{device_name(device)}: {chip['cube_cores']} cube and {chip['vector_cores']} vector cores")
    tuned: Tuned = {}
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "numerics": lambda: numerics(device, sizes),
        "equivalence": lambda: equivalence(device, sizes),
        "tiles": lambda: time_tiles(grid, device, tuned),
        "attention": lambda: time_attention(grid, device, tuned),
    }
    rows: list[Row] = []
    for part in options.only:
        for row in parts[part]():
            rows.append(row)
            print(describe(row), flush=True)
            write_json(path, "ascend first run", device, rows, chip=chip, smoke=options.smoke)
    bad = [row for row in rows if row.get("status") in ("FAIL", "error")]
    print(f"{path}: {len(rows)} rows; numerics: {len(bad)} failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
