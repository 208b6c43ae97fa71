"""The Hopper backward with a block mask, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hopper_gluon import need_hopper_gluon

need_hopper_gluon()

from hopper_interpreted import interpret_backward, interpreted_only, run_backward  # noqa: E402

import diyfa  # noqa: E402
from diyfa import BlockMask, registry  # noqa: E402
from diyfa.backends.cuda.attention import bwd_partials  # noqa: E402
from diyfa.backends.cuda.hopper import bwd_configs  # noqa: E402
from diyfa.problem import AttentionProblem  # noqa: E402
from diyfa.reference import reference_attention  # noqa: E402
from diyfa.testing import AttentionCase  # noqa: E402

pytestmark = interpreted_only


def case(name: str, mask: str, **changes) -> AttentionCase:
    sizes = {"batch": 1, "heads": 2, "heads_kv": 1, "seqlen_q": 300, "seqlen_k": 420, "head_dim": 64}
    return AttentionCase(name, mask=mask, **{**sizes, "dtype": "bfloat16", **changes})


CASES = [
    case("grouped", "1h:128:0.6"),
    case("samples_and_heads", "bh:128:0.5", batch=2, heads=2, heads_kv=2, seqlen_q=200, seqlen_k=300),
    # Halves of a block of the mask: the last one has queries or none.
    case("halves", "1h:128:0.6", head_dim=128, seqlen_q=330, seqlen_k=300),
    case("half_a_block", "1h:128:0.7", head_dim=128, seqlen_q=310, seqlen_k=300),
    case("blocks_of_64_queries", "bh:64x128:0.5", head_dim=128, dtype="float16", layout="bshd", seqlen_k=300),
    case("columns_80", "11:128:0.6", head_dim=80, heads=1, seqlen_q=200, seqlen_k=300),
    case("empty", "11:128:0", seqlen_q=140, seqlen_k=200),
    case("empty_sinks", "11:128:0", sinks=True, seqlen_q=70, head_dim=128, seqlen_k=200),
    case("full", "11:128:1", seqlen_k=384, heads=1),
    case("full_ragged", "11:128:1", seqlen_k=333, seqlen_q=190, head_dim=128),
    case("sparse", "11:128:0.02", seqlen_q=256, seqlen_k=600),
    case("one_key", "11:128:0.7", seqlen_k=1),
    case("few_queries", "11:64x128:0.7", seqlen_q=65, seqlen_k=500, head_dim=128),
    case("sinks_softcap", "1h:128:0.6", sinks=True, softcap=3.0, sm_scale=-1.0),
    case("softcap_128", "1h:128:0.6", softcap=3.0, head_dim=128, seqlen_q=200, seqlen_k=200),
]


@pytest.mark.parametrize("case", CASES, ids=lambda x: x.name)
def test_gradients(case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = interpret_backward(monkeypatch, seed=sum(case.name.encode()) % 7)
    assert not run_backward(case)
    assert kernel.launches == 1
