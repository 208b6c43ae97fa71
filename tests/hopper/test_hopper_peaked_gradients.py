"""Rows with dominant keys: out and lse of the Hopper forward pass are exact enough together for the gradients of both.

In the Gluon interpreter, or on a GPU of that kind. Gradients are those that a plain backward pass forms from the
kernel's out and lse (`fixed_forward.py`). A weight that is rounded while the sum that divides it is not leaves out
wrong by less than a unit in its last place, and dq by thousands of times what FlashAttention's is wrong by.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fixed_forward import results_from_forward
from hopper_interpreted import (
    DEVICE,
    interpret,
    interpret_backward,
    interpreted_only,
    run_backward,
    runs_the_kernel,
    take_all,
)
from poison import poisoned_allocations
from test_hopper_features import DYNAMIC, TWO

from diyfa.backends.cuda.hopper.configs import Sm90Config
from diyfa.backends.cuda.runtime.launch import is_interpreting
from diyfa.testing import AttentionCase, assert_within_budget, attention_function, make_inputs

pytestmark = runs_the_kernel

DIRECT = replace(DYNAMIC, separate_o_buffer=False, store_from_registers=True)
RUNNING = replace(TWO, fixed_max=False)
# Blocks are of 64 keys, and the first and the last are seen first: these places are in blocks that follow.
EARLY, MIDDLE, LATE = 0.25, 0.5, 0.7


def case(name: str, *peaks: tuple[float, float], **changes: Any) -> AttentionCase:
    """Five blocks of keys, all alike but for `peaks`, and no gradient of the lse, which would hide delta."""
    sizes = {"heads": 1, "seqlen_q": 130, "seqlen_k": 300, "head_dim": 64, "dtype": "bfloat16"}
    shape = {"sm_scale": 1.0, "spread": 0.1, "lse_gradient": False, "peaks": peaks}
    return AttentionCase(name, **{**sizes, **shape, **changes})


def packed(name: str, *peaks: tuple[float, float], **changes: Any) -> AttentionCase:
    lens = {"layout": "thd", "lens_q": (130, 30), "lens_k": (300, 200), "slack": 3}
    return case(name, *peaks, seqlen_q=0, seqlen_k=0, **{**lens, **changes})


CASES = [
    *(
        (case(f"{nats}_at_{place}", (place, nats)), TWO)
        for nats in (16, 0, 3, 6, 10, 20, 30, 60)
        for place in (MIDDLE, 0.0, EARLY, 1.0)
    ),
    *((case(f"{nats}_random", (MIDDLE, nats), sm_scale=None, spread=1.0), TWO) for nats in (10, 16, 20, 30)),
    *((case(f"{nats}_lse", (MIDDLE, nats), lse_gradient=True), TWO) for nats in (16, 60)),
    # Several: equal ones, of nearly one height, and one that rises above the others late or early in the KV loop.
    *(
        (case(f"{nats}_{name}", *((place, nats + more) for place, more in peaks)), TWO)
        for nats in (16, 30)
        for name, peaks in {
            "two_equal": ((EARLY, 0.0), (LATE, 0.0)),
            "two_near": ((EARLY, 0.5), (LATE, 0.0)),
            "three": ((0.02, 0.3), (MIDDLE, 0.0), (LATE, -0.25)),
            "late": ((EARLY, 12.0), (LATE, 0.0)),
            "falls": ((EARLY, 0.0), (LATE, 12.0)),
            "above_the_last": ((MIDDLE, 2.0), (0.95, 0.0)),
            "far_above_the_last": ((MIDDLE, 5.4), (0.95, 0.0)),
        }.items()
    ),
    *((case(f"rise_{nats}", rise=nats), TWO) for nats in (30, -30, 60, -60)),
    *((case(f"some_rows_{nats}", (MIDDLE, nats), peaked_rows=7), TWO) for nats in (16, 30)),
    (case("one_key", (MIDDLE, 16), window=(0, 0), seqlen_k=130), TWO),
    *(
        (case(f"sinks_{nats}", (MIDDLE, nats), heads=3, sinks=True, sink_offset=offset), TWO)
        for nats, offset in ((16, 15), (30, -5))
    ),
    (case("gqa", (MIDDLE, 16), heads=4, heads_kv=2), TWO),
    *((case(f"causal_{nats}", (0.4, nats), causal=True, seqlen_q=300), DYNAMIC) for nats in (16, 30)),
    *((case(f"window_{nats}", (EARLY, nats), (LATE, nats), window=(150, 0), seqlen_q=300), TWO) for nats in (16, 30)),
    *((packed(f"packed_{nats}", (MIDDLE, nats)), TWO) for nats in (16, 30)),
    (packed("packed_causal", (0.3, 30), lens_q=(260, 70), causal=True), DYNAMIC),
    (case("lens", (MIDDLE, 20), batch=2, seqlen_q=300, seq_lens=(300, 190)), TWO),
    *((case(f"float16_{nats}", (MIDDLE, nats), dtype="float16"), TWO) for nats in (5, 10, 16, 60)),
    # Rows that follow their maximum late.
    *((case(f"lazy_{nats}", (MIDDLE, nats)), RUNNING) for nats in (5.4, 16, 60)),
    *(
        (case(f"late_above_{nats}_{dtype}_{seed}", (MIDDLE, 16 + nats), (0.95, 16.0), dtype=dtype, seed=seed), RUNNING)
        for dtype, nats, seed in (
            ("float16", 5.3, 3), ("float16", 5.3, 5), ("float16", 2.1, 6), ("float16", 2.1, 13),
            ("bfloat16", 5.3, 5), ("bfloat16", 5.3, 16), ("bfloat16", 5.3, 18), ("bfloat16", 2.1, 0),
        )
    ),
    *(
        (case(f"d{d}_{dv or d}_{nats}", (MIDDLE, nats), head_dim=d, head_dim_v=dv, heads=1), config)
        for nats in (16, 30)
        for d, dv, config in (
            (96, 0, replace(TWO, box_columns=32, pairs=True)),
            (128, 0, replace(TWO, pairs=True)),
            (192, 0, replace(DIRECT, pairs=True)),
            (192, 128, replace(TWO, separate_o_buffer=False)),
            (256, 0, DIRECT),
        )
    ),
]  # fmt: skip


def check(case: AttentionCase, config: Sm90Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's out and lse, and the gradients that follow, are within their budgets."""
    (interpret if is_interpreting() else take_all)(monkeypatch, config)
    inputs = make_inputs(case, DEVICE)
    attend = attention_function(case, backend="cuda", variant="sm90")
    with torch.no_grad(), poisoned_allocations():
        out, lse = attend(*inputs.leaves, return_lse=True, **inputs.options)
    assert_within_budget(results_from_forward(case, out.cpu(), lse.cpu()), case)


@pytest.mark.parametrize(("case", "config"), CASES, ids=[case.name for case, _ in CASES])
def test_gradients_that_follow(case: AttentionCase, config: Sm90Config, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, config, monkeypatch)


@pytest.mark.parametrize("pairs", [False, True])
def test_every_accumulator_follows_the_maximum(pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of V's columns and one of the sums: scores rise by 40 nats from the first block seen to the last."""
    config = replace(RUNNING, box_columns=32, pairs=pairs)
    rising = case("rising", head_dim=96, rise=-40.0, seqlen_q=128)
    check(rising, config, monkeypatch)


@interpreted_only
def test_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_backward(monkeypatch)
    assert not run_backward(case("16", (MIDDLE, 16)))
