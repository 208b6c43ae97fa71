"""What every CUDA launcher does around a kernel: the right device, and whether Triton interprets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from diyfa.backends.cuda.configs import AttentionConfig, default_config
from diyfa.backends.cuda.tiles import INTERPRETING
from diyfa.problem import AttentionProblem

_CURRENT = nullcontext()


def is_interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return INTERPRETING.value


def on_device(x: torch.Tensor):
    """Context in which kernels launch on x's device; free when it is the current one."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return _CURRENT
    return torch.cuda.device(x.device)


def softmax_scale(sm_scale: float) -> tuple[float, bool]:
    """(|sm_scale|, negate scores first): the running maximum is taken before scaling, which needs a positive scale.

    A scale of 0 becomes the smallest that keeps -inf a mask and every exponential at 1.
    """
    return abs(sm_scale) or 1e-30, sm_scale < 0


_forced: dict[str, AttentionConfig] = {}


@contextmanager
def use_config(kind: str, config: AttentionConfig) -> Iterator[None]:
    """Launch every kernel of `kind` ("fwd", "dkdv", "dq") with this tile inside the block: for sweeps and tests."""
    _forced[kind] = config
    try:
        yield
    finally:
        del _forced[kind]


def tuned_config(kind: str, problem: AttentionProblem, run: Callable[[AttentionConfig], None]) -> AttentionConfig:
    """The tile for this problem's bucket: measured once where tuning is possible and allowed, else the table's."""
    if _forced and kind in _forced:
        return _forced[kind]
    default = default_config(kind, problem)
    assert default is not None, "unsupported() accepted a problem that no tile fits"
    return default
