"""The parts of the executor of compiled Ascend kernels that need no compiler."""

from __future__ import annotations

import pytest

np = pytest.importorskip("numpy")

from simulators.hivm import ir, library  # noqa: E402
from simulators.hivm.cores import wrap  # noqa: E402
from simulators.hivm.memory import GLOBAL_GRANULE, ON_CHIP_GRANULE, Memory, OutOfBounds, Ref  # noqa: E402
from simulators.hivm.order import Blocks  # noqa: E402


def ref(memory: Memory, dtype: str, base: int, *sizes: int) -> Ref:
    from simulators.hivm.memory import contiguous

    return Ref(memory, dtype, base, 0, sizes, contiguous(sizes))


def test_affine_maps_round_as_mlir_says() -> None:
    assert ir.affine("affine_map<(d0)[s0] -> ((d0 - s0) ceildiv 4, d0 floordiv 4, (d0 - s0) mod 3)>")(7, 9) == (0, 1, 1)
    assert ir.affine("affine_map<()[s0] -> ((s0 + 1) ceildiv 4)>")(4) == (2,)


def test_integers_wrap() -> None:
    assert wrap(2**31, "i32") == -(2**31)
    assert wrap(3, "i1") == 1


def test_memory_is_nan_until_written_and_ends() -> None:
    memory = Memory("UB", 64, ON_CHIP_GRANULE)
    for dtype in ("f32", "f16", "bf16"):
        assert np.isnan(ref(memory, dtype, 0, 4).read()).all()
    ref(memory, "bf16", 0, 4).write(np.array([1.0, 1.00390625, 1.01171875, np.nan], np.float32))
    assert ref(memory, "bf16", 0, 3).read().tolist() == [1.0, 1.0, 1.015625]  # ties to even
    assert np.isnan(ref(memory, "bf16", 6, 1).read()).all()
    ref(memory, "i1", 32, 10).write(np.arange(10) % 3 == 0)
    assert memory.data[32:34].tolist() == [0b01001001, 0b00000010]
    with pytest.raises(OutOfBounds):
        ref(memory, "f32", 32, 9).read()


def test_loads_fill_the_last_block_and_scratch_is_poisoned() -> None:
    source, target = Memory("gm", 64, GLOBAL_GRANULE), Memory("UB", 128, ON_CHIP_GRANULE)
    ref(source, "f32", 0, 3).write(np.ones(3, np.float32))
    library.lookup("load_gm_to_ubuf_1d_float").run([ref(source, "f32", 0, 3), ref(target, "f32", 0, 3), 2, 5.0, 0])
    assert ref(target, "f32", 0, 8).read().tolist() == [1, 1, 1, 5, 5, 5, 5, 5]
    scratch = ref(target, "f32", 32, 8)
    scratch.write(0.0)
    library.lookup("vadd_1d_float").run([ref(target, "f32", 0, 8)] * 3 + [scratch])
    assert ref(target, "f32", 0, 1).read() == 2
    assert np.isnan(scratch.read()).all()
    with pytest.raises(NotImplementedError, match="vfoo"):
        library.lookup("vfoo_1d_float")


def test_blocks_must_not_touch_what_others_write() -> None:
    blocks, memory = Blocks(), Memory("gm", 64, GLOBAL_GRANULE)
    first, second = ref(memory, "f16", 0, 4), ref(memory, "f16", 8, 4)
    assert not blocks.conflict(0, first, True)
    assert not blocks.conflict(1, second, True)
    assert not blocks.conflict(0, first, False)
    assert blocks.conflict(1, first, False) == "written by another block"
    assert blocks.conflict(0, second, True) == "written by another block"


def test_atomic_additions_of_two_blocks_do_not_conflict() -> None:
    blocks, memory = Blocks(), Memory("gm", 64, GLOBAL_GRANULE)
    where = ref(memory, "f32", 0, 4)
    assert not blocks.conflict(0, where, True, atomic=True)
    assert not blocks.conflict(1, where, True, atomic=True)
    assert blocks.conflict(1, where, False) == blocks.conflict(1, where, True) == "written by another block"
