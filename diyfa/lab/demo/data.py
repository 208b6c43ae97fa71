"""Text for the demo that every Python installation has: the sources of its standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

SKIPPED = ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3")


def standard_library_text(limit: int = 3_000_000) -> bytes:
    """Return up to `limit` bytes of the standard library's Python files, in alphabetical order.

    Raises FileNotFoundError if the interpreter has no such files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if any(folder_name in SKIPPED for folder_name in path.relative_to(root).parts):
            continue
        text += path.read_bytes()
        if len(text) >= limit:
            return bytes(text[:limit])
    if not text:
        raise FileNotFoundError(f"no Python sources in {root}")
    return bytes(text)


class Batches:
    """Random windows of a text. "train" windows come from its first nine tenths, "held-out" ones from the rest."""

    def __init__(self, text: bytes, context: int, batch: int, seed: int, device: torch.device) -> None:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        cut = len(data) * 9 // 10
        if len(data) - cut <= context + 1:
            raise ValueError(f"the text is too short for a context of {context}: {len(data)} bytes")
        self._splits = {"train": data[:cut], "held-out": data[cut:]}
        self._context, self._batch, self._device = context, batch, device
        self._generator = torch.Generator().manual_seed(seed)

    def next(self, split: str = "train") -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and next-byte targets, both (batch, context) int64 on the device."""
        data = self._splits[split]
        starts = torch.randint(len(data) - self._context - 1, (self._batch,), generator=self._generator, device="cpu")
        windows = torch.stack([data[i : i + self._context + 1] for i in starts.tolist()]).long().to(self._device)
        return windows[:, :-1], windows[:, 1:]
