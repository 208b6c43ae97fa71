"""The tile counter of a launch, which a dynamic scheduler draws from: two int32 that are zero between launches.

Each (device, stream) has one. Launches on one stream follow each other, and each leaves zeros behind. So no launch has
to clear its counter or share it with one that runs at the same time. A launch that raises on the host has drawn
nothing. A launch that fails on the device takes the context with it.

A CUDA graph replays on any stream, beside any launch. So each captured launch gets a counter of its own from the
graph's memory, which the graph zeroes at each replay.

A separate thread allocates permanent counters. They must not come from a memory pool that the caller's thread or stream
uses at that time, such as the one that torch.compile's CUDA graphs rewind after their warm-up.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

_counters: dict[tuple[torch.device, int], torch.Tensor] = {}


def _is_capturing(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int32, device=x.device)


def launch_counter(x: torch.Tensor) -> torch.Tensor:
    """Return the counter (int32, [next tile, programs that left]) of a launch on the current stream of `x`'s device."""
    if _is_capturing(x):
        return _zeros(x)
    stream = torch.cuda.current_stream(x.device) if x.is_cuda else None
    key = (x.device, 0 if stream is None else stream.cuda_stream)
    counter = _counters.get(key)
    if counter is None:
        with ThreadPoolExecutor(1) as thread:
            counter = thread.submit(_zeros, x).result()
        if stream is not None:  # a fresh thread zeroes on the default stream
            stream.wait_stream(torch.cuda.default_stream(x.device))
        _counters[key] = counter
    return counter
