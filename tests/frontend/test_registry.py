"""Selection: which backend and kernel run, why, and that nothing falls back."""

from __future__ import annotations

import copy
import pickle
import threading
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from subprocesses import run_after_torch

import diyfa
from diyfa import registry
from diyfa.features import REFUSABLE
from diyfa.problem import (
    AttentionProblem,
    Backend,
    Kernel,
    KVCacheProblem,
    cached_per_kind,
    refuse_features,
)


def problem(**changes) -> AttentionProblem:
    base = AttentionProblem("cpu", "cpu", "float16", "bhsd", 1, 2, 2, 64, 64, 32, 32)
    return base.replace(**changes)


@pytest.fixture
def cpu() -> Backend:
    return registry.load_backend("cpu")


def test_preferred_and_named_kernels(cpu: Backend) -> None:
    assert registry.choose("attention_fwd", problem(), cpu).name == "v2"
    assert registry.choose("attention_fwd", problem(), cpu, "v1").name == "v1"
    assert diyfa.kernels_for("cpu") == ["v2", "v1", "split_kv"]
    assert diyfa.kernels_for("cpu", "attention_bwd") == ["v2"]
    assert diyfa.kernels_for(torch.device("cpu"), "matmul") == ["tiled"]
    assert registry.choose("attention_fwd", problem(), cpu, "v1") in cpu.kernels


@pytest.mark.parametrize(
    ("installed", "refused"),
    [({"triton": "3.9.0"}, True), ({"triton": "4.0.0+git1"}, True), ({"triton": "3.8.1"}, False),
     ({"triton": "3.9.0", "triton-ascend": "3.2.0"}, False), ({}, False)],
)  # fmt: skip
def test_an_interpreter_without_block_pointers(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], refused: bool
) -> None:
    """The NPU kernels are refused before a launch, with the reason, wherever a backend is chosen or explained."""
    from diyfa.backends.npu.runtime import compat

    for name in ("has_ascend_compiler", "interpreter_problem"):  # what they remember is of the real installation
        monkeypatch.setattr(compat, name, getattr(compat, name).__wrapped__)
    monkeypatch.setattr(compat, "installed_version", installed.get)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    reason = registry.load_backend("npu").accepts(torch.device("cpu"))
    assert (reason is not None) == refused
    if refused:
        q = torch.randn(1, 2, 16, 16)
        for call in (diyfa.flash_attention, diyfa.explain):
            with pytest.raises(ValueError, match=rf"backend 'npu' cannot run.*{installed['triton'][:5]}.*up to 3\.8"):
                call(q, q, q, backend="npu")


@pytest.fixture
def picky(cpu: Backend) -> Backend:
    """The CPU backend with kernels that refuse: v2 dropout, v1 dropout and softcaps."""

    def refusing(kernel: Kernel) -> Kernel:
        every = frozenset(feature.refusal_name for feature in REFUSABLE)
        supported = {"v2": every - {"dropout"}, "v1": every - {"dropout", "softcap"}}[kernel.name]
        return replace(kernel, unsupported=lambda problem: refuse_features(problem, supported, kernel.name))

    class Picky(type(cpu)):
        name = "picky"
        kernels = tuple(refusing(k) for k in cpu.kernels if k.op == "attention_fwd" and k.name != "split_kv")

    return Picky()


def test_explicit_choice_never_falls_back(picky: Backend) -> None:
    """And "auto" names every kernel's reason."""
    every = "v2: v2 does not implement dropout; v1: v1 does not implement dropout, soft"
    for variant, words in (("auto", every), ("v1", "dropout, softcap"), ("v2", "v2 does not implement dropout")):
        with pytest.raises(ValueError, match=words):
            registry.choose("attention_fwd", problem(dropout=True, softcap=5.0), picky, variant)
    assert registry.choose("attention_fwd", problem(softcap=5.0), picky).name == "v2"


def test_a_kernel_that_runs_by_name_only(cpu: Backend) -> None:
    (v2,) = (kernel for kernel in cpu.kernels if kernel.op == "attention_bwd")
    shy = replace(v2, name="shy", by_name_only=lambda problem: None if problem.causal else "it is shy")
    backend = SimpleNamespace(name="with_shy", kernels=(shy, v2), unsupported=lambda problem: None)
    causal, softcap = problem(window_right=0), problem(softcap=5.0)
    assert registry.choose("attention_bwd", problem(), backend).name == "v2"
    assert registry.choose("attention_bwd", causal, backend).name == "shy"
    assert registry.choose("attention_bwd", softcap, backend, "shy").name == "shy"
    with pytest.raises(ValueError, match="shy: it is shy"):
        registry.choose("attention_bwd", softcap, SimpleNamespace(**{**vars(backend), "kernels": (shy,)}))


def test_a_variant_means_a_backward_kernel_that_takes_the_problem(cpu: Backend) -> None:
    (v2,) = (kernel for kernel in cpu.kernels if kernel.op == "attention_bwd")
    picky = replace(v2, name="v1", unsupported=lambda problem: "no softcap" if problem.softcap else None)
    backend = SimpleNamespace(name="with_v1", kernels=(picky, v2), unsupported=lambda problem: None)
    assert registry.variant_or_auto("attention_bwd", backend, "v1", problem()) == "v1"
    assert registry.variant_or_auto("attention_bwd", backend, "v1", problem(softcap=5.0)) == "auto"
    assert registry.variant_or_auto("attention_bwd", backend, "v3", problem()) == "auto"


def test_unsupported_dtype(cpu: Backend) -> None:
    with pytest.raises(ValueError, match="computes float16, bfloat16, float32, float64, not complex64"):
        registry.choose("attention_fwd", problem(dtype="complex64"), cpu)


def test_features_of_a_problem() -> None:
    assert problem().features == frozenset()
    assert problem(window_right=0).features == {"causal"}
    assert problem(window_left=5, window_right=0).features == {"causal", "window"}
    several = problem(heads_kv=1, head_dim_v=64, sinks=True, bias="float32")
    assert several.features == {"gqa", "head_dim_v", "sinks", "attn_bias"}


def test_use_backend_nests_and_restores() -> None:
    """Blocks may end in another order, and the backward pass runs on the backend of its forward pass."""
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    first, second = diyfa.use_backend("npu"), diyfa.use_backend("cpu")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert registry.forced_backend() == "cpu"
    with diyfa.use_backend("npu"):
        assert registry.forced_backend() == "npu"
    out = diyfa.flash_attention(q, q, q)
    second.__exit__(None, None, None)
    assert registry.forced_backend() == ""
    assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()
    with pytest.raises(RuntimeError, match="inside"), diyfa.use_backend("cpu"):
        raise RuntimeError("inside")
    assert registry.forced_backend() == ""
    with pytest.raises(ValueError, match="no backend called 'gpu'"), diyfa.use_backend("gpu"):
        pass


def test_use_backend_belongs_to_its_thread() -> None:
    names, seen = ["cpu", "npu"] * 2, {}
    together = threading.Barrier(len(names))

    def run(i: int) -> None:
        together.wait()
        with diyfa.use_backend(names[i]):
            together.wait()
            seen[i] = registry.forced_backend()
            together.wait()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [seen[i] for i in range(len(names))] == names and registry.forced_backend() == ""


def test_decisions_are_cached_per_kind() -> None:
    asked = []

    @cached_per_kind
    def decide(problem: AttentionProblem, what: str) -> str:
        asked.append(what)
        bounds = problem.window_left, problem.window_right
        return f"{what} {problem.batch} {problem.seqlen_q} {problem.seqlen_k} {bounds}"

    first = problem(seqlen_q=4, window_left=3, window_right=7)
    second = problem(seqlen_q=5, window_left=0, window_right=1)
    assert decide(first, "a") == decide(second, "a") == "a None None None (0, 1)" and asked == ["a"]
    assert decide(first, "b").startswith("b") and asked == ["a", "b"]
    assert first.kind is second.kind and first.kind.kind is first.kind
    assert first.seqlen_q == 4 and first.window_right == 7  # the problem itself is as it was


def test_kinds_differ_in_every_field_but_sizes() -> None:
    """And of a window's bounds by their signs, where 0 on the right is a causal mask."""
    cache = KVCacheProblem("cpu", "cpu", "float16", "float16", "bshd", 1, 2, 2, 64, 64, 32, 32)
    for first in (problem(), cache):
        for each in fields(first):
            value = getattr(first, each.name)
            other = {str: "x", bool: not value, int: 77, float: 3.5, tuple: (64, 64)}[type(value)]
            changed = first.replace(**{each.name: other})
            assert (changed.kind is first.kind) == (each.name in type(first).SIZES), each.name
    windows = [(-1, -1), (-1, 0), (-1, 5), (0, -1), (3, 0), (3, 5)]
    assert len({id(problem(window_left=left, window_right=right).kind) for left, right in windows}) == len(windows)
    assert problem(window_left=0, window_right=1).kind is problem(window_left=9, window_right=8).kind


def test_copies_of_a_problem_have_its_fields_alone() -> None:
    first = problem(seqlen_q=4)
    first.kind.cached_results["what"] = lambda: None  # nothing that could be pickled
    for other in (pickle.loads(pickle.dumps(first)), copy.deepcopy(first), copy.copy(first)):
        assert other == first and other.kind is first.kind
        assert set(pickle.loads(pickle.dumps(other)).__dict__) == {each.name for each in fields(first)}


def test_explain() -> None:
    q = torch.zeros(2, 4, 16, 32, dtype=torch.float16)
    said = diyfa.explain(q, q[:, :2], q[:, :2], causal=True, backend="cpu")
    assert (said.op, said.backend, said.kernel) == ("attention_fwd", "cpu", "v2")
    assert "backend='cpu' was asked for" in said.why
    assert said.problem.causal and said.problem.heads_kv == 2
    assert said.config is not None and said.config.block_m > 0
    assert {(a.backend, a.kernel) for a in said.alternatives} >= {("cpu", "v1")}
    assert "cpu/v2" in str(said) and "not cpu/v1: could run; v2 is preferred" in str(said)
    q.requires_grad_()
    named = diyfa.explain(q, q, q, variant="v1", backend="cpu")
    assert named.kernel == "v1" and "variant='v1'" in named.why and named.backward is not None
    assert (named.backward.op, named.backward.backend, named.backward.kernel) == ("attention_bwd", "cpu", "v2")
    assert named.backward.problem == named.problem and named.backward.problem.needs_grad
    assert "attention_bwd: cpu/v2" in str(named)
    with torch.no_grad():
        assert diyfa.explain(q, q, q, backend="cpu").backward is None


def test_explain_packed_sequences() -> None:
    q, cu = torch.zeros(16, 4, 32, dtype=torch.float16), torch.tensor([0, 5, 14], dtype=torch.int32)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 9, "max_seqlen_k": 9}
    said = diyfa.explain(q, q[:, :2], q[:, :2], layout="thd", window=(3, 20), dropout_p=0.5, backend="cpu", **lengths)
    assert said.kernel == "v2" and said.problem.varlen and said.problem.dropout
    assert (said.problem.batch, said.problem.seqlen_q, said.problem.total_q, said.problem.heads_kv) == (2, 9, 16, 2)
    assert (said.problem.window_left, said.problem.window_right) == (3, -1)


def test_explain_reports_what_another_backend_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def accepts(device: torch.device) -> str | None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(registry, "_plugins", lambda: {"faulty": None})
    monkeypatch.setitem(registry._loaded, "faulty", SimpleNamespace(accepts=accepts))
    q = torch.randn(1, 2, 4, 8)
    (said,) = [a for a in diyfa.explain(q, q, q, backend="cpu").alternatives if a.backend == "faulty"]
    assert (said.kernel, said.reason) == ("*", "RuntimeError: no driver")


BROKEN = {
    "value": 'raise ValueError("no such chip")',
    "attribute": "import torch\ntorch.no_such_function",
    "syntax": "def (",
    "exit": 'raise SystemExit("driver missing")',
    "protocol": "backend = object()",
    "property": "class Bad:\n    kernels = property(lambda self: 1 / 0)\n    accepts = arch = unsupported = print\n"
    "    name, device_type = 'bad', 'meta'\nbackend = Bad()",
}
USE_BROKEN = """
import sys, torch, diyfa
from diyfa import registry
q = torch.randn(1, 2, 4, 8)
assert diyfa.flash_attention(q, q, q, backend="cpu").shape == q.shape
(said,) = [a for a in diyfa.explain(q, q, q, backend="cpu").alternatives if a.backend == "bad"]
assert said.kernel == "*", said
for device in ("meta", "bad"):
    try:
        registry.resolve_backend(torch.device("meta"), "bad" if device == "bad" else "")
    except (ValueError, ImportError, TypeError) as error:
        assert said.reason in str(error), error
    else:
        raise SystemExit("resolved")
from diyfa.cli.info import collect
(entry,) = [b for b in collect()["backends"] if b["name"] == "bad"]
assert entry == {"name": "bad", "loads": False, "reason": said.reason}, entry
print(said.reason)
"""


def add_plugin(folder: Path, name: str, module: str, code: str) -> None:
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[diyfa.backends]\n{name} = {module}:backend\n")


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_breaks_nothing_else(name: str, tmp_path: Path) -> None:
    add_plugin(tmp_path, "bad", "bad_attention", BROKEN[name])
    reason = run_after_torch(USE_BROKEN, tmp_path).strip()
    expected = {
        "value": "backend 'bad' does not load: ValueError: no such chip",
        "attribute": "backend 'bad' does not load: AttributeError: module 'torch' has no attribute 'no_such_function'",
        "syntax": "backend 'bad' does not load: SyntaxError",
        "exit": "backend 'bad' does not load: SystemExit: driver missing",
        "protocol": "backend 'bad' does not follow diyfa.problem.Backend",
        "property": "backend 'bad' does not load: ZeroDivisionError: division by zero",
    }
    assert reason.startswith(expected[name])
