"""`diyfa report` on the recorded results and on files made here: what is read, what is shown, what is refused."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from diyfa.lab.report.documents import Document, read_document
from diyfa.lab.report.sections import build_sections
from rich.console import Console
from typer.testing import CliRunner

from diyfa.cli import output
from diyfa.cli.app import app
from diyfa.cli.table import shown

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))
NPU_ROWS = [
    {"table": "numerics", "case": "plain, float16", "variant": "auto", "status": "pass", "result": "dq", "share": 0.4,
     "reason": ""},
    {"table": "numerics", "case": "causal, float16", "variant": "auto", "status": "error", "reason": "no tile <fits>"},
    {"table": "equivalence", "case": "mode 3", "implementation": "diyfa", "max_error": {"out": 1e-3, "dq": 2e-3}},
    {"table": "equivalence", "case": "mode 3", "implementation": "torch_npu", "unavailable": "refused: no CANN"},
    *({"table": "tiles", "kernel": "fwd", "D": 64, "S": 512, "causal": True, "dtype": "float16", "block_m": m,
       "block_n": 128, "default": m == 128, "pass": "forward", "ms": 1.0, "tflops": speed}
      for m, speed in ((128, 80.0), (64, 100.0))),
    *({"table": "attention", "implementation": name, "B": 1, "H": 2, "S": s, "D": 64, "causal": False,
       "dtype": "float16", "pass": "forward", "ms": 1.0, "tflops": speed}
      for name, speed in (("diyfa", 90.0), ("torch_npu", 99.96)) for s in (512, 1024)),
    {"table": "attention", "implementation": "torch_npu", "B": 1, "H": 2, "S": 512, "D": 64, "causal": True,
     "unavailable": "refused: RuntimeError: not here"},
    {"something": "else"},
]  # fmt: skip


@pytest.fixture
def npu_file(tmp_path: Path) -> Path:
    path = tmp_path / "npu.json"
    facts = {"benchmark": "ascend first run", "device": "Ascend910B3", "date": "2026-12-01", "versions": {"torch": "2"}}
    path.write_text(json.dumps({**facts, "chip": {"cube_cores": 20}, "rows": NPU_ROWS}))
    return path


def invoke(*arguments: object):
    output.out.width = output.err.width = 160  # kept from when they were made, whatever COLUMNS is now
    return CliRunner().invoke(app, ["report", *map(str, arguments)], env={"COLUMNS": "160"})


def section(sections: list, title: str):
    return next(s for s in sections if s.title.startswith(title))


def test_recorded_results_exist() -> None:
    assert len(RESULTS) >= 7


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_recorded_file_is_read(path: Path) -> None:
    document = read_document(path)
    sections = build_sections([document])
    assert document.device and document.date and document.rows and sections
    assert not any(s.title == "Rows of another kind" for s in sections), sections[-1]
    for s in sections:
        assert all(len(row) == len(s.columns) for row in s.rows)


def test_recorded_numbers_are_shown() -> None:
    """One figure, followed from the file to the table."""
    path = next(p for p in RESULTS if p.stem.endswith("-attention"))
    rows = json.loads(path.read_text())["rows"]
    wanted = next(r for r in rows if r["implementation"] == "diyfa" and r["pass"] == "backward" and not r["causal"])
    table = section(build_sections([read_document(path)]), "Attention")
    index = {name: i for i, name in enumerate(table.columns)}
    found = [
        row[index["diyfa"]]
        for row in table.rows
        if (row[index["pass"]], row[index["mask"]]) == ("backward", "full")
        and all(row[index[name]] == wanted[name] for name in ("dtype", "D", "S", "B", "H"))
    ]
    assert found == [float(f"{wanted['tflops']:.3g}")]
    assert [row[0] for row in table.rows] == sorted((row[0] for row in table.rows), reverse=True)  # forward first


def test_grouped_heads_have_separate_rows() -> None:
    row = {"pass": "forward", "dtype": "bfloat16", "D": 64, "causal": True, "S": 8, "B": 1, "H": 4}
    rows = [
        {**row, "group": group, "implementation": "diyfa", "tflops": tflops} for group, tflops in ((1, 5.0), (4, 3.0))
    ]
    table = section(build_sections([Document("x.json", "x", "GPU", "", {}, rows)]), "Attention")
    assert [row[-2:] for row in table.rows] == [[1, 5.0], [4, 3.0]]


def test_sections_of_a_first_run(npu_file: Path) -> None:
    document = read_document(npu_file)
    assert document.facts == {"chip": {"cube_cores": 20}}
    sections = build_sections([document])
    numerics = section(sections, "Numerics")
    assert numerics.title == "Numerics: 1 pass, 1 error" and numerics.notes == ["causal, float16: no tile <fits>"]
    equivalence = section(sections, "npu_fusion_attention")
    assert equivalence.columns == ["call", "diyfa", "torch_npu"] and equivalence.rows == [["mode 3", "2.0e-03", None]]
    assert equivalence.notes == ["torch_npu, mode 3: refused: no CANN"]
    attention = section(sections, "Attention")
    assert [row[-2:] for row in attention.rows] == [[90.0, 100.0]] * 2
    assert attention.best == [len(attention.columns) - 1] * 2
    tiles = section(sections, "Tiles")
    assert tiles.rows == [["fwd", "float16", 64, "causal", 512, 2, "64×128", 100.0, "128×128", 1.25]]
    assert section(sections, "Not measured").rows[0][2:] == ["refused: RuntimeError: not here", 1]
    assert section(sections, "Rows of another kind").rows == [["Ascend910B3", "something", 1]]


def test_compiled_tiles_show_yes_and_no() -> None:
    """Not "causal" and "full", which is what a boolean says of a mask."""
    recorded = next(p for p in RESULTS if p.stem.startswith("npu-") and p.stem.endswith("-tiles"))
    compiled = section(build_sections([read_document(recorded)]), "Compiled for Ascend")
    assert {row[compiled.columns.index("bound")] for row in compiled.rows} == {"yes", "no"}


def test_a_wide_table_is_lines_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = next(p for p in RESULTS if p.stem.startswith("npu-") and p.stem.endswith("-tiles"))
    for width, heading in ((80, "L0C KiB 128,"), (200, r"┃\s+UB ┃\s+L1 ┃\s+L0C ┃")):
        narrow = Console(width=width, file=io.StringIO())
        monkeypatch.setattr("diyfa.lab.report.command.out", narrow)
        assert invoke(recorded).exit_code == 0
        printed = narrow.file.getvalue()
        assert re.search(heading, printed)
        assert "two loops" in printed  # no cell has lost letters
        assert "…" not in printed


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_80_columns_are_enough(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line fits, and every cell of a table is there as one piece: nothing cut off, no number in two lines."""
    narrow = Console(width=80, file=io.StringIO())
    monkeypatch.setattr("diyfa.lab.report.command.out", narrow)
    assert invoke(path).exit_code == 0
    printed = narrow.file.getvalue()
    assert all(len(line) <= 80 for line in printed.splitlines())
    assert "…" not in printed
    for s in build_sections([read_document(path)]):
        for row in s.rows:
            for value in row:
                if isinstance(value, (int, float)):
                    text = shown(value)
                    assert re.search(rf"(?<![\w.]){re.escape(text)}(?![\w.])", printed), text


def test_small_figures_keep_their_digits(tmp_path: Path) -> None:
    """What a CPU does is no 0.0 TFLOP/s, in the terminal and on the page."""
    path = tmp_path / "cpu.json"
    rows = [
        {"op": "attention", "name": "diyfa", "size": [1, 2, 64, 64], "causal": False, "dtype": "float32", "time_ms": 7,
         "tflops": speed, "memory_mb": 1}
        for speed in (0.012345,)
    ]  # fmt: skip
    path.write_text(json.dumps({"device": "a CPU", "rows": rows}))
    attention = section(build_sections([read_document(path)]), "Attention")
    assert attention.rows[0][-1] == 0.0123
    assert "0.0123" in invoke(path).output
    pytest.importorskip("jinja2")
    pytest.importorskip("plotly")
    from diyfa.lab.report.page import render_page

    assert ">0.0123</td>" in render_page([read_document(path)])


def test_columns_name_the_device_if_there_are_several(npu_file: Path) -> None:
    recorded = read_document(next(p for p in RESULTS if p.stem.endswith("-attention")))
    attention = section(build_sections([recorded, read_document(npu_file)]), "Attention")
    assert {"diyfa, NVIDIA H200", "diyfa, Ascend910B3"} <= set(attention.columns)


def test_terminal(npu_file: Path) -> None:
    result = invoke(npu_file)
    assert result.exit_code == 0, result.output
    for text in ("Ascend910B3, ascend first run", "TFLOP/s", "64×128", "no tile <fits>", "refused: no CANN"):
        assert text in result.output, result.output
    assert "written" not in result.output


def test_json(npu_file: Path) -> None:
    result = invoke(npu_file, "--json")
    content = json.loads(result.stdout)
    assert content["documents"][0]["rows"] == len(NPU_ROWS) and content["documents"][0]["device"] == "Ascend910B3"
    assert {"title", "unit", "columns", "rows", "best", "notes"} == set(content["sections"][0])


def test_page(npu_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("plotly")
    page = tmp_path / "report.html"
    result = invoke(npu_file, next(p for p in RESULTS if p.stem.endswith("-attention")), "--output", page)
    assert result.exit_code == 0 and f"written: {page}" in result.output.replace("\n", "")
    html = page.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>") and html.rstrip().endswith("</html>")
    assert "no tile &lt;fits&gt;" in html and "no tile <fits>" not in html  # what a file says is text, not markup
    assert html.count("<h2>") == len(build_sections([read_document(npu_file)]))
    figures = re.findall(r'id="(figure-\d+)"', html)
    assert figures == ["figure-0", "figure-1"]  # one for each pass
    assert not re.search(r'<(script|link)[^>]+(src|href)="http', html), "the page needs nothing from the net"


def test_curves_contain_the_numbers() -> None:
    pytest.importorskip("plotly")
    from diyfa.lab.report.page import attention_curves

    document = Document("x.json", "x", "chip", "", {}, [row for row in NPU_ROWS if row.get("table") == "attention"])
    (figure,) = attention_curves([document])
    assert {trace.name: (list(trace.x), list(trace.y)) for trace in figure.data} == {
        "diyfa": ([512, 1024], [90.0, 90.0]), "torch_npu": ([512, 1024], [99.96, 99.96])
    }  # fmt: skip


def test_axes_read_1k_4k_16k() -> None:
    pytest.importorskip("plotly")
    from diyfa.lab.report.page import attention_curves

    for figure in attention_curves([read_document(next(p for p in RESULTS if p.stem.endswith("-attention")))]):
        axes = list(figure.select_xaxes())
        assert axes and all(axis.tickvals == (1024, 4096, 16384) for axis in axes)
        assert all(axis.ticktext == ("1k", "4k", "16k") for axis in axes)
    row = next(row for row in NPU_ROWS if row.get("table") == "attention")
    (figure,) = attention_curves([Document("x.json", "x", "chip", "", {}, [row, row | {"S": 1000}])])
    assert next(figure.select_xaxes()).ticktext == ("512", "1000")


@pytest.mark.parametrize("absent", ["jinja2", "plotly"])
def test_a_page_without_its_libraries_says_what_to_install(
    npu_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    from diyfa.lab.report import page

    real = page.importlib.util.find_spec
    monkeypatch.setattr(page.importlib.util, "find_spec", lambda name: None if name == absent else real(name))
    result = invoke(npu_file, "--output", tmp_path / "report.html")
    assert result.exit_code == 2 and f"needs {absent}: pip install 'diyfa[report]'" in result.output
    assert not (tmp_path / "report.html").exists()
    assert invoke(npu_file).exit_code == 0  # tables need neither


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "is no JSON file"),
        ("[" * 200_000, "is no JSON file"),
        ("9" * 5000, "is no JSON file"),
        ('{"rows": []}', "needs an object with device and rows"),
        ('{"device": "x", "rows": [1]}', "every row must be an object"),
        ("[]", "needs an object with device and rows"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_document(path)
    result = invoke(path)
    assert result.exit_code == 2 and message in result.output
    assert invoke(tmp_path / "absent.json").exit_code == 2


def test_files_of_diyfa_bench_are_read(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    sizes = "--seq-len 16 --batch 1 --heads 1 --head-dim 16 --size 16 --warmup 0 --rep 1"
    options = ["bench", *sizes.split(), "--backend", "cpu", "--output", str(path), "--json"]
    assert CliRunner().invoke(app, options, env={"COLUMNS": "160"}).exit_code == 0
    sections = build_sections([read_document(path)])
    attention, product = section(sections, "Attention"), section(sections, "Matrix product")
    assert "diyfa" in attention.columns and {"PyTorch", "diyfa"} <= set(product.columns)
    assert not any(s.title == "Rows of another kind" for s in sections)


def test_the_template_is_part_of_the_package() -> None:
    from importlib.resources import files

    assert files("diyfa.lab.report").joinpath("report.html.jinja").is_file()
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"diyfa.lab.report" = ["report.html.jinja"]' in pyproject
