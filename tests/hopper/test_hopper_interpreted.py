"""The Hopper kernel without a GPU: right results and no undefined behaviour, whatever order things happen in."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hopper_interpreted import KERNEL_MODULES, interpret, interpreted_only, kernel_source, load_kernel, run
from poison import poisoned_allocations
from simulators.gluon import Deadlock, InvalidOperand, KernelBug, Race

from diyfa import ops
from diyfa.backends.cuda.gluon import tile_counter
from diyfa.backends.cuda.hopper.configs import Sm90Config
from diyfa.options import NO_LENGTHS, AttentionOptions
from diyfa.testing import AttentionCase, make_inputs

pytestmark = interpreted_only


def config(head_dim: int, consumers: int = 2, **changes) -> Sm90Config:
    """Return the table's tile with the fewest buffers that the schedule can use: with many, nothing waits in vain."""
    block_n, stages, separate_o_buffer = {64: (128, 4, True), 128: (128, 4, True), 256: (64, 4, False)}[head_dim]
    registers = (240, 24) if consumers == 2 else (160, 32)
    return replace(Sm90Config(consumers, block_n, stages, separate_o_buffer, *registers, fixed_max=True), **changes)


def case(name: str, **changes) -> AttentionCase:
    sizes = {"batch": 1, "heads": 2, "heads_kv": 2, "seqlen_q": 130, "seqlen_k": 300, "head_dim": 64}
    return AttentionCase(name, **{**sizes, "dtype": "bfloat16", **changes})


CASES = [
    (case("full", dtype="float16"), config(64)),
    (case("even", seqlen_q=128, seqlen_k=256, heads=1, heads_kv=1), config(64)),
    (case("one_key", seqlen_k=1), config(64)),
    (case("causal", causal=True), config(64)),
    (case("causal_more_queries", causal=True, seqlen_q=300, seqlen_k=130), config(64)),
    (case("gqa_bshd", heads=4, layout="bshd", batch=2, seqlen_k=140), config(64, persistent=True)),
    (case("transposed", view="transposed", causal=True), config(64)),
    (case("negative_scale", sm_scale=-0.2, causal=True), config(64)),
    (case("zero_scale", sm_scale=0.0), config(64)),
    (case("three_consumers", seqlen_q=200), config(64, 3, persistent=True)),
    (case("direct", seqlen_q=260), config(64, separate_o_buffer=False, store_from_registers=True, persistent=True)),
    (case("shared_o", seqlen_q=260), config(64, separate_o_buffer=False, persistent=True)),
    (case("two_stages", seqlen_q=260), config(64, stages=2, persistent=True)),
    (case("odd_stages", seqlen_q=260), config(64, stages=3, persistent=True)),
    (case("pingpong", seqlen_q=260), config(64, stages=8, persistent=True, pingpong=True)),
    (case("pingpong_causal", head_dim=128, causal=True, seqlen_q=260), config(128, persistent=True, pingpong=True)),
    (case("128", head_dim=128, heads_kv=1, seqlen_k=260), config(128)),
    (case("256", head_dim=256, heads=1, heads_kv=1, seqlen_k=150), config(256)),
    (case("256_causal_persistent", head_dim=256, causal=True, seqlen_k=150), config(256, persistent=True)),
]  # fmt: skip


@pytest.mark.parametrize(("case", "config"), CASES, ids=[case.name for case, _ in CASES])
def test_results(case: AttentionCase, config: Sm90Config, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = interpret(monkeypatch, config, seed=3)
    assert not run(case)
    assert kernel.launches == 1


def test_results_of_another_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are to be added up: through the table's choice of how they leave."""
    interpret(monkeypatch)
    given = make_inputs(case("to_float32", seqlen_k=200, head_dim=128, causal=True))
    q, k, v = (x.detach() for x in given[:3])
    options = AttentionOptions("bhsd", 0.1, window_right=0, backend="cuda", variant="sm90", out_dtype="float32")
    with poisoned_allocations():
        out, lse = ops.forward(q, k, v, NO_LENGTHS, options)
        rounded, same = ops.forward(q, k, v, NO_LENGTHS, options._replace(out_dtype=""))
    assert out.dtype == torch.float32 and rounded.dtype == q.dtype
    assert torch.equal(out.to(q.dtype), rounded) and torch.equal(lse, same) and not torch.equal(out, rounded.float())


SCHEDULED = case("scheduled", heads=3, heads_kv=1, seqlen_q=300, seqlen_k=300, causal=True)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
@pytest.mark.parametrize("changes", [{}, {"separate_o_buffer": False}, {"pingpong": True}], ids=str)
def test_tiles_drawn_by_programs_side_by_side(changes: dict, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile once, whoever is faster, and the counter is left as the next launch needs it."""
    monkeypatch.setattr(tile_counter, "_counters", {})
    dynamic = config(64, consumers=2 + seed % 2, block_n=64, persistent=True, scheduler="dynamic", **changes)
    kernel = interpret(monkeypatch, dynamic, seed, interleave=True)
    assert not run(SCHEDULED) and not run(SCHEDULED)
    assert kernel.launches == 2
    (counter,) = tile_counter._counters.values()
    assert counter.tolist() == [0, 0]


# Short KV loops, so that many interleavings fit: two tiles for each program, three blocks of keys, few buffers.
SMALL = case("small", heads=1, heads_kv=1, batch=2, seqlen_q=256, seqlen_k=384)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 12))])
@pytest.mark.parametrize(
    "changes", [{}, {"separate_o_buffer": False}, {"pingpong": True}, {"stages": 2}, {"box_columns": 32}], ids=str
)
def test_every_interleaving(changes: dict, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, config(64, persistent=True, **changes), seed)
    assert not run(SMALL)


def test_programs_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, config(64), seed=5, interleave=True)
    assert not run(case("side_by_side", causal=True))


# ---- the same kernel with one thing wrong; test_hopper_synchronisation.py takes out each statement that synchronises


def mutant(tmp_path: Path, pattern: str, replacement: str | Callable[[re.Match[str]], str]) -> ModuleType:
    """The kernel's module with what `pattern` finds in the kernel's sources replaced."""
    changed = {name: re.subn(pattern, replacement, kernel_source(name)) for name in KERNEL_MODULES}
    assert any(found for _, found in changed.values()), f"the kernel has no {pattern}"
    return load_kernel({name: source for name, (source, _) in changed.items()}, tmp_path)


MUTANTS = {
    "K is released before its product is done": (
        r"( +s = warpgroup_mma_wait\(0, deps=\[s\]\)\n)( +ring\.channel\.release\(item\)\n)",
        r"\2\1",
        Race,
        {},
    ),
    "V is released before its product is done": (
        r"( +o = finish_values\(o\)\n)( +ring\.channel\.release\(item - 1\)\n)",
        r"\2\1",
        Race,
        {},
    ),
    "scores are read while their product runs": (
        r"s = warpgroup_mma_wait\(len\(o\)",
        "s = warpgroup_mma_wait(len(o) + 1",
        Race,
        {},
    ),
    "values are read while their product runs": (
        r"done = warpgroup_mma_wait\(0, deps=o",
        "done = warpgroup_mma_wait(1, deps=o",
        Race,
        {},
    ),
    "Q is released although out follows it there": (
        r"if \(config\.SEPARATE_O_BUFFER or config\.STORE_FROM_REGISTERS\) and config\.Q_IN_REGISTERS < config\.BOXES:",
        "if True:",
        KernelBug,
        {"separate_o_buffer": False},
    ),
    "nobody has the first turn": (r"if INDEX == config\.CONSUMERS - 1:", "if False:", Deadlock, {"pingpong": True}),
    "V is waited for in another round's parity": (
        r"ring\.channel\.wait\(item - 1\)",
        "ring.channel.wait(item - 1 + ring.channel.STAGES)",
        KernelBug,
        {},
    ),
    "a stage is released by one consumer for all": (r"= WARPS \* config\.CONSUMERS\n", "= WARPS\n", KernelBug, {}),
}


def each_seed_raises(
    error: type[Exception],
    module: ModuleType,
    config: Sm90Config,
    case: AttentionCase,
    monkeypatch: pytest.MonkeyPatch,
    interleave: bool = False,
) -> None:
    for seed in (0, 1, 3):
        with monkeypatch.context() as patch:
            patch.setattr(tile_counter, "_counters", {})  # a kernel that failed leaves its own as they are
            interpret(patch, config, seed, interleave, kernels=module)
            with pytest.raises(error):
                run(case)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_bug_in_the_kernel_is_reported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, replacement, error, changes = MUTANTS[name]
    module = mutant(tmp_path, pattern, replacement)
    each_seed_raises(error, module, config(64, persistent=True, **changes), SMALL, monkeypatch)


# The same for the tile scheduler, with programs side by side, whose numbers come in any order.
DYNAMIC_MUTANTS = {
    "the first to leave clears the counter": (r"== gl\.num_programs\(0\) - 1:", "== 0:", Race),
    "leaving orders nothing": (r'sem="acq_rel"', 'sem="relaxed"', Race),
    "no lane but the first has the number that is drawn": (
        r"\bnumber = gl\.inline_asm[^)]*\)",
        "number = drawn_number",
        InvalidOperand,
    ),
    "a number is read without drawing it": (
        r"drawn_number = gl\.inline_asm[^)]*\)",
        "drawn_number = gl.load(self.counter_ptr)",
        Race,
    ),
    "a tile info replaces one that nobody has read": (
        r"TileInfos\(words, written, COUNT\)",
        "TileInfos(words, written, 1)",
        KernelBug,
    ),
    "a tile info is there before it is written": (
        r"( +self\.words\.index\(.*\)\.store.*\n)( +arrive_per_lane\(self\.written.*\n)",
        r"\2\1",
        KernelBug,
    ),
    "a tile info is read twice": (r"(slot \+= 1\n.*\n.*tile_infos\.read\()slot", r"\1slot - 1", KernelBug),
}


@pytest.mark.parametrize("name", DYNAMIC_MUTANTS)
def test_a_bug_in_scheduling_is_reported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, replacement, error = DYNAMIC_MUTANTS[name]
    module = mutant(tmp_path, pattern, replacement)
    dynamic = config(64, block_n=64, persistent=True, scheduler="dynamic")
    each_seed_raises(error, module, dynamic, SCHEDULED, monkeypatch, interleave=True)
