"""Attention kernels in portable Triton, and their helpers."""
