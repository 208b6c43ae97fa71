"""Judging a client's attention: its output and gradients under the error budget of diyfa's own tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from diyfa import reference_attention
from diyfa.testing import error_budget, measure_error, rounding_unit
from diyfa.yardstick import plain_flash_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Of the calls of tests that ask for it: where diyfa's kernels run as they are."""


def leaves(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float16, seed: int = 0, device: str = "cpu"
) -> list[torch.Tensor]:
    """Random tensors that want a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, device="cpu").to(device, dtype).requires_grad_() for shape in shapes
    ]


def with_gradients(attend: Callable[..., Any], inputs: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """attend(*inputs, **options) and the gradients of all inputs, for a gradient of the output that is always the
    same."""
    out = attend(*inputs, **options)
    out = out[0] if isinstance(out, tuple) else out
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator, device="cpu").to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.device))]


def assert_like_the_reference(
    attend: Callable[..., Any], inputs: list[torch.Tensor], layout: str = "bhsd", **options: Any
) -> None:
    """attend(q, k, v) is the attention that `options` of `reference_attention` describe, gradients included."""
    actual = with_gradients(attend, inputs)
    double = [x.detach().double().requires_grad_() for x in inputs]
    expected = with_gradients(reference_attention, double, layout=layout, **options)
    plain = [x.detach().clone().requires_grad_() for x in inputs]
    yardstick = with_gradients(plain_flash_attention, plain, layout=layout, **options)
    for name, got, want, low in zip(("out", "dq", "dk", "dv"), actual, expected, yardstick, strict=True):
        assert got.dtype == low.dtype, f"{name} is {got.dtype}, expected {low.dtype}"
        error = measure_error(got.cpu(), want.cpu())
        allowed = error_budget(measure_error(low.cpu(), want.cpu()), rounding_unit(want.cpu(), low.dtype))
        assert error.max_abs <= allowed.max_abs and error.rms <= allowed.rms, f"{name}: {error}, budget {allowed}"
