"""Matrix products for the interpreter and the simulators: what an element is, only its row and its column decide.

BLAS, which NumPy's `matmul` calls, may sum a row in another order where it lies elsewhere in the matrix, or where the
matrix has more rows, as the machine's instructions suggest. Tensor cores do not, and tests compare bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Number of products that tensor cores add to an accumulator at once. 0: all of a call, and the accumulator at the end.
STEP = 0


def accumulated_product(a: np.ndarray, b: np.ndarray, acc: np.ndarray) -> np.ndarray:
    """Return acc + a @ b in acc's dtype. With STEP, as a chain of STEP products at a time, like tensor cores.

    Then it makes no difference how many calls a kernel divides the inner dimension into.
    """
    if not STEP:
        return acc + matrix_product(a, b, acc.dtype)
    for start in range(0, a.shape[-1], STEP):
        acc = acc + matrix_product(a[..., start : start + STEP], b[..., start : start + STEP, :], acc.dtype)
    return acc


def matrix_product(a: np.ndarray, b: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
    """a [..., M, K] @ b [..., K, N], computed in `dtype`: the products of each element are added up one by one.

    Without `optimize`, `einsum` does not call BLAS. It takes the innermost loop from the strides: of operands that are
    contiguous that is the one over N (over K where N is 1).
    """
    return np.einsum("...mk,...kn->...mn", np.ascontiguousarray(a, dtype), np.ascontiguousarray(b, dtype))
