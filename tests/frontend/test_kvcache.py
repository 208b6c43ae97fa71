"""`flash_attn_with_kvcache` and packed queries over pages: signature, refusals before anything is written, operators,
torch.compile, plans, the mode `batch_invariant`. What they compute is in tests/numerics/test_kvcache_matrix.py."""

from __future__ import annotations

import ctypes
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from seen import Seen
from test_flash_attn_interface import CACHE, signature

import diyfa
from diyfa import kvcache_ops, registry
from diyfa import plan as planning
from diyfa.flash_attn_interface import _flash_attn_varlen_forward
from diyfa.problem import KVCacheProblem, KVCacheTensors, NewKeys
from diyfa.reference import reference_kvcache
from diyfa.validation import memory_span

B, SQ, H, HK, D = 2, 3, 4, 2, 16


@pytest.fixture(autouse=True)
def on_the_cpu_backend() -> Iterator[None]:
    with diyfa.use_backend("cpu"), torch.no_grad():
        yield


def call(rows: int = 40, **changes: Any) -> dict[str, Any]:
    """The arguments of a call that appends."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    given = {
        "q": random(B, SQ, H, D), "k_cache": random(B, rows, HK, D), "v_cache": random(B, rows, HK, D),
        "k": random(B, SQ, HK, D), "v": random(B, SQ, HK, D),
        "cache_seqlens": torch.tensor([5, 30], dtype=torch.int32), "causal": True, **changes,
    }  # fmt: skip
    return {name: x for name, x in given.items() if x is not ...}


def paged(**changes: Any) -> dict[str, Any]:
    """The same in pages of 8 rows."""
    given = call(k_cache=torch.randn(12, 8, HK, D), v_cache=torch.randn(12, 8, HK, D))
    given["block_table"] = torch.randperm(12)[: B * 5].view(B, 5).int()
    return {**given, **changes}


def packed(**changes: Any) -> dict[str, Any]:
    """Packed queries over pages."""
    return {
        "q": torch.randn(7, H, D), "k": torch.randn(12, 8, HK, D), "v": torch.randn(12, 8, HK, D),
        "cu_seqlens_q": torch.tensor([0, 2, 7], dtype=torch.int32), "cu_seqlens_k": None,
        "max_seqlen_q": 5, "max_seqlen_k": 33, "causal": True,
        "block_table": torch.arange(10, dtype=torch.int32).view(B, 5),
        "seqused_k": torch.tensor([9, 33], dtype=torch.int32), **changes,
    }  # fmt: skip


def test_the_signature_is_flash_attns() -> None:
    """Names, order and defaults of 2.8; then what diyfa adds, by keyword only."""
    parameters = inspect.signature(diyfa.flash_attn_with_kvcache).parameters.values()
    ours = "return_softmax_lse=False, sinks=None, k_descale=None, v_descale=None, out=None"
    assert signature(diyfa.flash_attn_with_kvcache) == f"{CACHE}, {ours}"
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == ["sinks", "k_descale", "v_descale", "out"]
    assert diyfa.flash_attn_interface.flash_attn_with_kvcache is diyfa.flash_attn_with_kvcache


# ---- Refusals ---------------------------------------------------------------------------------------------------

INT = torch.tensor([1, 2], dtype=torch.int32)
COS = torch.ones(40, 4)
FLOAT8 = torch.zeros(B, 40, HK, D).to(torch.float8_e4m3fn)
BOTH = torch.ones(B, 40, HK, D + 8)
FLAT = torch.ones(B * 40 * HK * (D + 4))
LATE = {  # values with half as many features, of which the first half lies in the last quarter of the keys
    "k_cache": FLAT[: B * 40 * HK * D].view(B, 40, HK, D), "v_cache": FLAT[B * 40 * HK * 12 :].view(B, 40, HK, 8),
    "v": torch.ones(B, SQ, HK, 8),
}  # fmt: skip
Refusal = tuple[dict[str, Any], type[Exception], str]
OF_CACHES: dict[str, Refusal] = {
    "q_rank": ({"q": torch.ones(B, H, D)}, ValueError, r"q must be \(batch, seqlen, heads, head_dim\)"),
    "q_type": ({"q": None}, TypeError, r"q must be a torch\.Tensor"),
    "cache_dtype": ({"k_cache": torch.ones(B, 40, HK, D).half()}, TypeError, r"k_cache and v_cache must both be"),
    "cache_dtypes": ({"k_cache": FLOAT8}, TypeError, r"k_cache and v_cache must both be"),
    "q_dtype": ({"q": torch.ones(B, SQ, H, D).int()}, TypeError, "Unsupported dtype"),
    "head_dims": ({"k_cache": torch.ones(B, 40, HK, 8)}, ValueError, "q and k_cache must have the same head_dim"),
    "cache_shapes": ({"v_cache": torch.ones(B, 41, HK, D)}, ValueError, "same shape but for the head_dim"),
    "heads": ({"q": torch.ones(B, SQ, 3, D)}, ValueError, "positive multiple of the key/value heads"),
    "cache_stride": ({"k_cache": torch.ones(B, 40, D, HK).mT}, ValueError, "last dimension of k_cache must have"),
    "small_cache": ({"k_cache": torch.ones(1, 40, HK, D), "v_cache": torch.ones(1, 40, HK, D)}, ValueError,
                    "1 rows for a batch of 2: name them by cache_batch_idx"),
    "k_alone": ({"v": None}, ValueError, "k comes without v"),
    "v_alone": ({"k": None}, ValueError, "v is appended beside k, which is None"),
    "k_without_lengths": ({"cache_seqlens": None}, ValueError, "cache_seqlens, which is None"),
    "k_shape": ({"k": torch.ones(B, SQ, HK, 8)}, ValueError, r"k must have shape \(2, 3, 2, 16\), got \(2, 3, 2, 8\)"),
    "k_dtype": ({"k": torch.ones(B, SQ, HK, D).half()}, TypeError, "k must be float32, got float16"),
    "cos_alone": ({"rotary_cos": COS}, ValueError, "belong together"),
    "cos_without_k": ({"k": None, "v": None, "rotary_cos": COS, "rotary_sin": COS}, ValueError, "but k is None"),
    "cos_rows": ({"rotary_cos": COS[:9], "rotary_sin": COS[:9]}, ValueError, "a row for each of the 40 keys"),
    "cos_wide": ({"rotary_cos": torch.ones(40, 9), "rotary_sin": torch.ones(40, 9)}, ValueError, "rotary_dim at most"),
    "sin_shape": ({"rotary_cos": COS, "rotary_sin": COS[:, :2]}, ValueError, "rotary_sin must have shape"),
    "lengths_dtype": ({"cache_seqlens": INT.long()}, TypeError, "cache_seqlens must be int32"),
    "lengths_shape": ({"cache_seqlens": INT[:1]}, ValueError, r"cache_seqlens must have shape \(2,\)"),
    "lengths_kind": ({"cache_seqlens": 2.5}, TypeError, "cache_seqlens must be an integer"),
    "splits_flag": ({"num_splits": True}, TypeError, "num_splits must be an integer, got True"),
    "descale_flag": ({"k_cache": FLOAT8, "v_cache": FLOAT8.clone(), "k_descale": True}, TypeError,
                     "k_descale must be a torch.Tensor, got bool"),
    "descale_nan": ({"k_cache": FLOAT8, "v_cache": FLOAT8.clone(), "k_descale": float("nan")}, ValueError,
                    "k_descale must be finite in float32, got nan"),
    "descale_huge": ({"k_cache": FLOAT8, "v_cache": FLOAT8.clone(), "v_descale": 10**400}, ValueError,
                     "v_descale must be finite in float32, got 1000"),
    "length_negative": ({"cache_seqlens": -1}, ValueError, "cache_seqlens must be from 0 to .* got -1"),
    "length_beyond": ({"cache_seqlens": 38}, ValueError, "the cache holds, 40; got 38 and 3 new keys"),
    "lengths_beyond": ({"cache_seqlens": torch.tensor([38, 0]).int()}, ValueError, "got 0 to 38 and 3 new keys"),
    "lengths_negative": ({"cache_seqlens": -INT}, ValueError, "cache_seqlens must be from 0"),
    "index_beyond": ({"cache_batch_idx": INT}, ValueError, "cache_batch_idx must be from 0 to 1; got 1 to 2$"),
    "leftpad_negative": ({"cache_leftpad": -INT}, ValueError, "cache_leftpad must be from 0"),
    "scale": ({"softmax_scale": float("inf")}, ValueError, "softmax_scale must be finite"),
    "window": ({"window_size": 3}, TypeError, "window_size must be a pair"),
    "causal": ({"causal": 1}, TypeError, "causal must be True or False"),
    "interleaved": ({"rotary_interleaved": 1}, TypeError, "rotary_interleaved must be True or False"),
    "lse": ({"return_softmax_lse": None}, TypeError, "return_softmax_lse must be True or False"),
    "splits": ({"num_splits": -1}, ValueError, "num_splits must not be negative"),
    "descale": ({"k_descale": 0.5}, ValueError, "k_descale belongs to a cache of torch.float8_e4m3fn"),
    "descale_shape": ({"k_cache": FLOAT8, "v_cache": FLOAT8.clone(), "v_descale": torch.ones(3)}, ValueError,
                      r"v_descale must have shape \(2, 2\)"),
    "out_shape": ({"out": torch.ones(B, SQ, H, 8)}, ValueError, "out must have shape"),
    "out_stride": ({"out": torch.ones(B, SQ, D, H).mT}, ValueError, "last dimension of out must have stride 1"),
    "out_expanded": ({"out": torch.ones(B, SQ, 1, D).expand(-1, -1, H, -1)}, ValueError, "out must not be expanded"),
    "cache_expanded": ({"k_cache": torch.ones(1, 40, HK, D).expand(B, -1, -1, -1)}, ValueError,
                       "k_cache must not be expanded"),
    "values_expanded": ({"v_cache": torch.ones(B, 40, 1, D).expand(-1, -1, HK, -1)}, ValueError,
                        "v_cache must not be expanded"),
    "caches_overlap": ({"k_cache": BOTH[..., :D], "v_cache": BOTH[..., 8:]}, ValueError, "v_cache must not overlap"),
    "caches_overlap_at_the_end": (LATE, ValueError, "v_cache must not overlap"),
    "cos_queries": ({"q": torch.ones(B, SQ + 2, H, D), "rotary_cos": COS, "rotary_sin": COS}, ValueError,
                    "for each of the 40 keys that there can be, and 2 for queries beyond them, got 40"),
}  # fmt: skip
TABLE = torch.arange(10, dtype=torch.int32).view(B, 5)
NEW_KEYS = {  # the window hides those in the first page
    "q": torch.ones(B, 1, H, D), "k": torch.ones(B, 9, HK, D), "v": torch.ones(B, 9, HK, D), "cache_seqlens": 5,
    "window_size": (0, 0),
}  # fmt: skip
# int32 does not hold the first key that such a window shows.
MANY_QUERIES = {"q": torch.ones(B, 40, H, D), "k": None, "v": None, "cache_seqlens": 1, "window_size": (2**31 - 1, -1)}
OF_PAGES: dict[str, Refusal] = {
    "table_shape": ({"block_table": TABLE[:1]}, ValueError, r"block_table must have shape \(2, 5\)"),
    "table_dtype": ({"block_table": TABLE.long()}, TypeError, "block_table must be int32"),
    "table_beyond": ({"block_table": TABLE + 3}, ValueError, "pages from 0 to 11 .* got 12 in column 4 of row 1"),
    "table_negative": ({"block_table": TABLE - 1}, ValueError, "got -1 in column 0 of row 0"),
    "table_negative_window": ({"block_table": TABLE - 1, "window_size": (2**40, 0)}, ValueError, "got -1 in column 0"),
    "table_negative_new_keys": ({"block_table": TABLE - 1, **NEW_KEYS}, ValueError, "got -1 in column 0"),
    "table_negative_few_keys": ({"block_table": TABLE - 1, **MANY_QUERIES}, ValueError, "got -1 in column 0"),
    "table_and_index": ({"cache_batch_idx": INT}, ValueError, "pages are chosen by block_table"),
    "beyond_the_table": ({"cache_seqlens": 39}, ValueError, "to what block_table holds, 40; got 39"),
}
KEYS = {"k": torch.ones(9, HK, D), "v": torch.ones(9, HK, D), "cu_seqlens_k": torch.tensor([0, 4, 9]).int()}
OF_PACKED: dict[str, Refusal] = {
    "rank": ({"k": torch.ones(9, HK, D)}, ValueError, r"k \(pages, page size, heads, head_dim\)"),
    "dropout": ({"dropout_p": 0.1}, ValueError, "dropout_p belongs to training"),
    "dropout_kind": ({"dropout_p": INT}, TypeError, "dropout_p must be a number, got Tensor"),
    "dropout_none": ({"dropout_p": None}, TypeError, "dropout_p must be a number, got NoneType"),
    "no_lengths": ({"seqused_k": None}, ValueError, "cu_seqlens_k may be None only where"),
    "no_table": ({"block_table": None, "k": torch.ones(9, HK, D), "v": torch.ones(9, HK, D)}, ValueError,
                 "cu_seqlens_k may be None only where"),
    "seqused_shape": ({"seqused_k": INT[:1]}, ValueError, r"seqused_k must have shape \(2,\)"),
    "seqused_beyond": (
        {"block_table": None, **KEYS, "seqused_k": 5 * INT},
        ValueError, r"seqused_k must be at most the rows of each sequence, \[4, 5\], got \[5, 10\]",
    ),
    "max_k": ({"max_seqlen_k": 20}, ValueError, "must be from 0 to max_seqlen_k=20"),
    "max_q": ({"max_seqlen_q": 4}, ValueError, "beyond max_seqlen_q=4"),
    "table_beyond": ({"block_table": TABLE + 3}, ValueError, "pages from 0 to 11"),
    "out": ({"out": torch.ones(7, H, 8)}, ValueError, r"out must have shape \(7, 4, 16\)"),
    "max_q_kind": ({"max_seqlen_q": True}, TypeError, "max_seqlen_q must be an integer, got True"),
    "variant": ({"variant": "v2"}, ValueError, "no kvcache_fwd kernel called 'v2'"),
}  # fmt: skip


def _refused(function: Callable[..., Any], given: dict[str, Any], error: type[Exception], pattern: str) -> None:
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    before = {name: x.detach().float().clone() for name, x in tensors.items()}
    with torch.enable_grad(), pytest.raises(error, match=pattern):
        function(**given)
    for name, x in tensors.items():
        assert torch.equal(x.detach().float(), before[name]), f"{name} was written"


def attend_seen(**given: Any) -> Any:
    with Seen():
        return diyfa.flash_attn_with_kvcache(**given)


@pytest.mark.parametrize(("make", "refusal"), [
    pytest.param(make, refusal, id=f"{make.__name__}-{name}")
    for make, some in ((call, OF_CACHES), (paged, OF_PAGES), (packed, OF_PACKED)) for name, refusal in some.items()
])  # fmt: skip
def test_refusals_write_nothing(make: Callable[..., dict[str, Any]], refusal: Refusal) -> None:
    changes, error, pattern = refusal
    function = diyfa.flash_attention_varlen if make is packed else diyfa.flash_attn_with_kvcache
    _refused(function, make(**changes), error, pattern)


def change_kernels(monkeypatch: pytest.MonkeyPatch, op: str, change: Callable[[Any], Any]) -> None:
    """Let the CPU backend have other kernels of the operations whose names begin with `op`."""
    backend = registry.load_backend("cpu")
    kernels = tuple(change(k) if k.op.startswith(op) else k for k in backend.kernels)
    monkeypatch.setitem(registry._loaded, "cpu", type("Stub", (type(backend),), {"kernels": kernels})())
    monkeypatch.setattr(planning, "plans", {})


def test_a_kernel_that_refuses_does_not_change_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is refused before anything is appended."""
    change_kernels(monkeypatch, "kvcache_fwd", lambda k: replace(k, unsupported=lambda problem: "not today"))
    _refused(diyfa.flash_attn_with_kvcache, call(), ValueError, "not today")
    _refused(attend_seen, call(), ValueError, "not today")


def test_values_in_a_latent_cache_come_with_the_keys() -> None:
    given = call()
    given["v_cache"] = given["k_cache"][..., :8]
    given["v"] = torch.ones(B, SQ, HK, 8)
    _refused(diyfa.flash_attn_with_kvcache, given, ValueError, "v must be None where v_cache is a view of k_cache")


def test_caches_in_one_buffer_and_expanded_ones_that_are_only_read() -> None:
    both = torch.randn(B, 40, HK, 2 * D)
    apart, side_by_side = call(), call(k_cache=both[..., :D], v_cache=both[..., D:])
    apart |= {"k_cache": both[..., :D].clone(), "v_cache": both[..., D:].clone()}
    assert torch.equal(*(diyfa.flash_attn_with_kvcache(**x) for x in (apart, side_by_side)))
    one = both[:1, ..., :D].expand(B, -1, -1, -1)
    read = call(k=None, v=None, k_cache=one, v_cache=one.clone())
    assert diyfa.flash_attn_with_kvcache(**read).isfinite().all()


# ---- Operators, torch.compile, plans ----------------------------------------------------------------------------


def test_operators() -> None:
    given = call()
    tensors = KVCacheTensors(given["q"], given["k_cache"], given["v_cache"], 0.25, seqlens=given["cache_seqlens"])
    options = kvcache_ops.KVCacheOptions("bshd", window_right=0)
    flat = kvcache_ops._pack(tensors, options)
    torch.library.opcheck(torch.ops.diyfa.kvcache_fwd.default, flat)
    torch.library.opcheck(torch.ops.diyfa.kvcache_fwd_out.default, (torch.empty_like(given["q"]), *flat))
    flat = kvcache_ops._pack(tensors, options, NewKeys(given["k"], given["v"], COS, COS))
    for out in (None, torch.empty_like(given["q"])):
        torch.library.opcheck(torch.ops.diyfa.kvcache_append.default, (out, *flat))


def test_the_operator_refuses_keys_without_values() -> None:
    """A traced call cannot see whether the values lie in the keys."""

    def append(**given: Any) -> None:
        options = kvcache_ops.KVCacheOptions("bshd", window_right=0)
        tensors = KVCacheTensors(given["q"], given["k_cache"], given["v_cache"], 0.25, seqlens=given["cache_seqlens"])
        torch.ops.diyfa.kvcache_append(None, *kvcache_ops._pack(tensors, options, NewKeys(given["k"], None)))

    _refused(append, call(), ValueError, "k comes without v")


def _step(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = diyfa.flash_attn_with_kvcache(return_softmax_lse=True, **given)
    return out * 2, lse


def _latent(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return _step({**given, "v_cache": given["k_cache"][..., :8], "v": None})


def _gives_out(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(given["q"])
    with diyfa.batch_invariant():
        _, lse = _step({**given, "out": out})
    return out, lse


def _packed(given: dict[str, Any]) -> torch.Tensor:
    return diyfa.flash_attention_varlen(**given)


COMPILED: dict[str, tuple[Callable[..., Any], Callable[[int], dict[str, Any]]]] = {
    "append": (_step, lambda n: call(n, rotary_cos=torch.ones(n, 4), rotary_sin=torch.ones(n, 4))),
    "latent": (_latent, call),
    "out": (_gives_out, call),
    "pages": (_step, lambda n: paged()),
    "packed": (_packed, lambda n: packed(max_seqlen_k=n)),
}


# Each takes seconds; the others have what they have, too. The second number of rows is compiled for any number anyway.
MORE_COMPILED = [
    pytest.param(name, dynamic, marks=pytest.mark.slow)
    for name, dynamic in (("latent", None), ("out", None), ("append", True), ("packed", True))
]


@pytest.mark.parametrize(("name", "dynamic"), [*((n, None) for n in ("append", "pages", "packed")), *MORE_COMPILED])
def test_compile(name: str, dynamic: bool | None) -> None:
    torch.compiler.reset()
    function, make = COMPILED[name]
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (40, 48):
        given = make(rows)
        other = {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in given.items()}
        torch.testing.assert_close(compiled(other), function(given))
        for key, x in given.items():
            assert not isinstance(x, torch.Tensor) or torch.equal(x, other[key]), f"{key} differs"


def test_a_compiled_call_follows_the_mode() -> None:
    torch.compiler.reset()
    compiled = torch.compile(_step, fullgraph=True, backend="aot_eager")
    given = call(k=None, v=None)
    for _ in range(2):
        assert torch.equal(compiled(given)[0], _step(given)[0])
        with diyfa.batch_invariant():
            assert torch.equal(compiled(given)[0], _step(given)[0])


def test_nothing_is_read_from_a_device() -> None:
    """Meta tensors have no values: reading a length, a table or an index would raise."""
    given = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in paged(num_splits=2).items()}
    given["cache_leftpad"] = INT.to("meta")
    out, lse = diyfa.flash_attn_with_kvcache(return_softmax_lse=True, **given)
    assert (out.shape, lse.shape, out.device.type) == ((B, SQ, H, D), (B, H, SQ), "meta")
    given = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in packed().items()}
    assert diyfa.flash_attention_varlen(**given).shape == (7, H, D)


def _with_addresses(tensors: Any, addresses: list[int]) -> Any:
    """The named tuple with tensors of the same sizes and strides at these addresses, in the order of the fields."""
    changes, remaining = {}, iter(addresses)
    for name, x in tensors._asdict().items():
        if isinstance(x, torch.Tensor):
            memory = (ctypes.c_char * (memory_span(x) * x.element_size())).from_address(next(remaining))
            changes[name] = torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, x.stride())
    return tensors._replace(**changes)


def _recording(monkeypatch: pytest.MonkeyPatch, seen: list[Any], refusals: list[str] | None = None) -> None:
    """The CPU backend, whose kernels say how they are called, and offer to be repeated: not while `refusals` has
    their operation."""

    def recorded(kernel: Any) -> Any:
        def launch(problem: KVCacheProblem, *rest: Any) -> None:
            seen.append((kernel.op, "launched"))
            kernel.launch(problem, *rest)

        def repeat(problem: KVCacheProblem, tensors: KVCacheTensors, *results: Any) -> Any:
            appends = kernel.op == "kvcache_append"

            def again(numbers: list[int], given: Any = None, returns_lse: bool = True) -> Any:
                *addresses, length = numbers
                if refusals and kernel.op in refusals:
                    refusals.remove(kernel.op)
                    return None
                seen.append((kernel.op, "repeated", length))
                same = _with_addresses(tensors, addresses)._replace(length=length)
                if appends:
                    kernel.launch(problem, same, _with_addresses(results[0], addresses[len(tensors.present()) :]))
                    return True
                out, lse = torch.empty_like(results[0]) if given is None else given, torch.empty_like(results[1])
                kernel.launch(problem, same, out, lse)
                return out, lse

            return again

        return replace(kernel, launch=launch, repeat=repeat)

    change_kernels(monkeypatch, "kvcache", recorded)


@pytest.mark.parametrize("wanting", ["q", "k_cache", "k"])
def test_a_repeated_call_has_a_grad_fn_too(monkeypatch: pytest.MonkeyPatch, wanting: str) -> None:
    """A call that differs in whether a gradient is wanted has another plan."""
    seen: list[Any] = []
    _recording(monkeypatch, seen)
    for _ in range(6):
        for wants_grad in (False, True):
            given = call(v=torch.randn(B, SQ, HK, D))
            want = reference_kvcache(return_softmax_lse=True, **given)
            given[wanting].requires_grad_(wants_grad)
            with torch.enable_grad():
                got = diyfa.flash_attn_with_kvcache(return_softmax_lse=True, **given)
            for x, y in zip(got, want, strict=True):
                assert (x.grad_fn is not None) == wants_grad
                torch.testing.assert_close(x.detach(), y)
            assert given["k_cache"].is_leaf and given["v_cache"].is_leaf
    assert [x[1] for x in seen[-4:]] == ["repeated"] * 4
    assert len(planning.plans) == 2


@pytest.mark.parametrize("refusing", [(), ("kvcache_fwd",), ("kvcache_append",), ("kvcache_append", "kvcache_fwd")])
@pytest.mark.parametrize("latent", [False, True], ids=["", "latent"])
@pytest.mark.parametrize("passes_out", [False, True], ids=["", "out"])
def test_a_recent_call_that_appends_is_repeated_or_run_anew(
    monkeypatch: pytest.MonkeyPatch, passes_out: bool, latent: bool, refusing: tuple[str, ...]
) -> None:
    """What was appended already, where the attention is not repeated, is appended once more."""
    seen: list[Any] = []
    refusals: list[str] = []
    _recording(monkeypatch, seen, refusals)
    for step in range(6):
        given = call(k=torch.randn(B, SQ, HK, D), v=None if latent else torch.randn(B, SQ, HK, D))
        if latent:
            given["v_cache"] = given["k_cache"][..., : D // 2]
        given["cache_seqlens"] = torch.tensor([step, 30], dtype=torch.int32)
        want = reference_kvcache(return_softmax_lse=True, **given)
        want_cache = given["k_cache"].clone()
        for b, length in enumerate((step, 30)):
            want_cache[b, length : length + SQ] = given["k"][b]
        if passes_out:
            given["out"] = torch.zeros_like(want[0])
        refusals[:] = refusing if step == 4 else ()
        seen.clear()
        got = diyfa.flash_attn_with_kvcache(return_softmax_lse=True, **given)
        torch.testing.assert_close(got, want)
        assert not passes_out or got[0] is given["out"]
        assert torch.equal(given["k_cache"], want_cache)
        if step >= 2 and not (refusing and step == 4):
            assert [x[:2] for x in seen] == [("kvcache_append", "repeated"), ("kvcache_fwd", "repeated")]
    before = given["k_cache"].clone()
    with pytest.raises(ValueError, match="cache_seqlens"):
        diyfa.flash_attn_with_kvcache(**{**given, "cache_seqlens": torch.tensor([5, 40], dtype=torch.int32)})
    assert torch.equal(given["k_cache"], before)


def test_parameters_get_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks are mostly parameters of a module."""
    monkeypatch.setattr(planning, "plans", {})
    given = call(sinks=torch.nn.Parameter(torch.rand(H)))
    for _ in range(2):
        diyfa.flash_attn_with_kvcache(**given)
    assert len(planning.plans) == 1


def test_lengths_that_grow_make_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "plans", {})
    for longest in range(33, 65):
        diyfa.flash_attention_varlen(**packed(max_seqlen_k=longest))
    assert len(planning.plans) == 1


def test_windows_of_more_queries_than_keys() -> None:
    """A bound beyond every key still hides some from the first queries, as in `flash_attn_func`."""
    given = {name: x[:, :2] for name, x in call().items() if name in ("k_cache", "v_cache")}
    q, (k, v) = torch.randn(B, 6, H, D), given.values()
    want = diyfa.reference_attention(q, k, v, window=(-1, 3), layout="bshd")
    got = [diyfa.flash_attn_with_kvcache(q, k, v, window_size=(-1, 3))]
    cu_q, cu_k = (torch.arange(3, dtype=torch.int32) * n for n in (6, 2))
    table, pages = torch.arange(B, dtype=torch.int32)[:, None], {"k": k, "v": v}
    given = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 6, "max_seqlen_k": 2, "window": (-1, 3)}
    got.append(diyfa.flash_attention_varlen(q.flatten(0, 1), **pages, **given, block_table=table).view_as(q))
    for result in got:
        torch.testing.assert_close(result, want)


@pytest.mark.parametrize("left", [40, 2**31 - 1, 2**31, 2**40])
def test_windows_beyond_every_key(left: int) -> None:
    """The host checks a table on the CPU for any of them."""
    given = paged(k=None, v=None)
    assert torch.equal(
        diyfa.flash_attn_with_kvcache(**given, window_size=(left, -1)), diyfa.flash_attn_with_kvcache(**given)
    )


# ---- What else it says ------------------------------------------------------------------------------------------


def test_lengths_of_other_types() -> None:
    """A full cache, an int and a tensor say the same."""
    given = call(k=..., v=..., cache_seqlens=40)
    want = diyfa.flash_attn_with_kvcache(**given)
    for lengths in (None, torch.full((B,), 40, dtype=torch.int32), torch.full((2 * B,), 40, dtype=torch.int32)[::2]):
        assert torch.equal(diyfa.flash_attn_with_kvcache(**{**given, "cache_seqlens": lengths}), want)


def test_descales_of_other_types() -> None:
    given = call(k=..., v=..., k_cache=torch.randn(B, 40, HK, D).to(torch.float8_e4m3fn))
    given["v_cache"] = given["k_cache"].clone()
    want = diyfa.flash_attn_with_kvcache(**given, k_descale=0.5, v_descale=2)
    for shape in ((), (1,), (1, 1), (B, HK)):
        descales = {"k_descale": torch.full(shape, 0.5), "v_descale": torch.full(shape, 2.0)}
        assert torch.equal(diyfa.flash_attn_with_kvcache(**given, **descales), want)


@pytest.mark.parametrize("sinks", [False, True])
def test_nothing_to_see(sinks: bool) -> None:
    """Caches without rows or pages, batches without sequences: shapes stay, lse is +inf or the sink."""
    extra = {"sinks": torch.arange(4.0)} if sinks else {}
    given = call(0, k=..., v=..., cache_seqlens=0)
    out, lse = diyfa.flash_attn_with_kvcache(return_softmax_lse=True, **given, **extra)
    assert out.shape == (B, SQ, H, D) and not out.any()
    assert torch.equal(
        lse, torch.arange(4.0)[:, None].expand(B, H, SQ) if sinks else torch.full_like(lse, float("inf"))
    )
    empty = {name: x[:0] if isinstance(x, torch.Tensor) and name != "sinks" else x for name, x in call().items()}
    assert diyfa.flash_attn_with_kvcache(**empty, **extra).shape == (0, SQ, H, D)
    none = packed(block_table=TABLE[:, :0], seqused_k=INT * 0, out=torch.full((7, H, D), float("nan")), **extra)
    assert not diyfa.flash_attention_varlen(**none).any()


def test_the_private_varlen_forward_takes_pages_and_a_number_of_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM-like callers use it, no autograd. The number reaches the kernel over pages, and is part of what a call is
    found by; any value gives the result."""
    seen: list[int] = []

    def recorded(kernel: Any) -> Any:
        def launch(problem: KVCacheProblem, *rest: Any) -> None:
            seen.append(problem.num_splits)
            kernel.launch(problem, *rest)

        return replace(kernel, launch=launch)

    change_kernels(monkeypatch, "kvcache_fwd", recorded)
    given = packed()
    want, want_lse = diyfa.flash_attention_varlen(**given, return_lse=True)
    keys = torch.randn(33, HK, D)
    positional = given["cu_seqlens_q"], torch.tensor([0, 10, 33], dtype=torch.int32), 5, 33, 0.0, 0.25, True
    pages = {"block_table": given["block_table"], "seqused_k": given["seqused_k"]}
    plain = _flash_attn_varlen_forward(given["q"], keys, keys, *positional)[0]
    for splits in (3, 3, 0, 1, 3):
        found = _flash_attn_varlen_forward(given["q"], given["k"], given["v"], *positional, **pages, num_splits=splits)
        torch.testing.assert_close(found[:2], (want, want_lse))
        assert found[2].numel() == 0
        assert torch.equal(_flash_attn_varlen_forward(given["q"], keys, keys, *positional, num_splits=splits)[0], plain)
    assert seen == [0, 3, 3, 0, 1, 3]
    for wrong, error in ((-1, ValueError), (True, TypeError), (1.0, TypeError)):
        with pytest.raises(error, match="num_splits must"):
            _flash_attn_varlen_forward(given["q"], keys, keys, *positional, num_splits=wrong)


def test_packed_keys_of_another_length_get_another_plan() -> None:
    """Packed keys are clamped to max_seqlen_k itself: lengths of one power of two differ."""
    given = packed(block_table=None, seqused_k=None, window=(18, -1), causal=False)
    given |= {"k": torch.randn(40, HK, D), "v": torch.randn(40, HK, D), "out": torch.empty(7, H, D)}
    for first, longest in ((20, 20), (20, 20), (31, 31)):
        given |= {"cu_seqlens_k": torch.tensor([0, first, 40]).int(), "max_seqlen_k": longest}
        got = diyfa.flash_attention_varlen(**given).clone()
        plain = {**given, "out": None}
        torch.testing.assert_close(got, diyfa.flash_attention_varlen(**plain))


def test_an_out_in_memory_that_is_read_is_refused() -> None:
    """Before anything is appended, also by a call that comes again; what lies beside it, or is q itself, is none."""
    buffer = torch.randn(B, SQ + 1, 2 * H, D)
    free = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in call().items()}
    dense = torch.randn(B * SQ * H * D + 8)
    views = {
        "later": (buffer[:, :-1, :H], buffer[:, 1:, :H], True),
        "heads": (buffer[:, 1:, :H], buffer[:, 1:, 1 : H + 1], True),
        "beside": (buffer[:, :-1, :H], buffer[:, :-1, H:], False),
        "other rows": (buffer[:, :-1, :H], buffer[:, 1:, H:], False),
        "shifted": (dense[8:].view(B, SQ, H, D), dense[:-8].view(B, SQ, H, D), True),
        "itself": (buffer[:, 1:, :H], buffer[:, 1:, :H], False),
    }
    for q, out, shared in views.values():
        for _ in range(3):
            given = call(q=q)
            if not shared:
                want = reference_kvcache(**{**given, "q": q.clone()})
                torch.testing.assert_close(diyfa.flash_attn_with_kvcache(**given, out=out), want)
                continue
            _refused(
                diyfa.flash_attn_with_kvcache, {**given, "out": out}, ValueError, "out must not share memory with q"
            )
    for name in ("k_cache", "v_cache"):
        inside = free[name].flatten()[: B * SQ * H * D].view(B, SQ, H, D)
        _refused(diyfa.flash_attn_with_kvcache, {**free, "out": inside}, ValueError, f"share memory with {name}")


def test_a_refused_traced_call_appends_nothing() -> None:
    """As under torch.compile, appending is an operator of its own then, and comes first."""
    given = call(rotary_cos=torch.ones(40, 4), rotary_sin=torch.ones(40, 4))
    inside = given["v_cache"].flatten()[: B * SQ * H * D].view(B, SQ, H, D)
    _refused(attend_seen, {**given, "out": inside}, ValueError, "out must not share memory with v_cache")
    without = dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin"))
    _refused(attend_seen, {**given, **without, "out": inside}, ValueError, "out must not share memory with v_cache")
    shifted = torch.randn(B, SQ + 1, H, D)
    given |= {"q": shifted[:, 1:], "out": shifted[:, :-1]}
    _refused(attend_seen, given, ValueError, "out must not share memory with q")


def test_out_beside_wider_queries_in_one_buffer() -> None:
    """The features of q and of out, which has fewer, one after another: the distance is within q, not within both."""
    both, cache = torch.randn(B, SQ, H, D + D // 2), torch.randn(B, 40, HK, D)
    given = {"k_cache": cache, "v_cache": cache[..., : D // 2], "cache_seqlens": 40}
    out, q = both[..., : D // 2], both[..., D // 2 :]
    want = reference_kvcache(q=q.clone(), **given)
    torch.testing.assert_close(diyfa.flash_attn_with_kvcache(q, **given, out=out), want)
    out, q = both[..., D - 1 : D + D // 2 - 1], both[..., :D]
    _refused(diyfa.flash_attn_with_kvcache, {"q": q, **given, "out": out}, ValueError, "share memory with q")


def test_out_whose_dimensions_of_size_1_have_other_strides() -> None:
    """Such a stride means nothing: one is q itself, the other begins a row later."""
    buffer = torch.randn(1, 9, 3, H, D)
    q, later = buffer[:, 2:5, 0], buffer[0, 3:6, 0][None]
    given = {"k_cache": torch.randn(1, 40, HK, D), "v_cache": torch.randn(1, 40, HK, D), "cache_seqlens": 30}
    assert q.stride() != later.stride()
    _refused(diyfa.flash_attn_with_kvcache, {"q": q, **given, "out": later}, ValueError, "share memory with q")
    want = reference_kvcache(q=q.clone(), **given)
    torch.testing.assert_close(diyfa.flash_attn_with_kvcache(q, **given, out=q[0][None]), want)


def test_out_is_not_packed_queries() -> None:
    given = packed()
    for _ in range(3):
        diyfa.flash_attention_varlen(**given, out=torch.empty(7, H, D))
    before = given["q"].clone()
    with pytest.raises(ValueError, match="out must not share memory with q: it is cleared"):
        diyfa.flash_attention_varlen(**given, out=given["q"])
    assert torch.equal(given["q"], before)


# ---- The mode ---------------------------------------------------------------------------------------------------


def test_the_mode_belongs_to_its_thread_and_nests() -> None:
    seen = []
    with diyfa.batch_invariant(), diyfa.batch_invariant():
        thread = threading.Thread(target=lambda: seen.append(registry.is_batch_invariant()))
        thread.start()
        thread.join()
        seen.append(registry.is_batch_invariant())
    assert seen == [False, True] and not registry.is_batch_invariant()


def test_the_mode_chooses_its_kernel() -> None:
    x = torch.randn(1, 2, 9, 16)
    with diyfa.batch_invariant():
        assert diyfa.explain(x, x, x).kernel == "split_kv"
        with pytest.raises(ValueError, match="split_kv runs a forward pass"):
            diyfa.flash_attention(x, x, x, variant="v2")
    with pytest.raises(ValueError, match=r"inside diyfa\.batch_invariant\(\) only"):
        diyfa.flash_attention(x, x, x, variant="split_kv")
    assert diyfa.explain(x, x, x).kernel == "v2"


@pytest.mark.parametrize("extra", [
    {"attn_bias": torch.zeros(9, 9)}, {"dropout_p": 0.5}, {"seq_lens": torch.tensor([9], dtype=torch.int32)},
])  # fmt: skip
def test_the_mode_refuses_options_without_a_cache_equivalent(extra: dict[str, Any]) -> None:
    x = torch.randn(1, 2, 9, 16)
    with diyfa.batch_invariant(), pytest.raises(ValueError, match=f"takes no {next(iter(extra))}"):
        diyfa.flash_attention(x, x, x, **extra)


# ---- torch.autocast ---------------------------------------------------------------------------------------------


def _as(given: dict[str, Any], dtype: torch.dtype, *names: str) -> dict[str, Any]:
    """The call with these tensors in another dtype."""
    return {name: x.to(dtype) if name in names else x for name, x in given.items()}


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("given_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float32, FLOAT8.dtype])
def test_autocast_casts_to_the_dtype_of_the_cache(
    cache_dtype: torch.dtype, given_dtype: torch.dtype, times: int
) -> None:
    """q and new keys; beside a float8 cache to what autocast says. Calls of outside decide nothing inside."""
    caches, new = ("k_cache", "v_cache"), ("q", "k", "v")
    for make in (call, paged):
        base = _as(make(), cache_dtype, *caches)
        outside = _as(base, given_dtype, *new)
        for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
            if cache_dtype in (given_dtype, FLOAT8.dtype):
                for _ in range(3):  # has a plan
                    assert diyfa.flash_attn_with_kvcache(**_copied(outside)).dtype == given_dtype
            target = dtype if cache_dtype == FLOAT8.dtype else cache_dtype
            want, got = _copied(_as(outside, target, *new)), _copied(outside)
            expected = diyfa.flash_attn_with_kvcache(**want)
            for _ in range(times):
                got = _copied(outside)
                with torch.autocast("cpu", dtype):
                    result = diyfa.flash_attn_with_kvcache(**got)
                assert result.dtype == target and torch.equal(result, expected)
                for name in caches:
                    assert torch.equal(got[name].float(), want[name].float())


def _copied(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def test_autocast_of_packed_queries() -> None:
    """Over pages to their dtype; keys without pages are cast too, as in training."""
    pages = _as(packed(), torch.bfloat16, "k", "v")
    rows = torch.randn(2, 42, HK, D)
    keys = packed(k=rows[0], v=rows[1], block_table=None, cu_seqlens_k=torch.tensor([0, 9, 42], dtype=torch.int32))
    for given, dtype in ((pages, torch.float16), (keys, torch.bfloat16)):
        want = diyfa.flash_attention_varlen(**_as(given, torch.bfloat16, *"qkv"))
        with torch.autocast("cpu", dtype):
            for _ in range(3):
                assert torch.equal(diyfa.flash_attention_varlen(**given), want)
            assert diyfa.explain(**given, layout="thd").kernel == "split_kv"


def test_autocast_in_a_compiled_call() -> None:
    torch.compiler.reset()
    given = _as(call(), torch.bfloat16, "k_cache", "v_cache")
    want = diyfa.flash_attn_with_kvcache(**_as(_copied(given), torch.bfloat16, "q", "k", "v"))
    compiled = torch.compile(diyfa.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(**given), want)
