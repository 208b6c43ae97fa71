"""`triton_matmul`: the matrix product by diyfa's own kernels."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

import torch

from diyfa import matmul_ops, registry, validation
from diyfa.attention import autocast
from diyfa.keywords import refuse_unknown, without_unknown
from diyfa.matmul_ops import FLOAT8
from diyfa.ops import wants_grad
from diyfa.options import ACTIVATIONS, MatmulOptions
from diyfa.plan import call_key, find, is_described_only
from diyfa.problem import MatmulTensors

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
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


def _check_matrices(a: torch.Tensor, b: torch.Tensor) -> None:
    """Check that a is (M, K) and b (K, N), of one supported dtype on one device."""
    validation.check_tensors(a=a, b=b)
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(f"Expected 2D tensors, got a {tuple(a.shape)} and b {tuple(b.shape)}")
    if a.dtype not in DTYPES and a.dtype != FLOAT8:
        raise TypeError(f"Unsupported dtype {a.dtype}: expected float16, bfloat16, float32 or float8_e4m3fn")
    if b.dtype != a.dtype:
        raise TypeError(f"dtypes must match: a is {a.dtype}, b is {b.dtype}")
    validation.check_same_device(a, "a", b=b)
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"Incompatible dimensions: a is {tuple(a.shape)}, b is {tuple(b.shape)}; a.shape[1] must be b.shape[0]"
        )


def _check_blocks(blocks: tuple[int | None, int | None, int | None], sizes: tuple[int, int, int]) -> None:
    """Check that no tile size is given or all three, each a power of two from 16 on and not beyond its dimension."""
    is_given = [x is not None for x in blocks]
    if not any(is_given):
        return
    if not all(is_given):
        raise ValueError(f"block_m, block_n and block_k must be given together, got {blocks}")
    for name, block, size in zip(("block_m", "block_n", "block_k"), blocks, sizes, strict=True):
        if not isinstance(block, int) or isinstance(block, bool):
            raise TypeError(f"{name} must be an int, got {type(block).__name__}")
        if block <= 0:
            raise ValueError(f"{name} must be positive, got {block}")
        if block > size:
            raise ValueError(f"{name}={block} exceeds the matrix dimension {size}")
        if block < 16 or block & (block - 1):
            raise ValueError(f"{name} must be a power of two of at least 16, got {block}")


def _check_epilogue(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> None:
    """Check that bias is (N,) of a supported dtype on a's device, and that the activation is one of ACTIVATIONS."""
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation must be None, {', '.join(map(repr, ACTIVATIONS))}, got {activation!r}")
    if bias is None:
        return
    validation.check_tensors(bias=bias)
    if bias.shape != (b.shape[1],):
        raise ValueError(
            f"bias must have shape ({b.shape[1]},), one number for each column of b, got {tuple(bias.shape)}"
        )
    if bias.dtype not in DTYPES:
        raise TypeError(f"Unsupported dtype {bias.dtype} of bias: expected float16, bfloat16 or float32")
    validation.check_same_device(a, "a", bias=bias)


def _check_descales(
    a: torch.Tensor, b: torch.Tensor, a_descale: torch.Tensor | None, b_descale: torch.Tensor | None
) -> None:
    """Check that descales belong to float8, and are float32: one number, or one for each row of a or column of b."""
    m, n = a.shape[0], b.shape[1]
    for name, x, shapes in (("a_descale", a_descale, ((m,), (m, 1))), ("b_descale", b_descale, ((n,), (1, n)))):
        if x is None:
            continue
        if a.dtype != FLOAT8:
            raise ValueError(f"{name} belongs to float8_e4m3fn, a is {a.dtype}")
        validation.check_tensors(**{name: x})
        if x.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {x.dtype}")
        if x.shape not in {(), (1,), (1, 1), *shapes}:
            raise ValueError(f"{name} must have one number or shape {shapes[0]} or {shapes[1]}, got {tuple(x.shape)}")
        validation.check_same_device(a, "a", **{name: x})


def _check_out(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> None:
    """Check that out is (M, N) of `dtype` on a's device, with memory of its own for each element."""
    validation.check_tensors(out=out)
    if out.shape != (a.shape[0], b.shape[1]):
        raise ValueError(f"out must have shape {(a.shape[0], b.shape[1])}, got {tuple(out.shape)}")
    if out.dtype != dtype:
        raise TypeError(f"out must be {dtype}, as out_dtype says, got {out.dtype}")
    validation.check_same_device(a, "a", out=out)
    if not torch.compiler.is_compiling() and out.is_neg():
        raise ValueError("out must hold its numbers themselves, got a view that negates them, such as x.conj().imag")
    (rows, columns), (row, column) = out.shape, out.stride()
    repeats = (rows > 1 and row < 1) or (columns > 1 and column < 1)
    if rows > 1 and columns > 1:  # a traced tensor has symbolic sizes, which cannot be sorted
        repeats = repeats or (column < row * rows if row < column else row < column * columns)
    if repeats and out.numel():
        raise ValueError(f"out must not overlap itself, got shape {tuple(out.shape)} with strides {out.stride()}")


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
    _check_matrices(a, b)
    _check_blocks((block_m, block_n, block_k), (a.shape[0], b.shape[1], a.shape[1]))
    _check_epilogue(a, b, bias, activation)
    _check_descales(a, b, a_descale, b_descale)
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision must be None, 'tf32' or 'ieee', got {precision!r}")
    if precision is not None and a.dtype != torch.float32:
        raise ValueError(f"precision={precision!r} applies to float32 inputs, got {a.dtype}")
    is_unasked = a.dtype == torch.float32 and precision is None and out_dtype is None and out is None
    compute_dtype = torch.float16 if a.dtype == torch.float32 and precision is None else a.dtype
    is_float8 = a.dtype == FLOAT8
    if out_dtype is None:
        out_dtype = torch.bfloat16 if is_float8 else compute_dtype
        if isinstance(out, torch.Tensor):
            out_dtype = out.dtype
    if out_dtype not in DTYPES:
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
        _check_out(out, a, b, out_dtype)
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
