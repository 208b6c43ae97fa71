"""diyfa's CUDA matrix product against cuBLAS (`torch.matmul`), every candidate tile by itself.

    python benchmarks/matmul.py [--json matmul.json] [--dtype float16] [--size 4096x4096x4096] [--best-only]

Times are medians of `triton.testing.do_bench`; TFLOP/s count 2·M·N·K. `--json` writes one row for each measurement,
with the device, versions and date that a row of `backends/cuda/matmul/configs.py` cites.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton

from diyfa.arch import gpu_arch_name
from diyfa.backends.cuda.matmul import kernel as matmul
from diyfa.backends.cuda.matmul.configs import MatmulConfig, candidates
from diyfa.backends.cuda.runtime import tune
from diyfa.problem import MatmulProblem

SIZES = (
    *((n, n, n) for n in (512, 1024, 2048, 4096, 8192)),
    (4096, 11008, 4096),
    (16, 8192, 8192),
)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def milliseconds(call: Callable[[], Any]) -> float:
    return triton.testing.do_bench(call, warmup=25, rep=100, return_mode="median")


def tile_name(config: MatmulConfig) -> str:
    flags = f"{' persistent' * config.persistent}{' halves' * config.store_halves}"
    split = f" split{config.split_k}" if config.split_k > 1 else ""
    return (
        f"{config.form} {config.block_m}x{config.block_n}x{config.block_k} "
        f"w{config.num_warps} s{config.num_stages}{split}{flags}"
    )


def measure(size: tuple[int, int, int], dtype: str) -> Iterator[dict[str, Any]]:
    """One row for cuBLAS, then one for each candidate of each form."""
    m, n, k = size
    a = torch.randn(m, k, device="cuda", dtype=DTYPES[dtype])
    b = torch.randn(k, n, device="cuda", dtype=DTYPES[dtype])
    expected = a @ b
    arch = gpu_arch_name(*torch.cuda.get_device_capability())
    problem = MatmulProblem("cuda", arch, dtype, dtype, dtype, m, n, k, aligned=True)

    def row(name: str, ms: float | None, config: MatmulConfig | None = None, note: str = "") -> dict[str, Any]:
        tflops = None if ms is None else 2 * m * n * k / ms * 1e-9
        return {
            "op": "matmul",
            "dtype": dtype,
            "m": m,
            "n": n,
            "k": k,
            "kernel": name,
            "config": None if config is None else asdict(config),
            "ms": ms,
            "tflops": tflops,
            "note": note,
        }

    yield row("cuBLAS", milliseconds(lambda: torch.matmul(a, b)))
    for kernel in matmul.KERNELS:
        if reason := kernel.unsupported(problem):
            yield row(kernel.name, None, note=reason)
            continue
        for config in candidates(problem, kernel.name):
            c = torch.full_like(expected, float("nan"))
            call = lambda c=c, config=config: matmul.run(problem, a, b, c, config)  # noqa: E731
            try:
                call()
            except Exception as error:
                if not tune.cannot_run(error):
                    raise
                yield row(tile_name(config), None, config, f"cannot run: {error}".splitlines()[0])
                continue
            torch.testing.assert_close(c, expected, rtol=2e-2, atol=2e-2 * k**0.5)
            default = " (default)" if config == kernel.config(problem) else ""
            yield row(tile_name(config), milliseconds(call), config, default.strip())


def environment() -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "date": datetime.date.today().isoformat(),
    }


def parse_size(text: str) -> tuple[int, int, int]:
    m, n, k = (int(x) for x in text.split("x"))
    return m, n, k


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: all")
    parser.add_argument("--size", type=parse_size, action="append", help="MxNxK; default: a set of sizes")
    parser.add_argument("--best-only", action="store_true", help="print cuBLAS and the fastest tile of each size")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    known, rows = environment(), []
    print(" · ".join(f"{name} {value}" for name, value in known.items()))
    print(f"{'M x N x K':<20} {'dtype':<9} {'kernel':<48} {'ms':>9} {'TFLOP/s':>8} {'/cuBLAS':>8}")
    for dtype in options.dtype or DTYPES:
        for size in options.size or SIZES:
            found = list(measure(size, dtype))
            rows += [{**known, **r} for r in found]
            cublas, *ours = found
            timed = sorted((r for r in ours if r["ms"] is not None), key=lambda r: r["ms"])
            for r in (cublas, *(timed[:1] if options.best_only else timed)):
                share = cublas["ms"] / r["ms"]
                print(
                    f"{'x'.join(map(str, size)):<20} {dtype:<9} {r['kernel']:<48} {r['ms']:9.4f} {r['tflops']:8.1f} "
                    f"{share:7.1%} {r['note']}",
                    flush=True,
                )
            for r in ours:
                if r["ms"] is None and not options.best_only:
                    print(f"{'x'.join(map(str, size)):<20} {dtype:<9} {r['kernel']:<48} {r['note']}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
