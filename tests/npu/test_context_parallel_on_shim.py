"""Context parallel attention of npu tensors, as far as it goes without devices and HCCL."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch_npu")
if os.environ.get("DIYFA_HOST_SHIM") != "1":
    pytest.skip("needs torch_npu over host memory", allow_module_level=True)

from context_parallel_cases import Case, Division
from context_parallel_on_shim import run_on_shim
from gloo_workers import Workers

from diyfa.testing import assert_within_budget

CASES = [
    Case("causal_gqa", heads=4, heads_kv=2, seqlen_q=16, head_dim=16, causal=True, dtype="bfloat16"),
    Case("window_sinks", heads=2, seqlen_q=16, head_dim=16, window=(5, 2), sinks=True, layout="bshd"),
    Case("packed_dropout", heads=2, layout="thd", lens_q=(3, 9), head_dim=16, causal=True, dropout_p=0.3, slack=4),
    Case("float32", heads=2, seqlen_q=16, head_dim=16, head_dim_v=8, dtype="float32"),
]


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    with Workers(2, tmp_path_factory.mktemp("gloo"), timeout=300) as found:
        yield found


@pytest.mark.parametrize("method", ["ring", "ulysses", "both"])
def test_npu_tensors(workers, method) -> None:
    for case in CASES:
        (results, kernels), (_, others) = workers.run(run_on_shim, case, Division(method))
        merging = {"_merge_kernel"} if method == "ring" else set()
        assert {"_fwd_kernel", "_bwd_dkdv_kernel", "_bwd_dq_kernel"} | merging <= kernels & others, kernels
        assert_within_budget(results, case)
