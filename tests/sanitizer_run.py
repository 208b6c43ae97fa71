"""Forward and backward at odd shapes, for NVIDIA's compute-sanitizer (needs a GPU):

    PYTHONPATH=. python tests/sanitizer_run.py        # fills the compile cache
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=. compute-sanitizer --tool memcheck python tests/sanitizer_run.py
    PYTHONPATH=. compute-sanitizer --tool racecheck python tests/sanitizer_run.py

Every tensor ends where its allocation ends, so an access beyond a sequence is an access beyond its memory.
"""

from __future__ import annotations

import torch

from diyfa import flash_attention, flash_attention_v2, triton_matmul

# (B, H, Hk, Sq, Sk, D, layout, causal, seq_lens, variant)
CASES = [
    (1, 2, 1, 129, 65, 40, "bhsd", True, False, "v2"),
    (2, 2, 2, 77, 201, 64, "bshd", True, False, "v2"),
    (1, 2, 1, 67, 131, 128, "bhsd", False, False, "v2"),
    (1, 1, 1, 131, 131, 256, "bshd", True, False, "v2"),
    (2, 2, 1, 99, 99, 64, "bhsd", True, True, "v2"),
    (1, 2, 1, 70, 90, 64, "bhsd", True, False, "v1"),
]


def main() -> None:
    torch.manual_seed(0)
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


if __name__ == "__main__":
    main()
