"""The compile gate has every row of the Hopper forward's tables."""

from __future__ import annotations

import pytest

from diyfa.backends.cuda.gluon.compat import has_gluon
from diyfa.backends.cuda.hopper import configs
from diyfa.lab.cuda import specs

TABLES = {
    "dense": [config for rows in configs.CONFIGS.values() for _, config in rows],
    "small": configs.SMALL.values(),
    "batch-invariant mode": configs.INVARIANT.values(),
    "block masks": configs.MASK_CONFIGS.values(),
    "small, block masks": configs.SMALL_MASK_CONFIGS.values(),
    "score functions": configs.SCORE_CONFIGS.values(),
    "float8": configs.FLOAT8_CONFIGS.values(),
    "small, float8": configs.FLOAT8_SMALL.values(),
    "int8": configs.INT8_CONFIGS.values(),
    "small, int8": configs.INT8_SMALL.values(),
}


@pytest.mark.skipif(not has_gluon(), reason="no Gluon to describe launches of")
def test_every_row_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """ptxas refused the small float8 tile of 256 columns, which needs 158 registers and had 128."""
    compiled = []
    monkeypatch.setattr(configs, "environment_refusal", lambda: None)
    monkeypatch.setattr(specs, "_hopper_spec", lambda problem, config, launch: compiled.append(config))
    list(specs._hopper_specs(configs.ARCH))
    missing = {name: [row for row in rows if row not in compiled] for name, rows in TABLES.items()}
    assert not any(missing.values()), missing
