"""What only the NPU's kernels of a cache have: rows packed from heads and queries, keys that are gathered, tokens that
land nowhere. The cases of all backends are in tests/numerics/test_kvcache_matrix.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvcache_cases import CacheCase, assert_appended, assert_in_budget, make_call, run_case

import diyfa
from diyfa.backends.npu.attention.append import kvcache_append
from diyfa.backends.npu.attention.decode import kvcache_fwd
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


@pytest.mark.parametrize("page_size", [16, 4])
def test_a_page_that_there_is_not_is_absent(npu: torch.device, page_size: int) -> None:
    """As on CUDA: no key lies behind an entry outside the cache, in pages that are loaded whole or gathered. What
    belongs to no sequence is NaN: the nearest pages, and rows beyond the keys and before them."""
    pages, absent = 7, 2**31 - 1
    table = torch.tensor([[2, -1, 4, 2**30], [-(2**31), absent, 1, 5], [6, 7, 3, absent], [-1, 7, -9, 8]]).int()
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, pages, page_size, 1, 32, generator=generator).half()
    q, capacity = torch.randn(4, 1, 2, 32, generator=generator).half(), 4 * page_size
    counts, pads = [capacity - 1, capacity - 2, capacity - 1, capacity], [1, 0, 2 * page_size + 1, 0]
    seen = [[page * page_size + row for page, rows in own for row in rows] for own in (
        [(2, range(1, page_size)), (4, range(page_size))],
        [(1, range(page_size)), (5, range(page_size - 2))],
        [(3, range(1, page_size))],
        [],
    )]  # fmt: skip
    unseen = sorted(set(range(pages * page_size)) - {row for rows in seen for row in rows})
    for x in (k, v):
        x.view(-1, 32)[unseen] = NAN
    sinks = torch.tensor([0.5, -1.0])
    tensors = KVCacheTensors(
        q.to(npu), k.to(npu), v.to(npu), 0.2, seqlens=torch.tensor(counts).int().to(npu),
        block_table=table.to(npu), leftpad=torch.tensor(pads).int().to(npu),
        sinks=sinks.to(npu),
    )  # fmt: skip
    arch = diyfa.registry.load_backend("npu").arch(npu)
    problem = KVCacheProblem(
        "npu",
        arch,
        "float16",
        "float16",
        "bshd",
        4,
        2,
        1,
        1,
        capacity,
        32,
        32,
        page_size,
        lengths=True,
        leftpad=True,
        sinks=True,
    )
    out, lse = torch.empty_like(tensors.q), torch.empty(problem.lse_shape, device=npu)
    kvcache_fwd(problem, tensors, out, lse)
    for b, rows in enumerate(seen):
        there = [x.flatten(0, 1)[None, rows].float() for x in (k, v)]
        want, want_lse = diyfa.reference_attention(
            q[b : b + 1].float(), *there, sm_scale=0.2, layout="bshd", sinks=sinks, return_lse=True
        )
        torch.testing.assert_close(out[b : b + 1].cpu().float(), want, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(lse[b : b + 1].cpu(), want_lse, rtol=1e-5, atol=1e-5)


def test_a_batch_entry_that_there_is_not_has_no_keys(npu: torch.device) -> None:
    k, q = torch.ones(2, 16, 1, 32).half().to(npu), torch.ones(3, 1, 1, 32).half().to(npu)
    tensors = KVCacheTensors(q, k, k, 0.2, 9, cache_batch_idx=torch.tensor([1, -1, 2]).int().to(npu))
    arch = diyfa.registry.load_backend("npu").arch(npu)
    problem = KVCacheProblem("npu", arch, "float16", "float16", "bshd", 3, 1, 1, 1, 16, 32, 32, cache_batch_idx=True)
    out, lse = torch.empty_like(q), torch.empty(problem.lse_shape, device=npu)
    kvcache_fwd(problem, tensors, out, lse)
    assert out.cpu()[:, 0, 0, 0].tolist() == [1.0, 0.0, 0.0] and lse.cpu().isposinf().flatten().tolist() == [0, 1, 1]


def test_packed_keys_end_with_their_rows(npu: torch.device) -> None:
    """As on CUDA: a `seqused_k` beyond what lies between two offsets is what lies there."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 50, 1, 32, generator=generator).half()
    q, offsets = torch.randn(2, 2, 32, generator=generator).half(), [0, 20, 50]
    tensors = KVCacheTensors(
        q.to(npu), k.to(npu), v.to(npu), 0.2, seqlens=torch.tensor([33, 7]).int().to(npu),
        cu_seqlens_q=torch.tensor([0, 1, 2]).int().to(npu), cu_seqlens_k=torch.tensor(offsets).int().to(npu),
    )  # fmt: skip
    arch = diyfa.registry.load_backend("npu").arch(npu)
    problem = KVCacheProblem(
        "npu", arch, "float16", "float16", "thd", 2, 2, 1, 1, 50, 32, 32, packed_keys=True, lengths=True, total_q=2
    )
    out, lse = torch.empty_like(tensors.q), torch.empty(problem.lse_shape, device=npu)
    kvcache_fwd(problem, tensors, out, lse)
    for b, there in enumerate((slice(0, 20), slice(20, 27))):
        keys = [x[None, there].float() for x in (k, v)]
        want = diyfa.reference_attention(q[b, None, None].float(), *keys, sm_scale=0.2, layout="bshd")
        torch.testing.assert_close(out[b].cpu().float(), want[0, 0], rtol=2e-3, atol=2e-3)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_rows_are_bitwise_the_same(npu: torch.device, dtype: torch.dtype) -> None:
    """One sequence by itself and in a batch, its queries all at once, a few and one at a time, its keys in a row and in
    pages of 1, 16, 48 and 128, in any number of splits; and training's forward pass, packed and not."""
    g = torch.Generator().manual_seed(3)
    n, heads, heads_kv, d = 150, 6, 2, 32
    q, k, v = (torch.randn(n, h, d, generator=g).to(dtype) for h in (heads, heads_kv, heads_kv))
    causal: dict[str, Any] = {"causal": True, "return_softmax_lse": True}
    with diyfa.batch_invariant():
        trained = diyfa.flash_attn_func(*(x[None].to(npu) for x in (q, k, v)), causal=True, return_attn_probs=True)
        want, want_lse = trained[0].cpu()[0], trained[1].cpu()[0]

        def same(rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
            assert torch.equal(out.cpu(), want[rows])
            assert torch.equal(lse.cpu(), want_lse[:, rows])

        other = torch.randn(40, heads, d, generator=g).to(dtype)
        packed = [torch.cat((x[: len(other)], y)).to(npu) for x, y in ((other, q), (k, k), (v, v))]
        cu = torch.tensor([0, 40, 40 + n], dtype=torch.int32).to(npu)
        out, lse, _ = diyfa.flash_attn_varlen_func(*packed, cu, cu, n, n, causal=True, return_attn_probs=True)
        same(slice(0, n), out.cpu()[40:], lse.cpu()[:, 40:])

        for page, last, splits in ((0, 1, 1), (0, 7, 3), (1, 1, 0), (16, 20, 2), (48, 1, 5), (128, 3, 1)):
            rows = -(-n // (page or n)) * (page or n)
            keys = [torch.cat((x, torch.full((rows - n, heads_kv, d), NAN, dtype=dtype))) for x in (k, v)]
            batch = 3 if last == 1 else 1
            queries = torch.cat([q[None, n - last :], torch.randn(batch - 1, last, heads, d, generator=g).to(dtype)])
            cache: dict[str, Any] = {"cache_seqlens": torch.tensor([n, 5, 77][:batch], dtype=torch.int32).to(npu)}
            if page:
                order = torch.randperm(rows // page, generator=g)
                keys = [x.unflatten(0, (-1, page))[order.argsort()] for x in keys]
                cache["block_table"] = order.int().repeat(batch, 1).to(npu)
            else:
                keys = [x[None].repeat(batch, 1, 1, 1) for x in keys]
            out, lse = diyfa.flash_attn_with_kvcache(
                queries.to(npu), *(x.to(npu) for x in keys), num_splits=splits, **cache, **causal
            )
            same(slice(n - last, n), out[0], lse[0])


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
