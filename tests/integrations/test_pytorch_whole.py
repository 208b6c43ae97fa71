"""`scaled_dot_product_attention` as a whole by diyfa, as on an NPU: on CPU tensors, or on those of the GPU there is."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from eager_budget import DEVICE, assert_matches_reference, leaves, on_device, with_gradients
from torch.utils.checkpoint import checkpoint

import diyfa
from diyfa.integrations import Handle, use_in_pytorch
from diyfa.integrations.eager_attention import mask_as_bias
from diyfa.integrations.pytorch import _override

SDPA = "scaled_dot_product_attention"
attention = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture
def handle() -> Iterator[Handle]:
    handle = _override(DEVICE, overrides_sdpa=True)
    with diyfa.use_backend(DEVICE):
        yield handle
    handle.remove()


@pytest.mark.parametrize("sizes", [(19, 19), (19, 33), (33, 19), (1, 7), (7, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_top_left_causal(handle: Handle, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    queries, keys = sizes
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    assert_matches_reference(
        on_device(lambda q, k, v: attention(q, k, v, is_causal=True, scale=0.25, enable_gqa=True)),
        leaves((2, 4, queries, 32), *[(2, 2, keys, 32)] * 2, dtype=dtype),
        attn_bias=torch.zeros(queries, keys).masked_fill(hidden, float("-inf")), sm_scale=0.25,
    )  # fmt: skip
    assert handle.calls == {f"{SDPA}: diyfa": 1}


@pytest.mark.parametrize("shape", [(19, 33), (1, 33), (2, 1, 19, 33), (2, 4, 19, 33), (2, 1, 1, 33)], ids=str)
@pytest.mark.parametrize("boolean", [True, False])
def test_masks(handle: Handle, shape: tuple[int, ...], boolean: bool) -> None:
    """Every row sees a key, or none of them: a row without one is 0, as PyTorch has it."""
    generator = torch.Generator().manual_seed(3)
    mask: Any = torch.randn(shape, generator=generator)
    if boolean:
        mask = mask > -0.3
        mask[..., 0, :] = False
    inputs = leaves((2, 4, 19, 32), (2, 4, 33, 32), (2, 4, 33, 16), dtype=torch.float32)
    given = mask.to(DEVICE)
    attend = on_device(lambda q, k, v: attention(q, k, v, attn_mask=given))
    assert_matches_reference(attend, inputs, attn_bias=mask_as_bias(mask, torch.float32))
    assert handle.calls == {f"{SDPA}: diyfa": 1}
    found = with_gradients(attend, inputs)
    handle.remove()
    double = [x.detach().double().requires_grad_() for x in inputs]
    expected = with_gradients(attention, double, attn_mask=mask if boolean else mask.double())
    for got, want in zip(found, expected, strict=True):  # PyTorch means the same by a mask
        torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [(2, 9, 9), (9, 9), (1, 2, 1, 9), (9, 1)], ids=str)
def test_a_learned_bias(handle: Handle, shape: tuple[int, ...]) -> None:
    inputs = leaves(*[(2, 2, 9, 16)] * 3, shape, dtype=torch.float32)
    assert_matches_reference(on_device(attention), inputs)
    assert handle.calls == {f"{SDPA}: diyfa": 1}


def test_dropout(handle: Handle) -> None:
    """diyfa's own, drawn from PyTorch's generator."""
    q, k, v = (x.detach().to(DEVICE) for x in leaves(*[(1, 2, 9, 16)] * 3))
    torch.manual_seed(5)
    found = attention(q, k, v, dropout_p=0.3)
    torch.manual_seed(5)
    assert torch.equal(found, diyfa.flash_attention(q, k, v, dropout_p=0.3))


def test_autocast(handle: Handle) -> None:
    """The inputs become bfloat16 before diyfa sees them, the mask too, and the gradients float32 again."""
    inputs = leaves(*[(2, 4, 19, 32)] * 3, dtype=torch.float32)
    mask = torch.randn(19, 19, generator=torch.Generator().manual_seed(3))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return attention(q, k, v, attn_mask=mask.to(DEVICE))

    found = with_gradients(on_device(attend), inputs)
    assert [x.dtype for x in found] == [torch.bfloat16] + 3 * [torch.float32]
    rounded = [x.detach().bfloat16().requires_grad_() for x in inputs]
    given = mask.bfloat16().to(DEVICE)
    assert_matches_reference(
        on_device(lambda q, k, v: attention(q, k, v, attn_mask=given)), rounded, attn_bias=mask.bfloat16()
    )
    for got, want in zip(
        found, with_gradients(on_device(lambda q, k, v: attention(q, k, v, attn_mask=given)), rounded), strict=True
    ):
        assert torch.equal(got.to(want.dtype), want)


def test_modules_and_compiled_graphs(handle: Handle) -> None:
    """nn.MultiheadAttention and nn.TransformerEncoderLayer in training, as they are and compiled."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True, device=DEVICE)
    x = torch.randn(2, 11, 32, device=DEVICE)
    padding = torch.arange(11, device=DEVICE) >= torch.tensor([11, 6], device=DEVICE)[:, None]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)

    def gradients(module: Any) -> list[torch.Tensor]:
        out = module(x, src_key_padding_mask=padding)[~padding]
        return [out.detach(), *torch.autograd.grad(out.square().sum(), list(layer.parameters()))]

    found, traced = gradients(layer), gradients(compiled)
    assert handle.calls[f"{SDPA}: diyfa"] >= 1  # some releases of PyTorch call it while they trace, too
    handle.remove()
    for got, again, want in zip(found, traced, gradients(layer), strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(again, want, atol=1e-4, rtol=1e-4)


def test_gradient_checkpointing(handle: Handle) -> None:
    """The second forward drops what the first did."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q * 1.0, k, v, dropout_p=0.3, is_causal=True)

    found = []
    for call in (attend, partial(checkpoint, attend, use_reentrant=False)):
        torch.manual_seed(7)
        found.append(with_gradients(on_device(call), leaves(*[(2, 4, 19, 32)] * 3)))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert handle.calls == {f"{SDPA}: diyfa": 3}


def test_export(handle: Handle) -> None:
    """Lengths that are not known before."""

    class Causal(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attention(q, k, v, is_causal=True)

    length = torch.export.Dim("length", min=2, max=64)
    q, k, v = (x.detach().to(DEVICE) for x in leaves(*[(2, 4, 19, 32)] * 3))
    shapes = {name: {2: length} for name in "qkv"}
    exported = torch.export.export(Causal(), (q, k, v), dynamic_shapes=shapes).module()
    for inputs in ((q, k, v), tuple(x[:, :, :7] for x in (q, k, v))):
        assert torch.equal(exported(*inputs), diyfa.flash_attention(*inputs, causal=True))


LEFT = {
    "dtype": lambda x: attention(x.double(), x.double(), x.double()),
    "not (B, H, S, D)": lambda x: attention(x[0], x[0], x[0]),
    "head_dim": lambda x: attention(*[torch.randn(1, 1, 3, 600, device=DEVICE)] * 3),
    "last stride not 1": lambda x: attention(x.mT, x.mT, x.mT),
    "batch or heads differ": lambda x: attention(x, x[:, :1], x[:, :1]),
}


@pytest.mark.parametrize("reason", LEFT)
def test_calls_left_to_pytorch(handle: Handle, reason: str) -> None:
    x = leaves((1, 2, 9, 16), dtype=torch.float32)[0].to(DEVICE)
    found = LEFT[reason](x)
    assert handle.calls == {f"{SDPA}: PyTorch ({reason})": 1}
    handle.remove()
    torch.manual_seed(0)
    if reason != "head_dim":
        assert torch.equal(found, LEFT[reason](x))


def test_pytorch_without_a_kernel_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases without `torch.library.get_kernel`: what is left to PyTorch runs its own decomposition."""
    monkeypatch.delattr(torch.library, "get_kernel")
    inputs = leaves(*[(1, 2, 9, 16)] * 3, dtype=torch.float64)
    want = with_gradients(attention, inputs, is_causal=True)
    handle = use_in_pytorch("cpu")
    try:
        found = with_gradients(attention, inputs, is_causal=True)
        with torch.inference_mode():
            again = attention(*inputs, is_causal=True)
        assert handle.calls == {f"{SDPA}: PyTorch (dtype)": 2}
    finally:
        handle.remove()
    for got, expected in zip([*found, again], [*want, want[0]], strict=True):
        torch.testing.assert_close(got, expected)


def test_two_masks(handle: Handle) -> None:
    x = leaves((1, 2, 9, 16))[0].to(DEVICE)
    with pytest.raises(ValueError, match="is_causal=True and attn_mask exclude each other"):
        attention(x, x, x, attn_mask=torch.ones(9, 9, dtype=torch.bool, device=DEVICE), is_causal=True)
