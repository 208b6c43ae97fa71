"""The order in which portable kernels take blocks: head after head, the last heads in turns (`head_and_block`)."""

from __future__ import annotations

import pytest
import torch
from targets import TARGETS

if "cuda" not in TARGETS:
    pytest.skip("the cuda backend is not tested in this run", allow_module_level=True)


from diyfa.backends.cuda.attention import bwd, fwd
from diyfa.backends.cuda.attention import launch as attention_launch
from diyfa.backends.cuda.attention.configs import AttentionConfig
from diyfa.problem import AttentionProblem, AttentionTensors
from diyfa.testing import AttentionCase, attention_function, check_budget, make_inputs, run_case

DEVICE = torch.device(TARGETS["cuda"].device)


def test_how_many_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are at work at a time; one where blocks of a head have as much to do, or nothing is known."""
    causal = AttentionProblem("cuda", "sm_80", "float16", "bshd", 4, 16, 16, 4096, 4096, 64, 64, -1, 0)

    def turns(problem: AttentionProblem = causal, warps: int = 8, blocks: int = 64, count: int = 100) -> int:
        monkeypatch.setattr(attention_launch, "multiprocessors", lambda device: count)
        return attention_launch.interleaved_heads(problem, AttentionConfig(64, 64, warps, 2), blocks, 64, DEVICE)

    assert [turns(warps=warps) for warps in (4, 8, 16)] == [8, 5, 5]
    assert [turns(blocks=blocks) for blocks in (1, 10, 200, 1000)] == [64, 21, 2, 2]
    assert turns(causal.replace(window_right=9)) == 5
    assert [turns(causal.replace(**x)) for x in ({"window_right": -1}, {"window_left": 100})] == [1, 1]
    assert turns(count=0) == 1


@pytest.mark.parametrize("subgroups", [1, 2])
def test_launches(subgroups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of all samples are counted, and of dK and dV those of all parts."""
    monkeypatch.setattr(attention_launch, "multiprocessors", lambda device: 4)
    problem = AttentionProblem("cuda", "sm_80", "float16", "bhsd", 3, 4, 2, 64, 96, 16, 16, -1, 0)
    q, k = (torch.empty(3, h, s, 16, dtype=torch.float16, device="meta") for h, s in ((4, 64), (2, 96)))
    lse, config = torch.empty(3, 4, 64, device="meta"), AttentionConfig(32, 32, 8, 1)
    tensors = AttentionTensors(q, k, k, 1.0)
    backward = bwd.Backward(problem, tensors, q, lse, q, None)
    found = [
        fwd.make_launch(problem, tensors, q, lse, config),
        backward.gradient("dq", config, {"dq": q}),
        backward.gradient("dkdv", config, {"dk": k, "dv": k}, subgroups),
    ]
    assert [(x.grid, x.arguments["interleaved_heads"]) for x in found] == [(24, 5), (24, 5), (18 * subgroups, 4)]


CASES = [
    AttentionCase("dense", heads=5, seqlen_q=150, seqlen_k=190, causal=True),
    AttentionCase("samples", batch=3, heads=2, heads_kv=1, seq_lens=(160, 20, 81), seqlen_q=160, causal=True),
    AttentionCase("sequences", heads=3, layout="thd", lens_q=(140, 0, 9), lens_k=(165, 3, 170), slack=5, causal=True),
    AttentionCase("right", heads=4, seqlen_q=140, window=(-1, 20)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results(case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """With some heads in turns, and packed ones beside programs that clear what no sequence has."""
    monkeypatch.setattr(attention_launch, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(fwd, "clearing_programs", lambda problem: 9 if problem.varlen else 0)
    results = run_case(attention_function(case, backend="cuda", variant="v2"), make_inputs(case, str(DEVICE)))
    assert not {name: check for name, check in check_budget(results, case, str(DEVICE)).items() if not check.share <= 1}
