"""The dependency rules of the architecture, checked on the source text."""

from __future__ import annotations

import ast
import functools
import runpy
import sys
from pathlib import Path

import pytest

import diyfa

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
BACKEND_FOLDERS = sorted(p for p in (ROOT / "backends").iterdir() if p.is_dir() and (p / "__init__.py").exists())
BACKEND_FILES = [f for folder in BACKEND_FOLDERS for f in sorted(folder.rglob("*.py"))]
DIYFA_FILES = [f for f in sorted((ROOT / "diyfa").rglob("*.py")) if "backends" not in f.relative_to(ROOT).parts]
FRONT_END_FILES = [f for f in DIYFA_FILES if "lab" not in f.relative_to(ROOT).parts]
# Plain data, and plain integer arithmetic, the one definition of dropout's mask: a second copy could differ from the
# first. `tuning` is the bookkeeping of tuned tiles, which knows neither PyTorch nor Triton.
ALLOWED_IN_BACKENDS = {
    "diyfa.problem", "diyfa.features", "diyfa.arch", "diyfa.dropout", "diyfa.npu_stacks", "diyfa.tuning",
    "diyfa.imports", "diyfa.block_lists", "diyfa.mask_terms", "diyfa.eight_bits", "diyfa.score_programs",
    "diyfa.score_code",
}  # fmt: skip
KERNEL_LANGUAGES = {"triton", "torch_npu"}


@functools.cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@functools.cache
def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Dotted names of the modules that a file imports."""
    tree = syntax_tree(path)
    nodes = tree.body if top_level_only else ast.walk(tree)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            # "from diyfa import problem" imports a module too
            found |= {f"diyfa.{a.name}" for a in node.names} if module == "diyfa" else {module}
            if module == "diyfa.backends":
                found |= {f"diyfa.backends.{a.name}" for a in node.names}
    return found


def test_backends_exist() -> None:
    assert {p.name for p in BACKEND_FOLDERS} >= {"cpu"}
    assert (ROOT / "diyfa" / "backends").is_symlink()


@pytest.mark.parametrize("path", BACKEND_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_backends_import_the_protocol_only(path: Path) -> None:
    own = f"diyfa.backends.{path.relative_to(ROOT / 'backends').parts[0]}"
    for name in imports(path):
        if name == "diyfa" or name.startswith("diyfa."):
            assert name in ALLOWED_IN_BACKENDS or name == own or name.startswith(own + "."), f"{path} imports {name}"
        assert name.split(".")[0] != "backends", f"{path} imports {name}: the package is diyfa.backends"


@pytest.mark.parametrize("path", FRONT_END_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_front_end_imports_no_backend(path: Path) -> None:
    for name in imports(path):
        assert not name.startswith(("diyfa.backends", "backends")), f"{path} imports {name}"
    for name in imports(path, top_level_only=True):
        assert name.split(".")[0] not in KERNEL_LANGUAGES, f"{path} imports {name} when it is imported"


# The commands run the laboratory, and a few of its functions are public; both import it when they are used.
DOORS_TO_THE_LABORATORY = {"diyfa/__init__.py", "diyfa/cli/app.py"}


@pytest.mark.parametrize("path", [*FRONT_END_FILES, *BACKEND_FILES], ids=lambda p: str(p.relative_to(ROOT)))
def test_the_library_imports_nothing_of_the_laboratory(path: Path) -> None:
    is_door = path.relative_to(ROOT).as_posix() in DOORS_TO_THE_LABORATORY
    for name in imports(path, top_level_only=is_door):
        assert not name.startswith("diyfa.lab"), f"{path} imports {name}"


# Their parameters are given: those of flash_attn, torch, torch_npu and vllm's attention implementations.
FOREIGN_SIGNATURES = {
    "_flash_attn_forward", "_flash_attn_backward", "_flash_attn_varlen_forward", "_flash_attn_varlen_backward",
    "_flash_forward", "_flash_backward",
    "npu_fusion_attention", "npu_fusion_attention_v2", "fusion_attention_arguments", "reference_append",
    "context_parallel_attention",  # public, in diyfa.distributed
    "get_scheduler_metadata", "attention_arguments",
}  # fmt: skip
MAX_PARAMETERS = 10


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it runs on a device, where every number is an argument."""
    return any(
        ast.unparse(decorator).split("(")[0] in ("triton.jit", "gluon.jit", "kernel")
        for decorator in function.decorator_list
    )


def is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether its parameters are the options of a command line."""
    return any("app.command" in ast.unparse(decorator) for decorator in function.decorator_list)


@pytest.mark.parametrize("path", [*DIYFA_FILES, *BACKEND_FILES], ids=lambda p: str(p.relative_to(ROOT)))
def test_only_public_functions_take_many_parameters(path: Path) -> None:
    """What a call has besides tensors travels in `Lengths` and `AttentionOptions`."""
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = node.args
            count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
            public = node.name in {*diyfa.__all__, *FOREIGN_SIGNATURES} or is_command(node) or is_kernel(node)
            assert count <= MAX_PARAMETERS or public, f"{path}: {node.name} takes {count} parameters"


@pytest.mark.parametrize(
    "module, allowed",
    [
        ("features.py", {"diyfa.block_lists", "diyfa.eight_bits", "diyfa.score_programs"}), ("block_lists.py", set()),
        ("score_programs.py", set()), ("score_functions.py", {"diyfa.score_programs"}),
        ("score_code.py", {"diyfa.score_programs"}),
        ("eight_bits.py", set()), ("arch.py", set()), ("dropout.py", set()), ("npu_stacks.py", set()),
        ("imports.py", set()),
        ("problem.py", {"diyfa.features"}),
        ("options.py", {"diyfa.features", "diyfa.problem"}), ("tuning.py", {"diyfa.problem"}),
    ],
)  # fmt: skip
def test_the_protocol_imports_little_of_diyfa(module: str, allowed: set[str]) -> None:
    assert {name for name in imports(ROOT / "diyfa" / module) if name.startswith("diyfa")} == allowed


def test_one_function_asks_for_the_home_folder() -> None:
    """There may be none: Python raises, `home_folder` says so."""
    asks = {
        str(path.relative_to(ROOT)): text.count("Path.home") + text.count("expanduser")
        for path in (*FRONT_END_FILES, *BACKEND_FILES)
        if "Path.home" in (text := path.read_text(encoding="utf-8")) or "expanduser" in text
    }
    assert asks == {"diyfa/tuning.py": 1}


def test_every_cache_is_accounted_for() -> None:
    """A decision, a compiled launch, a tuned tile, or a fact of the process: when it fails, see its tables."""
    structure = runpy.run_path(str(ROOT / "tests" / "tools" / "structure.py"))
    named = {*structure["CACHES"], *structure["PROCESS_CACHES"], *structure["OTHER_CACHES"]}
    assert set(structure["caches"](structure["sources"](ROOT))) == named


def test_tuning_needs_neither_pytorch_nor_triton() -> None:
    assert not imports(ROOT / "diyfa" / "tuning.py") & {"torch", "triton"}


def test_testing_needs_no_test_framework() -> None:
    names = {name.split(".")[0] for name in imports(ROOT / "diyfa" / "testing.py")}
    assert not names & {"pytest", "hypothesis", "numpy"}


def test_every_backend_folder_is_packaged() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        packages = set(tomllib.load(file)["tool"]["setuptools"]["packages"])
    on_disk = {
        "diyfa.backends." + ".".join(f.parent.relative_to(ROOT / "backends").parts)
        for f in BACKEND_FILES
        if f.name == "__init__.py"
    } | {".".join(f.parent.relative_to(ROOT).parts) for f in FRONT_END_FILES if f.name == "__init__.py"}
    assert on_disk <= packages, f"not listed in pyproject.toml: {sorted(on_disk - packages)}"
