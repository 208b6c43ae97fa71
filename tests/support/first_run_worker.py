"""The worker of `diyfa first-run` on torch_npu over the host shim, with faults planted.

The command line names them: `tile` (the compiler refuses the table's forward tiles), `candidate` (the process dies when
its half is timed), `bf16` (slow), `crash` (in a step of the numerics).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import npu_interpreter

npu_interpreter.pytest_configure()

import diyfa  # noqa: E402
from diyfa.backends.npu.runtime import tiles, tune  # noqa: E402
from diyfa.lab.bench import timing  # noqa: E402
from diyfa.lab.first_run import worker as worker  # noqa: E402
from diyfa.problem import Launch  # noqa: E402

FAULTS = frozenset(sys.argv[1:])
timing.FLUSH_BYTES = 4096  # there is no cache to flush
tune.tuner.device = lambda: (0, "Ascend910B3")  # measures in the interpreter, too
tune.tuner._rounds = 1
tune.MEASURE_MS, tune.MIN_RUNS = 0, 1

run = tiles.run


def planted_run(launch: Launch) -> None:
    shape = (launch.constants["c"].block_m, launch.constants["c"].block_n)
    forward = "fwd" in launch.kernel.__name__
    if "tile" in FAULTS and forward and shape not in ((64, 64), (32, 32), (32, 256)):
        from triton.compiler.errors import MLIRCompilationError

        raise MLIRCompilationError("ConvertLinalgRToBinary", "ub overflow, requires 2400000 bits while 1572864 bits\n")
    if "candidate" in FAULTS and forward and tune.tuner._is_measuring and shape == (32, 256):
        os.kill(os.getpid(), signal.SIGSEGV)
    run(launch)


tiles.run = planted_run
flash_attention = diyfa.flash_attention


def planted_attention(q: Any, *args: Any, **kwargs: Any) -> Any:
    if "bf16" in FAULTS and str(q.dtype) == "torch.bfloat16":
        time.sleep(0.3)
    return flash_attention(q, *args, **kwargs)


diyfa.flash_attention = planted_attention
numerics = worker.KINDS["numerics"]


def planted_numerics(device: Any, case: dict[str, Any], **arguments: Any) -> Any:
    name = case["name"]
    if "crash" in FAULTS and name.startswith("causal, tile"):
        print("EZ9999: inner error", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    yield from numerics(device, case, **arguments)


worker.KINDS["numerics"] = planted_numerics
is_harmless = worker._is_harmless
# The shim has no compute operators, so the vendor's is refused, before it could spoil anything.
worker._is_harmless = lambda error: "libopapi" in str(error) or is_harmless(error)

if __name__ == "__main__":
    with npu_interpreter.HostArithmetic():
        sys.exit(worker.main())
