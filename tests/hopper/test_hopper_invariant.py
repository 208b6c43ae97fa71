"""Batch-invariant mode: the Hopper forward and the decoding kernels compute equal bits, in training and over a cache.

Both run interpreted, and products add 16 at a time, as `attention/fixed_order.py` demands of tensor cores. So what is
compared is the order of all operations. That instructions round equally only a GPU can show.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from itertools import accumulate
from typing import Any

import hopper_gluon  # noqa: F401
import matrix_product
import pytest
import torch
from hopper_interpreted import interpret_prefill, interpreted_only
from poison import poisoned_allocations

import diyfa
from diyfa import plan as planning
from diyfa.backends.cuda.attention import decode, decode_configs
from diyfa.backends.cuda.hopper import configs, prefill_configs
from diyfa.backends.cuda.hopper import fwd_launch as hopper_fwd_launch
from diyfa.problem import AttentionProblem, as_kvcache_problem

pytestmark = interpreted_only

BLOCK_N, CHUNK = 64, 128  # several chunks of few keys
CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "totals_in_memory": {"causal": True, "scale": -0.3, "tile": {"shared_totals": False}},
    "out_in_totals": {"causal": True, "sinks": True, "tile": {"out_in_totals": True, "stages": 4}},
    "three_consumers": {"causal": True, "lens": (330, 1, 66), "tile": {"consumers": 3}},
    "one_consumer": {"tile": {"consumers": 1, "pingpong": False, "persistent": False, "scheduler": "static"}},
    "window_and_sinks": {"window": (150, 0), "sinks": True, "causal": True},
    "narrow_window": {"window": (20, 3)},
    "96": {"causal": True, "head_dim": 96, "heads": 1},
    "128": {"causal": True, "head_dim": 128, "heads": 1},
    "256": {"causal": True, "head_dim": 256, "heads": 1},
    "wide_values": {"causal": True, "head_dim": 48, "head_dim_v": 72, "heads": 1},
    "narrow_values": {"causal": True, "head_dim": 136, "head_dim_v": 64, "heads": 1},
}
SLOW = (
    "96", "128", "256", "one_consumer", "narrow_window", "totals_in_memory", "out_in_totals", "three_consumers",
    "wide_values", "narrow_values",
)  # fmt: skip
# Rows of a tile of decoding -> (sequence, first query, queries, page size). The last key is that of the last query.
DECODED = {16: ((0, 199, 1, 16), (0, 193, 7, 0)), 64: ((0, 191, 9, 64), (1, 0, 1, 1))}


class Calls:
    """Sequences, and calls that compute some of their rows."""

    def __init__(self, case: dict[str, Any]) -> None:
        generator = torch.Generator().manual_seed(4)
        self.lens = case.get("lens", (200, 1, 66))
        self.d = case.get("head_dim", 64)
        self.dv = case.get("head_dim_v", self.d)
        self.h = case.get("heads", 2)
        self.hk = max(self.h // 2, 1)
        tensors = ((self.h, self.d), (self.hk, self.d), (self.hk, self.dv))
        drawn = [torch.randn((n, *x), generator=generator).bfloat16() for n in self.lens for x in tensors]
        self.sequences = [tuple(drawn[i : i + 3]) for i in range(0, len(drawn), 3)]
        self.causal = case.get("causal", False)
        self.window = case.get("window", (-1, -1))
        self.scale = case.get("scale")
        sinks = torch.randn(self.h, generator=generator)
        self.options: dict[str, Any] = {"sinks": sinks} if case.get("sinks") else {}

    def trained(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Out (n, H, D) and lse (H, n) of each sequence, from one packed training forward."""
        q, k, v = (torch.cat(x) for x in zip(*self.sequences, strict=True))
        offsets = torch.tensor([0, *accumulate(self.lens)], dtype=torch.int32)
        out, lse = diyfa.flash_attention_varlen(
            q, k, v, offsets, offsets, max(self.lens), max(self.lens), causal=self.causal, window=self.window,
            sm_scale=self.scale, return_lse=True, **self.options,
        )  # fmt: skip
        return list(zip(out.split(list(self.lens)), lse.split(list(self.lens), 1), strict=True))

    def dense(self, s: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Out and lse of one sequence alone, from a dense training forward."""
        q, k, v = (x.transpose(0, 1)[None] for x in self.sequences[s])
        out, lse = diyfa.flash_attention(
            q, k, v, causal=self.causal, window=self.window, sm_scale=self.scale, return_lse=True, **self.options
        )
        return out[0].transpose(0, 1), lse[0]

    def cached(self, s: int, first: int, new: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Out and lse of `new` queries of a sequence from `first` on, over a cache of the keys up to them."""
        q, k, v = self.sequences[s]
        n = first + new
        shape = (-(-n // page_size) + 2, page_size) if page_size else (1, n + 5)
        caches = [torch.full((*shape, *x.shape[1:]), float("nan"), dtype=torch.bfloat16) for x in (k, v)]
        pages = random.Random(first).sample(range(shape[0]), shape[0])
        for cache, x in zip(caches, (k, v), strict=True):
            for j in range(n):
                cache[(pages[j // page_size], j % page_size) if page_size else (0, j)] = x[j]
        table = {"block_table": torch.tensor([pages], dtype=torch.int32)} if page_size else {}
        out, lse = diyfa.flash_attn_with_kvcache(
            q[None, first:n], *caches, cache_seqlens=torch.tensor([n], dtype=torch.int32), causal=self.causal,
            window_size=self.window, softmax_scale=self.scale, return_softmax_lse=True, **table, **self.options,
        )  # fmt: skip
        return out[0], lse[0]


def tile(rows: int) -> decode_configs.DecodeConfig:
    return decode_configs.DecodeConfig(rows, BLOCK_N, 4, 2, 2)


def assert_rows(
    result: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor], rows: slice
) -> None:
    for x, y in ((result[0], want[0][rows]), (result[1], want[1][:, rows])):
        assert torch.equal(x, y), (x.float() - y.float()).abs().max()


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in CASES])
def test_rows_have_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    kernel = interpret_prefill(monkeypatch, seed=5)
    monkeypatch.setattr(matrix_product, "STEP", 16)
    invariant = {
        columns: replace(config, **{"block_n": BLOCK_N, "consumers": 2} | case.get("tile", {}))
        for columns, config in configs.INVARIANT.items()
    }
    monkeypatch.setattr(configs, "INVARIANT", invariant)
    calls = Calls(case)
    with torch.no_grad(), diyfa.use_backend("cuda"), diyfa.batch_invariant(), poisoned_allocations():
        monkeypatch.setattr(decode_configs, "HOPPER_INVARIANT", ((256, CHUNK, tile(16)),))
        trained = calls.trained()
        assert kernel.launches == 1, "training runs by the Hopper kernel"
        assert_rows(calls.dense(2), trained[2], slice(None))
        n = calls.lens[0]
        for first, new, page in ((0, 140, 64), (70, n - 70, 16)):
            before = kernel.launches
            if new >= invariant[64].consumers * configs.CONSUMER_ROWS and (calls.causal or first + new == n):
                assert_rows(calls.cached(0, first, new, page), trained[0], slice(first, first + new))
                assert kernel.launches == before + 1
        monkeypatch.setattr(prefill_configs, "MIN_QUERIES", 1 << 30)
        before = kernel.launches
        for rows in DECODED:
            monkeypatch.setattr(planning, "plans", {})
            monkeypatch.setattr(decode_configs, "decode_config", lambda problem, rows=rows: tile(rows))
            monkeypatch.setattr(decode, "decode_config", lambda problem, rows=rows: tile(rows))
            for s, first, new, page in DECODED[rows]:
                assert_rows(calls.cached(s, first, new, page), trained[s], slice(first, first + new))
        assert kernel.launches == before, "decoding runs by the portable kernel"


def test_the_forward_has_the_blocks_and_chunks_of_decoding() -> None:
    """Interpreted, the tests above take blocks of their own. Here are the blocks of a GPU."""
    problem = AttentionProblem("cuda", "sm_90", "bfloat16", "bhsd", 1, 64, 8, 4096, 4096, 64, 64, batch_invariant=True)
    widths = range(8, configs.MAX_HEAD_DIM + 1, 8)
    for d, dv, page_size in itertools.product(widths, widths, (0, 16, 256)):
        forward = problem.replace(head_dim=d, head_dim_v=dv)
        if max(d, dv) < configs.MIN_HEAD_DIM:
            continue
        assert configs.refuses(forward) is None
        cache = as_kvcache_problem(forward).replace(page_size=page_size)
        decoding = decode_configs.decode_config(cache)
        assert decoding is not None
        chunk = decode_configs.chunk_keys(cache)
        for config in (configs.select_config(forward), prefill_configs.select_config(cache)):
            blocks = config.block_n, hopper_fwd_launch.constants(forward, config, False).chunk
            assert blocks == (decoding.block_n, chunk // decoding.block_n), (d, dv, page_size)
