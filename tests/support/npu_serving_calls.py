"""Kernels that random calls of models launch and their warm-up lacks, printed as JSON: see tests/npu/test_npu_ready.py.

Needs triton-ascend without its interpreter, and no device: launches are recorded."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from types import SimpleNamespace

import torch

torch.npu = SimpleNamespace(current_device=lambda: 0, is_available=lambda: False)  # type: ignore[attr-defined]

from diyfa.backends import npu  # noqa: E402
from diyfa.ready import models  # noqa: E402
from diyfa.ready.calls import Call, Rows, attention, cache  # noqa: E402
from diyfa.ready.recording import record  # noqa: E402

CONFIGS = {
    "llama": {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "torch_dtype": "bfloat16"},
    "gemma2": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "torch_dtype": "bfloat16",
        "sliding_window": 1024, "attn_logit_softcapping": 50.0, "model_type": "gemma2"},
    "gpt_oss": {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "torch_dtype": "bfloat16",
        "sliding_window": 128, "model_type": "gpt_oss", "layer_types": ["full_attention", "sliding_attention"]},
    "mla": {"num_attention_heads": 128, "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "torch_dtype": "bfloat16"},
    "bert": {"num_attention_heads": 12, "hidden_size": 768, "torch_dtype": "float16", "model_type": "bert",
        "architectures": ["BertForMaskedLM"]},
}  # fmt: skip
PAGES = (0, 16, 128)
MAX_TOKENS = 200_000


def calls(model: models.Model, generator: random.Random, count: int) -> Iterator[Call]:
    """Yield `count` calls of training, and as many over caches if the model is causal."""

    def size(least: int, most: int) -> int:
        return int(math.exp(generator.uniform(math.log(least), math.log(most))))

    for _ in range(count):
        options = generator.choice(model.options)
        length = size(1, 8192)
        rows = Rows(min(size(1, 64), max(1, MAX_TOKENS // length)), length, length)
        yield attention(model.heads, rows, model.dtype, generator.random() < 0.5, **options)
        if "causal" not in options:
            continue
        page, queries = generator.choice(PAGES), generator.choice((1, 1, 1, 2, 4, size(1, 2048)))
        if model.latent is not None and queries > 32:  # prompts expand the keys
            continue
        keys = max(size(128, 32768) // 128, -(-queries // 128)) * 128
        rows = Rows(min(size(1, 256), max(1, MAX_TOKENS // queries), max(1, 2**22 // keys)), queries, keys)
        options = {"window_size" if name == "window" else name: value for name, value in options.items()}
        if model.latent is not None:
            yield cache(model.latent, rows, model.dtype, page, latent=True, **options)
        elif page and generator.random() < 0.5:
            longest = generator.choice((queries, max(queries, 512)))
            yield cache(model.heads, rows, model.dtype, page, True, longest=longest, **options)
        else:
            new = {"new": queries} if generator.random() < 0.5 else {}
            yield cache(model.heads, rows, model.dtype, page, **options, **new)


def main() -> None:
    npu.device_name = lambda index: "Ascend910B3"  # type: ignore[assignment]
    found = {}
    for name, config in CONFIGS.items():
        model = models.parse_model(config)
        served = models.serving(model, PAGES), models.serving_more(model, PAGES)
        warmed = record("npu", None, [*models.training(model), *served[0], *served[1]])
        called = record("npu", None, calls(model, random.Random(name), 150))
        missing = [str(key) for key in called.kernels if key not in warmed.kernels]
        refused = [*warmed.refused, *called.refused]
        found[name] = {"called": len(called.kernels), "missing": missing, "refused": refused}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
