"""Ahead-of-time compilation of the CUDA kernels, and checks of their machine code."""
