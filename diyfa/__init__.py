"""diyfa: exact, fast attention for PyTorch on NVIDIA GPUs and Ascend NPUs.

    import diyfa
    out = diyfa.flash_attention(q, k, v, causal=True)

Importing the package loads no kernel language and touches no device; every public name is resolved when first used, and
so are the operators `torch.ops.diyfa.…`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from diyfa import import_hooks

__version__ = "0.1.0"

# Public name -> module that defines it.
_PUBLIC: dict[str, str] = {
    "flash_attention": "diyfa.attention",
    "flash_attention_v2": "diyfa.attention",
    "flash_attention_varlen": "diyfa.attention",
    "explain": "diyfa.attention",
    "BlockMask": "diyfa.masks",
    "block_mask": "diyfa.masks",
    "score_function": "diyfa.score_functions",
    "dropout_mask": "diyfa.dropout",
    "flash_attn_func": "diyfa.flash_attn_interface",
    "flash_attn_kvpacked_func": "diyfa.flash_attn_interface",
    "flash_attn_qkvpacked_func": "diyfa.flash_attn_interface",
    "flash_attn_varlen_func": "diyfa.flash_attn_interface",
    "flash_attn_varlen_kvpacked_func": "diyfa.flash_attn_interface",
    "flash_attn_varlen_qkvpacked_func": "diyfa.flash_attn_interface",
    "flash_attn_with_kvcache": "diyfa.kvcache",
    "triton_matmul": "diyfa.matmul",
    "reference_attention": "diyfa.reference",
    "reference_kvcache": "diyfa.reference",
    "batch_invariant": "diyfa.registry",
    "kernels_for": "diyfa.registry",
    "use_backend": "diyfa.registry",
    "GPUArch": "diyfa.arch",
    "NPUArch": "diyfa.arch",
    "GPUCapabilities": "diyfa.device",
    "NPUCapabilities": "diyfa.device",
    "detect": "diyfa.device",
    "detect_gpu": "diyfa.device",
    "detect_npu": "diyfa.device",
    "print_gpu_info": "diyfa.device",
    "check_hopper_features": "diyfa.device",
    "supports_fp8": "diyfa.device",
    "AdaptiveKernelSelector": "diyfa.selector",
    "BackendSelector": "diyfa.selector",
    "get_attention_config": "diyfa.selector",
    "get_matmul_config": "diyfa.selector",
    "get_optimal_attention": "diyfa.selector",
    "get_optimal_matmul": "diyfa.selector",
    "BenchmarkResult": "diyfa.lab.bench",
    "BenchmarkRunner": "diyfa.lab.bench",
    "benchmark_fn": "diyfa.lab.bench",
    "quantize": "diyfa.quantization",
    "select_blocks": "diyfa.selection",
    "Quantized": "diyfa.eight_bits",
    "warmup": "diyfa.ready.warming",
    "validate_attention": "diyfa.testing",
    "validate_matmul": "diyfa.testing",
}
__all__ = ["__version__", *sorted(_PUBLIC)]

if TYPE_CHECKING:  # for editors, which look up docstrings here; types are those of __init__.pyi
    from diyfa.arch import GPUArch as GPUArch
    from diyfa.arch import NPUArch as NPUArch
    from diyfa.attention import explain as explain
    from diyfa.attention import flash_attention as flash_attention
    from diyfa.attention import flash_attention_v2 as flash_attention_v2
    from diyfa.attention import flash_attention_varlen as flash_attention_varlen
    from diyfa.device import GPUCapabilities as GPUCapabilities
    from diyfa.device import NPUCapabilities as NPUCapabilities
    from diyfa.device import check_hopper_features as check_hopper_features
    from diyfa.device import detect as detect
    from diyfa.device import detect_gpu as detect_gpu
    from diyfa.device import detect_npu as detect_npu
    from diyfa.device import print_gpu_info as print_gpu_info
    from diyfa.device import supports_fp8 as supports_fp8
    from diyfa.dropout import dropout_mask as dropout_mask
    from diyfa.eight_bits import Quantized as Quantized
    from diyfa.flash_attn_interface import flash_attn_func as flash_attn_func
    from diyfa.flash_attn_interface import flash_attn_kvpacked_func as flash_attn_kvpacked_func
    from diyfa.flash_attn_interface import flash_attn_qkvpacked_func as flash_attn_qkvpacked_func
    from diyfa.flash_attn_interface import flash_attn_varlen_func as flash_attn_varlen_func
    from diyfa.flash_attn_interface import flash_attn_varlen_kvpacked_func as flash_attn_varlen_kvpacked_func
    from diyfa.flash_attn_interface import flash_attn_varlen_qkvpacked_func as flash_attn_varlen_qkvpacked_func
    from diyfa.kvcache import flash_attn_with_kvcache as flash_attn_with_kvcache
    from diyfa.lab.bench import BenchmarkResult as BenchmarkResult
    from diyfa.lab.bench import BenchmarkRunner as BenchmarkRunner
    from diyfa.lab.bench import benchmark_fn as benchmark_fn
    from diyfa.masks import BlockMask as BlockMask
    from diyfa.masks import block_mask as block_mask
    from diyfa.matmul import triton_matmul as triton_matmul
    from diyfa.quantization import quantize as quantize
    from diyfa.ready.warming import warmup as warmup
    from diyfa.reference import reference_attention as reference_attention
    from diyfa.reference import reference_kvcache as reference_kvcache
    from diyfa.registry import batch_invariant as batch_invariant
    from diyfa.registry import kernels_for as kernels_for
    from diyfa.registry import use_backend as use_backend
    from diyfa.score_functions import score_function as score_function
    from diyfa.selection import select_blocks as select_blocks
    from diyfa.selector import AdaptiveKernelSelector as AdaptiveKernelSelector
    from diyfa.selector import BackendSelector as BackendSelector
    from diyfa.selector import get_attention_config as get_attention_config
    from diyfa.selector import get_matmul_config as get_matmul_config
    from diyfa.selector import get_optimal_attention as get_optimal_attention
    from diyfa.selector import get_optimal_matmul as get_optimal_matmul
    from diyfa.testing import validate_attention as validate_attention
    from diyfa.testing import validate_matmul as validate_matmul


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'diyfa' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


import_hooks.register()
