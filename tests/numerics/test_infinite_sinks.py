"""Sinks of -inf, which are none, of +inf, which make their head NaN as a softmax over an infinite score is, and of the
largest finite numbers.

On every backend, forward and backward, also for rows that see no key, in tiles of their own and beside rows that do.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from targets import TARGETS, Target

from diyfa.reference import reference_attention
from diyfa.testing import AttentionCase, Results, attention_function, make_inputs, run_case

INF = float("inf")


def case(name: str, **changes: object) -> AttentionCase:
    """The first 140 of 170 rows see nothing under a causal mask: more than a tile of 128."""
    sizes = {"heads": 4, "heads_kv": 2, "head_dim": 16, "dtype": "float32", "sinks": True}
    rows = {} if "lens_q" in changes else {"seqlen_q": 170, "seqlen_k": 30}
    return AttentionCase(name, **{**sizes, **rows, **changes})


CASES = {
    case.name: case
    for case in (
        case("full"),
        case("causal", causal=True),
        case("window_softcap", window=(5, 2), softcap=10.0),
        case("lengths", causal=True, seq_lens=(28,)),
        case("row_bias", causal=True, bias="1hq1"),
        # All gradients of q are 0 or NaN.
        case("row_bias_mask", bias="1hq1", mask="11:128:0.3", sm_scale=0.0),
        case("packed", causal=True, layout="thd", lens_q=(117, 0, 28), lens_k=(20, 0, 0), slack=3),
        case("no_keys", seqlen_k=0),
    )
}
VARIANTS = {"cpu": ("v2", "v1"), "npu": ("auto", "v2")}


def call(target: Target, variant: str, sinks: torch.Tensor | None, name: str) -> dict[str, torch.Tensor]:
    """Results of one call, on the CPU."""
    inputs = make_inputs(CASES[name], target.device)
    if sinks is None:
        del inputs.options["sinks"]
    else:
        inputs.options["sinks"] = sinks.to(target.device).requires_grad_()
    if target.backend == "reference":
        options = {x: y for x, y in inputs.options.items() if not x.startswith("max_seqlen")}
        with torch.no_grad():
            out, lse = reference_attention(*inputs.leaves, layout=CASES[name].layout, return_lse=True, **options)
        return {"out": out, "lse": lse}
    results = run_case(attention_function(CASES[name], backend=target.backend, variant=variant), inputs)
    return {field: x for field, x in zip(Results._fields, results, strict=True) if x is not None}


CPU, REFERENCE = Target("cpu", "cpu", False), Target("reference", "cpu", False)
COMBINATIONS = [
    (backend, variant, name) for backend in TARGETS for variant in VARIANTS.get(backend, ("auto",)) for name in CASES
]


def served(target: Target, name: str) -> AbstractContextManager[object]:
    """Without a key the sinks are all there is, and PyTorch's operators do the rest: the host shim has none."""
    if target.computes or name != "no_keys":
        return nullcontext()
    from npu_interpreter import WITHOUT_KEYS, on_the_host

    return on_the_host(*WITHOUT_KEYS)


@pytest.mark.parametrize(("backend", "variant", "name"), COMBINATIONS)
def test_a_sink_of_minus_infinity_is_none(backend: str, variant: str, name: str) -> None:
    """To the bit, with gradient 0."""
    target = TARGETS[backend]
    with served(target, name):
        got = call(target, variant, torch.full((4,), -INF), name)
        want = call(target, variant, None, name)
    assert int(got.pop("dsinks").count_nonzero()) == 0
    assert got.keys() == want.keys()
    for field, x in got.items():
        assert torch.equal(x, want[field]), field


# float32 does not hold the large ones in units of log2. They leave nothing to other keys, or are as good as none.
LARGEST = torch.finfo(torch.float32).max
SINKS = {"infinite": (0.5, -INF, INF, 1.0), "large": (3e38, LARGEST, 1e20, 1.0)}


@pytest.mark.parametrize("size", SINKS)
@pytest.mark.parametrize(("backend", "variant", "name"), COMBINATIONS)
def test_sinks_beyond_any_score(backend: str, variant: str, name: str, size: str) -> None:
    """Each in one head; out and lse as the reference has them, gradients as the CPU backend."""
    target, sinks = TARGETS[backend], torch.tensor(SINKS[size])
    if (size, name) == ("large", "full"):
        sinks[3] = -LARGEST
    with served(target, name):
        got = call(target, variant, sinks, name)
    want = call(CPU, "auto", sinks, name) | call(REFERENCE, "", sinks, name)
    assert got.keys() == want.keys()
    if size == "infinite":
        assert bool(want["out"].isnan().any()) and bool(want["dsinks"].isnan()[2])
    else:
        assert not any(bool(x.isnan().any()) for x in want.values())
    for field, x in got.items():
        torch.testing.assert_close(
            x, want[field], rtol=1e-4, atol=1e-4, equal_nan=True, msg=lambda m, f=field: f"{f}: {m}"
        )
