"""Context parallel attention on several accelerators: the matrix of the tests, drawn cases, ranks that disagree.

    torchrun --nproc-per-node 2 tests/manual/context_parallel_nccl.py [--cases causal_gqa packed_odd] [--drawn 40]
        [--part 3/8]

Nearly every case compiles kernels of its own, so that the whole matrix takes many minutes the first time: several such
commands side by side, each with a part of it, share the processor's cores and the cache. Every result is compared with
the float64 reference under its error budget. Prints one line for each failure, a summary for each group of cases, and
ends with status 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from context_parallel_cases import MATRIX, METHODS, WITH_ALIBI, Division, random_case, run_sharded

from diyfa.distributed import context_parallel_attention
from diyfa.testing import AttentionCase, assert_within_budget

Cases = list[tuple[AttentionCase, Division]]


def run(name: str, cases: Cases, device: str) -> int:
    """The number of cases outside their budget, on rank 0."""
    failures, start = 0, time.perf_counter()
    for case, how in cases:
        results = run_sharded(case, how._replace(backend=device, device=device))
        if results is None:
            continue
        try:
            assert_within_budget(results, case, device)
        except AssertionError as error:
            failures += 1
            print(f"{how}: {error}", flush=True)
    if dist.get_rank() == 0:
        took = time.perf_counter() - start
        print(f"{name}: {len(cases) - failures} of {len(cases)} in their budget, {took:.0f} s", flush=True)
    return failures


def runs_here(case: AttentionCase, how: Division) -> bool:
    """Whether the heads can be divided."""
    size = dist.get_world_size() if how.method == "ulysses" else how.ulysses_ranks
    return how.method == "ring" or case.heads % size == 0


def disagree(device: str) -> int:
    """1 where a rank with another option is not told of on every rank."""
    q = torch.randn(1, 4, 16, 64, device=device, dtype=torch.float16)
    odd = dist.get_world_size() - 1
    message = ""
    try:
        context_parallel_attention(q, q, q, causal=dist.get_rank() == odd, backend=device)
    except ValueError as error:
        message = str(error)
    told = torch.tensor(["causal: rank" in message], device=device).int()
    dist.all_reduce(told)
    if dist.get_rank() == 0:
        print(f"a rank that differs: {message or 'nothing is told'}", flush=True)
    return int(told.item() < dist.get_world_size())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", help="of the matrix; default: all")
    parser.add_argument("--drawn", type=int, default=40)
    parser.add_argument("--device", default="cuda", help="cuda, npu or cpu")
    parser.add_argument("--part", default="0/1", help="I/N: every Nth case from the Ith, counted from 0")
    arguments = parser.parse_args()
    device = arguments.device
    if device != "cpu":
        getattr(torch, device).set_device(int(os.environ["LOCAL_RANK"]))
    backend = {"cuda": "nccl", "npu": "hccl"}.get(device, "gloo")
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    ranks = dist.get_world_size()
    both = min(2, ranks)
    cases = [case for case in MATRIX if arguments.cases is None or case.name in arguments.cases]
    matrix = [(case, Division(method, ulysses_ranks=both)) for case in cases for method in METHODS]
    unbalanced = [(case, how._replace(load_balance="none")) for case, how in matrix if how.method == "ring"]
    groups = {
        "matrix": matrix,
        "without balance": unbalanced,
        "alibi": [(case, Division("ulysses")) for case in WITH_ALIBI if arguments.cases is None],
        "drawn": [random_case(seed, ranks) for seed in range(arguments.drawn)],
    }
    part, parts = map(int, arguments.part.split("/"))
    failures = 0
    for name, cases in groups.items():
        failures += run(name, [x for x in cases if runs_here(*x)][part::parts], device)
    failures += disagree(device)
    dist.destroy_process_group()
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
