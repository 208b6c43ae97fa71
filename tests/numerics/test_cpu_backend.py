"""What only the CPU backend promises: memory that grows with S, float64, trainable speed, matmul."""

from __future__ import annotations

import pytest
import torch
from subprocesses import run_python

import diyfa
from diyfa import registry
from diyfa.problem import AttentionProblem
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
run(16384)
print(peak() - start)
"""


def test_memory_does_not_grow_with_the_square() -> None:
    """Forward and backward at S = 16384: a score matrix would take 1 GiB, a call stays under a 10th of it."""
    assert int(run_python(PEAK)) < 16384**2 * 4 / 10


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


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 3), (0, 0), (-1, 4), (7, -1)])
@pytest.mark.parametrize("lens", [None, (40, 23, 1)])
def test_visibility_agrees_with_the_reference(window: tuple[int, int], lens: tuple[int, ...] | None) -> None:
    """Skipped tiles hide everything, unmasked tiles show everything, and masks are those of the oracle."""
    from diyfa.backends.cpu import tiles
    from diyfa.reference import visible_keys

    for seqlen_q, seqlen_k in ((40, 40), (17, 40), (60, 40)):
        problem = AttentionProblem("cpu", "cpu", "float32", "bhsd", 3, 1, 1, seqlen_q, seqlen_k, 8, 8, *window)
        seq_lens = None if lens is None else torch.tensor(lens, dtype=torch.int32)
        visibility = tiles.Visibility(problem, seq_lens)
        expected, _, _ = visible_keys(3, seqlen_q, seqlen_k, window, seq_lens)
        for m0 in range(0, seqlen_q, 16):
            m1 = min(m0 + 16, seqlen_q)
            start, stop = visibility.key_range(m0, m1)
            for n0 in range(0, seqlen_k, 8):
                want = expected[:, :, m0:m1, n0 : n0 + 8]
                if n0 >= stop or n0 + 8 <= start:
                    assert not bool(want.any())
                    continue
                seen = visibility.mask(m0, m1, n0, n0 + 8)
                assert bool(want.all()) if seen is None else torch.equal(seen.expand_as(want), want)


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_float64_is_exact_to_float64(variant: str) -> None:
    q, k, v = (torch.randn(1, 2, 700, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    options = {"causal": True, "return_lse": True}
    got = diyfa.flash_attention(q, k, v, variant=variant, backend="cpu", **options)
    want = diyfa.reference_attention(q, k, v, **options)
    assert got[1].dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(x, (q, k, v), (torch.ones_like(x[0]), torch.ones_like(x[1]))) for x in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)


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


FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "window_softcap": {"window": (40, 3), "softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])},
    "alibi": {"alibi_slopes": torch.tensor([[0.5, 0.1, 0.02, 0.3], [0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]])},
}


def agrees_in_float64(attend, reference, leaves, lse_shape) -> None:
    """out, lse and every gradient from both, over several tiles, to the last digits of float64."""
    got, want = attend(*leaves), reference(*leaves)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    upstream = (torch.randn_like(got[0]), torch.randn(lse_shape, dtype=torch.float64))
    grads = [torch.autograd.grad(x, leaves, upstream) for x in (got, want)]
    for a, b in zip(*grads, strict=True):
        # The gradient of the sinks is float32, as they are; the reference adds that of each sequence in float32.
        single = a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=1e-6 if single else 1e-10, atol=1e-5 if single else 1e-10)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("variant", ["v1", "v2"])
@pytest.mark.parametrize("name", FEATURES)
def test_features_are_exact_to_float64(name: str, variant: str, dropout_p: float) -> None:
    torch.manual_seed(0)
    q, k, v, bias = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 4, 300, 16), (3, 2, 280, 16), (3, 2, 280, 8), (3, 1, 300, 280))
    )
    lens = torch.tensor([280, 33, 1], dtype=torch.int32)
    options = {"dropout_p": dropout_p, "rng_state": torch.tensor([123, -4]), "seq_lens": lens, "return_lse": True}
    options |= FEATURES[name]
    leaves = [q, k, v, bias]
    if "sinks" in options:
        leaves.append(options["sinks"].requires_grad_())
    agrees_in_float64(
        lambda q, k, v, bias, *_: diyfa.flash_attention(
            q, k, v, attn_bias=bias, variant=variant, backend="cpu", **options
        ),
        lambda q, k, v, bias, *_: diyfa.reference_attention(q, k, v, attn_bias=bias, **options),
        leaves,
        (3, 4, 300),
    )


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("variant", ["v1", "v2"])
@pytest.mark.parametrize("name", FEATURES)
def test_packed_sequences_are_exact_to_float64(name: str, variant: str, dropout_p: float) -> None:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((403, 4, 16), (315, 2, 16), (315, 2, 8))
    )
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 0, 300, 400], [0, 3, 283, 310]))
    options = {"dropout_p": dropout_p, "rng_state": torch.tensor([123, -4]), "return_lse": True, **FEATURES[name]}
    leaves = [q, k, v]
    if "sinks" in options:
        leaves.append(options["sinks"].requires_grad_())
    agrees_in_float64(
        lambda q, k, v, *_: diyfa.flash_attention_varlen(
            q, k, v, cu_q, cu_k, 300, 280, variant=variant, backend="cpu", **options
        ),
        lambda q, k, v, *_: diyfa.reference_attention(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, layout="thd", **options
        ),
        leaves,
        (4, 403),
    )


def test_results_do_not_depend_on_the_run() -> None:
    q, k, v = (torch.randn(2, 4, 300, 32, requires_grad=True) for _ in range(3))

    def run():
        out = diyfa.flash_attention(q, k, v, causal=True, deterministic=True, backend="cpu")
        return out, *torch.autograd.grad(out.sin().sum(), (q, k, v))

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 1), (17, 33, 65), (600, 70, 1100), (64, 64, 0), (0, 5, 7)])
def test_matmul(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype).t()  # b is not contiguous
    c = diyfa.triton_matmul(a, b, backend="cpu")
    low = torch.float16 if dtype == torch.float32 else dtype  # as documented: float32 computes in float16
    assert c.shape == (m, n) and c.dtype == low
    exact = a.to(low).double() @ b.to(low).double()
    torch.testing.assert_close(c.double(), exact, rtol=torch.finfo(low).eps, atol=k * 2e-6)


def test_matmul_options() -> None:
    a, b = torch.randn(70, 90), torch.randn(90, 50)
    exact = a.double() @ b.double()
    precise = diyfa.triton_matmul(a, b, precision="ieee", backend="cpu")
    assert precise.dtype == torch.float32
    torch.testing.assert_close(precise.double(), exact, rtol=1e-5, atol=1e-5)
    tiled = diyfa.triton_matmul(a, b, 16, 32, 64, precision="ieee", backend="cpu")
    torch.testing.assert_close(tiled.double(), exact, rtol=1e-5, atol=1e-5)
    wide = diyfa.triton_matmul(a.half(), b.half(), out_dtype=torch.float32, backend="cpu")
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), a.half().double() @ b.half().double(), rtol=1e-5, atol=1e-5)


def test_matmul_gradients() -> None:
    a, b = torch.randn(20, 30, requires_grad=True), torch.randn(30, 10, requires_grad=True)
    got = torch.autograd.grad(diyfa.triton_matmul(a, b, precision="ieee", backend="cpu").sin().sum(), (a, b))
    want = torch.autograd.grad((a @ b).sin().sum(), (a, b))
    torch.testing.assert_close(got, want)


def test_configs_cover_every_problem() -> None:
    kernel = registry.load_backend("cpu").kernels[0]
    for batch in (1, 7, 1000):
        config = kernel.config(AttentionProblem("cpu", "cpu", "float32", "bhsd", batch, 8, 8, 64, 64, 32, 32))
        assert config.block_m >= 64 and config.block_n >= 64


def test_a_small_model_learns() -> None:
    """One attention layer learns to copy the token three places back, which only attention can do."""
    torch.manual_seed(0)
    vocabulary, seqlen, width = 12, 16, 32
    embed = torch.nn.Embedding(vocabulary, width)
    place = torch.nn.Parameter(torch.randn(seqlen, width) * 0.5)
    qkv, head = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, vocabulary)
    parameters = [*embed.parameters(), place, *qkv.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    for _ in range(100):
        tokens = torch.randint(vocabulary, (16, seqlen))
        q, k, v = qkv(embed(tokens) + place).view(16, seqlen, 3, 2, width // 2).unbind(2)
        out = diyfa.flash_attention_v2(q, k, v, causal=True, backend="cpu").flatten(2)
        loss = torch.nn.functional.cross_entropy(head(out)[:, 3:].flatten(0, 1), tokens[:, :-3].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.3  # guessing costs log(12) = 2.5
