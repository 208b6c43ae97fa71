"""Users' score functions in the Hopper forward.

`diyfa.score_code` writes the text of a score function, and calls functions of this module in it: `load_captured`,
`number`, `precise_tanh`. They are those of the portable kernels (`attention/score_functions.py`), compiled as Gluon.
`ScoreFunction.scores` calls the function itself for a block of scores.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
import triton.language as tl  # noqa: F401 (the code of score functions names it)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from diyfa.backends.cuda.attention import score_functions as portable
from diyfa.backends.cuda.attention.scores import tanh
from diyfa.backends.cuda.attention.tile_io import PACKED
from diyfa.backends.cuda.gluon.compat import aggregate
from diyfa.score_code import Spelling

JIT = gluon.jit
load_captured = gluon.jit(portable.load_captured.fn)
number = gluon.jit(portable.number.fn)
_tanh = gluon.jit(tanh.fn)


@gluon.jit
def precise_tanh(x):
    """Return the hyperbolic tangent of fp32, with a small relative error near 0."""
    return _tanh(x, True)


SPELLING = Spelling(__name__, "score, b, h, i, j, seen, captured", "", "seen", captured="captured.pointer{n}")


@aggregate
class ScoreFunction:
    """A user's score function with its captured tensors, for query head h of sample b."""

    pointer0: gl.tensor | gl.constexpr  # None: no such tensor
    pointer1: gl.tensor | gl.constexpr
    pointer2: gl.tensor | gl.constexpr
    pointer3: gl.tensor | gl.constexpr
    b: gl.tensor | gl.constexpr
    h: gl.tensor | gl.constexpr
    config: gl.constexpr  # `Sm90Constants`, whose SCORE_FN is the function

    @gluon.jit
    def with_head(self, b, h):
        """Return the function for query head h of sample b."""
        return ScoreFunction(self.pointer0, self.pointer1, self.pointer2, self.pointer3, b, h, self.config)

    @gluon.jit
    def scores(self, s, visible, start_n, rows, problem):
        """Return the function's value for scores s [64, BLOCK_N], both in natural units: -inf where a pair is hidden.

        `visible`: which pairs the mask leaves, or None if it leaves all. `start_n`: the first key. The function may
        load elements of captured tensors for pairs, rows or columns. It gets a mask for each kind of load. So it reads
        nothing for rows beyond the last query, nor for rows from which a mask hides all keys.
        """
        positions = rows.position[:, None]
        columns = start_n + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))[None, :]
        exist_m = positions < rows.n_keys  # the last query is aligned with the last key
        # Packed, a sequence without keys has a block all the same, and its queries are at positions below 0.
        if problem.LENGTHS == PACKED and not problem.CAUSAL:
            exist_m = exist_m & (rows.n_keys > 0)
        if problem.HAS_RIGHT:
            exist_m = exist_m & (positions + problem.window_right >= 0)
        # The value may be one number for all pairs, or one for each row. `kept` has the shape of the scores, and so has
        # what is returned.
        if visible is None:  # rows beyond the end may have any scores, and a constant takes no registers
            kept = gl.full([s.shape[0], s.shape[1]], True, gl.int1, s.type.layout)
            exist_n = gl.full([1, s.shape[1]], True, gl.int1, s.type.layout)
            pairs = exist_m & exist_n
        else:
            kept = visible
            exist_n = columns < rows.n_keys
            pairs = exist_m & visible
            if self.config.MASK_K > 0:
                kept = pairs  # fewer spills than with `visible`; without a block mask it is the other way round
                exist_m = (gl.max(pairs.to(gl.int32), 1) != 0)[:, None]
        value = self.config.SCORE_FN(s, self.b, self.h, positions, columns, (pairs, exist_m, exist_n), self)
        return gl.where(kept, value, float("-inf"))
