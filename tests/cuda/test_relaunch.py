"""Launches past Triton's launcher hand the compiled kernel what that launcher would."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from diyfa.backends.cuda.runtime.tensor_maps import Box
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from diyfa.backends.cuda.runtime import launch, tensor_maps
from diyfa.backends.cuda.runtime import replay as relaunch
from diyfa.backends.cuda.runtime.replay import relaunch_of

if not relaunch.IS_KNOWN:
    pytest.skip("launches go through this Triton's own launcher", allow_module_level=True)
import triton.backends.nvidia.driver as nvidia

SHAPE, STRIDES, BLOCK = [2, 3, 40, 64], [7680, 2560, 64, 1], [1, 1, 16, 64]
META = {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": BLOCK, "fp4_padded": False}
SIGNATURE = {
    "q": "tensordesc<fp16[1, 1, 16, 64]>", "x": "*fp32", "k": "tensordesc<fp16[1, 1, 16, 64]>", "n": "i32",
    "B": "constexpr",
}  # fmt: skip
BOXES = (Box(SHAPE, STRIDES, BLOCK), None, Box(SHAPE, STRIDES, BLOCK))
HEAD, HOOKS, TAIL = (5, 1, 1, 77, 88), ("packed", None, None, None), (9, 16)


def compiled_by(launcher):
    return SimpleNamespace(run=launcher, function=88, packed_metadata="packed")


def addresses(*tensors):
    return [x.data_ptr() for x in tensors]


@pytest.fixture
def encoded(monkeypatch):
    """Descriptors that the driver was asked to encode."""
    asked = []
    utils = SimpleNamespace(fill_tma_descriptor=lambda *args: asked.append(args) or ("map", *args[:1]))
    monkeypatch.setattr(driver, "_active", SimpleNamespace(utils=utils))
    return asked


@pytest.fixture
def launcher(encoded):
    calls = []
    launcher = object.__new__(nvidia.CudaLauncher)
    launcher.num_ctas = 1
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.global_scratch_align = launcher.profile_scratch_align = 1
    launcher.launch_cooperative_grid, launcher.launch_pdl = False, True
    launcher.launch = nvidia.wrap_handle_tensordesc(lambda *args: calls.append(args), SIGNATURE, [META, META])
    launcher.calls = calls
    return launcher


def tensors():
    return torch.zeros(SHAPE, dtype=torch.float16), torch.zeros(4), torch.zeros(SHAPE, dtype=torch.float16)


def test_the_same_arguments_reach_the_kernel(launcher, encoded):
    q, x, k = tensors()
    described = (TensorDescriptor(q, SHAPE, STRIDES, BLOCK), x, TensorDescriptor(k, SHAPE, STRIDES, BLOCK))
    launcher(*HEAD, *HOOKS, *described, *TAIL)
    asked = list(encoded)
    relaunch_of(compiled_by(launcher), 5, BOXES, TAIL)(77, addresses(q, x, k))
    theirs, ours = launcher.calls
    assert list(ours) == [x.data_ptr() if y is x else y for y in theirs]
    assert encoded[2:] == asked


def test_an_address_is_encoded_once(launcher, encoded, monkeypatch):
    run = relaunch_of(compiled_by(launcher), 5, BOXES, TAIL)
    q, x, k = tensors()
    for _ in range(3):
        run(77, addresses(q, x, k))
    assert len(encoded) == 2
    run(77, addresses(k, x, q))
    assert len(encoded) == 4
    monkeypatch.setattr(tensor_maps.TensorMaps, "LIMIT", 2)
    kept = [tensors() for _ in range(5)]
    for each in kept:
        run(77, addresses(*each))
    for each in kept:
        run(77, addresses(*each))
        assert launcher.calls[-1][13][1] == each[0].data_ptr()


def test_other_launchers_are_used_as_they_are(launcher):
    compiled = compiled_by(launcher)
    assert relaunch_of(compiled, 5, (None, None), TAIL) is None  # a function in Python: not the one in C
    launcher.global_scratch_size = 16
    assert relaunch_of(compiled, 5, BOXES, TAIL) is None
    launcher.global_scratch_size = 0
    launcher.launch = print
    assert relaunch_of(compiled, 5, BOXES, TAIL) is None
    launcher.launch = lambda *args: None
    assert relaunch_of(compiled, 5, BOXES, TAIL) is None


@pytest.mark.parametrize("known", [True, False], ids=["known", "another"])
@pytest.mark.parametrize("boxes", [BOXES, (None, None, None)], ids=["tma", "addresses"])
def test_a_repeated_launch_goes_to_the_compiled_kernel(launcher, encoded, monkeypatch, boxes, known):
    """The first call through Triton, each later one straight to what it compiled; its launcher, where it is another."""
    monkeypatch.setattr(launch, "_INTERPRETING", False)
    monkeypatch.setattr(relaunch, "IS_KNOWN", known)
    driver.active.get_current_stream = lambda device: 77
    if boxes[0] is None:
        monkeypatch.setattr(relaunch, "BuiltinFunctionType", type(lambda: None))
        launcher.launch = lambda *args: launcher.calls.append(args)
    compiled = compiled_by(launcher)
    first = []

    class Fn:
        arg_names = ("q", "x", "k", "n", "B")

        def __getitem__(self, grid):
            return lambda *args, **kwargs: first.append((grid, args, kwargs)) or compiled

    run = launch.Launch(Fn(), 5, boxes, (9,), {"B": 16}, {"num_warps": 4}, fixed=True)
    q, x, k = tensors()
    assert run.again is None
    run(q, x, k)
    assert len(first) == 1 and first[0][0] == (5,) and first[0][2] == {"B": 16, "num_warps": 4}
    assert not launcher.calls and (run.again is not None) is known
    run(q, x, k)
    run(q, x, k)
    assert len(first) == 1 and len(launcher.calls) == 2
    call = launcher.calls[-1]
    assert any(y is x for y in call)  # what is read by its address comes as a tensor, which Triton looks at
    assert call[:9] == (5, 1, 1, 77, 88, False, True, None, None) and call[-2:] == (9, 16)
    assert len(encoded) == (0 if boxes[0] is None else 2 if known else 4)


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_on_launches_are_noticed(monkeypatch, which):
    assert not launch.launches_are_hooked()
    monkeypatch.setattr(launch.triton.knobs.runtime, which, lambda metadata: None)
    assert launch.launches_are_hooked()
