"""Compiling for Ascend without a device: gate, tile search, cost model. Nothing here runs in a call."""
