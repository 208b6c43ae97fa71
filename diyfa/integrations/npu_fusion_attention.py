"""`torch_npu.npu_fusion_attention` and its second version, computed by diyfa on CUDA, NPU and CPU tensors.

Names, order and defaults of the arguments and the seven results are those that torch_npu 2.13 registers. Their meaning
is taken from torch_npu's docstrings. docs/npu-fusion-attention.md has the equivalences in both directions and the
differences. Arguments that diyfa cannot express are refused with the reason before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from diyfa import validation
from diyfa.integrations.npu_fusion_band import ALL_MASK, BAND, NO_MASK, UNBOUNDED_TOKENS
from diyfa.integrations.npu_fusion_checks import (
    ABSENT,
    LAYOUTS,
    VARLEN,
    Layout,
    as_bool,
    check_compressed,
    check_layout,
    check_mode,
    check_options,
    sequences,
)
from diyfa.integrations.npu_fusion_compute import Call, attend, attend_packed, statistics
from diyfa.integrations.seams import refuse

COMPRESSED_PSE_ROWS = 1024


class FusionAttentionResult(NamedTuple):
    """The operator's results, in its order.

    The log-sum-exp of a row is `softmax_max + log(softmax_sum)`. diyfa knows only the log-sum-exp, so `softmax_max` is
    the log-sum-exp and `softmax_sum` is 1. For a row that sees no key they are -inf and 0. Neither has a gradient.
    """

    attention_out: torch.Tensor  # q's layout and dtype, v's head dim
    softmax_max: torch.Tensor  # (B, N, Sq, 8) float32; (T, N, 8) for TND
    softmax_sum: torch.Tensor  # shaped like softmax_max
    softmax_out: torch.Tensor  # reserved by the operator: empty
    seed: int  # of the dropout mask (`diyfa.dropout_mask`); 0 without dropout
    offset: int
    numels: int  # softmax weights that the dropout mask covers; 0 without dropout


def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = UNBOUNDED_TOKENS,
    next_tockens: int = UNBOUNDED_TOKENS,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
    dropout_mask: torch.Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
    *,
    backend: str | None = None,
) -> FusionAttentionResult:
    """Return Dropout(softmax(mask(scale · (q kᵀ + pse)))) v and the statistics, like `torch_npu.npu_fusion_attention`.

    Args:
        query, key, value: in `input_layout`: "BSH" (B, S, N·D), "SBH" (S, B, N·D), "BSND", "BNSD", or "TND" (T, N, D)
            with packed sequences. Key and value may have fewer heads, the value another D. One dtype: float16,
            bfloat16 or float32.
        head_num: N of the query.
        input_layout: one of the five, in any case.
        pse: added to q kᵀ *before* the scaling: (B, N, Sq, Skv), (B, N, 1, Skv) or (1, N, Sq, Skv).
        atten_mask: bool or uint8, 1 where a key is *hidden*: (Sq, Skv), (1, 1, …), (B, 1, …) or (B, N, Sq, Skv) in
            modes 0 and 1; in modes 2 to 4 the (2048, 2048) upper triangle, whose content is not read. Without it no
            mode hides anything.
        scale: factor of the scores; default 1, not 1/sqrt(D).
        keep_prob: probability of keeping a softmax weight, (0, 1].
        pre_tockens, next_tockens: query i sees keys i - pre to i + next (mode 0, from the top left corner, besides the
            mask) or i + Skv - Sq - pre to i + Skv - Sq + next (mode 4).
        inner_precise: 0, 1 or 2, without effect: rows that see no key are always exact (output 0).
        actual_seq_qlen, actual_seq_kvlen: for TND, the end of each sequence (host integers, running sums); zeros at
            the end stand for unused samples.
        sparse_mode: 0 the mask as given within the two bounds, 1 the mask as given, 2 causal from the top left,
            3 causal from the bottom right, 4 the band from the bottom right.
        sink: (N,) float32 logit of each head that joins the softmax denominator.
        seed, offset: of the dropout mask; both 0: drawn from torch's CPU generator.
        softmax_layout: "" or, for TND, "TND", without effect: the statistics of TND are always (T, N, 8).
        gen_mask_parallel, sync: without effect, as the mask is never stored.
        padding_mask, prefix, dropout_mask: must be None.
        backend: name of the diyfa backend that must run the call; default: the one made for the tensors' device.

    Returns:
        FusionAttentionResult; `attention_out` is differentiable in query, key, value, pse and sink.

    Raises:
        ValueError, TypeError: an argument does not fit, or diyfa cannot express it; the message says which and why.
    """
    arguments = dict(locals())  # pass every argument on by its name
    arguments["pre_tokens"], arguments["next_tokens"] = arguments.pop("pre_tockens"), arguments.pop("next_tockens")
    return npu_fusion_attention_v2(**arguments)


def npu_fusion_attention_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tokens: int = UNBOUNDED_TOKENS,
    next_tokens: int = UNBOUNDED_TOKENS,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    pse_type: int = 1,
    q_start_idx: Sequence[int] | None = None,
    kv_start_idx: Sequence[int] | None = None,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
    dropout_mask: torch.Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
    backend: str | None = None,
) -> FusionAttentionResult:
    """`torch_npu.npu_fusion_attention_v2`: `npu_fusion_attention` with further arguments.

    Args:
        pse_type: 0: pse is added after the scaling; 1: before it; 2: pse holds ALiBi slopes, (N,) or (B, N) float32,
            and -slope · |i - j| is added after the scaling, for Sq == Skv. 3 is refused.
        query_rope, key_rope: further features of query and key for the scores, for TND.
        pre_tokens, next_tokens: the `pre_tockens` and `next_tockens` of `npu_fusion_attention`.
        q_start_idx, kv_start_idx: must be None.
    """
    validation.check_tensors(query=query, key=key, value=value)
    layout = check_layout(input_layout, query, key, value, head_num)
    varlen = layout == VARLEN
    refuse(ABSENT, padding_mask=padding_mask, dropout_mask=dropout_mask, q_start_idx=q_start_idx,
           kv_start_idx=kv_start_idx)  # fmt: skip
    check_mode(sparse_mode, prefix)
    check_options(scale, keep_prob, inner_precise, softmax_layout, varlen)
    if (query_rope is None) != (key_rope is None):
        raise ValueError("query_rope and key_rope are given together")
    if query_rope is not None and key_rope is not None:
        if not varlen or pse is not None or keep_prob < 1:
            raise ValueError("query_rope and key_rope belong to TND, without pse and without dropout")
        query, key = torch.cat((query, query_rope), -1), torch.cat((key, key_rope), -1)
    if not varlen and (actual_seq_qlen is not None or actual_seq_kvlen is not None):
        raise ValueError(f"actual_seq_qlen and actual_seq_kvlen belong to the layout TND, got {layout}")
    mask = None if atten_mask is None else as_bool(atten_mask)
    if mask is not None and sparse_mode not in (NO_MASK, ALL_MASK):  # the band says all
        check_compressed(mask, sparse_mode)
        mask = None
    if atten_mask is not None and sparse_mode in (NO_MASK, BAND) and pre_tokens + next_tokens < 0:
        raise ValueError(f"pre_tokens={pre_tokens} and next_tokens={next_tokens} leave no key to any query")
    bias, slopes = _position_scores(pse, pse_type, query, layout, head_num, scale)
    state = _rng_state(keep_prob, seed, offset, query.device)
    call = Call(
        scale, sparse_mode, pre_tokens, next_tokens, mask, atten_mask is not None, bias, slopes, sink, 1.0 - keep_prob,
        None if state is None else state[1], backend,
    )  # fmt: skip
    if varlen:
        ends = sequences(query, key, actual_seq_qlen, actual_seq_kvlen)
        out, lse = attend_packed(query, key, value, ends, call)
        weights = head_num * sum((q1 - q0) * (k1 - k0) for (q0, q1), (k0, k1) in zip(*ends, strict=True))
        lse = lse.transpose(0, 1)  # (T, N)
    else:
        rule = LAYOUTS[layout]
        heads_kv = _heads_kv(query, key, head_num) if rule.joined else 0
        q, k, v = (_split_heads(x, n, rule) for x, n in ((query, head_num), (key, heads_kv), (value, heads_kv)))
        out, lse = attend(q, k, v, call)
        weights = lse.numel() * k.shape[2]
        out = out.permute(rule.from_bnsd)
        out = out.flatten(-2) if rule.joined else out
    maximum, total = statistics(lse.detach())
    (seed_drawn, offset_drawn), numels = (state[0], weights) if state is not None else ((0, 0), 0)
    return FusionAttentionResult(out, maximum, total, query.new_empty(0), seed_drawn, offset_drawn, numels)


def _position_scores(
    pse: torch.Tensor | None, pse_type: int, query: torch.Tensor, layout: str, heads: int, scale: float
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return pse as (attn_bias or None, alibi_slopes or None)."""
    if pse_type not in (0, 1, 2, 3):
        raise ValueError(f"pse_type must be 0 to 3, got {pse_type!r}")
    if pse_type == 3:
        raise ValueError(
            "pse_type=3 is not supported: diyfa's ALiBi grows with the distance, not with its root; pass the values "
            "themselves as pse with pse_type=0"
        )
    if pse is None:
        return None, None
    validation.check_tensors(pse=pse)
    if pse_type == 2:
        return None, pse
    if layout == VARLEN:
        raise ValueError(
            "pse is not supported for TND except as slopes (npu_fusion_attention_v2, pse_type=2): diyfa has no "
            "attn_bias for packed sequences"
        )
    seqlen_q = query.shape[layout.index("S")]
    if pse.dim() != 4 or pse.shape[1] != heads:
        raise ValueError(f"pse must have shape (B or 1, {heads}, Sq or 1, Skv), got {tuple(pse.shape)}")
    if pse.shape[2] == COMPRESSED_PSE_ROWS < seqlen_q:
        raise ValueError(
            f"pse of {COMPRESSED_PSE_ROWS} rows for {seqlen_q} queries is a compressed ALiBi, which diyfa cannot "
            "continue upwards: pass the slopes instead (npu_fusion_attention_v2, pse_type=2)"
        )
    if pse_type == 0 or scale == 1:
        return pse, None
    return pse.to(torch.promote_types(pse.dtype, torch.float32)) * scale, None


def _rng_state(
    keep_prob: float, seed: int, offset: int, device: torch.device
) -> tuple[tuple[int, int], torch.Tensor] | None:
    """Return (seed, offset) as integers and as a tensor on the device; None without dropout."""
    if keep_prob == 1:
        return None
    if seed == 0 and offset == 0:
        # The result holds them as integers. Drawn on the host, they need no wait for the device.
        seed, offset = torch.randint(1, 2**32, (2,), device="cpu").tolist()
    return (seed, offset), torch.tensor([seed, offset], dtype=torch.int64, device="cpu").to(device)


def _heads_kv(query: torch.Tensor, key: torch.Tensor, head_num: int) -> int:
    """Return the heads of key and value in a layout with N·D as its last dimension. key has query's D."""
    head_dim, rest = divmod(query.shape[2], head_num)
    if rest or head_dim == 0 or key.shape[2] == 0 or key.shape[2] % head_dim:
        raise ValueError(
            f"the last dimension of query, {query.shape[2]}, must be head_num={head_num} heads, and that of key, "
            f"{key.shape[2]}, one or more heads of the same size"
        )
    return key.shape[2] // head_dim


def _split_heads(x: torch.Tensor, heads: int, rule: Layout) -> torch.Tensor:
    """Return x as a (B, N, S, D) view. A last dimension N·D is split into `heads`."""
    if rule.joined:
        if x.shape[2] % heads:
            raise ValueError(f"the last dimension of a tensor of shape {tuple(x.shape)} must be {heads} heads")
        x = x.unflatten(2, (heads, x.shape[2] // heads))
    return x.permute(rule.to_bnsd)
