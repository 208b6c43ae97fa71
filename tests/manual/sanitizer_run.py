"""Forward and backward at odd shapes, for NVIDIA's compute-sanitizer (needs a GPU):

    PYTHONPATH=. python tests/manual/sanitizer_run.py        # fills the compile cache
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=. compute-sanitizer --tool memcheck python tests/manual/sanitizer_run.py
    PYTHONPATH=. compute-sanitizer --tool racecheck python tests/manual/sanitizer_run.py

With `hopper`, `portable` or `kvcache` behind the file's name only those kernels, with `--part 0/4` a quarter of
Hopper's configs. racecheck names one thing in Hopper configs (docs/log/hopper.md, "Tested on a GPU"): Triton's own
handing over, in the lines of the kernel's `def` and of what follows its partitions, of which `racecheck_barriers.cu`
shows that it is no race. Any other is one. Every tensor ends where its allocation ends: an access beyond a sequence is
an access beyond its memory.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from diyfa import triton_matmul
from diyfa.backends.cuda import backend
from diyfa.backends.cuda.attention.configs import candidates
from diyfa.backends.cuda.attention.launch import use_config
from diyfa.problem import AttentionProblem
from diyfa.testing import AttentionCase, attention_function, make_inputs, run_case

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

PLAIN: dict[str, Any] = {"causal": True, "dtype": "float16"}
PORTABLE = [
    AttentionCase("narrow", 1, 2, 1, 129, 65, 40, **PLAIN),
    AttentionCase("bshd", 2, 2, 2, 77, 201, 64, layout="bshd", **PLAIN),
    AttentionCase("full", 1, 2, 1, 67, 131, 128),
    AttentionCase("wide", 1, 1, 1, 131, 131, 256, layout="bshd", **PLAIN),
    AttentionCase("samples", 2, 2, 1, 99, 99, 64, seq_lens=(98, 85), **PLAIN),
    AttentionCase("v1", 1, 2, 1, 70, 90, 64, all_variants=True, **PLAIN),
]
# Also launched through TMA, which problems so small do not do of themselves.
LENS: dict[str, Any] = {"layout": "thd", "lens_q": (37, 0, 70, 129), "lens_k": (41, 9, 70, 131)}
EVERY: dict[str, Any] = {"window": (50, 3), "softcap": 5.0, "dropout_p": 0.2, "sinks": True}
FEATURES = [
    *(AttentionCase("packed", 0, 4, 2, head_dim=64, **LENS, causal=causal) for causal in (False, True)),
    *(
        AttentionCase("all", 0, 4, 2, head_dim=64, **LENS, **EVERY, alibi="h", causal=causal)
        for causal in (False, True)
    ),
    *(
        AttentionCase("bias", 2, 4, 2, 77, 131, 64, bias=bias, seq_lens=lens, **EVERY)
        for bias in ("b1qk", "1h1k", "q1")
        for lens in (None, (131, 50))
    ),
]
# Of the Hopper kernel: large enough for it and for the rows of its table, the last one for its small tile.
BFLOAT16: dict[str, Any] = {"dtype": "bfloat16"}
HOPPER = [
    AttentionCase("causal_128", 2, 32, 8, 333, 517, 128, causal=True, **BFLOAT16),
    AttentionCase("full_128", 2, 32, 32, 333, 517, 128, **BFLOAT16),
    AttentionCase("causal_64", 2, 32, 8, 333, 517, 64, causal=True, **BFLOAT16),
    AttentionCase("long_causal_64", 1, 16, 16, 2085, 2085, 64, causal=True, **BFLOAT16),
    AttentionCase("full_64", 2, 48, 48, 517, 333, 64, **BFLOAT16),
    AttentionCase("causal_256", 2, 32, 8, 333, 389, 256, causal=True, **BFLOAT16),
    AttentionCase("full_256", 2, 32, 32, 333, 389, 256, **BFLOAT16),
    AttentionCase("causal_96", 2, 32, 32, 333, 517, 96, causal=True, **BFLOAT16),
    AttentionCase("causal_192_128", 2, 32, 32, 333, 517, 192, 128, causal=True, **BFLOAT16),
    AttentionCase("causal_192", 2, 32, 32, 333, 517, 192, causal=True, **BFLOAT16),
    AttentionCase("window_softcap", 2, 32, 8, 333, 517, 128, window=(100, 20), softcap=5.0, **BFLOAT16),
    AttentionCase("samples", 2, 32, 32, 333, 517, 128, seq_lens=(517, 50), causal=True, **BFLOAT16),
    AttentionCase("long_64", 1, 48, 48, 768, 2500, 64, **BFLOAT16),
    AttentionCase("long_128", 1, 40, 40, 500, 8300, 128, **BFLOAT16),
    AttentionCase("long_256", 1, 40, 40, 500, 8300, 256, **BFLOAT16),
    # Scores of which tiles are computed again.
    AttentionCase("again_128", 2, 32, 32, 333, 517, 128, sm_scale=30.0, **BFLOAT16),
    AttentionCase("again_64", 2, 32, 8, 333, 517, 64, sm_scale=30.0, window=(200, 20), **BFLOAT16),
    AttentionCase("packed", 0, 16, head_dim=128, layout="thd", lens_q=(333, 0, 67, 529), causal=True),
    AttentionCase("small", 1, 4, 4, 1029, 1029, 128, causal=True, **BFLOAT16),
]


def run(cases: list[AttentionCase], **how: Any) -> None:
    """Forward and backward; on the Hopper kernel the forward alone."""
    for case in cases:
        inputs = make_inputs(case, "cuda")
        attend = attention_function(case, **how, **({"variant": "v1"} if case.all_variants else {}))
        if how.get("variant") == "sm90":
            with torch.no_grad():
                attend(*inputs.leaves, **inputs.options)
        else:
            run_case(attend, inputs)
        torch.cuda.synchronize()
        print("ran", case.name, how, flush=True)


def run_portable() -> None:
    """The kernels of every architecture."""
    run([*PORTABLE, *FEATURES[:2]], deterministic=True)
    run(FEATURES)
    size = (8, 8, 8, 4096, 4096, 64, 64)
    problem = AttentionProblem("cuda", backend.arch(torch.device("cuda")), "float16", "bhsd", *size)
    with ExitStack() as stack:
        for kind in ("fwd", "dkdv", "dq"):
            stack.enter_context(use_config(kind, candidates(kind, problem)[0]))
        run(FEATURES)
    a, m = (torch.randn(s, device="cuda", dtype=torch.float16) for s in ((67, 131), (131, 45)))
    assert triton_matmul(a, m, use_autotune=False).isfinite().all()
    torch.cuda.synchronize()
    print("ran matmul", flush=True)


def run_kvcache() -> None:
    """Every case of the matrix over a KV cache."""
    from kvcache_cases import KVCACHE_CASES
    from kvcache_cases import run_case as run_over_cache

    with torch.no_grad():
        for name, case in KVCACHE_CASES.items():
            run_over_cache(case, "cuda")
            torch.cuda.synchronize()
            print("ran kvcache", name, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", choices=("hopper", "portable", "kvcache"), help="all by default")
    parser.add_argument("--part", default="0/1", help="which of how many parts of the Hopper configs")
    options = parser.parse_args()
    kernels = options.kernels or ["hopper", "portable", "kvcache"]
    part, parts = map(int, options.part.split("/"))
    if "hopper" in kernels and backend.arch(torch.device("cuda")) == "sm_90":
        run(HOPPER[part::parts], variant="sm90")
    if "portable" in kernels:
        run_portable()
    if "kvcache" in kernels:
        run_kvcache()


if __name__ == "__main__":
    main()
