"""PyTorch's attention operators, computed by diyfa for tensors of any device: `use_in_pytorch` registers them.

The names, arguments and results are those of `torch.ops.aten`. The five flash operators run below autograd; backward
passes are operators of their own. `scaled_dot_product_attention` runs above autograd. `rng_state`, (2,) uint64 as
everywhere in PyTorch, carries dropout's seed and offset from a forward operator to its backward operator. `unused`
has no content.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from diyfa import flash_attn_interface as interface
from diyfa import registry
from diyfa.integrations.eager_attention import attend, visible_keys
from diyfa.integrations.seams import record
from diyfa.validation import MAX_HEAD_DIM, MAX_HEAD_DIM_V

SEAM = "pytorch"


def _flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return output, lse (B, H, S) or (H, T), rng_state, unused and debug_attn_mask, of (B, S, H, D) tensors.

    With cum_seq_q the tensors are packed (T, H, D).
    """
    if return_debug_mask:
        raise ValueError(
            "return_debug_mask=True is not supported: diyfa.flash_attn_func with return_attn_probs=True shows what "
            "dropout keeps"
        )
    for name, argument in {"alibi_slopes": alibi_slopes, "block_table": block_table, "seqused_k": seqused_k}.items():
        if argument is not None and torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            raise ValueError(f"{name} has no gradient here: PyTorch's backward operator does not take it")
    if num_splits is not None and num_splits > 1:
        raise ValueError(f"num_splits must be None or 1, got {num_splits}: diyfa chooses the number itself")
    left, right = (-1 if bound is None else bound for bound in (window_size_left, window_size_right))
    with registry.batch_invariant() if num_splits == 1 else nullcontext():  # PyTorch asks for it by one split
        if cum_seq_q is None:
            if cum_seq_k is not None or seqused_k is not None or block_table is not None:
                raise ValueError("cum_seq_k, seqused_k and block_table need packed queries, with cum_seq_q")
            out, lse, _, rng_state = interface._flash_attn_forward(
                query, key, value, dropout_p, scale, is_causal, left, right, 0.0, alibi_slopes, False
            )
        else:
            out, lse, _, rng_state = interface._flash_attn_varlen_forward(
                query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, scale, is_causal, left, right,
                alibi_slopes=alibi_slopes, block_table=block_table, seqused_k=seqused_k,
            )  # fmt: skip
    unused = torch.empty((), dtype=torch.uint64, device=query.device)
    return out, lse, rng_state.view(torch.uint64), unused, torch.empty(0, dtype=query.dtype, device=query.device)


def _forward_into(
    out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any, **options: Any
) -> torch.Tensor:
    """Run `_flash_forward`, write its output into `out` and return lse."""
    out_shape, got = (*query.shape[:-1], value.shape[-1]), tuple(out.shape)
    if got != out_shape or out.dtype != query.dtype:  # copy_ would broadcast and convert without an error
        raise ValueError(f"out must be {out_shape} of {query.dtype}, got {got} of {out.dtype}")
    result, lse, *_ = _flash_forward(query, key, value, *arguments, **options)
    out.copy_(result)
    return lse


def _flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk and dv of `_flash_forward`."""
    left, right = (-1 if bound is None else bound for bound in (window_size_left, window_size_right))
    dq, dk, dv = (torch.empty_like(x) for x in (query, key, value))
    tensors = (grad_out, query, key, value, out, logsumexp, dq, dk, dv)
    options = (dropout_p, scale, is_causal, left, right, 0.0, None, torch.are_deterministic_algorithms_enabled())
    state = rng_state.view(torch.int64) if dropout_p else None
    if cum_seq_q is None:
        interface._flash_attn_backward(*tensors, *options, state)
    else:
        interface._flash_attn_varlen_backward(*tensors, cum_seq_q, cum_seq_k, max_q, max_k, *options, state)
    return dq, dk, dv


def _sdpa_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Return output, lse (B, H, S), None, None, max_q, max_k, rng_state, unused and mask, of (B, H, S, D) tensors."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    lengths = query.shape[2], key.shape[2]
    out, lse, *rest = _flash_forward(
        q, k, v, None, None, *lengths, dropout_p, is_causal, return_debug_mask, scale=scale
    )
    return out.transpose(1, 2), lse, None, None, *lengths, *rest


def _sdpa_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    *rest: Any,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """Return dq, dk and dv of `_sdpa_forward`. Where `_flash_backward` has rng_state and unused, the
    operator has philox_seed and philox_offset."""
    dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    return tuple(x.transpose(1, 2) for x in _flash_backward(dout, q, k, v, o, *rest, **options))


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which counts its calls under the operator's name."""

    def operator(*arguments: Any, **options: Any) -> Any:
        record(SEAM, f"{name}: diyfa")
        return function(*arguments, **options)

    return operator


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward_no_dropout_inplace": _forward_into,  # exists in newer PyTorch releases only
}
FLASH_OPERATORS = {name: _counted(name, function) for name, function in _FUNCTIONS.items()}


# ---- scaled_dot_product_attention itself --------------------------------------------------------------------------

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _why_left_to_pytorch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> str:
    """Return why diyfa does not take a call, or ""."""
    tensors = (query, key, value)
    if any(x.is_nested or x.dim() != 4 for x in tensors):
        return "not (B, H, S, D)"
    if len({x.dtype for x in tensors}) > 1 or query.dtype not in _DTYPES:
        return "dtype"
    if query.shape[-1] > MAX_HEAD_DIM or value.shape[-1] > MAX_HEAD_DIM_V:
        return "head_dim"
    if any(x.stride(-1) != 1 for x in tensors):
        return "last stride not 1"
    leading_dims = [x.shape[:2] for x in tensors]
    if (
        leading_dims[1] != leading_dims[2]
        or leading_dims[0][0] != leading_dims[1][0]
        or (leading_dims[0] != leading_dims[1] and not enable_gqa)
    ):
        return "batch or heads differ"
    return ""


def scaled_dot_product_attention(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return PyTorch's function, computed by diyfa, or by `original` for calls that diyfa does not take."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        reason = _why_left_to_pytorch(query, key, value, enable_gqa)
        if reason:
            record(SEAM, f"scaled_dot_product_attention: PyTorch ({reason})")
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        key, value, window = visible_keys(query, key, value, attn_mask, is_causal)
        record(SEAM, "scaled_dot_product_attention: diyfa")
        return attend(query, key, value, attn_mask, window=window, dropout_p=dropout_p, sm_scale=scale)

    return attention
