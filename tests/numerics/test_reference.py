"""The oracle itself: against PyTorch's own attention in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import CASES

from diyfa.dropout import dropout_mask
from diyfa.reference import reference_attention, visible_keys


def doubles(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


def sdpa_agrees(q, k, v, mask, **options) -> None:
    """out and gradients equal those of F.scaled_dot_product_attention with an explicit mask."""
    layout = options.pop("layout", "bhsd")
    out = reference_attention(q, k, v, layout=layout, **options)
    tq, tk, tv = (x.transpose(1, 2) if layout == "bshd" else x for x in (q, k, v))
    expected = F.scaled_dot_product_attention(tq, tk, tv, attn_mask=mask, enable_gqa=True)
    expected = expected.transpose(1, 2) if layout == "bshd" else expected
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    dout = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_plain_and_causal_agree_with_sdpa(layout: str) -> None:
    shapes = ((2, 4, 13, 8), (2, 2, 13, 8), (2, 2, 13, 5))
    if layout == "bshd":
        shapes = tuple((b, s, h, d) for b, h, s, d in shapes)
    q, k, v = doubles(*shapes)
    sdpa_agrees(q, k, v, None, layout=layout)
    sdpa_agrees(q, k, v, torch.ones(13, 13, dtype=torch.bool).tril(), causal=True, layout=layout)


def test_bottom_right_alignment_window_bias_alibi_agree_with_sdpa() -> None:
    q, k, v = doubles((2, 2, 6, 8), (2, 2, 10, 8), (2, 2, 10, 8))
    sdpa_agrees(q, k, v, torch.ones(6, 10, dtype=torch.bool).tril(4), causal=True)
    band = torch.ones(6, 10, dtype=torch.bool).tril(4 + 1).triu(4 - 3)
    sdpa_agrees(q, k, v, band, window=(3, 1))
    bias = torch.randn(2, 1, 6, 10, dtype=torch.float64)
    sdpa_agrees(q, k, v, bias, attn_bias=bias)
    slopes = torch.tensor([0.5, 0.25])
    distance = (torch.arange(6)[:, None] + 4 - torch.arange(10)).abs()
    sdpa_agrees(q, k, v, -slopes.double()[:, None, None] * distance, alibi_slopes=slopes)


def test_seq_lens_equal_separate_calls() -> None:
    """A padded batch gives what each sample alone gives, whatever the padding holds."""
    q, k, v = (x.detach() for x in doubles((2, 2, 6, 8), (2, 2, 10, 8), (2, 2, 10, 8)))
    lens = torch.tensor([10, 4], dtype=torch.int32)
    for x in (q, k, v):
        x[1, :, 4:] = float("nan")
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = reference_attention(q, k, v, window=(2, 0), seq_lens=lens, return_lse=True)
    for b, (sq, sk) in enumerate(((6, 10), (4, 4))):
        alone, alone_lse = reference_attention(
            q[b : b + 1, :, :sq], k[b : b + 1, :, :sk], v[b : b + 1, :, :sk], window=(2, 0), return_lse=True
        )
        torch.testing.assert_close(out[b : b + 1, :, :sq], alone)
        torch.testing.assert_close(lse[b : b + 1, :, :sq], alone_lse)
    assert bool((out[1, :, 4:] == 0).all()) and bool((lse[1, :, 4:] == float("inf")).all())
    dout = torch.full_like(out, float("nan"))
    dout[0], dout[1, :, :4] = 1.0, 1.0
    for x, grad in zip((q, k, v), torch.autograd.grad(out, (q, k, v), dout), strict=True):
        assert bool(grad.isfinite().all())
        assert bool((grad[1, :, 4:] == 0).all()), x.shape


def test_sinks_are_an_extra_column() -> None:
    q, k, v = doubles((2, 2, 6, 8), (2, 2, 10, 8), (2, 2, 10, 8))
    sinks = torch.tensor([0.3, -1.0], requires_grad=True)
    out, lse = reference_attention(q, k, v, sinks=sinks, return_lse=True)
    scores = torch.cat([q @ k.mT * 8**-0.5, sinks.double()[None, :, None, None].expand(2, 2, 6, 1)], dim=-1)
    torch.testing.assert_close(out, scores.softmax(-1)[..., :-1] @ v)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    expected = (scores.softmax(-1)[..., :-1] @ v, scores.logsumexp(-1))
    got = torch.autograd.grad((out, lse), sinks, (dout, dlse))
    torch.testing.assert_close(got, torch.autograd.grad(expected, sinks, (dout, dlse)))


def test_softcap_and_dropout() -> None:
    q, k, v = doubles((1, 2, 6, 8), (1, 2, 10, 8), (1, 2, 10, 8))
    scores = 2.0 * torch.tanh(q @ k.mT * 0.7 / 2.0)
    torch.testing.assert_close(reference_attention(q, k, v, sm_scale=0.7, softcap=2.0), scores.softmax(-1) @ v)
    keep = dropout_mask(1, 2, 6, 10, 0.4, seed=5, offset=1)
    expected = ((q @ k.mT * 8**-0.5).softmax(-1) * keep / 0.6) @ v
    got, lse = reference_attention(q, k, v, dropout_p=0.4, rng_state=torch.tensor([5, 1]), return_lse=True)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(lse, (q @ k.mT * 8**-0.5).logsumexp(-1))


@pytest.mark.parametrize("alibi", [1, 2])
def test_packed_sequences_equal_separate_calls(alibi: int) -> None:
    """Sequence b of a packed batch gives what it gives alone as sample b, whatever lies beyond the sequences."""
    lens_q, lens_k, heads = (0, 5, 3, 4), (4, 7, 0, 2), 4
    q, k, v = (x.detach() for x in doubles((14, heads, 8), (16, 2, 8), (16, 2, 6)))
    cu_q, cu_k = (torch.tensor([1, *(1 + sum(lens[: i + 1]) for i in range(4))]) for lens in (lens_q, lens_k))
    for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k)):
        x[:1], x[int(cu[-1]) :] = float("nan"), float("nan")
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    slopes, sinks = torch.rand((heads,) if alibi == 1 else (4, heads)), torch.randn(heads)
    options = {"window": (4, 1), "sinks": sinks, "dropout_p": 0.3, "rng_state": torch.tensor([9, 4]), "softcap": 2.0}
    out, lse = reference_attention(
        q, k, v, alibi_slopes=slopes, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, layout="thd", return_lse=True, **options
    )
    covered = torch.zeros(14, dtype=torch.bool)
    for b in range(4):
        rows, keys = slice(int(cu_q[b]), int(cu_q[b + 1])), slice(int(cu_k[b]), int(cu_k[b + 1]))
        covered[rows] = True
        # As sample b of a batch of equals, so that dropout and slopes are those of b.
        alone = (x.detach()[s].expand(b + 1, -1, -1, -1) for x, s in ((q, rows), (k, keys), (v, keys)))
        sample = slopes if alibi == 1 else slopes[: b + 1]
        want, want_lse = reference_attention(*alone, alibi_slopes=sample, layout="bshd", return_lse=True, **options)
        torch.testing.assert_close(out[rows], want[b])
        torch.testing.assert_close(lse[:, rows], want_lse[b])
    assert bool((out[~covered] == 0).all()) and bool((lse[:, ~covered] == float("inf")).all())
    dout = torch.full_like(out, float("nan"))
    dout[covered] = 1.0
    for x, grad in zip((q, k, v), torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), strict=True):
        assert bool(grad.isfinite().all()), x.shape
    assert int(torch.autograd.grad(out[covered].sum(), q)[0][~covered].count_nonzero()) == 0


def test_reference_refuses_what_does_not_fit() -> None:
    q, cu = torch.zeros(4, 1, 8), torch.tensor([0, 4])
    for options, pattern in (
        ({"layout": "thd"}, "needs cu_seqlens_q and cu_seqlens_k"),
        ({"layout": "thd", "cu_seqlens_q": cu, "cu_seqlens_k": cu, "attn_bias": torch.zeros(4, 4)}, "no attn_bias"),
        ({"cu_seqlens_q": cu, "cu_seqlens_k": cu}, "belong to the layout 'thd', got 'bhsd'"),
        ({"dropout_p": 0.5}, "needs rng_state"),
        ({"dropout_p": 0.5, "rng_state": cu[:1]}, r"must have shape \(2,\), or \(6,\)"),
        ({"dropout_p": 0.5, "rng_state": cu.int()}, "must be int64"),
        ({"dropout_p": 0.5, "rng_state": 3}, "must be a torch.Tensor, got int"),
    ):
        with pytest.raises((ValueError, TypeError), match=pattern):
            reference_attention(q, q, q, **options)


def test_rows_without_keys() -> None:
    q, k, v = doubles((1, 1, 5, 8), (1, 1, 2, 8), (1, 1, 2, 8))
    out, lse = reference_attention(q, k, v, causal=True, return_lse=True)
    assert bool((out[:, :, :3] == 0).all()) and bool((lse[:, :, :3] == float("inf")).all())
    out, lse = reference_attention(q, k, v, causal=True, return_lse=True, sinks=torch.tensor([0.5]))
    assert bool((out[:, :, :3] == 0).all()) and bool((lse[:, :, :3] == 0.5).all())
    visible, valid_q, _ = visible_keys(1, 5, 2, (-1, 0))
    assert visible.sum().item() == 3 and bool(valid_q.all())


def test_computed_dtype() -> None:
    q = torch.randn(1, 1, 4, 8, dtype=torch.float16)
    out, lse = reference_attention(q, q, q, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)
    out, lse = reference_attention(q, q, q, return_lse=True, dtype=torch.float64)
    assert (out.dtype, lse.dtype) == (torch.float64, torch.float64)


def test_cases_cover_every_feature() -> None:
    """The table names each optional argument at least once with a backward pass."""
    attributes = "causal sm_scale seq_lens softcap alibi bias sinks heads_kv head_dim_v dropout_p lens_q packing slack"
    for attribute in attributes.split():
        assert any(getattr(case, attribute) for case in CASES.values()), attribute
    assert {c.dtype for c in CASES.values()} == {"float16", "bfloat16", "float32"}
    assert {c.view for c in CASES.values()} == {"contiguous", "transposed", "packed", "sliced"}
    assert {c.layout for c in CASES.values()} == {"bhsd", "bshd", "3d", "thd"}


def test_any_number_of_leading_dimensions() -> None:
    """What torch.matmul takes: (S, D), and batches of batches."""
    q, k, v = (torch.randn(2, 3, 4, s, 8) for s in (5, 7, 7))
    out, lse = reference_attention(q, k, v, causal=True, return_lse=True)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])
    assert torch.equal(out[1], reference_attention(q[1], k[1], v[1], causal=True))
    single, single_lse = reference_attention(q[1, 2, 3], k[1, 2, 3], v[1, 2, 3], causal=True, return_lse=True)
    torch.testing.assert_close((single, single_lse), (out[1, 2, 3], lse[1, 2, 3]))


@pytest.mark.parametrize(("layout", "shape"), [("bhsd", (8,)), ("bshd", (5, 2, 8)), ("bshd", (2, 3, 5, 2, 8))])
def test_ranks_that_do_not_fit_the_layout(layout: str, shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    with pytest.raises(ValueError, match="expected q, k, v of one rank, 4 for 'bshd' and at least 2 for 'bhsd', got"):
        reference_attention(x, x, x, layout=layout)
