"""The Hopper kernel over a latent cache on an H100 or H200: right, and the same bits in every call.

    PYTHONPATH=. python tests/manual/hopper_decode_mla.py

`benchmarks/decode.py` times it.
"""

from __future__ import annotations

import sys
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


def latent(name: str, *lens: int, **changes) -> CacheCase:
    case = {"heads": 16, "head_dim": 576, "head_dim_v": 512, "latent": True, "dtype": "bfloat16"}
    return CacheCase(name, lens, **{**case, **changes})


CASES = [
    latent("ragged", 0, 1, 64, 150, 700, spare=7),
    latent("heads_128", 1000, 64, heads=128, seqlen_q=2),
    latent("pages", 2000, 33, page_size=64, seqlen_q=3, heads=64),
    latent("many_sequences", *range(1, 400, 25), heads=8, page_size=64),
    latent("leftpad", 70, 200, leftpad=(7, 66), batch_idx=True, causal=False, dtype="float16"),
]
of_128 = benchmark.Case("128 heads, B=64 S=4096", (4096,) * 64, 128, 1, 576, 512, latent=True)
LARGE = [of_128, replace(of_128, name="in pages of 64", page_size=64), replace(of_128, name="2 tokens", seqlen_q=2)]


def choose(runs: bool) -> None:
    """From now on calls with a latent cache run by this kernel, or by the portable one."""
    backend = registry.load_backend("cuda")
    planning.plans.clear()
    backend.kernels = tuple(
        replace(k, by_name_only=lambda problem: None if runs else "not asked for")
        if (k.name, k.op) == ("sm90", "kvcache_fwd")
        else k
        for k in backend.kernels
    )


def main() -> int:
    print(torch.cuda.get_device_name())
    failed = 0
    choose(True)
    for case in CASES:  # against the float64 reference
        try:
            with diyfa.use_backend("cuda"):
                out, lse, _, _ = run_case(case, "cuda")
            assert_in_budget(case, out, lse)
            print(f"{case.name}: ok", flush=True)
        except AssertionError as error:
            failed += 1
            print(f"{case.name}: WRONG {error}", flush=True)
    for case in LARGE:  # against the portable kernel, and against itself
        torch.manual_seed(0)
        call = benchmark.calls_of(case, benchmark.Setup(torch.device("cuda"), 1, 5, 20, 1), peers=False)["diyfa"]
        first = call().float()
        differs = sum(not torch.equal(first, call().float()) for _ in range(20))
        choose(False)
        error = (first - call().float()).abs().max().item()
        choose(True)
        wrong = differs > 0 or not error < 3e-2
        failed += wrong
        print(f"{case.name}: {'WRONG' if wrong else 'ok'}, {error:.1e} off, {differs} of 20 differ", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
