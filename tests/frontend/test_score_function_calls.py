"""Score functions before a launch: what a function may do, what is refused with its name, and how calls take them."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from score_functions import FUNCTIONS, MIDDLE, relative
from scripts import load_script
from subprocesses import ROOT, run_after_torch, run_python

import diyfa
from diyfa import masks, score_programs
from diyfa.backends.cuda.attention import score_functions as portable
from diyfa.features import SCORE_EXAMPLE
from diyfa.options import AttentionOptions, Lengths, pack
from diyfa.registry import load_backend
from diyfa.score_code import gathered_loads, value_source
from diyfa.score_functions import score_function
from diyfa.score_programs import Program, programs, why_not_differentiable

q = torch.randn(1, 2, 20, 16)
bias = torch.randn(2, 128)


def attend(*captured: Any, **options: Any) -> torch.Tensor:
    return diyfa.flash_attention(q, q, q, backend="cpu", score_tensors=captured, **options)


# ---- Programs --------------------------------------------------------------------------------------------------------


def test_a_program_is_one_operation_a_line() -> None:
    assert score_function(relative).source == (
        "def relative(score, b, h, i, j, t0):\n    v0 = mul(h, 128)\n    v1 = sub(i, j)\n    v2 = add(v0, v1)\n"
        "    v3 = add(v2, 64)\n    v4 = load(t0, v3)\n    v5 = add(score, v4)\n    return v5"
    )
    assert score_function(relative).source is score_function(relative).source or MIDDLE.value == 64


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_text_is_the_program(name: str) -> None:
    source = score_function(FUNCTIONS[name].jit).source
    (program,) = programs(source)
    assert isinstance(program, Program) and program.text() == source and program.name == name
    assert score_programs.captured_tensors(source) == len(FUNCTIONS[name].tensors(2, 2, 30))
    assert pickle.loads(pickle.dumps(source)) == source


def test_of_sample_shifts_the_sample() -> None:
    shifted = score_programs.single_sample(SCORE_EXAMPLE, 3)
    assert shifted.splitlines()[1] == "    b = add(b, 3)"
    assert score_programs.single_sample(SCORE_EXAMPLE, 0) == SCORE_EXAMPLE


# ---- What is refused -------------------------------------------------------------------------------------------------


ARGUMENTS = "score, b, h, i, j"
# Parameters of a function, its body, and what is said of it.
REFUSED = [
    (ARGUMENTS, "return tl.erf(score)", r"the call of tl.erf is not supported. A function may use \+ -"),
    (
        ARGUMENTS,
        "if i > j:\n        score = score * 2\n    return score",
        "an if statement: use tl.where is not supported",
    ),
    (ARGUMENTS, "return score if i > j else 0.0", "an if expression: use tl.where"),
    (ARGUMENTS, "for _ in range(3):\n        score = score * 2\n    return score", "a loop is not supported"),
    (ARGUMENTS, "return tl.where(i > j and j > 3, score, 0.0)", "and, or: use & and |"),
    (ARGUMENTS, "return score**2", r"\*\*: multiply"),
    (ARGUMENTS, "return score + outside", "outside is a tensor: give it as a parameter and in the call's tensors"),
    (
        f"{ARGUMENTS}, one",
        "return score + one",
        r"score \+ one is the pointer of a captured tensor: read it",
    ),
    (ARGUMENTS, "return tl.load(score)", "tl.load reads a captured tensor, score is no pointer"),
    (ARGUMENTS, "return score.to(tl.float16)", r"the cast 'score.to\(tl.float16\)' is not supported"),
    (ARGUMENTS, "return tl.where(1 < i < j, score, 0.0)", "the comparison '1 < i < j' is not supported"),
    (ARGUMENTS, "score += 1", "it returns nothing"),
    (ARGUMENTS, "return score // 2", r"score // 2: the operator takes integers or booleans"),
    (
        f"{ARGUMENTS}, one, two, three, four, five",
        "return score + tl.load(five)",
        "it captures 5 tensors, at most 4 are",
    ),
    ("score, b", "return b", "it must take score, b, h, i, j, then captured tensors, got score, b"),
]


@pytest.mark.parametrize(("parameters", "body", "words"), REFUSED, ids=[body for _, body, _ in REFUSED])
def test_other_operations_are_refused_by_name(parameters: str, body: str, words: str, tmp_path: Path) -> None:
    """Triton reads a function's source from its file, so each function has a file."""
    head = "import torch, triton\nimport triton.language as tl\noutside = torch.randn(3)\n\n\n"
    file = tmp_path / "functions.py"
    file.write_text(f"{head}@triton.jit\ndef refused({parameters}):\n    {body}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=words) as refusal:
        attend(score_fn=load_script(file).refused)
    named = re.search(r"score function refused, line (\d+):", str(refusal.value))
    assert named and 6 <= int(named[1]) <= 9


@triton.jit
def chooses(score, b, h, i, j):
    return score if i > j else 0.0


@triton.jit
def floors(score, b, h, i, j, table):
    return score % 2 + tl.load(table) // 3


def test_an_operation_without_a_derivative_is_refused_where_one_is_needed() -> None:
    table = torch.ones(1)
    attend(table, score_fn=floors)  # without gradients it runs
    trained = q.clone().requires_grad_()
    with pytest.raises(ValueError, match=r"score function floors: x % y has no derivative; score_grad_fn may give"):
        diyfa.flash_attention(trained, q, q, score_fn=floors, score_tensors=(table,), backend="cpu")
    learned = table.clone().requires_grad_()
    with pytest.raises(ValueError, match=r"floors: x % y has no derivative"):
        attend(learned, score_fn=floors)
    source = score_function(floors, floors).source
    assert why_not_differentiable(source, (False,) * 4) is None
    assert why_not_differentiable(source, (True,) * 4) == "score function floors: x // y has no derivative"


def test_wrong_arguments_are_refused() -> None:
    wrong: tuple[tuple[Any, type[Exception], str], ...] = (
        (
            {"score_fn": lambda s, b, h, i, j: s}, TypeError,
            r"score_fn must be a @triton.jit function, got function; decor",
        ),
        ({"score_fn": bias}, TypeError, "score_fn must be a @triton.jit function, got Tensor"),
        ({"score_fn": relative}, ValueError, "relative takes 1 captured tensors, got 0 in score_tensors"),
        ({"score_fn": relative, "score_tensors": bias}, TypeError, "must be a tuple of tensors, got Tensor"),
        ({"score_fn": relative, "score_tensors": (1.5,)}, TypeError, r"score_tensors\[0\] must be a torch.Tensor"),
        ({"score_fn": relative, "score_tensors": [None]}, TypeError, r"score_tensors\[0\] must be a torch"),
        ({"score_fn": relative, "score_tensors": (bias.t(),)}, ValueError, r"score_tensors\[0\] must be contiguous"),
        ({"score_fn": relative, "score_tensors": (bias.to("meta"),)}, ValueError, "same device"),
        ({"score_fn": relative, "score_tensors": (bias.cfloat(),)}, TypeError, r"score_tensors\[0\] must be a"),
        ({"score_tensors": (bias,)}, ValueError, "score_tensors belongs to score_fn, which is not given"),
        ({"score_grad_fn": relative}, ValueError, "score_grad_fn belongs to score_fn, which is not given"),
        (
            {"score_fn": relative, "score_tensors": (bias,), "score_grad_fn": chooses}, ValueError, "an if expression",
        ),
    )  # fmt: skip
    for options, error, text in wrong:
        for function in (diyfa.flash_attention, diyfa.explain):
            with pytest.raises(error, match=text):
                function(q, q, q, backend="cpu", **options)
    for function in (diyfa.flash_attention_varlen, diyfa.explain):
        layout = {} if function is diyfa.flash_attention_varlen else {"layout": "thd"}
        with pytest.raises(ValueError, match=r"a call over a cache .* takes no score_fn"):
            function(
                q[0], q[0], q[0], cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=1, max_seqlen_k=1,
                seqused_k=bias, score_fn=relative, score_tensors=(bias,), **layout,
            )  # fmt: skip
    with diyfa.batch_invariant(), pytest.raises(ValueError, match="takes no score_fn"):
        attend(bias, score_fn=relative)


def test_kernels_refuse_it_by_name() -> None:
    problem = diyfa.explain(q, q, q, backend="cpu", score_fn=relative, score_tensors=(bias,)).problem
    assert "score_fn" in problem.features and problem.score_fn == score_function(relative).source
    reasons = {
        (kernel.op, kernel.name): kernel.unsupported(problem.replace(dtype="float16", arch="sm_90", needs_grad=True))
        for kernel in load_backend("cuda").kernels
        if kernel.op.startswith("attention") and kernel.name != "split_kv"
    }  # fmt: skip
    forward = reasons.pop(("attention_fwd", "sm90"))  # has score functions
    assert "head_dim" in str(forward)
    runs = {name for name, reason in reasons.items() if reason is None}
    assert runs == {("attention_fwd", "v2"), ("attention_bwd", "split")}
    for name, reason in reasons.items():
        assert name in runs or "score_fn" in str(reason), (name, reason)
    eight = problem.replace(dtype="float8_e4m3fn", arch="sm_90")
    (v2,) = [x for x in load_backend("cuda").kernels if (x.op, x.name) == ("attention_fwd", "v2")]
    assert v2.unsupported(eight) == "v2 does not implement score_fn for float8_e4m3fn"


# ---- Calls -----------------------------------------------------------------------------------------------------------


class Settings:
    factor = tl.constexpr(2.0)


def test_a_constant_that_changes_between_calls_is_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    factor = tl.constexpr(2.0)

    @triton.jit
    def times(score, b, h, i, j):
        return score * factor * Settings.factor * (MIDDLE / 64)

    for expected in (1.0, 2.0, 4.0, 8.0, 1.0):
        want = diyfa.flash_attention(q, q, q, sm_scale=expected, backend="cpu")
        assert torch.equal(attend(score_fn=times), want)
        if expected == 1.0:
            factor = tl.constexpr(4.0)
        elif expected == 2.0:
            monkeypatch.setattr(Settings, "factor", tl.constexpr(4.0))
        elif expected == 4.0:
            monkeypatch.setitem(globals(), "MIDDLE", tl.constexpr(128))
        else:
            monkeypatch.undo()
            factor = tl.constexpr(2.0)


def test_defaults_are_those_that_the_function_was_defined_with() -> None:
    """Names in them belong to the scope around the function, where another `MIDDLE` may be."""

    def scaled(MIDDLE: float, half: Any) -> Any:
        @triton.jit
        def times(score, b, h, i, j, factor: tl.constexpr = MIDDLE, other=half):
            return score * factor * other

        return times

    for number in (2.0, 4.0):
        want = diyfa.flash_attention(q, q, q, sm_scale=number / 8, backend="cpu")
        assert torch.equal(attend(score_fn=scaled(number, tl.constexpr(0.5))), want)
    with pytest.raises(ValueError, match="the default of other must be a number, got Tensor"):
        attend(score_fn=scaled(2.0, bias))


def test_comparisons_are_added_as_integers() -> None:
    """The sum of two booleans is one for Triton's compiler, though not for its interpreter."""

    @triton.jit
    def counts(score, b, h, i, j, flags):
        flag = tl.load(flags + j)
        return score * ((i > j) + (j > 3)) - -(i > j) + flag * flag + (1 + (i > j))

    assert re.findall(r"to_number\((\w+)\)", score_function(counts).source) == ["v1", "v2", "v7", "v0", "v0"]


def test_a_compiled_program_takes_a_score_function() -> None:
    function = score_function(relative)

    def loss(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        out = diyfa.flash_attention(x, x, x, score_fn=function, score_tensors=(table,), backend="cpu")
        return out.square().sum()

    x, table = q.clone().requires_grad_(), bias.clone().requires_grad_()
    want = torch.autograd.grad(loss(x, table), (x, table))
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x, table), (x, table))
    for a, b in zip(want, found, strict=True):
        torch.testing.assert_close(a, b)


def test_the_operator_is_a_good_one() -> None:
    options = AttentionOptions(
        "bhsd", 0.25, backend="cpu", score_fn=score_function(relative).source, score_tensor0=bias.requires_grad_(),
        needs_grad=True, score_grad=True,
    )  # fmt: skip
    x = q.clone().requires_grad_()
    torch.library.opcheck(torch.ops.diyfa.attention_fwd.default, (x, x, x, "", *pack(Lengths(), options)))


@triton.jit
def document(b, h, i, j, ids):
    return tl.load(ids + i) == tl.load(ids + j)


def test_wrong_arguments_of_masks_are_refused() -> None:
    ids = torch.arange(20)
    wrong: tuple[tuple[Any, type[Exception], str], ...] = (
        ((), ValueError, "document takes 1 captured tensors, got 0 in mask_tensors"),
        (ids, TypeError, "mask_tensors must be a tuple of tensors, got Tensor"),
        (None, TypeError, "mask_tensors must be a tuple of tensors, got NoneType"),
        ((3,), TypeError, r"mask_tensors\[0\] must be a dense tensor .*, got int"),
        ((ids.numpy(),), TypeError, r"mask_tensors\[0\] must be a dense tensor .*, got ndarray"),
        ((ids.cfloat(),), TypeError, r"mask_tensors\[0\] must be .* of int8, int32 or int64.*, got torch.complex64"),
        ((ids.float().to_sparse(),), TypeError, r"mask_tensors\[0\] must be a dense tensor"),
        ((ids.to("meta"),), ValueError, r"mask_tensors\[0\] must be on cpu"),
    )
    for tensors, error, text in wrong:
        with pytest.raises(error, match=text):
            diyfa.block_mask(document, 1, 1, 20, 20, mask_tensors=tensors)
    for combine in (masks.all_of, masks.any_of):
        with pytest.raises(TypeError, match=r"combine .* inside of one jit function"):
            combine(masks.causal, document)


# ---- Kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def reads_lines(score, b, h, i, j, keys, queries, heads):
    return score * tl.load(keys + b * 7 + j + tl.load(heads + h)) + tl.load(queries + (i - 2))


@triton.jit
def reads_every_second(score, b, h, i, j, keys):
    return score + tl.load(keys + 2 * j)


@triton.jit
def reads_pairs(score, b, h, i, j, table):
    return score + tl.load(table + i + j - j)


@triton.jit
def reads_pairs_twice(score, b, h, i, j, table):
    return score * tl.load(table + i * 64 + j) + tl.load(table + i - j)


@triton.jit
def reads_by_what_it_read(score, b, h, i, j, table, ids):
    return score + tl.load(table + tl.load(ids + j))


def test_functions_that_gather_are_known() -> None:
    for function, expected in (
        (relative, 1), (reads_lines, 0), (reads_every_second, 1), (reads_pairs, 1), (reads_pairs_twice, 2),
        (reads_by_what_it_read, 1),
    ):  # fmt: skip
        assert gathered_loads(score_function(function).source) == expected, function
    lines = score_function(reads_lines, reads_lines).source
    assert not gathered_loads(lines) and gathered_loads(lines, has_mask=True), "a mask may leave any rows"
    derivative = "\n\n".join(score_function(x).source for x in (floors, relative))
    assert gathered_loads(derivative), "of the user's derivative"


def test_integers_become_numbers_before_functions_of_numbers() -> None:
    """Triton's square root and exponential take no integer, though its interpreter's do."""

    @triton.jit
    def of_integers(score, b, h, i, j):
        return score + tl.sqrt(i - j) / j

    source = value_source(score_function(of_integers).source, portable.SPELLING)
    assert source is not None
    assert "tl.sqrt(tl.cast(v0, tl.float32))" in source.text
    assert "tl.cast(v1, tl.float32) / tl.cast(j, tl.float32)" in source.text


def test_the_name_in_triton_s_key_depends_on_all_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Triton's cache, which has only this name, would return the kernel of another function or version."""

    def name(number: int, source: str = SCORE_EXAMPLE) -> str:
        spelling = replace(portable.SPELLING, gradient=f"unused{number}")  # nothing that an earlier call has kept
        return str(value_source(source, spelling))

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    first = name(0)
    assert name(1) == first != name(2, SCORE_EXAMPLE.replace("0.9", "0.8"))
    monkeypatch.setattr(portable, "load_captured", SimpleNamespace(cache_key="of another version"))
    assert name(3) != first


def test_kernels_of_two_functions_have_two_keys(tmp_path: Any) -> None:
    """The key of a stored binary contains the source of the function, in every process."""
    code = """
import torch
from diyfa.backends.cuda.attention import fwd
from diyfa.backends.cuda.attention.configs import default_config
from diyfa.backends.cuda.runtime.binaries import binary_key
from diyfa.backends.cuda.runtime.signature import launch_signature
from diyfa.features import SCORE_EXAMPLE
from diyfa.lab.cuda import specs
from diyfa.lab.examples import example_attention

def key(source):
    problem = specs._problem("sm_90", "float16", 64).replace(score_fn=source)
    launch = fwd.make_launch(problem, *example_attention(problem), default_config("fwd", problem))
    return binary_key("sm_90", launch, launch_signature(launch))

print(key(SCORE_EXAMPLE), key(SCORE_EXAMPLE.replace("0.9", "0.8")), key(""))
"""
    printed = [run(code, ROOT, TRITON_INTERPRET="0").split() for run in (run_after_torch, run_python)]
    assert printed[0] == printed[1] and len(set(printed[0])) == 3
