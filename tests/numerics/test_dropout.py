"""The definition of dropout's mask: published words, addressing, and what a mask must not show."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import diyfa
from diyfa.dropout import (
    LEVELS,
    drop_threshold,
    dropout_mask,
    element_levels,
    head_keys,
    keys_from_state,
    mask_from_keys,
    philox4x32,
    position_words,
    with_origins,
)

ONES = 0xFFFFFFFF
# Random123's kat_vectors for philox4x32-10: counter, key, result.
KNOWN_ANSWERS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]  # fmt: skip
PROBABILITIES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9)
SIGMAS = 4.5  # with the couple of hundred numbers tested here, what chance alone does not reach


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, result) -> None:
    words = philox4x32(tuple(torch.tensor(c) for c in counter), key)
    assert tuple(int(w) for w in words) == result


# ---- the definition, once more: Python integers, one element at a time --------------------------------------------


def philox_by_integers(counter, key):
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & ONES, (p0 >> 32) ^ c3 ^ k1, p0 & ONES
        k0, k1 = (k0 + 0x9E3779B9) & ONES, (k1 + 0xBB67AE85) & ONES
    return c0, c1, c2, c3


def level_by_integers(seed, offset, b, h, i, j):
    def word(key, position):
        x = (position * 0x9E3779B9 + key) & ONES
        x = ((x ^ (x >> 15)) * 0x846CA68B) & ONES
        return x ^ (x >> 16)

    keys = philox_by_integers((h, b, offset & ONES, offset >> 32), (seed & ONES, seed >> 32))
    r0, r1, c0, c1 = (word(key, position) for key, position in zip(keys, (i, i, j, j), strict=True))
    x = ((r0 + c0) * (r1 + c1)) & ONES
    return (x - 2**32 if x >= 2**31 else x) >> 8


@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (1234, 1), (2**64 - 1, 2**64 - 1), (2**40 + 7, 2**33 + 5)])
def test_elements_are_as_defined(seed, offset) -> None:
    keys = head_keys(3, 5, seed, offset)
    i, j = torch.tensor([0, 1, 2**15, 2**31 - 1]), torch.tensor([0, 3, 70000])
    words = [position_words(key, x) for key, x in zip(keys, (i, i, j, j), strict=True)]
    levels = element_levels(*words)
    assert levels.shape == (3, 5, 4, 3)
    for b, h, m, n in ((0, 0, 0, 0), (2, 4, 3, 2), (1, 3, 2, 1), (2, 0, 1, 2)):
        assert int(levels[b, h, m, n]) == level_by_integers(seed, offset, b, h, int(i[m]), int(j[n]))


def test_known_words() -> None:
    """Fixed for good: a change of these numbers changes the mask of every saved (seed, offset)."""
    keys = head_keys(1, 1, 0, 0)
    assert [int(k) for k in keys] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert position_words(keys[0], torch.arange(3)).flatten().tolist() == [0xB1F40A6A, 0xCAE902F9, 0xF683FE0D]
    keep = dropout_mask(2, 2, 4, 8, 0.5, seed=2**63 + 12345, offset=7)
    packed = [sum(int(bit) << n for n, bit in enumerate(row)) for row in keep.flatten(0, 2)]
    assert bytes(packed).hex() == "87b20b8baf8e0544cdf81dc89ecf716a"


def test_threshold() -> None:
    assert drop_threshold(0.0) == -(2**23)
    assert drop_threshold(0.5) == 0
    assert drop_threshold(0.25) == -(2**22)
    assert drop_threshold(1 - 2**-40) == LEVELS // 2 - 1  # something can always be kept
    for p in (0.1, 0.3, 1 / 3, 0.999):
        assert abs((drop_threshold(p) + LEVELS // 2) / LEVELS - p) <= 0.5 / LEVELS
        assert torch.tensor(drop_threshold(p), dtype=torch.float32).item() == drop_threshold(p)


def test_a_position_keeps_its_bit_whatever_the_sizes() -> None:
    big = dropout_mask(3, 4, 50, 70, 0.5, seed=2**40 + 7, offset=3)
    small = dropout_mask(2, 2, 20, 33, 0.5, seed=2**40 + 7, offset=3)
    assert torch.equal(big[:2, :2, :20, :33], small)


def test_a_part_with_origins_has_the_bits_of_the_whole() -> None:
    big = dropout_mask(3, 4, 50, 70, 0.5, seed=2**40 + 7, offset=3)
    origins = torch.tensor([[2, 1, 30, 37], [0, 2, 7, 0]])
    part = dropout_mask(2, 2, 20, 33, 0.5, seed=2**40 + 7, offset=3, origins=origins)
    assert torch.equal(part[0], big[2, 1:3, 30:50, 37:]) and torch.equal(part[1], big[0, 2:, 7:27, :33])
    state = with_origins(torch.tensor([2**40 + 7, 3]), origins.tolist())
    assert torch.equal(mask_from_keys(keys_from_state(state, 2, 2), 20, 33, 0.5), part)
    with pytest.raises(ValueError, match="origins must have shape"):
        dropout_mask(1, 2, 20, 33, 0.5, seed=0, origins=origins)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int32, torch.float64])
def test_origins_of_another_dtype_are_refused(dtype: torch.dtype) -> None:
    """In narrow integers a position times the step wraps where it must not."""
    with pytest.raises(TypeError, match="origins must be int64"):
        dropout_mask(1, 2, 5, 7, 0.5, seed=0, origins=torch.ones(1, 4, dtype=dtype))
    with pytest.raises(TypeError, match=r"origins must be a torch\.Tensor"):
        dropout_mask(1, 2, 5, 7, 0.5, seed=0, origins=[(0, 0, 0, 0)])  # type: ignore[arg-type]


def test_larger_probabilities_drop_more_of_the_same() -> None:
    masks = [dropout_mask(1, 2, 40, 40, p, seed=5) for p in PROBABILITIES]
    for some, more in itertools.pairwise(masks):
        assert bool((some | ~more).all()) and some.sum() > more.sum()
    assert bool(dropout_mask(1, 1, 90, 90, 0.0, seed=3).all())


def test_public_name_and_signed_seeds() -> None:
    assert diyfa.dropout_mask is dropout_mask
    assert torch.equal(dropout_mask(1, 2, 9, 9, 0.5, seed=-1), dropout_mask(1, 2, 9, 9, 0.5, seed=2**64 - 1))
    assert dropout_mask(0, 2, 0, 5, 0.5, seed=1).shape == (0, 2, 0, 5)


@pytest.mark.parametrize(("p", "seed", "offset"), [(0.5, 2**64, 0), (0.5, 0, 2**64), (0.5, -(2**63) - 1, 0)])
def test_words_of_more_than_64_bits_are_refused(p, seed, offset) -> None:
    with pytest.raises(ValueError, match="of 64 bits"):
        dropout_mask(1, 1, 1, 1, p, seed, offset)


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_probabilities_outside_are_refused(p) -> None:
    with pytest.raises(ValueError, match="dropout_p"):
        dropout_mask(1, 1, 1, 1, p, 0)


# ---- statistics ---------------------------------------------------------------------------------------------------


def standardised(keep: torch.Tensor, p: float) -> torch.Tensor:
    """Mean 0 and variance 1 where the bits are as they should be."""
    p = (drop_threshold(p) + LEVELS // 2) / LEVELS
    return (keep.double() - (1 - p)) / math.sqrt(p * (1 - p))


def sigmas(x: torch.Tensor) -> float:
    """How many standard deviations the mean of independent numbers of variance 1 lies from 0."""
    return abs(float(x.mean())) * math.sqrt(x.numel())


@pytest.mark.parametrize("p", PROBABILITIES)
def test_keep_rate(p) -> None:
    for seed in (0, 1, 2**63):
        w = standardised(dropout_mask(2, 2, 700, 700, p, seed=seed, offset=1), p)
        assert sigmas(w) < SIGMAS
        # of each row and of each column: sums of squares, chi-square with one degree of freedom for each
        for dim in (-1, -2):
            squares = w.mean(dim).square() * w.shape[dim]
            assert abs(float(squares.mean()) - 1) < SIGMAS * math.sqrt(2 / squares.numel()) * 1.1


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_rows_and_columns_are_uncorrelated_pair_by_pair(p) -> None:
    for seed in range(3):
        w = standardised(dropout_mask(1, 1, 1024, 1024, p, seed=seed)[0, 0], p)
        for x in (w, w.T.contiguous()):
            pairs = (x @ x.T / math.sqrt(x.shape[1]))[torch.triu(torch.ones(1024, 1024, dtype=torch.bool), 1)]
            assert float(pairs.abs().max()) < 8.0  # half a million pairs; a repeated row reaches 32
            # The sum of squares sees correlations too small to stand out in any one pair.
            skew = (1 - 2 * p) ** 2 / (p * (1 - p))
            spread = math.sqrt((2 + 2 * skew + skew**2 / 1024) / pairs.numel()) + skew / 1024
            assert abs(float(pairs.square().mean()) - 1) < SIGMAS * spread


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_neighbours_in_every_coordinate_are_uncorrelated(p) -> None:
    """Neighbouring samples, heads, seeds and offsets, and swapped coordinates."""
    base = {"batch": 4, "heads": 4, "seqlen_q": 300, "seqlen_k": 300, "dropout_p": p}
    w = standardised(dropout_mask(**base, seed=77, offset=9), p)
    others = {
        "next seed": standardised(dropout_mask(**base, seed=78, offset=9), p),
        "next high seed": standardised(dropout_mask(**base, seed=77 + 2**32, offset=9), p),
        "next offset": standardised(dropout_mask(**base, seed=77, offset=10), p),
        "next high offset": standardised(dropout_mask(**base, seed=77, offset=9 + 2**32), p),
        "seed and offset exchanged": standardised(dropout_mask(**base, seed=9, offset=77), p),
        "queries and keys exchanged": w.transpose(-1, -2),
        "sample and head exchanged": w.transpose(0, 1),
    }
    for name, other in others.items():
        product = w * other
        if "queries" in name:  # each pair counts once
            product = product[..., torch.triu(torch.ones(300, 300, dtype=torch.bool), 1)]
        if "sample" in name:
            product = product[torch.triu(torch.ones(4, 4, dtype=torch.bool), 1)]
        assert sigmas(product) < SIGMAS, name
    flat = w.flatten(0, 1).flatten(1)
    between = (flat @ flat.T / math.sqrt(flat.shape[1]))[torch.triu(torch.ones(16, 16, dtype=torch.bool), 1)]
    assert float(between.abs().max()) < SIGMAS


@pytest.mark.parametrize("p", [0.2, 0.5, 0.8])
def test_corners_of_rectangles_are_independent(p) -> None:
    """Sums of a row and a column word fail here: their four corners are bound to each other."""
    w = standardised(dropout_mask(1, 2, 1200, 1200, p, seed=31)[0], p)
    for rows in (1, 2, 3, 16, 64, 128, 1024):
        for columns in (1, 2, 5, 32, 128, 513):
            edges = w[:, rows:] * w[:, :-rows]
            assert sigmas(edges[..., columns:] * edges[..., :-columns]) < SIGMAS, (rows, columns)


def test_the_rectangle_test_catches_added_words() -> None:
    """What the product is for: the same words merely added, thresholded at one half."""
    keys = head_keys(1, 1, 31, 0)
    r0, _, c0, _ = (position_words(key[0, 0], torch.arange(600)) for key in keys)
    added = ((r0[:, None] + c0[None, :]) & ONES) >= 2**31
    w = standardised(added, 0.5)
    edges = w[1:] * w[:-1]
    assert sigmas(edges[:, 1:] * edges[:, :-1]) > 50


@pytest.mark.parametrize("p", [0.2, 0.5, 0.8])
def test_triples_along_a_line_are_independent(p) -> None:
    w = standardised(dropout_mask(1, 2, 1000, 1000, p, seed=8)[0], p)
    for near, far in ((1, 2), (1, 3), (2, 7), (64, 128)):
        for x in (w, w.transpose(-1, -2)):
            assert sigmas(x[:, :-far] * x[:, near : x.shape[1] - far + near] * x[:, far:]) < SIGMAS
