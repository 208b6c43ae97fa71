"""The Hopper kernel on float8 and int8: right results without a GPU, the order of its operands, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from eight_bit_cases import BF16, E4M3, F16, F32, INT8, Case, check, make_call
from guarded_memory import guard
from hopper_interpreted import interpret, interpreted_only, load_without_fallback
from poison import poisoned_allocations
from targets import TARGETS

import diyfa
from diyfa import registry
from diyfa.backends.cuda.hopper import configs as hopper_configs
from diyfa.backends.cuda.hopper import float8
from diyfa.backends.cuda.hopper.configs import Sm90Config
from diyfa.backends.cuda.runtime.passes import launch_each
from diyfa.features import dtype_name
from diyfa.problem import VARLEN, AttentionProblem, AttentionTensors


def case(**changes) -> Case:
    sizes = {"heads": 1, "heads_kv": 1, "seqlen_q": 130, "seqlen_k": 300, "head_dim": 64}
    return Case(**{**sizes, **changes})


CASES = {
    "64": case(),
    "128": case(head_dim=128, kind="head"),
    "256": case(head_dim=256, seqlen_k=140),
    "256_means": case(head_dim=256, seqlen_q=64, seqlen_k=70, means=True, kind="head"),
    "192_means": case(head_dim=192, head_dim_v=128, seqlen_q=64, seqlen_k=70, means=True),
    "192_128": case(head_dim=192, head_dim_v=128, seqlen_k=140, options={"causal": True}),
    "odd_head_dim": case(head_dim=80, head_dim_v=48, means=True, kind="head"),
    "causal": case(head_dim=128, seqlen_q=260, options={"causal": True}),
    "block": case(head_dim=128, kind="block", seqlen_q=200, options={"causal": True}),
    "means": case(kind="block", means=True, heads=4, heads_kv=2),
    "means_below_0": case(means=True, kind="block", options={"sm_scale": -0.3, "causal": True}),
    "scale_0": case(means=True, options={"sm_scale": 0.0}),
    "window": case(kind="head", means=True, options={"window": (100, 3)}),
    "window_left": case(kind="block", options={"window": (90, -1)}),
    "softcap": case(kind="block", options={"softcap": 8.0, "causal": True}),
    "sinks": case(means=True, sinks=True, heads=2, options={"causal": True}),
    "alibi": case(kind="head", means=True, alibi=True, heads=2, options={"causal": True}),
    "seq_lens": case(lengths=(90, 7, 300), kind="block", means=True, seqlen_q=300, options={"causal": True}),
    "packed": case(layout="thd", lengths=(90, 1, 0, 270), kind="head", means=True, seqlen_q=300, heads=2),
    "packed_blocks": case(layout="thd", lengths=(150, 20), seqlen_q=150, seqlen_k=150, kind="block", means=True,
                          options={"window": (60, 0)}),
    "bshd": case(layout="bshd", kind="block", heads=2),
    "float32_out": case(out_dtype=F32, head_dim=128, kind="head"),
    "float16_out": case(out_dtype=F16),
    "cross": case(seqlen_q=66, seqlen_k=131, kind="block", options={"causal": True}),
    "more_queries": case(seqlen_q=230, seqlen_k=60, means=True, options={"causal": True}),
    "one_key": case(seqlen_k=1),
    "one_visible_key": case(means=True, options={"window": (0, 0)}),
    "outliers": case(data="outliers", kind="head"),
    "peaks": case(data="peaks", head_dim=128),
    "sink": case(data="sink", kind="block", options={"causal": True}),
    "equal_rows": case(data="equal", kind="block"),
    "zeros": case(data="zeros", kind="head", means=True),
    "large_scores": case(data="large", kind="head", seqlen_k=120),
}  # fmt: skip


def int8(value_dtype: torch.dtype = BF16, **changes) -> Case:
    return case(dtype=INT8, value_dtype=value_dtype, **changes)


CASES |= {
    "int8_64": int8(kind="block", means=True, heads=4, heads_kv=2),
    "int8_128": int8(head_dim=128, kind="block", options={"causal": True}, seqlen_q=200),
    "int8_256": int8(F16, head_dim=256, seqlen_k=140, kind="head", means=True, out_dtype=F32),
    "int8_192_128": int8(head_dim=192, head_dim_v=128, seqlen_k=140, means=True, options={"causal": True}),
    "int8_128_192": int8(head_dim=128, head_dim_v=192, seqlen_q=64, seqlen_k=140, kind="head", means=True),
    "int8_e4m3": int8(E4M3, head_dim=128, kind="block", means=True),
    "int8_e4m3_256": int8(E4M3, head_dim=256, seqlen_k=140, kind="head", options={"causal": True}),
    "int8_odd_head_dim": int8(head_dim=80, head_dim_v=48, means=True, kind="head"),
    "int8_saturated": int8(data="saturated", head_dim=256, kind="block", options={"causal": True}),
    "int8_saturated_e4m3": int8(E4M3, data="saturated", head_dim=128),
    "int8_peaks": int8(data="peaks", head_dim=128),
    "int8_outliers": int8(F16, data="outliers", kind="head"),
    "int8_zeros": int8(data="zeros", kind="block", means=True),
    "int8_window": int8(kind="block", means=True, options={"window": (100, 3)}),
    "int8_below_0": int8(kind="block", means=True, options={"sm_scale": -0.3}),
    "int8_peaks_below_0": int8(E4M3, data="peaks", kind="block", options={"sm_scale": -0.3}),
    "int8_softcap": int8(kind="block", options={"softcap": 8.0, "causal": True}),
    "int8_alibi_sinks": int8(E4M3, kind="block", means=True, alibi=True, sinks=True, heads=2),
    "int8_seq_lens": int8(lengths=(90, 7, 300), kind="block", means=True, seqlen_q=300, options={"causal": True}),
    "int8_packed": int8(layout="thd", lengths=(90, 1, 0, 270), kind="head", means=True, seqlen_q=300, heads=2),
    "int8_packed_e4m3": int8(E4M3, layout="thd", lengths=(150, 20), seqlen_q=150, seqlen_k=150, kind="block",
                             means=True, options={"window": (60, 0)}),
    "int8_rows_without_keys": int8(seqlen_q=230, seqlen_k=60, means=True, kind="block", options={"causal": True}),
    "int8_one_visible_key": int8(means=True, options={"window": (0, 0)}),
}  # fmt: skip


def config(case: Case, **changes) -> Sm90Config:
    """Return the table's tile with the fewest buffers that the schedule can use: with many, nothing waits in vain."""
    wide, to_float32 = max(case.head_dim, case.head_dim_v), case.out_dtype == F32
    consumers = 1 if case.seqlen_q < 128 else 2
    direct = wide > 128 or to_float32
    masked = case.options.get("causal") or case.options.get("window", (-1, -1))[1] >= 0
    chosen = Sm90Config(
        consumers, 64 if wide > 128 else 128, 4, not direct, 240, 24, persistent=True, store_from_registers=direct,
        q_in_registers=int(consumers == 2 and 64 < wide <= 128 and not masked),
        scheduler="dynamic" if case.lengths else "static",
    )  # fmt: skip
    return replace(chosen, **changes)


@interpreted_only
@pytest.mark.parametrize("name", CASES)
def test_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = interpret(monkeypatch, config(CASES[name]), seed=3)
    with poisoned_allocations():
        check(CASES[name], TARGETS["cuda"], "sm90")
    assert kernel.launches == 1


@pytest.mark.parametrize(
    ("layout", "lengths", "head_dim_v"),
    [("bhsd", None, 80), ("bhsd", None, 72), ("bshd", (300, 0), 200), ("thd", (90, 1, 0, 270), 128)],
)
def test_the_transposed_v(
    layout: str, lengths: tuple[int, ...] | None, head_dim_v: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte of it: keys of a group of 16 in the order of the weights, zeros behind each sequence. Nothing beyond V
    is read."""
    batch, heads, longest = len(lengths) if lengths else 2, 2, 300
    size = {"layout": VARLEN if layout == "thd" else layout, "seq_lens": layout == "bshd"}
    if layout == "thd":
        size |= {"total_q": sum(lengths), "total_k": sum(lengths)}
    problem = AttentionProblem(
        "cuda",
        "sm_90",
        "float8_e4m3fn",
        **size,
        batch=batch,
        heads_q=heads,
        heads_kv=heads,
        seqlen_q=longest,
        seqlen_k=longest,
        head_dim=64,
        head_dim_v=head_dim_v,
    )
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(0, 255, (batch, heads, longest, head_dim_v), generator=generator, dtype=torch.uint8)
    ends = lengths or (longest,) * batch
    tensors = AttentionTensors(bits, bits, bits, 1.0)
    counts = torch.tensor(ends, dtype=torch.int32)
    if layout == "thd":
        v = torch.cat([x[:, :n].transpose(0, 1) for x, n in zip(bits, ends, strict=True)])
        offsets = torch.tensor([0, *counts.cumsum(0).tolist()], dtype=torch.int32)
        tensors = tensors._replace(cu_seqlens_k=offsets)
    else:
        v = bits.transpose(1, 2).contiguous() if layout == "bshd" else bits
        tensors = tensors._replace(seq_lens=counts if lengths else None)
    tensors = tensors._replace(v=v.view(torch.float8_e4m3fn))
    with poisoned_allocations():
        out = float8.transposed_values(problem, tensors.v)
    accesses = guard(monkeypatch)
    launch_each([float8.transpose_launch(problem, tensors, out)])
    assert accesses()
    found, key = out.view(torch.uint8), torch.arange(-(-longest // 256) * 256)
    key = key // 16 * 16 + key % 4 // 2 * 8 + key % 16 // 4 * 2 + key % 2
    for b, n in enumerate(ends):
        first = 0
        if layout == "thd":
            first = (sum(ends[:b]) // 256 + b) * 256
        end = min(-(-n // 256) * 256 if layout == "thd" else len(key), found.shape[3] - first)
        padded = torch.cat([bits[b, :, :n], torch.zeros(heads, len(key) - n, head_dim_v, dtype=torch.uint8)], 1)
        rows = found[0 if layout == "thd" else b, :, :, first : first + end]
        assert torch.equal(rows, padded[:, key[:end]].transpose(1, 2)), b


@interpreted_only
@pytest.mark.parametrize(
    "changes", [{"block_n": 64, "pingpong": True}, {"consumers": 3, "stages": 2},
                {"q_in_registers": 1, "stages": 6}, {"block_n": 256}, {"scheduler": "dynamic"}], ids=str,
)  # fmt: skip
def test_schedules(changes: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = case(kind="block", means=True, heads=2, seqlen_q=250, seqlen_k=330, options={"causal": True})
    kernel = interpret(monkeypatch, config(chosen, **changes), seed=5)
    with poisoned_allocations():
        check(chosen, TARGETS["cuda"], "sm90")
    assert kernel.launches == 1


@interpreted_only
@pytest.mark.parametrize(
    "changes", [{"fixed_max": True, "pairs": True}, {"fixed_max": True, "q_in_registers": 2, "box_columns": 64},
                {"pairs": True, "pingpong": True, "consumers": 3}, {"box_columns": 64, "pairs": True},
                {"block_n": 64, "stages": 2}], ids=str,
)  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_schedules_of_int8(changes: dict, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    size = {"head_dim": 128, "heads": 2, "seqlen_q": 200, "seqlen_k": 430}
    chosen = int8(kind="block", means=True, options={"causal": causal}, **size)
    kernel = interpret(monkeypatch, config(chosen, **changes), seed=5)
    with poisoned_allocations():
        check(chosen, TARGETS["cuda"], "sm90")
    assert kernel.launches == 1


@interpreted_only
@pytest.mark.parametrize("causal", [False, True])
def test_ordinary_scores_of_int8_need_no_second_pass(
    causal: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With one, products without the descale of their block of keys would only take longer: their sums overflow."""
    chosen = int8(kind="block", means=True, head_dim=128, seqlen_q=130, seqlen_k=430, options={"causal": causal})
    interpret(monkeypatch, config(chosen, fixed_max=True), seed=5, kernels=load_without_fallback(tmp_path))
    with poisoned_allocations():
        check(chosen, TARGETS["cuda"], "sm90")


@interpreted_only
def test_int8_sums_that_overflow_a_fixed_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later keys exceed the first blocks' maximum by more than float32 holds: the fallback computes the rows."""
    chosen = int8(data="large", head_dim=128, kind="block", seqlen_q=130, seqlen_k=520)
    interpret(monkeypatch, config(chosen, fixed_max=True), seed=5)
    with poisoned_allocations():
        check(chosen, TARGETS["cuda"], "sm90")


@interpreted_only
@pytest.mark.parametrize(("options", "last"), [({"causal": True}, 300), ({"window": (60, 0)}, 188)], ids=str)
@pytest.mark.parametrize("chosen", [case(kind="block"), int8(kind="block")], ids=["float8", "int8"])
def test_a_factor_that_is_nan_shows_where_its_keys_are_seen(
    chosen: Case, options: dict, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The factor of keys 64 to 127. All rows up to 127 are one tile, and all keys up to 127 one block of the kernel."""
    interpret(monkeypatch, config(chosen), seed=3)
    (q, k, v), _ = make_call(replace(chosen, seqlen_q=300))
    k.descale[:, :, 1] = float("nan")
    out, lse = diyfa.flash_attention(q, k, v, **options, return_lse=True, backend="cuda", variant="sm90")
    is_nan = (torch.arange(300) >= 64) & (torch.arange(300) < last)
    assert torch.equal(out.isnan().all(-1), is_nan.expand(2, 1, -1)) and torch.equal(
        lse.isnan(), is_nan.expand(2, 1, -1)
    )
    assert out[:, :, ~is_nan].isfinite().all() and lse[:, :, ~is_nan].isfinite().all()


# ---- which calls it takes


def described(**changes) -> AttentionProblem:
    size = (4, 16, 4, 4096, 4096, 128, 128)
    plain = AttentionProblem("cuda", "sm_90", "float8_e4m3fn", "bhsd", *size, out_dtype="bfloat16", q_descale=1)
    return plain.replace(**changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float8_e5m2"}, "float16, bfloat16, float8_e4m3fn and int8, not float8_e5m2"),
        ({"dtype": "int8", "value_dtype": "float8_e5m2"}, "beside int8, not of float8_e5m2"),
        ({"dtype": "int8", "value_dtype": "bfloat16", "mask": (128, 128)}, "does not implement mask"),
        ({"arch": "sm_100"}, "only sm_90 has"),
        ({"dropout": True}, "does not implement dropout"),
        ({"bias": "bfloat16"}, "does not implement attn_bias"),
        ({"mask": (128, 128)}, "does not implement mask"),
        ({"k_mean": True, "softcap": 30.0}, "no softcap of scores whose keys have a mean"),
        ({"head_dim": 288, "head_dim_v": 288}, "head_dim 33 to 256"),
        ({"aligned": False}, "multiples of 16 bytes"),
        ({"seq_lens": True, "few_steps": False}, "counts the steps"),
    ],
    ids=str,
)
def test_refuses_with_a_reason(changes: dict, reason: str) -> None:
    assert reason in hopper_configs.refuses(described(**changes))


def test_the_kernel_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_configs, "environment_refusal", lambda: None)
    cuda = registry.load_backend("cuda")
    assert registry.choose("attention_fwd", described(), cuda).name == "sm90"
    assert registry.choose("attention_fwd", described(dtype="float8_e5m2"), cuda).name == "v2"
    for value_dtype, name in (
        ("bfloat16", "sm90"),
        ("float16", "sm90"),
        ("float8_e4m3fn", "sm90"),
        ("float8_e5m2", "v2"),
    ):
        assert registry.choose("attention_fwd", described(dtype="int8", value_dtype=value_dtype), cuda).name == name


@pytest.mark.parametrize("head_dim", [40, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("head_dim_v", [64, 128, 256])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (INT8, E4M3), (INT8, BF16)], ids=str)
@pytest.mark.parametrize("changes", [{}, {"window_right": 0}, {"out_dtype": "float32"}, {"seqlen_q": 128, "batch": 1}])
def test_buffers_fit_shared_memory(
    head_dim: int, head_dim_v: int, dtypes: tuple[torch.dtype, torch.dtype], changes: dict
) -> None:
    dtype, value_dtype = map(dtype_name, dtypes)
    types = {"dtype": dtype, "value_dtype": "" if value_dtype == dtype else value_dtype}
    problem = described(head_dim=head_dim, head_dim_v=head_dim_v, **types, **changes)
    chosen = hopper_configs.select_config(problem)
    width, boxes = hopper_configs.box_layout(head_dim, head_dim_v, chosen.box_columns)
    width_v, boxes_v = hopper_configs.value_boxes(problem, chosen)
    assert width * boxes >= head_dim and width_v * boxes_v >= head_dim_v
    rows = chosen.consumers * hopper_configs.CONSUMER_ROWS
    block_bytes = width * boxes + width_v * boxes_v * dtypes[1].itemsize
    size = rows * width * boxes + chosen.stages // 2 * chosen.block_n * block_bytes
    assert chosen.separate_o_buffer or chosen.store_from_registers  # out is larger than the queries
    out_bytes = 4 if problem.out_dtype == "float32" else 2
    size += rows * width_v * boxes_v * out_bytes if chosen.separate_o_buffer else 0
    assert chosen.stages % 2 == 0 and size + 16384 <= 227 * 1024
