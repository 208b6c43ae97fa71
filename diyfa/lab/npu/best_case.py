"""Upper bound of the cost model's prediction for a tile that is not compiled, so that the search can skip tiles.

A kernel must at least multiply its products and load its operands once. On the 910 it must also pass scores, weights
and partial results between cube and vector cores through global memory, and the cube core writes there while it does
not multiply. The compiler can only add to this. So a tile whose best case is below a compiled tile's prediction loses.
The vector cores' work is not known beforehand. The search takes the least among the kernel's compiled tiles, less a
margin (`search.VECTOR_FRACTION`).
"""

from __future__ import annotations

from diyfa.arch import ELEMENT_BYTES, NPUArch, npu_spec
from diyfa.backends.npu.tables.configs import AttentionTile
from diyfa.lab.npu import cost
from diyfa.lab.npu.hivm import Loop, Module, Product, VectorCall, Work
from diyfa.problem import AttentionProblem

FP32_BYTES = 4  # of a score, a partial result, or a value of the gate's attn_bias


def min_work(problem: AttentionProblem, kernel: str, rows: int, keys: int, key_bias: bool) -> tuple[Work, Work]:
    """Return (work of a tile of scores, work of a task around its tiles): the least that `kernel` must do.

    `key_bias`: the tile also loads a bias value for each score.
    """
    spec = npu_spec(problem.arch)
    through_memory = spec is not None and spec.arch is not NPUArch.A5  # the 950 connects its cores on the chip
    width, d, dv = ELEMENT_BYTES[problem.dtype], problem.head_dim, problem.head_dim_v
    scores, bits = rows * keys, 8 * width
    products = {
        "fwd": [(rows, keys, d), (rows, dv, keys)],
        "dq": [(rows, keys, d), (rows, keys, dv), (rows, d, keys)],
        "dkdv": [(keys, rows, d), (keys, rows, dv), (keys, dv, rows), (keys, d, rows)],
        "dbias": [(rows, keys, d), (rows, keys, dv)],
    }
    # Rows of operands loaded; elements passed between cores: fp32 results of products, and operands of later products.
    loaded = {"fwd": keys, "dq": keys, "dkdv": rows, "dbias": rows + keys}
    results = {"fwd": scores + rows * dv, "dq": 2 * scores, "dkdv": 2 * scores, "dbias": 2 * scores}
    weights = {"fwd": scores, "dq": scores, "dkdv": 2 * scores, "dbias": 0}
    written_out = results[kernel] * FP32_BYTES * through_memory
    between = written_out + weights[kernel] * width * through_memory
    tile = Work(
        products=[Product(*shape, bits) for shape in products[kernel]],
        loaded=loaded[kernel] * (d + dv) * width + key_bias * scores * FP32_BYTES,
        workspace_read=between,
        workspace_written=between,
        written_out=written_out,
    )
    read = {"fwd": rows * d, "dq": rows * (d + dv), "dkdv": keys * (d + dv), "dbias": 0}
    stored = {"fwd": rows * dv, "dq": rows * d, "dkdv": keys * (d + dv), "dbias": 0}
    dbias_bytes = scores * FP32_BYTES if kernel == "dbias" else 0
    return tile, Work(loaded=read[kernel] * width, stored=stored[kernel] * width + dbias_bytes)


def best_share(
    problem: AttentionProblem, kernel: str, tile: AttentionTile, key_bias: bool, vector_cycles: float = 0.0
) -> float:
    """Return the greatest share of the cube peak that the cost model could predict for `tile`.

    It assumes a mask without cost and a pipeline as deep as the number of workspace buffers. `vector_cycles`: cycles of
    the vector cores for a tile; the default 0 is below every compiled kernel.
    """
    work, around = min_work(problem, kernel, tile.block_m, tile.block_n, key_bias)
    scores = tile.block_m * tile.block_n
    if vector_cycles:
        elements = int(vector_cycles * cost.VECTOR_BYTES // FP32_BYTES)
        work.vector.append(VectorCall("assumed", elements, 8 * FP32_BYTES, library=False))
    spec = npu_spec(problem.arch)
    depth = tile.workspace_buffers if spec is not None and spec.arch is not NPUArch.A5 else 0
    module = Module({}, True, depth, True, 0, [Loop(work)], around, scores)
    return cost.predict(module, problem, kernel, tile.block_m, tile.block_n).share
