"""The process that runs the steps of `diyfa first-run`. It reads steps from standard input and prints their results.

An exception on the device may leave a process unusable, and a kernel may hang, so the command watches this process.
Each direction has one JSON object a line. Answers are marked, because CANN prints to the same stream. After an
exception that is neither a compiler's nor a refusal, this process ends, and the command starts another.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from typing import Any

import torch

import diyfa
from diyfa.integrations.npu_fusion_arguments import compressed_mask, fusion_attention_arguments
from diyfa.integrations.npu_fusion_attention import npu_fusion_attention
from diyfa.lab.bench.record import environment
from diyfa.lab.bench.timing import compute_quantiles, device_module, synchronize, time_calls
from diyfa.lab.bench.work import BACKWARD_FACTOR, attention_flops, tflops
from diyfa.lab.first_run.cases import OperatorCase
from diyfa.problem import TriedTile
from diyfa.registry import load_backend
from diyfa.testing import AttentionCase, attention_function, check_budget, make_inputs, measure_error, run_case

MARK = "@diyfa "  # before each answer
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
# Work of a kernel's products, as a multiple of the forward pass's.
WORK = {"fwd": 1.0, "dkdv": 2.0, "dq": 1.5}

Row = dict[str, Any]


def answer(**fields: Any) -> None:
    """Send an answer to the command."""
    print(MARK + json.dumps(fields), flush=True)


def first_line(error: BaseException) -> str:
    """Return the error in one line. Of a compiler's message, take the line with the reason."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("///")] or [""]
    telling = [line for line in lines if "rror:" in line and "encounters error:" not in line]
    telling = [line for line in lines if "overflow" in line] or telling or lines
    return f"{type(error).__name__}: {' '.join(telling[0].split())[:400]}"


# ---- numerics ----------------------------------------------------------------------------------------------------


def _case(fields: dict[str, Any]) -> AttentionCase:
    """Return an AttentionCase from its fields in JSON, where tuples are lists."""
    arguments: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
    return AttentionCase(**arguments)


def numerics(device: torch.device, case: dict[str, Any], variant: str = "auto") -> Iterator[Row]:
    """Yield a row with the result, of outputs and gradients, that has the largest error relative to the allowed one."""
    described = _case(case)
    row = {"table": "numerics", "case": described.name, "variant": variant, "dtype": described.dtype}
    try:
        results = run_case(attention_function(described, variant=variant), make_inputs(described, device))
    except Exception as error:
        yield {**row, "status": "error", "reason": first_line(error)}
        raise
    name, check = max(check_budget(results, described).items(), key=lambda item: item[1].share)
    status = "pass" if check.share <= 1 else "FAIL"
    yield {**row, "status": status, "result": name, "share": check.share, "reason": check.problem}


def determinism(device: torch.device, case: dict[str, Any]) -> Iterator[Row]:
    """Yield a row that says whether two equal calls give bitwise equal outputs and gradients."""
    described = _case(case)
    row = {"table": "numerics", "case": described.name, "variant": "auto", "dtype": described.dtype}
    try:
        first, second = (run_case(attention_function(described), make_inputs(described, device)) for _ in range(2))
    except Exception as error:
        yield {**row, "status": "error", "reason": first_line(error)}
        raise
    pairs = zip(first._fields, first, second, strict=True)
    differ = [name for name, a, b in pairs if a is not None and b is not None and not torch.equal(a, b)]
    yield {**row, "status": "FAIL" if differ else "pass", "reason": f"differ: {differ}" if differ else ""}


# ---- the cases of `diyfa validate` ---------------------------------------------------------------------------------


def attention_verdict(device: torch.device, case: dict[str, Any], variant: str, backend: str) -> Iterator[Row]:
    """Yield the `Verdict` on one case and kernel of `diyfa validate`."""
    from diyfa.lab import validate

    yield asdict(validate.attention_verdict(_case(case), variant, device, backend))


def matmul_verdict(device: torch.device, sizes: list[int], dtype: str, backend: str) -> Iterator[Row]:
    """Yield the `Verdict` on one matrix product of `diyfa validate`."""
    from diyfa.lab import validate

    m, n, k = sizes
    yield asdict(validate.matmul_verdict((m, n, k), DTYPES[dtype], device, backend))


# ---- the vendor's operator ---------------------------------------------------------------------------------------


def vendors_operator(**arguments: Any) -> Any:
    """Call `torch_npu.npu_fusion_attention`."""
    import torch_npu

    return torch_npu.npu_fusion_attention(**arguments)


def operator_arguments(
    case: OperatorCase, sizes: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the arguments of `case`, with leaves that require gradients and equal values on every device and dtype."""
    generator = torch.Generator().manual_seed(0)
    heads, head_dim, seqlen_k = sizes["heads"], sizes["head_dim"], sizes["seqlen_k"]
    seqlen_q = {0: seqlen_k, -1: sizes["seqlen_q"]}[case.seqlen_q]
    heads_kv = case.heads_kv or heads

    def leaf(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu").half().to(dtype).to(device).requires_grad_()

    def arranged(s: int, n: int) -> torch.Tensor:
        shapes = {"BSH": (2, s, n * head_dim), "SBH": (s, 2, n * head_dim), "BSND": (2, s, n, head_dim)}
        return leaf(*shapes.get(case.layout, (2 * s, n, head_dim) if case.layout == "TND" else (2, n, s, head_dim)))

    arguments: dict[str, Any] = {
        "query": arranged(seqlen_q, heads), "key": arranged(seqlen_k, heads_kv), "value": arranged(seqlen_k, heads_kv),
        "head_num": heads, "input_layout": case.layout, "scale": head_dim**-0.5, "sparse_mode": case.sparse_mode,
        "pre_tockens": case.tokens[0], "next_tockens": case.tokens[1],
    }  # fmt: skip
    if case.layout == "TND":
        arguments["actual_seq_qlen"] = [seqlen_q // 3, 2 * seqlen_q]
        arguments["actual_seq_kvlen"] = [seqlen_k // 3, 2 * seqlen_k]
    if case.mask == "compressed":
        arguments["atten_mask"] = compressed_mask(device)
    elif case.mask == "dense":
        mask = torch.rand(2, 1, seqlen_q, seqlen_k, generator=generator, device="cpu") < 0.3
        mask[..., 0] = False  # every row has a key: the operator does not define rows without
        arguments["atten_mask"] = mask.to(device)
    if case.pse:
        arguments["pse"] = leaf(2, heads, seqlen_q, seqlen_k)
    if case.sink:
        arguments["sink"] = leaf(heads, dtype=torch.float32)
    return arguments


def operator_results(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return out, lse and the gradients of q, k, v, copied to the CPU in float64."""
    result = function(**arguments)
    out = result[0]
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), device="cpu").to(out.dtype).to(out.device)
    leaves = [arguments[name] for name in ("query", "key", "value")]
    gradients = torch.autograd.grad(out, leaves, dout)
    maximum, total = (x[..., 0].detach().cpu().double() for x in result[1:3])
    named = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    return {"lse": maximum + total.log(), **{name: x.cpu().double() for name, x in named.items()}}


def operator(device: torch.device, case: dict[str, Any], sizes: dict[str, Any]) -> Iterator[Row]:
    """Yield the largest errors of diyfa and of the operator on one call, both against float64.

    If the error of `torch_npu` is far above that of `diyfa`, docs/npu-fusion-attention.md is wrong.
    """

    def on_the_cpu(**arguments: Any) -> Any:
        return npu_fusion_attention(**arguments, backend="cpu")

    described = OperatorCase(**{**case, "tokens": tuple(case["tokens"])})
    truth = operator_results(on_the_cpu, operator_arguments(described, sizes, torch.device("cpu"), torch.float64))
    failed: list[Exception] = []
    for who, function in (("diyfa", npu_fusion_attention), ("torch_npu", vendors_operator)):
        row = {"table": "equivalence", "case": described.name, "dtype": "float16", "implementation": who}
        try:
            arguments = operator_arguments(described, sizes, device, torch.float16)
            results = operator_results(function, arguments)
        except Exception as error:
            yield {**row, "unavailable": f"refused: {first_line(error)}"}
            failed.append(error)
            continue
        # By default, the operator stores the statistics of TND with heads first.
        names = [name for name in truth if not (name == "lse" and described.layout == "TND")]
        errors = {name: measure_error(results[name], truth[name]).max_abs for name in names}
        yield {**row, "max_error": errors}
    if failed:
        raise failed[0]


# ---- time --------------------------------------------------------------------------------------------------------


class Timed:
    """The tensors of one size to be timed, q, k, v (B, H, S, D), and the operations of the forward pass."""

    def __init__(self, device: torch.device, size: dict[str, Any]) -> None:
        self.device, self.causal, self.dtype = device, size.get("causal", False), size["dtype"]
        self.seq_len, self.head_dim = size["seq_len"], size["head_dim"]
        self.warmup, self.rep = size["warmup"], size["rep"]
        self.batch, self.heads = max(1, size["tokens"] // self.seq_len), max(1, size["hidden"] // self.head_dim)
        torch.manual_seed(0)
        shape = (self.batch, self.heads, self.seq_len, self.head_dim)
        *leaves, self.dout = (torch.randn(shape, device="cpu").to(DTYPES[self.dtype]).to(device) for _ in range(4))
        self.leaves = [x.requires_grad_() for x in leaves]
        self.flops = attention_flops(self.batch, self.heads, self.seq_len, self.seq_len, self.head_dim, self.causal)
        self.row = {
            "B": self.batch, "H": self.heads, "S": self.seq_len, "D": self.head_dim, "causal": self.causal,
            "dtype": self.dtype,
        }  # fmt: skip

    def passes(self, through: str = "") -> dict[str, Callable[[], Any]]:
        """Return the two passes of diyfa, without launching anything. `through`: the dtype that inputs are converted
        to; the output and the gradients are converted back."""

        def attend() -> Any:
            q, k, v = (x.to(DTYPES[through]) if through else x for x in self.leaves)
            out: Any = diyfa.flash_attention(q, k, v, self.causal)
            return out.to(DTYPES[self.dtype]) if through else out

        def forward() -> None:
            with torch.no_grad():
                attend()

        output = cache(attend)

        def backward() -> Any:
            return torch.autograd.grad(output(), self.leaves, self.dout, retain_graph=True)

        return {"forward": forward, "backward": backward}

    def times(self, passes: dict[str, Callable[[], Any]]) -> Iterator[Row]:
        """Yield the milliseconds and TFLOP/s of each pass."""
        for direction, fn in passes.items():
            work = self.flops * (BACKWARD_FACTOR if direction == "backward" else 1)
            ms, p20, p80 = compute_quantiles(time_calls(fn, self.device, self.warmup, self.rep))
            yield {"pass": direction, "ms": ms, "ms_p20": p20, "ms_p80": p80, "tflops": tflops(work, ms)}


def dtype(device: torch.device, through: str = "", **size: Any) -> Iterator[Row]:
    """Time both passes in one dtype, or computed through another dtype."""
    timed = Timed(device, size)
    implementation = f"diyfa, {timed.dtype}" + (f" through {through}" if through else "")
    for time in timed.times(timed.passes(through)):
        yield {"table": "dtypes", **timed.row, "through": through, "implementation": implementation, **time}


def vendors_passes(leaves: list[torch.Tensor], causal: bool) -> dict[str, Callable[[], Any]]:
    """Return the two passes of `torch_npu.npu_fusion_attention` on the same tensors."""
    q, k, v = leaves
    arguments = fusion_attention_arguments(q, k, v, causal)
    out = vendors_operator(**arguments)[0]
    dout = torch.randn(out.shape, device="cpu").to(out.dtype).to(out.device)

    def forward() -> None:
        with torch.no_grad():
            vendors_operator(**arguments)

    return {"forward": forward, "backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)}


def speed(device: torch.device, implementation: str, **size: Any) -> Iterator[Row]:
    """Time both passes of one implementation."""
    load_backend("npu").tuning.enabled = implementation == "diyfa tuned"  # type: ignore[attr-defined]
    timed = Timed(device, size)
    row = {"table": "attention", **timed.row, "implementation": implementation}
    try:
        theirs = implementation == "torch_npu"
        passes = vendors_passes(timed.leaves, timed.causal) if theirs else timed.passes()
        for time in timed.times(passes):
            yield {**row, **time}
    except Exception as error:
        yield {**row, "unavailable": f"refused: {first_line(error)}"}
        raise


def tiles(device: torch.device, without: list[dict[str, Any]] | None = None, **size: Any) -> Iterator[Row]:
    """Time every candidate tile of every kernel, and store the fastest for later calls. Each candidate has a row.

    `without`: candidates at which an earlier process ended.
    """
    tuning = load_backend("npu").tuning  # type: ignore[attr-defined]
    tuning.enabled = True
    if reason := tuning.unavailable():
        yield {"table": "tiles", "kernel": "all", "unavailable": reason}
        return
    timed = Timed(device, size)
    rows_by_tile: dict[str, Row] = {}

    def watch(tried: TriedTile) -> None:
        kernel = tried.kernel.removeprefix("attention_")
        config = {name: x for name, x in tried.config.items() if name != "measured"}
        row = {"table": "tiles", "kernel": kernel, **timed.row, "default": tried.default, **config}
        begins = tried.milliseconds is None and not tried.reason
        answer(trying=tried.config if begins else None, row=row)
        if tried.milliseconds is not None:
            ms = tried.milliseconds
            rows_by_tile[f"{kernel} {config}"] = {**row, "ms": ms, "tflops": tflops(timed.flops * WORK[kernel], ms)}
        elif not begins:
            rows_by_tile[f"{kernel} {config}"] = {**row, "unavailable": first_line(RuntimeError(tried.reason))}

    with tuning.measuring(watch, without or ()):
        for call in timed.passes().values():
            call()
    yield from rows_by_tile.values()


# ---- the process -------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[..., Iterator[Row]]] = {
    "numerics": numerics, "determinism": determinism, "operator": operator, "dtype": dtype, "speed": speed,
    "tiles": tiles, "attention_verdict": attention_verdict, "matmul_verdict": matmul_verdict,
}  # fmt: skip


def _is_harmless(error: Exception) -> bool:
    """Return whether the error cannot have affected the device: a refusal of diyfa or of a compiler."""
    refused = isinstance(error, (ValueError, TypeError, NotImplementedError, ImportError, torch.OutOfMemoryError))
    return refused or "does not compile" in str(error)


def do(step: dict[str, Any], device: torch.device) -> bool:
    """Run one step. Return whether this process may run the next."""
    previous = dict(os.environ)
    os.environ.update(step["environment"])
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", RuntimeWarning)
            for row in KINDS[step["kind"]](device, **step["arguments"]):
                answer(row=row)
        synchronize(device)
    except Exception as error:
        answer(failed=first_line(error))
        return _is_harmless(error)
    finally:
        for text in dict.fromkeys(str(w.message) for w in warned):
            if "conservative tile" in text:
                answer(replaced=text)
        os.environ.clear()
        os.environ.update(previous)
    return True


def main() -> int:
    """Run steps until there are no more or this process should end."""
    import torch_npu  # noqa: F401  # registers the device if autoloading is off

    device = torch.device("npu", device_module(torch.device("npu")).current_device())
    chip = asdict(diyfa.detect_npu(device.index or 0))
    chip["arch"] = chip["arch"].value
    answer(ready={**environment(device), "chip": chip})
    for line in sys.stdin:
        can_continue = do(json.loads(line), device)
        answer(done=True, can_continue=can_continue)
        if not can_continue:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
