"""diyfa inside the real torch_npu: dispatch, autograd, streams, two devices, timers, torch.compile, commands.

The kernels run in Triton's interpreter; what is tested is that torch_npu and diyfa agree on where and when they run.
"""

from __future__ import annotations

import importlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import npu_interpreter
import pytest
import torch
from npu_interpreter import LAUNCHES, HostArithmetic
from subprocesses import run_python
from torch.utils.checkpoint import checkpoint

import diyfa
from diyfa.lab.bench import timing
from diyfa.testing import AttentionCase, assert_within_budget, attention_function, make_inputs, run_case
from diyfa.validation import is_capturing

if os.environ.get("DIYFA_HOST_SHIM") != "1":  # and without torch_npu there is no device called npu
    pytest.skip("reads what the shim records", allow_module_level=True)
CASE = AttentionCase("one tile", batch=1, heads=2, seqlen_q=20, seqlen_k=24, head_dim=16, causal=True)
SECOND = torch.device("npu", 1)


@pytest.fixture(autouse=True)
def clean_device(npu: torch.device) -> Iterator[None]:
    """Every test begins and must end on npu:0 and its default stream, with no launch noted."""
    LAUNCHES.clear()
    yield
    assert torch.npu.current_device() == 0
    assert torch.npu.current_stream() == torch.npu.default_stream()


def inputs(device: torch.device | str, dtype: torch.dtype = torch.float16, seqlen: int = 20) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, seqlen, 16, generator=generator).to(dtype).to(device) for _ in range(3)]


def trained(attend: Callable[..., torch.Tensor], leaves: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Output and gradients, on the CPU."""
    out = attend(*leaves, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype).to(out.device)
    gradients = torch.autograd.grad(out, leaves, dout)
    assert all(g.device == x.device for g, x in zip(gradients, leaves, strict=True))
    return [x.detach().cpu() for x in (out, *gradients)]


def leaves(device: torch.device | str, **options: Any) -> list[torch.Tensor]:
    return [x.requires_grad_() for x in inputs(device, **options)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- dispatch and autograd ---------------------------------------------------------------------------------------


def test_gradients_accumulate_on_the_device(npu: torch.device) -> None:
    """backward() twice: the engine adds on the device, after diyfa's kernels."""
    q, k, v = leaves(npu)
    dout = torch.ones(q.shape, dtype=q.dtype).to(npu)
    with HostArithmetic():
        diyfa.flash_attention(q, k, v).backward(dout)
        once = [x.grad.cpu().clone() for x in (q, k, v)]
        diyfa.flash_attention(q, k, v).backward(dout)
    for x, first in zip((q, k, v), once, strict=True):
        assert x.grad.device == npu
        torch.testing.assert_close(x.grad.cpu(), 2 * first)


def test_packed_gradient_is_one_tensor(npu: torch.device) -> None:
    """The gradient of a packed QKV is written by the kernels into one tensor of its shape."""
    packed = torch.stack([x.transpose(1, 2) for x in inputs("cpu")], 2).to(npu).requires_grad_()
    out = diyfa.flash_attn_qkvpacked_func(packed, causal=True)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    (gradient,) = torch.autograd.grad(out, packed, dout.to(npu))
    assert gradient.shape == packed.shape and gradient.is_contiguous() and gradient.device == npu
    separate = [x.transpose(1, 2).contiguous().requires_grad_() for x in inputs(npu)]
    out = diyfa.flash_attn_func(*separate, causal=True)
    expected = torch.autograd.grad(out, separate, dout.to(npu))
    assert same([x.cpu() for x in gradient.unbind(2)], [x.cpu() for x in expected])


def test_autocast(npu: torch.device) -> None:
    q = inputs(npu, torch.float32)
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert diyfa.flash_attention(*q).dtype == torch.bfloat16
    assert diyfa.flash_attention(*q).dtype == torch.float32


def test_checkpointing_repeats_the_dropout_mask(npu: torch.device) -> None:
    """The mask is drawn from the device's generator, whose state checkpointing restores."""

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return diyfa.flash_attention(*tensors, dropout_p=0.4)

    def again(*tensors: torch.Tensor) -> torch.Tensor:
        return checkpoint(attend, *tensors, use_reentrant=False)

    torch.manual_seed(5)  # the shim draws the device's numbers from the host's generator
    plain = trained(attend, leaves(npu))
    torch.manual_seed(5)
    assert same(trained(again, leaves(npu)), plain)


def test_threads(npu: torch.device) -> None:
    expected = trained(diyfa.flash_attention, leaves(npu))
    found: dict[int, list[torch.Tensor]] = {}

    def work(i: int) -> None:
        torch.npu.set_device(i % 2)
        found[i] = trained(diyfa.flash_attention, leaves(torch.device("npu", i % 2)))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:  # one after the other: the interpreter itself is not reentrant
        thread.start()
        thread.join()
    assert all(same(found[i], expected) for i in range(2))
    assert {launch.device for launch in LAUNCHES} == {0, 1}


# ---- streams -----------------------------------------------------------------------------------------------------


def test_launches_go_to_the_current_stream(npu: torch.device) -> None:
    """Forward in a side stream, and the backward pass where the forward ran, as PyTorch's engine promises."""
    side = torch.npu.Stream()
    assert side != torch.npu.default_stream()
    expected = trained(diyfa.flash_attention, leaves(npu))
    assert {launch.stream for launch in LAUNCHES} == {torch.npu.default_stream().npu_stream}
    LAUNCHES.clear()
    tensors = leaves(npu)
    with torch.npu.stream(side):
        out = diyfa.flash_attention(*tensors)
    assert {launch.stream for launch in LAUNCHES} == {side.npu_stream}
    torch.npu.current_stream().wait_stream(side)
    out.record_stream(torch.npu.current_stream())
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype).to(npu)
    forward = len(LAUNCHES)
    gradients = torch.autograd.grad(out, tensors, dout)
    backward = list(LAUNCHES)[forward:]
    assert len(backward) >= 3 and {launch.stream for launch in backward} == {side.npu_stream}
    assert same([x.detach().cpu() for x in (out, *gradients)], expected)


def test_no_capture_is_running(npu: torch.device) -> None:
    assert not is_capturing(inputs(npu)[0])


# ---- two devices -------------------------------------------------------------------------------------------------


def test_a_call_runs_where_its_tensors_are(npu: torch.device) -> None:
    """npu:0 is current, the tensors lie on npu:1: kernels are launched there, forward and backward."""
    assert torch.npu.device_count() == 2 and torch.npu.current_device() == 0
    expected = trained(diyfa.flash_attention, leaves(npu), causal=True)
    LAUNCHES.clear()
    assert same(trained(diyfa.flash_attention, leaves(SECOND), causal=True), expected)
    assert len(LAUNCHES) >= 4 and {launch.device for launch in LAUNCHES} == {1}
    assert {launch.stream for launch in LAUNCHES} == {torch.npu.default_stream(1).npu_stream}


@pytest.mark.parametrize("features", ["bias", "varlen", "dropout"])
def test_features_on_the_second_device(npu: torch.device, features: str) -> None:
    changes: dict[str, Any] = {
        "bias": {"bias": "1hqk", "sinks": True},
        "varlen": {"layout": "thd", "lens_q": (9, 0, 5), "alibi": "h"},
        "dropout": {"dropout_p": 0.3, "window": (7, 2)},
    }[features]
    sizes = {} if features == "varlen" else {"seqlen_q": 20}
    case = AttentionCase(features, heads=2, head_dim=16, **sizes, **changes)
    assert_within_budget(run_case(attention_function(case), make_inputs(case, SECOND)), case)
    assert {launch.device for launch in LAUNCHES} == {1}


def test_device_contexts(npu: torch.device) -> None:
    q = inputs("npu:1")
    with torch.npu.device(1):
        out = diyfa.flash_attention(*q)
        assert torch.npu.current_device() == 1
        on_first = diyfa.flash_attention(*inputs(npu))
        assert torch.npu.current_device() == 1, "a call leaves the current device as it was"
    assert (out.device.index, on_first.device.index) == (1, 0)
    assert [launch.device for launch in LAUNCHES] == [1, 0]
    a = torch.randn(32, 16).half().to(SECOND)
    assert diyfa.triton_matmul(a, a.t()).device == SECOND and LAUNCHES[-1].device == 1


def test_two_devices_in_one_call_are_refused(npu: torch.device) -> None:
    q, k, v = inputs(npu)
    with pytest.raises(ValueError, match="same device: q is on npu:0, k on npu:1"):
        diyfa.flash_attention(q, k.to(SECOND), v)
    assert not LAUNCHES


def test_a_launch_elsewhere_would_be_noticed(npu: torch.device) -> None:
    """The check behind the tests above: without its device guard a kernel is refused."""
    with pytest.raises(RuntimeError, match=r"is launched on npu:0 with tensors of \[1\]"):
        npu_interpreter._note_launch("kernel", inputs(SECOND))


# ---- measuring ---------------------------------------------------------------------------------------------------


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "FLUSH_BYTES", 4096)  # host memory: there is no cache to flush


def test_timers(npu: torch.device, no_cache: None) -> None:
    def call() -> None:
        time.sleep(0.01)

    times = timing.time_calls(call, npu, warmup=0, rep=3)
    assert len(times) == 3 and all(10 <= ms < 10_000 for ms in times)
    median, low, high = diyfa.benchmark_fn(diyfa.flash_attention, *inputs(SECOND), warmup=1, rep=3)
    assert 0 < low <= median <= high
    assert {launch.device for launch in LAUNCHES} == {1} and len(LAUNCHES) == 4


def test_benchmark_runner(npu: torch.device, no_cache: None, capsys: pytest.CaptureFixture[str]) -> None:
    runner = diyfa.BenchmarkRunner(warmup=0, rep=2)
    assert runner.device.type == "npu"
    with HostArithmetic():
        runner.benchmark_attention(diyfa.flash_attention, [16], batch_size=1, num_heads=1, head_dim=16)
        runner.benchmark_matmul(diyfa.triton_matmul, [(32, 32, 32)])
    runner.print_comparison_table()
    assert [(r.name, r.size) for r in runner.results] == [
        ("FlashAttention", (1, 1, 16, 16)), ("PyTorch", (32, 32, 32)), ("Triton", (32, 32, 32))
    ]  # fmt: skip
    assert all(r.time_ms > 0 for r in runner.results)
    ((name, _, reason),) = runner.unavailable  # PyTorch's own attention is CANN's operator
    assert name == "SDPA" and "libopapi.so" in reason
    assert "FlashAttention" in capsys.readouterr().out


def test_peak_memory() -> None:
    """With torch_npu's caching allocator, whose statistics these are; the tests here otherwise go without it."""
    code = """
import npu_interpreter; npu_interpreter.pytest_configure()
import torch, diyfa
from diyfa.lab.bench.timing import peak_memory_mb
q = torch.zeros(1, 2, 256, 64, dtype=torch.float16).to("npu")
k = torch.zeros(1, 2, 16, 64, dtype=torch.float16).to("npu")
print("peak", peak_memory_mb(lambda: diyfa.flash_attention(q, k, k), torch.device("npu:0")) * 2**20)
"""
    output = run_python(code, PYTORCH_NO_NPU_MEMORY_CACHING="0")
    peak = float(output.split("peak")[1])
    out, lse = 2 * 256 * 64 * 2, 2 * 256 * 4
    assert out + lse <= peak <= out + lse + 8192, "the output, the log-sum-exp, and what rounds them up"


def test_commands_on_npu_tensors(npu: torch.device, no_cache: None, tmp_path: Path) -> None:
    """`diyfa bench` writes what `diyfa report` reads."""
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from diyfa.cli import output
    from diyfa.cli.app import app

    output.out.width = output.err.width = 160  # kept from when they were made, whatever COLUMNS is now

    path = tmp_path / "bench.json"
    sizes = {"seq-len": 16, "batch": 1, "heads": 1, "head-dim": 16, "size": 32, "warmup": 0, "rep": 1}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    with HostArithmetic():
        result = CliRunner().invoke(
            app, ["bench", *options, "--dtype=float16", f"--output={path}", "--json"], env={"COLUMNS": "160"}
        )
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert (document["device"], document["device_type"]) == ("Ascend910B3", "npu")
    assert document["versions"]["torch_npu"] and document["versions"]["triton-ascend"]
    assert {"chip", "driver, firmware", "CANN", "bishengir-compile"} < {part["part"] for part in document["ascend"]}
    result = CliRunner().invoke(app, ["report", str(path)], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "Ascend910B3" in result.output and "Forward: up to" in result.output


# ---- torch.compile -----------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compile(npu: torch.device, fresh_dynamo: None, compiler: str) -> None:
    """One graph without breaks, forward and backward, equal to the eager call."""
    compiled = torch.compile(diyfa.flash_attention, fullgraph=True, backend=compiler)
    assert same(trained(compiled, leaves(npu), causal=True), trained(diyfa.flash_attention, leaves(npu), causal=True))


def test_compile_with_inductor(npu: torch.device, fresh_dynamo: None) -> None:
    """The default compiler: both passes are diyfa's operators alone. Kernels of the compiler's own, such as for a zero
    gradient of an unused log-sum-exp, would ask CANN's driver for the chip. That of torch_npu 2.7 does it at once."""
    try:
        importlib.import_module("torch_npu._inductor")
    except RuntimeError as error:
        pytest.skip(f"this torch_npu's inductor needs a chip: {error}")
    compiled = torch.compile(diyfa.flash_attention, fullgraph=True)
    q = inputs(npu)
    assert torch.equal(compiled(*q, causal=True).cpu(), diyfa.flash_attention(*q, causal=True).cpu())
    assert same(trained(compiled, leaves(npu), causal=True), trained(diyfa.flash_attention, leaves(npu), causal=True))


def test_compile_with_changing_lengths(npu: torch.device, fresh_dynamo: None) -> None:
    compiled = torch.compile(diyfa.flash_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for seqlen in (20, 33, 47):
        q = inputs(npu, seqlen=seqlen)
        assert torch.equal(compiled(*q).cpu(), diyfa.flash_attention(*q).cpu())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
