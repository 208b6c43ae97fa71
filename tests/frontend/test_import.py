"""Importing diyfa is cheap and touches nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from subprocesses import run_after_torch, run_python

import diyfa

MEASURE = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import diyfa
seconds = time.perf_counter() - start
new = set(sys.modules) - before
print(json.dumps({
    "seconds": seconds,
    "kernel_languages": sorted(n for n in new if n.split(".")[0] in ("triton", "torch_npu")),
    "cuda": torch.cuda.is_initialized(),
    "diyfa": sorted(n for n in new if n.split(".")[0] == "diyfa"),
}))
"""

EVERYTHING_BUT_KERNELS = """
import sys
import torch
before = set(sys.modules)
import diyfa.attention, diyfa.matmul, diyfa.ops, diyfa.reference, diyfa.testing, diyfa.registry
q = torch.zeros(1, 1, 4, 8)
diyfa.flash_attention(q, q, q, backend="cpu")
print(sorted(n for n in set(sys.modules) - before if n.split(".")[0] in ("triton", "torch_npu")))
print(torch.cuda.is_initialized())
"""


def test_import_is_fast_and_touches_no_device() -> None:
    runs = [json.loads(run_after_torch(MEASURE)) for _ in range(3)]
    assert min(run["seconds"] for run in runs) < 0.05
    assert (runs[0]["kernel_languages"], runs[0]["cuda"]) == ([], False)
    assert runs[0]["diyfa"] == ["diyfa", "diyfa.import_hooks"]  # the operators' modules wait until one is looked up


def test_cpu_call_loads_no_kernel_language() -> None:
    assert run_after_torch(EVERYTHING_BUT_KERNELS).split("\n")[:2] == ["[]", "False"]


@pytest.mark.parametrize("name", diyfa.__all__)
def test_no_module_hides_a_public_name(name: str) -> None:
    """Python sets a submodule's name in its package when it is imported, whatever the name stood for before."""
    if find_spec(f"diyfa.{name}") is not None:
        assert isinstance(getattr(diyfa, name), ModuleType)


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'diyfa' has no attribute 'flash'"):
        diyfa.flash  # noqa: B018


ORDERS = {
    "torch first": "import torch, diyfa",
    "diyfa first": "import diyfa, sys; assert 'torch' not in sys.modules; import torch",
    "diyfa, and a look whether there is torch": (
        "import diyfa, importlib.util as util; util.find_spec('torch'); util.find_spec('torch.utils.flop_counter')\n"
        "import torch"
    ),
    "torch.ops.diyfa first": "import torch; torch.ops.diyfa; import diyfa",
}


def process_for(order: str) -> Callable[..., str]:
    """What runs code that imports PyTorch first or later."""
    return run_after_torch if ORDERS[order].startswith("import torch") else run_python


NAMES = ["kvcache_append", "kvcache_fwd", "kvcache_fwd_out", "attention_fwd", "attention_bwd_out", "matmul",
         "matmul_out"]  # fmt: skip
LOOK_UP = f"""
assert not hasattr(torch.ops.diyfa, "nothing_of_that_name")
for name in {NAMES}:
    print(getattr(torch.ops.diyfa, name))
import diyfa.ops
assert torch.ops.diyfa.attention_fwd.default is diyfa.ops._fwd
"""


@pytest.mark.parametrize("order", ORDERS)
def test_operators_are_found_after_the_import_alone(order: str) -> None:
    assert process_for(order)(f"{ORDERS[order]}\n{LOOK_UP}").split() == [f"diyfa.{name}" for name in NAMES]


def test_an_operator_is_looked_up_in_a_compiled_graph() -> None:
    code = """
import torch, diyfa
graph = torch.compile(lambda a: torch.ops.diyfa.matmul(
    a, a, None, None, None, None, False, "ieee", torch.float32, torch.float32, None, "auto", False, "cpu"),
    backend="eager", fullgraph=True)
a = torch.randn(4, 4)
torch.testing.assert_close(graph(a), a @ a)
"""
    run_after_torch(code)


@pytest.mark.parametrize("order", ["torch first", "diyfa first"])
def test_a_saved_program_is_loaded_after_the_import_alone(order: str, tmp_path: Path) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor, k_cache: torch.Tensor) -> torch.Tensor:
            out = diyfa.flash_attention_v2(q, q, q, causal=True, backend="cpu")
            return diyfa.flash_attn_with_kvcache(out, k_cache, k_cache.clone())

    q, cache = torch.randn(2, 5, 4, 16), torch.randn(2, 9, 2, 16)
    with diyfa.use_backend("cpu"):
        torch.export.save(torch.export.export(Attention(), (q, cache)), tmp_path / "program.pt2")
        torch.save((q, cache, Attention()(q, cache)), tmp_path / "tensors.pt")
    code = f"""
{ORDERS[order]}
import sys
folder = sys.argv[1]
program = torch.export.load(folder + "/program.pt2").module()
q, cache, want = torch.load(folder + "/tensors.pt")
assert torch.equal(program(q, cache), want)
print(sorted(str(node.target) for node in program.graph.nodes if "diyfa" in str(node.target)))
"""
    found = process_for(order)(code, arguments=[str(tmp_path)]).strip()
    assert found == "['diyfa.attention_fwd.default', 'diyfa.kvcache_fwd.default']"
