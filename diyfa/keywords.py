"""Names of arguments in other libraries: the TypeError of an unknown argument says what diyfa calls it.

A public function takes `**unknown`, which costs each call an empty dictionary. `without_unknown` hides it from the
function's signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

BOOLEAN_MASK = "of a boolean mask, True where a key is seen: torch.zeros(mask.shape).masked_fill(~mask, float('-inf'))"
BOTTOM_RIGHT = "aligned to the bottom right, PyTorch's to the top left"
# Name elsewhere -> (diyfa's names, of which each function has at most one; a note for the message).
ELSEWHERE: dict[str, tuple[tuple[str, ...], str]] = {
    "query": (("q",), ""), "key": (("k",), ""), "value": (("v",), ""), "bias": (("attn_bias",), ""),
    **dict.fromkeys(
        ("attn_mask", "attention_mask", "mask"), (("attn_bias",), f"added to the scores; {BOOLEAN_MASK}")
    ),
    "block_mask": (("mask",), "FlexAttention's becomes one by diyfa.BlockMask.from_flex"),
    **dict.fromkeys(("is_causal", "causal_mask"), (("causal",), BOTTOM_RIGHT)),
    **dict.fromkeys(("scale", "scaling"), (("sm_scale", "softmax_scale"), "")),
    "softmax_scale": (("sm_scale",), ""), "sm_scale": (("softmax_scale",), ""), "dropout": (("dropout_p",), ""),
    "window_size": (("window",), "(left, right), -1 is unbounded"),
    "window": (("window_size",), "(left, right), -1 is unbounded"),
    "sliding_window": (("window", "window_size"), "(left, right): of n keys (n - 1, 0)"),
    **dict.fromkeys(("logits_soft_cap", "soft_cap"), (("softcap",), "")),
    **dict.fromkeys(("s_aux", "learnable_sink"), (("sinks",), "")), "alibi_bias": (("alibi_slopes",), ""),
    "return_lse": (("return_softmax_lse", "return_attn_probs"), ""),
    "return_softmax_lse": (("return_lse", "return_attn_probs"), ""),
    "return_attn_probs": (("return_lse", "return_softmax_lse"), ""),
    **dict.fromkeys(("page_table", "block_tables"), (("block_table",), "")),
    "enable_gqa": ((), "k and v may have fewer heads than q without it"),
}  # fmt: skip


def without_unknown(function: Function) -> Function:
    """Return `function` with a signature that hides its `**unknown`."""
    signature = inspect.signature(function)
    named = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    return function


def refuse_unknown(function: Callable[..., Any], unknown: dict[str, Any]) -> NoReturn:
    """Raise Python's TypeError for an unknown argument, and name the argument that the function has instead."""
    name = next(iter(unknown))
    arguments = inspect.signature(function).parameters
    names, note = ELSEWHERE.get(name, ((), ""))
    equivalent = next((each for each in names if each in arguments), None)
    message = f"{function.__name__}() got an unexpected keyword argument {name!r}"
    if equivalent is not None:
        message += f": here it is {equivalent}=" + (f", {note}" if note else "")
    elif note and not names:
        message += f": {note}"
    elif near := get_close_matches(name, arguments):
        message += f": did you mean {near[0]}=?"
    else:
        message += f": it takes {', '.join(arguments)}"
    raise TypeError(message)
