"""Selection of key blocks: by PyTorch's operators and by the CUDA kernels, against a loop over blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import diyfa
from diyfa import BlockMask, select_blocks


def expected(q: torch.Tensor, k: torch.Tensor, block: tuple[int, int], topk: int, **how: Any) -> torch.Tensor:
    """The mask as booleans (B, H, Sq, Sk), block by block."""
    causal, sinks, local = how.get("causal", False), how.get("sinks", 0), how.get("local", 1)
    batch, heads, seqlen_q, _ = q.shape
    heads_kv, seqlen_k = k.shape[1], k.shape[2]
    group, shift = heads // heads_kv, seqlen_k - seqlen_q
    dense = torch.zeros(batch, heads, seqlen_q, seqlen_k, dtype=torch.bool)
    key_ranges = [(j, min(j + block[1], seqlen_k)) for j in range(0, seqlen_k, block[1])]
    for b in range(batch):
        for h in range(heads):
            for row0 in range(0, seqlen_q, block[0]):
                rows = slice(row0, min(row0 + block[0], seqlen_q))
                first, last = row0 + shift, rows.stop - 1 + shift
                queries = range(h // group * group, (h // group + 1) * group) if how.get("by_group") else [h]
                mean = sum(q[b, x, rows].double().mean(0) for x in queries)
                ranks, chosen = [], []
                for n, (j0, j1) in enumerate(key_ranges):
                    if causal and j0 > last:
                        continue
                    margin = (local - 1) * block[1]
                    if n < sinks or (local and j0 + block[1] + margin > first and j0 - margin <= last):
                        chosen.append(n)
                    else:
                        ranks.append((-float(mean @ k[b, h // group, j0:j1].double().mean(0)), n))
                for n in [*chosen, *(n for _, n in sorted(ranks)[:topk])]:
                    dense[b, h, rows, slice(*key_ranges[n])] = True
    if causal:
        dense &= torch.arange(seqlen_k) <= torch.arange(seqlen_q)[:, None] + shift
    return dense


CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 2, 2, 300, 400, 32), {"topk": 2, "block_size": 64}),
    "causal": ((1, 4, 2, 300, 300, 40), {"topk": 1, "block_size": 64, "causal": True, "sinks": 1}),
    "by_group": ((1, 4, 2, 200, 500, 64), {"topk": 2, "block_size": (128, 64), "by_group": True, "local": 2}),
    "no_local": ((1, 2, 1, 70, 512, 16), {"topk": 3, "block_size": (64, 128), "local": 0}),
    "causal_no_local": ((1, 1, 1, 400, 400, 16), {"topk": 1, "block_size": 64, "local": 0, "causal": True}),
    "more_queries": ((1, 2, 2, 300, 100, 16), {"topk": 1, "block_size": (128, 64), "causal": True}),
    "more_queries_all_near": ((1, 1, 1, 400, 130, 16), {"topk": 0, "block_size": 64, "local": 2**70, "sinks": 2**70}),
    "more_queries_some_near": ((1, 1, 1, 400, 130, 16), {"topk": 0, "block_size": 64, "local": 4}),
    "all": ((1, 1, 1, 200, 300, 16), {"topk": 2**70, "block_size": 64, "local": 9}),
    "none": ((1, 1, 1, 100, 300, 16), {"topk": 0, "local": 0, "block_size": 64}),
    "one_row": ((1, 2, 1, 1, 300, 16), {"topk": 2, "block_size": 64, "causal": True}),
}


def inputs(batch: int, heads: int, heads_kv: int, seqlen_q: int, seqlen_k: int, head_dim: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, heads, seqlen_q, head_dim), (batch, heads_kv, seqlen_k, head_dim))
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("name", CASES)
def test_blocks(name: str, backend: str) -> None:
    if backend == "cuda":
        pytest.importorskip("triton")
        if diyfa.registry.load_backend("cuda").accepts(torch.device("cpu")):
            pytest.skip("kernels are not interpreted here")
    sizes, how = CASES[name]
    q, k = inputs(*sizes)
    with diyfa.use_backend(backend):
        mask = select_blocks(q, k, **how)
        swapped = select_blocks(q.transpose(1, 2), k.transpose(1, 2).contiguous(), **how, layout="bshd")
    want = expected(q, k, mask.block_size, **{x: y for x, y in how.items() if x != "block_size"})
    assert torch.equal(mask.to_dense(), want)
    assert torch.equal(swapped.to_dense(), want)
    again = BlockMask.from_dense(want, how["block_size"])
    # Bits cut the diagonal's blocks, so that all lists are those of the same mask made from booleans.
    assert torch.equal(mask.kinds(), again.kinds())
    nq, nk = mask.kinds().shape[2:]
    assert torch.equal(mask.blocks[..., nq * nk :], again.blocks[..., nq * nk :])


def test_scores_that_are_not_numbers_come_last() -> None:
    for backend in ("cpu", "cuda"):
        q, k = inputs(1, 1, 1, 64, 320, 16)
        k[:, :, 70], k[:, :, 140, 0] = float("nan"), float("-inf")
        q[..., 0] = 1.0
        if backend == "cuda" and diyfa.registry.load_backend("cuda").accepts(torch.device("cpu")):
            continue
        with diyfa.use_backend(backend):
            kinds = [select_blocks(q, k, topk=n, block_size=64, local=0).kinds()[0, 0, 0] for n in (3, 4, 5)]
        assert kinds[0].tolist() == [2, 0, 0, 2, 2]
        assert kinds[1].tolist() == [2, 2, 0, 2, 2] and kinds[2].tolist() == [2] * 5


def test_nothing_waits_for_the_device() -> None:
    q, k = (x.to("meta") for x in inputs(1, 4, 2, 200, 300, 16))
    mask = select_blocks(q, k, topk=2, causal=True)
    assert mask.blocks.is_meta and mask.shape == (1, 4, 200, 300)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"topk": -1}, ValueError, "topk must be at least 0"), ({"topk": 1.0}, TypeError, "topk must be an integer"),
    ({"local": True}, TypeError, "local must be an integer"), ({"block_size": 32}, ValueError, "64, 128"),
    ({"causal": 1}, TypeError, "causal must be True or"), ({"layout": "thd"}, ValueError, "layout must be one of"),
    ({"q": torch.zeros(1, 3, 64, 16)}, ValueError, "multiple of k's heads"),
    ({"q": torch.zeros(4, 64, 16)}, ValueError, "4 dimensions"),
    ({"k": torch.zeros(1, 2, 64, 16).int()}, TypeError, "float16, bfloat16 or float32"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "words"), WRONG)
def test_wrong_arguments(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    q, k = inputs(1, 4, 2, 64, 64, 16)
    with pytest.raises(error, match=words):
        select_blocks(**{"q": q, "k": k, "topk": 1, **changes})
