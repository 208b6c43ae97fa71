"""The tile search without a compiler: what it tries, how it chooses, the table that it writes and configs.py reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from diyfa.arch import NPUArch
from diyfa.backends.npu.tables import configs, tiles
from diyfa.lab.npu import aot, best_case, cost, hivm, search, specs
from diyfa.lab.npu.selection import selected_jobs

A2 = "Ascend910B3"


def row(**changes) -> tiles.Row:
    base = tiles.Row(
        chips=("Ascend910B/20", "Ascend910B/24"), kernel="fwd", width=2, head_dim=128, mode="even",
        block_m=128, block_n=256, workspace_buffers=4, vector_loop=None, cube_loop=None, bound=True, pipelined=4,
        predicted_share={"Ascend910B/20": 0.49, "Ascend910B/24": 0.48}, tried=36, compilers="c 1", date="2026-01-02",
    )  # fmt: skip
    return replace(base, **changes)


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_holds_one_row_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    rows = [row(), row(mode="causal", block_n=128)]
    tiles.save(rows, path)
    assert tiles.load(path) == rows
    lines = [line for line in path.read_text().splitlines() if '"kernel"' in line]
    assert len(lines) == 2
    json.loads(path.read_text())


def test_no_file_is_no_rows(tmp_path: Path) -> None:
    assert tiles.load(tmp_path / "absent.json") == []


def test_a_new_row_takes_the_place_of_its_chips(tmp_path: Path) -> None:
    other = row(chips=("Ascend910B/24",), block_n=512, predicted_share={"Ascend910B/24": 0.5})
    found = tiles.merged([row()], other)
    assert {r.chips: r.block_n for r in found} == {("Ascend910B/20",): 256, ("Ascend910B/24",): 512}
    assert tiles.merged([row()], row(block_n=64)) == [row(block_n=64)]


def test_chips_that_agree_share_a_row() -> None:
    first = row(chips=("Ascend910B/20",), predicted_share={"Ascend910B/20": 0.49})
    second = row(chips=("Ascend910B/24",), predicted_share={"Ascend910B/24": 0.48})
    assert tiles.merged([first], second) == [row()]


def test_every_row_of_the_shipped_file_is_used() -> None:
    """What the file says is what a call gets, on every chip that the row is for."""
    rows = tiles.load()
    assert rows
    arch = {"Ascend910B/20": A2, "Ascend910B/24": "Ascend910B2", "Ascend910_93/20": "Ascend910_9362",
            "Ascend910_93/24": "Ascend910_9381", "Ascend950/32": "Ascend950PR_9589",
            "Ascend950/36": "Ascend950PR_9599"}  # fmt: skip
    for r in rows:
        assert r.date
        assert r.compilers
        assert r.tried
        for chip in r.chips:
            assert tiles.chip_class(arch[chip]) == chip
            assert 0 < r.predicted_share[chip] < 1
            dtype = "float16" if r.width == 2 else "float32"
            entry = search.TableEntry(arch[chip], r.kernel, dtype, r.head_dim, r.mode)
            tile = configs.attention_tile(entry.problem(), r.kernel)
            chosen = (tile.block_m, tile.block_n, tile.workspace_buffers, tile.vector_loop, tile.cube_loop)
            assert chosen == r.tile[:5], r
            assert "not timed" in tile.measured


def test_every_row_of_the_table_was_searched() -> None:
    """So each was compiled in its own mode, for the first chip of both families. The gate compiles the 950's tiles in
    the most demanding mode that uses them only, and a tile may fit there and not in another one."""
    searched = {(chip, row.key) for row in tiles.load() for chip in row.chips}
    for first, family in zip(configs.FIRST_CHIPS, (NPUArch.A2, NPUArch.A5), strict=True):
        keys = [key for key in configs.ATTENTION_TILES if key.family is family and not key.cores]
        assert len(keys) == 160
        missing = [
            key for key in keys if (first, tiles.RowKey(key.kernel, key.width, key.head_dim, key.mode)) not in searched
        ]
        assert not missing, missing


def test_a_chip_with_a_row_of_its_own() -> None:
    """A row for 24 cores only where it says something else than that for 20."""
    same = dict(configs.searched_rows([row()]))
    assert {key.cores for key in same} == {0}
    differing = [row(chips=("Ascend910B/20",)), row(chips=("Ascend910_93/24",), block_n=512)]
    found = dict(configs.searched_rows(differing))
    own = configs.TileKey(NPUArch.A3, "fwd", 2, 128, "even", 24)
    assert found[own].block_n == 512
    assert found[configs.TileKey(NPUArch.A2, "fwd", 2, 128, "even")].block_n == 256


def test_a_chip_uses_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    own = configs.TileKey(NPUArch.A2, "fwd", 2, 128, "causal", 24)
    monkeypatch.setitem(configs.ATTENTION_TILES, own, configs.AttentionTile(16, 16))
    assert configs.attention_tile(specs.example("Ascend910B2", window_right=0), "fwd").block_m == 16
    assert configs.attention_tile(specs.example(A2, window_right=0), "fwd").block_m != 16


# --- the search -------------------------------------------------------------------------------------------------------


class Compiler(search.Cache):
    """Instead of the compiler: tiles of up to `limit` scores fit, and what `refuse` says of a job does not."""

    def __init__(self, limit: int, refuse=lambda job: False, bound=lambda job: True) -> None:
        self.compilers = [aot.BackHalf("1.2.0", Path())]
        self.limit = limit
        self.refuse = refuse
        self.bound = bound
        self.asked: list[specs.Job] = []

    def compile(self, job: specs.Job, target: str, compiler: aot.BackHalf) -> tuple[hivm.Module | None, str]:
        self.asked.append(job)
        c = job.constants["c"]
        m, n, d = c.block_m, c.block_n, c.block_d
        if m * n > self.limit or self.refuse(job):
            return None, f"ub overflow: needs {192 * m * n // max(1, self.limit) + 1} KiB of 192"
        tile = hivm.Work(
            products=[hivm.Product(m, n, d, 16), hivm.Product(m, d, n, 16)],
            vector=[hivm.VectorCall("vmuls_vs_1d_float", m * n // 2, 32)],
            loaded=32.0 * n * d,  # enough for a tile to wait for memory
            workspace_read=m * n * 6 + m * d * 4,
            workspace_written=m * n * 6 + m * d * 4,
        )
        bound = self.bound(job)
        return hivm.Module({}, bound, 4, True, 0, [hivm.Loop(tile)], hivm.Work(), m * n), ""


def test_a_tile_that_one_release_refuses_is_not_taken(named) -> None:
    class Older(Compiler):
        """Takes tiles of half the size."""

        def compile(self, job: specs.Job, target: str, compiler: aot.BackHalf) -> tuple[hivm.Module | None, str]:
            self.limit = 64 * 128 if compiler.version == "1.1.0" else 128 * 128
            return super().compile(job, target, compiler)

    compiler = Older(0)
    both = search.Search(A2, compiler, 1)
    compiler.compilers.append(aot.BackHalf("1.1.0", Path()))
    row = both.row(entry())
    assert row.block_m * row.block_n == 64 * 128


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows name the compilers, which need not be installed here."""
    monkeypatch.setattr(aot, "versions", lambda target: "c 1")


def entry(kernel: str = "fwd", mode: str = "even") -> search.TableEntry:
    return search.TableEntry(A2, kernel, "float16", 128, mode)


def test_larger_tiles_win_where_they_move_less(named: None) -> None:
    """Each key is loaded once for a block of rows, so of equal areas the one with more rows is predicted faster."""
    found = search.Search(A2, Compiler(128 * 128), 1).row(entry())
    assert found is not None
    assert found.block_m * found.block_n <= 128 * 128
    assert found.block_m == max(search.ROWS)
    assert set(found.chips) == {"Ascend910B/20", "Ascend910B/24", "Ascend910_93/20", "Ascend910_93/24"}
    assert set(found.predicted_share) == set(found.chips)


def test_an_unbound_tile_loses_to_a_bound_one(named: None) -> None:
    compiler = Compiler(256 * 256, bound=lambda job: job.constants["c"].block_m <= 64)
    found = search.Search(A2, compiler, 1).row(entry())
    assert found is not None
    assert found.bound
    assert found.block_m <= 64


def test_the_winner_holds_for_every_call_that_uses_the_row(named: None) -> None:
    """Packed sequences take the "tail" row too: a tile that they do not compile with is passed over."""

    def refuse(job: specs.Job) -> bool:
        return job.constants["c"].varlen and job.constants["c"].block_m > 128

    found = search.Search(A2, Compiler(128 * 128, refuse), 1).row(entry(mode="tail"))
    assert found is not None
    assert found.block_m == 128


@pytest.mark.parametrize(("target", "asked"), [(A2, False), ("Ascend950PR_9589", True)])
def test_the_tables_own_tile_is_tried_where_the_gate_is_lean(named: None, target: str, asked: bool) -> None:
    """On the 950 the gate compiles each tile once, so the search looks at the calls that the row is for."""
    at = replace(entry(mode="tail"), target=target)
    compiler = Compiler(256 * 512)
    looking = search.Search(target, compiler, 1)
    table = configs.attention_tile(at.problem(), "fwd")
    assert looking.passes_gate(at, looking.one(at, table))
    packed = [job for job in compiler.asked if job.constants["c"].varlen]
    assert bool(packed) == asked


def test_a_tile_of_dbias_holds_for_every_bias(named: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a bias that is the same for all rows ends in a sum."""
    at = entry("dbias", "crowded")
    key = configs.attention_key(at.problem(), "dbias")
    monkeypatch.setitem(configs.ATTENTION_TILES, key, configs.AttentionTile(16, 128))  # what the table has is not tried

    def refuse(job: specs.Job) -> bool:
        return job.constants["c"].bias == "k" and job.constants["c"].block_m > 32

    assert search.Search(A2, Compiler(128 * 128), 1).row(at).block_m > 32
    assert search.Search(A2, Compiler(128 * 128, refuse), 1).row(at).block_m <= 32


def test_a_row_changes_only_for_what_is_more_than_the_margin(named: None) -> None:
    """The table's 64x256 stays where 256x64, which moves less, is predicted better by too little."""
    better = search.Search(A2, Compiler(128 * 128), 1).row(entry(mode="causal"))
    kept = search.Search(A2, Compiler(128 * 128), 1, margin=10.0).row(entry(mode="causal"))
    assert better is not None and kept is not None
    assert (better.block_m, better.block_n) == (256, 64)
    assert (kept.block_m, kept.block_n) == (64, 256)


def test_what_overflows_is_tried_with_other_options() -> None:
    compiler = Compiler(64 * 64)
    search.Search(A2, compiler, 1).search(entry())
    larger = [job for job in compiler.asked if job.constants["c"].block_m * job.constants["c"].block_n > 64 * 64]
    options = {tuple(sorted(job.options.items())) for job in larger}
    assert len(options) > 3
    # One is enough to see that an option makes no room.
    assert sum(job.options.get("tile_mix_vector_loop") == 4 for job in larger) == 1


def test_an_option_that_makes_room_is_tried_with_the_other_shapes() -> None:
    compiler = Compiler(64 * 64)
    fits = compiler.compile

    def roomier(job: specs.Job, target: str, release: aot.BackHalf) -> tuple[hivm.Module | None, str]:
        compiler.limit = 64 * 128 if job.options.get("tile_mix_vector_loop") == 4 else 64 * 64
        return fits(job, target, release)

    compiler.compile = roomier
    tried = search.Search(A2, compiler, 1).search(entry())
    assert {c.area for c in tried.compiled if c.tile.vector_loop == 4} >= {64 * 128}
    assert sum(c.tile.vector_loop == 4 and c.area > 64 * 64 for c in tried.candidates) > 1
    assert sum(c.tile.vector_loop == 2 and c.area > 64 * 64 for c in tried.candidates) == 1


def test_what_could_not_win_is_not_compiled() -> None:
    """No tile is left out whose best case is better than what was found, and small ones are."""
    compiler = Compiler(64 * 128)
    at = entry()
    searched = search.Search(A2, compiler, 1)
    tried = searched.search(at)
    best = max(at.share(c, A2) for c in tried.compiled)
    known = {c.shape for c in tried.candidates}
    out = [shape for shape in search.shapes(at) if shape not in known]
    assert len(out) > 5
    assert tried.pruned >= len(out)
    tile = configs.attention_tile(at.problem(), "fwd")
    least = at.min_vector_cycles(tried.compiled)
    assert least[0] > 0 and least[1] == search.VECTOR_FRACTION * 16  # one call for each tile
    for block_m, block_n in out:
        other = replace(tile, block_m=block_m, block_n=block_n)
        assert at.best_share(other, least) <= best * (1 + search.MARGIN)
    everything = [specs.attention_job(at.problem(), "fwd", replace(tile, block_m=m, block_n=n)) for m, n in out]
    blocks = [(job.constants["c"].block_m, job.constants["c"].block_n) for job in everything]
    found = [searched.candidate(job, replace(tile, block_m=m, block_n=n))
             for job, (m, n) in zip(everything, blocks, strict=True)]  # fmt: skip
    assert max(at.share(c, A2) for c in found if c.module) <= best


def test_a_budget_is_kept_and_what_it_left_out_is_counted(named: None) -> None:
    compiler = Compiler(32 * 32)
    found = search.Search(A2, compiler, 1, budget=4).row(entry())
    assert found is not None or len(compiler.asked) <= 4
    tried = search.Search(A2, Compiler(32 * 64), 1, budget=4).search(entry())
    assert len(tried.candidates) == 4
    assert tried.left > 0


def test_the_best_case_is_one() -> None:
    """What the compiler made of a forward kernel moves and multiplies at least what is reckoned with beforehand."""
    module = hivm.read((Path(__file__).parent / "data" / "fwd_causal_910b3.mlir").read_text())
    product = module.loops[0].tile.products[0]
    problem = specs.example(A2, head_dim=product.k, window_right=0)
    least, around = best_case.min_work(problem, "fwd", product.m, product.n, False)
    work = module.loops[0].tile
    assert least.flops == work.flops
    assert least.loaded <= work.loaded
    assert (least.workspace_read, least.workspace_written) == (work.workspace_read, work.workspace_written)
    assert around.loaded <= module.task.loaded
    assert around.stored <= module.task.stored
    tile = configs.AttentionTile(product.m, product.n)
    share = cost.predict(module, problem, "fwd", product.m, product.n).share
    assert share < best_case.best_share(problem, "fwd", tile, False)


def test_the_gradient_of_a_bias_is_ranked_on_its_own_tiles() -> None:
    problem = specs.example(A2, seqlen_q=512, seqlen_k=1024, window_right=0)
    tasks = list(cost.attention_tasks(problem, "dbias", 64, 128))
    assert len(tasks) == 8
    shared = problem.batch * problem.heads_q
    assert {task.tiles for task in tasks} == {5 * shared, 6 * shared, 7 * shared, 8 * shared}
    assert sum(task.tiles for task in tasks) == shared * sum(
        n0 <= row0 + 63 + 512 for row0 in range(0, 512, 64) for n0 in range(0, 1024, 128)
    )
    found = {p.mode: p for p in search.entries(A2, ("dbias",), ("float16",), (64,), configs.MODES)}
    assert list(found) == list(configs.DBIAS_MODES)
    for mode, at in found.items():
        assert at.problem().bias
        assert configs.attention_mode(at.problem(), 128) == mode


def test_where_nothing_compiles_there_is_no_row() -> None:
    assert search.Search(A2, Compiler(0), 1).row(entry()) is None


def test_compilations_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By everything that goes into them: another tile or option is another compilation."""
    text = (Path(__file__).parent / "data" / "fwd_causal_910b3.mlir").read_text()
    lowered = []

    def lower(linalg, target, options, compiler):
        lowered.append(linalg)
        return text, "", ()

    monkeypatch.setattr(search.metadata, "version", lambda package: "1")
    monkeypatch.setattr(aot, "to_linalg", lambda job, target: ("linalg", True))
    monkeypatch.setattr(aot, "lower", lower)

    class Function:
        cache_key = "sources"
        arg_names = ("BLOCK_M",)

    job = specs.Job("k", "c", Function, {}, {"BLOCK_M": 64}, {"multibuffer": True})
    old, new = aot.BackHalf("1.1.0", tmp_path), aot.BackHalf("1.2.0", tmp_path)
    cache = search.Cache(tmp_path, [new, old])
    first, _ = cache.compile(job, A2, new)
    again, _ = search.Cache(tmp_path, [new]).compile(job, A2, new)
    assert len(lowered) == 1
    assert first == again
    for other in (replace(job, constants={"BLOCK_M": 128}), replace(job, options={"multibuffer": False})):
        cache.compile(other, A2, new)
    cache.compile(job, "Ascend910B2", new)
    cache.compile(job, A2, old)
    assert len(lowered) == 5


def test_without_a_home_compilations_last_as_long_as_the_search(
    no_home: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []
    monkeypatch.setattr(aot, "check_front_half", lambda: None)
    monkeypatch.setattr(aot, "back_halves", lambda target: [])
    monkeypatch.setattr(search.Search, "row", lambda self, entry: seen.append(self.cache.folder.is_dir()))
    assert search.cache_folder() is None
    assert search.main([A2, "--kernel", "fwd", "--head-dim", "64", "--mode", "even"]) == 1
    folder = Path(capsys.readouterr().out.split()[-1])
    assert seen == [True] and not folder.exists()


# --- compiling a selection --------------------------------------------------------------------------------------------


def test_a_tile_that_is_not_shipped_is_not_held_to_the_gate() -> None:
    [shipped] = selected_jobs(A2, {"kernel": ("fwd",), "mode": ("causal",)})
    [asked] = selected_jobs(A2, {"kernel": ("fwd",), "mode": ("causal",), "tile": ((64, 32),)})
    assert shipped.gated
    assert not asked.gated
    assert (asked.constants["c"].block_m, asked.constants["c"].block_n) == (64, 32)
    unbound = aot.Compiled(mixed=True, bound=False, pipelined=0)
    compiler = aot.BackHalf("1.2.0", Path())
    assert not aot._report(shipped, A2, compiler, unbound, 0.0).ok
    assert aot._report(asked, A2, compiler, unbound, 0.0).ok


def test_a_selection_is_every_combination() -> None:
    select = {
        "kernel": ("fwd", "dq"),
        "dtype": ("float16", "float32"),
        "head_dim": (64, 96),
        "mode": ("even", "biased"),
    }
    jobs = list(selected_jobs(A2, select))
    assert len(jobs) == 16
    assert len({(job.kernel, job.case) for job in jobs}) == 16
    with pytest.raises(ValueError, match="cannot select by colour"):
        list(selected_jobs(A2, {"colour": ("red",)}))
    with pytest.raises(ValueError, match="dbias has no mode even or causal: expected one of biased, featured, crowded"):
        list(selected_jobs(A2, {"kernel": ("dbias",)}))
    [dbias] = selected_jobs(A2, {"kernel": ("dbias",), "mode": ("featured",)})
    assert dbias.constants["c"].bias == "qk"  # nobody asks for it without a bias
    assert dbias.constants["c"].dropout
