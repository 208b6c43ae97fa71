"""Benchmark of float8 attention on an H100 or H200: tiles of the Hopper kernel, bfloat16, cuDNN, the portable kernel.

    python benchmarks/float8.py [--head-dims 128 64 256] [--masks full causal] [--only 3/8] [--budget 230]

Each implementation at a head dim runs in its own process; one that hangs or fails costs only its time-out. All of a
head dim compile first. Then they are measured alternately: `triton.testing.do_bench` times replays of a CUDA graph.
 16384 tokens, heads * head_dim = 2048; TFLOP/s count 4·B·H·S²·D, half with a causal mask. N(0, 1) data, one
descale for each tensor. Every implementation is checked first: `error` is the norm of out's error against float64
attention of the tensors that it gets, float8 or bfloat16, over the norm of out. Implementations:

    a tile           the Hopper kernel with this config; V is transposed inside the call.
    auto             the config of the table
    auto, no V       the same without the transposition of V: what a V that was stored transposed would save
    transpose        the transposition of V alone; its TFLOP/s have no meaning
    auto, quantise   the same, after `diyfa.quantize` of q, k and v from bfloat16
    auto, block      one descale for each block of q and k, and means of k and v
    bf16             our bfloat16 kernel
    cudnn            PyTorch's SDPA by cuDNN, bfloat16
    cudnn-float8     cuDNN's float8 forward through cudnn-frontend, if that is installed; out is float8, too
    v2               our portable float8 kernel

Prints rows, then a table for each head dim and mask with the shares of bf16, cudnn and cudnn-float8. Writes a result
file to --output.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hopper_sweep import error_of
from served import Served, watchdog

import diyfa
from diyfa.backends.cuda.hopper.configs import Sm90Config
from diyfa.lab.bench.record import write_json

TOKENS, HIDDEN = 16384, 2048
SEQ_LENS = (4096, 16384)
COMPILE_LIMIT = 150  # seconds
OTHERS = ("bf16", "cudnn", "cudnn-float8", "v2")
TABLE = ("auto", "auto, no V", "transpose", "auto, quantise", "auto, block")
OUT_SCALE = 16.0  # of cuDNN's out, for which e4m3 has 448 as its largest number
WRONG = 0.06  # a larger error is no rounding error: weights of e4m3 make 0.02 to 0.03
C = Sm90Config
# Tiles to compare: rows of a tile / 64 x keys, then what differs from the table's schedule. Causal ones are dynamic.
TILES: dict[int, dict[str, Sm90Config]] = {
    64: {
        "3x128": C(3, 128, 8, True, 160, 32, persistent=True, pingpong=True),
        "2x256": C(2, 256, 8, True, 240, 24, persistent=True, pingpong=True),
    },
    128: {
        "2x128": C(2, 128, 8, True, 240, 24, persistent=True, pingpong=True),
        "2x128 Q": C(2, 128, 8, True, 240, 24, persistent=True, pingpong=True, q_in_registers=1),
        "3x64": C(3, 64, 12, True, 160, 32, persistent=True, pingpong=True),
    },
    256: {
        "2x128": C(2, 128, 4, False, 240, 24, persistent=True, pingpong=True, store_from_registers=True),
        "2x128 free": C(2, 128, 4, False, 240, 24, persistent=True, store_from_registers=True),
    },
}  # fmt: skip
Call = Callable[[], torch.Tensor]


def config_named(head_dim: int, name: str, causal: bool) -> Sm90Config:
    return replace(TILES[head_dim][name], scheduler="dynamic" if causal else "static")


def sizes(head_dim: int, seqlen: int) -> tuple[int, int, int, int]:
    """Return (B, H, S, D) of a point."""
    return max(1, TOKENS // seqlen), HIDDEN // head_dim, seqlen, head_dim


# ---- in the implementation's own process


def _hopper(name: str, config: Sm90Config | None, given: tuple[Any, ...], causal: bool) -> Call:
    """Return a call of the Hopper kernel on float8, by its launches. `config`: None for the table's."""
    from diyfa.backends.cuda.attention.launch import use_config
    from diyfa.backends.cuda.hopper import configs as hopper_configs
    from diyfa.backends.cuda.hopper import fwd_launch as hopper_fwd_launch
    from diyfa.backends.cuda.runtime.passes import launch_each
    from diyfa.eight_bits import PER_BLOCK, PER_HEAD, PER_TENSOR
    from diyfa.problem import AttentionProblem, AttentionTensors

    q, k, v = given
    b, h, s, d = q.values.shape
    in_blocks = name == "auto, block"
    kinds = (PER_BLOCK, PER_BLOCK, PER_HEAD) if in_blocks else (PER_TENSOR,) * 3
    descales = dict(zip(("q_descale", "k_descale", "v_descale"), kinds, strict=True))
    problem = AttentionProblem(
        "cuda", "sm_90", "float8_e4m3fn", "bhsd", b, h, h, s, s, d, d, -1, 0 if causal else -1, out_dtype="bfloat16",
        k_mean=in_blocks, v_mean=in_blocks, **descales,
    )  # fmt: skip
    out = torch.empty(q.values.shape, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty((b, h, s), dtype=torch.float32, device="cuda")
    tensors = AttentionTensors(
        q.values, k.values, v.values, d**-0.5, q_descale=q.descale, k_descale=k.descale, v_descale=v.descale,
        k_mean=k.mean, v_mean=v.mean,
    )  # fmt: skip
    with use_config("sm90", config or hopper_configs.select_config):
        described = hopper_fwd_launch.forward_pass(problem, tensors, out, lse)
    launch_each(described.launches)
    parts = {"auto, no V": slice(1, None), "transpose": slice(0, 1)}
    launches = described.launches[parts.get(name, slice(None))]

    def call() -> torch.Tensor:
        launch_each(launches)
        return out

    call.memory = described.memory  # type: ignore[attr-defined]  what the launches write
    return call


def _cudnn_float8(given: tuple[Any, ...], causal: bool) -> Call:
    """Return a call of cuDNN's float8 forward, with weights times 256 and out times OUT_SCALE."""
    import cudnn

    one = [1, 1, 1, 1]
    q, k, v = given
    out = torch.empty(q.values.shape, dtype=torch.float8_e4m3fn, device="cuda")
    numbers = {
        "descale_q": q.descale, "descale_k": k.descale, "descale_v": v.descale, "descale_s": 1 / 256, "scale_s": 256.0,
        "scale_o": OUT_SCALE,
    }  # fmt: skip
    scales = {name: torch.as_tensor(x, dtype=torch.float32, device="cuda").reshape(one) for name, x in numbers.items()}
    maxima = [torch.empty(one, dtype=torch.float32, device="cuda") for _ in range(2)]
    float32, handle = cudnn.data_type.FLOAT, cudnn.create_handle()
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.FP8_E4M3, intermediate_data_type=float32, compute_data_type=float32,
        handle=handle,
    )  # fmt: skip

    def operand(x: torch.Tensor) -> Any:
        return graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=cudnn.data_type.FP8_E4M3)

    inputs = {name: operand(x.values) for name, x in zip("qkv", given, strict=True)}
    factors = {name: graph.tensor(dim=one, stride=one, data_type=float32) for name in scales}
    results = graph.sdpa_fp8(
        **inputs, **factors, is_inference=True, attn_scale=q.values.shape[-1] ** -0.5, use_causal_mask=causal
    )
    node = results[0].set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride()))
    node.set_data_type(cudnn.data_type.FP8_E4M3)
    for maximum in results[2:]:
        maximum.set_output(True).set_dim(one).set_stride(one).set_data_type(float32)
    graph.build([cudnn.heur_mode.A])
    memory = {inputs[name]: x.values for name, x in zip("qkv", given, strict=True)}
    memory |= {factors[name]: x for name, x in scales.items()} | {results[0]: out}
    memory |= dict(zip(results[2:], maxima, strict=True))
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")

    def cudnn_float8() -> torch.Tensor:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(memory, workspace, handle=handle)
        return out

    return cudnn_float8


def _bfloat16(name: str, inputs: list[torch.Tensor], causal: bool) -> Call:
    if name == "cudnn":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def cudnn() -> torch.Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=causal)

        return cudnn
    return lambda: diyfa.flash_attention(*inputs, causal=causal)


def make_call(name: str, head_dim: int, seqlen: int, causal: bool) -> tuple[Call, list[torch.Tensor]]:
    """Return (call of an implementation, the numbers that its inputs stand for)."""
    torch.manual_seed(0)
    inputs = [torch.randn(sizes(head_dim, seqlen), device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    if name in ("bf16", "cudnn"):
        return _bfloat16(name, inputs, causal), inputs
    in_blocks = name == "auto, block"
    given = diyfa.quantize(*inputs, per="block" if in_blocks else "tensor", smooth=in_blocks)
    exact = [_numbers(x, block) for x, block in zip(given, (128, 64, 1), strict=True)]
    if name == "cudnn-float8":
        return _cudnn_float8(given, causal), exact
    if name == "v2":
        return lambda: diyfa.flash_attention(*given, causal=causal, variant="v2"), exact
    if name == "auto, quantise":
        return lambda: diyfa.flash_attention(*diyfa.quantize(*inputs), causal=causal, variant="sm90"), exact
    config = None if name in TABLE else config_named(head_dim, name, causal)
    return _hopper(name, config, given, causal), exact


def _numbers(x: Any, block: int) -> torch.Tensor:
    """Return the first two heads of what a `Quantized` stands for, in float64."""
    from diyfa.eight_bits import dequantised

    heads = x.descale if x.descale.numel() == 1 else x.descale[:1, :2]
    mean = None if x.mean is None else x.mean[:1, :2]
    return dequantised(x.values[:1, :2], heads, torch.float64, block, mean)


def captured(call: Call) -> Call:
    """Return the replay of a CUDA graph of a call."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = call()

    def replay(call: Call = call) -> torch.Tensor:  # holds what the call reads and writes
        graph.replay()
        return out

    return replay


def serve(name: str, head_dim: int, options: argparse.Namespace) -> None:
    """Compile and check one implementation at every point, then measure those whose index is on a line of stdin."""
    from triton.testing import do_bench

    calls, errors = [], []
    with watchdog(COMPILE_LIMIT):
        for mask, seqlen in points(options):
            causal = mask == "causal"
            try:
                call, inputs = make_call(name, head_dim, seqlen, causal)
                call()  # compiles
                torch.cuda.synchronize()
                scale = OUT_SCALE if call.__name__ == "cudnn_float8" else 1.0
                errors.append(float(f"{error_of(call()[:1, :2].double() / scale, *inputs, causal):.2e}"))
                del inputs
                calls.append(call if name == "cudnn-float8" else captured(call))
                torch.cuda.synchronize()
            except Exception as error:  # of any library; this implementation is left out
                print(json.dumps({"unavailable": f"{type(error).__name__}: {error}"[:300]}), flush=True)
                return
    print(json.dumps({"ready": name}), flush=True)
    for line in sys.stdin:
        i = int(line)
        with watchdog(options.limit):
            ms = do_bench(calls[i], warmup=10, rep=options.rep, return_mode="median")
        print(json.dumps({"ms": ms, "error": errors[i]}), flush=True)


# ---- the benchmark


def names_of(head_dim: int, only: list[str]) -> list[str]:
    """Return the names of the implementations at a head dim."""
    tiles = [name for name in TILES[head_dim] if not only or any(part in name for part in only)]
    return [*OTHERS, *TABLE, *tiles]


def points(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Return the (mask, length) that are measured at each head dim."""
    return [(mask, seqlen) for mask in options.masks for seqlen in options.seq_lens]


def _command(name: str, head_dim: int, options: argparse.Namespace) -> list[str]:
    command = [sys.executable, __file__, "--serve", name, "--head-dims", str(head_dim), "--masks", *options.masks]
    command += ["--limit", str(options.limit), "--rep", str(options.rep)]
    return [*command, "--seq-lens", *map(str, options.seq_lens)]


def measure(head_dim: int, options: argparse.Namespace, deadline: float) -> Iterator[dict[str, Any]]:
    """Yield the rows of all implementations at a head dim. They alternate, so that a hot GPU slows all."""
    served = [Served(name, _command(name, head_dim, options)) for name in names_of(head_dim, options.only)]
    try:
        alive = [each for each in served if each.answer() is not None]
        times: dict[tuple[str, int], list[float]] = {}
        errors: dict[tuple[str, int], float] = {}
        for turn in range(options.rounds):
            for i in range(len(points(options))):
                for each in alive if turn % 2 == 0 else alive[::-1]:
                    if each.reason or time.monotonic() > deadline:
                        continue
                    answer = each.ask(i)
                    if answer is not None:
                        times.setdefault((each.name, i), []).append(answer["ms"])
                        errors[each.name, i] = answer["error"]
        for (name, i), milliseconds in times.items():
            mask, seqlen = points(options)[i]
            b, h, s, d = sizes(head_dim, seqlen)
            ms, causal = median(milliseconds), mask == "causal"
            work = 4 * b * h * s * s * d / 1e9 * (0.5 if causal else 1)
            row = {"implementation": name, "D": head_dim, "causal": causal, "S": s, "B": b, "H": h}
            row |= {"ms": round(ms, 4), "tflops": round(work / ms, 1), "error": errors[name, i]}
            yield row | {"spread": round((max(milliseconds) - min(milliseconds)) / ms, 3), "rounds": len(milliseconds)}
        for each in served:
            if each.reason or each not in alive:
                yield {"implementation": each.name, "D": head_dim, "unavailable": each.reason}
    finally:
        for each in served:
            each.close()


def print_table(rows: list[dict[str, Any]], causal: bool, seqlens: list[int]) -> None:
    """Print rows with a mask: TFLOP/s at each length, the shares of bf16, cudnn and cudnn-float8 at it, the error."""
    here = [row for row in rows if row.get("causal") == causal]
    rate = {(row["implementation"], row["S"]): row["tflops"] for row in here}
    errors = {row["implementation"]: row["error"] for row in here}
    mask = "causal" if causal else "full"
    print(f"\nD={rows[0]['D']} {mask}, S = {seqlens}: TFLOP/s, shares of bf16, cudnn, cudnn-float8; error")
    longest = max(seqlens)
    for name in sorted(errors, key=lambda name: -rate.get((name, longest), 0)):
        cells = []
        for s in seqlens:
            own = rate.get((name, s))
            shares = [
                f"{own / rate[peer, s]:.2f}" if own and (peer, s) in rate else "-"
                for peer in ("bf16", "cudnn", "cudnn-float8")
            ]
            cells.append(f"{own or float('nan'):7.1f} {'/'.join(shares):15}")
        wrong = "  WRONG" if not errors[name] < WRONG else ""
        print(f"  {name:16} {'  '.join(cells)} {errors[name]:.1e}{wrong}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", nargs="+", type=int, default=[128, 64, 256], choices=list(TILES))
    parser.add_argument("--masks", nargs="+", default=["full", "causal"], choices=["full", "causal"])
    parser.add_argument("--seq-lens", nargs="+", type=int, default=list(SEQ_LENS))
    parser.add_argument("--only", nargs="*", default=[], help="tiles whose name contains one of these")
    parser.add_argument("--budget", type=float, default=230, help="seconds for everything")
    parser.add_argument("--limit", type=float, default=10, help="seconds for one measurement, which hangs beyond them")
    parser.add_argument("--rep", type=int, default=25, help="milliseconds of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each point, whose median counts")
    parser.add_argument("--output", type=Path, default=None, help="result file, written after each head dim")
    parser.add_argument("--serve", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve, options.head_dims[0], options)
        return
    deadline = time.monotonic() + options.budget
    rows: list[dict[str, Any]] = []
    for head_dim in options.head_dims:
        if time.monotonic() > deadline:
            print(f"no time left for D={head_dim}")
            continue
        for row in measure(head_dim, options, deadline):
            rows.append(row)
            print(json.dumps(row), flush=True)
        if options.output is not None:
            results = [{"kind": "attention", "pass": "forward", **each} for each in rows]
            write_json(options.output, "float8", torch.device("cuda"), results, "tile search")
    for head_dim in options.head_dims:
        here = [row for row in rows if row["D"] == head_dim]
        for mask in options.masks if here else ():
            print_table(here, mask == "causal", options.seq_lens)
        for row in here:
            if "unavailable" in row:
                print(f"  {row['implementation']:16} unavailable: {row['unavailable'][-200:]}")


if __name__ == "__main__":
    main()
