"""Which Triton this is, for what differs between its versions."""

from __future__ import annotations

import triton

TRITON: tuple[int, int] = tuple(int(part) for part in triton.__version__.split(".")[:2])  # type: ignore[assignment]
