"""The most that the cost model could say of a tile before it is compiled: what the search need not try.

A kernel must at least multiply its products, move its operands once, and (on the 910) pass scores, weights and partial
results between cube and vector cores through global memory, which the cube core writes when it does not multiply. What
the compiler adds to that only costs more, so a tile whose best case is below a compiled one's prediction loses. Work of
the vector cores is not known beforehand; the least among the kernel's compiled tiles is a guide, from which the search
takes a margin off (`search.VECTOR_PART`).
"""

from __future__ import annotations

from diyfa.arch import ELEMENT_BYTES, NPUArch, npu_spec
from diyfa.backends.npu.tables.configs import AttentionTile
from diyfa.lab.npu import cost
from diyfa.lab.npu.hivm import Loop, Module, Product, VectorCall, Work
from diyfa.problem import AttentionProblem

FP32_BYTES = 4  # of a score, a partial result, lse and delta; the gate's attn_bias is in fp32 too


def least_work(problem: AttentionProblem, kernel: str, rows: int, keys: int, key_bias: bool) -> tuple[Work, Work]:
    """(work of a tile of scores, work around it for each task) without which `kernel` cannot do.

    `key_bias`: a bias with a value for each score is read with them.
    """
    spec = npu_spec(problem.arch)
    through_memory = spec is not None and spec.arch is not NPUArch.A5  # the 950 has a way between its cores
    width, d, dv = ELEMENT_BYTES[problem.dtype], problem.head_dim, problem.head_dim_v
    scores, bits = rows * keys, 8 * width
    products = {
        "fwd": [(rows, keys, d), (rows, dv, keys)],
        "dq": [(rows, keys, d), (rows, keys, dv), (rows, d, keys)],
        "dkdv": [(keys, rows, d), (keys, rows, dv), (keys, dv, rows), (keys, d, rows)],
        "dbias": [(rows, keys, d), (rows, keys, dv)],
    }
    # Elements of operands, and between the cores: fp32 results of products, and what multiplies again.
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
    whole = scores * FP32_BYTES if kernel == "dbias" else 0
    return tile, Work(loaded=read[kernel] * width, stored=stored[kernel] * width + whole)


def best_share(
    problem: AttentionProblem, kernel: str, tile: AttentionTile, key_bias: bool, vector_cycles: float = 0.0
) -> float:
    """The greatest share of the cube peak that the cost model could predict for `tile`.

    Nothing is added for the mask, and the pipeline is as deep as there are workspace buffers. The vector cores take
    `vector_cycles` for a tile, by default nothing, which no compiled kernel can beat.
    """
    work, around = least_work(problem, kernel, tile.block_m, tile.block_n, key_bias)
    scores = tile.block_m * tile.block_n
    if vector_cycles:
        elements = int(vector_cycles * cost.VECTOR_BYTES // FP32_BYTES)
        work.vector.append(VectorCall("assumed", elements, 8 * FP32_BYTES, library=False))
    spec = npu_spec(problem.arch)
    depth = tile.workspace_buffers if spec is not None and spec.arch is not NPUArch.A5 else 0
    module = Module({}, True, depth, True, 0, [Loop(work)], around, scores)
    return cost.predict(module, problem, kernel, tile.block_m, tile.block_n).share
