"""The Gluon product for Hopper in the simulator: results, and each of its waits, arrivals and fences is needed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hopper_interpreted import interpreted_only, kernel_source, load_changed, load_kernel
from poison import poisoned_allocations
from simulators.gluon import Deadlock, InterpretedKernel, InvalidOperand, KernelBug, Race
from synchronising import Synchronising

import diyfa
from diyfa import plan as planning
from diyfa import registry
from diyfa.backends.cuda.attention.launch import use_config
from diyfa.backends.cuda.hopper import matmul, matmul_configs
from diyfa.backends.cuda.hopper.matmul_configs import Sm90MatmulConfig
from diyfa.backends.cuda.runtime.passes import launch_each
from diyfa.problem import MatmulProblem, MatmulTensors
from diyfa.reference import reference_matmul

pytestmark = interpreted_only

# Few stages, so that each is used again within a tile.
TILES = {
    "two consumers": Sm90MatmulConfig(128, 128, 64, 3, group_m=2),
    "wide": Sm90MatmulConfig(128, 256, 64, 2),
    "pingpong": Sm90MatmulConfig(128, 128, 64, 3, pingpong=True, group_m=1),
    "one consumer": Sm90MatmulConfig(64, 128, 128, 2, consumers=1),
    "one store": Sm90MatmulConfig(64, 64, 64, 3, consumers=1),
    "narrow store": Sm90MatmulConfig(64, 32, 64, 3, consumers=1),
    "split": Sm90MatmulConfig(128, 128, 64, 3, split_k=2),
}
UNIT = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 2**-22}


def random_matrix(rows: int, columns: int, row_major: bool, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn((rows, columns) if row_major else (columns, rows)).to(dtype)
    return x if row_major else x.t()


def multiply(
    config: Sm90MatmulConfig,
    sizes: tuple[int, int, int],
    seed: int = 3,
    kernels: ModuleType = matmul,
    interleave: bool = False,
    multiprocessors: int = 2,
    dtype: torch.dtype = torch.float16,
    last_row: float | None = None,
    **problem: object,
) -> None:
    """Require a product within one unit of the exact one. Memory that the kernel does not write is NaN.

    `last_row`: infinity or NaN for an element of a's last row, which makes this row of c infinite or NaN, and no other.
    """
    m, n, k = sizes
    name = str(dtype).removeprefix("torch.")
    out = str(problem.pop("out_dtype", name))
    precision = "tf32" if dtype == torch.float32 else "ieee"
    descales = problem.pop("descales", (None, None))
    described = MatmulProblem("cuda", "sm_90", name, name, out, m, n, k, precision, aligned=True).replace(**problem)
    assert matmul_configs.fits(config, described) and matmul_configs._refusal(described) is None
    c_dtype = getattr(torch, out)
    torch.manual_seed(0)
    a = random_matrix(m, k, described.k_major[0], dtype)
    b = random_matrix(k, n, not described.k_major[1], dtype)
    if last_row is not None:
        a[-1, k // 2] = last_row
    bias = torch.randn(n).to(c_dtype if dtype == torch.float8_e4m3fn else dtype) if described.bias else None
    kernel = InterpretedKernel(kernels._matmul_sm90_kernel, seed, interleave)
    c = torch.full((m, n), float("nan"), dtype=c_dtype)
    with pytest.MonkeyPatch.context() as patch, poisoned_allocations():
        patch.setattr(matmul, "_matmul_sm90_kernel", kernel)
        patch.setattr(matmul, "multiprocessors", lambda device: multiprocessors)
        launch_each(matmul.make_launches(described, MatmulTensors(a, b, bias, *descales), c, config))
    assert kernel.launches == 1
    exact = reference_matmul(a.double(), b.double(), *descales, bias=bias, activation=described.activation)
    sums = reference_matmul(a.double().abs(), b.double().abs(), *descales, bias=None if bias is None else bias.abs())
    rounding = 2**-9 if dtype == torch.float32 else k * 2**-23  # of factors to tf32, or of sums
    if last_row is not None:
        torch.testing.assert_close(c[-1].double(), exact[-1], equal_nan=True)
        c, exact, sums = c[:-1], exact[:-1], sums[:-1]
    assert ((c.double() - exact).abs() <= exact.abs() * UNIT[c.dtype] + sums * rounding + 2**-24).all()


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("layout", list(product((True, False), repeat=2)), ids=str)
def test_layouts(tile: str, layout: tuple[bool, bool]) -> None:
    multiply(TILES[tile], (200, 264, 328), k_major=layout, dtype=torch.bfloat16)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_epilogue(tile: str, activation: str | None) -> None:
    multiply(TILES[tile], (130, 136, 200), bias=True, activation=activation)


@pytest.mark.parametrize("tile", TILES)
def test_float32_result(tile: str) -> None:
    multiply(TILES[tile], (130, 140, 200), out_dtype="float32", k_major=(True, True))


@pytest.mark.parametrize("tile", TILES)
def test_tf32(tile: str) -> None:
    config = TILES[tile]
    halved = Sm90MatmulConfig(**{**vars(config), "block_k": config.block_k // 2})
    multiply(halved, (130, 132, 200), dtype=torch.float32, k_major=(True, True))


FLOAT8_TILES = [x for x in TILES if x not in ("wide", "pingpong")]


def float8(config: Sm90MatmulConfig, sizes: tuple[int, int, int], out_dtype: str, **problem: object) -> None:
    doubled = Sm90MatmulConfig(**{**vars(config), "block_k": config.block_k * 2})
    multiply(doubled, sizes, dtype=torch.float8_e4m3fn, k_major=(True, True), out_dtype=out_dtype, **problem)


@pytest.mark.parametrize("tile", FLOAT8_TILES)
@pytest.mark.parametrize("kind", ["none", "numbers", "vectors", "number and vector"])
def test_float8(tile: str, kind: str) -> None:
    rows, columns = torch.rand(130, 1) + 0.5, torch.rand(1, 136) + 0.5
    descales = {
        "none": (None, None),
        "numbers": (torch.tensor(0.25), torch.tensor([[3.0]])),
        "vectors": (rows, columns),
        "number and vector": (torch.tensor([2.0]), columns[0]),
    }[kind]
    float8(TILES[tile], (130, 136, 400), "bfloat16", descales=descales, bias=kind == "vectors", activation="silu")


@pytest.mark.parametrize("tile", FLOAT8_TILES)
def test_float8_sizes(tile: str) -> None:
    for sizes in ((1, 8, 16), (129, 136, 144), (64, 8, 1040)) if tile != "split" else ((129, 136, 1040),):
        float8(TILES[tile], sizes, "float32", multiprocessors=3)
    float8(TILES[tile], (300, 264, 528), "float16", seed=5, interleave=True)


def test_float8_sums_have_two_registers() -> None:
    problem = HALF.replace(dtype="float8_e4m3fn", compute_dtype="float8_e4m3fn", k_major=(True, True))
    assert all(config.rows * config.block_n <= 64 * 128 for config in matmul_configs.candidates(problem))
    assert "two registers" in str(matmul_configs.config_refusal(TILES["wide"], problem))


# (M, N, K): one tile and many; one step and many; whole tiles and ragged ones; more programs than tiles
SIZES = [(1, 8, 8), (128, 128, 64), (129, 136, 72), (64, 8, 520), (384, 256, 64), (5, 520, 136), (257, 16, 8)]


@pytest.mark.parametrize("tile", [x for x in TILES if x != "split"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(tile: str, sizes: tuple[int, int, int]) -> None:
    multiply(TILES[tile], sizes, multiprocessors=3)


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129])
def test_ragged_rows(size: int) -> None:
    multiply(TILES["two consumers"], (size, 72, 88))


def test_rows_of_two_spans_are_not_copied_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """TMA would write the second span behind the few rows of the first."""
    monkeypatch.setattr(matmul, "copied_rows", lambda problem, config: 16)
    with pytest.raises(InvalidOperand, match="rows of one swizzle"):
        multiply(TILES["one consumer"], (16, 128, 256))


@pytest.mark.parametrize("m", [1, 15, 16, 17, 31, 32, 33])
def test_rows_behind_the_last_do_not_count(m: int) -> None:
    """Infinities in the last row of a change its row of c alone, in buffers that hold NaN where nothing was copied."""
    multiply(TILES["one store"], (m, 72, 328), multiprocessors=1, last_row=float("inf"))
    multiply(TILES["two consumers"], (m, 72, 328), last_row=float("nan"))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("seed", range(6))
def test_every_interleaving(tile: str, seed: int) -> None:
    """With one program after another, or three at once."""
    multiply(TILES[tile], (300, 264, 328), seed, interleave=seed > 3, multiprocessors=3 if seed > 3 else 2)


# ---- through the public function


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> InterpretedKernel:
    """From now on `variant="sm90"` runs in the simulator."""
    kernel = InterpretedKernel(matmul._matmul_sm90_kernel, 3)
    monkeypatch.setattr(planning, "plans", {})
    monkeypatch.setattr(matmul, "_matmul_sm90_kernel", kernel)
    monkeypatch.setattr(matmul, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(matmul_configs, "environment_refusal", lambda: None)
    return kernel


def test_the_public_call(simulated: InterpretedKernel) -> None:
    torch.manual_seed(0)
    a, weight, bias = torch.randn(100, 72).half(), torch.randn(136, 72).half(), torch.randn(136)
    out = torch.empty(100, 272, dtype=torch.float16)[:, :136]
    with diyfa.use_backend("cuda"):
        for _ in range(2):
            c = diyfa.triton_matmul(a, weight.t(), bias=bias, activation="silu", out=out, variant="sm90")
    assert c is out and simulated.launches == 2
    expected = reference_matmul(a, weight.t(), bias=bias, activation="silu")
    torch.testing.assert_close(c.float(), expected, rtol=2**-10, atol=2**-10)


def test_the_backward_pass_takes_the_kernel(simulated: InterpretedKernel) -> None:
    """dz @ bᵀ and aᵀ @ dz read both operands as they lie: no copy, and transposed operands in the kernel."""
    torch.manual_seed(0)
    a, b = (torch.randn(shape).bfloat16().requires_grad_() for shape in ((72, 64), (64, 136)))
    with diyfa.use_backend("cuda"):
        diyfa.triton_matmul(a, b, activation="gelu", variant="sm90").float().sum().backward()
    assert simulated.launches == 4  # the product, that product again for gelu, and both gradients
    exact_a, exact_b = (x.detach().double().requires_grad_() for x in (a, b))
    reference_matmul(exact_a, exact_b, activation="gelu").sum().backward()
    for found, expected in ((a.grad, exact_a.grad), (b.grad, exact_b.grad)):
        assert (found.double() - expected).abs().max() <= 2**-7 * expected.abs().max()


def test_a_gradient_that_the_kernel_cannot_compute_takes_another(simulated: InterpretedKernel) -> None:
    """K = 20: da has rows of 40 bytes, which TMA cannot write."""
    a, b = torch.randn(64, 24).half()[:, :20].requires_grad_(), torch.randn(20, 64).half().requires_grad_()
    with diyfa.use_backend("cuda"):
        diyfa.triton_matmul(a, b, variant="sm90").float().sum().backward()
    assert simulated.launches == 2  # the product and db
    exact = torch.ones(64, 64) @ b.detach().float().t()
    torch.testing.assert_close(a.grad.float(), exact, rtol=2**-10, atol=2**-6)


def test_a_config_of_the_caller(simulated: InterpretedKernel) -> None:
    a, b = torch.randn(64, 64).half(), torch.randn(64, 64).half()
    asked: list[MatmulProblem] = []

    def config(problem: MatmulProblem) -> Sm90MatmulConfig:
        asked.append(problem)
        return TILES["one store"]

    with diyfa.use_backend("cuda"), use_config("sm90_matmul", config):
        diyfa.triton_matmul(a, b, variant="sm90")
    assert len(asked) == 1 and simulated.launches == 1


HALF = MatmulProblem("cuda", "sm_90", "float16", "float16", "float16", 4096, 4096, 4096, aligned=True)
FULL = MatmulProblem("cuda", "sm_90", "float32", "float32", "float32", 64, 64, 64, aligned=True)
REFUSALS = {
    "wgmma needs sm_90, this is sm_100": HALF.replace(arch="sm_100"),
    "tiles of its own table": HALF.replace(block=(64, 64, 64)),
    "not float32 in float32": FULL,
    "not float32 in float16": FULL.replace(compute_dtype="float16"),
    "contiguous along K": FULL.replace(precision="tf32", k_major=(True, False)),
    "tf32 and float8 needs": HALF.replace(dtype="float8_e4m3fn", compute_dtype="float8_e4m3fn"),
    "not multiples of 16 bytes": HALF.replace(aligned=False),
    "no multiples of 16 bytes": HALF.replace(aligned_out=False),
    "rows of the result": HALF.replace(n=4100),
    "at most 2147418112": HALF.replace(k=2**31 - 1),
    "tiles of 16 x 16": HALF.replace(m=2**20, n=2**20, k=64),
    "steps of BLOCK_K": HALF.replace(m=2**18, n=2**18, k=2**18),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_refusals(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_configs, "environment_refusal", lambda: None)
    with pytest.raises(ValueError, match=reason):
        registry.choose("matmul", REFUSALS[reason], registry.load_backend("cuda"), "sm90")


def test_the_choice_is_that_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` takes the kernel for all sizes, in each dtype that it multiplies as it is."""
    backend = registry.load_backend("cuda")
    monkeypatch.setattr(matmul_configs, "environment_refusal", lambda: None)
    tf32 = FULL.replace(precision="tf32", k_major=(True, True))
    assert registry.choose("matmul", HALF, backend).name == "sm90"
    assert registry.choose("matmul", HALF.replace(m=16), backend).name == "sm90"
    assert registry.choose("matmul", tf32, backend).name == "sm90"
    assert registry.choose("matmul", tf32.replace(precision="ieee"), backend).name == "pointers"


def test_every_class_has_tiles_that_fit() -> None:
    """For each dtype and result, and a split never has an empty share of K."""
    names = set()
    others = (
        HALF.replace(out_dtype="float32"),
        FULL.replace(precision="tf32", k_major=(True, True)),
        HALF.replace(dtype="float8_e4m3fn", compute_dtype="float8_e4m3fn", k_major=(True, True)),
    )
    for m, n, k in product(
        (1, 16, 64, 65, 512, 8192, 32768), (8, 128, 1024, 4096, 8192), (1, 8, 256, 1024, 4096, 65536)
    ):
        names.add(matmul_configs.problem_class(m, n, k).name)
        for problem in (HALF, *others):
            assert matmul_configs.candidates(problem.replace(m=m, n=n, k=k))
            for config in matmul_configs.candidates(problem.replace(m=m, n=n, k=k)):
                steps = -(-k // config.block_k)
                share = -(-steps // config.split_k)
                assert (config.split_k - 1) * share < steps
                assert config.block_m % (64 * config.consumers) == 0 or config.pingpong
    assert names == {row.name for row in matmul_configs.TABLE}


@pytest.mark.parametrize("dimension", ["m", "n", "k"])
def test_sizes_are_refused_whose_rounding_to_tiles_overflows(dimension: str) -> None:
    """Sizes, tiles and steps are counted in 32 bits; the largest tile rounds a size up by 255."""
    problem = HALF.replace(m=8, n=8, k=8)
    for size in (2**31 - 8, 2**31 - 256, 2**31, 2**32):
        assert "at most" in str(matmul_configs._refusal(problem.replace(**{dimension: size})))
    assert matmul_configs._refusal(problem.replace(**{dimension: 2**31 - 2**16})) is None


def test_partial_sums_need_rows_that_tma_writes() -> None:
    """An `out` with padded rows may have any N, but partial sums are contiguous (SPLIT_K, M, N) of float32."""
    padded = HALF.replace(m=16, n=129, k=8192, aligned_out=True)
    assert matmul_configs._refusal(padded) is None
    assert {config.split_k for config in matmul_configs.candidates(padded)} == {1}
    assert {config.split_k for config in matmul_configs.candidates(padded.replace(n=132))} == {1, 2, 4, 8}
    assert not matmul_configs.fits(TILES["split"], padded) and matmul_configs.fits(TILES["split"], HALF)


def test_a_config_that_cannot_run_is_refused(simulated: InterpretedKernel) -> None:
    """Before anything is launched, if the caller sets it for this thread."""
    a, b = torch.randn(64, 256).half(), torch.randn(256, 136).half()
    out = torch.empty(64, 136).half()[:, :129]
    with diyfa.use_backend("cuda"), use_config("sm90_matmul", TILES["split"]):
        diyfa.triton_matmul(a, b, variant="sm90")
        with pytest.raises(ValueError, match="partial sums"):
            diyfa.triton_matmul(a, b[:, :129], out=out, variant="sm90")
    with (
        diyfa.use_backend("cuda"),
        use_config("sm90_matmul", Sm90MatmulConfig(128, 256, 64, 9)),
        pytest.raises(ValueError, match="shared memory"),
    ):
        diyfa.triton_matmul(a, b, variant="sm90")
    # Of 10 steps 8 splits have 2 each, and 3 splits none; 5 splits have all.
    a, b = torch.randn(64, 640).half(), torch.randn(640, 136).half()
    for split_k in (8, 5):
        config = replace(TILES["one store"], split_k=split_k)
        with diyfa.use_backend("cuda"), use_config("sm90_matmul", config):
            if split_k == 5:
                diyfa.triton_matmul(a, b, variant="sm90")
                continue
            with pytest.raises(ValueError, match="a split has none"):
                diyfa.triton_matmul(a, b, variant="sm90")
    assert simulated.launches == 2


def test_padded_rows_of_any_number_of_columns(simulated: InterpretedKernel) -> None:
    """Both split and unsplit classes, with NaN beside the result, which stays."""
    torch.manual_seed(0)
    for n, k in ((129, 1024), (1, 64), (7, 72)):
        a, b = torch.randn(16, k).half(), torch.randn(k, 136).half()[:, :n]
        memory = torch.full((16, 160), float("nan"), dtype=torch.float16)
        with diyfa.use_backend("cuda"):
            c = diyfa.triton_matmul(a, b, out=memory[:, :n], variant="sm90")
        torch.testing.assert_close(c.float(), a.float() @ b.float(), rtol=2**-10, atol=2**-6)
        assert memory[:, n:].isnan().all()
    assert simulated.launches == 3


def test_an_empty_sum_is_not_launched(simulated: InterpretedKernel) -> None:
    """K = 0 gives activation(bias), also where the class would split K; an empty result is empty."""
    bias = torch.randn(8)
    with diyfa.use_backend("cuda"):
        c = diyfa.triton_matmul(torch.empty(64, 0).half(), torch.empty(8, 0).half().t(), bias=bias, activation="silu")
        for m, n in ((0, 8), (8, 0)):
            a, b = torch.empty(m, 64).half(), torch.empty(64, n).half()
            assert diyfa.triton_matmul(a, b).shape == (m, n)
    torch.testing.assert_close(c, torch.nn.functional.silu(bias).half().expand(64, 8), rtol=2**-10, atol=2**-10)
    assert not simulated.launches
    for problem in (HALF.replace(k=0), HALF.replace(m=16, k=0)):
        assert matmul_configs.select_config(problem).split_k == 1  # `explain` asks for it
    for problem in (HALF.replace(m=0), HALF.replace(n=0)):
        assert matmul_configs.candidates(problem)


UNREADABLE = {
    "an odd address": lambda x: x.flatten()[1 : 1 + 64 * 64].view(64, 64),
    "no step from row to row": lambda x: x[:1, :64].expand(64, 64),
    "rows of an odd length": lambda x: x.flatten()[: 64 * 65].view(64, 65)[:, :64],
    "every second element": lambda x: x[:64, :128:2],
    "a step of 2^40 bytes": lambda x: x.as_strided((1, 64), (2**39, 1)),
}


@pytest.mark.parametrize("view", UNREADABLE)
def test_views_that_tma_does_not_read_are_refused(simulated: InterpretedKernel, view: str) -> None:
    """By name they are refused, on either side and as `out`; `auto` takes another kernel."""
    x, b = UNREADABLE[view](torch.randn(128, 136).half()), torch.randn(64, 64).half()
    with diyfa.use_backend("cuda"):
        for operands in ((x, b), (b, x.t())):
            with pytest.raises(ValueError, match="multiples of 16 bytes"):
                diyfa.triton_matmul(*operands, variant="sm90")
        if view != "no step from row to row":  # its elements overlap
            with pytest.raises(ValueError, match="multiples of 16 bytes"), torch.no_grad():
                diyfa.triton_matmul(torch.randn(x.shape[0], 64).half(), b, out=x, variant="sm90")
        c = diyfa.triton_matmul(x, b)
    torch.testing.assert_close(c.float(), x.float() @ b.float(), rtol=2**-10, atol=2**-6)
    assert not simulated.launches


@pytest.mark.parametrize(("changes", "reason"), [
    ({"stages": 1}, "stages"),  # a consumer would wait for a step whose stage it releases only after it
    ({"stages": 0}, "stages"), ({"split_k": 0}, "split_k"), ({"group_m": 0}, "group_m"),
    ({"consumers": 3}, "consumers"), ({"block_m": 64}, "block_m"),
    ({"pingpong": True, "split_k": 2}, "no split_k"),  # consumers skip tiles: all must have as many steps
    ({"pingpong": True, "consumers": 1, "block_m": 64}, "two consumers"),
])  # fmt: skip
def test_configs_that_no_problem_can_run(changes: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Sm90MatmulConfig(**{**vars(Sm90MatmulConfig(128, 128, 64, 3)), **changes})


# ---- the same kernel with one thing wrong

NAME = "hopper.matmul"
FUNCTIONS = ("mbarrier.expect", "fence_async_shared", "tma.store_wait", "turn", "wait_for_previous_kernels")
METHODS = ("acquire", "wait", "release")
SOURCE = Synchronising(kernel_source(NAME), FUNCTIONS, METHODS)
LINES = [f"{i}: {line}" for i, line in enumerate(SOURCE.lines)]


def broken(source: str, folder: Path) -> ModuleType:
    """Return the kernel's module with another source."""
    return load_kernel({NAME: source}, folder, (NAME,))


def run_both(kernels: ModuleType) -> None:
    """Several tiles in both schedules, of 5 steps in 3 stages, with copies and products that run late and early."""
    for tile, seed in product(("two consumers", "pingpong"), (3, 1, 2)):
        multiply(TILES[tile], (300, 264, 264), seed, kernels)
    float8(TILES["two consumers"], (300, 264, 528), "float16", kernels=kernels)


def test_the_unparsed_source_is_the_kernel(tmp_path: Path) -> None:
    assert len(LINES) >= 13
    run_both(broken(SOURCE.source(), tmp_path))


@pytest.mark.parametrize("line", LINES)
def test_no_wait_arrival_or_fence_is_superfluous(line: str, tmp_path: Path) -> None:
    with pytest.raises(KernelBug):
        run_both(broken(SOURCE.without(int(line.split(":")[0])), tmp_path))


MUTANTS = {
    "a stage is released before its product is done": (
        "        acc = warpgroup_mma_wait(1, deps=[acc])\n        channel.release(i - 1)\n",
        "        acc = warpgroup_mma_wait(1, deps=[acc])\n        channel.release(i)\n",
        KernelBug,
    ),
    "the last stage is released before its product is done": (
        "    acc = warpgroup_mma_wait(0, deps=[acc])\n    channel.release(end - 1)\n",
        "    channel.release(end - 1)\n    acc = warpgroup_mma_wait(0, deps=[acc])\n",
        Race,
    ),
    "the loop waits for no product": (
        "        acc = warpgroup_mma_wait(1, deps=[acc])\n        channel.release(i - 1)\n",
        "        acc = warpgroup_mma_wait(2, deps=[acc])\n        channel.release(i - 1)\n",
        Race,
    ),
    "a stage of float8 is released before its product is done": (
        "            product = warpgroup_mma_wait(0, deps=[product])\n            channel.release(item)\n",
        "            channel.release(item)\n            product = warpgroup_mma_wait(0, deps=[product])\n",
        KernelBug,
    ),
    "a product of float8 is added to the one before": (
        "operands.start_product(item, BOX, product, False)",
        "operands.start_product(item, BOX, product, True)",
        AssertionError,
    ),
    "a consumer waits for the phase before": (
        "        channel.wait(i)\n        acc = ",
        "        channel.wait(i - 1)\n        acc = ",
        KernelBug,
    ),
    "a store's buffer is written one store too early": ("tma.store_wait(BUFFERS - 1)", "tma.store_wait(BUFFERS)", Race),
    "both consumers read the first one's rows": ("0 if config.PINGPONG else INDEX", "0", (KernelBug, AssertionError)),
    "the producer expects the bytes of one box": (
        "BOXES * self.a_tensor.block_type.nbytes + self",
        "self.a_tensor.block_type.nbytes + self",
        KernelBug,
    ),
    "all consumers release what one reads": ("1 if config.PINGPONG else CONSUMERS", "CONSUMERS", Deadlock),
    "a consumer keeps its turn": ('turn("arrive", 1 - INDEX)', 'turn("arrive", INDEX)', KernelBug),
    "the other consumer's steps are not skipped": (
        "item = end + (EVERY - 1) * order.steps",
        "item = end",
        (KernelBug, AssertionError),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_bugs_are_reported(name: str, tmp_path: Path) -> None:
    before, after, error = MUTANTS[name]
    with pytest.raises(error):
        run_both(load_changed(NAME, before, after, tmp_path))
