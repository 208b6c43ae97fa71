"""The selectors say what the registry would run, in the numbers of the kernels' own tables."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

import diyfa
from diyfa import registry
from diyfa.problem import AttentionProblem, MatmulProblem
from diyfa.selector import AdaptiveKernelSelector, BackendSelector


@pytest.fixture(autouse=True)
def on_cpu():
    with diyfa.use_backend("cpu"):
        yield


def tile(kernel, problem):
    return {"kernel": kernel.name, **asdict(kernel.config(problem))}


def test_configs_are_those_of_the_kernels():
    backend, selector = registry.load_backend("cpu"), AdaptiveKernelSelector()
    problem = AttentionProblem("cpu", "cpu", "float32", "bhsd", 2, 4, 4, 300, 300, 96, 96, window_right=0)
    kernel = registry.choose("attention_fwd", problem, backend)
    got = diyfa.get_attention_config(batch=2, heads=4, seq_len=300, head_dim=96, causal=True, dtype=torch.float32)
    assert got == tile(kernel, problem)
    product = MatmulProblem("cpu", "cpu", "bfloat16", "bfloat16", "bfloat16", 100, 200, 300)
    kernel = registry.choose("matmul", product, backend)
    assert diyfa.get_matmul_config(m=100, n=200, k=300, dtype=torch.bfloat16) == tile(kernel, product)
    assert selector.get_attention_config() == diyfa.get_attention_config()
    assert selector.get_matmul_config()["kernel"] == kernel.name


@pytest.mark.parametrize("causal", [False, True])
def test_selected_attention_computes_attention(causal):
    q, k, v = (torch.randn(2, 3, 40, 16) for _ in range(3))
    selected = BackendSelector().select_attention(2, 3, 40, 16, causal=causal, dtype=torch.float32)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(selected(q, k, v), expected)
    assert selected.keywords["variant"] == diyfa.explain(q, k, v, causal=causal).kernel
    assert BackendSelector().backend == "cpu"
    torch.testing.assert_close(diyfa.get_optimal_attention()(q, k, v, causal=causal), expected)


def test_selected_matmul_multiplies():
    a, b = torch.randn(33, 20).to(torch.bfloat16), torch.randn(20, 17).to(torch.bfloat16)
    for multiply in (diyfa.get_optimal_matmul(), BackendSelector().select_matmul(33, 17, 20, torch.bfloat16)):
        torch.testing.assert_close(multiply(a, b), a @ b)


def test_refusals_have_a_reason():
    with pytest.raises(ValueError, match="no backend called 'tpu'"):
        BackendSelector("tpu")
    with pytest.raises(ValueError, match="Unsupported head_dim: expected 1 to 512, got 4096"):
        BackendSelector().select_attention(1, 1, 64, 4096)
    with pytest.raises(ValueError, match="heads must be a multiple of heads_kv, got 6 and 4"):
        BackendSelector().select_attention(1, 6, 64, 64, heads_kv=4)


@pytest.mark.parametrize(("name", "module"), [("cuda", "triton.backends.nvidia"), ("npu", "triton")])
def test_a_backend_without_its_device(name, module, monkeypatch):
    """Said when the selector is made, and not by PyTorch when it is asked."""
    pytest.importorskip(module)
    monkeypatch.setattr(torch, name, SimpleNamespace(is_available=lambda: False), raising=False)
    monkeypatch.setattr(type(registry.load_backend(name)), "accepts", lambda self, device: f"no {device}")
    with pytest.raises(ValueError, match=f"backend {name!r} cannot run here: PyTorch finds no {name} device"):
        BackendSelector(name)


def test_in_the_interpreter_the_host_stands_in(monkeypatch):
    pytest.importorskip("triton.backends.nvidia")
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: False))
    monkeypatch.setattr(type(registry.load_backend("cuda")), "accepts", lambda self, device: None)
    assert BackendSelector("cuda").select_attention(1, 2, 64, 64).keywords["backend"] == "cuda"


def test_refusals_are_those_of_the_kernels(monkeypatch):
    monkeypatch.setattr(type(registry.load_backend("cpu")), "unsupported", lambda self, problem: "not on Sundays")
    with pytest.raises(ValueError, match=r"cannot run this attention_fwd: v2: not on Sundays"):
        BackendSelector().select_attention(1, 1, 65, 64)
    with pytest.raises(ValueError, match="cannot run this matmul"):
        AdaptiveKernelSelector().get_matmul_config(m=123)


def test_matmul_tile_is_that_of_contiguous_matrices(monkeypatch):
    """On an sm_90 contiguous half-precision matrices go through TMA, unless their rows are not aligned."""
    pytest.importorskip("triton.backends.nvidia", reason="the cuda backend needs Triton for NVIDIA GPUs")
    monkeypatch.setenv("DIYFA_ARCH", "sm_90")
    cuda = registry.load_backend("cuda")
    monkeypatch.setattr("diyfa.selector._resolve", lambda backend: (cuda, torch.device("cpu")))
    selector = AdaptiveKernelSelector("cuda")
    assert selector.get_matmul_config()["kernel"] == "tma"
    assert selector.get_matmul_config(k=4095)["kernel"] == "pointers"
    assert selector.get_matmul_config(n=4100)["kernel"] == "pointers"
