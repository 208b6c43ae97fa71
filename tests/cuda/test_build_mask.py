"""Masks made by kernels: equal bit for bit to those that PyTorch's operators make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from guarded_memory import guard

import diyfa
from diyfa import BlockMask, block_mask, masks, registry
from diyfa.backends.cuda import backend
from diyfa.backends.cuda.attention import build_mask
from diyfa.backends.cuda.runtime.launch import is_interpreting
from diyfa.mask_terms import terms_of

DEVICE = "cpu" if is_interpreting() else "cuda"
if not is_interpreting() and not torch.cuda.is_available():
    pytest.skip("no GPU, and kernels are not interpreted", allow_module_level=True)


def ids(*shape: int, ordered: bool = True) -> torch.Tensor:
    numbers = torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(1))
    return (numbers.sort(-1).values if ordered else numbers).to(DEVICE)


LENGTHS = torch.tensor([70, 0], device=DEVICE, dtype=torch.int32)
# Blocks of queries inside of one document, which ends in a block of keys.
LONG = torch.stack([torch.arange(400) // 250, torch.arange(400) // 90]).to(DEVICE, torch.int32)
FUNCTIONS: dict[str, Callable[[], masks.MaskFunction]] = {
    "causal": lambda: masks.causal,
    "window": lambda: masks.sliding_window(150, 130),
    "unbounded_window": lambda: masks.sliding_window(10**12, 3),
    "first_keys": lambda: masks.first_keys(65),
    "prefix": lambda: masks.prefix_lm(150),
    "prefix_by_sample": lambda: masks.prefix_lm(LENGTHS),
    "document": lambda: masks.document(ids(400)),
    "document_by_sample": lambda: masks.document(LONG, causal=False),
    "document_out_of_order": lambda: masks.document(ids(400, ordered=False) << 33, causal=False),
    "document_strided": lambda: masks.document(ids(400, 2)[:, 0]),
    "sinks_and_window": lambda: masks.all_of(
        masks.causal, masks.any_of(masks.first_keys(4), masks.sliding_window(100)), masks.document(ids(400))
    ),
    "tiles": lambda: masks.sliding_tile((6, 8, 8), (2, 4, 8), (1, 3, 1)),
    "tiles_and_text": lambda: masks.sliding_tile((12, 30), (6, 5), (1, 3), text=40),
    "more_queries": lambda: masks.any_of(masks.sliding_window(5, 9), masks.first_keys(3)),
    "no_pair": lambda: masks.all_of(masks.first_keys(1), masks.sliding_window(0)),
}


def same(made: BlockMask, want: BlockMask) -> None:
    assert torch.equal(made.blocks, want.blocks)
    used = want._codes()[want._codes() >= 0].long()
    assert torch.equal(made.bits[used], want.bits[used])


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The masks that kernels have made."""
    made: list[Any] = []
    build = build_mask.build_mask
    monkeypatch.setattr(backend, "build_mask", lambda *arguments: made.append(arguments) or build(*arguments))
    return made


BLOCKS = (64, 128, (64, 128), (128, 64))
CASES = [(name, BLOCKS[i % 4]) for i, name in enumerate(FUNCTIONS)] + [("document", block) for block in BLOCKS]


@pytest.mark.parametrize(("name", "block"), CASES, ids=str)
def test_named_masks(name: str, block: Any, counted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"tiles": (333, 384), "tiles_and_text": (384, 400), "more_queries": (300, 100)}
    function, (seqlen_q, seqlen_k) = FUNCTIONS[name](), sizes.get(name, (300, 400))
    with diyfa.use_backend("cuda"):
        made = block_mask(function, 2, 1, seqlen_q, seqlen_k, block_size=block, device=DEVICE)
        assert len(counted) == 1
        monkeypatch.setattr(masks, "_made_by_kernels", lambda *arguments: None)
        same(made, block_mask(function, 2, 1, seqlen_q, seqlen_k, block_size=block, device=DEVICE))


@pytest.mark.parametrize("block", [64, 128], ids=str)
@pytest.mark.parametrize("sizes", [(2, 2, 200, 150), (1, 1, 64, 128), (1, 1, 1, 65)], ids=str)
@pytest.mark.parametrize("density", [0, 0.5, 1])
def test_booleans(block: int, sizes: Any, density: float, counted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    dense = (torch.rand(sizes, generator=torch.Generator().manual_seed(3)) < density).to(DEVICE)
    dense[..., : sizes[2] // 2, :128] = True
    for keep in (dense, dense.mT.contiguous().mT):
        with diyfa.use_backend("cuda"), monkeypatch.context() as patches:
            made = BlockMask.from_dense(keep, block)
            patches.setattr(masks, "_made_by_kernels", lambda *arguments: None)
            same(made, BlockMask.from_dense(keep, block))
        assert torch.equal(made.to_dense(), dense)
    assert len(counted) == 2


@triton.jit
def by_table(b, h, i, j, table, weights, flags):
    near = tl.load(table + b * 400 + j) + h >= i // 3
    return (near & tl.load(flags + j)) | (tl.load(weights + h) * (i - j) > 100.5)


@triton.jit
def by_position(b, h, i, j):
    return (i - j) % 3 == 0


@pytest.mark.parametrize("sizes", [(300, 400), (130, 100)], ids=str)  # of more queries than keys: no captured tensor
def test_jit_functions(sizes: Any, counted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    table = torch.randint(0, 200, (400, 2), generator=generator).to(DEVICE).mT
    flags, weights = torch.rand(400, generator=generator) < 0.5, torch.randn(2, generator=generator)
    captured = (table, weights.bfloat16().to(DEVICE), flags.to(DEVICE))
    for function, tensors, heads in ((by_table, captured, 2), (by_position, (), 1)):
        arguments: Any = {"device": DEVICE, "mask_tensors": tensors, "block_size": (64, 128)}
        with diyfa.use_backend("cuda"), monkeypatch.context() as patches:
            made = block_mask(function, heads, heads, *sizes, **arguments)
            patches.setattr(masks, "_made_by_kernels", lambda *arguments: None)
            same(made, block_mask(function, heads, heads, *sizes, **arguments))
    assert len(counted) == (2 if sizes[0] <= sizes[1] else 1), "an offset by a negative position would leave the tensor"


@triton.jit
def by_row_and_pair(b, h, i, j, rows, pairs):
    return tl.load(rows + i) & tl.load(pairs + i * 70 + j)


def test_jit_functions_read_for_pairs_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_interpreting():
        pytest.skip("only the interpreter shows each address")
    keep, accesses = torch.rand(70, 70, generator=torch.Generator().manual_seed(5)) < 0.5, guard(monkeypatch)
    rows = torch.arange(70) % 3 > 0
    with diyfa.use_backend("cuda"):
        made = block_mask(by_row_and_pair, 1, 1, 70, 70, mask_tensors=(rows, keep), device=DEVICE)
    assert accesses() and torch.equal(made.to_dense()[0, 0], keep & rows[:, None])


def test_an_empty_captured_tensor_is_not_read(counted: list[Any]) -> None:
    """It has no memory, so even a load that a mask leaves out would read somewhere else."""
    with diyfa.use_backend("cuda"), pytest.raises(IndexError):
        block_mask(by_row_and_pair, 1, 1, 70, 70, mask_tensors=(ids(0) > 0, ids(4900) > 0), device=DEVICE)
    assert not counted


@triton.jit
def distance(b, h, i, j):
    return i - j


def test_a_jit_function_of_no_booleans_is_refused() -> None:
    with diyfa.use_backend("cuda"), pytest.raises(TypeError, match="must return a boolean tensor"):
        block_mask(distance, 1, 1, 100, 100, device=DEVICE)


def test_what_kernels_do_not_make(counted: list[Any]) -> None:
    """Other functions, more queries than keys, tensors on other devices or too short ones go to PyTorch's operators."""
    with diyfa.use_backend("cuda"):
        for function in (masks.dilated(3, 2), masks.any_of(masks.causal, lambda b, h, i, j: j > i)):
            assert terms_of(function) is None
            block_mask(function, 1, 1, 100, 100, device=DEVICE)
        block_mask(masks.document(ids(100)), 1, 1, 150, 100, device=DEVICE)
        long = masks.any_of(*[masks.first_keys(n) for n in range(1, 14)])
        assert block_mask(long, 1, 1, 70, 70, device=DEVICE).to_dense()[..., :13].all()
        with pytest.raises((IndexError, RuntimeError)):
            block_mask(masks.document(torch.zeros(50, dtype=torch.int64)), 1, 1, 100, 100)
    assert not counted


def test_a_backend_without_the_kernel_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    with diyfa.use_backend("cpu"):
        assert not hasattr(registry.load_backend("cpu"), "build_mask")
        assert block_mask(masks.causal, 1, 1, 100, 100, device="cpu").density() == 1


def test_terms_of_combinations() -> None:
    function = masks.all_of(masks.causal, masks.any_of(masks.first_keys(4), masks.sliding_window(100)))
    names = [[part.name for part in term] for term in terms_of(function) or ()]
    assert names == [["band", "before"], ["band", "band"]]
    assert terms_of(masks.all_of(*[masks.prefix_lm(3)] * 99)) is None  # and not 2 ** 99 of them
