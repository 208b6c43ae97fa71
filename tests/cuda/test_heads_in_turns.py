"""The order in which portable kernels take blocks: head after head, the last heads in turns (`head_and_block`)."""

from __future__ import annotations

import itertools

import pytest
import torch
from targets import TARGETS

if "cuda" not in TARGETS:
    pytest.skip("the cuda backend is not tested in this run", allow_module_level=True)

import triton
import triton.language as tl

from diyfa.backends.cuda.attention import launch as attention_launch
from diyfa.backends.cuda.attention.configs import AttentionConfig
from diyfa.backends.cuda.attention.scores import head_and_block
from diyfa.problem import AttentionProblem
from diyfa.testing import AttentionCase, attention_function, check_budget, make_inputs, run_case

DEVICE = torch.device(TARGETS["cuda"].device)


@triton.jit
def _order_kernel(found_ptr, blocks, in_turns):
    pid = tl.program_id(0)
    head, block = head_and_block(pid, blocks, tl.num_programs(0) // blocks, in_turns)
    tl.store(found_ptr + 2 * pid, head)
    tl.store(found_ptr + 2 * pid + 1, block)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("heads", [1, 2, 5])
def test_order(heads: int, blocks: int) -> None:
    for in_turns in range(1, heads + 1):
        found = torch.full((heads * blocks, 2), -1, dtype=torch.int32, device=DEVICE)
        _order_kernel[(heads * blocks,)](found, blocks, in_turns)
        first = heads - in_turns
        one_by_one = itertools.product(range(first), range(blocks))
        turns = ((head, block) for block, head in itertools.product(range(blocks), range(first, heads)))
        assert [tuple(x) for x in found.tolist()] == [*one_by_one, *turns]


def test_how_many_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are at work at a time; one where blocks of a head have as much to do, or nothing is known."""
    causal = AttentionProblem("cuda", "sm_80", "float16", "bshd", 4, 16, 16, 4096, 4096, 64, 64, -1, 0)

    def turns(problem: AttentionProblem = causal, warps: int = 8, blocks: int = 64, count: int = 100) -> int:
        monkeypatch.setattr(attention_launch, "multiprocessors", lambda device: count)
        return attention_launch.heads_in_turns(problem, AttentionConfig(64, 64, warps, 2), blocks, 64, DEVICE)

    assert [turns(warps=warps) for warps in (4, 8, 16)] == [8, 5, 5]
    assert [turns(blocks=blocks) for blocks in (1, 10, 200, 1000)] == [64, 21, 2, 2]
    assert turns(causal.replace(window_right=9)) == 5
    assert [turns(causal.replace(**x)) for x in ({"window_right": -1}, {"window_left": 100})] == [1, 1]
    assert turns(count=0) == 1


CASES = [
    AttentionCase("all", heads=3, seqlen_q=150, seqlen_k=190, causal=True),
    AttentionCase("samples", batch=3, heads=2, heads_kv=1, seq_lens=(300, 20, 161), seqlen_q=300, causal=True),
    AttentionCase("sequences", heads=3, layout="thd", lens_q=(140, 0, 9), lens_k=(165, 3, 170), slack=5, causal=True),
    AttentionCase("right", batch=2, heads=3, seqlen_q=140, window=(-1, 20), bias="bhqk"),
]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results(case: AttentionCase, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With some heads in turns, and with all."""
    monkeypatch.setattr(attention_launch, "multiprocessors", lambda device: count)
    results = run_case(attention_function(case, backend="cuda", variant="v2"), make_inputs(case, str(DEVICE)))
    assert not {name: check for name, check in check_budget(results, case, str(DEVICE)).items() if not check.share <= 1}
