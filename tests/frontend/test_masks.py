"""Block masks: their lists and bits, masks by name, FlexAttention's masks, and calls that take them."""

from __future__ import annotations

import copy
import pickle
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention
from torch.utils.flop_counter import FlopCounterMode

import diyfa
from diyfa import BlockMask, block_lists, block_mask, masks
from diyfa.block_lists import EMPTY, FULL
from diyfa.options import AttentionOptions, Lengths, pack

SIZES = [(100, 200), (64, 64), (128, 256), (300, 130), (1, 129), (129, 1), (0, 70), (70, 0)]
BLOCKS = [64, 128, (64, 128), (128, 64)]


def random_dense(seqlen_q: int, seqlen_k: int, density: float, batch: int = 2, heads: int = 3) -> torch.Tensor:
    return torch.rand(batch, heads, seqlen_q, seqlen_k, generator=torch.Generator().manual_seed(3)) < density


def mixed(seqlen_q: int = 300, seqlen_k: int = 333) -> torch.Tensor:
    """A mask with blocks of all kinds."""
    dense = random_dense(seqlen_q, seqlen_k, 0.5)
    dense[:, :, :128, 64:192] = True
    dense[:, 1, 128:256] = False
    dense[0, 0, :, 128:256] = True
    return dense


# ---- Lists and bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("density", [0, 0.001, 0.5, 1])
def test_a_mask_keeps_what_it_was_made_from(block: Any, sizes: tuple[int, int], density: float) -> None:
    dense = random_dense(*sizes, density)
    mask = BlockMask.from_dense(dense, block)
    for each in (mask, mask.compact(), mask.to("cpu"), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert torch.equal(each.to_dense(), dense)
        assert each.block_size == mask.block_size and each.shape == tuple(dense.shape)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_kinds_are_those_of_the_blocks(block: Any) -> None:
    dense = mixed()
    mask = BlockMask.from_dense(dense, block)
    (block_q, block_k), kinds = mask.block_size, mask.kinds()
    seen = set()
    for b, h, i, j in product(*map(range, kinds.shape)):
        tile = dense[b, h, i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
        # A block that extends beyond the keys is partial, so that kernels look at its bits; queries do not count.
        full = bool(tile.all()) and tile.shape[1] == block_k
        want = 2 if full else int(tile.any())
        assert kinds[b, h, i, j] == want
        seen.add((want, i == kinds.shape[2] - 1))
    assert {kind for kind, _ in seen} == {0, 1, 2} and (2, True) in seen


@pytest.mark.parametrize("compacted", [False, True])
def test_lists_name_full_blocks_then_partial_ones_in_order(compacted: bool) -> None:
    mask = BlockMask.from_dense(mixed(), 64)
    mask = mask.compact() if compacted else mask
    nq, nk = block_lists.n_blocks(*mask.shape[2:], mask.block_size)
    assert mask.blocks.shape == (2, 3, block_lists.list_length(nq, nk))
    codes, rows, columns = mask.blocks.split([nq * nk, nq * (2 + nk), nk * (2 + nq)], -1)
    codes = codes.unflatten(-1, (nq, nk))
    for table, of in ((rows.unflatten(-1, (nq, -1)), codes), (columns.unflatten(-1, (nk, -1)), codes.mT)):
        for line, kinds in zip(table.flatten(0, 2).tolist(), of.flatten(0, 2).tolist(), strict=True):
            n_full, n_visible, *order = line
            assert order[:n_full] == [n for n, code in enumerate(kinds) if code == FULL]
            assert order[n_full:n_visible] == [n for n, code in enumerate(kinds) if code >= 0]
            assert sorted(order) == list(range(len(kinds)))
    partial = codes[codes >= 0]
    assert partial.unique().numel() == partial.numel() and int(partial.max()) < mask.bits.shape[0]
    if compacted:
        assert mask.bits.shape[0] == partial.numel() < nq * nk * 6
    assert {EMPTY, FULL} < set(codes.flatten().tolist())


def test_a_mask_is_made_in_pieces(monkeypatch: Any) -> None:
    whole = BlockMask.from_dense(mixed(), 64)
    monkeypatch.setattr(masks, "CHUNK", 1)
    pieces = BlockMask.from_dense(mixed(), 64)
    assert torch.equal(whole.blocks, pieces.blocks) and torch.equal(whole.to_dense(), pieces.to_dense())


def test_nothing_waits_for_the_device() -> None:
    """On the meta device, nothing can be read."""
    mask = block_mask(masks.all_of(masks.causal, masks.sliding_window(50)), 2, 3, 300, 400, device="meta")
    assert mask.blocks.is_meta and mask.bits.shape == (2 * 3 * 3 * 4, 128, 4)
    assert "B=2, H=3, Sq=300, Sk=400" in repr(mask)
    parents = torch.empty(40, dtype=torch.int64, device="meta")
    ids = torch.empty(2, 400, dtype=torch.int32, device="meta")
    for function in (masks.tree(parents, 360), masks.document(ids), masks.prefix_lm(ids[:, 0])):
        block_mask(function, 2, 1, 300, 400, device="meta")


def test_repr_and_explain_tell_the_density() -> None:
    mask = block_mask(masks.causal, None, None, 256, 256, block_size=64)
    assert repr(mask) == (
        "BlockMask(B=1, H=1, Sq=256, Sk=256, block_size=(64, 64), density 62.5%: 6 full, 4 partial and 6 empty "
        "blocks, device='cpu')"
    )
    q = torch.randn(1, 2, 256, 16, requires_grad=True)
    explained = diyfa.explain(q, q, q, mask=mask, backend="cpu")
    assert explained.mask == "density 62.5%: 6 full, 4 partial and 6 empty blocks"
    assert f"\n  mask: {explained.mask}\n" in str(explained)
    assert explained.problem.mask == (64, 64)


# ---- FlexAttention ---------------------------------------------------------------------------------------------------


def flex_causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k <= q


def flex_by_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q + 40 * h) & ((q + k) % (b + 2) == 0)


@pytest.mark.parametrize("function", [flex_causal, flex_by_head])
@pytest.mark.parametrize("block", [64, 128, (64, 128)], ids=str)
@pytest.mark.parametrize("sizes", [(256, 256), (200, 300)], ids=str)
def test_masks_of_flex_attention_come_and_go(function: Any, block: Any, sizes: tuple[int, int]) -> None:
    dense = flex_attention.create_mask(function, 2, 3, *sizes, device="cpu")
    theirs = flex_attention.create_block_mask(function, 2, 3, *sizes, device="cpu", BLOCK_SIZE=block)
    ours = BlockMask.from_flex(theirs)
    assert ours.block_size == theirs.BLOCK_SIZE and torch.equal(ours.to_dense(), dense)
    back = ours.to_flex()
    assert back.seq_lengths == sizes
    assert torch.equal(flex_attention.create_mask(back.mask_mod, 2, 3, *sizes, device="cpu"), dense)
    kinds = ours.kinds()
    assert torch.equal(back.to_dense().bool(), kinds > 0)
    assert torch.equal(back.kv_num_blocks, (kinds == 1).sum(-1, dtype=torch.int32))
    assert torch.equal(back.full_kv_num_blocks, (kinds == 2).sum(-1, dtype=torch.int32))
    for counts, indices, kind in (
        (back.kv_num_blocks, back.kv_indices, 1), (back.full_kv_num_blocks, back.full_kv_indices, 2)
    ):  # fmt: skip
        for n, order, row in zip(counts.flatten(), indices.flatten(0, 2), kinds.flatten(0, 2), strict=True):
            assert order[: int(n)].tolist() == [j for j, x in enumerate(row.tolist()) if x == kind]
    q, k, v = (torch.randn(2, 3, n, 16) for n in (sizes[0], sizes[1], sizes[1]))
    with_flex = flex_attention.flex_attention(q, k, v, block_mask=back)
    seen = dense.any(-1, keepdim=True)
    ours_out = diyfa.flash_attention(q, k, v, mask=ours, backend="cpu")
    torch.testing.assert_close(torch.where(seen, with_flex, 0), ours_out)


def test_the_blocks_of_a_flex_mask_count_whatever_its_function_says() -> None:
    """Masks of selected blocks have no function, and one may differ from it."""
    counts = torch.tensor([[[1, 2, 0]]], dtype=torch.int32)
    indices = torch.tensor([[[[2, 0, 1], [0, 2, 1], [0, 1, 2]]]])
    for function in (None, flex_causal):
        theirs = flex_attention.BlockMask.from_kv_blocks(
            counts, indices.int(), counts.flip(-1), indices.flip(-2).int(), BLOCK_SIZE=64, mask_mod=function,
            seq_lengths=(170, 180),
        )  # fmt: skip
        want = torch.zeros(192, 192, dtype=torch.bool)
        shown = torch.ones(192, 192).tril().bool() if function else torch.ones(192, 192, dtype=torch.bool)
        for i, blocks in enumerate(([2], [0, 2], [])):
            for j in blocks:
                tile = slice(64 * i, 64 * i + 64), slice(64 * j, 64 * j + 64)
                want[tile] = shown[tile]
        for i, blocks in enumerate(([], [0, 2], [2])):
            for j in blocks:
                want[64 * i : 64 * i + 64, 64 * j : 64 * j + 64] = True
        assert torch.equal(BlockMask.from_flex(theirs).to_dense()[0, 0], want[:170, :180])


def test_a_mask_of_another_block_size_is_taken() -> None:
    theirs = flex_attention.create_block_mask(flex_causal, None, None, 300, 300, device="cpu", BLOCK_SIZE=256)
    ours = BlockMask.from_flex(theirs)
    assert ours.block_size == (128, 128)
    assert torch.equal(ours.to_dense()[0, 0], torch.ones(300, 300).tril().bool())


# ---- By name ---------------------------------------------------------------------------------------------------------


def test_document() -> None:
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [3, 3, 1, 1, 1, 1, 1, 0]])
    same = ids[:, :, None] == ids[:, None]
    full = block_mask(masks.document(ids, causal=False), 2, 1, 8, 8).to_dense()
    assert torch.equal(full[:, 0], same)
    causal = block_mask(masks.document(ids), 2, 1, 5, 8).to_dense()  # the last five queries
    assert torch.equal(causal[:, 0], (same & torch.ones(8, 8).tril().bool())[:, 3:])
    assert torch.equal(block_mask(masks.document(ids[0]), 1, 1, 8, 8).to_dense()[0, 0], same[0].tril())


def test_prefix_lm() -> None:
    lengths = torch.tensor([3, 0])
    dense = block_mask(masks.prefix_lm(lengths), 2, 1, 6, 6).to_dense()[:, 0]
    want = torch.ones(2, 6, 6).tril().bool()
    want[0, :, :3] = True
    assert torch.equal(dense, want)
    assert torch.equal(block_mask(masks.prefix_lm(3), 1, 1, 6, 6).to_dense()[0, 0], want[0])


def test_windows_first_keys_and_global_tokens() -> None:
    i, j = torch.arange(12)[:, None], torch.arange(12)
    dense = block_mask(masks.any_of(masks.first_keys(2), masks.sliding_window(3, 1)), 1, 1, 12, 12).to_dense()[0, 0]
    assert torch.equal(dense, (j < 2) | ((i - j <= 3) & (j - i <= 1)))
    dense = block_mask(masks.dilated(3, 2), 1, 1, 12, 12).to_dense()[0, 0]
    assert torch.equal(dense, ((i - j) % 2 == 0) & (i - j >= 0) & (i - j < 6))
    dense = block_mask(masks.dilated(3, 2, causal=False), 1, 1, 12, 12).to_dense()[0, 0]
    assert torch.equal(dense, ((i - j) % 2 == 0) & ((i - j).abs() < 6))
    is_global = torch.arange(12) % 4 == 0
    dense = block_mask(masks.global_tokens(is_global), 1, 1, 12, 12).to_dense()[0, 0]
    assert torch.equal(dense, is_global[:, None] | is_global)


def test_tree() -> None:
    parents, context = [-1, 0, 0, 1, 3, -1, 5, 2], 3
    want = torch.zeros(11, 11, dtype=torch.bool)
    for i in range(11):
        want[i, : min(i + 1, context)] = True
        node = i - context
        while node >= 0:
            want[i, context + node] = True
            node = parents[node]
    function = masks.tree(torch.tensor(parents), context)
    assert torch.equal(block_mask(function, 1, 1, 11, 11).to_dense()[0, 0], want)
    assert torch.equal(block_mask(function, 1, 1, 8, 11).to_dense()[0, 0], want[3:])  # the drafts alone
    chain = masks.tree(torch.arange(-1, 40))
    assert torch.equal(block_mask(chain, 1, 1, 41, 41).to_dense()[0, 0], torch.ones(41, 41).tril().bool())


def windows_on_a_grid(shape: tuple[int, ...], tile: tuple[int, ...], window: tuple[int, ...], of_tiles: bool) -> Any:
    """Tokens in the order of tiles, and a window around each, found by walking over the grid."""
    tokens = []
    for corner in product(*(range(0, size, part) for size, part in zip(shape, tile, strict=True))):
        inside = product(*(range(part) for part in tile))
        tokens += [tuple(c + x for c, x in zip(corner, place, strict=True)) for place in inside]
    unit = tile if of_tiles else (1,) * len(shape)
    rows = []
    for query in tokens:
        spans = []
        for x, size, part, width in zip(query, shape, unit, window, strict=True):
            count = size // part
            first = min(max(x // part - width // 2, 0), max(count - width, 0))
            spans.append(range(first * part, min(first + width, count) * part))
        rows.append([all(x in span for x, span in zip(key, spans, strict=True)) for key in tokens])
    return torch.tensor(rows)


@pytest.mark.parametrize(
    "shape, tile, window",
    [((8, 8), (2, 4), (3, 1)), ((6, 4, 4), (2, 2, 2), (3, 1, 3)), ((4, 12), (2, 2), (2, 4)), ((4, 4), (4, 2), (3, 3))],
)
def test_sliding_tile_and_neighborhood(shape: Any, tile: Any, window: Any) -> None:
    n = torch.Size(shape).numel()
    dense = block_mask(masks.sliding_tile(shape, tile, window), 1, 1, n, n).to_dense()[0, 0]
    assert torch.equal(dense, windows_on_a_grid(shape, tile, window, True))
    with_text = block_mask(masks.sliding_tile(shape, tile, window, text=3), 1, 1, n + 3, n + 3).to_dense()[0, 0]
    assert torch.equal(with_text[:n, :n], dense) and bool(with_text[n:].all()) and bool(with_text[:, n:].all())
    dense = block_mask(masks.neighborhood(shape, window, tile), 1, 1, n, n).to_dense()[0, 0]
    assert torch.equal(dense, windows_on_a_grid(shape, tile, window, False))
    dense = block_mask(masks.neighborhood(shape, window), 1, 1, n, n).to_dense()[0, 0]
    assert torch.equal(dense, windows_on_a_grid(shape, shape, window, False))


def test_tiles_of_a_block_have_no_partial_blocks() -> None:
    mask = block_mask(masks.sliding_tile((8, 16, 16), (4, 4, 4), (1, 3, 3)), 1, 1, 2048, 2048, block_size=64)
    kinds = mask.kinds()
    assert set(kinds.unique().tolist()) == {0, 2} and int((kinds == 2).sum()) == 32 * 9
    assert torch.equal(mask.compact().to_flex().to_dense().bool(), kinds > 0)


def test_shared_prefix() -> None:
    ids, prefix_of = torch.tensor([0, 0, 1, 1, 2, 3, 3, 4]), torch.tensor([0, 0, 0, 3, 3])
    want = torch.zeros(8, 8, dtype=torch.bool)
    for i, j in product(range(8), range(8)):
        own, other = int(ids[i]), int(ids[j])
        want[i, j] = (own == other and j <= i) or (other == int(prefix_of[own]) and other != own)
    assert torch.equal(block_mask(masks.shared_prefix(ids, prefix_of), 1, 1, 8, 8).to_dense()[0, 0], want)


def test_block_diffusion() -> None:
    n, block = 10, 4
    want = torch.zeros(2 * n, 2 * n, dtype=torch.bool)
    for i, j in product(range(n), range(n)):
        want[i, j] = i // block == j // block
        want[i, n + j] = j // block < i // block
        want[n + i, n + j] = j // block <= i // block
    assert torch.equal(block_mask(masks.block_diffusion(n, block), 1, 1, 2 * n, 2 * n).to_dense()[0, 0], want)


# ---- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: block_mask(torch.ones(3, 3).bool(), 1, 1, 3, 3), TypeError, "BlockMask.from_dense"),
        (lambda: block_mask(lambda *_: 1.0, 1, 1, 3, 3), TypeError, "must return a boolean tensor.*float"),
        (lambda: block_mask(lambda *_: torch.ones(3, 3), 1, 1, 3, 3), TypeError, "boolean tensor.*torch.float32"),
        (lambda: block_mask(lambda *_: torch.ones(2, 3).bool(), 1, 1, 3, 3), ValueError, "broadcasts to .*got shape"),
        (lambda: block_mask(lambda *_: torch.empty(3, device="meta").bool(), 1, 1, 3, 3), ValueError, "tensor on cpu"),
        (lambda: block_mask(masks.causal, 0, 1, 3, 3), ValueError, "B must be positive, got 0"),
        (lambda: block_mask(masks.causal, 1, 1.0, 3, 3), TypeError, "H must be an integer, got float"),
        (lambda: block_mask(masks.causal, 1, 1, -3, 3), ValueError, "Sq must be at least 0, got -3"),
        (lambda: block_mask(masks.causal, 1, 1, 3, 3, block_size=32), ValueError, "64, 128 or a pair"),
        (lambda: block_mask(masks.causal, 1, 1, 3, 3, block_size=(64, 256)), ValueError, "64, 128 or a pair"),
        (lambda: block_mask(masks.causal, 1, 1, 3, 3, block_size=None), TypeError, "64, 128 or a pair.*got None"),
        (lambda: block_mask(masks.causal, 1, 1, 3, 3, block_size=64.0), TypeError, "64, 128 or a pair.*got 64.0"),
        (lambda: block_mask(masks.causal, 1, 1, 3, 3, block_size=(64.0, 64)), TypeError, "64, 128 or a pair"),
        (lambda: BlockMask.from_dense(torch.ones(3, 3)), TypeError, "boolean tensor.*torch.float32"),
        (lambda: BlockMask.from_dense([[True]]), TypeError, "boolean tensor.*list"),
        (lambda: BlockMask.from_dense(torch.ones(3).bool()), ValueError, r"got shape \(3,\)"),
        (lambda: BlockMask.from_flex(torch.ones(3, 3)), TypeError, "flex_attention, got Tensor"),
        (lambda: masks.all_of(), TypeError, "one mask function or more"),
        (lambda: masks.any_of(masks.causal, 3), TypeError, "one mask function or more"),
        (lambda: masks.sliding_window(-1), ValueError, "at least 0"),
        (lambda: masks.document(torch.ones(3)), TypeError, "ids must be a tensor of integers"),
        (lambda: masks.document(torch.ones(1, 2, 3).int()), ValueError, "1 or 2 dimensions"),
        (lambda: masks.prefix_lm(2.0), TypeError, "lengths must be an integer"),
        (lambda: masks.sliding_tile((8, 8), (3, 4), (1, 1)), ValueError, "tile must divide shape, got 3 and 8"),
        (lambda: masks.sliding_tile((8, 8), (4, 4), (1,)), ValueError, "one number for each axis"),
        (lambda: masks.neighborhood((8, 8), (0, 3)), ValueError, "window must be positive"),
        (lambda: masks.dilated(3, 0), ValueError, "dilation must be positive"),
        (lambda: masks.tree(torch.ones(3)), TypeError, "parents must be a tensor of integers"),
        (lambda: masks.tree(torch.zeros(3).int(), -1), ValueError, "context must be at least 0"),
        (lambda: masks.global_tokens(torch.ones(3)), TypeError, "is_global must be a vector of booleans"),
        (lambda: masks.first_keys(0), ValueError, "count must be positive"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(call: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def attend(mask: Any, batch: int = 2, heads: int = 4, seqlen: int = 100, **options: Any) -> Any:
    q = torch.randn(batch, heads, seqlen, 16)
    return diyfa.flash_attention(q, q, q, mask=mask, backend="cpu", **options)


CAUSAL = block_mask(masks.causal, 1, 1, 100, 100)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: attend(CAUSAL, causal=True), ValueError, "takes the place of causal and window"),
        (lambda: attend(CAUSAL, window=(3, 0)), ValueError, "takes the place of causal and window"),
        (lambda: attend(CAUSAL, seqlen=99), ValueError, "100 queries and 100 keys, got 99 and 99"),
        (lambda: attend(CAUSAL.to_dense()), TypeError, "BlockMask.from_dense"),
        (lambda: attend(CAUSAL.to_flex()), TypeError, "BlockMask.from_flex"),
        (lambda: attend(CAUSAL.to("meta")), ValueError, "same device.* mask on meta"),
        (lambda: attend(block_mask(masks.causal, 3, 1, 100, 100)), ValueError, r"mask must be of 1 or 2 .*\(3, 1\)"),
        (lambda: attend(block_mask(masks.causal, 1, 2, 100, 100)), ValueError, r"1 or 4 query heads.*\(1, 2\)"),
    ],
)  # fmt: skip
def test_masks_that_do_not_fit_are_refused(call: Any, error: type, words: str) -> None:
    for _ in range(2):  # the second time, there might be a plan
        with pytest.raises(error, match=words):
            call()


def test_modes_without_masks_refuse_them() -> None:
    with diyfa.batch_invariant(), pytest.raises(ValueError, match="takes no mask"):
        attend(CAUSAL)
    q, offsets = torch.randn(100, 2, 16), torch.tensor([0, 100], dtype=torch.int32)
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
        diyfa.flash_attention_varlen(q, q, q, offsets, offsets, 100, 100, mask=CAUSAL)
    for function in (diyfa.explain, diyfa.reference_attention):
        options = {"max_seqlen_q": 100, "max_seqlen_k": 100, "backend": "cpu"} if function is diyfa.explain else {}
        with pytest.raises(ValueError, match="no mask"):
            function(q, q, q, layout="thd", cu_seqlens_q=offsets, cu_seqlens_k=offsets, mask=CAUSAL, **options)


# ---- Calls -----------------------------------------------------------------------------------------------------------


def test_a_causal_mask_is_the_causal_call() -> None:
    q, k, v = (torch.randn(2, 2, n, 16, requires_grad=True) for n in (100, 150, 150))
    mask = block_mask(masks.causal, 1, 1, 100, 150, block_size=64)  # positions align to the last key
    assert torch.equal(mask.to_dense()[0, 0], torch.ones(100, 150).tril(50).bool())
    results = []
    for options in ({"mask": mask}, {"causal": True}):
        out, lse = diyfa.flash_attention(q, k, v, return_lse=True, backend="cpu", **options)
        results.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_quantized_inputs_take_a_mask_that_fits() -> None:
    q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
    ours = diyfa.quantize(q, k, v)
    out = diyfa.flash_attention(*ours, mask=CAUSAL, backend="cpu", out_dtype=torch.float32)
    same = diyfa.flash_attention(*ours, causal=True, backend="cpu", out_dtype=torch.float32)
    torch.testing.assert_close(out, same)
    with pytest.raises(ValueError, match="90 queries"):
        diyfa.flash_attention(*ours, mask=block_mask(masks.causal, 1, 1, 90, 100), backend="cpu")


def test_only_blocks_with_visible_keys_count_as_products() -> None:
    q, k = torch.randn(2, 4, 200, 16, requires_grad=True), torch.randn(2, 2, 300, 16)
    dense = torch.zeros(2, 1, 200, 300, dtype=torch.bool)
    dense[0, 0, 0, 0] = True  # a block of 64 x 128
    dense[1, 0, 199, 299] = True  # a block of 8 x 44
    mask = BlockMask.from_dense(dense, (64, 128))
    with FlopCounterMode(display=False) as counter:
        diyfa.flash_attention(q, k, k, mask=mask, backend="cpu").sum().backward()
    pairs = 4 * (64 * 128 + 8 * 44)
    assert counter.get_total_flops() == 2 * pairs * (2 + 5) * 16


def test_a_compiled_function_takes_a_mask() -> None:
    mask = block_mask(masks.document(torch.arange(100) // 30), 1, 1, 100, 100, block_size=64)

    def loss(q: torch.Tensor, mask: BlockMask) -> torch.Tensor:
        return diyfa.flash_attention(q, q, q, mask=mask, backend="cpu").square().sum()

    q = torch.randn(1, 2, 100, 16, requires_grad=True)
    (want,) = torch.autograd.grad(loss(q, mask), q)
    (found,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(q, mask), q)
    assert torch.equal(want, found)


def test_the_operator_is_a_good_one() -> None:
    options = AttentionOptions("bhsd", 0.25, backend="cpu", mask_blocks=CAUSAL.blocks, mask_bits=CAUSAL.bits)
    q = torch.randn(1, 2, 100, 16, requires_grad=True)
    torch.library.opcheck(
        torch.ops.diyfa.attention_fwd.default, (q, q, q, "", *pack(Lengths(), options._replace(needs_grad=True)))
    )
