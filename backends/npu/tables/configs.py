"""Tiles and compile options of the NPU kernels, as a table; no Triton, no device.

A tile is looked up by (chip family, kernel, operand width, head-dim class, mode). The rows are those of `tiles.json`,
which search.py wrote. Every row was accepted by the real Ascend compiler; `measured` says which one and when. `bound`
means that both vector cores of an AI core share the work, `pipelined` the depth of the cube-to-vector pipeline; both
are read from the compiler's output by `diyfa.lab.npu.aot`, whose gate fails when a row stops being true.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from diyfa.arch import ELEMENT_BYTES, NPUArch, NPUSpec, npu_spec
from diyfa.backends.npu.tables import asked, l0, tiles
from diyfa.dropout import drop_threshold
from diyfa.problem import AttentionProblem, KVCacheProblem, MatmulProblem

MEASURED = "compiled 2026-11-21, triton-ascend 3.2.0 + ascendnpu-ir 1.2.0; not timed on a device"
PREPROCESS_ROWS = 64  # rows of out and dout that one vector program holds at a time, up to 256 features wide
# A run-time `if` around the mask spares tiles that need none, and is what to suspect first when results are wrong on a
# device but right in the interpreter: with DIYFA_NPU_ALWAYS_MASK=1 every tile is masked, without an `if`.
ALWAYS_MASK = os.environ.get("DIYFA_NPU_ALWAYS_MASK", "0") == "1"


@dataclass(frozen=True)
class AttentionTile:
    """Tile of one attention kernel: `block_m` query rows by `block_n` keys, and the compiler's options."""

    block_m: int
    block_n: int
    bound: bool = True  # both vector cores of an AI core share the work
    pipelined: int = 4  # depth of the cube-to-vector pipeline; 0: none
    workspace_buffers: int = 4  # set_workspace_multibuffer
    vector_loop: int | None = None  # tile_mix_vector_loop
    cube_loop: int | None = None  # tile_mix_cube_loop
    measured: str = MEASURED

    def compile_options(self, arch: str) -> dict[str, Any]:
        """Options of the Ascend compiler, as triton-ascend names them."""
        options: dict[str, Any] = {
            "multibuffer": True,
            "enable_auto_bind_sub_block": True,
            "limit_auto_multi_buffer_only_for_local_buffer": False,
            "set_workspace_multibuffer": self.workspace_buffers,
        }
        if self.vector_loop is not None:
            options["tile_mix_vector_loop"] = self.vector_loop
        if self.cube_loop is not None:
            options["tile_mix_cube_loop"] = self.cube_loop
        return options | family_options(arch)


@dataclass(frozen=True)
class MatmulTile:
    """Tile of the matrix product: [block_m, block_k] @ [block_k, block_n]; `group_m` tile rows share columns of b."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    measured: str = MEASURED

    def compile_options(self, arch: str) -> dict[str, Any]:
        """Options of the Ascend compiler, as triton-ascend names them."""
        return {"multibuffer": True} | family_options(arch)


def family(arch: str) -> NPUArch | None:
    """Family of the chip called `arch`, None when diyfa does not know it."""
    spec = npu_spec(arch)
    return None if spec is None else spec.arch


def family_options(arch: str) -> dict[str, Any]:
    """Options that a whole family needs."""
    if family(arch) is NPUArch.A5:
        return {"compile_on_910_95": True, "enable_select_analysis": True}
    return {}


class TileKey(NamedTuple):
    """Row key of the attention table."""

    family: NPUArch  # A2 stands for A3 too: their memories are the same
    kernel: str  # "fwd", "dq", "dkdv", "dbias"
    width: int  # bytes of an operand element
    head_dim: int  # the largest of the class
    mode: str  # one of `MODES`
    cores: int = 0  # cube cores of the chip, where chips of a family differ; 0: all others


HEAD_DIM_CLASSES = (64, 128, 256, 576)  # the largest of each

FIRST_CHIPS = ("Ascend910B/20", "Ascend950/32")  # by family and cube cores, as tiles.json names chips

# The kernels differ in how much of the unified buffer their vector part needs:
#   even      nothing to mask: the keys fill whole tiles
#   tail      the last tile of keys may be partial (also seq_lens, varlen)
#   causal    causal
#   biased    attn_bias, causal or not
#   featured  a window, softcap or ALiBi; or dropout, with or without a bias
#   crowded   a window, softcap or ALiBi together with a bias or dropout
MODES = ("even", "tail", "causal", "biased", "featured", "crowded")
DBIAS_MODES = MODES[3:]  # there is no gradient of a bias without one
_CROWDING = frozenset({"attn_bias", "dropout"})
_FEATURED = frozenset({"window", "softcap", "alibi"})


def modes(kernel: str) -> tuple[str, ...]:
    """Modes of the table in which `kernel` can be asked for."""
    return DBIAS_MODES if kernel == "dbias" else MODES


def searched_rows(rows: list[tiles.Row]) -> Iterator[tuple[TileKey, AttentionTile]]:
    """The rows of the file. Those of a family's first chip are for all of it, others where they differ from that."""
    general: dict[TileKey, AttentionTile] = {}
    special: dict[TileKey, AttentionTile] = {}
    for row in rows:
        how = f"compiled {row.date}, {row.compilers}; best predicted of {row.tried}, not timed on a device"
        shape, pipeline = (row.block_m, row.block_n), (row.bound, row.pipelined)
        tile = AttentionTile(*shape, *pipeline, row.workspace_buffers, row.vector_loop, row.cube_loop, how)
        for chip in row.chips:
            name, _, cores = chip.partition("/")
            arch = NPUArch(name)
            key = TileKey(NPUArch.A5 if arch is NPUArch.A5 else NPUArch.A2, *row.key)
            if chip in FIRST_CHIPS:
                general[key] = tile
            else:
                special[key._replace(family=arch, cores=int(cores))] = tile
    yield from general.items()
    for key, tile in special.items():
        shared = key._replace(family=NPUArch.A5 if key.family is NPUArch.A5 else NPUArch.A2, cores=0)
        if tile != general.get(shared):
            yield key, tile


ATTENTION_TILES: dict[TileKey, AttentionTile] = dict(searched_rows(tiles.load()))


def attention_mode(problem: AttentionProblem, block_n: int) -> str:
    """Which mode of the table a call needs; `block_n` is the key tile of the "even" row."""
    features = problem.features
    if features & _FEATURED:
        return "crowded" if features & _CROWDING else "featured"
    if problem.dropout:
        return "featured"
    if problem.bias:
        return "featured" if ALWAYS_MASK else "biased"  # whose tiles a mask in every tile would not fit
    if problem.causal:
        return "causal"
    return "tail" if problem.seq_lens or problem.varlen or problem.seqlen_k % block_n else "even"


# Where the search tried the widest class with heads of 512, and what it found overflows L1 beyond: rows, keys there.
_BEYOND_512 = {(NPUArch.A5, "dq", 4): (16, 32), (NPUArch.A5, "dbias", 4): (32, 64)}


def widest_head_dim(key: TileKey) -> int:
    """The widest head that the table's row of `key` is for; wider ones of its class have a tile of `_BEYOND_512`."""
    return 512 if key[:3] in _BEYOND_512 and key.head_dim > 512 else key.head_dim


# With a mask in every tile the rows of these overflow the unified buffer, so there they are smaller: (rows, keys).
_ALWAYS_MASKED = {
    TileKey(NPUArch.A2, "fwd", 2, 256, "tail"): (64, 128),
    TileKey(NPUArch.A2, "fwd", 2, 256, "causal"): (64, 128),
    TileKey(NPUArch.A2, "dkdv", 2, 64, "even"): (64, 128),
}


def attention_tile(problem: AttentionProblem, kernel: str, always_mask: bool | None = None) -> AttentionTile:
    """The table's row of `kernel` ("fwd", "dq", "dkdv" or "dbias") for `problem`; `always_mask`: with a mask in every
    tile, by default as ALWAYS_MASK says.
    """
    key = attention_key(problem, kernel)
    tile = ATTENTION_TILES[key]
    if problem.head_dim > widest_head_dim(key):
        tile = AttentionTile(*_BEYOND_512[key[:3]], bound=False, pipelined=0, vector_loop=1)
    if not (ALWAYS_MASK if always_mask is None else always_mask):
        return tile
    chip = NPUArch.A5 if key.family is NPUArch.A5 else NPUArch.A2
    shape = _ALWAYS_MASKED.get(key._replace(family=chip, cores=0), (tile.block_m, tile.block_n))
    return replace(tile, block_m=shape[0], block_n=shape[1])


def attention_key(problem: AttentionProblem, kernel: str) -> TileKey:
    """Key of the table's row for `problem`."""
    spec = npu_spec(problem.arch)
    chip = NPUArch.A5 if spec is not None and spec.arch is NPUArch.A5 else NPUArch.A2
    widest = max(problem.head_dim, problem.head_dim_v)
    head_dim = next(d for d in HEAD_DIM_CLASSES if widest <= d)
    row = TileKey(chip, kernel, ELEMENT_BYTES[problem.dtype], head_dim, modes(kernel)[0])
    mode = attention_mode(problem, ATTENTION_TILES[_own(row, spec)].block_n)
    if kernel == "dkdv" and mode == "tail":  # each key has its own row of the result, and rows beyond are not stored
        mode = "even"
    return _own(row._replace(mode=mode), spec)


def _own(key: TileKey, spec: NPUSpec | None) -> TileKey:
    """The key of the chip's own row where it has one."""
    if spec is None:
        return key
    own = key._replace(family=spec.arch, cores=spec.cube_cores)
    return own if own in ATTENTION_TILES else key


def fwd_tile(problem: AttentionProblem) -> AttentionTile:
    """The forward kernel's tile, untuned."""
    return untuned_tile(problem, "fwd")


def bwd_tiles(problem: AttentionProblem) -> dict[str, AttentionTile]:
    """The tiles of the backward kernels with matrix products, untuned."""
    kernels = ("dkdv", "dq", "dbias") if problem.bias_grad else ("dkdv", "dq")
    return {kernel: untuned_tile(problem, kernel) for kernel in kernels}


def untuned_tile(problem: AttentionProblem | KVCacheProblem, kernel: str) -> AttentionTile:
    """The tile that DIYFA_NPU_TILE asks for, else the table's."""
    return asked_tile(problem, kernel) or table_tile(problem, kernel)


def table_tile(problem: AttentionProblem | KVCacheProblem, kernel: str) -> AttentionTile:
    """The table's tile of an attention kernel or, for "decode", of attention over a cache."""
    return decode_tile(problem) if isinstance(problem, KVCacheProblem) else attention_tile(problem, kernel)


def asked_tile(problem: AttentionProblem | KVCacheProblem, kernel: str) -> AttentionTile | None:
    """The tile that DIYFA_NPU_TILE asks for, with the other options of the table's row. Raises ValueError for what
    names no tile."""
    shape = asked.shape_of(kernel)
    if shape is None:
        return None
    row, rows, keys = table_tile(problem, kernel), shape.block_m, shape.block_n
    if isinstance(problem, KVCacheProblem):
        rows, keys = _rows_and_keys(problem, rows, keys)
    buffers = shape.workspace_buffers or row.workspace_buffers
    changes: dict[str, Any] = {"block_m": rows, "block_n": keys, "workspace_buffers": buffers}
    return replace(row, **changes, bound=False, pipelined=0, measured=f"asked for by {asked.VARIABLE}")


# Rows and keys of the tiles for a compiler that does not take the table's row, by the largest head dim of the class:
# for kernels in the modes that mask by position only, and for the others.
_CONSERVATIVE = {64: (64, 32), 128: (64, 32), 256: (32, 32), 576: (16, 16)}
_LIGHT_MODES = frozenset({"even", "tail", "causal"})
# The same of the decode kernel: rows, keys.
_CONSERVATIVE_DECODE = {64: (16, 32), 128: (16, 32), 256: (16, 32), 576: (16, 32)}


def conservative_tile(problem: AttentionProblem | KVCacheProblem, kernel: str) -> AttentionTile:
    """A tile that every known release of the compiler takes for a call of `problem`, by rule: small, with the
    compiler's default options. It may be neither bound nor pipelined. Its keys divide those of every *even* row."""
    if isinstance(problem, KVCacheProblem):
        rows, keys = _rows_and_keys(problem, *_CONSERVATIVE_DECODE[_head_dim_class(problem)])
    else:
        key = attention_key(problem, kernel)
        rows = keys = _CONSERVATIVE[key.head_dim][key.mode not in _LIGHT_MODES]
        if family(problem.arch) is NPUArch.A5 and key.width == 2:  # its compiler crashes on 16x16
            rows = max(rows, 32)
            keys = keys if kernel == "dkdv" else rows  # what 32 keys accumulate does not fit
    return AttentionTile(
        rows, keys, bound=False, pipelined=0, workspace_buffers=2,
        measured="conservative, by rule: compiles with every known compiler; not timed on a device",
    )  # fmt: skip


# Tiles of the decode kernel by operand bytes and head-dim class, the largest of a few that compile with all features:
# (rows, keys), and the same where keys are gathered, which needs more of the unified buffer (ascendnpu-ir 1.2.0 does
# not share a gather between the vector cores).
DECODE_SHAPES: dict[tuple[int, int], tuple[tuple[int, int], tuple[int, int]]] = {
    (2, 64): ((64, 128), (64, 64)),
    (2, 128): ((64, 128), (64, 64)),
    (2, 256): ((64, 64), (32, 64)),
    (2, 576): ((32, 64), (16, 32)),
    (4, 64): ((64, 64), (64, 32)),
    (4, 128): ((64, 64), (64, 32)),
    (4, 256): ((32, 64), (16, 32)),
    (4, 576): ((16, 32), (16, 32)),
}
DECODE_TASKS = 4  # tasks for each program, unless a split would get shorter than
DECODE_SPLIT_BLOCKS = 4  # blocks of keys
DECODE_MOST_SPLITS = 64


def decode_tile(problem: KVCacheProblem) -> AttentionTile:
    """The decode kernel's tile: no more rows than there are, and blocks of keys that lie in one page.

    In the batch invariant mode it hangs on dtype and head dims alone, so it is one for which all pages can be gathered.
    """
    whole, gathered = DECODE_SHAPES[ELEMENT_BYTES[problem.dtype], _head_dim_class(problem)]
    shape = gathered if problem.batch_invariant or problem.page_size % _least_keys(problem) else whole
    return AttentionTile(*_rows_and_keys(problem, *shape))


def _rows_and_keys(problem: KVCacheProblem, rows: int, keys: int) -> tuple[int, int]:
    """A shape made fit for a call: a power of two of rows and, but in the batch invariant mode, no more rows than there
    are and keys that lie in one page where pages are large enough."""
    rows = _power_of_2(rows + 1) // 2
    if problem.batch_invariant:
        return rows, keys
    if problem.paged and problem.page_size % _least_keys(problem) == 0:
        keys = math.gcd(keys, problem.page_size)
    there = _power_of_2(problem.heads_q // problem.heads_kv) * _power_of_2(problem.seqlen_q)
    return min(rows, max(16, there)), keys


def _least_keys(problem: KVCacheProblem) -> int:
    """Of a block: on fewer the compiler crashes, or the cube core multiplies no fewer."""
    return 32 if family(problem.arch) is NPUArch.A5 else 16


def _head_dim_class(problem: KVCacheProblem) -> int:
    widest = max(problem.head_dim, problem.head_dim_v)
    return next(d for d in HEAD_DIM_CLASSES if widest <= d)


def _power_of_2(n: int) -> int:
    """The least one that is not below `n`."""
    return 1 << max(n - 1, 0).bit_length()


def pages_form(problem: KVCacheProblem, tile: AttentionTile) -> str:
    """How the decode kernel loads keys: see `decode.load_keys`."""
    if not problem.paged:
        return ""
    return "gathered" if problem.page_size % tile.block_n else "whole"


def candidates(problem: AttentionProblem | KVCacheProblem, kernel: str = "fwd") -> list[AttentionTile]:
    """Tiles worth timing on a device: the table's, then its halves, each with both depths of workspace buffering; last
    the conservative one, which compiles where none of these does.
    """
    row = table_tile(problem, kernel)
    shapes = [(row.block_m, row.block_n), (row.block_m // 2, row.block_n), (row.block_m, row.block_n // 2)]
    tiles = [
        tile
        for block_m, block_n in shapes
        if block_m >= 16 and block_n >= (_least_keys(problem) if isinstance(problem, KVCacheProblem) else 16)
        for buffers in (4, 2)
        if fits(tile := replace(row, block_m=block_m, block_n=block_n, workspace_buffers=buffers), problem, kernel)
    ]
    return [*tiles, conservative_tile(problem, kernel)]


def fits(tile: AttentionTile, problem: AttentionProblem | KVCacheProblem, kernel: str = "fwd") -> bool:
    """Whether one copy of each operand tile fits L1, and of what accumulates over the loop, L0C.

    Necessary only: what else the compiler must keep is its own business, and the compile gate tries every row.
    """
    spec = npu_spec(problem.arch)
    if spec is None:
        return False
    width, d, dv = ELEMENT_BYTES[problem.dtype], problem.head_dim, problem.head_dim_v
    rows, keys = tile.block_m, tile.block_n
    kernel = "fwd" if kernel == "decode" else kernel
    operands = {
        "fwd": rows * d + keys * (d + dv) + rows * keys,
        "dq": rows * (d + dv) + keys * (d + dv) + rows * keys,
        "dkdv": rows * (d + dv) + keys * (d + dv) + 2 * rows * keys,
        "dbias": (rows + keys) * (d + dv),
    }
    accumulators = {"fwd": rows * dv, "dq": rows * d, "dkdv": keys * (d + dv), "dbias": 0}
    return operands[kernel] * width <= spec.l1 and accumulators[kernel] * 4 <= spec.l0c


def widest_product(dtype: str) -> int:
    """The most columns of a product, of which 16 rows at least must pass through half of L0B (see l0.py). dq and dk of
    wider heads come from two, see `compat.cut_columns`."""
    return max(d for d in range(16, HEAD_DIM_CLASSES[-1] + 1, 16) if l0.longest_slice(16, d, ELEMENT_BYTES[dtype]))


def always_mask_unfit(problem: AttentionProblem | KVCacheProblem) -> str | None:
    """Why every tile cannot be masked, where it is asked for. The 950's table was chosen without: most of its forward
    tiles would overflow the unified buffer (a causal one of D = 64 with 354 KiB of 248)."""
    if ALWAYS_MASK and family(problem.arch) is NPUArch.A5:
        return "DIYFA_NPU_ALWAYS_MASK=1 is for the 910B and 910_93: the 950's tiles have no room for it, so unset it"
    return None


def preprocess_rows(problem: AttentionProblem) -> int:
    """Rows of out and dout a vector program holds at a time."""
    return PREPROCESS_ROWS if problem.head_dim_v <= 256 else PREPROCESS_ROWS // 2


def softcap_form(problem: AttentionProblem | KVCacheProblem) -> str:
    """How the kernels cap scores: not at all (""), or as `primitives.capped_scores` says."""
    if not problem.softcap:
        return ""
    return "precise" if problem.dtype == "float32" else "plain"


def alibi_form(problem: AttentionProblem) -> str:
    """How the kernels subtract ALiBi's distances: not at all (""), or as `primitives.add_alibi` says."""
    if not problem.alibi:
        return ""
    return "by_axis" if problem.causal and problem.dtype != "float32" else "by_pair"


def attention_scalars(
    problem: AttentionProblem | KVCacheProblem, sm_scale: float, dropout_p: float
) -> dict[str, float]:
    """The floats every attention kernel takes, by name. `softcap_minus` is -2 softcap, `softcap_inverse` 1/softcap,
    `softcap_rate` 2 sm_scale / softcap, `keep_threshold` that of `dropout.keep_tile`, `keep_prob` 1 - p; the gradients
    of q and k are multiplied by `grad_scale` at the end: sm_scale / (1 - p), negative with softcap.

    Prepared here because scalar arithmetic inside a kernel breaks its pipeline.
    """
    scale, cap, keep = float(sm_scale), float(problem.softcap), 1.0 - dropout_p
    inverse = 1.0 / cap if cap else 0.0
    return {
        "sm_scale": scale, "softcap": cap, "softcap_minus": -2.0 * cap, "softcap_inverse": inverse,
        "softcap_rate": 2.0 * scale * inverse, "keep_threshold": float(drop_threshold(dropout_p)), "keep_prob": keep,
        "keep_scale": 1.0 / keep, "grad_scale": (-scale if cap else scale) / keep,
    }  # fmt: skip


def attention_sizes(problem: AttentionProblem) -> dict[str, int]:
    """The integers every attention kernel takes, by name."""
    names = "batch heads_q heads_kv seqlen_q seqlen_k total_q total_k window_left window_right"
    return {name: getattr(problem, name) for name in names.split()}


MATMUL_TILES: dict[int, MatmulTile] = {2: MatmulTile(128, 256, 256), 4: MatmulTile(128, 128, 128)}


def matmul_tile(problem: MatmulProblem) -> MatmulTile:
    """The caller's tile, or the table's for the width of the wider of input and compute dtype."""
    if problem.block is not None:
        return MatmulTile(*problem.block, measured="asked for by the caller")
    return MATMUL_TILES[max(ELEMENT_BYTES[problem.dtype], ELEMENT_BYTES[problem.compute_dtype])]


def matmul_fits(tile: MatmulTile, problem: MatmulProblem) -> bool:
    """Whether the accumulator fits L0C, two stages of both operand tiles L1, and slices of them L0A and L0B."""
    spec = npu_spec(problem.arch)
    width = max(ELEMENT_BYTES[problem.dtype], ELEMENT_BYTES[problem.compute_dtype])
    operands = (tile.block_m + tile.block_n) * tile.block_k * width
    streamed = l0.longest_slice(tile.block_m, tile.block_n, width) > 0
    return spec is not None and streamed and tile.block_m * tile.block_n * 4 <= spec.l0c and operands <= spec.l1
