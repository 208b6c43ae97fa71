"""Implementations in processes of their own, for benchmarks that measure in turns. One that hangs costs its time."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def watchdog(limit: float) -> Iterator[None]:
    """End the process after `limit` seconds, because a kernel that waits for ever does not return."""
    timer = threading.Timer(limit, os._exit, (124,))
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()


class Served:
    """One implementation in its own process, which reads a request from each line of stdin and answers with JSON."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self.reason = ""  # why it no longer measures
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  `close` does
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def answer(self) -> dict[str, Any] | None:
        """Return the next line of JSON, or None if the process has ended. Other output of libraries is skipped."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found = json.loads(line)
                self.reason = found.get("unavailable", "")
                return None if self.reason else found
        status = self._process.wait()
        self._errors.seek(0)
        self.reason = "hung" if status == 124 else (self._errors.read().strip() or f"status {status}")[-300:]
        return None

    def ask(self, request: object) -> dict[str, Any] | None:
        """Return the process's answer to a request, or None (see `reason`)."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended: `answer` finds the reason
            print(request, file=self._process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()
