"""Writing a wheel, a zip file with a little metadata, in the format of PEP 427."""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

_DATE = (2020, 1, 1, 0, 0, 0)  # date of all files, so that equal contents make equal wheels


def write_wheel(
    folder: Path, name: str, version: str, summary: str, files: Mapping[str, bytes], local: str = ""
) -> Path:
    """Write the wheel of a package that requires this version of diyfa and holds `files` (content by path).

    `name` is the module's, as in "diyfa_sm90". Files are stored without compression, since packs are compressed.
    `local` is added to the wheel's own version, as in 1.2+some. Returns the wheel's path.
    """
    full_version = f"{version}+{local}" if local else version
    path = folder / f"{name}-{full_version}-py3-none-any.whl"
    info = f"{name}-{full_version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {full_version}\nSummary: {summary}\n"
    contents = {
        **files,
        f"{info}/METADATA": f"{metadata}Requires-Python: >=3.10\nRequires-Dist: diyfa=={version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: diyfa pack\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{file},sha256={_digest(content)},{len(content)}" for file, content in contents.items()]
    contents[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as wheel:
            for file, content in contents.items():
                entry = zipfile.ZipInfo(file, _DATE)
                entry.external_attr = 0o644 << 16
                wheel.writestr(entry, content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
