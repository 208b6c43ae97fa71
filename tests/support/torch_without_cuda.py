"""Make the CUDA build of PyTorch in this environment work without CUDA: `python tests/support/torch_without_cuda.py`.

Old releases of torch_npu need old releases of torch, of which many package indices have the CUDA build alone, with
gigabytes of libraries that no NPU needs. This takes a torch that was installed with `--no-deps`: functions that report
"no device" take the place of those libraries, and its metadata no longer ask for them. Does nothing to a CPU build.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections import defaultdict
from importlib.metadata import distribution
from pathlib import Path

CUDA_ERROR_NO_DEVICE = 100
UNVERSIONED = ("nccl", "cuFile", "cusparseLt", "curand")  # functions of CUDA's libraries that carry no version
OTHER_VERSIONS = ("GLIBC", "GCC", "CXXABI", "GOMP", "OMP")  # versions of what is no library of CUDA's
# Options of the memory allocator that CUDA's library and torch_npu both register from release 2.14 on; PyTorch ends the
# process when a name is registered twice.
ALLOCATOR_OPTIONS = (b"pinned_reserve_segment_size_mb", b"per_process_memory_fraction")


def run_command(*command: str | Path) -> str:
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout


def stand_in(folder: Path) -> None:
    """Build one library with all functions that the libraries in `folder` miss, under every name they load."""
    libraries = sorted(folder.glob("*.so"))
    names: dict[str, set[str]] = defaultdict(set)  # of functions, by the version that the linker wants
    undefined = run_command("nm", "-D", "--undefined-only", "--with-symbol-versions", *libraries)
    for name, version in re.findall(r" U (\w+)(?:@(\S+))?$", undefined, re.MULTILINE):
        if (version and not version.startswith(OTHER_VERSIONS)) or name.startswith(UNVERSIONED):
            names[version].add(name)
    with tempfile.TemporaryDirectory() as scratch:
        source, versions = Path(scratch, "cuda.c"), Path(scratch, "cuda.map")
        functions = sorted(set().union(*names.values()))
        source.write_text("".join(f"int {f}(void) {{ return {CUDA_ERROR_NO_DEVICE}; }}\n" for f in functions))
        versions.write_text("".join(f"{v} {{ {'; '.join(sorted(names[v]))}; }};\n" for v in sorted(names) if v))
        built = folder / "cuda_stand_in.so"
        run_command("gcc", "-w", "-shared", "-fPIC", f"-Wl,--version-script={versions}", "-o", built, source)
    needed = run_command("readelf", "-d", *libraries)
    for name in set(re.findall(r"NEEDED.*\[(lib(?:cu|nccl|nv)[^\]]*)\]", needed)):
        if not (folder / name).exists():
            (folder / name).symlink_to(built.name)


def rename_allocator_options(folder: Path) -> None:
    """Begin CUDA's names of `ALLOCATOR_OPTIONS` with an X. Nothing reads them without CUDA.

    The compiler stores a name as a whole and in constants of 16 bytes, so the first 16 are what is looked for."""
    library = folder / "libc10_cuda.so"
    contents = library.read_bytes()
    for name in ALLOCATOR_OPTIONS:
        contents = contents.replace(name[:16], b"X" + name[1:16])
    library.write_bytes(contents)


def forget_requirements() -> None:
    """Take CUDA's packages and NVIDIA's Triton out of torch's metadata, or pip installs them with the next package."""
    path = Path(str(distribution("torch").locate_file("")), f"torch-{distribution('torch').version}.dist-info/METADATA")
    path.write_text(re.sub(r"^Requires-Dist: (nvidia-|cuda-|triton).*\n", "", path.read_text(), flags=re.MULTILINE))


def main() -> None:
    spec = importlib.util.find_spec("torch")  # does not import it
    assert spec is not None and spec.submodule_search_locations, "torch is not installed"
    folder = Path(spec.submodule_search_locations[0], "lib")
    if (folder / "libtorch_cuda.so").exists():
        stand_in(folder)
        rename_allocator_options(folder)
        forget_requirements()


if __name__ == "__main__":
    main()
