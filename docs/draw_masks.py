"""The picture of the page "Masks": named masks, and which of their blocks are full, partial and empty.

    python docs/draw_masks.py [--output docs/masks.svg]

Needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from diyfa import BlockMask, block_mask, masks

LENGTH, BLOCK = 512, 64
COLORS = ("#ffffff", "#f2b880", "#0b7a75")  # of empty, partial and full blocks
HIDDEN = "#e9e4da"  # pairs that a partial block hides


def examples() -> dict[str, BlockMask]:
    """Return the masks of the picture by title."""
    ids = torch.tensor([180, 100, 232]).repeat_interleave(torch.tensor([180, 100, 232]))
    parents = (torch.arange(64) - 1) // 2  # a binary tree
    parents[0] = -1
    functions = {
        "causal": masks.causal,
        "document(ids)": masks.document(ids),
        "prefix_lm(150)": masks.prefix_lm(150),
        "sliding_window(120)": masks.sliding_window(120),
        "dilated(16, 8)": masks.dilated(16, 8),
        "sliding_tile((8, 8, 8), (4, 4, 4), (1, 1, 2))": masks.sliding_tile((8, 8, 8), (4, 4, 4), (1, 1, 2)),
        "neighborhood((16, 32), (5, 9))": masks.neighborhood((16, 32), (5, 9)),
        "tree(parents, 448)": masks.tree(parents, LENGTH - 64),
    }
    return {name: block_mask(f, 1, 1, LENGTH, LENGTH, block_size=BLOCK) for name, f in functions.items()}


def draw(output: Path) -> None:
    """Write the picture as SVG with its text as text."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import colors, pyplot
    from matplotlib.patches import Patch

    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "diyfa", "font.size": 7}
    figure, grid = pyplot.subplots(2, 4, figsize=(9, 5.2), layout="constrained")
    palette = colors.ListedColormap([*COLORS, HIDDEN])
    for axes, (name, mask) in zip(grid.flat, examples().items(), strict=True):
        kinds = mask.kinds()[0, 0].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        picture = torch.where((kinds == 1) & ~mask.to_dense()[0, 0], 3, kinds)
        axes.imshow(picture[::2, ::2].byte().numpy(), cmap=palette, vmin=0, vmax=3, interpolation="nearest")
        axes.set_title(f"{name}\ndensity {mask.density():.0%}", fontsize=7)
        lines = [x / 2 - 0.5 for x in range(0, LENGTH + 1, BLOCK)]
        axes.set_xticks(lines, [""] * len(lines))
        axes.set_yticks(lines, [""] * len(lines))
        axes.grid(color="#b8b8b8", linewidth=0.4)
        axes.tick_params(length=0)
    grid[1, 0].set_xlabel("keys")
    grid[1, 0].set_ylabel("queries")
    labels = ("empty: skipped", "partial, a visible pair", "full: no mask", "partial, a hidden pair")
    handles = [Patch(facecolor=c, edgecolor="#b8b8b8", label=x) for c, x in zip((*COLORS, HIDDEN), labels, strict=True)]
    figure.legend(handles=[handles[i] for i in (2, 1, 3, 0)], loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(output, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("masks.svg"))
    arguments = parser.parse_args()
    draw(arguments.output)
    print(arguments.output)


if __name__ == "__main__":
    main()
