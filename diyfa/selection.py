"""Selection of key blocks by the data, for sparse attention: `select_blocks`.

The score of a block of queries and a block of keys is the dot product of their means. Each block of queries sees the
key blocks with its highest scores, and some that are always on. NSA (arXiv:2502.11089), MoBA (arXiv:2502.13189) and VSA
(arXiv:2505.13389) select in this way; docs/masks.md has them as recipes.
"""

from __future__ import annotations

import torch

from diyfa import block_lists, registry, validation
from diyfa.block_lists import EMPTY, FULL, Selection, n_blocks
from diyfa.masks import BlockMask, check_block_size, check_integers
from diyfa.problem import LAYOUTS, as_bhsd

LARGEST_SCORE = 3e38  # scores that are NaN or infinite are ranked as if they were -LARGEST_SCORE or within its bounds


def block_means(x: torch.Tensor, block: int) -> torch.Tensor:
    """Return the means (B, H, blocks, D) float32 of the rows of x (B, H, S, D) in each block."""
    rows = x.shape[2]
    count = -(-rows // block)
    padded = torch.nn.functional.pad(x, (0, 0, 0, count * block - rows))
    sizes = (rows - torch.arange(count, device=x.device) * block).clamp(max=block)
    return padded.unflatten(2, (count, block)).sum(3, dtype=torch.float32) / sizes[:, None]


def _positions(how: Selection, sizes: tuple[int, int], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the first and last position of each block of queries, (nq, 1), and the first key and the end of each block
    of keys, (nk,). Positions of queries count among the keys: the last query is at the last key."""
    (seqlen_q, seqlen_k), (block_q, block_k) = sizes, how.block
    nq, nk = n_blocks(seqlen_q, seqlen_k, how.block)
    first_row = torch.arange(nq, device=device)[:, None] * block_q
    shift = seqlen_k - seqlen_q
    first_key = torch.arange(nk, device=device) * block_k
    return first_row + shift, (first_row + block_q).clamp(max=seqlen_q) - 1 + shift, first_key, first_key + block_k


def _first_edge(how: Selection, sizes: tuple[int, int], first_query: torch.Tensor) -> torch.Tensor:
    """Return the first edge block of each block of queries, (nq, 1): that of its first query, or the last key block."""
    if how.causal:
        return first_query.clamp(min=0) // how.block[1]
    return torch.full_like(first_query, max(sizes[1] - 1, 0) // how.block[1])


def _edge_bits(how: Selection, sizes: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Return `mask_bits` of the edge blocks, which the diagonal or the end of the keys cuts.

    Each block of queries has `block_lists.edge_blocks` of them, consecutive key blocks from `_first_edge` on.
    """
    (_, seqlen_k), (block_q, block_k) = sizes, how.block
    first_query, _, _, _ = _positions(how, sizes, device)
    edges = block_lists.edge_blocks(how, sizes)
    i = first_query[:, :, None, None] + torch.arange(block_q, device=device)[:, None]  # (nq, 1, BLOCK_Q, 1)
    edge_block = _first_edge(how, sizes, first_query) + torch.arange(edges, device=device)  # (nq, edges)
    j = edge_block[:, :, None, None] * block_k + torch.arange(block_k, device=device)  # (nq, edges, 1, BLOCK_K)
    keep = (j < seqlen_k) & (i < seqlen_k)
    return block_lists.pack_bits(keep & (j <= i) if how.causal else keep).flatten(0, 1)


def _selected(scores: torch.Tensor, how: Selection, sizes: tuple[int, int]) -> torch.Tensor:
    """Return which blocks (B, H, nq, nk) are visible: selected by their scores, or always on."""
    first_query, last_query, first_key, key_end = _positions(how, sizes, scores.device)
    not_after = first_key <= last_query
    eligible = not_after if how.causal else torch.ones_like(not_after)
    local_keys = (how.local - 1) * how.block[1]  # keys of the neighbours on each side
    is_near = (key_end + local_keys > first_query) & (first_key - local_keys <= last_query)
    always = (first_key < how.sinks * how.block[1]) | (is_near if how.local else torch.zeros_like(is_near))
    bounded = scores.nan_to_num(-LARGEST_SCORE, LARGEST_SCORE, -LARGEST_SCORE).clamp(-LARGEST_SCORE, LARGEST_SCORE)
    ranked = bounded.masked_fill(always | ~eligible, float("-inf"))
    order = ranked.sort(dim=-1, descending=True, stable=True).indices[..., : how.topk]
    chosen = torch.zeros_like(ranked, dtype=torch.bool).scatter_(-1, order, True)
    return (chosen | always) & eligible


def select_by_operators(q: torch.Tensor, k: torch.Tensor, how: Selection) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `mask_blocks` and `mask_bits` for q (B, H, Sq, D) and k (B, Hk, Sk, D), by PyTorch's operators."""
    sizes = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1]
    means_q, means_k = block_means(q, how.block[0]), block_means(k, how.block[1])
    scores = means_q.unflatten(1, (-1, group)) @ means_k[:, :, None].mT  # (B, Hk, group, nq, nk)
    if how.by_group:
        scores = scores.sum(2, keepdim=True).expand(-1, -1, group, -1, -1)
    selected = _selected(scores.flatten(1, 2), how, sizes)
    first_query, _, first_key, key_end = _positions(how, sizes, q.device)
    is_full = key_end <= sizes[1]
    if how.causal:  # the first query of the block must see the block's last key
        is_full = is_full & (key_end - 1 <= first_query)
    # Index in `mask_bits` of a block that is not full: those of a block of queries follow one another.
    rows = torch.arange(first_query.shape[0], device=q.device)[:, None]
    edge = first_key // how.block[1] - _first_edge(how, sizes, first_query)
    index = rows * block_lists.edge_blocks(how, sizes) + edge
    codes = torch.where(selected, torch.where(is_full, FULL, index), EMPTY).to(torch.int32)
    return block_lists.make_lists(codes), _edge_bits(how, sizes, q.device)


def select_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    topk: int,
    block_size: int | tuple[int, int] = 128,
    causal: bool = False,
    sinks: int = 0,
    local: int = 1,
    by_group: bool = False,
    layout: str = "bhsd",
) -> BlockMask:
    """Return a `BlockMask` in which each block of queries sees the key blocks whose mean fits its own best.

    Args:
        q: (B, H, Sq, D). k: (B, Hk, Sk, D); H is a multiple of Hk.
        topk: key blocks that are selected for each block of queries, besides those that are always on. If fewer are
            left, all of them.
        block_size: 64, 128 or a pair (queries, keys) of these.
        causal: select blocks up to a query's own position only, and hide later keys inside of them.
        sinks: this many key blocks at the beginning are always on.
        local: the key blocks at the queries' own positions are always on, and local - 1 blocks on each side of them.
            0: none.
        by_group: select for all query heads of a KV head together, by the sum of their scores.
        layout: "bhsd", or "bshd" as `diyfa.flash_attention_v2` takes.

    The selection has no gradient of its own; attention with the mask has those of the blocks that it sees. Nothing
    waits for the device. Of equal scores the earlier block is selected. A score that is NaN comes last.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    how = Selection(topk, causal, sinks, local, by_group, check_block_size(block_size))
    _check(q, k, how, layout)
    with torch.no_grad():
        q, k = as_bhsd(q.detach(), layout), as_bhsd(k.detach(), layout)
        shape = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
        _, keys = n_blocks(*shape[2:], how.block)
        reach = -(-max(shape[2:]) // how.block[1]) + 1  # from any query to any key
        how = how._replace(topk=min(topk, keys), sinks=min(sinks, keys), local=min(local, reach))
        kernel = None if 0 in (*q.shape, *k.shape) else registry.optional_member(q.device, "select_blocks")
        made = None if kernel is None else kernel(q, k, how)
        return BlockMask(shape, *(made or select_by_operators(q, k, how)))


def _check(q: torch.Tensor, k: torch.Tensor, how: Selection, layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    validation.check_tensors(q=q, k=k)
    validation.check_booleans(causal=how.causal, by_group=how.by_group)
    check_integers(0, topk=how.topk, sinks=how.sinks, local=how.local)
    for name, x in (("q", q), ("k", k)):
        if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise TypeError(f"{name} must be float16, bfloat16 or float32, got {x.dtype}")
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions, got shape {tuple(x.shape)}")
    _, heads, _, features = LAYOUTS[layout]
    same = q.shape[0] == k.shape[0] and q.shape[features] == k.shape[features]
    if not same or k.shape[heads] == 0 or q.shape[heads] % k.shape[heads]:
        raise ValueError(
            "q and k must have the same batch and head_dim, and q a multiple of k's heads, got "
            f"{tuple(q.shape)} and {tuple(k.shape)} in the layout {layout}"
        )
    validation.check_same_device(q, k=k)
