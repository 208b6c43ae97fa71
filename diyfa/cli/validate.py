"""`diyfa validate`: this device's kernels against the float64 reference, under the error budget of the contract."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from rich.table import Table

from diyfa import explain, triton_matmul
from diyfa.bench.record import environment
from diyfa.cli.devices import device_for
from diyfa.cli.output import out, print_json, progress_bar
from diyfa.testing import (
    BUDGET_FACTOR,
    AttentionCase,
    Check,
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
    AttentionCase("window (32, 0)", heads=2, seqlen_q=192, head_dim=64, window=(32, 0)),
    AttentionCase("softcap", heads=2, seqlen_q=128, head_dim=64, softcap=20.0, causal=True),
    AttentionCase("ALiBi", heads=4, seqlen_q=128, head_dim=64, alibi="h", causal=True),
    AttentionCase("attn_bias with gradient", heads=2, seqlen_q=128, head_dim=64, bias="1hqk"),
    AttentionCase("sinks with gradient", heads=4, seqlen_q=128, head_dim=64, sinks=True, causal=True),
    AttentionCase("packed sequences", layout="thd", heads=2, lens_q=(128, 0, 65, 1), head_dim=64, causal=True),
    AttentionCase("dropout", heads=2, seqlen_q=128, head_dim=64, dropout_p=0.1, causal=True),
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
    """One line of the table. `share` is the largest error as a share of what is allowed, and `result` whose it is."""

    case: str
    status: str  # "pass", "FAIL", "refused"
    share: float | None = None
    result: str = ""
    kernel: str = ""
    reason: str = ""


def _attention(case: AttentionCase, device: torch.device, backend: str) -> Verdict:
    inputs = make_inputs(case, device)
    try:
        chosen = explain(inputs.q, inputs.k, inputs.v, layout=case.layout, backend=backend, **inputs.options)
    except ValueError as refusal:
        return Verdict(case.name, "refused", reason=str(refusal))
    results = run_case(attention_function(case, backend=backend), inputs)
    checks = check_budget(results, case, "cuda" if device.type == "cuda" else "cpu")
    name, check = max(checks.items(), key=lambda item: item[1].share)
    status = "pass" if check.share <= 1 else "FAIL"
    return Verdict(case.name, status, check.share, name, chosen.kernel, check.problem)


def _matmul(sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, backend: str) -> Verdict:
    m, n, k = sizes
    case = f"matmul {m}×{n}×{k}, {str(dtype).removeprefix('torch.')}"
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((m, k), (k, n)))
    try:
        c = triton_matmul(a.to(device), b.to(device), use_autotune=False, backend=backend).cpu()
    except ValueError as refusal:
        return Verdict(case, "refused", reason=str(refusal))
    expected = a.double() @ b.double()
    budget = error_budget(measure_error(a @ b, expected), rounding_unit(expected, dtype))
    share = Check(measure_error(c, expected), budget).share
    return Verdict(case, "pass" if share <= 1 else "FAIL", share, "c")


def _table(verdicts: list[Verdict], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("case", "kernel", "result", "worst", "error / allowed"):
        table.add_column(heading)
    styles = {"pass": None, "FAIL": "bold red", "refused": "yellow"}
    for v in verdicts:
        share = v.reason if v.share is None else f"{v.share:.2f}"
        table.add_row(v.case, v.kernel, v.status, v.result, share, style=styles[v.status])
    return table


def run(backend: str | None, json: bool) -> int:
    """Run every case; 0 when none fails and one at least passes, else 1. A refusal with its reason is no failure."""
    device, name = device_for(backend)
    verdicts = []
    with progress_bar(not json) as progress:
        task = progress.add_task(f"validating {name}", total=len(CASES) + len(MATMULS), note="")
        for case in CASES:
            progress.update(task, note=case.name)
            verdicts.append(_attention(case, device, name))
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
    out.print(_table(verdicts, f"backend {name} on {environment(device)['device']}"))
    out.print(
        f"Every result is compared with float64; allowed is {BUDGET_FACTOR:g}× the error of a plain FlashAttention (or "
        "PyTorch's product) in the same dtype, and one unit of the result's rounding.",
        highlight=False,
    )
    out.print(f"{counts['pass']} passed, {counts['FAIL']} failed, {counts['refused']} refused", highlight=False)
    return 0 if ok else 1
