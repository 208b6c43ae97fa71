"""Lengths on the device that nobody could check, as in a captured graph: kernels clamp them to the memory there is, and
neither read nor write beyond it. All tensors lie inside larger buffers of NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from targets import TARGETS, Target

from diyfa import registry
from diyfa.problem import AttentionGradients, AttentionProblem, AttentionTensors, bhsd_strides
from diyfa.testing import AttentionCase, Results, assert_within_budget, make_inputs

HEADS, ROWS, HEAD_DIM = 2, 40, 32
GUARD = 96  # rows before and after, more than a tile reads at once


class Buffers:
    """Tensors of one dtype or another, each with `GUARD` rows of NaN on both sides."""

    def __init__(self, device: str) -> None:
        self.device, self.all = device, []

    def inside(self, x: torch.Tensor, filled: bool = True) -> torch.Tensor:
        guard = GUARD * HEADS * HEAD_DIM
        whole = torch.full((x.numel() + 2 * guard,), float("nan"), dtype=x.dtype)
        if filled:
            whole[guard : guard + x.numel()] = x.detach().contiguous().flatten()
        whole = whole.to(self.device)
        self.all.append((whole, guard, x.numel()))
        return whole.as_strided(x.shape, x.detach().contiguous().stride(), guard)

    def assert_guards_hold(self) -> None:
        for whole, guard, count in self.all:
            host = whole.cpu()
            assert bool(host[:guard].isnan().all()) and bool(host[guard + count :].isnan().all())


def run(target: Target, variant: str, case: AttentionCase, lengths: dict[str, list[int]]) -> Results:
    """`case` with other lengths than it says, straight to the kernels, which alone can notice."""
    backend, inputs, buffers = registry.load_backend(target.backend), make_inputs(case), Buffers(target.device)
    q, k, v, dout, dlse = (buffers.inside(x) for x in inputs[:5])
    batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v = case.sizes
    _, total_q, total_k = case.rows
    varlen = case.layout == "thd"
    lengths_there = {name: torch.tensor(x, dtype=torch.int32).to(target.device) for name, x in lengths.items()}
    tensors = AttentionTensors(q, k, v, head_dim**-0.5, **lengths_there)
    sizes = (batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v)
    problem = AttentionProblem(
        backend.device_type, backend.arch(q.device), case.dtype, case.layout, *sizes, seq_lens=not varlen,
        aligned=False, window_right=0 if case.causal else -1, needs_grad=True,
        total_q=total_q * varlen, total_k=total_k * varlen,
    )  # fmt: skip
    assert bhsd_strides(q, case.layout)[3] == 1
    out, lse = buffers.inside(inputs.q, filled=False), buffers.inside(inputs.dlse, filled=False)
    if varlen:  # rows of no sequence are the caller's to fill
        out.copy_(torch.zeros(out.shape, dtype=out.dtype))
        lse.copy_(torch.full(lse.shape, float("inf")))
    registry.choose("attention_fwd", problem, backend, variant).launch(problem, tensors, out, lse)
    buffers.assert_guards_hold()
    forward = out.cpu(), lse.cpu()
    assert not forward[0].isnan().any(), "read beyond the memory"
    gradients = AttentionGradients(*(buffers.inside(x, filled=False) for x in inputs[:3]))
    for x in gradients[:3]:
        x.copy_(torch.zeros(x.shape, dtype=x.dtype))
    registry.choose("attention_bwd", problem, backend).launch(problem, tensors, out, lse, dout, dlse, gradients)
    buffers.assert_guards_hold()
    return Results(*forward, *(x.cpu() for x in gradients[:3]))


PADDED = AttentionCase("lens", batch=2, heads=HEADS, seqlen_q=ROWS, head_dim=HEAD_DIM, seq_lens=(ROWS, ROWS))
PACKED = AttentionCase("packed", layout="thd", heads=HEADS, lens_q=(17, 23), lens_k=(17, 23), head_dim=HEAD_DIM)
FITS = [0, 17, 40]
ON_DEVICES = [name for name in TARGETS if name != "cpu"]  # whose seq_lens nobody could check


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("backend", ON_DEVICES)
def test_too_long_seq_lens_end_with_the_tensors(backend: str, causal: bool) -> None:
    case = replace(PADDED, causal=causal)
    results = run(TARGETS[backend], "v2", case, {"seq_lens": [ROWS + 60, ROWS + 1]})
    assert_within_budget(results, case)


@pytest.mark.parametrize("backend", ON_DEVICES)
def test_negative_seq_lens_see_nothing(backend: str) -> None:
    results = run(TARGETS[backend], "v2", PADDED, {"seq_lens": [ROWS, -5]})
    assert bool((results.out[1] == 0).all()) and bool((results.lse[1] == float("inf")).all())
    for x in results[2:5]:
        assert bool((x[1] == 0).all()) and bool(x[0].isfinite().all())


@pytest.mark.parametrize("begin, end, causal", [
    (0, 41, True), (0, 75, False), (0, 2**31 - 1, True), (0, 2**31 - 1, False), (-1, 40, False), (-70, 40, True),
])  # fmt: skip
@pytest.mark.parametrize("which", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize("backend", TARGETS)
def test_offsets_outside_the_rows_end_with_them(backend: str, which: str, begin: int, end: int, causal: bool) -> None:
    case = replace(PACKED, causal=causal)
    lengths = {"cu_seqlens_q": FITS, "cu_seqlens_k": FITS, which: [begin, 17, end]}
    assert_within_budget(run(TARGETS[backend], "v2", case, lengths), case)


@pytest.mark.parametrize("which", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize("backend", TARGETS)
def test_offsets_that_descend_make_empty_sequences(backend: str, which: str) -> None:
    """The second sequence would have a negative length, and the first would begin beyond the tensors."""
    lengths = {"cu_seqlens_q": FITS, "cu_seqlens_k": FITS, which: [60, 50, 40]}
    results = run(TARGETS[backend], "v2", PACKED, lengths)
    assert all(bool(x.isfinite().all()) for x in (results.out, *results[2:5]))
