"""Tiles and compile options of the NPU kernels, as a table. It needs neither Triton nor a device.

The key of a tile is (chip family, kernel, operand width, head-dim class, mode). search.py wrote the rows, in
`tiles.json`. The real Ascend compiler accepted every row; `measured` says which release and when. `bound` means that
both vector cores of an AI core share the work. `pipelined` is the depth of the cube-to-vector pipeline.
`diyfa.lab.npu.aot` reads both from the compiler's output, and its gate fails if a row is no longer true.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from diyfa.arch import ELEMENT_BYTES, NPUArch, NPUSpec, npu_spec
from diyfa.backends.npu.runtime import multibuffer
from diyfa.backends.npu.tables import l0, requested, tiles
from diyfa.dropout import drop_threshold
from diyfa.eight_bits import BLOCK_K, BLOCK_Q
from diyfa.features import ADJUSTING
from diyfa.problem import AttentionProblem, KVCacheProblem, MatmulProblem
from diyfa.score_code import gathered_loads

MEASURED = "compiled 2026-11-21, triton-ascend 3.2.0 + ascendnpu-ir 1.2.0; not timed on a device"
PREPROCESS_ROWS = 64  # rows of out and dout that a vector program holds at once, for Dv up to 256
# A run-time `if` around the mask saves work in tiles that need none. Suspect it first if results are wrong on a device
# but right in the interpreter: DIYFA_NPU_ALWAYS_MASK=1 masks every tile, without the `if`.
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
    multibuffer: bool = True  # see runtime/multibuffer.py

    def compile_options(self, arch: str) -> dict[str, Any]:
        """Return the options of the Ascend compiler, by triton-ascend's names."""
        options: dict[str, Any] = {
            "multibuffer": self.multibuffer,
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
        """Return the options of the Ascend compiler, by triton-ascend's names."""
        return {"multibuffer": True} | family_options(arch)


def family(arch: str) -> NPUArch | None:
    """Return the family of the chip `arch`, or None if diyfa does not know it."""
    spec = npu_spec(arch)
    return None if spec is None else spec.arch


def family_options(arch: str) -> dict[str, Any]:
    """Return the compiler options that all kernels need on the family of `arch`."""
    if family(arch) is NPUArch.A5:
        return {"compile_on_910_95": True, "enable_select_analysis": True}
    return {}


class TileKey(NamedTuple):
    """Row key of the attention table."""

    family: NPUArch  # A2 includes A3: their memories are the same
    kernel: str  # "fwd", "dq", "dkdv", "dbias"
    width: int  # bytes of an operand element
    head_dim: int  # the largest head dim of the class
    mode: str  # one of `MODES`
    cores: int = 0  # cube cores of a chip with a row of its own; 0: all other chips of the family


HEAD_DIM_CLASSES = (64, 128, 256, 576)  # the largest head dim of each class

FIRST_CHIPS = ("Ascend910B/20", "Ascend950/32")  # by family and cube cores, as tiles.json names chips

# Modes: variants of the kernels that need different amounts of the unified buffer for their vector code.
#   even      no mask: the keys fill whole tiles
#   tail      the last tile of keys may be partial (also seq_lens, varlen)
#   causal    causal
#   biased    attn_bias, causal or not
#   featured  a window, a block mask, softcap or ALiBi; or dropout, with or without a bias
#   crowded   a window, a block mask, softcap or ALiBi together with a bias or dropout; a score function
# The tile of a call with a block mask is the row's, cut to a block of the mask (`within_mask`).
MODES = ("even", "tail", "causal", "biased", "featured", "crowded")
DBIAS_MODES = MODES[3:]  # modes of calls with a bias, which alone have a gradient of one
_CROWDING = frozenset({"attn_bias", "dropout"})
_FEATURED = ADJUSTING - _CROWDING - {"score_fn"} | {"window", "mask"}


def modes(kernel: str) -> tuple[str, ...]:
    """Return the modes that `kernel` has in the table."""
    return DBIAS_MODES if kernel == "dbias" else MODES


def searched_rows(rows: list[tiles.Row]) -> Iterator[tuple[TileKey, AttentionTile]]:
    """Yield the rows of the file. Rows of a family's first chip are for all its chips; others count if they differ."""
    general: dict[TileKey, AttentionTile] = {}
    special: dict[TileKey, AttentionTile] = {}
    for row in rows:
        origin = f"compiled {row.date}, {row.compilers}; best predicted of {row.tried}, not timed on a device"
        shape, pipeline = (row.block_m, row.block_n), (row.bound, row.pipelined)
        tile = AttentionTile(*shape, *pipeline, row.workspace_buffers, row.vector_loop, row.cube_loop, origin)
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
        family_key = key._replace(family=NPUArch.A5 if key.family is NPUArch.A5 else NPUArch.A2, cores=0)
        if tile != general.get(family_key):
            yield key, tile


ATTENTION_TILES: dict[TileKey, AttentionTile] = dict(searched_rows(tiles.load()))


def attention_mode(problem: AttentionProblem, block_n: int) -> str:
    """Return the mode of the table for a call. `block_n`: keys in the tile of the "even" row."""
    features = problem.features
    if problem.score_fn:
        return "crowded"
    if features & _FEATURED:
        return "crowded" if features & _CROWDING else "featured"
    if problem.dropout:
        return "featured"
    if problem.bias:
        return "featured" if ALWAYS_MASK else "biased"  # "biased" tiles have no room for a mask in every tile
    if problem.causal:
        return "causal"
    return "tail" if problem.seq_lens or problem.varlen or problem.seqlen_k % block_n else "even"


# (rows, keys) for heads wider than 512. The search ranked these rows with heads of 512; wider ones would overflow L1.
_BEYOND_512 = {(NPUArch.A5, "dq", 4): (16, 32), (NPUArch.A5, "dbias", 4): (32, 64)}


def widest_head_dim(key: TileKey) -> int:
    """Return the widest head for the table's row of `key`. Wider heads of its class have a tile of `_BEYOND_512`."""
    return 512 if key[:3] in _BEYOND_512 and key.head_dim > 512 else key.head_dim


# (rows, keys) if every tile is masked, for keys whose usual tiles then overflow the unified buffer.
_ALWAYS_MASKED = {
    TileKey(NPUArch.A2, "fwd", 2, 256, "tail"): (64, 128),
    TileKey(NPUArch.A2, "fwd", 2, 256, "causal"): (64, 128),
    TileKey(NPUArch.A2, "dkdv", 2, 64, "even"): (64, 128),
}


# (rows, keys) without multibuffering, if the usual tile then overflows the unified buffer with ascendnpu-ir 1.1.0; with
# a block mask, which otherwise takes both compilers more than five minutes; and with a score function, which overflows.
_SMALLER = {TileKey(NPUArch.A2, "fwd", 2, 256, "crowded"): (32, 128)}


def attention_tile(problem: AttentionProblem, kernel: str, always_mask: bool | None = None) -> AttentionTile:
    """Return the table's tile of `kernel` ("fwd", "dq", "dkdv" or "dbias") for `problem`.

    A score function that gathers gets the conservative one: the compiler leaves a gather to one vector core, element by
    element, and its values and addresses take most of the unified buffer.
    `always_mask`: whether every tile is masked, by default ALWAYS_MASK.
    """
    if problem.score_fn and gathered_loads(problem.score_fn, bool(problem.mask)):
        return conservative_tile(problem, kernel)
    key = attention_key(problem, kernel)
    tile = ATTENTION_TILES[key]
    if problem.head_dim > widest_head_dim(key):
        tile = AttentionTile(*_BEYOND_512[key[:3]], bound=False, pipelined=0, vector_loop=1)
    chip = NPUArch.A5 if key.family is NPUArch.A5 else NPUArch.A2
    family_key, shape = key._replace(family=chip, cores=0), (tile.block_m, tile.block_n)
    if ALWAYS_MASK if always_mask is None else always_mask:
        shape = _ALWAYS_MASKED.get(family_key, shape)
    if family_key in _SMALLER and (problem.mask or problem.score_fn or not multibuffer.is_on()):
        shape = _SMALLER[family_key]
    return within_mask(replace(tile, block_m=shape[0], block_n=shape[1]), problem)


def within_mask(tile: AttentionTile, problem: AttentionProblem) -> AttentionTile:
    """Return the tile cut to a block of the problem's block mask, which a tile must divide.

    With blocks of 64 keys it is square, because ascendnpu-ir 1.1.0 leaves others to one vector core: the front half
    loads every second word of the mask as two rows of words."""
    if not problem.mask:
        return tile
    rows, keys = min(tile.block_m, problem.mask[0]), min(tile.block_n, problem.mask[1])
    if problem.mask[1] == 64:
        rows = keys = min(rows, keys)
    return replace(tile, block_m=rows, block_n=keys)


def operand_bytes(problem: AttentionProblem | KVCacheProblem) -> int:
    """Return the bytes of an element of v, and of q and k unless they are int8, which take less memory."""
    value_dtype = problem.value_dtype if isinstance(problem, AttentionProblem) else ""
    return ELEMENT_BYTES[value_dtype or problem.dtype]


def has_whole_blocks(rows: int, keys: int) -> bool:
    """Return whether a tile of int8 q and k has one descale of q, and at most one for each block of keys.

    Its keys are also a multiple of 32, of which the cube unit's library takes no fewer."""
    return BLOCK_Q % rows == 0 and (keys == 32 or keys % BLOCK_K == 0)


def attention_key(problem: AttentionProblem, kernel: str) -> TileKey:
    """Return the key of the table's row of `kernel` for `problem`."""
    spec = npu_spec(problem.arch)
    chip = NPUArch.A5 if spec is not None and spec.arch is NPUArch.A5 else NPUArch.A2
    widest = max(problem.head_dim, problem.head_dim_v)
    head_dim = next(d for d in HEAD_DIM_CLASSES if widest <= d)
    row = TileKey(chip, kernel, operand_bytes(problem), head_dim, modes(kernel)[0])
    mode = attention_mode(problem, ATTENTION_TILES[_chip_key(row, spec)].block_n)
    if kernel == "dkdv" and mode == "tail":  # each key has its own row of dk and dv; rows beyond are not stored
        mode = "even"
    return _chip_key(row._replace(mode=mode), spec)


def _chip_key(key: TileKey, spec: NPUSpec | None) -> TileKey:
    """Return the key of the chip's own row if there is one, else `key`."""
    if spec is None:
        return key
    chip_key = key._replace(family=spec.arch, cores=spec.cube_cores)
    return chip_key if chip_key in ATTENTION_TILES else key


def fwd_tile(problem: AttentionProblem) -> AttentionTile:
    """Return the forward kernel's untuned tile."""
    return untuned_tile(problem, "fwd")


def bwd_tiles(problem: AttentionProblem) -> dict[str, AttentionTile]:
    """Return the untuned tiles of the backward kernels with matrix products, by kernel."""
    kernels = ("dkdv", "dq", "dbias") if problem.bias_grad else ("dkdv", "dq")
    return {kernel: untuned_tile(problem, kernel) for kernel in kernels}


def untuned_tile(problem: AttentionProblem | KVCacheProblem, kernel: str) -> AttentionTile:
    """Return the tile that DIYFA_NPU_TILE asks for, else the table's."""
    return requested_tile(problem, kernel) or table_tile(problem, kernel)


def table_tile(problem: AttentionProblem | KVCacheProblem, kernel: str) -> AttentionTile:
    """Return the table's tile of `kernel`, or for attention over a cache that of "decode"."""
    return decode_tile(problem) if isinstance(problem, KVCacheProblem) else attention_tile(problem, kernel)


def requested_tile(problem: AttentionProblem | KVCacheProblem, kernel: str) -> AttentionTile | None:
    """Return the tile that DIYFA_NPU_TILE asks for, with the other options of the table's row, or None.

    Raises ValueError if the variable names no tile."""
    shape = requested.requested_shape(kernel)
    if shape is None:
        return None
    row, rows, keys = table_tile(problem, kernel), shape.block_m, shape.block_n
    if isinstance(problem, KVCacheProblem):
        rows, keys = _rows_and_keys(problem, rows, keys)
    elif problem.mask and (problem.mask[0] % rows or problem.mask[1] % keys):
        raise ValueError(
            f"{requested.VARIABLE} asks for the tile {rows}x{keys} of {kernel}, which does not divide the blocks of "
            f"the mask, {problem.mask[0]} queries and {problem.mask[1]} keys"
        )
    elif problem.dtype == "int8" and not has_whole_blocks(rows, keys):
        raise ValueError(
            f"{requested.VARIABLE} asks for the tile {rows}x{keys} of {kernel}: beside int8 its rows must divide "
            f"{BLOCK_Q}, and its keys must be 32 or a multiple of {BLOCK_K}, for these share a descale"
        )
    buffers = shape.workspace_buffers or row.workspace_buffers
    changes: dict[str, Any] = {"block_m": rows, "block_n": keys, "workspace_buffers": buffers}
    return replace(row, **changes, bound=False, pipelined=0, measured=f"asked for by {requested.VARIABLE}")


# Conservative tiles, by head-dim class: the side of a square tile in the modes that mask by position only, and in other
# modes. They are for compilers that refuse the table's row.
_CONSERVATIVE = {64: (64, 32), 128: (64, 32), 256: (32, 32), 576: (16, 16)}
_LIGHT_MODES = frozenset({"even", "tail", "causal"})
# Conservative tiles of the decode kernel: (rows, keys).
_CONSERVATIVE_DECODE = {64: (16, 32), 128: (16, 32), 256: (16, 32), 576: (16, 32)}


def conservative_tile(problem: AttentionProblem | KVCacheProblem, kernel: str) -> AttentionTile:
    """Return a small tile without multibuffering that every known release of the compiler accepts.

    It may not be bound, and it is not pipelined. Its number of keys divides that of every "even" row."""
    if isinstance(problem, KVCacheProblem):
        rows, keys = _rows_and_keys(problem, *_CONSERVATIVE_DECODE[_head_dim_class(problem)])
    else:
        key = attention_key(problem, kernel)
        rows = keys = _CONSERVATIVE[key.head_dim][key.mode not in _LIGHT_MODES]
        if family(problem.arch) is NPUArch.A5 and key.width == 2:  # the 950's compiler crashes on 16x16
            rows = max(rows, 32)
            keys = keys if kernel == "dkdv" else rows  # the accumulators of 32 keys do not fit
        if problem.dtype == "int8":
            keys = max(keys, 32)
    return AttentionTile(
        rows, keys, bound=False, pipelined=0, workspace_buffers=2, multibuffer=False,
        measured="conservative, by rule: compiles with every known compiler; not timed on a device",
    )  # fmt: skip


# Tiles of the decode kernel, by operand bytes and head-dim class: (rows, keys) for whole pages, and for gathered keys.
# Each is the largest of a few that compile with all features. Gathered keys need more of the unified buffer, because
# ascendnpu-ir 1.2.0 does not share a gather between the vector cores.
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
DECODE_TASKS = 4  # wanted tasks per program
DECODE_SPLIT_BLOCKS = 4  # fewest blocks of keys in a split, unless num_splits asks for more splits
DECODE_MAX_SPLITS = 64


def decode_tile(problem: KVCacheProblem) -> AttentionTile:
    """Return the decode kernel's tile: no more rows than exist, and blocks of keys inside one page if possible.

    In batch-invariant mode it depends on dtype and head dims alone, so it is the tile for gathered keys.
    """
    whole, gathered = DECODE_SHAPES[ELEMENT_BYTES[problem.dtype], _head_dim_class(problem)]
    shape = gathered if problem.batch_invariant or problem.page_size % _min_keys(problem) else whole
    return AttentionTile(*_rows_and_keys(problem, *shape))


def _rows_and_keys(problem: KVCacheProblem, rows: int, keys: int) -> tuple[int, int]:
    """Adapt a tile's rows and keys to a call. Rows are rounded down to a power of two.

    Outside batch-invariant mode, rows are at most those that exist (at least 16), and keys divide the page size if
    pages are large enough."""
    rows = _power_of_2(rows + 1) // 2
    if problem.batch_invariant:
        return rows, keys
    if problem.paged and problem.page_size % _min_keys(problem) == 0:
        keys = math.gcd(keys, problem.page_size)
    n_rows = _power_of_2(problem.heads_q // problem.heads_kv) * _power_of_2(problem.seqlen_q)
    return min(rows, max(16, n_rows)), keys


def _min_keys(problem: KVCacheProblem) -> int:
    """Return the fewest keys in a block: the 950's compiler crashes on fewer than 32, the cube core takes 16."""
    return 32 if family(problem.arch) is NPUArch.A5 else 16


def _head_dim_class(problem: KVCacheProblem) -> int:
    widest = max(problem.head_dim, problem.head_dim_v)
    return next(d for d in HEAD_DIM_CLASSES if widest <= d)


def _power_of_2(n: int) -> int:
    """Return the least power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def pages_form(problem: KVCacheProblem, tile: AttentionTile) -> str:
    """Return how the decode kernel loads keys: "" without pages, "gathered" or "whole" (see `decode.load_keys`)."""
    if not problem.paged:
        return ""
    return "gathered" if problem.page_size % tile.block_n else "whole"


def candidates(problem: AttentionProblem | KVCacheProblem, kernel: str = "fwd") -> list[AttentionTile]:
    """Return the tiles worth timing on a device: the table's and its halves, each with 4 and 2 workspace buffers.

    The conservative tile is last, and with multibuffering last but one. It compiles even if none of the others does.
    """
    row = table_tile(problem, kernel)
    shapes = [(row.block_m, row.block_n), (row.block_m // 2, row.block_n), (row.block_m, row.block_n // 2)]
    tiles = [
        tile
        for block_m, block_n in shapes
        if block_m >= 16 and block_n >= (_min_keys(problem) if isinstance(problem, KVCacheProblem) else 16)
        for buffers in (4, 2)
        if fits(tile := replace(row, block_m=block_m, block_n=block_n, workspace_buffers=buffers), problem, kernel)
    ]
    conservative = conservative_tile(problem, kernel)
    return [*tiles, replace(conservative, multibuffer=True), conservative]


def fits(tile: AttentionTile, problem: AttentionProblem | KVCacheProblem, kernel: str = "fwd") -> bool:
    """Return whether one copy of each operand tile fits L1, and the accumulators of the loop fit L0C.

    This is necessary, not sufficient: the compiler needs memory for more, and the compile gate tries every row.
    """
    spec = npu_spec(problem.arch)
    if spec is None or (problem.dtype == "int8" and not has_whole_blocks(tile.block_m, tile.block_n)):
        return False
    width, d, dv = operand_bytes(problem), problem.head_dim, problem.head_dim_v
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
    """Return the most columns of a product: a slice of at least 16 rows must fit half of L0B (see l0.py).

    Wider heads need two products for dq and dk (see `compat.split_columns`)."""
    return max(d for d in range(16, HEAD_DIM_CLASSES[-1] + 1, 16) if l0.longest_slice(16, d, ELEMENT_BYTES[dtype]))


def always_mask_refusal(problem: AttentionProblem | KVCacheProblem) -> str | None:
    """Return why DIYFA_NPU_ALWAYS_MASK=1 does not work for `problem`, or None.

    The 950's table was chosen without it. Masks in every tile would make most of its forward tiles overflow the unified
    buffer (a causal one of D = 64 needs 354 KiB of 248)."""
    if ALWAYS_MASK and family(problem.arch) is NPUArch.A5:
        return "DIYFA_NPU_ALWAYS_MASK=1 is for the 910B and 910_93: the 950's tiles have no room for it, so unset it"
    return None


def preprocess_rows(problem: AttentionProblem) -> int:
    """Return the rows of out and dout that a vector program holds at once."""
    return PREPROCESS_ROWS if problem.head_dim_v <= 256 else PREPROCESS_ROWS // 2


def softcap_form(problem: AttentionProblem | KVCacheProblem) -> str:
    """Return how kernels cap scores: "" (not at all), or a form of `primitives.capped_scores`."""
    if not problem.softcap:
        return ""
    return "precise" if problem.dtype == "float32" else "plain"


def alibi_form(problem: AttentionProblem) -> str:
    """Return how kernels subtract ALiBi's distances: "" (not at all), or a form of `primitives.add_alibi`."""
    if not problem.alibi:
        return ""
    return "by_axis" if problem.causal and problem.dtype != "float32" else "by_pair"


def attention_scalars(
    problem: AttentionProblem | KVCacheProblem, sm_scale: float, dropout_p: float
) -> dict[str, float]:
    """Return the floats that every attention kernel takes, by name.

    `softcap_minus` is -2 softcap, `softcap_inverse` 1 / softcap, `softcap_rate` 2 sm_scale / softcap. `keep_threshold`
    is that of `dropout.keep_tile`, `keep_prob` 1 - p, `keep_scale` 1 / (1 - p). After their loops kernels multiply dq
    and dk by `grad_scale`: sm_scale / (1 - p), negative with softcap. The host computes these, because scalar
    arithmetic inside a kernel breaks its pipeline.
    """
    scale, cap, keep = float(sm_scale), float(problem.softcap), 1.0 - dropout_p
    inverse = 1.0 / cap if cap else 0.0
    return {
        "sm_scale": scale, "softcap": cap, "softcap_minus": -2.0 * cap, "softcap_inverse": inverse,
        "softcap_rate": 2.0 * scale * inverse, "keep_threshold": float(drop_threshold(dropout_p)), "keep_prob": keep,
        "keep_scale": 1.0 / keep, "grad_scale": (-scale if cap else scale) / keep,
    }  # fmt: skip


def attention_sizes(problem: AttentionProblem) -> dict[str, int]:
    """Return the integers that every attention kernel takes, by name."""
    names = "batch heads_q heads_kv seqlen_q seqlen_k total_q total_k window_left window_right"
    return {name: getattr(problem, name) for name in names.split()}


MATMUL_TILES: dict[int, MatmulTile] = {2: MatmulTile(128, 256, 256), 4: MatmulTile(128, 128, 128)}
GELU_TILES: dict[int, MatmulTile] = {2: MatmulTile(128, 128, 256), 4: MatmulTile(128, 128, 128)}  # erf takes UB


def matmul_tile(problem: MatmulProblem) -> MatmulTile:
    """Return the caller's tile, or the table's for the wider of input and compute dtype."""
    if problem.block is not None:
        return MatmulTile(*problem.block, measured="asked for by the caller")
    tiles = GELU_TILES if problem.activation == "gelu" else MATMUL_TILES
    return tiles[max(ELEMENT_BYTES[problem.dtype], ELEMENT_BYTES[problem.compute_dtype])]


def matmul_fits(tile: MatmulTile, problem: MatmulProblem) -> bool:
    """Return whether the accumulator fits L0C, one stage of both operand tiles L1, and slices of them L0A and L0B."""
    spec = npu_spec(problem.arch)
    width = max(ELEMENT_BYTES[problem.dtype], ELEMENT_BYTES[problem.compute_dtype])
    operands = (tile.block_m + tile.block_n) * tile.block_k * width
    streamed = l0.longest_slice(tile.block_m, tile.block_n, width) > 0
    return spec is not None and streamed and tile.block_m * tile.block_n * 4 <= spec.l0c and operands <= spec.l1
