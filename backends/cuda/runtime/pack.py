"""Packs: the binaries of many kernels for one architecture in one file, which `diyfa pack` makes.

A pack is the file `binaries.pack` of an installed module: `diyfa_sm90` for sm_90. It begins with a header of a fixed
size and the index, so that a kernel is read and unpacked alone. Index and kernels have checksums. A pack that is not as
it should be is not used, and no call fails for it: a line in the log names the file and the reason, once in a process.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import zlib
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from diyfa.backends.cuda.runtime.binaries import StoredBinary, checksum, packed, source_hash, unpacked

log = logging.getLogger(__name__)
FILE_NAME = "binaries.pack"
FORMAT = 1
_HEADER = struct.Struct("<8sII16s")  # magic, format, bytes of the index, its checksum
_MAGIC = b"DIYFAPAK"
_INDEX, _DICTIONARY = "index", "dictionary"  # what their checksums are made with in place of a kernel's key


class PackError(ValueError):
    """Why a pack is not used."""


def module_name(arch: str) -> str:
    """`"sm_90"` -> `"diyfa_sm90"`."""
    return f"diyfa_{arch.replace('_', '')}"


def write_pack(path: Path, arch: str, binaries: Mapping[str, StoredBinary], sources: str | None = None) -> None:
    """Write a pack of `binaries` by their keys. `sources`: the hash that it is valid for, by default of these ones."""
    data = {key: packed(binary) for key, binary in sorted(binaries.items())}
    dictionary = _dictionary(list(data.values()))
    entries: dict[str, tuple[int, int, str]] = {}  # key -> (offset behind the index, bytes, checksum)
    parts = [dictionary]
    offset = len(dictionary)
    for key, each in data.items():
        compressor = zlib.compressobj(9, zdict=dictionary)
        part = compressor.compress(each) + compressor.flush()
        entries[key] = offset, len(part), checksum(key, each).hex()
        parts.append(part)
        offset += len(part)
    content = {
        "arch": arch, "sources": sources or source_hash(), "dictionary": [len(dictionary), _hex(dictionary)],
        "entries": entries,
    }  # fmt: skip
    index = zlib.compress(json.dumps(content).encode(), 9)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(_HEADER.pack(_MAGIC, FORMAT, len(index), checksum(_INDEX, index)))
        file.write(index)
        file.writelines(parts)
    os.replace(temporary, path)


def _hex(dictionary: bytes) -> str:
    return checksum(_DICTIONARY, dictionary).hex()


def _dictionary(binaries: list[bytes]) -> bytes:
    """Bytes that binaries have in common, by which each is compressed."""
    return b""


class Pack:
    """An open pack."""

    def __init__(self, path: Path, index: dict[str, Any], begin: int, dictionary: bytes) -> None:
        self.path, self._begin, self._dictionary = path, begin, dictionary
        self.arch: str = index["arch"]
        self.sources: str = index["sources"]
        self._entries: dict[str, tuple[int, int, str]] = index["entries"]

    def __len__(self) -> int:
        return len(self._entries)

    @classmethod
    def open(cls, path: Path, arch: str) -> Pack:
        """Read the index. Raises PackError, with the reason, where this is no pack of these sources and `arch`."""
        try:
            with path.open("rb") as file:
                head = file.read(_HEADER.size)
                if len(head) < _HEADER.size or not head.startswith(_MAGIC):
                    raise PackError("it is no pack")
                _, version, size, expected = _HEADER.unpack(head)
                if version != FORMAT:
                    raise PackError(f"its format is {version}, this diyfa reads {FORMAT}")
                index = file.read(size)
                if checksum(_INDEX, index) != expected:
                    raise PackError("its index is damaged: install it again")
                content = json.loads(zlib.decompress(index))
                if content["arch"] != arch:
                    raise PackError(f"it is for {content['arch']}, not for {arch}")
                if content["sources"] != source_hash():
                    raise PackError("it was made from other sources than this diyfa: install the one of this version")
                length, of_dictionary = content["dictionary"]
                dictionary = file.read(length)
        except OSError as error:
            raise PackError(f"it cannot be read ({error.strerror})") from error
        if _hex(dictionary) != of_dictionary:
            raise PackError("it is damaged: install it again")
        return cls(path, content, _HEADER.size + size, dictionary)

    def get(self, key: str) -> StoredBinary | None:
        """Return the binary with this key; None, with a warning where it is damaged, if there is none."""
        place = self._entries.get(key)
        if place is None:
            return None
        offset, size, expected = place
        try:
            with self.path.open("rb") as file:
                file.seek(self._begin + offset)
                part = file.read(size)
            data = zlib.decompressobj(zdict=self._dictionary).decompress(part)
        except (OSError, zlib.error):
            data = b""
        if checksum(key, data).hex() != expected:
            _warn(self.path, "it is damaged: install it again")
            return None
        return unpacked(data)


@cache
def _warn(path: Path, reason: str) -> None:
    log.warning("diyfa does not use %s: %s", path, reason)


def file_of_pack(arch: str) -> Path | None:
    """Return the file of the pack that is installed for `arch`, or None."""
    try:
        spec = find_spec(module_name(arch))
    except (ImportError, ValueError):
        return None
    folders = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(folders))) / FILE_NAME if folders else None


class Installed(NamedTuple):
    """The pack of an architecture, or why there is none."""

    pack: Pack | None
    reason: str


@cache
def installed(arch: str) -> Installed:
    """Return the pack that is installed for `arch`, with a warning where it is refused."""
    path = file_of_pack(arch)
    if path is None:
        return Installed(None, f"no pack for {arch} is installed")
    try:
        return Installed(Pack.open(path, arch), "")
    except PackError as error:
        _warn(path, str(error))
        return Installed(None, f"{path} is not used: {error}")
