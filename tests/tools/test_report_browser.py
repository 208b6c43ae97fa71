"""The page of `diyfa report` in a real browser: it draws, switches, filters, and says nothing on the console.

`make test-browser` runs this. It needs playwright (`pip install 'diyfa[browser]'`) and a Chromium on the path
(Debian: `apt-get install chromium fonts-noto-cjk`). With DIYFA_SHOTS=FOLDER the screenshots are kept, for people to
look at.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from result_files import CHIP, GPU, attention, write_all, write_gpu

from diyfa.lab.report.model import build_report
from diyfa.lab.report.page import render_page
from diyfa.lab.results import read_results

pytest.importorskip("jinja2")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not here: pip install 'diyfa[browser]'")
BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on the path: apt-get install chromium fonts-noto-cjk"
)
# Without these it needs a user's session, and asks for its updates.
OPTIONS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
)  # fmt: skip
RECORDED = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))
PLOTS = ("#panels > div", "#heat", "#roofline-plot", "#memory-panels > div", "#decoding-plot", "#beside-plot")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=BROWSER, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    return written(folder / "report.html", write_all(folder))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("report") / "report.html", RECORDED)


def written(page: Path, files: list[Path]) -> Path:
    page.write_text(render_page(build_report([read_results(path) for path in files])), encoding="utf-8")
    return page


@pytest.fixture
def load(browser: Any) -> Iterator[Any]:
    """Return a function that loads a page; afterwards nothing may have been said or asked for."""
    said: list[str] = []
    contexts = []

    def load(path: Path, width: int = 1280, theme: str = "light", locale: str = "en-US") -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, locale=locale, accept_downloads=True
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on(
            "request",
            lambda request: None if request.url.startswith(("file:", "data:", "blob:")) else said.append(request.url),
        )
        page.goto(path.as_uri())
        return page

    yield load
    for context in contexts:
        context.close()
    assert said == []


def drawn(page: Any, selector: str) -> int:
    """Return the least number of shapes of all plots that a selector finds."""
    return page.eval_on_selector_all(
        selector, "all => Math.min(...all.map(x => x.querySelectorAll('svg path').length))"
    )


def lines(page: Any) -> list[str]:
    """Return the names of the curves of the first panel."""
    return page.evaluate(
        "echarts.getInstanceByDom(document.querySelector('#panels > div')).getOption().series.map(s => s.name)"
    )


def only(page: Any, field: str, least: str) -> None:
    """Filter a column of the table as a person does."""
    entry = page.locator(f".tabulator-col[tabulator-field={field}] input")
    entry.fill("")
    entry.press_sequentially(least)
    entry.press("Enter")


def test_every_plot_is_drawn(load: Any, small: Path, whole: Path) -> None:
    for path in (small, whole):
        page = load(path)
        for selector in PLOTS:
            assert drawn(page, selector) >= 3, (path, selector)
        assert page.locator("#table .tabulator-row").count() > 3


def test_the_plots_have_the_figures_of_the_report(load: Any, small: Path) -> None:
    """Curves, cells and their colours, ceilings, bars: what is drawn, not only that something is."""
    page = load(small)
    option = "echarts.getInstanceByDom(document.querySelector('{}')).getOption()"

    def read(plot: str, what: str) -> Any:
        return page.evaluate(f"(o => {what})({option.format(plot)})")

    report = page.evaluate("report")
    panel = next(x for x in report["panels"] if x["device"] == GPU and x["pass"] == "forward")
    found = read("#panels > div", "o.series.map(s => [s.name, s.data.map(x => x.value)])")
    assert found == [[name, [x for _, x, _ in entries]] for name, entries in panel["series"].items()]
    assert read("#panels > div", "[o.title[0].text, o.xAxis[0].data, o.yAxis[0].min]") == [
        "D = 64, full",
        ["1k", "4k"],
        0,
    ]
    assert page.locator("#panels > div").count() == sum(
        x["device"] == GPU and x["pass"] == "forward" for x in report["panels"]
    )
    cells = read(
        "#heat", "o.series[0].data.map(x => [o.xAxis[0].data[x.value[0]], o.yAxis[0].data[x.value[1]], x.value[2]])"
    )
    wanted = {(f"{c['pass']}\n{c['S'] // 1024}k", f"D = {c['D']}, {'causal' if c['causal'] else 'full'}", c["ratio"])
              for c in report["heat"] if c["panel"] and c["device"] == GPU}  # fmt: skip
    assert {tuple(cell) for cell in cells} == wanted and len(wanted) == 8
    low, *_, high = read("#heat", "o.visualMap[0].inRange.color")
    assert read("#heat", "[o.visualMap[0].min, o.visualMap[0].max]") == [0.8, 1.2]
    assert int(low[1:3], 16) > int(low[5:7], 16) and int(high[1:3], 16) < int(high[5:7], 16)  # slower is red
    line, _ = read("#roofline-plot", "o.series.filter(s => s.type === 'line').map(s => s.data)")
    assert line[1:] == [[pytest.approx(1000 * 800 / 4400), 800], [line[2][0], 800]]
    assert line[0][1] == pytest.approx(line[0][0] * 4.4)
    (roof,) = (roof for roof in report["roofline"] if roof["device"] == GPU)
    dots = read("#roofline-plot", "o.series.filter(s => s.type === 'scatter').flatMap(s => s.data.map(d => [...d]))")
    assert sorted(map(str, dots)) == sorted(map(str, roof["dots"]))
    assert read("#memory-panels > div", "o.yAxis[0].type") == "log"
    bars = read("#decoding-plot", "o.series.map(s => [s.name, s.data.map(x => x.value)])")
    assert bars == [["diyfa", [round(4000 / 4400, 4)] * 2], ["FA3", [round(3500 / 4400, 4)] * 2]]
    shares = read("#beside-plot", "o.series.map(s => [s.name, s.data.map(x => x && x.value)])")
    assert shares == [[x["device"] + (" (predicted)" if x["source"] == "predicted" else ""),
                       [bar["share"] for *_, bar in x["bars"]]] for x in report["beside"]]  # fmt: skip
    colours = read("#panels > div", "o.series.map(s => s.color)")
    page.click("#theme")
    assert not set(colours) & set(read("#panels > div", "o.series.map(s => s.color)"))
    tip = page.evaluate("""() => {
      const at = document.querySelector("#models"), chart = echarts.getInstanceByDom(at);
      chart.dispatchAction({ type: "showTip", seriesIndex: 0, dataIndex: 0 });
      return at.innerText; }""")
    assert "cuDNN: 1.50" in tip


def test_device_pass_and_implementations_are_chosen(load: Any, small: Path) -> None:
    page = load(small)
    titles = "document.querySelector('#panels').textContent"
    assert lines(page) == ["diyfa", "cuDNN", "FA3"]
    page.click("#implementations [data-name=cuDNN]")
    assert lines(page) == ["diyfa", "FA3"]
    before = page.inner_html("#panels")
    page.select_option("[data-control=pass]", "backward")
    page.select_option("[data-control=device]", "NVIDIA H100 80GB HBM3")
    assert page.inner_html("#panels") != before and "D = 64, full" in page.evaluate(titles)
    assert "no such rows for NVIDIA H100" in page.inner_text("#memory-panels")
    assert "No ceiling was measured on NVIDIA H100" in page.inner_text("#roofline-note")
    assert "no such rows for NVIDIA H100" in page.inner_text("#decoding-about")
    assert not page.is_visible("#decoding-plot") and not page.is_visible("#decoding-group")
    page.select_option("[data-control=device]", GPU)
    page.select_option("[data-control=group]", "paged")
    assert drawn(page, "#memory-panels > div") >= 3 and drawn(page, "#decoding-plot") >= 3


def test_the_language_is_switched(load: Any, small: Path) -> None:
    page = load(small)
    assert "Throughput against length" in page.inner_text("main") and "吞吐量" not in page.inner_text("main")
    page.click("#language")
    text = page.inner_text("main")
    assert "吞吐量与序列长度" in text and "Throughput" not in text and "前向" in text
    assert "占芯片峰值的比例" in page.inner_html("#beside-plot") and "实现" in page.inner_text("#table")
    page.click("#language")
    assert "Throughput against length" in page.inner_text("main")
    assert "吞吐量" in load(small, locale="zh-CN").inner_text("main")


def test_predictions_are_hatched_and_marked(load: Any, small: Path) -> None:
    page = load(small)
    series = page.evaluate(
        "echarts.getInstanceByDom(document.querySelector('#beside-plot')).getOption().series"
        ".map(s => [s.name, s.itemStyle.decal.symbol, s.label.formatter({})])"
    )
    assert [GPU, "none", ""] in series and [f"{CHIP} (predicted)", "rect", "P"] in series
    assert page.locator("#beside-plot pattern").count() >= 1
    assert page.locator(".card.predicted .badge.predicted").count() >= 1
    page.click("[data-table=compiled]")
    rows = page.locator("#table .tabulator-row").all_inner_texts()
    assert rows and all("predicted" in row and "≈" in row for row in rows)


def test_tables_sort_filter_and_download(load: Any, small: Path, tmp_path: Path) -> None:
    page = load(small)
    cells = "#table .tabulator-row .tabulator-cell[tabulator-field=tflops]"
    page.click(".tabulator-col[tabulator-field=tflops] .tabulator-col-title")
    speeds = [float(text.strip("~")) for text in page.locator(cells).all_inner_texts()]
    assert speeds == sorted(speeds, reverse=True) and len(speeds) == 15
    only(page, "tflops", "680")
    page.wait_for_function(f"document.querySelectorAll('{cells}').length == 4", timeout=5000)
    assert all(float(text) >= 680 for text in page.locator(cells).all_inner_texts())
    only(page, "tflops", "")
    page.wait_for_function(f"document.querySelectorAll('{cells}').length == 15", timeout=5000)
    with page.expect_download() as download:
        page.click("#download")
    path = tmp_path / "table.csv"
    download.value.save_as(path)
    rows = list(csv.DictReader(path.open(encoding="utf-8-sig")))
    assert len(rows) == 50 and download.value.suggested_filename == "diyfa-attention.csv"
    assert {row["file"] for row in rows} == {"gpu.json", "other.json"}
    assert "torch 2.11" in rows[0]["versions"] and "sm_mhz 1980.0" in rows[0]["clocks"]
    assert {row["source"] for row in rows} == {"measured"}


def test_unsteady_figures_are_marked(load: Any, small: Path) -> None:
    page = load(small)
    only(page, "spread", "0.2")
    page.wait_for_function("document.querySelectorAll('#table .tabulator-row').length == 1", timeout=5000)
    assert "~450" in page.inner_text("#table .tabulator-row") and "40.0 %" in page.inner_text("#table .tabulator-row")


def test_what_a_file_says_is_never_run(load: Any, tmp_path: Path) -> None:
    """Names with markup, in every tooltip, list of a filter and downloaded cell."""
    script = "=<img src=x onerror=window.ran=1>"
    rows = [
        attention(name, 400.0, length=n, dtype=dtype, commit=script)
        for name in ("diyfa", "cuDNN", script) for n in (1024, 4096) for dtype in ("float16", script)
    ]  # fmt: skip
    rows += [{"kind": "decode", "table": script, "case": script, "implementation": "diyfa", "ms": 1.0, "GB/s": 9.0}]
    rows += [{"kind": "memory", "pass": script, "implementation": script, "S": n, "peak_mib": 9.0} for n in (1, 2)]
    path = write_gpu(tmp_path, f"{script}.json", rows=rows, device=f"{GPU}{script}", versions={script: script})
    page = load(written(tmp_path / "report.html", [path]))
    page.evaluate("""
        for (const element of document.querySelectorAll("#panels > div, .plot, #memory-panels > div")) {
          const chart = echarts.getInstanceByDom(element);
          chart?.getOption().series.forEach((s, seriesIndex) => s.data.forEach((_, dataIndex) =>
            chart.dispatchAction({ type: "showTip", seriesIndex, dataIndex })));
        }""")
    listed = 0
    for tab in page.locator("#tabs button").all():
        tab.click()
        for field in ("device", "implementation", "file"):
            page.click(f".tabulator-col[tabulator-field={field}] input")
            page.wait_for_selector(".tabulator-edit-list-item")
            listed += sum(script in text for text in page.locator(".tabulator-edit-list-item").all_inner_texts())
            page.keyboard.press("Escape")
    assert listed == 8  # three tables with the device and the file, two with the implementation
    page.wait_for_timeout(200)
    assert page.evaluate("window.ran") is None
    page.click("[data-table=attention]")
    with page.expect_download() as download:
        page.click("#download")
    download.value.save_as(tmp_path / "table.csv")
    found = list(csv.DictReader((tmp_path / "table.csv").open(encoding="utf-8-sig")))
    assert {row["commit"] for row in found} == {f"'{script}"}  # a spreadsheet takes = for a formula


def test_the_lists_of_filters_are_translated(load: Any, small: Path) -> None:
    page = load(small, locale="zh-CN")
    page.click(".tabulator-col[tabulator-field=pass] input")
    page.click(".tabulator-edit-list-item:has-text('反向')")
    page.wait_for_function("document.querySelectorAll('#table .tabulator-row').length > 3")
    assert page.input_value(".tabulator-col[tabulator-field=pass] input") == "反向"
    cells = page.locator("#table .tabulator-row .tabulator-cell[tabulator-field=pass]").all_inner_texts()
    assert set(cells) == {"反向"}


def test_it_prints_on_a4(load: Any, whole: Path) -> None:
    page = load(whole, theme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    widths = page.eval_on_selector_all("svg", "all => Math.max(...all.map(x => x.getBoundingClientRect().width))")
    assert widths <= 704  # 186 mm
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    pdf = page.pdf(prefer_css_page_size=True)
    widths = [round(float(x)) for x in re.findall(rb"/MediaBox \[0 0 ([\d.]+)", pdf)]
    assert pdf.startswith(b"%PDF") and set(widths) == {595, 842} and widths.count(842) == 1  # the table lies crosswise


@pytest.mark.parametrize("locale", ["en-US", "zh-CN"])
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_wider_than_the_window(
    load: Any, whole: Path, tmp_path: Path, width: int, theme: str, locale: str
) -> None:
    page = load(whole, width, theme, locale)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    shot = Path(os.environ.get("DIYFA_SHOTS", tmp_path)) / f"{width}-{theme}-{locale[:2]}.png"
    page.screenshot(path=shot, full_page=True)
    assert shot.stat().st_size > 50_000
