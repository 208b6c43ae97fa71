"""The recorded table of compiled tiles (benchmarks/npu_tiles.py): of the tiles that are shipped, and in the docs."""

from __future__ import annotations

import importlib.util
import json
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest

from diyfa.arch import NPUArch, npu_spec
from diyfa.backends.npu.tables import configs
from diyfa.problem import AttentionProblem

ROOT = Path(__file__).parents[2]
RECORD = max((ROOT / "benchmarks" / "results").glob("npu-*-tiles.json"))


def script() -> Any:
    spec = importlib.util.spec_from_file_location("npu_tiles", ROOT / "benchmarks" / "npu_tiles.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return json.loads(RECORD.read_text())


def test_it_covers_every_chip_head_dim_mask_and_pass(document: dict[str, Any]) -> None:
    tiles = script()
    found = {(r["chip"], r["D"], r["mask"], r["pass"]) for r in document["rows"] if r["kernel"] == "diyfa"}
    chips = chain.from_iterable(tiles.CHIPS)
    assert found == set(product(chips, tiles.HEAD_DIMS, tiles.MASKS, tiles.KERNELS))
    assert document["versions"]["ascendnpu-ir"]
    assert document["versions"]["triton-ascend"]
    assert document["date"]


def test_its_tiles_are_those_shipped(document: dict[str, Any]) -> None:
    """When a tile in the table changes that compiled, benchmarks/npu_tiles.py has to run again."""
    sizes = {"batch": 2, "heads_q": 16, "heads_kv": 16, "seqlen_q": 8192, "seqlen_k": 8192}
    for row in document["rows"]:
        if row["kernel"] != "diyfa" or "error" in row:
            continue
        right = script().MASKS[row["mask"]]
        problem = AttentionProblem(
            "npu",
            row["chip"],
            row["dtype"],
            "bhsd",
            head_dim=row["D"],
            head_dim_v=row["D"],
            window_right=right,
            **sizes,
        )
        tile = configs.attention_tile(problem, row["pass"])
        assert row["tile"] == f"{tile.block_m}x{tile.block_n}", row


def test_what_is_shipped_compiled_and_fits(document: dict[str, Any]) -> None:
    for row in document["rows"]:
        if row["kernel"] != "diyfa" or (row["chip"].startswith("Ascend950") and "error" in row):
            continue
        assert "error" not in row, row
        spec = npu_spec(row["chip"])
        assert spec is not None
        known = ("ub", "l1", "l0c") if spec.arch is NPUArch.A5 else ("ub", "l1", "l0a", "l0b", "l0c")
        for memory in known:
            assert 0 < row[f"{memory}_kib"] * 1024 <= getattr(spec, memory), row
        assert 0 < row["predicted_share_of_cube_peak"] < 1
        if not row["chip"].startswith("Ascend950"):
            assert row["bound"] and row["pipelined"] == 4, row


def test_the_docs_show_the_tiles_that_are_shipped() -> None:
    """When it fails: python benchmarks/npu_tiles.py --rows."""
    text = (ROOT / "docs/log/ascend-tiles.md").read_text(encoding="utf-8")
    shown = text.split("<!-- tiles -->\n")[1].split("<!-- end of tiles -->")[0].strip()
    assert shown == script().rows_of_the_table()


def test_the_docs_show_it(document: dict[str, Any]) -> None:
    text = (ROOT / "docs/log/ascend-tiles.md").read_text(encoding="utf-8")
    shown = text.split("<!-- compiled -->\n")[1].split("<!-- end of compiled -->")[0].strip()
    assert shown == script().markdown(document)
    assert RECORD.name in text
