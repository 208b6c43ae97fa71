"""The Hopper forward with a block mask, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import hopper_gluon  # noqa: F401
import pytest
import torch
from hopper_interpreted import interpret, interpreted_only, kernel_source, load_kernel, near_the_reference, run

import diyfa
from diyfa import BlockMask, block_mask, masks
from diyfa.backends.cuda.hopper import configs as hopper_configs
from diyfa.backends.cuda.hopper import prefill_configs
from diyfa.backends.cuda.hopper.configs import Sm90Config
from diyfa.features import SCORE_EXAMPLE
from diyfa.problem import AttentionProblem
from diyfa.reference import reference_attention
from diyfa.testing import AttentionCase

pytestmark = interpreted_only

TWO = Sm90Config(2, 128, 4, True, 240, 24)
DYNAMIC = replace(TWO, persistent=True, scheduler="dynamic", pingpong=True, pairs=True)
FIXED = replace(DYNAMIC, fixed_max=True, q_in_registers=1)
ONE = Sm90Config(1, 128, 4, True, 232, 24, fixed_max=True)
NARROW = Sm90Config(1, 64, 4, False, 232, 24, store_from_registers=True)  # two key blocks of a block of 128
BOXES = replace(DYNAMIC, box_columns=64, q_in_registers=2)
SMALL = hopper_configs.SMALL_MASK_CONFIGS


def case(name: str, mask: str, **changes) -> AttentionCase:
    sizes = {"batch": 1, "heads": 2, "heads_kv": 1, "seqlen_q": 300, "seqlen_k": 420, "head_dim": 64}
    return AttentionCase(name, mask=mask, **{**sizes, "dtype": "bfloat16", **changes})


CASES = [
    (case("equal", "11:128:0.6"), TWO),
    (case("dynamic", "11:128:0.6", heads=3, heads_kv=3), DYNAMIC),
    (case("fixed", "1h:128:0.7", seqlen_k=900), FIXED),
    (case("pairs_of_blocks", "11:128x64:0.7", seqlen_k=500), FIXED),
    (case("pairs_of_blocks_sparse", "bh:128x64:0.3", batch=2, heads=2, seqlen_q=200, seqlen_k=700), DYNAMIC),
    (case("halves_of_blocks", "11:128:0.6"), NARROW),
    (case("halves_of_blocks_64", "11:64x128:0.6"), NARROW),
    (case("small_queries", "bh:64:0.5", batch=2, seqlen_q=150), ONE),
    (case("small_64", "1h:64:0.5", seqlen_q=200, seqlen_k=700), SMALL[64]),
    (case("small_128", "1h:64:0.5", seqlen_q=200, seqlen_k=700, head_dim=128), SMALL[128]),
    (case("empty", "11:128:0"), DYNAMIC),
    (case("empty_sinks", "11:64:0", sinks=True, seqlen_q=70), ONE),
    (case("full", "11:128:1", seqlen_k=512), FIXED),
    (case("full_ragged", "11:128x64:1", seqlen_k=333), FIXED),
    (case("sparse", "11:64:0.02", seqlen_q=128, seqlen_k=600), ONE),
    (case("one_key", "11:128:0.7", seqlen_k=1), DYNAMIC),
    (case("one_query", "11:128x64:0.7", seqlen_q=1, seqlen_k=2100), ONE),
    (case("sinks_softcap", "1h:128:0.6", sinks=True, softcap=3.0, sm_scale=-1.0), DYNAMIC),
    (case("negative_scale", "11:128:0.6", sm_scale=-0.2), DYNAMIC),
    (case("d128", "11:128:0.6", head_dim=128, dtype="float16"), BOXES),
    (case("d128_pairs_of_blocks", "11:128x64:0.5", head_dim=128, layout="bshd"), BOXES),
    (case("d192_128", "11:128:0.6", head_dim=192, head_dim_v=128, heads=1, seqlen_q=200), replace(NARROW, consumers=2)),
]


@pytest.mark.parametrize(("case", "config"), CASES, ids=lambda x: x.name if isinstance(x, AttentionCase) else "")
def test_results(case: AttentionCase, config: Sm90Config, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = interpret(monkeypatch, config, seed=sum(case.name.encode()) % 7)
    assert not run(case)
    assert kernel.launches == 1


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2, 3, 4, 5))])
def test_every_interleaving(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(FIXED, block_n=64)
    interpret(monkeypatch, config, seed, interleave=True)
    assert not run(case("small", "bh:128x64:0.6", seqlen_q=260, seqlen_k=330))


def dense_inputs(seqlen_q: int, seqlen_k: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, n, 64, generator=generator).bfloat16() for n in (seqlen_q, seqlen_k, seqlen_k)]


@pytest.mark.parametrize(("block", "config"), [((128, 64), FIXED), (64, ONE), (128, NARROW)], ids=str)
def test_keys_in_empty_blocks_are_not_read(block: object, config: Sm90Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they are. Of the rows, some see one key only, some none, and lists have odd lengths."""
    interpret(monkeypatch, config, seed=2)
    q, k, v = dense_inputs(200, 450)
    keep = torch.zeros(200, 450, dtype=torch.bool)
    keep[:130, 128:384] = True
    keep[:64, 0] = keep[60:120, 449] = True
    k[:, :, 130:250] *= 8
    mask = BlockMask.from_dense(keep, block)
    expected, expected_lse = reference_attention(q, k, v, mask=mask, return_lse=True, dtype=torch.float64)
    width = mask.block_size[1]
    seen = mask.kinds()[0, 0].any(0).repeat_interleave(width)[:450]
    k[:, :, ~seen], v[:, :, ~seen] = float("nan"), float("nan")
    out, lse = diyfa.flash_attention(q, k, v, mask=mask, return_lse=True, backend="cuda", variant="sm90")
    assert not seen.all() or width == 128
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4)
    assert (out[:, :, 130:] == 0).all() and (lse[:, :, 130:] == float("inf")).all()


@pytest.mark.parametrize("block", [64, (128, 64)], ids=str)
def test_lists_of_full_blocks(block: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """No code is loaded for them. If their number is odd, the first key block has an absent unit, which nobody sees."""
    interpret(monkeypatch, FIXED if block == (128, 64) else ONE, seed=1)
    q, k, v = dense_inputs(512, 320)
    keep = torch.zeros(512, 320, dtype=torch.bool)
    for i, n in enumerate((1, 2, 3, 0)):
        keep[128 * i : 128 * (i + 1), 64 : 64 * (n + 1)] = True
    near_the_reference(q, k, v, mask=BlockMask.from_dense(keep, block))


def test_rising_scores_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that overflow with the maximum of the first blocks: the second pass reads the same lists."""
    interpret(monkeypatch, replace(FIXED, block_n=64), seed=1)
    q, k, v = dense_inputs(256, 640)
    k[:, :, 400:] = q[:, :, :1] * 60
    keep = torch.ones(256, 640, dtype=torch.bool)
    keep[:, 70:100] = False
    keep[:128, 200:] = False
    near_the_reference(q, k, v, mask=BlockMask.from_dense(keep, (128, 64)))


def test_rows_that_see_full_blocks_only_need_no_second_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial blocks come first. Where they hide all keys of a row, a full block gives it its fixed maximum."""
    once = kernel_source("hopper.fwd").replace("if flags.any_flagged() != 0:", "if flags.any_flagged() < 0:")
    assert "< 0:" in once
    interpret(monkeypatch, replace(FIXED, block_n=64), kernels=load_kernel({"hopper.fwd": once}, tmp_path))
    q, k, v = dense_inputs(128, 320)
    keep = torch.ones(128, 320, dtype=torch.bool)
    keep[::2, :128] = False
    near_the_reference(q, k, v, mask=BlockMask.from_dense(keep, (128, 64)))


PROBLEM = AttentionProblem(
    "cuda", "sm_90", "bfloat16", "bhsd", 2, 16, 16, 4096, 4096, 128, 128, needs_grad=True, mask=(128, 128)
)
REFUSED = {
    "no alibi beside a block mask": {"alibi": True},
    "no seq_lens beside a block mask": {"seq_lens": True},
    "does not implement dropout": {"dropout": True},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_refuses(words: str) -> None:
    assert hopper_configs.refuses(PROBLEM) is None
    assert words in (hopper_configs.refuses(PROBLEM.replace(**REFUSED[words])) or "")


@pytest.mark.parametrize(
    "dims", [(40, 40), (64, 64), (64, 128), (96, 64), (128, 128), (192, 128), (192, 192), (256, 256)]
)
@pytest.mark.parametrize("block", [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_configs_fit_blocks(block: tuple[int, int], dims: tuple[int, int]) -> None:
    """A tile's queries lie in one block. Boxes that are stacked have rows that follow each other."""
    problem = PROBLEM.replace(mask=block, head_dim=dims[0], head_dim_v=dims[1])
    config = hopper_configs.select_config(problem)
    assert hopper_configs.refuses(problem) is None
    assert config.consumers * 64 == block[0]
    if block[1] < config.block_n:
        for d, other in (dims, dims[::-1]):
            assert hopper_configs.box_layout(d, other, config.box_columns)[0] <= prefill_configs.SWIZZLE_COLUMNS


@pytest.mark.parametrize(("columns", "programs"), [(64, 3), (128, 2)])
def test_programs_of_64_queries_share_a_multiprocessor(columns: int, programs: int) -> None:
    problem = PROBLEM.replace(mask=(64, 64), head_dim=columns, head_dim_v=columns)
    config = hopper_configs.select_config(problem)
    assert config.consumers == 1 and not config.persistent
    registers = 128 * (config.consumer_registers + config.producer_registers)
    width, boxes = hopper_configs.box_layout(columns, columns, config.box_columns)
    buffers = config.stages + 1 + config.separate_o_buffer  # of 64 rows
    assert programs * registers <= 1 << 16
    assert programs * (buffers * 64 * width * boxes * 2 + 2048) <= 227 * 1024


@pytest.mark.parametrize("head_dim", [64, 128])
def test_small_tiles(head_dim: int) -> None:
    """Few tiles, or blocks of 64 queries, have configs of their own with a mask, unless there is a score function."""
    few = PROBLEM.replace(batch=1, heads_q=2, heads_kv=2, head_dim=head_dim, head_dim_v=head_dim)
    of_masks, of_others = hopper_configs.SMALL_MASK_CONFIGS[head_dim], hopper_configs.SMALL[head_dim]
    blocks_of_64 = PROBLEM.replace(mask=(64, 64), head_dim=head_dim, head_dim_v=head_dim)
    select_config = hopper_configs.select_config
    assert select_config(few) == select_config(blocks_of_64) == of_masks
    assert select_config(few.replace(mask=())) == of_others
    with_function = select_config(few.replace(score_fn=SCORE_EXAMPLE))
    assert with_function == replace(of_others, block_n=with_function.block_n)


def test_heads_whose_tiles_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their keys and values fill L2_BYTES, with a block mask half of them."""
    monkeypatch.setattr(hopper_configs, "L2_BYTES", 8 * 2 * 2 * PROBLEM.seqlen_k * PROBLEM.head_dim)
    assert hopper_configs.heads_in_parallel(PROBLEM) == 4
    assert hopper_configs.heads_in_parallel(PROBLEM.replace(mask=(), window_right=0)) == 8
    twelve = PROBLEM.replace(mask=(), window_right=0, batch=3, heads_q=8, heads_kv=4)  # KV heads: two groups of six
    assert hopper_configs.heads_in_parallel(twelve) == 12
    assert hopper_configs.heads_in_parallel(PROBLEM.replace(mask=())) == 1


def test_the_kernel_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = interpret(monkeypatch, DYNAMIC)
    q, k, v = dense_inputs(200, 300)
    mask = block_mask(masks.causal, 1, 1, 200, 300)
    with diyfa.use_backend("cuda"):
        assert diyfa.explain(q, k, v, mask=mask).kernel == "sm90"
        diyfa.flash_attention(q, k, v, mask=mask)
    assert kernel.launches == 1
