"""The operator's attention by `flash_attention` and `flash_attention_varlen`: masks, windows, packed sequences."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from diyfa.attention import flash_attention, flash_attention_varlen
from diyfa.integrations.npu_fusion_band import ALL_MASK, Window, as_window, sample_band
from diyfa.integrations.npu_fusion_checks import Rows, check_mask_shape

STATISTICS_COPIES = 8  # the operator repeats each row's maximum and sum to fill a 32-byte block


class Call(NamedTuple):
    """The checked options of one call."""

    scale: float
    sparse_mode: int
    pre_tokens: int
    next_tokens: int
    mask: torch.Tensor | None  # True where hidden; None in modes that need only the band
    masked: bool  # an atten_mask was given; without one no mode hides anything
    bias: torch.Tensor | None
    slopes: torch.Tensor | None
    sink: torch.Tensor | None
    dropout_p: float
    rng_state: torch.Tensor | None
    backend: str | None

    def window(self, seqlen_q: int, seqlen_k: int) -> Window:
        mode = self.sparse_mode if self.masked else ALL_MASK
        band = sample_band(mode, self.pre_tokens, self.next_tokens, seqlen_q, seqlen_k)
        return as_window(band, seqlen_q, seqlen_k)

    def options(self, window: Window) -> dict[str, Any]:
        """Return the arguments of diyfa's functions."""
        return {
            "sm_scale": self.scale, "window": (window.left, window.right), "alibi_slopes": self.slopes,
            "sinks": self.sink, "dropout_p": self.dropout_p, "rng_state": self.rng_state, "return_lse": True,
            "backend": self.backend,
        }  # fmt: skip


def statistics(lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax_max and softmax_sum, each value eight times, from the log-sum-exp."""
    empty = lse == float("inf")
    maximum = lse.masked_fill(empty, float("-inf"))
    total = torch.ones_like(maximum).masked_fill(empty, 0.0)
    shape = (*lse.shape, STATISTICS_COPIES)
    return maximum[..., None].expand(shape).contiguous(), total[..., None].expand(shape).contiguous()


def _hide(bias: torch.Tensor | None, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if bias is None:
        bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill(mask, float("-inf"))


def _first(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the first rows and columns of the last two dimensions. A dimension of 1 is broadcast and stays."""
    x = x if x.shape[-2] == 1 else x[..., :rows, :]
    return x if x.shape[-1] == 1 else x[..., :columns]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse of q (B, N, Sq, D), k (B, Nkv, Skv, D) and v (B, Nkv, Skv, Dv)."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    window = call.window(seqlen_q, seqlen_k)
    is_full = (window.seqlen_q, window.seqlen_k) == (seqlen_q, seqlen_k)
    if call.slopes is not None and (seqlen_q != seqlen_k or not is_full):
        raise ValueError(
            f"pse_type=2 needs Sq == Skv and a band that begins and ends within the matrix, got Sq={seqlen_q}, "
            f"Skv={seqlen_k}, sparse_mode={call.sparse_mode}"
        )
    bias = call.bias
    if call.mask is not None:
        check_mask_shape(call.mask, q.shape[0], q.shape[1], seqlen_q, seqlen_k)
        bias = _hide(bias, call.mask, q.dtype)
    if not is_full:
        q, k, v = q[:, :, : window.seqlen_q], k[:, :, : window.seqlen_k], v[:, :, : window.seqlen_k]
        bias = None if bias is None else _first(bias, window.seqlen_q, window.seqlen_k)
    out, lse = flash_attention(q, k, v, attn_bias=bias, **call.options(window))
    if window.seqlen_q < seqlen_q:
        out, lse = _with_rows_without_keys(out, lse, seqlen_q - window.seqlen_q, call.sink)
    return out, lse


def _with_rows_without_keys(
    out: torch.Tensor, lse: torch.Tensor, rows: int, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, _, head_dim = out.shape
    nothing = torch.zeros((batch, heads, rows, head_dim), dtype=out.dtype, device=out.device)
    if sink is None:
        rest = torch.full((batch, heads, rows), float("inf"), dtype=lse.dtype, device=lse.device)
    else:
        rest = sink.to(lse.dtype)[:, None].expand(batch, heads, rows)
    return torch.cat((out, nothing), 2), torch.cat((lse, rest), 2)


def attend_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: tuple[Rows, Rows], call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse (N, Tq) of packed tensors, q (Tq, N, D).

    It is one call if all sequences have the same window, else one call for each sequence.
    """
    lengths = [(q1 - q0, k1 - k0) for (q0, q1), (k0, k1) in zip(*ends, strict=True)]
    longest, windows = tuple(map(max, zip(*lengths, strict=True))), [call.window(*sizes) for sizes in lengths]
    is_full = all((w.seqlen_q, w.seqlen_k) == sizes for w, sizes in zip(windows, lengths, strict=True))
    if call.slopes is not None and not (is_full and all(q_len == k_len for q_len, k_len in lengths)):
        raise ValueError("pse_type=2 needs Sq == Skv in every sequence and a band that begins and ends within it")
    if call.mask is None and is_full and len({(w.left, w.right) for w in windows}) == 1:
        cu_q, cu_k = (_offsets(rows, q.device) for rows in ends)
        return flash_attention_varlen(q, k, v, cu_q, cu_k, *longest, **call.options(windows[0]))  # type: ignore[return-value]
    if call.dropout_p:
        raise ValueError(
            "dropout is not supported for TND with a mask that diyfa computes sequence by sequence (an atten_mask in "
            "modes 0 and 1, sparse_mode 2 with unequal lengths): each would drop the same weights"
        )
    if call.mask is not None:
        check_mask_shape(call.mask, 1, 1, *longest)
    return _attend_sequences(q, k, v, ends, call)


def _offsets(rows: Rows, device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *(end for _, end in rows)], dtype=torch.int32, device="cpu").to(device)


def _attend_sequences(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: tuple[Rows, Rows], call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    outs, lses = [], []
    for b, ((q0, q1), (k0, k1)) in enumerate(zip(*ends, strict=True)):
        q_b, k_b, v_b = (x[a:z].transpose(0, 1)[None] for x, a, z in ((q, q0, q1), (k, k0, k1), (v, k0, k1)))
        slopes = call.slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[b]
        mask = None if call.mask is None else call.mask.reshape(call.mask.shape[-2:])[: q1 - q0, : k1 - k0]
        out, lse = attend(q_b, k_b, v_b, call._replace(mask=mask, slopes=slopes))
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    rest = q.shape[0] - ends[0][-1][1]
    if rest:  # rows after the last sequence
        outs.append(outs[0].new_zeros((rest, *outs[0].shape[1:])))
        lses.append(lses[0].new_full((lses[0].shape[0], rest), float("inf")))
    return torch.cat(outs), torch.cat(lses, 1)
