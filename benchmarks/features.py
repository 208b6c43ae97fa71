"""Benchmark of optional features against plain causal attention, ragged sequences against a batch, and a window.

    python benchmarks/features.py [--head-dims 64 128] [--dtype bfloat16] [--variant v2]

Three tables, forward and backward: each feature at (4, 16, 4096, D), as a multiple of the plain time; 64 ragged
sequences of 128 to 1920 tokens in TFLOP/s, against a dense batch of 64 x 1024; a causal window of 1024 at S = 65536,
against the whole triangle. --variant chooses the forward kernel, by default that of a call without variant. Writes one
JSON file with device, date and versions to benchmarks/results/.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from diyfa import flash_attention, flash_attention_varlen
from diyfa.device import default_backend
from diyfa.lab.bench.record import default_path, device_name, write_json
from diyfa.lab.bench.timing import compute_quantiles, time_calls
from diyfa.lab.bench.work import BACKWARD_FACTOR, attention_flops, tflops
from diyfa.validation import dtype_name

RESULTS = Path(__file__).parent / "results"
BATCH, HEADS, SEQ_LEN = 4, 16, 4096
RAGGED, MEAN_LENGTH = 64, 1024
LONG, WINDOW = 65536, 1024


@dataclass(frozen=True)
class Setup:
    """The settings of all rows of a table."""

    head_dim: int
    device: torch.device
    dtype: torch.dtype
    variant: str
    rounds: int
    warmup: int
    rep: int

    def inputs(self, *shape: int) -> list[torch.Tensor]:
        """Return q, k and v, each of this shape with `head_dim` features."""
        return [
            torch.randn(*shape, self.head_dim, device=self.device, dtype=self.dtype, requires_grad=True)
            for _ in range(3)
        ]


def features(
    batch: int, heads: int, seq_len: int, device: torch.device, dtype: torch.dtype
) -> dict[str, dict[str, Any]]:
    """Return {name: keyword arguments of a causal `flash_attention` on (B, H, S, D)}."""

    def bias(*shape: int, grad: bool = False) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_(grad)

    lens = torch.full((batch,), seq_len, device=device, dtype=torch.int32)
    slopes = torch.rand(heads, device=device)
    sinks = torch.randn(heads, device=device, requires_grad=True)
    return {
        "plain": {},
        "seq_lens": {"seq_lens": lens},
        "window 1024": {"window": (1024, 0)},
        "softcap": {"softcap": 30.0},
        "alibi": {"alibi_slopes": slopes},
        "sinks": {"sinks": sinks},
        "dropout 0.1": {"dropout_p": 0.1},
        "bias (1, H, S, S)": {"attn_bias": bias(1, heads, seq_len, seq_len)},
        "bias (1, H, S, S), gradient": {"attn_bias": bias(1, heads, seq_len, seq_len, grad=True)},
        "bias (B, 1, 1, S)": {"attn_bias": bias(batch, 1, 1, seq_len)},
        "softcap + sinks + window 1024": {"softcap": 30.0, "sinks": sinks, "window": (1024, 0)},
    }


Attention = tuple[Callable[[], torch.Tensor], list[torch.Tensor]]  # a call, and the tensors whose gradients it gets


def time_in_turns(setup: Setup, cases: dict[str, Attention]) -> Iterator[tuple[str, str, float]]:
    """Yield (case, "forward" or "backward", median milliseconds). Cases alternate, to run at the same clocks."""

    def forward(attend: Callable[[], torch.Tensor]) -> None:
        with torch.no_grad():
            attend()

    def backward(out: torch.Tensor, leaves: list[torch.Tensor], dout: torch.Tensor) -> None:
        torch.autograd.grad(out, leaves, dout, retain_graph=True)

    calls: dict[tuple[str, str], Callable[[], None]] = {}
    for name, (attend, leaves) in cases.items():
        out = attend()
        calls[name, "forward"] = partial(forward, attend)
        calls[name, "backward"] = partial(backward, out, leaves, torch.randn_like(out))
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for _ in range(setup.rounds):
        for key, call in calls.items():
            times[key] += time_calls(call, setup.device, setup.warmup, setup.rep)
    for (name, direction), milliseconds in times.items():
        yield name, direction, compute_quantiles(milliseconds)[0]


def time_ratios(setup: Setup, leaves: list[torch.Tensor], cases: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield causal attention with each case's arguments, relative to the first case."""
    attention: dict[str, Attention] = {}
    for name, options in cases.items():
        wanted = [*leaves, *(x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad)]
        attention[name] = partial(flash_attention, *leaves, causal=True, variant=setup.variant, **options), wanted
    first: dict[str, float] = {}
    for name, direction, ms in time_in_turns(setup, attention):
        yield {"case": name, "pass": direction, "ms": ms, "ratio": ms / first.setdefault(direction, ms)}


def feature_rows(setup: Setup) -> Iterator[dict[str, Any]]:
    """Yield each feature, relative to the plain call."""
    size = (BATCH, HEADS, SEQ_LEN)
    return time_ratios(setup, setup.inputs(*size), features(*size, setup.device, setup.dtype))


def ragged_lengths() -> list[int]:
    """Return 64 lengths around 1024, evenly spread from 128 to 1920, in a fixed random order."""
    order = torch.randperm(RAGGED, generator=torch.Generator().manual_seed(0)).tolist()
    low, high = MEAN_LENGTH // 8, 2 * MEAN_LENGTH - MEAN_LENGTH // 8
    return [low + round(i * (high - low) / (RAGGED - 1)) for i in order]


def _attention_on(setup: Setup, batched: bool, lens: list[int], causal: bool) -> Attention:
    """Return attention on packed tensors or, if `batched`, on the same tensors as a batch of equal sequences."""
    packed = setup.inputs(sum(lens), HEADS)
    options: dict[str, Any] = {"causal": causal, "variant": setup.variant}
    if batched:
        leaves = [x.detach().unflatten(0, (len(lens), -1)).transpose(1, 2).requires_grad_() for x in packed]
        return partial(flash_attention, *leaves, **options), leaves
    offsets = torch.tensor([0, *lens], device=setup.device).cumsum(0, dtype=torch.int32)
    return partial(flash_attention_varlen, *packed, offsets, offsets, max(lens), max(lens), **options), packed


def varlen_rows(setup: Setup) -> Iterator[dict[str, Any]]:
    """Yield rows of ragged sequences packed, equal ones packed, and equal ones as a batch."""
    equal = [MEAN_LENGTH] * RAGGED
    cases = {
        "ragged, packed": (ragged_lengths(), False),
        "equal, packed": (equal, False),
        "equal, batch": (equal, True),
    }
    for causal in (False, True):
        attention = {name: _attention_on(setup, batched, lens, causal) for name, (lens, batched) in cases.items()}
        for name, direction, ms in time_in_turns(setup, attention):
            work = sum(attention_flops(1, HEADS, n, n, setup.head_dim, causal) for n in cases[name][0])
            rate = tflops(work * (BACKWARD_FACTOR if direction == "backward" else 1), ms)
            mask = "causal" if causal else "full"
            yield {"case": f"{name}, {mask}", "pass": direction, "ms": ms, "tflops": rate}


def window_rows(setup: Setup) -> Iterator[dict[str, Any]]:
    """Yield a window's rows, relative to the whole causal triangle of a long sequence."""
    cases: dict[str, dict[str, Any]] = {"causal": {}, f"window {WINDOW}": {"window": (WINDOW, 0)}}
    return time_ratios(setup, setup.inputs(1, HEADS, LONG), cases)


TABLES = {"features": feature_rows, "varlen": varlen_rows, "window": window_rows}


def print_rows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        figure = f"{row['tflops']:8.1f} TFLOP/s" if "tflops" in row else f"{row['ratio']:8.3f} x"
        print(f"{row['table']:9}{row['case']:32}{row['D']:>4} {row['pass']:9}{row['ms']:9.3f} ms {figure}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--tables", choices=TABLES, nargs="+", default=list(TABLES))
    parser.add_argument("--variant", default="auto", help="the forward kernel, as in flash_attention")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=5, help="calls before each round's measurement")
    parser.add_argument("--rep", type=int, default=10, help="calls of each round")
    parser.add_argument("--device", default=None, help="cuda or npu; default: what is here")
    parser.add_argument("--output", type=Path, default=None, help="JSON file; default: benchmarks/results/…")
    arguments = parser.parse_args()
    device = torch.device(arguments.device or default_backend())
    dtype = getattr(torch, arguments.dtype)
    rows: list[dict[str, Any]] = []
    for head_dim in arguments.head_dims:
        setup = Setup(head_dim, device, dtype, arguments.variant, arguments.rounds, arguments.warmup, arguments.rep)
        same = {"D": head_dim, "dtype": dtype_name(dtype), "variant": arguments.variant}
        for name in arguments.tables:
            for row in TABLES[name](setup):
                kind = "feature" if "ratio" in row else "packed"
                rows.append({"kind": kind, "implementation": "diyfa", "table": name, **row, **same})
    print(device_name(device))
    print_rows(rows)
    path = arguments.output or default_path("features", device, RESULTS)
    write_json(path, "features", device, rows)
    print(path)


if __name__ == "__main__":
    main()
