"""Block masks: any mask as lists of full and partial blocks, and masks by name.

    from diyfa import block_mask, masks
    mask = block_mask(masks.document(ids), B=1, H=1, Sq=4096, Sk=4096)
    out = diyfa.flash_attention(q, k, v, mask=mask)

A mask function takes integer tensors b, h, i, j that broadcast to (B, H, Sq, Sk), and returns a boolean tensor, True
where the query sees the key. `i` is the query's position among the keys: the last query is at the last key, as with
`causal=True`, so query row r is at position r + Sk - Sq. The functions of this file return mask functions, and
`all_of` and `any_of` combine them. Both passes skip blocks in which no query sees a key.

A mask is made on its device, without waiting for it: by kernels of the device's backend, if it has them and the
function carries terms (`diyfa.mask_terms`), else by PyTorch's operators. Make a mask once and use it in all layers and
steps.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from diyfa import block_lists, registry
from diyfa.block_lists import BLOCK_SIZES, EMPTY, FULL, codes_of, n_blocks
from diyfa.features import CAPTURED_DTYPES
from diyfa.mask_terms import UNBOUNDED, Comparison, Terms, combined, fits, terms_of, with_terms
from diyfa.score_functions import is_jit_function, mask_program
from diyfa.score_programs import captured_tensors, function_name, mask_dtype, run_mask

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
CHUNK = 1 << 24  # pairs of query and key that PyTorch's operators compute at a time


class BlockMask:
    """A mask of the scores (B, H, Sq, Sk): the kind of each block (empty, full, partial) and the bits of partial ones.

    Made by `block_mask`, `BlockMask.from_dense` or `BlockMask.from_flex`. Not to be changed once it is made.

    Attributes:
        shape: (B, H, Sq, Sk) of the scores that it is for; B or H is 1 if all samples or heads have one mask.
        block_size: (queries, keys) of a block, 64 or 128 each.
        blocks, bits: the tensors that kernels read (`diyfa.block_lists`).
    """

    __slots__ = ("bits", "blocks", "shape")

    def __init__(self, shape: tuple[int, int, int, int], blocks: torch.Tensor, bits: torch.Tensor) -> None:
        self.shape, self.blocks, self.bits = shape, blocks, bits

    @property
    def block_size(self) -> tuple[int, int]:
        return self.bits.shape[1], self.bits.shape[2] * block_lists.WORD

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    def kinds(self) -> torch.Tensor:
        """Return the kind of each block, (B, H, query blocks, key blocks) int32: 0 empty, 1 partial, 2 full."""
        codes = self._codes()
        return ((codes != EMPTY).int() + (codes == FULL)).to(torch.int32)

    def density(self) -> float:
        """Return the share of the scores that lie in blocks that are not empty. This waits for the device."""
        batch, heads, seqlen_q, seqlen_k = self.shape
        total = batch * heads * seqlen_q * seqlen_k
        area = block_lists.visible_area(self.blocks, self.block_size, seqlen_q, seqlen_k)
        return float(area.sum()) / total if total else 0.0

    def to_dense(self) -> torch.Tensor:
        """Return the mask as booleans (B, H, Sq, Sk), True where a query sees a key."""
        sizes = seqlen_q, seqlen_k = self.shape[2:]
        return block_lists.visible_pairs(self.blocks, self.bits, sizes, slice(0, seqlen_q), slice(0, seqlen_k))

    def to(self, device: torch.device | str) -> BlockMask:
        """Return the mask on `device`."""
        return BlockMask(self.shape, self.blocks.to(device), self.bits.to(device))

    def compact(self) -> BlockMask:
        """Return an equal mask that keeps bits of its partial blocks only.

        A new mask has room for the bits of all blocks, one bit for each score, because their number is not known
        without waiting for the device. This waits for it once.
        """
        codes = self._codes()
        used, indices = codes[codes >= 0].unique(return_inverse=True)
        compacted = codes.clone()
        compacted[codes >= 0] = indices.to(torch.int32)
        return BlockMask(self.shape, block_lists.make_lists(compacted), self.bits[used.long()])

    @staticmethod
    def from_dense(keep: torch.Tensor, block_size: int | tuple[int, int] = 128) -> BlockMask:
        """Return the mask of booleans (Sq, Sk), (H, Sq, Sk) or (B, H, Sq, Sk), True where a query sees a key.

        B or H may be 1: all samples or heads then have one mask.
        """
        if not isinstance(keep, torch.Tensor) or keep.dtype != torch.bool:
            got = f"{keep.dtype}" if isinstance(keep, torch.Tensor) else type(keep).__name__
            raise TypeError(f"keep must be a boolean tensor, True where a query sees a key, got {got}")
        if not 2 <= keep.dim() <= 4:
            raise ValueError(f"keep must be (Sq, Sk), (H, Sq, Sk) or (B, H, Sq, Sk), got shape {tuple(keep.shape)}")
        keep = keep.reshape((1,) * (4 - keep.dim()) + tuple(keep.shape))
        batch, heads, seqlen_q, seqlen_k = keep.shape
        shape = batch, heads, seqlen_q, seqlen_k
        is_dense = Comparison("dense", tuple(keep.stride()), (keep,))
        return _made_by_kernels(((is_dense,),), shape, check_block_size(block_size), keep.device) or _made_by_operators(
            lambda rows: keep[:, :, rows], shape, check_block_size(block_size), keep.device
        )

    @staticmethod
    def from_flex(mask: Any, block_size: int | tuple[int, int] | None = None) -> BlockMask:
        """Return the mask of a BlockMask of `torch.nn.attention.flex_attention`.

        A query sees all keys of the blocks that are listed as full, and of those listed as partial the keys that its
        `mask_mod` shows. That is called with index tensors that broadcast to the scores, counted from the first query
        and key as FlexAttention does. `block_size`: by default the mask's own where that is 64 or 128, else 128.
        """
        for name in ("mask_mod", "seq_lengths", "BLOCK_SIZE", "kv_num_blocks", "kv_indices", "full_kv_num_blocks"):
            if not hasattr(mask, name):
                raise TypeError(
                    f"expected a BlockMask of torch.nn.attention.flex_attention, got {type(mask).__name__} "
                    f"without {name}"
                )
        seqlen_q, seqlen_k = mask.seq_lengths
        batch, heads = mask.kv_num_blocks.shape[:2]
        flex_q, flex_k = mask.BLOCK_SIZE
        block_q, block_k = (size if size in BLOCK_SIZES else 128 for size in mask.BLOCK_SIZE)
        shift = seqlen_k - seqlen_q
        partial = _listed_blocks(mask.kv_num_blocks, mask.kv_indices)
        full = torch.zeros_like(partial)
        if mask.full_kv_num_blocks is not None:
            full = _listed_blocks(mask.full_kv_num_blocks, mask.full_kv_indices)

        def from_first_query(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            block = b, h, (i - shift) // flex_q, j // flex_k
            return full[block] | (partial[block] & mask.mask_mod(b, h, i - shift, j))

        return block_mask(
            from_first_query, batch, heads, seqlen_q, seqlen_k,
            block_size=(block_q, block_k) if block_size is None else block_size, device=mask.kv_num_blocks.device,
        )  # fmt: skip

    def to_flex(self) -> Any:
        """Return a BlockMask of `torch.nn.attention.flex_attention` with the blocks and bits of this mask."""
        from torch.nn.attention.flex_attention import BlockMask as FlexMask

        _, _, seqlen_q, seqlen_k = self.shape
        blocks, bits, (block_q, block_k) = self.blocks, self.bits, self.block_size
        nq, nk = n_blocks(seqlen_q, seqlen_k, (block_q, block_k))
        codes = self._codes()
        if not bits.shape[0]:  # a compact mask without partial blocks
            bits = bits.new_zeros(1, *bits.shape[1:])
        one_sample, one_head = self.shape[0] == 1, self.shape[1] == 1

        def mask_mod(b: Any, h: Any, q_index: Any, k_index: Any) -> Any:
            code = codes[b * (not one_sample), h * (not one_head), q_index // block_q, k_index // block_k]
            word = bits[code.clamp(min=0), q_index % block_q, k_index % block_k // block_lists.WORD]
            return (code == FULL) | ((code >= 0) & ((word >> (k_index % block_lists.WORD)) & 1 == 1))

        rows = blocks[..., nq * nk : nq * nk + nq * (2 + nk)].unflatten(-1, (nq, 2 + nk))
        n_full, n_visible, order = rows[..., 0], rows[..., 1], rows[..., 2:]
        # FlexAttention's list of partial blocks: this list, rotated so that partial blocks come before full ones.
        rotated = (torch.arange(nk, device=blocks.device, dtype=torch.int64) + n_full[..., None]) % max(nk, 1)
        return FlexMask.from_kv_blocks(
            (n_visible - n_full).contiguous(), order.gather(-1, rotated).contiguous(), n_full.contiguous(),
            order.contiguous(), BLOCK_SIZE=(block_q, block_k), mask_mod=mask_mod, seq_lengths=(seqlen_q, seqlen_k),
        )  # fmt: skip

    def __repr__(self) -> str:
        batch, heads, seqlen_q, seqlen_k = self.shape
        values = "" if self.blocks.is_meta else f", {self.summary()}, device={str(self.device)!r}"
        return f"BlockMask(B={batch}, H={heads}, Sq={seqlen_q}, Sk={seqlen_k}, block_size={self.block_size}{values})"

    def summary(self) -> str:
        """Return density and numbers of blocks by kind as text. This waits for the device."""
        kinds = self.kinds()
        full, partial = int((kinds == 2).sum()), int((kinds == 1).sum())
        empty = kinds.numel() - full - partial
        return f"density {self.density():.1%}: {full} full, {partial} partial and {empty} empty blocks"

    def _codes(self) -> torch.Tensor:
        _, _, seqlen_q, seqlen_k = self.shape
        return codes_of(self.blocks, *n_blocks(seqlen_q, seqlen_k, self.block_size))


def _listed_blocks(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return which blocks (…, rows, columns) are among the first `counts` (…, rows) `indices` of their row."""
    columns = indices.shape[-1]
    is_listed = torch.arange(columns, device=counts.device) < counts[..., None]
    blocks = torch.zeros(*counts.shape, columns + 1, dtype=torch.bool, device=counts.device)
    return blocks.scatter_(-1, torch.where(is_listed, indices, columns).long(), True)[..., :columns]


def check_block_size(block_size: Any) -> tuple[int, int]:
    """Return (queries, keys) of a block from the argument `block_size`: one number or a pair."""
    sizes = (block_size, block_size) if isinstance(block_size, int) else block_size
    expected = f"block_size must be 64, 128 or a pair (queries, keys) of these, got {block_size!r}"
    if not isinstance(sizes, (tuple, list)) or not all(isinstance(size, int) for size in sizes):
        raise TypeError(expected)
    if len(sizes) != 2 or any(size not in BLOCK_SIZES for size in sizes):
        raise ValueError(expected)
    return sizes[0], sizes[1]


def _made_by_kernels(
    terms: Terms | None, shape: tuple[int, int, int, int], block: tuple[int, int], device: torch.device
) -> BlockMask | None:
    """Return the mask of `terms`, made by kernels of the device's backend, or None if it has none for these terms."""
    if terms is None or 0 in shape or not fits(terms, shape[0], shape[2], shape[3], device):
        return None
    build = registry.optional_member(device, "build_mask")
    if build is None:
        return None
    return BlockMask(shape, *build(terms, shape, block, device))


def _made_by_operators(
    evaluate: Callable[[slice], torch.Tensor],
    shape: tuple[int, int, int, int],
    block: tuple[int, int],
    device: torch.device,
) -> BlockMask:
    """Return the mask of `shape`, made by PyTorch's operators. `evaluate(rows)` returns booleans (B, H, rows, Sk)."""
    batch, heads, seqlen_q, seqlen_k = shape
    (block_q, block_k), (nq, nk) = block, n_blocks(seqlen_q, seqlen_k, block)
    bits = torch.empty(batch, heads, nq, nk, block_q, block_k // block_lists.WORD, dtype=torch.int32, device=device)
    counts = torch.empty(batch, heads, nq, nk, dtype=torch.int64, device=device)
    step = max(1, CHUNK // max(1, batch * heads * block_q * nk * block_k))  # blocks of queries
    for first in range(0, nq, step):
        last = min(first + step, nq)
        keep = evaluate(slice(first * block_q, min(last * block_q, seqlen_q)))
        beyond = (0, nk * block_k - seqlen_k, 0, (last - first) * block_q - keep.shape[2])
        blocks = torch.nn.functional.pad(keep, beyond).unflatten(3, (nk, block_k)).unflatten(2, (-1, block_q))
        blocks = blocks.transpose(3, 4)  # (B, H, query blocks, key blocks, BLOCK_Q, BLOCK_K)
        counts[:, :, first:last] = blocks.sum((-2, -1))
        bits[:, :, first:last] = block_lists.pack_bits(blocks)
    rows = (seqlen_q - torch.arange(nq, device=device) * block_q).clamp(max=block_q)[:, None]
    slots = torch.arange(counts.numel(), device=device).view(counts.shape)
    codes = torch.where(counts == 0, EMPTY, torch.where(counts == rows * block_k, FULL, slots))
    return BlockMask(shape, block_lists.make_lists(codes.to(torch.int32)), bits.flatten(0, 3))


def _check_captured(source: str, tensors: Any, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Check the captured tensors of a jit function's program and return them."""
    if not isinstance(tensors, (tuple, list)):
        raise TypeError(f"mask_tensors must be a tuple of tensors, got {type(tensors).__name__}")
    if len(tensors) != captured_tensors(source):
        raise ValueError(
            f"{function_name(source)} takes {captured_tensors(source)} captured tensors, got {len(tensors)} in "
            "mask_tensors"
        )
    for n, x in enumerate(tensors):
        is_dense = isinstance(x, torch.Tensor) and x.layout is torch.strided
        if not is_dense or x.dtype not in CAPTURED_DTYPES:
            got = (x.dtype if is_dense else x.layout) if isinstance(x, torch.Tensor) else type(x).__name__
            raise TypeError(
                f"mask_tensors[{n}] must be a dense tensor of floating-point numbers, of int8, int32 or int64, or of "
                f"booleans, got {got}"
            )
        if x.device != device:
            raise ValueError(f"mask_tensors[{n}] must be on {device}, as block_mask(device=) says, got {x.device}")
    return tuple(tensors)


def _from_jit_function(function: Any, tensors: Any, device: torch.device) -> MaskFunction:
    """Return a mask function that runs a jit function's program on PyTorch tensors, with that program as its terms."""
    source = mask_program(function)
    tensors = _check_captured(source, tensors, device)

    def mask(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return run_mask(source, (b, h, i, j), tensors)

    if mask_dtype(source, tuple(x.dtype for x in tensors)) == torch.bool:  # else `block_mask` refuses what it returns
        mask.terms = ((Comparison("function", (), tensors, source),),)  # type: ignore[attr-defined]
    return mask


def block_mask(
    mask_fn: MaskFunction,
    B: int | None,
    H: int | None,
    Sq: int,
    Sk: int,
    *,
    block_size: int | tuple[int, int] = 128,
    device: torch.device | str | None = None,
    mask_tensors: Sequence[torch.Tensor] = (),
) -> BlockMask:
    """Return the `BlockMask` of a mask function, for scores (B, H, Sq, Sk).

    Args:
        mask_fn: takes int64 tensors b (B, 1, 1, 1), h (1, H, 1, 1), i (1, 1, rows, 1) and j (1, 1, 1, Sk), and returns
            booleans that broadcast to (B, H, rows, Sk), True where the query sees the key. `i` counts positions among
            the keys, from Sk - Sq to Sk - 1: the last query is at the last key. It is called for some rows at a time.
            Or a `@triton.jit` function of (b, h, i, j, captured tensors) with the operations of a score function.
        B, H: samples and query heads of the mask; 1 or None if all have one mask.
        Sq, Sk: lengths of queries and keys.
        block_size: 64, 128 or a pair (queries, keys) of these.
        device: of the mask, which must be that of q; default: PyTorch's default device.
        mask_tensors: captured tensors of a jit function, on `device`, which reads them by tl.load: of floating-point
            numbers, int8, int32, int64 or booleans, with any strides; offsets count elements in the order of the shape.
            GPUs do not check that it reads inside of them.

    Raises:
        TypeError, ValueError: an argument does not fit, or the function returns no such booleans.
    """
    mask_device = torch.empty(0, device=device).device
    if is_jit_function(mask_fn):
        mask_fn = _from_jit_function(mask_fn, mask_tensors, mask_device)
    elif tuple(mask_tensors):
        raise ValueError("mask_tensors belong to a jit function; a Python function of PyTorch tensors uses its own")
    if not callable(mask_fn):
        is_tensor = isinstance(mask_fn, torch.Tensor)
        hint = "; a boolean tensor becomes a mask by BlockMask.from_dense" if is_tensor else ""
        raise TypeError(f"mask_fn must be a function of b, h, i, j, got {type(mask_fn).__name__}{hint}")
    batch, heads, seqlen_q, seqlen_k = 1 if B is None else B, 1 if H is None else H, Sq, Sk
    check_integers(1, B=batch, H=heads)
    check_integers(0, Sq=Sq, Sk=Sk)
    b = torch.arange(batch, device=mask_device)[:, None, None, None]
    h = torch.arange(heads, device=mask_device)[:, None, None]
    j = torch.arange(seqlen_k, device=mask_device)

    def evaluate(rows: slice) -> torch.Tensor:
        i = torch.arange(rows.start, rows.stop, device=mask_device)[:, None] + (seqlen_k - seqlen_q)
        keep = mask_fn(b, h, i[None, None], j[None, None, None])
        full = batch, heads, rows.stop - rows.start, seqlen_k
        if not isinstance(keep, torch.Tensor) or keep.dtype != torch.bool:
            got = f"a tensor of {keep.dtype}" if isinstance(keep, torch.Tensor) else type(keep).__name__
            raise TypeError(f"mask_fn must return a boolean tensor, True where the query sees the key, got {got}")
        if keep.device != mask_device:
            raise ValueError(f"mask_fn must return a tensor on {mask_device}, block_mask's device, got {keep.device}")
        try:
            return keep.expand(full)
        except RuntimeError:
            raise ValueError(
                f"mask_fn must return a tensor that broadcasts to {full} for these rows, got shape {tuple(keep.shape)}"
            ) from None

    shape, block = (batch, heads, seqlen_q, seqlen_k), check_block_size(block_size)
    made = _made_by_kernels(terms_of(mask_fn), shape, block, mask_device)
    return made or _made_by_operators(evaluate, shape, block, mask_device)


# ---- Masks by name ---------------------------------------------------------------------------------------------------


def all_of(*functions: MaskFunction) -> MaskFunction:
    """Return the mask in which a query sees the keys that it sees in all of these masks."""
    return _joined("all_of", functions, operator.and_)


def any_of(*functions: MaskFunction) -> MaskFunction:
    """Return the mask in which a query sees the keys that it sees in at least one of these masks."""
    return _joined("any_of", functions, operator.or_)


def _joined(name: str, functions: Sequence[Any], join: Callable[[Any, Any], Any]) -> MaskFunction:
    if not functions or not all(callable(function) for function in functions):
        raise TypeError(f"{name} takes one mask function or more, got {functions!r}")
    if any(map(is_jit_function, functions)):
        raise TypeError(
            f"{name} takes mask functions of PyTorch tensors, got a jit function: combine masks by & and | inside of "
            "one jit function"
        )

    def mask(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return functools.reduce(join, [function(b, h, i, j) for function in functions])

    return combined(mask, functions, is_all=join is operator.and_)


def check_integers(least: int, **numbers: object) -> None:
    """Check that every argument is an integer of at least `least`, which is 0 or 1."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name} must be an integer, got {type(number).__name__}")
        if number < least:
            raise ValueError(f"{name} must be {'positive' if least else 'at least 0'}, got {number}")


def _described(x: Any) -> str:
    return f"a tensor of {x.dtype} and shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__


def _integers(name: str, x: Any, *dims: int) -> None:
    if not isinstance(x, torch.Tensor) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name} must be a tensor of integers, got {_described(x)}")
    if x.dim() not in dims:
        raise ValueError(f"{name} must have {' or '.join(map(str, dims))} dimensions, got shape {tuple(x.shape)}")


def causal(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """Mask function: a query sees the keys up to its own position."""
    return j <= i


with_terms(causal, "band", UNBOUNDED, 0)
_causal = causal  # for functions that have an argument called `causal`


def sliding_window(left: int, right: int = 0) -> MaskFunction:
    """Return the mask in which a query sees `left` keys before its position, its own, and `right` keys after it."""
    check_integers(0, left=left, right=right)
    return with_terms(lambda b, h, i, j: (j >= i - left) & (j <= i + right), "band", left, right)


def document(ids: torch.Tensor, causal: bool = True) -> MaskFunction:
    """Return the mask in which a query sees keys of its own document only.

    Args:
        ids: (S,) or (B, S) integers, the document of each position. S is Sk of the mask.
        causal: a query sees no keys after its position.
    """
    _integers("ids", ids, 1, 2)

    def mask(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        same = ids[i] == ids[j] if ids.dim() == 1 else ids[b, i] == ids[b, j]
        return same & (j <= i) if causal else same

    with_terms(mask, "same", tensors=(ids,))
    return combined(mask, (mask, _causal), is_all=True) if causal else mask


def prefix_lm(lengths: int | torch.Tensor) -> MaskFunction:
    """Return the mask of a prefix language model: all queries see the prefix, and the other keys causally.

    `lengths`: tokens of the prefix, a number or (B,) integers.
    """
    if isinstance(lengths, torch.Tensor):
        _integers("lengths", lengths, 1)
        by_sample = with_terms(lambda b, h, i, j: j < lengths[b], "prefix", tensors=(lengths,))
        return any_of(by_sample, _causal)
    check_integers(0, lengths=lengths)
    return any_of(with_terms(lambda b, h, i, j: j < lengths, "before", lengths), _causal)


def first_keys(count: int) -> MaskFunction:
    """Return the mask in which all queries see the first `count` keys, as in `any_of(first_keys(4), causal)`."""
    check_integers(1, count=count)
    return with_terms(lambda b, h, i, j: j < count, "before", count)


def global_tokens(is_global: torch.Tensor) -> MaskFunction:
    """Return the mask in which global tokens see all keys, and all queries see the global tokens.

    `is_global`: (S,) booleans. S is Sk of the mask.
    """
    if not isinstance(is_global, torch.Tensor) or is_global.dtype != torch.bool or is_global.dim() != 1:
        raise TypeError(f"is_global must be a vector of booleans, got {_described(is_global)}")
    return lambda b, h, i, j: is_global[i] | is_global[j]


def shared_prefix(ids: torch.Tensor, prefix_of: torch.Tensor) -> MaskFunction:
    """Return the causal document mask in which a document may also see the whole of another one, its prefix.

    Args:
        ids: (S,) integers, the document of each position, 0 to N - 1. S is Sk of the mask.
        prefix_of: (N,) integers, the document that is each document's prefix; its own number if it has none.
    """
    _integers("ids", ids, 1)
    _integers("prefix_of", prefix_of, 1)

    def mask(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        own, other = ids[i], ids[j]
        prefix = prefix_of[own]
        return ((own == other) & (j <= i)) | ((own != prefix) & (other == prefix))

    return mask


def block_diffusion(length: int, block: int) -> MaskFunction:
    """Return the training mask of block diffusion (Arriola et al. 2025, arXiv:2503.09573), of 2 · length tokens.

    The noised tokens stand before the clean ones. A noised token sees its block of noised tokens and the clean tokens
    of earlier blocks. A clean token sees the clean tokens of its block and of earlier ones.
    """
    check_integers(1, length=length, block=block)

    def mask(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        block_i, block_j = i % length // block, j % length // block
        clean_i, clean_j = i >= length, j >= length
        before = torch.where(clean_i, block_j <= block_i, block_j < block_i)
        return (clean_j & before) | (~clean_i & ~clean_j & (block_i == block_j))

    return mask


def _grid(name: str, shape: Sequence[int], tile: Sequence[int], window: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Check the arguments of masks on a grid of tokens and return them as tuples."""
    shape, tile, window = tuple(shape), tuple(tile), tuple(window)
    if not len(shape) == len(tile) == len(window) > 0:
        raise ValueError(f"{name} takes one number for each axis, got shape {shape}, tile {tile}, window {window}")
    for axis, (size, tile_size, width) in enumerate(zip(shape, tile, window, strict=True)):
        check_integers(1, shape=size, tile=tile_size, window=width)
        if size % tile_size:
            raise ValueError(f"tile must divide shape, got {tile_size} and {size} along axis {axis}")
    return shape, tile, window


def _coordinates(
    index: torch.Tensor, shape: tuple[int, ...], tile: tuple[int, ...]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return for each axis (index of the tile, index in the tile) of tokens that are stored tile after tile."""
    volume = math.prod(tile)
    tile_index, inner_index, result = index // volume, index % volume, []
    for size, tile_size in zip(reversed(shape), reversed(tile), strict=True):
        result.append((tile_index % (size // tile_size), inner_index % tile_size))
        tile_index, inner_index = tile_index // (size // tile_size), inner_index // tile_size
    return result[::-1]


def _near(centre: torch.Tensor, other: torch.Tensor, size: int, width: int) -> torch.Tensor:
    """Return whether `other` lies in the window of `width` around `centre`, moved to stay inside [0, size)."""
    if width >= size:
        return (other >= 0) & (centre >= 0)
    before, after = width // 2, (width - 1) // 2
    first = centre.clamp(before, size - 1 - after) - before
    return (other >= first) & (other < first + width)


def sliding_tile(shape: Sequence[int], tile: Sequence[int], window: Sequence[int], text: int = 0) -> MaskFunction:
    """Return the sliding-tile mask of images and video (Zhang et al. 2025, arXiv:2502.04507).

    Tokens are stored tile after tile. A query sees the tiles of a window around its own tile, which is moved to stay
    inside the grid. All queries of a tile see the same keys, so blocks of a tile's size are full or empty.

    Args:
        shape: tokens along each axis, such as (frames, height, width).
        tile: tokens of a tile along each axis; it divides the shape.
        window: tiles that a query sees along each axis.
        text: tokens behind those of the grid, which see all keys and which all queries see.
    """
    shape, tile, window = _grid("sliding_tile", shape, tile, window)
    tokens = math.prod(shape)

    def mask(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        keep = (i < tokens) & (j < tokens)
        axes = zip(shape, tile, window, _coordinates(i, shape, tile), _coordinates(j, shape, tile), strict=True)
        for size, tile_size, width, (tile_i, _), (tile_j, _) in axes:
            keep = keep & _near(tile_i, tile_j, size // tile_size, width)
        return keep | (i >= tokens) | (j >= tokens) if text else keep

    if len(shape) > 3:
        return mask
    counts = [1] * (3 - len(shape)) + [size // tile_size for size, tile_size in zip(shape, tile, strict=True)]
    volume = math.prod(tile)
    return with_terms(mask, "tiles", volume, tokens, int(text > 0), *counts, *[1] * (3 - len(shape)), *window)


def neighborhood(shape: Sequence[int], window: Sequence[int], tile: Sequence[int] | None = None) -> MaskFunction:
    """Return the neighborhood mask of images and video (NATTEN, Hassani et al. 2022, arXiv:2204.07143).

    A query sees a window of keys around its position on the grid, which is moved to stay inside the grid.

    Args:
        shape: tokens along each axis, such as (height, width).
        window: keys that a query sees along each axis.
        tile: if tokens are stored tile after tile, the tokens of a tile along each axis: fewer blocks are partial then.
    """
    shape, tile, window = _grid("neighborhood", shape, shape if tile is None else tile, window)

    def mask(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        keep = (i >= 0) & (j >= 0)
        axes = zip(shape, tile, window, _coordinates(i, shape, tile), _coordinates(j, shape, tile), strict=True)
        for size, tile_size, width, (tile_i, inner_i), (tile_j, inner_j) in axes:
            keep = keep & _near(tile_i * tile_size + inner_i, tile_j * tile_size + inner_j, size, width)
        return keep

    return mask


def dilated(window: int, dilation: int, causal: bool = True) -> MaskFunction:
    """Return the dilated sliding window: a query sees every `dilation`-th key, `window` of them on each side.

    Its own position is one of them. With `causal`, it sees none after its position.
    """
    check_integers(1, window=window, dilation=dilation)

    def mask(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        distance = i - j
        near = (distance.abs() < window * dilation) & (distance % dilation == 0)
        return near & (distance >= 0) if causal else near

    return mask


def tree(parents: torch.Tensor, context: int = 0) -> MaskFunction:
    """Return the mask of a tree of draft tokens behind `context` tokens of a sequence.

    A draft token sees itself, its ancestors and the whole context; a context token sees the context causally.

    Args:
        parents: (N,) integers, the index of each draft token's parent, -1 for a root. A parent comes before its
            children. Sk of the mask is context + N.
        context: tokens before the drafts.
    """
    _integers("parents", parents, 1)
    check_integers(0, context=context)
    count = parents.shape[0]
    # Row n of `closure` is the set of n and its ancestors. Each product doubles the distance that it covers. Index
    # `count` is the parent of roots. No token has it.
    above = torch.zeros(count + 1, count + 1, dtype=torch.float32, device=parents.device)
    above[torch.arange(count, device=parents.device), torch.where(parents < 0, count, parents).long()] = 1.0
    above[count] = 0.0
    closure = above + torch.eye(count + 1, device=parents.device)
    for _ in range(max(1, count).bit_length()):
        closure = (closure @ closure).clamp(max=1.0)
    ancestors = closure > 0

    def mask(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        is_draft = (i >= context) & (j >= context)
        related = ancestors[(i - context).clamp(0, count), (j - context).clamp(0, count)]
        return torch.where(is_draft, related, (j < context) & (j <= i))

    return mask
