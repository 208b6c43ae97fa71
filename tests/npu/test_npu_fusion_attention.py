"""`npu_fusion_attention` by diyfa, against what torch_npu's documentation says the operator computes, in float64.

The truth here is written from that documentation alone: a matrix of hidden pairs for each sparse mode, the formula on
whole matrices, autograd. It shares nothing with the mapping.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import diyfa
from diyfa.dropout import dropout_mask
from diyfa.integrations.npu_fusion_arguments import compressed_mask, fusion_attention_arguments
from diyfa.integrations.npu_fusion_attention import npu_fusion_attention, npu_fusion_attention_v2

INT_MAX = 2147483647
COMPRESSED = compressed_mask(torch.device("cpu"))


# ---- the truth ---------------------------------------------------------------------------------------------------


def hidden(mode: int, pre: int, after: int, sq: int, sk: int) -> torch.Tensor:
    """(sq, sk) bool, True where sparse mode `mode` hides key j from query i; mode 1 by itself hides nothing."""
    matrix = torch.zeros(sq, sk, dtype=torch.bool)
    for i in range(sq):
        for j in range(sk):
            at = i + (sk - sq if mode in (3, 4) else 0)  # the key on the diagonal from the mode's corner
            sees = {0: at - pre <= j <= at + after, 1: True, 2: j <= at, 3: j <= at, 4: at - pre <= j <= at + after}[
                mode
            ]
            matrix[i, j] = not sees
    return matrix


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hide: torch.Tensor,
    scale: float,
    pse: Any = 0.0,
    pse_type: int = 1,
    sink: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    keep_prob: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, Sq, D), (Nkv, Skv, D) … -> out and the log-sum-exp of the formula, in the inputs' dtype."""
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    products = q @ k.transpose(1, 2)
    scores = (products + pse) * scale if pse_type == 1 else products * scale + pse
    scores = scores.masked_fill(hide, float("-inf"))
    if sink is not None:  # one more column, dropped after the softmax
        scores = torch.cat((scores, sink[:, None, None].expand(-1, q.shape[1], 1)), 2)
    lse = scores.logsumexp(2)
    weights = torch.nan_to_num(torch.exp(scores - lse[..., None]))[..., : k.shape[1]]
    if keep is not None:
        weights = weights * keep / keep_prob
    return weights @ v, lse


# ---- cases -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    name: str
    layout: str = "BNSD"
    mode: int = 0
    pre: int = INT_MAX
    after: int = INT_MAX
    mask: str = "compressed"  # "", "compressed", or the mask's shape: "ss", "11ss", "b1ss", "bnss"
    lens: tuple[tuple[int, int], ...] = ((9, 9), (9, 9))  # (Sq, Skv) of each sample
    heads: int = 4
    heads_kv: int = 4
    head_dim: int = 8
    head_dim_v: int = 8
    pse: str = ""  # "bnss", "bn1s", "1nss", "n" or "bn" (slopes)
    pse_type: int = 1
    sink: bool = False
    keep_prob: float = 1.0
    unused: int = 0  # packed rows after the last sequence
    extra: dict[str, Any] = field(default_factory=dict, hash=False)


def sized(*lens: tuple[int, int]) -> dict[str, Any]:
    return {"lens": lens}


SHORT, LONG = sized((5, 12), (5, 12)), sized((12, 5), (12, 5))
PACKED = {"layout": "TND", "lens": ((7, 7), (3, 3), (12, 12))}
UNEVEN = {"layout": "TND", "lens": ((5, 9), (0, 4), (8, 3), (6, 6))}
CASES = [
    *(Case(f"layout-{x}", x, mode=3) for x in ("BSH", "SBH", "BSND", "BNSD")),
    *(Case(f"gqa-{x}", x, mode=2, heads_kv=2, head_dim_v=6, **SHORT) for x in ("BSH", "SBH", "BSND", "BNSD")),
    Case("no-mask-is-full-attention", mode=3, mask="", **SHORT),
    Case("no-mask-ignores-the-tokens", pre=2, after=0, mask=""),
    *(Case(f"mode-0-mask-{m}", mask=m) for m in ("ss", "11ss", "b1ss", "bnss")),
    Case("mode-0-causal", mask="ss", pre=INT_MAX, after=0, **SHORT),
    Case("mode-0-band", mask="ss", pre=3, after=2, **SHORT),
    Case("mode-0-band-more-queries", mask="ss", pre=3, after=2, **LONG),
    Case("mode-0-negative-next", mask="ss", pre=9, after=-3, **LONG),
    Case("mode-0-negative-pre", mask="ss", pre=-3, after=7, **SHORT),
    Case("mode-1", mode=1, mask="bnss", pre=0, after=0),
    Case("mode-1-uint8", mode=1, mask="b1ss", extra={"uint8": True}),
    *(Case(f"mode-{m}-{n}", mode=m, **sizes) for m in (2, 3) for n, sizes in (("short", SHORT), ("long", LONG))),
    *(Case(f"mode-4-{n}", mode=4, pre=4, after=1, **sizes) for n, sizes in (("short", SHORT), ("long", LONG))),
    Case("mode-4-negative-next", mode=4, pre=8, after=-2),
    Case("mode-4-negative-pre", mode=4, pre=-2, after=6),
    Case("mode-4-unbounded-left", mode=4, after=3, **SHORT),
    Case("mode-4-unbounded-right", mode=4, pre=3, **LONG),
    *(Case(f"pse-{s}-type-{t}", mode=3, pse=s, pse_type=t) for s in ("bnss", "bn1s", "1nss") for t in (0, 1)),
    Case("pse-and-mask", mask="b1ss", pse="bnss", heads_kv=2),
    Case("pse-and-cut", mode=2, pse="bnss", **SHORT),
    *(Case(f"alibi-{s}", mode=3, pse=s, pse_type=2, layout="BSND") for s in ("n", "bn")),
    Case("sink", mode=3, sink=True),
    Case("sink-rows-without-keys", mode=4, pre=-2, after=6, sink=True),
    Case("dropout", mode=3, keep_prob=0.7, layout="BSH"),
    Case("packed", mask="", **UNEVEN),
    Case("packed-mode-3", mode=3, heads_kv=2, unused=3, **UNEVEN),
    Case("packed-mode-4", mode=4, pre=3, after=2, **UNEVEN),
    Case("packed-mode-2-equal", mode=2, unused=2, **PACKED),
    Case("packed-mode-2-uneven", mode=2, unused=2, sink=True, **UNEVEN),
    Case("packed-mode-0", mask="ss", **UNEVEN),
    Case("packed-mode-1", mode=1, mask="11ss", heads_kv=2, **UNEVEN),
    *(Case(f"packed-alibi-{s}", mode=2, pse=s, pse_type=2, **PACKED) for s in ("n", "bn")),
    Case("packed-dropout", mode=3, keep_prob=0.6, sink=True, **UNEVEN),
]


class Call:
    """A case's tensors by sample, as the operator gets them, and the truth."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        torch.manual_seed(CASES.index(case))
        self.case, self.dtype = case, dtype
        n, d, dv = case.heads, case.head_dim, case.head_dim_v

        def leaf(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()

        self.q = [leaf(n, sq, d) for sq, _ in case.lens]
        self.k = [leaf(case.heads_kv, sk, d) for _, sk in case.lens]
        self.v = [leaf(case.heads_kv, sk, dv) for _, sk in case.lens]
        self.dout = [torch.randn(n, sq, dv, dtype=torch.float64).to(dtype) for sq, _ in case.lens]
        self.sink = leaf(n, dtype=torch.float32) if case.sink else None
        self.longest = max(sq for sq, _ in case.lens), max(sk for _, sk in case.lens)
        self.mask, self.masks = self.make_mask()
        self.pse = self.make_pse(leaf)
        self.scale = 0.4
        self.options = {"scale": self.scale, "sparse_mode": case.mode, "atten_mask": self.mask, "sink": self.sink}
        self.options |= {"pse": self.pse, "keep_prob": case.keep_prob}
        if case.keep_prob < 1:
            self.options |= {"seed": 1234, "offset": 5}

    def make_mask(self) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """The mask as given, and what it hides of each sample."""
        case, (sq, sk) = self.case, self.longest
        nothing = [torch.zeros(case.heads, *sizes, dtype=torch.bool) for sizes in case.lens]
        if case.mask == "":
            return None, nothing
        bands = [hidden(case.mode, case.pre, case.after, *sizes).expand(case.heads, *sizes) for sizes in case.lens]
        if case.mask == "compressed":
            return COMPRESSED, bands
        shape = {"ss": (sq, sk), "11ss": (1, 1, sq, sk), "b1ss": (len(case.lens), 1, sq, sk)}
        mask = torch.rand(shape.get(case.mask, (len(case.lens), case.heads, sq, sk))) < 0.3
        mask[..., min(2, sq - 1), :] = True  # a row that sees nothing
        full = mask.expand(len(case.lens), case.heads, sq, sk)
        masks = [full[b, :, :s, :t] | bands[b] for b, (s, t) in enumerate(case.lens)]
        return (mask.to(torch.uint8) if case.extra.get("uint8") else mask), masks

    def make_pse(self, leaf: Any) -> torch.Tensor | None:
        case, (sq, sk) = self.case, self.longest
        batch, n = len(case.lens), case.heads
        if case.pse in ("n", "bn"):
            return torch.rand((n,) if case.pse == "n" else (batch, n))
        shapes = {"bnss": (batch, n, sq, sk), "bn1s": (batch, n, 1, sk), "1nss": (1, n, sq, sk)}
        return leaf(*shapes[case.pse]) if case.pse else None

    def truth(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Results and gradients of every sample with the formula in `dtype`."""
        case = self.case
        given = {"pse": self.pse, "sink": self.sink}
        leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in given.items() if x is not None}
        outs, lses = [], []
        parts = {name: [x.detach().to(dtype).requires_grad_() for x in xs] for name, xs in
                 (("q", self.q), ("k", self.k), ("v", self.v))}  # fmt: skip
        for b, (sq, sk) in enumerate(case.lens):
            pse: Any = leaves.get("pse", torch.zeros(()))
            if case.pse in ("n", "bn"):
                slopes = pse.expand(len(case.lens), case.heads)[b].detach()
                distance = (torch.arange(sq)[:, None] - torch.arange(sk)).abs()
                pse = -slopes[:, None, None] * distance
            elif case.pse:
                pse = pse.expand(len(case.lens), *pse.shape[1:])[b]
            keep = None
            if case.keep_prob < 1:
                keep = dropout_mask(len(case.lens), case.heads, sq, sk, 1 - case.keep_prob, 1234, 5)[b]
            out, lse = attention(
                parts["q"][b], parts["k"][b], parts["v"][b], self.masks[b], self.scale, pse.to(dtype), case.pse_type,
                leaves.get("sink"), keep, case.keep_prob,
            )  # fmt: skip
            outs.append(out)
            lses.append(lse)
        torch.autograd.backward(outs, [x.to(dtype) for x in self.dout])
        results = {"lse": torch.cat([x.detach().flatten() for x in lses])}
        results["out"] = torch.cat([x.detach().flatten() for x in outs])
        for name, xs in parts.items():
            results[f"d{name}"] = torch.cat([x.grad.flatten() for x in xs])
        if case.pse_type < 2 and case.pse:
            results["dpse"] = leaves["pse"].grad
        if case.sink:
            results["dsink"] = leaves["sink"].grad
        return {name: x.double() for name, x in results.items()}

    def arrange(self, samples: list[torch.Tensor]) -> torch.Tensor:
        """(N, S, D) of each sample in the case's layout."""
        if self.case.layout == "TND":
            rows = torch.cat([x.transpose(0, 1) for x in samples])
            return torch.cat((rows, torch.full((self.case.unused, *rows.shape[1:]), float("nan"), dtype=rows.dtype)))
        bnsd = torch.stack(samples)
        order = {"BSH": "bsnd", "SBH": "sbnd", "BSND": "bsnd", "BNSD": "bnsd"}[self.case.layout]
        moved = torch.einsum(f"bnsd->{order}", bnsd)
        return moved.flatten(2) if self.case.layout in ("BSH", "SBH") else moved

    def samples(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The inverse, for an output."""
        case = self.case
        if case.layout == "TND":
            pieces = x.split([*(sq for sq, _ in case.lens), case.unused])
            assert not pieces[-1].isnan().any() and not (pieces[-1] != 0).any()
            return [p.transpose(0, 1) for p in pieces[:-1]]
        if case.layout in ("BSH", "SBH"):
            x = x.unflatten(2, (case.heads, -1))
        order = {"BSH": "bsnd", "SBH": "sbnd", "BSND": "bsnd", "BNSD": "bnsd"}[case.layout]
        return list(torch.einsum(f"{order}->bnsd", x))

    def run(self, function: Any, **how: Any) -> dict[str, torch.Tensor]:
        """The same results by diyfa."""
        case = self.case
        q, k, v = (self.arrange(xs) for xs in (self.q, self.k, self.v))
        options = dict(self.options)
        if case.layout == "TND":
            options |= {name: torch.tensor([pair[i] for pair in case.lens]).cumsum(0).tolist()
                        for i, name in enumerate(("actual_seq_qlen", "actual_seq_kvlen"))}  # fmt: skip
        result = function(q, k, v, case.heads, case.layout, **options, **how)
        outs = self.samples(result.attention_out)
        torch.autograd.backward(outs, self.dout)
        assert result.attention_out.dtype == self.dtype and result.softmax_out.numel() == 0
        weights = case.heads * sum(sq * sk for sq, sk in case.lens) if case.keep_prob < 1 else 0
        assert result[4:] == ((1234, 5, weights) if case.keep_prob < 1 else (0, 0, 0))
        for x in result[1:3]:  # eight equal copies
            assert x.shape[-1] == 8 and bool((x == x[..., :1]).all()) and not x.requires_grad
        lse = (result.softmax_max + result.softmax_sum.log())[..., 0]
        if case.layout == "TND":
            lses = [x.transpose(0, 1) for x in lse.split([*(sq for sq, _ in case.lens), case.unused])[:-1]]
        else:
            lses = list(lse)
        named = {"out": outs, "lse": lses, "dq": [x.grad for x in self.q], "dk": [x.grad for x in self.k]}
        named["dv"] = [x.grad for x in self.v]
        results = {name: torch.cat([x.flatten() for x in xs]) for name, xs in named.items()}
        if self.sink is not None:
            results["dsink"] = self.sink.grad
        if case.pse and case.pse_type < 2:
            results["dpse"] = self.pse.grad
        return {name: x.detach().double() for name, x in results.items()}


def tokens(case: Case, function: Any) -> dict[str, Any]:
    second = "c" if function is npu_fusion_attention else ""
    how: dict[str, Any] = {f"pre_to{second}kens": case.pre, f"next_to{second}kens": case.after}
    return how if function is npu_fusion_attention else {**how, "pse_type": case.pse_type}


def functions(case: Case) -> list[Any]:
    return [npu_fusion_attention_v2, *([npu_fusion_attention] if case.pse_type == 1 else [])]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_mapping_in_float64(case: Case) -> None:
    """To rounding of float64 (the sink is float32 in both), forward and every gradient."""
    for function in functions(case):
        call = Call(case, torch.float64)
        expected, actual = call.truth(torch.float64), call.run(function, backend="cpu", **tokens(case, function))
        assert actual.keys() == expected.keys()
        for name, x in actual.items():
            tolerance = 1e-6 if name == "dsink" else 1e-11
            torch.testing.assert_close(
                x, expected[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_low_precision_is_within_twice_the_error_of_the_formula() -> None:
    case = next(c for c in CASES if c.name == "pse-and-mask")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        call = Call(case, dtype)
        expected, plain = call.truth(torch.float64), call.truth(dtype)
        actual = call.run(npu_fusion_attention, backend="cpu", **tokens(case, npu_fusion_attention))
        for name, x in actual.items():
            finite = expected[name].isfinite()
            assert torch.equal(x[~finite], expected[name][~finite]), name
            budget = 2 * (plain[name] - expected[name])[finite].abs().max()
            assert (x - expected[name])[finite].abs().max() <= budget + 1e-6, (name, dtype)


def test_dropout_draws_a_seed_that_repeats_the_mask() -> None:
    q = torch.randn(1, 2, 16, 8)
    torch.manual_seed(3)
    first = npu_fusion_attention(q, q, q, 2, "BNSD", keep_prob=0.5, backend="cpu")
    torch.manual_seed(3)
    same = npu_fusion_attention(q, q, q, 2, "BNSD", keep_prob=0.5, backend="cpu")
    other = npu_fusion_attention(q, q, q, 2, "BNSD", keep_prob=0.5, backend="cpu")
    again = npu_fusion_attention(q, q, q, 2, "BNSD", keep_prob=0.5, seed=other.seed, offset=other.offset, backend="cpu")
    assert torch.equal(first.attention_out, same.attention_out) and first[4:] == same[4:]
    assert not torch.equal(first.attention_out, other.attention_out) and first.numels == 2 * 16 * 16
    assert torch.equal(other.attention_out, again.attention_out)


def test_samples_at_the_end_may_take_no_part() -> None:
    """actual_seq_qlen = [2, 5, 9, 0, 0]: only the first three, as the documentation has it."""
    q = torch.randn(12, 2, 8)
    whole = {"actual_seq_qlen": [2, 5, 9], "actual_seq_kvlen": [4, 4, 10]}
    padded = {"actual_seq_qlen": [2, 5, 9, 0, 0], "actual_seq_kvlen": [4, 4, 10, 0, 0]}
    a, b = (npu_fusion_attention(q, q, q, 2, "TND", backend="cpu", **ends) for ends in (whole, padded))
    assert torch.equal(a.attention_out, b.attention_out) and not a.attention_out[9:].any()
    assert torch.equal(a.attention_out[2:5], torch.zeros(3, 2, 8))  # a sequence without keys


def test_rope_features_join_the_scores() -> None:
    q, k, v = (torch.randn(10, 2, 16, dtype=torch.float64) for _ in range(3))
    q_rope, k_rope = (torch.randn(10, 2, 8, dtype=torch.float64) for _ in range(2))
    ends = {"actual_seq_qlen": [4, 10], "actual_seq_kvlen": [4, 10]}
    causal = {"atten_mask": COMPRESSED, "sparse_mode": 3}
    out = npu_fusion_attention_v2(
        q, k, v, 2, "TND", query_rope=q_rope, key_rope=k_rope, scale=0.3, backend="cpu", **ends, **causal
    ).attention_out
    for a, z in ((0, 4), (4, 10)):
        scores = torch.einsum("ind,jnd->nij", q[a:z], k[a:z]) + torch.einsum("ind,jnd->nij", q_rope[a:z], k_rope[a:z])
        scores = (0.3 * scores).masked_fill(hidden(3, 0, 0, z - a, z - a), float("-inf"))
        torch.testing.assert_close(out[a:z], torch.einsum("nij,jnd->ind", scores.softmax(-1), v[a:z]))


REFUSALS = {
    "sparse_mode=5 is not supported: a prefix": {"sparse_mode": 5},
    "sparse_mode=6 is not supported": {"sparse_mode": 6, "prefix": [1]},
    "sparse_mode=7 is not supported: its first or last": {"sparse_mode": 7},
    "sparse_mode=8 is not supported": {"sparse_mode": 8},
    "sparse_mode must be 0 to 4": {"sparse_mode": 9},
    "prefix belongs to": {"prefix": [3]},
    "padding_mask is not supported": {"padding_mask": torch.zeros(1)},
    "dropout_mask is not supported by diyfa: its mask": {"dropout_mask": torch.zeros(1)},
    "q_start_idx is not supported": {"q_start_idx": [0]},
    "pse_type=3 is not supported": {"pse_type": 3, "pse": torch.zeros(4)},
    "pse_type must be": {"pse_type": 4},
    "keep_prob must be in": {"keep_prob": 0.0},
    "inner_precise must be": {"inner_precise": 3},
    "softmax_layout must be": {"softmax_layout": "TND"},
    r"takes the compressed atten_mask of shape \(2048, 2048\)": {
        "sparse_mode": 3, "atten_mask": torch.zeros(8, 8, dtype=torch.bool)
    },
    "atten_mask must have shape": {"atten_mask": torch.zeros(8, 9, dtype=torch.bool)},
    "leave no key to any query": {"sparse_mode": 4, "atten_mask": COMPRESSED, "pre_tokens": -3, "next_tokens": 2},
    "belong to the layout TND": {"actual_seq_qlen": [8]},
    "query_rope and key_rope are given together": {"query_rope": torch.zeros(1, 4, 8, 8)},
    "pse must have shape": {"pse": torch.zeros(4, 8, 8)},
    "pse_type=2 needs": {"pse": torch.ones(4), "pse_type": 2, "sparse_mode": 4, "atten_mask": COMPRESSED,
                         "pre_tokens": 8, "next_tokens": -1},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSALS)
def test_what_cannot_be_expressed_is_refused(message: str) -> None:
    q = torch.randn(1, 4, 8, 8)
    with pytest.raises(ValueError, match=message):
        npu_fusion_attention_v2(q, q, q, 4, "BNSD", backend="cpu", **REFUSALS[message])


DENSE, TOKENS, LONG_ROWS = (1, 4, 8, 8), (8, 4, 8), (1, 1, 1025, 8)
ENDS: dict[str, Any] = {"actual_seq_qlen": [8], "actual_seq_kvlen": [8]}
ON_CPU = {"backend": "cpu"}


@pytest.mark.parametrize(("shape", "heads", "layout", "options", "message"), [
    (DENSE, 4, "BNSD", {}, "CPU tensors: move them"),
    (DENSE, 4, "BNDS", ON_CPU, "input_layout must be one of"),
    (DENSE, 8, "BNSD", ON_CPU, "has 4 heads in the layout BNSD, but head_num is 8"),
    (DENSE, 4, "BSH", ON_CPU, "query must have 3 dimensions"),
    ((4, 8, 8), 3, "BSH", ON_CPU, "must be head_num=3 heads"),
    (DENSE, 4, "BNSD", ON_CPU | {"atten_mask": torch.zeros(8, 8)}, "atten_mask must be bool or uint8"),
    (TOKENS, 4, "TND", ON_CPU, "needs actual_seq_qlen"),
    (TOKENS, 4, "TND", ON_CPU | {name: torch.tensor(x) for name, x in ENDS.items()}, "list of host integers"),
    (TOKENS, 4, "TND", ON_CPU | ENDS | {"actual_seq_qlen": [9]}, "running sums that end at 8 or before"),
    (TOKENS, 4, "TND", ON_CPU | ENDS | {"pse": torch.zeros(1, 4, 8, 8)}, "pse is not supported for TND"),
    (TOKENS, 4, "TND", ON_CPU | ENDS | {"atten_mask": torch.zeros(8, 8, dtype=torch.bool), "keep_prob": 0.5},
        "dropout is not supported for TND"),
    (LONG_ROWS, 1, "BNSD", ON_CPU | {"pse": torch.zeros(1, 1, 1024, 1025)}, "compressed ALiBi"),
])  # fmt: skip
def test_more_refusals(shape: tuple[int, ...], heads: int, layout: str, options: dict[str, Any], message: str) -> None:
    q = torch.randn(shape)
    with pytest.raises((ValueError, TypeError), match=message):
        npu_fusion_attention(q, q, q, heads, layout, **options)


# ---- the other direction -----------------------------------------------------------------------------------------

OURS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (3, 2)},
    "window-left": {"window": (3, -1)},
    "window-causal": {"window": (3, -1), "causal": True},
    "scale": {"sm_scale": 0.7},
    "bias": {"attn_bias": torch.randn(9, 11, dtype=torch.float64)},
    "sinks": {"sinks": torch.randn(4), "causal": True},
}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_our_call_as_theirs(name: str, layout: str) -> None:
    """Ours -> the operator's arguments -> the documented formula gives what our call gives."""
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 11, 8), torch.randn(2, 2, 11, 8)
    q, k, v = (x.double() for x in (q, k, v))
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    call = diyfa.flash_attention if layout == "bhsd" else diyfa.flash_attention_v2
    ours = call(q, k, v, backend="cpu", **OURS[name])
    theirs = npu_fusion_attention(**fusion_attention_arguments(q, k, v, layout=layout, **OURS[name]), backend="cpu")
    torch.testing.assert_close(theirs.attention_out, ours)


def test_our_packed_call_as_theirs() -> None:
    q = torch.randn(12, 2, 8)
    offsets = [0, 5, 12]
    cu = torch.tensor(offsets, dtype=torch.int32)
    ours = diyfa.flash_attention_varlen(q, q, q, cu, cu, 7, 7, causal=True, backend="cpu")
    arguments = fusion_attention_arguments(q, q, q, True, layout="thd", cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    assert torch.equal(npu_fusion_attention(**arguments, backend="cpu").attention_out, ours)


@pytest.mark.parametrize(("changes", "message"), [
    ({"softcap": 2.0}, "no softcap"),
    ({"seq_lens": torch.tensor([3])}, "no seq_lens: pack"),
    ({"alibi_slopes": torch.ones(2)}, "npu_fusion_attention_v2 does"),
    ({"layout": "thd"}, "as lists of host integers"),
    ({"layout": "sbhd"}, "layout must be one of"),
    ({"attn_bias": torch.zeros(5, 5), "sm_scale": 0.0}, "scales its bias"),
])  # fmt: skip
def test_what_theirs_cannot_express(changes: dict[str, Any], message: str) -> None:
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match=message):
        fusion_attention_arguments(q, q, q, **changes)
