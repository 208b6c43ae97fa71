"""The Hopper kernel: what it refuses and why (anywhere), and its results (on a GPU of that kind)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
from nonfinite import dependence, others, poison

import diyfa
from diyfa import registry
from diyfa.backends.cuda import backend as cuda
from diyfa.backends.cuda.attention import configs
from diyfa.backends.cuda.gluon import compat
from diyfa.backends.cuda.hopper import configs as hopper_configs
from diyfa.problem import VARLEN, AttentionProblem, has_few_steps
from diyfa.testing import AttentionCase, Inputs, Results, attention_function, check_budget, make_inputs

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_kernel = pytest.mark.skipif(
    not ON_HOPPER or hopper_configs.environment_refusal() is not None,
    reason="needs an sm_90 GPU and a Triton of the kernel's",
)


def problem(**changes) -> AttentionProblem:
    size = {"batch": 4, "heads_q": 16, "heads_kv": 4, "seqlen_q": 4096, "seqlen_k": 4096}
    plain = AttentionProblem("cuda", "sm_90", "bfloat16", "bhsd", *size.values(), head_dim=128, head_dim_v=128)
    return plain.replace(**changes)


PACKED = {"layout": VARLEN, "total_q": 9000, "total_k": 9000}


@pytest.mark.parametrize("changes", [
    {},
    {"window_right": 0},
    {"layout": "bshd", "dtype": "float16"},
    {"head_dim": 64, "head_dim_v": 64},
    {"head_dim": 256, "head_dim_v": 256, "window_right": 0},
    {"seqlen_q": 1000, "seqlen_k": 3333, "window_right": 0},
    {"deterministic": True, "needs_grad": True},
    {"seq_lens": True},
    {"head_dim": 80, "head_dim_v": 80},
    {"head_dim": 192, "head_dim_v": 128, "window_right": 0},
    {"window_left": 128, "window_right": 0},
    {"window_left": 1000, "window_right": 50, "softcap": 30.0},
    PACKED | {"window_right": 0},
    {"batch": 1, "heads_q": 1, "heads_kv": 1, "seqlen_q": 64, "seqlen_k": 128},
    {"seqlen_q": 1},
], ids=str)  # fmt: skip
def test_accepts(changes: dict) -> None:
    assert hopper_configs.refuses(problem(**changes)) is None


@pytest.mark.parametrize(("changes", "reason"), [
    ({"arch": "sm_80"}, "only sm_90 has, this is sm_80"),
    ({"arch": "sm_100"}, "only sm_90 has, this is sm_100"),
    ({"dtype": "float32"}, "not float32"),
    ({"head_dim": 32, "head_dim_v": 32}, "head_dim 33 to 256, got 32 and 32"),
    ({"head_dim": 100, "head_dim_v": 100}, "multiples of 16 bytes, head_dim 100 is not"),
    ({"head_dim": 64, "head_dim_v": 320}, "head_dim 33 to 256, got 64 and 320"),
    ({"dropout": True, "bias": "bfloat16"}, "does not implement attn_bias, dropout"),
    ({"dropout": True}, "does not implement dropout"),
    ({"aligned": False}, "multiples of 16 bytes"),
    ({"seq_lens": True, "few_steps": False}, "counts the steps"),
    ({"seqlen_k": 4, "batch": 1}, "multiply-adds in the scores"),
    ({"batch": 1, "seqlen_q": 127, "seqlen_k": 127}, "16384 elements of K"),
    ({"batch": 1, "heads_q": 4, "seqlen_q": 500, "seqlen_k": 500, "seq_lens": True}, "without seq_lens"),
    ({"batch": 1, "heads_q": 4, "seqlen_q": 500, "seqlen_k": 500, "window_left": 99, "window_right": 0},
        "16384 elements of K"),
    ({"seqlen_q": 63, "seqlen_k": 512, "batch": 64}, "tiles of 64 queries, which 63 would not fill"),
    ({"seqlen_q": 63, "batch": 64, "seq_lens": True}, "tiles of 64 queries, which 63 would not fill"),
], ids=str)  # fmt: skip
def test_refuses_with_a_reason(changes: dict, reason: str) -> None:
    assert reason in hopper_configs.refuses(problem(**changes))


@pytest.mark.parametrize("head_dim", range(40, 257, 8))
@pytest.mark.parametrize("head_dim_v", [40, 64, 128, 192, 256])
@pytest.mark.parametrize(
    "features", [{}, {"window_right": 0}, {"seq_lens": True}, PACKED | {"window_right": 0}], ids=str
)
def test_buffers_fit_shared_memory(head_dim: int, head_dim_v: int, features: dict) -> None:
    """And out has buffers of its own, fits where Q was or needs none."""
    case = problem(head_dim=head_dim, head_dim_v=head_dim_v, **features)
    for length, queries in ((1024, 4096), (4096, 4096), (512, 128)):
        config = hopper_configs.select_config(case.replace(seqlen_k=length, seqlen_q=queries))
        width, boxes = hopper_configs.box_layout(head_dim, head_dim_v, config.box_columns)
        width_v, boxes_v = hopper_configs.box_layout(head_dim_v, head_dim, config.box_columns)
        columns, columns_v = width * boxes, width_v * boxes_v
        assert columns >= head_dim and columns_v >= head_dim_v
        rows = config.consumers * hopper_configs.CONSUMER_ROWS
        size = rows * columns + config.stages * config.block_n * (columns + columns_v) // 2
        if config.separate_o_buffer:
            size += rows * columns_v
        elif not config.store_from_registers:  # out goes where Q was
            assert (width_v, boxes_v <= boxes) == (width, True)
        exchanged = 2048 * config.consumers if config.store_from_registers else 0
        assert 2 * size + exchanged + 1024 <= 232448
        assert hopper_configs.has_one_ring(case, config.box_columns) or config.stages % 2 == 0


@pytest.mark.parametrize("changes", [{"seqlen_q": 1024, "batch": 1}, {"seqlen_q": 64, "batch": 64}], ids=str)
def test_small_grids_have_small_tiles(changes: dict) -> None:
    """128 tiles of 128 queries leave multiprocessors idle, and 64 queries do not fill one."""
    assert hopper_configs.select_config(problem()).consumers == 2
    assert hopper_configs.select_config(problem(**changes)).consumers == 1


def test_every_head_dim_has_a_row_for_every_length() -> None:
    for rows in hopper_configs.CONFIGS.values():
        limits = [most for most, _ in rows]
        assert limits == sorted(set(limits)) and limits[-1] >= 1 << 40


def test_steps_that_32_bits_do_not_count_are_many() -> None:
    far = torch.empty_strided((2, 1, 4, 8), (1 << 40, 8, 8, 1), device="meta")
    near = torch.empty_strided((2, 1, 4, 8), (1 << 40, 8, 1 << 30, 1), device="meta")
    assert not has_few_steps("bhsd", near, far) and has_few_steps("bhsd", near)


def test_another_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    monkeypatch.setattr(compat, "TRITON", (3, 10))
    assert "Gluon of Triton 3.6 to 3.9, this is Triton 3.10.0" in hopper_configs.environment_refusal()


def test_taken_where_it_can_run_and_explained_where_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_configs, "environment_refusal", lambda: None)
    assert registry.choose("attention_fwd", problem(), cuda, "sm90").name == "sm90"
    assert registry.choose("attention_fwd", problem(), cuda).name == "sm90"
    assert registry.choose("attention_fwd", problem(), cuda, "v2").name == "v2"
    assert registry.choose("attention_fwd", problem(dropout=True), cuda).name == "v2"
    with pytest.raises(ValueError, match="sm90: sm90 does not implement dropout"):
        registry.choose("attention_fwd", problem(dropout=True), cuda, "sm90")


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("seqlen", [300, 4096, 65536, 1 << 20])
@pytest.mark.parametrize("batch", [1, 64, 2048])
def test_programs_have_room_for_all_their_tile_infos(
    head_dim: int, seqlen: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program takes fewer tiles than it has tile infos, of which the last says that there is none."""
    monkeypatch.setattr(hopper_configs, "multiprocessors", lambda device: 132)
    masks = ({}, {"window_left": seqlen // 2}, {"heads_kv": 16}, {"seqlen_k": 100}, {"window_right": -1})
    for changes in masks:
        size = {"head_dim": head_dim, "head_dim_v": head_dim, "seqlen_q": seqlen, "seqlen_k": seqlen, "batch": batch}
        some = problem(**{"window_right": 0, **size, **changes})
        config = hopper_configs.select_config(some)
        if not config.persistent:
            continue
        assert hopper_configs.tile_info_count(config) == hopper_configs.MAX_TILE_INFOS
        tiles = hopper_configs.count_tiles(some, config)
        programs = hopper_configs.grid_size(some, config, torch.device("cpu"))
        assert -(-tiles // programs) < hopper_configs.MAX_TILE_INFOS


MASKS = {
    "causal": {"causal": True},
    "more_queries": {"causal": True, "seqlen_k": 500},
    "window": {"window": (200, 0)},
    "window_both": {"window": (150, 100), "seqlen_k": 900},
    "window_left": {"window": (300, -1)},
    "window_right": {"window": (-1, 30)},
    "seq_lens": {"causal": True, "seq_lens": (690, 400)},
    "softcap": {"causal": True, "softcap": 20.0, "sm_scale": -0.2},
    "packed": {"causal": True, "batch": 1, "layout": "thd", "lens_q": (500, 0, 300, 77), "lens_k": (450, 9, 300, 200)},
    "long": {"causal": True, "seqlen_q": 2500, "heads": 2, "heads_kv": 2},
}


@needs_kernel
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 72, 96, 128, 192, 256])
def test_what_is_not_finite_reaches_what_sees_it(head_dim: int, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN and infinities in v: no other sample and no other column, and the rest is right. One in the last column."""
    monkeypatch.setattr(configs, "TMA_MIN_WORK", 0)
    monkeypatch.setattr(hopper_configs, "FULL_GPU", 0)
    sizes = {"batch": 2, "heads": 4, "heads_kv": 2, "seqlen_q": 700, "head_dim": head_dim, "dtype": "bfloat16"}
    case = AttentionCase(f"{mask}_{head_dim}", **{**sizes, **MASKS[mask]})

    def poisoned_inputs(device: str, where: list[tuple[int, int, float]]) -> Inputs:
        inputs = make_inputs(case, device)
        for at, feature, value in where:
            poison(inputs, case, "v", value, at, feature)
        return inputs

    def attend(where: list[tuple[int, int, float]]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = poisoned_inputs("cuda", where)
        with torch.no_grad():
            return attention_function(case, variant="sm90")(*inputs.leaves, return_lse=True, **inputs.options)

    inf = float("inf")
    where = [(300, 3, float("nan")), (301, 20, inf), (330, 20, -inf), (40, head_dim - 1, inf)]
    clean, lse = attend([])
    assert lse.isfinite().any()
    for poisoned in (where[:1], where):
        got, poisoned_lse = attend(poisoned)
        want = dependence(poisoned_inputs("cpu", poisoned), case).out.to(got.device)
        assert want.isnan().any() and not (got.isfinite() & want.isnan()).any()
        may_show = torch.zeros(got.shape[-1], dtype=torch.bool, device=got.device)
        may_show[[feature for _, feature, _ in poisoned]] = True
        assert (got.isfinite() | may_show).all()
        for other, before in zip(others(got, "out", case, "v"), others(clean, "out", case, "v"), strict=True):
            assert torch.equal(other, before)
        rest = torch.where(got.isfinite(), got, clean)
        results = Results(rest.cpu(), poisoned_lse.cpu(), *[None] * (len(Results._fields) - 2))
        checks = check_budget(results, case, "cuda")
        assert checks["out"].share <= 1 and checks["lse"].share <= 1, checks


@needs_kernel
def test_programs_draw_tiles_in_graphs_and_on_streams_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches that run at the same time have counters of their own; each leaves its own as the next one needs it."""
    from diyfa.backends.cuda.gluon import tile_counter
    from diyfa.backends.cuda.hopper import fwd_launch as hopper_fwd_launch

    def dynamic(problem: AttentionProblem) -> hopper_configs.Sm90Config:
        return replace(hopper_configs.select_config(problem), persistent=True, scheduler="dynamic")

    monkeypatch.setattr(hopper_fwd_launch, "select_config", dynamic)
    q, k, v = (torch.randn(4, 16, 2048, 128, device="cuda").bfloat16() for _ in range(3))

    def call() -> torch.Tensor:
        return diyfa.flash_attention(q, k, v, causal=True, variant="sm90")

    first = call()
    assert (first - diyfa.flash_attention(q, k, v, causal=True, variant="v2")).abs().max() < 0.02
    graphs, captured = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            captured += [call(), call()]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outs = []
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if i < len(graphs):
                    graphs[i].replay()
                outs.append(call())
    torch.cuda.synchronize()
    assert all(torch.equal(out, first) for out in outs + captured)
    assert all(not counter.any() for counter in tile_counter._counters.values())
