"""Storage of compiled kernels outside of a process: their format, their keys, and the look-up.

A kernel that is new to the process is looked up in the pack of the GPU's architecture (`pack.py`), then in the user's
cache folder, and only then compiled (`jit.py`). All three use the same key, which does not depend on the process, the
platform or the installed Triton.
"""

from __future__ import annotations

import dataclasses
import json
import os
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import triton
import triton.language as tl

from diyfa.backends.cuda.runtime.launch import COMPILE_OPTIONS, LOADED_AT
from diyfa.backends.cuda.runtime.signature import Signature, kernel_source
from diyfa.problem import Launch
from diyfa.tuning import cache_dir

_PACKAGE = Path(__file__).parents[1]
_MODULES = "diyfa.backends.cuda."
# These options choose the ptxas, by the installed Triton. They do not change the kernel.
_TOOL_OPTIONS = frozenset({"ptx_version"})
# Environment variables with which Triton makes other binaries of the same sources: slower ones, or ones that check
# themselves. They are in the keys of Triton's own cache.
_COMPILER_VARIABLES = (
    "DISABLE_LLVM_OPT", "DISABLE_MMA_V3", "DISABLE_PTXAS_OPT", "LLVM_PASS_PLUGIN_PATH", "PTXAS_OPTIONS",
    "TRITON_DEBUG", "TRITON_ENABLE_ASAN", "TRITON_ENABLE_EXPERIMENTAL_CONSAN", "TRITON_INSTRUMENTATION_MODE",
    "TRITON_KERNEL_OVERRIDE", "TRITON_LIBDEVICE_PATH", "TRITON_MOCK_PTX_VERSION", "TRITON_OVERRIDE_ARCH",
)  # fmt: skip
_OFF = ("", "0", "false", "off", "no", "n")


class StoredBinary(NamedTuple):
    """All that a launch needs of a compiled kernel."""

    cubin: bytes
    name: str  # name of the kernel's function in the cubin
    shared: int  # bytes of shared memory
    num_warps: int
    launch_pdl: bool
    boxes: tuple[tuple[tuple[int, ...], int], ...]  # per tensor map: (box of one copy, swizzle)
    scratch: int  # number of pointers that the kernel takes behind its arguments


def packed(binary: StoredBinary) -> bytes:
    """Return `binary` as bytes: the length of the description, the description, the cubin."""
    cubin, *rest = binary
    description = json.dumps(rest, separators=(",", ":")).encode()
    return len(description).to_bytes(4, "little") + description + cubin


def unpacked(data: bytes) -> StoredBinary:
    """Return the binary of `packed` bytes, whose checksum must have been checked."""
    end = 4 + int.from_bytes(data[:4], "little")
    name, shared, num_warps, launch_pdl, boxes, scratch = json.loads(data[4:end])
    placed = tuple((tuple(box), swizzle) for box, swizzle in boxes)
    return StoredBinary(data[end:], name, shared, num_warps, launch_pdl, placed, scratch)


def checksum(key: str, data: bytes) -> bytes:
    """Return 16 bytes that tell whether `data` is what was stored under the key."""
    return blake2b(data, digest_size=16, key=key.encode()).digest()


# ---- The key ------------------------------------------------------------------------------------------------------


@cache
def _sources() -> dict[str, Path]:
    """Return the files that determine binaries, by name: kernels, and the code that describes them to the compiler."""
    files = {path.relative_to(_PACKAGE).as_posix(): path for path in _PACKAGE.rglob("*.py")}
    return dict(sorted(files.items()))


@cache
def source_hash() -> str:
    """Return a hash of the sources."""
    digest = blake2b(digest_size=16)
    for name, path in _sources().items():
        text = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def why_unknown() -> str | None:
    """Return why this process can use neither packs nor the cache folder for its kernels, or None."""
    if triton.knobs.compilation.always_compile:
        return "TRITON_ALWAYS_COMPILE is set"
    if variables := [name for name in _COMPILER_VARIABLES if os.environ.get(name, "").lower() not in _OFF]:
        return f"{variables[0]} is set"
    try:
        source_hash()
        times = [time for x in map(os.stat, _sources().values()) for time in (x.st_mtime, x.st_ctime)]
    except OSError as error:
        return f"diyfa's files cannot be read: {error.strerror}"
    if max(times) > LOADED_AT - 0.02:  # file systems round times
        return "diyfa's files were changed after this process began"  # it may have loaded either version
    return None


def _text(value: Any) -> str:
    """Return a constant as text, which is equal in every process."""
    if dataclasses.is_dataclass(value):
        each = ", ".join(f"{x.name}={_text(getattr(value, x.name))}" for x in dataclasses.fields(value))
        return f"{type(value).__qualname__}({each})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, tl.dtype):
        return str(value)
    if value is None or type(value) in (bool, int, float, str):
        return repr(value)
    raise TypeError(f"a kernel's constant is a plain value or a dtype of Triton's, got {value!r}")


def binary_key(arch: str, launch: Launch, signature: Signature) -> str:
    """Return the key of the binary that runs `launch` on `arch`: a hash of all that it is compiled from."""
    function, source = launch.kernel.fn, kernel_source(launch, signature)
    # Triton's hash of a kernel reads the source of all that it calls. It is used only for kernels that are not diyfa's.
    is_of_package = function.__module__.startswith(_MODULES)
    options = {**COMPILE_OPTIONS, **launch.options}
    lines = [
        arch,
        f"{function.__module__}.{function.__qualname__}",
        source_hash() if is_of_package else launch.kernel.cache_key,
        *[f"{name}: {kind}" for name, kind in source.types.items()],
        *[f"{name} = {_text(value)}" for name, value in source.constants.items()],
        f"multiples of 16: {sorted(source.aligned)}",
        *[f"{name}: {_text(options[name])}" for name in sorted(options.keys() - _TOOL_OPTIONS)],
    ]
    return blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


# ---- The cache folder ---------------------------------------------------------------------------------------------


class BinaryFolder:
    """A folder with a file for each binary, which several processes may use.

    A file is written under another name and renamed, so that it is whole or absent. A binary that cannot be written is
    not stored. A file that cannot be read or fails its checksum counts as absent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, key: str) -> StoredBinary | None:
        try:
            content = (self.path / key).read_bytes()
        except OSError:
            return None
        data = content[16:]
        return unpacked(data) if checksum(key, data) == content[:16] else None

    def put(self, key: str, binary: StoredBinary) -> bool:
        """Store a binary and return whether that succeeded."""
        data = packed(binary)
        temporary = self.path / f"{key}.{os.getpid()}-{os.urandom(4).hex()}.tmp"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_bytes(checksum(key, data) + data)
                os.replace(temporary, self.path / key)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        except OSError:
            return False
        return True


def cache_folder() -> BinaryFolder | None:
    """Return the user's folder for binaries of this Triton, or None if there is no home folder."""
    base = cache_dir("binaries")
    return None if base is None else BinaryFolder(base / f"triton-{triton.__version__}")


# ---- The look-up --------------------------------------------------------------------------------------------------


def find_binary(arch: str, key: str) -> StoredBinary | None:
    """Return the binary that the pack or the cache folder has, or None if it must be compiled."""
    from diyfa.backends.cuda.runtime.pack import installed

    pack, folder = installed(arch).pack, cache_folder()
    binary = None if pack is None else pack.get(key)
    if binary is None and folder is not None:
        binary = folder.get(key)
    return binary


def stored_binary(arch: str, launch: Launch, signature: Signature) -> StoredBinary:
    """Return the binary that runs `launch`, from the pack, the cache folder or the compiler, which fills the folder."""
    key = None if why_unknown() else binary_key(arch, launch, signature)
    binary = None if key is None else find_binary(arch, key)
    if binary is None:
        from diyfa.backends.cuda.runtime.jit import compile_with_message

        binary = compile_with_message(arch, launch, signature)
        folder = cache_folder()
        if key is not None and folder is not None:
            folder.put(key, binary)
    return binary
