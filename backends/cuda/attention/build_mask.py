"""Block masks from terms (`diyfa.mask_terms`): lists and bits (`diyfa.block_lists`), without waiting for the device.

A query sees a key if all comparisons of at least one term are true. `diyfa.mask_terms` has the table of comparisons,
with the numbers and the tensor of each. The kernels get the numbers of all comparisons as one tuple, and their tensors
as another: a comparison's own begin at `numbers[n]` and `tensors[t]`.

1. `_ranges_kernel` finds the smallest and largest id of each block of keys, for each comparison "same".
2. `_rows_kernel`: a program has one block of queries. By the positions of its corners (`_bounds`) each key block is
   empty (no query can see a key), full (every query sees every key), or uncertain. The program evaluates the pairs of
   uncertain blocks (`_sees`) and writes their bits.
3. `_lists_kernel` writes the lists of blocks, in their order, from the codes.

Most time goes to the pairs of uncertain blocks. A mask that hides most blocks by position has few of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton import constexpr_function

from diyfa.backends.cuda.attention.score_functions import SPELLING
from diyfa.backends.cuda.runtime.constants import Constants
from diyfa.backends.cuda.runtime.launch import on_device
from diyfa.backends.cuda.runtime.passes import launch_each
from diyfa.block_lists import list_length, n_blocks
from diyfa.mask_terms import MAX_NUMBERS, MAX_TENSORS, Terms
from diyfa.problem import Launch
from diyfa.score_code import JitSource, value_source

EMPTY, FULL = tl.constexpr(-2), tl.constexpr(-1)  # codes, as in `diyfa.block_lists`
UNCERTAIN = tl.constexpr(0)  # code of a block until its pairs are evaluated
WORD = tl.constexpr(32)
ROWS = tl.constexpr(32)  # queries whose pairs are evaluated at once
NUMBERS = tuple(f"n{i}" for i in range(MAX_NUMBERS))
TENSORS = tuple(f"t{i}_ptr" for i in range(MAX_TENSORS))
RANGES = tuple(f"r{i}_ptr" for i in range(MAX_TENSORS))
STRIDES = tuple(f"stride_t{i}" for i in range(MAX_TENSORS))


@dataclass(frozen=True, eq=False)
class MaskConstants(Constants):
    """Constants of the kernels."""

    terms: str  # names of the comparisons: "," between those of a term, "|" between terms, as in "band,same|before"
    block_q: int  # queries of a block
    block_k: int  # keys of a block
    columns: int  # a power of two: at least as many as a row has blocks, or the longest list
    function: JitSource | None = None  # the program of the comparison "function"


@constexpr_function
def _comparisons(terms):
    """Return, for each term and each of its comparisons, (name, index of its first number, of its first tensor)."""
    # How many numbers each comparison has (`diyfa.mask_terms`). Three of them have a tensor.
    numbers = {"band": 2, "before": 1, "prefix": 0, "same": 0, "tiles": 9, "dense": 4, "function": 0}
    n, t = 0, 0
    comparisons_by_term = []
    for term in terms.split("|"):
        comparisons = []
        for name in term.split(","):
            comparisons.append((name, n, t))
            n += numbers[name]
            t += name in ("prefix", "same", "dense")
        comparisons_by_term.append(tuple(comparisons))
    return tuple(comparisons_by_term)


@constexpr_function
def _count(terms, term=None):
    """Return the number of terms, or of the comparisons of one term."""
    return len(_comparisons(terms) if term is None else _comparisons(terms)[term])


@constexpr_function
def _comparison(terms, term, index):
    """Return one of `_comparisons`."""
    return _comparisons(terms)[term][index]


@triton.jit
def _in_window(centre, other, count, width):
    """Return whether tile `other` is in the window around tile `centre`, on an axis of `count` tiles.

    The window has `width` tiles and is moved to stay on the axis.
    """
    first = tl.minimum(tl.maximum(centre, width // 2), count - 1 - (width - 1) // 2) - width // 2
    return (width >= count) | ((other >= first) & (other < first + width))


@triton.jit
def _sees_tile(tile_i, tile_j, n: tl.constexpr, numbers):
    """Return whether queries of tile number tile_i see keys of tile number tile_j, by a comparison "tiles".

    There are `size` tiles along each of three axes, of which a query sees `width`. The last axis varies fastest.
    """
    size0, size1, size2 = numbers[n + 3], numbers[n + 4], numbers[n + 5]
    width0, width1, width2 = numbers[n + 6], numbers[n + 7], numbers[n + 8]
    seen = _in_window(tile_i % size2, tile_j % size2, size2, width2)
    tile_i, tile_j = tile_i // size2, tile_j // size2
    seen &= _in_window(tile_i % size1, tile_j % size1, size1, width1)
    tile_i, tile_j = tile_i // size1, tile_j // size1
    return seen & _in_window(tile_i % size0, tile_j % size0, size0, width0)


@triton.jit
def _sees(TERM: tl.constexpr, INDEX: tl.constexpr, b, h, i, j, shift, exists_i, exists_j, inputs, c: tl.constexpr):
    """Return whether queries at positions i [ROWS, 1, 1] see keys j [1, words, 32] by comparison INDEX of a term.

    The result broadcasts to [ROWS, words, 32]. Positions count from the first key, and the last query has that of the
    last key: query number r has position r + shift, `shift` = Sk - Sq. `exists_i`, `exists_j`: whether a query or key
    lies inside its sequence. `inputs`: as `_rows_kernel` forms it.
    """
    numbers, tensors, strides, _ = inputs
    COMPARISON: tl.constexpr = _comparison(c.TERMS, TERM, INDEX)
    NAME: tl.constexpr = COMPARISON[0]
    n: tl.constexpr = COMPARISON[1]
    t: tl.constexpr = COMPARISON[2]
    if NAME == "band":
        left, right = numbers[n], numbers[n + 1]
        seen = (j >= i - left) & (j <= i + right)
    elif NAME == "before":
        count = numbers[n]
        seen = j < count
    elif NAME == "prefix":
        seen = j < tl.load(tensors[t] + b)
    elif NAME == "same":
        ids = tensors[t] + b * strides[t]
        seen = tl.load(ids + i, mask=exists_i, other=0) == tl.load(ids + j, mask=exists_j, other=0)
    elif NAME == "tiles":
        # Text follows the tokens of the grid. If there is any, it sees all and is seen by all.
        tile_tokens, grid_tokens, has_text = numbers[n], numbers[n + 1], numbers[n + 2]
        is_text = (i >= grid_tokens) | (j >= grid_tokens)
        in_grid = (is_text == 0) & _sees_tile(i // tile_tokens, j // tile_tokens, n, numbers)
        seen = (is_text & (has_text != 0)) | in_grid
    elif NAME == "function":
        # The first argument of the program is a score, which a mask function does not use.
        seen = c.FUNCTION(0, b, h, i, j, (exists_i & exists_j, exists_i, exists_j), tensors)
    else:  # "dense"
        stride_b, stride_h, stride_m, stride_n = numbers[n], numbers[n + 1], numbers[n + 2], numbers[n + 3]
        head = tensors[t] + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
        pairs = head + (i - shift).to(tl.int64) * stride_m + j.to(tl.int64) * stride_n
        seen = tl.load(pairs, mask=exists_i & exists_j, other=0) != 0
    return seen


@triton.jit
def _bounds(TERM: tl.constexpr, INDEX: tl.constexpr, b, rows, keys, block_j, inputs, c: tl.constexpr):
    """Return (some, every) of key blocks `block_j` by comparison INDEX of a term, each [COLUMNS].

    `some` is false only if no query sees a key of the block. `every` is true only if every query sees every key.
    `rows`: (first, last) position of the queries. `keys`: (first, last key of each block, number of key blocks).
    """
    numbers, tensors, strides, ranges = inputs
    COMPARISON: tl.constexpr = _comparison(c.TERMS, TERM, INDEX)
    NAME: tl.constexpr = COMPARISON[0]
    n: tl.constexpr = COMPARISON[1]
    t: tl.constexpr = COMPARISON[2]
    i0, i1 = rows
    j0, j1, nk = keys
    if NAME == "band":
        left, right = numbers[n], numbers[n + 1]
        some = (j1 >= i0 - left) & (j0 <= i1 + right)
        every = (j0 >= i1 - left) & (j1 <= i0 + right)
    elif NAME == "before":
        count = numbers[n]
        some, every = j0 < count, j1 < count
    elif NAME == "prefix":
        length = tl.load(tensors[t] + b)
        some, every = j0 < length, j1 < length
    elif NAME == "same":
        offs = i0 + tl.arange(0, c.BLOCK_Q)
        ids = tensors[t] + b * strides[t]
        first = tl.load(ids + i0)
        query_ids = tl.load(ids + offs, mask=offs <= i1, other=first)
        query_min, query_max = tl.min(query_ids, 0), tl.max(query_ids, 0)
        range_ptr = ranges[t] + (tl.where(strides[t] == 0, 0, b) * nk + block_j) * 2
        key_min = tl.load(range_ptr, mask=block_j < nk, other=0)
        key_max = tl.load(range_ptr + 1, mask=block_j < nk, other=0)
        some = (query_max >= key_min) & (query_min <= key_max)
        every = (query_min == query_max) & (key_min == key_max) & (query_min == key_min)
    elif NAME == "tiles":
        tile_tokens, grid_tokens = numbers[n], numbers[n + 1]
        has_text = numbers[n + 2] != 0
        all_text = (i0 >= grid_tokens) | (j0 >= grid_tokens)  # each pair has a query or a key in the text
        # Only if the queries lie in one tile, and the keys in one, the corner at (i0, j0) decides on the block.
        one_tile = (i0 // tile_tokens == i1 // tile_tokens) & (j0 // tile_tokens == j1 // tile_tokens)
        one_tile = one_tile & (i1 < grid_tokens) & (j1 < grid_tokens)
        seen = _sees_tile(i0 // tile_tokens, j0 // tile_tokens, n, numbers)
        some = tl.where(all_text, has_text, (one_tile == 0) | seen)
        every = tl.where(all_text, has_text, one_tile & seen)
    else:  # "dense" and "function": positions say nothing, so each block is uncertain
        some, every = j0 >= 0, j0 < 0
    return some, every


@triton.jit
def _ranges_kernel(t_ptr, stride_t, r_ptr, seqlen_k, c: tl.constexpr):
    """Write the smallest and largest id of each block of keys to r (B or 1, nk, 2). `t`: ids (B or 1, Sk)."""
    nk = tl.cdiv(seqlen_k, c.BLOCK_K)
    block, b = tl.program_id(0) % nk, tl.program_id(0) // nk
    offs = block * c.BLOCK_K + tl.arange(0, c.BLOCK_K)
    ids = t_ptr + b * stride_t
    first = tl.load(ids + block * c.BLOCK_K)
    block_ids = tl.load(ids + offs, mask=offs < seqlen_k, other=first)
    range_ptr = r_ptr + (b * nk + block) * 2
    tl.store(range_ptr, tl.min(block_ids, 0))
    tl.store(range_ptr + 1, tl.max(block_ids, 0))


@triton.jit(do_not_specialize=("heads", "seqlen_q", "seqlen_k", "length", *NUMBERS, *STRIDES))
def _rows_kernel(
    t0_ptr, t1_ptr, t2_ptr, t3_ptr,  # tensors of the comparisons
    r0_ptr, r1_ptr, r2_ptr, r3_ptr,  # for each of them, what `_ranges_kernel` wrote
    blocks_ptr, bits_ptr,  # `mask_blocks` and `mask_bits` of `diyfa.block_lists`
    stride_t0, stride_t1, stride_t2, stride_t3,  # from one sample's ids to the next; 0: all samples have the same
    n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11,  # numbers of the comparisons
    heads, seqlen_q, seqlen_k,
    length,  # `list_length`: entries of `mask_blocks` for one head
    c: tl.constexpr,
):  # fmt: skip
    """Write codes and bits of one block of queries of a head.

    1. Decide each key block by its corners: EMPTY, FULL or UNCERTAIN (`_bounds`).
    2. Write these codes, and the numbers of uncertain blocks to where the list of the row will be.
    3. Evaluate all pairs of each uncertain block (`_sees`), write its bits, and replace its code: EMPTY, FULL, or the
       index of its bits, `program_id * nk + block`.
    """
    inputs = (
        (n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11),
        (t0_ptr, t1_ptr, t2_ptr, t3_ptr),
        (stride_t0, stride_t1, stride_t2, stride_t3),
        (r0_ptr, r1_ptr, r2_ptr, r3_ptr),
    )
    nq, nk = tl.cdiv(seqlen_q, c.BLOCK_Q), tl.cdiv(seqlen_k, c.BLOCK_K)
    block_i = tl.program_id(0) % nq
    head = tl.program_id(0) // nq
    b, h = head // heads, head % heads
    shift = seqlen_k - seqlen_q
    n_rows = tl.minimum(seqlen_q - block_i * c.BLOCK_Q, c.BLOCK_Q)
    i0 = block_i * c.BLOCK_Q + shift
    offs = tl.arange(0, c.COLUMNS)
    exists = offs < nk
    j0 = offs * c.BLOCK_K
    j1 = tl.minimum(j0 + c.BLOCK_K, seqlen_k) - 1
    some, every = offs < 0, offs < 0  # false: no term yet
    for term in tl.static_range(_count(c.TERMS)):
        term_some, term_every = offs >= 0, offs >= 0  # true: no comparison yet
        for index in tl.static_range(_count(c.TERMS, term)):
            some_of_one, every_of_one = _bounds(term, index, b, (i0, i0 + n_rows - 1), (j0, j1, nk), offs, inputs, c)
            term_some, term_every = term_some & some_of_one, term_every & every_of_one
        some, every = some | term_some, every | term_every
    # A block that extends beyond the last key is not full: its bits hide what lies there.
    codes = tl.where(every & (j0 + c.BLOCK_K <= seqlen_k), FULL, tl.where(some, UNCERTAIN, EMPTY))

    lists = blocks_ptr + head.to(tl.int64) * length
    codes_ptr = lists + block_i * nk
    list_ptr = lists + nq * nk + block_i * (2 + nk)
    is_uncertain = ((codes == UNCERTAIN) & exists).to(tl.int32)
    tl.store(codes_ptr + offs, codes, mask=exists)
    tl.store(list_ptr + tl.cumsum(is_uncertain, 0) - 1, offs, mask=is_uncertain != 0)
    tl.debug_barrier()  # the loop reads numbers of uncertain blocks that other threads have written
    words = tl.arange(0, c.BLOCK_K // WORD)
    bits = tl.arange(0, WORD)[None, None, :]
    for k in range(tl.sum(is_uncertain, 0)):
        block_j = tl.load(list_ptr + k)
        slot = tl.program_id(0) * nk + block_j  # index of the block's bits
        j = block_j * c.BLOCK_K + words[None, :, None] * WORD + bits
        exists_j = j < seqlen_k
        n_seen = 0  # pairs of the block in which the query sees the key
        for row0 in range(0, c.BLOCK_Q, ROWS):  # ROWS at a time: all pairs of a block do not fit the registers
            rows = row0 + tl.arange(0, ROWS)
            exists_i = (rows < n_rows)[:, None, None]
            i = i0 + rows[:, None, None]
            inside = exists_i & exists_j
            seen = inside & (i < i0)  # false, [ROWS, BLOCK_K / 32, 32]
            for term in tl.static_range(_count(c.TERMS)):
                term_seen = inside
                for index in tl.static_range(_count(c.TERMS, term)):
                    term_seen &= _sees(term, index, b, h, i, j, shift, exists_i, exists_j, inputs, c)
                seen |= term_seen
            word = tl.sum(seen.to(tl.int32) << bits, 2)  # [ROWS, BLOCK_K / 32]
            n_seen += tl.sum(tl.sum(tl.sum(seen.to(tl.int32), 2), 1), 0)
            block_bits = bits_ptr + slot.to(tl.int64) * (c.BLOCK_Q * c.BLOCK_K // WORD)
            tl.store(block_bits + rows[:, None] * (c.BLOCK_K // WORD) + words[None, :], word)
        tl.store(codes_ptr + block_j, tl.where(n_seen == 0, EMPTY, tl.where(n_seen == n_rows * c.BLOCK_K, FULL, slot)))


@triton.jit(do_not_specialize=("seqlen_q", "seqlen_k", "length"))
def _lists_kernel(blocks_ptr, seqlen_q, seqlen_k, length, c: tl.constexpr):
    """Write the list of one block of queries, or of one block of keys, from codes.

    A list has the number of full blocks, the number of full and partial blocks, then all blocks in this order: full,
    partial, empty.
    """
    nq, nk = tl.cdiv(seqlen_q, c.BLOCK_Q), tl.cdiv(seqlen_k, c.BLOCK_K)
    index = tl.program_id(0) % (nq + nk)  # of the list: those of blocks of queries come first
    lists = blocks_ptr + (tl.program_id(0) // (nq + nk)).to(tl.int64) * length
    is_of_queries = index < nq
    column = index - nq
    count = tl.where(is_of_queries, nk, nq)
    first, stride = tl.where(is_of_queries, index * nk, column), tl.where(is_of_queries, 1, nk)
    start = nq * nk + tl.where(is_of_queries, index * (2 + nk), nq * (2 + nk) + column * (2 + nq))
    offs = tl.arange(0, c.COLUMNS)
    exists = offs < count
    codes = tl.load(lists + first + offs * stride, mask=exists, other=EMPTY)
    is_full = ((codes == FULL) & exists).to(tl.int32)
    is_partial = ((codes >= 0) & exists).to(tl.int32)
    is_empty = ((codes == EMPTY) & exists).to(tl.int32)
    n_full = tl.sum(is_full, 0)
    n_visible = n_full + tl.sum(is_partial, 0)
    # Position of each block in the list, from 1 on: the second count is in front of it.
    position = tl.where(is_full != 0, tl.cumsum(is_full, 0), 0)
    position = tl.where(is_partial != 0, n_full + tl.cumsum(is_partial, 0), position)
    position = tl.where(is_empty != 0, n_visible + tl.cumsum(is_empty, 0), position)
    tl.store(lists + start, n_full)
    tl.store(lists + start + 1, n_visible)
    tl.store(lists + start + 1 + position, offs, mask=exists)


def _readable(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of comparison `name` with a dtype and strides that the kernel reads: itself, a view or a copy."""
    if name == "dense":
        return x.view(torch.int8)
    is_integer = x.dtype in (torch.int32, torch.int64)
    return (x if is_integer or name == "function" else x.to(torch.int32)).contiguous()


def columns_of(n: int) -> int:
    """Return the COLUMNS of a program that holds n blocks."""
    return max(16, 1 << (n - 1).bit_length())


def lists_launch(blocks: torch.Tensor, heads: int, sizes: tuple[int, int], block: tuple[int, int]) -> Launch:
    """Return the launch that writes all lists of all `heads`, from codes."""
    nq, nk = n_blocks(*sizes, block)
    arguments = {"blocks_ptr": blocks, "seqlen_q": sizes[0], "seqlen_k": sizes[1], "length": list_length(nq, nk)}
    c = MaskConstants("", *block, columns_of(max(nq, nk)))
    return Launch(_lists_kernel, heads * (nq + nk), arguments, {"c": c}, {"num_warps": 4})


def make_launches(
    terms: Terms, shape: tuple[int, int, int, int], block: tuple[int, int], blocks: torch.Tensor, bits: torch.Tensor
) -> list[Launch]:
    """Return the launches that fill `blocks` and `bits` of a mask of `shape`."""
    batch, heads, seqlen_q, seqlen_k = shape
    nq, nk = n_blocks(seqlen_q, seqlen_k, block)
    comparisons = [comparison for term in terms for comparison in term]
    sources = [value_source(comparison.source, SPELLING) for comparison in comparisons if comparison.source]
    names = "|".join(",".join(comparison.name for comparison in term) for term in terms)
    numbers = [number for comparison in comparisons for number in comparison.numbers]
    tensors = [(comparison.name, x) for comparison in comparisons for x in comparison.tensors]
    c = MaskConstants(names, *block, columns_of(nk), *sources)
    arguments: dict[str, Any] = dict.fromkeys((*TENSORS, *RANGES)) | dict.fromkeys((*STRIDES, *NUMBERS), 0)
    arguments |= {"blocks_ptr": blocks, "bits_ptr": bits, **dict(zip(NUMBERS, numbers, strict=False))}
    arguments |= {"heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "length": list_length(nq, nk)}
    launches = []
    for i, (name, x) in enumerate(tensors):
        ids = _readable(name, x)
        stride = ids.stride(0) if name == "same" and ids.dim() == 2 else 0
        arguments |= {TENSORS[i]: ids, STRIDES[i]: stride}
        if name == "same":
            samples = batch if stride else 1
            ranges = arguments[RANGES[i]] = ids.new_empty((samples, nk, 2))
            find = {"t_ptr": ids, "stride_t": stride, "r_ptr": ranges, "seqlen_k": seqlen_k}
            launches.append(Launch(_ranges_kernel, samples * nk, find, {"c": c}, {"num_warps": 1}))
    launches.append(Launch(_rows_kernel, batch * heads * nq, arguments, {"c": c}, {"num_warps": 8}))
    return [*launches, lists_launch(blocks, batch * heads, (seqlen_q, seqlen_k), block)]


def build_mask(
    terms: Terms, shape: tuple[int, int, int, int], block: tuple[int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `mask_blocks` and `mask_bits` of the mask of `terms`, for scores of `shape` (B, H, Sq, Sk)."""
    batch, heads, seqlen_q, seqlen_k = shape
    nq, nk = n_blocks(seqlen_q, seqlen_k, block)
    blocks = torch.empty(batch, heads, list_length(nq, nk), dtype=torch.int32, device=device)
    bits = torch.empty(batch * heads * nq * nk, block[0], block[1] // 32, dtype=torch.int32, device=device)
    with on_device(blocks):
        launch_each(make_launches(terms, shape, block, blocks, bits))
    return blocks, bits
