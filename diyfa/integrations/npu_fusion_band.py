"""Translation of `torch_npu.npu_fusion_attention`'s sparse modes to bands of visible keys, and of bands to windows.

In modes 0 to 4 query i sees the keys lo <= j - i <= hi, less those that an explicit mask hides. Positions count from
the top left corner of the (Sq, Skv) matrix. Modes 3 and 4 count from the bottom right corner, which shifts both bounds
by Skv - Sq. Source: the parameter notes in torch_npu's docstring of the operator.
"""

from __future__ import annotations

from typing import NamedTuple

NO_MASK, ALL_MASK, LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, BAND = range(5)
COMPRESSED_MASK = 2048  # modes 2 to 4 take one triangular mask of this size for all lengths
UNBOUNDED_TOKENS = 2147483647

REFUSED_MODES = {
    5: "a prefix that every query sees, of another length for each sample, is neither causal nor a window",
    6: "a prefix that every query sees, of another length for each sample, is neither causal nor a window",
    7: "its first or last sequence has another mask than the rest: call once for that sequence (sparse_mode 4) and "
    "once for the others (sparse_mode 3)",
    8: "its first or last sequence has another mask than the rest: call once for that sequence (sparse_mode 4) and "
    "once for the others (sparse_mode 2)",
}


class Band(NamedTuple):
    """A band of the score matrix: query i sees the keys lo <= j - i <= hi. None is no bound."""

    lo: int | None
    hi: int | None


class Window(NamedTuple):
    """A band as diyfa's window (left, right) of the first `seqlen_q` queries and the first `seqlen_k` keys.

    Later queries see no key, and later keys are seen by no query.
    """

    seqlen_q: int
    seqlen_k: int
    left: int
    right: int


def sample_band(sparse_mode: int, pre_tokens: int, next_tokens: int, seqlen_q: int, seqlen_k: int) -> Band:
    """Return one sample's band of `sparse_mode` 0 to 4 with an atten_mask. Without a mask no mode hides anything."""
    shift = seqlen_k - seqlen_q
    if sparse_mode == ALL_MASK:
        return Band(None, None)
    if sparse_mode in (LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL):
        return Band(None, shift if sparse_mode == RIGHT_DOWN_CAUSAL else 0)
    origin = shift if sparse_mode == BAND else 0
    lo = None if pre_tokens >= UNBOUNDED_TOKENS else origin - pre_tokens
    hi = None if next_tokens >= UNBOUNDED_TOKENS else origin + next_tokens
    return Band(lo, hi)


def as_window(band: Band, seqlen_q: int, seqlen_k: int) -> Window:
    """Return `band` on (seqlen_q, seqlen_k) as a window aligned to the bottom right corner.

    A window's bounds cannot be negative. A band that ends left of the corner never reaches the last keys; one that
    begins right of it leaves the last queries without keys. Once these keys or queries are cut off, the corner lies on
    the band's edge.
    """
    lo, hi = band
    if hi is not None and hi < seqlen_k - seqlen_q:
        seqlen_k = max(0, seqlen_q + hi)
    if lo is not None and lo > seqlen_k - seqlen_q:
        seqlen_q = max(0, seqlen_k - lo)
    shift = seqlen_k - seqlen_q
    left = -1 if lo is None else max(0, shift - lo)
    right = -1 if hi is None else max(0, hi - shift)
    return Window(seqlen_q, seqlen_k, left, right)
