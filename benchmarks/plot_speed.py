"""The README's picture of the forward speed, made from a result file of `benchmarks/attention.py`.

    python benchmarks/plot_speed.py [--results FILE] [--output docs/speed.svg]

One group of bars for each head dim and mask, at one length. Needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/h200-2026-12-01-attention.json"  # the source of the README's table
SEQLEN = 4096
NAMES = ("cuDNN", "FlashAttention-3", "FlashAttention-4", "diyfa")
COLORS = ("#c9ccd1", "#9aa3ad", "#6b7683", "#0b7a75")


def figures(results: Path) -> dict[str, dict[tuple[int, bool], float]]:
    """Return {implementation: {(D, causal): TFLOP/s}} of the rows in the README's table."""
    found: dict[str, dict[tuple[int, bool], float]] = {name: {} for name in NAMES}
    for row in json.loads(results.read_text())["rows"]:
        is_equal = "tflops" in row and row["D"] == row["Dv"]
        if is_equal and row["pass"] == "forward" and row["S"] == SEQLEN and row["implementation"] in NAMES:
            found[row["implementation"]][row["D"], row["causal"]] = row["tflops"]
    return found


def draw(results: Path, output: Path) -> None:
    """Write the picture as SVG with its text as text, not as paths."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "diyfa", "font.size": 9}
    speeds, document = figures(results), json.loads(results.read_text())
    groups = sorted(speeds["diyfa"])
    figure, axes = pyplot.subplots(figsize=(8, 2.8), layout="constrained")
    width = 0.8 / len(NAMES)
    for i, (name, color) in enumerate(zip(NAMES, COLORS, strict=True)):
        places = [g + (i - (len(NAMES) - 1) / 2) * width for g in range(len(groups))]
        bars = axes.bar(places, [speeds[name][group] for group in groups], width, label=name, color=color)
        if name == "diyfa":
            axes.bar_label(bars, fmt="%.0f", padding=1)
    axes.set_xticks(range(len(groups)), [f"D = {d}, {'causal' if causal else 'full'}" for d, causal in groups])
    axes.set_ylabel("TFLOP/s")
    axes.set_title(
        f"Attention forward, bfloat16, sequences of {SEQLEN}, {document['device']}, {document['date']}",
        fontsize=9,
        loc="left",
    )
    axes.legend(ncols=len(NAMES), frameon=False, loc="upper left")
    axes.set_ylim(0, 1.3 * max(speeds["diyfa"].values()))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/speed.svg")
    arguments = parser.parse_args()
    draw(arguments.results, arguments.output)
    print(arguments.output)


if __name__ == "__main__":
    main()
