"""Random attention cases, for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from diyfa.features import COMPOSABLE
from diyfa.testing import AttentionCase

# Features that a case has or has not, and what a backend that lacks them says.
FLAGS = {name: x.refusal_name for x in COMPOSABLE for name, value in x.case.items() if value is True}


def lengths(draw: st.DrawFn, largest: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Query and key lengths of up to four packed sequences, empty ones among them."""
    length = st.sampled_from([0, 1]) | st.integers(0, largest // 2)
    pairs = draw(st.lists(st.tuples(length, length), min_size=1, max_size=4))
    lens_q, lens_k = zip(*pairs, strict=True)
    return lens_q, lens_q if draw(st.booleans()) else lens_k


@st.composite
def cases(draw: st.DrawFn, largest: int, without: set[str]) -> AttentionCase:
    """Any case of at most `largest` queries and keys that uses no feature in `without`."""

    def feature(name: str, off, values: st.SearchStrategy):
        return off if name in without else draw(values)

    layout = draw(st.sampled_from(["bhsd", "bshd", "3d", *(["thd"] if "varlen" not in without else [])]))
    varlen = layout == "thd"
    batch, seqlen_q, seqlen_k = draw(st.integers(1, 3)), draw(st.integers(1, largest)), draw(st.integers(1, largest))
    lens_q, lens_k = lengths(draw, largest) if varlen else (None, None)
    heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([1, 8, 16, 24, 32, 48, 64]))
    head_dim_v = draw(st.sampled_from([head_dim, 16, 40]))
    packing = draw(st.sampled_from(["", "", "kv", "qkv"])) if layout in ("bshd", "thd") else ""
    if packing:
        head_dim_v = head_dim
    if packing == "qkv":
        group, seqlen_k, lens_k = 1, seqlen_q, lens_q
    seq_lens = None if varlen else feature("seq_lens", None, st.none() | st.tuples(*[st.integers(1, seqlen_k)] * batch))
    if layout == "3d" and seq_lens is None:
        batch = 1
    views = ["contiguous"] if layout == "3d" or packing else ["contiguous", "transposed", "sliced"]
    biases = ["", "", "bhqk", "1hqk", "b1qk", "b11k", "1h11", "qk", "k", "q1"]
    bias = "" if varlen else feature("attn_bias", "", st.sampled_from(biases))
    has_mask = not (varlen or packing) and feature("mask", False, st.booleans())
    outer = st.sampled_from(["11", "b1", "1h", "bh"])
    block, density = st.sampled_from(["64", "128", "64x128"]), st.sampled_from(["0", "0.1", "0.5", "0.9", "1"])
    mask = ":".join(draw(x) for x in (outer, block, density)) if has_mask else ""
    if layout == "3d":
        mask = mask.replace("b", "1", 1)
    bias_dtypes = ["", "", "float16", "bfloat16", "float32", "float64"]
    return AttentionCase(
        name="fuzz",
        batch=batch,
        heads=heads_kv * group,
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=draw(st.sampled_from(["float16", "bfloat16", "float32"])),
        layout=layout,
        view=draw(st.sampled_from(views)),
        packing=packing,
        lens_q=lens_q,
        lens_k=lens_k,
        slack=draw(st.integers(0, 5)) if varlen else 0,
        causal=not has_mask and draw(st.booleans()),
        mask=mask,
        score_fn=not packing and feature("score_fn", False, st.booleans()),
        sm_scale=draw(st.sampled_from([None, None, 0.0]) | st.floats(1e-3, 1.0) | st.floats(-1.0, -1e-3)),
        seq_lens=seq_lens,
        window=feature(
            "window",
            (-1, -1),
            st.just((-1, -1)) if has_mask else st.tuples(st.integers(-1, largest), st.integers(-1, largest)),
        ),
        softcap=feature("softcap", 0.0, st.sampled_from([0.0, 0.0, 1.0, 20.0])),
        alibi=feature("alibi", "", st.sampled_from(["", "", "h", "bh"])),
        bias=bias,
        bias_dtype=draw(st.sampled_from(bias_dtypes)) if bias else "",
        bias_grad=draw(st.booleans()),
        dropout_p=feature("dropout", 0.0, st.sampled_from([0.0, 0.0, 0.1, 0.5])),
        seed=draw(st.integers(0, 2**31)),
        **{name: feature(uses, False, st.booleans()) for name, uses in FLAGS.items()},
    )
