"""Errors of gradients if the backward pass computed in float8, beside those of a backward pass in bfloat16.

    python benchmarks/eight_bits_backward.py [--seqlen 1024] [--head-dim 128] [--heads 4] [--data normal]

It needs no accelerator. Each backward pass is emulated: its operands are rounded as a kernel would round them, and
sums are exact. So the errors of float8 are those of an ideal kernel. Inputs are those of `eight_bits.py`, quantised for
each block, and `peaked`: each query has one key with most of its weight. dO is N(0, 1), and each row has a
factor of its own, from exp(N(0, 1)). An error is the root-mean-square of the difference from the float64 gradient,
divided by that of the gradient, in percent.

    bfloat16            forward and backward in bfloat16
    straight through    forward quantised; backward in bfloat16 with the quantised numbers
        saved           with out and the log-sum-exp of the quantised forward
        recomputed      with out and the log-sum-exp of a forward in bfloat16 of the quantised numbers
    e4m3, e5m2          forward in float8; q, k, v, P, dO and dS of the backward in float8. P has a fixed scale, dO one
                        for 128 rows, dS one for 128 x 64. The dtype named is that of dO and dS; the others are e4m3.
                        out and the log-sum-exp of the forward are in float32
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
from eight_bits import DATA, Tensors

import diyfa
from diyfa.eight_bits import BLOCK_K, BLOCK_Q, FLOAT8_DTYPES, WEIGHT_SHIFT, dequantised, hadamard
from diyfa.yardstick import plain_flash_attention

Rounding = Callable[[torch.Tensor], torch.Tensor]
E4M3, E5M2 = FLOAT8_DTYPES
BF16 = torch.bfloat16


def peaked(shape: tuple[int, ...], generator: torch.Generator) -> Tensors:
    """Query i is nearly key i, so that this key has most of its weight."""
    k, v, noise = (torch.randn(shape, generator=generator) for _ in range(3))
    return k + 0.25 * noise, k, v


ALL_DATA = {**DATA, "peaked": peaked}


def rounded(x: torch.Tensor, dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
    """Return x rounded to `dtype`, with one scale for each block of rows and columns."""
    largest = torch.finfo(dtype).max
    blocks = x.unflatten(-2, (-1, rows)).unflatten(-1, (-1, columns))
    scale = (blocks.abs().amax((-3, -1), keepdim=True) / largest).clamp_min(2.0**-120)
    return ((blocks / scale).to(torch.float32).to(dtype).to(x.dtype) * scale).flatten(-2).flatten(-3, -2)


def to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.to(BF16).double()


def weights_in_e4m3(p: torch.Tensor) -> torch.Tensor:
    scale = 2.0 ** WEIGHT_SHIFT["float8_e4m3fn"]
    return (p * scale).float().to(E4M3).double() / scale


def gradients(
    qkv: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    results: tuple[torch.Tensor, ...],
    roundings: tuple[Rounding, Rounding, Rounding],
) -> tuple[torch.Tensor, ...]:
    """Return dq, dk and dv with `roundings` of P, dO and dS. `results`: out and the log-sum-exp."""
    q, k, v = (x.double() for x in qkv)
    out, lse = (x.double() for x in results)
    round_p, round_dout, round_ds = roundings
    scale, dout = q.shape[-1] ** -0.5, dout.double()
    p = torch.exp(q @ k.mT * scale - lse[..., None])
    dout = round_dout(dout)
    delta = (out * dout).sum(-1, keepdim=True)  # of the same dO as dP: where one key has most of the weight both cancel
    ds = round_ds(p * (dout @ v.mT - delta))
    return ds @ k * scale, ds.mT @ q * scale, round_p(p).mT @ dout


def exact_gradients(qkv: Tensors, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [x.double().requires_grad_() for x in qkv]
    return torch.autograd.grad(diyfa.reference_attention(*leaves, dtype=torch.float64), leaves, dout.double())


IN_BF16 = (to_bfloat16, lambda x: x, to_bfloat16)


def in_float8(
    qkv: tuple[torch.Tensor, ...], means: tuple[torch.Tensor, ...], dout: torch.Tensor, results: Any, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Return the gradients with all operands in float8, dO and dS in `dtype`.

    Means stay off k and v: rows of dS sum to 0, and the mean of v cancels between dP and delta. So out and the
    log-sum-exp are those without means.
    """
    (q, k, v), (k_mean, v_mean), (out, lse) = qkv, means, results
    lse = lse.double() - (q.double() @ k_mean.double()[..., None])[..., 0] * q.shape[-1] ** -0.5
    roundings = (
        weights_in_e4m3,
        lambda x: rounded(x, dtype, BLOCK_Q, x.shape[-1]),
        lambda x: rounded(x, dtype, BLOCK_Q, BLOCK_K),
    )
    return gradients((q, k, v), dout, (out.double() - v_mean.double()[:, :, None], lse), roundings)


RECIPES: dict[str, dict[str, bool]] = {"": {}, ", smoothed and rotated": {"smooth": True, "rotate": True}}


def measure(qkv: Tensors, dout: torch.Tensor) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return {name of a backward pass: dq, dk, dv}."""
    found = {"bfloat16": gradients(qkv, dout, plain_flash_attention(*qkv, return_lse=True), IN_BF16)}
    for dtype, (words, recipe) in itertools.product(("int8", "float8"), RECIPES.items()):
        parts = diyfa.quantize(*qkv, "block", dtype, **recipe)
        blocks = BLOCK_Q, BLOCK_K, 1
        numbers = [dequantised(x.values, x.descale, torch.float32, n) for x, n in zip(parts, blocks, strict=True)]
        none = torch.zeros_like(numbers[0][:, :, 0])
        means = tuple(none if x.mean is None else x.mean for x in parts[1:])
        whole = numbers[0], numbers[1] + means[0][:, :, None], numbers[2] + means[1][:, :, None]
        bf16 = tuple(x.to(BF16) for x in whole)
        saved = plain_flash_attention(*parts, return_lse=True, out_dtype=torch.float32)
        again = plain_flash_attention(*bf16, return_lse=True)
        rows = {
            "straight through, saved": gradients(bf16, dout, (saved[0].to(BF16), saved[1]), IN_BF16),
            "straight through, recomputed": gradients(bf16, dout, again, IN_BF16),
        }
        if dtype == "float8":
            for name, dtype_ds in (("e4m3", E4M3), ("e5m2", E5M2)):
                rows[name] = in_float8(tuple(numbers), means, dout, saved, dtype_ds)
        for name, (dq, dk, dv) in rows.items():
            if recipe.get("rotate"):
                dq, dk = hadamard(dq), hadamard(dk)
            found[f"{dtype}{words}: {name}"] = dq, dk, dv
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--data", nargs="+", choices=ALL_DATA, default=list(ALL_DATA))
    arguments = parser.parse_args()
    shape = 1, arguments.heads, arguments.seqlen, arguments.head_dim
    for name in arguments.data:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (x.to(BF16) for x in ALL_DATA[name](shape, generator))
        factors = torch.randn((*shape[:3], 1), generator=generator).exp()
        dout = (torch.randn(shape, generator=generator) * factors).to(BF16)
        exact = exact_gradients((q, k, v), dout)
        print(f"\n{name}\n\n| backward pass | dq | dk | dv |\n|---|---|---|---|")
        for row, found in measure((q, k, v), dout).items():
            errors = [
                float((x - y).square().mean().sqrt() / y.square().mean().sqrt())
                for x, y in zip(found, exact, strict=True)
            ]
            print(f"| {row} | {' | '.join(f'{100 * x:.2f}' for x in errors)} |")


if __name__ == "__main__":
    main()
