"""Calls in words. `diyfa warmup --shapes` and `diyfa.warmup` take them, `diyfa pack --list` shows them:

    attention bfloat16 D=128 H=32/8 B=4 S=2048 causal packed
    cache bfloat16 D=128 H=32/8 B=16 Sq=1 Sk=8192 page=16 causal
    product float16 512x4096x4096
    mask document S=8192

D is the head dim (D=192/128: of Q and K, and of V), H the number of heads (H=32/8: of Q, and of K and V). B samples
have Sq queries and Sk keys each, or S of both.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch

from diyfa.block_lists import BLOCK_SIZES
from diyfa.ready.calls import (
    BF16,
    MASKS,
    PER_HEAD,
    Call,
    Heads,
    Rows,
    attention,
    cache,
    in_batch_invariant_mode,
    masking,
    matrix_product,
    merging,
)

_DTYPES = {
    "bfloat16": BF16, "bf16": BF16, "float16": torch.float16, "fp16": torch.float16, "float32": torch.float32,
    "fp32": torch.float32,
}  # fmt: skip

Form = tuple[str, Callable[[Any], bool]]  # (description of the value in messages, test of a value)
_FLAG: Form = "True or False", lambda x: type(x) is bool
_FACTOR: Form = "a number", lambda x: type(x) in (int, float)
_COUNT: Form = "a whole number from 0 on", lambda x: type(x) is int and x >= 0
_PAIR: Form = "two whole numbers, as in 1023,0", lambda x: isinstance(x, tuple) and [*map(type, x)] == [int, int]
_BLOCK: Form = "the queries and keys of a block, as in 128,64", lambda x: x in {*product(BLOCK_SIZES, repeat=2)}
_BIAS: Form = "the letters of its dimensions, as in 1hqk", lambda x: bool(re.fullmatch("[b1][h1][q1][k1]", str(x)))
_DTYPE: Form = f"one of {', '.join(_DTYPES)}", lambda x: str(x) in _DTYPES
_PRECISION: Form = "tf32 or ieee", lambda x: x in ("tf32", "ieee")
_COMMON = {"causal": _FLAG, "softcap": _FACTOR, "packed": _FLAG} | dict.fromkeys(PER_HEAD, _FLAG)
_ATTENTION = _COMMON | {
    "window": _PAIR, "attn_bias": _BIAS, "bias_grad": _FLAG, "dropout_p": _FACTOR, "seq_lens": _FLAG,
    "deterministic": _FLAG, "out_dtype": _DTYPE, "forward": _FLAG, "longest": _COUNT, "mask": _BLOCK,
}  # fmt: skip
_CACHE = _COMMON | {
    "window_size": _PAIR, "page": _COUNT, "longest": _COUNT, "new": _COUNT, "rotary": _COUNT,
    "rotary_interleaved": _FLAG, "latent": _FLAG, "float8": _FLAG, "num_splits": _COUNT,
}  # fmt: skip
_PRODUCT = {"transposed": _FLAG, "precision": _PRECISION, "out_dtype": _DTYPE}
KINDS = "attention", "cache", "product", "merge", "mask"
_BATCH_INVARIANT = "batch-invariant"


def parse(text: str) -> Call:
    """Return the call that `text` describes. The kind is one of `KINDS`, by default attention. Raises ValueError."""
    words = text.split()
    invariant = words[:1] == [_BATCH_INVARIANT]
    words = words[invariant:]
    kind = words.pop(0) if words[:1] and words[0] in KINDS else "attention"
    dtypes = [_DTYPES[word] for word in words if word in _DTYPES]
    options = [_option(word) for word in words if word not in _DTYPES]
    entries = dict(options)
    if len(dtypes) > 1 or len(entries) < len(options) or ("S" in entries and entries.keys() & {"Sq", "Sk"}):
        raise ValueError(f"{text!r} says something twice")
    dtype = dtypes[0] if dtypes else BF16
    if kind == "product":
        m, n, k = _sizes(text, entries)
        _check(text, entries, _PRODUCT)
        if "out_dtype" in entries:
            entries["out_dtype"] = _DTYPES[entries["out_dtype"]]
        call = matrix_product(m, n, k, dtype, **entries)
    elif kind == "merge":
        call = merging(_number(text, entries, "D"))
        _check(text, entries, {})
    elif kind == "mask":
        length = _number(text, entries, "S")
        _check(text, entries, dict.fromkeys(MASKS, _FLAG))
        names = list(entries)
        if len(names) != 1:
            raise ValueError(f"{text!r} needs the name of one mask: {', '.join(MASKS)}")
        call = masking(names[0], length)
    else:
        heads, rows = _heads(text, entries), _rows(text, entries)
        _check(text, entries, _CACHE if kind == "cache" else _ATTENTION)
        if "out_dtype" in entries:
            entries["out_dtype"] = str(_DTYPES[entries["out_dtype"]]).removeprefix("torch.")
        if kind == "cache":
            call = cache(heads, rows, dtype, **entries)
        else:
            call = attention(heads, rows, dtype, backward=not entries.pop("forward", False), **entries)
    return in_batch_invariant_mode(call) if invariant else call


def _option(word: str) -> tuple[str, Any]:
    """Split a word into name and value: `"causal"` -> ("causal", True), `"softcap=50.0"` -> ("softcap", 50.0)."""
    name, equals, value = word.partition("=")
    if not equals:
        return name, True
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):  # a word, or 32/8
        return name, value


def _check(text: str, entries: dict[str, Any], allowed: Mapping[str, Form]) -> None:
    if unknown := sorted(entries.keys() - allowed):
        raise ValueError(f"unknown words {', '.join(unknown)} in {text!r}; known are: {', '.join(sorted(allowed))}")
    for name, value in entries.items():
        form, is_right = allowed[name]
        if not is_right(value):
            raise ValueError(f"{name} in {text!r} must be {form}, got {value!r}")


def _number(text: str, entries: dict[str, Any], name: str) -> int:
    value = entries.pop(name, None)
    if type(value) is not int or value < 1:
        raise ValueError(f"{text!r} needs {name}=<a number>, got {value!r}")
    return value


def _pair(text: str, entries: dict[str, Any], name: str) -> tuple[int, int]:
    """Return the numbers of `32/8`. If there is only one number, the second is 0."""
    match = re.fullmatch(r"(\d+)(?:/(\d+))?", str(entries.pop(name, "")))
    if match is None:
        raise ValueError(f"{text!r} needs {name}=<a number> or {name}=<a number>/<another>")
    return int(match[1]), int(match[2] or 0)


def _heads(text: str, entries: dict[str, Any]) -> Heads:
    (d, dv), (queries, keys) = _pair(text, entries, "D"), _pair(text, entries, "H")
    return Heads(d, dv if dv != d else 0, queries, keys or queries)


def _rows(text: str, entries: dict[str, Any]) -> Rows:
    if "S" in entries:
        entries["Sq"] = entries["Sk"] = entries.pop("S")
    return Rows(*(_number(text, entries, name) for name in ("B", "Sq", "Sk")))


def _sizes(text: str, entries: dict[str, Any]) -> tuple[int, int, int]:
    for name in entries:
        if match := re.fullmatch(r"(\d+)x(\d+)x(\d+)", name):
            del entries[name]
            return int(match[1]), int(match[2]), int(match[3])
    raise ValueError(f"{text!r} needs the sizes of the product, as in 512x4096x4096")
