"""Empty blocks of a block mask: kernels skip them in every pass, so nothing in them reaches a result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from poison import poisoned_allocations
from refusals import refused_features
from targets import TARGETS

import diyfa
from diyfa import BlockMask

BACKENDS = [name for name in TARGETS if "mask" not in refused_features(name)]
B, H, HK, D, BLOCK = 1, 2, 1, 16, 64
SEQLEN_Q, SEQLEN_K = 2 * BLOCK + 20, 3 * BLOCK + 30
UNUSED_QUERIES, UNUSED_KEYS = slice(BLOCK, 2 * BLOCK), slice(BLOCK, 2 * BLOCK)


def mask_with_unused_blocks() -> BlockMask:
    """No head has a key for the queries of one block, or a query for the keys of one. Others are of all kinds."""
    keep = torch.rand(B, H, SEQLEN_Q, SEQLEN_K, generator=torch.Generator().manual_seed(5)) < 0.5
    keep[:, :, :BLOCK, :BLOCK] = True
    keep[:, 1, 2 * BLOCK :, :BLOCK] = False
    keep[:, :, UNUSED_QUERIES] = False
    keep[..., UNUSED_KEYS] = False
    return BlockMask.from_dense(keep, BLOCK)


def results(backend: str, value: float, mask: BlockMask, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Out, lse and gradients with `value` in all rows of unused blocks."""
    device, generator = TARGETS[backend].device, torch.Generator().manual_seed(7)
    shapes = {
        "q": (B, H, SEQLEN_Q, D),
        "k": (B, HK, SEQLEN_K, D),
        "v": (B, HK, SEQLEN_K, D),
        "dout": (B, H, SEQLEN_Q, D),
    }
    x = {name: torch.randn(shape, generator=generator).half() for name, shape in shapes.items()}
    dlse = torch.randn(B, H, SEQLEN_Q, generator=generator)
    for name in ("q", "dout"):
        x[name][:, :, UNUSED_QUERIES] = value
    for name in ("k", "v"):
        x[name][:, :, UNUSED_KEYS] = value
    q, k, v = (x[name].to(device).requires_grad_() for name in "qkv")
    with poisoned_allocations():
        out, lse = diyfa.flash_attention(q, k, v, mask=mask.to(device), return_lse=True, backend=backend, **options)
        gradients = torch.autograd.grad((out, lse), (q, k, v), (x["dout"].to(device), dlse.to(device)))
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (y.detach().cpu() for y in (out, lse, *gradients)), strict=True))


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "deterministic": True}], ids=["plain", "softcap"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_unused_blocks_are_not_read(backend: str, options: dict[str, Any]) -> None:
    mask = mask_with_unused_blocks()
    clean = results(backend, 1.0, mask, options)
    for value in (float("nan"), float("inf")):
        found = results(backend, value, mask, options)
        for name, x in found.items():
            assert torch.equal(x, clean[name]), name
    for name in ("out", "dq"):
        assert bool((clean[name][:, :, UNUSED_QUERIES] == 0).all())
    for name in ("dk", "dv"):
        assert bool((clean[name][:, :, UNUSED_KEYS] == 0).all())
    assert bool((clean["lse"][:, :, UNUSED_QUERIES] == float("inf")).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_bits_are_read_only_of_partial_blocks(backend: str) -> None:
    """A mask that kept the bits of its partial blocks gives the same, bit for bit. Without partial blocks, there are
    none to read."""
    mask = mask_with_unused_blocks()
    whole, compacted = (results(backend, 1.0, each, {}) for each in (mask, mask.compact()))
    for name, x in whole.items():
        assert torch.equal(x, compacted[name]), name
    keep = mask.kinds().repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)[..., :SEQLEN_Q, : 3 * BLOCK] > 0
    only_full = BlockMask.from_dense(keep, BLOCK)
    assert only_full.compact().bits.shape[0] == 0
    q, k = torch.randn(B, H, SEQLEN_Q, D), torch.randn(B, HK, 3 * BLOCK, D)
    q, k = q.to(TARGETS[backend].device), k.to(TARGETS[backend].device)
    out = diyfa.flash_attention(q, k, k, mask=only_full.compact().to(q.device), backend=backend)
    want = diyfa.reference_attention(q.cpu(), k.cpu(), k.cpu(), mask=only_full)
    torch.testing.assert_close(out.cpu(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["rows", "columns", "one"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_visible_key(backend: str, kind: str) -> None:
    """Rows that see one key copy its value: of each block its last pair, a pair per row, and a single pair."""
    keep = torch.zeros(SEQLEN_Q, SEQLEN_K, dtype=torch.bool)
    if kind == "rows":
        keep[torch.arange(SEQLEN_Q), (torch.arange(SEQLEN_Q) * 37 + 63) % SEQLEN_K] = True
    elif kind == "columns":
        keep[:, SEQLEN_K - 1] = True
    else:
        keep[SEQLEN_Q - 1, SEQLEN_K - 1] = True
    device = TARGETS[backend].device
    q, k, v = (torch.randn(1, H, n, D).half().to(device) for n in (SEQLEN_Q, SEQLEN_K, SEQLEN_K))
    out = diyfa.flash_attention(q, k, v, mask=BlockMask.from_dense(keep, BLOCK).to(device), backend=backend).cpu()
    want = torch.where(keep.any(1)[:, None], v.cpu()[:, :, keep.int().argmax(1)], 0)
    assert torch.equal(out, want)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "cpu"])
def test_bits_are_addressed_in_64_bits(backend: str) -> None:
    """A block whose bits lie 2^31 words behind the first, in memory of which only its page is touched."""
    device, blocks = TARGETS[backend].device, 2**31 // (BLOCK * BLOCK // 32)
    keep = torch.rand(BLOCK, BLOCK, generator=torch.Generator().manual_seed(5)) < 0.5
    near = BlockMask.from_dense(keep, BLOCK).to(device)
    try:
        bits = torch.empty(blocks + 1, BLOCK, BLOCK // 32, dtype=torch.int32, device=device)
    except RuntimeError:
        pytest.skip("needs 8 GiB of addresses")
    bits[blocks] = near.bits[0]
    lists = near.blocks.clone()
    lists[..., 0] = blocks  # the index of its bits
    far = BlockMask(near.shape, lists, bits)
    q, k, v = (torch.randn(1, 1, BLOCK, D).half().to(device) for _ in range(3))
    want, out = (diyfa.flash_attention(q, k, v, mask=each, backend=backend) for each in (near, far))
    assert torch.equal(out.cpu(), want.cpu())
