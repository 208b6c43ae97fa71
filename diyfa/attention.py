"""`flash_attention` and its variants: one call for CUDA, NPU and, with `backend="cpu"`, CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch

from diyfa import ops, registry, validation
from diyfa.eight_bits import ARGUMENTS as EIGHT_BIT_ARGUMENTS
from diyfa.eight_bits import EIGHT_BIT_DTYPES, Quantized, unwrapped
from diyfa.keywords import refuse_unknown, without_unknown
from diyfa.kvcache import attend_packed, explain_packed
from diyfa.masks import BlockMask
from diyfa.ops import new_rng_state
from diyfa.options import (
    DIFFERENTIABLE,
    NO_LENGTHS,
    UNBOUNDED,
    AttentionOptions,
    Lengths,
    optional_from_arguments,
    optional_tensors,
)
from diyfa.plan import attention_key, autocast_dtype, find, is_described_only
from diyfa.problem import LAYOUTS, VARLEN, as_backward
from diyfa.straight_through import attend_straight_through, options_in_16_bits

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
# Arguments that few calls have. The key of a call holds all arguments, so leaving these out where none is given saves a
# microsecond.
RARE = (
    "q_descale", "k_descale", "v_descale", "k_mean", "v_mean", "out_dtype", "mask", "score_fn", "score_tensors",
    "score_grad_fn",
)  # fmt: skip
Input = torch.Tensor | Quantized  # Quantized: float8 or int8 values with their descale and mean


class Words(NamedTuple):
    """Names of arguments as messages show them: diyfa's by default, or flash_attn's (`flash_attn_interface.py`)."""

    returns_lse: str = "return_lse"
    scale: str = "sm_scale"
    window: str = "window"


WORDS = Words()


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors. Inside torch.autocast, float32 ones are cast to its dtype, as PyTorch's attention does."""
    if torch.float32 not in [x.dtype for x in tensors]:
        return tensors
    dtype = autocast_dtype(tensors[0])
    if dtype is None:
        return tensors
    return tuple(x.to(dtype) if x.dtype == torch.float32 else x for x in tensors)


def packed_lengths(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor | None, max_seqlen_q: int, max_seqlen_k: int
) -> Lengths:
    """Return the `Lengths` of packed sequences. The longest lengths may be any kind of integer."""
    longest_q = validation.check_length("max_seqlen_q", max_seqlen_q)
    longest_k = validation.check_length("max_seqlen_k", max_seqlen_k)
    return Lengths(cu_seqlens_q, cu_seqlens_k, None, longest_q, longest_k)


def checked_options(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths, options: dict[str, Any], words: Words = WORDS
) -> AttentionOptions:
    """Check every argument of one call and fill in the defaults.

    `options` are fields of `AttentionOptions`, but `causal` and `window` are as in the public functions, and the scale
    and the backend may be None. The function changes the dictionary, and draws `rng_state` if dropout needs one.
    """
    sizes = validation.check_shapes(q, k, v, lengths, options["layout"])
    sm_scale, softcap, dropout_p = options.get("sm_scale"), options.get("softcap", 0.0), options.get("dropout_p", 0.0)
    validation.check_scalars(sm_scale, softcap, dropout_p, words.scale)
    left, right = validation.check_window(options.pop("window", UNBOUNDED), words.window)
    # Not `bool` of the tuple: torch.compile of PyTorch 2.11 does not trace it.
    has_tensors = len(optional_from_arguments(lengths, options)) > 0
    if has_tensors or q.dtype in EIGHT_BIT_DTYPES:
        validation.check_eight_bit_options(q, options)
    if has_tensors:
        validation.check_optional_tensors(q, sizes, {**options, "seq_lens": lengths.seq_lens})
        validation.check_values(lengths, q, k, options["layout"])
    options["sm_scale"] = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    options["window_left"], options["window_right"] = left, 0 if options.pop("causal", False) else right
    options["softcap"], options["dropout_p"] = float(softcap), float(dropout_p)
    options["out_dtype"] = validation.output_dtype(q, v, options.get("out_dtype"))
    options["deterministic"] = options.get("deterministic", False) or torch.are_deterministic_algorithms_enabled()
    if not dropout_p:
        options["rng_state"] = None
    elif options.get("rng_state") is None:
        options["rng_state"] = new_rng_state(q.device)
    if torch.is_grad_enabled():
        options["needs_grad"] = q.requires_grad or k.requires_grad or v.requires_grad
        for name, gate in DIFFERENTIABLE.items() if has_tensors else ():
            if options.get(name) is not None and options[name].requires_grad:
                options |= {"needs_grad": True, gate or "needs_grad": True}
        if q.dtype in EIGHT_BIT_DTYPES and (
            options["needs_grad"]
            or any(x is not None and x.requires_grad for x in map(options.get, EIGHT_BIT_ARGUMENTS))
        ):
            raise ValueError(
                f"attention of {q.dtype} has no backward pass: quantise with straight_through=True, call it inside "
                "torch.no_grad(), or without inputs that require a gradient"
            )
    options["backend"] = options.get("backend") or registry.forced_backend()
    options["batch_invariant"] = registry.is_batch_invariant()
    if options["batch_invariant"]:
        validation.check_batch_invariant(lengths, options)
    return AttentionOptions(**options)


def _as_4d(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_lens: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Return 3-D q, k, v (B·H, S, D) as (B, H, S, D), others as they are. B is the length of seq_lens, or 1."""
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        return q, k, v
    if seq_lens is not None:
        validation.check_tensors(seq_lens=seq_lens)
    batch = 1 if seq_lens is None else max(1, seq_lens.numel())
    if q.shape[0] % batch or k.shape[0] % batch or v.shape[0] % batch:
        raise ValueError(
            f"the first dimension of 3-D q, k, v must be a multiple of the batch {batch} of seq_lens, "
            f"got {q.shape[0]}, {k.shape[0]}, {v.shape[0]}"
        )
    return tuple(x.unflatten(0, (batch, x.shape[0] // batch)) for x in (q, k, v))


def attend(
    owners: dict[str, Any],
    lengths: Lengths,
    returns_lse: bool,
    arguments: dict[str, Any],
    words: Words = WORDS,
    weights: Callable[..., torch.Tensor] | None = None,
) -> Any:
    """Run one call of a public function -> out, or (out, lse).

    1. Form the key of the call from the tensors as they are given, and look its plan up. Packed tensors have none yet.
    2. Without a plan: pass DTensors and `Quantized` to their own functions. Cast for autocast, make 3-D tensors 4-D,
       split packed ones (`_prepared`). If that gave other tensors, look up the plan of these.
    3. With a plan, check values of lengths and run it. Without, check every argument, make the plan, store it and run
       it. A call that has no key (something traces or transforms it) goes through the operators.

    Kernels read q, k and v. Autograd gives gradients to `tensors`, of which q, k and v are views if some are packed.
    From step 2 on, both are what `_prepared` returns.

    Args:
        owners: {"q": q, "k": k, "v": v}, or the tensors that pack them: {"q": q, "kv": kv} or {"qkv": qkv}.
        arguments: all other arguments and the layout, under diyfa's names. The function changes them.
        weights: with `returns_lse`, the result of `weights(q, k, lse, lengths, options)` follows lse if the call has
            dropout, else a tensor without elements.
    """
    tensors = tuple(owners.values())
    first = tensors[0]
    layout = arguments["layout"]
    packing = ("qkv", "kv", "")[len(tensors) - 1]  # what the last of one, two or three tensors packs
    if not (type(arguments["causal"]) is type(arguments["deterministic"]) is type(returns_lse) is bool):
        flags = {name: arguments[name] for name in ("causal", "deterministic")}
        validation.check_booleans(**flags, **{words.returns_lse: returns_lse})
    arguments["window"] = validation.check_window(arguments["window"], words.window)  # a list has no hash
    arguments["backend"] = arguments.get("backend") or registry.forced_backend()
    arguments["batch_invariant"] = registry.is_batch_invariant()
    arguments["packing"] = packing
    score_fn, captured = arguments.pop("score_fn", None), arguments.pop("score_tensors", ())
    score_grad_fn = arguments.pop("score_grad_fn", None)
    if score_fn is not None or score_grad_fn is not None or captured != ():
        arguments |= validation.checked_score_function(score_fn, captured, score_grad_fn)
    mask = arguments.pop("mask", None)
    if mask is not None:
        q, k, _ = tensors  # no function with packed tensors takes a mask
        validation.check_mask(mask, q, k, arguments, words.window)
        arguments["mask_blocks"], arguments["mask_bits"] = mask.blocks, mask.bits
    optional = optional_from_arguments(lengths, arguments)
    plan = key = None
    addresses: list[int] = []
    if not packing:
        q, k, v = tensors
        key, addresses = attention_key(tensors, lengths, arguments.values(), optional)
        plan = find(key)
    if plan is None:
        if key is None:  # there is no key of DTensors or `Quantized`, and none of packed tensors yet
            unchecked = {
                "mask": mask, "score_fn": score_fn, "score_tensors": captured, "score_grad_fn": score_grad_fn
            }  # fmt: skip
            if any(validation.is_dtensor(x) for x in tensors):
                return _attend_dtensors(owners, lengths, returns_lse, arguments, unchecked, words, weights)
            if any(isinstance(x, Quantized) for x in tensors):
                return _attend_quantized(owners, lengths, returns_lse, arguments, unchecked, words, weights)
            validation.check_tensors(**owners)
        unprepared = tensors
        tensors, (q, k, v) = _prepared(tensors, packing, list(owners), layout, lengths)
        if packing or q is not unprepared[0] or k is not unprepared[1] or v is not unprepared[2]:
            key, addresses = attention_key((q, k, v), lengths, arguments.values(), optional)
            plan = find(key)
    # Three owners: None where fewer tensors pack q, k and v.
    q_owner, k_owner, v_owner = three_owners = (*tensors, None, None)[:3] if packing else tensors
    if not returns_lse:
        weights = None
    # `weights` needs the state of the dropout mask, which only the checked options have.
    if plan is not None and (weights is None or not arguments["dropout_p"]):
        if optional:
            validation.check_values(lengths, q, k, layout)
        result = ops.run_plan(plan, three_owners, optional, addresses, returns_lse)
        if weights is not None:
            result = (*result, q.new_empty(0))
    else:
        options = checked_options(q, k, v, lengths, arguments, words)
        if key is not None and not is_described_only(q):
            plan = ops.plan_of(q, k, v, lengths, options, key)
            checked = optional_tensors(lengths, options)
            result = ops.run_plan(plan, three_owners, checked, addresses, returns_lse)
        else:
            result = ops.attend(q_owner, k_owner, v_owner, lengths, options)
            result = result if returns_lse else result[0]
        if weights is not None:
            weight_tensor = weights(q, k, result[1], lengths, options) if options.dropout_p else q.new_empty(0)
            result = (*result, weight_tensor)
    if layout == "bhsd" and first.dim() == 3:
        return tuple(x.flatten(0, 1) for x in result) if returns_lse else result.flatten(0, 1)
    return result


def _attend_dtensors(
    owners: dict[str, Any],
    lengths: Lengths,
    returns_lse: bool,
    arguments: dict[str, Any],
    unchecked: dict[str, Any],
    words: Words,
    weights: Callable[..., torch.Tensor] | None,
) -> Any:
    """Run a call of DTensors: `attend` of each rank's shards. `unchecked` as for `_attend_quantized`."""
    from diyfa.distributed.dtensor import attend_with_shards

    if unchecked["mask"] is not None:
        raise ValueError("DTensors take no mask: give each rank's part, .to_local(), with its own mask")
    if unchecked["score_fn"] is not None:
        raise ValueError("DTensors take no score_fn, whose positions are those of the whole: use .to_local()")

    def attend_shards(shards: tuple[Any, ...], lengths: Lengths, arguments: dict[str, Any]) -> Any:
        return attend(dict(zip(owners, shards, strict=True)), lengths, returns_lse, arguments, words, weights)

    return attend_with_shards(attend_shards, owners, lengths, arguments)


def _attend_quantized(
    owners: dict[str, Any],
    lengths: Lengths,
    returns_lse: bool,
    arguments: dict[str, Any],
    unchecked: dict[str, Any],
    words: Words,
    weights: Callable[..., torch.Tensor] | None,
) -> Any:
    """Run a call of which some tensors are `Quantized`: `attend` of their values, descales and means.

    Gradients that go straight through have their own path. `unchecked`: mask and score function as the caller gave
    them, which the second `attend` checks anew. `arguments` have their checked forms.
    """
    quantized = [x if isinstance(x, Quantized) else None for x in owners.values()]
    arguments |= unwrapped(owners, arguments)
    validation.check_tensors(**owners)
    dtype = _gradient_dtype(quantized, owners, arguments)
    if dtype is None:
        return attend(owners, lengths, returns_lse, arguments | unchecked, words, weights)
    if unchecked["score_fn"] is not None:
        raise ValueError("a call with gradients of straight_through=True takes no score_fn")
    pair = _attend_straight_through(quantized, owners, lengths, arguments, words, dtype)
    if weights is not None and returns_lse:  # there is no dropout
        return *pair, pair[0].new_empty(0)
    return pair if returns_lse else pair[0]


def _gradient_dtype(
    quantized: list[Quantized | None], owners: dict[str, Any], arguments: dict[str, Any]
) -> torch.dtype | None:
    """Return the dtype of the backward pass of a call of quantised tensors, or None if it has none (straight_through).

    `quantized`: for each of q, k and v the `Quantized` that was given, or None. `owners`: the values of these, and the
    tensors that were given as such.
    """
    sources = [x.source for x in quantized if x is not None and x.source is not None]
    if not sources or not ops.wants_grad(*sources, *map(arguments.get, DIFFERENTIABLE)):
        return None
    if arguments["layout"] not in LAYOUTS:
        raise ValueError("packed sequences of quantised tensors have no backward pass: quantize knows no sequences")
    for (name, values), x in zip(owners.items(), quantized, strict=True):
        if (x is None or x.source is None) and values.requires_grad:
            raise ValueError(f"{name} requires a gradient, so it must come from quantize(…, straight_through=True)")
    return torch.float16 if torch.float16 in [x.dtype for x in sources] else torch.bfloat16


def _attend_straight_through(
    quantized: list[Quantized | None],
    owners: dict[str, Any],
    lengths: Lengths,
    arguments: dict[str, Any],
    words: Words,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a call of quantised tensors with gradients of the inputs that they were made from -> (out, lse).

    `quantized` and `owners` as for `_gradient_dtype`, which returns `dtype`.
    """
    q, k, v = owners.values()
    if arguments["layout"] == "bhsd":
        q, k, v = _as_4d(q, k, v, lengths.seq_lens)
    with torch.no_grad():
        options = checked_options(q, k, v, lengths, arguments, words)
    sources = [None if x is None else x.source for x in quantized]
    sources = [None if x is None else x.view(y.shape) for x, y in zip(sources, (q, k, v), strict=True)]
    out, lse = attend_straight_through(sources, (q, k, v), lengths, options, dtype)
    if owners["q"].dim() == 3:
        return out.flatten(0, 1), lse.flatten(0, 1)
    return out, lse


def _prepared(
    tensors: tuple[torch.Tensor, ...], packing: str, names: list[str], layout: str, lengths: Lengths
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Return (the tensors, cast for autocast and 4-D if they were 3-D; q, k and v, which are these or their views)."""
    prepared: Any = autocast(*tensors)
    if layout == "bhsd" and tensors[0].dim() == 3:
        q, k, v = prepared
        prepared = _as_4d(q, k, v, lengths.seq_lens)
    return prepared, _views(packing, prepared, names, layout) if packing else prepared


def _views(packing: str, tensors: tuple[torch.Tensor, ...], names: list[str], layout: str) -> tuple[torch.Tensor, ...]:
    """Return q, k and v. The last tensor has those that `packing` names: (…, 2 or 3, H, D) becomes views (…, H, D).

    `names`: of the tensors, for messages.
    """
    packed, n_packed = tensors[-1], len(packing)  # a letter of `packing` for each packed tensor
    if packed.dim() != (4 if layout == VARLEN else 5) or packed.shape[-3] != n_packed:
        leading = "(total" if layout == VARLEN else "(batch, seqlen"
        raise ValueError(
            f"{names[-1]} must have shape {leading}, {n_packed}, heads, head_dim), got {tuple(packed.shape)}"
        )
    return (*tensors[:-1], *packed.unbind(-3))


def _over_cache(
    owners: dict[str, Any], arguments: dict[str, Any], return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Check what a call over a cache does not take, lengths and window -> (q, k, v, arguments) of `attend_packed`.

    `arguments`: those of `flash_attention_varlen` by name. The function changes them and `owners`.
    """
    arguments |= unwrapped(owners, arguments)
    if given := [name for name in (*EIGHT_BIT_ARGUMENTS, "out_dtype") if arguments[name] is not None]:
        raise ValueError(
            f"a call over a cache (block_table, seqused_k, out) takes no {', '.join(given)}: eight_bits are for calls "
            "without one; flash_attn_with_kvcache reads caches of float8"
        )
    validation.check_no_score_function(*[arguments[x] for x in ("score_fn", "score_tensors", "score_grad_fn")])
    flags = {name: arguments[name] for name in ("causal", "deterministic")}
    validation.check_booleans(**flags, return_lse=return_lse)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        arguments[name] = validation.check_length(name, arguments[name])
    arguments |= {"window": validation.check_window(arguments["window"]), "scale_name": "sm_scale", "num_splits": 0}
    return owners["q"], owners["k"], owners["v"], arguments


@without_unknown
def flash_attention(
    q: Input,
    k: Input,
    v: Input,
    causal: bool = False,
    sm_scale: float | None = None,
    seq_lens: torch.Tensor | None = None,
    *,
    variant: str = "auto",
    window: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    mask: BlockMask | None = None,
    score_fn: Any = None,
    score_tensors: Sequence[torch.Tensor] = (),
    score_grad_fn: Any = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    k_mean: torch.Tensor | None = None,
    v_mean: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **unknown: NoReturn,
) -> Result:
    """Return softmax(q kᵀ · sm_scale) v without ever storing the (Sq, Sk) matrix.

    Args:
        q: (B, H, Sq, D), or (B·H, Sq, D); float16, bfloat16 or float32. D is 1 to 576, v's 1 to 512. Last stride 1,
            others free. `diyfa.quantize` makes float8_e4m3fn and int8, and says how these get gradients; float8_e5m2
            is taken, too.
        k, v: (B, Hk, Sk, D) and (B, Hk, Sk, Dv), or 3-D like q. H must be a multiple of Hk (grouped-query attention).
            They have q's dtype; beside int8 v has float8, float16 or bfloat16.
        causal: query i sees keys j <= i + Sk - Sq (aligned to the bottom right).
        sm_scale: factor of the scores; default 1/sqrt(D).
        seq_lens: (B,) int32, 0 < length <= Sk. Keys from the length on are masked. A sample's queries are its first
            min(length, Sq) rows; output rows beyond them are 0. Causal masks and windows align to these lengths.
        variant: "auto", "v1" (FlashAttention, Dao et al. 2022, arXiv:2205.14135, algorithm 1: key/value blocks
            outermost), "v2" (FlashAttention-2, Dao 2023, arXiv:2307.08691, algorithm 1: query blocks outermost,
            normalisation at the end), or any name of `diyfa.kernels_for`.
        window: (left, right): query i sees keys from i + Sk - Sq - left to i + Sk - Sq + right; -1 is unbounded.
        softcap: scores become softcap · tanh(score / softcap); 0 is off.
        alibi_slopes: (H,) or (B, H) float32; adds -slope · |i + Sk - Sq - j| to the scores.
        attn_bias: broadcastable to (B, H, Sq, Sk), in q's dtype or another; added to the scores.
        mask: which keys each query sees, a `diyfa.BlockMask`. Its empty blocks are skipped in both passes. It counts
            rows and columns of the tensors, also with seq_lens. It stands in place of causal and window.
        score_fn: a `@triton.jit` function of (score, b, h, i, j, captured tensors) that returns the new score. It gets
            what the other arguments make of a score, float32 in natural units, the sample, the query head, and the
            positions of the query (as for causal: the last is at the last key) and of the key. -inf hides the key.
        score_tensors: the captured tensors, contiguous, four at most. The function gets their pointers and reads them
            by tl.load, only for pairs that no other argument hides. Those of floating-point numbers have gradients.
        score_grad_fn: a jit function of the same parameters that returns the derivative of score_fn by the score;
            default: derived.
        sinks: (H,) float32 logits, one for each head, that join the softmax denominator; -inf is none.
        dropout_p: probability of dropping a softmax weight; other weights are scaled by 1/(1 - p).
        rng_state: (2,) int64 on q's device, seed and offset of the dropout mask (`diyfa.dropout_mask` shows it);
            default: drawn from the device's default generator. (2 + 4·B,) for a block of a larger problem: four more
            numbers for each sample, its index in that problem and those of its first query head, query and key.
        deterministic: gradients are bitwise equal from run to run, as with `torch.use_deterministic_algorithms(True)`.
        return_lse: also return the log-sum-exp of the scores (natural logarithm), (B, H, Sq) float32.
        backend: name of a backend that must run the call; default: the one made for the tensors' device.
        q_descale, k_descale, v_descale: float32 factors of q, k and v in float8 or int8, positive: one number, (B, Hk),
            or for q (B, H, ceil(Sq / 128)) and for k (B, Hk, ceil(Sk / 64)), one for each block of rows. Default: 1.
        k_mean, v_mean: (B, Hk, D) and (B, Hk, Dv) float32, added to k and v of float8 or int8 after the factor.
        out_dtype: dtype of the output of float8 and int8; default: v's if that has 16 bits, else bfloat16.

    Returns:
        The output, shaped and typed like q (float8 and int8: `out_dtype`) with v's feature size; with `return_lse` the
        pair (out, lse). A row that sees no key has output 0 and lse +inf.

    Raises:
        ValueError, TypeError: an argument does not fit, or what was named explicitly cannot run, with the reason.
    """
    if unknown:
        refuse_unknown(flash_attention, unknown)
    lengths = NO_LENGTHS if seq_lens is None else Lengths(seq_lens=seq_lens)
    arguments: dict[str, Any] = {
        "layout": "bhsd", "causal": causal, "sm_scale": sm_scale, "variant": variant, "window": window,
        "softcap": softcap, "alibi_slopes": alibi_slopes, "attn_bias": attn_bias, "sinks": sinks,
        "dropout_p": dropout_p, "rng_state": rng_state, "deterministic": deterministic, "backend": backend,
    }  # fmt: skip
    if not (q_descale is k_descale is v_descale is k_mean is v_mean is out_dtype is mask is score_fn is score_grad_fn
            is None) or score_tensors != ():  # fmt: skip
        arguments |= zip(RARE, (q_descale, k_descale, v_descale, k_mean, v_mean, out_dtype, mask, score_fn,
                                score_tensors, score_grad_fn), strict=True)  # fmt: skip
    return attend({"q": q, "k": k, "v": v}, lengths, return_lse, arguments)


@without_unknown
def flash_attention_v2(
    q: Input,
    k: Input,
    v: Input,
    causal: bool = False,
    sm_scale: float | None = None,
    seq_lens: torch.Tensor | None = None,
    *,
    variant: str = "auto",
    window: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    mask: BlockMask | None = None,
    score_fn: Any = None,
    score_tensors: Sequence[torch.Tensor] = (),
    score_grad_fn: Any = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    k_mean: torch.Tensor | None = None,
    v_mean: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **unknown: NoReturn,
) -> Result:
    """`flash_attention` for the layout (B, S, H, D) of q, k, v and the output.

    Everything else is equal; the log-sum-exp stays (B, H, Sq).
    """
    if unknown:
        refuse_unknown(flash_attention_v2, unknown)
    lengths = NO_LENGTHS if seq_lens is None else Lengths(seq_lens=seq_lens)
    arguments: dict[str, Any] = {
        "layout": "bshd", "causal": causal, "sm_scale": sm_scale, "variant": variant, "window": window,
        "softcap": softcap, "alibi_slopes": alibi_slopes, "attn_bias": attn_bias, "sinks": sinks,
        "dropout_p": dropout_p, "rng_state": rng_state, "deterministic": deterministic, "backend": backend,
    }  # fmt: skip
    if not (q_descale is k_descale is v_descale is k_mean is v_mean is out_dtype is mask is score_fn is score_grad_fn
            is None) or score_tensors != ():  # fmt: skip
        arguments |= zip(RARE, (q_descale, k_descale, v_descale, k_mean, v_mean, out_dtype, mask, score_fn,
                                score_tensors, score_grad_fn), strict=True)  # fmt: skip
    return attend({"q": q, "k": k, "v": v}, lengths, return_lse, arguments)


@without_unknown
def flash_attention_varlen(
    q: Input,
    k: Input,
    v: Input,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    sm_scale: float | None = None,
    *,
    variant: str = "auto",
    window: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    score_fn: Any = None,
    score_tensors: Sequence[torch.Tensor] = (),
    score_grad_fn: Any = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    k_mean: torch.Tensor | None = None,
    v_mean: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    block_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    **unknown: NoReturn,
) -> Result:
    """`flash_attention` for sequences of different lengths packed one after another, without padding.

    With `block_table`, `seqused_k` or `out` the call is inference over a cache: there is no backward pass (the result
    of inputs that require a gradient has a grad_fn that raises) and no dropout, and `variant` is a name of
    `diyfa.kernels_for(op="kvcache_fwd")`.

    Args:
        q: (Tq, H, D); k, v: (Tk, Hk, D) and (Tk, Hk, Dv). Last stride 1, others free.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 on q's device: sequence b is the rows from [b] to [b + 1]. It may be
            empty. Values on an accelerator are not read by the host; kernels never leave the tensors.
        max_seqlen_q, max_seqlen_k: at least the longest sequence of each side.
        block_table: (B, pages of a sequence) int32: k and v are pages (pages, page size, Hk, D), and key j of sequence
            b lies in row j % page size of page block_table[b, j // page size]. cu_seqlens_k then gives lengths only,
            and may be None if seqused_k gives them. Entries of pages that the window hides from every query are not
            read. All others must name pages: a table on the CPU is checked for that. One on the device is not, and the
            effect of keys in no page is undefined.
        seqused_k: (B,) int32: number of valid keys of each sequence.
        out: tensor for the result, (Tq, H, Dv) in q's dtype with last stride 1; not the memory of q, k or v.
        others: as for `flash_attention`; masks, windows, ALiBi and dropout count positions within each sequence.

    Returns:
        The output (Tq, H, Dv); with `return_lse` also the log-sum-exp (H, Tq) float32. Rows that belong to no sequence
        have output 0 and lse +inf, like rows that see no key.

    Raises:
        ValueError, TypeError: as for `flash_attention`.
    """
    if unknown:
        refuse_unknown(flash_attention_varlen, unknown)
    owners: dict[str, Any] = {"q": q, "k": k, "v": v}
    arguments: dict[str, Any] = {
        "layout": VARLEN, "causal": causal, "sm_scale": sm_scale, "variant": variant, "window": window,
        "softcap": softcap, "alibi_slopes": alibi_slopes, "sinks": sinks,
        "dropout_p": dropout_p, "rng_state": rng_state, "deterministic": deterministic, "backend": backend,
        "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale, "k_mean": k_mean, "v_mean": v_mean,
        "out_dtype": out_dtype, "score_fn": score_fn, "score_tensors": score_tensors, "score_grad_fn": score_grad_fn,
    }  # fmt: skip
    if block_table is not None or seqused_k is not None or out is not None:
        cache = {
            "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k,
            "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "block_table": block_table, "out": out,
        }  # fmt: skip
        pair = attend_packed(*_over_cache(owners, arguments | cache, return_lse), return_lse)
        return pair if return_lse else pair[0]
    lengths = packed_lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return attend(owners, lengths, return_lse, arguments)


@without_unknown
def explain(
    q: Input,
    k: Input,
    v: Input,
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
    mask: BlockMask | None = None,
    score_fn: Any = None,
    score_tensors: Sequence[torch.Tensor] = (),
    score_grad_fn: Any = None,
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
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    k_mean: torch.Tensor | None = None,
    v_mean: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    block_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    **unknown: NoReturn,
) -> registry.Explanation:
    """Return the backend, kernel and tile that `flash_attention` would run with these arguments, and why no others.

    If an input requires a gradient, `backward` of the result explains the backward pass. Nothing is launched. `layout`
    is "bhsd" (`flash_attention`), "bshd" (`flash_attention_v2`) or "thd" (`flash_attention_varlen`, with its lengths
    and pages). Raises what the call itself would raise.
    """
    if unknown:
        refuse_unknown(explain, unknown)
    if layout not in (*LAYOUTS, VARLEN):
        raise ValueError(f"layout must be one of {', '.join((*LAYOUTS, VARLEN))}, got {layout!r}")
    validation.check_booleans(causal=causal, deterministic=deterministic, return_lse=return_lse)
    owners: dict[str, Any] = {"q": q, "k": k, "v": v}
    arguments: dict[str, Any] = {
        "layout": layout, "causal": causal, "sm_scale": sm_scale, "variant": variant, "window": window,
        "softcap": softcap, "alibi_slopes": alibi_slopes, "attn_bias": attn_bias, "sinks": sinks,
        "dropout_p": dropout_p, "rng_state": rng_state, "deterministic": deterministic, "backend": backend,
        "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale, "k_mean": k_mean, "v_mean": v_mean,
        "out_dtype": out_dtype,
    }  # fmt: skip
    quantized = [x if isinstance(x, Quantized) else None for x in owners.values()]
    arguments |= unwrapped(owners, arguments)
    validation.check_tensors(**owners)
    gradient_dtype = _gradient_dtype(quantized, owners, arguments)
    is_over_cache = not (block_table is seqused_k is out is None)
    if is_over_cache and layout != VARLEN:
        raise ValueError(f"block_table, seqused_k and out belong to the layout 'thd', got {layout!r}")
    if layout == VARLEN and not (seq_lens is attn_bias is mask is None):
        raise ValueError("layout 'thd' takes no seq_lens, no attn_bias and no mask")
    if is_over_cache:
        return explain_packed(*_over_cache(owners, arguments | {
            "score_fn": score_fn, "score_tensors": score_tensors, "score_grad_fn": score_grad_fn,
            "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k,
            "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "block_table": block_table, "out": out,
        }, return_lse))  # fmt: skip
    q, k, v = autocast(*owners.values())  # from here on the values of those that are `Quantized`
    if layout == VARLEN:
        if cu_seqlens_q is None or cu_seqlens_k is None:
            raise ValueError("layout 'thd' needs cu_seqlens_q and cu_seqlens_k")
        lengths = packed_lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    else:
        if cu_seqlens_q is not None or cu_seqlens_k is not None:
            raise ValueError(f"cu_seqlens_q and cu_seqlens_k belong to the layout 'thd', got {layout!r}")
        if layout == "bhsd":
            q, k, v = _as_4d(q, k, v, seq_lens)
        lengths = Lengths(seq_lens=seq_lens)
    if rng_state is None:  # no call is run, so no random numbers are drawn
        arguments["rng_state"] = torch.empty(2, dtype=torch.int64, device=q.device)
    if score_fn is not None or score_grad_fn is not None or score_tensors != ():
        arguments |= validation.checked_score_function(score_fn, score_tensors, score_grad_fn)
    if mask is not None:
        others = {"layout": layout, "causal": causal, "window": validation.check_window(window)}
        validation.check_mask(mask, q, k, others, "window")
        arguments |= {"mask_blocks": mask.blocks, "mask_bits": mask.bits}
    with torch.set_grad_enabled(torch.is_grad_enabled() and gradient_dtype is None):
        options = checked_options(q, k, v, lengths, arguments)
    explained = _explain_checked(q, k, v, lengths, options, backend or "")
    if gradient_dtype is not None:
        q, k, v = (torch.empty_like(x, dtype=gradient_dtype) for x in (q, k, v))
        trained = _explain_checked(q, k, v, lengths, options_in_16_bits(options), backend or "")
        explained = replace(explained, backward=trained.backward)
    return explained if mask is None or mask.blocks.is_meta else replace(explained, mask=mask.summary())


def _explain_checked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths, options: AttentionOptions, name: str
) -> registry.Explanation:
    """Explain a checked call. `name`: the backend that the caller asked for, or ""."""
    validation.check_derivatives(options)
    backend = registry.resolve_backend(q.device, name)
    problem = ops.describe_attention(backend, q, k, v, lengths, options)
    forward = registry.explain_choice("attention_fwd", problem, q.device, name, options.variant)
    if not options.needs_grad:
        return forward
    problem = as_backward(problem)
    variant = registry.variant_or_auto("attention_bwd", backend, options.variant, problem)
    return replace(forward, backward=registry.explain_choice("attention_bwd", problem, q.device, name, variant))
