"""The matrix products that are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from diyfa.backends.cuda.matmul.configs import (
    MatmulConfig,
    candidates,
    default_config,
    unsupported_pointers,
    unsupported_tma,
)
from diyfa.backends.cuda.matmul.kernel import TORCH_DTYPE, make_launches
from diyfa.lab.cuda.aot import CompileSpec, launch_spec
from diyfa.problem import MatmulProblem

# (dtype of inputs, of the product, of the result, precision)
CASES = (
    ("float16", "float16", "float16", "ieee"),
    ("bfloat16", "bfloat16", "bfloat16", "ieee"),
    ("float32", "float16", "float16", "ieee"),
    ("float32", "float32", "float32", "tf32"),
    ("float32", "float32", "float32", "ieee"),
)


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


def _config_specs(problem: MatmulProblem, config: MatmulConfig) -> Iterator[CompileSpec]:
    """Yield form "pointers" with and without a mask along K, form "tma" with both layouts of b."""
    dtype, compute, precision = problem.dtype, problem.compute_dtype, problem.precision
    types = f"{dtype}->{compute}" if dtype != compute else dtype
    types += f"/{precision}" if compute == "float32" else ""
    case = f"{types} {config.block_m}x{config.block_n}x{config.block_k} w{config.num_warps} s{config.num_stages}"
    if config.form == "tma":
        for b_transposed in (False, True):
            a, b, c = _example_tensors(problem, b_transposed)
            launch, *_ = make_launches(problem, a, b, None, c, config)
            suffix = " persistent" * config.persistent + " halves" * config.store_halves + " bT" * b_transposed
            yield launch_spec(launch, "matmul/tma", case + suffix)
        return
    # Unaligned sizes are odd, so they always need the mask along K.
    for even in (True, False) if problem.aligned else (False,):
        some = problem.replace(k=problem.k if even else problem.k + 16)
        if not problem.aligned:
            some = problem.replace(m=problem.m + 1, n=problem.n + 1, k=problem.k + 1)
        a, b, c = _example_tensors(some)
        launch, *_ = make_launches(some, a, b, None, c, config)
        if launch.constants["c"].even_k != even:  # blocks of 16 divide every aligned K
            continue
        suffix = f" split{config.split_k}{' masked' * (not even)}{' odd' * (not problem.aligned)}"
        yield launch_spec(launch, "matmul/pointers", case + suffix)


def _example_tensors(
    problem: MatmulProblem, b_transposed: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a, b and c without memory."""

    def empty(rows: int, columns: int, dtype: str) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=TORCH_DTYPE[dtype], device="meta")

    m, n, k = problem.m, problem.n, problem.k
    b = empty(n, k, problem.dtype).t() if b_transposed else empty(k, n, problem.dtype)
    return empty(m, k, problem.dtype), b, empty(m, n, problem.out_dtype)
