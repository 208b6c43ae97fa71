"""The flash_attn 2.8 surface: signatures, results under the error budget, packed gradients, refusals, private pairs."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from poison import poisoned_allocations
from targets import TARGETS
from torch.utils._python_dispatch import TorchDispatchMode

import diyfa
from diyfa import attention, flash_attn_interface, ops
from diyfa.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from diyfa.testing import AttentionCase, assert_within_budget, make_inputs, run_case

F16 = torch.float16


@pytest.fixture(autouse=True)
def on_the_cpu_backend():
    with diyfa.use_backend("cpu"):
        yield


# ---- Signatures -------------------------------------------------------------------------------------------------

RELEASE = "2.8.3.post2"  # of flash_attn, the newest one; the tables below have its signatures
SINCE = {"_flash_attn_varlen_forward": "num_splits=0"}  # arguments that its repository has added behind these
TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
VARLEN = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
MIDDLE = "dropout_p, softmax_scale, causal, window_size_left{l}, window_size_right{l}, softcap{c}, alibi_slopes{a}"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, {TAIL}",
    "flash_attn_kvpacked_func": f"q, kv, {TAIL}",
    "flash_attn_varlen_func": f"q, k, v, {VARLEN}, {TAIL}, block_table=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TAIL}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {VARLEN}, {TAIL}",
}
# `flash_attn_with_kvcache`, whose last arguments others have replaced (test_kvcache.py, test_flash_attn_npu.py).
CACHE = (
    "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, "
    "cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "rotary_interleaved=True, alibi_slopes=None, num_splits=0"
)
PRIVATE_SIGNATURES = {
    "_flash_attn_forward": f"q, k, v, {MIDDLE.format(l='', c='', a='')}, return_softmax",
    "_flash_attn_varlen_forward": f"q, k, v, {VARLEN}, {MIDDLE.format(l='=-1', c='=0.0', a='=None')}, "
    "return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False",
    "_flash_attn_backward": f"dout, q, k, v, out, softmax_lse, dq, dk, dv, {MIDDLE.format(l='', c='', a='')}, "
    "deterministic, rng_state=None",
    "_flash_attn_varlen_backward": f"dout, q, k, v, out, softmax_lse, dq, dk, dv, {VARLEN}, "
    f"{MIDDLE.format(l='', c='', a='')}, deterministic, rng_state=None, zero_tensors=False",
}


def signature(function: Any) -> str:
    """Names, order and defaults of the parameters."""
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)


@pytest.mark.parametrize("name", SIGNATURES)
def test_public_signatures(name: str) -> None:
    assert signature(getattr(flash_attn_interface, name)) == SIGNATURES[name]
    assert getattr(diyfa, name) is getattr(flash_attn_interface, name)
    assert name in diyfa.__all__


@pytest.mark.parametrize("name", PRIVATE_SIGNATURES)
def test_private_signatures(name: str) -> None:
    """Those of the newest release, so that its callers by position are served, and what is added since."""
    added = [SINCE[name]] if name in SINCE else []
    assert signature(getattr(flash_attn_interface, name)) == ", ".join([PRIVATE_SIGNATURES[name], *added]), RELEASE
    assert getattr(flash_attn_interface, f"_wrapped{name}") is getattr(flash_attn_interface, name)


# ---- Results ----------------------------------------------------------------------------------------------------


def described(name: str, **changes: Any) -> AttentionCase:
    sizes = {"layout": "thd"} if "lens_q" in changes else {"layout": "bshd", "batch": 2, "seqlen_q": 37}
    return AttentionCase(name, **{"heads": 4, **sizes, **changes})


EVEN = {"lens_q": (17, 1, 40, 0, 9)}
UNEVEN = {"lens_q": (17, 5, 0, 33, 1), "lens_k": (30, 0, 7, 12, 40)}
SCORES = {"softcap": 4.0, "sm_scale": 0.3}
CASES = [
    described("dense"),
    described("dense_causal_gqa", heads_kv=2, seqlen_q=20, seqlen_k=51, causal=True),
    described("dense_rows_without_keys", seqlen_q=50, seqlen_k=20, causal=True),
    described("dense_causal_caps_right", window=(9, 9), causal=True, alibi="h"),
    described("dense_everything", heads_kv=2, seqlen_k=61, head_dim_v=16, window=(7, 3), alibi="bh", **SCORES),
    described("dense_dropout", heads_kv=2, dropout_p=0.3, causal=True),
    described("qkv", packing="qkv", causal=True),
    described("qkv_deterministic", packing="qkv", window=(11, 3), alibi="h", **SCORES),
    described("qkv_dropout", packing="qkv", dropout_p=0.17),
    described("kv", packing="kv", seqlen_k=60),
    described("kv_everything", packing="kv", heads_kv=1, window=(11, 0), alibi="bh", **SCORES),
    described("varlen_uneven_causal", **UNEVEN, causal=True),
    described("varlen_everything", **UNEVEN, heads_kv=2, head_dim_v=16, window=(6, 6), alibi="bh", **SCORES),
    described("varlen_dropout", **UNEVEN, heads_kv=2, dropout_p=0.25),
    described("varlen_qkv", packing="qkv", **EVEN, causal=True),
    described("varlen_qkv_everything", packing="qkv", **EVEN, window=(6, 6), alibi="h", **SCORES),
    described("varlen_qkv_dropout", packing="qkv", **EVEN, causal=True, dropout_p=0.1),
    described("varlen_kv", packing="kv", **UNEVEN, heads_kv=2, window=(6, 6), alibi="h", **SCORES),
]
ON_EVERY_BACKEND = ("dense_causal_gqa", "qkv", "kv", "varlen_uneven_causal", "varlen_qkv", "varlen_kv", "qkv_dropout")
by_case = partial(pytest.mark.parametrize, "case", ids=lambda case: case.name)


def attend(case: AttentionCase, *leaves: torch.Tensor, **given: Any) -> tuple[torch.Tensor, ...]:
    """out, lse and the mask of the function of the surface that fits; `given` are a case's options."""
    names = {"causal": "causal", "sm_scale": "softmax_scale", "window": "window_size", "softcap": "softcap",
             "alibi_slopes": "alibi_slopes", "dropout_p": "dropout_p"}  # fmt: skip
    options = {name: given[ours] for ours, name in names.items() if ours in given}
    lengths = [given[f"{x}_{side}"] for x in ("cu_seqlens", "max_seqlen") for side in "qk" if case.lens_q is not None]
    if case.packing == "qkv":
        lengths = [lengths[0], torch.tensor(lengths[2])] if lengths else []
    form = f"{'varlen_' * bool(lengths)}{case.packing}{'packed_' * bool(case.packing)}"
    function = getattr(diyfa, f"flash_attn_{form}func")
    deterministic = case.name == "qkv_deterministic"
    return function(*leaves, *lengths, **options, deterministic=deterministic, return_attn_probs=True)


def check(case: AttentionCase, monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> None:
    """out, lse and gradients are within their budgets; dropout's state is the one of the case."""
    inputs = make_inputs(case, device)
    for module in (attention, ops):
        monkeypatch.setattr(module, "new_rng_state", lambda device: inputs.options["rng_state"])
    with poisoned_allocations():
        results = run_case(lambda *leaves, **options: attend(case, *leaves, **options)[:2], inputs)
    assert_within_budget(results, case)


@by_case(CASES)
def test_results(case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, monkeypatch)


@by_case([case for case in CASES if case.name in ON_EVERY_BACKEND])
@pytest.mark.parametrize("backend", [n for n, t in TARGETS.items() if n != "cpu" and t.computes])
def test_results_on_every_backend(backend: str, case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    with diyfa.use_backend(backend):
        check(case, monkeypatch, TARGETS[backend].device)


# ---- What return_attn_probs adds --------------------------------------------------------------------------------

WRONG = {
    "window": ({"window_size": (-2, 0)}, ValueError, "window sizes"),
    "scale": ({"softmax_scale": "x"}, TypeError, "softmax_scale must be a number"),
    "causal": ({"causal": 1}, TypeError, "causal must be True or False"),
    "slopes": ({"alibi_slopes": torch.ones(7)}, ValueError, "alibi_slopes must have shape"),
    "probability": ({"dropout_p": 2.0}, ValueError, "dropout_p must be in"),
    "probabilities": ({"dropout_p": torch.tensor([0.1, 0.2])}, TypeError, "dropout_p must be a number, got Tensor"),
    "no probability": ({"dropout_p": torch.zeros(0)}, TypeError, "dropout_p must be a number, got Tensor"),
}


def test_repeated_calls_show_their_own_weights() -> None:
    q = torch.randn(1, 6, 2, 16)
    masks = [flash_attn_func(q, q, q, dropout_p=0.5, return_attn_probs=True)[2] for _ in range(3)]
    assert all(x.shape == (1, 2, 128, 128) and bool((x[..., :6, :6] < 0).any()) for x in masks)
    assert not torch.equal(masks[1].signbit(), masks[2].signbit())
    assert isinstance(flash_attn_func(q, q, q), torch.Tensor)
    out, lse, none = flash_attn_func(q, q, q, return_attn_probs=True)
    assert (out.shape, lse.shape, none.shape) == ((1, 6, 2, 16), (1, 2, 6), (0,))


@pytest.mark.parametrize("probs", [False, True])
@pytest.mark.parametrize("case", WRONG)
def test_a_refused_call_draws_no_state_of_the_mask(case: str, probs: bool) -> None:
    changes, error, message = WRONG[case]
    q = torch.randn(1, 6, 2, 16)
    before = torch.get_rng_state()
    with pytest.raises(error, match=message):
        flash_attn_func(q, q, q, **{"dropout_p": 0.3, "return_attn_probs": probs, **changes})
    with pytest.raises(ValueError, match="qkv must have shape"):
        flash_attn_qkvpacked_func(q, dropout_p=0.3, return_attn_probs=probs)
    assert torch.equal(torch.get_rng_state(), before)


@by_case([case for case in CASES if case.dropout_p])
def test_s_dmask_is_the_softmax_with_a_sign(case: AttentionCase) -> None:
    case = replace(case, dtype="float32")
    inputs = make_inputs(case)
    torch.manual_seed(3)
    rng_state = torch.randint(0, 2**32, (2,), dtype=torch.int64)
    torch.manual_seed(3)
    out, _, s_dmask = attend(case, *inputs.leaves, **inputs.options)
    assert not s_dmask.requires_grad
    batch, heads, _, longest_q, longest_k, head_dim, _ = case.sizes
    assert s_dmask.shape == (batch, heads, 128, 128) and s_dmask.dtype == torch.float32
    keep = diyfa.dropout_mask(batch, heads, longest_q, longest_k, case.dropout_p, *rng_state.tolist())
    q, k, v = (x.repeat_interleave(heads // x.shape[-2], -2) for x in inputs[:3])
    row_q = row_k = 0
    lens_q, lens_k = case.lens_q or (longest_q,) * batch, case.key_lens or (longest_k,) * batch
    for b, (len_q, len_k) in enumerate(zip(lens_q, lens_k, strict=True)):
        at_q, at_k = (slice(row_q, row_q + len_q), slice(row_k, row_k + len_k)) if case.lens_q else (b, b)
        row_q, row_k = row_q + len_q, row_k + len_k
        qb, kb, vb = (x.transpose(0, 1).double() for x in (q[at_q], k[at_k], v[at_k]))  # [H, S, D]
        scores = qb @ kb.mT * head_dim**-0.5
        if case.causal:
            scores = scores.masked_fill(torch.ones(len_q, len_k).triu(len_k - len_q + 1).bool(), -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)
        block = s_dmask[b, :, :len_q, :len_k]
        torch.testing.assert_close(block.abs().double(), weights, rtol=1e-5, atol=1e-6)
        seen = scores > -torch.inf
        assert torch.equal(block.signbit(), ~keep[b, :, :len_q, :len_k] & seen)
        # What flash_attn's own users do with it: rebuild the output.
        rebuilt = torch.where(block.signbit(), 0.0, block).double() @ vb / (1 - case.dropout_p)
        torch.testing.assert_close(out[at_q].transpose(0, 1).double(), rebuilt, rtol=1e-4, atol=1e-5)
        assert int(s_dmask[b, :, len_q:].count_nonzero() + s_dmask[b, :, :, len_k:].count_nonzero()) == 0


# ---- Packed gradients -------------------------------------------------------------------------------------------


PAIRS = ((_flash_attn_forward, _flash_attn_backward), (_flash_attn_varlen_forward, _flash_attn_varlen_backward))


class Recorder(TorchDispatchMode):
    """Every operator that runs: its name, and where its tensor arguments and results lie. It keeps no tensor alive,
    or autograd would have to copy gradients instead of keeping them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[int], list[int]]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else (result,)
        storages = [x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)]
        written = [x.data_ptr() for x in results if isinstance(x, torch.Tensor)]
        self.calls.append((function.name(), storages, written))
        return result

    def only(self, name: str) -> tuple[list[int], list[int]]:
        found = [(storages, written) for called, storages, written in self.calls if called == name]
        assert len(found) == 1, f"{name} was called {len(found)} times"
        return found[0]


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("packing", ["qkv", "kv"])
def test_packed_gradients_are_written_in_place(packing: str, varlen: bool) -> None:
    """The kernel reads views of the packed input, writes slices of one tensor, and that tensor is the gradient."""
    rows = (40,) if varlen else (2, 20)
    packed = torch.randn(*rows, len(packing), 2, 8, requires_grad=True)
    q = torch.randn(*rows, 2, 8, requires_grad=True)
    cu = torch.tensor([0, 15, 40], dtype=torch.int32)
    args = {(True, "qkv"): (packed, cu, 25), (True, "kv"): (q, packed, cu, cu, 25, 25),
            (False, "qkv"): (packed,), (False, "kv"): (q, packed)}[varlen, packing]  # fmt: skip
    function = getattr(diyfa, f"flash_attn_{'varlen_' if varlen else ''}{packing}packed_func")
    with Recorder() as forward:
        out = function(*args)
    storages, _ = forward.only("diyfa::attention_fwd")
    base = packed.untyped_storage().data_ptr()
    assert [x == base for x in storages[:3]] == [packing == "qkv", True, True]
    dout = torch.randn_like(out)
    with Recorder() as backward:
        out.backward(dout)
    _, gradients = backward.only("diyfa::attention_bwd")
    assert packed.grad is not None
    assert packed.grad.data_ptr() == (gradients[0] if packing == "qkv" else gradients[1])
    assert packed.grad.shape == packed.shape and packed.grad.is_contiguous()
    names = {name for name, _, _ in [*forward.calls, *backward.calls]}
    assert not names & {"aten::cat", "aten::stack", "aten::copy_", "aten::clone", "aten::_to_copy", "aten::add.Tensor"}


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("backend", TARGETS)
def test_private_backward_reads_out_once(backend: str, varlen: bool) -> None:
    """rowsum(dout · out) is what the kernels form on the way, not a second pass over both."""
    rows = (45,) if varlen else (2, 20)
    target = TARGETS[backend]
    q, k, v, dout = (torch.randn(*rows, 2, 16).to(target.device) for _ in range(4))
    cu = torch.tensor([3, 15, 15, 40], dtype=torch.int32).to(target.device)  # an empty sequence, and rows of none
    lengths = (cu, cu, 25, 25) if varlen else ()
    forward, backward = PAIRS[varlen]
    with diyfa.use_backend(target.backend):
        out, lse, _, _ = forward(q, k, v, *lengths, 0.0, 0.3, True, -1, -1, 0.0, None, False)
        arguments = (dout, q, k, v, out, lse, None, None, None, *lengths, 0.0, 0.3, True, -1, -1, 0.0, None, False)
        with Recorder() as recorder:
            delta = backward(*arguments).cpu()
    names = {name for name, _, _ in recorder.calls}
    assert names <= {"diyfa::attention_bwd_out", "aten::empty_like", "aten::_to_copy"}
    expected = (dout.cpu() * out.cpu()).sum(-1).transpose(-1, -2)
    if varlen:
        expected[:, :3] = expected[:, 40:] = 0.0
    torch.testing.assert_close(delta, expected)


@pytest.mark.parametrize("backend", TARGETS)
def test_private_backward_reads_rows_of_sequences_only(backend: str) -> None:
    """NaN before the first sequence and after the last one gets into nothing, delta included."""
    target = TARGETS[backend]
    cu = torch.tensor([3, 90, 90, 140], dtype=torch.int32)
    outside = torch.ones(150, dtype=torch.bool)
    outside[3:140] = False
    q, k, v, dout = (torch.randn(150, 2, 16) for _ in range(4))
    for x in (q, k, v, dout):
        x[outside] = float("nan")
    q, k, v, dout, cu = (x.to(target.device) for x in (q, k, v, dout, cu))
    rest = (cu, cu, 87, 87, 0.0, 0.3, True, -1, -1, 0.0, None)
    with diyfa.use_backend(target.backend):
        out, lse, _, _ = _flash_attn_varlen_forward(q, k, v, *rest, False)
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        delta = _flash_attn_varlen_backward(dout, q, k, v, out, lse, *gradients, *rest, False)
    expected = (dout.cpu() * out.cpu()).sum(-1).transpose(-1, -2)
    expected[:, outside] = 0.0
    torch.testing.assert_close(delta.cpu(), expected)
    for x in gradients:
        assert x.cpu().isfinite().all() and not x.cpu()[outside].any()


# ---- Refusals ---------------------------------------------------------------------------------------------------

Q = torch.zeros(2, 8, 4, 16, dtype=F16)
T = torch.zeros(8, 4, 16, dtype=F16)
CU = torch.tensor([0, 3, 8], dtype=torch.int32)
PACKED = (T, T, T, CU, CU, 5, 5)
ERRORS = {
    "scale": (flash_attn_func, (Q, Q, Q), {"softmax_scale": float("nan")}, ValueError, "softmax_scale must be finite"),
    "window": (flash_attn_func, (Q, Q, Q), {"window_size": 4}, TypeError, "window_size must be a pair"),
    "alibi": (flash_attn_func, (Q, Q, Q), {"alibi_slopes": [1.0] * 4}, TypeError, r"alibi_slopes must be a torch\.Ten"),
    "qkv_rank": (flash_attn_qkvpacked_func, (Q,), {}, ValueError, r"qkv must have shape \(batch, seqlen, 3, heads"),
    "qkv_parts": (flash_attn_qkvpacked_func, (Q[:, :, None],), {}, ValueError, r"qkv must.*got \(2, 8, 1, 4, 16\)"),
    "qkv_type": (flash_attn_qkvpacked_func, (None,), {}, TypeError, r"qkv must be a torch\.Tensor"),
    "kv_parts": (flash_attn_kvpacked_func, (Q, Q[:, :, None]), {}, ValueError, r"kv must have shape.*seqlen, 2"),
    "varlen_rank": (flash_attn_varlen_func, (Q, *PACKED[1:]), {}, ValueError, r"packed \(total, heads, head_dim\)"),
    "varlen_qkv": (flash_attn_varlen_qkvpacked_func, (T, CU, 5), {}, ValueError, r"qkv must have shape \(total, 3"),
    "varlen_kv": (flash_attn_varlen_kvpacked_func, (T, T, *PACKED[3:]), {}, ValueError, r"kv must have .*\(total, 2"),
    "pages": (flash_attn_varlen_func, PACKED, {"block_table": CU[None]}, ValueError, r"k \(pages, page size"),
    "leftpad": (_flash_attn_varlen_forward, (*PACKED, 0.0, None, False), {"leftpad_k": CU}, ValueError, "leftpad_k"),
    "seqused": (_flash_attn_varlen_forward, (*PACKED, 0.0, None, False), {"seqused_k": CU}, ValueError, "seqused_k"),
    "swapped": (flash_attn_func, (Q, Q, Q, 0.0, True, 0.25), {}, TypeError, r"got 0\.25; .*softmax_scale="),
    "probs": (flash_attn_func, (Q, Q, Q), {"return_attn_probs": "no"}, TypeError, "return_attn_probs must be True"),
    "return_softmax": (_flash_attn_forward, (Q, Q, Q, 0.0, None, False, -1, -1, 0.0, None, True), {}, ValueError,
                       "dropout_p > 0"),
    "return_softmax_over_pages": (_flash_attn_varlen_forward, (*PACKED, 0.0, None, False),
                                  {"return_softmax": True, "seqused_k": CU[1:]}, ValueError, "dropout_p > 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_come_before_any_launch(name: str) -> None:
    function, args, kwargs, exception, pattern = ERRORS[name]
    with Recorder() as recorder, pytest.raises(exception, match=pattern):
        function(*args, **kwargs)
    assert not [called for called, _, _ in recorder.calls if called.startswith("diyfa::")]


# ---- The private pairs ------------------------------------------------------------------------------------------


def test_ring_attention() -> None:
    """One process's share of ring attention for each block of keys: the global out and lse give the gradients of the
    whole. tests/integrations/test_pytorch_flash.py has the same of dense tensors."""
    q, dout = (torch.randn(24, 4, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(24, 2, 8, dtype=torch.float64) for _ in range(2))
    lengths = (torch.tensor([0, 24], dtype=torch.int32), torch.tensor([0, 8], dtype=torch.int32), 24, 8)
    rest = (*lengths, 0.0, 8**-0.5, False, -1, -1, 0.0, None)
    blocks = list(zip(k.chunk(3), v.chunk(3), strict=True))
    parts = [_flash_attn_varlen_forward(q, *block, *rest)[:2] for block in blocks]
    lse = torch.stack([part_lse for _, part_lse in parts]).logsumexp(0)
    out = sum(part * (part_lse - lse).exp().transpose(-1, -2)[..., None] for part, part_lse in parts)
    dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
    for block, gradients in zip(blocks, zip(dk.chunk(3), dv.chunk(3), strict=True), strict=True):
        dq_block = torch.full_like(q, float("nan"))
        _flash_attn_varlen_backward(dout, q, *block, out, lse, dq_block, *gradients, *rest, False)
        dq += dq_block
    leaves = [x.requires_grad_() for x in (q, k, v)]
    want, want_lse = diyfa.reference_attention(*(x[None] for x in leaves), layout="bshd", return_lse=True)
    expected = (want[0], want_lse[0], *torch.autograd.grad(want, leaves, dout[None]))
    torch.testing.assert_close((out, lse, dq, dk, dv), expected)


@pytest.mark.parametrize("varlen", [False, True])
def test_private_backward_repeats_the_dropout(varlen: bool) -> None:
    """The rng_state of the forward pass gives the gradients of that very mask."""
    rows = (30,) if varlen else (2, 15)
    q, k, v = (torch.randn(*rows, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 11, 30], dtype=torch.int32)
    lengths = (cu, cu, 19, 19) if varlen else ()
    forward, backward = PAIRS[varlen]
    out, lse, s_dmask, rng_state = forward(q, k, v, *lengths, 0.4, None, True, 5, -1, 2.0, None, True)
    assert rng_state.shape == (2,) and rng_state.dtype == torch.int64 and not out.requires_grad
    assert bool(s_dmask.signbit().any())
    packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu} if varlen else {}
    want = diyfa.reference_attention(
        q, k, v, True, window=(5, -1), softcap=2.0, dropout_p=0.4, rng_state=rng_state,
        layout="thd" if varlen else "bshd", **packed,
    )  # fmt: skip
    torch.testing.assert_close(out, want)
    dout = torch.randn_like(out)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    backward(dout, q, k, v, out, lse, *gradients, *lengths, 0.4, None, True, 5, -1, 2.0, None, True, rng_state)
    torch.testing.assert_close(tuple(gradients), torch.autograd.grad(want, (q, k, v), dout))
    with pytest.raises(ValueError, match="needs the rng_state"):
        backward(dout, q, k, v, out, lse, *gradients, *lengths, 0.4, None, True, 5, -1, 2.0, None, True)


def test_private_backward_fills_slices_only() -> None:
    """Gradients may be parts of larger buffers, and may be left out."""
    q, k, v = (torch.randn(2, 9, 2, 8) for _ in range(3))
    rest = (0.0, None, True, -1, -1, 0.0, None)
    out, lse, _, _ = _flash_attn_forward(q, k, v, *rest, False)
    dout = torch.randn_like(out).transpose(1, 2).contiguous().transpose(1, 2)
    buffers = torch.full((2, 12, 3, 2, 8), 7.0)
    _flash_attn_backward(dout, q, k, v, out, lse, *buffers[:, :9].unbind(2), *rest, False)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(diyfa.reference_attention(*leaves, True, layout="bshd"), leaves, dout)
    torch.testing.assert_close(torch.stack(expected, 2), buffers[:, :9])
    assert bool((buffers[:, 9:] == 7.0).all())
    dk = torch.empty_like(k)
    _flash_attn_backward(dout, q, k, v, out, lse, None, dk, None, *rest, False)
    torch.testing.assert_close(dk, expected[1])


@pytest.mark.parametrize(
    ("changed", "exception", "pattern"),
    [
        ({"out": Q[:, :4]}, ValueError, r"out must have shape \(2, 8, 4, 16\), got \(2, 4, 4, 16\)"),
        ({"dout": Q.float()}, TypeError, "dout must be float16, got float32"),
        ({"softmax_lse": torch.zeros(2, 8, 4)}, ValueError, r"softmax_lse must have shape \(2, 4, 8\)"),
        ({"softmax_lse": torch.zeros(2, 4, 8).half()}, TypeError, "softmax_lse must be float32"),
        ({"dq": torch.zeros(2, 8, 4, 32).half()[..., ::2]}, ValueError, "dq must have stride 1"),
        ({"dq": Q[:1].clone().expand(2, 8, 4, 16)}, ValueError, "dq must not be expanded where it is written"),
        ({"dq": Q.sum()}, ValueError, r"dq must have shape \(2, 8, 4, 16\), got \(\)"),
        ({"dk": Q.to("meta")}, ValueError, "same device"),
        ({"dv": [1]}, TypeError, r"dv must be a torch\.Tensor"),
        ({"dropout_p": 0.5, "rng_state": CU}, TypeError, "rng_state must be int64"),
        ({"dropout_p": CU}, TypeError, "dropout_p must be a number, got Tensor"),
    ],
)
def test_private_backward_errors(changed: dict[str, Any], exception: type[Exception], pattern: str) -> None:
    arguments = {name: Q.clone() for name in ("dout", "q", "k", "v", "out", "dq", "dk", "dv")}
    arguments |= {"softmax_lse": torch.zeros(2, 4, 8), "dropout_p": 0.0, "softmax_scale": None, "causal": False}
    arguments |= {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}
    with pytest.raises(exception, match=pattern):
        _flash_attn_backward(**{**arguments, "deterministic": False, **changed})
