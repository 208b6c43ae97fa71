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

# Module -> its public names.
_NAMES: dict[str, tuple[str, ...]] = {
    "arch": ("GPUArch", "NPUArch"),
    "attention": ("explain", "flash_attention", "flash_attention_v2", "flash_attention_varlen"),
    "device": (
        "GPUCapabilities", "NPUCapabilities", "check_hopper_features", "detect", "detect_gpu", "detect_npu",
        "print_gpu_info", "supports_fp8",
    ),
    "dropout": ("dropout_mask",),
    "eight_bits": ("Quantized",),
    "flash_attn_interface": (
        "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
        "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func",
    ),
    "kvcache": ("flash_attn_with_kvcache",),
    "lab.bench": ("BenchmarkResult", "BenchmarkRunner", "benchmark_fn"),
    "masks": ("BlockMask", "block_mask"),
    "matmul": ("triton_matmul",),
    "quantization": ("quantize",),
    "ready.warming": ("warmup",),
    "reference": ("reference_attention", "reference_kvcache"),
    "registry": ("batch_invariant", "kernels_for", "use_backend"),
    "score_functions": ("score_function",),
    "selection": ("select_blocks",),
    "selector": (
        "AdaptiveKernelSelector", "BackendSelector", "get_attention_config", "get_matmul_config",
        "get_optimal_attention", "get_optimal_matmul",
    ),
    "testing": ("validate_attention", "validate_matmul"),
}  # fmt: skip
_PUBLIC = {name: f"diyfa.{module}" for module, names in _NAMES.items() for name in names}
__all__ = ["__version__", *sorted(_PUBLIC)]

if TYPE_CHECKING:  # for editors, which look up docstrings here; types are those of __init__.pyi
    from diyfa.arch import GPUArch, NPUArch
    from diyfa.attention import explain, flash_attention, flash_attention_v2, flash_attention_varlen
    from diyfa.device import (
        GPUCapabilities,
        NPUCapabilities,
        check_hopper_features,
        detect,
        detect_gpu,
        detect_npu,
        print_gpu_info,
        supports_fp8,
    )
    from diyfa.dropout import dropout_mask
    from diyfa.eight_bits import Quantized
    from diyfa.flash_attn_interface import (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
    )
    from diyfa.kvcache import flash_attn_with_kvcache
    from diyfa.lab.bench import BenchmarkResult, BenchmarkRunner, benchmark_fn
    from diyfa.masks import BlockMask, block_mask
    from diyfa.matmul import triton_matmul
    from diyfa.quantization import quantize
    from diyfa.ready.warming import warmup
    from diyfa.reference import reference_attention, reference_kvcache
    from diyfa.registry import batch_invariant, kernels_for, use_backend
    from diyfa.score_functions import score_function
    from diyfa.selection import select_blocks
    from diyfa.selector import (
        AdaptiveKernelSelector,
        BackendSelector,
        get_attention_config,
        get_matmul_config,
        get_optimal_attention,
        get_optimal_matmul,
    )
    from diyfa.testing import validate_attention, validate_matmul


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
