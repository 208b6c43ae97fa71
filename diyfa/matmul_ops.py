"""The PyTorch operators `torch.ops.diyfa.matmul` and `matmul_out`, and the autograd of products.

As in `diyfa.ops`, a call that nothing traces or transforms runs its plan directly, and all other calls go through the
operators. `triton_matmul` has looked the plan up before it comes here.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from diyfa import registry
from diyfa.ops import sees_operators_only, wants_grad
from diyfa.options import MATMUL_SCHEMA, MatmulOptions
from diyfa.plan import ProductPlan, call_key, find, remember, runs_eagerly
from diyfa.problem import MatmulProblem, MatmulTensors, dtype_name
from diyfa.torch_private import below_autograd, differentiates_forward
from diyfa.validation import check_no_overlap

FLOAT8 = torch.float8_e4m3fn
_FACTORS = "Tensor a, Tensor b, Tensor? bias, Tensor? a_descale, Tensor? b_descale"  # `MatmulTensors`
_N_FACTORS = len(MatmulTensors._fields)
_lib = torch.library.Library("diyfa", "FRAGMENT")
_lib.define(f"matmul({_FACTORS}, {MATMUL_SCHEMA}) -> Tensor")
_lib.define(f"matmul_out({_FACTORS}, Tensor(a!) out, {MATMUL_SCHEMA}) -> ()")


def _is_matrix_aligned(x: torch.Tensor) -> bool:
    """Return whether one stride is 1, and the other (not 0) and the base address are multiples of 16 bytes.

    TMA holds strides below 2^40 bytes; a matrix of one row may have a longer one.
    """
    step = 16 // x.element_size()
    rows, columns = x.stride()
    major = rows if columns == 1 and rows % step == 0 else columns if rows == 1 else 0
    return 0 < major < 2**36 * step and major % step == 0 and x.data_ptr() % 16 == 0


def _is_row_major(x: torch.Tensor) -> bool:
    """Return whether an aligned matrix is read along its second dimension, the one of stride 1."""
    rows, columns = x.stride()
    return columns == 1 and rows * x.element_size() % 16 == 0


def _matmul(*arguments: Any) -> torch.Tensor:
    return _product(MatmulTensors(*arguments[:_N_FACTORS]), None, _matmul_options(arguments[_N_FACTORS:]))


def _matmul_out(*arguments: Any) -> None:
    tensors, out = MatmulTensors(*arguments[:_N_FACTORS]), arguments[_N_FACTORS]
    check_no_overlap(out, tensors, MatmulTensors._fields)
    _product(tensors, out, _matmul_options(arguments[_N_FACTORS + 1 :]))


def _matmul_options(arguments: Sequence[Any]) -> MatmulOptions:
    options = MatmulOptions(*arguments)
    if options.block is None:
        return options
    block_m, block_n, block_k = options.block  # a list: the schema has no tuples
    return options._replace(block=(block_m, block_n, block_k))


def _product(tensors: MatmulTensors, out: torch.Tensor | None, options: MatmulOptions) -> torch.Tensor:
    key, addresses = call_key((*tensors, out), ("product", *options, registry.forced_backend()))
    plan = find(key)
    if plan is None:
        plan = product_plan(tensors, out, key, options)
    return plan.run(tensors, addresses, out)


def product_plan(
    tensors: MatmulTensors, out: torch.Tensor | None, key: Hashable | None, options: MatmulOptions
) -> ProductPlan:
    """Make the plan of a product of checked matrices and store it under `key`."""
    a, b = tensors.a, tensors.b
    chosen = registry.resolve_backend(a.device, options.backend)
    problem = MatmulProblem(
        chosen.device_type,
        chosen.arch(a.device),
        dtype_name(a.dtype),
        dtype_name(options.compute_dtype),
        dtype_name(options.out_dtype),
        a.shape[0],
        b.shape[1],
        a.shape[1],
        options.precision,
        options.block,
        options.autotune,
        _is_matrix_aligned(a) and _is_matrix_aligned(b),
        (_is_row_major(a), not _is_row_major(b)),
        None if out is None else _is_matrix_aligned(out) and _is_row_major(out),
        tensors.bias is not None,
        options.activation,
    )
    variant = options.variant
    if options.is_backward:
        variant = registry.variant_or_auto("matmul", chosen, variant, problem)
    plan = ProductPlan(problem, registry.choose("matmul", problem, chosen, variant), tensors, out)
    remember(key, plan)
    return plan


def _matmul_fake(a: Any, b: Any, *arguments: Any) -> Any:
    options = MatmulOptions(*arguments[_N_FACTORS - 2 :])
    return a.new_empty((a.shape[0], b.shape[1]), dtype=options.out_dtype)


def _matmul_autograd(*arguments: Any) -> torch.Tensor:
    if differentiates_forward() or wants_grad(*arguments[:3]):
        return _Matmul.apply(*arguments)
    with below_autograd():
        return _mm(*arguments)


_lib.impl("matmul", _matmul, "CompositeExplicitAutograd")
_lib.impl("matmul", _matmul_autograd, "Autograd")
_lib.impl("matmul_out", _matmul_out, "CompositeExplicitAutograd")
torch.library.register_fake("diyfa::matmul", _matmul_fake, lib=_lib)
torch.library.register_fake("diyfa::matmul_out", lambda *arguments: None, lib=_lib)
_mm = torch.ops.diyfa.matmul.default
_mm_out = torch.ops.diyfa.matmul_out.default


def _multiply(tensors: MatmulTensors, options: MatmulOptions) -> torch.Tensor:
    """Call the operator, or directly the function that it would call."""
    return (_matmul if runs_eagerly(*tensors.present()) else _mm)(*tensors, *options)


def _gradient_before_activation(ctx: Any, dc: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a @ b + bias. gelu and silu compute that sum a second time, by the same kernels."""
    options: MatmulOptions = ctx.options
    if options.activation is None:
        return dc
    a, b, bias, c = ctx.saved_tensors
    if options.activation == "relu":
        return torch.ops.aten.threshold_backward(dc, c, 0.0)
    options = options._replace(block=None, out_dtype=torch.float32, activation=None, is_backward=True)
    z = matmul(MatmulTensors(a, b, bias), options)
    backward = torch.ops.aten.gelu_backward if ctx.options.activation == "gelu" else torch.ops.aten.silu_backward
    return backward(dc.float(), z)


class _Matmul(torch.autograd.Function):
    """c = activation(a @ b + bias). With dz the gradient of the sum, da = dz @ bᵀ and db = aᵀ @ dz by the same
    operator, in the inputs' dtype; dbias adds up the rows of dz in float32."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        tensors, options = MatmulTensors(*arguments[:_N_FACTORS]), MatmulOptions(*arguments[_N_FACTORS:])
        if tensors.a.dtype == FLOAT8 and any(ctx.needs_input_grad):
            raise ValueError("a product of float8 has no gradient")
        c, ctx.options = _multiply(tensors, options), options
        a, b, bias, *_ = tensors
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(a, b, bias, c if options.activation == "relu" else None)
        return c

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        a, b, *_ = ctx.saved_tensors
        dz = _gradient_before_activation(ctx, grads[0])
        options = ctx.options._replace(block=None, out_dtype=a.dtype, activation=None, is_backward=True)
        needs_a, needs_b, needs_bias, *_ = ctx.needs_input_grad
        dbias = dz.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None
        dz = dz.to(a.dtype)
        da = matmul(MatmulTensors(dz, b.t()), options) if needs_a else None
        db = matmul(MatmulTensors(a.t(), dz), options) if needs_b else None
        return (da, db, dbias, None, None, *(None,) * len(options))


def matmul(tensors: MatmulTensors, options: MatmulOptions) -> torch.Tensor:
    """Return the product of checked matrices."""
    if sees_operators_only():
        return _mm(*tensors, *options)
    if differentiates_forward() or wants_grad(*tensors[:3]):
        return _Matmul.apply(*tensors, *options)
    return _multiply(tensors, options)


def matmul_out(tensors: MatmulTensors, out: torch.Tensor, options: MatmulOptions) -> torch.Tensor:
    """Write the product of checked matrices to `out` and return it."""
    if not sees_operators_only() and runs_eagerly(out, *tensors.present()):
        _matmul_out(*tensors, out, *options)
    else:
        _mm_out(*tensors, out, *options)
    return out
