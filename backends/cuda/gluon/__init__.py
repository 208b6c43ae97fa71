"""Modules for Gluon kernels of any architecture."""
