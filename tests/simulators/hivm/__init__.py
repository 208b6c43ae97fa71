"""An executor of compiled Ascend kernels on a CPU: README.md, docs/npu-compiled-on-cpu.md.

`ir` parses the compiler's last intermediate form. `cores` runs its cube and vector programs over on-chip memories
(`memory`) with the library functions that it calls (`library`, `cube`). `order` checks that flags and barriers order
every two conflicting accesses. `launch` redirects Triton's launches to the executor.
"""
