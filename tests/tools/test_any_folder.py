"""Tests that read the sources pass wherever the clone lies: `git clone` names the folder diyfa, as the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("diyfa", "backends", "tests", "benchmarks", "docs")
READ_THE_SOURCES = ("tests/frontend/test_layering.py", "tests/tools/test_scripts.py")


def test_in_a_folder_named_like_the_package(tmp_path: Path) -> None:
    """Folders above it have names that occur inside the tree, too."""
    clone = tmp_path / "backends" / "tests" / "diyfa"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        shutil.copytree(ROOT / name, clone / name, symlinks=True, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, clone)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-k", "not test_imports",
         *READ_THE_SOURCES],
        cwd=clone,
        env={**os.environ, "PYTHONPATH": str(clone)},
        capture_output=True,
        text=True,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
