"""The Hopper kernel over a latent cache without a GPU: right results and no undefined behaviour, in whatever order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hopper_interpreted import interpreted_only, kernel_source, load_changed, load_kernel
from kvcache_cases import CacheCase, assert_in_budget, make_call, run_case
from poison import poisoned_allocations
from simulators.gluon import InterpretedKernel, KernelBug, Race
from synchronising import Synchronising
from triton.experimental.gluon import language as gl

import diyfa
from diyfa import plan as planning
from diyfa import problem, registry
from diyfa.backends.cuda.attention import decode, stream_k
from diyfa.backends.cuda.hopper import decode_mla, decode_mla_configs
from diyfa.backends.cuda.runtime.passes import launch_each
from diyfa.problem import KVCacheProblem, KVCacheTensors
from diyfa.reference import reference_kvcache

pytestmark = interpreted_only


def interpret(
    monkeypatch: pytest.MonkeyPatch,
    programs: int = 2,
    seed: int = 3,
    interleave: bool = False,
    kernels: ModuleType = decode_mla,
    split_cost: int = 0,
) -> InterpretedKernel:
    """From now on this kernel runs all calls with a cache, here, and refuses none that it can run. Programs share
    tiles, unless `split_cost` forbids it."""
    kernel = InterpretedKernel(kernels._decode_mla_kernel, seed, interleave)
    monkeypatch.setattr(decode_mla, "_decode_mla_kernel", kernel)
    monkeypatch.setattr(stream_k, "multiprocessors", lambda device: programs)
    monkeypatch.setattr(decode_mla_configs, "environment_refusal", lambda: None)
    config = replace(decode_mla_configs.CONFIG, split_cost=split_cost)
    monkeypatch.setattr(decode_mla_configs, "CONFIG", config)
    backend = registry.load_backend("cuda")
    named = next(k for k in backend.kernels if (k.name, k.op) == ("sm90", "kvcache_fwd"))
    chosen = replace(named, repeat=None)
    monkeypatch.setattr(backend, "kernels", [chosen, *(k for k in backend.kernels if k is not named)])
    monkeypatch.setattr(planning, "plans", {})
    return kernel


def case(name: str, *lens: int, **changes) -> CacheCase:
    latent = {"heads": 16, "head_dim": 576, "head_dim_v": 512, "latent": True, "dtype": "bfloat16"}
    return CacheCase(name, lens, **{**latent, **changes})


def check(case: CacheCase) -> None:
    with diyfa.use_backend("cuda"), poisoned_allocations():
        out, lse, _, _ = run_case(case, "cpu")
    assert_in_budget(case, out, lse)


CASES = [
    case("ragged", 0, 1, 64, 150, spare=7),
    case("pages", 200, 33, page_size=64, seqlen_q=3, heads=64),
    case("tokens_end_in_two_blocks", 130, 65, page_size=128, seqlen_q=3, heads=32, heads_kv=2),
    case("leftpad", 70, 135, leftpad=(7, 66), batch_idx=True, causal=False, heads=8),
    case("append", 60, added=4, seqlen_q=4, heads=8),
    case("whole_cache", 128, 128, by="none", causal=False, heads=192, dtype="float16"),
    case("more_sequences_than_lanes", *(range(5, 400, 10)), heads=8),
    case("heads_128", 130, 64, heads=128, seqlen_q=2),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_out_and_lse(case: CacheCase, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = interpret(monkeypatch, programs=3)
    check(case)
    assert kernel.launches == 1


@pytest.mark.parametrize(
    ("programs", "split_cost", "heads", "lens"),
    [(4, 0, 128, (129, 290)), (6, 6, 128, (129, 1, 100)), (6, 0, 256, (129,))],
    ids=["parts", "whole tiles", "parts in turns"],
)
def test_tiles_that_share_keys_are_walked_at_the_same_time(
    programs: int, split_cost: int, heads: int, lens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two groups of heads of a sequence, or two of four in turns, by pairs of programs."""
    kernel = interpret(monkeypatch, programs=programs, split_cost=split_cost)
    check(case("groups", *lens, heads=heads))
    assert kernel.launches == 1


@pytest.mark.parametrize(("programs", "split_cost", "lens"), [(2, 0, (64, 100)), (7, 6, (400,)), (8, 6, (450,))])
def test_both_kernels_decide_alike_whether_programs_have_whole_tiles(
    programs: int, split_cost: int, lens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where a split costs nothing, though whole tiles take no longer; up to seven blocks where it costs six."""
    interpret(monkeypatch, programs=programs, split_cost=split_cost)
    check(case("whole_or_not", *lens, heads=8))


def test_several_blocks_of_a_chunk_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program has the whole tile, whose first token does not see the last key of the block before the last."""
    kernel = interpret(monkeypatch, programs=1)
    check(case("tokens_end_in_two_blocks", 65, 201, seqlen_q=4, heads=16, leftpad=(0, 7)))
    assert kernel.launches == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_of_all_is_not_rounded(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is measured from its rows' maxima so far: one sum divides, so a dominant weight must be exactly 1.

    Values are all alike, and each head's dominant key is another 3 to 5.5 nats above one key of the block before.
    """
    kernel = interpret(monkeypatch, programs=1)  # parts would have maxima of their own
    heads, keys = 16, 190
    cache = torch.zeros(1, keys, 1, 576, dtype=dtype)
    value = torch.randn(512, generator=torch.Generator().manual_seed(0)).to(dtype)
    cache[..., :512] = value
    cache[..., 512] = -40.0  # of all but the first block's key and the one that rises above it
    cache[:, 170, :, 512] = 0.0
    cache[:, 70, :, 512] = 4.0
    q = torch.zeros(1, 1, heads, 576, dtype=dtype)
    q[..., 512] = torch.linspace(0.75, 1.375, heads)
    lengths = torch.tensor([keys], dtype=torch.int32)
    with diyfa.use_backend("cuda"), poisoned_allocations():
        out = diyfa.flash_attn_with_kvcache(
            q, cache, cache[..., :512], cache_seqlens=lengths, softmax_scale=1.0, causal=True
        )
    assert kernel.launches == 1
    assert torch.equal(out, value.expand_as(out))


def test_a_cache_that_tma_cannot_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`flash_attn_with_kvcache` has no name for a kernel: the portable one is chosen."""
    kernel = interpret(monkeypatch, programs=3)
    described = KVCacheProblem(
        "cuda", "sm_90", "bfloat16", "bfloat16", "bshd", 2, 16, 1, 1, 4096, 576, 512, latent=True
    )  # fmt: skip
    for few_steps, reason in ((True, None), (False, decode_mla_configs.TOO_MANY_STEPS)):
        assert decode_mla_configs.refuses(described.replace(few_steps=few_steps)) == reason
    monkeypatch.setattr(problem, "MAX_STEPS", 64)
    check(case("far", 20, 90, heads=4))
    assert kernel.launches == 0


def test_shares_of_a_long_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than are added up at once; shares so long that to begin a tile counts as work."""
    shares, scan = kernel_source("hopper.decode_schedule"), "SCAN = gl.constexpr(128)"
    assert scan in shares
    monkeypatch.setattr(stream_k, "LONG_SHARE", gl.constexpr(1))  # for the combine kernel
    schedule, long_share = kernel_source("attention.stream_k"), "LONG_SHARE = tl.constexpr(8)"
    assert long_share in schedule
    sources = {
        "attention.stream_k": schedule.replace(long_share, long_share[:-2] + "1)"),
        "hopper.decode_schedule": shares.replace(scan, "SCAN = gl.constexpr(2)"),
    }
    kernels = load_kernel(sources, tmp_path, ("attention.stream_k", "hopper.decode_schedule", "hopper.decode_mla"))
    long_shares = case("long_shares", 129, 1, 40, heads=8)
    pairs = case("by_pairs", 129, heads=128, spare=64)  # each of which would have a block
    # 5: as many as there are blocks, from which on it counts.
    for programs, each in ((3, long_shares), (5, long_shares), (8, pairs)):
        with monkeypatch.context() as patch:
            interpret(patch, programs=programs, kernels=kernels)
            check(each)


@pytest.mark.parametrize("scale", [-0.2, 0.0, 1e-46])  # the last is 0 in float32
def test_scales(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call(case("scale", 70, heads=8)) | {"softmax_scale": scale, "return_softmax_lse": True}
    want, want_lse = reference_kvcache(**call, dtype=torch.float64)
    assert interpret(monkeypatch).launches == 0
    with diyfa.use_backend("cuda"):
        out, lse = diyfa.flash_attn_with_kvcache(**call | {"v_cache": call["k_cache"][..., :512]})
    torch.testing.assert_close(lse.double(), want_lse.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), want.double(), rtol=1e-2, atol=1e-2)


def unchecked(problem: KVCacheProblem, k: torch.Tensor, **given: torch.Tensor) -> list[torch.Tensor]:
    """Out and lse of both kernels, for values on a device, where nobody checks them."""
    q = torch.randn(problem.batch, 1, 8, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    tensors = KVCacheTensors(q, k, k[..., :512], 0.04, **given)
    results = []
    for kernel in (decode_mla, decode):
        out, lse = q.new_full((problem.batch, 1, 8, 512), float("nan")), torch.full(problem.lse_shape, float("nan"))
        launch_each(kernel.cache_pass(problem, tensors, out, lse).launches)
        results += [out, lse]
    return results


def test_values_that_nobody_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths and padding end with the cache, and rows and pages that it does not have are not looked at."""
    interpret(monkeypatch)
    k = torch.randn(3, 70, 1, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    lengths, rows, pads = ([99, 9, 9, -5, 65], [1, -1, 3, 0, 2], [-3, 0, 0, 0, 2**30])
    problem = KVCacheProblem("cuda", "sm_90", "bfloat16", "bfloat16", "bshd", 5, 8, 1, 1, 70, 576, 512)
    problem = problem.replace(latent=True, lengths=True, cache_batch_idx=True, leftpad=True)
    names = ("seqlens", "cache_batch_idx", "leftpad")
    given = {x: torch.tensor(y).int() for x, y in zip(names, (lengths, rows, pads), strict=True)}
    out, lse, want, want_lse = unchecked(problem, k, **given)
    assert lse.isfinite().any((1, 2)).tolist() == [True, False, False, False, False]
    torch.testing.assert_close(out.float(), want.float(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
    pages = torch.full((3, 64, 1, 576), float("nan")).bfloat16()
    pages[1] = k[0, :64]
    problem = problem.replace(batch=1, capacity=192, page_size=64, cache_batch_idx=False, leftpad=False)
    table = torch.tensor([[-1, 1, 3]], dtype=torch.int32)
    assert unchecked(problem, pages, seqlens=torch.tensor([192]).int(), block_table=table)[0].isfinite().all()


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2, 4, 5, 6, 7))])
def test_every_interleaving(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, programs=3, seed=seed, interleave=True)
    check(case("small", 290, 40, seqlen_q=2, page_size=64))


REFUSED = {
    "a window": {"window_left": 9},
    "softcap": {"softcap": 9.0},
    "packed queries": {"layout": "thd"},
    "num_splits=1": {"num_splits": 1},
    "batch_invariant": {"batch_invariant": True},
    "cache_leftpad with pages": {"leftpad": True},
    "pages are multiples": {"page_size": 16},
    "24 heads": {"heads_q": 24},
    "latent caches": {"latent": False},
    "float8": {"cache_dtype": "float8_e4m3fn"},
    "16 bytes": {"aligned": False},
    "sm_100": {"arch": "sm_100"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_refuses(words: str) -> None:
    problem = KVCacheProblem("cuda", "sm_90", "bfloat16", "bfloat16", "bshd", 4, 128, 1, 1, 4096, 576, 512, 64)
    problem = problem.replace(latent=True, lengths=True)
    assert decode_mla_configs.refuses(problem) is None
    assert words in (decode_mla_configs.refuses(problem.replace(**REFUSED[words])) or "")


SYNCHRONISING = ("mbarrier.expect", "fence_async_shared")
METHODS = ("acquire", "commit", "wait", "release")  # of channels

SOURCE = Synchronising(kernel_source("hopper.decode_mla"), SYNCHRONISING, METHODS)
LINES = [f"{i}: {line}" for i, line in enumerate(SOURCE.lines)]


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_nothing_is_superfluous(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any one wait, arrival or fence the interpreter reports a bug."""
    source = SOURCE.without(int(line.split(":")[0]))
    kernels = load_kernel({"hopper.decode_mla": source}, tmp_path, ("hopper.decode_mla",))
    interpret(monkeypatch, kernels=kernels)
    with pytest.raises(KernelBug):
        check(case("two_parts", 450, 200, seqlen_q=2))


MUTANTS = {
    "the last left half is released before its product is done": (
        "        o = warpgroup_mma_wait(0, deps=[o])\n        shared.left.channel.release(item - 1)\n",
        "        shared.left.channel.release(item - 1)\n        o = warpgroup_mma_wait(0, deps=[o])\n",
    ),
    "a left half is released before its product is done": (
        "        s, sums = warpgroup_mma_wait(0, deps=[s, sums])\n        o = (sums,)\n"
        "        shared.left.channel.release(item + i - 1)\n",
        "        shared.left.channel.release(item + i - 1)\n"
        "        s, sums = warpgroup_mma_wait(0, deps=[s, sums])\n        o = (sums,)\n",
    ),
    "a right half is released before its product is done": (
        "            o = (warpgroup_mma_wait(0, deps=[o[0]]),)\n            shared.right.channel.release(item)\n",
        "            shared.right.channel.release(item)\n            o = (warpgroup_mma_wait(0, deps=[o[0]]),)\n",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_stage_that_is_released_too_early_is_found(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program has both tiles. Each has more blocks than there are stages, so each stage is filled again."""
    kernels = load_changed("hopper.decode_mla", *MUTANTS[mutant], tmp_path)
    interpret(monkeypatch, programs=1, kernels=kernels)
    with pytest.raises(Race):
        check(case("two_tiles", 190, 200, heads=8))
