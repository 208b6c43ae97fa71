"""The Hopper kernel on float8: right results without a GPU, the order of its operands, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hopper_gluon import need_hopper_gluon

need_hopper_gluon()

from eight_bit_cases import F16, F32, Case, check  # noqa: E402
from hopper_interpreted import interpret  # noqa: E402
from poison import poisoned_allocations  # noqa: E402
from targets import TARGETS  # noqa: E402

from diyfa.backends.cuda.hopper.configs import Sm90Config  # noqa: E402
from diyfa.backends.cuda.runtime.launch import is_interpreting  # noqa: E402

interpreted = pytest.mark.skipif(not is_interpreting(), reason="CPU tensors are refused: here the kernel itself is run")


def case(**changes) -> Case:
    sizes = {"heads": 1, "heads_kv": 1, "seqlen_q": 130, "seqlen_k": 300, "head_dim": 64}
    return Case(**{**sizes, **changes})


CASES = {
    "64": case(),
    "128": case(head_dim=128, kind="head"),
    "256": case(head_dim=256, seqlen_k=140),
    "192_128": case(head_dim=192, head_dim_v=128, seqlen_k=140, options={"causal": True}),
    "odd_head_dim": case(head_dim=80, head_dim_v=48, means=True, kind="head"),
    "causal": case(head_dim=128, seqlen_q=260, options={"causal": True}),
    "block": case(head_dim=128, kind="block", seqlen_q=200, options={"causal": True}),
    "means": case(kind="block", means=True, heads=4, heads_kv=2),
    "means_below_0": case(means=True, kind="block", options={"sm_scale": -0.3, "causal": True}),
    "scale_0": case(means=True, options={"sm_scale": 0.0}),
    "window": case(kind="head", means=True, options={"window": (100, 3)}),
    "window_left": case(kind="block", options={"window": (90, -1)}),
    "softcap": case(kind="block", options={"softcap": 8.0, "causal": True}),
    "sinks": case(means=True, sinks=True, heads=2, options={"causal": True}),
    "alibi": case(kind="head", means=True, alibi=True, heads=2, options={"causal": True}),
    "seq_lens": case(lengths=(90, 7, 300), kind="block", means=True, seqlen_q=300, options={"causal": True}),
    "packed": case(layout="thd", lengths=(90, 1, 0, 270), kind="head", means=True, seqlen_q=300, heads=2),
    "packed_blocks": case(layout="thd", lengths=(150, 20), seqlen_q=150, seqlen_k=150, kind="block", means=True,
                          options={"window": (60, 0)}),
    "bshd": case(layout="bshd", kind="block", heads=2),
    "float32_out": case(out_dtype=F32, head_dim=128, kind="head"),
    "float16_out": case(out_dtype=F16),
    "cross": case(seqlen_q=66, seqlen_k=131, kind="block", options={"causal": True}),
    "more_queries": case(seqlen_q=230, seqlen_k=60, means=True, options={"causal": True}),
    "one_key": case(seqlen_k=1),
    "one_visible_key": case(means=True, options={"window": (0, 0)}),
    "outliers": case(data="outliers", kind="head"),
    "peaks": case(data="peaks", head_dim=128),
    "sink": case(data="sink", kind="block", options={"causal": True}),
    "equal_rows": case(data="equal", kind="block"),
    "zeros": case(data="zeros", kind="head", means=True),
    "large_scores": case(data="large", kind="head", seqlen_k=120),
}  # fmt: skip


def config(case: Case, **changes) -> Sm90Config:
    """As in the table, with as few buffers as the schedule can do with: nothing waits in vain with many."""
    wide, to_float32 = max(case.head_dim, case.head_dim_v), case.out_dtype == F32
    consumers = 1 if case.seqlen_q < 128 else 2
    direct = wide > 128 or to_float32
    chosen = Sm90Config(
        consumers, 64 if wide > 128 else 128, 4, not direct, 240, 24, persistent=True, store_from_registers=direct,
        scheduler="dynamic" if case.lengths else "static",
    )  # fmt: skip
    return replace(chosen, **changes)


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = interpret(monkeypatch, config(CASES[name]), seed=3)
    with poisoned_allocations():
        check(CASES[name], TARGETS["cuda"], "sm90")
    assert kernel.launches == 1
