"""Aggregates as `gluon/compat.py` makes them, and which Triton it takes."""

from __future__ import annotations

import pytest
import triton
from hopper_gluon import need_hopper_gluon

need_hopper_gluon()

from triton.language.core import constexpr, tensor  # noqa: E402

from diyfa.backends.cuda.gluon import compat  # noqa: E402


def pair(**fields: type) -> type:
    return compat.aggregate(type("Pair", (), {"__annotations__": fields}))


@pytest.mark.parametrize(("version", "known"), [("3.5.1", False), ("3.6.0", True), ("3.9.0", True), ("3.10.0", False)])
def test_versions(version: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert compat.has_gluon() == known


def test_fields_by_position_and_by_name() -> None:
    Pair = pair(first=constexpr, second=constexpr)
    for made in (Pair(1, "two"), Pair(1, second="two"), Pair(second="two", first=1)):
        assert (made.first.value, made.second.value) == (1, "two")


@pytest.mark.parametrize(
    ("values", "named"), [((1,), {}), ((1, 2, 3), {}), ((1, 2), {"second": 2}), ((1,), {"third": 3})]
)
def test_each_field_once(values: tuple, named: dict) -> None:
    with pytest.raises(TypeError, match="Pair has the fields"):
        pair(first=constexpr, second=constexpr)(*values, **named)


def test_a_number_is_no_tensor() -> None:
    with pytest.raises(TypeError, match="for attribute 'first'"):
        pair(first=tensor)(1)


def test_kernels_are_kept_under_the_fields_that_they_use() -> None:
    """Else Triton would take a kernel from its cache that was compiled with other ones."""
    orders = [{"a": tensor, "b": tensor}, {"b": tensor, "a": tensor}, {"a": tensor}, {"a": constexpr, "b": tensor}]
    keys = {pair(**fields).hash_attrs[0].cache_key for fields in orders}
    assert len(keys) == len(orders)
    assert pair(**orders[0]).hash_attrs[0].cache_key in keys
