"""What the ranks of a gloo group run in `tests/distributed/test_dtensors.py`: DTensors beside whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import diyfa

CPU: dict[str, Any] = {"backend": "cpu"}
# A mesh dimension's cut of a call, as the placement of q in each layout.
PLACEMENTS: dict[str, dict[str, Any]] = {
    "bhsd": {"batch": Shard(0), "heads": Shard(1), "whole": Replicate()},
    "bshd": {"batch": Shard(0), "heads": Shard(2), "whole": Replicate()},
    "thd": {"heads": Shard(1), "whole": Replicate()},
}


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))


def random_tensors(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def compare_with_full(
    call: Callable[..., Any],
    inputs: dict[str, torch.Tensor],
    placements: dict[str, Sequence[Any]],
    results: int,
    sharded_call: Callable[..., Any] | None = None,
    partial: Sequence[str] = (),
) -> list[str]:
    """Compares a call of full tensors with the call of DTensors; returns names of results and gradients that differ.

    A gradient with other placements than expected differs, too. `sharded_call` replaces `call` for the DTensors.
    `partial` names replicated inputs whose gradients are partial sums where q is sharded.
    """
    grid = mesh()
    names = [name for name, x in inputs.items() if x.is_floating_point() and name != "alibi_slopes"]
    runs = []
    for cut in (False, True):
        arguments = {name: x.detach().clone() for name, x in inputs.items()}
        if cut:
            arguments = {
                name: distribute_tensor(x, grid, placements[name]) if name in placements else x
                for name, x in arguments.items()
            }
        for name in names:
            arguments[name].requires_grad_()
        torch.manual_seed(dist.get_rank() if cut else 0)  # whoever draws dropout's state, it is the first rank's
        out = (sharded_call or call if cut else call)(**arguments)
        outs = out[:results] if isinstance(out, tuple) else (out,)
        loss = sum((x.full_tensor() if cut else x).sin().sum() for x in outs)
        loss.backward()
        runs.append((outs, [arguments[name].grad for name in names]))
    (full, grads), (sharded, sharded_grads) = runs
    wrong = [f"result {n}" for n, (x, y) in enumerate(zip(full, sharded, strict=True))
             if x.shape != y.shape or not torch.allclose(x, y.full_tensor(), atol=1e-5)]  # fmt: skip
    for name, x, y in zip(names, grads, sharded_grads, strict=True):
        expected = [
            Partial() if name in partial and place == Replicate() != of_q else place
            for place, of_q in zip(placements[name], next(iter(placements.values())), strict=True)
        ]
        if list(y.placements) != expected:
            wrong.append(f"the gradient of {name} is placed {y.placements}")
        if not torch.allclose(x, y.full_tensor(), atol=1e-5):
            wrong.append(f"the gradient of {name}")
    return wrong


def run_padded(layout: str, cuts: tuple[str, str], features: bool, dropout_p: float, batch: int = 4) -> list[str]:
    """Grouped heads, and with `features` everything that goes with them."""
    shapes = ((batch, 4, 6, 16), (batch, 4, 9, 16), (batch, 4, 9, 8))
    heads = (8, 4, 4)
    q, k, v = random_tensors(*((b, n, s, d) for n, (b, _, s, d) in zip(heads, shapes, strict=True)))
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    placed = [PLACEMENTS[layout][cut] for cut in cuts]
    inputs, placements = {"q": q, "k": k, "v": v}, dict.fromkeys("qkv", placed)
    if features:
        slopes, bias, sinks = random_tensors((batch, 8), (8, 6, 9), (8,), seed=1)
        inputs |= {"alibi_slopes": slopes.abs(), "attn_bias": bias, "sinks": sinks}
        inputs["seq_lens"] = torch.tensor([9, 5, 7, 1, 4], dtype=torch.int32)[:batch]
        # As a program would have them: parameters on every rank, lengths like the batch.
        batch_placements = [Shard(0) if cut == "batch" else Replicate() for cut in cuts]
        placements |= dict.fromkeys(("attn_bias", "sinks"), [Replicate()] * 2)
        placements |= {"alibi_slopes": batch_placements, "seq_lens": batch_placements}
    options: dict[str, Any] = {"causal": True, "dropout_p": dropout_p, "return_lse": True, **CPU}
    if features:
        options |= {"softcap": 3.0, "window": (5, 0)}
    call = diyfa.flash_attention if layout == "bhsd" else diyfa.flash_attention_v2
    return compare_with_full(lambda **arguments: call(**arguments, **options), inputs, placements, 2)


def run_packed(cuts: tuple[str, str], dropout_p: float) -> list[str]:
    """Packed sequences sharded over heads; lengths are plain tensors, the same on every rank."""
    q, k, v, sinks = random_tensors((11, 8, 16), (14, 4, 16), (14, 4, 16), (8,))
    offsets_q, offsets_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 11], [0, 7, 14]))
    placed = [PLACEMENTS["thd"][cut] for cut in cuts]
    placements = {**dict.fromkeys("qkv", placed), "sinks": [Replicate()] * 2}

    def call(**arguments: Any) -> Any:
        q, k, v = (arguments.pop(name) for name in "qkv")
        return diyfa.flash_attention_varlen(
            q, k, v, offsets_q, offsets_k, 9, 7, causal=True, return_lse=True, dropout_p=dropout_p, **arguments, **CPU
        )

    return compare_with_full(call, {"q": q, "k": k, "v": v, "sinks": sinks}, placements, 2)


def run_flash_attn(packing: str, cuts: tuple[str, str]) -> list[str]:
    """flash_attn's functions, also with q, k and v in one tensor."""
    q, kv, qkv = random_tensors((4, 6, 8, 16), (4, 6, 2, 4, 16), (4, 6, 3, 8, 16))
    by_heads = {"": 2, "kv": 3, "qkv": 3}
    placed = {n: [Shard(n) if cut == "heads" else PLACEMENTS["bshd"][cut] for cut in cuts] for n in (2, 3)}
    inputs = {"": {"q": q, "k": kv[:, :, 0], "v": kv[:, :, 1]}, "kv": {"q": q, "kv": kv}, "qkv": {"qkv": qkv}}[packing]
    call = {"": diyfa.flash_attn_func, "kv": diyfa.flash_attn_kvpacked_func, "qkv": diyfa.flash_attn_qkvpacked_func}
    placements = {name: placed[2 if name in "qkv" and len(name) == 1 else by_heads[packing]] for name in inputs}
    with diyfa.use_backend("cpu"):
        return compare_with_full(
            lambda **arguments: call[packing](**arguments, causal=True, dropout_p=0.2, return_attn_probs=True),
            inputs, placements, 3,
        )  # fmt: skip


def run_compiled() -> list[str]:
    def call(q: Any, k: Any, v: Any) -> Any:
        return diyfa.flash_attention(q, k, v, causal=True, **CPU)

    placements = {name: [Shard(0), Shard(1)] for name in "qkv"}
    q, k, v = random_tensors((4, 8, 6, 16), (4, 4, 9, 16), (4, 4, 9, 16))
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    return compare_with_full(compiled, {"q": q, "k": k, "v": v}, placements, 1)


def run_refused() -> list[str]:
    """What DTensors raise that flash_attention does not follow."""
    grid = mesh()
    q, k = random_tensors((4, 8, 6, 16), (4, 3, 6, 16))
    from_local = lambda x, *placements: DTensor.from_local(x, grid, placements, run_check=False)  # noqa: E731
    good = from_local(q, Shard(0), Replicate())
    by_heads = from_local(q, Replicate(), Shard(1))
    other = DTensor.from_local(q, init_device_mesh("cpu", (4,)), [Shard(0)])
    three = distribute_tensor(k, grid, [Replicate(), Shard(1)])
    slopes = torch.rand(16)  # of the whole
    calls: list[tuple[Any, dict[str, Any]]] = [
        ((from_local(q, Shard(2), Replicate()),) * 3, {}),
        ((from_local(q, Replicate(), Shard(3)),) * 3, {}),
        ((from_local(q, Partial(), Replicate()),) * 3, {}),
        ((good, by_heads, by_heads), {}),
        ((good, other, other), {}),
        ((good, q, q), {}),
        ((distribute_tensor(random_tensors((4, 6, 6, 16))[0], grid, [Replicate(), Shard(1)]), three, three), {}),
        ((by_heads,) * 3, {"alibi_slopes": slopes}),
        ((by_heads,) * 3, {"alibi_slopes": distribute_tensor(slopes[:8], grid, [Replicate(), Replicate()])}),
        ((good,) * 3, {"dropout_p": 0.1, "rng_state": torch.zeros(34, dtype=torch.int64)}),
        ((from_local(q[0], Shard(0), Replicate()),) * 3, {}),
    ]
    replicated = distribute_tensor(random_tensors((4, 6, 8, 16))[0], grid, [Replicate()] * 2)
    others: list[Callable[[], Any]] = [
        lambda: diyfa.flash_attn_with_kvcache(replicated, replicated, replicated, cache_seqlens=6),
        lambda: diyfa.explain(replicated, replicated, replicated, **CPU),
        lambda: diyfa.triton_matmul(replicated[0, 0], replicated[0, 0].t()),
        lambda: diyfa.flash_attention(q, q, q, sinks=replicated[0, 0, 0, :8], **CPU),
    ]
    refusals = []
    runs = [lambda qkv=qkv, options=options: diyfa.flash_attention(*qkv, **options, **CPU) for qkv, options in calls]
    for run in (*runs, *others):
        try:
            run()
            refusals.append("ran")
        except (ValueError, TypeError) as error:
            refusals.append(f"{type(error).__name__}: {error}")
    return refusals
