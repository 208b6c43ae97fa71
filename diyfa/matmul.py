"""`triton_matmul`: the matrix product by diyfa's own kernels."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

import torch

from diyfa import matmul_ops, registry, validation
from diyfa.attention import autocast
from diyfa.keywords import refuse_unknown, without_unknown
from diyfa.ops import wants_grad
from diyfa.options import MatmulOptions
from diyfa.plan import call_key, find, is_described_only
from diyfa.problem import MatmulTensors

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
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    a_descale: torch.Tensor | None = None,
    b_descale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    variant: str = "auto",
    backend: str | None = None,
    **unknown: NoReturn,
) -> torch.Tensor:
    """Return activation((a @ b) * a_descale * b_descale + bias), accumulated in float32 and rounded once.

    The kernel adds the bias and applies the activation before it writes the result. Gradients of a, b and bias are
    computed by the same kernels. With "gelu" and "silu" the backward pass computes a @ b a second time. float8 has no
    gradient.

    Args:
        a: (M, K) float16, bfloat16, float32 or float8_e4m3fn; any strides.
        b: (K, N), of a's dtype and device; any strides.
        block_m, block_n, block_k: the tile; all three or none. Powers of two from 16, not beyond M, N, K.
        use_autotune: without a given tile, measure candidates once for each bucket of sizes. False: use the table's.
        precision: for float32 inputs only. None computes in float16 and returns float16, with one warning (inside
            torch.autocast: in its dtype). "tf32" and "ieee" compute in that precision and return float32.
        out_dtype: dtype of the result; default: the inputs' (float16 for float32 inputs without `precision`, bfloat16
            for float8).
        bias: (N,) float16, bfloat16 or float32, added to each row in float32.
        activation: None, "relu", "gelu" (by the error function, PyTorch's default) or "silu", applied in float32.
        a_descale: float32, for float8: one number, or one for each row of a, (M, 1) or (M,); default: 1. An element of
            a stands for its value times that.
        b_descale: likewise one number, or one for each column of b, (1, N) or (N,).
        out: (M, N) of `out_dtype` (default: out's own), any strides, to write the result to. It shares no memory with
            the inputs, and the call has no gradient.
        variant: name of the kernel that must run the call, one of `kernels_for(op="matmul")`. The backward pass takes
            it for the products that it can run. "auto" chooses.
        backend: name of a backend that must run the call.

    Returns:
        (M, N); `out` if it is given.

    Raises:
        ValueError: not 2-D, not on a supported device, devices or inner dimensions differ, bad tile, precision,
            activation, bias, descale or out, a gradient of float8, or the variant cannot run the call.
        TypeError: unsupported or differing dtypes.
    """
    if unknown:
        refuse_unknown(triton_matmul, unknown)
    backend = backend or registry.forced_backend()
    choices = (
        "triton_matmul", block_m, block_n, block_k, type(use_autotune), use_autotune, precision, out_dtype, activation,
        variant, backend,
    )  # fmt: skip
    given: tuple[Any, ...] = (a, b)
    if not (bias is a_descale is b_descale is None):
        given = a, b, bias, a_descale, b_descale
    key, addresses = call_key(given if out is None else (*given, out), choices)
    plan = find(key)
    if plan is not None:
        if out is not None and plan.may_overlap(addresses):  # the key does not hold addresses
            validation.check_no_overlap(out, given, MatmulTensors._fields)
        return plan.run(given, addresses, out)
    validation.check_tensors(a=a, b=b)
    if precision is None:
        a, b = autocast(a, b)
    validation.check_booleans(use_autotune=use_autotune)
    validation.check_matmul(a, b)
    validation.check_blocks((block_m, block_n, block_k), (a.shape[0], b.shape[1], a.shape[1]))
    validation.check_epilogue(a, b, bias, activation)
    validation.check_descales(a, b, a_descale, b_descale)
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision must be None, 'tf32' or 'ieee', got {precision!r}")
    if precision is not None and a.dtype != torch.float32:
        raise ValueError(f"precision={precision!r} applies to float32 inputs, got {a.dtype}")
    is_unasked = a.dtype == torch.float32 and precision is None and out_dtype is None and out is None
    compute_dtype = torch.float16 if a.dtype == torch.float32 and precision is None else a.dtype
    is_float8 = a.dtype == validation.FLOAT8_MATMUL
    if out_dtype is None:
        out_dtype = torch.bfloat16 if is_float8 else compute_dtype
        if isinstance(out, torch.Tensor):
            out_dtype = out.dtype
    if out_dtype not in validation.MATMUL_DTYPES:
        raise TypeError(f"Unsupported dtype {out_dtype} for the result: expected float16, bfloat16 or float32")
    is_trained = wants_grad(a, b, bias)
    if (is_trained and is_float8) or wants_grad(a_descale, b_descale):
        raise ValueError("a product of float8 and its descales have no gradient: call it under torch.no_grad()")
    if given[0] is not a or given[1] is not b or is_described_only(a) or is_trained:
        key = None
    tensors = MatmulTensors(a, b, bias, a_descale, b_descale)
    tile = None
    if block_m is not None and block_n is not None and block_k is not None:
        tile = block_m, block_n, block_k
    options = MatmulOptions(
        tile, use_autotune, precision or "ieee", compute_dtype, out_dtype, activation, variant, False, backend
    )
    if out is not None:
        validation.check_product_out(out, a, b, out_dtype)
        if not torch.compiler.is_compiling():  # a traced tensor has no address: the operator checks it
            validation.check_no_overlap(out, tensors, MatmulTensors._fields)
        if is_trained or wants_grad(out):
            raise ValueError("out has no gradient: give no out, or call triton_matmul under torch.no_grad()")
    if key is not None:
        product = matmul_ops.product_plan(tensors, out, key, options).run(tensors, addresses, out)
    elif out is not None:
        product = matmul_ops.matmul_out(tensors, out, options)
    else:
        product = matmul_ops.matmul(tensors, options)
    if is_unasked and not torch.compiler.is_compiling():
        _warn_about_half()
    return product
