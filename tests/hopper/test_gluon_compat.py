"""Aggregates as `gluon/compat.py` makes them, and which Triton it takes."""

from __future__ import annotations

from types import SimpleNamespace

import hopper_gluon  # noqa: F401
import pytest
from triton.backends.compiler import GPUTarget
from triton.language.core import constexpr, tensor

from diyfa.backends.cuda.gluon import compat
from diyfa.backends.cuda.hopper.configs import Sm90Config, compile_options
from diyfa.backends.cuda.runtime.versions import TRITON


def pair(**fields: type) -> type:
    return compat.aggregate(type("Pair", (), {"__annotations__": fields}))


@pytest.mark.parametrize(("version", "known"), [((3, 5), False), ((3, 6), True), ((3, 9), True), ((3, 10), False)])
def test_versions(version: tuple[int, int], known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "TRITON", version)
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


# ---- which ptxas


def has_versions(monkeypatch: pytest.MonkeyPatch, newer: str, older: str) -> None:
    tools = SimpleNamespace(ptxas_blackwell=SimpleNamespace(version=newer), ptxas=SimpleNamespace(version=older))
    monkeypatch.setattr(compat, "ptxas_options", compat.ptxas_options.__wrapped__)  # asked anew
    monkeypatch.setattr(compat, "triton", SimpleNamespace(__version__="3.9.0", knobs=SimpleNamespace(nvidia=tools)))


@pytest.mark.parametrize(("newer", "older"), [("13.5", "12.9"), ("13.4", "13.0"), ("12.9", "12.9"), ("13.1", "12.8")])
def test_other_versions_of_ptxas_are_left_alone(newer: str, older: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_versions(monkeypatch, newer, older)
    assert compat.ptxas_options() == {}


@pytest.mark.parametrize("error", [RuntimeError("Cannot find ptxas"), PermissionError("ptxas")])
def test_a_pack_needs_no_ptxas(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of kernels ask for its version when they are imported."""

    class Tools:
        @property
        def ptxas_blackwell(self) -> SimpleNamespace:
            raise error

    monkeypatch.setattr(compat, "ptxas_options", compat.ptxas_options.__wrapped__)  # asked anew
    monkeypatch.setattr(compat, "triton", SimpleNamespace(knobs=SimpleNamespace(nvidia=Tools())))
    assert compat.ptxas_options() == {}


class Backend:
    """What Triton's has to do with ptxas."""

    def __init__(self) -> None:
        self.target = GPUTarget("cuda", 90, 32)

    def make_cubin(self, *arguments: object) -> tuple:
        return (self.target.arch, *arguments)


def test_the_older_ptxas_compiles_what_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton takes the newer from sm_90 on, by the backend's target, and compiles for what it is told."""
    has_versions(monkeypatch, "13.4", "12.9")
    backend, asked = Backend(), SimpleNamespace(**compat.ptxas_options())
    stages: dict = {"cubin": None}
    compat.compile_with_older_ptxas(backend, stages, asked)
    assert stages["cubin"]("ptx", {}) == (80, "ptx", {}, asked, 90) and backend.target.arch == 90
    for options in (SimpleNamespace(ptx_version=None), SimpleNamespace(ptx_version=90)):
        stages = {"cubin": None}
        compat.compile_with_older_ptxas(backend, stages, options)
        assert stages == {"cubin": None}


def test_a_newer_ptxas_is_replaced_only_where_it_was_compared() -> None:
    options = compat.ptxas_options()
    assert options == ({"ptx_version": 88} if TRITON == (3, 9) else {})
    assert options.items() <= compile_options(Sm90Config(2, 64, 2, True, 240, 24)).items()
