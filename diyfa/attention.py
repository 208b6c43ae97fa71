"""`flash_attention` and `flash_attention_v2`: one call for CUDA, NPU and, asked for, CPU tensors."""

from __future__ import annotations

from dataclasses import replace

import torch

from diyfa import ops, plain, registry, validation
from diyfa.problem import LAYOUTS, VARLEN, AttentionTensors

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Inside torch.autocast, single-precision inputs are computed in the autocast dtype, as PyTorch's attention is."""
    device_type = tensors[0].device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # meta has no autocast to ask about
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if x.dtype == torch.float32 else x for x in tensors)


UNBOUNDED = (-1, -1)


def normalised_window(window: tuple[int, int], causal: bool, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """The bounds with `causal` in them, -1 for those that exclude nothing."""
    left, right = validation.check_window(window)
    if causal:
        right = 0
    if torch.compiler.is_compiling():  # bounds and lengths may have no value yet; the operator looks at them
        return left, right
    return ops.bounds_that_exclude(left, right, seqlen_q, seqlen_k)


def new_rng_state(device: torch.device) -> torch.Tensor:
    """Seed and offset of one call's dropout mask, (2,) int64, drawn from the default generator of `device`.

    It is drawn on the device, so nothing waits, a captured graph draws anew at every replay, and whatever saves and
    restores the generator (`torch.random.fork_rng`, checkpointing) repeats the mask.
    """
    return torch.randint(0, 2**32, (2,), dtype=torch.int64, device=device)


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: str,
    causal: bool,
    sm_scale: float | None,
    seq_lens: torch.Tensor | None,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    attn_bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    dropout_p: float,
    rng_state: torch.Tensor | None,
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], float, tuple[int, int]]:
    """Check every argument; returns 4-D (q, k, v), the softmax scale and the normalised window."""
    validation.check_tensors(q=q, k=k, v=v)
    if q.dim() == 3 and k.dim() == 3 and v.dim() == 3 and layout == "bhsd":
        # (B·H, S, D): the batch is what seq_lens says, else one; grouped heads stay grouped either way.
        if seq_lens is not None:
            validation.check_tensors(seq_lens=seq_lens)
        batch = 1 if seq_lens is None else max(1, seq_lens.numel())
        if q.shape[0] % batch or k.shape[0] % batch or v.shape[0] % batch:
            raise ValueError(
                f"the first dimension of 3-D q, k, v must be a multiple of the batch {batch} of seq_lens, "
                f"got {q.shape[0]}, {k.shape[0]}, {v.shape[0]}"
            )
        q, k, v = (x.unflatten(0, (batch, x.shape[0] // batch)) for x in (q, k, v))
    q, k, v = autocast(q, k, v)
    dims = LAYOUTS[layout]
    validation.check_qkv(q, k, v, dims)
    validation.check_scalars(sm_scale, softcap, dropout_p)
    b, h, s, d = dims
    q_shape = q.shape
    seqlen_q, seqlen_k = q_shape[s], k.shape[s]
    bounds = normalised_window(window, causal, seqlen_q, seqlen_k)
    if seq_lens is not None:
        validation.check_seq_lens(seq_lens, q, q.shape[b], seqlen_k)
    if alibi_slopes is not None or attn_bias is not None or sinks is not None:
        validation.check_features(q, q.shape[b], q.shape[h], seqlen_q, seqlen_k, alibi_slopes, attn_bias, sinks)
    if rng_state is not None:
        validation.check_rng_state(rng_state, q)
    scale = q_shape[d] ** -0.5 if sm_scale is None else float(sm_scale)
    return (q, k, v), scale, bounds


def _attend(
    layout: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    sm_scale: float | None,
    seq_lens: torch.Tensor | None,
    variant: str,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    attn_bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    dropout_p: float,
    rng_state: torch.Tensor | None,
    deterministic: bool,
    return_lse: bool,
    backend: str | None,
) -> Result:
    if not (type(causal) is type(deterministic) is type(return_lse) is bool):
        validation.check_booleans(causal=causal, deterministic=deterministic, return_lse=return_lse)
    key = None
    no_tensors = seq_lens is None and alibi_slopes is None and attn_bias is None and sinks is None and rng_state is None
    if no_tensors and plain.is_unseen():
        window = validation.check_window(window)  # a list or a tensor may change, and cannot be a key
        key = plain.key_of(
            q, k, v, layout, causal, sm_scale, window, softcap, dropout_p, deterministic, variant,
            backend or registry.forced_backend(),
        )  # fmt: skip
        plan = plain.find(key)
        if plan is not None:
            return ops.run_plan(plan, q, k, v, return_lse)
    (q4, k4, v4), scale, bounds = _prepare(
        q, k, v, layout, causal, sm_scale, seq_lens, window, softcap, alibi_slopes, attn_bias, sinks, dropout_p,
        rng_state,
    )  # fmt: skip
    if dropout_p and rng_state is None:
        rng_state = new_rng_state(q.device)
    out, lse = ops.attention(
        q4,
        k4,
        v4,
        layout=layout,
        sm_scale=scale,
        window=bounds,
        softcap=float(softcap),
        dropout_p=float(dropout_p),
        seq_lens=seq_lens,
        alibi_slopes=alibi_slopes,
        attn_bias=attn_bias,
        sinks=sinks,
        rng_state=rng_state if dropout_p else None,
        deterministic=deterministic,
        backend=backend or "",
        variant=variant,
    )
    if key is not None and not dropout_p and q4 is q and k4 is k and v4 is v:  # neither 3-D nor cast
        plan = ops.plan_of(q, k, v, layout, scale, bounds, softcap, deterministic, backend or "", variant)
        plain.remember(key, plan)
    if q.dim() == 3:
        out, lse = out.flatten(0, 1), lse.flatten(0, 1)
    return (out, lse) if return_lse else out


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    sm_scale: float | None = None,
    seq_lens: torch.Tensor | None = None,
    *,
    variant: str = "auto",
    window: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> Result:
    """softmax(q kᵀ · sm_scale) v without ever storing the (Sq, Sk) matrix.

    Args:
        q: (B, H, Sq, D), or (B·H, Sq, D); float16, bfloat16 or float32. D is 1 to 576, v's 1 to 512. Last stride 1,
            others free.
        k, v: (B, Hk, Sk, D) and (B, Hk, Sk, Dv), or 3-D like q. H must be a multiple of Hk (grouped-query attention).
        causal: query i sees keys j <= i + Sk - Sq (aligned to the bottom right).
        sm_scale: factor of the scores; default 1/sqrt(D).
        seq_lens: (B,) int32, 0 < length <= Sk. Keys from the length on are masked. The queries of the sample are its
            first min(length, Sq) rows; output rows beyond them are 0. Causal masks and windows align to these lengths.
        variant: "auto", "v1" (FlashAttention, Dao et al. 2022, arXiv:2205.14135, algorithm 1: key/value blocks
            outermost), "v2" (FlashAttention-2, Dao 2023, arXiv:2307.08691, algorithm 1: query blocks outermost,
            normalisation at the end), or any name of `diyfa.kernels_for`.
        window: (left, right): query i sees keys from i + Sk - Sq - left to i + Sk - Sq + right; -1 is unbounded.
        softcap: scores become softcap · tanh(score / softcap); 0 is off.
        alibi_slopes: (H,) or (B, H) float32; adds -slope · |i + Sk - Sq - j| to the scores.
        attn_bias: broadcastable to (B, H, Sq, Sk), in q's dtype or another; added to the scores.
        sinks: (H,) float32 logits, one for each head, that join the softmax denominator; -inf is none.
        dropout_p: probability of dropping a softmax weight; kept ones are scaled by 1/(1 - p).
        rng_state: (2,) int64 on q's device, seed and offset of the dropout mask (`diyfa.dropout_mask` shows it);
            default: drawn from the device's default generator.
        deterministic: gradients are bitwise equal from run to run.
        return_lse: also return the log-sum-exp of the scores (natural logarithm), (B, H, Sq) float32.
        backend: name of a backend that must run the call; default: the one made for the tensors' device.

    Returns:
        The output, shaped and typed like q with v's feature size; with `return_lse` the pair (out, lse). A row that
        sees no key has output 0 and lse +inf.

    Raises:
        ValueError, TypeError: an argument does not fit, or what was asked for explicitly cannot run, with the reason.
    """
    return _attend(
        "bhsd", q, k, v, causal, sm_scale, seq_lens, variant, window, softcap, alibi_slopes, attn_bias, sinks,
        dropout_p, rng_state, deterministic, return_lse, backend,
    )  # fmt: skip


def flash_attention_v2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    sm_scale: float | None = None,
    seq_lens: torch.Tensor | None = None,
    *,
    variant: str = "auto",
    window: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> Result:
    """`flash_attention` for the layout (B, S, H, D) of q, k, v and the output; everything else is the same.

    The log-sum-exp stays (B, H, Sq).
    """
    return _attend(
        "bshd", q, k, v, causal, sm_scale, seq_lens, variant, window, softcap, alibi_slopes, attn_bias, sinks,
        dropout_p, rng_state, deterministic, return_lse, backend,
    )  # fmt: skip


def flash_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    sm_scale: float | None = None,
    *,
    variant: str = "auto",
    window: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> Result:
    """`flash_attention` for sequences of different lengths packed one after another, without padding.

    Args:
        q: (Tq, H, D); k, v: (Tk, Hk, D) and (Tk, Hk, Dv). Last stride 1, others free.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 on q's device: sequence b is the rows from [b] to [b + 1]. It may be
            empty. Values on an accelerator are not read by the host; kernels never leave the tensors.
        max_seqlen_q, max_seqlen_k: at least the longest sequence of each side.
        others: as for `flash_attention`; masks, windows, ALiBi and dropout count positions within each sequence.

    Returns:
        The output (Tq, H, Dv); with `return_lse` also the log-sum-exp (H, Tq) float32. Rows that belong to no sequence
        have output 0 and lse +inf, like rows that see no key.

    Raises:
        ValueError, TypeError: as for `flash_attention`.
    """
    validation.check_booleans(causal=causal, deterministic=deterministic, return_lse=return_lse)
    validation.check_tensors(q=q, k=k, v=v)
    q, k, v = autocast(q, k, v)
    max_seqlen_q = validation.check_length("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = validation.check_length("max_seqlen_k", max_seqlen_k)
    validation.check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = attend_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, sm_scale, window, softcap,
        alibi_slopes, sinks, dropout_p, rng_state, deterministic, variant, backend, "",
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _check_packed_options(
    q: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    sm_scale: float | None,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    dropout_p: float,
    rng_state: torch.Tensor | None,
) -> None:
    validation.check_scalars(sm_scale, softcap, dropout_p)
    if alibi_slopes is not None or sinks is not None:
        batch, heads = cu_seqlens_q.shape[0] - 1, q.shape[-2]
        validation.check_features(q, batch, heads, max_seqlen_q, max_seqlen_k, alibi_slopes, None, sinks)
    if rng_state is not None:
        validation.check_rng_state(rng_state, q)


def attend_varlen(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    sm_scale: float | None,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    dropout_p: float,
    rng_state: torch.Tensor | None,
    deterministic: bool,
    variant: str,
    backend: str | None,
    packing: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed sequences whose q, k, v and lengths are checked -> (out, lse); `packing` as for `ops.attention`."""
    _check_packed_options(
        q, cu_seqlens_q, max_seqlen_q, max_seqlen_k, sm_scale, softcap, alibi_slopes, sinks, dropout_p, rng_state
    )
    if dropout_p and rng_state is None:
        rng_state = new_rng_state(q.device)
    return ops.attention(
        q,
        k,
        v,
        layout=VARLEN,
        sm_scale=q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale),
        window=normalised_window(window, causal, max_seqlen_q, max_seqlen_k),
        softcap=float(softcap),
        dropout_p=float(dropout_p),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        rng_state=rng_state if dropout_p else None,
        deterministic=deterministic,
        backend=backend or "",
        variant=variant,
        packing=packing,
    )


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    sm_scale: float | None = None,
    seq_lens: torch.Tensor | None = None,
    *,
    layout: str = "bhsd",
    variant: str = "auto",
    window: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> registry.Explanation:
    """Which backend, kernel and tile `flash_attention` with these arguments would run, why, and why no other.

    Where an input requires a gradient, `backward` of the result says the same of the backward pass.
    Nothing is launched. `layout` is "bhsd" (`flash_attention`), "bshd" (`flash_attention_v2`) or "thd"
    (`flash_attention_varlen`, with its lengths). Raises what the call itself would raise.
    """
    if layout not in (*LAYOUTS, VARLEN):
        raise ValueError(f"layout must be one of {', '.join((*LAYOUTS, VARLEN))}, got {layout!r}")
    validation.check_booleans(causal=causal, deterministic=deterministic, return_lse=return_lse)
    if layout == VARLEN:
        if cu_seqlens_q is None or cu_seqlens_k is None or seq_lens is not None or attn_bias is not None:
            raise ValueError("layout 'thd' needs cu_seqlens_q and cu_seqlens_k, and takes no seq_lens and no attn_bias")
        validation.check_tensors(q=q, k=k, v=v)
        q4, k4, v4 = autocast(q, k, v)
        max_seqlen_q = validation.check_length("max_seqlen_q", max_seqlen_q)
        max_seqlen_k = validation.check_length("max_seqlen_k", max_seqlen_k)
        validation.check_varlen(q4, k4, v4, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        _check_packed_options(
            q4, cu_seqlens_q, max_seqlen_q, max_seqlen_k, sm_scale, softcap, alibi_slopes, sinks, dropout_p, rng_state
        )
        scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
        left, right = normalised_window(window, causal, max_seqlen_q, max_seqlen_k)
    else:
        if cu_seqlens_q is not None or cu_seqlens_k is not None:
            raise ValueError(f"cu_seqlens_q and cu_seqlens_k belong to the layout 'thd', got {layout!r}")
        (q4, k4, v4), scale, (left, right) = _prepare(
            q, k, v, layout, causal, sm_scale, seq_lens, window, softcap, alibi_slopes, attn_bias, sinks, dropout_p,
            rng_state,
        )  # fmt: skip
    grads = torch.is_grad_enabled()
    bias_grad = grads and attn_bias is not None and attn_bias.requires_grad
    needs_grad = grads and (bias_grad or any(x.requires_grad for x in (q, k, v)))
    needs_grad = needs_grad or (grads and sinks is not None and sinks.requires_grad)
    chosen = registry.resolve_backend(q4.device, backend or "")
    tensors = AttentionTensors(
        q4, k4, v4, scale, seq_lens, alibi_slopes, attn_bias, sinks, cu_seqlens_q, cu_seqlens_k
    )  # fmt: skip
    scalars = ops.Scalars(
        max_seqlen_q, max_seqlen_k, left, right, float(softcap), dropout_p > 0.0, layout, deterministic, needs_grad,
        bias_grad,
    )  # fmt: skip
    problem = ops.describe_attention(chosen, tensors, scalars)
    forward = registry.explain_choice("attention_fwd", problem, q4.device, backend or "", variant)
    if not needs_grad:
        return forward
    variant = registry.variant_of("attention_bwd", chosen, variant)
    backward = registry.explain_choice("attention_bwd", problem, q4.device, backend or "", variant)
    return replace(forward, backward=backward)
