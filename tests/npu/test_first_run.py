"""`diyfa first-run` from end to end on real torch_npu, at its smallest: all of it, and with faults planted."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from pathlib import Path

import pytest

from diyfa.backends.npu.runtime import multibuffer
from diyfa.lab.first_run import command as cli
from diyfa.lab.first_run.page import _dtypes

pytestmark = pytest.mark.skipif(os.environ.get("DIYFA_HOST_SHIM") != "1", reason="the command itself is for a real NPU")
WORKER = Path(__file__).parents[1] / "support" / "first_run_worker.py"


@pytest.fixture(autouse=True)
def own_tuning_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIYFA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("DIYFA_NPU_TILE", raising=False)


def first_run(path: Path, *faults: str, stages: tuple[str, ...] = (), **options) -> tuple[int, dict, str]:
    """(exit status, the JSON file, the page)."""
    request = cli.Request(path, stages, smoke=True, **options)
    status = cli.run(request, True, (sys.executable, str(WORKER), *faults))
    return status, json.loads(path.read_text()), path.with_suffix(".txt").read_text()


def rows(document: dict, table: str) -> list[dict]:
    return [row for row in document["rows"] if row["table"] == table]


def test_all_of_it(npu, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, document, page = first_run(tmp_path / "out.json")
    assert status == 0, [row for row in document["rows"] if row.get("status") not in (None, "pass")]
    assert json.loads(capsys.readouterr().out) == document
    assert document["benchmark"] == "ascend first run" and document["smoke"] is True
    assert document["device"] == "Ascend910B3" and document["chip"]["cube_cores"] == 20
    assert document["versions"]["torch_npu"] and "backends" in document["info"]
    assert {row["table"] for row in document["rows"]} == {"numerics", "dtypes", "equivalence", "tiles", "attention"}

    found = rows(document, "numerics")
    assert {row["status"] for row in found} == {"pass"} and all(0 <= row.get("share", 0) <= 1 for row in found)
    for stage in ("small tiles", "float16", "bfloat16", "float32"):
        assert len([row for row in found if row["stage"] == stage]) >= 4
    assert {row["variant"] for row in found} == {"auto", "v1"} and document["replaced"] == []

    # Compute operators do not exist on the shim, so the vendor's cannot be compared here; diyfa's form of it can.
    operator = rows(document, "equivalence")
    theirs = [row for row in operator if row["implementation"] == "torch_npu"]
    ours = [row for row in operator if row["implementation"] == "diyfa"]
    assert len(theirs) == len(ours) >= 18
    assert all(row["unavailable"].startswith("refused: RuntimeError") for row in theirs), theirs
    assert all(max(row["max_error"].values()) < 2e-2 for row in ours)

    tiles = rows(document, "tiles")
    assert {row["kernel"] for row in tiles} == {"fwd", "dq", "dkdv"} and all(row["ms"] > 0 for row in tiles)
    assert sum(row["default"] for row in tiles) == 6 and len(tiles) > 12

    timed = rows(document, "attention")
    for causal in (False, True):
        names = {row["implementation"] for row in timed if row["causal"] is causal}
        assert names == {"diyfa", "diyfa tuned", "torch_npu"}
    assert {(row["implementation"], row["pass"]) for row in timed if "ms" in row} == {
        (who, direction) for who in ("diyfa", "diyfa tuned") for direction in ("forward", "backward")
    }
    assert "all 4 right" in page and "out.json" in page and "attach both" in page


def test_faults(npu, tmp_path: Path) -> None:
    """A process that dies costs its step or its tile; a refused tile and a slow dtype are told, with what to do."""
    faults = ("crash", "tile", "candidate", "bf16")
    status, document, page = first_run(
        tmp_path / "out.json", *faults, stages=("small tiles", "dtypes", "tiles"), limit_s=120
    )
    assert status == 1
    told = {row["case"].split(",")[0]: row for row in rows(document, "numerics")}
    assert {name: row["status"] for name, row in told.items()} == {
        "plain": "pass", "causal": "error", "grouped heads": "pass", "window": "pass"
    }  # fmt: skip
    assert told["causal"]["reason"] == "the process ended with signal 11; last printed: EZ9999: inner error"
    assert "1 of 4 wrong or failed" in page and "EZ9999" in page

    timed = {row["implementation"]: row["ms"] for row in rows(document, "dtypes") if row["pass"] == "forward"}
    ways = [f"diyfa, bfloat16 through {dtype}" for dtype in ("float32", "float16")]
    assert list(timed) == [*(f"diyfa, {dtype}" for dtype in ("float16", "bfloat16", "float32")), *ways]
    assert timed["diyfa, bfloat16"] > 250 > max(timed[way] for way in ways)
    assert "bfloat16 takes" in page and "q.float()" in page and "q.half()" in page

    assert document["replaced"] and "conservative tile 64x64" in document["replaced"][0]
    assert "ub overflow: needs 292 KiB of 192" in page
    tiles = rows(document, "tiles")
    died = [row for row in tiles if row.get("unavailable", "").startswith("the process ended with signal 11")]
    assert {(row["kernel"], row["block_m"], row["block_n"], row["causal"]) for row in died} == {
        ("fwd", 32, 256, False), ("fwd", 32, 256, True)
    }  # fmt: skip
    refused = [row for row in tiles if "ub overflow" in row.get("unavailable", "")]
    assert refused and {row["kernel"] for row in refused} == {"fwd"}
    assert {row["kernel"] for row in tiles if "ms" in row} == {"fwd", "dq", "dkdv"}
    assert {(row["block_m"], row["block_n"]) for row in tiles if "ms" in row and row["kernel"] == "fwd"} == {(64, 64)}


@pytest.mark.parametrize(("ways", "told", "untold"), [
    ({"float32": 3.0, "float16": 2.0}, ("q.float()", "3.33 times", "q.half()", "5.00 times"), ("no faster",)),
    ({"float32": 11.0, "float16": 2.0}, ("q.half()",), ("q.float()", "no faster")),
    ({"float32": 11.0, "float16": 12.0}, ("no faster",), ("q.float()", "q.half()")),
])  # fmt: skip
def test_what_the_page_says_of_a_slow_bfloat16(
    ways: dict[str, float], told: tuple[str, ...], untold: tuple[str, ...]
) -> None:
    times = {"float16": 1.0, "bfloat16": 10.0, **{f"bfloat16 through {dtype}": ms for dtype, ms in ways.items()}}
    shared = {"table": "dtypes", "pass": "forward"}
    text = "\n".join(_dtypes({"rows": [{**shared, "implementation": f"diyfa, {x}", "ms": times[x]} for x in times]}))
    assert "bfloat16 takes 10.0 times" in text
    assert all(words in text for words in told) and not any(words in text for words in untold), text


# A worker that computes nothing: what the command makes of its answers.
FAKE = """
import json, sys, time
def answer(**what):
    print("noise @diyfa " + json.dumps(what), flush=True)
device = {"device": "Ascend910B3", "device_type": "npu", "chip": {"cube_cores": 20, "vector_cores": 40}}
answer(ready={**device, "date": "2026-01-31", "versions": {}})
for line in sys.stdin:
    step = json.loads(line)
    name = step["name"]
    on = step["environment"].get("DIYFA_NPU_MULTIBUFFER") != "0"
    if name in sys.argv and (sys.argv[1] == "hang" or sys.argv[1] == "hang with it" and on):
        time.sleep(60)
    if name in sys.argv and sys.argv[1] in ("wrong with it", "hang with it") and step["kind"] == "numerics":
        answer(row={"table": "numerics", "case": name, "variant": "auto", "dtype": "float16", "result": "dq",
                    "status": "FAIL" if on else "pass", "share": 7.5 if on else 0.5, "reason": ""})
        answer(done=True, can_continue=True)
        continue
    if name in sys.argv and sys.argv[1] == "crash":
        sys.exit(7)
    torn = {"half": '{"row": {"table"', "nested": "[" * 100000, "spoilt": '{"row"EZ9999'}
    if name in sys.argv and sys.argv[1] in torn:
        print("@diyfa " + torn[sys.argv[1]], flush=True)
        time.sleep(600 if sys.argv[1] == "spoilt" else 0)
        sys.exit(7)
    if step["kind"] == "tiles":
        for tile in ("a", "b", "c"):
            if {"tile": tile} in step["arguments"].get("without", []):
                continue
            answer(trying={"tile": tile}, row={"table": "tiles", "kernel": "fwd", "block_m": 1, "block_n": 1, "D": 1})
            if tile in sys.argv:
                sys.exit(7)
    if name in sys.argv and sys.argv[1] == "poison":
        answer(failed="aicore exception")
        answer(done=True, can_continue=False)
        time.sleep(60)
    answer(row={"table": "done", "name": name, "status": "pass", "environment": step["environment"]})
    answer(done=True, can_continue=True)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs with that worker: (what it shall do, to which steps) -> the JSON file's rows of each stage asked for."""
    monkeypatch.setattr(cli, "_info", dict)

    def run(*arguments: str, stages: tuple[str, ...] = ("small tiles",), **options) -> dict:
        command = (sys.executable, "-c", FAKE, *arguments)
        options = {"limit_s": 3, **options}
        cli.run(cli.Request(run.path, stages, smoke=True, **options), True, command)
        return json.loads(run.path.read_text())

    run.path = tmp_path / "fake.json"
    return run


@pytest.mark.parametrize(("fault", "reason"), [
    ("hang", "no answer within 3 s"),
    ("crash", "the process ended with exit status 7"),
    ("poison", "aicore exception"),
])  # fmt: skip
def test_a_step_that_ends_the_process(fake, fault: str, reason: str) -> None:
    document = fake(fault, "causal")
    failed, *others = sorted(document["rows"], key=lambda row: row["table"] == "done")
    assert (failed["case"], failed["status"], failed["reason"]) == ("causal, tile 32x32", "error", reason)
    assert [row["name"] for row in others] == ["plain", "grouped heads", "window"] and len(document["done"]) == 4
    assert all(row["environment"] == {"DIYFA_NPU_TILE": "32x32"} for row in others)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch):
    """The module that keeps multibuffering off, which has read nothing yet."""
    monkeypatch.delenv(multibuffer.VARIABLE, raising=False)
    multibuffer.kept_off.cache_clear()
    yield multibuffer
    multibuffer.kept_off.cache_clear()


@pytest.mark.parametrize(
    ("fault", "with_it"), [("hang with it", "no answer within 3 s"), ("wrong with it", "7.5 times the allowed error")]
)
def test_what_is_right_only_without_multibuffering(fake, kept, fault: str, with_it: str) -> None:
    """It is kept for later calls, the page says so, and later steps are not tried twice."""
    document = fake(fault, "causal")
    (cured,) = [row for row in document["rows"] if "with_multibuffer" in row]
    assert cured["with_multibuffer"] == with_it and cured["status"] == "pass"
    assert [row["status"] for row in document["rows"]] == 4 * ["pass"] and len(document["done"]) == 4
    assert kept.path().is_file() and kept.kept_off() == f"small tiles: causal: {with_it}" and not kept.is_on()
    assert str(kept.path()) in document["without_multibuffer"]
    page = fake.path.with_suffix(".txt").read_text()
    assert "1 of the cases above are right only without" in page and with_it in page and str(kept.path()) in page
    again = fake("", again=True)
    assert again["without_multibuffer"] == document["without_multibuffer"]


@pytest.mark.parametrize("decided", ["0", "1"])
def test_a_decision_of_the_user_stays(fake, kept, decided: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kept.VARIABLE, decided)
    document = fake("wrong with it", "causal")
    assert [row.get("status") for row in document["rows"]].count("FAIL") == 1 and not kept.path().exists()
    assert document["switches"] == {kept.VARIABLE: decided}


def test_what_is_wrong_either_way_keeps_nothing(fake, kept) -> None:
    document = fake("crash", "causal")
    assert [row["status"] for row in document["rows"]].count("error") == 1 and not kept.path().exists()
    assert document["without_multibuffer"] == ""


@pytest.mark.parametrize(("fault", "reason"), [
    ("half", 'the process ended with exit status 7; last printed: @diyfa {"row": {"table"'),
    ("nested", "the process ended with exit status 7; last printed: @diyfa [[["),
    ("spoilt", 'the process gave an answer that cannot be read: @diyfa {"row"EZ9999'),
])  # fmt: skip
def test_an_answer_that_is_not_whole(fake, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str) -> None:
    """It ends the step at once, long before the limit, and the next step has a new process."""
    monkeypatch.setattr(cli, "ENDING_S", 1.0)
    start = time.monotonic()
    document = fake(fault, "causal", limit_s=300)
    assert time.monotonic() - start < 60
    failed, *others = sorted(document["rows"], key=lambda row: row["table"] == "done")
    assert (failed["case"], failed["status"]) == ("causal, tile 32x32", "error")
    assert failed["reason"].startswith(reason), failed
    assert [row["name"] for row in others] == ["plain", "grouped heads", "window"]


def test_a_tile_search_goes_on_without_the_tile_that_ended_it(fake) -> None:
    document = fake("tile", "a", "c", stages=("tiles",))
    died = [row for row in document["rows"] if "exit status 7" in row.get("unavailable", "")]
    assert len(died) == 4 and len([row for row in document["rows"] if row["table"] == "done"]) == 2


def test_it_goes_on_where_it_was(fake) -> None:
    before = fake()
    after = fake("crash", "plain", "causal", "grouped heads", "window")  # nothing is done again
    assert after["rows"] == before["rows"] and len(after["done"]) == 4
    fake.path.write_text(json.dumps({**before, "done": before["done"][:3], "rows": before["rows"][:3]}))
    assert fake()["rows"] == before["rows"]
    for change in (
        {"smoke": False},
        {"device": "Ascend910B1"},
        {"chip": {"cube_cores": 24}},
        {"versions": {"torch": "0"}},
    ):
        fake.path.write_text(json.dumps({**before, **change}))
        with pytest.raises(ValueError, match=r"another device.*--again"):
            fake()
    fake.path.write_text("{}")
    with pytest.raises(ValueError, match="is no file of a first run"):
        fake()
    assert len(fake(again=True)["rows"]) == 4


def test_results_that_make_no_sense(fake) -> None:
    """A file that lost a part, or that somebody edited."""
    before = fake()
    half_a_row = {"stage": "small tiles", "table": "numerics", "status": "FAIL"}
    changes = (
        {"done": None}, {"done": [["x"]]}, {"rows": None}, {"rows": [{}]}, {"rows": ["stage"]}, {"rows": [half_a_row]},
        {"replaced": 3}, {"replaced": [3]}, {"date": None}, {"without": []}, {"without": {"tiles": 3}},
    )  # fmt: skip
    contents = [json.dumps({**before, **change}).encode() for change in changes]
    for content in (
        *contents,
        b"",
        b"[]",
        b"\xff\xfe\x00",
        b"9" * 5000,
        b"[" * 200_000,
        json.dumps(before).encode()[:-9],
    ):
        fake.path.write_bytes(content)
        with pytest.raises(ValueError, match=r"is no file of a first run.*--again"):
            fake()
        assert fake.path.read_bytes() == content


def test_the_page_does_not_take_the_place_of_the_results(fake, tmp_path: Path) -> None:
    request = cli.Request(tmp_path / "out.txt", ("small tiles",), smoke=True)
    with pytest.raises(ValueError, match=r"out\.txt: the page goes there.*out\.json"):
        cli.run(request, True, (sys.executable, "-c", FAKE))


@pytest.mark.parametrize("name", ["run.lock", "run.tmp", "run", "run.json.lock", "run.json.tmp"])
def test_results_of_any_name_are_kept(fake, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """No file that the command uses itself may be the one with the results."""
    fake.path = fake.path.with_name(name)
    before = fake()
    assert (
        fake("crash", "plain", "causal", "grouped heads", "window")["rows"] == before["rows"]
    )  # nothing is done again
    text, replaced = fake.path.read_text(), Path.replace

    def cut_off(path: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", cut_off)
    with pytest.raises(KeyboardInterrupt):
        fake(again=True)
    assert fake.path.read_text() == text
    monkeypatch.setattr(Path, "replace", replaced)


def test_a_lock_file_of_somebody_else_keeps_its_content(fake) -> None:
    lock = fake.path.with_name("fake.json.lock")
    lock.write_text("mine")
    fake()
    assert lock.read_text() == "mine"


def test_a_place_that_takes_no_results(fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, a pipe, a file that nobody may read: said before a step is done, and nothing is changed."""
    path = fake.path
    path.mkdir()
    with pytest.raises(ValueError, match=r"fake\.json is no file that can be written"):
        fake()
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"fake\.json is no file that can be written"):
        fake(again=True)
    path.unlink()
    path.with_suffix(".txt").mkdir()
    with pytest.raises(ValueError, match=r"fake\.txt is no file that can be written"):
        fake()
    path.with_suffix(".txt").rmdir()
    path.write_text("{}")

    def closed(path: Path, **options: str) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", closed)  # root may read all
    with pytest.raises(ValueError, match=r"fake\.json cannot be read \(Permission denied\): --again"):
        fake()


def test_a_tile_search_that_was_cut_off(fake, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """What a tile did is told once, and that tile is not tried again."""
    attempt, attempts = cli.Run._attempt, iter([True, False])

    def interrupted(run, step):
        if not next(attempts):
            raise KeyboardInterrupt
        return attempt(run, step)

    with monkeypatch.context() as planted, pytest.raises(KeyboardInterrupt):
        planted.setattr(cli.Run, "_attempt", interrupted)
        fake("tile", "a", stages=("tiles",))
    assert "the same command goes on" in capsys.readouterr().err
    document = fake("tile", "a", stages=("tiles",))
    died = [row for row in document["rows"] if "exit status 7" in row.get("unavailable", "")]
    assert len(died) == 2 and len(document["done"]) == 2


def test_a_full_disc_leaves_the_last_results(fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake()
    before = fake.path.read_text()

    def half_written(path: Path, text: str, **options: str) -> None:
        path.write_bytes(text[: len(text) // 2].encode())
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(Path, "write_text", half_written)
        with pytest.raises(OSError, match="No space left"):
            fake()
    assert fake.path.read_text() == before and not list(fake.path.parent.glob("*.tmp"))


def test_no_process_is_left(fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs in the driver would keep the device."""
    workers, worker = [], cli.Worker
    monkeypatch.setattr(cli, "Worker", lambda command: workers.append(worker(command)) or workers[-1])
    fake("hang", "causal")
    assert len(workers) == 3 and all(x._process.poll() is not None for x in workers)


def test_two_at_once(fake) -> None:
    with open(fake.path.with_name("fake.json.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"another first-run writes .*fake\.json"):
            fake()
    assert len(fake()["done"]) == 4


def test_switches_are_told(fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who gets the files must know that these are not the usual kernels."""
    monkeypatch.setenv("DIYFA_NPU_ALWAYS_MASK", "1")
    assert fake()["switches"] == {"DIYFA_NPU_ALWAYS_MASK": "1"}
    assert "DIYFA_NPU_ALWAYS_MASK=1" in fake.path.with_suffix(".txt").read_text()
    monkeypatch.delenv("DIYFA_NPU_ALWAYS_MASK")
    with pytest.raises(ValueError, match=r"other versions or switches.*--again"):
        fake()


def test_the_page_tells_what_was_not_timed(fake) -> None:
    fake("crash", "bfloat16", stages=("dtypes",))
    page = fake.path.with_suffix(".txt").read_text()
    assert "bfloat16, D = 16, S = 32: the process ended with exit status 7" in page


@pytest.mark.parametrize(
    ("switch", "value", "told"),
    [("DIYFA_NPU_TILE", "32x32", "unset DIYFA_NPU_TILE"), ("DIYFA_CACHE_DIR", "/dev/null", "DIYFA_CACHE_DIR")],
)
def test_tiles_that_could_not_be_measured_or_kept(
    npu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str, value: str, told: str
) -> None:
    monkeypatch.setenv(switch, value)
    _, document, page = first_run(tmp_path / "out.json", stages=("tiles",))
    assert [row["kernel"] for row in document["rows"]] == ["all", "all"]
    assert all(told in row["unavailable"] for row in document["rows"])
    assert "Nothing was measured" in page and "calls now use" not in page


def test_a_machine_without_an_npu(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "print('libascendcl.so: cannot open shared object file'); raise SystemExit(3)")
    with pytest.raises(ValueError, match=r"cannot be used: the process ended with exit status 3(.|\n)*libascendcl"):
        cli.run(cli.Request(tmp_path / "out.json"), True, command)
    assert not (tmp_path / "out.json").exists()
