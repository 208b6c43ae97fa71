"""Models of Transformers by diyfa beside their eager attention: outputs, gradients, generated tokens; on the GPU where
there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import transformers as hf
from eager_budget import assert_within_budget_of
from subprocesses import SUPPORT, run_python
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

import diyfa
from diyfa.integrations import use_in_transformers
from diyfa.integrations.transformers import (
    _by_number,
    _by_padding,
    _by_position,
    attention,
    make_attention_mask,
    paged_attention,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 96}
DECODER = {**SIZES, "intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 128,
           "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "head_dim": 16}  # fmt: skip
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
DECODERS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: hf.LlamaConfig(**DECODER),
    "Qwen3": lambda: hf.Qwen3Config(**DECODER),
    "Mistral": lambda: hf.MistralConfig(**DECODER, sliding_window=5),
    "Gemma2": lambda: hf.Gemma2Config(**DECODER, **LAYERS, attn_logit_softcapping=4.0, query_pre_attn_scalar=16),
    "Gemma3": lambda: hf.Gemma3TextConfig(**DECODER, **LAYERS, query_pre_attn_scalar=16),
    "gpt-oss": lambda: hf.GptOssConfig(**DECODER, **LAYERS, num_local_experts=2, num_experts_per_tok=1),
    "Llama4": lambda: hf.Llama4TextConfig(
        **DECODER, attention_chunk_size=5, num_local_experts=1, num_experts_per_tok=1, intermediate_size_mlp=96,
        layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0],
    ),
}  # fmt: skip
TOLERANCE = {"atol": 2e-5, "rtol": 2e-4}


@pytest.fixture(autouse=True)
def handle() -> Iterator[Any]:
    handle = use_in_transformers()
    with torch.device(DEVICE), diyfa.use_backend("cpu") if DEVICE == "cpu" else nullcontext():
        yield handle
    handle.remove()


def decoder(name: str, attention: str) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(DECODERS[name](), attn_implementation=attention)
    for parameter_name, parameter in model.named_parameters():
        if "sinks" in parameter_name:
            torch.nn.init.normal_(parameter, std=2.0)
    return model.eval()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def tokens(batch: int = 2, length: int = 17) -> torch.Tensor:
    return torch.randint(3, 96, (batch, length), generator=seeded(1), device=DEVICE)


def side_by_side(make: Callable[[str], Any], run: Callable[[Any], torch.Tensor], train: bool = True) -> None:
    """`run(model)` and the gradient of every parameter agree between eager attention and diyfa."""
    found = {}
    for how in ("eager", "diyfa"):
        model = make(how)
        out = run(model)
        gradients: dict[str, Any] = {}
        if train:
            weights = torch.randn(out.shape, generator=seeded(4))
            (out * weights).sum().backward()
            gradients = {name: p.grad for name, p in model.named_parameters()}
        found[how] = out.detach(), gradients
    (want, expected), (got, gradients) = found["eager"], found["diyfa"]
    torch.testing.assert_close(got, want, **TOLERANCE)
    largest = max((float(x.abs().max()) for x in expected.values() if x is not None), default=0.0)
    for name, want in expected.items():
        if want is None:
            assert gradients[name] is None, name
            continue
        scale = max(float(want.abs().max()), 0.01 * largest)  # some gradients are nothing but rounding errors
        error = float((gradients[name] - want).abs().max()) / scale
        assert error <= 1e-4, f"the gradient of {name} is off by {error} of the largest"


COLUMNS = torch.arange(17, device=DEVICE)
MASKS = {
    "whole": None,
    "padded right": torch.tensor([[17], [9]], device=DEVICE) > COLUMNS,
    "padded left": torch.tensor([[0], [6]], device=DEVICE) <= COLUMNS,
    "padded within": (COLUMNS % 5 != 3) | torch.tensor([[True], [False]], device=DEVICE),
    "packed": None,
    "a mask of one's own": None,
}


# Llama4 of Transformers 5.17 takes masks of two dimensions only, and cannot generate with a static cache; the eager
# attention of gpt-oss does not look at position ids.
IMPOSSIBLE = {("Llama4", "a mask of one's own"), ("gpt-oss", "packed")}
MASKED = [(name, mask) for name in DECODERS for mask in MASKS if (name, mask) not in IMPOSSIBLE]
CACHED = [
    (name, cache) for name in DECODERS for cache in ("dynamic", "static", None) if (name, cache) != ("Llama4", "static")
]


@pytest.mark.parametrize("name, masked", MASKED)
def test_decoders(handle: Any, name: str, masked: str) -> None:
    mask = MASKS[masked]
    inputs: dict[str, Any] = {"input_ids": tokens(), "use_cache": False}
    seen = torch.ones(2, 17, dtype=torch.bool) if mask is None else mask
    if mask is not None:
        inputs["attention_mask"] = mask.long()
    if masked == "packed":
        inputs["position_ids"] = torch.cat([torch.arange(n) for n in (5, 11, 1)])[None]
        inputs["input_ids"] = tokens(1)
        seen = seen[:1]
    if masked == "a mask of one's own":  # a tree: each token sees itself and its ancestors
        parents = [(i - 1) // 2 for i in range(17)]
        tree = torch.eye(17, dtype=torch.bool)
        for i in range(1, 17):
            tree[i] |= tree[parents[i]]
        inputs["attention_mask"] = torch.zeros(2, 1, 17, 17).masked_fill(~tree, torch.finfo(torch.float32).min)
    side_by_side(lambda attention: decoder(name, attention), lambda model: model(**inputs).logits[seen])
    ways = {
        "whole": "attention",
        "padded within": "attention with a mask",
        "a mask of one's own": "attention with a mask",
    }
    way = ways.get(masked, "attention of packed sequences")
    assert sum(handle.calls.values()) == 2
    assert handle.calls[f"{way}: diyfa"] == (1 if name == "Llama4" and way != ways["padded within"] else 2)


@pytest.mark.parametrize("gap", [False, True])
@pytest.mark.parametrize("name, cache", CACHED)
def test_generation(handle: Any, name: str, cache: str | None, gap: bool) -> None:
    """The same tokens, by a padded batch that outgrows the sliding windows."""
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 0
    mask[0, 4] = not gap
    options = {"max_new_tokens": 9, "do_sample": False, "cache_implementation": cache, "use_cache": cache is not None}
    if cache is None:
        del options["cache_implementation"]
    found = {}
    for how in ("eager", "diyfa"):
        model = decoder(name, how)
        model.generation_config.update(output_logits=True, return_dict_in_generate=True, disable_compile=True)
        found[how] = model.generate(tokens(2, 7), attention_mask=mask, **options)
    assert torch.equal(found["eager"].sequences, found["diyfa"].sequences)
    if cache == "dynamic" and name != "Llama4":
        way, least = ("attention with a mask", 4) if gap else ("attention of one token", 16)  # windows leave the gap
        assert handle.calls[f"{way}: diyfa"] >= least
    for want, got in zip(found["eager"].logits, found["diyfa"].logits, strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)


def test_a_compiled_decoding_step() -> None:
    """A static cache under torch.compile, as generate compiles it on accelerators."""
    options = {"max_new_tokens": 4, "do_sample": False}
    expected = decoder("Gemma3", "eager").generate(tokens(2, 7), **options)
    model = decoder("Gemma3", "diyfa")
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    assert torch.equal(
        model.generate(tokens(2, 7), cache_implementation="static", disable_compile=True, **options), expected
    )


@pytest.mark.parametrize("masked", ["whole", "padded left"])
def test_compiled_training(masked: str) -> None:
    mask = MASKS[masked]
    inputs = {"input_ids": tokens(), "use_cache": False, "attention_mask": None if mask is None else mask.long()}
    seen = torch.ones(2, 17, dtype=torch.bool) if mask is None else mask
    side_by_side(
        lambda attention: torch.compile(decoder("Gemma3", attention), backend="eager", fullgraph=True),
        lambda model: model(**inputs).logits[seen],
    )


@pytest.mark.parametrize("name", ["Gemma3", "gpt-oss"])
def test_export(name: str) -> None:
    """What was exported with a whole batch computes a padded one."""

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = decoder(name, "diyfa")

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.model(ids, attention_mask=mask, use_cache=False).logits

    mask = MASKS["padded left"]
    assert mask is not None
    exported = torch.export.export(Logits(), (tokens(), torch.ones_like(mask).long()), strict=False).module()
    want = decoder(name, "eager")(tokens(), attention_mask=mask.long(), use_cache=False).logits
    torch.testing.assert_close(exported(tokens(), mask.long())[mask], want[mask], **TOLERANCE)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "gpt-oss"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    def make(attention: str) -> Any:
        model = decoder(name, attention).train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    mask = MASKS["padded left"]
    side_by_side(make, lambda model: model(tokens(), attention_mask=mask.long(), use_cache=False).logits[mask])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "gpt-oss"])
def test_half_precision(name: str, autocast: bool, dtype: torch.dtype) -> None:
    """As near to float32 as eager attention of the same dtype is."""
    mask = MASKS["padded left"]
    assert mask is not None

    def logits(how: str, dtype: torch.dtype) -> torch.Tensor:
        model = decoder(name, how)
        with torch.autocast(DEVICE, dtype, enabled=autocast and dtype != torch.float32):
            model = model if autocast else model.to(dtype)
            return model(tokens(), attention_mask=mask.long(), use_cache=False).logits[mask].detach().to("cpu", dtype)

    want = logits("eager", torch.float32).double()
    assert_within_budget_of(logits("eager", dtype), logits("diyfa", dtype), want)


@pytest.mark.parametrize("name", ["gpt-oss", "Mistral"])
def test_position_ids_that_the_mask_does_not_tell(handle: Any, name: str) -> None:
    """Each sequence is as alone, also where the model masks without a look at position ids: gpt-oss always does, others
    when they fill a cache."""
    model, ids = decoder(name, "diyfa"), tokens(1)
    positions = torch.cat([torch.arange(n) for n in (5, 11, 1)])[None]
    together = model(ids, position_ids=positions, use_cache=name == "Mistral").logits
    assert handle.calls == {"attention of packed sequences: diyfa": 2}
    alone = [model(part, use_cache=False).logits for part in ids.split([5, 11, 1], 1)]
    torch.testing.assert_close(together, torch.cat(alone, 1), **TOLERANCE)
    positions.copy_(torch.arange(17))  # the same tensor with other contents
    whole = model(ids, use_cache=False).logits
    with torch.inference_mode():
        again = model(ids, position_ids=positions.clone(), use_cache=False).logits
    torch.testing.assert_close(again, whole, **TOLERANCE)
    torch.testing.assert_close(model(ids, position_ids=positions, use_cache=False).logits, whole, **TOLERANCE)


ROWS_OF_ONE_SEQUENCE = {
    "gap": torch.tensor([0, 1, 2, 9, 10, 11]),
    "image": torch.tensor([0, 1, 2, 2, 2, 2, 3, 4]),
    "every second": torch.arange(0, 16, 2),
    "interpolated": torch.arange(8) * 0.5,
    "backwards": torch.tensor([0, 1, 2, 5, 4, 3, 6, 7]),
}


@pytest.mark.parametrize("name", ROWS_OF_ONE_SEQUENCE)
def test_position_ids_of_one_sequence(name: str) -> None:
    """Steps other than 1 cut no row: alone or in a batch, by eager attention or by diyfa, its logits are the same."""
    positions = ROWS_OF_ONE_SEQUENCE[name][None]
    ids, found = tokens(1, positions.shape[1]), []
    for how in ("eager", "diyfa"):
        model = decoder("Llama", how)  # a cache keeps Transformers from a look at the positions
        found.append(model(ids, position_ids=positions, use_cache=True).logits)
        found.append(model(ids.repeat(2, 1), position_ids=positions.repeat(2, 1), use_cache=True).logits[:1])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], **TOLERANCE)
    # Without a cache the mask function of Transformers cuts, which eager attention and diyfa follow.
    side_by_side(
        lambda attention: decoder("Llama", attention),
        lambda model: model(ids, position_ids=positions, use_cache=False).logits,
    )


def test_position_ids_of_three_dimensions(handle: Any) -> None:
    """Time, height and width of an image's tokens repeat within a sequence."""
    q, k, v = (torch.randn(1, heads, 6, 16) for heads in (4, 2, 2))
    positions = torch.tensor([[0, 1, 1, 1, 1, 2], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]])[:, None]
    found, _ = attention(SimpleNamespace(is_causal=True), q, k, v, None, position_ids=positions)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found.transpose(1, 2), want, **TOLERANCE)
    assert handle.calls == {"attention: diyfa": 1}


@pytest.mark.parametrize("how", ["eager", "diyfa"])
def test_a_sliding_cache_that_records_its_past(how: str) -> None:
    """It hands its layers more keys than the mask was made for, until it is cropped."""
    model = decoder("Mistral", how)
    cache = hf.DynamicCache(config=model.config)
    cache.activate_past_recording()
    ids = tokens(1, 12)
    want = decoder("Mistral", "eager")(ids, use_cache=False).logits
    with torch.no_grad():
        model(ids[:, :9], past_key_values=cache)
        for layer in cache.layers:
            layer.crop(0)
        found = model(ids[:, 9:11], past_key_values=cache).logits
        torch.testing.assert_close(found, want[:, 9:11], **TOLERANCE)
        with pytest.raises((ValueError, RuntimeError), match=r"made for 5 keys, but MistralAttention has 7|must match"):
            model(ids[:, 11:], past_key_values=cache)


@pytest.mark.parametrize("masked", ["whole", "padded left", "padded right"])
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_a_static_cache_in_two_steps(handle: Any, name: str, masked: str) -> None:
    """Rows of the cache that no token has reached are not seen, with and without padding."""
    mask, found = MASKS[masked], []
    for how in ("eager", "diyfa"):
        model = decoder(name, how)
        cache = hf.StaticCache(config=model.config, max_cache_len=24)
        with torch.no_grad():
            for rows in (slice(0, 11), slice(11, 17)):
                seen = None if mask is None else mask[:, : rows.stop].long()
                logits = model(tokens()[:, rows], attention_mask=seen, past_key_values=cache).logits
                found.append(logits if mask is None else logits[mask[:, rows]])
    for want, got in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)


def test_packed_lengths_that_a_collator_counted(handle: Any) -> None:
    offsets = torch.tensor([0, 5, 16, 17], dtype=torch.int32)
    counted = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 11, "max_length_k": 11}
    positions = torch.cat([torch.arange(n) for n in (5, 11, 1)])[None]

    def run(model: Any) -> torch.Tensor:
        extras = counted if model.config._attn_implementation == "diyfa" else {}
        return model(tokens(1), position_ids=positions, use_cache=False, **extras).logits

    side_by_side(lambda attention: decoder("Qwen3", attention), run)
    assert set(handle.calls) == {"attention of packed sequences: diyfa"}
    handle.calls.clear()
    side_by_side(lambda attention: decoder("Llama4", attention), run)  # with chunks, which only a mask says
    assert handle.calls == {"attention of packed sequences: diyfa": 1, "attention with a mask: diyfa": 1}
    with pytest.raises(ValueError, match="an attention_mask with padding and the lengths of packed sequences exclude"):
        decoder("Qwen3", "diyfa")(tokens(1), attention_mask=(torch.arange(17) > 3).long()[None], **counted)


def encoder(config: Any, kind: Any) -> Callable[[str], Any]:
    def make(attention: str) -> Any:
        torch.manual_seed(0)
        return kind._from_config(config(), attn_implementation=attention).eval()

    return make


BERTS: dict[str, tuple[Callable[[], Any], Any]] = {
    "BERT": (lambda: hf.BertConfig(**SIZES, intermediate_size=96), hf.BertModel),
    "ModernBERT": (  # bidirectional windows
        lambda: hf.ModernBertConfig(
            **SIZES, intermediate_size=96, local_attention=6, global_attn_every_n_layers=2, pad_token_id=0
        ),
        hf.ModernBertModel,
    ),
}


@pytest.mark.parametrize("name", BERTS)
def test_padded_and_whole_batches(name: str) -> None:
    mask, make = MASKS["padded right"], encoder(*BERTS[name])
    side_by_side(make, lambda model: model(tokens(), attention_mask=mask.long()).last_hidden_state[mask])
    side_by_side(make, lambda model: model(tokens()).last_hidden_state)


def test_t5gemma() -> None:
    """Its encoder hands on the reach of its bidirectional windows, ModernBERT's that and one more."""
    part = {**DECODER, **LAYERS, "query_pre_attn_scalar": 16}
    config = lambda: hf.T5GemmaConfig(encoder={**part}, decoder={**part}, vocab_size=96)  # noqa: E731
    make = encoder(config, hf.T5GemmaForConditionalGeneration)
    for mask in (MASKS["padded right"], torch.ones(2, 17)):
        inputs = {"attention_mask": mask.long(), "decoder_input_ids": tokens().flip(1), "use_cache": False}
        side_by_side(make, lambda model, i=inputs: model(tokens(), **i).logits)


def test_t5gemma2() -> None:
    """Its decoder joins two masks along the keys, its own and the encoder's."""
    part = {**DECODER, **LAYERS, "query_pre_attn_scalar": 16}
    vision = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
        "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    tokens_of_images = {"boi_token_index": 91, "eoi_token_index": 92, "image_token_index": 93}
    config = lambda: hf.T5Gemma2Config(  # noqa: E731
        encoder={"text_config": {**part}, "vision_config": vision, "mm_tokens_per_image": 16, **tokens_of_images},
        decoder={**part}, image_token_index=93, eoi_token_index=92,
    )  # fmt: skip
    make, ids = encoder(config, hf.T5Gemma2ForConditionalGeneration), tokens().clamp(max=90)
    for masked in ("whole", "padded right"):
        mask = MASKS[masked]
        inputs = {"decoder_input_ids": ids.flip(1), "use_cache": False}
        if mask is not None:
            inputs |= {"attention_mask": mask.long(), "decoder_attention_mask": mask.flip(0).long()}
        seen = torch.ones(2, 17, dtype=torch.bool) if mask is None else mask.flip(0)
        side_by_side(make, lambda model, i=inputs, seen=seen: model(ids, **i).logits[seen])


def test_moonshine() -> None:
    """Its decoder says that it is causal only where it has no mask."""
    config = lambda: hf.MoonshineConfig(  # noqa: E731
        vocab_size=96, hidden_size=64, intermediate_size=96, encoder_num_hidden_layers=1, decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4, decoder_num_attention_heads=4, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    make, sound = encoder(config, hf.MoonshineForConditionalGeneration), torch.randn(2, 3000, generator=seeded(0))
    for masked in ("padded right", "padded left"):
        mask = MASKS[masked]
        assert mask is not None
        inputs = {"decoder_input_ids": tokens(), "decoder_attention_mask": mask.long(), "use_cache": False}
        side_by_side(make, lambda model, i=inputs, mask=mask: model(sound, **i).logits[mask])
    found = []
    for how in ("eager", "diyfa"):
        model = make(how)
        encoded = model.model.encoder(sound)
        cache = hf.EncoderDecoderCache(hf.StaticCache(model.config, max_cache_len=24), hf.DynamicCache())
        with torch.no_grad():
            found.append(model(encoder_outputs=encoded, decoder_input_ids=tokens(), past_key_values=cache).logits)
    torch.testing.assert_close(found[1], found[0], **TOLERANCE)


@pytest.mark.parametrize("name", ["DeepseekV32", "GlmMoeDsa"])
def test_sparse_attention_by_indices(name: str) -> None:
    """Each query sees the keys that an indexer chose, of those that the mask lets it see."""
    config = lambda: getattr(hf, f"{name}Config")(  # noqa: E731
        **{**DECODER, "num_key_value_heads": 4, "head_dim": 8}, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=32,
        n_group=1, topk_group=1, first_k_dense_replace=2, index_topk=4, index_n_heads=2, index_head_dim=32,
    )  # fmt: skip
    make = encoder(config, getattr(hf, f"{name}ForCausalLM"))
    for masked in ("whole", "padded left", "padded right"):
        mask = MASKS[masked]
        inputs = {} if mask is None else {"attention_mask": mask.long()}
        seen = torch.ones(2, 17, dtype=torch.bool) if mask is None else mask
        side_by_side(make, lambda model, i=inputs, seen=seen: model(tokens(), use_cache=False, **i).logits[seen])
    positions = torch.cat([torch.arange(n) for n in (5, 11, 1)])[None]
    side_by_side(make, lambda model: model(tokens(1), position_ids=positions, use_cache=False).logits)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True}
    for cache in ("dynamic", "static"):
        eager, ours = (
            make(how).generate(tokens(2, 7), attention_mask=mask, cache_implementation=cache, **options)
            for how in ("eager", "diyfa")
        )
        assert torch.equal(eager, ours)


MASK_READERS: dict[str, Callable[[], Any]] = {
    "DeepseekV4": lambda: hf.DeepseekV4Config(
        **{**DECODER, "num_key_value_heads": 1}, q_lora_rank=32, qk_rope_head_dim=8, o_lora_rank=32, o_groups=2,
        layer_types=["compressed_sparse_attention", "heavily_compressed_attention"], sliding_window=5,
        n_routed_experts=2, num_local_experts=2, num_experts_per_tok=1, moe_intermediate_size=32,
        index_topk=2, index_n_heads=2, index_head_dim=32,
    ),
    "Doge": lambda: hf.DogeConfig(**DECODER, keep_window_size=4),
    "BigBirdPegasus": lambda: hf.BigBirdPegasusConfig(
        vocab_size=96, d_model=64, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=96,
        max_position_embeddings=64, is_decoder=True, is_encoder_decoder=False, pad_token_id=0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("masked", ["whole", "padded left", "padded right", "packed"])
@pytest.mark.parametrize("name", MASK_READERS)
def test_models_that_read_their_mask(name: str, masked: str) -> None:
    """They join it with another, form their own from it, or do not say that they are causal."""
    make = encoder(MASK_READERS[name], getattr(hf, f"{name}ForCausalLM"))
    mask, inputs = MASKS[masked], {"use_cache": False}
    seen = torch.ones(2, 17, dtype=torch.bool) if mask is None else mask
    if mask is not None:
        inputs["attention_mask"] = mask.long()
    if masked == "packed":
        inputs["position_ids"] = torch.cat([torch.arange(n) for n in (5, 11, 1)]).expand(2, -1)
    side_by_side(make, lambda model: model(tokens(), **inputs).logits[seen])


ENCODER_DECODERS: dict[str, Callable[[], Any]] = {
    "UMT5": lambda: hf.UMT5Config(
        vocab_size=96, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, pad_token_id=0, dropout_rate=0.0,
        decoder_start_token_id=0, relative_attention_num_buckets=8,
    ),
    "PegasusX": lambda: hf.PegasusXConfig(
        vocab_size=96, d_model=64, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=96,
        decoder_attention_heads=4, decoder_ffn_dim=96, max_position_embeddings=64, num_global_tokens=2, block_size=8,
        pad_token_id=0, decoder_start_token_id=1,
    ),
    "BigBirdPegasus": lambda: hf.BigBirdPegasusConfig(
        vocab_size=96, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=96,
        decoder_attention_heads=4, decoder_ffn_dim=96, max_position_embeddings=64, pad_token_id=0,
        attention_type="original_full",
    ),
}  # fmt: skip


@pytest.mark.parametrize("masked", ["whole", "padded right"])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_modules_that_say_wrongly_whether_they_are_causal(name: str, masked: str) -> None:
    make = encoder(ENCODER_DECODERS[name], getattr(hf, f"{name}ForConditionalGeneration"))
    mask = MASKS[masked]
    inputs = {"decoder_input_ids": tokens().flip(1), "use_cache": False}
    if mask is not None:
        inputs["attention_mask"] = mask.long()
    side_by_side(make, lambda model: model(tokens(), **inputs).logits)


def test_keys_of_any_strides() -> None:
    """Convolutions give keys whose features do not lie side by side."""
    q, k, v = (torch.randn(2, 4, 16, 9, generator=seeded(i)).transpose(2, 3) for i in range(3))
    found, _ = attention(SimpleNamespace(is_causal=True), q, k, v, None)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(found.transpose(1, 2), want, **TOLERANCE)


@pytest.mark.parametrize("mask", [None, MASKS["padded right"], torch.zeros((1, 9), dtype=torch.int32)])
def test_a_window_that_the_mask_does_not_have(mask: torch.Tensor | None) -> None:
    """Layers with full masks may hand the configuration's window on, which eager attention does not read."""
    q, k, v = (torch.randn(2 if mask is None else mask.shape[0], 4, 17, 16, generator=seeded(i)) for i in range(3))
    if mask is not None and mask.dtype == torch.int32:
        q, k, v = (x[:, :, :9] for x in (q, k, v))
    module = SimpleNamespace(is_causal=True)
    want, _ = attention(module, q, k, v, mask)
    found, _ = attention(module, q, k, v, mask, sliding_window=3)
    assert torch.equal(found, want)


def test_a_mask_without_its_window() -> None:
    """The size of a window may stand beside a mask that has none: DiffusionGemma sees both ways, and everything."""
    arguments = {"config": hf.MistralConfig(**DECODER, sliding_window=5), "local_size": 5}
    for function in (causal_mask_function, bidirectional_mask_function):
        skips = {"allow_is_causal_skip": True, "allow_is_bidirectional_skip": True}
        found = make_attention_mask(2, 9, 9, mask_function=function, **arguments, **skips)
        assert found is None or found.dtype == torch.bool
        padding = MASKS["padded right"]
        found = make_attention_mask(2, 17, 17, mask_function=function, attention_mask=padding, **arguments, **skips)
        assert found.dtype == torch.bool and torch.equal(found.flatten(1), padding)


KINDS = {
    "causal": causal_mask_function,
    "causal window": sliding_window_causal_mask_function(4),
    "both ways": bidirectional_mask_function,
    "window both ways": sliding_window_bidirectional_mask_function(4),
}
# Queries, keys, position of the first query, and of the first key.
PLACES = {
    "alone": (9, 9, 0, 0),
    "behind a cache": (3, 9, 6, 0),
    "in a static cache": (3, 9, 2, 0),
    "in a sliding cache": (3, 7, 9, 5),
    "before longer keys": (3, 9, 0, 0),
    "one token": (1, 9, 0, 0),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_masks_say_what_those_of_sdpa_say(kind: str, place: str, padded: bool) -> None:
    q_length, kv_length, q_offset, kv_offset = PLACES[place]
    padding = torch.arange(12) >= torch.tensor([[0], [7 if q_offset > 6 else 1]]) if padded else None
    causal, window = kind.startswith("causal"), 4 if "window" in kind else None
    arguments = (2, q_length, kv_length, q_offset, kv_offset, KINDS[kind], padding)
    complete = sdpa_mask(*arguments, allow_is_causal_skip=False)
    mask = make_attention_mask(
        *arguments, config=hf.MistralConfig(**DECODER, sliding_window=window), local_size=window,
        allow_is_causal_skip=causal, allow_is_bidirectional_skip=not causal,
    )  # fmt: skip
    q, k, v = (torch.randn(2, 2, n, 16, generator=seeded(n)) for n in (q_length, kv_length, kv_length))
    module = SimpleNamespace(is_causal=causal)
    found, _ = attention(module, q, k, v, mask, sliding_window=window)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, complete)
    seen = complete.any(-1)[:, 0]
    if padding is not None and place == "alone":
        seen &= padding[:, :9]  # the results of padding are nobody's
    torch.testing.assert_close(found[seen], want.transpose(1, 2)[seen], **TOLERANCE)


def test_a_decoder_that_sees_both_ways() -> None:
    config = lambda: hf.MistralConfig(**DECODER, sliding_window=5, is_causal=False)  # noqa: E731
    make, mask = encoder(config, hf.MistralForCausalLM), MASKS["padded left"]
    side_by_side(make, lambda model: model(tokens(), attention_mask=mask.long(), use_cache=False).logits[mask])


def test_siglip() -> None:
    config = lambda: hf.SiglipVisionConfig(  # noqa: E731
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    )
    pixels = torch.randn(2, 3, 32, 32, generator=seeded(0))
    side_by_side(encoder(config, hf.SiglipVisionModel), lambda model: model(pixels).pooler_output)


whisper = encoder(
    lambda: hf.WhisperConfig(
        d_model=64, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=96, decoder_ffn_dim=96, vocab_size=96, num_mel_bins=8, max_source_positions=20,
        max_target_positions=40, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    ),
    hf.WhisperForConditionalGeneration,
)  # fmt: skip


def test_whisper() -> None:
    """Self-attention both ways, causal, and to the encoder."""
    sound = torch.randn(2, 8, 40, generator=seeded(0))
    side_by_side(whisper, lambda model: model(sound, decoder_input_ids=tokens(2, 9), use_cache=False).logits)


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_whisper_generates(cache: str, beams: int) -> None:
    sound, found = torch.randn(2, 8, 40, generator=seeded(0)), []
    for how in ("eager", "diyfa"):
        model = whisper(how)
        model.generation_config.update(output_logits=True, return_dict_in_generate=True, disable_compile=True)
        options = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams, "cache_implementation": cache}
        found.append(model.generate(sound, **options))
    eager, ours = found
    assert torch.equal(eager.sequences, ours.sequences)
    for want, got in zip(eager.logits, ours.logits, strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)


def test_bart(handle: Any) -> None:
    """As many tokens as the encoder has, of which some are padding: every one of them sees the encoder's."""
    config = lambda: hf.BartConfig(  # noqa: E731
        vocab_size=96, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=96,
        decoder_attention_heads=4, decoder_ffn_dim=96, max_position_embeddings=32, decoder_start_token_id=2,
    )  # fmt: skip
    make = encoder(config, hf.BartForConditionalGeneration)
    for masked in ("padded left", "padded right"):
        mask = MASKS[masked]
        assert mask is not None
        inputs = {"attention_mask": mask.long(), "decoder_input_ids": tokens().flip(1), "use_cache": False}
        side_by_side(make, lambda model, i=inputs: model(tokens(), **i).logits)
    assert handle.calls == {"attention of packed sequences: diyfa": 4, "attention: diyfa": 2}


t5 = encoder(
    lambda: hf.T5Config(
        vocab_size=96, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, pad_token_id=0,
        decoder_start_token_id=0, eos_token_id=1, relative_attention_num_buckets=8, dropout_rate=0.0,
    ),
    hf.T5ForConditionalGeneration,
)  # fmt: skip


def test_t5(handle: Any) -> None:
    """A learned bias of positions, with and without padding, and its gradient."""
    mask = MASKS["padded right"]
    for inputs in ({"attention_mask": mask.long()}, {}):
        side_by_side(t5, lambda model, i=inputs: model(tokens(), decoder_input_ids=tokens(2, 9), **i).logits)
    assert sum(handle.calls.values()) == 12
    found = [t5(how).generate(tokens(), max_new_tokens=6, do_sample=False) for how in ("eager", "diyfa")]
    assert torch.equal(*found)


def test_offsets_of_sequences() -> None:
    """Each sample begins anew, whatever the one before ended with."""
    one, gap = torch.tensor([[0, 0, 0], [0, 0, 0]]), torch.tensor([[True, False, True]])
    left = torch.tensor([[True, True, True], [False, True, True]])
    right = torch.tensor([[True, True, True], [True, False, False]])
    assert _by_number(one)[0].tolist() == [0, 3, 6] and _by_number(one)[1] == 3
    assert _by_position(torch.tensor([[4, 5, 6]])) is None
    assert _by_position(torch.tensor([[0, 1, 0]]))[0].tolist() == [0, 2, 3]
    assert _by_position(torch.tensor([[2, 3, 2, 3, 9]]))[0].tolist() == [0, 2, 5]
    (offsets, longest), padding, samples = _by_padding(left)
    assert (offsets.tolist(), longest, padding.tolist()) == ([0, 3, 4, 6], 3, [0, 1])
    assert samples.tolist() == [0, 1, 1, 2]
    (offsets, longest), padding, samples = _by_padding(right)
    assert (offsets.tolist(), longest, padding) == ([0, 3, 4, 6], 3, None)
    assert samples.tolist() == [0, 1, 2, 2]
    assert _by_padding(right & False)[2].tolist() == [0, 1, 2]
    assert _by_padding(gap) == (None, None, None)


@pytest.mark.parametrize("mask", [MASKS["padded left"], MASKS["padded right"], MASKS["padded within"]])
def test_one_token_over_padded_keys(mask: torch.Tensor) -> None:
    q, k, v = (torch.randn(2, heads, n, 16) for heads, n in ((4, 1), (2, 17), (2, 17)))
    found, _ = attention(SimpleNamespace(is_causal=True), q, k, v, mask)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask[:, None, None], enable_gqa=True)
    torch.testing.assert_close(found.transpose(1, 2), want, **TOLERANCE)


@pytest.mark.parametrize("shape", [(2, 1, 9, 9), (1, 1, 9, 9), (2, 1, 1, 9), (2, 6, 9, 9)], ids=str)
@pytest.mark.parametrize("boolean", [True, False])
def test_masks_of_four_dimensions(shape: tuple[int, ...], boolean: bool) -> None:
    """They say everything, as for sdpa: the module's causality does not count."""
    q, k, v = (torch.randn(2, heads, 9, 20, generator=seeded(heads)).requires_grad_() for heads in (6, 2, 2))
    mask = torch.randn(shape, generator=seeded(3))
    mask = (mask > -0.5) | (torch.arange(9) == 0) if boolean else mask
    found, _ = attention(SimpleNamespace(is_causal=True), q, k, v, mask, scaling=0.3, sliding_window=3)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)
    weights = torch.randn(want.shape, generator=seeded(5))
    for got, expected in zip(
        (found.transpose(1, 2), *torch.autograd.grad((found.transpose(1, 2) * weights).sum(), (q, k, v))),
        (want, *torch.autograd.grad((want * weights).sum(), (q, k, v))),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, **TOLERANCE)


def test_one_token_that_learns() -> None:
    """The kernels that divide the keys have no gradient."""
    q, k, v = (torch.randn(2, 4, n, 16, requires_grad=True) for n in (1, 17, 17))
    found, _ = attention(SimpleNamespace(is_causal=True), q, k, v, None)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    for got, expected in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (found, want)), strict=True):
        torch.testing.assert_close(got, expected, **TOLERANCE)


def test_a_position_bias_over_a_partly_filled_cache() -> None:
    q, k, v = (torch.randn(2, 4, n, 16) for n in (3, 17, 17))
    bias, room = torch.randn(1, 4, 3, 17), torch.empty((0, 17, 9), dtype=torch.bool)
    found, _ = attention(SimpleNamespace(is_causal=True), q, k, v, room, position_bias=bias)
    causal = torch.full((3, 9), float("-inf")).triu(7)
    want = torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :9], v[:, :, :9], bias[..., :9] + causal)
    torch.testing.assert_close(found.transpose(1, 2), want, **TOLERANCE)


def test_dropout() -> None:
    """It is diyfa's own, drawn from PyTorch's generator."""
    q, k, v = (torch.randn(2, heads, 9, 16, generator=seeded(0)) for heads in (4, 2, 2))
    torch.manual_seed(5)
    found, _ = attention(SimpleNamespace(is_causal=True), q, k, v, None, dropout=0.3)
    torch.manual_seed(5)
    want = diyfa.flash_attention(q, k, v, causal=True, dropout_p=0.3)
    assert torch.equal(found, want.transpose(1, 2))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_dropout_under_gradient_checkpointing(padded: bool, reentrant: bool) -> None:
    """The second forward drops what the first did: checkpointing changes no gradient."""
    mask = MASKS["padded left"]
    assert mask is not None
    inputs = {"attention_mask": mask.long()} if padded else {}
    found = []
    for checkpointed in (False, True):
        model = decoder("Llama", "diyfa").train()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.4
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(6)
        model(tokens(), use_cache=False, **inputs).logits[mask].square().sum().backward()
        found.append([x.grad for x in model.parameters()])
    model.zero_grad()
    model.gradient_checkpointing_disable()
    model.eval()(tokens(), use_cache=False, **inputs).logits[mask].square().sum().backward()
    for once, twice, without in zip(*found, [x.grad for x in model.parameters()], strict=True):
        torch.testing.assert_close(twice, once, **TOLERANCE)
        assert not torch.allclose(twice, without, **TOLERANCE)


PAGED = """
import sys, torch, transformers
from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler
from test_transformers import decoder, tokens
from diyfa.integrations import use_in_transformers
PagedAttentionMemoryHandler.get_available_memory = lambda self: 10**9  # a CPU has none
handle = use_in_transformers()
config = transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64, block_size=16)
for name in sys.argv[1:]:
    found = []
    for attention in ("paged|eager", "paged|diyfa"):
        model = decoder(name, attention)
        model.generation_config.update(eos_token_id=95, pad_token_id=0, max_new_tokens=6, do_sample=False)
        prompts = [tokens(1, length)[0].tolist() for length in (7, 3, 12)]
        results = model.generate_batch(prompts, model.generation_config, config, progress_bar=False)
        found.append([results[key].generated_tokens for key in sorted(results)])
    print(name, found[0] == found[1], [len(x) for x in found[1]], handle.calls["paged attention: diyfa"])
"""


def test_continuous_batching() -> None:
    """It generates in a thread, so that the backend is asked for by the environment."""
    names = ("Llama", "Mistral", "Gemma2", "gpt-oss")  # Mistral hands its window on, its modules do not have it
    lines = run_python(
        PAGED, Path(__file__).parent, SUPPORT, arguments=names, DIYFA_BACKEND="cpu", CUDA_VISIBLE_DEVICES=""
    ).splitlines()
    assert [line for line in lines if line.split()[0] in names] == [
        f"{name} True [6, 6, 6] {12 * (i + 1)}" for i, name in enumerate(names)
    ]


class Pages:
    """What `paged_attention` reads of Transformers' cache, for one layer."""

    layer_index_to_group_indices: ClassVar = {0: (0, 0)}
    block_size, num_key_value_heads, head_dim = 16, 2, 16

    def __init__(self, window: int | None) -> None:
        self.group_cache_managers = [SimpleNamespace(sliding_window=window)]
        self.key_cache, self.value_cache = ([torch.randn(8 * 16, 2, 16, generator=seeded(i))] for i in range(2))


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("window", [9, 20, None])
@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_decoding_over_pages(
    handle: Any, groups: int, window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    """The way with a block table: each request's new token is appended and attends to its pages."""
    cache, lengths, heads = Pages(window), [5, 33], 2 * groups
    table = torch.tensor([[[3, -1, -1], [1, 7, 2]]], dtype=torch.int32)
    q, k, v = (torch.randn(1, n, 2, 16) for n in (heads, 2, 2))
    sinks = torch.randn(heads) * 3 if with_sinks else None
    module = SimpleNamespace(layer_idx=0, scaling=0.3, sliding_window=window)
    kind = "sliding_attention" if window else "full_attention"
    with torch.no_grad():
        out, _ = paged_attention(
            module, q, k, v, None, cache, cu_seq_lens_q=torch.tensor([0, 1, 2]),
            cu_seq_lens_k={kind: torch.tensor([0, 5, 38])}, max_seqlen_q=1, max_seqlen_k={kind: 33},
            block_table=table, softcap=softcap, s_aux=sinks,
        )  # fmt: skip
    for b, length in enumerate(lengths):
        rows = [int(table[0, b, j // 16]) * 16 + j % 16 for j in range(length)]
        keys, values = cache.key_cache[0][rows], cache.value_cache[0][rows]
        assert torch.equal(keys[-1], k[0, :, b]) and torch.equal(values[-1], v[0, :, b])
        scores = torch.einsum("hd,jhd->hj", q[0, :, b] * 0.3, keys.repeat_interleave(groups, 1))
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        scores[:, : max(0, length - (window or length))] = float("-inf")
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None]), 1)
        weights = scores.softmax(-1)[:, :length]
        want = torch.einsum("hj,jhd->hd", weights, values.repeat_interleave(groups, 1))
        torch.testing.assert_close(out[b], want, **TOLERANCE)
    assert handle.calls == {"paged attention over pages: diyfa": 1}


def test_refusals() -> None:
    sliding = torch.empty((0, 3, 1), dtype=torch.uint8)
    x = torch.zeros(1, 2, 3, 16)
    with pytest.raises(ValueError, match="masks with a sliding window but does not hand it to its attention"):
        attention(torch.nn.Linear(1, 1), x, x, x, sliding)
    with pytest.raises(ValueError, match="SimpleNamespace masks with a sliding window but does not hand it"):
        paged_attention(SimpleNamespace(layer_idx=0), x, x, x, None, Pages(5))
    with pytest.raises(ValueError, match="position_bias cannot go with packed sequences"):
        attention(None, x, x, x, torch.zeros((1, 3), dtype=torch.int32), position_bias=torch.zeros(1, 2, 3, 3))
    with pytest.raises(TypeError, match="must be a floating-point tensor"):
        attention(None, x, x, x, torch.ones((1, 1, 3, 3), dtype=torch.int64))
    with pytest.raises(ValueError, match="block_indices is not supported"):
        attention(None, x, x, x, None, block_indices=torch.zeros(1))
    for keys in (2, 4):
        with pytest.raises(ValueError, match=f"the mask was made for {keys} keys, but Linear has 3"):
            attention(torch.nn.Linear(1, 1), x, x, x, torch.ones((1, keys), dtype=torch.bool))
    with pytest.raises(ValueError, match="the mask was made for 9 keys, but Linear has 3"):
        attention(torch.nn.Linear(1, 1), x, x, x, torch.empty((0, 9, 7), dtype=torch.bool))
    with pytest.raises(ValueError, match="a mask must be"):
        attention(None, x, x, x, torch.zeros(1, 3, 3))
    with pytest.raises(ValueError, match="indices of the keys that a query sees need a mask"):
        attention(None, x, x, x, None, indices=torch.zeros((1, 3, 1), dtype=torch.int32))
    model = decoder("Llama", "diyfa")
    with pytest.raises(ValueError, match="attention_mask must have two or four dimensions"):
        model(tokens(), attention_mask=torch.ones(2, 17, 17, dtype=torch.bool))
    with pytest.raises(ValueError, match="output_attentions=True needs the weights"):
        model(tokens(), output_attentions=True)


@pytest.fixture(params=["int8", "float8"])
def quantizing(handle: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    handle.remove()
    handle = use_in_transformers(quantize=request.param)
    yield handle
    handle.remove()


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    found, exact = found.detach().float(), exact.detach()
    return float((found - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def test_attention_in_eight_bits_is_asked_for(quantizing: Any) -> None:
    """And trained: gradients go straight through. The handle and its counts say so."""
    q, k, v = (torch.randn(2, heads, 40, 16, generator=seeded(heads), device=DEVICE) for heads in (4, 2, 2))
    leaves = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    exact = [x.detach().float().requires_grad_() for x in leaves]
    module = torch.nn.Linear(1, 1)
    found, _ = attention(module, *leaves, None)
    want = diyfa.flash_attention(*exact, causal=True).transpose(1, 2)
    limit = 0.03 if quantizing.detail == "int8" else 0.1
    assert found.dtype == torch.bfloat16 and 1e-3 < relative_error(found, want) < limit
    dout = torch.randn(found.shape, generator=seeded(5), device=DEVICE)
    gradients = torch.autograd.grad(found, leaves, dout.bfloat16())
    for got, exact_gradient in zip(gradients, torch.autograd.grad(want, exact, dout), strict=True):
        assert 1e-3 < relative_error(got, exact_gradient) < limit
    assert quantizing.calls == {f"attention: diyfa in {quantizing.detail}": 1}
    assert use_in_transformers(quantizing.detail) is quantizing
    with pytest.raises(ValueError, match=r"diyfa is in Transformers with quantize='.*': remove that handle first"):
        use_in_transformers()
    with pytest.raises(ValueError, match="quantize must be None or one of float8, int8"):
        use_in_transformers("int4")


def test_padded_batches_in_eight_bits(quantizing: Any) -> None:
    q, k, v = (torch.randn(2, heads, 40, 16, generator=seeded(heads), device=DEVICE) for heads in (4, 2, 2))
    padding = (torch.arange(40, device=DEVICE) >= torch.tensor([[0], [13]], device=DEVICE))[..., None]  # causal
    module = torch.nn.Linear(1, 1)
    with torch.no_grad():
        found, _ = attention(module, *(x.bfloat16() for x in (q, k, v)), padding)
    limit = 0.03 if quantizing.detail == "int8" else 0.1
    for b, start in enumerate((0, 13)):
        want = diyfa.flash_attention(*(x[b : b + 1, :, start:].bfloat16().float() for x in (q, k, v)), causal=True)
        assert 1e-3 < relative_error(found[b : b + 1, start:], want.transpose(1, 2)) < limit
    assert quantizing.calls == {f"attention of packed sequences: diyfa in {quantizing.detail}": 1}
    with pytest.raises(ValueError, match="does not train packed sequences, nor padded batches"):
        attention(module, q.bfloat16().requires_grad_(), k.bfloat16(), v.bfloat16(), padding)


@pytest.mark.parametrize("padded", [False, True])
def test_eight_bits_under_autocast(quantizing: Any, padded: bool) -> None:
    """Rotary embeddings leave q and k in float32, beside v in autocast's dtype."""
    q, k, v = (torch.randn(2, heads, 40, 16, generator=seeded(heads), device=DEVICE) for heads in (4, 2, 2))
    padding = torch.arange(40, device=DEVICE) >= torch.tensor([[0], [13]], device=DEVICE) if padded else None
    module = torch.nn.Linear(1, 1)
    with torch.no_grad():
        want, _ = attention(module, *(x.bfloat16() for x in (q, k, v)), padding)
        with torch.autocast(DEVICE, torch.bfloat16):
            found, _ = attention(module, q, k, v.bfloat16(), padding)
    assert found.dtype == torch.bfloat16 and torch.equal(found, want)


def test_generation_reads_its_cache_in_16_bits(quantizing: Any) -> None:
    model = decoder("Llama", "diyfa").bfloat16()
    with pytest.warns(UserWarning, match="new tokens over a cache run in the cache's dtype"):
        model.generate(tokens(2, 7), max_new_tokens=4, do_sample=False)
    assert quantizing.calls == {f"attention: diyfa in {quantizing.detail}": 2, "attention of one token: diyfa": 6}
    x = torch.zeros(1, 2, 3, 16)
    with pytest.raises(ValueError, match=r"continuous batching .* does not go with quantize"):
        paged_attention(SimpleNamespace(layer_idx=0), x, x, x, None, Pages(None))


def test_models_that_attend_by_themselves() -> None:
    """Their causality is in the mask, and they never come to diyfa."""
    config = hf.BloomConfig(vocab_size=96, hidden_size=64, n_layer=1, n_head=4)
    model = hf.BloomForCausalLM._from_config(config, attn_implementation="diyfa")
    with pytest.raises(ValueError, match="models of BloomConfig have an attention of their own"):
        model(tokens())


def test_removal() -> None:
    handle = use_in_transformers()
    assert use_in_transformers() is handle
    model = decoder("Llama", "diyfa")
    handle.remove()
    assert not handle.active
    with pytest.raises((KeyError, ValueError)):
        model(tokens())
    with pytest.raises(ValueError, match="diyfa"):
        decoder("Llama", "diyfa")
