"""`diyfa validate`: this device's kernels against the float64 reference, under the error budget of the contract."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from rich.table import Table

from diyfa import explain, kernels_for, triton_matmul
from diyfa.cli.devices import device_for
from diyfa.cli.output import out, print_json, progress_bar
from diyfa.cli.table import table
from diyfa.features import COMPOSABLE
from diyfa.lab.bench.record import environment
from diyfa.registry import IN_THE_MODE, batch_invariant
from diyfa.testing import (
    BUDGET_FACTOR,
    AttentionCase,
    Check,
    Inputs,
    Results,
    attention_function,
    check_budget,
    error_budget,
    make_inputs,
    measure_error,
    rounding_unit,
    run_case,
)

CASES = (
    AttentionCase("float16, D = 64", heads=2, seqlen_q=256, head_dim=64),
    AttentionCase("float16, D = 64, causal", heads=2, seqlen_q=256, head_dim=64, causal=True),
    AttentionCase("bfloat16, D = 128, causal", heads=2, seqlen_q=256, head_dim=128, dtype="bfloat16", causal=True),
    AttentionCase("float32, D = 64, causal", heads=2, seqlen_q=192, head_dim=64, dtype="float32", causal=True),
    AttentionCase("bfloat16, D = 256", heads=1, seqlen_q=128, head_dim=256, dtype="bfloat16"),
    AttentionCase("odd sizes: S = 77, D = 40", heads=3, seqlen_q=77, head_dim=40, causal=True),
    AttentionCase("layout (B, S, H, D)", batch=2, heads=2, seqlen_q=128, head_dim=64, layout="bshd", causal=True),
    AttentionCase("more keys than queries, causal", heads=2, seqlen_q=64, seqlen_k=200, head_dim=64, causal=True),
    AttentionCase("grouped-query, 6 heads on 2", heads=6, heads_kv=2, seqlen_q=128, head_dim=64, causal=True),
    AttentionCase("seq_lens", batch=3, heads=2, seqlen_q=128, head_dim=64, seq_lens=(128, 65, 1), causal=True),
    *(AttentionCase(x.label, heads=4, seqlen_q=128, head_dim=64, causal=True, **x.case) for x in COMPOSABLE),
    AttentionCase("block mask", heads=2, seqlen_q=256, head_dim=64, mask="1h:64:0.5"),
    AttentionCase("packed sequences", layout="thd", heads=2, lens_q=(128, 0, 65, 1), head_dim=64, causal=True),
    AttentionCase("V of another D (192/128)", heads=2, seqlen_q=128, head_dim=192, head_dim_v=128, causal=True),
)
# (M, N, K), dtype
MATMULS = (
    ((256, 256, 256), torch.float16),
    ((256, 256, 256), torch.bfloat16),
    ((129, 65, 300), torch.float16),
)


@dataclass(frozen=True)
class Verdict:
    """The verdict on one case and one kernel.

    `share` is the largest error divided by the allowed error, `result` the tensor that has it. With `passes` "forward"
    the kernel has no backward pass for the case, so only its output and log-sum-exp were compared.
    """

    case: str
    kernel: str
    status: str  # "pass", "FAIL", "refused"
    share: float | None = None
    result: str = ""
    passes: str = ""  # "both", "forward"
    reason: str = ""  # reason of the refusal, of the failure, or of the missing backward pass


def _refusal(case: AttentionCase, inputs: Inputs, backend: str, variant: str) -> str | None:
    """Return why `variant` does not run the case (without its gradients inside `torch.no_grad()`), or None."""
    try:
        explain(inputs.q, inputs.k, inputs.v, layout=case.layout, backend=backend, variant=variant, **inputs.options)
    except ValueError as refusal:
        return str(refusal)
    return None


def _forward(attend: Callable[..., Any], inputs: Inputs) -> Results:
    out, lse = attend(*inputs.leaves, return_lse=True, **inputs.options)
    absent = torch.empty(0, device="cpu")
    return Results(out.cpu(), lse.cpu(), absent, absent, absent)


def _attention(case: AttentionCase, variant: str, device: torch.device, backend: str) -> Verdict:
    with batch_invariant() if variant == IN_THE_MODE else nullcontext():
        return _attention_by(case, variant, device, backend)


def _attention_by(case: AttentionCase, variant: str, device: torch.device, backend: str) -> Verdict:
    inputs = make_inputs(case, device)
    attend = attention_function(case, backend=backend, variant=variant)
    reason, passes = _refusal(case, inputs, backend, variant), "both"
    if reason is not None:
        with torch.no_grad():
            if _refusal(case, inputs, backend, variant) is not None:
                return Verdict(case.name, variant, "refused", reason=reason)
        passes = "forward"
    try:
        with torch.set_grad_enabled(passes == "both"):
            results = run_case(attend, inputs) if passes == "both" else _forward(attend, inputs)
    except Exception as error:  # a broken kernel gets a verdict, and the others still run
        return Verdict(case.name, variant, "FAIL", passes=passes, reason=f"{type(error).__name__}: {error}")
    checks = check_budget(results, case, "cuda" if device.type == "cuda" else "cpu")
    names = checks if passes == "both" else ("out", "lse")
    name = max(names, key=lambda name: checks[name].share)
    status = "pass" if checks[name].share <= 1 else "FAIL"
    reason = checks[name].problem or reason or ""
    return Verdict(case.name, variant, status, checks[name].share, name, passes, reason)


def _matmul(sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, backend: str) -> Verdict:
    m, n, k = sizes
    case = f"{m}x{n}x{k}, {str(dtype).removeprefix('torch.')}"
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator, device="cpu").to(dtype) for shape in ((m, k), (k, n)))
    try:
        c = triton_matmul(a.to(device), b.to(device), use_autotune=False, backend=backend).cpu()
    except ValueError as refusal:
        return Verdict(case, "matmul", "refused", reason=str(refusal))
    expected = a.double() @ b.double()
    budget = error_budget(measure_error(a @ b, expected), rounding_unit(expected, dtype))
    error_share = Check(measure_error(c, expected), budget).share
    return Verdict(case, "matmul", "pass" if error_share <= 1 else "FAIL", error_share, "c")


def _cell(verdict: Verdict) -> str:
    if verdict.share is None:
        return verdict.status if verdict.status == "refused" else f"[bold red]{verdict.status}[/]"
    text = f"{verdict.share:.2f} {verdict.result}"
    return text if verdict.status == "pass" else f"[bold red]{verdict.status} {text}[/]"


def _table(title: str, verdicts: list[Verdict]) -> Table:
    """Return a table with a row for each case and a column for each kernel."""
    cells = {(v.case, v.kernel): _cell(v) for v in verdicts}
    cases, kernels = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    return table(title, ["case", *kernels], [[case, *(cells[case, kernel] for kernel in kernels)] for case in cases])


def _print_reasons(verdicts: list[Verdict]) -> None:
    """Print every reason of a refusal or a failure once, with the kernel and its cases."""
    by_reason: dict[tuple[str, str, str], list[str]] = {}
    for v in verdicts:
        if v.reason:
            verdict = "forward only" if v.status == "pass" else v.status
            by_reason.setdefault((v.kernel, verdict, v.reason), []).append(v.case)
    for (kernel, verdict, reason), cases in by_reason.items():
        named = "every case" if len(cases) == sum(v.kernel == kernel for v in verdicts) else "; ".join(cases)
        out.print(f"{kernel}, {verdict}: {named}\n  {reason}", markup=False, highlight=False)


def run(backend: str | None, json: bool) -> int:
    """Run every case on every kernel. Return 0 if none fails (a refusal is no failure) and one passes, else 1."""
    device, name = device_for(backend)
    variants = kernels_for(name)
    verdicts = []
    with progress_bar(not json) as progress:
        total = len(CASES) * len(variants) + len(MATMULS)
        task = progress.add_task(f"validating {name}", total=total, note="")
        for case, variant in product(CASES, variants):
            progress.update(task, note=f"{variant}: {case.name}")
            verdicts.append(_attention(case, variant, device, name))
            progress.advance(task)
        for sizes, dtype in MATMULS:
            progress.update(task, note="matmul")
            verdicts.append(_matmul(sizes, dtype, device, name))
            progress.advance(task)
    counts = {status: sum(v.status == status for v in verdicts) for status in ("pass", "FAIL", "refused")}
    ok = counts["FAIL"] == 0 and counts["pass"] > 0
    if json:
        print_json({"backend": name, **environment(device), "ok": ok, "cases": [asdict(v) for v in verdicts]})
        return 0 if ok else 1
    out.print(f"backend {name} on {environment(device)['device']}", highlight=False)
    products = len(MATMULS)
    out.print(_table("attention, by kernel: error / allowed", verdicts[:-products]))
    out.print(_table("matrix product: error / allowed", verdicts[-products:]))
    _print_reasons(verdicts)
    out.print(
        "Shown is the result nearest to its limit, or beyond it. Every result is compared with float64; allowed is "
        f"{BUDGET_FACTOR:g} times the error of a plain FlashAttention (or PyTorch's product) in the same dtype, and "
        "one unit of the result's rounding.",
        highlight=False,
    )
    out.print(f"{counts['pass']} passed, {counts['FAIL']} failed, {counts['refused']} refused", highlight=False)
    return 0 if ok else 1
