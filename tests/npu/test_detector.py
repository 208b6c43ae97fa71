"""The detector on every chip that torch_npu knows by name, as far as the families' members go.

One process imports torch_npu and forks before it opens a device; each child gets another chip from the shim.
"""

from __future__ import annotations

import json
import os

import pytest
import torch
from subprocesses import run_python

from diyfa.arch import NPU_SPECS, NPUArch, npu_spec

pytestmark = pytest.mark.skipif(os.environ.get("DIYFA_HOST_SHIM") != "1", reason="a real NPU is what it is")

UNLISTED = (
    "Ascend910_9363", "Ascend910_9382", "Ascend910_9391", "Ascend910_9392", "Ascend950DT_950x", "Ascend950DT_9571",
    "Ascend950DT_95A1", "Ascend950PR_957b",
)  # fmt: skip
OTHERS = ("Ascend910A", "Ascend910B", "Ascend910ProB", "Ascend910PremiumA", "Ascend310P3", "Ascend310B1")
# SocVersion numbers of torch_npu (NpuVariables.h) -> family
FAMILIES = {**dict.fromkeys(range(220, 225), NPUArch.A2), **dict.fromkeys(range(250, 257), NPUArch.A3), 260: NPUArch.A5}

CODE = """
import json, os, sys
import torch, torch_npu
import diyfa
from dataclasses import asdict
from types import SimpleNamespace
from diyfa.registry import load_backend

backend = load_backend("npu")

def look(soc, cores):
    os.environ["ACL_HOST_SHIM_SOC"], os.environ["ACL_HOST_SHIM_CUBE_CORES"] = soc, cores
    found = asdict(diyfa.detect_npu(1))
    found["arch"] = found["arch"].value
    refusal = backend.unsupported(SimpleNamespace(arch=backend.arch(torch.device("npu", 1))))
    return {"soc": soc, "version": torch_npu._C._npu_get_soc_version(), **found, "refusal": refusal}

for soc, cores in json.loads(os.environ["CHIPS"]):
    if os.fork() == 0:
        print(json.dumps(look(soc, cores)), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, soc
"""


def look_at_chips() -> dict[tuple[str, str], dict]:
    """What diyfa says of each chip: the runtime tells no core counts ("0"), or tells 18."""
    asked = [(soc, "0") for soc in (*NPU_SPECS, *UNLISTED, *OTHERS)] + [("Ascend910B3", "18")]
    lines = run_python(CODE, CHIPS=json.dumps(asked)).splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return dict(zip(asked, found, strict=True))


def check_member_of_a_family(chips: dict, soc: str) -> None:
    row, spec = chips[soc, "0"], npu_spec(soc)
    assert spec is not None and row["name"] == row["soc"] == soc
    assert row["arch"] == spec.arch.value == FAMILIES[row["version"]].value
    assert (row["cube_cores"], row["vector_cores"]) == (spec.cube_cores, spec.vector_cores)
    assert [row[name] for name in ("ub", "l1", "l0a", "l0b", "l0c")] == list(spec[3:])
    assert row["refusal"] is None


def check_other_chip_is_unknown_and_refused(chips: dict, soc: str) -> None:
    row = chips[soc, "0"]
    assert row["version"] not in FAMILIES
    assert (row["arch"], row["ub"], row["cube_cores"]) == (NPUArch.UNKNOWN.value, 0, 0)
    assert f"unknown Ascend chip '{soc}'" in row["refusal"]


def test_every_chip(npu: torch.device) -> None:
    """One test for all of them: one process serves them, and must not be started in every worker."""
    chips = look_at_chips()
    assert len(chips) == len(NPU_SPECS) + len(UNLISTED) + len(OTHERS) + 1
    for soc in (*NPU_SPECS, *UNLISTED):
        check_member_of_a_family(chips, soc)
    for soc in OTHERS:
        check_other_chip_is_unknown_and_refused(chips, soc)
    row = chips["Ascend910B3", "18"]  # where the runtime tells, it is believed
    assert (row["cube_cores"], row["vector_cores"]) == (18, 36)
