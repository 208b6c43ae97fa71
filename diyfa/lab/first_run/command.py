"""`diyfa first-run`: is everything right on this Ascend machine, which tiles are fastest here, and where does it stand?

Steps run in another process with a time limit (`worker.py`), because an exception on the device may leave a process
unusable and a kernel may hang. A crash or a timeout becomes a row like any other, and the next step gets a new process.
The JSON file is rewritten after every step, so that a run that was cut off resumes there.
"""

from __future__ import annotations

import collections
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import typer

from diyfa.backends.npu.runtime import multibuffer
from diyfa.cli.output import err, out, print_json, progress_bar
from diyfa.lab.first_run.cases import STAGES, Step, steps
from diyfa.lab.first_run.page import page, print_page
from diyfa.lab.results import SCHEMA, check

MARK = "@diyfa "  # before each answer of the worker; CANN prints to the same stream
WORKER = (sys.executable, "-m", "diyfa.lab.first_run.worker")
ENDING_S = 3.0  # time that a process may take to end after its last output
START_LIMIT_S = 300.0  # time to import torch_npu and open the device
# Kinds of `diyfa.lab.results` of the rows that a worker sends, by their table.
ROW_KINDS = {
    "numerics": "numerics", "equivalence": "equivalence", "tiles": "tile", "dtypes": "attention",
    "attention": "attention", "done": "done",
}  # fmt: skip
OUTPUT_LINES = 20  # last lines of a process's output, for the row of its crash

Row = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """The options of the command."""

    output: Path | None = None
    stages: Sequence[str] = ()  # (): all
    smoke: bool = False
    again: bool = False  # ignore the results of an earlier run
    limit_s: float = 600.0  # time limit of an answer: for one step, or one tile to compile and time


@dataclass
class Outcome:
    """The outcome of one attempt at a step."""

    rows: list[Row] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)  # warnings of tiles that this machine's compiler refuses
    trying: dict[str, Any] | None = None  # the answer with the tile that was timed when the step ended
    failed: str = ""  # reason of the failure
    ended: bool = False  # the process has ended


class Worker:
    """The process that runs the steps, and the queue of its answers."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1,
            errors="replace",
        )  # fmt: skip
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.printed: collections.deque[str] = collections.deque(maxlen=OUTPUT_LINES)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            _, mark, text = line.partition(MARK)
            answer = _answer_in(text) if mark else None
            if answer is not None:
                self._answers.put(answer)
            elif line.strip():
                self.printed.append(line.rstrip())
            if mark and answer is None:  # a result may be lost, so no later answer counts
                break
        self._answers.put(None)

    def answer(self, limit_s: float) -> dict[str, Any]:
        """Return the next answer. Raises TimeoutError after `limit_s`.

        Raises EOFError if no more can come, because the process ended or its last answer could not be read.
        """
        try:
            answer = self._answers.get(timeout=limit_s)
        except queue.Empty:
            raise TimeoutError(f"no answer within {limit_s:g} s") from None
        if answer is None:
            try:
                code = self._process.wait(timeout=ENDING_S)
            except subprocess.TimeoutExpired:
                raise EOFError(f"the process gave an answer that cannot be read: {self.printed[-1]}") from None
            end = f"signal {-code}" if code < 0 else f"exit status {code}"
            last = f"; last printed: {self.printed[-1]}" if self.printed else ""
            raise EOFError(f"the process ended with {end}{last}")
        return answer

    def do(self, step: Step, limit_s: float) -> Iterator[dict[str, Any]]:
        """Yield the answers to one step. The last one says `done`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asdict(step)) + "\n")
            self._process.stdin.flush()
        except OSError:  # the process has ended: `answer` raises that
            pass
        while True:
            answer = self.answer(limit_s)
            yield answer
            if "done" in answer:
                return

    def end(self) -> None:
        """Kill the process. One that hangs in the driver responds to nothing else."""
        self._process.kill()
        self._process.wait()


def _answer_in(text: str) -> dict[str, Any] | None:
    """Return the JSON object in the rest of a line after MARK, or None if it is cut off or corrupt."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


class Run:
    """One run, possibly resumed. `document` is the content of the JSON file."""

    def __init__(self, request: Request, command: Sequence[str] = WORKER) -> None:
        self.request, self.command = request, command
        self._worker: Worker | None = None
        self._lock: IO[str] | None = None
        if request.output:
            _check_output_path(request.output)
        self._worker, machine = self._started()
        machine["switches"] = {name: x for name, x in sorted(os.environ.items()) if name.startswith("DIYFA_NPU_")}
        name = str(machine["device"]).replace(" ", "-").replace("/", "-")
        self.path = request.output or Path(f"diyfa-first-run-{name}.json")
        try:
            _check_output_path(self.path)
            self._lock = _locked(self.path)
            self.document = self._earlier(machine) or {
                "schema": SCHEMA, "benchmark": "ascend first run", "purpose": "comparison", **machine,
                "smoke": request.smoke, "info": _info(), "done": [], "replaced": [], "rows": [],
            }  # fmt: skip
            self.document.setdefault("without_multibuffer", multibuffer.state() or "")
        except BaseException:
            self.end()
            raise

    def _earlier(self, current: dict[str, Any]) -> dict[str, Any] | None:
        """Return the document of an earlier run with the same device, versions, switches and size, or None."""
        if self.request.again or not self.path.exists():
            return None
        remedy = "--again starts afresh, --output names another file"
        try:
            earlier = json.loads(self.path.read_text(encoding="utf-8"))
            is_same = all(earlier[name] == current[name] for name in ("device", "versions", "chip", "switches"))
            is_same = is_same and earlier["smoke"] == self.request.smoke
            texts = [earlier["done"], earlier["replaced"]]
            are_lists = all(isinstance(part, list) for part in (*texts, *earlier.get("without", {}).values()))
            if check(earlier) or not are_lists or not all(isinstance(text, str) for part in texts for text in part):
                raise ValueError("a part has another type")
            if is_same:
                page(earlier, [self.path])  # raises if its rows lack what the page shows
        except OSError as error:
            raise ValueError(f"{self.path} cannot be read ({error.strerror}): {remedy}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{self.path} is no file of a first run: {remedy}") from error
        if not is_same:
            raise ValueError(
                f"{self.path} is from another device, other versions or switches, or another size of run: {remedy}"
            )
        return earlier

    def _started(self) -> tuple[Worker, dict[str, Any]]:
        worker = Worker(self.command)
        try:
            return worker, worker.answer(START_LIMIT_S)["ready"]
        except (TimeoutError, EOFError) as error:
            worker.end()
            raise ValueError(f"the NPU cannot be used: {error}. `diyfa info` says what is missing") from error

    def left(self) -> list[Step]:
        """Return the steps that are not done."""
        stages = self.request.stages or tuple(STAGES)
        done = set(self.document["done"])
        return [step for step in steps(self.request.smoke) if step.stage in stages and step.key not in done]

    def do(self, step: Step) -> None:
        """Run one step and save its rows. A search of tiles is repeated without the tile at which its process ended."""
        without: list[dict[str, Any]] = self.document.setdefault("without", {}).setdefault(step.key, [])
        while True:
            if without:
                step = Step(step.stage, step.name, step.kind, {**step.arguments, "without": without}, step.environment)
            outcome = self._attempt(step)
            self.document["rows"] += [
                {"kind": ROW_KINDS[row["table"]], **row, "stage": step.stage} for row in outcome.rows
            ]
            self.document["replaced"] += [x for x in outcome.replaced if x not in self.document["replaced"]]
            if outcome.trying is None or not outcome.ended or outcome.trying["trying"] in without:
                break
            without.append(outcome.trying["trying"])
            self.save()
        if step.kind in ("numerics", "determinism") and not _is_right(outcome.rows) and multibuffer.may_try_without():
            self._try_without_multibuffer(step, len(outcome.rows))
        self.document["done"].append(step.key)
        self.save()

    def _try_without_multibuffer(self, step: Step, n_rows: int) -> None:
        """Run a step that failed without multibuffering. If it is right, keep that, and replace its last `n_rows` rows.

        The replaced rows say what was wrong with it."""
        again = self._attempt(Step(**{**asdict(step), "environment": {**step.environment, multibuffer.VARIABLE: "0"}}))
        if not _is_right(again.rows):
            return
        failed = self.document["rows"][-n_rows:]
        with_it = "; ".join(row["reason"] or f"{row['share']:.3g} times the allowed error" for row in failed)
        self.document["rows"][-n_rows:] = [
            {"kind": ROW_KINDS[row["table"]], **row, "stage": step.stage, "with_multibuffer": with_it}
            for row in again.rows
        ]
        kept = multibuffer.keep_off(f"{step.key}: {with_it}")
        text = multibuffer.state() if kept else f"of no file, which cannot be written: set {multibuffer.VARIABLE}=0"
        self.document["without_multibuffer"] = text
        self._end_worker()  # it has read that there was nothing to keep

    def _attempt(self, step: Step) -> Outcome:
        outcome = Outcome()
        if self._worker is None:
            self._worker, _ = self._started()
        worker, can_continue = self._worker, False
        try:
            for answer in worker.do(step, self.request.limit_s):
                if "trying" in answer:
                    outcome.trying = answer if answer["trying"] else None
                elif "row" in answer:
                    outcome.rows.append(answer["row"])
                outcome.replaced += [answer["replaced"]] if "replaced" in answer else []
                outcome.failed = answer.get("failed", outcome.failed)
                can_continue = answer.get("can_continue", False)
        except (TimeoutError, EOFError) as error:
            outcome.failed, outcome.ended = str(error), True
        if not can_continue:
            worker.end()
            self._worker = None
            outcome.ended = True
        reported = any("unavailable" in row or row.get("status") == "error" for row in outcome.rows)
        if outcome.failed and not reported:
            outcome.rows.append(_failure_row(step, outcome))
        return outcome

    def save(self) -> None:
        """Write the whole file and then replace the old one, so that a run that is cut off leaves a readable file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _beside(self.path, ".tmp")
        try:
            temporary.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
            temporary.replace(self.path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def end(self) -> None:
        self._end_worker()
        if self._lock is not None:
            self._lock.close()


def _is_right(rows: Sequence[Row]) -> bool:
    """Return whether the rows of a step of the numerics say that it ran and was right."""
    return bool(rows) and all(row["status"] == "pass" for row in rows)


def _check_output_path(path: Path) -> None:
    """Raise ValueError if `path` is no name for the JSON file, or its file or the page's cannot be written."""
    if path.suffix == ".txt":
        better = path.with_suffix(".json")
        raise ValueError(f"{path}: the page goes there; name the JSON file, such as {better}")
    for file in (path, path.parent / f"{path.stem}.txt"):
        if file.exists() and not file.is_file():  # such as a folder or a device
            raise ValueError(f"{file} is no file that can be written: name the JSON file with --output")


def _beside(path: Path, ending: str) -> Path:
    """Return the path of an auxiliary file. `ending` follows the whole name, so it is never that of another result."""
    return path.with_name(path.name + ending)


def _locked(path: Path) -> IO[str]:
    """Return a file that is locked while it is open. Two runs would overwrite each other's rows and disturb times."""
    import fcntl  # an Ascend machine runs Linux

    path.parent.mkdir(parents=True, exist_ok=True)
    file = _beside(path, ".lock").open("a")  # "w" would empty a file of that name
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"another first-run writes {path}: wait for it, or name another file with --output") from None
    return file


def _failure_row(step: Step, outcome: Outcome) -> Row:
    """Return the row of a step that failed without a row, for `diyfa report` and the page."""
    if step.kind in ("numerics", "determinism"):
        case = step.arguments["case"]
        variant = step.arguments.get("variant", "auto")
        row = {"table": "numerics", "case": case["name"], "variant": variant, "dtype": case["dtype"]}
        return {**row, "status": "error", "reason": outcome.failed}
    if outcome.trying is not None:
        return {**outcome.trying["row"], "unavailable": outcome.failed}
    if step.kind == "operator":
        row = {"table": "equivalence", "case": step.arguments["case"]["name"], "implementation": "both"}
        return {**row, "unavailable": outcome.failed}
    names = {"head_dim": "D", "seq_len": "S", "causal": "causal", "dtype": "dtype", "implementation": "implementation"}
    row = {short: step.arguments[name] for name, short in names.items() if name in step.arguments}
    table = "attention" if step.kind == "speed" else step.stage
    return {"table": table, "kernel": "all", **row, "unavailable": outcome.failed}


def _info() -> Any:
    """Return the output of `diyfa info --json`, or the reason why there is none."""
    command = [sys.executable, "-m", "diyfa", "info", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=START_LIMIT_S)
        return json.loads(done.stdout[done.stdout.index("{") :])  # torch_npu's warnings may precede it
    except (ValueError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}


def run(request: Request, as_json: bool, command: Sequence[str] = WORKER) -> int:
    """Run all steps that are left. Return the exit status, 1 if results are wrong or a step of the numerics failed."""
    for stage in request.stages:
        if stage not in STAGES:
            raise typer.BadParameter(f"must be one of {', '.join(STAGES)}; got {stage!r}", param_hint="--only")
    this = Run(request, command)
    try:
        left = this.left()
        if done := len(this.document["done"]):
            err.print(f"{this.path}: {done} steps are done, {len(left)} left", highlight=False)
        with progress_bar(not as_json) as progress:
            task = progress.add_task("first run", total=len(left), note="")
            for step in left:
                progress.update(task, note=step.key)
                this.do(step)
                progress.update(task, advance=1)
        this.save()
    except KeyboardInterrupt:
        done = len(this.document["done"])
        err.print(f"{this.path}: {done} steps are done; the same command goes on there", highlight=False)
        raise
    finally:
        this.end()
    text = this.path.with_suffix(".txt")
    text.write_text(page(this.document, [this.path, text]), encoding="utf-8")
    if as_json:
        print_json(this.document)
    else:
        print_page(out, this.document, [this.path, text])
    bad = [row for row in this.document["rows"] if row.get("status") in ("FAIL", "error")]
    return 1 if bad else 0
