"""The Hopper forward with a block mask, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hopper_gluon import need_hopper_gluon

need_hopper_gluon()

from hopper_interpreted import interpret, run  # noqa: E402

from diyfa.backends.cuda.hopper.configs import Sm90Config  # noqa: E402
from diyfa.backends.cuda.runtime.launch import is_interpreting  # noqa: E402
from diyfa.testing import AttentionCase  # noqa: E402

pytestmark = pytest.mark.skipif(not is_interpreting(), reason="CPU tensors are refused: here the kernel itself is run")

TWO = Sm90Config(2, 128, 4, True, 240, 24)
DYNAMIC = replace(TWO, persistent=True, scheduler="dynamic", pingpong=True, pairs=True)
FIXED = replace(DYNAMIC, fixed_max=True, q_in_registers=1)
ONE = Sm90Config(1, 128, 4, True, 232, 24, fixed_max=True)
NARROW = Sm90Config(1, 64, 4, False, 232, 24, store_from_registers=True)  # two key blocks of a block of 128
BOXES = replace(DYNAMIC, box_columns=64, q_in_registers=2)


def case(name: str, mask: str, **changes) -> AttentionCase:
    sizes = {"batch": 1, "heads": 2, "heads_kv": 1, "seqlen_q": 300, "seqlen_k": 420, "head_dim": 64}
    return AttentionCase(name, mask=mask, **{**sizes, "dtype": "bfloat16", **changes})


CASES = [
    (case("equal", "11:128:0.6"), TWO),
    (case("dynamic", "11:128:0.6", heads=3, heads_kv=3), DYNAMIC),
    (case("fixed", "1h:128:0.7", seqlen_k=900), FIXED),
    (case("pairs_of_blocks", "11:128x64:0.7", seqlen_k=500), FIXED),
    (case("pairs_of_blocks_sparse", "bh:128x64:0.3", batch=2, heads=2, seqlen_q=200, seqlen_k=700), DYNAMIC),
    (case("halves_of_blocks", "11:128:0.6"), NARROW),
    (case("halves_of_blocks_64", "11:64x128:0.6"), NARROW),
    (case("small_queries", "bh:64:0.5", batch=2, seqlen_q=150), ONE),
    (case("empty", "11:128:0"), DYNAMIC),
    (case("empty_sinks", "11:64:0", sinks=True, seqlen_q=70), ONE),
    (case("full", "11:128:1", seqlen_k=512), FIXED),
    (case("full_ragged", "11:128x64:1", seqlen_k=333), FIXED),
    (case("sparse", "11:64:0.02", seqlen_q=128, seqlen_k=600), ONE),
    (case("one_key", "11:128:0.7", seqlen_k=1), DYNAMIC),
    (case("one_query", "11:128x64:0.7", seqlen_q=1, seqlen_k=2100), ONE),
    (case("sinks_softcap", "1h:128:0.6", sinks=True, softcap=3.0, sm_scale=-1.0), DYNAMIC),
    (case("negative_scale", "11:128:0.6", sm_scale=-0.2), DYNAMIC),
    (case("d128", "11:128:0.6", head_dim=128, dtype="float16"), BOXES),
    (case("d128_pairs_of_blocks", "11:128x64:0.5", head_dim=128, layout="bshd"), BOXES),
    (case("d192_128", "11:128:0.6", head_dim=192, head_dim_v=128, heads=1, seqlen_q=200), replace(NARROW, consumers=2)),
]


@pytest.mark.parametrize(("case", "config"), CASES, ids=lambda x: x.name if isinstance(x, AttentionCase) else "")
def test_results(case: AttentionCase, config: Sm90Config, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = interpret(monkeypatch, config, seed=sum(case.name.encode()) % 7)
    assert not run(case)
    assert kernel.launches == 1
