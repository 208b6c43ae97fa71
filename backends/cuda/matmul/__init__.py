"""Kernels of the matrix product."""
