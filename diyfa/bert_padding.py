"""Between padded batches and packed sequences: flash_attn 2.8's `bert_padding`, in plain differentiable PyTorch.

Counting the tokens of a mask decides the shape of the result, so `unpad_input` waits for the device.
"""

from __future__ import annotations

import torch

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]

Unpadded = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of `input` (N, ...) by `indices` (Z,) -> (Z, ...)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """`values` (Z, ...) at the rows `indices` (Z,) of zeros (first_axis_dim, ...)."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


def index_first_axis_residual(input: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`index_first_axis` and `input` itself; the gradients of both arrive at `input`."""
    return input.index_select(0, indices), input


def _check_mask(hidden_states: torch.Tensor, mask: torch.Tensor, name: str) -> None:
    if mask.dim() != 2 or mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"{name} must have shape (batch, seqlen) = {tuple(hidden_states.shape[:2])}, got {tuple(mask.shape)}"
        )


def _cumulative(lengths: torch.Tensor) -> torch.Tensor:
    """Lengths (B,) -> offsets (B + 1,) int32, 0 first."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _longest(lengths: torch.Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Drop the padding of a batch.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen) bool or int, true for tokens.
        unused_mask: (batch, seqlen) bool or int, true for places that are kept although they hold no token.

    Returns:
        The tokens (total, ...); their indices in the flattened batch (total,) int64; cu_seqlens (batch + 1,) int32;
        the longest length, an int; how many tokens of each sequence are used (batch,) int32.

    Raises:
        ValueError: a mask has another shape than the batch.
    """
    _check_mask(hidden_states, attention_mask, "attention_mask")
    kept = attention_mask
    if unused_mask is not None:
        _check_mask(hidden_states, unused_mask, "unused_mask")
        kept = attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, _cumulative(lengths), _longest(lengths), used


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> Unpadded:
    """Drop the padding of a batch whose rows hold several short sequences each.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: (batch, seqlen) int: the lengths of the sequences of a row, in order, then zeros.
            [2, 3, 0, 0, 0, 0] is a row of six places: two tokens, three tokens, one place of padding.

    Returns:
        The tokens (total, ...); their indices in the flattened batch (total,) int64; cu_seqlens int32 of all
        sequences; the longest length.

    Raises:
        ValueError: the lengths have another shape than the batch.
    """
    _check_mask(hidden_states, attention_mask_in_length, "attention_mask_in_length")
    tokens_of_row = attention_mask_in_length.sum(-1, keepdim=True)
    places = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    indices = (places < tokens_of_row).flatten().nonzero().flatten()
    flat = attention_mask_in_length.flatten()
    lengths = flat[flat.nonzero().flatten()]
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, _cumulative(lengths), _longest(lengths)


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Tokens (total, ...) back to (batch, seqlen, ...), zeros where there was padding; `indices` as from unpadding."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
