"""`import flash_attn` means diyfa: every way of asking Python, taking it back, refusals, and whole programs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from subprocesses import SUPPORT, run_after_torch, run_python

from diyfa.integrations import alias, alias_flash_attn

BLOCK = SUPPORT / "dropin_block.py"
ALIASED = "from diyfa.integrations import alias_flash_attn\nhandle = alias_flash_attn()\n"


def aliased(code: str, *paths: Path, **environment: str) -> list[str]:
    return run_after_torch(ALIASED + code, *paths, **environment).splitlines()


def installed(folder: Path) -> Path:
    """Something that looks like an installed flash_attn."""
    package = folder / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '1.0.9'\nreal = True\n")
    (package / "modules.py").write_text("")
    metadata = folder / "flash_attn-1.0.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: flash_attn\nVersion: 1.0.9\n")
    (metadata / "top_level.txt").write_text("flash_attn\n")
    return folder


IMPORTS = """
import flash_attn, flash_attn.bert_padding, flash_attn.layers.rotary, flash_attn.ops.triton.rotary
from flash_attn import flash_attn_func, flash_attn_varlen_qkvpacked_func, flash_attn_interface, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_varlen_backward, flash_attn_varlen_func
from flash_attn.bert_padding import *
import diyfa, diyfa.bert_padding, diyfa.layers.rotary
print(flash_attn.__version__, flash_attn.__name__, flash_attn.__spec__.name)
print(flash_attn_with_kvcache is diyfa.flash_attn_with_kvcache)
print(flash_attn_func is diyfa.flash_attn_func, flash_attn.flash_attn_interface is flash_attn_interface)
print(unpad_input is diyfa.bert_padding.unpad_input)
print(flash_attn.layers.rotary.apply_rotary_emb is diyfa.layers.rotary.apply_rotary_emb)
print(flash_attn.ops.triton.rotary.apply_rotary is diyfa.layers.rotary.apply_rotary)
print("flash_attn_func" in dir(flash_attn), diyfa.bert_padding.__spec__.name, diyfa.bert_padding.__name__)
for module in ("flash_attn.modules", "flash_attn.losses.cross_entropy"):
    try:
        __import__(module)
    except ModuleNotFoundError as error:
        print(error)
try:
    from flash_attn import flash_attn_unknown
except ImportError as error:
    print("cannot import name 'flash_attn_unknown'" in str(error))
"""


@pytest.mark.parametrize("real", [False, True])
def test_imports(real: bool, tmp_path: Path) -> None:
    """The same whether or not a real flash_attn could be imported."""
    assert aliased(IMPORTS, *([installed(tmp_path)] if real else [])) == [
        "2.8.3 flash_attn flash_attn", "True", "True True", "True", "True", "True",
        "True diyfa.bert_padding diyfa.bert_padding", "No module named 'flash_attn.modules'",
        "No module named 'flash_attn.losses'", "True",
    ]  # fmt: skip


QUERIES = """
import importlib.metadata as metadata, importlib.util
print(importlib.util.find_spec("flash_attn").name, importlib.util.find_spec("flash_attn.bert_padding").name)
print(importlib.util.find_spec("flash_attn.modules"), importlib.util.find_spec("flash_attn_interface"))
print(metadata.version("flash_attn"), metadata.version("flash-attn"), metadata.version("Flash.Attn"))
print(set(metadata.packages_distributions()["flash_attn"]), metadata.metadata("flash-attn")["Name"])
print(len([d for d in metadata.distributions() if d.metadata["Name"] == "torch"]))
print(metadata.distribution("flash_attn").files, metadata.requires("flash_attn"))
"""


@pytest.mark.parametrize("real", [False, True])
def test_metadata_of_the_package(real: bool, tmp_path: Path) -> None:
    assert aliased(QUERIES, *([installed(tmp_path)] if real else [])) == [
        "flash_attn flash_attn.bert_padding", "None None", "2.8.3 2.8.3 2.8.3", "{'flash_attn'} flash_attn", "1",
        "None None",
    ]  # fmt: skip


def test_names_are_those_of_flash_attn_and_no_others() -> None:
    """What diyfa's modules import for themselves does not hide flash_attn's submodules or leak into a star import."""
    code = """
from flash_attn import ops
import flash_attn, flash_attn.flash_attn_interface as interface
from flash_attn.flash_attn_interface import _flash_attn_forward, _wrapped_flash_attn_varlen_backward
scope = {}
exec("from flash_attn import *", scope)
print(ops.__name__, hasattr(flash_attn, "validation"), hasattr(interface, "torch"), "torch" in scope)
print(sorted(set(dir(flash_attn)) - {n for n in dir(flash_attn) if n.startswith(("__", "flash_attn"))}))
print(sorted(n for n in scope if n != "__builtins__") == sorted(flash_attn.__all__), "flash_attn_func" in scope)
"""
    assert aliased(code) == ["flash_attn.ops False False False", "['ops']", "True True"]


@pytest.mark.parametrize("there", [False, True])
def test_names_that_flash_attn_reexports_from_einops(there: bool, tmp_path: Path) -> None:
    """Reinforcement-learning libraries import `rearrange` from flash_attn.bert_padding."""
    if there:
        (tmp_path / "einops.py").write_text("def rearrange(): ...\ndef repeat(): ...\n")
    code = """
try:
    from flash_attn.bert_padding import index_first_axis, pad_input, rearrange, repeat, unpad_input
    print(rearrange.__module__, repeat.__module__, pad_input.__module__)
except ImportError as error:
    print("cannot import name 'rearrange' from 'flash_attn.bert_padding'" in str(error))
"""
    if not there:
        code = "import sys\nsys.modules['einops'] = None\n" + code
    expected = "einops einops diyfa.bert_padding" if there else "True"
    assert aliased(code, *([tmp_path] if there else [])) == [expected]


def test_looking_for_it_imports_nothing() -> None:
    code = "import sys, importlib.util\nimportlib.util.find_spec('flash_attn')\n"
    code += "print('torch' in sys.modules, 'flash_attn' in sys.modules)"
    assert run_python(ALIASED + code).split() == ["False", "False"]


REMOVAL = """
import importlib.metadata as metadata, importlib.util, sys
import flash_attn.layers.rotary
from flash_attn import flash_attn_func
print(handle.active, handle.version, alias_flash_attn() is handle)
handle.remove()
handle.remove()
print(handle.active, sorted(name for name in sys.modules if name.startswith("flash_attn")), callable(flash_attn_func))
spec = importlib.util.find_spec("flash_attn")
print(None if spec is None else metadata.version("flash_attn"), "flash_attn" in metadata.packages_distributions())
again = alias_flash_attn("2.7.4.post1")
import flash_attn
print(again is handle, flash_attn.__version__, metadata.version("flash_attn"))
try:
    alias_flash_attn()
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize("real", [False, True])
def test_removal_leaves_nothing(real: bool, tmp_path: Path) -> None:
    assert aliased(REMOVAL, *([installed(tmp_path)] if real else [])) == [
        "True 2.8.3 True",
        "False [] True",
        "1.0.9 True" if real else "None False",
        "False 2.7.4.post1 2.7.4.post1",
        "flash_attn is diyfa already, as version 2.7.4.post1; remove that alias first",
    ]


def test_an_imported_flash_attn_is_not_replaced(tmp_path: Path) -> None:
    code = """
import flash_attn, sys
from diyfa.integrations import alias_flash_attn
before = list(sys.meta_path)
try:
    alias_flash_attn()
except RuntimeError as error:
    print(error)
print(flash_attn.real, sys.meta_path == before)
"""
    assert run_after_torch(code, installed(tmp_path)).splitlines() == [
        "flash_attn is imported already (flash_attn): call alias_flash_attn before that",
        "True True",
    ]


@pytest.mark.parametrize("version", ["", "two", "2.8.3 ", "v2.8", None, 2.8])
def test_versions_that_are_none(version: Any) -> None:
    error = ValueError if isinstance(version, str) else TypeError
    with pytest.raises(error, match=r"version must (look like 2\.8\.3|be a str)"):
        alias_flash_attn(version)


def test_long_versions_are_judged_at_once() -> None:
    """The alarm ends the process: matching must take time in proportion to the length."""
    code = """
import signal
from diyfa.integrations import alias_flash_attn
signal.alarm(20)
for version in ("2.8" + "a" * 32 + "!", "1" * 50000 + "!", "2" + ".1a" * 20000 + "!"):
    try:
        alias_flash_attn(version)
    except ValueError:
        print("refused")
print(alias_flash_attn("2.8" + ".post1+local" * 5000).active)
"""
    assert run_after_torch(code).split() == ["refused", "refused", "refused", "True"]


def test_every_aliased_module_exists() -> None:
    """The table names modules of diyfa that are there, and parents before children."""
    for package in alias.PACKAGES:
        assert callable(getattr(alias, package.function)) and package.distribution
        for name, target in package.modules.items():
            assert "." not in name or name.rpartition(".")[0] in package.modules
            if target is not None:
                assert importlib.import_module(target).__all__


RUN = "import runpy, sys\nsys.argv = ['dropin_block.py', {arguments}]\nrunpy.run_path({path!r}, run_name='__main__')\n"
BY_HAND = "import sys, diyfa\nsys.modules['flash_attn'] = diyfa\n"


def run_block(replacement: str, *arguments: str, **environment: str) -> str:
    listed = ", ".join(map(repr, arguments))
    return run_after_torch(replacement + RUN.format(arguments=listed, path=str(BLOCK)), **environment)


@pytest.mark.parametrize("replacement", [ALIASED, BY_HAND], ids=["alias", "by_hand"])
def test_a_block_written_for_flash_attn(replacement: str) -> None:
    assert "diyfa" not in "".join(BLOCK.read_text().split('"""')[2:]), (
        "the block must not know what replaces flash_attn"
    )
    names = ("float16", "bfloat16", "float32") if replacement == ALIASED else ("float16",)
    dtypes = [word for name in names for word in ("--dtype", name)]
    lines = run_block(replacement, "--device", "cpu", *dtypes, DIYFA_BACKEND="cpu").splitlines()
    assert len(lines) == 2 * len(names) + 1 and lines[-1] == "the block does what it should"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_block_written_for_flash_attn_on_a_gpu() -> None:
    assert "the block does what it should" in run_block(ALIASED, "--device", "cuda")
