"""Launches with kept TMA descriptors hand the compiled kernel what Triton's own launcher would."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from diyfa.backends.cuda import launch, tensor_maps
from diyfa.backends.cuda.tensor_maps import Box, encoded_launch

if not triton.__version__.startswith("{}.{}.".format(*tensor_maps.TRITON)):
    pytest.skip("descriptors are encoded at each launch with this Triton", allow_module_level=True)
import triton.backends.nvidia.driver as nvidia

SHAPE, STRIDES, BLOCK = [2, 3, 40, 64], [7680, 2560, 64, 1], [1, 1, 16, 64]
META = {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": BLOCK, "fp4_padded": False}
SIGNATURE = {
    "q": "tensordesc<fp16[1, 1, 16, 64]>", "x": "*fp32", "k": "tensordesc<fp16[1, 1, 16, 64]>", "n": "i32",
    "B": "constexpr",
}  # fmt: skip
BOXES = (Box(SHAPE, STRIDES, BLOCK), None, Box(SHAPE, STRIDES, BLOCK))
HEAD, HOOKS, TAIL = (5, 1, 1, 77, 88), ("packed", None, None, None), (9, 16)


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
    encoded_launch(launcher, BOXES)(HEAD, HOOKS, (q, x, k), TAIL)
    ours, theirs = launcher.calls[1], launcher.calls[0]
    assert len(ours) == len(theirs)
    assert all(a is b or a == b for a, b in zip(ours, theirs, strict=True))
    assert encoded[2:] == asked


def test_an_address_is_encoded_once(launcher, encoded, monkeypatch):
    run = encoded_launch(launcher, BOXES)
    q, x, k = tensors()
    for _ in range(3):
        run(HEAD, HOOKS, (q, x, k), TAIL)
    assert len(encoded) == 2
    run(HEAD, HOOKS, (k, x, q), TAIL)
    assert len(encoded) == 4
    monkeypatch.setattr(tensor_maps._TensorMaps, "LIMIT", 2)
    kept = [tensors() for _ in range(5)]
    for each in kept:
        run(HEAD, HOOKS, each, TAIL)
    for each in kept:
        run(HEAD, HOOKS, each, TAIL)
        assert launcher.calls[-1][13][1] == each[0].data_ptr()


def test_other_launchers_are_used_as_they_are(launcher):
    assert encoded_launch(launcher, (None, None)) is None
    launcher.global_scratch_size = 16
    assert encoded_launch(launcher, BOXES) is None
    launcher.global_scratch_size = 0
    launcher.launch = print
    assert encoded_launch(launcher, BOXES) is None
    launcher.launch = lambda *args: None
    assert encoded_launch(launcher, BOXES) is None


@pytest.mark.parametrize("boxes", [BOXES, (None, None, None)], ids=["tma", "addresses"])
def test_a_repeated_launch_goes_to_the_compiled_kernel(launcher, encoded, monkeypatch, boxes):
    """The first call through Triton, each later one straight to what it compiled."""
    monkeypatch.setattr(launch, "_INTERPRETING", False)
    driver.active.get_current_stream = lambda device: 77
    compiled = SimpleNamespace(run=launcher, function=88, packed_metadata="packed")
    if boxes[0] is None:
        launcher.launch = lambda *args: launcher.calls.append(args)
    first = []

    class Fn:
        arg_names = ("q", "x", "k", "n", "B")

        def __getitem__(self, grid):
            return lambda *args, **kwargs: first.append((grid, args, kwargs)) or compiled

    run = launch.Launch(Fn(), 5, boxes, (9,), {"B": 16}, {"num_warps": 4}, fixed=True)
    q, x, k = tensors()
    run(q, x, k)
    assert len(first) == 1 and first[0][0] == (5,) and first[0][2] == {"B": 16, "num_warps": 4}
    assert not launcher.calls
    run(q, x, k)
    run(q, x, k)
    assert len(first) == 1 and len(launcher.calls) == 2
    call = launcher.calls[-1]
    assert call[:9] == (5, 1, 1, 77, 88, False, True, None, None) and call[-2:] == (9, 16)
    assert len(encoded) == (2 if boxes[0] else 0)
