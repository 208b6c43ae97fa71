"""PyTorch's attention on CUDA tensors by diyfa: what the dispatcher of a GPU chooses. Needs one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
from eager_budget import assert_matches_reference, leaves
from torch.nn.attention import SDPBackend, sdpa_kernel

from diyfa.integrations import Handle, use_in_pytorch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
FORWARD, BACKWARD = (f"_scaled_dot_product_flash_attention{end}: diyfa" for end in ("", "_backward"))
attention = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture
def handle() -> Iterator[Handle]:
    handle = use_in_pytorch("cuda")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield handle
    handle.remove()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_scaled_dot_product(handle: Handle, causal: bool, compiled: bool) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q * 1.0, k * 1.0, v * 1.0, is_causal=causal, enable_gqa=True) * 1.0

    call = torch.compile(attend) if compiled else attend
    assert_matches_reference(
        lambda q, k, v: call(q.cuda(), k.cuda(), v.cuda()).cpu(),
        leaves((2, 8, 300, 64), *[(2, 2, 300, 64)] * 2, dtype=torch.bfloat16), causal=causal,
    )  # fmt: skip
    assert handle.calls == {FORWARD: 1, BACKWARD: 1}


@pytest.mark.parametrize("window", [(-1, 0), (20, 0)])
def test_varlen_attn(handle: Handle, window: tuple[int, int]) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    offsets = torch.tensor([0, 100, 100, 257], dtype=torch.int32)
    arguments = (offsets.cuda(), offsets.cuda(), 157, 157)
    grouped = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters  # of newer releases
    more, heads = ({"enable_gqa": True}, 2) if grouped else ({}, 8)
    assert_matches_reference(
        lambda q, k, v: varlen.varlen_attn(
            q.cuda(), k.cuda(), v.cuda(), *arguments, window_size=window, **more
        ).cpu(),
        leaves((257, 8, 64), *[(257, heads, 64)] * 2), "thd", cu_seqlens_q=offsets, cu_seqlens_k=offsets, window=window,
    )  # fmt: skip


def test_graphs_and_dropout(handle: Handle) -> None:
    """A captured graph draws a new mask at each replay."""
    q, k, v = (x.detach().cuda() for x in leaves(*[(2, 4, 128, 64)] * 3))
    attention(q, k, v, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, dropout_p=0.5)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert bool(first.isfinite().all()) and not torch.equal(first, out)


def test_removal_restores_pytorchs_kernels() -> None:
    q, k, v = (x.detach().cuda() for x in leaves(*[(2, 4, 128, 64)] * 3))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        before = attention(q, k, v)
        handle = use_in_pytorch()
        attention(q, k, v)
        assert handle.calls == {FORWARD: 1}
        handle.remove()
        assert torch.equal(attention(q, k, v), before) and handle.calls == {FORWARD: 1}
