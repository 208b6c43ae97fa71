"""The documents say what is so: the tables of the READMEs, the log's speed, the toy backend, the guides' code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from subprocesses import run_after_torch

import diyfa
from diyfa import plan as planning
from diyfa import registry, validation
from diyfa.reference import reference_attention

ROOT = Path(__file__).parents[2]
READMES = ["README.md", "README.zh-CN.md"]
SPEED = "docs/log/speed.md"


@pytest.mark.parametrize("readme", READMES)
def test_feature_table_is_what_the_backends_say(readme):
    pytest.importorskip("rich")
    from feature_tables import refused, with_table

    assert {"cpu", "npu"} <= refused().keys()
    text = (ROOT / readme).read_text(encoding="utf-8")
    assert with_table(text) == text, "`make tables` writes it"


@pytest.mark.parametrize("readme", READMES)
def test_speed_tables_are_those_of_the_result_files(readme):
    from speed_tables import CARDS, RESULTS, with_tables

    assert with_tables(readme) == (ROOT / readme).read_text(encoding="utf-8"), "`make tables` writes them"
    for card, directions in CARDS.items():
        for source in (source for sources in directions.values() for source in sources):
            assert card in json.loads((RESULTS / source.file).read_text())["device"]


def python_blocks(page):
    return re.findall(r"```python[^\n]*\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def toy(monkeypatch):
    namespace = {}
    exec(python_blocks("docs/adding-a-backend.md")[0], namespace)
    plugin = SimpleNamespace(load=lambda: namespace["backend"])
    monkeypatch.setattr(registry, "_plugins", lambda: {"toy": plugin})
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    monkeypatch.setattr(planning, "plans", {})


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(("causal", "seqlen_q"), [(False, 30), (True, 30), (True, 50)])
def test_the_toy_backend_computes_attention(toy, layout, causal, seqlen_q):
    shapes = [(2, 3, s, 16) for s in (seqlen_q, 40, 40)]
    q, k, v = (torch.randn(s) for s in shapes)
    expected, expected_lse = reference_attention(q, k, v, causal=causal, return_lse=True)
    call = diyfa.flash_attention
    if layout == "bshd":
        q, k, v, expected = (x.transpose(1, 2) for x in (q, k, v, expected))
        call = diyfa.flash_attention_v2
    out, lse = call(q, k, v, causal=causal, backend="toy", return_lse=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert diyfa.explain(q, k, v, layout=layout, causal=causal, backend="toy").kernel == "plain"


def test_the_toy_backend_refuses_with_its_own_reason(toy):
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(ValueError, match="the toy backend does not implement softcap"):
        diyfa.flash_attention(q, q, q, softcap=5.0, backend="toy")
    with pytest.raises(ValueError, match="the toy backend has no backward pass"):
        diyfa.flash_attention(q.requires_grad_(), q, q, backend="toy")
    for dtype in set(validation.ATTENTION_DTYPES) - {torch.float16, torch.bfloat16, torch.float32}:
        x = torch.randn(1, 2, 8, 16).to(dtype)
        with pytest.raises(ValueError, match=f"computes float16, bfloat16, float32, not {str(dtype)[6:]}"):
            diyfa.flash_attention(x, x, x, backend="toy")


CALL_TOY = """
import sys, torch, diyfa
from diyfa.cli import main
q = torch.randn(1, 2, 8, 16)
out = diyfa.flash_attention(q, q, q, causal=True, backend="toy")
torch.testing.assert_close(out, diyfa.reference_attention(q, q, q, causal=True))
with diyfa.use_backend("toy"):
    assert torch.equal(diyfa.flash_attention(q, q, q, causal=True), out)
assert diyfa.registry.backend_names() == ["cuda", "npu", "cpu", "toy"] and diyfa.kernels_for("toy") == ["plain"]
assert ("toy", "plain") in {(x.backend, x.kernel) for x in diyfa.explain(q, q, q, backend="cpu").alternatives}
for arguments in (["info"], ["validate", "--backend", "toy"]):
    sys.argv = ["diyfa", *arguments, "--json"]
    try:
        main()
    except SystemExit as done:
        assert not done.code
    print("=====")
"""


def test_the_guides_plug_in_builds_and_runs_as_printed(tmp_path):
    """Its files as they stand in the guide, installed by pip; then the command line and a call."""
    pytest.importorskip("setuptools")
    pytest.importorskip("typer")
    text = (ROOT / "docs/adding-a-backend.md").read_text(encoding="utf-8")
    files = dict(re.findall(r'```\w+ title="([\w.]+)"\n(.*?)```', text, re.DOTALL))
    assert set(files) == {"toy_backend.py", "pyproject.toml"}
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name, content in files.items():
        (source / name).write_text(content, encoding="utf-8")
    install = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([sys.executable, *install, str(source)], check=True, timeout=240)

    info, validated = map(json.loads, run_after_torch(CALL_TOY, target).split("=====\n")[:2])
    (toy,) = (b for b in info["backends"] if b["name"] == "toy")
    assert toy["loads"] and toy["usable_here"] and [k["name"] for k in toy["kernels"]] == ["plain"]
    cases = validated["cases"]
    passed = [case for case in cases if case["status"] == "pass"]
    assert len(passed) >= 5 and all(case["passes"] == "forward" and 0 < case["share"] <= 1 for case in passed)
    assert not [case for case in cases if case["status"] == "FAIL"]


def speed_tables(readme):
    """The forward and the backward table of a page: [(D, causal, [[three lengths] of each implementation])]."""
    text = (ROOT / readme).read_text(encoding="utf-8")
    masks = {"full": False, "causal": True, "无": False, "因果": True}
    tables = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
        if rows[0][0] == "D":
            tables.append([
                (int(row[0].split("/")[0]), masks[row[1]], [cell.split(" / ") for cell in row[2:]]) for row in rows[2:]
            ])  # fmt: skip
    return tables


def recorded(file, names, direction):
    """(D, causal, S) -> TFLOP/s of each of `names` in a results file."""
    rows = [
        row for row in json.loads((ROOT / file).read_text())["rows"] if row["pass"] == direction and "tflops" in row
    ]
    found = {(row["D"], row["causal"], row["implementation"], row["S"]): row["tflops"] for row in rows}
    return lambda dim, causal, length: [found[dim, causal, name, length] for name in names]


def test_speeds_are_those_of_the_file_the_log_names():
    text = (ROOT / SPEED).read_text(encoding="utf-8")
    file = re.search(r"benchmarks/results/[\w.-]+\.json", text).group()
    peers = ("cuDNN", "FlashAttention-3", "FlashAttention-4", "diyfa")
    ranges = re.findall(r"(\d\.\d\d) to (\d\.\d\d)[^0-9]+(\d\.\d\d)", text)
    for direction, names, table in zip(
        ("forward", "backward"), (peers, (peers[0], *peers[2:])), speed_tables(SPEED), strict=True
    ):
        measured = recorded(file, names, direction)
        assert len(table) == 8
        shares = []
        for dim, causal, columns in table:
            for n, length in enumerate((1024, 4096, 16384)):
                figures = measured(dim, causal, length)
                shares.append(figures[-1] / max(figures[:-1]))
                assert [column[n] for column in columns] == [*(f"{x:.0f}" for x in figures), f"{shares[-1]:.2f}"]
        assert (f"{min(shares):.2f}", f"{max(shares):.2f}", f"{sum(shares) / len(shares):.2f}") in ranges


def test_the_picture_and_the_hopper_page_have_the_figures_of_the_log():
    columns = [columns for _, _, columns in speed_tables(SPEED)[0]]
    table = re.search(r"\| D \| mask \| this kernel .*\n(?:\|.*\n)+", (ROOT / "docs/hopper.md").read_text()).group()
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()[2:]]
    ours, fa3, fa4, cudnn, ratio = (2, 3, 4, 5, 6)
    assert [[row[i].split(" / ") for i in (cudnn, fa3, fa4, ours, ratio)] for row in rows] == columns
    labels = re.findall(r">(\d{3})<", (ROOT / "docs/speed.svg").read_text())
    drawn = [column[3][1] for row, column in zip(rows, columns, strict=True) if "/" not in row[0]]  # at 4096 keys
    assert labels[-len(drawn) :] == drawn
    assert all("(docs/speed.svg)" in (ROOT / readme).read_text(encoding="utf-8") for readme in READMES)


def test_the_readmes_are_in_step():
    """The same code, tables of the same size, and the same names in them."""
    english, chinese = ((ROOT / readme).read_text(encoding="utf-8") for readme in READMES)
    code = [re.sub(r" *#.*", "", "\n".join(python_blocks(readme))) for readme in READMES]
    assert code[0] == code[1]
    tables = [re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE) for text in (english, chinese)]
    assert [table.count("\n") for table in tables[0]] == [table.count("\n") for table in tables[1]]
    for first, second in zip(*tables, strict=True):
        for ours, theirs in zip(first.splitlines(), second.splitlines(), strict=True):
            named, also = (set(re.findall(r"`([^`]+)`", row.split("|")[1])) for row in (ours, theirs))
            assert named == also, f"{ours}\n{theirs}"


@pytest.mark.parametrize("readme", READMES)
def test_the_readmes_example_runs(readme):
    """The example as printed, small and on the CPU."""
    code = python_blocks(readme)[0]
    for printed, small in (('device = "cuda"', 'device = "cpu"'), ("4096", "64"), ("[64, 1000]", "[64, 20]")):
        code = code.replace(printed, small)
    with diyfa.use_backend("cpu"):
        exec(code, {})


@pytest.mark.parametrize(("page", "block"), [("adding-a-backend", 1), ("npu-fusion-attention", 0)])
def test_a_block_runs_as_printed(page, block):
    exec(python_blocks(f"docs/{page}.md")[block], {})


def test_the_inference_guide_runs():
    """Its blocks one after another, on the CPU."""
    blocks = python_blocks("docs/inference.md")
    assert len(blocks) == 9
    namespace = {}
    with diyfa.use_backend("cpu"), torch.no_grad():
        for block in blocks:
            exec(block.replace('device = "cuda"', 'device = "cpu"'), namespace)


def test_the_page_of_score_functions_runs(tmp_path):
    """From a file: Triton reads the source of jit functions."""
    pytest.importorskip("triton")
    blocks = python_blocks("docs/scores.md")
    assert len(blocks) == 4
    script = tmp_path / "scores.py"
    script.write_text("\n\n".join(blocks), encoding="utf-8")
    assert run_after_torch(f"import runpy; runpy.run_path({str(script)!r})", ROOT).strip() == "torch.Size([4, 255])"
