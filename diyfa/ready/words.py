"""Calls in words, as `diyfa warmup --shapes` and `diyfa.warmup` take them and `diyfa pack --list` shows them:

    attention bfloat16 D=128 H=32/8 B=4 S=2048 causal packed
    cache bfloat16 D=128 H=32/8 B=16 Sq=1 Sk=8192 page=16 causal
    product float16 512x4096x4096

D is the head dim, D=192/128 that of V, too; H the heads, H=32/8 those of keys, too; B samples of Sq queries and Sk keys
each, or of S both.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import torch

from diyfa.ready.calls import BF16, Call, Heads, Rows, attention, cache, in_the_mode, merging, product_of

_DTYPES = {
    "bfloat16": BF16, "bf16": BF16, "float16": torch.float16, "fp16": torch.float16, "float32": torch.float32,
    "fp32": torch.float32,
}  # fmt: skip
_SHARED = frozenset({"causal", "softcap", "sinks", "alibi_slopes", "packed"})
_ATTENTION = _SHARED | {
    "window", "attn_bias", "bias_grad", "dropout_p", "seq_lens", "deterministic", "out_dtype", "forward", "longest",
}  # fmt: skip
_CACHE = _SHARED | {
    "window_size", "page", "longest", "new", "rotary", "rotary_interleaved", "latent", "float8", "num_splits",
}  # fmt: skip
_PRODUCT = frozenset({"transposed", "precision", "out_dtype"})
KINDS = "attention", "cache", "product", "merge"
_IN_THE_MODE = "batch-invariant"


def parse(text: str) -> Call:
    """Return the call that `text` describes; without one of `KINDS` it is attention. Raises ValueError."""
    words = text.split()
    invariant = words[:1] == [_IN_THE_MODE]
    words = words[invariant:]
    kind = words.pop(0) if words[:1] and words[0] in KINDS else "attention"
    dtypes = [_DTYPES[word] for word in words if word in _DTYPES]
    given = dict(_option(word) for word in words if word not in _DTYPES)
    dtype = dtypes[0] if dtypes else BF16
    if kind == "product":
        m, n, k = _sizes(text, given)
        _check(text, given, _PRODUCT)
        if "out_dtype" in given:
            given["out_dtype"] = _DTYPES[given["out_dtype"]]
        call = product_of(m, n, k, dtype, **given)
    elif kind == "merge":
        call = merging(_number(text, given, "D"))
    else:
        heads, rows = _heads(text, given), _rows(text, given)
        _check(text, given, _CACHE if kind == "cache" else _ATTENTION)
        if kind == "cache":
            call = cache(heads, rows, dtype, **given)
        else:
            call = attention(heads, rows, dtype, backward=not given.pop("forward", False), **given)
    return in_the_mode(call) if invariant else call


def _option(word: str) -> tuple[str, Any]:
    """`"causal"` -> ("causal", True), `"softcap=50.0"` -> ("softcap", 50.0)."""
    name, equals, value = word.partition("=")
    if not equals:
        return name, True
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):  # a word, or 32/8
        return name, value


def _check(text: str, given: dict[str, Any], known: frozenset[str]) -> None:
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"unknown words {', '.join(unknown)} in {text!r}; known are: {', '.join(sorted(known))}")


def _number(text: str, given: dict[str, Any], name: str) -> int:
    value = given.pop(name, None)
    if type(value) is not int or value < 1:
        raise ValueError(f"{text!r} needs {name}=<a number>, got {value!r}")
    return value


def _pair(text: str, given: dict[str, Any], name: str) -> tuple[int, int]:
    """Of `32/8`, or of one number that stands for both: 0 the second."""
    match = re.fullmatch(r"(\d+)(?:/(\d+))?", str(given.pop(name, "")))
    if match is None:
        raise ValueError(f"{text!r} needs {name}=<a number> or {name}=<a number>/<another>")
    return int(match[1]), int(match[2] or 0)


def _heads(text: str, given: dict[str, Any]) -> Heads:
    (d, dv), (queries, keys) = _pair(text, given, "D"), _pair(text, given, "H")
    return Heads(d, dv if dv != d else 0, queries, keys or queries)


def _rows(text: str, given: dict[str, Any]) -> Rows:
    if "S" in given:
        given["Sq"] = given["Sk"] = given.pop("S")
    return Rows(*(_number(text, given, name) for name in ("B", "Sq", "Sk")))


def _sizes(text: str, given: dict[str, Any]) -> tuple[int, int, int]:
    for name in given:
        if match := re.fullmatch(r"(\d+)x(\d+)x(\d+)", name):
            del given[name]
            return int(match[1]), int(match[2]), int(match[3])
    raise ValueError(f"{text!r} needs the sizes of the product, as in 512x4096x4096")
