"""Check a wheel and a source distribution: contents, a fresh install, a call, the command line, tests of the sources.

`make dist` runs it: `python tests/tools/distribution.py dist`. PyTorch and the other dependencies come from the running
environment, diyfa from the wheel.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CALL = """
import sys, torch, diyfa, importlib.metadata as metadata
assert diyfa.__file__.startswith(sys.prefix), diyfa.__file__
assert metadata.version("diyfa") == diyfa.__version__
q = torch.randn(1, 2, 64, 32, requires_grad=True)
out = diyfa.flash_attention(q, q, q, causal=True, backend="cpu")
out.sum().backward()
assert torch.allclose(out, diyfa.reference_attention(q, q, q, causal=True), atol=1e-5)
assert {"cuda", "npu", "cpu"} <= set(diyfa.registry.backend_names())
"""


def sources() -> set[str]:
    """Return the modules of the source tree as a wheel names them."""
    library = {str(p.relative_to(ROOT)) for p in (ROOT / "diyfa").rglob("*.py*") if "backends" not in p.parts}
    kernels = {f"diyfa/{p.relative_to(ROOT)}" for p in (ROOT / "backends").rglob("*.py")}
    return {name for name in library | kernels if not name.endswith(".pyc")}


def check_wheel(wheel: Path) -> None:
    """Raise AssertionError if the wheel lacks a module, or its page has a link that an index page cannot follow."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
    assert not (missing := sources() - names), f"not in the wheel: {sorted(missing)}"
    assert not [name for name in names if name.startswith(("tests/", "docs/"))]
    data = {str(p.relative_to(ROOT)) for kind in ("css", "js", "jinja") for p in (ROOT / "diyfa").rglob(f"*.{kind}")}
    assert not (missing := data - names), f"not in the wheel: {sorted(missing)}"
    assert "diyfa/backends/npu/tables/tiles.json" in names and "diyfa/py.typed" in names
    for name in ("Author: diyfa authors", "License-Expression: Apache-2.0", "Project-URL: Repository", "Classifier: "):
        assert name in metadata, f"no {name!r} in the metadata"
    relative = [t for t in re.findall(r"\]\(([^)]+)\)", metadata) if not t.startswith(("https://", "#"))]
    assert not relative, f"relative links on the index page: {relative}"


def check_source(archive: Path) -> None:
    """Raise AssertionError if the source distribution lacks tests, documentation or kernels."""
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    wanted = (
        "tests/tools/test_docs.py", "docs/index.md", "docs/zh/index.md", "backends/cuda/hopper/fwd.py", "Makefile",
        "CHANGELOG.md", "benchmarks/attention.py", ".ci/run", "tests/support/refusals.txt",
    )  # fmt: skip
    assert not (missing := set(wanted) - names), f"not in the source distribution: {sorted(missing)}"
    assert not [name for name in names if name.startswith("diyfa/backends/")], "kernels twice"


def check_source_works(archive: Path) -> None:
    """Unpack the source distribution, build it for editing as `make test` does, and run a few of its tests."""
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        (home,) = Path(folder).iterdir()
        make = [sys.executable, "setup.py", "-q", "egg_info"]
        subprocess.run(make, check=True, cwd=home, env=alone, stderr=subprocess.DEVNULL)
        tests = ["tests/tools/test_results.py", "tests/frontend/test_device.py"]
        run = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
        subprocess.run(run, check=True, cwd=home, env=alone, stdout=subprocess.DEVNULL)


def check_install(wheel: Path) -> None:
    """Install the wheel into a new environment, and use it from an empty folder."""
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "environment"
        venv.create(home, with_pip=False, symlinks=True)
        python = home / "bin" / "python"
        install = ["install", "-q", "--no-deps", "--no-index", str(wheel)]
        run = [sys.executable, "-m", "pip", "--python", str(python), *install]
        subprocess.run(run, check=True, env=alone)
        packages = Path(next((home / "lib").glob("python*"))) / "site-packages"
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([python, "-c", CALL], check=True, cwd=folder, env=alone)
        for arguments in (["--version"], ["info"], ["compile", "--list"]):
            subprocess.run(
                [home / "bin" / "diyfa", *arguments], check=True, cwd=folder, env=alone, stdout=subprocess.DEVNULL
            )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (wheel,), (archive,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    check_wheel(wheel)
    check_source(archive)
    check_source_works(archive)
    check_install(wheel.resolve())
    sizes = ", ".join(f"{path.name} {path.stat().st_size / 2**20:.1f} MiB" for path in (wheel, archive))
    print(f"{sizes}: contents, a fresh install, a call, the command line and tests of the sources are right")
