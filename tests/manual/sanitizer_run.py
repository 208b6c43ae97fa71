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

from diyfa import flash_attention, flash_attention_v2, flash_attention_varlen, triton_matmul
from diyfa.backends.cuda import backend
from diyfa.backends.cuda.attention.configs import candidates
from diyfa.backends.cuda.attention.launch import use_config
from diyfa.problem import AttentionProblem

# (B, H, Hk, Sq, Sk, D, layout, causal, seq_lens, variant)
CASES = [
    (1, 2, 1, 129, 65, 40, "bhsd", True, False, "v2"),
    (2, 2, 2, 77, 201, 64, "bshd", True, False, "v2"),
    (1, 2, 1, 67, 131, 128, "bhsd", False, False, "v2"),
    (1, 1, 1, 131, 131, 256, "bshd", True, False, "v2"),
    (2, 2, 1, 99, 99, 64, "bhsd", True, True, "v2"),
    (1, 2, 1, 70, 90, 64, "bhsd", True, False, "v1"),
]


HEADS, GROUPS, HEAD_DIM = 4, 2, 64
LENGTHS_Q, LENGTHS_K = (37, 0, 70, 129), (41, 9, 70, 131)
PER_SCORE: dict[str, Any] = {"window": (50, 3), "softcap": 5.0, "dropout_p": 0.2}


def force_tma(stack: ExitStack) -> None:
    """Launch through TMA, which small problems do not do of themselves, where the device has it."""
    size = (8, 8, 8, 4096, 4096, HEAD_DIM, HEAD_DIM)
    problem = AttentionProblem("cuda", backend.arch(torch.device("cuda")), "float16", "bhsd", *size)
    for kind in ("fwd", "dkdv", "dq"):
        stack.enter_context(use_config(kind, candidates(kind, problem)[0]))


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float16, requires_grad=True)


def run_features() -> None:
    """Every optional feature: packed sequences, samples of different lengths, a bias with a gradient."""
    sinks = torch.randn(HEADS, device="cuda", requires_grad=True)
    slopes = torch.rand(HEADS, device="cuda")
    q = half(sum(LENGTHS_Q), HEADS, HEAD_DIM)
    k, v = half(sum(LENGTHS_K), GROUPS, HEAD_DIM), half(sum(LENGTHS_K), GROUPS, HEAD_DIM)
    offsets = [torch.tensor([0, *n], device="cuda").cumsum(0, dtype=torch.int32) for n in (LENGTHS_Q, LENGTHS_K)]
    maxima = (max(LENGTHS_Q), max(LENGTHS_K))
    for causal in (False, True):
        out = flash_attention_varlen(q, k, v, *offsets, *maxima, causal, alibi_slopes=slopes, sinks=sinks, **PER_SCORE)
        torch.autograd.grad(out, (q, k, v, sinks), torch.randn_like(out))
        out = flash_attention_varlen(q, k, v, *offsets, *maxima, causal, deterministic=True)
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    q, k, v = half(2, HEADS, 77, HEAD_DIM), half(2, GROUPS, 131, HEAD_DIM), half(2, GROUPS, 131, HEAD_DIM)
    lens = torch.tensor([131, 50], device="cuda", dtype=torch.int32)
    for shape in ((2, 1, 77, 131), (1, HEADS, 1, 131), (77, 1)):
        bias = half(*shape)
        for seq_lens in (None, lens):
            out = flash_attention(q, k, v, seq_lens=seq_lens, attn_bias=bias, sinks=sinks, **PER_SCORE)
            torch.autograd.grad(out, (q, k, v, bias, sinks), torch.randn_like(out))
    torch.cuda.synchronize()


# Options and (B, H, Hk, Sq, Sk, D, Dv) of the Hopper kernel in bfloat16, large enough for it and for the rows of its
# table, the last one for its small tile; `seq_lens` are the lengths of the samples.
HOPPER: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({"causal": True}, (2, 32, 8, 333, 517, 128, 128)),
    ({}, (2, 32, 32, 333, 517, 128, 128)),
    ({"causal": True}, (2, 32, 8, 333, 517, 64, 64)),
    ({"causal": True}, (1, 16, 16, 2085, 2085, 64, 64)),
    ({}, (2, 48, 48, 517, 333, 64, 64)),
    ({"causal": True}, (2, 32, 8, 333, 389, 256, 256)),
    ({}, (2, 32, 32, 333, 389, 256, 256)),
    ({"causal": True}, (2, 32, 32, 333, 517, 96, 96)),
    ({"causal": True}, (2, 32, 32, 333, 517, 192, 128)),
    ({"causal": True}, (2, 32, 32, 333, 517, 192, 192)),
    ({"window": (100, 20), "softcap": 5.0}, (2, 32, 8, 333, 517, 128, 128)),
    ({"causal": True, "seq_lens": (517, 50)}, (2, 32, 32, 333, 517, 128, 128)),
    ({}, (1, 48, 48, 768, 2500, 64, 64)),
    ({}, (1, 40, 40, 500, 8300, 128, 128)),
    ({}, (1, 40, 40, 500, 8300, 256, 256)),
    # Scores of which tiles are computed again.
    ({"sm_scale": 30.0}, (2, 32, 32, 333, 517, 128, 128)),
    ({"sm_scale": 30.0, "window": (200, 20)}, (2, 32, 8, 333, 517, 64, 64)),
    ({"causal": True}, (1, 4, 4, 1029, 1029, 128, 128)),
]


def run_hopper(part: int, parts: int) -> None:
    """The Gluon kernel, one call for each config, and packed sequences."""
    for options, (b, h, hk, sq, sk, d, dv) in HOPPER[part::parts]:
        shapes = ((b, h, sq, d), (b, hk, sk, d), (b, hk, sk, dv))
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        if "seq_lens" in options:
            lens = torch.tensor(options["seq_lens"], device="cuda", dtype=torch.int32)
            options = {**options, "seq_lens": lens}
        assert flash_attention(q, k, v, variant="sm90", **options).isfinite().all()
        torch.cuda.synchronize()
        print("ran sm90", b, h, hk, sq, sk, d, dv, *options, flush=True)
    if part:
        return
    offsets = torch.tensor([0, 333, 333, 400, 929], device="cuda", dtype=torch.int32)
    q, k, v = (torch.randn(929, 16, 128, device="cuda", dtype=torch.float16) for _ in range(3))
    out = flash_attention_varlen(q, k, v, offsets, offsets, 529, 529, True, variant="sm90")
    assert out.isfinite().all()
    torch.cuda.synchronize()
    print("ran sm90 packed", flush=True)


def run_portable() -> None:
    """The kernels of every architecture."""
    for forced in (False, True):
        with ExitStack() as stack:
            if forced:
                force_tma(stack)
            run_features()
        print("ran features", "through TMA" if forced else "", flush=True)
    for b, h, hk, sq, sk, d, layout, causal, ragged, variant in CASES:
        shapes = ((b, h, sq, d), (b, hk, sk, d), (b, hk, sk, d))
        if layout == "bshd":
            shapes = tuple((n0, n2, n1, n3) for n0, n1, n2, n3 in shapes)
        attend = flash_attention if layout == "bhsd" else flash_attention_v2
        q, k, v = (torch.randn(s, device="cuda", dtype=torch.float16, requires_grad=True) for s in shapes)
        lens = torch.tensor([sk - 13 * i - 1 for i in range(b)], device="cuda", dtype=torch.int32) if ragged else None
        out, lse = attend(q, k, v, causal, seq_lens=lens, variant=variant, return_lse=True, deterministic=True)
        grads = torch.autograd.grad((out, lse), (q, k, v), (torch.randn_like(out), torch.randn_like(lse)))
        torch.cuda.synchronize()
        assert all(g.isfinite().all() for g in grads), (b, h, sq, sk, d, layout)
        print("ran", b, h, hk, sq, sk, d, layout, causal, ragged, variant, flush=True)
    a, m = (torch.randn(s, device="cuda", dtype=torch.float16) for s in ((67, 131), (131, 45)))
    assert triton_matmul(a, m, use_autotune=False).isfinite().all()
    torch.cuda.synchronize()
    print("ran matmul", flush=True)


def run_kvcache() -> None:
    """Every case of the matrix over a KV cache."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
    from kvcache_cases import KVCACHE_CASES, run_case

    with torch.no_grad():
        for name, case in KVCACHE_CASES.items():
            run_case(case, "cuda")
            torch.cuda.synchronize()
            print("ran kvcache", name, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", choices=("hopper", "portable", "kvcache"), help="all by default")
    parser.add_argument("--part", default="0/1", help="which of how many parts of the Hopper configs")
    options = parser.parse_args()
    kernels = options.kernels or ["hopper", "portable", "kvcache"]
    part, parts = map(int, options.part.split("/"))
    torch.manual_seed(0)
    if "hopper" in kernels and backend.arch(torch.device("cuda")) == "sm_90":
        run_hopper(part, parts)
    if "portable" in kernels:
        run_portable()
    if "kvcache" in kernels:
        run_kvcache()


if __name__ == "__main__":
    main()
