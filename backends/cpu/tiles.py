"""Tiles of the forward and the backward pass: their ranges, their masks and their scores.

A tile pair covers queries [m0, m1) and keys [n0, n1) of every sample and head at once. The G query heads that share a
KV head are stacked as rows, so one `torch.matmul` of [B, Hk, G * BLOCK_M, D] with [B, Hk, D, BLOCK_N] does the work and
no key is repeated in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from diyfa.block_lists import visible_pairs
from diyfa.dropout import Words, drop_threshold, element_levels, keys_from_state, position_words
from diyfa.eight_bits import BLOCK_K, BLOCK_Q, EIGHT_BITS, dequantised
from diyfa.problem import AttentionProblem, AttentionTensors, as_bhsd
from diyfa.score_programs import apply_score_function, captured_tensors, score_function_gradients

INF = float("inf")


def without_autocast(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Switch torch.autocast off inside a kernel (a decorator), whose arithmetic is float32."""

    @wraps(launch)
    def run(*args: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return launch(*args)

    return run


class Visibility:
    """The mask of one call: sequence lengths and window, aligned to the bottom right of each sample, or a block mask
    (`block_mask` is its two tensors)."""

    def __init__(
        self,
        problem: AttentionProblem,
        seq_lens: torch.Tensor | None,
        block_mask: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.block_mask, self.sizes = block_mask, (problem.seqlen_q, problem.seqlen_k)
        self.left, self.right = problem.window_left, problem.window_right
        if seq_lens is None:
            len_k = torch.tensor([problem.seqlen_k], device="cpu")
            len_q = torch.tensor([problem.seqlen_q], device="cpu")
        else:
            len_k = seq_lens.to(torch.int64).clamp(0, problem.seqlen_k)  # a traced call has not checked them
            len_q = len_k.clamp(max=problem.seqlen_q)
        shift = len_k - len_q
        self.len_k, self.len_q, self.shift = (x[:, None, None, None] for x in (len_k, len_q, shift))
        self.min_len_k, self.max_len_k = int(len_k.min()), int(len_k.max())
        self.min_len_q, self.max_len_q = int(len_q.min()), int(len_q.max())
        self.min_shift, self.max_shift = int(shift.min()), int(shift.max())

    def key_range(self, m0: int, m1: int) -> tuple[int, int]:
        """Return the range [start, stop) of keys that any query of [m0, m1) can see; empty if start >= stop."""
        m1 = min(m1, self.max_len_q)
        if m0 >= m1:
            return 0, 0
        start = 0 if self.left < 0 else max(0, m0 + self.min_shift - self.left)
        stop = self.max_len_k if self.right < 0 else min(self.max_len_k, m1 + self.max_shift + self.right)
        return start, stop

    def mask(self, m0: int, m1: int, n0: int, n1: int) -> torch.Tensor | None:
        """Return the mask [B or 1, H or 1, BLOCK_M, BLOCK_N], True for seen keys, None if each query sees each key."""
        if self.block_mask is None:
            return self._mask_by_position(m0, m1, n0, n1)
        kept = visible_pairs(*self.block_mask, self.sizes, slice(m0, m1), slice(n0, n1))
        seen = self._mask_by_position(m0, m1, n0, n1)
        if seen is None:
            return None if bool(kept.all()) else kept
        return seen & kept

    def _mask_by_position(self, m0: int, m1: int, n0: int, n1: int) -> torch.Tensor | None:
        """Return the mask of lengths and window alone, as `mask` does."""
        if (
            n1 <= self.min_len_k
            and m1 <= self.min_len_q
            and (self.left < 0 or n0 >= m1 - 1 + self.max_shift - self.left)
            and (self.right < 0 or n1 - 1 <= m0 + self.min_shift + self.right)
        ):
            return None
        i, j = torch.arange(m0, m1, device="cpu")[:, None], torch.arange(n0, n1, device="cpu")
        distance = j - i - self.shift
        seen = (i < self.len_q) & (j < self.len_k)
        if self.left >= 0:
            seen = seen & (distance >= -self.left)
        if self.right >= 0:
            seen = seen & (distance <= self.right)
        return seen


def row_products(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return rows @ othersᵀ. A single row is computed in float64: BLAS would sum it in another order, with up to 2.4
    times the rounding error of several rows."""
    if rows.shape[-2] > 1:
        return rows @ others.transpose(-1, -2)
    return (rows.double() @ others.double().transpose(-1, -2)).to(rows.dtype)


def dropout_keys(problem: AttentionProblem, tensors: AttentionTensors) -> Words | None:
    """Return dropout's random words for each sample (or packed sequence) and query head, [B, H] each, or None."""
    if not problem.dropout:
        return None
    assert tensors.rng_state is not None
    return keys_from_state(tensors.rng_state, problem.batch, problem.heads_q)


class Call:
    """One attention call: its tensors as [B, Hk, (G,) S, D] views, and its scores tile by tile.

    `keys`: the words of `dropout_keys` for the samples of this call. Packed sequences pass them, else they are derived.
    """

    def __init__(self, problem: AttentionProblem, tensors: AttentionTensors, keys: Words | None = None) -> None:
        self.problem, self.tensors = problem, tensors
        self.dtype = torch.float64 if problem.dtype == "float64" else torch.float32  # dtype of all arithmetic
        self.group = problem.heads_q // problem.heads_kv
        block_mask = None
        if tensors.mask_blocks is not None and tensors.mask_bits is not None:
            block_mask = tensors.mask_blocks, tensors.mask_bits
        self.visibility = Visibility(problem, tensors.seq_lens, block_mask)
        q, self.k, self.v = (as_bhsd(x, problem.layout) for x in tensors[:3])
        if problem.dtype in EIGHT_BITS:
            q = dequantised(q, tensors.q_descale, self.dtype, BLOCK_Q)
            self.k = dequantised(self.k, tensors.k_descale, self.dtype, BLOCK_K, tensors.k_mean)
            self.v = dequantised(self.v, tensors.v_descale, self.dtype, mean=tensors.v_mean)
        self.q = self.grouped(q)
        self.slopes = self.bias = self.sink_rows = None
        if tensors.alibi_slopes is not None:  # [B or 1, H, 1, 1]
            self.slopes = tensors.alibi_slopes.to(self.dtype).reshape(-1, problem.heads_q, 1, 1)
        if tensors.attn_bias is not None:
            bias = tensors.attn_bias
            self.bias = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
        if tensors.sinks is not None:  # [1, Hk, G, 1]
            self.sink_rows = tensors.sinks.to(self.dtype).reshape(1, problem.heads_kv, self.group, 1)
        self.captured = [getattr(tensors, f"score_tensor{n}") for n in range(captured_tensors(problem.score_fn))]
        self.keep_scale = 1.0 / (1.0 - tensors.dropout_p)  # factor of the weights that dropout keeps
        self.words: Words | None = None  # for each query and key position, [B, H, S]
        keys = keys or dropout_keys(problem, tensors)
        if keys is not None:
            rows, columns = torch.arange(problem.seqlen_q, device="cpu"), torch.arange(problem.seqlen_k, device="cpu")
            r0, r1, c0, c1 = keys
            self.words = (
                position_words(r0, rows),
                position_words(r1, rows),
                position_words(c0, columns),
                position_words(c1, columns),
            )

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        """Return a view of [B, H, S, ...] as [B, Hk, G, S, ...]."""
        return x.unflatten(1, (self.problem.heads_kv, self.group))

    def query_rows(self, x: torch.Tensor, m0: int, m1: int) -> torch.Tensor:
        """Return rows [m0, m1) of [B, Hk, G, Sq, D] as [B, Hk, G * BLOCK_M, D], 0 beyond a sequence's end."""
        tile = x[:, :, :, m0:m1].to(self.dtype)
        if m1 > self.visibility.min_len_q:
            inside = torch.arange(m0, m1, device="cpu")[:, None] < self.visibility.len_q
            tile = torch.where(inside.unsqueeze(1), tile, 0)
        return tile.flatten(2, 3)

    def scaled_queries(self, m0: int, m1: int) -> torch.Tensor:
        """Return rows [m0, m1) of q times the softmax scale, in the shape of `query_rows`."""
        return self.query_rows(self.q, m0, m1) * self.tensors.sm_scale

    def key_rows(self, x: torch.Tensor, n0: int, n1: int) -> torch.Tensor:
        """Return rows [n0, n1) of [B, Hk, Sk, D], 0 beyond a sequence's end."""
        tile = x[:, :, n0:n1].to(self.dtype)
        if n1 > self.visibility.min_len_k:
            tile = torch.where(torch.arange(n0, n1, device="cpu")[:, None] < self.visibility.len_k, tile, 0)
        return tile

    def per_head(self, tile: torch.Tensor) -> torch.Tensor:
        """Return a view of a tile [B, Hk, G * BLOCK_M, N] as [B, H, BLOCK_M, N]."""
        return tile.unflatten(2, (self.group, -1)).flatten(1, 2)

    def keep_mask(self, m0: int, m1: int, n0: int, n1: int) -> torch.Tensor | None:
        """Return the dropout mask [B, Hk, G * BLOCK_M, BLOCK_N] of a tile, True for kept weights, or None."""
        if self.words is None:
            return None
        r0, r1, c0, c1 = self.words
        levels = element_levels(r0[..., m0:m1], r1[..., m0:m1], c0[..., n0:n1], c1[..., n0:n1])
        return self.grouped(levels >= drop_threshold(self.tensors.dropout_p)).flatten(2, 3)

    def bias_tile(self, bias: torch.Tensor, m0: int, m1: int, n0: int, n1: int) -> torch.Tensor:
        """Return the tile of a tensor that broadcasts to (B, H, Sq, Sk). Its dimensions of size 1 stay."""
        rows = slice(None) if bias.shape[2] == 1 else slice(m0, m1)
        columns = slice(None) if bias.shape[3] == 1 else slice(n0, n1)
        return bias[:, :, rows, columns]

    def scores(
        self, q_tile: torch.Tensor, k_tile: torch.Tensor, m0: int, m1: int, n0: int, n1: int, seen: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return (scores [B, Hk, G * BLOCK_M, BLOCK_N] of scaled queries, -inf if unseen; tanh(s / softcap) or None;
        scores before the score function or None)."""
        s = row_products(q_tile, k_tile)
        tanh = None
        if self.problem.softcap:
            tanh = torch.tanh(s / self.problem.softcap)
            s = self.problem.softcap * tanh
        heads = self.per_head(s)  # a view: the lines below change s in place
        if self.slopes is not None:
            distance = (
                torch.arange(n0, n1, device="cpu") - torch.arange(m0, m1, device="cpu")[:, None] - self.visibility.shift
            )
            heads -= self.slopes * distance.abs()
        if self.bias is not None:
            heads += self.bias_tile(self.bias, m0, m1, n0, n1)
        before = None
        if self.problem.score_fn:
            before = s
            s = self.grouped(self.apply_function(heads, m0, n0, seen)).flatten(2, 3)
        elif seen is not None:
            heads.masked_fill_(~seen, -INF)
        return s, tanh, before

    def apply_function(self, scores: torch.Tensor, m0: int, n0: int, seen: torch.Tensor | None) -> torch.Tensor:
        """Return what the score function makes of a tile [B, H, BLOCK_M, BLOCK_N] at (m0, n0), -inf if unseen."""
        visible = torch.ones((), dtype=torch.bool, device=scores.device) if seen is None else seen
        positions = self.positions(scores, m0, n0)
        return apply_score_function(self.problem.score_fn, scores, positions, visible, self.captured)

    def positions(self, scores: torch.Tensor, m0: int, n0: int) -> tuple[torch.Tensor, ...]:
        """Return the index tensors b, h, i and j of a tile [B, H, BLOCK_M, BLOCK_N] at (m0, n0)."""
        batch, n_heads, rows, columns = scores.shape
        b, h = (
            torch.arange(batch, device="cpu")[:, None, None, None],
            torch.arange(n_heads, device="cpu")[:, None, None],
        )
        i = torch.arange(m0, m0 + rows, device="cpu")[:, None] + self.visibility.shift
        return b, h, i, torch.arange(n0, n0 + columns, device="cpu")

    def function_gradients(
        self, before: torch.Tensor, ds: torch.Tensor, m0: int, n0: int, learned: tuple[bool, ...]
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Return the gradients of the scores before the score function and of the `learned` captured tensors, from that
        of the scores behind it."""
        scores = self.per_head(before)
        d_scores, d_captured = score_function_gradients(
            self.problem.score_fn, scores, self.per_head(ds), self.positions(scores, m0, n0), self.captured, learned
        )
        return self.grouped(d_scores).flatten(2, 3), d_captured

    def product_gradient(self, ds: torch.Tensor, tanh: torch.Tensor | None) -> torch.Tensor:
        """Turn the gradient of scores into that of scaled products, in place; `tanh`: the second result of `scores`."""
        return ds if tanh is None else ds.mul_(1 - tanh * tanh)
