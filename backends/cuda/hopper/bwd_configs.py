"""Configs of the Hopper backward (`hopper/bwd*.py`), and the problems that it runs. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from diyfa.backends.cuda.attention.configs import MIN_QUERIES
from diyfa.backends.cuda.hopper.configs import (
    ARCH,
    DTYPES,
    MIN_HEAD_DIM,
    TOO_MANY_STEPS,
    environment_refusal,
    keys_seen,
    widest,
)
from diyfa.problem import AttentionProblem, cached_per_kind, refuse_features

FEATURES = frozenset({
    "causal", "gqa", "seq_lens", "varlen", "window", "softcap", "alibi", "sinks", "head_dim_v", "batch_invariant",
    "mask",
})  # fmt: skip
MAX_HEAD_DIM = 256
WIDE = 128  # most columns with which dK and dV of 64 keys fit the registers of a warpgroup
CONSUMERS = 2  # warpgroups
# Fewest elements of K per query, and fewest scores of a call, with which the kernel is chosen unless another is named.
# With less, both it and the portable kernels take some 30 us, and which is faster varies (docs/log/hopper-backward.md).
MIN_KV_LOOP, MIN_SCORES = 1 << 16, 1 << 24
BOX_COLUMNS = 64  # columns of the TMA boxes that make up a tile
SHARED_MEMORY = 226 * 1024  # bytes for tiles; the rest is for barriers


@dataclass(frozen=True)
class Sm90BwdConfig:
    """Tile and schedule of the Hopper backward."""

    block_m: int  # queries of a block
    block_n: int  # keys of a program
    stages: int  # buffers for blocks of Q and dO
    form: str = "keys"  # the kernels: "keys" (`bwd.py`), "columns" (`bwd_wide*.py`), "mla" (`bwd_mla.py`)
    consumer_registers: int = 240
    producer_registers: int = 24
    measured: str = ""  # device, date, TFLOP/s


# Columns of a tile -> config. Figures: bf16, 16384 tokens, heads * head_dim = 2048, full at 1k/4k/16k, causal at 16k.
CONFIGS: dict[int, Sm90BwdConfig] = {
    64: Sm90BwdConfig(128, 128, 2, measured="H200, 2026-11-25: 416/484/504, 489"),
    128: Sm90BwdConfig(64, 128, 2, measured="H200, 2026-11-25: 490/568/590, 541"),
    192: Sm90BwdConfig(64, 128, 2, form="mla", measured="H200, 2026-11-25, V 128: 392/483/478, 516"),
    256: Sm90BwdConfig(64, 64, 2, form="columns", measured="H200, 2026-11-25: 339/403/389, 417"),
}


@cached_per_kind
def select_config(problem: AttentionProblem) -> Sm90BwdConfig:
    """Return the config of a problem that `refuses` accepts."""
    d, dv = problem.head_dim, problem.head_dim_v
    if d == dv <= WIDE:
        return CONFIGS[64 if d <= 64 else 128]
    # "mla" adds up dQ in no fixed order. It has no registers for a softcap, with which it would spill 1.7 KB, or for
    # ALiBi: 1.1 KB by Triton 3.9.
    is_mla = dv <= WIDE < d <= 192 and not (problem.softcap or problem.alibi or problem.deterministic)
    return CONFIGS[192 if is_mla else 256]


@cached_per_kind
def last_columns(problem: AttentionProblem) -> int:
    """Return the columns of a tile's last box that the products of "keys" use: 16 or 32 if head_dim ends there."""
    tail = problem.head_dim - BOX_COLUMNS
    return next((n for n in (16, 32) if 0 < tail <= n), BOX_COLUMNS)


def dq_stages(boxes: int, boxes_v: int) -> int:
    """Return the stages of K and V in `bwd_wide_dq.py`: as many as fit, at most those of two blocks.

    K and V use the same stages if they have equally many boxes.
    """
    box = 64 * BOX_COLUMNS * 2
    available = SHARED_MEMORY - CONSUMERS * (boxes + boxes_v) * box
    return min(available // (boxes * box) if boxes == boxes_v else available // ((boxes + boxes_v) * box) * 2, 4)


def _refuses_mask(problem: AttentionProblem) -> str | None:
    """Return why the kernel does not take the block mask of `problem`, or None."""
    if beside := sorted(problem.features & {"alibi", "seq_lens", "varlen"}):
        return f"sm90 computes no gradients of {beside[0]} beside a block mask"
    if problem.deterministic:  # an adder would have to count the programs before its own in a list
        return "sm90 adds dQ up in no fixed order beside a block mask"
    config = select_config(problem)
    if config.form != "keys":
        return f"sm90 computes gradients of equal head dims up to {WIDE} beside a block mask"
    if problem.softcap and config.block_m == 128:  # scores of 128 queries, tanh and words: it would spill 1.1 KB
        return f"sm90 has no registers for a softcap beside a block mask up to head_dim {BOX_COLUMNS}"
    block_q, block_k = problem.mask
    if block_q % config.block_m or block_k != config.block_n:
        return (
            f"sm90 has tiles of {config.block_m} queries and {config.block_n} keys for gradients, the block mask has "
            f"blocks of {block_q}x{block_k}"
        )
    return None


@cached_per_kind
def refuses(problem: AttentionProblem) -> str | None:
    """Return why the kernel does not take `problem`, or None."""
    if problem.arch != ARCH:
        return f"sm90 is made of instructions that only {ARCH} has, this is {problem.arch}"
    if problem.dtype not in DTYPES:
        return f"sm90 takes {' and '.join(DTYPES)}, not {problem.dtype}"
    if reason := refuse_features(problem, FEATURES, "sm90"):
        return reason
    dims = problem.head_dim, problem.head_dim_v
    if any(not MIN_HEAD_DIM <= d <= MAX_HEAD_DIM or d % 8 for d in dims):
        return (
            f"sm90 takes multiples of 8 from {MIN_HEAD_DIM} to {MAX_HEAD_DIM} as head_dim, got {dims[0]} and {dims[1]}"
        )
    if problem.out_dtype not in ("", problem.dtype, "float32"):
        return f"sm90 writes gradients in {problem.dtype} or float32, not in {problem.out_dtype}"
    if not problem.aligned:
        return "sm90 reads through TMA, which needs addresses and strides that are multiples of 16 bytes"
    if not problem.aligned_gradients:
        return "sm90 writes dq, dk and dv through TMA: their addresses and strides must be multiples of 16 bytes"
    if problem.seq_lens and not problem.few_steps:
        return TOO_MANY_STEPS
    if problem.alibi and problem.softcap and select_config(problem).block_m == 128:  # it would spill 1.8 KB
        return f"sm90 has no registers for a softcap beside ALiBi up to head_dim {BOX_COLUMNS}"
    return _refuses_mask(problem) if problem.mask else None


def by_name_only(problem: AttentionProblem) -> str | None:
    """Return why the kernel is not chosen unless it is named, or None if it is faster than the portable ones."""
    if problem.batch_invariant:  # a choice by size would depend on the rest of the batch
        return None
    rows = problem.total_q if problem.varlen else problem.batch * problem.seqlen_q
    keys = keys_seen(problem)
    elements = MIN_KV_LOOP << problem.deterministic  # deterministic: programs wait for each other
    queries = problem.seqlen_q * problem.heads_q // problem.heads_kv
    scores = MIN_SCORES if problem.heads_q > problem.heads_kv else MIN_SCORES // 2  # MHA: no dK, dV of groups to add up
    is_large = keys * widest(problem) >= elements and rows * problem.heads_q * keys >= scores
    if is_large and queries >= MIN_QUERIES:
        return None
    return f"sm90 pays from {elements} elements of K for a query, {MIN_QUERIES} queries, and {scores} scores, on"


def unsupported(problem: AttentionProblem) -> str | None:
    """Return why the portable kernels have to run `problem`, or None."""
    return refuses(problem) or environment_refusal()
