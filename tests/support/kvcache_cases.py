"""Calls with a cache: the table of cases, their tensors in poisoned memory, and what each result is held to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import pytest
import torch

import diyfa
from diyfa.problem import KVCacheTensors, NewKeys
from diyfa.reference import reference_append, reference_kvcache
from diyfa.testing import LSE_UNIT, Error, error_budget, measure_error, rounding_unit
from diyfa.yardstick import largest_scores, plain_flash_attention

FLOAT8 = torch.float8_e4m3fn
GARBAGE = (-1, 2**30, -(2**31))  # what stands in a page table where no sequence has keys


@dataclass(frozen=True)
class CacheCase:
    """One call in words; all memory that belongs to no key holds NaN.

    `lens` are the keys in the cache before the call, `added` how many more it brings for each sequence. `lens_q` makes
    it a call of packed queries over pages, without new keys. The first `shared` pages are the same for all sequences.
    """

    name: str
    lens: tuple[int, ...]
    seqlen_q: int = 1
    added: int = 0
    heads: int = 2
    heads_kv: int = 1
    head_dim: int = 32
    head_dim_v: int = 0  # 0: head_dim
    dtype: str = "float16"
    float8: bool = False
    page_size: int = 0  # 0: contiguous
    shared: int = 0
    spare: int = 0  # capacity beyond the longest sequence
    lens_q: tuple[int, ...] = ()
    by: str = "tensor"  # how the lengths come: "tensor", "int", "none"; packed: "used", "offsets"
    leftpad: tuple[int, ...] = ()
    batch_idx: bool = False
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str = ""
    sinks: bool = False
    rotary: int = 0
    interleaved: bool = True
    latent: bool = False
    num_splits: int = 0
    sliced: bool = False  # cut from larger buffers at odd offsets
    passes_out: bool = False
    seed: int = 0
    nudge: int = 0

    @property
    def batch(self) -> int:
        return len(self.lens)

    @property
    def capacity(self) -> int:
        rows = max((n + self.added for n in self.lens), default=0) + self.spare
        return -(-rows // self.page_size) * self.page_size if self.page_size else rows


def _random(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _table(case: CacheCase, generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """The page table, and how many pages the cache has."""
    columns = case.capacity // case.page_size
    page_counts = [-(-(n + case.added) // case.page_size) for n in case.lens]
    pages = sum(page_counts) + 3
    order = torch.randperm(pages, generator=generator)[: sum(page_counts)].tolist()
    table = torch.tensor([[GARBAGE[(b + c) % 3] for c in range(columns)] for b in range(case.batch)], dtype=torch.int32)
    table = table.reshape(case.batch, columns)
    for b, count in enumerate(page_counts):
        pages_of_sequence = [order.pop() for _ in range(count)]
        shared = min(case.shared, count) if b else 0
        for c in range(count):
            table[b, c] = table[0, c] if c < shared else pages_of_sequence[c]
    return table, pages


def _cut(x: torch.Tensor, sliced: bool) -> torch.Tensor:
    """x itself, or equal values in the middle of a larger buffer of NaN."""
    if not sliced:
        return x
    buffer = torch.full([n + 3 for n in x.shape], float("nan"), dtype=torch.float32).to(x.dtype)
    inside = buffer[tuple(slice(3, None) for _ in x.shape)]
    inside.copy_(x)
    return inside


def make_call(case: CacheCase) -> dict[str, Any]:
    """The arguments of `reference_kvcache` on the CPU; they are those of the functions under test, too."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)
    cache_dtype = FLOAT8 if case.float8 else dtype
    dv = case.head_dim_v or case.head_dim
    rows_q = (sum(case.lens_q) + 2,) if case.lens_q else (case.batch, case.seqlen_q)
    q = _random(generator, dtype, *rows_q, case.heads, case.head_dim)
    if case.nudge:
        q = (
            q.double() * (1 + (2 * torch.rand(q.shape, generator=torch.Generator().manual_seed(case.nudge)) - 1) / 32)
        ).to(dtype)
    call: dict[str, Any] = {"causal": case.causal, "window_size": case.window, "softcap": case.softcap}
    table, index = None, None
    if case.page_size:
        table, pages = _table(case, generator)
        shape: tuple[int, ...] = (pages, case.page_size)
        call["block_table"] = table
    else:
        shape = (case.batch + 2, case.capacity)
        if case.batch_idx:
            index = torch.randperm(case.batch + 2, generator=generator)[: case.batch].int()
            call["cache_batch_idx"] = index
    nan = torch.tensor(float("nan")).to(cache_dtype)
    caches = [nan.expand(*shape, case.heads_kv, d).clone() for d in (case.head_dim, dv)]
    pads = case.leftpad or (0,) * case.batch
    for b, n in enumerate(case.lens):
        for j in range(pads[b], n):
            position = (b if index is None else int(index[b]), j)
            if table is not None:
                position = (int(table[b, j // case.page_size]), j % case.page_size)
            for cache in caches:
                cache[position] = _random(generator, torch.float64, *cache.shape[2:]).to(cache_dtype)
    call["k_cache"], call["v_cache"] = (_cut(x, case.sliced) for x in caches)
    call["q"] = _cut(q, case.sliced)
    if case.latent:
        call["v_cache"] = call["k_cache"][..., :dv]
    if case.added:
        new = (case.batch, case.added, case.heads_kv)
        call["k"] = _random(generator, dtype, *new, case.head_dim)
        call["v"] = None if case.latent else _random(generator, dtype, *new, dv)
    if case.rotary:
        angle = 6 * torch.rand((case.capacity + 5, case.rotary // 2), generator=generator)
        call["rotary_cos"], call["rotary_sin"] = angle.cos().to(dtype), angle.sin().to(dtype)
        call["rotary_interleaved"] = case.interleaved
    if case.by != "none":
        call["cache_seqlens"] = case.lens[0] if case.by == "int" else torch.tensor(case.lens, dtype=torch.int32)
    if case.leftpad:
        call["cache_leftpad"] = torch.tensor(case.leftpad, dtype=torch.int32)
    if case.alibi:
        call["alibi_slopes"] = (
            torch.rand((case.heads,) if case.alibi == "h" else (case.batch, case.heads), generator=generator) * 0.3
        )
    if case.sinks:
        call["sinks"] = torch.randn(case.heads, generator=generator)
    if case.float8:  # four binary digits: products with float8 are exact in every dtype
        for name in ("k_descale", "v_descale"):
            call[name] = torch.randint(8, 16, (case.batch, case.heads_kv), generator=generator).float() / 8
    if case.lens_q:
        call["cu_seqlens_q"] = torch.tensor([1, *accumulate(case.lens_q, initial=1)][1:], dtype=torch.int32)
    return call


def _placed(x: Any, device: str) -> Any:
    """A tensor in new memory on the device, lying there as here."""
    if not isinstance(x, torch.Tensor):
        return x
    base = x if x._base is None else x._base
    return base.clone().to(device).as_strided(x.size(), x.stride(), x.storage_offset())


def run_case(case: CacheCase, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse and both caches after the call, on the CPU."""
    arguments = {name: _placed(x, device) for name, x in make_call(case).items()}
    if case.latent:
        arguments["v_cache"] = arguments["k_cache"][..., : case.head_dim_v]
    q, k_cache, v_cache = arguments.pop("q"), arguments.pop("k_cache"), arguments.pop("v_cache")
    if case.passes_out:
        arguments["out"] = q.new_empty((*q.shape[:-1], v_cache.shape[-1]))
    if not case.lens_q:
        out, lse = diyfa.flash_attn_with_kvcache(
            q, k_cache, v_cache, num_splits=case.num_splits, return_softmax_lse=True, **arguments
        )
    else:
        lengths, offsets = arguments.pop("cache_seqlens"), None
        if case.by == "offsets":
            lengths, offsets = None, _placed(torch.tensor([0, *accumulate(case.lens)], dtype=torch.int32), device)
        out, lse = diyfa.flash_attention_varlen(
            q, k_cache, v_cache, arguments.pop("cu_seqlens_q"), offsets, max(case.lens_q), max(case.lens) + case.spare,
            window=arguments.pop("window_size"), seqused_k=lengths, return_lse=True, **arguments,
        )  # fmt: skip
    assert not case.passes_out or out is arguments["out"]
    return out.cpu(), lse.cpu(), k_cache.cpu(), v_cache.cpu()


@lru_cache(maxsize=4)
def _errors(case: CacheCase) -> tuple[torch.Tensor, torch.Tensor, Error, Error, Error]:
    """Exact out and lse; the errors that a plain FlashAttention makes of both; the unit of the lse."""
    call = make_call(case)
    exact = reference_kvcache(**call, return_softmax_lse=True, dtype=torch.float64)
    plain = reference_kvcache(**call, return_softmax_lse=True, attend=plain_flash_attention)

    def scores(*qkv: torch.Tensor, return_lse: bool, **options: Any) -> Any:
        return torch.zeros_like(qkv[0][..., :1]).expand(*qkv[0].shape[:-1], qkv[2].shape[-1]), largest_scores(
            *qkv, **options
        )

    largest = reference_kvcache(**call, return_softmax_lse=True, dtype=torch.float64, attend=scores)[1].abs() * LSE_UNIT
    largest = largest[largest.isfinite()]
    unit = Error(float(largest.max()), float(largest.square().mean().sqrt())) if largest.numel() else Error(0.0, 0.0)
    return *exact, *(measure_error(a, b) for a, b in zip(plain, exact, strict=True)), unit


def assert_in_budget(case: CacheCase, out: torch.Tensor, lse: torch.Tensor) -> None:
    """out and lse are within the error budget of every kernel; where few values leave the yardstick's error to chance,
    it is the largest of some draws."""
    expected, expected_lse, *_, unit = _errors(case)
    dtype = getattr(torch, case.dtype)
    assert out.dtype == dtype and lse.dtype == torch.promote_types(dtype, torch.float32)
    for position, (got, exact, rounding) in enumerate(
        ((out, expected, rounding_unit(expected, dtype)), (lse, expected_lse, unit))
    ):
        error, yardstick = measure_error(got, exact), Error(0.0, 0.0)
        for nudge in range(16):
            nudged = _errors(replace(case, nudge=nudge))[2 + position]
            yardstick = Error(*(max(pair) for pair in zip(yardstick, nudged, strict=True)))
            budget = error_budget(yardstick, rounding)
            if error.max_abs <= budget.max_abs and error.rms <= budget.rms:
                break
        else:
            raise AssertionError(f"{case.name}: {('out', 'lse')[position]} has error {error}, budget {budget}")


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def assert_appended(case: CacheCase, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """The new keys and values stand where they belong, and every other byte of the caches is what it was."""
    call = make_call(case)
    seqlens = call.get("cache_seqlens")
    tensors = KVCacheTensors(
        call["q"], call["k_cache"], call["v_cache"], 1.0, length=seqlens if isinstance(seqlens, int) else 0,
        seqlens=seqlens if isinstance(seqlens, torch.Tensor) else None, block_table=call.get("block_table"),
        cache_batch_idx=call.get("cache_batch_idx"), k_descale=call.get("k_descale"), v_descale=call.get("v_descale"),
    )  # fmt: skip
    reference = tensors
    if case.added:
        new = NewKeys(call["k"], call["v"], call.get("rotary_cos"), call.get("rotary_sin"), case.interleaved)
        reference = reference_append(tensors, new)
    for got, expected, before in (
        (k_cache, reference.k_cache, tensors.k_cache),
        (v_cache, reference.v_cache, tensors.v_cache),
    ):
        written = ~expected.isnan() & before.isnan()
        assert torch.equal(_bits(got)[~written], _bits(before)[~written]), "a byte beside the new keys has changed"
        if case.rotary or case.float8:  # products and quotients may be rounded otherwise
            torch.testing.assert_close(
                got[written].double(), expected[written].double(), rtol=2 * torch.finfo(got.dtype).eps, atol=1e-6
            )
        else:
            assert torch.equal(got[written], expected[written])


Case = CacheCase
LENGTHS = [
    Case("one_key", (1,), causal=False),
    Case("ragged", (0, 1, 63, 130, 64), spare=7),
    Case("ragged_paged", (0, 1, 63, 130, 64), page_size=16, spare=40, heads=4, heads_kv=2),
    Case("int_length", (37, 37), by="int", spare=20, seqlen_q=3),
    Case("whole_cache", (70, 70), by="none", causal=False),
    Case("no_keys", (0, 0), spare=5, seqlen_q=3),
    Case("more_queries_than_keys", (3, 40, 0), seqlen_q=9, spare=3),
    Case("long_queries", (90, 71), seqlen_q=70, heads=1),
    Case("long", (700, 33), heads=4, heads_kv=2, num_splits=3),
]
PAGES = [
    Case("page_1", (5, 70, 0), page_size=1, seqlen_q=2),
    Case("page_3", (5, 70, 33), page_size=3, added=2, seqlen_q=2),
    Case("page_16", (16, 70, 33), page_size=16, added=1),
    Case("page_64", (100, 70, 0), page_size=64, added=3, seqlen_q=3, spare=64),
    Case("page_256", (100, 257), page_size=256),
    Case("shared_pages", (40, 70, 33), page_size=16, shared=2, dtype="bfloat16"),
    Case("shared_page_1", (9, 12), page_size=1, shared=7),
]
APPEND = [
    Case("append", (0, 30, 64), added=1, spare=2),
    Case("append_several", (0, 30, 63), added=5, seqlen_q=5, batch_idx=True, heads=4, heads_kv=2),
    Case("append_others_than_queries", (0, 30, 7), added=4, seqlen_q=2, dtype="float32"),
    Case("append_int", (30, 30), added=2, seqlen_q=2, by="int", page_size=16),
    Case("append_full", (60, 64), added=4, seqlen_q=4, dtype="bfloat16"),
    Case("rotary", (0, 30, 62), added=2, seqlen_q=2, rotary=32, spare=3),
    Case("rotary_halves", (5, 30), added=3, seqlen_q=3, rotary=16, interleaved=False, page_size=16, dtype="bfloat16"),
    Case("rotary_not_causal", (5, 30), added=2, seqlen_q=2, rotary=16, causal=False),
    Case("rotary_window", (5, 40), added=2, seqlen_q=3, rotary=8, causal=False, window=(9, 1), dtype="float32"),
    Case("rotary_wide_window", (5, 40), added=2, seqlen_q=3, rotary=8, causal=False, window=(99, -1)),
]
FEATURES = [
    Case("fp32", (33, 70), dtype="float32", seqlen_q=2),
    Case("bf16", (33, 70), dtype="bfloat16", heads=4),
    Case("mqa_8", (33, 70), heads=8, heads_kv=1, seqlen_q=3),
    Case("groups_of_3", (33, 70), heads=6, heads_kv=2, seqlen_q=5, page_size=16),
    Case("window", (33, 140), window=(20, -1), seqlen_q=2),
    Case("window_both", (33, 140), window=(20, 3), causal=False, seqlen_q=9, page_size=16),
    Case("window_beyond_pages", (140, 9), window=(5, 0), page_size=16, num_splits=7),
    Case("softcap", (33, 70), softcap=2.0),
    Case("alibi", (33, 70), alibi="h", heads=4, heads_kv=2, seqlen_q=3),
    Case("alibi_batch", (33, 70), alibi="bh", heads=4, seqlen_q=2, page_size=3),
    Case("sinks", (33, 0, 70), sinks=True, heads=4),
    Case("sinks_splits", (133, 0, 70), sinks=True, num_splits=2, seqlen_q=2),
    Case("leftpad", (33, 70, 9), leftpad=(3, 0, 9), seqlen_q=2, spare=2),
    Case("leftpad_append", (33, 70, 9), leftpad=(3, 65, 9), added=2, seqlen_q=2, batch_idx=True, rotary=8),
    Case("leftpad_paged", (33, 70), leftpad=(17, 3), page_size=16),
    Case("dv_24", (33, 70), head_dim=40, head_dim_v=24, heads_kv=2),
    Case("d_128", (33, 70), head_dim=128, heads=4, page_size=16),
    Case("d_256", (40,), head_dim=256),
    Case("sliced", (33, 70), sliced=True, added=2, seqlen_q=2, head_dim=24),
    Case("sliced_paged", (33, 70), sliced=True, page_size=16, head_dim=40, heads=4, heads_kv=2),
    Case("passes_out", (33, 70), passes_out=True, added=1),
    Case("splits_1", (133, 9, 200), num_splits=1),
    Case("splits_2", (133, 9, 200), num_splits=2, seqlen_q=3),
    Case("splits_7", (133, 9, 200), num_splits=7, page_size=16),
    Case("splits_more_than_keys", (3, 1), num_splits=16),
    Case("float8", (33, 70), float8=True, dtype="bfloat16", heads=4, heads_kv=2),
    Case("float8_paged", (33, 70), float8=True, page_size=16, added=2, seqlen_q=2, num_splits=2),
    Case("float8_rotary", (33, 70), float8=True, added=1, rotary=16, dtype="bfloat16"),
    Case("float8_odd_features", (33, 70), float8=True, dtype="bfloat16", head_dim=40, head_dim_v=35),
    Case("float8_wide_values", (300, 7), float8=True, dtype="bfloat16", head_dim=40, head_dim_v=80, page_size=16),
    Case("latent_many_rows", (70, 33), heads=48, head_dim=96, head_dim_v=64, latent=True, dtype="bfloat16"),
    Case("latent", (33, 70), heads=16, head_dim=96, head_dim_v=64, latent=True, dtype="bfloat16"),
    Case("latent_paged", (33, 70), heads=8, head_dim=40, head_dim_v=32, latent=True, page_size=16, added=2, seqlen_q=2),
    Case("latent_576", (40,), heads=16, head_dim=576, head_dim_v=512, latent=True, dtype="bfloat16", page_size=64),
    Case(
        "everything", (33, 150, 20), seqlen_q=3, added=3, heads=4, heads_kv=2, head_dim=48, head_dim_v=32, page_size=16,
        window=(40, 0), softcap=3.0, alibi="bh", sinks=True, rotary=16, leftpad=(3, 0, 0), num_splits=2, shared=1,
    ),
]  # fmt: skip
PACKED = [
    Case("packed", (33, 9, 70), lens_q=(5, 0, 40), page_size=16, by="used"),
    Case("packed_offsets", (33, 9, 70), lens_q=(5, 9, 1), page_size=3, by="offsets", heads=4, heads_kv=2),
    Case("packed_decode_and_prefill", (130, 5, 70, 0), lens_q=(1, 5, 30, 1), page_size=16, by="used", dtype="bfloat16"),
    Case("packed_out", (33, 70), lens_q=(1, 20), page_size=64, by="used", passes_out=True, sinks=True, softcap=3.0),
    Case("packed_window_alibi", (33, 70), lens_q=(3, 20), page_size=16, by="used", window=(9, 0), alibi="bh"),
    Case("packed_latent", (33, 70), lens_q=(1, 9), page_size=16, by="used", heads=8, head_dim=40, head_dim_v=32,
         latent=True),
]  # fmt: skip
KVCACHE_CASES = {f"kvcache_{case.name}": case for case in [*LENGTHS, *PAGES, *APPEND, *FEATURES, *PACKED]}


def use_chunks_of(monkeypatch: pytest.MonkeyPatch, chunk_keys: int, multiprocessors: int) -> None:
    """From now on CUDA's fixed chunks have so many keys, and as many programs run at once as on a GPU of that size."""
    monkeypatch.setattr("diyfa.plan.plans", {})  # an earlier test's answers are kept by its plans, and by kinds
    monkeypatch.setattr("diyfa.problem._kinds", {})
    monkeypatch.setattr("diyfa.backends.cuda.attention.decode_configs.CHUNK_KEYS", chunk_keys)
    monkeypatch.setattr("diyfa.backends.cuda.attention.stream_k.multiprocessors", lambda device: multiprocessors)
