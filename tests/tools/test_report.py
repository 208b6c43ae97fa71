"""`diyfa report`: which figures count, where diyfa stands, and what the terminal, Markdown, JSON and the page say."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from markdown_it import MarkdownIt
from result_files import CHIP, GPU, attention, speeds, write_all, write_gpu
from rich.console import Console
from typer.testing import CliRunner

from diyfa.cli.app import app
from diyfa.lab.report import page
from diyfa.lab.report.model import attention_bytes, build_report, data_sheet_peak
from diyfa.lab.report.page import render_page
from diyfa.lab.report.points import collect_points, report_name
from diyfa.lab.report.text import markdown, summary
from diyfa.lab.report.words import WORDS
from diyfa.lab.results import read_results

ROOT = Path(__file__).parents[2]
RECORDED = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
MAX_PAGE = 2_000_000


def invoke(*arguments: object):
    return CliRunner().invoke(app, ["report", *map(str, arguments)], env={"COLUMNS": "160"})


def make_report(*paths: Path, everything: bool = False):
    return build_report([read_results(path) for path in paths], everything)


@pytest.fixture(scope="module")
def recorded():
    return make_report(*RECORDED)


@pytest.mark.parametrize(
    ("name", "device_type", "expected"),
    [("cudnn", "cuda", "cuDNN"), ("SDPA cuDNN", "cuda", "cuDNN"), ("fa4", "cuda", "FA4"), ("SDPA flash", "cuda", "FA2"),
     ("SDPA flash", "cpu", "PyTorch flash"), ("FlashAttention-3 (fa3-fwd 0.0.3)", "cuda", "FA3"),
     ("torch_npu", "npu", "npu_fusion_attention"), ("diyfa, deterministic", "cuda", "diyfa, deterministic")],
)  # fmt: skip
def test_names_of_implementations(name: str, device_type: str, expected: str) -> None:
    assert report_name(name, device_type) == expected


def test_the_newest_figure_counts(tmp_path: Path) -> None:
    older = write_gpu(tmp_path, "a.json", "2026-11-01", [attention("diyfa", 100.0), attention("FA4", 200.0)])
    newer = write_gpu(tmp_path, "b.json", "2026-11-02", [attention("diyfa", 300.0), attention("cuDNN", 250.0)])
    (point,) = collect_points([read_results(newer), read_results(older)])
    assert {name: row["tflops"] for name, row in point.newest()} == {"diyfa": 300.0, "FA4": 200.0, "cuDNN": 250.0}
    # Each ratio is of one file: FA4's of the older one, although diyfa is faster now.
    assert point.ratios() == {"FA4": 0.5, "cuDNN": 1.2}
    assert point.best_peer() == ("FA4", 0.5)
    rows = [attention("diyfa", 300.0, Dv=64, keys=1024), attention("FA4", 200.0)]  # the same point, by its defaults
    both = write_gpu(tmp_path, "c.json", "2026-11-03", rows)
    (point,) = collect_points([read_results(both), read_results(older)])  # of the newest file that has both
    assert point.ratios() == {"FA4": 1.5}


def test_a_row_is_as_old_as_its_own_date(tmp_path: Path) -> None:
    continued = [attention("diyfa", 100.0, date="2026-11-03T10:00:00+00:00")]
    first = write_gpu(tmp_path, "a.json", "2026-11-01", continued)
    other = write_gpu(tmp_path, "b.json", "2026-11-02", [attention("diyfa", 50.0)])
    report = make_report(first, other)
    (row,) = report["tables"][0]["rows"]
    found = dict(zip(report["tables"][0]["columns"], row, strict=True))
    assert (found["tflops"], found["date"]) == (100.0, "2026-11-03")
    assert report["devices"][0]["dates"] == ["2026-11-02", "2026-11-03"]


def test_a_ratio_above_1_is_faster_or_smaller(tmp_path: Path) -> None:
    def pair(**fields: object):
        figure, mine, theirs = (fields.pop(name) for name in ("figure", "mine", "theirs"))
        return [{**fields, "implementation": name, figure: x} for name, x in (("diyfa", mine), ("FA3", theirs))]

    rows = [
        *pair(kind="decode", table="t", case="c", figure="ms", mine=2.0, theirs=3.0, **{"GB/s": 1}),
        *pair(kind="memory", S=1024, figure="peak_mib", mine=10, theirs=20, **{"pass": "forward"}),
        *pair(kind="host", figure="host_us", mine=20.0, theirs=10.0, **{"pass": "forward"}),
        *pair(kind="model", work="w", figure="ms", mine=4.0, theirs=5.0),
        *pair(kind="matmul", dtype="float16", M=1, N=1, K=1, ms=1.0, figure="tflops", mine=4.0, theirs=5.0),
    ]
    points = collect_points([read_results(write_gpu(tmp_path, rows=rows))])
    ratios = {point.kind: point.ratios() for point in points}
    wanted = {"decode": 1.5, "memory": 2.0, "host": 0.5, "model": 1.25, "matmul": 0.8}
    assert ratios == {kind: {"FA3": ratio} for kind, ratio in wanted.items()}


def test_as_fast_is_a_ratio_that_rounds_to_1(tmp_path: Path) -> None:
    speeds = ((1024, 99.6), (2048, 100.0), (4096, 99.4), (8192, 101.0))
    rows = [row for n, x in speeds for row in (attention("diyfa", x, length=n), attention("FA3", 100.0, length=n))]
    (group,) = make_report(write_gpu(tmp_path, rows=rows))["standing"]
    assert "faster at 3 of 4 points; median 1.00, from 0.99 to 1.01" in group["sentences"][0][0]


def test_rows_of_one_file_are_one_figure(tmp_path: Path) -> None:
    path = write_gpu(tmp_path, rows=[attention("diyfa", x) for x in (90.0, 100.0, 120.0)])
    (point,) = collect_points([read_results(path)])
    ((_, row),) = point.newest()
    assert (row["tflops"], row["spread"]) == (100.0, 0.3)


def test_other_purposes_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    paths = write_all(tmp_path)
    text = json.dumps(make_report(*paths))
    assert "a trial" not in text and make_report(*paths)["left_out"] == 1
    everything = make_report(*paths, everything=True)
    (other,) = [table for table in everything["tables"] if table["id"] == "other"]
    assert everything["left_out"] == 0 and [row[0] for row in other["rows"]] == ["trial"]


def test_where_diyfa_stands(tmp_path: Path) -> None:
    standing = make_report(*write_all(tmp_path))["standing"]
    assert [group["devices"] for group in standing] == [[GPU], ["NVIDIA H100 80GB HBM3"], [CHIP]]
    forward, backward, decode = (english for english, _ in standing[0]["sentences"])
    assert "at 1 of 5 points; median 0.91, from 0.91 to 1.50" in forward and "cuDNN, FA3" in forward
    assert backward.startswith("Backward: ") and "at 0 of 4 points" in backward
    assert "up to 91% of the read bandwidth; against FA3" in decode
    assert standing[2]["source"] == "predicted"
    assert "Predicted, not run" in standing[2]["sentences"][0][0] and "29% to 36%" in standing[2]["sentences"][0][0]


def test_a_device_without_peers_is_not_praised(tmp_path: Path) -> None:
    path = write_gpu(tmp_path, rows=[row for row in speeds() if row["implementation"] == "diyfa"])
    (group,) = make_report(path)["standing"]
    assert all("the files have no peer beside it" in english for english, _ in group["sentences"])


def test_a_device_without_the_usual_peers_shows_others(tmp_path: Path) -> None:
    rows = [attention(name, 1.0, length=n) for name in ("diyfa", "diyfa v1", "SDPA flash") for n in (512, 1024)]
    report = make_report(write_gpu(tmp_path, rows=rows, device="a CPU", device_type="cpu"))
    assert report["default"] == ["diyfa", "PyTorch flash"]
    assert "diyfa v1" in report["implementations"]


def test_the_tables_of_a_first_run(tmp_path: Path) -> None:
    rows = [
        {"kind": "numerics", "case": "plain", "variant": "auto", "status": "pass", "result": "dq", "share": 0.4},
        {"kind": "equivalence", "case": "mode 3", "implementation": "diyfa", "max_error": {"out": 1e-3, "dq": 2e-3}},
        {"kind": "equivalence", "case": "mode 3", "implementation": "torch_npu", "unavailable": "refused: no CANN"},
        {"kind": "tile", "kernel": "fwd", "D": 64, "block_m": 64, "block_n": 128, "tflops": 80.0},
        *(attention(name, 90.0, length=n, dtype="float16") for name in ("diyfa", "torch_npu") for n in (512, 1024)),
        {"kind": "done"},
    ]
    report = make_report(write_gpu(tmp_path, rows=rows, device=CHIP, device_type="npu"))
    tables = {table["id"]: dict(zip(table["columns"], table["rows"][0], strict=True)) for table in report["tables"]}
    assert set(tables) == {"attention", "tile", "numerics", "equivalence", "unavailable"}
    assert tables["numerics"]["status"] == "pass" and tables["equivalence"]["error"] == 2e-3
    assert tables["unavailable"]["implementation"] == "npu_fusion_attention"
    assert report["default"] == ["diyfa", "npu_fusion_attention"] and report["devices"][0]["source"] == "measured"


def test_figures_of_0_and_what_json_lacks(tmp_path: Path) -> None:
    """A figure may round to 0, and an error may be NaN: the report has both, and is JSON that a browser reads."""
    rows = [
        *(attention(name, 0.0, length=n, ms=0.0) for name in ("diyfa", "cuDNN") for n in (1024, 2048)),
        {"kind": "decode", "implementation": "diyfa", "table": "t", "case": "c", "ms": 0, "GB/s": 0, "TFLOP/s": 1.0},
        {"kind": "equivalence", "case": "a", "implementation": "diyfa", "max_error": {"dq": float("nan"), "out": 1.0}},
        {"kind": "equivalence", "case": "b", "implementation": "diyfa", "max_error": {"dq": "none", "out": 2.0}},
        {"kind": "numerics", "case": "a", "status": "fail", "share": float("inf"), "result": ["out", "dq"]},
    ]
    report = make_report(write_gpu(tmp_path, rows=rows))
    assert json.dumps(report, allow_nan=False)
    cells = {table["id"]: [dict(zip(table["columns"], x, strict=True)) for x in table["rows"]]
             for table in report["tables"]}  # fmt: skip
    assert [row["error"] for row in cells["equivalence"]] == ["nan", 2.0]
    assert cells["numerics"][0]["share"] == "inf" and cells["numerics"][0]["result"] == "['out', 'dq']"
    assert report["heat"] == [] and report["roofline"] == []


def test_files_of_diyfa_bench_are_read(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    sizes = "--seq-len 16 --seq-len 32 --batch 1 --heads 1 --head-dim 16 --size 16 --warmup 0 --rep 1"
    options = ["bench", *sizes.split(), "--backend", "cpu", "--output", str(path), "--json"]
    assert CliRunner().invoke(app, options, env={"COLUMNS": "160"}).exit_code == 0
    report = make_report(path)
    assert {table["id"] for table in report["tables"]} == {"attention", "matmul", "ceiling"}
    assert {"diyfa", "PyTorch flash"} <= set(report["panels"][0]["series"]) and report["memory"][0]["series"]["diyfa"]


def test_curves_join_points_of_one_family(tmp_path: Path) -> None:
    """Lengths with the same tokens, or else with the same batch; other shapes are in the heat map alone."""
    report = make_report(*write_all(tmp_path))
    panel = next(p for p in report["panels"] if (p["device"], p["D"], p["pass"]) == (GPU, 64, "forward"))
    assert panel["shape"] == "B·S = 16384, H = 32"
    assert list(panel["series"]) == ["diyfa", "cuDNN", "FA3"]
    assert [(s, x) for s, x, _ in panel["series"]["cuDNN"]] == [(1024, 425.0), (4096, 500.0)]
    (other,) = [cell for cell in report["heat"] if not cell["panel"]]
    assert (other["S"], other["B"], other["ratio"], other["peer"]) == (512, 8, 1.5, "cuDNN")
    batch = [attention("diyfa", 1.0, length=n, B=4, H=8) for n in (256, 512, 1024)]
    (panel,) = make_report(write_gpu(tmp_path, "batch.json", rows=batch))["panels"]
    assert panel["shape"] == "B = 4, H = 8" and len(panel["series"]["diyfa"]) == 3


def test_bytes_that_a_pass_moves() -> None:
    sizes = {"B": 2, "H": 8, "group": 4, "S": 100, "keys": 50, "D": 64, "Dv": 32}
    identity = {"dtype": "bfloat16", "pass": "forward", **sizes}
    queries, keys = 2 * 8 * 100 * (64 + 32), 2 * 2 * 50 * (64 + 32)
    assert attention_bytes(identity) == 2 * (queries + keys)
    assert attention_bytes({**identity, "pass": "backward"}) == 4 * (queries + keys)
    assert attention_bytes({**identity, "dtype": "float32"}) == 4 * (queries + keys)


@pytest.mark.parametrize(
    ("device", "peak"),
    [("NVIDIA H200", (989.4, 4800)), ("NVIDIA H200 NVL", (835, 4800)), ("NVIDIA GH200 480GB", None),
     ("NVIDIA H100 80GB HBM3", (989.4, 3350)), ("NVIDIA H100 PCIe", (756, 2000)), ("NVIDIA H100 NVL", (835, 3900)),
     ("NVIDIA A100-SXM4-80GB", (312, 2039)), ("NVIDIA A100 80GB PCIe", (312, 1935)),
     ("NVIDIA A100-SXM4-40GB", (312, 1555)), ("NVIDIA B200", (2250, 8000)), ("NVIDIA GB200", None), (CHIP, None)],
)  # fmt: skip
def test_peaks_of_the_data_sheets(device: str, peak: tuple[float, float] | None) -> None:
    assert data_sheet_peak(device) == peak


def test_shares_and_intensities(tmp_path: Path) -> None:
    """An H200's peak is 989.4 TFLOP/s. A pass with S = 1024 and D = 64 has 512 operations for each byte."""
    flops = 4 * 1024 * 1024 * 64
    rows = [attention(name, flops / 0.5e9, length=1024, ms=0.5, B=1, H=1) for name in ("diyfa", "FA3")]
    rows += [attention("diyfa", x, length=n, B=1, H=1, ms=1.0) for n, x in ((4096, 494.7), (65536, 700.0))]
    cache = {"kind": "decode", "table": "t", "case": "c", "ms": 1.0, "GB/s": 2400.0, "TFLOP/s": 4.8}
    ceilings = [{"kind": "matmul", "implementation": name, "dtype": "float16", "M": 1, "N": 1, "K": 1, "ms": 1.0,
                 "tflops": x} for name, x in (("diyfa", 900.0), ("cuBLAS", 800.0))]  # fmt: skip
    rows += [{**cache, "implementation": "diyfa"}, {**cache, "implementation": "FA3", "ms": 2.0}, *ceilings]
    report = make_report(write_gpu(tmp_path, rows=rows))
    (roof,) = report["roofline"]
    assert [dot[:2] for dot in roof["dots"] if dot[2] == "FA3"] == [[512.0, 0.5369], [2.0, 4.8]]
    assert roof["ceilings"] == [{"unit": "tflops", "name": "cuBLAS", "value": 800.0}]
    (chip,) = report["beside"]
    assert chip["bars"] == [[64, False, {"share": 0.5, "S": 4096, "tflops": 494.7}]]
    attention_table, decode_table = report["tables"][:2]
    place = [attention_table["columns"].index(name) for name in ("implementation", "S", "share")]
    assert ["diyfa", 4096, 0.5] in [[row[i] for i in place] for row in attention_table["rows"]]
    assert decode_table["rows"][0][decode_table["columns"].index("ratio")] == 2.0
    (decoding,) = report["decoding"]
    assert decoding["bars"][0][3:5] == [0.5, 2400.0]
    assert "up to 50% of the read bandwidth" in report["standing"][0]["sentences"][1][0]


def test_ceilings_are_measured_or_said_to_be_the_data_sheets(tmp_path: Path) -> None:
    paths = write_all(tmp_path)
    first, other, _ = make_report(*paths)["devices"]
    assert [(c["unit"], c["value"]) for c in first["ceilings"]] == [("tflops", 800.0), ("GB/s", 4400.0)]
    assert other["ceilings"] == [] and other["peak"]["gbs"] == 3350
    (decoding,) = make_report(*paths)["decoding"]
    assert "plain reads reach on this device (4400 GB/s, measured)" in decoding["about"][0]
    rows = [row for row in read_results(paths[0]).rows if row["kind"] != "ceiling"]
    (decoding,) = make_report(write_gpu(tmp_path, rows=rows))["decoding"]
    assert "data sheet's bandwidth (4800 GB/s): the files have no measured one" in decoding["about"][0]


def test_predictions_never_pass_for_measurements(tmp_path: Path, recorded) -> None:
    for report in (make_report(*write_all(tmp_path)), recorded):
        chips = {device["name"] for device in report["devices"] if device["source"] == "predicted"}
        assert chips and all(name.startswith("Ascend") for name in chips)
        assert {bar["device"] for bar in report["beside"] if bar["source"] == "predicted"} == chips
        for kind in ("panels", "roofline", "memory", "decoding", "heat"):
            assert not any(entry["device"] in chips for entry in report[kind])
        for table in report["tables"]:
            if "source" in table["columns"]:
                device, source = (table["columns"].index(name) for name in ("device", "source"))
                assert all(row[source] == "predicted" for row in table["rows"] if row[device] in chips)


def test_recorded_figures_are_in_the_report(recorded) -> None:
    """One figure, followed from the file to the panel and to the table."""
    path = next(p for p in RECORDED if p.stem == "h100-2026-11-28-forward-mixture")
    key = {"D": 128, "causal": True, "S": 4096}
    wanted = next(
        float(f"{row['tflops']:.4g}") for row in json.loads(path.read_text())["rows"]
        if row.items() >= {**key, "implementation": "FlashAttention-3"}.items()
    )  # fmt: skip
    panel = next(
        p for p in recorded["panels"]
        if "H100" in p["device"] and (p["D"], p["causal"], p["pass"]) == (128, True, "forward")
    )  # fmt: skip
    assert [x for s, x, _ in panel["series"]["FA3"] if s == 4096] == [wanted]
    table = next(t for t in recorded["tables"] if t["id"] == "attention")
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    there = {"implementation": "FA3", "D": 128, "mask": "causal", "S": 4096, "group": 1, "pass": "forward"}
    assert [row["tflops"] for row in rows if row.items() >= there.items() and "H100" in row["device"]] == [wanted]


@pytest.mark.parametrize("width", [80, 120])
def test_the_summary_fits_a_terminal(recorded, width: int, tmp_path: Path) -> None:
    for report in (recorded, make_report(*write_all(tmp_path))):
        lines = summary(report, width)
        assert len(lines) <= 40 and all(len(line) <= width for line in lines)
    many = [write_gpu(tmp_path, f"{i}.json", device=f"GPU {i}") for i in range(30)]
    lines = summary(make_report(*many), width)
    assert len(lines) == 40 and re.fullmatch(r"and \d+ more lines: .*", lines[-1])


def test_the_summary_has_the_figures(tmp_path: Path) -> None:
    text = "\n".join(summary(make_report(*write_all(tmp_path)), 80))
    assert "3 files" in text and "1 of ablations" in text
    assert re.search(r"H200 +D=64 full +625 +FA3 688 +0.91 +625 +FA3 688 +0.91", text)
    assert f"{CHIP}\n  Predicted, not run" in text and "Each ratio is of two figures of one file." in text


def test_the_summary_has_each_pass_in_its_columns(tmp_path: Path) -> None:
    rows = [
        attention(name, x, direction, length)
        for direction, x, name in (("forward", 100.0, "diyfa"), ("backward", 30.0, "diyfa"), ("backward", 20.0, "FA4"))
        for length in (1024, 4096)
    ]  # fmt: skip
    text = "\n".join(summary(make_report(write_gpu(tmp_path, rows=rows)), 80))
    assert re.search(r"H200 D=64 full +100 +- +30\.0 +FA4 20\.0 +1\.50$", text, re.MULTILINE)


def test_markdown(tmp_path: Path) -> None:
    text = markdown(make_report(*write_all(tmp_path)))
    assert f"| {GPU} | forward | D = 64 full | 4096 | 625 | 500 | 688 | 0.91 |" in text
    assert f"| {CHIP} | D = 64 full | 29% | predicted |" in text and "nothing ran" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert tables and all(line.endswith("|") for line in tables)


def test_markdown_shows_names_as_they_are(tmp_path: Path) -> None:
    name, device = r"a|b \ <i>*c*</i> [d](e) ~~f~~ `g`", "GPU | *x* <b>"
    rows = [attention(x, 1.0, length=n) for x in ("diyfa", "cuDNN") for n in (1024, 4096)]
    rows += [{"kind": "decode", "table": "decode", "case": name, "implementation": name, "ms": 1, "GB/s": 9}]
    report = make_report(write_gpu(tmp_path, rows=rows, device=device + " H200"))
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(markdown({**report, "default": ["diyfa", name]}))
    inline = [token for token in tokens if token.type == "inline"]
    assert not any(x.type not in ("text", "text_special", "strong_open", "strong_close", "softbreak")
                   for token in inline for x in token.children)  # fmt: skip
    cells = ["".join(x.content for x in token.children) for token in inline]
    assert cells.count(name) == 3 and cells.count(device + " H200") == 1


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_all(tmp_path)
    monkeypatch.setattr("diyfa.lab.report.command.out", Console(width=80, file=io.StringIO()))
    assert invoke(*paths).exit_code == 0
    assert json.loads(invoke(*paths, "--json").stdout)["standing"][0]["devices"] == [GPU]
    assert invoke(*paths, "--markdown").stdout.startswith("## diyfa report")
    assert invoke(*paths, "--all", "--json").stdout.count("a trial") == 1
    broken = tmp_path / "broken.json"
    broken.write_text('{"device": "x", "rows": []}')
    result = invoke(broken)
    assert result.exit_code == 2 and "it has no schema version" in result.output
    assert invoke(tmp_path / "absent.json").exit_code == 2


def test_every_text_has_both_languages() -> None:
    for key, (english, chinese) in WORDS.items():
        assert english and chinese, key
        places = [sorted(re.findall(r"{(\w+)}", text)) for text in (english, chinese)]
        assert places[0] == places[1], key


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    page = tmp_path / "report.html"
    result = invoke(*write_all(tmp_path), "--output", page)
    assert result.exit_code == 0 and "written: " in result.output
    html = page.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>") and html.rstrip().endswith("</html>")
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=.?http", html) and "sourceMappingURL" not in html
    assert "no \\u003csuch> wheel" in html and "no <such> wheel" not in html  # what a file says is text, not markup
    for key in ("throughput", "ratio", "roofline", "memory", "decoding", "beside", "tables", "devices"):
        assert f'<h2 id="{key}">' in html


def test_a_category_without_rows_is_absent(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    html = render_page(make_report(write_gpu(tmp_path)))
    for key in ("memory", "decoding"):
        assert f'<h2 id="{key}">' not in html
    rows = [{"kind": "host", "implementation": "diyfa", "pass": "forward", "host_us": 1.0}]
    html = render_page(make_report(write_gpu(tmp_path, rows=rows)))
    assert '<h2 id="throughput">' not in html and "have no attention rows that compare" in html


def test_the_page_of_all_recorded_files_is_small(recorded) -> None:
    pytest.importorskip("jinja2")
    assert len(render_page(recorded).encode()) < MAX_PAGE


def test_a_page_without_its_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page.importlib.util, "find_spec", lambda name: None)
    path = write_gpu(tmp_path)
    result = invoke(path, "--output", tmp_path / "report.html")
    assert result.exit_code == 2 and "needs jinja2: pip install 'diyfa[report]'" in result.output
    assert not (tmp_path / "report.html").exists()
    assert invoke(path).exit_code == 0
