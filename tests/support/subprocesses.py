"""Running Python code in a process of its own that finds diyfa and whatever else is asked for."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUPPORT = Path(__file__).parent
# Imports PyTorch once, which takes seconds, and then runs each code that it is sent in a fork of itself.
SERVER = """
import json, os, sys, traceback
import torch

for line in sys.stdin:
    given = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for number, file in enumerate(given["files"], 1):
        os.dup2(os.open(file, os.O_WRONLY), number)
    os.environ.clear()
    os.environ.update(given["environment"])
    sys.path[:0], sys.argv[:] = given["paths"], ["-c", *given["arguments"]]
    status = 0
    try:
        exec(compile(given["code"], "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as done:
        status = done.code if isinstance(done.code, int) else int(done.code is not None)
        if isinstance(done.code, str):
            print(done.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
"""


def _python_path(*paths: Path) -> str:
    return os.pathsep.join([*map(str, paths), str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


@functools.cache
def _server() -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": _python_path()}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", SERVER], env=environment, stdin=pipe, stdout=pipe, text=True)


def run_python(code: str | Path, *paths: Path, arguments: Sequence[str] = (), **environment: str) -> str:
    """Standard output of `code` or of a file, which finds `arguments` in `sys.argv`; fails with its standard error when
    it does not exit with 0."""
    done = subprocess.run(
        [sys.executable, *(["-c", code] if isinstance(code, str) else [code]), *arguments],
        env={**os.environ, "PYTHONPATH": _python_path(*paths), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_after_torch(code: str, *paths: Path, arguments: Sequence[str] = (), **environment: str) -> str:
    """`run_python` in a process that has imported PyTorch, and nothing else."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as errors:
        given = {
            "code": code, "paths": [*map(str, paths)], "arguments": [*arguments], "files": [out.name, errors.name],
            "environment": {**os.environ, "PYTHONPATH": _python_path(*paths), **environment},
        }  # fmt: skip
        server.stdin.write(json.dumps(given) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        assert status == 0, errors.read()
        return out.read()
