"""`diyfa.quantize`: what it returns, by its operators and by kernels, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from targets import TARGETS

import diyfa
from diyfa.eight_bits import BLOCK_K, BLOCK_Q, Quantized, dequantised, hadamard

B, H, HK, SQ, SK, D, DV = 2, 4, 2, 150, 90, 32, 16
E4M3 = torch.float8_e4m3fn
BACKENDS: list[str | None] = [None, *(["cuda"] if "cuda" in TARGETS and TARGETS["cuda"].device == "cpu" else [])]
by_the_kernel = pytest.mark.skipif(len(BACKENDS) == 1, reason="needs Triton's interpreter")


def draw(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, SQ, D), (B, HK, SK, D), (B, HK, SK, DV)
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q.to(dtype), (k + 3).to(dtype), (v - 2).to(dtype)


def assert_alike(want: Any, found: Any, rtol: float = 2e-6) -> None:
    """Equal descales and means, and nearly all values: sums are added in another order, so that numbers at the middle
    between two may be rounded to either."""
    for x, y in zip(want, found, strict=True):
        assert x.values.shape == y.values.shape
        for a, b in zip(x[1:], y[1:], strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=rtol, atol=2e-6, equal_nan=True)
        a, b = x.values.float(), y.values.float()
        assert torch.equal(a.isnan(), b.isnan()) and (a.nan_to_num() != b.nan_to_num()).float().mean() < 2e-3


def numbers(x: Quantized, block: int) -> torch.Tensor:
    return dequantised(x.values, x.descale, torch.float64, block, x.mean)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("per", ["tensor", "head", "block"])
@pytest.mark.parametrize("dtype", ["float8", "int8"])
@pytest.mark.parametrize("smooth", [False, True], ids=["plain", "smooth"])
def test_values_stand_for_the_input(per: str, dtype: str, smooth: bool, backend: str | None) -> None:
    inputs = draw()
    parts = diyfa.quantize(*inputs, per, dtype, smooth, backend=backend)
    descales = {
        "tensor": ((), (), ()),
        "head": ((B, HK),) * 3,
        "block": ((B, H, -(-SQ // BLOCK_Q)), (B, HK, -(-SK // BLOCK_K)), (B, HK)),
    }[per]
    for name, x, part, shape in zip("qkv", inputs, parts, descales, strict=True):
        if name == "v" and dtype == "int8":
            assert part.values is x and part.descale is None and part.mean is None
            continue
        assert part.values.dtype == (E4M3 if dtype == "float8" else torch.int8) and part.values.shape == x.shape
        assert part.descale is not None and part.descale.dtype == torch.float32 and part.descale.shape == shape
        assert (part.mean is None) == (not smooth or name == "q")
        found = numbers(part, BLOCK_Q if name == "q" else BLOCK_K)
        largest = float(x.abs().max()) + 4  # of what was rounded
        steps = largest * (2.0**-4 if dtype == "float8" else 0.51 / 127)
        assert (found - x.double()).abs().max() <= steps
        # The largest number of each descale is the largest of the dtype.
        reached = part.values.float().abs().amax()
        assert reached == (448.0 if dtype == "float8" else 127.0)


@by_the_kernel
@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "3d"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_does_what_the_operators_do(dtype: torch.dtype, layout: str, rotate: bool) -> None:
    inputs = draw(dtype)
    if layout == "bshd":
        inputs = tuple(x.transpose(1, 2) for x in inputs)
    elif layout == "3d":
        inputs = tuple(x.flatten(0, 1) for x in inputs)
    given: dict[str, Any] = {"smooth": True, "rotate": rotate, "layout": "bshd" if layout == "bshd" else "bhsd"}
    for per in ("tensor", "head", "block"):
        assert_alike(*(diyfa.quantize(*inputs, per, **given, backend=backend) for backend in (None, "cuda")))


@by_the_kernel
@pytest.mark.parametrize("head_dim", [8, 16, 32, 64, 256, 512])
def test_the_kernel_rotates_all_head_dims(head_dim: int) -> None:
    """The kernel multiplies parts of 64 columns by a small Hadamard matrix, and adds up the parts."""
    x = torch.randn(1, 2, 70, head_dim, generator=torch.Generator().manual_seed(0)) + 4
    for per, smooth in (("tensor", False), ("block", True)):
        found = diyfa.quantize(x, x, x, per, "float8", smooth=smooth, rotate=True, backend="cuda")[1]
        assert found.descale is not None
        descale = found.descale if per == "tensor" else found.descale.repeat_interleave(64, 2)[:, :, :70, None]
        expected = hadamard(x)
        if smooth:
            expected -= expected.mean(2, keepdim=True)
        error = found.values.float() * descale - expected
        assert error.abs().max() <= expected.abs().max() / 16 * 1.01  # half of the distance of the largest numbers
        assert found.values.float().abs().max() == 448.0


@by_the_kernel
@pytest.mark.parametrize("second", [1.0, float("inf"), float("nan")])
def test_the_kernel_rotates_infinities(second: float) -> None:
    """One makes the whole row infinite. Of two, in the same column of two parts, some sums are infinite, others NaN."""
    x = torch.randn(1, 1, 70, 256, generator=torch.Generator().manual_seed(0))
    x[0, 0, 3, 5], x[0, 0, 3, 64 + 5] = float("inf"), second
    for per in ("tensor", "block"):
        found = diyfa.quantize(x, x, x, per, "float8", rotate=True, backend="cuda")[1]
        assert found.descale is not None
        expected = hadamard(x).abs().max()
        assert torch.equal(expected.isnan(), torch.tensor(second != 1.0))
        first = found.descale.flatten()[0]
        assert not first.isfinite() and first.isnan() == expected.isnan()


@by_the_kernel
@pytest.mark.parametrize(
    ("rows", "number"),
    [(70, float("inf")), (70, float("-inf")), (600, float("nan")), (70, 29.5), (600, 29.5), (17 * 512 + 70, -20.0)],
)
def test_the_kernel_smooths_any_columns(rows: int, number: float) -> None:
    """The pass for the mean also decides the descale, from each column's smallest and largest number, which may lie far
    from 0: no 0 of a sum or of a masked load counts. Of a long column the last chunk of rows has the largest number."""
    x = torch.randn(1, 1, rows, 24, generator=torch.Generator().manual_seed(0))
    x[..., ::2] += 30
    x[..., 1::2] -= 30
    x[0, 0, -1, 2] = number
    for per in ("tensor", "head", "block")[rows > 1000 :]:
        assert_alike(*(diyfa.quantize(x, x, x, per, smooth=True, backend=backend) for backend in (None, "cuda")), 2e-5)


def test_a_rotation_keeps_products() -> None:
    for size in (1, 2, 64, 256):
        x = torch.randn(5, size, dtype=torch.float64)
        y = hadamard(x)
        torch.testing.assert_close(y @ y.mT, x @ x.mT)
    assert hadamard(torch.eye(4))[1].tolist() == [0.5, -0.5, 0.5, -0.5]


@pytest.mark.parametrize("per", ["tensor", "head", "block"])
@pytest.mark.parametrize("dtype", ["float8", "int8"])
def test_attention_as_it_is_written(per: str, dtype: str) -> None:
    """Smoothed and rotated: results are near those of the inputs, log-sum-exp, softcap and sinks included."""
    q, k, v = draw()
    options: dict[str, Any] = {"sinks": torch.tensor([1.0, -2.0, 0.0, 3.0]), "softcap": 20.0, "return_lse": True}
    with diyfa.use_backend("cpu"):
        out, lse = diyfa.flash_attention(*diyfa.quantize(q, k, v, per, dtype, smooth=True, rotate=True), **options)
        want, want_lse = diyfa.flash_attention(q, k, v, **options)
    assert out.dtype == torch.bfloat16
    assert (out.float() - want.float()).abs().max() < 0.15 and (lse - want_lse).abs().max() < 0.4


def test_other_layouts() -> None:
    q, k, v = draw()
    with diyfa.use_backend("cpu"):
        out = diyfa.flash_attention(*diyfa.quantize(q, k, v, "block"))
        swapped = tuple(x.transpose(1, 2) for x in (q, k, v))
        other = diyfa.flash_attention_v2(*diyfa.quantize(*swapped, "block", layout="bshd"))
        assert torch.equal(out, other.transpose(1, 2))
        flat = diyfa.flash_attention(*diyfa.quantize(*(x[0] for x in (q, k, v)), "head"))
        assert torch.equal(flat, diyfa.flash_attention(*diyfa.quantize(*(x[:1] for x in (q, k, v)), "head"))[0])
        mixed = (*diyfa.quantize(q, k, v, dtype="int8")[:2], diyfa.quantize(q, k, v)[2])  # int8 beside float8
        assert diyfa.flash_attention(*mixed).shape == out.shape
        explained = diyfa.explain(*mixed, causal=True)
    assert explained.problem.dtype == "int8" and explained.problem.value_dtype == "float8_e4m3fn"


def test_empty_tensors_and_zeros() -> None:
    empty = torch.zeros(2, 2, 0, 16)
    parts = diyfa.quantize(empty, empty, empty, "block", smooth=True)
    assert diyfa.flash_attention(*parts, backend="cpu").shape == empty.shape
    nothing = torch.zeros(1, 1, 8, 16)
    for x in diyfa.quantize(nothing, nothing, nothing, "head"):
        assert not x.values.float().any() and x.descale is not None and x.descale.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float8", "int8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(value: float, dtype: str, backend: str | None) -> None:
    q, k, v = draw()
    k[1, 0, 70, 3] = value
    parts = diyfa.quantize(q, k, v, "head", dtype, backend=backend)
    assert dequantised(parts[1].values, parts[1].descale, torch.float32)[1, 0].isnan().all()
    out = diyfa.flash_attention(*parts, backend="cpu")
    assert out[1, :2].isnan().all() and out[0].isfinite().all() and out[1, 2:].isfinite().all()


def test_compiled_programs_quantise_too() -> None:
    q, k, v = draw()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return diyfa.flash_attention(*diyfa.quantize(q, k, v, "head", smooth=True), causal=True, backend="cpu")

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), attend(q, k, v))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("per", ["tensor", "head"])
def test_a_float8_cache_takes_values_and_descales(per: str, backend: str | None) -> None:
    """A prompt fills the cache at once. An empty one that is filled by appending takes descales with a margin."""
    q, k, v = (x.transpose(1, 2) for x in draw())
    _, k8, v8 = diyfa.quantize(q, k, v, per, layout="bshd")
    step, lengths = q[:, :1].contiguous(), torch.full((B,), SK, dtype=torch.int32)
    found: dict[str, torch.Tensor] = {}
    with diyfa.use_backend(backend or "cpu"):
        descales = {"k_descale": k8.descale, "v_descale": v8.descale}
        found["at once"] = diyfa.flash_attn_with_kvcache(step, k8.values, v8.values, cache_seqlens=lengths, **descales)
        descales = {name: 2 * x for name, x in descales.items()}
        caches = [torch.zeros_like(x.values) for x in (k8, v8)]
        found["appended"] = diyfa.flash_attn_with_kvcache(
            step, *caches, k, v, cache_seqlens=torch.zeros_like(lengths), **descales
        )
    assert torch.equal(caches[0].float(), k8.values.float() / 2)  # a margin of 2 costs no digit
    keys, values = (dequantised(x.values.transpose(1, 2), x.descale, torch.float64).transpose(1, 2) for x in (k8, v8))
    want = diyfa.reference_attention(step.double(), keys, values, layout="bshd")
    for out in found.values():
        torch.testing.assert_close(out.double(), want, rtol=0.01, atol=0.01)


Q, K, V = (torch.zeros(2, h, 8, 16, dtype=torch.bfloat16) for h in (4, 2, 2))
F8 = torch.zeros(2, 2, 8, 16).to(E4M3)
REFUSED: dict[str, tuple[dict[str, Any], type, str]] = {
    "per": ({"per": "row"}, ValueError, r"per must be one of tensor, head, block, got 'row'"),
    "dtype": ({"dtype": "int4"}, ValueError, r"dtype must be one of float8, int8, got 'int4'"),
    "flag": ({"smooth": 1}, TypeError, r"smooth must be True or False"),
    "layout": ({"layout": "thd"}, ValueError, r"layout must be one of bhsd, bshd, got 'thd'"),
    "rotate": ({"q": Q[..., :12], "k": K[..., :12], "rotate": True}, ValueError, r"power of two, got 12"),
    "float8": ({"q": F8, "k": F8, "v": F8}, TypeError, r"Unsupported dtype torch\.float8_e4m3fn"),
    "float32 v": ({"q": Q.float(), "k": K.float(), "v": V.float(), "dtype": "int8"}, TypeError, r"beside int8 v stays"),
    "gradient": ({"v": V.clone().requires_grad_()}, ValueError, r"rounding has no gradient: .* straight_through"),
    "number": ({"k": 1.0}, TypeError, r"k must be a torch\.Tensor"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        diyfa.quantize(**{"q": Q, "k": K, "v": V, **changes})


ONE = torch.ones(1)
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], type, str]] = {
    "descale of 16 bits": ((Q, K, V), {"k_descale": ONE}, ValueError, r"k_descale belong to q and k of float8 or int8"),
    "other k": ((F8, K, F8), {}, TypeError, r"beside q of torch\.float8_e4m3fn k must have the same dtype"),
    "float32 beside int8": (
        (F8.to(torch.int8), F8.to(torch.int8), F8.float()), {}, TypeError, r"float16 or bfloat16, got k torch\.int8"
    ),
    "descale dtype": ((F8, F8, F8), {"q_descale": ONE.double()}, TypeError, r"q_descale must be float32"),
    "descale shape": (
        (F8, F8, F8), {"k_descale": torch.ones(2, 3)}, ValueError, r"k_descale must have shape \(2, 2\) or \(2, 2, 1\)"
    ),
    "blocks of v": (
        (F8, F8, F8), {"v_descale": torch.ones(2, 2, 1)}, ValueError, r"v_descale must have shape \(2, 2\)"
    ),
    "mean shape": ((F8, F8, F8), {"v_mean": torch.ones(2, 2)}, ValueError, r"v_mean must have shape \(2, 2, 16\)"),
    "twice": (
        (Quantized(F8, ONE), F8, F8), {"q_descale": ONE}, ValueError, r"q_descale must not be given"
    ),
    "mean of q": (
        (Quantized(F8, ONE, torch.ones(2, 2, 16)), F8, F8), {}, ValueError, r"q may be no Quantized with a mean"
    ),
    "dropout": ((F8, F8, F8), {"dropout_p": 0.5}, ValueError, r"takes no dropout_p"),
    "out_dtype": ((F8, F8, F8), {"out_dtype": E4M3}, ValueError, r"out_dtype must be torch\.bfloat16"),
    "out_dtype kind": ((F8, F8, F8), {"out_dtype": "float32"}, TypeError, r"out_dtype must be a torch\.dtype, got str"),
    "out_dtype of 16 bits": ((Q, K, V), {"out_dtype": torch.float32}, ValueError, r"has their dtype"),
    "gradient": (
        (F8.clone().requires_grad_(), F8, F8), {}, ValueError, r"attention of torch\.float8_e4m3fn has no backward pass"
    ),
    "gradient of sinks": (
        (F8, F8, F8), {"sinks": torch.zeros(2).requires_grad_()}, ValueError, r"has no backward pass"
    ),
    "gradient of a descale": (
        (F8, F8, F8), {"k_descale": torch.ones(1).requires_grad_()}, ValueError, r"has no backward pass"
    ),
    "gradient of a mean": (
        (F8, F8, F8), {"v_mean": torch.zeros(2, 2, 16).requires_grad_()}, ValueError, r"has no backward pass"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("tensors", "options", "error", "message"), CALLS.values(), ids=CALLS)
def test_wrong_calls(tensors: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    for function in (diyfa.flash_attention, diyfa.explain):
        with pytest.raises(error, match=message):
            function(*tensors, **options, backend="cpu")


def test_a_cache_takes_no_descales_of_q() -> None:
    q, pages = torch.zeros(4, 2, 16, dtype=torch.bfloat16), torch.zeros(3, 4, 2, 16, dtype=torch.bfloat16)
    given = {
        "cu_seqlens_q": torch.tensor([0, 4], dtype=torch.int32), "cu_seqlens_k": None, "max_seqlen_q": 4,
        "max_seqlen_k": 8, "block_table": torch.tensor([[0, 1]], dtype=torch.int32),
        "seqused_k": torch.tensor([8], dtype=torch.int32), "q_descale": ONE,
    }  # fmt: skip
    with pytest.raises(ValueError, match="takes no q_descale"):
        diyfa.flash_attention_varlen(q, pages, pages, **given, backend="cpu")
    del given["q_descale"]
    for function, layout in ((diyfa.flash_attention_varlen, {}), (diyfa.explain, {"layout": "thd"})):
        with pytest.raises(ValueError, match="takes no k_descale"):
            function(q, Quantized(pages, ONE), pages, **given, **layout, backend="cpu")
