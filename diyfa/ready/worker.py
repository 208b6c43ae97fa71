"""A process that compiles: `python -m diyfa.ready.worker`.

It reads kernels from standard input and writes results, (seconds, error or ""), to standard output. Each is pickled
and preceded by its length in 4 bytes.
"""

from __future__ import annotations

import gc
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
    """Return the next message. Raises EOFError if the other process has ended."""
    head = stream.read(4)
    if len(head) < 4:
        raise EOFError
    return pickle.loads(stream.read(int.from_bytes(head, "little")))


def main() -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    gc.disable()  # freeing the compiler's graphs takes a tenth of the time; the end of the process frees them at once
    with tempfile.TemporaryFile() as log:  # compilers write to file descriptors 1 and 2 directly
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
            except Exception as failure:  # compilers may raise anything
                os.lseek(log.fileno(), begin, os.SEEK_SET)
                printed = os.read(log.fileno(), 2000).decode(errors="replace")
                error = " ".join(f"{type(failure).__name__}: {failure} {printed}".split())[:2000]
            send(answers, (time.perf_counter() - start, error))


if __name__ == "__main__":
    main()
