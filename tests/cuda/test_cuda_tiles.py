"""Every tile of the CUDA tables, forced, at shapes that cut it: what the autotuner may choose must be right.

On a GPU all tiles of its own tables run; in the interpreter one of each form, on small shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product

import pytest
import torch
from nonfinite import assert_propagates
from poison import poisoned_allocations
from targets import TARGETS

import diyfa
from diyfa.testing import AttentionCase, assert_within_budget, make_inputs, run_case

if "cuda" not in TARGETS:
    pytest.skip("the cuda backend is not tested in this run", allow_module_level=True)

from diyfa.backends.cuda import backend as cuda
from diyfa.backends.cuda.attention.configs import AttentionConfig, candidates
from diyfa.backends.cuda.attention.launch import _bucket, use_config
from diyfa.problem import AttentionProblem

TARGET = TARGETS["cuda"]
KINDS = ("fwd", "dkdv", "dq")


def tiles() -> Iterator[tuple[str, int, str, str, AttentionConfig]]:
    """(kind, head_dim, dtype, a bias's dtype, tile): of every form, TMA's where a large problem would take it."""
    here = cuda.arch(torch.device(TARGET.device))
    head_dims, biases = ((32,), ("",)) if TARGET.interpreted else ((64, 128, 256), ("", "float32"))
    for arch, head_dim, dtype, bias, aligned in (
        *product((here,), head_dims, ("float16", "float32"), biases, (True, False)),
        *(product(("sm_75",), (32,), ("float16",), ("",), (True,)) if TARGET.interpreted else ()),
    ):
        size = (4, 8, 8, 4096, 4096, head_dim, head_dim)
        problem = AttentionProblem("cuda", arch, dtype, "bhsd", *size, bias=bias, aligned=aligned)
        for kind in KINDS:
            for tile in list(candidates(kind, problem))[: 1 if TARGET.interpreted else None]:
                yield kind, head_dim, dtype, bias, tile


CASES = sorted(set(tiles()), key=repr)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("kind", "head_dim", "dtype", "bias", "tile"),
    CASES,
    ids=[
        f"{k}-{d}-{t}{f'-{b}_bias' * bool(b)}-{c.block_m}x{c.block_n}-w{c.num_warps}s{c.num_stages}-{c.form}"
        for k, d, t, b, c in CASES
    ],
)
def test_tile(kind: str, head_dim: int, dtype: str, bias: str, tile: AttentionConfig, causal: bool) -> None:
    rows, keys = (50, 70) if TARGET.interpreted else (391, 517)
    case = AttentionCase(
        "tile", 1 if TARGET.interpreted else 2, 2, 1, rows, keys, head_dim, dtype=dtype, layout="bshd", causal=causal,
        bias="1hqk" if bias else "", bias_dtype=bias,
    )  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(use_config(kind, tile))
        stack.enter_context(poisoned_allocations())
        for _ in range(2):  # the second call takes the short way to the compiled kernel
            results = run_case(
                lambda *args, **kwargs: diyfa.flash_attention_v2(*args, backend="cuda", variant="v2", **kwargs),
                make_inputs(case, TARGET.device),
            )
    assert_within_budget(results, case, TARGET.oracle_device)


# Both have one size class: what `diyfa.tuning.bucket_size` makes of heads and tokens.
@pytest.mark.parametrize("sizes", [((5, 2050), (8, 4096)), ((5, 520), (8, 1024))], ids=["few blocks", "little for TMA"])
def test_problems_that_share_a_measured_tile_have_the_same_candidates(sizes: tuple[tuple[int, int], ...]) -> None:
    problems = [AttentionProblem("cuda", "sm_90", "float16", "bhsd", 1, h, h, n, n, 128, 128) for h, n in sizes]
    few, many = ([candidates(kind, problem) for kind in KINDS] for problem in problems)
    assert few != many and _bucket(problems[0]) != _bucket(problems[1])


NEIGHBOURS = {
    "packed": {"layout": "thd", "lens_q": (37, 70, 1, 65)},
    "samples": {"batch": 3, "seqlen_q": 70, "seq_lens": (70, 33, 1)},
}


@pytest.mark.parametrize("name", ["q", "v", "dout"])
@pytest.mark.parametrize("sizes", NEIGHBOURS)
@pytest.mark.parametrize("form", ["tma", "portable"])
def test_memory_behind_a_sequence_reaches_no_result(form: str, sizes: str, name: str) -> None:
    """TMA descriptors end where the tensor ends, not where a sequence does. Behind a sample there is NaN."""
    arch = cuda.arch(torch.device(TARGET.device))
    problem = AttentionProblem("cuda", arch, "float16", "bhsd", 4, 8, 8, 4096, 4096, 32, 32, aligned=form == "tma")
    with ExitStack() as stack:
        for kind in KINDS:
            tile = candidates(kind, problem)[0]
            if tile.form != form:
                pytest.skip(f"{arch} has no {form} tiles")
            stack.enter_context(use_config(kind, tile))
        stack.enter_context(poisoned_allocations())
        assert_propagates(
            TARGET, AttentionCase(sizes, causal=name == "v", **NEIGHBOURS[sizes]), "v2", name, float("nan")
        )
