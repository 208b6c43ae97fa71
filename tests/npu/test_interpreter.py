"""What `npu_interpreter` puts in place of parts of Triton's interpreter and of the device computes the same."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.skipif(os.environ.get("DIYFA_HOST_SHIM") != "1", reason="the plugin works on the host shim")


@pytest.mark.parametrize("axis", [0, 1, None])
@pytest.mark.parametrize("keep_dims", [False, True])
@pytest.mark.parametrize("shape", [(1, 5), (7, 16), (6, 9)])
def test_reduction_by_halves(npu: torch.device, shape: tuple[int, int], axis: int | None, keep_dims: bool) -> None:
    """A function that is associative and not commutative: keep the last, so that any change of order would show."""
    import numpy as np
    import triton.language as tl
    from npu_interpreter import reduce_by_halves
    from triton.runtime.interpreter import ReduceOps, TensorHandle

    data = np.random.default_rng(0).integers(0, 100, shape).astype(np.float32)
    x = tl.core.tensor(TensorHandle(data, tl.float32), tl.block_type(tl.float32, list(shape)))
    last = SimpleNamespace(fn=lambda a, b: b)
    both = SimpleNamespace(fn=lambda a, i, b, j: (b, i))  # the last of the first input and the first of the second
    found = reduce_by_halves(ReduceOps(axis, last, keep_dims), (x,)).handle.data
    lasts, firsts = (y.handle.data for y in reduce_by_halves(ReduceOps(axis, both, keep_dims), (x, x)))
    whole = data.reshape(-1) if axis is None else data
    for got, index in ((found, -1), (lasts, -1), (firsts, 0)):
        expected = np.take(whole, index, 0 if axis is None else axis)
        if keep_dims:
            expected = expected.reshape(1, 1) if axis is None else np.expand_dims(expected, axis)
        assert np.array_equal(np.squeeze(got), np.squeeze(expected))
        assert not keep_dims or got.shape == expected.shape


def test_host_arithmetic_is_bounded(npu: torch.device) -> None:
    """It computes inside its block, also in place and for masks, and nothing is left of it outside."""
    from npu_interpreter import HostArithmetic

    x = torch.arange(6.0).reshape(2, 3).to(npu)
    with HostArithmetic():
        y = torch.where(x > 2, x * 2, torch.zeros_like(x)).t()
        y += 1
        assert y.device == x.device and y.cpu().tolist() == [[1, 7], [1, 9], [1, 11]]
        assert x.sum().item() == 15
        assert torch.ones(2, device=npu).cpu().tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="error code is 500002"):
        x + x


def test_named_operators_are_served_and_given_back(npu: torch.device) -> None:
    from npu_interpreter import on_the_host

    x = torch.arange(6.0).reshape(2, 3).to(npu)
    with on_the_host("sum.dim_IntList"):
        assert x.sum((0,)).cpu().tolist() == [3, 5, 7]
    with pytest.raises(RuntimeError, match="error code is 500002"):
        x.sum((0,))
