"""Repeated calls on the CUDA backend: what reaches Triton's function in C is what the ordinary way hands it.

There is no GPU here: CPU tensors stand in for CUDA's and a recorder for the function in C, so all but the kernels runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from math import prod
from types import SimpleNamespace

import pytest
import torch
from known_plans import known_plans
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

import diyfa
from diyfa import flash_attn_interface, kvcache, ops
from diyfa import plan as planning
from diyfa.backends.cuda.attention import append, bwd, bwd_dbias, bwd_parts, clear, configs, decode, decode_configs, fwd
from diyfa.backends.cuda.attention import launch as attention_launch
from diyfa.backends.cuda.gluon.tile_counter import counter_of
from diyfa.backends.cuda.hopper import configs as hopper_configs
from diyfa.backends.cuda.runtime import replay, tune
from diyfa.features import GRADIENTS
from diyfa.problem import AttentionProblem, example_tensors

if not replay.IS_KNOWN:
    pytest.skip("calls are not repeated with this Triton", allow_module_level=True)
from cuda_launcher import OF_LAUNCH, Recorder, launcher_around, utils
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

from diyfa.backends.cuda.hopper import bwd_configs as hopper_bwd_configs
from diyfa.backends.cuda.hopper import bwd_launch as hopper_bwd
from diyfa.backends.cuda.hopper import decode_mla, decode_mla_configs, prefill
from diyfa.backends.cuda.hopper import fwd as hopper_fwd

LARGE = {"shape": (4, 8, 2048, 128), "dtype": torch.float16}  # worth its descriptors


def specialised(kernel, arguments):
    """What Triton compiles a kernel for besides constants: of each number and tensor, by name."""
    told = getattr(kernel, "kwargs", None) or vars(kernel)  # of an interpreted kernel, of another
    numbers, pointers = (told[name] or () for name in ("do_not_specialize", "do_not_specialize_on_alignment"))

    def of(name, x):
        if isinstance(x, torch.Tensor):
            return x.dtype, name not in pointers and x.data_ptr() % 16 == 0
        if type(x) is not int:
            return type(x)
        return (x >= 2**31, *(() if name in numbers else (x == 1, x % 16 == 0)))

    return tuple((name, of(name, x)) for name, x in zip(kernel.arg_names, arguments, strict=True))


def fake_kernel(kernel, recorder):
    """`kernel` compiled to a launcher of Triton's around `recorder`, which sees what it was compiled for, too."""

    def compiled_for(arguments):
        described = [isinstance(x, (TensorDescriptor, GluonDescriptor)) for x in arguments]
        signature = {i: "tensordesc<fp16[1, 1, 64, 64]>" if d else "*fp16" for i, d in enumerate(described)}
        meta = {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [1, 1, 64, 64], "fp4_padded": False}
        launcher = launcher_around(recorder, signature, [meta] * sum(described) or None)
        return SimpleNamespace(
            run=launcher, function=kernel.__name__, packed_metadata=(4, specialised(kernel, arguments))
        )

    def warmup(grid, **named):
        return compiled_for([named[name] for name in kernel.arg_names])

    def launch(grid, **named):
        compiled = warmup(None, **named)
        arguments = [named[name] for name in kernel.arg_names]
        shape = (*grid, 1, 1)[:3]
        compiled.run(*shape, 77, kernel.__name__, compiled.packed_metadata, None, None, None, *arguments)
        return compiled

    def of_grid(self, grid):
        return functools.partial(launch, grid)

    methods = {"arg_names": kernel.arg_names, "warmup": staticmethod(warmup), "__getitem__": of_grid}
    return type("Fn", (), methods)()


HOPPER_BACKWARD = ["_prepare_kernel", "_bwd_sm90_kernel", "_convert_kernel"]


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    fake = utils(lambda address, *args: ("map", address))
    monkeypatch.setattr(driver, "_active", SimpleNamespace(utils=fake, get_current_stream=lambda index: 77))
    monkeypatch.setattr(replay, "BuiltinFunctionType", Recorder)
    monkeypatch.setattr(tune._tuner, "enabled", False)
    monkeypatch.setattr(fwd, "_fwd_kernel", fake_kernel(fwd._fwd_kernel, recorder))
    monkeypatch.setattr(bwd, "_bwd_preprocess_kernel", fake_kernel(bwd._bwd_preprocess_kernel, recorder))
    kernels = {kind: fake_kernel(kernel, recorder) for kind, kernel in bwd._GRADIENT_KERNELS.items()}
    monkeypatch.setattr(bwd, "_GRADIENT_KERNELS", kernels)
    monkeypatch.setattr(hopper_fwd, "_fwd_sm90_kernel", fake_kernel(hopper_fwd._fwd_sm90_kernel, recorder))
    for kernel in HOPPER_BACKWARD:
        monkeypatch.setattr(hopper_bwd, kernel, fake_kernel(getattr(hopper_bwd, kernel), recorder))
    monkeypatch.setattr(hopper_bwd_configs, "environment_refusal", lambda: None)
    monkeypatch.setattr(hopper_bwd_configs, "MIN_SCORES", 1 << 60)  # where variant="sm90" asks for it, and only there
    for module, kernel in (
        (decode, "_decode_kernel"), (decode, "_combine_kernel"), (decode, "_fold_kernel"), (append, "_append_kernel"),
        (bwd_dbias, "_bwd_dbias_kernel"), (bwd_parts, "_sum_parts_kernel"), (clear, "_clear_kernel"),
    ):  # fmt: skip
        monkeypatch.setattr(module, kernel, fake_kernel(getattr(module, kernel), recorder))
    monkeypatch.setattr(decode_configs, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(planning, "plans", {})
    monkeypatch.setattr(hopper_configs, "environment_refusal", lambda: None)
    monkeypatch.setattr(hopper_configs, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(planning, "plans", {})
    monkeypatch.setattr(type(diyfa.registry.load_backend("cuda")), "accepts", lambda self, device: None)
    return recorder


@pytest.fixture
def ways(monkeypatch):
    """How each launch of `recorder` came about: "repeat" or "kernel"."""
    seen = []
    bind = ops.bind
    monkeypatch.setattr(ops, "bind", lambda *args: seen.append("described") or bind(*args))
    return seen


def attend(*tensors, **kwargs):
    return diyfa.flash_attention(*tensors, backend="cuda", **kwargs)


def qkv(shape=(2, 4, 96, 64), dtype=torch.bfloat16, grad=False, kv_heads=None):
    kv = (shape[0], kv_heads or shape[1], *shape[2:])
    return [torch.zeros(s, dtype=dtype, requires_grad=grad) for s in (shape, kv, kv)]


def named(call, **tensors):
    """A recorded call with names instead of the addresses of `tensors`."""
    names = {x.data_ptr(): name for name, x in tensors.items()}

    def name(x):
        if isinstance(x, torch.Tensor):
            x = x.data_ptr()
        if isinstance(x, tuple):
            return tuple(name(y) for y in x)
        return names.get(x, x) if type(x) is int and x >= LEAST_ADDRESS else x

    return [name(x) for x in call[3:]]  # the grid is checked by the tests of the kernels


LEAST_ADDRESS = 2**16


def are_same(*passes):
    """Whether calls differ only in the addresses of tensors that have no name, and in these alike throughout."""

    def flat(calls):
        return [y for call in calls for x in call for y in (x if isinstance(x, tuple) else (x,))]

    for one in passes[1:]:
        becomes = {}
        for x, y in zip(flat(passes[0]), flat(one), strict=True):
            if (
                type(x) is int
                and type(y) is int
                and x >= LEAST_ADDRESS
                and y >= LEAST_ADDRESS
                and x % 16 == y % 16 == 0
            ):
                if becomes.setdefault(x, y) != y:
                    return False
            elif x != y or type(x) is not type(y):
                return False
        if len(set(becomes.values())) != len(becomes):
            return False
    return True


CASES = {
    "small": ({}, {}),
    "one_tile": ({"shape": (2, 4, 49, 32)}, {"sinks": torch.zeros(4)}),
    "causal": ({}, {"causal": True}),
    "window": ({}, {"window": (10, 3), "sm_scale": -0.5}),
    "softcap": ({}, {"softcap": 3.0}),
    "gqa": ({"kv_heads": 2}, {}),
    "descriptors": (LARGE, {}),
    "descriptors_and_rows": (LARGE, {"causal": True}),
    "descriptors_of_gluon": (LARGE, {"variant": "sm90"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_repeated_call_launches_what_the_ordinary_one_does(recorder, ways, case):
    inputs, options = CASES[case]
    q, k, v = qkv(**inputs)
    calls = []
    for _ in range(4):
        recorder.calls.clear()
        ways.clear()
        out, lse = attend(q, k, v, return_lse=True, **options)
        assert len(recorder.calls) == 1
        calls.append(named(recorder.calls[0], q=q, k=k, v=v, out=out, lse=lse))
        assert out.shape == q.shape and out.stride() == q.stride() and out.dtype == q.dtype
        assert lse.shape == q.shape[:3] and lse.is_contiguous() and lse.dtype == torch.float32
    assert not ways  # the last two repeated
    assert any("map" in x for x in calls[0] if isinstance(x, tuple)) is case.startswith("descriptors")
    assert are_same(*([call] for call in calls))
    assert attend(q, k, v, **options).shape == q.shape and not ways


def test_each_launch_of_a_dynamic_deal_has_its_counter(recorder, ways, monkeypatch):
    table = hopper_configs.config_of
    monkeypatch.setattr(
        hopper_fwd, "config_of", lambda problem: dataclasses.replace(table(problem), scheduler="dynamic")
    )
    q, k, v = qkv(**LARGE)
    calls = []
    for _ in range(4):
        recorder.calls.clear()
        ways.clear()
        out, lse = attend(q, k, v, variant="sm90", return_lse=True)
        counter = counter_of(q)
        calls.append(named(recorder.calls[0], q=q, k=k, v=v, out=out, lse=lse, counter=counter))
    assert not ways and "counter" in calls[0] and are_same(*([call] for call in calls))
    recorder.calls.clear()
    with attention_launch.use_config("sm90", table):
        attend(q, k, v, variant="sm90")
    assert ways and recorder.calls[0][-1].schedule == "static"


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_views_are_repeated_with_their_strides(recorder, ways, layout):
    q, k, v = (x.transpose(1, 2) for x in torch.zeros(2, 96, 3, 4, 64).unbind(2))
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    function = diyfa.flash_attention if layout == "bhsd" else diyfa.flash_attention_v2
    outs = [function(q, k, v, backend="cuda") for _ in range(4)]
    assert len({(tuple(x.shape), x.stride()) for x in outs}) == 1
    same = [named(call, q=q, k=k, v=v, out=out) for call, out in zip(recorder.calls, outs, strict=True)]
    assert are_same(*([call] for call in same))


@pytest.mark.parametrize("case", [*CASES, "divided"])
def test_a_repeated_backward_launches_what_the_ordinary_one_does(recorder, ways, case, monkeypatch):
    inputs, options = CASES["gqa" if case == "divided" else case]
    q, k, v = qkv(grad=True, **inputs)
    kernels = ["_bwd_preprocess_kernel", "_bwd_dkdv_kernel", "_bwd_dq_kernel"]
    if case == "divided":
        monkeypatch.setattr(bwd_parts, "parts_of", lambda *_: 2)
        kernels.insert(2, "_sum_parts_kernel")
    if case == "one_tile":
        kernels = ["_bwd_short_kernel"]
    if case == "descriptors_of_gluon":
        kernels = HOPPER_BACKWARD[:-1]  # the last one is for sequences of different lengths
    dout = torch.zeros_like(q)
    passes = []
    for _ in range(5):
        out = attend(q, k, v, **options)
        recorder.calls.clear()
        ways.clear()
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
        assert [call[4] for call in recorder.calls] == kernels
        tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
        passes.append([named(call, **tensors) for call in recorder.calls])
        assert all(
            g.stride() == x.stride() and g.dtype == x.dtype for g, x in zip((dq, dk, dv), (q, k, v), strict=True)
        )
    assert not ways
    assert are_same(*passes)


@pytest.mark.parametrize("packing", ["qkv", "kv"])
def test_packed_gradients_are_repeated(recorder, ways, packing):
    x = torch.zeros(2, 96, 5, 64, dtype=torch.bfloat16, requires_grad=True)
    packed = torch.zeros(2, 96, len(packing), 5, 64, dtype=torch.bfloat16, requires_grad=True)
    function, leaves = {
        "qkv": (flash_attn_interface.flash_attn_qkvpacked_func, (packed,)),
        "kv": (flash_attn_interface.flash_attn_kvpacked_func, (x, packed)),
    }[packing]
    dout = torch.zeros_like(x)
    passes = []
    for _ in range(5):
        recorder.calls.clear()
        with diyfa.use_backend("cuda"):
            out = function(*leaves, causal=True)
        ways.clear()
        with diyfa.use_backend("cuda"):
            grads = torch.autograd.grad(out, leaves, dout)
        assert all(g.shape == y.shape and g.is_contiguous() for g, y in zip(grads, leaves, strict=True))
        views = [*([x.detach()] if packing == "kv" else []), *packed.detach().unbind(2)]
        slices = [*([grads[0]] if packing == "kv" else []), *grads[-1].unbind(2)]
        tensors = {**dict(zip("qkv", views, strict=True)), **dict(zip(("dq", "dk", "dv"), slices, strict=True))}
        passes.append([named(call, out=out, dout=dout, **tensors) for call in recorder.calls])
    assert not ways and len(passes[0]) == 4
    assert {"q", "k", "v", "dout", "dk", "dv"} <= {y for y in passes[0][2] if isinstance(y, str)}
    assert are_same(*passes)


def seq_lens_of(*lengths):
    return torch.tensor(lengths, dtype=torch.int32)


def packed_call(q, k, v, **options):
    """(2, H, S, D) as two packed sequences of S rows each."""
    rows = [x.transpose(1, 2).flatten(0, 1).detach().requires_grad_(x.requires_grad) for x in (q, k, v)]
    ends = [torch.tensor([0, x.shape[2], 2 * x.shape[2]], dtype=torch.int32) for x in (q, k)]
    tensors = dict(zip(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), (*rows, *ends), strict=True))
    longest = q.shape[2], k.shape[2]
    return tensors, lambda: diyfa.flash_attention_varlen(
        *rows, *ends, *longest, backend="cuda", return_lse=True, **options
    )


def dense_call(q, k, v, **options):
    tensors = {name: x for name, x in options.items() if isinstance(x, torch.Tensor)}
    return {"q": q, "k": k, "v": v, **tensors}, lambda: attend(q, k, v, return_lse=True, **options)


OPTIONAL = {
    "seq_lens": lambda: {"seq_lens": seq_lens_of(40, 96), "causal": True},
    "alibi": lambda: {"alibi_slopes": torch.rand(4)},
    "alibi_by_sample": lambda: {"alibi_slopes": torch.rand(2, 4), "causal": True},
    "bias": lambda: {"attn_bias": torch.rand(4, 96, 96)},
    "bias_of_keys": lambda: {"attn_bias": torch.rand(2, 1, 1, 96)},
    "sinks": lambda: {"sinks": torch.rand(4), "window": (20, 0)},
    "dropout": lambda: {"dropout_p": 0.5, "rng_state": torch.tensor([3, 4])},
    "several": lambda: {"seq_lens": seq_lens_of(40, 96), "alibi_slopes": torch.rand(4), "sinks": torch.rand(4)},
    "packed": None,
}


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("case", OPTIONAL)
def test_optional_tensors_are_repeated(recorder, ways, case, large, gradients):
    """Other tensors in the same places are read, whatever objects they are."""
    torch.manual_seed(0)
    inputs = {"shape": (2, 4, 2048, 128), "dtype": torch.float16} if large and case == "packed" else {}
    inputs |= {"dtype": torch.bfloat16} if not inputs else {}
    passes = []
    for _ in range(5):
        q, k, v = qkv(grad=gradients, **inputs)
        tensors, call = packed_call(q, k, v) if case == "packed" else dense_call(q, k, v, **OPTIONAL[case]())
        recorder.calls.clear()
        ways.clear()
        out, lse = call()
        tensors |= {"out": out, "lse": lse}
        if gradients:
            dout = torch.zeros_like(out)
            grads = torch.autograd.grad(out, [tensors[name] for name in "qkv"], dout)
            tensors |= {"dout": dout, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
        passes.append([named(call, **tensors) for call in recorder.calls])
        cleared = [set(call) & tensors.keys() for call in passes[-1] if call[1] == "_clear_kernel"]
        assert cleared == [{"cu_seqlens_q", "dq"}, {"cu_seqlens_k", "dk", "dv"}][: 2 * (gradients and case == "packed")]
        names = {x for call in passes[-1] for x in call if isinstance(x, str)}
        optional = {name for name in tensors if name not in ("out", "lse", "dout", "dq", "dk", "dv")}
        assert optional <= names | {y for call in passes[-1] for x in call if isinstance(x, tuple) for y in x}
        kept = tensors, call  # memory that is not given out again
        passes[-1].append(kept)
    assert not ways
    assert are_same(*[[call for call in one if isinstance(call, list)] for one in passes])


def test_a_call_that_comes_once_is_not_prepared_for_another(recorder, monkeypatch):
    asked = []
    repeat = replay.replay_of
    monkeypatch.setattr(
        attention_launch, "replay_of", lambda *args, **kwargs: asked.append(1) or repeat(*args, **kwargs)
    )
    q, k, v = qkv()
    attend(q, k, v)
    assert not asked
    for _ in range(3):
        attend(q, k, v)
    assert len(asked) == 1


def test_a_tensor_given_twice_is_no_other_call(recorder, ways):
    """What a repeated call reads depends on its places, not on which of its tensors were one object before."""
    x, y, z = qkv()
    for _ in range(3):
        attend(x, x, x)
    recorder.calls.clear()
    ways.clear()
    attend(x, y, z)
    (call,) = (named(call, x=x, y=y, z=z) for call in recorder.calls)
    assert not ways and [name for name in call if name in ("x", "y", "z")][:3] == ["x", "y", "z"]


def test_strides_of_optional_tensors_are_part_of_the_call(recorder, ways):
    q, k, v = qkv()
    bias = torch.rand(4, 96, 96)
    for _ in range(3):
        attend(q, k, v, attn_bias=bias)
    for other in (bias.transpose(1, 2), bias[:1], bias.half(), torch.rand(4, 96, 97)[..., 1:]):
        ways.clear()
        attend(q, k, v, attn_bias=other)
        assert ways
    slopes = torch.rand(4, 2)[:, 0]  # a copy is read instead, so this is never repeated
    for _ in range(4):
        ways.clear()
        attend(q, k, v, alibi_slopes=slopes)
        assert ways


def test_lengths_are_checked_when_a_call_is_repeated(recorder, ways):
    q, k, v = qkv()
    lengths = seq_lens_of(40, 96)
    for _ in range(3):
        attend(q, k, v, seq_lens=lengths)
    lengths[0] = 97
    for wrong in (lengths, seq_lens_of(0, 5)):
        with pytest.raises(ValueError, match="seq_lens"):
            attend(q, k, v, seq_lens=wrong)


CHANGES = {
    "tuner": lambda patch: patch.setattr(tune._tuner, "cleared", tune._tuner.cleared + 1),
    "hook": lambda patch: patch.setattr(replay.triton.knobs.runtime, "launch_enter_hook", lambda metadata: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_decided_is_decided_anew_after_a_change(recorder, ways, change, monkeypatch):
    q, k, v = qkv(grad=True)
    dout = torch.zeros_like(q)

    def step():
        ways.clear()
        torch.autograd.grad(attend(q, k, v, causal=True), (q, k, v), dout)
        return bool(ways)

    assert [step() for _ in range(4)][-1] is False
    with monkeypatch.context() as patch:
        CHANGES[change](patch)
        assert step()
        if change != "hook":
            assert [step() for _ in range(3)][-1] is False
    assert step() is (change != "hook")  # a hook that is gone has changed nothing
    assert [step() for _ in range(3)][-1] is False


@pytest.mark.parametrize("feature", GRADIENTS, ids=lambda feature: feature.name)
def test_optional_tensors_have_their_gradient_each_time(recorder, feature):
    q, k, v = qkv(grad=True)
    problem = AttentionProblem("cuda", "sm_90", "bfloat16", "bhsd", 2, 4, 4, 96, 96, 64, 64, **feature.example)
    tensor = example_tensors(problem, "cpu")[feature.name].zero_().requires_grad_()
    for _ in range(5):
        out = attend(q, k, v, **{feature.name: tensor})
        assert torch.autograd.grad(out, tensor, torch.zeros_like(out))[0].shape == tensor.shape


def test_a_tile_that_is_forced_is_launched(recorder, ways):
    q, k, v = qkv()
    for _ in range(3):
        attend(q, k, v)
    ways.clear()
    tile = configs.AttentionConfig(32, 32, 4, 2, "portable")
    with attention_launch.use_config("fwd", tile):
        attend(q, k, v)
        attend(q, k, v)
    assert ways
    forced, usual = recorder.calls[-1], recorder.calls[0]
    assert (forced[-1].block_m, forced[-1].block_n) == (32, 32) and forced[-1] != usual[-1]
    for _ in range(3):
        ways.clear()
        attend(q, k, v)
    assert not ways and recorder.calls[-1][-1] == usual[-1]


def test_forced_tiles_nest():
    outer, inner = (configs.AttentionConfig(n, 32, 4, 2, "portable") for n in (32, 64))
    with attention_launch.use_config("fwd", outer):
        with attention_launch.use_config("fwd", inner):
            assert attention_launch._forced["fwd"] == inner
        assert attention_launch._forced["fwd"] == outer
    assert "fwd" not in attention_launch._forced


def test_gradients_that_lie_otherwise(recorder, ways):
    """Strides are part of what is repeated; an address that is not aligned is not repeated. An expanded gradient is
    copied first, and lies as others do then."""
    q, k, v = qkv(grad=True)
    turned = torch.zeros(2, 96, 4, 64, dtype=q.dtype).transpose(1, 2)
    off = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)

    def step(dout):
        out = attend(q, k, v)
        ways.clear()
        recorder.calls.clear()
        torch.autograd.grad(out, (q, k, v), dout)
        return bool(ways)

    straight = torch.zeros_like(q)
    assert [step(straight) for _ in range(4)][-1] is False
    by_straight = recorder.calls[0]
    assert [step(turned) for _ in range(2)] == [True, False]
    assert recorder.calls[0] != by_straight and 96 * 4 * 64 in recorder.calls[0]
    assert not step(straight) and recorder.calls[0][OF_LAUNCH + 7 :] == by_straight[OF_LAUNCH + 7 :]
    assert step(off) and step(off)
    assert not step(torch.zeros((), dtype=q.dtype).expand(q.shape))
    assert not step(straight)


def test_saved_tensors_that_were_elsewhere(recorder, ways):
    q, k, v = qkv(grad=True)
    dout = torch.zeros_like(q)
    for _ in range(4):
        torch.autograd.grad(attend(q, k, v), (q, k, v), dout)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.clone()):
        out = attend(q, k, v)
    ways.clear()
    recorder.calls.clear()
    torch.autograd.grad(out, (q, k, v), dout)
    read = [x.data_ptr() for x in recorder.calls[1] if isinstance(x, torch.Tensor)]
    assert ways and dout.data_ptr() in read and q.data_ptr() not in read


def test_saved_tensors_that_lie_otherwise_in_the_same_place(recorder, ways):
    q, k, v = qkv(grad=True)
    dout = torch.zeros_like(q)
    for _ in range(4):
        torch.autograd.grad(attend(q, k, v), (q, k, v), dout)
    turned = 96 * 4 * 64, 64, 4 * 64, 1
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x, lambda x: x.as_strided(x.shape, turned) if x.dim() == 4 else x
    ):
        out = attend(q, k, v)
    ways.clear()
    torch.autograd.grad(out, (q, k, v), dout)
    assert ways and turned[2] in [x for x in recorder.calls[-1] if type(x) is int]


def test_tensors_of_another_device_run_on_it(monkeypatch, recorder):
    """The device is made the current one around allocation and launch."""
    q, k, v = qkv()
    for _ in range(3):
        attend(q, k, v)
    (plan,) = known_plans()
    entered = []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)

        def __exit__(self, *args):
            entered.append("left")

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(replay, "current_device_of", lambda x: lambda: entered[-1] if entered else 5)
    plan.repeat = None
    attend(q, k, v)  # makes a new one
    recorder.calls.clear()
    entered.clear()
    attend(q, k, v)
    assert entered == [-1, "left"] and len(recorder.calls) == 1


def test_allocators_make_what_they_are_asked_for():
    for allocate in (replay.allocator_of("cpu"), replay.allocator_of("meta")):
        x = allocate((2, 3), (3, 1), torch.float16)
        assert x.shape == (2, 3) and x.stride() == (3, 1) and x.dtype == torch.float16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: compiled kernels")
@pytest.mark.parametrize("shape", [(2, 4, 96, 64), (2, 8, 2048, 128)], ids=["small", "large"])
def test_on_the_device_a_repeated_call_gives_the_same_bits(shape, monkeypatch):
    """Also on another stream, and in a graph that is replayed on other values. Else dq is added up in any order."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()

    def step():
        out = diyfa.flash_attention(q, k, v, causal=True)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))

    expected = step()
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))
    of_calls = [plan for plan in planning.plans.values() if isinstance(plan, planning.Plan)]
    assert any(plan.repeat is not None for plan in of_calls)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there = step()
    torch.cuda.current_stream().wait_stream(side)
    assert all(torch.equal(a, b) for a, b in zip(there, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in (q, k, v, dout):
            x.mul_(0.5)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@pytest.mark.parametrize("gives_out", [False, True], ids=["", "out"])
@pytest.mark.parametrize("by", ["tensor", "int"])
def test_a_repeated_call_with_a_cache_launches_what_the_ordinary_one_does(recorder, monkeypatch, by, gives_out):
    launched = []  # by Triton's launcher
    for module in (decode, append):
        launch = module.launch_kernel
        spy = lambda described, launch=launch: launched.append(described.grid) or launch(described)  # noqa: E731
        monkeypatch.setattr(module, "launch_kernel", spy)
    cos, sin = torch.zeros(2, 256, 16, dtype=torch.bfloat16)
    passes = []
    for length in (100, 100, 101, 102):
        q, k_cache, v_cache = (
            torch.zeros(2, rows, heads, 64, dtype=torch.bfloat16) for rows, heads in ((1, 8), (256, 2), (256, 2))
        )
        k, v = torch.zeros(2, 2, 1, 2, 64, dtype=torch.bfloat16)
        lengths = torch.full((2,), length, dtype=torch.int32) if by == "tensor" else length
        out = torch.zeros_like(q) if gives_out else None
        with diyfa.use_backend("cuda"):
            result, lse = diyfa.flash_attn_with_kvcache(
                q, k_cache, v_cache, k, v, cos, sin, lengths, causal=True, return_softmax_lse=True, out=out
            )
        assert out is None or result is out
        own = {"q": q, "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "out": result, "lse": lse, "cos": cos}
        own |= {"lengths": lengths} if by == "tensor" else {}
        calls = [named(call, **own) for call in recorder.calls]
        passes.append([[x for x in call if not (by == "int" and type(x) is int and x == length)] for call in calls])
        recorder.calls.clear()
    assert [len(calls) for calls in passes] == [3, 3, 3, 3]
    assert len(launched) == 3  # of the first call
    assert are_same(*passes)


@pytest.mark.parametrize("gives_out", [False, True], ids=["", "out"])
@pytest.mark.parametrize("by", ["tensor", "int"])
def test_a_repeated_call_with_a_latent_cache_launches_what_the_ordinary_one_does(recorder, monkeypatch, by, gives_out):
    """Both descriptors of a tensor are made of what the call gives, and a call whose v is no part of k is another."""
    described = []
    launch = decode.launch_kernel
    monkeypatch.setattr(decode, "launch_kernel", lambda one: described.append(one.grid) or launch(one))
    monkeypatch.setattr(decode_mla, "_decode_mla_kernel", fake_kernel(decode_mla._decode_mla_kernel, recorder))
    monkeypatch.setattr(decode_mla_configs, "environment_refusal", lambda: None)
    backend = diyfa.registry.load_backend("cuda")
    chosen = [
        dataclasses.replace(kernel, by_name_only=lambda problem: None)
        if (kernel.op, kernel.name) == ("kvcache_fwd", "sm90")
        else kernel
        for kernel in backend.kernels
    ]
    monkeypatch.setattr(backend, "kernels", chosen)
    passes, kept = [], []
    for length in (100, 100, 101, 102):
        q, cache = torch.zeros(2, 1, 16, 576).bfloat16(), torch.zeros(9, 64, 1, 576).bfloat16()
        table = torch.zeros(2, 4, dtype=torch.int32) if by == "tensor" else None
        cache = cache if by == "tensor" else cache.flatten(0, 1)[None].expand(2, -1, -1, -1)
        lengths = torch.full((2,), length, dtype=torch.int32) if by == "tensor" else length
        out = q.new_zeros(2, 1, 16, 512) if gives_out else None
        options = {"block_table": table, "out": out, "softmax_scale": 0.1, "causal": True}
        with diyfa.use_backend("cuda"):
            result, lse = diyfa.flash_attn_with_kvcache(
                q, cache, cache[..., :512], cache_seqlens=lengths, return_softmax_lse=True, **options
            )
        own = {"q": q, "cache": cache, "out": result, "lse": lse}
        own |= {"lengths": lengths, "table": table} if by == "tensor" else {}
        calls = [named(call, **own) for call in recorder.calls]
        assert [call[1] for call in calls] == ["_decode_mla_kernel", "_combine_kernel"]
        assert sum(y in ("q", "cache") for x in calls[0] if isinstance(x, tuple) for y in x) == 4  # descriptors
        assert by == "int" or {"lengths", "table"} <= {x for x in calls[0] if isinstance(x, str)}
        passes.append([[x for x in call if not (by == "int" and type(x) is int and x == length)] for call in calls])
        kept.append(own)  # memory that is not given out again
        recorder.calls.clear()
    assert len(described) == 2  # of the first call
    assert are_same(*passes)
    with diyfa.use_backend("cuda"):
        for returns_lse in (True, False):  # which is somewhere, returned or not
            result = diyfa.flash_attn_with_kvcache(
                q, cache, cache[..., :512], cache_seqlens=lengths, return_softmax_lse=returns_lse, **options
            )
            kept.append(result)
            result = result[0] if returns_lse else result
            passes.append([named(call, q=q, cache=cache, out=result) for call in recorder.calls])
            recorder.calls.clear()
        assert len(described) == 2 and are_same(*passes[-2:])
        v = torch.zeros(cache.shape).bfloat16()[..., :512]
        diyfa.flash_attn_with_kvcache(q, cache, v, cache_seqlens=lengths, **options)
    assert recorder.calls[0][4] == "_decode_kernel"


def over_cache(heads=8, **options):
    """Arguments of a call of two sequences over a cache of 4096 rows."""
    q, cache = torch.zeros(2, 1, heads, 64).bfloat16(), torch.zeros(2, 2, 4096, 2, 64).bfloat16()
    lengths = torch.full((2,), 100, dtype=torch.int32)
    return {"q": q, "k_cache": cache[0], "v_cache": cache[1], "cache_seqlens": lengths, **options}


def over_pages():
    """Of packed queries."""
    cache = torch.zeros(2, 64, 16, 2, 64).bfloat16()
    ends, used = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([100, 90], dtype=torch.int32)
    table = torch.zeros(2, 20, dtype=torch.int32)
    return {
        "q": torch.zeros(3, 6, 64).bfloat16(), "k": cache[0], "v": cache[1], "cu_seqlens_q": ends,
        "cu_seqlens_k": None, "max_seqlen_q": 2, "max_seqlen_k": 100, "block_table": table, "seqused_k": used,
    }  # fmt: skip


WITHOUT_LSE = {
    "a token": (over_cache, False, "_combine_kernel"),
    "out": (lambda: over_cache(out=torch.zeros(2, 1, 8, 64).bfloat16()), False, "_combine_kernel"),
    "an odd group": (lambda: over_cache(6), False, "_combine_kernel"),
    "new keys": (
        lambda: over_cache(k=torch.zeros(2, 1, 2, 64).bfloat16(), v=torch.zeros(2, 1, 2, 64).bfloat16()), False,
        "_combine_kernel",
    ),
    "in the mode": (lambda: over_cache(6), True, "_fold_kernel"),
    "packed": (over_pages, False, "_combine_kernel"),
}  # fmt: skip


@pytest.mark.parametrize("case", WITHOUT_LSE)
def test_an_lse_that_is_not_returned_lies_in_the_workspace(recorder, monkeypatch, case):
    """Behind all that the kernels write there; one that is returned holds no other memory."""
    make, invariant, last = WITHOUT_LSE[case]
    asked, allocator_of = [], replay.allocator_of

    def spied_on(device_type):
        allocate = allocator_of(device_type)
        return lambda *args: asked.append(allocate(*args)) or asked[-1]

    monkeypatch.setattr(replay, "allocator_of", spied_on)
    monkeypatch.setattr(decode_configs, "multiprocessors", lambda device: 100)
    function = diyfa.flash_attention_varlen if case == "packed" else diyfa.flash_attn_with_kvcache
    name = "return_lse" if case == "packed" else "return_softmax_lse"
    given = make()
    with diyfa.use_backend("cuda"), diyfa.batch_invariant() if invariant else contextlib.nullcontext():
        for returns_lse in (True, True, True, False, True, False):
            recorder.calls.clear()
            asked.clear()
            result = function(**given, **{name: returns_lse})
            out, lse = result if returns_lse else (result, None)
    of_lse = out.numel() // 64
    memory, size = asked[-1], asked[-1].numel() * 4
    kernels = {call[4]: call for call in recorder.calls}
    arguments = dict(zip(decode._decode_kernel.arg_names, kernels["_decode_kernel"][OF_LAUNCH:], strict=True))
    begin, at_lse = arguments["sums_ptr"], arguments["lse_ptr"]
    assert begin == memory.data_ptr() and arguments["o_ptr"] == out.data_ptr() and at_lse % 16 == 0
    assert arguments["statistics_ptr"] < at_lse and at_lse + 4 * of_lse <= begin + size
    problem_of_workspace = [x for x in asked if x is not out]
    assert problem_of_workspace == [memory]
    merged = dict(zip(getattr(decode, last).arg_names, kernels[last][OF_LAUNCH:], strict=True))
    assert merged["lse_ptr"] == at_lse and merged["sums_ptr"] == begin
    with diyfa.use_backend("cuda"), diyfa.batch_invariant() if invariant else contextlib.nullcontext():
        _, lse = function(**given, **{name: True})
        assert lse.untyped_storage().nbytes() == 4 * of_lse and lse is asked[-2] and lse.numel() == of_lse
    # The workspace of the ordinary launch, of which all may be written, ends before it.
    described = [x for x in workspaces_of(monkeypatch, function, given, name, invariant) if x is not None]
    assert described and at_lse - begin >= described[-1].numel() * 4


def workspaces_of(monkeypatch, function, given, name, invariant):
    """Those that an ordinary call allocates."""
    made, workspace = [], decode.workspace
    with monkeypatch.context() as patch:
        patch.setattr(planning, "plans", {})
        patch.setattr(decode, "workspace", lambda *args: made.append(workspace(*args)) or made[-1])
        with diyfa.use_backend("cuda"), diyfa.batch_invariant() if invariant else contextlib.nullcontext():
            function(**given, **{name: True})
    return made


@pytest.mark.parametrize("gives_out", [False, True], ids=["", "out"])
@pytest.mark.parametrize("by", ["tensor", "int"])
def test_a_repeated_prefill_launches_what_the_ordinary_one_does(recorder, monkeypatch, by, gives_out):
    """Of one with an int for all lengths the length is given anew. One that replaces its queries is never repeated."""
    described = []
    launch = prefill.launch_kernel
    monkeypatch.setattr(prefill, "launch_kernel", lambda one: described.append(one.grid) or launch(one))
    monkeypatch.setattr(hopper_configs, "environment_refusal", lambda: None)
    passes, kept = [], []
    for length in (600, 600, 601, 602):
        q = torch.zeros(2, 512, 16, 128).bfloat16()
        cache = (
            torch.zeros(2, 40, 16, 4, 128).bfloat16() if by == "tensor" else torch.zeros(2, 2, 640, 4, 128).bfloat16()
        )
        table = torch.zeros(2, 40, dtype=torch.int32) if by == "tensor" else None
        lengths = torch.full((2,), length, dtype=torch.int32) if by == "tensor" else length
        out = torch.zeros_like(q) if gives_out else None
        options = {"block_table": table, "causal": True, "cache_seqlens": lengths}
        with diyfa.use_backend("cuda"):
            result, lse = diyfa.flash_attn_with_kvcache(q, *cache, out=out, return_softmax_lse=True, **options)
        own = {"q": q, "k": cache[0], "v": cache[1], "out": result, "lse": lse}
        own |= {"lengths": lengths, "table": table} if by == "tensor" else {}
        (call,) = [named(call, **own) for call in recorder.calls]
        assert call[1] == "_fwd_sm90_kernel"
        passes.append([[x for x in call if not (by == "int" and type(x) is int and x == length)]])
        kept.append((own, cache))  # memory that is not given out again
        recorder.calls.clear()
    assert len(described) == 1
    assert are_same(*passes)
    if gives_out:
        with diyfa.use_backend("cuda"):
            diyfa.flash_attn_with_kvcache(q, *cache, out=q, **options)
        assert len(described) == 2


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
def test_a_repeated_call_of_few_queries_launches_what_the_ordinary_one_does(recorder, monkeypatch, layout):
    launched = []
    launch = decode.launch_kernel
    monkeypatch.setattr(decode, "launch_kernel", lambda one: launched.append(one.grid) or launch(one))
    offsets = [torch.tensor([0, n], dtype=torch.int32) for n in (2, 4096)]
    passes, kept = [], []
    for _ in range(4):
        q, k, v = (torch.zeros(n, h, 64, dtype=torch.bfloat16) for n, h in ((2, 8), (4096, 2), (4096, 2)))
        if layout == "thd":
            attend = functools.partial(diyfa.flash_attention_varlen, q, k, v, *offsets, 2, 4096)
        elif layout == "bshd":
            attend = functools.partial(diyfa.flash_attention_v2, q[None], k[None], v[None])
        else:
            q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
            attend = functools.partial(diyfa.flash_attention, q[None], k[None], v[None])
        with diyfa.use_backend("cuda"), torch.no_grad():
            out, lse = attend(causal=True, return_lse=True)
        assert out.shape[-3:] == q.shape and out.is_contiguous()
        passes.append([named(call, q=q, k=k, v=v, out=out, lse=lse) for call in recorder.calls])
        kernels = [call[1] for call in passes[-1]]
        assert kernels == ["_clear_kernel"] * (layout == "thd") + ["_decode_kernel", "_combine_kernel"]
        kept.append((q, k, v, out, lse))
        recorder.calls.clear()
    assert len(launched) == 2  # of the first call
    assert are_same(*passes)


@pytest.mark.parametrize("paged", [False, True])
def test_packed_calls_by_hopper_kernels_launch_the_same_whether_repeated_or_not(recorder, monkeypatch, paged):
    described = []
    launch = clear.launch_kernel
    monkeypatch.setattr(clear, "launch_kernel", lambda one: described.append(one.grid) or launch(one))
    table = torch.arange(128, dtype=torch.int32).reshape(2, 64)
    kept = []
    for _ in range(4):
        q, k, v = (torch.zeros(2048, 4, 64, dtype=torch.bfloat16, requires_grad=not paged) for _ in range(3))
        if paged:
            k, v = (x.reshape(128, 16, 4, 64) for x in (k, v))
        ends = [torch.tensor([0, 1024, 2048], dtype=torch.int32) for _ in range(2)]
        recorder.calls.clear()
        options = {"block_table": table} if paged else {"variant": "sm90"}
        with diyfa.use_backend("cuda"):
            out = diyfa.flash_attention_varlen(q, k, v, *ends, 1024, 1024, causal=True, **options)
        expected = ["_fwd_sm90_kernel"]
        if not paged:
            kept.append(torch.autograd.grad(out, (q, k, v), torch.zeros_like(out)))
            expected += ["_clear_kernel", "_clear_kernel", *HOPPER_BACKWARD]
        assert [call[4] for call in recorder.calls] == expected
        kept.append((q, k, v, out, ends))  # memory that is not given out again
    assert len(described) == (0 if paged else 4)  # of the gradients of the first two calls


def test_a_repeated_backward_of_short_packed_sequences_clears_rows_of_none(recorder, ways):
    kept, passes = [], []
    for _ in range(4):
        q, k, v = (torch.zeros(200, 4, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        ends = torch.tensor([0, 60, 100], dtype=torch.int32)
        with diyfa.use_backend("cuda"):
            out = diyfa.flash_attention_varlen(q, k, v, ends, ends, 60, 60)
        recorder.calls.clear()
        ways.clear()
        dout = torch.zeros_like(out)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
        assert [call[4] for call in recorder.calls] == ["_clear_kernel", "_clear_kernel", "_bwd_short_kernel"]
        own = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "ends": ends, "dq": dq, "dk": dk, "dv": dv}
        passes.append([named(call, **own) for call in recorder.calls])
        kept.append(own)  # memory that is not given out again
    assert not ways
    assert are_same(*passes)


def test_a_repeated_call_in_the_mode_launches_what_the_ordinary_one_does(recorder, monkeypatch):
    """Whose parts have programs of their own."""
    launched = []
    launch = decode.launch_kernel
    monkeypatch.setattr(decode, "launch_kernel", lambda one: launched.append(one.grid) or launch(one))
    monkeypatch.setattr(decode_configs, "multiprocessors", lambda device: 100)
    passes, kept = [], []
    for length in (100, 100, 101, 102):
        q, cache = torch.zeros(2, 1, 8, 64).bfloat16(), torch.zeros(2, 4096, 2, 64).bfloat16()
        lengths = torch.full((2,), length, dtype=torch.int32)
        with diyfa.use_backend("cuda"), diyfa.batch_invariant():
            out, lse = diyfa.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, return_softmax_lse=True)
        own = {"q": q, "cache": cache, "out": out, "lse": lse, "lengths": lengths}
        passes.append([named(call, **own) for call in recorder.calls])
        assert [call[1] for call in passes[-1]] == ["_decode_kernel", "_fold_kernel"]
        kept.append(own)
        recorder.calls.clear()
    assert launched == [2 * 2 * 4, 2 * 2 * 4]  # parts of tiles, rows of tiles
    assert are_same(*passes)


def tokens_over(rows, features=64, batch=2, heads=2, queries=1):
    """(q, k, v) of new tokens over a cache of so many rows, as Transformers keeps it."""
    q = torch.zeros(batch, 4 * heads, queries, features, dtype=torch.bfloat16)
    k, v = torch.zeros(2, batch, heads, rows, features, dtype=torch.bfloat16)
    return [x.transpose(1, 2) for x in (q, k, v)]


def with_batch_stride(rows, strides):
    """Of one sample, whose stride is never read: the kernel is compiled for what it looks like."""
    q, k, v = tokens_over(rows, batch=1)
    stride = strides[rows % len(strides)]
    return [q, *(x.as_strided(x.shape, (stride, *x.stride()[1:])) for x in (k, v))]


def in_buffer(rows):
    """Over the first rows of a cache that has room for more."""
    q, k, v = tokens_over(400)
    return [q, k[:, :rows], v[:, :rows]]


def shifted(x):
    """Not aligned."""
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].as_strided(x.shape, x.stride(), 1)


def turned(x):
    """Another view of the same memory."""
    return x.as_strided(x.shape, x.contiguous().stride())


GROWING = {  # rows -> q, k, v; options
    "concatenated": (tokens_over, {}),
    "in a buffer": (lambda rows: in_buffer(rows), {}),
    "rows first": (lambda rows: [x.contiguous() for x in tokens_over(rows)], {}),
    "either": (lambda rows: [x.contiguous() if rows % 2 else x for x in tokens_over(rows)], {}),
    "strides of 8 and 16": (functools.partial(tokens_over, features=72), {}),
    "few blocks": (functools.partial(tokens_over, batch=1, heads=1), {}),
    "batch strides": (functools.partial(with_batch_stride, strides=(1, 17, 16, 2**31, 2**31 - 16, 2**32)), {}),
    "window": (tokens_over, {"window_size": (306, 0)}),
    "right window": (functools.partial(tokens_over, queries=3), {"window_size": (-1, 307), "causal": False}),
    "one split": (tokens_over, {"num_splits": 1}),
    "splits": (tokens_over, {"num_splits": 3}),
    "lengths": (tokens_over, {"cache_seqlens": torch.tensor([300, 280], dtype=torch.int32)}),
    "padding": (tokens_over, {"cache_leftpad": torch.tensor([3, 5], dtype=torch.int32)}),
    "one or two tokens": (lambda rows: tokens_over(rows, queries=1 + rows % 2), {}),
    "keys in a buffer": (lambda rows: [*in_buffer(rows)[:2], tokens_over(rows)[2]], {}),
    "alignment": (lambda rows: [x if i != rows % 4 else shifted(x) for i, x in enumerate(tokens_over(rows))], {}),
    "latent": (lambda rows: [(x := tokens_over(rows))[0], x[1], x[1][..., :32]], {}),
    "values of keys or not": (lambda rows: [(x := tokens_over(rows))[0], x[1], x[1 + rows % 2]], {}),
    "keys turned": (lambda rows: [(x := tokens_over(rows))[0], x[1], turned(x[1]) if rows % 2 else x[1]], {}),
    "prompt": (functools.partial(tokens_over, queries=843), {}),  # from 311 rows on the Hopper kernel runs it
}


def launches_of_call(recorder, q, k, v, **options):
    """(grids, what is handed on with names) of one call, and what has to be kept until addresses were compared."""
    recorder.calls.clear()
    with diyfa.use_backend("cuda"):
        out, lse = diyfa.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **{"causal": True, **options})
    calls = [named(call, q=q, k=k, v=v, out=out, lse=lse) for call in recorder.calls]
    return [call[:3] for call in recorder.calls], calls, (out, lse)


def ordinary_launches(monkeypatch, *args, **kwargs):
    """The same of a call without earlier ones."""
    with monkeypatch.context() as patch:
        patch.setattr(planning, "plans", {})
        return launches_of_call(*args, **kwargs)


ROWS_IN_TURN = (305, 306, 305, 320, 307, 304, 321, 306, 310, 305, 337, 336, 311, 304, 322, 321, 308, 309)


@pytest.mark.parametrize("gives_out", [False, True], ids=["", "out"])
@pytest.mark.parametrize("invariant", [False, True], ids=["", "invariant"])
@pytest.mark.parametrize("case", GROWING)
def test_a_cache_that_grows_launches_what_the_ordinary_call_does(recorder, monkeypatch, case, invariant, gives_out):
    make, options = GROWING[case]
    monkeypatch.setattr(decode_configs, "multiprocessors", lambda device: 3)
    with diyfa.batch_invariant() if invariant else contextlib.nullcontext():
        for rows in ROWS_IN_TURN:
            q, k, v = make(rows)
            out = {"out": torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)} if gives_out else {}
            grids, calls, kept = launches_of_call(recorder, q, k, v, **options, **out)
            usual_grids, usual, also_kept = ordinary_launches(monkeypatch, recorder, q, k, v, **options, **out)
            assert grids == usual_grids and are_same(calls, usual)
            assert kept[0].stride() == also_kept[0].stride()


def test_lengths_of_as_many_blocks_share_a_plan(recorder, monkeypatch):
    launched = []
    launch = decode.launch_kernel
    monkeypatch.setattr(decode, "launch_kernel", lambda one: launched.append(one.grid) or launch(one))
    for rows in range(305, 321):
        for _ in range(2):
            launches_of_call(recorder, *tokens_over(rows))
    assert len(launched) == 2 and len(known_plans()) == 1
    launches_of_call(recorder, *tokens_over(321))
    assert len(launched) == 4 and len(known_plans()) == 2
    launches_of_call(recorder, *tokens_over(312))
    assert len(launched) == 4


def test_smaller_blocks_have_other_grids(recorder, monkeypatch):
    """Where a program has 16 keys at once."""
    monkeypatch.setenv("DIYFA_ARCH", "sm_75")
    found = []
    for rows in (288, 289, 304, 305, 320, 321):
        grids, _, _ = launches_of_call(recorder, *(x.half() for x in tokens_over(rows, batch=1, heads=1)))
        found.append([prod(grid) for grid in grids])
    assert found == [[18, 4], [19, 4], [19, 4], [20, 4], [20, 4], [21, 4]]


def test_blocks_of_keys_are_multiples_of_those_that_share_a_plan():
    rows = {row[1] for row in decode_configs._ROWS + decode_configs._FLOAT8_ROWS}
    assert not [n for n in (*rows, decode_configs.TURING_BLOCK_N, decode_configs.PART_KEYS) if n % kvcache.ROWS]


@pytest.mark.parametrize("change", CHANGES)
def test_a_shared_plan_is_described_anew_for_the_length_of_the_call(recorder, monkeypatch, change):
    """Where it cannot be repeated."""
    launched = []
    launch = decode.launch_kernel
    monkeypatch.setattr(decode, "launch_kernel", lambda one: launched.append(one.arguments) or launch(one))
    for rows in (305, 306, 307):
        launches_of_call(recorder, *tokens_over(rows))
    assert len(launched) == 2
    tensors = tokens_over(318)
    with monkeypatch.context() as patch:
        CHANGES[change](patch)
        grids, calls, kept = launches_of_call(recorder, *tensors)
        assert len(launched) == (4 if change == "hook" else 2)
        usual_grids, usual, also_kept = ordinary_launches(monkeypatch, recorder, *tensors)
        assert kept and also_kept and grids == usual_grids and are_same(calls, usual)
    assert launched[-2]["capacity"] == launched[-2]["length"] == 318


def test_a_forced_tile_sees_the_length_of_the_call(recorder):
    seen = []

    def config(problem):
        seen.append(problem.capacity)
        return dataclasses.replace(decode_configs.decode_config(problem), block_n=16)

    for rows in (305, 306):
        launches_of_call(recorder, *tokens_over(rows))
    with attention_launch.use_config("decode", config):
        for rows in (307, 318):
            _, calls, _ = launches_of_call(recorder, *tokens_over(rows))
            assert calls[0][-1].block_n == 16 and set(seen) == {rows}
            seen.clear()
    _, calls, _ = launches_of_call(recorder, *tokens_over(319))
    assert calls[0][-1].block_n > 16


def test_caches_of_different_rows_are_refused_among_alike_ones(recorder):
    for rows in (305, 306, 307):
        launches_of_call(recorder, *tokens_over(rows))
    for rows in (305, 306, 307):
        launches_of_call(recorder, *in_buffer(rows))
    (q, k, _), (_, _, v) = in_buffer(308), in_buffer(309)
    with pytest.raises(ValueError, match="same shape"):
        launches_of_call(recorder, q, k, v)
    for wrong in ((q, k, None), (q, None, k), (None, k, k), (q, k[0], k[0]), (q, k, k.float()), (q, k[:1], k[:1])):
        with pytest.raises((TypeError, ValueError)):
            launches_of_call(recorder, *wrong)
    with pytest.raises(ValueError, match="cache_seqlens"):
        launches_of_call(recorder, q, k, k, cache_seqlens=309)
    for _ in range(2):
        launches_of_call(recorder, q, k, k, cache_seqlens=308)
    with pytest.raises(ValueError, match="cache_seqlens"):
        launches_of_call(recorder, q, k[:, :307], k[:, :307], cache_seqlens=308)


def test_kernels_are_compiled_for_the_device_of_the_call(monkeypatch, recorder):
    """Not for the current one."""
    inside, compiled_in = [], []
    compile_it = fwd._fwd_kernel.warmup

    class Device:
        def __enter__(self):
            inside.append(True)

        def __exit__(self, *args):
            inside.clear()

    def warmup(**named):
        compiled_in.append(bool(inside))
        return compile_it(**named)

    monkeypatch.setattr(type(fwd._fwd_kernel), "warmup", staticmethod(warmup))
    monkeypatch.setattr(replay, "on_device", lambda x: Device())
    q, k, v = qkv()
    for _ in range(3):
        attend(q, k, v)
    assert compiled_in == [True] and not inside
