"""Scheduler metadata, which flash-attn-npu's kernels need before a call and diyfa's kernels do not."""

from __future__ import annotations

from typing import Any

import torch


def no_metadata(cache_seqlens: torch.Tensor, **refused: Any) -> torch.Tensor:
    """Return metadata without elements, (0,) int32 on the device of `cache_seqlens`. Nothing waits for the device.

    Raises TypeError if `cache_seqlens` is no tensor, ValueError if an argument of `refused` is given."""
    if not isinstance(cache_seqlens, torch.Tensor):
        raise TypeError(f"cache_seqlens must be a tensor (B,) of int32, got {type(cache_seqlens).__name__}")
    for name, value in refused.items():
        if value is not None and value != 0:
            raise ValueError(f"{name} is not supported by diyfa, got {value!r}")
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def check_metadata(scheduler_metadata: torch.Tensor | None) -> None:
    """Raise ValueError unless the metadata is None or of `no_metadata`: other kernels' describe another division."""
    if scheduler_metadata is not None and scheduler_metadata.numel():
        raise ValueError(
            "scheduler_metadata must come from get_scheduler_metadata of this module, whose result has no elements: "
            f"diyfa divides work on the device. Got {tuple(scheduler_metadata.shape)} of other kernels; leave it out"
        )
