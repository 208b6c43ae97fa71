"""The Hopper kernel for learners computes attention, and each of its waits, arrivals and fences is needed."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hopper_gluon import need_hopper_gluon

need_hopper_gluon()

from hopper_interpreted import load_kernel, source_of  # noqa: E402
from poison import poisoned_allocations  # noqa: E402
from simulators.gluon import Deadlock, InterpretedKernel, KernelBug, Race  # noqa: E402

import diyfa  # noqa: E402
from diyfa.backends.cuda.hopper import tutorial  # noqa: E402
from diyfa.backends.cuda.runtime.launch import is_interpreting  # noqa: E402

pytestmark = pytest.mark.skipif(not is_interpreting(), reason="CPU tensors are refused: here the kernel itself is run")

BF16, FP16 = torch.bfloat16, torch.float16
TOLERANCES = {BF16: 1.6e-2, FP16: 2e-3}
# Batch, heads, KV heads, queries, keys, head_dim, causal, dtype.
CASES = {
    "even": (1, 1, 1, 128, 256, 64, False, BF16),
    "odd": (2, 2, 2, 130, 301, 64, False, FP16),
    "gqa": (1, 4, 2, 77, 260, 128, False, BF16),
    "one_key": (1, 1, 1, 3, 1, 64, False, FP16),
    "causal": (1, 2, 2, 300, 300, 64, True, BF16),
    "causal_128": (1, 2, 1, 259, 259, 128, True, FP16),
    "causal_more_keys": (2, 4, 2, 130, 470, 64, True, FP16),
    "causal_one_more_key": (1, 1, 1, 128, 129, 64, True, FP16),
    "causal_more_queries": (1, 2, 1, 300, 130, 64, True, BF16),
    "causal_many_more_queries": (1, 1, 1, 400, 20, 64, True, BF16),
}
# Two programs and five blocks: every buffer is used again, and a causal tile has masked blocks and whole ones.
SMALL = (1, 1, 1, 200, 600, 64, True, BF16)


def attend(case: tuple, seed: int, kernels: ModuleType = tutorial, interleave: bool = False) -> None:
    """Compare out and LSE of a case with the reference; what was allocated and not written is NaN."""
    batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, causal, dtype = case
    torch.manual_seed(0)
    q = torch.randn(batch, heads, seqlen_q, head_dim).to(dtype)
    k, v = (torch.randn(batch, heads_kv, seqlen_k, head_dim).to(dtype) for _ in range(2))
    kernel = InterpretedKernel(kernels._fwd_tutorial_kernel, seed, interleave)
    with pytest.MonkeyPatch.context() as patch, poisoned_allocations():
        patch.setattr(tutorial, "_fwd_tutorial_kernel", kernel)
        out, lse = tutorial.flash_attention(q, k, v, causal)
    assert kernel.launches == 1
    expected, expected_lse = diyfa.reference_attention(q.double(), k.double(), v.double(), causal, return_lse=True)
    torch.testing.assert_close(out, expected.to(dtype), atol=TOLERANCES[dtype], rtol=1e-2)
    torch.testing.assert_close(lse, expected_lse.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_results(name: str) -> None:
    attend(CASES[name], seed=3)


@pytest.mark.parametrize("seed", range(6))
def test_every_interleaving(seed: int) -> None:
    attend(SMALL, seed)


def test_programs_side_by_side() -> None:
    attend(CASES["causal"], seed=5, interleave=True)


def test_refusals() -> None:
    x = torch.empty(1, 1, 8, 96, dtype=FP16)
    with pytest.raises(ValueError, match="head_dim must be 64 or 128"):
        tutorial.flash_attention(x, x, x)
    x = torch.empty(1, 1, 8, 64, dtype=FP16)
    with pytest.raises(ValueError, match="sm_scale positive"):
        tutorial.flash_attention(x, x, x, sm_scale=-1.0)


# ---- the same kernel with one thing wrong

NAME = "hopper.tutorial"
# The ring's own are taken away in test_hopper_synchronisation.py.
FUNCTIONS = ("mbarrier.wait", "mbarrier.expect", "mbarrier.init", "fence_async_shared", "tma.store_wait", "_turn")
METHODS = ("init", "wait_empty", "wait_full", "release")


def statements(tree: ast.AST) -> list[ast.Expr]:
    """Return the statements that synchronise and do nothing else, in the order of the source."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    found = []
    for call in calls:
        function = call.value.func
        is_method = isinstance(function, ast.Attribute) and function.attr in METHODS
        if is_method or ast.unparse(function) in FUNCTIONS:
            found.append(call)
    return sorted(found, key=lambda call: call.lineno)


LINES = [f"{i}: {ast.unparse(x)}" for i, x in enumerate(statements(ast.parse(source_of(NAME))))]


def broken(source: str, folder: Path) -> ModuleType:
    """Return the kernel's module with another source."""
    return load_kernel({NAME: source}, folder, (NAME,))


def test_the_unparsed_source_is_the_kernel(tmp_path: Path) -> None:
    assert len(LINES) > 15
    attend(SMALL, 3, broken(ast.unparse(ast.parse(source_of(NAME))), tmp_path))


@pytest.mark.parametrize("line", LINES)
def test_no_wait_arrival_or_fence_is_superfluous(line: str, tmp_path: Path) -> None:
    tree = ast.parse(source_of(NAME))
    statements(tree)[int(line.split(":")[0])].value = ast.Constant(None)
    with pytest.raises(KernelBug):
        attend(SMALL, 3, broken(ast.unparse(tree), tmp_path))


MUTANTS = {
    "K is released before its product is done": (
        "    s = warpgroup_mma_wait(0, deps=[s])\n    ring.release(0)\n",
        "    ring.release(0)\n    s = warpgroup_mma_wait(0, deps=[s])\n",
        Race,
    ),
    "V is released before its product is done": (
        "            o = warpgroup_mma_wait(0, deps=[o])\n            ring.release(2 * i - 1)\n",
        "            ring.release(2 * i - 1)\n            o = warpgroup_mma_wait(0, deps=[o])\n",
        Race,
    ),
    "scores are read while their product runs": ("warpgroup_mma_wait(1, ", "warpgroup_mma_wait(2, ", Race),
    "out is rescaled while the values are added": (
        "            o = warpgroup_mma_wait(0, deps=[o])\n",
        "            o = warpgroup_mma_wait(1, deps=[o])\n",
        Race,
    ),
    "nobody has the first turn": ("if INDEX == 1:", "if False:", Deadlock),
    "a consumer never hands over": ('_turn("arrive", 1 - INDEX)', '_turn("arrive", INDEX)', KernelBug),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_bugs_are_reported(name: str, tmp_path: Path) -> None:
    before, after, error = MUTANTS[name]
    source = source_of(NAME)
    assert source.count(before) == 1
    with pytest.raises(error):
        attend(SMALL, 3, broken(source.replace(before, after), tmp_path))
