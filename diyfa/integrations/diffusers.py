"""The attention backend "diyfa" of diffusers.

Models whose attention goes through diffusers' dispatcher (Flux, Wan, Qwen-Image and the other transformers) choose it
by name. The UNets of Stable Diffusion call PyTorch's `scaled_dot_product_attention` directly: use `use_in_pytorch`.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack

import torch

from diyfa.integrations.eager_attention import attend, attend_in_eight_bits, checked_quantize, visible_keys
from diyfa.integrations.seams import Handle, active_handle, record, switch_on

NAME = "diyfa"
SEAM = "diffusers"


def _with_features_side_by_side(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return q, k and v, with a copy of each whose last stride is not 1. diffusers' native backend accepts those."""
    if all(x.stride(-1) == 1 for x in tensors):
        return tensors
    if not torch.compiler.is_compiling():  # a compiled graph cannot warn; the copy is visible in it
        # Python's default filter shows a line's warning once.
        warnings.warn("diyfa copies q, k or v of diffusers, whose last stride is not 1", UserWarning, stacklevel=1)
    return tuple(x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format) for x in tensors)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: object = None,
) -> torch.Tensor:
    """Return the attention of (B, S, H, D) tensors, (B, S, H, D), with the arguments of diffusers' dispatcher.

    A mask of two dimensions is (B, keys).
    """
    if return_lse or _parallel_config is not None:
        feature = "return_lse=True" if return_lse else "context parallelism"
        raise ValueError(f"{feature} of diffusers is not supported by its diyfa backend: use 'native'")
    if query.shape[2] != key.shape[2] and not enable_gqa:
        raise ValueError(f"{query.shape[2]} query heads and {key.shape[2]} key heads need enable_gqa=True")
    key, value, window = visible_keys(query, key, value, attn_mask, is_causal, "bshd")
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None, :]
    query, key, value = _with_features_side_by_side(query, key, value)
    handle = active_handle(SEAM)
    eight_bits = handle.detail if handle is not None else ""
    route = f"attention{'' if attn_mask is None else ' with a mask'}: diyfa"
    record(SEAM, f"{route} in {eight_bits}" if eight_bits else route)
    if not eight_bits:
        return attend(query, key, value, attn_mask, "bshd", window=window, dropout_p=dropout_p, sm_scale=scale)
    return attend_in_eight_bits(
        query, key, value, attn_mask, eight_bits, window=window, dropout_p=dropout_p, sm_scale=scale
    )


def use_in_diffusers(quantize: str | None = None) -> Handle:
    """Give diffusers the attention backend "diyfa".

        handle = use_in_diffusers()
        pipeline.transformer.set_attention_backend("diyfa")  # or: with diffusers.attention_backend("diyfa"): ...

    Tensors on the CPU need `diyfa.use_backend("cpu")` around the model's calls.

    Args:
        quantize: "int8" or "float8": each call quantises its inputs (`diyfa.quantize`, smoothed, one descale for each
            block). It is for inference: inputs that require a gradient are refused. Default: nothing is quantised.

    Returns:
        A handle whose `remove()` removes the name. Models that are set to it then fail until they are set to another.
        A second call returns the same handle.

    Raises:
        ModuleNotFoundError: diffusers is missing, or has no such registry.
        ValueError: `quantize` is unknown, or the backend is switched on with another.
    """
    handle = active_handle(SEAM)
    detail = checked_quantize(quantize, handle, SEAM)
    if handle is not None:
        return handle
    from diffusers.models import attention_dispatch

    names, registry = attention_dispatch.AttentionBackendName, attention_dispatch._AttentionBackendRegistry
    # The dispatcher names backends by the members of an enumeration, and Python has no public way to add a member.
    member = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME

    def forget() -> None:
        if registry._active_backend == member:
            registry.set_active_backend(names.NATIVE)
        for table in (registry._backends, registry._constraints, registry._supported_arg_names):
            table.pop(member, None)

    with ExitStack() as undo:
        for members, key in ((names._member_map_, member.name), (names._value2member_map_, NAME)):
            members[key] = member
            undo.callback(members.pop, key)
        undo.callback(forget)
        registry.register(member)(attention)
        return switch_on(SEAM, undo.pop_all(), detail)
