"""The calls of a model, derived from the config.json that Hugging Face stores with its weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from diyfa.ready.calls import (
    BF16,
    CHUNKS,
    DECODING,
    FP32,
    HALVES,
    TRAINED,
    Call,
    Heads,
    Rows,
    attention,
    cache,
)

Config = dict[str, Any]
# Encoders, whose tokens see all others: how the names of their architectures end, and types of models.
_ENCODERS = ("ForMaskedLM", "ForSequenceClassification", "ForImageClassification", "VisionModel")
_ENCODER_TYPES = (
    "albert", "bert", "camembert", "clip_vision_model", "deberta-v2", "dinov2", "distilbert", "electra", "esm",
    "modernbert", "mpnet", "nomic_bert", "roberta", "siglip_vision_model", "vit", "wav2vec2", "xlm-roberta",
)  # fmt: skip
_WITH_SINKS = ("gpt_oss",)
_MASKED = "causal"
_FEW_QUERIES = tuple(Rows(4, queries, 8192) for queries in (2, 4, 8, 16, 32))  # short prompts, speculative decoding


class Model(NamedTuple):
    """The properties of a model that attention depends on."""

    heads: Heads
    dtype: torch.dtype
    options: tuple[dict[str, Any], ...]  # arguments of `flash_attention`, one entry for each kind of layer
    latent: Heads | None  # heads of a latent cache, where values are the first features of the keys (MLA)


def read_model(path: Path) -> Model:
    """Read a config.json. Raises ValueError if a needed entry is missing."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no object")
    return parse_model(config)


def parse_model(config: Config) -> Model:
    """Return the model that a config describes. Raises ValueError if a needed entry is missing."""
    outer, config = config, {**config, **_object(config, "text_config")}  # models of text and images nest the text's
    queries = _number(config, "num_attention_heads", "n_head", "num_heads")
    keys = _optional(config, "num_key_value_heads", "num_kv_heads") or queries
    head_dim = _optional(config, "head_dim")
    if head_dim is None:
        head_dim = _number(config, "hidden_size", "n_embd", "d_model") // queries
    heads, latent = Heads(head_dim, 0, queries, keys), None
    if rank := _optional(config, "kv_lora_rank"):
        rotated, plain = _number(config, "qk_rope_head_dim"), _number(config, "qk_nope_head_dim")
        heads = Heads(plain + rotated, _number(config, "v_head_dim"), queries, queries)
        latent = Heads(rank + rotated, rank, queries, 1)
    name = config.get("dtype") or config.get("torch_dtype") or outer.get("dtype") or outer.get("torch_dtype")
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    # "auto", and a float8 dtype of weights, do not tell the dtype of attention.
    return Model(heads, dtype if dtype in (*HALVES, FP32) else BF16, tuple(_options(config)), latent)


def _object(config: Config, name: str) -> Config:
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def _number(config: Config, *names: str) -> int:
    value = _optional(config, *names)
    if value is None:
        raise ValueError(f"the config says no {' or '.join(names)}")
    return value


def _optional(config: Config, *names: str) -> int | None:
    """Return the first of these entries that is a positive number. 0 and -1 mean none, as null does."""
    return next((x for x in map(config.get, names) if type(x) is int and x > 0), None)


def _options(config: Config) -> Iterator[dict[str, Any]]:
    """Yield the options of layers without a window, then those of layers with one, if the model has such layers."""
    shared: dict[str, Any] = {}
    is_encoder = config.get("model_type") in _ENCODER_TYPES and not config.get("is_decoder")
    if not is_encoder and not any(str(name).endswith(_ENCODERS) for name in config.get("architectures") or ()):
        shared[_MASKED] = True
    cap = config.get("attn_logit_softcapping")
    if isinstance(cap, (int, float)) and cap > 0:
        shared["softcap"] = float(cap)
    if config.get("model_type") in _WITH_SINKS:
        shared["sinks"] = True
    if config.get("alibi") or _object(config, "attn_config").get("alibi") or config.get("model_type") == "bloom":
        shared["alibi_slopes"] = True
    window = _optional(config, "sliding_window") if config.get("use_sliding_window", True) else None
    kinds = config.get("layer_types") or ()
    if window is None or any(kind == "full_attention" for kind in kinds) or _alternates(config):
        yield shared
    if window is not None:
        yield shared | {"window": (window - 1, 0) if _MASKED in shared else (window // 2, window // 2)}


def _alternates(config: Config) -> bool:
    """Return whether some layers have no window, for configs that do not list their layers' types."""
    pattern = _optional(config, "sliding_window_pattern", "global_attn_every_n_layers") or 0
    return pattern > 1 or config.get("model_type") == "gemma2"


def training(model: Model) -> Iterator[Call]:
    """Yield batches of few and many tokens, dense and packed, with their backward pass."""
    for options, rows, packed in product(model.options, TRAINED, (False, True)):
        yield attention(model.heads, rows, model.dtype, packed, **options)


def serving(model: Model, pages: tuple[int, ...]) -> Iterator[Call]:
    """Yield decoding steps and long prompts over a cache with `pages` (0: contiguous), with pages also packed ones."""
    yield from _over_caches(model, pages, (*DECODING, *CHUNKS))


def serving_more(model: Model, pages: tuple[int, ...]) -> Iterator[Call]:
    """Yield what a server meets besides `serving`: short prompts, speculative decoding, and appending."""
    yield from _over_caches(model, pages, _FEW_QUERIES)
    if model.latent is None:
        for rows in (DECODING[0], CHUNKS[0]):
            yield from _over_caches(model, pages, (rows,), new=rows.queries)


def _over_caches(model: Model, pages: tuple[int, ...], sizes: tuple[Rows, ...], new: int = 0) -> Iterator[Call]:
    heads = model.latent or model.heads
    for options, page, rows in product(model.options, pages, sizes):
        if _MASKED not in options:
            continue
        if model.latent is not None and rows in CHUNKS:  # prompts expand the latent keys, as in training
            yield attention(model.heads, rows._replace(keys=rows.queries), model.dtype, True, False, **options)
            continue
        arguments = {"window_size" if name == "window" else name: value for name, value in options.items()}
        if model.latent is not None:
            arguments["latent"] = True
        if new:
            yield cache(heads, rows, model.dtype, page, **arguments, new=new)
            continue
        yield cache(heads, rows, model.dtype, page, **arguments)
        if page and model.latent is None:
            yield cache(heads, rows, model.dtype, page, True, **arguments)
            if rows in DECODING:  # batches in which some sequences have one token and others many
                yield cache(heads, rows, model.dtype, page, True, longest=512, **arguments)
