"""Query heads of a group divided among programs (`attention/bwd_partials.py`), in the portable backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from poison import poisoned_allocations
from targets import TARGETS

if "cuda" not in TARGETS:
    pytest.skip("the cuda backend is not tested in this run", allow_module_level=True)

from diyfa.backends.cuda.attention import bwd, bwd_partials
from diyfa.backends.cuda.attention import launch as attention_launch
from diyfa.backends.cuda.runtime.launcher import launch_kernel
from diyfa.problem import VARLEN, AttentionGradients, AttentionProblem, AttentionTensors, Launch
from diyfa.testing import AttentionCase, attention_function, check_budget, make_inputs, run_case

DEVICE = TARGETS["cuda"].device


def case(name: str, heads: int = 4, heads_kv: int = 1, **changes: Any) -> AttentionCase:
    return AttentionCase(name, heads=heads, heads_kv=heads_kv, **changes)


CASES = [
    case("causal", seqlen_q=70, seqlen_k=100, causal=True),
    case("more_than_are_added_at_once", heads=6, seqlen_q=33, head_dim=16),
    case("groups", batch=2, heads=8, heads_kv=2, layout="bshd", seqlen_q=70, window=(20, 3), head_dim=80),
    case("samples", batch=2, seq_lens=(70, 20), seqlen_q=70, seqlen_k=90, sinks=True, dropout_p=0.2),
    case(
        "sequences", heads=3, layout="thd", lens_q=(40, 0, 9), lens_k=(65, 3, 70), slack=5, head_dim=40, head_dim_v=72
    ),
    case("float32", dtype="float32", alibi="bh", bias="1hqk", softcap=5.0, seqlen_q=40),
    case("transposed", batch=2, view="transposed", seqlen_q=70),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients(case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    group = case.heads // case.heads_kv
    subgroups = group // 2 if group == 4 else group
    counts: list[int] = []
    gradient = bwd.Backward.gradient

    def counted(self: bwd.Backward, kind: str, *arguments: Any) -> Launch:
        launch = gradient(self, kind, *arguments)
        if kind == "dkdv":
            counts.append(launch.grid)
        return launch

    monkeypatch.setattr(bwd.Backward, "gradient", counted)
    monkeypatch.setattr(bwd_partials, "count_subgroups", lambda *_: subgroups)
    inputs = make_inputs(case, DEVICE)
    with poisoned_allocations():
        results = run_case(attention_function(case, backend="cuda"), inputs)
    missed = {name: check for name, check in check_budget(results, case, DEVICE).items() if not check.share <= 1}
    assert not missed
    assert counts and all(count % (case.batch * case.heads_kv * subgroups) == 0 for count in counts)


def test_parts_are_taken_where_blocks_of_keys_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """By how many blocks a tile makes of the keys, and how many programs a GPU runs at once."""
    problem = AttentionProblem("cuda", "sm_80", "float16", "bshd", 1, 8, 1, 4096, 4096, 64, 64, -1, 0)
    q, k = (torch.empty(1, 4096, heads, 64, dtype=torch.float16, device="meta") for heads in (8, 1))
    tensors, lse = AttentionTensors(q, k, k, 0.125), torch.empty(1, 8, 4096, device="meta")
    gradients = AttentionGradients(q, k, k)
    backward = bwd.Backward(problem, tensors, q, lse, q, None)
    config = bwd.AttentionConfig(32, 64, 8, 3)
    grids = {}
    for count in (0, 20, 108):
        monkeypatch.setattr(attention_launch, "multiprocessors", lambda device, count=count: count)
        launches, memory = backward.launches("dkdv", config, gradients)
        grids[count] = [launch.grid for launch in launches]
        assert [x.numel() for x in memory] == ([2 * 4096 * 64 * 4] if count == 108 else [])
    # Where there is no GPU nothing is divided.
    assert grids == {0: [64], 20: [64], 108: [256, (128, 1)]}


def test_sums_end_where_a_sequence_is_said_to_end() -> None:
    """Of the first one, which is longer, nobody has formed more."""
    longest, total = 33, 80
    problem = AttentionProblem("cuda", "sm_80", "float16", VARLEN, 2, 4, 2, 1, longest, 16, 24)
    problem = problem.replace(total_q=1, total_k=total)
    offsets = torch.tensor([0, 60, total], dtype=torch.int32, device=DEVICE)
    memory = [torch.ones(n, device=DEVICE) for n in bwd_partials.partial_sizes(problem, 2)]
    got = [torch.full((total, 2, d), -7.0, dtype=torch.float16, device=DEVICE) for d in (16, 24)]
    tensors = AttentionTensors(*[got[0]] * 3, 1.0, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    launch_kernel(bwd_partials.make_launch(problem, tensors, memory, 2, *got))
    for x in got:
        assert (x[:longest] == 2).all() and (x[longest:60] == -7).all() and (x[60:] == 2).all()


def test_delta_follows_the_gradients_that_a_repeated_call_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of sinks is made of it; what lies between the launches comes behind."""
    given: list[Any] = []
    monkeypatch.setattr(bwd_partials, "count_subgroups", lambda *_: 2)
    monkeypatch.setattr(attention_launch, "make_replay", lambda *arguments: given.append(arguments))
    problem = AttentionProblem("cuda", "sm_80", "float16", "bhsd", 1, 4, 2, 40, 40, 16, 16).replace(sinks=True)
    q, k = (torch.empty(1, heads, 40, 16, dtype=torch.float16, device="meta") for heads in (4, 2))
    lse, sinks = torch.empty(1, 4, 40, device="meta"), torch.empty(4, device="meta")
    tensors, gradients = AttentionTensors(q, k, k, 1.0, sinks=sinks), AttentionGradients(q, k, k, dsinks=sinks)
    attention_launch.repeating_backward(bwd.backward_pass)(problem, tensors, q, lse, q, gradients, [q, k, k])
    [(found, _, made, _)] = given
    assert [x.shape for x in made] == [q.shape, k.shape, k.shape, lse.shape]
    assert [x.shape for x in found.memory] == [(sum(bwd_partials.partial_sizes(problem, 2)),)]
