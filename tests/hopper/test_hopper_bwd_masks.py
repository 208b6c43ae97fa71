"""The Hopper backward with a block mask, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hopper_gluon import need_hopper_gluon

need_hopper_gluon()

from hopper_interpreted import interpret_backward, interpreted_only, run_backward  # noqa: E402

import diyfa  # noqa: E402
from diyfa import BlockMask, registry  # noqa: E402
from diyfa.backends.cuda.attention import bwd_partials  # noqa: E402
from diyfa.backends.cuda.hopper import bwd_configs  # noqa: E402
from diyfa.problem import AttentionProblem  # noqa: E402
from diyfa.reference import reference_attention  # noqa: E402
from diyfa.testing import AttentionCase  # noqa: E402

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
    case("sparse", "11:128:0.02", seqlen_q=256, seqlen_k=600, heads=1),
    case("samples", "b1:128:0.6", batch=2, seqlen_q=130, seqlen_k=200, heads=1),
    case("empty_sinks", "11:128:0", sinks=True, seqlen_q=70, head_dim=128, seqlen_k=200),
    case("full_ragged", "11:128:1", seqlen_k=333, seqlen_q=190, head_dim=128, heads=1),
    case(
        "sinks_softcap", "1h:128:0.6", sinks=True, softcap=3.0, sm_scale=-1.0, head_dim=128, seqlen_q=200, seqlen_k=200
    ),
    case("one_key", "11:128:0.7", seqlen_k=1),
]
MORE = [  # each takes seconds; the others have what they have, too
    case("samples_and_heads", "bh:128:0.5", batch=2, heads=2, heads_kv=2, seqlen_q=200, seqlen_k=300),
    case("columns_80", "11:128:0.6", head_dim=80, heads=1, seqlen_q=200, seqlen_k=300),
    case("empty", "11:128:0", seqlen_q=140, seqlen_k=200),
    case("full", "11:128:1", seqlen_k=384, heads=1),
    case("few_queries", "11:64x128:0.7", seqlen_q=65, seqlen_k=500, head_dim=128),
    case("columns_40", "b1:128:0.4", batch=2, head_dim=40, heads=4, heads_kv=2, seqlen_q=130, view="transposed"),
]


@pytest.mark.parametrize(
    "case",
    [*(pytest.param(c, id=c.name) for c in CASES), *(pytest.param(c, id=c.name, marks=pytest.mark.slow) for c in MORE)],
)
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


@pytest.mark.parametrize("head_dim", [64, 128])
def test_empty_blocks_are_not_read(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies in them. Of the keys, some are seen by one query, some by none."""
    interpret_backward(monkeypatch, seed=2)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, n, head_dim, generator=generator).bfloat16() for n in (300, 420, 420, 300))
    keep = torch.zeros(300, 420, dtype=torch.bool)
    keep[:130, 128:256] = True  # a full block, and one with two rows
    keep[7, 300] = keep[60:120, 419] = True
    options = {"mask": BlockMask.from_dense(keep)}

    def differentiated(attend: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = tuple(x.clone().requires_grad_() for x in leaves)
        return torch.autograd.grad(attend(*leaves, **options), leaves, dout.to(leaves[0].dtype))

    expected = differentiated(reference_attention, *(x.double() for x in (q, k, v)))
    for x in (k, v):
        x[:, :, :128] = float("nan")
    for x in (q, dout):
        x[:, :, 256:] = float("nan")
    found = differentiated(partial(diyfa.flash_attention, backend="cuda", variant="sm90"), q, k, v)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-2, atol=2e-2)
    dq, dk, dv = found
    assert not dq[:, :, 130:].any() and not dk[:, :, :128].any() and not dv[:, :, 301:419].any()


PROBLEM = AttentionProblem(
    "cuda", "sm_90", "bfloat16", "bhsd", 2, 16, 16, 4096, 4096, 128, 128, needs_grad=True, mask=(128, 128)
)
REFUSED: dict[str, dict[str, Any]] = {
    "gradients of seq_lens beside a block mask": {"seq_lens": True},
    "no fixed order beside a block mask": {"deterministic": True},
    "equal head dims up to 128": {"head_dim": 192, "head_dim_v": 128},
    "tiles of 64 queries and 128 keys": {"mask": (128, 64)},
    "tiles of 128 queries and 128 keys": {"mask": (64, 128), "head_dim": 64, "head_dim_v": 64},
    "no registers for a softcap beside a block mask up to head_dim 64": {
        "head_dim": 64,
        "head_dim_v": 64,
        "softcap": 3.0,
    },
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
