"""Where a call's dropout mask comes from: PyTorch's generator, or the rng_state that the caller gives."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import diyfa
from diyfa.attention import new_rng_state

CPU = {"backend": "cpu"}


def qkv(*, seqlen=12, grad=True):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, seqlen, 8, generator=generator).requires_grad_(grad) for _ in range(3)]


def attend(q, k, v, **options):
    return diyfa.flash_attention(q, k, v, **{"dropout_p": 0.4, **options}, **CPU)


def packed(q, k, v, **options):
    cu = torch.tensor([0, 12, 24], dtype=torch.int32)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    return diyfa.flash_attention_varlen(q, k, v, cu, cu, 12, 12, **{"dropout_p": 0.4, **options}, **CPU)


def gradients(function, leaves):
    return torch.autograd.grad(function(*leaves).sin().sum(), leaves)


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_mask_is_the_one_that_can_be_inspected() -> None:
    """With equal scores and v the identity, the output shows which weights were kept."""
    size, p = 16, 0.3
    q = k = torch.zeros(2, 3, size, 8, dtype=torch.float64)
    v = torch.eye(size, dtype=torch.float64).expand(2, 3, size, size)
    state = torch.tensor([123456789, 42])
    out = diyfa.flash_attention(q, k, v, dropout_p=p, rng_state=state, **CPU)
    keep = diyfa.dropout_mask(2, 3, size, size, p, *state.tolist())
    torch.testing.assert_close(out, keep.double() / (1 - p) / size)


@pytest.mark.parametrize("function", [attend, packed])
def test_calls_draw_from_the_generator(function) -> None:
    leaves = qkv(grad=False)
    torch.manual_seed(7)
    first, second = function(*leaves), function(*leaves)
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(function(*leaves), first) and torch.equal(function(*leaves), second)
    torch.manual_seed(8)
    assert not torch.equal(function(*leaves), first)


@pytest.mark.parametrize("function", [attend, packed])
def test_without_dropout_nothing_is_drawn(function) -> None:
    leaves = qkv(grad=False)
    before = torch.get_rng_state()
    function(*leaves, dropout_p=0.0)
    assert torch.equal(torch.get_rng_state(), before)
    function(*leaves, rng_state=torch.tensor([1, 2]))  # nor when the caller says which mask
    assert torch.equal(torch.get_rng_state(), before)
    function(*leaves)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("function", [attend, packed])
def test_an_equal_rng_state_gives_an_equal_mask(function) -> None:
    leaves = qkv()
    state = torch.tensor([5, -1])
    run = lambda *x: function(*x, rng_state=state)  # noqa: E731
    assert torch.equal(run(*leaves), run(*leaves))
    assert same(gradients(run, leaves), gradients(run, leaves))
    for other in ([6, -1], [5, 0], [5 + 2**32, -1], [5, 2**32 - 1]):
        assert not torch.equal(function(*leaves, rng_state=torch.tensor(other)), run(*leaves)), other
    assert torch.equal(function(*leaves, dropout_p=0.0, rng_state=state), function(*leaves, dropout_p=0.0))


def test_the_backward_pass_uses_the_mask_of_its_forward_pass() -> None:
    """Calls and reseeding in between change nothing: the state is saved with the call."""
    leaves = qkv()
    torch.manual_seed(11)
    state = new_rng_state(torch.device("cpu"))
    assert (state.shape, state.dtype) == ((2,), torch.int64)
    torch.manual_seed(11)
    out = attend(*leaves)
    attend(*leaves)
    torch.manual_seed(99)
    expected = gradients(lambda *x: diyfa.reference_attention(*x, dropout_p=0.4, rng_state=state), leaves)
    torch.testing.assert_close(torch.autograd.grad(out.sin().sum(), leaves), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("function", [attend, packed])
def test_checkpointing_repeats_the_mask(function, reentrant: bool) -> None:
    leaves = qkv()
    torch.manual_seed(1)
    expected = gradients(function, leaves)
    torch.manual_seed(1)
    checkpoint(function, *leaves, use_reentrant=reentrant).sin().sum().backward()
    assert same([x.grad for x in leaves], expected)


@pytest.mark.parametrize("function", [attend, packed])
def test_compiled_calls_draw_as_eager_ones_do(function) -> None:
    torch.compiler.reset()
    leaves = qkv()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    expected = [gradients(function, leaves) for _ in range(2)]
    torch.manual_seed(1)
    got = [gradients(compiled, leaves) for _ in range(2)]
    assert same(got[0], expected[0]) and same(got[1], expected[1]) and not same(got[0], got[1])


def test_compiled_checkpoint_repeats_the_mask() -> None:
    torch.compiler.reset()
    leaves = qkv()
    compiled = torch.compile(
        lambda *x: checkpoint(attend, *x, use_reentrant=False), fullgraph=True, backend="aot_eager"
    )
    torch.manual_seed(1)
    expected = gradients(attend, leaves)
    torch.manual_seed(1)
    assert same(gradients(compiled, leaves), expected)
