"""Tests that read the sources find the same files wherever the clone lies: `git clone` names the folder diyfa."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from scripts import load_script

ROOT = Path(__file__).parents[2]
COPIED = ("diyfa", "backends", "tests", "benchmarks")
LISTS = {
    "tests/frontend/test_layering.py": ("BACKEND_FOLDERS", "BACKEND_FILES", "DIYFA_FILES", "FRONT_END_FILES"),
    "tests/tools/test_scripts.py": ("SCRIPTS",),
}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In folders whose names occur inside the tree, too."""
    folder = tmp_path_factory.mktemp("any") / "backends" / "tests" / "diyfa"
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.mark.parametrize("path", LISTS)
def test_in_a_folder_named_like_the_package(path: str, clone: Path) -> None:
    here, there = (load_script(root / path) for root in (ROOT, clone))
    for name in LISTS[path]:
        found = [[str(file.relative_to(root)) for file in getattr(module, name)]
                 for root, module in ((ROOT, here), (clone, there))]  # fmt: skip
        assert found[0] == found[1] != [], name
    if "layering" in path:
        there.test_one_function_asks_for_the_home_folder()
        there.test_every_backend_folder_is_packaged()
        for file in there.DIYFA_FILES[:3]:
            there.test_only_public_functions_take_many_parameters(file)
        for file in (file for file in there.FRONT_END_FILES if "cli" in file.parts):
            there.test_the_library_imports_nothing_of_the_laboratory(file)
