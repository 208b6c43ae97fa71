"""Attention kernels in portable Triton, and what they share."""
