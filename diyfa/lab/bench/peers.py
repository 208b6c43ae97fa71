"""The peers that diyfa is timed against in the same run: each implementation of PyTorch's attention by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]

SDPA_PEERS: dict[str, SDPBackend] = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,  # FlashAttention-2 on CUDA
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA math": SDPBackend.MATH,
}
# The math implementation stores scores and weights. With more bytes it takes too much memory or time.
MATH_LIMIT_BYTES = 8 * 1024**3


class PeerUnavailable(RuntimeError):
    """A peer cannot run a case here; the message says why."""


def _sdpa(backend: SDPBackend) -> Attention:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    return run


def attention_peers(device: torch.device) -> dict[str, Attention]:
    """Return the implementations that exist for `device`: name -> `f(q, k, v, causal)` for (B, H, S, D) tensors."""
    names = ["SDPA flash", "SDPA math"] if device.type == "cpu" else list(SDPA_PEERS)
    if device.type not in ("cpu", "cuda"):  # only CUDA and the CPU offer a choice of implementations
        return {"SDPA": lambda q, k, v, causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal)}
    return {name: _sdpa(SDPA_PEERS[name]) for name in names}


def check_peer(name: str, peer: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> None:
    """Run `peer` once. Raises PeerUnavailable with the reason if it refuses these inputs or would not fit."""
    if name == "SDPA math":
        scores = 2 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * max(4, q.element_size())
        if scores > MATH_LIMIT_BYTES:
            raise PeerUnavailable(f"stores the whole score matrix: {scores / 1024**3:.0f} GiB")
    try:
        peer(q, k, v, causal)
    except RuntimeError as error:
        raise PeerUnavailable(str(error).splitlines()[0]) from error
