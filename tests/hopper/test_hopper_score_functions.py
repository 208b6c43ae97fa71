"""The Hopper forward with a score function, without a GPU."""

from __future__ import annotations

from typing import Any

import hopper_gluon  # noqa: F401
import pytest
import torch
import triton
import triton.language as tl
from hopper_interpreted import interpret, interpreted_only, near_the_reference, run, run_backward
from score_functions import FUNCTIONS

import diyfa
from diyfa import BlockMask
from diyfa.backends.cuda.hopper import configs as hopper_configs
from diyfa.features import SCORE_EXAMPLE
from diyfa.lab.cuda.specs import CAPPED
from diyfa.problem import AttentionProblem
from diyfa.testing import AttentionCase

pytestmark = interpreted_only


def case(name: str, **changes: Any) -> AttentionCase:
    sizes = {"batch": 1, "heads": 2, "heads_kv": 1, "seqlen_q": 200, "seqlen_k": 300, "head_dim": 64}
    return AttentionCase(name, score_fn=True, **{**sizes, "dtype": "bfloat16", **changes})


CASES = [
    case("plain"),
    case("causal_negative_scale", causal=True, sm_scale=-0.5),
    case("window_softcap_sinks", window=(70, 20), softcap=4.0, sinks=True),
    case("more_queries", causal=True, seqlen_q=300, seqlen_k=100),
    case("one_key", seqlen_k=1),
    case("packed", layout="thd", lens_q=(130, 0, 41), lens_k=(135, 9, 41), causal=True),
    case("seq_lens", batch=2, seq_lens=(300, 17), seqlen_q=300, dtype="float16"),
    case("mask", mask="11:128:0.6"),
    case("mask_64_keys", mask="1h:128x64:0.6", seqlen_k=500, head_dim=128),
    case("mask_64", mask="11:64:0.6"),
    case("mask_64_queries", mask="bh:64x128:0.5", batch=2, seqlen_q=150, sinks=True, softcap=3.0),
    case("d128_causal", head_dim=128, causal=True, layout="bshd"),
    case("d192_128", head_dim=192, head_dim_v=128, heads=1),
    case("d256", head_dim=256, causal=True, heads=1),
]


@pytest.mark.parametrize("each", CASES, ids=lambda each: each.name)
def test_results_are_within_the_error_budget(each: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = interpret(monkeypatch)
    assert not run(each)
    assert kernel.launches


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_behind_it(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable backward pass takes out and lse of the Hopper forward."""
    kernel = interpret(monkeypatch)
    assert not run_backward(case("gradients", seqlen_q=70, seqlen_k=100, causal=causal))
    assert kernel.launches


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_operation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of `score_functions.py` has the result that the reference has."""
    kernel = interpret(monkeypatch)
    q, k, v = (torch.randn(1, 2, n, 128, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (64, 64, 64))
    each = FUNCTIONS[name]
    near_the_reference(q, k, v, score_fn=each.jit, score_tensors=each.tensors(1, 2, 128))
    assert kernel.launches


@triton.jit
def by_row(score: Any, b: Any, h: Any, i: Any, j: Any, rows: Any) -> Any:
    return tl.load(rows + i)


@triton.jit
def constant(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return 0.5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("function", [by_row, constant], ids=lambda function: function.fn.__name__)
def test_values_of_rows_and_of_all_pairs(function: Any, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    q, k, v = (torch.randn(1, 1, 90, 128, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(3))
    captured = (torch.randn(90),) if function is by_row else ()
    near_the_reference(q, k, v, score_fn=function, causal=causal, score_tensors=captured)


@triton.jit
def by_query_key_and_pair(
    score: Any, b: Any, h: Any, i: Any, j: Any, first: Any, rows: Any, keys: Any, pairs: Any
) -> Any:
    row = i - tl.load(first)
    return score + tl.load(rows + row) + tl.load(keys + j) + tl.load(pairs + row * 192 + j)


READS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "partial_block": (90, 150, {}), "full_blocks": (90, 192, {}), "causal": (300, 100, {"causal": True}),
    "window": (250, 100, {"window": (40, 30)}), "mask": (150, 180, {"mask": 128}), "mask_64": (150, 192, {"mask": 64}),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_reads_stay_inside(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured tensors end where the visible pairs do. The simulator reports a read outside."""
    interpret(monkeypatch)
    seqlen_q, seqlen_k, options = READS[name]
    q, k, v = (
        torch.randn(1, 1, n, 64, generator=torch.Generator().manual_seed(n)).bfloat16()
        for n in (seqlen_q, seqlen_k, seqlen_k)
    )
    i, j = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, torch.arange(seqlen_k)
    left, right = options.get("window", (500, 0 if options.get("causal") else 500))
    keep = (j <= i + right) & (j >= i - left)
    if "mask" in options:
        keep[:40] = keep[120:] = False
        keep[60:70, :130] = False
        options = {"mask": BlockMask.from_dense(keep, options["mask"])}
    seen = i[:, 0][keep.any(1)]
    row, column = (keep[keep.any(1)]).nonzero(as_tuple=True)
    captured = [torch.randn(n) for n in (len(seen), seqlen_k, int((row * 192 + column).max()) + 1)]
    near_the_reference(q, k, v, score_fn=by_query_key_and_pair, score_tensors=(seen[:1].int(), *captured), **options)


@triton.jit
def by_distance_and_query(score: Any, b: Any, h: Any, i: Any, j: Any, rows: Any, distances: Any) -> Any:
    return score + tl.load(rows + i) + tl.load(distances + (i - j) + 80)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 3), (5, -1)])
def test_queries_without_keys_read_nothing(window: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed, a sequence without keys has a key block, and the positions of its queries are below 0."""
    interpret(monkeypatch)
    q, k, v = (torch.randn(n, 1, 64, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (77, 80, 80))
    lengths = [torch.tensor(x, dtype=torch.int32) for x in ((0, 70, 77), (0, 80, 80))]
    options: dict[str, Any] = {"score_fn": by_distance_and_query, "window": window}
    options["score_tensors"] = torch.randn(80), torch.zeros(160)
    out, lse = diyfa.flash_attention_varlen(
        q, k, v, *lengths, 70, 80, backend="cuda", variant="sm90", return_lse=True, **options
    )
    assert (out[70:] == 0).all() and (lse[:, 70:] == float("inf")).all()


def test_what_it_refuses() -> None:
    problem = AttentionProblem("cuda", "sm_90", "bfloat16", "bhsd", 1, 4, 4, 4096, 4096, 128, 128, score_fn=CAPPED)
    assert hopper_configs.refuses(problem) is None
    assert "no alibi beside a score function" in (hopper_configs.refuses(problem.replace(alibi=True)) or "")
    assert "score_fn" in (hopper_configs.refuses(problem.replace(batch_invariant=True)) or "")
    for option in ({}, {"score_fn": "", "mask": (128, 128)}):
        eight_bits = problem.replace(dtype="float8_e4m3fn", **option)
        assert "sm90 does not implement" in (hopper_configs.refuses(eight_bits) or "")
    narrow = problem.replace(head_dim=64, head_dim_v=64)
    assert "if the function loads an element for each pair" in (hopper_configs.refuses(narrow) or "")
    assert hopper_configs.refuses(narrow.replace(score_fn=SCORE_EXAMPLE)) is None
