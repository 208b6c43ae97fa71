"""Calls of float8 and int8 attention, and their check against the float64 reference of the quantised inputs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from eager_budget import assert_within_budget_of
from targets import Target

import diyfa
from diyfa import BlockMask
from diyfa.eight_bits import BLOCK_K, BLOCK_Q, Quantized
from diyfa.score_functions import ScoreFunction
from diyfa.testing import LSE_UNIT, Error
from diyfa.yardstick import largest_scores, plain_flash_attention

E4M3, E5M2, INT8, BF16, F16, F32 = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bfloat16, torch.float16, torch.float32,
)  # fmt: skip
LARGEST = {E4M3: 448.0, E5M2: 57344.0, INT8: 127.0}


# A score function: 30 tanh(score · a factor of each key).
KEY_FACTOR = ScoreFunction(
    "scaled", 1,
    """def scaled(score, b, h, i, j, t0):
    v0 = load(t0, j)
    v1 = mul(score, v0)
    v2 = tanh(v1)
    v3 = mul(v2, 30.0)
    return v3""",
)  # fmt: skip


def with_mask(case: Case) -> Case:
    """The case with a block mask of blocks of 64, of which some are full and some empty."""
    seen = torch.rand(case.seqlen_q, case.seqlen_k, generator=torch.Generator().manual_seed(9)) < 0.3
    seen[:, 64:128] = True
    seen[64:128, :64] = False
    return replace(case, options={**case.options, "mask": BlockMask.from_dense(seen, 64)})


def with_score_function(case: Case) -> Case:
    factors = torch.rand(case.seqlen_k, generator=torch.Generator().manual_seed(9)) / 4
    return replace(case, options={**case.options, "score_fn": KEY_FACTOR, "score_tensors": (factors,)})


@dataclass(frozen=True)
class Case:
    """One call. `kind`: of the descales. `means`: k and v were smoothed. `data`: how q, k and v are distributed."""

    dtype: torch.dtype = E4M3
    value_dtype: torch.dtype | None = None
    kind: str = "tensor"
    means: bool = False
    heads: int = 2
    heads_kv: int = 2
    seqlen_q: int = 70
    seqlen_k: int = 70
    head_dim: int = 32
    head_dim_v: int = 0
    layout: str = "bhsd"
    data: str = "normal"
    sinks: bool = False
    alibi: bool = False
    bias: bool = False
    lengths: tuple[int, ...] | None = None  # seq_lens, or those of packed sequences
    out_dtype: torch.dtype | None = None
    options: dict[str, Any] = field(default_factory=dict)


def quantised(x: torch.Tensor, dtype: torch.dtype, kind: str, block: int, mean: torch.Tensor | None) -> Quantized:
    """x (B, H, S, D) in `dtype`, by other code than the library's."""
    if dtype in (BF16, F16):
        return Quantized(x.to(dtype), None, mean)
    magnitude = x.abs().amax(-1)
    if kind == "tensor":
        descale = magnitude.max().reshape(1)
        rows = descale.reshape(1, 1, 1, 1)
    elif kind == "head":
        descale = magnitude.amax(-1)
        rows = descale[:, :, None, None]
    else:
        descale = torch.stack([part.amax(-1) for part in magnitude.split(block, -1)], -1)
        rows = torch.cat([descale[..., i // block : i // block + 1] for i in range(x.shape[2])], -1)[..., None]
    descale, rows = descale / LARGEST[dtype], rows / LARGEST[dtype]
    values = x / torch.where(rows == 0, 1.0, rows)
    return Quantized((values.round() if dtype == INT8 else values).to(dtype), descale, mean)


def draw(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    batch = len(case.lengths) if case.lengths else 2

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q = random(batch, case.heads, case.seqlen_q, case.head_dim)
    k = random(batch, case.heads_kv, case.seqlen_k, case.head_dim)
    v = random(batch, case.heads_kv, case.seqlen_k, case.head_dim_v or case.head_dim)
    if case.data == "outliers":  # a few channels hold nearly everything
        q[..., 3] *= 20
        k[..., 3] *= 30
        v[..., 5] *= 50
    elif case.data == "peaks":  # one dominant key, and rows of small weights
        q[..., 0], k[..., 0] = 6.0, 0.0
        k[:, :, case.seqlen_k // 2, 0] = 12.0
    elif case.data == "sink":
        q[..., 0], k[..., 0] = 4.0, 0.0
        k[:, :, 0, 0] = 20.0
    elif case.data == "equal":
        q[:], k[:] = q[:, :, :1], k[:, :, :1]
    elif case.data == "zeros":
        q.zero_()
        v.zero_()
    elif case.data == "saturated":  # int8 has nothing but 127 and -127
        q, k = q.sign(), k.sign()
    elif case.data == "large":
        q, k = q * 30, k * 30
    return q, k, v


def make_call(case: Case) -> tuple[tuple[Quantized, Quantized, Quantized], dict[str, Any]]:
    q, k, v = draw(case)
    batch, generator = q.shape[0], torch.Generator().manual_seed(8)
    k_mean = v_mean = None
    if case.means:
        k_mean = 4 * torch.randn(batch, case.heads_kv, q.shape[3], generator=generator)
        v_mean = 4 * torch.randn(batch, case.heads_kv, v.shape[3], generator=generator)
    if case.kind == "head":  # of the group that shares a KV head
        group = case.heads // case.heads_kv
        whole = quantised(q.unflatten(1, (-1, group)).flatten(2, 3), case.dtype, "head", 0, None)
        values = whole.values.unflatten(2, (group, -1)).flatten(1, 2)
        q8 = Quantized(values, whole.descale)
    else:
        q8 = quantised(q, case.dtype, case.kind, BLOCK_Q, None)
    k8 = quantised(k, case.dtype, case.kind, BLOCK_K, k_mean)
    v8 = quantised(v, case.value_dtype or case.dtype, "head" if case.kind == "block" else case.kind, 0, v_mean)
    options = dict(case.options)
    if case.sinks:
        options["sinks"] = torch.randn(case.heads, generator=generator)
    if case.alibi:
        options["alibi_slopes"] = torch.rand(case.heads, generator=generator)
    if case.bias:
        options["attn_bias"] = torch.randn(case.seqlen_q, case.seqlen_k, generator=generator)
    parts = q8, k8, v8
    if case.lengths and case.layout == "thd":
        offsets = torch.tensor([0, *torch.tensor(case.lengths).cumsum(0).tolist()], dtype=torch.int32)
        options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        parts = tuple(
            x._replace(values=torch.cat([x.values[i, :, :n].transpose(0, 1) for i, n in enumerate(case.lengths)]))
            for x in parts
        )
    elif case.lengths:
        options["seq_lens"] = torch.tensor(case.lengths, dtype=torch.int32)
        for x in parts:  # what lies beyond is never read into a result
            for i, n in enumerate(case.lengths):
                if x.values.dtype != INT8:
                    x.values[i, :, n:] = float("nan")
    elif case.layout == "bshd":
        parts = tuple(x._replace(values=x.values.transpose(1, 2).contiguous()) for x in parts)
    return parts, options


FUNCTIONS = {
    "bhsd": diyfa.flash_attention, "bshd": diyfa.flash_attention_v2, "thd": diyfa.flash_attention_varlen
}  # fmt: skip


def run(case: Case, target: Target, variant: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
    parts, options = make_call(case)

    def move(x: Any) -> Any:
        if type(x) is tuple:  # captured tensors
            return tuple(map(move, x))
        return x.to(target.device) if isinstance(x, (torch.Tensor, BlockMask)) else x

    parts = tuple(Quantized(*map(move, x)) for x in parts)
    options = {name: move(x) for name, x in options.items()}
    if case.layout == "thd":
        options |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
    out, lse = FUNCTIONS[case.layout](
        *parts, **options, return_lse=True, backend=target.backend, variant=variant, out_dtype=case.out_dtype
    )
    return out.cpu(), lse.cpu()


def check_not_finite(case: Case, target: Target, name: str, value: float, first: int, variant: str = "auto") -> None:
    """Check that a `value` in the descale or mean `name` of a KV head shows in rows from `first` on, and only there.

    Rows before see no key. `name`: of `diyfa.eight_bits.ARGUMENTS`.
    """
    parts, options = make_call(case)
    given = dict(zip("qkv", parts, strict=True))
    owner, field_name = name.split("_")
    part = getattr(given[owner], field_name)
    part = torch.ones(2, case.heads_kv) if part is None else part
    part[1, 0] = value
    given[owner] = given[owner]._replace(**{field_name: part})
    moved = [Quantized(*(None if y is None else y.to(target.device) for y in x)) for x in given.values()]
    given_options = {key: x.to(target.device) if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    results = FUNCTIONS[case.layout](*moved, **given_options, return_lse=True, backend=target.backend, variant=variant)
    out, lse = (x.cpu() for x in results)
    expected = options["sinks"] if case.sinks else torch.full((case.heads,), float("inf"))
    assert (out[:, :, :first] == 0).all()
    torch.testing.assert_close(lse[:, :, :first], expected[:, None].expand(2, -1, first), rtol=0, atol=1e-6)
    assert not out[1, 0, first:].isfinite().any() and (owner == "v" or not lse[1, 0, first:].isfinite().any())
    assert all(x[0, :, first:].isfinite().all() and x[1, 1, first:].isfinite().all() for x in (out, lse))


def check(case: Case, target: Target, variant: str = "auto") -> None:
    out, lse = run(case, target, variant)
    parts, options = make_call(case)
    options["layout"] = case.layout
    want, want_lse = diyfa.reference_attention(*parts, **options, return_lse=True, dtype=torch.float64)
    plain, plain_lse = plain_flash_attention(*parts, **options, return_lse=True, out_dtype=case.out_dtype)
    assert out.dtype == plain.dtype and lse.dtype == torch.float32
    scores = LSE_UNIT * largest_scores(*parts, **options, dtype=torch.float64).abs()
    scores = scores[scores.isfinite()]
    unit = Error(float(scores.max()), float(scores.square().mean().sqrt()))
    assert_within_budget_of(plain, out, want, "out")
    assert_within_budget_of(plain_lse, lse, want_lse, "lse", unit)
