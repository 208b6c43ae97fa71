"""The matrix products that are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product

from diyfa.backends.cuda.hopper.matmul_configs import Sm90MatmulConfig
from diyfa.backends.cuda.matmul.configs import (
    MatmulConfig,
    candidates,
    default_config,
    unsupported_pointers,
    unsupported_tma,
)
from diyfa.backends.cuda.matmul.kernel import make_launches
from diyfa.lab.cuda.aot import CompileSpec
from diyfa.lab.examples import example_matmul
from diyfa.options import ACTIVATIONS
from diyfa.problem import MatmulProblem

# (dtype of inputs, of the product, of the result, precision)
CASES = (
    ("float16", "float16", "float16", "ieee"),
    ("bfloat16", "bfloat16", "bfloat16", "ieee"),
    ("float32", "float16", "float16", "ieee"),
    ("float32", "float32", "float32", "tf32"),
    ("float32", "float32", "float32", "ieee"),
    ("float8_e4m3fn", "float8_e4m3fn", "bfloat16", "ieee"),
)


# Bytes of spills allowed to gelu, once for each tile: before Hopper the sums and the main loop's addresses leave about
# 10 registers of 255.
GELU_SPILLS = 160
# To the form "pointers" on Blackwell, once for each tile: the result's addresses, whose columns may have any stride.
POINTER_SPILLS = 32


def compile_specs(arch: str) -> Iterator[CompileSpec]:
    """Yield every default and candidate tile of both forms, for few rows and many, and both layouts of b.

    bfloat16 has the tiles of float16, so only its default tiles are compiled.
    """
    refusals = {"tma": unsupported_tma, "pointers": unsupported_pointers}
    for (dtype, compute, out, precision), form, aligned in product(CASES, refusals, (True, False)):
        configs: dict[MatmulConfig, None] = {}
        for m in (16, 64, 4096):
            problem = MatmulProblem("cuda", arch, dtype, compute, out, m, 4096, 4096, precision, None, True, aligned)
            if refusals[form](problem) is None:
                measured = () if dtype == "bfloat16" else candidates(problem, form)
                default = default_config(problem, form)
                configs.update(dict.fromkeys([*([] if default is None else [default]), *measured]))
        for config in configs:
            yield from _config_specs(problem, config)
    yield from _epilogue_specs(arch, refusals)
    yield from _hopper_specs(arch)


def _epilogue_specs(arch: str, refusals: Mapping[str, Callable[[MatmulProblem], str | None]]) -> Iterator[CompileSpec]:
    """Yield the default tiles of both forms with a bias and each activation, and the kernel that adds up splits."""
    for form, m, activation in product(refusals, (16, 4096), (None, *ACTIVATIONS)):
        half = MatmulProblem("cuda", arch, "float16", "float16", "float16", m, 4096, 4096, aligned=True)
        problem = half.replace(bias=True, activation=activation)
        config = None if refusals[form](problem) else default_config(problem, form)
        if config is None:
            continue
        tensors, c = example_matmul(problem, b_transposed=True)
        tile = f"{config.block_m}x{config.block_n}x{config.block_k} split{config.split_k}"
        launch = make_launches(problem, tensors, c, config)[-1]  # of two, the one with the epilogue
        name = "sum" if config.split_k > 1 else form
        case = f"float16 bT {tile} bias {activation or ''}".rstrip()
        yield CompileSpec(launch, f"matmul/{name}", case, GELU_SPILLS if activation == "gelu" else 0)


def _hopper_specs(arch: str) -> Iterator[CompileSpec]:
    """Yield the Gluon product for Hopper: every tile of its table in float16, each with the rows of a that it may copy,
    then layouts, dtypes and epilogues of the default tiles."""
    from diyfa.backends.cuda.hopper import matmul_configs

    half = MatmulProblem("cuda", arch, "float16", "float16", "float16", 4096, 4096, 4096, aligned=True)
    if matmul_configs.unsupported(half) is not None:
        return
    specs: dict[str, CompileSpec] = {}
    for row in matmul_configs.TABLE:
        for m in (16, 32, 64) if row.max_m <= 64 else (half.m,):
            for config in row.candidates:
                problem = half.replace(m=m)
                if m <= row.max_m and matmul_configs.fits(config, problem):
                    spec = _hopper_spec(problem, config)
                    specs[spec.case] = spec
    yield from specs.values()
    large = matmul_configs.select_config(half)
    skinny = matmul_configs.select_config(half.replace(m=16))
    for layout in ((True, True), (False, False), (False, True)):
        yield _hopper_spec(half.replace(k_major=layout), large)
    yield _hopper_spec(half.replace(m=16, k_major=(True, True)), skinny)
    for activation in (None, "relu", "gelu", "silu"):
        problem = half.replace(k_major=(True, True), bias=True, activation=activation)
        yield _hopper_spec(problem.replace(dtype="bfloat16", compute_dtype="bfloat16", out_dtype="bfloat16"), large)
    yield _hopper_spec(half.replace(out_dtype="float32"), large)
    tf32 = MatmulProblem("cuda", arch, "float32", "float32", "float32", 4096, 4096, 4096, "tf32", aligned=True)
    for m in (16, 4096):
        problem = tf32.replace(m=m, k_major=(True, True))
        yield _hopper_spec(problem, matmul_configs.select_config(problem))
    float8 = half.replace(
        dtype="float8_e4m3fn", compute_dtype="float8_e4m3fn", out_dtype="bfloat16", k_major=(True, True)
    )
    specs.clear()
    for size in (16, 512, 4096):
        problem = float8.replace(m=size, n=max(size, 512))
        for config in matmul_configs.candidates(problem):
            spec = _hopper_spec(problem.replace(bias=config.split_k == 1), config)
            specs[spec.case] = spec
    yield from specs.values()


def _hopper_spec(problem: MatmulProblem, config: Sm90MatmulConfig) -> CompileSpec:
    from diyfa.backends.cuda.hopper import matmul

    a_by_k, b_by_k = problem.k_major
    launch, *_ = matmul.make_launches(problem, *example_matmul(problem, not a_by_k, b_by_k), config)
    rows = launch.constants["config"].a_rows
    case = f"{problem.dtype}->{problem.out_dtype} {'nt'[not a_by_k]}{'nt'[b_by_k]} "
    case += f"{config.block_m}x{config.block_n}x{config.block_k} s{config.stages} c{config.consumers}"
    case += f"{' pingpong' * config.pingpong} group{config.group_m} split{config.split_k}{' bias' * problem.bias}"
    case += f" {rows} rows" * (rows < config.rows)
    return CompileSpec(launch, "matmul/sm90", f"{case} {problem.activation or ''}".rstrip(), clean_loops=True)


def _config_specs(problem: MatmulProblem, config: MatmulConfig) -> Iterator[CompileSpec]:
    """Yield form "pointers" with and without a mask along K, form "tma" with both layouts of b."""
    dtype, compute, precision = problem.dtype, problem.compute_dtype, problem.precision
    types = f"{dtype}->{compute}" if dtype != compute else dtype
    types += f"/{precision}" if compute == "float32" else ""
    case = f"{types} {config.block_m}x{config.block_n}x{config.block_k} w{config.num_warps} s{config.num_stages}"
    if config.form == "tma":
        for b_transposed in (False, True):
            launch, *_ = make_launches(problem, *example_matmul(problem, b_transposed=b_transposed), config)
            suffix = " persistent" * config.persistent + " halves" * config.store_halves + " bT" * b_transposed
            yield CompileSpec(launch, "matmul/tma", case + suffix)
        return
    # Unaligned sizes are odd, so they always need the mask along K.
    for even in (True, False) if problem.aligned else (False,):
        some = problem.replace(k=problem.k if even else problem.k + 16)
        if not problem.aligned:
            some = problem.replace(m=problem.m + 1, n=problem.n + 1, k=problem.k + 1)
        launch, *_ = make_launches(some, *example_matmul(some), config)
        if launch.constants["c"].even_k != even:  # blocks of 16 divide every aligned K
            continue
        suffix = f" split{config.split_k}{' masked' * (not even)}{' odd' * (not problem.aligned)}"
        yield CompileSpec(launch, "matmul/pointers", case + suffix, POINTER_SPILLS)
