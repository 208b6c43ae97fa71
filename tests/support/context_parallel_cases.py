"""Context parallel attention of an `AttentionCase`: what the workers run, and cases for it."""

from __future__ import annotations

import math
import os
import random
import re
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from poison import poisoned_allocations
from scripts import load_script
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from diyfa.attention import checked_options, flash_attention, flash_attention_varlen
from diyfa.distributed import (
    attention,
    check,
    compiled,
    context_parallel_attention,
    shard_positions,
    shard_sequence,
    unshard_sequence,
)
from diyfa.integrations.pytorch import use_in_pytorch
from diyfa.ops import new_rng_state
from diyfa.reference import reference_attention
from diyfa.registry import batch_invariant, use_backend
from diyfa.testing import BUDGET_FACTOR, LSE_UNIT, AttentionCase, Results, make_inputs

METHODS = ("ring", "ulysses", "both")
Case = AttentionCase


class Division(NamedTuple):
    """How a case is divided between the ranks."""

    method: str
    load_balance: str = "zigzag"
    deterministic: bool = False
    ulysses_ranks: int = 2  # with "both"
    backend: str = "cpu"
    device: str = "cpu"


@lru_cache(maxsize=4)
def mesh(ulysses_ranks: int = 2, device: str = "cpu") -> DeviceMesh:
    """All ranks, so many in each team of Ulysses."""
    return init_device_mesh(device, (dist.get_world_size() // ulysses_ranks, ulysses_ranks))


def run_sharded(case: AttentionCase, division: Division) -> Results | None:
    """All results of a case, whole, on rank 0."""
    inputs = make_inputs(case, division.device)
    options = dict(inputs.options)
    where = "cpu" if dist.get_backend() == "gloo" else division.device
    group = mesh(division.ulysses_ranks, where) if division.method == "both" else None
    packed = case.lens_q is not None
    cu_seqlens = options.pop("cu_seqlens_q", None)
    for name in ("cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"):
        options.pop(name, None)
    dim = 0 if packed else 1 if case.layout == "bshd" else 2
    cut: dict[str, Any] = {"load_balance": division.load_balance, "cu_seqlens": cu_seqlens}

    def shard(x: torch.Tensor, dim: int = dim) -> torch.Tensor:
        return shard_sequence(x.detach(), group, dim, **cut)

    def view(x: torch.Tensor) -> torch.Tensor:
        """A shard is contiguous; some cases are not."""
        return x if case.view == "contiguous" else torch.nn.functional.pad(x, (0, 8), value=float("nan"))[..., :-8]

    q, k, v = (view(shard(x)).requires_grad_() for x in inputs[:3])
    learned = [options["sinks"]] if "sinks" in options else []
    with poisoned_allocations():
        out, lse = context_parallel_attention(
            q, k, v, group, method=division.method, deterministic=division.deterministic, return_lse=True,
            backend=division.backend, layout="bhsd" if packed else case.layout, **cut, **options,
        )  # fmt: skip
        gradients = torch.autograd.grad(
            (out, lse), (q, k, v, *learned), (shard(inputs.dout), shard(inputs.dlse, inputs.dlse.dim() - 1))
        )
    dsinks = gradients[3].clone() if learned else None
    if dsinks is not None:
        dist.all_reduce(dsinks)
    full = [unshard_sequence(x.detach(), group, dim, **cut).cpu() for x in (out, *gradients[:3])]
    lse = unshard_sequence(lse.detach(), group, lse.dim() - 1, **cut).cpu()
    if dist.get_rank():
        return None
    return Results(full[0], lse, *full[1:], None, None if dsinks is None else dsinks.cpu())


def run_dropout(method: str) -> list[bool]:
    """Out and gradients beside those of one device, over groups of one, two and four ranks."""
    *full, dout = _small(11)
    full[1:] = [x[:, :4] for x in full[1:]]
    common: dict[str, Any] = {"causal": True, "dropout_p": 0.4, "backend": "cpu"}
    state = torch.tensor([2**40 + 7, 5])

    def one_device(state: torch.Tensor) -> list[torch.Tensor]:
        return differentiated(partial(flash_attention, rng_state=state, **common), full, dout)

    def over(group: Any, **options: Any) -> list[torch.Tensor]:
        attend = partial(context_parallel_attention, group=group, method=method, **common, **options)
        return divided(attend, group, full, dout)

    def are_close(actual: Sequence[torch.Tensor], expected: list[torch.Tensor]) -> list[bool]:
        return [torch.allclose(a, b, atol=1e-5) for a, b in zip(actual, expected, strict=True)]

    if method == "both":
        groups: list[Any] = [mesh(), mesh(1), mesh(dist.get_world_size())]
    else:
        groups = [dist.new_subgroups(size)[0] for size in (1, 2, dist.get_world_size())]
    verdicts = [is_close for group in groups for is_close in are_close(over(group, rng_state=state), one_device(state))]
    torch.manual_seed(dist.get_rank())
    results = over(groups[-1])
    torch.manual_seed(0)
    return verdicts + are_close(results, one_device(new_rng_state(dout.device)))


# Lengths are multiples of eight ranks.
MATRIX = [
    Case("full", batch=2, heads=8, seqlen_q=72),
    Case("causal", batch=2, heads=8, seqlen_q=72, causal=True, dtype="bfloat16"),
    Case("causal_fp32", heads=8, seqlen_q=64, causal=True, dtype="float32", layout="bshd"),
    Case("causal_gqa", heads=8, heads_kv=2, seqlen_q=128, causal=True),
    Case("gqa_odd", heads=24, heads_kv=3, seqlen_q=64, causal=True, layout="bshd"),
    Case("mqa", heads=8, heads_kv=1, seqlen_q=64, dtype="bfloat16"),
    Case("dv", heads=8, seqlen_q=64, head_dim=48, head_dim_v=32, causal=True),
    Case("softcap", heads=8, heads_kv=4, seqlen_q=64, softcap=5.0, causal=True),
    Case("sinks", heads=8, seqlen_q=64, sinks=True, causal=True),
    Case("sinks_full_large", heads=8, seqlen_q=64, sinks=True, sink_offset=10, dtype="bfloat16"),
    Case("sinks_window", heads=8, seqlen_q=80, sinks=True, window=(25, 0), dtype="float32"),
    Case("window_left", heads=8, heads_kv=2, seqlen_q=128, window=(20, 0)),
    Case("window_both", heads=8, seqlen_q=96, window=(7, 30), layout="bshd", dtype="bfloat16"),
    Case("window_open", heads=8, seqlen_q=96, window=(-1, 5)),
    Case("window_one_key", heads=8, seqlen_q=64, window=(0, 0), sm_scale=1.5),
    Case("one_row_each", heads=8, seqlen_q=8, causal=True),
    Case("peaked", heads=8, seqlen_q=96, causal=True, sm_scale=1.5, dtype="bfloat16"),
    Case("rise", heads=8, seqlen_q=96, head_dim=64, rise=60.0, dtype="bfloat16"),
    Case("rise_back", heads=8, seqlen_q=96, head_dim=64, rise=-60.0, causal=True),
    Case("negative_scale", heads=8, seqlen_q=64, sm_scale=-0.5, causal=True, view="sliced"),
    Case("no_rows", heads=8, seqlen_q=0, causal=True, sinks=True),
    Case("no_batch", batch=0, heads=8, seqlen_q=16, causal=True),
    Case("everything", batch=2, heads=8, heads_kv=2, seqlen_q=96, head_dim=48, head_dim_v=32, window=(40, 3),
         softcap=5.0, sinks=True, layout="bshd", view="transposed"),
    Case("packed", heads=8, layout="thd", lens_q=(40, 56), causal=True),
    Case("packed_odd", heads=8, heads_kv=2, layout="thd", lens_q=(1, 50, 0, 3, 19, 7), causal=True, slack=8,
         dtype="bfloat16"),
    Case("packed_full", heads=8, layout="thd", lens_q=(33, 9, 22), dtype="float32"),
    Case("packed_window_sinks", heads=8, layout="thd", lens_q=(33, 1, 46), window=(9, 4), sinks=True),
    Case("packed_causal_sinks", heads=8, layout="thd", lens_q=(3, 17, 30), causal=True, sinks=True, slack=14),
    Case("packed_nothing", heads=8, layout="thd", lens_q=(0, 0), slack=16),
    Case("dropout", batch=2, heads=8, heads_kv=2, seqlen_q=96, dropout_p=0.3, layout="bshd"),
    Case("dropout_causal", batch=2, heads=8, seqlen_q=72, dropout_p=0.5, causal=True, dtype="bfloat16"),
    Case("dropout_everything", batch=2, heads=8, heads_kv=4, seqlen_q=96, head_dim=48, head_dim_v=32, window=(40, 3),
         softcap=5.0, sinks=True, dropout_p=0.2, dtype="float32"),
    Case("dropout_packed", heads=8, heads_kv=2, layout="thd", lens_q=(1, 50, 0, 3, 19, 7), causal=True, slack=8,
         dropout_p=0.4, dtype="bfloat16"),
    Case("dropout_packed_window", heads=8, layout="thd", lens_q=(33, 1, 46), window=(9, 4), sinks=True, dropout_p=0.2),
    Case("dropout_nothing", heads=8, layout="thd", lens_q=(0, 0), slack=16, dropout_p=0.2),
]  # fmt: skip
ON_KERNELS = [  # small: Triton's interpreter is slow
    Case("triton", heads=2, heads_kv=1, seqlen_q=32, head_dim=16, window=(11, 0), sinks=True, layout="bshd"),
    Case("triton_packed", heads=2, layout="thd", lens_q=(5, 19), head_dim=16, causal=True, dtype="bfloat16"),
    Case("triton_dropout", heads=1, seqlen_q=16, head_dim=16, window=(5, 0), dropout_p=0.4),
]
WITH_ALIBI = [  # by Ulysses alone
    Case("alibi", batch=2, heads=8, heads_kv=2, seqlen_q=64, alibi="h", causal=True),
    Case("alibi_batch", batch=2, heads=8, seqlen_q=64, alibi="bh", window=(9, 9), layout="bshd"),
    Case("alibi_packed", heads=8, layout="thd", lens_q=(9, 0, 47), alibi="bh", slack=8),
]


def random_case(seed: int, ranks: int) -> tuple[AttentionCase, Division]:
    """A case and how it is divided, any that there can be."""
    rng = random.Random(seed)
    heads_kv, group = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 4])
    method = rng.choice(METHODS)
    heads = heads_kv * group
    if method != "ring":  # a multiple of those that share them
        size = ranks if method == "ulysses" else 2
        heads = heads * size // 2 if heads * size // 2 % size == 0 else heads * size
    head_dim = rng.choice([8, 16, 24, 32])
    common: dict[str, Any] = {
        "name": f"drawn_{seed}", "heads": heads, "heads_kv": heads_kv if heads % heads_kv == 0 else heads,
        "head_dim": head_dim, "head_dim_v": rng.choice([head_dim, 16, 40]),
        "dtype": rng.choice(["float16", "bfloat16", "float32"]), "causal": rng.random() < 0.5,
        "sm_scale": rng.choice([None, None, 0.3, 1.0, -0.2]),
        "window": rng.choice([(-1, -1), (-1, -1), (rng.randint(-1, 60), rng.randint(-1, 60))]),
        "softcap": rng.choice([0.0, 0.0, 3.0]), "sinks": rng.random() < 0.3, "dropout_p": rng.choice([0.0, 0.0, 0.3]),
        "view": rng.choice(["contiguous", "transposed", "sliced"]), "seed": seed,
    }  # fmt: skip
    rows = ranks * rng.randint(1, 24)
    if rng.random() < 0.4:
        lens = []
        while sum(lens) < rows and len(lens) < 6:
            lens.append(min(rows - sum(lens), rng.choice([0, 1, rng.randint(0, rows)])))
        case = Case(layout="thd", lens_q=tuple(lens), slack=rows - sum(lens), **common)
    else:
        case = Case(batch=rng.choice([1, 1, 2]), layout=rng.choice(["bhsd", "bshd"]), seqlen_q=rows, **common)
    return case, Division(method, rng.choice(["zigzag", "zigzag", "none"]), rng.random() < 0.2)


def _small(seed: int, rows: int = 64, heads: int = 8) -> list[torch.Tensor]:
    """Whole q, k, v (B, H, S, D) and a gradient of the output, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, heads, rows, 16, generator=generator).requires_grad_() for _ in range(4)]


def differentiated(
    attend: Any, qkv: Sequence[torch.Tensor], *gradients: torch.Tensor, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """The outputs of a call, one for each gradient, and its gradients of q, k and v, in `dtype`."""
    leaves = [x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in qkv]
    outputs = attend(*leaves)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    found = torch.autograd.grad(outputs, leaves, [x.detach().to(dtype or x.dtype) for x in gradients])
    return [x.detach() for x in (*outputs, *found)]


def divided(
    attend: Any, group: Any, qkv: Sequence[torch.Tensor], *gradients: torch.Tensor, dim: int = 2, **cut: Any
) -> list[torch.Tensor]:
    """The same of every rank's shards, whole."""
    shards = ([shard_sequence(x.detach(), group, dim, **cut) for x in given] for given in (qkv, gradients))
    shard_qkv, shard_gradients = shards
    return [unshard_sequence(x, group, dim, **cut) for x in differentiated(attend, shard_qkv, *shard_gradients)]


def call_with(*changes: dict[str, Any]) -> str:
    """What a call with this rank's changes raises."""
    options = {"backend": "cpu"} | changes[dist.get_rank()]
    refused = RuntimeError("not here") if options.pop("refused", False) else None
    rows = options.pop("rows", 16)
    q = torch.randn(1, 4, rows, 8, dtype=options.pop("dtype", torch.float32), requires_grad=options.pop("grad", False))
    k = options.pop("k", torch.randn(1, 4, options.pop("keys", rows), 8, dtype=q.dtype))
    cast = torch.autocast("cpu", torch.bfloat16, enabled=options.pop("autocast", False))
    mode = batch_invariant() if options.pop("batch_invariant", False) else nullcontext()
    attend: Any = context_parallel_attention
    if options.pop("compiled", False):
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    try:
        with cast, mode, mock.patch.object(attention, "checked_options", side_effect=refused, wraps=checked_options):
            attend(q, k, k, options.pop("group", None), **options)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_after_refusal() -> bool:
    """A call whose kernels refuse it, in the middle of a ring, and then one like it that runs."""
    q, k, v = (shard_sequence(x.detach(), None, 2) for x in _small(2)[:3])
    expected = context_parallel_attention(q, k, v, method="ring", backend="cpu")
    for _ in range(2):
        try:
            context_parallel_attention(v, q, k, method="ring", backend="cpu", variant="none such")
        except ValueError:
            continue
        return False
    return torch.equal(context_parallel_attention(q, k, v, method="ring", backend="cpu"), expected)


def refuse_after_agreement() -> tuple[str, bool]:
    """What one rank raises that refuses a call which all made before, and whether it waited for others."""
    q = torch.randn(1, 4, 8, 16)
    context_parallel_attention(q, q, q, backend="cpu", method="ring")
    if dist.get_rank() == 0:
        with mock.patch.object(check, "gather_shards") as gather:
            try:
                context_parallel_attention(
                    q.expand(2, 4, 8, 16)[:1].mT.contiguous().mT, q, q, backend="cpu", method="ring"
                )
            except ValueError as error:
                return str(error), gather.called
    return "", False


def run_in_unequally_used_groups(limit: int) -> None:
    """Rank 0 fills the memory of agreed calls in a group of its own; the next call of all must not notice."""
    check._LIMIT, usual = limit, check._LIMIT
    (single, *_) = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    q = torch.randn(1, 4, 24, 8)
    context_parallel_attention(q, q, q, backend="cpu", method="ring")
    for rows in range(1, limit + 1) if dist.get_rank() == 0 else ():
        x = torch.randn(1, 4, 2 * rows, 8)
        context_parallel_attention(x, x, x, single, backend="cpu", method="ring")
    context_parallel_attention(q, q, q, backend="cpu", method="ring")
    check._LIMIT = usual


def run_with_gaps(method: str) -> list[bool]:
    """Packed sequences with rows of none before, and after, beside the same on one device; a loss of lse alone."""
    cu_seqlens = torch.tensor([5, 9, 9, 26], dtype=torch.int32)
    cut: dict[str, Any] = {"cu_seqlens": cu_seqlens}
    group = mesh() if method == "both" else None
    full = [x.detach()[0, :, :32].transpose(0, 1).clone().requires_grad_() for x in _small(3)[:3]]
    sinks = torch.linspace(-1, 1, 8).requires_grad_()
    common: dict[str, Any] = {"causal": True, "return_lse": True, "backend": "cpu"}
    inside = slice(5, 26)
    expected, lse = flash_attention_varlen(*full, cu_seqlens, cu_seqlens, 32, 32, sinks=sinks, **common)
    lse_gradients = torch.autograd.grad(lse[:, inside].sum(), (*full[:2], sinks))
    shards = [shard_sequence(x.detach(), group, **cut).requires_grad_() for x in full]
    out, shard_lse = context_parallel_attention(*shards, group, sinks=sinks, method=method, **cut, **common)
    loss = torch.where(shard_lse.isinf(), 0.0, shard_lse).sum()
    *results, dsinks = torch.autograd.grad(loss, (*shards[:2], sinks))
    dist.all_reduce(dsinks)
    results = [unshard_sequence(x.detach(), group, **cut) for x in (out, *results)]
    results.append(unshard_sequence(shard_lse.detach(), group, 1, **cut))
    pairs = zip((*results, dsinks), (expected, *lse_gradients[:2], lse, lse_gradients[2]), strict=True)
    return [torch.allclose(a, b, atol=1e-5) for a, b in pairs]


def run_in_modes() -> list[bool]:
    """Autocast computes as bfloat16 inputs do; in the batch-invariant mode "auto" is bitwise a call on one device."""
    full = [x.detach() for x in _small(4)[:3]]
    shards = [shard_sequence(x, None, 2) for x in full]
    common: dict[str, Any] = {"causal": True, "backend": "cpu"}
    with torch.autocast("cpu", torch.bfloat16):
        cast = context_parallel_attention(*shards, method="ring", **common)
    rounded = context_parallel_attention(*(x.bfloat16() for x in shards), method="ring", **common)
    with batch_invariant():
        out = context_parallel_attention(*shards, **common)
        expected = shard_sequence(flash_attention(*full, **common), None, 2)
    return [cast.dtype == torch.bfloat16 and torch.equal(cast, rounded), torch.equal(out, expected)]


def _beside_allowed(
    found: list[torch.Tensor], single_device: list[torch.Tensor], exact: list[torch.Tensor], units: Sequence[float]
) -> list[tuple[float, float]]:
    """The largest error of each result, and the one that the error of a single device allows."""
    budgets = []
    for a, b, x, unit in zip(found, single_device, exact, units, strict=True):
        error, single_error = (float((y.double() - x.double()).abs().max()) for y in (a, b))
        budgets.append((error, BUDGET_FACTOR * single_error + unit * float(x.abs().max())))
    return budgets


def run_with_common_key(score: float, method: str, sinks: bool) -> list[tuple[float, float]]:
    """float32 keys that all have a part in common, which gives every pair about this score: the errors of out, lse, dq,
    dk and dv, each beside what the error of one device allows."""
    q, k, v, dout = (x.detach() for x in _small(12, rows=128))
    k, v = k[:, :2], v[:, :2]  # grouped queries
    for x in (q, k):
        x[..., 0] += score**0.5 * 2  # the scale is a quarter
    gradients = dout, dout[..., 0].contiguous()
    options: dict[str, Any] = {"causal": True, "return_lse": True}
    if sinks:
        options["sinks"] = torch.full((8,), score)
    group = mesh() if method == "both" else None
    exact = differentiated(partial(reference_attention, **options), (q, k, v), *gradients, dtype=torch.float64)
    single_device = differentiated(partial(flash_attention, backend="cpu", **options), (q, k, v), *gradients)
    how = "ring" if method == "compiled" else method
    attend: Any = partial(context_parallel_attention, group=group, method=how, backend="cpu", **options)
    if method == "compiled":
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    unsharded = divided(attend, group, (q, k, v), *gradients)
    return _beside_allowed(unsharded, single_device, exact, (2.0**-24, LSE_UNIT, *[2.0**-24] * 3))


def run_in_float64() -> float:
    """The largest difference, of out and the gradients, from one device."""
    *full, dout = (x.double() for x in _small(10))
    expected = differentiated(partial(flash_attention, causal=True, backend="cpu"), full, dout)
    attend = partial(context_parallel_attention, method="ring", causal=True, backend="cpu")
    return max(float((x - y).abs().max()) for x, y in zip(divided(attend, None, full, dout), expected, strict=True))


def run_choices() -> list[bool]:
    """What decides whether a rank's choice is that of all: where they differ, and where a method is ruled out."""
    q, k, v = (shard_sequence(x.detach(), None, 2) for x in _small(6)[:3])
    common: dict[str, Any] = {"causal": True, "backend": "cpu"}
    slopes = torch.linspace(0.1, 1, 8)
    verdicts = []
    for method, options in (("ring" if dist.get_rank() else "ulysses", {}), ("ring", {"alibi_slopes": slopes})):
        expected = context_parallel_attention(q, k, v, method="ulysses", **common, **options)
        with mock.patch.object(attention.cost, "cheapest", return_value=method):
            verdicts += [torch.equal(context_parallel_attention(q, k, v, **common, **options), expected) for _ in "12"]
    with batch_invariant(), mock.patch.object(attention.cost, "cheapest", return_value="ring"):
        expected = context_parallel_attention(q, k, v, method="ulysses", **common)
        verdicts.append(torch.equal(context_parallel_attention(q, k, v, **common), expected))
    with mock.patch.object(attention, "plan_of", wraps=attention.plan_of) as plan_of:
        context_parallel_attention(q, k, v, deterministic=True, window=(3, 5), softcap=2.0, backend="cpu")
    options = plan_of.call_args.args[0].options
    seen = options.deterministic, options.window_left, options.window_right, options.softcap
    return [*verdicts, seen == (True, 3, 5, 2.0)]


def run_with_large_keys(kind: str) -> list[tuple[float, float]]:
    """float32 keys that some rows do not see and that are far larger than theirs: errors of these rows' out, dq, dk and
    dv, each beside what the error of one device allows."""
    q, k, v, dout = (x.detach().clone() for x in _small(22))
    k, v = k[:, :2].clone(), v[:, :2].clone()
    options: dict[str, Any] = {"causal": True}
    rows = slice(0, 63)
    if kind == "last":  # causal, and no gradient of the row that sees it
        k[:, :, -1] = 1e8
    elif kind == "half":
        k[:, :, 32:] += 1e5
        options, rows = {"window": (0, 0)}, slice(0, 32)
    dout[:, :, rows.stop :] = 0
    cut: dict[str, Any] = {}
    dim = 2
    if kind.startswith("packed"):
        k[0, :, 40:] += -1e6 if "negative" in kind else 1e6
        rows, cut = slice(0, 40), {"cu_seqlens": torch.tensor([0, 40, 64], dtype=torch.int32)}
        q, k, v, dout = (x[0].transpose(0, 1).contiguous() for x in (q, k, v, dout))
        dim = 0

    def one_device(*qkv: torch.Tensor) -> torch.Tensor:
        if cut:
            ends = cut["cu_seqlens"]
            return flash_attention_varlen(*qkv, ends, ends, 64, 64, backend="cpu", **options)
        if qkv[0].dtype == torch.float64:
            return reference_attention(*qkv, **options)
        return flash_attention(*qkv, backend="cpu", **options)

    exact = differentiated(one_device, (q, k, v), dout, dtype=torch.float64)
    single_device = differentiated(one_device, (q, k, v), dout)
    attend = partial(context_parallel_attention, method="ring", backend="cpu", **options, **cut)
    unsharded = divided(attend, None, (q, k, v), dout, dim=dim, **cut)
    results = ([x.narrow(dim, 0, rows.stop) for x in each] for each in (unsharded, single_device, exact))
    return _beside_allowed(*results, [2.0**-24] * 4)


def run_repeated_heads(mode: str) -> list[bool]:
    """One key/value head for more ranks, in float16: each rank's share of dV is beyond its range, their sum is not."""
    heads = 8
    q, k, v = (torch.zeros(1, n, 64, 16, dtype=torch.float16) for n in (heads, 1, 1))
    dout = torch.full((1, heads, 64, 16), 10000.0, dtype=torch.float16)
    dout[:, heads // 2 :] = -9000.0
    k += torch.linspace(-1, 1, 64, dtype=torch.float16)[:, None]
    group, method = (mesh(4), "both") if mode == "both" else (None, "ulysses")
    expected = differentiated(partial(flash_attention, causal=True, backend="cpu"), (q, k, v), dout)[1:]
    attend: Any = partial(context_parallel_attention, group=group, causal=True, method=method, backend="cpu")
    if mode == "compiled":
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    pairs = zip(divided(attend, group, (q, k, v), dout)[1:], expected, strict=True)
    return [torch.allclose(a, b, rtol=2e-3, atol=1e-3) for a, b in pairs]


def run_without_common_key(softcap: float, infinite: bool) -> list[float]:
    """float32 keys with a part in common that may not, or cannot, be taken off: errors of out and lse, and whether
    the same of them is finite."""
    q, k, v = (x.detach().clone() for x in _small(21)[:3])
    k += 1.0
    if infinite:
        k[:, :, -1, 3] = math.inf  # of the last query only, with causal
    options: dict[str, Any] = {"causal": True, "return_lse": True, "softcap": softcap, "backend": "cpu"}
    expected = flash_attention(q, k, v, **options)
    shards = [shard_sequence(x, None, 2) for x in (q, k, v)]
    shard_results = context_parallel_attention(*shards, method="ring", **options)
    errors = []
    for shard_result, exact in zip(shard_results, expected, strict=True):
        unsharded = unshard_sequence(shard_result, None, 2)
        seen = exact.isfinite()
        alike = torch.equal(unsharded.isfinite(), seen)
        errors.append(float((unsharded - exact)[seen].abs().max()) if alike else math.inf)
    return errors


def run_cancelling() -> list[tuple[float, float]]:
    """Weights alike, and values and gradients of ranks that cancel: the largest errors of out and of dv, each with half
    a unit of its last place.

    A kernel sums such numbers in float32, so that nothing but the result is rounded.
    """
    n = dist.get_world_size()
    signs = (1 - 2 * ((torch.arange(64) * n // 64) % 2))[:, None]
    k, v, dout, _ = (x.detach()[:1] for x in _small(5))
    v, dout = ((x + 30.0 * signs).bfloat16() for x in (v, dout))
    cut: dict[str, Any] = {"load_balance": "none"}
    shards = [shard_sequence(x, None, 2, **cut) for x in (torch.zeros_like(v), k.bfloat16(), v)]
    out = context_parallel_attention(*shards[:2], shards[2].requires_grad_(), method="ring", backend="cpu", **cut)
    (dv,) = torch.autograd.grad(out, shards[2], shard_sequence(dout, None, 2, **cut))
    errors = []
    for x, source in ((out, v), (dv, dout)):
        exact = source.double().mean(2, keepdim=True)
        error = (unshard_sequence(x.detach(), None, 2, **cut).double() - exact).abs().max()
        errors.append((float(error), float(exact.abs().max()) * 2.0**-8))
    return errors


def run_under_pytorch() -> tuple[dict[str, int], list[bool]]:
    """What diyfa was called for in PyTorch's own ring, and whether out and gradients are those on one device.

    On a GPU `scaled_dot_product_attention` comes to this operator by itself.
    """
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    group = init_device_mesh("cpu", (dist.get_world_size(),))
    full = [x.requires_grad_() for x in _small(7)[:3]]
    dout = _small(7)[3].detach()
    buffers = [x.detach().clone() for x in (*full, dout)]
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    with use_backend("cpu"), context_parallel(group, buffers=buffers, buffer_seq_dims=[2] * 4):
        handle = use_in_pytorch("cpu")
        try:
            shards = [DTensor.from_local(x.clone().requires_grad_(), group, [Shard(2)]) for x in buffers]
            out = flash(*shards[:3], 0.0, True)[0]
            results = [out, *torch.autograd.grad(out, shards[:3], shards[3].detach())]
            calls = dict(handle.calls)
        finally:
            handle.remove()
        actual = context_parallel_unshard(group, [x.to_local().detach() for x in results], [2] * 4)
    expected = flash_attention(*full, causal=True, backend="cpu")
    pairs = zip(actual, (expected, *torch.autograd.grad(expected, full, dout)), strict=True)
    return calls, [torch.allclose(a, b, atol=1e-5) for a, b in pairs]


def run_twice(division: Division) -> bool:
    """Whether gradients are bitwise equal from run to run."""
    case = Case("deterministic", heads=8, heads_kv=2, seqlen_q=96, causal=True, dtype="bfloat16", sinks=True)
    first, second = run_sharded(case, division), run_sharded(case, division)
    return not first or not second or all(a is None or torch.equal(a, b) for a, b in zip(first, second, strict=True))


def run_dtensors(method: str) -> list[bool]:
    """DTensors beside plain tensors: out, log-sum-exp and gradients."""
    from torch.distributed.tensor import DTensor, Shard

    group = mesh() if method == "both" else init_device_mesh("cpu", (dist.get_world_size(),))
    *qkv, dout = (shard_sequence(x.detach(), group, 2).requires_grad_() for x in _small(0))
    out, lse = context_parallel_attention(*qkv, group, causal=True, method=method, return_lse=True, backend="cpu")
    grads = torch.autograd.grad((out, lse.sum()), qkv, (dout, torch.tensor(1.0)))
    placements = [Shard(2)] * group.ndim
    sharded = [DTensor.from_local(x, group, placements) for x in qkv]
    out2, lse2 = context_parallel_attention(*sharded, causal=True, method=method, return_lse=True, backend="cpu")
    grads2 = torch.autograd.grad((out2.to_local(), lse2.to_local().sum()), sharded, (dout, torch.tensor(1.0)))
    assert list(out2.placements) == list(lse2.placements) == placements
    pairs = [(out, out2), (lse, lse2), *zip(grads, grads2, strict=True)]
    return [torch.equal(a, b.to_local()) for a, b in pairs]


def run_misplaced_dtensors() -> list[str]:
    """What DTensors raise that cannot be followed."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    grid = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("cp", "tp"))
    x = torch.randn(1, 4, 8, 8)
    good = DTensor.from_local(x, grid, [Shard(2), Replicate()])
    by_heads, nowhere, by_features, sums = (
        DTensor.from_local(x, grid, placements)
        for placements in ([Shard(2), Shard(1)], [Shard(1), Replicate()], [Shard(2), Shard(3)], [Shard(2), Partial()])
    )
    eight_heads, three_heads = (distribute_tensor(torch.randn(1, n, 16, 8), grid, [Shard(2), Shard(1)]) for n in (8, 3))
    refusals = []
    for q, k, group in (
        (good, by_heads, None), (nowhere, nowhere, None), (by_features, by_features, None), (sums, sums, None),
        (good, x, None), (good, good, grid["tp"]), (x, x, init_device_mesh("cpu", (1, 2, 2))),
        (eight_heads, three_heads, None), (three_heads, three_heads, None),
    ):  # fmt: skip
        try:
            context_parallel_attention(q, k, k, group, backend="cpu")
        except (ValueError, TypeError) as error:
            refusals.append(f"{type(error).__name__}: {error}")
    return refusals


def _beside_one_device(inputs: dict[str, torch.Tensor], placements: dict[str, Any], **options: Any) -> list[str]:
    """What of out, lse and gradients of DTensors is not as on one device (`dtensor_cases.py`)."""
    from dtensor_cases import compare_with_full

    options |= {"causal": True, "return_lse": True, "backend": "cpu"}
    attend = partial(context_parallel_attention, load_balance="none", **options)  # as DTensors are cut
    return compare_with_full(partial(flash_attention, **options), inputs, placements, 2, attend, ("sinks",))


def run_uneven_dtensors() -> list[str]:
    """A batch that the mesh does not divide: results have the whole shape on every rank, and gradients pass through."""
    from torch.distributed.tensor import Shard

    scale = torch.tensor([1.0, 0.5, -1.0])[:, None, None, None]
    inputs = {name: x.detach()[:1] * scale for name, x in zip("qkv", _small(2), strict=False)}
    return _beside_one_device(inputs, {name: [Shard(2), Shard(0)] for name in inputs})


def run_dtensors_with_heads(shards_heads: bool, dropout_p: float = 0.0) -> list[str]:
    """On a mesh of two dimensions: the first shards the sequence, the second shards the heads or replicates them."""
    from torch.distributed.tensor import Replicate, Shard

    inputs = {name: x.detach() for name, x in zip("qkv", _small(1), strict=False)} | {"sinks": torch.linspace(-1, 1, 8)}
    placements: dict[str, Any] = {name: [Shard(2), Shard(1) if shards_heads else Replicate()] for name in "qkv"}
    placements["sinks"] = [Replicate(), Shard(0) if shards_heads else Replicate()]
    return _beside_one_device(inputs, placements, dropout_p=dropout_p)


class _Block(torch.nn.Module):
    """A projection, context parallel attention with most of its options, and another projection."""

    def __init__(self, method: str, dropout_p: float) -> None:
        super().__init__()
        self.method, self.dropout_p = method, dropout_p
        self.group = {"both": mesh(), "ulysses": dist.group.WORLD}.get(method)
        self.qkv, self.out = torch.nn.Linear(32, 64), torch.nn.Linear(32, 32)
        self.sinks = torch.nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (8, 8)).split([4, 2, 2], 2)
        attended, lse = context_parallel_attention(
            q, k, v, self.group, causal=True, sinks=self.sinks, dropout_p=self.dropout_p, method=self.method,
            layout="bshd", return_lse=True, backend="cpu",
        )  # fmt: skip
        return self.out(attended.flatten(2)) + lse.sum(1)[..., None]


def run_block(method: str, mode: str, dropout_p: float) -> bool:
    """Whether a block gives the same gradients compiled, or checkpointed, as it does by itself."""
    torch.manual_seed(0)
    block = _Block(method, dropout_p)
    x = shard_sequence(torch.randn(2, 64, 32), mesh() if method == "both" else None, 1)

    def gradients(run: Any) -> list[torch.Tensor]:
        torch.manual_seed(dist.get_rank())  # dropout's mask is the first rank's
        return list(torch.autograd.grad(run(x).square().sum(), block.parameters()))

    if mode == "checkpoint":
        from torch.utils.checkpoint import checkpoint

        actual = gradients(lambda x: checkpoint(block, x, use_reentrant=False))
    else:
        actual = gradients(torch.compile(block, backend="aot_eager", fullgraph=True))
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(gradients(block), actual, strict=True))


def run_compiled() -> None:
    """One rank by itself: a compiled function with other numbers in each call, where nothing says in the backward pass
    what a block told the forward pass; and that no result of the operator lies in the memory of another."""
    single = dist.new_group([0])
    if dist.get_rank():
        return
    qkv = [x.detach()[:1, :2, :8].requires_grad_() for x in _small(9)[:3]]

    def attend(method: str, left: int, scale: float) -> torch.Tensor:
        options: dict[str, Any] = {"window": (left, 0), "sm_scale": scale, "softcap": 9 * scale}
        return context_parallel_attention(*qkv, single, method=method, **options)

    compiled_attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for method, left, scale in (("ring", 3, 0.1), ("ring", 5, 0.3), ("ring", 4, 0.2), ("ulysses", 4, 0.2)):
        with use_backend("cpu"):
            outs = attend(method, left, scale), compiled_attend(method, left, scale)
        with batch_invariant():  # which a ring refuses
            actual, expected = (torch.autograd.grad(out.square().sum(), qkv) for out in outs)
        pairs = zip((outs[0], *actual), (outs[1], *expected), strict=True)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in pairs), (method, left, scale)
    with use_backend("cpu"):
        out = torch.compile(attend, backend="eager", fullgraph=True)("ring", 3, 0.1)
    (dq,) = torch.autograd.grad(out.sum(), qkv[0], create_graph=True)
    try:  # the second derivative does not exist, so it may not be zero
        (dq.sum() + qkv[0].sum()).backward()
    except RuntimeError as error:
        assert "once_differentiable" in str(error), error
    else:
        raise AssertionError("a second derivative was not refused")
    number = compiled.call_number(single, *(x for pair in (
        ("causal", True), ("method", "ulysses"), ("load_balance", "zigzag"), ("layout", "bhsd"),
        ("deterministic", False), ("return_lse", True), ("variant", "auto"), ("backend", "cpu"), ("gradients", "sinks"),
        ("was_drawn", False)
    ) for x in pair))  # fmt: skip
    arguments = (*qkv, None, None, torch.zeros(2, requires_grad=True), None, -1, -1, None, 0.0, 0.0, number)
    operator = torch.ops.diyfa_distributed.attention_fwd.default
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def numbers() -> list[int]:
    """Those of calls that differ in little; of the last one in the number of ranks alone."""
    call_numbers = [compiled.call_number(None, "method", x, "causal", y) for x in METHODS[:2] for y in (1, True)]
    with mock.patch.object(dist, "get_world_size", return_value=2):
        return [*call_numbers, compiled.call_number(None, "method", "ulysses", "causal", True)]


def run_helpers() -> None:
    """Shards and their opposite, positions, and gradients of what is cut."""
    ranks = dist.get_world_size()
    cu_seqlens = torch.tensor([0, 5, 5, 33, 60], dtype=torch.int32)
    full = torch.arange(64.0 * 3).reshape(3, 64)
    positions = torch.tensor([*range(5), *range(28), *range(27), *range(4)])
    for group in (None, mesh()):
        for cut in ({}, {"load_balance": "none"}, {"cu_seqlens": cu_seqlens}):
            shard = shard_sequence(full, group, 1, **cut)
            assert shard.shape == (3, 64 // ranks)
            assert torch.equal(unshard_sequence(shard, group, 1, **cut), full)
            expected = positions if "cu_seqlens" in cut else torch.arange(64)
            assert torch.equal(shard_positions(64, group, **cut), shard_sequence(expected, group, **cut))
    x = full.clone().requires_grad_()
    (shard_sequence(x, dim=1) ** 2).sum().backward()
    assert x.grad is not None
    dist.all_reduce(x.grad)
    assert torch.equal(x.grad, 2 * full)


def lose_rank(manner: str) -> str:
    """Rank 1 dies, or comes late, before its second call; what the others raise."""
    q, k, v, dout = _small(0, heads=2)
    out = context_parallel_attention(q, k, v, causal=True, backend="cpu", method="ring")
    if dist.get_rank() == 1:
        if manner == "dies":
            os._exit(1)
        if manner == "lags":
            time.sleep(4)
    try:
        if manner != "dies":
            context_parallel_attention(q, k, v, causal=True, backend="cpu", method="ring")
        out.backward(dout)
    except RuntimeError as error:
        return str(error)
    return ""


def train_gpt(tokens: int, steps: int) -> list[float]:
    """The losses of docs/long_context_gpt.py, on these processes."""
    script = load_script(Path(__file__).parents[2] / "docs" / "long_context_gpt.py")
    with use_backend("cpu"):
        return script.train(tokens, steps)


def run_guide() -> None:
    """The block of docs/distributed.md."""
    text = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["whole"].shape == (1, 8, 512, 64)
