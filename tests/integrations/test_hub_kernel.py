"""The folder of a Hugging Face kernel, loaded by `kernels` in a process that knows no other diyfa."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import diyfa
from diyfa.integrations import hub_kernel

LOAD = """
import sys
from pathlib import Path
folder, installed = Path(sys.argv[1]), sys.argv[2] == "installed"
if not installed:  # a package that was installed for editing is found by a finder of its own, or on the path
    sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
    sys.path = [entry for entry in sys.path if not (Path(entry) / "diyfa" / "__init__.py").exists()]
sys.modules["rich"] = None  # the command line's
import torch
from kernels import get_local_kernel
kernel = get_local_kernel(folder)
import diyfa
print(Path(diyfa.__file__).is_relative_to(folder), get_local_kernel(folder) is kernel, kernel.__version__)
q, k, v = (torch.randn(2, 9, heads, 16).requires_grad_() for heads in (4, 2, 2))
with kernel.use_backend("cpu"):
    out = kernel.flash_attn_func(q, k, v, causal=True)
    out.sum().backward()
    plain = kernel.reference_attention(q, k, v, causal=True, layout="bshd")
    plain = plain[0] if isinstance(plain, tuple) else plain
print(torch.allclose(out, plain, atol=1e-5), q.grad.shape == q.shape, callable(kernel.flash_attn_varlen_func))
print(type(kernel.flash_attn_with_kvcache).__name__, hasattr(kernel, "nothing"))
"""


def load(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LOAD, str(folder), how]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ, cwd=folder)


def test_a_kernel_from_a_folder(tmp_path: Path) -> None:
    variant = hub_kernel.build(tmp_path)
    assert variant == tmp_path / "build" / "torch-universal"
    assert (variant / "diyfa/backends/cuda/attention/fwd.py").is_file() and not list(variant.rglob("__pycache__"))
    found = load(tmp_path, "alone")
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [f"True True {diyfa.__version__}", "True True True", "function False"]
    with pytest.raises(FileExistsError):
        hub_kernel.build(tmp_path)


def test_another_version_is_installed(tmp_path: Path) -> None:
    entry = hub_kernel.build(tmp_path) / "__init__.py"
    found = load(tmp_path, "installed")
    assert found.stdout.startswith("False True"), "one diyfa in a process"
    entry.write_text(entry.read_text().replace(diyfa.__version__, "9.9.9"))
    found = load(tmp_path, "installed")
    assert f"diyfa {diyfa.__version__} is installed, which cannot be in one process with 9.9.9" in found.stderr
