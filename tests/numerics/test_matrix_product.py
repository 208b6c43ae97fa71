"""The product of the interpreter and the simulators: the same bits wherever a row lies, on every machine."""

from __future__ import annotations

import os

import numpy as np
import pytest
from matrix_product import matrix_product

LAYOUTS = {
    "rows": lambda x: x,
    "columns": lambda x: np.ascontiguousarray(x.T).T,
    "unaligned": lambda x: np.concatenate([np.zeros(1, x.dtype), x.ravel()])[1:].reshape(x.shape),
    "part": lambda x: np.pad(x, ((3, 2), (5, 1)))[3:-2, 5:-1],
}


@pytest.mark.parametrize(("dtype", "narrow"), [(np.float32, np.float16), (np.float64, np.float32), (np.int32, np.int8)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_are_added_one_by_one(layout: str, dtype: type, narrow: type) -> None:
    """In that order whatever the number of rows and columns, which NumPy's `einsum` does not promise. Products of
    `narrow` numbers are exact, so that it makes no difference whether they are rounded before they are added."""
    generator = np.random.default_rng(0)
    for m, k, n in ((1, 64, 16), (16, 16, 8), (33, 129, 65), (64, 64, 64), (128, 40, 2), (3, 1, 5), (2, 600, 128)):
        a, b = (10 * generator.standard_normal(shape) for shape in ((m, k), (k, n)))
        a, b = a.astype(narrow).astype(dtype), b.astype(narrow).astype(dtype)
        expected = np.zeros((m, n), dtype)
        for i in range(k):
            expected += a[:, i : i + 1] * b[i]
        found = matrix_product(LAYOUTS[layout](a), LAYOUTS[layout](b), dtype)
        assert found.dtype == dtype and np.array_equal(found, expected), (m, k, n)
        assert np.array_equal(matrix_product(a[None], np.stack([b, b]), dtype)[1], expected)


def test_sixteen_bits_are_multiplied_in_the_type_of_the_result() -> None:
    a, b = np.full((16, 64), 3e2, np.float16), np.full((64, 16), 3e2, np.float16)
    assert np.array_equal(matrix_product(a, b), np.full((16, 16), 64 * 9e4, np.float32))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="about the interpreter")
def test_the_interpreter_asks_no_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether rows differ by their place shows only where BLAS does that, and in few of those that are rounded."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.delattr(np, "matmul")
    a, b, acc = np.random.default_rng(0).standard_normal((3, 64, 64), np.float32)
    handles = (interpreter.TensorHandle(x, interpreter.tl.float32) for x in (a, b, acc))
    found = interpreter.InterpreterBuilder().create_dot(*handles, None, None)
    assert np.array_equal(found.data, matrix_product(a, b) + acc)
