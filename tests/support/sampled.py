"""Which tests run: `make test` runs the quick ones, `make test-all` all that are not slow.

Quick are samples of the folders of QUICK, which prove an installation: what users call, with its refusals, the tools
and the documentation, and the numerics on each backend. Slow are most of the cases of tests with many cases alike:
with all of them the tests take twice as long.

One in so many, by a checksum of their names, since every nth of a list may have the same value of a parameter
throughout. The others are slow tests. `pytest -m slow` runs those, `pytest -m ''` all there are. With
DIYFA_TEST_EVERY=3 no more than one in three cases of any test runs: for a second environment, in which most of them
would say the same again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from zlib import crc32

from targets import TARGETS

# Folder of tests -> of each test the first case and one in so many of the others.
QUICK = {"frontend": 2, "tools": 1, "numerics": 8}
# The same for single tests of those folders.
QUICK_TESTS = {
    "numerics/test_fuzz.py::test_random_cases": 20,
    "tools/test_course.py::test_chapter_runs_as_printed": 20,
    "tools/test_course.py::test_the_check_refuses_a_wrong_answer": 8,
}

# By file and name; "[npu" for those of that backend where its tensors lie on the CPU.
SAMPLE_INTERVALS = {
    "cuda/test_bwd_short.py::test_kernels_for_any_length": 4,
    "cuda/test_bwd_short.py::test_offsets_that_nobody_could_check": 5,
    "cuda/test_bwd_short.py::test_tile": 3,
    "cuda/test_clear.py::test_a_forward_pass_leaves_no_row_unwritten": 7,
    "cuda/test_cuda_decode.py::test_blocks_of_keys_in_pages_of_any_size": 5,
    "cuda/test_cuda_decode.py::test_chunks_with_programs_of_their_own_add_up_to_the_same_bits": 3,
    "cuda/test_cuda_decode.py::test_each_block_of_keys_is_seen_once": 5,
    "cuda/test_cuda_decode.py::test_few_queries_of_many_keys_need_no_cache": 2,
    "cuda/test_cuda_decode.py::test_no_other_memory_is_read": 5,
    "cuda/test_cuda_decode.py::test_packed_sequences_without_queries_take_no_part": 5,
    "cuda/test_cuda_decode.py::test_positions_on_lines_as_long_as_32_bits_count": 5,
    "cuda/test_cuda_decode.py::test_rows_that_a_program_of_the_combine_kernel_has_change_no_bit": 4,
    "cuda/test_cuda_tiles.py::test_tile": 5,
    "frontend/test_ops.py::test_compile_with_any_window": 5,
    "frontend/test_ops.py::test_compile_with_dropout_shown": 5,
    "frontend/test_ops.py::test_exported_programs_are_trained_rightly": 5,
    "hopper/test_hopper_bwd.py::test_every_interleaving": 3,
    "hopper/test_hopper_bwd.py::test_gradients_that_are_to_be_added_up": 3,
    "hopper/test_hopper_bwd.py::test_heads_whose_fp32_dq_shares_memory": 5,
    "hopper/test_hopper_decode_mla.py::test_out_and_lse": 3,
    "hopper/test_hopper_decode_mla.py::test_tiles_that_share_keys_are_walked_at_the_same_time": 3,
    "hopper/test_hopper_features.py::test_results": 4,
    "hopper/test_hopper_fixed_max.py::test_within_budget": 3,
    "hopper/test_hopper_float8.py::test_results": 4,
    "hopper/test_hopper_hostile.py::test_as_exact_as_a_running_maximum": 5,
    "hopper/test_hopper_hostile.py::test_only_what_overflows_is_loaded_twice": 5,
    "hopper/test_hopper_hostile.py::test_what_is_not_finite_shows_where_it_is_seen": 5,
    "hopper/test_hopper_interpreted.py::test_a_bug_in_scheduling_is_reported": 2,
    "hopper/test_hopper_interpreted.py::test_every_interleaving": 7,
    "hopper/test_hopper_interpreted.py::test_results": 4,
    "hopper/test_hopper_interpreted.py::test_tiles_drawn_by_programs_side_by_side": 5,
    "hopper/test_hopper_matmul.py::test_bugs_are_reported": 2,
    "hopper/test_hopper_matmul.py::test_epilogue": 3,
    "hopper/test_hopper_matmul.py::test_every_interleaving": 4,
    "hopper/test_hopper_matmul.py::test_layouts": 3,
    "hopper/test_hopper_matmul.py::test_no_wait_arrival_or_fence_is_superfluous": 4,
    "hopper/test_hopper_matmul.py::test_sizes": 3,
    "hopper/test_hopper_packed_rows.py::test_no_row_is_left_unwritten": 7,
    "hopper/test_hopper_peaked_gradients.py::test_gradients_that_follow": 8,
    "hopper/test_hopper_prefill.py::test_out_and_lse": 4,
    "hopper/test_hopper_synchronisation.py::test_nothing_is_superfluous": 4,
    "hopper/test_hopper_tutorial.py::test_every_interleaving": 2,
    "hopper/test_hopper_tutorial.py::test_results": 2,
    "npu/test_tile_scheduler.py::test_work_is_spread_evenly": 7,
    "numerics/test_attention_matrix.py::test_attention[npu": 5,
    "numerics/test_dropout_kernels.py::test_tiles_hold_the_defined_bits": 5,
    "numerics/test_eight_bits.py::test_extreme_descales": 3,
    "numerics/test_eight_bits.py::test_matrix": 2,
    "numerics/test_eight_bits.py::test_what_is_not_finite_shows_where_a_key_is_seen": 3,
    "numerics/test_hidden_pages.py::test_hidden_pages_are_not_read": 3,
    "numerics/test_infinite_sinks.py::test_a_sink_of_minus_infinity_is_none": 4,
    "numerics/test_kvcache_matrix.py::test_kvcache": 2,
    "numerics/test_kvcache_matrix.py::test_offsets_that_nobody_checked_reach_no_other_memory": 4,
    "numerics/test_kvcache_matrix.py::test_what_nobody_checked_is_written_nowhere": 3,
    "numerics/test_propagation.py::test_all_that_depends": 5,
    "numerics/test_strides.py::test_each_tensor_may_lie_otherwise_in_a_repeated_call": 3,
}


def skipped_items(items: list[Any]) -> Iterator[Any]:
    """The items that do not run by default; of each test the first one does."""
    on_cpu = "npu" in TARGETS and TARGETS["npu"].device != "npu"
    min_interval = int(os.environ.get("DIYFA_TEST_EVERY", "1"))
    seen = set()
    for item in items:
        name = item.nodeid.split("[")[0].removeprefix("tests/")
        if on_cpu and "[npu-" in item.nodeid:
            name += "[npu"
        every = max(SAMPLE_INTERVALS.get(name, 1), min_interval)
        if not any(item.iter_markers("slow")):
            if name in seen and crc32(item.nodeid.encode()) % every:
                yield item
            seen.add(name)


def quick(items: list[Any]) -> Iterator[Any]:
    """The items that `make test` runs, but for slow ones; of each test of a quick folder the first one is."""
    seen = set()
    for item in items:
        test = item.nodeid.split("[")[0]
        name = test.removeprefix("tests/")
        every = QUICK_TESTS.get(name, QUICK.get(name.split("/")[0]))
        if every is not None and (test not in seen or crc32(item.nodeid.encode()) % every == 0):
            yield item
        seen.add(test)
