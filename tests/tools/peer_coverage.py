"""How many kernels of peers' test suites a pack has: `python tests/tools/peer_coverage.py [sm_90] [SHARE]`.

The suites are the parameter grids of flash_attn 2 (tests/test_flash_attn.py) and flash_attn 3 (hopper/test_flash_attn.py)
of Dao-AILab/flash-attention, and of PyTorch's SDPA (test/test_transformers.py). One in SHARE of their calls is recorded as
the calls of the pack are, with the peers' numbers of heads and samples; windows are a third of the keys. What diyfa does
not offer is left out: FP8 inputs of training, `qv` and chunks.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
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

SHARE = 50  # one call in so many, by default
DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
PAIRS = (
    (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023),
    (2048, 2048),
)  # fmt: skip
CAUSAL_PAIRS = (
    (1, 239), (3, 799), (127, 512), (127, 513), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (1023, 1024),
)  # fmt: skip
SQUARES = (97, 128, 200, 384, 768, 1024, 1025, 2048)
SPLIT_PAIRS = (
    (3, 1024), (1, 339), (64, 800), (3, 799), (64, 2048), (16, 20000), (16, 100000), (128, 128), (256, 256),
)  # fmt: skip
CACHE_PAIRS = (
    (1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000), (128, 128),
)  # fmt: skip
RACES = (
    (1, 239), (239, 1), (3, 799), (799, 3), (1024, 128), *((n, n) for n in (97, 128, 200, 256, 257, 384, 512, 768, 1024)),
    (2048, 2048),
)  # fmt: skip
LENGTHS_FA3 = (
    (1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211),
    (108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (4096, 4096),
    (4224, 4224),
)  # fmt: skip


def options(**given: Any) -> dict[str, Any]:
    """Return the options that are not off."""
    return {name: x for name, x in given.items() if x}


def window(local: bool, causal: bool, keys: int) -> tuple[int, int] | None:
    return (keys // 3, 0 if causal else keys // 4) if local else None


def train(
    rows: Rows, d: int, dtype: Any, heads: int, kv: int, packed: bool = False, dv: int = 0, **given: Any
) -> Call:
    """Return a call and its backward pass. Packed sequences are up to 20 rows shorter than the longest."""
    if packed:
        given["longest"] = max(rows.queries, rows.keys)
        rows = Rows(rows.batch, *(max(n - 10, 1) for n in rows[1:]))
    return attention(Heads(d, dv if dv != d else 0, heads, kv), rows, dtype, packed, **options(**given))


def flash_attn_2() -> Iterator[Call]:
    for d, n, p, causal, local, alibi, deterministic, dtype, packed in product(
        DIMS, SQUARES, (0.0, 0.17), BOTH, BOTH, BOTH, BOTH, HALVES, BOTH
    ):
        rows = Rows(5 if packed else 4, n, n)
        heads = 6 if packed else 9
        yield train(
            rows, d, dtype, heads, heads, packed, dropout_p=p, causal=causal, window=window(local, causal, n),
            alibi_slopes=alibi, deterministic=deterministic,
        )  # fmt: skip
    for d, (m, n), p, cap, causal, local, alibi, deterministic, dtype, packed, kind in product(
        DIMS, PAIRS, (0.0, 0.17), (0.0, 50.0), BOTH, BOTH, BOTH, BOTH, HALVES, BOTH, ("mha", "mqa", "gqa")
    ):
        if p and cap:
            continue
        heads = 4 if cap else 6
        kv = {"mha": heads, "mqa": 1, "gqa": 2}[kind]
        yield train(
            Rows(4, m, n), d, dtype, heads, kv, packed, dropout_p=p, softcap=cap, causal=causal,
            window=window(local, causal, n), alibi_slopes=alibi, deterministic=deterministic,
        )  # fmt: skip
    for d, pair, swapped, local, dtype, deterministic, packed in product(
        DIMS, CAUSAL_PAIRS, BOTH, BOTH, HALVES, BOTH, BOTH
    ):
        m, n = pair[::-1] if swapped else pair
        yield train(
            Rows(8, m, n), d, dtype, 9, 9, packed, causal=True, window=window(local, True, n), deterministic=deterministic
        )
    for d, pair, swapped, local, causal, alibi, dtype in product(DIMS, SPLIT_PAIRS, BOTH, BOTH, BOTH, BOTH, HALVES):
        m, n = pair[::-1] if swapped else pair
        given = options(causal=causal, window=window(local, causal, n), alibi_slopes=alibi)
        yield attention(Heads(d, 0, 12, 12), Rows(1, m, n), dtype, **given)
    for d, (m, n), p, causal in product(DIMS, RACES, (0.0, 0.17), BOTH):
        yield train(Rows(60, m, n), d, FP16, 4, 4, dropout_p=p, causal=causal)
    for d, n, causal, dtype in product((16, 32, 64, 128), (1, 2, 5, 17, 97, 128, 200, 256), BOTH, HALVES):
        yield train(Rows(2, n, n), d, dtype, 5, 5, causal=causal)


def over_a_cache(
    rows: Rows, d: int, heads: int, kv: int, dtype: Any, page: int, new: int, rotary: float, padded: bool, **given: Any
) -> Call:
    rotated = int(rotary * d) // 16 * 16 if new else 0
    tables = {"cache_leftpad": empty(rows.batch)} if padded else {}
    keys = -(-rows.keys // page) * page if page else rows.keys
    call = cache(
        Heads(d, 0, heads, kv), rows._replace(keys=keys), dtype, page, **options(new=new, rotary=rotated, **given), **tables
    )
    return call._replace(name=f"{call.name.split(' cache_leftpad')[0]}{' leftpad' * padded}")


def flash_attn_2_cache() -> Iterator[Call]:
    for d, (m, n), kind, new, alibi, local, causal, equal, interleaved, rotary, page, padded, splits in product(
        (32, 59, 64, 80, 128, 256), CACHE_PAIRS, ("mha", "mqa", "gqa"), BOTH, BOTH, BOTH, BOTH, BOTH, BOTH, (0.0, 0.5, 1.0),
        (0, 256), BOTH, (0, 1),
    ):  # fmt: skip
        if (not new and (rotary or not equal or interleaved)) or (page and padded) or (m > n and new):
            continue
        yield over_a_cache(
            Rows(2, m, n), d, 6, {"mha": 6, "mqa": 1, "gqa": 3}[kind], FP16, page, (m if equal else max(m // 2, 1)) * new,
            rotary, padded, alibi_slopes=alibi, window_size=window(local, causal, n), causal=causal, num_splits=splits,
            rotary_interleaved=interleaved if new and rotary else None,
        )  # fmt: skip


def flash_attn_3() -> Iterator[Call]:
    for d, (m, n), kind, cap, local, causal, dtype, packed in product(
        (64, 96, 128, 192, 256), LENGTHS_FA3, ("mha", "mqa", "gqa"), (0.0, 15.0), BOTH, BOTH, HALVES, BOTH
    ):
        for dv in {64: (64, 256, 512), 192: (128, 192)}.get(d, (d,)):
            rows = Rows(9 if max(m, n) <= 2048 else 2, m, n)
            given = options(softcap=cap, causal=causal, window=window(local, causal, n))
            kv = {"mha": 6, "mqa": 1, "gqa": 2}[kind]
            if dv > 256:
                yield attention(Heads(d, dv, 6, kv), rows, dtype, packed, backward=False, **given)
            else:
                yield train(rows, d, dtype, 6, kv, packed, dv, **given)
    for d, (m, n), causal in product(DIMS, RACES, BOTH):
        yield train(Rows(60, m, n), d, BF16, 4, 4, causal=causal)
    for (m, n), kind, new, mask, equal, interleaved, rotary, page, padded, packed in product(
        (*CACHE_PAIRS, (256, 512), (2048, 3577)), ("mha", "mqa", "gqa"), BOTH, ("", "causal", "local"), BOTH, BOTH,
        (0.0, 0.5, 1.0), (0, 1, 4, 128), BOTH, BOTH,
    ):  # fmt: skip
        if (not new and (rotary or not equal or interleaved)) or (page and padded) or (packed and (new or padded)):
            continue
        given = {"window_size": window(mask == "local", False, n), "causal": mask == "causal", "packed": packed}
        if packed:
            given["longest"] = m
        yield over_a_cache(
            Rows(5, m, n), 128, 6, {"mha": 6, "mqa": 1, "gqa": 3}[kind], BF16, page, (m if equal else max(m // 2, 1)) * new,
            rotary, padded, rotary_interleaved=interleaved if new and rotary else None, **given,
        )  # fmt: skip


def sdpa() -> Iterator[Call]:
    for d, b, m, n, causal, p, dtype in product(
        (8, 16, 21, 32, 64, 72, 96, 128, 160, 192, 203, 256), (1, 8), (4, 8, 64, 143, 256, 512, 1024, 2048),
        (4, 8, 64, 128, 256, 587, 1024, 2048), BOTH, (0.0, 0.22), HALVES,
    ):  # fmt: skip
        if not causal or m == n:
            yield train(Rows(b, m, n), d, dtype, 4, 4, causal=causal, dropout_p=p)
    for d, b, m, n, p, dtype, masked in product(
        (8, 16, 32, 64, 72, 96, 128), (1, 8), (4, 8, 64, 128, 256, 512, 1024, 2048), (4, 8, 64, 128, 256, 512, 1024, 2048),
        (0.0, 0.22), (FP16, BF16, FP32), BOTH,
    ):  # fmt: skip
        bias = {"attn_bias": "11qk", "bias_grad": True} if masked else {}
        yield train(Rows(b, m, n), d, dtype, 4, 4, dropout_p=p, **bias)


SUITES = {
    "flash_attn 2": flash_attn_2, "flash_attn 2, cache": flash_attn_2_cache, "flash_attn 3": flash_attn_3, "SDPA": sdpa,
}  # fmt: skip


class Found(NamedTuple):
    calls: int
    served: int  # calls whose kernels are all in the pack
    kernels: int
    known: int
    launches: int
    known_launches: int
    lacking: Counter[str]  # why: kernel, or head dims
    refused: list[str]


def coverage(arch: str, suite: str, share: int, pack: dict[Any, Any]) -> Found:
    """Return what the pack has of one suite's calls."""
    kernels: dict[str, bool] = {}
    n_calls = served = launches = known_launches = 0
    lacking: Counter[str] = Counter()
    refused: list[str] = []
    for call in SUITES[suite]():
        if crc32(call.name.encode()) % share:
            continue
        recorded = record("cuda", arch, [call])
        n_calls += 1
        refused += recorded.refused
        found = {key: key in pack for key in recorded.kernels}
        kernels |= found
        served += all(found.values())
        launches += len(found)
        known_launches += sum(found.values())
        if not all(found.values()):
            lacking[" ".join(word for word in call.name.split() if word.startswith("D="))] += 1
    return Found(n_calls, served, len(kernels), sum(kernels.values()), launches, known_launches, lacking, refused)


def main() -> None:
    arch = sys.argv[1] if len(sys.argv) > 1 else "sm_90"
    share = int(sys.argv[2]) if len(sys.argv) > 2 else SHARE
    pack = record("cuda", arch, calls.everything()).kernels
    print(f"{len(pack)} kernels in a pack for {arch}; one in {share} calls of each suite")
    for suite in SUITES:
        found = coverage(arch, suite, share, pack)
        print(
            f"{suite}: {found.calls} calls, {found.served / found.calls:.1%} served whole; {found.kernels} kernels, "
            f"{found.known / found.kernels:.1%} of them and {found.known_launches / found.launches:.1%} of launches in "
            f"the pack; {len(found.refused)} refused"
        )
        print(f"  lacking: {found.lacking.most_common(12)}")
        print(*(f"  refused: {reason}" for reason in found.refused[:3]), sep="\n")


if __name__ == "__main__":
    main()
