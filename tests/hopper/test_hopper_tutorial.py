"""The Hopper kernel for learners computes attention, and each of its waits, arrivals and fences is needed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from hopper_interpreted import interpreted_only, kernel_source, load_changed, load_kernel
from poison import poisoned_allocations
from simulators.gluon import Deadlock, InterpretedKernel, KernelBug, Race
from synchronising import Synchronising

from diyfa.backends.cuda.hopper import tutorial
from diyfa.testing import AttentionCase, Results, check_budget, make_inputs

pytestmark = interpreted_only

# No padding, ragged tiles, groups of heads, one visible key, rows that see no key, and scores that no one draws at
# random: peaks anywhere, several of nearly one height, scores that rise, all of them large.
CASES = {
    case.name: case
    for case in (
        AttentionCase("even", 1, 1, seqlen_q=128, seqlen_k=256, head_dim=64, dtype="bfloat16"),
        AttentionCase("odd", 2, 2, seqlen_q=130, seqlen_k=301, head_dim=64),
        AttentionCase("gqa", 1, 4, 2, seqlen_q=77, seqlen_k=260, head_dim=128, dtype="bfloat16"),
        AttentionCase("one_key", 1, 1, seqlen_q=3, seqlen_k=1, head_dim=64),
        AttentionCase("causal", 1, 2, seqlen_q=300, head_dim=64, dtype="bfloat16", causal=True),
        AttentionCase("causal_128", 1, 2, 1, seqlen_q=259, head_dim=128, causal=True),
        AttentionCase("causal_more_keys", 2, 4, 2, seqlen_q=130, seqlen_k=470, head_dim=64, causal=True),
        AttentionCase("causal_one_more_key", 1, 1, seqlen_q=128, seqlen_k=129, head_dim=64, causal=True),
        AttentionCase("causal_more_queries", 1, 2, 1, 300, 130, 64, dtype="bfloat16", causal=True),
        AttentionCase("causal_many_more_queries", 1, 1, 1, 400, 20, 64, dtype="bfloat16", causal=True),
        AttentionCase("one_peak", 1, 2, 1, 130, 512, 64, dtype="bfloat16", peaks=((0.5, 30.0),)),
        AttentionCase("peaks", 1, 2, 1, 130, 512, 128, peaks=((0.1, 15.0), (0.9, 16.0)), peaked_rows=3, causal=True),
        AttentionCase("rising", 1, 1, 1, 200, 600, 64, dtype="bfloat16", rise=60.0),
        AttentionCase("falling", 1, 1, 1, 200, 600, 64, rise=-60.0, causal=True),
        AttentionCase("large", 1, 1, 1, 150, 300, 128, spread=5.0),
    )
}
# Two programs and five blocks: every buffer is used again, and a causal tile has masked blocks and whole ones.
SMALL = AttentionCase("small", 1, 1, 1, 200, 600, 64, dtype="bfloat16", causal=True)


def attend(case: AttentionCase, seed: int, kernels: ModuleType = tutorial, interleave: bool = False) -> None:
    """Require out and LSE of a case within the error budget. Memory that the kernel does not write is NaN."""
    inputs = make_inputs(case)
    kernel = InterpretedKernel(kernels._fwd_tutorial_kernel, seed, interleave)
    with pytest.MonkeyPatch.context() as patch, poisoned_allocations():
        patch.setattr(tutorial, "_fwd_tutorial_kernel", kernel)
        out, lse = tutorial.flash_attention(inputs.q.detach(), inputs.k.detach(), inputs.v.detach(), case.causal)
    assert kernel.launches == 1
    checks = check_budget(Results(out, lse, *inputs[:3]), case)
    for name in ("out", "lse"):
        assert checks[name].share <= 1, (name, checks[name])


@pytest.mark.parametrize("name", CASES)
def test_results(name: str) -> None:
    attend(CASES[name], seed=3)


@pytest.mark.parametrize("seed", range(6))
def test_every_interleaving(seed: int) -> None:
    attend(SMALL, seed)


def test_programs_side_by_side() -> None:
    attend(CASES["causal"], seed=5, interleave=True)


def test_refusals() -> None:
    x = torch.empty(1, 1, 8, 96, dtype=torch.float16)
    with pytest.raises(ValueError, match="head_dim must be 64 or 128"):
        tutorial.flash_attention(x, x, x)
    x = torch.empty(1, 1, 8, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="sm_scale positive"):
        tutorial.flash_attention(x, x, x, sm_scale=-1.0)


# ---- the same kernel with one thing wrong

NAME = "hopper.tutorial"
# The channel's own are taken away in test_hopper_bwd_synchronisation.py.
FUNCTIONS = ("mbarrier.wait", "mbarrier.expect", "mbarrier.init", "fence_async_shared", "tma.store_wait", "turn")
METHODS = ("acquire", "wait", "release")


SOURCE = Synchronising(kernel_source(NAME), FUNCTIONS, METHODS)
LINES = [f"{i}: {line}" for i, line in enumerate(SOURCE.lines)]


def broken(source: str, folder: Path) -> ModuleType:
    """Return the kernel's module with another source."""
    return load_kernel({NAME: source}, folder, (NAME,))


def test_the_unparsed_source_is_the_kernel(tmp_path: Path) -> None:
    assert len(LINES) > 15
    attend(SMALL, 3, broken(SOURCE.source(), tmp_path))


@pytest.mark.parametrize("line", LINES)
def test_no_wait_arrival_or_fence_is_superfluous(line: str, tmp_path: Path) -> None:
    with pytest.raises(KernelBug):
        attend(SMALL, 3, broken(SOURCE.without(int(line.split(":")[0])), tmp_path))


MUTANTS = {
    "K is released before its product is done": (
        "    s = warpgroup_mma_wait(0, deps=[s])\n    ring.channel.release(0)\n",
        "    ring.channel.release(0)\n    s = warpgroup_mma_wait(0, deps=[s])\n",
        Race,
    ),
    "V is released before its product is done": (
        "            o = warpgroup_mma_wait(0, deps=[o])\n            ring.channel.release(2 * i - 1)\n",
        "            ring.channel.release(2 * i - 1)\n            o = warpgroup_mma_wait(0, deps=[o])\n",
        Race,
    ),
    "scores are read while their product runs": ("warpgroup_mma_wait(1, ", "warpgroup_mma_wait(2, ", Race),
    "out is rescaled while the values are added": (
        "            o = warpgroup_mma_wait(0, deps=[o])\n",
        "            o = warpgroup_mma_wait(1, deps=[o])\n",
        Race,
    ),
    "nobody has the first turn": ("if INDEX == 1:", "if False:", Deadlock),
    "a consumer never hands over": ('turn("arrive", 1 - INDEX)', 'turn("arrive", INDEX)', KernelBug),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_bugs_are_reported(name: str, tmp_path: Path) -> None:
    before, after, error = MUTANTS[name]
    with pytest.raises(error):
        attend(SMALL, 3, load_changed(NAME, before, after, tmp_path))
