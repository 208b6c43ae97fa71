"""What the Ascend compiler makes of the shipped tiles: memory, pipeline, prediction.

    python benchmarks/npu_tiles.py [--output FILE]
    python benchmarks/npu_tiles.py --markdown FILE
    python benchmarks/npu_tiles.py --rows

No device is needed, only the two compilers (docs/npu.md), and nothing is timed: shares of the cube cores' peak are
what backends/npu/compiler/cost.py predicts for 2 x 16 heads, 8192 rows and keys, float16. Writes one JSON file with
versions and date to benchmarks/results/, which `diyfa report` reads; --markdown prints the table of
docs/log/ascend-tiles.md from such a file, --rows its table of tiles, which needs no compiler.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
# Chips with the same memories, which have the same tiles and compile alike: the gate compiles every tile for an A3 too.
CHIPS = (
    ("Ascend910B3", "Ascend910B2", "Ascend910_9362", "Ascend910_9381"),
    ("Ascend950PR_9589", "Ascend950PR_9599"),
)
FAMILIES = {"Ascend910B3": "910B, A3", "Ascend950PR_9589": "950"}  # by the chip compiled for
KERNELS = ("fwd", "dq", "dkdv")
MEMORIES = ("ub", "l1", "l0a", "l0b", "l0c")
HEAD_DIMS = (64, 128, 256)
MASKS = {"full": -1, "causal": 0}  # window_right


def _kib(size: int) -> float:
    return round(size / 1024, 1)


def _row(compiled: Any, prediction: Any, **what: Any) -> dict[str, Any]:
    """One kernel: what it is, what it uses, what is predicted of it."""
    from diyfa.backends.npu.compiler import l0

    row = {"table": "compiled", "dtype": "float16", **what}
    if compiled.module is None:
        return {**row, "error": compiled.error or "; ".join(compiled.notes)}
    module = compiled.module
    loop = module.loops[0]
    masked = module.loops[-1].masked if len(module.loops) == 1 else module.loops[1].tile
    memory = module.memory | l0.use(module, what["compiled_for"])
    row |= {f"{name}_kib": _kib(memory[name]) for name in MEMORIES if name in memory}
    return {
        **row,
        "bound": module.bound,
        "pipelined": module.pipelined,
        "loops": len(module.loops),
        "passes": round(module.passes(loop.tile), 1),
        "mask_passes": round(module.passes(masked), 1),
        **prediction.numbers(),
    }


def ours(chips: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of the tile table, compiled for the first of `chips` and predicted for each."""
    from diyfa.backends.npu.compiler import aot, cost, specs
    from diyfa.backends.npu.compiler.metrics import reference_problem
    from diyfa.backends.npu.tables import configs

    for head_dim, (mask, right), kernel in product(HEAD_DIMS, MASKS.items(), KERNELS):
        problem = specs.example(chips[0], head_dim=head_dim, window_right=right)
        tile = configs.attention_tile(problem, kernel)
        job = specs.attention_job(problem, kernel, tile)
        compiled = aot.run_back_half(*aot.to_linalg(job, chips[0]), chips[0], job.options)
        for chip in chips:
            own = reference_problem(problem).replace(arch=chip)
            if configs.attention_tile(own, kernel) != tile:
                raise SystemExit(f"{chip} has a tile of its own: list it by itself in CHIPS")
            prediction = compiled.module and cost.predict(compiled.module, own, kernel, tile.block_m, tile.block_n)
            what = {"chip": chip, "compiled_for": chips[0], "kernel": "diyfa", "pass": kernel, "D": head_dim}
            yield _row(compiled, prediction, **what, mask=mask, tile=f"{tile.block_m}x{tile.block_n}")


def markdown(document: dict[str, Any]) -> str:
    """The table for people: chips that were compiled for as one are one line, with a share for each that differs."""
    lines: dict[tuple[Any, ...], dict[str, list[str]]] = {}
    for row in document["rows"]:
        what = (FAMILIES[row["compiled_for"]], row["D"], row["mask"], row["pass"], row["kernel"], row["tile"])
        if "error" in row:
            lines[(*what, row["error"], "", "", "", "")] = {"–": []}
            continue
        sizes = [row.get(f"{name}_kib") for name in MEMORIES]
        used = " / ".join("–" if size is None else f"{size:.0f}" for size in sizes)
        state = ("yes" if row["bound"] else "no", row["pipelined"] or "none")
        passes = f"{row['passes']} + {row['mask_passes']}" if row["mask"] == "causal" else f"{row['passes']}"
        share = f"{100 * row['predicted_share_of_cube_peak']:.0f} %"
        shares = lines.setdefault((*what, used, *state, passes, row["bottleneck"]), {})
        shares.setdefault(share, []).append(row["chip"].removeprefix("Ascend"))
    out = [
        "| chip | D | mask | pass | kernel | tile | UB / L1 / L0A / L0B / L0C KiB "
        "| bound | pipe | passes | waits for | share |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for what, shares in lines.items():
        several = len(shares) > 1
        told = "; ".join(f"{share} ({', '.join(chips)})" if several else share for share, chips in shares.items())
        out.append("| " + " | ".join([*map(str, what), told]) + " |")
    return "\n".join(out)


def rows_of_the_table() -> str:
    """The tiles of the 910B and A3, then of the 950, as docs/log/ascend-tiles.md shows them."""
    from diyfa.arch import NPUArch

    return "\n\n".join([_rows_of(NPUArch.A2, "A2, A3"), _rows_of(NPUArch.A5, "950")])


def _rows_of(family: Any, chips: str) -> str:
    from diyfa.arch import NPUArch
    from diyfa.backends.npu.tables import configs

    names = {"fwd": "fwd", "dq": "dq", "dkdv": "dk/dv", "dbias": "dbias"}
    out = [f"| {chips} | head_dim ≤ | {' | '.join(configs.MODES)} |", "|---|---|" + "---|" * len(configs.MODES)]
    for (kernel, name), (width, bits), head_dim in product(
        names.items(), ((2, "16-bit"), (4, "fp32")), configs.HEAD_DIM_CLASSES
    ):
        first = f"{name}, {bits}" if head_dim == configs.HEAD_DIM_CLASSES[0] else ""
        cells, depths = [], set()
        for mode in configs.MODES:
            # No call asks for a "tail" of dk/dv.
            asked = "even" if (kernel, mode) == ("dkdv", "tail") else mode
            tile = configs.ATTENTION_TILES.get(configs.TileKey(family, kernel, width, head_dim, asked))
            cells.append("" if tile is None else f"{tile.block_m}×{tile.block_n}")
            depths |= {4 if tile is None else tile.pipelined}
        deep = " (two deep)" if family is NPUArch.A2 and depths != {4} else ""
        out.append(
            f"| {first} | {head_dim}{deep} | {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")
        )
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="print the table of this file and do nothing else"
    )
    parser.add_argument("--rows", action="store_true", help="print the table of tiles and do nothing else")
    asked = parser.parse_args()
    if asked.rows:
        print(rows_of_the_table())
        return
    if asked.markdown:
        print(markdown(json.loads(asked.markdown.read_text())))
        return
    from diyfa.backends.npu.compiler import aot
    from diyfa.backends.npu.compiler.metrics import REFERENCE, limits
    from diyfa.bench.record import versions

    aot.check_front_half()
    rows = []
    for chips in CHIPS:
        for row in ours(chips):
            rows.append(row)
            print(json.dumps(row), flush=True)
    now = datetime.now(timezone.utc)
    document = {
        "benchmark": "npu-tiles",
        "device": "none: compiled ahead of time, shares predicted",
        "device_type": "npu",
        "date": now.isoformat(timespec="seconds"),
        "versions": versions(),
        "predicted_for": {**REFERENCE, "dtype": "float16"},
        "limits_kib": {
            chip: {name: size / 1024 for name, size in limits(chip).items()} for chips in CHIPS for chip in chips
        },
        "rows": rows,
    }
    path = asked.output or RESULTS / f"npu-{now:%Y-%m-%d}-tiles.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{len(rows)} kernels -> {path}")


if __name__ == "__main__":
    main()
