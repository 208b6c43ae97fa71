"""Bad input raises the documented error before anything is launched, and says what was expected and what came."""

from __future__ import annotations

import gc
import importlib.util
from contextlib import nullcontext
from dataclasses import replace
from random import Random

import pytest
import torch

import diyfa
from diyfa import registry, validation

F16, I64 = torch.float16, torch.int64


def qkv(b=2, h=4, s=8, d=16, hk=None, sk=None, dtype=F16, device="cpu"):
    kv = (b, hk or h, sk or s, d)
    return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in ((b, h, s, d), kv, kv))


def lens(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


Q, K, V = qkv()
META = torch.zeros(2, 4, 8, 16, dtype=F16, device="meta")
# name: (positional arguments, keyword arguments, exception, pattern)
ATTENTION = {
    "not_a_tensor": (([1.0], K, V), {}, TypeError, r"q must be a torch\.Tensor, got list"),
    "sparse": ((Q.to_sparse(), K, V), {}, TypeError, r"q must be a dense tensor, got layout torch\.sparse_coo"),
    "jagged": (
        tuple(torch.nested.nested_tensor([Q[0], Q[1]], layout=torch.jagged) for _ in range(3)), {},
        TypeError, r"q must be a dense tensor, got layout torch\.jagged",
    ),
    "2d": ((Q[0, 0], K[0, 0], V[0, 0]), {}, ValueError, r"Expected 3D or 4D tensors"),
    "mixed_ranks": ((Q, K[0], V[0]), {}, ValueError, r"Expected 3D or 4D tensors of one rank"),
    "int_dtype": (qkv(dtype=torch.int32), {}, TypeError, r"Unsupported dtype torch\.int32"),
    "k_dtype": ((Q, K.float(), V), {}, TypeError, r"dtypes must match"),
    "v_dtype": ((Q, K, V.bfloat16()), {}, TypeError, r"dtypes must match"),
    "k_device": ((Q, META, V), {}, ValueError, r"same device: q is on cpu, k on meta"),
    "head_dim_0": (qkv(d=0), {}, ValueError, r"Unsupported head_dim: expected 1 to 576 for q and k, got 0"),
    "head_dim_577": (qkv(d=577), {}, ValueError, r"Unsupported head_dim: expected 1 to 576 for q and k, got 577"),
    "head_dim_v_0": ((Q, K, V[..., :0]), {}, ValueError, r"Unsupported head_dim: expected 1 to 512 for v, got 0"),
    "head_dim_v_513": ((Q, K, qkv(d=513)[2]), {}, ValueError, r"Unsupported head_dim.*1 to 512 for v, got 513"),
    "head_dim_differs": ((Q, qkv(d=8)[1], V), {}, ValueError, r"same head_dim"),
    "batch_differs": ((Q, *qkv(b=3)[1:]), {}, ValueError, r"same batch"),
    "kv_heads_differ": ((Q, K, V[:, :2]), {}, ValueError, r"k and v must have the same heads and length"),
    "kv_length_differs": ((Q, K, V[:, :, :4]), {}, ValueError, r"k and v must have the same heads and length"),
    "heads_not_multiple": (qkv(h=4, hk=3), {}, ValueError, r"multiple of the key/value heads, got 4 and 3"),
    "no_heads": ((Q[:, :0], K[:, :0], V[:, :0]), {}, ValueError, r"positive multiple"),
    "last_stride": ((Q.transpose(-1, -2).contiguous().transpose(-1, -2), K, V), {}, ValueError, r"q must have stride"),
    "last_stride_v": ((Q, K, torch.zeros(2, 4, 8, 32, dtype=F16)[..., ::2]), {}, ValueError, r"v must have stride 1"),
    "scale_nan": ((Q, K, V), {"sm_scale": float("nan")}, ValueError, r"sm_scale must be finite"),
    "scale_inf": ((Q, K, V), {"sm_scale": float("inf")}, ValueError, r"sm_scale must be finite"),
    "window_floats": ((Q, K, V), {"window": (1.5, 2.0)}, TypeError, r"window must be a pair of integers.*1\.5"),
    "window_text": ((Q, K, V), {"window": "12"}, TypeError, r"window must be a pair of integers.*'12'"),
    "window_float_tensor": ((Q, K, V), {"window": torch.ones(2)}, TypeError, r"window must be a pair of integers"),
    "scale_huge": ((Q, K, V), {"sm_scale": 1e300}, ValueError, r"sm_scale must be finite in float32, got 1e\+300"),
    "softcap_huge": ((Q, K, V), {"softcap": 1e40}, ValueError, r"softcap must be 0 .* float32 holds, got 1e\+40"),
    "softcap_tiny": ((Q, K, V), {"softcap": 1e-50}, ValueError, r"softcap must be 0 .* float32 holds, got 1e-50"),
    "nested": (
        tuple(torch.nested.nested_tensor([Q[0], Q[1]]) for _ in range(3)), {},
        TypeError, r"q must be a dense tensor, got a nested tensor",
    ),
    "bias_fp8": (
        (Q, K, V), {"attn_bias": torch.zeros(8, 8, dtype=torch.float8_e4m3fn)},
        TypeError, r"attn_bias must be a floating-point tensor of 16, 32 or 64 bits, got torch\.float8_e4m3fn",
    ),
    "causal_float": ((Q, K, V, 0.1), {}, TypeError, r"causal must be True or False, got 0\.1; .*dropout_p="),
    "causal_mask": (
        (Q, K, V, torch.ones(8, 8, dtype=torch.bool)), {},
        TypeError, r"causal must be True or False, got a tensor of shape \(8, 8\); .*attn_bias=",
    ),
    "causal_none": ((Q, K, V, None), {}, TypeError, r"causal must be True or False, got None"),
    "causal_text": ((Q, K, V), {"causal": "False"}, TypeError, r"causal must be True or False, got 'False'"),
    "deterministic": ((Q, K, V), {"deterministic": "no"}, TypeError, r"deterministic must be True or False, got 'no'"),
    "return_lse": ((Q, K, V), {"return_lse": 1}, TypeError, r"return_lse must be True or False, got 1"),
    "scale_type": ((Q, K, V), {"sm_scale": "1"}, TypeError, r"sm_scale must be a number, got str"),
    "softcap_negative": ((Q, K, V), {"softcap": -1.0}, ValueError, r"softcap must be 0"),
    "softcap_nan": ((Q, K, V), {"softcap": float("nan")}, ValueError, r"softcap"),
    "softcap_type": ((Q, K, V), {"softcap": None}, TypeError, r"softcap must be a number, got NoneType"),
    "dropout_negative": ((Q, K, V), {"dropout_p": -0.1}, ValueError, r"dropout_p must be in \[0, 1\), got -0.1"),
    "dropout_one": ((Q, K, V), {"dropout_p": 1.0}, ValueError, r"dropout_p must be in \[0, 1\)"),
    "dropout_type": ((Q, K, V), {"dropout_p": "0"}, TypeError, r"dropout_p must be a number"),
    "window_negative": ((Q, K, V), {"window": (-2, 0)}, ValueError, r"window sizes must be -1.*\(-2, 0\)"),
    "window_negative_right": ((Q, K, V), {"window": (0, -2)}, ValueError, r"window sizes must be -1.*\(0, -2\)"),
    "window_triple": ((Q, K, V), {"window": (1, 2, 3)}, TypeError, r"window must be a pair"),
    "window_single": ((Q, K, V), {"window": 3}, TypeError, r"window must be a pair"),
    "lens_dtype": ((Q, K, V), {"seq_lens": lens(8, 8, dtype=torch.int64)}, TypeError, r"seq_lens must be int32"),
    "lens_shape": ((Q, K, V), {"seq_lens": lens(8)}, ValueError, r"seq_lens must have shape \(2,\), got \(1,\)"),
    "lens_zero": ((Q, K, V), {"seq_lens": lens(0, 8)}, ValueError, r"0 < length <= 8, got values from 0 to 8"),
    "lens_beyond": ((Q, K, V), {"seq_lens": torch.nn.Parameter(lens(8, 9), False)}, ValueError, r"0 < length <= 8"),
    "lens_3d": ((Q[0, :3], K[0, :3], V[0, :3]), {"seq_lens": lens(8, 8)}, ValueError, r"multiple of the batch 2"),
    "alibi_dtype": ((Q, K, V), {"alibi_slopes": torch.zeros(4, dtype=F16)}, TypeError, r"alibi_slopes must be float32"),
    "alibi_shape": ((Q, K, V), {"alibi_slopes": torch.zeros(3)}, ValueError, r"alibi_slopes must have shape \(4,\)"),
    "alibi_batch": ((Q, K, V), {"alibi_slopes": torch.zeros(1, 4)}, ValueError, r"alibi_slopes must have shape"),
    "sinks_dtype": ((Q, K, V), {"sinks": torch.zeros(4, dtype=F16)}, TypeError, r"sinks must be float32"),
    "sinks_shape": ((Q, K, V), {"sinks": torch.zeros(2, 4)}, ValueError, r"sinks must have shape \(4,\)"),
    "bias_dtype": ((Q, K, V), {"attn_bias": torch.zeros(8, 8, dtype=torch.bool)}, TypeError, r"attn_bias must be"),
    "bias_shape": ((Q, K, V), {"attn_bias": torch.zeros(8, 7)}, ValueError, r"broadcastable to \(2, 4, 8, 8\)"),
    "rng_dtype": ((Q, K, V), {"rng_state": lens(1, 2)}, TypeError, r"rng_state must be int64, got torch\.int32"),
    "rng_shape": ((Q, K, V), {"rng_state": lens(1, dtype=I64)}, ValueError, r"pair \(seed, offset\), .* got"),
    "rng_strides": ((Q, K, V), {"rng_state": lens(1, 2, 3, dtype=I64)[::2]}, ValueError, r"rng_state must be a contig"),
    "variant": ((Q, K, V), {"variant": "v9"}, ValueError, r"no attention_fwd kernel called 'v9'; it has: v2, v1"),
    "backend": ((Q, K, V), {"backend": "tpu"}, ValueError, r"no backend called 'tpu'; there are: cuda, npu, cpu"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_errors(name: str) -> None:
    args, kwargs, exception, pattern = ATTENTION[name]
    with pytest.raises(exception, match=pattern):
        diyfa.flash_attention(*args, **{"backend": "cpu", **kwargs})


QP, KP, VP = torch.zeros(9, 4, 16, dtype=F16), torch.zeros(7, 2, 16, dtype=F16), torch.zeros(7, 2, 8, dtype=F16)
CU_Q, CU_K = lens(0, 5, 9), lens(0, 3, 7)
MAXIMA = {"max_seqlen_q": 5, "max_seqlen_k": 4}
# name: (what replaces the good arguments, exception, pattern)
PACKED = {
    "4d": ({"q": QP[None]}, ValueError, r"packed \(total, heads, head_dim\) tensors, got q \(1, 9, 4, 16\)"),
    "2d": ({"v": VP[:, 0]}, ValueError, r"packed \(total, heads, head_dim\) tensors"),
    "cu_type": ({"cu_seqlens_q": [0, 5, 9]}, TypeError, r"cu_seqlens_q must be a torch\.Tensor, got list"),
    "cu_dtype": ({"cu_seqlens_k": lens(0, 3, 7, dtype=I64)}, TypeError, r"cu_seqlens_k must be int32, got torch"),
    "cu_2d": ({"cu_seqlens_q": CU_Q[None]}, ValueError, r"cu_seqlens_q must be a contiguous vector of B \+ 1 offsets"),
    "cu_empty": ({"cu_seqlens_q": lens()}, ValueError, r"vector of B \+ 1 offsets, got shape \(0,\)"),
    "cu_strided": ({"cu_seqlens_k": lens(0, 0, 3, 3, 7)[::2]}, ValueError, r"cu_seqlens_k must be a contiguous vector"),
    "cu_device": ({"cu_seqlens_q": CU_Q.to("meta")}, ValueError, r"same device: q is on cpu, cu_seqlens_q on meta"),
    "cu_lengths_differ": ({"cu_seqlens_q": lens(0, 4, 5, 9)}, ValueError, r"as many sequences, got shapes \(4,\) and"),
    "cu_descends": ({"cu_seqlens_q": lens(0, 5, 4)}, ValueError, r"cu_seqlens_q must ascend.*got \[0, 5, 4\]"),
    "cu_beyond": ({"cu_seqlens_k": lens(0, 4, 8)}, ValueError, r"cu_seqlens_k must ascend from 0 or more to at most 7"),
    "cu_negative": ({"cu_seqlens_q": lens(-1, 4, 9)}, ValueError, r"cu_seqlens_q must ascend from 0"),
    "max_small": ({"max_seqlen_q": 4}, ValueError, r"cu_seqlens_q has a sequence of 5, beyond max_seqlen_q=4"),
    "max_k_small": ({"max_seqlen_k": 3}, ValueError, r"cu_seqlens_k has a sequence of 4, beyond max_seqlen_k=3"),
    "max_fraction": ({"max_seqlen_q": 5.5}, TypeError, r"max_seqlen_q must be an integer, got 5\.5"),
    "max_none": ({"max_seqlen_k": None}, TypeError, r"max_seqlen_k must be an integer, got None"),
    "max_two": ({"max_seqlen_q": lens(5, 5)}, TypeError, r"an integer, got a torch\.int32 tensor of shape \(2,\)"),
    "max_negative": ({"max_seqlen_k": -1}, ValueError, r"max_seqlen_k must not be negative, got -1"),
    "window": ({"window": (-3, 0)}, ValueError, r"window sizes must be -1"),
    "causal": ({"causal": 1}, TypeError, r"causal must be True or False, got 1"),
    "rng_without_dropout": ({"rng_state": lens(1, 2, 3, dtype=I64)}, ValueError, r"rng_state must be a contiguous"),
    "alibi_batch": ({"alibi_slopes": torch.zeros(3, 4)}, ValueError, r"shape \(4,\) or \(2, 4\), got \(3, 4\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequence_errors(name: str) -> None:
    changes, exception, pattern = PACKED[name]
    good = {"q": QP, "k": KP, "v": VP, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, **MAXIMA, "backend": "cpu"}
    assert diyfa.flash_attention_varlen(**good).shape == (9, 4, 8)
    with pytest.raises(exception, match=pattern):
        diyfa.flash_attention_varlen(**{**good, **changes})


def test_packed_sequences_take_no_bias_and_no_lengths() -> None:
    """Neither is an argument of the function, so neither can be dropped silently."""
    for extra in ("attn_bias", "seq_lens"):
        with pytest.raises(TypeError, match=extra):
            diyfa.flash_attention_varlen(QP, KP, VP, CU_Q, CU_K, 5, 4, **{extra: torch.zeros(1)})


def test_flash_attention_v2_takes_4d_only() -> None:
    with pytest.raises(ValueError, match="Expected 3D or 4D"):
        diyfa.flash_attention_v2(Q[0], K[0], V[0], backend="cpu")


def test_cpu_tensors_are_refused_with_the_ways_out() -> None:
    with pytest.raises(ValueError, match="CUDA tensors required") as error:
        diyfa.flash_attention(Q, K, V)
    for way in ('.to("cuda")', '.to("npu")', 'backend="cpu"'):
        assert way in str(error.value)
    with pytest.raises(ValueError, match="CUDA tensors required"):
        diyfa.triton_matmul(torch.zeros(4, 4), torch.zeros(4, 4))


def test_device_without_a_backend() -> None:
    with pytest.raises(ValueError, match="got tensors on meta; no backend is made for them"):
        registry.resolve_backend(META.device)
    with pytest.raises(
        ValueError, match="backend 'cpu' cannot run this call: it takes CPU tensors, got tensors on meta"
    ):
        registry.resolve_backend(META.device, "cpu")


def test_meta_tensors_give_shapes() -> None:
    """Shape inference needs no backend: meta tensors reach the operators' fake kernels only."""
    out, lse = diyfa.flash_attention_v2(META, META[:, :, :4], META[:, :, :4, :8], return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 4, 8, 8), F16, (2, 8, 4), torch.float32)


def test_unsupported_gradient_is_refused_in_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = registry.load_backend("cpu")
    kernels = [replace(k, unsupported=lambda problem: "too odd") if k.op == "attention_bwd" else k for k in cpu.kernels]
    monkeypatch.setattr(cpu, "kernels", kernels)
    q, k, v = qkv(d=13)  # a size of its own: what was chosen before is remembered
    diyfa.flash_attention(q, k, v, backend="cpu")
    with pytest.raises(ValueError, match=r"backend 'cpu' cannot run this attention_bwd: v2: too odd"):
        diyfa.flash_attention(q.requires_grad_(), k, v, backend="cpu")
    with pytest.raises(ValueError, match=r"cannot run this attention_bwd: v2: too odd"):
        diyfa.explain(q, k, v, backend="cpu")
    with torch.no_grad():
        assert diyfa.explain(q, k, v, backend="cpu").kernel == "v2"


A, B = torch.zeros(64, 32, dtype=F16), torch.zeros(32, 48, dtype=F16)
BIAS, OUT, SQUARE = (torch.zeros(shape, dtype=torch.float16) for shape in ((48,), (64, 48), (32, 32)))
GRID = torch.zeros(32, 64, dtype=torch.float16)
MATMUL = {
    "not_a_tensor": ((A, None), {}, TypeError, r"b must be a torch\.Tensor, got NoneType"),
    "sparse": ((A, B.to_sparse()), {}, TypeError, r"b must be a dense tensor"),
    "1d": ((A[0], B), {}, ValueError, r"Expected 2D tensors, got a \(32,\)"),
    "inner": ((A, B.t()), {}, ValueError, r"Incompatible dimensions.*\(64, 32\).*\(48, 32\)"),
    "dtype": ((A.double(), B.double()), {}, TypeError, r"Unsupported dtype torch\.float64"),
    "dtypes": ((A, B.bfloat16()), {}, TypeError, r"dtypes must match"),
    "devices": ((A, B.to("meta")), {}, ValueError, r"same device"),
    "two_blocks": ((A, B), {"block_m": 16, "block_n": 16}, ValueError, r"must be given together"),
    "block_zero": ((A, B), {"block_m": 0, "block_n": 16, "block_k": 16}, ValueError, r"block_m must be positive"),
    "block_type": ((A, B), {"block_m": 16.0, "block_n": 16, "block_k": 16}, TypeError, r"block_m must be an int"),
    "block_beyond": ((A, B), {"block_m": 16, "block_n": 16, "block_k": 64}, ValueError, r"block_k=64 exceeds.*32"),
    "block_odd": ((A, B), {"block_m": 48, "block_n": 16, "block_k": 16}, ValueError, r"power of two"),
    "block_small": ((A, B), {"block_m": 8, "block_n": 16, "block_k": 16}, ValueError, r"at least 16"),
    "precision": ((A.float(), B.float()), {"precision": "fp8"}, ValueError, r"precision must be None"),
    "precision_dtype": ((A, B), {"precision": "ieee"}, ValueError, r"applies to float32"),
    "out_dtype": ((A, B), {"out_dtype": torch.int8}, TypeError, r"Unsupported dtype torch\.int8"),
    "autotune": ((A, B), {"use_autotune": "no"}, TypeError, r"use_autotune must be True or False, got 'no'"),
    "activation": ((A, B), {"activation": "tanh"}, ValueError, r"None, 'relu', 'gelu', 'silu', got 'tanh'"),
    "bias_shape": ((A, B), {"bias": BIAS[:5]}, ValueError, r"bias must have shape \(48,\), .*got \(5,\)"),
    "bias_dtype": ((A, B), {"bias": BIAS.double()}, TypeError, r"Unsupported dtype torch\.float64 of bias"),
    "bias_device": ((A, B), {"bias": BIAS.to("meta")}, ValueError, r"a is on cpu, bias on meta"),
    "bias_type": ((A, B), {"bias": 1.0}, TypeError, r"bias must be a torch\.Tensor, got float"),
    "out_shape": ((A, B), {"out": A}, ValueError, r"out must have shape \(64, 48\), got \(64, 32\)"),
    "out_dtype_differs": (
        (A, B), {"out": OUT, "out_dtype": torch.float32}, TypeError, r"out must be torch\.float32, .*got torch\.float16"
    ),
    "out_of_integers": ((A, B), {"out": OUT.int()}, TypeError, r"Unsupported dtype torch\.int32"),
    "out_device": ((A, B), {"out": OUT.to("meta")}, ValueError, r"a is on cpu, out on meta"),
    "out_expanded": ((A, B), {"out": OUT[:1].expand(64, 48)}, ValueError, r"out must not overlap itself"),
    "out_overlaps": ((A, B), {"out": OUT.as_strided((64, 48), (40, 1))}, ValueError, r"out must not overlap itself"),
    "out_is_a": ((SQUARE, SQUARE.clone()), {"out": SQUARE}, ValueError, r"out must not share memory with a"),
    "out_is_b": ((SQUARE.clone(), SQUARE), {"out": SQUARE.t()}, ValueError, r"out must not share memory with b"),
    "out_is_part_of_a": (
        (GRID[:, :32], SQUARE), {"out": GRID[:, :32].t()}, ValueError, r"out must not share memory with a"
    ),
    "out_meets_a_corner": (
        (GRID[:, :32], SQUARE), {"out": GRID[:, 31:63].t()}, ValueError, r"out must not share memory with a"
    ),
    "out_negated": ((A, B), {"out": torch._neg_view(OUT)}, ValueError, r"out must hold its numbers themselves"),
    "out_grad": ((A.clone().requires_grad_(), B), {"out": OUT}, ValueError, r"out has no gradient"),
    "out_type": ((A, B), {"out": 1.0}, TypeError, r"out must be a torch\.Tensor, got float"),
    "variant": ((A, B), {"variant": "sm90"}, ValueError, r"no matmul kernel called 'sm90'; it has: tiled"),
    "variant_type": ((A, B), {"variant": None}, ValueError, r"no matmul kernel called None"),
    "tf32_refused": ((A.float(), B.float()), {"precision": "tf32"}, ValueError, r"IEEE precision only"),
}  # fmt: skip


@pytest.mark.parametrize("name", MATMUL)
def test_matmul_errors(name: str) -> None:
    args, kwargs, exception, pattern = MATMUL[name]
    with pytest.raises(exception, match=pattern):
        diyfa.triton_matmul(*args, **{"backend": "cpu", **kwargs})


def test_overlap_is_checked_at_every_call() -> None:
    """Equal calls have one plan, whatever their addresses."""
    memory = torch.zeros(3, 32, 32, dtype=torch.float16)
    for _ in range(3):
        diyfa.triton_matmul(memory[0], memory[1], out=memory[2], backend="cpu")
    with pytest.raises(ValueError, match="out must not share memory with b"):
        diyfa.triton_matmul(memory[0], memory[1], out=memory[1], backend="cpu")
    for a, b, begin, name in ((0, 1, 512, "a"), (0, 1, 1536, "b"), (1, 2, 512, "a"), (2, 1, 512, "b")):
        within = memory.view(-1)[begin : begin + 1024].view(32, 32)  # begins or ends inside an input
        with pytest.raises(ValueError, match=f"out must not share memory with {name}"):
            diyfa.triton_matmul(memory[a], memory[b], out=within, backend="cpu")
    memory, narrow = torch.zeros(8192, dtype=torch.float16), torch.zeros(32, 16, dtype=torch.float16)
    for begin, error in ((4096, None), (4096, None), (3072, "a"), (6144, None)):  # a is larger than out
        a, out = memory[:4096].view(128, 32), memory[begin : begin + 2048].view(128, 16)
        with pytest.raises(ValueError, match="share memory with a") if error else nullcontext():
            diyfa.triton_matmul(a, narrow, out=out, backend="cpu")
    described = torch.empty(32, 32, dtype=torch.float16, device="meta")
    assert diyfa.triton_matmul(described, described, out=torch.empty_like(described), backend="cpu").is_meta
    columns = torch.zeros(32, 96, dtype=torch.float16)
    diyfa.triton_matmul(columns[:, :32], columns[:, 32:64], out=columns[:, 64:], backend="cpu")  # interleaved, apart
    diyfa.triton_matmul(columns[:, :32], columns[:, 32:64], out=columns[:, 64:].t(), backend="cpu")


def _elements(x: torch.Tensor) -> set[int]:
    """The addresses of the elements of x."""
    addresses = torch.tensor([x.data_ptr()])
    for size, stride in zip(x.shape, x.stride(), strict=True):
        addresses = (addresses[:, None] + torch.arange(size) * stride * x.element_size()).flatten()
    return set(addresses.tolist())


def test_memory_that_views_share() -> None:
    """Slices of one buffer, with dimensions of size 1, whose strides mean nothing, put in and left out."""
    random, sharing = Random(0), 0

    def view(x: torch.Tensor) -> torch.Tensor:
        for dim, size in enumerate(x.shape):
            first = random.randrange(size)
            x = x.narrow(dim, first, random.randint(1, size - first))
        x = x.transpose(*random.sample(range(x.dim()), 2))
        x = x.squeeze() if random.random() < 0.5 else x
        while x.dim() < 4:
            x = x.unsqueeze(random.randint(0, x.dim()))
        return x

    for _ in range(1000):
        buffer = torch.empty([random.randint(1, 4) for _ in range(4)])
        x, y = view(buffer), view(buffer)
        shares = not _elements(x).isdisjoint(_elements(y))
        assert validation.share_memory(x, y) == validation.share_memory(y, x) == shares, (x.stride(), y.stride())
        sharing += shares
    assert 200 < sharing < 800


def test_memory_that_storages_share() -> None:
    """Tensors made by NumPy or DLPack have storages of their own, also where they are parts of one memory."""
    whole = torch.zeros(65, 32, dtype=torch.float16)
    a, out = torch.from_dlpack(whole[1:33]), torch.from_dlpack(whole[:32])
    assert a.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()
    for _ in range(2):
        with pytest.raises(ValueError, match="out must not share memory with a"):
            diyfa.triton_matmul(a, SQUARE, out=out, backend="cpu")
        diyfa.triton_matmul(torch.from_dlpack(whole[33:]), SQUARE, out=out, backend="cpu")


@pytest.mark.parametrize(("backend", "package"), [("cuda", "triton$"), ("npu", "--no-deps triton-ascend==3.2.0 ")])
def test_missing_triton(backend: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry._loaded, backend, raising=False)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "triton" else find(name, *a))
    with pytest.raises(ModuleNotFoundError, match=rf"triton is required.*pip install {package}"):
        registry.load_backend(backend)


def test_kernels_for_names_existing_kernels() -> None:
    assert diyfa.kernels_for("cpu:0") == diyfa.kernels_for(torch.device("cpu")) == diyfa.kernels_for("cpu")
    with pytest.raises(ValueError, match=r"no backend called 'tpu'; there are: cuda, npu, cpu"):
        diyfa.kernels_for("tpu")
    with pytest.raises(
        ValueError,
        match=r"op must be one of attention_fwd, attention_bwd, kvcache_fwd, kvcache_append, matmul, got 'attention'",
    ):
        diyfa.kernels_for("cpu", "attention")


@pytest.mark.parametrize("number", [0.25, 1, True, "float32", "int64"])
def test_numbers_of_any_type(number: object) -> None:
    """NumPy's scalars are numbers, too."""
    numpy = pytest.importorskip("numpy")
    given = getattr(numpy, number)(1) if isinstance(number, str) else number
    out = diyfa.flash_attention(Q, K, V, sm_scale=given, softcap=given, backend="cpu")
    assert torch.equal(out, diyfa.flash_attention(Q, K, V, sm_scale=float(given), softcap=float(given), backend="cpu"))


def test_explain_raises_what_the_call_raises() -> None:
    packed = {"layout": "thd", "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
    for tensors, options, error, words in (
        ((Q, K, V), {"layout": "sbhd"}, ValueError, "layout must be one of bhsd, bshd"),
        ((Q, K, V), {**packed, "layout": "bhsd"}, ValueError, "belong to the layout 'thd', got 'bhsd'"),
        ((QP, KP, VP), {"layout": "thd"}, ValueError, "needs cu_seqlens_q and cu_seqlens_k"),
        ((QP, KP, VP), packed, ValueError, "beyond max_seqlen_q=0"),
        ((Q, K.float(), V), {}, TypeError, "dtypes must match"),
        ((Q, K, V, 0.1), {}, TypeError, r"causal must be True or False, got 0\.1"),
    ):
        with pytest.raises(error, match=words):
            diyfa.explain(*tensors, backend="cpu", **options)
    with pytest.raises(ValueError, match="layout must be one of"):
        diyfa.reference_attention(Q, K, V, layout="sbhd")


def test_explain_ignores_nothing_that_the_call_would_not_take() -> None:
    """Pages belong to packed queries, which take no bias and no lengths of samples."""
    table, used = torch.zeros(2, 4, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="belong to the layout 'thd', got 'bhsd'"):
        diyfa.explain(Q, K, V, backend="cpu", seqused_k=used)
    pages = torch.zeros(8, 16, KP.shape[1], KP.shape[2], dtype=KP.dtype)
    call = {"layout": "thd", "cu_seqlens_q": CU_Q, "seqused_k": used, "block_table": table, "backend": "cpu"}
    call |= {"max_seqlen_q": 8, "max_seqlen_k": 8}
    for given in ({"seq_lens": used}, {"attn_bias": torch.zeros(1, 1, 1, 1)}):
        with pytest.raises(ValueError, match="takes no seq_lens, no attn_bias and no mask"):
            diyfa.explain(QP, pages, pages, **call, **given)
    with pytest.raises(ValueError, match="max_seqlen_q"):
        diyfa.explain(QP, pages, pages, **call | {"max_seqlen_q": -5})
    diyfa.explain(QP, pages, pages, **call)
    with pytest.raises(ValueError, match="must name pages from 0 to 7"):
        diyfa.explain(QP, pages, pages, **call | {"block_table": table - 1})
    with pytest.raises(ValueError, match="seqused_k must be from 0 to max_seqlen_k=8"):
        diyfa.explain(QP, pages, pages, **call | {"seqused_k": used + 8})


def test_lengths_are_read_once_for_each_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them waits for the device."""
    given, reads, read = lens(8, 5), [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: reads.append(x) or read(x))

    def attend(given: torch.Tensor, keys: int = 8) -> None:
        diyfa.flash_attention(Q, K[:, :, :keys], V[:, :, :keys], seq_lens=given, backend="cpu")

    for _ in range(3):
        attend(given)
    assert len(reads) == 1
    with pytest.raises(ValueError, match="0 < length <= 7, got values from 5 to 8"):
        attend(given, 7)  # the values are remembered, not the verdict
    assert len(reads) == 1
    given[0] = 9
    for _ in range(2):
        with pytest.raises(ValueError, match="got values from 5 to 9"):
            attend(given)
    assert len(reads) == 2
    given[0] = 8
    attend(given)
    attend(given.clone())
    assert len(reads) == 4
    before = len(validation._lengths_read)
    del given
    reads.clear()
    gc.collect()
    assert len(validation._lengths_read) < before
    with torch.inference_mode():
        given = lens(8, 5)
        attend(given)
        given[0] = 9
        with pytest.raises(ValueError, match="got values from 5 to 9"):
            attend(given)


def test_non_booleans_are_refused_after_an_equal_call() -> None:
    """1 == True and both have one hash; a remembered call must not let it through."""
    for _ in range(3):
        diyfa.flash_attention(Q, K, V, True, backend="cpu")
    for wrong in (1, 1.0):
        with pytest.raises(TypeError, match="causal must be True or False"):
            diyfa.flash_attention(Q, K, V, wrong, backend="cpu")


@pytest.mark.parametrize(
    ("method", "sizes", "exception", "pattern"),
    [
        ("select_attention", (-1, 2, 16, 16), ValueError, "batch must not be negative, got -1"),
        ("select_attention", (1, 0, 16, 16), ValueError, "heads must be positive, got 0"),
        ("select_attention", (1, 2, -16, 16), ValueError, "seq_len must not be negative, got -16"),
        ("select_attention", (1, 2, 16, 16, "no"), TypeError, "causal must be True or False, got 'no'"),
        ("select_attention", (1, 2, 16, 16, False, F16, 0), ValueError, "heads_kv must be positive, got 0"),
        ("select_attention", (1, 2, 1.5, 16), TypeError, r"seq_len must be an integer, got 1\.5"),
        ("select_matmul", (16, -16, 16), ValueError, "n must not be negative, got -16"),
        ("get_matmul_config", (16, 16, -1), ValueError, "k must not be negative, got -1"),
        ("dropout_mask", (-1, 2, 3, 4, 0.5, 1), ValueError, "batch must not be negative, got -1"),
        ("dropout_mask", (1, 2.5, 3, 4, 0.5, 1), TypeError, r"heads must be an integer, got 2\.5"),
        ("get_attention_config", (1, -2), ValueError, "heads must not be negative, got -2"),
    ],
)
def test_sizes_given_alone(method: str, sizes: tuple, exception: type, pattern: str) -> None:
    owner = diyfa if method == "dropout_mask" else diyfa.AdaptiveKernelSelector("cpu")
    with pytest.raises(exception, match=pattern):
        getattr(owner, method)(*sizes)
