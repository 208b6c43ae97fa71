"""The kernels to compile ahead of time for a chip: every tile of the tables, every feature.

A job is built from the launch that a launcher returns for an example call. Its tensors are on the meta device. So the
gate compiles exactly what calls run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from diyfa.arch import ELEMENT_BYTES, NPUArch
from diyfa.backends.npu.tables import configs, configs_v1
from diyfa.eight_bits import PER_BLOCK, PER_HEAD, PER_TENSOR
from diyfa.features import COMPOSABLE, EVERYTHING, SCORE_EXAMPLE
from diyfa.lab.examples import example_attention, example_gradients, example_kvcache, example_matmul
from diyfa.problem import (
    VARLEN,
    AttentionProblem,
    AttentionTensors,
    KVCacheProblem,
    Launch,
    MatmulProblem,
    NewKeys,
)
from diyfa.score_code import gathered_loads
from diyfa.score_programs import function_name

_POINTERS = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
    torch.int8: "*i8", torch.uint8: "*u8",
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One kernel to compile: its jit function, the argument types and constants, and the compiler's options."""

    kernel: str
    case: str
    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    problem: AttentionProblem | None = None  # the call for which the tile was chosen, for attention
    step: str = ""  # the kernel's name in the tile table: "fwd", "dq", "dkdv", "dbias"
    tile: configs.AttentionTile | None = None
    gated: bool = True  # must be bound and pipelined, or among the gate's exceptions
    newest_only: bool = False  # not compiled with older releases of the compiler


def type_name(argument: Any) -> str:
    """Return the compiler's name of an argument's type, as Triton derives it in a launch; "constexpr" for None."""
    if argument is None:
        return "constexpr"
    if isinstance(argument, torch.Tensor):
        return _POINTERS[argument.dtype]
    if isinstance(argument, float):
        return "fp32"
    return "i32" if -(2**31) <= argument < 2**31 else "i64"


def kernel_job(kernel: str, case: str, launch: Launch, **about: Any) -> Job:
    """Return the job that compiles the kernel of `launch`. No value or alignment is compiled in (`compat.kernel`)."""
    signature = {name: type_name(argument) for name, argument in launch.arguments.items()}
    absent = {name: None for name, argument in launch.arguments.items() if argument is None}
    return Job(kernel, case, launch.kernel, signature, {**launch.constants, **absent}, launch.options, **about)


def example(target: str, **changes: Any) -> AttentionProblem:
    """Return a problem whose compiled kernel is that of all sizes: none depends on a sequence length."""
    base = AttentionProblem("npu", target, "float16", "bhsd", 2, 8, 2, 4096, 4096, 128, 128, needs_grad=True)
    problem = base.replace(**changes)
    return problem.replace(head_dim_v=problem.head_dim) if "head_dim_v" not in changes else problem


def example_case(target: str, changes: dict[str, Any]) -> tuple[AttentionProblem, str]:
    """Return (problem, dimensions of its attn_bias). `changes`: as for `example`, except that "bias" names dimensions.

    The bias is float32, which needs the most memory."""
    bias = changes.get("bias", "")
    widths = {"head_dim_v": min(changes.get("head_dim", 128), 512)}
    return example(target, **{**widths, **changes, "bias": "float32" if bias else ""}), bias


def _case(problem: AttentionProblem, tile: configs.AttentionTile, bias: str = "", always_mask: bool = False) -> str:
    features = " ".join(sorted(problem.features - {"gqa"})) or "full"
    features = features.replace("attn_bias", f"attn_bias[{bias}]") + " always_mask" * always_mask
    if problem.score_fn:
        features = features.replace("score_fn", f"score_fn[{function_name(problem.score_fn)}]")
    features += f" to {problem.out_dtype}" if problem.out_dtype else ""
    if problem.dtype == "int8":
        features = features.replace("eight_bits", f"v {problem.value_dtype}")
        features += f" descales {problem.q_descale}{problem.k_descale}{problem.v_descale}" + " means" * problem.k_mean
    return f"{problem.dtype} D={problem.head_dim} {features} {tile.block_m}x{tile.block_n}"


def example_call(problem: AttentionProblem, bias: str = "") -> tuple[AttentionTensors, torch.Tensor, torch.Tensor]:
    """Return (inputs, out, lse) of a call of `problem` on the meta device. `bias`: dimensions of attn_bias."""
    tensors, out, lse = example_attention(problem)
    if tensors.attn_bias is not None:
        rows, columns = problem.seqlen_q if "q" in bias else 1, problem.seqlen_k if "k" in bias else 1
        shape = (problem.batch, problem.heads_q, rows, columns)
        tensors = tensors._replace(attn_bias=tensors.attn_bias.new_empty(shape))
    return tensors, out, lse


def backward_launches(
    problem: AttentionProblem,
    bias: str = "",
    has_dlse: bool = False,
    tiles: dict[str, configs.AttentionTile] | None = None,
) -> dict[str, Launch]:
    """Return the launches of the backward pass of a call of `problem`, by name."""
    from diyfa.backends.npu.attention import bwd

    tensors, out, lse = example_call(problem, bias)
    gradients = example_gradients(tensors, problem.out_dtype)
    out = out.to(tensors.q.dtype)  # the complete output has q's dtype, even if partial ones have out_dtype
    return bwd.make_launches(problem, tensors, out, lse, out, lse if has_dlse else None, gradients, tiles)


def attention_job(
    problem: AttentionProblem,
    kernel: str,
    tile: configs.AttentionTile | None = None,
    bias: str = "qk",
    always_mask: bool = configs.ALWAYS_MASK,
) -> Job:
    """Return the job of `kernel` for `problem`, with the table's tile unless one is given.

    `kernel`: "fwd", "dq", "dkdv" or "dbias". `always_mask`: whether to compile as under DIYFA_NPU_ALWAYS_MASK=1.
    `bias`: dimensions of attn_bias, if there is one (`bias.Bias.dims`).
    """
    from diyfa.backends.npu.attention import fwd

    tile = tile or configs.attention_tile(problem, kernel, always_mask)
    if kernel == "fwd":
        launch = fwd.make_launch(problem, *example_call(problem, bias), tile)
    else:
        launch = backward_launches(problem, bias, tiles={kernel: tile})[kernel]
    launch = launch._replace(constants={"c": replace(launch.constants["c"], always_mask=always_mask)})
    name = "attention_fwd/v2" if kernel == "fwd" else f"attention_bwd/v2/{kernel}"
    # Gathers are left to one vector core.
    gated = not (problem.score_fn and gathered_loads(problem.score_fn, bool(problem.mask)))
    case = _case(problem, tile, bias, always_mask)
    return kernel_job(name, case, launch, problem=problem, step=kernel, tile=tile, gated=gated)


def captured_jobs(problem: AttentionProblem) -> Iterator[Job]:
    """Yield the jobs of the gradients of captured tensors: scores and their gradients, and what adds them up."""
    tile = configs.conservative_tile(problem, "dbias")
    launches, case = backward_launches(problem), _case(problem, tile)
    yield kernel_job("attention_bwd/v2/score_gradient", case, launches["captured0"], gated=False)
    yield kernel_job("attention_bwd/v2/captured", case, launches["captured1"])


def kvcache_example(target: str, **changes: Any) -> KVCacheProblem:
    """Return a decoding step whose compiled kernels are those of all sizes."""
    base = KVCacheProblem("npu", target, "float16", "float16", "bshd", 2, 8, 2, 1, 4096, 128, 128, lengths=True)
    problem = base.replace(**changes)
    return problem.replace(
        cache_dtype=problem.dtype,
        head_dim_v=changes.get("head_dim_v", problem.head_dim),
        total_q=problem.batch * problem.seqlen_q if problem.varlen else 0,
    )


def kvcache_problem_jobs(problem: KVCacheProblem, tile: configs.AttentionTile | None = None) -> Iterator[Job]:
    """Yield the jobs of attention over a cache: the kernel, and the kernels that pack queries and combine splits.

    If keys are gathered, the kernels are not gated and must only compile and fit: ascendnpu-ir 1.2.0 gathers on the
    vector cores, and then does not share the work between them (1.1.0 does).
    """
    from diyfa.backends.npu.attention import decode

    features = {
        "window": problem.window_left >= 0 or problem.window_right > 0, "causal": problem.causal,
        "softcap": problem.softcap, "alibi": problem.alibi, "sinks": problem.sinks, "varlen": problem.varlen,
        "packed_keys": problem.packed_keys, "leftpad": problem.leftpad, "batch_idx": problem.cache_batch_idx,
        "batch_invariant": problem.batch_invariant,
    }  # fmt: skip
    tile = tile or configs.decode_tile(problem)
    keys = f"page={problem.page_size}" if problem.paged else "contiguous"
    features_text = " ".join(
        [keys, f"Sq={problem.seqlen_q}", *(name for name, is_present in features.items() if is_present)]
    )
    case = f"{problem.dtype} D={problem.head_dim} {features_text} {tile.block_m}x{tile.block_n}"
    names = {decode._pack_kernel: "/pack", decode._decode_kernel: "", decode._combine_kernel: "/combine"}
    for launch in decode.make_launches(problem, *example_kvcache(problem), tile):
        gated = configs.pages_form(problem, tile) != "gathered"
        yield kernel_job(f"kvcache_fwd/split_kv{names[launch.kernel]}", case, launch, gated=gated)


def append_job(problem: KVCacheProblem, rotated: int, interleaved: bool) -> Job:
    """Return the job of appending to a cache. `rotated`: rotated features of each head of keys and queries."""
    from diyfa.backends.npu.attention import append

    tensors, *_ = example_kvcache(problem)
    dtype, shape = tensors.q.dtype, (problem.batch, problem.seqlen_q, problem.heads_kv)
    table = None if not rotated else torch.empty(problem.capacity, rotated // 2, dtype=dtype, device="meta")
    new = NewKeys(
        torch.empty(*shape, problem.head_dim, dtype=dtype, device="meta"),
        None if problem.latent else torch.empty(*shape, problem.head_dim_v, dtype=dtype, device="meta"),
        table,
        table,
        interleaved,
        tensors.q if rotated else None,
    )
    keys = f"page={problem.page_size}" if problem.paged else "contiguous"
    case = f"{problem.dtype} D={problem.head_dim} {keys} rotated={rotated}{' interleaved' * interleaved}"
    return kernel_job("kvcache_append/append", case, append.make_launch(problem, tensors, new))


def v1_problem_jobs(problem: AttentionProblem) -> tuple[Job, Job]:
    """Return the jobs of the "v1" forward: the passes over the keys, and the kernel that finishes."""
    from diyfa.backends.npu.attention import fwd_v1

    passes, finish = fwd_v1.make_launches(problem, *example_call(problem))
    return (
        kernel_job("attention_fwd/v1", _case(problem, configs_v1.v1_tile(problem)), passes),
        kernel_job("attention_fwd/v1/finish", f"{problem.dtype} D={problem.head_dim_v}", finish),
    )


def tutorial_job(target: str) -> Job:
    """Return the job of the tutorial kernel."""
    from diyfa.backends.npu.attention import tutorial

    (q, k, v, *_), out, _ = example_call(example(target, heads_kv=8))
    launch = tutorial.make_launch(target, q, k, v, out, causal=True)
    return kernel_job("attention_fwd/tutorial", "float16 D=128 causal 64x128", launch)


def preprocess_job(problem: AttentionProblem, has_dlse: bool) -> Job:
    """Return the job of delta = rowsum(dout * out) - dlse."""
    lengths = " seq_lens" * problem.seq_lens + " varlen" * problem.varlen
    case = f"{problem.dtype} D={problem.head_dim_v}{lengths}{' dlse' * has_dlse}"
    return kernel_job("attention_bwd/v2/preprocess", case, backward_launches(problem, has_dlse=has_dlse)["preprocess"])


def merge_job(target: str, head_dim: int) -> Job:
    """Return the job of merging outputs by their log-sum-exps."""
    from diyfa.backends.npu.attention import merge

    out, lse = torch.empty(2, 8, 1024, head_dim, device="meta"), torch.empty(2, 8, 1024, device="meta")
    return kernel_job("attention_merge", f"float32 D={head_dim}", merge.make_launch(target, out, lse, out, lse))


def dbias_rows_job(target: str, dims: str, has_dlse: bool, bias: str = "float32", **features: Any) -> Job:
    """Return the job of the gradient of an attn_bias that is the same for all keys. `dims`: "q" or "1"."""
    problem = example(target, bias=bias, **features)
    launch = backward_launches(problem, dims, has_dlse)["dbias_rows"]
    case = f"{problem.dtype} {bias} attn_bias[{dims}]{' sinks' * problem.sinks}{' dlse' * has_dlse}"
    return kernel_job("attention_bwd/v2/dbias_rows", case, launch)


def matmul_job(problem: MatmulProblem, a_transposed: bool = False, b_transposed: bool = False) -> Job:
    """Return the job of the matrix product for `problem`."""
    from diyfa.backends.npu import matmul

    tensors, c = example_matmul(problem, a_transposed, b_transposed)
    tile = configs.matmul_tile(problem)
    layout = "nt"[a_transposed] + "nt"[b_transposed]
    case = f"{problem.dtype}->{problem.compute_dtype} {layout} {tile.block_m}x{tile.block_n}x{tile.block_k}"
    if problem.bias or problem.activation:
        case = f"epilogue {case}{' bias' * problem.bias} {problem.activation or ''}".rstrip()
    return kernel_job("matmul/persistent", case, matmul.make_launch(problem, *tensors[:3], c))


# A problem for each mode of the tile table, with all features of the mode: the one that needs the most memory.
_EXTRAS = {"sinks": True, "seq_lens": True}
MODE_CASES: dict[str, dict[str, Any]] = {
    "even": {},
    "tail": {"seq_lens": True},
    "causal": {"window_right": 0},
    "biased": {"window_right": 0, "bias": "qk", **_EXTRAS},
    "featured": {"window_left": 256, "window_right": 128, "softcap": 30.0, "alibi": True, **_EXTRAS},
    "crowded": {
        **EVERYTHING, "window_right": 128, "bias": "qk", **_EXTRAS,
    },
}  # fmt: skip


def mode_case(kernel: str, mode: str) -> dict[str, Any]:
    """Return the most demanding features of `mode`, as changes for `example_case`. "dbias" always has a bias."""
    if kernel == "dbias" and mode == "featured":
        return MODE_CASES["biased"] | {"dropout": True}
    return MODE_CASES[mode]


# Score functions: one that loads a number for each key, and has the table's tile, and one that gathers.
_KEY_FACTOR = """def scaled(score, b, h, i, j, t0):
    v0 = load(t0, j)
    v1 = mul(score, v0)
    v2 = tanh(v1)
    v3 = mul(v2, 30.0)
    return v3"""
_WITH_FUNCTION: dict[str, Any] = {"score_fn": _KEY_FACTOR, "window_right": 0}
_WITH_GATHER: dict[str, Any] = {"score_fn": SCORE_EXAMPLE, "dtype": "float32", "score_grad": True}

# Each feature by itself or in its common use, and head dims that do not fill a tile. "bias" names the dimensions of
# attn_bias.
FEATURE_CASES: tuple[dict[str, Any], ...] = (
    *(feature.example for feature in COMPOSABLE if feature.refusal_name != "attn_bias"),
    {"seqlen_k": 4000},
    {"seq_lens": True, "window_right": 0},
    {"seq_lens": True, "sinks": True},
    {"window_left": 256, "window_right": 128},
    {"window_left": 256},
    {"softcap": 30.0, "window_right": 0},
    {"alibi": True, "window_right": 0},
    {"sinks": True, "window_right": 0},
    {"layout": VARLEN},
    {"layout": VARLEN, "window_right": 0},
    {"layout": VARLEN, "window_left": 256, "window_right": 0, "softcap": 30.0, "alibi": True, "sinks": True},
    {"layout": VARLEN, "window_left": 256, "window_right": 128, "softcap": 30.0, "alibi": True, "sinks": True,
     "dropout": True},
    {"dropout": True, "window_right": 0},
    {"dropout": True, "layout": VARLEN, "window_right": 0},
    {"dropout": True, "dropout_origins": True, "layout": VARLEN, "window_right": 0},
    {"bias": "qk"},
    {"bias": "k"},
    {"bias": "q", "window_right": 0},
    {"bias": "1"},
    {"bias": "qk", "dropout": True},
    {"bias": "k", "dropout": True, "seq_lens": True},
    {"bias": "q", "dropout": True},
    {"mask": (128, 128), "seq_lens": True, "sinks": True},
    {"mask": (64, 128), "softcap": 30.0, "alibi": True},
    {"mask": (128, 64), "dropout": True},
    _WITH_FUNCTION,
    {"score_fn": _KEY_FACTOR, "mask": (128, 128), "bias": "qk"},
)  # fmt: skip
# Calls with a block mask, whose tiles are those of the table cut to the mask's blocks. Every chip and compiler compiles
# MASK_CASES; _WITH_MASK has all features that a mask goes with.
MASK_CASES: tuple[dict[str, Any], ...] = (
    {"mask": (128, 128)},
    {"mask": (64, 64), "head_dim": 64},
)
_WITH_MASK = {"mask": (128, 128), "softcap": 30.0, "alibi": True, "dropout": True, "bias": "qk", **_EXTRAS}
HEAD_DIM_CASES: tuple[dict[str, Any], ...] = (
    {"head_dim": 1},
    {"head_dim": 16},
    {"head_dim": 40, "window_right": 0},
    {"head_dim": 80},
    {"head_dim": 96, "window_right": 0},
    {"head_dim": 160, "seq_lens": True},
    {"head_dim": 192, "head_dim_v": 128, "window_right": 0},
    {"head_dim": 250, "window_right": 0},
    {"head_dim": 320, "layout": VARLEN},
    {"head_dim": 64, "head_dim_v": 512},
    {"head_dim": 512, "window_right": 0},
    {"head_dim": 576, "head_dim_v": 64},
)


# int8 q and k beside a v of 16 bits, in the forward pass alone. Means, and descales of blocks, need the most memory.
_INT8: dict[str, Any] = {
    "dtype": "int8", "value_dtype": "float16", "out_dtype": "float16", "needs_grad": False, "dropout": False,
}  # fmt: skip
_MEANS = {"k_mean": True, "v_mean": True}
_DESCALES: dict[str, dict[str, int]] = {
    "tensor": {"q_descale": PER_TENSOR, "k_descale": PER_TENSOR},
    "head": {"q_descale": PER_HEAD, "k_descale": PER_HEAD, "v_descale": PER_HEAD},
    "block": {"q_descale": PER_BLOCK, "k_descale": PER_BLOCK, "v_descale": PER_HEAD},
}


def int8_jobs(target: str) -> Iterator[Job]:
    """Yield the forward kernel of int8 with each of its tiles, head dim that needs padding, and kind of descale."""
    block = _INT8 | _MEANS | _DESCALES["block"]
    for head_dim in configs.HEAD_DIM_CLASSES:
        cases = [{**case, **block, "head_dim": head_dim} for case in reversed(MODE_CASES.values())]
        yield from without_repeated_tiles(job for case in cases for job in attention_jobs(target, case, ("fwd",)))
    for case in (
        *({**_INT8, **_MEANS, **descales, "window_right": 0} for descales in _DESCALES.values()),
        {**_INT8, **_DESCALES["tensor"], "value_dtype": "bfloat16", "out_dtype": "bfloat16"},
        {**block, "head_dim": 40, "window_right": 0},
        {**block, "head_dim": 192, "head_dim_v": 128, "layout": VARLEN},
        {**block, "mask": (128, 128), "softcap": 30.0, **_EXTRAS},
        {**block, "mask": (64, 64), "head_dim": 64},
        {**block, **_WITH_FUNCTION},
    ):
        yield from attention_jobs(target, case, ("fwd",))


def int8_row_jobs(target: str) -> Iterator[Job]:
    """Yield the forward kernel of int8 in each row of the tile table, with and without all means and descales."""
    for head_dim, case in itertools.product(configs.HEAD_DIM_CLASSES, MODE_CASES.values()):
        for int8 in (_DESCALES["block"] | _MEANS, _DESCALES["head"]):
            yield from attention_jobs(target, {**case, **_INT8, **int8, "head_dim": head_dim}, ("fwd",))


def attention_jobs(target: str, changes: dict[str, Any], kernels: tuple[str, ...] = ()) -> Iterator[Job]:
    """Yield the jobs of one call, by default of every kernel. `changes`: as for `example_case`."""
    problem, dims = example_case(target, changes)
    for kernel in kernels or ("fwd", "dkdv", "dq", *(("dbias",) if "k" in dims else ())):
        yield attention_job(problem, kernel, bias=dims)


# Head dims of HEAD_DIM_CASES for every chip: one that needs padding, a multiple of 16, and one with D != Dv.
_LEAN_HEAD_DIMS = (40, 80, 192)


def shipped_jobs(target: str, full: bool = False) -> Iterator[Job]:
    """Yield the jobs for `target`.

    Every chip: every kernel and tile once, in a demanding mode. 910B: also the decode kernel's tiles; and with the
    newest compiler every row of the tile tables, every feature (float16, D = 128) and every kind of head dim. The A3
    does not need these, since it has the same memories and front half; the 950's compiler takes four times as long.
    `full`: every feature in every dtype with every head-dim class, for each chip and compiler.
    """
    jobs: Iterator[Job] = itertools.chain(
        tile_jobs(target), narrower_jobs(target), always_masked_jobs(target), v1_jobs(target, ("float16", "float32")),
        itertools.chain.from_iterable(attention_jobs(target, case) for case in MASK_CASES), score_jobs(target),
        [tutorial_job(target)], kvcache_jobs(target, lean=True), helper_jobs(target), matmul_jobs(target),
        int8_jobs(target),
    )  # fmt: skip
    if full or configs.family(target) is NPUArch.A2:
        more = (
            all_jobs(target, full),
            int8_row_jobs(target),
            v1_jobs(target, ("bfloat16",)),
            kvcache_jobs(target, lean=False),
        )
        newest_only = (replace(job, newest_only=not full) for job in itertools.chain(*more))
        jobs = itertools.chain(jobs, kvcache_row_jobs(target), newest_only)
    seen: set[str] = set()
    for job in jobs:
        compiled = f"{job.kernel} {job.case} {job.signature} {job.constants}"
        if compiled not in seen:
            seen.add(compiled)
            yield job


def score_jobs(target: str) -> Iterator[Job]:
    """Yield a few kernels with a score function, and those of the gradients of its captured tensors."""
    yield from attention_jobs(target, _WITH_FUNCTION)
    yield from attention_jobs(target, _WITH_GATHER, ("fwd",))
    yield from captured_jobs(example_case(target, _WITH_GATHER)[0])


def tile_jobs(target: str) -> Iterator[Job]:
    """Yield every attention kernel with each of its tiles in the table, in the most demanding mode that uses it."""
    for dtype, head_dim in itertools.product(("float16", "float32"), configs.HEAD_DIM_CLASSES):
        changes = {"dtype": dtype, "head_dim": head_dim}
        cases = [{**changes, **case} for case in reversed(MODE_CASES.values())]  # the most demanding first
        every = [job for case in cases for job in attention_jobs(target, case)]
        dbias_jobs = attention_jobs(target, {**changes, **mode_case("dbias", "featured")}, ("dbias",))
        yield from without_repeated_tiles(itertools.chain(every, dbias_jobs))
    for case in HEAD_DIM_CASES:
        if case["head_dim"] in _LEAN_HEAD_DIMS:
            yield from attention_jobs(target, case)


def narrower_jobs(target: str) -> Iterator[Job]:
    """Yield tiles whose rows exclude the widest heads of their class, with the widest head that they include."""
    for dtype, kernel in itertools.product(("float16", "float32"), ("fwd", "dkdv", "dq", "dbias")):
        cases = [{"dtype": dtype, **mode_case(kernel, mode)} for mode in reversed(configs.modes(kernel))]
        for head_dim in configs.HEAD_DIM_CLASSES:
            key = configs.attention_key(example(target, dtype=dtype, head_dim=head_dim), kernel)
            widest = configs.widest_head_dim(key)
            if widest < head_dim:
                jobs = [attention_jobs(target, {**case, "head_dim": widest}, (kernel,)) for case in cases]
                yield from without_repeated_tiles(itertools.chain(*jobs))


def without_repeated_tiles(jobs: Iterable[Job]) -> Iterator[Job]:
    """Yield the first job of each kernel with each tile."""
    seen: set[tuple[str, int, int]] = set()
    for job in jobs:
        shape = (job.kernel, job.constants["c"].block_m, job.constants["c"].block_n)
        if shape not in seen:
            seen.add(shape)
            yield job


def conservative_jobs(target: str) -> Iterator[Job]:
    """Yield every conservative tile, in each mode's most demanding case. The tiles are not gated."""
    for dtype, head_dim, kernel in itertools.product(
        ("float16", "float32"), configs.HEAD_DIM_CLASSES, ("fwd", "dkdv", "dq", "dbias")
    ):
        for mode in configs.modes(kernel):
            if kernel == "dkdv" and mode == "tail":  # it runs as "even"
                continue
            problem, dims = example_case(target, {**mode_case(kernel, mode), "dtype": dtype, "head_dim": head_dim})
            job = attention_job(problem, kernel, configs.conservative_tile(problem, kernel), bias=dims)
            yield replace(job, gated=False)
    changed = (*MASK_CASES, _WITH_MASK, _WITH_FUNCTION, _WITH_GATHER)
    for changes, kernel in itertools.product(changed, ("fwd", "dkdv", "dq", "dbias")):
        problem, dims = example_case(target, changes)
        if kernel != "dbias" or dims:
            job = attention_job(problem, kernel, configs.conservative_tile(problem, kernel), bias=dims)
            yield replace(job, gated=False)
    yield from captured_jobs(example_case(target, _WITH_GATHER)[0])
    int8 = _INT8 | _MEANS | _DESCALES["block"]
    for head_dim, case in itertools.product(configs.HEAD_DIM_CLASSES, MODE_CASES.values()):
        problem, dims = example_case(target, {**case, **int8, "head_dim": head_dim})
        yield replace(attention_job(problem, "fwd", configs.conservative_tile(problem, "fwd"), bias=dims), gated=False)
    for dtype, head_dim in itertools.product(("float16", "float32"), configs.HEAD_DIM_CLASSES):
        row = {"dtype": dtype, "head_dim": head_dim, "head_dim_v": min(head_dim, 512), **KVCACHE_EXTRAS}
        for case in ({"page_size": 128}, {"page_size": 1, "batch_invariant": True}):
            cached = kvcache_example(target, **row, **case)
            jobs = kvcache_problem_jobs(cached, configs.conservative_tile(cached, "decode"))
            yield from (replace(job, gated=False) for job in jobs)


def always_masked_jobs(target: str) -> Iterator[Job]:
    """Yield tiles that differ under DIYFA_NPU_ALWAYS_MASK=1, in the case that needs the most memory."""
    for dtype, head_dim, mode in itertools.product(("float16", "float32"), configs.HEAD_DIM_CLASSES, configs.MODES):
        problem, dims = example_case(target, {**MODE_CASES[mode], "dtype": dtype, "head_dim": head_dim})
        for kernel in ("fwd", "dkdv", "dq"):
            job, other = (attention_job(problem, kernel, bias=dims, always_mask=always) for always in (True, False))
            if job.tile != other.tile:
                yield job


def all_jobs(target: str, full: bool) -> Iterator[Job]:
    """Yield every mode of the table and every feature of the attention kernels."""
    head_dims = configs.HEAD_DIM_CLASSES
    changes: list[dict[str, Any]] = []
    for dtype in ELEMENT_BYTES:
        cases = dict(MODE_CASES)
        if dtype == "bfloat16" and not full:  # it uses the rows of float16
            cases = {"crowded": cases["crowded"]}
        changes += [{"dtype": dtype, "head_dim": d, **case} for d in head_dims for case in cases.values()]
        if dtype != "bfloat16" or full:
            dbias_case = mode_case("dbias", "featured")
            for d, case in itertools.product(head_dims, (dbias_case, {**mode_case("dbias", "crowded"), "bias": "k"})):
                yield from attention_jobs(target, {"dtype": dtype, "head_dim": d, **case}, ("dbias",))
    for dtype in ELEMENT_BYTES if full else ("float16",):
        changes += [{"dtype": dtype, **case} for case in HEAD_DIM_CASES]
        widths = head_dims if full else (128,)
        changes += [{"dtype": dtype, "head_dim": d, **case} for d in widths for case in FEATURE_CASES]
    for dtype in ("float16", "float32"):
        changes += [{"dtype": dtype, "head_dim": d, **_WITH_MASK} for d in head_dims]
        changes += [{"dtype": dtype, "head_dim": d, "mask": (64, 64)} for d in head_dims]
    changes.append({"layout": VARLEN, "window_right": 0, "out_dtype": "float32"})  # a partial output, to be merged
    for change in changes:
        yield from attention_jobs(target, change)


def v1_jobs(target: str, dtypes: Iterable[str]) -> Iterator[Job]:
    """Yield the "v1" forward: every row of its table without and with all features, and head dims that need padding."""
    every = {"window_left": 256, "window_right": 128, "seq_lens": True}
    features: tuple[dict[str, Any], ...] = ({}, {"window_right": 0}, every)
    for dtype in dtypes:
        for head_dim in (64, 128, 256):
            jobs = [v1_problem_jobs(example(target, dtype=dtype, head_dim=head_dim, **case)) for case in features]
            yield from (passes for passes, _ in jobs)
            yield jobs[0][1]
    yield from v1_problem_jobs(example(target, head_dim=40, head_dim_v=80, window_right=0))


# Features of the decode kernel that combine in one call.
KVCACHE_EXTRAS: dict[str, Any] = {
    "seqlen_q": 16, "window_left": 256, "window_right": 128, "softcap": 30.0, "alibi": True, "sinks": True,
    "leftpad": True,
}  # fmt: skip


def kvcache_row_jobs(target: str) -> Iterator[Job]:
    """Yield every row of the decode kernel's tile table with all features, with whole pages and with gathered keys."""
    for dtype, head_dim in itertools.product(("float16", "float32"), configs.HEAD_DIM_CLASSES):
        row = {"dtype": dtype, "head_dim": head_dim, "head_dim_v": min(head_dim, 512), **KVCACHE_EXTRAS}
        for case in ({"page_size": 128}, {"page_size": 1, "batch_invariant": True}):
            yield from kvcache_problem_jobs(kvcache_example(target, **row, **case))


def kvcache_jobs(target: str, lean: bool) -> Iterator[Job]:
    """Yield decoding steps over a cache with each page size, and appending. `lean`: a few of them."""
    cases: list[dict[str, Any]] = []
    for head_dim, page_size in itertools.product((128,) if lean else (64, 128), (0, 16, 32, 64, 128, 256)):
        cases.append({"head_dim": head_dim, "page_size": page_size})
    cases += [{"dtype": "bfloat16", "page_size": 128}, {"layout": VARLEN, "page_size": 128}]
    cases.append({"seqlen_q": 4, "page_size": 64, "window_right": 0})
    if not lean:
        cases += [
            {"page_size": 1},
            {"layout": VARLEN, "packed_keys": True, "seqlen_q": 512, "window_right": 0, "batch_invariant": True},
            {"head_dim": 80, "cache_batch_idx": True},
        ]
    for case in cases:
        yield from kvcache_problem_jobs(kvcache_example(target, **case))
    for dtype, head_dim, page_size, rotated, interleaved in (
        ("float16", 128, 64, 128, False), ("bfloat16", 128, 0, 128, True), ("float32", 80, 16, 48, True),
        ("float16", 128, 0, 0, False),
    ):  # fmt: skip
        problem = kvcache_example(target, dtype=dtype, head_dim=head_dim, page_size=page_size)
        yield append_job(problem, rotated, interleaved)


def helper_jobs(target: str) -> Iterator[Job]:
    """Yield the jobs of kernels without matrix products."""
    for dtype in ELEMENT_BYTES:
        for head_dim in (64, 256, 512):
            yield preprocess_job(example(target, dtype=dtype, head_dim=head_dim), has_dlse=True)
    yield preprocess_job(example(target, seq_lens=True, head_dim=80), has_dlse=False)
    yield preprocess_job(example(target, layout=VARLEN, head_dim=256), has_dlse=True)
    yield kernel_job("attention_bwd/v2/dsinks", "float32", backward_launches(example(target, sinks=True))["dsinks"])
    for dims, sinks, has_dlse in itertools.product("q1", (False, True), (False, True)):
        yield dbias_rows_job(target, dims, has_dlse, sinks=sinks)
    for dtype, dims in itertools.product(("float16", "bfloat16"), "q1"):
        yield dbias_rows_job(target, dims, True, dtype, sinks=True)
    for dtype, dims in itertools.product(("bfloat16", "float32"), "q1"):  # of dq
        yield dbias_rows_job(target, dims, True, sinks=True, dtype=dtype)
    yield from (merge_job(target, head_dim) for head_dim in (80, 128, 512))


def matmul_jobs(target: str) -> Iterator[Job]:
    """Yield the matrix product in every combination of dtypes and of row-major and column-major operands."""
    for dtype, compute, out in (
        ("float16", "float16", "float16"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float32", "float32", "float32"),
        ("float32", "float16", "float16"),
        ("float32", "float16", "float32"),
    ):
        problem = MatmulProblem("npu", target, dtype, compute, out, 4096, 4096, 4096)
        for layout in ((False, False), (True, False), (False, True), (True, True)):
            yield matmul_job(problem, *layout)
    for dtype, activation in (
        ("float16", None),
        ("float16", "relu"),
        ("bfloat16", "gelu"),
        ("float16", "silu"),
        ("float32", "gelu"),
    ):
        problem = MatmulProblem("npu", target, dtype, dtype, dtype, 4096, 4096, 4096, bias=True, activation=activation)
        yield matmul_job(problem, False, True)  # as in a linear layer
