"""The Hopper kernel on CPU tensors in the Gluon interpreter: results, races, deadlocks, accesses out of bounds."""

from __future__ import annotations

import pytest
import torch

from diyfa.backends.cuda import sm90
from diyfa.backends.cuda.launch import is_interpreting

if sm90.environment_refusal() is not None or is_interpreting():
    pytest.skip("needs the Gluon of Triton 3.6, compiled mode", allow_module_level=True)

from sm90_calls import Case, run

PERSISTENT = (("persistent", True),)
SMALL = (("block_n", 64),)  # more blocks in the same time
CASES = {
    "full": Case(),
    "causal": Case(head_dim=128, causal=True, seqlen_q=150, seqlen_k=300, sm_scale=-0.2),
    "seq_lens": Case(seq_lens=(130, 1), layout="bshd"),
    "seq_lens causal": Case(head_dim=128, causal=True, seq_lens=(200, 70), config=SMALL),
    "seq_lens, more keys": Case(head_dim=128, seqlen_q=140, seqlen_k=260, seq_lens=(129, 250), config=SMALL),
    "packed": Case(packed=((150, 0, 3), (70, 20, 200)), unused_rows=9),
    "packed causal": Case(head_dim=128, causal=True, packed=((60, 200), (200, 60)), config=PERSISTENT + SMALL),
    "window": Case(head_dim=128, window=(70, 30), seqlen_q=260, seqlen_k=300, config=SMALL),
    "narrow window": Case(window=(3, 0), seqlen_q=300, seqlen_k=200, batch=1, config=SMALL),
    "left window": Case(head_dim=128, window=(100, -1), seqlen_q=130, seqlen_k=400, batch=1, config=SMALL),
    "right window": Case(head_dim=128, window=(-1, 20), seqlen_q=130, seqlen_k=180, batch=1, config=SMALL),
    "packed window": Case(window=(40, 10), packed=((150, 64), (150, 130)), config=SMALL),
    "seq_lens window": Case(head_dim=128, window=(50, 0), seq_lens=(190, 33), config=SMALL),
    "softcap": Case(softcap=5.0, sm_scale=1.0),
    "softcap causal": Case(head_dim=128, causal=True, softcap=5.0, sm_scale=-1.0, config=SMALL),
}


@pytest.mark.parametrize("name", CASES)
def test_results(name: str) -> None:
    (out, lse), (expected_out, expected_lse) = run(CASES[name])
    assert (out - expected_out).abs().max() < 2e-3
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=0)
