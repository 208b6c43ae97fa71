"""How many kernels would be compiled for calls of many sizes, printed as JSON by running this file.

Needs triton-ascend without its interpreter, and no device: a launch is replaced by the key under which Triton would
look for the compiled kernel. The types of arguments in that key must be those that the compile gate takes.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import defaultdict
from typing import Any

import torch
from triton.backends.ascend.compiler import AscendBackend
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from diyfa.backends.npu.attention import bwd, fwd
from diyfa.backends.npu.runtime import launch
from diyfa.lab.examples import example_gradients, example_tensors
from diyfa.lab.npu import specs
from diyfa.problem import LAYOUTS, AttentionTensors

TARGET = "Ascend910B3"
keys: dict[str, set[str]] = defaultdict(set)


def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    if self.binder is None:
        self.create_binder(AscendBackend(GPUTarget("npu", TARGET, 0)))
    bound, types, constants, _, options = self.binder(*args, **kwargs)
    gate = [specs.type_name(bound[p.name]) for p in self.params if not p.is_constexpr]
    if ["constexpr" if name == "none" else name for name in types] != gate:
        raise TypeError(f"{self.__name__}: the gate would compile {gate}, Triton {types}")
    keys[self.__name__].add("".join(types) + str((constants, options)))


def call(sizes: tuple[int, ...], layout: str, bias: tuple[int, ...] | None, **features: Any) -> None:
    """One forward and backward call; nothing is computed."""
    batch, heads, heads_kv, seqlen_q, seqlen_k = sizes
    head_dim = 40
    problem = specs.example(
        TARGET, layout=layout, batch=batch, heads_q=heads, heads_kv=heads_kv, seqlen_q=seqlen_q,
        seqlen_k=seqlen_k, head_dim=head_dim, bias="float32" if bias else "", bias_grad=bias is not None, **features,
    )  # fmt: skip

    def tensor(heads: int, seqlen: int) -> torch.Tensor:
        if layout == "thd":
            return torch.empty(batch * seqlen, heads, head_dim, dtype=torch.float16)
        shape = (batch, heads, seqlen, head_dim)
        return torch.empty([shape[i] for i in LAYOUTS[layout]], dtype=torch.float16)

    if layout == "thd":
        problem = problem.replace(total_q=batch * seqlen_q, total_k=batch * seqlen_k)
    q, k, v = tensor(heads, seqlen_q), tensor(heads_kv, seqlen_k), tensor(heads_kv, seqlen_k)
    full = (batch, heads, seqlen_q, seqlen_k)
    optional = example_tensors(problem, "cpu")
    if bias is not None:
        optional["attn_bias"] = torch.empty([n or m for n, m in zip(bias, full, strict=True)])
    tensors = AttentionTensors(q, k, v, 0.1, dropout_p=0.1 * problem.dropout, **optional)
    out, lse = torch.empty_like(q), torch.empty(problem.lse_shape)
    fwd.attention_fwd(problem, tensors, out, lse)
    bwd.attention_bwd(problem, tensors, out, lse, torch.empty_like(q), None, example_gradients(tensors))


FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"window_right": 0},
    "lens": {"seq_lens": True},
    "featured": {"window_left": 7, "window_right": 3, "softcap": 5.0, "alibi": True, "sinks": True, "dropout": True},
    "biased": {"bias": (0, 0, 0, 0)},
    "biased by key": {"bias": (1, 1, 1, 0)},
    "biased by row": {"bias": (0, 1, 0, 1)},
}


def main() -> None:
    JITFunction.run = record
    launch._core_counts = lambda arch, index: (20, 40)
    counts: dict[str, dict[str, int]] = {}
    lengths = (2, 15, 16, 17, 64, 100, 512, 1000)
    for layout, (name, features) in itertools.product(("bhsd", "bshd", "thd"), FEATURES.items()):
        if layout == "thd" and ("bias" in features or "seq_lens" in features):
            continue
        keys.clear()
        bias = features.get("bias")
        rest = {key: value for key, value in features.items() if key != "bias"}
        for seqlen_q, seqlen_k, batch, heads in itertools.product(lengths, lengths, (1, 3), (1, 2, 16)):
            if "window_left" in rest:
                rest = {**rest, "window_left": seqlen_q, "window_right": seqlen_k}
            call((batch, heads, 1 if seqlen_q > 50 else heads, seqlen_q, seqlen_k), layout, bias, **rest)
        counts[f"{layout} {name}"] = {kernel: len(found) for kernel, found in keys.items()}
    json.dump(counts, sys.stdout)


if __name__ == "__main__":
    main()
