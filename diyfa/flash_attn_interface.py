"""The functions of flash_attn 2.8, with its names, arguments, defaults, layouts and results.

    from diyfa.flash_attn_interface import flash_attn_func, flash_attn_varlen_func

Argument by argument they mean what flash_attn's documentation says (layout (B, S, H, D), softmax scale 1/sqrt(D) by
default, causal masks and windows aligned to the bottom right, dropout on the softmax weights). What differs:

* the log-sum-exp that `return_attn_probs=True` returns has a gradient;
* the dropout mask is `diyfa.dropout_mask`, the same on every device;
* the gradient of a packed input is one packed tensor, and nothing is copied in either direction;
* head dimensions up to 512 (576 for q and k), V of another head dimension than K, float32 inputs, NPUs.

There is no `backend=` argument: the tensors' device decides, or `diyfa.use_backend`, or DIYFA_BACKEND.

Sequence-parallel libraries build on the private functions below the public ones (`_flash_attn_forward`,
`_flash_attn_backward` and the two for packed sequences). They have no autograd.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from diyfa import validation
from diyfa.attention import Words, attend, checked_options, packed_lengths
from diyfa.attn_probs import signed_probabilities
from diyfa.keywords import refuse_unknown, without_unknown
from diyfa.kvcache import attend_packed, flash_attn_with_kvcache
from diyfa.options import NO_LENGTHS, UNBOUNDED, Lengths, pack
from diyfa.problem import VARLEN

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
]  # fmt: skip

# out alone, or (out, softmax_lse, S_dmask)
FlashAttnResult = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Window = tuple[int, int]


WORDS = Words("return_attn_probs", "softmax_scale", "window_size")


def _attend(
    owners: dict[str, torch.Tensor],
    lengths: Lengths | None,
    return_attn_probs: bool,
    dropout_p: float,
    sm_scale: float | None,
    causal: bool,
    window: Window,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
) -> FlashAttnResult:
    """Run one call. `owners` are q, k and v, or the tensors that pack them; other arguments have diyfa's names."""
    arguments: dict[str, Any] = {
        "layout": "bshd" if lengths is None else VARLEN, "causal": causal, "sm_scale": sm_scale, "window": window,
        "softcap": softcap, "alibi_slopes": alibi_slopes, "dropout_p": dropout_p, "deterministic": deterministic,
    }  # fmt: skip
    return attend(owners, lengths or NO_LENGTHS, return_attn_probs, arguments, WORDS, signed_probabilities)


def _attend_pages(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend packed queries to pages, or to the first `seqused_k` keys of packed sequences -> out and lse."""
    for name in ("max_seqlen_q", "max_seqlen_k"):
        arguments[name] = validation.check_length(name, arguments[name])
    arguments["window"] = validation.check_window(arguments["window"], "window_size")
    default: dict[str, Any] = dict.fromkeys(("seqused_k", "sinks", "out", "backend"))
    default |= {"variant": "auto", "scale_name": "softmax_scale", "num_splits": 0}
    return attend_packed(q, k, v, {**default, **arguments})


@without_unknown
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **unknown: NoReturn,
) -> FlashAttnResult:
    """Return the attention of (B, S, H, D) tensors.

    Args:
        q: (B, Sq, H, D); float16, bfloat16 or float32. Last stride 1, others free.
        k, v: (B, Sk, Hk, D) and (B, Sk, Hk, Dv); H a multiple of Hk.
        dropout_p: probability of dropping a softmax weight; other weights are scaled by 1/(1 - p).
        softmax_scale: factor of the scores; default 1/sqrt(D).
        causal: query i sees keys j <= i + Sk - Sq.
        window_size: (left, right), a pair, list or tensor of integers: query i sees keys from i + Sk - Sq - left to
            i + Sk - Sq + right; -1 is unbounded; with `causal` right is at most 0.
        softcap: scores become softcap · tanh(score / softcap); 0 is off.
        alibi_slopes: (H,) or (B, H) float32; adds -slope · |i + Sk - Sq - j| to the scores.
        deterministic: gradients are bitwise equal from run to run.
        return_attn_probs: return `softmax_lse` and `S_dmask`, too.

    Returns:
        out (B, Sq, H, Dv), or with `return_attn_probs` the triple

        * out;
        * softmax_lse (B, H, Sq) float32, natural logarithm, differentiable; +inf for a row that sees no key;
        * S_dmask: empty if dropout_p is 0, else the softmax weights before dropout, (B, H, Sq, Sk) padded with zeros to
          multiples of 128, in q's dtype and without a gradient. Dropped weights are negative (-0.0 for a weight of
          zero). Plain PyTorch computes the dense matrix: for tests only.

    Raises:
        ValueError, TypeError: an argument does not fit or no kernel can run the call, before anything is launched.
    """
    if unknown:
        refuse_unknown(flash_attn_func, unknown)
    tail = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return _attend({"q": q, "k": k, "v": v}, None, return_attn_probs, *tail)


@without_unknown
def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **unknown: NoReturn,
) -> FlashAttnResult:
    """`flash_attn_func` of q (B, Sq, H, D) and kv (B, Sk, 2, Hk, D), whose gradient comes packed like it."""
    if unknown:
        refuse_unknown(flash_attn_kvpacked_func, unknown)
    tail = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return _attend({"q": q, "kv": kv}, None, return_attn_probs, *tail)


@without_unknown
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **unknown: NoReturn,
) -> FlashAttnResult:
    """`flash_attn_func` of qkv (B, S, 3, H, D), whose gradient comes packed like it."""
    if unknown:
        refuse_unknown(flash_attn_qkvpacked_func, unknown)
    tail = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return _attend({"qkv": qkv}, None, return_attn_probs, *tail)


@without_unknown
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    **unknown: NoReturn,
) -> FlashAttnResult:
    """`flash_attn_func` for sequences of different lengths packed one after another.

    Args:
        q, k, v: (Tq, H, D), (Tk, Hk, D), (Tk, Hk, Dv).
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 on q's device: sequence b is the rows from [b] to [b + 1].
        max_seqlen_q, max_seqlen_k: at least the longest sequence of each side; an int or a tensor of one element.
        block_table: (B, pages of a sequence) int32: k and v are pages (pages, page size, Hk, D) of any size, and
            cu_seqlens_k gives lengths only. There is no dropout and no backward pass then.
        others: as for `flash_attn_func`; positions count from the start of each sequence.

    Returns:
        out (Tq, H, Dv), or (out, softmax_lse (H, Tq), S_dmask (B, H, max_seqlen_q, max_seqlen_k) padded likewise).
    """
    if unknown:
        refuse_unknown(flash_attn_varlen_func, unknown)
    if block_table is not None:
        validation.check_booleans(causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs)
        out, lse = _attend_pages(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k, dropout_p=dropout_p, sm_scale=softmax_scale, causal=causal, window=window_size,
            softcap=softcap, alibi_slopes=alibi_slopes, block_table=block_table,
        )  # fmt: skip
        return (out, lse, q.new_empty(0)) if return_attn_probs else out
    lengths = packed_lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    tail = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return _attend({"q": q, "k": k, "v": v}, lengths, return_attn_probs, *tail)


@without_unknown
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **unknown: NoReturn,
) -> FlashAttnResult:
    """`flash_attn_varlen_func` of q (Tq, H, D) and kv (Tk, 2, Hk, D), whose gradient comes packed like it."""
    if unknown:
        refuse_unknown(flash_attn_varlen_kvpacked_func, unknown)
    lengths = packed_lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    tail = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return _attend({"q": q, "kv": kv}, lengths, return_attn_probs, *tail)


@without_unknown
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **unknown: NoReturn,
) -> FlashAttnResult:
    """`flash_attn_varlen_func` of qkv (T, 3, H, D), whose gradient comes packed like it."""
    if unknown:
        refuse_unknown(flash_attn_varlen_qkvpacked_func, unknown)
    longest = validation.check_length("max_seqlen", max_seqlen)
    lengths = Lengths(cu_seqlens, cu_seqlens, None, longest, longest)
    tail = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return _attend({"qkv": qkv}, lengths, return_attn_probs, *tail)


# ---- Functions that sequence-parallel libraries call ------------------------------------------------------------


def _check_return_softmax(return_softmax: bool, causal: bool, dropout_p: float) -> None:
    validation.check_booleans(causal=causal, return_softmax=return_softmax)
    if return_softmax and not dropout_p:
        raise ValueError("return_softmax=True needs dropout_p > 0: it shows what dropout kept")


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths | None, return_softmax: bool, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    _check_return_softmax(return_softmax, arguments["causal"], arguments["dropout_p"])
    validation.check_tensors(q=q, k=k, v=v)
    arguments["layout"] = "bshd" if lengths is None else VARLEN
    lengths = lengths or NO_LENGTHS
    options = checked_options(q, k, v, lengths, arguments, WORDS)._replace(needs_grad=True)
    with torch.no_grad():
        out, lse = torch.ops.diyfa.attention_fwd(q, k, v, "", *pack(lengths, options))
        probabilities = signed_probabilities(q, k, lse, lengths, options) if return_softmax else q.new_empty(0)
    rng_state = q.new_empty(2, dtype=torch.int64) if options.rng_state is None else options.rng_state
    return out, lse, probabilities, rng_state


def _backward(
    dout: torch.Tensor,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    gradients: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    lengths: Lengths | None,
    **arguments: Any,
) -> torch.Tensor:
    """Fill `gradients`, buffers of q, k and v or None; return delta. `saved`: q, k, v, out and the log-sum-exp."""
    q, k, v, out, softmax_lse = saved
    validation.check_booleans(causal=arguments["causal"], deterministic=arguments["deterministic"])
    validation.check_tensors(dout=dout, q=q, k=k, v=v, out=out, softmax_lse=softmax_lse)
    validation.check_scalars(None, 0.0, arguments["dropout_p"])
    if not arguments["dropout_p"]:
        arguments["rng_state"] = None  # unused without dropout
    elif arguments["rng_state"] is None:
        raise ValueError("dropout_p > 0 needs the rng_state that the forward pass returned")
    arguments["layout"] = "bshd" if lengths is None else VARLEN
    lengths = lengths or NO_LENGTHS
    options = checked_options(q, k, v, lengths, arguments, WORDS)._replace(needs_grad=True)
    out_shape = (*q.shape[:-1], v.shape[-1])
    lse_shape = (q.shape[1], q.shape[0]) if options.layout == VARLEN else (q.shape[0], q.shape[2], q.shape[1])
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    expected = [
        ("dout", dout, out_shape, q.dtype), ("out", out, out_shape, q.dtype),
        ("softmax_lse", softmax_lse, lse_shape, lse_dtype),
    ]  # fmt: skip
    for name, buffer, template in zip(("dq", "dk", "dv"), gradients, (q, k, v), strict=True):
        if buffer is not None:
            validation.check_tensors(**{name: buffer})
            expected.append((name, buffer, tuple(template.shape), q.dtype))
    for name, x, shape, dtype in expected:
        validation.check_same_device(q, **{name: x})
        if tuple(x.shape) != tuple(shape):
            raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(x.shape)}")
        if x.dtype != dtype:
            raise TypeError(f"{name} must be {validation.dtype_name(dtype)}, got {validation.dtype_name(x.dtype)}")
        if name in ("dq", "dk", "dv"):
            validation.check_last_stride(**{name: x})
            validation.check_not_expanded(**{name: x})
    with torch.no_grad():
        dout, out = (x if x.stride(-1) == 1 else x.contiguous() for x in (dout, out))
        softmax_lse = softmax_lse.contiguous()
        into = [torch.empty_like(x) if to is None else to for to, x in zip(gradients, (q, k, v), strict=True)]
        delta = torch.empty_like(softmax_lse)
        torch.ops.diyfa.attention_bwd_out(
            dout, None, q, k, v, out, softmax_lse, *into, delta, *pack(lengths, options)
        )  # fmt: skip
        return delta


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (out, softmax_lse, S_dmask, rng_state) of one block, without autograd.

    S_dmask is empty unless `return_softmax` is set, which needs dropout_p > 0. rng_state (2,) int64 is meaningless if
    dropout_p is 0.
    """
    return _forward(
        q, k, v, None, return_softmax, dropout_p=dropout_p, sm_scale=softmax_scale, causal=causal,
        window=(window_size_left, window_size_right), softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_flash_attn_forward` for packed sequences. Rows of no sequence are zero with or without `zero_tensors`.

    Keys in pages are divided into `num_splits` chunks, which run in parallel; 0: chosen for the device. Other keys are
    not divided.
    """
    num_splits = validation.check_length("num_splits", num_splits)
    if leftpad_k is not None:
        raise ValueError("leftpad_k is not implemented: cut the sequences with cu_seqlens_k")
    if block_table is not None or seqused_k is not None:
        _check_return_softmax(return_softmax, causal, dropout_p)
        with torch.no_grad():
            out, lse = _attend_pages(
                q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
                max_seqlen_k=max_seqlen_k, dropout_p=dropout_p, sm_scale=softmax_scale, causal=causal,
                window=(window_size_left, window_size_right), softcap=softcap, alibi_slopes=alibi_slopes,
                block_table=block_table, seqused_k=seqused_k, num_splits=num_splits,
            )  # fmt: skip
            return out, lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)
    lengths = packed_lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _forward(
        q, k, v, lengths, return_softmax, dropout_p=dropout_p, sm_scale=softmax_scale, causal=causal,
        window=(window_size_left, window_size_right), softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the gradients of one block of keys into dq, dk, dv (last stride 1, any others).

    `out` and `softmax_lse` may be those of attention over more keys than k. Then the gradients are the terms of this
    block, which ring attention adds up. Returns rowsum(dout · out) (B, H, Sq), without flash_attn's padded rows.
    """
    return _backward(
        dout, (q, k, v, out, softmax_lse), (dq, dk, dv), None, dropout_p=dropout_p, sm_scale=softmax_scale,
        causal=causal, window=(window_size_left, window_size_right), softcap=softcap, alibi_slopes=alibi_slopes,
        deterministic=deterministic, rng_state=rng_state,
    )  # fmt: skip


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    """`_flash_attn_backward` for packed sequences; softmax_lse and the result are (H, Tq)."""
    lengths = packed_lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _backward(
        dout, (q, k, v, out, softmax_lse), (dq, dk, dv), lengths, dropout_p=dropout_p, sm_scale=softmax_scale,
        causal=causal, window=(window_size_left, window_size_right), softcap=softcap, alibi_slopes=alibi_slopes,
        deterministic=deterministic, rng_state=rng_state,
    )  # fmt: skip


# flash_attn has two names for each: a Python function and the operator that wraps it.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
