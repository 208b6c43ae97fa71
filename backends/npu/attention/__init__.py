"""Attention kernels for Ascend in Triton, and their shared helpers."""
