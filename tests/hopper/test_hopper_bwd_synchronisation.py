"""Every wait, arrival and fence of the Hopper backward is needed: without any one the interpreter reports a bug."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hopper_interpreted import WIDE_BACKWARD_MODULES, interpret_backward, interpreted_only, kernel_source, load_kernel
from simulators.gluon import KernelBug
from synchronising import Synchronising

from diyfa import BlockMask
from diyfa.backends.cuda.hopper import bwd_launch as hopper_bwd
from diyfa.backends.cuda.runtime.passes import launch_each
from diyfa.problem import AttentionGradients, AttentionProblem, AttentionTensors

pytestmark = interpreted_only

SYNCHRONISING = (
    "mbarrier.wait", "mbarrier.arrive", "mbarrier.expect", "mbarrier.init", "fence_async_shared", "tma.store_wait",
    "wait_full", "release", "arrive_per_lane", "_arrive", "_wait", "sync_consumers", "wait_for_previous_kernels",
    "wait_until_equal", "increment_semaphore",
)  # fmt: skip
# Of deterministic calls, which `run` has none of.
ORDERED = (
    "wait_until_equal(semaphores_ptr + half, keys.adders_before(block, sizes, config))",
    "increment_semaphore(semaphores_ptr + half)",
)
METHODS = (
    "acquire", "commit", "signal", "wait", "release", "init", "announce", "wait_until_added", "wait_until_free",
)  # fmt: skip
# Two query heads share the keys: long enough for every stage to be used again.
PROBLEM = AttentionProblem("cuda", "sm_90", "bfloat16", "bhsd", 1, 2, 1, 260, 200, 64, 64, -1, 0)
# More heads than the fp32 dQ has room for, and one where another kernel converts it.
HEADS = PROBLEM.replace(heads_q=6, heads_kv=6, seqlen_q=70, seqlen_k=130)
SAMPLES = PROBLEM.replace(seq_lens=True)
LISTED = PROBLEM.replace(window_right=-1, mask=(128, 128))


ROLLING = (
    "gluon.channel", "hopper.bwd_tiles", "hopper.bwd_common", "hopper.bwd_dq", "hopper.bwd_rolling_dq", "hopper.bwd",
)  # fmt: skip
MASKED = "hopper.bwd_mask"
MODULES = {  # D and Dv
    **dict.fromkeys(ROLLING, (64, 64)), MASKED: (128, 128), "hopper.bwd_wide": (200, 136),
    "hopper.bwd_wide_dq": (200, 200), "hopper.bwd_mla": (136, 72),
}  # fmt: skip
SOURCES = {name: Synchronising(kernel_source(name), SYNCHRONISING, METHODS, ORDERED) for name in MODULES}
LINES = [(name, f"{i}: {line}") for name, source in SOURCES.items() for i, line in enumerate(source.lines)]


def run(name: str) -> None:
    """The backward of random tensors, by the kernel of a module."""
    for problem in (PROBLEM, HEADS, SAMPLES) if name in ROLLING else (LISTED,) if name == MASKED else (PROBLEM,):
        torch.manual_seed(0)
        d, dv = MODULES[name]
        queries, keys = (problem.heads_q, problem.seqlen_q), (problem.heads_kv, problem.seqlen_k)
        q, k, v, out, dout = (
            torch.randn(1, *of, width).bfloat16() for of, width in zip(
                (queries, keys, keys, queries, queries), (d, d, dv, dv, dv), strict=True
            )
        )  # fmt: skip
        lengths = torch.tensor([problem.seqlen_k], dtype=torch.int32) if problem.seq_lens else None
        mask = BlockMask.from_dense(torch.rand(2, 260, 200) < 0.5) if problem.mask else None
        lists = {} if mask is None else {"mask_blocks": mask.blocks, "mask_bits": mask.bits}
        tensors = AttentionTensors(q, k, v, 0.125, seq_lens=lengths, **lists)
        gradients = AttentionGradients(*(torch.empty_like(x) for x in (q, k, v)))
        of_widths = problem.replace(head_dim=d, head_dim_v=dv)
        found = hopper_bwd.backward_pass(of_widths, tensors, out, torch.zeros(1, *queries), dout, None, gradients)
        launch_each(found.launches)


def interpret_sources(sources: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the backward runs with these sources of modules."""
    count = max(WIDE_BACKWARD_MODULES.index(x) for x in (*sources, "hopper.bwd")) + 1
    kernels = load_kernel(sources, folder, WIDE_BACKWARD_MODULES[:count])
    interpret_backward(monkeypatch, seed=3, interleave=True, kernels=kernels, multiprocessors=2)
    monkeypatch.setattr(hopper_bwd.Sm90Backward, "_window", lambda backward: (1, 1, 2))


@pytest.mark.parametrize("name", [x for x in MODULES if x not in ROLLING or x == "hopper.bwd"])
def test_with_all_of_them_nothing_is_reported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_sources({module: source.source() for module, source in SOURCES.items()}, tmp_path, monkeypatch)
    run(name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "line"), LINES)
def test_nothing_is_superfluous(name: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_sources({name: SOURCES[name].without(int(line.split(":")[0]))}, tmp_path, monkeypatch)
    with pytest.raises(KernelBug):
        run(name)
