"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) with flash_attn 2.8's functions, in plain PyTorch.

A token at position p has its first `rotary_dim` features rotated in pairs. Pair t rotates by the angle whose cosine and
sine are in row p, column t of the tables. Pairs are (t, t + rotary_dim / 2), or (2t, 2t + 1) if `interleaved`. Products
are formed in float32. Every function is differentiable. In-place functions behave like PyTorch's in-place operators:
autograd follows them, and refuses leaves that require a gradient and the views that `unbind` and `chunk` return.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diyfa.validation import check_length, check_tensors

__all__ = [
    "RotaryEmbedding", "apply_rotary", "apply_rotary_emb", "apply_rotary_emb_func", "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_", "apply_rotary_emb_torch", "rotate_half",
]  # fmt: skip

Offsets = int | Tensor


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Return x with every pair of features (a, b) rotated by 90 degrees to (-b, a)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate all features of x (..., heads, R); cos and sin (..., heads or 1, R/2) float32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    a, b = a.to(dtype), b.to(dtype)
    rotated = (a * cos - b * sin, b * cos + a * sin)
    return (torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)).to(x.dtype)


def _check_tables(cos: Tensor, sin: Tensor, x: Tensor) -> None:
    check_tensors(cos=cos, sin=sin)
    if cos.device != x.device or sin.device != x.device:
        raise ValueError(f"cos is on {cos.device} and sin on {sin.device}, but what they turn on {x.device}")
    head_dim = x.shape[-1]
    if cos.dim() != 2 or cos.shape != sin.shape:
        raise ValueError(
            f"cos and sin must both have shape (seqlen, rotary_dim / 2), got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if 2 * cos.shape[1] > head_dim:
        raise ValueError(f"rotary_dim {2 * cos.shape[1]} exceeds the head dimension {head_dim}")


def _rows(
    tables: tuple[Tensor, ...],
    x: Tensor,
    seqlen_offsets: Offsets,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> list[Tensor]:
    """Return each table's rows for all tokens: (S, 1, R/2), (B, S, 1, R/2), or packed (T, 1, R/2), float32 or wider.

    `tables` alternate cos, sin. A token without a row (beyond the table, or of no packed sequence) is not rotated.
    """
    length = tables[0].shape[0]
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    seqlen = x.shape[1] if cu_seqlens is None else max_seqlen
    if seqlen is None:
        raise ValueError("cu_seqlens needs max_seqlen")
    if cu_seqlens is not None:
        seqlen = check_length("max_seqlen", seqlen)
    if isinstance(seqlen_offsets, Tensor):
        if seqlen_offsets.shape != (batch,) or seqlen_offsets.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"seqlen_offsets must be an int or a ({batch},) integer tensor, got {seqlen_offsets.dtype} of shape "
                f"{tuple(seqlen_offsets.shape)}"
            )
        shifts, first = seqlen_offsets, 0
    else:
        shifts, first = None, check_length("seqlen_offsets", seqlen_offsets)
    if first + seqlen > length:
        raise ValueError(f"cos and sin have {length} rows; positions {first} to {first + seqlen - 1} were asked for")
    wide = [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tables]
    if cu_seqlens is None and shifts is None:
        return [t[first : first + seqlen, None] for t in wide]
    if shifts is None:
        shifts = torch.full((batch,), first, dtype=torch.int32, device=x.device)
    if cu_seqlens is None:
        position = torch.arange(seqlen, device=x.device) + shifts[:, None]  # [B, S]
    else:
        token = torch.arange(x.shape[0], device=x.device, dtype=cu_seqlens.dtype)
        sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1  # [T], -1 before the first, B after the last
        inside = (sequence >= 0) & (sequence < batch)
        sequence, shifts = sequence.clamp(min=0), torch.nn.functional.pad(shifts, (0, 1))
        position = torch.where(inside, token - cu_seqlens[sequence] + shifts[sequence], length)
    position = torch.where((position >= 0) & (position < length), position, length)
    # An extra last row holds the angle 0, for tokens without a position.
    return [
        torch.cat((t, t.new_full((1, t.shape[1]), 1.0 - n % 2)))[position][..., None, :] for n, t in enumerate(wide)
    ]


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: Offsets = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """`apply_rotary_emb` with `flash_attn.ops.triton.rotary`'s order of arguments. `conjugate` negates the angles."""
    check_tensors(x=x)
    rank = 4 if cu_seqlens is None else 3
    if x.dim() != rank:
        expected = "(batch, seqlen, heads, head_dim)" if rank == 4 else "(total, heads, head_dim)"
        raise ValueError(f"x must have shape {expected}, got {tuple(x.shape)}")
    _check_tables(cos, sin, x)
    cos, sin = _rows((cos, sin), x, seqlen_offsets, cu_seqlens, max_seqlen)
    rotary_dim = 2 * cos.shape[-1]
    rotated = _rotate(x[..., :rotary_dim], cos, -sin if conjugate else sin, interleaved)
    if inplace:
        x[..., :rotary_dim].copy_(rotated)
        return x
    return rotated if rotary_dim == x.shape[-1] else torch.cat((rotated, x[..., rotary_dim:]), -1)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Offsets = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the first rotary_dim features of every token by its position.

    Args:
        x: (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim) with cu_seqlens.
        cos, sin: (rows, rotary_dim / 2), rotary_dim <= head_dim.
        interleaved: a pair is (2t, 2t + 1) instead of (t, t + rotary_dim / 2).
        inplace: write into x and return it.
        seqlen_offsets: position of the first token, one int or (batch,) integers.
        cu_seqlens: (batch + 1,) int32 offsets of packed sequences.
        max_seqlen: length of the longest sequence, needed with cu_seqlens.

    Raises:
        TypeError: an argument is no tensor, or a position no integer.
        ValueError: shapes or devices do not fit, or cos and sin have fewer rows than there are positions.
    """
    return apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace)


apply_rotary_emb_func = apply_rotary_emb  # its older name


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Return x (batch, seqlen, heads, head_dim) rotated by cos, sin (seqlen, rotary_dim / 2), or, with one table for
    each sample, (batch, seqlen, rotary_dim / 2)."""
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim > x.shape[-1]:
        raise ValueError(f"rotary_dim {rotary_dim} exceeds the head dimension {x.shape[-1]}")
    rotated = _rotate(x[..., :rotary_dim], cos[..., None, :], sin[..., None, :], interleaved)
    return torch.cat((rotated, x[..., rotary_dim:]), -1)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: Offsets = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate q and k of a packed projection in place and return it.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, num_heads_q + 2 * heads_k, head_dim) with
            num_heads_q, which grouped-query attention needs.
        cos, sin: (rows, rotary_dim / 2).
        cos_k, sin_k: tables for k, (rows, rotary_dim / 2); default: cos and sin.
        interleaved, seqlen_offsets: as for `apply_rotary_emb`.

    Raises:
        ValueError: shapes do not fit.
    """
    check_tensors(qkv=qkv)
    if qkv.dim() == 5:
        if qkv.shape[2] != 3:
            raise ValueError(f"qkv must have shape (batch, seqlen, 3, heads, head_dim), got {tuple(qkv.shape)}")
        qk = qkv[:, :, :2]
        tensors = (qk[:, :, 0], qk[:, :, 1])
    elif qkv.dim() == 4:
        heads_kv = 0 if num_heads_q is None else qkv.shape[2] - num_heads_q
        if num_heads_q is None or num_heads_q < 1 or heads_kv < 2 or heads_kv % 2:
            raise ValueError(
                "a 4-D qkv is (batch, seqlen, num_heads_q + 2 * heads_k, head_dim) and needs num_heads_q, got shape "
                f"{tuple(qkv.shape)} and num_heads_q={num_heads_q}"
            )
        qk = qkv[:, :, : num_heads_q + heads_kv // 2]
        tensors = (qk[:, :, :num_heads_q], qk[:, :, num_heads_q:])
    else:
        raise ValueError(f"qkv must be 4-D or 5-D, got shape {tuple(qkv.shape)}")
    _check_tables(cos, sin, qkv)
    if cos_k is None and sin_k is None:
        cos, sin = _rows((cos, sin), qkv, seqlen_offsets)
        if qkv.dim() == 5:
            cos, sin = cos[..., None, :], sin[..., None, :]
        qk = qk[..., : 2 * cos.shape[-1]]
        qk.copy_(_rotate(qk, cos, sin, interleaved))
        return qkv
    tables = (cos, sin, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)
    _check_tables(tables[2], tables[3], qkv)
    for x, (c, s) in zip(tensors, (tables[:2], tables[2:]), strict=True):
        apply_rotary(x, c, s, seqlen_offsets, interleaved=interleaved, inplace=True)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: Offsets = 0
) -> Tensor:
    """Rotate k of kv (batch, seqlen, 2, heads, head_dim) in place and return kv."""
    check_tensors(kv=kv)
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv must have shape (batch, seqlen, 2, heads, head_dim), got {tuple(kv.shape)}")
    apply_rotary(kv[:, :, 0], cos, sin, seqlen_offsets, interleaved=interleaved, inplace=True)
    return kv


class RotaryEmbedding(torch.nn.Module):
    """A module that caches the tables and rotates q and k with them, in place.

    Frequencies are base^(-2t/dim). With `scale_base` it is xPos (Sun et al. 2022, arXiv:2212.10554): q is scaled up and
    k down with the distance from the middle of the table.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.scale_base = scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self.register_buffer("scale", None if scale_base is None else self._compute_scale(device), persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _even(self, device: torch.device | str | None) -> Tensor:
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)

    def _compute_inv_freq(self, device: torch.device | str | None = None) -> Tensor:
        return 1.0 / self.base ** (self._even(device) / self.dim)

    def _compute_scale(self, device: torch.device | str | None = None) -> Tensor:
        return (self._even(device) + 0.4 * self.dim) / (1.4 * self.dim)

    def _update_cos_sin_cache(
        self, seqlen: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Make the tables hold at least `seqlen` positions, on this device and in this dtype."""
        cached = self._cos_cached
        if (
            cached is not None
            and seqlen <= self._seq_len_cached
            and cached.device == device
            and cached.dtype == dtype
            and not (self.training and cached.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        # Angles are large, so they need float32 even if the module was converted to another dtype.
        position = torch.arange(seqlen, device=device, dtype=torch.float32)
        inv_freq = self.inv_freq if self.inv_freq.dtype == torch.float32 else self._compute_inv_freq(device)
        angle = torch.outer(position, inv_freq.to(device))
        cos, sin = angle.cos(), angle.sin()
        if self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        scale = self._compute_scale(device) ** ((position - seqlen // 2) / self.scale_base)[:, None]
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: Offsets = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate q and k in place.

        Args:
            qkv: as for `apply_rotary_emb_qkv_`; with `kv` it is q alone, (batch, seqlen, heads, head_dim).
            kv: (batch, seqlen, 2, heads, head_dim).
            seqlen_offset: position of the first token, one int or (batch,) integers.
            max_seqlen: number of positions in the tables; needed if seqlen_offset is a tensor and the tables are too
                short.
            num_heads_q: as for `apply_rotary_emb_qkv_`.

        Returns:
            qkv, or (q, kv).

        Raises:
            ValueError: seqlen_offset is a tensor, the tables are empty and max_seqlen is not given.
        """
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        elif not isinstance(seqlen_offset, Tensor):
            self._update_cos_sin_cache(qkv.shape[1] + seqlen_offset, qkv.device, qkv.dtype)
        cos, sin, cos_k, sin_k = self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached
        if cos is None or sin is None:
            raise ValueError("seqlen_offset is a tensor: max_seqlen must say how many positions the tables need")
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        cos_k, sin_k = (cos, sin) if cos_k is None or sin_k is None else (cos_k, sin_k)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)
