"""The Hopper backward without a GPU: right gradients and no undefined behaviour, whatever order things happen in."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import hopper_key_block_kernel
import pytest
import torch
from block_ranges import check, configurations
from hopper_interpreted import (
    BACKWARD_MODULES,
    interpret_backward,
    interpreted_only,
    kernel_source,
    load_kernel,
    run_backward,
)
from poison import poisoned_allocations
from simulators.gluon import KernelBug

import diyfa
from diyfa import ops, registry
from diyfa import problem as problems
from diyfa.attention import checked_options
from diyfa.backends.cuda.attention import bwd_partials
from diyfa.backends.cuda.hopper import bwd as hopper_bwd
from diyfa.backends.cuda.hopper import bwd_configs, bwd_launch
from diyfa.backends.cuda.runtime.launcher import launch_kernel
from diyfa.backends.cuda.runtime.passes import launch_each
from diyfa.options import LENGTHS, NO_LENGTHS, Lengths, pack
from diyfa.problem import VARLEN, AttentionGradients, AttentionProblem, AttentionTensors, Launch
from diyfa.testing import AttentionCase, make_inputs

pytestmark = interpreted_only


def case(name: str, **changes) -> AttentionCase:
    sizes = {"batch": 1, "heads": 2, "heads_kv": 1, "seqlen_q": 150, "seqlen_k": 200, "head_dim": 64}
    return AttentionCase(name, **{**sizes, "dtype": "bfloat16", **changes})


CASES = [
    case("full"),
    case("even", seqlen_q=128, seqlen_k=256, heads=1, dtype="float16", sm_scale=-0.2),
    case("one_key", seqlen_q=64, seqlen_k=1),
    case("zero_scale", sm_scale=0.0),
    case("causal_more_keys", causal=True, seqlen_q=70, seqlen_k=330, head_dim=128),
    case("gqa_bshd", heads=4, heads_kv=2, layout="bshd", batch=2, seqlen_q=140, seqlen_k=140, causal=True),
    case("window_both", seqlen_q=330, seqlen_k=300, window=(250, 30), head_dim=128, heads=1),
    case("softcap_128", softcap=5.0, causal=True, head_dim=128),
    case("sinks", sinks=True, causal=True),
    case("samples", batch=3, seq_lens=(130, 1, 129), seqlen_k=150, causal=True, head_dim=128, sinks=True),
    case("sequences", layout="thd", lens_q=(70, 130, 1, 0), lens_k=(130, 64, 5, 3), causal=True, sinks=True),
    case("sequences_104", layout="thd", lens_q=(65, 200), lens_k=(128, 129), head_dim=104, slack=7),
    case("columns_40", head_dim=40),
    case("large_scores", sm_scale=4.0, causal=True),
    # Products stop within the last box of 64 columns.
    case("columns_96_causal", head_dim=96, causal=True),
    case("columns_88_samples", head_dim=88, batch=2, seq_lens=(130, 70), seqlen_k=150, seqlen_q=150),
    case("alibi_gqa_bshd", alibi="bh", batch=2, heads=4, heads_kv=2, layout="bshd", seqlen_q=70),
    # Slopes of published models are at most 1. A negative one prefers the farthest keys.
    case(
        "alibi_rows_without_keys", alibi="h", slopes=(4.0, -1.0), causal=True, softcap=5.0, head_dim=128, seqlen_q=200
    ),
    case("alibi_window", alibi="bh", batch=2, window=(70, 20), softcap=5.0, head_dim=80, heads=1),
    case("alibi_packed", layout="thd", lens_q=(70, 130, 1, 0), lens_k=(130, 64, 5, 3), alibi="h", slopes=(64.0, -0.5)),
]
PROBLEM = AttentionProblem("cuda", "sm_90", "bfloat16", "bhsd", 1, 2, 2, 64, 64, 64, 64)


def zeros(problem: AttentionProblem, device: str = "cpu") -> list[torch.Tensor]:
    """Return q, k, v and out of zeros."""
    queries, keys = (problem.heads_q, problem.seqlen_q), (problem.heads_kv, problem.seqlen_k)
    columns = (problem.head_dim, problem.head_dim, problem.head_dim_v, problem.head_dim_v)
    shapes = [(problem.batch, *rows, d) for rows, d in zip((queries, keys, keys, queries), columns, strict=True)]
    return [torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in shapes]


def launcher_of(problem: AttentionProblem, device: str = "cpu", **features: Any) -> bwd_launch.Sm90Backward:
    """Return the launcher of the backward pass over `zeros`."""
    q, k, v, _ = zeros(problem, device)
    lse = torch.zeros(problem.lse_shape, device=device)
    tensors = AttentionTensors(q, k, v, 1.0, **features)
    return bwd_launch.Sm90Backward(problem, tensors, bwd_configs.select_config(problem), lse, torch.empty_like(q))


@pytest.mark.parametrize(
    ("head_dim", "columns"), [(40, 64), (64, 64), (72, 16), (80, 16), (88, 32), (96, 32), (104, 64), (128, 64)]
)
def test_columns_of_the_last_box(head_dim: int, columns: int) -> None:
    """All that there are, and no more than a product needs: 48 is no multiple of what dQ is added up by."""
    assert bwd_configs.last_columns(PROBLEM.replace(head_dim=head_dim)) == columns


WIDE = [
    case("256", head_dim=256, seqlen_q=70, seqlen_k=100, batch=2, seq_lens=(100, 65), causal=True),
    # Blocks that need a mask stand behind those that need none.
    case("left", head_dim=128, head_dim_v=64, heads=1, seqlen_q=200, seqlen_k=131, window=(66, -1), softcap=5.0),
    case("alibi", head_dim=200, alibi="bh", batch=2, slopes=(1.0, -0.5, 0.1), seqlen_q=100, seqlen_k=70, causal=True),
    case("72_192", head_dim=72, head_dim_v=192, layout="thd", lens_q=(70, 3), lens_k=(65, 130), sinks=True),
]
MLA = [
    # The last sequences are shorter than the longest.
    case("sequences", layout="thd", lens_q=(70, 0, 66, 1), lens_k=(65, 3, 130, 5), head_dim=192, head_dim_v=128),
    case("causal", head_dim=192, head_dim_v=128, seqlen_q=100, seqlen_k=150, causal=True, sm_scale=1.0, sinks=True),
    case("left", head_dim=136, head_dim_v=72, heads=1, seqlen_q=200, seqlen_k=170, window=(130, 30), dtype="float16"),
    case("samples", head_dim=160, head_dim_v=40, batch=2, seq_lens=(130, 65), seqlen_k=150, layout="bshd"),
]


def in_forms(**cases: list[AttentionCase]) -> pytest.MarkDecorator:
    """Parametrise a test by the form of the kernel that takes a case, and the case."""
    every = [pytest.param(form, case, id=f"{form}-{case.name}") for form, some in cases.items() for case in some]
    return pytest.mark.parametrize(("form", "case"), every)


@in_forms(keys=CASES, columns=WIDE, mla=MLA)
def test_gradients(form: str, case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = interpret_backward(monkeypatch, seed=3, interleave=form != "keys", form=form)
    assert not run_backward(case)
    assert kernel.launches == 1


@in_forms(
    keys=[
        case("dense_128", head_dim=128, causal=True, seqlen_q=70, seqlen_k=150, heads=4, heads_kv=2, layout="bshd"),
        case("samples_80", head_dim=80, batch=2, seq_lens=(130, 65), seqlen_k=150),
        case("sequences", layout="thd", lens_q=(70, 0, 9), lens_k=(65, 3, 130), slack=5),
        case("block_mask", mask="1h:128:0.6", head_dim=128),
    ],
    columns=[
        case("wide_192", head_dim=192, head_dim_v=192, seqlen_q=70, seqlen_k=100),
        case("packed", heads=1, head_dim=200, head_dim_v=72, layout="thd", lens_q=(70, 9), lens_k=(65, 7), slack=5),
    ],
    mla=[case("packed", head_dim=192, head_dim_v=128, layout="thd", lens_q=(70, 1), lens_k=(65, 3), slack=5)],
)
def test_gradients_that_are_to_be_added_up(form: str, case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come in float32, are the others before those are rounded, and nothing else is written."""
    kernel = interpret_backward(monkeypatch, seed=3, form=form)
    q, k, v, dout, dlse, given, *_ = make_inputs(case)
    lengths = Lengths(**{name: given.pop(name) for name in LENGTHS if name in given})
    if (mask := given.pop("mask", None)) is not None:
        given |= {"mask_blocks": mask.blocks, "mask_bits": mask.bits}
    options = checked_options(q, k, v, lengths, {**given, "layout": case.layout, "backend": "cuda", "variant": "sm90"})
    q, k, v = (x.detach() for x in (q, k, v))
    with poisoned_allocations(), torch.no_grad():
        results = ops.forward(q, k, v, lengths, options)
        found, rounded = (
            ops.differentiate((dout, dlse), (q, k, v), results, lengths, options._replace(out_dtype=dtype))[:3]
            for dtype in ("float32", "")
        )
    assert kernel.launches == 2
    for wide, narrow in zip(found, rounded, strict=True):
        assert wide.dtype == torch.float32 and narrow.dtype == q.dtype
        assert torch.equal(wide.to(q.dtype), narrow) and not torch.equal(wide, narrow.float())


@in_forms(
    keys=[
        case("heads_bshd", heads=8, heads_kv=2, layout="bshd", batch=2, seqlen_q=70, seqlen_k=140, causal=True),
        case("all_of_a_head", heads=3, head_dim=128, seqlen_q=70, alibi="h", causal=True),
        case("samples", heads=4, batch=2, seq_lens=(130, 65), seqlen_k=150, sinks=True, dtype="float16"),
        case("sequences", heads=4, layout="thd", lens_q=(70, 0, 9), lens_k=(65, 3, 130), slack=5, head_dim=40),
        case("transposed_72", heads=4, heads_kv=2, view="transposed", seqlen_q=70, head_dim=72, window=(60, 10)),
    ],
    columns=[
        case("wide", head_dim=200, head_dim_v=72, seqlen_q=70, seqlen_k=100),
        case("five_parts_wider_v", batch=2, heads=5, head_dim_v=136, seqlen_q=64, seqlen_k=40),
    ],
    mla=[case("packed", heads=4, head_dim=192, head_dim_v=128, layout="thd", lens_q=(70, 1), lens_k=(65, 3), slack=5)],
)
def test_groups_divided_among_programs(form: str, case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into parts of two query heads or, where a group is small or odd, of one: more programs, the same gradients."""
    group = case.heads // case.heads_kv
    monkeypatch.setattr(
        bwd_partials, "count_subgroups", lambda *_: group // 2 if group > 2 and group % 2 == 0 else group
    )
    sums: list[Launch] = []
    make_launch = bwd_partials.make_launch

    def counted(*arguments: Any) -> Launch:
        sums.append(make_launch(*arguments))
        return sums[-1]

    monkeypatch.setattr(bwd_partials, "make_launch", counted)
    kernel = interpret_backward(monkeypatch, seed=5, form=form, interleave=True, multiprocessors=3)
    assert not run_backward(case)
    assert (kernel.launches, len(sums)) == (1, 1)


def test_how_many_parts_a_group_has() -> None:
    """As few as give each multiprocessor about a block of keys, two under a causal mask; none has fewer than 512
    queries, nor do all together need more than 512 MiB."""
    one = AttentionProblem("cuda", "sm_90", "bfloat16", "bhsd", 1, 8, 1, 8192, 8192, 128, 128, -1, 0)
    tile = bwd_configs.select_config(one)

    def subgroups(**changes: Any) -> int:
        return bwd_partials.count_subgroups(one.replace(**changes), tile.block_n, 132)

    assert [subgroups(heads_kv=heads) for heads in (1, 2, 4, 8)] == [4, 2, 1, 1]
    assert [subgroups(batch=batch) for batch in (1, 2, 4)] == [4, 2, 1]
    assert subgroups(heads_q=7) == 7
    assert subgroups(heads_q=71) == 1 and subgroups(heads_q=61) == 61  # blocks, 64 for each head, of 128 KiB
    assert [subgroups(batch=1, seqlen_k=n, heads_q=7) for n in (224 * 128, 225 * 128)] == [7, 1]  # 1.7 times 132
    wide = bwd_configs.CONFIGS[256]
    assert [bwd_partials.count_subgroups(one.replace(heads_kv=n), wide.block_n, 132) for n in (1, 2, 4)] == [2, 1, 1]
    for mask in ({"window_right": -1}, {"window_left": 512}):
        assert [subgroups(batch=batch, **mask) for batch in (1, 2)] == [2, 1]
    assert [subgroups(seqlen_q=n) for n in (1024, 128, 64, 1)] == [4, 2, 1, 1]
    packed = {"layout": VARLEN, "batch": 64, "seqlen_q": 1024, "seqlen_k": 1024, "total_q": 8192}
    assert [subgroups(**packed, total_k=n) for n in (0, 8192, 16384, 65536)] == [8, 4, 2, 1]


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 6))])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_interleaving(head_dim: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_backward(monkeypatch, seed=seed, interleave=True)
    assert not run_backward(case("small", head_dim=head_dim, seqlen_q=200, seqlen_k=300, causal=True))


ROLLING = [
    case("128", batch=2, heads=3, heads_kv=3, head_dim=128, seqlen_q=150, seqlen_k=150, causal=True),
    case("gqa_bshd", batch=3, heads=4, heads_kv=2, layout="bshd", seqlen_q=300, seqlen_k=130),
    case("96_window", batch=2, heads=4, heads_kv=4, head_dim=96, seqlen_q=70, seqlen_k=330, window=(100, 20)),
    case("packed_qkv", batch=4, layout="bshd", packing="qkv", heads_kv=2, seqlen_q=140, seqlen_k=140, dtype="float16"),
    case("few_queries", batch=5, seqlen_q=64, seqlen_k=300, head_dim=40),
    case("keys_that_nobody_sees", batch=3, seqlen_q=64, seqlen_k=300, window=(5, 0)),
    case("queries_that_see_nothing", batch=3, heads_kv=2, seqlen_q=300, seqlen_k=100, causal=True),
]


@pytest.mark.parametrize("window", [(1, 1, 2), (1, 3, 4), (2, 2, 4)])
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in ROLLING])
def test_heads_whose_fp32_dq_shares_memory(
    case: AttentionCase, window: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """(heads_in_turns, lag, slots): as few as can be, and some, for many more heads."""
    monkeypatch.setattr(bwd_launch.Sm90Backward, "_window", lambda backward: window)
    kernel = interpret_backward(monkeypatch, seed=sum(window), interleave=True, multiprocessors=3)
    assert not run_backward(case)
    assert kernel.launches == 1


def drawn(heads: int, blocks: int, interleaved_heads: int, deterministic: bool = False) -> list[tuple[int, int]]:
    """(head, block of keys) in the order of program numbers: head after head, and the last ones in turns; or all in
    turns, so many at a time, and each from its last block to the first."""
    if deterministic:
        turns = (range(first, min(first + interleaved_heads, heads)) for first in range(0, heads, interleaved_heads))
        return [(head, block) for some in turns for block in reversed(range(blocks)) for head in some]
    first = heads - interleaved_heads
    apart = [(head, block) for head in range(first) for block in range(blocks)]
    return apart + [(head, block) for block in range(blocks) for head in range(first, heads)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("interleaved_heads", [1, 2, 4, 5, 6])
def test_the_order_of_the_blocks_of_keys(interleaved_heads: int, deterministic: bool) -> None:
    found = hopper_key_block_kernel.order(
        batch=2,
        heads_kv=3,
        group_size=4,
        seqlen_k=130,
        interleaved_heads=interleaved_heads,
        block_n=64,
        deterministic=deterministic,
    )
    expected = drawn(6, 3, interleaved_heads, deterministic)
    assert found == [(head // 3, head % 3, block * 64) for head, block in expected]


@pytest.mark.parametrize("widths", [(64, 64), (192, 128), (256, 256)], ids=str)
def test_which_heads_take_turns(widths: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of those at work: where blocks of keys differ in length and may come in any order, or where those of a head
    would all begin with the same queries, for which they wait for each other."""
    monkeypatch.setattr(bwd_launch, "multiprocessors", lambda device: 132)
    size = {"heads_q": 40, "heads_kv": 40, "seqlen_q": 640, "seqlen_k": 640}
    every = PROBLEM.replace(head_dim=widths[0], head_dim_v=widths[1], **size)

    def interleaved(*masks: tuple[int, int], deterministic: bool = False) -> list[int]:
        found = []
        for left, right in masks:
            problem = every.replace(window_left=left, window_right=right, deterministic=deterministic)
            _, k, v, out = zeros(problem)
            found.append(launcher_of(problem).gradient(out, k, v).arguments["interleaved_heads"])
        return found

    assert interleaved((-1, 0), (100, 0), (-1, -1)) == [14 if widths[0] == 256 else 20, 1, 1]
    if widths == (64, 64):
        assert interleaved((-1, 0), (-1, -1), (100, -1), deterministic=True) == [1, 14, 1]


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window_right", [-1, 0])
def test_programs_wait_for_lower_numbers_only(
    window_right: int, deterministic: bool, divided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share is drawn behind all keys of its head, and keys of a head behind all shares of the one that had its
    memory: those that wait may be all that run."""
    problem = PROBLEM.replace(window_right=window_right, deterministic=deterministic)
    in_turns = deterministic == (window_right < 0)
    seen = set()
    for multiprocessors in (1, 2, 132):
        monkeypatch.setattr(bwd_launch, "multiprocessors", lambda device, count=multiprocessors: count)
        for heads, seqlen_k in itertools.product((1, 2, 3, 4, 5, 7, 40, 300), (1, 128, 129, 500, 5000)):
            heads_kv = 1 if divided else heads
            monkeypatch.setattr(bwd_partials, "count_subgroups", lambda *_, subgroups=heads // heads_kv: subgroups)
            some = problem.replace(heads_q=heads, heads_kv=heads_kv, seqlen_k=seqlen_k)
            backward, block_n = launcher_of(some, "meta"), bwd_configs.select_config(some).block_n
            blocks, slots, delay = -(-seqlen_k // block_n), backward.slots, backward.delay
            order = drawn(heads, blocks, backward.interleaved_heads, deterministic)
            first, last = {}, {}
            for number, (head, _) in enumerate(order):
                first.setdefault(head, number)
                last[head] = number
            for head in range(heads):
                shares = range((head + delay) * blocks, (head + delay + 1) * blocks)  # who draws them
                assert last[head] < shares[0]
                assert head + slots >= heads or shares[-1] < first[head + slots]
            assert (backward.interleaved_heads > 1) <= in_turns
            seen.add((slots < heads, backward.interleaved_heads > 1))
    assert seen == {(False, False), (True, False)} | ({(False, True), (True, True)} if in_turns else set())


@pytest.mark.parametrize("head_dim", [64, 96])
def test_dq_is_the_same_whoever_converts_it(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main kernel, or where that cannot one behind it."""
    interpret_backward(monkeypatch)
    torch.manual_seed(0)
    q, k, v, out, dout = (torch.randn(2, 1, n, head_dim).bfloat16() for n in (130, 200, 200, 130, 130))
    problem = AttentionProblem("cuda", "sm_90", "bfloat16", "bhsd", 2, 1, 1, 130, 200, head_dim, head_dim)
    problem = problem.replace(deterministic=True)
    found = []
    for rolls in (True, False):
        monkeypatch.setattr(bwd_launch, "_can_roll", lambda *_, rolls=rolls: rolls)
        dq = torch.full_like(q, float("nan"))
        gradients = AttentionGradients(dq, torch.empty_like(k), torch.empty_like(v))
        tensors = AttentionTensors(q, k, v, 0.1)
        launch_each(
            bwd_launch.backward_pass(problem, tensors, out, torch.zeros(2, 1, 130), dout, None, gradients).launches
        )
        found.append(dq)
    assert torch.equal(*found)


# Sizes and masks that begin and end within blocks: heads, heads_kv, Sq, Sk, head_dim, bounds.
DETERMINISTIC = {
    "full": (2, 1, 130, 300, 64, -1, -1), "heads_96": (5, 5, 130, 200, 96, -1, 0),
    "window_128": (1, 1, 200, 300, 128, 70, 40), "wide": (2, 1, 130, 200, 136, -1, 0),
    "latent": (1, 1, 70, 130, (136, 72), -1, -1),
}  # fmt: skip


def sums(
    sizes: tuple[Any, ...], seed: int, kernels: ModuleType = hopper_bwd, n_keys: int | None = None, at_once: bool = True
) -> list[torch.Tensor]:
    """[dq, dk, dv] with `deterministic` of programs that run all at once, or each when the one before has ended.
    `n_keys`: where the sample ends."""
    h, hk, sq, sk, of_heads, left, right = sizes
    d, dv = of_heads if isinstance(of_heads, tuple) else (of_heads, of_heads)
    torch.manual_seed(0)
    q, out, dout = (torch.randn(1, h, sq, columns).bfloat16() for columns in (d, dv, dv))
    k, v = (torch.randn(1, hk, sk, columns).bfloat16() for columns in (d, dv))
    problem = AttentionProblem("cuda", "sm_90", "bfloat16", "bhsd", 1, h, hk, sq, sk, d, dv, left, right)
    problem = problem.replace(deterministic=True, seq_lens=n_keys is not None)
    assert bwd_configs.refuses(problem) is None
    lengths = None if n_keys is None else torch.tensor([n_keys], dtype=torch.int32)
    tensors, lse = AttentionTensors(q, k, v, 0.1, seq_lens=lengths), torch.zeros(1, h, sq)
    gradients = AttentionGradients(*(torch.full_like(x, float("nan")) for x in (q, k, v)))
    backward = bwd_launch.Sm90Backward(problem, tensors, bwd_configs.select_config(problem), lse, gradients.dq)
    with pytest.MonkeyPatch.context() as monkeypatch:
        interpret_backward(monkeypatch, seed=seed, interleave=at_once, kernels=kernels, fixed_order=True)
        for launch in backward.launches(out, dout, None, None, gradients):
            launch_kernel(launch)
    return [gradients.dq, gradients.dk, gradients.dv]


def assert_same_bits(name: str) -> None:
    """Programs that run all at once, in two orders, and one after another compute the same gradients.

    The last shows that no program waits for one that has not started: the GPU may be full of other kernels."""
    first, *others = (
        sums(DETERMINISTIC[name], seed, at_once=at_once) for seed, at_once in ((0, True), (5, True), (0, False))
    )
    assert first[0].count_nonzero()
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic(name: str) -> None:
    assert_same_bits(name)


def test_deterministic_with_a_group_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bwd_partials, "count_subgroups", lambda problem, *_: problem.heads_q // problem.heads_kv)
    assert_same_bits("full")


@pytest.mark.parametrize("lens", [((60,), (200,)), ((200, 60), (60, 60))], ids=["keys", "queries"])
def test_sequences_longer_than_said_end(lens: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for blocks that are not drawn: the first rows have gradients, the others zeros."""
    interpret_backward(monkeypatch, interleave=True, fixed_order=True)
    batch, longest = len(lens[0]), 90 if len(lens[0]) == 1 else 60
    total_q, total_k = (sum(x) for x in lens)
    problem = AttentionProblem("cuda", "sm_90", "bfloat16", VARLEN, batch, 2, 1, longest, longest, 64, 64)
    problem = problem.replace(total_q=total_q, total_k=total_k, deterministic=True)
    torch.manual_seed(0)
    q, out, dout = (torch.randn(total_q, 2, 64).bfloat16() for _ in range(3))
    k, v = (torch.randn(total_k, 1, 64).bfloat16() for _ in range(2))
    offsets = [torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32) for x in lens]
    tensors = AttentionTensors(q, k, v, 0.1, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1])
    gradients = AttentionGradients(*(torch.full_like(x, float("nan")) for x in (q, k, v)))
    with poisoned_allocations():
        launch_each(
            bwd_launch.backward_pass(problem, tensors, out, torch.zeros(2, total_q), dout, None, gradients).launches
        )
    assert all(x.isfinite().all() for x in gradients[:3])
    for x, lengths in zip(gradients[:3], (lens[0], lens[1], lens[1]), strict=True):
        first = 0
        for n in lengths:
            assert x[first : first + min(n, longest)].count_nonzero()
            assert not x[first + longest : first + n].count_nonzero()
            first += n


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "n_keys"), [(256, 512, 384), (128, 129, None)])
def test_turns_where_blocks_end_or_begin(seqlen_q: int, seqlen_k: int, n_keys: int | None) -> None:
    """A program that counted one too many or too few before it, or programs without keys, would wait for ever: where
    queries and keys end with blocks, and where one key of a block is seen by one query."""
    assert sums((1, 1, seqlen_q, seqlen_k, 64, -1, 0), 0, n_keys=n_keys)[0].count_nonzero()


@pytest.mark.parametrize("shift", ["address", "rows"])
def test_an_output_that_is_not_aligned_is_copied(shift: str) -> None:
    """Kernels read out and dout 16 bytes at a time. The operator takes any out."""
    problem = AttentionProblem("cuda", "sm_90", "bfloat16", "bhsd", 1, 2, 2, 70, 70, 64, 64)
    q, dout = torch.zeros(1, 2, 70, 64).bfloat16(), torch.zeros(1, 2, 70, 64).bfloat16()
    values = torch.randn(1, 2, 70, 64).bfloat16()
    memory = torch.zeros(2 * 70 * 65 + 1).bfloat16()
    if shift == "address":
        out = memory[1 : 1 + 2 * 70 * 64].view(1, 2, 70, 64)
    else:
        out = memory[: 2 * 70 * 65].view(1, 2, 70, 65)[..., :64]
    out.copy_(values)
    gradients = AttentionGradients(*(torch.empty_like(q) for _ in range(3)))
    tensors = AttentionTensors(q, q, q, 1.0)
    found = bwd_launch.backward_pass(problem, tensors, out, torch.zeros(1, 2, 70), dout, None, gradients)
    given = next(x.arguments["o_ptr"] for x in found.launches if "o_ptr" in x.arguments)
    assert torch.equal(given, values) and given.data_ptr() % 16 == 0 and all(x % 8 == 0 for x in given.stride()[:-1])


@pytest.mark.parametrize("deterministic", [False, True])
def test_parts_of_the_workspace_are_aligned(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where blocks of queries are odd in number: Triton compiles a kernel again for an address that is not."""
    monkeypatch.setattr(bwd_partials, "count_subgroups", lambda *_: 3)
    backward = launcher_of(PROBLEM.replace(heads_q=3, heads_kv=1, deterministic=deterministic))
    memory = [backward.dq_acc, backward.statistics, backward.counter, backward.counts, backward.semaphores]
    memory += backward.dk_dv_partials
    assert [x.storage_offset() % 4 for x in memory if x is not None] == [0] * (6 + deterministic)


@pytest.mark.parametrize("changes", [
    {}, {"head_dim": 128}, {"head_dim": 192}, {"deterministic": True}, {"seq_lens": True}, {"heads_kv": 1},
    {"alibi": True}, {"alibi": True, "head_dim": 192},
])  # fmt: skip
def test_calls_can_be_repeated_past_the_launcher(changes: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """What repeats a launch for other addresses (`runtime/passes.py`) takes kernels whose tensors come first only."""
    monkeypatch.setattr(bwd_partials, "count_subgroups", lambda problem, *_: problem.heads_q // problem.heads_kv)
    problem = PROBLEM.replace(**changes).replace(head_dim_v=changes.get("head_dim", 64))
    lengths = torch.tensor([64], dtype=torch.int32) if problem.seq_lens else None
    backward = launcher_of(problem, seq_lens=lengths, alibi_slopes=torch.zeros(2) if problem.alibi else None)
    q, k, v, out = zeros(problem)
    for launch in backward.launches(out, torch.zeros_like(out), None, None, AttentionGradients(q, k, v)):
        handed_on = {name for name, x in launch.arguments.items() if type(x) not in (int, float)}
        # Whose address is nothing: the replay could not tell where it lies.
        assert not any(isinstance(x, torch.Tensor) and not x.numel() for x in launch.arguments.values())
        assert set(launch.kernel.arg_names[: len(handed_on)]) == handed_on


@pytest.mark.parametrize("lost", ["wait_until_equal", "wait_for_stores", "increment_semaphore"])
def test_all_parts_of_a_turn_are_needed(lost: str, tmp_path: Path) -> None:
    source, count = re.subn(rf"^( +){lost}\(.*\)$", r"\1pass", kernel_source("hopper.bwd"), flags=re.MULTILINE)
    assert count == 1
    kernels = load_kernel({"hopper.bwd": source}, tmp_path, BACKWARD_MODULES)
    with pytest.raises(KernelBug, match=r"nothing orders it after that of somebody else|turn 1"):
        sums((1, 1, 64, 200, 64, -1, -1), 0, kernels)


REFUSED = {
    "softcap beside ALiBi up to head_dim 64": {"alibi": True, "softcap": 5.0},
    "attn_bias": {"bias": "float16"},
    "dropout": {"dropout": True},
    "33 to 256": {"head_dim_v": 32},
    "multiples of 8 from": {"head_dim": 264, "head_dim_v": 264},
    "16 bytes": {"aligned": False},
    "float32": {"dtype": "float32"},
    "in bfloat16 or float32, not in float64": {"out_dtype": "float64"},
    "sm_80": {"arch": "sm_80"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_refuses(words: str) -> None:
    assert bwd_configs.refuses(PROBLEM) is None
    assert words in (bwd_configs.refuses(PROBLEM.replace(**REFUSED[words])) or "")


@pytest.mark.parametrize("d, dv, softcap, columns", [
    (40, 40, 0.0, 64), (64, 64, 5.0, 64), (72, 72, 0.0, 128), (128, 128, 5.0, 128), (64, 40, 0.0, 256),
    (128, 64, 0.0, 256), (64, 128, 0.0, 256), (136, 128, 0.0, 192), (192, 40, 0.0, 192), (192, 128, 5.0, 256),
    (192, 136, 0.0, 256), (200, 128, 0.0, 256), (192, 192, 0.0, 256),
])  # fmt: skip
def test_which_kernel_takes_which_heads(d: int, dv: int, softcap: float, columns: int) -> None:
    """Also where another one would be right, but slower."""
    problem = AttentionProblem("cuda", "sm_90", "bfloat16", "bhsd", 1, 4, 4, 512, 512, d, dv)
    assert bwd_configs.select_config(problem.replace(softcap=softcap)) == bwd_configs.CONFIGS[columns]
    for change in ({"deterministic": True}, {"alibi": True}):
        changed = problem.replace(softcap=softcap, **change)
        assert bwd_configs.select_config(changed) == bwd_configs.CONFIGS[256 if columns == 192 else columns]


@pytest.mark.parametrize("head_dim, programs", [(128, [3, 6]), (192, [6, 6])])
def test_programs_stay_where_blocks_of_keys_are_many(
    head_dim: int, programs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = PROBLEM.replace(seqlen_k=260, head_dim=head_dim, head_dim_v=128)
    _, k, v, out = zeros(problem)
    grids = []
    for count in (3, 7):
        monkeypatch.setattr(bwd_launch, "multiprocessors", lambda device, count=count: count)
        grids.append(launcher_of(problem).gradient(out, k, v).grid)
    assert grids == programs


PACKED = {"layout": VARLEN, "total_q": 8192, "total_k": 8192, "batch": 2}
CHOSEN = {  # name of the kernel for changes of 32 heads, 4096 queries and keys, 128 columns
    "sm90": ({}, {"seqlen_k": 512}, {"deterministic": True}, {"window_left": 1023, "window_right": 0}, PACKED,
             {"out_dtype": "float32"}, {"alibi": True}, {"alibi": True, "softcap": 30.0}),
    "split": (
        {"seqlen_k": 511}, {"seqlen_k": 512, "deterministic": True}, {"window_left": 127, "window_right": 0},
        {"seqlen_q": 64, "seqlen_k": 1024}, {"alibi": True, "mask": (128, 128)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name, changes", [(name, c) for name, some in CHOSEN.items() for c in some])
def test_where_it_is_chosen(name: str, changes: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bwd_configs, "environment_refusal", lambda: None)
    problem = AttentionProblem("cuda", "sm_90", "bfloat16", "bhsd", 1, 32, 32, 4096, 4096, 128, 128)
    kernel = registry.choose("attention_bwd", problem.replace(**changes), registry.load_backend("cuda"))
    assert kernel.name == name


def test_rows_beyond_a_sample_are_zeros_whatever_its_keys_are(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_backward(monkeypatch)
    torch.manual_seed(0)
    q, k, v, out, dout = (torch.randn(1, 1, 128, 136).bfloat16() for _ in range(5))
    v[:, :, 3] = float("inf")
    problem = AttentionProblem("cuda", "sm_90", "bfloat16", "bhsd", 1, 1, 1, 128, 128, 136, 136, seq_lens=True)
    tensors = AttentionTensors(q, k, v, 0.1, seq_lens=torch.tensor([70], dtype=torch.int32))
    gradients = AttentionGradients(*(torch.full_like(x, float("nan")) for x in (q, k, v)))
    found = bwd_launch.backward_pass(problem, tensors, out, torch.zeros(1, 1, 128), dout, None, gradients)
    launch_each(found.launches)
    assert not any(x[:, :, 70:].count_nonzero() for x in gradients[:3])


OFF = {  # ways of a gradient to lie so that TMA cannot read it: of (1, 1, 64, 64)
    "address": lambda x: torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x),
    "rows": lambda x: torch.zeros(1, 1, 64, 65, dtype=x.dtype)[..., :64].copy_(x),
    "steps": lambda x: torch.zeros(1, 1, 64, 128, dtype=x.dtype)[..., :64].copy_(x),
    "expanded": lambda x: x,
}


@pytest.mark.parametrize("where", OFF)
def test_a_gradient_that_tma_cannot_read_is_copied(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel was chosen with the forward pass, when nobody knew how the gradient would lie."""
    kernel = interpret_backward(monkeypatch)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1, 64, 64).bfloat16() for _ in range(4))
    if where == "expanded":
        dout = torch.ones((), dtype=q.dtype).expand(q.shape)
    options: dict[str, Any] = {"variant": "sm90", "backend": "cuda"}
    if where == "steps":
        options["seq_lens"] = torch.tensor([60], dtype=torch.int32)

    def differentiated(dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(diyfa.flash_attention(*leaves, **options), leaves, dout)

    want = differentiated(dout.contiguous())
    if where == "steps":
        monkeypatch.setattr(bwd_launch, "has_few_steps", lambda layout, x: x.is_contiguous())  # and no others
    found = differentiated(OFF[where](dout))
    assert kernel.launches == 2 and all(map(torch.equal, found, want))


@pytest.mark.parametrize("wanted", ["dq", "dk", "dv"])
def test_gradients_that_tma_cannot_write_are_refused(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator that fills given buffers chooses with them."""
    kernel = interpret_backward(monkeypatch)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1, 64, 64).bfloat16() for _ in range(4))
    options = checked_options(q, k, v, NO_LENGTHS, {"layout": "bhsd", "backend": "cuda", "variant": "sm90"})
    options = options._replace(needs_grad=True)
    packed = pack(NO_LENGTHS, options)
    out, lse = torch.ops.diyfa.attention_fwd(q, k, v, "", *packed)

    def differentiated(**buffers: torch.Tensor) -> list[torch.Tensor]:
        into = {name: torch.empty_like(x) for name, x in zip(("dq", "dk", "dv"), (q, k, v), strict=True)} | buffers
        torch.ops.diyfa.attention_bwd_out(dout, None, q, k, v, out, lse, *into.values(), torch.empty_like(lse), *packed)
        return list(into.values())

    want = differentiated()
    assert kernel.launches == 1
    found = differentiated(**{wanted: OFF["address"](torch.zeros_like(q))})
    assert kernel.launches == 1
    torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)
    backend = registry.load_backend("cuda")
    described = ops.describe_attention(backend, q, k, v, NO_LENGTHS, options).replace(aligned_gradients=False)
    with pytest.raises(ValueError, match="sm90: sm90 writes dq, dk and dv through TMA"):
        registry.choose("attention_bwd", described, backend, "sm90")


def test_inputs_that_32_bits_do_not_count_the_steps_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name raises; without it the portable kernels are chosen for both passes, and `explain` says why."""
    kernel = interpret_backward(monkeypatch)
    monkeypatch.setattr(bwd_configs, "by_name_only", lambda problem: None)
    monkeypatch.setattr(problems, "MAX_STEPS", 64)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 64, 64).bfloat16().requires_grad_() for _ in range(3))
    options: dict[str, Any] = {"seq_lens": torch.tensor([60], dtype=torch.int32), "backend": "cuda"}
    for call in (diyfa.flash_attention, diyfa.explain):
        with pytest.raises(ValueError, match="cannot run this attention_fwd: sm90: sm90 counts the steps"):
            call(q, k, v, variant="sm90", **options)
    explained = diyfa.explain(q, k, v, **options)
    assert explained.backward is not None
    for each, name in ((explained, "v2"), (explained.backward, "short")):
        assert each.kernel == name
        assert any("counts the steps" in x.reason for x in each.alternatives if x.kernel == "sm90")
    assert "a dout that TMA cannot read is copied" in str(diyfa.explain(q, k, v, variant="sm90", backend="cuda"))
    diyfa.flash_attention(q, k, v, **options).sum().backward()
    assert kernel.launches == 0


@pytest.mark.parametrize("mask", ["left", "right", "both", "none", "left, in order"])
def test_which_blocks_of_queries_a_program_visits(mask: str) -> None:
    """All that see one of its keys, no block before or behind them, and without a mask all that need none."""
    blocks, in_order = (16, 32), mask.endswith("in order")
    has_left, has_right = mask.startswith(("left", "both")), mask in ("right", "both")
    cases = configurations(*blocks, has_left, has_right, of_keys=True)
    cases = cases[cases[:, 1] > 0]
    found = hopper_key_block_kernel.run(cases, *blocks, has_left, has_right, in_order) * blocks[0]
    check(found, cases, True, blocks, True)
    ends = cases[:, 0] + blocks[1] > cases[:, 2]  # keys beyond the end need a mask
    assert torch.equal(found[ends, 1], found[ends, 2])
    assert check(found[~ends], cases[~ends], True, blocks, True) != in_order


@pytest.mark.parametrize("mask", ["left", "right", "both", "none"])
def test_which_blocks_of_keys_a_tile_visits(mask: str) -> None:
    """All that one of its queries sees. Behind the n_right and n_left ones of `block_order` none needs a mask."""
    blocks, has_left, has_right = (16, 32), mask in ("left", "both"), mask in ("right", "both")
    cases = configurations(*blocks, has_left, has_right, of_keys=False)
    found = hopper_key_block_kernel.run_tiles(cases, *blocks, has_left, has_right) * blocks[1]
    check(found, cases, False, blocks, False)
