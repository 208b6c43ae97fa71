"""The version of Triton, for code that differs between versions."""

from __future__ import annotations

import triton

TRITON: tuple[int, int] = tuple(int(number) for number in triton.__version__.split(".")[:2])  # type: ignore[assignment]
