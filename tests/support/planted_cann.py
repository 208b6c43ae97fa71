"""A folder that looks like CANN to triton-ascend, so that all of its way from a call to a launch runs without an NPU.

triton-ascend's own code runs: its keys, its cache folders, the compiler's front half, and the sources that its driver
and its launchers are generated from. Planted are

* `bishengir-compile`: writes a few bytes instead of machine code, and refuses kernels whose linalg has the text that
  the file `refused` has,
* the C++ compiler: instead of compiling PyTorch's headers for half a minute it copies `launcher_stand_in.c`'s module.
  As GCC does, it fails on a precompiled header that another process is still writing.

Each appends a line to the file `compilers`, and each launch one to `launches`.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

from npu_env import ROOT, build_shim, shim_environment

SOURCE = ROOT / "tests" / "simulators" / "acl" / "launcher_stand_in.c"

BACK_HALF = """#!/bin/sh
case "$*" in
*--help*) echo limit-auto-multi-buffer-buffer; exit;;
*--version*) echo "bishengir-compile 1.2.0"; exit;;
esac
sleep 0.2
echo "back half $(grep -o 'func.func @[a-z_]*' "$1" | head -1)" >> {log}
if [ -s {refused} ] && grep -q "$(cat {refused})" "$1"; then
    echo "error: planted: ub overflow, requires 3170304 bits while 1572864 bits available!" >&2
    exit 1
fi
while [ $# -gt 1 ]; do [ "$1" = -o ] && echo binary > "$2.o"; shift; done
exit 0
"""
CXX = """#!/bin/sh
echo "C++ $*" >> {log}
while [ $# -gt 1 ]; do
    case "$1" in
    -o) out="$2";;
    *.cxx) source="$1";;
    -I*) [ -e "${{1#-I}}/precompiled.h.gch" ] && header="${{1#-I}}/precompiled.h.gch";;
    esac
    shift
done
case "$out" in
*.gch) echo begun > "$out"; sleep {header_seconds}; echo finished >> "$out"; exit;;
esac
if [ -n "$source" ] && ! grep -qs finished "$header"; then
    echo "error: while reading precompiled header: No such file or directory" >&2
    exit 1
fi
cp {module} "$out"
"""


class PlantedCann:
    """The folder, and the environment in which triton-ascend finds it. `header_seconds`: to precompile the header."""

    def __init__(self, folder: Path, header_seconds: float = 1.0) -> None:
        self.folder = folder
        self.compilers, self.launches, self.refused = folder / "compilers", folder / "launches", folder / "refused"
        module, programs = folder / "launcher_stand_in.so", folder / "bin"
        for name in ("bin", "opp", "runtime", "compiler"):
            (folder / name).mkdir(parents=True)
        include = sysconfig.get_paths()["include"]
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", f"-I{include}", "-o", module, SOURCE], check=True)
        places = {"log": self.compilers, "refused": self.refused, "module": module, "header_seconds": header_seconds}
        texts = {"bisheng": "#!/bin/sh\necho hiipu64\n", "bishengir-compile": BACK_HALF, "c++": CXX}
        for name, text in texts.items():
            (programs / name).write_text(text if name == "bisheng" else text.format(**places))
            (programs / name).chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        inherited = shim_environment(build_shim(ROOT / ".cache" / "acl_host_shim"))
        inherited.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)  # the command line sets it, and scripts need the default
        return {
            **inherited,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "CC": str(self.folder / "bin" / "c++"),
            "ASCEND_HOME_PATH": str(self.folder),
            "ASCEND_OPP_PATH": str(self.folder / "opp"),
            "LAUNCHER_STAND_IN_LOG": str(self.launches),
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
            "DIYFA_CACHE_DIR": str(self.folder / "diyfa"),
            "TRITON_INTERPRET": "0",
        }

    def compiled(self) -> list[str]:
        """Return what compilers were called for since the last call of this method."""
        lines = self.compilers.read_text().splitlines() if self.compilers.exists() else []
        self.compilers.unlink(missing_ok=True)
        return lines

    def launched(self) -> list[str]:
        """Return the names of the kernels launched since the last call of this method."""
        lines = self.launches.read_text().splitlines() if self.launches.exists() else []
        self.launches.unlink(missing_ok=True)
        return [line.removeprefix("launch ") for line in lines]
