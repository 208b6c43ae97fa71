"""The Hopper kernel without a GPU: what sets its tiles, masks and descriptors apart from the plain case."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hopper_interpreted import interpret, interpreted_only, near_the_reference, run

import diyfa
from diyfa.backends.cuda.hopper import configs as hopper_configs
from diyfa.backends.cuda.hopper.configs import Sm90Config
from diyfa.reference import reference_attention
from diyfa.testing import AttentionCase

pytestmark = interpreted_only

TWO = Sm90Config(2, 64, 4, True, 240, 24, fixed_max=True)  # blocks of 64 keys: more edges in the same time
ONE = Sm90Config(1, 64, 4, True, 232, 24, fixed_max=True)
THREE = replace(TWO, consumers=3)
TURNS = {"persistent": True, "pingpong": True, "scheduler": "dynamic"}
DYNAMIC = replace(TWO, persistent=True, scheduler="dynamic")
DIRECT = {"separate_o_buffer": False, "store_from_registers": True}
WIDE = {**DIRECT, "pingpong": True, "pairs": True}  # as the table has it at 192
Q_192 = {**WIDE, "q_in_registers": 2}


def case(name: str, **changes) -> AttentionCase:
    sizes = {"batch": 1, "heads": 2, "heads_kv": 1, "seqlen_q": 150, "seqlen_k": 200, "head_dim": 64}
    return AttentionCase(name, **{**sizes, "dtype": "bfloat16", **changes})


def packed(name: str, lens_q: tuple[int, ...], lens_k: tuple[int, ...], **changes) -> AttentionCase:
    return case(name, batch=0, seqlen_q=0, seqlen_k=0, layout="thd", lens_q=lens_q, lens_k=lens_k, **changes)


CASES = [
    (case("seq_lens", batch=2, seqlen_q=200, seq_lens=(130, 1), layout="bshd"), TWO),
    (case("seq_lens_causal", batch=2, seqlen_q=200, seq_lens=(200, 70), causal=True, head_dim=128), TWO),
    (case("seq_lens_more_keys", batch=2, seqlen_q=193, seqlen_k=260, seq_lens=(129, 250)), THREE),
    # Each program has eight tiles, a third of them beyond an end.
    (case("seq_lens_many_tiles", batch=8, heads=1, seqlen_q=256, seqlen_k=256,
        seq_lens=(256, 48, 112, 16, 192, 80, 144, 32), causal=True, head_dim=128),
        replace(DYNAMIC, box_columns=64, q_in_registers=2, pairs=True, pingpong=True)),
    (packed("packed", (150, 0, 3), (70, 20, 200), slack=9), TWO),
    (packed("packed_causal", (60, 200), (200, 60), causal=True), replace(TWO, persistent=True)),
    (packed("packed_many", (5, 64, 1, 130) * 9, (9, 1, 70, 2) * 9, heads=1), replace(TWO, persistent=True)),
    (packed("packed_no_keys", (150, 9, 64, 70), (70, 0, 200, 0), slack=9), TWO),
    (packed("packed_no_keys_causal", (9, 150, 70), (0, 200, 0), slack=9, causal=True), replace(TWO, persistent=True)),
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
    (case("d192", head_dim=192, causal=True), replace(TWO, stages=3, separate_o_buffer=False, pingpong=True)),
    (case("d136", head_dim=136), TWO),
    (case("d192_128", head_dim=192, head_dim_v=128, causal=True),
        replace(TWO, separate_o_buffer=False, persistent=True)),
    (case("d96_boxes", head_dim=96, causal=True, layout="bshd"), replace(TWO, box_columns=32)),
    (case("d80_boxes", head_dim=80, dtype="float16"),
        replace(TWO, box_columns=32, separate_o_buffer=False, persistent=True)),
    (case("d224_boxes", head_dim=224, seqlen_k=100), replace(TWO, box_columns=32, separate_o_buffer=False)),
    (packed("d96_64_boxes", (150, 40), (70, 20), head_dim=96, head_dim_v=64), replace(TWO, box_columns=32)),
    (case("d192_64", head_dim=192, head_dim_v=64, seq_lens=(99,)), TWO),
    (case("d64_192", head_dim=64, head_dim_v=192), TWO),
    (case("d64_128", head_dim=64, head_dim_v=128, window=(80, 0)), TWO),
    (case("d128_64", head_dim=128, head_dim_v=64, softcap=3.0), TWO),
    (packed("d96_packed", (150, 40), (70, 20), head_dim=96, head_dim_v=72, causal=True), TWO),
    (case("pingpong_three", seqlen_q=400, causal=True), replace(THREE, persistent=True, pingpong=True)),
    (case("one", seqlen_k=300, causal=True), ONE),
    (packed("one_packed", (64, 70, 3), (100, 2, 64)), replace(ONE, stages=2)),
    (case("one_192", head_dim=192, head_dim_v=128, softcap=9.0), replace(ONE, separate_o_buffer=False)),
    (case("pairs", causal=True), replace(TWO, pairs=True)),
    (case("pairs_float16", dtype="float16", seqlen_k=500, head_dim=128), replace(TWO, pairs=True, block_n=128)),
    (case("pairs_three", seqlen_q=400, seqlen_k=450, causal=True), replace(THREE, pairs=True, **TURNS)),
    (case("pairs_boxes", head_dim=96, causal=True), replace(TWO, box_columns=32, pairs=True)),
    (case("rescale", sm_scale=2.0, seqlen_k=500, causal=True), replace(TWO, pairs=True, fixed_max=False)),
    (case("lazy_rescale_window", sm_scale=1.0, seqlen_q=250, seqlen_k=400, window=(100, 20)),
        replace(THREE, fixed_max=False)),
    (packed("lazy_boxes", (150, 40), (70, 20), head_dim=96, causal=True),
        replace(TWO, box_columns=32, fixed_max=False)),
    (case("q_in_registers", heads=3, seqlen_q=300, causal=True), replace(DYNAMIC, q_in_registers=1)),
    (case("q_in_registers_128", seqlen_k=500, head_dim=128),
        replace(TWO, box_columns=64, q_in_registers=2, pairs=True)),
    (case("q_in_registers_half", heads=3, seqlen_q=300, head_dim=128),
        replace(DYNAMIC, box_columns=64, q_in_registers=1)),
    (case("direct_256", seqlen_q=300, head_dim=256, causal=True),
        replace(DYNAMIC, box_columns=64, q_in_registers=1, **DIRECT)),
    (case("direct_200", head_dim=200), replace(TWO, **DIRECT)),
    (case("direct_192_128", head_dim=192, head_dim_v=128), replace(TWO, **DIRECT)),
    (case("q_in_registers_192", heads=3, seqlen_q=300, head_dim=192, causal=True), replace(DYNAMIC, **Q_192)),
    (packed("q_in_registers_192_packed", (150, 0, 70), (90, 30, 64), head_dim=192, causal=True),
        replace(DYNAMIC, **Q_192)),
    (case("q_in_registers_whole_192", seqlen_k=300, head_dim=192), replace(DYNAMIC, **{**Q_192, "q_in_registers": 3})),
    (case("q_in_registers_64_192", head_dim=64, head_dim_v=192, causal=True), replace(TWO, stages=6, **Q_192)),
    (case("wide_128", heads=3, seqlen_q=300, head_dim=192, head_dim_v=128, causal=True), replace(DYNAMIC, **WIDE)),
    (case("one_direct", head_dim=128, seqlen_k=300, causal=True), replace(ONE, **DIRECT)),
    (packed("direct_packed", (150, 0, 70), (90, 30, 64)), replace(DYNAMIC, **DIRECT)),
    (case("direct_lens", seq_lens=(130,)), replace(DYNAMIC, **DIRECT)),
    (case("q_in_registers_256", seqlen_q=300, head_dim=256),
        replace(DYNAMIC, box_columns=64, q_in_registers=2, separate_o_buffer=False)),
    (case("skip_masked", heads=3, seqlen_q=400, seqlen_k=450, causal=True), THREE),
    (case("skip_masked_more_queries", seqlen_q=300, seqlen_k=130, causal=True), replace(TWO, persistent=True)),
    (case("skip_masked_turns", seqlen_q=500, seqlen_k=400, causal=True), replace(THREE, **TURNS)),
    (case("skip_masked_window", seqlen_q=400, seqlen_k=400, window=(90, 20)), THREE),
    (packed("dynamic_packed", (150, 0, 300, 3), (150, 9, 300, 64), causal=True), DYNAMIC),
    # The last sample has four blocks of keys, and a tile beyond its end.
    (case("dynamic_seq_lens", batch=3, seqlen_q=300, seqlen_k=300, seq_lens=(1, 300, 200), causal=True), DYNAMIC),
    (case("dynamic_window", seqlen_q=400, seqlen_k=400, window=(70, 0)), replace(DYNAMIC, pingpong=True)),
    (case("dynamic_one_tile", heads=1, seqlen_q=128, head_dim=192), replace(DYNAMIC, separate_o_buffer=False)),
    (case("sinks_causal", heads=4, heads_kv=2, sinks=True, causal=True, seqlen_k=300), TWO),
    (case("sinks_no_keys", sinks=True, window=(-1, 0), seqlen_q=200, seqlen_k=70, dtype="float16"), TWO),
    (case("sinks_window_lens", batch=2, seqlen_q=200, seq_lens=(190, 33), window=(50, 0), sinks=True), THREE),
    (packed("sinks_packed", (150, 0, 70), (90, 30, 300), sinks=True), replace(DYNAMIC, **DIRECT)),
    (case("alibi", heads=4, heads_kv=2, alibi="h", seqlen_k=300), TWO),
    (case("alibi_causal", batch=2, alibi="bh", causal=True, seqlen_k=400), DYNAMIC),
    (case("alibi_more_queries", alibi="h", causal=True, seqlen_q=300, seqlen_k=130), DYNAMIC),
    (case("alibi_window", batch=2, alibi="bh", window=(70, 20), softcap=5.0, seqlen_k=400), TWO),
    (case("alibi_lens", batch=2, alibi="bh", seqlen_q=200, seq_lens=(190, 33), sm_scale=-1.0, causal=True), THREE),
    (packed("alibi_packed", (150, 0, 70), (190, 30, 300), alibi="bh", sinks=True, causal=True), DYNAMIC),
    (case("softcap_causal", softcap=5.0, sm_scale=-1.0, causal=True, head_dim=128), TWO),
]  # fmt: skip


@pytest.mark.parametrize(("case", "config"), CASES, ids=lambda x: x.name if isinstance(x, AttentionCase) else "")
def test_results(case: AttentionCase, config: Sm90Config, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = interpret(monkeypatch, config, seed=sum(case.name.encode()) % 7)
    assert not run(case)
    assert kernel.launches == 1


@pytest.mark.parametrize("config", [TWO, DYNAMIC], ids=["grid", "dynamic"])
def test_groups_of_heads_that_take_turns(config: Sm90Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight heads, of which three at a time have their keys and values in L2."""
    some = case("groups", heads=4, heads_kv=4, batch=2, causal=True)
    monkeypatch.setattr(hopper_configs, "L2_BYTES", 3 * 2 * 2 * some.seqlen_k * some.head_dim)
    interpret(monkeypatch, config, seed=1)
    assert not run(some)


def test_a_row_with_neither_key_nor_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, TWO)
    q, k, v = (torch.randn(1, 1, n, 64).bfloat16() for n in (150, 20, 20))
    options = {"causal": True, "sinks": torch.tensor([-float("inf")]), "return_lse": True}
    out, lse = diyfa.flash_attention(q, k, v, backend="cuda", variant="sm90", **options)
    expected, expected_lse = reference_attention(q, k, v, **options, dtype=torch.float64)
    assert (out[0, 0, :130] == 0).all() and (lse[0, 0, :130] == float("inf")).all()
    assert (out - expected).abs().max() < 0.02 and (lse - expected_lse)[0, 0, 130:].abs().max() < 1e-5


@pytest.mark.parametrize("lengths", [None, (130, 70)], ids=["", "seq_lens"])
@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (1, 1)], ids=["samples", "heads", "both"])
def test_inputs_that_are_expanded(
    shape: tuple[int, int], lengths: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Descriptors with strides of 0 between samples or heads."""
    interpret(monkeypatch, TWO, seed=2)
    q, k, v = (torch.randn(*shape, 150, 64).bfloat16().expand(2, 2, -1, -1) for _ in range(3))
    options = {} if lengths is None else {"seq_lens": torch.tensor(lengths, dtype=torch.int32)}
    near_the_reference(q, k, v, causal=True, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("where", ["q", "k"])
def test_a_score_that_is_nan_reaches_its_row(where: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other row."""
    interpret(monkeypatch, TWO, seed=3)
    torch.manual_seed(0)
    inputs = {name: torch.randn(1, 2, n, 64).bfloat16() for name, n in (("q", 150), ("k", 200), ("v", 200))}
    inputs[where][0, 1, 120, 5] = float("nan")
    out, lse = diyfa.flash_attention(**inputs, causal=causal, backend="cuda", variant="sm90", return_lse=True)
    expected, expected_lse = reference_attention(*inputs.values(), causal=causal, return_lse=True, dtype=torch.float64)
    assert expected.isnan().any() and torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(lse.isnan(), expected_lse.isnan())
