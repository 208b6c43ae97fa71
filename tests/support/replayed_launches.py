"""Repeated calls of diyfa whose kernels are compiled for sm_90 and launched to a list: what the driver is handed."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Hashable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from simulators.cuda_driver import Recorded, install

import diyfa
from diyfa import ops
from diyfa import plan as planning
from diyfa.backends.cuda.attention import decode_configs
from diyfa.backends.cuda.hopper import configs as hopper_configs
from diyfa.backends.cuda.runtime import tune

SMALL, LARGE = (2, 4, 96, 64), (4, 8, 2048, 64)  # the second is worth its descriptors
CASES: dict[str, tuple[tuple[int, ...], torch.dtype, dict[str, Any], bool]] = {  # shape, dtype, options, gradients?
    "pointers": (SMALL, torch.bfloat16, {"softcap": 3.0}, False),
    "absent tensors": (SMALL, torch.bfloat16, {"sinks": torch.rand(4), "window": (20, 0)}, False),
    "backward": (SMALL, torch.bfloat16, {}, True),
    "packed": (SMALL, torch.bfloat16, {"sinks": torch.rand(4)}, True),
    "descriptors": (LARGE, torch.float16, {"variant": "v2"}, False),
    "descriptors of gluon": (LARGE, torch.bfloat16, {"causal": True, "variant": "sm90"}, False),
}
CALLS = 4  # the first two are described; what repeats them is prepared in the second
LEAST_ADDRESS = 2**44


def by_name(launches: list[Recorded], tensors: dict[str, torch.Tensor | None]) -> list[list[Any]]:
    """Launches of one call with names instead of addresses; memory of its own is numbered."""
    names = {x.data_ptr(): name for name, x in tensors.items() if x is not None}
    named = []
    for launch in launches:
        parameters: list[Any] = []
        for given in launch.parameters:
            words = struct.unpack(f"<{len(given) // 8}Q", given) if len(given) % 8 == 0 else ()
            for word in words:
                if word >= LEAST_ADDRESS:
                    names.setdefault(word, f"memory {len(names)}")
            parameters.append([names.get(word, word) for word in words] or given.hex())
        named.append([*launch.shape, launch.stream, *launch.attributes, launch.kernel, *parameters])
    return named


def calls_of(case: str, recorded: list[Recorded], described: list[bool]) -> dict[str, list]:
    """{"launches": those of each call, "described": whether it was described anew}"""
    shape, dtype, options, has_gradients = CASES[case]
    kept, calls, anew = [], [], []
    for _ in range(CALLS):
        q, k, v = (torch.zeros(shape, dtype=dtype) for _ in range(3))
        if case == "packed":  # a sequence for each sample
            q, k, v = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q, k, v))
        q, k, v = (x.requires_grad_(has_gradients) for x in (q, k, v))
        tensors: dict[str, torch.Tensor | None] = {"q": q, "k": k, "v": v, "sinks": options.get("sinks")}
        attend = partial(diyfa.flash_attention, q, k, v)
        if case == "packed":
            length = shape[2]
            ends = [torch.arange(0, 1 + q.shape[0], length, dtype=torch.int32) for _ in range(2)]
            tensors |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
            attend = partial(diyfa.flash_attention_varlen, q, k, v, *ends, length, length)
        recorded.clear()
        described.clear()
        out, lse = attend(backend="cuda", return_lse=True, **options)
        tensors |= {"out": out, "lse": lse}
        if has_gradients:
            tensors["dout"] = torch.zeros_like(out)
            grads = torch.autograd.grad(out, (q, k, v), tensors["dout"])
            tensors |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
        kept.append(tensors)  # so that no address comes twice
        calls.append(by_name(recorded, tensors))
        anew.append(bool(described))
    return {"launches": calls, "described": anew}


GROWING = {"growing": (72, 0, False), "growing in the mode": (64, 1024, True)}  # features, rows more, invariant?


def grown(case: str, recorded: list[Recorded]) -> dict[str, list]:
    """{"launches": [of a call over a cache that grows, of the same call without earlier ones], for several lengths}"""
    head_dim, more, invariant = GROWING[case]
    pairs, kept = [], []
    plans: dict[Hashable, Any] = {}
    for rows in (305, 306, 305, 320, 307, 321, 308):  # strides of 72 features are multiples of 16 for even rows only
        shapes = [(1, heads, n, head_dim) for heads, n in ((4, 1), (2, rows + more), (2, rows + more))]
        q, k, v = (torch.zeros(shape).bfloat16().transpose(1, 2) for shape in shapes)
        pair = []
        for planning.plans in (plans, {}):
            recorded.clear()
            with diyfa.use_backend("cuda"), diyfa.batch_invariant() if invariant else nullcontext():
                out, lse = diyfa.flash_attn_with_kvcache(q, k, v, causal=True, return_softmax_lse=True)
            tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
            pair.append(by_name(recorded, tensors))
            kept.append(tensors)
        pairs.append(pair)
    return {"launches": pairs, "plans": [len(set(plans.values()))]}


def main() -> None:
    """The arguments are a folder and names of cases; prints {case: what `calls_of` or `grown` returns} as JSON."""
    folder, *cases = sys.argv[1:]
    recorded = install(Path(folder))
    described: list[bool] = []
    bind = ops.bind
    ops.bind = lambda *args: described.append(True) or bind(*args)
    tune._tuner.enabled = False
    hopper_configs.environment_refusal = lambda: None
    hopper_configs._multiprocessors = lambda device: 132
    type(diyfa.registry.load_backend("cuda")).accepts = lambda self, device: None
    decode_configs.multiprocessors = lambda device: 132
    found = {case: grown(case, recorded) if case in GROWING else calls_of(case, recorded, described) for case in cases}
    print(json.dumps(found))
