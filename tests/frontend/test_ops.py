"""The operators inside PyTorch: opcheck, torch.compile, autograd, threads."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode

import diyfa
import diyfa.ops
from diyfa import plan as planning
from diyfa import registry
from diyfa.options import AttentionOptions, Lengths, pack

CPU = {"backend": "cpu"}


def tensors(*shapes, dtype=torch.float32, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad) for s in shapes]


def features(seq_lens=None, slopes=None, bias=None, sinks=None, layout="bhsd", window=(-1, -1), softcap=0.0):
    """What follows q, k, v in the schema of attention_fwd."""
    checked = AttentionOptions(
        layout, 0.25, *window, softcap, alibi_slopes=slopes, attn_bias=bias, sinks=sinks, needs_grad=True,
        bias_grad=bias is not None, backend="cpu",
    )  # fmt: skip
    return pack(Lengths(seq_lens=seq_lens), checked)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_opcheck_attention(layout: str) -> None:
    shapes = ((2, 4, 6, 16), (2, 2, 9, 16), (2, 2, 9, 8))
    if layout == "bshd":
        shapes = tuple((b, s, h, d) for b, h, s, d in shapes)
    q, k, v = tensors(*shapes, dtype=torch.float16, grad=False)
    bias, sinks = torch.randn(4, 6, 9, dtype=torch.float16), torch.randn(4)
    lens = torch.tensor([9, 5], dtype=torch.int32)
    rest = features(lens, torch.rand(4), bias, sinks, layout, (3, 0), 2.0)
    torch.library.opcheck(torch.ops.diyfa.attention_fwd.default, (q, k, v, "", *rest))
    out, lse = torch.ops.diyfa.attention_fwd(q, k, v, "", *rest)
    for dlse in (None, torch.randn_like(lse)):
        args = (torch.randn_like(out), dlse, q, k, v, out, lse, "", *rest)
        torch.library.opcheck(torch.ops.diyfa.attention_bwd.default, args)
    rest = features(lens, torch.rand(4), None, sinks, layout, (3, 0), 2.0)
    into = tuple(torch.empty_like(x) for x in (q, k, v, lse))
    args = (torch.randn_like(out), None, q, k, v, out, lse, *into, *rest)
    torch.library.opcheck(torch.ops.diyfa.attention_bwd_out.default, args)


VIEWS = {
    "transposed": lambda x: x.transpose(1, 2),
    "sliced": lambda x: x[..., 3:19],
    "expanded": lambda x: x[:1].expand(2, 6, 4, 24),
}


@pytest.mark.parametrize("view", VIEWS)
def test_opcheck_strides(view: str) -> None:
    """Fake kernels promise the strides that the real ones deliver."""
    q, k, v = (VIEWS[view](torch.randn(2, 6, 4, 24)) for _ in range(3))
    args = (q, k, v, "", *features())
    torch.library.opcheck(torch.ops.diyfa.attention_fwd.default, args)
    out, lse = torch.ops.diyfa.attention_fwd(*args)
    args = (torch.randn_like(out), None, q, k, v, out, lse, "", *features())
    torch.library.opcheck(torch.ops.diyfa.attention_bwd.default, args)


def test_opcheck_matmul() -> None:
    a, b, bias = tensors((20, 30), (30, 40), (20,), grad=False)
    for dtype in (torch.float16, torch.float32):
        options = (None, True, "ieee", dtype, dtype, None, "auto", False, "cpu")
        torch.library.opcheck(torch.ops.diyfa.matmul.default, (a, b, None, None, None, *options))
    options = ([16, 16, 16], True, "ieee", torch.float16, torch.bfloat16, "gelu", "tiled", False, "cpu")
    torch.library.opcheck(torch.ops.diyfa.matmul.default, (b.t(), a.t(), bias, None, None, *options))
    out = torch.empty(20, 40)
    options = (None, True, "ieee", torch.float32, torch.float32, "relu", "auto", False, "cpu")
    torch.library.opcheck(torch.ops.diyfa.matmul_out.default, (a, b, None, None, None, out, *options))
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    options = (None, True, "ieee", a8.dtype, torch.bfloat16, None, "auto", False, "cpu")
    torch.library.opcheck(
        torch.ops.diyfa.matmul.default,
        (a8, b8, None, torch.ones(20, 1), torch.ones(()), *options),
        test_utils="test_faketensor",  # the others multiply or differentiate the inputs
    )


def test_dynamic_shapes_compile_once() -> None:
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def attend(q, k, v):
        return diyfa.flash_attention_v2(q, k, v, causal=True, **CPU)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for seqlen in (19, 21, 50, 77):  # sizes that differ from each other, or the tracer takes them for the same
        q, k, v = tensors((3, seqlen, 4, 16), (3, seqlen, 2, 16), (3, seqlen, 2, 16), grad=False)
        torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))
        counts.append(counter.frame_count)
    assert counts[0] > 0 and set(counts) == {counts[0]}


def test_compile_with_a_longest_length_computed_in_the_graph() -> None:
    """Its value is known only when the graph runs; nothing may ask for it before."""
    torch.compiler.reset()

    def attend(q, cu_seqlens):
        longest = cu_seqlens.diff().max().item()
        return diyfa.flash_attention_varlen(q, q, q, cu_seqlens, cu_seqlens, longest, longest, causal=True, **CPU)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        for lens in ([3, 9], [7, 5]):
            q, cu_seqlens = tensors((12, 2, 8), grad=False)[0], torch.tensor([0, *lens], dtype=torch.int32).cumsum(0)
            cu_seqlens = cu_seqlens.int()
            torch.testing.assert_close(compiled(q, cu_seqlens), attend(q, cu_seqlens))


def test_export_with_any_length() -> None:
    """Lengths taken from shapes stay symbolic."""

    class Packed(torch.nn.Module):
        def forward(self, q, cu_seqlens):
            total = q.shape[0]
            return diyfa.flash_attention_varlen(q, q, q, cu_seqlens, cu_seqlens, total, total, causal=True, **CPU)

    def arguments(*lens):
        return tensors((sum(lens), 2, 8), grad=False)[0], torch.tensor([0, *lens]).cumsum(0).int()

    shapes = ({0: torch.export.Dim("total", min=2, max=4096)}, None)
    exported = torch.export.export(Packed(), arguments(3, 9), dynamic_shapes=shapes).module()
    for lens in ((3, 9), (20, 11)):
        torch.testing.assert_close(exported(*arguments(*lens)), Packed()(*arguments(*lens)))


def alike(function, *args, dynamic=None):
    """Compare a function, and its gradients, with itself compiled as one graph; both draw the same random numbers."""
    torch.compiler.reset()
    results = []
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for f in (function, torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")):
            torch.manual_seed(1)
            outs = f(*args)
            leaves = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
            results.append((outs, torch.autograd.grad(outs.pow(2).sum(), leaves) if leaves else ()))
    torch.testing.assert_close(results[1], results[0])


DYNAMIC = pytest.mark.parametrize("dynamic", [None, True, False])


@DYNAMIC
def test_compile_with_one_tensor_as_two_arguments(dynamic: bool | None) -> None:
    a, q = tensors((16, 16), (1, 2, 9, 16))
    slopes = torch.rand(2, requires_grad=True)

    def square(a):
        return diyfa.triton_matmul(a, a, precision="ieee", **CPU)

    def attend(q, x):
        return diyfa.flash_attention(q, q, q, alibi_slopes=x, sinks=x, **CPU)

    alike(square, a, dynamic=dynamic)
    alike(attend, q, slopes, dynamic=dynamic)
    alike(attend, q.detach(), slopes.detach(), dynamic=dynamic)


@DYNAMIC
@pytest.mark.parametrize("window", [(2, 1), [2, 1], (-1, -1), (99, 99), torch.tensor([2, 1]), torch.tensor([99, -1])])
def test_compile_with_any_window(window, dynamic: bool | None) -> None:
    q = tensors((1, 2, 9, 16))[0]
    for causal in (False, True):
        alike(
            lambda q, w, causal=causal: diyfa.flash_attention(q, q, q, causal, window=w, **CPU),
            q, window, dynamic=dynamic,
        )  # fmt: skip


def test_compile_with_a_backend_chosen_inside() -> None:
    def attend(q):
        with diyfa.use_backend("cpu"):
            return diyfa.flash_attention(q, q, q)

    alike(attend, tensors((1, 2, 5, 8))[0])
    assert registry.forced_backend() == ""


def test_compiled_windows_are_checked() -> None:
    torch.compiler.reset()
    q, compiled = tensors((1, 2, 9, 16), grad=False)[0], torch.compile(diyfa.flash_attention, backend="aot_eager")
    with torch._dynamo.config.patch(capture_scalar_outputs=True), pytest.raises(RuntimeError):
        compiled(q, q, q, window=torch.tensor([-5, 1]), **CPU)


@DYNAMIC
@pytest.mark.parametrize("varlen", [False, True])
def test_compile_with_dropout_shown(varlen: bool, dynamic: bool | None) -> None:
    q, cu = tensors((1, 9, 2, 16), grad=False)[0], torch.tensor([0, 4, 9], dtype=torch.int32)
    with diyfa.use_backend("cpu"):
        if varlen:
            attend = partial(diyfa.flash_attn_varlen_func, dropout_p=0.4, return_attn_probs=True)
            alike(lambda q, cu: attend(q, q, q, cu, cu, 5, 5), q[0], cu, dynamic=dynamic)
        else:
            attend = partial(diyfa.flash_attn_func, dropout_p=0.4, return_attn_probs=True)
            alike(lambda q: attend(q, q, q), q, dynamic=dynamic)


def test_compiled_lengths_beyond_the_keys_are_all_keys() -> None:
    torch.compiler.reset()
    q, lens = tensors((2, 2, 12, 8), grad=False)[0], torch.tensor([40, 5], dtype=torch.int32)
    compiled = torch.compile(diyfa.flash_attention, fullgraph=True, backend="aot_eager")
    for options in ({}, {"causal": True}, {"variant": "v1", "window": (3, 2)}):
        expected = diyfa.flash_attention(q, q, q, seq_lens=lens.clamp(max=12), **options, **CPU)
        torch.testing.assert_close(compiled(q, q, q, seq_lens=lens, **options, **CPU), expected)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_compile_a_product_with_its_epilogue(activation: str | None) -> None:
    """With bias, activation and their gradients; and into a given tensor."""
    torch.compiler.reset()
    leaves = tensors((20, 30), (30, 40), (40,))

    def step(a, b, bias):
        product = diyfa.triton_matmul(a, b, bias=bias, activation=activation, precision="ieee", **CPU)
        return product.square().sum()

    found, expected = (torch.autograd.grad(f(*leaves), leaves) for f in (torch.compile(step, fullgraph=True), step))
    torch.testing.assert_close(found, expected)

    def into(a, b, bias, out):
        diyfa.triton_matmul(a, b, bias=bias, activation=activation, precision="ieee", out=out, **CPU)
        return out + 1

    plain = [x.detach() for x in leaves]
    compiled = torch.compile(into, fullgraph=True)
    for given in (torch.empty(20, 40), torch.empty(40, 20).t(), torch.empty(21, 43)[1:, 2:-1]):
        found = compiled(*plain, given)
        assert torch.equal(found, into(*plain, torch.empty(20, 40))) and torch.equal(given + 1, found)


class Residual(torch.nn.Module):
    """Attention that the gradient can also go around, so that what is lost in it is not missed."""

    def __init__(self, attend, shapes):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.extra = torch.nn.ParameterList([torch.nn.Parameter(x.detach()) for x in tensors(*shapes)])
        self.attend = attend

    def forward(self, x):
        v = self.linear(x)
        return v + self.attend(v, *self.extra)


@pytest.fixture
def opaque(monkeypatch):
    """Kernels that autograd cannot look into, as those of accelerators are; the CPU's are PyTorch operators."""
    choose = registry.choose

    def choose_opaque(*args):
        kernel = choose(*args)
        return replace(kernel, launch=torch.no_grad()(kernel.launch))

    monkeypatch.setattr(registry, "choose", choose_opaque)
    monkeypatch.setattr(planning, "plans", {})


EXPORTED = {
    "attention": (lambda v: diyfa.flash_attention(v, v, v, causal=True, **CPU), ()),
    "lse": (lambda v: sum(diyfa.flash_attention(v, v, v, return_lse=True, **CPU)[i].sum() for i in (0, 1)), ()),
    "bias_and_sinks": (
        lambda v, bias, sinks: diyfa.flash_attention(v, v, v, attn_bias=bias, sinks=sinks, **CPU), ((9, 9), (9,)),
    ),
    "packed": (lambda v: diyfa.flash_attn_qkvpacked_func(torch.stack((v, v, v), 2)), ()),
    "kvpacked": (lambda v: diyfa.flash_attn_kvpacked_func(v, torch.stack((v, v), 2)), ()),
    "varlen": (
        lambda v: diyfa.flash_attention_varlen(
            *[v[0]] * 3, *[torch.tensor([0, 4, 9], dtype=torch.int32)] * 2, 5, 5, **CPU
        ), (),
    ),
    "matmul": (lambda v: diyfa.triton_matmul(v[0, 0], v[0, 0].t(), precision="ieee", **CPU).sum(), ()),
}  # fmt: skip


@pytest.mark.parametrize("traced_with_gradients", [True, False])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", EXPORTED)
def test_exported_programs_are_trained_rightly(name: str, strict: bool, traced_with_gradients: bool, opaque) -> None:
    """Whether or not they were traced to be trained."""
    attend, shapes = EXPORTED[name]
    torch.manual_seed(0)
    module, x = Residual(attend, shapes), torch.randn(2, 9, 9, 16)
    with diyfa.use_backend("cpu"):
        with torch.set_grad_enabled(traced_with_gradients):
            program = torch.export.export(module, (x,), strict=strict)
        outs, grads = [], []
        for model in (module, program.module(), program.run_decompositions().module()):
            named = dict(model.named_parameters())  # their order may change
            found = torch.autograd.grad(model(x).pow(2).sum(), named.values())
            grads.append(dict(zip(named, found, strict=True)))
            with torch.no_grad():
                outs.append(model(x))
    for i in (1, 2):
        torch.testing.assert_close(outs[i], outs[0])
        torch.testing.assert_close(grads[i], grads[0])


def test_second_derivative_of_matmul(opaque) -> None:
    a, b = tensors((16, 16), (16, 16))

    def product(a, b):
        return diyfa.triton_matmul(a, b, precision="ieee", **CPU)

    def twice(product):
        (da,) = torch.autograd.grad(product(a, b).pow(2).sum(), a, create_graph=True)
        return torch.autograd.grad(da.pow(2).sum(), (a, b))

    for got, want in zip(twice(product), twice(torch.matmul), strict=True):
        torch.testing.assert_close(got, want)


def with_forward_ad(function, x):
    with torch.autograd.forward_ad.dual_level():
        return function(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


DIFFERENTIATING = {
    "forward_ad": with_forward_ad,
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (x,)),
    "grad": lambda function, x: torch.func.grad(lambda x: function(x).sum())(x),
    "vjp": lambda function, x: torch.func.vjp(function, x),
    "jvp_of_vmap": lambda function, x: torch.func.jvp(torch.vmap(function), (x[None],), (x[None],)),
    "vmap_of_grad": lambda function, x: torch.vmap(torch.func.grad(lambda x: function(x).sum()))(x[None]),
}


@pytest.mark.parametrize("name", DIFFERENTIATING)
@pytest.mark.parametrize("op", ["attention", "matmul"])
def test_missing_derivatives_are_refused(name: str, op: str) -> None:
    """Forward mode and torch.func must not get zeros for the derivative."""
    if op == "attention":
        x = tensors((1, 2, 5, 8), grad=False)[0]
        function = partial(diyfa.flash_attention, k=x, v=x, **CPU)
    else:
        x = tensors((16, 16), grad=False)[0]
        function = partial(diyfa.triton_matmul, b=x, precision="ieee", **CPU)
    with pytest.raises(RuntimeError, match=r"jvp function for custom autograd|cannot be differentiated by torch"):
        DIFFERENTIATING[name](function, x)


def test_vmap_over_lengths() -> None:
    """They are checked as those of one call are, whichever dimension is mapped."""
    q, k, v = tensors((3, 2, 2, 5, 8), (3, 2, 2, 5, 8), (3, 2, 2, 5, 8), grad=False)
    lengths = torch.tensor([[1, 2], [5, 3], [4, 4]], dtype=torch.int32)
    expected = torch.stack(
        [diyfa.flash_attention(*x, seq_lens=n, **CPU) for *x, n in zip(q, k, v, lengths, strict=True)]
    )

    def attend(q, k, v, lengths):
        return diyfa.flash_attention(q, k, v, seq_lens=lengths, **CPU)

    assert torch.equal(torch.vmap(attend)(q, k, v, lengths), expected)
    assert torch.equal(torch.vmap(attend, in_dims=(0, 0, 0, 1))(q, k, v, lengths.t().contiguous()), expected)
    lengths[1, 0] = 6
    with pytest.raises(ValueError, match="0 < length <= 5, got values from 1 to 6"):
        torch.vmap(attend)(q, k, v, lengths)


def test_gradients_of_vmap_results(opaque) -> None:
    q, k, a, b = tensors((3, 1, 2, 5, 8), (1, 2, 5, 8), (3, 16, 16), (16, 16))

    def attend(q):
        return diyfa.flash_attention(q, k, k, causal=True, **CPU)

    def multiply(a):
        return diyfa.triton_matmul(a, b, precision="ieee", **CPU)

    for function, x, other in ((attend, q, k), (multiply, a, b)):
        got = torch.autograd.grad(torch.vmap(function)(x).sin().sum(), (x, other))
        expected = torch.autograd.grad(torch.stack([function(one) for one in x]).sin().sum(), (x, other))
        torch.testing.assert_close(got, expected)


def test_threads() -> None:
    """Calls on several threads at once give what they give alone, bit for bit."""
    leaves = [tensors((1, 2, 30 + i, 8), (1, 2, 40, 8), (1, 2, 40, 8), seed=i) for i in range(4)]

    def work(q, k, v):
        return torch.autograd.grad(diyfa.flash_attention(q, k, v, causal=True, **CPU).sin().sum(), (q, k, v))

    expected = [work(*x) for x in leaves]
    results: list[list] = [[] for _ in leaves]
    barrier = threading.Barrier(4)

    def run(i: int) -> None:
        barrier.wait()
        results[i] += [work(*leaves[i]) for _ in range(5)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found, wanted in zip(results, expected, strict=True):
        assert len(found) == 5
        assert all(torch.equal(a, b) for got in found for a, b in zip(got, wanted, strict=True))


def test_an_output_that_no_loss_uses_costs_no_gradient(monkeypatch) -> None:
    """An unused lse arrives at the kernels as None, not as zeros; a loss of lse alone works without one of out."""
    given, into = [], diyfa.ops._backward_into
    monkeypatch.setattr(
        diyfa.ops, "_backward_into", lambda plan, dout, dlse, *rest: given.append(dlse) or into(plan, dout, dlse, *rest)
    )
    q, k, v = tensors((1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8))
    out, lse = diyfa.flash_attention(q, k, v, return_lse=True, **CPU)
    out.sum().backward()
    assert given == [None]
    out, lse = diyfa.flash_attention(q, k, v, return_lse=True, **CPU)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    expected = torch.autograd.grad(torch.logsumexp(q @ k.mT * 8**-0.5, -1).sum(), (q, k))
    torch.testing.assert_close((dq, dk), expected)
    assert not dv.any()


def test_fake_tensors_of_an_absent_device() -> None:
    """Shapes and devices can be planned anywhere, packed sequences and dropout included."""
    with FakeTensorMode():
        q = torch.empty(12, 4, 16, device="cuda", dtype=torch.float16)
        cu_seqlens = torch.empty(3, device="cuda", dtype=torch.int32)
        out, lse = diyfa.flash_attention_varlen(q, q, q, cu_seqlens, cu_seqlens, 9, 9, dropout_p=0.1, return_lse=True)
        assert (out.device.type, out.shape, lse.shape, lse.dtype) == ("cuda", (12, 4, 16), (4, 12), torch.float32)
        assert diyfa.flash_attention(q.unsqueeze(0), q.unsqueeze(0), q.unsqueeze(0)).shape == (1, 12, 4, 16)
