"""The functions of the package flash-attn-npu 0.4.2, of its modules flash_attn_npu, flash_attn_npu_3, flash_attn_npu_4.

They have the names, arguments, order, defaults and results of that package, and refuse arguments that diyfa lacks.
"""
