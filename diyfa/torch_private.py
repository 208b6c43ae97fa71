"""The private functions of PyTorch that the front end calls, so that a new release is checked in one place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import forward_ad

_c: Any = torch._C
_functorch: Any = torch._C._functorch

# `is_unseen` asks these at every call: looked up here, they take a sixth less time.
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = _c._len_torch_dispatch_stack  # FakeTensorMode, make_fx, and users' modes
_has_function_mode = _c._is_torch_function_mode_enabled
_transform = _functorch.peek_interpreter_stack  # vmap, grad, jvp of torch.func
_tracing_state = _c._get_tracing_state
_is_profiling = _c._autograd._profiler_enabled  # a profiler shows the operators
# torch.autograd.grad(…, is_grads_batched=True) passes tensors that stand for a batch of gradients. This function
# recognises them. They have no memory, and no transform is active then.
is_batch_of_gradients: Callable[[torch.Tensor], bool] = _functorch.is_legacy_batchedtensor
is_deterministic: Callable[[], bool] = _c._get_deterministic_algorithms  # torch.are_deterministic_algorithms_enabled


def is_unseen() -> bool:
    """Return whether operators run at once, and no tracer, transform, mode or profiler sees them."""
    return not (
        _is_compiling()
        or _dispatch_modes()
        or _has_function_mode()
        or _transform() is not None
        or forward_ad._current_level >= 0
        or _tracing_state() is not None
        or _is_profiling()
    )


def is_transformed() -> bool:
    """Return whether a transform of torch.func is active."""
    return _functorch.peek_interpreter_stack() is not None


def differentiates_forward() -> bool:
    """Return whether forward-mode differentiation is on. `autograd.Function` refuses tangents then, and an operator
    would drop them.

    Raises:
        RuntimeError: a transform of torch.func differentiates. Neither a Function nor an operator supports that.
    """
    if is_transformed():
        kinds = _functorch.TransformType
        if any(level.key() in (kinds.Grad, kinds.Jvp) for level in _functorch.get_interpreter_stack()):
            raise RuntimeError(
                "diyfa cannot be differentiated by torch.func (grad, vjp, jvp, jacrev, …): use torch.autograd, that is "
                "backward() or torch.autograd.grad, also of what torch.func.vmap returns"
            )
    return forward_ad._current_level >= 0 and _c._is_fwd_grad_enabled()  # disabled inside an autograd.Function


def below_autograd() -> AbstractContextManager[object]:
    """Return a context in which operators are not differentiated."""
    return _c._AutoDispatchBelowAutograd()


def unbatched(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor that all calls under torch.func.vmap share."""
    while _functorch.is_batchedtensor(x):
        x = _functorch.get_unwrapped(x)
    return x


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` for calls that no transform of torch.func sees, which `Function.apply` looks for."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def dispatch_keys(x: torch.Tensor) -> Any:
    """Return the dispatch keys of `x`, as `torch.library.get_kernel` takes them."""
    return _c._dispatch_keys(x)
