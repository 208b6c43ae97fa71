"""Running Python code in a fresh process that finds diyfa and whatever else is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUPPORT = Path(__file__).parent


def run_python(code: str, *paths: Path, arguments: Sequence[str] = (), **environment: str) -> str:
    """Standard output of `code`, which finds `arguments` in `sys.argv`; fails with its standard error when it does not
    exit with 0."""
    path = os.pathsep.join([*map(str, paths), str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
