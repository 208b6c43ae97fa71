"""The backward of sequences that one tile holds (`backends/cuda/attention/bwd_short.py`).

The matrix of cases runs it wherever it is the preferred kernel; here are the kernels for any length on those cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from cases import CASES
from described_cases import case_problem
from nonfinite import assert_propagates
from packings import HOSTILE, OVERLAPPING, TOTAL
from poison import poisoned_allocations
from targets import TARGETS

if "cuda" not in TARGETS:
    pytest.skip("the cuda backend is not tested in this run", allow_module_level=True)

import diyfa
from diyfa import plan as planning
from diyfa import registry
from diyfa.backends.cuda.attention.configs import AttentionConfig, candidates
from diyfa.backends.cuda.attention.launch import use_config
from diyfa.backends.cuda.runtime import passes, tune
from diyfa.problem import AttentionGradients, AttentionProblem, AttentionTensors, Launch
from diyfa.testing import AttentionCase, assert_within_budget, attention_function, make_inputs, run_case

TARGET = TARGETS["cuda"]
BACKEND = registry.load_backend("cuda")
(SHORT,) = (kernel for kernel in BACKEND.kernels if kernel.name == "short")
WHOLE = ["_bwd_preprocess_kernel", "_bwd_dkdv_kernel", "_bwd_dq_kernel"]


def is_short(name: str) -> bool:
    """Whether the kernel takes the case on a Hopper GPU."""
    problem = case_problem(CASES[name]).replace(arch="sm_90")
    return not CASES[name].large and registry.refusal(BACKEND, SHORT, problem) is None


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels of backward passes, none of which has a plan yet; all take the table's tiles, since a tuner
    that measures launches many times."""
    names: list[str] = []
    monkeypatch.setattr(tune._tuner, "enabled", False)
    launch = passes.launch_kernel

    def launch_kernel(one: Launch) -> None:
        if one.kernel.__name__.startswith("_bwd"):
            names.append(one.kernel.__name__)
        launch(one)

    monkeypatch.setattr(passes, "launch_kernel", launch_kernel)
    monkeypatch.setattr(planning, "plans", {})
    return names


@pytest.mark.parametrize("name", [name for name in CASES if is_short(name)])
def test_kernels_for_any_length(name: str, monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> None:
    monkeypatch.setattr(BACKEND, "kernels", tuple(kernel for kernel in BACKEND.kernels if kernel is not SHORT))
    inputs = make_inputs(CASES[name], TARGET.device)
    with poisoned_allocations():
        results = run_case(attention_function(CASES[name], backend="cuda"), inputs)
    assert_within_budget(results, CASES[name], TARGET.oracle_device)
    assert launched[:3] == (WHOLE if launched else [])  # without a query or a key there is nothing to launch


def gradients(n: int, heads_kv: int = 6, row: int = 32, **options: Any) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv of windows of n tokens; rows of the gradient that they are of lie `row` elements apart."""
    generator = torch.Generator(TARGET.device).manual_seed(0)

    def tensor(heads: int) -> torch.Tensor:
        return torch.randn(2, n, heads, 32, generator=generator, device=TARGET.device).to(torch.bfloat16)

    q, k, v = (tensor(heads).requires_grad_() for heads in (6, heads_kv, heads_kv))
    dout = torch.cat([tensor(6), tensor(6)], -1)[..., :row].contiguous()[..., :32]
    out = diyfa.flash_attention_v2(q, k, v, backend="cuda", **options)
    return torch.autograd.grad(out, (q, k, v), dout)


def test_one_launch_where_one_tile_holds_a_sequence(launched: list[str]) -> None:
    for arguments, expected in (
        ({"n": 64}, ["_bwd_short_kernel"]),
        ({"n": 50, "causal": True, "deterministic": True}, ["_bwd_short_kernel"]),
        ({"n": 65}, WHOLE),
        ({"n": 64, "heads_kv": 3}, WHOLE),  # a loop over heads takes 40 registers
    ):
        launched.clear()
        gradients(**arguments)
        assert launched == expected, arguments


def test_explained() -> None:
    q = torch.empty(2, 64, 6, 32, dtype=torch.bfloat16, device=TARGET.device, requires_grad=True)
    explained = diyfa.explain(q, q, q, layout="bshd", backend="cuda").backward
    assert explained.kernel == "short" and explained.config.block_m == 64
    longer = torch.empty(2, 65, 6, 32, dtype=torch.bfloat16, device=TARGET.device, requires_grad=True)
    assert "holds 65 queries" in str(diyfa.explain(longer, longer, longer, layout="bshd", backend="cuda").backward)
    assert "short" in diyfa.kernels_for("cuda", "attention_bwd")


def test_a_gradient_that_is_not_aligned(launched: list[str]) -> None:
    """It is read through addresses as any other, by the same tile: the same bits."""
    for x, y in zip(gradients(64), gradients(64, row=33), strict=True):
        assert torch.equal(x, y)
    assert launched == ["_bwd_short_kernel"] * 2


SIZES: dict[str, dict[str, Any]] = {
    "dense": {"batch": 2, "seqlen_q": 37, "seqlen_k": 50, "view": "sliced"},
    "samples": {"batch": 2, "seqlen_q": 50, "seq_lens": (50, 9), "sinks": True},
    "sequences": {"layout": "thd", "lens_q": (0, 17, 33), "lens_k": (5, 50, 1), "slack": 3},
    "alike": {"batch": 2, "seqlen_q": 16, "head_dim_v": 24, "bias": "bhqk"},
}


@pytest.mark.parametrize("name", SIZES)
def test_no_other_memory_is_touched(name: str, monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> None:
    if not TARGET.interpreted:
        pytest.skip("addresses are looked at in the interpreter")
    from guarded_memory import guard

    case = AttentionCase(name, dtype="bfloat16", head_dim=40, **SIZES[name])
    inputs = make_inputs(case, TARGET.device)
    with poisoned_allocations():
        accesses = guard(monkeypatch)
        results = run_case(attention_function(case, backend="cuda"), inputs)
    assert_within_budget(results, case, TARGET.oracle_device)
    assert launched[0] == "_bwd_short_kernel" and accesses() > 10


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_nan_in_a_sequence_reaches_no_other(name: str, launched: list[str]) -> None:
    """Neither rows of the next one, which a tile of 64 would hold too, nor a number of them."""
    case = AttentionCase("packed", layout="thd", lens_q=(37, 64, 1, 50), dtype="bfloat16", causal=name in "qv")
    assert_propagates(TARGET, case, "auto", name, float("nan"))
    assert set(launched) == {"_bwd_short_kernel"}


@pytest.mark.parametrize("strides", ["one number", "of a head", "of a row", "exchanged"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_the_gradient_of_the_log_sum_exp_lies_anyhow(packed: bool, strides: str, launched: list[str]) -> None:
    """That of its sum is one number for all rows."""
    q, k, v, dout = torch.randn(4, 3, 20, 4, 32, generator=torch.Generator().manual_seed(0)).to(TARGET.device).half()
    dlse = torch.randn(3, 4, 20, generator=torch.Generator().manual_seed(1)).to(TARGET.device)
    attend: Any = diyfa.flash_attention_v2
    if packed:
        q, k, v, dout, dlse = *(x.flatten(0, 1) for x in (q, k, v, dout)), dlse.transpose(0, 1).reshape(4, 60)
        offsets = torch.arange(0, 61, 20, dtype=torch.int32, device=TARGET.device)
        attend = partial(attend_packed, offsets)
    own = {
        "one number": dlse.flatten()[:1].view([1] * dlse.dim()).expand(dlse.shape),
        "of a head": dlse[..., :1].expand(dlse.shape),
        "of a row": dlse[..., :1, :].expand(dlse.shape),
        "exchanged": dlse.mT.contiguous().mT,
    }[strides]
    found = []
    for gradient in (own.contiguous(), own):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, return_lse=True, backend="cuda", deterministic=True)
        found.append(torch.autograd.grad(out, leaves, (dout, gradient)))
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)
    assert launched == ["_bwd_short_kernel"] * 2


def attend_packed(offsets: torch.Tensor, *qkv: torch.Tensor, **options: Any) -> Any:
    """Sequences of 20 rows."""
    return diyfa.flash_attention_varlen(*qkv, offsets, offsets, 20, 20, **options)


def test_a_product_that_overflows_behind_the_mask(launched: list[str]) -> None:
    """dO V of the last key is infinite where only the last query, of which nothing is wanted, sees it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 40, 32, generator=generator).bfloat16() for _ in range(4))
    dout[:, :, :-1, 0], dout[:, :, -1] = 100.0, 0.0
    found = []
    for value in (1.0, 3e38):
        v[:, :, -1] = value
        leaves = [x.clone().to(TARGET.device).requires_grad_() for x in (q, k, v)]
        out = diyfa.flash_attention(*leaves, causal=True, backend="cuda", deterministic=True)
        found.append([x.cpu() for x in torch.autograd.grad(out, leaves, dout.to(TARGET.device))])
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y) and bool(x.isfinite().all())
    assert launched == ["_bwd_short_kernel"] * 2


PLAIN = AttentionProblem("cuda", "sm_90", "bfloat16", "bshd", 2, 4, 4, 64, 64, 64, 64)


@pytest.mark.parametrize(("changes", "rows"), [
    ({}, 64),
    ({"seqlen_q": 1}, 64),
    ({"seqlen_k": 1}, 64),
    ({"seqlen_q": 33, "seqlen_k": 1}, 64),
    ({"seqlen_q": 32, "seqlen_k": 17}, 32),
    ({"seqlen_q": 16, "seqlen_k": 1}, 16),
    ({"seqlen_q": 65}, None),
    ({"seqlen_k": 65}, None),
    ({"aligned": False}, 64),
    ({"head_dim": 128, "head_dim_v": 128}, 64),
    ({"head_dim": 129, "head_dim_v": 128}, None),
    ({"head_dim_v": 129}, None),
    ({"head_dim_v": 32}, None),  # wgmma on a narrow V
    ({"head_dim_v": 32, "seqlen_q": 32, "seqlen_k": 32}, 32),
    ({"head_dim_v": 32, "arch": "sm_80"}, 64),
    ({"dtype": "float32"}, None),
    ({"dtype": "float16", "arch": "sm_75"}, None),
    ({"heads_q": 8}, None),
    ({"batch_invariant": True}, None),
    ({"head_dim": 128, "head_dim_v": 128, "bias": "float64"}, 64),
    ({"head_dim": 128, "head_dim_v": 128, "bias": "float32", "arch": "sm_86"}, 64),
    ({"head_dim": 128, "head_dim_v": 128, "bias": "float64", "arch": "sm_86"}, None),  # 104 KB
], ids=str)  # fmt: skip
def test_what_it_takes(changes: dict[str, Any], rows: int | None) -> None:
    """The smallest tile that holds the sequence, and no other."""
    problem = PLAIN.replace(**changes)
    refusal = registry.refusal(BACKEND, SHORT, problem)
    assert (refusal is None) == (rows is not None), refusal
    if rows:
        assert {(tile.block_m, tile.block_n) for tile in candidates("short", problem)} == {(rows, rows)}


def tiles() -> Iterator[tuple[str, int, int, AttentionConfig]]:
    """(dtype, length, head_dim, tile) of all that the autotuner may choose on this GPU."""
    arch = BACKEND.arch(torch.device(TARGET.device))
    for dtype, n, head_dim in product(("float16", "bfloat16"), (10, 32, 50), (16, 64, 128)):
        problem = AttentionProblem("cuda", arch, dtype, "bshd", 2, 4, 4, n, n, head_dim, head_dim)
        for tile in candidates("short", problem)[: 1 if TARGET.interpreted else None]:
            yield dtype, n, head_dim, tile


@pytest.mark.parametrize(("dtype", "n", "head_dim", "tile"), list(tiles()), ids=str)
@pytest.mark.parametrize("features", ["plain", "all"])
def test_tile(dtype: str, n: int, head_dim: int, tile: AttentionConfig, features: str, launched: list[str]) -> None:
    every = {"causal": True, "bias": "1hqk", "softcap": 20.0, "alibi": "h", "dropout_p": 0.2, "sinks": True}
    case = AttentionCase(
        "tile", batch=2, heads=4, seqlen_q=n, head_dim=head_dim, dtype=dtype, layout="bshd",
        **(every if features == "all" else {}),
    )  # fmt: skip
    with use_config("short", tile), poisoned_allocations():
        results = run_case(attention_function(case, backend="cuda"), make_inputs(case, TARGET.device))
    assert_within_budget(results, case, TARGET.oracle_device)
    assert launched == ["_bwd_short_kernel", *(["_bwd_dbias_kernel"] if case.bias else [])]


@pytest.mark.parametrize("longest", [64, 33])
@pytest.mark.parametrize("name", HOSTILE)
def test_offsets_that_nobody_could_check(name: str, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of no sequence are 0, all others finite, those of sequences that are as long as said as by `split`."""
    if name in OVERLAPPING and not TARGET.interpreted:
        pytest.skip("programs of two sequences write the same rows")
    if TARGET.interpreted:
        from guarded_memory import guard

        guard(monkeypatch)
    offsets = [min(max(x, 0), TOTAL) for x in HOSTILE[name]]
    covered = torch.zeros(TOTAL, dtype=torch.bool)
    for i, j in pairwise(offsets):
        covered[i:j] = True
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = torch.randn(4, TOTAL, 2, 40, generator=generator).bfloat16()
    for x in (q, k, v, dout):
        x[~covered] = float("nan")
    q, k, v, dout = (x.to(TARGET.device) for x in (q, k, v, dout))
    places = torch.tensor(HOSTILE[name], dtype=torch.int32, device=TARGET.device)
    tensors = AttentionTensors(q, k, v, 0.2, cu_seqlens_q=places, cu_seqlens_k=places)
    arch = BACKEND.arch(torch.device(TARGET.device))
    sizes = (len(offsets) - 1, 2, 2, longest, longest, 40, 40)
    problem = AttentionProblem("cuda", arch, "bfloat16", "thd", *sizes, total_q=TOTAL, total_k=TOTAL)
    out, lse = torch.empty_like(q), torch.empty(2, TOTAL, device=TARGET.device)
    registry.choose("attention_fwd", problem, BACKEND, "v2").launch(problem, tensors, out, lse)
    found = []
    for variant in ("short", "split"):
        around = torch.full((3, TOTAL + 2, 3, 48), float("nan"), dtype=q.dtype, device=TARGET.device)
        inside = around[:, 1:-1, :-1, :-8]
        gradients = AttentionGradients(*inside)
        with poisoned_allocations():
            registry.choose("attention_bwd", problem, BACKEND, variant).launch(
                problem, tensors, out, lse, dout, None, gradients
            )
        found.append(inside.cpu().clone())
        inside.fill_(float("nan"))
        assert bool(around.isnan().all()), "written outside"
    of_short, of_split = found
    assert bool(of_short.isfinite().all()) and not of_short[:, ~covered].any()
    if name not in OVERLAPPING and all(j - i <= longest for i, j in pairwise(offsets)):
        torch.testing.assert_close(of_short, of_split, atol=0.02, rtol=0.02)
