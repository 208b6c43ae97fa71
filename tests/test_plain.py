"""Calls that skip the dispatcher: only those that nothing looks at, and never with another answer."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import diyfa
from diyfa import ops, plain

OPERATOR = "diyfa.attention_fwd.default"


class Seen(TorchDispatchMode):
    """Names of the operators called in the block."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch):
    """Launches of plans, in a world without earlier calls."""
    seen = []
    run = ops.run_plan
    monkeypatch.setattr(plain, "plans", {})
    monkeypatch.setattr(ops, "run_plan", lambda plan, *qkv: seen.append(plan) or run(plan, *qkv))
    return seen


def qkv(dtype=torch.float32, **kwargs):
    torch.manual_seed(0)
    return [torch.randn(2, 3, 17, 16, dtype=dtype, **kwargs) for _ in range(3)]


def attend(*tensors, **kwargs):
    return diyfa.flash_attention(*tensors, backend="cpu", **kwargs)


def test_an_equal_call_is_launched_at_once_and_answers_the_same(launches):
    q, k, v = qkv()
    first = attend(q, k, v, causal=True, return_lse=True)
    assert not launches
    second = attend(q, k, v, causal=True, return_lse=True)
    assert len(launches) == 1
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()
    other = [x + 1 for x in (q, k, v)]  # equal to the call, not to its tensors
    assert torch.equal(attend(*other, causal=True), attend(*other, causal=True, window=(17, 0)))
    assert len(launches) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"causal": False}, {"sm_scale": 0.5}, {"window": (3, 3)}, {"softcap": 2.0}, {"variant": "v1"},
        {"deterministic": True},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_another_option_is_another_call(launches, change):
    q, k, v = qkv()
    attend(q, k, v, causal=True)
    got = attend(q, k, v, **{"causal": True, **change})
    assert not launches
    with Seen():  # not plain
        assert torch.equal(got, attend(q, k, v, **{"causal": True, **change}))


def test_other_tensors_are_another_call(launches):
    q, k, v = qkv()
    attend(q, k, v)
    attend(q.transpose(1, 2).contiguous().transpose(1, 2), k, v)  # strides
    attend(q.half(), k.half(), v.half())
    attend(q[:, :, :5], k, v)
    attend(q[:1], k[:1], v[:1])
    buffer = torch.empty(q.numel() + 1)
    buffer[1:] = q.flatten()
    attend(buffer[1:].view(q.shape), k, v)  # alignment
    assert not launches


def test_what_is_wrong_is_refused_after_a_right_call_too(launches):
    q, k, v = qkv()
    attend(q, k, v)
    with pytest.raises(TypeError, match="dtypes must match"):
        attend(q, k.double(), v)
    with pytest.raises(ValueError, match="same heads"):
        attend(q, k, v[:, :, :-1])
    with pytest.raises(TypeError, match="window"):
        attend(q, k, v, window="ab")
    with pytest.raises(TypeError, match="sm_scale"):
        attend(q, k, v, sm_scale=[0.5])
    with pytest.raises(TypeError, match="k must be"):
        attend(q, None, v)
    with pytest.raises(ValueError, match="dropout_p"):
        attend(q, k, v, dropout_p=1.5)
    assert not launches


@pytest.mark.parametrize("bad", [[3, 3], torch.tensor([3, 3])], ids=["list", "tensor"])
def test_options_that_cannot_be_keys_still_work(launches, bad):
    q, k, v = qkv()
    for _ in range(2):
        assert torch.equal(attend(q, k, v, window=bad), attend(q, k, v, window=(3, 3)))


def test_dropout_draws_at_every_call(launches):
    q, k, v = qkv()
    assert not torch.equal(attend(q, k, v, dropout_p=0.5), attend(q, k, v, dropout_p=0.5))
    assert not launches


def test_gradients_go_through_autograd(launches):
    q, k, v = qkv()
    attend(q, k, v)
    q.requires_grad_()
    out = attend(q, k, v)
    assert out.requires_grad
    with torch.no_grad():
        assert not attend(q, k, v).requires_grad and len(launches) == 1


def test_autocast_is_another_call(launches):
    q, k, v = qkv()
    attend(q, k, v)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert attend(q, k, v).dtype == torch.bfloat16
    assert attend(q, k, v).dtype == torch.float32
    assert len(launches) == 1


def test_three_dimensional_inputs_keep_their_shape(launches):
    q, k, v = (x.flatten(0, 1) for x in qkv())
    for _ in range(2):
        assert attend(q, k, v).shape == q.shape


def test_the_backend_in_force_is_part_of_the_call(launches):
    q, k, v = qkv()
    with diyfa.use_backend("cpu"):
        diyfa.flash_attention(q, k, v)
        diyfa.flash_attention(q, k, v)
    assert len(launches) == 1
    with pytest.raises(ValueError, match=r"backend|device"):  # CPU tensors have no backend of their own
        diyfa.flash_attention(q, k, v)


def test_modes_and_profilers_see_the_operator(launches):
    q, k, v = qkv()
    attend(q, k, v)
    with Seen() as seen:
        attend(q, k, v)
    assert OPERATOR in seen.names
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attend(q, k, v)
    assert "diyfa::attention_fwd" in {event.name for event in profile.events()}
    graph = make_fx(lambda *tensors: attend(*tensors))(q, k, v)
    assert OPERATOR in {str(node.target) for node in graph.graph.nodes}
    assert not launches


def test_subclasses_transforms_and_duals_are_not_plain():
    q, k, v = qkv()
    assert plain.is_plain(q, k, v)
    assert not plain.is_plain(q, torch.nn.Parameter(k, requires_grad=False), v)
    assert not plain.is_plain(q, torch._neg_view(k), v)  # a kernel would read it without its sign
    assert not plain.is_plain(q, k, v.to_sparse())
    inside = []
    torch.func.vmap(lambda x: inside.append(plain.is_plain(x)) or x)(q)
    with forward_ad.dual_level():
        inside.append(plain.is_plain(q))
    with torch.device("cpu"):  # a mode that sees every function
        inside.append(plain.is_plain(q))
    torch.jit.trace(lambda x: (inside.append(plain.is_plain(x)), x + 1)[1], q, check_trace=False)
    assert inside == [False] * 4
    assert plain.is_plain(q)


def test_plans_are_bounded(launches, monkeypatch):
    monkeypatch.setattr(plain, "LIMIT", 3)
    for n in range(1, 9):
        attend(*(x[:, :, :n] for x in qkv()))
        assert len(plain.plans) <= 3


def test_empty_inputs_are_not_launched(launches):
    q, k, v = qkv()
    empty = q[:, :, :0]
    for _ in range(2):
        assert attend(empty, k, v).shape == empty.shape
        assert torch.equal(attend(q, k[:, :, :0], v[:, :, :0]), torch.zeros_like(q))
    assert not launches
