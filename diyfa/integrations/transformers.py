"""Hugging Face Transformers: `attn_implementation="diyfa"`, on any device, and `"paged|diyfa"`.

An attention implementation of Transformers has two functions. The mask function gets the model's masks (causal, sliding
window, padding, packed sequences, a cache with free keys, any other) and encodes each in one tensor. The attention
function gets that tensor in every layer. Masks that diyfa's options express need only a small tensor:

    None                    no mask: causality is what the module says
    bool (B, Sk)            padding of attention that is not causal, False where there is no token; (0, Sk): no padding
    int8 (B, Sk, 1 + w)     the same with a window: a query sees w keys on each side
    bool (B, Sk, 1 + r)     padding of causal attention; the cache's last r keys are free, and no query sees them yet
    uint8 (B, Sk, 1 + r)    the same with the window that the model hands on
    int32 (B, S)            packed sequences, causal: the number of each token's sequence
    int64 (B, S)            the same with the window that the model hands on
    (B, 1, Sq, Sk)          any other mask, and masks that a program passes itself: the complete mask, used as a bias

With the other masks a window that the model hands on does not count. A layer must have the Sk keys that its mask was
made for.

Results are those of the model's eager attention. With `quantize=` they have the errors of int8 or float8.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from diyfa.attention import autocast, flash_attention_varlen
from diyfa.eight_bits import Quantized
from diyfa.integrations.eager_attention import attend, attend_in_eight_bits, checked_quantize, mask_as_bias
from diyfa.integrations.seams import Handle, active_handle, record, switch_on
from diyfa.kvcache import flash_attn_with_kvcache
from diyfa.quantization import quantize

NAME = "diyfa"
SEAM = "transformers"
PADDING_DTYPES = (torch.bool, torch.uint8, torch.int8)
NUMBERS_DTYPES = (torch.int32, torch.int64)
CAUSAL_WINDOW_DTYPES = (torch.uint8, torch.int64)
# Models that change the mask that they get, or take an encoder for causal: they get the mask of eager attention.
NEED_EAGER_MASKS = frozenset(("bigbird_pegasus", "bridgetower", "deepseek_v4", "doge", "pix2struct_text_model", "umt5"))

# ---- The mask ------------------------------------------------------------------------------------------------------


def _mask_functions(mask_function: Any) -> list[Any]:
    """Return the functions whose intersection is a mask function of Transformers."""
    if getattr(mask_function, "__qualname__", "") != "and_masks.<locals>.and_mask":
        return [mask_function]
    (functions,) = (cell.cell_contents for cell in mask_function.__closure__)
    return [term for function in functions for term in _mask_functions(function)]


def _sequence_numbers(mask_function: Any) -> torch.Tensor | None:
    """Return the number (B, S) of each token's sequence, or None.

    It is None if the mask is not packed or is more than packed and causal, apart from a window.
    """
    terms = _mask_functions(mask_function)
    names = [getattr(term, "__qualname__", "").split(".")[0] for term in terms]
    if set(names) - {"sliding_window_overlay"} != {"causal_mask_function", "packed_sequence_mask_function"}:
        return None
    return terms[names.index("packed_sequence_mask_function")].__closure__[0].cell_contents


@functools.cache
def _attends_by_itself(config_class: type) -> bool:
    """Return whether a model ignores attn_implementation, as older ones do. Their own attention needs other masks."""
    from transformers import PreTrainedModel

    module = sys.modules.get(config_class.__module__.replace(".configuration_", ".modeling_"))
    if module is None:
        return False
    classes = [x for x in vars(module).values() if isinstance(x, type) and issubclass(x, PreTrainedModel)]
    models = [x for x in classes if x.__module__ == module.__name__]
    flags = ("_supports_attention_backend", "_supports_sdpa", "_supports_flash_attn")
    supports = hasattr(module, "ALL_ATTENTION_FUNCTIONS") or any(getattr(x, name) for x in models for name in flags)
    return bool(models) and not supports


def _has_indexer(config: Any) -> bool:
    """Return whether an indexer chooses the keys of some layers. It reads the complete mask, also a packed one."""
    return any("sparse" in kind for kind in getattr(config, "layer_types", None) or ())


def make_attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Return the mask of one kind of layer, as in the module's table. The arguments are Transformers'.

    1. A packed mask becomes the number of each token's sequence.
    2. The mask is complete if the model reads it, if it depends on a position on the device, or if diyfa's options
       do not express it.
    3. Otherwise the result says what is padding and which keys of a cache are free; None if all queries see all keys.
    """
    # From the submodule itself: not every torch.compile can trace Transformers' lazy modules.
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        eager_mask,
        prepare_padding_mask,
        sdpa_mask,
    )

    tracing, config = torch.compiler.is_compiling(), kwargs.get("config")
    if attention_mask is not None and attention_mask.dim() == 3:
        if attention_mask.shape[2] == 1 or attention_mask.stride(2) == 0:
            return attention_mask  # made here before: generate hands it to the model
        raise ValueError(f"attention_mask must have two or four dimensions, got {tuple(attention_mask.shape)}")
    is_plain = mask_function is causal_mask_function or mask_function is bidirectional_mask_function
    if not tracing and config is not None and _attends_by_itself(config.__class__):
        raise ValueError(
            f"models of {type(config).__name__} have an attention of their own: use attn_implementation='eager'"
        )
    needs_eager_mask = getattr(config, "model_type", "") in NEED_EAGER_MASKS
    window: int = kwargs.get("local_size") or 0
    slides = not is_plain and window > 0 and window == getattr(config, "sliding_window", None)
    # A model that does not permit to skip its mask reads it.
    causal = kwargs.get("allow_is_causal_skip") and (slides or mask_function is causal_mask_function)
    both_ways = kwargs.get("allow_is_bidirectional_skip") and (slides or mask_function is bidirectional_mask_function)
    if not (tracing or causal or both_ways or needs_eager_mask or _has_indexer(config)) and attention_mask is None:
        numbers = _sequence_numbers(mask_function)
        if numbers is not None:
            return numbers.to(torch.int64 if slides else torch.int32)
    # A static cache has its length on the device. With one new token, or in a traced program, do not wait for it.
    depends_on_position = causal or (both_ways and slides)
    is_offset_unread = depends_on_position and isinstance(q_offset, torch.Tensor) and (tracing or q_length == 1)
    end = kv_length  # of the keys up to the last query
    if depends_on_position and not is_offset_unread:
        end = int(q_offset) + q_length - kv_offset
    # diyfa aligns windows at the last query and the last key.
    is_shifted = both_ways and end != kv_length
    if needs_eager_mask or not (causal or both_ways) or is_offset_unread or is_shifted:
        kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        form = eager_mask if needs_eager_mask else sdpa_mask
        return form(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs)
    n_seen = min(kv_length, end)
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length]
        if not tracing and bool(padding[:, :n_seen].all()):
            padding = None
    if padding is None and both_ways and not slides:
        return None
    if padding is None:
        padding = torch.empty((0, kv_length), dtype=torch.bool, device=kwargs.get("device"))
    if causal:
        padding = padding.to(torch.uint8) if slides else padding
        return padding[:, :, None].expand(-1, -1, 1 + kv_length - n_seen)
    return padding.to(torch.int8)[:, :, None].expand(-1, -1, 1 + window) if slides else padding


# ---- The attention -------------------------------------------------------------------------------------------------


Sequences = tuple[torch.Tensor, int]  # offsets of packed sequences, length of the longest


def _cached_on(x: torch.Tensor, compute: Callable[[torch.Tensor], Any]) -> Any:
    """Return compute(x), cached on x until x changes: it waits for the device, and all layers share one mask."""
    if torch.compiler.is_compiling():
        return compute(x)
    version = None if x.is_inference() else x._version  # tensors of inference mode have no version
    known_version, result = getattr(x, "diyfa_cached", (None, None))
    if version is None or version != known_version:
        result = compute(x)
        x.diyfa_cached = (version, result)  # type: ignore[attr-defined]
    return result


def _sequences(begins: torch.Tensor) -> Sequences:
    """Return the sequences that begin where `begins` (B, S) is True, and at the first row of each sample."""
    begins[:, 0] = True
    starts = begins.flatten().nonzero()[:, 0]
    offsets = torch.cat((starts, starts.new_tensor([begins.numel()]))).to(torch.int32)
    return offsets, int(offsets.diff().max())


def _by_number(numbers: torch.Tensor) -> Sequences:
    return _sequences(numbers != numbers.roll(1, 1))


def _by_position(positions: torch.Tensor) -> Sequences | None:
    """Return the sequences that begin at each smallest position, or None if there is one sequence.

    It is the rule of Transformers' flash attention. Other jumps of the position start no sequence: images, skipped
    tokens and interpolation cause them.
    """
    packed = _sequences(positions == positions.min())
    return None if packed[0].shape[0] == 2 else packed


class _Runs(NamedTuple):
    """A padding mask (B, S) read as packed sequences. All fields are None if a sample's tokens have gaps.

    * sequences: the batch as packed sequences. Runs of padding are sequences, too, which no token sees.
    * leftpad: (B,) int32, None if a sample's last row is padding.
    * query_offsets: for attention without causality, in samples: sequence n of the keys has the queries of samples
      [n] to [n + 1]. All queries of a sample belong to the sequence of its tokens, none to its padding.
    """

    sequences: Sequences | None = None
    leftpad: torch.Tensor | None = None
    query_offsets: torch.Tensor | None = None


def _by_padding(padding: torch.Tensor) -> _Runs:
    is_token = padding.bool()
    begins = is_token != is_token.roll(1, 1)
    begins[:, 0] = is_token[:, 0]
    if bool(((begins & is_token).sum(1) > 1).any()):
        return _Runs()
    ends_with_token = bool(is_token[:, -1].all())
    offsets, longest = _sequences(begins)
    # Queries of a sample without any token see its padding.
    has_queries = (is_token | ~is_token.any(1, keepdim=True)).flatten()[offsets[:-1]]
    query_offsets = torch.nn.functional.pad(has_queries.cumsum(0), (1, 0)).to(torch.int32)
    leftpad = is_token.int().argmax(1).to(torch.int32) if ends_with_token else None
    return _Runs((offsets, longest), leftpad, query_offsets)


class _Mask(NamedTuple):
    """A mask of the module's table, decoded. At most one of the tensors is given.

    * reach: number of keys on each side that a query sees, -1 for all.
    * n_free: number of free keys at the end of a cache.
    * padding: (B, Sk - n_free), 0 for padding.
    * numbers: (B, S), the number of each token's sequence.
    * complete: (B or 1, heads or 1, Sq, Sk).
    """

    causal: bool = False
    reach: int = -1
    n_free: int = 0
    padding: torch.Tensor | None = None
    numbers: torch.Tensor | None = None
    complete: torch.Tensor | None = None


def _padding(mask: torch.Tensor) -> torch.Tensor:
    """Return the padding of the keys that some query sees, of a mask of three dimensions."""
    n_free = 0 if mask.dtype == torch.int8 else mask.shape[2] - 1
    return mask[:, : mask.shape[1] - n_free, 0]


def _decoded(mask: torch.Tensor, module: Any, window: int | None, n_keys: int) -> _Mask:
    """Decode a mask of the module's table for a layer with `n_keys` keys that hands on `window`."""
    if mask.dim() == 4:
        return _Mask(complete=mask)
    if mask.dim() != 2 and not (mask.dim() == 3 and mask.dtype in PADDING_DTYPES):
        raise ValueError(f"a mask must be (batch, keys) or (batch, heads, queries, keys), got {tuple(mask.shape)}")
    has_window = mask.dtype in CAUSAL_WINDOW_DTYPES
    if has_window and not window:
        raise ValueError(_no_window(module))
    reach = window - 1 if has_window and window else -1
    if mask.dtype in NUMBERS_DTYPES:
        return _Mask(True, reach, numbers=mask)
    if n_keys != mask.shape[1]:
        raise ValueError(
            f"the mask was made for {mask.shape[1]} keys, but {type(module).__name__} has {n_keys}: a sliding cache "
            "that records its past is cropped before its next use"
        )
    has_padding = mask.shape[0] > 0
    if mask.dim() == 2:
        return _Mask(padding=mask if has_padding else None)
    # Its sequences are cached on the padding, so that all layers of a mask need the same tensor.
    padding = _cached_on(mask, _padding) if has_padding else None
    if mask.dtype == torch.int8:
        return _Mask(reach=mask.shape[2] - 1, padding=padding)
    return _Mask(True, reach, mask.shape[2] - 1, padding)


def _packed_lengths(mask: _Mask, q: torch.Tensor, k: torch.Tensor, extras: dict[str, Any]) -> Any:
    """Return (cu_q, cu_k, longest q, longest k), or () if nothing is packed.

    They come from a collator's lengths, else from the mask, else from position ids that restart: some models' masks
    ignore those.
    """
    if extras.get("cu_seq_lens_q") is not None and mask.complete is None:
        return tuple(extras[f"{name}_{side}"] for name in ("cu_seq_lens", "max_length") for side in "qk")
    packed, positions = None, extras.get("position_ids")
    if mask.numbers is not None:
        packed = _cached_on(mask.numbers, _by_number)
    elif q.shape[:2] != k.shape[:2] or torch.compiler.is_compiling() or extras.get("position_bias") is not None:
        return ()
    elif mask.padding is not None:
        packed, _, query_offsets = _cached_on(mask.padding, _by_padding)
        if packed is not None and not mask.causal and mask.reach < 0:  # keys may be an encoder's
            return query_offsets * q.shape[1], packed[0], q.shape[1], packed[1]
    elif mask.causal and mask.complete is None and isinstance(positions, torch.Tensor):
        packed = _cached_on(positions, _by_position) if positions.shape == (1, q.shape[1]) == q.shape[:2] else None
    return () if packed is None else (packed[0], packed[0], packed[1], packed[1])


def _quantised_packed(qkv: tuple[torch.Tensor, ...], sequences: int, dtype: str) -> tuple[Quantized, ...]:
    """Return packed q, k and v (T, H, D) quantised, with one descale and mean for each head of all sequences."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in qkv):
        raise ValueError(
            f"quantize={dtype!r} does not train packed sequences, nor padded batches, which become packed: train with "
            "samples of one length, or without quantize"
        )
    q, k, v = (x[None] for x in qkv)
    return tuple(
        Quantized(x.values[0], *(None if y is None else y.expand(sequences, *y.shape[1:]) for y in (x.descale, x.mean)))
        for x in quantize(q, k, v, "head", dtype, smooth=True, layout="bshd")
    )


def _attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: tuple[Any, ...],
    options: dict[str, Any],
    eight_bits: str = "",
) -> torch.Tensor:
    """Return the attention of (B, S, H, D) tensors as one packed batch of B · S rows, with `_packed_lengths`."""
    cu_q, cu_k, max_q, max_k = lengths
    batch = q.shape[:2]
    qkv: Any = autocast(*(x.flatten(0, 1) for x in (q, k, v)))
    if eight_bits:
        options = {**options, "out_dtype": qkv[0].dtype}
        qkv = _quantised_packed(qkv, cu_q.shape[0] - 1, eight_bits)
    q, k, v = qkv
    out = flash_attention_varlen(q, k, v, cu_q.to(torch.int32), cu_k.to(torch.int32), int(max_q), int(max_k), **options)
    assert isinstance(out, torch.Tensor), "nobody asks for the log-sum-exp"
    return out.unflatten(0, batch)


def _attend_one_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: _Mask, options: dict[str, Any]
) -> torch.Tensor | None:
    """Return the attention of one new token of each sample over a cache, by split-KV; None if split-KV cannot do it.

    It has no gradient and no dropout, and of masks takes padding on the left only.
    """
    tensors = (q, k, v) if options["sinks"] is None else (q, k, v, options["sinks"])
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if q.shape[1] != 1 or k.shape[1] == 1 or learns or options["dropout_p"]:
        return None
    leftpad = None
    if mask.complete is not None or (mask.padding is not None and torch.compiler.is_compiling()):
        return None
    if mask.padding is not None:
        leftpad = _cached_on(mask.padding, _by_padding).leftpad
        if leftpad is None:
            return None
    out = flash_attn_with_kvcache(
        q, k, v, cache_leftpad=leftpad, softmax_scale=options["sm_scale"], causal=options["causal"],
        window_size=options["window"], softcap=options["softcap"], sinks=options["sinks"],
    )  # fmt: skip
    assert isinstance(out, torch.Tensor), "nobody asks for the log-sum-exp"
    return out


def _no_window(module: Any) -> str:
    return (
        f"{type(module).__name__} masks with a sliding window but does not hand it to its attention: use "
        "attn_implementation='eager'"
    )


def _check(extras: dict[str, Any]) -> None:
    if extras.get("output_attentions"):
        raise ValueError(
            "output_attentions=True needs the weights, which diyfa never forms: use attn_implementation='eager'"
        )
    for name in ("block_indices", "head_mask"):
        if extras.get(name) is not None:
            raise ValueError(f"{name} is not supported by diyfa: use attn_implementation='eager'")


def _only(mask: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return a complete mask without the keys that are not among `indices` (B, Sq, n)."""
    shape = (*indices.shape[:2], mask.shape[-1])
    seen = torch.zeros(shape, dtype=torch.bool, device=mask.device).scatter_(2, indices.long(), True)[:, None]
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))


def _eight_bits(query: torch.Tensor, key: torch.Tensor) -> str:
    """Return the dtype to which a call of (B, H, S, D) tensors quantises, or ""."""
    handle = active_handle(SEAM)
    eight_bits = handle.detail if handle is not None else ""
    if not eight_bits or query.shape[2] > 1 or key.shape[2] == 1:
        return eight_bits
    if not torch.compiler.is_compiling():  # a compiled graph cannot warn
        # Python's default filter shows a line's warning once.
        warnings.warn(
            f"quantize={eight_bits!r} of diyfa's use_in_transformers: new tokens over a cache run in the cache's dtype",
            UserWarning,
            stacklevel=1,
        )
    return ""


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention (B, S, H, D) of (B, H, S, D) tensors, with the arguments of Transformers.

    The call goes the first of these ways that fits: packed sequences, also of a padded batch; one new token over a
    cache; `flash_attention` with the mask, and `position_bias`, as a bias.

    Of `extras` it reads sliding_window, softcap, s_aux, position_bias, position_ids, lengths of packed sequences, and
    indices (B, Sq, n) of the keys that each query sees.
    """
    _check(extras)
    if attention_mask is None:
        mask = _Mask(bool(getattr(module, "is_causal", True) if is_causal is None else is_causal))
    else:
        mask = _decoded(attention_mask, module, extras.get("sliding_window"), key.shape[2])
    bias, indices, sinks = extras.get("position_bias"), extras.get("indices"), extras.get("s_aux")
    if indices is not None and mask.complete is None:
        raise ValueError("indices of the keys that a query sees need a mask (batch, heads, queries, keys) beside them")
    if mask.padding is not None and extras.get("cu_seq_lens_q") is not None:
        raise ValueError("an attention_mask with padding and the lengths of packed sequences exclude each other")
    eight_bits = _eight_bits(query, key)
    route = f"diyfa in {eight_bits}" if eight_bits else "diyfa"
    q, k, v = ((x if x.stride(-1) == 1 else x.contiguous()).transpose(1, 2) for x in (query, key, value))
    if mask.n_free:
        n_seen = k.shape[1] - mask.n_free
        k, v = k[:, :n_seen], v[:, :n_seen]
        bias = None if bias is None else bias[..., :n_seen]
    options: dict[str, Any] = {
        "sm_scale": scaling, "dropout_p": dropout, "softcap": extras.get("softcap") or 0.0,
        "sinks": None if sinks is None else sinks.flatten().float(),
        "causal": mask.causal, "window": (mask.reach, mask.reach),
    }  # fmt: skip
    lengths = _packed_lengths(mask, q, k, extras)
    if lengths:
        if bias is not None:
            raise ValueError(
                "position_bias cannot go with packed sequences: pad them, or use attn_implementation='eager'"
            )
        record(SEAM, f"attention of packed sequences: {route}")
        return _attend_packed(q, k, v, lengths, options, eight_bits), None
    out = _attend_one_token(q, k, v, mask, options) if bias is None else None
    if out is not None:
        record(SEAM, "attention of one token: diyfa")
        return out, None
    seen = mask.complete if mask.padding is None else mask.padding.bool()[:, None, None, :]
    if seen is not None and indices is not None:
        seen = _only(seen, indices)
    if bias is not None:
        seen = bias if seen is None else bias + mask_as_bias(seen, bias.dtype)
    record(SEAM, f"attention{'' if seen is None else ' with a mask'}: {route}")
    if eight_bits:
        return attend_in_eight_bits(q, k, v, seen, eight_bits, straight_through=True, **options), None
    return attend(q, k, v, seen, "bshd", **options), None


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Any = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention (T, H, D) of all requests' tokens (1, H, T, D) over a paged cache: continuous batching."""
    _check(arguments)
    handle = active_handle(SEAM)
    if handle is not None and handle.detail:
        raise ValueError(f"continuous batching ('paged|{NAME}') does not go with quantize={handle.detail!r}")
    window = arguments.get("sliding_window") or getattr(module, "sliding_window", None)
    group, layer = cache.layer_index_to_group_indices[module.layer_idx]
    if getattr(cache.group_cache_managers[group], "sliding_window", None) and not window:
        raise ValueError(_no_window(module))
    lengths, longest = arguments["cu_seq_lens_k"], arguments["max_seqlen_k"]
    if isinstance(lengths, dict):
        kind = "sliding_attention" if window else "full_attention"
        lengths, longest = lengths[kind], longest[kind]
    sinks, softcap, table = arguments.get("s_aux"), arguments.get("softcap"), arguments.get("block_table")
    options: dict[str, Any] = {
        "causal": True, "softcap": softcap or 0.0, "sinks": None if sinks is None else sinks.flatten().float(),
    }  # fmt: skip
    band = (window - 1, 0) if window else (-1, -1)
    record(SEAM, f"paged attention{'' if table is None else ' over pages'}: diyfa")
    if table is None:
        k, v = cache.update(
            key_states=key, value_states=value, layer_idx=module.layer_idx,
            read_index=arguments["read_index"], write_index=arguments["write_index"],
        )  # fmt: skip
        out = flash_attention_varlen(
            query[0].transpose(0, 1), k, v, arguments["cu_seq_lens_q"].to(torch.int32), lengths.to(torch.int32),
            int(arguments["max_seqlen_q"]), int(longest), sm_scale=module.scaling, window=band, **options,
        )  # fmt: skip
        return out, None  # type: ignore[return-value]
    shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    k_cache, v_cache = (x[layer].view(shape) for x in (cache.key_cache, cache.value_cache))
    q, k, v = (x.permute(2, 0, 1, 3) for x in (query, key, value))  # a new token of each request
    cache_lengths = (lengths.diff()[: k.shape[0]] - 1).to(torch.int32)
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=cache_lengths, block_table=table[group], softmax_scale=module.scaling,
        window_size=band, **options,
    )  # fmt: skip
    return out.squeeze(1), None  # type: ignore[union-attr]


def use_in_transformers(quantize: str | None = None) -> Handle:
    """Give Transformers the attention implementations "diyfa" and "paged|diyfa".

        handle = use_in_transformers()
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="diyfa")

    Tensors on the CPU need `diyfa.use_backend("cpu")` around the model's calls.

    Args:
        quantize: "int8" or "float8": attention quantises its inputs (`diyfa.quantize`, smoothed, one descale for each
            block, or for each head of packed sequences and padded batches). Gradients go straight through, but for
            packed sequences and padded batches, which are refused. A single new token over a cache is computed in the
            cache's dtype, and one warning says so. Continuous batching is refused. Default: nothing is quantised.

    Returns:
        A handle whose `remove()` removes the names. Models that use them then fail with Transformers' own error. A
        second call returns the same handle.

    Raises:
        ModuleNotFoundError: Transformers is missing.
        ValueError: `quantize` is unknown, or the names are given with another.
    """
    handle = active_handle(SEAM)
    detail = checked_quantize(quantize, handle, "Transformers")
    if handle is not None:
        return handle
    from transformers import AttentionInterface, AttentionMaskInterface

    with ExitStack() as undo:
        for interface, name, function in (
            (AttentionInterface, NAME, attention),
            (AttentionInterface, f"paged|{NAME}", paged_attention),
            (AttentionMaskInterface, NAME, make_attention_mask),
        ):
            interface.register(name, function)
            undo.callback(interface._global_mapping.pop, name, None)
        return switch_on(SEAM, undo.pop_all(), detail)
