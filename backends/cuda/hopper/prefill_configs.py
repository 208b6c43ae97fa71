"""Which calls with a cache the Hopper forward runs (`hopper/prefill.py`), and with which config. Plain data."""

from __future__ import annotations

from dataclasses import replace

from diyfa.backends.cuda.hopper import configs
from diyfa.backends.cuda.hopper.configs import Sm90Config
from diyfa.problem import AttentionProblem, KVCacheProblem, kept

SMALLEST_PAGE = 16  # keys; of smaller ones a block of keys would be too many copies
SWIZZLE_COLUMNS = 64  # of the widest box that lies in memory row by row, so that boxes fill a tile one below another
# Of two consumers and the producer where a block of keys has several pages. Three have none to give.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
# (at most so many query heads for a head of keys) -> fewest queries of a sequence, on average, from which on a tile of
# one head's queries pays. Below, the portable kernel has all of these heads in one tile and shares keys among programs.
FEWEST_QUERIES: tuple[tuple[int, int], ...] = ((1 << 30, 64),)


@kept
def as_forward(problem: KVCacheProblem) -> AttentionProblem:
    """The call as the tables of the forward pass see it: with sequences that end where only the device knows."""
    return problem.described_as(
        AttentionProblem, seqlen_k=problem.capacity, seq_lens=not problem.varlen, batch_invariant=False
    )


@kept
def config_of(problem: KVCacheProblem) -> Sm90Config:
    """The forward's tile; where pages are smaller, with boxes that they fill, and registers to keep count of them."""
    forward = as_forward(problem)
    config = configs.config_of(forward)
    if not 0 < problem.page_size < config.block_n:
        return config
    if configs.boxes_of(problem.head_dim, problem.head_dim_v, config.box_columns)[0] > SWIZZLE_COLUMNS:
        config = configs.fitted(forward, replace(config, box_columns=SWIZZLE_COLUMNS))
    if config.consumers == 2:
        config = replace(
            config, consumer_registers=CONSUMER_REGISTERS, producer_registers=PRODUCER_REGISTERS,
            q_in_registers=min(config.q_in_registers, 1),
        )  # fmt: skip
    return config


def _queries(problem: KVCacheProblem) -> int:
    """Of a sequence, on average."""
    return problem.total_q // max(problem.batch, 1) if problem.varlen else problem.seqlen_q


def _fewest_queries(problem: KVCacheProblem) -> int:
    group = problem.heads_q // problem.heads_kv
    return next(fewest for most, fewest in FEWEST_QUERIES if group <= most)


def has_few_queries(problem: KVCacheProblem) -> bool:
    """Whether the kernel is refused however many keys there are."""
    return _queries(problem) < _fewest_queries(problem)


def refuses(problem: KVCacheProblem) -> str | None:
    """Why the kernel does not take `problem`, or None."""
    if problem.cache_dtype != problem.dtype:
        return f"sm90_prefill takes keys in the dtype of the queries, not {problem.cache_dtype} for {problem.dtype}"
    used = {
        "cache_leftpad": problem.leftpad,
        "batch_invariant": problem.batch_invariant,
        "num_splits": problem.num_splits > 1,
    }
    if refused := [name for name, is_used in used.items() if is_used]:
        return f"sm90_prefill does not take {', '.join(refused)}"
    if has_few_queries(problem):
        fewest, queries = _fewest_queries(problem), _queries(problem)
        return f"sm90_prefill pays from {fewest} queries of a sequence on, these have {queries} on average"
    if reason := configs.refuses(as_forward(problem)):
        return reason
    if not problem.few_steps:  # of packed queries' pages, which the forward pass does not ask about
        return configs.TOO_MANY_STEPS
    if not problem.aligned_out:
        return "sm90_prefill writes out through TMA, which needs an address and strides that are multiples of 16 bytes"
    block_n, page = config_of(problem).block_n, problem.page_size
    if problem.paged and (page < SMALLEST_PAGE or (page % block_n and block_n % page)):
        return (
            f"sm90_prefill copies {block_n} keys of one page or of several whole ones: pages are multiples of "
            f"that, or divide it and are {SMALLEST_PAGE} at least, not {page}"
        )
    return None


def unsupported(problem: KVCacheProblem) -> str | None:
    """Why the portable kernel has to run `problem`, or None."""
    return refuses(problem) or configs.environment_refusal()
