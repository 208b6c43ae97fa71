"""The surface of the package flash-attn-npu 0.4.2: signatures of its three modules, results, refusals, imports."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from eager_budget import DEVICE, assert_matches_reference, leaves, on_device
from subprocesses import run_after_torch
from test_flash_attn_interface import CACHE, signature
from test_flash_attn_interface import SIGNATURES as OF_FLASH_ATTN

import diyfa
from diyfa.integrations import alias_flash_attn_npu, flash_attn_3
from diyfa.integrations.flash_attn_npu import v2, v3, v4

# Read from the package's source distribution; those of the 910 where the 950 has others.
_SIZES = "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
_DTYPE = "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, "
SIGNATURES = {
    **{(v2, name): text for name, text in OF_FLASH_ATTN.items()},
    (v2, "flash_attn_with_kvcache"): f"{CACHE}, scheduler_metadata=None, return_softmax_lse=False",
    (v2, "get_scheduler_metadata"): f"{_SIZES}{_DTYPE}page_size=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "softmax_scale=None, alibi_slopes_batch_stride=0, num_splits=0",
    (v3, "get_scheduler_metadata"): f"{_SIZES}{_DTYPE}cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, "
    "max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=0, "
    "pack_gqa=None, sm_margin=0, softmax_scale=None",
    (v4, "flash_attn_func"): "q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, "
    "block_sparse_tensors_bwd=None, return_lse=False",
    (v4, "flash_attn_varlen_func"): "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, "
    "softmax_scale=None, causal=False, window_size=(-1, -1), learnable_sink=None, softcap=0.0, num_splits=0, "
    "pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, "
    "aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, "
    "disable_scheduler_metadata=False",
    (v4, "get_scheduler_metadata"): f"{_SIZES}{_DTYPE}page_size=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "num_splits=0, pack_gqa=None, sm_margin=0, softmax_scale=None",
}  # fmt: skip
SAME_AS_3 = ("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")


@pytest.fixture(autouse=True)
def on_one_backend() -> Iterator[None]:
    with diyfa.use_backend(DEVICE):
        yield


@pytest.mark.parametrize(("module", "name"), SIGNATURES, ids=lambda x: getattr(x, "__name__", x))
def test_signatures(module: Any, name: str) -> None:
    assert signature(getattr(module, name)) == SIGNATURES[module, name]


def test_every_function_is_compared() -> None:
    named = {(module, name) for module in (v2, v3, v4) for name in module.__all__}
    assert named == {*SIGNATURES, *((v3, name) for name in SAME_AS_3)}
    assert all(getattr(v3, name) is getattr(flash_attn_3, name) for name in SAME_AS_3)


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def test_flash_attention_4() -> None:
    """Dense and packed, with a sink, against the reference; gradients included."""
    options = {"softmax_scale": 0.3, "causal": True, "window_size": (9, 0), "softcap": 5.0}
    meaning = {"sm_scale": 0.3, "causal": True, "window": (9, 0), "softcap": 5.0}
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    assert_matches_reference(
        on_device(lambda q, k, v: v4.flash_attn_func(q, k, v, learnable_sink=sink.to(DEVICE), **options)),
        leaves((2, 19, 4, 32), *[(2, 19, 2, 32)] * 2), "bshd", sinks=sink, **meaning,
    )  # fmt: skip
    ends_q, ends_k = int32(0, 7, 7, 27), int32(0, 9, 13, 33)
    for lengths in ({}, {"max_seqlen_q": 20, "max_seqlen_k": 20}):
        assert_matches_reference(
            on_device(lambda q, k, v, x=lengths: v4.flash_attn_varlen_func(
                q, k, v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, causal=True, **x)),
            leaves((27, 4, 32), (33, 2, 32), (33, 2, 32)), "thd",
            cu_seqlens_q=ends_q.cpu(), cu_seqlens_k=ends_k.cpu(), causal=True,
        )  # fmt: skip


@pytest.fixture
def paged() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    cache = [torch.randn(5, 16, 2, 32, generator=generator).half().to(DEVICE) for _ in range(2)]
    q = torch.randn(2, 3, 4, 32, generator=generator).half().to(DEVICE)
    return {"q": q, "k": cache[0], "v": cache[1], "table": int32([3, 1], [4, 2]), "used": int32(11, 30)}


def test_a_cache_through_each_module(paged: dict[str, torch.Tensor]) -> None:
    """With the metadata that each module makes: the result of `diyfa.flash_attn_with_kvcache`."""
    q, k, v, table, used = (paged[name] for name in ("q", "k", "v", "table", "used"))
    want, lse = diyfa.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=used, block_table=table, causal=True, return_softmax_lse=True
    )
    made = [
        module.get_scheduler_metadata(2, 3, 32, 4, 2, 32, used, torch.float16, causal=True) for module in (v2, v3, v4)
    ]
    assert all((x.shape, x.dtype, x.device) == ((0,), torch.int32, used.device) for x in made)
    options: dict[str, Any] = {"causal": True, "return_softmax_lse": True}
    two = v2.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=used, block_table=table, scheduler_metadata=made[0], **options
    )
    three = v3.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=used, page_table=table, scheduler_metadata=made[1], **options
    )
    four = v4.flash_attn_varlen_func(
        q.flatten(0, 1), k, v, cu_seqlens_q=int32(0, 3, 6), seqused_k=used, page_table=table, max_seqlen_q=3,
        causal=True, return_lse=True, scheduler_metadata=made[2],
    )  # fmt: skip
    for out, its_lse in (two, three[:2], (four[0].view_as(want), four[1].view(4, 2, 3).transpose(0, 1))):
        torch.testing.assert_close(out, want, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(its_lse, lse, atol=1e-4, rtol=1e-4)


X = torch.zeros(2, 3, 4, 16)
ROWS = torch.zeros(6, 4, 16)
ENDS = torch.tensor([0, 3, 6], dtype=torch.int32)
PACKED = {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS}
OTHERS = torch.zeros(2376, dtype=torch.uint8)
REFUSED: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], str]] = {
    **{
        f"dense {name}": (v4.flash_attn_func, (X, X, X), {name: X}, rf"{name} is not supported")
        for name in ("qv", "gather_kv_indices", "block_sparse_tensors", "block_sparse_tensors_bwd")
    },
    **{
        f"dense {name}": (v4.flash_attn_func, (X, X, X), {name: X}, rf"{name} is not supported by diyfa: .*{own}=, ")
        for own, names in {
            "score_fn": ("score_mod", "score_mod_bwd", "aux_tensors", "aux_scalars"), "mask": ("mask_mod",)
        }.items()
        for name in names
    },
    **{
        f"packed {name}": (v4.flash_attn_varlen_func, (ROWS,) * 3, {**PACKED, name: X}, rf"{name} is not supported")
        for name in ("qv", "min_seqlen_k", "seqused_q", "gather_kv_indices", "score_mod", "score_mod_bwd", "mask_mod",
                     "block_sparse_tensors", "aux_tensors", "aux_scalars", "seqlen_k_per_split")
    },
    "not packed": (v4.flash_attn_varlen_func, (X, X, X), {}, "cu_seqlens_q is needed"),
    "metadata of others, 2": (v2.flash_attn_with_kvcache, (X, X, X), {"scheduler_metadata": OTHERS}, r"Got \(2376,\)"),
    "metadata of others, 3": (v3.flash_attn_with_kvcache, (X, X, X), {"scheduler_metadata": OTHERS}, r"Got \(2376,\)"),
    "metadata of others, 4": (
        v4.flash_attn_varlen_func, (ROWS,) * 3, {**PACKED, "scheduler_metadata": OTHERS}, r"Got \(2376,\)"
    ),
    "chunks": (v3.get_scheduler_metadata, (2, 3, 32, 4, 2, 32, ENDS), {"attention_chunk": 8}, "attention_chunk is not"),
    "a number": (v3.get_scheduler_metadata, (2, 3, 32, 4, 2, 32, 7), {}, "cache_seqlens must be a tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, arguments, options, reason = REFUSED[name]
    with pytest.raises(TypeError if name == "a number" else ValueError, match=reason):
        call(*arguments, **options)


@pytest.mark.parametrize("name", ["flash_attn_npu_3", "flash_attn_npu_4.other"])
def test_the_real_package_is_imported_already(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any module of it, whether or not diyfa has one of that name."""
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(RuntimeError, match=rf"imported already \({name}\): call alias_flash_attn_npu before that"):
        alias_flash_attn_npu()


IMPORTS = """
import importlib.metadata as metadata, importlib.util, sys
from diyfa.integrations import alias_flash_attn_npu, alias_flash_attn_npu_v3
handle = alias_flash_attn_npu()
print(alias_flash_attn_npu() is handle, handle.version)
try:
    alias_flash_attn_npu_v3()
except RuntimeError as error:
    print(error)
from flash_attn_npu import flash_attn_func, flash_attn_varlen_func
from flash_attn_npu_3 import flash_attn_varlen_func as packed, flash_attn_with_kvcache, get_scheduler_metadata
from flash_attn_npu_4 import flash_attn_varlen_func as four
from flash_attn_npu_4.flash_attn_npu_interface import get_scheduler_metadata as its_metadata
from flash_attn_npu_v3 import flash_attn_with_kvcache as older
import flash_attn_npu, flash_attn_npu_3, flash_attn_npu_4
from diyfa.integrations import alias_flash_attn_npu, flash_attn_3
from diyfa.integrations.flash_attn_npu import v2, v3, v4
import diyfa
print(flash_attn_func is diyfa.flash_attn_func, flash_attn_varlen_func is v2.flash_attn_varlen_func)
print(packed is flash_attn_3.flash_attn_varlen_func, flash_attn_with_kvcache is older)
print(four is v4.flash_attn_varlen_func)
print(get_scheduler_metadata is v3.get_scheduler_metadata, its_metadata is v4.get_scheduler_metadata)
modules = flash_attn_npu, flash_attn_npu_3, flash_attn_npu_4
print([module.__version__ for module in modules], metadata.version("flash-attn-npu"))
print(sorted(name for name in metadata.packages_distributions() if name.startswith("flash_attn_npu")))
for absent in ("torch", "no_metadata", "flash_attn_combine"):
    print(hasattr(flash_attn_npu_3, absent), end=" ")
handle.remove()
print([name for name in sys.modules if name.startswith("flash_attn_npu")], importlib.util.find_spec("flash_attn_npu"))
"""


def test_imports() -> None:
    assert run_after_torch(IMPORTS).splitlines() == [
        "True 0.4.2", "flash_attn_npu is diyfa already, as version 0.4.2; remove that alias first", "True True",
        "True True", "True", "True True", "['0.4.2', '0.4.2', '0.4.2'] 0.4.2",
        "['flash_attn_npu', 'flash_attn_npu_3', 'flash_attn_npu_4', 'flash_attn_npu_v3']", "False False False [] None",
    ]  # fmt: skip
