"""Rotary embedding: against complex rotation, in place and not, offsets, packed sequences, the module's tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_flash_attn_interface import signature

from diyfa.layers import rotary
from diyfa.layers.rotary import (
    RotaryEmbedding,
    apply_rotary,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
)

ROWS = 40


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tables(rotary_dim: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """cos, sin and exp(i · angle) of random angles."""
    angle = randn(ROWS, rotary_dim // 2, seed=seed)
    return angle.cos(), angle.sin(), torch.polar(torch.ones_like(angle), angle)


def rotated(x: torch.Tensor, turn: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The same by complex multiplication; `turn` broadcasts to the pairs of x."""
    rotary_dim = 2 * turn.shape[-1]
    head, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    pairs = head.unflatten(-1, (-1, 2)) if interleaved else head.unflatten(-1, (2, -1)).transpose(-1, -2)
    pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    head = (pairs if interleaved else pairs.transpose(-1, -2)).flatten(-2)
    return torch.cat((head, rest), -1)


SIGNATURES = {
    "apply_rotary_emb": "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, "
    "max_seqlen=None",
    "apply_rotary_emb_qkv_": "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, "
    "num_heads_q=None",
    "apply_rotary_emb_kv_": "kv, cos, sin, interleaved=False, seqlen_offsets=0",
    "apply_rotary_emb_torch": "x, cos, sin, interleaved=False",
    "apply_rotary": "x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, interleaved=False, "
    "inplace=False, conjugate=False",
    "rotate_half": "x, interleaved=False",
    "RotaryEmbedding": "dim, base=10000.0, interleaved=False, scale_base=None, device=None",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    assert signature(getattr(rotary, name)) == SIGNATURES[name]
    assert rotary.apply_rotary_emb_func is apply_rotary_emb


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 10, 2])
@pytest.mark.parametrize("offset", [0, 7])
def test_dense(rotary_dim: int, interleaved: bool, inplace: bool, offset: int) -> None:
    cos, sin, turn = tables(rotary_dim)
    x = randn(2, 9, 3, 16)
    before = x.clone()
    out = apply_rotary_emb(x, cos, sin, interleaved, inplace, offset)
    torch.testing.assert_close(out, rotated(before, turn[offset : offset + 9, None], interleaved))
    assert (out is x) == inplace
    assert torch.equal(x, before) != inplace


@pytest.mark.parametrize("interleaved", [False, True])
def test_offsets_of_each_sample(interleaved: bool) -> None:
    cos, sin, turn = tables(16)
    x, offsets = randn(3, 9, 2, 16), torch.tensor([0, 30, 35], dtype=torch.int32)
    out = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
    for sample, offset in enumerate(offsets.tolist()):
        there = min(9, ROWS - offset)  # the table ends at 40: what lies beyond is not turned
        want = rotated(x[sample, :there], turn[offset : offset + there, None], interleaved)
        torch.testing.assert_close(out[sample, :there], want)
        assert torch.equal(out[sample, there:], x[sample, there:])


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("offsets", [0, 4, torch.tensor([3, 0, 20, 7])])
def test_packed_sequences(offsets: Any, inplace: bool) -> None:
    cos, sin, turn = tables(12)
    cu_seqlens = torch.tensor([1, 6, 6, 20, 23], dtype=torch.int32)  # an empty one; rows 0 and 23 belong to none
    before = randn(24, 2, 16)
    x = before.clone()
    out = apply_rotary_emb(x, cos, sin, inplace=inplace, seqlen_offsets=offsets, cu_seqlens=cu_seqlens, max_seqlen=14)
    assert (out is x) == inplace
    want = before.clone()
    for b, (start, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False)):
        first = offsets if isinstance(offsets, int) else int(offsets[b])
        if start < end:
            want[start:end] = rotated(before[start:end], turn[first : first + end - start, None], False)
    torch.testing.assert_close(out, want)


PACKED = {"cu_seqlens": torch.tensor([0, 3, 6], dtype=torch.int32), "max_seqlen": 3}


@pytest.mark.parametrize("options", [{}, {"interleaved": True}, {"seqlen_offsets": torch.tensor([2, 30])}, PACKED])
@pytest.mark.parametrize("inplace", [False, True])
def test_gradient(options: dict[str, Any], inplace: bool) -> None:
    cos, sin, _ = tables(6)
    x = randn(*((7,) if options is PACKED else (2, 5)), 2, 8).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: apply_rotary_emb(x * 1.0, cos, sin, inplace=inplace, **options), x)


def test_conjugate_rotates_back() -> None:
    cos, sin, _ = tables(16)
    x = randn(2, 9, 2, 16)
    torch.testing.assert_close(apply_rotary(apply_rotary(x, cos, sin), cos, sin, conjugate=True), x)


def test_in_place_is_seen_by_autograd() -> None:
    """Old values that somebody still needs, leaves, and unbind's views: PyTorch refuses instead of a wrong gradient."""
    cos, sin, _ = tables(16)
    leaf = randn(2, 9, 2, 16).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        apply_rotary_emb(leaf, cos, sin, inplace=True)
    x = leaf * 1.0
    squared = x.square()  # keeps x for its backward pass
    apply_rotary_emb(x, cos, sin, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()
    with pytest.raises(RuntimeError, match="multiple views"):
        apply_rotary_emb((randn(2, 9, 3, 2, 16).requires_grad_() * 1.0).unbind(2)[0], cos, sin, inplace=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_are_formed_in_float32(dtype: torch.dtype) -> None:
    cos, sin, _ = tables(16)
    cos, sin, x = cos.to(dtype), sin.to(dtype), randn(2, 9, 2, 16, dtype=dtype)
    out = apply_rotary_emb(x, cos, sin)
    assert out.dtype == dtype
    exact = apply_rotary_emb(x.double(), cos.double(), sin.double())
    assert torch.equal(out, exact.float().to(dtype))


@pytest.mark.parametrize("own_k", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("form", ["five", "grouped", "strided"])
@pytest.mark.parametrize("offset", [0, 5, torch.tensor([1, 9])])
def test_qkv(form: str, interleaved: bool, own_k: bool, offset: Any) -> None:
    cos, sin, turn = tables(12)
    cos_k, sin_k, turn_k = tables(12, seed=4) if own_k else (None, None, turn)
    shape = (2, 9, 4 + 2 * 2, 16) if form == "grouped" else (2, 9, 3, 4, 16)
    leaf = (randn(*shape, 2)[..., 0] if form == "strided" else randn(*shape)).requires_grad_()
    heads_q = 4 if form == "grouped" else None
    qkv = leaf.clone(memory_format=torch.preserve_format)
    got = apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, interleaved, offset, heads_q)
    assert got is qkv
    offsets = offset.tolist() if isinstance(offset, torch.Tensor) else [offset] * 2
    rows = torch.stack([torch.arange(o, o + 9) for o in offsets])
    parts = leaf.split([4, 2, 2], 2) if form == "grouped" else leaf.unbind(2)
    q, k = (rotated(x, t[rows][:, :, None], interleaved) for x, t in zip(parts[:2], (turn, turn_k), strict=True))
    want = torch.cat((q, k, parts[2]), 2) if form == "grouped" else torch.stack((q, k, parts[2]), 2)
    torch.testing.assert_close(got, want)
    weights = randn(*shape, seed=9)
    torch.testing.assert_close(torch.autograd.grad(got, leaf, weights), torch.autograd.grad(want, leaf, weights))


def test_tables_of_each_sample() -> None:
    x, angle = randn(2, 9, 3, 16), randn(2, 9, 8, seed=1)
    turn = torch.polar(torch.ones_like(angle), angle)[:, :, None]
    torch.testing.assert_close(apply_rotary_emb_torch(x, angle.cos(), angle.sin()), rotated(x, turn, False))


# ---- The module -------------------------------------------------------------------------------------------------


def frequencies(dim: int, positions: torch.Tensor, base: float = 10000.0) -> torch.Tensor:
    return positions.double()[:, None] * base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def test_module_rotates_q_and_k_by_their_positions() -> None:
    module = RotaryEmbedding(16, base=500.0)
    qkv = randn(2, 9, 3, 4, 16, dtype=torch.float32)
    before = qkv.clone()
    assert module(qkv, seqlen_offset=3) is qkv
    angle = frequencies(16, torch.arange(3, 12), 500.0)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    want = rotated(before[:, :, :2].double(), turn[:, None], False)
    torch.testing.assert_close(qkv[:, :, :2].double(), want, rtol=0, atol=1e-5)
    assert torch.equal(qkv[:, :, 2], before[:, :, 2])
    assert not list(module.parameters()) and not module.state_dict()


def test_module_with_q_and_kv_and_grouped_heads() -> None:
    module = RotaryEmbedding(16, interleaved=True)
    q, kv = randn(2, 9, 4, 16, dtype=torch.float32), randn(2, 9, 2, 2, 16, dtype=torch.float32)
    grouped = torch.cat((q, kv.flatten(2, 3)), 2)
    got_q, got_kv = module(q, kv)
    got = module(grouped, num_heads_q=4)
    assert torch.equal(got, torch.cat((got_q, got_kv.flatten(2, 3)), 2))


def test_module_scores_depend_on_distance_only() -> None:
    """What rotation is for; and with xPos they decay with it."""
    q, k = randn(1, 1, 1, 16, dtype=torch.float32), randn(1, 1, 1, 16, dtype=torch.float32, seed=1)
    module = RotaryEmbedding(16, scale_base=8.0)
    qkv = torch.stack((q, k, k), 2).expand(1, 20, 3, 1, 16).clone()
    q, k, _ = module(qkv)[0, :, :, 0].unbind(1)
    scores = q.double() @ k.double().T
    for distance in range(5):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-3, atol=1e-3)
    even = torch.arange(0, 16, 2, dtype=torch.float64)
    scale = ((even + 0.4 * 16) / (1.4 * 16)) ** ((torch.arange(20)[:, None] - 10) / 8.0)
    angle = frequencies(16, torch.arange(20))
    torch.testing.assert_close(module._cos_cached.double(), angle.cos() * scale, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(module._sin_k_cached.double(), angle.sin() / scale, rtol=1e-5, atol=1e-5)


def test_module_tables_follow_length_device_dtype() -> None:
    module = RotaryEmbedding(8).to(torch.bfloat16)  # the angles must not be computed in bfloat16
    x = torch.zeros(1, 3000, 3, 1, 8)
    module(x)
    angle = frequencies(8, torch.arange(3000))
    torch.testing.assert_close(module._cos_cached.double(), angle.cos(), rtol=0, atol=1e-3)
    first = module._cos_cached
    module(x[:, :10].clone())
    assert module._cos_cached is first
    module(x[:, :10].bfloat16())
    assert module._cos_cached.dtype == torch.bfloat16
    with torch.inference_mode():
        module(x[:, :20])
    module.train()
    module(x[:, :5])
    assert not module._cos_cached.is_inference()


def test_module_with_offsets_in_a_tensor() -> None:
    module, offsets = RotaryEmbedding(8), torch.tensor([4, 11])
    x = randn(2, 3, 3, 1, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match="max_seqlen must say"):
        module(x.clone(), seqlen_offset=offsets)
    got = module(x.clone(), seqlen_offset=offsets, max_seqlen=14)
    for sample, offset in enumerate(offsets.tolist()):
        torch.testing.assert_close(
            got[sample : sample + 1], module(x[sample : sample + 1].clone(), seqlen_offset=offset)
        )


COS, SIN, _ = tables(16)
X = randn(2, 9, 2, 16)
EMB, QKV = apply_rotary_emb, apply_rotary_emb_qkv_
ERRORS: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    (EMB, (X[0], COS, SIN), {}, r"x must have shape \(batch, seqlen, heads, head_dim\)"),
    (EMB, (X, COS, SIN), {"cu_seqlens": torch.tensor([0, 9]), "max_seqlen": 9}, "total"),
    (EMB, (X, COS, SIN[:5]), {}, "cos and sin must both have shape"),
    (EMB, (X[..., :8], COS, SIN), {}, "rotary_dim 16 exceeds the head dimension 8"),
    (EMB, (X, COS[:5], SIN[:5]), {}, "have 5 rows; positions 0 to 8"),
    (EMB, (X, COS, SIN), {"seqlen_offsets": 32}, "positions 32 to 40"),
    (EMB, (X, COS, SIN), {"seqlen_offsets": -1}, "seqlen_offsets must not be negative, got -1"),
    (EMB, (X, COS, SIN), {"seqlen_offsets": torch.zeros(3).int()}, r"int or a \(2,\) integer"),
    (EMB, (X, COS, SIN), {"seqlen_offsets": torch.zeros(2)}, "torch.float32"),
    (EMB, (X[0], COS, SIN), {"cu_seqlens": torch.tensor([0, 9])}, "needs max_seqlen"),
    (EMB, (X, COS, SIN.to("meta")), {}, "cos is on cpu and sin on meta, but what they turn on cpu"),
    (QKV, (X[:, :, None], COS, SIN), {}, r"qkv must have shape"),
    (QKV, (X[0], COS, SIN), {}, "qkv must be 4-D or 5-D"),
    (QKV, (X, COS, SIN), {}, "needs num_heads_q"),
    (QKV, (X, COS, SIN), {"num_heads_q": 1}, "needs num_heads_q"),
    (apply_rotary_emb_kv_, (X, COS, SIN), {}, "kv must have shape"),
    (apply_rotary_emb_torch, (X[..., :8], COS, SIN), {}, "exceeds the head dimension"),
]


WRONG_TYPES: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    (EMB, ([1.0], COS, SIN), {}, r"x must be a torch\.Tensor, got list"),
    (EMB, (X, None, SIN), {}, r"cos must be a torch\.Tensor, got NoneType"),
    (EMB, (X, COS, SIN), {"seqlen_offsets": 1.0}, r"seqlen_offsets must be an integer, got 1\.0"),
    (EMB, (X[0], COS, SIN), {"cu_seqlens": torch.tensor([0, 9]), "max_seqlen": "9"}, "max_seqlen must be an integer"),
]


@pytest.mark.parametrize(
    ("error", "row"), [*((ValueError, row) for row in ERRORS), *((TypeError, row) for row in WRONG_TYPES)]
)
def test_errors(error: type[Exception], row: tuple[Any, ...]) -> None:
    function, arguments, options, pattern = row
    with pytest.raises(error, match=pattern):
        function(*arguments, **options)


def test_compile_fullgraph() -> None:
    torch.compiler.reset()
    cos, sin, _ = tables(16)

    def step(x):
        return apply_rotary_emb_qkv_(x * 1.0, cos, sin).sin().sum()

    x = randn(2, 9, 3, 2, 16).requires_grad_()
    got = torch.autograd.grad(torch.compile(step, fullgraph=True, backend="aot_eager")(x), x)
    torch.testing.assert_close(got, torch.autograd.grad(step(x), x))
