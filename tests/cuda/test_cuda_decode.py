"""The CUDA kernels over a KV cache: how programs share the work, and what a row's result may depend on."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch
from kvcache_cases import use_chunks_of
from poison import poisoned_allocations
from targets import TARGETS

import diyfa
from diyfa import kvcache
from diyfa import plan as planning

if "cuda" not in TARGETS:
    pytest.skip("the cuda backend is not tested in this run", allow_module_level=True)

from guarded_memory import guard
from iteration_space_kernel import iteration_space

from diyfa.backends.cuda import backend as cuda
from diyfa.backends.cuda.attention import decode, decode_combine, stream_k
from diyfa.backends.cuda.attention.decode_configs import DecodeConfig, chunk_keys, decode_config, has_hopper_order
from diyfa.backends.cuda.attention.launch import use_config
from diyfa.backends.cuda.runtime import passes
from diyfa.backends.cuda.runtime.launch import is_interpreting
from diyfa.lab.examples import example_kvcache
from diyfa.problem import AttentionProblem, KVCacheProblem, Launch
from diyfa.reference import reference_attention, reference_kvcache

DEVICE = TARGETS["cuda"].device
BLOCK_N = 16


def problem(arch: str = "sm_90", **changes) -> KVCacheProblem:
    plain = KVCacheProblem("cuda", arch, "float16", "float16", "bshd", 4, 32, 8, 1, 8192, 128, 128)
    return plain.replace(**changes)


def attend(*tensors: torch.Tensor, **options):
    """`flash_attn_with_kvcache` on the cuda backend, which allocates nothing but NaN."""
    on_device = [x.to(DEVICE) for x in tensors]
    options = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    with diyfa.use_backend("cuda"), poisoned_allocations():
        out, lse = diyfa.flash_attn_with_kvcache(*on_device, return_softmax_lse=True, **options)
    return out.cpu(), lse.cpu()


def drawn_lengths(generator: torch.Generator, batch: int, most: int) -> torch.Tensor:
    """Some of them 0, some ends of blocks, some one beyond."""
    lengths = torch.randint(0, most + 1, (batch,), generator=generator)
    kind = torch.randint(0, 4, (batch,), generator=generator)
    whole = lengths // BLOCK_N * BLOCK_N
    lengths = torch.where(kind == 0, 0, torch.where(kind == 1, whole, torch.where(kind == 2, whole + 1, lengths)))
    return lengths.clamp(max=most).int()


# Tiles are looked at one, 32 or 128 at a time, and counted with 32 or 64 bits; one head of keys, some or all are walked
# at a time. The last two have programs of the combine kernel for each tile, which programs share.
@pytest.mark.parametrize(("batch", "programs", "heads_kv", "wide_positions"), [
    (5, 1, 2, False), (5, 3, 2, False), (5, 5, 2, False), (5, 7, 2, False), (1, 9, 2, False), (17, 11, 2, False),
    (20, 13, 2, False), (5, 15, 2, True), (5, 8, 2, False), (3, 6, 4, False), (17, 10, 4, True), (1, 12, 4, False),
    (1, 10, 3, False), (1, 15, 3, False),
])  # fmt: skip
@pytest.mark.parametrize("rows_per_program", [1, 4, 32])  # of a program of the combine kernel, of 21
def test_each_block_of_keys_is_seen_once(monkeypatch, rows_per_program, batch, programs, heads_kv, wide_positions):
    """Scores are all 0, and the value of a key is a number of its head at its block's feature: the sums of weights
    count keys."""
    monkeypatch.setattr(decode_combine, "combined_rows", lambda programs: rows_per_program)
    generator = torch.Generator().manual_seed(programs)
    monkeypatch.setattr(stream_k, "multiprocessors", lambda device: programs)
    monkeypatch.setattr(decode, "has_wide_positions", lambda problem, config: wide_positions)
    most, seqlen_q = 12 * BLOCK_N, 3
    lengths = drawn_lengths(generator, batch, most)
    q = torch.zeros(batch, seqlen_q, 7 * heads_kv, 32)
    of_head = 1.0 + torch.arange(heads_kv)
    k, v = torch.full((batch, most, heads_kv, 32), float("nan")), torch.full((batch, most, heads_kv, 32), float("nan"))
    blocks = torch.nn.functional.one_hot(torch.arange(most) // BLOCK_N, 32).float()
    for b, n in enumerate(lengths.tolist()):
        k[b, :n], v[b, :n] = 1.0, blocks[:n, None] * of_head[:, None]
    with use_config("decode", DecodeConfig(16, BLOCK_N, 4, 1, 1, programs % 5 * 3)):  # 21 rows: two tiles of them
        out, lse = attend(q, k, v, cache_seqlens=lengths, causal=True)
    visible = (lengths[:, None] - seqlen_q + 1 + torch.arange(seqlen_q)).clamp(min=0)  # of each query
    for b in range(batch):
        for i, n in enumerate(visible[b].tolist()):
            if n == 0:
                assert bool((out[b, i] == 0).all()) and bool((lse[b, :, i] == float("inf")).all())
                continue
            counts = out[b, i] * lse[b, :, i].exp()[:, None]
            expected = blocks[:n].sum(0) * of_head.repeat_interleave(7)[:, None]
            torch.testing.assert_close(counts, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("beyond", [-1, 0, 1], ids=["32 bits", "at the bound", "64 bits"])
@pytest.mark.parametrize(("batch", "heads_kv", "block_n"), [(1, 1, 16), (1, 8, 16), (40, 128, 16), (129, 8, 128)])
def test_positions_on_lines_as_long_as_32_bits_count(batch, heads_kv, block_n, beyond):
    """Caches so long that nobody has the memory, but for one page that all entries of a table name. Beyond the bound
    a line is as long as lengths on the device may make it."""
    config = DecodeConfig(16, block_n, 4, 1, 1, split_cost=6)
    call = problem(
        batch=batch, heads_q=heads_kv, heads_kv=heads_kv, page_size=16, lengths=True, window_right=-1,
        arch=cuda.arch(torch.device(DEVICE)),
    )  # fmt: skip
    largest = (2**31 - 256) // block_n
    first_long = -(-(1 << 28) // (batch * heads_kv)) - 1  # blocks of a sequence with which 64 bits count
    blocks = min(first_long + beyond, largest) if beyond < 1 else largest
    call = call.replace(capacity=blocks * block_n)
    is_long = blocks >= first_long
    assert decode.kernel_constants(call, config).wide_positions == is_long
    lengths = [call.capacity - n % 5 for n in range(batch)]
    for programs in (1, 7, 264):
        assert_line(call, config, lengths, None, [1] * batch, programs)


def assert_line(call, config, lengths, offsets, queries, programs) -> None:
    """The kernels find the tiles at positions on the line, which is divided here one tile after another."""
    blocks_m, group = stream_k.tiles_per_sequence(call, config), call.heads_q // call.heads_kv
    counts = [
        max(-(-n // config.block_n), 1) if block_m * config.block_m < rows * group else 0
        for n, rows in zip(lengths, queries, strict=True)
        for block_m in range(blocks_m)
    ]
    cost = stream_k.TILE_COST.value
    if sum(counts) * call.heads_kv < stream_k.LONG_SHARE.value * programs:
        cost = 0
    share = max(-(-sum((count + cost) * call.heads_kv for count in counts if count) // programs), 1)
    whole = -(-sum(count > 0 for count in counts) * call.heads_kv // programs)  # tiles of a share
    min_tile_work = max(counts) + cost
    if config.split_cost and whole * min_tile_work <= share + config.split_cost:
        share = max(whole * min_tile_work, 1)
    else:
        min_tile_work = 0
    work = [max(count + cost, min_tile_work) * call.heads_kv if count else 0 for count in counts]
    begins = [0, *accumulate(work)]
    total = begins[-1]
    drawn = random.Random(total)
    positions = {min(p * share, total) for p in range(programs)}
    positions |= {*begins, *(x - 1 for x in begins), *(drawn.randrange(total + 1) for _ in range(9))}
    positions = sorted(x for x in positions if 0 <= x < total)
    positions = sorted(drawn.sample(positions, min(len(positions), 12))) or [0]
    line = iteration_space(call, config, lengths, offsets, programs, positions, DEVICE)
    assert line[:4] == (total, share, cost, min_tile_work)
    for position, found in zip(positions, line.tiles, strict=True):
        if total == 0:
            assert found[0] >= len(counts) and found[1:] == (0, 0)
            continue
        tile = next(i for i in range(len(work)) if begins[i + 1] > position)
        assert found == (tile, begins[tile], begins[tile])


def launches_without_memory(call: KVCacheProblem) -> list[Launch]:
    """What a call would launch."""
    tensors, out, lse = example_kvcache(call)
    config = decode.select_config(call)
    return decode.make_launches(call, tensors, out, lse, config, stream_k.workspace(call, config, out.device))


@pytest.mark.parametrize(
    "changes", [{}, {"head_dim": 576, "head_dim_v": 512, "latent": True}, {"batch_invariant": True}]
)
def test_a_cache_that_grows_needs_few_compiled_kernels(changes):
    """What only the combine kernel reads is no constant of the one that attends to keys, which takes seconds."""
    call = problem(batch=1, heads_q=8, heads_kv=1, head_dim=256, head_dim_v=256, dtype="bfloat16", lengths=True)
    call = call.replace(cache_dtype="bfloat16", **changes)
    launched = [launches_without_memory(call.replace(capacity=64 << n)) for n in range(11)]
    constants = {main.constants["c"] for main, *_ in launched}
    assert len(constants) == (2 if call.batch_invariant else 1)  # some chunks have programs of their own


# Three tiles of a sequence, the last with four rows; one of twelve. The combine kernel has programs for what each
# program leaves, or for each tile.
@pytest.mark.parametrize(("batch", "seqlen_q", "programs"), [(2, 9, 5), (1, 9, 11), (3, 3, 2), (2, 3, 7)])
@pytest.mark.parametrize("least", [1, 4, 7])  # programs, so that each has all rows, or some
def test_rows_that_a_program_of_the_combine_kernel_has_change_no_bit(batch, seqlen_q, programs, least, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, seqlen_q, 8, 32, generator=generator)
    k, v = torch.randn(2, batch, 200, 2, 32, generator=generator)
    lengths = torch.tensor([200, 70, 33][:batch], dtype=torch.int32)
    monkeypatch.setattr(stream_k, "multiprocessors", lambda device: programs)
    results, launched, launch = [], [], passes.launch_kernel
    monkeypatch.setattr(passes, "launch_kernel", lambda one: launched.append(one) or launch(one))
    for at_least in (1 << 20, least):
        monkeypatch.setattr(stream_k, "COMBINED_PROGRAMS", at_least)
        monkeypatch.setattr(planning, "plans", {})  # the second call is no repeated one
        with use_config("decode", DecodeConfig(16, BLOCK_N, 4, 1, 1)):
            results.append(attend(q, k, v, cache_seqlens=lengths, causal=True))
    rows = [one.arguments["rows_per_program"] for one in launched if one.kernel is decode_combine._combine_kernel]
    assert rows[0] == 1 < rows[1] and (least > 1 or rows[1] == min(4 * seqlen_q, 16))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.parametrize(("programs", "columns"), [(8, 32), (9, 32), (17, 32), (9, 16), (17, 16)])
def test_more_chunks_of_a_tile_than_are_read_at_once(programs, columns, monkeypatch):
    """Each program has one block of the keys. Scores are all 0."""
    monkeypatch.setattr(decode_combine, "COMBINED_ELEMENTS", 1)  # so eight chunks are read
    monkeypatch.setattr(stream_k, "COMBINED_ELEMENTS", 1)
    monkeypatch.setattr(stream_k, "COMBINED_COLUMNS", columns)
    monkeypatch.setattr(stream_k, "multiprocessors", lambda device: programs)
    v = torch.randn(1, programs * BLOCK_N, 1, 32, generator=torch.Generator().manual_seed(0))
    q = torch.zeros(1, 1, 2, 32)
    with use_config("decode", DecodeConfig(16, BLOCK_N, 4, 1, 1)):
        found = attend(q, v, v)
    torch.testing.assert_close(found, reference_kvcache(q, v, v, return_softmax_lse=True), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("programs", "split_cost", "scans", "lengths"), [
    (4, 6, (1, 32), (80, 1, 0, 46)),  # whole tiles, all as long on the line as the longest
    (4, 0, (1, 32), (16, 3, 16, 192)),  # some have a chunk from the middle of the longest
    (8, 0, (1, 2), (16, 3, 16, 192)),  # more programs than tiles, but these are not all looked at at once
])  # fmt: skip
def test_long_sequences_beside_short_ones(programs, split_cost, scans, lengths, monkeypatch):
    """Scores are all 0."""
    monkeypatch.setattr(stream_k, "multiprocessors", lambda device: programs)
    monkeypatch.setattr(stream_k, "SCANS", scans)
    q, v = torch.zeros(4, 1, 1, 16), torch.randn(4, 192, 1, 16, generator=torch.Generator().manual_seed(0))
    for b, n in enumerate(lengths):
        v[b, n:] = float("nan")
    ends = torch.tensor(lengths, dtype=torch.int32)
    with use_config("decode", DecodeConfig(16, BLOCK_N, 4, 1, 1, split_cost)):
        found = attend(q, v, v, cache_seqlens=ends)
    expected = reference_kvcache(q, v, v, cache_seqlens=ends, return_softmax_lse=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_one_program_shares_with_nobody(monkeypatch):
    """Its share is the whole iteration space: the results are those of `num_splits=1`, bit for bit; others' are not."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 1, 4, 32, generator=generator)
    k, v = torch.randn(2, 3, 200, 2, 32, generator=generator)
    lengths = torch.tensor([200, 0, 150], dtype=torch.int32)
    results = []
    for programs, splits in ((1, 0), (1, 1), (5, 0)):
        monkeypatch.setattr(stream_k, "multiprocessors", lambda device, programs=programs: programs)
        with use_config("decode", DecodeConfig(16, BLOCK_N, 4, 1, 1)):
            results.append(attend(q, k, v, cache_seqlens=lengths, num_splits=splits))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][0], results[2][0])
    torch.testing.assert_close(results[0][0], results[2][0], rtol=1e-5, atol=1e-6)


def paged(x: torch.Tensor, page_size: int, table: torch.Tensor) -> torch.Tensor:
    """(B, rows, Hk, D) as pages that `table` names; rows beyond are NaN."""
    pages = torch.full((table.numel() + 1, page_size, *x.shape[2:]), float("nan"), dtype=x.dtype)
    for b, j in torch.cartesian_prod(torch.arange(x.shape[0]), torch.arange(x.shape[1])).tolist():
        pages[table[b, j // page_size], j % page_size] = x[b, j]
    return pages


@pytest.mark.parametrize("padded", [False, True], ids=["", "leftpad"])
@pytest.mark.parametrize(("page_size", "block_n"), [(16, 16), (48, 16), (16, 32), (48, 32), (3, 16), (64, 64)])
def test_blocks_of_keys_in_pages_of_any_size(page_size, block_n, padded, monkeypatch):
    """A block lies in one page or several, and behind a padding it may begin anywhere. Scores are all 0."""
    monkeypatch.setattr(stream_k, "multiprocessors", lambda device: 3)
    generator = torch.Generator().manual_seed(0)
    lengths, pads = torch.tensor([100, 33, 0, 64, 96]), torch.tensor([17, 1, 0, 63, 48 if padded else 0])
    pads = pads if padded else torch.zeros_like(pads)
    batch, columns = len(lengths), -(-130 // page_size)
    table = torch.randperm(batch * columns, generator=generator).reshape(batch, columns).int()
    beyond = torch.arange(columns) >= -(-lengths[:, None] // page_size)
    absent = torch.tensor([-1, 2**30, -(2**31), table.numel()], dtype=torch.int32)  # the last is there, all NaN
    table = torch.where(beyond, absent[torch.arange(batch * columns).reshape(batch, columns) % 4], table)
    v = torch.randn(batch, 100, 1, 32, generator=generator)
    values = torch.full((batch * columns + 1, page_size, 1, 32), float("nan"))
    for b, n in enumerate(lengths.tolist()):
        for j in range(int(pads[b]), n):
            values[int(table[b, j // page_size]), j % page_size] = v[b, j]
    options = {"cache_leftpad": pads.int()} if padded else {}
    q, call = torch.zeros(batch, 2, 2, 32), {"cache_seqlens": lengths.int(), "block_table": table, **options}
    with use_config("decode", DecodeConfig(16, block_n, 4, 1, 1)):
        found = attend(q, values, values, **call)
    expected = reference_kvcache(q, values, values, return_softmax_lse=True, **call)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("programs", [1, 4, 9])
@pytest.mark.parametrize("queries", [[0, 3, 0, 0, 1, 2, 0], [0] * 7, [3] + [0] * 33 + [2, 0], [0] * 40 + [1]])
def test_packed_sequences_without_queries_take_no_part(queries, programs, monkeypatch):
    """Whether they stand first, last, or are all there are; rows that no sequence has are cleared."""
    monkeypatch.setattr(stream_k, "multiprocessors", lambda device: programs)
    generator = torch.Generator().manual_seed(programs)
    batch, total = len(queries), sum(queries)
    lengths = drawn_lengths(generator, batch, 6 * BLOCK_N)
    table = torch.randperm(batch * 6, generator=generator).reshape(batch, 6).int()
    v = torch.randn(batch, 6 * BLOCK_N, 2, 32, generator=generator)
    for b, n in enumerate(lengths.tolist()):
        v[b, n:] = float("nan")
    values = paged(v, BLOCK_N, table)
    q, offsets = torch.zeros(total + 2, 14, 32), torch.tensor([0, *accumulate(queries)], dtype=torch.int32)
    tensors = (x.to(DEVICE) for x in (q, values, values, offsets))
    with use_config("decode", DecodeConfig(16, BLOCK_N, 4, 1, 1)), diyfa.use_backend("cuda"), poisoned_allocations():
        out, lse = diyfa.flash_attention_varlen(
            *tensors, None, 3, 6 * BLOCK_N, seqused_k=lengths.to(DEVICE), block_table=table.to(DEVICE), return_lse=True
        )
    expected = reference_kvcache(
        q, values, values, cache_seqlens=lengths, block_table=table, cu_seqlens_q=offsets, return_softmax_lse=True
    )
    torch.testing.assert_close((out.cpu(), lse.cpu()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not is_interpreting(), reason="the interpreter's addresses are looked at")
@pytest.mark.parametrize("page_size", [0, 3, 16])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_no_other_memory_is_read(packed, page_size, monkeypatch):
    """Lengths, offsets, tables, keys and workspace: up to their last element, with values that nobody checked, too."""
    accesses = guard(monkeypatch)
    monkeypatch.setattr(stream_k, "multiprocessors", lambda device: 4)
    for check in ("_check_values", "_check_packed_values"):
        monkeypatch.setattr(kvcache, check, lambda *arguments: None)
    page_size = page_size or (5 if packed else 0)
    columns, most = 7, 7 * page_size if page_size else 40
    for values in ([most, 0, most], [2**31 - 1, -1, -(2**31)], [1, most - 1, most + 1]):
        q = torch.randn(3, 2, 4, 32)
        keys = torch.randn(3 * columns, page_size, 2, 32) if page_size else torch.randn(3, most, 2, 32)
        lengths = torch.tensor(values, dtype=torch.int32)
        options = {}
        if page_size:
            options["block_table"] = torch.arange(-1, 3 * columns - 1).reshape(3, columns).int()
            options["block_table"][-1, -1] = 3 * columns
        with use_config("decode", DecodeConfig(16, BLOCK_N, 4, 1, 1)):
            if not packed:
                attend(q, keys, keys, cache_seqlens=lengths, causal=True, **options)
                continue
            for offsets in ([0, 2, 4, 6], [0, 0, 0, 0], [5, -(2**31), 2**31 - 1, 6]):
                with diyfa.use_backend("cuda"), poisoned_allocations():
                    cu_seqlens_q = torch.tensor(offsets, dtype=torch.int32)
                    diyfa.flash_attention_varlen(
                        q.flatten(0, 1), keys, keys, cu_seqlens_q, None, 2, most, seqused_k=lengths, **options
                    )
    assert accesses() > 100


def test_lengths_and_padding_that_nobody_checked_end_with_the_cache(monkeypatch):
    """Also the largest length, which more keys would make overflow."""
    monkeypatch.setattr(kvcache, "_check_values", lambda *arguments: None)
    q, k, v, new_k, new_v = (torch.randn(1, n, 2, 32) for n in (3, 20, 20, 4, 4))
    whole = attend(q, k, v, causal=True)
    length = torch.tensor([2**31 - 1], dtype=torch.int32)
    for appended in ({}, {"k": new_k, "v": new_v}):
        assert all(map(torch.equal, attend(q, k, v, cache_seqlens=length, causal=True, **appended), whole))
    for padding, lse in ((-(2**31), whole[1]), (2**30, torch.full_like(whole[1], float("inf")))):
        leftpad = torch.tensor([padding], dtype=torch.int32)
        assert torch.equal(attend(q, k, v, cache_seqlens=20, cache_leftpad=leftpad, causal=True)[1], lse)


@pytest.mark.parametrize("cache_dtype", ["float16", "float8_e4m3fn"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_in_the_mode_depend_on_widths_and_dtypes_alone(head_dim, cache_dtype):
    mode = problem(batch_invariant=True, cache_dtype=cache_dtype, head_dim=head_dim, head_dim_v=head_dim)
    same = [
        mode.replace(seqlen_q=2000), mode.replace(heads_q=8), mode.replace(batch=300, capacity=64),
        mode.replace(page_size=1), mode.replace(aligned=False), mode.replace(num_splits=7),
        mode.replace(layout="thd", packed_keys=True),
    ]  # fmt: skip
    for arch in ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"):
        tiles = {
            (config.block_n, config.num_warps, chunk_keys(call))
            for call, config in ((each, decode_config(each)) for each in [x.replace(arch=arch) for x in [mode, *same]])
        }
        assert len(tiles) == 1
        rows = {decode_config(each.replace(arch=arch)).block_m for each in [mode, *same] if each.aligned}
        assert rows == {16, 32} if has_hopper_order(mode.replace(arch=arch)) else len(rows) == 1
    latent = problem(batch_invariant=True, head_dim=576, head_dim_v=512)
    assert decode_config(latent.replace(latent=True)) == decode_config(latent)


def test_refusals():
    def refused(op, call, name="split_kv"):
        kernel = next(kernel for kernel in cuda.kernels if (kernel.op, kernel.name) == (op, name))
        return cuda.unsupported(call) or kernel.unsupported(call)

    float8 = problem(cache_dtype="float8_e4m3fn")
    assert refused("kvcache_fwd", float8) is None
    assert (
        refused("kvcache_fwd", float8.replace(arch="sm_80")) == "a cache of float8 needs sm_89 or later, this is sm_80"
    )
    wide = problem(head_dim=576, head_dim_v=512, arch="sm_75")
    assert "no tile for float16 and head_dims 576 and 512 fits" in refused("kvcache_fwd", wide)
    assert "not to packed keys" in refused("kvcache_append", problem(layout="thd"), "append")
    training = AttentionProblem("cuda", "sm_90", "float16", "bhsd", 2, 8, 4, 1024, 1024, 128, 128)
    assert refused("attention_fwd", training) == (
        "split_kv runs a forward pass inside diyfa.batch_invariant(), and outside of it few queries of many keys"
    )
    few = training.replace(seqlen_q=4, seqlen_k=1 << 14, heads_q=16)
    assert refused("attention_fwd", few) is None
    assert refused("attention_fwd", few.replace(dropout=True)) == "split_kv does not implement dropout"
    assert diyfa.registry.choose("attention_fwd", few, cuda).name == "split_kv"
    assert diyfa.registry.choose("attention_fwd", few.replace(seqlen_k=64), cuda).name == "v2"
    mode = training.replace(batch_invariant=True)
    assert refused("attention_fwd", mode) is None
    assert refused("attention_fwd", mode.replace(bias="float16")) == "split_kv does not implement attn_bias"
    for name in ("v2", "v1"):
        assert "batch_invariant" in refused("attention_fwd", mode, name)
    assert "softcap" in refused("attention_fwd", mode.replace(softcap=3.0), "sm90")


def test_small_queries_beside_large_ones_count_over_float8_keys():
    """Queries become float16 there. Where keys have nothing for the largest feature, the others decide."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 1, 4, 64, generator=generator)
    q[0, ..., 0], q[1, ..., 0] = 2.0**20, 2.0**100
    q[1, ..., 1:] *= 2.0**80
    k, v = (torch.randn(2, 100, 2, 64, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    k[..., 0] = 0
    for b, softmax_scale in ((0, 0.125), (1, 0.125 * 2.0**-80)):
        case = q[b : b + 1].bfloat16(), k[b : b + 1], v[b : b + 1]
        out, _ = attend(*case, softmax_scale=softmax_scale)
        expected = reference_attention(*(x.double() for x in case), sm_scale=softmax_scale, layout="bshd")
        torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=0)


def test_a_tiny_scale_of_float8_keys_with_a_large_descale_is_exact():
    """Their product is ordinary. The scale alone, brought to queries that became float16, has few bits left."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, 2, 64, generator=generator).bfloat16()
    k, v = (torch.randn(1, 40, 1, 64, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    tiny = float(torch.tensor(1e-38))
    descale = torch.tensor([[3e38]])
    _, lse = attend(q, k, v, softmax_scale=tiny, k_descale=descale)
    scores = torch.einsum("qhd,kd->hqk", q[0].double(), k[0, :, 0].double()) * tiny * descale.double()
    torch.testing.assert_close(lse[0].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_large_features_of_the_second_tile_count_over_float8_keys():
    """Keys of 96 features are tiles of 64 and 32: what a row is divided by comes from both. One program has all keys:
    both sums of pairs of values are brought to each new maximum."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, 2, 96, generator=generator)
    q[..., 64:] *= 2.0**20
    q = q.bfloat16()
    k, v = (torch.randn(1, 300, 1, d, generator=generator).to(torch.float8_e4m3fn) for d in (96, 32))
    k[0, :, 0] = (k[0, :, 0].float() * torch.arange(300)[:, None] / 100).to(torch.float8_e4m3fn)  # maxima rise
    out, lse = attend(q, k, v, softmax_scale=2.0**-22, num_splits=1)
    wide = (x.double() for x in (q, k, v))
    expected, expected_lse = reference_attention(*wide, sm_scale=2.0**-22, layout="bshd", return_lse=True)
    torch.testing.assert_close(lse.double(), expected_lse.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-2)


def test_programs_begin_beyond_the_tiles_that_are_looked_at_at_once(monkeypatch):
    """Tiles of rows are looked at 128 at a time; the last of eight programs begins in the second lot."""
    monkeypatch.setattr(stream_k, "multiprocessors", lambda device: 8)
    generator = torch.Generator().manual_seed(0)
    batch = stream_k.SCANS[-1] + 32
    q = torch.randn(batch, 1, 1, 16, generator=generator)
    k, v = torch.randn(2, batch, 16, 1, 16, generator=generator)
    lengths = drawn_lengths(generator, batch, 16)
    with use_config("decode", DecodeConfig(16, BLOCK_N, 4, 1, 1)):
        out, lse = attend(q, k, v, cache_seqlens=lengths)
    expected = reference_kvcache(q, k, v, cache_seqlens=lengths, return_softmax_lse=True)
    torch.testing.assert_close((out, lse), expected, rtol=1e-5, atol=1e-5)


def test_odd_float8_values_of_aligned_rows_are_all_read():
    """Pairs of features would leave out the last one."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, 2, 32, generator=generator).bfloat16()
    k = torch.randn(1, 40, 1, 32, generator=generator).to(torch.float8_e4m3fn)
    buffer = torch.ones(1, 40, 1, 48).to(torch.float8_e4m3fn).to(DEVICE)
    out, _ = attend(q, k, buffer[..., :35])
    torch.testing.assert_close(out.float(), torch.ones(1, 1, 2, 35), rtol=0, atol=1e-2)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
def test_few_queries_of_many_keys_need_no_cache(layout):
    """A forward pass by these kernels, outside the mode, and once its gradient."""
    generator = torch.Generator().manual_seed(0)
    n, heads, heads_kv, keys = 3, 4, 2, 2100
    shapes = {"bhsd": (0, 2, 1, 3), "bshd": (0, 1, 2, 3), "thd": (0, 1, 2, 3)}
    q, k, v = (
        torch.randn(1, rows, h, 32, generator=generator).permute(shapes[layout]).contiguous().to(DEVICE)
        for rows, h in ((n, heads), (keys, heads_kv), (keys, heads_kv))
    )
    if layout == "thd":
        q, k, v = q[0], k[0], v[0]
        offsets = [torch.tensor([0, rows], dtype=torch.int32, device=DEVICE) for rows in (n, keys)]
        given = {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1], "max_seqlen_q": n, "max_seqlen_k": keys}
        attend = diyfa.flash_attention_varlen
    else:
        given, attend = {}, diyfa.flash_attention if layout == "bhsd" else diyfa.flash_attention_v2
    inputs = [x.requires_grad_(layout == "bhsd") for x in (q, k, v)]
    expected = reference_attention(
        *(x[None] if layout == "thd" else x for x in (q, k, v)), causal=True,
        layout="bhsd" if layout == "bhsd" else "bshd",
    )  # fmt: skip
    with diyfa.use_backend("cuda"), poisoned_allocations():
        told = diyfa.explain(q, k, v, causal=True, layout=layout, **given)
        out = attend(q, k, v, causal=True, **given)
    assert told.kernel == "split_kv"
    assert out.shape == q.shape and out.stride() == q.stride()
    torch.testing.assert_close(out, expected[0] if layout == "thd" else expected, rtol=1e-4, atol=1e-5)
    if layout == "bhsd":
        found, wanted = (torch.autograd.grad(x.square().sum(), inputs) for x in (out, expected))
        for x, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, want, rtol=1e-4, atol=1e-5)


CHUNK_CASES = {
    "plain": {},
    "window": {"window_size": (90, 3), "sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])},
    "leftpad": {"cache_leftpad": torch.tensor([70, 0, 299], dtype=torch.int32), "softcap": 2.0},
    "float8": {"k_descale": torch.tensor(0.7), "v_descale": torch.tensor(1.3)},
}


@pytest.mark.parametrize("name", CHUNK_CASES)
def test_chunks_with_programs_of_their_own_add_up_to_the_same_bits(name, monkeypatch):
    """As when one program has all of them: more chunks than are read at once, and some that rows do not see."""
    launched = []
    launch = passes.launch_kernel
    monkeypatch.setattr(passes, "launch_kernel", lambda one: launched.append(one.kernel) or launch(one))
    use_chunks_of(monkeypatch, 128, multiprocessors=100)  # as large as blocks are
    generator = torch.Generator().manual_seed(0)
    q, (k, v) = torch.randn(3, 5, 4, 32, generator=generator), torch.randn(2, 3, 800, 2, 32, generator=generator)
    k[:, 200:300] *= 20  # maxima that rise, and fall again
    lengths = torch.tensor([800, 3, 300], dtype=torch.int32)
    dtype = torch.float8_e4m3fn if name == "float8" else torch.bfloat16
    case = q.bfloat16(), k.to(dtype), v.to(dtype)
    monkeypatch.setattr(decode, "PARTIALS_AT_ONCE", 4)
    call = {"cache_seqlens": lengths, "causal": name != "window", **CHUNK_CASES[name]}
    results = []
    with diyfa.batch_invariant():
        for num_splits in (1, 0):
            results.append(attend(*case, num_splits=num_splits, **call))
    assert launched == [decode._decode_kernel, decode._decode_kernel, decode_combine._combine_in_order_kernel]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    out, lse = attend(*case, **call)
    torch.testing.assert_close(results[0][0], out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(results[0][1], lse, rtol=1e-4, atol=1e-4)
