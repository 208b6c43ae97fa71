"""The reader of the compiler's last intermediate form, and the cost model, on two kernels of ours as it printed them.

`data/fwd_causal_910b3.mlir` is the forward kernel, float16, head dim 64, causal, a tile of 64 rows x 32 keys with
`tile_mix_vector_loop=2`; `data/fwd_causal_950.mlir` the same with 64 x 64 for the 950. Lines that set and wait for
flags, and address arithmetic, are left out; triton-ascend 3.2.0 and ascendnpu-ir 1.2.0. No compiler is needed here.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from diyfa.backends.npu.runtime import compat
from diyfa.backends.npu.tables import configs
from diyfa.lab.npu import cost, hivm, l0
from diyfa.lab.npu.metrics import limits, metrics
from diyfa.problem import AttentionProblem, MatmulProblem

DATA = Path(__file__).parent / "data"
A2, A5 = "Ascend910B3", "Ascend950PR_9589"


def text(name: str) -> str:
    return (DATA / f"{name}.mlir").read_text()


@pytest.fixture(scope="module")
def fwd() -> hivm.Module:
    return hivm.read(text("fwd_causal_910b3"))


def problem(chip: str = A2, seqlen: int = 4096, **changes) -> AttentionProblem:
    return AttentionProblem("npu", chip, "float16", "bhsd", 2, 16, 16, seqlen, seqlen, 64, 64, **changes)


def test_memory_bound_and_pipeline(fwd: hivm.Module) -> None:
    # L1: q twice, k and v twice, p twice: 2 · (64·64 + 2·32·64 + 64·32) 16-bit values
    assert fwd.memory["l1"] == 2 * 2 * (64 * 64 + 2 * 32 * 64 + 64 * 32)
    assert fwd.memory["l0c"] == 4 * (64 * 32 + 64 * 64)
    assert 0 < fwd.memory["ub"] <= limits(A2)["ub"]
    assert fwd.bound
    assert fwd.mixed
    assert fwd.pipelined == 4
    # four buffers of scores and of the product with v in fp32, and of weights in fp16
    assert fwd.workspace == 4 * (64 * 32 * 4 + 64 * 64 * 4 + 64 * 32 * 2)


def test_cube_work_of_a_tile(fwd: hivm.Module) -> None:
    [loop] = fwd.loops
    assert [(p.m, p.n, p.k, p.bits, p.times) for p in loop.tile.products] == [(64, 32, 64, 16, 1), (64, 64, 32, 16, 1)]
    assert loop.tile.flops == 2 * 2 * 64 * 32 * 64
    assert not loop.masked.products
    assert fwd.score_elements == 64 * 32


@pytest.mark.parametrize(("m", "k", "n", "bits", "expected"), [
    (128, 128, 256, 16, l0.Slices(64, 2, 128 * 64 * 2, 64 * 256 * 2)),  # scores of the forward's 128x256 at D = 128
    (64, 64, 128, 16, l0.Slices(64, 1, 64 * 64 * 2, 64 * 128 * 2)),
    (32, 576, 128, 16, l0.Slices(128, 5, 32 * 128 * 2, 128 * 128 * 2)),
    (16, 16, 576, 16, l0.Slices(16, 1, 16 * 16 * 2, 16 * 576 * 2)),
    (16, 20, 512, 32, l0.Slices(16, 2, 16 * 16 * 4, 16 * 512 * 4)),  # exactly half of L0B
    (130, 128, 40, 32, l0.Slices(48, 3, 130 * 48 * 4, 48 * 40 * 4)),  # 130 rows count as 144
    (64, 80, 256, 8, l0.Slices(96, 1, 64 * 96, 96 * 256)),  # of int8 a fractal has 32 columns
    (64, 576, 256, 8, l0.Slices(128, 5, 64 * 128, 128 * 256)),
])  # fmt: skip
def test_slices_of_a_product(m: int, k: int, n: int, bits: int, expected: l0.Slices) -> None:
    assert l0.slices(hivm.Product(m, n, k, bits)) == expected
    assert max(expected.l0a, expected.l0b) <= l0.HALF


def test_use_of_l0a_and_l0b(fwd: hivm.Module) -> None:
    # [64, 64] @ [64, 32] and [64, 32] @ [32, 64], each in one slice, in the second half
    assert l0.use(fwd, A2) == {"l0a": 32 * 1024 + 64 * 64 * 2, "l0b": 32 * 1024 + 64 * 32 * 2}
    assert l0.use(fwd, A5) == {}, "its library was not read"


def test_what_fits_no_slice() -> None:
    """The library would divide by zero: float32 gradients of more than 512 columns, which are cut, and very long tiles
    of a matrix product, which are refused."""
    with pytest.raises(ValueError, match=r"\[16, 16\] @ \[16, 528\] does not fit"):
        l0.slices(hivm.Product(16, 528, 16, 32))
    for head_dim, dtype, first, rest in (
        (512, "float32", 512, 0),
        (513, "float32", 512, 16),
        (576, "float32", 512, 64),
        (512, "bfloat16", 512, 0),
    ):
        assert compat.split_columns(head_dim, configs.widest_product(dtype)) == {"BLOCK_D": first, "BLOCK_D_TAIL": rest}
    assert configs.widest_product("float16") == configs.HEAD_DIM_CLASSES[-1]
    product = MatmulProblem("npu", A2, "float16", "float16", "float32", 4096, 4096, 4096)
    assert configs.matmul_fits(configs.MatmulTile(16, 1024, 16), product)
    assert not configs.matmul_fits(configs.MatmulTile(16, 1040, 16), product)


def test_bytes_of_a_tile(fwd: hivm.Module) -> None:
    tile = fwd.loops[0].tile
    assert tile.loaded == 2 * 32 * 64 * 2  # k and v
    assert tile.stored == 0
    # through memory and back: scores and product with v in fp32, weights in fp16
    between = 64 * 32 * 4 + 64 * 64 * 4 + 64 * 32 * 2
    assert (tile.workspace_written, tile.workspace_read) == (between, between)
    assert fwd.task.loaded == 64 * 64 * 2  # q
    assert fwd.task.stored == 64 * 64 * 2 + 64 * 4  # out and lse


def test_vector_passes(fwd: hivm.Module) -> None:
    """Six operations on the scores, two on the accumulator, which is twice as large; the mask is five more."""
    loop = fwd.loops[0]
    share = fwd.score_elements // 2  # of each vector core
    names = [call.name for call in loop.tile.vector if call.elements * call.times == share]
    assert len(names) == 6
    assert any(name.startswith("vexp") for name in names)
    accumulator = [call.name for call in loop.tile.vector if call.elements * call.times == 64 * 64 // 2]
    assert len(accumulator) == 2
    assert 6 + 2 * 2 < fwd.passes(loop.tile) < 6 + 2 * 2 + 1  # and a little on vectors of one value a row
    masked = [call for call in loop.masked.vector if call.elements * call.times == share]
    assert len(masked) == 5
    assert loop.tile.scalar_accesses == 0


def test_an_inner_loop_with_constant_bounds_counts_that_often() -> None:
    """A vector operation over half of its rows in a loop of two is the same work."""
    source = text("fwd_causal_910b3")
    call = next(line for line in source.splitlines() if "call @vexp_1d_float" in line)
    indent = call[: len(call) - len(call.lstrip())]
    constants = (
        "%begin_ = arith.constant 0 : index\n%end_ = arith.constant 6 : index\n%step_ = arith.constant 2 : index\n"
    )
    looped = f"{constants}{indent}scf.for %i_ = %begin_ to %end_ step %step_ {{\n{call}\n{indent}}}"
    before, after = (
        sum(c.elements * c.times for c in hivm.read(s).loops[0].tile.vector if c.name == "vexp_1d_float")
        for s in (source, source.replace(call, looped, 1))
    )
    first = next(c for c in hivm.read(source).loops[0].tile.vector if c.name == "vexp_1d_float")
    assert after == before + 2 * first.elements * first.times


def test_950_branches_and_register_instructions() -> None:
    """Loops that are branches between blocks; vector code in functions; nothing between cores through memory."""
    module = hivm.read(text("fwd_causal_950"))
    [loop] = module.loops
    assert [(p.m, p.n, p.k) for p in loop.tile.products] == [(64, 64, 64), (64, 64, 64)]
    assert loop.tile.loaded == 2 * 64 * 64 * 2
    assert loop.tile.workspace_read == loop.tile.workspace_written == 0
    assert loop.tile.direct > 0
    assert not module.bound
    exponentials = [c for c in loop.tile.vector if c.name.startswith("vexp") and c.times > 1]
    assert [(c.elements, c.times) for c in exponentials] == [(64, 64)]  # a register of 64 values, a row each
    assert any(c.name.startswith("vsel") for c in loop.masked.vector)
    assert 5 < module.passes(loop.tile) < 30


def test_what_is_no_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel function"):
        hivm.read("module {\n}\n")


# --- the cost model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chip", "tflops"), [("Ascend910B2", 353.9), (A2, 294.9), (A5, 432.5)])
def test_peak(chip: str, tflops: float) -> None:
    assert cost.peak_flops(chip) / 1e12 == pytest.approx(tflops, abs=0.1)


def test_reductions_of_rows_are_read(fwd: hivm.Module) -> None:
    """The maximum and the sum of the 32 scores of each of 32 rows."""
    rows = {call.name: call.row for call in fwd.loops[0].tile.vector if call.row > 1}
    assert len(rows) == 2 and set(rows.values()) == {32}


# One head, D = 128, float16, 910B2: microseconds of pto-isa's hand-written kernel, by queries and keys (README of
# kernels/manual/common/flash_atten), whose tile is 128 x 256, too.
PTO = {1024: 20.960, 2048: 32.461, 4096: 88.902, 8192: 292.626, 16384: 909.058, 32768: 3262.645}


def test_the_model_beside_boards() -> None:
    """The work of the forward kernel as compiled in the same tile, on the same problem: docs/npu-cost-model.md has
    the table."""
    chip, tile = "Ascend910B2", hivm.Work(
        products=[hivm.Product(128, 256, 128, 16), hivm.Product(128, 128, 256, 16)],
        vector=[hivm.VectorCall("vmul_1d_float", 8192, 32, times=18)],  # as many cycles as all operations together
        loaded=131072, workspace_read=262144, workspace_written=262144, written_out=196608,
    )  # fmt: skip
    module = hivm.Module({}, True, 4, True, 0, [hivm.Loop(tile)], hivm.Work(), 128 * 256)
    for length, microseconds in PTO.items():
        call = problem(seqlen=length).replace(arch=chip, batch=1, heads_q=1, heads_kv=1, head_dim=128, head_dim_v=128)
        found = cost.predict(module, call, "fwd", 128, 256).seconds * 1e6
        assert 0.8 < found / microseconds < 1.25, (length, found, microseconds)


def test_causal_tasks_cover_the_lower_triangle() -> None:
    causal = problem(seqlen=1024, window_right=0)
    tasks = list(cost.attention_tasks(causal, "fwd", 128, 128))
    assert [t.tiles for t in tasks] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert {t.masked for t in tasks} == {1}
    backward = list(cost.attention_tasks(causal, "dkdv", 128, 128))
    assert [t.tiles for t in backward] == [8, 7, 6, 5, 4, 3, 2, 1]
    full = list(cost.attention_tasks(problem(seqlen=1024), "fwd", 128, 256))
    assert [(t.tiles, t.masked) for t in full] == [(4, 0)] * 8


def test_turns_back_and_forth_balance_falling_work() -> None:
    falling = [float(n) for n in range(16, 0, -1)]
    assert cost.scheduled(falling, 4) == [34.0] * 4
    assert max(cost.scheduled(falling, 4, zigzag=False)) == 40.0


def test_prediction_reacts_as_it_should(fwd: hivm.Module) -> None:
    """Unbound and unpipelined kernels are predicted slower, and no kernel faster than the peak."""
    causal = problem(window_right=0)
    best = cost.predict(fwd, causal, "fwd", 64, 32)
    assert 0 < best.share < 1
    assert cost.predict(replace(fwd, pipelined=0), causal, "fwd", 64, 32).seconds > best.seconds
    assert cost.predict(fwd, causal, "fwd", 64, 32, zigzag=False).balance <= best.balance
    assert best.tflops == pytest.approx(cost.useful_flops(causal, "fwd") / best.seconds / 1e12)
    full = cost.predict(fwd, problem(), "fwd", 64, 32)
    assert full.share >= best.share  # nothing is masked, so nothing is computed in vain


def test_a_call_of_few_tasks_leaves_cores_idle(fwd: hivm.Module) -> None:
    small = problem(seqlen=64).replace(batch=1, heads_q=1, heads_kv=1)
    large = problem(seqlen=8192)
    assert cost.predict(fwd, small, "fwd", 64, 32).share < cost.predict(fwd, large, "fwd", 64, 32).share / 5


def test_metrics_are_plain_numbers(fwd: hivm.Module) -> None:
    tile = configs.AttentionTile(64, 32)
    found = json.loads(json.dumps(metrics(fwd, A2, problem(window_right=0), "fwd", tile)))
    assert found["loops"][0]["tile"]["cube_flops"] == 2 * 2 * 64 * 32 * 64
    assert found["loops"][0]["mask_adds"]["vector_passes_per_score"] >= 5
    assert 0 < found["prediction"]["predicted_share_of_cube_peak"] < 1
    assert found["prediction"]["seqlen_q"] == 8192
