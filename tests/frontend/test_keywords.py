"""Arguments under other libraries' names are refused with diyfa's name for them, by every public function alike."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import diyfa
from diyfa import matmul
from diyfa.distributed import context_parallel_attention
from diyfa.keywords import ELSEWHERE

FUNCTIONS = [
    *(getattr(diyfa, name) for name in diyfa.__all__ if name.startswith(("flash_att", "reference_", "triton_"))),
    diyfa.explain,
    context_parallel_attention,
]


def arguments_of(function: Callable[..., Any]) -> list[Any]:
    parameters = inspect.signature(function).parameters.values()
    return [torch.ones(1, 1, 2, 16) for each in parameters if each.default is each.empty]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_names_of_other_libraries(function: Callable[..., Any]) -> None:
    own = inspect.signature(function).parameters
    assert all(each.kind is not each.VAR_KEYWORD for each in own.values())
    for name, (names, note) in ELSEWHERE.items():
        if name in own:
            continue
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'") as error:
            function(*arguments_of(function), **{name: None})
        here = [each for each in names if each in own]
        assert not here or f"here it is {here[0]}=" in str(error.value)
        assert names or note in str(error.value)


MESSAGES = {
    "attn_mask": "attn_bias=, added to the scores; of a boolean mask", "is_causal": "causal=, aligned to the bottom",
    "enable_gqa": "fewer heads", "return_lsee": "did you mean return_lse=?", "colour": "it takes q, k, v, causal",
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name: str) -> None:
    q = torch.ones(1, 1, 2, 16)
    with pytest.raises(TypeError) as error:
        diyfa.flash_attention(q, q, q, **{name: None})
    assert MESSAGES[name] in str(error.value)


def test_every_note_names_an_argument_that_some_function_has() -> None:
    known = {name for function in FUNCTIONS for name in inspect.signature(function).parameters}
    assert {name for names, _ in ELSEWHERE.values() for name in names} <= known


def test_a_boolean_bias() -> None:
    q = torch.ones(1, 1, 2, 16)
    with pytest.raises(TypeError, match=r"got torch.bool; of a boolean mask.*masked_fill\(~mask, float\('-inf'\)\)"):
        diyfa.flash_attention(q, q, q, attn_bias=torch.ones(2, 2, dtype=torch.bool), backend="cpu")


def test_float32_matrices_become_float16_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_has_warned", False)
    a = torch.ones(16, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        diyfa.triton_matmul(a, a, precision="ieee", backend="cpu")
        diyfa.triton_matmul(a, a, out_dtype=torch.float16, backend="cpu")
        diyfa.triton_matmul(a.half(), a.half(), backend="cpu")
    with pytest.warns(UserWarning, match="precision='tf32' or precision='ieee'") as told:
        assert diyfa.triton_matmul(a, a, backend="cpu").dtype == torch.float16
        diyfa.triton_matmul(a, a, backend="cpu")
    assert len(told) == 1 and told[0].filename == __file__
