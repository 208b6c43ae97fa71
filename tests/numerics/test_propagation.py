"""NaN and inf in an input show in all that depends on it, on every backend, and never in another head or sequence."""

from __future__ import annotations

import pytest
import torch
from nonfinite import assert_propagates
from refusals import refused_features
from targets import TARGETS

import diyfa
from diyfa.testing import AttentionCase

# Where a mask, the end of a sequence or dropout cuts tiles, alone and together: each with the tensors to poison.
CUT = (
    (AttentionCase("causal", seqlen_q=50, causal=True, all_variants=True), "q k v dout"),
    (AttentionCase("window", heads=1, seqlen_q=70, window=(9, 4), all_variants=True), "v dout"),
    (AttentionCase("window_left", heads=1, seqlen_q=70, window=(20, -1)), "v dout"),
    (AttentionCase("more_keys", heads=1, seqlen_q=40, seqlen_k=60, causal=True, head_dim_v=16), "v q"),
    # Rows that see nothing, or the sink alone.
    (AttentionCase("more_queries", heads=1, seqlen_q=60, seqlen_k=30, causal=True, all_variants=True), "v dout"),
    (AttentionCase("sinks", heads=2, seqlen_q=40, seqlen_k=30, sinks=True, causal=True), "k v sinks"),
    (AttentionCase("groups", heads=4, heads_kv=2, seqlen_q=40, causal=True, layout="bshd"), "v dout"),
    (AttentionCase("lengths", batch=2, heads=1, seqlen_q=50, seq_lens=(46, 29), causal=True, all_variants=True), "v q"),
    (AttentionCase("lengths_window", batch=2, heads=1, seqlen_q=50, seq_lens=(46, 29), window=(12, 2)), "k dout"),
    (AttentionCase("packed", heads=1, layout="thd", lens_q=(37, 0, 9), lens_k=(37, 5, 20), slack=3, causal=True), "v"),
    (AttentionCase("packed_groups", heads=2, heads_kv=1, layout="thd", lens_q=(37, 29), window=(11, 0)), "k v dout"),
    (AttentionCase("dropout", heads=1, seqlen_q=40, dropout_p=0.3), "k v dout"),
    (AttentionCase("dropout_causal", heads=1, seqlen_q=40, dropout_p=0.3, causal=True), "v dout"),
    (AttentionCase("bias", heads=1, batch=2, seqlen_q=40, bias="bhqk", causal=True), "v dout attn_bias"),
    (AttentionCase("bias_keys", heads=1, seqlen_q=40, bias="k", window=(9, 9)), "v attn_bias"),
    (AttentionCase("bias_queries", heads=1, seqlen_q=40, bias="q1", causal=True), "v attn_bias"),
    # No mask, but rows beyond the sequence: their gradients of the bias are 0.
    (AttentionCase("bias_lengths", batch=2, heads=1, seqlen_q=50, seq_lens=(46, 29), bias="bhqk"), "k v"),
    (AttentionCase("softcap_alibi", heads=1, seqlen_q=40, softcap=20.0, alibi="h", causal=True), "q k"),
    (AttentionCase("everything", batch=2, heads=2, heads_kv=1, seqlen_q=40, seqlen_k=50, seq_lens=(46, 29),
        window=(20, 3), softcap=20.0, alibi="h", bias="hqk", sinks=True, dropout_p=0.2), "k v dout"),
    (AttentionCase("float32", heads=1, seqlen_q=40, causal=True, dtype="float32", all_variants=True), "v dout"),
    (AttentionCase("bfloat16", heads=1, seqlen_q=40, causal=True, dtype="bfloat16"), "v dout"),
    (AttentionCase("mask", heads=1, seqlen_q=90, seqlen_k=70, head_dim=16, mask="11:64:0.6"), "k v dout"),
    (AttentionCase("mask_lengths", batch=2, heads=1, seqlen_q=80, head_dim=16, mask="b1:64:0.6", seq_lens=(75, 29),
        bias="bhqk"), "q attn_bias"),
    (AttentionCase("wide", heads=1, seqlen_q=40, head_dim=136, causal=True), "v dout"),
)  # fmt: skip


def _cut() -> list[tuple[str, str, AttentionCase, str]]:
    rows = []
    for backend in TARGETS:
        for case, poisoned in CUT:
            if case.mask and "mask" in refused_features(backend):
                continue
            rows += [(backend, "auto", case, name) for name in poisoned.split()]
            if case.all_variants:
                rows.append((backend, "v1", case, "v"))
    return rows


@pytest.mark.parametrize(
    ("backend", "variant", "case", "name"), _cut(), ids=lambda x: x.name if isinstance(x, AttentionCase) else x
)
def test_all_that_depends(backend: str, variant: str, case: AttentionCase, name: str) -> None:
    assert_propagates(TARGETS[backend], case, variant, name, float("nan"))


# Kernels of one architecture have their own tiles and forms; the interpreter takes another's where it is told to.
TURING = {"causal": "v dout", "lengths": "v", "packed_groups": "dout", "dropout": "dout", "wide": "v"}


@pytest.mark.skipif(not TARGETS["cuda"].interpreted if "cuda" in TARGETS else True, reason="needs the interpreter")
@pytest.mark.parametrize(("case", "name"), [(case, name) for case, names in TURING.items() for name in names.split()])
def test_half_precision_without_tensor_cores(monkeypatch: pytest.MonkeyPatch, case: str, name: str) -> None:
    monkeypatch.setenv("DIYFA_ARCH", "sm_75")
    assert_propagates(TARGETS["cuda"], next(x for x, _ in CUT if x.name == case), "v2", name, float("nan"))


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["v", "dout"])
@pytest.mark.parametrize("case", ["dropout_causal", "wide"])
@pytest.mark.parametrize("backend", TARGETS)
def test_infinities(backend: str, case: str, name: str, value: float) -> None:
    found = next(x for x, _ in CUT if x.name == case)
    assert_propagates(TARGETS[backend], found, "auto", name, value)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "window"), [(60, 30, (-1, 0)), (20, 60, (4, 0))])
@pytest.mark.parametrize("backend", TARGETS)
def test_who_sees_nothing_stays_zero(backend: str, seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> None:
    """All inputs are NaN: queries without keys have output 0."""
    target = TARGETS[backend]
    q = torch.full((1, 1, seqlen_q, 16), float("nan")).half().to(target.device)
    k, v = (torch.full((1, 1, seqlen_k, 16), float("nan")).half().to(target.device) for _ in range(2))
    out = diyfa.flash_attention(q, k, v, window=window, backend=backend).cpu()[0, 0]
    i, j = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, torch.arange(seqlen_k)
    sees = ((j <= i) & ((j >= i - window[0]) if window[0] >= 0 else True)).any(1)
    assert bool(out[sees].isnan().all()) and bool((out[~sees] == 0).all())
