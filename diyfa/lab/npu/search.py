"""Find tiles: compile every candidate, predict its time from what the compiler made of it, write the best to the table.

    python -m diyfa.lab.npu.search 910B3 --kernel fwd --head-dim 128 --jobs 1

The candidates of a row are all shapes whose operands fit the chip, with the compiler's usual options. A second round
tries other options with the best few shapes, and with larger ones that overflowed or were not bound or pipelined.
cost.py ranks candidates on one problem for each mode. If the gate (gate.py) accepts any, only those count. The winner
must also pass in every case of the gate that would use the row.

Candidates that cannot win are not compiled. Their order is that of their best case (best_case.py), and the search ends
when no remaining best case beats the best prediction. It also skips options that did not change another shape's result.

Each row records how many candidates compiled, failed, were skipped, and were left out by --budget. Compilations are
cached on disk under a hash of their inputs, so a second run is cheap. The table is written after each row, so a run may
be interrupted and resumed.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

from diyfa.arch import ELEMENT_BYTES, NPU_SPECS, NPUArch, npu_spec
from diyfa.backends.npu.tables import configs, tiles
from diyfa.lab.npu import aot, best_case, cost, gate, hivm, specs
from diyfa.lab.npu.metrics import REFERENCE
from diyfa.problem import AttentionProblem
from diyfa.tuning import user_cache

KERNELS = ("fwd", "dq", "dkdv", "dbias")
ROWS = (16, 32, 64, 128, 256)
KEYS = (16, 32, 64, 128, 256, 512)
SMALLEST = 1024  # fewest scores in a tile worth trying, up to head dim 256
MARGIN = 0.005  # relative gain for which a row changes, unless --margin is given: less is noise
# Best cases assume this fraction of the least vector work among a place's compiled tiles, per score and per tile. The
# compiler gives every tile the same operations on scores, except fusions and copies: on the 950 up to a quarter more.
VECTOR_FRACTION = 0.75
SHORTLIST = 3  # best shapes to try with other options
PRODUCT_MEMORIES = ("cc", "cbuf")  # what the compiler calls L0C and L1
RESCUED = 4  # largest size, relative to the best shape, of a failed shape to try with other options
OPTIONS: tuple[dict[str, Any], ...] = (
    {"workspace_buffers": 2},
    {"vector_loop": 1},
    {"vector_loop": 2},
    {"vector_loop": 4},
    {"cube_loop": 2},
)
# Chips whose memories equal those of the key. The same compilations are ranked for each of them.
SIBLINGS = {
    "Ascend910B3": ("Ascend910B3", "Ascend910B2", "Ascend910_9362", "Ascend910_9381"),
    "Ascend950PR_9589": ("Ascend950PR_9589", "Ascend950PR_9599"),
}
# Modes ranked on a causal problem; "featured" and "crowded" are ranked with that mask too.
RANKED_CAUSAL = frozenset({"causal", "biased", "featured", "crowded"})


def cache_folder() -> Path | None:
    """Return the default folder of cached compilations; None without a home."""
    base = user_cache()
    return base and base / "npu-compile"


class Cache:
    """Compiled kernels on disk, under a hash of their inputs: sources, types, constants, options, compilers."""

    def __init__(self, folder: Path, compilers: Sequence[aot.BackHalf]) -> None:
        self.folder = folder
        self.compilers = compilers  # predictions use the result of the first
        self.front = threading.Lock()  # Triton's front half is not known to be safe in two threads
        self.last: tuple[specs.Job, str, str] | None = None
        self.hits = 0
        self.misses = 0
        folder.mkdir(parents=True, exist_ok=True)

    def key(self, job: specs.Job, target: str, compiler: aot.BackHalf) -> str:
        """Return the hash of all inputs of the compilation of `job`."""
        constants = {name: str(value) for name, value in sorted(job.constants.items())}
        versions = f"triton-ascend {metadata.version('triton-ascend')}, ascendnpu-ir {compiler.version}"
        fields = [versions, target, job.function.cache_key, sorted(job.signature.items()), constants]
        text = json.dumps([*fields, sorted(job.options.items())], default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def linalg(self, job: specs.Job, target: str) -> str:
        """Return the front half's output for `job`, which is the same for each back half."""
        if self.last is None or self.last[:2] != (job, target):
            self.last = (job, target, aot.to_linalg(job, target)[0])
        return self.last[2]

    def compile(self, job: specs.Job, target: str, compiler: aot.BackHalf) -> tuple[hivm.Module | None, str]:
        """Compile `job`, or read the result from disk. Returns (module or None, error)."""
        file = self.folder / f"{self.key(job, target, compiler)}.gz"
        if file.exists():
            self.hits += 1
            text, error = json.loads(gzip.decompress(file.read_bytes()))
        else:
            self.misses += 1
            try:
                with self.front:
                    linalg = self.linalg(job, target)
            except Exception as failed:  # front ends have no common base class for their errors
                text, error = None, f"front half: {type(failed).__name__}"
            else:
                text, error, _ = aot.lower(linalg, target, job.options, compiler)
            temporary = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
            temporary.write_bytes(gzip.compress(json.dumps([text, error]).encode()))
            temporary.replace(file)  # a reader sees the whole file or none
        return (None, error) if text is None else (hivm.read(text), "")


@dataclass(frozen=True)
class Candidate:
    """A tile and its compilation."""

    tile: configs.AttentionTile
    module: hivm.Module | None
    error: str
    refused: list[str]  # objections of the gate

    @property
    def shape(self) -> tuple[int, int]:
        return self.tile.block_m, self.tile.block_n

    @property
    def trouble(self) -> str:
        """The objection to it: the memory that overflows, another error, the gate's objections, or "" without any."""
        return self.error.partition(" overflow")[0] if self.error else "; ".join(self.refused)

    @property
    def excess(self) -> float:
        """Needed size / existing size of the memory that overflows; 1.0 if none does."""
        needed = re.search(r"overflow: needs (\d+) KiB of (\d+)", self.error)
        return int(needed[1]) / int(needed[2]) if needed else 1.0

    @property
    def area(self) -> int:
        """Number of scores in the tile."""
        return self.tile.block_m * self.tile.block_n

    @property
    def accepted(self) -> bool:
        """Return whether it compiled without an objection of the gate."""
        return self.module is not None and not self.refused


@dataclass(frozen=True)
class TableEntry:
    """A row of the table to fill: a kernel's mode for one operand width and head-dim class."""

    target: str
    kernel: str
    dtype: str
    head_dim: int
    mode: str

    @property
    def key(self) -> tiles.RowKey:
        return tiles.RowKey(self.kernel, ELEMENT_BYTES[self.dtype], self.head_dim, self.mode)

    @property
    def case(self) -> dict[str, Any]:
        """The mode's most demanding features, as changes for `specs.example_case`."""
        return specs.mode_case(self.kernel, self.mode)

    @property
    def bias(self) -> str:
        """Dimensions of attn_bias (`bias.Bias.dims`), "" without one."""
        return self.case.get("bias", "")

    def job(self, tile: configs.AttentionTile, kernel: str = "") -> specs.Job:
        """Return the job of `kernel`, by default the place's, with `tile`."""
        return specs.attention_job(self.problem(), kernel or self.kernel, tile, bias=self.bias)

    def problem(self) -> AttentionProblem:
        """Return the call whose kernel needs most memory in this mode, as the gate compiles it."""
        example = specs.example(self.target, dtype=self.dtype, head_dim=self.head_dim)
        width = configs.widest_head_dim(configs.attention_key(example, self.kernel))
        return specs.example_case(self.target, {**self.case, "dtype": self.dtype, "head_dim": width})[0]

    def ranked_on(self, chip: str) -> AttentionProblem:
        """Return the call on which candidates are ranked for `chip`."""
        right = 0 if self.mode in RANKED_CAUSAL else -1
        return self.problem().replace(arch=chip, window_left=-1, window_right=right, **REFERENCE)

    def share(self, candidate: Candidate, chip: str) -> float:
        """Return the predicted share of the cube peak."""
        assert candidate.module is not None
        tile = candidate.tile
        return cost.predict(candidate.module, self.ranked_on(chip), self.kernel, tile.block_m, tile.block_n).share

    def best_share(self, tile: configs.AttentionTile, vector: tuple[float, float] = (0.0, 0.0)) -> float:
        """Return the greatest share that could be predicted for `tile` on the target.

        `vector`: result of `min_vector_cycles`.
        """
        problem = self.ranked_on(self.target)
        cycles = vector[0] * tile.block_m * tile.block_n + vector[1]
        return best_case.best_share(problem, self.kernel, tile, "k" in self.bias, cycles)

    def min_vector_cycles(self, tried: Iterable[Candidate]) -> tuple[float, float]:
        """Return VECTOR_FRACTION of the least vector cycles among compiled candidates: (per score, of calls per tile).

        Calls count with their fixed overhead. Without a compiled candidate both are 0.
        """
        cycles_by_candidate = []
        for candidate in tried:
            if candidate.module is not None:
                work = candidate.module.loops[0].tile
                calls = sum(call.times for call in work.vector if call.library) * cost.CALL_CYCLES
                cycles_by_candidate.append(((cost.stages(work, self.target).vector - calls) / candidate.area, calls))
        smallest = [min(cycles) for cycles in zip(*cycles_by_candidate, strict=True)] or [0.0, 0.0]
        return VECTOR_FRACTION * smallest[0], VECTOR_FRACTION * smallest[1]


def shapes(entry: TableEntry) -> Iterator[tuple[int, int]]:
    """Yield the (rows, keys) of tiles whose operands fit the chip, the largest first."""
    problem = entry.problem()
    row = configs.attention_tile(problem, entry.kernel)
    sizes = sorted(product(ROWS, KEYS), key=lambda size: -size[0] * size[1])
    for block_m, block_n in sizes:
        if block_m * block_n < SMALLEST and entry.head_dim <= 256:
            continue
        if configs.fits(replace(row, block_m=block_m, block_n=block_n), problem, entry.kernel):
            yield block_m, block_n


@dataclass
class Tried:
    """The candidates that a search compiled, and the numbers of those that it did not."""

    candidates: list[Candidate]
    pruned: int = 0  # best case not above the best accepted one by the margin, or options that change nothing
    left: int = 0  # not compiled because of the budget

    @property
    def compiled(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate.module is not None]


class Search:
    """The search on one chip.

    `budget`: most candidates to compile for a place; 0: all that could win. `margin`: relative gain of the prediction
    for which a row changes.
    """

    def __init__(
        self,
        target: str,
        cache: Cache,
        jobs: int,
        budget: int = 0,
        verbose: bool = False,
        margin: float = MARGIN,
    ) -> None:
        self.target = target
        self.cache = cache
        self.jobs = jobs
        self.budget = budget
        self.verbose = verbose
        self.margin = margin
        self.pool = ThreadPoolExecutor(jobs)
        self.gate: dict[tuple[str, configs.TileKey], list[specs.Job]] = {}
        for job in specs.shipped_jobs(target, full=True):
            if job.problem is not None:
                self.gate.setdefault((job.step, configs.attention_key(job.problem, job.step)), []).append(job)

    def compile(self, entry: TableEntry, to_compile: Iterable[configs.AttentionTile]) -> list[Candidate]:
        """Compile every tile for `entry`, `jobs` at a time."""
        return list(self.pool.map(lambda tile: self.one(entry, tile), to_compile))

    def one(self, entry: TableEntry, tile: configs.AttentionTile) -> Candidate:
        """Compile one tile for `entry`. Raises RuntimeError if its prediction exceeds its best case."""
        candidate = self.candidate(entry.job(tile), tile)
        if candidate.module is not None and entry.share(candidate, self.target) > 1.0001 * entry.best_share(tile):
            raise RuntimeError(f"{entry} {tile}: predicted better than its best case, so best_case.py is wrong")
        if self.verbose:
            result = f"{100 * entry.share(candidate, self.target):.1f} %" if candidate.module else candidate.error
            why = "; ".join([result, *candidate.refused])
            print(f"  {tile.block_m}x{tile.block_n} {_launched(tile)[2:]}: {why}", flush=True)
        return candidate

    def candidate(self, job: specs.Job, tile: configs.AttentionTile) -> Candidate:
        """Compile one job with all compilers and gate it. The module is the installed compiler's, if all accept it."""
        first_module = None
        refused: list[str] = []
        for compiler in self.cache.compilers:
            module, error = self.cache.compile(job, self.target, compiler)
            if module is None:
                return Candidate(tile, None, error, [])
            first_module = first_module or module
            refused += gate.failures(
                self.target, job.kernel, job.case, module.bound, module.pipelined, compiler.version
            )
        return Candidate(tile, first_module, "", refused)

    def search(
        self, entry: TableEntry, before: Iterable[Candidate] = (), excluded: Iterable[configs.AttentionTile] = ()
    ) -> Tried:
        """Compile candidates for `entry` in the order of their best case, until none that remains could win.

        `before`: candidates of earlier searches. `excluded`: tiles that cannot be the row, whatever their prediction.
        """
        table = configs.attention_tile(entry.problem(), entry.kernel)
        usual = replace(table, workspace_buffers=4, cube_loop=None, bound=False, pipelined=0)
        by_shape = [replace(usual, block_m=m, block_n=n) for m, n in shapes(entry)]
        firsts = {_launched(tile) for tile in (table, *by_shape)}
        tried = Tried([*before] or self.compile(entry, [table]))
        while True:
            compiled = {_launched(candidate.tile) for candidate in tried.candidates}
            waiting = [tile for tile in by_shape if _launched(tile) not in compiled]
            hopeful = self.hopeful(entry, waiting, tried.candidates, excluded)
            if not hopeful:
                first = [candidate for candidate in tried.candidates if _launched(candidate.tile) in firsts]
                with_options = {_launched(tile): tile for tile in self.with_options(entry, first)}
                others = [tile for launched, tile in with_options.items() if launched not in compiled]
                changing = [tile for tile in others if self.may_change(entry, tile, tried.candidates)]
                hopeful = self.hopeful(entry, changing, tried.candidates, excluded)
                excess = {candidate.shape: candidate.excess for candidate in first}
                hopeful.sort(key=lambda tile: excess[tile.block_m, tile.block_n])  # smallest overflow first
                waiting += others
            room = self.budget - len(tried.candidates) if self.budget else len(hopeful)
            if not hopeful or room <= 0:
                return replace(tried, pruned=len(waiting) - len(hopeful), left=len(hopeful))
            tried.candidates += self.compile(entry, hopeful[: min(self.jobs, room)])

    def hopeful(
        self,
        entry: TableEntry,
        waiting: Iterable[configs.AttentionTile],
        tried: list[Candidate],
        excluded: Iterable[configs.AttentionTile],
    ) -> list[configs.AttentionTile]:
        """Return the tiles of `waiting` whose best case beats the best accepted candidate, the highest first."""
        accepted = [entry.share(c, self.target) for c in tried if c.accepted and c.tile not in excluded]
        goal = max(accepted, default=0.0) * (1.0 + self.margin)
        vector = entry.min_vector_cycles(tried)
        deep = [tile for tile in waiting if not accepted or self.deep(entry, tile)]
        best = {tile: entry.best_share(tile, vector) for tile in deep if not overflows(tile, tried)}
        return sorted((tile for tile, share in best.items() if share > goal), key=lambda t: best[t], reverse=True)

    def deep(self, entry: TableEntry, tile: configs.AttentionTile) -> bool:
        """Return whether `tile` has enough workspace buffers for the pipeline depth that the gate requires."""
        job = entry.job(tile)
        for compiler in self.cache.compilers:
            exception = gate.exception_for(self.target, job.kernel, job.case, compiler.version)
            if tile.workspace_buffers < (exception.pipelined if exception else gate.DEPTH):
                return False
        return True

    def with_options(self, entry: TableEntry, first: list[Candidate]) -> Iterator[configs.AttentionTile]:
        """Yield the best tiles of the `first` round, and larger ones that it did not accept, with other options."""
        best = self.ranked(entry, first)
        yield from (replace(c.tile, **options) for c in best[:SHORTLIST] for options in OPTIONS)
        size = best[0].area if best and best[0].accepted else SMALLEST
        # No option makes room in L0C, which holds the accumulators.
        lost = [c for c in first if not c.accepted and size < c.area <= RESCUED * size and "cc overflow" not in c.error]
        yield from (replace(c.tile, **options) for c in lost for options in OPTIONS)

    def may_change(self, entry: TableEntry, tile: configs.AttentionTile, tried: list[Candidate]) -> bool:
        """Return whether the options of `tile` may change its result.

        They do not if another shape with the same `trouble` had exactly the same outcome with and without them.
        """
        options = _launched(tile)[2:]
        plain = {c.shape: c for c in reversed(tried)}  # the first candidate of each shape
        others = [(plain[c.shape], c) for c in tried if _launched(c.tile)[2:] == options and c is not plain[c.shape]]
        trouble = plain[tile.block_m, tile.block_n].trouble
        return not any(
            before.trouble == trouble and self.outcome(entry, before) == self.outcome(entry, after)
            for before, after in others
        )

    def outcome(self, entry: TableEntry, candidate: Candidate) -> tuple[Any, ...]:
        """Return all properties of a candidate on which the search depends."""
        share = entry.share(candidate, self.target) if candidate.module is not None else 0.0
        return candidate.error, candidate.refused, share

    def ranked(self, entry: TableEntry, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Return the compiled candidates by predicted share, the highest first; refused ones come last."""
        with_module = [candidate for candidate in candidates if candidate.module is not None]
        return sorted(with_module, key=lambda c: (c.accepted, entry.share(c, self.target)), reverse=True)

    def passes_gate(self, entry: TableEntry, candidate: Candidate) -> bool:
        """Return whether every call that would use the row compiles as well as the candidate did."""
        key = configs.attention_key(entry.problem(), entry.kernel)
        is_a2 = configs.family(self.target) is NPUArch.A2  # for other chips the gate compiles each tile once
        if is_a2 and candidate.tile == configs.ATTENTION_TILES[key]:
            return True
        for job in self.gate.get((entry.kernel, key), ()):
            assert job.problem is not None
            if not is_a2 and job.problem.dtype != entry.dtype:  # bfloat16, which uses the rows of float16
                continue
            bias = job.constants["c"].bias
            variant = specs.attention_job(job.problem, entry.kernel, candidate.tile, bias=bias)
            compiled = self.candidate(variant, candidate.tile)
            if compiled.module is None or (candidate.accepted and not compiled.accepted):
                return False
        if entry.kernel != "dbias":
            return True
        # A bias without a row dimension ends in a sum over rows, which is another kernel.
        other = self.candidate(specs.attention_job(entry.problem(), "dbias", candidate.tile, bias="k"), candidate.tile)
        return other.module is not None and (other.accepted or not candidate.accepted)

    def row(self, entry: TableEntry) -> tiles.Row | None:
        """Return the best candidate as a row, or None if none passes."""
        table = configs.attention_tile(entry.problem(), entry.kernel)
        tried, excluded = self.search(entry), []
        while True:
            ranked = [c for c in self.ranked(entry, tried.candidates) if c.tile not in excluded]
            winner = ranked[0] if ranked else None
            if winner is None or self.passes_gate(entry, winner):
                break
            excluded.append(winner.tile)
            tried = self.search(entry, tried.candidates, excluded)
        present = next((c for c in ranked if c.tile == table and c.accepted), None)
        if winner is not None and present is not None:
            gain = entry.share(winner, self.target) / entry.share(present, self.target) - 1.0
            winner = winner if gain > self.margin else present
        if winner is None:
            return None
        assert winner.module is not None
        chips = SIBLINGS.get(self.target, (self.target,))
        return tiles.Row(
            chips=tuple(sorted(tiles.chip_class(chip) for chip in chips)),
            kernel=entry.kernel,
            width=ELEMENT_BYTES[entry.dtype],
            head_dim=entry.head_dim,
            mode=entry.mode,
            block_m=winner.tile.block_m,
            block_n=winner.tile.block_n,
            workspace_buffers=winner.tile.workspace_buffers,
            vector_loop=winner.tile.vector_loop,
            cube_loop=winner.tile.cube_loop,
            bound=winner.module.bound,
            pipelined=winner.module.pipelined,
            predicted_share={tiles.chip_class(chip): round(entry.share(winner, chip), 4) for chip in chips},
            tried=len(tried.compiled),
            failed=len(tried.candidates) - len(tried.compiled),
            pruned=tried.pruned,
            left=tried.left,
            compilers=aot.versions(self.target),
            date=datetime.now(timezone.utc).date().isoformat(),
        )


def overflows(tile: configs.AttentionTile, tried: Iterable[Candidate]) -> bool:
    """Return whether `tile` must overflow L0C or L1, since another shape with its options did.

    The use of these memories grows with rows and with keys, at most with their product. (That of the unified buffer
    does not: a tile that only one vector core works on needs twice as much.)
    """
    for other in tried:
        if _launched(other.tile)[2:] != _launched(tile)[2:] or other.trouble not in PRODUCT_MEMORIES:
            continue
        rows, keys = tile.block_m / other.tile.block_m, tile.block_n / other.tile.block_n
        if min(rows, keys) >= 1.0 or (max(rows, keys) <= 1.0 and other.excess * rows * keys > 1.0):
            return True
    return False


def _launched(tile: configs.AttentionTile) -> tuple[int | None, ...]:
    """Return the properties of `tile` on which its compilation depends."""
    return tile.block_m, tile.block_n, tile.workspace_buffers, tile.vector_loop, tile.cube_loop


def entries(
    target: str, kernels: Iterable[str], dtypes: Iterable[str], head_dims: Iterable[int], modes: Iterable[str]
) -> Iterator[TableEntry]:
    """Yield every row to fill. "dkdv" has no "tail": such calls use its "even" row."""
    for kernel, dtype, head_dim, mode in product(kernels, dtypes, head_dims, modes):
        if mode in configs.modes(kernel) and not (kernel == "dkdv" and mode == "tail"):
            yield TableEntry(target, kernel, dtype, head_dim, mode)


def describe(row: tiles.Row) -> str:
    """Describe a row in one line."""
    options = f"buffers {row.workspace_buffers}, vector loop {row.vector_loop}, cube loop {row.cube_loop}"
    state = f"{'bound' if row.bound else 'unbound'}, pipeline {row.pipelined}"
    shares_text = ", ".join(f"{chip} {100 * share:.1f} %" for chip, share in row.predicted_share.items())
    key = f"{row.kernel} {row.width} bytes D<={row.head_dim} {row.mode}"
    tried = f"of {row.tried} compiled, {row.failed} that failed, {row.pruned} that could not win"
    left = f", {row.left} left out" if row.left else ""
    return f"{key}: {row.block_m}x{row.block_n} ({options}), {state}; predicted {shares_text}; {tried}{left}"


def main(arguments: list[str] | None = None) -> int:
    """Search, print each row, write the table. The status is 1 when a row found nothing, 2 without the compilers."""
    chips = [name.removeprefix("Ascend") for name in NPU_SPECS]
    parser = argparse.ArgumentParser(prog="python -m diyfa.lab.npu.search", description=main.__doc__)
    parser.add_argument("chip", help=f"one of {', '.join(chips)}, with or without Ascend before it")
    parser.add_argument("--kernel", action="append", choices=KERNELS)
    parser.add_argument("--dtype", action="append", choices=["float16", "float32"], help="float16 stands for bfloat16")
    parser.add_argument("--head-dim", action="append", type=int, choices=configs.HEAD_DIM_CLASSES)
    parser.add_argument("--mode", action="append", choices=configs.MODES)
    parser.add_argument("--jobs", type=int, default=1, help="back halves at a time")
    parser.add_argument("--budget", type=int, default=0, help="the most candidates to compile for a row (0: no limit)")
    parser.add_argument(
        "--margin",
        type=float,
        default=MARGIN,
        help=f"how much better, as a part, the prediction must be for a row to change ({MARGIN}); the cost model's "
        "error against published figures is 0.13",
    )
    parser.add_argument("--verbose", action="store_true", help="print each candidate")
    parser.add_argument(
        "--cache",
        type=Path,
        default=cache_folder(),
        help="folder of finished compilations (in the user's cache; without a home they last as long as the search)",
    )
    parser.add_argument("--output", type=Path, default=tiles.PATH, help="the table to write")
    parser.add_argument("--dry-run", action="store_true", help="print, write nothing")
    options = parser.parse_args(arguments)
    target = options.chip if options.chip.startswith("Ascend") else f"Ascend{options.chip}"
    if npu_spec(target) is None:
        parser.error(f"unknown Ascend chip {options.chip!r}")
    try:
        aot.check_front_half()
        compilers = aot.back_halves(target)
        for compiler in compilers:
            compiler.program(target)
    except aot.CompilerMissing as missing:
        print(missing, file=sys.stderr)
        return 2
    dtypes, head_dims = options.dtype or ("float16",), options.head_dim or (64, 128, 256)
    rows_to_fill = entries(target, options.kernel or KERNELS, dtypes, head_dims, options.mode or configs.MODES)
    nothing = False
    with nullcontext(options.cache) if options.cache else tempfile.TemporaryDirectory() as folder:
        cache = Cache(Path(folder), compilers)
        search = Search(target, cache, options.jobs, options.budget, options.verbose, options.margin)
        for entry in rows_to_fill:
            row = search.row(entry)
            if row is None:
                nothing = True
                print(f"{entry}: nothing compiles", flush=True)
                continue
            print(describe(row), flush=True)
            if not options.dry_run:
                tiles.save(tiles.merged(tiles.load(options.output), row), options.output)
        print(f"{cache.misses} compiled, {cache.hits} from {folder}", flush=True)
    return int(nothing)


if __name__ == "__main__":
    sys.exit(main())
