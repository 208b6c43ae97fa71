"""Errors of float8 and int8 attention against float64 attention of the original inputs, beside bfloat16's.

    python benchmarks/eight_bits.py [--seqlen 2048] [--head-dim 128] [--heads 4] [--data normal]

It needs no accelerator. Quantisation is that of `diyfa.quantize`. Attention is the plain FlashAttention of
`diyfa.yardstick`, which rounds weights as the kernels do. Inputs are drawn in float32 and rounded to bfloat16. An error
is the root-mean-square of the difference divided by that of the exact output's deviation from its mean over the
queries, in percent: a mean that all rows share would hide the error of what differs.

    normal    q, k and v are N(0, 1)
    outliers  4 features of q and k have 10 times the magnitude of the others, 4 of v too
    sink      each query gives its first key a score about 8 above the others, and that key has a small value
    video     each feature of k has a mean of its own, from 4 · N(0, 1), and of v from N(0, 1) / 4
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

import diyfa
from diyfa.yardstick import plain_flash_attention

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
PER = ("tensor", "head", "block")


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensors:
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    return q, k, v


def outliers(shape: tuple[int, ...], generator: torch.Generator) -> Tensors:
    q, k, v = normal(shape, generator)
    features = torch.randperm(shape[-1], generator=generator)
    q[..., features[:4]] *= 10
    k[..., features[:4]] *= 10
    v[..., features[4:8]] *= 10
    return q, k, v


def sink(shape: tuple[int, ...], generator: torch.Generator) -> Tensors:
    q, k, v = normal(shape, generator)
    q[..., 0] = 2.0
    k[..., 0] = 0.0
    k[:, :, 0, 0] = 4.0 * shape[-1] ** 0.5
    v[:, :, 0] *= 0.1
    return q, k, v


def video(shape: tuple[int, ...], generator: torch.Generator) -> Tensors:
    q, k, v = normal(shape, generator)
    mean = torch.randn((2, *shape[:2], 1, shape[-1]), generator=generator)
    return q, k + 4 * mean[0], v + mean[1] / 4


DATA: dict[str, Callable[[tuple[int, ...], torch.Generator], Tensors]] = {
    "normal": normal,
    "outliers": outliers,
    "sink": sink,
    "video": video,
}
# Name of a row -> the arguments of `quantize`, and whether v is float8 beside int8.
SCHEMES: dict[str, tuple[dict[str, Any], bool]] = {
    **{f"float8{name}": ({"dtype": "float8", **how}, False) for name, how in (
        ("", {}), (", smoothed", {"smooth": True}), (", rotated", {"rotate": True}),
        (", smoothed and rotated", {"smooth": True, "rotate": True}),
    )},
    **{f"int8{name}": ({"dtype": "int8", **how}, False) for name, how in (
        ("", {}), (", smoothed", {"smooth": True}), (", rotated", {"rotate": True}),
        (", smoothed and rotated", {"smooth": True, "rotate": True}),
    )},
    "int8, v in float8, smoothed": ({"smooth": True}, True),
}  # fmt: skip


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the rms of the difference divided by that of the deviation of `exact` (B, H, S, D) from its mean."""
    deviation = exact - exact.mean(2, keepdim=True)
    return float((found.double() - exact).square().mean().sqrt() / deviation.square().mean().sqrt())


def quantised(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, per: str, scheme: str) -> tuple[Any, ...]:
    """Return q, k and v as a row of the table has them."""
    arguments, float8_values = SCHEMES[scheme]
    if not float8_values:
        return diyfa.quantize(q, k, v, per, **arguments)
    integers, floats = (diyfa.quantize(q, k, v, per, dtype, **arguments) for dtype in ("int8", "float8"))
    return *integers[:2], floats[2]


def measure(shape: tuple[int, ...], data: list[str], seed: int = 0) -> dict[str, dict[str, dict[str, float]]]:
    """Return {data: {scheme: {per: error}}}; bfloat16 has one error, under "tensor"."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name in data:
        q, k, v = (x.to(torch.bfloat16) for x in DATA[name](shape, torch.Generator().manual_seed(seed)))
        exact = diyfa.reference_attention(q, k, v, dtype=torch.float64)
        rows = results[name] = {"bfloat16": {"tensor": relative_error(plain_flash_attention(q, k, v), exact)}}
        for scheme in SCHEMES:
            rows[scheme] = {
                per: relative_error(plain_flash_attention(*quantised(q, k, v, per, scheme)), exact) for per in PER
            }
    return results


def table(rows: dict[str, dict[str, float]]) -> str:
    """Return the errors of one kind of data in percent, as a Markdown table."""
    lines = ["| precision | per tensor | per head | per block |", "|---|---|---|---|"]
    for scheme, errors in rows.items():
        cells = [f"{100 * errors[per]:.2f}" if per in errors else "" for per in PER]
        lines.append(f"| {' | '.join((scheme, *cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    arguments = parser.parse_args()
    results = measure((1, arguments.heads, arguments.seqlen, arguments.head_dim), arguments.data)
    for name, rows in results.items():
        print(f"\n{name}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
