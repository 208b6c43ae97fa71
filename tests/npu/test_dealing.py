"""Which program of a persistent grid gets which block of packed sequences."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in Triton's interpreter", allow_module_level=True)

import triton.language as tl

from diyfa.backends.npu.compat import kernel
from diyfa.backends.npu.primitives import first_of_next, task_of, tasks_of

HEADS, BLOCK = 3, 16


@kernel
def deal_kernel(cu_seqlens_ptr, taken_ptr, batch, heads, total, most, BLOCK: tl.constexpr):
    """taken[program, b, h, block] counts how often a program takes a task, in the loops of the attention kernels."""
    program = tl.program_id(0)
    first = program
    for sample in range(batch):
        blocks, tasks = tasks_of(cu_seqlens_ptr, sample, total, 0, batch, heads, BLOCK, True)
        for task in range(first, tasks, tl.num_programs(0)):
            b, h, block = task_of(task, sample, blocks, heads, True)
            place = taken_ptr + ((program * batch + b) * heads + h) * most + block
            tl.store(place, tl.load(place) + 1)
        first = first_of_next(first, tasks, tl.num_programs(0))


@pytest.mark.parametrize("programs", [1, 2, 7, 20])
@pytest.mark.parametrize("lengths", [(100,), (16, 17, 0, 0, 1, 300), (0, 0, 0), (5,) * 40], ids=str)
def test_every_block_goes_to_one_program_and_all_get_as_many(lengths: tuple[int, ...], programs: int) -> None:
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    blocks = [-(-n // BLOCK) for n in lengths]
    most = max([*blocks, 1])
    taken = torch.zeros(programs, len(lengths), HEADS, most, dtype=torch.int32)
    deal_kernel[(programs,)](cu_seqlens, taken, len(lengths), HEADS, int(cu_seqlens[-1]), most, BLOCK=BLOCK)
    exists = torch.arange(most) < torch.tensor(blocks)[:, None]  # (B, blocks)
    assert torch.equal(taken.sum(0), exists[:, None].expand(-1, HEADS, -1).int())
    shares = taken.sum((1, 2, 3))
    assert shares.max() - shares.min() <= 1
