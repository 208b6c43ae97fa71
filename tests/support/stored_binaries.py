"""Binaries that are made without a GPU, for a process with Triton's compiler. See tests/cuda/test_binaries.py.

`python stored_binaries.py COMMAND FOLDER`. Needs Triton without its interpreter.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from compiled_launches import a_launch
from simulators.cuda_driver import install

from diyfa.backends.cuda.attention.merge import make_launch
from diyfa.backends.cuda.runtime import binaries, jit, launcher, pack, passes
from diyfa.backends.cuda.runtime.signature import launch_signature
from diyfa.problem import Launch

ARCH = "sm_90"


def launches() -> list[Launch]:
    """Two of small kernels: one of diyfa's, and one of another's with a descriptor."""
    out, lse = torch.zeros(1, 2, 64, 32), torch.zeros(1, 2, 64)
    return [make_launch(out, lse, out.clone(), lse.clone()), a_launch(torch.zeros(64, 16, dtype=torch.float16))]


def make(folder: Path) -> dict[str, Any]:
    """Compile the launches; they are launched as compiled, from the cache folder and from a pack."""
    driver = install(folder)
    described = launches()
    pack_file = folder / "site" / pack.module_name(ARCH) / pack.FILE_NAME
    pack_file.parent.mkdir(parents=True)
    compiled: list[str] = []
    compile_it = jit.compile_for
    jit.compile_for = lambda arch, launch, signature: (
        compiled.append(launch.kernel.__name__) or compile_it(arch, launch, signature)
    )
    report: dict[str, Any] = {"compiled": [], "launched": []}

    def launch_all() -> None:
        compiled.clear()
        driver.launches.clear()
        launcher._binaries.clear()
        passes.launch_each(described)  # compiled side by side
        report["compiled"].append(sorted(compiled))
        report["launched"].append([repr(one) for one in driver.launches])

    launch_all()
    launch_all()  # from the cache folder
    keys = [binaries.binary_key(ARCH, launch, launch_signature(launch)) for launch in described]
    cache = binaries.cache_folder()
    assert cache is not None
    stored = {key: cache.get(key) for key in keys}
    pack.write_pack(pack_file, ARCH, {key: binary for key, binary in stored.items() if binary is not None})
    for key in keys:
        (cache.path / key).unlink()
    sys.path.insert(0, str(folder / "site"))
    pack.installed.cache_clear()
    os.environ["DIYFA_JIT"] = "never"
    launch_all()  # from the pack
    for key, binary in stored.items():
        assert binary is not None and cache.put(key, binary)
    return {**report, "keys": keys, "many_keys": many_keys(), "cache": str(cache.path)}


def many_keys() -> dict[str, str]:
    """The keys of half of the kernels that are compiled ahead of time."""
    from diyfa.lab.cuda import matmul_specs, specs

    some = [spec for each in (specs, matmul_specs) for spec in itertools.islice(each.compile_specs(ARCH), 150)]
    return {
        f"{spec.kernel} {spec.case}": binaries.binary_key(ARCH, spec.launch, launch_signature(spec.launch))
        for spec in some
    }


def share_folder(folder: Path) -> dict[str, Any]:
    """Write and read the same files for a second, beside another process that does the same."""
    cache = binaries.BinaryFolder(folder)
    written = {str(i): binaries.StoredBinary(bytes([i]) * (100_000 + i), "f", 0, 4, False, (), 2) for i in range(8)}
    end, read = time.monotonic() + 1, 0
    while time.monotonic() < end:
        for key, one in written.items():
            binary = cache.get(key)
            read += binary is not None
            assert binary in (None, one) and cache.put(key, one)
    return {"read": read, "many_keys": many_keys()}


if __name__ == "__main__":
    command, folder = sys.argv[1:]
    print(json.dumps({"make": make, "share_folder": share_folder}[command](Path(folder))))
