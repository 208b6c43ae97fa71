"""The autotuner, with fake kernels and a fake timer: no device is needed."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources, PTXASError

from diyfa.backends.cuda.runtime import tune
from diyfa.tuning import bucket_size


@dataclass(frozen=True)
class Tile:
    block: int
    num_warps: int = 4


TILES = [Tile(32), Tile(64), Tile(128)]
DURATION_MS = {32: 3.0, 64: 1.0, 128: 2.0}


class FakeKernel:
    """Counts its runs; "takes" the time in `durations`, read by `timer`."""

    def __init__(self, durations=DURATION_MS, delay_s=0.0):
        self.durations, self.delay_s = durations, delay_s
        self.runs: list[int] = []

    def run(self, tile):
        time.sleep(self.delay_s)
        self.runs.append(tile.block)
        duration = self.durations[tile.block]
        if isinstance(duration, Exception):
            raise duration

    def timer(self, call):
        call()
        return self.durations[self.runs[-1]]


def make_tuner(kernel, model="Test GPU", may_measure=True, rounds=1):
    return tune.Tuner(kernel.timer, device=lambda: (0, model), may_measure=lambda: may_measure, rounds=rounds)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DIYFA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("DIYFA_AUTOTUNE", raising=False)
    return tmp_path


def the_file(folder):
    (path,) = (folder / "tune").glob("*.json")
    return path


def test_candidates_are_measured_in_rounds():
    """A slow spell of the device (here: the whole first round) meets every candidate and decides nothing."""
    kernel = FakeKernel()
    spell = iter([10.0] * len(TILES))
    tuner = make_tuner(kernel, rounds=3)
    tuner._timer = lambda call: kernel.timer(call) * next(spell, 1.0)
    assert tuner.best("k", "bucket", TILES, kernel.run, TILES[0]) == Tile(64)
    assert kernel.runs == [32, 64, 128] * 3


@pytest.mark.parametrize(("n", "expected"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128), (2**31 + 1, 2**32)])
def test_bucket_size(n, expected):
    assert bucket_size(n) == expected


def test_default_is_measured_even_when_no_candidate():
    kernel = FakeKernel()
    assert make_tuner(kernel).best("k", 1, TILES[::2], kernel.run, Tile(64)) == Tile(64)
    assert kernel.runs.count(64) == 1


def test_buckets_kernels_and_devices_are_separate():
    kernel = FakeKernel()
    tuner = make_tuner(kernel)
    tuner.best("k", 1, TILES, kernel.run, TILES[0])
    tuner.best("k", 2, TILES, kernel.run, TILES[0])
    tuner.best("other", 1, TILES, kernel.run, TILES[0])
    make_tuner(kernel, model="Other GPU").best("k", 1, TILES, kernel.run, TILES[0])
    assert len(kernel.runs) == 4 * len(TILES)


def test_disk_cache_spares_a_second_process_the_measuring(own_cache):
    first, second = FakeKernel(), FakeKernel()
    make_tuner(first).best("k", (1, "x"), TILES, first.run, TILES[0])
    assert make_tuner(second).best("k", (1, "x"), TILES, second.run, TILES[0]) == Tile(64)
    assert second.runs == []
    row = json.loads(the_file(own_cache).read_text())["rows"]["k"]["(1, 'x')"]
    assert row["config"] == {"block": 64, "num_warps": 4}
    assert row["ms"] == 1.0


def test_stored_config_that_left_the_table_is_measured_again():
    first, second = FakeKernel(), FakeKernel()
    make_tuner(first).best("k", 1, TILES, first.run, TILES[0])
    assert make_tuner(second).best("k", 1, [Tile(32), Tile(128)], second.run, Tile(32)) == Tile(128)
    assert second.runs == [32, 128]


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b'{"format": 99}', b"\xff\xfe\x00", b'{"format": 1, "identity": {}, "rows": {}}', b"7", b"NaN",
    b"null", b"9" * 5000, b"[" * 200_000, b'{"rows":' * 100_000,
], ids=lambda content: content[:20].decode(errors="replace"))  # fmt: skip
def test_corrupt_or_foreign_file_is_measured_over(own_cache, content, caplog):
    kernel = FakeKernel()
    make_tuner(kernel).best("k", 1, TILES, kernel.run, TILES[0])
    path = the_file(own_cache)
    path.write_bytes(content)
    again = FakeKernel()
    with caplog.at_level(logging.WARNING):
        assert make_tuner(again).best("k", 1, TILES, again.run, TILES[0]) == Tile(64)
    assert len(again.runs) == len(TILES)
    assert str(path) in caplog.text
    assert "1" in json.loads(path.read_text())["rows"]["k"]


HOSTILE_ROWS = {
    "no object": 7,
    "no config": {"ms": 1.0, "measured": "2026-01-01"},
    "a list": [],
    "config of text": {"config": "fast", "ms": 1.0, "measured": "2026-01-01"},
    "nested config": {"config": {"block": {"block": [64]}}, "ms": 1.0, "measured": "2026-01-01"},
    "no time": {"config": {"block": 64, "num_warps": 4}, "measured": "2026-01-01"},
    "NaN": {"config": {"block": 64, "num_warps": 4}, "ms": float("nan"), "measured": "2026-01-01"},
    "endless": {"config": {"block": 64, "num_warps": 4}, "ms": float("inf"), "measured": "2026-01-01"},
    "huge": {"config": {"block": 64, "num_warps": 4}, "ms": 10**400, "measured": "2026-01-01"},
    "text": {"config": {"block": 64, "num_warps": 4}, "ms": "1.0", "measured": "2026-01-01"},
    "no date": {"config": {"block": 64, "num_warps": 4}, "ms": 1.0, "measured": None},
}


def test_invalid_rows_are_dropped_and_valid_ones_stay(own_cache):
    kernel = FakeKernel()
    tuner = make_tuner(kernel)
    tuner.best("k", 1, TILES, kernel.run, TILES[0])
    path = the_file(own_cache)
    content = json.loads(path.read_text())
    content["rows"]["k"].update(HOSTILE_ROWS)
    path.write_text(json.dumps(content))
    assert [row.bucket for row in tuner.stored()] == ["1"]
    again = FakeKernel()
    tuner = make_tuner(again)
    assert tuner.best("k", 1, TILES, again.run, TILES[0]) == Tile(64) and again.runs == []
    tuner.best("k", 2, TILES, again.run, TILES[0])
    assert set(json.loads(path.read_text())["rows"]["k"]) == {"1", "2"}
    assert tuner.clear() == 2


def plant_folder(path):
    path.mkdir()


def plant_loop(path):
    path.symlink_to(path)


def plant_pipe(path):
    os.mkfifo(path)


@pytest.mark.parametrize("plant", [plant_folder, plant_loop, plant_pipe])
def test_a_folder_instead_of_the_file(own_cache, plant, caplog):
    """Each call works; a folder stays, whoever's it is, and no temporary file is left beside it."""
    kernel = FakeKernel()
    make_tuner(kernel).best("k", 1, TILES, kernel.run, TILES[0])
    path = the_file(own_cache)
    path.unlink()
    plant(path)
    tuner = make_tuner(kernel)
    assert tuner.stored() == [] and str(path) in caplog.text
    assert tuner.best("k", 1, TILES, kernel.run, TILES[0]) == Tile(64)
    assert not list(path.parent.glob("*.tmp"))
    assert tuner.clear() == (0 if path.is_dir() else 1)
    assert path.is_dir() == (plant is plant_folder)


def test_without_a_home_folder_nothing_is_stored(no_home, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    kernel = FakeKernel()
    tuner = make_tuner(kernel)
    for _ in range(2):
        assert tuner.best("k", 1, TILES, kernel.run, TILES[0]) == Tile(64)
    assert len(kernel.runs) == 3 and "no home folder" in caplog.text
    assert tuner.is_settled("k", 1)
    assert "DIYFA_CACHE_DIR" in tuner.unavailable()
    assert tuner.stored() == [] and tuner.clear() == 0
    assert not tuner.is_settled("k", 1) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("changed", ["diyfa", "triton", "cuda"])
def test_new_version_starts_afresh(own_cache, monkeypatch, changed):
    old, new = FakeKernel(), FakeKernel()
    make_tuner(old).best("k", 1, TILES, old.run, TILES[0])
    identity = tune.identity
    monkeypatch.setattr(tune, "identity", lambda name: {**identity(name), changed: "99.0"})
    make_tuner(new).best("k", 1, TILES, new.run, TILES[0])
    assert len(new.runs) == len(TILES)
    assert len(list((own_cache / "tune").glob("*.json"))) == 2


@pytest.mark.parametrize(
    "error", [OutOfResources(300, 200, "shared memory"), PTXASError("no"), RuntimeError("PassManager::run failed")]
)
def test_candidate_that_cannot_run_is_skipped(error):
    for broken, fastest in ((64, 128), (32, 64)):  # the fastest, and the default
        kernel = FakeKernel({**DURATION_MS, broken: error})
        assert make_tuner(kernel, model=f"GPU {broken}").best("k", 1, TILES, kernel.run, TILES[0]) == Tile(fastest)


class AskedTuner(tune.Tuner):
    """One that measures where it is asked to only."""

    def _measures_unasked(self):
        return False


def test_the_tuner_measures_on_request_only(own_cache):
    kernel = FakeKernel()
    tuner = AskedTuner(kernel.timer, device=lambda: (0, "Test GPU"), may_measure=lambda: True, rounds=1)
    assert tuner.best("k", 1, TILES, kernel.run, Tile(32)) == Tile(32) and kernel.runs == []
    with tuner.measuring():
        assert tuner.best("k", 1, TILES, kernel.run, Tile(32)) == Tile(64)
    assert tuner.best("k", 1, TILES, kernel.run, Tile(32)) == Tile(64)
    assert tuner.best("k", 2, TILES, kernel.run, Tile(32)) == Tile(32) and len(kernel.runs) == 3
    tuner.clear()
    assert tuner.best("k", 1, TILES, kernel.run, Tile(32)) == Tile(32) and len(kernel.runs) == 3


@pytest.mark.parametrize("reason", ["a pack", "DIYFA_JIT=never"])
def test_a_process_without_jit_measures_on_request(own_cache, monkeypatch, reason):
    """Until then the table's tile is settled, so that equal calls are repeated."""
    if reason == "a pack":
        monkeypatch.setattr(tune, "_has_pack", lambda: True)
    else:
        monkeypatch.setenv("DIYFA_JIT", "never")
    kernel = FakeKernel()
    tuner = tune.Tuner(kernel.timer, device=lambda: (0, "Test GPU"), may_measure=lambda: True, rounds=1)
    assert not tuner.is_settled("k", 1)
    assert tuner.best("k", 1, TILES, kernel.run, Tile(32)) == Tile(32) and kernel.runs == []
    assert tuner.is_settled("k", 1)
    before = tuner.state()
    with tuner.measuring():
        assert not tuner.is_settled("k", 1)
        assert tuner.best("k", 1, TILES, kernel.run, Tile(32)) == Tile(64)
    assert tuner.state() != before, "calls that repeat the table's tile must decide anew"
    assert tuner.is_settled("k", 1) and not tuner.is_settled("k", 2)


@pytest.mark.parametrize(
    ("initialised", "pack", "found"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_whether_a_pack_serves_the_device(monkeypatch, initialised, pack, found):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialised)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    answers = {"sm_90": SimpleNamespace(pack=object() if pack else None)}
    monkeypatch.setattr("diyfa.backends.cuda.runtime.pack.installed", answers.__getitem__)
    assert tune._has_pack() == found


def test_another_device_of_the_model_uses_the_measured_tile(own_cache):
    """It had asked before, and found nothing."""
    kernel, index = FakeKernel(), [1]
    tuner = AskedTuner(kernel.timer, device=lambda: (index[0], "Test GPU"), may_measure=lambda: True, rounds=1)
    assert tuner.best("k", 1, TILES, kernel.run, Tile(32)) == Tile(32)
    index[0] = 0
    with tuner.measuring():
        assert tuner.best("k", 1, TILES, kernel.run, Tile(32)) == Tile(64)
    index[0] = 1
    assert tuner.best("k", 1, TILES, kernel.run, Tile(32)) == Tile(64) and len(kernel.runs) == 3


def test_without_stored_tiles_the_file_is_read_once(monkeypatch):
    kernel = FakeKernel()
    tuner = AskedTuner(kernel.timer, device=lambda: (0, "Test GPU"), may_measure=lambda: True)
    reads = []
    monkeypatch.setattr("diyfa.tuning.TuneFile.read", lambda self: reads.append(1) or {})
    for _ in range(3):
        tuner.best("k", 1, TILES, kernel.run, Tile(32))
    assert len(reads) == 1


def test_other_errors_are_raised_and_nothing_is_remembered(own_cache):
    kernel = FakeKernel({**DURATION_MS, 64: RuntimeError("CUDA error: an illegal memory access was encountered")})
    tuner = make_tuner(kernel)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            tuner.best("k", 1, TILES, kernel.run, TILES[0])
    assert not list(own_cache.glob("tune/*.json"))


def test_without_a_running_tile_the_default_is_not_stored(own_cache, caplog):
    error = OutOfResources(300, 200, "shared memory")
    kernel = FakeKernel(dict.fromkeys(DURATION_MS, error))
    tuner = make_tuner(kernel)
    with caplog.at_level(logging.WARNING):
        assert tuner.best("k", 1, TILES, kernel.run, TILES[0]) == TILES[0]
        assert tuner.best("k", 1, TILES, kernel.run, TILES[0]) == TILES[0]
    assert "none of 3 candidates" in caplog.text
    assert len(kernel.runs) == 3
    assert not list(own_cache.glob("tune/*.json"))


def test_switched_off_returns_the_default_and_remembers_nothing(own_cache, monkeypatch):
    kernel = FakeKernel()
    tuner = make_tuner(kernel)
    tuner.enabled = False
    assert tuner.best("k", 1, TILES, kernel.run, Tile(32)) == Tile(32)
    monkeypatch.setenv("DIYFA_AUTOTUNE", "0")
    assert make_tuner(kernel).best("k", 1, TILES, kernel.run, Tile(32)) == Tile(32)
    assert kernel.runs == []
    tuner.enabled = True
    assert tuner.best("k", 1, TILES, kernel.run, Tile(32)) == Tile(64)
    tuner.enabled = False  # which hides what was measured
    assert tuner.best("k", 1, TILES, kernel.run, Tile(32)) == Tile(32)


def test_module_switch():
    previous = tune.set_enabled(False)
    try:
        assert not tune.state()[0]
        assert tune.set_enabled(True) is False
        assert tune.state()[0]
    finally:
        tune.set_enabled(previous)


def test_graph_capture_uses_known_tiles_only():
    kernel = FakeKernel()
    capturing = make_tuner(kernel, may_measure=False)
    assert capturing.best("k", 1, TILES, kernel.run, Tile(32)) == Tile(32)
    assert kernel.runs == []
    make_tuner(kernel).best("k", 1, TILES, kernel.run, Tile(32))
    assert capturing.best("k", 1, TILES, kernel.run, Tile(32)) == Tile(64)


def test_without_a_device_the_default(own_cache):
    kernel = FakeKernel()
    tuner = tune.Tuner(kernel.timer, device=lambda: None)
    assert tuner.best("k", 1, TILES, kernel.run, Tile(32)) == Tile(32)
    assert kernel.runs == []
    assert not (own_cache / "tune").exists()


def test_an_unwritable_cache_is_reported_and_the_result_remembered(own_cache, caplog):
    (own_cache / "tune").write_text("a file where the folder should be")
    kernel = FakeKernel()
    tuner = make_tuner(kernel)
    with caplog.at_level(logging.WARNING):
        assert tuner.best("k", 1, TILES, kernel.run, Tile(32)) == Tile(64)
        assert tuner.best("k", 1, TILES, kernel.run, Tile(32)) == Tile(64)
    assert "cannot write" in caplog.text
    assert len(kernel.runs) == 3


def test_threads_measure_once_and_agree():
    kernel = FakeKernel(delay_s=0.01)
    tuner = make_tuner(kernel)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(tuner.best("k", 1, TILES, kernel.run, Tile(32))))
        for _ in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == [Tile(64)] * 8
    assert len(kernel.runs) == 3


def test_nested_tuning_does_not_deadlock():
    kernel = FakeKernel()
    tuner = make_tuner(kernel)

    def outer(tile):
        tuner.best("inner", 1, TILES, kernel.run, Tile(32))
        kernel.run(tile)

    assert tuner.best("outer", 1, TILES, outer, Tile(32)) == Tile(64)


def _write_rows(folder, name, count, start):
    os.environ["DIYFA_CACHE_DIR"] = folder
    kernel = FakeKernel()
    tuner = make_tuner(kernel)
    start.wait()
    for i in range(count):
        tuner.best(name, i, TILES, kernel.run, Tile(32))


def test_two_processes_lose_no_row(own_cache):
    context = multiprocessing.get_context("spawn")
    start, count = context.Barrier(2), 30
    workers = [
        context.Process(target=_write_rows, args=(str(own_cache), name, count, start)) for name in ("first", "second")
    ]
    for w in workers:
        w.start()
    for w in workers:
        w.join(timeout=120)
        assert w.exitcode == 0
    rows = json.loads(the_file(own_cache).read_text())["rows"]
    expected = {str(i) for i in range(count)}
    assert set(rows["first"]) == set(rows["second"]) == expected
    assert not list((own_cache / "tune").glob("*.tmp"))
