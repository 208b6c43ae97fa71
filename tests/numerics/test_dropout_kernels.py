"""Dropout inside kernels: every backend's helpers give the bits of the definition, whatever the tile."""

from __future__ import annotations

import importlib
import os

import pytest
import torch
from targets import TARGETS

from diyfa.dropout import drop_threshold, element_levels, head_keys, philox4x32, position_words

pytest.importorskip("triton")
# The helpers of both backends run in any Triton's interpreter; on a device only its own.
BACKENDS = [name for name in ("cuda", "npu") if name in TARGETS or os.environ.get("TRITON_INTERPRET") == "1"]
STATES = [(0, 0), (2**63 + 12345, 7), (2**64 - 1, 2**40 + 3)]
P = 0.3
# row0, column0, rows, columns
ORIGINS = [(0, 0, 70, 50), (128, 4096, 33, 129), (65537, 5, 17, 40), (2**31 - 80, 2**31 - 70, 64, 64)]


def signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def mask_in_tiles(backend, state, b, h, origin, block_m, block_n, transposed, origins=()):
    """Elements [rows, columns] of the mask from the kernel; `origins` of every sample."""
    from dropout_kernels import constants, mask_kernel

    helpers = importlib.import_module(f"diyfa.backends.{backend}.attention.dropout")
    row0, column0, rows, columns = origin
    device = TARGETS[backend].device if backend in TARGETS else "cpu"
    rng_state = torch.tensor([signed(x) for x in (*state, *(number for own in origins for number in own))]).to(device)
    keep = torch.full((rows, columns), -1.0).to(device)
    mask_kernel[(1,)](
        rng_state, keep, b, h, row0, column0, helpers.keep_threshold(P), rows, columns,
        **constants(helpers, block_m, block_n, transposed, bool(origins)),
    )  # fmt: skip
    keep = keep.cpu()
    assert bool(((keep == 0) | (keep == 1)).all())
    return keep.bool()


def mask_of_the_definition(state, b, h, origin):
    """The same elements, without forming the two billion before them."""
    row0, column0, rows, columns = origin
    i, j = torch.arange(rows) + row0, torch.arange(columns) + column0
    keys = head_keys(b + 1, h + 1, *state)
    words = [position_words(key[b, h], x) for key, x in zip(keys, (i, i, j, j), strict=True)]
    return element_levels(*words) >= drop_threshold(P)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize(("block_m", "block_n"), [(16, 16), (64, 32), (32, 128)])
def test_tiles_hold_the_defined_bits(backend, block_m, block_n, transposed) -> None:
    for state in STATES:
        for origin in ORIGINS:
            keep = mask_in_tiles(backend, state, 2, 3, origin, block_m, block_n, transposed)
            assert torch.equal(keep, mask_of_the_definition(state, 2, 3, origin)), (state, origin)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
def test_origins_move_a_mask(backend, transposed) -> None:
    """Each sample's own; beyond 32 bits they count modulo 2**32, as all words do."""
    for state in STATES:
        for b0, h0, i0, j0 in (
            (5, 2, 77, 1000),
            (2**31 - 1, 2**20, 2**31, 2**32 - 30),
            (0, 0, 2**40 + 3, 2**45 + 1),
            (2**35 + 3, 2**33 + 2, 0, 0),
        ):
            origins = ((9, 9, 9, 9), (b0, h0, i0, j0))
            keep = mask_in_tiles(backend, state, 1, 3, (16, 0, 70, 50), 16, 32, transposed, origins)
            seed, offset = state
            counter = ((h0 + 3) % 2**32, b0 % 2**32, offset % 2**32, offset >> 32)
            keys = philox4x32(tuple(torch.tensor(x) for x in counter), (seed % 2**32, seed >> 32))
            i, j = torch.arange(70) + 16 + i0 % 2**32, torch.arange(50) + j0 % 2**32
            words = [position_words(key, x) for key, x in zip(keys, (i, i, j, j), strict=True)]
            assert torch.equal(keep, element_levels(*words) >= drop_threshold(P)), (state, b0, h0, i0, j0)
