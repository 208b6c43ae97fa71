"""Repeated calls on the CUDA backend: what reaches the driver is what the first call handed it.

There is no GPU here: CPU tensors stand in for CUDA's, and the driver is a recorder (`recorded_launches.py`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import random
from typing import Any

import pytest
import recorded_launches
import torch
from recorded_launches import Map, Recorded

import diyfa
from diyfa import flash_attn_interface, kvcache, masks, ops, registry, tuning
from diyfa import plan as planning
from diyfa.backends.cuda.attention import bwd_dbias, bwd_partials, configs, decode, stream_k
from diyfa.backends.cuda.attention import launch as attention_launch
from diyfa.backends.cuda.gluon.tile_counter import launch_counter
from diyfa.backends.cuda.hopper import bwd_configs as hopper_bwd_configs
from diyfa.backends.cuda.hopper import bwd_launch as hopper_bwd  # noqa: F401
from diyfa.backends.cuda.hopper import configs as hopper_configs
from diyfa.backends.cuda.hopper import decode_mla, decode_mla_configs, prefill  # noqa: F401
from diyfa.backends.cuda.hopper import fwd_launch as hopper_fwd_launch
from diyfa.backends.cuda.hopper import matmul as hopper_matmul  # noqa: F401
from diyfa.backends.cuda.hopper import matmul_configs as hopper_matmul_configs
from diyfa.backends.cuda.runtime import binaries, launcher, tune
from diyfa.backends.cuda.runtime import passes as runtime_passes

HOPPER_BACKWARD = ["_prepare_kernel", "_bwd_sm90_kernel", "_convert_kernel"]


@pytest.fixture
def recorder(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("launches are recorded of CPU tensors where there is no driver; on the device they run")
    monkeypatch.setattr(tune._tuner, "enabled", False)
    monkeypatch.setattr(planning, "plans", {})
    monkeypatch.setattr(hopper_configs, "environment_refusal", lambda: None)
    monkeypatch.setattr(hopper_bwd_configs, "environment_refusal", lambda: None)
    monkeypatch.setattr(hopper_matmul_configs, "environment_refusal", lambda: None)
    monkeypatch.setattr(hopper_bwd_configs, "MIN_SCORES", 1 << 60)  # where variant="sm90" asks for it, and only there
    for module in (stream_k, hopper_configs):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(type(registry.load_backend("cuda")), "accepts", lambda self, device: None)
    return recorded_launches.install(monkeypatch)


@pytest.fixture
def described(monkeypatch):
    """Grows with each pass that was described and decided anew: others were repeated."""
    seen = []
    bind = ops.bind
    monkeypatch.setattr(ops, "bind", lambda *args: seen.append(True) or bind(*args))
    return seen


@pytest.fixture
def launched(monkeypatch):
    """Grows with each launch that was described anew: others were repeated."""
    seen = []
    launch = runtime_passes.launch_kernel
    monkeypatch.setattr(runtime_passes, "launch_kernel", lambda one: seen.append(one) or launch(one))
    return seen


def attend(*tensors, **kwargs):
    return diyfa.flash_attention(*tensors, backend="cuda", **kwargs)


def qkv(shape=(2, 4, 96, 64), dtype=torch.bfloat16, grad=False, kv_heads=None):
    kv = (shape[0], kv_heads or shape[1], *shape[2:])
    return [torch.zeros(s, dtype=dtype, requires_grad=grad) for s in (shape, kv, kv)]


MIN_ADDRESS = 2**32


def named_launches(recorder, **tensors):
    """The launches since the last time, with names instead of the addresses of `tensors`: [(kernel, …, arguments)]."""
    names = {x.data_ptr(): name for name, x in tensors.items() if x is not None}

    def name(x: Any) -> Any:
        if isinstance(x, Map):
            return Map(name(x.address), *dataclasses.astuple(x)[1:])
        return names.get(x, x) if type(x) is int and x >= MIN_ADDRESS else x

    found = [
        dataclasses.replace(one, arguments={key: name(x) for key, x in one.arguments.items()})
        for one in recorder.launches
    ]
    recorder.launches.clear()
    return found


def read_by(launches: list[Recorded]) -> set[str]:
    """Names of tensors that some launch is handed."""
    values = [x for one in launches for x in one.arguments.values()]
    return {y for x in values for y in [x.address if isinstance(x, Map) else x] if isinstance(y, str)}


def assert_same(first: list[Recorded], *others: list[Recorded]) -> None:
    """They differ only in the addresses of tensors that have no name, and in these alike throughout."""

    def flat(passes: list[Recorded]) -> tuple[list[Any], list[int]]:
        shape, addresses = [], []
        for one in passes:
            for key, x in (
                ("grid", one.grid),
                ("stream", one.stream),
                ("constants", one.constants),
                ("binary", one.binary),
                *one.arguments.items(),
            ):
                address = x.address if isinstance(x, Map) else x
                if type(address) is int and address >= MIN_ADDRESS:
                    addresses.append(address)
                    x = dataclasses.replace(x, address=0) if isinstance(x, Map) else "memory"
                shape.append((one.kernel, key, x))
        return shape, addresses

    shape, addresses = flat(first)
    for other in others:
        other_shape, other_addresses = flat(other)
        assert shape == other_shape
        becomes = dict(zip(addresses, other_addresses, strict=True))
        assert [becomes[x] for x in addresses] == other_addresses and len(set(becomes.values())) == len(becomes)


# ---- Attention ----------------------------------------------------------------------------------------------------


def dense(shape=(2, 4, 96, 64), dtype=torch.bfloat16, kv_heads=None, **options):
    """(grad) -> (tensors by name, call) of one call; `options` that are functions make tensors."""

    def make(grad):
        q, k, v = qkv(shape, dtype, grad, kv_heads)
        given = {name: x() if callable(x) else x for name, x in options.items()}
        tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
        if isinstance(mask := given.get("mask"), diyfa.BlockMask):
            tensors |= {"mask_blocks": mask.blocks, "mask_bits": mask.bits}
        return {"q": q, "k": k, "v": v, **tensors}, lambda: attend(q, k, v, return_lse=True, **given)

    return make


def packed(shape=(2, 96, 4, 64), dtype=torch.bfloat16, **options):
    """The same of two packed sequences."""

    def make(grad):
        batch, length, heads, features = shape
        rows = [torch.zeros(batch * length, heads, features, dtype=dtype, requires_grad=grad) for _ in range(3)]
        ends = [torch.arange(0, batch * length + 1, length, dtype=torch.int32) for _ in range(2)]
        tensors = dict(zip(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), (*rows, *ends), strict=True))
        return tensors, lambda: diyfa.flash_attention_varlen(
            *rows, *ends, length, length, backend="cuda", return_lse=True, **options
        )

    return make


def views(layout):
    """The same of heads that lie otherwise in memory."""

    def make(grad):
        q, k, v = (x.transpose(1, 2).detach().requires_grad_(grad) for x in torch.zeros(2, 96, 3, 4, 64).unbind(2))
        if layout == "bhsd":
            return {"q": q, "k": k, "v": v}, lambda: attend(q, k, v, return_lse=True)
        q, k, v = (x.detach().transpose(1, 2).requires_grad_(grad) for x in (q, k, v))
        return {"q": q, "k": k, "v": v}, lambda: diyfa.flash_attention_v2(q, k, v, backend="cuda", return_lse=True)

    return make


def seq_lens_of(*lengths):
    return torch.tensor(lengths, dtype=torch.int32)


BOTH = ["_bwd_preprocess_kernel", "_bwd_dkdv_kernel", "_bwd_dq_kernel"]
LARGE = {"shape": (4, 8, 2048, 128), "dtype": torch.float16}  # worth its descriptors
LENGTHS = {"seq_lens": lambda: seq_lens_of(40, 96)}


def causal_mask(length, heads=1):
    return lambda: diyfa.block_mask(masks.causal, 1, heads, length, length)


CASES = {  # a call, kernels of the backward pass
    "plain": (dense(), BOTH),
    "one tile": (dense((2, 4, 49, 32), sinks=lambda: torch.zeros(4)), ["_bwd_short_kernel"]),
    "window": (dense(window=(10, 3), sm_scale=-0.5), BOTH),
    "softcap": (dense(softcap=3.0), BOTH),
    "gqa": (dense(kv_heads=2), BOTH),
    "divided": (dense(kv_heads=2), [*BOTH[:2], "_sum_partials_kernel", BOTH[2]]),
    "descriptors": (dense(**LARGE), BOTH),
    "descriptors and rows": (dense(**LARGE, causal=True), BOTH),
    "descriptors of gluon": (dense(**LARGE, variant="sm90"), HOPPER_BACKWARD[:-1]),
    "alibi and descriptors of gluon": (
        dense(**LARGE, variant="sm90", alibi_slopes=lambda: torch.rand(4, 8)), HOPPER_BACKWARD[:-1],
    ),
    "views": (views("bhsd"), BOTH),
    "views of rows": (views("bshd"), BOTH),
    "seq_lens": (dense(**LENGTHS, causal=True), BOTH),
    "alibi": (dense(alibi_slopes=lambda: torch.rand(4)), BOTH),
    "alibi by sample": (dense(alibi_slopes=lambda: torch.rand(2, 4), causal=True), BOTH),
    "bias": (dense(attn_bias=lambda: torch.rand(4, 96, 96)), BOTH),
    "bias of keys": (dense(attn_bias=lambda: torch.rand(2, 1, 1, 96)), BOTH),
    "sinks": (dense(sinks=lambda: torch.rand(4), window=(20, 0)), BOTH),
    "dropout": (dense(dropout_p=0.5, rng_state=lambda: torch.tensor([3, 4])), BOTH),
    "several": (dense(**LENGTHS, alibi_slopes=lambda: torch.rand(4), sinks=lambda: torch.rand(4)), BOTH),
    "mask": (dense(mask=causal_mask(96)), BOTH),
    "mask by head": (dense(mask=causal_mask(96, 4), **LENGTHS), BOTH),
    "mask and descriptors": (dense(**LARGE, mask=causal_mask(2048)), BOTH),
    "mask and descriptors of gluon": (
        dense(**LARGE, mask=causal_mask(2048), variant="sm90"),
        ["_prepare_kernel", "_find_long_blocks_kernel", "_bwd_sm90_kernel", "_convert_kernel"],
    ),
    "packed": (packed(), ["_clear_kernel"] * 2 + BOTH),
    "packed, large": (packed((2, 2048, 4, 128), torch.float16), ["_clear_kernel"] * 2 + BOTH),
    "packed, gluon": (packed((2, 1024, 4, 64), causal=True, variant="sm90"), ["_clear_kernel"] * 2 + HOPPER_BACKWARD),
    "gradients of a bias": (
        dense(attn_bias=lambda: torch.rand(4, 96, 96).requires_grad_()), [*BOTH, "_bwd_dbias_kernel"],
    ),
    "gradients of sinks": (dense(sinks=lambda: torch.rand(4).requires_grad_()), BOTH),
}  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", CASES)
def test_a_repeated_call_has_the_launches_of_the_first(recorder, described, case, grad, monkeypatch):
    """Other tensors in the same places are read, whatever objects they are."""
    make, of_backward = CASES[case]
    if case == "divided":
        monkeypatch.setattr(bwd_partials, "count_subgroups", lambda *_: 2)
    passes, kept = [], []  # memory that is not given out again
    for _ in range(4):
        tensors, call = make(grad)
        described.clear()
        result = call()
        assert type(result) is tuple
        out, lse = result
        q = tensors["q"]
        assert out.shape == q.shape and out.stride() == torch.empty_like(q).stride() and out.dtype == q.dtype
        assert lse.is_contiguous() and lse.dtype == torch.float32
        expected = tensors | {"out": out, "lse": lse}
        results = {}
        if grad:
            wanted = {name: x for name, x in tensors.items() if x.requires_grad}
            dout = torch.zeros_like(out)
            found = torch.autograd.grad(out, list(wanted.values()), dout)
            results = {f"d{name}": x for name, x in zip(wanted, found, strict=True)}
            assert all(x.stride() == torch.empty_like(wanted[name[1:]]).stride() for name, x in results.items())
            expected |= {"dout": dout, **{name: results[name] for name in ("dq", "dk", "dv")}}
        passes.append(named_launches(recorder, **expected))
        kept.append((expected, results))
    assert [one.kernel for one in passes[0]][1:] == (of_backward if grad else [])
    assert read_by(passes[0]) == expected.keys() and all(one.stream == 77 for one in passes[0])
    has_maps = any(isinstance(x, Map) for one in passes[0] for x in one.arguments.values())
    assert has_maps == ("descriptors" in case or case in ("packed, large", "packed, gluon"))
    if not (case.startswith("gradients") and grad):
        assert not described
    assert_same(*passes)


def test_each_dynamic_schedule_has_its_counter(recorder, described, monkeypatch):
    table = hopper_configs.select_config
    monkeypatch.setattr(
        hopper_fwd_launch, "select_config", lambda problem: dataclasses.replace(table(problem), scheduler="dynamic")
    )
    q, k, v = qkv(**LARGE)
    passes, kept = [], []
    for _ in range(4):
        described.clear()
        out, lse = attend(q, k, v, variant="sm90", return_lse=True)
        kept.append((out, lse))
        passes.append(named_launches(recorder, q=q, k=k, v=v, out=out, lse=lse, counter=launch_counter(q)))
    assert not described and "counter" in read_by(passes[0])
    assert_same(*passes)
    with attention_launch.use_config("sm90", table):
        attend(q, k, v, variant="sm90")
    assert described and recorder.launches[0].constants.schedule == "static"


@pytest.mark.parametrize("packing", ["qkv", "kv"])
def test_packed_gradients_are_repeated(recorder, described, packing):
    function = getattr(flash_attn_interface, f"flash_attn_{packing}packed_func")
    passes, kept = [], []
    for _ in range(4):
        x = torch.zeros(2, 96, 5, 64, dtype=torch.bfloat16, requires_grad=True)
        owner = torch.zeros(2, 96, len(packing), 5, 64, dtype=torch.bfloat16, requires_grad=True)
        leaves = (owner,) if packing == "qkv" else (x, owner)
        dout = torch.zeros_like(x)
        described.clear()
        with diyfa.use_backend("cuda"):
            out = function(*leaves, causal=True)
            grads = torch.autograd.grad(out, leaves, dout)
        assert all(g.shape == y.shape and g.is_contiguous() for g, y in zip(grads, leaves, strict=True))
        inputs = [*leaves[:-1], *owner.detach().unbind(2)]
        slices = [*grads[:-1], *grads[-1].unbind(2)]
        tensors = dict(zip(("q", "k", "v", "dq", "dk", "dv"), inputs + slices, strict=True))
        passes.append(named_launches(recorder, out=out, dout=dout, **tensors))
        kept.append((leaves, grads, out, dout))
    assert not described and len(passes[0]) == 4 and read_by(passes[0]) >= {*tensors, "out", "dout"}
    assert_same(*passes)


def test_a_single_call_prepares_no_repeat(recorder, monkeypatch):
    asked = []
    repeat = runtime_passes.make_replay
    monkeypatch.setattr(
        attention_launch, "make_replay", lambda *args, **kwargs: asked.append(1) or repeat(*args, **kwargs)
    )
    for n in (0, 1, 1, 1):
        attend(*qkv())
        assert len(asked) == n


@pytest.mark.parametrize(("limit", "n_made"), [(1, 6), (2, 2)])
def test_repeats_keep_a_limited_amount_of_memory(recorder, monkeypatch, limit, n_made):
    """With changing lengths, plans would hold tensor maps without end. A repeat whose memory went makes it again."""
    made = []
    make = runtime_passes.make_relaunch
    monkeypatch.setattr(runtime_passes, "_idle_lists", collections.deque())
    monkeypatch.setattr(runtime_passes, "RELAUNCHES", limit)
    monkeypatch.setattr(runtime_passes, "make_relaunch", lambda *args: made.append(1) or make(*args))
    calls = [qkv(), [x[:, :, :64].contiguous() for x in qkv()]]
    for _ in range(4):
        for q, k, v in calls:
            out = attend(q, k, v)
            (launch,) = named_launches(recorder, q=q, k=k, v=v, out=out)
            assert [launch.arguments[f"{name}_ptr"] for name in ("q", "k", "v", "o")] == ["q", "k", "v", "out"]
    assert len(made) == n_made and len(runtime_passes._idle_lists) == limit


def test_a_tensor_given_twice_is_no_other_call(recorder, described):
    """What a repeated call reads depends on its places, not on which of its tensors were one object before."""
    x, y, z = qkv()
    for _ in range(3):
        attend(x, x, x)
    named_launches(recorder)
    described.clear()
    attend(x, y, z)
    (call,) = named_launches(recorder, x=x, y=y, z=z)
    assert not described and [call.arguments[f"{name}_ptr"] for name in "qkv"] == ["x", "y", "z"]


def test_a_call_that_reads_a_copy_is_never_repeated(recorder, described):
    q, k, v = qkv()
    slopes = torch.rand(4, 2)[:, 0]
    for _ in range(4):
        described.clear()
        attend(q, k, v, alibi_slopes=slopes)
        assert described


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("sinks", [None, torch.zeros(4)], ids=["alone", "beside sinks"])
def test_a_state_without_dropout_is_not_read(recorder, described, grad, sinks):
    q, k, v = qkv(grad=grad)
    state, dout = torch.tensor([3, 4]), torch.zeros_like(q)
    for _ in range(4):
        described.clear()
        out = attend(q, k, v, sinks=sinks, rng_state=state)
        if grad:
            torch.autograd.grad(out, (q, k, v), dout)
        assert "state" not in read_by(named_launches(recorder, state=state))
    assert not described


CHANGES = {
    "tuner": lambda patch: patch.setattr(tune._tuner, "changes", tune._tuner.changes + 1),
    "hook": lambda patch: patch.setattr(launcher.knobs.runtime, "launch_enter_hook", lambda metadata: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_decisions_are_renewed_after_a_change(recorder, described, change, monkeypatch):
    q, k, v = qkv(grad=True)
    dout = torch.zeros_like(q)

    def step():
        described.clear()
        recorder.launches.clear()
        torch.autograd.grad(attend(q, k, v, causal=True), (q, k, v), dout)
        assert len(recorder.launches) == 4
        return bool(described), {one.stream for one in recorder.launches}

    assert [step() for _ in range(4)][-1] == (False, {77})
    with monkeypatch.context() as patch:
        CHANGES[change](patch)
        assert step() == (True, {"triton" if change == "hook" else 77})
        if change != "hook":
            assert [step() for _ in range(3)][-1] == (False, {77})
    assert step() == (change != "hook", {77})  # a hook that is gone has changed nothing
    assert [step() for _ in range(3)][-1] == (False, {77})


def test_a_tile_that_is_forced_is_launched(recorder, described):
    q, k, v = qkv()
    for _ in range(3):
        attend(q, k, v)
    usual = named_launches(recorder)[-1].constants
    described.clear()
    with attention_launch.use_config("fwd", configs.AttentionConfig(32, 32, 4, 2, "portable")):
        attend(q, k, v)
        attend(q, k, v)
    forced = named_launches(recorder)[-1].constants
    assert described and (forced.block_m, forced.block_n) == (32, 32) and forced != usual
    for _ in range(3):
        described.clear()
        attend(q, k, v)
    assert not described and named_launches(recorder)[-1].constants == usual


def test_forced_tiles_nest():
    outer, inner = (configs.AttentionConfig(n, 32, 4, 2, "portable") for n in (32, 64))
    with attention_launch.use_config("fwd", outer):
        with attention_launch.use_config("fwd", inner):
            assert attention_launch._forced["fwd"] == inner
        assert attention_launch._forced["fwd"] == outer
    assert "fwd" not in attention_launch._forced


def test_gradients_with_other_strides(recorder, described):
    """Strides are part of what is repeated; an address that is not aligned is not repeated. An expanded gradient is
    copied first, and lies as others do then."""
    q, k, v = qkv(grad=True)
    turned = torch.zeros(2, 96, 4, 64, dtype=q.dtype).transpose(1, 2)
    off = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)

    def step(dout):
        out = attend(q, k, v)
        described.clear()
        recorder.launches.clear()
        torch.autograd.grad(out, (q, k, v), dout)
        for one in named_launches(recorder, dout=dout):
            strides = [one.arguments.get(f"stride_do{letter}") for letter in "bhm"]
            assert one.kernel == "_sum_partials_kernel" or strides in (list(dout.stride()[:3]), [24576, 6144, 64])
            assert one.binary[1] == (dout is not off)  # aligned
        return bool(described)

    straight = torch.zeros_like(q)
    assert [step(straight) for _ in range(4)][-1] is False
    assert [step(turned) for _ in range(3)] == [True, True, False]
    assert not step(straight)
    assert step(off) and step(off)
    for dims in (0, 1, 2, (1, 2), (0, 1, 2, 3)):
        assert not step(straight.sum(dims, keepdim=True).expand(q.shape))
    assert not step(straight)


def test_a_gradient_of_lse_is_read_after_repeated_calls_without_one(recorder):
    """Saved tensors that lie elsewhere let all backward passes use one plan, that of the operator."""
    q, k, v = qkv(grad=True)
    dout, dlse = torch.zeros_like(q), torch.zeros(q.shape[:3])
    for given in (None, None, None, dlse, None, dlse):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, torch.clone):
            out, lse = attend(q, k, v, return_lse=True)
        recorder.launches.clear()
        outputs, grads = ((out,), (dout,)) if given is None else ((out, lse), (dout, given))
        torch.autograd.grad(outputs, (q, k, v), grads)
        assert ("dlse" in read_by(named_launches(recorder, dlse=dlse))) == (given is not None)


@pytest.mark.parametrize("dims", [0, 1, 2, (0, 1, 2, 3)], ids=str)
def test_descriptors_of_an_expanded_gradient(recorder, dims):
    """It is copied: no descriptor of a gradient has a stride of 0."""
    q, k, v = qkv(**LARGE, grad=True)
    for _ in range(3):
        recorder.launches.clear()
        torch.autograd.grad(attend(q, k, v, variant="sm90").sum(dims).square().sum(), (q, k, v))
        maps = [x for one in recorder.launches for x in one.arguments.values() if isinstance(x, Map)]
        assert len(recorder.launches) > 2 and maps and not any(0 in x.strides for x in maps)


TURNED = 96 * 4 * 64, 64, 4 * 64, 1
UNPACKED = {
    "elsewhere": torch.clone,
    "in the same place": lambda x: x.as_strided(x.shape, TURNED) if x.dim() == 4 else x,
}


@pytest.mark.parametrize("how", UNPACKED)
def test_saved_tensors_with_other_strides(recorder, described, how):
    q, k, v = qkv(grad=True)
    dout = torch.zeros_like(q)
    for _ in range(4):
        torch.autograd.grad(attend(q, k, v), (q, k, v), dout)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, UNPACKED[how]):
        out = attend(q, k, v)
    described.clear()
    recorder.launches.clear()
    torch.autograd.grad(out, (q, k, v), dout)
    _, dkdv, dq = named_launches(recorder, q=q, dout=dout)
    assert described and dkdv.arguments["do_ptr"] == "dout"
    assert (dkdv.arguments["q_ptr"] == "q") == (how == "in the same place")
    assert dq.arguments["stride_qm"] == (64 if how == "elsewhere" else TURNED[2])


class Device:
    """Stands in for `torch.cuda.device`."""

    entered: list[Any]

    def __init__(self, index):
        self.index = index

    def __enter__(self):
        self.entered.append(self.index)

    def __exit__(self, *args):
        self.entered.append("left")


def test_tensors_of_another_device_run_on_it(monkeypatch, recorder):
    """It is made the current one where kernels are compiled, and around allocation and launch."""
    entered, compiled_in = [], []
    monkeypatch.setattr(Device, "entered", entered, raising=False)
    store = recorder.stored_binary
    monkeypatch.setattr(binaries, "stored_binary", lambda *args: compiled_in.append(list(entered)) or store(*args))
    q, k, v = qkv()
    attend(q, k, v)
    monkeypatch.setattr(launcher, "_binaries", {})
    monkeypatch.setattr(runtime_passes, "on_device", lambda x: Device(5))
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(runtime_passes, "device_getter", lambda x: lambda: entered[-1] if entered else 5)
    attend(q, k, v)
    assert compiled_in == [[], [5]]
    entered.clear()
    entered.append("left")
    recorder.launches.clear()
    attend(q, k, v)
    assert entered == ["left", -1, "left"] and len(recorder.launches) == 1


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


PRODUCTS: dict[str, dict[str, Any]] = {
    "": {},
    "tf32": {"precision": "tf32"},
    "block": {"block_m": 16, "block_n": 32, "block_k": 32},
    "epilogue": {"activation": "gelu"},
    "epilogue of gluon": {"activation": "gelu", "variant": "sm90"},
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("rows", [16, 512])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_a_repeated_product_has_the_launches_of_the_first(recorder, launched, rows, name, transposed):
    """Where K is split (16 rows) and where it is not; with an epilogue a bias is added, into a given tensor."""
    dtype = torch.float32 if name == "tf32" else torch.bfloat16
    passes, kept = [], []
    for _ in range(4):
        a, b = torch.zeros(rows, 4096, dtype=dtype), torch.zeros(4096, 640, dtype=dtype)
        b = turned(b) if transposed and "gluon" not in name else b
        given = {}
        if "epilogue" in name:
            given = {"bias": torch.zeros(640), "out": torch.zeros(rows, 1280, dtype=dtype)[:, :640]}
        launched.clear()
        with diyfa.use_backend("cuda"):
            c = diyfa.triton_matmul(a, b, **given, **PRODUCTS[name])
        assert c is given.get("out", c)
        passes.append(named_launches(recorder, a=a, b=b, bias=given.get("bias"), c=c))
        kept.append((a, b, given, c))
    assert read_by(passes[0]) == {"a", "b", "c"} | ({"bias"} if given else set()) and not launched
    assert_same(*passes)
    with diyfa.use_backend("cuda"):
        precision = PRODUCTS[name].get("precision")
        assert not diyfa.triton_matmul(a[:16, :0], b[:0], precision=precision).any() and not recorder.launches


# ---- Tiles that are measured ---------------------------------------------------------------------------------------

TILES = tuple(configs.AttentionConfig(n, n, 4, 2, "portable") for n in (64, 32))  # the table's, and a faster one


@pytest.fixture
def measuring(monkeypatch, tmp_path):
    """Tiles are measured while its entry is True, and each is faster than what was measured before."""
    monkeypatch.setenv("DIYFA_CACHE_DIR", str(tmp_path))
    allowed, times = [True], itertools.count()
    tuner = tune.Tuner(
        lambda run: (run(), 2.0 ** -next(times))[1],
        device=lambda: (0, "Test GPU"),
        may_measure=lambda: allowed[0],
        rounds=1,
    )
    tuner.enabled = True
    for name in ("best", "is_settled", "state"):
        monkeypatch.setattr(tune, name, getattr(tuner, name))
    return allowed


KERNELS = {"fwd": "_fwd_kernel", "dkdv": "_bwd_dkdv_kernel", "dq": "_bwd_dq_kernel"}


@pytest.mark.parametrize("kind", KERNELS)
def test_a_tile_that_was_not_measured_yet_is_not_repeated(recorder, measuring, described, monkeypatch, kind):
    """As in a graph capture: the call after it measures."""
    monkeypatch.setattr(attention_launch, "candidates", lambda of, problem: TILES if of == kind else TILES[:1])
    q, k, v = qkv(grad=True)

    def block() -> int:
        """That the kernel was launched with, behind all that was measured."""
        recorder.launches.clear()
        torch.autograd.grad(attend(q, k, v), (q, k, v), torch.zeros_like(q))
        return [one for one in recorder.launches if one.kernel == KERNELS[kind]][-1].constants.block_m

    measuring[0] = False
    assert [block() for _ in range(4)] == [64] * 4
    measuring[0] = True
    assert [block() for _ in range(4)] == [32] * 4
    described.clear()
    assert block() == 32 and not described


@pytest.mark.parametrize("forgets", [False, True], ids=["", "forgets"])
def test_tiles_are_measured_on_a_delta_that_is_filled(recorder, measuring, monkeypatch, tmp_path, forgets):
    """Also where a process has forgotten a tile and keeps no file: what is measured anew overwrites gradients that
    are returned."""
    monkeypatch.setattr(attention_launch, "candidates", lambda of, problem: TILES)
    if forgets:
        monkeypatch.setattr(tuning, "cache_dir", lambda: None)
        monkeypatch.setattr(tuning, "MAX_REMEMBERED", 1)
    q, k, v = qkv(grad=True)
    for _ in range(4):
        recorder.launches.clear()
        torch.autograd.grad(attend(q, k, v), (q, k, v), torch.zeros_like(q))
        filled = set()
        for one in recorder.launches:
            if one.kernel == "_bwd_preprocess_kernel":
                filled.add(one.arguments["delta_ptr"])
            elif one.kernel in ("_bwd_dkdv_kernel", "_bwd_dq_kernel"):
                assert one.arguments["delta_ptr"] in filled


@pytest.mark.parametrize("variant", ["auto", "sm90"])
def test_the_gradient_of_sinks_comes_from_delta(recorder, described, monkeypatch, variant):
    """Not from what else is allocated for a repeated pass: gradients of parts of groups, or a workspace."""
    given = []
    monkeypatch.setattr(attention_launch, "_fill_dsinks", lambda *tensors: given.append(tensors))
    monkeypatch.setattr(bwd_partials, "count_subgroups", lambda *_: 2)
    for _ in range(4):
        (q, k, v), sinks = qkv(**LARGE, grad=True, kv_heads=4), torch.rand(8).requires_grad_()
        out, lse = attend(q, k, v, sinks=sinks, variant=variant, return_lse=True)
        recorder.launches.clear()
        described.clear()
        given.clear()
        torch.autograd.grad(out, (q, k, v, sinks), torch.zeros_like(q))
        ((of_sinks, of_lse, delta, _),) = given
        assert of_sinks.data_ptr() == sinks.data_ptr()
        filled = next(one.arguments["delta_ptr"] for one in recorder.launches if "delta_ptr" in one.arguments)
        assert (of_lse.data_ptr(), delta.data_ptr(), delta.shape) == (lse.data_ptr(), filled, lse.shape)
    assert not described


def test_the_gradient_of_a_bias_is_described_once(recorder, monkeypatch):
    """It is never repeated, so nothing is prepared for that: its sums are as large as the bias."""
    seen, describe = [], bwd_dbias.make_launch
    monkeypatch.setattr(bwd_dbias, "make_launch", lambda *args: seen.append(1) or describe(*args))
    (q, k, v), bias = qkv(grad=True), torch.rand(4, 96, 96).requires_grad_()
    for n in range(1, 5):
        torch.autograd.grad(attend(q, k, v, attn_bias=bias), (q, k, v, bias), torch.zeros_like(q))
        assert len(seen) == n


# ---- Attention over a cache ---------------------------------------------------------------------------------------


def over_cache(rows=1, heads=8, length=100, by="tensor", **options):
    """Arguments of a call of two sequences over a cache of 4096 rows, with `length` keys each."""
    q, cache = torch.zeros(2, rows, heads, 64).bfloat16(), torch.zeros(2, 2, 4096, 2, 64).bfloat16()
    lengths = torch.full((2,), length, dtype=torch.int32) if by == "tensor" else length
    return {"q": q, "k_cache": cache[0], "v_cache": cache[1], "cache_seqlens": lengths, "causal": True, **options}


def appending(length, by):
    k, v = torch.zeros(2, 2, 1, 2, 64, dtype=torch.bfloat16)
    cos, sin = torch.zeros(2, 4096, 16, dtype=torch.bfloat16)
    return over_cache(length=length, by=by, k=k, v=v, rotary_cos=cos, rotary_sin=sin)


def latent(length, by):
    """A latent cache: both descriptors of a tensor are made of what the call gives."""
    given = over_cache(length=length, by=by) | {"q": torch.zeros(2, 1, 16, 576).bfloat16(), "softmax_scale": 0.1}
    cache = torch.zeros(9, 64, 1, 576).bfloat16()
    if by == "tensor":
        given["block_table"] = torch.zeros(2, 4, dtype=torch.int32)
    else:
        cache = cache.flatten(0, 1)[None].expand(2, -1, -1, -1)
    return given | {"k_cache": cache, "v_cache": cache[..., :512]}


def prefilled(length, by):
    given = over_cache(length=length + 500, by=by) | {"q": torch.zeros(2, 512, 16, 128).bfloat16()}
    if by == "tensor":
        cache = torch.zeros(2, 40, 16, 4, 128).bfloat16()
        given["block_table"] = torch.zeros(2, 40, dtype=torch.int32)
    else:
        cache = torch.zeros(2, 2, 640, 4, 128).bfloat16()
    return given | {"k_cache": cache[0], "v_cache": cache[1]}


def a_token(length, by):
    return over_cache(length=length, by=by)


CACHES = {  # arguments, kernels
    "token": (a_token, ["_decode_kernel", "_combine_kernel"]),
    "appended": (appending, ["_append_kernel", "_decode_kernel", "_combine_kernel"]),
    "latent": (latent, ["_decode_mla_kernel", "_combine_kernel"]),
    "prefill": (prefilled, ["_fwd_sm90_kernel"]),
    "in the mode": (a_token, ["_decode_kernel", "_combine_in_order_kernel"]),
}


@pytest.fixture
def chosen_mla(monkeypatch):
    monkeypatch.setattr(decode_mla_configs, "environment_refusal", lambda: None)
    backend = registry.load_backend("cuda")
    kernels = [
        dataclasses.replace(kernel, by_name_only=lambda problem: None)
        if (kernel.op, kernel.name) == ("kvcache_fwd", "sm90")
        else kernel
        for kernel in backend.kernels
    ]
    monkeypatch.setattr(backend, "kernels", kernels)


@pytest.fixture
def on_a_device(monkeypatch):
    """Lengths and tables are as on a device, where the host does not read them."""
    monkeypatch.setattr(kvcache, "_reads_values", lambda *_: False)


@pytest.mark.parametrize("passes_out", [False, True], ids=["", "out"])
@pytest.mark.parametrize("by", ["tensor", "int", "tensor on a device"])
@pytest.mark.parametrize("case", CACHES)
def test_a_repeated_call_with_a_cache_has_the_launches_of_the_first(
    recorder, chosen_mla, launched, monkeypatch, request, case, by, passes_out
):
    """Of one with an int for all lengths the length is given anew."""
    make, kernels = CACHES[case]
    passes, kept, bound = [], [], []
    bind = kvcache._bind
    monkeypatch.setattr(kvcache, "_bind", lambda *args: bound.append(args) or bind(*args))
    if by == "tensor on a device":
        request.getfixturevalue("on_a_device")
    for length in (100, 100, 101, 102):
        given = make(length, "int" if by == "int" else "tensor")
        out = given["q"].new_zeros(*given["q"].shape[:3], given["v_cache"].shape[3]) if passes_out else None
        launched.clear()
        with diyfa.use_backend("cuda"), diyfa.batch_invariant() if "mode" in case else contextlib.nullcontext():
            result, lse = diyfa.flash_attn_with_kvcache(**given, out=out, return_softmax_lse=True)
        assert out is None or result is out
        tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor) and name != "v_cache"}
        launches = named_launches(recorder, **tensors, out=result, lse=lse)
        assert [one.kernel for one in launches] == kernels
        for one in launches:
            if by == "int" and "length" in one.arguments:
                assert one.arguments.pop("length") == given["cache_seqlens"]
        passes.append(launches)
        kept.append((given, result, lse))
        expected = {*tensors, "out", "lse"} - ({"q", "rotary_sin"} if case == "appended" else set())
        assert read_by(launches) >= expected - {"rotary_sin"}
    assert not launched
    assert_same(*passes)
    assert len(bound) == (2 if "device" in by and case != "appended" else 4)


def test_out_over_a_cache_is_checked_at_every_call(recorder, on_a_device, launched):
    """The key of a call does not hold addresses."""
    given, out = over_cache(), torch.zeros(2, 1, 8, 64).bfloat16()
    with diyfa.use_backend("cuda"):
        for _ in range(3):
            diyfa.flash_attn_with_kvcache(**given, out=out)
        launched.clear()
        recorder.launches.clear()
        with pytest.raises(ValueError, match="out must not share memory with v_cache"):
            diyfa.flash_attn_with_kvcache(**given, out=given["v_cache"].flatten()[: out.numel()].view(out.shape))
        diyfa.flash_attn_with_kvcache(**given, out=given["q"].clone())
        diyfa.flash_attn_with_kvcache(**given, out=out)
    assert len(recorder.launches) == 4 and not launched


@pytest.mark.parametrize("by", ["tensor", "int"])
def test_queries_that_out_replaces_are_another_call(recorder, launched, monkeypatch, by):
    """Tiles that are computed again would read what they have written; repeated as others are."""
    table = prefill.select_config
    monkeypatch.setattr(prefill, "select_config", lambda problem: dataclasses.replace(table(problem), fixed_max=True))
    given = prefilled(100, by)
    other = torch.zeros_like(given["q"])
    with diyfa.use_backend("cuda"):
        for in_place in (False, False, False, True, True, True, False, True):
            out = given["q"] if in_place else other
            launched.clear()
            diyfa.flash_attn_with_kvcache(**given, out=out)
            (launch,) = named_launches(recorder, out=out)
            assert launch.arguments["o_ptr"] == "out" and launch.constants.fixed_max != in_place
    assert not launched


def test_separate_values_make_another_call(recorder, chosen_mla):
    given = latent(100, "tensor")
    with diyfa.use_backend("cuda"):
        for _ in range(3):
            diyfa.flash_attn_with_kvcache(**given)
        recorder.launches.clear()
        v = torch.zeros_like(given["k_cache"])[..., :512]
        diyfa.flash_attn_with_kvcache(**given | {"v_cache": v})
    assert recorder.launches[0].kernel == "_decode_kernel"


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
def test_a_repeated_call_of_few_queries_has_the_launches_of_the_first(recorder, launched, layout):
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
        launched.clear()
        with diyfa.use_backend("cuda"), torch.no_grad():
            out, lse = attend(causal=True, return_lse=True)
        assert out.shape[-3:] == q.shape and out.is_contiguous()
        passes.append(named_launches(recorder, q=q, k=k, v=v, out=out, lse=lse))
        kernels = [one.kernel for one in passes[-1]]
        assert kernels == ["_clear_kernel"] * (layout == "thd") + ["_decode_kernel", "_combine_kernel"]
        kept.append((q, k, v, out, lse))
    assert not launched
    assert_same(*passes)


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
    "an odd group": (lambda: over_cache(heads=6), False, "_combine_kernel"),
    "new keys": (
        lambda: over_cache(k=torch.zeros(2, 1, 2, 64).bfloat16(), v=torch.zeros(2, 1, 2, 64).bfloat16()), False,
        "_combine_kernel",
    ),
    "in the mode": (lambda: over_cache(heads=6), True, "_combine_in_order_kernel"),
    "packed": (over_pages, False, "_combine_kernel"),
}  # fmt: skip


@pytest.mark.parametrize("case", WITHOUT_LSE)
def test_an_lse_that_is_not_returned_lies_in_the_workspace(recorder, monkeypatch, case):
    """Behind all that the kernels write there; one that is returned holds no other memory."""
    make, invariant, last = WITHOUT_LSE[case]
    asked, made = [], []
    make_allocator, workspace = runtime_passes.make_allocator, decode.workspace

    def spied_on(device_type):
        allocate = make_allocator(device_type)
        return lambda *args: asked.append(allocate(*args)) or asked[-1]

    monkeypatch.setattr(runtime_passes, "make_allocator", spied_on)
    monkeypatch.setattr(decode, "workspace", lambda *args: made.append(workspace(*args)) or made[-1])
    monkeypatch.setattr(stream_k, "multiprocessors", lambda device: 100)
    function = diyfa.flash_attention_varlen if case == "packed" else diyfa.flash_attn_with_kvcache
    name = "return_lse" if case == "packed" else "return_softmax_lse"
    given = make()
    with diyfa.use_backend("cuda"), diyfa.batch_invariant() if invariant else contextlib.nullcontext():
        for returns_lse in (True, True, True, False, True, False):
            recorder.launches.clear()
            asked.clear()
            result = function(**given, **{name: returns_lse})
            out, lse = result if returns_lse else (result, None)
    of_lse = out.numel() // 64
    (memory,) = [x for x in asked if x is not out]
    kernels = {one.kernel: one.arguments for one in recorder.launches}
    first = kernels["_decode_kernel"]
    begin, at_lse = first["sums_ptr"], first["lse_ptr"]
    assert begin == memory.data_ptr() and first["o_ptr"] == out.data_ptr() and at_lse % 16 == 0
    assert first["statistics_ptr"] < at_lse and at_lse + 4 * of_lse <= begin + memory.numel() * 4
    assert kernels[last]["lse_ptr"] == at_lse and kernels[last]["sums_ptr"] == begin
    # The workspace of a described launch, of which all may be written, ends before it.
    assert at_lse - begin >= made[0].numel() * 4
    with diyfa.use_backend("cuda"), diyfa.batch_invariant() if invariant else contextlib.nullcontext():
        _, lse = function(**given, **{name: True})
    assert lse.untyped_storage().nbytes() == 4 * of_lse and lse is asked[-2] and lse.numel() == of_lse


# ---- Calls that are nearly equal ----------------------------------------------------------------------------------


def shifted(x):
    """The same at an address that is not aligned."""
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


def wide(x):
    """The same with another stride of rows."""
    return x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])[..., : x.shape[-1]]


def turned(x):
    """The same with two dimensions the other way round in memory."""
    return x.transpose(1, -2).contiguous().transpose(1, -2) if x.dim() > 2 else x.t().contiguous().t()


class Choices(random.Random):
    """Mostly the first of several."""

    def __call__(self, first, *others):
        return first if self.random() < 0.85 else self.choice(others)

    def zeros(self, *shape):
        """In memory that may lie in one of several ways."""
        return self(lambda x: x, shifted, wide, turned)(torch.zeros(shape, dtype=torch.bfloat16))


def some_attention(pick):
    """(tensors, call -> results)"""
    heads_kv, rows, keys = pick(4, 2), pick(96, 97), pick(96, 112)
    q, k, v = pick.zeros(2, rows, 4, 64), pick.zeros(2, keys, heads_kv, 64), pick.zeros(2, keys, heads_kv, 64)
    options = {"causal": pick(True, False), "window": pick((-1, -1), (30, 0)), "softcap": pick(0, 2.0)}
    options["seq_lens"] = pick(None, seq_lens_of(40, 90))
    bias = torch.zeros(4, rows, keys)
    options["attn_bias"] = pick(bias, None, shifted(bias), wide(bias), turned(bias), bias[:1], bias.half())
    dout = pick.zeros(*q.shape)
    for x in (q, k, v):
        x.requires_grad_(pick(True, False))

    def call():
        out, lse = diyfa.flash_attention_v2(q, k, v, backend="cuda", return_lse=True, **options)
        wanted = [x for x in (q, k, v) if x.requires_grad]
        return out, lse, *(torch.autograd.grad(out, wanted, dout) if wanted else ())

    return [q, k, v, dout, options["seq_lens"], options["attn_bias"]], call


def some_decoding(pick):
    rows, queries = pick(305, 306, 320), pick(1, 2)
    q, k, v = pick.zeros(2, queries, 8, 72), pick.zeros(2, rows, 2, 72), pick.zeros(2, rows, 2, 72)
    lengths = pick(300, 301, seq_lens_of(300, 280), None)
    options = {"causal": True, "num_splits": pick(0, 3), "window_size": pick((-1, -1), (306, 0))}
    options |= {"out": pick(torch.zeros_like(q), shifted(q), None), "cache_seqlens": lengths}
    if lengths is not None and pick(True, False):
        options |= {"k": pick.zeros(2, queries, 2, 72), "v": pick.zeros(2, queries, 2, 72)}
    invariant = pick(False, True)

    def call():
        with diyfa.use_backend("cuda"), diyfa.batch_invariant() if invariant else contextlib.nullcontext():
            return diyfa.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **options)

    return [q, k, v, *(x for x in options.values() if isinstance(x, torch.Tensor))], call


def some_product(pick):
    a, b = pick.zeros(pick(96, 112), 64), pick.zeros(64, pick(80, 72))
    options = pick({}, {"out_dtype": torch.float32}, {"block_m": 16, "block_n": 32, "block_k": 32})
    options |= pick({}, {"activation": "relu"}, {"activation": "gelu"})
    if "block_m" not in options and a.stride(1) == 1 == b.stride(1) and not (a.data_ptr() | b.data_ptr()) % 16:
        options["variant"] = pick("auto", "sm90")
    bias = torch.zeros(2 * b.shape[1], dtype=torch.bfloat16)
    options |= pick({}, {"bias": bias[::2]}, {"bias": bias[1 : 1 + b.shape[1]]}, {"bias": bias.float()[::2]})
    if pick(False, True):
        rows = pick(b.shape[1], b.shape[1] + 8)
        out = torch.zeros(a.shape[0], rows, dtype=options.get("out_dtype", a.dtype))
        options["out"] = out[:, : b.shape[1]]

    def call():
        with diyfa.use_backend("cuda"):
            return (diyfa.triton_matmul(a, b, **options),)

    return [a, b, *(x for x in options.values() if isinstance(x, torch.Tensor))], call


@pytest.mark.parametrize("kind", [some_attention, some_decoding, some_product], ids=lambda kind: kind.__name__)
def test_no_call_uses_decisions_of_another_call(recorder, monkeypatch, kind):
    """Calls that differ in little, in any order, launch what they do in a process without earlier calls."""
    pick = Choices(0)
    for _ in range(300):
        tensors, call = kind(pick)
        found = []
        for fresh in (False, True):
            with monkeypatch.context() as patch:
                if fresh:
                    patch.setattr(planning, "plans", {})
                    patch.setattr(launcher, "_binaries", {})
                results = call()
            of_call = {f"result {i}": x for i, x in enumerate(results)}
            of_call |= {f"given {i}": x for i, x in enumerate(tensors) if x is not None and x.numel()}
            found.append(named_launches(recorder, **of_call))
        assert_same(*found)
    assert len(planning.plans) < 200  # others were repeated
