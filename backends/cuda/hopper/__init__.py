"""Attention kernels for Hopper (sm_90) in Gluon."""
