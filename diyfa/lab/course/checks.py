"""The checks of the course's exercises: `check(chapter, your_function)` says whether it is solved.

A check compares with a plain computation, on inputs that show the mistakes that are easy to make.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _require(condition: Any, hint: str) -> None:
    if not condition:
        raise AssertionError(hint)


def _require_close(result: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = 1e-5) -> None:
    _require(isinstance(result, torch.Tensor), f"{what}: expected a tensor, got {type(result).__name__}")
    _require(result.shape == expected.shape, f"{what}: shape {tuple(result.shape)}, not {tuple(expected.shape)}")
    _require(not result.isnan().any() or expected.isnan().any(), f"{what}: the result has NaN")
    same = torch.allclose(result.double(), expected.double(), tolerance, tolerance)
    error = (result.double() - expected.double()).abs().max()
    _require(same, f"{what}: largest error {error:.1e}")


# ---- 1: softmax of rows that may be empty


def softmax_of_rows(softmax: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """softmax(x) of the last dimension; a row of -inf gives zeros."""
    x = torch.randn(5, 7, generator=_generator())
    _require_close(softmax(x), torch.softmax(x, -1), "ordinary scores")
    _require_close(softmax(x + 200), torch.softmax(x + 200, -1), "scores near 200, whose exponentials overflow")
    rows = x + torch.tensor([0.0, 500.0, -500.0, 1000.0, -1000.0])[:, None]
    _require_close(softmax(rows), torch.softmax(rows, -1), "rows of very different height")
    masked = x.masked_fill(torch.ones(5, 7).triu(2) > 0, float("-inf"))
    _require_close(softmax(masked), torch.softmax(masked, -1), "a causal mask")
    masked[2] = float("-inf")
    expected = torch.softmax(masked, -1).nan_to_num(0.0)
    _require_close(softmax(masked), expected, "a row of -inf, which must give zeros")


# ---- 2: merging two partial results


def merge(merge: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
    """merge(out_a, lse_a, out_b, lse_b) -> (out, lse) of the keys of both."""
    g = _generator()
    for spread, what in ((1.0, "ordinary scores"), (300.0, "scores whose exponentials overflow")):
        s, v = torch.randn(6, 10, generator=g) * spread, torch.randn(10, 4, generator=g)
        states = []
        for part in (slice(0, 3), slice(3, 10), slice(0, 10)):
            states.append((torch.softmax(s[:, part], -1) @ v[part], torch.logsumexp(s[:, part], -1)))
        out, lse = merge(*states[0], *states[1])
        _require_close(out, states[2][0], f"{what}, out", 1e-4)
        _require_close(lse, states[2][1], f"{what}, lse", 1e-4)
    out_a, lse_a = states[2]
    none, empty = torch.zeros_like(out_a), torch.full_like(lse_a, float("-inf"))
    for given, what in (((out_a, lse_a, none, empty), "right"), ((none, empty, out_a, lse_a), "left")):
        out, lse = merge(*given)
        _require_close(out, out_a, f"no keys on the {what} (lse is -inf), out")
        _require_close(lse, lse_a, f"no keys on the {what} (lse is -inf), lse")
    out, lse = merge(none, empty, none, empty)
    _require_close(out, none, "no keys on either side, out")
    _require((lse == float("-inf")).all(), "no keys on either side: lse must be -inf")


# ---- 3: which blocks of keys a causal tile visits


def block_range(block_range: Callable[[int, int, int, int, int], tuple[int, int]]) -> None:
    """block_range(row0, rows, seqlen_q, seqlen_k, block_n) -> (blocks without a mask, blocks visited)."""
    for seqlen_q, seqlen_k in ((64, 64), (50, 50), (16, 100), (1, 37), (100, 30), (33, 34)):
        for rows, block_n in ((16, 16), (32, 8), (16, 32), (7, 5)):
            for row0 in range(0, seqlen_q, rows):
                i = torch.arange(row0, min(row0 + rows, seqlen_q))[:, None]
                seen = torch.arange(seqlen_k)[None, :] <= i + seqlen_k - seqlen_q
                blocks = seen.split(block_n, 1)
                whole = [bool(block.all()) and block.shape[1] == block_n for block in blocks]
                n_whole = [*whole, False].index(False)
                n_visited = sum(bool(block.any()) for block in blocks)
                found = tuple(int(n) for n in block_range(row0, rows, seqlen_q, seqlen_k, block_n))
                _require(
                    found == (n_whole, n_visited),
                    f"row0={row0}, rows={rows}, seqlen_q={seqlen_q}, seqlen_k={seqlen_k}, block_n={block_n}: "
                    f"got {found}, expected {(n_whole, n_visited)}",
                )


# ---- 4: the gradient of the scores, if the loss depends on lse, too


def score_gradient(score_gradient: Callable[..., torch.Tensor]) -> None:
    """score_gradient(p, v, out, dout, dlse) -> dS."""
    g = _generator()
    s = torch.randn(6, 9, generator=g, dtype=torch.float64, requires_grad=True)
    v, dout = (torch.randn(n, 4, generator=g, dtype=torch.float64) for n in (9, 6))
    dlse = torch.randn(6, generator=g, dtype=torch.float64)
    p = torch.softmax(s, -1)
    out, lse = p @ v, torch.logsumexp(s, -1)
    for factor, what in ((0.0, "dlse = 0"), (1.0, "dlse is not 0")):
        (expected,) = torch.autograd.grad([out, lse], s, [dout, factor * dlse], retain_graph=True)
        found = score_gradient(p.detach(), v, out.detach(), dout, factor * dlse)
        _require_close(found, expected, what)


# ---- 5: a kernel with a sliding window


def windowed_attention(attention: Callable[..., torch.Tensor]) -> None:
    """attention(q, k, v, window): query i sees the keys from i - window to i. (B, H, S, D), float16."""
    g = _generator()
    for seqlen, window in ((64, 5), (100, 40), (192, 16), (70, 1000), (40, 0)):
        q, k, v = (torch.randn(1, 2, seqlen, 16, generator=g).half() for _ in range(3))
        distance = torch.arange(seqlen)[:, None] - torch.arange(seqlen)[None, :]
        hidden = (distance < 0) | (distance > window)
        scores = q.float() @ k.float().mT * 16**-0.5
        expected = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v.float()
        _require_close(attention(q, k, v, window), expected.half(), f"seqlen={seqlen}, window={window}", 1e-2)
    q, k, v = (torch.randn(1, 1, 192, 16, generator=g).half() for _ in range(3))
    v[:, :, :8] = float("nan")
    tail = attention(q, k, v, 16)[:, :, -32:]
    hint = "seqlen=192, window=16: the last queries must not touch block 0 of the keys, which none of them sees"
    _require(not tail.isnan().any(), hint)


# ---- 6: equal work for every program


def pairs(pairs: Callable[[int], list[tuple[int, ...]]]) -> None:
    """pairs(n_blocks): query blocks of each program, so that all programs of a causal mask work equally long."""
    for n in (1, 2, 3, 4, 7, 8, 31, 64):
        programs = [tuple(blocks) for blocks in pairs(n)]
        visited = sorted(block for blocks in programs for block in blocks)
        _require(visited == list(range(n)), f"n_blocks={n}: each block must be in exactly one program, got {programs}")
        _require(len(programs) == (n + 1) // 2, f"n_blocks={n}: {len(programs)} programs, not {(n + 1) // 2}")
        work = sorted(sum(block + 1 for block in blocks) for blocks in programs)  # tiles of keys: block i has i + 1
        # An odd number leaves one block alone: the middle one does least harm with half the work of the others.
        expected = [(n + 1) // 2] * (n % 2) + [n + 1] * (n // 2)
        _require(work == expected, f"n_blocks={n}: the programs visit {work} tiles of keys, not {expected}")


# ---- 7: stages and parities of a ring


class _Barrier:
    """An mbarrier: a wait for parity p passes once the phase of that parity is complete. A fresh one is in phase 0."""

    def __init__(self) -> None:
        self.phase = 0

    def passes(self, parity: int) -> bool:
        return self.phase % 2 != parity


def ring_wait(ring_wait: Callable[[int, int], tuple[int, int, int]]) -> None:
    """ring_wait(item, stages) -> (stage, parity that the consumer waits for, parity that the producer waits for)."""
    for stages in (1, 2, 3, 4):
        for seed in range(12):
            chance = random.Random(seed)
            eager = {0: 1.0, 1: 0.0}.get(seed, chance.random())  # how often the producer goes first
            full, empty = ([_Barrier() for _ in range(stages)] for _ in range(2))
            content: list[int | None] = [None] * stages
            copied = read = 0
            while read < 25:
                moved = False
                for role in ("copy", "read") if chance.random() < eager else ("read", "copy"):
                    item = copied if role == "copy" else read
                    stage, full_parity, empty_parity = ring_wait(item, stages)
                    where = f"stages={stages}, item={item}"
                    _require(0 <= stage < stages, f"{where}: there is no stage {stage}")
                    _require({full_parity, empty_parity} <= {0, 1}, f"{where}: parities are 0 or 1")
                    if role == "copy" and copied < 25 and empty[stage].passes(empty_parity):
                        _require(content[stage] is None, f"{where} overwrites item {content[stage]}, not read yet")
                        content[stage] = item
                        full[stage].phase += 1
                        copied += 1
                        moved = True
                        break
                    if role == "read" and full[stage].passes(full_parity):
                        _require(content[stage] == item, f"{where}: the stage holds {content[stage]}")
                        content[stage] = None
                        empty[stage].phase += 1
                        read += 1
                        moved = True
                        break
                hint = f"stages={stages}: deadlock; {copied} items were copied and {read} read"
                _require(moved, hint)


# ---- 8: a token joins a paged cache


def append(append: Callable[..., torch.Tensor]) -> None:
    """append(cache, block_table, lengths, new) writes a token for each sequence and returns the new lengths."""
    pages, page_size = 9, 4
    table = torch.tensor([[5, 2, 7], [8, 0, 3]], dtype=torch.int32)
    for start in ([0, 0], [3, 4], [7, 8], [11, 2]):
        cache = torch.full((pages, page_size, 2, 3), float("nan"))
        expected = cache.clone()
        new = torch.randn(2, 2, 3, generator=_generator())
        for b, length in enumerate(start):
            expected[int(table[b, length // page_size]), length % page_size] = new[b]
        lengths = torch.tensor(start, dtype=torch.int32)
        result = append(cache, table, lengths, new)
        same = torch.equal(cache.nan_to_num(99.0), expected.nan_to_num(99.0))
        _require(same, f"lengths {start}: the new tokens are not where the block table says, or others changed")
        hint = f"lengths {start}: the new lengths are {result}"
        _require(isinstance(result, torch.Tensor) and result.tolist() == [n + 1 for n in start], hint)
        _require(result.dtype == torch.int32, "lengths must stay int32")


CHECKS: dict[int, Callable[[Any], None]] = {
    1: softmax_of_rows,
    2: merge,
    3: block_range,
    4: score_gradient,
    5: windowed_attention,
    6: pairs,
    7: ring_wait,
    8: append,
}


def check(chapter: int, function: Callable[..., Any]) -> bool:
    """Say whether `function` solves the exercise of a chapter. Errors that it raises itself are not caught."""
    try:
        CHECKS[chapter](function)
    except NotImplementedError:
        print(f"Exercise {chapter} is open: write the function, then run this cell again.")
    except AssertionError as error:
        print(f"Exercise {chapter} is not solved yet. {error}")
    else:
        print(f"Exercise {chapter} is solved.")
        return True
    return False
