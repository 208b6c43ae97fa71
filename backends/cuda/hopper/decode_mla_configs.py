"""Refusals of the Hopper kernel for a latent cache (`hopper/decode_mla.py`), and its tile."""

from __future__ import annotations

from diyfa.backends.cuda.attention.decode_configs import DecodeConfig
from diyfa.backends.cuda.attention.stream_k import is_split
from diyfa.backends.cuda.hopper.configs import ARCH, DTYPES, TOO_MANY_STEPS, environment_refusal
from diyfa.problem import KVCacheProblem

HEAD_DIM, HEAD_DIM_V = 576, 512
ROWS = 64  # rows of a tile: queries of heads and tokens
BLOCK_N = 64  # keys of a block
STAGES = 2  # blocks of keys in shared memory; with the queries they fill it
# The tile, for the schedule and for `_combine_kernel`. One program fills a multiprocessor. The partial results of a
# chunk are 128 KB.
CONFIG = DecodeConfig(ROWS, BLOCK_N, 4, 1, 1, split_cost=6)


def refuses(problem: KVCacheProblem) -> str | None:
    """Why the kernel does not take `problem`, or None."""
    if problem.arch != ARCH:
        return f"sm90 is made of instructions that only {ARCH} has, this is {problem.arch}"
    if not problem.latent or (problem.head_dim, problem.head_dim_v) != (HEAD_DIM, HEAD_DIM_V):
        return f"sm90 takes latent caches of {HEAD_DIM} features, the first {HEAD_DIM_V} of which are the values"
    if problem.dtype not in DTYPES or problem.cache_dtype != problem.dtype:
        return f"sm90 takes {' and '.join(DTYPES)}, not {problem.dtype} with a cache of {problem.cache_dtype}"
    options = {
        "packed queries": problem.varlen,
        "packed keys": problem.packed_keys,
        "a window": problem.window_left >= 0 or problem.window_right > 0,
        "softcap": problem.softcap != 0.0,
        "alibi_slopes": problem.alibi,
        "sinks": problem.sinks,
        "cache_leftpad with pages": problem.leftpad and problem.paged,
        "batch_invariant": problem.batch_invariant,
        "num_splits=1": not is_split(problem),
    }
    if refused := [name for name, is_used in options.items() if is_used]:
        return f"sm90 does not take {', '.join(refused)}"
    if problem.paged and problem.page_size % BLOCK_N:
        return f"sm90 copies {BLOCK_N} keys of one page at once: pages are multiples of that, not {problem.page_size}"
    group = problem.heads_q // problem.heads_kv
    if group % ROWS and ROWS % group:
        return f"sm90 copies boxes of {ROWS} queries: {group} heads that share keys neither divide nor multiply it"
    if not problem.aligned:
        return "sm90 reads through TMA, which needs addresses and strides that are multiples of 16 bytes"
    if not problem.few_steps:
        return TOO_MANY_STEPS
    return None


def unsupported(problem: KVCacheProblem) -> str | None:
    """Why the portable kernel has to run `problem`, or None."""
    return refuses(problem) or environment_refusal()
