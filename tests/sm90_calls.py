"""The Hopper kernel's launcher on CPU tensors: its kernel runs in the Gluon interpreter, next to the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from diyfa.backends.cuda import fwd_sm90, sm90
from diyfa.backends.cuda.launch import Launches
from diyfa.problem import LAYOUTS, VARLEN, AttentionProblem, AttentionTensors
from diyfa.reference import reference_attention
from gluon_interpreter import InterpretedKernel

MULTIPROCESSORS = 3  # of the GPU that a persistent grid believes in


@dataclass(frozen=True)
class Case:
    """One call. `lengths`: of samples (seq_lens), or of packed sequences, for queries and keys."""

    head_dim: int = 64
    batch: int = 2
    heads: int = 2
    heads_kv: int = 1
    seqlen_q: int = 200
    seqlen_k: int = 200
    head_dim_v: int | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    seq_lens: tuple[int, ...] = ()
    packed: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    unused_rows: int = 0  # of packed tensors, after the last sequence
    sm_scale: float | None = None
    layout: str = "bhsd"
    dtype: torch.dtype = torch.float16
    config: tuple[tuple[str, Any], ...] = ()  # changes to the table's row
    seed: int = 0

    @property
    def widths(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim_v or self.head_dim


@contextmanager
def interpreted(config: sm90.Sm90Config, seed: int) -> Iterator[InterpretedKernel]:
    """Inside the block, the launcher runs the kernel here, with this tile."""
    kernel = InterpretedKernel(fwd_sm90._fwd_sm90_kernel, seed=seed)
    names = ("_fwd_sm90_kernel", "_launches", "config_of", "grid_of")
    saved = {name: getattr(fwd_sm90, name) for name in names}

    def grid_of(problem: AttentionProblem, config: sm90.Sm90Config, device: torch.device) -> int:
        tiles = sm90.tiles_of(problem, config)
        return min(tiles, MULTIPROCESSORS) if config.persistent else tiles

    replacements = (kernel, Launches(), lambda problem: config, grid_of)
    for name, value in zip(names, replacements, strict=True):
        setattr(fwd_sm90, name, value)
    try:
        yield kernel
    finally:
        for name, value in saved.items():
            setattr(fwd_sm90, name, value)


def _tensor(shape: list[int], layout: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn([shape[i] for i in LAYOUTS[layout]]).to(dtype)


def _beginnings(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).int()


def run(case: Case) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """((out, lse) of the kernel, (out, lse) of the oracle in float64); what no sequence covers holds NaN before."""
    torch.manual_seed(case.seed)
    d, dv = case.widths
    right = 0 if case.causal else case.window[1]
    common = {"window_left": case.window[0], "window_right": right, "softcap": case.softcap}
    features: dict[str, Any] = {}
    if case.packed is not None:
        layout, (cu_q, cu_k) = VARLEN, (_beginnings(lengths) for lengths in case.packed)
        total_q, total_k = (int(cu[-1]) + case.unused_rows for cu in (cu_q, cu_k))
        q, k, v = (
            torch.randn(rows, heads, width).to(case.dtype)
            for rows, heads, width in ((total_q, case.heads, d), (total_k, case.heads_kv, d), (total_k, case.heads_kv, dv))
        )
        q[cu_q[-1] :], k[cu_k[-1] :], v[cu_k[-1] :] = (float("nan"),) * 3
        size = (len(case.packed[0]), case.heads, case.heads_kv, max(case.packed[0]), max(case.packed[1]))
        common |= {"total_q": total_q, "total_k": total_k}
        features = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        out_shape = [total_q, case.heads, dv]
    else:
        layout = case.layout
        q = _tensor([case.batch, case.heads, case.seqlen_q, d], layout, case.dtype)
        k, v = (_tensor([case.batch, case.heads_kv, case.seqlen_k, width], layout, case.dtype) for width in (d, dv))
        if case.seq_lens:
            features = {"seq_lens": torch.tensor(case.seq_lens, dtype=torch.int32)}
            for b, length in enumerate(case.seq_lens):
                for x in (q, k, v):
                    (x if layout == "bhsd" else x.permute(LAYOUTS[layout]))[b, :, length:] = float("nan")
        size = (case.batch, case.heads, case.heads_kv, case.seqlen_q, case.seqlen_k)
        common["seq_lens"] = bool(case.seq_lens)
        out_shape = [[case.batch, case.heads, case.seqlen_q, dv][i] for i in LAYOUTS[layout]]
    problem = AttentionProblem("cuda", "sm_90", str(case.dtype)[6:], layout, *size, d, dv, **common)
    scale = d**-0.5 if case.sm_scale is None else case.sm_scale
    out = torch.full(out_shape, float("nan"), dtype=case.dtype)
    lse = torch.full(problem.lse_shape, float("nan"))
    config = sm90.replace(sm90.config_of(problem), **dict(case.config))
    with interpreted(config, case.seed) as kernel:
        fwd_sm90.attention_forward(problem, AttentionTensors(q, k, v, scale, **features), out, lse)
    assert kernel.launches == 1
    expected = reference_attention(
        q.nan_to_num(), k.nan_to_num(), v.nan_to_num(), sm_scale=scale, window=(case.window[0], right),
        softcap=case.softcap, layout=layout, return_lse=True, dtype=torch.float64, **features,
    )  # fmt: skip
    if case.packed is not None:  # rows that no sequence covers are the front end's
        covered = int(features["cu_seqlens_q"][-1])
        assert out[covered:].isnan().all() and lse[:, covered:].isnan().all()
        out, lse, expected = out[:covered], lse[:, :covered], (expected[0][:covered], expected[1][:, :covered])
    return (out, lse), expected
