"""Tiles of the attention kernels: the table, the tiles that fit a GPU, and the autotuner's candidates.

`default_config(kind, problem)` is a pure function of the problem. Form "tma" reads through host descriptors (sm_90 and
later, aligned tensors), "portable" through block pointers or plain addresses. "widened" is "portable" with tiles that
become float32 as they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from diyfa.arch import ELEMENT_BYTES, gpu_spec
from diyfa.backends.cuda.attention.tile_io import DESCRIPTOR, PORTABLE, WIDENED, padded_head_dim
from diyfa.eight_bits import EIGHT_BITS
from diyfa.features import ADJUSTING
from diyfa.problem import AttentionProblem, cached_per_kind
from diyfa.score_code import gathered_loads


@dataclass(frozen=True)
class AttentionConfig:
    """Tile of an attention kernel, queries x keys, and its compiler options."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    form: str = "portable"
    measured: str = ""  # device, date, figure; empty: never timed
    spill_budget: int = 0  # bytes of register spills that the compile gate lets this tile have


def schedule(config: AttentionConfig) -> dict[str, int]:
    """Return the compiler options of a config."""
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}


def tile_form(config: AttentionConfig) -> int:
    """Return the kernels' FORM constant of a config."""
    return {"tma": DESCRIPTOR.value, "portable": PORTABLE.value, "widened": WIDENED.value}[config.form]


def reads_rows(problem: AttentionProblem, config: AttentionConfig) -> bool:
    """Return whether masked blocks are read by address: a descriptor knows the end of the tensor, not of a sequence."""
    return config.form == "tma" and (problem.seq_lens or problem.varlen)


# The tables: class of GPU and problem (`gpu_class`) -> rows (most padded head_dim, tile). Of the rows that fit, the
# first is the default, and the others of its head_dim are candidates of the autotuner. A tile is C(queries, keys,
# warps, stages, form, figure, spill budget), the fields of `AttentionConfig`. Classes, and what limits their tiles:
#
# * "wgmma": 16 bits on Hopper. "wgmma ragged": the same for sequences that differ in length (_RAGGED).
# * "large", "small": 16 bits on other GPUs, by the shared memory of a block.
# * "float32": operands take twice the memory and registers.
# * "turing": Triton emits no tensor-core instructions there, so products are multiply-adds, correct and slow. In the
#   backward pass at 256 features widened tiles do not fit, and others spill.
# * "unaligned": rows that are not 16-byte aligned pass through registers. The class is also for a V narrower than K on
#   GPUs with wgmma: there Triton 3.6 emits wgmma that read V beyond its shared memory (wrong results or an illegal
#   address; compute-sanitizer names the instruction). With tiles of 32 rows it uses mma.sync, which is right.
# * "eight bits": float8 and int8. "eight bits wgmma": on Hopper. "eight bits unaligned": rows as in "unaligned".
#
# A figure is in TFLOP/s over the products that the kernel does, of bf16 without a mask unless it says otherwise:
#
# * of 2026-11-21: 16384 tokens, heads * head_dim = 2048, at S = 1k/4k/16k
#   (benchmarks/results/h200-2026-11-21-tiles.json). Each tile is the best or nearly the best of 72 somewhere on that
#   grid, even if ptxas spills a little: its budget is then what it spills.
# * of 2026-11-23: 16 heads, 64 x 1024 and 16 x 4096 tokens (benchmarks/results/h200-2026-11-23-kernel-tiles.json).
#
# Tiles without a figure were chosen because they compile without spills.
Row = tuple[int, AttentionConfig]
C = AttentionConfig
_H200 = "H200, 2026-11-21: "
_LATER = "H200, 2026-11-23: "

# fmt: off
_EIGHT_BITS_SMALL: tuple[Row, ...] = ((128, C(32, 32, 4, 1)), (256, C(32, 32, 8, 1, spill_budget=32)))
_EIGHT_BITS_WIDE: tuple[Row, ...] = ((512, C(32, 32, 8, 1)), (1024, C(16, 32, 8, 1)))
_FORWARD: dict[str, tuple[Row, ...]] = {
    "wgmma": (
        (64, C(64, 128, 4, 2, "tma", _H200 + "374/479/460")),
        (64, C(64, 64, 4, 2, "tma", _H200 + "385/449/430, causal 1k 303")),
        (64, C(64, 64, 4, 3, "tma", _LATER + "bias 297/283, causal 230/274; 2 stages 253/257, 215/247")),
        (64, C(128, 64, 8, 3, "portable", _H200 + "357/397/407")),
        (64, C(64, 64, 4, 3, "portable", _H200 + "353/384/388, causal 1k 275")),
        (128, C(128, 64, 4, 2, "tma", _H200 + "462/532/552")),
        (128, C(64, 64, 4, 3, "tma", _H200 + "453/527/509, causal 1k/4k 351/484")),
        (128, C(128, 128, 8, 3, "tma", _H200 + "410/503/516, causal 16k 536")),
        (128, C(64, 64, 4, 3, "portable", _H200 + "packed, causal 1k: 8 % over 128x128")),
        (128, C(128, 128, 8, 3, "portable", _H200 + "359/439/449")),
        (128, C(64, 32, 4, 3, "portable", _H200 + "causal 1k 275")),
        (256, C(64, 64, 4, 3, "tma", _H200 + "424/528/560")),
        (256, C(128, 64, 8, 2, "tma", _H200 + "434/534/546")),
        (256, C(128, 64, 8, 2, "portable", _H200 + "341/394/381")),
    ),
    "large": (
        (64, C(128, 64, 4, 3)), (64, C(64, 64, 4, 3)),
        (128, C(128, 64, 8, 3)), (128, C(128, 32, 8, 3)), (128, C(64, 32, 4, 3, spill_budget=32)),
        (256, C(64, 32, 8, 2)),
    ),
    "small": (
        (64, C(128, 64, 4, 2, spill_budget=128)), (64, C(64, 64, 4, 2)),
        (128, C(64, 64, 8, 2)), (128, C(64, 32, 4, 2, spill_budget=64)),
        (256, C(64, 32, 8, 1)), (256, C(32, 32, 8, 1, spill_budget=96)), (256, C(32, 16, 4, 1)),
    ),
    "float32": (
        (64, C(64, 32, 8, 1)), (64, C(32, 32, 4, 1, spill_budget=64)),
        (128, C(16, 32, 4, 1)),
        (256, C(16, 32, 8, 1)), (256, C(16, 16, 4, 1)),
    ),
    "turing": (
        (64, C(64, 32, 8, 1, "widened")), (64, C(32, 32, 4, 1, "widened")),
        (128, C(32, 32, 8, 1, "widened")),
        (256, C(16, 16, 4, 1, "widened")),
    ),
    "unaligned": ((128, C(32, 32, 4, 1)), (256, C(32, 32, 8, 1, spill_budget=32))),
    # float8 and int8. Rows of a tile share their descales (`diyfa.eight_bits`): at most 128 queries and 64 keys.
    "eight bits": ((64, C(128, 64, 4, 3)), (128, C(128, 64, 8, 3)), (256, C(64, 64, 8, 2)), *_EIGHT_BITS_WIDE),
    # Through addresses ptxas serialises the wgmma of int8 (C7515). With 32 rows there are none.
    "eight bits wgmma": (
        (64, C(128, 64, 8, 2, "tma")),
        (128, C(128, 64, 8, 2, "tma")),
        (256, C(64, 64, 8, 2, "tma")),
        *_EIGHT_BITS_SMALL,
        *_EIGHT_BITS_WIDE,
    ),
    "eight bits unaligned": (*_EIGHT_BITS_SMALL, *_EIGHT_BITS_WIDE),
}
_BACKWARD_DKDV: dict[str, tuple[Row, ...]] = {
    "wgmma": (
        (64, C(128, 64, 4, 2, "tma", _LATER + "451/518, causal 336/480", 96)),
        (64, C(64, 64, 4, 3, "tma", _LATER + "447/484, causal 335/445; features: first")),
        (64, C(64, 128, 4, 3, "portable", _H200 + "396/446/460")),
        (64, C(32, 64, 4, 1, "portable", _H200 + "causal 1k 308")),
        (128, C(64, 64, 4, 2, "tma", _LATER + "525/571, causal 453/559")),
        (128, C(64, 64, 4, 2, "portable", _H200 + "492/554/579", 2048)),
        (128, C(64, 128, 8, 3, "portable", _H200 + "409/475/494", 1536)),
        (256, C(64, 64, 8, 2, "tma", _LATER + "303/319, causal 259/306")),
        (256, C(64, 64, 8, 2, "portable", _H200 + "276/306/300", 1024)),
    ),
    "large": (
        (64, C(32, 64, 4, 3, spill_budget=256)), (64, C(32, 32, 4, 2)),
        (128, C(32, 64, 8, 2, spill_budget=608)), (128, C(32, 32, 4, 2, spill_budget=192)),
        (256, C(32, 32, 8, 1)),
    ),
    "small": (
        (64, C(32, 64, 8, 2)), (64, C(32, 32, 4, 2)),
        (128, C(32, 64, 8, 1)), (128, C(32, 32, 4, 1, spill_budget=32)),
        (256, C(16, 32, 4, 1)), (256, C(16, 16, 4, 1, spill_budget=160)),
    ),
    "float32": (
        (64, C(32, 32, 8, 1, spill_budget=32)),
        (128, C(16, 32, 8, 1, spill_budget=96)), (128, C(16, 16, 4, 1, spill_budget=64)),
        (256, C(16, 32, 8, 1)),
    ),
    "turing": (
        (64, C(32, 16, 8, 1, "widened", spill_budget=64)),
        (128, C(16, 32, 8, 1, "widened")),
        (256, C(16, 16, 8, 1, spill_budget=2176)),
    ),
    "unaligned": ((128, C(32, 32, 4, 1)), (256, C(32, 32, 8, 1))),
}
_BACKWARD_DQ: dict[str, tuple[Row, ...]] = {
    "wgmma": (
        (64, C(128, 64, 8, 3, "tma", _H200 + "583/668/687")),
        (64, C(64, 64, 4, 2, "tma", _H200 + "565/645/691, causal 1k 444")),
        (64, C(64, 64, 4, 3, "tma", _LATER + "bias 375/400; 2 stages 284/311; 128x64 304/348")),
        (64, C(128, 64, 8, 3, "portable", _H200 + "461/529/550")),
        (128, C(128, 64, 8, 3, "tma", _H200 + "538/673/660")),
        (128, C(128, 32, 8, 3, "tma", _H200 + "593/651/615")),
        (128, C(128, 128, 8, 2, "portable", _H200 + "430/521/546")),
        (128, C(128, 32, 8, 3, "portable", _H200 + "483/534/546")),
        (256, C(64, 32, 4, 3, "tma", _H200 + "451/533/541")),
        (256, C(64, 64, 4, 2, "tma", _H200 + "428/541/501")),
        (256, C(128, 64, 8, 1, "portable", _H200 + "425/502/499")),
    ),
    "large": (
        (64, C(128, 64, 8, 3)), (64, C(64, 32, 4, 3)),
        (128, C(128, 32, 8, 2)), (128, C(64, 32, 4, 2)),
        (256, C(64, 32, 8, 1)), (256, C(32, 32, 4, 1)),
    ),
    "small": (
        (64, C(64, 32, 4, 2)),
        (128, C(64, 32, 4, 1)), (128, C(32, 32, 4, 1)),
        (256, C(32, 32, 8, 1, spill_budget=64)), (256, C(16, 16, 4, 1)),
    ),
    "float32": (
        (64, C(32, 64, 8, 1)), (64, C(32, 32, 4, 1)),
        (128, C(16, 16, 4, 1, spill_budget=64)),
        (256, C(16, 32, 8, 1)), (256, C(16, 16, 4, 1)),
    ),
    "turing": (
        (64, C(32, 32, 8, 1, "widened")),
        (128, C(32, 16, 8, 1, "widened")),
        (256, C(16, 16, 8, 1, spill_budget=2048)),
    ),
    "unaligned": ((128, C(32, 32, 4, 1)), (256, C(32, 32, 8, 1))),
}
# Beyond 256 features one row of a tile takes half a kilobyte or more, so tiles have the few rows that fit. The table is
# for all GPUs. 1024 is for MLA's 576 features of q and k.
_WIDE: dict[str, tuple[Row, ...]] = {
    "fwd": (
        (512, C(64, 32, 8, 2, "tma")), (512, C(32, 32, 8, 1, spill_budget=256)), (512, C(16, 16, 8, 1)),
        (1024, C(32, 16, 8, 1)), (1024, C(16, 16, 8, 1)),
    ),
    "dkdv": (
        (512, C(32, 32, 8, 1, spill_budget=256)), (512, C(16, 16, 8, 1)),
        (1024, C(16, 16, 8, 1, spill_budget=928)),
    ),
    "dq": (
        (512, C(32, 32, 8, 1, spill_budget=128)), (512, C(16, 16, 8, 1, spill_budget=64)),
        (1024, C(16, 16, 8, 1, spill_budget=384)),
    ),
}
# The bias gradient reads through addresses on every GPU, and accumulates its tile.
_BIAS_WGMMA: tuple[Row, ...] = (
    (128, C(64, 64, 8, 2)), (128, C(64, 64, 8, 1)),
    (256, C(64, 32, 8, 1)),
    (1024, C(16, 16, 8, 1)),
)
# Without wgmma larger tiles spill kilobytes.
_BIAS_MMA: tuple[Row, ...] = ((128, C(64, 32, 4, 1, spill_budget=256)), (256, C(16, 16, 4, 1)), (1024, C(16, 16, 8, 1)))
# A whole sequence is one tile (`bwd_short.py`), the smallest that holds it: `fits` takes no larger one. "unaligned" has
# no tile of 64 rows, as above.
_SHORT_SMALL: tuple[Row, ...] = (
    (64, C(16, 16, 1, 1)), (64, C(32, 32, 2, 1)),
    (128, C(16, 16, 2, 1)), (128, C(32, 32, 4, 1)),
)
_SHORT: tuple[Row, ...] = (*_SHORT_SMALL, (64, C(64, 64, 4, 1)), (64, C(64, 64, 8, 1)), (128, C(64, 64, 8, 1)))
# Tiles for which Triton emits no wgmma.
_BIAS_SMALL: tuple[Row, ...] = ((64, C(32, 16, 4, 1)), (256, C(16, 16, 4, 1)), (1024, C(16, 16, 8, 1)))
_WIDE_FLOAT32: tuple[Row, ...] = ((512, C(16, 16, 8, 1, spill_budget=64)), (1024, C(16, 16, 8, 1, spill_budget=64)))
# If sequences differ in length, masked blocks are read by address and rows are not aligned. So other tiles win.
# Figures: 64 sequences of 128 to 1920 tokens, TFLOP/s without and with a causal mask; "backward": of the whole pass.
_RAGGED: dict[str, tuple[Row, ...]] = {
    "fwd": ((64, C(64, 64, 4, 2, "tma", _H200 + "351, 281")), (128, C(128, 64, 4, 2, "tma", _H200 + "431, 325", 128))),
    "dkdv": (
        (64, C(64, 64, 4, 3, "tma", _LATER + "411, 328; 128x64: 384, 293")),
        (128, C(64, 64, 4, 2, "tma", _LATER + "472, 425", 128)),
    ),
    "dq": (
        (64, C(128, 64, 8, 3, "tma", _H200 + "backward 296 to 302, 211")),
        (64, C(64, 64, 4, 2, "tma", _H200 + "backward 287 to 300, 214 to 216")),
        (128, C(128, 64, 8, 3, "tma", _H200 + "backward 322, 252")),
    ),
}
# fmt: on
# "wgmma ragged" has the rows of _RAGGED first, then those rows of "wgmma" whose tiles are not among them.
for _kind, _table in (("fwd", _FORWARD), ("dkdv", _BACKWARD_DKDV), ("dq", _BACKWARD_DQ)):
    _tiles = {(width, replace(tile, measured="", spill_budget=0)) for width, tile in _RAGGED[_kind]}
    _others = [row for row in _table["wgmma"] if (row[0], replace(row[1], measured="", spill_budget=0)) not in _tiles]
    _table["wgmma ragged"] = (*_RAGGED[_kind], *_others)
# Kind of kernel -> class -> rows. All classes but those of eight bits also have the rows for wide heads.
_TABLES = {
    kind: {
        name: rows if name.startswith("eight bits") else (*rows, *(_WIDE_FLOAT32 if name == "float32" else _WIDE[kind]))
        for name, rows in table.items()
    }
    for kind, table in (("fwd", _FORWARD), ("dkdv", _BACKWARD_DKDV), ("dq", _BACKWARD_DQ))
}
_TABLES["dbias"] = {
    "wgmma": _BIAS_WGMMA,
    "wgmma ragged": _BIAS_WGMMA,
    "large": _BIAS_MMA,
    "small": _BIAS_MMA,
    **dict.fromkeys(("float32", "turing", "unaligned"), _BIAS_SMALL),
}
_TABLES["short"] = {
    # Without wgmma the last tile spills more.
    **dict.fromkeys(("wgmma", "wgmma ragged"), (*_SHORT, (128, C(64, 64, 4, 1, spill_budget=48)))),
    **dict.fromkeys(("large", "small"), _SHORT),
    "unaligned": _SHORT_SMALL,
    **dict.fromkeys(("float32", "turing"), ()),  # products are multiply-adds: the other kernels' small tiles spill less
}


def key_columns(problem: AttentionProblem | _Heads) -> int:
    """Return the columns of a tile of q or k. A product of eight bits needs 32."""
    columns = padded_head_dim(problem.head_dim)
    return max(columns, 32) if problem.dtype in EIGHT_BITS else columns


def _is_ragged(problem: AttentionProblem) -> bool:
    return problem.varlen or problem.seq_lens


def gpu_class(problem: AttentionProblem) -> str:
    """Return the key of the tables' rows for this GPU and problem."""
    spec = gpu_spec(problem.arch)
    if problem.dtype == "float32":
        return "float32"
    if spec is None or not spec.has_bf16:  # before Ampere
        return "turing"
    narrow_v = padded_head_dim(problem.head_dim_v) < padded_head_dim(problem.head_dim)
    passes_registers = not problem.aligned or (spec.has_wgmma and narrow_v)
    if problem.dtype in EIGHT_BITS:
        return "eight bits" + (" unaligned" if passes_registers else " wgmma" if spec.has_wgmma else "")
    if passes_registers:
        return "unaligned"
    if spec.has_wgmma:
        return "wgmma ragged" if _is_ragged(problem) else "wgmma"
    return "large" if spec.shared_per_block >= 160 * 1024 else "small"


# Fewest multiply-adds in the scores for which TMA pays. With fewer, a kernel takes about as long as the host needs to
# encode three descriptors: 10 us (a forward call on (1, 8, 128, 64): 42 us with them, 32 us without; H200).
TMA_MIN_WORK = 1 << 28


def has_tma(problem: AttentionProblem) -> bool:
    """Return whether TMA can read the tensors of this call, and the call is large enough for descriptors to pay."""
    spec = gpu_spec(problem.arch)
    work = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k * problem.head_dim
    is_large = work >= TMA_MIN_WORK or problem.batch_invariant  # in the mode, tiles may not depend on the batch
    return bool(spec and spec.has_tma and problem.aligned and is_large)


# Spill budget of tiles of the kernel for short sequences, if addresses are not aligned: these take registers, and tiles
# of 64 rows then spill 16 to 264 bytes on sm_80, 86 and 120.
UNALIGNED_SPILLS = 264
SPLIT, SHORT = ("dkdv", "dq"), ("short",)  # kernels of a backward pass; `_bwd_preprocess_kernel` comes before SPLIT
MIN_QUERIES = 512  # fewest queries, of all heads of a group, for which the start-up of a key block's program pays
MAX_SHORT_LENGTH = 64  # tokens of the longest sequence that one tile of the "short" table holds

# Tiles that TMA writes begin at multiples of 1 KB, and each buffer has a barrier: at most 1040 bytes in these kernels.
DESCRIPTOR_SPACE = 2048


def shared_bytes(kind: str, config: AttentionConfig, problem: AttentionProblem | _Heads) -> int:
    """Return the bytes of shared memory that the tiles of a kernel need: those that stay, and buffers of the others."""
    d, dv = key_columns(problem), padded_head_dim(problem.head_dim_v)
    size = ELEMENT_BYTES.get("float32" if config.form == "widened" else problem.dtype, 1)
    m, n, stages = config.block_m, config.block_n, max(1, config.num_stages)
    # The bias of a tile and what a score function loads for each of its pairs wait together. Dtypes have up to 8 bytes.
    bias = ELEMENT_BYTES.get(problem.bias, 8) * m * n if problem.bias else 0
    if problem.score_fn:
        bias += 8 * gathered_loads(problem.score_fn) * m * n
    if kind == "dbias":  # no tile stays: all four and the bias change from step to step
        return stages * (size * (m + n) * (d + dv) + bias)
    descriptors = DESCRIPTOR_SPACE if config.form == "tma" else 0
    if kind == "fwd":  # a bias is loaded as far ahead as K and V
        size_v = ELEMENT_BYTES.get(problem.value_dtype, size)
        return size * (m * d + stages * n * d) + size_v * stages * n * dv + (stages - 1) * bias + descriptors
    # Beyond 256 features the compiler stages one operand, of m rows, twice: once for each of its products.
    twice = size * m * min(d, dv) if max(d, dv) > 256 else 0
    # dS crosses shared memory. So does a bias, or it waits there.
    crossing, bias = size * m * n, max(1, stages - 1) * bias
    if kind == "short":  # K, V, Q and dO
        return size * (m + n) * (d + dv) + crossing + bias
    if kind == "dkdv":  # K and V stay, Q and dO are buffered
        return size * (n + stages * m) * (d + dv) + max(twice, crossing + bias) + descriptors
    return size * (m + stages * n) * (d + dv) + max(twice, crossing, bias) + descriptors


def fits(kind: str, config: AttentionConfig, problem: AttentionProblem) -> bool:
    """Return whether a config can run the problem on its GPU: its form, its block and its shared memory."""
    if config.form == "tma" and not has_tma(problem):
        return False
    if kind == "short" and config.block_m != padded_head_dim(max(problem.seqlen_q, problem.seqlen_k)):
        return False
    spec = gpu_spec(problem.arch)
    return spec is not None and shared_bytes(kind, config, problem) <= spec.shared_per_block


class _Heads(NamedTuple):
    """Fields of a problem that the size of its tiles depends on."""

    arch: str
    dtype: str
    value_dtype: str
    bias: str
    score_fn: str
    head_dim: int
    head_dim_v: int


@lru_cache(maxsize=256)
def _rows(kind: str, name: str, heads: _Heads) -> tuple[tuple[int, AttentionConfig], ...]:
    """Return the rows of a table that are wide enough and fit the GPU."""
    spec = gpu_spec(heads.arch)
    width = max(padded_head_dim(heads.head_dim), padded_head_dim(heads.head_dim_v))
    if spec is None:
        return ()
    rows = _TABLES[kind].get(name, ())  # a backward pass has no tiles of eight bits
    return tuple(x for x in rows if width <= x[0] and shared_bytes(kind, x[1], heads) <= spec.shared_per_block)


# These features need more registers for each score, so light tiles, with few scores for each warp, come first (H200, D
# = 64 and 128, S = 4096: the plain default was up to 3.6 times slower with a bias, 12 % with a softcap or dropout).
PER_SCORE_FEATURES = ADJUSTING | {"dropout", "mask"}
LIGHT_SCORES_PER_WARP = 1024  # at most
FULL_GPU = 132  # multiprocessors of an H200


def _prefers_light_tiles(kind: str, problem: AttentionProblem, few_keys: bool) -> bool:
    """Return whether tiles of at most LIGHT_SCORES_PER_WARP come first, for problems on which they measured faster."""
    if problem.features & PER_SCORE_FEATURES:
        return True
    # Most tiles of a short causal grid are on the diagonal, where small tiles compute fewer hidden scores (H200, S =
    # 1024: 299 against 292 TFLOP/s at D = 64, 343 against 321 at 128).
    return kind == "fwd" and problem.causal and few_keys and not _is_ragged(problem)


def _prefers_few_rows(kind: str, problem: AttentionProblem, few_blocks: bool) -> bool:
    """Return whether tiles of few queries come first."""
    if kind != "dq" or not gpu_class(problem).startswith("wgmma"):
        return False
    if few_blocks:
        return True
    # Tiles of few rows waste less at the diagonal and at a sequence's end. With extra work for each score, 64x64 on 4
    # warps beats 128x64 on 8 (H200, D = 64, 16 x 4096, full and causal: dropout 391/349 against 291/270 TFLOP/s,
    # softcap 359/324 against 348/272).
    return bool(problem.features & PER_SCORE_FEATURES) or (_is_ragged(problem) and problem.window_right >= 0)


# For fewer blocks of 128 queries than multiprocessors: two of these programs run on a multiprocessor (one prompt of
# 512, 32 heads, causal: 14 us against 15.7).
_DQ_FEW_BLOCKS = C(64, 64, 4, 2, "tma", measured="H200, 2026-11-28")


def _heads(problem: AttentionProblem) -> _Heads:
    return _Heads(*[getattr(problem, name) for name in _Heads._fields])


def size_facts(problem: AttentionProblem) -> tuple[bool, bool, bool]:
    """Return what `candidates` depends on of a call's sizes: `has_tma`, few keys, few blocks of queries."""
    if problem.batch_invariant:
        return has_tma(problem), False, False
    blocks = problem.batch * problem.heads_q * (-(-problem.seqlen_q // 128))
    return has_tma(problem), problem.seqlen_k <= 1024, blocks <= FULL_GPU and not _is_ragged(problem)


def candidates(kind: str, problem: AttentionProblem) -> tuple[AttentionConfig, ...]:
    """Return the tiles of the table for `kind` ("fwd", "dkdv", "dq", "short", "dbias") that fit, the default first.

    They have the narrowest head_dim that holds the problem's, and the form of the default.
    """
    longest = max(problem.seqlen_q, problem.seqlen_k)
    if kind == "short":
        return _candidates(problem, kind, padded_head_dim(longest)) if longest <= MAX_SHORT_LENGTH else ()
    return _candidates(problem, kind, 0, *size_facts(problem))


@cached_per_kind
def _candidates(
    problem: AttentionProblem, kind: str, block: int, tma: bool = False, few_keys: bool = False,
    few_blocks: bool = False,
) -> tuple[AttentionConfig, ...]:  # fmt: skip
    """Return `candidates` for a kind of problem. `block`: for "short", rows of the tile that holds the sequences."""
    if kind == "short":
        # The kernel reads each tensor once, through registers, so tiles of aligned tensors serve all.
        fitting_rows = _rows(kind, gpu_class(problem.replace(aligned=True)), _heads(problem))
        rows = [x for x in fitting_rows if x[1].block_m == block]
        if not problem.aligned:
            rows = [(width, replace(config, spill_budget=UNALIGNED_SPILLS)) for width, config in rows]
    else:
        fitting_rows = _rows(kind, gpu_class(problem), _heads(problem))
        rows = list(fitting_rows) if tma else [x for x in fitting_rows if x[1].form != "tma"]
    if not rows:
        return ()
    narrowest, first = rows[0]
    tiles = [config for widest, config in rows if widest == narrowest and config.form == first.form]
    if kind == "dq" and few_blocks and narrowest == 128 and first.form == "tma" and gpu_class(problem) == "wgmma":
        tiles.append(_DQ_FEW_BLOCKS)
    if problem.bias and kind != "dkdv":  # each block waits for more loads
        tiles.sort(key=lambda config: -config.num_stages)
    if _prefers_few_rows(kind, problem, few_blocks):
        tiles.sort(key=lambda config: max(64, config.block_m))
    if _prefers_light_tiles(kind, problem, few_keys):
        tiles.sort(key=lambda config: config.block_m * config.block_n > LIGHT_SCORES_PER_WARP * config.num_warps)
    return _within_mask(tiles, problem)


def _within_mask(tiles: Sequence[AttentionConfig], problem: AttentionProblem) -> tuple[AttentionConfig, ...]:
    """Return the tiles cut to the blocks of the problem's block mask, which they must divide."""
    if not problem.mask:
        return tuple(tiles)
    block_m, block_n = problem.mask
    cut = [replace(x, block_m=min(x.block_m, block_m), block_n=min(x.block_n, block_n)) for x in tiles]
    # A figure or a budget is of the whole tile. Half the rows take half the warps.
    cut = [
        small if small == whole
        else replace(small, measured="", num_warps=max(4, whole.num_warps * small.block_m // whole.block_m))
        for small, whole in zip(cut, tiles, strict=True)
    ]  # fmt: skip
    return tuple(dict.fromkeys(cut))


def portable_config(kind: str, problem: AttentionProblem) -> AttentionConfig | None:
    """Return the table's tile for a kernel that does not use TMA, or None if no row fits."""
    rows = _rows(kind, gpu_class(problem), _heads(problem))
    return next(iter(_within_mask([c for _, c in rows if c.form != "tma"], problem)), None)


def default_config(kind: str, problem: AttentionProblem) -> AttentionConfig | None:
    """Return the table's tile for `kind`, or None if no row fits."""
    return next(iter(candidates(kind, problem)), None)
