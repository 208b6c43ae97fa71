"""How many kernels of peers' test suites a pack has: `python tests/tools/peer_coverage.py [sm_90] [SHARE]`.

The suites are the parameter grids of flash_attn 2 (tests/test_flash_attn.py) and flash_attn 3 (hopper/
test_flash_attn.py) of Dao-AILab/flash-attention, and of PyTorch's SDPA (test/test_transformers.py). One in SHARE of
their calls is recorded as the calls of the pack are, with the peers' numbers of heads and samples; windows are a third
of the keys. What diyfa does not offer is left out: FP8 inputs of training, `qv` and chunks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

if __name__ == "__main__":  # else pytest has set the path
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path[:0] = [str(Path(__file__).parents[2])]

from diyfa.ready import calls
from diyfa.ready.calls import BF16, BOTH, FP16, FP32, HALVES, Call, Heads, Rows, attention, cache, empty
from diyfa.ready.recording import record

DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
LISTED = {f"D={d}" for d in ("64", "96", "128", "192/128", "256")}  # head dims that the pack has features for
EXTRAS = ("window", "softcap", "alibi_slopes", "dropout_p", "deterministic", "attn_bias")
KINDS = ("mha", "mqa", "gqa")
PAIRS = (
    (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023),
    (2048, 2048),
)  # fmt: skip
CAUSAL_PAIRS = ((1, 239), (3, 799), (127, 512), (127, 513), *PAIRS[:5], (1023, 1024))
SPLIT_PAIRS = ((3, 1024), (1, 339), (64, 800), (3, 799), (64, 2048), (16, 20000), (16, 100000), (128, 128), (256, 256))
CACHE_PAIRS = ((1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000), (128, 128))
RACES = (
    (1, 239), (239, 1), (3, 799), (799, 3), (1024, 128),
    *((n, n) for n in (97, 128, 200, 256, 257, 384, 512, 768, 1024, 2048)),
)  # fmt: skip
PAIRS_FA3 = (
    (1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211),
    (108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (4096, 4096),
    (4224, 4224),
)  # fmt: skip


def window(local: bool, causal: bool, keys: int) -> tuple[int, int] | None:
    return (keys // 3, 0 if causal else keys // 4) if local else None


def attend(rows: Rows, heads: Heads, dtype: Any, packed: bool = False, backward: bool = True, **given: Any) -> Call:
    """Return a call with the options that are on. Packed sequences are up to 20 rows shorter than the longest."""
    if packed:
        given["longest"] = max(rows.queries, rows.keys)
        rows = Rows(rows.batch, *(max(n - 10, 1) for n in rows[1:]))
    return attention(heads, rows, dtype, packed, backward, **{name: x for name, x in given.items() if x})


def kv_heads(heads: int, kind: str, grouped: int) -> int:
    return {"mha": heads, "mqa": 1, "gqa": grouped}[kind]


def flash_attn_2() -> Iterator[Call]:
    for d, n, p, causal, local, alibi, deterministic, dtype, packed in product(
        DIMS, (97, 128, 200, 384, 768, 1024, 1025, 2048), (0.0, 0.17), BOTH, BOTH, BOTH, BOTH, HALVES, BOTH
    ):
        heads = 6 if packed else 9
        yield attend(
            Rows(5 if packed else 4, n, n), Heads(d, 0, heads, heads), dtype, packed, dropout_p=p, causal=causal,
            window=window(local, causal, n), alibi_slopes=alibi, deterministic=deterministic,
        )  # fmt: skip
    for d, (m, n), (p, cap), causal, local, alibi, deterministic, dtype, packed, kind in product(
        DIMS, PAIRS, ((0.0, 0.0), (0.17, 0.0), (0.0, 50.0)), BOTH, BOTH, BOTH, BOTH, HALVES, BOTH, KINDS
    ):
        heads = 4 if cap else 6
        yield attend(
            Rows(4, m, n), Heads(d, 0, heads, kv_heads(heads, kind, 2)), dtype, packed, dropout_p=p, softcap=cap,
            causal=causal, window=window(local, causal, n), alibi_slopes=alibi, deterministic=deterministic,
        )  # fmt: skip
    for d, pair, step, local, dtype, deterministic, packed in product(
        DIMS, CAUSAL_PAIRS, (1, -1), BOTH, HALVES, BOTH, BOTH
    ):
        m, n = pair[::step]
        yield attend(
            Rows(8, m, n), Heads(d, 0, 9, 9), dtype, packed, causal=True, window=window(local, True, n),
            deterministic=deterministic,
        )  # fmt: skip
    for d, pair, step, local, causal, alibi, dtype in product(DIMS, SPLIT_PAIRS, (1, -1), BOTH, BOTH, BOTH, HALVES):
        m, n = pair[::step]
        yield attend(
            Rows(1, m, n),
            Heads(d, 0, 12, 12),
            dtype,
            causal=causal,
            window=window(local, causal, n),
            alibi_slopes=alibi,
        )
    for d, (m, n), p, causal in product(DIMS, RACES, (0.0, 0.17), BOTH):
        yield attend(Rows(60, m, n), Heads(d, 0, 4, 4), FP16, dropout_p=p, causal=causal)
    for d, n, causal, dtype in product((16, 32, 64, 128), (1, 2, 5, 17, 97, 128, 200, 256), BOTH, HALVES):
        yield attend(Rows(2, n, n), Heads(d, 0, 5, 5), dtype, causal=causal)


def over_a_cache(
    rows: Rows, heads: Heads, dtype: Any, page: int, new: int, rotary: float, has_padding: bool, **given: Any
) -> Call:
    padding = {"cache_leftpad": empty(rows.batch)} if has_padding else {}
    keys = -(-rows.keys // page) * page if page else rows.keys
    given |= {"new": new, "rotary": int(rotary * heads.head_dim) // 16 * 16 if new else 0}
    options = {name: x for name, x in given.items() if x}
    call = cache(heads, rows._replace(keys=keys), dtype, page, **options, **padding)
    return call._replace(name=call.name.split(" cache_leftpad")[0] + " leftpad" * has_padding)


def flash_attn_2_cache() -> Iterator[Call]:
    for d, (m, n), kind, new, alibi, local, causal, share, interleaved, rotary, page, padded, splits in product(
        (32, 59, 64, 80, 128, 256), CACHE_PAIRS, KINDS, BOTH, BOTH, BOTH, BOTH, (1, 2), BOTH, (0.0, 0.5, 1.0), (0, 256),
        BOTH, (0, 1),
    ):  # fmt: skip
        if not (page and padded):
            yield over_a_cache(
                Rows(2, m, n), Heads(d, 0, 6, kv_heads(6, kind, 3)), FP16, page, -(-m // share) * new, rotary, padded,
                alibi_slopes=alibi, window_size=window(local, causal, n), causal=causal, num_splits=splits,
                rotary_interleaved=interleaved and new and rotary > 0,
            )  # fmt: skip


def flash_attn_3() -> Iterator[Call]:
    for (d, dv), (m, n), kind, cap, local, causal, dtype, packed in product(
        ((64, 0), (64, 256), (64, 512), (96, 0), (128, 0), (192, 0), (192, 128), (256, 0)), PAIRS_FA3, KINDS,
        (0.0, 15.0), BOTH, BOTH, HALVES, BOTH,
    ):  # fmt: skip
        yield attend(
            Rows(9 if max(m, n) <= 2048 else 2, m, n), Heads(d, dv, 6, kv_heads(6, kind, 2)), dtype, packed, dv <= 256,
            softcap=cap, causal=causal, window=window(local, causal, n),
        )  # fmt: skip
    for d, (m, n), causal in product(DIMS, RACES, BOTH):
        yield attend(Rows(60, m, n), Heads(d, 0, 4, 4), BF16, causal=causal)
    for (m, n), kind, new, mask, share, interleaved, rotary, page, padded, packed in product(
        (*CACHE_PAIRS, (256, 512), (2048, 3577)), KINDS, BOTH, ("", "causal", "local"), (1, 2), BOTH, (0.0, 0.5, 1.0),
        (0, 1, 4, 128), BOTH, BOTH,
    ):  # fmt: skip
        if not (page and padded) and not (packed and (new or padded)):
            yield over_a_cache(
                Rows(5, m, n), Heads(128, 0, 6, kv_heads(6, kind, 3)), BF16, page, -(-m // share) * new, rotary, padded,
                window_size=window(mask == "local", False, n), causal=mask == "causal", packed=packed,
                longest=m * packed, rotary_interleaved=interleaved and new and rotary > 0,
            )  # fmt: skip


def sdpa() -> Iterator[Call]:
    sizes = (4, 8, 64, 128, 256, 512, 1024, 2048)
    for d, b, m, n, causal, p, dtype in product(
        (8, 16, 21, 32, 64, 72, 96, 128, 160, 192, 203, 256), (1, 8), (*sizes, 143), (*sizes, 587), BOTH, (0.0, 0.22),
        HALVES,
    ):  # fmt: skip
        if not causal or m == n:
            yield attend(Rows(b, m, n), Heads(d, 0, 4, 4), dtype, causal=causal, dropout_p=p)
    for d, b, m, n, p, dtype, bias in product(
        (8, 16, 32, 64, 72, 96, 128), (1, 8), sizes, sizes, (0.0, 0.22), (*HALVES, FP32), ("", "11qk")
    ):
        yield attend(Rows(b, m, n), Heads(d, 0, 4, 4), dtype, dropout_p=p, attn_bias=bias, bias_grad=bool(bias))


SUITES = {
    "flash_attn 2": flash_attn_2, "flash_attn 2, cache": flash_attn_2_cache, "flash_attn 3": flash_attn_3, "SDPA": sdpa,
}  # fmt: skip


class Found(NamedTuple):
    calls: int
    launches: int
    known: int  # launches whose kernel is in the pack
    refused: int  # calls


def has_one_feature(call: Call) -> bool:
    """Return whether the call has a head dim of the pack, 16-bit inputs, and at most one of EXTRAS."""
    words = {word.partition("=")[0] for word in call.name.split()}
    return bool(LISTED & {*call.name.split()}) and "float32" not in words and len(words & {*EXTRAS}) <= 1


def coverage(arch: str, pack: dict[Any, Any], listed: Iterator[Call], is_counted: Callable[[Call], bool]) -> Found:
    """Return what the pack has of the calls, each of which counts once."""
    counted = {call.name: call for call in listed if is_counted(call)}
    launches = known = refused = 0
    for call in counted.values():
        recorded = record("cuda", arch, [call])
        launches += len(recorded.kernels)
        known += len(recorded.kernels.keys() & pack.keys())
        refused += len(recorded.refused)
    return Found(len(counted), launches, known, refused)


def main() -> None:
    arch = sys.argv[1] if len(sys.argv) > 1 else "sm_90"
    share = int(sys.argv[2]) if len(sys.argv) > 2 else 50
    pack = record("cuda", arch, calls.everything()).kernels
    print(f"{len(pack)} kernels in a pack for {arch}; one in {share} calls of each suite")
    for suite, listed in SUITES.items():
        for words, rule in (("all calls", lambda call: True), ("with one feature at most", has_one_feature)):
            found = coverage(
                arch, pack, listed(), lambda call, rule=rule: not crc32(call.name.encode()) % share and rule(call)
            )
            print(
                f"{suite}, {words}: the pack has {found.known / found.launches:.1%} of the kernels of {found.calls} "
                f"calls, {found.refused} of which are refused"
            )


if __name__ == "__main__":
    main()
