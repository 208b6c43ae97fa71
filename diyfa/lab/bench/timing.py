"""Time and memory of a call on any device, by device events, or on the CPU by the wall clock."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

MIB = 1024**2
# Bytes written between two timed calls, so that none starts with its inputs in the last-level cache. Larger than any
# such cache (H200: 50 MB, Ascend 910B: 192 MB).
FLUSH_BYTES = 256 * MIB
DEFAULT_QUANTILES = (0.5, 0.2, 0.8)


def device_module(device: torch.device) -> Any:
    """Return the module of an accelerator's events and memory statistics: `torch.cuda`, `torch.npu`, …"""
    return getattr(torch, device.type)


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on `device` has run."""
    if device.type != "cpu":
        device_module(device).synchronize(device)


def _time_on_host(fn: Callable[[], Any], rep: int) -> list[float]:
    times = []
    for _ in range(rep):
        start = time.perf_counter()
        fn()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _time_on_device(fn: Callable[[], Any], device: torch.device, rep: int) -> list[float]:
    module = device_module(device)
    with module.device(device):
        flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
        starts = [module.Event(enable_timing=True) for _ in range(rep)]
        ends = [module.Event(enable_timing=True) for _ in range(rep)]
        for start, end in zip(starts, ends, strict=True):
            flush.zero_()  # the host queues the call while the device writes: launch cost stays out of the figure
            start.record()
            fn()
            end.record()
        synchronize(device)
    return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]


def time_calls(fn: Callable[[], Any], device: torch.device, warmup: int = 25, rep: int = 100) -> list[float]:
    """Return the milliseconds of each of `rep` calls of `fn` on `device`, after `warmup` calls that do not count."""
    if rep < 1 or warmup < 0:
        raise ValueError(f"rep must be at least 1 and warmup at least 0, got rep={rep}, warmup={warmup}")
    for _ in range(warmup):
        fn()
    synchronize(device)
    if device.type == "cpu":
        return _time_on_host(fn, rep)
    return _time_on_device(fn, device, rep)


def compute_quantiles(times: Sequence[float], quantiles: Iterable[float] = DEFAULT_QUANTILES) -> tuple[float, ...]:
    """Return the given quantiles (0 to 1, linear interpolation) of `times`."""
    q = torch.tensor(list(quantiles), dtype=torch.float64, device="cpu")
    if q.numel() == 0 or bool(((q < 0) | (q > 1)).any()):
        raise ValueError(f"quantiles must be one or more numbers from 0 to 1, got {q.tolist()}")
    return tuple(torch.quantile(torch.tensor(list(times), dtype=torch.float64, device="cpu"), q).tolist())


def _first_device(arguments: Iterable[Any]) -> torch.device:
    for x in arguments:
        if isinstance(x, torch.Tensor):
            return x.device
    from diyfa.device import default_backend

    return torch.device(default_backend())


def benchmark_fn(
    fn: Callable[..., Any],
    *args: Any,
    warmup: int = 25,
    rep: int = 100,
    quantiles: list[float] | None = None,
    **kwargs: Any,
) -> tuple[float, ...]:
    """Time `fn(*args, **kwargs)` on the device of its first tensor argument, by default the machine's accelerator.

    Args:
        warmup: calls before the measurement. rep: calls measured.
        quantiles: the quantiles to return, 0 to 1; default median, 20 % and 80 %.

    Returns:
        Milliseconds, one figure for each quantile: by default (median_ms, p20_ms, p80_ms).
    """
    device = _first_device([*args, *kwargs.values()])
    times = time_calls(lambda: fn(*args, **kwargs), device, warmup, rep)
    return compute_quantiles(times, DEFAULT_QUANTILES if quantiles is None else quantiles)


def _peak_on_host(fn: Callable[[], Any]) -> float:
    """Return the peak of bytes that PyTorch's CPU allocator holds during `fn`, above those before (profiler)."""
    # The profiler reads this at its first start. Without it, each start and stop prints to standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = fn()
    del result
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    steps = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    live = peak = 0
    for _, size in steps:
        live += size
        peak = max(peak, live)
    return float(peak)


def peak_memory_mb(fn: Callable[[], Any], device: torch.device) -> float:
    """Return the peak memory in MiB that one call of `fn` allocates on `device`, above that allocated before."""
    if device.type == "cpu":
        return _peak_on_host(fn) / MIB
    module = device_module(device)
    synchronize(device)
    before = module.memory_allocated(device)
    module.reset_peak_memory_stats(device)
    result = fn()
    synchronize(device)
    del result
    return (module.max_memory_allocated(device) - before) / MIB
