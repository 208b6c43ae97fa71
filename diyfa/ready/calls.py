"""The calls that a pack of compiled kernels serves: a table of problems, turned into calls of the public functions.

A call gets tensors without memory while its launches are recorded (`diyfa.ready.recording`). It goes through all of
diyfa's decisions, so no list says which kernels it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import count, product
from typing import Any, NamedTuple

import torch

from diyfa import masks
from diyfa.attention import checked_options, flash_attention_v2, flash_attention_varlen
from diyfa.block_lists import WORD, list_length, n_blocks
from diyfa.features import TENSORS
from diyfa.kvcache import flash_attn_with_kvcache
from diyfa.matmul import triton_matmul
from diyfa.ops import differentiate, forward
from diyfa.options import NO_LENGTHS
from diyfa.registry import batch_invariant, optional_member, resolve_backend

BF16, FP16, FP32, FLOAT8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
HALVES = (BF16, FP16)
# Names of the optional tensors that have a float32 number for each head -> whether they have a gradient.
PER_HEAD = {x.name: bool(x.gradient) for x in TENSORS if x.shape is not None and ("H",) in x.shape.shapes}


class Call(NamedTuple):
    """One call of a public function, and its name in messages."""

    name: str
    run: Callable[[], object]


_tensor_numbers = count(1)


def empty(*shape: int, dtype: torch.dtype = torch.int32, grad: bool = False) -> torch.Tensor:
    """Return a tensor without memory, at an address of its own: diyfa tells caches apart by their addresses.

    An address is an offset into storage that does not exist. Each tensor begins at a multiple of 2^36 elements.
    """
    begin, elements = next(_tensor_numbers) << 36, math.prod(shape)
    if elements >= 1 << 48:
        raise ValueError(f"a tensor of shape {shape} is too large")
    flat = torch.empty(begin + elements, dtype=dtype, device="meta")
    return flat[begin:].view(shape).requires_grad_(grad)


class Heads(NamedTuple):
    """Numbers of heads and head dims of a model."""

    head_dim: int
    head_dim_v: int = 0  # 0: head_dim
    queries: int = 16
    keys: int = 16

    @property
    def value_head_dim(self) -> int:
        return self.head_dim_v or self.head_dim

    def __str__(self) -> str:
        dims = f"{self.head_dim}/{self.head_dim_v}" if self.head_dim_v else f"{self.head_dim}"
        return f"D={dims} H={self.queries}/{self.keys}"


class Rows(NamedTuple):
    """Number of samples, and of queries and keys of each."""

    batch: int
    queries: int
    keys: int

    def __str__(self) -> str:
        return f"B={self.batch} Sq={self.queries} Sk={self.keys}"


def _name(*words: object, **options: Any) -> str:
    """Return the description from which `words.py` makes the same call. Words that are "" are left out."""
    for name, value in options.items():
        shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value).removeprefix("torch.")
        words = (*words, name if value is True else f"{name}={shown}")
    return " ".join(str(word).removeprefix("torch.") for word in words if word != "")


# ---- Kinds of calls -----------------------------------------------------------------------------------------------


def attention(
    heads: Heads, rows: Rows, dtype: torch.dtype, packed: bool = False, backward: bool = True, **options: Any
) -> Call:
    """Return a call of attention, with its backward pass if `backward`.

    `options` are those of `flash_attention`. True stands for a tensor, the letters of its dimensions (as in "1hqk") for
    a bias, and the queries and keys of a block for a block mask. `out_dtype`: the call is a step of a ring, whose
    output is merged with others. `packed`: sequences have `rows.queries` rows on average and at most `longest`."""

    def run() -> None:
        (b, m, n), (d, _, h, hk), dv = rows, heads, heads.value_head_dim
        leading = [(b * m,), (b * n,), (b * n,)] if packed else [(b, m), (b, n), (b, n)]
        q, k, v = (
            empty(*x, *per_head, dtype=dtype, grad=backward)
            for x, per_head in zip(leading, ((h, d), (hk, d), (hk, dv)), strict=True)
        )
        arguments = dict(options)
        for name, has_gradient in PER_HEAD.items():
            if arguments.get(name):
                arguments[name] = empty(h, dtype=FP32, grad=backward and has_gradient)
        if arguments.get("seq_lens"):
            arguments["seq_lens"] = empty(b)
        if block := arguments.get("mask"):
            nq, nk = n_blocks(m, n, block)
            bits = empty(nq * nk, block[0], block[1] // WORD)
            arguments["mask"] = masks.BlockMask((1, 1, m, n), empty(1, 1, list_length(nq, nk)), bits)
        bias_grad = arguments.pop("bias_grad", False)
        if letters := arguments.get("attn_bias"):
            sizes = {"b": b, "h": h, "q": m, "k": n, "1": 1}
            arguments["attn_bias"] = empty(*[sizes[letter] for letter in letters], dtype=dtype, grad=bias_grad)
        if packed:
            offsets = empty(b + 1)
            longest = arguments.pop("longest", 0)
            out: Any = flash_attention_varlen(q, k, v, offsets, offsets, longest or m, longest or n, **arguments)
        elif "out_dtype" in arguments:
            partial_dtype = arguments.pop("out_dtype")
            checked = checked_options(q, k, v, NO_LENGTHS, {"layout": "bshd", **arguments})
            checked = checked._replace(out_dtype=partial_dtype)
            q, k, v = q.detach(), k.detach(), v.detach()
            out, lse = forward(q, k, v, NO_LENGTHS, checked)
            if backward:  # the backward pass gets the merged output, which has the dtype of q
                out = out.to(dtype)
                differentiate((torch.empty_like(out), None), (q, k, v), (out, lse), NO_LENGTHS, checked)
            return
        else:
            out = flash_attention_v2(q, k, v, **arguments)
        if backward:
            out.backward(torch.empty_like(out))

    name = _name("attention", dtype, heads, rows, "packed" * packed, "forward" * (not backward), **options)
    return Call(name, run)


def cache(heads: Heads, rows: Rows, dtype: torch.dtype, page: int = 0, packed: bool = False, **options: Any) -> Call:
    """Return a call of attention over a cache of `rows.keys` keys.

    Options besides those of `flash_attn_with_kvcache`:

    * `new`: number of new keys; `rotary`: number of rotary features;
    * `latent`: the values are the first features of the keys; `float8`: the cache is float8;
    * `packed`: the queries are packed, `rows.queries` for each sequence on average and at most `longest`. Without pages
      the keys are packed, too, as Transformers packs padded batches: with `cu_seqlens_k` and without `seqused_k`, which
      selects other kernels.
    """

    def run() -> None:
        (b, m, n), (d, _, h, hk), dv = rows, heads, heads.value_head_dim
        arguments = dict(options)
        new, longest = arguments.pop("new", 0), arguments.pop("longest", m)
        stored = FLOAT8 if arguments.pop("float8", False) else dtype
        shape = (b * n // page, page) if page else (b * n,) if packed else (b, n)
        k = empty(*shape, hk, d, dtype=stored)
        v = k[..., :dv] if arguments.pop("latent", False) else empty(*shape, hk, dv, dtype=stored)
        table = empty(b, n // page) if page else None
        for name in PER_HEAD:
            if arguments.get(name):
                arguments[name] = empty(h, dtype=FP32)
        if stored is FLOAT8:
            arguments |= {"k_descale": empty(b, hk, dtype=FP32), "v_descale": empty(b, hk, dtype=FP32)}
        if packed:
            q, offsets = empty(b * m, h, d, dtype=dtype), empty(b + 1)
            arguments["window"] = arguments.pop("window_size", (-1, -1))
            if page:
                arguments |= {"block_table": table, "seqused_k": empty(b)}
            flash_attention_varlen(q, k, v, offsets, None if page else offsets, longest, n, **arguments)
            return
        if new:
            arguments |= {"k": empty(b, new, hk, d, dtype=dtype), "v": empty(b, new, hk, dv, dtype=dtype)}
        if rotated := arguments.pop("rotary", 0):
            arguments |= {f"rotary_{name}": empty(n, rotated // 2, dtype=dtype) for name in ("cos", "sin")}
        q = empty(b, m, h, d, dtype=dtype)
        flash_attn_with_kvcache(q, k, v, cache_seqlens=empty(b), block_table=table, **arguments)

    words = f"page={page}" if page else "", "packed" * packed
    return Call(_name("cache", dtype, heads, rows, *words, **options), run)


def in_batch_invariant_mode(call: Call) -> Call:
    """Return the call inside `batch_invariant()`."""

    def run() -> None:
        with batch_invariant():
            call.run()

    return Call(f"batch-invariant {call.name}", run)


def matrix_product(m: int, n: int, k: int, dtype: torch.dtype, transposed: bool = False, **options: Any) -> Call:
    """Return a call of the matrix product. `transposed`: b is a transposed view."""

    def run() -> None:
        b = empty(n, k, dtype=dtype).t() if transposed else empty(k, n, dtype=dtype)
        triton_matmul(empty(m, k, dtype=dtype), b, **options)

    return Call(_name("product", dtype, f"{m}x{n}x{k}", "transposed" * transposed, **options), run)


def merging(head_dim: int, rows: int = 4096) -> Call:
    """Return a call that merges two partial outputs, as ring attention does."""

    def run() -> None:
        out, partial_out = (empty(2, 16, rows, head_dim, dtype=FP32) for _ in range(2))
        lse, partial_lse = (empty(2, 16, rows, dtype=FP32) for _ in range(2))
        resolve_backend(out.device).merge(out, lse, partial_out, partial_lse)  # type: ignore[attr-defined]

    return Call(f"merge D={head_dim}", run)


# Mask functions of `diyfa.masks` by name, for n tokens. A window or a prefix of another length has the same kernels.
MASKS: dict[str, Callable[[int], tuple[masks.MaskFunction, ...]]] = {
    "causal": lambda n: (masks.causal,),
    "sliding_window": lambda n: (masks.sliding_window(n // 4),),
    "prefix_lm": lambda n: (masks.prefix_lm(n // 4),),
    "document": lambda n: tuple(
        masks.document(torch.zeros(n, dtype=dtype, device="cpu")) for dtype in (torch.int64, torch.int32)
    ),
}


def masking(name: str, length: int) -> Call:
    """Return a call that makes the block masks `MASKS[name]` of `length` queries and keys, in blocks of 128.

    It does nothing if PyTorch's operators make masks: there is nothing to compile.
    """

    def run() -> None:
        device = torch.device("cpu")  # operators make masks on meta tensors
        if optional_member(device, "build_mask") is not None:
            for mask in MASKS[name](length):
                masks.block_mask(mask, 1, 1, length, length, device=device)

    return Call(_name("mask", name, f"S={length}"), run)


# ---- The table ----------------------------------------------------------------------------------------------------

# Heads by their head dim. D72 and D80 are those of models of images.
D64, D96, D128, MLA, D256 = Heads(64), Heads(96), Heads(128), Heads(192, 128), Heads(256)
D72, D80 = Heads(72), Heads(80)
USUAL = (D64, D128)


def grouped(heads: Heads, queries: int = 32, keys: int = 8) -> Heads:
    return heads._replace(queries=queries, keys=keys)


# Sizes for which the tables of tiles have different rows.
SHORT = Rows(64, 64, 64)  # a sequence is one tile
TINY = Rows(1, 96, 96)  # too small for descriptors to pay off
SMALL = Rows(1, 256, 256)  # likewise, with a longer sequence
MANY = Rows(16, 256, 256)
FEW_TILES = Rows(1, 1024, 1024)  # fewer tiles than multiprocessors
SINGLE = Rows(1, 4096, 4096)
MEDIUM = Rows(4, 2048, 2048)
LARGE = Rows(8, 4096, 4096)
# Keys that end inside a block: long sequences, sentences, windows of images.
RAGGED, SENTENCES, WINDOWS = Rows(3, 1000, 1003), Rows(2, 77, 77), Rows(256, 49, 49)
# Packed batches: many sequences of up to 48 tokens, or one of 350 or 700.
BRIEF = (Rows(64, 16, 16), Rows(32, 32, 32), Rows(16, 48, 48), Rows(1, 350, 350), Rows(1, 700, 700))
TRAINED = (TINY, SMALL, MANY, FEW_TILES, SINGLE, MEDIUM, LARGE)
# Options of `flash_attention`, True for a tensor: no mask, causal, a causal window; then those of some models.
FULL = dict[str, Any]()
CAUSAL: dict[str, Any] = {"causal": True}
SLIDING = {"causal": True, "window": (1023, 0)}
GEMMA2, GEMMA2_SLIDING = CAUSAL | {"softcap": 50.0}, SLIDING | {"softcap": 50.0}
SINKS, SINKS_SLIDING = CAUSAL | {"sinks": True}, CAUSAL | {"sinks": True, "window": (127, 0)}  # GPT-OSS


# Sizes of products for which the tables have different tiles: few rows and a wide, middle or narrow result; a few more
# rows; a small one, a middle and a large one; a short sum, and a narrow result of many rows.
PRODUCTS = (
    (16, 8192, 8192), (16, 4096, 4096), (16, 1024, 8192), (32, 8192, 8192), (32, 4096, 4096), (32, 1024, 8192),
    (64, 4096, 4096), (512, 512, 512), (512, 4096, 4096), (4096, 4096, 4096), (4096, 4096, 128), (16384, 128, 4096),
)  # fmt: skip
ALIBI, DROPOUT = CAUSAL | {"alibi_slopes": True}, {"dropout_p": 0.1}
BOTH = (False, True)


class Row(NamedTuple):
    """Calls of attention with a backward pass: one for each combination of an entry of each field."""

    options: tuple[dict[str, Any], ...]
    heads: tuple[Heads, ...]
    rows: tuple[Rows, ...]
    packed: tuple[bool, ...] = (False,)
    dtypes: tuple[torch.dtype, ...] = HALVES

    def calls(self) -> Iterator[Call]:
        for dtype, options, heads, rows, packed in product(self.dtypes, *self[:4]):
            yield attention(heads, rows, dtype, packed, **options)


TRAINING = (
    Row((FULL, CAUSAL), USUAL, TRAINED, BOTH),
    Row((FULL, CAUSAL), (D96, MLA, D256), TRAINED, BOTH, (BF16,)),
    Row((FULL, CAUSAL), (D96, D256), TRAINED, dtypes=(FP16,)),
    Row((FULL,), (D72, D80), TRAINED, BOTH, (BF16,)),  # images
    Row((FULL,), (D72, D80), TRAINED, dtypes=(FP16,)),
    Row((FULL, CAUSAL), tuple(map(grouped, USUAL)), (SMALL, MANY, FEW_TILES, SINGLE), BOTH),
    Row((CAUSAL,), (grouped(D256, 8, 4),), (SMALL, MANY, FEW_TILES, SINGLE), BOTH, (BF16,)),
    Row((FULL,), (D64, D96, D128, D256), (RAGGED, Rows(1, 250, 250))),
    Row((FULL, CAUSAL), USUAL, (SHORT,), BOTH),
    Row((FULL, CAUSAL), (*USUAL, *map(grouped, USUAL)), BRIEF, (True,)),
    Row(({"longest": 48}, CAUSAL | {"longest": 48}), (*USUAL, *map(grouped, USUAL)), (Rows(48, 16, 16),), (True,)),
    Row(({"longest": 742}, CAUSAL | {"longest": 742}), (*USUAL, *map(grouped, USUAL)), (Rows(12, 145, 145),), (True,)),
    Row((SLIDING,), (*map(grouped, USUAL), grouped(D256, 8, 4), D96), TRAINED, BOTH, (BF16,)),
    Row((SLIDING,), (grouped(D128),), TRAINED, BOTH, (FP16,)),
    Row((GEMMA2, GEMMA2_SLIDING), (grouped(D128), grouped(D256, 8, 4)), TRAINED, BOTH, (BF16,)),
    Row((SINKS, SINKS_SLIDING), (grouped(D64, 64, 8), grouped(D128)), TRAINED, BOTH, (BF16,)),
    Row(({"window": (64, 64)},), USUAL, TRAINED, BOTH, (BF16,)),
    Row((ALIBI,), USUAL, TRAINED, BOTH, (BF16,)),
    Row((DROPOUT, CAUSAL | DROPOUT), USUAL, (SHORT, *TRAINED), BOTH),
    Row(({"attn_bias": "1hqk"}, {"attn_bias": "1hqk", "bias_grad": True}), USUAL, (SHORT, *TRAINED)),
    Row(({"attn_bias": "b11k"}, {"attn_bias": "b1qk"}), USUAL, (TINY, SENTENCES, MEDIUM, RAGGED), dtypes=(BF16,)),
    Row(({"attn_bias": "1hqk", "bias_grad": True},), (Heads(32), D64), (WINDOWS,)),
    Row(({"seq_lens": True}, CAUSAL | {"seq_lens": True}), USUAL, TRAINED, dtypes=(BF16,)),
    Row(({"deterministic": True}, CAUSAL | {"deterministic": True}), (*USUAL, grouped(D128)), TRAINED, BOTH, (BF16,)),
    Row(({"out_dtype": "float32"}, CAUSAL | {"out_dtype": "float32"}), USUAL, (MEDIUM,), dtypes=(BF16,)),  # rings
    Row((FULL, CAUSAL), USUAL, (SMALL, MEDIUM), dtypes=(FP32,)),
    Row(
        ({"mask": (128, 128)}, {"mask": (64, 64)}), (*USUAL, *map(grouped, USUAL)), (FEW_TILES, SINGLE, LARGE),
        dtypes=(BF16,),
    ),
)  # fmt: skip


def training() -> Iterator[Call]:
    for row in TRAINING:
        yield from row.calls()
    # Few queries with many keys, without a backward pass.
    for dtype, heads, rows in product(HALVES, (*USUAL, grouped(D128)), (Rows(1, 16, 8192), Rows(4, 1, 4096))):
        yield attention(heads, rows, dtype, backward=False, causal=True)


# Heads of language models that are served.
LLAMA, LLAMA_D64 = grouped(D128), grouped(D64)
MHA, MHA_D64 = grouped(D128, 32, 32), grouped(D64, 32, 32)  # as many KV heads as query heads
PHI, GEMMA, OSS = grouped(D96, 32, 32), grouped(D256, 8, 4), grouped(D64, 64, 8)  # OSS: gpt-oss
DEEPSEEK = Heads(576, 512, 128, 1)  # one latent KV head
# Queries over a cache: one token (DECODING), several tokens (SEVERAL), prompts or chunks of prompts (CHUNKS).
DECODING = (Rows(1, 1, 8192), Rows(16, 1, 8192), Rows(64, 1, 8192), Rows(256, 1, 4096))
SEVERAL = (Rows(1, 8, 8192), Rows(16, 8, 8192), Rows(64, 8, 8192), Rows(256, 8, 4096), Rows(16, 32, 8192))
CHUNKS = (Rows(1, 128, 8192), Rows(16, 64, 1024), Rows(16, 128, 1024), Rows(4, 2048, 8192))
SERVED = (*DECODING, *CHUNKS)
# Several tokens, as speculative decoding has them (SPECULATIVE); short caches (FEW_KEYS).
SPECULATIVE = (
    Rows(1, 2, 1024), Rows(4, 2, 8192), Rows(64, 2, 8192), Rows(200, 2, 8192), Rows(16, 4, 8192), Rows(64, 4, 8192),
    Rows(200, 4, 8192), Rows(32, 16, 8192), Rows(64, 16, 8192), Rows(256, 16, 4096),
)  # fmt: skip
FEW_KEYS = (Rows(4, 1, 1024), Rows(24, 1, 1024), Rows(100, 1, 1024), Rows(200, 1, 2048))
# SLIDING, under the names of `flash_attn_with_kvcache`.
CACHE_SLIDING = {"window_size": (1023, 0), "causal": True}


class CacheRow(NamedTuple):
    """Calls over a cache: one for each combination of an entry of each field."""

    options: tuple[dict[str, Any], ...]
    heads: tuple[Heads, ...]
    rows: tuple[Rows, ...] = SERVED
    pages: tuple[int, ...] = (0, 16, 256)
    packed: tuple[bool, ...] = (False,)
    dtypes: tuple[torch.dtype, ...] = (BF16,)

    def calls(self) -> Iterator[Call]:
        for dtype, options, heads, rows, page, packed in product(self.dtypes, *self[:5]):
            yield cache(heads, rows, dtype, page, packed=packed, **options)


# Batches in which some sequences have one token and others many: options, and rows (the average).
MIXED, BATCHED = CAUSAL | {"longest": 512}, (Rows(1, 32, 8192), *DECODING[1:2], Rows(32, 1, 8192), DECODING[3])
SERVING = (
    CacheRow((CAUSAL,), (LLAMA, LLAMA_D64), pages=(0, 16, 64, 256), dtypes=HALVES),
    CacheRow((CAUSAL,), (LLAMA, LLAMA_D64, grouped(D128, 64), OSS), (*SEVERAL, *SPECULATIVE), (0, 16, 64, 256), BOTH),
    CacheRow((CAUSAL,), (grouped(D128, 8, 1), grouped(D64, 8, 1)), (*SEVERAL, *SPECULATIVE), (16,)),
    CacheRow((CAUSAL,), (MHA, MHA_D64), (*FEW_KEYS, *CHUNKS, *SEVERAL, *SPECULATIVE), (0, 16, 64, 256), BOTH),
    CacheRow((FULL,), (LLAMA, LLAMA_D64, MHA), DECODING, (0, 256)),  # the default of `flash_attn_with_kvcache`
    CacheRow((CAUSAL,), (LLAMA,), (*SERVED, SEVERAL[1]), (16, 64, 256), (True,), HALVES),
    CacheRow((MIXED,), (LLAMA,), BATCHED, (16, 64, 256), (True,)),
    CacheRow((CAUSAL,), (LLAMA_D64,), pages=(16, 64, 256), packed=(True,)),
    CacheRow((MIXED,), (LLAMA_D64,), BATCHED, (16,), (True,)),
    CacheRow(
        (CAUSAL,), (LLAMA._replace(keys=4), LLAMA_D64._replace(keys=4)), (Rows(40, 1, 8192),), (16,), BOTH, HALVES
    ),
    CacheRow((CAUSAL,), (MHA, PHI, GEMMA)),
    CacheRow((CACHE_SLIDING,), (LLAMA,), pages=(0, 16), packed=BOTH),
    CacheRow((GEMMA2, CACHE_SLIDING | {"softcap": 50.0}), (GEMMA,), pages=(0, 16), packed=BOTH),
    CacheRow((SINKS, SINKS | {"window_size": (127, 0)}), (OSS,), pages=(0, 16), packed=BOTH),
    CacheRow((MIXED | GEMMA2, MIXED | CACHE_SLIDING | {"softcap": 50.0}), (GEMMA,), BATCHED, (16,), (True,)),
    CacheRow((MIXED | SINKS, MIXED | SINKS | {"window_size": (127, 0)}), (OSS,), BATCHED, (16,), (True,)),
    CacheRow((ALIBI,), (MHA,), pages=(0, 16)),
    CacheRow((CAUSAL | {"float8": True},), (LLAMA, LLAMA_D64), (*DECODING, SEVERAL[1]), (0, 16, 64)),
    CacheRow(
        (CAUSAL | {"latent": True},), (DEEPSEEK, DEEPSEEK._replace(queries=16)), (*DECODING, Rows(16, 2, 8192)), (0, 64)
    ),
    CacheRow((CAUSAL | {"new": 1, "rotary": 128},), (LLAMA,), DECODING[:2], (0, 16, 256), dtypes=HALVES),
    CacheRow(
        (CAUSAL | {"new": 1, "rotary": 128, "rotary_interleaved": False}, CAUSAL | {"new": 1}),
        (LLAMA,), DECODING[1:2], (0, 16, 256), dtypes=HALVES,
    ),
)  # fmt: skip
# Rows of calls in batch-invariant mode: decoding, a chunk of a prompt, many queries.
BATCH_INVARIANT = (Rows(16, 1, 8192), Rows(1, 512, 8192), Rows(4, 2048, 2048))


def serving() -> Iterator[Call]:
    for row in SERVING:
        yield from row.calls()
    for rows, page in product(BATCH_INVARIANT, (0, 16)):
        yield in_batch_invariant_mode(cache(LLAMA, rows, BF16, page, causal=True))
    yield in_batch_invariant_mode(attention(grouped(D128), MEDIUM, BF16, causal=True))


def others() -> Iterator[Call]:
    """Yield merges; masks; and products: with b transposed, unaligned, in float32."""
    for head_dim in (64, 80, 96, 128, 256):
        yield merging(head_dim)
    for name, length in product(MASKS, (1024, 4096, 8192, 16384, 32768)):
        yield masking(name, length)
    for dtype, sizes, transposed in product(HALVES, PRODUCTS, BOTH):
        yield matrix_product(*sizes, dtype, transposed)
    for rows in (16, 4096):
        yield matrix_product(rows, 4095, 4095, BF16)
        yield matrix_product(rows, 4096, 4096, FP32, out_dtype=FP16)
        yield matrix_product(rows, 4096, 4096, FP32, precision="ieee")
        for transposed in BOTH:
            yield matrix_product(rows, 4096, 4096, FP32, transposed, precision="tf32")


def everything() -> list[Call]:
    """Return all calls that a pack serves."""
    return [*training(), *serving(), *others()]
