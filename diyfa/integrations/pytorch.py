"""diyfa under PyTorch's own attention: `use_in_pytorch`.

On CUDA PyTorch has a registry of flash attention implementations, whose operators `scaled_dot_product_attention`,
`varlen_attn`, `nn.MultiheadAttention`, compiled graphs and `context_parallel` call where they choose flash attention.
On an NPU torch_npu replaces `scaled_dot_product_attention` as a whole, so there that operator is overridden, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention

from diyfa.integrations import torch_operators
from diyfa.integrations.seams import Handle, handle_of, switch_off, switch_on

NAME = "diyfa"
SEAM = torch_operators.SEAM
DISPATCH_KEYS = {"cuda": "CUDA", "npu": "PrivateUse1", "cpu": "CPU"}


def _kernel_of(operator: Any, key: str) -> Callable[..., torch.Tensor]:
    """What PyTorch runs for an operator and a dispatch key now."""
    if not hasattr(torch.library, "get_kernel"):  # 2.10; before, all but the vendor's own kernel
        return operator.decompose
    kernel = torch.library.get_kernel(operator, key)
    return lambda query, *arguments, **options: kernel.call_boxed(
        torch._C._dispatch_keys(query), query, *arguments, **options
    )


def _override_whole_attention(library: torch.library.Library, key: str) -> None:
    """`scaled_dot_product_attention` itself, in training and in inference mode; the kernel that was there is kept for
    what diyfa does not take."""
    operator = torch.ops.aten.scaled_dot_product_attention.default
    for of_key in (f"Autograd{key}", key):
        attention = torch_operators.scaled_dot_product_attention(_kernel_of(operator, of_key))
        library.impl("scaled_dot_product_attention", attention, of_key)


def _override(device_type: str) -> list[torch.library.Library]:
    """Kernels of PyTorch's operators for one device type, there until the list is cleared."""
    key = DISPATCH_KEYS[device_type]
    libraries = [torch.library.Library("aten", "IMPL")]  # the overrides live as long as the object
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*verrid.*", UserWarning)  # what is meant here
        for operator in torch_operators.FLASH_OPERATORS:
            if hasattr(torch.ops.aten, operator.__name__):
                libraries[0].impl(operator.__name__, operator, key)
        if device_type != "cuda":
            _override_whole_attention(libraries[0], key)

    return libraries


class _Registered:
    """What PyTorch's registry keeps while diyfa is active there."""

    def __init__(self, before: str | None = None) -> None:
        self.before = before
        self.libraries = _override("cuda")
        switch_on(SEAM, self.put_back, "cuda")

    def remove(self) -> None:
        """The registry makes way for another implementation, or for PyTorch's own."""
        self.libraries.clear()
        switch_off(SEAM)

    def put_back(self) -> None:
        """The handle is removed: the implementation that was active before diyfa comes back."""
        torch.nn.attention.restore_flash_attention_impl()
        if self.before is not None:
            torch.nn.attention.activate_flash_attention_impl(self.before)


def _activate() -> None:
    """Put diyfa in through the registry, where its name stays."""
    before = torch.nn.attention.current_flash_attention_impl()
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=lambda: _Registered(before))
    torch.nn.attention.activate_flash_attention_impl(NAME)
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_Registered)  # when it is activated by name


def use_in_pytorch(device_type: str = "cuda") -> Handle:
    """Put diyfa under PyTorch's attention for tensors of one device type.

    Args:
        device_type:
            "cuda": the flash attention operators, through PyTorch's registry where it has one (2.10 and later), under
            the name "diyfa": `torch.nn.attention.activate_flash_attention_impl("diyfa")` puts it back after another.
            "npu": `scaled_dot_product_attention` itself, and the flash operators for `varlen_attn`. Calls that are not
            diyfa's (other dtypes than float16, bfloat16 and float32, other ranks than 4, a last stride other than 1)
            go where they went before; the handle's `calls` say how many and why.
            "cpu": as "npu", for CPU tensors inside `diyfa.use_backend("cpu")`, to try it.

    Returns:
        A handle whose `remove()` gives the operators back, to the implementation of PyTorch's registry that was active
        before or to PyTorch's own. A second call returns the same handle.

    Raises:
        ValueError: another device type.
        RuntimeError: diyfa is under PyTorch's attention for another device type already.
    """
    if device_type not in DISPATCH_KEYS:
        raise ValueError(f"device_type must be one of {', '.join(DISPATCH_KEYS)}, got {device_type!r}")
    handle = handle_of(SEAM)
    if handle is None:
        if device_type == "cuda" and hasattr(torch.nn.attention, "register_flash_attention_impl"):  # 2.10
            _activate()
        else:
            switch_on(SEAM, _override(device_type).clear, device_type)
        handle = handle_of(SEAM)
        assert handle is not None, "it was switched on above"
    elif handle.detail != device_type:
        raise RuntimeError(f"diyfa is under PyTorch's attention for {handle.detail}; remove that handle first")
    return handle
