"""The blocks of docs/integrations.md, one after another, on the CPU; and its table, with the tests behind it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from subprocesses import ROOT, run_python

PAGE = Path(ROOT) / "docs" / "integrations.md"


def test_the_guide_runs() -> None:
    """In a process of its own: it changes what `import flash_attn` means."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    code = "\n".join(block.replace('device = "cuda"', 'device = "cpu"') for block in blocks)
    code += """
for row in integrations.status():
    print("\\n", row.client, row.on, sum(row.calls.values()) > 0)
"""
    lines = [line.strip() for line in run_python(code, DIYFA_BACKEND="cpu").splitlines()]
    assert lines[0].startswith("pytorch ") and "Counter({'scaled_dot_product_attention: diyfa': 1})" in lines
    assert lines[-11::2] == [
        "pytorch False False", "transformers True True", "diffusers True True", "flash_attn True True",
        "flash_attn_3 True True", "flash_attn_npu True True",
    ]  # fmt: skip


# For each row of the table, a column after another: what shows that the cell is true, by its letter or "refused".
FILES = {
    "f": "integrations/test_pytorch_flash.py",
    "p": "integrations/test_pytorch_cuda.py",
    "w": "integrations/test_pytorch_whole.py",
    "t": "integrations/test_transformers.py",
    "d": "integrations/test_diffusers.py",
    "3": "frontend/test_flash_attn_3.py",
    "n": "npu/test_torch_attention.py",
}
# Files whose tests take CUDA tensors where there are some (`eager_budget.DEVICE`), and their tests that do not, or that
# have not been run there.
ON_ANY_DEVICE = "wtd3"
CPU_ALONE = {
    "t:test_continuous_batching", "w:test_gradient_checkpointing", "d:test_half_precision",
    "d:test_autocast_and_gradient_checkpointing", "d:test_export", "3:test_autocast", "3:test_compiled_and_exported",
    "t:test_attention_in_eight_bits_is_asked_for", "d:test_attention_in_eight_bits_is_asked_for",
    "3:test_float8_with_descales",
}  # fmt: skip
G_DENSE, G_VARLEN = "g=p:test_scaled_dot_product", "g=p:test_varlen_attn"
F_BOTH, N_VARLEN, N_LAYER = "c=f:test_dense", "n=n:test_varlen_attn", "n=n:test_a_layer_of_transformers"
F_SDPA = f"c=f:test_scaled_dot_product {G_DENSE} {N_VARLEN}"
W_MASKS, W_CAUSAL = ("c=w:test_masks n=n:test_masks", "c=w:test_top_left_causal n=n:test_top_left_causal")
T_BOTH, T_PACKED = f"c=t:test_decoders {N_LAYER}", "c=t:test_decoders n=n:test_packed_sequences_of_transformers"
T_MASKS, T_HALF = (
    "c=t:test_decoders n=n:test_a_mask_of_transformers_that_says_everything",
    "c=t:test_half_precision n=n:test_a_mask_of_transformers_that_says_everything",
)
D_CALLS, D_REFUSED, T_REFUSED = "c=d:test_calls", "refused=d:test_refused", "refused=t:test_refusals"
THREE, THREE_PACKED, THREE_ABSENT = (
    "c=3:test_dense_and_packed_projections n=n:test_flash_attention_3",
    "c=3:test_packed_sequences n=n:test_flash_attention_3",
    "3:test_absent_functions",
)
THREE_PAGES = "c=3:test_packed_queries_as_ascends_training_consistency_calls n=n:test_flash_attn_npu_v3_over_pages"
D_TRAINING = "c=d:test_autocast_and_gradient_checkpointing"
EVIDENCE = {
    "forward and gradients": (f"{F_BOTH} {G_DENSE} {N_VARLEN}", W_MASKS, T_BOTH, D_CALLS, THREE),
    "causal, equal lengths": (F_SDPA, W_CAUSAL, T_PACKED, D_CALLS, THREE),
    "causal, other lengths": (
        F_BOTH, W_CAUSAL, f"c=t:test_generation {N_LAYER}", D_CALLS, THREE_PACKED,
    ),
    "grouped heads": (f"{F_BOTH} {G_DENSE} {N_VARLEN}", W_CAUSAL, T_BOTH, D_CALLS, THREE),
    "padding": ("", W_MASKS, T_BOTH, D_CALLS, ""),
    "any mask, additive bias": ("", W_MASKS, T_MASKS, D_CALLS, ""),
    "gradient of a bias": (
        "", "c=w:test_a_learned_bias n=n:test_a_learned_bias", "c=t:test_t5 n=n:test_a_learned_bias_of_transformers",
        "", "",
    ),
    "packed sequences": (f"c=f:test_varlen_attn {G_VARLEN} {N_VARLEN}", "", T_PACKED, "", THREE_PACKED),
    "window": (f"{F_BOTH} {G_VARLEN} {N_VARLEN}", "", T_BOTH, "", THREE),
    "softcap": ("", "", T_BOTH, "", THREE),
    "sinks": ("", "", T_BOTH, "", ""),
    "half precision": (
        F_SDPA, W_CAUSAL, T_HALF,
        "c=d:test_half_precision g=d:test_a_unet_in_half_precision", THREE,
    ),
    "autocast": ("", "c=w:test_autocast", "c=t:test_half_precision", D_TRAINING, "c=3:test_autocast"),
    "dropout": (
        "c=f:test_dropout_travels_in_rng_state g=p:test_graphs_and_dropout", "c=w:test_dropout",
        "c=t:test_dropout_under_gradient_checkpointing", "c=d:test_dropout_and_compiled_graphs", "",
    ),
    "static and dynamic caches, generated tokens": (
        "", "", "c=t:test_generation n=n:test_one_token_of_transformers", "", "",
    ),
    "gradient checkpointing": (
        "c=f:test_gradient_checkpointing", "c=w:test_gradient_checkpointing", "c=t:test_gradient_checkpointing",
        D_TRAINING, "",
    ),
    "pages, KV cache": (
        "c=f:test_varlen_attn_over_pages", "", "c=t:test_continuous_batching", "", THREE_PAGES,
    ),
    "one split: batch invariance": ("c=f:test_varlen_attn_over_pages", "", "", "", THREE_PAGES),
    "blocks of keys with a global log-sum-exp, as `context_parallel` calls": (
        "c=f:test_blocks_of_keys_as_context_parallel_calls", "", "", D_REFUSED, "",
    ),
    "torch.compile": (
        f"c=f:test_a_compiled_graph {G_DENSE}", "c=w:test_modules_and_compiled_graphs", "c=t:test_compiled_training",
        "c=d:test_dropout_and_compiled_graphs", "c=3:test_compiled_and_exported",
    ),
    "torch.export": (
        "c=f:test_export", "c=w:test_export", "c=t:test_export", "c=d:test_export", "c=3:test_compiled_and_exported",
    ),
    "the weights": ("refused=f:test_refused", "", T_REFUSED, "", ""),
    "float8": (
        "", "", "c=t:test_attention_in_eight_bits_is_asked_for", "c=d:test_attention_in_eight_bits_is_asked_for",
        "c=3:test_float8_with_descales",
    ),
    "qv, chunks, scheduler metadata": ("", "", "", "", f"refused={THREE_ABSENT}"),
}  # fmt: skip


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((Path(ROOT) / "tests" / FILES[file]).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_table() -> None:
    """Every cell says what tests show, and every test that it counts on exists."""
    lines = PAGE.read_text(encoding="utf-8").partition("\n## What is checked")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert [row[0] for row in rows[2:]] == list(EVIDENCE)
    for feature, *cells in rows[2:]:
        assert len(cells) == len(rows[0]) - 1 == len(EVIDENCE[feature])
        for client, cell, evidence in zip(rows[0][1:], cells, EVIDENCE[feature], strict=True):
            shown = dict(part.split("=") for part in evidence.split())
            by_cpu = shown.get("c", ":")
            if by_cpu[0] in ON_ANY_DEVICE and by_cpu not in CPU_ALONE:
                shown["g"] = by_cpu
            said = set(re.findall(r"\b[cgn]\b|refused", cell))
            assert said == set(shown), f"{feature}, {client}: the page says {cell!r}, the tests show {evidence!r}"
            assert said or cell == "–", f"{feature}, {client}: {cell!r}"
            for where in shown.values():
                file, name = where.split(":")
                assert name in names_in(file), f"{feature}, {client}: there is no {name} in {FILES[file]}"
