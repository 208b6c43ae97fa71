"""`benchmarks/ascend_first_run.py` from end to end on real torch_npu, at its smallest."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(os.environ.get("DIYFA_HOST_SHIM") != "1", reason="the script itself is for a real NPU")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run_the_script(path: Path, *arguments: str) -> dict:
    """What it writes."""
    from npu_interpreter import HostArithmetic

    from diyfa.bench import timing

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        patch.setattr(timing, "FLUSH_BYTES", 4096)  # there is no cache to flush
        import ascend_first_run

        with HostArithmetic():
            status = ascend_first_run.main(["--smoke", "--output", str(path), *arguments])
        sys.modules.pop("ascend_first_run"), sys.modules.pop("ascend_cases")
    assert status == 0, "numerics failed"
    return json.loads(path.read_text())


def rows(document: dict, table: str) -> list[dict]:
    return [row for row in document["rows"] if row["table"] == table]


def check_it_says_where_it_ran(document: dict) -> None:
    assert document["benchmark"] == "ascend first run" and document["smoke"] is True
    assert document["device"] == "Ascend910B3" and document["chip"]["cube_cores"] == 20
    assert document["versions"]["torch_npu"] and {row["table"] for row in document["rows"]} == {
        "numerics", "equivalence", "tiles", "attention"
    }  # fmt: skip


def check_numerics_pass_in_every_dtype(document: dict) -> None:
    found = rows(document, "numerics")
    assert {row["status"] for row in found} == {"pass"}, [row for row in found if row["status"] != "pass"]
    assert {row["dtype"] for row in found} == {"float16", "bfloat16", "float32"}
    assert all(0 <= row["share"] <= 1 for row in found if "share" in row)
    assert {row["variant"] for row in found} == {"auto", "v1"} and len(found) >= 54


def check_the_operator_is_refused_with_the_reason(document: dict) -> None:
    """Compute operators do not exist on the shim, so the vendor's cannot be compared here; diyfa's form of it can."""
    found = rows(document, "equivalence")
    theirs = [row for row in found if row["implementation"] == "torch_npu"]
    ours = [row for row in found if row["implementation"] == "diyfa"]
    assert len(theirs) == len(ours) >= 18
    assert all(row["unavailable"].startswith("refused: RuntimeError") for row in theirs), theirs
    for row in ours:
        assert max(row["max_error"].values()) < 2e-2, row


def check_tiles_are_timed(document: dict) -> None:
    found = rows(document, "tiles")
    assert {row["kernel"] for row in found} == {"fwd", "dq", "dkdv"}
    assert all(row["ms"] > 0 for row in found) and sum(row["default"] for row in found) == 6
    assert len(found) > 6


def check_attention_is_timed_beside_the_operator(document: dict) -> None:
    found = rows(document, "attention")
    names = {"diyfa", "diyfa tuned", "torch_npu"}
    for causal in (False, True):
        assert {row["implementation"] for row in found if row["causal"] is causal} == names
    for row in found:
        if row["implementation"] == "torch_npu":
            assert row["unavailable"].startswith("refused: RuntimeError")
        else:
            assert row["ms"] > 0 and row["pass"] in ("forward", "backward")


def check_the_table_of_tiles_is_as_before(document: dict) -> None:
    from diyfa.backends.npu.tables import configs

    assert dict(configs._rows()) == configs.ATTENTION_TILES


def test_first_run(npu: torch.device, tmp_path: Path) -> None:
    """One run, for which one process is enough."""
    document = run_the_script(tmp_path / "out.json")
    check_it_says_where_it_ran(document)
    check_numerics_pass_in_every_dtype(document)
    check_the_operator_is_refused_with_the_reason(document)
    check_tiles_are_timed(document)
    check_attention_is_timed_beside_the_operator(document)
    check_the_table_of_tiles_is_as_before(document)


def test_a_tile_that_does_not_compile_is_reported(
    npu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table's forward tile: the other tiles are timed, and with the best of them both passes."""
    from diyfa.backends.npu.attention import fwd
    from diyfa.backends.npu.tables import configs

    shipped = dict(configs.ATTENTION_TILES)

    def refusing(problem):
        tile = configs.fwd_tile(problem)
        if tile == shipped[configs.attention_key(problem, "fwd")]:
            raise RuntimeError("ub overflow")
        return tile

    monkeypatch.setattr(fwd, "fwd_tile", refusing)
    document = run_the_script(tmp_path / "out.json", "--only", "tiles", "attention")
    tiles = [row for row in rows(document, "tiles") if row["kernel"] == "fwd"]
    refused = [row for row in tiles if "unavailable" in row]
    assert refused and all("ub overflow" in row["unavailable"] and row["default"] for row in refused)
    assert len(refused) < len(tiles)
    assert all("ms" in row for row in rows(document, "tiles") if row["kernel"] != "fwd")
    timed = {(row["implementation"], row["pass"]) for row in rows(document, "attention") if "ms" in row}
    assert timed >= {("diyfa tuned", "forward"), ("diyfa tuned", "backward")}
