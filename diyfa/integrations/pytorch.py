"""diyfa under PyTorch's own attention: `use_in_pytorch`.

On CUDA PyTorch has a registry of flash attention implementations, whose operators `scaled_dot_product_attention`,
`varlen_attn`, `nn.MultiheadAttention`, compiled graphs and `context_parallel` call where they choose flash attention.
"""

from __future__ import annotations

import torch
import torch.nn.attention

from diyfa.integrations import torch_operators
from diyfa.integrations.seams import Handle, handle_of, switch_on

NAME = "diyfa"
SEAM = torch_operators.SEAM
DISPATCH_KEYS = {"cuda": "CUDA", "cpu": "CPU"}


def _override(device_type: str) -> Handle:
    """Kernels of PyTorch's operators for one device type. Its registry takes the handle as its own."""
    libraries = [torch.library.Library("aten", "IMPL")]  # the overrides live as long as the object
    for operator in torch_operators.FLASH_OPERATORS:
        if hasattr(torch.ops.aten, operator.__name__):
            libraries[0].impl(operator.__name__, operator, DISPATCH_KEYS[device_type])

    def undo() -> None:
        libraries.clear()
        if device_type == "cuda" and _registry_uses_diyfa():
            torch.nn.attention.restore_flash_attention_impl()  # it removes the handle, which is gone already

    return switch_on(SEAM, undo, device_type)


def _has_registry() -> bool:
    return hasattr(torch.nn.attention, "register_flash_attention_impl")  # 2.10


def _registry_uses_diyfa() -> bool:
    return _has_registry() and torch.nn.attention.current_flash_attention_impl() == NAME


def use_in_pytorch(device_type: str = "cuda") -> Handle:
    """Put diyfa under PyTorch's attention for tensors of one device type.

    Args:
        device_type: "cuda" overrides the flash attention operators, through PyTorch's registry where it has one (2.10
            and later), under the name "diyfa": `torch.nn.attention.activate_flash_attention_impl("diyfa")` puts it
            back after another. "cpu" overrides the operators for CPU tensors, for trying them with
            `diyfa.use_backend("cpu")`.

    Returns:
        A handle whose `remove()` gives the operators back. A second call returns the same handle.

    Raises:
        ValueError: another device type.
        RuntimeError: diyfa is under PyTorch's attention for another device type already.
    """
    if device_type not in DISPATCH_KEYS:
        raise ValueError(f"device_type must be one of {', '.join(DISPATCH_KEYS)}, got {device_type!r}")
    handle = handle_of(SEAM)
    if handle is None:
        if device_type == "cuda" and _has_registry():
            torch.nn.attention.register_flash_attention_impl(NAME, register_fn=lambda: _override("cuda"))
            torch.nn.attention.activate_flash_attention_impl(NAME)
        else:
            _override(device_type)
        handle = handle_of(SEAM)
        assert handle is not None, "it was switched on above"
    elif handle.detail != device_type:
        raise RuntimeError(f"diyfa is under PyTorch's attention for {handle.detail}; remove that handle first")
    return handle
