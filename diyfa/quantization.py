"""`quantize`: q, k and v in float8 or int8, as `flash_attention` takes them.

A number x becomes round((x - mean) * (1 / descale)). The descale is the largest magnitude of the numbers that share it,
divided by the largest number of the dtype, so that nothing saturates. `quantize_by_operators` defines this. Backends
may have a kernel for it (`quantize`), which takes one to three passes. PyTorch's operators run where there is no
kernel, and in compiled programs.

* smooth: keys and values often have a large mean over the sequence, which would use up the digits that tell rows apart.
  So the mean of k, and of v in float8, is subtracted first. The mean of k does not change the softmax's weights. The
  mean of v is added to the output.
* rotate: q and k are multiplied by one orthogonal matrix, a Hadamard matrix divided by the root of its size. Products
  of queries and keys stay the same, and a feature with large numbers is spread over all features.
* straight_through: the gradient takes rounding for the identity (Bengio et al. 2013, arXiv:1308.3432). Then
  round((x - mean) / descale) * descale + mean is x itself: mean and descale, although computed from x, cancel.
"""

from __future__ import annotations

from typing import Any

import torch

from diyfa import registry, validation
from diyfa.eight_bits import BLOCK_K, BLOCK_Q, PER_BLOCK, PER_HEAD, PER_TENSOR, Quantized, Scheme, hadamard, per_row
from diyfa.features import ATTENTION_DTYPES
from diyfa.problem import LAYOUTS, as_bhsd

KINDS = {"tensor": PER_TENSOR, "head": PER_HEAD, "block": PER_BLOCK}
DTYPES = {"float8": torch.float8_e4m3fn, "int8": torch.int8}


def quantize_by_operators(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return (values, descale, mean or None) of x (B, H, S, D). The mean is (B, H, D)."""
    y, mean = x.float(), None
    if scheme.smooth:
        mean = y.sum(2) / y.shape[2]
    if scheme.rotate:
        y, mean = hadamard(y), None if mean is None else hadamard(mean)
    if mean is not None:
        y = y - mean[:, :, None]
    magnitude = y.abs().amax(-1)  # (B, H, S)
    if scheme.kind == PER_BLOCK:
        padding = -magnitude.shape[2] % scheme.block
        magnitude = torch.nn.functional.pad(magnitude, (0, padding)).unflatten(2, (-1, scheme.block)).amax(-1)
    elif scheme.kind == PER_HEAD:
        magnitude = magnitude.unflatten(1, (-1, scheme.group)).amax((2, 3))
    else:
        magnitude = magnitude.amax()
    descale = scheme.descale(magnitude)
    y = y * per_row(1 / descale, y.shape[1], y.shape[2], scheme.block)
    if scheme.dtype == torch.int8:
        y = y.round().nan_to_num(0.0)  # integers have no NaN; the descale keeps it
    return y.clamp(-scheme.largest, scheme.largest).to(scheme.dtype), descale, mean


def _quantized(x: torch.Tensor, layout: str, scheme: Scheme, kernel: Any) -> Quantized:
    """Return q, k or v as `Quantized`. x is 4-D in `layout`, or 3-D. `kernel`: the backend's `quantize`, or None."""
    rows = as_bhsd(x if x.dim() == 4 else x[None], layout)
    if rows.numel() == 0:
        shape = {PER_TENSOR: (), PER_HEAD: (rows.shape[0], rows.shape[1] // scheme.group)}.get(scheme.kind)
        shape = (*rows.shape[:2], -(-rows.shape[2] // scheme.block)) if shape is None else shape
        mean = x.new_zeros((*rows.shape[:2], rows.shape[3]), dtype=torch.float32) if scheme.smooth else None
        return Quantized(torch.empty_like(x, dtype=scheme.dtype), x.new_ones(shape, dtype=torch.float32), mean)
    if kernel is not None:
        out = torch.empty_like(x, dtype=scheme.dtype)
        descale, mean = kernel(rows, as_bhsd(out if x.dim() == 4 else out[None], layout), scheme)
        return Quantized(out, descale, mean)
    values, descale, mean = quantize_by_operators(rows, scheme)
    values = as_bhsd(values, layout)
    return Quantized(values if x.dim() == 4 else values[0], descale, mean)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str, int8: bool, straight_through: bool) -> None:
    validation.check_tensors(q=q, k=k, v=v)
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}: blocks and means need samples")
    if q.dtype not in ATTENTION_DTYPES:
        raise TypeError(f"Unsupported dtype {q.dtype}: expected float16, bfloat16 or float32")
    if layout == "bhsd" and q.dim() == k.dim() == v.dim() == 3:
        validation.check_qkv(q[None], k[None], v[None], LAYOUTS[layout])
    else:
        validation.check_qkv(q, k, v, LAYOUTS[layout])
    if int8 and v.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"beside int8 v stays as it is, in float16 or bfloat16, got {v.dtype}")
    if not straight_through and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError(
            "rounding has no gradient: to train with quantised attention ask for straight_through=True, else call "
            "quantize inside torch.no_grad(), or with detached tensors"
        )


def quantize(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    per: str = "tensor",
    dtype: str = "float8",
    smooth: bool = False,
    rotate: bool = False,
    *,
    straight_through: bool = False,
    layout: str = "bhsd",
    backend: str | None = None,
) -> tuple[Quantized, Quantized, Quantized]:
    """Return q, k and v in few bits, for `diyfa.flash_attention(*diyfa.quantize(q, k, v))`.

    Args:
        q, k, v: as for `diyfa.flash_attention` ("bhsd", also 3-D) or `flash_attention_v2` ("bshd"); float16, bfloat16
            or float32. All rows count, those beyond `seq_lens`, too: they must hold finite numbers.
        per: what shares a descale: "tensor"; "head", each KV head of a sample (q: its group of heads); or "block", 128
            queries or 64 keys of a head. v then has one for each head, because its factor has to leave the sum.
        dtype: "float8" (float8_e4m3fn), or "int8" for q and k, beside which v stays in float16 or bfloat16.
        smooth: take the mean over the sequence off k, and off v in float8. Results stay those of the original numbers,
            log-sum-exp included.
        rotate: multiply q and k by a Hadamard matrix, which spreads outlier features. D must be a power of two.
        straight_through: attention of the results gives gradients to q, k and v, for quantisation-aware training.
            Rounding counts as the identity: the gradients are those of attention in 16 bits (float16 if the inputs have
            it, else bfloat16) at the numbers that the results stand for. Descales and means get none of their own.
        layout: "bhsd" or "bshd".
        backend: name of a backend whose kernel does it; default: that of the tensors' device. CPU tensors need none.

    Returns:
        Three `Quantized` (values, descale, mean, and with straight_through the source). A NaN or infinity makes all
        numbers that share its descale NaN.

    Raises:
        ValueError, TypeError: an argument does not fit, or an input requires a gradient without straight_through.
    """
    validation.check_booleans(smooth=smooth, rotate=rotate, straight_through=straight_through)
    for name, value, known in (("per", per, KINDS), ("dtype", dtype, DTYPES)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    is_int8 = dtype == "int8"
    _check(q, k, v, layout, is_int8, straight_through)
    head_dim = q.shape[-1]
    if rotate and head_dim & (head_dim - 1):
        raise ValueError(f"rotate needs a head_dim that is a power of two, got {head_dim}: pad q and k")
    kind, chosen = KINDS[per], DTYPES[dtype]
    heads = 0 if q.dim() == 3 else LAYOUTS[layout][1]
    group = q.shape[heads] // k.shape[heads] if kind == PER_HEAD else 1
    kernel = registry.optional_member(q.device, "quantize", backend or "")
    with torch.no_grad():
        q8 = _quantized(q, layout, Scheme(chosen, kind, BLOCK_Q, group, rotate=rotate), kernel)
        k8 = _quantized(k, layout, Scheme(chosen, kind, BLOCK_K, 1, smooth=smooth, rotate=rotate), kernel)
        v8 = Quantized(v, None)
        if not is_int8:
            v8 = _quantized(v, layout, Scheme(chosen, min(kind, PER_HEAD), BLOCK_K, 1, smooth=smooth), kernel)
    if straight_through and torch.is_grad_enabled():
        if rotate:  # gradients of the rotated numbers are rotated back
            q, k = (hadamard(x.float()).to(x.dtype) for x in (q, k))
        q8, k8, v8 = q8._replace(source=q), k8._replace(source=k), Quantized(v8.values.detach(), *v8[1:3], v)
    return q8, k8, v8
