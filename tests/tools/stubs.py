"""Write `diyfa/__init__.pyi`, which type checkers and editors read: `make stubs`.

Every public name is there, and functions whose flag adds results have an overload for each of its values. The
signatures are the functions' own.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import diyfa

FILE = Path(__file__).parents[2] / "diyfa" / "__init__.pyi"
TENSOR = "torch.Tensor"
# Function -> its flag, and how many tensors it returns with the flag.
FLAGS = {
    **dict.fromkeys(("flash_attention", "flash_attention_v2", "flash_attention_varlen"), ("return_lse", 2)),
    **dict.fromkeys((name for name in diyfa.__all__ if name.startswith("flash_attn_")), ("return_attn_probs", 3)),
    "flash_attn_with_kvcache": ("return_softmax_lse", 2),
    "reference_attention": ("return_lse", 2),
}
# Names in the functions' annotations that are not builtins.
ALIASES = {"Window": "tuple[int, int]", "Descale": "float | torch.Tensor | None", "Input": "torch.Tensor | Quantized"}
HEAD = '''"""Written by `make stubs` from the signatures of the functions."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

'''


def _parameter(parameter: inspect.Parameter, annotation: str, default: str | None) -> str:
    return f"    {parameter.name}: {annotation}" + ("" if default is None else f" = {default}") + ","


def _overload(function: Any, flag: str, value: str, result: str) -> str:
    """One overload of `function` where `flag` has the type `value`; True is always said, so it has no default."""
    lines, keyword_only = [], False
    for parameter in inspect.signature(function).parameters.values():
        annotation = ALIASES.get(parameter.annotation, parameter.annotation)
        default = None if parameter.default is parameter.empty else repr(parameter.default).replace("'", '"')
        if parameter.name == flag:
            annotation, default = value, None if value == "Literal[True]" else default
        starts = parameter.kind is parameter.KEYWORD_ONLY or (parameter.name == flag and default is None)
        if starts and not keyword_only:
            lines.append("    *,")
            keyword_only = True
        lines.append(_parameter(parameter, annotation, default))
    body = "\n".join(lines)
    return f"@overload\ndef {function.__name__}(\n{body}\n) -> {result}: ...\n"


def stub() -> str:
    """The text of the stub file."""
    plain = [name for name in diyfa.__all__ if name in diyfa._PUBLIC and name not in FLAGS]
    imports = sorted(f"from {diyfa._PUBLIC[name]} import {name} as {name}" for name in plain)
    overloads = []
    for name, (flag, count) in sorted(FLAGS.items()):
        function = getattr(importlib.import_module(diyfa._PUBLIC[name]), name)
        several = f"tuple[{', '.join([TENSOR] * count)}]"
        for value, result in (
            ("Literal[False]", TENSOR), ("Literal[True]", several), ("bool", f"{TENSOR} | {several}"),
        ):  # fmt: skip
            overloads.append(_overload(function, flag, value, result))
    return HEAD + "\n".join(imports) + "\n\n__version__: str\n__all__: list[str]\n\n" + "".join(overloads)


if __name__ == "__main__":
    FILE.write_text(stub(), encoding="utf-8")
