"""Packs: the binaries of many kernels for one architecture in one file, which `write_pack` makes.

A pack is the file `binaries.pack` of an installed module: `diyfa_sm90` for sm_90. It begins with a header of fixed size
and the index, so that each kernel can be read and unpacked alone. Index and kernels have checksums. A pack with an
error is not used, but no call fails because of it: a line in the log names the file and the reason, once per process.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from diyfa.backends.cuda.runtime.binaries import StoredBinary, checksum, packed, source_hash, unpacked

log = logging.getLogger(__name__)
FILE_NAME = "binaries.pack"
FORMAT = 1
_MAGIC = b"DIYFAPAK"
_HEADER = struct.Struct("<8sII16s")  # magic, format, bytes of the index, its checksum
_REINSTALL = "install it again"


class PackError(ValueError):
    """The reason for which a pack is not used."""


def module_name(arch: str) -> str:
    """Return the name of an architecture's module: `"diyfa_sm90"` for `"sm_90"`."""
    return f"diyfa_{arch.replace('_', '')}"


def _compression() -> Any:
    """Return (Python's lzma, its arguments). They say that instructions have 16 bytes. Some Pythons have no lzma."""
    import lzma

    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 4, "pb": 4}]
    return lzma, {"format": lzma.FORMAT_RAW, "filters": filters}


def without_debug(cubin: bytes) -> bytes:
    """Return a cubin with zeros for its debug sections: the kernel's PTX, and paths of the machine that compiled it.

    They are three quarters of a cubin. A compiler option that omits them would change how it allocates registers.
    """
    (sections,) = struct.unpack_from("<Q", cubin, 40)
    size, count, name_section = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, sections + i * size) for i in range(count)]
    names = headers[name_section][4]
    cleared = bytearray(cubin)
    for name, _, _, _, offset, length in headers:
        if cubin.startswith((b".debug_", b".nv_debug_"), names + name):
            cleared[offset : offset + length] = bytes(length)
    return bytes(cleared)


def write_pack(path: Path, arch: str, binaries: Mapping[str, StoredBinary]) -> None:
    """Write a pack of `binaries` by their keys, which must be those of the current sources."""
    lzma, options = _compression()

    def compressed(key: str) -> bytes:
        binary = binaries[key]
        return lzma.compress(packed(binary._replace(cubin=without_debug(binary.cubin))), **options)

    keys = sorted(binaries)
    with ThreadPoolExecutor() as threads:  # lzma releases Python's lock
        blocks = list(threads.map(compressed, keys))
    entries: dict[str, tuple[int, int, str]] = {}  # key -> (offset behind the index, bytes, checksum)
    offset = 0
    for key, block in zip(keys, blocks, strict=True):
        entries[key] = offset, len(block), checksum(key, block).hex()
        offset += len(block)
    content = {"arch": arch, "sources": source_hash(), "entries": entries}
    index = zlib.compress(json.dumps(content).encode(), 9)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(_HEADER.pack(_MAGIC, FORMAT, len(index), checksum("index", index)))
        file.write(index)
        file.writelines(blocks)
    os.replace(temporary, path)


class Pack:
    """An open pack."""

    def __init__(self, path: Path, entries: dict[str, tuple[int, int, str]], begin: int) -> None:
        self.path, self._entries, self._begin = path, entries, begin

    def __len__(self) -> int:
        return len(self._entries)

    @classmethod
    def open(cls, path: Path, arch: str) -> Pack:
        """Open a pack and read its index. Raises PackError, with the reason, if it is not usable for `arch`."""
        try:
            _compression()
            with path.open("rb") as file:
                head = file.read(_HEADER.size)
                if len(head) < _HEADER.size or not head.startswith(_MAGIC):
                    raise PackError(f"it is no pack: {_REINSTALL}")
                _, version, size, expected = _HEADER.unpack(head)
                if version != FORMAT:
                    raise PackError(f"its format is {version}, and this diyfa reads {FORMAT}")
                # Compared with the file first: a damaged size may be more than fits into memory.
                index = file.read(size) if size <= os.fstat(file.fileno()).st_size else b""
            if checksum("index", index) != expected:
                raise PackError(f"its index is damaged: {_REINSTALL}")
        except OSError as error:
            raise PackError(f"it cannot be read: {error.strerror}") from error
        except ImportError as error:
            raise PackError(f"this Python has no lzma: {error}") from error
        content = json.loads(zlib.decompress(index))
        if content["arch"] != arch:
            raise PackError(f"it is for {content['arch']}, not for {arch}")
        if content["sources"] != source_hash():
            raise PackError("it was made from other sources than this diyfa: install the pack of this version")
        return cls(path, content["entries"], _HEADER.size + size)

    def get(self, key: str) -> StoredBinary | None:
        """Return the binary with this key, or None if there is none or, with a line in the log, it is damaged."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        offset, size, expected = entry
        try:
            with self.path.open("rb") as file:
                file.seek(self._begin + offset)
                block = file.read(size)
        except OSError as error:
            _warn(self.path, f"it cannot be read: {error.strerror}")
            return None
        if checksum(key, block).hex() != expected:
            _warn(self.path, f"a kernel in it is damaged: {_REINSTALL}")
            return None
        lzma, options = _compression()
        return unpacked(lzma.decompress(block, **options))


@cache
def _warn(path: Path, reason: str) -> None:
    log.warning("diyfa does not use %s: %s", path, reason)


def pack_file(arch: str) -> Path | None:
    """Return the file of the pack that is installed for `arch`, or None."""
    try:
        spec = find_spec(module_name(arch))
    except (ImportError, ValueError):
        return None
    folders = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(folders))) / FILE_NAME if folders else None


class Installed(NamedTuple):
    """The pack of an architecture, or the reason why it has none."""

    pack: Pack | None
    reason: str


_rejected_packs: dict[str, str] = {}  # architecture -> why its pack, after it was opened, is not used any more


def reject_pack(arch: str, reason: str) -> bool:
    """Stop using the pack of `arch`, with a line in the log. Return whether one was in use."""
    pack = installed(arch).pack
    if pack is None:
        return False
    _warn(pack.path, reason)
    _rejected_packs[arch] = f"{pack.path} is not used: {reason}"
    installed.cache_clear()
    return True


@cache
def installed(arch: str) -> Installed:
    """Return the pack that is installed for `arch`, with a line in the log if it is refused."""
    if arch in _rejected_packs:
        return Installed(None, _rejected_packs[arch])
    path = pack_file(arch)
    if path is None:
        return Installed(None, f"no pack for {arch} is installed")
    try:
        return Installed(Pack.open(path, arch), "")
    except PackError as error:
        _warn(path, str(error))
        return Installed(None, f"{path} is not used: {error}")
