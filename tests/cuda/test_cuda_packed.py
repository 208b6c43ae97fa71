"""Neighbours in memory: what lies behind a sequence's end belongs to others and must not reach its results.

TMA descriptors end where the tensor ends, so these tests force their tiles where the architecture has TMA.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from poison import poisoned_allocations
from targets import TARGETS

import diyfa

if "cuda" not in TARGETS:
    pytest.skip("the cuda backend is not tested in this run", allow_module_level=True)

from diyfa.backends.cuda import backend as cuda
from diyfa.backends.cuda.attention.configs import candidates
from diyfa.backends.cuda.attention.launch import use_config
from diyfa.problem import AttentionProblem

TARGET = TARGETS["cuda"]
HEADS, HEAD_DIM = 2, 32


def force_tiles(stack: ExitStack, form: str) -> None:
    """Launch all kernels with the first tile of `form` that the tables have for this architecture."""
    arch = cuda.arch(torch.device(TARGET.device))
    size = (4, 8, 8, 4096, 4096, HEAD_DIM, HEAD_DIM)
    problem = AttentionProblem("cuda", arch, "float16", "bhsd", *size, aligned=form == "tma")
    for kind in ("fwd", "dkdv", "dq"):
        tile = candidates(kind, problem)[0]
        if tile.form != form:
            pytest.skip(f"{arch} has no {form} tiles")
        stack.enter_context(use_config(kind, tile))


def gradients(attend, tensors, dout):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = attend(*leaves)
    return [x.detach().cpu() for x in (out, lse, *torch.autograd.grad(out, leaves, dout))]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("form", ["tma", "portable"])
def test_a_packed_sequence_of_nan_reaches_no_other(form: str, causal: bool) -> None:
    lengths = [37, 70, 1, 65]
    offsets = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(TARGET.device)
    poisoned = slice(37, 107)
    generator = torch.Generator().manual_seed(0)
    shape = (sum(lengths), HEADS, HEAD_DIM)
    clean = [torch.randn(shape, generator=generator).half().to(TARGET.device) for _ in range(4)]
    dirty = [x.clone() for x in clean]
    for x in dirty:
        x[poisoned] = float("nan")

    def attend(q, k, v):
        return diyfa.flash_attention_varlen(q, k, v, offsets, offsets, 70, 70, causal, return_lse=True, backend="cuda")

    with ExitStack() as stack:
        force_tiles(stack, form)
        stack.enter_context(poisoned_allocations())
        expected = gradients(attend, clean[:3], clean[3])
        actual = gradients(attend, dirty[:3], dirty[3])
    names = ("out", "lse", "dq", "dk", "dv")
    for name, a, b in zip(names, actual, expected, strict=True):
        rows = 1 if name == "lse" else 0
        others = [i for i in range(sum(lengths)) if not 37 <= i < 107]
        assert torch.equal(a.index_select(rows, torch.tensor(others)), b.index_select(rows, torch.tensor(others))), name
        assert b.isfinite().all(), name


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("form", ["tma", "portable"])
def test_memory_behind_a_sample_reaches_no_result(form: str, causal: bool) -> None:
    lens = torch.tensor([70, 33, 1], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    clean = [torch.randn((3, HEADS, 70, HEAD_DIM), generator=generator).half() for _ in range(4)]
    dirty = [x.clone() for x in clean]
    for x in dirty:
        for sample, length in enumerate(lens.tolist()):
            x[sample, :, length:] = float("nan")

    def attend(q, k, v):
        return diyfa.flash_attention(q, k, v, causal, seq_lens=lens.to(TARGET.device), return_lse=True, backend="cuda")

    with ExitStack() as stack:
        force_tiles(stack, form)
        stack.enter_context(poisoned_allocations())
        results = [
            gradients(attend, [x.to(TARGET.device) for x in tensors[:3]], tensors[3].to(TARGET.device))
            for tensors in (clean, dirty)
        ]
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        assert torch.equal(a, b), name
