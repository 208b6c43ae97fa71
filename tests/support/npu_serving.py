"""Calls on npu tensors over the host shim with triton-ascend's compiler, for tests/npu/test_npu_warmup.py.

`WARMED` describes the calls to `diyfa warmup`; `main` makes them with other lengths, batches and strides."""

from __future__ import annotations

import torch

WARMED = (
    "attention float16 D=64 H=8/4 B=2 S=512 causal",
    "cache bfloat16 D=128 H=8/2 B=4 Sq=1 Sk=1024 page=128 causal new=1 rotary=64",
    "cache bfloat16 D=128 H=8/2 B=64 Sq=1 Sk=128 page=128 causal",  # one split
    "product float16 256x256x256",
)


def on_npu(x: torch.Tensor) -> torch.Tensor:
    return x.to("npu")


def attention(seqlen: int, batch: int) -> None:
    import diyfa

    q = on_npu(torch.zeros(batch, 8, seqlen, 96, dtype=torch.float16))[..., :64].requires_grad_()
    k, v = (on_npu(torch.zeros(batch, 4, seqlen, 64, dtype=torch.float16)).requires_grad_() for _ in range(2))
    out = diyfa.flash_attention(q, k, v, causal=True)
    out.backward(torch.empty_like(out))


def decoding_step(batch: int, pages: int) -> None:
    import diyfa

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return on_npu(torch.zeros(*shape, dtype=dtype))

    cache = [zeros(batch * pages, 128, 2, 128) for _ in range(2)]
    new = [zeros(batch, 1, 2, 128) for _ in range(2)]
    diyfa.flash_attn_with_kvcache(
        zeros(batch, 1, 8, 128), *cache, *new, rotary_cos=zeros(pages * 128, 32), rotary_sin=zeros(pages * 128, 32),
        cache_seqlens=zeros(batch, dtype=torch.int32), block_table=zeros(batch, pages, dtype=torch.int32), causal=True,
    )  # fmt: skip


def product(m: int) -> None:
    import diyfa

    diyfa.triton_matmul(*(on_npu(torch.zeros(m, m, dtype=torch.float16)) for _ in range(2)))


def main() -> None:
    attention(300, 3)
    attention(2048, 1)
    decoding_step(7, 3)
    decoding_step(1, 40)
    product(384)


if __name__ == "__main__":
    main()
