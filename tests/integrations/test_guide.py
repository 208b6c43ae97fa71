"""The blocks of docs/integrations.md, one after another, on the CPU."""

from __future__ import annotations

import re
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
