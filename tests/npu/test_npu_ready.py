"""`diyfa.warmup` for NPUs: what Triton is asked to compile, without a device and without CANN."""

from __future__ import annotations

import json

import pytest
from subprocesses import SUPPORT, run_python

from diyfa.backends.npu.runtime.compat import has_ascend_compiler

if not has_ascend_compiler():
    pytest.skip("triton-ascend is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def found():
    printed = run_python(
        "from npu_ready_calls import main; main()", SUPPORT, TRITON_INTERPRET="0", TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    return json.loads(printed.splitlines()[-1])


def test_triton_compiles_all_that_the_calls_launch(found):
    kernels = [kernel["name"] for kernel in found["compiled"]]
    assert found["loaded"] == kernels and found["restored"]  # what launches them is compiled, too
    assert {
        "_fwd_kernel", "_bwd_preprocess_kernel", "_bwd_dkdv_kernel", "_bwd_dq_kernel", "_append_kernel",
        "_decode_kernel", "_combine_kernel", "_merge_kernel", "_matmul_kernel",
    } == {*kernels}  # fmt: skip
    forward, packed, other = [kernel for kernel in found["compiled"] if kernel["name"] == "_fwd_kernel"]
    assert other == {**forward, "q_ptr": other["q_ptr"], "k_ptr": other["k_ptr"], "v_ptr": other["v_ptr"],
                     "out_ptr": other["out_ptr"]}  # fmt: skip
    assert {other[name] for name in ("q_ptr", "k_ptr", "v_ptr", "out_ptr")} == {"torch.bfloat16"}
    assert (forward["q_ptr"], forward["lse_ptr"], forward["cu_seqlens_q_ptr"]) == (
        "torch.float16", "torch.float32", "None"
    )  # fmt: skip
    assert (packed["q_ptr"], packed["cu_seqlens_q_ptr"]) == ("torch.bfloat16", "torch.int32")


def test_calls_that_an_npu_does_not_run_are_listed(found):
    (reason,) = found["refused"]
    assert "float8" in reason


def test_another_chip_is_compiled_for_where_it_is(found):
    assert "kernels for Ascend910B3 are compiled where one is, by CANN's compiler" in found["elsewhere"]


def test_random_calls_of_models_launch_nothing_that_their_warm_up_lacks():
    printed = run_python(
        "from npu_serving_calls import main; main()", SUPPORT, TRITON_INTERPRET="0", TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    found = json.loads(printed.splitlines()[-1])
    assert {name: each["missing"] for name, each in found.items()} == {name: [] for name in found}
    assert all(each["refused"] == [] and each["called"] >= 8 for each in found.values())
