"""The launcher hands the driver, byte for byte, what Triton's own does, whether a call is described or repeated.

Kernels are compiled for sm_90 in a process of its own (`compiled_launches.py`), whose driver is a simulated one.
"""

from __future__ import annotations

import ctypes
import json
import struct
from types import SimpleNamespace

import pytest
import torch
from subprocesses import ROOT, SUPPORT, run_python
from triton.runtime.errors import OutOfResources

from diyfa.backends.cuda.runtime import binaries, launcher, tune
from diyfa.backends.cuda.runtime import driver as cuda_driver
from diyfa.backends.cuda.runtime.signature import Tiles, kernel_source, launch_signature, shared_box
from diyfa.eight_bits import EIGHT_BIT_DTYPES
from diyfa.features import ATTENTION_DTYPES, FEATURES
from diyfa.problem import Launch

# case -> kernels of a call; "descriptors of gluon" and "packed" are compiled longest
CASES = {
    "absent tensors": ["_fwd_kernel"],
    "descriptors": ["_fwd_kernel"],
    "descriptors of gluon": ["_fwd_sm90_kernel"],
    "packed": ["_fwd_kernel", "_clear_kernel", "_clear_kernel", "_bwd_preprocess_kernel", "_bwd_dkdv_kernel",
        "_bwd_dq_kernel"],
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    if torch.cuda.is_available():
        pytest.skip("there is a driver: test_repeat.py runs on the device")
    driver, cache = tmp_path_factory.mktemp("driver"), tmp_path_factory.mktemp("cache")
    printed = run_python(
        "from compiled_launches import main; main()", SUPPORT, ROOT / "tests",
        arguments=[str(driver), *CASES, "lengths", "errors", "threads", "small maps"], TRITON_INTERPRET="0",
        TRITON_CACHE_DIR=str(cache), DIYFA_CACHE_DIR=str(cache),
    )  # fmt: skip
    return json.loads(printed.splitlines()[-1])


def words(launch):
    return {word for x in launch if isinstance(x, list) for word in x}


@pytest.mark.parametrize("case", CASES)
def test_the_driver_gets_what_triton_gives_it(found, case):
    of_case = found[case]
    assert of_case["kernels"] == CASES[case] and of_case["as_triton"] == [True] * len(CASES[case])
    assert of_case["described"] == [True, True, False, False]
    first, *repeated = of_case["launches"]
    assert all(x == first for x in repeated)
    assert {"q", "k", "v", "out", "lse"} <= words(first[0])
    assert any(len(x) == 16 for x in first[0] if isinstance(x, list)) == case.startswith("descriptors")


def test_packed_gradients_are_zero_outside_sequences(found):
    _, of_queries, of_keys, *_ = (words(launch) - {0} for launch in found["packed"]["launches"][0])
    assert of_keys == {"cu_seqlens_k", "dk", "dv"}
    assert {"cu_seqlens_q", "dq"} < of_queries and len(of_queries) == 3  # delta, which is nobody's but the call's


def test_another_length_compiles_nothing(found):
    assert found["lengths"]["compiled"] == [1, 0, 0, 0, 0]


def test_refusals_of_the_driver_are_reported(found):
    assert found["errors"]["errors"] == [
        "CUDA driver: an illegal memory access was encountered (700)", "CUDA driver: unknown error (999)"
    ]  # fmt: skip
    assert found["errors"]["launches_afterwards"] == 1


def test_each_thread_has_its_own_parameters(found):
    """And a context, which its first call of the driver has to make current."""
    assert found["threads"] == {"launches": [100] * 8, "maps": [50] * 8}


def test_a_bit_that_older_drivers_set_wrongly_is_cleared(found):
    """In maps of small tensors."""
    assert found["small maps"]["bits"] == [0, 1, 1, 1]


def test_a_tensor_map_is_moved_to_another_address(found):
    assert found["small maps"]["moved"] == [True] * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU's driver")
def test_the_driver_moves_a_tensor_map_to_another_address():
    from compiled_launches import moved_maps

    assert moved_maps(cuda_driver.driver(), "cuda") == [True, True]


# ---- What a binary is known by ------------------------------------------------------------------------------------


def make_launch(**arguments):
    """Of a kernel with these arguments; `plain_ptr` is read no wider if it is aligned."""
    params = [
        SimpleNamespace(
            name=name, is_constexpr=False, do_not_specialize=False,
            do_not_specialize_on_alignment=name.startswith("plain"),
        )
        for name in arguments
    ]  # fmt: skip
    constant = SimpleNamespace(name="c", is_constexpr=True, do_not_specialize=False)
    kernel = SimpleNamespace(params=[*params, constant], fn=object())
    return Launch(kernel, 1, arguments, {"c": 5}, {})


def test_every_dtype_that_a_call_may_have_is_known():
    dtypes = {dtype for feature in FEATURES for dtype in feature.dtypes} | {*ATTENTION_DTYPES, *EIGHT_BIT_DTYPES}
    for dtype in dtypes:
        launch = make_launch(x_ptr=torch.zeros(4, dtype=dtype))
        assert kernel_source(launch, launch_signature(launch)).types["x_ptr"].startswith("*")


def test_numbers_beyond_float32_are_infinite():
    """A scale divided by a tiny softcap, for instance. `struct` refuses what C converts."""
    values = launch_signature(make_launch(large=1e40, less=-1e40, x=3e38, nan=float("nan"))).values
    assert values[:3] == [float("inf"), -float("inf"), 3e38] and values[3] != values[3]
    struct.pack("<4f", *values)


def test_the_tuner_skips_tiles_with_too_much_shared_memory(monkeypatch):
    """No error of the driver, which would end the call."""
    monkeypatch.setattr(binaries, "stored_binary", lambda *arguments: SimpleNamespace(shared=300_000))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    launch = make_launch(n=3)
    with pytest.raises(OutOfResources, match=r"300000.*232448") as raised:
        launcher.loaded_binary(launch, launch_signature(launch), 0)
    assert tune.cannot_run(raised.value)


def test_strides_of_one_and_alignment_of_all_strides():
    for strides, is_aligned in (((16, 32), True), ((16, 8), False), ((0, 2**32), True), ((1, 16), True)):
        launch = make_launch(stride_q=strides[0], stride_k=strides[1], n=3)
        signature = launch_signature(launch)
        assert signature.kinds[0] == (1 if strides[0] == 1 else "i32") and signature.aligned_strides == is_aligned
        source = kernel_source(launch, signature)
        expected = {"stride_q", "stride_k"} - ({"stride_q"} if strides[0] == 1 else set())
        assert source.aligned == (expected if is_aligned else set())
        assert source.constants == {"c": 5, **({"stride_q": 1} if strides[0] == 1 else {})}


def test_one_unaligned_pointer_unaligns_all():
    x = torch.zeros(64, dtype=torch.float16)
    for tensors, is_aligned in (((x, x, x), True), ((x, x[1:], x), False), ((x, x, x[1:]), True), ((x, None, x), True)):
        launch = make_launch(**dict(zip(("q_ptr", "k_ptr", "plain_ptr"), tensors, strict=True)))
        signature = launch_signature(launch)
        assert signature.aligned_pointers == is_aligned
        assert signature.values == [y.data_ptr() for y in tensors if y is not None]
        source = kernel_source(launch, signature)
        assert source.aligned == (
            {name for name in ("q_ptr", "k_ptr") if name in source.types} if is_aligned else set()
        )
        assert source.constants.get("k_ptr", 0) is (None if tensors[1] is None else 0)


def test_a_loaded_binary_is_known_by_all_that_it_is_compiled_for():
    x = torch.zeros(64, dtype=torch.float16)
    launch = make_launch(x_ptr=x, stride_x=16, n=3)
    others = [launch._replace(arguments=launch.arguments | {name: value}) for name, value in (
        ("x_ptr", x.float()), ("x_ptr", x[1:]), ("x_ptr", None), ("stride_x", 8), ("stride_x", 1), ("n", 2**40),
    )]  # fmt: skip
    others += [
        launch._replace(constants={"c": 6}), launch._replace(options={"num_warps": 8}), launch._replace(aligned=("n",)),
        launch._replace(kernel=make_launch(**launch.arguments).kernel),
    ]  # fmt: skip
    keys = [launcher._key(each, launch_signature(each), 0) for each in (launch, *others)]
    keys.append(launcher._key(launch, launch_signature(launch), 1))
    assert len({*keys}) == len(keys) == 12
    equal = launch._replace(arguments={"x_ptr": torch.ones(32, dtype=torch.float16), "stride_x": 32, "n": 4}, grid=7)
    assert launcher._key(equal, launch_signature(equal), 0) == keys[0]


def test_a_tensor_map_is_made_once_for_each_address(monkeypatch):
    """It is in aligned memory, and only a limited number of maps is stored."""
    made = []

    def moved(encoded, address):
        made.append(address)
        return struct.pack("<Q", address) + encoded[8:]

    monkeypatch.setattr(cuda_driver, "_driver", [SimpleNamespace(moved=moved)])
    monkeypatch.setattr(cuda_driver.TensorMaps, "MAX_SIZE", 2)
    encoded = bytes(range(128))
    maps = cuda_driver.TensorMaps(encoded)
    for address in (640, 1280, 640, 1920, 640):
        begin = maps[address]
        assert begin % 64 == 0 and ctypes.string_at(begin, 128) == struct.pack("<Q", address) + encoded[8:]
    assert made == [640, 1280, 1920, 640]


def test_a_tensor_map_is_moved_only_if_its_copies_are_equal(monkeypatch):
    """Triton's compiler chooses box and swizzle of each descriptor by itself, even if their tiles are equal."""
    x, y, z = torch.zeros(3, 64, 32)
    tensors = x, y, z, x[:32], torch.zeros(64, 64)[:, :32], z[:32]
    tiles = [Tiles(each, each.shape, each.stride(), shared_box(x.dtype, (16, 32))) for each in tensors]
    driver = SimpleNamespace(
        encode=lambda tiles, address, box, swizzle: (address, tiles.shape, tiles.strides, box, swizzle),
        moved=lambda encoded, address: (address, *encoded[1:]),
        load=lambda *arguments: 1,
        launch_function=None,
    )
    monkeypatch.setattr(cuda_driver, "_driver", [driver])
    copies = [((16, 32), swizzle) for swizzle in (3, 2, 3, 3, 3, 3)]
    stored = binaries.StoredBinary(b"", "kernel", 0, 4, False, tuple(copies), 0)
    binary = launcher.Binary(stored, tuple(each.box for each in tiles))
    maps = [value for value in binary.encoded(tiles) if type(value) is tuple]
    assert maps == [
        (each.base.data_ptr(), each.shape, each.strides, *copy) for each, copy in zip(tiles, copies, strict=True)
    ]


def test_parameters_lie_as_a_c_struct():
    kinds = ("i32", torch.float16, None, 1, "fp32", shared_box(torch.float16, (16, 16)), "i32", "i64")
    text, offsets = launcher.parameter_layout(kinds, 1)
    # i32, pointer, float; map, two sizes, two strides; i32, i64, scratch
    assert offsets == [0, 8, 16, 64, 192, 196, 200, 208, 216, 224, 232] and text.count("x") == 3
