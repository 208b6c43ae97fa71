"""What the first run on an Ascend device checks: every feature of diyfa, and every form of the vendor's operator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from diyfa.features import COMPOSABLE
from diyfa.testing import AttentionCase

DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Sizes:
    """How large the numerics are: (heads, Sq, Sk, D) of the ordinary cases and the lengths of packed sequences."""

    heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    packed: tuple[int, ...]
    head_dims: tuple[int, ...]  # of the cases that vary D


FULL = Sizes(4, 384, 520, 64, (300, 0, 129, 1, 64), (16, 40, 64, 80, 96, 128, 192, 256, 512))
SMOKE = Sizes(2, 17, 20, 16, (9, 0, 5), (24,))

# name -> what differs from the plain case (H heads, Sq queries, Sk keys, D features)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "grouped heads": {"heads_kv": 1, "causal": True},
    "V of another D": {"head_dim_v": 8, "causal": True},
    "layout (B, S, H, D)": {"layout": "bshd", "batch": 2},
    "packed QKV, packed gradient": {"layout": "bshd", "packing": "qkv", "seqlen_k": -1, "causal": True},
    "seq_lens": {"batch": 2, "seq_lens": (13, 3), "causal": True},
    **{feature.label: feature.case for feature in COMPOSABLE},
    "bias of each key": {"bias": "b11k", "bias_grad": False, "causal": True},
    "sinks on rows without keys": {"sinks": True, "causal": True, "seqlen_k": 5},
    "packed sequences": {"layout": "thd", "causal": True},
    "packed sequences, dropout, window, sinks": {
        "layout": "thd", "dropout_p": 0.1, "window": (7, 0), "sinks": True
    },
    "all at once": {
        "heads_kv": 1, "window": (40, 3), "softcap": 5.0, "alibi": "h", "bias": "1hqk", "sinks": True, "dropout_p": 0.1
    },
}  # fmt: skip
# Of the other schedule.
OTHER_FEATURES = {
    "v1": ("plain", "causal", "grouped heads", "seq_lens", "window"),
}


def _case(name: str, changes: dict[str, Any], sizes: Sizes, **more: Any) -> AttentionCase:
    base: dict[str, Any] = {"heads": sizes.heads, "head_dim": sizes.head_dim}
    if changes.get("layout") == "thd":
        base["lens_q"] = sizes.packed
    else:
        base |= {"seqlen_q": sizes.seqlen_q, "seqlen_k": sizes.seqlen_k}
    return AttentionCase(name, **{**base, **changes, **more})


def numerics_cases(sizes: Sizes) -> list[tuple[str, AttentionCase]]:
    """(variant, case): each feature in each dtype, then head dims, then the other variants."""
    rows = [
        ("auto", _case(f"{name}, {dtype}", changes, sizes, dtype=dtype))
        for dtype in DTYPES
        for name, changes in FEATURES.items()
    ]
    plain = _case("", {"causal": True}, sizes)
    rows += [
        ("auto", replace(plain, name=f"D = {d}, {dtype}", head_dim=d, dtype=dtype))
        for d in sizes.head_dims
        for dtype in (DTYPES if d <= 256 else DTYPES[:2])
    ]
    rows += [
        (variant, _case(f"{variant}: {name}, float16", FEATURES[name], sizes))
        for variant, names in OTHER_FEATURES.items()
        for name in names
    ]
    return rows


@dataclass(frozen=True)
class OperatorCase:
    """One call of `npu_fusion_attention`: layout, what the mask says, and options by name."""

    name: str
    layout: str = "BNSD"
    sparse_mode: int = 0
    mask: str = ""  # "", "compressed" or "dense"
    tokens: tuple[int, int] = (2147483647, 2147483647)
    seqlen_q: int = 0  # 0: as many as keys
    heads_kv: int = 0  # 0: as many as queries
    pse: bool = False
    sink: bool = False


OPERATOR_CASES = (
    *(OperatorCase(f"layout {x}", x) for x in ("BSH", "SBH", "BSND", "BNSD", "TND")),
    OperatorCase("mode 0, dense mask", mask="dense"),
    OperatorCase("mode 1, dense mask", sparse_mode=1, mask="dense"),
    *(OperatorCase(f"mode {m}", sparse_mode=m, mask="compressed") for m in (2, 3)),
    *(OperatorCase(f"mode {m}, fewer queries", sparse_mode=m, mask="compressed", seqlen_q=-1) for m in (2, 3)),
    OperatorCase("mode 4, band", sparse_mode=4, mask="compressed", tokens=(5, 2)),
    OperatorCase("mode 4, negative next", sparse_mode=4, mask="compressed", tokens=(6, -2)),
    OperatorCase("TND, mode 3", "TND", sparse_mode=3, mask="compressed"),
    OperatorCase("TND, mode 4", "TND", sparse_mode=4, mask="compressed", tokens=(4, 1)),
    OperatorCase("grouped heads", sparse_mode=3, mask="compressed", heads_kv=1),
    OperatorCase("pse before or after the scaling", pse=True),
    OperatorCase("sink", sink=True, sparse_mode=3, mask="compressed"),
)
