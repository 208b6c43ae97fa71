"""What only the CPU backend promises: memory that grows with S, float64, trainable speed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from subprocesses import run_after_torch

import diyfa
from diyfa.problem import AttentionProblem
from diyfa.testing import AttentionCase, assert_within_budget, attention_function, make_inputs, run_case
from diyfa.yardstick import plain_flash_attention

PEAK = """
import resource, torch, diyfa
torch.set_num_threads(1)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def run(seqlen):
    q, k, v = (torch.randn(1, 1, seqlen, 16, requires_grad=True) for _ in range(3))
    for variant in ("v1", "v2"):
        diyfa.flash_attention(q, k, v, window=(512, 512), variant=variant, backend="cpu").sum().backward()
    packed = [x.detach()[0].transpose(0, 1).requires_grad_() for x in (q, k, v)]
    cu = torch.tensor([0, 7, seqlen], dtype=torch.int32)
    options = {"window": (256, 0), "dropout_p": 0.1, "backend": "cpu"}
    diyfa.flash_attention_varlen(*packed, cu, cu, seqlen, seqlen, **options).sum().backward()

run(1024)
start = peak()
run(8192)
print(peak() - start)
"""


def test_memory_does_not_grow_with_the_square() -> None:
    """Forward and backward at S = 8192: a score matrix would take 256 MiB, a call stays under a 10th of it."""
    assert int(run_after_torch(PEAK)) < 8192**2 * 4 / 10


def test_blocks_outside_the_window_are_skipped() -> None:
    """A narrow window costs a fraction of the full matrix: counted in tile products, not in seconds."""
    from diyfa.backends.cpu import tiles

    problem = AttentionProblem("cpu", "cpu", "float32", "bhsd", 1, 1, 1, 4096, 4096, 16, 16, 100, 0)
    visibility = tiles.Visibility(problem, None)
    widths = [stop - start for start, stop in (visibility.key_range(m, m + 128) for m in range(0, 4096, 128))]
    assert max(widths) <= 128 + 100
    everything = tiles.Visibility(problem.replace(window_left=-1, window_right=-1), None)
    assert everything.key_range(0, 128) == (0, 4096)
    assert everything.mask(0, 128, 0, 128) is None  # nothing to mask: no mask is built
    assert visibility.mask(128, 256, 0, 128) is not None


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_a_single_query_is_as_exact_as_several(head_dim: int) -> None:
    """BLAS sums the product of one row in another order, and worse. The yardstick has four rows here: with one it
    would call the same product."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(8, 8, rows, head_dim) for rows in (1, 300, 300, 1))
    four, dout_four = (torch.cat([x, *[y] * 3], 2) for x, y in ((q, q), (dout, torch.zeros_like(dout))))

    def differentiated(attend, dout: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attend(*leaves)
        dq, dk, dv = torch.autograd.grad(out, leaves, dout)
        return out.detach()[:, :, :1], dq[:, :, :1], dk, dv

    scale = {"sm_scale": 1.0}
    exact = differentiated(
        lambda q, k, v: diyfa.reference_attention(q, k, v, **scale), *(x.double() for x in (dout, q, k, v))
    )
    plain = differentiated(lambda q, k, v: plain_flash_attention(q, k, v, **scale), dout_four, four, k, v)
    got = differentiated(lambda q, k, v: diyfa.flash_attention(q, k, v, backend="cpu", **scale), dout, q, k, v)
    for x, other, want in zip(got, plain, exact, strict=True):
        assert rms(x - want) <= rms(other - want)
    with diyfa.use_backend("cpu"):
        out = diyfa.flash_attn_with_kvcache(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=1.0)
    assert rms(out.transpose(1, 2) - exact[0]) <= rms(plain[0] - exact[0])


DENSE = {"batch": 3, "seqlen_q": 300, "seqlen_k": 280, "seq_lens": (280, 33, 1), "bias": "b1qk"}
PACKED = {"layout": "thd", "lens_q": (0, 300, 100), "lens_k": (3, 280, 27), "slack": 3}
FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "window_softcap": {"window": (40, 3), "softcap": 2.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": "bh"},
}


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("variant", ["v1", "v2"])
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("sizes", [DENSE, PACKED], ids=["dense", "packed"])
def test_float64_is_exact_to_float64(sizes: dict[str, Any], name: str, variant: str, dropout_p: float) -> None:
    """out, lse and every gradient, over several tiles."""
    heads = {"heads": 4, "heads_kv": 2, "head_dim": 16, "head_dim_v": 8, "dtype": "float64"}
    case = AttentionCase(name, **heads, **sizes, **FEATURES[name], dropout_p=dropout_p)
    results = run_case(attention_function(case, backend="cpu", variant=variant), make_inputs(case))
    assert results.out.dtype == results.lse.dtype == torch.float64
    assert_within_budget(results, case)


def test_results_do_not_depend_on_the_run() -> None:
    q, k, v = (torch.randn(2, 4, 300, 32, requires_grad=True) for _ in range(3))

    def run():
        out = diyfa.flash_attention(q, k, v, causal=True, deterministic=True, backend="cpu")
        return out, *torch.autograd.grad(out.sin().sum(), (q, k, v))

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))
