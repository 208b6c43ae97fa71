"""`triton_matmul` on every backend that has a matrix product, against float64."""

from __future__ import annotations

import pytest
import torch
from targets import Target

import diyfa
from diyfa import registry
from diyfa.problem import MatmulProblem
from diyfa.reference import reference_matmul

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


UNIT = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 2**-22}  # of a result's last place


def assert_within_one_unit(c, a, b, bias=None, activation=None):
    """Each element is off the exact result by at most one unit of its dtype, and what fp32 sums and functions lose."""
    exact = reference_matmul(a.double().cpu(), b.double().cpu(), bias=bias, activation=activation)
    sums = reference_matmul(a.double().cpu().abs(), b.double().cpu().abs(), bias=None if bias is None else bias.abs())
    info = torch.finfo(c.dtype)
    allowed = exact.abs() * UNIT[c.dtype] + sums * a.shape[1] * 2**-23 + info.smallest_normal * UNIT[c.dtype]
    assert c.shape == exact.shape
    error = (c.double().cpu() - exact).abs()
    assert (error <= allowed).all(), (error / allowed).max()


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
    assert c.dtype == compute
    assert_within_one_unit(c, a.to(compute), b.to(compute))


@pytest.mark.parametrize("transposed", [(True, False), (False, True), (True, True), "broadcast"], ids=str)
@pytest.mark.parametrize("shape", [(72, 88, 136), (33, 47, 65)], ids=str)
def test_transposed_inputs(backend, device, transposed, shape):
    m, n, k = shape
    is_broadcast = transposed == "broadcast"
    a = matrix(1 if is_broadcast else m, k, torch.float16, device, not is_broadcast and transposed[0]).expand(m, k)
    b = matrix(k, n, torch.float16, device, not is_broadcast and transposed[1], seed=1)
    c = diyfa.triton_matmul(a, b, backend=backend)
    assert_within_one_unit(c, a.half(), b.half())


def test_any_strides_read_nothing_beside_the_views(backend, device):
    storage = torch.full((100, 300), float("nan"), dtype=torch.float16, device=device)
    a, b = storage[3:53:2, 5:285:4], storage[60:95:1, 1:211:3].t()  # (25, 70), (70, 35)
    a.copy_(matrix(*a.shape, torch.float16, device))
    b.copy_(matrix(*b.shape, torch.float16, device, seed=1))
    c = diyfa.triton_matmul(a, b, backend=backend)
    assert_within_one_unit(c, a.half(), b.half())


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
    assert_within_one_unit(c, a.half(), b.half())


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


def test_nan_and_inf_reach_exactly_their_row(backend, device):
    a, b = matrix(33, 40, torch.float16, device), matrix(40, 35, torch.float16, device, seed=1)
    a[5, 7], a[9, 3] = float("nan"), float("inf")
    c = diyfa.triton_matmul(a, b, backend=backend)
    assert c[5].isnan().all()
    assert not c[9].isfinite().any()
    rest = [i for i in range(33) if i not in (5, 9)]
    assert c[rest].isfinite().all()


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("bias_dtype", [None, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(70, 48, 96), (3, 37, 21)], ids=str)
def test_bias_and_activation(backend, device, shape, bias_dtype, activation):
    m, n, k = shape
    a, b = matrix(m, k, torch.float16, device), matrix(k, n, torch.float16, device, True, seed=1)
    bias = None if bias_dtype is None else matrix(1, n, bias_dtype, device, seed=2)[0]
    for out_dtype in DTYPES:
        c = diyfa.triton_matmul(a, b, bias=bias, activation=activation, out_dtype=out_dtype, backend=backend)
        assert c.dtype == out_dtype
        assert_within_one_unit(c, a, b, None if bias is None else bias.cpu(), activation)


@pytest.mark.parametrize("stride", [0, 3])
def test_bias_of_any_stride(backend, device, stride):
    a, b = matrix(20, 32, torch.float16, device), matrix(32, 24, torch.float16, device, seed=1)
    storage = torch.full((100,), float("nan"), dtype=torch.float16, device=device)
    if stride:
        bias = storage[: 24 * stride : stride]
        bias.copy_(matrix(1, 24, torch.float16, device, seed=2)[0])
    else:
        bias = storage[:1].fill_(0.5).expand(24)
    c = diyfa.triton_matmul(a, b, bias=bias, backend=backend)
    assert_within_one_unit(c, a, b, bias.cpu())


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_activations_of_values_that_are_not_finite(backend, device, activation):
    """As PyTorch's formulas: inf stays inf, -inf becomes 0 or NaN, NaN stays NaN; subnormal numbers are kept."""
    values = torch.tensor([float("inf"), -float("inf"), float("nan"), 2.0**-24, -(2.0**-20), 0.0], dtype=torch.float16)
    a = torch.ones(17, 16, dtype=torch.float16, device=device)
    a[:, 1:] = 0.0
    b = torch.zeros(16, 6, dtype=torch.float16, device=device)
    b[0] = values.to(device)
    c = diyfa.triton_matmul(a, b, activation=activation, out_dtype=torch.float32, backend=backend).cpu()
    expected = reference_matmul(a.double().cpu(), b.double().cpu(), activation=activation).float()
    torch.testing.assert_close(c, expected, rtol=2**-20, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("layout", ["rows", "columns", "slice", "any"])
def test_out(backend, device, layout):
    m, n, k = 40, 24, 64
    a, b = matrix(m, k, torch.float16, device), matrix(k, n, torch.float16, device, seed=1)
    bias = matrix(1, n, torch.float16, device, seed=2)[0]
    storage = torch.full((3 * m, 3 * n), float("nan"), dtype=torch.float16, device=device)
    out = {
        "rows": storage.view(-1)[: m * n].view(m, n),
        "columns": storage.view(-1)[: m * n].view(n, m).t(),
        "slice": storage[m : 2 * m, 8 : 8 + n],
        "any": storage[::3, 1::3],
    }[layout]
    expected = diyfa.triton_matmul(a, b, bias=bias, activation="relu", backend=backend)
    for _ in range(3):
        out.fill_(float("nan"))
        c = diyfa.triton_matmul(a, b, bias=bias, activation="relu", out=out, backend=backend)
        assert c is out and torch.equal(out, expected)
    assert storage.isnan().sum() == storage.numel() - m * n  # nothing else was written


RAGGED = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129]


@pytest.mark.parametrize("size", RAGGED)
@pytest.mark.parametrize("dimension", range(3))
def test_ragged_sizes(backend, device, dimension, size):
    shape = [48, 40, 56]
    shape[dimension] = size
    m, n, k = shape
    a, b = matrix(m, k, torch.float16, device), matrix(k, n, torch.float16, device, seed=1)
    assert_within_one_unit(diyfa.triton_matmul(a, b, backend=backend), a, b)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gradients_of_the_epilogue(backend, device, dtype, activation):
    precision = "ieee" if dtype == torch.float32 else None
    leaves = [
        matrix(24, 40, dtype, device, True).requires_grad_(),
        matrix(40, 56, dtype, device, seed=1).requires_grad_(),
        matrix(1, 56, torch.float32, device, seed=2)[0].requires_grad_(),
    ]
    dc = matrix(24, 56, dtype, device, seed=3)
    c = diyfa.triton_matmul(
        leaves[0], leaves[1], bias=leaves[2], activation=activation, precision=precision, backend=backend
    )
    found = torch.autograd.grad(c, leaves, dc)
    exact_leaves = [x.detach().double().cpu().requires_grad_() for x in leaves]
    exact = reference_matmul(exact_leaves[0], exact_leaves[1], bias=exact_leaves[2], activation=activation)
    expected = torch.autograd.grad(exact, exact_leaves, dc.double().cpu())
    for x, y, leaf in zip(found, expected, leaves, strict=True):
        assert x.dtype == leaf.dtype and x.shape == leaf.shape
        tolerance = 2**-9 if dtype == torch.float16 else 2**-18  # the gradient of the sum is rounded to `dtype` once
        assert (x.double().cpu() - y).abs().max() <= tolerance * y.abs().max()


def test_gradient_of_the_bias_alone(backend, device):
    a, b = matrix(24, 40, torch.float16, device), matrix(40, 56, torch.float16, device, seed=1)
    bias = torch.zeros(56, dtype=torch.float16, device=device, requires_grad=True)
    diyfa.triton_matmul(a, b, bias=bias, activation="relu", backend=backend).float().sum().backward()
    assert torch.equal(bias.grad.cpu(), ((a.cpu().float() @ b.cpu().float()) > 0).sum(0).half())


def test_every_kernel_by_name(backend, device):
    a, b = matrix(64, 64, torch.float16, device), matrix(64, 64, torch.float16, device, True, seed=1)
    names = diyfa.kernels_for(backend, "matmul")
    ran = []
    for name in names:
        try:
            c = diyfa.triton_matmul(a, b, variant=name, backend=backend)
        except ValueError as refused:
            assert name in str(refused)
        else:
            ran.append(name)
            assert_within_one_unit(c, a, b)
    assert ran
    with pytest.raises(ValueError, match=f"no matmul kernel called 'v9'; it has: {', '.join(names)}"):
        diyfa.triton_matmul(a, b, variant="v9", backend=backend)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_an_empty_sum_is_the_bias(backend, device, activation):
    bias = matrix(1, 5, torch.float32, device)[0]
    a, b = (torch.ones(shape, dtype=torch.float16, device=device) for shape in ((4, 0), (0, 5)))
    c = diyfa.triton_matmul(a, b, bias=bias, activation=activation, backend=backend)
    expected = reference_matmul(a, b, bias=bias, activation=activation, out_dtype=torch.float16)
    assert c.shape == (4, 5) and torch.equal(c, expected)
    out = torch.full((4, 5), float("nan"), dtype=torch.float16, device=device)
    assert torch.equal(diyfa.triton_matmul(a, b, out=out, backend=backend), torch.zeros_like(out))


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


# ---- float8

FLOAT8 = torch.float8_e4m3fn


@pytest.fixture
def float8_backend(backend: str, device: torch.device) -> str:
    """A backend that multiplies float8 on this machine."""
    a = torch.zeros(16, 16, dtype=FLOAT8, device=device)
    if backend == "npu":
        with pytest.raises(ValueError, match="float8_e4m3fn"):
            diyfa.triton_matmul(a, a, backend=backend)
        pytest.skip("Ascend NPUs have no product of float8: refused")
    return backend


def float8_inputs(shape, device, b_by_k=True):
    m, n, k = shape
    generator = torch.Generator().manual_seed(m + n + k)
    a, b = torch.randn((m, k), generator=generator), torch.randn((n, k) if b_by_k else (k, n), generator=generator)
    rows, columns = torch.rand((m, 1), generator=generator) + 0.5, torch.rand((1, n), generator=generator) + 0.5
    a, b = a.to(FLOAT8).to(device), b.to(FLOAT8).to(device)
    return a, b.t() if b_by_k else b, rows.to(device), columns.to(device)


@pytest.mark.parametrize("shape", [(64, 64, 64), (37, 53, 71), (1, 1, 1), (17, 200, 16), (2, 24, 1000)], ids=str)
@pytest.mark.parametrize("b_by_k", [True, False])
def test_float8(float8_backend, device, shape, b_by_k):
    """Products of float8 are exact in float32; bfloat16 is the default of the result."""
    a, b, rows, columns = float8_inputs(shape, device, b_by_k)
    for descales in ((None, None), (rows, columns), (rows[:, 0], None), (torch.tensor(2.0, device=device), columns[0])):
        c = diyfa.triton_matmul(a, b, a_descale=descales[0], b_descale=descales[1], backend=float8_backend)
        exact = reference_matmul(a.double(), b.double(), *descales)
        sums = reference_matmul(a.double().abs(), b.double().abs(), *descales)
        assert c.dtype == torch.bfloat16
        assert ((c.double() - exact).abs() <= exact.abs() * 2**-8 + sums * shape[2] * 2**-23).all()


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_float8_epilogue(float8_backend, device, out_dtype, activation):
    """Descales come before the bias; `out` is overwritten, whatever it held."""
    a, b, rows, columns = float8_inputs((37, 48, 96), device)
    bias, out = torch.randn(48, device=device), torch.full((37, 48), float("nan"), dtype=out_dtype, device=device)
    options = {"bias": bias, "activation": activation, "backend": float8_backend}
    for _ in range(3):  # the first calls, and a repeated one
        c = diyfa.triton_matmul(a, b, a_descale=rows, b_descale=columns, out=out, **options)
    assert c is out
    exact = reference_matmul(a.double(), b.double(), rows, columns, bias=bias, activation=activation)
    torch.testing.assert_close(c.double(), exact, rtol=torch.finfo(out_dtype).eps, atol=2e-5)
    other = diyfa.triton_matmul(a, b, a_descale=3 * rows, b_descale=columns, out_dtype=out_dtype, **options)
    exact = reference_matmul(a.double(), b.double(), 3 * rows, columns, bias=bias, activation=activation)
    torch.testing.assert_close(other.double(), exact, rtol=torch.finfo(out_dtype).eps, atol=2e-5)


def test_float8_nan_and_largest_values(float8_backend, device):
    """NaN reaches exactly its row and column; 448 * 448 * K is no overflow in float32, and inf in float16."""
    a, b = (torch.full(shape, 448.0).to(FLOAT8).to(device) for shape in ((20, 64), (64, 40)))
    a[3, 5] = float("nan")
    c = diyfa.triton_matmul(a, b, out_dtype=torch.float32, backend=float8_backend)
    assert c[3].isnan().all() and (c[[*range(3), *range(4, 20)]] == 448.0 * 448 * 64).all()
    assert diyfa.triton_matmul(a, b, out_dtype=torch.float16, backend=float8_backend)[0].isinf().all()
    one = torch.tensor(2.0**-20, device=device)
    c = diyfa.triton_matmul(a, b, a_descale=one, out_dtype=torch.float16, backend=float8_backend)
    assert (c[0] == 448.0 * 448 * 64 * 2**-20).all()


@pytest.mark.parametrize("shape", [(0, 16, 16), (16, 0, 16), (16, 16, 0)], ids=str)
def test_float8_empty(float8_backend, device, shape):
    a, b, rows, columns = float8_inputs(shape, device)
    bias = torch.randn(shape[1], device=device)
    c = diyfa.triton_matmul(a, b, a_descale=rows, b_descale=columns, bias=bias, backend=float8_backend)
    torch.testing.assert_close(c, bias.bfloat16().expand(shape[:2]))


def test_float8_under_compile_and_as_an_operator(float8_backend, device):
    a, b, rows, columns = float8_inputs((32, 48, 64), device)

    def call(a, b, rows):
        return diyfa.triton_matmul(a, b, a_descale=rows, b_descale=columns, backend=float8_backend)

    expected = call(a, b, rows)
    assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(a, b, rows), expected)
    described = call(*(x.to("meta") for x in (a, b, rows))) if device.type == "meta" else expected
    assert described.shape == (32, 48)


def test_float8_refusals(float8_backend, device):
    a, b, rows, columns = float8_inputs((32, 48, 64), device)
    half = torch.randn(32, 64).half().to(device)

    def refused(error, match, a=a, b=b, **options):
        with pytest.raises(error, match=match):
            diyfa.triton_matmul(a, b, backend=float8_backend, **options)

    refused(ValueError, "a_descale must have one number or shape", a_descale=columns)
    refused(ValueError, "b_descale must have one number or shape", b_descale=rows)
    refused(ValueError, "b_descale must have one number or shape", b_descale=columns.expand(32, 48))
    refused(TypeError, "a_descale must be float32", a_descale=rows.half())
    refused(ValueError, "belongs to float8", a=half, b=half.t(), a_descale=rows)
    refused(TypeError, "dtypes must match", a=half)
    refused(TypeError, "Unsupported dtype torch.float8_e5m2", a=a.to(torch.float8_e5m2))
    refused(TypeError, "Unsupported dtype torch.float8_e4m3fn for the result", out_dtype=FLOAT8)
    refused(ValueError, "precision", precision="ieee")
    refused(ValueError, "no gradient", bias=torch.zeros(48, device=device, requires_grad=True))
    refused(ValueError, "no gradient", a_descale=rows.clone().requires_grad_())
