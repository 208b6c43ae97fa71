"""Block masks in Gluon kernels: the list of key blocks that a tile of queries visits, and the bits of partial ones.

`diyfa.block_lists` describes the tensors. The queries of a tile lie in one block of the mask, so a tile has one list.
It visits its partial blocks first, because the first block of a tile is masked in any case, then its full ones.

The mask and the kernel divide the keys differently. A unit is the smaller of MASK_K and BLOCK_N keys. If BLOCK_N is
twice MASK_K, a key block of the kernel has UNITS = 2 units: two listed blocks, wherever they are, one above the other
in shared memory. If their number is odd, the tile's first unit is absent: its keys are zeros, and nobody sees them. If
MASK_K is twice BLOCK_N, a listed block has SPLIT = 2 units, which the tile visits one after the other.

The bits of a key block are found in three steps. The list gives the *column* of each unit: the number of its block of
the mask along the keys. The code at that column says EMPTY, FULL, or which block of bits is the unit's. The *words* of
that block have one bit for each key, 32 to a word.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from diyfa.backends.cuda.gluon.compat import aggregate

WORD = gl.constexpr(32)  # bits of a word
EMPTY, FULL = gl.constexpr(-2), gl.constexpr(-1)  # codes of blocks, as in `diyfa.block_lists`
ABSENT = gl.constexpr(1 << 22)  # column of an absent unit: no tensor has keys there, and 32 bits hold their number


@aggregate
class BlockMask:
    """Arguments of a block mask. Without one, pointers and strides are None."""

    blocks_ptr: gl.tensor | gl.constexpr
    bits_ptr: gl.tensor | gl.constexpr
    stride_b: gl.tensor | gl.constexpr
    stride_h: gl.tensor | gl.constexpr
    MASK_Q: gl.constexpr  # queries of a block; 0: no block mask
    MASK_K: gl.constexpr  # keys of a block


@aggregate
class Listed:
    """The numbers of a tile's listed blocks, and the codes of the units of the tile's first key block."""

    n_full: gl.tensor  # full blocks of the mask
    n_partial: gl.tensor  # partial blocks of the mask
    code: gl.tensor  # of the first unit
    next_code: gl.tensor  # of the second unit; equal to `code` if there is only one


@aggregate
class TileList:
    """The list of a tile's key blocks. `i` in its methods is the position of a key block among those of the tile."""

    codes_ptr: gl.tensor  # codes of the mask's blocks that the tile's queries lie in, by column
    list_ptr: gl.tensor  # columns: of full blocks, then of partial ones
    n_full: gl.tensor
    n_partial: gl.tensor
    bits_ptr: gl.tensor  # bits of the tile's first row in block 0 of `mask_bits`
    MASK_Q: gl.constexpr
    MASK_K: gl.constexpr
    UNIT: gl.constexpr  # keys of a unit
    UNITS: gl.constexpr  # units of a key block of the kernel
    SPLIT: gl.constexpr  # units of a block of the mask

    @gluon.jit
    def absent(self):
        """Return how many absent units the tile has, in front of the others: 0 or 1."""
        return (self.n_full + self.n_partial) * self.SPLIT % self.UNITS

    @gluon.jit
    def block_count(self):
        """Return the number of the tile's key blocks, at least 1: a tile that sees no key writes its results, too."""
        return gl.maximum(gl.cdiv((self.n_full + self.n_partial) * self.SPLIT, self.UNITS), 1)

    @gluon.jit
    def masked_count(self):
        """Return how many key blocks have a partial or absent unit, at least 1. They come first."""
        return gl.maximum(gl.cdiv(self.absent() + self.n_partial * self.SPLIT, self.UNITS), 1)

    @gluon.jit
    def column(self, i, UNIT_INDEX: gl.constexpr):
        """Return the column of unit UNIT_INDEX of key block i, or ABSENT."""
        unit = i * self.UNITS + UNIT_INDEX - self.absent()
        position = gl.maximum(unit, 0) // self.SPLIT
        exists = (unit >= 0) & (position < self.n_full + self.n_partial)
        entry = gl.where(position < self.n_partial, self.n_full + position, position - self.n_partial)
        return gl.load(self.list_ptr + entry, mask=exists, other=ABSENT)

    @gluon.jit
    def columns(self, i):
        """Return the `column` of each unit of key block i."""
        columns = (self.column(i, 0),)
        if self.UNITS == 2:
            columns += (self.column(i, 1),)
        return columns

    @gluon.jit
    def masked_columns(self, i):
        """Return the `columns` of key block i if it is one of `masked_count`; of others the result is not used.

        With one unit, masked blocks are partial blocks of the mask. Their columns take fewer registers to compute.
        """
        if self.UNITS == 1:
            position = i // self.SPLIT
            partial = self.list_ptr + self.n_full
            columns = (gl.load(partial + position, mask=position < self.n_partial, other=ABSENT),)
        else:
            columns = self.columns(i)
        return columns

    @gluon.jit
    def codes(self, columns):
        """Return the codes of units at these columns: EMPTY for an absent unit."""
        codes = ()
        for j in gl.static_range(self.UNITS):
            codes += (gl.load(self.codes_ptr + columns[j], mask=columns[j] < ABSENT, other=EMPTY),)
        return codes

    @gluon.jit
    def first_key(self, i, columns, UNIT_INDEX: gl.constexpr):
        """Return the first key of a unit of key block i. An absent unit has one that lies beyond all keys."""
        return columns[UNIT_INDEX] * self.MASK_K + i % self.SPLIT * self.UNIT

    @gluon.jit
    def keep_words(self, i, codes, rows):
        """Return BLOCK_N / 32 words [rows] of key block i: a bit is 1 if the row sees the key.

        `codes`: those of the block's units. `rows`: counted from the row0 of `tile_list`.
        """
        WORDS: gl.constexpr = self.MASK_K // WORD  # words of a row of a block
        words = ()
        for j in gl.static_range(self.UNITS):
            block = self.bits_ptr + gl.maximum(codes[j], 0).to(gl.int64) * (self.MASK_Q * WORDS)
            block += i % self.SPLIT * (self.UNIT // WORD)
            all_or_none = gl.where(codes[j] == FULL, -1, 0)
            for word in gl.static_range(self.UNIT // WORD):
                words += (gl.load(block + rows * WORDS + word, mask=codes[j] >= 0, other=all_or_none),)
        return words


@gluon.jit
def tile_list(mask, b, h, row0, sizes, n_full, n_partial, BLOCK_N: gl.constexpr):
    """Return the `TileList` of a tile in head h of sample b, for its rows from row0 on. `sizes`: (Sq, Sk).

    A head of `mask_blocks` begins with nq * nk codes and nq lists of 2 + nk entries. A list has a count of full blocks,
    a count of full and partial blocks, and columns.
    """
    seqlen_q, seqlen_k = sizes
    MASK_K: gl.constexpr = mask.MASK_K
    UNIT: gl.constexpr = min(MASK_K, BLOCK_N)
    UNITS: gl.constexpr = BLOCK_N // UNIT
    SPLIT: gl.constexpr = MASK_K // UNIT
    nq = gl.cdiv(seqlen_q, mask.MASK_Q)
    nk = gl.cdiv(seqlen_k, MASK_K)
    head = mask.blocks_ptr + b.to(gl.int64) * mask.stride_b + h.to(gl.int64) * mask.stride_h
    block_q = row0 // mask.MASK_Q
    codes_ptr = head + block_q * nk
    list_ptr = head + (nq * nk + block_q * (2 + nk) + 2)
    bits_ptr = mask.bits_ptr + row0 % mask.MASK_Q * (MASK_K // WORD)
    return TileList(codes_ptr, list_ptr, n_full, n_partial, bits_ptr, mask.MASK_Q, MASK_K, UNIT, UNITS, SPLIT)


@gluon.jit
def listed_blocks(mask, b, h, row0, sizes, BLOCK_N: gl.constexpr):
    """Return (`Listed` of a tile, number of its key blocks)."""
    # Both counts lie in front of the columns. Their address does not depend on the counts, so row0 stands in for them.
    uncounted = tile_list(mask, b, h, row0, sizes, row0, row0, BLOCK_N)
    n_full = gl.load(uncounted.list_ptr - 2)
    n_partial = gl.load(uncounted.list_ptr - 1) - n_full
    tile = tile_list(mask, b, h, row0, sizes, n_full, n_partial, BLOCK_N)
    codes = tile.codes(tile.columns(0))
    return Listed(n_full, n_partial, codes[0], codes[-1]), tile.block_count()
