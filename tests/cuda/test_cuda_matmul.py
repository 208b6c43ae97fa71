"""The two forms of the CUDA matrix product, launched directly: forms, splits and tiles that a size alone would not
choose. They run on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from diyfa.arch import gpu_arch_name
from diyfa.backends.cuda import backend
from diyfa.backends.cuda.matmul import configs as matmul_configs
from diyfa.backends.cuda.matmul import kernel as matmul
from diyfa.backends.cuda.matmul.configs import MatmulConfig
from diyfa.backends.cuda.runtime.launch import is_interpreting
from diyfa.lab.cuda.matmul_specs import CASES
from diyfa.problem import MatmulProblem, MatmulTensors
from diyfa.reference import reference_matmul

KERNELS = [kernel for kernel in backend.kernels if kernel.op == "matmul"]

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
FLOAT8 = "float8_e4m3fn"
TORCH_DTYPE = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", FLOAT8)}
runs = pytest.mark.skipif(
    not is_interpreting() and not torch.cuda.is_available(), reason="needs a GPU or TRITON_INTERPRET=1"
)
# Small tiles so that the interpreter walks over several; any architecture can run them.
TMA_TILES = [
    MatmulConfig("tma", 32, 32, 64, 4, 2),
    MatmulConfig("tma", 64, 32, 16, 4, 2, group_m=1, persistent=True),
    MatmulConfig("tma", 32, 64, 32, 4, 2, group_m=2, persistent=True, store_halves=True),
]
POINTER_TILES = [
    MatmulConfig("pointers", 16, 32, 32, 4, 2),
    MatmulConfig("pointers", 16, 32, 32, 4, 2, split_k=3),
    MatmulConfig("pointers", 32, 16, 64, 4, 2, group_m=1, split_k=8),  # more splits than steps
]


def device_and_arch():
    if is_interpreting():
        return "cpu", "sm_90"
    return "cuda", gpu_arch_name(*torch.cuda.get_device_capability())


def check(tile, dtype, sizes, transposed=(False, False), out_dtype=None):
    device, arch = device_and_arch()
    m, n, k = sizes
    problem = MatmulProblem("cuda", arch, dtype, dtype, out_dtype or dtype, m, n, k, aligned=tile.form == "tma")
    generator = torch.Generator().manual_seed(m + n + k)

    def matrix(rows, columns, flip):
        x = torch.randn((columns, rows) if flip else (rows, columns), generator=generator)
        x = x.to(TORCH_DTYPE[dtype]).to(device)
        return x.t() if flip else x

    a, b = matrix(m, k, transposed[0]), matrix(k, n, transposed[1])
    c = torch.full((m, n), float("nan"), dtype=TORCH_DTYPE[problem.out_dtype], device=device)
    matmul.run(problem, MatmulTensors(a, b), c, tile)
    exact = a.double() @ b.double()
    own_error = ((a @ b).to(c.dtype).double() - exact).abs().max()
    assert (c.double() - exact).abs().max() <= 2 * own_error
    return c


@runs
@pytest.mark.parametrize("tile", TMA_TILES, ids=str)
@pytest.mark.parametrize("transposed", list(product((False, True), repeat=2)), ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tma(tile, transposed, dtype):
    _, arch = device_and_arch()
    if not matmul_configs._limits(arch).has_tma:
        pytest.skip(f"{arch} has no TMA")
    check(tile, dtype, (72, 88, 136), transposed)


@runs
@pytest.mark.parametrize("tile", POINTER_TILES, ids=str)
@pytest.mark.parametrize("sizes", [(32, 32, 192), (37, 53, 71)], ids=str)
def test_pointers(tile, sizes):
    check(tile, "float16", sizes)


@runs
def test_split_sums_are_the_same_each_time():
    first, second = (check(POINTER_TILES[1], "float16", (33, 40, 500)) for _ in range(2))
    assert torch.equal(first, second)


@runs
@pytest.mark.parametrize("tile", POINTER_TILES, ids=str)
def test_a_bias_of_any_stride(tile):
    """With a split K the second kernel adds it, and applies the activation."""
    device, arch = device_and_arch()
    generator = torch.Generator().manual_seed(0)
    a, b, many = (torch.randn(shape, generator=generator).half().to(device) for shape in ((37, 71), (71, 53), (159,)))
    described = problem(arch, m=37, n=53, k=71, bias=True, activation="relu")
    for bias in (many[::3], many[:1].expand(53)):
        c = torch.full((37, 53), float("nan"), dtype=torch.float16, device=device)
        matmul.run(described, MatmulTensors(a, b, bias), c, tile)
        torch.testing.assert_close(c, (a.double() @ b.double() + bias.double()).relu().half(), rtol=2e-3, atol=2e-3)


def problem(arch, dtype="float16", m=512, n=512, k=512, **changes):
    return MatmulProblem("cuda", arch, dtype, dtype, dtype, m, n, k, **changes)


@runs
@pytest.mark.parametrize("tile", [x for x in (*TMA_TILES, *POINTER_TILES) if x.block_k >= 32], ids=str)
def test_float8(tile):
    """With descales of rows and columns, numbers, and none, and a bias and an activation behind them."""
    device, arch = device_and_arch()
    generator = torch.Generator().manual_seed(0)
    m, n, k = 80, 112, 400
    a, b = (torch.randn(shape, generator=generator).to(TORCH_DTYPE[FLOAT8]).to(device) for shape in ((m, k), (n, k)))
    rows, columns = (torch.rand(shape, generator=generator).to(device) + 0.5 for shape in ((2 * m, 1), (1, n)))
    bias = torch.randn(n, generator=generator).to(device)
    number = torch.tensor(0.125, device=device)
    described = problem(arch, FLOAT8, m, n, k, aligned=True, k_major=(True, True)).replace(out_dtype="float16")
    for descales in ((None, None), (number, number), (rows[::2], columns), (number, columns[0])):
        c = torch.full((m, n), float("nan"), dtype=torch.float16, device=device)
        epilogue = described.replace(bias=True, activation="relu")
        matmul.run(epilogue, MatmulTensors(a, b.t(), bias, *descales), c, tile)
        exact = reference_matmul(a.double(), b.t().double(), *descales, bias=bias, activation="relu")
        torch.testing.assert_close(c.double(), exact, rtol=2**-10, atol=2**-10)


def test_float8_is_refused_before_ada_and_in_short_steps():
    described = problem("sm_86", FLOAT8)
    assert "8.9" in matmul_configs.unsupported_pointers(described)
    short = matmul_configs.unsupported_pointers(described.replace(arch="sm_89", block=(64, 64, 16)))
    assert "at least 32" in short
    assert matmul_configs.unsupported_pointers(described.replace(arch="sm_89", block=(64, 64, 32))) is None


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_bfloat16_is_refused_on_turing(kernel):
    reason = kernel.unsupported(problem("sm_75", "bfloat16"))
    assert "sm_75" in reason
    if kernel.name == "pointers":
        assert "bfloat16 needs compute capability 8.0" in reason


@pytest.mark.parametrize(("changes", "reason"), [
    ({"arch": "sm_80"}, "TMA needs Hopper"),
    ({"dtype": "float32"}, "not float32"),
    ({"aligned": False}, "not multiples of 16 bytes"),
    ({"n": 100}, "rows of the result"),
    ({"block": (512, 16, 16)}, "at most 256"),
    ({"k": 2**31 - 1}, "at most 2147418112"),
    ({"m": 2**20, "n": 2**20}, "tiles of 16 x 16"),
], ids=str)  # fmt: skip
def test_tma_refusals(changes, reason):
    described = problem(**{"arch": "sm_90", "aligned": True, **changes})
    with pytest.raises(AssertionError, match=reason):
        assert not matmul_configs.unsupported_tma(described), matmul_configs.unsupported_tma(described)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("block", list(product((16, 64, 256), repeat=3)), ids=str)
def test_given_tile_is_honoured_or_refused(arch, block):
    for kernel in KERNELS:
        described = problem(arch, block=block, aligned=True)
        reason = kernel.unsupported(described)
        if reason is None:
            config = kernel.config(described)
            assert (config.block_m, config.block_n, config.block_k) == block
            assert matmul_configs.fits(config, described)
        elif kernel.name == "pointers":
            assert "shared memory" in reason


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("m", [1, 16, 64, 512, 8192])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tables_have_a_tile_for_everything(arch, m, aligned, case):
    dtype, compute, out, precision = case
    described = MatmulProblem("cuda", arch, dtype, compute, out, m, 4096, 4096, precision, None, True, aligned)
    for kernel in KERNELS:
        if kernel.unsupported(described) is None and kernel.name != "sm90":
            default = kernel.config(described)
            every = matmul_configs.candidates(described, kernel.name)
            assert default in every
            assert all(matmul_configs.fits(c, described) and c.form == kernel.name for c in every)


@pytest.mark.parametrize("dimension", ["m", "n", "k"])
def test_sizes_are_refused_whose_rounding_to_tiles_overflows(dimension):
    """Sizes and tiles are counted in 32 bits."""
    for size in (2**31 - 8, 2**31, 2**32):
        assert "at most" in matmul_configs.unsupported_pointers(problem("sm_80", **{"m": 8, "n": 8, dimension: size}))
    assert matmul_configs.unsupported_pointers(problem("sm_80", **{"m": 8, "n": 8, dimension: 2**31 - 2**16})) is None


def test_wide_matrices_are_addressed_in_64_bits():
    """Rows beyond 2^31 elements: the last row of a tall view over little memory."""
    if is_interpreting() or not torch.cuda.is_available():
        pytest.skip("needs a GPU: 4 GiB of float16")
    a = torch.empty((2**15, 2**16 + 8), dtype=torch.float16, device="cuda")[:, :64]
    a.normal_()
    b = torch.randn(64, 32, device="cuda").half()
    described = problem(gpu_arch_name(*torch.cuda.get_device_capability()), m=a.shape[0], n=32, k=64)
    c = torch.empty(a.shape[0], 32, dtype=torch.float16, device="cuda")
    matmul.matmul_pointers(described, MatmulTensors(a, b), c)
    torch.testing.assert_close(c, a @ b)
