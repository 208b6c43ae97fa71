"""Calls recorded for an NPU that is not here, for a process with triton-ascend's compiler; prints JSON. See
tests/npu/test_npu_ready.py."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace
from typing import Any

import torch

torch.npu = SimpleNamespace(current_device=lambda: 0, is_available=lambda: False)  # type: ignore[attr-defined]

from triton.runtime.jit import JITFunction  # noqa: E402

from diyfa.backends import npu  # noqa: E402
from diyfa.backends.npu.runtime import launch as host  # noqa: E402
from diyfa.backends.npu.runtime.tune import tuner  # noqa: E402
from diyfa.ready import words  # noqa: E402
from diyfa.ready.recording import record  # noqa: E402

CALLS = (
    "attention float16 D=64 H=8/4 B=2 S=512 causal",
    "attention bfloat16 D=128 H=8 B=2 S=512 packed",
    "cache float16 D=128 H=8/2 B=4 Sq=1 Sk=1024 page=16 causal new=1 rotary=64",
    "merge D=64",
    "product float16 256x256x256",
    "cache bfloat16 D=128 H=8/2 B=4 Sq=1 Sk=1024 float8",
    "attention bfloat16 D=64 H=8/4 B=2 S=512 causal",  # the first in another dtype
)


def main() -> None:
    npu.device_name = lambda index: "Ascend910B3"  # type: ignore[assignment]
    recorded = record("npu", None, map(words.parse, CALLS))
    compiled: list[dict[str, Any]] = []
    loaded: list[str] = []

    def warmup(self: Any, *values: Any, grid: Any, **given: Any) -> Any:
        names = [name for name in self.arg_names if name not in given]
        assert len(names) == len(values) and not any(isinstance(x, torch.Tensor) for x in values)
        compiled.append({"name": self.__name__, **dict(zip(names, map(str, values), strict=True))})
        return SimpleNamespace(_init_handles=lambda: loaded.append(self.__name__))

    JITFunction.warmup = warmup
    for kernel in recorded.kernels.values():
        pickle.loads(pickle.dumps(kernel)).compile()
    try:
        record("npu", "Ascend910B3", ())
    except ValueError as error:
        elsewhere = str(error)
    restored = host.recorder is None and not tuner.recording
    print(json.dumps({
        "compiled": compiled, "loaded": loaded, "refused": recorded.refused, "elsewhere": elsewhere,
        "restored": restored,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
