"""Random dense and packed problems through the Hopper kernel's own choice of a config: in the Gluon interpreter, or on
a GPU of that kind.

The default few are always the same; DIYFA_FUZZ=N runs N new ones.
"""

from __future__ import annotations

import os

import hopper_interpreted
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from diyfa.backends.cuda.hopper import configs as hopper_configs
from diyfa.backends.cuda.runtime.launch import is_interpreting
from diyfa.testing import YARDSTICK_DRAWS, AttentionCase

pytestmark = hopper_interpreted.runs_the_kernel
EXAMPLES = int(os.environ.get("DIYFA_FUZZ", "0"))


@st.composite
def cases(draw: st.DrawFn) -> AttentionCase:
    head_dim = draw(st.sampled_from([40, 64, 72, 96, 128, 160, 192, 256]))
    heads_kv = draw(st.integers(1, 2))
    if draw(st.integers(0, 4)) == 0:
        pairs = draw(st.lists(st.tuples(st.integers(0, 160), st.integers(0, 200)), max_size=2))
        lens_q, lens_k = zip((draw(st.integers(64, 200)), draw(st.integers(1, 250))), *pairs, strict=True)
        sizes = {"batch": 0, "seqlen_q": 0, "seqlen_k": 0, "layout": "thd", "lens_q": lens_q, "lens_k": lens_k}
    else:
        batch, seqlen_k = draw(st.integers(1, 2)), draw(st.integers(1, 330))
        sizes = {
            "batch": batch,
            "seqlen_q": draw(st.integers(64, 300)),
            "seqlen_k": seqlen_k,
            "layout": draw(st.sampled_from(["bhsd", "bshd"])),
            "view": draw(st.sampled_from(["contiguous", "transposed"])),
            "seq_lens": draw(st.none() | st.none() | st.tuples(*[st.integers(1, seqlen_k)] * batch)),
        }
    edges = st.sampled_from([-1, -1]) | st.integers(0, 200)
    return AttentionCase(
        "sm90_fuzz",
        heads=heads_kv * draw(st.integers(1, 2)),
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=draw(st.sampled_from([head_dim, head_dim, 40, 64, 128, 192])),
        dtype=draw(st.sampled_from(["float16", "bfloat16"])),
        causal=draw(st.booleans()),
        window=(draw(edges), draw(edges)),
        softcap=draw(st.sampled_from([0.0, 0.0, 8.0])),
        alibi=draw(st.sampled_from(["", "", "h", "bh"])),
        sinks=draw(st.booleans()),
        sm_scale=draw(st.sampled_from([None, None, 0.3, -0.05, 1.0])),
        seed=draw(st.integers(0, 2**31)),
        **sizes,
    )


def test_random_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    @settings(
        max_examples=EXAMPLES or 12,
        derandomize=not EXAMPLES,
        deadline=None,
        phases=[Phase.generate, *([Phase.shrink] if EXAMPLES else [])],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(), st.booleans())
    def check(case: AttentionCase, small: bool) -> None:
        with monkeypatch.context() as patches:
            if is_interpreting():
                hopper_interpreted.interpret(patches, seed=case.seed)
            else:
                hopper_interpreted.take_all(patches)
            if small:
                patches.setattr(hopper_configs, "FULL_GPU", 1 << 30)
            assert not hopper_interpreted.run(case, 4 * YARDSTICK_DRAWS, hopper_interpreted.DEVICE), (case, small)

    check()
