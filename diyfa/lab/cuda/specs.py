"""The attention kernels that are compiled ahead of time for an architecture: every shipped tile, every feature once.

Plain problems are compiled with every tile of the table, problems with features with the default tile. Launchers
describe the launch of each problem, and its signature follows from that (`aot.compile_spec`), so a kernel that gains an
argument needs no change here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from diyfa import masks
from diyfa.arch import gpu_spec
from diyfa.backends.cuda.attention import (
    append,
    build_mask,
    bwd,
    bwd_captured,
    bwd_dbias,
    bwd_partials,
    clear,
    decode,
    fwd,
    fwd_v1,
    merge,
    quantize,
    select_blocks,
    stream_k,
)
from diyfa.backends.cuda.attention.configs import (
    PER_SCORE_FEATURES,
    AttentionConfig,
    candidates,
    default_config,
    gpu_class,
)
from diyfa.backends.cuda.attention.decode_configs import MMA_BLOCK_M
from diyfa.backends.cuda.attention.tile_io import padded_head_dim
from diyfa.backends.cuda.hopper import bwd_configs as hopper_bwd_configs
from diyfa.backends.cuda.hopper import configs as hopper_configs
from diyfa.block_lists import Selection
from diyfa.eight_bits import EIGHT_BITS, PER_BLOCK, PER_HEAD, PER_TENSOR, Scheme
from diyfa.features import EVERYTHING, SCORE_EXAMPLE, dtype_name
from diyfa.lab.cuda.aot import CompileSpec
from diyfa.lab.examples import example_attention, example_gradients, example_kvcache
from diyfa.mask_terms import Comparison, terms_of
from diyfa.problem import (
    VARLEN,
    AttentionProblem,
    KVCacheProblem,
    Launch,
    NewKeys,
)
from diyfa.score_programs import function_name


def _problem(arch: str, dtype: str, d: int, causal: bool = True, seq_lens: bool = False) -> AttentionProblem:
    right = 0 if causal else -1
    return AttentionProblem("cuda", arch, dtype, "bhsd", 2, 8, 4, 1024, 1024, d, d, -1, right, seq_lens=seq_lens)


def problems(arch: str) -> Iterator[AttentionProblem]:
    """Yield plain problems: the head dims that tables tell apart, 16-bit and 32-bit dtypes, padded samples."""
    half = "float16"
    for d in (64, 128, 256):
        yield _problem(arch, half, d)
    yield _problem(arch, half, 80, seq_lens=True)
    for d in (64, 256):
        yield _problem(arch, half, d).replace(aligned=False)
    for d in (64, 128):
        yield _problem(arch, "float32", d)


SAME_DOCUMENT = """def same_document(b, h, i, j, t0):
    v0 = load(t0, i)
    v1 = load(t0, j)
    v2 = eq(v0, v1)
    return v2"""
RELATIVE = """def relative_bias(score, b, h, i, j, t0):
    v0 = mul(h, 8192)
    v1 = sub(i, j)
    v2 = add(v0, v1)
    v3 = load(t0, v2)
    v4 = add(score, v3)
    return v4"""
CAPPED = """def capped(score, b, h, i, j):
    v0 = div(score, 30.0)
    v1 = tanh(v0)
    v2 = mul(v1, 30.0)
    return v2"""


def feature_problems(arch: str) -> Iterator[AttentionProblem]:
    """Yield problems with features: all that compose on dense tensors, packed sequences, wide heads, MLA's 576 and 512.

    It also yields problems without a mask and in bfloat16, which have the same tiles as `problems`.
    """
    half, spec = "float16", gpu_spec(arch)
    yield _problem(arch, half, 128, causal=False)
    if spec is not None and spec.has_bf16:
        yield _problem(arch, "bfloat16", 128)
    everything = {**EVERYTHING, "window_right": 64, "bias_grad": True}
    for d, bias in ((64, half), (128, "float32")):
        yield _problem(arch, half, d).replace(**{**everything, "bias": bias})
    # A bias alone: it takes the most shared memory besides the tiles, and ptxas once serialised wgmma in such loops.
    for d in (64, 128, 256) if spec is not None and spec.has_wgmma else (256,):
        yield _problem(arch, half, d).replace(bias=half)
    yield _problem(arch, half, 64, causal=False).replace(dropout=True)  # dropout alone
    packed = {"layout": VARLEN, "total_q": 2048, "total_k": 2048}
    yield _problem(arch, half, 64).replace(**packed)
    yield _problem(arch, half, 128).replace(window_left=128, dropout=True, dropout_origins=True, **packed)
    if spec is not None and spec.has_wgmma:  # partial results, as for keys that are spread over several devices
        yield _problem(arch, half, 128).replace(out_dtype="float32", **packed)
    yield _problem(arch, half, 320)
    yield _problem(arch, half, 576).replace(head_dim_v=512)
    for d, block in ((64, (128, 128)), (64, (64, 64)), (128, (128, 128)), (128, (64, 64)), (256, (128, 64))):
        yield _problem(arch, half, d, causal=False).replace(mask=block)
    yield _problem(arch, half, 128, causal=False, seq_lens=True).replace(mask=(128, 128))
    with_mask = {**everything, "bias": half, "window_left": -1, "window_right": -1, "mask": (64, 128)}
    yield _problem(arch, half, 64).replace(**with_mask)
    # Score functions: a relative bias with its gradient, a softcap with a block mask, and with a bias.
    for d in (64, 128, 256):
        yield _problem(arch, half, d).replace(score_fn=SCORE_EXAMPLE, score_grad=True)
    yield _problem(arch, half, 128, causal=False).replace(score_fn=CAPPED, mask=(128, 128))
    yield _problem(arch, half, 64).replace(score_fn=CAPPED, bias=half, bias_grad=True)


# Descales of each tensor, of each head, of each block of q and k, and means.
TENSOR = dict.fromkeys(("q_descale", "k_descale", "v_descale"), PER_TENSOR)
HEAD = dict.fromkeys(TENSOR, PER_HEAD)
BLOCK = {**dict.fromkeys(TENSOR, PER_BLOCK), "v_descale": PER_HEAD}
MEANS = {"k_mean": True, "v_mean": True}


def eight_bit_problems(arch: str) -> Iterator[AttentionProblem]:
    """Yield problems of float8 and int8 that the GPU runs: each dtype, head dim and kind of descale, all features."""
    spec = gpu_spec(arch)
    if spec is None or not spec.has_bf16:
        return
    packed = {"layout": VARLEN, "total_q": 2048, "total_k": 2048, "window_left": 128, "sinks": True}
    int8, e4m3, bf16 = "int8", "float8_e4m3fn", "bfloat16"
    rows: list[tuple[str, int, dict[str, Any]]] = [
        (int8, 64, {"value_dtype": bf16, "k_mean": True, **BLOCK}),
        (int8, 128, {"value_dtype": bf16, "k_mean": True, **BLOCK}),
        (int8, 256, {"value_dtype": "float16", "out_dtype": "float16", **TENSOR}),
        (int8, 80, {"value_dtype": bf16, "aligned": False, **HEAD}),
        (int8, 128, {"value_dtype": bf16, **packed, **BLOCK}),
    ]
    if spec.has_fp8:
        rows += [
            (e4m3, 64, {**BLOCK, **MEANS}),
            (e4m3, 128, {**TENSOR}),
            (e4m3, 128, {**BLOCK, **MEANS}),
            (e4m3, 256, {**HEAD}),
            (e4m3, 192, {"head_dim_v": 128, **HEAD}),
            (e4m3, 128, {"out_dtype": "float32", "seq_lens": True, **packed, "layout": "bhsd", **HEAD}),
            (e4m3, 64, {"softcap": 30.0, "alibi": True, "sinks": True, **BLOCK, **MEANS}),
            ("float8_e5m2", 128, {**TENSOR}),
            (int8, 128, {"value_dtype": e4m3, **BLOCK, **MEANS}),
        ]
    for dtype, d, changes in rows:
        yield _problem(arch, dtype, d).replace(**{"out_dtype": bf16, **changes})


# Bytes of spills that default tiles may have with features, by kernel and class of GPU: the most that ptxas spills with
# Triton 3.6 on 2026-11-23, rounded up. Dropout's words, slopes, bias addresses and the tanh of the softcap are alive
# together with accumulators that fill the registers, and combinations of features have no separate tiles. The table of
# tiles has the spills without features. A number after a class is a padded head_dim.
FEATURE_SPILLS: dict[str, dict[str, int]] = {
    "fwd": {"small": 64, "large": 64, "turing mask": 672, "turing mask 256": 4096},
    "dkdv": {
        "wgmma": 224, "wgmma 128": 1824, "wgmma ragged": 352, "large": 1856, "small": 128, "small 256": 160,
        "turing": 32, "turing 256": 2368,
    },
    "dq": {"wgmma": 112, "large": 384, "small": 48, "turing": 32},
    "short": {"wgmma": 32, "wgmma ragged": 32, "large": 352, "small": 352},
    "dbias": {"turing": 1280, "large": 352},
    "captured": {},
}  # fmt: skip


# Bytes of spills allowed to the Hopper forward: values that are stored once for each tile, at its ends or by the
# producer. Loops over keys may not spill (`clean_loops`).
HOPPER_SPILLS = 96
HOPPER_INVARIANT_SPILLS = {64: 256, 256: 1024}  # by columns: three consumers; the fold of a tile's last chunk
HOPPER_SCORE_SPILLS = 3000  # the example computes more for a score than functions do; a relative bias spills nothing


def _with_feature_budget(kind: str, problem: AttentionProblem, config: AttentionConfig) -> AttentionConfig:
    spills, name = FEATURE_SPILLS[kind], gpu_class(problem)
    if problem.mask and f"{name} mask" in spills:
        name = f"{name} mask"
    allowed = spills.get(f"{name} {padded_head_dim(problem.head_dim)}", spills.get(name, 0))
    if problem.dropout_origins:  # their address, and what they add to head keys
        allowed += 32
    if problem.mask:  # the addresses of its words
        allowed += 224 if problem.bias else 64
    if problem.score_fn:  # positions, offsets and slopes, which are alive with the accumulators
        allowed += 352
    if not problem.features & (PER_SCORE_FEATURES | {"varlen", "window"}):
        return config
    return replace(config, spill_budget=max(allowed, config.spill_budget))


def _spec(kernel: str, problem: AttentionProblem, config: AttentionConfig, launch: Launch) -> CompileSpec:
    features = "+".join(sorted(problem.features - {"gqa"})) or "full"
    if problem.bias_grad and not problem.score_fn:
        features = "every feature"
    ragged = "" if problem.aligned else " unaligned"
    ragged += f" to {problem.out_dtype}" if problem.out_dtype else ""
    ragged += f" v {problem.value_dtype}" if problem.value_dtype else ""
    if problem.dtype in EIGHT_BITS:
        ragged += f" descales {problem.q_descale}{problem.k_descale}{problem.v_descale}" + " means" * problem.k_mean
    case = f"{problem.dtype} D={problem.head_dim} {features}{ragged} {config.block_m}x{config.block_n} {config.form}"
    return CompileSpec(launch, kernel, f"{case} w{config.num_warps} s{config.num_stages}", config.spill_budget)


def _forward(problem: AttentionProblem, config: AttentionConfig) -> CompileSpec:
    return _spec("attention_fwd/v2", problem, config, fwd.make_launch(problem, *example_attention(problem), config))


def _backward(problem: AttentionProblem, has_dlse: bool, **other_tensors: Any) -> bwd.Backward:
    """Return a backward pass without memory."""
    tensors, out, lse = example_attention(problem)
    out = out.to(tensors.q.dtype)  # the merged output, whatever the dtype of partial ones
    dout = torch.empty_like(out)
    dlse = torch.empty_like(lse) if has_dlse else None
    return bwd.Backward(problem, tensors._replace(**other_tensors), out, lse, dout, dlse)


def _gradient(kind: str, problem: AttentionProblem, config: AttentionConfig, has_dlse: bool = False) -> CompileSpec:
    backward = _backward(problem, has_dlse)
    gradients = example_gradients(backward.tensors, problem.out_dtype)
    (launch, *_), _ = backward.launches(kind, config, gradients)
    return _spec(f"attention_bwd/{kind}", problem, config, launch)


def _short(arch: str) -> Iterator[CompileSpec]:
    """Yield the backward of sequences that fit one tile: every tile, and every feature on dense and packed ones."""
    packed = {"layout": VARLEN, "total_q": 2048, "total_k": 2048, "softcap": 30.0, "dropout": True, "sinks": True}
    cases: list[tuple[int, int, dict[str, Any]]] = [
        *((d, n, {}) for d in (64, 128) for n in (16, 32, 64)),
        (32, 64, {"window_right": -1}),
        (80, 50, {"seq_lens": True}),
        (64, 60, {"aligned": False}),
        (64, 30, {"head_dim_v": 16}),
        (64, 64, EVERYTHING),
        (128, 64, packed),
    ]
    for d, n, changes in cases:
        problem = _problem(arch, "float16", d).replace(**{"heads_kv": 8, "seqlen_q": n, "seqlen_k": n, **changes})
        for config in candidates("short", problem):
            yield _gradient("short", problem, _with_feature_budget("short", problem, config), bool(changes))


def _preprocess(problem: AttentionProblem, has_dlse: bool) -> CompileSpec:
    # It spills 4 bytes with heads of 512 columns on sm_80.
    tile = AttentionConfig(bwd.PREPROCESS_BLOCK_M, 1, bwd.PREPROCESS_WARPS, 1, spill_budget=16)
    return _spec("attention_bwd/preprocess", problem, tile, _backward(problem, has_dlse).preprocess())


def _merges() -> Iterator[CompileSpec]:
    """Yield the merge of partial outputs: head dims that fill a tile, and one that does not."""
    for d in (64, 80, 128, 512):
        out, lse = torch.empty(2, 8, 1024, d, device="meta"), torch.empty(2, 8, 1024, device="meta")
        yield CompileSpec(merge.make_launch(out, lse, out, lse), "attention_merge", f"float32 D={d}")


def _sums(arch: str) -> Iterator[CompileSpec]:
    """Yield the sums of partial dk and dv of a group: head dims that fill tiles, and a packed case that does not."""
    packed = {"layout": VARLEN, "total_q": 2048, "total_k": 2048, "head_dim_v": 128}
    for d, changes in ((128, {}), (80, packed)):
        problem = _problem(arch, "float16", d).replace(**changes)
        tensors, _, _ = example_attention(problem)
        memory = [torch.empty(n, device="meta") for n in bwd_partials.partial_sizes(problem, 2)]
        launch = bwd_partials.make_launch(problem, tensors, memory, 2, tensors.k, tensors.v)
        yield CompileSpec(launch, "attention_bwd/sum_partials", f"float16 D={d}")


def _clearing() -> Iterator[CompileSpec]:
    """Yield the kernels that clear rows of no sequence: of out and the log-sum-exp, and of gradients."""
    offsets, lse = torch.empty(9, dtype=torch.int32, device="meta"), torch.empty(8, 4096, device="meta")
    for d, dv in ((64, 64), (80, 80), (192, 128)):
        k, v = (torch.empty(4096, 8, columns, dtype=torch.float16, device="meta") for columns in (d, dv))
        yield CompileSpec(
            clear.make_launch(offsets, 1024, v, None, lse, float("inf")), "attention_clear", f"float16 D={dv} out"
        )
        yield CompileSpec(clear.make_launch(offsets, 1024, k, v), "attention_clear", f"float16 D={d} gradients")


def _bias_gradient(problem: AttentionProblem) -> Iterator[CompileSpec]:
    tile = bwd_dbias.config(problem)
    assert tile is not None, "head_dims up to 128 have a tile everywhere"
    tile = _with_feature_budget("dbias", problem, tile)
    bias = example_attention(problem)[0].attn_bias
    assert bias is not None, "its gradient is asked for"
    # A full bias, one number for each key, one for each query.
    for name, view in (("tiles", bias), ("keys", bias[:, :, :1]), ("queries", bias[..., :1])):
        values = _backward(problem, False, attn_bias=view).pointer_arguments()
        launch, _ = bwd_dbias.make_launch(problem, values, view.new_empty(view.shape))
        yield _spec(f"attention_bwd/dbias_{name}", problem, tile, launch)


def _captured_gradient(problem: AttentionProblem) -> Iterator[CompileSpec]:
    tile = bwd_dbias.config(problem)
    assert tile is not None, "head_dims up to 128 have a tile everywhere"
    tile = _with_feature_budget("captured", problem, tile)
    backward = _backward(problem, False)
    table = backward.tensors.score_tensor0
    assert table is not None, "its gradient is asked for"
    launch, _ = bwd_captured.make_launch(problem, backward.pointer_arguments(), {0: table})
    yield _spec("attention_bwd/captured", problem, tile, launch)


def _hopper_specs(arch: str) -> Iterator[CompileSpec]:
    """Yield the Gluon forward with each config of its tables, and its features and masks."""
    # First every config of the tables in one dtype; then the other dtype, keys that end inside a block, other lengths.
    packed = {"layout": VARLEN, "total_q": 8192, "total_k": 8192}
    cases: list[tuple[tuple[int, bool], str, dict[str, Any]]] = [
        *(
            (case, "bfloat16", {"seqlen_q": 16384, "seqlen_k": min(max_head_dim, 16384)})
            for case, rows in hopper_configs.CONFIGS.items()
            for max_head_dim, _ in rows
        ),
        ((128, True), "float16", {}),
        ((128, False), "float16", {"seqlen_k": 4095}),
        *((case, "bfloat16", {"seq_lens": True}) for case in ((128, True), (256, False))),
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
        ((256, True), "bfloat16", {"window_left": 1000, "window_right": 100}),
        ((256, True), "bfloat16", {"window_left": 1000, "head_dim_v": 128}),
        *((case, "bfloat16", {"softcap": 30.0}) for case in ((64, False), (128, True), (192, True), (256, True))),
        ((128, True), "bfloat16", {"window_left": 1000, "softcap": 30.0} | packed),
        *((case, "bfloat16", packed) for case in ((128, True), (256, True))),
        *((case, "bfloat16", {"sinks": True}) for case in ((128, False), (256, True))),
        ((64, True), "bfloat16", {"sinks": True, "window_left": 127}),
        *((case, "bfloat16", {"alibi": True}) for case in ((64, True), (128, True), (256, False), (256, True))),
        ((128, True), "float16", {"alibi": True} | packed),
        ((128, True), "bfloat16", {"alibi": True, "softcap": 30.0, "window_left": 1000}),
        *((case, "bfloat16", {"out_dtype": "float32"}) for case in ((64, False), (128, True))),
        *(((d, d != 128), "bfloat16", {"batch_invariant": True}) for d in hopper_configs.INVARIANT),
        *(((d, True), "bfloat16", {"batch_invariant": True} | packed) for d in hopper_configs.INVARIANT),
        ((64, True), "bfloat16", {"batch_invariant": True, "head_dim_v": 128}),
        ((128, True), "bfloat16", {"batch_invariant": True, "out_dtype": "float32"}),
        *(
            ((d, True), "bfloat16", {"batch_invariant": True, "window_left": 1000, "sinks": True} | packed)
            for d in (64, 128)
        ),
        *(((d, False), "bfloat16", {"mask": (128, 128)}) for d in hopper_configs.MASK_CONFIGS),
        ((64, False), "float16", {"mask": (128, 64)}),
        ((128, False), "bfloat16", {"mask": (128, 64), "sinks": True, "softcap": 30.0}),
        *(((d, False), "bfloat16", {"mask": (64, 64)}) for d in (64, 128)),
        *(((d, False), "bfloat16", {"mask": (64, 64), "sinks": True, "softcap": 30.0}) for d in (64, 128)),
        ((128, False), "bfloat16", {"mask": (64, 128)}),
        *(
            (case, "bfloat16", {"score_fn": SCORE_EXAMPLE})
            for case in ((64, False), (96, True), (128, True), (256, True))
        ),
        ((192, True), "float16", {"score_fn": SCORE_EXAMPLE, "head_dim_v": 128}),
        *(((128, causal), "bfloat16", {"score_fn": RELATIVE}) for causal in (False, True)),
        *(((d, True), "bfloat16", {"score_fn": RELATIVE}) for d in (64, 96, 192, 256)),
        ((128, False), "bfloat16", {"score_fn": CAPPED, "mask": (128, 128)}),
        ((128, False), "bfloat16", {"score_fn": SCORE_EXAMPLE, "mask": (128, 64), "softcap": 30.0}),
    ]
    from diyfa.backends.cuda.hopper import fwd_launch as hopper_fwd_launch  # needs the Gluon that was asked for above

    for (d, causal), dtype, changes in cases:
        problem = _problem(arch, dtype, d, causal).replace(**{"seqlen_q": 4096, "seqlen_k": 4096, **changes})
        if not hopper_configs.refuses(problem):
            config = hopper_configs.select_config(problem)
            tensors, out, lse = example_attention(problem)
            totals = hopper_fwd_launch.totals_memory(problem, config, out.device)
            launch = hopper_fwd_launch.make_launch(problem, tensors, out, lse, config, totals)
            yield _hopper_spec(problem, config, launch)
    transpositions = set()
    for problem in _hopper_eight_bit_problems(arch):
        config = hopper_configs.select_config(problem)
        *transposition, attention = hopper_fwd_launch.forward_pass(problem, *example_attention(problem)).launches
        yield _hopper_spec(problem, config, attention)
        lengths = "packed" if problem.varlen else "seq_lens" if problem.seq_lens else "equal"
        case = f"{hopper_configs.value_dtype(problem)} D={problem.head_dim_v} {lengths}"
        for launch in transposition:
            if case not in transpositions:
                transpositions.add(case)
                yield CompileSpec(launch, "attention_fwd/sm90_transpose", case)


def _hopper_eight_bit_problems(arch: str) -> Iterator[AttentionProblem]:
    """Yield problems of float8 and int8: each config of the tables, and each kind of descale with features and other
    lengths."""
    e4m3: dict[str, Any] = {"dtype": "float8_e4m3fn"}
    int8: dict[str, Any] = {"dtype": "int8", "value_dtype": "bfloat16"}
    int8_e4m3: dict[str, Any] = {"dtype": "int8", "value_dtype": "float8_e4m3fn"}
    packed = {"layout": VARLEN, "total_q": 8192, "total_k": 8192}
    small: dict[str, Any] = {"seqlen_q": 512, "seqlen_k": 512}
    cases: list[tuple[int, bool, dict[str, Any]]] = [
        *((*case, e4m3 | TENSOR) for case in hopper_configs.FLOAT8_CONFIGS),
        *((*case, int8 | TENSOR) for case in hopper_configs.INT8_CONFIGS),
        *((*case, int8_e4m3 | TENSOR) for case in hopper_configs.FLOAT8_CONFIGS),
        *((d, True, small | x | TENSOR) for d in hopper_configs.FLOAT8_SMALL for x in (e4m3, int8, int8_e4m3)),
    ]
    for x in (e4m3, int8, int8_e4m3):
        cases += [
            (128, False, x | BLOCK | MEANS),
            (128, True, x | BLOCK | MEANS),
            (128, False, {"seqlen_k": 4095, "out_dtype": "float32", "sinks": True, "alibi": True, **x, **HEAD}),
            (128, False, {"window_left": 1000, "sinks": True, "alibi": True, **packed, **x, **BLOCK, **MEANS}),
            (64, True, {"softcap": 30.0, "window_left": 1000, **packed, **x, **BLOCK}),
            (256, True, {"seq_lens": True, **x, **HEAD, **MEANS}),
            (192, True, {"head_dim_v": 128, "out_dtype": "float16", **x, **HEAD}),
        ]
    cases.append((192, False, int8 | {"value_dtype": "float16"} | BLOCK | MEANS))
    for d, causal, changes in cases:
        sizes = {"seqlen_q": 4096, "seqlen_k": 4096, "out_dtype": "bfloat16"}
        problem = _problem(arch, "bfloat16", d, causal).replace(**{**sizes, **changes})
        assert not hopper_configs.refuses(problem), problem
        yield problem


def _hopper_spec(problem: AttentionProblem, config: hopper_configs.Sm90Config, launch: Launch) -> CompileSpec:
    d, dv = problem.head_dim, problem.head_dim_v
    widths = f"{d}" if d == dv else f"{d}/{dv}"
    mask = "causal" if problem.causal else "full" if problem.seqlen_k % config.block_n == 0 else "ragged"
    features = "".join(f"{name} " for name in sorted(problem.features - {"causal", "gqa", "head_dim_v"}))
    blocks = f" of {problem.mask[0]}x{problem.mask[1]}" if problem.mask else ""
    function = f"{function_name(problem.score_fn)} " if problem.score_fn else ""
    value_dtype = f" v {problem.value_dtype}" if problem.value_dtype else ""
    case = (
        f"{problem.dtype}{value_dtype} D={widths} {features}{function}{mask}{blocks} "
        f"{config.consumers}x{hopper_configs.CONSUMER_ROWS}x{config.block_n}"
        f"{f' to {problem.out_dtype}' if problem.out_dtype else ''}"
        f"{f' descales {problem.q_descale}{problem.k_descale}{problem.v_descale}' if problem.q_descale else ''}"
        f"{' means' if problem.k_mean else ''}"
        f"{f' boxes of {config.box_columns}' if config.box_columns else ''}"
        f"{' direct' if config.store_from_registers else ''}"
        f"{' pairs' if config.pairs else ''}"
        f"{f' {config.q_in_registers} of Q in registers' if config.q_in_registers else ''}"
        f"{' fixed max' if launch.constants['config'].fixed_max else ''}"
        f"{' pingpong' if config.pingpong else ''}{'' if config.scheduler == 'static' else ' ' + config.scheduler}"
    )
    is_heavy = problem.score_fn == SCORE_EXAMPLE
    budget = HOPPER_SCORE_SPILLS if is_heavy else _hopper_spills(problem)
    return CompileSpec(launch, "attention_fwd/sm90", case, budget, clean_loops=not is_heavy)


def _hopper_spills(problem: AttentionProblem | KVCacheProblem) -> int:
    """Return the bytes of spills allowed to a problem without a score function."""
    wide = max(problem.head_dim, problem.head_dim_v)
    columns = min(columns for columns in hopper_configs.INVARIANT if wide <= columns)
    return HOPPER_INVARIANT_SPILLS.get(columns, HOPPER_SPILLS) if problem.batch_invariant else HOPPER_SPILLS


def _hopper_tutorial_specs(arch: str) -> Iterator[CompileSpec]:
    """Yield the Gluon forward of the tutorial, which has one form for all masks and lengths."""
    from diyfa.backends.cuda.hopper import tutorial

    for d, dtype in ((64, torch.float16), (128, torch.bfloat16)):
        q, out = (torch.empty(2, 8, 1024, d, dtype=dtype, device="meta") for _ in range(2))
        k, v = (torch.empty(2, 4, 1024, d, dtype=dtype, device="meta") for _ in range(2))
        lse = torch.empty(2, 8, 1024, device="meta")
        launch = tutorial.make_launch(q, k, v, out, lse, True, d**-0.5)
        yield CompileSpec(launch, "attention_fwd/tutorial", f"{dtype_name(dtype)} D={d}", clean_loops=True)


# Bytes of spills allowed to the Hopper backward: values stored at the ends of its loops. Loops may spill with a softcap
# and in form "mla" only.
HOPPER_BWD_SPILLS, HOPPER_BWD_ALIBI_SPILLS, HOPPER_BWD_SOFTCAP_SPILLS = 192, 224, 352
HOPPER_BWD_MLA_SPILLS = 720  # form "mla" is nonetheless up to 1.6 times as fast as form "columns"


def _hopper_backward_specs(arch: str) -> Iterator[CompileSpec]:
    """Yield the Gluon backward with each tile, and with all its features on packed sequences."""
    from diyfa.backends.cuda.hopper import bwd_launch as hopper_bwd

    packed = {"layout": VARLEN, "total_q": 8192, "total_k": 8192, "window_left": 1000, "softcap": 30.0, "sinks": True}
    divided = {"batch": 2, "total_k": 2048}  # groups of query heads are divided (`attention/bwd_partials.py`)
    for d, dtype, causal, changes in (
        (64, "bfloat16", False, {}),
        (64, "float16", True, {"seq_lens": True, "sinks": True, "deterministic": True}),
        (128, "float16", True, {}),
        (128, "bfloat16", True, {"deterministic": True, "window_left": 1000, "sinks": True}),
        (128, "bfloat16", True, {"softcap": 30.0, "window_left": 1000}),
        (128, "bfloat16", True, packed),
        (64, "float16", False, {"out_dtype": "float32"}),
        (128, "bfloat16", True, {"out_dtype": "float32"}),
        (256, "bfloat16", True, {}),
        (256, "bfloat16", True, {**packed, "out_dtype": "float32"}),
        (192, "bfloat16", True, {**packed, "head_dim_v": 128}),
        (192, "bfloat16", True, {**packed, "head_dim_v": 128, "softcap": 0.0}),
        (192, "bfloat16", False, {"head_dim_v": 128, "out_dtype": "float32"}),
        (192, "bfloat16", True, {}),
        # Head dims that end inside the last box of 64 columns.
        (96, "bfloat16", True, {}),
        (96, "bfloat16", True, {"softcap": 30.0, "window_left": 1000}),
        (80, "bfloat16", False, {"out_dtype": "float32"}),
        (72, "bfloat16", True, {"seq_lens": True}),  # strides are multiples of 16 bytes, but not of 16 elements
        (80, "float16", True, {"seq_lens": True, "sinks": True, "deterministic": True}),
        (64, "float16", True, divided),
        (128, "bfloat16", False, {**divided, "deterministic": True}),
        (128, "bfloat16", True, {**packed, **divided}),
        (192, "float16", True, {**divided, "heads_kv": 1, "head_dim_v": 128, "sinks": True}),
        (64, "float16", False, {"mask": (128, 128)}),
        (128, "bfloat16", False, {"mask": (128, 128)}),
        (128, "bfloat16", False, {"mask": (64, 128), "softcap": 30.0, "sinks": True}),
        (96, "bfloat16", False, {"mask": (128, 128), "out_dtype": "float32"}),
        (64, "bfloat16", True, {"alibi": True}),
        (128, "bfloat16", True, {"alibi": True}),
        (128, "bfloat16", False, {"alibi": True}),
        (256, "bfloat16", True, {"alibi": True}),
        (64, "bfloat16", True, {**packed, "softcap": 0.0, "alibi": True}),
        (128, "bfloat16", True, {**packed, "softcap": 0.0, "alibi": True}),
        (128, "float16", True, {**packed, "alibi": True}),
        (128, "bfloat16", True, {"alibi": True, "deterministic": True, "window_left": 1000}),
    ):
        problem = _problem(arch, dtype, d, causal).replace(**{"batch": 16, **changes})
        tensors, out, lse = example_attention(problem)
        gradients = example_gradients(tensors, problem.out_dtype)
        backward = hopper_bwd.Sm90Backward(
            problem, tensors, hopper_bwd_configs.select_config(problem), lse, gradients.dq
        )
        dout, delta = torch.empty_like(out), torch.empty_like(lse) if problem.sinks else None
        features = "+".join(sorted(problem.features - {"gqa"})) or "full"
        features += "+deterministic" if problem.deterministic else ""
        case = f"{dtype} D={d} {features} {backward.config.block_m}x{backward.config.block_n}"
        case += f" to {problem.out_dtype}" if problem.out_dtype else ""
        case += f" in {backward.subgroups} subgroups" if backward.subgroups > 1 else ""
        budget = HOPPER_BWD_ALIBI_SPILLS if problem.alibi else HOPPER_BWD_SPILLS
        budget = HOPPER_BWD_SOFTCAP_SPILLS if problem.softcap else budget
        budget = HOPPER_BWD_MLA_SPILLS if backward.config.form == "mla" else budget
        clean_loops = not problem.softcap and backward.config.form != "mla"
        out, dout = (x.to(tensors.q.dtype) for x in (out, dout))  # merged, whatever the dtype of partial ones
        dlse = None if delta is None else torch.empty_like(lse)
        names = {
            "_prepare_kernel": ("prepare", 0),
            "_find_long_blocks_kernel": ("long_blocks", 0),
            "_bwd_sm90_kernel": ("dkdv" if backward.config.form == "columns" else "", budget),
            "_bwd_wide_dq_kernel": ("dq", budget),
            "_convert_kernel": ("convert", 0),
            "_sum_partials_kernel": ("sum_partials", 0),
        }
        for launch in backward.launches(out, dout, dlse, delta, gradients):
            name, spill_budget = names[launch.kernel.__name__]
            kernel = f"attention_bwd/sm90{name and '_' + name}"
            yield CompileSpec(launch, kernel, case, spill_budget, clean_loops and name in ("", "dkdv", "dq"))


def kvcache_problems(arch: str) -> Iterator[KVCacheProblem]:
    """Yield calls with a cache: head dims, pages, dtypes, features on many rows, a latent cache, batch invariance."""
    spec = gpu_spec(arch)
    has_bf16, has_fp8 = (False, False) if spec is None else (spec.has_bf16, spec.has_fp8)
    half = "bfloat16" if has_bf16 else "float16"

    def problem(d: int, dtype: str, heads: int = 32, heads_kv: int = 8, **changes: Any) -> KVCacheProblem:
        fields = {"window_right": 0, "lengths": True, **changes}
        return KVCacheProblem("cuda", arch, dtype, dtype, "bshd", 16, heads, heads_kv, 1, 8192, d, d).replace(**fields)

    yield problem(64, "float16")
    yield problem(128, half, page_size=16)
    features: dict[str, Any] = {"window_left": 256, "softcap": 30.0, "alibi": True, "sinks": True, "leftpad": True}
    yield problem(128, "float16", seqlen_q=64, layout=VARLEN, total_q=1024, page_size=64, **features)
    yield problem(256, "float16", cache_batch_idx=True, head_dim_v=128)
    if has_bf16:
        yield problem(576, half, 128, 1, head_dim_v=512, page_size=64, latent=True)
    if has_fp8:
        yield problem(128, half, cache_dtype="float8_e4m3fn", page_size=16, descales=True)
    for splits in (0, 1):  # a program for each chunk, and one for all chunks of a tile where rows are few
        yield problem(128, half, page_size=16, batch_invariant=True, num_splits=splits)
    yield problem(64, "float16", batch_invariant=True, sinks=True)


def _kvcache_case(problem: KVCacheProblem) -> str:
    cache = "" if problem.cache_dtype == problem.dtype else f" {problem.cache_dtype}"
    d, dv = problem.head_dim, problem.head_dim_v
    shown = ("softcap", "alibi", "sinks", "leftpad", "cache_batch_idx", "latent", "batch_invariant", "num_splits")
    names = "".join(f" {name}" for name in shown if getattr(problem, name))
    pages = f" page {problem.page_size}" if problem.paged else ""
    return f"{problem.dtype}{cache} D={d if d == dv else f'{d}/{dv}'} Sq={problem.seqlen_q}{pages}{names}"


def _kvcache_specs(arch: str) -> Iterator[CompileSpec]:
    """Yield the kernels over a cache, and for some calls, which cover all forms, the combine and the append kernels."""
    for problem in kvcache_problems(arch):
        tensors, out, lse = example_kvcache(problem)
        config = decode.select_config(problem)
        memory = stream_k.workspace(problem, config, out.device)
        main, *combine = decode.make_launches(problem, tensors, out, lse, config, memory)
        case = _kvcache_case(problem)
        tile = f"{config.block_m}x{config.block_n} w{config.num_warps} s{config.num_stages}"
        # 64 rows of a latent cache: the 64x512 sums alone take 128 registers of each thread. With wgmma these rows are
        # nonetheless 1.5 to 1.9 times as fast as 32 rows with mma.sync, which spill nothing.
        budget = 1536 if problem.latent and config.block_m > MMA_BLOCK_M else 0
        # On sm_75 with every feature ptxas stops at 168 registers, and pages loaded a block ahead exceed them. In the
        # batch-invariant mode, where the tile is fixed, the sums of a chunk and of all earlier ones are alive together.
        if arch == "sm_75" and problem.alibi:
            budget = 32
        if problem.batch_invariant:
            budget = 128
        if arch == "sm_100" and problem.descales:
            budget = 16
        yield CompileSpec(main, "kvcache_fwd/decode", f"{case} {tile}", budget)
        if problem.sinks or problem.batch_invariant or problem.cache_batch_idx:
            yield from (CompileSpec(launch, "kvcache_fwd/combine", case) for launch in combine)
        if problem.cache_batch_idx or problem.descales:
            new_k, new_v = (
                tensors.q.new_empty(problem.batch, 4, problem.heads_kv, d)
                for d in (problem.head_dim, problem.head_dim_v)
            )
            angles = tensors.q.new_empty(problem.capacity, 32)
            launch = append.make_launch(problem, tensors, NewKeys(new_k, new_v, angles, angles, True, tensors.q))
            assert launch is not None, "there are new keys"
            yield CompileSpec(launch, "kvcache_append/append", f"{case} rotary")


def _hopper_decode_specs(arch: str) -> Iterator[CompileSpec]:
    """Yield the Gluon kernel over a latent cache: with pages and several tokens, and contiguous with all its features.

    Each has another form of the combine kernel: programs with whole rows, and with some columns of a row.
    """
    from diyfa.backends.cuda.hopper import decode_mla, decode_mla_configs

    latent = KVCacheProblem("cuda", arch, "bfloat16", "bfloat16", "bshd", 16, 128, 1, 1, 8192, 576, 512)
    latent = latent.replace(latent=True, lengths=True)
    for problem in (
        latent.replace(page_size=64, seqlen_q=2, window_right=0),
        latent.replace(batch=4, dtype="float16", cache_dtype="float16", heads_q=16, leftpad=True, cache_batch_idx=True),
    ):
        tensors, out, lse = example_kvcache(problem)
        memory = stream_k.workspace(problem, decode_mla_configs.CONFIG, out.device)
        main, combine = decode_mla.make_launches(problem, tensors, out, lse, decode_mla_configs.CONFIG, memory)
        yield CompileSpec(main, "kvcache_fwd/sm90", _kvcache_case(problem), clean_loops=True)
        yield CompileSpec(combine, "kvcache_fwd/combine", f"{_kvcache_case(problem)} sm90")


def _hopper_prefill_specs(arch: str) -> Iterator[CompileSpec]:
    """Yield the Gluon forward over a cache: pages smaller than a tile, equal and larger, no pages, packed and dense
    queries, and head dims that have other boxes."""
    from diyfa.backends.cuda.hopper import fwd_launch as hopper_fwd_launch
    from diyfa.backends.cuda.hopper import prefill, prefill_configs

    call = KVCacheProblem("cuda", arch, "bfloat16", "bfloat16", "bshd", 4, 32, 8, 2048, 8192, 128, 128, window_right=0)
    call = call.replace(lengths=True)
    packed = {"layout": VARLEN, "total_q": 8192}
    cases: list[dict[str, Any]] = [
        {"page_size": 16},
        {"page_size": 16, **packed},
        {"page_size": 256, **packed},
        {"page_size": 128, "window_right": -1},
        {"cache_batch_idx": True},
        {"page_size": 64, "seqlen_q": 512, "batch": 1},
        {"page_size": 64, "head_dim": 64, "head_dim_v": 64, **packed},
        {"page_size": 16, "head_dim": 64, "head_dim_v": 64},
        {"page_size": 64, "head_dim": 192, "head_dim_v": 128, **packed},
        {"page_size": 16, "head_dim": 192, "head_dim_v": 128},
        {"page_size": 64, "head_dim": 256, "head_dim_v": 256, **packed},
        {"page_size": 16, "window_left": 1000, "softcap": 30.0, "alibi": True, "sinks": True, **packed},
        {"packed_keys": True, **packed},
        *({"page_size": 64, "head_dim": d, "head_dim_v": d, "batch_invariant": True} for d in hopper_configs.INVARIANT),
    ]
    for changes in cases:
        problem = call.replace(**changes)
        reason = prefill_configs.refuses(problem)
        assert reason is None, reason
        config = prefill_configs.select_config(problem)
        tensors, out, lse = example_kvcache(problem)
        if problem.packed_keys:  # with seqlens, so that a sequence may use fewer keys than it has
            tensors = tensors._replace(seqlens=out.new_empty(problem.batch, dtype=torch.int32))
        totals = hopper_fwd_launch.totals_memory(prefill_configs.as_forward(problem), config, out.device)
        launch = prefill.make_launch(problem, tensors, out, lse, config, totals)
        tile = f"{config.consumers}x{hopper_configs.CONSUMER_ROWS}x{config.block_n}"
        case = f"{_kvcache_case(problem)} {'packed' if problem.varlen else 'even'} {tile}"
        yield CompileSpec(launch, "kvcache_fwd/sm90_prefill", case, _hopper_spills(problem), clean_loops=True)


def _quantizing(arch: str) -> Iterator[CompileSpec]:
    """Yield the passes of `quantize`: the sums for a mean, and each mode, dtype and head dim, rotated or not."""
    spec = gpu_spec(arch)
    if spec is None or not spec.has_bf16:
        return
    modes = {"measure": quantize.MEASURE.value, "by block": quantize.BY_BLOCK.value, "given": quantize.GIVEN.value}
    cases: list[tuple[str, int, str, Scheme]] = [
        ("by block", d, dtype, Scheme(torch.int8, PER_BLOCK, 128 if d < 256 else 64, 1, True, rotate))
        for d, dtype, rotate in ((64, "bfloat16", True), (128, "bfloat16", True), (256, "float16", False))
    ]
    cases += [
        ("measure", 128, "bfloat16", Scheme(torch.int8, PER_HEAD, 128, 4, False, True)),
        ("given", 128, "bfloat16", Scheme(torch.int8, PER_HEAD, 128, 4, False, True)),
        ("given", 80, "float32", Scheme(torch.int8, PER_TENSOR, 64, 1, True)),
        ("by block", 512, "float16", Scheme(torch.int8, PER_BLOCK, 64, 1)),
        ("by block", 512, "bfloat16", Scheme(torch.int8, PER_BLOCK, 64, 1, False, True)),
    ]
    if spec.has_fp8:
        cases = [(mode, d, dtype, scheme._replace(dtype=torch.float8_e4m3fn)) for mode, d, dtype, scheme in cases]
    for mode, d, dtype, scheme in cases:
        x = torch.empty(2, 8, 1024, d, dtype=getattr(torch, dtype), device="meta")
        mean = x.new_empty((2, 8, d), dtype=torch.float32) if scheme.smooth else None
        magnitude = None if mode == "by block" else x.new_empty((2, 8), dtype=torch.int32)
        descale = None if mode == "measure" else x.new_empty((2, 8, 8), dtype=torch.float32)
        values = None if mode == "measure" else torch.empty_like(x, dtype=scheme.dtype)
        name = (
            f"{dtype_name(scheme.dtype)} of {dtype} D={d} {mode}{' smooth' * scheme.smooth}{' rotate' * scheme.rotate}"
        )
        launch = quantize.make_launch(x, mean, values, magnitude, descale, scheme, modes[mode])
        yield CompileSpec(launch, "quantize/round", name)
        if mean is not None:
            sums = x.new_empty((2, 8, 2, 3, d), dtype=torch.float32)
            for kernel, launch in zip(
                ("sum", "mean"), quantize.mean_launches(x, sums, mean, magnitude, scheme), strict=True
            ):
                yield CompileSpec(launch, f"quantize/{kernel}", name)


BUILDER_SPILLS = 64  # bytes: values that are stored once for a row of blocks


def _building_masks() -> Iterator[CompileSpec]:
    """Yield the kernels that make block masks: every comparison, a boolean tensor and a jit function."""
    size = 40960
    meta: dict[str, Any] = {"device": "meta"}
    ids = torch.empty(2, size, dtype=torch.int64, **meta)
    lengths = torch.empty(2, dtype=torch.int32, **meta)
    functions = {
        "sinks, window, documents": masks.all_of(
            masks.any_of(masks.first_keys(4), masks.sliding_window(1024)), masks.document(ids)
        ),
        "prefix or tile": masks.any_of(
            masks.prefix_lm(lengths), masks.sliding_tile((40, 32, 32), (4, 4, 8), (3, 3, 3))
        ),
    }
    terms = {name: terms_of(function) or () for name, function in functions.items()}
    keep = torch.empty(2, 1, 2048, 2048, dtype=torch.bool, **meta)
    terms["booleans"] = ((Comparison("dense", keep.stride(), (keep,)),),)
    terms["jit function"] = ((Comparison("function", (), (ids,), SAME_DOCUMENT),),)
    for name, each in terms.items():
        for block in ((128, 128), (64, 64)):
            length = 2048 if name == "booleans" else size
            blocks, bits = torch.empty(8, dtype=torch.int32, **meta), torch.empty(8, dtype=torch.int32, **meta)
            for launch in build_mask.make_launches(each, (2, 1, length, length), block, blocks, bits):
                kernel = launch.kernel.__name__.strip("_")
                yield CompileSpec(launch, f"masks/{kernel}", f"{name} {block[0]}", BUILDER_SPILLS)
    for how in (Selection(16, True, 1, 2, False, (128, 64)), Selection(8, False, 0, 1, True, (64, 128))):
        q = torch.empty(1, 8, size, 128, dtype=torch.bfloat16, **meta)
        blocks, bits = torch.empty(8, dtype=torch.int32, **meta), torch.empty(8, dtype=torch.int32, **meta)
        for launch in select_blocks.make_launches(q, q[:, :2], how, blocks, bits):
            kernel = launch.kernel.__name__.strip("_")
            yield CompileSpec(launch, f"masks/{kernel}", f"selection in blocks of {how.block}", BUILDER_SPILLS)


def compile_specs(arch: str) -> Iterator[CompileSpec]:
    """Yield every attention case for `arch`."""
    if arch == hopper_configs.ARCH and not hopper_configs.environment_refusal():
        yield from _hopper_specs(arch)
        yield from _hopper_tutorial_specs(arch)
        yield from _hopper_backward_specs(arch)
        yield from _hopper_decode_specs(arch)
        yield from _hopper_prefill_specs(arch)
    yield from _kvcache_specs(arch)
    yield from _merges()
    yield from _sums(arch)
    yield from _short(arch)
    yield from _clearing()
    yield from _quantizing(arch)
    yield from _building_masks()
    for problem in problems(arch):
        for config in candidates("fwd", problem):
            yield _forward(problem, config)
        v1 = fwd_v1.config(problem)
        yield _spec("attention_fwd/v1", problem, v1, fwd_v1.make_launch(problem, *example_attention(problem)))
        for kind in ("dkdv", "dq"):
            for config in candidates(kind, problem):
                yield _gradient(kind, problem, config)
        yield _preprocess(problem, False)
    for problem in eight_bit_problems(arch):
        for config in candidates("fwd", problem):
            yield _forward(problem, _with_feature_budget("fwd", problem, config))
    for problem in feature_problems(arch):
        if (tile := default_config("fwd", problem)) is not None:
            yield _forward(problem, _with_feature_budget("fwd", problem, tile))
        for kind in ("dkdv", "dq"):
            if (tile := default_config(kind, problem)) is not None:
                yield _gradient(kind, problem, _with_feature_budget(kind, problem, tile))
        yield _preprocess(problem, True)
        if problem.bias_grad:
            yield from _bias_gradient(problem)
        if problem.score_grad:
            yield from _captured_gradient(problem)
