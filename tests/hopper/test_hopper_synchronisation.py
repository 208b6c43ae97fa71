"""Every wait, arrival and fence of the Hopper kernel is needed: without any one the interpreter reports a bug."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from eight_bit_cases import Case
from eight_bit_cases import run as run_float8
from hopper_interpreted import KERNEL_MODULES, interpret_prefill, interpreted_only, kernel_source, load_kernel, run
from kvcache_cases import CacheCase, assert_in_budget, run_case
from poison import poisoned_allocations
from simulators.gluon import KernelBug
from synchronising import Synchronising
from targets import TARGETS

import diyfa
from diyfa.backends.cuda.attention import decode_configs
from diyfa.backends.cuda.hopper.configs import Sm90Config
from diyfa.testing import AttentionCase

pytestmark = interpreted_only

# Those that stand behind a helper count where it calls them and where it is called. _inline_ptx: marks, the waits for
# kernels before and for stores.
SYNCHRONISING = (
    "mbarrier.wait", "mbarrier.arrive", "mbarrier.expect", "mbarrier.init", "mbarrier.invalidate",
    "fence_async_shared", "tma.store_wait", "turn", "wait_full", "release", "arrive_per_lane",
    "wait_for_previous_kernels", "wait_for_stores", "_inline_ptx",
)  # fmt: skip
METHODS = ("init", "invalidate", "acquire", "wait", "wait_empty", "wait_full", "release", "wait_turn", "hand_over")
# These only make the wait or the release behind them cheaper: warps of a consumer need not wait for each other.
# And: each lane arrives for itself instead of one for all, which is for racecheck. And: lanes of a warp, which run in
# step here, are put in order. And: tensor maps are read ahead. And: consumers take turns, which changes no result; a
# wait for a turn alone is reported, and an arrival alone. `sync_consumers` is the backward pass's.
HARMLESS = (
    "_inline_ptx(_WAIT_PER_WARP)", "_inline_ptx(_RELEASE_PER_WARP)", "_inline_ptx(_ARRIVE_PER_LANE)",
    "_inline_ptx(_ORDER_LANES)", "_inline_ptx(_PREFETCH)", "_inline_ptx(_named_barrier(ACTION, 8 + CONSUMER))",
    "_inline_ptx(_named_barrier('sync', 8))",
)  # fmt: skip
# Two tiles for the one program and three blocks of keys: long enough for every buffer to be used again.
SMALL = AttentionCase("small", 1, 1, seqlen_q=256, seqlen_k=384, head_dim=64, dtype="bfloat16")
PLAIN = Sm90Config(
    2, 128, 4, separate_o_buffer=True, consumer_registers=240, producer_registers=24, persistent=True, fixed_max=True
)
DYNAMIC = replace(PLAIN, scheduler="dynamic", stages=8)
OVERFLOWN = replace(SMALL, sm_scale=30.0)  # tiles that the fallback computes again
IN_CHUNKS = replace(SMALL, name="in_chunks", causal=True)  # in batch-invariant mode
# With shorter blocks than tiles, the first consumer has some to pass over.
SKIPPING = replace(PLAIN, pingpong=True, block_n=64)
CONFIGS = (
    (PLAIN, SMALL),
    (replace(PLAIN, fixed_max=False), SMALL),
    (replace(PLAIN, separate_o_buffer=False), SMALL),
    (replace(PLAIN, pingpong=True), SMALL),
    (DYNAMIC, SMALL),
    (SKIPPING, replace(SMALL, causal=True)),
    (replace(PLAIN, q_in_registers=1), SMALL),
    (PLAIN, CacheCase("pages", (300,), 128, head_dim=64, heads=1, dtype="bfloat16", page_size=64, causal=False)),
    (PLAIN, replace(SMALL, name="mask", mask="11:128:0.6")),
    (PLAIN, OVERFLOWN),
    (replace(PLAIN, pingpong=True, separate_o_buffer=False), OVERFLOWN),
    (replace(PLAIN, fixed_max=False, pingpong=True, block_n=64), IN_CHUNKS),
    (replace(PLAIN, fixed_max=False, q_in_registers=1, shared_totals=True, out_in_totals=True), IN_CHUNKS),
    (PLAIN, Case(heads=1, heads_kv=1, seqlen_q=128, seqlen_k=384, head_dim=64, means=True)),
)


def attend(case: AttentionCase | CacheCase | Case) -> dict[str, str]:
    """What misses its error budget, in words."""
    if case is IN_CHUNKS:
        chunks = ((256, 128, decode_configs.DecodeConfig(16, 64, 4, 2, 2)),)
        with diyfa.batch_invariant(), mock.patch.object(decode_configs, "HOPPER_INVARIANT", chunks):
            return run(IN_CHUNKS)
    if isinstance(case, AttentionCase):
        return run(case)
    if isinstance(case, Case):  # tests/hopper/test_hopper_float8.py has its errors
        with poisoned_allocations():
            run_float8(case, TARGETS["cuda"], "sm90")
        return {}
    with diyfa.use_backend("cuda"), poisoned_allocations():
        out, lse, _, _ = run_case(case, "cpu")
    assert_in_budget(case, out, lse)
    return {}


# The backward has the mutants of channels (test_hopper_bwd_synchronisation.py): it uses all of them.
MODULES = [name for name in KERNEL_MODULES if name != "gluon.channel"]
SOURCES = {name: Synchronising(kernel_source(name), SYNCHRONISING, METHODS, HARMLESS) for name in MODULES}
LINES = [f"{name} {i}: {line}" for name, source in SOURCES.items() for i, line in enumerate(source.lines)]


def test_with_all_of_them_nothing_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = load_kernel({name: source.source() for name, source in SOURCES.items()}, tmp_path)
    for config, case in CONFIGS:
        with monkeypatch.context() as patch:
            interpret_prefill(patch, config, seed=3, kernels=kernels, multiprocessors=1)
            assert not attend(case)


@pytest.mark.parametrize("line", LINES)
def test_nothing_is_superfluous(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, number = line.split(":")[0].split()
    kernels = load_kernel({name: SOURCES[name].without(int(number))}, tmp_path)
    for config, case in CONFIGS:
        with monkeypatch.context() as patch:
            interpret_prefill(patch, config, seed=3, kernels=kernels, multiprocessors=1)
            try:
                attend(case)
            except KernelBug:
                return
    pytest.fail(f"nothing reports that {line} is missing")
