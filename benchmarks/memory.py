"""Peak memory of attention by sequence length: linear for diyfa, quadratic where the scores are stored.

    python benchmarks/memory.py [--seq-lens 8192 16384 32768 65536]

The last column is the growth from the line above: 2 for twice the length is linear, 4 quadratic.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diyfa import flash_attention
from diyfa.bench.peers import PeerUnavailable, attention_peers, check_peer
from diyfa.bench.record import default_path, device_name, write_json
from diyfa.bench.timing import peak_memory_mb
from diyfa.device import default_backend

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[8192, 16384, 32768, 65536])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--device", default=None)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    device = torch.device(arguments.device or default_backend())
    backend = "cpu" if device.type == "cpu" else None
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

    def diyfa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Any:
        return flash_attention(q, k, v, causal=causal, backend=backend)

    attentions: dict[str, Callable[..., Any]] = {"diyfa": diyfa, **attention_peers(device)}
    rows: list[dict[str, Any]] = []
    previous: dict[tuple[str, str], float] = {}
    print(f"{device_name(device)}, (B, H, D) = (1, {arguments.heads}, {arguments.head_dim}), causal, {dtype}")
    print(f"{'implementation':16}{'pass':22}{'S':>7}{'peak MiB':>12}{'growth':>9}")
    for seq_len in arguments.seq_lens:
        shape = (1, arguments.heads, seq_len, arguments.head_dim)
        for name, attend in attentions.items():
            q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
            row = {"implementation": name, "S": seq_len}
            try:
                check_peer(name, attend, q[:, :, :64], k[:, :, :64], v[:, :, :64], True)
                if name == "SDPA math":
                    check_peer(name, attend, q, k, v, True)
            except PeerUnavailable as reason:
                rows.append({**row, "unavailable": str(reason)})
                print(f"{name:16}{'':22}{seq_len:>7}  {reason}")
                continue

            def forward(attend: Callable[..., Any] = attend, q: Any = q, k: Any = k, v: Any = v) -> Any:
                with torch.no_grad():
                    return attend(q, k, v, True)

            def train(attend: Callable[..., Any] = attend, q: Any = q, k: Any = k, v: Any = v) -> Any:
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                out = attend(*leaves, True)
                return torch.autograd.grad(out, leaves, torch.ones_like(out))

            for what, fn in (("forward", forward), ("forward and backward", train)):
                if device.type != "cpu":
                    fn()  # a first call may tune its tiles, with buffers of the timer's own
                peak = peak_memory_mb(fn, device)
                growth = peak / previous[name, what] if (name, what) in previous else None
                previous[name, what] = peak
                rows.append({**row, "pass": what, "peak_mib": peak})
                print(f"{name:16}{what:22}{seq_len:>7}{peak:>12.1f}" + ("" if growth is None else f"{growth:>9.2f}"))
    path = arguments.output or default_path("memory", device, RESULTS)
    write_json(path, "memory", device, rows)
    print(path)


if __name__ == "__main__":
    main()
