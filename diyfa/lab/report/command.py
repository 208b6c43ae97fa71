"""`diyfa report`: where diyfa stands on any number of devices, from benchmark files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from diyfa.cli.output import out, print_json
from diyfa.lab.report.model import build_report
from diyfa.lab.report.page import check_libraries, render_page
from diyfa.lab.report.text import markdown, summary
from diyfa.lab.results import read_results


def run(paths: Sequence[Path], output: Path | None, as_markdown: bool, everything: bool, json: bool) -> int:
    """Read the files, print a summary, and write the page to `output` if given. Return the exit status 0.

    Raises OSError or ValueError for a file that is no result file, ModuleNotFoundError without the page's library.
    """
    if output is not None:
        check_libraries()
    report = build_report([read_results(path) for path in paths], everything)
    if output is not None:
        output.write_text(render_page(report), encoding="utf-8", errors="replace")  # lone surrogates
    if json:
        print_json(report)
        return 0
    if as_markdown:
        print(markdown(report), end="")
        return 0
    for line in summary(report, min(out.width, 120)):
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    if output is not None:
        out.print(f"written: {output}", highlight=False, markup=False, soft_wrap=True)
    return 0
