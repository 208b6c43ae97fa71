"""The surface of FlashAttention-3 and flash_attn_npu_v3: signatures, results, refusals, and the import statements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from eager_budget import DEVICE, assert_matches_reference, leaves, on_device, with_gradients
from subprocesses import run_after_torch
from test_flash_attn_interface import signature

import diyfa
from diyfa.integrations import flash_attn_3

_DESCALES = "q_descale=None, k_descale=None, v_descale=None"
_TAIL = "softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, softmax_scale=None, causal=False, qv=None, {_DESCALES}, window_size=(-1, -1), "
    f"attention_chunk=0, {_TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, softmax_scale=None, causal=False, {_DESCALES}, window_size=(-1, -1), "
    "attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
    f"seqused_k=None, softmax_scale=None, causal=False, qv=None, {_DESCALES}, window_size=(-1, -1), "
    f"attention_chunk=0, {_TAIL}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
    f"cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, {_DESCALES}, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, "
    "num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False",
}


@pytest.fixture(autouse=True)
def on_one_backend() -> Iterator[None]:
    with diyfa.use_backend(DEVICE):
        yield


def whole_numbers(*values: Any, device: str = DEVICE) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def offsets(*lens: int, device: str = DEVICE) -> torch.Tensor:
    return torch.tensor([0, *lens], device=device).cumsum(0).to(torch.int32)


def inputs_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    return [x.detach().to(DEVICE) for x in leaves(*shapes, dtype=dtype)]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    assert signature(getattr(flash_attn_3, name)) == SIGNATURES[name]


def test_dense_and_packed_projections() -> None:
    options = {"softmax_scale": 0.3, "causal": True, "window_size": (9, 0), "softcap": 5.0}
    meaning = {"sm_scale": 0.3, "window": (9, 0), "softcap": 5.0}
    inputs = leaves((2, 19, 4, 32), (2, 19, 2, 32), (2, 19, 2, 32))
    qkvpacked = flash_attn_3.flash_attn_qkvpacked_func
    for attend in (
        lambda q, k, v: flash_attn_3.flash_attn_func(q, k, v, **options),
        lambda q, k, v: qkvpacked(torch.cat((q, k, v), 2), num_heads_q=4, **options),
    ):
        assert_matches_reference(on_device(attend), inputs, "bshd", **meaning)
    stacked = on_device(lambda q, k, v: qkvpacked(torch.stack((q, k, v), 2), causal=True))
    assert_matches_reference(stacked, leaves(*[(2, 19, 4, 32)] * 3), "bshd", causal=True)


def test_packed_sequences() -> None:
    cu_q, cu_k = offsets(7, 0, 20), offsets(9, 4, 20)
    inputs = leaves((27, 4, 32), (33, 2, 32), (33, 2, 32))
    assert_matches_reference(
        on_device(lambda q, k, v: flash_attn_3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 20, 20, causal=True)),
        inputs, "thd", cu_seqlens_q=cu_q.cpu(), cu_seqlens_k=cu_k.cpu(), causal=True,
    )  # fmt: skip
    q, k, v = (x.detach().to(DEVICE) for x in inputs)
    used = whole_numbers(5, 4, 11)
    found = flash_attn_3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 20, 20, seqused_k=used, return_attn_probs=True)
    want = diyfa.flash_attention_varlen(q, k, v, cu_q, cu_k, 20, 20, seqused_k=used, return_lse=True)
    assert len(found) == 2 and all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


def test_tuples() -> None:
    """out alone, with the log-sum-exp, and over a cache with two more."""
    q, k, v = inputs_of(*[(2, 5, 2, 16)] * 3)
    out = flash_attn_3.flash_attn_func(q, k, v)
    pair = flash_attn_3.flash_attn_func(q, k, v, return_attn_probs=True)
    assert len(pair) == 2 and torch.equal(pair[0], out) and pair[1].shape == (2, 2, 5)
    over = flash_attn_3.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True)
    assert len(over) == 4 and over[1].shape == (2, 2, 5) and not over[2].numel() and not over[3].numel()
    assert torch.equal(flash_attn_3.flash_attn_with_kvcache(q, k, v), over[0])


def cache(pages: int = 6, page: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    k, v = (torch.randn(pages, page, 2, 32, generator=generator).half().to(DEVICE) for _ in range(2))
    return k, v


def test_appending_to_pages() -> None:
    table, lengths = whole_numbers([3, 1, 0], [5, 2, 4]), whole_numbers(4, 17)
    q, k, v = inputs_of((2, 2, 4, 32), (2, 2, 2, 32), (2, 2, 2, 32))
    first, second = cache(), cache()
    found = flash_attn_3.flash_attn_with_kvcache(
        q, *first, k, v, cache_seqlens=lengths, page_table=table, causal=True, window_size=(9, 0)
    )
    want = diyfa.flash_attn_with_kvcache(
        q, *second, k, v, cache_seqlens=lengths, block_table=table, causal=True, window_size=(9, 0)
    )
    assert torch.equal(found, want) and torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize("paged", [True, False])
def test_packed_queries_as_ascends_training_consistency_calls(paged: bool) -> None:
    """Packed queries over pages, one split: bitwise what training gives in the batch-invariant mode."""
    k, v = cache() if paged else cache(3, 24)
    table, used, cu_q = whole_numbers([3, 1, 0], [5, 2, 4]), whole_numbers(11, 24), offsets(3, 7)
    (q,) = inputs_of((10, 4, 32))
    where: dict[str, Any] = {"page_table": table}
    if not paged:
        where = {"cache_batch_idx": whole_numbers(2, 0)}
    found = flash_attn_3.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=used, cu_seqlens_q=cu_q, max_seqlen_q=torch.tensor(7), causal=True, window_size=[-1, -1],
        rotary_interleaved=False, num_splits=1, softcap=0.0, attention_chunk=0, sm_margin=0, return_softmax_lse=False,
        **where,
    )  # fmt: skip
    rows = [[3, 1, 0], [5, 2, 4]] if paged else [[2], [0]]
    keys, values = (torch.cat([x[rows[b]].flatten(0, 1)[: used[b]] for b in range(2)]) for x in (k, v))
    with diyfa.batch_invariant():
        trained = diyfa.flash_attention_varlen(q, keys, values, cu_q, offsets(11, 24), 7, 24, True)
    assert torch.equal(found, trained)


def float8(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.float8_e4m3fn).to(DEVICE)


def descales(batch: int, heads_kv: int) -> dict[str, torch.Tensor]:
    """Descales as engines pass them: (B, Hk), q's expanded from one number."""
    one = torch.full((1,), 0.5, device=DEVICE).expand(batch, heads_kv)
    k = torch.arange(1.0, 1 + batch * heads_kv, device=DEVICE).view(batch, heads_kv) / 4
    return {"q_descale": one, "k_descale": k, "v_descale": k.mT.contiguous().mT.flip(0)}


def numbers(x: torch.Tensor, descale: torch.Tensor) -> torch.Tensor:
    """The float64 numbers of x (B, S, H, D)."""
    return (x.double() * descale.double().repeat_interleave(x.shape[2] // descale.shape[1], 1)[:, None, :, None]).cpu()


def test_float8_with_descales() -> None:
    q, k, v, given = float8(2, 9, 4, 32), float8(2, 13, 2, 32, seed=1), float8(2, 13, 2, 32, seed=2), descales(2, 2)
    exact = [numbers(x, y) for x, y in zip((q, k, v), given.values(), strict=True)]
    want, want_lse = diyfa.reference_attention(*exact, causal=True, layout="bshd", return_lse=True)
    out, lse = flash_attn_3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **given)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.cpu().double(), want, rtol=0.1, atol=0.1)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-5, atol=1e-5)
    packed = flash_attn_3.flash_attn_qkvpacked_func(
        torch.cat((q, k[:, :9], v[:, :9]), 2), causal=True, num_heads_q=4, **given
    )
    assert torch.equal(packed, flash_attn_3.flash_attn_func(q, k[:, :9], v[:, :9], causal=True, **given))
    stacked = flash_attn_3.flash_attn_qkvpacked_func(torch.stack((k, k, v), 2), causal=True, **given)
    assert torch.equal(stacked, flash_attn_3.flash_attn_func(k, k, v, causal=True, **given))
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    varlen = flash_attn_3.flash_attn_varlen_func(*flat, offsets(9, 9), offsets(13, 13), 9, 13, causal=True, **given)
    torch.testing.assert_close(varlen.unflatten(0, (2, 9)), out)


def test_a_float8_cache_with_float8_queries() -> None:
    q, k, v, given = float8(2, 1, 4, 32), float8(2, 13, 2, 32, seed=1), float8(2, 13, 2, 32, seed=2), descales(2, 2)
    exact = [numbers(x, y) for x, y in zip((q, k, v), given.values(), strict=True)]
    lengths = whole_numbers(13, 7)
    want = [diyfa.reference_attention(*(x[b : b + 1, :n] for x in exact), layout="bshd") for b, n in enumerate((13, 7))]
    out = flash_attn_3.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **given)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.cpu().double(), torch.cat(want), rtol=0.02, atol=0.02)


X, CU = torch.zeros(1, 4, 2, 16), offsets(4, device="cpu")
FLOAT8 = X.to(torch.float8_e4m3fn)
dense, cached = flash_attn_3.flash_attn_func, flash_attn_3.flash_attn_with_kvcache
ABSENT: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "qv is not supported by diyfa": (dense, (X, X, X), {"qv": X}),
    "k_descale belong to q and k of float8": (dense, (X, X, X), {"k_descale": X}),
    "attention_chunk must be 0, got 4": (dense, (X, X, X), {"attention_chunk": 4}),
    "with num_heads_q, got": (flash_attn_3.flash_attn_qkvpacked_func, (X,), {}),
    "seqused_q is": (flash_attn_3.flash_attn_varlen_func, (X[0], X[0], X[0], CU, CU, 4, 4), {"seqused_q": CU[1:]}),
    "q_descale belongs to q of float8": (cached, (X, X, X), {"q_descale": X}),
    "q_descale cannot go with packed queries": (cached, (X[0], X, X), {"cu_seqlens_q": CU, "q_descale": X}),
    r"q_descale must have shape \(1, 2\) or \(1, 2, 1\), got \(1, 3\)": (
        cached, (FLOAT8, X, X), {"q_descale": torch.ones(1, 3)},
    ),
    "on the same device: q is on cpu, q_descale on meta": (
        cached, (FLOAT8, X, X), {"q_descale": torch.ones(1, 2, device="meta")},
    ),
    "k cannot go with packed": (cached, (X[0], X, X, X, X), {"cu_seqlens_q": CU}),
    "v cannot go with packed": (cached, (X[0], X, X), {"cu_seqlens_q": CU, "v": X}),
    "rotary_cos cannot go with packed": (cached, (X[0], X, X), {"cu_seqlens_q": CU, "rotary_cos": X[0, :, 0]}),
    "rotary_sin cannot go with packed": (cached, (X[0], X, X), {"cu_seqlens_q": CU, "rotary_sin": X[0, :, 0]}),
    "cache_batch_idx chooses rows of a contiguous cache": (
        cached, (X[0], X, X), {"cu_seqlens_q": CU, "page_table": CU[None, :1], "cache_batch_idx": CU[:1]},
    ),
    "the cache has 1 rows for a batch of 2": (cached, (X[0], X, X), {"cu_seqlens_q": torch.cat((CU, CU[1:]))}),
    "cache_seqlens must be from 0 to what the cache holds, 4; got 5": (
        cached, (X[0], X, X), {"cu_seqlens_q": CU, "cache_seqlens": 5},
    ),
    "scheduler_metadata must": (cached, (X, X, X), {"scheduler_metadata": X}),
    "cu_seqlens_k_new is not supported": (cached, (X, X, X), {"cu_seqlens_k_new": CU}),
}  # fmt: skip


@pytest.mark.parametrize("reason", ABSENT)
def test_absent_functions(reason: str) -> None:
    call, arguments, options = ABSENT[reason]
    with pytest.raises(ValueError, match=reason):
        call(*arguments, **options)
    with pytest.raises(TypeError, match="q_descale must be float32"):
        cached(FLOAT8, X, X, q_descale=torch.ones(1, 2).half())


IMPORTS = """
import importlib.metadata as metadata, importlib.util, sys
from diyfa.integrations import alias_flash_attn, alias_flash_attn_3, alias_flash_attn_npu_v3
handles = [alias_flash_attn(), alias_flash_attn_3(), alias_flash_attn_npu_v3()]
print([alias_flash_attn(), alias_flash_attn_3(), alias_flash_attn_npu_v3()] == handles)
import flash_attn, flash_attn_interface, flash_attn_3.flash_attn_interface
from flash_attn_npu_v3 import flash_attn_with_kvcache
from flash_attn_npu_v3.flash_attn_interface import flash_attn_func
from diyfa.integrations import flash_attn_3 as ours
print(flash_attn_interface.flash_attn_func is flash_attn_func is ours.flash_attn_func)
print(flash_attn_with_kvcache is ours.flash_attn_with_kvcache, flash_attn.flash_attn_func is ours.flash_attn_func)
print(flash_attn_interface.__version__, metadata.version("flash-attn-3"), metadata.version("flash-attn-npu"))
print(sorted(metadata.packages_distributions()["flash_attn_interface"]), metadata.version("flash-attn"))
try:
    from flash_attn_interface import flash_attn_combine
except ImportError as error:
    print("cannot import name 'flash_attn_combine'" in str(error))
for handle in handles[1:]:
    handle.remove()
print([name for name in sys.modules if name.startswith("flash_attn")] != [], "flash_attn_interface" in sys.modules)
print(importlib.util.find_spec("flash_attn_npu_v3"), importlib.util.find_spec("flash_attn") is not None)
"""


def test_imports() -> None:
    assert run_after_torch(IMPORTS).splitlines() == [
        "True", "True", "True False", "3.0.0 3.0.0 0.1.1", "['flash_attn_3'] 2.8.3", "True", "True False", "None True",
    ]  # fmt: skip


@pytest.mark.parametrize("packs", [False, True])
def test_queries_over_partly_used_rows(packs: bool) -> None:
    """cache_seqlens as one number, with softcap: the same with packing and without."""
    inputs = [x.detach() for x in leaves((2, 3, 2, 16), *[(2, 20, 2, 16)] * 2, dtype=torch.float32)]
    lengths: dict[str, Any] = {"cu_seqlens_q": whole_numbers(0, 3, 6), "max_seqlen_q": 3} if packs else {}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = q.flatten(0, 1) if packs else q
        return cached(q, k, v, cache_seqlens=11, causal=True, softcap=0.7, **lengths).view(2, 3, 2, 16)

    meaning = {"causal": True, "softcap": 0.7, "seq_lens": torch.tensor([11, 11])}
    assert_matches_reference(on_device(attend), inputs, "bshd", **meaning)


class Causal(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_3.flash_attn_func(q, k, v, causal=True, window_size=(9, 0))


def test_compiled_and_exported() -> None:
    inputs = leaves(*[(2, 19, 4, 32)] * 3)
    compiled = torch.compile(Causal(), backend="aot_eager", fullgraph=True)
    for got, want in zip(*(with_gradients(on_device(x), inputs) for x in (compiled, Causal())), strict=True):
        assert torch.equal(got, want)
    given = tuple(x.detach().to(DEVICE) for x in inputs)
    assert torch.equal(torch.export.export(Causal(), given).module()(*given), Causal()(*given))
