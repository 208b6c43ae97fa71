"""Configs of the Hopper forward over a KV cache (`hopper/prefill.py`), and the calls that it runs. Plain data."""

from __future__ import annotations

from dataclasses import replace

from diyfa.backends.cuda.hopper import configs
from diyfa.backends.cuda.hopper.configs import Sm90Config
from diyfa.problem import AttentionProblem, KVCacheProblem, cached_per_problem

MIN_PAGE_SIZE = 16  # keys; with smaller pages, a key block would take too many copies
SWIZZLE_COLUMNS = 64  # columns of the widest box whose rows follow each other in memory, so that boxes can be stacked
# For two consumers and a producer, if a key block has several pages. Three consumers have no registers to give away.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
# Fewest queries of a sequence, on average, that the kernel takes. Its tiles have queries of one head. With fewer, the
# portable kernel runs: it has all heads of a group in one tile, and splits keys among programs.
MIN_QUERIES = 64


@cached_per_problem
def as_forward(problem: KVCacheProblem) -> AttentionProblem:
    """Return the call as a problem of the forward pass, whose sequence lengths only the device knows."""
    return problem.described_as(AttentionProblem, seqlen_k=problem.capacity, seq_lens=not problem.varlen)


@cached_per_problem
def select_config(problem: KVCacheProblem) -> Sm90Config:
    """Return the forward's config, adapted if a key block has several pages.

    Then each page is copied to its rows of the buffer, so boxes must be narrow enough to be stacked. And the producer
    gets more registers, from the consumers, to count pages. At 128 columns they have none left for a fixed maximum.
    """
    forward = as_forward(problem)
    config = configs.select_config(forward)
    if not 0 < problem.page_size < config.block_n:
        return config
    if configs.box_layout(problem.head_dim, problem.head_dim_v, config.box_columns)[0] > SWIZZLE_COLUMNS:
        config = configs.fitted(forward, replace(config, box_columns=SWIZZLE_COLUMNS))
    if config.consumers == 2:
        config = replace(
            config, consumer_registers=CONSUMER_REGISTERS, producer_registers=PRODUCER_REGISTERS,
            q_in_registers=min(config.q_in_registers, 1),
            fixed_max=config.fixed_max and configs.tile_class(forward)[0] != 128,
        )  # fmt: skip
    return config


def refuses(problem: KVCacheProblem) -> str | None:
    """Return why the kernel does not take `problem`, or None."""
    if problem.cache_dtype != problem.dtype:
        return f"sm90_prefill takes keys in the dtype of the queries, not {problem.cache_dtype} for {problem.dtype}"
    options = {
        "cache_leftpad": problem.leftpad,
        "num_splits": problem.num_splits > 1 and not problem.batch_invariant,
    }
    if refused := [name for name, is_used in options.items() if is_used]:
        return f"sm90_prefill does not take {', '.join(refused)}"
    queries = problem.total_q // max(problem.batch, 1) if problem.varlen else problem.seqlen_q
    if queries < MIN_QUERIES:
        return f"sm90_prefill pays from {MIN_QUERIES} queries of a sequence on, these have {queries} on average"
    if reason := configs.refuses(as_forward(problem)):
        return reason
    if not problem.few_steps:  # the forward pass does not check it for packed queries
        return configs.TOO_MANY_STEPS
    if not problem.aligned_out:
        return "sm90_prefill writes out through TMA, which needs an address and strides that are multiples of 16 bytes"
    block_n, page = select_config(problem).block_n, problem.page_size
    if problem.paged and (page < MIN_PAGE_SIZE or (page % block_n and block_n % page)):
        return (
            f"sm90_prefill copies {block_n} keys of one page or of several whole ones: pages are multiples of "
            f"that, or divide it and are {MIN_PAGE_SIZE} at least, not {page}"
        )
    return None


def unsupported(problem: KVCacheProblem) -> str | None:
    """Return why the portable kernel has to run `problem`, or None."""
    return refuses(problem) or configs.environment_refusal()
