"""What optional features cost over plain causal attention, ragged packed sequences over a batch, a window over none.

    python benchmarks/features.py [--head-dims 64 128] [--dtype bfloat16]

Three tables, forward and backward: each feature at (4, 16, 4096, D), as a multiple of the plain time; 64 ragged
sequences of 128 to 1920 tokens in TFLOP/s beside a dense batch of 64 x 1024; a causal window of 1024 at S = 65536
beside the whole triangle. Writes one JSON file with device, date and versions to benchmarks/results/.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from diyfa import flash_attention, flash_attention_varlen
from diyfa.bench.record import default_path, device_name, write_json
from diyfa.bench.timing import quantiles_of, time_calls
from diyfa.bench.work import BACKWARD_FACTOR, attention_flops, tflops
from diyfa.device import default_backend
from diyfa.validation import dtype_name

RESULTS = Path(__file__).parent / "results"
BATCH, HEADS, SEQ_LEN = 4, 16, 4096
RAGGED, MEAN_LENGTH = 64, 1024
LONG, WINDOW = 65536, 1024


def features(size: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Name -> keyword arguments of a causal `flash_attention` on (B, H, S, D)."""
    batch, heads, seq_len, _ = size

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


def time_both(
    attend: Callable[[], torch.Tensor], leaves: list[torch.Tensor], device: torch.device, warmup: int, rep: int
) -> dict[str, float]:
    """Median milliseconds of the forward and of the backward pass."""
    out = attend()
    dout = torch.randn_like(out)

    def forward() -> None:
        with torch.no_grad():
            attend()

    def backward() -> None:
        torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return {
        name: quantiles_of(time_calls(fn, device, warmup, rep))[0]
        for name, fn in (("forward", forward), ("backward", backward))
    }


def feature_rows(head_dim: int, device: torch.device, dtype: torch.dtype, timing: tuple[int, int]) -> Iterator[dict]:
    """Each feature beside the plain call."""
    size = (BATCH, HEADS, SEQ_LEN, head_dim)
    q, k, v = (torch.randn(size, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    plain: dict[str, float] = {}
    for name, options in features(size, device, dtype).items():
        leaves = [q, k, v, *(x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad)]
        ms = time_both(lambda options=options: flash_attention(q, k, v, True, **options), leaves, device, *timing)
        plain = plain or ms
        for direction, value in ms.items():
            ratio = value / plain[direction]
            yield {"table": "features", "case": name, "D": head_dim, "pass": direction, "ms": value, "ratio": ratio}


def ragged_lengths() -> list[int]:
    """64 lengths around 1024, evenly spread from 128 to 1920, in a fixed random order."""
    order = torch.randperm(RAGGED, generator=torch.Generator().manual_seed(0)).tolist()
    low, high = MEAN_LENGTH // 8, 2 * MEAN_LENGTH - MEAN_LENGTH // 8
    return [low + round(i * (high - low) / (RAGGED - 1)) for i in order]


def _attention_on(
    batched: bool, lens: list[int], packed: list[torch.Tensor], causal: bool
) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """(attention, its leaves) of the packed tensors, or of the same as a batch of equal sequences."""
    if batched:
        leaves = [x.detach().unflatten(0, (len(lens), -1)).transpose(1, 2).requires_grad_() for x in packed]
        return lambda: flash_attention(*leaves, causal), leaves
    offsets = torch.tensor([0, *lens], device=packed[0].device).cumsum(0, dtype=torch.int32)
    longest = max(lens)
    return lambda: flash_attention_varlen(*packed, offsets, offsets, longest, longest, causal), packed


def varlen_rows(head_dim: int, device: torch.device, dtype: torch.dtype, timing: tuple[int, int]) -> Iterator[dict]:
    """Ragged sequences packed, equal ones packed, and equal ones as a batch."""
    lengths = {"ragged, packed": ragged_lengths(), "equal, packed": [MEAN_LENGTH] * RAGGED}
    for causal in (False, True):
        for name, lens in (*lengths.items(), ("equal, batch", lengths["equal, packed"])):
            total = sum(lens)
            q, k, v = (
                torch.randn(total, HEADS, head_dim, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
            )
            attend, leaves = _attention_on(name == "equal, batch", lens, [q, k, v], causal)
            work = sum(attention_flops(1, HEADS, n, n, head_dim, causal) for n in lens)
            for direction, ms in time_both(attend, leaves, device, *timing).items():
                rate = tflops(work * (BACKWARD_FACTOR if direction == "backward" else 1), ms)
                case = f"{name}, {'causal' if causal else 'full'}"
                yield {"table": "varlen", "case": case, "D": head_dim, "pass": direction, "ms": ms, "tflops": rate}


def window_rows(head_dim: int, device: torch.device, dtype: torch.dtype, timing: tuple[int, int]) -> Iterator[dict]:
    """A window against the whole causal triangle of a long sequence."""
    q, k, v = (torch.randn(1, HEADS, LONG, head_dim, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    whole: dict[str, float] = {}
    for name, window in (("causal", (-1, -1)), (f"window {WINDOW}", (WINDOW, 0))):
        ms = time_both(lambda w=window: flash_attention(q, k, v, True, window=w), [q, k, v], device, *timing)
        whole = whole or ms
        for direction, value in ms.items():
            ratio = value / whole[direction]
            yield {"table": "window", "case": name, "D": head_dim, "pass": direction, "ms": value, "ratio": ratio}


def print_rows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        figure = f"{row['tflops']:8.1f} TFLOP/s" if "tflops" in row else f"{row['ratio']:8.3f} x"
        print(f"{row['table']:9}{row['case']:32}{row['D']:>4} {row['pass']:9}{row['ms']:9.3f} ms {figure}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--rep", type=int, default=30)
    parser.add_argument("--device", default=None, help="cuda or npu; default: what is here")
    parser.add_argument("--output", type=Path, default=None, help="JSON file; default: benchmarks/results/…")
    arguments = parser.parse_args()
    device = torch.device(arguments.device or default_backend())
    dtype = getattr(torch, arguments.dtype)
    timing = (arguments.warmup, arguments.rep)
    rows: list[dict[str, Any]] = []
    for head_dim in arguments.head_dims:
        for table in (feature_rows, varlen_rows, window_rows):
            rows += [{**row, "dtype": dtype_name(dtype)} for row in table(head_dim, device, dtype, timing)]
    print(device_name(device))
    print_rows(rows)
    path = arguments.output or default_path("features", device, RESULTS)
    write_json(path, "features", device, rows)
    print(path)


if __name__ == "__main__":
    main()
