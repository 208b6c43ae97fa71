"""Launches past Triton's launcher hand the compiled kernel what that launcher would."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from diyfa.backends.cuda.runtime import replay
from diyfa.backends.cuda.runtime.replay import relaunch_of
from diyfa.problem import Launch

if not replay.IS_KNOWN:
    pytest.skip("launches go through this Triton's own launcher", allow_module_level=True)
from cuda_launcher import OF_LAUNCH, Recorder, launcher_around, utils

SHAPE, STRIDES, BLOCK = [2, 3, 40, 64], [7680, 2560, 64, 1], [1, 1, 16, 64]
META = {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": BLOCK, "fp4_padded": False}
SIGNATURE = {
    "q": "tensordesc<fp16[1, 1, 16, 64]>", "x": "*fp32", "k": "tensordesc<fp16[1, 1, 16, 64]>", "n": "i32",
    "B": "constexpr",
}  # fmt: skip
HEAD, HOOKS, TAIL = (5, 1, 1, 77, 88), ("packed", None, None, None), (9, 16)
KERNEL = SimpleNamespace(arg_names=("q", "x", "k", "n", "B"))
SLOTS = {"q": 0, "x": 1, "k": 2}


def described(x):
    return TensorDescriptor(x, SHAPE, STRIDES, BLOCK)


def launch_of(q, x, k, has_descriptors=True):
    if has_descriptors:
        q, k = described(q), described(k)
    return Launch(KERNEL, 5, {"q": q, "x": x, "k": k, "n": 9}, {"B": 16}, {"num_warps": 4})


def compiled_by(launcher):
    return SimpleNamespace(run=launcher, function=88, packed_metadata="packed")


def addresses(*tensors):
    return [x.data_ptr() for x in tensors]


@pytest.fixture
def encoded(monkeypatch):
    """Descriptors that the driver was asked to encode."""
    asked = []
    fake = utils(lambda *args: asked.append(args) or ("map", *args[:1]))
    monkeypatch.setattr(driver, "_active", SimpleNamespace(utils=fake))
    return asked


@pytest.fixture
def launcher(encoded):
    recorder = Recorder()
    launcher = launcher_around(recorder, SIGNATURE, [META, META], launch_pdl=True)
    launcher.calls = recorder.calls
    return launcher


def tensors():
    return torch.zeros(SHAPE, dtype=torch.float16), torch.zeros(4), torch.zeros(SHAPE, dtype=torch.float16)


def test_the_same_arguments_reach_the_kernel(launcher, encoded):
    q, x, k = tensors()
    launcher(*HEAD, *HOOKS, described(q), x, described(k), *TAIL)
    asked = list(encoded)
    relaunch_of(compiled_by(launcher), launch_of(q, x, k), SLOTS)(77, addresses(q, x, k))
    theirs, ours = launcher.calls
    assert list(ours) == [x.data_ptr() if y is x else y for y in theirs]
    assert encoded[2:] == asked


def test_an_address_is_encoded_once(launcher, encoded, monkeypatch):
    q, x, k = tensors()
    run = relaunch_of(compiled_by(launcher), launch_of(q, x, k), SLOTS)
    for _ in range(3):
        run(77, addresses(q, x, k))
    assert len(encoded) == 2
    run(77, addresses(k, x, q))
    assert len(encoded) == 4
    monkeypatch.setattr(replay.TensorMaps, "LIMIT", 2)
    kept = [tensors() for _ in range(5)]
    for each in kept:
        run(77, addresses(*each))
    for each in kept:
        run(77, addresses(*each))
        assert launcher.calls[-1][OF_LAUNCH][1] == each[0].data_ptr()


def test_tensors_are_found_where_the_call_has_them(launcher, encoded):
    """Arguments may come from other places than they stand in, several from one, and some are not there."""
    q, x, k = tensors()
    run = relaunch_of(compiled_by(launcher), launch_of(q, x, k), {"q": 3, "x": 0, "k": 3})
    run(77, [None, 1, 2, 48])
    assert [args[0] for args in encoded] == [48, 48] and launcher.calls[-1][-3 - 9] is None


def test_other_launchers_are_used_as_they_are(launcher, monkeypatch):
    by_address, by_maps = launch_of(*tensors(), has_descriptors=False), launch_of(*tensors())
    compiled = compiled_by(launcher)
    assert relaunch_of(compiled, by_maps, SLOTS) is not None
    assert relaunch_of(compiled, by_address, SLOTS) is None  # a function in Python: not the one in C
    assert relaunch_of(compiled, by_maps, {"q": 0, "n": 1}) is None  # tensors do not come first
    for memory in ("global_scratch_size", "profile_scratch_size", "gsan_enabled"):
        with monkeypatch.context() as patch:
            patch.setattr(launcher, memory, 16)
            assert relaunch_of(compiled, by_maps, SLOTS) is None
    with monkeypatch.context() as patch:
        patch.setattr(replay, "IS_KNOWN", False)
        assert relaunch_of(compiled, by_maps, SLOTS) is None
    for other in (print, lambda *args: None):
        launcher.launch = other
        assert relaunch_of(compiled, by_maps, SLOTS) is None


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_on_launches_are_noticed(monkeypatch, which):
    assert not replay.launches_are_hooked()
    monkeypatch.setattr(replay.triton.knobs.runtime, which, lambda metadata: None)
    assert replay.launches_are_hooked()
