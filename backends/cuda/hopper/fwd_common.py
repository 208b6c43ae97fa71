"""Constants, shared memory and arguments of the Hopper forward, which its producer and its consumers share."""

# Aggregates are checked against their annotations, so these must not be postponed.
from dataclasses import dataclass

from triton import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from diyfa.backends.cuda.gluon.compat import aggregate
from diyfa.backends.cuda.gluon.ring import KVRing
from diyfa.backends.cuda.gluon.scheduler import TileScheduler
from diyfa.backends.cuda.gluon.tile_info import TileInfos
from diyfa.backends.cuda.hopper.chunks import Totals
from diyfa.backends.cuda.hopper.float8 import Factors
from diyfa.backends.cuda.hopper.mma import Queries
from diyfa.backends.cuda.hopper.overflow import OverflowFlags
from diyfa.backends.cuda.hopper.score_functions import ScoreFunction
from diyfa.backends.cuda.hopper.softmax import Score
from diyfa.backends.cuda.runtime.constants import Constants
from diyfa.score_code import JitSource


@dataclass(frozen=True, eq=False)
class Sm90Constants(Constants):
    """The kernel's compile-time constants: features, tile and schedule. `Sm90Config` explains most of them."""

    block_m: int
    block_n: int
    consumers: int
    stages: int
    separate_o_buffer: bool
    store_from_registers: bool
    pingpong: bool
    q_in_registers: int
    boxes: int  # TMA boxes side by side in a tile of Q or K
    boxes_v: int  # those of V and out
    pairs: bool
    one_ring: bool  # K and V have equal tiles, so any stage of the ring may hold either
    causal: bool
    has_left: bool
    has_right: bool
    check_keys: bool  # see `Problem`
    lengths: int  # of queries: EQUAL, SEQ_LENS or PACKED (`tile_io.py`)
    lengths_k: int  # of keys: the same, or CACHED
    page_size: int  # 0: no pages
    mask_q: int  # queries in a block of the block mask; 0: no block mask
    mask_k: int  # keys in a block of it
    softcap: bool
    alibi: bool
    sinks: bool
    score_fn: JitSource | None
    negate: bool
    fixed_max: bool  # the maximum of the edge blocks is used for all others (`fixed_max_step`, `overflow.py`)
    tile_infos: int  # slots for tile infos
    schedule: str  # "static" or "dynamic"
    find_ahead: bool  # the producer finds the next tile before it copies a tile's last block
    consumer_registers: int
    producer_registers: int
    chunk: int = 0  # key blocks in a chunk in batch-invariant mode (`chunks.py`); 0: outside of that mode
    shared_totals: bool = False  # the totals of chunks lie in shared memory; else in global memory
    out_in_totals: bool = False  # out leaves through the totals' memory; implies SEPARATE_O_BUFFER and SHARED_TOTALS
    fallback: bool = False  # compute only the flagged tiles (`overflow.py`)
    # For float8 and int8 (`float8.py`). Kinds of descales are those of `diyfa.eight_bits`: PER_TENSOR, PER_HEAD,
    # PER_BLOCK.
    bits: int = 16  # of an element of q and k
    bits_v: int = 16  # of an element of v and of the weights
    head_dim: int = 0
    head_dim_v: int = 0
    q_descale: int = 0  # kind of descale; 0: none
    k_descale: int = 0
    v_descale: int = 0
    k_mean: bool = False
    v_mean: bool = False
    weight_shift: int = 0  # the largest weight is 2**weight_shift


@constexpr_function
def for_fallback(config):
    """Return the constants of the fallback: `config` with a running maximum."""
    return type(config)(**vars(config) | {"fixed_max": False, "fallback": True})


@aggregate
class Shared:
    """Constants, shared memory and barriers that the producer and the consumers use."""

    config: gl.constexpr  # `Sm90Constants`
    queries: Queries
    ring: KVRing
    tile_infos: TileInfos
    flags: OverflowFlags
    ones: gl.shared_memory_descriptor  # see `start_values`
    totals: Totals


@aggregate
class Inputs:
    """Tensors that the producer reads, and the scheduler that it asks for tiles. `steps_*`: `descriptor_steps`."""

    q_tensor: tma.tensor_descriptor
    k_tensor: tma.tensor_descriptor
    v_tensor: tma.tensor_descriptor
    group_size: gl.tensor  # query heads per KV head
    steps_qb: gl.tensor
    steps_qm: gl.tensor
    steps_kb: gl.tensor
    steps_kn: gl.tensor
    steps_vb: gl.tensor
    steps_vn: gl.tensor
    scheduler: TileScheduler


@aggregate
class Outputs:
    """Tensors that consumers write, and inputs that only they read. An unused pointer is None."""

    o_tensor: tma.tensor_descriptor
    lse_ptr: gl.tensor
    o_ptr: gl.tensor | gl.constexpr
    slopes_ptr: gl.tensor | gl.constexpr
    stride_slopeb: gl.tensor
    sinks_ptr: gl.tensor | gl.constexpr
    factors: Factors
    o_buffers: gl.shared_memory_descriptor
    score: Score
    function: ScoreFunction | gl.constexpr  # the user's, or None
    SINKS: gl.constexpr
