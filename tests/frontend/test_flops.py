"""`FlopCounterMode` and selective checkpointing see the operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from subprocesses import run_after_torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

import diyfa
from diyfa import matmul_ops
from diyfa.options import AttentionOptions, Lengths, MatmulOptions, pack
from diyfa.problem import MatmulTensors

CPU: dict[str, Any] = {"backend": "cpu"}


def counted(call: Callable[[], Any]) -> dict[str, int]:
    """FLOPs by the operator's name."""
    counter = FlopCounterMode(display=False)
    with counter:
        call()
    return {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}


def leaves(*shapes: tuple[int, ...], grad: bool = True, device: str = "cpu") -> list[torch.Tensor]:
    return [torch.randn(shape, requires_grad=grad, device=device) for shape in shapes]


def forward_and_backward(*sizes: tuple[int, int, int, int, int, int, int]) -> dict[str, int]:
    """PyTorch's own counts, of problems (B, H, Hk, Sq, Sk, D, Dv)."""
    forward = backward = 0
    for b, h, hk, sq, sk, d, dv in sizes:
        q, k, v, out = (b, h, sq, d), (b, hk, sk, d), (b, hk, sk, dv), (b, h, sq, dv)
        forward += sdpa_flop_count(q, k, v)
        backward += sdpa_backward_flop_count(out, q, k, v)
    return {"diyfa.attention_fwd": forward, "diyfa.attention_bwd": backward}


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (3, 0)}, {"dropout_p": 0.2}], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_attention(layout: str, options: dict[str, Any]) -> None:
    """All pairs count, whatever a mask hides, as in PyTorch's own attention."""
    inputs = leaves((2, 4, 6, 16), (2, 2, 9, 16), (2, 2, 9, 8))
    call = diyfa.flash_attention
    if layout == "bshd":
        inputs, call = [x.transpose(1, 2) for x in inputs], diyfa.flash_attention_v2
    found = counted(lambda: call(*inputs, **options, **CPU).sum().backward())
    assert found == forward_and_backward((2, 4, 2, 6, 9, 16, 8))


def test_attention_that_a_plan_repeats() -> None:
    """An equal call came before, and its forward ran outside the counter."""
    q, k, v = leaves(*[(2, 4, 6, 16)] * 3)
    call = partial(diyfa.flash_attention, q, k, v, **CPU)
    outside = [call() for _ in range(3)][-1]
    expected = forward_and_backward((2, 4, 4, 6, 6, 16, 16))
    assert counted(lambda: outside.sum().backward()) == {"diyfa.attention_bwd": expected["diyfa.attention_bwd"]}
    assert counted(call) == {"diyfa.attention_fwd": expected["diyfa.attention_fwd"]}


@pytest.mark.parametrize("packing", ["qkv", "kv"])
def test_packed_tensors(packing: str) -> None:
    q, qkv = leaves((2, 6, 4, 16), (2, 6, len(packing), 4, 16))
    function = getattr(diyfa, f"flash_attn_{packing}packed_func")
    with diyfa.use_backend("cpu"):
        found = counted(lambda: function(*((q, qkv) if packing == "kv" else (qkv,))).sum().backward())
    assert found == forward_and_backward((2, 4, 4, 6, 6, 16, 16))


@pytest.mark.parametrize("varlen", [False, True])
def test_sequences(varlen: bool) -> None:
    """Each counts as long as it is."""
    if varlen:
        q, k, v = leaves((9, 4, 16), (12, 2, 16), (12, 2, 16))
        of_q, of_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 9], [0, 4, 11]))
        call = partial(diyfa.flash_attention_varlen, q, k, v, of_q, of_k, 7, 7, causal=True, **CPU)
        sizes = [(1, 4, 2, 2, 4, 16, 16), (1, 4, 2, 7, 7, 16, 16)]
    else:
        q, k, v = leaves((2, 4, 6, 16), (2, 2, 9, 16), (2, 2, 9, 16))
        call = partial(diyfa.flash_attention, q, k, v, seq_lens=torch.tensor([9, 5], dtype=torch.int32), **CPU)
        sizes = [(1, 4, 2, 6, 9, 16, 16), (1, 4, 2, 5, 5, 16, 16)]
    assert counted(lambda: call().sum().backward()) == forward_and_backward(*sizes)


def test_only_shapes_known() -> None:
    """Sequences of fake tensors count as the longest, as in PyTorch."""
    q, k, v = leaves((9, 4, 16), (12, 2, 16), (12, 2, 16), device="meta")
    offsets = torch.zeros(3, dtype=torch.int32, device="meta")
    call = partial(diyfa.flash_attention_varlen, q, k, v, offsets, offsets, 7, 8, **CPU)
    assert counted(lambda: call().sum().backward()) == forward_and_backward((2, 4, 2, 7, 8, 16, 16))


def test_gradients_into_given_buffers() -> None:
    q, k, v = leaves((2, 4, 6, 16), (2, 2, 9, 16), (2, 2, 9, 16), grad=False)
    rest = pack(Lengths(), AttentionOptions("bhsd", 0.25, backend="cpu", needs_grad=True))
    out, lse = torch.ops.diyfa.attention_fwd(q, k, v, "", *rest)
    into = [torch.empty_like(x) for x in (q, k, v, lse)]
    found = counted(lambda: torch.ops.diyfa.attention_bwd_out(out, None, q, k, v, out, lse, *into, *rest))
    expected = forward_and_backward((2, 4, 2, 6, 9, 16, 16))["diyfa.attention_bwd"]
    assert found == {"diyfa.attention_bwd_out": expected}


@pytest.mark.parametrize("way", ["lengths", "number", "padded", "pages", "packed", "into"])
def test_cache(way: str) -> None:
    """The keys that each sequence has, with those that the call appends."""
    q, new = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 2, 16)
    cache, lengths = torch.randn(2, 32, 2, 16), torch.tensor([7, 20], dtype=torch.int32)
    pages, table = torch.randn(4, 16, 2, 16), torch.arange(4, dtype=torch.int32).view(2, 2)
    offsets = torch.tensor([0, 1, 6], dtype=torch.int32)
    calls: dict[str, tuple[dict[str, Any], int]] = {
        "lengths": ({"k": new, "v": new, "cache_seqlens": lengths}, 3 * (10 + 23)),
        "number": ({"cache_seqlens": 9}, 3 * (9 + 9)),
        "padded": ({"cache_seqlens": lengths, "cache_leftpad": torch.tensor([2, 0], dtype=torch.int32)}, 3 * (5 + 20)),
        "pages": ({"cache_seqlens": lengths, "block_table": table}, 3 * (7 + 20)),
        "into": ({"cache_seqlens": lengths, "out": torch.empty_like(q)}, 3 * (7 + 20)),
    }
    given, seen = calls.get(way, ({}, 1 * 7 + 5 * 20))
    cache = pages if way == "pages" else cache
    call = partial(diyfa.flash_attn_with_kvcache, q, cache, cache.clone(), **given)
    if way == "packed":
        rows = (q.flatten(0, 1), pages, pages.clone(), offsets, None, 5, 32)
        call = partial(diyfa.flash_attention_varlen, *rows, block_table=table, seqused_k=lengths)
    with diyfa.use_backend("cpu"):
        found = counted(call)
    assert found.pop("diyfa.kvcache_append", 0) == 0
    assert found == {f"diyfa.kvcache_fwd{'_out' * (way == 'into')}": 2 * 4 * seen * (16 + 16)}


def test_matmul() -> None:
    a, b = leaves((5, 7), (7, 3))
    options = MatmulOptions(None, False, "ieee", torch.float32, torch.float32, backend="cpu")
    found = counted(lambda: matmul_ops.matmul(MatmulTensors(a, b), options).sum().backward())
    assert found == {"diyfa.matmul": 3 * 2 * 5 * 7 * 3}
    with torch.no_grad():
        found = counted(lambda: diyfa.triton_matmul(a, b, precision="ieee", out=torch.empty(5, 3), backend="cpu"))
    assert found == {"diyfa.matmul_out": 2 * 5 * 7 * 3}


def test_every_operator_has_a_formula() -> None:
    """A new one cannot be forgotten."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("diyfa::")}
    assert len(names) >= 7
    assert {name for name in names if getattr(torch.ops.diyfa, name[7:]) not in flop_registry} == set()


@pytest.mark.parametrize("first", ["diyfa", "torch.utils.flop_counter"])
def test_the_counter_may_be_imported_first_or_last(first: str) -> None:
    """The first call of the process is counted, whichever was imported first."""
    code = f"""
import torch, {first}
import diyfa
from torch.utils.flop_counter import FlopCounterMode
q = torch.zeros(1, 1, 4, 8)
with FlopCounterMode(display=False) as counter:
    diyfa.flash_attention(q, q, q, backend="cpu")
print(counter.get_total_flops())
"""
    assert run_after_torch(code).split() == [str(2 * 4 * 4 * (8 + 8))]


def test_selective_checkpointing_by_name() -> None:
    """The attention's results are kept, all else is computed again."""
    x = torch.randn(2, 4, 6, 16, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return diyfa.flash_attention(x.sin(), x.cos(), x, causal=True, **CPU).tanh()

    (want,) = torch.autograd.grad(layer(x).square().sum(), x)
    once = forward_and_backward((2, 4, 4, 6, 6, 16, 16))
    for keep in ([], [torch.ops.diyfa.attention_fwd.default]):
        contexts = partial(create_selective_checkpoint_contexts, keep)
        found: list[torch.Tensor] = []

        def run(contexts: Any = contexts, found: list[torch.Tensor] = found) -> None:
            out = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
            found.extend(torch.autograd.grad(out.square().sum(), x))

        times = 1 if keep else 2
        assert counted(run) == {**once, "diyfa.attention_fwd": times * once["diyfa.attention_fwd"]}
        torch.testing.assert_close(found[0], want)
