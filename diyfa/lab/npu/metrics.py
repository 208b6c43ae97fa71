"""Numbers of a compiled kernel, for the output and the JSON of `diyfa compile`."""

from __future__ import annotations

from typing import Any

from diyfa.arch import npu_spec
from diyfa.backends.npu.tables.configs import AttentionTile
from diyfa.lab.npu import cost
from diyfa.lab.npu.hivm import Module, Work
from diyfa.problem import AttentionProblem

MEMORIES = ("ub", "l1", "l0a", "l0b", "l0c")
# Sizes for predictions: sequences so long that their ends do not matter.
REFERENCE = {"batch": 2, "heads_q": 16, "heads_kv": 16, "seqlen_q": 8192, "seqlen_k": 8192}


def limits(target: str) -> dict[str, int]:
    """Return the bytes of each on-chip memory of `target`."""
    spec = npu_spec(target)
    return {} if spec is None else {name: getattr(spec, name) for name in MEMORIES}


def reference_problem(problem: AttentionProblem) -> AttentionProblem:
    """Return `problem` with the sizes of REFERENCE. Packed sequences become a dense batch of equal ones."""
    layout = "bhsd" if problem.varlen else problem.layout
    return problem.replace(layout=layout, total_q=0, total_k=0, **REFERENCE)


def metrics(
    module: Module,
    target: str,
    problem: AttentionProblem | None = None,
    step: str = "",
    tile: AttentionTile | None = None,
) -> dict[str, Any]:
    """Return all numbers of `module`, and with a problem the cost model's prediction at the reference size.

    Per tile of scores (per step over k in a matrix product), for one AI core: floating-point operations and cycles of
    the cube core, operations on elements of both vector cores, bytes through global memory.
    """
    figures: dict[str, Any] = {
        "bound": module.bound,
        "pipelined": module.pipelined,
        "workspace_bytes": module.workspace,
        "loops": [
            {"tile": work_numbers(module, loop.tile, target), "mask_adds": work_numbers(module, loop.masked, target)}
            for loop in module.loops
        ],
        "task": work_numbers(module, module.task, target),
    }
    if problem is not None and tile is not None and step in cost.PRODUCTS and module.loops:
        reference = reference_problem(problem)
        prediction = cost.predict(module, reference, step, tile.block_m, tile.block_n)
        figures["prediction"] = {**REFERENCE, **prediction.numbers()}
    return figures


def work_numbers(module: Module, work: Work, target: str) -> dict[str, Any]:
    """Return the numbers of `work`, by name."""
    cycles = cost.stages(work, target)
    return {
        "cube_flops": work.flops,
        "cube_cycles": round(cycles.cube),
        "vector_elements": round(work.vector_elements * module.vector_cores),
        "vector_passes_per_score": round(module.passes(work), 2),
        "vector_cycles": round(cycles.vector),
        "memory_cycles": round(cycles.memory),
        "loaded_bytes": round(work.loaded),
        "stored_bytes": round(work.stored),
        "workspace_read_bytes": round(work.workspace_read),
        "workspace_written_bytes": round(work.workspace_written),
        "direct_bytes": round(work.direct),
        "scalar_accesses": round(work.scalar_accesses),
    }
