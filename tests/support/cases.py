"""The table of attention cases. Each runs on every backend and is compared with the float64 reference.

Cases are small enough for an interpreter unless marked `large`. Sizes are picked to straddle the tiles: one row, odd
lengths around powers of two, and lengths that leave a partial tile.
"""

from __future__ import annotations

from typing import Any

from diyfa.features import COMPOSABLE, EVERYTHING_CASE
from diyfa.testing import AttentionCase as Case

BASIC = [
    Case("s1", seqlen_q=1, all_variants=True),
    Case("s1_causal", seqlen_q=1, causal=True),
    Case("s2_d1", seqlen_q=2, head_dim=1),
    Case("s16", batch=2, heads=1, seqlen_q=16),
    Case("s37", seqlen_q=37),
    Case("s37_causal", seqlen_q=37, causal=True, all_variants=True),
    Case("s64", seqlen_q=64, all_variants=True),
    Case("s128_d64_causal", seqlen_q=128, head_dim=64, causal=True, all_variants=True),
    Case("s129", heads=1, seqlen_q=129, head_dim=64, all_variants=True),
    Case("s129_causal", heads=1, seqlen_q=129, head_dim=64, causal=True),
    Case("s257_causal", seqlen_q=257, head_dim=64, causal=True, large=True, all_variants=True),
    Case("s1000", batch=2, heads=3, seqlen_q=1000, head_dim=64, large=True, all_variants=True),
    Case("s1000_causal_bf16", batch=2, heads=3, seqlen_q=1000, head_dim=128, causal=True, dtype="bfloat16", large=True),
]
DTYPES = [
    Case("bf16", seqlen_q=65, dtype="bfloat16"),
    Case("bf16_causal_d128", heads=1, seqlen_q=65, head_dim=128, dtype="bfloat16", causal=True, all_variants=True),
    Case("fp32", seqlen_q=65, dtype="float32"),
    Case("fp32_causal_d64", heads=1, seqlen_q=70, head_dim=64, dtype="float32", causal=True, all_variants=True),
]
HEAD_DIMS = [
    Case(f"d{d}", heads=1, seqlen_q=40, head_dim=d, causal=d % 32 == 0) for d in (16, 40, 64, 80, 96, 128, 192, 256)
] + [
    Case("d320", heads=1, seqlen_q=24, head_dim=320, causal=True),
    Case("d512", heads=1, seqlen_q=24, head_dim=512),
    Case("dv_576_512", heads=2, heads_kv=1, seqlen_q=24, head_dim=576, head_dim_v=512, causal=True, dtype="bfloat16"),
    Case("dv_192_128", heads=1, seqlen_q=40, head_dim=192, head_dim_v=128, causal=True),
    Case("dv_32_80", heads=1, seqlen_q=40, head_dim=32, head_dim_v=80, layout="bshd", all_variants=True),
    # A V narrower than K, with rows that are not 16-byte aligned and with rows that are: wgmma once read it wrongly.
    Case("dv_64_16_sliced", seqlen_q=70, seqlen_k=90, head_dim=64, head_dim_v=16, layout="bshd", view="sliced"),
    Case("dv_40_8", seqlen_q=70, seqlen_k=90, head_dim=40, head_dim_v=8, layout="bshd", view="transposed"),
    Case("dv_64_512", heads=1, seqlen_q=24, head_dim=64, head_dim_v=512),
]
LENGTHS = [
    Case("q17_k90", seqlen_q=17, seqlen_k=90),
    Case("q17_k90_causal", seqlen_q=17, seqlen_k=90, causal=True, all_variants=True),
    Case("q90_k17", seqlen_q=90, seqlen_k=17),
    Case("q90_k17_causal", seqlen_q=90, seqlen_k=17, causal=True, all_variants=True),  # 73 rows see no key
    Case("q1_k133_causal", seqlen_q=1, seqlen_k=133, causal=True),
    Case("q133_k1", heads=1, seqlen_q=133, seqlen_k=1),
    Case("q300_k777_causal", heads=4, heads_kv=2, seqlen_q=300, seqlen_k=777, causal=True, large=True),
    Case("no_keys", seqlen_q=5, seqlen_k=0),
    Case("no_keys_sinks", seqlen_q=5, seqlen_k=0, sinks=True),
    Case("no_queries", seqlen_q=0, seqlen_k=7),
    Case("no_batch", batch=0, seqlen_q=7),
]
HEADS = [
    Case("gqa_4_2", heads=4, heads_kv=2, seqlen_q=40, all_variants=True),
    Case("gqa_6_2_causal", heads=6, heads_kv=2, seqlen_q=33, causal=True),
    Case("mqa_causal", batch=2, heads=3, heads_kv=1, seqlen_q=40, causal=True, layout="bshd"),
    Case("gqa_q5_k70", heads=4, heads_kv=2, seqlen_q=5, seqlen_k=70, causal=True),
]
SEQ_LENS = [
    Case("lens", batch=3, heads=1, seqlen_q=70, seq_lens=(70, 33, 1), all_variants=True),
    Case("lens_causal", batch=2, heads=1, seqlen_q=70, seq_lens=(64, 33), causal=True, all_variants=True),
    Case("lens_q20_k70_causal", batch=3, heads=1, seqlen_q=20, seqlen_k=70, seq_lens=(70, 33, 7), causal=True),
    Case("lens_q70_k20", batch=2, heads=1, seqlen_q=70, seqlen_k=20, seq_lens=(20, 9)),
    Case("lens_gqa_bshd", batch=2, heads=4, heads_kv=2, seqlen_q=40, seq_lens=(17, 40), layout="bshd", causal=True),
    Case("lens_3d", batch=2, heads=2, seqlen_q=40, seq_lens=(17, 40), layout="3d"),
    Case("lens_window", batch=2, heads=1, seqlen_q=70, seq_lens=(70, 41), window=(11, 5)),
    Case("lens_sinks", batch=2, heads=2, seqlen_q=40, seq_lens=(40, 19), sinks=True, causal=True),
    Case("lens_bias_alibi", batch=2, heads=2, seqlen_q=40, seq_lens=(40, 19), bias="bhqk", alibi="bh"),
    Case("lens_500", batch=3, heads=2, seqlen_q=500, seq_lens=(500, 257, 3), causal=True, large=True),
]
LAYOUTS = [
    Case("bshd", seqlen_q=40, layout="bshd", all_variants=True),
    Case("bshd_causal_d64", batch=2, seqlen_q=70, head_dim=64, layout="bshd", causal=True),
    Case("3d", batch=1, heads=3, seqlen_q=40, layout="3d", causal=True),
    Case("3d_gqa", batch=1, heads=4, heads_kv=2, seqlen_q=40, layout="3d"),
    Case("transposed", batch=2, seqlen_q=40, view="transposed", causal=True),
    Case("transposed_bshd", batch=2, seqlen_q=40, view="transposed", layout="bshd"),
    Case("packed", batch=2, seqlen_q=40, view="packed", causal=True),
    Case("packed_bshd", batch=2, seqlen_q=40, view="packed", layout="bshd"),
    Case("sliced", seqlen_q=40, view="sliced", causal=True),
    Case("sliced_bshd", batch=2, seqlen_q=40, view="sliced", layout="bshd"),
]
FEATURES = [
    Case("scale", seqlen_q=40, sm_scale=0.5),
    Case("scale_negative", seqlen_q=40, sm_scale=-0.3),
    Case("scale_zero", seqlen_q=40, sm_scale=0.0),
    Case("window_left", seqlen_q=90, window=(13, -1), all_variants=True),
    Case("window_causal", seqlen_q=90, window=(13, 0), causal=True),
    Case("window_both", seqlen_q=130, heads=1, window=(20, 9), all_variants=True),
    Case("window_right", seqlen_q=90, window=(-1, 3)),
    Case("window_self", seqlen_q=70, window=(0, 0)),
    Case("window_q30_k90", seqlen_q=30, seqlen_k=90, window=(20, 5)),
    Case("window_q90_k30", seqlen_q=90, seqlen_k=30, window=(20, 35)),
    Case("window_long", seqlen_q=700, window=(64, 64), large=True),
    Case("softcap_causal_window", seqlen_q=90, softcap=3.0, causal=True, window=(30, 0)),
    Case("softcap_fp32", seqlen_q=60, softcap=20.0, dtype="float32"),  # scores far smaller than the cap
    Case("alibi_batch_causal", batch=2, seqlen_q=40, alibi="bh", causal=True),
    # Distances far smaller than a tile's width.
    Case("alibi_fp32_far", heads=6, seqlen_q=60, seqlen_k=20, alibi="h", causal=True, sm_scale=0.02, dtype="float32"),
    Case("alibi_q20_k70", seqlen_q=20, seqlen_k=70, alibi="h"),
    Case("bias_full", batch=2, seqlen_q=40, bias="bhqk"),
    Case("bias_heads_causal", batch=2, seqlen_q=40, bias="1hqk", causal=True),
    Case("bias_2d", batch=2, seqlen_q=40, bias="qk"),
    Case("bias_rows", seqlen_q=40, bias="b11k"),
    Case("bias_columns", seqlen_q=40, bias="bhq1"),
    Case("bias_scalar", seqlen_q=40, bias="1"),
    Case("sinks_causal_q70_k30", heads=3, seqlen_q=70, seqlen_k=30, sinks=True, causal=True),
    Case("sinks_window_gqa_bf16", heads=4, heads_kv=2, seqlen_q=70, sinks=True, window=(9, 0), dtype="bfloat16"),
    Case(
        "everything", batch=2, heads=4, heads_kv=2, seqlen_q=50, seqlen_k=70, head_dim=32, head_dim_v=48,
        seq_lens=(70, 44), layout="bshd", **{**EVERYTHING_CASE, "window": (30, 4), "dropout_p": 0.0},
    ),
]  # fmt: skip
VARLEN = [
    Case("varlen", layout="thd", lens_q=(40, 17, 1), all_variants=True),
    Case("varlen_causal", layout="thd", lens_q=(33, 70, 5), causal=True, slack=3, all_variants=True),
    Case("varlen_one", layout="thd", lens_q=(37,), lens_k=(70,), heads=3, causal=True),
    Case("varlen_many", layout="thd", lens_q=(1, 2, 3, 1, 16, 9, 4), lens_k=(3, 1, 1, 17, 2, 9, 4)),
    # 64 rows of the first sequence are one tile of keys: the second begins at a tile's edge, the third inside one.
    Case("varlen_tile_edge", layout="thd", lens_q=(64, 30, 40), head_dim=64, causal=True, dtype="bfloat16"),
    # Sequences without queries, without keys, without both: first, in the middle, last.
    Case("varlen_empty_first", layout="thd", lens_q=(0, 20), lens_k=(0, 33), slack=2),
    Case("varlen_empty_middle", layout="thd", lens_q=(20, 0, 9), lens_k=(33, 0, 9), causal=True, slack=2),
    Case("varlen_empty_last", layout="thd", lens_q=(20, 7, 0), lens_k=(33, 7, 0), slack=2),
    Case("varlen_no_queries", layout="thd", lens_q=(0, 20, 0), lens_k=(9, 7, 40), slack=5),
    Case("varlen_no_keys", layout="thd", lens_q=(9, 20, 8), lens_k=(0, 30, 0), causal=True, slack=5, all_variants=True),
    Case("varlen_no_keys_sinks", layout="thd", lens_q=(9, 20, 8), lens_k=(0, 30, 0), sinks=True, slack=5),
    Case("varlen_all_empty", layout="thd", lens_q=(0, 0, 0), slack=4),
    Case("varlen_all_empty_sinks", layout="thd", lens_q=(0, 0), lens_k=(0, 0), sinks=True, slack=4),
    Case("varlen_nothing", layout="thd", lens_q=(0, 0)),
    Case("varlen_without_keys", layout="thd", lens_q=(5, 3), lens_k=(0, 0)),
    Case("varlen_without_keys_sinks", layout="thd", lens_q=(5, 3), lens_k=(0, 0), sinks=True, slack=2),
    # Rows that see no key: more queries than keys under a causal mask.
    Case("varlen_q_longer_causal", layout="thd", lens_q=(50, 20, 70), lens_k=(20, 20, 3), causal=True, slack=1),
    Case("varlen_sinks_masked", layout="thd", lens_q=(50, 20), lens_k=(20, 25), causal=True, sinks=True, slack=1),
    Case(
        "varlen_window_gqa", layout="thd", heads=4, heads_kv=2, lens_q=(70, 20, 41), lens_k=(70, 65, 9),
        window=(13, 4), all_variants=True,
    ),
    Case("varlen_window_left", layout="thd", lens_q=(70, 20), lens_k=(40, 65), window=(9, -1), slack=3),
    Case("varlen_mqa_causal", layout="thd", heads=3, heads_kv=1, lens_q=(5, 40), lens_k=(64, 40), causal=True),
    Case("varlen_softcap_sinks_alone", layout="thd", lens_q=(0, 9), lens_k=(9, 0), softcap=20.0, sinks=True),
    Case(
        "varlen_sinks_one_key_bf16", heads=1, head_dim=64, dtype="bfloat16", layout="thd", lens_q=(0, 1, 1, 0),
        lens_k=(1, 1, 1, 1), view="sliced", slack=2, sinks=True, sm_scale=0.657626760122558, dropout_p=0.5, seed=1618,
    ),
    Case("varlen_alibi_batch", layout="thd", lens_q=(30, 0, 11), lens_k=(12, 3, 40), alibi="bh", window=(20, 3)),
    Case("varlen_sinks_gqa", layout="thd", heads=4, heads_kv=2, lens_q=(30, 11), lens_k=(45, 11), sinks=True),
    Case("varlen_dropout", layout="thd", lens_q=(40, 17), lens_k=(33, 50), dropout_p=0.3, slack=3, all_variants=True),
    Case("varlen_fp32", layout="thd", lens_q=(30, 41), lens_k=(50, 7), dtype="float32", causal=True, head_dim=64),
    Case("varlen_dv_192_128", layout="thd", heads=1, lens_q=(30, 11), head_dim=192, head_dim_v=128, causal=True),
    Case("varlen_d40", layout="thd", lens_q=(30, 11), head_dim=40, dtype="bfloat16"),
    Case("varlen_transposed", layout="thd", lens_q=(30, 11), view="transposed", slack=2),
    Case("varlen_packed", layout="thd", lens_q=(30, 11), view="packed", causal=True, slack=2),
    Case("varlen_sliced", layout="thd", lens_q=(30, 11), lens_k=(31, 40), view="sliced", causal=True),
    Case(
        "varlen_everything", layout="thd", heads=4, heads_kv=2, lens_q=(50, 0, 33, 60, 7), lens_k=(70, 5, 0, 31, 64),
        head_dim=32, head_dim_v=48, slack=7, **{**EVERYTHING_CASE, "window": (30, 4), "alibi": "bh", "bias": ""},
    ),
    Case(
        "varlen_large", layout="thd", heads=4, heads_kv=2, lens_q=(700, 0, 33, 1, 511), lens_k=(300, 9, 1000, 1, 511),
        head_dim=64, causal=True, slack=70, large=True, all_variants=True,
    ),
    Case(
        "varlen_large_everything", layout="thd", heads=6, heads_kv=2, lens_q=(400, 0, 33, 1, 211),
        lens_k=(300, 9, 600, 1, 211), head_dim=128, slack=70, dtype="bfloat16", large=True,
        **{**EVERYTHING_CASE, "window": (200, 0), "softcap": 20.0, "bias": "", "dropout_p": 0.1},
    ),
]  # fmt: skip
PACKING = [
    Case("qkvpacked", batch=2, seqlen_q=40, layout="bshd", packing="qkv", causal=True),
    Case("qkvpacked_dropout", batch=2, seqlen_q=40, layout="bshd", packing="qkv", dropout_p=0.2, window=(20, 0)),
    Case("kvpacked", batch=2, seqlen_q=40, seqlen_k=70, layout="bshd", packing="kv"),
    Case("kvpacked_gqa_causal", batch=2, heads=4, heads_kv=2, seqlen_q=40, layout="bshd", packing="kv", causal=True),
    Case("kvpacked_lens", batch=2, heads=4, heads_kv=2, seqlen_q=40, layout="bshd", packing="kv", seq_lens=(40, 17)),
    Case("varlen_qkvpacked", layout="thd", lens_q=(33, 0, 40), packing="qkv", causal=True, slack=2),
    Case(
        "varlen_kvpacked", layout="thd", heads=4, heads_kv=2, lens_q=(33, 9, 40), lens_k=(50, 0, 17), packing="kv",
        slack=2, dropout_p=0.2, alibi="h",
    ),
]  # fmt: skip
DROPOUT = [
    Case("dropout_half_causal", batch=2, seqlen_q=70, dropout_p=0.5, causal=True, dtype="bfloat16"),
    Case("dropout_most", seqlen_q=70, dropout_p=0.9),  # some rows keep nothing
    Case("dropout_fp32", seqlen_q=37, seqlen_k=70, dropout_p=0.1, dtype="float32", layout="bshd"),
    Case("dropout_gqa_q5_k70", heads=4, heads_kv=2, seqlen_q=5, seqlen_k=70, dropout_p=0.3, causal=True),
    Case("dropout_q70_k30_causal", batch=2, seqlen_q=70, seqlen_k=30, dropout_p=0.3, causal=True),  # rows without keys
    Case("dropout_softcap_window", seqlen_q=70, dropout_p=0.3, softcap=2.0, window=(20, 5)),
    Case("dropout_sinks", heads=3, seqlen_q=40, dropout_p=0.3, sinks=True, causal=True),
    Case("dropout_bias", batch=2, seqlen_q=40, dropout_p=0.3, bias="1hqk"),
    Case("dropout_alibi_lens", batch=3, seqlen_q=40, dropout_p=0.3, alibi="bh", seq_lens=(40, 9, 1)),
    Case("dropout_3d", heads=3, seqlen_q=20, dropout_p=0.3, layout="3d"),
    Case("dropout_dv", seqlen_q=40, dropout_p=0.3, head_dim=64, head_dim_v=32, view="transposed"),
    Case("dropout_origins", batch=2, seqlen_q=40, seqlen_k=50, dropout_p=0.4, dropout_origins=True),
    Case("dropout_origins_gqa_causal", batch=2, heads=4, heads_kv=2, seqlen_q=70, dropout_p=0.3, dropout_origins=True,
         causal=True, dtype="bfloat16", layout="bshd"),
    Case("dropout_origins_bias_lens", batch=3, seqlen_q=40, dropout_p=0.3, dropout_origins=True, bias="1hqk",
         seq_lens=(40, 9, 1), dtype="float32"),
    Case("dropout_origins_packed", layout="thd", heads=4, heads_kv=2, lens_q=(33, 0, 40), lens_k=(50, 9, 17),
         dropout_p=0.3, dropout_origins=True, window=(20, 4), slack=2),
    Case("dropout_large", batch=2, heads=2, seqlen_q=700, seqlen_k=500, head_dim=64, dropout_p=0.2, causal=True,
         large=True, all_variants=True),
]  # fmt: skip
COMBINED = [
    Case("bias_no_grad", batch=2, seqlen_q=40, bias="1hqk", bias_grad=False, causal=True),
    Case("bias_no_grad_rows", batch=2, seqlen_q=40, seqlen_k=50, bias="b11k", bias_grad=False, dropout_p=0.2),
    Case("bias_heads_scalar", batch=2, heads=4, heads_kv=2, seqlen_q=40, bias="1h11", softcap=3.0),
    Case("bias_rows_lens", batch=2, seqlen_q=40, bias="11q1", seq_lens=(17, 40), causal=True),
    Case("bias_keys_lens", batch=2, seqlen_q=40, seqlen_k=50, bias="b11k", seq_lens=(50, 9)),
    Case("bias_batch_lens_gqa", batch=2, heads=4, heads_kv=2, seqlen_q=40, bias="b1qk", seq_lens=(40, 9)),
    Case("bias_one_key_gqa", batch=2, heads=4, heads_kv=2, seqlen_q=40, bias="hqk", window=(9, 9)),
    Case("bias_fp32_bf16_sinks", seqlen_q=40, bias="1hqk", sinks=True, dtype="bfloat16", bias_dtype="float32",
         softcap=4.0),
    Case("bias_fp64_fp16", batch=2, seqlen_q=40, seqlen_k=50, bias="b1qk", bias_dtype="float64", causal=True),
    Case("bias_bf16_fp32", batch=2, seqlen_q=40, bias="qk", dtype="float32", bias_dtype="bfloat16", dropout_p=0.2),
    Case("bias_keys_fp32_fp16", batch=2, seqlen_q=40, seqlen_k=50, bias="b11k", bias_dtype="float32"),
    Case("bias_long", batch=2, heads=4, seqlen_q=333, seqlen_k=500, head_dim=64, bias="1hqk", causal=True, large=True),
    Case("window_lens_mqa", batch=3, heads_kv=1, seqlen_q=40, seqlen_k=70, seq_lens=(70, 33, 3), window=(9, 2)),
    Case("sinks_lens_masked", batch=2, seqlen_q=70, seqlen_k=30, sinks=True, seq_lens=(30, 9), window=(5, 0)),
    Case("alibi_softcap_gqa", heads=4, heads_kv=2, seqlen_q=40, seqlen_k=60, alibi="h", softcap=3.0, causal=True),
    Case("mqa_window_dropout", heads=4, heads_kv=1, seqlen_q=40, seqlen_k=60, window=(9, 0), dropout_p=0.2),
    Case(
        "everything_dropout", batch=2, heads=4, heads_kv=2, seqlen_q=50, seqlen_k=70, head_dim=32, head_dim_v=48,
        seq_lens=(70, 44), layout="bshd", **{**EVERYTHING_CASE, "window": (30, 4), "bias": "b1qk"},
    ),
    Case(
        "everything_large", batch=2, heads=4, heads_kv=2, seqlen_q=300, seqlen_k=500, head_dim=128, head_dim_v=64,
        seq_lens=(500, 77), dtype="bfloat16", large=True, **{**EVERYTHING_CASE, "window": (200, 0), "alibi": "bh"},
    ),
]  # fmt: skip

# Score functions, with a relative bias and its gradient; they hide some pairs.
SCORE_FUNCTIONS = [
    Case("score_fn", seqlen_q=70, score_fn=True, all_variants=True),
    Case("score_fn_causal_gqa", batch=2, heads=4, heads_kv=2, seqlen_q=50, seqlen_k=90, causal=True, score_fn=True),
    Case("score_fn_more_queries", seqlen_q=60, seqlen_k=20, causal=True, score_fn=True, dtype="float32"),
    Case("score_fn_packed", layout="thd", lens_q=(30, 0, 41), lens_k=(35, 9, 41), causal=True, score_fn=True, slack=2),
    Case("score_fn_one_key", seqlen_q=40, seqlen_k=1, score_fn=True, sinks=True),
    Case("score_fn_mask", seqlen_q=70, seqlen_k=140, mask="1h:64:0.6", score_fn=True, dtype="bfloat16"),
    Case(
        "score_fn_everything", batch=2, heads=4, heads_kv=2, seqlen_q=50, seqlen_k=70, head_dim=32, head_dim_v=16,
        seq_lens=(70, 44), layout="bshd", score_fn=True, **{**EVERYTHING_CASE, "window": (30, 4), "bias": "b1qk"},
    ),
    Case(
        "score_fn_large", heads=2, heads_kv=1, seqlen_q=400, seqlen_k=600, head_dim=128, causal=True,
        score_fn=True, large=True,
    ),
]  # fmt: skip

# Block masks: samples and heads of the mask, its block, and the density of blocks and bits.
MASKS = [
    Case("mask", seqlen_q=150, mask="11:64:0.5", all_variants=True),
    Case("mask_gqa_sinks", batch=2, heads=4, heads_kv=2, seqlen_q=100, seqlen_k=200, mask="bh:64x128:0.5", sinks=True),
    Case("mask_wide_blocks", seqlen_q=200, seqlen_k=100, head_dim=64, mask="1h:128x64:0.8", layout="bshd"),
    Case("mask_128", heads=1, seqlen_q=257, seqlen_k=130, mask="11:128:0.6", dtype="bfloat16"),
    Case("mask_empty", batch=2, seqlen_q=70, mask="b1:64:0"),
    Case("mask_empty_sinks", seqlen_q=70, mask="11:64:0", sinks=True),
    Case("mask_full", seqlen_q=128, seqlen_k=192, mask="11:64:1"),
    Case("mask_full_ragged", seqlen_q=70, seqlen_k=90, mask="11:128:1"),
    Case("mask_sparse", seqlen_q=70, seqlen_k=300, mask="11:64:0.02"),  # rows without keys, and with one
    Case("mask_one_query", seqlen_q=1, seqlen_k=200, mask="11:64:0.5"),
    Case("mask_one_key", seqlen_q=200, seqlen_k=1, mask="11:64:0.7"),
    Case("mask_d256", heads=1, seqlen_q=70, head_dim=256, mask="11:64:0.7"),
    Case("mask_dv_192_128", heads=1, seqlen_q=70, head_dim=192, head_dim_v=128, mask="11:64:0.7"),
    # On NPUs its tiles of 16 keys are half a word of bits.
    Case("mask_fp32", heads=1, seqlen_q=100, head_dim=192, mask="11:64:0.5", dtype="float32"),
    Case("mask_softcap_alibi", batch=2, seqlen_q=100, mask="b1:64:0.5", softcap=3.0, alibi="bh"),
    Case("mask_dropout", batch=2, seqlen_q=90, seqlen_k=70, mask="1h:64:0.6", dropout_p=0.3),
    Case("mask_bias", seqlen_q=70, seqlen_k=260, mask="1h:64:0.5", bias="1hqk"),  # lists out of order
    Case("mask_bias_keys", batch=2, seqlen_q=60, seqlen_k=200, mask="b1:128x64:0.5", bias="b11k"),
    Case("mask_bias_queries", seqlen_q=100, mask="11:64:0.5", bias="bhq1"),
    Case("mask_lens", batch=3, heads=1, seqlen_q=150, mask="b1:64:0.6", seq_lens=(150, 77, 1)),
    Case("mask_lens_bshd", batch=2, seqlen_q=100, seqlen_k=140, mask="11:64:0.7", seq_lens=(140, 65), layout="bshd"),
    Case("mask_lens_bias_gqa", batch=2, heads=4, heads_kv=2, seqlen_q=100, mask="bh:64:0.6", seq_lens=(100, 30),
         bias="bhqk", sinks=True),
    Case("mask_3d", batch=1, heads=3, seqlen_q=100, mask="1h:64:0.5", layout="3d"),
    Case("mask_sliced", seqlen_q=100, mask="11:64:0.5", view="sliced"),
    Case("mask_large", batch=2, heads=2, heads_kv=1, seqlen_q=1000, seqlen_k=1300, head_dim=128, mask="bh:128:0.3",
         dtype="bfloat16", large=True),
    Case("mask_large_64", batch=1, heads=2, seqlen_q=1200, head_dim=64, mask="11:64:0.2", large=True),
    Case("mask_large_lens", batch=2, heads=2, seqlen_q=900, head_dim=128, mask="11:128:0.5", seq_lens=(900, 513),
         softcap=20.0, large=True),
]  # fmt: skip

# What strains the arithmetic: weights that are all but 0 and 1, and maxima far from where they are first looked for.
PEAKED = [
    *(
        Case(f"peaked_{nats}_{dtype}", seqlen_q=90, head_dim=64, sm_scale=nats / 8, causal=nats % 8 == 0, dtype=dtype)
        for nats in (3, 8, 12, 20)
        for dtype in ("float16", "bfloat16", "float32")
    ),
    Case("peaked_12_variants", seqlen_q=133, heads=1, head_dim=64, sm_scale=1.5, causal=True, dtype="bfloat16",
         all_variants=True),
    Case("peaked_20_q20_k140", seqlen_q=20, seqlen_k=140, head_dim=64, sm_scale=2.5, causal=True, dtype="bfloat16"),
    *(
        Case(f"sinks_{nats}_{dtype}", heads=3, seqlen_q=90, head_dim=64, sinks=True, sink_offset=nats, dtype=dtype,
             causal=nats == 16)
        for nats in (10, 16, 30)
        for dtype in ("float16", "bfloat16", "float32")
    ),
    Case("sinks_30_peaked", heads=3, seqlen_q=90, head_dim=64, sinks=True, sink_offset=30, sm_scale=1.5,
         window=(40, 0), dtype="bfloat16"),
    Case("sinks_far_below", heads=3, seqlen_q=40, sinks=True, sink_offset=-60, dtype="bfloat16"),
    *(
        Case(f"rise_{nats}_{dtype}", seqlen_q=150, head_dim=64, heads=1, rise=nats, causal=nats > 0, dtype=dtype)
        for nats in (60, -60)
        for dtype in ("float16", "bfloat16", "float32")
    ),
    Case("rise_variants", seqlen_q=150, head_dim=64, heads=1, rise=60.0, all_variants=True),
    Case("one_key_peaked", seqlen_q=70, head_dim=64, window=(0, 0), sm_scale=1.5, dtype="bfloat16"),
    Case("one_key_peaked_fp32", seqlen_q=70, head_dim=64, window=(0, 0), sm_scale=1.5, dtype="float32"),
    Case("one_key_sinks", heads=3, seqlen_q=70, seqlen_k=1, head_dim=64, sinks=True, sink_offset=5, dtype="bfloat16"),
    Case("bias_large", seqlen_q=90, head_dim=64, bias="1hqk", bias_dtype="float32", bias_scale=20.0, dtype="bfloat16"),
    Case("bias_large_fp16", seqlen_q=90, bias="1hqk", bias_scale=20.0, causal=True),
    Case("bias_large_fp32", seqlen_q=90, bias="bhqk", bias_scale=20.0, dtype="float32"),
    Case("softcap_peaked", seqlen_q=90, head_dim=64, softcap=15.0, sm_scale=2.5, causal=True, dtype="bfloat16"),
    Case("alibi_peaked", seqlen_q=90, head_dim=64, alibi="h", sm_scale=1.5, causal=True, dtype="bfloat16"),
    Case("dropout_peaked", seqlen_q=90, head_dim=64, dropout_p=0.2, sm_scale=1.5, dtype="bfloat16"),
    Case("varlen_peaked", layout="thd", lens_q=(70, 9, 40), head_dim=64, sm_scale=1.5, causal=True, dtype="bfloat16",
         slack=3),
    Case("peaked_large", heads=2, seqlen_q=1000, head_dim=128, sm_scale=1.0, causal=True, dtype="bfloat16",
         large=True, all_variants=True),
]  # fmt: skip

# Keys that dominate their rows, wherever they are. Their gradients tell whether out and lse fit together: delta, which
# is rowsum(dout * out), must cancel dout * v. The lse has no gradient, in which that would drown.
DOMINANT: dict[str, Any] = {
    "heads": 1, "seqlen_q": 40, "seqlen_k": 150, "head_dim": 64, "dtype": "bfloat16", "sm_scale": 1.0, "spread": 0.1,
    "lse_gradient": False,
}  # fmt: skip
DOMINATED = [
    *(
        Case(f"dominant_{nats}_{name}", **{**DOMINANT, "dtype": dtype}, peaks=((place, nats),), all_variants=nats == 16)
        for nats, dtype in ((10, "float16"), (16, "bfloat16"), (30, "float16"), (60, "bfloat16"))
        for name, place in (("first", 0.0), ("middle", 0.55), ("last", 1.0))
    ),
    Case("dominant_0", **DOMINANT, peaks=((0.5, 0),)),
    Case("dominant_16_fp32", **{**DOMINANT, "dtype": "float32"}, peaks=((0.55, 16),)),
    Case("dominant_equal", **DOMINANT, peaks=((0.05, 30), (0.95, 30))),
    Case("dominant_near", **DOMINANT, peaks=((0.05, 16.5), (0.4, 16), (0.95, 15.5))),
    Case("dominant_late", **{**DOMINANT, "dtype": "float16"}, peaks=((0.05, 16), (0.95, 21.3)), seed=3),
    Case("dominant_early", **DOMINANT, peaks=((0.05, 35.3), (0.95, 30)), seed=18),
    Case("dominant_rise", **DOMINANT, rise=30.0),
    Case("dominant_fall", **{**DOMINANT, "dtype": "float16"}, rise=-30.0),
    Case("dominant_in_some_rows", **DOMINANT, peaks=((0.55, 30),), peaked_rows=7),
    Case("dominant_alone", **{**DOMINANT, "seqlen_k": 40}, peaks=((0.5, 16),), window=(0, 0)),
    Case("dominant_sinks", **{**DOMINANT, "heads": 3}, peaks=((0.55, 16),), sinks=True, sink_offset=15),
    Case("dominant_sinks_below", **{**DOMINANT, "heads": 3}, peaks=((0.55, 30),), sinks=True),
    Case("dominant_gqa_bshd", **{**DOMINANT, "heads": 4}, heads_kv=2, layout="bshd", peaks=((0.55, 16),)),
    Case("dominant_causal", **{**DOMINANT, "seqlen_q": 150}, causal=True, peaks=((0.4, 16),), all_variants=True),
    Case("dominant_window", **{**DOMINANT, "seqlen_q": 150}, window=(70, 0), peaks=((0.1, 16), (0.6, 16))),
    Case("dominant_lens", **{**DOMINANT, "batch": 2, "seqlen_q": 150}, seq_lens=(150, 70), peaks=((0.55, 30),)),
    Case("dominant_varlen", **DOMINANT, layout="thd", lens_q=(40, 0, 9), lens_k=(150, 3, 70), slack=3,
         peaks=((0.55, 30),)),
    Case("dominant_varlen_causal", **DOMINANT, layout="thd", lens_q=(130, 9), causal=True, peaks=((0.4, 16),)),
    *(
        Case(f"dominant_d{d}_{dv or d}", **{**DOMINANT, "head_dim": d}, head_dim_v=dv, peaks=((0.55, 16),))
        for d, dv in ((96, 0), (128, 0), (192, 0), (192, 128), (256, 0))
    ),
    *(
        Case(f"dominant_large_{nats}_{dtype}", **{
            **DOMINANT, "heads": 2, "seqlen_q": 700, "seqlen_k": 700, "head_dim": d, "dtype": dtype
        }, causal=nats == 30, peaks=((0.5, nats),), large=True, all_variants=True)
        for nats, d, dtype in ((16, 64, "bfloat16"), (30, 128, "bfloat16"), (60, 128, "float16"))
    ),
]  # fmt: skip

WIDE: dict[str, Any] = {
    "heads_kv": 1, "seqlen_q": 20, "head_dim": 576, "head_dim_v": 16, "sm_scale": -0.1, "dtype": "float32"
}  # fmt: skip
TWO_SEQUENCES: dict[str, Any] = {"layout": "thd", "lens_q": (30, 11), "lens_k": (12, 40), "slack": 3}
# Each feature alone: on every kernel, with packed sequences, and where kernels have code of their own, which is for a
# scale below 0 and, on Ascend, heads too wide for one product.
EACH_FEATURE = [
    *(Case(x.refusal_name, seqlen_q=40, all_variants=True, **x.case) for x in COMPOSABLE),
    *(
        Case(f"varlen_{x.refusal_name}", **TWO_SEQUENCES, causal=x.refusal_name != "window", **x.case)
        for x in COMPOSABLE
        if x.refusal_name not in ("attn_bias", "dropout")  # not with packed sequences; among the cases above
    ),
    *(Case(f"{x.refusal_name}_wide", **WIDE, **x.case) for x in COMPOSABLE),
]

CASES: dict[str, Case] = {}
for _case in [
    *BASIC, *DTYPES, *HEAD_DIMS, *LENGTHS, *HEADS, *SEQ_LENS, *LAYOUTS, *FEATURES, *VARLEN, *PACKING, *DROPOUT,
    *COMBINED, *SCORE_FUNCTIONS, *MASKS, *PEAKED, *DOMINATED, *EACH_FEATURE,
]:  # fmt: skip
    if _case.name in CASES:
        raise ValueError(f"two cases are called {_case.name}")
    CASES[_case.name] = _case
