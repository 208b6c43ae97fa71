"""A feature is forgotten nowhere: every row of `diyfa.features` is looked for in each place that must know of it.

The places are checked by what they do with the example of a row, not by lists of names, so that a new row is asked for
everywhere at once. What these tests cannot see, whether a kernel computes it rightly, the matrix of cases says, which
must have cases of it.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES
from described_cases import case_problem
from hypothesis import HealthCheck, Phase, given, settings
from strategies import cases as random_cases

import diyfa
from diyfa import plan as planning
from diyfa import registry, testing, yardstick
from diyfa.features import COMPOSABLE, FEATURES, GRADIENTS, SHAPE_FEATURES, Broadcast, Feature, Shape
from diyfa.features import REFUSABLE as ALL_REFUSABLE
from diyfa.lab.examples import example_attention, example_gradients, example_tensors
from diyfa.lab.first_run.cases import SMOKE, features_in
from diyfa.lab.validate import CASES as VALIDATED
from diyfa.options import AttentionOptions
from diyfa.problem import (
    KVCACHE_FEATURES,
    AttentionGradients,
    AttentionProblem,
    AttentionTensors,
    as_kvcache,
)
from diyfa.testing import AttentionCase, Results, attention_function, make_inputs, run_case

ROOT = Path(__file__).parents[2]
# Optional tensors that come with another row's argument.
EIGHT_BITS = ("q_descale", "k_descale", "v_descale", "k_mean", "v_mean")
COMPANIONS = {"cu_seqlens_k": "cu_seqlens_q", "rng_state": "dropout_p", **dict.fromkeys(EIGHT_BITS, "eight_bits")}
# Optional tensors of an object that is the argument (`tests/frontend/test_masks.py`), or of a tuple
# (`tests/frontend/test_score_function_calls.py`).
INSIDE_MASK = {"mask_blocks", "mask_bits"}
CAPTURED = {f"score_tensor{n}" for n in range(4)}
WITHIN = {*INSIDE_MASK, *CAPTURED}
BESIDE = {"score_fn": ("score_tensors", "score_grad_fn")}  # arguments that come with another
# What the public functions call it, where that is another name.
ARGUMENTS = {"window_left": "window", "window_right": "causal", "mask_bits": "mask"}
# Options that are no features: they change no result.
WITHOUT_EFFECT = {
    "max_seqlen_q", "max_seqlen_k", "sm_scale", "layout", "deterministic", "needs_grad", "bias_grad", "score_grad",
    "backend", "variant", "out_dtype",
}  # fmt: skip
NOT_PACKED = {"seq_lens", "attn_bias", *INSIDE_MASK}  # what packed sequences do not take
PACKED = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
MODES = {"batch_invariant", "dropout_origins"}  # of a block of code, of a tensor's length: in no table
# A dtype of q: it has no gradient, so that no case of the matrix has it. tests/numerics/test_eight_bits.py has its own.
BY_DTYPE = {"eight_bits"}
IN_TABLES = [feature for feature in ALL_REFUSABLE if feature.name not in MODES]
REFUSABLE = [feature for feature in IN_TABLES if feature.name not in BY_DTYPE]
OPTION_FEATURES = [feature for feature in REFUSABLE if feature not in SHAPE_FEATURES]
TENSORS = [feature for feature in FEATURES if feature.schema == "Tensor?"]


def by_name(features: Any) -> Any:
    return pytest.mark.parametrize("feature", features, ids=lambda feature: feature.name)


def argument_of(feature: Feature) -> str:
    return ARGUMENTS.get(feature.name, feature.name)


def plain(**changes: Any) -> AttentionProblem:
    problem = AttentionProblem("cpu", "cpu", "float32", "bhsd", 2, 4, 4, 64, 64, 64, 64)
    return problem.replace(**changes)


@lru_cache(maxsize=1)
def described_cases() -> dict[str, tuple[AttentionCase, AttentionProblem]]:
    return {name: (case, case_problem(case)) for name, case in CASES.items() if not case.large}


def example_case(feature: Feature) -> AttentionCase:
    """A case that has the feature, and as little else as possible."""
    found = [
        (case, len(problem.features))
        for case, problem in described_cases().values()
        if feature.refusal_name in problem.features and min(problem.seqlen_q, problem.seqlen_k) > 1
    ]
    assert found, f"no case of tests/support/cases.py has {feature.refusal_name}"
    return min(found, key=lambda each: each[1])[0]


# ---- The rows ------------------------------------------------------------------------------------------------------


def test_every_row_is_complete() -> None:
    for feature in FEATURES:
        known = bool(feature.refusal_name) or feature.name in {*WITHOUT_EFFECT, *COMPANIONS, *WITHIN}
        assert known, (
            f"{feature.name} changes the result: a backend that does not implement it must refuse it (refusal_name)"
        )
        if feature.schema == "Tensor?":
            assert feature.shape is not None and feature.dtypes and feature.dtypes_in_words, feature.name
            if type(feature.shape) is Shape and feature.name not in PACKED:  # whose strides are checked
                assert feature.prepared is not None, f"{feature.name}: kernels read it by plain index"
    names = [feature.refusal_name for feature in REFUSABLE]
    assert len(set(names)) == len(names)


def test_every_gradient_belongs_to_a_row() -> None:
    declared = {feature.gradient for feature in GRADIENTS}
    assert declared == set(AttentionGradients._fields) - {"dq", "dk", "dv", "delta"}
    assert declared == set(Results._fields) - {"out", "lse", "dq", "dk", "dv"}


@by_name(GRADIENTS)
def test_a_gradient_has_a_buffer_and_is_compared(feature: Feature) -> None:
    assert feature.gradient in AttentionGradients._fields and feature.gradient in Results._fields
    q = torch.empty(2, 4, 64, 64, device="meta")
    tensors = AttentionTensors(q, q, q, 1.0, **example_tensors(plain(**feature.example)))
    assert getattr(example_gradients(tensors), feature.gradient).shape == getattr(tensors, feature.name).shape
    assert not feature.gradient_if or feature.gradient_if in AttentionOptions._fields


# ---- What a user sees ----------------------------------------------------------------------------------------------


@by_name(IN_TABLES)
def test_the_feature_is_in_the_tables_of_info_and_both_readmes(feature: Feature) -> None:
    pytest.importorskip("rich")
    from diyfa.cli.info import FEATURES as ROWS

    assert ROWS[feature.label] == feature.example
    for readme in ("README.md", "README.zh-CN.md"):
        assert f"\n| {feature.label} |" in (ROOT / readme).read_text(encoding="utf-8"), readme


@by_name(OPTION_FEATURES)
def test_the_feature_is_an_argument_of_every_function(feature: Feature) -> None:
    name = argument_of(feature)
    owns = [x.name for x in TENSORS if COMPANIONS.get(x.name) == feature.name]
    owns += BESIDE.get(feature.name, ())
    dense, packed = [], [diyfa.flash_attention_varlen]
    if feature.name not in PACKED:
        dense = [diyfa.flash_attention, diyfa.flash_attention_v2]
    if feature.name in NOT_PACKED:
        packed = []
    for function in (*dense, *packed, diyfa.explain, diyfa.reference_attention):
        assert {name, *owns} <= set(inspect.signature(function).parameters), function.__name__
    for described in (diyfa.flash_attention, diyfa.flash_attention_varlen):
        if described in (*dense[:1], *(packed if not dense else ())):
            text = inspect.getdoc(described) or ""
            for word in (name, *owns):
                assert re.search(rf"^ +(\w+, )*{word}(, \w+)*:", text, re.M), f"{described.__name__}: {word}"


def test_descales_and_means_are_arguments_of_every_function() -> None:
    for function in (
        diyfa.flash_attention, diyfa.flash_attention_v2, diyfa.flash_attention_varlen, diyfa.explain,
        diyfa.reference_attention,
    ):  # fmt: skip
        assert {*EIGHT_BITS, "out_dtype"} <= set(inspect.signature(function).parameters), function.__name__
    text, guide = inspect.getdoc(diyfa.flash_attention) or "", (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    for name in (*EIGHT_BITS, "out_dtype"):
        assert re.search(rf"^ +(\w+, )*{name}(, \w+)*:", text, re.M) and f"`{name}`" in guide, name


@by_name(OPTION_FEATURES)
def test_the_guide_describes_it(feature: Feature) -> None:
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    assert f"| `{argument_of(feature)}` |" in guide or (feature.name in PACKED and "flash_attention_varlen" in guide)


# ---- What it does --------------------------------------------------------------------------------------------------


@by_name(OPTION_FEATURES)
def test_explain_names_the_feature(feature: Feature) -> None:
    inputs = make_inputs(example_case(feature))
    layout = example_case(feature).layout
    layout = "bhsd" if layout == "3d" else layout
    problem = diyfa.explain(inputs.q, inputs.k, inputs.v, layout=layout, backend="cpu", **inputs.options).problem
    assert feature.refusal_name in problem.features


def switched_off(feature: Feature, case: AttentionCase) -> dict[str, Any]:
    """The arguments of the case without the feature."""
    off: dict[str, Any] = dict(make_inputs(case).options)
    names = [argument_of(feature), *(name for name, owner in COMPANIONS.items() if owner == feature.name)]
    names += BESIDE.get(feature.name, ())
    return {name: value for name, value in off.items() if name not in names}


@by_name([feature for feature in OPTION_FEATURES if feature.name not in PACKED])
@pytest.mark.parametrize("function", ["reference", "yardstick", "cpu v2", "cpu v1"])
def test_it_changes_the_result(feature: Feature, function: str) -> None:
    """Of the reference, of what errors are measured by, and of the CPU backend."""
    case = example_case(feature)
    if function == "reference":
        attend: Any = diyfa.reference_attention
    elif function == "yardstick":
        attend = yardstick.plain_flash_attention
    else:
        attend = attention_function(case, backend="cpu", variant=function.removeprefix("cpu "))
    inputs = make_inputs(case)
    layout = (
        {"layout": "bhsd" if case.layout == "3d" else case.layout} if function in ("reference", "yardstick") else {}
    )
    q, k, v = inputs.q, inputs.k, inputs.v
    without = switched_off(feature, case)
    with_it = attend(q, k, v, return_lse=True, **layout, **inputs.options)
    plain_ones = attend(q, k, v, return_lse=True, **layout, **without)
    assert any(not torch.equal(a, b) for a, b in zip(with_it, plain_ones, strict=True))


@by_name([feature for feature in OPTION_FEATURES if feature.name not in PACKED | NOT_PACKED])
def test_over_pages_it_changes_the_result_or_is_refused(feature: Feature) -> None:
    """Of packed queries over pages, where other functions take the arguments: none is left out in silence."""
    changes = {"score_fn": True} if feature.name == "score_fn" else feature.case or {"causal": True}
    case = AttentionCase("pages", layout="thd", lens_q=(2, 3), lens_k=(14, 12), **changes)
    inputs = make_inputs(case)
    names = {argument_of(feature), *(name for name, owner in COMPANIONS.items() if owner == feature.name)}
    names |= set(BESIDE.get(feature.name, ()))
    given = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in inputs.options.items()}
    given = {name: x for name, x in given.items() if name in names}
    pages = torch.randn(8, 4, case.heads, case.head_dim, dtype=torch.float16)
    tensors = (inputs.q.detach(), pages, pages)
    lengths: dict[str, Any] = {
        "cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32), "cu_seqlens_k": None, "max_seqlen_q": 3,
        "max_seqlen_k": 14, "block_table": torch.arange(8, dtype=torch.int32).view(2, 4),
        "seqused_k": torch.tensor([14, 12], dtype=torch.int32), "return_lse": True, "backend": "cpu",
    }  # fmt: skip
    plain_ones = diyfa.flash_attention_varlen(*tensors, **lengths)
    try:
        with_it = diyfa.flash_attention_varlen(*tensors, **lengths, **given)
    except ValueError as refusal:
        assert feature.refusal_name in str(refusal)
        with pytest.raises(ValueError, match=feature.refusal_name):
            diyfa.explain(*tensors, layout="thd", **lengths, **given)
        return
    assert any(not torch.equal(a, b) for a, b in zip(with_it, plain_ones, strict=True))
    explained = [diyfa.explain(*tensors, layout="thd", **lengths, **some).problem for some in (given, {})]
    assert explained[0] != explained[1]


@by_name(REFUSABLE)
def test_the_yardstick_is_correct(feature: Feature) -> None:
    """A yardstick that is wrong would allow everything: in float64 it gives what the reference does."""
    case = example_case(feature)
    exact = testing.expected_results(case)
    for name, found, want in zip(
        Results._fields, testing._run_plain(yardstick.plain_flash_attention, case, torch.float64, "cpu"), exact,
        strict=True,
    ):  # fmt: skip
        assert (found is None) == (want is None), name
        if found is not None and want is not None:
            torch.testing.assert_close(found.double(), want.double(), rtol=1e-9, atol=1e-9, msg=name)


def test_the_cpu_backend_has_every_feature() -> None:
    for feature in REFUSABLE:
        for kernel in registry.load_backend("cpu").kernels:
            if kernel.op in ("attention_fwd", "attention_bwd") and kernel.name != "split_kv":
                assert kernel.unsupported(plain(**feature.example)) is None


@by_name(ALL_REFUSABLE)
def test_a_cache_has_it_or_kernels_over_caches_refuse_it(feature: Feature) -> None:
    """A forward pass as a call with a cache loses nothing in silence, neither a fact nor a tensor."""
    example = feature.example or {feature.problem_field: True}
    problem = plain(**{"dtype": "float16", "batch_invariant": True, **example})
    if feature.refusal_name not in KVCACHE_FEATURES:
        for name in registry.BUILTIN_BACKENDS if find_spec("triton") is not None else ("cpu",):
            kernels = [x for x in registry.load_backend(name).kernels if x.op == "attention_fwd"]
            (split_kv,) = [kernel for kernel in kernels if kernel.name == "split_kv"]
            reason = split_kv.unsupported(problem) or ""
            assert feature.refusal_name in reason or f"no {problem.dtype} matrix product" in reason, name
        return
    q = torch.empty(2, 4, 64, 64) if problem.layout != "thd" else torch.empty(64, 4, 64)
    tensors = AttentionTensors(q, q, q, 1.0, **example_tensors(problem, "cpu"))
    assert {id(x) for x in tensors.present()[3:]} <= {id(x) for x in as_kvcache(problem, tensors)[1].present()}


def test_kernels_name_existing_features() -> None:
    from diyfa.backends import cuda, npu
    from diyfa.backends.cuda.hopper import bwd_configs as hopper_bwd
    from diyfa.backends.cuda.hopper import configs as hopper
    from diyfa.backends.npu.tables import configs_v1

    for who in (cuda, npu, hopper, hopper_bwd, configs_v1):
        assert {feature.refusal_name for feature in ALL_REFUSABLE} >= who.FEATURES, who.__name__
    assert cuda.V1_FEATURES <= cuda.FEATURES


# ---- Equal calls ---------------------------------------------------------------------------------------------------


def another_of(x: Any) -> Any:
    """Another value of the same kind: a tensor of other values."""
    if not isinstance(x, torch.Tensor):
        return tuple(map(another_of, x)) if type(x) is tuple and x and isinstance(x[0], torch.Tensor) else x
    if x.is_floating_point():
        return (x.detach() * -0.5 - 0.25).requires_grad_(x.requires_grad)
    return torch.flip(x, (0,)) if x.dtype == torch.int64 else torch.clamp(x - 1, min=1)


@by_name([feature for feature in OPTION_FEATURES if feature.name not in PACKED])
def test_calls_that_differ_in_the_feature_share_no_plan(feature: Feature, monkeypatch: Any) -> None:
    """And a repeated call reads its own tensors, for results and gradients."""
    case = example_case(feature)
    inputs, without = make_inputs(case), switched_off(feature, case)
    attend = attention_function(case, backend="cpu")
    monkeypatch.setattr(planning, "plans", {})
    plans = [0]
    for _ in range(3):
        for arguments in (inputs.options, without):
            attend(*inputs.leaves, **arguments)
            plans.append(len(planning.plans))
    assert plans[0] < plans[1] < plans[2] and set(plans[3:]) == {plans[2]}
    with_it, plain_ones = (run_case(attend, inputs._replace(options=given)) for given in (inputs.options, without))
    assert not all(torch.equal(a, b) for a, b in zip(with_it[:2], plain_ones[:2], strict=True))
    others = {name: another_of(x) for name, x in inputs.options.items()}
    repeated_call = run_case(attend, inputs._replace(options=others))
    monkeypatch.setattr(planning, "plans", {})
    fresh = run_case(attend, inputs._replace(options=others))
    for name, a, b in zip(Results._fields, repeated_call, fresh, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), name


@by_name([x for x in TENSORS if x.name in AttentionOptions._fields and x.name not in {*EIGHT_BITS, *WITHIN}])
def test_a_wrong_tensor_is_refused(feature: Feature) -> None:
    q = torch.zeros(2, 4, 8, 16)
    owner = next(x for x in FEATURES if x.name == COMPANIONS.get(feature.name, feature.name))
    right = example_tensors(plain(seqlen_q=8, seqlen_k=8, **owner.example), "cpu")[feature.name].zero_()
    rest = {"dropout_p": 0.5} if owner.name == "dropout_p" else {}
    wrong: tuple[tuple[Any, type, str], ...] = (
        (right.bool(), TypeError, "{}"), (1.5, TypeError, r"{} must be a torch\.Tensor, got float"),
        (right.new_zeros(3, 5, 7), ValueError, "{}"), (right.to("meta"), ValueError, "same device: .* {} on meta"),
    )  # fmt: skip
    for value, error, words in wrong:
        with pytest.raises(error, match=words.format(feature.name)):
            diyfa.flash_attention(q, q, q, backend="cpu", **{feature.name: value}, **rest)


# ---- What is tested and compiled -----------------------------------------------------------------------------------


@by_name(REFUSABLE)
def test_the_matrix_has_cases_of_the_feature(feature: Feature) -> None:
    """Alone and on every kernel, with packed sequences, and with everything that goes with it."""
    found = [
        (case, problem) for case, problem in described_cases().values() if feature.refusal_name in problem.features
    ]
    by_itself = {feature.refusal_name, "causal", "gqa"}
    assert any(problem.features <= by_itself and case.all_variants for case, problem in found), "on every kernel"
    if feature.name not in NOT_PACKED:
        assert any(problem.varlen for _, problem in found), "with packed sequences"
    others = {"seq_lens", *(x.refusal_name for x in COMPOSABLE)}
    if feature.refusal_name in others:
        assert any(problem.features >= others for _, problem in found), "with everything"
    if feature in TENSORS and feature.name not in WITHIN:
        some = [make_inputs(case).options for case, _ in found]
        assert any(given[feature.name].requires_grad for given in some) == bool(feature.gradient)


def drawn_features(without: set[str], examples: int) -> set[str]:
    found: set[str] = set()

    @settings(
        max_examples=examples, derandomize=True, deadline=None, phases=[Phase.generate], database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(random_cases(12, without))
    def draw(case: AttentionCase) -> None:
        small = replace(case, head_dim=8, head_dim_v=8 if case.head_dim_v == case.head_dim else 16)
        if min(small.sizes[0], *small.sizes[3:5]) > 0:
            found.update(case_problem(small).features)

    draw()
    return found


def test_random_cases_have_each_feature_unless_excluded() -> None:
    assert drawn_features(set(), 80) == {feature.refusal_name for feature in REFUSABLE}
    left_out = {feature.refusal_name for feature in OPTION_FEATURES} - {"causal"}
    assert not drawn_features(left_out, 20) & left_out


@by_name(REFUSABLE)
def test_validate_and_the_first_run_on_ascend_try_it(feature: Feature) -> None:
    pytest.importorskip("rich")
    small = [
        replace(
            case, heads=2, heads_kv=case.heads_kv and 1, seqlen_q=40, seqlen_k=-1 if case.seqlen_k < 0 else 44,
            seq_lens=case.seq_lens and tuple(min(length, 40) for length in case.seq_lens),
        )
        for case in VALIDATED
    ]  # fmt: skip
    assert any(feature.refusal_name in case_problem(case).features for case in small), "diyfa validate"
    assert any(feature.refusal_name in case_problem(case).features for case in features_in("float16", SMOKE)), (
        "first run"
    )


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@by_name(REFUSABLE)
@pytest.mark.parametrize("kernel", ["fwd", "dkdv", "dq", "dbias"])
def test_kernels_are_compiled_for_the_feature(feature: Feature, kernel: str) -> None:
    """The matrix of cases compares their results; this test asks for the ahead-of-time cases."""
    from diyfa.backends import npu
    from diyfa.lab.npu import specs as ascend

    without_bias = kernel == "dbias" and feature.refusal_name in ("varlen", "seq_lens", "head_dim_v", "gqa", "causal")
    if find_spec("triton.tools.tensor_descriptor") is not None and not without_bias:  # not in triton-ascend's Triton
        from diyfa.backends.cuda import FEATURES as IMPLEMENTED
        from diyfa.lab.cuda import specs

        compiled = [*specs.problems("sm_90"), *specs.feature_problems("sm_90")]
        found = [x for x in compiled if feature.refusal_name in x.features and (x.bias_grad or kernel != "dbias")]
        assert found or feature.refusal_name not in IMPLEMENTED
    if feature.refusal_name in npu.FEATURES:
        asked = [*ascend.FEATURE_CASES, *ascend.HEAD_DIM_CASES]
        assert any(feature.refusal_name in ascend.example_case("Ascend910B3", x)[0].features for x in asked)
        most = ascend.example_case("Ascend910B3", ascend.mode_case(kernel, "crowded"))[0].features
        others = {"seq_lens", *(x.refusal_name for x in COMPOSABLE)}
        assert feature.refusal_name not in others or feature.refusal_name in most, "with everything that needs memory"


@by_name(REFUSABLE)
def test_the_forward_kernel_of_cuda_gets_its_tensors(feature: Feature) -> None:
    """At any address: a vector's alignment makes no kernel of its own."""
    pytest.importorskip("triton.tools.tensor_descriptor")
    from diyfa.backends.cuda import FEATURES as IMPLEMENTED
    from diyfa.backends.cuda.attention import fwd
    from diyfa.backends.cuda.attention.configs import default_config
    from diyfa.backends.cuda.attention.launch import UNALIGNED_POINTERS

    if feature.refusal_name not in IMPLEMENTED:
        pytest.skip("refused")
    problem = plain(dtype="float16", arch="sm_90", device_type="cuda", **feature.example)
    tensors, out, lse = example_attention(problem)
    tile = default_config("fwd", problem)
    assert tile is not None
    arguments = fwd.make_launch(problem, tensors, out, lse, tile).arguments
    for each in TENSORS:
        own = getattr(tensors, each.name)
        names = [name for name, x in arguments.items() if own is not None and x is own]
        assert names or COMPANIONS.get(each.name, each.name) != feature.name, each.name
        assert type(each.shape) is Broadcast or set(names) <= set(UNALIGNED_POINTERS), names
