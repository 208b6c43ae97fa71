"""Launching kernels on an NPU."""
