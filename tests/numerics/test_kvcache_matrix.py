"""Every case of `kvcache_cases.py` on every backend with a kernel for it, against the float64 reference."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvcache_cases import KVCACHE_CASES, CacheCase, assert_appended, assert_in_budget, run_case, use_chunks_of
from poison import poisoned_allocations
from refusals import refusal
from targets import TARGETS

import diyfa
from diyfa import kvcache, registry, testing, validation
from diyfa.testing import AttentionCase, assert_within_budget, make_inputs

BACKENDS = [name for name in TARGETS if diyfa.kernels_for(name, "kvcache_fwd")]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _check(backend: str, case: CacheCase) -> None:
    target = TARGETS[backend]
    with registry.use_backend(target.backend), poisoned_allocations():
        out, lse, k_cache, v_cache = run_case(case, target.device)
    assert_in_budget(case, out, lse)
    assert_appended(case, k_cache, v_cache)


@pytest.mark.parametrize("combination", [(b, name) for b in BACKENDS for name in KVCACHE_CASES], ids="-".join)
def test_kvcache(combination: tuple[str, str]) -> None:
    backend, name = combination
    target = TARGETS[backend]
    reason = refusal(backend, registry.load_backend(backend).arch(torch.device(target.device)), "auto", name)
    if reason is None:
        _check(backend, KVCACHE_CASES[name])
        return
    with registry.use_backend(target.backend), pytest.raises(ValueError, match="cannot run") as error:
        run_case(KVCACHE_CASES[name], target.device)
    assert reason in str(error.value)


@st.composite
def drawn_cases(draw: st.DrawFn) -> CacheCase:
    """Any lengths in pages of any size, in any order."""
    batch = draw(st.integers(1, 4))
    page_size = draw(st.sampled_from((0, 1, 2, 5, 16, 48)))
    added = draw(st.integers(0, 3))
    lens = tuple(draw(st.integers(0, 70)) for _ in range(batch))
    shared = draw(st.integers(0, min(lens) // page_size)) if page_size else 0
    return CacheCase(
        "drawn", lens, draw(st.integers(1, 5)), added, heads=4, heads_kv=draw(st.sampled_from((1, 2))), head_dim=16,
        dtype=draw(st.sampled_from(("float16", "float32"))), page_size=page_size, shared=shared,
        spare=draw(st.integers(0, 20)) + (not any(lens) and not added), causal=draw(st.booleans()),
        window=draw(st.sampled_from(((-1, -1), (6, 2)))), num_splits=draw(st.integers(0, 4)),
        seed=draw(st.integers(0, 2**20)),
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_drawn_page_tables(backend: str) -> None:
    examples = 5 if TARGETS[backend].interpreted else 40

    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(drawn_cases())
    def check(case: CacheCase) -> None:
        _check(backend, case)

    check()


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
# The host checks what lies on the CPU.
@pytest.mark.parametrize(
    ("backend", "used"), [(name, used) for name in BACKENDS for used in ((9, 20), (33, 7))[: 1 + (name != "cpu")]]
)
def test_packed_keys_of_which_some_are_used(
    backend: str, used: tuple[int, int], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sequence begins at its own offset, whatever seqused_k says of its length, and ends before the next one's."""
    monkeypatch.setattr(kvcache, "_check_packed_values", lambda *arguments: None)
    target, generator = TARGETS[backend], torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, heads, 16, generator=generator) for n, heads in ((4, 2), (40, 1), (40, 1)))
    offsets = (torch.tensor(x, dtype=torch.int32).to(target.device) for x in ([0, 1, 4], [0, 12, 40], used))
    cu_q, cu_k, lengths = offsets
    on_device = (x.to(target.device) for x in (q, k, v))
    with registry.use_backend(target.backend), poisoned_allocations():
        got = diyfa.flash_attention_varlen(*on_device, cu_q, cu_k, 3, 28, causal, seqused_k=lengths).cpu()
    for queries, keys in ((slice(0, 1), slice(0, min(used[0], 12))), (slice(1, 4), slice(12, 12 + used[1]))):
        rows = (x[None].double() for x in (q[queries], k[keys], v[keys]))
        want = diyfa.reference_attention(*rows, causal=causal, layout="bshd")[0]
        torch.testing.assert_close(got[queries].double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_that_begins_with_the_last_key_of_a_block(backend: str) -> None:
    """Of 16 keys, or of as many as 256."""
    _check(backend, CacheCase("last", (257, 17, 65), window=(1, -1), head_dim=16))


@pytest.mark.parametrize("grow", [True, False], ids=["growing", "falling"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_more_partial_results_than_are_read_at_once(backend: str, grow: bool) -> None:
    """Each has another maximum: earlier ones are rescaled where scores grow, later ones where they fall."""
    target, generator, splits = TARGETS[backend], torch.Generator().manual_seed(0), 40
    q, k, v = (torch.zeros(1, 1, 1, 128), *torch.randn(2, 1, 64 * splits, 1, 128, generator=generator))
    q[..., 0], k[..., 0] = 1, torch.linspace(0, 30, 64 * splits)[:, None]
    k = k if grow else k.flip(1)
    with registry.use_backend(target.backend), poisoned_allocations():
        out, lse = diyfa.flash_attn_with_kvcache(
            *(x.to(target.device) for x in (q, k, v)), softmax_scale=1.0, num_splits=splits, return_softmax_lse=True
        )
    want, want_lse = diyfa.reference_attention(
        q.double(), k.double(), v.double(), sm_scale=1.0, layout="bshd", return_lse=True
    )
    torch.testing.assert_close(out.cpu().double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-6, atol=1e-6)


UNCHECKED: dict[str, tuple[int, list[int], list[Any] | None]] = {  # page size, lengths, rows of the batch or page table
    "last rows": (0, [17, 16], None),
    "some beyond": (0, [18, 19], None),
    "far beyond": (0, [25, 2**31 - 1], None),
    "some before": (0, [-1, -2], None),
    "far before": (0, [-5, -(2**31)], None),
    "rows of the batch": (0, [3, 4], [3, 1]),
    "negative rows": (0, [3, 4], [-1, 0]),
    "pages": (16, [15, 30], [[0, 4], [-1, 3]]),
    "pages of three": (3, [5, 2], [[0, 1], [2, 4]]),
    "pages of one": (1, [0, 1], [[0, 3], [4, 2]]),
}


@pytest.mark.parametrize("rotary", [False, True], ids=["", "rotary"])
@pytest.mark.parametrize("name", UNCHECKED)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "cpu"])
def test_what_nobody_checked_is_written_nowhere(
    backend: str, name: str, rotary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device the host sees no lengths and no tables: what has no place in the cache is dropped, all else lands."""
    monkeypatch.setattr(kvcache, "_check_values", lambda *arguments: None)
    target, (page_size, lens, where) = TARGETS[backend], UNCHECKED[name]
    generator = torch.Generator().manual_seed(0)
    entries, size, added = (4, page_size, 3) if page_size else (3, 20, 3)
    guarded = [torch.full((entries + 2, size, HK, 16), 7.0) for _ in "kv"]
    on_device = [x.clone().to(target.device) for x in guarded]
    new = [torch.randn(2, added, heads, 16, generator=generator) for heads in (HK, HK, H)]
    options: dict[str, Any] = {}
    if where is not None:
        options["block_table" if page_size else "cache_batch_idx"] = torch.tensor(where, dtype=torch.int32)
    if rotary:
        angles = torch.arange(48)[:, None] * torch.linspace(0.1, 1, 4)
        options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": False}
    k, v, q, seqlens = (x.to(target.device) for x in (*new, torch.tensor(lens, dtype=torch.int32)))
    with registry.use_backend(target.backend):
        diyfa.flash_attn_with_kvcache(
            q, *(x[1:-1] for x in on_device), k, v, cache_seqlens=seqlens, causal=True,
            **{key: x.to(target.device) if isinstance(x, torch.Tensor) else x for key, x in options.items()},
        )  # fmt: skip
    table = where if page_size else None
    capacity = size * len(table[0]) if table else size
    for b, i in ((b, i) for b in range(2) for i in range(added)):
        j = lens[b] + i
        if not 0 <= j < capacity:
            continue
        entry, row = (table[b][j // size], j % size) if table else (b if where is None else where[b], j)
        if not 0 <= entry < entries:
            continue
        first, second = new[0][b, i].split([4, 12], -1)
        second, rest = second.split([4, 8], -1)
        if rotary:
            cos, sin = options["rotary_cos"][j], options["rotary_sin"][j]
            first, second = first * cos - second * sin, second * cos + first * sin
        guarded[0][entry + 1, row] = torch.cat([first, second, rest], -1)
        guarded[1][entry + 1, row] = new[1][b, i]
    torch.testing.assert_close(on_device[0].cpu(), guarded[0], rtol=1e-6, atol=1e-6 if rotary else 0)
    assert torch.equal(on_device[1].cpu(), guarded[1])


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("page_size", [4, 16, 128])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "cpu"])
def test_a_page_that_there_is_not_is_absent(
    backend: str, page_size: int, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device nobody can check the table: no key lies behind an entry outside the cache. What belongs to no
    sequence is NaN: memory around the cache, the nearest pages, and rows beyond the keys and before them."""
    monkeypatch.setattr(kvcache, "_check_values", lambda *arguments: None)
    target, generator, pages = TARGETS[backend], torch.Generator().manual_seed(0), 7
    most, least, capacity = 2**31 - 1, -(2**31), 4 * page_size
    table = [[2, -1, 4, 2**30], [least, most, 1, 5], [6, pages, 3, most], [-1, pages, -9, 8]]
    counts = [capacity - 1, capacity - 2, capacity - 1, capacity]
    pads = [1, 0, 2 * page_size + 1, 0] if padded else [0] * 4
    seen = [
        [row[j // page_size] * page_size + j % page_size for j in range(pad, n) if 0 <= row[j // page_size] < pages]
        for row, pad, n in zip(table, pads, counts, strict=True)
    ]
    q, sinks = torch.randn(4, 1, 2, 32, generator=generator).half(), torch.tensor([0.5, -1.0])
    whole = torch.full((2, pages + 2, page_size, 1, 32), float("nan")).half()
    rows = [x[1:-1].view(-1, 32) for x in whole]
    read = [row for own in seen for row in own]
    for x in rows:
        x[read] = torch.randn(len(read), 32, generator=generator).half()
    caches = [x.to(target.device)[1:-1] for x in whole]
    given = {"block_table": table, "cache_seqlens": counts} | ({"cache_leftpad": pads} if padded else {})
    options = {name: torch.tensor(x, dtype=torch.int32).to(target.device) for name, x in given.items()}
    with registry.use_backend(target.backend), poisoned_allocations():
        out, lse = diyfa.flash_attn_with_kvcache(
            q.to(target.device), *caches, **options, softmax_scale=0.2, sinks=sinks.to(target.device),
            return_softmax_lse=True,
        )  # fmt: skip
    for b, own in enumerate(seen):
        keys = [x[own][None, :, None].float() for x in rows]
        want, want_lse = diyfa.reference_attention(
            q[b : b + 1].float(), *keys, sm_scale=0.2, layout="bshd", sinks=sinks, return_lse=True
        )
        torch.testing.assert_close(out[b : b + 1].cpu().float(), want, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(lse[b : b + 1].cpu(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "cpu"])
def test_a_batch_entry_that_there_is_not_has_no_keys(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvcache, "_check_values", lambda *arguments: None)
    target = TARGETS[backend]
    k, q = torch.ones(2, 16, 1, 32).half().to(target.device), torch.ones(3, 1, 1, 32).half().to(target.device)
    entries = torch.tensor([1, -1, 2], dtype=torch.int32).to(target.device)
    with registry.use_backend(target.backend), poisoned_allocations():
        out, lse = diyfa.flash_attn_with_kvcache(
            q, k, k, cache_seqlens=9, cache_batch_idx=entries, return_softmax_lse=True
        )
    assert out.cpu()[:, 0, 0, 0].tolist() == [1.0, 0.0, 0.0] and lse.cpu().isposinf().flatten().tolist() == [0, 1, 1]


OFFSETS: dict[str, tuple[list[int], list[int]]] = {  # of queries, of keys
    "far before": ([0, 3, -(2**31)], [0, 6, -(2**31)]),
    "before": ([-7, 3, -1], [0, 6, -1]),
    "far beyond": ([0, 3, 2**31 - 1], [0, 6, 2**31 - 1]),
    "descending": ([3, 4, 0], [6, 8, 1]),
    "all far before": ([-(2**31)] * 3, [-(2**31)] * 3),
    "all far beyond": ([2**31 - 1] * 3, [2**31 - 1] * 3),
}


@pytest.mark.parametrize("name", OFFSETS)
@pytest.mark.parametrize("by", ["pages", "packed keys", "training"])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "cpu"])
def test_offsets_that_nobody_checked_reach_no_other_memory(
    backend: str, by: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device the host sees no offsets. Rows before and behind those of the tensors are not read, nor written."""
    monkeypatch.setattr(kvcache, "_check_packed_values", lambda *arguments: None)
    monkeypatch.setattr(validation, "check_offsets", lambda *arguments: None)
    target, generator = TARGETS[backend], torch.Generator().manual_seed(0)
    rows_q, rows_k, around = 4, 8, 4

    def guarded(rows: int, heads: int, beyond: float) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.full((rows + 2 * around, heads, 16), beyond)
        whole[around:-around] = torch.randn(rows, heads, 16, generator=generator)
        whole = whole.to(target.device)
        return whole, whole[around:-around]

    nan = float("nan")
    (_, q), (_, k), (_, v), (whole_out, out) = (
        guarded(rows, heads, beyond) for rows, heads, beyond in ((rows_q, H, nan), (rows_k, HK, nan), (rows_k, HK, nan),
                                                                 (rows_q, H, 7.0))
    )  # fmt: skip
    offsets = [torch.tensor(x, dtype=torch.int32, device=target.device) for x in OFFSETS[name]]
    options: dict[str, Any] = {}
    if by == "pages":
        k, v = (x.view(2, 4, HK, 16) for x in (k, v))
        options["block_table"] = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32, device=target.device)
    if by != "training":
        options["out"] = out
    if by == "packed keys":
        options["seqused_k"] = torch.tensor([5, 2**31 - 1], dtype=torch.int32, device=target.device)
    with registry.use_backend(target.backend), poisoned_allocations():
        got, lse = diyfa.flash_attention_varlen(q, k, v, *offsets, 3, 6, return_lse=True, **options)
    got, lse, whole_out = got.cpu(), lse.cpu(), whole_out.cpu()
    assert got.isfinite().all() and not lse.isnan().any()
    assert bool((whole_out[:around] == 7).all()) and bool((whole_out[-around:] == 7).all())


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "npu"])  # which refuses float8
def test_values_beyond_float8_become_its_largest(backend: str) -> None:
    target = TARGETS[backend]
    new = (
        torch.tensor([-1e4, -449.0, -448.0, 0.0, 448.0, 449.0, 1e4, 2.0]).repeat(2).to(torch.bfloat16).view(1, 1, 1, 16)
    )
    caches = [torch.zeros(1, 8, 1, 16).to(torch.float8_e4m3fn) for _ in "kv"]
    q, k, v, k_cache, v_cache = (x.to(target.device) for x in (new, new, -new, *caches))
    with registry.use_backend(target.backend):
        diyfa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=3, k_descale=0.5, v_descale=2.0)
    for cache, x, descale in ((k_cache, new, 0.5), (v_cache, -new, 2.0)):
        want = (x[0, 0, 0].float() / descale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        assert torch.equal(cache[0, 3, 0].cpu().float(), want)


# ---- The mode diyfa.batch_invariant -----------------------------------------------------------------------------

H, HK = 4, 2
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "features": {"window": (40, 0), "softcap": 3.0, "sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])},
    "alibi": {"causal": True, "alibi_slopes": torch.tensor([0.3, 0.1, 0.02, 0.5])},
}
WIDTHS = {"causal": (32, 48), "features": (40, 24), "alibi": (32, 32)}  # of keys and of values
DTYPES = {"causal": torch.bfloat16, "features": torch.float16, "alibi": torch.float32}
Sequences = list[tuple[torch.Tensor, ...]]


def _sequences(name: str) -> Sequences:
    generator = torch.Generator().manual_seed(1)
    d, dv = WIDTHS[name]
    return [
        tuple(torch.randn((n, *x), generator=generator).to(DTYPES[name]) for x in ((H, d), (HK, d), (HK, dv)))
        for n in (70, 1, 130, 65, 64)
    ]


def _as_trained(sequences: Sequences, options: dict[str, Any], device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """out (n, H, DV) and lse (H, n) of every sequence, from one training forward."""
    q, k, v = (torch.cat(x).to(device).requires_grad_() for x in zip(*sequences, strict=True))
    lens = [len(x) for x, *_ in sequences]
    offsets = torch.tensor([0, *accumulate(lens)], dtype=torch.int32).to(device)
    with torch.enable_grad():
        out, lse = diyfa.flash_attention_varlen(
            q, k, v, offsets, offsets, max(lens), max(lens), return_lse=True, **options
        )
    assert out.requires_grad
    out, lse = out.detach().cpu(), lse.detach().cpu()
    return list(zip(out.split(lens), lse.split(lens, 1), strict=True))


def _drawn_batch(
    rng: random.Random, sequences: Sequences, options: dict[str, Any], device: str, padding: int
) -> Iterator[tuple[int, int, Any, Any]]:
    """For each row of a batch of some sequences: which sequence, how many last queries, and their out and lse."""
    chosen = [rng.randrange(len(sequences)) for _ in range(rng.randint(1, 3))]
    lens = [len(sequences[s][0]) for s in chosen]
    new = rng.randint(1, min(*lens, 7))
    page_size = rng.choice((0, 0, 1, 3, 16, 48, 64, 128))
    pads = [0 if page_size else rng.randrange(padding + 1) for _ in chosen]
    columns = max(-(-n // page_size) for n in lens) if page_size else 0
    shape = (columns * len(chosen) + 1, page_size) if page_size else (len(chosen), max(lens) + padding)
    caches = [torch.full((*shape, *x.shape[1:]), float("nan"), dtype=x.dtype) for x in sequences[0][1:]]
    pages = rng.sample(range(shape[0]), columns * len(chosen)) if page_size else []
    table = torch.tensor(pages, dtype=torch.int32).reshape(len(chosen), columns)
    for b, s in enumerate(chosen):
        for cache, x in zip(caches, sequences[s][1:], strict=True):
            for j in range(lens[b]):
                cache[(int(table[b, j // page_size]), j % page_size) if page_size else (b, pads[b] + j)] = x[j]
    q = torch.stack([sequences[s][0][len(sequences[s][0]) - new :] for s in chosen])
    given = {"block_table": table} if page_size else {"cache_leftpad": torch.tensor(pads, dtype=torch.int32)}
    given["cache_seqlens"] = torch.tensor(lens, dtype=torch.int32) + torch.tensor(pads, dtype=torch.int32)
    out, lse = diyfa.flash_attn_with_kvcache(
        *(x.to(device) for x in (q, *caches)),
        num_splits=rng.randint(0, 4), return_softmax_lse=True, causal=options.get("causal", False),
        window_size=options.get("window", (-1, -1)), softcap=options.get("softcap", 0.0), sinks=options.get("sinks"),
        alibi_slopes=options.get("alibi_slopes"), **{key: x.to(device) for key, x in given.items()},
    )  # fmt: skip
    for b, s in enumerate(chosen):
        yield s, new, out[b].cpu(), lse[b].cpu()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("backend", "chunk_keys"), [(name, keys) for name in BACKENDS for keys in (0, 128)[: 1 + (name == "cuda")]]
)
def test_rows_do_not_depend_on_their_batch(
    backend: str, chunk_keys: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise: the batch, the number of new tokens, pages, splits; and equal to the training forward, packed or not.

    On CUDA one program has all chunks of a tile or each chunk its own, as the numbers of tiles and of splits say; and
    no row depends on left padding, of which other backends promise nothing."""
    target, rng = TARGETS[backend], random.Random(0)
    if chunk_keys:
        use_chunks_of(monkeypatch, chunk_keys, multiprocessors=5)
    options = {key: x.to(target.device) if isinstance(x, torch.Tensor) else x for key, x in OPTIONS[name].items()}
    with registry.use_backend(target.backend), diyfa.batch_invariant():
        sequences = _sequences(name)
        trained = _as_trained(sequences, options, target.device)
        alone = diyfa.flash_attention_v2(*(x[None].to(target.device) for x in sequences[2]), return_lse=True, **options)
        assert all(torch.equal(x[0].cpu(), y) for x, y in zip(alone, trained[2], strict=True))
        for _ in range(6 if target.interpreted else 50):
            for s, new, out, lse in _drawn_batch(rng, sequences, options, target.device, 20 * (backend == "cuda")):
                want, want_lse = trained[s]
                assert torch.equal(out, want[len(want) - new :])
                assert torch.equal(lse, want_lse[:, len(want) - new :])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mode_is_as_exact_and_may_be_differentiated(backend: str) -> None:
    """A training step in the mode: results in the error budget, gradients as outside."""
    target = TARGETS[backend]
    case = AttentionCase("invariant", seqlen_q=70, seqlen_k=90, heads=4, heads_kv=2, causal=True, sinks=True)
    with torch.enable_grad():
        with registry.use_backend(target.backend), diyfa.batch_invariant(), poisoned_allocations():
            results = testing.run_case(testing.attention_function(case), make_inputs(case, target.device))
        assert_within_budget(results, case, target.oracle_device)
