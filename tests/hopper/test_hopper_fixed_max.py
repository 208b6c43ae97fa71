"""The Hopper kernel takes no maximum after the first blocks: as right as with it, whatever scores do, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hopper_interpreted import interpret, interpreted_only, load_without_fallback, run
from test_hopper_features import DYNAMIC, THREE, TWO, case, packed

from diyfa.backends.cuda.hopper import configs as hopper_configs
from diyfa.testing import AttentionCase

pytestmark = interpreted_only

# A scale of 30 spreads scores over thousands: from one block of 64 keys to the next, maxima differ by more than float32
# can hold as a power of two. One of 2 lets them differ by a few dozen, which it can.
FAR, NEAR = 30.0, 2.0
CASES = [
    (case("full", sm_scale=FAR), TWO),
    (case("full_near", sm_scale=NEAR), TWO),
    (case("full_whole_blocks", sm_scale=FAR, seqlen_q=200, seqlen_k=256, heads=3, heads_kv=3),
        replace(THREE, persistent=True)),
    (case("causal_pairs", sm_scale=FAR, causal=True, seqlen_q=260, seqlen_k=260), replace(THREE, pairs=True)),
    # The first row sees whole blocks only: what it is measured from comes from one of them.
    (case("diagonal_at_an_edge", causal=True, seqlen_q=129, seqlen_k=192), TWO),
    (case("diagonal_at_an_edge_far", sm_scale=FAR, causal=True, seqlen_q=129, seqlen_k=320), TWO),
    (case("more_queries", sm_scale=FAR, causal=True, seqlen_q=300, seqlen_k=170), DYNAMIC),
    (case("window_left", sm_scale=FAR, window=(200, -1), seqlen_q=200, seqlen_k=400), DYNAMIC),
    (packed("packed", (150, 0, 64, 3), (180, 5, 200, 64), sm_scale=FAR, slack=3), DYNAMIC),
    (case("softcap", sm_scale=FAR, softcap=400.0), TWO),
    (case("negative", sm_scale=-FAR), TWO),
    (case("d96", sm_scale=FAR, head_dim=96, causal=True, seqlen_q=200), replace(TWO, box_columns=32, pairs=True)),
    (case("d256", sm_scale=FAR, head_dim=256), replace(DYNAMIC, separate_o_buffer=False, store_from_registers=True)),
    (case("turns", sm_scale=FAR, seqlen_q=400, seqlen_k=300), replace(THREE, persistent=True, pingpong=True)),
    (case("float16", sm_scale=FAR, dtype="float16"), TWO),
]  # fmt: skip


@pytest.mark.parametrize(("case", "config"), CASES, ids=lambda x: x.name if isinstance(x, AttentionCase) else "")
def test_within_budget(case: AttentionCase, config: hopper_configs.Sm90Config, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = sum(case.name.encode()) % 7
    interpret(monkeypatch, replace(config, fixed_max=True), seed=seed)
    assert not run(case)


@pytest.mark.parametrize("name", ["full", "window_left", "packed"])
def test_scores_rise_beyond_what_sums_hold(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without going through the flagged tiles again, these cases are wrong."""
    case, config = next((case, config) for case, config in CASES if case.name == name)
    interpret(monkeypatch, replace(config, fixed_max=True), kernels=load_without_fallback(tmp_path))
    assert run(case)


ORDINARY = [
    *((replace(far, sm_scale=None), config) for far, config in CASES
      if far.name in ("causal_pairs", "window_left", "packed")),
    (case("window", window=(70, 30), seqlen_q=200, seqlen_k=330), TWO),
    (case("softcap", softcap=2.0), TWO),
    (case("alibi", alibi="h", causal=True, seqlen_q=130, seqlen_k=330), TWO),
]  # fmt: skip


@pytest.mark.parametrize(("case", "config"), ORDINARY, ids=lambda x: x.name if isinstance(x, AttentionCase) else "")
def test_ordinary_scores_need_no_second_pass(
    case: AttentionCase, config: hopper_configs.Sm90Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With one, a mistake of the first pass that makes its sums overflow would not show."""
    interpret(monkeypatch, replace(config, fixed_max=True), kernels=load_without_fallback(tmp_path))
    assert not run(case)
