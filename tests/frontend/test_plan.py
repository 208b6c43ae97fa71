"""Calls that skip the dispatcher: only those that nothing looks at, and never with another answer."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from seen import Seen
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import diyfa
from diyfa import flash_attn_interface, ops, registry
from diyfa import plan as planning
from diyfa.options import NO_LENGTHS, AttentionOptions, pack

OPERATOR = "diyfa.attention_fwd.default"


@pytest.fixture
def launches(monkeypatch):
    """Plans of calls that were found, not made, in a world without earlier calls."""
    known, seen = set(), []
    run = ops.run_plan

    def spy(plan, *rest):
        if plan in known:
            seen.append(plan)
        known.add(plan)
        return run(plan, *rest)

    monkeypatch.setattr(planning, "plans", {})
    monkeypatch.setattr(ops, "run_plan", spy)
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


def test_a_deterministic_pytorch_asks_for_deterministic_gradients(launches):
    q, k, v = qkv()
    attend(q, k, v)
    torch.use_deterministic_algorithms(True)
    try:
        attend(q, k, v)
        assert not launches
        attend(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    attend(q, k, v)
    assert [plan.options.deterministic for plan in launches] == [True, False]


@pytest.mark.parametrize("window", [[3, 3], torch.tensor([3, 3])], ids=["list", "tensor"])
@pytest.mark.parametrize("function", ["flash_attention", "flash_attn_func"])
def test_windows_are_remembered_by_their_values(launches, window, function):
    q, k, v = qkv()
    name = "window" if function == "flash_attention" else "window_size"

    def attend(given):
        with diyfa.use_backend("cpu"):
            return getattr(diyfa, function)(q, k, v, **{name: given})

    for size in (3, 1):
        window[0] = window[1] = size
        for _ in range(2):
            assert torch.equal(attend(window), attend((size, size)))
    assert len(launches) == 6 and len(planning.plans) == 2


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


def test_subclasses_transforms_and_duals_take_no_fast_path():
    q, k, v = qkv()
    assert planning.runs_eagerly(q, k, v)
    assert not planning.runs_eagerly(q, torch.nn.Parameter(k, requires_grad=False), v)
    assert not planning.runs_eagerly(q, torch._neg_view(k), v)  # a kernel would read it without its sign
    assert not planning.runs_eagerly(q, k, v.to_sparse())
    inside = []
    torch.func.vmap(lambda x: inside.append(planning.runs_eagerly(x)) or x)(q)
    with forward_ad.dual_level():
        inside.append(planning.runs_eagerly(q))
    with torch.device("cpu"):  # a mode that sees every function
        inside.append(planning.runs_eagerly(q))
    torch.jit.trace(lambda x: (inside.append(planning.runs_eagerly(x)), x + 1)[1], q, check_trace=False)
    assert inside == [False] * 4
    assert planning.runs_eagerly(q)


def test_plans_are_bounded(launches, monkeypatch):
    monkeypatch.setattr(planning, "LIMIT", 3)
    for n in range(1, 9):
        attend(*(x[:, :, :n] for x in qkv()))
        assert len(planning.plans) <= 3


def test_empty_inputs_are_not_launched(launches, monkeypatch):
    def launch(kernel, *args):
        raise AssertionError("there is nothing to launch")

    q, k, v = qkv(requires_grad=True)
    empty = q[:, :, :0]
    with monkeypatch.context() as patch:
        for kernel in diyfa.registry.load_backend("cpu").kernels:
            if kernel.op == "attention_fwd":
                patch.setitem(vars(kernel), "launch", functools.partial(launch, kernel))
        for _ in range(3):
            assert attend(empty, k, v).shape == empty.shape
            assert torch.equal(attend(q, k[:, :, :0], v[:, :, :0]), torch.zeros_like(q))
    for _ in range(3):
        grads = torch.autograd.grad(attend(empty, k, v).sum(), (q, k, v))
        assert [x.shape for x in grads] == [x.shape for x in (q, k, v)] and not any(x.any() for x in grads)
        sinks = torch.ones(3, requires_grad=True)
        (dsinks,) = torch.autograd.grad(attend(q, k[:, :, :0], v[:, :, :0], sinks=sinks).sum(), sinks)
        assert not dsinks.any()


def step(q, k, v, dout, **kwargs):
    return torch.autograd.grad(attend(q, k, v, causal=True, **kwargs), (q, k, v), dout)


@pytest.fixture
def trained(launches):
    """Inputs that want gradients, a gradient, and what the ordinary way makes of them."""
    q, k, v = qkv(requires_grad=True)
    dout = torch.randn_like(q)
    with Seen() as seen:
        expected = step(q, k, v, dout)
    assert "diyfa.attention_bwd.default" in seen.names
    step(q, k, v, dout)  # makes the plan
    assert not launches
    return q, k, v, dout, expected


def test_gradients_of_a_repeated_call_are_the_same(trained, launches):
    q, k, v, dout, expected = trained
    for n in (1, 2):
        assert all(torch.equal(a, b) for a, b in zip(step(q, k, v, dout), expected, strict=True))
        assert len(launches) == n
    out = attend(q, k, v, causal=True)
    (dq,) = torch.autograd.grad(out, q, dout, retain_graph=True)
    assert torch.equal(dq, expected[0]) and torch.equal(torch.autograd.grad(out, q, dout)[0], dq)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, q, dout)


def test_batches_of_gradients(trained):
    """They have no memory: operators are called for one of each batch after another."""
    leaves = trained[:3]
    out, lse = attend(*leaves, causal=True, return_lse=True)
    a, b = (torch.randn(shape, requires_grad=True) for shape in ((20, 16), (16, 24)))
    product = diyfa.triton_matmul(a, b, precision="ieee", activation="relu", backend="cpu")
    for outputs, inputs in (((out,), leaves), ((out, lse), leaves), ((lse,), leaves), ((product,), (a, b))):
        grads = [torch.randn(3, *x.shape) for x in outputs]
        each = [torch.autograd.grad(outputs, inputs, x, retain_graph=True) for x in zip(*grads, strict=True)]
        found = torch.autograd.grad(outputs, inputs, grads, is_grads_batched=True, retain_graph=True)
        torch.testing.assert_close(found, tuple(map(torch.stack, zip(*each, strict=True))))


def test_a_second_derivative_is_refused_here_too(trained, launches):
    q, k, v, dout, expected = trained
    out = attend(q, k, v, causal=True)
    (dq,) = torch.autograd.grad(out, q, dout.requires_grad_(), create_graph=True)
    assert launches and torch.equal(dq, expected[0])
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()
    (dq,) = torch.autograd.grad(attend(q, k, v, causal=True).sum(), q, create_graph=True)  # of inputs only
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (dq.sum() + q.sum()).backward()


def test_an_input_changed_in_place_is_noticed(trained, launches):
    q, k, v, dout, _ = trained
    out = attend(q, k, v, causal=True)
    with torch.no_grad():
        k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dout)
    assert launches


def test_modes_in_the_backward_pass_see_the_operator(trained, launches):
    q, k, v, dout, expected = trained
    out = attend(q, k, v, causal=True)
    with Seen() as seen:
        grads = torch.autograd.grad(out, (q, k, v), dout)
    assert launches and "diyfa.attention_bwd.default" in seen.names
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    out = attend(q, k, v, causal=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.autograd.grad(out, (q, k, v), dout)
    assert "diyfa::attention_bwd" in {event.name for event in profile.events()}


def test_saved_tensors_may_be_packed(trained, launches):
    q, k, v, dout, expected = trained

    def forward():
        return attend(q, k, v, causal=True)

    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, torch.clone):
        cloned = forward()
    assert len(packed) == 5
    for out in (cloned, checkpoint(lambda *_: forward(), q, k, v, use_reentrant=False)):
        grads = torch.autograd.grad(out, (q, k, v), dout)
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    assert launches


def test_a_gradient_with_other_strides(trained, launches):
    q, k, v, dout, expected = trained
    turned = dout.transpose(1, 2).contiguous().transpose(1, 2)
    negative = torch._neg_view(-dout)
    for other in (turned, negative, dout.double().float()):
        assert all(torch.equal(a, b) for a, b in zip(step(q, k, v, other), expected, strict=True))
    ones = torch.ones((), dtype=q.dtype).expand(q.shape)
    assert torch.equal(step(q, k, v, ones)[2], step(q, k, v, torch.ones_like(q))[2])
    assert len(launches) == 5


@pytest.mark.parametrize("dims", [0, 1, 2, 3, (1, 2), (0, 1, 2, 3)], ids=str)
def test_kernels_read_no_expanded_gradient(launches, monkeypatch, dims):
    """As from out.sum(2): not all of them take a stride of 0. Repeated, seen by a mode, and into given gradients."""
    seen = []

    def recording(kernel):
        def launch(problem, tensors, out, lse, dout, *rest):
            seen.append(dout.stride())
            return kernel.launch(problem, tensors, out, lse, dout, *rest)

        return replace(kernel, launch=launch) if kernel.op == "attention_bwd" else kernel

    cpu = registry.load_backend("cpu")
    monkeypatch.setattr(cpu, "kernels", [recording(kernel) for kernel in cpu.kernels])
    leaves = qkv(requires_grad=True)
    loss = diyfa.reference_attention(*leaves, causal=True).sum(dims).square().sum()
    expected = torch.autograd.grad(loss, leaves)

    def gradients():
        return torch.autograd.grad(attend(*leaves, causal=True).sum(dims).square().sum(), leaves)

    found = [gradients() for _ in range(3)]
    with Seen():
        found.append(gradients())
    q, k, v = (x.detach().transpose(1, 2) for x in leaves)
    rest = (0.0, None, True, -1, -1, 0.0, None)
    with diyfa.use_backend("cpu"):
        out, lse, _, _ = flash_attn_interface._flash_attn_forward(q, k, v, *rest, False)
        total = out.transpose(1, 2).sum(dims, keepdim=True)
        dout = (2 * total).expand(2, 3, 17, 16).transpose(1, 2)
        buffers = [torch.empty_like(x) for x in (q, k, v)]
        flash_attn_interface._flash_attn_backward(dout, q, k, v, out, lse, *buffers, *rest, False)
    found.append([x.transpose(1, 2) for x in buffers])
    for grads in found:
        torch.testing.assert_close(list(grads), list(expected), rtol=1e-4, atol=1e-4)
    assert len(seen) == 5 and all(stride[-1] == 1 and 0 not in stride for stride in seen)


def test_meta_tensors_are_never_planned(launches):
    q, k, v = (x.to("meta") for x in qkv())
    for _ in range(3):
        assert diyfa.flash_attention(q, k, v).is_meta
    assert not launches and not planning.plans


def flash_attn(function, *tensors, **kwargs):
    with diyfa.use_backend("cpu"):
        return function(*tensors, **kwargs)


def test_functions_of_flash_attn_repeat_too(launches):
    q, k, v = (x.transpose(1, 2).contiguous() for x in qkv())
    options = {"causal": True, "window_size": (5, 2), "softmax_scale": 0.3}
    outs = [flash_attn(flash_attn_interface.flash_attn_func, q, k, v, **options) for _ in range(3)]
    assert len(launches) == 2 and torch.equal(outs[0], outs[2])
    out, lse, mask = flash_attn(flash_attn_interface.flash_attn_func, q, k, v, **options, return_attn_probs=True)
    assert len(launches) == 3 and torch.equal(out, outs[0]) and lse.shape == (2, 3, 17) and mask.numel() == 0
    for dropout_p in (0.5, 0.5):
        flash_attn(flash_attn_interface.flash_attn_func, q, k, v, dropout_p, causal=True)
    assert len(launches) == 4  # the second one with dropout


def test_packed_gradients_stay_packed(launches):
    qkv = torch.randn(2, 17, 3, 2, 16, requires_grad=True)
    function = flash_attn_interface.flash_attn_qkvpacked_func
    packed = [flash_attn(function, qkv, causal=True) for _ in range(3)]
    assert len(launches) == 2
    with diyfa.use_backend("cpu"):
        separate = [flash_attn_interface.flash_attn_func(*qkv.unbind(2), causal=True) for _ in range(3)]
        grads = [torch.autograd.grad(out.sin().sum(), qkv)[0] for out in (*separate, *packed)]
    assert len(launches) >= 4 and all(torch.equal(grads[0], grad) for grad in grads)


def test_an_operator_call_does_not_pass_on_its_backend(launches):
    """Its plan belongs to no named backend, so that its backward pass follows the one in force."""
    q, k, v = qkv(requires_grad=True)
    lengths, options = NO_LENGTHS, AttentionOptions("bhsd", 0.25, needs_grad=True)
    with diyfa.use_backend("cpu"):
        torch.ops.diyfa.attention_fwd(q, k, v, "", *pack(lengths, options))
    grads = [torch.autograd.grad(attend(q, k, v).sum(), q)[0] for _ in range(3)]
    assert len(launches) == 2 and torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


@pytest.mark.parametrize("function", ["flash_attention", "flash_attn_func", "flash_attn_with_kvcache"])
def test_a_compiled_call_does_not_depend_on_plans_of_others(launches, function):
    """A program that torch.compile made is not made anew because of them."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    call = torch.compile(lambda *x: getattr(diyfa, function)(*x), fullgraph=True, backend=counter)
    tensors = [x.transpose(1, 2).contiguous() for x in qkv()]
    with diyfa.use_backend("cpu"):
        diyfa.flash_attention(*tensors, sinks=torch.zeros(17))
        for n in range(1, 5):
            getattr(diyfa, function)(*(x[:, :n] for x in tensors))
            call(*tensors)
            assert len(planning.plans) >= n and counter.frame_count == 1
