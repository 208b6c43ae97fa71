"""`diyfa validate`: this device's kernels against the float64 reference, under the error budget of the contract."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch
from rich.table import Table

from diyfa import explain, kernels_for, triton_matmul
from diyfa.backends.npu.runtime import multibuffer
from diyfa.cli.devices import device_for
from diyfa.cli.output import out, print_json, progress_bar
from diyfa.cli.table import table
from diyfa.features import COMPOSABLE
from diyfa.lab.bench.record import environment
from diyfa.lab.first_run.cases import Step
from diyfa.lab.first_run.command import START_LIMIT_S, WORKER, Worker
from diyfa.registry import BATCH_INVARIANT_KERNEL, batch_invariant
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
    AttentionCase("score function", heads=2, seqlen_q=256, head_dim=64, causal=True, score_fn=True),
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


LIMIT_S = 600.0  # time limit of a case on an NPU, its compilation included


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


def attention_verdict(case: AttentionCase, variant: str, device: torch.device, backend: str) -> Verdict:
    """Return the verdict on a kernel for a case, in this process."""
    with batch_invariant() if variant == BATCH_INVARIANT_KERNEL else nullcontext():
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


def matmul_verdict(sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, backend: str) -> Verdict:
    """Return the verdict on a matrix product (M, N, K), in this process."""
    m, n, k = sizes
    case = _product_name(sizes, dtype)
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


def _product_name(sizes: tuple[int, int, int], dtype: torch.dtype) -> str:
    m, n, k = sizes
    return f"{m}x{n}x{k}, {str(dtype).removeprefix('torch.')}"


class Judge:
    """Verdicts in this process."""

    without_multibuffer = ""

    def __init__(self, device: torch.device, backend: str) -> None:
        self.device, self.backend = device, backend

    def attention(self, case: AttentionCase, variant: str) -> Verdict:
        return attention_verdict(case, variant, self.device, self.backend)

    def matmul(self, sizes: tuple[int, int, int], dtype: torch.dtype) -> Verdict:
        return matmul_verdict(sizes, dtype, self.device, self.backend)

    def close(self) -> None:
        """End the other process, if there is one."""


class WatchedJudge(Judge):
    """Verdicts from another process with a time limit, for NPUs: a kernel may hang, or leave its process unusable.

    A case that hangs, crashes or is wrong is tried once more without multibuffering. If that is right, it is kept for
    all later calls (`diyfa.backends.npu.runtime.multibuffer`).
    """

    def __init__(self, device: torch.device, backend: str, command: Sequence[str] = WORKER) -> None:
        super().__init__(device, backend)
        self._command = command
        self._worker: Worker | None = None
        self.without_multibuffer = multibuffer.state() or ""

    def attention(self, case: AttentionCase, variant: str) -> Verdict:
        step = Step("validate", case.name, "attention_verdict", {"case": asdict(case), "variant": variant})
        return self._judge(step, Verdict(case.name, variant, "FAIL"))

    def matmul(self, sizes: tuple[int, int, int], dtype: torch.dtype) -> Verdict:
        name = _product_name(sizes, dtype)
        arguments = {"sizes": list(sizes), "dtype": str(dtype).removeprefix("torch.")}
        return self._judge(Step("validate", name, "matmul_verdict", arguments), Verdict(name, "matmul", "FAIL"))

    def close(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def _judge(self, step: Step, failed: Verdict) -> Verdict:
        step = replace(step, arguments={**step.arguments, "backend": self.backend})
        first = self._attempt(step, failed)
        if first.status != "FAIL" or not multibuffer.may_try_without():
            return first
        again = self._attempt(replace(step, environment={multibuffer.VARIABLE: "0"}), failed)
        if again.status != "pass":
            return first
        with_it = first.reason or f"{first.share:.3g} times the allowed error of {first.result}"
        kept = multibuffer.keep_off(f"{first.kernel}, {first.case}: {with_it}")
        off = f"without multibuffering; no file can be written, so set {multibuffer.VARIABLE}=0"
        self.without_multibuffer = (multibuffer.state() if kept else off) or off
        self.close()  # the process has read that there was nothing to keep
        return replace(again, reason=f"right without multibuffering; with it: {with_it}")

    def _attempt(self, step: Step, failed: Verdict) -> Verdict:
        """Return the verdict of the process, or `failed` with the reason if there is none."""
        verdict = failed
        try:
            if self._worker is None:
                self._worker = Worker(self._command)
                self._worker.answer(START_LIMIT_S)
            for answer in self._worker.do(step, LIMIT_S):
                if "row" in answer:
                    verdict = Verdict(**answer["row"])
                elif "failed" in answer:
                    verdict = replace(failed, reason=answer["failed"])
        except (TimeoutError, EOFError) as error:
            verdict = replace(failed, reason=str(error))
        if verdict.status == "FAIL":  # an exception on the device may have left the process unusable
            self.close()
        return verdict


def _judge_for(device: torch.device, backend: str) -> Judge:
    """Return the judge for a backend on a device. Interpreted kernels neither hang nor are compiled."""
    watched = device.type == "npu" and backend == "npu" and os.environ.get("TRITON_INTERPRET", "0") != "1"
    return (WatchedJudge if watched else Judge)(device, backend)


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
    verdicts, judge = [], _judge_for(device, name)
    with progress_bar(not json) as progress, closing(judge):
        total = len(CASES) * len(variants) + len(MATMULS)
        task = progress.add_task(f"validating {name}", total=total, note="")
        for case, variant in product(CASES, variants):
            progress.update(task, note=f"{variant}: {case.name}")
            verdicts.append(judge.attention(case, variant))
            progress.advance(task)
        for sizes, dtype in MATMULS:
            progress.update(task, note="matmul")
            verdicts.append(judge.matmul(sizes, dtype))
            progress.advance(task)
    counts = {status: sum(v.status == status for v in verdicts) for status in ("pass", "FAIL", "refused")}
    ok = counts["FAIL"] == 0 and counts["pass"] > 0
    if json:
        document = {"backend": name, **environment(device), "ok": ok, "cases": [asdict(v) for v in verdicts]}
        if judge.without_multibuffer:
            document["without_multibuffer"] = judge.without_multibuffer
        print_json(document)
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
    if judge.without_multibuffer:
        out.print(f"Calls are compiled {judge.without_multibuffer}.", markup=False, highlight=False)
    out.print(f"{counts['pass']} passed, {counts['FAIL']} failed, {counts['refused']} refused", highlight=False)
    return 0 if ok else 1
