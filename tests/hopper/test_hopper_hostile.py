"""Scores that are hard on a softmax without a running maximum: the Hopper kernel is as right on them as one with it.

In the Gluon interpreter, or on a GPU of that kind. What it is measured by is a FlashAttention with a running maximum in
the same dtype: float32 scores, statistics and sums, weights rounded to the inputs' dtype, the result rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hopper_interpreted import DEVICE, interpret, runs_the_kernel, take_all
from nonfinite import same_nonfinite
from simulators.gluon import tma

import diyfa
from diyfa.backends.cuda.hopper.configs import Sm90Config
from diyfa.backends.cuda.runtime.launch import is_interpreting
from diyfa.reference import visible_keys
from diyfa.yardstick import plain_flash_attention

pytestmark = runs_the_kernel


NAN, INF = float("nan"), float("inf")
NORM_FACTOR = 1.4  # of the error's norm, against the running maximum's
# head_dim -> config; None: the table's own.
CONFIGS = {64: Sm90Config(2, 128, 4, True, 240, 24, fixed_max=True), 128: None}
Change = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class Hostile:
    """A call of one head. `change` is made in q, k and v, standard normal [S, D], before they are rounded. `nats`: the
    standard deviation of the scores, which says sm_scale."""

    change: Change = lambda q, k, v: None
    nats: float = 0.0
    sm_scale: float = 1.0
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    seqlen: int = 300
    dtype: torch.dtype = torch.bfloat16

    @property
    def mask(self) -> dict[str, Any]:
        return {"causal": self.causal, "window": self.window}

    def inputs(self, head_dim: int) -> tuple[tuple[torch.Tensor, ...], float]:
        """(q, k, v) and sm_scale."""
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(self.seqlen, head_dim, generator=generator) for _ in "qkv"]
        self.change(*tensors)
        scale = self.nats * head_dim**-0.5 if self.nats else self.sm_scale
        return tuple(x.to(self.dtype)[None, None] for x in tensors), scale


def scores_by_key(of_key: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Scores that every query has alike: those of a key at its place."""

    def change(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        q.zero_()
        k.zero_()
        q[:, 0] = 1
        k[:, 0] = of_key(torch.arange(len(k)).float())

    return change


def added_to_first_key(nats: float) -> Change:
    """The first key's scores are `nats` higher than those of the others."""

    def change(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        q[:, 0] = 1
        k[:, 0] = 0
        k[0, 0] = nats * q.shape[1] ** 0.5

    return change


def left_edge(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    q.zero_()
    k.zero_()
    q[:, 0] = 1
    k[300, 0], k[140, 0] = 88.0, 88.5


def local_peak(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """A query's own key scores highest, by the square of its length."""
    q.copy_(k)


def far_local_peak(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """The key 150 before a query's own scores highest."""
    q[150:] = k[:-150]


def large_values(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Row sums of 2^50 beside the first scores, and what is summed with them beyond float32's range."""
    scores_by_key(lambda key: torch.where(key < 100, 50 * math.log(2), 0.0))(q, k, v)
    v *= 1e30


def late_large_values(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """The same in the block that comes last in the KV loop."""
    scores_by_key(lambda key: torch.where((key >= 128) & (key < 256), 50 * math.log(2), 0.0))(q, k, v)
    v *= 1e30


def huge_values(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Values that 2^8 times is beyond float32's range, under scores that rise by less than that."""
    scores_by_key(lambda key: torch.where(key == 100, 5.0, 0.0))(q, k, v)
    v *= 5e36


def small_values(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """A sum beyond float32's range, of weights within it and values that keep out within it."""
    scores_by_key(lambda key: torch.where((key >= 128) & (key < 256), 87.5, 0.0))(q, k, v)
    v *= 1e-3


def minus_infinity(first: int, last: int) -> Change:
    """Scores of minus infinity with the keys [first, last)."""

    def change(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        q[:, 5], k[:, 5] = -1, 0
        k[first:last, 5] = INF

    return change


def overflowing(first: int, last: int) -> Change:
    """The same in float32, of finite inputs."""

    def change(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        q[:, 5], k[:, 5] = -1e30, 0
        k[first:last, 5] = 1e30

    return change


def low_scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Minus infinity but for the keys that come last in the KV loop, where exponentials of the scores are 0."""
    minus_infinity(0, 512)(q, k, v)
    k[128:256, 5] = 0
    q[:, 0], k[128:256, 0] = 1, -200 * 8


def with_nan(change: Change, name: str, key: int, value: float = NAN) -> Change:
    def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        change(q, k, v)
        {"q": q, "k": k, "v": v}[name][key, 5] = value

    return both


def rising(nats: float) -> Change:
    """Along the KV loop, which begins at the last key: from 0 there to `nats` at the first."""
    return scores_by_key(lambda key: nats * (1 - key / key.max()))


CAUSAL: dict[str, Any] = {"causal": True}
FINITE = {
    # alpha = exp2(old - new maximum) is flushed to zero where the old sum is as large as the new one.
    "left edge rises by what is flushed": Hostile(left_edge, seqlen=512, window=(300, -1), **CAUSAL),
    **{
        f"rising by {nats} nats, {name}": Hostile(rising(nats), **mask)
        for nats, name, mask in ((60, "causal", CAUSAL), (100, "left edge", {"window": (150, 0)}), (1000, "full", {}))
    },
    "falling by 200 nats": Hostile(scores_by_key(lambda key: 200 * key / key.max()), **CAUSAL),
    "a key of 95 nats": Hostile(scores_by_key(lambda key: torch.where(key == 20, 95.0, 0.0)), **CAUSAL),
    **{
        f"sink of {nats} nats, {name}": Hostile(added_to_first_key(nats), nats=1.0, **mask)
        for nats, name, mask in ((10, "full", {}), (16, "causal", CAUSAL), (30, "full", {}))
    },
    "local peak": Hostile(local_peak, nats=2.0, **CAUSAL),
    "far local peak": Hostile(far_local_peak, nats=2.0, **CAUSAL),
    **{f"one key in the first block, {nats} nats": Hostile(nats=nats, seqlen=257) for nats in (1, 5, 11.3)},
    "one key in the first block, sink": Hostile(added_to_first_key(16), nats=1.0, seqlen=257),
    **{
        f"{nats} nats, {name}": Hostile(nats=nats, **mask)
        for nats, name, mask in ((3, "full", {}), (5, "causal", CAUSAL), (11.3, "causal", CAUSAL), (16, "full", {}))
    },
    "20 nats, left edge": Hostile(nats=20, window=(150, 0)),
    "large values under a large sum": Hostile(large_values, **CAUSAL),
    "large values under a large sum, late": Hostile(late_large_values, seqlen=512),
    "huge values": Hostile(huge_values),
    "small values under an infinite sum": Hostile(small_values, seqlen=512),
}
NONFINITE = {
    **{
        f"minus infinity at the end, {name}": Hostile(minus_infinity(256, 384), sm_scale=0.125, seqlen=384, **how)
        for name, how in (("full", {}), ("causal", CAUSAL), ("causal, float16", CAUSAL | {"dtype": torch.float16}))
    },
    "minus infinity in the first block": Hostile(minus_infinity(0, 128), sm_scale=0.125, seqlen=384),
    "minus infinity but for low scores": Hostile(low_scores, sm_scale=0.125, seqlen=512),
    "minus infinity in all blocks but one": Hostile(minus_infinity(64, 384), sm_scale=0.125, seqlen=384),
    "overflow to minus infinity, causal": Hostile(overflowing(256, 384), sm_scale=0.125, seqlen=384, **CAUSAL),
    "and a NaN in k": Hostile(with_nan(minus_infinity(256, 300), "k", 200), sm_scale=0.125, **CAUSAL),
    "and a NaN in q": Hostile(with_nan(minus_infinity(256, 300), "q", 280), sm_scale=0.125, **CAUSAL),
    "and a hidden NaN in v": Hostile(with_nan(minus_infinity(256, 300), "v", 200), sm_scale=0.125, **CAUSAL),
    "and an infinity in v": Hostile(with_nan(minus_infinity(256, 300), "v", 270, INF), sm_scale=0.125),
    "infinity": Hostile(with_nan(minus_infinity(0, 0), "k", 200, -INF), sm_scale=0.125, **CAUSAL),
    "a NaN under a left edge": Hostile(with_nan(minus_infinity(0, 0), "k", 100), sm_scale=0.125, window=(90, 0)),
}


def scores(q: torch.Tensor, k: torch.Tensor, scale: float, case: Hostile) -> torch.Tensor:
    """[Sq, Sk], -inf where a mask hides."""
    window = (case.window[0], 0 if case.causal else case.window[1])
    visible, _, _ = visible_keys(1, q.shape[-2], k.shape[-2], window)
    return (q @ k.mT * scale).masked_fill(~visible, -INF)[0, 0]


def attend(
    case: Hostile, head_dim: int, monkeypatch: pytest.MonkeyPatch, **of_head: float
) -> tuple[tuple[torch.Tensor, ...], float, torch.Tensor, torch.Tensor]:
    """The inputs, and what the kernel makes of them: out and lse. `of_head`: the head's `sinks` or `alibi_slopes`."""
    (interpret if is_interpreting() else take_all)(monkeypatch, CONFIGS[head_dim])
    tensors, scale = case.inputs(head_dim)
    features = {name: torch.tensor([value], device=DEVICE) for name, value in of_head.items()}
    there = [x.to(DEVICE) for x in tensors]
    out, lse = diyfa.flash_attention(
        *there, **case.mask, sm_scale=scale, return_lse=True, backend="cuda", variant="sm90", **features
    )
    return tensors, scale, out.cpu(), lse.cpu()


def lse_tolerance(q: torch.Tensor, k: torch.Tensor, scale: float, case: Hostile) -> float:
    s = scores(q.double(), k.double(), scale, case)
    return 2.0**-20 * s[s.isfinite() & (s.abs() < 2.0**64)].abs().max().item() + 1e-6


@pytest.mark.parametrize("head_dim", CONFIGS)
@pytest.mark.parametrize("name", FINITE)
def test_as_exact_as_a_running_maximum(name: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = FINITE[name]
    (q, k, v), scale, out, lse = attend(case, head_dim, monkeypatch)
    expected, expected_lse = diyfa.reference_attention(
        q, k, v, **case.mask, sm_scale=scale, return_lse=True, dtype=torch.float64
    )
    yardstick = plain_flash_attention(q, k, v, **case.mask, sm_scale=scale)
    allowed = NORM_FACTOR * (yardstick.double() - expected).norm()
    assert (out.double() - expected).norm() <= allowed < INF
    assert (lse - expected_lse).abs().max() <= lse_tolerance(q, k, scale, case)


@pytest.mark.parametrize("head_dim", CONFIGS)
@pytest.mark.parametrize("name", NONFINITE)
def test_what_is_not_finite_shows_where_it_is_seen(name: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a score of minus infinity weighs nothing. (A row that has no others is left to itself.)"""
    case = NONFINITE[name]
    (q, k, v), scale, out, lse = attend(case, head_dim, monkeypatch)
    expected, expected_lse = diyfa.reference_attention(
        q, k, v, **case.mask, sm_scale=scale, return_lse=True, dtype=torch.float64
    )
    visible, _, _ = visible_keys(1, *(case.seqlen,) * 2, (case.window[0], 0 if case.causal else case.window[1]))
    shows, of_score = ~out.isfinite(), ~expected_lse.isfinite()[..., None]
    is_seen = of_score | (visible.double() @ (~v.isfinite()).double() > 0)
    may_show = of_score | ~v.isfinite().all(-2, keepdim=True)  # what a mask hides may show in its column
    assert not (is_seen & ~shows).any() and not (shows & ~may_show).any()
    assert same_nonfinite(lse, expected_lse)
    finite = expected.isfinite() & out.isfinite()
    yardstick = plain_flash_attention(q, k, v, **case.mask, sm_scale=scale)
    error, allowed = ((x.double() - expected)[finite & x.isfinite()].norm() for x in (out, yardstick))
    assert error <= NORM_FACTOR * allowed
    rows = expected_lse.isfinite()
    if rows.any():
        assert (lse - expected_lse)[rows].abs().max() <= lse_tolerance(q, k, scale, case)


def late_peak(nats: float) -> Change:
    """In the second of four blocks of 128 keys, which comes last in the KV loop."""
    return scores_by_key(lambda key: torch.where(key == 200, nats, 0.0))


SUM_OF_2_100 = late_peak(70.0)


@pytest.mark.parametrize("sink", [-1000.0, 0.0, 75.0, 140.0, 150.0, 155.0])
def test_a_sink_above_a_large_sum(sink: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One over the sum times the keys' share of it may be less than float32 holds; out, of either, is not."""
    (q, k, v), scale, out, _ = attend(Hostile(SUM_OF_2_100, seqlen=512), 64, monkeypatch, sinks=sink)
    expected = diyfa.reference_attention(q, k, v, sm_scale=scale, sinks=torch.tensor([sink]), dtype=torch.float64)
    assert (out.double() - expected).norm() <= 2.0**-8 * expected.norm()


def test_a_slope_that_leaves_far_keys_their_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a fixed maximum, too: slopes that a wrong one makes overflow are put right by the fallback."""
    case = Hostile(nats=1.0, seqlen=512, **CAUSAL)
    (q, k, v), scale, out, _ = attend(case, 64, monkeypatch, alibi_slopes=0.01)
    slopes = torch.tensor([0.01])
    expected = diyfa.reference_attention(q, k, v, **case.mask, sm_scale=scale, alibi_slopes=slopes, dtype=torch.float64)
    assert (out.double() - expected).norm() <= 2.0**-8 * expected.norm()


def test_no_sink_hides_a_nan_in_v(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, out, _ = attend(Hostile(with_nan(SUM_OF_2_100, "v", 10), seqlen=512), 64, monkeypatch, sinks=170.0)
    assert out[..., 5].isnan().all()


def one_tile(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Only the second tile of four has the peak: where programs take two tiles, the first one of a program."""
    late_peak(200.0)(q, k, v)
    q[:128], q[256:] = 0, 0


def beside_the_last_key(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """The last key has a block of its own."""
    scores_by_key(lambda key: torch.where(key == 400, 200.0, 0.0))(q, k, v)


FALLBACKS: dict[str, tuple[Hostile, dict[str, float], int]] = {  # and how many tiles the fallback computes again
    "normal": (Hostile(nats=1.0, seqlen=512), {}, 0),
    "12 nats": (Hostile(nats=12.0, seqlen=512), {}, 0),
    "a sink among the keys": (Hostile(added_to_first_key(200), nats=1.0, seqlen=512), {}, 0),
    "a sink far above": (Hostile(nats=1.0, seqlen=512), {"sinks": 1000.0}, 0),
    "a slope whose scores rise by 512 nats": (Hostile(nats=1.0, seqlen=512), {"alibi_slopes": 2.0}, 0),
    "a peak in the block beside the last key": (Hostile(beside_the_last_key, seqlen=513), {}, 0),
    "one tile overflows": (Hostile(one_tile, seqlen=512), {}, 1),
    "all overflow": (Hostile(late_peak(200.0), seqlen=512), {}, 4),
}


@pytest.mark.skipif(not is_interpreting(), reason="counts what the interpreter copies")
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("name", FALLBACKS)
def test_only_what_overflows_is_loaded_twice(name: str, persistent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIGS, 64, replace(CONFIGS[64], persistent=persistent))
    copies = []
    begin = tma.Landing.__init__

    def counted(landing: tma.Landing, *args: Any) -> None:
        copies.append(landing)
        begin(landing, *args)

    monkeypatch.setattr(tma.Landing, "__init__", counted)
    case, of_head, again = FALLBACKS[name]
    (q, k, v), scale, out, _ = attend(case, 64, monkeypatch, **of_head)
    n_tiles, n_blocks = (math.ceil(case.seqlen / 128),) * 2
    of_a_tile = 2 + 2 * n_blocks  # its queries, 64 at once, and blocks of K and V
    assert len(copies) == (n_tiles + again) * of_a_tile
    features = {name: torch.tensor([value]) for name, value in of_head.items()}
    expected = diyfa.reference_attention(q, k, v, sm_scale=scale, **features, dtype=torch.float64)
    assert (out.double() - expected).norm() <= 2.0**-7 * expected.norm()
