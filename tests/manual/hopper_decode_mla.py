"""The Hopper kernel over a latent cache on an H100 or H200: right, repeatable, and how fast beside the portable one.

    PYTHONPATH=. python tests/manual/hopper_decode_mla.py [--candidates base scan_32 …]

A candidate is the kernel's source with some lines replaced. Each is compiled and checked in a process of its own, all
at once, and timed in another, one after the other; a process that hangs is killed. GB/s are of the latent keys, once;
"of the limit" is the larger of two shares: of cuBLAS's TFLOP/s in the same process and of 4445 GB/s of plain reads.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "benchmarks")]

import decode as benchmark  # noqa: E402
from kvcache_cases import CacheCase, assert_in_budget, run_case  # noqa: E402

import diyfa  # noqa: E402
from diyfa import plan as planning  # noqa: E402
from diyfa import registry  # noqa: E402
from diyfa.backends.cuda import hopper  # noqa: E402
from diyfa.lab.bench.timing import compute_quantiles, time_calls  # noqa: E402

READS = 4445.0  # GB/s
NAME = "diyfa.backends.cuda.hopper.decode_mla"
SOURCE = ROOT / "backends" / "cuda" / "hopper" / "decode_mla.py"
CANDIDATES: dict[str, list[tuple[str, str]]] = {
    "base": [],
    "scan_32": [("SCAN = gl.constexpr(128)", "SCAN = gl.constexpr(32)")],
}
PORTABLE = "portable"


def latent(name: str, *lens: int, **changes) -> CacheCase:
    case = {"heads": 16, "head_dim": 576, "head_dim_v": 512, "latent": True, "dtype": "bfloat16"}
    return CacheCase(name, lens, **{**case, **changes})


CHECKS = [
    latent("ragged", 0, 1, 64, 150, 700, spare=7),
    latent("heads_128", 1000, 64, heads=128, seqlen_q=2),
    latent("pages", 2000, 33, page_size=64, seqlen_q=3, heads=64),
    latent("many_sequences", *range(1, 400, 25), heads=8, page_size=64),
    latent("leftpad", 70, 200, leftpad=(7, 66), batch_idx=True, causal=False, dtype="float16"),
]
of_128 = benchmark.Case("", (4096,) * 64, 128, 1, 576, 512, latent=True)
TIMED = [
    replace(of_128, name="128 heads, B=64 S=4096"),
    replace(of_128, name="128 heads, B=64 S=4096, page 64", page_size=64),
    replace(of_128, name="128 heads, B=64 S=4096, 2 tokens", seqlen_q=2),
    replace(of_128, name="128 heads, B=132 S=8192, page 64", lens=(8192,) * 132, page_size=64),
    replace(of_128, name="128 heads, B=4 S=32768", lens=(32768,) * 4),
    replace(of_128, name="128 heads, ragged to 16k", lens=tuple(128 + 257 * i for i in range(64))),
    replace(of_128, name="64 heads, B=64 S=4096", heads=64),
    replace(of_128, name="16 heads, B=64 S=4096", heads=16),
    replace(of_128, name="16 heads, B=64 S=4096, 4 tokens", heads=16, seqlen_q=4),
    replace(of_128, name="128 heads, B=1 S=4096", lens=(4096,)),
]


def choose(name: str) -> None:
    """From now on calls with a latent cache run by this candidate, or by the portable kernel."""
    backend = registry.load_backend("cuda")
    planning.plans.clear()
    ours = next(k for k in backend.kernels if (k.name, k.op) == ("sm90", "kvcache_fwd"))
    refused = (lambda problem: "not timed") if name == PORTABLE else (lambda problem: None)
    backend.kernels = tuple(replace(k, by_name_only=refused) if k is ours else k for k in backend.kernels)
    if name == PORTABLE:
        return
    text = SOURCE.read_text()
    for old, new in CANDIDATES[name]:
        assert old in text, f"{name}: {old!r} is not there"
        text = text.replace(old, new)
    path = Path(tempfile.gettempdir()) / f"decode_mla_{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = hopper.decode_mla = module
    spec.loader.exec_module(module)


def call_of(case: benchmark.Case) -> benchmark.Call:
    setup = benchmark.Setup(torch.device("cuda"), 1, 5, 20, 1)
    torch.manual_seed(0)
    return benchmark.calls_of(case, setup, peers=False)["diyfa"]


def check(name: str) -> None:
    """Against the fp64 reference, against the portable kernel, and against itself; lines say what is wrong."""
    failed = 0
    choose(name)
    for case in CHECKS if name == "base" else CHECKS[1:3]:
        start = time.time()
        try:
            with diyfa.use_backend("cuda"):
                out, lse, _, _ = run_case(case, "cuda")
            assert_in_budget(case, out, lse)
            print(f"{name:14}{case.name:20} ok {time.time() - start:5.1f} s", flush=True)
        except AssertionError as error:
            failed += 1
            print(f"{name:14}{case.name:20} WRONG {error}", flush=True)
    for case in TIMED[:3]:
        call = call_of(case)
        first = call().float()
        differs = sum(not torch.equal(first, call().float()) for _ in range(20))
        choose(PORTABLE)
        error = (first - call().float()).abs().max().item()
        choose(name)
        bad = differs > 0 or not error < 3e-2
        failed += bad
        print(f"{name:14}{case.name:36} {'WRONG' if bad else 'ok'}: {error:.1e} off, {differs}/20 differ", flush=True)
    sys.exit(failed > 0)


def measure(name: str) -> None:
    """Times, with a cold L2, in CUDA graphs."""
    device = torch.device("cuda")
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    peak = 2 * 8192**3 / compute_quantiles(time_calls(lambda: a @ a, device, 3, 10))[0] / 1e9
    choose(name)
    for case in TIMED if name in (PORTABLE, "base") else TIMED[:7]:
        ms = compute_quantiles(time_calls(benchmark.captured(call_of(case), device), device, 3, 15))[0]
        tflops, gbs = case.flops / ms / 1e9, case.bytes_read / ms / 1e6
        share = max(tflops / peak, gbs / READS)
        print(
            f"{name:14}{case.name:36}{ms * 1e3:9.1f} us{tflops:8.1f} TFLOP/s{gbs:8.0f} GB/s{share:7.3f} of the limit "
            f"(cuBLAS {peak:.0f})", flush=True,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--check")
    parser.add_argument("--measure")
    parser.add_argument("--seconds", type=float, default=140, help="for all")
    options = parser.parse_args()
    if options.check:
        check(options.check)
    elif options.measure:
        measure(options.measure)
    else:
        end = time.time() + options.seconds
        print(torch.cuda.get_device_name(), flush=True)

        def start(*arguments: str) -> subprocess.Popen:
            return subprocess.Popen([sys.executable, __file__, *arguments])

        def wait(process: subprocess.Popen, until: float) -> int:
            try:
                return process.wait(max(1.0, min(until, end) - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
                return -1

        until = time.time() + 75
        checks = {name: start("--check", name) for name in options.candidates}
        right = {name: wait(process, until) for name, process in checks.items()}
        print(f"checks ended with {right}", flush=True)
        for name in [PORTABLE, *(n for n, code in right.items() if code == 0)]:
            print(f"{name} ended with {wait(start('--measure', name), time.time() + 40)}", flush=True)


if __name__ == "__main__":
    main()
