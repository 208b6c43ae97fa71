"""What a kernel is compiled for is one object, and Triton keeps a compiled kernel under all of its values."""

from __future__ import annotations

import ast
import copy
import json
import pickle
from dataclasses import fields, make_dataclass, replace
from pathlib import Path

import pytest
import triton.language as tl
from constants_kernel import OTHER_VALUES, VALUES, Values
from subprocesses import SUPPORT, run_python

import diyfa.backends
from diyfa.backends.cuda.runtime.constants import Constants
from diyfa.backends.cuda.runtime.launch import is_interpreting


def kernel_constexprs() -> dict[str, list[str]]:
    """The constexprs of each kernel that a launcher launches."""
    found = {}
    for file in Path(diyfa.backends.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list:
                arguments = [a.arg for a in node.args.args if a.annotation and "constexpr" in ast.unparse(a.annotation)]
                found[f"{file.parent.parent.name}/{file.stem}.{node.name}"] = arguments
    return found


def test_every_kernel_takes_one() -> None:
    found = kernel_constexprs()
    assert len(found) > 15
    others = {name for name, names in found.items() if names not in (["c"], ["config"])}
    learners = {f"{backend}/tutorial._fwd_tutorial_kernel" for backend in ("cuda", "npu")}
    assert others == {
        *learners,
        "cuda/select_blocks._means_kernel",  # whose block of queries may differ from that of keys
        "cuda/long_blocks._find_long_blocks_kernel",  # which has no constants
    }


def test_every_value_is_a_field() -> None:
    """The code of a property would not be part of what Triton keeps a kernel under."""
    from diyfa.backends.cuda.attention import append, bwd, bwd_dbias, decode, fwd, launch
    from diyfa.backends.cuda.matmul import kernel

    own = set(vars(Constants))
    classes = [x for module in (append, bwd, bwd_dbias, decode, fwd, launch, kernel) for x in vars(module).values()]
    classes = [x for x in classes if isinstance(x, type) and issubclass(x, Constants) and x is not Constants]
    assert len(classes) >= 8
    for cls in classes:
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        computed = [name for name, x in vars(cls).items() if isinstance(x, property) and name not in own]
        assert not computed and all(name.islower() for name in names)
        assert cls.__eq__ is Constants.__eq__ and cls.__hash__ is Constants.__hash__, cls  # which keep a hash


def test_the_host_reads_values_and_kernels_constexprs() -> None:
    assert (VALUES.size, VALUES.flag, VALUES.form) == (16, True, "plain")
    assert tl.core._unwrap_if_constexpr(VALUES.SIZE) == 16
    assert isinstance(VALUES.SIZE, tl.constexpr) != is_interpreting()
    for name in ("BLOCK_M", "block_m", "type"):
        with pytest.raises(AttributeError, match="has no field"):
            getattr(VALUES, name)


def test_constants_differ_in_every_value() -> None:
    assert Values(16, True) == VALUES and hash(Values(16, True)) == hash(VALUES)
    for name, other in OTHER_VALUES.items():
        changed = replace(VALUES, **{name: other})
        assert changed != VALUES and repr(changed) != repr(VALUES)
    other_class = type("OtherValues", (Values,), {})
    assert other_class(16, True) != VALUES


def test_constants_are_read_by_name() -> None:
    """From all sources, but not if a value is given. A flag tells whether its field is not 0."""
    problem = make_dataclass("Problem", [("flag", float), ("dtype", str), ("form", str)])(0.5, "float16", "problem's")
    config = make_dataclass("Config", [("size", int), ("num_warps", int)])(32, 4)
    assert Values.read_from(problem, config, form="given") == Values(32, True, "given")
    assert Values.read_from(replace(problem, flag=0.0), config) == Values(32, False, "problem's")
    with pytest.raises(TypeError, match="size"):
        Values.read_from(problem)


def test_copies_have_no_cached_hash() -> None:
    """That of a text is another one in another process."""
    hash(VALUES)
    for other in (copy.copy(VALUES), copy.deepcopy(VALUES), pickle.loads(pickle.dumps(VALUES))):
        assert other == VALUES and not hasattr(other, "_hash") and hash(other) == hash(VALUES)
    other = copy.copy(VALUES)
    other.__dict__["size"] = VALUES.size + 1
    assert other != VALUES


def test_a_compiled_kernel_is_cached_under_every_value() -> None:
    pytest.importorskip("triton.backends.nvidia", reason="this Triton has no NVIDIA backend")
    first, same, *others = json.loads(run_python(SUPPORT / "constants_kernel.py", TRITON_INTERPRET="0"))
    assert same == first and len(others) == len(OTHER_VALUES)
    for name, (key, code) in zip(OTHER_VALUES, others, strict=True):
        assert key != first[0] and code != first[1], name
