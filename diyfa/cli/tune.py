"""`diyfa tune`: measure a device's tiles before they are needed, and show the chosen ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import typer
from rich.markup import escape
from rich.table import Table

from diyfa import flash_attention, flash_attn_with_kvcache, triton_matmul, use_backend
from diyfa.cli.devices import DTYPES, device_for
from diyfa.cli.output import out, print_json, progress_bar
from diyfa.cli.table import figure, table
from diyfa.problem import TunedTile, Tuning
from diyfa.registry import load_backend
from diyfa.validation import MAX_HEAD_DIM_V


@dataclass(frozen=True)
class Request:
    """The options of the command. Every combination of the lists is tuned."""

    seq_lens: list[int]
    head_dims: list[int]
    batch: int
    heads: int
    heads_kv: int | None
    masks: list[bool]  # causal or not
    dtype: str
    backward: bool
    sizes: list[int]  # M = N = K of matrix products
    page_sizes: list[int]  # keys of a page, for decoding steps; 0: without pages
    backend: str | None


def _calls(request: Request, device: torch.device) -> list[tuple[str, Callable[[], Any]]]:
    """Return (name, function) of each call. The function creates its tensors and frees them at its end."""
    dtype = DTYPES[request.dtype]
    heads_kv = request.heads_kv or request.heads

    def attend(seq_len: int, head_dim: int, causal: bool) -> None:
        q, k, v = (
            torch.randn(request.batch, heads, seq_len, d, device=device, dtype=dtype)
            for heads, d in ((request.heads, head_dim), (heads_kv, head_dim), (heads_kv, min(head_dim, MAX_HEAD_DIM_V)))
        )
        for x in (q, k, v):
            x.requires_grad_(request.backward)
        result = flash_attention(q, k, v, causal=causal)
        if request.backward:
            assert isinstance(result, torch.Tensor)
            torch.autograd.grad(result, (q, k, v), torch.randn_like(result))

    def decode(seq_len: int, head_dim: int, page_size: int) -> None:
        pages = -(-seq_len // page_size) if page_size else 1
        rows = (request.batch * pages, page_size) if page_size else (request.batch, seq_len)
        k, v = (
            torch.randn(*rows, heads_kv, d, device=device, dtype=dtype)
            for d in (head_dim, min(head_dim, MAX_HEAD_DIM_V))
        )
        table = torch.arange(request.batch * pages, device=device, dtype=torch.int32).view(request.batch, pages)
        flash_attn_with_kvcache(
            torch.randn(request.batch, 1, request.heads, head_dim, device=device, dtype=dtype), k, v,
            cache_seqlens=torch.full((request.batch,), seq_len, device=device, dtype=torch.int32),
            block_table=table if page_size else None, causal=True,
        )  # fmt: skip

    def multiply(size: int) -> None:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        triton_matmul(a, b)

    calls: list[tuple[str, Callable[[], Any]]] = []
    for seq_len, head_dim, causal in itertools.product(request.seq_lens, request.head_dims, request.masks):
        name = f"attention S={seq_len} D={head_dim} {'causal' if causal else 'full'}"
        calls.append((name, partial(attend, seq_len, head_dim, causal)))
    for seq_len, head_dim, page_size in itertools.product(request.seq_lens, request.head_dims, request.page_sizes):
        name = f"decoding S={seq_len} D={head_dim} {f'pages of {page_size}' if page_size else 'without pages'}"
        calls.append((name, partial(decode, seq_len, head_dim, page_size)))
    return calls + [(f"matmul {size}", partial(multiply, size)) for size in request.sizes]


def _tuning(request: Request) -> tuple[torch.device, str, Tuning]:
    """Return the device, the backend and its autotuner. Raises ValueError for a backend without one."""
    if request.dtype not in DTYPES:
        raise typer.BadParameter(f"must be one of {', '.join(DTYPES)}; got {request.dtype!r}", param_hint="--dtype")
    device, name = device_for(request.backend)
    tuning = getattr(load_backend(name), "tuning", None)
    if tuning is None:
        missing = "" if request.backend else "no GPU or NPU is usable here (`diyfa info` says why), and "
        raise ValueError(f"{missing}the {name} backend has no autotuner: its tiles come from its table")
    return device, name, tuning


def _table(title: str, tiles: list[TunedTile]) -> Table:
    rows = []
    for tile in tiles:
        config = ", ".join(f"{key}={value}" for key, value in tile.config.items() if value is not None)
        rows.append([tile.kernel, escape(tile.bucket), escape(config), figure(tile.milliseconds), tile.measured])
    return table(title, ["kernel", "problems", "tile", "ms", "measured"], rows)


def show(request: Request, json: bool) -> int:
    """Print the stored tiles of this device. Return the exit status 0."""
    _, name, tuning = _tuning(request)
    tiles = tuning.stored()
    if json:
        print_json({"backend": name, "tiles": [asdict(tile) for tile in tiles]})
    else:
        out.print(_table(f"{name}: {len(tiles)} tuned tiles", tiles))
    return 0


def clear(request: Request, json: bool) -> int:
    """Remove the stored tiles of this device. Return the exit status 0."""
    _, name, tuning = _tuning(request)
    count = tuning.clear()
    if json:
        print_json({"backend": name, "cleared": count})
    else:
        out.print(f"{count} tuned tiles of the {name} backend forgotten", highlight=False)
    return 0


def run(request: Request, json: bool) -> int:
    """Tune and print the new tiles. Return the exit status 0."""
    device, name, tuning = _tuning(request)
    if reason := tuning.unavailable():
        raise ValueError(f"nothing can be tuned: {reason}")
    before = tuning.stored()
    calls = _calls(request, device)
    backend = use_backend(name) if request.backend else nullcontext()
    with progress_bar(not json) as progress, backend, tuning.measuring():
        task = progress.add_task(f"tuning on {device.type}", total=len(calls), note="")
        for description, call in calls:
            progress.update(task, note=description)
            call()
            progress.update(task, advance=1)
    new = [tile for tile in tuning.stored() if tile not in before]
    if json:
        descriptions = [description for description, _ in calls]
        print_json({"backend": name, "calls": descriptions, "tiles": [asdict(tile) for tile in new]})
    else:
        remark = "" if new else ": every bucket of these problems is known, or has one tile"
        out.print(_table(f"{name}: {len(new)} newly tuned tiles{remark}", new))
    return 0
