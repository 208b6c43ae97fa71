"""What the attention launchers share: the arguments that describe a call, and which tile it runs with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from diyfa.backends.cuda.attention.configs import AttentionConfig, candidates
from diyfa.backends.cuda.attention.dropout import keep_threshold
from diyfa.backends.cuda.attention.tile_io import lengths_of, padded_head_dim
from diyfa.backends.cuda.runtime import tune
from diyfa.problem import AttentionProblem, AttentionTensors

_forced: dict[str, AttentionConfig] = {}


# Arguments whose value no kernel is compiled for: they change from call to call. Lengths are not among them: Triton
# compiles for whether one is a multiple of 16, which spares loops that read a bias a sixth of their instructions, and
# for 1. Alignment of what is read one number at a time changes nothing.
RUNTIME_SIZES = (
    "stride_slopeb", "total_q", "total_k", "window_left",
    "window_right", "threshold",
    "group",  # a variant for 1 has no loop over heads; ptxas serialises its wgmma in the dK/dV kernel (C7515)
)  # fmt: skip
UNALIGNED_POINTERS = (
    "cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "seq_lens_ptr", "slopes_ptr", "rng_state_ptr", "sinks_ptr",
)  # fmt: skip


def has_adjusted_scores(problem: AttentionProblem) -> bool:
    """Whether scores are more than scaled products, so that the kernel brings them to units of log2 itself."""
    return problem.softcap != 0.0 or problem.alibi or problem.bias != ""


def softmax_scale(problem: AttentionProblem, sm_scale: float) -> tuple[float, bool]:
    """(scale, negate products first) of the forward kernel.

    Plain scores are scaled inside the exponential, after the running maximum was taken: that needs a positive scale.
    A scale of 0 becomes the smallest that keeps -inf a mask and every exponential at 1.
    """
    if has_adjusted_scores(problem):
        return sm_scale / (problem.softcap or 1.0), False
    return abs(sm_scale) or 1e-30, sm_scale < 0


def bias_strides(problem: AttentionProblem, bias: torch.Tensor | None) -> tuple[int, int, int, int]:
    """Strides of attn_bias over (B, H, Sq, Sk), 0 where it is broadcast or has one entry.

    What such a dimension's own stride is must not make a kernel of its own.
    """
    if bias is None:
        return 0, 0, 0, 0
    full = bias.expand(problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    b, h, m, n = (0 if size == 1 else stride for size, stride in zip(full.shape, full.stride(), strict=True))
    return b, h, m, n


def feature_pointers(tensors: AttentionTensors) -> tuple[torch.Tensor | None, ...]:
    """The optional tensors that every attention kernel takes, in the order of its arguments."""
    slopes = tensors.alibi_slopes
    lengths = (tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.seq_lens)
    return *lengths, slopes, tensors.attn_bias, tensors.rng_state


def feature_scalars(problem: AttentionProblem, tensors: AttentionTensors, scale: float) -> tuple[float, ...]:
    """Strides of the optional tensors and of the statistics, sizes and factors, in the order of the arguments."""
    slopes = tensors.alibi_slopes
    return (
        0 if slopes is None or slopes.dim() == 1 else slopes.stride(0),
        *bias_strides(problem, tensors.attn_bias),
        problem.heads_q,
        problem.heads_q // problem.heads_kv,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.total_q,
        problem.total_k,
        problem.window_left,
        problem.window_right,
        scale,
        problem.softcap,
        keep_threshold(tensors.dropout_p),
        1.0 / (1.0 - tensors.dropout_p),
    )


def feature_constants(problem: AttentionProblem) -> dict[str, object]:
    """The constexprs that every attention kernel takes."""
    return {
        "HAS_LEFT": problem.window_left >= 0,
        "HAS_RIGHT": problem.window_right >= 0,
        "LENGTHS": lengths_of(problem),
        "SOFTCAP": problem.softcap != 0.0,
        "ALIBI": problem.alibi,
        "BIAS": problem.bias != "",
        "DROPOUT": problem.dropout,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": padded_head_dim(problem.head_dim),
        "BLOCK_DV": padded_head_dim(problem.head_dim_v),
        "PRECISION": "ieee",
    }


def launch_key(problem: AttentionProblem, tensors: AttentionTensors) -> tuple[object, ...]:
    """What a prepared launch depends on besides its tile: all that is not read from the tensors themselves."""
    q, k, v = tensors.q, tensors.k, tensors.v
    bias, slopes = tensors.attn_bias, tensors.alibi_slopes
    return (
        problem,
        tensors.sm_scale,
        tensors.dropout_p,
        q.stride(),
        k.stride(),
        v.stride(),
        None if bias is None else (bias.shape, bias.stride(), bias.dtype),
        None if slopes is None else slopes.stride(),
        q.device,
    )


@contextmanager
def use_config(kind: str, config: AttentionConfig) -> Iterator[None]:
    """Launch every kernel of `kind` ("fwd", "dkdv", "dq") with this tile inside the block: for sweeps and tests."""
    outer = _forced.get(kind)
    _forced[kind] = config
    try:
        yield
    finally:
        if outer is None:
            del _forced[kind]
        else:
            _forced[kind] = outer


def choice() -> object:
    """What, besides a problem, decides on its tile: while it is the same, a settled tile stays."""
    return tune.state() if not _forced else object()


def is_settled(kind: str, problem: AttentionProblem) -> bool:
    """Whether `tuned_config` will answer the same again without measuring, as long as `choice` is the same."""
    if problem.deterministic or len(_tiles(kind, problem)) == 1:
        return True
    return tune.is_settled(f"attention_{kind}", _bucket(problem))


@lru_cache(maxsize=4096)
def _bucket(problem: AttentionProblem) -> tuple[object, ...]:
    """Everything that the choice of a tile depends on, lengths and batch by size class."""
    return (
        problem.dtype,
        problem.layout,
        tune.bucket_size(problem.batch * problem.heads_q),
        tune.bucket_size(problem.heads_q // problem.heads_kv),
        tune.bucket_size(problem.seqlen_q),
        tune.bucket_size(problem.seqlen_k),
        problem.head_dim,
        problem.head_dim_v,
        tuple(sorted(problem.features)),
        tune.bucket_size(problem.window_left + 1),
        problem.aligned,
        problem.bias,
    )


@lru_cache(maxsize=4096)
def _tiles(kind: str, problem: AttentionProblem) -> tuple[AttentionConfig, ...]:
    tiles = tuple(candidates(kind, problem))
    assert tiles, "unsupported() accepted a problem that no tile fits"
    return tiles


def tuned_config(kind: str, problem: AttentionProblem, run: Callable[[AttentionConfig], None]) -> AttentionConfig:
    """The tile for this problem's bucket: measured once where tuning is possible and allowed, else the table's.

    A deterministic problem always takes the table's: another tile rounds differently.
    """
    if _forced and kind in _forced:
        return _forced[kind]
    tiles = _tiles(kind, problem)
    if problem.deterministic or len(tiles) == 1:
        return tiles[0]
    return tune.best(f"attention_{kind}", _bucket(problem), tiles, run, tiles[0])
