"""NaN and infinities in V reach exactly the rows that see them: the Hopper kernel, without a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
if not triton.__version__.startswith("3.6."):
    pytest.skip("the Hopper kernel is written in the Gluon of Triton 3.6", allow_module_level=True)

from gluon_interpreter import Race  # noqa: E402
from nonfinite import poison, same_nonfinite  # noqa: E402
from sm90_interpreted import KERNEL_MODULES, interpret, load_kernel, source_of  # noqa: E402
from test_sm90_features import (  # noqa: E402
    BALANCED,
    DYNAMIC,
    ONE,
    THREE,
    TWO,
    case,
    packed,
)

from diyfa.backends.cuda import fwd_sm90, sm90  # noqa: E402
from diyfa.backends.cuda.launch import is_interpreting  # noqa: E402
from diyfa.problem import use_exact_nonfinite  # noqa: E402
from diyfa.testing import AttentionCase, Results, attention_function, check_budget, make_inputs  # noqa: E402

pytestmark = pytest.mark.skipif(not is_interpreting(), reason="CPU tensors are refused: here the kernel itself is run")

NAN, INF = float("nan"), float("inf")
THIRDS = replace(TWO, piece=32, joined=True)


def attend(case: AttentionCase, where: list[tuple[int, int, float]], **how: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse with what `where` says, (row, feature, value), in the first head of v."""
    inputs = make_inputs(case)
    for at, feature, value in where:
        poison(inputs, case, "v", value, at, feature)
    with torch.no_grad():
        return attention_function(case, **how)(*inputs.leaves, return_lse=True, **inputs.options)


def assert_reaches(case: AttentionCase, where: list[tuple[int, int, float]]) -> None:
    """What is not finite is so on the CPU backend too and no less, and the rest is as right as without it."""
    clean, clean_lse = attend(case, [], backend="cuda", variant="sm90")
    got, lse = attend(case, where, backend="cuda", variant="sm90")
    want, _ = attend(case, where, backend="cpu")
    assert not same_nonfinite(want, clean), "the case shows nothing"
    assert same_nonfinite(got, want)
    assert torch.equal(lse, clean_lse)
    assert case.heads_kv == 1 or torch.equal(got.select(1, -1), clean.select(1, -1)), "another head is not the same"
    rest = torch.where(got.isfinite(), got, clean)
    checked = check_budget(Results(rest, lse, *[None] * (len(Results._fields) - 2)), case)
    assert checked["out"].share <= 1, checked["out"]


CASES = [
    (case("causal", heads_kv=2, causal=True), TWO, [(100, 3, NAN)]),
    (case("first_and_last_block", heads_kv=2, causal=True), TWO, [(0, 0, NAN), (199, 63, NAN)]),
    (
        case("infinities", causal=True, heads=1, seqlen_q=200),
        THREE,
        [(60, 3, INF), (90, 4, -INF), (100, 3, -INF), (130, 4, -INF)],
    ),
    (case("float16", causal=True, heads=1, dtype="float16", layout="bshd"), ONE, [(70, 9, INF), (71, 9, NAN)]),
    (case("window", window=(40, 10), seqlen_q=260, seqlen_k=300, heads=1), TWO, [(150, 3, NAN), (101, 60, -INF)]),
    (case("window_left", window=(70, -1), seqlen_q=130, seqlen_k=300, heads=1), TWO, [(140, 1, INF)]),
    (case("window_right", window=(-1, 20), heads=1), replace(TWO, lazy=True), [(130, 3, NAN)]),
    (
        case("seq_lens", batch=2, heads=1, seqlen_q=200, seq_lens=(190, 70), causal=True),
        replace(DYNAMIC, own_walk=True),
        [(100, 3, NAN)],
    ),
    (packed("packed", (150, 0, 40), (180, 5, 20), causal=True, slack=3), DYNAMIC, [(100, 3, NAN), (190, 5, INF)]),
    (packed("packed_window", (150, 64), (150, 130), window=(40, 10), heads=1), TWO, [(200, 3, -INF)]),
    (case("more_queries", heads=1, seqlen_q=200, seqlen_k=90, causal=True), BALANCED, [(20, 3, NAN)]),
    (case("softcap", heads=1, causal=True, softcap=5.0, sm_scale=-1.0), TWO, [(100, 3, NAN)]),
    (case("negative", heads=1, causal=True, sm_scale=-0.2), replace(TWO, pairs=True), [(100, 3, INF)]),
    # The columns of out: pieces of 32 and 64, one wide piece, a width that is none; where Q was, and joined.
    (case("d72", heads=1, head_dim=72, causal=True), TWO, [(100, 71, NAN)]),
    (case("d96", heads=1, head_dim=96, causal=True), replace(THIRDS, pairs=True), [(100, 95, NAN), (90, 40, INF)]),
    (case("d128", heads=1, head_dim=128, causal=True), TWO, [(100, 100, NAN)]),
    (
        case("d128_held", heads=1, head_dim=128, causal=True),
        replace(DYNAMIC, piece=64, joined=True, q_held=2, lazy=True, by_warp=True),
        [(100, 5, NAN), (100, 127, INF)],
    ),
    (case("d192", heads=1, head_dim=192, causal=True), replace(TWO, slots=3, own_o=False), [(100, 191, NAN)]),
    (case("d192_128", heads=1, head_dim=192, head_dim_v=128, causal=True), replace(TWO, own_o=False), [(100, 70, NAN)]),
    (case("d64_192", heads=1, head_dim=64, head_dim_v=192, causal=True), TWO, [(100, 130, INF)]),
    (case("d256", heads=1, head_dim=256, seqlen_q=130, causal=True), replace(TWO, own_o=False), [(150, 200, NAN)]),
]


@pytest.mark.parametrize(
    ("case", "config", "where"), CASES, ids=lambda x: x.name if isinstance(x, AttentionCase) else ""
)
def test_reaches_the_rows_that_see_it(
    case: AttentionCase,
    config: sm90.Sm90Config,
    where: list[tuple[int, int, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interpret(monkeypatch, config, seed=sum(case.name.encode()) % 7)
    assert_reaches(case, where)


def test_what_it_does_not_reach_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, in its own tile's columns and in tiles before and after."""
    interpret(monkeypatch, TWO)
    some = case("tiles", heads=1, seqlen_q=512, seqlen_k=512, causal=True)
    clean, _ = attend(some, [], backend="cuda", variant="sm90")
    got, _ = attend(some, [(200, 3, NAN)], backend="cuda", variant="sm90")
    other = torch.arange(64) != 3
    assert torch.equal(got[..., other], clean[..., other])
    assert torch.equal(got[0, 0, :128], clean[0, 0, :128]) and got[0, 0, 256:, 3].isnan().all()


MUTANTS = {
    "finished tiles are read before they are written": (r" +await_stores\(\)\n", "", Race),
    "out is not looked at": (r"found = look\(.*", "pass", None),
    "the second consumer has no vote": (
        r"is_spoiled\(votes, CONSUMERS\) !",
        "is_spoiled(votes, 1) !",
        None,
    ),
    "only the first tile is gone through": (r"while( end_block > 0:\n        for)", r"if\1", None),
    "the last notices overwrite the first": (r"\"NOTICES\": notices_of\(config\)", '"NOTICES": 2', None),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_bug_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel with one thing wrong, whose program has three tiles. The NaN spoils one of them, the last one in what
    only its second consumer sees."""
    pattern, replacement, error = MUTANTS[name]
    modules = (*KERNEL_MODULES[:-1], "sm90_exact", "fwd_sm90")
    changed = {module: re.subn(pattern, replacement, source_of(module)) for module in modules}
    assert any(found for _, found in changed.values()), f"the kernel has no {pattern}"
    kernels = load_kernel({module: source for module, (source, _) in changed.items()}, tmp_path, modules)
    monkeypatch.setattr(fwd_sm90, "constants", kernels.constants)
    interpret(monkeypatch, replace(TWO, persistent=True, own_walk=True), kernels=kernels, multiprocessors=1)
    some = case("tiles", heads=1, seqlen_q=384, seqlen_k=384, causal=True)
    for where in (10, 370):
        if error is not None:
            with pytest.raises(error):
                attend(some, [(where, 3, NAN)], backend="cuda", variant="sm90")
        else:
            got, want = (attend(some, [(where, 3, NAN)], backend=b)[0] for b in ("cuda", "cpu"))
            if not same_nonfinite(got, want):
                return
    assert error is not None, "nothing shows it"


@pytest.mark.parametrize("deal", ["static", "balanced", "dynamic"])
def test_more_tiles_than_a_program_keeps_notices_of(deal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more programs than multiprocessors then, none of which takes more tiles than that."""
    monkeypatch.setattr(sm90, "KEPT_NOTICES", 4)
    kernel = interpret(monkeypatch, replace(TWO, persistent=True, deal=deal), seed=3, interleave=True)
    grids = []
    monkeypatch.setattr(fwd_sm90, "grid_of", lambda *args: grids.append(sm90.grid_of(*args)) or grids[-1])
    many = case("many", batch=2, heads=4, seqlen_q=300, seqlen_k=300, causal=True)
    assert_reaches(many, [(100, 3, NAN), (290, 7, NAN)])
    assert min(grids) >= 8 > 2 and kernel.launches == 2


def test_what_is_timed_against_it_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switch reaches calls that have been made before, in both directions."""
    interpret(monkeypatch, TWO)
    some = case("leaks", heads=1, causal=True)
    where = [(100, 3, NAN)]
    exact, _ = attend(some, where, backend="cuda", variant="sm90")
    with use_exact_nonfinite(False):
        leaking, _ = attend(some, where, backend="cuda", variant="sm90")
    again, _ = attend(some, where, backend="cuda", variant="sm90")
    assert leaking.isnan().sum() > exact.isnan().sum()
    assert torch.equal(exact.isnan(), again.isnan())


def test_without_a_mask_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, TWO)
    masks = ({}, {"causal": True}, {"window": (5, -1)}, {"seq_lens": (99,)})
    for mask, exact in zip(masks, (False, True, True, False), strict=True):
        attend(case("mask", heads=1, **mask), [], backend="cuda", variant="sm90")
        (launch,) = fwd_sm90._launches._known.values()
        assert launch._constants["EXACT"] is exact
        fwd_sm90._launches._known.clear()
