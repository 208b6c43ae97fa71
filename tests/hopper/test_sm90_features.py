"""The Hopper kernel without a GPU: what sets its tiles, masks and descriptors apart from the plain case."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hopper_gluon import need_hopper_gluon

need_hopper_gluon()

from sm90_interpreted import interpret, run  # noqa: E402

import diyfa  # noqa: E402
from diyfa.backends.cuda.hopper.configs import Sm90Config  # noqa: E402
from diyfa.backends.cuda.runtime.launch import is_interpreting  # noqa: E402
from diyfa.reference import reference_attention  # noqa: E402
from diyfa.testing import AttentionCase  # noqa: E402

pytestmark = pytest.mark.skipif(not is_interpreting(), reason="CPU tensors are refused: here the kernel itself is run")

TWO = Sm90Config(2, 64, 4, True, 240, 24)  # blocks of 64 keys: more edges in the same time
ONE = Sm90Config(1, 64, 4, True, 232, 24)
THREE = replace(TWO, consumers=3)
TURNS_OWN = {"skip_masked": True, "persistent": True, "pingpong": True, "scheduler": "dynamic"}
BALANCED = replace(TWO, persistent=True, scheduler="balanced")
DYNAMIC = replace(TWO, persistent=True, scheduler="dynamic")
ALONE = {"lazy_rescale": True, "per_warp_arrive": True, "own_o": False, "direct": True}
WIDE = {**ALONE, "joined": True, "pingpong": True, "pairs": True}  # as the table has it at 192/128
HELD_192 = {**WIDE, "box_columns": 64, "q_in_registers": 2}


def case(name: str, **changes) -> AttentionCase:
    sizes = {"batch": 1, "heads": 2, "heads_kv": 1, "seqlen_q": 150, "seqlen_k": 200, "head_dim": 64}
    return AttentionCase(name, **{**sizes, "dtype": "bfloat16", **changes})


def packed(name: str, lens_q: tuple[int, ...], lens_k: tuple[int, ...], **changes) -> AttentionCase:
    return case(name, batch=0, seqlen_q=0, seqlen_k=0, layout="thd", lens_q=lens_q, lens_k=lens_k, **changes)


CASES = [
    (case("seq_lens", batch=2, seqlen_q=200, seq_lens=(130, 1), layout="bshd"), TWO),
    (case("seq_lens_causal", batch=2, seqlen_q=200, seq_lens=(200, 70), causal=True, head_dim=128), TWO),
    (case("seq_lens_more_keys", batch=2, seqlen_q=193, seqlen_k=260, seq_lens=(129, 250)), THREE),
    (case("seq_lens_heads_first", batch=2, seqlen_q=200, seq_lens=(130, 64), view="transposed"), TWO),
    # Each program has sixteen tiles, a third of them beyond an end.
    (
        case(
            "seq_lens_many_tiles",
            batch=8,
            seqlen_q=256,
            seqlen_k=256,
            seq_lens=(256, 48, 112, 16, 192, 80, 144, 32),
            causal=True,
            head_dim=128,
        ),
        replace(
            DYNAMIC,
            box_columns=64,
            joined=True,
            q_in_registers=2,
            pairs=True,
            lazy_rescale=True,
            per_warp_arrive=True,
            pingpong=True,
        ),
    ),
    (packed("packed", (150, 0, 3), (70, 20, 200), slack=9), TWO),
    (packed("packed_causal", (60, 200), (200, 60), causal=True), replace(TWO, persistent=True)),
    (packed("packed_many", (5, 64, 1, 130) * 9, (9, 1, 70, 2) * 9, heads=1), replace(TWO, persistent=True)),
    (packed("packed_three", (193, 20), (65, 20), slack=1), THREE),
    (case("window", window=(70, 30), seqlen_q=260, seqlen_k=300, head_dim=128), TWO),
    # Of a tile's 128 rows the last one alone does not see all of a block.
    (case("window_left_one_row", heads=1, window=(314, 0), seqlen_q=128, seqlen_k=636), TWO),
    (case("window_narrow", window=(3, 0), seqlen_q=300, seqlen_k=200), TWO),
    (case("window_left", window=(100, -1), seqlen_q=130, seqlen_k=400), TWO),
    (case("window_right", window=(-1, 20), seqlen_q=200, seqlen_k=150), TWO),
    (packed("window_packed", (150, 64), (150, 130), window=(40, 10)), TWO),
    (case("window_seq_lens", batch=2, seqlen_q=200, seq_lens=(190, 33), window=(50, 0)), THREE),
    (case("d96", head_dim=96, causal=True), TWO),
    (case("d40", head_dim=40, layout="bshd"), TWO),
    (case("d192", head_dim=192, causal=True), replace(TWO, stages=3, own_o=False)),
    (case("d136", head_dim=136), TWO),
    (case("d192_128", head_dim=192, head_dim_v=128, causal=True), replace(TWO, own_o=False, persistent=True)),
    (case("d96_boxes", head_dim=96, causal=True), replace(TWO, box_columns=32)),
    (case("d96_joined", head_dim=96, causal=True, layout="bshd"), replace(TWO, box_columns=32, joined=True)),
    (
        case("d80_joined", head_dim=80, dtype="float16"),
        replace(TWO, box_columns=32, joined=True, own_o=False, persistent=True),
    ),
    (case("d160_joined", head_dim=160), replace(TWO, box_columns=32, joined=True, own_o=False)),
    (case("d224_joined", head_dim=224, seqlen_k=100), replace(TWO, box_columns=32, joined=True, own_o=False)),
    (case("d192_joined", head_dim=192, causal=True), replace(TWO, joined=True, own_o=False, pingpong=True)),
    (case("d192_128_joined", head_dim=192, head_dim_v=128), replace(TWO, joined=True, own_o=False)),
    (
        packed("d96_64_joined", (150, 40), (70, 20), head_dim=96, head_dim_v=64),
        replace(TWO, box_columns=32, joined=True),
    ),
    (case("d192_64", head_dim=192, head_dim_v=64, seq_lens=(99,)), TWO),
    (case("d64_192", head_dim=64, head_dim_v=192), TWO),
    (case("d64_128", head_dim=64, head_dim_v=128, window=(80, 0)), TWO),
    (case("d128_64", head_dim=128, head_dim_v=64, softcap=3.0), TWO),
    (packed("d96_packed", (150, 40), (70, 20), head_dim=96, head_dim_v=72, causal=True), TWO),
    (case("pingpong_three", seqlen_q=400, causal=True), replace(THREE, persistent=True, pingpong=True)),
    (case("one", seqlen_k=300, causal=True), ONE),
    (packed("one_packed", (64, 70, 3), (100, 2, 64)), replace(ONE, stages=2)),
    (case("one_192", head_dim=192, head_dim_v=128, softcap=9.0), replace(ONE, own_o=False)),
    (case("together", heads=4, batch=2, causal=True), replace(TWO, together=3)),
    (case("pairs", causal=True), replace(TWO, pairs=True)),
    (case("pairs_float16", dtype="float16", seqlen_k=500, head_dim=128), replace(TWO, pairs=True, block_n=128)),
    (case("pairs_three", seqlen_q=400, seqlen_k=450, causal=True), replace(THREE, pairs=True, **TURNS_OWN)),
    (case("pairs_joined", head_dim=96, causal=True), replace(TWO, box_columns=32, joined=True, pairs=True)),
    (case("lazy_rescale", sm_scale=2.0, seqlen_k=500, causal=True), replace(TWO, lazy_rescale=True, pairs=True)),
    (
        case("lazy_rescale_window", sm_scale=1.0, seqlen_q=250, seqlen_k=400, window=(100, 20)),
        replace(THREE, lazy_rescale=True),
    ),
    (
        packed("lazy_boxes", (150, 40), (70, 20), head_dim=96, causal=True),
        replace(TWO, box_columns=32, lazy_rescale=True),
    ),
    (
        case("q_in_registers", heads=3, seqlen_q=300, causal=True),
        replace(DYNAMIC, box_columns=64, joined=True, q_in_registers=2),
    ),
    (
        case("q_in_registers_128", seqlen_k=500, head_dim=128),
        replace(TWO, box_columns=64, joined=True, q_in_registers=2, pairs=True),
    ),
    (
        case("q_in_registers_half", heads=3, seqlen_q=300, head_dim=128),
        replace(BALANCED, box_columns=64, joined=True, q_in_registers=1),
    ),
    (
        case("direct_256", seqlen_q=300, head_dim=256, causal=True),
        replace(DYNAMIC, box_columns=64, joined=True, q_in_registers=1, own_o=False, direct=True),
    ),
    (case("direct_200", head_dim=200), replace(TWO, own_o=False, direct=True)),
    (case("direct_192_128", head_dim=192, head_dim_v=128), replace(TWO, own_o=False, direct=True)),
    (case("q_in_registers_192", heads=3, seqlen_q=300, head_dim=192, causal=True), replace(DYNAMIC, **HELD_192)),
    (
        packed("q_in_registers_192_packed", (150, 0, 70), (90, 30, 64), head_dim=192, causal=True),
        replace(DYNAMIC, **HELD_192),
    ),
    (
        case("q_in_registers_whole_192", seqlen_k=300, head_dim=192),
        replace(DYNAMIC, **{**HELD_192, "q_in_registers": 3}),
    ),
    (case("q_in_registers_64_192", head_dim=64, head_dim_v=192, causal=True), replace(TWO, stages=6, **HELD_192)),
    (case("wide_128", heads=3, seqlen_q=300, head_dim=192, head_dim_v=128, causal=True), replace(DYNAMIC, **WIDE)),
    (packed("wide_packed", (150, 0, 70), (90, 30, 64), head_dim=192, head_dim_v=128), replace(DYNAMIC, **WIDE)),
    (case("one_direct", head_dim=128, seqlen_k=300, causal=True), replace(ONE, **ALONE)),
    (case("one_wide", head_dim=192, seqlen_q=64), replace(ONE, stages=3, joined=True, **ALONE)),
    (packed("direct_packed", (150, 0, 70), (90, 30, 64)), replace(DYNAMIC, own_o=False, direct=True)),
    (case("direct_lens", seq_lens=(130,)), replace(DYNAMIC, own_o=False, direct=True)),
    (
        case("q_in_registers_256", seqlen_q=300, head_dim=256),
        replace(DYNAMIC, box_columns=64, joined=True, q_in_registers=2, own_o=False),
    ),
    (case("skip_masked", heads=3, seqlen_q=400, seqlen_k=450, causal=True), replace(THREE, skip_masked=True)),
    (
        case("skip_masked_more_queries", seqlen_q=300, seqlen_k=130, causal=True),
        replace(TWO, skip_masked=True, persistent=True),
    ),
    (case("skip_masked_turns", seqlen_q=500, seqlen_k=400, causal=True), replace(THREE, **TURNS_OWN)),
    (case("skip_masked_window", seqlen_q=400, seqlen_k=400, window=(90, 20)), replace(THREE, skip_masked=True)),
    (
        packed("skip_masked_packed", (150, 0, 300, 3), (150, 9, 200, 64), causal=True),
        replace(DYNAMIC, skip_masked=True),
    ),
    (
        case("skip_masked_seq_lens", batch=3, seqlen_q=300, seqlen_k=300, seq_lens=(1, 300, 70), causal=True),
        replace(THREE, skip_masked=True),
    ),
    (case("balanced", heads=3, seqlen_q=400, seqlen_k=450, causal=True), BALANCED),
    (case("balanced_groups", heads=5, batch=2, seqlen_q=300, causal=True), replace(BALANCED, together=3)),
    (case("balanced_three", batch=2, seqlen_q=400, causal=True), replace(BALANCED, consumers=3, pingpong=True)),
    (packed("balanced_packed", (150, 0, 300, 3), (150, 9, 300, 64), causal=True), BALANCED),
    (case("balanced_seq_lens", batch=3, seqlen_q=300, seqlen_k=300, seq_lens=(1, 300, 70), causal=True), BALANCED),
    (packed("dynamic_packed", (150, 0, 300, 3), (150, 9, 300, 64), causal=True), DYNAMIC),
    (case("dynamic_seq_lens", batch=3, seqlen_q=300, seqlen_k=300, seq_lens=(1, 300, 70), causal=True), DYNAMIC),
    (case("dynamic_window", seqlen_q=400, seqlen_k=400, window=(70, 0)), replace(DYNAMIC, pingpong=True)),
    (case("dynamic_one_tile", heads=1, seqlen_q=128, head_dim=192), replace(DYNAMIC, own_o=False)),
    (case("per_warp_arrive", seqlen_q=300, causal=True), replace(DYNAMIC, per_warp_arrive=True, pingpong=True)),
    (
        packed("by_warp_packed", (150, 0, 193, 3), (150, 9, 100, 64)),
        replace(THREE, per_warp_arrive=True, skip_masked=True),
    ),
    (case("sinks_causal", heads=4, heads_kv=2, sinks=True, causal=True, seqlen_k=300), TWO),
    (case("sinks_no_keys", sinks=True, window=(-1, 0), seqlen_q=200, seqlen_k=70, dtype="float16"), TWO),
    (case("sinks_window_lens", batch=2, seqlen_q=200, seq_lens=(190, 33), window=(50, 0), sinks=True), THREE),
    (packed("sinks_packed", (150, 0, 70), (90, 30, 300), sinks=True), replace(DYNAMIC, own_o=False, direct=True)),
    (case("sinks_boxes", sinks=True, head_dim=96, seqlen_k=300), replace(TWO, box_columns=32, joined=True)),
    (case("alibi", heads=4, heads_kv=2, alibi="h", seqlen_k=300), TWO),
    (case("alibi_causal", batch=2, alibi="bh", causal=True, seqlen_k=400), replace(DYNAMIC, lazy_rescale=True)),
    (case("alibi_more_queries", alibi="h", causal=True, seqlen_q=300, seqlen_k=130), BALANCED),
    (case("alibi_window", batch=2, alibi="bh", window=(70, 20), softcap=5.0, seqlen_k=400), TWO),
    (case("alibi_lens", batch=2, alibi="bh", seqlen_q=200, seq_lens=(190, 33), sm_scale=-1.0, causal=True), THREE),
    (packed("alibi_packed", (150, 0, 70), (190, 30, 300), alibi="bh", sinks=True, causal=True), DYNAMIC),
    (case("softcap", softcap=5.0, sm_scale=1.0), TWO),
    (case("softcap_causal", softcap=5.0, sm_scale=-1.0, causal=True, head_dim=128), TWO),
]


@pytest.mark.parametrize(("case", "config"), CASES, ids=lambda x: x.name if isinstance(x, AttentionCase) else "")
def test_results(case: AttentionCase, config: Sm90Config, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = interpret(monkeypatch, config, seed=sum(case.name.encode()) % 7)
    assert not run(case)
    assert kernel.launches == 1


def test_a_row_with_neither_key_nor_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, TWO)
    q, k, v = (torch.randn(1, 1, n, 64).bfloat16() for n in (150, 20, 20))
    options = {"causal": True, "sinks": torch.tensor([-float("inf")]), "return_lse": True}
    out, lse = diyfa.flash_attention(q, k, v, backend="cuda", variant="sm90", **options)
    expected, expected_lse = reference_attention(q, k, v, **options, dtype=torch.float64)
    assert (out[0, 0, :130] == 0).all() and (lse[0, 0, :130] == float("inf")).all()
    assert (out - expected).abs().max() < 0.02 and (lse - expected_lse)[0, 0, 130:].abs().max() < 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("where", ["q", "k"])
def test_a_score_that_is_nan_reaches_its_row(where: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other one. (For those in v see `test_sm90_nonfinite.py`.)"""
    interpret(monkeypatch, TWO, seed=3)
    torch.manual_seed(0)
    inputs = {name: torch.randn(1, 2, n, 64).bfloat16() for name, n in (("q", 150), ("k", 200), ("v", 200))}
    inputs[where][0, 1, 120, 5] = float("nan")
    out, lse = diyfa.flash_attention(**inputs, causal=causal, backend="cuda", variant="sm90", return_lse=True)
    expected, expected_lse = reference_attention(*inputs.values(), causal=causal, return_lse=True)
    assert expected.isnan().any() and torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(lse.isnan(), expected_lse.isnan())
