"""Check and benchmark of block masks on a GPU: portable and Hopper kernels, dense calls, and torch's FlexAttention.

    python benchmarks/masks.py [--sections check blocks …] [--limit 230] [--output FILE]

First processes side by side make each call once, so that all kernels are compiled. Then each section runs in a process
of its own with a time limit; its rows are printed and written when it ends, also if it hangs or fails, with the step at
which it hung. All end within four minutes:

    check       results with a mask against float64 attention
    blocks      TFLOP/s of visible blocks, random full blocks, beside a dense call; backward too
    positions   causal as a mask beside causal=True; documents in 32k tokens beside a packed call
    sparse      90 % of 40k tokens empty, forward and backward, beside a dense call
    flex        FlexAttention's examples, compiled, with the time of the first call
    builder     device time in which masks are made, and blocks selected
    candidates  tiles of the Hopper kernel (only if named: each is compiled)

bf16; medians of medians, calls alternate. `sm90` and `v2` are forward kernels chosen by name; "auto" is what runs
without a name, as the backward pass does. TFLOP/s count the pairs in blocks that are not empty. Writes one JSON file
with device, date and versions to benchmarks/results/. Prints the table last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import diyfa
from diyfa import BlockMask, block_mask, flash_attention, masks
from diyfa.block_lists import Selection
from diyfa.lab.bench.record import default_path, device_name, write_json
from diyfa.lab.bench.timing import compute_quantiles, synchronize, time_calls
from diyfa.lab.bench.work import BACKWARD_FACTOR, attention_flops, tflops
from diyfa.selection import select_by_operators

RESULTS = Path(__file__).parent / "results"
DEVICE = torch.device("cuda")
LENGTHS = {"check": 1500, "blocks": 16384, "causal": 16384, "documents": 32768, "sparse": 40960, "flex": 8192,
           "builder": 40960, "candidates": 16384}  # fmt: skip
CASE_SECONDS = 30  # of one case once its kernels are compiled; a kernel that hangs ends its process
LIMIT = 230  # seconds in which all sections are to end
WIDTH = 2048  # heads * head_dim
PORTABLE, HOPPER = "v2", "sm90"
COMPILE_ONLY = False  # in a process that makes each call once, so that its kernels are compiled
STEP_FILE: Path | None = None
Row = dict[str, Any]
Calls = dict[str, Callable[[], Any]]


def note_step(name: str) -> None:
    """Write what this process does now, which its parent prints after a time-out."""
    if STEP_FILE is not None:
        STEP_FILE.write_text(name)


def tensors(batch: int, heads: int, length: int, head_dim: int, grad: bool = False) -> list[torch.Tensor]:
    shape = batch, heads, length, head_dim
    return [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=grad) for _ in range(3)]


def random_blocks(length: int, block: int, share: float, heads: int = 1) -> BlockMask:
    """Return a mask whose blocks are full with probability `share`, and on the diagonal, and empty otherwise."""
    count = -(-length // block)
    full = torch.rand(heads, count, count, device=DEVICE) < share
    full |= torch.eye(count, device=DEVICE, dtype=torch.bool)
    return block_mask(
        lambda b, h, i, j: full[h, i // block, j // block], 1, heads, length, length, block_size=block, device=DEVICE
    ).compact()


def ragged_ids(length: int, documents: int) -> torch.Tensor:
    """Return the document of each of `length` tokens: lengths from a quarter to seven quarters of the mean."""
    order = torch.randperm(documents, generator=torch.Generator().manual_seed(0))
    weights = (0.25 + 1.5 * order / max(documents - 1, 1)).cumsum(0)
    ends = (weights / weights[-1] * length).round().long()
    return torch.searchsorted(ends, torch.arange(length), right=True).to(DEVICE)


def medians_in_turns(calls: Calls, rounds: int = 3, rep: int = 8) -> dict[str, float]:
    """Return {name: median milliseconds}. Calls alternate, to run at the same clocks."""
    if COMPILE_ONLY:
        for name, call in calls.items():
            note_step(name)
            call()
        synchronize(DEVICE)
        return dict.fromkeys(calls, 1.0)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls) if number % 2 else reversed(calls):
            note_step(name)
            times[name] += compute_quantiles(time_calls(calls[name], DEVICE, 2, rep), [0.5])
    return {name: median(found) for name, found in times.items()}


def backward_call(attend: Callable[[], torch.Tensor], leaves: list[torch.Tensor]) -> Callable[[], Any]:
    """Return the backward pass of a call that has been made once."""
    with torch.enable_grad():
        out = attend()
    options = {"retain_graph": True, "materialize_grads": DEVICE.type == "cpu"}  # FlexAttention has no gradients there
    return partial(torch.autograd.grad, out, leaves, torch.randn_like(out), **options)


def speed_rows(table: str, case: str, calls: Calls, flops: dict[str, float], **facts: Any) -> Iterator[Row]:
    """Time calls named "implementation forward" or "implementation backward"."""
    for name, ms in medians_in_turns(calls).items():
        implementation, direction = name.rsplit(" ", 1)
        work = flops[implementation] * (BACKWARD_FACTOR if direction == "backward" else 1)
        yield {
            "kind": "packed", "table": table, "case": case, "implementation": implementation, "pass": direction,
            "ms": ms, "tflops": tflops(work, ms), "dtype": "bfloat16", **facts,
        }  # fmt: skip


# ---- Sections --------------------------------------------------------------------------------------------------------


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    found, exact = found.detach().double(), exact.detach().double()
    if not torch.equal(found.isinf(), exact.isinf()):
        return float("inf")
    finite = exact.isfinite()
    return float((found - exact)[finite].norm() / exact[finite].norm().clamp(min=1e-30))


# (head_dim, block, whether with features, kernel)
CHECKS: tuple[Any, ...] = (
    (128, 128, "", HOPPER),
    (128, 128, "", PORTABLE),
    (64, 128, "", HOPPER),
    (128, (128, 64), "", HOPPER),
    (64, 64, "", HOPPER),
    (128, 128, "features", HOPPER),
    (64, (64, 128), "", PORTABLE),
)
GRADIENT_CHECKS = ((128, 128), (64, 128), (64, 64))


def check_rows(case: Any) -> Iterator[Row]:
    """Compare out and lse with float64 attention, and once gradients of the forward by name with those without."""
    head_dim, block, features, variant = case
    torch.manual_seed(0)
    length = LENGTHS["check"]
    n_keys = length - 200
    q, k, v = tensors(4, 8, length, head_dim, grad=True)
    k, v = (x[:, :4, :n_keys].detach().requires_grad_() for x in (k, v))
    count = -(-length // 64)
    kinds = torch.rand(4, 8, count, count, device=DEVICE).repeat_interleave(64, 2).repeat_interleave(64, 3)
    kinds = kinds[:, :, :length, :n_keys]
    dense = (kinds < 0.5) & ((kinds < 0.3) | (torch.rand(4, 8, length, n_keys, device=DEVICE) < 0.5))
    dense[:, :, 256:512, :] = True  # a row of full blocks, and one of empty ones
    dense[:, 1, 512:768, :] = False
    mask = BlockMask.from_dense(dense, block)
    options: dict[str, Any] = {"mask": mask}
    if features:
        options |= {"sinks": torch.randn(8, device=DEVICE), "sm_scale": -0.1, "softcap": 5.0}
    name = f"D={head_dim} blocks {block} {features} {variant}"
    inputs: dict[str, Any] = {x: y.detach() for x, y in zip("qkv", (q, k, v), strict=True)}
    exact = diyfa.reference_attention(**inputs, return_lse=True, dtype=torch.float64, **options)
    try:
        found = flash_attention(**inputs, return_lse=True, variant=variant, **options)
        errors = [_error(x, y) for x, y in zip(found, exact, strict=True)]
        fine, note = errors[0] <= 6e-3 and errors[1] <= 1e-4, f"out {errors[0]:.1e}, lse {errors[1]:.1e}"
    except (RuntimeError, ValueError) as error:
        fine, note = False, str(error)[:300]
    yield {"kind": "numerics", "table": "check", "case": name, "status": "ok" if fine else "WRONG", "note": note}
    if variant == HOPPER and (head_dim, block) in GRADIENT_CHECKS:
        dout = torch.randn_like(q)
        gradients = [
            torch.autograd.grad(flash_attention(q, k, v, variant=name, **options), (q, k, v), dout)
            for name in (PORTABLE, HOPPER)
        ]
        worst = max(_error(x, y) for x, y in zip(*gradients, strict=True))
        yield {"kind": "numerics", "table": "check", "case": f"D={head_dim} blocks {block} {features} gradients",
               "status": "ok" if worst <= 1e-2 else "WRONG", "note": f"{worst:.1e} apart"}  # fmt: skip


def blocks_rows(case: tuple[int, int]) -> Iterator[Row]:
    """Time random full blocks beside a dense call."""
    head_dim, block = case
    length, heads = LENGTHS["blocks"], WIDTH // head_dim
    q, k, v = tensors(1, heads, length, head_dim, grad=True)
    dense_flops = attention_flops(1, heads, length, length, head_dim, False)
    mask = random_blocks(length, block, 0.25)
    attend = partial(flash_attention, q, k, v)
    forms = {
        "dense": attend,
        PORTABLE: partial(attend, mask=mask, variant=PORTABLE),
        HOPPER: partial(attend, mask=mask, variant=HOPPER),
    }
    calls: Calls = {f"{name} forward": torch.no_grad()(call) for name, call in forms.items()}
    calls["dense backward"] = backward_call(attend, [q, k, v])
    calls["auto backward"] = backward_call(forms[HOPPER], [q, k, v])
    flops = dict.fromkeys((PORTABLE, HOPPER, "auto"), dense_flops * mask.density()) | {"dense": dense_flops}
    yield from speed_rows("blocks", f"full blocks of {block}", calls, flops, D=head_dim, S=length, H=heads)


def positions_rows(case: tuple[int, str]) -> Iterator[Row]:
    """Time masks that other arguments can say, too."""
    head_dim, kind = case
    heads, length = WIDTH // head_dim, LENGTHS[kind]
    q, k, v = tensors(1, heads, length, head_dim, grad=True)
    function: masks.MaskFunction
    if kind == "causal":
        other, leaves = "causal=True", [q, k, v]
        attend = partial(flash_attention, q, k, v, causal=True)
        function, lengths = masks.causal, [length]
    else:
        ids = ragged_ids(length, 16)
        leaves = [x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v)]
        counts = ids.bincount()
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        longest = int(counts.max())
        attend = partial(diyfa.flash_attention_varlen, *leaves, offsets, offsets, longest, longest, causal=True)
        other, function, lengths = "packed", masks.document(ids), counts.tolist()
    mask = block_mask(function, 1, 1, length, length, device=DEVICE).compact()
    forms = {
        other: attend,
        PORTABLE: partial(flash_attention, q, k, v, mask=mask, variant=PORTABLE),
        HOPPER: partial(flash_attention, q, k, v, mask=mask, variant=HOPPER),
    }
    calls: Calls = {f"{name} forward": torch.no_grad()(call) for name, call in forms.items()}
    calls[f"{other} backward"] = backward_call(attend, leaves)
    calls["auto backward"] = backward_call(forms[HOPPER], [q, k, v])
    work = sum(attention_flops(1, heads, n, n, head_dim, True) for n in lengths)
    yield from speed_rows(
        "positions", kind, calls, dict.fromkeys((*forms, "auto"), work), D=head_dim, S=length, H=heads
    )


def sparse_rows(block: int) -> Iterator[Row]:
    """Time forward and backward of 40k tokens of which 90 % of the blocks are empty, and of a dense call."""
    length, heads, head_dim = LENGTHS["sparse"], 8, 128
    q, k, v = tensors(1, heads, length, head_dim, grad=True)
    dout = torch.randn_like(q)
    flops = attention_flops(1, heads, length, length, head_dim, False)
    mask = random_blocks(length, block, 0.1)

    def both(**options: Any) -> None:
        torch.autograd.grad(flash_attention(q, k, v, **options), (q, k, v), dout)

    calls: Calls = {
        "dense both": both,
        f"{PORTABLE} both": partial(both, mask=mask, variant=PORTABLE),
        "auto both": partial(both, mask=mask),
    }
    work = dict.fromkeys((PORTABLE, "auto"), flops * mask.density() * (1 + BACKWARD_FACTOR))
    work["dense"] = flops * (1 + BACKWARD_FACTOR)
    yield from speed_rows("sparse", f"90 % empty, blocks of {block}", calls, work, D=head_dim, S=length, H=heads)


def flex_examples(length: int, heads: int) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield (name, arguments of FlexAttention, arguments of `flash_attention`); masks are mask functions.

    Gradients of `score_tensors` are timed, too.
    """
    import triton
    import triton.language as tl

    ids = ragged_ids(length, 8)
    slopes = torch.rand(heads, device=DEVICE)
    window, prefix = 1024, 1024

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    yield "causal", {"mask": causal}, {"mask": masks.causal}
    yield (
        "document", {"mask": lambda b, h, i, j: (i >= j) & (ids[i] == ids[j])}, {"mask": masks.document(ids)}
    )  # fmt: skip
    yield (
        "sliding window 1024", {"mask": lambda b, h, i, j: (i >= j) & (i - j <= window)},
        {"mask": masks.sliding_window(window)},
    )  # fmt: skip
    yield (
        "prefix LM 1024", {"mask": lambda b, h, i, j: (i >= j) | (j < prefix)}, {"mask": masks.prefix_lm(prefix)}
    )  # fmt: skip
    yield (
        "softcap 30, causal",
        {"mask": causal, "score_mod": lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0)},
        {"causal": True, "softcap": 30.0},
    )
    yield (
        "ALiBi, causal",
        {"mask": causal, "score_mod": lambda s, b, h, i, j: s - slopes[h] * (i - j)},
        {"causal": True, "alibi_slopes": slopes},
    )
    table = torch.randn(heads, length, device=DEVICE, requires_grad=True)
    stride = tl.constexpr(length)

    @triton.jit
    def relative(score: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
        return score + tl.load(table + h * stride + (i - j))

    yield (
        "relative bias with gradient, causal",
        {
            "mask": causal,
            "score_mod": lambda s, b, h, i, j: s + table[h, torch.where(i >= j, i - j, 0)],
            "kernel_options": {"bwd_num_stages": 2},  # its default needs more shared memory than there is
        },
        {"causal": True, "score_fn": relative, "score_tensors": (table,)},
    )


def flex_rows(number: int) -> Iterator[Row]:
    """Time one of FlexAttention's examples, first call and later ones."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length, heads, head_dim, batch = LENGTHS["flex"], 16, 128, 2
    for case, theirs, ours in list(flex_examples(length, heads))[number : number + 1]:
        torch._dynamo.reset()
        q, k, v = tensors(batch, heads, length, head_dim, grad=True)
        leaves = [q, k, v, *ours.get("score_tensors", ())]
        flops = attention_flops(batch, heads, length, length, head_dim, False)
        their_mask = create_block_mask(theirs.pop("mask"), None, None, length, length, device=DEVICE.type)
        flops *= 1 - their_mask.sparsity() / 100
        forms: dict[str, Callable[[], torch.Tensor]] = {}
        if "mask" in ours:
            mask = block_mask(ours["mask"], 1, 1, length, length, device=DEVICE).compact()
            for variant in (PORTABLE, HOPPER):
                forms[variant] = partial(flash_attention, q, k, v, mask=mask, variant=variant)
        else:
            forms["diyfa"] = partial(flash_attention, q, k, v, **ours)
        forms["flex"] = partial(torch.compile(flex_attention, dynamic=False), q, k, v, block_mask=their_mask, **theirs)
        results = {}
        for name, attend in forms.items():
            synchronize(DEVICE)
            start = time.perf_counter()
            results[name] = attend()
            backward_call(lambda out=results[name]: out, leaves)()
            synchronize(DEVICE)
            yield {"kind": "host", "table": "flex", "case": case, "implementation": name, "pass": "first both",
                   "host_us": (time.perf_counter() - start) * 1e6}  # fmt: skip
        worst = max(_error(x, results["flex"]) for x in results.values())
        yield {"kind": "numerics", "table": "flex", "case": case, "status": "ok" if worst <= 1e-2 else "WRONG",
               "note": f"{worst:.1e} apart"}  # fmt: skip
        calls: Calls = {f"{name} forward": torch.no_grad()(call) for name, call in forms.items() if name != "flex"}
        # FlexAttention compiles another kernel for calls without gradients, so its forward is timed with them.
        calls["flex forward"] = forms["flex"]
        for name in [x for x in forms if x != PORTABLE]:  # its backward pass is the same
            calls[f"{name} backward"] = backward_call(forms[name], leaves)
        yield from speed_rows("flex", case, calls, dict.fromkeys(forms, flops), D=head_dim, S=length, H=heads)


def graphed(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return the replay of a call that was captured as a graph: its time is the device's, not the host's."""
    call()
    if COMPILE_ONLY:
        return call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay(kept: Any = kept) -> None:
        graph.replay()

    return replay


def builder_rows(block: int) -> Iterator[Row]:
    """Time making masks of 40k tokens, and selecting blocks, by kernels and by PyTorch's operators."""
    length = LENGTHS["builder"]
    ids = ragged_ids(length, 16)
    named: dict[str, Any] = {
        "causal": masks.causal,
        "document": masks.document(ids),
        "window 1024": masks.sliding_window(1024, 1024),
        "tiles of video": masks.sliding_tile((length // 1024, 32, 32), (4, 4, 8), (5, 3, 3)),
    }
    q, k, _ = tensors(1, 16, length, 128)
    rows: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}
    for case, function in named.items():
        make = partial(block_mask, B=1, H=1, Sq=length, Sk=length, block_size=block, device=DEVICE)
        # A function without terms: PyTorch's operators evaluate it.
        rows[case] = partial(make, function), partial(make, lambda *at, of=function: of(*at))
    how = Selection(16, True, 1, 1, False, (block, block))
    rows["select 16 blocks, 16 heads"] = (
        partial(diyfa.select_blocks, q, k, topk=16, causal=True, sinks=1, block_size=block),
        partial(select_by_operators, q, k, how),
    )
    for case, (kernels, operators) in rows.items():
        calls = {"kernels": graphed(kernels), "operators": operators}
        times = medians_in_turns(calls, rounds=2, rep=3)
        for name, ms in times.items():
            yield {"kind": "feature", "table": "builder", "case": f"{case}, {block}", "pass": "make", "ms": ms,
                   "ratio": ms / times["operators"], "implementation": name}  # fmt: skip


def candidates_rows(number: int) -> Iterator[Row]:
    """Time tiles and schedules of the Hopper kernel with a mask."""
    from diyfa.backends.cuda.attention.launch import use_config
    from diyfa.backends.cuda.hopper.configs import MASK_CONFIGS, SMALL_MASK_CONFIGS

    length = LENGTHS["candidates"]
    two = MASK_CONFIGS
    rows: list[tuple[int, int | tuple[int, int], dict[str, Any]]] = [
        (64, 128, {
            "table": two[64], "running max": replace(two[64], fixed_max=False),
            "240/24": replace(two[64], consumer_registers=240, producer_registers=24),
            "static": replace(two[64], scheduler="static"),
            "no ping-pong": replace(two[64], pingpong=False),
        }),
        (128, 128, {
            "table": two[128], "static": replace(two[128], scheduler="static"),
            "no ping-pong": replace(two[128], pingpong=False),
            "1 of Q in registers": replace(two[128], q_in_registers=1),
        }),
        (128, (128, 64), {"table": two[128], "blocks of 64 keys": replace(two[128], block_n=64, stages=8)}),
        (128, 64, {
            "table": SMALL_MASK_CONFIGS[128], "128 keys": replace(SMALL_MASK_CONFIGS[128], block_n=128, stages=3),
            "4 stages": replace(SMALL_MASK_CONFIGS[128], stages=4),
        }),
        (64, 64, {"table": SMALL_MASK_CONFIGS[64], "running max": replace(SMALL_MASK_CONFIGS[64], fixed_max=False)}),
    ]  # fmt: skip
    for head_dim, block, configs in rows[number : number + 1]:
        heads = WIDTH // head_dim
        q, k, v = tensors(1, heads, length, head_dim)
        size = block if isinstance(block, int) else block[0]
        full = random_blocks(length, size, 0.25)
        mask = full if isinstance(block, int) else BlockMask.from_dense(full.to_dense(), block)
        flops = attention_flops(1, heads, length, length, head_dim, False) * mask.density()
        for name, config in configs.items():
            with use_config("sm90", config), torch.no_grad():
                call = partial(flash_attention, q, k, v, mask=mask, variant=HOPPER)
                facts = {"D": head_dim, "S": length, "H": heads, "note": str(config)}
                case = f"blocks of {block}: {name}"
                try:
                    yield from speed_rows("candidates", case, {f"{HOPPER} forward": call}, {HOPPER: flops}, **facts)
                except (RuntimeError, ValueError) as error:
                    yield {"kind": "done", "table": "candidates", "case": case, "unavailable": str(error)[:300]}


# Section -> (rows of a case, cases, seconds). A case takes no longer than CASE_SECONDS.
SECTIONS: dict[str, tuple[Callable[[Any], Iterator[Row]], list[Any], int]] = {
    "check": (check_rows, list(CHECKS), 45),
    "blocks": (blocks_rows, [(128, 128), (64, 128), (128, 64), (64, 64)], 45),
    "positions": (positions_rows, [(d, kind) for kind in ("documents", "causal") for d in (128, 64)], 45),
    "sparse": (sparse_rows, [128, 64], 30),
    "builder": (builder_rows, [128, 64], 30),
    "flex": (flex_rows, list(range(7)), 115),
    "candidates": (candidates_rows, list(range(5)), 150),
}
DEFAULT = [name for name in SECTIONS if name != "candidates"]
COMPILE_SECONDS = 90  # for all kernels of all sections, side by side
NOT_COMPILED = ("flex",)  # their first calls are timed


def start(name: str, numbers: list[int], folder: Path, compile_only: bool) -> subprocess.Popen[str]:
    """Start a process that runs cases of a section and writes their rows to `folder`."""
    environment = dict(os.environ)
    if name in NOT_COMPILED:
        caches = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "DIYFA_CACHE_DIR")
        environment |= {x: str(folder / x) for x in caches}
    command = [sys.executable, __file__, "--child", name, ",".join(map(str, numbers)), str(folder), str(compile_only)]
    return subprocess.Popen(command, env=environment, stderr=(folder / "errors").open("w"), text=True)


def wait(process: subprocess.Popen[str], folder: Path, seconds: float) -> str:
    """Wait for a process and return what went wrong, or nothing. One that takes too long is ended."""
    try:
        if process.wait(timeout=max(seconds, 0.1)) == 0:
            return ""
        return f"exit status {process.returncode}: {(folder / 'errors').read_text()[-1500:]}"
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        step = folder / "step"
        return f"not done in time; it was at: {step.read_text() if step.exists() else 'its start'}"


def compile_all(names: list[str], end: float) -> list[Row]:
    """Make each call of all cases once, in processes side by side. Return a row for each that did not end well."""
    rows: list[Row] = []
    waiting = [(name, i) for name in names if name not in NOT_COMPILED for i in range(len(SECTIONS[name][1]))]
    running: list[tuple[str, int, subprocess.Popen[str], Path]] = []
    with tempfile.TemporaryDirectory() as root:
        while waiting or running:
            while waiting and len(running) < max(2, (os.cpu_count() or 4) - 2):
                name, i = waiting.pop(0)
                folder = Path(root) / f"{name}{i}"
                folder.mkdir()
                running.append((name, i, start(name, [i], folder, True), folder))
            time.sleep(0.2)
            for job in list(running):
                name, i, process, folder = job
                if process.poll() is None and time.perf_counter() < end:
                    continue
                running.remove(job)
                if problem := wait(process, folder, 0.1):
                    rows.append({"kind": "done", "table": name, "case": f"compilation of {SECTIONS[name][1][i]}",
                                 "unavailable": problem})  # fmt: skip
            if time.perf_counter() >= end:
                waiting.clear()
    return rows


def run_section(name: str, end: float) -> list[Row]:
    """Run a section's cases and return their rows, and one more for each process that did not end well.

    If a case takes too long, a new process goes on with the next one.
    """
    _, cases, limit = SECTIONS[name]
    end = min(end, time.perf_counter() + limit)
    rows: list[Row] = []
    first = 0
    while first < len(cases) and (first == 0 or time.perf_counter() < end - 5):
        with tempfile.TemporaryDirectory() as root:
            folder = Path(root)
            process = start(name, list(range(first, len(cases))), folder, False)
            problem = wait(process, folder, end - time.perf_counter())
            path = folder / "rows.jsonl"
            lines = path.read_text().splitlines() if path.exists() else []
            marks = [json.loads(line) for line in lines]
            rows += [row for row in marks if "case_done" not in row]
            done = sum("case_done" in row for row in marks)
        if problem:
            rows.append({"kind": "done", "table": name, "case": f"case {cases[min(first + done, len(cases) - 1)]}",
                         "unavailable": problem})  # fmt: skip
        first += done + bool(problem)
    return rows


def run_child(name: str, numbers: str, folder: Path, compile_only: bool) -> None:
    """Run cases of a section, and write each row as it comes."""
    global COMPILE_ONLY, STEP_FILE
    COMPILE_ONLY, STEP_FILE = compile_only, folder / "step"
    torch.manual_seed(0)
    function, cases, _ = SECTIONS[name]
    with (folder / "rows.jsonl").open("a") as file:
        for i in map(int, numbers.split(",")):
            note_step(f"{cases[i]}")
            timer = threading.Timer(CASE_SECONDS * (3 if compile_only or name in NOT_COMPILED else 1), _give_up)
            timer.daemon = True
            timer.start()
            for row in function(cases[i]):
                file.write(json.dumps(row) + "\n")
                file.flush()
            timer.cancel()
            file.write(json.dumps({"case_done": i}) + "\n")
            file.flush()


def _give_up() -> None:
    step = "" if STEP_FILE is None or not STEP_FILE.exists() else STEP_FILE.read_text()
    print(f"the case took too long; it was at: {step}", file=sys.stderr, flush=True)
    os._exit(124)


def print_table(rows: list[Row]) -> None:
    """Print one line for each row; of correct results only their number."""
    correct = [row for row in rows if row["kind"] == "numerics" and row["status"] == "ok"]
    if correct:
        print(f"{len(correct)} results correct")
    for row in rows:
        where = f"{row['table']:10}{row.get('case', ''):30}{row.get('D', ''):>4} "
        if "unavailable" in row:
            print(f"{where}{row['unavailable'][-400:]}", flush=True)
        elif row["kind"] == "numerics":
            if row["status"] != "ok":
                print(f"{where}{row['status']}: {row['note']}")
        else:
            figure = f"{row['ms']:9.3f} ms" if "ms" in row else f"{row['host_us'] / 1e6:9.2f} s"
            speed = f"{row['tflops']:7.0f} TFLOP/s" if "tflops" in row else ""
            print(f"{where}{row['implementation']:12}{row['pass']:11}{figure} {speed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=DEFAULT)
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds in which all sections are to end")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--child", nargs=4, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, numbers, folder, compile_only = options.child
        run_child(name, numbers, Path(folder), compile_only == "True")
        return
    begin = time.perf_counter()
    rows = compile_all(options.sections, begin + min(COMPILE_SECONDS, options.limit / 2))
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    print_table(rows)
    path = options.output or default_path("masks", DEVICE, RESULTS)
    for name in options.sections:
        found = run_section(name, begin + options.limit)
        print(f"# {name}, until {time.perf_counter() - begin:.0f} s", flush=True)
        print_table(found)
        rows += found
        write_json(path, "Block masks beside dense calls and FlexAttention, in turns", DEVICE, rows)
    print(f"\n{device_name(DEVICE)}")
    print_table(rows)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
