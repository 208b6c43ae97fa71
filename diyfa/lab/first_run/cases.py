"""The stages of `diyfa first-run` and their steps, as plain data, in the order in which they run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from diyfa.features import COMPOSABLE, EVERYTHING_CASE
from diyfa.testing import AttentionCase

DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the numerics: heads, Sq, Sk and D of the ordinary cases, and the lengths of packed sequences."""

    heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    packed: tuple[int, ...]
    head_dims: tuple[int, ...]  # D of the cases that vary it


FULL = Sizes(4, 384, 520, 64, (300, 0, 129, 1, 64), (16, 40, 64, 80, 96, 128, 192, 256, 512))
SMOKE = Sizes(2, 17, 20, 16, (9, 0, 5), (24,))

# name -> differences from the plain case, which has the fields of `Sizes`
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
    "block mask": {"heads_kv": 1, "mask": "1h:64:0.5"},
    "score function": {"heads_kv": 1, "causal": True, "score_fn": True},
    "packed sequences": {"layout": "thd", "causal": True},
    "packed sequences, dropout, window, sinks": {
        "layout": "thd", "dropout_p": 0.1, "window": (7, 0), "sinks": True
    },
    "all at once": {"heads_kv": 1, **EVERYTHING_CASE},
}  # fmt: skip
# Features that are tested with another schedule as well.
VARIANT_FEATURES = {
    "v1": ("plain", "causal", "grouped heads", "seq_lens", "window"),
}


def _case(name: str, changes: dict[str, Any], sizes: Sizes, **more: Any) -> AttentionCase:
    base: dict[str, Any] = {"heads": sizes.heads, "head_dim": sizes.head_dim}
    if changes.get("layout") == "thd":
        base["lens_q"] = sizes.packed
    else:
        base |= {"seqlen_q": sizes.seqlen_q, "seqlen_k": sizes.seqlen_k}
    return AttentionCase(name, **{**base, **changes, **more})


def features_in(dtype: str, sizes: Sizes) -> list[AttentionCase]:
    """Return the cases of one dtype: each feature, then head dims."""
    cases = [_case(f"{name}, {dtype}", changes, sizes, dtype=dtype) for name, changes in FEATURES.items()]
    widths = [d for d in sizes.head_dims if d <= 256 or dtype != "float32"]
    return cases + [_case(f"D = {d}, {dtype}", {"causal": True}, sizes, head_dim=d, dtype=dtype) for d in widths]


@dataclass(frozen=True)
class OperatorCase:
    """One call of `npu_fusion_attention`: its layout, its mask and other options."""

    name: str
    layout: str = "BNSD"
    sparse_mode: int = 0
    mask: str = ""  # "", "compressed" or "dense"
    tokens: tuple[int, int] = (2147483647, 2147483647)
    seqlen_q: int = 0  # 0: as many as keys; -1: `Sizes.seqlen_q`
    heads_kv: int = 0  # 0: as many as query heads
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


@dataclass(frozen=True)
class Grid:
    """The problems that are timed. B = tokens / S and H = hidden / D, as in the FlashAttention papers."""

    tokens: int
    hidden: int
    head_dims: tuple[int, ...]
    seq_lens: tuple[int, ...]
    dtypes: tuple[str, ...]
    tuned_at: int  # the length for the comparison of dtypes and for all head dims but the first
    tuned_up_to: int  # longer sequences use the tiles of this length
    warmup: int
    rep: int


FULL_GRID = Grid(
    32768, 2048, (128, 64, 256), (1024, 4096, 8192, 16384, 32768), ("float16", "bfloat16"), 4096, 8192, 5, 20
)
SMOKE_GRID = Grid(32, 16, (16,), (32,), ("float16",), 32, 32, 0, 1)

# name -> purpose. They run in this order: those most likely to work come first.
STAGES = {
    "small tiles": "a few calls with the smallest tiles: do kernels compile, run and compute?",
    "float16": "every feature in float16 with the tiles in use",
    "bfloat16": "the same in bfloat16",
    "float32": "the same in float32",
    "dtypes": "how long the dtypes take beside each other, and bfloat16 by way of the others",
    "operator": "torch_npu.npu_fusion_attention and diyfa's own form of it on the same calls",
    "tiles": "the fastest tile of each kernel, kept as `diyfa tune` keeps it",
    "speed": "diyfa, with and without what was kept, beside npu_fusion_attention",
}
SMALL_TILE = "32x32"
SMALL = ("plain", "causal", "grouped heads", "window")


@dataclass(frozen=True)
class Step:
    """One task of the worker: a function of `worker.py` with its arguments."""

    stage: str
    name: str
    kind: str  # "numerics", "determinism", "operator", "dtype", "tiles" or "speed"
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The name by which a resumed run finds that the step is done."""
        return f"{self.stage}: {self.name}"


def steps(smoke: bool) -> Iterator[Step]:
    """Yield all steps in order."""
    sizes, grid = (SMOKE, SMOKE_GRID) if smoke else (FULL, FULL_GRID)
    for name in SMALL:
        case = _case(f"{name}, tile {SMALL_TILE}", FEATURES[name], sizes)
        yield Step("small tiles", name, "numerics", {"case": asdict(case)}, {"DIYFA_NPU_TILE": SMALL_TILE})
    for dtype in DTYPES:
        for case in features_in(dtype, sizes):
            yield Step(dtype, case.name, "numerics", {"case": asdict(case)})
        if dtype == "float16":
            for variant, name in ((variant, name) for variant, names in VARIANT_FEATURES.items() for name in names):
                case = _case(f"{variant}: {name}, {dtype}", FEATURES[name], sizes)
                yield Step(dtype, case.name, "numerics", {"case": asdict(case), "variant": variant})
        case = _case(f"equal from run to run, {dtype}", {"causal": True}, sizes, dtype=dtype)
        yield Step(dtype, case.name, "determinism", {"case": asdict(case)})
    timing = {"tokens": grid.tokens, "hidden": grid.hidden, "warmup": grid.warmup, "rep": grid.rep}
    for dtype, through in (*((dtype, "") for dtype in DTYPES), ("bfloat16", "float32"), ("bfloat16", "float16")):
        arguments = {**timing, "head_dim": grid.head_dims[0], "seq_len": grid.tuned_at, "dtype": dtype}
        if through:
            arguments["through"] = through
        yield Step("dtypes", f"{dtype} through {through}" if through else dtype, "dtype", arguments)
    for operator in OPERATOR_CASES:
        yield Step("operator", operator.name, "operator", {"case": asdict(operator), "sizes": asdict(sizes)})
    yield from _timed_steps(grid, timing)


def _timed_steps(grid: Grid, timing: dict[str, Any]) -> Iterator[Step]:
    """Yield the steps for tiles, then for speed: every length of the first head dim, one length of the others."""
    problems = [
        (head_dim, seq_len, causal, dtype)
        for dtype, head_dim, causal in itertools.product(grid.dtypes, grid.head_dims, (False, True))
        for seq_len in (grid.seq_lens if head_dim == grid.head_dims[0] else (grid.tuned_at,))
    ]
    for stage in ("tiles", "speed"):
        for head_dim, seq_len, causal, dtype in problems:
            name = f"D = {head_dim}, {'causal' if causal else 'full'}, {dtype}, S = {seq_len}"
            arguments = {**timing, "head_dim": head_dim, "causal": causal, "dtype": dtype, "seq_len": seq_len}
            if stage == "tiles" and seq_len <= grid.tuned_up_to:
                yield Step(stage, name, "tiles", arguments)
            elif stage == "speed":
                for who in ("diyfa", "diyfa tuned", "torch_npu"):
                    yield Step(stage, f"{who}, {name}", "speed", {**arguments, "implementation": who})
