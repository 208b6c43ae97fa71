"""Attention kernels for Ascend in Triton, and what they share."""
