"""Selection of the attention kernels to compile, by kernel, dtype, head dim, mode and tile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from diyfa.arch import ELEMENT_BYTES
from diyfa.backends.npu.tables import configs
from diyfa.lab.npu.specs import Job, attention_job, example_case, mode_case

KERNELS = ("fwd", "dq", "dkdv", "dbias")


@dataclass(frozen=True)
class Selection:
    """Every combination of the values that its fields list. Without tiles and options, the table's tiles."""

    kernel: tuple[str, ...] = ("fwd", "dq", "dkdv")
    dtype: tuple[str, ...] = ("float16",)
    head_dim: tuple[int, ...] = (128,)
    mode: tuple[str, ...] = ("even", "causal")
    tile: tuple[tuple[int, int], ...] = ()  # query rows, keys
    workspace_buffers: int | None = None
    vector_loop: int | None = None
    cube_loop: int | None = None

    def __post_init__(self) -> None:
        choices: dict[str, tuple[Any, ...]] = {"kernel": KERNELS, "dtype": tuple(ELEMENT_BYTES), "mode": configs.MODES}
        for name, values in choices.items():
            for value in getattr(self, name):
                if value not in values:
                    raise ValueError(f"unknown {name} {value!r}: expected one of {', '.join(values)}")
        for head_dim in self.head_dim:
            if not 1 <= head_dim <= configs.HEAD_DIM_CLASSES[-1]:
                raise ValueError(f"head_dim must be in [1, {configs.HEAD_DIM_CLASSES[-1]}], got {head_dim}")
        for rows, keys in self.tile:
            if rows < 16 or keys < 16 or rows % 16 or keys % 16:
                raise ValueError(f"tile {rows}x{keys}: the cube unit takes multiples of 16")

    def tiles(self, row: configs.AttentionTile) -> Iterator[configs.AttentionTile]:
        """Yield `row`, or the tiles and options that the selection asks for instead."""
        names = ("workspace_buffers", "vector_loop", "cube_loop")
        options = {name: value for name in names if (value := getattr(self, name)) is not None}
        if not self.tile and not options:
            yield row
            return
        for rows, keys in self.tile or ((row.block_m, row.block_n),):
            shape: dict[str, Any] = {"block_m": rows, "block_n": keys, "measured": "asked for"}
            yield replace(row, bound=False, pipelined=0, **shape, **options)


def selected_jobs(target: str, select: Mapping[str, Any]) -> Iterator[Job]:
    """Yield the jobs of a `Selection` with the fields `select`. Raises ValueError for unknown fields or values."""
    unknown = set(select) - {f.name for f in fields(Selection)}
    if unknown:
        raise ValueError(f"cannot select by {', '.join(sorted(unknown))}")
    chosen = Selection(**{name: value for name, value in select.items() if value not in (None, ())})
    if not any(mode in configs.modes(kernel) for kernel in chosen.kernel for mode in chosen.mode):
        # "dbias" is the only kernel that lacks some modes.
        raise ValueError(
            f"dbias has no mode {' or '.join(chosen.mode)}: expected one of {', '.join(configs.DBIAS_MODES)}"
        )
    for dtype in chosen.dtype:
        for head_dim in chosen.head_dim:
            for mode in chosen.mode:
                for kernel in chosen.kernel:
                    if mode in configs.modes(kernel):
                        yield from _jobs(target, chosen, kernel, dtype, head_dim, mode)


def _jobs(target: str, chosen: Selection, kernel: str, dtype: str, head_dim: int, mode: str) -> Iterator[Job]:
    problem, dims = example_case(target, {**mode_case(kernel, mode), "dtype": dtype, "head_dim": head_dim})
    row = configs.attention_tile(problem, kernel)
    for tile in chosen.tiles(row):
        # The gate does not apply to a tile that is not shipped.
        yield replace(attention_job(problem, kernel, tile, bias=dims), gated=tile is row)
