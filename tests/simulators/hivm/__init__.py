"""Executes on a CPU what the Ascend compiler makes of a kernel: docs/npu-compiled-on-cpu.md.

`ir` parses the compiler's last intermediate form, `cores` runs its cube and vector programs over on-chip memories
(`memory`) with the library functions that it calls (`library`, `cube`), `order` checks that flags and barriers put
every two conflicting accesses in order, and `launch` makes Triton's launches come here.
"""
