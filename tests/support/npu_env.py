"""Run the NPU tests on real torch_npu without an NPU: `python tests/support/npu_env.py [pytest arguments]`.

Needs an environment with torch_npu and triton-ascend (and gcc); see docs/npu-design.md. Builds the host shim once into
`.cache/acl_host_shim`, then starts pytest with torch_npu on the shim and Triton in its interpreter. Without arguments
it runs `tests/npu`; the compile gate there starts processes of its own, without the interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
SOURCE = TESTS / "simulators" / "acl" / "acl_host_shim.c"
# What torch_npu loads; opapi has none of its functions, so that it looks for others.
LIBRARIES = ("ascendcl", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "opapi")


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
    libraries = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
    modules = [str(ROOT), str(TESTS), str(TESTS / "support"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        "PYTHONPATH": ":".join(filter(None, modules)),
        "TRITON_INTERPRET": "1",
        "DIYFA_HOST_SHIM": "1",
        # Operators that the shim refuses must raise where they are called, not leave garbage behind.
        "ASCEND_LAUNCH_BLOCKING": "1",
        # Every allocation comes from the shim, which fills it with NaN.
        "PYTORCH_NO_NPU_MEMORY_CACHING": "1",
        "DIYFA_TEST_BACKENDS": os.environ.get("DIYFA_TEST_BACKENDS", "npu"),
    }


def main(arguments: list[str]) -> int:
    """Run pytest; returns its exit status."""
    environment = shim_environment(build_shim(ROOT / ".cache" / "acl_host_shim"))
    command = [sys.executable, "-m", "pytest", "-p", "npu_interpreter", *(arguments or [str(TESTS / "npu")])]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
