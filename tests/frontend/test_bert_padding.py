"""Padding and unpadding: values, the five results of flash_attn 2.8, gradients, refusals."""

from __future__ import annotations

import inspect

import pytest
import torch

from diyfa import bert_padding
from diyfa.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

# Right, left and middle padding, and an empty row.
MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])


def tokens(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()


SIGNATURES = {
    "unpad_input": "hidden_states attention_mask unused_mask",
    "unpad_input_for_concatenated_sequences": "hidden_states attention_mask_in_length",
    "pad_input": "hidden_states indices batch seqlen",
    "index_first_axis": "input indices",
    "index_put_first_axis": "values indices first_axis_dim",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    assert list(inspect.signature(getattr(bert_padding, name)).parameters) == SIGNATURES[name].split()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_unpad_input(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = tokens(5, 5, *shape)
    flat, indices, cu_seqlens, longest, used = unpad_input(x, MASK.to(dtype))
    assert torch.equal(flat, x[MASK.bool()])
    assert indices.dtype == torch.int64 and torch.equal(x.flatten(0, 1)[indices], flat)
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.tolist() == [0, 3, 6, 9, 9, 14]
    assert isinstance(longest, int) and longest == 5
    assert used.dtype == torch.int32 and used.tolist() == [3, 3, 3, 0, 5]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_unused_positions_are_selected_but_not_counted(dtype: torch.dtype) -> None:
    unused = torch.tensor([[0, 0, 0, 1, 0], *[[0] * 5] * 3, [0] * 5])
    x = tokens(5, 5, 2)
    flat, _, cu_seqlens, longest, used = unpad_input(x, MASK.to(dtype), unused.to(dtype))
    assert torch.equal(flat, x[(MASK + unused).bool()])
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 4, 7, 10, 10, 15], 5, [3, 3, 3, 0, 5])


def test_round_trip_and_its_gradient() -> None:
    """Padding, which is NaN here, never reaches the tokens."""
    x = tokens(5, 5, 2, 3)
    for mask in (MASK, 0 * MASK):
        keep = mask[..., None, None]
        flat, indices, *_ = unpad_input(x.masked_fill(keep == 0, float("nan")), mask)
        padded = pad_input(flat * 2, indices, 5, 5)
        assert padded.shape == x.shape and torch.equal(padded, 2 * x * keep)
        (grad,) = torch.autograd.grad(padded.square().sum(), x)
        assert torch.equal(grad, 8 * x.detach() * keep)


def test_concatenated_sequences() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = tokens(3, 6, 2)
    flat, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(flat, torch.cat((x[0, :5], x[1, :5], x[2])))
    assert (cu_seqlens.tolist(), longest) == ([0, 2, 5, 8, 10, 16], 6)
    assert cu_seqlens.dtype == torch.int32 and indices.tolist() == [*range(5), *range(6, 11), *range(12, 18)]


def test_gradients() -> None:
    x, indices = tokens(6, 2, 3), torch.tensor([4, 0, 4])
    assert torch.autograd.gradcheck(lambda x: index_first_axis(x, indices), x)  # a row taken twice gets both gradients
    assert torch.autograd.gradcheck(lambda x: index_first_axis_residual(x, indices), x)
    values, places = tokens(3, 2), torch.tensor([5, 1, 2])
    assert torch.autograd.gradcheck(lambda v: index_put_first_axis(v, places, 7), values)
    put = index_put_first_axis(values, places, 7)
    assert put.shape == (7, 2) and torch.equal(put[places], values) and int(put.count_nonzero()) == 6


@pytest.mark.parametrize("mask", [torch.ones(5), torch.ones(5, 4), torch.ones(5, 5, 1)])
def test_wrong_masks(mask: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(batch, seqlen\) = \(5, 5\)"):
        unpad_input(tokens(5, 5, 2), mask)
    with pytest.raises(ValueError, match="unused_mask must have shape"):
        unpad_input(tokens(5, 5, 2), MASK, mask)
    with pytest.raises(ValueError, match="attention_mask_in_length must have shape"):
        unpad_input_for_concatenated_sequences(tokens(5, 5, 2), mask)


def test_a_marked_position_counts_once() -> None:
    """Numbers other than 1 in a mask, and places that both masks name, must not lengthen the sequences."""
    x, twos = tokens(2, 4, 3), torch.tensor([[2, 2, 0, 0], [3, 0, 0, 0]])
    expected = unpad_input(x, twos.bool())
    for got in (unpad_input(x, twos), unpad_input(x, twos, twos), unpad_input(x, twos.float())):
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(got, expected, strict=True))
    assert expected[2].tolist() == [0, 2, 3]


def test_lengths_that_do_not_fit() -> None:
    """cu_seqlens beyond the rows there are would be read by a kernel that cannot check them."""
    x = tokens(2, 6, 3)
    for row in ([4, 4, 0, 0, 0, 0], [3, -1, 0, 0, 0, 0]):
        with pytest.raises(ValueError, match=rf"must not be negative and must fit into its 6 places, got \[\[{row[0]}"):
            unpad_input_for_concatenated_sequences(x, torch.tensor([row, [6, 0, 0, 0, 0, 0]]))
    for dtype in (torch.bool, torch.float32):
        with pytest.raises(TypeError, match="attention_mask_in_length must hold integers"):
            unpad_input_for_concatenated_sequences(x, torch.ones(2, 6, dtype=dtype))


def test_other_wrong_arguments() -> None:
    x = tokens(2, 4, 3)
    with pytest.raises(TypeError, match=r"attention_mask must be a torch\.Tensor, got list"):
        unpad_input(x, [[1, 1, 0, 0]] * 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attention_mask is on meta, hidden_states on cpu"):
        unpad_input(x, torch.ones(2, 4, device="meta"))
    with pytest.raises(ValueError, match=r"indices must have shape \(3,\), one for each token, got \(2,\)"):
        pad_input(tokens(3, 5), torch.tensor([0, 1]), 2, 4)
