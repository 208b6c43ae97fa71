"""Configs of the Hopper kernel (`hopper/fwd.py`), and the problems that it runs. Plain data, importable everywhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from diyfa.backends.cuda.attention.configs import TMA_MIN_WORK, has_tma
from diyfa.backends.cuda.attention.tile_io import cdiv, padded_head_dim
from diyfa.backends.cuda.gluon.compat import NEWEST, OLDEST, has_gluon, ptxas_options
from diyfa.backends.cuda.runtime.launch import is_interpreting, multiprocessors
from diyfa.eight_bits import EIGHT_BITS
from diyfa.problem import AttentionProblem, cached_per_kind, cached_per_problem, refuse_features
from diyfa.score_code import gathered_loads

FEATURES = frozenset(
    {"causal", "gqa", "head_dim_v", "seq_lens", "varlen", "window", "softcap", "alibi", "sinks", "mask", "score_fn"}
)
ARCH = "sm_90"
DTYPES = ("float16", "bfloat16")
E4M3, INT8 = "float8_e4m3fn", "int8"
MIN_HEAD_DIM, MAX_HEAD_DIM = 33, 256  # with fewer columns, half a tile would be zeros
CONSUMER_ROWS = 64  # queries of one consumer warpgroup
# With these features the producer needs more than 24 registers; ptxas would spill.
BUSY_PRODUCER = frozenset({"window", "softcap", "seq_lens", "varlen"})
ROW_BOUND = 1 << 30  # row at which all sequences end in a ragged descriptor
# Keys times head_dim from which on the kernel pays in dense calls of any size: it costs the host 2 us more than the
# portable one. Packed calls need new descriptors for each number of tokens. Calls with lengths were not measured.
LONG_KV_LOOP = 1 << 14
# LONG_KV_LOOP for calls with fewer queries than a tile. Figures: `SMALL_CALLS` in attention/decode_configs.py.
FEW_QUERIES_KV_LOOP = 1 << 17
SHORT_KV_LOOP = 128  # keys per query; with heads of 64 columns, the portable kernel takes 0.7 of the time
# A program fills a multiprocessor, and an H200 has 132 of them. With fewer tiles, smaller tiles use the GPU better.
FULL_GPU = 132
MAX_TILE_INFOS = 128  # per program; their 8 KB fit beside the buffers of every config
# Bytes of L2, of 50 MB, that keys and values of neighbouring heads may fill. With a block mask half of them: tiles that
# run at the same time read blocks anywhere, and each half of L2 keeps a copy of its own.
L2_BYTES = 32 << 20


@dataclass(frozen=True)
class Sm90Config:
    """Tile and schedule of the Hopper kernel: 64 * consumers queries, keys in blocks of block_n."""

    consumers: int  # warpgroups
    block_n: int  # keys
    stages: int  # buffers of [block_n, head_dim] for K and V
    separate_o_buffer: bool  # out leaves through buffers of its own, so that the next Q need not wait for it
    consumer_registers: int
    producer_registers: int
    persistent: bool = False  # one program per multiprocessor, with many tiles; else one program per tile
    pingpong: bool = False  # the consumers take turns at issuing their products
    box_columns: int = 0  # columns of the TMA boxes that make up a tile; 0: see `box_layout`
    pairs: bool = False  # the KV loop carries weights as pairs in int32 (`mma_operand` in `mma.py`)
    q_in_registers: int = 0  # boxes of Q that a consumer holds in registers (`queries_in_registers` in `mma.py`)
    store_from_registers: bool = False  # out leaves from registers, through no buffer (`epilogue.py`)
    fixed_max: bool = False  # bfloat16: no new maximum after the edge blocks (`fixed_max_step` in `softmax.py`)
    scheduler: str = "static"  # or "dynamic" (`gluon/scheduler.py`)
    shared_totals: bool = False  # batch-invariant mode: totals of chunks lie in shared memory (`chunks.py`)
    out_in_totals: bool = False  # and out leaves through them, not through buffers of its own
    tile_infos: int = MAX_TILE_INFOS  # of a persistent program
    measured: str = ""  # device, date, TFLOP/s

    def __post_init__(self) -> None:
        if self.separate_o_buffer and self.store_from_registers:
            raise ValueError(f"out leaves through its own buffers or through none, not {self}")


# Registers of a thread of (a consumer, the producer), by number of consumers.
_REGISTERS = {1: (232, 24), 2: (240, 24), 3: (160, 32)}
# How out leaves a consumer: through buffers of its own, through those of the queries, or from registers.
_OUT = {
    "own": {"separate_o_buffer": True},
    "queries": {"separate_o_buffer": False},
    "registers": {"separate_o_buffer": False, "store_from_registers": True},
}


def _config(
    consumers: int,
    block_n: int,
    stages: int,
    out: str,  # one of _OUT
    q_in_registers: int,
    box_columns: int,
    flags: str,  # names of fields that are True, and "dynamic" for the dynamic scheduler
    measured: str = "",
    **others: int,  # fields that have another value than here
) -> Sm90Config:
    """Return the config of a table's row. Several consumers make it persistent."""
    consumer_registers, producer_registers = _REGISTERS[consumers]
    fields: dict[str, Any] = {
        "consumers": consumers, "block_n": block_n, "stages": stages, **_OUT[out],
        "consumer_registers": consumer_registers, "producer_registers": producer_registers,
        "q_in_registers": q_in_registers, "box_columns": box_columns, "persistent": consumers > 1,
        **dict.fromkeys(flags.split(), True), "measured": measured, **others,
    }  # fmt: skip
    scheduler = "dynamic" if fields.pop("dynamic", False) else "static"
    return Sm90Config(scheduler=scheduler, **fields)


# CONFIGS: (columns, mask on the right) -> rows of (most keys, config). Figures: bf16, 16384 tokens, heads * head_dim =
# 2048, S = 1k/4k/16k or those that a row is for, measured alternately with FlashAttention-3, -4 and cuDNN. A row
# without a figure was never timed.
_ANY = 1 << 62
_H200 = "H200, 2026-11-22: "
_SHORT = "H200, 2026-11-28: 12 heads, S = 1k/2k "
_AT_POWER_LIMIT = "H200, 2026-12-01, after seconds of load, S = 4k/16k "
_MASK = "H200, 2026-11-30: a quarter of the blocks full "
# fmt: off
CONFIGS: dict[tuple[int, bool], tuple[tuple[int, Sm90Config], ...]] = {
    # most keys, then consumers, block_n, stages, out, q_in_registers, box_columns, flags, measured
    (64, False): (
        # With few keys a fixed maximum does not pay: most blocks are edge blocks, without it, and it slows epilogues.
        (2048, _config(2, 128, 8, "own",       1,  0, "dynamic pingpong pairs", _SHORT + "449/463")),
        (_ANY, _config(3, 128, 6, "own",       0,  0, "pingpong pairs fixed_max", _H200 + "551/581")),
    ),
    (64, True): (
        (2048, _config(2, 128, 8, "own",       1,  0, "dynamic pingpong pairs", _SHORT + "334/418")),
        (_ANY, _config(3, 128, 6, "own",       0,  0, "dynamic pingpong pairs fixed_max", _H200 + "493/571")),
    ),
    (96, False): (
        (_ANY, _config(2, 128, 4, "own",       2, 64, "pingpong pairs", _H200 + "508/548/565")),
    ),
    (96, True): (
        (_ANY, _config(2, 128, 6, "own",       0, 32, "dynamic pingpong pairs", _H200 + "414/551/581")),
    ),
    (128, False): (
        (2048, _config(2, 128, 4, "own",       2, 64, "pingpong pairs", _H200 + "S = 1k 649")),
        (_ANY, _config(2, 128, 4, "own",       2, 64, "pingpong pairs fixed_max", _AT_POWER_LIMIT + "660/687")),
    ),
    (128, True): (
        (2048, _config(2, 128, 4, "own",       2, 64, "dynamic pingpong pairs", _H200 + "S = 1k 489")),
        (_ANY, _config(2, 128, 4, "own",       2, 64, "dynamic pingpong pairs fixed_max", _AT_POWER_LIMIT + "581/658")),
    ),
    (192, False): (
        (_ANY, _config(2,  64, 6, "registers", 0,  0, "pingpong pairs fixed_max", _H200 + "650/715/727")),
    ),
    (192, True): (
        (_ANY, _config(2,  64, 6, "registers", 0,  0, "dynamic pingpong pairs fixed_max", _H200 + "497/656/712")),
    ),
    (256, False): (
        (_ANY, _config(2,  64, 4, "registers", 0,  0, "pairs", _H200 + "650/731/747")),
    ),
    (256, True): (
        (_ANY, _config(2,  64, 4, "registers", 0,  0, "dynamic pingpong", _H200 + "500/660/719")),
    ),
}
# V has fewer columns than K, and at most 128, as in MLA's 192/128. Its products are shorter, so that longer blocks pay.
NARROW_V: dict[tuple[int, bool], tuple[tuple[int, Sm90Config], ...]] = {
    (192, False): (
        (_ANY, _config(2, 128, 4, "registers", 0,  0, "pingpong pairs", _H200 + "643/724/759")),
    ),
    (192, True): (
        (_ANY, _config(2, 128, 4, "registers", 0,  0, "dynamic pingpong pairs", _H200 + "481/682/729")),
    ),
}
# float8_e4m3fn, and int8 with a v of it: columns of a tile, a power of two, and mask. Figures: docs/log/eight-bits.md.
FLOAT8_CONFIGS: dict[tuple[int, bool], Sm90Config] = {
    (64, False):   _config(3, 128, 8, "own",       0,  0, "pingpong"),
    (64, True):    _config(3, 128, 8, "own",       0,  0, "dynamic pingpong"),
    (128, False):  _config(2, 128, 8, "own",       1,  0, "pingpong"),
    (128, True):   _config(2, 128, 8, "own",       0,  0, "dynamic pingpong"),
    (256, False):  _config(2, 128, 4, "registers", 0,  0, "pingpong"),
    (256, True):   _config(2, 128, 4, "registers", 0,  0, "dynamic pingpong"),
}
# int8 with a v of 16 bits, as above.
INT8_CONFIGS: dict[tuple[int, bool], Sm90Config] = {
    (64, False):   _config(3, 128, 8, "own",       0,  0, "pingpong pairs fixed_max"),
    (64, True):    _config(3, 128, 8, "own",       0,  0, "dynamic pingpong pairs fixed_max"),
    (128, False):  _config(2, 128, 6, "own",       1,  0, "pingpong pairs fixed_max"),
    (128, True):   _config(2, 128, 6, "own",       0,  0, "dynamic pingpong pairs fixed_max"),
    (256, False):  _config(2,  64, 6, "registers", 0,  0, "pingpong fixed_max"),
    (256, True):   _config(2,  64, 6, "registers", 0,  0, "dynamic pingpong fixed_max"),
}
# For calls with too few tiles of CONFIGS: 64 queries of one consumer. Two such programs fit a multiprocessor and
# overlap as two consumers do. Not at 256 columns, where the accumulators alone fill half of the registers.
SMALL: dict[int, Sm90Config] = {
    64:  _config(1, 128, 4, "own",       0,  0, "fixed_max"),
    128: _config(1,  64, 4, "registers", 0,  0, ""),
    192: _config(1,  64, 3, "registers", 0,  0, ""),
    256: _config(1,  64, 4, "queries",   0,  0, "", consumer_registers=248, producer_registers=88),
}
FLOAT8_SMALL: dict[int, Sm90Config] = {
    64:  _config(1, 128, 4, "registers", 0,  0, ""),
    128: _config(1, 128, 4, "registers", 0,  0, ""),
    256: _config(1,  64, 4, "registers", 0,  0, "", consumer_registers=248, producer_registers=88),
}
INT8_SMALL: dict[int, Sm90Config] = {**FLOAT8_SMALL, 128: _config(1,  64, 4, "registers", 0,  0, "")}
# Batch-invariant mode: one tile for all calls with the same columns and dtype. Its block_n is that of decoding, in
# `HOPPER_INVARIANT` of attention/decode_configs.py.
INVARIANT: dict[int, Sm90Config] = {
    64:  _config(3, 128, 6, "own",       0,  0, "dynamic pingpong pairs shared_totals"),
    96:  _config(2, 128, 4, "own",       0, 32, "dynamic pingpong pairs"),
    128: _config(2, 128, 4, "own",       2, 64, "dynamic pingpong pairs shared_totals out_in_totals", tile_infos=32),
    192: _config(2,  64, 6, "registers", 0,  0, "dynamic pingpong pairs"),
    256: _config(2,  64, 4, "registers", 0,  0, "dynamic pingpong pairs"),
}
INVARIANT_FEATURES = (FEATURES - {"softcap", "alibi", "mask", "score_fn"}) | {"batch_invariant"}
# With a block mask: two consumers, so that a tile's 128 queries lie in one block of the mask, and a dynamic schedule,
# since rows of blocks differ in length. By columns.
MASK_CONFIGS: dict[int, Sm90Config] = {
    64:  _config(2, 128, 8, "own",       1,  0, "dynamic pingpong pairs fixed_max"),
    96:  _config(2, 128, 4, "own",       2, 64, "dynamic pingpong pairs"),
    128: _config(2, 128, 4, "own",       2, 64, "dynamic pingpong pairs"),
    192: _config(2,  64, 6, "registers", 0,  0, "dynamic pingpong pairs fixed_max"),
    256: _config(2,  64, 4, "registers", 0,  0, "dynamic pingpong"),
}
# In place of rows of SMALL, which blocks of 64 queries need. At 64 columns three such programs fit a multiprocessor.
SMALL_MASK_CONFIGS: dict[int, Sm90Config] = {
    64:  _config(1,  64, 6, "own",       1,  0, "pairs fixed_max", _MASK + "503", consumer_registers=136),
    128: _config(1,  64, 5, "registers", 2, 64, "pairs", _MASK + "558"),
}
# fmt: on
# With a score function, as with a block mask, but with registers for what the function computes and loads
# (docs/log/hopper.md, "Score functions").
SCORE_CONFIGS: dict[int, Sm90Config] = {
    64: replace(MASK_CONFIGS[64], block_n=64, fixed_max=False, q_in_registers=0),
    96: replace(MASK_CONFIGS[96], block_n=64, stages=8, q_in_registers=0),
    128: replace(MASK_CONFIGS[128], block_n=64, stages=8, q_in_registers=0),
    192: replace(MASK_CONFIGS[192], fixed_max=False),
    256: MASK_CONFIGS[256],
}


@cached_per_problem
def select_config(problem: AttentionProblem) -> Sm90Config:
    """Return the config of a problem that `refuses` accepts."""
    if problem.dtype in EIGHT_BITS:
        return eight_bit_config(problem)
    if problem.batch_invariant:
        return fitted(problem, INVARIANT[tile_class(problem)[0]])
    rows = config_rows(problem)
    config = next(c for max_keys, c in rows if keys_seen(problem) <= max_keys)
    if problem.score_fn:
        config = SCORE_CONFIGS[tile_class(problem)[0]]
    elif problem.mask:
        config = MASK_CONFIGS[tile_class(problem)[0]]
        if problem.softcap or problem.mask[1] < config.block_n:  # registers for a second unit, or for tanh
            config = replace(config, q_in_registers=min(config.q_in_registers, 1))
    if (
        has_small_blocks(problem, config)
        or count_tiles(problem, config) < FULL_GPU
        or problem.seqlen_q < config.consumers * CONSUMER_ROWS
    ):
        columns = min(columns for columns in SMALL if widest(problem) <= columns)
        config = SMALL[columns]
        if problem.mask and not problem.score_fn:
            config = SMALL_MASK_CONFIGS.get(columns, config)
    if problem.score_fn and problem.mask:  # the kernel counts keys from the first one of its block
        config = replace(config, block_n=min(config.block_n, problem.mask[1]))
    return fitted(problem, config)


def eight_bit_config(problem: AttentionProblem) -> Sm90Config:
    """Return the config of a problem whose q and k have 8 bits."""
    columns = max(64, padded_head_dim(widest(problem)))
    table, small = (FLOAT8_CONFIGS, FLOAT8_SMALL) if value_dtype(problem) == E4M3 else (INT8_CONFIGS, INT8_SMALL)
    config = table[columns, problem.window_right >= 0]
    if count_tiles(problem, config) < FULL_GPU or problem.seqlen_q < config.consumers * CONSUMER_ROWS:
        config = small[columns]
    if problem.out_dtype == "float32":
        config = replace(config, separate_o_buffer=False, store_from_registers=True)
    if config.persistent and config.scheduler == "static" and problem.features & {"seq_lens", "varlen"}:
        config = replace(config, scheduler="dynamic")
    return config


@cached_per_kind
def fitted(problem: AttentionProblem, config: Sm90Config) -> Sm90Config:
    """Return `config` adapted to `problem`. Tables were measured with sequences of one length and V as wide as K."""
    if not has_one_ring(problem, config.box_columns):
        config = replace(config, stages=cdiv(config.stages, 2) * 2)
        if problem.head_dim_v > problem.head_dim or tile_class(problem)[0] == 256:  # out does not fit Q's buffers
            config = replace(config, separate_o_buffer=not config.store_from_registers)
            if not problem.batch_invariant:  # there, blocks are those of decoding
                config = replace(config, block_n=min(config.block_n, 64 if config.stages < 6 else 128))
    if problem.out_dtype == "float32":  # out is twice as large as Q's buffers or its own
        config = replace(config, separate_o_buffer=False, store_from_registers=True)
        config = replace(config, shared_totals=config.shared_totals and not config.out_in_totals, out_in_totals=False)
    if config.persistent and config.scheduler == "static" and problem.features & {"seq_lens", "varlen"}:
        config = replace(config, scheduler="dynamic")  # only the device knows how long tiles take
    is_busy = config.consumers == 2 and problem.features & BUSY_PRODUCER and not finds_ahead(problem, config)
    if is_busy and tile_class(problem)[0] < 256:  # at 256, the consumers would spill more than the producer does
        config = replace(config, consumer_registers=232, producer_registers=40)
    return config


def has_small_blocks(problem: AttentionProblem, config: Sm90Config) -> bool:
    """Return whether a block of the block mask has fewer queries than a tile of `config`."""
    return bool(problem.mask) and problem.mask[0] < config.consumers * CONSUMER_ROWS


def finds_ahead(problem: AttentionProblem, config: Sm90Config) -> bool:
    """Return whether the producer finds its next tile before it copies a tile's last block: see `run_producer`."""
    return "varlen" in problem.features and config.persistent and config.stages <= 4


def keys_seen(problem: AttentionProblem) -> int:
    """Return the largest number of keys that a query sees: the length of its KV loop."""
    if problem.window_left < 0:
        return problem.seqlen_k
    right = problem.seqlen_k if problem.window_right < 0 else problem.window_right
    return min(problem.window_left + 1 + right, problem.seqlen_k)


def has_long_kv_loop(problem: AttentionProblem, elements: int = LONG_KV_LOOP) -> bool:
    """Return whether the KV loop has so many elements of K that the kernel pays with any number of tiles."""
    with_lengths = problem.seq_lens or problem.varlen
    return not with_lengths and keys_seen(problem) * widest(problem) >= elements


def compile_options(config: Sm90Config) -> dict[str, int]:
    """Return the compiler options of a config. `maxnreg`: the mean of one consumer's and its producer's registers."""
    options = {"num_warps": 4, "launch_pdl": True, **ptxas_options()}
    if config.consumers == 1:
        options["maxnreg"] = cdiv((config.consumer_registers + config.producer_registers) // 2, 8) * 8
    return options


def box_layout(head_dim: int, other: int, box_columns: int = 0) -> tuple[int, int]:
    """Return (columns of a TMA box, number of boxes) of a tile of `head_dim` columns.

    `other`: the head dim of V, or for V that of K. `box_columns`: the config's, 0 if it has none.
    """
    if box_columns:
        return box_columns, cdiv(head_dim, box_columns)
    if 128 < max(head_dim, other) <= 192:  # a power of two would waste a quarter
        return 64, cdiv(head_dim, 64)
    return max(64, padded_head_dim(head_dim)), 1


def value_dtype(problem: AttentionProblem) -> str:
    """Return the dtype of V."""
    return problem.value_dtype or problem.dtype


def value_boxes(problem: AttentionProblem, config: Sm90Config) -> tuple[int, int]:
    """Return `box_layout` of V and out. V of 8 bits is read transposed, in one box."""
    if value_dtype(problem) == E4M3:
        return max(64, padded_head_dim(problem.head_dim_v)), 1
    return box_layout(problem.head_dim_v, problem.head_dim, config.box_columns)


@cached_per_kind
def has_one_ring(problem: AttentionProblem, box_columns: int = 0) -> bool:
    """Return whether tiles of K and V have the same boxes, so that they use the same buffers."""
    d, dv = problem.head_dim, problem.head_dim_v
    return box_layout(d, dv, box_columns) == box_layout(dv, d, box_columns)


@cached_per_kind
def config_rows(problem: AttentionProblem) -> tuple[tuple[int, Sm90Config], ...]:
    """Return the rows of the table that apply to a problem."""
    narrow = problem.head_dim_v <= 128 < problem.head_dim
    return (narrow and NARROW_V.get(tile_class(problem))) or CONFIGS[tile_class(problem)]


@cached_per_kind
def tile_class(problem: AttentionProblem) -> tuple[int, bool]:
    """Return the tables' key: columns of the problem's widest tile, and whether it has a mask on the right."""
    masked = problem.window_right >= 0
    wide = widest(problem)
    return min(columns for columns, mask in CONFIGS if mask == masked and wide <= columns), masked


def widest(problem: AttentionProblem) -> int:
    """Return the columns of the wider one of K and V."""
    return max(problem.head_dim, problem.head_dim_v)


def count_tiles(problem: AttentionProblem, config: Sm90Config) -> int:
    """Return the number of tiles of all heads; of packed sequences, an upper bound."""
    rows = config.consumers * CONSUMER_ROWS
    if problem.varlen:
        return (problem.total_q // rows + problem.batch) * problem.heads_q
    return cdiv(problem.seqlen_q, rows) * problem.batch * problem.heads_q


def heads_in_parallel(problem: AttentionProblem) -> int:
    """Return the number of query heads whose tiles alternate: if tiles differ in length, those whose K and V fit L2.

    There are as few groups of such heads as that takes. They are equally large if their number divides that of the KV
    heads, else the last one is smaller. The longest tiles of a group come first, so a small last group would begin its
    long tiles when no others are left.
    """
    if (problem.window_right < 0 and not problem.mask) or problem.window_left >= 0 or problem.varlen:
        return 1
    pair_bytes = 2 * 2 * problem.seqlen_k * problem.head_dim
    l2_bytes = L2_BYTES // 2 if problem.mask else L2_BYTES
    heads_kv = problem.batch * problem.heads_kv
    groups = cdiv(heads_kv, max(1, l2_bytes // pair_bytes))
    return cdiv(heads_kv, groups) * (problem.heads_q // problem.heads_kv)


def has_fixed_max(problem: AttentionProblem, config: Sm90Config) -> bool:
    """Return the kernel's FIXED_MAX. It needs weights of bfloat16: those relative to a fixed maximum may be large.

    With ALiBi and no causal mask the nearest keys come late. Their scores exceed those of the first blocks by slope
    times distance, which no range holds. At 128 columns a softcap beside it would spill.
    """
    near_first = problem.causal or not problem.alibi
    changed_scores = problem.softcap or problem.alibi
    if problem.dtype == INT8:  # a mean of k takes registers, too
        has_registers = not (changed_scores or problem.k_mean) or tile_class(problem)[0] == 128
    else:
        has_registers = not changed_scores or tile_class(problem)[0] != 128
    return (
        config.fixed_max
        and value_dtype(problem) == "bfloat16"
        and near_first
        and has_registers
        and not problem.score_fn
    )


def tile_info_count(config: Sm90Config) -> int:
    """Return the number of a program's tile infos. A program of one tile has two: the tile's and the end marker."""
    return config.tile_infos if config.persistent else 2


def grid_size(problem: AttentionProblem, config: Sm90Config, device: torch.device) -> int:
    """Return the number of programs to launch."""
    tiles = count_tiles(problem, config)
    if not config.persistent:
        return tiles
    at_once = programs = min(tiles, multiprocessors(device) or FULL_GPU)
    while cdiv(tiles, programs) >= config.tile_infos:  # one tile info is the end marker
        programs += at_once
    return programs


TOO_MANY_STEPS = (
    "sm90 counts the steps that samples and rows are apart in 32 bits where samples have lengths of their own: the "
    "strides of these tensors have too small a common divisor"
)


@cached_per_kind
def _refuses_kind(problem: AttentionProblem) -> str | None:
    """Return why the kernel takes no problem of this kind, or None."""
    if problem.arch != ARCH:
        return f"sm90 is made of instructions that only {ARCH} has, this is {problem.arch}"
    if problem.dtype not in (*DTYPES, E4M3, INT8):
        return f"sm90 takes {', '.join(DTYPES)}, {E4M3} and {INT8}, not {problem.dtype}"
    if problem.dtype == INT8 and value_dtype(problem) not in (*DTYPES, E4M3):
        return f"sm90 takes a v of {', '.join(DTYPES)} and {E4M3} beside {INT8}, not of {value_dtype(problem)}"
    features = INVARIANT_FEATURES if problem.batch_invariant else FEATURES
    if problem.dtype in EIGHT_BITS and not problem.batch_invariant:
        features = (features - {"mask", "score_fn"}) | {"eight_bits"}
    if reason := refuse_features(problem, features, "sm90"):
        return reason
    if problem.k_mean and problem.softcap:  # it would have to join each score
        return "sm90 has no softcap of scores whose keys have a mean of their own"
    if not MIN_HEAD_DIM <= widest(problem) <= MAX_HEAD_DIM:
        return f"sm90 takes head_dim {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, got {problem.head_dim} and {problem.head_dim_v}"
    if problem.head_dim_v % 8:  # padding would have to be removed from out
        return f"sm90 writes rows of out that are multiples of 16 bytes, head_dim {problem.head_dim_v} is not"
    if not problem.aligned:
        return "sm90 reads through TMA, which needs addresses and strides that are multiples of 16 bytes"
    if problem.seq_lens and not problem.few_steps:
        return TOO_MANY_STEPS
    if problem.mask and (beside := sorted(problem.features & {"alibi", "seq_lens"})):
        return f"sm90 takes no {' and no '.join(beside)} beside a block mask"
    if problem.score_fn and problem.alibi:
        return "sm90 takes no alibi beside a score function"
    return None


def refuses(problem: AttentionProblem) -> str | None:
    """Return why the kernel does not take `problem`, or None: it cannot, or is not faster than the portable one."""
    if reason := _refuses_kind(problem):
        return reason
    if not has_tma(problem) and not has_long_kv_loop(problem):
        return (
            f"sm90 pays from {TMA_MIN_WORK} multiply-adds in the scores on,"
            f" or from {LONG_KV_LOOP} elements of K for a query, without seq_lens and not packed"
        )
    if widest(problem) <= 64 and keys_seen(problem) <= SHORT_KV_LOOP:
        return f"sm90 pays from {SHORT_KV_LOOP + 1} keys for a query on where heads have 64 columns"
    if problem.score_fn and widest(problem) <= 64 and not gathered_loads(problem.score_fn):
        return "sm90 pays with a score function and heads of 64 columns if the function loads an element for each pair"
    config = select_config(problem)
    if problem.seqlen_q < config.consumers * CONSUMER_ROWS and not has_long_kv_loop(problem, FEW_QUERIES_KV_LOOP):
        return (
            f"sm90 has tiles of {config.consumers * CONSUMER_ROWS} queries, which {problem.seqlen_q} would not fill; it"
            f" pays from {FEW_QUERIES_KV_LOOP} elements of K for a query on, without seq_lens and not packed"
        )
    return None


def environment_refusal() -> str | None:
    """Return why this environment cannot compile the kernel, or None."""
    if not has_gluon():
        known = " to ".join(f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
        return f"sm90 is written in the Gluon of Triton {known}, this is Triton {triton.__version__}"
    if is_interpreting():
        return "sm90 is written in Gluon, which Triton's interpreter does not run"
    return None


def unsupported(problem: AttentionProblem) -> str | None:
    """Return why the portable kernel has to run `problem`, or None."""
    return refuses(problem) or environment_refusal()
