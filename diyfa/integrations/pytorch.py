"""diyfa under PyTorch's own attention: `use_in_pytorch`.

On CUDA PyTorch has a registry of flash attention implementations. `scaled_dot_product_attention`, `varlen_attn`,
`nn.MultiheadAttention`, compiled graphs and `context_parallel` call their operators if they choose flash attention.
On an NPU torch_npu replaces all of `scaled_dot_product_attention`, so diyfa overrides that operator, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn import attention

from diyfa.integrations import torch_operators
from diyfa.integrations.seams import Handle, active_handle, switch_on
from diyfa.torch_private import dispatch_keys

NAME = "diyfa"
SEAM = torch_operators.SEAM
DISPATCH_KEYS = {"cuda": "CUDA", "npu": "PrivateUse1", "cpu": "CPU"}


def _current_kernel(operator: Any, key: str) -> Callable[..., torch.Tensor]:
    """Return the kernel that PyTorch currently runs for an operator and a dispatch key."""
    if not hasattr(torch.library, "get_kernel"):  # new in 2.10; `decompose` omits the vendor's own kernel
        return operator.decompose
    kernel = torch.library.get_kernel(operator, key)
    return lambda query, *arguments, **options: kernel.call_boxed(dispatch_keys(query), query, *arguments, **options)


def _override_sdpa(library: torch.library.Library, key: str) -> None:
    """Override `scaled_dot_product_attention`, in training and in inference mode.

    Calls that diyfa does not take go to the kernel that was registered before.
    """
    operator = torch.ops.aten.scaled_dot_product_attention.default
    for dispatch_key in (f"Autograd{key}", key):
        attention = torch_operators.scaled_dot_product_attention(_current_kernel(operator, dispatch_key))
        library.impl("scaled_dot_product_attention", attention, dispatch_key)


def _override(device_type: str, overrides_sdpa: bool, and_then: Callable[[], None] = lambda: None) -> Handle:
    """Override PyTorch's flash operators for one device type; if `overrides_sdpa`, `scaled_dot_product_attention`, too.

    The handle's `remove()` calls `and_then` after it has removed the kernels.
    """
    handle = active_handle(SEAM)
    if handle is not None:
        raise RuntimeError(f"diyfa is under PyTorch's attention for {handle.detail}; remove that handle first")
    key = DISPATCH_KEYS[device_type]
    with ExitStack() as undo, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*verrid.*", UserWarning)  # PyTorch warns of overrides; these are wanted
        undo.callback(and_then)
        library = torch.library.Library("aten", "IMPL")
        undo.callback(library._destroy)
        for name, operator in torch_operators.FLASH_OPERATORS.items():
            if hasattr(torch.ops.aten, name):
                library.impl(name, operator, key)
        if overrides_sdpa:
            _override_sdpa(library, key)
        return switch_on(SEAM, undo.pop_all(), device_type)


class _Registered:
    """diyfa's entry in PyTorch's registry, which calls `remove()` when it activates another or its own kernels."""

    def __init__(self, before: str | None = None) -> None:
        self._before = before
        self._replaced = False
        self._handle = _override("cuda", overrides_sdpa=False, and_then=self._bring_back)

    def remove(self) -> None:
        self._replaced = True
        self._handle.remove()

    def _bring_back(self) -> None:
        """Activate the former implementation, unless the registry has activated another one."""
        if self._replaced or attention.current_flash_attention_impl() != NAME:
            return
        attention.restore_flash_attention_impl()
        if self._before is not None:
            try:
                attention.activate_flash_attention_impl(self._before)
            except Exception as error:
                raise RuntimeError(
                    f"diyfa is out of PyTorch's attention, but {self._before!r}, which was there before, did not come "
                    "back: PyTorch's own flash attention is in its place"
                ) from error


def _activate() -> None:
    """Activate diyfa in PyTorch's registry. The registry forgets the former implementation, so store its name."""
    before = attention.current_flash_attention_impl()
    attention.register_flash_attention_impl(NAME, register_fn=lambda: _Registered(before))
    try:
        attention.activate_flash_attention_impl(NAME)
    except BaseException:
        if before is not None:
            attention.activate_flash_attention_impl(before)
        raise
    finally:
        attention.register_flash_attention_impl(NAME, register_fn=_Registered)


def use_in_pytorch(device_type: str = "cuda") -> Handle:
    """Put diyfa under PyTorch's attention for tensors of one device type.

    Args:
        device_type:
            "cuda": the flash attention operators, through PyTorch's registry (if it can restore one: 2.11), under the
            name "diyfa". `torch.nn.attention.activate_flash_attention_impl("diyfa")` activates it again after another.
            "npu": `scaled_dot_product_attention` itself, and the flash operators for `varlen_attn`. Calls that diyfa
            does not take (other dtypes than float16, bfloat16 and float32, other ranks than 4, a last stride other
            than 1) go to the former kernel; the handle's `calls` say how many and why.
            "cpu": as "npu", for CPU tensors inside `diyfa.use_backend("cpu")`, to try it.

    Returns:
        A handle whose `remove()` restores the former kernels: PyTorch's, or the implementation of its registry that was
        active before this call. If the registry has activated another one since, `remove()` does nothing. The name
        stays in the registry, which cannot remove one. A second call returns the same handle.

    Raises:
        ValueError: another device type.
        RuntimeError: diyfa is under PyTorch's attention for another device type already.
    """
    if device_type not in DISPATCH_KEYS:
        raise ValueError(f"device_type must be one of {', '.join(DISPATCH_KEYS)}, got {device_type!r}")
    handle = active_handle(SEAM)
    if handle is None:
        if device_type == "cuda" and hasattr(attention, "restore_flash_attention_impl"):  # 2.11
            _activate()
        else:
            _override(device_type, overrides_sdpa=device_type != "cuda")
        handle = active_handle(SEAM)
        assert handle is not None, "it was switched on above"
    elif handle.detail != device_type:
        raise RuntimeError(f"diyfa is under PyTorch's attention for {handle.detail}; remove that handle first")
    return handle
