"""Write the speed tables of both READMEs, one for each card, from the result files: `make tables`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
READMES = ("README.md", "README.zh-CN.md")
LENGTH = 4096
PEERS = ("cuDNN", "FlashAttention-3", "FlashAttention-4", "diyfa")
# Heads of columns by language: mask, and what stands before a peer's name.
WORDS = {"README.md": ("mask", "forward: ", "backward: "), "README.zh-CN.md": ("掩码", "前向：", "反向：")}


class Source(NamedTuple):
    """One result file, the head dims taken from it, and the file's names of `PEERS`, "" for one that it lacks."""

    file: str
    dims: tuple[int, ...]
    names: tuple[str, str, str, str]


CARDS: dict[str, dict[str, tuple[Source, ...]]] = {
    "H200": {
        "forward": (Source("h200-2026-12-01-attention.json", (64, 128, 256), PEERS),),
        "backward": (Source("h200-2026-12-01-attention.json", (64, 128, 256), PEERS),),
    },
    "H100": {
        "forward": (
            Source("h100-2026-11-28-forward-mixture.json", (64, 128, 256), ("cuDNN", "FlashAttention-3", "", "diyfa")),
        ),
        "backward": (
            Source("h100-2026-11-26-hopper-bwd-order.json", (64, 128), ("cuDNN", "", "FlashAttention-4", "diyfa")),
            Source("h100-2026-11-27-hopper-bwd.json", (256,), ("cuDNN", "", "FlashAttention-4", "diyfa")),
        ),
    },
}


def figures(card: str, direction: str) -> dict[tuple[int, bool], dict[str, float]]:
    """Return TFLOP/s at `LENGTH` keys by (head dim, causal) and implementation, as the files have them."""
    found: dict[tuple[int, bool], dict[str, float]] = {}
    for source in CARDS[card][direction]:
        rows: list[dict[str, Any]] = json.loads((RESULTS / source.file).read_text(encoding="utf-8"))["rows"]
        for row in rows:
            wanted = row.get("S") == LENGTH and row["D"] in source.dims and row.get("Dv", row["D"]) == row["D"]
            is_plain = "purpose" not in row and row.get("group", 1) == 1 and "tflops" in row
            if not wanted or not is_plain or row["pass"] != direction:
                continue
            if row["implementation"] in source.names:
                peer = PEERS[source.names.index(row["implementation"])]
                found.setdefault((row["D"], row["causal"]), {}).setdefault(peer, row["tflops"])
    return found


def lines(card: str, readme: str) -> Iterator[str]:
    """Yield the table of one card: the fastest of each row and direction is bold."""
    mask, *directions = WORDS[readme]
    columns = [
        (direction, word, [p for p in PEERS if any(p in row for row in figures(card, direction).values())])
        for direction, word in zip(("forward", "backward"), directions, strict=True)
    ]
    heads = [f"{word}{peer}" for _, word, peers in columns for peer in peers]
    yield f"| {card} | {mask} | {' | '.join(heads)} |"
    yield "|---" * (2 + len(heads)) + "|"
    for dim, causal in sorted(figures(card, "forward")):
        cells = []
        for direction, _, peers in columns:
            row = figures(card, direction)[dim, causal]
            cells += [
                f"**{row[peer]:.0f}**" if row[peer] == max(row.values()) else f"{row[peer]:.0f}" for peer in peers
            ]
        yield f"| D = {dim} | {'causal' if causal else 'full'} | {' | '.join(cells)} |"


def with_tables(readme: str) -> str:
    """Return the README with all speed tables written anew."""
    text = (ROOT / readme).read_text(encoding="utf-8")
    for card in CARDS:
        begin, end = f"<!-- speed: {card} -->\n", "<!-- end of speed -->"
        before, rest = text.split(begin)
        table = "\n".join(lines(card, readme))
        text = before + begin + table + "\n" + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    for name in READMES:
        (ROOT / name).write_text(with_tables(name), encoding="utf-8")
