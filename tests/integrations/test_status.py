"""`diyfa.integrations.status` and `diyfa info`: what is installed, what is on, where calls went."""

from __future__ import annotations

import json
from importlib.metadata import version

import torch
from subprocesses import run_after_torch
from typer.testing import CliRunner

import diyfa
from diyfa.cli import output
from diyfa.cli.app import app
from diyfa.integrations import status, use_in_pytorch

CLIENTS = ["pytorch", "transformers", "diffusers", "flash_attn", "flash_attn_3", "flash_attn_npu"]


def test_routes_of_calls() -> None:
    rows = {row.client: row for row in status()}
    assert list(rows) == CLIENTS and not any(row.on or row.calls for row in rows.values())
    handle = use_in_pytorch("cpu")
    x = torch.zeros(1, 2, 3, 16)
    with diyfa.use_backend("cpu"):
        for wide in (False, True, True):
            torch.nn.functional.scaled_dot_product_attention(*[x.double() if wide else x] * 3)
    row = status()[0]
    assert row.on and row.detail == "cpu" and row.installed == version("torch")
    assert row.calls == {"scaled_dot_product_attention: diyfa": 1, "scaled_dot_product_attention: PyTorch (dtype)": 2}
    handle.remove()
    assert not status()[0].on
    handle = use_in_pytorch("cpu")
    assert status()[0].calls == {}, "counts begin anew"
    handle.remove()


IMPORTS = """
import sys
from diyfa.integrations import alias_flash_attn, status
print(sorted(name for name in ("transformers", "diffusers", "rich", "triton") if name in sys.modules))
alias_flash_attn()
import flash_attn.bert_padding
row = [row for row in status() if row.client == "flash_attn"][0]
print(row.on, row.installed, sorted(row.calls))
print(sorted(name for name in ("transformers", "diffusers", "rich", "triton") if name in sys.modules))
"""


def test_nothing_is_imported_for_it() -> None:
    assert run_after_torch(IMPORTS).splitlines() == [
        "[]", "True 2.8.3 ['import flash_attn.bert_padding: diyfa', 'import flash_attn: diyfa']", "[]",
    ]  # fmt: skip


def info(*arguments: str) -> str:
    output.out.width = 100  # kept from when it was made, whatever COLUMNS is now
    return CliRunner().invoke(app, ["info", *arguments]).stdout


def test_info_shows_it() -> None:
    rows = json.loads(info("--json"))["integrations"]
    assert [row["client"] for row in rows] == CLIENTS
    assert rows[0]["installed"] == version("torch") and not rows[0]["on"] and rows[0]["calls"] == {}
    assert rows[0]["switched_on_by"] == "use_in_pytorch"
    printed = info("--all")
    assert "inside other software" in printed and "use_in_transformers()" in printed
