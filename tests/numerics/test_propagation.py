"""NaN and inf in an input show in all that depends on it, on every backend, and never in another head or sequence."""

from __future__ import annotations

import pytest
import torch
from nonfinite import assert_shows_in_what_depends
from targets import TARGETS, Target

import diyfa
from diyfa.testing import AttentionCase

SEQLEN, AT = 70, 37  # the poisoned position lies inside a tile that the diagonal crosses


def attend(target: Target, poisoned: str, value: float):
    """out, lse and the input gradients of a causal call in which one row of one tensor holds `value`."""
    generator = torch.Generator().manual_seed(0)
    named = {name: torch.randn(1, 2, SEQLEN, 32, generator=generator).half() for name in ("q", "k", "v", "dout")}
    named[poisoned][0, 0, AT, 5] = value
    q, k, v, dout = (x.to(target.device) for x in named.values())
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = diyfa.flash_attention(q, k, v, causal=True, return_lse=True, backend=target.backend)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    return [x.detach().cpu() for x in (out, lse, *grads)]


def rows(x: torch.Tensor) -> torch.Tensor:
    """(heads, S): rows that hold anything not finite."""
    x = x[0] if x.dim() == 3 else x[0].isfinite().all(-1)
    return ~(x if x.dtype == torch.bool else x.isfinite())


def expected_rows(*, before: bool = False, at: bool = False, after: bool = False) -> torch.Tensor:
    found = torch.zeros(2, SEQLEN, dtype=torch.bool)
    found[0, :AT], found[0, AT], found[0, AT + 1 :] = before, at, after
    return found


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("poisoned", ["q", "k", "v", "dout"])
def test_other_heads_are_untouched(target: Target, poisoned: str, value: float) -> None:
    for x in attend(target, poisoned, value):
        assert not bool(rows(x)[1].any())


@pytest.mark.parametrize("poisoned", ["q", "k", "v", "dout"])
def test_what_sees_it_shows_it(target: Target, poisoned: str) -> None:
    """Every result that the NaN enters is NaN, whatever else is."""
    out, lse, dq, dk, dv = (rows(x) for x in attend(target, poisoned, float("nan")))
    at, upto = expected_rows(at=True), expected_rows(before=True, at=True)
    on = at if poisoned in ("q", "dout") else expected_rows(at=True, after=True)
    if poisoned != "dout":
        assert bool(out[on].all()) and (poisoned == "v" or bool(lse[on].all()))
    assert bool(dq[on].all()) and bool(dk[upto].all()) and (poisoned == "v" or bool(dv[upto].all()))


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_every_cpu_schedule(variant: str) -> None:
    q, k, v = (torch.randn(1, 1, SEQLEN, 16) for _ in range(3))
    v[0, 0, AT] = float("nan")
    out = diyfa.flash_attention(q, k, v, window=(10, 3), variant=variant, backend="cpu")
    reached = torch.zeros(SEQLEN, dtype=torch.bool)
    reached[AT - 3 : AT + 11] = True
    assert torch.equal(out[0, 0].isnan().any(-1), reached)


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
    (AttentionCase("packed_groups", heads=2, heads_kv=1, layout="thd", lens_q=(37, 29), window=(11, 0)), "v dout"),
    (AttentionCase("dropout", heads=1, seqlen_q=40, dropout_p=0.3), "k v dout"),
    (AttentionCase("dropout_causal", heads=1, seqlen_q=40, dropout_p=0.3, causal=True), "v dout"),
    (AttentionCase("bias", heads=1, batch=2, seqlen_q=40, bias="bhqk", causal=True), "v dout attn_bias"),
    (AttentionCase("bias_keys", heads=1, seqlen_q=40, bias="k", window=(9, 9)), "v attn_bias"),
    (AttentionCase("bias_queries", heads=1, seqlen_q=40, bias="q1", causal=True), "v attn_bias"),
    # No mask, but rows beyond the sequence: their gradients of the bias are 0.
    (AttentionCase("bias_lengths", batch=2, heads=1, seqlen_q=50, seq_lens=(46, 29), bias="bhqk"), "k v"),
    (AttentionCase("softcap_alibi", heads=1, seqlen_q=40, softcap=20.0, alibi="h", causal=True), "q k"),
    (
        AttentionCase(
            "everything", batch=2, heads=2, heads_kv=1, seqlen_q=40, seqlen_k=50, seq_lens=(46, 29), window=(20, 3),
            softcap=20.0, alibi="h", bias="hqk", sinks=True, dropout_p=0.2,
        ),
        "k v dout",
    ),
    (AttentionCase("float32", heads=1, seqlen_q=40, causal=True, dtype="float32", all_variants=True), "v dout"),
    (AttentionCase("bfloat16", heads=1, seqlen_q=40, causal=True, dtype="bfloat16"), "v dout"),
    (AttentionCase("wide", heads=1, seqlen_q=40, head_dim=136, causal=True), "v dout"),
)  # fmt: skip


COMPARED = sorted(TARGETS.keys() - {"cpu"})  # with the CPU backend


def _cut() -> list[tuple[str, str, AttentionCase, str]]:
    rows = []
    for backend in COMPARED:
        for case, poisoned in CUT:
            rows += [(backend, "auto", case, name) for name in poisoned.split()]
            if case.all_variants:
                rows.append((backend, "v1", case, "v"))
    return rows


@pytest.mark.parametrize(
    ("backend", "variant", "case", "name"), _cut(), ids=lambda x: x.name if isinstance(x, AttentionCase) else x
)
def test_all_that_depends(backend: str, variant: str, case: AttentionCase, name: str) -> None:
    assert_shows_in_what_depends(TARGETS[backend], case, variant, name, float("nan"))


# Kernels of one architecture have their own tiles and forms; the interpreter takes another's where it is told to.
TURING = {
    "causal": "v dout",
    "lengths": "v",
    "packed_groups": "dout",
    "dropout": "dout",
    "wide": "v",
}


@pytest.mark.skipif(not TARGETS["cuda"].interpreted if "cuda" in TARGETS else True, reason="needs the interpreter")
@pytest.mark.parametrize(("case", "name"), [(case, name) for case, names in TURING.items() for name in names.split()])
def test_half_precision_without_tensor_cores(monkeypatch: pytest.MonkeyPatch, case: str, name: str) -> None:
    monkeypatch.setenv("DIYFA_ARCH", "sm_75")
    assert_shows_in_what_depends(TARGETS["cuda"], next(x for x, _ in CUT if x.name == case), "v2", name, float("nan"))


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["v", "dout"])
@pytest.mark.parametrize("case", ["dropout_causal", "wide"])
@pytest.mark.parametrize("backend", COMPARED)
def test_infinities(backend: str, case: str, name: str, value: float) -> None:
    found = next(x for x, _ in CUT if x.name == case)
    assert_shows_in_what_depends(TARGETS[backend], found, "auto", name, value)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "window"), [(60, 30, (-1, 0)), (20, 60, (4, 0))])
@pytest.mark.parametrize("backend", COMPARED)
def test_who_sees_nothing_stays_zero(backend: str, seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> None:
    """All inputs are NaN: queries without keys have output 0."""
    target = TARGETS[backend]
    q = torch.full((1, 1, seqlen_q, 16), float("nan")).half().to(target.device)
    k, v = (torch.full((1, 1, seqlen_k, 16), float("nan")).half().to(target.device) for _ in range(2))
    out = diyfa.flash_attention(q, k, v, window=window, backend=backend).cpu()[0, 0]
    i, j = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, torch.arange(seqlen_k)
    sees = ((j <= i) & ((j >= i - window[0]) if window[0] >= 0 else True)).any(1)
    assert bool(out[sees].isnan().all()) and bool((out[~sees] == 0).all())
