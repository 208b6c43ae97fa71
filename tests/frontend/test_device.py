"""Detection of every architecture from (pretended) device properties, and what is said where there is no device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import diyfa
from diyfa import device
from diyfa.arch import NPU_SPECS, GPUArch, NPUArch
from diyfa.device import NPUStatus

GIB = 1024**3


@pytest.fixture
def pretend_gpu(monkeypatch):
    def pretend(major, minor, **properties):
        known = {"name": "Pretended GPU", "multi_processor_count": 66, "total_memory": 24 * GIB, **properties}
        found = SimpleNamespace(major=major, minor=minor, **known)
        monkeypatch.setattr(torch.version, "hip", None)
        for name, value in {"is_available": True, "device_count": 1, "current_device": 0}.items():
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)

    return pretend


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def pretend_npu(monkeypatch):
    def pretend(name, **properties):
        npu = SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: 2,
            get_device_name=lambda index: name,
            get_device_properties=lambda index: SimpleNamespace(total_memory=64 * GIB, **properties),
        )
        monkeypatch.setattr(torch, "npu", npu, raising=False)
        monkeypatch.setattr(device, "npu_status", lambda: NPUStatus(True, True, "2.13.0"))

    return pretend


def test_the_runtime_knows_better_than_the_table(pretend_gpu):
    pretend_gpu(9, 0, shared_memory_per_multiprocessor=123_456)
    assert diyfa.detect_gpu().sram_per_sm == 123_456


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 7), GPUArch.AMPERE_CONSUMER), ((12, 1), GPUArch.BLACKWELL_CONSUMER), ((6, 1), GPUArch.UNKNOWN)],
)
def test_gpus_outside_the_table(pretend_gpu, capability, arch):
    pretend_gpu(*capability)
    gpu = diyfa.detect_gpu()
    assert gpu.arch is arch
    assert gpu.compute_capability == capability
    if arch is GPUArch.UNKNOWN:
        assert (gpu.has_tma, gpu.has_fp8, gpu.has_warpgroup_mma, gpu.sram_per_sm) == (False, False, False, 0)


def test_features_of_the_current_gpu(pretend_gpu):
    names = ("tma_available", "fp8_available", "wgmma_available")
    for capability, has_them in (((9, 0), True), ((8, 0), False)):
        pretend_gpu(*capability)
        arch = f"sm_{capability[0]}{capability[1]}"
        expected = {**dict.fromkeys(names, has_them), "arch": arch, "compute_capability": capability}
        assert diyfa.check_hopper_features() == expected and diyfa.supports_fp8() == has_them


def test_no_such_gpu(pretend_gpu):
    pretend_gpu(9, 0)
    with pytest.raises(ValueError, match="device_id must be below the number of GPUs, 1; got 1"):
        diyfa.detect_gpu(1)


def test_without_a_gpu(no_gpu):
    with pytest.raises(RuntimeError, match="CUDA is not available"):
        diyfa.detect_gpu()
    features = diyfa.check_hopper_features()
    assert not any(features[f"{key}_available"] for key in ("tma", "fp8", "wgmma")) and features["arch"] == "unknown"
    assert not diyfa.supports_fp8()


def test_rocm_is_not_cuda(pretend_gpu, monkeypatch):
    pretend_gpu(9, 0)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(RuntimeError, match="ROCm"):
        diyfa.detect_gpu()
    assert device.default_backend() != "cuda"


@pytest.mark.parametrize("name", NPU_SPECS)
def test_every_npu(pretend_npu, name):
    spec = NPU_SPECS[name]
    pretend_npu(name)
    npu = diyfa.detect_npu(1)
    assert (npu.name, npu.arch, npu.total_memory_gb) == (name, spec.arch, 64.0)
    assert (npu.cube_cores, npu.vector_cores) == (spec.cube_cores, spec.vector_cores)
    assert (npu.ub, npu.l1, npu.l0a, npu.l0b, npu.l0c) == (spec.ub, spec.l1, spec.l0a, spec.l0b, spec.l0c)


def test_npu_runtime_knows_better_and_unknown_chips(pretend_npu):
    pretend_npu("Ascend910B3", cube_core_num=18, vector_core_num=36)
    assert (diyfa.detect_npu().cube_cores, diyfa.detect_npu().vector_cores) == (18, 36)
    pretend_npu("Ascend310P3", cube_core_num=8, vector_core_num=8)
    npu = diyfa.detect_npu()
    assert (npu.arch, npu.cube_cores, npu.ub) == (NPUArch.UNKNOWN, 8, 0)
    with pytest.raises(ValueError, match="number of NPUs, 2; got 2"):
        diyfa.detect_npu(2)


def test_without_an_npu(monkeypatch):
    monkeypatch.setattr(device, "npu_status", lambda: NPUStatus(True, False, "2.13.0", "no libhccl.so", "install CANN"))
    with pytest.raises(RuntimeError, match=r"no NPU is available: no libhccl.so. To mend it: install CANN"):
        diyfa.detect_npu()


def test_detect_lists_everything(pretend_gpu, pretend_npu, monkeypatch):
    pretend_gpu(8, 9)
    pretend_npu("Ascend910B4")
    assert [d.arch for d in diyfa.detect()] == [GPUArch.ADA, NPUArch.A2, NPUArch.A2]
    assert device.default_backend() == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [d.arch for d in diyfa.detect()] == [NPUArch.A2, NPUArch.A2]
    assert device.default_backend() == "npu"
    monkeypatch.delattr(torch, "npu")
    assert device.default_backend() == "cpu"


@pytest.mark.parametrize("rich_installed", [True, False])
def test_print_gpu_info(pretend_gpu, pretend_npu, monkeypatch, capsys, rich_installed):
    pretend_gpu(9, 0)
    pretend_npu("Ascend910B3")
    if not rich_installed:
        real = device.importlib.util.find_spec
        monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None if name == "rich" else real(name))
    diyfa.print_gpu_info()
    printed = capsys.readouterr().out
    for expected in ("Pretended GPU", "HOPPER (sm_90)", "228 KiB", "Ascend910B3", "A2 (Ascend910B)", "20 / 40"):
        assert expected in printed
    assert ("│" in printed) == rich_installed


def test_print_gpu_info_without_a_device(no_gpu, monkeypatch, capsys):
    monkeypatch.setattr(
        device, "npu_status", lambda: NPUStatus(False, False, None, "torch_npu is not installed", "pip")
    )
    diyfa.print_gpu_info()
    assert capsys.readouterr().out.startswith("No accelerator: ")


def test_the_npu_that_is_here():
    """The real torch_npu, on an NPU or on the host shim."""
    if not hasattr(torch, "npu") or not torch.npu.is_available():
        pytest.skip("no NPU and no host shim: run this with python tests/support/npu_env.py")
    npu = diyfa.detect_npu()
    assert npu.name == torch.npu.get_device_name(0) and npu.arch is not NPUArch.UNKNOWN
    assert npu.vector_cores == 2 * npu.cube_cores > 0 and npu.ub > 0 and npu.total_memory_gb > 1
    assert npu in diyfa.detect() and device.npu_status().version
