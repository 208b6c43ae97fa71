"""`triton_matmul` on every backend that has a matrix product, against float64."""

from __future__ import annotations

import pytest
import torch
from targets import Target

import diyfa
from diyfa import registry
from diyfa.problem import MatmulProblem

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SHAPES = [  # (M, N, K)
    (64, 64, 64),
    (128, 48, 96),
    (37, 53, 71),
    (1, 1, 1),
    (1, 40, 257),
    (130, 1, 33),
    (17, 200, 1),
    (2, 24, 1000),
]


@pytest.fixture
def backend(target: Target) -> str:
    return target.backend


@pytest.fixture
def device(target: Target) -> torch.device:
    if not target.computes:
        pytest.skip("PyTorch's own operators, which these tests use on the device, need a real NPU")
    return torch.device(target.device)


def matrix(rows, columns, dtype, device, transposed=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (columns, rows) if transposed else (rows, columns)
    x = torch.randn(shape, generator=generator).to(dtype).to(device)
    return x.t() if transposed else x


def assert_as_exact_as_torch(c, a, b, compute_dtype, out_dtype):
    """Error against float64 at most twice that of torch's own product in the same dtype (and one rounding of slack
    in the last place of the largest result, where torch happens to be exact)."""
    exact = a.double().cpu() @ b.double().cpu()
    own = (a.cpu().to(compute_dtype) @ b.cpu().to(compute_dtype)).to(out_dtype)
    own_error = (own.double() - exact).abs().max()
    floor = torch.finfo(out_dtype).eps * exact.abs().max() * 0.5
    assert c.dtype == out_dtype
    assert c.shape == exact.shape
    error = (c.double().cpu() - exact).abs().max()
    assert error <= 2 * own_error + floor, f"error {error:.3e}, torch's {own_error:.3e}"


def refusal(backend, a, b, **problem):
    """Why every kernel of the backend refuses this product, or None."""
    loaded = registry.load_backend(backend)
    name = str(a.dtype).removeprefix("torch.")
    compute = "float16" if name == "float32" else name
    described = MatmulProblem(
        loaded.device_type, loaded.arch(a.device), name, compute, compute, a.shape[0], b.shape[1], a.shape[1], **problem
    )
    try:
        registry.choose("matmul", described, loaded)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_dtypes(backend, device, dtype, shape):
    m, n, k = shape
    a, b = matrix(m, k, dtype, device), matrix(k, n, dtype, device, seed=1)
    compute = torch.float16 if dtype == torch.float32 else dtype
    if reason := refusal(backend, a, b):
        with pytest.raises(ValueError, match="bfloat16"):
            diyfa.triton_matmul(a, b, backend=backend)
        assert dtype == torch.bfloat16, reason
        return
    c = diyfa.triton_matmul(a, b, backend=backend)
    assert_as_exact_as_torch(c, a, b, compute, compute)


@pytest.mark.parametrize("transposed", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("shape", [(72, 88, 136), (33, 47, 65)], ids=str)
def test_transposed_inputs(backend, device, transposed, shape):
    m, n, k = shape
    a = matrix(m, k, torch.float16, device, transposed[0])
    b = matrix(k, n, torch.float16, device, transposed[1], seed=1)
    c = diyfa.triton_matmul(a, b, backend=backend)
    assert_as_exact_as_torch(c, a, b, torch.float16, torch.float16)


def test_any_strides_read_nothing_beside_the_views(backend, device):
    storage = torch.full((100, 300), float("nan"), dtype=torch.float16, device=device)
    a, b = storage[3:53:2, 5:285:4], storage[60:95:1, 1:211:3].t()  # (25, 70), (70, 35)
    a.copy_(matrix(*a.shape, torch.float16, device))
    b.copy_(matrix(*b.shape, torch.float16, device, seed=1))
    c = diyfa.triton_matmul(a, b, backend=backend)
    assert_as_exact_as_torch(c, a, b, torch.float16, torch.float16)


def test_broadcast_input(backend, device):
    a = matrix(1, 64, torch.float16, device).expand(48, 64)
    b = matrix(64, 32, torch.float16, device, seed=1)
    c = diyfa.triton_matmul(a, b, backend=backend)
    assert_as_exact_as_torch(c, a, b, torch.float16, torch.float16)


@pytest.mark.parametrize("block", [(16, 16, 16), (32, 64, 16), (64, 32, 64), (16, 64, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_given_tiles(backend, device, block, dtype):
    a, b = matrix(70, 90, dtype, device), matrix(90, 80, dtype, device, seed=1)
    if reason := refusal(backend, a, b, block=block):
        with pytest.raises(ValueError, match=r"tile|block"):
            diyfa.triton_matmul(a, b, *block, backend=backend)
        assert reason
        return
    c = diyfa.triton_matmul(a, b, *block, backend=backend)
    assert_as_exact_as_torch(c, a, b, torch.float16, torch.float16)


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_float32_precision(backend, device, precision):
    a, b = matrix(50, 75, torch.float32, device), matrix(75, 40, torch.float32, device, seed=1)
    if backend != "cuda" and precision == "tf32":  # a format of NVIDIA's tensor cores
        with pytest.raises(ValueError, match="tf32"):
            diyfa.triton_matmul(a, b, precision=precision, backend=backend)
        return
    c = diyfa.triton_matmul(a, b, precision=precision, backend=backend)
    exact = a.double().cpu() @ b.double().cpu()
    assert c.dtype == torch.float32
    error = (c.double().cpu() - exact).abs().max()
    # tf32 keeps 10 bits of each factor: a product is off by 2^-10 of it at most, a sum by that of the sum of sizes.
    products = (a.abs().double() @ b.abs().double()).max().cpu()
    bound = products * (2**-10 if precision == "tf32" else 75 * 2**-24)
    assert error <= bound


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_out_dtype(backend, device, out_dtype):
    a, b = matrix(40, 64, torch.float16, device), matrix(64, 24, torch.float16, device, seed=1)
    c = diyfa.triton_matmul(a, b, out_dtype=out_dtype, backend=backend)
    exact = a.double().cpu() @ b.double().cpu()
    assert c.dtype == out_dtype
    # One rounding to the result's dtype, and float32 sums.
    bound = exact.abs().max() * torch.finfo(out_dtype).eps / 2 + 64 * 2**-24 * exact.abs().max()
    assert (c.double().cpu() - exact).abs().max() <= bound


def test_nan_and_inf_reach_exactly_their_row(backend, device):
    a, b = matrix(33, 40, torch.float16, device), matrix(40, 35, torch.float16, device, seed=1)
    a[5, 7], a[9, 3] = float("nan"), float("inf")
    c = diyfa.triton_matmul(a, b, backend=backend)
    assert c[5].isnan().all()
    assert not c[9].isfinite().any()
    rest = [i for i in range(33) if i not in (5, 9)]
    assert c[rest].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 4, 5), (4, 0, 5), (4, 5, 0)], ids=str)
def test_empty(backend, device, shape):
    m, n, k = shape
    c = diyfa.triton_matmul(
        torch.ones(m, k, dtype=torch.float16, device=device),
        torch.ones(k, n, dtype=torch.float16, device=device),
        backend=backend,
    )
    assert c.shape == (m, n)
    assert not c.any()


def test_gradients(backend, device):
    a = matrix(24, 40, torch.float16, device).requires_grad_()
    b = matrix(40, 56, torch.float16, device, seed=1).requires_grad_()
    dc = matrix(24, 56, torch.float16, device, seed=2)
    diyfa.triton_matmul(a, b, backend=backend).backward(dc)
    assert_as_exact_as_torch(a.grad, dc, b.detach().t(), torch.float16, torch.float16)
    assert_as_exact_as_torch(b.grad, a.detach().t(), dc, torch.float16, torch.float16)


def test_autocast() -> None:
    """As torch.mm: float32 is computed in autocast's dtype, unless a precision is asked for."""
    a, b = torch.randn(20, 30, requires_grad=True), torch.randn(30, 10)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = diyfa.triton_matmul(a.bfloat16(), b, backend="cpu")
        c = diyfa.triton_matmul(a, b, backend="cpu")
        assert diyfa.triton_matmul(a, b, precision="ieee", backend="cpu").dtype == torch.float32
    assert (c.dtype, mixed.dtype) == (torch.bfloat16, torch.bfloat16) and torch.equal(c, mixed)
    c.float().sum().backward()
    assert a.grad is not None and a.grad.dtype == torch.float32
