"""Block masks from terms (`diyfa.mask_terms`): lists and bits (`diyfa.block_lists`), without waiting for the device.

1. `_ranges_kernel` finds the smallest and largest number of each block of ids, where a comparison needs them.
2. `_rows_kernel`: a program has one block of queries. It decides each key block by the positions of its corners: no
   query can see a key of it, or each sees each, or neither is certain. It evaluates the pairs of the uncertain blocks
   and writes their bits.
3. `_lists_kernel` sorts the lists.

A mask that hides most blocks by position has few uncertain blocks in a row, and that is where the time goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton import constexpr_function

from diyfa.backends.cuda.attention.score_functions import value_source
from diyfa.backends.cuda.runtime.constants import Constants
from diyfa.backends.cuda.runtime.jit_source import JitSource
from diyfa.backends.cuda.runtime.launch import on_device
from diyfa.backends.cuda.runtime.passes import launch_each
from diyfa.block_lists import list_length, n_blocks
from diyfa.mask_terms import MAX_NUMBERS, MAX_TENSORS, Terms
from diyfa.problem import Launch

EMPTY, FULL = tl.constexpr(-2), tl.constexpr(-1)  # codes, as in `diyfa.block_lists`
UNCERTAIN = tl.constexpr(0)
WORD = tl.constexpr(32)
ROWS = tl.constexpr(32)  # queries whose pairs are evaluated at once
NUMBERS = tuple(f"n{i}" for i in range(MAX_NUMBERS))
TENSORS = tuple(f"t{i}_ptr" for i in range(MAX_TENSORS))
RANGES = tuple(f"r{i}_ptr" for i in range(MAX_TENSORS))
STRIDES = tuple(f"stride_t{i}" for i in range(MAX_TENSORS))


@dataclass(frozen=True, eq=False)
class MaskConstants(Constants):
    """Constants of the kernels."""

    code: str  # of the terms: "band,same|before"
    block_q: int
    block_k: int
    columns: int  # a power of two: blocks of a row, or of the longest list
    function: JitSource | None = None  # of the comparison "function"


@constexpr_function
def _parts(code):
    """Return for each term (name, index of its first number, of its first tensor) of each comparison."""
    numbers = {"band": 2, "before": 1, "prefix": 0, "same": 0, "tiles": 9, "dense": 4, "function": 0}
    n, t = 0, 0
    terms = []
    for term in code.split("|"):
        found = []
        for name in term.split(","):
            found.append((name, n, t))
            n += numbers[name]
            t += name in ("prefix", "same", "dense")
        terms.append(tuple(found))
    return tuple(terms)


@constexpr_function
def _count(code, term):
    """Return the number of terms, or of comparisons of a term."""
    return len(_parts(code)) if term < 0 else len(_parts(code)[term])


@constexpr_function
def _name(code, term, index):
    return _parts(code)[term][index][0]


@constexpr_function
def _first_number(code, term, index):
    return _parts(code)[term][index][1]


@constexpr_function
def _first_tensor(code, term, index):
    return _parts(code)[term][index][2]


@triton.jit
def _in_window(centre, other, count, width):
    """Return whether tile `other` is in the window of `width` around tile `centre`, of `count` tiles along an axis."""
    first = tl.minimum(tl.maximum(centre, width // 2), count - 1 - (width - 1) // 2) - width // 2
    return (width >= count) | ((other >= first) & (other < first + width))


@triton.jit
def _sees_tile(tile_i, tile_j, n: tl.constexpr, numbers):
    """Return whether queries of one tile see keys of another, by their numbers."""
    seen = _in_window(tile_i % numbers[n + 5], tile_j % numbers[n + 5], numbers[n + 5], numbers[n + 8])
    tile_i, tile_j = tile_i // numbers[n + 5], tile_j // numbers[n + 5]
    seen &= _in_window(tile_i % numbers[n + 4], tile_j % numbers[n + 4], numbers[n + 4], numbers[n + 7])
    tile_i, tile_j = tile_i // numbers[n + 4], tile_j // numbers[n + 4]
    return seen & _in_window(tile_i % numbers[n + 3], tile_j % numbers[n + 3], numbers[n + 3], numbers[n + 6])


@triton.jit
def _sees(TERM: tl.constexpr, PART: tl.constexpr, b, h, i, j, shift, exists_i, exists_j, inputs, c: tl.constexpr):
    """Return whether queries at positions i [ROWS, 1, 1] see keys j [1, words, 32] by one comparison.

    The result broadcasts to [ROWS, words, 32]. `exists_i`, `exists_j`: queries and keys that there are.
    """
    numbers, tensors, strides, _ = inputs
    NAME: tl.constexpr = _name(c.CODE, TERM, PART)
    n: tl.constexpr = _first_number(c.CODE, TERM, PART)
    t: tl.constexpr = _first_tensor(c.CODE, TERM, PART)
    if NAME == "band":
        seen = (j >= i - numbers[n]) & (j <= i + numbers[n + 1])
    elif NAME == "before":
        seen = j < numbers[n]
    elif NAME == "prefix":
        seen = j < tl.load(tensors[t] + b)
    elif NAME == "same":
        ids = tensors[t] + b * strides[t]
        seen = tl.load(ids + i, mask=exists_i, other=0) == tl.load(ids + j, mask=exists_j, other=0)
    elif NAME == "tiles":
        volume, tokens = numbers[n], numbers[n + 1]
        is_text = (i >= tokens) | (j >= tokens)
        seen = (is_text & (numbers[n + 2] != 0)) | ((is_text == 0) & _sees_tile(i // volume, j // volume, n, numbers))
    elif NAME == "function":
        seen = c.FUNCTION(0, b, h, i, j, (exists_i & exists_j, exists_i, exists_j), tensors)
    else:
        start = tensors[t] + b.to(tl.int64) * numbers[n] + h.to(tl.int64) * numbers[n + 1]
        at = start + (i - shift).to(tl.int64) * numbers[n + 2] + j.to(tl.int64) * numbers[n + 3]
        seen = tl.load(at, mask=exists_i & exists_j, other=0) != 0
    return seen


@triton.jit
def _bounds(TERM: tl.constexpr, PART: tl.constexpr, b, rows, keys, block_j, inputs, c: tl.constexpr):
    """Return (whether some query may see some key, whether each surely sees each) of key blocks, by one comparison.

    `rows`: (first, last) position of the queries. `keys`: (first, last) of each key block.
    """
    numbers, tensors, strides, ranges = inputs
    NAME: tl.constexpr = _name(c.CODE, TERM, PART)
    n: tl.constexpr = _first_number(c.CODE, TERM, PART)
    t: tl.constexpr = _first_tensor(c.CODE, TERM, PART)
    i0, i1 = rows
    j0, j1, nk = keys
    if NAME == "band":
        some = (j1 >= i0 - numbers[n]) & (j0 <= i1 + numbers[n + 1])
        every = (j0 >= i1 - numbers[n]) & (j1 <= i0 + numbers[n + 1])
    elif NAME == "before":
        some, every = j0 < numbers[n], j1 < numbers[n]
    elif NAME == "prefix":
        length = tl.load(tensors[t] + b)
        some, every = j0 < length, j1 < length
    elif NAME == "same":
        offs = i0 + tl.arange(0, c.BLOCK_Q)
        ids = tensors[t] + b * strides[t]
        first = tl.load(ids + i0)
        own = tl.load(ids + offs, mask=offs <= i1, other=first)
        least, most = tl.min(own, 0), tl.max(own, 0)
        at = ranges[t] + (tl.where(strides[t] == 0, 0, b) * nk + block_j) * 2
        key_least = tl.load(at, mask=block_j < nk, other=0)
        key_most = tl.load(at + 1, mask=block_j < nk, other=0)
        some = (most >= key_least) & (least <= key_most)
        every = (least == most) & (key_least == key_most) & (least == key_least)
    elif NAME == "tiles":
        volume, tokens = numbers[n], numbers[n + 1]
        text = numbers[n + 2] != 0
        all_text = (i0 >= tokens) | (j0 >= tokens)
        one_tile = (i0 // volume == i1 // volume) & (j0 // volume == j1 // volume) & (i1 < tokens) & (j1 < tokens)
        seen = _sees_tile(i0 // volume, j0 // volume, n, numbers)
        some = tl.where(all_text, text, (one_tile == 0) | seen)
        every = tl.where(all_text, text, one_tile & seen)
    else:
        some, every = j0 >= 0, j0 < 0
    return some, every


@triton.jit
def _ranges_kernel(t_ptr, stride_t, r_ptr, seqlen_k, c: tl.constexpr):
    """Write the smallest and largest number of each block of keys."""
    nk = tl.cdiv(seqlen_k, c.BLOCK_K)
    block, b = tl.program_id(0) % nk, tl.program_id(0) // nk
    offs = block * c.BLOCK_K + tl.arange(0, c.BLOCK_K)
    ids = t_ptr + b * stride_t
    first = tl.load(ids + block * c.BLOCK_K)
    numbers = tl.load(ids + offs, mask=offs < seqlen_k, other=first)
    at = r_ptr + (b * nk + block) * 2
    tl.store(at, tl.min(numbers, 0))
    tl.store(at + 1, tl.max(numbers, 0))


@triton.jit(do_not_specialize=("heads", "seqlen_q", "seqlen_k", "length", *NUMBERS, *STRIDES))
def _rows_kernel(
    t0_ptr, t1_ptr, t2_ptr, t3_ptr, r0_ptr, r1_ptr, r2_ptr, r3_ptr,
    blocks_ptr, bits_ptr,
    stride_t0, stride_t1, stride_t2, stride_t3,
    n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11,
    heads, seqlen_q, seqlen_k,
    length,  # numbers of the lists of one head
    c: tl.constexpr,
):  # fmt: skip
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
    some, every = offs < 0, offs < 0
    for term in tl.static_range(_count(c.CODE, -1)):
        term_some, term_every = offs >= 0, offs >= 0
        for part in tl.static_range(_count(c.CODE, term)):
            may, must = _bounds(term, part, b, (i0, i0 + n_rows - 1), (j0, j1, nk), offs, inputs, c)
            term_some, term_every = term_some & may, term_every & must
        some, every = some | term_some, every | term_every
    codes = tl.where(every & (j0 + c.BLOCK_K <= seqlen_k), FULL, tl.where(some, UNCERTAIN, EMPTY))

    lists = blocks_ptr + head.to(tl.int64) * length
    codes_ptr = lists + block_i * nk
    list_ptr = lists + nq * nk + block_i * (2 + nk)
    is_uncertain = ((codes == UNCERTAIN) & exists).to(tl.int32)
    tl.store(codes_ptr + offs, codes, mask=exists)
    tl.store(list_ptr + tl.cumsum(is_uncertain, 0) - 1, offs, mask=is_uncertain != 0)
    tl.debug_barrier()  # all threads see the uncertain blocks; their list stands where that of the row will be
    words = tl.arange(0, c.BLOCK_K // WORD)
    bits = tl.arange(0, WORD)[None, None, :]
    for k in range(tl.sum(is_uncertain, 0)):
        block_j = tl.load(list_ptr + k)
        slot = tl.program_id(0) * nk + block_j
        j = block_j * c.BLOCK_K + words[None, :, None] * WORD + bits
        exists_j = j < seqlen_k
        total = 0
        for row0 in range(0, c.BLOCK_Q, ROWS):  # some rows at a time: pairs take registers
            rows = row0 + tl.arange(0, ROWS)
            exists_i = (rows < n_rows)[:, None, None]
            i = i0 + rows[:, None, None]
            inside = exists_i & exists_j
            seen = inside & (i < i0)
            for term in tl.static_range(_count(c.CODE, -1)):
                term_seen = inside
                for part in tl.static_range(_count(c.CODE, term)):
                    term_seen &= _sees(term, part, b, h, i, j, shift, exists_i, exists_j, inputs, c)
                seen |= term_seen
            word = tl.sum(seen.to(tl.int32) << bits, 2)  # [ROWS, BLOCK_K / 32]
            total += tl.sum(tl.sum(tl.sum(seen.to(tl.int32), 2), 1), 0)
            at = bits_ptr + slot.to(tl.int64) * (c.BLOCK_Q * c.BLOCK_K // WORD)
            tl.store(at + rows[:, None] * (c.BLOCK_K // WORD) + words[None, :], word)
        tl.store(codes_ptr + block_j, tl.where(total == 0, EMPTY, tl.where(total == n_rows * c.BLOCK_K, FULL, slot)))


@triton.jit(do_not_specialize=("seqlen_q", "seqlen_k", "length"))
def _lists_kernel(blocks_ptr, seqlen_q, seqlen_k, length, c: tl.constexpr):
    """Write the list of a block of queries or of a block of keys, from codes.

    A list has the numbers of full blocks and of visible ones, then all blocks: full, partial, and empty ones.
    """
    nq, nk = tl.cdiv(seqlen_q, c.BLOCK_Q), tl.cdiv(seqlen_k, c.BLOCK_K)
    line = tl.program_id(0) % (nq + nk)  # queries first
    lists = blocks_ptr + (tl.program_id(0) // (nq + nk)).to(tl.int64) * length
    is_query_line = line < nq
    column = line - nq
    count = tl.where(is_query_line, nk, nq)
    first, stride = tl.where(is_query_line, line * nk, column), tl.where(is_query_line, 1, nk)
    start = nq * nk + tl.where(is_query_line, line * (2 + nk), nq * (2 + nk) + column * (2 + nq))
    offs = tl.arange(0, c.COLUMNS)
    exists = offs < count
    codes = tl.load(lists + first + offs * stride, mask=exists, other=EMPTY)
    is_full = ((codes == FULL) & exists).to(tl.int32)
    is_partial = ((codes >= 0) & exists).to(tl.int32)
    is_empty = ((codes == EMPTY) & exists).to(tl.int32)
    n_full = tl.sum(is_full, 0)
    n_visible = n_full + tl.sum(is_partial, 0)
    place = tl.where(is_full != 0, tl.cumsum(is_full, 0), 0)
    place = tl.where(is_partial != 0, n_full + tl.cumsum(is_partial, 0), place)
    place = tl.where(is_empty != 0, n_visible + tl.cumsum(is_empty, 0), place)
    tl.store(lists + start, n_full)
    tl.store(lists + start + 1, n_visible)
    tl.store(lists + start + 1 + place, offs, mask=exists)


def _readable(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of comparison `name` in a type and with strides that the kernel reads."""
    if name == "dense":
        return x.view(torch.int8)
    is_integer = x.dtype in (torch.int32, torch.int64)
    return (x if is_integer or name == "function" else x.to(torch.int32)).contiguous()


def columns_of(n: int) -> int:
    """Return the width of a tile that holds n blocks."""
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
    parts = [part for term in terms for part in term]
    sources = [value_source(part.source) for part in parts if part.source]
    code = "|".join(",".join(part.name for part in term) for term in terms)
    numbers = [number for part in parts for number in part.numbers]
    tensors = [(part.name, x) for part in parts for x in part.tensors]
    c = MaskConstants(code, *block, columns_of(nk), *sources)
    arguments: dict[str, Any] = {
        **dict.fromkeys((*TENSORS, *RANGES)), **dict.fromkeys((*STRIDES, *NUMBERS), 0), "blocks_ptr": blocks,
        "bits_ptr": bits, **dict(zip(NUMBERS, numbers, strict=False)), "heads": heads, "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k, "length": list_length(nq, nk),
    }  # fmt: skip
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
