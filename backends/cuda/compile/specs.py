"""Which attention kernels are compiled ahead of time for an architecture: every shipped tile, every feature once.

Plain problems are compiled with every tile of the table, problems that use features with the default one. The
signature follows from the argument names and from what the kernel says of them, so a kernel that gains an argument
needs no change here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from diyfa.arch import gpu_spec
from diyfa.backends.cuda.attention import bwd, bwd_dbias, bwd_dkdv, bwd_dq, fwd, fwd_v1
from diyfa.backends.cuda.attention.configs import (
    PER_SCORE_FEATURES,
    AttentionConfig,
    candidates,
    default_config,
    gpu_class,
    reads_rows,
)
from diyfa.backends.cuda.attention.tile_io import EQUAL, PACKED, SEQ_LENS, padded_head_dim
from diyfa.backends.cuda.compile.aot import CompileSpec
from diyfa.backends.cuda.hopper import configs as hopper_configs
from diyfa.problem import VARLEN, AttentionProblem

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
# What Triton makes a constant because its value is 1.
_UNIT_STRIDES = frozenset({"stride_biasn", "stride_outn"})
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
    """Plain problems: the head dims that tables tell apart, both masks, one of each dtype, padded samples."""
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


def feature_problems(arch: str) -> Iterator[AttentionProblem]:
    """Problems with features: all that compose on dense tensors, packed sequences, wide heads, MLA's 576 and 512."""
    half = "float16"
    everything = {"softcap": 30.0, "alibi": True, "sinks": True, "dropout": True, "bias_grad": True}
    for d, bias in ((64, half), (128, "float32")):
        yield _problem(arch, half, d).replace(bias=bias, window_left=128, window_right=64, **everything)
    # A bias alone: the most shared memory beside what tiles take anyway, and loops whose wgmma ptxas once serialised.
    spec = gpu_spec(arch)
    for d in (64, 128, 256) if spec is not None and spec.has_wgmma else (256,):
        yield _problem(arch, half, d).replace(bias=half)
    yield _problem(arch, half, 64, causal=False).replace(dropout=True)  # dropout's mask alone
    packed = {"layout": VARLEN, "total_q": 2048, "total_k": 2048}
    yield _problem(arch, half, 64).replace(**packed)
    yield _problem(arch, half, 128).replace(window_left=128, dropout=True, **packed)
    yield _problem(arch, half, 320)
    yield _problem(arch, half, 576).replace(head_dim_v=512)


# Bytes of spills that default tiles may have with features, by kernel and class of GPU: what ptxas spills at most, with
# Triton 3.6 on 2026-11-23, rounded up. Dropout's words, slopes, bias addresses and the tanh of the softcap are alive
# beside accumulators that fill the registers, and no combination of features has tiles of its own. What a tile spills
# without features is in the table of tiles. A class with a number behind it is of that padded head_dim.
FEATURE_SPILLS: dict[str, dict[str, int]] = {
    "fwd": {"small": 64, "large": 32},
    "dkdv": {
        "wgmma": 192, "wgmma 128": 1824, "wgmma ragged": 352, "large": 1856, "small": 128, "small 256": 160,
        "turing": 32, "turing 256": 2368,
    },
    "dq": {"wgmma": 96, "large": 384, "small": 32, "turing": 32},
    "dbias": {"turing": 1280, "large": 352},
}  # fmt: skip


# The Hopper kernel's: numbers that are stored once for each tile, at its ends or by the producer; loops over keys may
# not have any (`clean_loops`).
HOPPER_SPILLS = 96


def _with_feature_budget(kind: str, problem: AttentionProblem, config: AttentionConfig) -> AttentionConfig:
    spills, name = FEATURE_SPILLS[kind], gpu_class(problem)
    allowed = spills.get(f"{name} {padded_head_dim(problem.head_dim)}", spills.get(name, 0))
    if not problem.features & (PER_SCORE_FEATURES | {"varlen", "window"}):
        return config
    return replace(config, spill_budget=max(allowed, config.spill_budget))


def _spec(kernel: str, fn, problem: AttentionProblem, config: AttentionConfig, constants: dict) -> CompileSpec:
    element = _TRITON_DTYPE[problem.dtype]
    signature, constexprs, aligned = {}, {}, set()
    for parameter in fn.params:
        name = parameter.name
        if name in constants:
            constexprs[name] = constants[name]
        elif (name.endswith("_rows_ptr") and not reads_rows(problem, config)) or (
            name in _OPTIONAL and constants[_OPTIONAL[name][0]] != _OPTIONAL[name][1]
        ):
            constexprs[name] = None
        elif name in _UNIT_STRIDES:
            constexprs[name] = 1
        elif config.form == "tma" and name in _DESCRIBED:
            rows, width = constants[_DESCRIBED[name]], constants[_WIDTH[name]]
            signature[name] = f"tensordesc<{element}[1,1,{rows},{width}]>"
        elif name.endswith("_ptr"):
            reduced = name == "dbias_ptr" and constants["REDUCE"] != bwd_dbias.NOTHING.value
            own = _TRITON_DTYPE[problem.bias or problem.dtype] if name in ("bias_ptr", "dbias_ptr") else element
            signature[name] = "*fp32" if reduced else _POINTER_TYPES.get(name, f"*{own}")
            if (problem.aligned or name in _RESULTS) and not parameter.do_not_specialize_on_alignment:
                aligned.add(name)
        else:
            signature[name] = "fp32" if name in _FLOATS else "i32"
            divisible = problem.aligned if name.startswith("stride_") else getattr(problem, name, 1) % 16 == 0
            if divisible and not parameter.do_not_specialize:
                aligned.add(name)
    features = "+".join(sorted(problem.features - {"gqa"})) or "full"
    if problem.bias_grad:
        features = "every feature"
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


def _preprocess(problem: AttentionProblem, has_dlse: bool) -> CompileSpec:
    constants = bwd.preprocess_constants(problem, has_dlse)
    tile = AttentionConfig(bwd.PREPROCESS_BLOCK_M, 1, bwd.PREPROCESS_WARPS, 1)
    return _spec("attention_bwd/preprocess", bwd._bwd_preprocess_kernel, problem, tile, constants)


def _bias_gradient(problem: AttentionProblem) -> Iterator[CompileSpec]:
    tile = bwd_dbias.config(problem)
    assert tile is not None, "head_dims up to 128 have a tile everywhere"
    tile = _with_feature_budget("dbias", problem, tile)
    for name, reduce in (("tiles", bwd_dbias.NOTHING), ("keys", bwd_dbias.QUERIES), ("queries", bwd_dbias.KEYS)):
        constants = bwd_dbias.constants(problem, tile, reduce.value)
        yield _spec(f"attention_bwd/dbias_{name}", bwd_dbias._bwd_dbias_kernel, problem, tile, constants)


def _hopper_specs(arch: str) -> Iterator[CompileSpec]:
    """The Gluon kernel with each tile of its table, with and without a mask, and where the keys end inside a block."""
    if arch != hopper_configs.ARCH or hopper_configs.environment_refusal():
        return
    # Every config of the tables in one dtype; the other dtype; keys that end inside a block; other lengths.
    packed = {"layout": VARLEN, "total_q": 8192, "total_k": 8192}
    cases: list[tuple[tuple[int, bool], str, dict[str, Any]]] = [
        *(
            (case, "bfloat16", {"seqlen_q": 16384, "seqlen_k": min(most, 16384)})
            for case, rows in hopper_configs.CONFIGS.items()
            for most, _ in rows
        ),
        ((128, True), "float16", {}),
        ((128, False), "float16", {"seqlen_k": 4095}),
        *((case, "bfloat16", {"seq_lens": True}) for case in ((64, False), (128, True), (256, False))),
        *((case, "bfloat16", {"seqlen_q": 512, "seqlen_k": 512}) for case in ((64, False), (128, True), (256, True))),
        ((192, False), "bfloat16", {"seqlen_q": 512, "seqlen_k": 512}),
        ((192, True), "float16", {"head_dim_v": 128}),
        ((192, True), "bfloat16", {"head_dim_v": 128} | packed),
        ((192, False), "bfloat16", {"head_dim_v": 128}),
        ((96, False), "float16", {}),
        ((96, True), "float16", {"head_dim_v": 64}),
        ((64, False), "float16", {"head_dim_v": 256}),
        ((128, True), "bfloat16", {"window_left": 1000}),
        ((64, True), "bfloat16", {"window_left": 3000}),
        ((192, True), "bfloat16", {"window_left": 1000}),
        ((64, False), "bfloat16", {"window_left": 1000}),
        ((256, True), "bfloat16", {"window_left": 1000, "window_right": 100}),
        ((256, True), "bfloat16", {"window_left": 1000, "head_dim_v": 128}),
        *((case, "bfloat16", {"softcap": 30.0}) for case in ((64, False), (128, True), (192, True), (256, True))),
        ((128, True), "bfloat16", {"window_left": 1000, "softcap": 30.0} | packed),
        *((case, "bfloat16", packed) for case in ((64, False), (128, True), (256, True))),
        *((case, "bfloat16", {"sinks": True}) for case in ((64, True), (128, False), (256, True))),
        ((64, True), "bfloat16", {"sinks": True, "window_left": 127}),
        *((case, "bfloat16", {"alibi": True}) for case in ((64, False), (64, True), (128, False), (128, True))),
        *((case, "bfloat16", {"alibi": True}) for case in ((192, True), (256, False), (256, True))),
        ((128, True), "float16", {"alibi": True} | packed),
        ((128, True), "bfloat16", {"alibi": True, "softcap": 30.0, "window_left": 1000}),
    ]
    for (d, causal), dtype, changes in cases:
        problem = _problem(arch, dtype, d, causal).replace(**{"seqlen_q": 4096, "seqlen_k": 4096, **changes})
        if not hopper_configs.refuses(problem):
            yield _hopper_spec(problem, hopper_configs.config_of(problem))


def _hopper_spec(problem: AttentionProblem, config: hopper_configs.Sm90Config) -> CompileSpec:
    from diyfa.backends.cuda.gluon.tma import smem_layout
    from diyfa.backends.cuda.hopper import fwd as hopper_fwd  # needs the Gluon that `_hopper_specs` asked for

    d, dv = problem.head_dim, problem.head_dim_v
    element = _TRITON_DTYPE[problem.dtype]
    constants = hopper_fwd.constants(problem, config, False)
    blocks = {"q_tensor": hopper_configs.CONSUMER_ROWS, "k_tensor": config.block_n, "v_tensor": config.block_n}
    blocks["o_tensor"] = hopper_configs.CONSUMER_ROWS
    signature: dict[str, str] = {}
    for name, rows in blocks.items():
        ragged = problem.varlen or (problem.seq_lens and name != "o_tensor")
        rank = 5 if ragged else 4
        columns, _ = hopper_configs.boxes_of(
            *((d, dv) if name in ("q_tensor", "k_tensor") else (dv, d)), config.box_columns
        )
        block = ",".join(map(str, [1] * (rank - 2) + [rows, columns]))
        signature[name] = f"tensordesc<{element}[{block}],{smem_layout(rows, columns, rank)!r}>"
    signature |= {"lse_ptr": "*fp32", **dict.fromkeys(hopper_fwd.SIZES, "i32"), "scale": "fp32", "softcap": "fp32"}
    if constants["LENGTHS"] == EQUAL.value:
        constants |= dict.fromkeys(hopper_fwd.LENGTH_POINTERS)
    else:
        signature |= dict.fromkeys(hopper_fwd.LENGTH_POINTERS, "*i32")
    for name, there in (("slopes_ptr", problem.alibi), ("sinks_ptr", problem.sinks)):
        if there:
            signature[name] = "*fp32"
        else:
            constants[name] = None
    if config.direct:
        signature["o_ptr"] = f"*{element}"
    else:
        constants["o_ptr"] = None
    if config.scheduler == "dynamic":
        signature["counter_ptr"] = "*i32"
    else:
        constants["counter_ptr"] = None
    widths = f"{d}" if d == dv else f"{d}/{dv}"
    mask = "causal" if problem.causal else "full" if problem.seqlen_k % config.block_n == 0 else "ragged"
    features = "".join(f"{name} " for name in sorted(problem.features - {"causal", "gqa", "head_dim_v"}))
    return CompileSpec(
        "attention_fwd/sm90",
        f"{problem.dtype} D={widths} {features}{mask} "
        f"{config.consumers}x{hopper_configs.CONSUMER_ROWS}x{config.block_n}"
        f"{f' boxes of {config.box_columns}' if config.box_columns else ''}{' joined' if config.joined else ''}"
        f"{' skip masked' if config.skip_masked else ''}{' direct' if config.direct else ''}"
        f"{' pairs' if config.pairs else ''}"
        f"{f' {config.q_in_registers} of Q in registers' if config.q_in_registers else ''}"
        f"{' lazy rescale' if config.lazy_rescale else ''}"
        f"{' fixed max' if constants['FIXED_MAX'] else ''}"
        f"{' per-warp arrive' if config.per_warp_arrive else ''}"
        f"{' pingpong' if config.pingpong else ''}{'' if config.scheduler == 'static' else ' ' + config.scheduler}",
        hopper_fwd._fwd_sm90_kernel,
        signature,
        constants,
        4,
        1,
        options={name: n for name, n in hopper_configs.schedule_of(config).items() if name != "num_warps"},
        aligned=frozenset({"lse_ptr", *(("o_ptr",) if config.direct else ())}),
        spill_budget=HOPPER_SPILLS,
        clean_loops=True,
    )


def compile_specs(arch: str) -> Iterator[CompileSpec]:
    """Every attention case for `arch`."""
    yield from _hopper_specs(arch)
    backward = (("dkdv", bwd_dkdv._bwd_dkdv_kernel), ("dq", bwd_dq._bwd_dq_kernel))
    for problem in problems(arch):
        for config in candidates("fwd", problem):
            yield _spec("attention_fwd/v2", fwd._fwd_kernel, problem, config, fwd.constants(problem, config, False))
        v1 = fwd_v1.config(problem)
        yield _spec("attention_fwd/v1", fwd_v1._fwd_v1_kernel, problem, v1, fwd_v1.constants(problem, v1, False))
        for kind, fn in backward:
            for config in candidates(kind, problem):
                yield _spec(f"attention_bwd/{kind}", fn, problem, config, bwd.constants(problem, config))
        yield _preprocess(problem, False)
    for problem in feature_problems(arch):
        if (tile := default_config("fwd", problem)) is not None:
            config = _with_feature_budget("fwd", problem, tile)
            yield _spec("attention_fwd/v2", fwd._fwd_kernel, problem, config, fwd.constants(problem, config, False))
        for kind, fn in backward:
            if (tile := default_config(kind, problem)) is not None:
                config = _with_feature_budget(kind, problem, tile)
                yield _spec(f"attention_bwd/{kind}", fn, problem, config, bwd.constants(problem, config))
        yield _preprocess(problem, True)
        if problem.bias_grad:
            yield from _bias_gradient(problem)
