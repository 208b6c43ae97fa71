"""A process that compiles: `python -m diyfa.ready.worker`. Kernels come by standard input, verdicts leave by standard
output, each pickled behind its length in 4 bytes; a verdict is (seconds, error or "")."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
from typing import IO, Any


def send(stream: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message)
    stream.write(len(data).to_bytes(4, "little") + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The next message. Raises EOFError when the other side is gone."""
    head = stream.read(4)
    if len(head) < 4:
        raise EOFError
    return pickle.loads(stream.read(int.from_bytes(head, "little")))


def main() -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    with tempfile.TemporaryFile() as log:  # what compilers print: they write to the process's files themselves
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        while True:
            try:
                kernel = receive(requests)
            except EOFError:
                return
            begin = os.lseek(log.fileno(), 0, os.SEEK_END)
            start, error = time.perf_counter(), ""
            try:
                kernel.compile()
            except Exception as failure:  # compilers raise whatever they like
                os.lseek(log.fileno(), begin, os.SEEK_SET)
                printed = os.read(log.fileno(), 2000).decode(errors="replace")
                error = " ".join(f"{type(failure).__name__}: {failure} {printed}".split())[:2000]
            send(answers, (time.perf_counter() - start, error))


if __name__ == "__main__":
    main()
