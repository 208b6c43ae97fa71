"""Launching, repeating and tuning kernels."""
