"""Which calls of the tests a pack of compiled kernels does not serve: `python tests/tools/pack_coverage.py [sm_90]`.

The tests' own calls are recorded as those of the pack are. What a call launches that no call of the pack does is listed
under its name, so that whoever adds a kernel sees whether users will wait for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

if __name__ == "__main__":  # else pytest has set the path
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path[:0] = [str(Path(__file__).parents[i] / folder) for i, folder in ((2, ""), (1, ""), (1, "support"))]

from cases import CASES
from kvcache_cases import KVCACHE_CASES
from kvcache_cases import run_case as run_kvcache

from diyfa.ready import calls
from diyfa.ready.recording import record
from diyfa.testing import attention_function, make_inputs, run_case


class Coverage(NamedTuple):
    kernels: int  # that the tests' calls launch
    known: int  # of them, that the pack has
    lacking: dict[str, list[str]]  # call -> its kernels that the pack lacks


def matrix(every: int = 1) -> Iterator[tuple[str, Callable[[], object]]]:
    """One in so many calls of the test matrix."""

    def attend(name: str) -> object:
        return run_case(attention_function(CASES[name]), make_inputs(CASES[name]))

    for name in CASES:
        if crc32(name.encode()) % every == 0:
            yield name, lambda name=name: attend(name)
    for name, case in KVCACHE_CASES.items():
        if crc32(name.encode()) % every == 0:
            yield name, lambda case=case: run_kvcache(case, "cpu")


def coverage(arch: str, every: int = 1) -> Coverage:
    """What a pack for `arch` lacks of the tests' calls."""
    pack = record("cuda", arch, calls.everything()).kernels
    seen: dict[str, bool] = {}
    lacking: dict[str, list[str]] = {}
    for name, call in matrix(every):
        kernels = record("cuda", arch, [(name, call)]).kernels
        seen |= {key: key in pack for key in kernels}
        if missing := [kernel.name for key, kernel in kernels.items() if key not in pack]:
            lacking[name] = missing
    return Coverage(len(seen), sum(seen.values()), lacking)


def main() -> None:
    arch = sys.argv[1] if len(sys.argv) > 1 else "sm_90"
    found = coverage(arch)
    for name, kernels in found.lacking.items():
        print(f"{name}: {', '.join(kernels)}")
    print(f"a pack for {arch} has {found.known} of {found.kernels} kernels of the tests' calls; {len(found.lacking)} "
          "calls need others")  # fmt: skip


if __name__ == "__main__":
    main()
