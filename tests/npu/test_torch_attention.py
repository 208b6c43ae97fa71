"""PyTorch's attention on npu tensors by diyfa: the real dispatch of torch_npu, its kernels kept and given back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eager_budget import assert_matches_reference, leaves
from npu_interpreter import on_the_host
from subprocesses import run_python

import diyfa
from diyfa.integrations import Handle, flash_attn_3, use_in_pytorch
from diyfa.integrations.transformers import attention as attention_of_transformers

SDPA = "scaled_dot_product_attention"
attention = torch.nn.functional.scaled_dot_product_attention
SHAPES = ((2, 4, 19, 32), (2, 2, 33, 32), (2, 2, 33, 32))
MASKS = {
    "none": None,
    "boolean": torch.rand(2, 1, 19, 33, generator=torch.Generator().manual_seed(3)) < 0.7,
    "additive": torch.randn(4, 19, 33, generator=torch.Generator().manual_seed(3)).half(),
}


@pytest.fixture
def handle(npu: torch.device) -> Iterator[Handle]:
    handle = use_in_pytorch("npu")
    yield handle
    handle.remove()


def on(device: torch.device, call: Any) -> Any:
    """The same function of CPU tensors by way of the device."""
    return lambda *inputs: call(*(x.to(device) for x in inputs)).cpu()


@pytest.mark.parametrize("mask", MASKS)
def test_masks(handle: Handle, npu: torch.device, mask: str) -> None:
    given = MASKS[mask]
    bias = given
    if given is not None and given.dtype == torch.bool:
        bias = torch.zeros(given.shape).masked_fill(~given, float("-inf"))
    on_device = None if given is None else given.to(npu)
    with on_the_host("zeros", "logical_not", "masked_fill_.Scalar"):
        assert_matches_reference(
            on(npu, lambda q, k, v: attention(q, k, v, attn_mask=on_device, enable_gqa=True)),
            leaves(*SHAPES), attn_bias=bias,
        )  # fmt: skip
    assert handle.calls == {f"{SDPA}: diyfa": 1}


def test_a_learned_bias(handle: Handle, npu: torch.device) -> None:
    assert_matches_reference(on(npu, attention), leaves(*[(2, 2, 9, 16)] * 3, (2, 9, 9), dtype=torch.float32))
    assert handle.calls == {f"{SDPA}: diyfa": 1}


@pytest.mark.parametrize("sizes", [(19, 19), (19, 33), (33, 19)], ids=str)
def test_top_left_causal(handle: Handle, npu: torch.device, sizes: tuple[int, int]) -> None:
    """PyTorch's causal mask of unequal lengths begins at the top left."""
    queries, keys = sizes
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    assert_matches_reference(
        on(npu, lambda q, k, v: attention(q, k, v, is_causal=True, scale=0.25)),
        leaves((1, 2, queries, 32), *[(1, 2, keys, 32)] * 2, dtype=torch.float32),
        attn_bias=torch.zeros(queries, keys).masked_fill(hidden, float("-inf")), sm_scale=0.25,
    )  # fmt: skip
    assert handle.calls == {f"{SDPA}: diyfa": 1}


def test_inference_mode(handle: Handle, npu: torch.device) -> None:
    q, k, v = (x.detach().to(npu) for x in leaves(*[(1, 2, 9, 16)] * 3))
    with torch.inference_mode():
        out = attention(q, k, v)
    assert out.shape == q.shape and not bool(out.cpu().isnan().any())
    assert handle.calls == {f"{SDPA}: diyfa": 1}


@pytest.mark.parametrize("window", [(-1, 0), (5, 0)])
def test_varlen_attn(handle: Handle, npu: torch.device, window: tuple[int, int]) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    offsets = torch.tensor([0, 17, 17, 40], dtype=torch.int32)
    on_device = offsets.to(npu), offsets.to(npu), 23, 23
    assert_matches_reference(
        on(npu, lambda q, k, v: varlen.varlen_attn(q, k, v, *on_device, window_size=window, enable_gqa=True)),
        leaves((40, 4, 32), (40, 2, 32), (40, 2, 32)), "thd",
        cu_seqlens_q=offsets, cu_seqlens_k=offsets, window=window,
    )  # fmt: skip
    assert handle.calls == {"_flash_attention_forward: diyfa": 1, "_flash_attention_backward: diyfa": 1}


STOCK = """
import torch, torch_npu
from diyfa.integrations import use_in_pytorch
handle = use_in_pytorch("npu")
shapes = (((1, 2, 9, 16), torch.float64), ((2, 9, 16), torch.float16))
failures = ""
for x in [torch.empty(shape, dtype=dtype, device="npu") for shape, dtype in shapes]:
    try:
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
    except RuntimeError as error:
        failures += str(error)
print("need a real Ascend device" in failures)
print(dict(handle.calls))
"""


def test_what_is_not_diyfas_goes_to_torch_npu(npu: torch.device) -> None:
    """The kernel that was there is called, which on the shim asks for operators that only CANN has. Where an operator
    fails, a blocking torch_npu does not give back the interpreter's lock that it took."""
    assert run_python(STOCK, ASCEND_LAUNCH_BLOCKING="0").splitlines()[-2:] == [
        "True", str({f"{SDPA}: PyTorch (dtype)": 1, f"{SDPA}: PyTorch (not (B, H, S, D))": 1}),
    ]  # fmt: skip


def test_removal_gives_torch_npus_kernels_back(npu: torch.device) -> None:
    def kernels() -> list[str]:
        lines = torch._C._dispatch_dump(f"aten::{SDPA}").splitlines()
        return [line for line in lines if line.startswith(("PrivateUse1", "AutogradPrivateUse1"))]

    before = kernels()
    handle = use_in_pytorch("npu")
    assert kernels() != before
    handle.remove()
    assert kernels() == before and not handle.active


@pytest.mark.parametrize("padded", [False, True])
def test_a_layer_of_transformers(npu: torch.device, padded: bool) -> None:
    """What torch_npu's flash attention in Transformers drops: the window, the softcap, the sinks; and padding."""
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    module = SimpleNamespace(is_causal=True)
    seen = torch.ones(2, 33, dtype=torch.bool)
    seen[1, :9] = not padded
    mask = (seen if padded else seen[:0])[..., None].to(npu, torch.uint8)  # causal, with a window
    bias = torch.zeros(2, 1, 1, 33).masked_fill(~seen[:, None, None], float("-inf"))
    extras = {"sliding_window": 8, "softcap": 3.0, "s_aux": sinks.to(npu), "scaling": 0.2}
    with on_the_host("zeros", "logical_not", "masked_fill_.Scalar") if padded else nullcontext():
        assert_matches_reference(
            on(npu, lambda q, k, v: attention_of_transformers(module, q, k, v, mask, **extras)[0].transpose(1, 2)),
            leaves(*SHAPES), causal=True, window=(7, 0), softcap=3.0, sinks=sinks, sm_scale=0.2, attn_bias=bias,
        )  # fmt: skip


def test_packed_sequences_of_transformers(npu: torch.device) -> None:
    offsets = torch.tensor([0, 17, 17, 40], dtype=torch.int32)
    module, given = SimpleNamespace(is_causal=True), offsets.to(npu)
    extras = {"cu_seq_lens_q": given, "cu_seq_lens_k": given, "max_length_q": 23, "max_length_k": 23}

    def attend(*rows: torch.Tensor) -> torch.Tensor:
        return attention_of_transformers(module, *(x.transpose(0, 1)[None] for x in rows), None, **extras)[0][0]

    assert_matches_reference(
        on(npu, attend), leaves((40, 4, 32), (40, 2, 32), (40, 2, 32)), "thd",
        cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True,
    )  # fmt: skip


def test_one_token_of_transformers(npu: torch.device) -> None:
    """By the kernels over a cache, as a dynamic or a static one hands its keys on."""
    module, extras = SimpleNamespace(is_causal=True), {"softcap": 3.0, "sliding_window": 20}
    q, k, v = (x.detach() for x in leaves((2, 4, 1, 32), *SHAPES[1:]))
    mask = torch.empty((0, k.shape[2], 1), dtype=torch.uint8)  # causal, with a window
    found, _ = attention_of_transformers(module, q.to(npu), k.to(npu), v.to(npu), mask.to(npu), **extras)
    with diyfa.use_backend("cpu"):
        want, _ = attention_of_transformers(module, q, k, v, mask, **extras)
    torch.testing.assert_close(found.cpu(), want, atol=2e-3, rtol=2e-3)


def test_flash_attention_3(npu: torch.device) -> None:
    options = {"softmax_scale": 0.3, "causal": True, "window_size": (9, 0), "softcap": 5.0}
    assert_matches_reference(
        on(npu, lambda q, k, v: flash_attn_3.flash_attn_func(q, k, v, **options)),
        leaves((2, 19, 4, 32), *[(2, 19, 2, 32)] * 2), "bshd", sm_scale=0.3, causal=True, window=(9, 0), softcap=5.0,
    )  # fmt: skip
    offsets = torch.tensor([0, 7, 7, 27], dtype=torch.int32), torch.tensor([0, 9, 13, 33], dtype=torch.int32)
    on_device = [x.to(npu) for x in offsets]
    assert_matches_reference(
        on(npu, lambda q, k, v: flash_attn_3.flash_attn_varlen_func(q, k, v, *on_device, 20, 20, causal=True)),
        leaves((27, 4, 32), (33, 2, 32), (33, 2, 32)), "thd",
        cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], causal=True,
    )  # fmt: skip


def test_flash_attn_npu_v3_over_pages(npu: torch.device) -> None:
    """As vLLM-Ascend calls it where training and inference must agree: packed queries, pages of 128, one split."""
    generator = torch.Generator().manual_seed(0)
    cache = [torch.randn(5, 128, 2, 32, generator=generator).half() for _ in range(2)]
    q = torch.randn(10, 4, 32, generator=generator).half()
    offsets, used = torch.tensor([0, 3, 10], dtype=torch.int32), torch.tensor([11, 200], dtype=torch.int32)
    table = torch.tensor([[3, 1], [4, 2]], dtype=torch.int32)
    options = {"max_seqlen_q": 7, "causal": True, "window_size": [-1, -1], "num_splits": 1, "rotary_interleaved": False}

    def on_device(device: str | torch.device) -> torch.Tensor:
        inputs = [x.to(device) for x in (q, *cache)]
        lengths = {"cache_seqlens": used.to(device), "page_table": table.to(device), "cu_seqlens_q": offsets.to(device)}
        return flash_attn_3.flash_attn_with_kvcache(*inputs, **lengths, **options).cpu()

    with diyfa.use_backend("cpu"):
        want = on_device("cpu")
    torch.testing.assert_close(on_device(npu), want, atol=2e-3, rtol=2e-3)
