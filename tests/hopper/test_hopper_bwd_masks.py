"""The Hopper backward with a block mask, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import hopper_gluon  # noqa: F401
import pytest
import torch
from hopper_interpreted import interpret_backward, interpreted_only, run_backward

import diyfa
from diyfa import BlockMask, registry
from diyfa.backends.cuda.attention import bwd_partials
from diyfa.backends.cuda.attention.long_blocks import long_blocks_launch
from diyfa.backends.cuda.hopper import bwd_configs, bwd_launch
from diyfa.backends.cuda.runtime.passes import launch_each
from diyfa.problem import AttentionProblem, AttentionTensors
from diyfa.reference import reference_attention
from diyfa.testing import AttentionCase

pytestmark = interpreted_only


def case(name: str, mask: str, **changes) -> AttentionCase:
    sizes = {"batch": 1, "heads": 2, "heads_kv": 1, "seqlen_q": 300, "seqlen_k": 420, "head_dim": 64}
    return AttentionCase(name, mask=mask, **{**sizes, "dtype": "bfloat16", **changes})


CASES = [
    case("grouped", "1h:128:0.6"),
    # A block of the mask has two of the kernel's blocks of queries. Of the last one the second has queries or none; key
    # blocks of the latter see it whole, in part and not at all.
    case("halves", "1h:128:0.6", head_dim=128, seqlen_q=330, seqlen_k=200),
    case("half_a_block", "1h:128:0.6", head_dim=128, seqlen_q=310, seqlen_k=256, seed=1),
    case("blocks_of_64_queries", "11:64x128:0.5", head_dim=128, dtype="float16", layout="bshd", seqlen_k=200),
    case("sparse_80", "11:128:0.02", seqlen_q=256, seqlen_k=600, heads=1, head_dim=80, view="transposed"),
    case("samples", "bh:128:0.6", batch=2, seqlen_q=130, seqlen_k=200, heads_kv=2),
    case("empty_sinks", "11:128:0", sinks=True, seqlen_q=70, head_dim=128, seqlen_k=200),
    case("full_ragged", "11:128:1", seqlen_k=333, seqlen_q=190, head_dim=128, heads=1),
    case(
        "sinks_softcap", "1h:128:0.6", sinks=True, softcap=3.0, sm_scale=-1.0, head_dim=128, seqlen_q=200, seqlen_k=200
    ),
    case("one_key", "11:128:0.7", seqlen_k=1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients(case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = interpret_backward(monkeypatch, seed=sum(case.name.encode()) % 7)
    assert not run_backward(case)
    assert kernel.launches == 1


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2, 3, 4, 5))])
def test_every_interleaving(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group's heads have lists of their own, and are divided among programs."""
    monkeypatch.setattr(bwd_partials, "count_subgroups", lambda *_: 2)
    kernel = interpret_backward(monkeypatch, seed=seed, interleave=True, multiprocessors=3)
    assert not run_backward(case("grouped", "1h:128:0.5", heads=4, seqlen_q=260, seqlen_k=200))
    assert kernel.launches == 1


def assert_gradients(
    inputs: list[torch.Tensor], dout: torch.Tensor, keep: torch.Tensor, expected: list[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Require the gradients of q, k and v, by default the reference's, and return them."""
    options = {"mask": BlockMask.from_dense(keep)}

    def differentiated(attend: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> list[torch.Tensor]:
        leaves = tuple(x.clone().requires_grad_() for x in leaves)
        return list(torch.autograd.grad(attend(*leaves, **options), leaves, dout.to(leaves[0].dtype)))

    if expected is None:
        expected = differentiated(reference_attention, *(x.double() for x in inputs))
    found = differentiated(partial(diyfa.flash_attention, backend="cuda", variant="sm90"), *inputs)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=2e-2, atol=2e-2)
    return found


@pytest.mark.parametrize("head_dim", [64, 128])
def test_empty_blocks_are_not_read(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies in them. Of the keys, some are seen by one query, some by none."""
    interpret_backward(monkeypatch, seed=2)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, n, head_dim, generator=generator).bfloat16() for n in (300, 420, 420, 300))
    keep = torch.zeros(300, 420, dtype=torch.bool)
    keep[:130, 128:256] = True  # a full block, and one with two rows
    keep[7, 300] = keep[60:120, 419] = True
    expected = assert_gradients([q, k, v], dout, keep)
    for x in (k, v):
        x[:, :, :128] = float("nan")
    for x in (q, dout):
        x[:, :, 256:] = float("nan")
    dq, dk, dv = assert_gradients([q, k, v], dout, keep, expected)
    assert not dq[:, :, 130:].any() and not dk[:, :, :128].any() and not dv[:, :, 301:419].any()


def windows(heads: int, n_blocks: int, rows: tuple[int, ...]) -> torch.Tensor:
    """Return (heads, n, n) blocks of 128: the diagonal, and in head h what rows[h] says, a long block of keys."""
    blocks = torch.eye(n_blocks, dtype=torch.bool).repeat(heads, 1, 1)
    for h, j in enumerate(rows):
        blocks[h, :, j] = True
    return blocks


@pytest.mark.parametrize("subgroups", [1, 2])
def test_long_key_blocks_come_first(subgroups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key block is taken once: also those of interleaved heads, and of heads whose group is divided."""
    monkeypatch.setattr(bwd_partials, "count_subgroups", lambda *_: subgroups)
    taken = []
    find_long = bwd_launch.long_blocks_launch

    def watched(problem: Any, tensors: Any, long_blocks: torch.Tensor, sizes: Any) -> Any:
        taken.append(long_blocks)
        return find_long(problem, tensors, long_blocks, sizes)

    monkeypatch.setattr(bwd_launch, "long_blocks_launch", watched)
    kernel = interpret_backward(monkeypatch, seed=4, multiprocessors=3)
    generator = torch.Generator().manual_seed(1)
    q, dout = (torch.randn(1, 6, 640, 64, generator=generator).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, 3, 640, 64, generator=generator).bfloat16() for _ in range(2))
    keep = windows(6, 5, (4, 4, 0, 0, 2, 2)).repeat_interleave(128, 1).repeat_interleave(128, 2)
    assert_gradients([q, k, v], dout, keep[None])
    assert kernel.launches == 1 and taken[0][0] == 3 * subgroups


@pytest.mark.parametrize("interleaved_heads", [1, 2, 4])
@pytest.mark.parametrize("group_size", [1, 2])
def test_which_key_blocks_are_long(interleaved_heads: int, group_size: int) -> None:
    """Those with more than twice the mean of their head, by the numbers that `locate_key_block` has.

    Samples and heads have masks of their own, with full and partial blocks. One head sees nothing."""
    generator = torch.Generator().manual_seed(interleaved_heads)
    batch, heads_kv, nq, nk = 2, 2, 20, 150  # more key blocks than one step of the kernel has
    heads = batch * heads_kv
    blocks = torch.rand(batch, heads_kv * group_size, nq, nk, generator=generator) < 0.05
    blocks[0, :group_size, :, 7] = blocks[1, group_size:, 5:, 149] = True
    blocks[0, group_size:] = blocks[1, :group_size] = False
    blocks[1, :group_size, :, ::2] = True  # exactly twice the mean: none is long
    keep = blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)
    keep[:, :, ::128] = False  # every other block is partial
    keep = keep[:, :, :-9, :-5]  # the last blocks have fewer queries and keys
    mask = BlockMask.from_dense(keep, block_size=64)
    problem = PROBLEM.replace(
        batch=batch, heads_q=heads_kv * group_size, heads_kv=heads_kv, seqlen_q=keep.shape[2], seqlen_k=keep.shape[3],
        mask=(64, 64),
    )  # fmt: skip
    q = torch.zeros(batch, heads_kv * group_size, 1, 64)
    tensors = AttentionTensors(q, q, q, 1.0, mask_blocks=mask.blocks, mask_bits=mask.bits)
    found = torch.full((1 + 2 * heads * nk,), -1, dtype=torch.int32)
    found[0] = 0
    sizes = {"group_size": group_size, "interleaved_heads": interleaved_heads}
    launch_each([long_blocks_launch(problem, tensors, found, sizes)])
    n_seen = blocks.view(heads, group_size, nq, nk).sum((1, 2)).double()
    is_long = n_seen > 2 * n_seen.mean(1, keepdim=True)
    in_order = [(h, j) for h in range(heads - interleaved_heads) for j in range(nk)]
    in_order += [(h, j) for j in range(nk) for h in range(heads - interleaved_heads, heads)]
    numbers = [i for i, (h, j) in enumerate(in_order) if is_long[h, j]]
    assert numbers and sorted(found[1 : 1 + found[0]].tolist()) == numbers
    assert found[1 + heads * nk :].nonzero()[:, 0].tolist() == numbers


PROBLEM = AttentionProblem(
    "cuda", "sm_90", "bfloat16", "bhsd", 2, 16, 16, 4096, 4096, 128, 128, needs_grad=True, mask=(128, 128)
)
REFUSED: dict[str, dict[str, Any]] = {
    "gradients of seq_lens beside a block mask": {"seq_lens": True},
    "no fixed order beside a block mask": {"deterministic": True},
    "equal head dims up to 128": {"head_dim": 192, "head_dim_v": 128},
    "tiles of 64 queries and 128 keys": {"mask": (128, 64)},
    "tiles of 128 queries and 128 keys": {"mask": (64, 128), "head_dim": 64, "head_dim_v": 64},
    "no registers for a softcap beside a block mask": {"head_dim": 64, "head_dim_v": 64, "softcap": 3.0},
    "gradients of alibi beside a block mask": {"alibi": True},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_refuses(words: str) -> None:
    for taken in ({}, {"mask": (64, 128)}, {"softcap": 3.0}, {"head_dim": 64, "head_dim_v": 64}):
        assert bwd_configs.refuses(PROBLEM.replace(**taken)) is None
    assert words in (bwd_configs.refuses(PROBLEM.replace(**REFUSED[words])) or "")


def test_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bwd_configs, "environment_refusal", lambda: None)
    backend = registry.load_backend("cuda")
    assert registry.choose("attention_bwd", PROBLEM, backend).name == "sm90"
    assert registry.choose("attention_bwd", PROBLEM.replace(mask=(64, 64)), backend).name == "split"
