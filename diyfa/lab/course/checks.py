"""The checks of the course's exercises: `check(chapter, your_function)` says whether it is solved.

A check compares with a plain computation, on inputs that show the mistakes that are easy to make.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

SOFTMAX = ("softmax", "log_softmax", "logsumexp", "logaddexp", "scaled_dot_product_attention", "attention_fwd")
PRODUCTS = ("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "baddbmm", "addmm", "einsum", "tensordot")


class _NotSolved(Exception):
    """A check's own refusal. An AssertionError may be the learner's."""


class _Without(TorchFunctionMode):
    """Refuse functions of PyTorch that do what the learner shall write."""

    def __init__(self, names: tuple[str, ...], instead: str) -> None:
        super().__init__()
        self.names, self.instead = names, instead

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "").partition(".")[0]  # an operator's name ends with its overload
        _require(name not in self.names, f"{name} is called; {self.instead}")
        return func(*args, **(kwargs or {}))


def _written(function: Callable[..., Any], without: tuple[str, ...], instead: str) -> Callable[..., Any]:
    """Return `function`; it may neither call what `without` names, nor change the tensors that it gets."""

    def guarded(*inputs: Any) -> Any:
        before = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        with _Without(without, instead):
            result = function(*inputs)
        for x, y in zip(inputs, before, strict=True):
            same = torch.equal(x.nan_to_num(), y.nan_to_num()) if isinstance(x, torch.Tensor) else True
            _require(same, "an input was changed in place; work on a new tensor")
        return result

    return guarded


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _require(condition: Any, hint: str) -> None:
    if not condition:
        raise _NotSolved(hint)


def _shown(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    return repr(result) if len(repr(result)) < 80 else f"a {type(result).__name__}"


def _require_parts(result: Any, names: str) -> tuple[Any, ...]:
    """Return the parts of a result, of which `names` names one after the other."""
    expected = names.count(",") + 1
    fits = isinstance(result, tuple | list) and len(result) == expected
    _require(fits, f"return ({names}); got {_shown(result)}")
    return tuple(result)


def _require_close(result: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = 1e-5) -> None:
    _require(isinstance(result, torch.Tensor), f"{what}: return a tensor; got {_shown(result)}")
    _require(result.shape == expected.shape, f"{what}: shape {tuple(result.shape)}, not {tuple(expected.shape)}")
    wrong = ~torch.isclose(result.double(), expected.double(), tolerance, tolerance)  # NaN is close to nothing
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        raise _NotSolved(
            f"{what}: element {list(place)} is {float(result[place]):.4g}, not {float(expected[place]):.4g}"
        )


# ---- 1: softmax of rows that may be empty


def softmax_of_rows(softmax: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """softmax(x) of the last dimension; a row of -inf gives zeros."""
    softmax = _written(softmax, SOFTMAX, "write it with exp, max and sum")
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
    written = _written(merge, SOFTMAX, "write it with exp and log")

    def merged(*states: torch.Tensor) -> tuple[Any, ...]:
        return _require_parts(written(*states), "out, lse")

    g = _generator()
    for spread, what in ((1.0, "ordinary scores"), (300.0, "scores whose exponentials overflow")):
        s, v = torch.randn(6, 10, generator=g) * spread, torch.randn(10, 4, generator=g)
        states = []
        for part in (slice(0, 3), slice(3, 10), slice(0, 10)):
            states.append((torch.softmax(s[:, part], -1) @ v[part], torch.logsumexp(s[:, part], -1)))
        out, lse = merged(*states[0], *states[1])
        _require_close(out, states[2][0], f"{what}, out", 1e-4)
        _require_close(lse, states[2][1], f"{what}, lse", 1e-4)
    out_a, lse_a = states[2]
    none, empty = torch.zeros_like(out_a), torch.full_like(lse_a, float("-inf"))
    for given, what in (((out_a, lse_a, none, empty), "right"), ((none, empty, out_a, lse_a), "left")):
        out, lse = merged(*given)
        _require_close(out, out_a, f"no keys on the {what} (lse is -inf), out")
        _require_close(lse, lse_a, f"no keys on the {what} (lse is -inf), lse")
    out, lse = merged(none, empty, none, empty)
    _require_close(out, none, "no keys on either side, out")
    _require_close(lse, empty, "no keys on either side (lse must be -inf), lse")
    # Row 0 has no keys at all, row 1 none on the left, row 2 none on the right, the others have keys on both sides.
    lse_a, lse_b = states[0][1].clone(), states[1][1].clone()
    lse_a[:2] = lse_b[0] = lse_b[2] = float("-inf")
    out_a = states[0][0].masked_fill(lse_a[:, None] == float("-inf"), 0.0)
    out_b = states[1][0].masked_fill(lse_b[:, None] == float("-inf"), 0.0)
    lses = torch.stack([lse_a, lse_b])
    weights = torch.softmax(lses, 0).nan_to_num(0.0)[:, :, None]
    out, lse = merged(out_a, lse_a, out_b, lse_b)
    what = "rows without keys beside rows with keys"
    _require_close(out, weights[0] * out_a + weights[1] * out_b, f"{what}, out", 1e-4)
    _require_close(lse, torch.logsumexp(lses, 0), f"{what}, lse", 1e-4)


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
                result = block_range(row0, rows, seqlen_q, seqlen_k, block_n)
                found = _require_parts(result, "n_whole, n_visited")
                _require(
                    found == (n_whole, n_visited),
                    f"row0={row0}, rows={rows}, seqlen_q={seqlen_q}, seqlen_k={seqlen_k}, block_n={block_n}: "
                    f"got {found}, expected {(n_whole, n_visited)}",
                )


# ---- 4: the gradient of the scores, if the loss depends on lse, too


def score_gradient(score_gradient: Callable[..., torch.Tensor]) -> None:
    """score_gradient(p, v, out, dout, dlse) -> dS."""
    score_gradient = _written(score_gradient, SOFTMAX, "write the derivative, without autograd")
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
    attention = _written(attention, SOFTMAX + PRODUCTS, "write the products and the softmax in a Triton kernel")
    g = _generator()
    # Batches, heads, tokens, features.
    for shape, window in (
        ((1, 2, 64, 16), 5),
        ((2, 2, 100, 16), 40),
        ((1, 1, 192, 32), 16),
        ((1, 2, 70, 16), 1000),
        ((3, 1, 40, 16), 0),
    ):
        q, k, v = (torch.randn(*shape, generator=g).half() for _ in range(3))
        distance = torch.arange(shape[2])[:, None] - torch.arange(shape[2])[None, :]
        hidden = (distance < 0) | (distance > window)
        scores = q.float() @ k.float().mT * shape[3] ** -0.5
        expected = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v.float()
        _require_close(attention(q, k, v, window), expected.half(), f"shape={shape}, window={window}", 1e-2)
    # Equal scores: the weights before the division add up to more than 64, the products to more than float16 holds.
    q, k = torch.zeros(1, 1, 192, 16).half(), torch.randn(1, 1, 192, 16, generator=g).half()
    v = torch.full_like(q, 1000.0)
    found = attention(q, k, v, 1000)
    _require_close(found, v, "values of 1000, whose sums overflow in float16: accumulate in float32", 1e-2)
    # Tiles have up to 128 queries or keys: the first and the last 128 queries are more than a tile apart.
    q, k, v = (torch.randn(1, 1, 512, 16, generator=g).half() for _ in range(3))
    for rows, queries, which in ((slice(0, 8), slice(-128, None), "first"), (slice(-8, None), slice(0, 128), "last")):
        nan = v.clone()
        nan[:, :, rows] = float("nan")
        others = "last" if which == "first" else "first"
        hint = f"512 tokens, window=16: the {others} queries must not load the {which} keys, which none of them sees"
        _require(not attention(q, k, nan, 16)[:, :, queries].isnan().any(), hint)


# ---- 6: equal work for every program


def pairs(pairs: Callable[[int], list[tuple[int, ...]]]) -> None:
    """pairs(n_blocks): query blocks of each program, so that all programs of a causal mask work equally long."""
    for n in (1, 2, 3, 4, 7, 8, 31, 64):
        result = pairs(n)
        nested = isinstance(result, Iterable) and all(isinstance(blocks, tuple | list) for blocks in result)
        _require(nested, f"n_blocks={n}: return a list of tuples of blocks; got {_shown(result)}")
        programs = [tuple(blocks) for blocks in result]
        visited = sorted(block for blocks in programs for block in blocks)
        _require(visited == list(range(n)), f"n_blocks={n}: each block must be in exactly one program, got {programs}")
        _require(len(programs) == (n + 1) // 2, f"n_blocks={n}: {len(programs)} programs, not {(n + 1) // 2}")
        work = sorted(sum(block + 1 for block in blocks) for blocks in programs)  # tiles of keys: block i has i + 1
        expected = [n + 1 - n % 2] * ((n + 1) // 2)  # of an odd number the last block is alone, with n tiles
        _require(work == expected, f"n_blocks={n}: the programs visit {work} tiles of keys, not {expected}")


# ---- 7: stages and parities of a ring


class _Barrier:
    """An mbarrier: a wait for parity p passes once the phase of that parity is complete. A fresh one is in phase 0."""

    def __init__(self) -> None:
        self.phase = 0

    def passes(self, parity: int) -> bool:
        return self.phase % 2 != parity


def _held(item: int | None) -> str:
    return "an empty stage: it did not wait for the copy" if item is None else f"item {item}"


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
                    where = f"stages={stages}, item={item}"
                    result = ring_wait(item, stages)
                    stage, full_parity, empty_parity = _require_parts(result, "stage, full_parity, empty_parity")
                    _require(stage in range(stages), f"{where}: there is no stage {stage}")
                    stage = int(stage)
                    got = f"got {full_parity} and {empty_parity}"
                    _require({full_parity, empty_parity} <= {0, 1}, f"{where}: parities are 0 or 1, {got}")
                    if role == "copy" and copied < 25 and empty[stage].passes(empty_parity):
                        _require(content[stage] is None, f"{where} overwrites item {content[stage]}, not read yet")
                        content[stage] = item
                        full[stage].phase += 1
                        copied += 1
                        moved = True
                        break
                    if role == "read" and full[stage].passes(full_parity):
                        _require(content[stage] == item, f"{where}: the consumer reads {_held(content[stage])}")
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
    pages, table = 9, torch.tensor([[5, 2, 7], [8, 0, 3], [1, 6, 4]], dtype=torch.int32)
    for page_size, start in ((4, [0, 0, 0]), (4, [3, 4, 5]), (4, [7, 8, 3]), (4, [11, 2, 0]), (5, [4, 7, 9])):
        where = f"page size {page_size}, lengths {start}"
        cache = torch.full((pages, page_size, 2, 3), float("nan"))
        expected = cache.clone()
        new = torch.randn(3, 2, 3, generator=_generator())
        for b, length in enumerate(start):
            expected[int(table[b, length // page_size]), length % page_size] = new[b]
        lengths = torch.tensor(start, dtype=torch.int32)
        result = append(cache, table, lengths, new)
        written = ~cache.isnan().all(-1).all(-1)
        at = [tuple(place) for place in written.nonzero().tolist()]
        wanted = [tuple(place) for place in (~expected.isnan().all(-1).all(-1)).nonzero().tolist()]
        _require(at == wanted, f"{where}: (page, row) written are {at}, not {wanted}")
        same = torch.equal(cache[written], expected[written])
        _require(same, f"{where}: a sequence got the token of another, or not the whole token")
        after = [n + 1 for n in start]
        correct = isinstance(result, torch.Tensor) and result.tolist() == after
        _require(correct, f"{where}: return the new lengths, a tensor of {after}; got {_shown(result)}")
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
    except _NotSolved as error:
        print(f"Exercise {chapter} is not solved yet. {error}")
    else:
        print(f"Exercise {chapter} is solved.")
        return True
    return False
