"""The Hopper forward over a cache without a GPU: right results from pages and rows, and nothing that is not a key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hopper_interpreted import interpret_prefill, interpreted_only
from kvcache_cases import CacheCase, assert_appended, assert_in_budget, run_case
from poison import poisoned_allocations

import diyfa
from diyfa import kvcache, problem
from diyfa import plan as planning
from diyfa.backends.cuda.hopper import configs, prefill_configs
from diyfa.backends.cuda.hopper.configs import Sm90Config
from diyfa.problem import KVCacheProblem

pytestmark = interpreted_only

PERSISTENT = Sm90Config(
    2, 128, 4, True, 232, 40, persistent=True, scheduler="dynamic", pingpong=True, pairs=True, fixed_max=True
)
PLAIN = Sm90Config(1, 64, 4, True, 232, 24, fixed_max=True)


def case(name: str, *lens: int, **changes) -> CacheCase:
    return CacheCase(
        name, lens, **{"seqlen_q": 130, "head_dim": 64, "heads": 2, "heads_kv": 1, "dtype": "bfloat16", **changes}
    )


def check(case: CacheCase) -> None:
    with diyfa.use_backend("cuda"), poisoned_allocations(), torch.no_grad():
        out, lse, k_cache, v_cache = run_case(case, "cpu")
    assert_in_budget(case, out, lse)
    assert_appended(case, k_cache, v_cache)


PACKED = {"lens_q": (1, 130, 0, 30), "by": "used"}
CASES = [
    (case("pages_of_16", 200, 33, 0, 70, page_size=16), PERSISTENT),
    (case("pages_of_64", 300, 65, page_size=64), PERSISTENT),
    (case("pages_of_a_tile", 300, 128, page_size=128, heads=3), PERSISTENT),
    (case("larger_pages", 300, 1, page_size=384, causal=False), PERSISTENT),
    (case("shared_pages", 150, 70, 90, page_size=32, shared=2, spare=100), PLAIN),
    (case("packed", 150, 140, 7, 33, page_size=16, **PACKED), PERSISTENT),
    (case("packed_offsets", 130, 90, 0, 33, page_size=64, **PACKED | {"by": "offsets"}), PLAIN),
    (case("contiguous", 200, 33, 0, 150, spare=9), PERSISTENT),
    (case("entries", 90, 33, 140, batch_idx=True, causal=False, spare=50), PLAIN),
    (case("int_length", 150, 150, by="int", spare=70), PLAIN),
    (case("whole_cache", 100, 100, by="none", causal=False), PLAIN),
    (case("append", 60, 0, added=130, page_size=64, rotary=16), PERSISTENT),
    (case("more_queries_than_keys", 30, 5, page_size=16), PLAIN),
    (case("128", 170, 20, head_dim=128, page_size=16, dtype="float16"), replace(PERSISTENT, box_columns=64)),
    (case("256", 90, head_dim=256, page_size=16, heads=1),
        replace(PLAIN, separate_o_buffer=False, store_from_registers=True)),
    (case("window", 260, 40, window=(50, 9), causal=False, page_size=16), PERSISTENT),
    (case("features", 200, 0, 40, page_size=64, softcap=3.0, alibi="bh", sinks=True, by="used", lens_q=(130, 3, 9)),
        PERSISTENT),
    (case("passes_out", 100, 33, page_size=16, passes_out=True), PLAIN),
]  # fmt: skip


@pytest.mark.parametrize(("case", "config"), CASES, ids=[case.name for case, _ in CASES])
def test_out_and_lse(case: CacheCase, config: Sm90Config, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = interpret_prefill(monkeypatch, config, seed=3)
    check(case)
    assert kernel.launches == 1


def paged_call() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(5, 16, 1, 64, generator=generator).bfloat16()
    return {
        "q": torch.randn(70, 2, 64, generator=generator).bfloat16(), "k": pages, "v": pages.flip(0),
        "cu_seqlens_q": torch.tensor([0, 70], dtype=torch.int32), "cu_seqlens_k": None, "max_seqlen_q": 70,
        "max_seqlen_k": 80, "block_table": torch.tensor([[3, 1, 2, 0, 4]], dtype=torch.int32),
        "seqused_k": torch.tensor([75], dtype=torch.int32),
    }  # fmt: skip


@pytest.mark.parametrize("what", ["cache", "out"])
def test_what_tma_cannot_reach_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name raises; without it the portable kernel is chosen, and `explain` says why."""
    kernel = interpret_prefill(monkeypatch, PLAIN)
    call, reason = paged_call(), "counts the steps"
    with diyfa.use_backend("cuda"):
        want = diyfa.flash_attention_varlen(**call, variant="sm90_prefill")
        assert kernel.launches == 1
        if what == "cache":
            monkeypatch.setattr(problem, "MAX_STEPS", 64)
            monkeypatch.setattr(planning, "plans", {})
        else:
            call["out"] = torch.empty(want.numel() + 1, dtype=want.dtype)[1:].view(want.shape)
            reason = "writes out through TMA"
        with pytest.raises(ValueError, match=f"sm90_prefill: .*{reason}"):
            diyfa.flash_attention_varlen(**call, variant="sm90_prefill")
        out = diyfa.flash_attention_varlen(**call)
        explained = diyfa.explain(**call, layout="thd")
    assert kernel.launches == 1
    torch.testing.assert_close(out, want, rtol=1e-2, atol=1e-2)
    assert explained.kernel == "split_kv"
    assert any(reason in x.reason for x in explained.alternatives if x.kernel == "sm90_prefill")


def test_pages_that_nobody_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of a device may have anything: what lies outside of the cache is not read, and lengths end with it."""
    interpret_prefill(monkeypatch, PLAIN)
    monkeypatch.setattr(kvcache, "_check_values", lambda *arguments: None)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 70, 1, 64, generator=generator).bfloat16()
    pages = torch.full((5, 16, 1, 64), float("nan")).bfloat16()
    pages[1:4] = torch.randn(3, 16, 1, 64, generator=generator).bfloat16()
    table = torch.tensor([[3, 1, 2, 1, 3], [2, -1, 5, 2**30, 1]], dtype=torch.int32)
    for lengths in ([99, 80], [-7, 70]):
        with diyfa.use_backend("cuda"), poisoned_allocations():
            out, lse = diyfa.flash_attn_with_kvcache(
                q, pages, pages, cache_seqlens=torch.tensor(lengths, dtype=torch.int32), block_table=table,
                return_softmax_lse=True,
            )  # fmt: skip
        assert out.isfinite().all()
        assert lse[0].isposinf().all() if lengths[0] < 0 else lse.isfinite().all()
        if lengths[0] > 0:  # no more than the table has room for
            keys = pages[table[0].long()].reshape(1, 80, 1, 64).float()
            want = diyfa.reference_attention(q[:1].float(), keys, keys, layout="bshd")
            torch.testing.assert_close(out[:1].float(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("holds", ["nan", "-1"])
def test_pages_that_a_window_hides_are_not_read(holds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block of keys of a tile has pages in front of the window: what they hold, or that they are given back,
    changes no bit."""
    kernel = interpret_prefill(monkeypatch, PERSISTENT)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 130, 2, 64, generator=generator).bfloat16()
    k, v = (torch.randn(25, 16, 1, 64, generator=generator).bfloat16() for _ in "kv")
    table = torch.randperm(25, generator=generator).int()[None]
    results = []
    for hidden in (0, (400 - 130 - 20) // 16):
        pages = table[0, :hidden].long()
        k[pages], v[pages] = float("nan"), float("nan")
        if holds == "-1":
            table[0, :hidden] = -1
        with diyfa.use_backend("cuda"), poisoned_allocations(), torch.no_grad():
            results.append(diyfa.flash_attn_with_kvcache(q, k, v, block_table=table, window_size=(20, 0)))
    assert kernel.launches == 2
    assert results[1].isfinite().all() and torch.equal(*results)


def test_rows_of_a_cache_that_nobody_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_prefill(monkeypatch, PLAIN)
    monkeypatch.setattr(kvcache, "_check_values", lambda *arguments: None)
    q, cache = (torch.randn(n, 70, 1, 64, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (3, 2))
    rows = torch.tensor([1, -1, 2], dtype=torch.int32)
    with diyfa.use_backend("cuda"), poisoned_allocations():
        out, lse = diyfa.flash_attn_with_kvcache(
            q, cache, cache, cache_batch_idx=rows, cache_seqlens=50, return_softmax_lse=True
        )
    assert lse.isfinite().all((1, 2)).tolist() == [True, False, False]
    assert not out[1:].any()


def test_in_place_where_tiles_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that rise by hundreds overflow the sums of a fixed maximum; the queries must still be there then."""
    kernel = interpret_prefill(monkeypatch, replace(PLAIN, block_n=64))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, 64, generator=generator).bfloat16() for n in (64, 300, 300))
    k[:, 70:180] = q[:, :1] * 60
    call = {"cache_seqlens": torch.tensor([300], dtype=torch.int32)}
    want = diyfa.reference_attention(q.double(), k.double(), v.double(), layout="bshd")
    for out in (None, q):
        with diyfa.use_backend("cuda"):
            got = diyfa.flash_attn_with_kvcache(q, k, v, out=out, **call)
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)
    assert kernel.launches == 2


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2, 3, 4, 5))])
def test_every_interleaving(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"page_size": 16, "lens_q": (70, 3), "by": "used", "heads": 1}
    interpret_prefill(monkeypatch, replace(PLAIN, persistent=True, scheduler="dynamic"), seed, interleave=True)
    check(case("small", 200, 30, **changes))


REFUSED = {
    "cache_leftpad": {"leftpad": True},
    "does not implement softcap": {"batch_invariant": True, "softcap": 3.0},
    "num_splits": {"num_splits": 2},
    "float8": {"cache_dtype": "float8_e4m3fn"},
    "pages are multiples": {"page_size": 48},
    "16 at least": {"page_size": 8},
    "have 2 on average": {"layout": "thd", "total_q": 9},
    "have 16 on average": {"seqlen_q": 16},
    "16 bytes": {"aligned": False},
    "sm_100": {"arch": "sm_100"},
    "head_dim 33 to 256": {"head_dim": 576, "head_dim_v": 512, "latent": True},
    "float32": {"dtype": "float32", "cache_dtype": "float32"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_refuses(words: str) -> None:
    problem = KVCacheProblem("cuda", "sm_90", "bfloat16", "bfloat16", "bshd", 4, 32, 8, 512, 4096, 128, 128, 64)
    problem = problem.replace(lengths=True)
    assert prefill_configs.refuses(problem) is None
    assert words in (prefill_configs.refuses(problem.replace(**REFUSED[words])) or "")


@pytest.mark.parametrize("page_size", [16, 8])
def test_a_call_with_pages_is_explained(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "environment_refusal", lambda: None)
    q, pages = torch.zeros(2048, 8, 128).bfloat16(), torch.zeros(4096 // page_size, page_size, 2, 128).bfloat16()
    table = torch.arange(4096 // page_size, dtype=torch.int32)[None]
    given = {"cu_seqlens_q": torch.tensor([0, 2048], dtype=torch.int32), "max_seqlen_q": 2048, "max_seqlen_k": 4096}
    given |= {"block_table": table, "seqused_k": torch.tensor([4096], dtype=torch.int32)}
    with diyfa.use_backend("cuda"):
        told = diyfa.explain(q, pages, pages, causal=True, layout="thd", **given)
        with pytest.raises(ValueError, match="cu_seqlens_q"):
            diyfa.explain(q, pages, pages, layout="thd", **given | {"cu_seqlens_q": table})
    reasons = {a.kernel: a.reason for a in told.alternatives if a.backend == "cuda"}
    assert told.kernel == ("sm90_prefill" if page_size == 16 else "split_kv")
    assert page_size == 16 or "divide it and are 16 at least, not 8" in reasons["sm90_prefill"]
