"""`triton_matmul`: the matrix product by diyfa's own kernels."""

from __future__ import annotations

import warnings
from typing import NoReturn

import torch

from diyfa import ops, registry, validation
from diyfa.attention import autocast
from diyfa.keywords import refuse_unknown, without_unknown
from diyfa.options import NO_LENGTHS
from diyfa.plan import call_key, find, is_described_only

PRECISIONS = ("tf32", "ieee")
_has_warned = False


def _warn_about_half() -> None:
    """Warn once in a process that the result of float32 matrices is float16: documented, but surprising."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            "triton_matmul computes and returns float16 of float32 matrices; for float32 pass precision='tf32' or "
            "precision='ieee', and out_dtype=torch.float16 if float16 is meant",
            UserWarning,
            stacklevel=3,
        )


@without_unknown
def triton_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    block_m: int | None = None,
    block_n: int | None = None,
    block_k: int | None = None,
    use_autotune: bool = True,
    *,
    precision: str | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
    **unknown: NoReturn,
) -> torch.Tensor:
    """Return a @ b, accumulated in float32.

    Args:
        a: (M, K) float16, bfloat16 or float32; any strides.
        b: (K, N), of a's dtype and device; any strides.
        block_m, block_n, block_k: the tile; all three or none. Powers of two from 16, not beyond M, N, K.
        use_autotune: without a given tile, measure candidates once for each bucket of sizes. False: use the table's.
        precision: for float32 inputs only. None computes in float16 and returns float16, with one warning (inside
            torch.autocast: in its dtype). "tf32" and "ieee" compute in that precision and return float32.
        out_dtype: dtype of the result; default: the inputs' (float16 for float32 inputs without `precision`).
        backend: name of a backend that must run the call.

    Returns:
        (M, N).

    Raises:
        ValueError: not 2-D, not on a supported device, devices or inner dimensions differ, bad tile or precision.
        TypeError: unsupported or differing dtypes.
    """
    if unknown:
        refuse_unknown(triton_matmul, unknown)
    backend = backend or registry.forced_backend()
    blocks = (block_m, block_n, block_k)
    choices = ("triton_matmul", *blocks, type(use_autotune), use_autotune, precision, out_dtype, backend)
    key = call_key(a, b, b, NO_LENGTHS, choices, ())
    plan = find(key)
    if plan is not None:
        return plan.run(a, b)
    inputs = a, b
    validation.check_tensors(a=a, b=b)
    if precision is None:
        a, b = autocast(a, b)
    validation.check_booleans(use_autotune=use_autotune)
    validation.check_matmul(a, b)
    validation.check_blocks(blocks, (a.shape[0], b.shape[1], a.shape[1]))
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision must be None, 'tf32' or 'ieee', got {precision!r}")
    if precision is not None and a.dtype != torch.float32:
        raise ValueError(f"precision={precision!r} applies to float32 inputs, got {a.dtype}")
    is_unasked = a.dtype == torch.float32 and precision is None and out_dtype is None
    compute_dtype = torch.float16 if a.dtype == torch.float32 and precision is None else a.dtype
    out_dtype = compute_dtype if out_dtype is None else out_dtype
    if out_dtype not in validation.MATMUL_DTYPES:
        raise TypeError(f"Unsupported dtype {out_dtype} for the result: expected float16, bfloat16 or float32")
    tile = None if block_m is None else blocks
    if inputs[0] is not a or inputs[1] is not b or is_described_only(a) or ops.wants_grad(a, b):
        key = None
    options = tile, use_autotune, precision or "ieee", compute_dtype, out_dtype, backend
    product = ops.matmul(a, b, *options) if key is None else ops.product_plan(a, b, key, *options).run(a, b)
    if is_unasked and not torch.compiler.is_compiling():
        _warn_about_half()
    return product
