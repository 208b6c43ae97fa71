"""Calls with a cache whose inputs require a gradient: they run, and the grad_fn of their results raises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import test_kvcache
import torch
from targets import TARGETS
from test_kvcache import H

import diyfa
from diyfa import kvcache_ops, registry

BACKENDS = [name for name in TARGETS if diyfa.kernels_for(name, "kvcache_fwd")]
Call = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def made(make: Callable[..., dict[str, Any]], device: str, **tensors: tuple[int, ...]) -> dict[str, Any]:
    """The same call each time, with more random tensors of these shapes."""
    torch.manual_seed(0)
    given = make(**{name: torch.randn(shape) for name, shape in tensors.items()}, sinks=torch.randn(H))
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def contiguous(device: str) -> dict[str, Any]:
    """A call that appends and rotates."""
    return made(test_kvcache.call, device, rotary_cos=(40, 4), rotary_sin=(40, 4))


paged, packed = partial(made, test_kvcache.paged), partial(made, test_kvcache.packed)


def over_cache(**given: Any) -> Any:
    return diyfa.flash_attn_with_kvcache(return_softmax_lse=True, **given)


def over_pages(**given: Any) -> Any:
    return diyfa.flash_attention_varlen(return_lse=True, **given)


CALLS: dict[str, tuple[Call, Callable[[str], dict[str, Any]]]] = {
    "contiguous": (over_cache, contiguous),
    "paged": (over_cache, paged),
    "packed": (over_pages, packed),
}
WANTING = {
    "contiguous": ("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "sinks"),
    "paged": ("q", "k", "sinks"),
    "packed": ("q", "k", "sinks"),
}
FEW = {"contiguous": ("k_cache",), "paged": ("q",), "packed": ("q",)}  # in an interpreter
COMBINATIONS = [
    (backend, name, wanting)
    for backend in BACKENDS
    for name, wanted in (FEW if TARGETS[backend].interpreted else WANTING).items()
    for wanting in wanted
]


def assert_raises(*results: torch.Tensor) -> None:
    """The grad_fn of each result says why there is no gradient."""
    for x in results:
        assert x.requires_grad and x.grad_fn is not None
        with pytest.raises(NotImplementedError, match="attention over a cache has no backward pass"):
            x.sum().backward(retain_graph=True)


@pytest.mark.parametrize(("backend", "name", "wanting"), COMBINATIONS)
def test_the_call_runs_and_its_grad_fn_raises(backend: str, name: str, wanting: str) -> None:
    """As without gradients, in a first call and in repeated ones; caches that require a gradient are written in
    place, and are leaves afterwards. Inside torch.no_grad there is no grad_fn."""
    target, (attend, make) = TARGETS[backend], CALLS[name]
    with registry.use_backend(target.backend):
        plain = make(target.device)
        want = attend(**plain)
        for _ in range(2 if target.interpreted else 3):
            given = make(target.device)
            given[wanting].requires_grad_()
            got = attend(**given)
            for x, y in zip(got, want, strict=True):
                assert torch.equal(x.detach().cpu(), y.cpu())
            assert_raises(*got)
            for cache in ("k_cache", "v_cache"):
                if cache in given:
                    assert given[cache].is_leaf and torch.equal(given[cache].detach().cpu(), plain[cache].cpu())
            given = make(target.device)
            given[wanting].requires_grad_()
            with torch.no_grad():
                got = attend(**given)
            assert not got[0].requires_grad and not got[1].requires_grad


@pytest.mark.parametrize("kind", ["plain", "view", "leaf", "q"])
@pytest.mark.parametrize("name", CALLS)
def test_out_is_the_result_or_its_memory_is(name: str, kind: str) -> None:
    """Views, leaves and queries take no new grad_fn: the result is an alias then. No call keeps that of the one before,
    which a loop would make a chain of."""
    attend, make = CALLS[name]
    with registry.use_backend("cpu"):
        want = attend(**make("cpu"))[0]
        given = make("cpu")
        leaf = given["q"].requires_grad_()
        given["q"] = leaf * 1
        if kind == "q" and name == "packed":  # which is cleared before it is read
            return
        out = {
            "plain": lambda: torch.empty_like(want), "view": lambda: torch.empty(2, *want.shape)[1],
            "leaf": lambda: torch.empty_like(want, requires_grad=True), "q": lambda: given["q"],
        }[kind]()  # fmt: skip
        for _ in range(2 if kind != "q" else 1):
            got, lse = attend(**given, out=out)
            assert (got is out) == (kind == "plain") and got.data_ptr() == out.data_ptr()
            assert torch.equal(got, want)
            assert_raises(got, lse)
            assert all(node is None or "NoBackward" not in node.name() for node, _ in got.grad_fn.next_functions)
        got.mul_(2)  # as any result
        assert out.is_leaf == (kind in ("view", "leaf"))


def test_a_call_that_wants_no_gradient_has_none() -> None:
    """In grad mode, whatever `out` was before."""
    with registry.use_backend("cpu"):
        given = contiguous("cpu")
        for _ in range(3):
            assert not over_cache(**given)[0].requires_grad
        given["out"] = torch.empty_like(given["q"])
        over_cache(**{**given, "sinks": given["sinks"].clone().requires_grad_()})
        out = given["out"].detach()
        assert not over_cache(**{**given, "out": out})[1].requires_grad


@pytest.mark.parametrize("kind", ["leaf", "no leaf"])
@pytest.mark.parametrize("name", CALLS)
def test_out_alone_requires_a_gradient(name: str, kind: str) -> None:
    """It is overwritten, so nobody can differentiate the call: it runs, and out stays what it was."""
    attend, make = CALLS[name]
    with registry.use_backend("cpu"):
        want = attend(**make("cpu"))
        for _ in range(3):
            leaf = torch.empty_like(want[0], requires_grad=True)
            out = leaf if kind == "leaf" else leaf * 1
            before = out.grad_fn
            got = attend(**make("cpu"), out=out)
            assert got[0] is out and out.grad_fn is before and not got[1].requires_grad
            assert all(map(torch.equal, got, want))
        empty = {**make("cpu"), "out": torch.ones_like(want[0], requires_grad=True)}
        if name == "packed":
            empty |= {"max_seqlen_q": 0, "cu_seqlens_q": torch.zeros(3, dtype=torch.int32)}
            assert not attend(**empty)[0].any()


@pytest.mark.parametrize("function", ["flash_attn_with_kvcache", "flash_attn_varlen_func"])
def test_flash_attns_functions_without_lse(function: str) -> None:
    with registry.use_backend("cpu"):
        given = (paged if "kvcache" in function else packed)("cpu")
        del given["sinks"]
        if "kvcache" not in function:
            given["cu_seqlens_k"] = torch.tensor([0, 9, 42], dtype=torch.int32)
            del given["seqused_k"]
        given["q"].requires_grad_()
        for _ in range(3):
            assert_raises(getattr(diyfa, function)(**given))


@pytest.mark.parametrize("passes_out", [False, True], ids=["", "out"])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_calls(name: str, passes_out: bool) -> None:
    """One graph; the gradient is refused when it is asked for, not when it is traced."""
    attend, make = CALLS[name]

    def step(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        out = {"out": torch.empty_like(given["q"])} if passes_out else {}
        result, lse = attend(**given, **out)
        return result * 2, lse

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with registry.use_backend("cpu"):
        want, want_lse = step(make("cpu"))
        given, cache = make("cpu"), "k" if name == "packed" else "k_cache"
        given["q"].requires_grad_(), given[cache].requires_grad_()
        got = compiled(given)
        torch.testing.assert_close(got, (want, want_lse))
        assert_raises(*got)
        assert given[cache].is_leaf
        with torch.no_grad():
            assert not compiled(given)[0].requires_grad


def test_the_operator_of_the_backward_pass() -> None:
    """It has no result, and a fake one while a graph is made."""
    arguments = ([2, 3], torch.float16, torch.device("meta"))
    assert kvcache_ops._kvcache_bwd_fake(*arguments).shape == (2, 3)
    with pytest.raises(NotImplementedError, match="no backward pass"):
        torch.ops.diyfa.kvcache_bwd(*arguments)
