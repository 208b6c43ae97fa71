"""Benchmark of attention over a KV cache against PyTorch's and FlashAttention's, with the bandwidth of its reads.

    python benchmarks/decode.py [--tables decode paged ragged float8 mla mode tiny host]

Each call is captured in a CUDA graph, so that the host costs nothing, and replayed with a cold L2. Calls alternate.
GB/s count the keys and values within the lengths. "ratio" is the best peer's time divided by ours, or the first row's
time for each key divided by this row's. Peers that are not installed or refuse a case are left out. Tables:

    decode  one new token of 32 query heads over 8 of 128 features, contiguous, beside SDPA (FlashAttention-2 and cuDNN)
            and FlashAttention-3's flash_attn_with_kvcache
    paged   pages of 1 to 256 tokens in random order, beside contiguous rows
    ragged  lengths from 100 to 32k, beside a batch of equal lengths with as many keys
    float8  a cache of float8_e4m3fn, beside bfloat16
    mla     128, 64 and 16 query heads over one latent cache of 576 features, the first 512 of which are the values
    mode    inside diyfa.batch_invariant(), beside outside
    tiny    one sequence of 1024 keys
    host    microseconds of the host for an eager call

Writes one JSON file with device, date and versions to benchmarks/results/.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from host_overhead import host_microseconds
from torch.nn.attention import SDPBackend, sdpa_kernel

import diyfa
from diyfa.device import default_backend
from diyfa.lab.bench.record import default_path, device_name, write_json
from diyfa.lab.bench.timing import compute_quantiles, synchronize, time_calls

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Call:
    """A call to time and its context. `host_rows` enters the context once: that costs the host more than the call."""

    run: Callable[[], Any]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __call__(self) -> Any:
        with self.context():
            return self.run()


@dataclass(frozen=True)
class Setup:
    """The settings of all tables. `shrink` divides lengths, to try the benchmark without a GPU."""

    device: torch.device
    rounds: int
    warmup: int
    rep: int
    shrink: int


@dataclass(frozen=True)
class Case:
    """The sizes of one call: one or several new tokens for each sequence."""

    name: str
    lens: tuple[int, ...]
    heads: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    head_dim_v: int = 128
    seqlen_q: int = 1
    page_size: int = 0
    float8: bool = False
    latent: bool = False
    mode: bool = False  # diyfa.batch_invariant

    @property
    def bytes_read(self) -> int:
        columns = self.head_dim + (0 if self.latent else self.head_dim_v)
        return sum(self.lens) * self.heads_kv * columns * (1 if self.float8 else 2)

    @property
    def flops(self) -> int:
        return 2 * sum(self.lens) * self.seqlen_q * self.heads * (self.head_dim + self.head_dim_v)


def caches(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return keys, values and the page table, or None for contiguous rows."""
    longest, batch, page = max(case.lens), len(case.lens), case.page_size
    table, shape = None, (batch, longest)
    if page:
        columns = -(-longest // page)
        order = torch.randperm(batch * columns, generator=torch.Generator().manual_seed(0))
        table, shape = order.reshape(batch, columns).int().to(device), (batch * columns, page)
    dtype = torch.float8_e4m3fn if case.float8 else torch.bfloat16
    k = torch.randn(*shape, case.heads_kv, case.head_dim, device=device, dtype=torch.bfloat16).to(dtype)
    if case.latent:
        return k, k[..., : case.head_dim_v], table
    v = torch.randn(*shape, case.heads_kv, case.head_dim_v, device=device, dtype=torch.bfloat16).to(dtype)
    return k, v, table


def sdpa(which: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    """Return a call of PyTorch's SDPA over whole rows of the cache."""
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    return Call(lambda: F.scaled_dot_product_attention(*heads_first, enable_gqa=True), lambda: sdpa_kernel(which))


def flash_attention_3() -> Any:
    """Return FlashAttention-3's module, from its own build or the package fa3-fwd, or None."""
    for name in ("fa3_fwd_interface", "flash_attn_interface"):
        with suppress(ImportError):
            return import_module(name)
    return None


def calls_of(case: Case, setup: Setup, peers: bool) -> dict[str, Call]:
    """Return {name: call}, all on the same tensors, ours first."""
    device = setup.device
    k, v, table = caches(case, device)
    q = torch.randn(len(case.lens), case.seqlen_q, case.heads, case.head_dim, device=device, dtype=torch.bfloat16)
    lens = torch.tensor(case.lens, dtype=torch.int32, device=device)
    backend = "cpu" if device.type == "cpu" else "cuda" if device.type == "cuda" else "npu"
    descales = {}
    if case.float8:  # tensors: a number would be made one by each call
        descales = {
            "k_descale": torch.full((1,), 0.5, device=device),
            "v_descale": torch.full((1,), 0.5, device=device),
        }

    def ours() -> Any:
        return diyfa.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, block_table=table, causal=True, **descales)

    @contextmanager
    def chosen() -> Iterator[None]:
        with diyfa.use_backend(backend), diyfa.batch_invariant() if case.mode else nullcontext():
            yield

    found = {"diyfa": Call(ours, chosen)}
    if not peers:
        return found
    if table is None and not case.float8 and len(set(case.lens)) == 1 and case.seqlen_q == 1:
        found["SDPA flash"] = sdpa(SDPBackend.FLASH_ATTENTION, q, k, v)
        found["SDPA cuDNN"] = sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v)
    fa3 = flash_attention_3()
    if fa3 is not None and not case.float8 and not case.latent:
        found["FA3"] = Call(
            lambda: fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, page_table=table, causal=True)
        )
    return found


def captured(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Return a replay of the call's CUDA graph, or the call itself on other devices."""
    if device.type != "cuda":
        return call
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay() -> Any:
        graph.replay()
        return kept

    return replay


def time_in_turns(setup: Setup, calls: dict[str, Call]) -> dict[str, float]:
    """Return {name: median milliseconds} of the calls that do not refuse. They alternate, to run at the same clocks."""
    ready: dict[str, Callable[[], Any]] = {}
    for name, call in calls.items():
        try:
            ready[name] = captured(call, setup.device)
            ready[name]()
            synchronize(setup.device)
        except (RuntimeError, TypeError, ValueError) as error:
            if name.startswith("diyfa"):
                raise
            print(f"{name} is left out: {str(error).splitlines()[0]}")
            ready.pop(name, None)
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(setup.rounds):
        for name, call in ready.items():
            times[name] += time_calls(call, setup.device, setup.warmup, setup.rep)
    return {name: compute_quantiles(found)[0] for name, found in times.items()}


def shortened(case: Case, setup: Setup) -> Case:
    return replace(case, lens=tuple(max(1, n // setup.shrink) for n in case.lens))


def against_peers(setup: Setup, cases: list[Case]) -> Iterator[dict[str, Any]]:
    """Yield each case with its peers; the ratio is the best peer's time divided by ours."""
    for case in (shortened(case, setup) for case in cases):
        times = time_in_turns(setup, calls_of(case, setup, peers=True))
        best = min((ms for name, ms in times.items() if name != "diyfa"), default=None)
        for name, ms in times.items():
            yield {
                "case": case.name, "implementation": name, "ms": ms, "GB/s": case.bytes_read / ms / 1e6,
                "TFLOP/s": case.flops / ms / 1e9, "ratio": best / ms if best is not None else None,
            }  # fmt: skip


def against_first(setup: Setup, cases: list[Case]) -> Iterator[dict[str, Any]]:
    """Yield our time in each case, all alternating; the ratio is of the speed for each key, to the first case's."""
    cases = [shortened(case, setup) for case in cases]
    times = time_in_turns(setup, {f"diyfa {c.name}": calls_of(c, setup, peers=False)["diyfa"] for c in cases})
    first = times[f"diyfa {cases[0].name}"] / sum(cases[0].lens)
    for case in cases:
        ms = times[f"diyfa {case.name}"]
        yield {
            "case": case.name, "implementation": "diyfa", "ms": ms, "GB/s": case.bytes_read / ms / 1e6,
            "TFLOP/s": case.flops / ms / 1e9, "ratio": first * sum(case.lens) / ms,
        }  # fmt: skip


SIZES = [(1, 8192), (1, 131072), (8, 8192), (8, 32768), (64, 8192), (128, 2048)]


def size_cases() -> list[Case]:
    return [Case(f"B={batch} S={n}", (n,) * batch) for batch, n in SIZES]


def decode_rows(setup: Setup) -> Iterator[dict[str, Any]]:
    return against_peers(setup, size_cases())


def paged_rows(setup: Setup) -> Iterator[dict[str, Any]]:
    for batch, n in ((64, 8192), (8, 32768)):
        one = Case(f"B={batch} S={n} contiguous", (n,) * batch)
        pages = [replace(one, name=f"B={batch} S={n} page {page}", page_size=page) for page in (256, 128, 64, 16, 1)]
        yield from against_first(setup, [one, *pages])
    yield from against_peers(setup, [Case("B=64 S=8192 page 64", (8192,) * 64, page_size=64)])


def ragged_rows(setup: Setup) -> Iterator[dict[str, Any]]:
    batch = 32
    lens = [round(100 * (32768 / 100) ** (i / (batch - 1))) for i in range(batch)]
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(0)).tolist()
    equal = Case("equal lengths", (sum(lens) // batch,) * batch)
    ragged = Case("ragged, 100 to 32768", tuple(lens[i] for i in order))
    yield from against_first(setup, [equal, ragged, replace(ragged, name="ragged, page 16", page_size=16)])
    yield from against_peers(setup, [ragged])


def float8_rows(setup: Setup) -> Iterator[dict[str, Any]]:
    for batch, n in ((8, 32768), (64, 8192)):
        half = Case(f"B={batch} S={n} bfloat16", (n,) * batch)
        yield from against_first(setup, [half, replace(half, name=f"B={batch} S={n} float8", float8=True)])


def mla_rows(setup: Setup) -> Iterator[dict[str, Any]]:
    latent = Case("", (4096,) * 64, 128, 1, 576, 512, latent=True)
    cases = [replace(latent, seqlen_q=seqlen_q, page_size=page_size) for seqlen_q in (1, 2) for page_size in (0, 64)]
    cases += [replace(latent, lens=(size,) * batch) for batch, size in ((132, 8192), (4, 32768), (1, 4096))]
    cases += [replace(latent, heads=64), replace(latent, heads=16)]
    for case in cases:
        name = f"B={len(case.lens)} S={case.lens[0]} Sq={case.seqlen_q} H={case.heads}"
        name += f" page {case.page_size}" if case.page_size else ""
        yield from against_peers(setup, [replace(case, name=name)])


def mode_rows(setup: Setup) -> Iterator[dict[str, Any]]:
    for case in size_cases():
        yield from against_first(setup, [case, replace(case, name=f"{case.name} batch-invariant", mode=True)])


def tiny_rows(setup: Setup) -> Iterator[dict[str, Any]]:
    return against_peers(setup, [Case("B=1 S=1024", (1024,)), Case("B=1 S=1024 page 16", (1024,), page_size=16)])


def host_rows(setup: Setup) -> Iterator[dict[str, Any]]:
    case = Case("B=1 S=128", (128,))
    for name, call in calls_of(case, setup, peers=True).items():
        try:
            with call.context():
                microseconds = host_microseconds(call.run, setup.device, 100, 11)
        except RuntimeError as error:
            print(f"{name} is left out: {str(error).splitlines()[0]}")
            continue
        pass_ = "one token over a cache"
        yield {"case": case.name, "implementation": name, "pass": pass_, "host_us": microseconds}


TABLES = {
    "decode": decode_rows,
    "paged": paged_rows,
    "ragged": ragged_rows,
    "float8": float8_rows,
    "mla": mla_rows,
    "mode": mode_rows,
    "tiny": tiny_rows,
    "host": host_rows,
}


def print_row(row: dict[str, Any]) -> None:
    start = f"{row['table']:8}{row['case']:32}{row['implementation']:12}"
    if "host_us" in row:
        print(f"{start}{row['host_us']:9.1f} us on the host", flush=True)
        return
    ratio = "" if row["ratio"] is None else f"{row['ratio']:8.3f} x"
    print(f"{start}{row['ms'] * 1e3:9.1f} us{row['GB/s']:9.0f} GB/s{row['TFLOP/s']:8.1f} TFLOP/s{ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", choices=TABLES, nargs="+", default=list(TABLES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=5, help="calls before each round's measurement")
    parser.add_argument("--rep", type=int, default=20, help="calls of each round")
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths, to try this without a GPU")
    parser.add_argument("--device", default=None, help="cuda or npu; default: what is here")
    parser.add_argument("--output", type=Path, default=None, help="JSON file; default: benchmarks/results/…")
    arguments = parser.parse_args()
    device = torch.device(arguments.device or default_backend())
    setup = Setup(device, arguments.rounds, arguments.warmup, arguments.rep, arguments.shrink)
    print(device_name(device))
    rows: list[dict[str, Any]] = []
    for name in arguments.tables:
        for row in TABLES[name](setup):
            kind = "host" if "host_us" in row else "decode"
            rows.append({"kind": kind, "table": name, **row})
            print_row(rows[-1])
    path = arguments.output or default_path("decode", device, RESULTS)
    write_json(path, "decode", device, rows, shrink=arguments.shrink)
    print(path)


if __name__ == "__main__":
    main()
