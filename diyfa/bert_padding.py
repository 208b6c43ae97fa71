"""Conversion between padded batches and packed sequences: flash_attn 2.8's `bert_padding` in differentiable PyTorch.

The number of tokens of a mask decides the shape of the result, so `unpad_input` waits for the device.
"""

from __future__ import annotations

import torch

from diyfa.validation import check_tensors

__all__ = [
    "index_first_axis", "index_first_axis_residual", "index_put_first_axis", "pad_input", "unpad_input",
    "unpad_input_for_concatenated_sequences",
]  # fmt: skip

Unpadded = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the rows `indices` (Z,) of `input` (N, ...), as (Z, ...)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """Return zeros (first_axis_dim, ...) with `values` (Z, ...) at the rows `indices` (Z,)."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


def index_first_axis_residual(input: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `index_first_axis` and `input` itself. The gradients of both are added at `input`."""
    return input.index_select(0, indices), input


def _check_mask(hidden_states: torch.Tensor, mask: torch.Tensor, name: str) -> None:
    check_tensors(hidden_states=hidden_states, **{name: mask})
    if mask.device != hidden_states.device:
        raise ValueError(f"{name} is on {mask.device}, hidden_states on {hidden_states.device}")
    if mask.dim() != 2 or mask.shape != hidden_states.shape[:2]:
        expected = tuple(hidden_states.shape[:2])
        raise ValueError(f"{name} must have shape (batch, seqlen) = {expected}, got {tuple(mask.shape)}")


def _cumulative(lengths: torch.Tensor) -> torch.Tensor:
    """Return the offsets (B + 1,) int32 of lengths (B,); the first is 0."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _longest(lengths: torch.Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Drop the padding of a batch.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen) bool or int, true (not 0) for tokens.
        unused_mask: (batch, seqlen) bool or int, true for positions that stay although they hold no token.

    Returns:
        The tokens (total, ...); their indices in the flattened batch (total,) int64; cu_seqlens (batch + 1,) int32;
        the longest length, an int; the number of tokens of each sequence without unused ones (batch,) int32.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: a mask has another shape than the batch, or is on another device.
    """
    _check_mask(hidden_states, attention_mask, "attention_mask")
    tokens = is_selected = attention_mask != 0  # a position counts once, whatever its number
    if unused_mask is not None:
        _check_mask(hidden_states, unused_mask, "unused_mask")
        is_selected = tokens | (unused_mask != 0)
    lengths = is_selected.sum(-1, dtype=torch.int32)
    used_lengths = tokens.sum(-1, dtype=torch.int32)
    indices = is_selected.flatten().nonzero().flatten()
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, _cumulative(lengths), _longest(lengths), used_lengths


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> Unpadded:
    """Drop the padding of a batch whose rows hold several short sequences each.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: (batch, seqlen) int: the lengths of the sequences of a row, in order, then zeros.
            [2, 3, 0, 0, 0, 0] is a row of six positions: two tokens, three tokens, one position of padding.

    Returns:
        The tokens (total, ...); their indices in the flattened batch (total,) int64; cu_seqlens int32 of all
        sequences; the longest length.

    Raises:
        TypeError: an argument is no tensor, or the lengths are no integers.
        ValueError: the lengths have another shape than the batch, one is negative, or those of a row add up
            to more than its length.
    """
    _check_mask(hidden_states, attention_mask_in_length, "attention_mask_in_length")
    if attention_mask_in_length.dtype == torch.bool or attention_mask_in_length.is_floating_point():
        raise TypeError(f"attention_mask_in_length must hold integers, got {attention_mask_in_length.dtype}")
    row_lengths = attention_mask_in_length.sum(-1, keepdim=True)
    columns = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    indices = (columns < row_lengths).flatten().nonzero().flatten()
    flat = attention_mask_in_length.flatten()
    lengths = flat[flat.nonzero().flatten()]
    if not torch.compiler.is_compiling() and int(lengths.clamp(min=0).sum()) != indices.shape[0]:
        raise ValueError(
            "the lengths of each row of attention_mask_in_length must not be negative and must fit into its "
            f"{hidden_states.shape[1]} places, got {attention_mask_in_length.tolist()}"
        )
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, _cumulative(lengths), _longest(lengths)


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Return tokens (total, ...) as a batch (batch, seqlen, ...) padded with zeros; `indices` as `unpad_input` returns.

    Raises ValueError when the number of indices is not the number of tokens.
    """
    check_tensors(hidden_states=hidden_states, indices=indices)
    if not torch.compiler.is_compiling() and indices.shape != hidden_states.shape[:1]:
        raise ValueError(
            f"indices must have shape {tuple(hidden_states.shape[:1])}, one for each token, got {tuple(indices.shape)}"
        )
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
