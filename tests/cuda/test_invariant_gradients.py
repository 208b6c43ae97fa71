"""Deterministic gradients in batch-invariant mode: the same bits whatever else is in a packed batch."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from targets import TARGETS

import diyfa
from diyfa.backends.cuda import CudaBackend
from diyfa.backends.cuda.attention import bwd_partials, configs
from diyfa.backends.cuda.hopper import bwd_configs
from diyfa.problem import VARLEN, AttentionProblem
from diyfa.registry import choose

BATCHES = ((50,), (50, 130), (3, 50, 64))  # the sequence of 50 tokens is in each


def gradients(lens: tuple[int, ...], heads_kv: int) -> list[torch.Tensor]:
    """Out and gradients of the sequence of 50 tokens from one packed call."""
    sequences = []
    for n in lens:
        g = torch.Generator().manual_seed(n)
        sequences.append([torch.randn(n, h, 32, generator=g).half() for h in (4, heads_kv, heads_kv, 4)])
    device = TARGETS["cuda"].device
    q, k, v, dout = (torch.cat(x).to(device) for x in zip(*sequences, strict=True))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    offsets = torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)
    with torch.enable_grad():
        out = diyfa.flash_attention_varlen(
            *leaves, offsets, offsets, max(lens), max(lens), causal=True, deterministic=True
        )
        results = [out, *torch.autograd.grad(out, leaves, dout)]
    first = sum(lens[: lens.index(50)])
    return [x.detach()[first : first + 50].cpu() for x in results]


@pytest.mark.parametrize("heads_kv", [4, 2])
def test_gradients_do_not_depend_on_their_batch(heads_kv: int) -> None:
    with diyfa.use_backend("cuda"), diyfa.batch_invariant():
        want, *others = [gradients(lens, heads_kv) for lens in BATCHES]
    for got in others:
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_neither_kernel_nor_tile_depends_on_the_batch(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of the mode all of these depend on it."""
    packed = AttentionProblem("cuda", "sm_90", "bfloat16", VARLEN, 1, 32, 8, 64, 64, head_dim, head_dim)
    packed = packed.replace(window_right=0, deterministic=True, needs_grad=True)
    calls = [
        packed.replace(batch=n, seqlen_q=longest, seqlen_k=longest, total_q=total, total_k=total)
        for n, longest, total in ((1, 40, 40), (1, 1 << 14, 1 << 14), (200, 900, 40000), (3, 64, 150))
    ]
    backend = CudaBackend()

    def choices(mode: bool) -> set[object]:
        found: set[object] = set()
        for call in (x.replace(batch_invariant=mode) for x in calls):
            kernel = choose("attention_bwd", call, backend)
            tiles = tuple(configs.default_config(kind, call) for kind in ("dkdv", "dq"))
            found.add((kernel.name, tiles, bwd_partials.count_subgroups(call, 128, 132)))
        return found

    for has_hopper in (False, True):
        monkeypatch.setattr(bwd_configs, "environment_refusal", lambda x=has_hopper: None if x else "not here")
        assert len(choices(True)) == 1
        assert len(choices(False)) > 1
