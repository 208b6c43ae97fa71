"""Calls that differ in little from an earlier one come out as in a process without earlier calls.

All that is decided about a call is kept for equal ones (`diyfa/plan.py`). A mistake there would be a wrong result
without a word, so each change is made to a call that has just been repeated: once in arguments, once in what is around.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from seen import Seen
from targets import TARGETS
from torch.autograd import forward_ad

import diyfa
from diyfa import plan as planning
from diyfa.flash_attn_interface import flash_attn_func, flash_attn_varlen_func

Given = dict[str, Any]
B, H, HK, S, D = 2, 4, 2, 16, 16


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


def dense(**more: Any) -> Given:
    torch.default_generator.manual_seed(0)
    q, k, v = (torch.randn(B, h, S, D) for h in (H, HK, HK))
    return {"of": diyfa.flash_attention, "q": q, "k": k, "v": v, "causal": True, "return_lse": True, **more}


def packed() -> Given:
    rows = {name: x.transpose(1, 2).flatten(0, 1).contiguous() for name, x in dense().items() if name in "qkv"}
    ends = {f"cu_seqlens_{x}": torch.arange(0, B * S + 1, S, dtype=torch.int32) for x in "qk"}
    return {
        "of": diyfa.flash_attention_varlen, **rows, **ends, "max_seqlen_q": S, "max_seqlen_k": S, "causal": True,
        "return_lse": True,
    }  # fmt: skip


def flash_attn_packed() -> Given:
    given = packed()
    del given["return_lse"]
    return {**given, "of": flash_attn_varlen_func, "return_attn_probs": True}


def decode(**more: Any) -> Given:
    torch.default_generator.manual_seed(0)
    return {
        "of": diyfa.flash_attn_with_kvcache, "q": torch.randn(B, 1, H, D), "k_cache": torch.randn(B, 40, HK, D),
        "v_cache": torch.randn(B, 40, HK, D), "cache_seqlens": torch.tensor([5, 30], dtype=torch.int32),
        "causal": True, "return_softmax_lse": True, **more,
    }  # fmt: skip


def appending(**more: Any) -> Given:
    return decode(k=torch.randn(B, 1, HK, D), v=torch.randn(B, 1, HK, D), **more)


def float8(**more: Any) -> Given:
    caches = {name: decode()[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    return decode(**caches, **{"k_descale": torch.rand(B, HK), "v_descale": torch.rand(B, HK), **more})


def paged() -> Given:
    pages = {name: x.reshape(10, 8, HK, D) for name, x in decode().items() if name in ("k_cache", "v_cache")}
    return decode(**pages, block_table=torch.arange(10, dtype=torch.int32).view(B, 5))


def packed_pages() -> Given:
    given = paged()
    return {
        "of": diyfa.flash_attention_varlen, "q": torch.randn(7, H, D), "k": given["k_cache"], "v": given["v_cache"],
        "cu_seqlens_q": torch.tensor([0, 2, 7], dtype=torch.int32), "cu_seqlens_k": None, "max_seqlen_q": 5,
        "max_seqlen_k": 33, "causal": True, "block_table": given["block_table"],
        "seqused_k": torch.tensor([9, 33], dtype=torch.int32), "return_lse": True,
    }  # fmt: skip


def mask_of(function: Any, rows: int = S) -> diyfa.BlockMask:
    return diyfa.block_mask(function, 1, 1, rows, S, device="cpu")


STATE = torch.tensor([7, 1])
CALLS: dict[str, Callable[[], Given]] = {
    "dense": dense,
    "with_sinks": lambda: dense(sinks=torch.rand(H)),
    "with_state": lambda: dense(rng_state=STATE.clone()),  # of a mask that there is not
    "with_dropout": lambda: dense(rng_state=STATE.clone(), dropout_p=0.5, sinks=torch.rand(H)),
    "with_lengths": lambda: dense(seq_lens=torch.tensor([9, 5], dtype=torch.int32)),
    "with_bias": lambda: dense(attn_bias=torch.randn(H, S, S)),
    # And a mask of dropout, whose state is drawn, or given behind the mask in the table of tensors.
    "with_mask": lambda: dense(causal=False, mask=mask_of(diyfa.masks.causal), dropout_p=0.5),
    "packed": packed,
    "packed_once": lambda: (lambda given: {**given, "cu_seqlens_k": given["cu_seqlens_q"]})(packed()),
    "flash_attn": lambda: {
        "of": flash_attn_func, **{name: dense()[name].transpose(1, 2) for name in "qkv"}, "causal": True,
        "return_attn_probs": True,
    },
    "flash_attn_packed": flash_attn_packed,
    "decode": decode,
    "of_length": lambda: decode(cache_seqlens=17),
    "into_out": lambda: decode(out=torch.zeros(B, 1, H, D)),
    "of_slopes": lambda: decode(alibi_slopes=torch.rand(H)),
    "appending": appending,
    "rotating": lambda: appending(rotary_cos=torch.rand(40, 4), rotary_sin=torch.rand(40, 4)),
    "latent": lambda: (lambda given: {**given, "v_cache": given["k_cache"].view(given["k_cache"].shape)})(decode()),
    "float8": float8,
    "of_number": lambda: float8(k_descale=0.5),
    "paged": paged,
    "packed_pages": packed_pages,
}  # fmt: skip


def made(call: str) -> Given:
    """The arguments of a call, with the same numbers each time."""
    torch.default_generator.manual_seed(0)
    return CALLS[call]()


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
    "negative parameter": lambda x: (
        torch.nn.Parameter(torch._neg_view(-x), requires_grad=False) if x.element_size() > 1 else x
    ),
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
    "softcap that is a tensor": with_(softcap=torch.tensor(2.0)),
    "all half": lambda given: {
        name: x.half() if name in ("q", "k", "v", "k_cache", "v_cache", "out") and x.dtype == torch.float32 else x
        for name, x in given.items()
    },
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
        "dropout that is a tensor": with_(dropout_p=torch.tensor(0.5)),
        "dropout": with_(dropout_p=0.5, rng_state=torch.tensor([7, 1])),
    },
    "with_state": {"dropout": with_(dropout_p=0.5), "no state": with_(rng_state=None)},
    "with_dropout": {"no dropout": with_(dropout_p=0.0), "another": with_(dropout_p=0.25)},
    "with_lengths": {"beyond": with_changed("seq_lens", lambda x: x + 8)},
    "with_sinks": {"slopes instead": lambda given: {**given, "sinks": None, "alibi_slopes": given["sinks"]}},
    "with_bias": {"broadcast": with_changed("attn_bias", lambda x: x[:1].expand(H, S, S))},
    "with_mask": {
        "state": with_(rng_state=STATE),
        "state alone": with_(rng_state=STATE, dropout_p=0.0),
        "another": with_(mask=mask_of(diyfa.masks.sliding_window(3))),
        "of other lengths": with_(mask=mask_of(diyfa.masks.causal, S - 1)),
    },
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
    "rotating": {"in pairs": with_(rotary_interleaved=False)},
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


def has(given: Given, name: str) -> bool:
    return name in inspect.signature(given["of"]).parameters


def changes_of(call: str) -> dict[str, Change]:
    tensors = [name for name, x in made(call).items() if isinstance(x, torch.Tensor)]
    each = {f"{x} {name}": with_changed(x, change) for x in tensors for name, change in TENSOR_CHANGES.items()}
    if call == "with_dropout":
        del each["rng_state nothing"]  # a state is drawn then
    return {**each, **OPTIONS, **OWN.get(call, {})}


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


def outcome(given: Given, around: str = "nothing") -> Any:
    """Results, gradients and what was written, or the error. Arguments have their values again afterwards."""
    written = [x for name in ("q", "out") if isinstance(x := given.get(name), torch.Tensor)] if "out" in given else []
    before = [x.detach().clone() for x in written]
    torch.default_generator.manual_seed(0)
    try:
        with AROUND[around]():
            found = given["of"](**{name: x for name, x in given.items() if name != "of"})
            results = [found] if isinstance(found, torch.Tensor) else list(found)
            wanted = [x for x in given.values() if isinstance(x, torch.Tensor) and x.requires_grad]
            if wanted and results[0].requires_grad:
                loss = sum(x.float().nan_to_num(0.0, 0.0, 0.0).square().sum() for x in results[:2])
                results += torch.autograd.grad(loss, wanted, allow_unused=True)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        return type(error).__name__, str(error)
    caches = [given[name] for name in ("k_cache", "v_cache") if name in given]
    kept = [None if x is None else x.detach().clone() for x in (*results, *caches)]
    facts = [None if x is None else (type(x), x.dtype, x.requires_grad, x.stride()) for x in results]
    for x, value in zip(written, before, strict=True):
        x.detach().copy_(value)
    return kept, facts


def are_same(a: Any, b: Any) -> bool:
    if a[1] != b[1] or type(a[0]) is not type(b[0]):
        return False
    if isinstance(a[0], str):
        return a == b
    pairs = zip(a[0], b[0], strict=True)
    return all(
        (x is None and y is None)
        or (x.shape == y.shape and (x.is_meta or torch.equal(x.float().nan_to_num(7.0), y.float().nan_to_num(7.0))))
        for x, y in pairs
    )


Variation = tuple[str, Given, str]  # what differs, the arguments, what is around


def variations_of(call: str) -> Iterator[Variation]:
    make = partial(made, call)
    for name, change in changes_of(call).items():
        yield name, change(make()), "nothing"
    for name in AROUND:
        if name != "another backend" or call in ("dense", "decode"):  # an interpreted one
            yield name, make(), name
        if name != "another backend":
            yield f"{name}, with gradients", with_changed("q", lambda x: x.detach().requires_grad_())(make()), name


@contextmanager
def plans(known: dict[Any, Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "plans", known)
        yield


def fresh(*call: Any) -> Any:
    """The outcome in a world without earlier calls."""
    with plans({}):
        return outcome(*call)


# ---- The tests ------------------------------------------------------------------------------------------------------


def mistaken(call: str, variations: Iterator[Variation], backend: str) -> list[str]:
    """Those of a call's variations that do not come out as in a world without earlier calls."""
    wrong, make = [], partial(made, call)
    with diyfa.use_backend(backend), plans({}):
        want = outcome(make())
        for _ in range(2):
            assert are_same(outcome(make()), want)  # with other tensors each time
        assert len(planning.plans) == 1
        for number, (name, changed, around) in enumerate(variations):
            expected = fresh(changed, around)
            same = [are_same(outcome(changed, around), expected) for _ in range(2)]
            if number % 5 == 0:
                same.append(are_same(outcome(make()), want))
            if not all(same):
                wrong.append(name)
    return wrong


@pytest.mark.parametrize("call", CALLS)
def test_a_different_call_is_not_taken_for_an_equal_one(call):
    assert not mistaken(call, variations_of(call), "cpu")


@pytest.mark.skipif("cuda" not in TARGETS or TARGETS["cuda"].device != "cpu", reason="needs the interpreter")
@pytest.mark.parametrize("call", ["dense", "packed"])
def test_a_different_call_is_not_taken_for_an_equal_one_by_stride_dependent_kernels(call):
    names = "q strides", "all half", "window"
    chosen = (x for x in variations_of(call) if x[0] in names)
    assert not mistaken(call, chosen, "cuda")


def test_no_tensor_is_held_alive():
    """Nor its memory."""
    with diyfa.use_backend("cpu"), plans({}):
        for call in ("dense", "packed", "decode", "appending", "with_bias"):
            given = made(call)
            tensors = [weakref.ref(x.untyped_storage()) for x in given.values() if isinstance(x, torch.Tensor)]
            for _ in range(3):
                outcome(given)
            del given
            gc.collect()
            assert planning.plans and not any(x() is not None for x in tensors), call
