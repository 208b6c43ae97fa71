"""Mutations: does a test fail when the code is wrong? `python tests/manual/mutations.py [options] [name …]`

Each mutation changes one text in a copy of the tree and names the few tests that must notice. One by one they are
applied, the tests run, and the file put back. A mutation is caught when a test fails; it survives when all pass. The
tests are run without any mutation first, for a test that fails anyway catches nothing.

--npu-python PATH runs those that need npu tensors with that interpreter (torch_npu and triton-ascend; Makefile,
test-npu); without it they are left out. --list prints the names, --jobs runs several copies side by side. The exit
status is 0 when nothing survived and nothing went wrong.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
NO_TEST_FAILED, TESTS_FAILED = 0, 1  # pytest's exit statuses
CAUGHT, SURVIVED = "caught", "SURVIVED"


@dataclass(frozen=True)
class Mutation:
    """`old`, which stands in `file` once, becomes `new`; one of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    npu: bool = False


def matrix(backend: str, *cases: str, variant: str = "auto") -> tuple[str, ...]:
    """Cases of the attention matrix on one backend."""
    return tuple(
        f"tests/numerics/test_attention_matrix.py::test_attention[{backend}-{variant}-{case}]" for case in cases
    )


def hopper(*names: str) -> tuple[str, ...]:
    """Cases of the Hopper kernel's features, in its interpreter."""
    return tuple(f"tests/hopper/test_hopper_features.py::test_results[{name}-]" for name in names)


def far(*names: str) -> tuple[str, ...]:
    """Its cases whose sums overflow."""
    return tuple(f"tests/hopper/test_hopper_fixed_max.py::test_within_budget[{name}-]" for name in names)


def context_parallel(*names: str) -> tuple[str, ...]:
    """Tests of attention over several processes."""
    return tuple(f"tests/distributed/test_{name}" for name in names)


def hostile(test: str, *names: str) -> tuple[str, ...]:
    """Cases of a test in test_hopper_hostile.py, or all of them."""
    where = f"tests/hopper/test_hopper_hostile.py::test_{test}"
    return tuple(f"{where}[{name}]" for name in names) or (where,)


SCORES, FWD = "backends/cuda/attention/scores.py", "backends/cuda/attention/fwd.py"
DKDV, DQ, BWD = (
    "backends/cuda/attention/bwd_dkdv.py",
    "backends/cuda/attention/bwd_dq.py",
    "backends/cuda/attention/bwd.py",
)
LAUNCH, PRIMITIVES = "backends/cuda/attention/launch.py", "backends/npu/attention/primitives.py"
RANGES = "tests/numerics/test_block_ranges.py::"
LENGTHS = "tests/frontend/test_wrong_lengths.py::"
FAST_PATH = "diyfa/fast_path.py"
REPEATED = "tests/frontend/test_fast_path.py::"
REPEAT = "tests/cuda/test_repeat.py::"
STRIDES = "tests/numerics/test_strides.py::test_each_tensor_may_lie_otherwise_in_a_repeated_call"
INSTRUMENTS = "tests/frontend/test_testing.py::"
DEMO = "tests/tools/test_cli.py::test_demo_tells_curves_apart"
BLOCKS = (RANGES + "test_cuda_blocks",)
NPU_BLOCKS = ("tests/npu/test_npu_block_ranges.py",)
SM90, TILES, SOFTMAX = "backends/cuda/hopper/fwd.py", "backends/cuda/hopper/tiles.py", "backends/cuda/hopper/softmax.py"
WINDOW = (RANGES + "test_a_normalised_window_shows_the_same_keys",)

MUTATIONS = [
    Mutation(
        "ring_sink_joins_in_every_block", "diyfa/distributed/ring.py", "sinks=sinks if call.own else None",
        "sinks=sinks", context_parallel("context_parallel.py::test_matrix[ring]"),
    ),
    Mutation(
        "ring_forgets_the_gradient_of_lse", "diyfa/distributed/ring.py", "(dout, dlse), (q, *keys)",
        "(dout, None), (q, *keys)", context_parallel("context_parallel.py::test_matrix[ring]"),
    ),
    Mutation(
        "ring_forgets_the_sums_of_others", "diyfa/distributed/ring.py", "mine += others", "pass",
        context_parallel("context_parallel.py::test_matrix[ring]"),
    ),
    Mutation(
        "steps_window_off_by_one", "diyfa/distributed/steps.py", "else right + behind\n", "else right + behind + 1\n",
        context_parallel("steps.py"),
    ),
    Mutation(
        "steps_own_blocks_leave_gaps", "diyfa/distributed/steps.py", "(rows == 0 if block.own else rows >= 0)",
        "rows >= 0", context_parallel("steps.py", "context_parallel.py::test_matrix[ring]"),
    ),
    Mutation(
        "merge_takes_the_other_weight", "diyfa/distributed/merge.py", "torch.sigmoid(lse - own_lse)",
        "torch.sigmoid(own_lse - lse)", context_parallel("context_parallel.py::test_matrix[ring]"),
    ),
    Mutation(
        "ulysses_does_not_repeat_heads", "diyfa/distributed/ulysses.py",
        "return math.lcm(heads_kv, ranks) // heads_kv", "return 1",
        context_parallel("context_parallel.py::test_matrix[ulysses]"),
    ),
    Mutation(
        "ranks_do_not_compare_options", "diyfa/distributed/check.py", "if len(set(hashes.tolist())) > 1:", "if False:",
        context_parallel("context_parallel.py::test_ranks_that_disagree_are_named"),
    ),
    # ---- Ranges of blocks
    Mutation(
        "key_blocks: full_end + 1", SCORES,
        "full_end = tl.minimum(n_keys, tl.maximum(row0 + offset + window_right + 1, 0))",
        "full_end = tl.minimum(n_keys, tl.maximum(row0 + offset + window_right + 2, 0))", BLOCKS,
    ),
    Mutation(
        "key_blocks: end - 1", SCORES,
        "end = tl.minimum(n_keys, tl.maximum(row0 + c.BLOCK_M + offset + window_right, 0))",
        "end = tl.minimum(n_keys, tl.maximum(row0 + c.BLOCK_M + offset + window_right - 1, 0))", BLOCKS,
    ),
    Mutation(
        "key_blocks: begin + 1", SCORES,
        "begin = tl.maximum(row0 + offset - window_left, 0) // c.BLOCK_N * c.BLOCK_N",
        "begin = tl.maximum(row0 + offset - window_left + 1, 0) // c.BLOCK_N * c.BLOCK_N", BLOCKS,
    ),
    Mutation(
        "key_blocks: full_begin - 1", SCORES,
        "tl.cdiv(tl.maximum(row0 + c.BLOCK_M - 1 + offset - window_left, 0), c.BLOCK_N)",
        "tl.cdiv(tl.maximum(row0 + c.BLOCK_M - 2 + offset - window_left, 0), c.BLOCK_N)", BLOCKS,
    ),
    Mutation(
        "query_blocks: end - 1", SCORES,
        "end = tl.minimum(end, tl.maximum(col0 + c.BLOCK_N + window_left - offset, 0))",
        "end = tl.minimum(end, tl.maximum(col0 + c.BLOCK_N + window_left - offset - 1, 0))", BLOCKS,
    ),
    Mutation(
        "query_blocks: begin + 1", SCORES,
        "begin = tl.maximum(col0 - offset - window_right, 0) // c.BLOCK_M * c.BLOCK_M",
        "begin = tl.maximum(col0 - offset - window_right + 1, 0) // c.BLOCK_M * c.BLOCK_M", BLOCKS,
    ),
    Mutation(
        "query_blocks: full_begin - 1", SCORES,
        "tl.cdiv(tl.maximum(col0 + c.BLOCK_N - 1 - offset - window_right, 0), c.BLOCK_M)",
        "tl.cdiv(tl.maximum(col0 + c.BLOCK_N - 2 - offset - window_right, 0), c.BLOCK_M)", BLOCKS,
    ),
    Mutation(
        "query_blocks: full_end + 1", SCORES,
        "full_end = tl.minimum(end, tl.maximum(col0 + window_left - offset + 1, 0))",
        "full_end = tl.minimum(end, tl.maximum(col0 + window_left - offset + 2, 0))", BLOCKS,
    ),
    Mutation(
        "CPU key_range: stop - 1", "backends/cpu/tiles.py",
        "m1 + self.max_shift + self.right)", "m1 + self.max_shift + self.right - 1)", (RANGES + "test_cpu_blocks",),
    ),
    Mutation(
        "CPU mask: a column too many unmasked", "backends/cpu/tiles.py",
        "n1 - 1 <= m0 + self.min_shift + self.right", "n1 - 2 <= m0 + self.min_shift + self.right",
        (RANGES + "test_cpu_blocks",),
    ),
    # ---- Windows, masks, offsets
    Mutation(
        "bounds_that_exclude: right >= Sq - 2", "diyfa/ops.py",
        "right >= seqlen_q > 0", "right >= seqlen_q - 2 > 0", WINDOW,
    ),
    Mutation(
        "bounds_that_exclude: left >= Sk - 2", "diyfa/ops.py",
        "left >= seqlen_k else", "left >= seqlen_k - 2 else", WINDOW,
    ),
    Mutation(
        "visible_pairs: < on the right", SCORES,
        "visible = visible & (cols <= rows + (offset + window_right))",
        "visible = visible & (cols < rows + (offset + window_right))", matrix("cuda", "s37_causal"),
    ),
    Mutation(
        "visible_pairs: > on the left", SCORES,
        "visible & (cols >= rows + (offset - window_left))", "visible & (cols > rows + (offset - window_left))",
        matrix("cuda", "window_left"),
    ),
    Mutation(
        "visible_pairs: a key beyond the end", SCORES,
        "visible = cols < n_keys", "visible = cols <= n_keys", matrix("cuda", "s37", "lens"),
    ),
    Mutation(
        "offset of the tensors, not of the sequence", FWD,
        "offset = n_keys - n_queries  # query i", "offset = seqlen_k - seqlen_q  # query i",
        matrix("cuda", "lens_q20_k70_causal"),
    ),
    Mutation(
        "empty rows: lse -inf", FWD,
        "tl.where(live, l_i, 1.0))) * LN2, float(\"inf\"))", "tl.where(live, l_i, 1.0))) * LN2, float(\"-inf\"))",
        matrix("cuda", "q90_k17_causal"),
    ),
    Mutation(
        "lse in units of log2", FWD,
        "tl.where(live, l_i, 1.0))) * LN2,", "tl.where(live, l_i, 1.0))),", matrix("cuda", "s16"),
    ),
    # ---- Lengths on the device
    Mutation(
        "seq_lens not clamped to the keys", SCORES,
        "n_keys = tl.minimum(tl.maximum(tl.load(seq_lens_ptr + b), 0), seqlen_k)",
        "n_keys = tl.maximum(tl.load(seq_lens_ptr + b), 0)", (LENGTHS + "test_too_long_seq_lens_end_with_the_tensors",),
    ),
    Mutation(
        "cu_seqlens_k: end not clamped", SCORES,
        "tl.maximum(tl.minimum(tl.load(cu_seqlens_k_ptr + b + 1), total_k) - first_k, 0)",
        "tl.maximum(tl.load(cu_seqlens_k_ptr + b + 1) - first_k, 0)",
        (LENGTHS + "test_offsets_beyond_the_rows_end_with_them[cuda-cu_seqlens_k-41-full]",
         LENGTHS + "test_offsets_beyond_the_rows_end_with_them[cuda-cu_seqlens_k-75-full]"),
    ),
    Mutation(
        "cu_seqlens_k: begin not clamped", SCORES,
        "first_k = tl.minimum(tl.maximum(tl.load(cu_seqlens_k_ptr + b), 0), total_k)",
        "first_k = tl.load(cu_seqlens_k_ptr + b)",
        (LENGTHS + "test_offsets_before_the_rows_begin_with_them[cuda-cu_seqlens_k--1]",),
    ),
    Mutation(
        "cu_seqlens_q: end not clamped", SCORES,
        "tl.maximum(tl.minimum(tl.load(cu_seqlens_q_ptr + b + 1), total_q) - first_q, 0)",
        "tl.maximum(tl.load(cu_seqlens_q_ptr + b + 1) - first_q, 0)",
        (LENGTHS + "test_offsets_beyond_the_rows_end_with_them[cuda-cu_seqlens_q-41-full]",),
    ),
    Mutation(
        "CPU: offsets not clamped", "backends/cpu/varlen.py",
        "cu_seqlens.clamp(0, total).tolist()", "cu_seqlens.tolist()",
        (LENGTHS + "test_offsets_before_the_rows_begin_with_them[cpu-cu_seqlens_k--1]",
         LENGTHS + "test_offsets_beyond_the_rows_end_with_them[cpu-cu_seqlens_k-41-full]"),
    ),
    # ---- Keys of what is remembered
    Mutation(
        "plan key without v's strides", "diyfa/fast_path.py", "            v.stride(),\n", "",
        ("tests/frontend/test_fast_path.py::test_strides_of_each_tensor_are_part_of_the_call",),
    ),
    Mutation(
        "plan key without the addresses", "diyfa/fast_path.py",
        "            q.data_ptr() & 15,  # of each: kernels are compiled for which of them are aligned\n", "",
        ("tests/frontend/test_fast_path.py::test_other_tensors_are_another_call",),
    ),
    Mutation(
        "plan key without the strides of optional tensors", FAST_PATH, "return x.shape, x.stride(), x.dtype",
        "return x.shape, x.dtype", (REPEAT + "test_strides_of_optional_tensors_are_part_of_the_call",),
    ),
    Mutation(
        "plan key without the addresses of optional tensors", FAST_PATH, "x.data_ptr() & 15, x.requires_grad\n",
        "x.requires_grad\n", (REPEATED + "test_what_is_read_of_optional_tensors",),
    ),
    Mutation(
        "plan key without the longest sequences", FAST_PATH,
        "                lengths.max_seqlen_q,\n                lengths.max_seqlen_k,\n", "",
        (REPEATED + "test_what_is_read_of_optional_tensors",),
    ),
    Mutation(
        "plan key without sm_scale", "diyfa/ops.py", "        options.sm_scale,\n", "",
        matrix("cuda", "scale", "scale_negative", "scale_zero"),
    ),
    Mutation(
        "a repeated call takes one tensor for another", LAUNCH, "    tensors = own_objects(tensors)\n    # Rows",
        "    # Rows", (REPEAT + "test_a_tensor_given_twice_is_no_other_call",),
    ),
    Mutation(
        "a repeated call leaves rows of no sequence", LAUNCH,
        '((0, 0.0), (1, float("inf"))) if problem.varlen else ()', "()",
        (REPEAT + "test_optional_tensors_are_repeated[packed-small-forward]",),
    ),
    Mutation(
        "a repeated backward leaves rows of no sequence", BWD, "if problem.varlen else []", "if False else []",
        (REPEAT + "test_optional_tensors_are_repeated[packed-small-backward]",),
    ),
    Mutation(
        "a repeated backward whatever dout's strides", BWD,
        " or [x.stride() for x in given] != strides_now:", ":",
        (REPEAT + "test_saved_tensors_that_lie_otherwise_in_the_same_place",),
    ),
    Mutation(
        "a repeated call reads a copy of another call", "diyfa/ops.py",
        "len(present) == len(given) and all(x is y for x, y in zip(present, given, strict=True))", "True",
        (REPEAT + "test_strides_of_optional_tensors_are_part_of_the_call",),
    ),
    # ---- Scales and the softmax
    Mutation(
        "online softmax: the output is not rescaled", FWD, "acc * alpha[:, None]", "acc",
        matrix("cuda", "rise_60_bfloat16"),
    ),
    Mutation(
        "online softmax: the sum is not rescaled", FWD, "l_i * alpha + tl.sum(p, 1)", "l_i + tl.sum(p, 1)",
        matrix("cuda", "rise_60_bfloat16"),
    ),
    Mutation(
        "dK is not scaled", DKDV, "dk = tl.where(live[:, None], dk * sm_scale, 0.0)",
        "dk = tl.where(live[:, None], dk, 0.0)", matrix("cuda", "s16"),
    ),
    Mutation(
        "dropout: kept weights are not scaled", FWD, "out *= keep_scale", "out *= 1.0", matrix("cuda", "dropout"),
    ),
    # ---- Dropout's counters, heads
    Mutation(
        "dropout: rows count from 1 in the backward pass", DKDV,
        "position_words(row_key0, row_key1, offs_m)", "position_words(row_key0, row_key1, offs_m + 1)",
        matrix("cuda", "dropout"),
    ),
    Mutation(
        "dropout: sample and head exchanged", "backends/cuda/attention/dropout.py",
        "c0 = h.to(tl.uint32)\n    c1 = b.to(tl.uint32)", "c0 = b.to(tl.uint32)\n    c1 = h.to(tl.uint32)",
        matrix("cuda", "dropout"),
    ),
    Mutation(
        "GQA: heads interleaved", FWD, "hk = h // group", "hk = h % (heads_q // group)", matrix("cuda", "gqa_4_2"),
    ),
    Mutation(
        "GQA: dK sums other heads", DKDV,
        "        h = hk * group + g\n        q_ref",
        "        h = g * heads_kv + hk\n        q_ref", matrix("cuda", "gqa_4_2"),
    ),
    # ---- Features
    Mutation("ALiBi: sign", SCORES, "s = s - (slope * LOG2E)", "s = s + (slope * LOG2E)", matrix("cuda", "alibi")),
    Mutation(
        "softcap: derivative", DKDV, "(1.0 - tanh_t * tanh_t)", "(1.0 - tanh_t)", matrix("cuda", "softcap"),
    ),
    Mutation(
        "bias: in units of log2", SCORES, "bias.to(tl.float32) * LOG2E", "bias.to(tl.float32)",
        matrix("cuda", "bias_full"),
    ),
    Mutation(
        "sinks: sign of the gradient", BWD, "dsinks.copy_(-weights", "dsinks.copy_(weights", matrix("cuda", "sinks"),
    ),
    Mutation("CPU: a sink does not rescale", "backends/cpu/fwd.py", "return m, l * alpha + weight, alpha",
             "return m, l + weight, alpha", matrix("cpu", "sinks_16_float32")),
    Mutation("delta: sign of the lse's gradient", BWD, "delta -= tl.load", "delta += tl.load", matrix("cuda", "s16")),
    Mutation(
        "CPU: delta without the lse's gradient", "backends/cpu/bwd.py", "delta = delta - dlse", "delta = delta + 0",
        matrix("cpu", "s16"),
    ),
    # ---- Tolerances
    Mutation(
        "YARDSTICK_DRAWS * 10", "diyfa/testing.py", "YARDSTICK_DRAWS = 16 ", "YARDSTICK_DRAWS = 160 ",
        (INSTRUMENTS + "test_luck_is_bounded",),
    ),
    Mutation(
        "BUDGET_FACTOR * 2", "diyfa/testing.py", "BUDGET_FACTOR = 2.0", "BUDGET_FACTOR = 4.0",
        (INSTRUMENTS + "test_budget_is_twice_the_yardstick_and_a_unit",),
    ),
    Mutation(
        "LSE_UNIT * 2**6", "diyfa/testing.py", "LSE_UNIT = 2.0**-20", "LSE_UNIT = 2.0**-14",
        (INSTRUMENTS + "test_an_lse_is_held_to_float32",),
    ),
    Mutation(
        "the yardstick rounds its scores", "diyfa/yardstick.py", "s, tanh = q @ k.mT, None",
        "s, tanh = (q @ k.mT).half().to(q.dtype), None",
        (INSTRUMENTS + "test_an_lse_is_held_to_float32",),
    ),
    Mutation(
        "the demo's bound * 100", "diyfa/cli/demo_train.py", "8, 300, 2e-3, 1e-4, 2e-2)", "8, 300, 2e-3, 1e-4, 2.0)",
        (DEMO,),
    ),
    Mutation("the demo's bound on accelerators * 100", "diyfa/cli/demo_train.py", "500, 1e-3, 5e-3, 2e-2,",
             "500, 1e-3, 5e-3, 2.0,", (DEMO,)),
    # ---- Hopper
    Mutation(
        "sm90 BlockOrder.block: the rest one block off", TILES, "block, self.end_block - 1 - i + self.n_left)",
        "block, self.end_block - i + self.n_left)", hopper("sinks_causal"),
    ),
    Mutation("sm90 block_order: n_left not clamped", TILES, "n_right, gl.minimum(n_left, n_blocks - n_right))",
             "n_right, n_left)", hopper("window", "window_narrow")),
    Mutation("sm90 block_order: a row less at the left edge", TILES, "key0 + (BLOCK_M - 1) - problem.window_left",
             "key0 + (BLOCK_M - 2) - problem.window_left", hopper("window_left_one_row")),
    Mutation(
        "sm90 block_order: no block more at the right end", TILES,
        "n_right += tile.end_block - gl.maximum(last_key, 0) // BLOCK_N",
        "n_right = tile.end_block - gl.maximum(last_key, 0) // BLOCK_N",
        hostile("only_what_overflows_is_loaded_twice", "a peak in the block beside the last key-False"),
    ),
    Mutation("sm90: skipped blocks stay at the right end", TILES, "self.n_right - n, self.n_left",
             "self.n_right, self.n_left", hopper("skip_masked")),
    Mutation(
        "sm90: a consumer flags the first one's tile", SM90, "flags.flag(turn, overflown, INDEX)",
        "flags.flag(turn, overflown, 0)", far("full", "causal"),
    ),
    Mutation(
        "sm90: only a program's last tile counts", SM90, "all_overflown = all_overflown | overflown",
        "all_overflown = overflown", hostile("only_what_overflows_is_loaded_twice", "one tile overflows-True"),
    ),
    Mutation(
        "sm90: LARGEST_SUM is infinite", "backends/cuda/hopper/overflow.py", "gl.constexpr(2.0**126)",
        'gl.constexpr(float("inf"))',
        hostile("as_exact_as_a_running_maximum", "small values under an infinite sum-64"),
    ),
    Mutation(
        "sm90: overflown out is not flagged", "backends/cuda/hopper/overflow.py",
        "lost = lost | (gl.convert_layout(row,",
        "lost = lost & (gl.convert_layout(row,",
        hostile("as_exact_as_a_running_maximum", "large values under a large sum, late-64"),
    ),
    Mutation(
        "sm90: nothing but -inf is not flagged", SM90, "(lost | overflown_rows(", "(overflown_rows(",
        hostile("what_is_not_finite_shows_where_it_is_seen", "minus infinity but for low scores-64"),
    ),
    Mutation(
        "sm90: the fallback keeps a maximum, too", SM90, '"fixed_max": False',
        '"fixed_max": config.fixed_max', far("full"),
    ),
    Mutation(
        "sm90: the fallback rescales late", SM90, '"rise": 0.0',
        '"rise": config.rise', hostile("as_exact_as_a_running_maximum", "huge values-128"),
    ),
    Mutation(
        "sm90: the fallback begins in old phases", SM90,
        "            queries.init()\n            ring.init()\n            fence_async_shared()\n", "", far("full"),
    ),
    Mutation("sm90: the fallback does not wait for the first one's stores", SM90, "wait_for_stores()  # before",
             "tma.store_wait(0)  # before", far("full", "causal")),
    Mutation("sm90: all tiles again", "backends/cuda/hopper/overflow.py",
             "store(_per_warp(lost))", "store(_per_warp(lost | 1))",
             hostile("only_what_overflows_is_loaded_twice", "normal-False")),
    Mutation("sm90 sinks: no guard against inf - inf", SOFTMAX,
             '    larger = gl.where(larger == float("-inf"), 0.0, larger)\n', "",
             ("tests/hopper/test_hopper_features.py::test_a_row_with_neither_key_nor_sink",)),
    Mutation("sm90 sinks: 0 / 0", SOFTMAX, "gl.where(total == 0.0, 0.0, keys / total)", "keys / total",
             ("tests/hopper/test_hopper_features.py::test_a_row_with_neither_key_nor_sink",)),
    Mutation("sm90 sinks: out without them", SOFTMAX, "gl.where(total == 0.0, 0.0, keys / total)", "keys / keys",
             hopper("sinks_causal")),
    Mutation("sm90 sinks: another head's", SM90, "gl.load(outputs.sinks_ptr + tile.h)",
             "gl.load(outputs.sinks_ptr + tile.h // 2)",
             hopper("sinks_causal")),
    Mutation("sm90 ALiBi: sign", SOFTMAX, "s = s * scale - _alibi(", "s = s * scale + _alibi(", hopper("alibi")),
    Mutation("sm90 ALiBi: sign beside a fixed maximum", SOFTMAX, "x = x - _alibi(", "x = x + _alibi(",
             hostile("a_slope_that_leaves_far_keys_their_weight")),
    Mutation("sm90 ALiBi: another sample's slopes", SM90,
             "gl.load(outputs.slopes_ptr + tile.b * outputs.stride_slopeb + tile.h)",
             "gl.load(outputs.slopes_ptr + tile.h)", hopper("alibi_causal")),
    Mutation(
        "sm90 ALiBi: a fixed maximum without a causal mask", "backends/cuda/hopper/configs.py",
        "near_first = problem.causal or not problem.alibi", "near_first = True",
        hostile("only_what_overflows_is_loaded_twice", "a slope whose scores rise by 512 nats-False"),
    ),
    # ---- Ascend
    Mutation(
        "NPU key_range: hi - 1", PRIMITIVES,
        "hi = tl.minimum(sk, row0 + c.BLOCK_M + offset + window_right)",
        "hi = tl.minimum(sk, row0 + c.BLOCK_M + offset + window_right - 1)", NPU_BLOCKS, npu=True,
    ),
    Mutation(
        "NPU row_range: hi - 1", PRIMITIVES,
        "hi = tl.minimum(sq, n0 + c.BLOCK_N - offset + window_left)",
        "hi = tl.minimum(sq, n0 + c.BLOCK_N - offset + window_left - 1)", NPU_BLOCKS,
        npu=True,
    ),
    Mutation(
        "NPU tile_needs_mask: two columns too many unmasked", PRIMITIVES,
        "(n0 + c.BLOCK_N > row0 + offset + window_right)", "(n0 + c.BLOCK_N > row0 + offset + window_right + 2)",
        NPU_BLOCKS, npu=True,
    ),
    Mutation(
        "NPU: seq_lens not clamped to the keys", PRIMITIVES,
        "sk = tl.minimum(tl.load(seq_lens_ptr + b), seqlen_k)", "sk = tl.load(seq_lens_ptr + b)",
        (LENGTHS + "test_too_long_seq_lens_end_with_the_tensors[npu-full]",), npu=True,
    ),
    Mutation(
        "NPU: offsets not clamped", PRIMITIVES,
        "end = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + b + 1), start), total)",
        "end = tl.maximum(tl.load(cu_seqlens_ptr + b + 1), start)",
        (LENGTHS + "test_offsets_beyond_the_rows_end_with_them[npu-cu_seqlens_k-41-full]",), npu=True,
    ),
]  # fmt: skip


def copy_of_the_tree(folder: Path) -> Path:
    """What git tracks or would, at `folder`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return folder


def run_tests(tree: Path, tests: list[str], npu_python: str | None) -> tuple[int, str]:
    """Pytest's exit status and output; with `npu_python` by way of the launcher for npu tensors."""
    how = [npu_python, "tests/support/npu_env.py"] if npu_python else [sys.executable, "-m", "pytest"]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH", "")])),
        "PYTHONDONTWRITEBYTECODE": "1",  # a file changed twice within a second would be taken for the one before
    }  # fmt: skip
    done = subprocess.run(
        [*how, "-q", "-x", "-p", "no:cacheprovider", *tests], cwd=tree, env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def try_one(tree: Path, mutation: Mutation, npu_python: str | None) -> str:
    """`CAUGHT`, `SURVIVED`, or in words what went wrong."""
    path = tree / mutation.file
    text = path.read_text()
    if (count := text.count(mutation.old)) != 1:
        return f"error: its text stands in {mutation.file} {count} times, not once"
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        status, output = run_tests(tree, list(mutation.tests), npu_python if mutation.npu else None)
    finally:
        path.write_text(text)
    if status in (NO_TEST_FAILED, TESTS_FAILED):
        return CAUGHT if status == TESTS_FAILED else SURVIVED
    return f"error: pytest ended with {status}: {output.strip().splitlines()[-1] if output.strip() else ''}"


def unmutated(tree: Path, mutations: list[Mutation], npu_python: str | None) -> bool:
    """Whether all tests pass as things are."""
    for on_npu in (False, True):
        tests = sorted({test for mutation in mutations if mutation.npu == on_npu for test in mutation.tests})
        if tests:
            status, output = run_tests(tree, tests, npu_python if on_npu else None)
            if status != NO_TEST_FAILED:
                print(output[-3000:], "\nthese tests do not pass without any mutation", sep="\n")
                return False
    return True


def main() -> int:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="only mutations whose name contains one of these")
    parser.add_argument("--npu-python", help="interpreter with torch_npu and triton-ascend")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree side by side")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    arguments = parser.parse_args()
    chosen = [m for m in MUTATIONS if not arguments.names or any(name in m.name for name in arguments.names)]
    if arguments.list:
        print(*(m.name for m in chosen), sep="\n")
        return 0
    left_out = [m for m in chosen if m.npu and not arguments.npu_python]
    chosen = [m for m in chosen if m not in left_out]
    verdicts = []
    with tempfile.TemporaryDirectory() as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for i in range(arguments.jobs):
            trees.put(copy_of_the_tree(Path(folder) / str(i)))

        def judge(mutation: Mutation) -> str:
            tree, start = trees.get(), time.perf_counter()
            try:
                verdict = try_one(tree, mutation, arguments.npu_python)
            finally:
                trees.put(tree)
            print(f"{verdict:9} {time.perf_counter() - start:5.0f} s  {mutation.name}", flush=True)
            return verdict

        if not unmutated(Path(folder) / "0", chosen, arguments.npu_python):
            return 1
        with ThreadPoolExecutor(arguments.jobs) as pool:
            verdicts = list(pool.map(judge, chosen))
    caught = verdicts.count(CAUGHT)
    print(f"{caught} of {len(chosen)} caught", *[f"not run without --npu-python: {m.name}" for m in left_out], sep="\n")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
