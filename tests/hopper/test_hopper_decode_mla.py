"""The Hopper kernel over a latent cache without a GPU: right results and no undefined behaviour, in whatever order."""

from __future__ import annotations

import ast
import copy
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hopper_gluon import need_hopper_gluon

need_hopper_gluon()

from hopper_interpreted import load_kernel, source_of  # noqa: E402
from kvcache_cases import CacheCase, assert_in_budget, run_case  # noqa: E402
from simulators.gluon import InterpretedKernel, KernelBug  # noqa: E402

import diyfa  # noqa: E402
from diyfa import fast_path, registry  # noqa: E402
from diyfa.backends.cuda.attention import decode_configs  # noqa: E402
from diyfa.backends.cuda.hopper import decode_mla, decode_mla_configs  # noqa: E402
from diyfa.backends.cuda.runtime.launch import is_interpreting  # noqa: E402
from diyfa.problem import KVCacheProblem  # noqa: E402
from diyfa.testing import poisoned_allocations  # noqa: E402

pytestmark = pytest.mark.skipif(not is_interpreting(), reason="CPU tensors are refused: here the kernel itself is run")


def interpret(
    monkeypatch: pytest.MonkeyPatch,
    programs: int = 2,
    seed: int = 3,
    interleave: bool = False,
    kernels: ModuleType = decode_mla,
) -> InterpretedKernel:
    """From now on this kernel runs all calls with a cache, here, and refuses none that it can run."""
    kernel = InterpretedKernel(kernels._decode_mla_kernel, seed, interleave)
    monkeypatch.setattr(decode_mla, "_decode_mla_kernel", kernel)
    monkeypatch.setattr(decode_configs, "multiprocessors", lambda device: programs)
    monkeypatch.setattr(decode_mla_configs, "environment_refusal", lambda: None)
    backend = registry.load_backend("cuda")
    named = next(k for k in backend.kernels if (k.name, k.op) == ("sm90", "kvcache_fwd"))
    chosen = replace(named, repeat=None)
    monkeypatch.setattr(backend, "kernels", [chosen, *(k for k in backend.kernels if k is not named)])
    monkeypatch.setattr(fast_path, "plans", {})
    return kernel


def case(name: str, *lens: int, **changes) -> CacheCase:
    latent = {"heads": 16, "head_dim": 576, "head_dim_v": 512, "latent": True, "dtype": "bfloat16"}
    return CacheCase(name, lens, **{**latent, **changes})


def check(case: CacheCase) -> None:
    with diyfa.use_backend("cuda"), poisoned_allocations():
        out, lse, _, _ = run_case(case, "cpu")
    assert_in_budget(case, out, lse)


CASES = [
    case("ragged", 0, 1, 64, 150, spare=7),
    case("pages", 200, 33, page_size=64, seqlen_q=3, heads=64),
]
MORE = [
    case("one_key", 1, causal=False),
    case("larger_pages", 300, 5, page_size=128, dtype="float16"),
    case("several_tokens", 70, 3, 0, seqlen_q=7, spare=3),
    case("heads_128", 130, 64, heads=128, seqlen_q=2),
    case("two_heads_of_keys", 70, 200, heads=32, heads_kv=2, causal=False),
    case("leftpad", 70, 200, leftpad=(7, 66), batch_idx=True, causal=False),
    case("append", 60, 100, added=4, seqlen_q=4),
    case("int_length", 90, 90, by="int"),
    case("whole_cache", 128, 128, by="none", causal=False),
    case("more_sequences_than_lanes", *(range(5, 400, 10)), heads=8),
]


@pytest.mark.parametrize(
    "case",
    [*(pytest.param(c, id=c.name) for c in CASES), *(pytest.param(c, id=c.name, marks=pytest.mark.slow) for c in MORE)],
)
def test_out_and_lse(case: CacheCase, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = interpret(monkeypatch, programs=3)
    check(case)
    assert kernel.launches == 1


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2, 4, 5, 6, 7))])
def test_every_interleaving(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, programs=3, seed=seed, interleave=True)
    check(case("small", 290, 40, seqlen_q=2, page_size=64))


REFUSED = {
    "a window": {"window_left": 9},
    "softcap": {"softcap": 9.0},
    "packed queries": {"layout": "thd"},
    "num_splits=1": {"num_splits": 1},
    "batch_invariant": {"batch_invariant": True},
    "cache_leftpad with pages": {"leftpad": True},
    "pages are multiples": {"page_size": 16},
    "24 heads": {"heads_q": 24},
    "latent caches": {"latent": False},
    "float8": {"cache_dtype": "float8_e4m3fn"},
    "16 bytes": {"aligned": False},
    "sm_100": {"arch": "sm_100"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_refuses(words: str) -> None:
    problem = KVCacheProblem("cuda", "sm_90", "bfloat16", "bfloat16", "bshd", 4, 128, 1, 1, 4096, 576, 512, 64)
    problem = problem.replace(latent=True, lengths=True)
    assert decode_mla_configs.refuses(problem) is None
    assert words in (decode_mla_configs.refuses(problem.replace(**REFUSED[words])) or "")


SYNCHRONISING = (
    "mbarrier.wait",
    "mbarrier.expect",
    "mbarrier.init",
    "fence_async_shared",
    "release",
    "wait_full",
)
METHODS = ("init", "wait_full", "release")


def statements(tree: ast.AST) -> list[ast.Expr]:
    """The statements that synchronise and do nothing else, in the order of the source."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    return sorted(
        (
            call
            for call in calls
            if ast.unparse(call.value.func) in SYNCHRONISING
            or (isinstance(call.value.func, ast.Attribute) and call.value.func.attr in METHODS)
        ),
        key=lambda call: call.lineno,
    )


TREE = ast.parse(source_of("hopper.decode_mla"))
LINES = [f"{i}: {ast.unparse(statement)}" for i, statement in enumerate(statements(TREE))]


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_nothing_is_superfluous(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any one wait, arrival or fence the interpreter reports a bug."""
    tree = copy.deepcopy(TREE)
    statements(tree)[int(line.split(":")[0])].value = ast.Constant(None)
    kernels = load_kernel({"hopper.decode_mla": ast.unparse(tree)}, tmp_path, ("hopper.decode_mla",))
    interpret(monkeypatch, kernels=kernels)
    with pytest.raises(KernelBug):
        check(case("two_parts", 450, 200, seqlen_q=2))
