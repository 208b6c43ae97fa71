"""Translation of a call of `diyfa.flash_attention` to arguments of `torch_npu.npu_fusion_attention`.

It serves to compare the two on an NPU, and software that must call the vendor's operator in some places. Arguments that
the operator cannot express are refused.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from diyfa import validation
from diyfa.integrations.npu_fusion_band import BAND, COMPRESSED_MASK, NO_MASK, RIGHT_DOWN_CAUSAL, UNBOUNDED_TOKENS

LAYOUT_NAMES = {"bhsd": ("BNSD", 1), "bshd": ("BSND", 2), "thd": ("TND", 1)}  # (operator's name, dimension of heads)
# {feature without a counterpart: advice}
REFUSED = {
    "softcap": "it bounds no scores",
    "seq_lens": "pack the sequences (layout 'thd'), or hide keys with an atten_mask of your own",
    "alibi_slopes": "npu_fusion_attention_v2 does have them, as pse with pse_type=2",
}


@lru_cache(maxsize=8)
def compressed_mask(device: torch.device) -> torch.Tensor:
    """Return the (2048, 2048) bool mask of sparse modes 2, 3 and 4: 1 above the diagonal."""
    return torch.ones(COMPRESSED_MASK, COMPRESSED_MASK, dtype=torch.bool, device="cpu").triu(1).to(device)


def fusion_attention_arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    sm_scale: float | None = None,
    *,
    layout: str = "bhsd",
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    seq_lens: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens_q: list[int] | None = None,
    cu_seqlens_k: list[int] | None = None,
) -> dict[str, Any]:
    """Return the keyword arguments with which `npu_fusion_attention` computes diyfa's result.

    Args:
        layout: "bhsd" (`flash_attention`), "bshd" (`flash_attention_v2`) or "thd" (`flash_attention_varlen`).
        cu_seqlens_q, cu_seqlens_k: for "thd", the offsets as host integers.
        others: as for `diyfa.flash_attention`. Dropout keeps the same fraction of the weights, not the same weights.

    Raises:
        ValueError: the operator lacks the feature (softcap, seq_lens, alibi_slopes), or an argument does not fit.
    """
    validation.check_tensors(q=q, k=k, v=v)
    if layout not in LAYOUT_NAMES:
        raise ValueError(f"layout must be one of {', '.join(LAYOUT_NAMES)}, got {layout!r}")
    refused = {"softcap": softcap != 0, "seq_lens": seq_lens is not None, "alibi_slopes": alibi_slopes is not None}
    for name, is_used in refused.items():
        if is_used:
            raise ValueError(f"npu_fusion_attention has no {name}: {REFUSED[name]}")
    left, right = validation.check_window(window)
    right = 0 if causal else right
    input_layout, heads = LAYOUT_NAMES[layout]
    scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    arguments: dict[str, Any] = {
        "query": q, "key": k, "value": v, "head_num": q.shape[heads], "input_layout": input_layout, "scale": scale,
        "keep_prob": 1.0 - dropout_p, "sparse_mode": NO_MASK,
    }  # fmt: skip
    if (left, right) == (-1, 0):
        arguments |= {"sparse_mode": RIGHT_DOWN_CAUSAL, "atten_mask": compressed_mask(q.device)}
    elif (left, right) != (-1, -1):
        arguments |= {
            "sparse_mode": BAND,
            "atten_mask": compressed_mask(q.device),
            "pre_tockens": UNBOUNDED_TOKENS if left < 0 else left,
            "next_tockens": UNBOUNDED_TOKENS if right < 0 else right,
        }
    if sinks is not None:
        arguments["sink"] = sinks
    if attn_bias is not None:
        arguments["pse"] = _bias_before_scaling(attn_bias, q, scale, layout)
    if layout == "thd":
        if cu_seqlens_q is None or cu_seqlens_k is None:
            raise ValueError("layout 'thd' needs cu_seqlens_q and cu_seqlens_k as lists of host integers")
        arguments |= {"actual_seq_qlen": list(cu_seqlens_q[1:]), "actual_seq_kvlen": list(cu_seqlens_k[1:])}
    return arguments


def _bias_before_scaling(bias: torch.Tensor, q: torch.Tensor, scale: float, layout: str) -> torch.Tensor:
    """Return the bias as pse, in q's dtype and for all heads. The operator scales pse, so the bias is divided first."""
    if layout == "thd":
        raise ValueError("npu_fusion_attention takes no bias for packed sequences")
    if scale == 0:
        raise ValueError("npu_fusion_attention scales its bias, too: with sm_scale=0 there is none")
    bias = bias[(None,) * (4 - bias.dim())]
    heads = q.shape[LAYOUT_NAMES[layout][1]]
    return (bias / scale).to(q.dtype).expand(bias.shape[0], heads, *bias.shape[2:])
