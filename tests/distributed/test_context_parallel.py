"""Context parallel attention over gloo processes: results as on one device, under the same error budget."""

from __future__ import annotations

import os

import context_parallel_cases as cp
import pytest
import torch
from gloo_workers import Workers
from targets import TARGETS

from diyfa.distributed.ring import Sum
from diyfa.testing import AttentionCase, assert_within_budget

RANKS = 4
RANDOM_CASES = int(os.environ.get("DIYFA_DRAWN_CASES", "24"))  # 200 take half a minute


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    with Workers(RANKS, tmp_path_factory.mktemp("gloo")) as found:
        yield found


def check(workers: Workers, cases: list[tuple[AttentionCase, cp.Division]]) -> None:
    """Every case within its budget; all failures are told at once."""
    failures = []
    for case, how in cases:
        try:
            assert_within_budget(workers.run(cp.run_sharded, case, how)[0], case)
        except AssertionError as error:
            failures.append(f"{how}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("method", ["ring", "ulysses", "both"])
def test_matrix(workers, method):
    check(workers, [(case, cp.Division(method)) for case in cp.MATRIX])


def test_meshes_with_one_rank_in_a_dimension(workers):
    cases = [case for case in cp.MATRIX if case.name in ("causal_gqa", "packed_causal_sinks")]
    check(workers, [(case, cp.Division("both", ulysses_ranks=n)) for case in cases for n in (1, RANKS)])


@pytest.mark.parametrize(
    "backend", [pytest.param("cuda", id="cuda_kernels"), pytest.param("npu", id="npu_kernels", marks=pytest.mark.slow)]
)
def test_triton_kernels_in_a_ring(workers, backend):
    """Their views, strides and packed rows, on CPU tensors in Triton's interpreter."""
    if backend not in TARGETS or not TARGETS[backend].interpreted:
        pytest.skip(f"the {backend} kernels do not run in the interpreter here")
    check(workers, [(case, cp.Division("ring", backend=backend)) for case in cp.ON_KERNELS])


def test_dropout_is_that_of_one_device(workers):
    """Over one, two and four ranks, with a state that is given or that the first rank draws, and from DTensors."""
    for method in ("ring", "ulysses", "both"):
        assert workers.run(cp.run_dropout, method) == [[True] * 16] * RANKS, method


def test_alibi(workers):
    check(workers, [(case, cp.Division("ulysses")) for case in cp.WITH_ALIBI])


@pytest.mark.parametrize("method", ["ring", pytest.param("both", marks=pytest.mark.slow)])
def test_matrix_without_balance(workers, method):
    masked = [case for case in cp.MATRIX if case.causal or case.window != (-1, -1)]
    check(workers, [(case, cp.Division(method, "none")) for case in masked])


def test_random_cases(workers):
    check(workers, [cp.random_case(seed, RANKS) for seed in range(RANDOM_CASES)])


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_gradients_are_bitwise_equal_from_run_to_run(workers, method):
    assert all(workers.run(cp.run_twice, cp.Division(method, deterministic=True)))


def test_the_guide(workers):
    workers.run(cp.run_guide)


def test_helpers(workers):
    workers.run(cp.run_helpers)


def test_dtensors(workers):
    for method in ("ring", "ulysses", "both"):
        assert workers.run(cp.run_dtensors, method) == [[True] * 5] * RANKS, method
    for shards_heads, dropout_p in ((True, 0.0), (True, 0.3), (False, 0.0)):
        assert workers.run(cp.run_dtensors_with_heads, shards_heads, dropout_p) == [[]] * RANKS


def test_uneven_dtensors(workers):
    assert workers.run(cp.run_uneven_dtensors) == [[]] * RANKS


def test_misplaced_dtensors_are_refused(workers):
    placed = "ValueError: q must be sharded along its sequence"
    other_axis = "ValueError: q must be replicated or Shard(0) (batch), Shard(1) (heads), Shard(2) (sequence), got"
    told = [
        "ValueError: q, k, v must have equal placements", placed, other_axis, other_axis,
        "TypeError: q, k, v must all be DTensors", "ValueError: group must be None or the dimensions of q's mesh",
        "ValueError: group must be a DeviceMesh of one or two",
        "ValueError: the 3 heads of k must be a multiple of 2 shards", "ValueError: the 3 heads of q must be",
    ]  # fmt: skip
    for messages in workers.run(cp.run_misplaced_dtensors):
        assert [message[: len(start)] for message, start in zip(messages, told, strict=True)] == told


@pytest.mark.parametrize("dropout_p", [0.3, pytest.param(0.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["checkpoint", "compile"])
def test_blocks_of_a_model(workers, how, dropout_p):
    for method in ("ring", "ulysses", "both"):
        assert all(workers.run(cp.run_block, method, how, dropout_p)), method


def test_compiled_calls(workers):
    workers.run(cp.run_compiled)


def test_numbers_of_compiled_calls(workers):
    """Compiled graphs are found on disk by them: the same in every process, and of no other graph."""
    first, *others = workers.run(cp.numbers)
    assert others == [first] * (RANKS - 1) and len(set(first)) == len(first)


def test_ranks_that_disagree_are_named(workers):
    for odd, told in (
        ({"rows": 24}, "q: rank 2 has (1, 4, 24, 8) float32 on cpu, the others (1, 4, 16, 8) float32 on cpu"),
        ({"keys": 8}, "k: rank 2 has (1, 4, 8, 8)"),
        ({"dtype": torch.float16}, "rank 2 has (1, 4, 16, 8) float16"),
        ({"causal": True}, "causal: rank 2 has True, the others False"),
        ({"window": (3, 0)}, "window: rank 2 has (3, 0), the others (-1, -1)"),
        ({"method": "ulysses"}, "method: rank 2 has ulysses, the others auto"),
        ({"load_balance": "none"}, "load_balance: rank 2 has none"),
        ({"grad": True}, "gradients: rank 2 has q, the others none"),
        ({"sinks": torch.zeros(4, requires_grad=True)}, "gradients: rank 2 has sinks, the others none"),
        ({"autocast": True}, "q: rank 2 has (1, 4, 16, 8) bfloat16 on cpu"),
        ({"dropout_p": 0.1}, "dropout_p: rank 2 has 0.1, the others 0.0"),
        ({"batch_invariant": True}, "batch_invariant: rank 2 has True, the others False"),
        ({"causal": 1}, "causal: rank 2 has 1, the others False"),
        ({"layout": "thd"}, "layout: rank 2 has thd, the others bhsd; error: rank 2 has ValueError: layout must be"),
        ({"k": [1.0]}, "error: rank 2 has TypeError: k must be a torch.Tensor, got list, the others None"),
        ({"refused": True}, "error: rank 2 has RuntimeError: not here, the others None"),
    ):
        messages = workers.run(cp.call_with, {}, {}, odd, {})
        assert len(set(messages)) == 1 and messages[0].startswith("ValueError") and told in messages[0], messages


def test_compiled_ranks_that_disagree_are_named(workers):
    alike = {"compiled": True, "method": "ring", "dropout_p": 0.1}
    for odd, told in (
        ({"grad": True}, "gradients: rank 2 has q, the others none"),
        ({"softcap": 3.0}, "softcap: rank 2 has 3.0, the others 0.0"),
        ({"rng_state": torch.tensor([1, 2])}, "rng_state: rank 2 has (2,) int64 on cpu, the others None"),
    ):
        messages = workers.run(cp.call_with, alike, alike, alike | odd, alike)
        assert len(set(messages)) == 1 and messages[0].startswith("ValueError") and told in messages[0], messages


@pytest.mark.parametrize(
    "arguments, told",
    [
        ({"keys": 8}, "ValueError: q and k must have the same rows"),
        ({"method": "tree"}, "ValueError: method must be one of auto, ring, ulysses, both, got 'tree'"),
        ({"method": "both"}, "ValueError: method 'both' needs a group of two dimensions"),
        ({"load_balance": "even"}, "ValueError: load_balance must be one of zigzag, none"),
        ({"layout": "thd"}, "ValueError: layout must be one of bhsd, bshd"),
        ({"group": "world"}, "TypeError: group must be a ProcessGroup, a DeviceMesh or None"),
        ({"alibi_slopes": torch.ones(4), "method": "ring"}, "ValueError: alibi_slopes need method='ulysses'"),
        ({"dropout_p": 1.5}, "ValueError: dropout_p must be in [0, 1), got 1.5"),
        ({"dropout_p": 0.1, "rng_state": torch.zeros(6).long()}, "ValueError: rng_state must have shape (2,)"),
        ({"dropout_p": 0.1, "rng_state": torch.zeros(2)}, "TypeError: rng_state must be int64"),
        ({"causal": 1}, "TypeError: causal must be True or False"),
        ({"batch_invariant": True, "method": "ring"}, "ValueError: diyfa.batch_invariant() needs method='ulysses'"),
        ({"backend": "none such"}, "ValueError: "),
        ({"cu_seqlens": torch.tensor([0, 9])}, "ValueError: q, k and v must have 3 dimensions"),
        ({"dtype": torch.complex64}, "TypeError: Unsupported dtype"),
        ({"k": 1}, "TypeError: k must be a torch.Tensor"),
        ({"refused": True}, "RuntimeError: not here"),
    ],
)
def test_refusals(workers, arguments, told):
    messages = workers.run(cp.call_with, *[arguments] * RANKS)
    assert all(message.startswith(told) for message in messages), messages


def test_the_method_is_the_same_on_all_ranks_and_one_that_can_run(workers):
    assert workers.run(cp.run_choices) == [[True] * 6] * RANKS


def test_a_refused_call_leaves_nothing_under_way(workers):
    assert all(workers.run(cp.run_after_refusal))


def test_a_rank_that_refuses_an_agreed_call_does_not_hang(workers):
    message, waited = workers.run(cp.refuse_after_agreement)[0]
    assert "stride 1" in message and not waited


def test_agreed_calls_are_cached_by_group(workers):
    workers.run(cp.run_in_unequally_used_groups, 4)


@pytest.mark.parametrize("method", ["ring", "ulysses", "both"])
def test_rows_of_no_sequence_and_a_loss_of_lse_alone(workers, method):
    assert workers.run(cp.run_with_gaps, method) == [[True] * 5] * RANKS


def test_modes(workers):
    assert workers.run(cp.run_in_modes) == [[True] * 2] * RANKS


def test_gradients_are_summed_in_float32():
    total = Sum(torch.zeros(2, dtype=torch.bfloat16), 0)
    for share in (256.0, 1.0, 1.0, 1.0, 1.0):
        total.add(0, torch.full((2,), share, dtype=torch.bfloat16))
    assert total.total_or_zeros().tolist() == [260.0, 260.0]


def test_float64_stays_float64(workers):
    assert max(workers.run(cp.run_in_float64)) < 1e-12


@pytest.mark.parametrize("score", [30.0, 100.0, 1000.0, 10761.0])
def test_a_common_vector_of_float32_keys_costs_no_accuracy(workers, score):
    for method in ("ring", "both", "compiled"):
        for error, allowed in workers.run(cp.run_with_common_key, score, method, False)[0]:
            assert error <= allowed, f"{method}: {error:.2g}, allowed {allowed:.2g}"


@pytest.mark.parametrize("which", ["last", "half", "packed", "packed negative"])
def test_keys_that_rows_do_not_see_cost_them_no_digits(workers, which):
    for error, allowed in workers.run(cp.run_with_large_keys, which)[0]:
        assert error <= allowed, f"{error:.2g}, allowed {allowed:.2g}"


@pytest.mark.parametrize("how", ["ulysses", "both", "compiled"])
def test_gradients_of_repeated_heads_are_rounded_once(workers, how):
    assert workers.run(cp.run_repeated_heads, how) == [[True] * 3] * RANKS


@pytest.mark.parametrize("score", [100.0, 10761.0])
def test_the_cost_of_sinks_is_that_of_the_guide(workers, score):
    """Only dQ and dK are worse than on one device: by L * 2**-24 times what keys, or queries, have in common."""
    out, lse, dq, dk, dv = workers.run(cp.run_with_common_key, score, "ring", True)[0]
    for error, allowed in (out, lse, dv):
        assert error <= allowed, f"{error:.2g}, allowed {allowed:.2g}"
    common, scale, gradients = 2 * score**0.5, 0.25, 40.0  # the last: of |dout| |v| at the most
    worse = score * 2**-24 * common * scale * gradients
    assert dq[0] <= dq[1] + worse and dk[0] <= dk[1] + 4 * worse  # dK: of the four query heads that share a key
    assert score < 1000 or dq[0] > dq[1], "it costs nothing any more: say so"


@pytest.mark.parametrize(("softcap", "infinite"), [(2.0, False), (0.0, True)], ids=["softcap", "infinite"])
def test_keys_whose_common_vector_is_not_subtracted(workers, softcap, infinite):
    """A softcap is no sum that a part could be taken from, and a key that is infinite is no part of any mean."""
    assert all(error < 1e-5 for errors in workers.run(cp.run_without_common_key, softcap, infinite) for error in errors)


def test_values_that_cancel_between_ranks(workers):
    for error, unit in workers.run(cp.run_cancelling)[0]:
        assert error <= 3 * unit, f"{error:.2g}, half a unit is {unit:.2g}"


def test_pytorchs_own_context_parallel(workers):
    for calls, same in workers.run(cp.run_under_pytorch):
        assert all(same) and len(same) == 4, same
        assert {name.split(":")[0].removeprefix("_scaled_dot_product_") for name in calls} == {
            "flash_attention", "flash_attention_backward"
        } and all(name.endswith(": diyfa") for name in calls), calls  # fmt: skip


@pytest.mark.slow
def test_eight_ranks(tmp_path):
    with Workers(8, tmp_path) as workers:
        check(workers, [(case, cp.Division(method)) for method in cp.METHODS for case in cp.MATRIX])
        losses = workers.run(cp.train_gpt, 256, 4)[0]  # a sequence eight times as long as a rank's part
    assert losses == pytest.approx(cp.train_gpt(256, 4), rel=1e-5) and losses[-1] < losses[0]


def test_a_model_learns_the_same_on_four_ranks(workers):
    losses = workers.run(cp.train_gpt, 256, 4)
    assert losses == [losses[0]] * RANKS and losses[0] == pytest.approx(cp.train_gpt(256, 4), rel=1e-5)


@pytest.mark.parametrize("how, told", [("dies", "onnection"), ("lags", "imed out")])
def test_a_lost_rank_ends_in_an_error(tmp_path, how, told):
    """torch.distributed's own error, within its timeout."""
    with Workers(2, tmp_path, timeout=2) as workers:
        workers.start(cp.lose_rank, [(how,)] * 2)
        (message,) = workers.finish([0])
    assert told in message, message
