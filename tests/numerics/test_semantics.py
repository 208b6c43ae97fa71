"""What the front end promises about memory, tracing and empty calls, whatever backend runs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import diyfa
from diyfa import plan as planning
from diyfa import registry

CPU = {"backend": "cpu"}
INF = float("inf")


def randn(*shape, grad=True, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)


def offsets(*values):
    return torch.tensor(values, dtype=torch.int32)


# ---- Nothing is copied --------------------------------------------------------------------------------------------


@contextmanager
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list]:
    """The arguments of every launch of the CPU backend inside the block. Sizes must be new: choices are remembered."""
    seen: list = []
    cpu = registry.load_backend("cpu")

    def recording(kernel):
        def launch(*args):
            seen.append(args)
            return kernel.launch(*args)

        return replace(kernel, launch=launch)

    monkeypatch.setattr(planning, "plans", {})
    monkeypatch.setattr(cpu, "kernels", [recording(kernel) for kernel in cpu.kernels])
    yield seen
    monkeypatch.undo()


def place(x: torch.Tensor) -> tuple:
    return x.data_ptr(), x.shape, x.stride()


VIEWS = {
    "contiguous": lambda: [randn(2, 9, 4, 16) for _ in range(3)],
    "transposed": lambda: [randn(2, 4, 9, 16).transpose(1, 2) for _ in range(3)],
    "packed": lambda: list(randn(2, 9, 3, 4, 16).unbind(2)),
    "packed_outer": lambda: list(randn(3, 2, 9, 4, 16).unbind(0)),
    "sliced": lambda: [randn(3, 12, 5, 19)[1:, 2:11, 1:, 3:] for _ in range(3)],
    "expanded": lambda: [randn(1, 9, 4, 16).expand(2, 9, 4, 16) for _ in range(3)],
    "sequence_first": lambda: [randn(9, 2, 4, 16).transpose(0, 1) for _ in range(3)],
}


@pytest.mark.parametrize("view", VIEWS)
def test_kernels_get_the_callers_memory(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = VIEWS[view]()
    with launches(monkeypatch) as seen:
        out = diyfa.flash_attention_v2(q, k, v, causal=True, **CPU)
        dense = diyfa.flash_attention_v2(*(x.contiguous() for x in (q, k, v)), causal=True, **CPU)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    (_, forward, written, _), _, (_, backward, saved, *_) = seen
    for tensors in (forward, backward):
        assert [place(x) for x in tensors[:3]] == [place(x) for x in (q, k, v)]
    assert place(written) == place(saved) == place(out)
    torch.testing.assert_close(out, dense)


@pytest.mark.parametrize("view", ["contiguous", "transposed", "sequence_first"])
def test_results_lie_in_memory_as_the_inputs_do(view: str) -> None:
    q, k, v = VIEWS[view]()
    out = diyfa.flash_attention_v2(q, k, v, **CPU)
    assert out.stride() == q.stride()
    narrow = diyfa.flash_attention_v2(q, k, v[..., :8], **CPU)
    order = sorted(range(4), key=q.stride, reverse=True)
    assert narrow.is_contiguous() or narrow.permute(order).is_contiguous()
    for x, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert grad.stride() == x.stride()


# ---- torch.compile ------------------------------------------------------------------------------------------------


def full(q, k, v, bias, sinks, lens, state, causal):
    out, lse = diyfa.flash_attention(
        q, k, v, causal=causal, window=(50, -1), seq_lens=lens, attn_bias=bias, sinks=sinks, softcap=3.0,
        dropout_p=0.3, rng_state=state, return_lse=True, **CPU,
    )  # fmt: skip
    return out.sin().sum() + torch.where(lse.isinf(), 0.0, lse).cos().sum()


def packed_full(q, k, v, slopes, sinks, cu_q, cu_k, state):
    out, lse = diyfa.flash_attention_varlen(
        q, k, v, cu_q, cu_k, 12, 12, window=(7, 1), alibi_slopes=slopes, sinks=sinks, dropout_p=0.3, rng_state=state,
        return_lse=True, **CPU,
    )  # fmt: skip
    return out.sin().sum() + torch.where(lse.isinf(), 0.0, lse).cos().sum()


def agree(compiled, function, leaves, *rest) -> None:
    torch.testing.assert_close(compiled(*leaves, *rest), function(*leaves, *rest))
    expected = torch.autograd.grad(function(*leaves, *rest), leaves)
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves, *rest), leaves), expected)
    assert all(int(x.count_nonzero()) for x in expected)


def compiled_agrees(function, leaves, *rest, dynamic=None) -> None:
    torch.compiler.reset()
    agree(torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager"), function, leaves, *rest)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_with_dropout_bias_sinks(dynamic: bool) -> None:
    """For lengths and masks one after another."""
    torch.compiler.reset()
    compiled = torch.compile(full, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for sq, sk, causal in ((9, 14, True), (20, 25, True), (20, 25, False)):
        leaves = [randn(3, 4, sq, 16), randn(3, 2, sk, 16), randn(3, 2, sk, 8), randn(3, 1, sq, sk), randn(4)]
        agree(compiled, full, leaves, offsets(sk, 5, 1), torch.tensor([3, 4]), causal)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_packed_sequences(dynamic: bool) -> None:
    cu_q, cu_k = offsets(0, 5, 5, 17), offsets(0, 12, 13, 20)
    leaves = [randn(19, 4, 16), randn(21, 2, 16), randn(21, 2, 8)]
    compiled_agrees(
        lambda q, k, v, sinks, *rest: packed_full(q, k, v, rest[0], sinks, *rest[1:]),
        [*leaves, randn(4)],
        torch.rand(3, 4), cu_q, cu_k, torch.tensor([3, 4]), dynamic=dynamic,
    )  # fmt: skip
    # One tensor for both sides, which the tracer would not take twice.
    same = lambda q, k, v, cu: diyfa.flash_attention_varlen(q, k, v, cu, cu, 12, 12, True, **CPU).sin().sum()  # noqa: E731
    compiled_agrees(same, [randn(17, 4, 16), randn(17, 2, 16), randn(17, 2, 8)], cu_q, dynamic=dynamic)


USES = {
    "qkv": lambda x, y: (x, x, x), "kv": lambda x, y: (y, x, x), "qk": lambda x, y: (x, x, y),
    "qv": lambda x, y: (x, y, x),
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_one_tensor_in_several_places(use: str) -> None:
    """Its gradient is the sum of those of its places, eager and compiled."""
    x, y = randn(1, 2, 7, 8, dtype=torch.float64), randn(1, 2, 7, 8, dtype=torch.float64, seed=1)

    def attend(x, y):
        return (diyfa.flash_attention(*USES[use](x, y), **CPU).sin() + 0 * y).sum()

    expected = torch.autograd.grad((diyfa.reference_attention(*USES[use](x, y)).sin() + 0 * y).sum(), (x, y))
    torch.testing.assert_close(torch.autograd.grad(attend(x, y), (x, y)), expected)
    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x, y), (x, y)), expected)


def test_offsets_are_not_read_while_tracing_and_cannot_leave_the_tensors() -> None:
    """A traced call cannot check values; wrong ones read nothing outside."""
    q = randn(6, 2, 8, grad=False)
    attend = lambda cu: diyfa.flash_attention_varlen(q, q, q, cu, cu, 6, 6, **CPU)  # noqa: E731
    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(offsets(0, 2, 6)), attend(offsets(0, 2, 6)))
    with pytest.raises(ValueError, match="ascend"):
        attend(offsets(0, 2, 99))
    torch.testing.assert_close(compiled(offsets(0, 2, 99)), attend(offsets(0, 2, 6)))
    torch.testing.assert_close(compiled(offsets(-5, 2, 6)), attend(offsets(0, 2, 6)))


# ---- Autocast -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_packed", [False, True])
def test_autocast(is_packed: bool) -> None:
    leaves, cu = [randn(*([12] if is_packed else [1, 12]), 2, 16) for _ in range(3)], offsets(0, 5, 12)

    def attend(*x):
        lengths = (cu, cu, 7, 7) if is_packed else ()
        function = diyfa.flash_attention_varlen if is_packed else diyfa.flash_attention_v2
        return function(*x, *lengths, causal=True, return_lse=True, **CPU)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = attend(*leaves)
        double, _ = attend(*(x.double() for x in leaves))
        with torch.autocast("cpu", enabled=False):
            assert attend(*leaves)[0].dtype == torch.float32
    assert (out.dtype, lse.dtype, double.dtype) == (torch.bfloat16, torch.float32, torch.float64)
    grads = torch.autograd.grad(out.float().sum() + lse.sum(), leaves)
    assert all(x.dtype == torch.float32 and bool(x.isfinite().all()) for x in grads)
    expected, expected_lse = attend(*(x.detach().bfloat16() for x in leaves))
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


# ---- Empty calls, rows that see nothing ---------------------------------------------------------------------------

EMPTY = {
    "no_rows": ((0, 0), offsets(0, 0), offsets(0, 0), 0, 0),
    "no_keys": ((6, 0), offsets(0, 2, 4), offsets(0, 0, 0), 2, 0),
    "no_keys_but_a_maximum": ((6, 0), offsets(0, 2, 4), offsets(0, 0, 0), 2, 9),
    "empty_sequences": ((6, 3), offsets(0, 2, 4), offsets(0, 0, 0), 2, 0),
    "no_sequences": ((6, 3), offsets(0), offsets(0), 2, 3),
    "no_queries": ((6, 3), offsets(0, 0), offsets(0, 3), 0, 3),
    "queries_beyond": ((6, 3), offsets(4, 4), offsets(0, 3), 0, 3),
}


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", EMPTY)
def test_packed_calls_that_compute_nothing(name: str, sinks: bool) -> None:
    (total_q, total_k), cu_q, cu_k, longest_q, longest_k = EMPTY[name]
    q, k, v = randn(total_q, 4, 16), randn(total_k, 2, 16), randn(total_k, 2, 8)
    sink = randn(4) if sinks else None
    out, lse = diyfa.flash_attention_varlen(
        q, k, v, cu_q, cu_k, longest_q, longest_k, True, sinks=sink, return_lse=True, **CPU
    )
    assert (out.shape, lse.shape) == ((total_q, 4, 8), (4, total_q))
    assert int(out.count_nonzero()) == 0
    covered = torch.zeros(total_q, dtype=torch.bool)
    covered[int(cu_q[0]) : int(cu_q[-1])] = True
    expected = torch.where(covered, sink.detach()[:, None] if sinks else INF, INF).expand(4, total_q)
    assert torch.equal(lse, expected)
    dlse = torch.where(covered, 1.0, float("nan")).expand(4, total_q)
    leaves = (q, k, v, *((sink,) if sinks else ()))
    grads = torch.autograd.grad((out, lse), leaves, (torch.full_like(out, float("nan")), dlse))
    assert all(int(x.count_nonzero()) == 0 and x.shape == y.shape for x, y in zip(grads[:3], leaves, strict=False))
    if sinks:
        assert torch.equal(grads[3], covered.sum().expand(4).float())
