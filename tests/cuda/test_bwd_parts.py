"""Query heads of a group divided among programs (`backends/cuda/attention/bwd_parts.py`), in the portable backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from poison import poisoned_allocations
from targets import TARGETS

if "cuda" not in TARGETS:
    pytest.skip("the cuda backend is not tested in this run", allow_module_level=True)

from diyfa.backends.cuda.attention import bwd, bwd_parts
from diyfa.backends.cuda.attention import launch as attention_launch
from diyfa.problem import AttentionProblem, AttentionTensors, Launch
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
    parts = group // 2 if group == 4 else group
    counts: list[int] = []
    gradient = bwd.Backward.gradient

    def counted(self: bwd.Backward, kind: str, *arguments: Any) -> Launch:
        launch = gradient(self, kind, *arguments)
        if kind == "dkdv":
            counts.append(launch.grid)
        return launch

    monkeypatch.setattr(bwd.Backward, "gradient", counted)
    monkeypatch.setattr(bwd_parts, "parts_of", lambda *_: parts)
    inputs = make_inputs(case, DEVICE)
    with poisoned_allocations():
        results = run_case(attention_function(case, backend="cuda"), inputs)
    missed = {name: check for name, check in check_budget(results, case, DEVICE).items() if not check.share <= 1}
    assert not missed
    assert counts and all(count % (case.batch * case.heads_kv * parts) == 0 for count in counts)


def test_parts_are_taken_where_blocks_of_keys_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """By how many blocks a tile makes of the keys, and how many programs a GPU runs at once."""
    problem = AttentionProblem("cuda", "sm_80", "float16", "bshd", 1, 8, 1, 4096, 4096, 64, 64, -1, 0)
    q, k = (torch.empty(1, 4096, heads, 64, dtype=torch.float16, device="meta") for heads in (8, 1))
    tensors, lse = AttentionTensors(q, k, k, 0.125), torch.empty(1, 8, 4096, device="meta")
    backward = bwd.Backward(problem, tensors, q, lse, q, None)
    config = bwd.AttentionConfig(32, 64, 8, 3)
    grids = {}
    for count in (0, 20, 108):
        monkeypatch.setattr(attention_launch, "multiprocessors", lambda device, count=count: count)
        grids[count] = [launch.grid for launch in backward.key_gradients(config, k, k)]
    # Where there is no GPU nothing is divided.
    assert grids == {0: [64], 20: [64], 108: [256, (128, 1)]}


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(("d", "dv"), [(8, 72), (64, 16), (130, 64)])
def test_sums(d: int, dv: int, layout: str, parts: int) -> None:
    """Every number of all parts is added, each part of a head's and no other's."""
    problem = AttentionProblem("cuda", "sm_90", "float16", layout, 2, 3 * parts, 3, 5, 37, d, dv)
    generator = torch.Generator().manual_seed(parts)
    sizes = [2 * 37 * 3 * parts * columns for columns in (d, dv)]
    memory = [torch.randint(-9, 9, (n,), generator=generator).float().to(DEVICE) for n in sizes]
    found = bwd_parts.in_layout(problem, memory, parts)
    shapes = [(2, 3, 37, n) if layout == "bhsd" else (2, 37, 3, n) for n in (d, dv)]
    got = [torch.full(shape, float("nan"), dtype=torch.float16, device=DEVICE) for shape in shapes]
    launches = bwd_parts.launches_of(problem, AttentionTensors(*[got[0]] * 3, 1.0), memory, parts, *got)
    assert len(launches) == (parts > 1)
    for launch in launches:
        bwd.launch_kernel(launch)
    heads = 1 if layout == "bhsd" else 2
    for x, y in zip(found, got, strict=True):
        if parts > 1:
            assert torch.equal(x.unflatten(heads, (3, parts)).sum(heads + 1), y.float())
