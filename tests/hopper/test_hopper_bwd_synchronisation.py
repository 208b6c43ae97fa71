"""Every wait, arrival and fence of the Hopper backward is needed: without any one the interpreter reports a bug."""

from __future__ import annotations

import ast
import copy
from pathlib import Path

import pytest
import torch
from hopper_gluon import need_hopper_gluon

need_hopper_gluon()

from hopper_interpreted import BACKWARD_MODULES, interpret_backward, load_kernel, source_of  # noqa: E402
from simulators.gluon import KernelBug  # noqa: E402

from diyfa.backends.cuda.hopper import bwd_launch as hopper_bwd  # noqa: E402
from diyfa.backends.cuda.runtime.launch import is_interpreting  # noqa: E402
from diyfa.problem import AttentionGradients, AttentionProblem, AttentionTensors  # noqa: E402

pytestmark = pytest.mark.skipif(not is_interpreting(), reason="CPU tensors are refused: here the kernel itself is run")

SYNCHRONISING = (
    "mbarrier.wait",
    "mbarrier.arrive",
    "mbarrier.expect",
    "mbarrier.init",
    "fence_async_shared",
    "tma.store_wait",
    "wait_full",
    "release",
    "_wait_for_other",
    "wait_for_previous_kernels",
)
METHODS = ("init", "wait_full", "wait_do", "wait_empty", "wait_ds", "release")
# Two query heads share the keys: long enough for every stage to be used again.
PROBLEM = AttentionProblem("cuda", "sm_90", "bfloat16", "bhsd", 1, 2, 1, 260, 200, 64, 64, -1, 0)


def is_synchronising(function: ast.expr) -> bool:
    method = isinstance(function, ast.Attribute) and function.attr in METHODS
    return method or ast.unparse(function) in SYNCHRONISING


def statements(tree: ast.AST) -> list[ast.Expr]:
    """The statements that synchronise and do nothing else, in the order of the source."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    return sorted((call for call in calls if is_synchronising(call.value.func)), key=lambda call: call.lineno)


TREE = ast.parse(source_of("hopper.bwd"))
LINES = [f"{i}: {ast.unparse(statement)}" for i, statement in enumerate(statements(TREE))]


def run() -> None:
    """The backward of random tensors."""
    torch.manual_seed(0)
    q, k, v, out, dout = (
        torch.randn(1, h, s, 64).bfloat16() for h, s in ((2, 260), (1, 200), (1, 200), (2, 260), (2, 260))
    )
    tensors = AttentionTensors(q, k, v, 0.125)
    gradients = AttentionGradients(*(torch.empty_like(x) for x in (q, k, v)))
    hopper_bwd.attention_backward(PROBLEM, tensors, out, torch.zeros(1, 2, 260), dout, None, gradients)


def test_with_all_of_them_nothing_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = load_kernel({"hopper.bwd": ast.unparse(TREE)}, tmp_path, BACKWARD_MODULES)
    interpret_backward(monkeypatch, seed=3, kernels=kernels)
    run()


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_nothing_is_superfluous(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = copy.deepcopy(TREE)
    statements(tree)[int(line.split(":")[0])].value = ast.Constant(None)
    kernels = load_kernel({"hopper.bwd": ast.unparse(tree)}, tmp_path, BACKWARD_MODULES)
    interpret_backward(monkeypatch, seed=3, kernels=kernels)
    with pytest.raises(KernelBug):
        run()
