"""The tile table's file, `tiles.json`: search.py writes it, configs.py reads it. It needs neither Triton nor a device.

A row is one line. It has the chips it is for ("Ascend910B/20" is the 910B with 20 cube cores), kernel, operand width,
head-dim class and mode; the tile with the compiler's options; and its origin: whether the compiler bound and pipelined
it, the number of candidates, the predicted share of the cube peak on each chip, compilers and date.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from diyfa.arch import npu_spec

PATH = Path(__file__).with_name("tiles.json")


class RowKey(NamedTuple):
    """Key of a tile, without the chip."""

    kernel: str  # "fwd", "dq", "dkdv", "dbias"
    width: int  # bytes of an operand element
    head_dim: int  # the largest head dim of the class
    mode: str


@dataclass(frozen=True)
class Row:
    """One row of the file. Fields have the meaning of `configs.TileKey` and `configs.AttentionTile`."""

    chips: tuple[str, ...]
    kernel: str
    width: int
    head_dim: int
    mode: str
    block_m: int
    block_n: int
    workspace_buffers: int
    vector_loop: int | None
    cube_loop: int | None
    bound: bool
    pipelined: int
    predicted_share: dict[str, float] = field(default_factory=dict)  # of the cube peak, by chip; not timed
    tried: int = 0  # candidates that compiled
    failed: int | None = None  # candidates that did not compile; None: not recorded
    pruned: int | None = None  # not compiled: the model could not have preferred them, or their options change nothing
    left: int = 0  # candidates not compiled because of the search's budget
    compilers: str = ""
    date: str = ""

    @property
    def key(self) -> RowKey:
        return RowKey(self.kernel, self.width, self.head_dim, self.mode)

    @property
    def tile(self) -> tuple[Any, ...]:
        """The tile's shape and options. Rows of two chips that agree in it are one row."""
        return (
            self.block_m, self.block_n, self.workspace_buffers, self.vector_loop, self.cube_loop, self.bound,
            self.pipelined,
        )  # fmt: skip


def chip_class(arch: str) -> str:
    """Return family and number of cube cores, such as "Ascend910B/20". Tiles depend on nothing else of a chip."""
    spec = npu_spec(arch)
    if spec is None:
        raise ValueError(f"unknown Ascend chip {arch!r}")
    return f"{spec.arch.value}/{spec.cube_cores}"


def load(path: Path = PATH) -> list[Row]:
    """Return the rows of the file, [] without a file."""
    if not path.exists():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [Row(**{**row, "chips": tuple(row["chips"])}) for row in rows]


def merged(rows: Iterable[Row], new: Row) -> list[Row]:
    """Return `rows` with `new` in place of the rows for its chips. A row equal in tile and origin takes its chips."""
    result = []
    for row in rows:
        if row.key == new.key and set(row.chips) & set(new.chips):
            chips = tuple(chip for chip in row.chips if chip not in new.chips)
            shares = {chip: share for chip, share in row.predicted_share.items() if chip in chips}
            if not chips:
                continue
            row = _replaced(row, chips, shares)
        result.append(row)
    for i, row in enumerate(result):
        if row.key == new.key and row.tile == new.tile and (row.compilers, row.date) == (new.compilers, new.date):
            chips = tuple(sorted({*row.chips, *new.chips}))
            result[i] = _replaced(row, chips, dict(sorted((row.predicted_share | new.predicted_share).items())))
            return result
    return sorted([*result, new], key=lambda row: (row.kernel != "fwd", row.key, row.chips))


def _replaced(row: Row, chips: tuple[str, ...], shares: dict[str, float]) -> Row:
    return Row(**{**asdict(row), "chips": chips, "predicted_share": shares})


def save(rows: Iterable[Row], path: Path = PATH) -> None:
    """Write `rows` to the file, one per line."""
    lines = ",\n".join("  " + json.dumps(asdict(row)) for row in rows)
    about = json.dumps("written by python -m diyfa.lab.npu.search; shares are predicted by cost.py, nothing is timed")
    text = f'{{\n "about": {about},\n "rows": [\n{lines}\n ]\n}}\n'
    path.write_text(text, encoding="utf-8")
