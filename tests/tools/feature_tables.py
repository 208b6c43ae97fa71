"""Write the feature tables of both READMEs from what the backends say: `make tables`."""

from __future__ import annotations

from pathlib import Path

from diyfa.cli.info import FEATURES, TYPICAL_ARCH, _refusals, _support
from diyfa.registry import load_backend

ROOT = Path(__file__).parents[2]
READMES = ("README.md", "README.zh-CN.md")
# Heading of the first column, which says the language -> the first row: what the marks of a column rest on.
STATE = {
    "feature": {"forward": "forward only", "": "how far", "cuda": "measured on H100 and H200",
                "npu": "compiled and simulated, not yet run on a device", "cpu": "runs"},
    "功能": {"forward": "仅前向", "": "验证程度", "cuda": "已在 H100 与 H200 上实测", "cpu": "可运行",
           "npu": "已编译并模拟，尚未在设备上运行"},
}  # fmt: skip
BEGIN, END = "<!-- features: rows are the names of `diyfa.cli.info.FEATURES` -->\n", "<!-- end of features -->"


def refused() -> dict[str, dict[str, set[str]]]:
    """Backend -> {feature: the passes that refuse it}; without backends whose Triton is not the one installed here."""
    found = {}
    for name, arch in TYPICAL_ARCH.items():
        try:
            support = _support(load_backend(name), arch)
        except ImportError:
            continue
        refusals = [r for r in _refusals(support) if r["op"] != "matmul"]
        found[name] = {f: {r["op"] for r in refusals if r["feature"] == f} for f in FEATURES}
    return found


def marks_of(passes: set[str], forward: str) -> str:
    """The mark of a feature that these passes refuse."""
    return "✓" if not passes else forward if passes == {"attention_bwd"} else "–"


def with_table(page: str) -> str:
    """The page with its table written anew: its head stays, and so do the columns of backends that do not load."""
    before, rest = page.split(BEGIN)
    table, after = rest.split(END)
    head, line, *rows = table.splitlines()
    there = {name: marks for name, *marks in ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows)}
    backends = [cell.strip() for cell in head.split("|")[2:-1]]
    known = refused()
    state = STATE[head.split("|")[1].strip()]
    written = [f"| {' | '.join(state[name] for name in ('', *backends))} |"]
    for feature in FEATURES:
        old = there.get(feature, ["?"] * len(backends))
        marks = [
            marks_of(known[name][feature], state["forward"]) if name in known else was
            for name, was in zip(backends, old, strict=True)
        ]
        written.append(f"| {' | '.join((feature, *marks))} |")
    return before + BEGIN + "\n".join((head, line, *written)) + f"\n{END}" + after


if __name__ == "__main__":
    for readme in READMES:
        page = ROOT / readme
        page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")
