"""The table of features is complete, and nothing is lost between the objects of a call and the operators' arguments."""

from __future__ import annotations

from dataclasses import fields

import torch

from diyfa import options
from diyfa.features import FEATURES, SCORE_EXAMPLE
from diyfa.options import AttentionOptions, Lengths
from diyfa.problem import AttentionProblem, AttentionTensors

# Fields of a problem that the device, q, k and v, and buffers of gradients decide.
BY_TENSORS = {
    "device_type", "arch", "dtype", "heads_q", "heads_kv", "head_dim", "head_dim_v", "aligned", "total_q", "total_k",
    "few_steps", "aligned_gradients", "value_dtype",
}  # fmt: skip


OF_PROBLEM = {field.name for field in fields(AttentionProblem) if field.init}


def a_call() -> tuple[Lengths, AttentionOptions]:
    """Every field has a value of its own."""
    vector = torch.arange(12, dtype=torch.int32)
    lengths = Lengths(vector[:3], vector[3:6], vector[:2], 7, 5)
    strided = {x.name: torch.rand(8)[::2] for x in options.TENSORS if x.name not in options.LENGTHS}
    strided["mask_bits"] = torch.rand(1, 2, 8)[..., ::2]
    checked = AttentionOptions(
        layout="bshd", sm_scale=0.25, window_left=3, window_right=1, softcap=2.0, dropout_p=0.5, **strided,
        deterministic=True, needs_grad=True, bias_grad=True, score_grad=True, backend="cpu", variant="v1",
        packing="kv", batch_invariant=True, out_dtype="float32", score_fn=SCORE_EXAMPLE,
    )  # fmt: skip
    defaults = AttentionOptions._field_defaults.items()
    for name, default in defaults:
        value = getattr(checked, name)
        assert isinstance(value, torch.Tensor) if default is None else value != default, name
    return lengths, checked


def test_every_field_has_a_row() -> None:
    assert {*Lengths._fields, *AttentionOptions._fields} == {feature.name for feature in FEATURES} | {"packing"}
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)


def test_every_field_of_a_problem_is_decided() -> None:
    assert set(options.problem_fields(*a_call())) == OF_PROBLEM - BY_TENSORS


def test_every_optional_tensor_reaches_the_backends() -> None:
    named = {feature.name for feature in options.TENSORS}
    assert named == set(AttentionTensors._fields) - {"q", "k", "v", "sm_scale", "dropout_p"}
    lengths, checked = a_call()
    q, k, v = torch.rand(3, 2)
    tensors = options.bind(q, k, v, lengths, checked)
    assert (tensors.q, tensors.k, tensors.v, tensors.sm_scale, tensors.dropout_p) == (q, k, v, 0.25, 0.5)
    for feature in options.TENSORS:
        given = getattr(lengths if feature.name in options.LENGTHS else checked, feature.name)
        bound = getattr(tensors, feature.name)
        assert torch.equal(bound, given)
        if feature.prepared is None:
            assert bound is given
        else:  # strided ones are copied
            assert bound.is_contiguous() and (bound is given) == given.is_contiguous()


def test_unpacking_is_the_opposite_of_packing() -> None:
    lengths, checked = a_call()
    arguments = options.pack(lengths, checked)
    tensors = arguments[: len(options.TENSORS)]
    assert tensors == options.optional_tensors(lengths, checked) == tuple(options.tensors_among(arguments))
    again = options.unpack(arguments, "kv")
    for before, after in zip((lengths, checked), again, strict=True):
        for name, value, other in zip(before._fields, before, after, strict=True):
            assert other is value if isinstance(value, torch.Tensor) else other == value, name
