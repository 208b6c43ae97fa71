"""Kernels compiled ahead of time, and what their machine code says."""
