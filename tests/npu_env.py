"""Run the NPU tests on real torch_npu without an NPU: `python tests/npu_env.py [pytest arguments]`.

Needs an environment with torch_npu and triton-ascend (and gcc); see docs/npu.md. Builds the host shim once into
`.cache/acl_host_shim`, then starts pytest with torch_npu on the shim and Triton in its interpreter. Without arguments
it runs `tests/npu`. The compile gate runs in the same call, in a process of its own without the interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
SOURCE = TESTS / "acl_host_shim" / "acl_host_shim.c"
LIBRARIES = ("ascendcl", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")  # what torch_npu loads
COMPILE_GATE = TESTS / "npu" / "test_ascend_compile.py"


def build_shim(folder: Path) -> Path:
    """Build the shim under every library name torch_npu loads, unless it is there and newer than its source."""
    folder.mkdir(parents=True, exist_ok=True)
    first = folder / f"lib{LIBRARIES[0]}.so"
    if not first.exists() or first.stat().st_mtime < SOURCE.stat().st_mtime:
        built = folder / f".build-{os.getpid()}.so"
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-w", "-o", str(built), str(SOURCE)], check=True)
        built.replace(first)
    for name in LIBRARIES[1:]:
        link = folder / f"lib{name}.so"
        if not link.exists():
            link.symlink_to(first.name)
    return folder


def shim_environment(folder: Path) -> dict[str, str]:
    """Environment for torch_npu on the shim with the kernels in Triton's interpreter."""
    paths = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(filter(None, paths)),
        "TRITON_INTERPRET": "1",
        # Operators that the shim refuses must raise where they are called, not leave garbage behind.
        "ASCEND_LAUNCH_BLOCKING": "1",
        "DIYFA_TEST_BACKENDS": os.environ.get("DIYFA_TEST_BACKENDS", "npu"),
    }


def compile_environment() -> dict[str, str]:
    """Environment for the ahead-of-time compiler: no interpreter, and torch_npu left alone."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    environment.pop("TRITON_INTERPRET", None)
    return environment


def main(arguments: list[str]) -> int:
    """Run pytest; returns the first exit status that is not 0."""
    shim = shim_environment(build_shim(ROOT / ".cache" / "acl_host_shim"))
    pytest = [sys.executable, "-m", "pytest"]
    if arguments:
        return subprocess.run([*pytest, *arguments], cwd=ROOT, env=shim).returncode
    runs = (
        ([*pytest, str(TESTS / "npu"), f"--ignore={COMPILE_GATE}"], shim),
        ([*pytest, str(COMPILE_GATE)], compile_environment()),
    )
    return max(subprocess.run(command, cwd=ROOT, env=environment).returncode for command, environment in runs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
