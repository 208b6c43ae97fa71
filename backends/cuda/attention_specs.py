"""Which attention kernels are compiled ahead of time for an architecture: every shipped tile, every feature once.

The signature follows from the argument names, so a kernel that gains an argument needs no change here.
"""

from __future__ import annotations

from collections.abc import Iterator

from diyfa.arch import gpu_spec
from diyfa.backends.cuda import bwd, bwd_dkdv, bwd_dq, fwd, fwd_v1
from diyfa.backends.cuda.aot import CompileSpec
from diyfa.backends.cuda.attention_launch import RUNTIME_SIZES
from diyfa.backends.cuda.configs import AttentionConfig, candidates
from diyfa.backends.cuda.tiles import PACKED, SEQ_LENS
from diyfa.problem import AttentionProblem

_TRITON_DTYPE = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
# Pointers whose element type is not the inputs'.
_POINTER_TYPES = {
    "cu_seqlens_q_ptr": "*i32",
    "cu_seqlens_k_ptr": "*i32",
    "seq_lens_ptr": "*i32",
    "slopes_ptr": "*fp32",
    "sinks_ptr": "*fp32",
    "rng_state_ptr": "*i64",
    "lse_ptr": "*fp32",
    "dlse_ptr": "*fp32",
    "delta_ptr": "*fp32",
    "running_ptr": "*fp32",
    "m_ptr": "*fp32",
}
# Optional tensors, and the constant with the value that says that a kernel reads them.
_OPTIONAL = {
    "cu_seqlens_q_ptr": ("LENGTHS", PACKED.value),
    "cu_seqlens_k_ptr": ("LENGTHS", PACKED.value),
    "seq_lens_ptr": ("LENGTHS", SEQ_LENS.value),
    "slopes_ptr": ("ALIBI", True),
    "bias_ptr": ("BIAS", True),
    "sinks_ptr": ("SINKS", True),
    "rng_state_ptr": ("DROPOUT", True),
    "dlse_ptr": ("HAS_DLSE", True),
}
_FLOATS = frozenset({"scale", "sm_scale", "softcap", "keep_scale"})
# Allocated by the launchers, so aligned whatever the inputs are.
_RESULTS = frozenset(
    {"o_ptr", "lse_ptr", "delta_ptr", "dbias_ptr", "running_ptr", "m_ptr", "dk_ptr", "dv_ptr", "dq_ptr"}
)
# Tensors that TMA reads, with the block whose rows they are read by.
_DESCRIBED = {"q_ptr": "BLOCK_M", "do_ptr": "BLOCK_M", "k_ptr": "BLOCK_N", "v_ptr": "BLOCK_N"}
_WIDTH = {"q_ptr": "BLOCK_D", "k_ptr": "BLOCK_D", "v_ptr": "BLOCK_DV", "do_ptr": "BLOCK_DV"}


def _problem(arch: str, dtype: str, d: int, causal: bool = True, seq_lens: bool = False) -> AttentionProblem:
    right = 0 if causal else -1
    return AttentionProblem("cuda", arch, dtype, "bhsd", 2, 8, 4, 1024, 1024, d, d, -1, right, seq_lens=seq_lens)


def problems(arch: str) -> Iterator[AttentionProblem]:
    """The cases: the head dims that tables tell apart, both masks, one of each dtype, one that uses every feature."""
    half = "float16"
    for d in (64, 128, 256):
        yield _problem(arch, half, d)
    yield _problem(arch, half, 128, causal=False)
    yield _problem(arch, half, 80, seq_lens=True)
    for d in (64, 256):
        yield _problem(arch, half, d).replace(aligned=False)
    spec = gpu_spec(arch)
    if spec is not None and spec.has_bf16:
        yield _problem(arch, "bfloat16", 128)
    for d in (64, 128):
        yield _problem(arch, "float32", d)


def _spec(kernel: str, fn, problem: AttentionProblem, config: AttentionConfig, constants: dict) -> CompileSpec:
    element = _TRITON_DTYPE[problem.dtype]
    signature, constexprs, aligned = {}, {}, set()
    for name in fn.arg_names:
        if name in constants:
            constexprs[name] = constants[name]
        elif (name.endswith("_rows_ptr") and constants["FORM"] == constants["EDGE_FORM"]) or (
            name in _OPTIONAL and constants[_OPTIONAL[name][0]] != _OPTIONAL[name][1]
        ):
            constexprs[name] = None
        elif config.form == "tma" and name in _DESCRIBED:
            rows, width = constants[_DESCRIBED[name]], constants[_WIDTH[name]]
            signature[name] = f"tensordesc<{element}[1,1,{rows},{width}]>"
        elif name.endswith("_ptr"):
            signature[name] = _POINTER_TYPES.get(name, f"*{element}")
            if problem.aligned or name in _RESULTS:
                aligned.add(name)
        else:
            signature[name] = "fp32" if name in _FLOATS else "i32"
            if name.startswith("stride_") and problem.aligned and name not in RUNTIME_SIZES:
                aligned.add(name)
    features = "+".join(sorted(problem.features - {"gqa"})) or "full"
    ragged = "" if problem.aligned else " unaligned"
    case = f"{problem.dtype} D={problem.head_dim} {features}{ragged} {config.block_m}x{config.block_n} {config.form}"
    return CompileSpec(
        kernel,
        f"{case} w{config.num_warps} s{config.num_stages}",
        fn,
        signature,
        constexprs,
        config.num_warps,
        config.num_stages,
        aligned=frozenset(aligned),
        spill_budget=config.spill_budget,
    )


def compile_specs(arch: str) -> Iterator[CompileSpec]:
    """Every attention case for `arch`."""
    for problem in problems(arch):
        for config in candidates("fwd", problem):
            yield _spec("attention_fwd/v2", fwd._fwd_kernel, problem, config, fwd.constants(problem, config, False))
        v1 = fwd_v1.config(problem)
        yield _spec("attention_fwd/v1", fwd_v1._fwd_v1_kernel, problem, v1, fwd_v1.constants(problem, v1, False))
        for kind, fn in (("dkdv", bwd_dkdv._bwd_dkdv_kernel), ("dq", bwd_dq._bwd_dq_kernel)):
            for config in candidates(kind, problem):
                yield _spec(f"attention_bwd/{kind}", fn, problem, config, bwd.constants(problem, config))
        constants = bwd.preprocess_constants(problem, False)
        tile = AttentionConfig(bwd.PREPROCESS_BLOCK_M, 1, bwd.PREPROCESS_WARPS, 1)
        yield _spec("attention_bwd/preprocess", bwd._bwd_preprocess_kernel, problem, tile, constants)
