"""What the Hopper sweep measures first, and what it concludes from its figures."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from scripts import load_script

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def sweep() -> ModuleType:
    return load_script(Path(__file__).resolve().parents[2] / "benchmarks" / "hopper_sweep.py")


def test_peers_are_measured_beside_every_config(sweep: ModuleType) -> None:
    for case, names in sweep.CONFIG_NAMES.items():
        work = sweep.names_of(case, list(sweep.PEERS), [])
        assert len(work) == len(set(work))
        peers = ["cudnn", "fa3", "fa4"] if case in sweep.GRID else ["cudnn"]
        assert work == peers + list(names)
    some = sweep.names_of((128, True), [], ["q-registers"])
    assert some and all("q-registers" in name for name in some)


def test_configs_differ(sweep: ModuleType) -> None:
    for case in sweep.CONFIG_NAMES:
        configs = sweep.candidates(*case)
        assert len(set(configs.values())) == len(configs)
    with pytest.raises(ValueError, match="sideways"):
        sweep.config_named(128, "2x64 sideways")
