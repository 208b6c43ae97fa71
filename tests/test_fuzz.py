"""Random cases on every backend against the float64 reference.

The default few are always the same; DIYFA_FUZZ=N runs N new ones.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from refusals import refused_features
from targets import TARGETS

import diyfa
from diyfa.testing import AttentionCase, assert_within_budget, make_inputs, poisoned_allocations, run_case

EXAMPLES = int(os.environ.get("DIYFA_FUZZ", "0"))


@st.composite
def cases(draw: st.DrawFn, largest: int, without: set[str]) -> AttentionCase:
    """Any case of at most `largest` queries and keys that uses no feature in `without`."""
    heads_kv = draw(st.integers(1, 2))
    batch = draw(st.integers(1, 3))
    seqlen_q, seqlen_k = draw(st.integers(1, largest)), draw(st.integers(1, largest))
    head_dim = draw(st.sampled_from([1, 8, 16, 24, 32, 48, 64]))
    layout = draw(st.sampled_from(["bhsd", "bshd", "3d"]))
    seq_lens = draw(st.none() | st.tuples(*[st.integers(1, seqlen_k)] * batch))
    if layout == "3d" and seq_lens is None:
        batch = 1

    def feature(name: str, off, values: st.SearchStrategy):
        return off if name in without else draw(values)

    return AttentionCase(
        name="fuzz",
        batch=batch,
        heads=heads_kv * draw(st.integers(1, 3)),
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=draw(st.sampled_from([head_dim, 16, 40])),
        dtype=draw(st.sampled_from(["float16", "bfloat16", "float32"])),
        layout=layout,
        view=draw(st.sampled_from(["contiguous", "transposed", "sliced"])) if layout != "3d" else "contiguous",
        causal=draw(st.booleans()),
        sm_scale=draw(st.sampled_from([None, 0.0]) | st.floats(1e-3, 1.0) | st.floats(-1.0, -1e-3)),
        seq_lens=seq_lens,
        window=feature("window", (-1, -1), st.tuples(st.integers(-1, largest), st.integers(-1, largest))),
        softcap=feature("softcap", 0.0, st.sampled_from([0.0, 0.0, 1.0, 20.0])),
        alibi=feature("alibi", "", st.sampled_from(["", "", "h", "bh"])),
        bias=feature("attn_bias", "", st.sampled_from(["", "", "bhqk", "1hqk", "b1qk", "qk", "k", "q1"])),
        sinks=feature("sinks", False, st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


@pytest.mark.parametrize("backend", TARGETS)
def test_random_cases(backend: str) -> None:
    target = TARGETS[backend]

    @settings(
        max_examples=EXAMPLES or (6 if target.interpreted else 25),
        derandomize=not EXAMPLES,
        deadline=None,
        phases=[Phase.generate, *([Phase.shrink] if EXAMPLES else [])],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(70 if target.interpreted else 200, refused_features(backend)))
    def check(case: AttentionCase) -> None:
        function = diyfa.flash_attention_v2 if case.layout == "bshd" else diyfa.flash_attention
        with poisoned_allocations():
            results = run_case(
                lambda *args, **kwargs: function(*args, backend=backend, **kwargs), make_inputs(case, target.device)
            )
        assert_within_budget(results, case, target.oracle_device)

    check()
