"""A user's file, for a type checker alone: `make lint` runs mypy on it with diyfa as it is installed."""

import torch
from typing_extensions import assert_type

import diyfa

Pair = tuple[torch.Tensor, torch.Tensor]


def results(q: torch.Tensor, lengths: torch.Tensor, ask: bool) -> None:
    assert_type(diyfa.flash_attention(q, q, q, causal=True), torch.Tensor)
    assert_type(diyfa.flash_attention(q, q, q, return_lse=True), Pair)
    assert_type(diyfa.flash_attention(q, q, q, return_lse=ask), torch.Tensor | Pair)
    assert_type(diyfa.flash_attention_v2(q, q, q, return_lse=True), Pair)
    assert_type(diyfa.flash_attention_varlen(q, q, q, lengths, lengths, 8, 8, return_lse=True), Pair)
    assert_type(diyfa.flash_attn_func(q, q, q, 0.0, None, True), torch.Tensor)
    assert_type(diyfa.flash_attn_func(q, q, q, return_attn_probs=True), tuple[torch.Tensor, torch.Tensor, torch.Tensor])
    assert_type(diyfa.flash_attn_varlen_func(q, q, q, lengths, lengths, 8, 8, block_table=lengths), torch.Tensor)
    assert_type(diyfa.flash_attn_with_kvcache(q, q, q, return_softmax_lse=True), Pair)
    assert_type(diyfa.reference_attention(q, q, q, return_lse=True), Pair)
    assert_type(diyfa.triton_matmul(q, q, precision="ieee"), torch.Tensor)
    out, lse = diyfa.flash_attention(q, q, q, return_lse=True)
    print(out.shape, lse.shape, diyfa.explain(q, q, q).kernel, diyfa.__version__, diyfa.detect())


def mistakes(q: torch.Tensor) -> None:
    """Each is an error: mypy reports an ignore that it does not need."""
    diyfa.flash_attention(q, q, q, is_causal=True)  # type: ignore[call-overload]
    diyfa.triton_matmul(q, q, precission="ieee")  # type: ignore[arg-type]
    diyfa.flash_attention(q, q, q, return_lse=True).backward()  # type: ignore[attr-defined]
    diyfa.no_such_name  # type: ignore[attr-defined]  # noqa: B018
