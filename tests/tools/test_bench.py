"""Timing, memory and records: the numbers mean what they say."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
import torch

import diyfa
from diyfa import BenchmarkResult, BenchmarkRunner, benchmark_fn
from diyfa.lab.bench.check import WrongResultError, check_attention, check_matmul
from diyfa.lab.bench.peers import PeerUnavailable, attention_peers, check_peer
from diyfa.lab.bench.record import clock, clocks, environment, write_json
from diyfa.lab.bench.timing import compute_quantiles, peak_memory_mb, time_calls
from diyfa.lab.bench.work import attention_flops, matmul_flops, tflops
from diyfa.lab.results import SCHEMA

CPU = torch.device("cpu")


def test_benchmark_fn_times_the_call():
    calls = []

    def sleep(x, seconds):
        calls.append(x)
        time.sleep(seconds)

    median, p20, p80 = benchmark_fn(sleep, torch.zeros(1), warmup=2, rep=5, seconds=0.01)
    assert len(calls) == 7
    assert 10 <= p20 <= median <= p80 < 200


def test_quantiles_are_honoured(monkeypatch):
    times = iter([0.0, 1.0, 1.0, 3.0, 3.0, 6.0, 6.0, 10.0, 10.0, 15.0])  # pairs: 1, 2, 3, 4, 5 seconds
    monkeypatch.setattr("diyfa.lab.bench.timing.time.perf_counter", lambda: next(times))
    got = benchmark_fn(lambda x: None, torch.zeros(1), warmup=0, rep=5, quantiles=[0.0, 0.25, 0.5, 1.0])
    assert got == pytest.approx((1000, 2000, 3000, 5000))


@pytest.mark.parametrize("wrong", [[], [1.5], [-0.1, 0.5]])
def test_impossible_quantiles(wrong):
    with pytest.raises(ValueError, match="quantiles must be"):
        compute_quantiles([1.0, 2.0], wrong)
    with pytest.raises(ValueError, match="rep must be at least 1"):
        time_calls(lambda: None, CPU, 0, 0)


def test_peak_memory_counts_what_is_alive_at_once():
    x = torch.zeros(1024, 1024)  # 4 MiB

    def three_at_once():
        a, b, c = x + 1, x + 2, x + 3
        return a, b, c

    def one_after_another():
        for i in range(3):
            y = x + i
            del y

    assert peak_memory_mb(three_at_once, CPU) == pytest.approx(12, abs=0.5)
    assert peak_memory_mb(one_after_another, CPU) == pytest.approx(4, abs=0.5)


def test_work_is_counted_as_in_the_papers():
    assert attention_flops(2, 3, 10, 20, 64) == 4 * 2 * 3 * 10 * 20 * 64
    assert attention_flops(2, 3, 10, 10, 64, causal=True) == 2 * 2 * 3 * 10 * 10 * 64
    assert matmul_flops(2, 3, 4) == 48
    assert tflops(2e12, 1000.0) == pytest.approx(2.0)


def test_attention_beside_its_peers(capsys):
    seen = []
    runner = BenchmarkRunner("cpu", warmup=0, rep=2, on_result=seen.append)
    results = runner.benchmark_attention(diyfa.flash_attention, [32, 48], 1, 2, 16, causal=True, dtype=torch.float32)
    assert [(r.name, r.size) for r in results] == [
        (name, (1, 2, s, 16)) for s in (32, 48) for name in ("SDPA flash", "SDPA math", "FlashAttention")
    ]
    assert runner.results == results == seen
    for r in results:
        assert isinstance(r, BenchmarkResult) and r.time_ms > 0 and r.memory_mb > 0
        assert r.tflops == pytest.approx(tflops(attention_flops(1, 2, r.size[2], r.size[2], 16, True), r.time_ms))
    runner.print_comparison_table(title="A title")
    printed = capsys.readouterr().out
    assert all(words in printed for words in ("A title", "FlashAttention", "100%"))
    runner.clear_results()
    assert runner.results == []


def test_work_of_a_wide_head_is_that_of_both_head_dims():
    results = BenchmarkRunner("cpu", warmup=0, rep=1).benchmark_attention(
        diyfa.flash_attention, [16], 1, 1, 576, dtype=torch.float32
    )
    for r in results:
        assert r.tflops == pytest.approx(tflops(4 * 16 * 16 * (576 + 512) / 2, r.time_ms))


def test_matmul_with_block_configurations():
    runner = BenchmarkRunner("cpu", warmup=0, rep=1)
    blocks = [{"block_m": 16, "block_n": 16, "block_k": 16}, {"block_m": 32, "block_n": 16, "block_k": 16}]
    results = runner.benchmark_matmul(diyfa.triton_matmul, [(64, 32, 32)], blocks, dtype=torch.bfloat16)
    assert [(r.name, r.block_config) for r in results] == [("PyTorch", None), *(("Triton", b) for b in blocks)]
    (plain,) = runner.benchmark_matmul(diyfa.triton_matmul, [(64, 32, 32)], dtype=torch.bfloat16)[1:]
    assert plain.block_config is None
    assert len(runner.results) == 5


def test_a_peer_that_refuses_or_would_not_fit_is_named_with_its_reason():
    q = torch.empty(1, 64, 32768, 1).expand(1, 64, 32768, 64)
    with pytest.raises(PeerUnavailable, match="stores the whole score matrix"):
        check_peer("SDPA math", attention_peers(CPU)["SDPA math"], q, q, q, True)
    x = torch.zeros(1, 1, 4, 8)

    def refuse(q, k, v, causal):
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    with pytest.raises(PeerUnavailable, match=r"^No available kernel. Aborting execution.$"):
        check_peer("SDPA cuDNN", refuse, x, x, x, False)


def test_records_carry_device_date_and_versions(tmp_path):
    path = tmp_path / "results" / "attention.json"
    row = {"kind": "host", "implementation": "diyfa", "pass": "forward", "host_us": 1.5}
    write_json(path, "host", CPU, [row])
    document = json.loads(path.read_text())
    assert document["rows"] == [row] and document["schema"] == SCHEMA
    assert document["device"] == environment(CPU)["device"]
    assert document["versions"]["torch"] == torch.__version__
    assert document["date"].endswith("+00:00")
    assert " " not in path.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_the_check_before_a_timing(dtype, causal):
    q, k, v = (torch.randn(2, heads, 100, 32).to(dtype) for heads in (4, 2, 2))
    out = diyfa.flash_attention(q, k, v, causal=causal, backend="cpu")
    assert 0 < check_attention(out, q, k, v, causal) < 0.02
    wrong = out.clone()
    wrong[-1, -1, -1, 0] += 0.1  # rounded to 16 bits, and beside an error of the result
    with pytest.raises(
        WrongResultError, match=r"wrong result: an error of 0\.(1|09\d*|10\d*), .* times the allowed one"
    ):
        check_attention(wrong, q, k, v, causal)
    with pytest.raises(WrongResultError):
        check_attention(out, q, k, v, not causal)
    for place in ((0, 0, 0), (0, 0, 99), (-1, -1, 0)):  # the first and last rows of the first and last head
        wrong = out.clone()
        wrong[place] += 0.1
        with pytest.raises(WrongResultError, match=r"wrong result: an error of 0\.(1|09)"):
            check_attention(wrong, q, k, v, causal)
    wrong = out.clone()
    wrong[1, 1, 50, 3] = float("nan")
    with pytest.raises(WrongResultError, match="NaN or infinity"):
        check_attention(wrong, q, k, v, causal)
    with pytest.raises(WrongResultError, match="shape"):
        check_attention(out[:, :, :, :16], q, k, v, causal)


def test_the_check_of_a_product():
    a, b = torch.randn(100, 70), torch.randn(70, 90)
    assert check_matmul(a @ b, a, b) < 1e-4
    with pytest.raises(WrongResultError):
        check_matmul(a @ b * 1.01, a, b)
    for place in ((0, 0), (-1, -1)):
        wrong = a @ b
        wrong[place] += 1
        with pytest.raises(WrongResultError, match="wrong result: an error of 1"):
            check_matmul(wrong, a, b)


def test_clocks_are_those_that_nvidia_smi_says(monkeypatch):
    assert clocks(CPU) == {} and clock(CPU) == {}
    said = SimpleNamespace(stdout="1755, 1980, 2619, [N/A]\n")
    monkeypatch.setattr("diyfa.lab.bench.record.shutil.which", lambda name: name)
    monkeypatch.setattr("diyfa.lab.bench.record.subprocess.run", lambda *a, **k: said)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))
    cuda = torch.device("cuda", 0)
    assert clocks(cuda) == {"sm_mhz": 1755.0, "sm_max_mhz": 1980.0, "memory_mhz": 2619.0}
    assert clock(cuda) == {"clock_mhz": 1755.0}
