"""vllm-ascend's metadata, planted as its builder makes them, against attention of each sequence by itself."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import diyfa
from diyfa.integrations.vllm_ascend import attention_arguments


class AscendAttentionState(Enum):
    PrefillNoCache = 0
    PrefillCacheHit = 1
    DecodeOnly = 2
    ChunkedPrefill = 3
    SpecDecoding = 4


HEADS, HEADS_KV, BLOCK_SIZE, BLOCKS = 4, 2, 16, 24
# (state, new tokens of each sequence, cached keys of each sequence before the step)
STEPS = [
    ("PrefillNoCache", (5, 33, 1), (0, 0, 0)),
    ("PrefillCacheHit", (7, 20), (16, 33)),
    ("DecodeOnly", (1, 1, 1, 1), (0, 15, 16, 95)),  # the last one fills its row of block_tables
    ("ChunkedPrefill", (1, 1, 40, 9), (30, 63, 0, 50)),
    ("SpecDecoding", (3, 3, 3), (10, 31, 64)),
]


def slots(metadata: Any, block_size: int) -> list[int]:
    """Slots of the step's tokens in the cache, as `block_tables` gives them: vllm-ascend writes keys there."""
    table = metadata.block_tables.tolist()
    start, found = 0, []
    for b, (end, length) in enumerate(zip(metadata.actual_seq_lengths_q, metadata.seq_lens_list, strict=False)):
        for position in range(length - (end - start), length):
            found.append(table[b][position // block_size] * block_size + position % block_size)
        start = end
    return found


class Step:
    """One step: caches with garbage where no sequence is, queries with padding behind them, and metadata."""

    def __init__(
        self, state: str, new: tuple[int, ...], cached: tuple[int, ...], head_dim: int, **changes: Any
    ) -> None:
        generator = torch.Generator().manual_seed(head_dim)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        lengths = [n + c for n, c in zip(new, cached, strict=True)]
        n_tokens, pages = sum(new), 6
        self.keys = [randn(length, HEADS_KV, head_dim) for length in lengths]
        self.values = [randn(length, HEADS_KV, head_dim) for length in lengths]
        self.query, self.new, self.lengths = randn(n_tokens + 3, HEADS, head_dim), new, lengths  # 3 rows of padding
        shuffled = torch.randperm(BLOCKS, generator=generator)[: len(new) * pages]
        ends = torch.tensor(new).cumsum(0)
        self.metadata = SimpleNamespace(**{
            "attn_state": AscendAttentionState[state], "causal": True, "model_runner_type": "generate",
            "num_actual_tokens": n_tokens, "query_start_loc": torch.cat([torch.zeros(1), ends]).to(torch.int32),
            "actual_seq_lengths_q": ends.tolist(), "seq_lens": torch.tensor(lengths), "seq_lens_list": lengths,
            "block_tables": shuffled.reshape(len(new), pages).to(torch.int32), "max_query_len": max(new),
        } | changes)  # fmt: skip
        self.metadata.slot_mapping = torch.tensor(slots(self.metadata, BLOCK_SIZE))
        self.cache = torch.full((2, BLOCKS, BLOCK_SIZE, HEADS_KV, head_dim), float("nan"))
        for b, length in enumerate(lengths):  # earlier steps wrote the rest
            for j in range(length - new[b]):
                block = self.metadata.block_tables[b, j // BLOCK_SIZE]
                self.cache[0, block, j % BLOCK_SIZE] = self.keys[b][j]
                self.cache[1, block, j % BLOCK_SIZE] = self.values[b][j]
        self.key, self.value = (
            torch.cat([*(x[-n:] for x, n in zip(of_all, new, strict=True)), randn(3, HEADS_KV, head_dim)])
            for of_all in (self.keys, self.values)
        )
        # What DeviceOperator.reshape_and_cache does.
        flat = self.cache.reshape(2, BLOCKS * BLOCK_SIZE, HEADS_KV, head_dim)
        flat[0][self.metadata.slot_mapping] = self.key[:n_tokens]
        flat[1][self.metadata.slot_mapping] = self.value[:n_tokens]

    def attend(self, **options: Any) -> torch.Tensor:
        """Return what diyfa computes from the translated metadata."""
        arguments = attention_arguments(
            self.metadata, self.query, self.key, self.value, self.cache, scale=0.1, **options
        )
        return diyfa.flash_attention_varlen(**arguments, backend="cpu")

    def expected(self, **options: Any) -> torch.Tensor:
        """Return attention of each sequence by itself, in float64."""
        start, outputs = 0, []
        for n, k, v in zip(self.new, self.keys, self.values, strict=True):
            q = self.query[start : start + n]
            start += n
            heads_first = [x.double().transpose(0, 1)[None] for x in (q, k, v)]
            out = diyfa.reference_attention(*heads_first, sm_scale=0.1, **options)
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)


@pytest.mark.parametrize("head_dim", [256, 72, 128])
@pytest.mark.parametrize(("state", "new", "cached"), STEPS)
def test_each_state(state: str, new: tuple[int, ...], cached: tuple[int, ...], head_dim: int) -> None:
    step = Step(state, new, cached, head_dim)
    torch.testing.assert_close(step.attend(), step.expected(causal=True).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("state", "new", "cached"), STEPS)
def test_options_of_the_layer(state: str, new: tuple[int, ...], cached: tuple[int, ...]) -> None:
    step = Step(state, new, cached, 256)
    sinks, slopes = torch.linspace(-1, 1, HEADS), torch.linspace(0.1, 0.4, HEADS)
    out = step.attend(sliding_window=8, logits_soft_cap=5.0, sinks=sinks, alibi_slopes=slopes)
    expected = step.expected(causal=True, window=(7, 0), softcap=5.0, sinks=sinks, alibi_slopes=slopes)
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-4)


def test_an_encoder_reads_its_own_keys_in_any_state() -> None:
    step = Step("ChunkedPrefill", (5, 9), (0, 0), 256, causal=False, model_runner_type="pooling")
    step.cache.fill_(float("nan"))
    torch.testing.assert_close(step.attend(), step.expected().float(), rtol=1e-4, atol=1e-4)


def test_a_pooling_model_with_a_causal_mask_reads_the_cache() -> None:
    step = Step("ChunkedPrefill", (5, 9), (20, 0), 64, model_runner_type="pooling")
    torch.testing.assert_close(step.attend(), step.expected(causal=True).float(), rtol=1e-4, atol=1e-4)


def test_a_padding_sequence_at_the_end_changes_no_other() -> None:
    """As the builder pads: one more sequence without a block of its own, of length 1."""
    step = Step("DecodeOnly", (1, 1), (20, 40), 256)
    expected = step.expected(causal=True).float()
    metadata = step.metadata
    metadata.actual_seq_lengths_q = [1, 2, 4]
    metadata.query_start_loc = torch.tensor([0, 1, 2, 4], dtype=torch.int32)
    metadata.seq_lens_list = [21, 41, 2]
    metadata.seq_lens = torch.tensor([21, 41, 2])
    metadata.block_tables = torch.cat([metadata.block_tables, torch.zeros(1, 6, dtype=torch.int32)])
    torch.testing.assert_close(step.attend()[:2], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("longest", [41, 96])
def test_a_graph_names_the_longest_sequence_to_come(longest: int) -> None:
    step = Step("DecodeOnly", (1, 1), (20, 40), 64)
    step.metadata.query_start_loc, step.metadata.block_tables = (
        x.long() for x in (step.metadata.query_start_loc, step.metadata.block_tables)
    )
    arguments = attention_arguments(step.metadata, step.query, None, None, step.cache, scale=1.0, max_seqlen_k=longest)
    assert arguments["max_seqlen_k"] == longest and arguments["seqused_k"].tolist() == [21, 41]
    assert {arguments[name].dtype for name in ("cu_seqlens_q", "seqused_k", "block_table")} == {torch.int32}


def test_slot_mapping_and_block_tables_name_the_same_slots() -> None:
    step = Step("ChunkedPrefill", (2, 1), (15, 31), 64)
    table = step.metadata.block_tables
    expected = [table[0, 0] * 16 + 15, table[0, 1] * 16, table[1, 1] * 16 + 15]
    assert slots(step.metadata, BLOCK_SIZE) == [int(slot) for slot in expected]


@pytest.mark.parametrize(
    ("metadata", "options", "words"),
    [
        ({"attn_state": "Ringing"}, {}, "attn_state must be one of PrefillNoCache, .*got 'Ringing'"),
        ({"actual_seq_lengths_q": [3, 1]}, {}, r"must not decrease, got \[3, 1\]"),
        ({"actual_seq_lengths_q": [1]}, {}, "query_start_loc must have 2 entries, got 3"),
        ({"actual_seq_lengths_q": [1, 900]}, {}, "query has 5 rows"),
        ({"seq_lens_list": [21]}, {}, "2 sequences need as many lengths: seq_lens_list has 1"),
        ({"seq_lens": torch.tensor([21])}, {}, "seq_lens 1"),
        ({"seq_lens_list": [0, 41]}, {}, "sequence 0 has 1 queries and 0 keys"),
        ({"seq_lens_list": [21, 97]}, {}, "sequence 1 has 97 keys, and its row of block_tables room for 96"),
        ({"block_tables": torch.zeros(1, 6, dtype=torch.int32)}, {}, "block_tables must have 2 rows.*got 1"),
        ({"block_tables": None}, {}, "block_tables must be a 2-dimensional tensor of integers, got NoneType"),
        ({"block_tables": torch.zeros(2, dtype=torch.int32)}, {}, r"of integers, got a tensor \(2,\)"),
        ({"block_tables": torch.zeros(2, 6)}, {}, "block_tables must be a .*of torch.float32"),
        ({"query_start_loc": torch.tensor([0, 2, 2])}, {}, r"is \[0, 1, 2\], got \[0, 2, 2\]"),
        ({"query_start_loc": [0, 1, 2]}, {}, "query_start_loc must be a .*got list"),
        ({"actual_seq_lengths_q": None}, {}, "actual_seq_lengths_q must be a list of integers, got NoneType"),
        ({"seq_lens": torch.tensor([20, 41])}, {}, r"must be equal, got \[20, 41\] and \[21, 41\]"),
        ({"seq_lens": None}, {}, "seq_lens must be a 1-dimensional tensor of integers, got NoneType"),
        ({"seq_lens_list": None}, {}, "seq_lens_list must be a list of integers, got NoneType"),
        ({"pcp_local_num_input_tokens": 4}, {}, "context parallelism"),
        ({"causal": False}, {"sliding_window": 8}, "without a causal mask"),
        ({}, {"sliding_window": 0}, "at least 1, got 0"),
        ({}, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be one of .*got 'fp8'"),
        ({}, {"attn_type": "encoder_decoder"}, "'encoder_decoder' is not translated"),
        ({}, {"kv_cache": None}, "DecodeOnly reads a cache: expected keys and values, got NoneType"),
        ({}, {"kv_cache": 5}, "expected keys and values, got int"),
        ({}, {"kv_cache": torch.tensor(1.0)}, r"expected keys and values, got a tensor \(\)"),
        ({}, {"kv_cache": [None, None]}, "expected keys and values, got list"),
        ({}, {"kv_cache": torch.zeros(2, 3, 4)}, r"each, got a tensor \(3, 4\)"),
        ({}, {"kv_cache": [torch.zeros(24, 16, 2, 64), torch.zeros(24, 32, 2, 64)]}, r"and a tensor \(24, 32, 2, 64\)"),
        ({"attn_state": "PrefillNoCache"}, {}, "PrefillNoCache reads the step's own keys and values, and got none"),
        ({"attn_state": "PrefillNoCache"}, {"key": torch.zeros(1, 2, 64), "value": torch.zeros(5, 2, 64)}, "got 1"),
        ({"attn_state": "PrefillNoCache"}, {"key": torch.zeros(2, 2, 64), "value": torch.tensor(1.0)}, "value must be"),
        (
            {"attn_state": "PrefillNoCache"}, {"key": torch.zeros(2, 2, 64), "value": torch.zeros(2, 2, 64)},
            r"PrefillNoCache has no keys but its own, \[1, 1\] of each sequence, got \[21, 41\]",
        ),
        ({}, {"query": torch.zeros(2, 256)}, r"query must be \(tokens, heads, head_dim\), got a tensor \(2, 256\)"),
        ({}, {"max_seqlen_k": 40}, "max_seqlen_k must be at least 41"),
    ],
)  # fmt: skip
def test_what_is_refused(metadata: dict[str, Any], options: dict[str, Any], words: str) -> None:
    step = Step("DecodeOnly", (1, 1), (20, 40), 64)
    for name, value in metadata.items():
        setattr(step.metadata, name, value)
    given = {"query": step.query, "key": None, "value": None, "kv_cache": step.cache, "scale": 1.0} | options
    with pytest.raises(ValueError, match=words):
        attention_arguments(step.metadata, **given)


def test_a_step_without_sequences() -> None:
    step = Step("DecodeOnly", (1, 1), (20, 40), 64)
    step.metadata.actual_seq_lengths_q, step.metadata.query_start_loc = [], torch.zeros(1, dtype=torch.int32)
    assert step.attend().shape == (0, HEADS, 64)
