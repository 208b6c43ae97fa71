"""The autotuner's bookkeeping: it measures once, for each bucket of problems, which candidate tile is fastest.

A backend derives its tuner from `Tuner`. It defines how a run is timed, on which device, and which errors mean that a
tile does not compile. `best` looks in a dict of this process, then in a file that all processes share, and only then
measures. A file holds the rows of one device model under one set of versions, so that an upgrade starts afresh. If
nothing can be measured (no device, interpreter, graph capture) or tuning is off, `best` returns the default.

Switches: the environment variable DIYFA_AUTOTUNE=0, or `enabled`. DIYFA_CACHE_DIR moves the file.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import logging
import math
import os
import re
import stat
import statistics
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from diyfa.problem import TriedTile, TunedTile

try:
    import fcntl
except ImportError:  # Windows: files stay whole (os.replace), but two processes that write at once may lose a row
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)
Config = TypeVar("Config")  # a frozen dataclass of plain values
Rows = dict[str, dict[str, dict[str, Any]]]  # kernel -> bucket -> {"config", "ms", "measured"}
ROW = {"config", "ms", "measured"}
FILE_FORMAT = 1
ROUNDS = 3  # each round measures every candidate once, so that a drifting clock affects all of them equally
# A candidate must be faster than the default by this share of its time. The defaults come from long measurements over
# many sizes. Two short measurements of one kernel differ by up to 5 % on an H200, whose clock follows its power.
MARGIN = 0.05
NO_FOLDER = "there is no home folder to keep results in: DIYFA_CACHE_DIR names another folder"
MAX_REMEMBERED = 4096  # entries of `Tuner._configs` and of `Tuner._unmeasured`: buckets with and without a tile


def bucket_size(n: int) -> int:
    """Return the size class of a length: the next power of two, at least 1."""
    return 1 << (max(n, 1) - 1).bit_length()


def home_folder() -> Path | None:
    """Return the user's home folder, or None if it is unknown, as in a container that runs under a bare user number."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def user_cache() -> Path | None:
    """Return the folder `diyfa` in the user's cache folder, or None without a home."""
    base = os.environ.get("LOCALAPPDATA") if os.name == "nt" else os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "diyfa"
    home = home_folder()
    return home and home / ".cache" / "diyfa"


def cache_dir(name: str = "tune") -> Path | None:
    """Return folder `name` ("tune": tuning files) in DIYFA_CACHE_DIR or `user_cache()`, or None without either."""
    explicit = os.environ.get("DIYFA_CACHE_DIR")
    base = Path(explicit) if explicit else user_cache()
    return base and base / name


def diyfa_version() -> str:
    try:
        return importlib.metadata.version("diyfa")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "source"


def _is_row(row: Any) -> bool:
    """Return whether an entry of a file is a row as `Tuner` writes it: a plain tile, a finite time and a date."""
    return (
        isinstance(row, dict)
        and row.keys() >= ROW
        and isinstance(row["config"], dict)
        and not any(isinstance(value, (dict, list)) for value in row["config"].values())
        and isinstance(row["ms"], float)
        and 0 <= row["ms"] < math.inf
        and isinstance(row["measured"], str)
    )


class TuneFile:
    """The file with the rows of one `identity`. Processes share it: read and replaced whole, merged under a lock."""

    def __init__(self, folder: Path, versions: dict[str, str]) -> None:
        self.versions = versions
        stem = re.sub(r"[^A-Za-z0-9.]+", "-", "_".join(versions.values()))
        self.path = folder / f"{stem}.json"

    def read(self) -> Rows:
        """Return the rows on disk: none if the file is absent, unreadable, or not one of ours."""
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):  # a read from a pipe would wait for a writer
                raise OSError("it is no regular file")
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            log.warning("cannot read %s, measuring again: %s", self.path, error)
            return {}
        try:
            content = json.loads(text)
            if content["format"] != FILE_FORMAT or content["identity"] != self.versions:
                raise ValueError("made by another version or for another device")
            return {
                kernel: {bucket: row for bucket, row in rows.items() if _is_row(row)}
                for kernel, rows in content["rows"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("ignoring %s, measuring again: %s", self.path, error)
            return {}

    def unwritable(self) -> str | None:
        """Return why the folder cannot be written, or None if it can."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path.parent) as f:
                f.write(bytes(4096))  # a full disk still accepts empty files
        except OSError as error:
            return f"{self.path.parent} cannot be written ({error.strerror}): DIYFA_CACHE_DIR names another folder"
        return None

    def add(self, kernel: str, bucket: str, row: dict[str, Any]) -> None:
        """Add or replace one row. Rows that other processes have written meanwhile stay."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            rows = self.read()
            rows.setdefault(kernel, {})[bucket] = row
            content = {"format": FILE_FORMAT, "identity": self.versions, "rows": rows}
            handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.stem, suffix=".tmp")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as f:
                    json.dump(content, f, indent=1, sort_keys=True)
                os.replace(temporary, self.path)
            except BaseException:
                os.unlink(temporary)
                raise

    def clear(self) -> int:
        """Remove the file. Return how many rows it had."""
        if not self.path.parent.is_dir():
            return 0
        with self._locked():
            count = sum(len(rows) for rows in self.read().values())
            if not self.path.is_dir():  # a folder of that name is not ours to remove
                self.path.unlink(missing_ok=True)
        return count

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # The lock is another file, because writers replace the data file and a lock on a replaced file locks nothing.
        with open(self.path.with_suffix(".lock"), "w") as f:
            if fcntl is not None:
                fcntl.flock(f, fcntl.LOCK_EX)
            yield


class Tuner:
    """The autotuner of one process (`diyfa.problem.Tuning`).

    A backend's tuner derives from it and defines `_device`, `_identity`, `_cannot_run` and perhaps `_measures_unasked`
    and `_may_measure`.
    `timer` measures a call in milliseconds.
    """

    device_needed = "there is no device to measure on"

    def __init__(self, timer: Callable[[Callable[[], None]], float], rounds: int = ROUNDS) -> None:
        self._timer, self._rounds = timer, rounds
        self._configs: dict[tuple[int, str, Hashable], Any] = {}
        self._unmeasured: set[tuple[int, str, Hashable]] = set()  # the file has no row: `best` returns the default
        self._renew_lock()
        self.enabled = os.environ.get("DIYFA_AUTOTUNE", "1") != "0"
        self._is_measuring = False  # inside `measuring`
        self.recording = False  # launches are recorded: `best` runs what it would measure once, untimed
        self._watch: Callable[[TriedTile], None] = lambda tried: None
        self._without: Sequence[dict[str, Any]] = ()
        self.changes = 0  # how often results of `best` may have changed
        if hasattr(os, "register_at_fork"):  # a lock that another thread holds at the fork would never be released
            os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        # Re-entrant, because a candidate's run may launch a tuned kernel.
        self._lock = threading.RLock()

    def _device(self) -> tuple[int, str] | None:
        """Return (index, model) of the current device, or None if nothing can be measured. Every call runs this."""
        raise NotImplementedError

    def _identity(self, device_name: str) -> dict[str, str]:
        """Return all that a measurement depends on besides the problem. Each distinct value has its own file."""
        raise NotImplementedError

    def _cannot_run(self, error: Exception) -> bool:
        """Return whether `error` only means that this tile does not compile or does not fit."""
        raise NotImplementedError

    def _measures_unasked(self) -> bool:
        """Return whether the first call of a problem measures it. If not, only calls inside `measuring` do."""
        return True

    def _may_measure(self) -> bool:
        """Return whether kernels may be launched and timed now."""
        return True

    def best(
        self,
        kernel: str,
        bucket: Hashable,
        candidates: Sequence[Config],
        run: Callable[[Config], None],
        default: Config,
    ) -> Config:
        """Return the fastest of `candidates` and `default` for a bucket of problems.

        Args:
            kernel: name under which results are stored.
            bucket: everything the choice depends on besides the device: plain values with a stable `repr`.
            candidates: frozen dataclasses of plain values.
            run: launches the kernel once with a config, on the current device and stream. It is called many times, so
                it must give the same result each time. It may overwrite output buffers.
            default: the config to use if nothing may be measured. It is always measured with the candidates.

        Returns:
            The config. While nothing may be measured, an earlier result, else `default`. A candidate that does not
            compile or fit is left out. Any other error of `run` is raised.
        """
        if not self.enabled:
            return default
        device = self._device()
        if device is None:
            return default
        if self.recording:
            stored = self._stored(self._file(device), kernel, bucket, candidates)
            if stored is not None:
                return stored
            for each in candidates if self._is_measuring or self._measures_unasked() else ():
                run(each)
            return default
        key = (device[0], kernel, bucket)
        cached = self._configs.get(key)
        if cached is not None:
            return cached
        measures = self._is_measuring or self._measures_unasked()
        if key in self._unmeasured and not measures:
            return default
        with self._lock:
            cached = self._configs.get(key)
            if cached is not None:
                return cached
            candidates = list(dict.fromkeys([default, *candidates]))
            file = self._file(device)
            config = self._stored(file, kernel, bucket, candidates)
            if config is None:
                if not measures:
                    if len(self._unmeasured) >= MAX_REMEMBERED:
                        self._unmeasured.clear()
                    self._unmeasured.add(key)
                    return default
                if not self._may_measure():
                    return default
                config = self._measure(file, kernel, bucket, candidates, run, default)
            if len(self._configs) >= MAX_REMEMBERED:
                self._configs.clear()  # the file still has the rows
            self._configs[key] = config
            return config

    def is_settled(self, kernel: str, bucket: Hashable) -> bool:
        """Return whether `best` will return the same config without measuring, as long as `state` does not change."""
        device = self._device() if self.enabled else None
        if device is None:
            return True
        key = device[0], kernel, bucket
        return key in self._configs or (
            key in self._unmeasured and not self._is_measuring and not self._measures_unasked()
        )

    def state(self) -> tuple[bool, int]:
        """Return (whether tuning is on, how often results changed). Results of `best` hold while this is equal."""
        return self.enabled, self.changes

    @contextmanager
    def measuring(
        self, watch: Callable[[TriedTile], None] | None = None, without: Sequence[dict[str, Any]] = ()
    ) -> Iterator[None]:
        """Measure problems inside the block; see `diyfa.problem.Tuning.measuring`."""
        previous = self._is_measuring, self._watch, self._without
        self._is_measuring, self._watch, self._without = True, watch or self._watch, without
        try:
            yield
        finally:
            self._is_measuring, self._watch, self._without = previous
            self._unmeasured.clear()
            self.changes += 1

    def unavailable(self) -> str | None:
        """Return why `best` only returns the default now or cannot store what it measures, or None."""
        if not self.enabled:
            return "tuning is off (DIYFA_AUTOTUNE=0)"
        device = self._device()
        if device is None:
            return self.device_needed
        file = self._file(device)
        return NO_FOLDER if file is None else file.unwritable()

    def stored(self) -> list[TunedTile]:
        """Return the rows on disk for the current device and these versions."""
        device = self._device()
        file = device and self._file(device)
        if file is None:
            return []
        return [
            TunedTile(kernel, bucket, row["config"], row["ms"], row["measured"])
            for kernel, buckets in sorted(file.read().items())
            for bucket, row in sorted(buckets.items())
        ]

    def clear(self) -> int:
        """Remove the rows of the current device and these versions. Return how many were on disk."""
        device = self._device()
        if device is None:
            return 0
        with self._lock:
            self._configs = {key: config for key, config in self._configs.items() if key[0] != device[0]}
            self._unmeasured.clear()
            self.changes += 1
            file = self._file(device)
            return 0 if file is None else file.clear()

    def _file(self, device: tuple[int, str]) -> TuneFile | None:
        """Return the file of this device, or None if there is no folder for it."""
        folder = cache_dir()
        return None if folder is None else TuneFile(folder, self._identity(device[1]))

    @staticmethod
    def _stored(file: TuneFile | None, kernel: str, bucket: Hashable, candidates: Sequence[Config]) -> Config | None:
        row = None if file is None else file.read().get(kernel, {}).get(repr(bucket))
        if row is None:
            return None
        # A row that is not among the candidates comes from an earlier table of tiles.
        return next((c for c in candidates if asdict(c) == row["config"]), None)  # type: ignore[call-overload]

    def _measure(
        self,
        file: TuneFile | None,
        kernel: str,
        bucket: Hashable,
        candidates: Sequence[Config],
        run: Callable[[Config], None],
        default: Config,
    ) -> Config:
        plain: list[dict[str, Any]] = [asdict(config) for config in candidates]  # type: ignore[call-overload]
        rounds: dict[int, list[float]] = {i: [] for i, config in enumerate(plain) if config not in self._without}
        for _ in range(self._rounds):
            for i in list(rounds):
                config = candidates[i]
                tried = TriedTile(kernel, plain[i], config == default)
                self._watch(tried)
                try:
                    rounds[i].append(self._timer(lambda config=config: run(config)))  # type: ignore[misc]
                except Exception as error:
                    if not self._cannot_run(error):
                        raise
                    log.info("%s %r: %r cannot run: %s", kernel, bucket, config, error)
                    del rounds[i]
                    self._watch(replace(tried, reason=str(error)))
                else:
                    self._watch(replace(tried, milliseconds=statistics.median(rounds[i])))
        times = [(statistics.median(ms), i) for i, ms in rounds.items()]
        if not times:
            log.warning("%s %r: none of %d candidates could run", kernel, bucket, len(candidates))
            return default
        ms, index = min(times)
        default_ms = next((t for t, i in times if candidates[i] == default), None)  # None: it did not run
        if default_ms is not None and ms > default_ms * (1 - MARGIN):  # too close for a short measurement to tell
            ms, index = default_ms, candidates.index(default)
        chosen = candidates[index]
        log.info("%s %r: %r takes %.4f ms, the fastest of %d", kernel, bucket, chosen, ms, len(times))
        row = {"config": plain[index], "ms": float(ms), "measured": datetime.date.today().isoformat()}
        if file is None:
            log.warning("the result holds for this process only: %s", NO_FOLDER)
            return chosen
        try:
            file.add(kernel, repr(bucket), row)
        except OSError as error:
            log.warning("cannot write %s; the result holds for this process only: %s", file.path, error)
        return chosen
