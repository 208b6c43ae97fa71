"""What only the NPU's kernels of a cache have: rows packed from heads and queries, keys that are gathered, tokens that
land nowhere. The cases of all backends are in tests/numerics/test_kvcache_matrix.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvcache_cases import CacheCase, assert_appended, assert_in_budget, make_call, run_case

import diyfa
from diyfa.backends.npu.attention.append import kvcache_append
from diyfa.problem import KVCacheProblem, KVCacheTensors, NewKeys
from diyfa.reference import reference_append

NAN = float("nan")
Case = CacheCase
CASES = [
    # More heads than rows, a group that fills no tile, more queries than rows.
    Case("mqa", (90, 17), heads=70, alibi="h", sinks=True),
    Case("mqa-queries", (90, 17), heads=70, seqlen_q=2, alibi="bh"),
    Case("groups-of-7", (140,), heads=14, heads_kv=2, head_dim=128, seqlen_q=3, page_size=64, sinks=True, num_splits=2),
    Case("chunk", (150, 64), seqlen_q=70, page_size=32, alibi="h", window=(60, -1), num_splits=2),
    # One query of each packed sequence: lse has a stride between heads.
    Case("packed-single", (130, 9, 300), lens_q=(1, 1, 1), heads=6, heads_kv=2, page_size=64, by="used", sinks=True),
    # Several blocks that are gathered, from pages that a block of keys crosses and from single rows.
    Case("page-24", (300, 150), page_size=24, seqlen_q=2, leftpad=(20, 149)),
    Case("page-1", (200,), page_size=1, heads=4, head_dim=40, head_dim_v=24, num_splits=2, leftpad=(70,)),
    Case("page-48", (300, 31), page_size=48, dtype="float32"),
    # More heads than an append has at a time, and a rotation that leaves features over.
    Case("append-heads", (20, 33), heads=36, heads_kv=18, added=2, rotary=8, head_dim=24, batch_idx=True),
    Case("append-left-window", (20, 33), seqlen_q=2, added=2, rotary=16, causal=False, window=(9, -1)),
    Case(
        "append-halves", (0, 33), heads=36, heads_kv=18, added=1, rotary=24, head_dim=40, interleaved=False, page_size=5
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_float64(npu: torch.device, case: CacheCase) -> None:
    out, lse, *caches = run_case(case, str(npu))
    assert_in_budget(case, out, lse)
    assert_appended(case, *caches)


@pytest.mark.parametrize("seqlen_q", [1, 16, 17])
@pytest.mark.parametrize("window", [(-1, -1), (1, -1), (5, -1), (30, -1)], ids=str)
def test_blocks_of_which_one_key_differs(
    npu: torch.device, monkeypatch, seqlen_q: int, window: tuple[int, int]
) -> None:
    """Or all but one: the last query's last key lies alone in its block, or its first key is the second or the last of
    one."""
    monkeypatch.setenv("DIYFA_NPU_TILE", "decode=16x16")
    case = Case("alone", (17, 33, 48), heads=1, heads_kv=1, seqlen_q=seqlen_q, head_dim=16, window=window)
    out, lse, *_ = run_case(case, str(npu))
    assert_in_budget(case, out, lse)


def test_what_lands_nowhere_is_dropped(npu: torch.device) -> None:
    """Beyond the capacity, in a page below 0 and in one beyond the pool; rows that cos has not rotate nothing."""
    case = Case("dropped", (31, 20, 20), heads=4, heads_kv=2, page_size=16, added=4, rotary=16)
    call = make_call(case)
    pages = call["k_cache"].shape[0]
    call["block_table"] = torch.tensor([[0, 1], [2, -1], [3, pages]], dtype=torch.int32)
    moved = {name: x.to(npu) if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    larger = {
        name: torch.cat((call[name], torch.zeros_like(call[name][:1]))).to(npu) for name in ("k_cache", "v_cache")
    }
    moved |= {name: x[:pages] for name, x in larger.items()}

    def parts(given: dict[str, Any], rotated_q: torch.Tensor | None) -> tuple[KVCacheTensors, NewKeys]:
        tensors = KVCacheTensors(
            given["q"], given["k_cache"], given["v_cache"], 1.0, added=4, seqlens=given["cache_seqlens"],
            block_table=given["block_table"],
        )  # fmt: skip
        cos, sin = given["rotary_cos"][:22], given["rotary_sin"][:22]
        return tensors, NewKeys(given["k"], given["v"], cos, sin, True, rotated_q)

    arch = diyfa.registry.load_backend("npu").arch(npu)
    problem = KVCacheProblem("npu", arch, "float16", "float16", "bshd", 3, 4, 2, 1, 32, 32, 32, 16, lengths=True)
    tensors, new = parts(moved, torch.empty_like(moved["q"]))
    kvcache_append(problem, tensors, new)
    want = reference_append(*parts(call, None))
    for got, expected in (
        (tensors.k_cache, want.k_cache), (tensors.v_cache, want.v_cache), (new.rotated_q, want.q)
    ):  # fmt: skip
        assert got is not None
        assert torch.equal(got.cpu().view(torch.int16), expected.contiguous().view(torch.int16))
    assert all((x.cpu()[pages] == 0).all() for x in larger.values())


def test_a_length_that_overflows_with_what_is_added(npu: torch.device) -> None:
    """The host does not see lengths on the device: the whole cache counts, and nothing is appended or rotated."""
    case = Case("most", (44, 44), seqlen_q=3, heads=4, heads_kv=2, page_size=16, added=4, rotary=16)
    call = make_call(case)
    full = {name: x for name, x in call.items() if name not in ("k", "v", "rotary_cos", "rotary_sin")}
    full["cache_seqlens"] = torch.full((2,), case.capacity, dtype=torch.int32)
    for name in ("k_cache", "v_cache"):
        full[name] = call[name] = torch.where(call[name].isnan(), 1.0, call[name])
    call["cache_seqlens"] = torch.tensor([2**31 - 1, 2**31 - 3], dtype=torch.int32)
    call, full = (
        {name: x.to(npu) if isinstance(x, torch.Tensor) else x for name, x in each.items()} for each in (call, full)
    )
    before = [call[name].cpu() for name in ("k_cache", "v_cache")]
    got, want = (diyfa.flash_attn_with_kvcache(**each, return_softmax_lse=True) for each in (call, full))
    assert all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(got, want, strict=True))
    assert all(torch.equal(call[name].cpu(), x) for name, x in zip(("k_cache", "v_cache"), before, strict=True))


def test_kernels_by_mode(npu: torch.device) -> None:
    q = torch.randn(1, 2, 20, 16, dtype=torch.float16).to(npu)
    assert diyfa.kernels_for("npu", "kvcache_fwd") == ["split_kv"]
    assert diyfa.explain(q, q, q).kernel == "v2"
    with pytest.raises(ValueError, match="batch_invariant"):
        diyfa.flash_attention(q, q, q, variant="split_kv")
    with diyfa.batch_invariant():
        assert diyfa.explain(q, q, q).kernel == "split_kv"
        with pytest.raises(ValueError, match="not batch invariant"):
            diyfa.flash_attention(q, q, q, variant="v2")
