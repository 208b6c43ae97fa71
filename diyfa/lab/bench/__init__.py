"""Measurement: one way of timing, one count of work, the peers, and the facts recorded with each number."""

from diyfa.lab.bench.runner import BenchmarkResult, BenchmarkRunner
from diyfa.lab.bench.timing import benchmark_fn, compute_quantiles, peak_memory_mb, time_calls

__all__ = ["BenchmarkResult", "BenchmarkRunner", "benchmark_fn", "compute_quantiles", "peak_memory_mb", "time_calls"]
