"""Calls that are recognised as like a recent one without a key: only those that its plan is right for.

Each change is made to a call that has just been recognised, once in arguments and once in what surrounds it. A mistake
here would be a wrong result without a word, so the checks are taken out one by one, too: a change has to show it.
"""

from __future__ import annotations
import __future__

import gc
import inspect
import textwrap
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from known_plans import known_plans
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import diyfa
from diyfa import attention, fast_path, kvcache, kvcache_ops, ops, registry
from diyfa.flash_attn_interface import flash_attn_func, flash_attn_varlen_func

if fast_path._TensorGuards is None:
    pytest.skip("this PyTorch has no comparison that is known: calls are recognised by keys", allow_module_level=True)

Given = dict[str, Any]
B, H, HK, S, D = 2, 4, 2, 16, 16
WARM = 3  # calls until one is recognised: the first makes the plan, the second finds it


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """The same values and strides, one element beyond an address that is aligned."""
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].as_strided(x.shape, x.stride(), 1).copy_(x)


def spread(x: torch.Tensor) -> torch.Tensor:
    """The same values and shape, other strides; the last stays 1 where there are several."""
    if x.dim() == 1:
        return x.repeat_interleave(2)[::2]
    return torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)[..., : x.shape[-1]].copy_(x)


def among_keys(given: dict[str, Any]) -> torch.Tensor:
    """An output in the memory of the keys."""
    return given["k_cache"].flatten()[: given["q"].numel()].view_as(given["q"])


def overlapping_caches() -> dict[str, Any]:
    """Of which the last row of one is the first of the other."""
    both = torch.randn(B + 1, 40, HK, D)
    return {"k_cache": both[:B], "v_cache": both[1:]}


def entwined_caches() -> dict[str, Any]:
    """Views of one buffer that have no element in common, with the strides of dense ones."""
    both = torch.randn(B, 40, HK, 2 * D)
    return {"k_cache": both[..., :D], "v_cache": both[..., D:]}


# ---- The calls ----------------------------------------------------------------------------------------------------


def dense(dtype: torch.dtype = torch.float32) -> Given:
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, h, S, D).to(dtype) for h in (H, HK, HK))
    return {"of": diyfa.flash_attention, "q": q, "k": k, "v": v, "causal": True, "return_lse": True}


def with_sinks() -> Given:
    return {**dense(), "sinks": torch.rand(H)}


def with_state() -> Given:
    """Of a mask that there is not."""
    return {**dense(), "rng_state": torch.tensor([7, 1])}


def with_dropout() -> Given:
    return {**with_state(), "dropout_p": 0.5, "sinks": torch.rand(H)}


def with_lengths() -> Given:
    return {**dense(), "seq_lens": torch.tensor([9, 5], dtype=torch.int32)}


def with_bias() -> Given:
    return {**dense(), "attn_bias": torch.randn(H, S, S)}


def packed() -> Given:
    rows = {name: x.transpose(1, 2).flatten(0, 1).contiguous() for name, x in dense().items() if name in "qkv"}
    ends = {f"cu_seqlens_{x}": torch.arange(0, B * S + 1, S, dtype=torch.int32) for x in "qk"}
    return {
        "of": diyfa.flash_attention_varlen, **rows, **ends, "max_seqlen_q": S, "max_seqlen_k": S, "causal": True,
        "return_lse": True,
    }  # fmt: skip


def packed_once() -> Given:
    given = packed()
    return {**given, "cu_seqlens_k": given["cu_seqlens_q"]}


def flash_attn() -> Given:
    q, k, v = (x.transpose(1, 2) for x in (dense()[name] for name in "qkv"))
    return {"of": flash_attn_func, "q": q, "k": k, "v": v, "causal": True, "return_attn_probs": True}


def flash_attn_packed() -> Given:
    given = packed()
    del given["return_lse"]
    return {**given, "of": flash_attn_varlen_func, "return_attn_probs": True}


def decode() -> Given:
    torch.manual_seed(0)
    return {
        "of": diyfa.flash_attn_with_kvcache, "q": torch.randn(B, 1, H, D), "k_cache": torch.randn(B, 40, HK, D),
        "v_cache": torch.randn(B, 40, HK, D), "cache_seqlens": torch.tensor([5, 30], dtype=torch.int32),
        "causal": True, "return_softmax_lse": True,
    }  # fmt: skip


def of_length() -> Given:
    return {**decode(), "cache_seqlens": 17}


def into_out() -> Given:
    return {**decode(), "out": torch.zeros(B, 1, H, D)}


def of_slopes() -> Given:
    return {**decode(), "alibi_slopes": torch.rand(H)}


def appending() -> Given:
    given = decode()
    return {**given, "k": torch.randn(B, 1, HK, D), "v": torch.randn(B, 1, HK, D)}


def latent() -> Given:
    given = decode()
    return {**given, "v_cache": given["k_cache"].view(given["k_cache"].shape)}


def float8() -> Given:
    caches = {name: decode()[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    return {**decode(), **caches, "k_descale": torch.rand(B, HK), "v_descale": torch.rand(B, HK)}


def of_number() -> Given:
    return {**float8(), "k_descale": 0.5}


def paged() -> Given:
    pages = {name: x.reshape(10, 8, HK, D) for name, x in decode().items() if name in ("k_cache", "v_cache")}
    return {**decode(), **pages, "block_table": torch.arange(10, dtype=torch.int32).view(B, 5)}


def packed_pages() -> Given:
    given = paged()
    return {
        "of": diyfa.flash_attention_varlen, "q": torch.randn(7, H, D), "k": given["k_cache"], "v": given["v_cache"],
        "cu_seqlens_q": torch.tensor([0, 2, 7], dtype=torch.int32), "cu_seqlens_k": None, "max_seqlen_q": 5,
        "max_seqlen_k": 33, "causal": True, "block_table": given["block_table"],
        "seqused_k": torch.tensor([9, 33], dtype=torch.int32), "return_lse": True,
    }  # fmt: skip


CALLS: tuple[Callable[[], Given], ...] = (
    dense, with_sinks, with_state, with_dropout, with_lengths, with_bias, packed, packed_once, flash_attn,
    flash_attn_packed, decode, of_length, into_out, of_slopes, appending, latent, float8, of_number, paged,
    packed_pages,
)  # fmt: skip


# ---- Changes ------------------------------------------------------------------------------------------------------

Change = Callable[[Given], Given]


def with_changed(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda given: {**given, name: change(given[name])}


def with_(**changes: Any) -> Change:
    return lambda given: {**given, **changes}


TENSOR_CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "misaligned": misaligned,
    "strides": spread,
    "shape": lambda x: x[:1],
    "rank": lambda x: x[None],
    "dtype": lambda x: x.double() if x.is_floating_point() else x.short(),
    "half": lambda x: x.half(),
    "wants a gradient": lambda x: x.detach().requires_grad_() if x.is_floating_point() else x.short(),
    "negative view": lambda x: torch._neg_view(-x) if x.element_size() > 1 else x[:1],
    "sparse": lambda x: x.to_sparse() if x.element_size() > 1 else x[:1],
    "sparse rows": lambda x: x[0, 0].to_sparse_csr() if x.dim() == 4 and x.element_size() > 1 else x[:1],
    "nested": lambda x: torch.nested.nested_tensor(list(x)) if x.element_size() > 1 else x[:1],
    "subclass": lambda x: x.as_subclass(Subclass),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "meta": lambda x: x.to("meta"),
    "nothing": lambda x: None,
    "number": lambda x: 1,
}
OPTIONS: dict[str, Change] = {
    "not causal": with_(causal=False),
    "window": lambda given: {**given, "window_size" if has(given, "window_size") else "window": (3, 0)},
    "scale": lambda given: {**given, "softmax_scale" if has(given, "softmax_scale") else "sm_scale": 0.5},
    "scale that is a tensor": lambda given: {
        **given, "softmax_scale" if has(given, "softmax_scale") else "sm_scale": torch.tensor(0.5),
    },
    "softcap": with_(softcap=2.0),
}  # fmt: skip
OWN: dict[str, dict[str, Change]] = {
    "dense": {
        "q three times": lambda given: {**given, "k": given["q"], "v": given["q"]},
        "k twice": lambda given: {**given, "v": given["k"]},
        "deterministic": with_(deterministic=True),
        "variant": with_(variant="v1"),
        "alone": with_(return_lse=False),
        "3-D": lambda given: {**given, **{x: given[x].flatten(0, 1) for x in "qkv"}},
        "empty": with_changed("q", lambda x: x[:, :, :0]),
        "sinks": with_(sinks=torch.rand(H)),
        "lengths": with_(seq_lens=torch.tensor([9, 9], dtype=torch.int32)),
        "dropout": with_(dropout_p=0.5, rng_state=torch.tensor([7, 1])),
    },
    "with_state": {"dropout": with_(dropout_p=0.5), "no state": with_(rng_state=None)},
    "with_dropout": {"no dropout": with_(dropout_p=0.0), "another": with_(dropout_p=0.25)},
    "with_lengths": {"beyond": with_changed("seq_lens", lambda x: x + 8)},
    "with_sinks": {"slopes instead": lambda given: {**given, "sinks": None, "alibi_slopes": given["sinks"]}},
    "with_bias": {"broadcast": with_changed("attn_bias", lambda x: x[:1].expand(H, S, S))},
    "packed": {
        "offsets twice": lambda given: {**given, "cu_seqlens_k": given["cu_seqlens_q"]},
        "longest": with_(max_seqlen_q=S + 1),
        "longest keys": with_(max_seqlen_k=S + 1),
        "too short": with_(max_seqlen_q=S - 1),
        "values": with_changed("cu_seqlens_q", lambda x: x - 1),
        "used": with_(seqused_k=torch.tensor([3, 9], dtype=torch.int32)),
    },
    "packed_once": {
        "different offsets": with_changed("cu_seqlens_k", torch.clone),
        "other offsets": with_changed("cu_seqlens_k", lambda x: x // 2),
        "no offsets of keys": with_(cu_seqlens_k=None),
    },
    "decode": {
        "latent": lambda given: {**given, "v_cache": given["k_cache"].view(given["k_cache"].shape)},
        "one cache": lambda given: {**given, "v_cache": given["k_cache"]},
        "splits": with_(num_splits=3),
        "splits that are true": with_(num_splits=True),
        "interleaved": with_(rotary_interleaved=False),
        "length": with_(cache_seqlens=17),
        "lengths beyond": with_changed("cache_seqlens", lambda x: x + 11),
        "padding": with_(cache_leftpad=torch.tensor([1, 2], dtype=torch.int32)),
        "rows": with_(cache_batch_idx=torch.tensor([1, 0], dtype=torch.int32)),
        "out": with_(out=torch.zeros(B, 1, H, D)),
        "fewer rows": lambda given: {**given, **{x: given[x][:, :39] for x in ("k_cache", "v_cache")}},
        "new keys": with_(k=torch.rand(B, 1, HK, D), v=torch.rand(B, 1, HK, D)),
        "other new keys": with_(v=torch.rand(B, 1, HK, D)),
    },
    "of_length": {
        "beyond": with_(cache_seqlens=41), "negative": with_(cache_seqlens=-1), "other": with_(cache_seqlens=3),
    },
    "into_out": {
        "out is q": lambda given: {**given, "out": given["q"]},
        "out among keys": lambda given: {**given, "out": among_keys(given)},
    },
    "of_slopes": {
        "sinks instead": lambda given: {**given, "alibi_slopes": None, "sinks": given["alibi_slopes"]},
        "both": lambda given: {**given, "sinks": given["alibi_slopes"]},
    },
    "appending": {
        "overlapping caches": lambda given: {**given, **overlapping_caches()},
        "entwined caches": lambda given: {**given, **entwined_caches()},
    },
    "latent": {"not latent": with_changed("v_cache", torch.clone)},
    "float8": {
        "numbers": with_(k_descale=0.5, v_descale=0.25),
        "of all": with_changed("k_descale", lambda x: x[:1, :1]),
        "values alone": with_(k_descale=None),
    },
    "of_number": {"another number": with_(k_descale=0.25), "a tensor": with_(k_descale=torch.rand(1))},
    "paged": {"no page": with_changed("block_table", lambda x: x + 1)},
    "packed_pages": {
        "longer": with_(max_seqlen_k=65), "beyond": with_changed("seqused_k", lambda x: x + 1),
        "longest": with_(max_seqlen_q=6),
    },
}  # fmt: skip
# What differs in values alone, which are checked or read in every call: to be served by a recent one is right.
OF_VALUES = {
    ("packed", "values"), ("packed_once", "other offsets"), ("decode", "lengths beyond"), ("of_length", "beyond"),
    ("of_length", "negative"), ("of_length", "other"), ("into_out", "out is q"), ("into_out", "out among keys"),
    ("of_number", "another number"), ("paged", "no page"), ("packed_pages", "beyond"), ("dense", "alone"),
    ("packed_pages", "longer"), ("with_lengths", "beyond"), ("appending", "overlapping caches"),
}  # fmt: skip


def has(given: Given, name: str) -> bool:
    return name in inspect.signature(given["of"]).parameters


def changes_of(call: Callable[[], Given]) -> dict[str, Change]:
    tensors = [name for name, x in call().items() if isinstance(x, torch.Tensor)]
    each = {f"{x} {name}": with_changed(x, change) for x in tensors for name, change in TENSOR_CHANGES.items()}
    if call is with_dropout:
        del each["rng_state nothing"]  # a state is drawn then
    return {**each, **OPTIONS, **OWN.get(call.__name__, {})}


ALL = [(call, name) for call in CALLS for name in changes_of(call)]


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def autocast_to(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_autocast_dtype("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.set_autocast_dtype("cpu", dtype)  # the context itself refuses float32, which casts nothing
        try:
            yield
        finally:
            torch.set_autocast_dtype("cpu", before)


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "deterministic": deterministic,
    "bfloat16": lambda: autocast_to(torch.bfloat16),
    "float32": lambda: autocast_to(torch.float32),
    "batch-invariant": diyfa.batch_invariant,
    "another backend": lambda: diyfa.use_backend("npu"),
    "a mode": Seen,
    "a mode of functions": lambda: torch.device("cpu"),
    "duals": forward_ad.dual_level,
    "a profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
}


# ---- What is compared -----------------------------------------------------------------------------------------------


def names_of_tensors(given: Any) -> list[str]:
    """Of a named tuple."""
    return [name for name, x in given._asdict().items() if isinstance(x, torch.Tensor)]


def world(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Without earlier calls -> of each call from now on, whether a recent one served it.

    Kernels of the CPU can be repeated as CUDA's are: by all but tensors as it was when that way was made.
    """
    seen: list[bool] = []
    backend = registry.load_backend("cpu")

    def repeated(kernel: Any) -> Any:
        def repeat(problem: Any, tensors: Any, *results: torch.Tensor) -> Any:
            names = names_of_tensors(tensors)
            without, like = tensors._replace(**dict.fromkeys(names)), [(x.shape, x.stride(), x.dtype) for x in results]

            def run(out: torch.Tensor | None, present: tuple[torch.Tensor, ...], **numbers: int) -> list[torch.Tensor]:
                same = without._replace(**numbers, **dict(zip(names, present, strict=True)))
                made = [torch.empty_strided(*sizes, dtype=dtype) for *sizes, dtype in like]
                made[0] = made[0] if out is None else out
                if problem.varlen and not kernel.clears:
                    made[0].zero_()
                    made[1].fill_(float("inf"))
                kernel.launch(problem, same, *made)
                return made

            def over_cache(
                length: int, out: torch.Tensor | None, returns_lse: bool, addresses: list[int], present: Any
            ) -> Any:
                assert addresses == [x.data_ptr() for x in present]
                out, lse = run(out, present, length=length)
                return out, lse if returns_lse else None

            def alone(addresses: list[int], present: Any) -> Any:
                assert addresses == [x.data_ptr() for x in present]
                return run(None, present)

            return (lambda *present: over_cache) if kernel.op == "kvcache_fwd" else alone

        return replace(kernel, repeat=repeat) if kernel.op in ("attention_fwd", "kvcache_fwd") else kernel

    def appended(kernel: Any) -> Any:
        def repeat(problem: Any, tensors: Any, new: Any) -> Any:
            of_call, of_new = (names_of_tensors(x) for x in (tensors, new))

            def run(length: int, addresses: list[int], present: Any) -> bool:
                assert addresses == [x.data_ptr() for x in present]
                named = dict(zip(of_call, present[: len(of_call)], strict=True))
                appended = dict(zip(of_new, present[len(of_call) :], strict=True))
                kernel.launch(problem, tensors._replace(length=length, **named), new._replace(**appended))
                return True

            return run

        return replace(kernel, repeat=repeat)

    kernels = tuple(appended(x) if x.op == "kvcache_append" else repeated(x) for x in backend.kernels)
    monkeypatch.setitem(registry._loaded, "cpu", type("Stub", (type(backend),), {"kernels": kernels})())
    monkeypatch.setattr(fast_path, "plans", {})
    for module, name in ((fast_path, "find_attention"), (kvcache, "_find")):
        find = getattr(module, name)

        def spy(*args: Any, find: Any = find) -> Any:
            plan, present, *_ = found = find(*args)
            seen.append(plan is not None and bool(present))
            return found

        monkeypatch.setattr(module, name, spy)
    return seen


@pytest.fixture(autouse=True)
def on_the_cpu_backend() -> Iterator[None]:
    with diyfa.use_backend("cpu"):
        yield


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    return world(monkeypatch)


def outcome(given: Given) -> Any:
    """Results and what was written, or the error. Arguments have their values again afterwards."""
    written = [x for name in ("q", "out") if isinstance(x := given.get(name), torch.Tensor)] if "out" in given else []
    before = [x.detach().clone() for x in written]
    try:
        found = given["of"](**{name: x for name, x in given.items() if name != "of"})
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        return type(error).__name__, str(error)
    results = [found] if isinstance(found, torch.Tensor) else list(found)
    kept = [x.clone() for x in (*results, *(given[name] for name in ("k_cache", "v_cache") if name in given))]
    for x, value in zip(written, before, strict=True):
        x.detach().copy_(value)
    return kept


def are_same(a: Any, b: Any) -> bool:
    if not isinstance(a, list) or not isinstance(b, list):
        return a == b if type(a) is type(b) else False
    for x, y in zip(a, b, strict=True):
        facts = [(type(z), z.shape, z.dtype, z.device, z.requires_grad, z.stride()) for z in (x, y)]
        if facts[0] != facts[1] or not (x.is_meta or torch.equal(x.float().nan_to_num(7.0), y.float().nan_to_num(7.0))):
            return False
    return True


def fresh(given: Given) -> Any:
    """The outcome in a world without earlier calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_path, "plans", {})
        return outcome(given)


def is_mistaken(
    given: Given, changed: Given, served: list[bool], outside: str = "nothing", inside: str = "nothing"
) -> bool:
    """Whether a call that differs from a recent one comes out wrong, or is served by it."""
    for _ in range(WARM):
        with AROUND[outside]():
            outcome(given)
    with AROUND[inside]():
        want = fresh(changed)
        served.clear()
        return not are_same(outcome(changed), want) or any(served)


# ---- The tests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_comes_again_is_recognised_and_comes_out_the_same(call, served):
    want = fresh(call())
    served.clear()
    for _ in range(WARM + 2):
        assert are_same(outcome(call()), want)  # with other tensors each time
    assert served == [n + 1 >= WARM for n in range(WARM + 2)]


@pytest.mark.parametrize(("call", "change"), ALL, ids=[f"{call.__name__}-{name}" for call, name in ALL])
def test_a_call_that_differs_is_not_taken_for_it(call, change, served):
    given = call()
    changed = changes_of(call)[change](given)
    assert not is_mistaken(given, changed, served) or (call.__name__, change) in OF_VALUES
    for each in (changed, changed, changed, given, changed):
        assert are_same(outcome(each), fresh(each))


@pytest.mark.parametrize("call", [dense, packed_once, decode])
@pytest.mark.parametrize("gradients", [False, True], ids=["", "gradients"])
@pytest.mark.parametrize("inside", AROUND)
@pytest.mark.parametrize("outside", ["nothing", "no_grad", "float32", "batch-invariant"])
def test_what_is_around_a_call_is_part_of_it(call, outside, inside, gradients, served):
    given = call()
    if gradients:
        given["q"].requires_grad_()
    for one, other in ((outside, inside), (inside, outside)):
        fast_path.plans.clear()
        is_the_same = one == other or (call is decode and "deterministic" in (one, other) and "nothing" in (one, other))
        assert is_the_same or not is_mistaken(given, given, served, one, other)
        for around in (other, other, one, other):
            with AROUND[around]():
                assert are_same(outcome(given), fresh(given))


def of_misaligned() -> Given:
    return with_changed("q", misaligned)(dense())


def of_one_gradient() -> Given:
    return with_changed("q", torch.Tensor.requires_grad_)(dense())


FIND, OVER_CACHE = fast_path.find_attention, kvcache._find
# Each check: where it is, what is taken out and what it becomes; what shows it: a call, its change or what is around.
PLANTED: list[tuple[Any, str, str, Callable[[], Given], Change | tuple[str, str]]] = [
    (fast_path.find_recent, "not recent.is_like(*distinct)", "False", dense, with_changed("k", spread)),
    (fast_path.find_recent, "bits & 15 or", "", dense, with_changed("v", misaligned)),
    (fast_path.find_recent, "bits & 15 or", "", decode, with_changed("cache_seqlens", misaligned)),
    (fast_path.find_recent, "tensors[i] is not tensors[j]", "False", packed_once,
     with_changed("cu_seqlens_k", torch.Tensor.long)),
    (fast_path._likeness, "x.data_ptr() & 15", "False", of_misaligned, with_changed("q", torch.clone)),
    (fast_path._likeness, "is_cast or ", "", dense, ("float32", "bfloat16")),
    (FIND, "*given.values(),", "", dense, with_(causal=False)),
    (ops.run_plan, "len(given) == plan.repeat_takes", "given", with_state, with_(rng_state=torch.tensor([8, 1]))),
    (attention._attend, "plan.reads_values", "False", with_lengths,
     with_changed("seq_lens", lambda x: x + 8)),
    (FIND, "torch.is_grad_enabled()", "None", of_one_gradient, ("no_grad", "nothing")),
    (FIND, "torch.are_deterministic_algorithms_enabled()", "None", dense, ("nothing", "deterministic")),
    (FIND, "not is_unseen()", "False", dense, ("nothing", "a profiler")),
    (FIND, "options, kinds,", "options, 0,", with_sinks, with_(seq_lens=torch.tensor([9, 9]).int())),
    (FIND, "lengths.max_seqlen_q,", "0,", packed, with_(max_seqlen_q=S + 1)),
    (FIND, "lengths.max_seqlen_k", "0", packed, with_(max_seqlen_k=S + 1)),
    (OVER_CACHE, "*map(type, tensors)", "0", decode, with_(cache_leftpad=torch.tensor([1, 2]).int())),
    (OVER_CACHE, "*map(type, tensors), *options", "*map(type, tensors)", decode, with_(softcap=2.0)),
    (OVER_CACHE, "torch.is_grad_enabled()", "None", lambda: with_changed("q", torch.Tensor.requires_grad_)(decode()),
     ("no_grad", "nothing")),
    (OVER_CACHE, "registry.is_batch_invariant()", "None", decode, ("nothing", "batch-invariant")),
    (OVER_CACHE, "registry.forced_backend()", "None", decode, ("nothing", "another backend")),
    (OVER_CACHE, "not fast_path.is_unseen()", "False", decode, ("nothing", "a profiler")),
    (OVER_CACHE, "if plan.begins_alike is", "if True or", decode,
     lambda given: {**given, "v_cache": given["k_cache"].view(B, 40, HK, D)}),
    (OVER_CACHE, "if plan.begins_alike is", "if True or", latent, with_changed("v_cache", torch.clone)),
    (kvcache_ops.KVCachePlan.again, "check_out(", "(lambda *_: None)(", into_out,
     lambda given: {**given, "out": among_keys(given)}),
    (kvcache_ops.KVCachePlan.again, "self.check_caches(", "(lambda *_: None)(", appending,
     lambda given: {**given, **overlapping_caches()}),
    (diyfa.flash_attn_with_kvcache, "plan.on_host or isinstance(cache_seqlens, int)", "False", of_length,
     with_(cache_seqlens=41)),
]  # fmt: skip
# Where calls that differ in values come, too.
IN_RUNNING = (kvcache_ops.KVCachePlan.again, diyfa.flash_attn_with_kvcache, attention._attend, ops.run_plan)


@pytest.mark.parametrize("number", range(len(PLANTED)))
def test_each_check_is_needed(number, monkeypatch):
    function, what, instead, call, shown_by = PLANTED[number]
    is_change = callable(shown_by)
    outside, inside = ("nothing", "nothing") if is_change else shown_by
    of_values = function in IN_RUNNING

    def is_shown() -> bool:
        given = call()
        changed = shown_by(given) if is_change else given
        mistaken = is_mistaken(given, changed, world(patch), outside, inside)
        return not are_same(outcome(changed), fresh(changed)) if of_values else mistaken

    with monkeypatch.context() as patch:
        assert not is_shown()
    source = textwrap.dedent(inspect.getsource(function))
    assert what in source
    scope: dict[str, Any] = {}
    flags = __future__.annotations.compiler_flag
    exec(compile(source.replace(what, instead), "planted", "exec", flags=flags), function.__globals__, scope)
    owner: Any = kvcache_ops.KVCachePlan if "." in function.__qualname__ else inspect.getmodule(function)
    with monkeypatch.context() as patch:
        patch.setattr(owner, function.__name__, scope[function.__name__])
        patch.setattr(diyfa, "flash_attn_with_kvcache", kvcache.flash_attn_with_kvcache)
        assert is_shown()


@pytest.mark.parametrize("compares", [True, False], ids=["recent", "by its key"])
def test_caches_that_overlap_are_refused_at_each_call(compares, monkeypatch, served):
    """It depends on addresses, and an equal call with other caches may have run before. Nothing is written."""
    if not compares:
        monkeypatch.setattr(fast_path, "_TensorGuards", None)
    caches = overlapping_caches()
    before = {name: x.clone() for name, x in caches.items()}
    for _ in range(WARM):
        assert isinstance(outcome(appending()), list)
        kind, why = outcome({**appending(), **caches})
        assert kind == "ValueError" and why.startswith("v_cache must not overlap k_cache")
        assert all(torch.equal(x, before[name]) for name, x in caches.items())
    assert served[-1] is compares
    for changes in (entwined_caches(), {}, entwined_caches()):
        given = {**appending(), **changes}
        assert isinstance(outcome(given), list)


def test_a_way_to_run_a_call_again_that_no_longer_holds_is_made_anew(served):
    """A backend's `repeat` says that by None: what was decided about the tile may change meanwhile."""
    for _ in range(WARM):
        outcome(decode())
    (recent,) = recent_calls()

    def outdated(*arguments: Any) -> None:
        return None

    recent.again = outdated
    want = fresh(decode())
    for _ in range(2):
        assert are_same(outcome(decode()), want)
    assert recent.again not in (None, outdated)


# ---- What is kept ---------------------------------------------------------------------------------------------------


def recent_calls() -> list[fast_path.Recent]:
    return [x for x in fast_path.plans.values() if isinstance(x, fast_path.Recent)]


def test_calls_of_several_kinds_in_turns(served):
    """The first is kept through a number of others that come again."""
    one, other = dense(), {name: x[:1] if isinstance(x, torch.Tensor) else x for name, x in dense().items()}
    want = fresh(one), fresh(other)
    for _ in range(WARM):
        outcome(one)
    for n in range(fast_path.PATIENCE + 4):
        served.clear()
        assert are_same(outcome(other), want[1])
        assert served == [n > fast_path.PATIENCE + 1]  # the first call makes its plan
    assert are_same(outcome(one), want[0]) and len(recent_calls()) == 1


def test_no_tensor_is_kept(served):
    """Nor its memory."""
    for call in (dense, with_sinks, packed_once, decode, into_out, latent):
        fast_path.plans.clear()
        given = call()
        for _ in range(WARM):
            outcome(given)
        assert served[-1]
        tensors = [weakref.ref(x) for x in given.values() if isinstance(x, torch.Tensor)]
        del given
        gc.collect()
        assert not any(x() is not None for x in tensors)


def test_recent_calls_are_bounded(monkeypatch, served):
    monkeypatch.setattr(fast_path, "LIMIT", 4)
    for n in range(1, 9):
        for _ in range(WARM):
            outcome({**dense(), "softcap": float(n)})
            assert len(fast_path.plans) <= 4
    assert served[-1]


@pytest.mark.parametrize("call", CALLS)
def test_without_the_comparison_calls_are_found_by_their_keys(call, monkeypatch, served):
    monkeypatch.setattr(fast_path, "_TensorGuards", None)
    want = fresh(call())
    for _ in range(WARM + 1):
        assert are_same(outcome(call()), want)
    assert not any(served) and len(known_plans()) == 1 and not recent_calls()


def test_one_tensor_in_every_place(served):
    x = dense()["q"]
    given = {**dense(), "q": x, "k": x, "v": x}
    for _ in range(WARM + 1):
        assert are_same(outcome(given), fresh(given))
    served.clear()
    outcome(given)
    assert served == [True]
    apart = {**given, "v": x.clone()}
    served.clear()
    assert are_same(outcome(apart), fresh({**given, "v": x.clone()})) and not served[0]


def test_transforms_are_seen_after_a_recent_call(served):
    q, k, v = (dense()[name] for name in "qkv")

    def attend(q: torch.Tensor) -> torch.Tensor:
        return diyfa.flash_attention(q, k, v, causal=True, return_lse=True)[0]

    want = attend(q)
    for _ in range(WARM):
        attend(q)
    assert served[-1]
    served.clear()
    mapped = torch.func.vmap(attend)(torch.stack([q, q + 1]))
    assert torch.allclose(mapped[0], want, atol=1e-6) and not any(served)
    traced = torch.jit.trace(attend, q, check_trace=False)
    assert not any(served) and torch.equal(traced(q), want)
    served.clear()
    graph = torch.fx.experimental.proxy_tensor.make_fx(attend)(q)
    assert not any(served) and any("diyfa" in str(node.target) for node in graph.graph.nodes)


class Wrong:
    """What a changed PyTorch might have instead of its comparison."""

    blind_to = ""

    def __init__(self, *tensors: torch.Tensor, **dims: Any) -> None:
        self.seen = [self.facts(x) for x in tensors]

    def facts(self, x: torch.Tensor) -> dict[str, Any]:
        known = {"shape": x.shape, "stride": x.stride(), "dtype": x.dtype, "requires_grad": x.requires_grad}
        return {name: fact for name, fact in known.items() if name != self.blind_to}

    def check(self, *tensors: torch.Tensor) -> bool:
        return self.seen == [self.facts(x) for x in tensors]


def test_a_comparison_that_is_not_the_known_one_is_not_used(monkeypatch):
    def found(guards: Any) -> Any:
        module = SimpleNamespace() if guards is None else SimpleNamespace(TensorGuards=guards)
        with monkeypatch.context() as patch:
            patch.setattr(fast_path, "_c", SimpleNamespace(_dynamo=SimpleNamespace(guards=module)))
            return fast_path._compares_tensors()

    assert found(Wrong) is Wrong and found(fast_path._TensorGuards) is fast_path._TensorGuards
    for fact in ("shape", "stride", "dtype", "requires_grad"):
        assert found(type("Blind", (Wrong,), {"blind_to": fact})) is None
    assert found(None) is None and found(lambda *tensors: None) is None
    assert found(type("Never", (Wrong,), {"check": lambda self, *tensors: False})) is None
