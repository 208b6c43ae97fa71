"""Rounding of float32 to 16 bits inside kernels: to nearest even, and right where numbers are subnormal."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from targets import TARGETS

if "cuda" not in TARGETS:
    pytest.skip("neither a GPU nor the interpreter of a Triton that the CUDA kernels are for", allow_module_level=True)

from diyfa.backends.cuda.attention.dots import round_to

LOW_BITS = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)  # beside a tie, on it, and next to both ends


@triton.jit
def _round(x_ptr, rounded_ptr, cast_ptr, wide_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(rounded_ptr + at, round_to(x, rounded_ptr.dtype.element_ty))
    cast = x.to(tl.bfloat16)
    tl.store(cast_ptr + at, cast)
    tl.store(wide_ptr + at, cast.to(tl.float32))


def rounded(bits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(what torch makes of float32 numbers in bfloat16, what `round_to` does, a cast, and that in float32 again)."""
    x = bits.to(torch.int32).view(torch.float32).to(TARGETS["cuda"].device)
    results = [torch.empty_like(x, dtype=dtype) for dtype in (torch.bfloat16, torch.bfloat16, torch.float32)]
    _round[(x.numel() // 2048,)](x, *results, BLOCK=2048)
    return x.bfloat16(), *results


def test_every_bfloat16_and_its_neighbours() -> None:
    high = torch.arange(-(2**15), 2**15, dtype=torch.int64) << 16
    bits = torch.cat([high + low for low in LOW_BITS])
    expected, *found = rounded(bits)
    for result in found:
        assert torch.equal(result.isnan(), expected.isnan())
        same = result.bfloat16().view(torch.int16) == expected.view(torch.int16)
        assert bool((same | expected.isnan()).all()), bits[(~same & ~expected.isnan()).cpu()][:8]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="about the interpreter")
def test_zeros_in_an_interpreter_as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own conversion cuts off, which `round_to` reckons with; zeros and normal numbers come out right."""
    import fast_interpreter
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter, "_convert_float", fast_interpreter._convert_other)
    high = torch.arange(0x80, 0x7F80, dtype=torch.int64)  # the normal numbers
    bits = torch.cat([torch.tensor([0, -0x80000000]).repeat(128), *((high << 16) + low for low in LOW_BITS[:5])])
    bits = torch.cat([bits, bits.new_zeros(-bits.numel() % 2048)])
    expected, result, *_ = rounded(bits)
    assert torch.equal(result.view(torch.int16), expected.view(torch.int16))
