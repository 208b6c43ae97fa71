"""Tiles of the attention kernels: the table, what fits a GPU, and what the autotuner tries.

`forward_config(problem)` and the backward pair are pure functions of the problem; the same `fits` prunes the table and
the candidates. Form "tma" reads through host descriptors (sm_90 and later, aligned tensors, no seq_lens), "portable"
through block pointers or plain addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from diyfa.arch import gpu_spec
from diyfa.backends.cuda.tiles import DESCRIPTOR, PORTABLE_FORM, padded_head_dim
from diyfa.problem import AttentionProblem

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class AttentionConfig:
    """Tile of one attention kernel: queries x keys of a block, and how the compiler schedules it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    form: str = "portable"
    measured: str = ""  # device, date, figure; empty: never timed


def form_of(config: AttentionConfig) -> int:
    """The kernels' FORM constant of a config."""
    return DESCRIPTOR.value if config.form == "tma" else PORTABLE_FORM


# Rows: (at most this padded head_dim) -> tile, for each class of GPU; the first that matches and fits is used.
# Classes are told apart by what limits a tile: shared memory for one block, and wgmma.
Row = tuple[int, AttentionConfig]
C = AttentionConfig

_FORWARD: dict[str, tuple[Row, ...]] = {
    "wgmma": (
        (64, C(128, 128, 4, 3, "tma")),
        (64, C(128, 64, 4, 3)),
        (128, C(128, 128, 8, 2, "tma")),
        (128, C(128, 64, 4, 3)),
        (256, C(128, 64, 8, 2, "tma")),
        (256, C(128, 64, 8, 2)),
    ),
    "large": (
        (64, C(128, 64, 4, 3)),
        (128, C(128, 64, 8, 3)),
        (128, C(128, 64, 8, 2)),
        (256, C(64, 64, 4, 2)),
        (256, C(64, 32, 4, 2)),
    ),
    "small": (
        (64, C(128, 64, 4, 2)),
        (128, C(64, 64, 4, 2)),
        (128, C(64, 32, 4, 2)),
        (256, C(64, 32, 4, 1)),
        (256, C(32, 32, 4, 1)),
        (256, C(32, 16, 4, 1)),
    ),
    "float32": (
        (32, C(64, 64, 4, 2)),
        (64, C(64, 32, 4, 2)),
        (128, C(32, 32, 4, 2)),
        (128, C(32, 32, 4, 1)),
        (256, C(32, 16, 8, 1)),
        (256, C(16, 16, 4, 1)),
    ),
}
_BACKWARD_DKDV: dict[str, tuple[Row, ...]] = {
    "wgmma": (
        (64, C(64, 128, 8, 3, "tma")),
        (64, C(64, 128, 8, 2)),
        (128, C(64, 128, 8, 2, "tma")),
        (128, C(32, 128, 8, 2)),
        (256, C(32, 64, 8, 2, "tma")),
        (256, C(32, 64, 8, 1)),
    ),
    "large": (
        (64, C(32, 128, 4, 3)),
        (128, C(32, 128, 8, 2)),
        (128, C(32, 64, 4, 2)),
        (256, C(32, 64, 8, 1)),
        (256, C(32, 32, 4, 1)),
    ),
    "small": (
        (64, C(32, 64, 4, 2)),
        (128, C(32, 64, 4, 1)),
        (128, C(32, 32, 4, 1)),
        (256, C(16, 32, 4, 1)),
        (256, C(16, 16, 4, 1)),
    ),
    "float32": (
        (64, C(32, 32, 4, 1)),
        (128, C(16, 32, 4, 1)),
        (128, C(16, 16, 4, 1)),
        (256, C(16, 16, 8, 1)),
    ),
}
_BACKWARD_DQ: dict[str, tuple[Row, ...]] = {
    "wgmma": (
        (64, C(128, 64, 8, 3, "tma")),
        (64, C(128, 64, 8, 2)),
        (128, C(128, 64, 8, 2, "tma")),
        (128, C(128, 32, 8, 2)),
        (256, C(64, 32, 8, 2, "tma")),
        (256, C(64, 32, 8, 1)),
    ),
    "large": (
        (64, C(128, 32, 4, 3)),
        (128, C(128, 32, 8, 2)),
        (128, C(64, 32, 4, 2)),
        (256, C(64, 32, 8, 1)),
        (256, C(32, 32, 4, 1)),
    ),
    "small": (
        (64, C(64, 32, 4, 2)),
        (128, C(64, 32, 4, 1)),
        (128, C(32, 32, 4, 1)),
        (256, C(32, 16, 4, 1)),
        (256, C(16, 16, 4, 1)),
    ),
    "float32": (
        (64, C(32, 32, 4, 1)),
        (128, C(32, 16, 4, 1)),
        (128, C(16, 16, 4, 1)),
        (256, C(16, 16, 8, 1)),
    ),
}
_TABLES = {"fwd": _FORWARD, "dkdv": _BACKWARD_DKDV, "dq": _BACKWARD_DQ}

# What the autotuner tries beside the table's choice, before `fits` prunes it: by class of GPU.
_CANDIDATES: dict[tuple[str, str], tuple[AttentionConfig, ...]] = {
    ("fwd", "wgmma"): (
        C(128, 128, 8, 2, "tma"),
        C(128, 128, 8, 3, "tma"),
        C(128, 64, 8, 3, "tma"),
        C(128, 64, 4, 3, "tma"),
        C(64, 128, 4, 2, "tma"),
        C(64, 64, 4, 3, "tma"),
        C(128, 64, 4, 3),
        C(64, 64, 4, 3),
    ),
    ("fwd", "large"): (C(128, 64, 4, 3), C(128, 64, 8, 3), C(128, 32, 4, 3), C(64, 64, 4, 3), C(64, 32, 4, 3)),
    ("fwd", "small"): (C(128, 64, 8, 2), C(64, 64, 4, 2), C(64, 32, 4, 2), C(32, 32, 4, 1)),
    ("dkdv", "wgmma"): (
        C(64, 128, 8, 2, "tma"),
        C(64, 128, 8, 3, "tma"),
        C(64, 64, 4, 2, "tma"),
        C(32, 128, 8, 2, "tma"),
        C(32, 128, 8, 2),
    ),
    ("dkdv", "large"): (C(32, 128, 4, 2), C(32, 128, 8, 2), C(64, 64, 4, 2), C(32, 64, 4, 2)),
    ("dkdv", "small"): (C(32, 64, 4, 2), C(32, 64, 4, 1), C(32, 32, 4, 1)),
    ("dq", "wgmma"): (
        C(128, 64, 8, 2, "tma"),
        C(128, 64, 8, 3, "tma"),
        C(128, 128, 8, 2, "tma"),
        C(64, 64, 4, 2, "tma"),
        C(128, 32, 8, 2),
    ),
    ("dq", "large"): (C(128, 32, 4, 2), C(128, 32, 8, 2), C(64, 64, 4, 2), C(64, 32, 4, 2)),
    ("dq", "small"): (C(64, 32, 4, 2), C(64, 32, 4, 1), C(32, 32, 4, 1)),
}


def gpu_class(problem: AttentionProblem) -> str:
    """Row set for a GPU and dtype: "float32", else "wgmma", "large" (>= 160 KiB for a block) or "small"."""
    spec = gpu_spec(problem.arch)
    if problem.dtype == "float32":
        return "float32"
    if spec is None:
        return "small"
    if spec.has_wgmma:
        return "wgmma"
    return "large" if spec.shared_per_block >= 160 * 1024 else "small"


def has_tma(problem: AttentionProblem) -> bool:
    """Whether the tensors of this call can be read through TMA descriptors."""
    spec = gpu_spec(problem.arch)
    return bool(spec and spec.has_tma and problem.aligned and not problem.seq_lens)


def shared_bytes(kind: str, config: AttentionConfig, problem: AttentionProblem) -> int:
    """Shared memory that the tiles of a kernel need, counted from what it keeps and what it buffers."""
    d, dv = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
    size = ELEMENT_BYTES[problem.dtype]
    m, n, stages = config.block_m, config.block_n, max(1, config.num_stages)
    if kind == "fwd":
        return size * (m * d + stages * n * (d + dv))
    if kind == "dkdv":  # K and V stay, Q and dO are buffered, dS crosses shared memory
        return size * (n * (d + dv) + stages * m * (d + dv) + m * n)
    return size * (m * (d + dv) + stages * n * (d + dv) + m * n)


def fits(kind: str, config: AttentionConfig, problem: AttentionProblem) -> bool:
    """Whether a config can run the problem on its GPU: form and shared memory."""
    spec = gpu_spec(problem.arch)
    if spec is None or (config.form == "tma" and not has_tma(problem)):
        return False
    return shared_bytes(kind, config, problem) <= spec.shared_per_block


def default_config(kind: str, problem: AttentionProblem) -> AttentionConfig | None:
    """The table's tile for `kind` ("fwd", "dkdv", "dq"), or None when no row fits."""
    width = max(padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))
    for widest, config in _TABLES[kind][gpu_class(problem)]:
        if width <= widest and fits(kind, config, problem):
            return config
    return None


def candidates(kind: str, problem: AttentionProblem) -> Iterator[AttentionConfig]:
    """What the autotuner measures: the default first, then every other tile of the GPU's class that fits."""
    default = default_config(kind, problem)
    if default is None:
        return
    yield default
    for config in _CANDIDATES.get((kind, gpu_class(problem)), ()):
        if replace(config, measured="") != replace(default, measured="") and fits(kind, config, problem):
            yield config
