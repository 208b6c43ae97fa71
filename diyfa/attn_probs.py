"""The dense matrix of softmax weights of a call with dropout, for tests. A negative sign marks dropped weights.

flash_attn returns such a matrix as `S_dmask`. Its matrix is a by-product of its kernels, in their internal order and
scale, and a helper of its tests turns it into probabilities. This one holds the probabilities themselves.
"""

from __future__ import annotations

import torch

from diyfa.dropout import keys_from_state, mask_from_keys
from diyfa.options import AttentionOptions, Lengths
from diyfa.reference import masked_scores, visible_keys_of_lengths

MULTIPLE = 128  # both sides are padded to a multiple of this, as flash_attn's are


def _padded(x: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return packed (T, ...) as (B, longest, ...), the packed row of each row, and the lengths (B,).

    Rows beyond the end of a sequence hold arbitrary values.
    """
    starts = cu_seqlens[:-1].long()
    rows = starts[:, None] + torch.arange(longest, device=x.device)
    rows = rows.clamp(0, max(x.shape[0] - 1, 0))
    if x.shape[0] == 0:
        return x.new_zeros((*rows.shape, *x.shape[1:])), rows, cu_seqlens.diff().long()
    return x[rows], rows, cu_seqlens.diff().long()


@torch.no_grad()
def signed_probabilities(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, lengths: Lengths, options: AttentionOptions
) -> torch.Tensor:
    """Return exp(score - lse), with the sign bit set for weights that were dropped.

    Args:
        q, k: (B, Sq, H, D), (B, Sk, Hk, D), or packed (Tq, H, D), (Tk, Hk, D).
        lse: the call's log-sum-exp, (B, H, Sq) or (H, Tq).

    Returns:
        (B, H, Sq, Sk), both lengths rounded up to multiples of 128, in q's dtype; 0 outside the sequences and masks.
    """
    assert options.rng_state is not None, "a call with dropout has one"
    if lengths.cu_seqlens_q is None or lengths.cu_seqlens_k is None:
        len_q = torch.full((q.shape[0],), q.shape[1], device=q.device)
        len_k = torch.full((q.shape[0],), k.shape[1], device=q.device)
        lse = lse[..., None]  # [B, H, Sq, 1]
    else:
        q, rows, len_q = _padded(q, lengths.cu_seqlens_q, lengths.max_seqlen_q)
        k, _, len_k = _padded(k, lengths.cu_seqlens_k, lengths.max_seqlen_k)
        if lse.shape[-1]:
            lse = lse[:, rows].transpose(0, 1)[..., None]  # [B, H, Sq, 1]
        else:
            lse = lse.new_zeros((q.shape[0], q.shape[2], lengths.max_seqlen_q, 1))
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k = k.shape[1]
    q, k = q.transpose(1, 2).to(lse.dtype), k.transpose(1, 2).to(lse.dtype).repeat_interleave(heads // k.shape[2], 1)
    window = options.window_left, options.window_right
    visible, _, distance = visible_keys_of_lengths(len_q, len_k, seqlen_q, seqlen_k, window)
    weights = torch.exp(masked_scores(q, k, visible, distance, options) - lse).masked_fill(~visible, 0.0)
    keep = mask_from_keys(keys_from_state(options.rng_state, batch, heads), seqlen_q, seqlen_k, options.dropout_p)
    # The sign bit survives even if a weight underflows to zero.
    signed = torch.where(keep | ~visible, weights, -weights)
    padding = (0, -seqlen_k % MULTIPLE, 0, -seqlen_q % MULTIPLE)
    return torch.nn.functional.pad(signed, padding)
